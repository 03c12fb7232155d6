//! Why the settings cannot be used.

use std::path::PathBuf;

/// Why the settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("read configuration {}: {cause}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        cause: std::io::Error,
    },
    /// The file does not parse.
    #[error("parse configuration {}: {message}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// What and where.
        message: String,
    },
    /// A setting breaks a rule.
    #[error("setting {name}{}: {message}", origin.as_ref().map_or_else(String::new, |o| format!(" ({o})")))]
    Setting {
        /// Its name as a flag without the dashes.
        name: &'static str,
        /// Where the value comes from: a flag, an environment variable or the file.
        origin: Option<String>,
        /// The rule.
        message: String,
    },
}

/// A setting whose value comes from nobody knows where yet.
pub(super) fn setting(name: &'static str, message: String) -> ConfigError {
    ConfigError::Setting { name, origin: None, message }
}
