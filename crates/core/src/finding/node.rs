//! Problems of the node's own objects.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::overlap::Overlap;

/// A difference between the node's own objects and the node's specification.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NodeProblem {
    /// A side of the router's link is missing.
    LinkMissing {
        /// Name.
        name: String,
    },
    /// A side of the router's link has another name.
    LinkRenamed {
        /// Name expected.
        name: String,
        /// Name found.
        found: String,
    },
    /// Something else has the name of the router's link.
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
        /// Bytes expected.
        expected: u32,
        /// Bytes found.
        found: u32,
    },
    /// A router address is missing, or has another prefix length.
    Address {
        /// Address.
        address: IpAddr,
        /// Interface.
        ifname: String,
        /// Prefix length found; none when the address is missing.
        found: Option<u8>,
    },
    /// A pool's unreachable route is missing, or goes to an interface.
    PoolRoute {
        /// Pool's CIDR.
        cidr: IpNet,
        /// Interface found; none when there is no route.
        found: Option<String>,
    },
    /// A pool shares addresses with a network of the node.
    PoolOverlap(Overlap),
    /// What masquerading, forwarding and announcements need is not as it should be.
    Outbound {
        /// What it is.
        what: String,
        /// How it differs, or why it cannot be looked at.
        cause: String,
        /// The agent puts it right by itself.
        repairable: bool,
    },
    /// A setting (`sysctl`) that forwarding needs has another value.
    Setting {
        /// Its name, as `sysctl` has it.
        name: String,
        /// Value expected.
        expected: String,
        /// Value found.
        found: String,
        /// The agent puts it right by itself; it does not touch settings while it does not masquerade.
        repairable: bool,
    },
    /// The path is no bpffs, or cannot be read.
    Bpffs {
        /// Path.
        path: String,
        /// What is there.
        cause: String,
    },
    /// A shared pin is missing.
    PinMissing {
        /// Path.
        path: String,
    },
    /// A shared pin is another object than expected.
    Pin {
        /// Path.
        path: String,
        /// What is there.
        cause: String,
        /// The agent pins its object in its place.
        repairable: bool,
    },
}
