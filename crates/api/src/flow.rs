//! Flows that the programs track.

use std::{fmt, net::IpAddr, str::FromStr};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Default limit of `GET /v1/bpf/ct`.
pub const FLOWS_DEFAULT: u32 = 1_000;
/// Largest limit of `GET /v1/bpf/ct`, about 3 MiB of JSON.
pub const FLOWS_MOST: u32 = 10_000;

/// Query of `GET` and `DELETE /v1/bpf/ct`; all filters must match.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct FlowQuery {
    /// Endpoint at one end, in any form of `{id}`.
    #[param(pattern = r"^[^\x00-\x1f\x7f-\x9f]+$", max_length = 600, example = "7")]
    pub endpoint: Option<String>,
    /// Address or network (CIDR) at one end.
    #[param(value_type = Option<String>, pattern = r"^[0-9A-Fa-f:.]+(/[0-9]{1,3})?$", example = "10.87.0.0/24")]
    pub address: Option<AddressRange>,
    /// Port at one end.
    #[param(maximum = 65535, example = 443)]
    pub port: Option<u16>,
    /// `tcp`, `udp`, `sctp`, `icmp`, `icmpv6`, or an IANA number.
    #[param(value_type = Option<String>, pattern = "^(tcp|udp|sctp|icmp|icmpv6|[0-9]{1,3})$", example = "tcp")]
    pub protocol: Option<FlowProtocol>,
    /// State.
    pub state: Option<FlowState>,
    /// Maximum number of flows for `GET`, default 1,000; rejected for `DELETE`.
    #[param(minimum = 1, maximum = 10000, example = 100)]
    pub limit: Option<u32>,
    /// All flows: required for `DELETE` without a filter, rejected otherwise.
    pub all: Option<bool>,
}

impl FlowQuery {
    /// Whether any filter is set.
    #[must_use]
    pub fn is_filtered(&self) -> bool {
        *self != Self { limit: self.limit, all: self.all, ..Self::default() }
    }
}

/// Address or network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct AddressRange(pub IpNet);

/// Not an address or network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an address is IPv4 or IPv6, with /PREFIX for a network")]
pub struct NoAddress;

impl FromStr for AddressRange {
    type Err = NoAddress;

    fn from_str(text: &str) -> Result<Self, NoAddress> {
        // `::ffff:192.0.2.7` is the IPv4 address: flows have only that form.
        let one = |_| text.parse::<IpAddr>().map(|ip| IpNet::from(ip.to_canonical()));
        text.parse::<IpNet>().or_else(one).map(Self).map_err(|_| NoAddress)
    }
}

impl TryFrom<String> for AddressRange {
    type Error = NoAddress;

    fn try_from(text: String) -> Result<Self, NoAddress> {
        text.parse()
    }
}

impl From<AddressRange> for String {
    fn from(range: AddressRange) -> Self {
        range.0.to_string()
    }
}

/// IANA protocol number; as text, a common name or the number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String", into = "String")]
#[schema(value_type = String, example = "tcp")]
pub struct FlowProtocol(pub u8);

impl FlowProtocol {
    /// Protocols with names.
    pub const NAMED: [(&'static str, u8); 5] = [("tcp", 6), ("udp", 17), ("sctp", 132), ("icmp", 1), ("icmpv6", 58)];
}

/// Not a protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a protocol is tcp, udp, sctp, icmp, icmpv6 or a number from 0 to 255")]
pub struct NoProtocol;

impl FromStr for FlowProtocol {
    type Err = NoProtocol;

    fn from_str(text: &str) -> Result<Self, NoProtocol> {
        if let Some((_, number)) = Self::NAMED.iter().find(|(name, _)| *name == text) {
            return Ok(Self(*number));
        }
        // `parse` accepts a sign.
        let digits = text.bytes().all(|b| b.is_ascii_digit());
        text.parse().ok().filter(|_| digits).map(Self).ok_or(NoProtocol)
    }
}

impl fmt::Display for FlowProtocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Self::NAMED.iter().find(|(_, number)| *number == self.0) {
            Some((name, _)) => f.write_str(name),
            None => self.0.fmt(f),
        }
    }
}

impl TryFrom<String> for FlowProtocol {
    type Error = NoProtocol;

    fn try_from(text: String) -> Result<Self, NoProtocol> {
        text.parse()
    }
}

impl From<FlowProtocol> for String {
    fn from(protocol: FlowProtocol) -> Self {
        protocol.to_string()
    }
}

/// State of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum FlowState {
    /// Seen in one direction.
    New,
    /// Seen in both directions.
    Established,
    /// One end closed it.
    Closing,
    /// Both ends closed it, or one reset it.
    Closed,
}

impl FlowState {
    /// All states in order.
    pub const ALL: [Self; 4] = [Self::New, Self::Established, Self::Closing, Self::Closed];

    /// The name in the API.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Established => "established",
            Self::Closing => "closing",
            Self::Closed => "closed",
        }
    }
}

/// One end of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
pub struct FlowEnd {
    /// Address.
    #[schema(value_type = String)]
    pub address: IpAddr,
    /// TCP, UDP or SCTP port; ICMP echo identifier (same at both ends); otherwise 0.
    pub port: u16,
}

/// A flow in both directions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Flow {
    /// Protocol name or IANA number.
    #[schema(value_type = String, example = "tcp")]
    pub protocol: FlowProtocol,
    /// Sender of the first packet.
    pub source: FlowEnd,
    /// The other end.
    pub destination: FlowEnd,
    /// State.
    pub state: FlowState,
    /// Endpoint that the row counts for: the initiator, or the endpoint reached from outside.
    pub owner: Option<u16>,
    /// Whether packets take the node's stack, between two endpoints of the node.
    pub by_stack: bool,
    /// Whether the node's proxy sends the packets with the source's address. The source can have another flow with the
    /// same ports.
    #[serde(default)]
    pub by_proxy: bool,
    /// Whether it is protected from eviction by newer flows.
    pub kept: bool,
    /// Milliseconds since the last packet, accurate to about a second.
    pub idle_ms: u64,
    /// Milliseconds until collection without further packets.
    pub left_ms: u64,
}

/// Body of `GET /v1/bpf/ct`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FlowList {
    /// By source, destination and protocol. The selection at the limit is arbitrary.
    pub flows: Vec<Flow>,
    /// Number of omitted flows.
    pub more: u64,
}

/// Body of the answer to `DELETE /v1/bpf/ct`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FlowsRemoved {
    /// Removed flows.
    pub removed: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_networks() {
        for (text, shown) in [
            ("10.0.0.1", "10.0.0.1/32"),
            ("10.0.0.0/8", "10.0.0.0/8"),
            ("fd00::1", "fd00::1/128"),
            ("::/0", "::/0"),
            ("::ffff:10.0.0.1", "10.0.0.1/32"),
        ] {
            assert_eq!(text.parse::<AddressRange>().map(String::from).as_deref(), Ok(shown), "{text}");
        }
        for bad in
            ["", "/", "10.0.0.1/33", "10.0.0/8", "fd00::/129", "10.0.0.1 ", "10.0.0.1/-1", "web", "1", "::1%eth0"]
        {
            assert_eq!(bad.parse::<AddressRange>(), Err(NoAddress), "{bad:?}");
        }
    }

    #[test]
    fn protocols_by_name_and_number() {
        for (text, number, shown) in [("tcp", 6, "tcp"), ("17", 17, "udp"), ("icmpv6", 58, "icmpv6"), ("047", 47, "47")]
        {
            assert_eq!(text.parse(), Ok(FlowProtocol(number)), "{text}");
            assert_eq!(FlowProtocol(number).to_string(), shown);
        }
        for bad in ["", "TCP", "256", "+6", "-1", "6 ", "tcp,udp", "99999999999"] {
            assert_eq!(bad.parse::<FlowProtocol>(), Err(NoProtocol), "{bad:?}");
        }
    }

    #[test]
    fn a_limit_is_no_filter() {
        assert!(!FlowQuery { limit: Some(1), all: Some(true), ..FlowQuery::default() }.is_filtered());
        assert!(FlowQuery { port: Some(0), ..FlowQuery::default() }.is_filtered());
    }
}
