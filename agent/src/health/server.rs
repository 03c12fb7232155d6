//! The health endpoint's process, `wharf-agent health-endpoint`.
//!
//! It enters a new network namespace, listens, drops every capability, reports readiness, and answers `GET /hello`
//! until its standard input closes. Containers may connect too, so time, size and number of connections are limited.

use std::{
    collections::VecDeque,
    io::{self, BufRead, Read, Write},
    net::{Ipv4Addr, Ipv6Addr, TcpListener},
    process::ExitCode,
    time::Duration,
};

use caps::{CapSet, errors::CapsError};
use nix::{
    sched::{CloneFlags, unshare},
    sys::{
        prctl,
        resource::{Resource, setrlimit},
        signal::Signal,
    },
};
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::{AbortHandle, JoinSet},
    time::timeout,
};

/// First argument of this mode.
pub const MODE: &str = "health-endpoint";
/// Listening port, host byte order.
pub const PORT: u16 = 4240;
pub(super) const READY: &str = "ready";
/// Between agent and process, bytes.
pub(super) const MAX_LINE: u64 = 4_096;

const MAX_CONNECTIONS: usize = 32;
const MAX_FILES: u64 = 64;
/// For a connection.
const TIME_LIMIT: Duration = Duration::from_secs(2);
const MAX_HEAD: usize = 2_048;

/// Sent to the process, and by it to clients.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Node name.
    pub node: String,
    /// Random per launch; identifies the process.
    pub nonce: String,
}

#[derive(Debug, thiserror::Error)]
enum ChildError {
    #[error("{0}: {1}")]
    Io(&'static str, #[source] io::Error),
    #[error("{0}: {1}")]
    Kernel(&'static str, #[source] nix::Error),
    #[error("listen on port {PORT}: {0}")]
    Listen(#[source] io::Error),
    #[error("read what the agent says: {0}; this is a part of wharf-agent and is not run by hand")]
    NotHello(#[source] serde_json::Error),
    #[error("give up its capabilities: {0}")]
    Capabilities(#[from] CapsError),
}

/// Runs the process.
#[must_use]
pub fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&error.to_string());
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), ChildError> {
    let (listener, hello) = prepare()?;
    let served = tokio::runtime::Builder::new_current_thread().enable_all().build().and_then(|runtime| {
        watch_parent()?;
        say(READY);
        runtime.block_on(serve(listener, &hello))
    });
    served.map_err(|e| ChildError::Io("serve", e))
}

fn say(line: &str) {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).ok();
}

/// Needs capabilities and a single thread.
fn prepare() -> Result<(TcpListener, String), ChildError> {
    let io = |what| move |e| ChildError::Io(what, e);
    let kernel = |what| move |e| ChildError::Kernel(what, e);
    let mut line = String::new();
    io::stdin().lock().take(MAX_LINE).read_line(&mut line).map_err(io("read what the agent says"))?;
    let hello: Hello = serde_json::from_str(&line).map_err(ChildError::NotHello)?;
    let hello = serde_json::to_string(&hello).map_err(|e| io("write the answer")(e.into()))?;
    unshare(CloneFlags::CLONE_NEWNET).map_err(kernel("enter a network namespace of its own"))?;
    let listener = listen().map_err(ChildError::Listen)?;
    setrlimit(Resource::RLIMIT_NOFILE, MAX_FILES, MAX_FILES).map_err(kernel("limit open files"))?;
    setrlimit(Resource::RLIMIT_CORE, 0, 0).map_err(kernel("limit core files"))?;
    drop_capabilities()?;
    prctl::set_no_new_privs().map_err(kernel("refuse new privileges"))?;
    prctl::set_name(c"wharf-health").map_err(kernel("set its name"))?;
    // If the agent's thread has ended already, standard input is closed.
    prctl::set_pdeathsig(Signal::SIGKILL).map_err(kernel("ask to end with the agent"))?;
    Ok((listener, hello))
}

fn listen() -> io::Result<TcpListener> {
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, PORT))
        .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT)))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Keeps the user: an agent without CAP_KILL and CAP_SYS_PTRACE must kill the process and open its namespace.
fn drop_capabilities() -> Result<(), CapsError> {
    // Permitted last: it must include the effective set.
    [CapSet::Inheritable, CapSet::Effective, CapSet::Permitted].into_iter().try_for_each(|set| caps::clear(None, set))
}

fn watch_parent() -> io::Result<()> {
    let watch = || {
        let mut buffer = [0; 64];
        while io::stdin().lock().read(&mut buffer).is_ok_and(|n| n > 0) {}
        std::process::exit(0);
    };
    std::thread::Builder::new().name("stdin".into()).stack_size(64 * 1024).spawn(watch).map(drop)
}

async fn serve(listener: TcpListener, hello: &str) -> io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let (mut connections, mut order) = (JoinSet::new(), VecDeque::<AbortHandle>::new());
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next() => {
                order.retain(|connection| !connection.is_finished());
                continue;
            }
        };
        match accepted {
            Ok((stream, _)) => {
                if order.len() >= MAX_CONNECTIONS
                    && let Some(oldest) = order.pop_front()
                {
                    oldest.abort();
                }
                let hello = hello.to_owned();
                order.push_back(connections.spawn(async move {
                    timeout(TIME_LIMIT, answer(stream, &hello)).await.ok();
                }));
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

async fn answer(mut stream: TcpStream, hello: &str) -> io::Result<()> {
    let mut head = Vec::with_capacity(256);
    let mut buffer = [0; 512];
    let response = loop {
        let n = stream.read(&mut buffer).await?;
        head.extend(buffer.iter().take(n));
        if let Some(response) = respond(&head, n == 0, hello) {
            break response;
        }
    };
    stream.write_all(response.as_bytes()).await?;
    stream.shutdown().await
}

fn respond(head: &[u8], ended: bool, hello: &str) -> Option<String> {
    let is_whole = head.windows(4).any(|w| w == b"\r\n\r\n");
    if !is_whole && !ended && head.len() < MAX_HEAD {
        return None;
    }
    let line = head.split(|b| *b == b'\r').next().unwrap_or_default();
    let mut words = line.split(|b| *b == b' ');
    let (method, path, version) = (words.next(), words.next(), words.next());
    let is_http = is_whole && words.next().is_none() && version.is_some_and(|v| v.starts_with(b"HTTP/1."));
    Some(match (is_http, method, path) {
        (false, ..) => response("400 Bad Request", "{\"error\":\"not an HTTP/1 request\"}"),
        (true, Some(b"GET"), Some(b"/hello")) => response("200 OK", hello),
        (true, ..) => response("404 Not Found", "{\"error\":\"there is only GET /hello\"}"),
    })
}

fn response(status: &str, body: &str) -> String {
    let head = "Content-Type: application/json\r\nConnection: close\r\n";
    format!("HTTP/1.1 {status}\r\n{head}Content-Length: {}\r\n\r\n{body}", body.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(head: &[u8]) -> Option<String> {
        let text = respond(head, false, "hello")?;
        Some(text.split(' ').nth(1).unwrap_or_default().to_owned())
    }

    #[test]
    fn only_hello_is_served() {
        assert_eq!(status(b"GET /hello HTTP/1.1\r\nHost: x\r\n\r\n").as_deref(), Some("200"));
        assert_eq!(status(b"GET /hello HTTP/1.0\r\n\r\n").as_deref(), Some("200"));
        for other in ["GET / HTTP/1.1", "GET /hello/ HTTP/1.1", "POST /hello HTTP/1.1", "GET /hello?a HTTP/1.1"] {
            assert_eq!(status(format!("{other}\r\n\r\n").as_bytes()).as_deref(), Some("404"), "{other}");
        }
    }

    #[test]
    fn half_a_request_waits_and_what_is_none_is_refused() {
        assert_eq!(status(b"GET /hello HTTP/1.1\r\nHost:"), None);
        assert!(respond(b"GET /hello HTTP/1.1\r\n", true, "").is_some_and(|r| r.starts_with("HTTP/1.1 400")));
        for hostile in [&b"\r\n\r\n"[..], b"GET /hello\r\n\r\n", b"GET /hello HTTP/2\r\n\r\n", b"\0\xff \xff\r\n\r\n"] {
            assert_eq!(status(hostile).as_deref(), Some("400"), "{hostile:?}");
        }
        assert_eq!(status(&[b'A'; MAX_HEAD]).as_deref(), Some("400"));
    }

    #[test]
    fn an_answer_says_its_length() {
        let text = respond(b"GET /hello HTTP/1.1\r\n\r\n", false, "{\"node\":\"n\"}").expect("an answer");
        let (head, body) = text.split_once("\r\n\r\n").expect("a head");
        assert!(head.contains(&format!("Content-Length: {}", body.len())), "{head}");
        assert_eq!(body, "{\"node\":\"n\"}");
    }
}
