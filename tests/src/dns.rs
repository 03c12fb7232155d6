//! The plainest resolver and client of DNS, over UDP and TCP.

use std::{
    collections::BTreeMap,
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};

use crate::space::Space;

/// IANA's port of DNS.
pub const PORT: u16 = 53;
/// How often a thread looks whether it is to end.
const TICK: Duration = Duration::from_millis(20);
/// How long a client waits for an answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Bytes before the question (RFC 1035, section 4.1.1).
const HEADER: usize = 12;
/// Codes of answers: there is no such name; the server refuses (RFC 1035, section 4.1.1).
pub const NXDOMAIN: u8 = 3;
/// See [`NXDOMAIN`].
pub const REFUSED: u8 = 5;

/// Addresses of names, in lower case without the last dot.
pub type Zone = BTreeMap<String, Vec<IpAddr>>;

/// Answers queries for A and AAAA from its zone, until dropped.
#[derive(Debug)]
pub struct DnsServer {
    stop: Arc<AtomicBool>,
    zone: Arc<Mutex<Zone>>,
    asked: Arc<Mutex<Vec<(SocketAddr, String)>>>,
    threads: Vec<JoinHandle<()>>,
}

impl DnsServer {
    /// Starts one at port 53 of these addresses.
    ///
    /// # Errors
    /// When no socket can be bound.
    pub fn start(space: &Space, at: &[IpAddr], zone: Zone) -> Result<Self> {
        let (stop, zone, asked) = (Arc::default(), Arc::new(Mutex::new(zone)), Arc::default());
        let mut server = Self { stop, zone, asked, threads: Vec::new() };
        for address in at {
            let address = SocketAddr::new(*address, PORT);
            let (udp, tcp) = space.run(|| (UdpSocket::bind(address), TcpListener::bind(address)))?;
            let (udp, tcp) = (udp.context("bind over UDP")?, tcp.context("bind over TCP")?);
            udp.set_read_timeout(Some(TICK))?;
            tcp.set_nonblocking(true)?;
            let (of_udp, of_tcp) = (server.part(), server.part());
            server.threads.push(thread::spawn(move || of_udp.udp(&udp)));
            server.threads.push(thread::spawn(move || of_tcp.tcp(&tcp)));
        }
        Ok(server)
    }

    fn part(&self) -> Part {
        let Self { stop, zone, asked, .. } = self;
        Part { stop: Arc::clone(stop), zone: Arc::clone(zone), asked: Arc::clone(asked) }
    }

    /// Gives it another zone.
    pub fn put(&self, zone: Zone) {
        *self.zone.lock().unwrap_or_else(PoisonError::into_inner) = zone;
    }

    /// Who asked for which name, oldest first.
    #[must_use]
    pub fn asked(&self) -> Vec<(SocketAddr, String)> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for DnsServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread.join().ok();
        }
    }
}

/// What a thread of the server needs.
struct Part {
    stop: Arc<AtomicBool>,
    zone: Arc<Mutex<Zone>>,
    asked: Arc<Mutex<Vec<(SocketAddr, String)>>>,
}

impl Part {
    fn udp(&self, socket: &UdpSocket) {
        let mut buffer = [0; 4_096];
        while !self.stop.load(Ordering::Relaxed) {
            let Ok((bytes, client)) = socket.recv_from(&mut buffer) else { continue };
            if let Some(answer) = buffer.get(..bytes).and_then(|query| self.answer(query, client)) {
                socket.send_to(&answer, client).ok();
            }
        }
    }

    fn tcp(&self, listener: &TcpListener) {
        while !self.stop.load(Ordering::Relaxed) {
            match listener.accept() {
                Ok((stream, client)) => drop(self.serve(stream, client)),
                Err(_) => thread::sleep(TICK),
            }
        }
    }

    fn serve(&self, mut stream: TcpStream, client: SocketAddr) -> Result<()> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        while let Some(query) = receive(&mut stream)? {
            let Some(answer) = self.answer(&query, client) else { break };
            send(&mut stream, &answer)?;
        }
        Ok(())
    }

    fn answer(&self, query: &[u8], client: SocketAddr) -> Option<Vec<u8>> {
        let (name, rtype, end) = question(query)?;
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).push((client, name.clone()));
        let zone = self.zone.lock().unwrap_or_else(PoisonError::into_inner);
        let known = zone.get(&name);
        let of_type = |address: &&IpAddr| rtype == if address.is_ipv4() { 1 } else { 28 };
        let found: Vec<&IpAddr> = known.into_iter().flatten().filter(of_type).collect();
        let mut answer = query.get(..end)?.to_vec();
        let rcode = if known.is_some() { 0 } else { NXDOMAIN };
        answer.get_mut(2..HEADER)?.copy_from_slice(&[
            0x81,
            0x80 | rcode,
            0,
            1,
            0,
            u8::try_from(found.len()).ok()?,
            0,
            0,
            0,
            0,
        ]);
        for address in found {
            let data = match address {
                IpAddr::V4(v4) => v4.octets().to_vec(),
                IpAddr::V6(v6) => v6.octets().to_vec(),
            };
            // The question's name, class IN, no time to live.
            answer.extend([0xc0, 12]);
            answer.extend(rtype.to_be_bytes());
            answer.extend([0, 1, 0, 0, 0, 0, 0, u8::try_from(data.len()).ok()?]);
            answer.extend(data);
        }
        Some(answer)
    }
}

/// Name, type, and the question's end.
fn question(message: &[u8]) -> Option<(String, u16, usize)> {
    let (mut at, mut labels) = (HEADER, Vec::new());
    loop {
        let size = usize::from(*message.get(at)?);
        at += 1;
        if size == 0 {
            break;
        }
        labels.push(String::from_utf8_lossy(message.get(at..at + size)?).to_lowercase());
        at += size;
    }
    let rtype = u16::from_be_bytes([*message.get(at)?, *message.get(at + 1)?]);
    Some((labels.join("."), rtype, at + 4))
}

fn query(name: &str, v6: bool) -> Vec<u8> {
    let mut query = vec![0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        query.push(u8::try_from(label.len()).unwrap_or(63));
        query.extend(label.bytes());
    }
    query.extend([0, 0, if v6 { 28 } else { 1 }, 0, 1]);
    query
}

fn send(stream: &mut TcpStream, message: &[u8]) -> Result<()> {
    let size = u16::try_from(message.len())?.to_be_bytes();
    Ok(stream.write_all(&[&size, message].concat())?)
}

/// The next message; `None` at the end.
fn receive(stream: &mut TcpStream) -> Result<Option<Vec<u8>>> {
    let mut size = [0; 2];
    match stream.read_exact(&mut size) {
        Ok(()) => {}
        Err(e) if e.kind() == ErrorKind::UnexpectedEof => return Ok(None),
        Err(e) => return Err(e.into()),
    }
    let mut message = vec![0; usize::from(u16::from_be_bytes(size))];
    stream.read_exact(&mut message)?;
    Ok(Some(message))
}

/// Over what is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Over {
    /// One datagram each.
    Udp,
    /// A connection of its own.
    Tcp,
}

/// Asks a server for a name's addresses of the server's own family; the answer's code and addresses.
///
/// # Errors
/// When no answer comes within 5 s, or none that is to the query.
pub fn ask(from: &Space, server: IpAddr, name: &str, over: Over) -> Result<(u8, Vec<IpAddr>)> {
    let (to, query) = (SocketAddr::new(server, PORT), query(name, server.is_ipv6()));
    let answer = match over {
        Over::Udp => from.run(|| -> Result<Vec<u8>> {
            let any: IpAddr = if server.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
            let socket = UdpSocket::bind((any, 0))?;
            socket.connect(to)?;
            socket.set_read_timeout(Some(PATIENCE))?;
            socket.send(&query)?;
            let mut buffer = vec![0; 4_096];
            let bytes = socket.recv(&mut buffer)?;
            buffer.truncate(bytes);
            Ok(buffer)
        })?,
        Over::Tcp => from.run(|| -> Result<Vec<u8>> {
            let mut stream = TcpStream::connect_timeout(&to, PATIENCE)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            send(&mut stream, &query)?;
            receive(&mut stream)?.context("the connection ended without an answer")
        })?,
    };
    let answer = answer.with_context(|| format!("ask {to} for {name} over {over:?}"))?;
    read(&query, &answer).with_context(|| format!("{to} answers {name} with {answer:x?}"))
}

fn read(query: &[u8], answer: &[u8]) -> Result<(u8, Vec<IpAddr>)> {
    let asked = query.get(HEADER..).context("a query without a question")?;
    ensure!(answer.get(..2) == query.get(..2), "another id");
    ensure!(answer.get(HEADER..query.len()) == Some(asked), "another question");
    let rcode = answer.get(3).context("no header")? & 0x0f;
    let mut rest = answer.get(query.len()..).unwrap_or_default();
    let mut addresses = Vec::new();
    while !rest.is_empty() {
        let (head, data) = rest.split_at_checked(12).context("a record cut short")?;
        let size = usize::from(*head.last().context("a size")?);
        let (data, after) = data.split_at_checked(size).context("a record cut short")?;
        addresses.push(match *data {
            [a, b, c, d] => IpAddr::from([a, b, c, d]),
            _ => match <[u8; 16]>::try_from(data) {
                Ok(v6) => IpAddr::from(v6),
                Err(_) => bail!("a record of {size} bytes"),
            },
        });
        rest = after;
    }
    Ok((rcode, addresses))
}
