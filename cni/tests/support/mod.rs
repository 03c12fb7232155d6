//! A stand-in for the agent, and runs of the real `wharf-cni` binary against it.
//!
//! The stand-in knows no route and checks nothing: it gives the answers it was told to give, in order, and keeps the
//! requests. That the agent gives such answers is what the scenarios in the `tests` room show.

use std::{
    io::{Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
    process::{Command, Stdio},
    thread::JoinHandle,
    time::Duration,
};

use serde_json::{Value, json};
use tempfile::TempDir;
use wharf_handover::{
    command as handed,
    queue::Queue,
    report::{Report, Reports},
};

/// A request as the stand-in got it.
#[derive(Debug)]
pub(crate) struct Request {
    /// Method and path.
    pub(crate) line: String,
    /// The command that the request says it is made for.
    pub(crate) command: Option<(handed::Command, Duration)>,
    /// Body, null when empty.
    pub(crate) body: Value,
}

/// What the binary left behind.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// Exit status 0.
    pub(crate) success: bool,
    /// Stdout as it is.
    pub(crate) stdout: String,
    /// Stderr as it is.
    pub(crate) stderr: String,
    /// What the stand-in was asked.
    pub(crate) requests: Vec<Request>,
    /// The run directory, with the socket and what was left beside it.
    pub(crate) dir: TempDir,
}

impl Outcome {
    /// The deletion queue.
    pub(crate) fn queue(&self) -> Queue {
        Queue::new(self.dir.path())
    }

    /// The reports, oldest first.
    pub(crate) fn reports(&self) -> Vec<Report> {
        Reports::new(self.dir.path()).list().unwrap().into_iter().map(|entry| entry.content.unwrap()).collect()
    }

    /// Stdout as JSON.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("stdout is not JSON ({e}): {self:?}"))
    }

    /// The error's code; the exit status must say failure.
    pub(crate) fn code(&self) -> u64 {
        assert!(!self.success, "{self:?}");
        self.json()["code"].as_u64().unwrap_or_else(|| panic!("no code: {self:?}"))
    }

    /// Success with nothing on stdout.
    pub(crate) fn assert_silent(&self) {
        assert!(self.success && self.stdout.is_empty(), "{self:?}");
    }
}

/// A run of the binary under construction.
pub(crate) struct Run {
    dir: TempDir,
    vars: Vec<(&'static str, String)>,
    conf: Value,
    stdin: Option<Vec<u8>>,
    answers: Vec<Vec<u8>>,
    /// Answers may be left over.
    if_needed: bool,
    full: bool,
}

impl Run {
    /// A command for interface `eth0` of container `c1`, and the smallest netconf of this version.
    pub(crate) fn new(command: &str, version: &str) -> Self {
        let dir = TempDir::new().unwrap();
        let conf = json!({
            "cniVersion": version, "name": "net", "type": "wharf-cni", "socket": dir.path().join("wharf.sock"),
        });
        let vars = vec![
            ("CNI_COMMAND", command.to_owned()),
            ("CNI_CONTAINERID", "c1".to_owned()),
            ("CNI_IFNAME", "eth0".to_owned()),
            ("CNI_NETNS", "/run/netns/c1".to_owned()),
            ("CNI_PATH", "/opt/cni/bin".to_owned()),
        ];
        Self { dir, vars, conf, stdin: None, answers: Vec::new(), if_needed: false, full: false }
    }

    /// Runs in the run directory of a run before.
    pub(crate) fn after(mut self, before: Outcome) -> Self {
        self.dir = before.dir;
        self.conf["socket"] = json!(self.socket());
        self
    }

    /// Sets a variable; an empty one is taken away.
    pub(crate) fn var(mut self, name: &'static str, value: &str) -> Self {
        self.vars.retain(|(other, _)| *other != name);
        if !value.is_empty() {
            self.vars.push((name, value.to_owned()));
        }
        self
    }

    /// Sets a netconf key.
    pub(crate) fn key(mut self, key: &str, value: Value) -> Self {
        self.conf[key] = value;
        self
    }

    /// Sends these bytes instead of a netconf.
    pub(crate) fn stdin(mut self, bytes: &[u8]) -> Self {
        self.stdin = Some(bytes.to_vec());
        self
    }

    /// Adds an answer; with none at all nothing listens on the socket.
    pub(crate) fn answer(self, status: u16, body: &Value) -> Self {
        let body = body.to_string();
        let text = format!("HTTP/1.1 {status} x\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        self.raw_answer(text.as_bytes())
    }

    /// Adds an answer of any bytes.
    pub(crate) fn raw_answer(mut self, bytes: &[u8]) -> Self {
        self.answers.push(bytes.to_vec());
        self
    }

    /// The answers are for whatever is asked, which may be less.
    #[allow(dead_code, reason = "not every test needs it")]
    pub(crate) fn if_needed(mut self) -> Self {
        self.if_needed = true;
        self
    }

    /// Takes a netconf key away.
    #[allow(dead_code, reason = "not every test needs it")]
    pub(crate) fn without(mut self, key: &str) -> Self {
        self.conf.as_object_mut().unwrap().remove(key);
        self
    }

    /// What is sent as netconf.
    #[allow(dead_code, reason = "not every test needs it")]
    pub(crate) fn netconf(&self) -> Vec<u8> {
        self.conf.to_string().into_bytes()
    }

    /// On a machine where an agent has run, which made the directory of reports.
    pub(crate) fn reporting(self) -> Self {
        Reports::new(self.dir.path()).ensure_directory().unwrap();
        self
    }

    /// Nothing can be written to stdout.
    pub(crate) fn full_stdout(mut self) -> Self {
        self.full = true;
        self
    }

    /// The deletion queue beside it.
    pub(crate) fn queue(&self) -> Queue {
        Queue::of_socket(&self.socket())
    }

    /// Where the stand-in listens.
    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("wharf.sock")
    }

    /// Runs it to its end. Every answer must have been asked for.
    pub(crate) fn go(self) -> Outcome {
        let socket = self.socket();
        let agent = (!self.answers.is_empty()).then(|| serve(&socket, self.answers.clone()));
        let mut child = Command::new(env!("CARGO_BIN_EXE_wharf-cni"))
            .env_clear()
            .envs(self.vars.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(if self.full {
                Stdio::from(std::fs::File::options().write(true).open("/dev/full").unwrap())
            } else {
                Stdio::piped()
            })
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = self.stdin.clone().unwrap_or_else(|| self.conf.to_string().into_bytes());
        match child.stdin.take().unwrap().write_all(&stdin) {
            // It may refuse the environment, or too long an input, and end without reading it all.
            Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => {}
            done => done.unwrap(),
        }
        let output = child.wait_with_output().unwrap();
        let mut outcome = Outcome {
            success: output.status.success(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
            requests: Vec::new(),
            dir: self.dir,
        };
        assert_eq!(output.status.code(), Some(i32::from(!outcome.success)), "0 and 1 are all there is: {outcome:?}");
        if let Some(agent) = agent {
            // Answers that nobody asked for: a connection without a request lets the thread come to its end.
            while !agent.is_finished() {
                drop(UnixStream::connect(&socket));
            }
            outcome.requests = agent.join().unwrap();
            let asked = outcome.requests.len();
            assert!(self.if_needed || asked == self.answers.len(), "answers left over: {outcome:?}");
        }
        outcome
    }
}

fn serve(socket: &PathBuf, answers: Vec<Vec<u8>>) -> JoinHandle<Vec<Request>> {
    let listener = UnixListener::bind(socket).unwrap();
    std::thread::spawn(move || {
        let mut requests = Vec::new();
        for answer in answers {
            let (mut stream, _) = listener.accept().unwrap();
            match read_request(&mut stream) {
                Some(request) => requests.push(request),
                None => break,
            }
            stream.write_all(&answer).unwrap();
        }
        requests
    })
}

/// Head and body, the body as long as the head says; none when the other side sends nothing.
fn read_request(stream: &mut UnixStream) -> Option<Request> {
    let mut bytes = Vec::new();
    let mut chunk = [0; 65536];
    loop {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap_or("0");
            if body.len() >= length.parse().unwrap() {
                let line = head.lines().next().unwrap().trim_end_matches(" HTTP/1.1").to_owned();
                let body = if body.is_empty() { Value::Null } else { serde_json::from_str(body).unwrap() };
                let command =
                    head.lines().find_map(|line| line.strip_prefix(wharf_api::COMMAND_HEADER)?.strip_prefix(": "));
                let command = command.map(|header| handed::Command::of_header(header.as_bytes()).unwrap());
                return Some(Request { line, command, body });
            }
        }
        match stream.read(&mut chunk).unwrap() {
            0 => return None,
            n => bytes.extend_from_slice(&chunk[..n]),
        }
    }
}

/// An endpoint as the agent answers ADD.
pub(crate) fn endpoint() -> Value {
    json!({
        "id": 7, "epoch": 9, "state": "ready", "container_id": "c1", "ifname": "eth0", "network": "net",
        "identity": 256, "labels": [], "ipv4": "10.70.0.7", "ipv6": "fd70::7", "ifindex": 12, "host_ifname": "wh7x9",
        "container_mac": "02:00:00:00:00:0a", "host_mac": "02:00:00:00:00:0b", "gateway4": "10.70.0.1",
        "gateway6": "fd70::1", "mtu": 1450, "pool": "default", "netns": "/run/netns/c1", "created_unix_ms": 1,
        "status": {"phase": "", "since_unix_ms": 1, "waits_for": "", "ends_when": "", "desired_revision": 1,
                   "realized_revision": 1, "regenerations": 1, "failures": 0},
    })
}

/// An error of the agent.
pub(crate) fn error(code: &str, retry_after_ms: Option<u64>) -> Value {
    json!({"code": code, "message": format!("it is {code}"), "retry_after_ms": retry_after_ms})
}
