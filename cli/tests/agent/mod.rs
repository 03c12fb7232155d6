//! A fake agent with canned answers on a unix socket.
//!
//! Supports one HTTP/1.1 request per connection; answers end with the connection, or are chunked streams. Does not
//! check bodies and has no state.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
    process::{Command, Output},
    sync::{Arc, Mutex, PoisonError},
    thread::JoinHandle,
};

/// Answer to `METHOD /path`.
pub(crate) struct Answer {
    request: String,
    status: u16,
    body: String,
    then: Then,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Then {
    End,
    /// Open until the client closes.
    Open,
}

impl Answer {
    pub(crate) fn new(request: &str, status: u16, body: impl ToString) -> Self {
        Self { request: request.to_owned(), status, body: body.to_string(), then: Then::End }
    }

    pub(crate) fn stream(request: &str, lines: &[serde_json::Value]) -> Self {
        Self::new(request, 200, lines.iter().map(|l| format!("{l}\n")).collect::<String>())
    }

    pub(crate) fn open_stream(request: &str, lines: &[serde_json::Value]) -> Self {
        Self { then: Then::Open, ..Self::stream(request, lines) }
    }
}

/// Answers to each request in order, repeating the last.
pub(crate) struct Agent {
    dir: tempfile::TempDir,
    seen: Arc<Mutex<Vec<String>>>,
    task: Option<JoinHandle<()>>,
}

const STOP: &str = "STOP";

impl Agent {
    pub(crate) fn start(answers: Vec<Answer>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("wharf.sock")).unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&seen);
        let task = std::thread::spawn(move || serve(&listener, answers, &log));
        Self { dir, seen, task: Some(task) }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("wharf.sock")
    }

    /// Command with this agent's socket.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = wharf(args);
        command.arg("--socket").arg(self.socket());
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Ran {
        Ran::from(self.command(args).output().unwrap())
    }

    /// Requests: method, path and, after a blank, body.
    pub(crate) fn seen(&self) -> Vec<String> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if let Ok(mut stream) = UnixStream::connect(self.socket()) {
            let _ = stream.write_all(STOP.as_bytes());
        }
        if let Some(task) = self.task.take() {
            let ended = task.join();
            assert!(ended.is_ok() || std::thread::panicking(), "the canned agent panicked");
        }
    }
}

/// Command without an inherited environment that affects it.
pub(crate) fn wharf(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_wharf"));
    command.args(args).env_remove("WHARF_SOCKET").env_remove("NO_COLOR");
    command
}

#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

fn serve(listener: &UnixListener, mut answers: Vec<Answer>, log: &Mutex<Vec<String>>) {
    loop {
        let (stream, _) = listener.accept().unwrap();
        let Some((request, body)) = read_request(&stream).unwrap() else {
            return;
        };
        let whole = if body.is_empty() { request.clone() } else { format!("{request} {body}") };
        log.lock().unwrap_or_else(PoisonError::into_inner).push(whole);
        let at = answers.iter().position(|a| a.request == request);
        let last = at.is_some_and(|at| answers.iter().skip(at + 1).all(|a| a.request != request));
        let answer = match at {
            Some(at) if last => &answers[at],
            Some(at) => &answers.remove(at),
            None => &Answer::new("", 500, format!("this test has no answer to {request}")),
        };
        // A client may leave early.
        let _ = reply(&stream, answer);
    }
}

/// Method with path, and body; `None` at the end.
fn read_request(stream: &UnixStream) -> io::Result<Option<(String, String)>> {
    let mut reader = BufReader::new(stream);
    let mut first = String::new();
    reader.read_line(&mut first)?;
    if first == STOP {
        return Ok(None);
    }
    let mut length = 0;
    loop {
        let mut header = String::new();
        if reader.read_line(&mut header)? == 0 || header.trim().is_empty() {
            break;
        }
        if let Some((name, value)) = header.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let request = first.rsplit_once(' ').map_or("", |(request, _)| request);
    Ok(Some((request.to_owned(), String::from_utf8(body).unwrap())))
}

fn reply(mut stream: &UnixStream, answer: &Answer) -> io::Result<()> {
    let Answer { status, body, then, .. } = answer;
    if *then == Then::End {
        let head = format!("HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nConnection: close\r\n");
        return write!(stream, "{head}Content-Length: {}\r\n\r\n{body}", body.len());
    }
    write!(stream, "HTTP/1.1 {status} X\r\nTransfer-Encoding: chunked\r\n\r\n")?;
    if !body.is_empty() {
        write!(stream, "{:x}\r\n{body}\r\n", body.len())?;
    }
    io::copy(&mut stream, &mut io::sink()).map(drop)
}
