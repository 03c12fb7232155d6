//! The plainest web server and client, over TCP.

use std::{
    io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _},
    net::{Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};

use crate::{space::Space, wait};

/// How often the accepting thread looks whether it is to end.
const TICK: Duration = Duration::from_millis(20);
/// How long a client waits for each answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// A header with which a request asks the server to close the connection after the answer. A proxy passes it on, unlike
/// `Connection`.
pub const ONCE: &str = "X-Once: yes\r\n";

/// Answers every request with its own request line; on every address of its namespace, until dropped.
#[derive(Debug)]
pub struct WebServer {
    port: u16,
    stop: Arc<AtomicBool>,
    served: Arc<Mutex<Vec<Served>>>,
    thread: Option<JoinHandle<()>>,
}

/// A request that came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Served {
    /// Where it came from.
    pub client: SocketAddr,
    /// Request line and headers, without line ends.
    pub head: Vec<String>,
}

impl WebServer {
    /// Starts one at a port.
    ///
    /// # Errors
    /// When no socket can be bound.
    pub fn start(space: &Space, port: u16) -> Result<Self> {
        let listener = space.run(|| TcpListener::bind(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port))))?;
        let listener = listener.context("bind the web server")?;
        listener.set_nonblocking(true).context("make the listener non-blocking")?;
        let port = listener.local_addr()?.port();
        let (stop, served) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let thread = thread::spawn({
            let (stop, served) = (Arc::clone(&stop), Arc::clone(&served));
            move || accept(&listener, &stop, &served)
        });
        Ok(Self { port, stop, served, thread: Some(thread) })
    }

    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// The requests that came, oldest first.
    #[must_use]
    pub fn served(&self) -> Vec<Served> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for WebServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

/// Takes connections, each with a thread of its own that waits in a read. At the end their streams are shut down, which
/// ends the reads.
fn accept(listener: &TcpListener, stop: &AtomicBool, served: &Arc<Mutex<Vec<Served>>>) {
    let mut open: Vec<(Weak<TcpStream>, JoinHandle<()>)> = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        match listener.accept() {
            Ok((stream, client)) => {
                let (stream, served) = (Arc::new(stream), Arc::clone(served));
                open.retain(|(_, thread)| !thread.is_finished());
                let other = Arc::downgrade(&stream);
                let thread = thread::spawn(move || {
                    // A client that goes away is the client's matter.
                    serve(&stream, client, &served).ok();
                });
                open.push((other, thread));
            }
            Err(_) => thread::sleep(TICK),
        }
    }
    for (stream, thread) in open {
        // A stream whose client has gone needs no shutdown.
        stream.upgrade().and_then(|stream| stream.shutdown(Shutdown::Both).ok());
        thread.join().ok();
    }
}

fn serve(mut stream: &TcpStream, client: SocketAddr, served: &Mutex<Vec<Served>>) -> Result<()> {
    stream.set_nonblocking(false)?;
    let mut reader = BufReader::new(stream);
    let (mut head, mut line) = (Vec::new(), String::new());
    while reader.read_line(&mut line)? > 0 {
        let text = line.trim_end().to_owned();
        line.clear();
        if !text.is_empty() {
            head.push(text);
            continue;
        }
        let body = head.first().cloned().unwrap_or_default();
        let once = head.iter().any(|line| line == ONCE.trim_end());
        served.lock().unwrap_or_else(PoisonError::into_inner).push(Served { client, head: std::mem::take(&mut head) });
        let close = if once { "Connection: close\r\n" } else { "" };
        // In one piece: a second small one would wait for the other side's delayed acknowledgement.
        let answer = format!("HTTP/1.1 200 OK\r\n{close}Content-Length: {}\r\n\r\n{body}", body.len());
        stream.write_all(answer.as_bytes())?;
        if once {
            break;
        }
    }
    Ok(())
}

/// A connection for one request after the other.
#[derive(Debug)]
pub struct WebClient(BufReader<TcpStream>);

impl WebClient {
    /// Connects from a namespace.
    ///
    /// # Errors
    /// When nobody answers.
    pub fn connect(from: &Space, to: SocketAddr) -> Result<Self> {
        let stream = from.run(|| TcpStream::connect_timeout(&to, wait::PATIENCE))?;
        let stream = stream.with_context(|| format!("connect {to}"))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Self(BufReader::new(stream)))
    }

    /// Its own address and port.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn local(&self) -> Result<SocketAddr> {
        let local = self.0.get_ref().local_addr().context("the connection's own address")?;
        Ok(SocketAddr::new(local.ip().to_canonical(), local.port()))
    }

    /// The status of the answer to a request. `more`: further header lines, each with its end.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn ask(&mut self, method: &str, path: &str, host: &str, more: &str) -> Result<u16> {
        let status = self.ask_if_open(method, path, host, more)?;
        status.with_context(|| format!("the connection ended before the answer to {method} {path}"))
    }

    /// As [`Self::ask`]; `None` when the connection ended before the first byte of the answer. The other side may close
    /// a connection between two requests (RFC 9112, section 9.3.1), and the client learns it by its next request.
    ///
    /// # Errors
    /// When there is no answer, or a part of one.
    pub fn ask_if_open(&mut self, method: &str, path: &str, host: &str, more: &str) -> Result<Option<u16>> {
        let request = format!("{method} {path} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n");
        let first = self.0.get_mut().write_all(request.as_bytes()).and_then(|()| Ok(self.0.fill_buf()?.is_empty()));
        match first {
            Ok(false) => {}
            Ok(true) => return Ok(None),
            Err(e) if matches!(e.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => return Ok(None),
            Err(e) => return Err(e).with_context(|| format!("no answer to {method} {path}")),
        }
        let (mut status, mut length) = (None, 0_usize);
        loop {
            let mut line = String::new();
            if self.0.read_line(&mut line).context("read the answer")? == 0 {
                bail!("the connection ended within the answer to {method} {path}");
            }
            let line = line.trim_end().to_ascii_lowercase();
            if line.is_empty() {
                break;
            }
            if let Some(value) = line.strip_prefix("content-length:") {
                length = value.trim().parse().context("length")?;
            }
            status = status.or_else(|| line.split(' ').nth(1)?.parse().ok());
        }
        let mut body = vec![0; length];
        self.0.read_exact(&mut body).context("read the body")?;
        status.context("no status").map(Some)
    }
}

/// The status of the answer to a GET over a connection of its own.
///
/// # Errors
/// When there is no answer.
pub fn get(from: &Space, to: SocketAddr, path: &str) -> Result<u16> {
    WebClient::connect(from, to)?.ask("GET", path, "web", "").with_context(|| format!("GET {path} from {to}"))
}
