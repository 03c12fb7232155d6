//! Logs: set up once; filter and format change while the agent runs.
//!
//! A line is about an operation when it is written inside that operation's span ([`operation`]); it then carries the
//! operation's id and the endpoint it is about. [`lines`] writes all lines, escapes what others may have put into them and
//! holds back floods ([`limit`]).

mod directives;
pub mod limit;
pub mod lines;
pub mod operation;

use std::{
    io::IsTerminal,
    sync::{Arc, Mutex},
};

use anyhow::anyhow;
use tokio_util::sync::CancellationToken;
use tracing_subscriber::{EnvFilter, Registry, layer::SubscriberExt, reload, util::SubscriberInitExt};

pub use self::lines::LogFormat;
use self::lines::{Lines, Shape};
use crate::{log_ring::LogRing, sync::lock};

/// Changes log filter and format while the agent runs. Cheap to clone.
#[derive(Clone)]
pub struct LogFilter {
    handle: reload::Handle<EnvFilter, Registry>,
    /// What was asked for: the filter in force has the operations' spans in it too.
    text: Arc<Mutex<String>>,
    shape: Arc<Shape>,
    ring: LogRing,
}

impl LogFilter {
    /// Whether a filter could be put in force; changes nothing.
    ///
    /// # Errors
    /// What is wrong with it, and what is allowed.
    pub fn check(filter: &str) -> Result<(), String> {
        directives::parse(filter).map(drop)
    }

    /// Puts a new filter in force.
    ///
    /// # Errors
    /// When the filter does not parse; the old one stays.
    pub fn set(&self, filter: &str) -> Result<(), String> {
        let parsed = directives::parse(filter)?;
        let mut text = lock(&self.text);
        self.handle.reload(parsed).map_err(|e| format!("{filter:?}: {e}"))?;
        filter.clone_into(&mut text);
        Ok(())
    }

    /// The filter in force.
    #[must_use]
    pub fn get(&self) -> String {
        lock(&self.text).clone()
    }

    /// The last lines that were written.
    #[must_use]
    pub fn ring(&self) -> LogRing {
        self.ring.clone()
    }

    /// Lines from now on are text or JSON.
    pub fn set_format(&self, format: LogFormat) {
        self.shape.set(format);
    }

    /// The format of lines now.
    #[must_use]
    pub fn format(&self) -> LogFormat {
        self.shape.get()
    }
}

/// Tells each second what was held back of floods that are over ("suppressed N like this"), until `stop`.
pub async fn tell_suppressed(log: LogFilter, stop: CancellationToken) {
    while tokio::time::timeout(limit::WINDOW, stop.cancelled()).await.is_err() {
        log.shape.sweep();
    }
}

/// Sends logs to standard error.
///
/// # Errors
/// When the filter does not parse.
pub fn init(filter: &str, format: LogFormat) -> anyhow::Result<LogFilter> {
    let parsed = directives::parse(filter).map_err(|e| anyhow!("setting log-level: {e}"))?;
    let (layer, handle) = reload::Layer::new(parsed);
    let ring = LogRing::default();
    let shape = Arc::new(Shape::to_stderr(format, std::io::stderr().is_terminal(), ring.clone()));
    tracing_subscriber::registry().with(layer).with(Lines::new(Arc::clone(&shape))).init();
    Ok(LogFilter { handle, text: Arc::new(Mutex::new(filter.to_owned())), shape, ring })
}
