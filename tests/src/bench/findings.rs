//! What a run found: groups of series that belong side by side, and the marks.

use anyhow::{Context, Result};
use serde::Serialize;

use super::{machine::Machine, stats::Summary};

/// Which way is good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Better {
    /// Times, sizes.
    Lower,
    /// Rates.
    Higher,
}

/// One line of a table.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Series {
    /// What was measured.
    pub name: String,
    /// What is told of the samples.
    pub summary: Summary,
    /// Median over the group's baseline's median.
    pub ratio: Option<f64>,
    /// The samples in the order they were taken, in the group's unit.
    pub samples: Vec<f64>,
}

/// Series measured in the same rounds, in the same unit.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Group {
    /// Heading.
    pub title: String,
    /// Unit of all samples.
    pub unit: &'static str,
    /// Which way is good.
    pub better: Better,
    /// Name of the series that ratios are taken to.
    pub baseline: Option<String>,
    /// The lines.
    pub series: Vec<Series>,
    /// What a reader must know to judge the numbers.
    pub notes: Vec<String>,
}

impl Group {
    /// A group without series.
    #[must_use]
    pub fn new(title: &str, unit: &'static str, better: Better) -> Self {
        Self { title: title.to_owned(), unit, better, baseline: None, series: Vec::new(), notes: Vec::new() }
    }

    /// Adds a series.
    ///
    /// # Errors
    /// When there are no samples.
    pub fn add(&mut self, name: &str, samples: Vec<f64>) -> Result<()> {
        let summary = Summary::of(&samples).with_context(|| format!("{}: no samples of {name}", self.title))?;
        self.series.push(Series { name: name.to_owned(), summary, ratio: None, samples });
        Ok(())
    }

    /// Adds a remark.
    pub fn note(&mut self, text: impl Into<String>) {
        self.notes.push(text.into());
    }

    /// Takes every series' ratio to the one of this name.
    ///
    /// # Errors
    /// When there is no such series.
    pub fn compare_to(&mut self, baseline: &str) -> Result<()> {
        let base = self.median(baseline)?;
        for series in &mut self.series {
            series.ratio = (base > 0.0).then(|| series.summary.median / base);
        }
        self.baseline = Some(baseline.to_owned());
        Ok(())
    }

    /// Median of a series.
    ///
    /// # Errors
    /// When there is no such series.
    pub fn median(&self, name: &str) -> Result<f64> {
        let series = self.series.iter().find(|s| s.name == name);
        Ok(series.with_context(|| format!("{}: no series {name}", self.title))?.summary.median)
    }
}

/// A value that the project wants to reach, and what was measured. A mark that is missed is told, and fails nothing.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Mark {
    /// What is wanted, in words.
    pub target: String,
    /// What was measured, in the unit of `limit`.
    pub measured: f64,
    /// The value to reach.
    pub limit: f64,
    /// Unit of both.
    pub unit: &'static str,
    /// Which side of the limit is good.
    pub better: Better,
    /// Whether it was reached.
    pub met: bool,
}

impl Mark {
    /// Judges a measurement.
    #[must_use]
    pub fn judge(target: &str, unit: &'static str, better: Better, measured: f64, limit: f64) -> Self {
        let met = match better {
            Better::Lower => measured <= limit,
            Better::Higher => measured >= limit,
        };
        Self { target: target.to_owned(), measured, limit, unit, better, met }
    }
}

/// Everything a run found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Findings {
    /// Where it ran.
    pub machine: Machine,
    /// True for the smoke run, whose numbers mean little.
    pub quick: bool,
    /// Flags that the agent was given beyond its defaults.
    pub agent_flags: Vec<String>,
    /// Seconds the run took.
    pub seconds: f64,
    /// The tables.
    pub groups: Vec<Group>,
    pub marks: Vec<Mark>,
}

impl Findings {
    /// Nothing found yet.
    #[must_use]
    pub fn new(machine: Machine, quick: bool) -> Self {
        Self { machine, quick, agent_flags: Vec::new(), seconds: 0.0, groups: Vec::new(), marks: Vec::new() }
    }

    /// Takes in what a part of the run found.
    pub fn extend(&mut self, (groups, marks): Part) {
        self.groups.extend(groups);
        self.marks.extend(marks);
    }
}

/// What one part of the run finds.
pub type Part = (Vec<Group>, Vec<Mark>);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_to_the_baselines_median() -> Result<()> {
        let mut group = Group::new("t", "ms", Better::Lower);
        group.add("slow", vec![8.0, 10.0, 90.0])?;
        group.add("fast", vec![2.0, 2.5, 3.0])?;
        group.compare_to("slow")?;
        let ratios: Vec<_> = group.series.iter().map(|s| s.ratio).collect();
        assert_eq!(ratios, [Some(1.0), Some(0.25)]);
        assert!(group.compare_to("absent").is_err());
        Ok(())
    }

    #[test]
    fn a_mark_is_met_on_its_good_side_only() {
        assert!(Mark::judge("t", "ms", Better::Lower, 3.0, 3.0).met);
        assert!(!Mark::judge("t", "ms", Better::Lower, 3.1, 3.0).met);
        assert!(Mark::judge("t", "x", Better::Higher, 0.96, 0.95).met);
        assert!(!Mark::judge("t", "x", Better::Higher, 0.94, 0.95).met);
        assert!(!Mark::judge("t", "x", Better::Higher, f64::NAN, 0.95).met);
    }
}
