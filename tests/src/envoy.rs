//! The Envoy that a node's agent starts. It outlives the agent, so a node ends it with itself.

use std::{env, fs, path::PathBuf};

use anyhow::{Context, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{Node, NodeConfig, process::bin_dir};

/// Path of Envoy: `WHARF_ENVOY`, or the one that `cargo xtask setup` puts under target/.
///
/// # Errors
/// When there is none.
pub fn program() -> Result<PathBuf> {
    let installed = || bin_dir().join("../envoy/bin/envoy");
    let program = env::var_os("WHARF_ENVOY").map_or_else(installed, PathBuf::from);
    ensure!(program.is_file(), "{} is not there: `cargo xtask setup`, or set WHARF_ENVOY", program.display());
    program.canonicalize().context("resolve Envoy's path")
}

impl NodeConfig {
    /// The agent starts Envoy ([`program`]).
    ///
    /// # Errors
    /// When there is none.
    pub fn with_envoy(self) -> Result<Self> {
        Ok(self.flags(&["--envoy", &program()?.to_string_lossy()]))
    }
}

impl Node {
    /// The Envoy that was started last and lives.
    #[must_use]
    pub fn envoy(&self) -> Option<Pid> {
        let directory = self.dirs().run.join("proxy");
        let noted = fs::read_to_string(directory.join("envoy.pid")).ok()?;
        let pid: i32 = noted.split(' ').next()?.trim().parse().ok()?;
        let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        // Another process may have its number by now.
        let directory = directory.to_string_lossy().into_owned();
        String::from_utf8_lossy(&line).contains(&directory).then(|| Pid::from_raw(pid))
    }

    /// Sends Envoy a signal, see [`crate::process::signal`].
    ///
    /// # Errors
    /// When none lives.
    pub fn signal_envoy(&self, signal: Signal) -> Result<()> {
        let pid = self.envoy().context("no Envoy lives")?;
        crate::process::signal(pid, signal).context("Envoy")
    }

    /// Ends Envoy, if one lives.
    pub(crate) fn end_envoy(&self) {
        if let Some(pid) = self.envoy() {
            // It may have ended in this moment.
            kill(pid, Signal::SIGKILL).ok();
        }
    }
}
