//! Proxy records: counters and API events.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use wharf_api::RequestEvent;
use wharf_dns::{
    Outcome,
    wire::{REFUSED, rcode_name, type_name},
};
use wharf_kit::clock;
use wharf_proxy::{Content, Record, Verdict};

/// Requests by verdict, without Envoy's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Requests {
    /// Sent to the server.
    pub forwarded: u64,
    /// Denied by rules.
    pub denied: u64,
    /// Malformed, or server not reached.
    pub failed: u64,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    forwarded: AtomicU64,
    denied: AtomicU64,
    failed: AtomicU64,
}

impl Counters {
    pub(super) fn count(&self, verdict: Verdict) {
        let counter = match verdict {
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

/// A proxied request's record.
pub trait Judged {
    fn verdict(&self) -> Verdict;

    /// Whether Envoy counts the request.
    fn is_counted(&self) -> bool {
        false
    }

    /// Converts to an API event.
    fn readable(self) -> RequestEvent;
}

const fn word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Forwarded => "forwarded",
        Verdict::Denied => "denied",
        Verdict::Failed => "failed",
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

impl Judged for Record {
    fn verdict(&self) -> Verdict {
        self.verdict
    }

    fn is_counted(&self) -> bool {
        self.is_counted
    }

    fn readable(self) -> RequestEvent {
        let (protocol, method, path, host, status) = match self.content {
            Content::Http { protocol, method, path, host, status } => (protocol, method, path, host, status),
            Content::Tls { server_name } => ("TLS", String::new(), String::new(), server_name, 0),
        };
        RequestEvent {
            time_unix_ms: clock::unix_ms_of(self.at),
            endpoint: self.member.id,
            epoch: self.member.epoch,
            direction: self.listener.direction.to_string(),
            verdict: word(self.verdict).to_owned(),
            protocol: protocol.to_owned(),
            method,
            path,
            host,
            status,
            response: String::new(),
            latency_us: self.duration.map(micros),
            source: self.source,
            destination: self.destination,
            flags: self.flags,
        }
    }
}

impl Judged for wharf_dns::Record {
    fn verdict(&self) -> Verdict {
        match self.outcome {
            Outcome::Answered { .. } => Verdict::Forwarded,
            Outcome::Refused => Verdict::Denied,
            _ => Verdict::Failed,
        }
    }

    fn readable(self) -> RequestEvent {
        let verdict = word(self.verdict()).to_owned();
        let (response, flags) = match &self.outcome {
            Outcome::Answered { rcode, .. } => (rcode_name(*rcode), String::new()),
            Outcome::Refused => (rcode_name(REFUSED), String::new()),
            other => (String::new(), other.to_string()),
        };
        RequestEvent {
            time_unix_ms: clock::unix_ms_of(self.at),
            endpoint: self.member.id,
            epoch: self.member.epoch,
            direction: "egress".to_owned(),
            verdict,
            protocol: "DNS".to_owned(),
            method: self.question.as_ref().map(|question| type_name(question.rtype)).unwrap_or_default(),
            path: String::new(),
            host: self.question.map(|question| question.name).unwrap_or_default(),
            status: 0,
            response,
            latency_us: self.took.map(micros),
            source: Some(self.client),
            destination: Some(self.server),
            flags,
        }
    }
}
