//! The plainest web server and client, over TCP.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};

use crate::{space::Space, wait};

/// How often a thread looks whether it is to end.
const TICK: Duration = Duration::from_millis(20);
/// How long a client waits for each answer.
const PATIENCE: Duration = Duration::from_secs(5);

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

    /// Its port.
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

fn accept(listener: &TcpListener, stop: &Arc<AtomicBool>, served: &Arc<Mutex<Vec<Served>>>) {
    let mut threads = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        match listener.accept() {
            Ok((stream, client)) => {
                let (stop, served) = (Arc::clone(stop), Arc::clone(served));
                threads.push(thread::spawn(move || {
                    // A client that goes away is the client's matter.
                    serve(&stream, client, &stop, &served).ok();
                }));
            }
            Err(_) => thread::sleep(TICK),
        }
    }
    for thread in threads {
        thread.join().ok();
    }
}

fn serve(stream: &TcpStream, client: SocketAddr, stop: &AtomicBool, served: &Mutex<Vec<Served>>) -> Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(TICK))?;
    let mut reader = BufReader::new(stream);
    let mut head = Vec::new();
    let mut line = String::new();
    while !stop.load(Ordering::Relaxed) {
        match reader.read_line(&mut line) {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            Err(e) if matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) => continue,
            Err(e) => return Err(e.into()),
        }
        let text = line.trim_end().to_owned();
        line.clear();
        if !text.is_empty() {
            head.push(text);
            continue;
        }
        let body = head.first().cloned().unwrap_or_default();
        served.lock().unwrap_or_else(PoisonError::into_inner).push(Served { client, head: std::mem::take(&mut head) });
        write!(&mut &*stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len())?;
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

    /// The status of the answer to a request. `more`: further header lines, each with its end.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn ask(&mut self, method: &str, path: &str, host: &str, more: &str) -> Result<u16> {
        let request = format!("{method} {path} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n");
        self.0.get_mut().write_all(request.as_bytes()).context("send")?;
        let (mut status, mut length) = (None, 0_usize);
        loop {
            let mut line = String::new();
            if self.0.read_line(&mut line).context("read the answer")? == 0 {
                bail!("the connection ended before the answer to {method} {path}");
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
        status.context("no status")
    }
}

/// The status of the answer to a GET over a connection of its own.
///
/// # Errors
/// When there is no answer.
pub fn get(from: &Space, to: SocketAddr, path: &str) -> Result<u16> {
    WebClient::connect(from, to)?.ask("GET", path, "web", "").with_context(|| format!("GET {path} from {to}"))
}
