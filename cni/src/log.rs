//! Log lines on stderr.

use std::{fmt, io::Write};

/// Includes the preceding levels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    Error,
    Warn,
    Info,
    Debug,
}

impl Level {
    /// The agent's `trace` means `debug`.
    pub(crate) const NAMES: &'static str = "error, warn, info, debug or trace";

    pub(crate) fn parse(name: &str) -> Option<Self> {
        match name {
            "error" => Some(Self::Error),
            "warn" => Some(Self::Warn),
            "info" => Some(Self::Info),
            "debug" | "trace" => Some(Self::Debug),
            _ => None,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
        }
    }

    pub(crate) fn say(self, line: Level, text: fmt::Arguments<'_>) {
        if line <= self {
            // `eprintln!` would panic on a closed stderr.
            let _ = writeln!(std::io::stderr(), "wharf-cni: {}: {text}", line.name());
        }
    }
}
