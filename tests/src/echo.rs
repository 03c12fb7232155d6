//! TCP and UDP echo: a server in one namespace, clients in others.

use std::{
    io::{ErrorKind, Read, Write},
    net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use crate::space::Space;

/// How often a server looks whether it is to stop.
const TICK: Duration = Duration::from_millis(20);
/// How long a client waits for its echo.
const PATIENCE: Duration = Duration::from_secs(5);

/// Echoes TCP and UDP of both families, on every address of its namespace, until dropped.
#[derive(Debug)]
pub struct EchoServer {
    tcp: u16,
    udp: u16,
    stop: Arc<AtomicBool>,
    datagrams: Arc<AtomicU64>,
    threads: Vec<JoinHandle<()>>,
}

impl EchoServer {
    /// Starts one.
    ///
    /// # Errors
    /// When no socket can be bound.
    pub fn start(space: &Space) -> Result<Self> {
        let (listener, socket) = space.run(|| {
            let any = SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0));
            anyhow::Ok((TcpListener::bind(any)?, UdpSocket::bind(any)?))
        })??;
        listener.set_nonblocking(true).context("make the listener non-blocking")?;
        socket.set_read_timeout(Some(TICK)).context("set a time limit")?;
        let (tcp, udp) = (listener.local_addr()?.port(), socket.local_addr()?.port());
        let (stop, datagrams) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let threads = vec![
            thread::spawn({
                let stop = Arc::clone(&stop);
                move || serve_tcp(&listener, &stop)
            }),
            thread::spawn({
                let (stop, datagrams) = (Arc::clone(&stop), Arc::clone(&datagrams));
                move || serve_udp(&socket, &stop, &datagrams)
            }),
        ];
        Ok(Self { tcp, udp, stop, datagrams, threads })
    }

    /// Where its TCP side is, at one of its namespace's addresses.
    #[must_use]
    pub fn tcp_at(&self, address: IpAddr) -> SocketAddr {
        SocketAddr::new(address, self.tcp)
    }

    /// Where its UDP side is.
    #[must_use]
    pub fn udp_at(&self, address: IpAddr) -> SocketAddr {
        SocketAddr::new(address, self.udp)
    }

    /// UDP datagrams that arrived so far.
    #[must_use]
    pub fn datagrams(&self) -> u64 {
        self.datagrams.load(Ordering::Relaxed)
    }
}

impl Drop for EchoServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A panic of an echo thread was printed, and the client saw no echo.
            thread.join().ok();
        }
    }
}

fn serve_tcp(listener: &TcpListener, stop: &AtomicBool) {
    thread::scope(|scope| {
        while !stop.load(Ordering::Relaxed) {
            match listener.accept() {
                Ok((stream, _)) => {
                    scope.spawn(move || echo_stream(stream, stop));
                }
                Err(_) => thread::sleep(Duration::from_millis(2)),
            }
        }
    });
}

fn echo_stream(mut stream: TcpStream, stop: &AtomicBool) {
    if stream.set_nonblocking(false).is_err() || stream.set_read_timeout(Some(TICK)).is_err() {
        return;
    }
    let mut buffer = vec![0; 65_536];
    while !stop.load(Ordering::Relaxed) {
        match stream.read(&mut buffer) {
            Ok(0) => return,
            Ok(n) => {
                if stream.write_all(buffer.get(..n).unwrap_or_default()).is_err() {
                    return;
                }
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) => {}
            Err(_) => return,
        }
    }
}

fn serve_udp(socket: &UdpSocket, stop: &AtomicBool, datagrams: &AtomicU64) {
    let mut buffer = vec![0; 65_536];
    while !stop.load(Ordering::Relaxed) {
        if let Ok((n, from)) = socket.recv_from(&mut buffer) {
            datagrams.fetch_add(1, Ordering::Relaxed);
            // An echo that cannot be sent is one the client misses and reports.
            socket.send_to(buffer.get(..n).unwrap_or_default(), from).ok();
        }
    }
}

/// Sends bytes over TCP and reads them back; every byte must be the same.
///
/// # Errors
/// When the connection fails, breaks, or gives other bytes.
pub fn tcp(from: &Space, to: SocketAddr, bytes: usize) -> Result<()> {
    let stream = from.run(|| TcpStream::connect_timeout(&to, PATIENCE))?;
    let mut stream = stream.with_context(|| format!("connect {to}"))?;
    stream.set_read_timeout(Some(PATIENCE)).context("set a time limit")?;
    let sent = pattern(bytes);
    let mut received = vec![0; bytes];
    let mut writer = stream.try_clone().context("copy the stream")?;
    thread::scope(|scope| {
        let writing = scope.spawn(|| writer.write_all(&sent));
        stream.read_exact(&mut received).with_context(|| format!("read the echo from {to}"))?;
        match writing.join() {
            Ok(written) => written.with_context(|| format!("write to {to}")),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })?;
    ensure!(sent == received, "{to} echoed other bytes than were sent");
    Ok(())
}

/// Sends one UDP datagram and waits for its echo.
///
/// # Errors
/// When it cannot be sent, or does not come back the same.
pub fn udp(from: &Space, to: SocketAddr, bytes: usize) -> Result<()> {
    let socket = udp_client(from, to)?;
    let sent = pattern(bytes);
    socket.send(&sent).with_context(|| format!("send {bytes} bytes to {to}"))?;
    let mut buffer = vec![0; 65_536];
    let end = Instant::now() + PATIENCE;
    while Instant::now() < end {
        match socket.recv(&mut buffer) {
            Ok(n) => {
                ensure!(buffer.get(..n) == Some(sent.as_slice()), "{to} echoed other bytes than were sent");
                return Ok(());
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(e) => return Err(e).with_context(|| format!("receive the echo from {to}")),
        }
    }
    bail!("no echo of {bytes} bytes from {to} within {PATIENCE:?}")
}

/// A UDP socket in `from`, connected to `to`.
///
/// # Errors
/// When it cannot be made or connected.
pub fn udp_client(from: &Space, to: SocketAddr) -> Result<UdpSocket> {
    let any: SocketAddr = if to.is_ipv6() { (Ipv6Addr::UNSPECIFIED, 0).into() } else { ([0, 0, 0, 0], 0).into() };
    let socket = from.run(|| UdpSocket::bind(any))?.context("bind a UDP socket")?;
    socket.connect(to).with_context(|| format!("connect {to}"))?;
    socket.set_read_timeout(Some(TICK)).context("set a time limit")?;
    Ok(socket)
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..=250_u8).cycle().take(bytes).collect()
}
