//! Why the store refused.

use std::path::PathBuf;

/// Why the store refused.
#[derive(Debug, Clone, thiserror::Error)]
#[error("store {operation} {}: {cause}", path.display())]
pub struct StoreError {
    /// `open`, `commit`, `read`.
    pub operation: &'static str,
    /// The file.
    pub path: PathBuf,
    /// Cause, with the remedy where one is known.
    pub cause: String,
}
