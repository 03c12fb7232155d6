//! Start of Envoy's process.

use std::{
    io,
    os::{fd::OwnedFd, unix::process::CommandExt as _},
    process::{Child, Command, Stdio},
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag, fcntl},
    sys::resource::{Resource, getrlimit, setrlimit},
    unistd::Pid,
};

use super::{Envoy, EnvoyError, User};

/// For connections of removed chains and listeners.
const DRAIN_SECONDS: u32 = 2;
/// `CAP_NET_ADMIN` (transparent sockets, marks) and `CAP_NET_RAW` (linux/capability.h).
const CAPABILITIES: [u32; 2] = [12, 13];
/// `CAP_DAC_READ_SEARCH` (linux/capability.h), kept until exec.
const SEARCH: u32 = 2;

/// `_LINUX_CAPABILITY_VERSION_3` (linux/capability.h): 64 bits in two parts.
const CAPABILITY_VERSION: u32 = 0x2008_0522;

#[repr(C)]
struct CapabilityHeader {
    version: u32,
    pid: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct CapabilityData {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

impl Envoy {
    pub(super) fn launch(&self) -> Result<(Child, OwnedFd), EnvoyError> {
        let failed = |source| self.cannot_start(source);
        let (reader, writer) = io::pipe().map_err(failed)?;
        // The agent must not block Envoy.
        fcntl(&writer, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).map_err(|errno| failed(errno.into()))?;
        let program = if self.is_bare() { Ok(self.program.clone()) } else { std::path::absolute(&self.program) };
        let mut command = Command::new(program.map_err(failed)?);
        if self.is_reachable() {
            command.arg("--config-path").arg(self.bootstrap_path());
        } else {
            // Envoy opens a settings file by absolute path, which its user cannot do here.
            command.current_dir(&self.directory).arg("--config-yaml").arg(self.settings());
        }
        command
            .arg0(self.mark())
            .args(["--log-level", "warning", "--log-format", "%l %n %v", "--disable-hot-restart"])
            .args(["--concurrency", &self.threads.max(1).to_string()])
            .args(["--drain-time-s", &DRAIN_SECONDS.to_string(), "--drain-strategy", "immediate"])
            .stdin(Stdio::null())
            .stdout(writer.try_clone().map_err(failed)?)
            .stderr(writer);
        let (user, agent) = (self.user, self.ends_with_agent.then(nix::unistd::getpid));
        // SAFETY: between fork and exec the closure only makes system calls: no allocation, no lock.
        unsafe {
            command.pre_exec(move || set_up_process(user, agent));
        }
        let child = command.spawn().map_err(failed)?;
        Ok((child, reader.into()))
    }
}

/// Envoy ends with `agent`.
pub(super) fn set_up_process(user: Option<User>, agent: Option<Pid>) -> io::Result<()> {
    // Ctrl-C on the agent's terminal must not end Envoy.
    nix::unistd::setsid()?;
    // [`Connections`](crate::shares::Connections) derives from it.
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)?;
    // A core dump would contain connection data.
    setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
    if let Some(user) = user {
        become_user(user)?;
    }
    prctl(nix::libc::PR_SET_NO_NEW_PRIVS, 1, 0)?;
    if let Some(agent) = agent {
        // The change of user clears it.
        prctl(nix::libc::PR_SET_PDEATHSIG, nix::libc::SIGTERM.unsigned_abs().into(), 0)?;
        // The parent may have ended before.
        if nix::unistd::getppid() != agent {
            return Err(Errno::ESRCH.into());
        }
    }
    Ok(())
}

fn become_user(user: User) -> io::Result<()> {
    // The change of user would drop all capabilities.
    prctl(nix::libc::PR_SET_KEEPCAPS, 1, 0)?;
    // SAFETY: no list is passed. The raw call changes only this thread.
    Errno::result(unsafe { nix::libc::syscall(nix::libc::SYS_setgroups, 0, std::ptr::null::<u32>()) })?;
    // SAFETY: three numbers are passed.
    Errno::result(unsafe { nix::libc::syscall(nix::libc::SYS_setresgid, user.gid, user.gid, user.gid) })?;
    // SAFETY: three numbers are passed.
    Errno::result(unsafe { nix::libc::syscall(nix::libc::SYS_setresuid, user.uid, user.uid, user.uid) })?;
    let bits = CAPABILITIES.iter().fold(0, |bits, capability| bits | 1 << capability);
    let header = CapabilityHeader { version: CAPABILITY_VERSION, pid: 0 };
    let mut data = [CapabilityData::default(); 2];
    // SAFETY: header and data have capget(2)'s layout, and outlive the call.
    Errno::result(unsafe { nix::libc::syscall(nix::libc::SYS_capget, &raw const header, data.as_mut_ptr()) })?;
    // Not inheritable: dropped at exec, after the kernel's search of the path.
    let until_exec = bits | data[0].permitted & 1 << SEARCH;
    let data =
        [CapabilityData { effective: until_exec, permitted: until_exec, inheritable: bits }, CapabilityData::default()];
    // SAFETY: header and data have capset(2)'s layout, and outlive the call.
    Errno::result(unsafe { nix::libc::syscall(nix::libc::SYS_capset, &raw const header, data.as_ptr()) })?;
    for capability in CAPABILITIES {
        // Ambient, because the program has no file capabilities.
        prctl(nix::libc::PR_CAP_AMBIENT, 2 /* PR_CAP_AMBIENT_RAISE */, capability.into())?;
    }
    Ok(())
}

fn prctl(option: i32, second: u64, third: u64) -> io::Result<()> {
    // SAFETY: these options take numbers, no pointers.
    Errno::result(unsafe { nix::libc::prctl(option, second, third, 0u64, 0u64) })?;
    Ok(())
}
