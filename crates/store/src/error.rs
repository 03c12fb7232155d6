//! Errors of the store.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::tables::{OLDEST_SCHEMA, SCHEMA_VERSION};

/// A failed operation.
#[derive(Debug, Clone, thiserror::Error)]
#[error("store {operation} {}: {cause}", path.display())]
pub struct StoreError {
    /// `open`, `commit`, `read`, `write`.
    pub operation: &'static str,
    pub path: PathBuf,
    /// Shared by all refused changes.
    pub cause: Arc<Cause>,
}

impl StoreError {
    pub(super) fn new(operation: &'static str, path: &Path, cause: impl Into<Cause>) -> Self {
        Self { operation, path: path.to_owned(), cause: Arc::new(cause.into()) }
    }
}

/// With remedy, if known.
#[derive(Debug, thiserror::Error)]
pub enum Cause {
    #[error(transparent)]
    Redb(Box<redb::Error>),
    /// The system refused.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// An invalid row.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// Step or row, and cause.
    #[error("{0}: {1}")]
    At(String, #[source] Box<Self>),
    /// Not written by an agent.
    #[error("{0}")]
    Damaged(String),
    /// Newer agent's file.
    #[error(
        "its schema is version {0}, this agent knows {OLDEST_SCHEMA} to {SCHEMA_VERSION}; it stays as it is: run the \
         agent that wrote it, or move the file away"
    )]
    Schema(u64),
    /// In use by another agent.
    #[error("another agent has it open; stop that one, or use another --run-dir")]
    Held,
    /// Another process uses the file.
    #[error("another process has the file at its path in use; stop that one")]
    PathHeld,
    /// The path names no file.
    #[error("the file was removed while the agent used it")]
    Removed,
    /// Another file at the path.
    #[error("the file was replaced by another while the agent used it")]
    Replaced,
    /// Another process wrote: before and after.
    #[error("somebody else wrote to the file while the agent used it ({0})")]
    Overwritten(String),
    /// Rewritten without queued changes.
    #[error("{0}; it has been written anew with every record: try again")]
    WrittenAnew(Box<Self>),
    /// The writer thread has ended.
    #[error("the writer thread has ended; restart the agent")]
    Ended,
}

impl Cause {
    pub(super) fn at(step: impl Into<String>, cause: impl Into<Self>) -> Self {
        Self::At(step.into(), Box::new(cause.into()))
    }
}

/// Separate, because redb prefixes the text of [`io::Error`].
macro_rules! from_redb {
    ($($error:ident)*) => {
        $(impl From<redb::$error> for Cause {
            fn from(error: redb::$error) -> Self {
                Self::Redb(Box::new(error.into()))
            }
        })*
    };
}
from_redb!(DatabaseError TransactionError TableError StorageError CommitError);
