//! Problems of the node's objects.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::{kernel::NextHop, overlap::Overlap};

/// Node objects and specification differ.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NodeProblem {
    /// A side of the router's link.
    LinkMissing { name: String },
    /// A side of the router's link.
    LinkRenamed {
        /// Expected.
        name: String,
        found: String,
    },
    /// A foreign object has the router link's name.
    LinkForeign { name: String },
    /// A side of the router's link.
    LinkDown { name: String },
    /// A side of the router's link.
    LinkMtu {
        name: String,
        /// Bytes.
        expected: u32,
        /// Bytes.
        found: u32,
    },
    /// A router address is missing or differs in prefix length.
    Address {
        address: IpAddr,
        ifname: String,
        /// Prefix length; none when missing.
        found: Option<u8>,
    },
    /// A pool's unreachable route is missing or has an interface.
    PoolRoute {
        cidr: IpNet,
        /// None without a route.
        found: Option<String>,
    },
    /// A route to containers of another node is missing, or is left over.
    PeerRoute {
        /// Their network.
        to: IpNet,
        /// Expected next hop; none for a leftover.
        expected: Option<NextHop>,
        /// Next hop of Wharf's route; none without one. If it is the expected one, another attribute differs.
        found: Option<NextHop>,
    },
    /// The unreachable route behind a route to containers of another node is missing, or is left over.
    PeerUnreachable {
        /// Their network.
        to: IpNet,
        /// False for a leftover.
        expected: bool,
    },
    /// The overlay's device differs, or is left over.
    Overlay {
        /// Difference.
        cause: String,
        /// The agent repairs it.
        repairable: bool,
    },
    /// A pool overlaps a network of the node.
    PoolOverlap(Overlap),
    /// Masquerading, forwarding, announcements or the overlay lack a precondition.
    Outbound {
        /// Subject.
        what: String,
        /// Difference, or why it is unreadable.
        cause: String,
        /// The agent repairs it.
        repairable: bool,
    },
    /// Forwarding needs another value of a sysctl.
    Setting {
        /// `sysctl` name.
        name: String,
        expected: String,
        found: String,
        /// The agent can set it: not without masquerading.
        repairable: bool,
    },
    /// No bpffs, or unreadable.
    Bpffs {
        path: String,
        /// State of the path.
        cause: String,
    },
    /// A shared pin is missing.
    PinMissing { path: String },
    /// A shared pin is another object.
    Pin {
        path: String,
        /// Object.
        cause: String,
        /// The agent can replace it.
        repairable: bool,
    },
}
