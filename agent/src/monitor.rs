//! Events for readers: drops, traces and the agent's actions. A slow reader loses the oldest and receives their number.

mod packet;
mod request;

use std::{
    sync::Arc,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

use tokio::sync::broadcast;
use wharf_api::{AgentEvent, MonitorEvent};
use wharf_common::{Event, EventKind};
use wharf_core::ids::EndpointId;
use wharf_kit::clock;

pub use request::{Judged, Requests};

/// Four seconds of one endpoint's full event rate.
const DEPTH: usize = 1024;

/// Sender; cheap to clone.
#[derive(Clone)]
pub struct Monitor {
    sender: broadcast::Sender<Arc<MonitorEvent>>,
    packets: Arc<AtomicU64>,
    sampling: Arc<AtomicU32>,
    traced: Arc<AtomicU64>,
    requests: Arc<request::Counters>,
}

impl Default for Monitor {
    fn default() -> Self {
        Self {
            sender: broadcast::channel(DEPTH).0,
            packets: Arc::default(),
            sampling: Arc::default(),
            traced: Arc::default(),
            requests: Arc::default(),
        }
    }
}

impl Monitor {
    /// Reads events from now on.
    #[must_use]
    pub fn subscribe(&self) -> broadcast::Receiver<Arc<MonitorEvent>> {
        self.sender.subscribe()
    }

    /// Sends an event of the agent.
    pub fn agent(&self, endpoint: Option<EndpointId>, event: &str, message: String) {
        tracing::debug!(endpoint = endpoint.map(EndpointId::get), event, "{message}");
        self.send(MonitorEvent::Agent(AgentEvent {
            time_unix_ms: clock::unix_ms(),
            endpoint: endpoint.map(EndpointId::get),
            event: event.to_owned(),
            message,
        }));
    }

    /// Sends packet events with the deciding rule; kernel timestamps become wall time.
    pub fn packets(&self, events: impl ExactSizeIterator<Item = (Event, Option<String>)>) {
        self.packets.fetch_add(events.len() as u64, Ordering::Relaxed);
        if self.sender.receiver_count() == 0 {
            return;
        }
        let offset = wall_clock_offset_ms();
        for (event, rule) in events {
            if self.is_sampled_out(&event) {
                continue;
            }
            if let Some(event) = packet::readable(&event, rule, offset) {
                self.send(event);
            }
        }
    }

    /// Sends a proxy's record.
    pub fn request(&self, record: impl Judged) {
        if !record.is_counted() {
            self.requests.count(record.verdict());
        }
        if self.sender.receiver_count() > 0 {
            self.send(MonitorEvent::L7(record.readable()));
        }
    }

    /// Since start, without requests that Envoy counts.
    #[must_use]
    pub fn requests(&self) -> Requests {
        self.requests.told()
    }

    /// Sends one in `one_in` traced packets (0 and 1: all), and all drops.
    pub fn set_sampling(&self, one_in: u32) {
        self.sampling.store(one_in, Ordering::Relaxed);
    }

    /// See [`Monitor::set_sampling`].
    #[must_use]
    pub fn sampling(&self) -> u32 {
        self.sampling.load(Ordering::Relaxed).max(1)
    }

    fn is_sampled_out(&self, event: &Event) -> bool {
        let one_in = u64::from(self.sampling());
        EventKind::from_u32(event.kind) == Some(EventKind::Trace)
            && one_in > 1
            && !self.traced.fetch_add(1, Ordering::Relaxed).is_multiple_of(one_in)
    }

    /// Since start.
    #[must_use]
    pub fn packet_events(&self) -> u64 {
        self.packets.load(Ordering::Relaxed)
    }

    /// Current readers.
    #[must_use]
    pub fn readers(&self) -> usize {
        self.sender.receiver_count()
    }

    fn send(&self, event: MonitorEvent) {
        self.sender.send(Arc::new(event)).ok();
    }
}

fn wall_clock_offset_ms() -> i64 {
    let monotonic = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)
        .map_or(0, |t| t.tv_sec() * 1000 + t.tv_nsec() / 1_000_000);
    i64::try_from(clock::unix_ms()).unwrap_or(i64::MAX) - monotonic
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(sampling: u32, kind: EventKind) -> usize {
        let monitor = Monitor::default();
        let mut reader = monitor.subscribe();
        monitor.set_sampling(sampling);
        let event = Event { kind: kind as u32, ..Event::default() };
        monitor.packets(vec![(event, None); 100].into_iter());
        std::iter::from_fn(|| reader.try_recv().ok()).count()
    }

    #[test]
    fn one_in_so_many_traced_packets_is_told_and_every_drop() {
        assert_eq!([0, 1, 10, 1_000].map(|n| told(n, EventKind::Trace)), [100, 100, 10, 1]);
        assert_eq!(told(10, EventKind::Drop), 100);
    }
}
