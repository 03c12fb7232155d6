//! What can go wrong with the queue.

use std::{io, path::PathBuf};

use wharf_names::ids::MAX_ENDPOINT_ID;

use super::{MAX_RECORD_BYTES, MAX_RECORDS, VERSION};

/// Why a record or its file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    /// It is of another version.
    #[error("version {0} is not known here, only {VERSION}")]
    Version(u32),
    /// A field has this content, of which at most 80 characters are kept, and breaks this rule.
    #[error("{0} {1:?} {2}")]
    Field(&'static str, String, &'static str),
    /// No endpoint has such an id.
    #[error("endpoint id {0} must be 1 to {MAX_ENDPOINT_ID}")]
    EndpointId(u16),
    /// It cannot be parsed or written; which of them, and what the JSON library said.
    #[error("{0}: {1}")]
    Json(&'static str, #[source] serde_json::Error),
    /// The file system refused; what, and what the kernel said.
    #[error("{0}: {1}")]
    Io(&'static str, #[source] io::Error),
    /// The name is a directory's, a link's or a device's.
    #[error("it is not a regular file")]
    NotAFile,
    /// No record is as long.
    #[error("it is longer than {MAX_RECORD_BYTES} bytes")]
    TooLong,
    /// The record belongs under another name.
    #[error("its name is another record's")]
    OtherName,
}

/// By the message, because errors of the file system and of JSON cannot be compared.
impl PartialEq for Unusable {
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}

/// Why an operation on the queue failed. Displayed with what can be done about it; the parts are [`Self::problem`] and
/// [`Self::hint`].
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// There are as many records as there may be.
    Full {
        /// The queue.
        directory: PathBuf,
    },
    /// The record breaks a rule, so nobody could act on it.
    Invalid {
        /// The rule.
        why: Unusable,
    },
    /// A name that no file of the queue can have.
    Name {
        /// What was to be done.
        operation: &'static str,
        /// The name.
        name: String,
    },
    /// The queue's path is taken by something that is no directory.
    NotADirectory {
        /// The queue.
        directory: PathBuf,
    },
    /// The file system refused.
    Io {
        /// What was to be done.
        operation: &'static str,
        /// With which file.
        path: PathBuf,
        /// What the kernel said.
        cause: io::Error,
    },
}

impl QueueError {
    /// Operation, subject and cause.
    #[must_use]
    pub fn problem(&self) -> String {
        match self {
            Self::Full { directory } => {
                format!("put deletion record into {}: {MAX_RECORDS} records wait there already", directory.display())
            }
            Self::Invalid { why } => format!("put deletion record: {why}"),
            Self::Name { operation, name } => {
                format!("{operation} {name:?}: no file of the deletion queue has such a name")
            }
            Self::NotADirectory { directory } => {
                format!("open deletion queue {}: it is not a directory", directory.display())
            }
            Self::Io { operation, path, cause } => format!("{operation} {}: {cause}", path.display()),
        }
    }

    /// What the user can do.
    #[must_use]
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Full { .. } => "start wharf-agent, which takes them up",
            Self::Invalid { .. } | Self::Name { .. } => "correct the name",
            Self::NotADirectory { .. } => "move it out of the way; the directory is made when it is needed",
            Self::Io { cause, .. } => match cause.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "free space on that file system",
                io::ErrorKind::PermissionDenied => "run as root: the deletion queue is root's alone",
                io::ErrorKind::ReadOnlyFilesystem => "mount that file system writable",
                _ => "look at the file system that holds the run directory",
            },
        }
    }
}

impl std::fmt::Display for QueueError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", self.problem(), self.hint())
    }
}

/// Names operation and path of what the file system refuses.
pub(super) fn io(operation: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> QueueError {
    let path = path.into();
    move |cause| QueueError::Io { operation, path, cause }
}
