//! A running `wharf-agent`.

use std::{
    fs::{self, OpenOptions},
    os::unix::net::UnixDatagram,
    path::{Path, PathBuf},
    process::{Child, ExitStatus},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    process::{bin, command_in, wait},
    space::Space,
};

/// How long an agent may take from start to ready, and from SIGTERM to its end.
const PATIENCE: Duration = Duration::from_secs(30);

/// Where an agent keeps its things, all on the test's tmpfs.
#[derive(Debug, Clone)]
pub struct Dirs {
    /// Everything of the node is under it.
    pub root: PathBuf,
    /// `--run-dir`.
    pub run: PathBuf,
    /// `--state-dir`.
    pub state: PathBuf,
    /// `--bpffs`.
    pub bpffs: PathBuf,
    /// What the agent wrote to standard error, over all its starts.
    pub log: PathBuf,
}

impl Dirs {
    /// The directories of a node under `root`; only names, nothing is made.
    #[must_use]
    pub fn under(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
            run: root.join("run"),
            state: root.join("state"),
            bpffs: root.join("bpf"),
            log: root.join("agent.log"),
        }
    }

    /// The flags that name them.
    #[must_use]
    pub fn flags(&self) -> Vec<String> {
        [("--run-dir", &self.run), ("--state-dir", &self.state), ("--bpffs", &self.bpffs)]
            .into_iter()
            .flat_map(|(flag, dir)| [flag.to_owned(), dir.display().to_string()])
            .collect()
    }

    /// The agent's socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.run.join("wharf.sock")
    }

    /// Directory that holds one directory of pins for each endpoint.
    #[must_use]
    pub fn endpoint_pins(&self) -> PathBuf {
        self.bpffs.join("wharf").join(format!("v{}", wharf_common::ABI_VERSION)).join("endpoints")
    }
}

/// A running agent; killed when dropped.
#[derive(Debug)]
pub struct Agent {
    child: Child,
}

impl Agent {
    /// Starts one and waits until it says READY=1 over its notify socket.
    ///
    /// # Errors
    /// When it ends before it is ready, or is not ready in time; its log is in the message.
    pub fn start(space: &Space, dirs: &Dirs, arguments: &[String]) -> Result<Self> {
        let notify = dirs.root.join("notify.sock");
        if notify.exists() {
            fs::remove_file(&notify).context("remove the last start's notify socket")?;
        }
        let ready = UnixDatagram::bind(&notify).context("bind the notify socket")?;
        ready.set_read_timeout(Some(Duration::from_millis(50))).context("set a time limit")?;
        let log = OpenOptions::new().create(true).append(true).open(&dirs.log).context("open the agent's log")?;
        let mut command = command_in(space, bin("wharf-agent")?)?;
        command.args(dirs.flags()).args(arguments).env("NOTIFY_SOCKET", &notify).env("NO_COLOR", "1");
        command.stdin(std::process::Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let mut agent = Self { child: command.spawn().context("start wharf-agent")? };
        agent.await_ready(&ready, dirs)?;
        Ok(agent)
    }

    fn await_ready(&mut self, ready: &UnixDatagram, dirs: &Dirs) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        let mut message = [0; 4096];
        loop {
            if let Ok(n) = ready.recv(&mut message) {
                let text = String::from_utf8_lossy(message.get(..n).unwrap_or_default());
                if text.lines().any(|l| l == "READY=1") {
                    return Ok(());
                }
            }
            if let Some(status) = self.child.try_wait().context("look at wharf-agent")? {
                bail!("wharf-agent ended with {status} before it was ready:\n{}", read_log(dirs));
            }
            if Instant::now() > end {
                bail!("wharf-agent did not say READY=1 within {PATIENCE:?}:\n{}", read_log(dirs));
            }
        }
    }

    /// Process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends SIGTERM and waits for the end.
    ///
    /// # Errors
    /// When it does not end in time (it is killed then).
    pub fn stop(mut self) -> Result<ExitStatus> {
        self.signal(Signal::SIGTERM)?;
        wait(&mut self.child, PATIENCE)?
            .with_context(|| format!("wharf-agent did not end within {PATIENCE:?} of SIGTERM"))
    }

    /// Sends SIGKILL and waits for the end.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn kill(mut self) -> Result<()> {
        self.child.kill().context("kill wharf-agent")?;
        self.child.wait().context("wait for wharf-agent")?;
        Ok(())
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// When it has ended.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(i32::try_from(self.pid()).context("process id")?);
        kill(pid, signal).with_context(|| format!("send {signal} to wharf-agent"))
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // An error means it has ended by itself, which is what is wanted.
        if self.child.kill().is_ok() {
            self.child.wait().ok();
        }
    }
}

/// What the agent wrote so far.
#[must_use]
pub fn read_log(dirs: &Dirs) -> String {
    fs::read(&dirs.log).map_or_else(|e| format!("(no log: {e})"), |b| String::from_utf8_lossy(&b).into_owned())
}
