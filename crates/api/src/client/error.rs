//! Errors of calls to the agent.

use std::{io, path::PathBuf, time::Duration};

use crate::{ApiError, ErrorCode};

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Connecting to the socket failed.
    #[error("connecting to the agent at {}: {}", socket.display(), connect_problem(cause))]
    Connect {
        /// The agent's socket.
        socket: PathBuf,
        /// The kernel's error.
        cause: io::Error,
    },
    /// The agent closed the connection without an answer. The request may be partly done.
    #[error("{operation}: the agent closed the connection before it had answered ({reason}); was it restarted?")]
    Closed {
        /// Method and path.
        operation: String,
        /// The connection's error.
        reason: String,
    },
    /// No complete answer in time. The request may be done.
    #[error("{operation}: no answer from the agent within {} ms", after.as_millis())]
    Timeout {
        /// Method and path.
        operation: String,
        /// The time limit.
        after: Duration,
    },
    /// Invalid answer, from another program or another version of the agent.
    #[error("{operation}: {reason}; is the listener a wharf-agent of this version?")]
    Protocol {
        /// Method and path.
        operation: String,
        /// Defect of the answer.
        reason: String,
    },
    /// An API error.
    #[error("{}{}", error.message, hint(error))]
    Api {
        /// Method and path.
        operation: String,
        /// HTTP status.
        status: u16,
        /// The agent's error.
        error: ApiError,
    },
}

impl ClientError {
    /// True when the agent is away or silent. It may have acted on the request.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        matches!(self, Self::Connect { .. } | Self::Closed { .. } | Self::Timeout { .. })
    }

    /// True when this user may not connect.
    #[must_use]
    pub fn is_no_permission(&self) -> bool {
        matches!(self, Self::Connect { cause, .. } if cause.kind() == io::ErrorKind::PermissionDenied)
    }

    /// The agent's error code, if any.
    #[must_use]
    pub fn code(&self) -> Option<ErrorCode> {
        match self {
            Self::Api { error, .. } => Some(error.code),
            _ => None,
        }
    }

    /// True for [`ErrorCode::NotFound`].
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        self.code() == Some(ErrorCode::NotFound)
    }

    /// Delay before a retry, from the agent.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Api { error, .. } => error.retry_after_ms.map(Duration::from_millis),
            _ => None,
        }
    }
}

/// Cause with advice for common errors.
fn connect_problem(cause: &io::Error) -> String {
    match cause.kind() {
        _ if cause.get_ref().is_some() => cause.to_string(),
        io::ErrorKind::NotFound => {
            "there is no such socket; is wharf-agent running, and with this run directory?".into()
        }
        io::ErrorKind::PermissionDenied => "no permission; the socket is for root and the members of its group".into(),
        io::ErrorKind::ConnectionRefused => {
            "refused: the socket is left over from an agent that ended; is wharf-agent running?".into()
        }
        io::ErrorKind::ConnectionReset => "the agent ended before it accepted the connection; was it restarted?".into(),
        io::ErrorKind::WouldBlock => "the agent's queue of connections stayed full; it is overloaded or stuck".into(),
        _ => cause.to_string(),
    }
}

fn hint(error: &ApiError) -> String {
    error.hint.as_ref().map(|hint| format!(" ({hint})")).unwrap_or_default()
}
