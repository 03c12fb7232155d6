//! What the proxy tells of requests, in the API's words, and counted.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::UNIX_EPOCH,
};

use wharf_api::RequestEvent;
use wharf_proxy::{Content, Record, Verdict};

/// Requests by verdict.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Requests {
    /// A rule let it pass, and the server got it.
    pub forwarded: u64,
    /// No rule let it pass.
    pub denied: u64,
    /// It was not understood, or the server not reached.
    pub failed: u64,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    forwarded: AtomicU64,
    denied: AtomicU64,
    failed: AtomicU64,
}

impl Counters {
    pub(super) fn count(&self, record: &Record) {
        let counter = match record.verdict {
            Verdict::Forwarded => &self.forwarded,
            Verdict::Denied => &self.denied,
            Verdict::Failed => &self.failed,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn told(&self) -> Requests {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Requests { forwarded: of(&self.forwarded), denied: of(&self.denied), failed: of(&self.failed) }
    }
}

/// The record as readers get it.
pub(super) fn readable(record: Record) -> RequestEvent {
    let verdict = match record.verdict {
        Verdict::Forwarded => "forwarded",
        Verdict::Denied => "denied",
        Verdict::Failed => "failed",
    };
    let (protocol, method, path, host, status) = match record.content {
        Content::Http { protocol, method, path, host, status } => (protocol, method, path, host, status),
        Content::Tls { server_name } => ("TLS", String::new(), String::new(), server_name, 0),
    };
    let since = record.at.duration_since(UNIX_EPOCH).unwrap_or_default();
    RequestEvent {
        time_unix_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
        endpoint: record.member.id,
        epoch: record.member.epoch,
        direction: record.listener.direction.to_string(),
        verdict: verdict.to_owned(),
        protocol: protocol.to_owned(),
        method,
        path,
        host,
        status,
        latency_us: record.duration.map(|duration| u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)),
        source: record.source,
        destination: record.destination,
        flags: record.flags,
    }
}
