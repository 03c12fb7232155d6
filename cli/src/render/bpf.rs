//! `wharf bpf ...`.

use std::collections::BTreeSet;

use wharf_api::{BpfMap, BpfMapDump, MetricRow};

use super::{
    Style, Tone,
    status::{is_nearly_full, map_fill},
    table::{Cell, cell, number, table, token},
    text,
};

pub(crate) fn maps(maps: &[BpfMap], style: &Style) -> String {
    let rows = maps
        .iter()
        .map(|m| {
            let tone = if is_nearly_full(m) { Tone::Warn } else { Tone::Plain };
            vec![token(&m.name), token(&m.kind), token(map_fill(m)).tone(tone), token(text::bytes(m.memlock_bytes))]
        })
        .collect();
    table(style, &["NAME", "KIND", "FILL", "MEMORY"], rows)
}

/// Columns from the names in all rows.
pub(crate) fn dump(dump: &BpfMapDump, style: &Style) -> String {
    let names: BTreeSet<&str> = dump.rows.iter().flat_map(|row| row.keys().map(String::as_str)).collect();
    if names.is_empty() {
        return format!("{}: no rows\n", text::safe(&dump.map.name));
    }
    // Key columns first, then alphabetical.
    let mut names: Vec<&str> = names.into_iter().collect();
    names.sort_by_key(|name| (!matches!(*name, "key" | "address" | "index"), *name));
    // A ring buffer has one row, with names too long for columns.
    if let ("ringbuf", [facts]) = (dump.map.kind.as_str(), dump.rows.as_slice()) {
        let rows = names.iter().map(|name| vec![cell(name), cell(facts.get(*name).map_or("-", String::as_str))]);
        return table(style, &["NAME", "VALUE"], rows.collect());
    }
    let header: Vec<String> = names.iter().map(|name| text::cut(&name.to_uppercase(), 32)).collect();
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let rows = dump
        .rows
        .iter()
        .map(|row| names.iter().map(|name| cell(row.get(*name).map_or("-", String::as_str))).collect())
        .collect();
    table(style, &header, rows)
}

pub(crate) fn metrics(metrics: &[MetricRow], style: &Style) -> String {
    let mut sorted: Vec<&MetricRow> = metrics.iter().collect();
    sorted.sort_by(|a, b| {
        (a.endpoint.is_none(), a.endpoint, &a.direction, a.dropped, &a.reason).cmp(&(
            b.endpoint.is_none(),
            b.endpoint,
            &b.direction,
            b.dropped,
            &b.reason,
        ))
    });
    let rows = sorted.into_iter().map(metric_row).collect();
    table(style, &["ENDPOINT", "DIRECTION", "VERDICT", "REASON", "PACKETS", "BYTES"], rows)
}

fn metric_row(m: &MetricRow) -> Vec<Cell> {
    let verdict = if m.dropped { token("dropped").tone(Tone::Bad) } else { token("forwarded") };
    let endpoint = m.endpoint.map_or_else(|| "(gone)".to_owned(), |id| id.to_string());
    vec![token(endpoint), token(&m.direction), verdict, token(&m.reason), number(m.packets), number(m.bytes)]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::render::sample::{HOSTILE, map};

    #[test]
    fn map_list() {
        let all = [
            map("ENDPOINTS", "hash", Some(30_000), 32_768),
            map("EVENTS", "ringbuf", None, 1 << 20),
            map("CALLS", "prog_array", None, 16_384),
            map("7/CONFIG", "array", Some(1), 1),
        ];
        insta::assert_snapshot!(maps(&all, &Style::plain()), @r"
        NAME       KIND        FILL                 MEMORY
        ENDPOINTS  hash        30000/32768 (91.5%)  1.0 MiB
        EVENTS     ringbuf     1.0 MiB              1.0 MiB
        CALLS      prog_array  -/16384              1.0 MiB
        7/CONFIG   array       1 row                1.0 MiB
        ");
        insta::assert_snapshot!(maps(&[], &Style::plain()), @"NAME  KIND  FILL  MEMORY");
    }

    #[test]
    fn map_rows() {
        let row = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
            pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
        };
        let mut all = BpfMapDump {
            map: map("ENDPOINTS", "hash", Some(2), 32_768),
            rows: vec![
                row(&[("address", "10.88.0.7"), ("endpoint", "7"), ("epoch", "41"), ("ifindex", "12")]),
                row(&[("address", "fd00:88::7"), ("endpoint", "7"), (HOSTILE, HOSTILE)]),
            ],
        };
        insta::assert_snapshot!(dump(&all, &Style::plain()), @r"
        ADDRESS     ENDPOINT  EPOCH  IFINDEX  K8S:APP=\u{1b}[2J\u{9b}31M\u{20…
        10.88.0.7   7         41     12       -
        fd00:88::7  7         -      -        k8s:app=\u{1b}[2J\u{9b}31m\u{202e}evil\r\nfake row
        ");
        all.rows.clear();
        insta::assert_snapshot!(dump(&all, &Style::plain()), @"ENDPOINTS: no rows");
    }

    #[test]
    fn what_is_known_of_a_ring_buffer_is_a_line_each() {
        let names = [
            "bytes",
            "events-per-second-of-an-endpoint",
            "read-by-the-agent",
            "readers-of-the-monitor",
            "trace-sampling",
        ];
        let facts: BTreeMap<String, String> = names.iter().map(|name| ((*name).to_owned(), "1".to_owned())).collect();
        let events = BpfMapDump { map: map("EVENTS", "ringbuf", None, 1 << 20), rows: vec![facts] };
        insta::assert_snapshot!(dump(&events, &Style::plain()), @r"
        NAME                              VALUE
        bytes                             1
        events-per-second-of-an-endpoint  1
        read-by-the-agent                 1
        readers-of-the-monitor            1
        trace-sampling                    1
        ");
    }

    #[test]
    fn counters() {
        let row = |endpoint, direction: &str, reason: &str, dropped, packets| MetricRow {
            endpoint,
            direction: direction.to_owned(),
            reason: reason.to_owned(),
            dropped,
            packets,
            bytes: packets * 64,
        };
        let all = [
            row(None, "egress", "forwarded-stack", false, 1_000_000),
            row(Some(7), "ingress", "forwarded-local", false, 12),
            row(Some(7), "egress", "invalid-source-ip", true, 3),
            row(Some(7), "egress", "forwarded-local", false, 9),
        ];
        insta::assert_snapshot!(metrics(&all, &Style::plain()), @r"
        ENDPOINT  DIRECTION  VERDICT    REASON             PACKETS     BYTES
        7         egress     forwarded  forwarded-local          9       576
        7         egress     dropped    invalid-source-ip        3       192
        7         ingress    forwarded  forwarded-local         12       768
        (gone)    egress     forwarded  forwarded-stack    1000000  64000000
        ");
    }
}
