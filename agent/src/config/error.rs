//! Errors of the configuration.

use std::path::PathBuf;

/// Why the configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("read configuration {}: {cause}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        cause: std::io::Error,
    },
    /// The file does not parse.
    #[error("parse configuration {}: {message}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Problem and position.
        message: String,
    },
    /// A setting breaks a rule.
    #[error("setting {name}{}: {message}", origin.as_ref().map_or_else(String::new, |o| format!(" ({o})")))]
    Setting {
        /// The flag's name without the dashes.
        name: &'static str,
        /// Source of the value: a flag, an environment variable or the file.
        origin: Option<String>,
        /// The broken rule.
        message: String,
    },
}

/// An error whose origin is filled in later.
pub(super) fn setting(name: &'static str, message: String) -> ConfigError {
    ConfigError::Setting { name, origin: None, message }
}
