//! Lines on stderr, which runtimes keep beside the plugin's answer.

use std::{fmt, io::Write};

/// How much is told; each level includes those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    Error,
    Warn,
    Info,
    Debug,
}

impl Level {
    /// Names as netconf's `log-level` has them; `trace` is accepted for the agent's sake and means `debug`.
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

    /// Writes a line of level `line` if this level includes it.
    pub(crate) fn say(self, line: Level, text: fmt::Arguments<'_>) {
        if line <= self {
            // A closed stderr must not keep us from our work; `eprintln!` would panic.
            let _ = writeln!(std::io::stderr(), "wharf-cni: {}: {text}", line.name());
        }
    }
}
