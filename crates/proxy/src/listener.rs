//! The caller's configuration.

use std::{collections::BTreeMap, fmt, net::IpAddr, num::ParseIntError, str::FromStr, sync::Arc};

use wharf_common::policy::{MARK_PROXIED_EGRESS, MARK_PROXIED_INGRESS};
use wharf_policy::{model::Direction, requests::Requests};

/// Mark (`SO_MARK`) of the proxy's connections, which are not redirected again.
#[must_use]
pub const fn mark(direction: Direction) -> u32 {
    match direction {
        Direction::Ingress => MARK_PROXIED_INGRESS,
        Direction::Egress => MARK_PROXIED_EGRESS,
    }
}

/// A port of the node, for endpoints with the same requests in this direction. A change of one member does not affect
/// others' connections.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listener {
    /// TCP port, host byte order, not 0. Direct connections to it are closed: choose one that no server uses.
    pub port: u16,
    /// Members are servers (ingress) or clients (egress).
    pub direction: Direction,
    /// Allowed requests.
    pub requests: Arc<Requests>,
    /// Addresses of endpoints; without any, a member has no connections. An address of two members belongs to the later
    /// epoch.
    pub members: BTreeMap<Member, Vec<IpAddr>>,
    /// Number of a member's connection restart, 0 if absent. A new number ends the member's connections.
    pub rounds: BTreeMap<Member, u32>,
}

impl Listener {
    /// Key of the listener.
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

/// Identity of a listener, in Envoy `egress-15001`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ListenerKey {
    /// Ingress or egress.
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
            // Fails to parse as a number.
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
