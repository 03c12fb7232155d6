//! Debian packages: what each command needs beyond cargo, installed only when missing.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Result, bail};

use crate::{privilege::Privilege, progress::Step, workspace::find_program};

/// How to see that a package is there, on any distribution.
#[derive(Debug, Clone, Copy)]
enum Probe {
    Program(&'static str),
    File(&'static str),
    PythonModule(&'static str),
}

/// A package, and what of it is used.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Need {
    package: &'static str,
    probe: Probe,
}

impl Need {
    const fn program(package: &'static str, program: &'static str) -> Self {
        Self { package, probe: Probe::Program(program) }
    }

    const fn file(package: &'static str, file: &'static str) -> Self {
        Self { package, probe: Probe::File(file) }
    }

    fn met(&self) -> bool {
        match self.probe {
            Probe::Program(name) => find_program(name).is_some(),
            Probe::File(path) => Path::new(path).exists(),
            Probe::PythonModule(name) => {
                let mut python = Command::new("python3");
                python.args(["-c", &format!("import {name}")]).stdin(Stdio::null());
                python.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
            }
        }
    }
}

/// To build: Rust links through the C compiler. (dpkg-deb and apt's own download helper, which may fetch core's
/// sources, are part of every Debian.)
pub(crate) const BUILD: &[Need] =
    &[Need::program("gcc", "cc"), Need::program("libc6-dev", "cc"), Need::program("make", "make")];

/// To run the demo.
pub(crate) const DEMO: &[Need] = &[Need::program("iproute2", "ip"), VENV];

/// To test in guests, which get these programs of the machine's.
pub(crate) const VM: &[Need] =
    &[Need::program("iproute2", "ip"), Need::program("nftables", "nft"), Need::program("iptables", "iptables")];

/// To run every test: also real container runtimes, its image, and other CNI plugins as neighbours.
pub(crate) const TEST: &[Need] = &[
    Need::program("iproute2", "ip"),
    // The documents' commands use it.
    Need::program("curl", "curl"),
    // Rules of somebody else's, which Wharf must get on with.
    Need::program("nftables", "nft"),
    // What the plugins `portmap` and `firewall` call.
    Need::program("iptables", "iptables"),
    Need::program("podman", "podman"),
    Need::program("containerd", "containerd"),
    Need::program("runc", "runc"),
    Need::program("conmon", "conmon"),
    // The package busybox has a program of the same name, which is not static and cannot be an image by itself.
    Need::file("busybox-static", "/var/lib/dpkg/info/busybox-static.list"),
    Need::file("containernetworking-plugins", "/usr/lib/cni/host-local"),
    // systemd-analyze judges the unit.
    Need::program("systemd", "systemd-analyze"),
    // Checks the manual pages.
    Need::program("mandoc", "mandoc"),
    VENV,
];

/// To hold the API against its document.
pub(crate) const SCHEMATHESIS: &[Need] = &[Need::program("iproute2", "ip"), VENV];

/// To get Envoy.
pub(crate) const ENVOY: &[Need] = &[VENV];

/// Python, and what makes virtual environments with pip in them.
const VENV: Need = Need { package: "python3-venv", probe: Probe::PythonModule("ensurepip") };

/// To fuzz: libFuzzer comes as C++ source.
pub(crate) const FUZZ: &[Need] = &[Need::program("g++", "c++")];

/// To measure against other CNI plugins, also in the pods of a container runtime.
pub(crate) const BENCH: &[Need] = &[
    Need::program("iproute2", "ip"),
    Need::program("iptables", "iptables"),
    Need::program("containerd", "containerd"),
    Need::program("runc", "runc"),
    Need::file("busybox-static", "/var/lib/dpkg/info/busybox-static.list"),
    Need::file("containernetworking-plugins", "/usr/lib/cni/ptp"),
    VENV,
];

/// The packages of these lists that are missing, each once.
pub(crate) fn missing(lists: &[&[Need]]) -> Vec<&'static str> {
    let mut packages: Vec<_> =
        lists.iter().copied().flatten().filter(|need| !need.met()).map(|need| need.package).collect();
    packages.sort_unstable();
    packages.dedup();
    packages
}

/// Makes sure that all of these lists are there, installing what is not.
pub(crate) fn ensure(step: &Step, privilege: &Privilege, lists: &[&[Need]]) -> Result<()> {
    let packages = missing(lists);
    if packages.is_empty() {
        step.note("all there");
        return Ok(());
    }
    let names = packages.join(" ");
    let Some(apt_get) = find_program("apt-get") else {
        bail!("install {names}: this machine has no apt-get; install what these Debian packages hold, then try again");
    };
    privilege.confirm(&format!("installing {names}"))?;

    let install = || {
        let mut command = apt(privilege, &apt_get);
        command.args(["install", "--yes", "--no-install-recommends"]).args(&packages);
        command
    };
    // Most machines know their packages; the index is fetched only where it is missing or too old to be of use.
    if step.run_quietly(&mut install())?.is_err() {
        step.run(apt(privilege, &apt_get).arg("update"))?;
        step.run(&mut install())?;
    }
    let still = missing(lists);
    if !still.is_empty() {
        bail!("install {names}: apt-get succeeded, yet {} cannot be found", still.join(" "));
    }
    step.note(format!("installed {names}"));
    Ok(())
}

/// apt-get as root, without questions.
pub(crate) fn apt(privilege: &Privilege, apt_get: &Path) -> Command {
    let mut command = privilege.command(apt_get, &[("DEBIAN_FRONTEND", "noninteractive".into())]);
    // Another apt (unattended upgrades on a fresh machine) may hold the lock for a while.
    command.args(["-o", "DPkg::Lock::Timeout=300"]);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_missing_is_named_and_once() {
        let needs = [
            Need::program("dash", "sh"),
            Need::program("zzz", "no-such-program-anywhere"),
            Need::file("zzz", "/no/such/file"),
            Need::file("base-files", "/etc"),
        ];
        assert_eq!(missing(&[&needs, &needs]), ["zzz"]);
        assert!(missing(&[&needs[..1]]).is_empty());
    }
}
