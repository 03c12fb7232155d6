//! Envoy's counter of requests forwarded to servers.

use envoy_types::pb::{envoy::service::metrics::v3::StreamMetricsMessage, io::prometheus::client::MetricFamily};

use crate::{bootstrap, process::ProcessId};

#[derive(Debug, Default)]
pub(crate) struct Forwarded {
    total: u64,
    /// `None` before an older Envoy's first value.
    last: Option<u64>,
    /// Envoy requested the runtime layer, which selects its logs.
    counted: bool,
}

impl Forwarded {
    pub(crate) const fn total(&self) -> u64 {
        self.total
    }

    /// If true, records must not be counted again.
    pub(crate) const fn is_counted(&self) -> bool {
        self.counted
    }

    pub(crate) fn process_began(&mut self, id: ProcessId) {
        let is_new = ProcessId::own().is_ok_and(|own| id.started >= own.started);
        (self.last, self.counted) = (is_new.then_some(0), false);
    }

    pub(crate) const fn process_ended(&mut self) {
        (self.last, self.counted) = (None, false);
    }

    pub(crate) const fn begin(&mut self) {
        self.counted = true;
    }

    pub(crate) fn on_counter(&mut self, value: u64) {
        self.total = self.total.saturating_add(value.saturating_sub(self.last.unwrap_or(value)));
        self.last = Some(value);
    }
}

pub(crate) fn counter(message: &StreamMetricsMessage) -> Option<u64> {
    let name = bootstrap::forwarded();
    value(message.envoy_metrics.iter().find(|family| family.name.as_ref() == Some(&name))?)
}

pub(crate) fn value(family: &MetricFamily) -> Option<u64> {
    let value = family.metric.first()?.counter.as_ref()?.value?;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a whole number between 0 and 2^53, where each is exact"
    )]
    (0.0..9e15).contains(&value).then_some(value as u64)
}

#[cfg(test)]
mod tests {
    use envoy_types::pb::io::prometheus::client::{Counter, Metric};

    use super::*;

    fn own() -> ProcessId {
        ProcessId::own().expect("this process")
    }

    #[test]
    fn what_an_envoy_counted_before_the_server_began_is_left_out() {
        let mut forwarded = Forwarded::default();
        forwarded.process_began(ProcessId { started: own().started - 1, ..own() });
        forwarded.on_counter(1_000);
        forwarded.on_counter(1_003);
        assert_eq!(forwarded.total(), 3);
        forwarded.process_ended();
        forwarded.process_began(own());
        forwarded.on_counter(4);
        forwarded.on_counter(4);
        assert_eq!(forwarded.total(), 7, "a new one began at 0");
    }

    #[test]
    fn a_counter_is_read_by_its_name_and_nonsense_is_none() {
        let family = |name: &str, value| MetricFamily {
            name: Some(name.to_owned()),
            metric: vec![Metric { counter: Some(Counter { value, ..Counter::default() }), ..Metric::default() }],
            ..MetricFamily::default()
        };
        let read = |value| {
            let envoy_metrics = vec![family("server.uptime", Some(1.0)), family(&bootstrap::forwarded(), value)];
            counter(&StreamMetricsMessage { envoy_metrics, ..StreamMetricsMessage::default() })
        };
        assert_eq!(read(Some(12.0)), Some(12));
        for nonsense in [None, Some(-1.0), Some(f64::NAN), Some(f64::INFINITY), Some(1e300)] {
            assert_eq!(read(nonsense), None, "{nonsense:?}");
        }
        assert_eq!(counter(&StreamMetricsMessage::default()), None);
    }
}
