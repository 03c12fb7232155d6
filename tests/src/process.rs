//! Running programs to their end, inside a namespace, with a deadline.

use std::{
    env,
    fs::{self, File},
    io::{Read, Seek, SeekFrom, Write},
    net::IpAddr,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::PathBuf,
    process::{Child, Command, ExitStatus},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use caps::Capability;
use nix::{
    sched::{CloneFlags, setns},
    sys::{
        prctl::{set_no_new_privs, set_pdeathsig},
        signal::{Signal, kill},
        stat::{Mode, umask},
    },
    unistd::{Gid, Pid, Uid, setgid, setgroups, setuid},
};

use crate::{space::Space, wait};

/// Where the binaries under test are: `WHARF_BIN_DIR`, or `target/debug` of the workspace, where the tests' own build
/// puts them.
#[must_use]
pub fn bin_dir() -> PathBuf {
    env::var_os("WHARF_BIN_DIR")
        .map(PathBuf::from)
        .unwrap_or_else(|| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/debug")))
}

/// Sends a process a signal. One that is stopped by it does nothing more when this returns: the kernel stops the
/// threads of a process one after the other, and on a busy machine some go on for a while.
///
/// # Errors
/// When the process has ended, or does not stop.
pub fn signal(pid: Pid, signal: Signal) -> Result<()> {
    kill(pid, signal).with_context(|| format!("send {signal} to process {pid}"))?;
    if signal != Signal::SIGSTOP {
        return Ok(());
    }
    wait::until(&format!("process {pid} to stop"), || {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).with_context(|| format!("list the threads of {pid}"))?;
        for task in tasks {
            // A thread may end in this moment.
            let Ok(stat) = fs::read_to_string(task?.path().join("stat")) else { continue };
            // proc(5): the state follows the name, which is in parentheses.
            if !stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T')) {
                return Ok(None);
            }
        }
        Ok(Some(()))
    })
}

/// Path of one of the binaries under test.
///
/// # Errors
/// When it was not built.
pub fn bin(name: &str) -> Result<PathBuf> {
    let path = bin_dir().join(name);
    ensure!(
        path.is_file(),
        "{} is not there: `cargo test --workspace --no-run` builds it; or set WHARF_BIN_DIR",
        path.display()
    );
    path.canonicalize().with_context(|| format!("resolve {}", path.display()))
}

/// Path of a binary with crash points, `NAME-crash`: beside the binaries under test.
///
/// # Errors
/// When it was not built.
pub fn crash_bin(name: &str) -> Result<PathBuf> {
    let command = format!("cargo build --package {name} --bin {name}-crash");
    bin(&format!("{name}-crash")).with_context(|| format!("`{command}` builds it"))
}

/// Where the BPF objects are: `WHARF_BPF_DIR`, or `target/bpf` of the workspace.
#[must_use]
pub fn bpf_dir() -> PathBuf {
    env::var_os("WHARF_BPF_DIR")
        .map(PathBuf::from)
        .unwrap_or_else(|| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/bpf")))
}

/// The variable that makes `wharf-agent-crash` the agent of the next ABI version, and its value: the directory of that
/// version's objects.
///
/// # Errors
/// When they were not built.
pub fn next_abi() -> Result<(&'static str, PathBuf)> {
    let path = bpf_dir().join("next");
    ensure!(path.is_dir(), "{} is not there: `cargo xtask test` makes it", path.display());
    Ok(("WHARF_NEXT_ABI", path.canonicalize().with_context(|| format!("resolve {}", path.display()))?))
}

/// A command that runs inside the namespace, dies with this thread, and inherits no `WHARF_*` setting.
///
/// # Errors
/// When the namespace's descriptor cannot be copied.
pub fn command_in(space: &Space, program: impl AsRef<std::ffi::OsStr>) -> Result<Command> {
    use std::os::fd::AsFd;
    let netns = space.as_fd().try_clone_to_owned().context("copy the namespace's descriptor")?;
    let mut command = Command::new(program);
    for (name, _) in env::vars_os() {
        if name.to_string_lossy().starts_with("WHARF_") || name == "NOTIFY_SOCKET" || name == "RUST_LOG" {
            command.env_remove(name);
        }
    }
    let enter = move || {
        set_pdeathsig(Signal::SIGKILL)?;
        setns(&netns, CloneFlags::CLONE_NEWNET)?;
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes two system calls on values it owns; it allocates nothing.
    unsafe { command.pre_exec(enter) };
    Ok(command)
}

/// Lets a command drop all privileges (user and group nobody, no capability) after it has entered its namespace. The
/// standard library's own `uid` would drop them before, and the namespace could not be entered any more.
pub fn as_nobody(command: &mut Command) {
    const NOBODY: u32 = 65_534;
    let drop_privileges = || {
        setgroups(&[])?;
        setgid(Gid::from_raw(NOBODY))?;
        setuid(Uid::from_raw(NOBODY))?;
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes three system calls on constants; it allocates nothing.
    unsafe { command.pre_exec(drop_privileges) };
}

/// The capabilities that a systemd unit's `CapabilityBoundingSet=` names.
///
/// # Errors
/// When the unit names none, or one that is not known.
pub fn bounds(unit: &str) -> Result<Vec<Capability>> {
    let names = unit.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet="));
    let names = names.context("the unit has no CapabilityBoundingSet=")?.split_whitespace();
    names.map(|name| name.parse().map_err(|e| anyhow!("{name}: {e}"))).collect()
}

/// The number that a systemd unit has in octal for this setting.
///
/// # Errors
/// When it has none.
pub fn mode(unit: &str, setting: &str) -> Result<u32> {
    let value = unit.lines().find_map(|line| line.strip_prefix(setting)?.strip_prefix('='));
    let value = value.with_context(|| format!("the unit has no {setting}="))?;
    u32::from_str_radix(value.trim(), 8).with_context(|| format!("{setting}={value}"))
}

/// Limits a command, from its start on, to the capabilities of a systemd unit ([`bounds`]), with the unit's
/// `NoNewPrivileges=yes` and `UMask=`.
///
/// # Errors
/// Those of [`bounds`] and [`mode`].
pub fn bounded(command: &mut Command, unit: &str) -> Result<()> {
    let (kept, mask) = (bounds(unit)?, Mode::from_bits_truncate(mode(unit, "UMask")?));
    let numbers = |c: Capability| libc::c_ulong::from(c.index());
    // Those that this kernel does not have need not be dropped.
    let here = caps::runtime::procfs_all_supported(None).map_err(|e| anyhow!("capabilities of this kernel: {e}"))?;
    let dropped: Vec<libc::c_ulong> = here.into_iter().filter(|c| !kept.contains(c)).map(numbers).collect();
    let drop = move || {
        for capability in &dropped {
            // SAFETY: prctl takes integers here.
            if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, *capability, 0, 0, 0) } != 0 {
                return Err(std::io::Error::last_os_error());
            }
        }
        set_no_new_privs()?;
        umask(mask);
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes system calls on integers; it allocates nothing.
    unsafe { command.pre_exec(drop) };
    Ok(())
}

/// A program that has ended.
#[derive(Debug)]
pub struct Finished {
    /// How it was called, for messages.
    pub call: String,
    /// How it ended.
    pub status: ExitStatus,
    /// What it wrote, as text.
    pub stdout: String,
    /// What it wrote to standard error, as text.
    pub stderr: String,
    /// From just before it was started until it was seen to have ended.
    pub took: Duration,
}

impl Finished {
    /// Exit code; -1 when it was killed.
    #[must_use]
    pub fn code(&self) -> i32 {
        self.status.code().unwrap_or(-1)
    }

    /// Standard output, of a program that ended with 0.
    ///
    /// # Errors
    /// When it ended with anything else; the message holds everything it wrote.
    pub fn ok(self) -> Result<String> {
        ensure!(self.status.success(), "{}", self.describe());
        Ok(self.stdout)
    }

    /// All of it in words.
    #[must_use]
    pub fn describe(&self) -> String {
        format!("`{}` ended with {}\nstdout: {}\nstderr: {}", self.call, self.status, self.stdout, self.stderr)
    }
}

/// Runs a command to its end. Output goes to unlinked files, so no pipe can fill up.
///
/// # Errors
/// When it cannot be started, or has not ended after `limit` (it is killed then).
pub fn run(mut command: Command, stdin: &[u8], limit: Duration) -> Result<Finished> {
    let call = format!("{:?}", command.get_program()).replace('"', "")
        + &command.get_args().map(|a| format!(" {}", a.to_string_lossy())).collect::<String>();
    let (mut input, mut out, mut err) = (unlinked()?, unlinked()?, unlinked()?);
    input.write_all(stdin).and_then(|()| input.seek(SeekFrom::Start(0))).context("write standard input")?;
    command.stdin(input).stdout(out.try_clone()?).stderr(err.try_clone()?);
    let start = Instant::now();
    let mut child = command.spawn().with_context(|| format!("start `{call}`"))?;
    let ended = wait(&mut child, limit)?;
    let took = start.elapsed();
    let (stdout, stderr) = (read_back(&mut out)?, read_back(&mut err)?);
    let Some(status) = ended else {
        bail!("`{call}` had not ended after {limit:?} and was killed\nstdout: {stdout}\nstderr: {stderr}");
    };
    Ok(Finished { call, status, stdout, stderr, took })
}

/// [`run`] in a namespace, started as runtimes start plugins: without a copy of the caller's page tables (vfork). A
/// thread of its own enters the namespace, because it cannot leave it.
///
/// # Errors
/// Those of [`run`], and when the namespace cannot be entered.
pub fn run_from(space: &Space, command: Command, stdin: &[u8], limit: Duration) -> Result<Finished> {
    let work = || {
        setns(space, CloneFlags::CLONE_NEWNET).context("enter the node's namespace")?;
        run(command, stdin, limit)
    };
    thread::scope(|s| s.spawn(work).join()).map_err(|_| anyhow!("the thread that runs a program panicked"))?
}

/// Waits for a child of ours; kills it and gives `None` when `limit` passes.
///
/// # Errors
/// When the kernel refuses to wait.
pub fn wait(child: &mut Child, limit: Duration) -> Result<Option<ExitStatus>> {
    let pid = i32::try_from(child.id()).context("process id")?;
    // SAFETY: the call takes two integers; the child is not reaped yet, so the number is still its own.
    let raw = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    let raw = i32::try_from(raw).context("pidfd")?;
    if raw < 0 {
        return Err(std::io::Error::last_os_error()).context("pidfd_open");
    }
    // SAFETY: the kernel has just given us this descriptor and nobody else has it.
    let pidfd = unsafe { OwnedFd::from_raw_fd(raw) };
    let mut poll = libc::pollfd { fd: pidfd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let millis = i32::try_from(limit.as_millis()).unwrap_or(i32::MAX);
    let ready = loop {
        // SAFETY: one valid pollfd, count 1.
        let ready = unsafe { libc::poll(&raw mut poll, 1, millis) };
        if ready >= 0 || std::io::Error::last_os_error().kind() != std::io::ErrorKind::Interrupted {
            break ready;
        }
    };
    if ready > 0 {
        return child.wait().map(Some).context("wait for the child");
    }
    child.kill().context("kill the child")?;
    child.wait().context("wait for the killed child")?;
    Ok(None)
}

fn unlinked() -> Result<File> {
    tempfile::tempfile().context("make an unlinked file")
}

fn read_back(file: &mut File) -> Result<String> {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0)).and_then(|_| file.read_to_end(&mut bytes)).context("read a program's output")?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Runs `ip` (iproute2) inside a namespace, its arguments separated by blanks.
///
/// # Errors
/// When it is not installed, or fails.
pub fn ip(space: &Space, arguments: &str) -> Result<String> {
    let mut command = command_in(space, "ip")?;
    command.args(arguments.split_whitespace());
    run(command, b"", Duration::from_secs(10))?.ok()
}

/// Adds an address to a namespace's loopback device and waits until packets to it are for the namespace itself. The
/// kernel inserts the route of an IPv6 address after the command has returned (`addrconf_dad_work`), also with `nodad`.
///
/// # Errors
/// As [`ip`], or the kernel does not insert the route.
pub fn own_address(space: &Space, address: IpAddr) -> Result<()> {
    let unchecked = if address.is_ipv6() { " nodad" } else { "" };
    ip(space, &format!("addr add {address} dev lo{unchecked}"))?;
    wait::until(&format!("the kernel to take packets to {address}"), || {
        Ok(ip(space, &format!("route get {address}"))?.starts_with("local ").then_some(()))
    })
}
