//! Errors of the configuration.

use std::path::PathBuf;

/// Why the configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Unreadable file.
    #[error("read configuration {}: {cause}", path.display())]
    Read { path: PathBuf, cause: std::io::Error },
    /// Unparsable file.
    #[error("parse configuration {}: {message}", path.display())]
    Parse {
        path: PathBuf,
        /// Problem and position.
        message: String,
    },
    /// Invalid setting.
    #[error("setting {name}{}: {message}", origin.as_ref().map_or_else(String::new, |o| format!(" ({o})")))]
    Setting {
        /// Flag without dashes.
        name: &'static str,
        /// Flag, environment variable or file.
        origin: Option<String>,
        /// The broken rule.
        message: String,
    },
}

pub(super) fn setting(name: &'static str, message: String) -> ConfigError {
    ConfigError::Setting { name, origin: None, message }
}
