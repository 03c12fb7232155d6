//! The task that exports CNI commands to a collector.

use std::sync::Arc;

#[cfg(feature = "otlp")]
use anyhow::Context as _;
use tokio::sync::mpsc;

use crate::{
    commands::{Commands, Ended, Mode},
    config::AgentConfig,
    node::lifecycle::Tasks,
};

/// Starts it if the configuration has a collector.
///
/// # Errors
/// An unusable address.
#[cfg(feature = "otlp")]
pub fn start(
    config: &AgentConfig,
    commands: &Commands,
    tasks: &Tasks,
    mode: Mode,
    queue: mpsc::Receiver<Arc<Ended>>,
) -> anyhow::Result<()> {
    if let Some(endpoint) = &config.otlp_endpoint {
        let exporter =
            crate::commands::otlp::Exporter::new(endpoint, &config.node_name, mode, Arc::clone(commands.metrics()));
        let exporter = exporter.with_context(|| format!("export CNI commands to {endpoint}"))?;
        tasks.operations.spawn(exporter.run(queue, tasks.stop.clone()));
    }
    Ok(())
}

/// Nothing to start.
#[cfg(not(feature = "otlp"))]
#[allow(clippy::unnecessary_wraps, reason = "as with the feature")]
pub fn start(
    _config: &AgentConfig,
    _commands: &Commands,
    _tasks: &Tasks,
    _mode: Mode,
    _queue: mpsc::Receiver<Arc<Ended>>,
) -> anyhow::Result<()> {
    Ok(())
}
