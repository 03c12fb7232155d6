//! Metrics of CNI commands.

use std::{
    collections::BTreeSet,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::{Registry, Unit},
};
use wharf_handover::{command::Verb, report::Outcome};
use wharf_kit::sync::lock;

use super::buckets;

/// Callers may invent names.
const MAX_NETWORKS: usize = 32;
/// Not a valid network name.
const OTHER: &str = "_other";
/// Not a valid network name.
const UNKNOWN: &str = "_unknown";

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Total {
    command: &'static str,
    network: String,
    mode: &'static str,
    outcome: &'static str,
}

/// Without the network: a histogram has twenty series per label set.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Timed {
    command: &'static str,
    mode: &'static str,
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Lost {
    reason: &'static str,
}

/// Why a command's record was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// Too many reports waited.
    Full,
    /// The file is no report.
    Unusable,
    /// Not accepted by the OTLP collector in time.
    Export,
}

impl Loss {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Unusable => "unusable",
            Self::Export => "export",
        }
    }
}

/// CNI command counters.
#[derive(Debug)]
pub struct CommandMetrics {
    total: Family<Total, Counter>,
    durations: Family<Timed, Histogram, fn() -> Histogram>,
    lost: Family<Lost, Counter>,
    networks: Mutex<BTreeSet<String>>,
    outcomes: [AtomicU64; 3],
}

impl Default for CommandMetrics {
    fn default() -> Self {
        let lost: Family<Lost, Counter> = Family::default();
        // A rate misses the first increase of a new series.
        for why in [Loss::Full, Loss::Unusable, Loss::Export] {
            drop(lost.get_or_create(&Lost { reason: why.as_str() }));
        }
        Self {
            total: Family::default(),
            durations: Family::new_with_constructor(buckets),
            lost,
            networks: Mutex::default(),
            outcomes: Default::default(),
        }
    }
}

impl CommandMetrics {
    /// Counts an ended command.
    pub fn ended(&self, verb: Verb, network: &str, mode: &'static str, outcome: Outcome, took: Duration) {
        let (command, network) = (verb.as_str(), self.network(network));
        self.total.get_or_create(&Total { command, network, mode, outcome: outcome.as_str() }).inc();
        let timed = Timed { command, mode, outcome: outcome.as_str() };
        self.durations.get_or_create(&timed).observe(took.as_secs_f64());
        let [success, failure, deferred] = &self.outcomes;
        let count = match outcome {
            Outcome::Success => success,
            Outcome::Failure => failure,
            Outcome::Deferred => deferred,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts lost records.
    pub fn lost(&self, why: Loss, count: u64) {
        if count > 0 {
            self.lost.get_or_create(&Lost { reason: why.as_str() }).inc_by(count);
        }
    }

    #[cfg(test)]
    pub(crate) fn losses(&self, why: Loss) -> u64 {
        self.lost.get_or_create(&Lost { reason: why.as_str() }).get()
    }

    /// Succeeded, failed and deferred commands.
    #[must_use]
    pub fn outcomes(&self) -> [u64; 3] {
        self.outcomes.each_ref().map(|count| count.load(Ordering::Relaxed))
    }

    fn network(&self, name: &str) -> String {
        if name.is_empty() {
            return UNKNOWN.to_owned();
        }
        let mut known = lock(&self.networks);
        if !known.contains(name) {
            if known.len() >= MAX_NETWORKS {
                return OTHER.to_owned();
            }
            known.insert(name.to_owned());
        }
        name.to_owned()
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register("cni_commands", "CNI commands that ended", self.total.clone());
        registry.register_with_unit(
            "cni_command_duration",
            "Duration of CNI commands, from the start of the plugin",
            Unit::Seconds,
            self.durations.clone(),
        );
        registry.register("cni_records_lost", "Records of CNI commands that were lost", self.lost.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_beyond_the_bound_are_one() {
        let metrics = CommandMetrics::default();
        for n in 0..MAX_NETWORKS + 20 {
            metrics.ended(Verb::Add, &format!("net{n}"), "own", Outcome::Success, Duration::ZERO);
        }
        metrics.ended(Verb::Add, "net0", "own", Outcome::Success, Duration::ZERO);
        metrics.ended(Verb::Add, "", "own", Outcome::Failure, Duration::ZERO);
        let count = |network: &str, outcome: Outcome| {
            let (command, mode, outcome) = ("ADD", "own", outcome.as_str());
            metrics.total.get_or_create(&Total { command, network: network.to_owned(), mode, outcome }).get()
        };
        assert_eq!((count("net0", Outcome::Success), count(OTHER, Outcome::Success)), (2, 20));
        assert_eq!(count(UNKNOWN, Outcome::Failure), 1);
        assert!([OTHER, UNKNOWN].into_iter().all(|label| wharf_names::rules::name(label).is_err()), "a network's name");
        assert_eq!(metrics.outcomes(), [53, 1, 0]);
    }
}
