//! Pools from the node's row.

use std::collections::BTreeSet;

use ipnet::IpNet;

/// Minimum milliseconds between restarts, so that a frequently changing row does not keep the agent restarting.
pub const BETWEEN_RESTARTS_MS: u64 = 30_000;

/// Reaction to the row's pod CIDRs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Keep the pools.
    Keep,
    /// Wait this many milliseconds after a recent restart.
    Wait(u64),
    /// Restart with the row's pod CIDRs as pools.
    Restart,
}

/// An empty row changes nothing. `since_ms`: time since the last such restart in this boot.
#[must_use]
pub fn decide(row: &[IpNet], in_use: &[IpNet], since_ms: Option<u64>) -> Decision {
    if row.is_empty() || are_the_same(row, in_use) {
        return Decision::Keep;
    }
    match since_ms.and_then(|since| BETWEEN_RESTARTS_MS.checked_sub(since)) {
        None | Some(0) => Decision::Restart,
        Some(left) => Decision::Wait(left),
    }
}

/// Only the first CIDR of each family has an order: it has the router address.
fn are_the_same(row: &[IpNet], in_use: &[IpNet]) -> bool {
    [false, true].into_iter().all(|v6| {
        let of = |cidrs: &[IpNet]| -> Vec<IpNet> {
            cidrs.iter().filter(|cidr| cidr.addr().is_ipv6() == v6).copied().collect()
        };
        let (row, in_use) = (of(row), of(in_use));
        let all = |cidrs: &[IpNet]| cidrs.iter().copied().collect::<BTreeSet<_>>();
        row.first() == in_use.first() && all(&row) == all(&in_use)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().expect("network")).collect()
    }

    #[test]
    fn other_pod_cidrs_restart_the_agent_and_an_empty_row_does_not() {
        const TWO: &[&str] = &["10.1.0.0/24", "fd01::/64"];
        for (row, in_use, expected) in [
            (&[] as &[&str], &[] as &[&str], Decision::Keep),
            (&[], TWO, Decision::Keep),
            (TWO, &[], Decision::Restart),
            (TWO, TWO, Decision::Keep),
            (&["fd01::/64", "10.1.0.0/24"], TWO, Decision::Keep),
            (&["10.1.0.0/24"], TWO, Decision::Restart),
            (&["10.2.0.0/24", "fd01::/64"], TWO, Decision::Restart),
            (
                &["10.1.0.0/24", "10.2.0.0/24", "10.3.0.0/24"],
                &["10.1.0.0/24", "10.3.0.0/24", "10.2.0.0/24"],
                Decision::Keep,
            ),
            (&["10.2.0.0/24", "10.1.0.0/24"], &["10.1.0.0/24", "10.2.0.0/24"], Decision::Restart),
        ] {
            assert_eq!(decide(&nets(row), &nets(in_use), None), expected, "{row:?}, and {in_use:?} in use");
        }
    }

    #[test]
    fn a_restart_waits_for_the_one_before() {
        let after = |since| decide(&nets(&["10.2.0.0/24"]), &nets(&["10.1.0.0/24"]), Some(since));
        assert_eq!(after(0), Decision::Wait(BETWEEN_RESTARTS_MS));
        assert_eq!(after(29_999), Decision::Wait(1));
        assert_eq!((after(30_000), after(u64::MAX)), (Decision::Restart, Decision::Restart));
        assert_eq!(decide(&nets(&["10.1.0.0/24"]), &nets(&["10.1.0.0/24"]), Some(0)), Decision::Keep);
    }
}
