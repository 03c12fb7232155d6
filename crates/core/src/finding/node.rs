//! What can be amiss with the node's own part.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::{ids::IfIndex, overlap::Overlap};

/// What of the node's own part is not as the node's specification asks for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NodeProblem {
    /// A side of the router's link is not there.
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
    /// The router does not have an address, or with another prefix length.
    Address {
        /// Address.
        address: IpAddr,
        /// Interface.
        ifname: String,
        /// Prefix length found; none when the address is not there.
        found: Option<u8>,
    },
    /// A pool's unreachable route is not there, or goes to an interface.
    PoolRoute {
        /// Pool's CIDR.
        cidr: IpNet,
        /// Interface found; none when there is no route.
        found: Option<IfIndex>,
    },
    /// A pool shares addresses with a network of the node.
    PoolOverlap(Overlap),
    /// The bpffs is none, or cannot be read.
    Bpffs {
        /// Path.
        path: String,
        /// What is there.
        cause: String,
    },
    /// A shared pin is not there.
    PinMissing {
        /// Path.
        path: String,
    },
    /// A shared pin is not what it should be.
    Pin {
        /// Path.
        path: String,
        /// What is there.
        cause: String,
    },
}
