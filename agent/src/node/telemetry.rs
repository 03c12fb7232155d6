//! Events and metrics of the agent and of packets.

use std::sync::atomic::AtomicBool;

use crate::{metrics::Metrics, monitor::Monitor};

/// Events and metrics.
#[derive(Default)]
pub struct Telemetry {
    /// Events.
    pub monitor: Monitor,
    pub metrics: Metrics,
    /// Traces every endpoint's forwarded packets.
    pub trace_all: AtomicBool,
}
