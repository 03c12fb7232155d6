//! Newtypes for ids; only valid values can be constructed.

use std::{fmt, num::NonZeroU16, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::rules;

/// The lowest is 1.
#[allow(clippy::cast_possible_truncation, reason = "asserted to fit; a conversion that can fail is no constant")]
pub const MAX_ENDPOINT_ID: u16 = {
    assert!(wharf_common::MAX_ENDPOINT_ID <= u16::MAX as u32);
    wharf_common::MAX_ENDPOINT_ID as u16
};

/// An invalid id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid {kind} {value:?}: {reason}")]
pub struct IdError {
    /// For example `container id`.
    pub kind: &'static str,
    /// Cut to 80 characters.
    pub value: String,
    /// The broken rule.
    pub reason: &'static str,
}

fn reject<T>(kind: &'static str, value: &str, reason: &'static str) -> Result<T, IdError> {
    Err(IdError { kind, value: value.chars().take(80).collect(), reason })
}

/// Node-local endpoint number, 1 to [`MAX_ENDPOINT_ID`]. Reused only after its delete has finished.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u16", into = "u16")]
pub struct EndpointId(NonZeroU16);

impl EndpointId {
    #[must_use]
    pub const fn get(self) -> u16 {
        self.0.get()
    }
}

impl TryFrom<u16> for EndpointId {
    type Error = IdError;
    fn try_from(n: u16) -> Result<Self, IdError> {
        match NonZeroU16::new(n) {
            Some(id) if n <= MAX_ENDPOINT_ID => Ok(Self(id)),
            _ => reject("endpoint id", &n.to_string(), "must be 1 to 16383"),
        }
    }
}

impl From<EndpointId> for u16 {
    fn from(id: EndpointId) -> Self {
        id.get()
    }
}

impl FromStr for EndpointId {
    type Err = IdError;
    fn from_str(s: &str) -> Result<Self, IdError> {
        match s.parse::<u16>() {
            Ok(n) => Self::try_from(n),
            Err(_) => reject("endpoint id", s, "must be 1 to 16383"),
        }
    }
}

impl fmt::Display for EndpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Number of an attachment on this node; grows, never reused. Every destructive operation names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Epoch(pub u64);

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Kernel interface index, above 0, of one network namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct IfIndex(pub u32);

impl fmt::Display for IfIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident, $kind:literal, $check:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(pub(crate) String);

        impl $name {
            /// Parses and checks a text.
            ///
            /// # Errors
            /// The broken rule.
            pub fn parse(s: &str) -> Result<Self, IdError> {
                let check: fn(&str) -> Result<(), &'static str> = $check;
                match check(s) {
                    Ok(()) => Ok(Self(s.to_owned())),
                    Err(reason) => reject($kind, s, reason),
                }
            }

            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = IdError;
            fn try_from(s: String) -> Result<Self, IdError> {
                Self::parse(&s)
            }
        }

        impl From<$name> for String {
            fn from(v: $name) -> Self {
                v.0
            }
        }

        impl FromStr for $name {
            type Err = IdError;
            fn from_str(s: &str) -> Result<Self, IdError> {
                Self::parse(s)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

text_id! {
    /// Container id (CNI spec, section 2): alphanumeric first, then also `_ . -`.
    ContainerId, "container id", rules::name
}

impl ContainerId {
    /// Id of a `wharf sandbox`. The random number keeps a late delete from a later sandbox.
    ///
    /// # Errors
    /// The name is not valid in a container id.
    pub fn of_sandbox(name: &str, random: u32) -> Result<Self, IdError> {
        Self::parse(&format!("{name}-{random:08x}"))
    }

    /// The name given to [`Self::of_sandbox`].
    #[must_use]
    pub fn sandbox_name(&self) -> Option<&str> {
        let (name, random) = self.0.rsplit_once('-')?;
        let is_random = random.len() == 8 && random.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        is_random.then_some(name)
    }
}

text_id! {
    /// Interface name inside the container (CNI_IFNAME).
    IfName, "interface name", rules::ifname
}
text_id! {
    /// CNI network name.
    NetworkName, "network name", rules::name
}
text_id! {
    /// IPAM pool name.
    PoolName, "pool name", rules::name
}

text_id! {
    /// Program that ran the plugin, such as `containerd`.
    RuntimeName, "runtime", rules::program
}

text_id! {
    /// Container port name (core/v1 ContainerPort, `name`).
    PortName, "port name", rules::port_name
}

/// The CNI key of an attachment; unique among live endpoints.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Attachment {
    pub network: NetworkName,
    pub container_id: ContainerId,
    /// Inside the container.
    pub ifname: IfName,
}

impl fmt::Display for Attachment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}:{}", self.network, self.container_id, self.ifname)
    }
}

/// Ethernet address, six bytes in wire order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MacAddr(pub [u8; 6]);

impl fmt::Display for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl FromStr for MacAddr {
    type Err = IdError;
    fn from_str(s: &str) -> Result<Self, IdError> {
        let mut mac = [0; 6];
        let mut parts = s.split(':');
        for byte in &mut mac {
            match parts
                .next()
                .filter(|p| p.len() == 2 && p.bytes().all(|b| b.is_ascii_hexdigit()))
                .map(|p| u8::from_str_radix(p, 16))
            {
                Some(Ok(b)) => *byte = b,
                _ => {
                    return reject("MAC address", s, "must be six two-digit hex bytes joined by ':'");
                }
            }
        }
        if parts.next().is_some() {
            return reject("MAC address", s, "must be six two-digit hex bytes joined by ':'");
        }
        if mac[0] & 1 == 1 || mac == [0; 6] {
            return reject("MAC address", s, "must be a unicast address other than zero");
        }
        Ok(Self(mac))
    }
}

impl TryFrom<String> for MacAddr {
    type Error = IdError;
    fn try_from(s: String) -> Result<Self, IdError> {
        s.parse()
    }
}

impl From<MacAddr> for String {
    fn from(m: MacAddr) -> Self {
        m.to_string()
    }
}
