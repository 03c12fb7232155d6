//! Rows that the kernel's tables hold.

use wharf_common::map::{IPCACHE_MAX, POLICY_CELLS_MAX, POLICY_PORTS_MAX};
use wharf_policy::compile::Limits;

/// Ports of the proxy, from `--proxy-port` on.
pub const PROXY_PORTS: u16 = 1_000;

/// With the tables of this version. Before Linux 6.13, a full trie refuses new values for existing rows, so `IPCACHE`
/// keeps one entry free; `POLICY_PORTS` changes no values. An endpoint has two rule sets, and four during a change.
pub const LIMITS: Limits = Limits {
    ipcache: IPCACHE_MAX as usize - 1,
    ports: POLICY_PORTS_MAX as usize,
    rules: POLICY_CELLS_MAX as usize,
    sets: 4 * wharf_common::MAX_ENDPOINT_ID as usize,
    listeners: PROXY_PORTS as usize,
};

/// With a cluster feed, networks in rules have one of so many parts of `IPCACHE`. The other parts have room for every
/// node and pod that the feed accepts, so no policy keeps them out.
pub const PARTS: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_in_rules_leave_room_for_every_node_and_pod_of_the_feed() {
        let feed = wharf_cluster::feed::Limits::default();
        assert!(LIMITS.ipcache - LIMITS.ipcache / PARTS >= feed.addresses + feed.node_addresses);
    }
}
