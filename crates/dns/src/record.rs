//! Records of queries.

use std::{
    fmt,
    net::SocketAddr,
    time::{Duration, SystemTime},
};

use crate::{
    listener::Member,
    wire::{self, Malformed, Question},
};

/// Transport of a query.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Transport {
    /// One datagram.
    Udp,
    /// One message on a connection.
    Tcp,
}

impl fmt::Display for Transport {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Udp => "UDP",
            Self::Tcp => "TCP",
        })
    }
}

/// A query and its outcome.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Arrival.
    pub at: SystemTime,
    /// The listener's port, host byte order.
    pub listener: u16,
    /// The querying endpoint.
    pub member: Member,
    /// The client's address.
    pub client: SocketAddr,
    /// The queried server.
    pub server: SocketAddr,
    /// Transport of the query.
    pub transport: Transport,
    /// Question, if readable.
    pub question: Option<Question>,
    pub outcome: Outcome,
    /// Response time; `None` without an answer.
    pub took: Option<Duration>,
}

/// Outcome of a query.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Outcome {
    /// The client has the answer.
    #[error("answered: {}, {addresses} addresses", wire::rcode_name(*.rcode))]
    Answered {
        /// Response code (RFC 1035, section 4.1.1), 0 to 15.
        rcode: u8,
        /// Number of addresses.
        addresses: usize,
    },
    /// Policy denies the name: REFUSED.
    #[error("refused by policy")]
    Refused,
    /// Not forwarded: FORMERR, NOTIMP, or no answer.
    #[error("malformed: {0}")]
    Malformed(#[from] Malformed),
    /// Too many pending queries: SERVFAIL.
    #[error("refused: too many queries are pending, of this client or of all")]
    Overloaded,
    /// No answer in time: none to the client.
    #[error("the server did not answer")]
    Unanswered,
    /// The server is unreachable: SERVFAIL.
    #[error("the server could not be asked: {0}")]
    Failed(String),
    /// Invalid records: SERVFAIL.
    #[error("the server's answer cannot be read")]
    Unreadable,
    /// [`crate::Names::learn`] failed: SERVFAIL.
    #[error("the addresses in the answer were not learned: {0}")]
    NotLearned(String),
    /// The endpoint ended.
    #[error("the endpoint is gone")]
    Gone,
    /// Sending to the client failed.
    #[error("the answer could not be sent: {0}")]
    Undelivered(String),
}

impl Outcome {
    /// Label in totals.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Answered { .. } => "answered",
            Self::Refused => "refused",
            Self::Malformed(_) => "malformed",
            Self::Overloaded => "overloaded",
            Self::Unanswered => "unanswered",
            Self::Failed(_) => "failed",
            Self::Unreadable => "unreadable",
            Self::NotLearned(_) => "not-learned",
            Self::Gone => "gone",
            Self::Undelivered(_) => "undelivered",
        }
    }

    pub(crate) const fn own_code(&self) -> Option<u8> {
        match self {
            Self::Refused => Some(wire::REFUSED),
            Self::Malformed(Malformed::Kind(_) | Malformed::Transfer) => Some(wire::NOTIMP),
            Self::Malformed(_) => Some(wire::FORMERR),
            Self::Overloaded | Self::Failed(_) | Self::Unreadable | Self::NotLearned(_) => Some(wire::SERVFAIL),
            Self::Answered { .. } | Self::Unanswered | Self::Gone | Self::Undelivered(_) => None,
        }
    }
}
