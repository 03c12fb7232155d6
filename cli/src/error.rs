//! The end of a command: its exit status, and the message of a failure.

use std::{fmt, io, process::ExitCode};

use wharf_api::{ErrorCode, Verdict, client::ClientError};
use wharf_sandbox::SandboxError;

use crate::{args::BadLabel, render::text::safe};

/// Exit status; scripts act on it, so the numbers stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    /// The command succeeded and its subject is healthy.
    Ok,
    /// The subject is unhealthy or not found, or the request was refused.
    Unwell,
    /// The agent cannot be reached; for `status` also: the agent is down.
    Unreachable,
    /// The command line is wrong.
    Usage,
    /// That of a command which `sandbox run` ran, or why it did not.
    Command(u8),
}

impl Exit {
    /// `Ok` if `well`, else `Unwell`.
    pub(crate) fn well(well: bool) -> Self {
        if well { Self::Ok } else { Self::Unwell }
    }
}

impl From<Verdict> for Exit {
    fn from(verdict: Verdict) -> Self {
        match verdict {
            Verdict::Ok => Self::Ok,
            Verdict::Degraded => Self::Unwell,
            Verdict::Down => Self::Unreachable,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(match exit {
            Exit::Ok => 0,
            Exit::Unwell => 1,
            Exit::Unreachable => 2,
            Exit::Usage => 3,
            Exit::Command(status) => status,
        })
    }
}

/// Why a command failed. Printed as `wharf: MESSAGE` and, on a second line, what the operator can do.
#[derive(Debug)]
pub(crate) struct CliError {
    /// Exit status.
    pub(crate) exit: Exit,
    /// Operation, subject and cause.
    pub(crate) message: String,
    /// What the operator can do.
    pub(crate) hint: Option<String>,
}

impl CliError {
    /// Refused, not found, or failed.
    pub(crate) fn refused(message: impl Into<String>) -> Self {
        Self { exit: Exit::Unwell, message: message.into(), hint: None }
    }

    /// The command line is wrong in a way that only showed now.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self { exit: Exit::Usage, message: message.into(), hint: None }
    }

    /// Adds what the operator can do.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Standard output cannot be written. A reader that went away (`wharf ... | head`) is no failure and says nothing.
    pub(crate) fn output(error: &io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe {
            Self { exit: Exit::Ok, message: String::new(), hint: None }
        } else {
            Self::refused(format!("writing standard output: {error}"))
        }
    }

    /// True when there is nothing to say.
    pub(crate) fn is_silent(&self) -> bool {
        self.message.is_empty()
    }
}

impl fmt::Display for CliError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "wharf: {}", safe(&self.message))?;
        match &self.hint {
            Some(hint) => write!(f, "\n  hint: {}", safe(hint)),
            None => Ok(()),
        }
    }
}

impl From<BadLabel> for CliError {
    fn from(error: BadLabel) -> Self {
        Self::usage(error.to_string())
    }
}

impl From<SandboxError> for CliError {
    fn from(error: SandboxError) -> Self {
        Self { exit: Exit::Unwell, message: error.to_string(), hint: error.hint() }
    }
}

impl From<ClientError> for CliError {
    fn from(error: ClientError) -> Self {
        let exit = match error.code() {
            _ if error.is_unreachable() => Exit::Unreachable,
            // An invalid request is a usage error: the agent, not the CLI, parses labels and filters.
            Some(ErrorCode::InvalidRequest) => Exit::Usage,
            _ => Exit::Unwell,
        };
        match error {
            // The agent's message already names the operation; its hint is printed on a separate line.
            ClientError::Api { error, .. } => Self { exit, message: error.message, hint: error.hint },
            ClientError::Connect { .. } => Self {
                exit,
                message: error.to_string(),
                hint: Some(
                    "`systemctl status wharf-agent`; another agent's socket: --socket or WHARF_SOCKET".to_owned(),
                ),
            },
            other => Self { exit, message: other.to_string(), hint: None },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hostile_message_stays_on_its_line() {
        let err = CliError::refused("no \x1b[31mred\x1b[0m\nwharf: all is well").hint("a\rb");
        assert_eq!(err.to_string(), "wharf: no \\u{1b}[31mred\\u{1b}[0m\\nwharf: all is well\n  hint: a\\rb");
    }

    #[test]
    fn a_reader_that_left_is_no_failure() {
        let err = CliError::output(&io::ErrorKind::BrokenPipe.into());
        assert!(err.is_silent());
        assert_eq!(err.exit, Exit::Ok);
        assert_eq!(CliError::output(&io::ErrorKind::StorageFull.into()).exit, Exit::Unwell);
    }
}
