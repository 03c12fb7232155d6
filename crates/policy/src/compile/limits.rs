//! Row counts and limits.

use std::{collections::BTreeMap, fmt, sync::Arc};

use imbl::OrdMap;

use super::RuleIndex;
use crate::model::Origin;

/// Row counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sizes {
    pub ipcache: usize,
    /// Of all rule sets.
    pub ports: usize,
    /// Of all rule sets.
    pub rules: usize,
    /// Rule sets.
    pub sets: usize,
    /// Proxy listeners.
    pub listeners: usize,
}

/// Row limits, also for old and new rows together during a change.
pub type Limits = Sizes;

/// A table of the programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Table {
    /// Peer addresses.
    Ipcache,
    /// Networks and exceptions of rules, a part of [`Table::Ipcache`].
    Networks,
    /// Port classes.
    Ports,
    /// Cells.
    Rules,
    /// Rule sets.
    Sets,
    /// Proxy listeners.
    Listeners,
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ipcache => "address rows (ipcache)",
            Self::Networks => "networks and exceptions of rules",
            Self::Ports => "port rows",
            Self::Rules => "rule rows",
            Self::Sets => "rule sets",
            Self::Listeners => "listeners of the proxy (different sets of requests)",
        })
    }
}

const TOLD: usize = 3;

/// Rows exceed a limit; nothing has changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "compile the policies: at least {needed} {table} are needed{}, {} more than the {limit} that fit; {}; narrow or merge \
     these rules, or remove policies first",
    if *.during { " while the rows change" } else { "" },
    .needed.saturating_sub(*.limit),
    told(.largest)
)]
pub struct TooLarge {
    pub table: Table,
    /// For [`Table::Rules`] a lower bound.
    pub needed: usize,
    pub limit: usize,
    /// Old and new rows do not fit together.
    pub during: bool,
    /// Rules with the most rows, largest first.
    pub largest: Vec<(Origin, usize)>,
}

fn told(largest: &[(Origin, usize)]) -> String {
    let told: Vec<_> = largest.iter().map(|(origin, rows)| format!("{origin} ({rows})")).collect();
    if told.is_empty() { "no rule needs any of them".to_owned() } else { format!("most are of {}", told.join("; ")) }
}

impl Sizes {
    pub(super) fn beyond(&self, limits: &Limits) -> Option<(Table, usize, usize)> {
        let tables = [
            (Table::Ipcache, self.ipcache, limits.ipcache),
            (Table::Ports, self.ports, limits.ports),
            (Table::Rules, self.rules, limits.rules),
            (Table::Sets, self.sets, limits.sets),
            (Table::Listeners, self.listeners, limits.listeners),
        ];
        tables.into_iter().find(|(_, rows, limit)| rows > limit)
    }
}

pub(super) fn largest(
    counts: impl IntoIterator<Item = (RuleIndex, usize)>,
    origins: &OrdMap<RuleIndex, Arc<Origin>>,
) -> Vec<(Origin, usize)> {
    let mut sums: BTreeMap<RuleIndex, usize> = BTreeMap::new();
    for (rule, rows) in counts {
        *sums.entry(rule).or_default() += rows;
    }
    let mut sums: Vec<_> =
        sums.into_iter().filter_map(|(rule, rows)| Some((Origin::clone(origins.get(&rule)?), rows))).collect();
    sums.sort_by(|(a, of_a), (b, of_b)| of_b.cmp(of_a).then_with(|| a.cmp(b)));
    sums.truncate(TOLD);
    sums
}
