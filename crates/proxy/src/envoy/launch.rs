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
use rustix::{
    process::{Gid, Signal, Uid},
    thread::{self, CapabilitySet, CapabilitySets},
};

use super::{Envoy, EnvoyError, User};

/// For connections of removed chains and listeners.
const DRAIN_SECONDS: u32 = 2;
/// For transparent sockets and marks.
const CAPABILITIES: CapabilitySet = CapabilitySet::NET_ADMIN.union(CapabilitySet::NET_RAW);

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
    thread::set_no_new_privs(true)?;
    if let Some(agent) = agent {
        // The change of user clears it.
        rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
        // The parent may have ended before.
        if nix::unistd::getppid() != agent {
            return Err(Errno::ESRCH.into());
        }
    }
    Ok(())
}

fn become_user(user: User) -> io::Result<()> {
    // The change of user would drop all capabilities.
    thread::set_keep_capabilities(true)?;
    let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
    // Of this thread alone: the process has no other one after fork.
    thread::set_thread_groups(&[])?;
    thread::set_thread_res_gid(gid, gid, gid)?;
    thread::set_thread_res_uid(uid, uid, uid)?;
    let search = thread::capabilities(None)?.permitted & CapabilitySet::DAC_READ_SEARCH;
    // Not inheritable: dropped at exec, after the kernel's search of the path.
    let until_exec = CAPABILITIES | search;
    let sets = CapabilitySets { effective: until_exec, permitted: until_exec, inheritable: CAPABILITIES };
    thread::set_capabilities(None, sets)?;
    for capability in CAPABILITIES {
        // Ambient, because the program has no file capabilities.
        thread::configure_capability_in_ambient_set(capability, true)?;
    }
    Ok(())
}
