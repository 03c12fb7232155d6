//! The handle to the health endpoint's process. A dedicated thread starts it: the kernel kills it when that thread ends
//! (`PR_SET_PDEATHSIG`), and pool threads end when idle.

use std::{
    fs,
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::{
        fs::MetadataExt,
        process::{CommandExt, ExitStatusExt},
    },
    path::PathBuf,
    process::{Child, ChildStdout, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex},
    thread::{self, JoinHandle},
    time::Duration,
};

use nix::{
    sys::{
        signal::{Signal, kill},
        wait::{Id, WaitPidFlag, waitid},
    },
    unistd::Pid,
};
use tokio::{
    sync::{oneshot, watch},
    time::timeout,
};
use wharf_core::endpoint::NetnsRef;
use wharf_kit::sync::lock;

use super::{
    error::HealthError,
    host::Responder,
    server::{Hello, MAX_LINE, MODE, READY},
};

const READY_BOUND: Duration = Duration::from_secs(10);
const END_BOUND: Duration = Duration::from_secs(5);

/// This agent's binary, even if replaced.
const PROGRAM: &str = "/proc/self/exe";

/// While present, the pid cannot be reused. Keeps standard input open.
type Reapable = Arc<Mutex<Option<Child>>>;

/// A running process; killed when dropped.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    nonce: String,
    netns: (u64, u64),
    child: Reapable,
    ended: watch::Receiver<Option<String>>,
    thread: Option<JoinHandle<()>>,
}

impl Process {
    /// Waits until the process listens; ends it on an error.
    pub(super) async fn launch(node: &str) -> Result<Self, HealthError> {
        let nonce: String = rand::random::<[u8; 16]>().iter().map(|b| format!("{b:02x}")).collect();
        let hello = Hello { node: node.to_owned(), nonce: nonce.clone() };
        let hello = serde_json::to_string(&hello).map_err(|e| HealthError::Io("start its process", e.into()))? + "\n";
        let (tell_started, started) = oneshot::channel();
        let (tell_ready, ready) = oneshot::channel();
        let (tell_ended, ended) = watch::channel(None);
        let tend = move || tend(&hello, tell_started, tell_ready, &tell_ended);
        let thread = thread::Builder::new().name("wharf-health".into()).stack_size(128 * 1024).spawn(tend);
        let thread = thread.map_err(|e| HealthError::Io("start the thread of its process", e))?;
        let ended_early = |_| HealthError::NotReady("its thread ended".into());
        let (pid, child) = started.await.map_err(ended_early)??;
        let mut process = Self { pid, nonce, netns: (0, 0), child, ended, thread: Some(thread) };
        let ready = match timeout(READY_BOUND, ready).await {
            Ok(told) => told.map_err(ended_early).flatten().and_then(|()| process.observe_netns()),
            Err(_) => Err(HealthError::NotReady(format!("it was not ready within {READY_BOUND:?}").into())),
        };
        match ready {
            Ok(netns) => {
                process.netns = netns;
                Ok(process)
            }
            Err(why) => {
                process.end().await;
                Err(why)
            }
        }
    }

    pub(super) fn nonce(&self) -> &str {
        &self.nonce
    }

    fn observe_netns(&self) -> Result<(u64, u64), HealthError> {
        let child = lock(&self.child);
        if child.is_none() {
            return Err(HealthError::NotReady("it ended at once".into()));
        }
        let path = self.netns_path();
        let meta = fs::metadata(&path).map_err(|e| HealthError::Namespace(path, e))?;
        Ok((meta.dev(), meta.ino()))
    }

    fn kill(&self) {
        let child = lock(&self.child);
        if child.is_none() {
            return;
        }
        let killed = i32::try_from(self.pid).map(|pid| kill(Pid::from_raw(pid), Signal::SIGKILL));
        if !matches!(killed, Ok(Ok(()))) {
            tracing::error!(pid = self.pid, "kill the health endpoint's process: {killed:?}");
        }
    }
}

impl Responder for Process {
    fn pid(&self) -> u32 {
        self.pid
    }

    fn netns_path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/ns/net", self.pid))
    }

    fn is_in(&self, netns: &NetnsRef) -> bool {
        self.netns == (netns.dev, netns.inode)
    }

    fn ended(&self) -> watch::Receiver<Option<String>> {
        self.ended.clone()
    }

    async fn end(mut self) {
        self.kill();
        if timeout(END_BOUND, self.ended.wait_for(Option::is_some)).await.is_err() {
            tracing::error!(pid = self.pid, "the health endpoint's process was killed, but does not end");
            return;
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of the health endpoint's process panicked");
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

fn tend(
    hello: &str,
    started: oneshot::Sender<Result<(u32, Reapable), HealthError>>,
    ready: oneshot::Sender<Result<(), HealthError>>,
    ended: &watch::Sender<Option<String>>,
) {
    let (pid, output, child) = match start(hello) {
        Ok(parts) => parts,
        Err(why) => {
            started.send(Err(why)).ok(); // a caller that went away wants no process
            return;
        }
    };
    if started.send(Ok((pid, Arc::clone(&child)))).is_err() {
        drop(lock(&child).as_mut().map(Child::kill));
    }
    ready.send(first_word(output)).ok(); // the caller may have gone; the process is still reaped
    let how = reap(pid, &child);
    ended.send_replace(Some(how));
}

fn start(hello: &str) -> Result<(u32, ChildStdout, Reapable), HealthError> {
    let mut command = Command::new(PROGRAM);
    // Containers reach the process: it must not know the environment. A separate process group avoids the terminal's
    // interrupts.
    command.arg0("wharf-agent").arg(MODE).env_clear().current_dir("/").process_group(0);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
    let mut child = command.spawn().map_err(|e| HealthError::Io("start its process", e))?;
    let pid = child.id();
    let told = match child.stdin.as_mut() {
        Some(input) => input.write_all(hello.as_bytes()),
        None => Err(io::Error::other("it has no standard input")),
    };
    match (told, child.stdout.take()) {
        (Ok(()), Some(output)) => Ok((pid, output, Arc::new(Mutex::new(Some(child))))),
        (told, _) => {
            let why = told.err().unwrap_or_else(|| io::Error::other("it has no standard output"));
            let end = child.kill().and_then(|()| child.wait());
            Err(HealthError::Hello(why, end))
        }
    }
}

fn first_word(output: ChildStdout) -> Result<(), HealthError> {
    let mut line = String::new();
    BufReader::new(output.take(MAX_LINE))
        .read_line(&mut line)
        .map_err(|e| HealthError::Io("start its process: read what it says", e))?;
    match line.trim() {
        READY => Ok(()),
        "" => Err(HealthError::NotReady("it ended without a word".into())),
        why => Err(HealthError::NotReady(why.to_owned().into())),
    }
}

/// Reaps under the lock: no kill hits a reused pid.
fn reap(pid: u32, child: &Reapable) -> String {
    let pid = Pid::from_raw(i32::try_from(pid).unwrap_or_default());
    while let Err(nix::Error::EINTR) = waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT) {}
    let mut child = lock(child);
    match child.take().map(|mut child| child.wait()) {
        Some(Ok(status)) => describe(status),
        Some(Err(error)) => format!("its end is not known: {error}"),
        None => "its end is not known".into(),
    }
}

fn describe(status: ExitStatus) -> String {
    match (status.signal().and_then(|n| Signal::try_from(n).ok()), status.code()) {
        (Some(signal), _) => format!("it was ended by {signal}"),
        (None, Some(code)) => format!("it ended by itself with status {code}"),
        (None, None) => format!("it ended with {status}"),
    }
}
