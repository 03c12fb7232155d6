//! Rows that the kernel's tables hold.

use wharf_common::map::{IPCACHE_MAX, POLICY_CELLS_MAX, POLICY_PORTS_MAX};
use wharf_policy::compile::Limits;

use crate::config::PROXY_PORTS;

/// With the tables of this version. Before Linux 6.13, a full trie refuses new values for existing rows, so `IPCACHE`
/// keeps one entry free; `POLICY_PORTS` changes no values. An endpoint has two rule sets, and four during a change.
pub(super) const LIMITS: Limits = Limits {
    ipcache: IPCACHE_MAX as usize - 1,
    ports: POLICY_PORTS_MAX as usize,
    rules: POLICY_CELLS_MAX as usize,
    sets: 4 * wharf_common::MAX_ENDPOINT_ID as usize,
    listeners: PROXY_PORTS as usize,
};

/// With a cluster feed, networks in rules have one of so many parts of `IPCACHE`. The other parts have room for every
/// node and pod that the feed accepts, so no policy keeps them out.
pub(super) const PARTS: usize = 4;
