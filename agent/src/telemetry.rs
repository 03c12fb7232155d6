//! Logs: set up once, filter changed at run time.

use anyhow::Context;
use tracing_subscriber::{EnvFilter, Registry, layer::SubscriberExt, reload, util::SubscriberInitExt};

use crate::config::LogFormat;

/// Changes the log filter while the agent runs.
#[derive(Clone)]
pub struct LogFilter {
    handle: reload::Handle<EnvFilter, Registry>,
}

impl LogFilter {
    /// Puts a new filter in force.
    ///
    /// # Errors
    /// When the filter does not parse; the old one stays.
    pub fn set(&self, filter: &str) -> Result<(), String> {
        let parsed = EnvFilter::try_new(filter).map_err(|e| format!("log filter {filter:?}: {e}"))?;
        self.handle.reload(parsed).map_err(|e| format!("log filter {filter:?}: {e}"))
    }

    /// The filter in force.
    #[must_use]
    pub fn get(&self) -> String {
        self.handle.with_current(ToString::to_string).unwrap_or_default()
    }
}

/// Sends logs to standard error.
///
/// # Errors
/// When the filter does not parse.
pub fn init(filter: &str, format: LogFormat) -> anyhow::Result<LogFilter> {
    let parsed = EnvFilter::try_new(filter).with_context(|| format!("setting log-level: {filter:?}"))?;
    let (layer, handle) = reload::Layer::new(parsed);
    let registry = tracing_subscriber::registry().with(layer);
    let to_stderr = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    match format {
        LogFormat::Text => {
            use std::io::IsTerminal;
            registry.with(to_stderr.with_ansi(std::io::stderr().is_terminal())).init();
        }
        LogFormat::Json => registry.with(to_stderr.json()).init(),
    }
    Ok(LogFilter { handle })
}
