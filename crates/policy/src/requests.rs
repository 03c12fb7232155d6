//! HTTP requests, TLS server names, DNS names.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::names::NamePattern;

/// Requests that a rule, or for a connection any matching rule, accepts.
///
/// With `names`, only DNS queries pass. Otherwise, a connection that begins with a TLS handshake is checked for its
/// server name, any other for its HTTP requests.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct Requests {
    /// HTTP/1.1 and HTTP/2 without TLS.
    pub http: BTreeSet<HttpRule>,
    /// TLS server names.
    pub server_names: BTreeSet<ServerName>,
    /// DNS names. Absent in files of earlier versions.
    #[serde(default)]
    pub names: BTreeSet<NamePattern>,
    /// Without a proxy, connections pass.
    pub fails_open: bool,
}

/// An HTTP request; `None` or empty matches every request.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct HttpRule {
    pub method: Option<Pattern>,
    /// With query (`:path`), normalized (RFC 3986, section 6.2.2).
    pub path: Option<Pattern>,
    /// `:authority`, `Host`; with the port if present.
    pub host: Option<Pattern>,
    /// All must match.
    pub headers: BTreeSet<HeaderRule>,
}

/// Condition on a text.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Pattern {
    /// Equal.
    Exact(String),
    Prefix(String),
    /// Common syntax of Rust's `regex` and RE2.
    Regex(String),
}

/// Condition on a header.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct HeaderRule {
    /// Lower case.
    pub name: String,
    /// `None` for any.
    pub value: Option<String>,
}

/// TLS server name (RFC 6066), lower case.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ServerName {
    /// As written.
    Exact(String),
    /// Proper subdomains: `*.example.com` without star and dot.
    Under(String),
}

impl Requests {
    /// Accepts what either accepts.
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
