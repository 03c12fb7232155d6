//! What a connection may ask of a server, above TCP and UDP: which HTTP requests, which names in a TLS handshake, and which names of DNS.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::names::NamePattern;

/// What connections may carry that a rule with requests lets pass: a union, to which each rule that matches a connection adds.
///
/// Where `names` has any, queries of DNS are all that passes. Else a connection that begins with a TLS handshake is looked at for its server name
/// alone, any other one for its HTTP requests.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct Requests {
    /// HTTP requests (HTTP/1.1 and HTTP/2 without TLS) that may pass; none if empty.
    pub http: BTreeSet<HttpRule>,
    /// Names that a TLS handshake may ask for; none if empty.
    pub server_names: BTreeSet<ServerName>,
    /// Names that queries of DNS may ask for, over UDP and TCP; none if empty. A file of an earlier version has no such field.
    #[serde(default)]
    pub names: BTreeSet<NamePattern>,
    /// Whether connections pass unseen while no proxy serves; else they are dropped.
    pub fails_open: bool,
}

/// What of an HTTP request must hold; what is `None` or empty holds of every request.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct HttpRule {
    /// Method.
    pub method: Option<Pattern>,
    /// Path with its query, as the request has it (`:path`), normalized (RFC 3986, section 6.2.2).
    pub path: Option<Pattern>,
    /// Host (`:authority`, `Host`), with the port if the request names one.
    pub host: Option<Pattern>,
    /// All of them.
    pub headers: BTreeSet<HeaderRule>,
}

/// What a whole text must be.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Pattern {
    /// This.
    Exact(String),
    /// This, then anything.
    Prefix(String),
    /// Matched by this regular expression, which Rust's `regex` and RE2 understand alike; the whole text is.
    Regex(String),
}

/// What a header must be.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct HeaderRule {
    /// Name, in lower case.
    pub name: String,
    /// Value; `None` for any.
    pub value: Option<String>,
}

/// A name of a TLS handshake (server name indication, RFC 6066), in lower case.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ServerName {
    /// This name.
    Exact(String),
    /// Every name that ends with a dot and this one: `*.example.com`, without the star and the dot.
    Under(String),
}

impl Requests {
    /// What either lets pass.
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
