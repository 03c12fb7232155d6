//! Errors of the queue.

use std::{io, path::PathBuf};

use wharf_names::ids::MAX_ENDPOINT_ID;

use super::{MAX_RECORD_BYTES, MAX_RECORDS, VERSION};

/// Defect of a record.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    /// Unknown version.
    #[error("version {0} is not known here, only {VERSION}")]
    Version(u32),
    /// Field, content (at most 80 characters), rule.
    #[error("{0} {1:?} {2}")]
    Field(&'static str, String, &'static str),
    /// Out of range.
    #[error("endpoint id {0} must be 1 to {MAX_ENDPOINT_ID}")]
    EndpointId(u16),
    /// Operation and JSON error.
    #[error("{0}: {1}")]
    Json(&'static str, #[source] serde_json::Error),
    /// Operation and file system error.
    #[error("{0}: {1}")]
    Io(&'static str, #[source] io::Error),
    /// Directory, link, device or other special file.
    #[error("it is not a regular file")]
    NotAFile,
    /// Longer than any record.
    #[error("it is longer than {MAX_RECORD_BYTES} bytes")]
    TooLong,
    /// Another record's name.
    #[error("its name is another record's")]
    OtherName,
}

impl PartialEq for Unusable {
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}

/// Failure of the queue. Display shows [`Self::problem`] and [`Self::hint`].
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// The queue has [`MAX_RECORDS`] records.
    Full {
        /// Path of the queue.
        directory: PathBuf,
    },
    /// Invalid record.
    Invalid {
        /// The rule.
        why: Unusable,
    },
    /// Not a name of the queue's files.
    Name { operation: &'static str, name: String },
    /// Not a directory.
    NotADirectory {
        /// Path of the queue.
        directory: PathBuf,
    },
    /// File system error.
    Io {
        operation: &'static str,
        path: PathBuf,
        /// The kernel's error.
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

    /// Advice for the user.
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

pub(super) fn io(operation: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> QueueError {
    let path = path.into();
    move |cause| QueueError::Io { operation, path, cause }
}
