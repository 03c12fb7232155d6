//! Kernel features and process capabilities, checked at start.

use std::{fs, io, path::Path};

use aya::{
    programs::{ProgramType, SchedClassifier, TcAttachType},
    sys::{BpfHelper, is_helper_supported},
};
use caps::{CapSet, Capability, CapsHashSet};
use nix::sys::utsname::uname;
use wharf_core::kernel::{AttachMode, DeviceMode, KernelErrorKind, KernelFeatures, Result};

use crate::{
    error::{fail, wrap},
    netlink::conntrack,
    netns,
};

/// The first kernel with the helpers of [`NEEDED`].
const MINIMUM: (u32, u32) = (5, 13);

const NEEDED: [(ProgramType, BpfHelper, &str); 2] = [
    (
        ProgramType::SchedClassifier,
        BpfHelper::BPF_FUNC_redirect_peer,
        "bpf_redirect_peer, by which packets come to a container (Linux 5.10)",
    ),
    (
        ProgramType::RawTracePoint,
        BpfHelper::BPF_FUNC_for_each_map_elem,
        "bpf_for_each_map_elem, by which flows that are over are collected (Linux 5.13)",
    ),
];

/// Checks the thread's capabilities.
///
/// # Errors
/// `Permission`, with the missing capabilities.
pub fn check_capabilities() -> Result<()> {
    let (operation, subject) = ("check capabilities", "this process");
    let effective = caps::read(None, CapSet::Effective)
        .map_err(|e| fail(operation, subject, KernelErrorKind::Other, e.to_string()))?;
    let missing = missing_capabilities(&effective);
    if missing.is_empty() {
        return Ok(());
    }
    let cause = format!("{} missing; run as root, or grant them to the service", missing.join(", "));
    Err(fail(operation, subject, KernelErrorKind::Permission, cause))
}

fn missing_capabilities(effective: &CapsHashSet) -> Vec<String> {
    use Capability::{CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON, CAP_SYS_ADMIN};
    // CAP_SYS_ADMIN (for setns) includes these two.
    let stands_for = |c: &Capability| matches!(c, CAP_BPF | CAP_PERFMON) && effective.contains(&CAP_SYS_ADMIN);
    let missing = |c: &Capability| !effective.contains(c) && !stands_for(c);
    [CAP_NET_ADMIN, CAP_SYS_ADMIN, CAP_BPF, CAP_PERFMON]
        .iter()
        .filter(|c| missing(c))
        .map(ToString::to_string)
        .collect()
}

/// Why new interfaces in this network namespace get no IPv6 address.
#[must_use]
pub fn ipv6_off() -> Option<&'static str> {
    match fs::read_to_string("/proc/sys/net/ipv6/conf/default/disable_ipv6") {
        Ok(text) if text.trim() == "0" => None,
        Ok(_) => Some("net.ipv6.conf.default.disable_ipv6=1"),
        Err(_) => Some("the kernel has no IPv6, or was started with ipv6.disable=1"),
    }
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

pub(crate) fn probe(wanted: Option<AttachMode>, device_mode: DeviceMode) -> Result<KernelFeatures> {
    let operation = "probe kernel";
    let uname = uname().map_err(|e| wrap(operation, "uname", &io::Error::from(e)))?;
    let release = uname.release().to_string_lossy().into_owned();
    let version = version(&release);
    if version.is_none_or(|v| v < MINIMUM) {
        let (major, minor) = MINIMUM;
        let cause = format!("the kernel is too old; Linux {major}.{minor} or newer is needed");
        return Err(fail(operation, release, KernelErrorKind::Unsupported, cause));
    }
    let tcx = SchedClassifier::query_tcx("lo", TcAttachType::Ingress).is_ok();
    let attach_mode = match wanted {
        Some(AttachMode::Tcx) if !tcx => {
            let cause = "the kernel has no tcx (Linux 6.6); let the agent choose, or ask for clsact";
            return Err(fail(operation, release, KernelErrorKind::Unsupported, cause));
        }
        Some(mode) => mode,
        // See docs/attach-modes.md: tcx waits longer.
        None => AttachMode::Clsact,
    };
    let netkit = match netns::has_netkit() {
        Err(why) if device_mode == DeviceMode::Netkit => return Err(why.clone()),
        Ok(false) if device_mode == DeviceMode::Netkit => {
            let cause = "the kernel makes no netkit links with MAC addresses (Linux 6.10, CONFIG_NETKIT); use --device-mode veth";
            return Err(fail(operation, release, KernelErrorKind::Unsupported, cause));
        }
        Ok(found) => found,
        Err(_) => false,
    };
    for (program, helper, purpose) in NEEDED {
        if !is_helper_supported(program, helper).map_err(|e| wrap(operation, purpose, &e))? {
            let cause = format!("the kernel has no {purpose}");
            return Err(fail(operation, release, KernelErrorKind::Unsupported, cause));
        }
    }
    Ok(KernelFeatures {
        release,
        attach_mode,
        device_mode,
        tcx,
        netkit,
        redirect_peer: true,
        btf: Path::new("/sys/kernel/btf/vmlinux").exists(),
        netns_cookie: netns::has_cookie()?,
        conntrack: conntrack::is_there(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_read_as_distributions_write_them() {
        assert_eq!(version("6.18.44-cloud-amd64"), Some((6, 18)));
        assert_eq!(version("5.10.0-32-cloud-amd64"), Some((5, 10)));
        assert_eq!(version("6.1"), Some((6, 1)));
        assert_eq!(version("banana"), None);
    }

    #[test]
    fn sys_admin_stands_for_the_newer_capabilities_but_not_for_net_admin() {
        use Capability::{CAP_NET_ADMIN, CAP_SYS_ADMIN};
        assert_eq!(missing_capabilities(&CapsHashSet::from([CAP_SYS_ADMIN])), ["CAP_NET_ADMIN"]);
        assert_eq!(missing_capabilities(&CapsHashSet::from([CAP_NET_ADMIN])).len(), 3);
        assert!(missing_capabilities(&CapsHashSet::from([CAP_NET_ADMIN, CAP_SYS_ADMIN])).is_empty());
    }
}
