//! What became of each query, for whoever keeps that.

use std::{
    fmt,
    net::SocketAddr,
    time::{Duration, SystemTime},
};

use crate::{
    listener::Member,
    wire::{self, Malformed, Question},
};

/// How a query came, and how it went on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Transport {
    /// One datagram.
    Udp,
    /// A message of a connection.
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

/// A query and what became of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// When the query came.
    pub at: SystemTime,
    /// The listener's port, host byte order.
    pub listener: u16,
    /// The endpoint that asked.
    pub member: Member,
    /// Who asked.
    pub client: SocketAddr,
    /// Whom it asked.
    pub server: SocketAddr,
    /// How it came.
    pub transport: Transport,
    /// What it asked, if that could be read.
    pub question: Option<Question>,
    /// What became of it.
    pub outcome: Outcome,
    /// How long the server took; `None` if it was not asked or did not answer.
    pub took: Option<Duration>,
}

/// What became of a query.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Outcome {
    /// The client has the server's answer.
    #[error("answered: {}, {addresses} addresses", wire::rcode_name(*.rcode))]
    Answered {
        /// The code of the answer (RFC 1035, section 4.1.1), 0 to 15.
        rcode: u8,
        /// How many addresses it gives for the name.
        addresses: usize,
    },
    /// The rules do not let the name be asked: REFUSED.
    #[error("refused by policy")]
    Refused,
    /// It is no query that can be passed on: FORMERR, NOTIMP, or nothing.
    #[error("malformed: {0}")]
    Malformed(#[from] Malformed),
    /// Too many queries are pending: SERVFAIL.
    #[error("refused: too many queries are pending, of this client or of all")]
    Overloaded,
    /// The server did not answer in time. The client gets nothing, as without the proxy.
    #[error("the server did not answer")]
    Unanswered,
    /// The server could not be asked, or said that it does not listen: SERVFAIL.
    #[error("the server could not be asked: {0}")]
    Failed(String),
    /// The records of the server's answer cannot be read: SERVFAIL.
    #[error("the server's answer cannot be read")]
    Unreadable,
    /// The node did not take note of the addresses: SERVFAIL.
    #[error("the addresses in the answer were not learned: {0}")]
    NotLearned(String),
    /// The endpoint went away before the answer came. Nobody gets that.
    #[error("the endpoint is gone")]
    Gone,
    /// The answer could not be sent to the client.
    #[error("the answer could not be sent: {0}")]
    Undelivered(String),
}

impl Outcome {
    /// Its name in totals.
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

    /// The code of the answer that the proxy gives by itself; `None` if it gives none.
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
