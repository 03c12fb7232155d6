//! Flows of endpoints as people look at them: rows of the flow tables, filters, fill. `wharf_common::flow` has the rules by which a
//! flow lives; the programs apply them.

use std::{net::IpAddr, time::Duration};

use ipnet::IpNet;
use wharf_common::FlowState;

use crate::ids::EndpointId;

/// One end of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowEnd {
    /// Address.
    pub address: IpAddr,
    /// Port of TCP, UDP and SCTP, identifier of an ICMP echo; zero for other protocols.
    pub port: u16,
}

/// A flow that an endpoint of the node has, or had a moment ago.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Flow {
    /// The end that sent the first packet.
    pub source: FlowEnd,
    /// The other end.
    pub destination: FlowEnd,
    /// Protocol number (IANA).
    pub protocol: u8,
    /// Where it is in its life.
    pub state: FlowState,
    /// Between two endpoints of the node, its packets take the node's stack.
    pub by_stack: bool,
    /// It is in the table from which nothing is evicted.
    pub kept: bool,
    /// Endpoint that its row is charged to; none when the row has an impossible id.
    pub owner: Option<EndpointId>,
    /// Since its last packet, to about a second.
    pub idle: Duration,
    /// Until its row may be collected, unless a packet comes; zero when it may be now.
    pub left: Duration,
}

/// Which flows are meant: those that have all that is given.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FlowFilter {
    /// One end has one of these addresses; empty for any.
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
    /// Whether a flow is meant.
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

/// Flows that were asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FlowList {
    /// The first of them, in no order.
    pub flows: Vec<Flow>,
    /// How many more there are.
    pub more: u64,
}

/// The flow tables after a collection. Counts are since the tables were made, which an upgrade carries over.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FlowUsage {
    /// Flows that both ends use.
    pub rows: u64,
    /// So many fit.
    pub limit: u64,
    /// Rows that were collected because their flow was over.
    pub expired: u64,
    /// Rows that were collected because an endpoint of theirs was gone.
    pub orphaned: u64,
    /// Packets whose flow may be evicted because its endpoint has as many rows as one may.
    pub over_quota: u64,
    /// Packets whose flow may be evicted because the table is full.
    pub no_room: u64,
    /// Packets whose flow is not tracked because its endpoint began too many at once.
    pub untracked: u64,
    /// How long the collection took.
    pub took: Duration,
}

impl FlowUsage {
    /// Share of the table from which an operator is warned, percent.
    const WARN_PERCENT: u64 = 80;

    /// Whether an operator is to act before flows can be evicted.
    #[must_use]
    pub const fn is_nearly_full(&self) -> bool {
        self.limit > 0 && self.rows.saturating_mul(100) >= self.limit.saturating_mul(Self::WARN_PERCENT)
    }
}

/// Connections that endpoints have open to the node's proxies, as one count found them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProxyClients {
    /// Those of all endpoints.
    pub open: u64,
    /// Endpoints that have their share.
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
