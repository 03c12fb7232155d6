//! What can go wrong between a client and the agent.

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
        /// What the kernel said.
        cause: io::Error,
    },
    /// The agent took the request and closed the connection before it had answered: it stopped, or was killed. What it
    /// did until then is not known.
    #[error("{operation}: the agent closed the connection before it had answered ({reason}); was it restarted?")]
    Closed {
        /// Method and path.
        operation: String,
        /// What was seen of it.
        reason: String,
    },
    /// No whole answer within the time limit. What the agent did is not known.
    #[error("{operation}: no answer from the agent within {} ms", after.as_millis())]
    Timeout {
        /// Method and path.
        operation: String,
        /// The time limit.
        after: Duration,
    },
    /// The answer is not one that the agent gives. Something else may listen on the socket, or an agent of another
    /// version.
    #[error("{operation}: {reason}; is the listener a wharf-agent of this version?")]
    Protocol {
        /// Method and path.
        operation: String,
        /// What is wrong with the answer.
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
    /// True when no answer was got: the agent is not there, went away, or does not answer. Whether it acted on the
    /// request is then not known.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        matches!(self, Self::Connect { .. } | Self::Closed { .. } | Self::Timeout { .. })
    }

    /// True when this user may not connect to the socket; whether an agent serves it is then not known.
    #[must_use]
    pub fn is_no_permission(&self) -> bool {
        matches!(self, Self::Connect { cause, .. } if cause.kind() == io::ErrorKind::PermissionDenied)
    }

    /// The agent's stable code, when it answered with an error.
    #[must_use]
    pub fn code(&self) -> Option<ErrorCode> {
        match self {
            Self::Api { error, .. } => Some(error.code),
            _ => None,
        }
    }

    /// True for the agent's "no such endpoint, lease, map or pool".
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        self.code() == Some(ErrorCode::NotFound)
    }

    /// After how long the agent asks to be asked again, if it does.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Api { error, .. } => error.retry_after_ms.map(Duration::from_millis),
            _ => None,
        }
    }
}

/// The cause in words that tell what to do. The common ones are whole; the rest keep the kernel's words, and so does what
/// [`super::exchange`] found out about the path.
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
