//! Problems of the node's objects.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::overlap::Overlap;

/// A difference between the node's objects and their specification.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NodeProblem {
    /// A side of the router's link is missing.
    LinkMissing {
        /// Name.
        name: String,
    },
    /// A side of the router's link has another name.
    LinkRenamed {
        /// Expected name.
        name: String,
        /// Name found.
        found: String,
    },
    /// A foreign object has the name of the router's link.
    LinkForeign {
        /// Name.
        name: String,
    },
    /// A side of the router's link is down.
    LinkDown {
        /// Name.
        name: String,
    },
    /// A side of the router's link has another MTU.
    LinkMtu {
        /// Name.
        name: String,
        /// Expected bytes.
        expected: u32,
        /// Bytes found.
        found: u32,
    },
    /// A router address is missing or has another prefix length.
    Address {
        /// Address.
        address: IpAddr,
        /// Interface.
        ifname: String,
        /// Prefix length found; none when missing.
        found: Option<u8>,
    },
    /// A pool's unreachable route is missing or has an interface.
    PoolRoute {
        /// CIDR.
        cidr: IpNet,
        /// Interface found; none without a route.
        found: Option<String>,
    },
    /// A pool shares addresses with a network of the node.
    PoolOverlap(Overlap),
    /// A precondition of masquerading, forwarding or announcements is not met.
    Outbound {
        /// Subject.
        what: String,
        /// Difference, or why it is unreadable.
        cause: String,
        /// The agent repairs it.
        repairable: bool,
    },
    /// A sysctl that forwarding needs has another value.
    Setting {
        /// `sysctl` name.
        name: String,
        /// Expected value.
        expected: String,
        /// Value found.
        found: String,
        /// The agent repairs it; it leaves settings unchanged while it does not masquerade.
        repairable: bool,
    },
    /// The path is not a bpffs or is unreadable.
    Bpffs {
        /// Path.
        path: String,
        /// State of the path.
        cause: String,
    },
    /// A shared pin is missing.
    PinMissing {
        /// Path.
        path: String,
    },
    /// A shared pin is another object.
    Pin {
        /// Path.
        path: String,
        /// Object found.
        cause: String,
        /// The agent can replace it with its object.
        repairable: bool,
    },
}
