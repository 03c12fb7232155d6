//! The agent's capabilities, as in its systemd unit.

use anyhow::Context;
use caps::{
    CapSet,
    Capability::{self, *},
};

/// Reasons: docs/security.md.
const NEEDED: [Capability; 12] = [
    CAP_BPF,
    CAP_NET_ADMIN,
    CAP_PERFMON,
    CAP_SYS_ADMIN,
    CAP_SYS_PTRACE,
    CAP_DAC_READ_SEARCH,
    CAP_CHOWN,
    CAP_NET_RAW,
    CAP_NET_BIND_SERVICE,
    CAP_SETUID,
    CAP_SETGID,
    CAP_KILL,
];

/// Drops all other capabilities of this thread and its children; returns missing needed ones.
pub fn keep_needed() -> anyhow::Result<Vec<String>> {
    keep(&NEEDED)
}

/// Keeps only the capability to set the socket's group.
pub fn keep_delegated() -> anyhow::Result<Vec<String>> {
    keep(&[CAP_CHOWN])
}

fn keep(needed: &[Capability]) -> anyhow::Result<Vec<String>> {
    // Otherwise exec restores root's capabilities.
    nix::sys::prctl::set_no_new_privs().context("give up capabilities: set no_new_privs")?;
    // Permitted last: it must include the effective set.
    for set in [CapSet::Inheritable, CapSet::Effective, CapSet::Permitted] {
        let kept = caps::read(None, set).map(|mut has| {
            has.retain(|capability| needed.contains(capability));
            has
        });
        kept.and_then(|kept| caps::set(None, set, &kept)).with_context(|| format!("give up {set:?} capabilities"))?;
    }
    let has = caps::read(None, CapSet::Effective).context("read what capabilities there are")?;
    Ok(needed.iter().filter(|capability| !has.contains(capability)).map(ToString::to_string).collect())
}

#[cfg(test)]
#[allow(clippy::expect_used, reason = "a test fails by panicking")]
mod tests {
    use std::{collections::HashSet, process::Command};

    use super::*;

    #[test]
    fn the_units_list_is_this_one() {
        let unit = include_str!("../../dist/wharf-agent.service");
        let list = unit.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet=")).expect("a list");
        let list: HashSet<Capability> = list.split(' ').map(|name| name.parse().expect("a capability")).collect();
        assert_eq!(list, NEEDED.into_iter().collect());
    }

    #[test]
    fn nothing_else_is_kept_and_a_new_program_gets_nothing_back() {
        let own = || {
            let had = caps::read(None, CapSet::Permitted).expect("read");
            let lacks = keep_needed().expect("kept");
            assert!(lacks.iter().all(|name| name.starts_with("CAP_")), "{lacks:?}");
            let program = Command::new("cat").arg("/proc/self/status").output().expect("run");
            let status = String::from_utf8_lossy(&program.stdout).into_owned();
            let line = status.lines().find_map(|line| line.strip_prefix("CapPrm:")).expect("CapPrm").trim().to_owned();
            let of_program = u64::from_str_radix(&line, 16).expect("a mask");
            (had, caps::read(None, CapSet::Permitted).expect("read"), of_program)
        };
        let (had, kept, of_program) = std::thread::spawn(own).join().expect("joined");
        let needed: HashSet<Capability> = had.into_iter().filter(|capability| NEEDED.contains(capability)).collect();
        assert_eq!(kept, needed);
        let mask = kept.iter().fold(0, |mask, capability| mask | capability.bitmask());
        assert_eq!(of_program & !mask, 0, "{of_program:x} against {mask:x}");
    }
}
