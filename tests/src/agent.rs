//! A running `wharf-agent`.

use std::{
    collections::BTreeSet,
    fs::{self, OpenOptions},
    os::unix::{net::UnixDatagram, process::ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::{sys::signal::Signal, unistd::Pid};

use crate::process::wait;

/// How long an agent may take from start to ready, from SIGTERM to its end, and to a crash point.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where an agent keeps its things, all on the test's tmpfs.
#[derive(Debug, Clone)]
pub struct Dirs {
    /// Everything of the node is under it.
    pub root: PathBuf,
    /// `--run-dir`.
    pub run: PathBuf,
    /// `--state-dir`.
    pub state: PathBuf,
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

    /// The admin thread's socket.
    #[must_use]
    pub fn admin_socket(&self) -> PathBuf {
        self.run.join(wharf_api::ADMIN_SOCKET)
    }

    /// Names of the pin trees, one for each ABI version that has pins.
    ///
    /// # Errors
    /// When the bpffs cannot be read.
    pub fn version_trees(&self) -> Result<BTreeSet<String>> {
        let root = self.bpffs.join("wharf");
        if !root.is_dir() {
            return Ok(BTreeSet::new());
        }
        let entries = fs::read_dir(&root).with_context(|| format!("read {}", root.display()))?;
        entries.map(|e| Ok(e.context("read the pins")?.file_name().to_string_lossy().into_owned())).collect()
    }

    /// Directory that holds one directory of pins for each endpoint of this ABI version.
    #[must_use]
    pub fn endpoint_pins(&self) -> PathBuf {
        self.bpffs.join("wharf").join(format!("v{}", wharf_common::ABI_VERSION)).join("endpoints")
    }
}

enum Started {
    Ready(Agent),
    Ended(ExitStatus),
}

/// A running agent; killed when dropped.
#[derive(Debug)]
pub struct Agent {
    child: Child,
}

impl Agent {
    /// Starts one, by a command without arguments, and waits until it says READY=1 over its notify socket.
    ///
    /// # Errors
    /// When it ends before it is ready, or is not ready in time; its log is in the message.
    pub fn start(command: Command, dirs: &Dirs, arguments: &[String]) -> Result<Self> {
        match Self::spawn(command, dirs, arguments)? {
            Started::Ready(agent) => Ok(agent),
            Started::Ended(status) => {
                bail!("wharf-agent ended with {status} before it was ready:\n{}", read_log(dirs))
            }
        }
    }

    /// Starts one with crash points ([`crate::crash`]) and waits until it is ready; `None` when it was killed at a
    /// point first.
    ///
    /// # Errors
    /// As [`Self::start`], for any other end.
    pub fn start_armed(command: Command, dirs: &Dirs, arguments: &[String]) -> Result<Option<Self>> {
        match Self::spawn(command, dirs, arguments)? {
            Started::Ready(agent) => Ok(Some(agent)),
            Started::Ended(status) if status.signal() == Some(libc::SIGKILL) => Ok(None),
            Started::Ended(status) => {
                bail!("wharf-agent-crash ended with {status} before it was ready:\n{}", read_log(dirs))
            }
        }
    }

    fn spawn(mut command: Command, dirs: &Dirs, arguments: &[String]) -> Result<Started> {
        let notify = dirs.root.join("notify.sock");
        if notify.exists() {
            fs::remove_file(&notify).context("remove the last start's notify socket")?;
        }
        let ready = UnixDatagram::bind(&notify).context("bind the notify socket")?;
        ready.set_read_timeout(Some(Duration::from_millis(10))).context("set a time limit")?;
        let log = OpenOptions::new().create(true).append(true).open(&dirs.log).context("open the agent's log")?;
        command.args(dirs.flags()).args(arguments).env("NOTIFY_SOCKET", &notify).env("NO_COLOR", "1");
        command.stdin(std::process::Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let mut agent = Self { child: command.spawn().context("start wharf-agent")? };
        let mut end = Instant::now() + PATIENCE;
        let mut message = [0; 4096];
        loop {
            if let Ok(n) = ready.recv(&mut message) {
                let text = String::from_utf8_lossy(message.get(..n).unwrap_or_default());
                if text.lines().any(|l| l == "READY=1") {
                    return Ok(Started::Ready(agent));
                }
                // As systemd does (sd_notify(3)).
                if let Some(usec) = text.lines().find_map(|l| l.strip_prefix("EXTEND_TIMEOUT_USEC=")?.parse().ok()) {
                    end = end.max(Instant::now() + Duration::from_micros(usec));
                }
            }
            if let Some(status) = agent.child.try_wait().context("look at wharf-agent")? {
                return Ok(Started::Ended(status));
            }
            if Instant::now() > end {
                bail!("wharf-agent did not say READY=1 within {PATIENCE:?}:\n{}", read_log(dirs));
            }
        }
    }

    /// Waits until it is killed by a crash point.
    ///
    /// # Errors
    /// When it lives on (it is killed then), or ends otherwise.
    pub fn await_crash(self) -> Result<()> {
        ensure!(
            self.await_crash_for(PATIENCE)?,
            "wharf-agent-crash did not come to its crash point within {PATIENCE:?}"
        );
        Ok(())
    }

    /// Waits until it is killed by a crash point; false when it was not within `patience`, and was killed then.
    ///
    /// # Errors
    /// When it ends otherwise.
    pub fn await_crash_for(mut self, patience: Duration) -> Result<bool> {
        let Some(status) = wait(&mut self.child, patience)? else {
            self.kill()?;
            return Ok(false);
        };
        ensure!(
            status.signal() == Some(libc::SIGKILL),
            "wharf-agent-crash ended with {status}, not at its crash point"
        );
        Ok(true)
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

    /// Sends a signal, see [`crate::process::signal`].
    ///
    /// # Errors
    /// When it has ended.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(i32::try_from(self.pid()).context("process id")?);
        crate::process::signal(pid, signal).context("wharf-agent")
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
