//! Rows of policy's tables, as the kernel keeps them, and what endpoints say of themselves. `wharf-policy` says which there are and in which order they change;
//! `wharf_common::policy` how the programs read them.

use std::{collections::BTreeMap, num::NonZeroU16};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use wharf_common::policy::{CellKey, Hit, PeerRow, SetsRow};

use crate::{ids::EndpointId, nat::Protocol};

/// Destination ports of a rule set that share their first bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortRange {
    /// Rule set.
    pub set: u32,
    /// Protocol number (IANA).
    pub protocol: u8,
    /// The lowest port; of ICMP and ICMPv6 the lowest type.
    pub first: u16,
    /// Number of leading bits that the ports share: 0 to 16.
    pub length: u8,
}

/// The best rules of a cell: of the admin tier, and of the tiers after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cell {
    /// Of the admin tier.
    pub admin: Hit,
    /// Of the tiers after it.
    pub rest: Hit,
}

/// A change of one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowChange {
    /// The rule sets of an endpoint; zeros where it has none.
    Sets(EndpointId, SetsRow),
    /// What is known of a prefix; `None` removes the row.
    Peer(IpNet, Option<PeerRow>),
    /// The class of ports; `None` removes the row.
    Ports(PortRange, Option<u32>),
    /// A cell; `None` removes the row. A cell that is there keeps its counters.
    Cell(CellKey, Option<Cell>),
}

/// What the programs do with the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Mode {
    /// Flows that both ends use go on when a change of policy would no longer let them begin.
    pub keeps_flows: bool,
    /// What the rules would drop passes.
    pub audits: bool,
}

/// What an endpoint has in place of the node's mode of enforcement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OwnEnforcement {
    /// It neither sends nor receives but what a rule accepts.
    Always,
    /// No policy selects it. To others it is a peer as before.
    Never,
}

/// A port that an endpoint declares by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NamedPort {
    /// Port of the container.
    pub port: NonZeroU16,
    /// Protocol.
    pub protocol: Protocol,
}

/// Named ports of an endpoint, at most.
pub const MAX_NAMED_PORTS: usize = 64;

/// Packets that were judged by a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Judged {
    /// Packets.
    pub packets: u64,
    /// Bytes, Ethernet header included.
    pub bytes: u64,
}

/// All rows of policy's tables.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PolicyRows {
    /// Endpoints with a rule set.
    pub sets: BTreeMap<EndpointId, SetsRow>,
    /// What is known of prefixes.
    pub peers: BTreeMap<IpNet, PeerRow>,
    /// Classes of ports.
    pub ports: BTreeMap<PortRange, u32>,
    /// Cells, with what was judged by them.
    pub cells: BTreeMap<CellKey, (Cell, Judged)>,
    /// How often the rows changed; zero before there is policy.
    pub generation: u32,
}
