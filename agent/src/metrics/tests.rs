//! Compares the metrics with the documentation page.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;
use wharf_api::{NodeHealth, ProxyState};
use wharf_handover::{command::Verb, report::Outcome};

use super::*;

fn status() -> AgentStatus {
    let pool = json!({"name": "default", "family": "ipv4", "cidrs": ["10.87.0.0/16"], "used": 4, "resting": 1, "total": 65534});
    let map =
        json!({"name": "ENDPOINTS", "kind": "hash", "entries": 6, "max_entries": 32768, "memlock_bytes": 525_000});
    let status = json!({
        "overall": "ok", "serving": true, "version": "0.1.0", "abi_version": 1, "node_name": "quay", "pid": 7,
        "uptime_ms": 1000, "router": ["10.87.0.1"],
        "kernel": {"release": "6.12", "attach_mode": "clsact", "features": {}},
        "components": [], "controllers": [], "ipam": [pool], "endpoints": {"ready": 3}, "bpf_maps": [map],
        "deletion_queue": {"records": 1, "oldest_age_ms": 1500, "unusable": 2, "drained": 1, "canary": "came out"},
        "audit_findings": 0, "refused_transitions": 1, "prepared": {"ready": 4, "target": 4},
        "proxy": {"enabled": true, "redirects": 1, "pending_completions": 0, "timed_out_completions": 0, "state": "serving",
            "listeners": 2, "refused": 1, "restarts": 3, "records_lost": 4, "requests": {"forwarded": 5, "denied": 6, "failed": 7}},
        "network": {"device_mode": "veth", "routing": "", "masquerading": "on", "connections": {"entries": 7, "limit": 262144},
            "flows": {"rows": 5, "limit": 524_288, "expired": 40, "orphaned": 2, "over_quota": 0, "no_room": 0, "untracked": 1,
                "collected_unix_ms": 1, "took_us": 2_500}},
        "delegate": {"socket": "/run/net.sock", "service": "", "reachable": true, "since_unix_ms": 1, "in_flight": 2, "unfinished": 3},
        "resident_bytes": 1 << 24,
    });
    serde_json::from_value(status).expect("a status")
}

fn health() -> NodeHealth {
    let probe = json!({"probe": "tcp", "family": "ipv4", "address": "10.87.0.2", "outcome": "answered", "error": "", "last_us": 71,
        "sent": 60, "lost": 3});
    let health = json!({"node": "quay", "local": true, "state": "ok", "message": "", "since_unix_ms": 1, "interval_ms": 10_000,
        "rounds": 1, "failed_rounds": 0, "launches": 2, "failed_launches": 0, "probes": [probe]});
    serde_json::from_value(health).expect("the health endpoint")
}

fn feed() -> ClusterFeed {
    let rows = json!({"kind": "pod", "in_force": 9, "complete": true, "refused": 2, "stale": 1, "conflicts": 0});
    let feed = json!({"socket": "/run/wharf/feed/feed.sock", "connected_since_unix_ms": 1, "processed": 9, "in_force": 7, "rows": [rows],
        "refused_total": 2, "refused": []});
    serde_json::from_value(feed).expect("the cluster feed")
}

fn encoded(format: Format) -> String {
    let metrics = Metrics::default();
    metrics.phase("create", "lease", Duration::from_millis(1));
    metrics.operation("create", Duration::from_millis(3), true);
    metrics.self_check();
    metrics.commands.ended(Verb::Add, "net", "own", Outcome::Success, Duration::from_millis(3));
    metrics.commands.lost(Loss::Full, 1);
    metrics.health(&health());
    metrics.health_peers(&BTreeMap::from([(HealthState::Down, 2)]));
    let row = |direction: &str, reason: &str, dropped| MetricRow {
        endpoint: None,
        direction: direction.to_owned(),
        reason: reason.to_owned(),
        dropped,
        packets: 2,
        bytes: 300,
    };
    let verdicts = [row("ingress", "forwarded-local", false), row("egress", "invalid-source-ip", true)];
    let runs = BTreeMap::from([("leak-audit".to_owned(), (3, 1))]);
    metrics.encode(format, &status(), &verdicts, &runs, 0, Some(&feed()))
}

fn metrics_of(text: &str) -> BTreeSet<(String, String, BTreeSet<String>)> {
    let mut found = BTreeSet::new();
    for (name, kind) in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' ')) {
        let mut labels = BTreeSet::new();
        let is_sample = |line: &&str| {
            let rest = line.strip_prefix(name).map(|rest| rest.split(['{', ' ']).next().unwrap_or_default());
            matches!(rest, Some("" | "_bucket" | "_sum" | "_count"))
        };
        for line in text.lines().filter(is_sample) {
            let inner = line.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map_or("", |(inner, _)| inner);
            labels.extend(inner.split(',').filter_map(|pair| pair.split_once('=')).map(|(label, _)| label.to_owned()));
        }
        labels.remove("le");
        found.insert((name.to_owned(), kind.to_owned(), labels));
    }
    found
}

fn metrics_on_the_page() -> BTreeSet<(String, String, BTreeSet<String>)> {
    let page = include_str!("../../../docs/metrics.md");
    let words = |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
    let rows = page.lines().filter(|line| line.starts_with("| `wharf_"));
    rows.map(|row| {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let name = words(cells[1]).remove(0);
        (name, cells[2].to_owned(), words(cells[3]).into_iter().collect())
    })
    .collect()
}

#[test]
fn the_page_lists_every_metric_with_its_type_and_labels() {
    let (made, told) = (metrics_of(&encoded(Format::Prometheus)), metrics_on_the_page());
    let unlisted: Vec<_> = made.difference(&told).collect();
    let unmade: Vec<_> = told.difference(&made).collect();
    assert!(unlisted.is_empty() && unmade.is_empty(), "not on the page: {unlisted:#?}\nonly on the page: {unmade:#?}");
}

#[test]
fn alert_rules_name_metrics_and_the_page_names_the_alerts() {
    let rules = include_str!("../../../dist/wharf-alerts.rules.yml");
    let page = include_str!("../../../docs/metrics.md");
    let names: BTreeSet<String> = metrics_on_the_page().into_iter().map(|(name, ..)| name).collect();
    let word = |c: char| !(c.is_ascii_alphanumeric() || c == '_');
    let expressions = rules.lines().filter(|line| !line.contains("summary:"));
    for used in expressions.flat_map(|line| line.split(word)).filter(|word| word.starts_with("wharf_")) {
        assert!(names.contains(used.trim_end_matches("_count")), "{used} is no metric");
    }
    let alerts: Vec<&str> = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    let told: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("| `Wharf")?.split('`').next()).collect();
    assert_eq!(alerts.iter().filter_map(|alert| alert.strip_prefix("Wharf")).collect::<Vec<_>>(), told);
}

#[test]
fn the_age_of_the_oldest_deletion_record_is_in_seconds() {
    let text = encoded(Format::OpenMetrics);
    assert!(text.contains("\nwharf_deletion_queue_oldest_age_seconds 1.5\n"), "{text}");
    assert!(text.contains("# UNIT wharf_deletion_queue_oldest_age_seconds seconds\n"), "{text}");
}

#[test]
fn flows_are_told_by_the_last_collection_and_not_before_the_first() {
    let text = encoded(Format::Prometheus);
    for line in [
        "wharf_flows 5",
        "wharf_flows_collected_total{reason=\"expired\"} 40",
        "wharf_flows_not_kept_total{reason=\"rate\"} 1",
        "wharf_flows_collection_seconds 0.0025",
    ] {
        assert!(text.lines().any(|l| l == line), "{line} in {text}");
    }
    let mut status = status();
    status.network.flows = None;
    let text = Metrics::default().encode(Format::Prometheus, &status, &[], &BTreeMap::new(), 0, None);
    assert!(!text.contains("wharf_flows"), "{text}");
}

#[test]
fn other_nodes_are_counted_by_state() {
    let text = encoded(Format::Prometheus);
    for line in ["wharf_health_peers{state=\"down\"} 2", "wharf_health_peers{state=\"ok\"} 0"] {
        assert!(text.lines().any(|l| l == line), "{line} in {text}");
    }
}

#[test]
fn the_proxy_is_up_only_while_it_serves() {
    let has = |text: &str, line: &str| assert!(text.lines().any(|l| l == line), "{line} in {text}");
    let text = encoded(Format::Prometheus);
    for line in [
        "wharf_proxy_up 1",
        "wharf_proxy_listeners 2",
        "wharf_proxy_listeners_refused 1",
        "wharf_proxy_restarts_total 3",
        "wharf_proxy_records_lost_total 4",
        "wharf_proxy_requests_total{verdict=\"denied\"} 6",
    ] {
        has(&text, line);
    }
    let mut status = status();
    status.proxy.state = ProxyState::Starting;
    has(&Metrics::default().encode(Format::Prometheus, &status, &[], &BTreeMap::new(), 0, None), "wharf_proxy_up 0");
}

#[test]
fn the_service_of_delegated_mode_has_metrics_in_that_mode_alone() {
    let of =
        |status: &AgentStatus| Metrics::default().encode(Format::Prometheus, status, &[], &BTreeMap::new(), 0, None);
    let text = of(&status());
    for line in ["wharf_delegate_reachable 1", "wharf_delegate_calls 2", "wharf_delegate_unfinished 3"] {
        assert!(text.lines().any(|l| l == line), "{line} in {text}");
    }
    assert!(!of(&AgentStatus { delegate: None, ..status() }).contains("wharf_delegate"));
}

#[test]
fn the_cluster_feed_has_metrics_with_its_setting_alone() {
    let text = encoded(Format::Prometheus);
    for line in [
        "wharf_cluster_feed_connected 1",
        "wharf_cluster_feed_lag 2",
        "wharf_cluster_feed_rows{kind=\"pod\",state=\"in-force\"} 9",
        "wharf_cluster_feed_rows{kind=\"pod\",state=\"stale\"} 1",
    ] {
        assert!(text.lines().any(|l| l == line), "{line} in {text}");
    }
    let without = Metrics::default().encode(Format::Prometheus, &status(), &[], &BTreeMap::new(), 0, None);
    assert!(!without.contains("wharf_cluster_feed"), "{without}");
}

#[test]
fn drops_of_unknown_pods_are_there_before_the_first() {
    let metrics = Metrics::default();
    let encoded = |metrics: &Metrics| metrics.encode(Format::Prometheus, &status(), &[], &BTreeMap::new(), 0, None);
    let line = |direction: &str, n: u64| format!("wharf_unknown_pod_drops_total{{direction=\"{direction}\"}} {n}");
    let has = |text: &str, line: &str| assert!(text.lines().any(|l| l == line), "{line} in {text}");
    let text = encoded(&metrics);
    has(&text, &line("ingress", 0));
    has(&text, &line("egress", 0));
    metrics.unknown_pods([2, 0]);
    metrics.unknown_pods([1, 4]);
    let text = encoded(&metrics);
    has(&text, &line("ingress", 3));
    has(&text, &line("egress", 4));
    assert_eq!(metrics.unknown_pod_drops(), 7);
}

#[test]
fn findings_are_unknown_before_the_first_audit() {
    let status = AgentStatus { audit_findings: None, ..status() };
    let text = Metrics::default().encode(Format::Prometheus, &status, &[], &BTreeMap::new(), 0, None);
    assert!(!text.contains("wharf_audit_findings"), "{text}");
}
