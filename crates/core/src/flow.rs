//! Flow tables for users: rows, filters, usage. `wharf_common::flow` defines the life cycle.

use std::{net::IpAddr, time::Duration};

use ipnet::IpNet;
use wharf_common::FlowState;

use crate::ids::EndpointId;

/// One end of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowEnd {
    pub address: IpAddr,
    /// Of TCP, UDP and SCTP; identifier of ICMP echo; else zero.
    pub port: u16,
}

/// A current or recent flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Flow {
    /// Sender of the first packet.
    pub source: FlowEnd,
    /// The other end.
    pub destination: FlowEnd,
    /// IANA number.
    pub protocol: u8,
    pub state: FlowState,
    /// Between two endpoints, through the node's stack.
    pub by_stack: bool,
    /// The proxy is the source, in the source's name.
    pub by_proxy: bool,
    /// In the table without eviction.
    pub kept: bool,
    /// Endpoint charged for the row; none for an impossible id.
    pub owner: Option<EndpointId>,
    /// Since the last packet, to about a second.
    pub idle: Duration,
    /// Until the row may be collected without further packets.
    pub left: Duration,
}

/// Selects flows by every criterion.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FlowFilter {
    /// Of one end; empty matches any.
    pub addresses: Vec<IpAddr>,
    /// Of one end.
    pub network: Option<IpNet>,
    /// Of one end.
    pub port: Option<u16>,
    /// IANA number.
    pub protocol: Option<u8>,
    pub state: Option<FlowState>,
}

impl FlowFilter {
    /// Every criterion matches.
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
    /// The first, unordered.
    pub flows: Vec<Flow>,
    /// Omitted flows.
    pub more: u64,
}

/// Usage of the flow tables since their creation; upgrades keep the counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FlowUsage {
    /// Flows used by both ends.
    pub rows: u64,
    /// In flows.
    pub limit: u64,
    /// Of ended flows.
    pub expired: u64,
    /// Of deleted endpoints.
    pub orphaned: u64,
    /// Packets that may lose their flow: the endpoint's row quota is used.
    pub over_quota: u64,
    /// Packets that may lose their flow: the table is full.
    pub no_room: u64,
    /// Packets without a flow: the endpoint opened too many at once.
    pub untracked: u64,
    /// Of the collection.
    pub took: Duration,
    /// The endpoint with the most flows, kept or begun within a second. Known if the table is nearly full, or packets
    /// lost their flows since the previous collection.
    pub busiest: Option<(EndpointId, u64)>,
}

impl FlowUsage {
    const WARN_PERCENT: u64 = 80;

    /// An operator should act before flows can be evicted.
    #[must_use]
    pub const fn is_nearly_full(&self) -> bool {
        self.limit > 0 && self.rows.saturating_mul(100) >= self.limit.saturating_mul(Self::WARN_PERCENT)
    }
}

/// Open connections to the node's proxies.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProxyClients {
    /// Of all endpoints.
    pub open: u64,
    /// At their limit now, or since the previous count.
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
            by_proxy: false,
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
