//! A server whose answer depends on the first label of the name.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket as StdUdpSocket},
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, UdpSocket},
    task::JoinSet,
};

use super::{
    Space,
    message::{A, AAAA, NXDOMAIN, TXT, address, alias, answer, name, record},
};

/// What is asked, in lower case.
fn asked(query: &[u8]) -> String {
    let (mut labels, mut rest) = (Vec::new(), &query[12..]);
    while rest[0] != 0 {
        let (label, after) = rest[1..].split_at(rest[0].into());
        labels.push(String::from_utf8_lossy(label).to_lowercase());
        rest = after;
    }
    labels.join(".")
}

/// The answer to a query; `None` if it has none.
pub fn answer_to(query: &[u8], tcp: bool) -> Option<Vec<u8>> {
    let text = asked(query);
    let end = 12 + name(&text).len();
    let v6 = query[end + 1] == 28;
    Some(match text.split('.').next()? {
        "silent" => return None,
        "nx" => answer(query, NXDOMAIN, &[]),
        "chain" => answer(
            query,
            0,
            &[
                alias(&text, "b.cdn.example", 60),
                alias("b.cdn.example", "c.cdn.example", 30),
                address("c.cdn.example", "192.0.2.3", 300),
                address("evil.example", "192.0.2.66", 300),
            ],
        ),
        // What came, without the id, in a record of a type that nobody knows.
        "echo" => answer(query, 0, &[record(&[0xc0, 12], 65_280, 1, &query[2..])]),
        "huge" if !tcp => {
            let mut cut = answer(query, 0, &[address(&text, "192.0.2.1", 60)]);
            cut[2] |= 2;
            cut
        }
        "huge" => answer(query, 0, &vec![record(&[0xc0, 12], TXT, 60, &[b'x'; 1000]); 60]),
        "large" => answer(query, 0, &[record(&[0xc0, 12], TXT, 60, &[b'x'; 4000]), address(&text, "192.0.2.1", 60)]),
        "unreadable" => answer(query, 0, &[record(&[0xc0, 12], A, 60, &[1, 2, 3])]),
        _ if v6 => answer(
            query,
            0,
            &[record(&[0xc0, 12], AAAA, 60, &[0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1])],
        ),
        _ => answer(query, 0, &[address(&text, "192.0.2.1", 60)]),
    })
}

/// Queries that came, with who asked.
pub type Seen = Arc<Mutex<Vec<(SocketAddr, Vec<u8>)>>>;

/// A server; it ends when it is dropped.
pub struct Resolver {
    pub seen: Seen,
    _tasks: JoinSet<()>,
}

impl Resolver {
    /// Serves port 53 of these addresses of a namespace, of this thread's own without one.
    pub fn start(space: Option<&Space>, addresses: &[&str]) -> Self {
        let (seen, mut tasks) = (Seen::default(), JoinSet::new());
        for address in addresses {
            let ip: IpAddr = address.parse().expect("an address");
            let bind = move || {
                let udp = StdUdpSocket::bind((ip, 53)).expect("port 53 of UDP");
                udp.set_nonblocking(true).expect("nonblocking");
                let tcp = std::net::TcpListener::bind((ip, 53)).expect("port 53 of TCP");
                tcp.set_nonblocking(true).expect("nonblocking");
                (udp, tcp)
            };
            let (udp, tcp) = space.map_or_else(bind, |space| space.run(bind));
            let udp = UdpSocket::from_std(udp).expect("a socket");
            let tcp = TcpListener::from_std(tcp).expect("a listener");
            tasks.spawn(serve_udp(udp, Arc::clone(&seen)));
            tasks.spawn(serve_tcp(tcp, Arc::clone(&seen)));
        }
        Self { seen, _tasks: tasks }
    }

    pub fn take(&self) -> Vec<(SocketAddr, Vec<u8>)> {
        std::mem::take(&mut self.seen.lock().expect("no panic"))
    }

    /// Waits until so many queries have come.
    pub async fn until(&self, count: usize) {
        let come = async {
            while self.seen.lock().expect("no panic").len() < count {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(super::LONG, come).await.expect("the queries come");
    }
}

async fn serve_udp(socket: UdpSocket, seen: Seen) {
    let mut buffer = vec![0; 65_535];
    loop {
        // An error is that of an earlier answer.
        let Ok((length, client)) = socket.recv_from(&mut buffer).await else { continue };
        let query = &buffer[..length];
        seen.lock().expect("no panic").push((client, query.to_vec()));
        if let Some(answer) = answer_to(query, false) {
            socket.send_to(&answer, client).await.expect("sent");
        }
    }
}

async fn serve_tcp(listener: TcpListener, seen: Seen) {
    let mut connections = JoinSet::new();
    loop {
        let (stream, client) = listener.accept().await.expect("a connection");
        connections.spawn(connection(stream, client, Arc::clone(&seen)));
    }
}

async fn connection(mut stream: TcpStream, client: SocketAddr, seen: Seen) {
    while let Some(query) = read(&mut stream).await {
        seen.lock().expect("no panic").push((client, query.clone()));
        match asked(&query).split('.').next() {
            Some("closing") => return,
            Some("late") => tokio::time::sleep(Duration::from_millis(500)).await,
            _ => {}
        }
        if let Some(answer) = answer_to(&query, true) {
            write(&mut stream, &answer).await;
        }
    }
}

/// The next message of a connection (RFC 1035, section 4.2.2); `None` at its end.
pub async fn read(stream: &mut TcpStream) -> Option<Vec<u8>> {
    let length = stream.read_u16().await.ok()?;
    let mut message = vec![0; length.into()];
    stream.read_exact(&mut message).await.ok()?;
    Some(message)
}

pub async fn write(stream: &mut TcpStream, message: &[u8]) {
    let mut bytes = u16::try_from(message.len()).expect("a short message").to_be_bytes().to_vec();
    bytes.extend(message);
    stream.write_all(&bytes).await.expect("written");
}
