//! Requests above TCP and UDP: HTTP requests, TLS server names, DNS names.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::names::NamePattern;

/// Requests that a rule accepts; for a connection, the union over all matching rules. An empty set accepts none.
///
/// With `names`, only DNS queries pass. Otherwise, a connection that begins with a TLS handshake is checked only for
/// its server name, any other one for its HTTP requests.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct Requests {
    /// Accepted HTTP requests (HTTP/1.1 and HTTP/2 without TLS).
    pub http: BTreeSet<HttpRule>,
    /// Accepted TLS server names.
    pub server_names: BTreeSet<ServerName>,
    /// Accepted DNS names in queries over UDP and TCP. Absent in files of earlier versions.
    #[serde(default)]
    pub names: BTreeSet<NamePattern>,
    /// Without a proxy, connections pass unchecked instead of being dropped.
    pub fails_open: bool,
}

/// Conditions on an HTTP request; `None` or empty matches every request.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct HttpRule {
    /// Method.
    pub method: Option<Pattern>,
    /// Path with query (`:path`), normalized (RFC 3986, section 6.2.2).
    pub path: Option<Pattern>,
    /// Host (`:authority`, `Host`), with the port if present.
    pub host: Option<Pattern>,
    /// Required headers.
    pub headers: BTreeSet<HeaderRule>,
}

/// Condition on a whole text.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Pattern {
    /// Equal.
    Exact(String),
    /// Prefix.
    Prefix(String),
    /// Regular expression for the whole text, in the common syntax of Rust's `regex` and RE2.
    Regex(String),
}

/// Condition on a header.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct HeaderRule {
    /// Name, lower case.
    pub name: String,
    /// Value; `None` for any.
    pub value: Option<String>,
}

/// TLS server name (RFC 6066), lower case.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ServerName {
    /// Exact name.
    Exact(String),
    /// Every proper subdomain: `*.example.com` without star and dot.
    Under(String),
}

impl Requests {
    /// Requests that either accepts.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        Self {
            http: self.http.union(&other.http).cloned().collect(),
            server_names: self.server_names.union(&other.server_names).cloned().collect(),
            names: self.names.union(&other.names).cloned().collect(),
            fails_open: self.fails_open && other.fails_open,
        }
    }
}
