//! Security labels, and the numbers of label sets.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::ids::IdError;

/// Security identity; below 256 reserved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Identity(pub u32);

impl Identity {
    pub const HOST: Self = Self(wharf_common::policy::IDENTITY_NODE);
    /// Peers outside.
    pub const WORLD: Self = Self(2);
    /// On this node, without an endpoint.
    pub const UNMANAGED: Self = Self(3);
    /// Health endpoints.
    pub const HEALTH: Self = Self(4);
    /// Endpoints whose labels are unknown yet.
    pub const INIT: Self = Self(5);
    /// Other nodes.
    pub const REMOTE_NODE: Self = Self(6);
    /// Containers of other nodes whose labels are unknown.
    pub const UNKNOWN_POD: Self = Self(7);
    /// First allocated identity.
    pub const FIRST_LOCAL: Self = Self(256);
    /// First of the label sets of other nodes' containers: not allocated, and not kept over a restart.
    pub const FIRST_ELSEWHERE: Self = Self(1 << 16);
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A label `source:key=value`, for example `k8s:app=web`. The source vouches for it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Label {
    /// Lower-case letters and digits: `k8s`, `cni`, `reserved`, `container`, ...
    pub source: String,
    /// Not empty, no `=`.
    pub key: String,
    /// May be empty.
    pub value: String,
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}={}", self.source, self.key, self.value)
    }
}

impl FromStr for Label {
    type Err = IdError;
    fn from_str(s: &str) -> Result<Self, IdError> {
        let bad = |reason| IdError { kind: "label", value: s.chars().take(80).collect(), reason };
        if s.len() > 512 {
            return Err(bad("must be at most 512 bytes"));
        }
        if s.chars().any(char::is_control) {
            return Err(bad("must not hold control characters"));
        }
        let (source, rest) = s.split_once(':').ok_or_else(|| bad("must be source:key=value"))?;
        if source.is_empty() || !source.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit()) {
            return Err(bad("source must be lower-case letters and digits"));
        }
        let (key, value) = rest.split_once('=').unwrap_or((rest, ""));
        if key.is_empty() {
            return Err(bad("key must not be empty"));
        }
        Ok(Self { source: source.to_owned(), key: key.to_owned(), value: value.to_owned() })
    }
}

impl TryFrom<String> for Label {
    type Error = IdError;
    fn try_from(s: String) -> Result<Self, IdError> {
        s.parse()
    }
}

impl From<Label> for String {
    fn from(l: Label) -> Self {
        l.to_string()
    }
}
