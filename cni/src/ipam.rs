//! Delegated IPAM: runs the plugin `ipam.type` (CNI 1.1.0, section 4) with this process's environment and netconf.
//! Output and time are bounded: a plugin must not block the runtime.

use std::{
    env,
    ffi::OsString,
    fmt, io,
    os::unix::{fs::PermissionsExt as _, process::ExitStatusExt as _},
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process_group};
use serde::Deserialize;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _},
    process::{Child, Command},
    time::timeout,
};

use crate::{
    fault::{Code, Fault},
    leased::Leased,
    log::Level,
    netconf::Version,
    rules::cut,
};

/// Bytes; usually a few hundred.
const MAX_ANSWER: usize = 1 << 20;
/// Bytes.
const MAX_STDERR: usize = 64 << 10;
/// Characters of a message or details.
const MAX_TOLD: usize = 1_000;

#[derive(Clone)]
pub(crate) struct Ipam {
    /// Checked by [`crate::rules::name`].
    pub(crate) plugin: String,
    pub(crate) path: Option<OsString>,
    pub(crate) netconf: Vec<u8>,
    pub(crate) version: Version,
    pub(crate) log: Level,
}

/// Omits the netconf.
impl fmt::Debug for Ipam {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ipam").field("plugin", &self.plugin).field("path", &self.path).finish_non_exhaustive()
    }
}

#[derive(Deserialize)]
struct Answered {
    code: u32,
    #[serde(default)]
    msg: String,
    #[serde(default)]
    details: String,
}

#[derive(Deserialize)]
struct Versions {
    #[serde(rename = "supportedVersions", default)]
    supported: Vec<String>,
}

impl Ipam {
    /// A failure releases the lease.
    pub(crate) async fn add(&self, subject: &str, limit: Duration) -> Result<Leased, Fault> {
        let answer = self.run(subject, "ADD", &self.netconf, limit).await;
        let leased = match answer {
            Ok(answer) => {
                Leased::parse(&answer).map_err(|why| self.fault(subject, why.code, &why.msg).with_details(why.details))
            }
            // It leased nothing.
            Err(Failed::NotRun(fault)) => return Err(fault),
            Err(Failed::Ran(fault)) => Err(fault),
        };
        match leased {
            Ok(leased) => Ok(leased),
            Err(fault) => Err(self.undo(subject, fault, limit).await),
        }
    }

    /// DEL after a failed ADD; adds its error to the details.
    pub(crate) async fn undo(&self, subject: &str, fault: Fault, limit: Duration) -> Fault {
        let Err(failed) = self.run(subject, "DEL", &self.netconf, limit).await else { return fault };
        let text = format!("giving the lease back failed as well: {}", failed.into_fault().msg);
        self.log.say(Level::Warn, format_args!("{text}"));
        let details = if fault.details.is_empty() { text } else { format!("{}; {text}", fault.details) };
        Fault { details, ..fault }
    }

    pub(crate) async fn ask(&self, subject: &str, command: &str, limit: Duration) -> Result<(), Fault> {
        self.run(subject, command, &self.netconf, limit).await.map(drop).map_err(Failed::into_fault)
    }

    /// Plugins before CNI 1.1.0 have no GC.
    pub(crate) async fn gc(&self, subject: &str, limit: Duration) -> Result<(), Fault> {
        self.known(self.ask(subject, "GC", limit).await).map(drop)
    }

    /// Plugins before CNI 1.1.0 have no STATUS; VERSION shows whether ADD accepts netconf's version.
    pub(crate) async fn status(&self, subject: &str, limit: Duration) -> Result<(), Fault> {
        if self.known(self.ask(subject, "STATUS", limit).await)? {
            return Ok(());
        }
        let version = self.version.as_str();
        let probe = serde_json::json!({ "cniVersion": version }).to_string();
        let answer = self.run(subject, "VERSION", probe.as_bytes(), limit).await.map_err(Failed::into_fault)?;
        let Ok(Versions { supported }) = serde_json::from_slice(&answer) else { return Ok(()) };
        if supported.iter().any(|one| one == version) {
            return Ok(());
        }
        let spoken: Vec<String> = supported.iter().take(16).map(|one| cut(one)).collect();
        let why = format!("it does not support CNI {version}, so ADD would fail; it supports {}", spoken.join(", "));
        Err(self.fault(subject, Code::NotAvailable, &why).with_details(
            "set cniVersion of the network configuration to one that it supports, or install a newer one",
        ))
    }

    fn known(&self, answer: Result<(), Fault>) -> Result<bool, Fault> {
        match answer {
            Ok(()) => Ok(true),
            // The reference library before CNI 1.1.0 reports an unknown command (4) or a missing container (3). Some
            // plugins compare versions first (1).
            Err(Fault { code: Code::Delegate(code @ (1 | 3 | 4)), msg, .. })
                if code != 4 || msg.contains("CNI_COMMAND") =>
            {
                self.log.say(Level::Info, format_args!("{msg}: it is older than CNI 1.1.0 and has nothing to say"));
                Ok(false)
            }
            Err(fault) => Err(fault),
        }
    }

    async fn run(&self, subject: &str, command: &str, stdin: &[u8], limit: Duration) -> Result<Vec<u8>, Failed> {
        let program = self.find(subject).map_err(Failed::NotRun)?;
        let io = |what: &str, e: &io::Error| {
            self.fault(subject, Code::Io, &format!("{command}: {what} {}: {e}", program.display()))
        };
        let mut child = Command::new(&program)
            .env("CNI_COMMAND", command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // To kill the plugin's children.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| Failed::NotRun(io("execute", &e)))?;
        let ended = timeout(limit, converse(&mut child, stdin)).await;
        let Ok(ended) = ended else {
            kill(&mut child).await;
            let why = format!("{command} had not ended after {} s and was killed", limit.as_secs());
            return Err(Failed::Ran(self.fault(subject, Code::TryAgain, &why)));
        };
        let Said { status, out, err, too_long } = ended.map_err(|e| Failed::Ran(io("talk to", &e)))?;
        self.pass_on(&err);
        if too_long {
            let why = format!("{command}: its answer is longer than {MAX_ANSWER} bytes");
            return Err(Failed::Ran(self.fault(subject, Code::Decode, &why)));
        }
        if status.success() {
            return Ok(out);
        }
        Err(Failed::Ran(match serde_json::from_slice::<Answered>(&out) {
            Ok(Answered { code, msg, details }) => {
                let told = |text: &str| text.chars().take(MAX_TOLD).collect::<String>();
                self.fault(subject, Code::Delegate(code), &told(&msg)).with_details(told(&details))
            }
            Err(_) => self.fault(subject, Code::Io, &format!("{command} {}{}", ended_how(status), last_words(&err))),
        }))
    }

    fn find(&self, subject: &str) -> Result<PathBuf, Fault> {
        let Some(path) = self.path.as_ref().filter(|path| !path.is_empty()) else {
            let why = "CNI_PATH is not set, and names the directories that it is looked for in";
            return Err(self.fault(subject, Code::Environment, why));
        };
        let is_program = |p: &PathBuf| p.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0);
        // The runtime's working directory is unknown.
        let directories = env::split_paths(path).filter(|directory| directory.is_absolute());
        directories.map(|directory| directory.join(&self.plugin)).find(is_program).ok_or_else(|| {
            let why = format!("CNI_PATH ({}) has no such program", cut(&Path::new(path).to_string_lossy()));
            self.fault(subject, Code::Config, &why)
                .with_details("install the plugin in one of these directories, or correct \"type\" of \"ipam\"")
        })
    }

    fn fault(&self, subject: &str, code: Code, why: &str) -> Fault {
        Fault::new(code, format!("{subject}: IPAM plugin {}: {why}", self.plugin))
    }

    fn pass_on(&self, err: &[u8]) {
        for line in String::from_utf8_lossy(err).lines().filter(|line| !line.trim().is_empty()) {
            self.log.say(Level::Error, format_args!("IPAM plugin {}: {line}", self.plugin));
        }
    }
}

enum Failed {
    NotRun(Fault),
    Ran(Fault),
}

impl Failed {
    fn into_fault(self) -> Fault {
        match self {
            Self::NotRun(fault) | Self::Ran(fault) => fault,
        }
    }
}

struct Said {
    status: ExitStatus,
    out: Vec<u8>,
    err: Vec<u8>,
    too_long: bool,
}

async fn converse(child: &mut Child, stdin: &[u8]) -> io::Result<Said> {
    let missing = || io::Error::from(io::ErrorKind::BrokenPipe);
    let mut input = child.stdin.take().ok_or_else(missing)?;
    let (out, err) = (child.stdout.take().ok_or_else(missing)?, child.stderr.take().ok_or_else(missing)?);
    let write = async move {
        match input.write_all(stdin).await {
            // Some plugins read no input for VERSION.
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            done => done,
        }
    };
    let (written, out, err, status) = tokio::join!(write, read(out, MAX_ANSWER), read(err, MAX_STDERR), child.wait());
    written?;
    let (out, too_long) = out?;
    Ok(Said { status: status?, out, err: err?.0, too_long })
}

async fn read(mut stream: impl AsyncRead + Unpin, most: usize) -> io::Result<(Vec<u8>, bool)> {
    let mut kept = Vec::new();
    let mut piece = [0; 8192];
    let mut more = false;
    loop {
        let length = stream.read(&mut piece).await?;
        if length == 0 {
            return Ok((kept, more));
        }
        let room = most.saturating_sub(kept.len()).min(length);
        kept.extend_from_slice(piece.get(..room).unwrap_or_default());
        more |= room < length;
    }
}

async fn kill(child: &mut Child) {
    // Not reaped, so the id is valid.
    let group = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
    if let Some(group) = group {
        let _gone_already = kill_process_group(group, Signal::KILL);
    }
    let _gone_already = child.kill().await;
}

fn ended_how(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with status {code} and no CNI error"),
        (None, Some(signal)) => format!("was ended by signal {signal}"),
        (None, None) => "ended".to_owned(),
    }
}

fn last_words(err: &[u8]) -> String {
    let text = String::from_utf8_lossy(err);
    let line = text.lines().map(str::trim).rfind(|line| !line.is_empty());
    line.map_or_else(String::new, |line| format!(": {}", cut(line)))
}
