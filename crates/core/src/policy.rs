//! Policy rows, and policy attributes of endpoints. `wharf-policy` computes rows and the order of changes.

use std::collections::BTreeMap;

use ipnet::IpNet;
use wharf_common::policy::{CellKey, Hit, PeerRow, SetsRow};
pub use wharf_names::{endpoint::Enforcement, port::NamedPort};

use crate::ids::EndpointId;

/// Destination ports of a rule set with a common prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortRange {
    /// Rule set.
    pub set: u32,
    /// IANA number.
    pub protocol: u8,
    /// Lowest port or ICMP type.
    pub first: u16,
    /// 0 to 16 bits.
    pub length: u8,
}

/// Best rules of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cell {
    /// Admin tier.
    pub admin: Hit,
    /// Later tiers.
    pub rest: Hit,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowChange {
    /// Zeros for none.
    Sets(EndpointId, SetsRow),
    /// `None` removes the row.
    Peer(IpNet, Option<PeerRow>),
    /// `None` removes the row.
    Ports(PortRange, Option<u32>),
    /// `None` removes the row. An existing cell keeps its counters.
    Cell(CellKey, Option<Cell>),
}

/// How programs apply the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Mode {
    /// Established flows survive a policy change.
    pub keeps_flows: bool,
    /// Packets that rules would drop pass.
    pub audits: bool,
}

/// Per endpoint.
pub const MAX_NAMED_PORTS: usize = 64;

/// Packets judged by a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Judged {
    pub packets: u64,
    /// Including Ethernet headers.
    pub bytes: u64,
}

/// All policy rows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PolicyRows {
    /// Rule sets by endpoint.
    pub sets: BTreeMap<EndpointId, SetsRow>,
    /// Prefixes.
    pub peers: BTreeMap<IpNet, PeerRow>,
    /// Port classes.
    pub ports: BTreeMap<PortRange, u32>,
    /// Cells and their counters.
    pub cells: BTreeMap<CellKey, (Cell, Judged)>,
    /// Changes of the rows; zero before any policy.
    pub generation: u32,
}
