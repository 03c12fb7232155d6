//! The caller's configuration.

use std::{collections::BTreeMap, fmt, net::IpAddr, num::ParseIntError, str::FromStr, sync::Arc};

use wharf_common::policy::{MARK_PROXIED_EGRESS, MARK_PROXIED_INGRESS};
use wharf_policy::{model::Direction, requests::Requests};

/// Mark (`SO_MARK`) of the proxy's connections: the BPF programs do not redirect them again.
#[must_use]
pub const fn mark(direction: Direction) -> u32 {
    match direction {
        Direction::Ingress => MARK_PROXIED_INGRESS,
        Direction::Egress => MARK_PROXIED_EGRESS,
    }
}

/// A port of the node, for all endpoints with the same requests in this direction.
///
/// Other requests use another port. Each member has separate filter chains, so a change of one does not affect
/// others' connections.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listener {
    /// TCP port, host byte order, 1 to 65535; port 0 is refused. Connections to this destination port look like
    /// direct ones and are closed: choose a port that no server uses.
    pub port: u16,
    /// Ingress: members are servers, the destination is a member's address. Egress: members are clients.
    pub direction: Direction,
    /// The allowed requests.
    pub requests: Arc<Requests>,
    /// Endpoints and their addresses; without any, a member has no connections. An address of two members belongs to
    /// the later epoch.
    pub members: BTreeMap<Member, Vec<IpAddr>>,
    /// Connection restarts of members, zero if absent. A new number ends the member's connections and accepts new
    /// ones.
    pub rounds: BTreeMap<Member, u32>,
}

impl Listener {
    /// The listener's key.
    #[must_use]
    pub const fn key(&self) -> ListenerKey {
        ListenerKey { direction: self.direction, port: self.port }
    }
}

/// An endpoint that uses a listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Member {
    /// Endpoint id.
    pub id: u16,
    /// Epoch: distinguishes endpoints with the same id.
    pub epoch: u64,
}

impl fmt::Display for Member {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}.{}", self.id, self.epoch)
    }
}

/// Identifies a listener, also in Envoy (`egress-15001`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ListenerKey {
    /// Direction, as in [`Listener`].
    pub direction: Direction,
    /// TCP port, host byte order.
    pub port: u16,
}

impl FromStr for Member {
    type Err = ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (id, epoch) = text.split_once('.').unwrap_or((text, ""));
        Ok(Self { id: id.parse()?, epoch: epoch.parse()? })
    }
}

impl FromStr for ListenerKey {
    type Err = ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (direction, port) = match (text.strip_prefix("ingress-"), text.strip_prefix("egress-")) {
            (Some(port), _) => (Direction::Ingress, port),
            (_, Some(port)) => (Direction::Egress, port),
            // Not a number, so that parsing fails.
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
