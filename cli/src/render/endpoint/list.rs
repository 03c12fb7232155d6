//! The table of `wharf endpoint list`.

use std::collections::BTreeSet;

use wharf_api::Endpoint;

use super::{pod, state_cell};
use crate::render::{
    Style, Tone,
    table::{Cell, Growing, cell, lines, maybe, natural_width, number, table, token},
    text,
};

/// Shortest container id prefix; the CLI accepts prefixes.
const SHORT_ID: usize = 13;
/// Shortest pod name on a narrow screen.
const SHORT_POD: usize = 16;
/// `wharf endpoint labels` shows all.
const MAX_LABELS: usize = 16;

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Columns {
    pub(crate) wide: bool,
    pub(crate) labels: bool,
}

pub(crate) fn list(endpoints: &[Endpoint], style: &Style, columns: Columns) -> String {
    let mut sorted: Vec<&Endpoint> = endpoints.iter().collect();
    sorted.sort_by_key(|e| (e.id, e.epoch));
    let ids = ShortIds::of(endpoints);
    let layout = Layout::of(&sorted, &ids, style, columns);
    let rows = sorted.iter().map(|e| layout.row(e, &ids, state_cell(e), style)).collect();
    let mut out = table(style, &layout.header(), rows);
    let problems: Vec<String> = sorted.iter().filter_map(|e| problem(e)).collect();
    if !problems.is_empty() {
        out.push_str(&format!("\n{}\n", style.paint(Tone::Warn, &problems.join("\n"))));
    }
    out
}

/// The problem with the next command.
fn problem(e: &Endpoint) -> Option<String> {
    let problem = e.status.problem.as_deref()?;
    Some(format!("endpoint {}: {}; `wharf explain {}`", e.id, text::safe(problem), e.id))
}

#[derive(Debug)]
pub(crate) struct Following {
    layout: Layout,
    table: Growing,
}

impl Following {
    /// Fixes the widths for later rows.
    pub(crate) fn new(columns: Columns, style: &Style) -> Self {
        let Columns { wide, labels } = columns;
        let flat = Layout { wide, labels: labels || wide, pod: true, stacked: None };
        let screen = usize::from(style.width);
        let others = |layout: Layout| layout.usual_widths(0).into_iter().map(|w| usize::from(w) + 2).sum::<usize>();
        let narrow = Layout { stacked: Some(SHORT_POD), labels: false, ..flat };
        let room = |layout| screen.saturating_sub(others(layout)).max(SHORT_POD);
        let is_narrow = !wide && others(Layout { labels: false, ..flat }) + 2 * SHORT_POD > screen;
        let stacked = is_narrow.then(|| room(narrow));
        let layout = Layout { stacked, ..flat };
        Self { layout, table: Growing::new(layout.usual_widths(stacked.unwrap_or(2 * SHORT_POD))) }
    }

    /// Shows endpoints that are missing in `all` as `deleted`.
    pub(crate) fn rows(&mut self, changed: &[Endpoint], all: &[Endpoint], style: &Style) -> String {
        let mut sorted: Vec<&Endpoint> = changed.iter().collect();
        sorted.sort_by_key(|e| (e.id, e.epoch));
        let ids = ShortIds::of(all.iter().chain(changed));
        let rows = sorted.iter().map(|e| {
            let is_there = all.iter().any(|a| (a.id, a.epoch) == (e.id, e.epoch));
            let state = if is_there { state_cell(e) } else { token("deleted").tone(Tone::Dim) };
            self.layout.row(e, &ids, state, style)
        });
        self.table.rows(style, &self.layout.header(), rows.collect())
    }
}

/// Distinguishing prefixes of container ids.
struct ShortIds<'a>(BTreeSet<&'a str>);

impl<'a> ShortIds<'a> {
    fn of(endpoints: impl IntoIterator<Item = &'a Endpoint>) -> Self {
        Self(endpoints.into_iter().map(|e| e.container_id.as_str()).collect())
    }

    /// Without an ellipsis, so that the prefix is a valid id.
    fn short(&self, id: &str) -> String {
        // Ids with the longest common prefix are adjacent.
        let before = self.0.range(..id).next_back();
        let after = self.0.range::<str, _>((std::ops::Bound::Excluded(id), std::ops::Bound::Unbounded)).next();
        let common = |other: &str| id.chars().zip(other.chars()).take_while(|(a, b)| a == b).count();
        let apart = before.into_iter().chain(after).map(|other| common(other) + 1).max().unwrap_or(0);
        id.chars().take(apart.max(SHORT_ID)).collect()
    }
}

/// Ids as in tables.
pub(crate) fn short_ids(endpoints: &[Endpoint]) -> Vec<String> {
    let ids = ShortIds::of(endpoints);
    endpoints.iter().map(|e| ids.short(&e.container_id)).collect()
}

#[derive(Debug, Clone, Copy)]
struct Layout {
    wide: bool,
    labels: bool,
    /// Whether any endpoint has a pod.
    pod: bool,
    /// On a narrow screen: addresses are stacked, and a pod's namespace and name, cut to this many characters.
    stacked: Option<usize>,
}

impl Layout {
    fn of(endpoints: &[&Endpoint], ids: &ShortIds<'_>, style: &Style, columns: Columns) -> Self {
        let Columns { wide, labels } = columns;
        let pod = wide || endpoints.iter().any(|e| e.pod_name.is_some());
        let flat = Self { wide, labels: false, pod, stacked: None };
        let width = |layout: Self| {
            let rows: Vec<Vec<Cell>> = endpoints.iter().map(|e| layout.row(e, ids, state_cell(e), style)).collect();
            natural_width(&layout.header(), &rows)
        };
        let screen = usize::from(style.width);
        // `--wide` implies a wide screen or a pipe.
        let stacked = (!wide && width(flat) > screen).then(|| {
            let others = width(Self { stacked: Some(SHORT_POD), ..flat }).saturating_sub(SHORT_POD);
            screen.saturating_sub(others).max(SHORT_POD)
        });
        Self { labels: labels || wide, stacked, ..flat }
    }

    fn header(self) -> Vec<&'static str> {
        let mut header = vec!["ID"];
        header.extend(self.wide.then_some("EPOCH"));
        header.extend(["STATE", "IDENTITY"]);
        header.extend(self.wide.then_some("NETWORK"));
        header.extend(self.pod.then_some("POD"));
        header.extend(["CONTAINER", "IFNAME"]);
        header.extend(if self.stacked.is_some() { &["ADDRESSES"] as &[_] } else { &["IPV4", "IPV6"] });
        header.extend(if self.wide { &["HOST IF", "IFINDEX", "AGE"] as &[_] } else { &[] });
        header.extend(self.labels.then_some("LABELS"));
        header
    }

    /// In screen columns, with `pod` columns for a pod's name.
    fn usual_widths(self, pod: usize) -> Vec<u16> {
        let usual = |name: &&str| match *name {
            "STATE" => "waiting-to-regenerate".len(),
            "POD" => pod,
            "CONTAINER" => SHORT_ID,
            "IPV4" => "10.123.123.123".len(),
            "IPV6" | "ADDRESSES" => "fd57:4a7f:e8f::ffff".len(),
            other => other.len().max(3),
        };
        self.header().iter().map(|name| u16::try_from(usual(name)).unwrap_or(u16::MAX)).collect()
    }

    fn row(self, e: &Endpoint, ids: &ShortIds<'_>, state: Cell, style: &Style) -> Vec<Cell> {
        let mut row = vec![number(e.id)];
        row.extend(self.wide.then(|| number(e.epoch)));
        row.extend([state, number(e.identity)]);
        row.extend(self.wide.then(|| token(&e.network)));
        row.extend(self.pod.then(|| self.pod_cell(e)));
        // Uncut, because it identifies the container.
        row.extend([cell(ids.short(&e.container_id)).whole(), token(&e.ifname)]);
        if self.stacked.is_some() {
            let v4 = e.ipv4.map(|ip| ip.to_string());
            let addresses: Vec<String> = v4.into_iter().chain(e.ipv6.map(|ip| ip.to_string())).collect();
            row.push(if addresses.is_empty() { token("-") } else { lines(&addresses, 2).whole() });
        } else {
            row.extend([maybe(e.ipv4), maybe(e.ipv6)]);
        }
        if self.wide {
            let age = text::age(style.now_unix_ms, e.created_unix_ms);
            row.extend([token(&e.host_ifname), number(e.ifindex), token(age)]);
        }
        row.extend(self.labels.then(|| lines(&e.labels, MAX_LABELS).whole()));
        row
    }

    fn pod_cell(self, e: &Endpoint) -> Cell {
        match (self.stacked, e.pod_namespace.as_deref(), e.pod_name.as_deref()) {
            (Some(room), Some(namespace), Some(name)) => {
                let namespace = text::cut_middle(namespace, room.saturating_sub(1)) + "/";
                lines(&[namespace, text::cut_middle(name, room)], 2).whole()
            }
            _ => cell(pod(e).unwrap_or_else(|| "-".to_owned())).whole(),
        }
    }
}

#[cfg(test)]
mod tests;
