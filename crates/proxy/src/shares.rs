//! Limits of Envoy's connections. Envoy counts a connection for pool and listener on accept, for the endpoint after the
//! first bytes: listeners have limits because of silent connections.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use envoy_types::pb::envoy::service::metrics::v3::StreamMetricsMessage;
use nix::sys::resource::{Resource, getrlimit};

use crate::{
    listener::{ListenerKey, Member},
    process::ProcessId,
};

/// Descriptors for other uses.
const OWN_FILES: u64 = 512;
/// Under Envoy's heap limit ([`crate::bootstrap`]).
const MOST: u64 = 32_512;
/// Number of endpoint (listener, client) shares in the pool.
const ENDPOINTS: u64 = 16;
const LISTENERS: u64 = 4;
const CLIENTS: u64 = 32;
/// Time after a refusal in which a share counts as exhausted.
const SHOWN: Duration = Duration::from_secs(60);

pub(crate) const COUNTERS: [&str; 3] = [OF_ENDPOINT.1, OF_LISTENER.1, OF_ALL.1];
const OF_ENDPOINT: (&str, &str) = ("connection_limit.", ".limited_connections");
const OF_LISTENER: (&str, &str) = ("listener.", ".downstream_cx_overflow");
const OF_ALL: (&str, &str) = ("listener.", ".downstream_global_cx_overflow");

/// Envoy's connection limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Connections {
    /// For all listeners.
    pub all: u64,
    /// Per listener.
    pub of_listener: u64,
    /// Per endpoint at a listener, for HTTP and for TLS.
    pub of_endpoint: u64,
    /// Per client at all listeners, enforced by the BPF programs.
    pub of_client: u64,
}

impl Connections {
    /// Limit of open files at which [`Self::all`] is maximal.
    pub const MOST_FILES: u64 = OWN_FILES + 2 * MOST;

    /// Whether the limit of open files reduces the shares.
    #[must_use]
    pub const fn are_few(&self) -> bool {
        self.all < MOST
    }

    /// A client connection needs a second descriptor.
    pub(crate) fn of(files: u64) -> Self {
        let all = (files.saturating_sub(OWN_FILES).max(2) / 2).min(MOST);
        let part = |of: u64| (all / of).max(1);
        Self { all, of_listener: part(LISTENERS), of_endpoint: part(ENDPOINTS), of_client: part(CLIENTS) }
    }

    /// Limits for this process's descriptors.
    #[must_use]
    pub fn here() -> Self {
        // 1,024: the smallest usual limit.
        Self::of(getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(_, most)| most))
    }
}

/// A part of Envoy's connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Share {
    /// The pool; this listener refused.
    All(ListenerKey),
    /// A listener's connections.
    Listener(ListenerKey),
    /// An endpoint at a listener.
    Endpoint(ListenerKey, Member),
}

#[derive(Debug, Default)]
pub(crate) struct Refusals {
    counts: BTreeMap<Share, Refused>,
    /// Envoy precedes this server: its first values are old.
    inherited: bool,
}

#[derive(Debug, Clone, Copy)]
struct Refused {
    count: u64,
    at: Option<Instant>,
}

impl Refusals {
    pub(crate) fn process_began(&mut self, id: ProcessId) {
        let is_new = ProcessId::own().is_ok_and(|own| id.started >= own.started);
        (self.inherited, self.counts) = (!is_new, BTreeMap::new());
    }

    pub(crate) fn on_counters(&mut self, counters: BTreeMap<Share, u64>, now: Instant) {
        let inherited = std::mem::take(&mut self.inherited);
        let counts = std::mem::take(&mut self.counts);
        let refused = |(share, count): (Share, u64)| {
            let before = counts.get(&share);
            let is_news = count > before.map_or(0, |before| before.count) && !inherited;
            let at = if is_news { Some(now) } else { before.and_then(|before| before.at) };
            (share, Refused { count, at })
        };
        self.counts = counters.into_iter().map(refused).collect();
    }

    pub(crate) fn spent(&self, now: Instant) -> BTreeMap<Share, u64> {
        let is_spent = |refused: &Refused| refused.at.is_some_and(|at| now.saturating_duration_since(at) < SHOWN);
        self.counts.iter().filter(|(_, refused)| is_spent(refused)).map(|(share, r)| (*share, r.count)).collect()
    }
}

pub(crate) fn prefix(listener: ListenerKey, member: Member) -> String {
    format!("{listener}.{member}")
}

pub(crate) fn counters(message: &StreamMetricsMessage) -> BTreeMap<Share, u64> {
    let of = |name: &str| {
        let between = |(begin, end): (&str, &str)| name.strip_prefix(begin)?.strip_suffix(end).map(str::to_owned);
        if let Some(of) = between(OF_ENDPOINT) {
            let (listener, member) = of.split_once('.')?;
            return Some(Share::Endpoint(listener.parse().ok()?, member.parse().ok()?));
        }
        let of_listener = between(OF_LISTENER).and_then(|of| Some(Share::Listener(of.parse().ok()?)));
        of_listener.or_else(|| Some(Share::All(between(OF_ALL)?.parse().ok()?)))
    };
    let families = message.envoy_metrics.iter();
    families.filter_map(|family| Some((of(family.name.as_deref()?)?, super::forwarded::value(family)?))).collect()
}

#[cfg(test)]
mod tests {
    use envoy_types::pb::io::prometheus::client::{Counter, Metric, MetricFamily};
    use wharf_policy::model::Direction;

    use super::*;

    const KEY: ListenerKey = ListenerKey { direction: Direction::Ingress, port: 15_000 };
    const OWN: Share = Share::Endpoint(KEY, Member { id: 7, epoch: 107 });

    #[test]
    fn a_share_is_a_part_of_the_pool_and_never_nothing() {
        assert_eq!(
            Connections::of(65_536),
            Connections { all: 32_512, of_listener: 8_128, of_endpoint: 2_032, of_client: 1_016 }
        );
        assert_eq!(Connections::of(10), Connections { all: 1, of_listener: 1, of_endpoint: 1, of_client: 1 });
    }

    #[test]
    fn counters_are_read_by_their_names() {
        let family = |name: String| MetricFamily {
            name: Some(name),
            metric: vec![Metric {
                counter: Some(Counter { value: Some(3.0), ..Counter::default() }),
                ..Metric::default()
            }],
            ..MetricFamily::default()
        };
        let Share::Endpoint(_, member) = OWN else { return };
        let names = [
            format!("connection_limit.{}.limited_connections", prefix(KEY, member)),
            "listener.ingress-15000.downstream_cx_overflow".into(),
            "listener.ingress-15000.downstream_global_cx_overflow".into(),
            "connection_limit.ingress-15000.7.limited_connections".into(),
            "connection_limit.north-15000.7.107.limited_connections".into(),
            "listener.admin.downstream_cx_overflow".into(),
            "cluster.original-destination.upstream_rq_total".into(),
        ];
        let envoy_metrics = names.map(family).into();
        let read = counters(&StreamMetricsMessage { envoy_metrics, ..StreamMetricsMessage::default() });
        assert_eq!(read, [(OWN, 3), (Share::Listener(KEY), 3), (Share::All(KEY), 3)].into());
    }

    #[test]
    fn a_share_is_spent_while_connections_are_refused_and_for_a_minute_after_it() {
        let (mut refusals, began) = (Refusals::default(), Instant::now());
        let own = ProcessId::own().expect("this process");
        refusals.process_began(ProcessId { started: own.started - 1, ..own });
        refusals.on_counters([(OWN, 5)].into(), began);
        assert_eq!(refusals.spent(began), [].into(), "it was counted before this server began");
        refusals.on_counters([(OWN, 9)].into(), began);
        refusals.on_counters([(OWN, 9)].into(), began + SHOWN / 2);
        assert_eq!(refusals.spent(began + SHOWN / 2), [(OWN, 9)].into());
        assert_eq!(refusals.spent(began + SHOWN), [].into());
        refusals.process_began(own);
        refusals.on_counters([(OWN, 2)].into(), began + SHOWN);
        assert_eq!(refusals.spent(began + SHOWN), [(OWN, 2)].into(), "a new one counts from zero");
        refusals.on_counters([].into(), began + SHOWN);
        assert_eq!(refusals.spent(began + SHOWN), [].into(), "the endpoint is gone");
    }
}
