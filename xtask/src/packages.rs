//! Debian packages of each command.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Result, bail};

use crate::{privilege::Privilege, progress::Step, workspace::find_program};

#[derive(Debug, Clone, Copy)]
enum Probe {
    Program(&'static str),
    File(&'static str),
    PythonModule(&'static str),
}

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

/// Every Debian has dpkg-deb and apt's download helper.
pub(crate) const BUILD: &[Need] =
    &[Need::program("gcc", "cc"), Need::program("libc6-dev", "cc"), Need::program("make", "make")];

pub(crate) const DEMO: &[Need] = &[Need::program("iproute2", "ip"), VENV];

/// Copied into guests.
pub(crate) const VM: &[Need] =
    &[Need::program("iproute2", "ip"), Need::program("nftables", "nft"), Need::program("iptables", "iptables")];

/// Nodes use the machine's programs, and containerd of Debian sid.
pub(crate) const KUBERNETES: &[Need] = &[
    Need::program("iproute2", "ip"),
    Need::program("curl", "curl"),
    Need::program("openssl", "openssl"),
    // kube-proxy runs it.
    Need::program("iptables", "iptables"),
    Need::program("runc", "runc"),
    Need::file("busybox-static", "/var/lib/dpkg/info/busybox-static.list"),
    // For UDP in pods of `--e2e`; busybox's has none.
    Need::program("netcat-openbsd", "nc.openbsd"),
    // For scripts in pods of `--e2e`: a shell without applets, and `dig` and `nslookup`.
    Need::program("dash", "dash"),
    Need::program("bind9-dnsutils", "dig"),
];

pub(crate) const TEST: &[Need] = &[
    Need::program("iproute2", "ip"),
    // For commands in documents.
    Need::program("curl", "curl"),
    // For rules of other programs.
    Need::program("nftables", "nft"),
    // For the plugins `portmap` and `firewall`.
    Need::program("iptables", "iptables"),
    Need::program("podman", "podman"),
    Need::program("containerd", "containerd"),
    Need::program("runc", "runc"),
    Need::program("conmon", "conmon"),
    // The package busybox is not static.
    Need::file("busybox-static", "/var/lib/dpkg/info/busybox-static.list"),
    Need::file("containernetworking-plugins", "/usr/lib/cni/host-local"),
    Need::program("systemd", "systemd-analyze"),
    Need::program("mandoc", "mandoc"),
    VENV,
];

pub(crate) const SCHEMATHESIS: &[Need] = &[Need::program("iproute2", "ip"), VENV];

pub(crate) const ENVOY: &[Need] = &[VENV];

/// Virtual environments with pip.
const VENV: Need = Need { package: "python3-venv", probe: Probe::PythonModule("ensurepip") };

/// libFuzzer is C++ source.
pub(crate) const FUZZ: &[Need] = &[Need::program("g++", "c++")];

/// For other CNI plugins, also in a container runtime.
pub(crate) const BENCH: &[Need] = &[
    Need::program("iproute2", "ip"),
    Need::program("nftables", "nft"),
    Need::program("iptables", "iptables"),
    Need::program("containerd", "containerd"),
    Need::program("runc", "runc"),
    Need::file("busybox-static", "/var/lib/dpkg/info/busybox-static.list"),
    Need::file("containernetworking-plugins", "/usr/lib/cni/ptp"),
    VENV,
];

pub(crate) fn missing(lists: &[&[Need]]) -> Vec<&'static str> {
    let mut packages: Vec<_> =
        lists.iter().copied().flatten().filter(|need| !need.met()).map(|need| need.package).collect();
    packages.sort_unstable();
    packages.dedup();
    packages
}

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
    // Most machines need no `update`.
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

pub(crate) fn apt(privilege: &Privilege, apt_get: &Path) -> Command {
    let mut command = privilege.command(apt_get, &[("DEBIAN_FRONTEND", "noninteractive".into())]);
    // Held by unattended upgrades.
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
