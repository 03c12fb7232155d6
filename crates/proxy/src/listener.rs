//! What the caller wants of the proxy: listeners, and the endpoints that use them.

use std::{collections::BTreeMap, fmt, net::IpAddr, sync::Arc};

use wharf_policy::requests::Requests;

/// Mark (`SO_MARK`) of the proxy's own connections for egress listeners: programs let them pass without another redirect.
pub const MARK_EGRESS: u32 = 1 << 8;
/// Mark (`SO_MARK`) of the proxy's own connections for ingress listeners.
pub const MARK_INGRESS: u32 = 1 << 9;

/// Which side of a connection the policy of a listener belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// Members are servers: the destination is a member's address.
    Ingress,
    /// Members are clients: the source is a member's address.
    Egress,
}

impl Direction {
    /// Mark of the connections that the proxy makes for this direction.
    #[must_use]
    pub const fn mark(self) -> u32 {
        match self {
            Self::Ingress => MARK_INGRESS,
            Self::Egress => MARK_EGRESS,
        }
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        })
    }
}

/// A listener: one port of the node's, shared by every endpoint whose policy has the same requests in that direction.
///
/// Its requests do not change while it lives: other requests take another port. Members come and go; each has filter chains of
/// its own, so that a change of one leaves the connections of all others alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listener {
    /// TCP port, host byte order, 1 to 65535. A listener with port 0 is refused. Connections whose destination has the same port
    /// are closed, because nothing tells them from those that were made to the listener itself: take one that no server uses.
    pub port: u16,
    /// Whose policy it is.
    pub direction: Direction,
    /// What connections may ask.
    pub requests: Arc<Requests>,
    /// Endpoints and their addresses. A member without addresses has no connections; an address that two members name is that of
    /// the one with the later epoch.
    pub members: BTreeMap<Member, Vec<IpAddr>>,
}

impl Listener {
    /// What names it.
    #[must_use]
    pub const fn key(&self) -> ListenerKey {
        ListenerKey { direction: self.direction, port: self.port }
    }
}

/// An endpoint, as listeners know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Member {
    /// Endpoint id.
    pub id: u16,
    /// Epoch of the endpoint: tells it from an earlier one with the same id.
    pub epoch: u64,
}

impl fmt::Display for Member {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}.{}", self.id, self.epoch)
    }
}

/// Names a listener, here and in Envoy (`egress-15001`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ListenerKey {
    /// Whose policy it is.
    pub direction: Direction,
    /// TCP port, host byte order.
    pub port: u16,
}

impl fmt::Display for ListenerKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}-{}", self.direction, self.port)
    }
}
