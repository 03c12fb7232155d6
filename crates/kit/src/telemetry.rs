//! Logs; filter and format may change at run time.
//!
//! A line inside an operation's span ([`operation`]) has its id and endpoint. [`lines`] writes and escapes, [`limit`]
//! limits floods.

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

use self::lines::{Lines, Shape};
pub use self::{directives::FilterError, lines::LogFormat};
use crate::{log_ring::LogRing, sync::lock};

/// Changes filter and format.
#[derive(Clone)]
pub struct LogFilter {
    handle: reload::Handle<EnvFilter, Registry>,
    /// As requested, without the operations' spans.
    text: Arc<Mutex<String>>,
    shape: Arc<Shape>,
    ring: LogRing,
}

impl LogFilter {
    /// Checks a filter.
    ///
    /// # Errors
    /// Problem, and allowed forms.
    pub fn check(filter: &str) -> Result<(), FilterError> {
        directives::parse(filter).map(drop)
    }

    /// Applies a filter.
    ///
    /// # Errors
    /// Invalid filter; the old one stays.
    pub fn set(&self, filter: &str) -> Result<(), FilterError> {
        let parsed = directives::parse(filter)?;
        let mut text = lock(&self.text);
        self.handle.reload(parsed).map_err(|e| FilterError::Reload(filter.to_owned(), e))?;
        filter.clone_into(&mut text);
        Ok(())
    }

    /// Filter in force.
    #[must_use]
    pub fn get(&self) -> String {
        lock(&self.text).clone()
    }

    /// The last lines.
    #[must_use]
    pub fn ring(&self) -> LogRing {
        self.ring.clone()
    }

    pub fn set_format(&self, format: LogFormat) {
        self.shape.set(format);
    }

    #[must_use]
    pub fn format(&self) -> LogFormat {
        self.shape.get()
    }
}

/// Summarises suppressed lines until `stop`.
pub async fn tell_suppressed(log: LogFilter, stop: CancellationToken) {
    while tokio::time::timeout(limit::WINDOW, stop.cancelled()).await.is_err() {
        log.shape.sweep();
    }
}

/// Sends logs to standard error.
///
/// # Errors
/// Invalid filter.
pub fn init(filter: &str, format: LogFormat) -> anyhow::Result<LogFilter> {
    let parsed = directives::parse(filter).map_err(|e| anyhow!("setting log-level: {e}"))?;
    let (layer, handle) = reload::Layer::new(parsed);
    let ring = LogRing::default();
    let shape = Arc::new(Shape::to_stderr(format, std::io::stderr().is_terminal(), ring.clone()));
    tracing_subscriber::registry().with(layer).with(Lines::new(Arc::clone(&shape))).init();
    Ok(LogFilter { handle, text: Arc::new(Mutex::new(filter.to_owned())), shape, ring })
}
