//! Exit statuses and error messages.

use std::{fmt, fs, io, os::unix::fs::MetadataExt as _, path::Path, process::ExitCode};

use wharf_api::{
    ErrorCode, Verdict,
    client::{ClientError, why_agent_is_away},
};
use wharf_sandbox::SandboxError;

use crate::{args::BadLabel, render::text::safe};

/// Stable numbers for scripts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    Ok,
    /// Unhealthy or unknown subject, or refused request.
    Unwell,
    /// For `status`, also an agent that is down.
    Unreachable,
    Usage,
    /// Status of `sandbox run`'s command, or why it did not run.
    Command(u8),
}

impl Exit {
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

/// `wharf: MESSAGE`, with the hint on a second line.
#[derive(Debug)]
pub(crate) struct CliError {
    pub(crate) exit: Exit,
    /// Operation, subject and cause.
    pub(crate) message: String,
    pub(crate) hint: Option<String>,
}

impl CliError {
    pub(crate) fn refused(message: impl Into<String>) -> Self {
        Self { exit: Exit::Unwell, message: message.into(), hint: None }
    }

    /// A usage error after parsing.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self { exit: Exit::Usage, message: message.into(), hint: None }
    }

    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// A closed pipe (`wharf ... | head`) succeeds silently.
    pub(crate) fn output(error: &io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe {
            Self { exit: Exit::Ok, message: String::new(), hint: None }
        } else {
            Self::refused(format!("writing standard output: {error}"))
        }
    }

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
            Some(ErrorCode::InvalidRequest) => Exit::Usage,
            _ => Exit::Unwell,
        };
        match error {
            // The message names the operation.
            ClientError::Api { error, .. } => Self { exit, message: error.message, hint: error.hint },
            ClientError::Connect { ref socket, .. } if error.is_no_permission() => {
                Self { exit, hint: Some(permission_hint(group_of(socket).as_deref())), message: error.to_string() }
            }
            ClientError::Connect { .. } => Self {
                exit,
                message: error.to_string(),
                hint: Some(format!("{}; another agent's socket: --socket or WHARF_SOCKET", why_agent_is_away())),
            },
            other => Self { exit, message: other.to_string(), hint: None },
        }
    }
}

/// Name or number of the socket's group.
fn group_of(socket: &Path) -> Option<String> {
    let number = fs::metadata(socket).ok()?.gid().to_string();
    let groups = fs::read("/etc/group").unwrap_or_default();
    let groups = String::from_utf8_lossy(&groups);
    let named = |line: &str| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)? == number).then(|| name.to_owned())
    };
    Some(groups.lines().find_map(named).unwrap_or(number))
}

fn permission_hint(group: Option<&str>) -> String {
    match group {
        Some("root") => {
            "run it as root; for other users make the group wharf (`groupadd --system wharf`), to which the agent \
             gives its socket at the next start"
                .to_owned()
        }
        group => {
            let group = group.unwrap_or("wharf");
            format!(
                "run it as root, or as a member of the group {group}: `usermod -aG {group} USER`, then log in again"
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn without_permission_the_hint_is_about_the_group_of_the_socket() {
        let directory = tempfile::tempdir().unwrap();
        let denied = |socket: PathBuf| {
            CliError::from(ClientError::Connect { socket, cause: io::ErrorKind::PermissionDenied.into() })
        };
        let group = group_of(directory.path()).unwrap();
        let error = denied(directory.path().to_owned());
        assert_eq!(error.exit, Exit::Unreachable);
        assert!(error.message.contains("no permission"), "{error}");
        assert_eq!(error.hint, Some(permission_hint(Some(&group))));
        assert_eq!(group_of(Path::new("/")).as_deref(), Some("root"));
        assert!(permission_hint(Some("ops")).contains("member of the group ops: `usermod -aG ops USER`"));
        assert!(permission_hint(Some("root")).contains("groupadd --system wharf"));
        let unseen = denied(directory.path().join("none"));
        assert!(unseen.hint.unwrap().contains("member of the group wharf"));
    }

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
