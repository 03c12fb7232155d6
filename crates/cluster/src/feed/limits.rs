//! Limits for input from outside.

use super::Kind;

/// Limits that bound a feed's memory; a row beyond them is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub nodes: usize,
    pub pods: usize,
    pub namespaces: usize,
    pub policies: usize,
    /// Bytes of a policy's text.
    pub policy_bytes: usize,
    /// Labels of a row.
    pub labels: usize,
    /// Addresses of all pods: each needs a row of `IPCACHE`.
    pub addresses: usize,
    /// Addresses and pod CIDRs of all nodes, as `addresses`.
    pub node_addresses: usize,
    /// Approximate bytes of a kind's rows and refusals.
    pub bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            nodes: 8_192,
            pods: 262_144,
            namespaces: 16_384,
            policies: 16_384,
            policy_bytes: 3 << 19,
            labels: 256,
            addresses: 311_296,
            node_addresses: 65_536,
            bytes: 256 << 20,
        }
    }
}

impl Limits {
    pub(super) const fn claims(&self, kind: Kind) -> usize {
        match kind {
            Kind::Pod => self.addresses,
            Kind::Node => self.node_addresses,
            _ => usize::MAX,
        }
    }

    pub(super) const fn rows(&self, kind: Kind) -> usize {
        match kind {
            Kind::Node => self.nodes,
            Kind::Pod => self.pods,
            Kind::Namespace => self.namespaces,
            Kind::Policy => self.policies,
        }
    }
}
