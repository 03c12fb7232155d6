//! Listeners and members, as the agent configures them.

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

/// A port of the node, for endpoints with the same requests in this direction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listener {
    /// TCP port, host byte order, not 0, used by no server: direct connections are closed.
    pub port: u16,
    /// Members are servers (ingress), clients (egress).
    pub direction: Direction,
    /// Allowed requests.
    pub requests: Arc<Requests>,
    /// Addresses; of two members, an address belongs to the later epoch.
    pub members: BTreeMap<Member, Vec<IpAddr>>,
    /// A new number (absent: 0) ends the member's connections.
    pub rounds: BTreeMap<Member, u32>,
}

impl Listener {
    #[must_use]
    pub const fn key(&self) -> ListenerKey {
        ListenerKey { direction: self.direction, port: self.port }
    }
}

/// An endpoint that uses a listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Member {
    pub id: u16,
    /// Distinguishes endpoints with the same id.
    pub epoch: u64,
}

impl fmt::Display for Member {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}.{}", self.id, self.epoch)
    }
}

/// Identity of a listener; text `egress-15001`.
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
