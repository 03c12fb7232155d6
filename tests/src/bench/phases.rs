//! Where the agent's time goes, by its own histograms.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};

use super::findings::{Better, Group};
use crate::Node;

/// Phases of a delete that the whole operation's time does not include.
const AFTER_THE_ANSWER: [&str; 2] = ["await-kernel", "remove-record"];

/// Sum and count of every phase and operation, as `GET /metrics` tells them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Phases {
    sums: BTreeMap<Name, f64>,
    counts: BTreeMap<Name, f64>,
}

/// Operation, and phase; no phase for the operation as a whole.
type Name = (String, Option<String>);

impl Phases {
    /// Asks the agent.
    ///
    /// # Errors
    /// When it does not answer, or not in the format.
    pub fn of(node: &Node) -> Result<Self> {
        let answer = node.http("GET", "/metrics", None)?;
        ensure!(answer.status == 200, "GET /metrics: {} {}", answer.status, answer.text());
        Ok(Self::parse(&answer.text()))
    }

    fn parse(text: &str) -> Self {
        let mut phases = Self::default();
        for line in text.lines().filter(|l| !l.starts_with('#')) {
            let Some((head, value)) = line.rsplit_once(' ') else { continue };
            let Some((metric, labels)) = head.trim_end_matches('}').split_once('{') else { continue };
            let Ok(value) = value.parse::<f64>() else { continue };
            let label = |name: &str| {
                let (_, rest) = labels.split_once(&format!("{name}=\""))?;
                rest.split_once('"').map(|(value, _)| value.to_owned())
            };
            let name = match (metric.starts_with("wharf_phase_duration_seconds"), label("operation"), label("outcome"))
            {
                (true, Some(operation), _) => (operation, label("phase")),
                (false, Some(operation), Some(outcome)) if outcome == "success" => (operation, None),
                _ => continue,
            };
            if metric.ends_with("_sum") {
                phases.sums.insert(name, value);
            } else if metric.ends_with("_count") {
                phases.counts.insert(name, value);
            }
        }
        phases
    }

    /// Mean of each phase of an operation since `before`, microseconds: the whole operation, then its phases, the
    /// longest first, and what no phase accounts for.
    ///
    /// # Errors
    /// When the operation was not run in between.
    pub fn group(&self, before: &Self, operation: &str, title: &str) -> Result<Group> {
        let mean = |name: &Name| -> Option<f64> {
            let of = |all: &BTreeMap<Name, f64>| all.get(name).copied().unwrap_or_default();
            let count = of(&self.counts) - of(&before.counts);
            (count > 0.0).then(|| (of(&self.sums) - of(&before.sums)) / count * 1e6)
        };
        // A regeneration is counted by its level; the one with phases worth a table is that of the datapath.
        let whole = mean(&(operation.to_owned(), None)).or_else(|| mean(&(format!("{operation}-datapath"), None)));
        let whole = whole.with_context(|| format!("the agent did no {operation}"))?;
        let mut phases: Vec<(String, f64)> = (self.counts.keys())
            .filter(|(of, _)| of == operation)
            .filter_map(|name| Some((name.1.clone()?, mean(name)?)))
            .collect();
        phases.sort_by(|a, b| b.1.total_cmp(&a.1));
        let is_inside = |name: &str| operation != "delete" || !AFTER_THE_ANSWER.contains(&name);
        let rest = whole - phases.iter().filter(|(name, _)| is_inside(name)).map(|(_, mean)| mean).sum::<f64>();
        let mut group = Group::new(title, "\u{b5}s, mean", Better::Lower);
        group.add("whole operation", vec![whole])?;
        for (name, mean) in phases {
            let name = if is_inside(&name) { name } else { format!("{name} (after the answer)") };
            group.add(&name, vec![mean])?;
        }
        group.add("between the phases", vec![rest])?;
        Ok(group)
    }

    /// Mean of a whole operation since `before`, milliseconds.
    #[must_use]
    pub fn mean_ms(&self, before: &Self, operation: &str) -> Option<f64> {
        let name = (operation.to_owned(), None);
        let of = |all: &BTreeMap<Name, f64>| all.get(&name).copied().unwrap_or_default();
        let count = of(&self.counts) - of(&before.counts);
        (count > 0.0).then(|| (of(&self.sums) - of(&before.sums)) / count * 1e3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
# TYPE wharf_phase_duration_seconds histogram
wharf_phase_duration_seconds_sum{operation=\"create\",phase=\"lease\"} 0.001
wharf_phase_duration_seconds_count{operation=\"create\",phase=\"lease\"} 10
wharf_phase_duration_seconds_bucket{le=\"0.0001\",operation=\"create\",phase=\"lease\"} 10
wharf_phase_duration_seconds_sum{operation=\"create\",phase=\"ensure-link\"} 0.01
wharf_phase_duration_seconds_count{operation=\"create\",phase=\"ensure-link\"} 10
wharf_phase_duration_seconds_sum{operation=\"delete\",phase=\"lease\"} 9
wharf_phase_duration_seconds_count{operation=\"delete\",phase=\"lease\"} 1
wharf_operation_duration_seconds_sum{operation=\"create\",outcome=\"success\"} 0.02
wharf_operation_duration_seconds_count{operation=\"create\",outcome=\"success\"} 10
wharf_operation_duration_seconds_sum{operation=\"create\",outcome=\"failure\"} 7
wharf_operation_duration_seconds_count{operation=\"create\",outcome=\"failure\"} 1
wharf_serving 1
# EOF
";

    #[test]
    fn means_are_of_what_came_since() -> Result<()> {
        let now = Phases::parse(TEXT);
        let group = now.group(&Phases::default(), "create", "t")?;
        let seen: Vec<(&str, f64)> = group.series.iter().map(|s| (s.name.as_str(), s.summary.median.round())).collect();
        let expected =
            [("whole operation", 2000.0), ("ensure-link", 1000.0), ("lease", 100.0), ("between the phases", 900.0)];
        assert_eq!(seen, expected);
        assert!(now.group(&now, "create", "t").is_err(), "nothing came since");
        Ok(())
    }
}
