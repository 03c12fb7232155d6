//! Ports of endpoints.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
};

use serde::{Deserialize, Serialize};

/// Protocol of a published port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = PortProtocol))]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

impl Protocol {
    /// Every protocol.
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::Sctp];

    /// IANA number.
    #[must_use]
    pub const fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        })
    }
}

/// A named port of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct NamedPort {
    /// Port of the container.
    #[cfg_attr(feature = "schema", schema(value_type = u16, minimum = 1))]
    pub port: NonZeroU16,
    /// Protocol.
    pub protocol: Protocol,
}

/// A port of the node that forwards to a port of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct PublishedPort {
    /// Protocol of both ports.
    pub protocol: Protocol,
    /// Address of the node for the port. When absent, every address of each family that the container has; 0.0.0.0
    /// and :: mean every address of their family.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub host_ip: Option<IpAddr>,
    /// Port of the node.
    #[cfg_attr(feature = "schema", schema(value_type = u16, minimum = 1))]
    pub host_port: NonZeroU16,
    /// Port of the container.
    #[cfg_attr(feature = "schema", schema(value_type = u16, minimum = 1))]
    pub container_port: NonZeroU16,
}

impl PublishedPort {
    /// Both claim a port of one node address, in any family.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        let one_address = match (self.host_ip, other.host_ip) {
            (Some(a), Some(b)) => a.is_ipv4() == b.is_ipv4() && (a == b || a.is_unspecified() || b.is_unspecified()),
            _ => true,
        };
        one_address && (self.protocol, self.host_port) == (other.protocol, other.host_port)
    }
}

/// As `198.51.100.1:8080/tcp` or `8080/udp`.
impl fmt::Display for PublishedPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let port = self.host_port.get();
        match self.host_ip {
            Some(ip) => write!(f, "{}/{}", SocketAddr::new(ip, port), self.protocol),
            None => write!(f, "{port}/{}", self.protocol),
        }
    }
}
