//! Flow tables for users: rows, filters, usage. `wharf_common::flow` defines the life cycle, which the programs
//! implement.

use std::{net::IpAddr, time::Duration};

use ipnet::IpNet;
use wharf_common::FlowState;

use crate::ids::EndpointId;

/// One end of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowEnd {
    /// Address.
    pub address: IpAddr,
    /// Port of TCP, UDP and SCTP, identifier of ICMP echo, otherwise zero.
    pub port: u16,
}

/// A current or recent flow of an endpoint of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Flow {
    /// Sender of the first packet.
    pub source: FlowEnd,
    /// The other end.
    pub destination: FlowEnd,
    /// Protocol number (IANA).
    pub protocol: u8,
    /// State.
    pub state: FlowState,
    /// Packets between two endpoints of the node take the node's stack.
    pub by_stack: bool,
    /// The row is in the table without eviction.
    pub kept: bool,
    /// Endpoint charged for the row; none when the row has an impossible id.
    pub owner: Option<EndpointId>,
    /// Time since the last packet, to about a second.
    pub idle: Duration,
    /// Time until the row may be collected without further packets; zero when it may be now.
    pub left: Duration,
}

/// Selects flows that match every criterion.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FlowFilter {
    /// One end has one of these addresses; empty matches any.
    pub addresses: Vec<IpAddr>,
    /// One end is in this network.
    pub network: Option<IpNet>,
    /// One end has this port.
    pub port: Option<u16>,
    /// Protocol number (IANA).
    pub protocol: Option<u8>,
    /// State.
    pub state: Option<FlowState>,
}

impl FlowFilter {
    /// True when the flow matches.
    #[must_use]
    pub fn matches(&self, flow: &Flow) -> bool {
        let either = |wanted: &dyn Fn(&FlowEnd) -> bool| wanted(&flow.source) || wanted(&flow.destination);
        (self.addresses.is_empty() || either(&|end| self.addresses.contains(&end.address)))
            && self.network.is_none_or(|network| either(&|end| network.contains(&end.address)))
            && self.port.is_none_or(|port| either(&|end| end.port == port))
            && self.protocol.is_none_or(|protocol| flow.protocol == protocol)
            && self.state.is_none_or(|state| flow.state == state)
    }
}

/// Selected flows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FlowList {
    /// First flows, unordered.
    pub flows: Vec<Flow>,
    /// Number of omitted flows.
    pub more: u64,
}

/// Usage of the flow tables after a collection. Counts start with the creation of the tables; upgrades keep them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FlowUsage {
    /// Flows in use by both ends.
    pub rows: u64,
    /// Capacity, flows.
    pub limit: u64,
    /// Collected rows of ended flows.
    pub expired: u64,
    /// Collected rows of deleted endpoints.
    pub orphaned: u64,
    /// Packets of flows that may be evicted: the endpoint is at its row quota.
    pub over_quota: u64,
    /// Packets of flows that may be evicted: the table is full.
    pub no_room: u64,
    /// Packets of untracked flows: the endpoint opened too many at once.
    pub untracked: u64,
    /// Duration of the collection.
    pub took: Duration,
}

impl FlowUsage {
    /// Usage that warns the operator, percent.
    const WARN_PERCENT: u64 = 80;

    /// True when an operator should act before flows can be evicted.
    #[must_use]
    pub const fn is_nearly_full(&self) -> bool {
        self.limit > 0 && self.rows.saturating_mul(100) >= self.limit.saturating_mul(Self::WARN_PERCENT)
    }
}

/// Connections that endpoints have open to the node's proxies, as one count found them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProxyClients {
    /// Open connections of all endpoints.
    pub open: u64,
    /// Endpoints that reached their limit since the previous count, or are at it now.
    pub spent: Vec<EndpointId>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow() -> Flow {
        let end = |text: &str, port| FlowEnd { address: text.parse().expect("an address"), port };
        Flow {
            source: end("10.0.0.2", 40_000),
            destination: end("192.0.2.7", 443),
            protocol: 6,
            state: FlowState::Established,
            by_stack: false,
            kept: true,
            owner: None,
            idle: Duration::ZERO,
            left: Duration::ZERO,
        }
    }

    #[test]
    fn a_filter_asks_for_all_that_it_names_at_either_end() {
        let any = FlowFilter::default();
        let with = |change: &dyn Fn(&mut FlowFilter)| {
            let mut filter = any.clone();
            change(&mut filter);
            filter.matches(&flow())
        };
        assert!(any.matches(&flow()));
        for (address, expected) in [("10.0.0.2", true), ("192.0.2.7", true), ("10.0.0.3", false)] {
            assert_eq!(with(&|f| f.addresses = vec![address.parse().expect("an address")]), expected, "{address}");
        }
        for (network, expected) in [("10.0.0.0/24", true), ("192.0.2.0/29", true), ("10.0.1.0/24", false)] {
            assert_eq!(with(&|f| f.network = Some(network.parse().expect("a network"))), expected, "{network}");
        }
        for (port, expected) in [(443, true), (40_000, true), (80, false)] {
            assert_eq!(with(&|f| f.port = Some(port)), expected, "{port}");
        }
        assert!(with(&|f| f.protocol = Some(6)) && !with(&|f| f.protocol = Some(17)));
        assert!(with(&|f| f.state = Some(FlowState::Established)) && !with(&|f| f.state = Some(FlowState::New)));
        assert!(!with(&|f| (f.port, f.protocol) = (Some(443), Some(17))), "one of two is not enough");
    }
}
