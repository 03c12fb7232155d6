//! What the caller wants of the proxy: listeners, and the endpoints that use them.

use std::{collections::BTreeMap, fmt, net::IpAddr, num::ParseIntError, str::FromStr, sync::Arc};

use wharf_common::policy::{MARK_PROXIED_EGRESS, MARK_PROXIED_INGRESS};
use wharf_policy::{model::Direction, requests::Requests};

/// Mark (`SO_MARK`) of the connections that the proxy makes for a listener of this direction: programs let them pass without another redirect.
#[must_use]
pub const fn mark(direction: Direction) -> u32 {
    match direction {
        Direction::Ingress => MARK_PROXIED_INGRESS,
        Direction::Egress => MARK_PROXIED_EGRESS,
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
    /// Ingress: members are servers, the destination is a member's address. Egress: members are clients.
    pub direction: Direction,
    /// What connections may ask.
    pub requests: Arc<Requests>,
    /// Endpoints and their addresses. A member without addresses has no connections; an address that two members name is that of
    /// the one with the later epoch.
    pub members: BTreeMap<Member, Vec<IpAddr>>,
    /// How often connections of a member were to begin anew; zero for those that are not here. Another number ends those of before, as the removal of
    /// the member would, and takes new ones in their place.
    pub rounds: BTreeMap<Member, u32>,
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
    /// Ingress: members are servers, the destination is a member's address. Egress: members are clients.
    pub direction: Direction,
    /// TCP port, host byte order.
    pub port: u16,
}

/// Reads what [`Member`] is displayed as.
impl FromStr for Member {
    type Err = ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (id, epoch) = text.split_once('.').unwrap_or((text, ""));
        Ok(Self { id: id.parse()?, epoch: epoch.parse()? })
    }
}

/// Reads what [`ListenerKey`] is displayed as.
impl FromStr for ListenerKey {
    type Err = ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (direction, port) = match (text.strip_prefix("ingress-"), text.strip_prefix("egress-")) {
            (Some(port), _) => (Direction::Ingress, port),
            (_, Some(port)) => (Direction::Egress, port),
            // No number, so that the error says so.
            (None, None) => (Direction::Ingress, ""),
        };
        Ok(Self { direction, port: port.parse()? })
    }
}

impl fmt::Display for ListenerKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}-{}", self.direction, self.port)
    }
}
