//! Debian kernels and the load order of their modules.

use std::{
    fs,
    io::ErrorKind,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};

use super::{
    apt::{Apt, empty_directory},
    tools::Tools,
};
use crate::{args::VmKernel, progress::Step};

/// Depends on a suite's current cloud kernel.
const CURRENT: &str = "linux-image-cloud-amd64";

/// Skipped if built in.
const MODULES: &[&str] = &[
    "veth",
    "sch_ingress",
    "cls_bpf",
    "cls_u32",
    "bridge",
    "vxlan",
    "nf_conntrack_netlink",
    "tcp_diag",
    // For the node's nftables table.
    "nft_chain_nat",
    "nft_ct",
    "nft_masq",
    "nft_nat",
    "nft_fib_inet",
    // For redirect chains.
    "nft_socket",
    "nft_tproxy",
    // For rules of other tools.
    "nft_reject_inet",
    "nft_reject_ipv4",
    "nft_log",
    // nft_log needs a log backend.
    "nf_log_syslog",
    // For iptables-nft.
    "nft_compat",
    "xt_addrtype",
    "xt_comment",
    "xt_conntrack",
    "xt_tcpudp",
    "ipt_REJECT",
];

#[derive(Debug, Clone, Copy)]
pub(crate) struct Release {
    pub(crate) version: &'static str,
    suite: &'static str,
    /// Whether the agent must detect tcx and netkit: a wrong probe would skip their tests.
    pub(crate) tcx: bool,
    pub(crate) netkit: bool,
    /// Kind of the endpoints' links.
    pub(crate) device_mode: &'static str,
    /// Runs more tests.
    pub(crate) whole: bool,
}

impl Release {
    pub(crate) fn name(self) -> String {
        let devices = if self.device_mode == VETH { "" } else { "-netkit" };
        format!("{}{devices}", self.version)
    }
}

const VETH: &str = "veth";

pub(crate) const fn release(kernel: VmKernel) -> Release {
    let newest = Release { version: "7.2", suite: "sid", tcx: true, netkit: true, device_mode: VETH, whole: false };
    match kernel {
        VmKernel::V6_1 => {
            Release { version: "6.1", suite: "bookworm", tcx: false, netkit: false, whole: true, ..newest }
        }
        VmKernel::V6_12 => Release { version: "6.12", suite: "bookworm-backports", ..newest },
        VmKernel::V7_2 => newest,
        VmKernel::V7_2Netkit => Release { device_mode: "netkit", whole: true, ..newest },
    }
}

#[derive(Debug)]
pub(crate) struct Kernel {
    pub(crate) image: PathBuf,
    /// `/lib/modules/<release>`.
    modules: PathBuf,
}

impl Kernel {
    /// Fails if the suite has a newer version.
    pub(crate) fn ensure(step: &Step, directory: &Path, tools: &Tools, wanted: Release) -> Result<Self> {
        let kernels = directory.join("kernels");
        let root = kernels.join(wanted.version);
        if !root.exists() {
            let fresh = kernels.join(format!("{}.new", wanted.version));
            empty_directory(&fresh)?;
            fetch(step, directory, wanted, &fresh)?;
            let name = modules_of(&fresh)?;
            step.run(tools.busybox("depmod").arg("-b").arg(&fresh).arg(&name))?;
            // The rename marks a complete directory.
            Self::open(&fresh)?;
            fs::rename(&fresh, &root).with_context(|| format!("rename {} to {}", fresh.display(), root.display()))?;
        }
        step.note(format!("Linux {}", modules_of(&root)?));
        Self::open(&root)
    }

    fn open(root: &Path) -> Result<Self> {
        let name = modules_of(root)?;
        let modules = root.join("lib/modules").join(&name);
        for list in ["modules.dep", "modules.builtin"] {
            if !modules.join(list).is_file() {
                bail!("unpack Linux {name}: its packages hold no {list}");
            }
        }
        // Debian's place since 7.x.
        let places = [root.join(format!("boot/vmlinuz-{name}")), modules.join("vmlinuz")];
        let Some(image) = places.into_iter().find(|place| place.is_file()) else {
            bail!("unpack Linux {name}: its packages hold no image");
        };
        Ok(Self { image, modules })
    }

    /// Writes uncompressed modules, and their names in load order to `order`.
    pub(crate) fn write_modules(&self, tools: &Tools, into: &Path) -> Result<()> {
        let read = |name: &str| {
            let path = self.modules.join(name);
            fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))
        };
        let mut names = String::new();
        for file in load_order(&read("modules.dep")?, &read("modules.builtin")?, MODULES)? {
            let source = self.modules.join(&file);
            let name = file.rsplit('/').next().unwrap_or(&file).trim_end_matches(".xz");
            let target = into.join(name);
            if file.ends_with(".xz") {
                let output = fs::File::create(&target).with_context(|| format!("create {}", target.display()))?;
                let status = tools.busybox("xzcat").arg(&source).stdout(output).status();
                let status = status.with_context(|| format!("unpack {}: run busybox", source.display()))?;
                if !status.success() {
                    bail!("unpack {}: xzcat failed ({status})", source.display());
                }
            } else {
                fs::copy(&source, &target).with_context(|| format!("copy {}", source.display()))?;
            }
            names.push_str(name);
            names.push('\n');
        }
        let path = into.join("order");
        fs::write(&path, names).with_context(|| format!("write {}", path.display()))
    }
}

fn fetch(step: &Step, directory: &Path, wanted: Release, into: &Path) -> Result<()> {
    let Release { version, suite, .. } = wanted;
    let apt = Apt::open(step, &directory.join("apt").join(version), &[suite])?;
    let current = apt.dependencies(CURRENT)?.into_iter().find(|name| name.starts_with("linux-image-"));
    let current = current.with_context(|| format!("find the kernel of {suite}: {CURRENT} names none"))?;
    if !is_of_version(&current, version) {
        bail!(
            "fetch Linux {version}: Debian's {suite} has {current} now; take the new version into \
             xtask/src/vm/kernel.rs, or name other kernels with --kernel"
        );
    }
    // In newer releases, separate packages have image and modules.
    let is_part = |name: &String| {
        ["linux-base-", "linux-binary-", "linux-modules-"].iter().any(|beginning| name.starts_with(beginning))
    };
    let mut packages: Vec<_> = apt.dependencies(&current)?.into_iter().filter(is_part).collect();
    packages.push(current);
    apt.unpack(step, &packages, into)?;
    match symlink("usr/lib", into.join("lib")) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            Err(error).with_context(|| format!("link {}/lib", into.display()))
        }
        _ => Ok(()),
    }
}

fn is_of_version(package: &str, version: &str) -> bool {
    package
        .strip_prefix("linux-image-")
        .and_then(|rest| rest.strip_prefix(version))
        .is_some_and(|rest| rest.starts_with(['.', '-', '+']))
}

fn modules_of(root: &Path) -> Result<String> {
    let directory = root.join("lib/modules");
    let mut names = fs::read_dir(&directory).with_context(|| format!("list {}", directory.display()))?;
    let first = names.next().with_context(|| format!("find modules: {} is empty", directory.display()))?;
    Ok(first.with_context(|| format!("list {}", directory.display()))?.file_name().to_string_lossy().into_owned())
}

/// Files of the wanted modules and their dependencies, in load order. A line of `modules.dep` has a file, a colon, and
/// its dependencies in reverse order.
fn load_order(dependencies: &str, builtin: &str, wanted: &[&str]) -> Result<Vec<String>> {
    let mut order: Vec<String> = Vec::new();
    for name in wanted {
        let Some((file, needs)) =
            dependencies.lines().filter_map(|line| line.split_once(':')).find(|(file, _)| is_module(file, name))
        else {
            if builtin.lines().any(|file| is_module(file, name)) {
                continue;
            }
            bail!("find the kernel module {name}: this kernel has it neither as a module nor built in");
        };
        for file in needs.split_whitespace().rev().chain([file]) {
            if !order.iter().any(|present| present == file) {
                order.push(file.to_owned());
            }
        }
    }
    Ok(order)
}

fn is_module(file: &str, name: &str) -> bool {
    let file = file.trim().rsplit('/').next().unwrap_or_default();
    file.strip_prefix(name).is_some_and(|rest| rest == ".ko" || rest == ".ko.xz")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_come_after_what_they_need_and_once() -> Result<()> {
        let dependencies = "kernel/net/a.ko.xz: kernel/net/b.ko.xz kernel/net/c.ko.xz\n\
                            kernel/net/b.ko.xz: kernel/net/c.ko.xz\n\
                            kernel/net/c.ko.xz:\nkernel/net/xa.ko.xz:\n";
        let order = load_order(dependencies, "kernel/net/d.ko\n", &["c", "a", "d"])?;
        assert_eq!(order, ["kernel/net/c.ko.xz", "kernel/net/b.ko.xz", "kernel/net/a.ko.xz"]);
        let missing = load_order(dependencies, "", &["d"]).map_err(|error| error.to_string());
        assert!(missing.is_err_and(|told| told.contains("module d:")));
        Ok(())
    }

    #[test]
    fn a_version_is_not_taken_for_the_beginning_of_another() {
        assert!(is_of_version("linux-image-6.1.0-50-cloud-amd64", "6.1"));
        assert!(is_of_version("linux-image-7.2.13+deb14-cloud-amd64", "7.2"));
        assert!(!is_of_version("linux-image-6.12.95+deb12-cloud-amd64", "6.1"));
        assert!(!is_of_version("linux-headers-6.1.0-50-cloud-amd64", "6.1"));
    }
}
