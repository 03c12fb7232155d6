//! QEMU and busybox, unpacked from Debian's packages.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use super::apt::{Apt, empty_directory};
use crate::progress::Step;

/// bookworm's QEMU 7.2 crashes guests with Linux 6.12.
const RELEASE: &str = "bookworm-backports";
const PACKAGES: &[&str] = &["qemu-system-x86", "busybox-static"];

const LIBRARIES: [&str; 2] = ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"];

#[derive(Debug)]
pub(crate) struct Tools {
    root: PathBuf,
}

impl Tools {
    pub(crate) fn ensure(step: &Step, directory: &Path) -> Result<Self> {
        let tools = Self { root: directory.join("tools") };
        if tools.busybox_path().is_file() {
            step.note("there already");
            return Ok(tools);
        }
        let fresh = directory.join("tools.new");
        empty_directory(&fresh)?;
        let apt = Apt::open(step, &directory.join("apt/tools"), &["bookworm", RELEASE])?;
        apt.unpack_whole(step, PACKAGES, RELEASE, &fresh)?;
        fs::rename(&fresh, &tools.root)
            .with_context(|| format!("rename {} to {}", fresh.display(), tools.root.display()))?;
        if !tools.busybox_path().is_file() {
            bail!("unpack busybox-static: it holds no {}", tools.busybox_path().display());
        }
        Ok(tools)
    }

    pub(crate) fn busybox_path(&self) -> PathBuf {
        self.root.join("bin/busybox")
    }

    pub(crate) fn busybox(&self, applet: &str) -> Command {
        let mut command = Command::new(self.busybox_path());
        command.arg(applet);
        command
    }

    /// With the unpacked loader and libraries, which may differ from the machine's. util-linux sets PR_SET_PDEATHSIG:
    /// QEMU ends with the starting thread.
    pub(crate) fn qemu(&self) -> Command {
        let mut path = OsString::new();
        for (n, directory) in LIBRARIES.iter().enumerate() {
            if n > 0 {
                path.push(":");
            }
            path.push(self.root.join(directory));
        }
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).arg(self.root.join("lib64/ld-linux-x86-64.so.2"));
        command.arg("--library-path").arg(path).arg(self.root.join("usr/bin/qemu-system-x86_64"));
        for data in ["usr/share/qemu", "usr/share/seabios"] {
            command.arg("-L").arg(self.root.join(data));
        }
        command
    }
}
