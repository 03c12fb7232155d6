//! Errors of calls to the agent.

use std::{io, path::PathBuf, time::Duration};

use crate::{ApiError, ErrorCode};

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The socket cannot be connected to.
    #[error("connecting to the agent at {}: {}", socket.display(), connect_problem(cause))]
    Connect {
        /// The agent's socket.
        socket: PathBuf,
        /// The kernel's error.
        cause: io::Error,
    },
    /// The agent accepted the request and closed the connection before it answered, because it stopped or was killed.
    /// The request may be partly done.
    #[error("{operation}: the agent closed the connection before it had answered ({reason}); was it restarted?")]
    Closed {
        /// Method and path.
        operation: String,
        /// The connection's error.
        reason: String,
    },
    /// No complete answer within the time limit. The request may be done.
    #[error("{operation}: no answer from the agent within {} ms", after.as_millis())]
    Timeout {
        /// Method and path.
        operation: String,
        /// The time limit.
        after: Duration,
    },
    /// The answer is not valid for this API. Another program, or an agent of another version, may listen on the
    /// socket.
    #[error("{operation}: {reason}; is the listener a wharf-agent of this version?")]
    Protocol {
        /// Method and path.
        operation: String,
        /// The defect of the answer.
        reason: String,
    },
    /// The agent answered with an error.
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
    /// True when the agent does not run, went away, or does not answer. Whether it acted on the request is unknown.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        matches!(self, Self::Connect { .. } | Self::Closed { .. } | Self::Timeout { .. })
    }

    /// True when this user may not connect to the socket; whether an agent listens is unknown.
    #[must_use]
    pub fn is_no_permission(&self) -> bool {
        matches!(self, Self::Connect { cause, .. } if cause.kind() == io::ErrorKind::PermissionDenied)
    }

    /// The agent's stable error code, if it answered with an error.
    #[must_use]
    pub fn code(&self) -> Option<ErrorCode> {
        match self {
            Self::Api { error, .. } => Some(error.code),
            _ => None,
        }
    }

    /// True for the agent's `not-found`: no such endpoint, lease, map or pool.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        self.code() == Some(ErrorCode::NotFound)
    }

    /// The delay that the agent asks for before a retry.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Api { error, .. } => error.retry_after_ms.map(Duration::from_millis),
            _ => None,
        }
    }
}

/// The cause with advice, for the common errors. Other errors keep the kernel's message, or the message that
/// [`super::exchange`] has about the path.
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
        io::ErrorKind::WouldBlock => "the agent's queue of connections stayed full; it is overloaded or stuck".into(),
        _ => cause.to_string(),
    }
}

fn hint(error: &ApiError) -> String {
    error.hint.as_ref().map(|hint| format!(" ({hint})")).unwrap_or_default()
}
