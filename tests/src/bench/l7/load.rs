//! A web server with small answers, and clients that ask it again and again. Each is one thread that looks after all of
//! its connections, so that most of the processors' time is left to what lies between them.

use std::{
    net::SocketAddr,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    runtime::Runtime,
    sync::oneshot,
    task::JoinSet,
};

use super::documents::ALLOWED;
use crate::{bench::stats::Summary, space::Space, wait};

/// Connections at once, each with one request on its way.
pub(super) const CONNECTIONS: usize = 16;
/// Requests of a connection that are not counted.
const WARM_UP: usize = 50;
/// Bytes of a request's head, and of an answer.
const MOST: usize = 4096;
/// What the server answers.
const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

/// Answers every request with the same two bytes, until it is dropped.
pub(super) struct Server {
    /// Dropped first: the thread ends then.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Server {
    /// Starts one.
    pub(super) fn start(space: &Space, at: SocketAddr) -> Result<Self> {
        let listener = space.run(|| std::net::TcpListener::bind(at))?.with_context(|| format!("bind {at}"))?;
        listener.set_nonblocking(true).context("make the listener non-blocking")?;
        let (stop, stopped) = oneshot::channel();
        let thread = thread::spawn(move || runtime()?.block_on(serve(listener, stopped)));
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }

    /// The end; tells what went wrong meanwhile.
    pub(super) fn finish(mut self) -> Result<()> {
        self.stop = None;
        let thread = self.thread.take().context("the server's thread")?;
        thread.join().map_err(|_| anyhow!("the server panicked"))?
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // Whoever wants to know how it ended calls `finish`.
            thread.join().ok();
        }
    }
}

fn runtime() -> Result<Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().context("start a tokio runtime")
}

async fn serve(listener: std::net::TcpListener, mut stopped: oneshot::Receiver<()>) -> Result<()> {
    let listener = TcpListener::from_std(listener).context("take the listener")?;
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            _ = &mut stopped => return Ok(()),
            accepted = listener.accept() => {
                let (stream, _) = accepted.context("accept")?;
                stream.set_nodelay(true).context("set TCP_NODELAY")?;
                connections.spawn(answer(stream));
            }
            // A client that goes away is the client's matter.
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn answer(mut stream: TcpStream) -> Result<()> {
    let mut head = Vec::with_capacity(MOST);
    loop {
        ensure!(head.len() < MOST && stream.read_buf(&mut head).await? > 0, "the connection ended");
        if head.ends_with(b"\r\n\r\n") {
            head.clear();
            stream.write_all(ANSWER).await?;
        }
    }
}

/// What clients found.
#[derive(Debug, Clone, Copy)]
pub(super) struct Load {
    /// Requests a second, of all connections.
    pub(super) rate: f64,
    /// Median of the time from a request to its answer, microseconds.
    pub(super) median_us: f64,
}

/// Asks over [`CONNECTIONS`] connections for about `span`.
pub(super) fn ask(from: &Space, to: SocketAddr, span: Duration) -> Result<Load> {
    let asking =
        || runtime()?.block_on(async { tokio::time::timeout(span + wait::PATIENCE, ask_all(to, span)).await? });
    from.run(asking)?.with_context(|| format!("ask {to}"))
}

async fn ask_all(to: SocketAddr, span: Duration) -> Result<Load> {
    let clients = futures_in_order((0..CONNECTIONS).map(|_| Client::warm(to))).await?;
    let start = Instant::now();
    let samples = futures_in_order(clients.into_iter().map(|client| client.run(start + span))).await?.concat();
    let took = start.elapsed();
    let median_us = Summary::of(&samples).context("no request was answered")?.median;
    // Far below 2^53: exact.
    Ok(Load { rate: samples.len() as f64 / took.as_secs_f64(), median_us })
}

/// Runs all of them side by side on this thread.
async fn futures_in_order<T: 'static>(
    all: impl Iterator<Item = impl Future<Output = Result<T>> + 'static>,
) -> Result<Vec<T>> {
    let local = tokio::task::LocalSet::new();
    let mut results = Vec::new();
    local
        .run_until(async {
            let tasks: Vec<_> = all.map(tokio::task::spawn_local).collect();
            for task in tasks {
                results.push(task.await.map_err(|_| anyhow!("a client panicked"))??);
            }
            Ok(results)
        })
        .await
}

/// A connection.
struct Client {
    stream: TcpStream,
    request: Vec<u8>,
    answer: Vec<u8>,
}

impl Client {
    async fn warm(to: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(to).await.context("connect")?;
        stream.set_nodelay(true).context("set TCP_NODELAY")?;
        let request = format!("GET {ALLOWED} HTTP/1.1\r\nHost: server\r\n\r\n").into_bytes();
        let mut client = Self { stream, request, answer: Vec::with_capacity(MOST) };
        for _ in 0..WARM_UP {
            client.one().await?;
        }
        Ok(client)
    }

    /// Microseconds of each request until `end`.
    async fn run(mut self, end: Instant) -> Result<Vec<f64>> {
        let mut samples = Vec::new();
        loop {
            let before = Instant::now();
            if before >= end {
                return Ok(samples);
            }
            self.one().await?;
            samples.push(before.elapsed().as_secs_f64() * 1e6);
        }
    }

    async fn one(&mut self) -> Result<()> {
        self.stream.write_all(&self.request).await.context("ask")?;
        self.answer.clear();
        loop {
            ensure!(self.answer.len() < MOST, "an answer of more than {MOST} bytes");
            ensure!(self.stream.read_buf(&mut self.answer).await.context("wait for an answer")? > 0, "cut off");
            match length(&self.answer)? {
                Some(length) if self.answer.len() == length => return Ok(()),
                Some(length) if self.answer.len() > length => bail!("more than the answer"),
                _ => {}
            }
        }
    }
}

/// Bytes of the whole answer that begins so; `None` while its head is not complete.
fn length(answer: &[u8]) -> Result<Option<usize>> {
    let Some(end) = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n") else { return Ok(None) };
    let head = std::str::from_utf8(answer.get(..end).unwrap_or_default()).context("a head that is no text")?;
    let mut lines = head.split("\r\n");
    let status = lines.next().unwrap_or_default();
    ensure!(status.starts_with("HTTP/1.1 200 "), "{status}");
    let field =
        lines.filter_map(|line| line.split_once(':')).find(|(name, _)| name.eq_ignore_ascii_case("content-length"));
    let body: usize = field.context("no length")?.1.trim().parse().context("length")?;
    Ok(Some(end + 4 + body))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_whole_with_its_body() {
        assert_eq!(length(ANSWER).unwrap(), Some(ANSWER.len()));
        assert_eq!(length(&ANSWER[..30]).unwrap(), None);
        assert!(length(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n").is_err());
        assert!(length(b"HTTP/1.1 200 OK\r\n\r\n").is_err());
    }

    #[test]
    fn clients_are_answered_and_the_server_ends() -> Result<()> {
        let space = Space::open(std::path::Path::new("/proc/self/ns/net"))?;
        let at = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let server = Server::start(&space, at)?;
        let load = ask(&space, at, Duration::from_millis(20))?;
        ensure!(load.rate > 0.0 && load.median_us > 0.0, "{load:?}");
        server.finish()
    }
}
