//! Metrics, in OpenMetrics 1.0.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::Context as _;
use axum::{Router, extract::State, http::header, response::IntoResponse, routing::get};
use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::{Registry, Unit},
};
use tokio::net::TcpListener;

use crate::source::{Kind, Source};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Of {
    resource: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Failed {
    resource: &'static str,
    cause: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfKind {
    kind: &'static str,
}

/// Counters and gauges of all tasks.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    lists: Family<Of, Counter>,
    watches: Family<Of, Counter>,
    events: Family<Of, Counter>,
    unusable: Family<Of, Counter>,
    failures: Family<Failed, Counter>,
    contact: Family<Of, Gauge>,
    rows: Family<OfKind, Gauge>,
    waiting: Gauge,
    connected: Gauge,
    streams: Counter,
    changes: Counter,
    refused: Gauge,
    in_force: Histogram,
    node_patches: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("wharf_kube");
        let made = Self {
            registry: Registry::default(),
            lists: Family::default(),
            watches: Family::default(),
            events: Family::default(),
            unusable: Family::default(),
            failures: Family::default(),
            contact: Family::default(),
            rows: Family::default(),
            waiting: Gauge::default(),
            connected: Gauge::default(),
            streams: Counter::default(),
            changes: Counter::default(),
            refused: Gauge::default(),
            in_force: Histogram::new(exponential_buckets(0.001, 2.0, 16)),
            node_patches: Counter::default(),
        };
        registry.register("lists", "Complete lists", made.lists.clone());
        registry.register("watches", "Watches that the server ended as asked", made.watches.clone());
        registry.register("events", "Events of watches", made.events.clone());
        registry.register("unusable_objects", "Objects whose row is not known", made.unusable.clone());
        registry.register("failures", "Failed lists and watches", made.failures.clone());
        let contact = "Time of the last byte of a watch, seconds since 1970";
        registry.register("watch_contact_timestamp_seconds", contact, made.contact.clone());
        registry.register("rows", "Rows that the objects define", made.rows.clone());
        registry.register("waiting_rows", "Rows that are not sent yet", made.waiting.clone());
        registry.register("feed_connected", "The agent accepted the stream", made.connected.clone());
        registry.register("feed_streams", "Streams that the agent accepted", made.streams.clone());
        registry.register("feed_changes", "Changes sent to the agent", made.changes.clone());
        registry.register("refused_rows", "Rows that are not in force as they were sent", made.refused.clone());
        let in_force = "Time from the arrival of the oldest change of a message to its being in force";
        registry.register_with_unit("in_force", in_force, Unit::Seconds, made.in_force.clone());
        registry.register("node_patches", "Patches of this node's object", made.node_patches.clone());
        Self { registry, ..made }
    }
}

impl Metrics {
    pub(crate) fn list(&self, source: Source) {
        self.lists.get_or_create(&of(source)).inc();
    }

    pub(crate) fn watch_ended(&self, source: Source) {
        self.watches.get_or_create(&of(source)).inc();
    }

    pub(crate) fn event(&self, source: Source) {
        self.events.get_or_create(&of(source)).inc();
    }

    pub(crate) fn unusable(&self, source: Source) {
        self.unusable.get_or_create(&of(source)).inc();
    }

    pub(crate) fn failure(&self, source: Source, cause: &'static str) {
        self.failures.get_or_create(&Failed { resource: source.object_kind(), cause }).inc();
    }

    pub(crate) fn contact(&self, source: Source) {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        self.contact.get_or_create(&of(source)).set(i64::try_from(since.as_secs()).unwrap_or(i64::MAX));
    }

    pub(crate) fn rows(&self, kind: Kind, count: usize) {
        self.rows.get_or_create(&OfKind { kind: kind.name() }).set(number(count));
    }

    pub(crate) fn waiting(&self, count: usize) {
        self.waiting.set(number(count));
    }

    pub(crate) fn connected(&self, is_connected: bool) {
        self.connected.set(i64::from(is_connected));
        self.streams.inc_by(u64::from(is_connected));
    }

    pub(crate) fn sent(&self, changes: usize) {
        self.changes.inc_by(changes as u64);
    }

    pub(crate) fn refused(&self, count: usize) {
        self.refused.set(number(count));
    }

    pub(crate) fn in_force(&self, after: Duration) {
        self.in_force.observe(after.as_secs_f64());
    }

    pub(crate) fn node_patch(&self) {
        self.node_patches.inc();
    }

    /// Complete lists of a source.
    #[must_use]
    pub fn lists_of(&self, source: Source) -> u64 {
        self.lists.get_or_create(&of(source)).get()
    }

    /// Changes sent to the agent.
    #[must_use]
    pub fn changes_sent(&self) -> u64 {
        self.changes.get()
    }

    /// The text of a scrape.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        // A write to a String does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

fn of(source: Source) -> Of {
    Of { resource: source.object_kind() }
}

fn number(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// Serves `/metrics`; does not end.
///
/// # Errors
/// The address cannot be bound.
pub async fn serve(metrics: Arc<Metrics>, address: SocketAddr) -> anyhow::Result<()> {
    let listener = TcpListener::bind(address).await.with_context(|| format!("listen at {address} for metrics"))?;
    let routes = Router::new().route("/metrics", get(scrape)).with_state(metrics);
    axum::serve(listener, routes).await.context("serve metrics")
}

async fn scrape(State(metrics): State<Arc<Metrics>>) -> impl IntoResponse {
    let form = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, form)], metrics.text())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scrape_names_resource_and_cause() {
        let metrics = Metrics::default();
        metrics.failure(Source::Pod, "expired");
        metrics.in_force(Duration::from_millis(3));
        let text = metrics.text();
        assert!(text.contains(r#"wharf_kube_failures_total{resource="Pod",cause="expired"} 1"#), "{text}");
        assert!(text.contains("wharf_kube_in_force_seconds_count 1"), "{text}");
        assert!(text.ends_with("# EOF\n"));
    }
}
