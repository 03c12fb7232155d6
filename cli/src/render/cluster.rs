//! `wharf cluster`.

use wharf_api::{ClusterFeed, ClusterPods, ClusterView, PodCidrState};

use super::{
    Style, Tone,
    table::{cell, lines, number, table, token},
    text::{age, count, safe},
};

pub(crate) fn is_well(view: &ClusterView) -> bool {
    let missing = view.nodes.iter().flat_map(|node| &node.pod_cidrs).any(|cidr| cidr.state == PodCidrState::Missing);
    view.problem.is_none() && !missing
}

pub(crate) fn status(view: &ClusterView, now_unix_ms: u64) -> String {
    let source = match (&view.file, &view.feed) {
        (Some(file), _) => format!("file:       {}", safe(file)),
        (None, Some(feed)) => format!("feed:       {}", producer(feed, now_unix_ms)),
        (None, None) => return "no cluster: the agent has neither --cluster-file nor --cluster-feed\n".to_owned(),
    };
    let all = || view.nodes.iter().flat_map(|node| &node.pod_cidrs).filter(|cidr| cidr.state != PodCidrState::Own);
    let in_force = all().filter(|cidr| cidr.state == PodCidrState::InForce).count();
    let nodes = count(u64::try_from(view.nodes.len()).unwrap_or(u64::MAX), "node");
    let mut text = format!(
        "this node:  {}\n{source} ({nodes})\nroutes:     {in_force} of {} in force\n",
        safe(&view.node),
        all().count()
    );
    if let Some(problem) = &view.problem {
        text.push_str(&format!("problem:    {}\n", safe(problem)));
    }
    text
}

/// Name and connection.
fn producer(feed: &ClusterFeed, now_unix_ms: u64) -> String {
    match (&feed.producer, feed.connected_since_unix_ms) {
        (Some(name), Some(since)) => format!("{}, connected for {}", safe(name), age(now_unix_ms, since)),
        (Some(name), None) => format!("{}, not connected", safe(name)),
        (None, _) => "no producer yet".to_owned(),
    }
}

pub(crate) fn feed(feed: Option<&ClusterFeed>, style: &Style) -> String {
    let Some(feed) = feed else { return "no cluster feed: the agent has no --cluster-feed\n".to_owned() };
    let sequence = |number: Option<u64>| number.map_or_else(|| "-".to_owned(), |number| number.to_string());
    let mut text = format!("socket:     {}\nproducer:   {}\n", safe(&feed.socket), producer(feed, style.now_unix_ms));
    if let Some(cluster) = &feed.cluster {
        text.push_str(&format!("cluster:    {}\n", safe(cluster)));
    }
    let messages = format!("{} processed, {} in force", sequence(feed.processed), sequence(feed.in_force));
    text.push_str(&format!("messages:   {messages}\n"));
    if let Some(problem) = &feed.problem {
        text.push_str(&format!("problem:    {}\n", safe(problem)));
    }
    let rows = feed.rows.iter().map(|rows| {
        let complete = if rows.complete { token("yes") } else { token("no").tone(Tone::Bad) };
        let numbers = [rows.in_force, rows.refused, rows.stale, rows.conflicts].map(number);
        [vec![token(&rows.kind), complete], numbers.to_vec()].concat()
    });
    let header = ["KIND", "COMPLETE", "IN FORCE", "REFUSED", "STALE", "CONFLICTS"];
    text.push_str(&format!("\n{}", table(style, &header, rows.collect())));
    if !feed.watches.is_empty() {
        let watches = feed.watches.iter().map(|watch| {
            let tone = if watch.state == "failing" { Tone::Bad } else { Tone::Plain };
            let since = age(style.now_unix_ms, watch.since_unix_ms);
            let error = watch.error.as_deref().unwrap_or("-");
            vec![token(&watch.name), token(&watch.state).tone(tone), token(since), cell(error).tone(tone)]
        });
        text.push_str(&format!("\n{}", table(style, &["WATCH", "STATE", "FOR", "ERROR"], watches.collect())));
    }
    if feed.refused.is_empty() {
        return text;
    }
    let refused = feed.refused.iter().map(|row| {
        let earlier = if row.stale { "the earlier row" } else { "-" };
        vec![token(&row.kind), cell(&row.name), cell(&row.reason).tone(Tone::Bad), token(earlier)]
    });
    text.push_str(&format!("\n{}", table(style, &["KIND", "NAME", "REFUSED", "IN FORCE"], refused.collect())));
    let shown = u64::try_from(feed.refused.len()).unwrap_or(u64::MAX);
    if feed.refused_total > shown {
        text.push_str(&format!("and {} more\n", feed.refused_total - shown));
    }
    text
}

pub(crate) fn pods(found: &ClusterPods, style: &Style) -> String {
    let rows = found.pods.iter().map(|pod| {
        let addresses: Vec<String> = pod.addresses.iter().map(ToString::to_string).collect();
        let labels: Vec<String> = pod.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
        vec![token(&pod.namespace), token(&pod.name), token(&pod.node), lines(&addresses, 8), lines(&labels, 8)]
    });
    let mut text = table(style, &["NAMESPACE", "NAME", "NODE", "ADDRESSES", "LABELS"], rows.collect());
    let shown = u64::try_from(found.pods.len()).unwrap_or(u64::MAX);
    if found.total > shown {
        text.push_str(&format!("and {} more\n", found.total - shown));
    }
    text
}

pub(crate) fn nodes(view: &ClusterView, style: &Style) -> String {
    let mut rows = Vec::new();
    for node in &view.nodes {
        let addresses: Vec<String> = node.addresses.iter().map(ToString::to_string).collect();
        let name = if node.own { format!("{} (this node)", node.name) } else { node.name.clone() };
        let mut head = [token(name), lines(&addresses, 8)];
        if node.pod_cidrs.is_empty() {
            rows.push([head.to_vec(), vec![token("-"), token("-")]].concat());
        }
        for to in &node.pod_cidrs {
            let by = if to.overlay { "overlay to" } else { "via" };
            let (tone, route) = match (to.state, &to.via, &to.why) {
                (PodCidrState::Own, ..) => (Tone::Plain, "-".to_owned()),
                (PodCidrState::InForce, Some(via), None) => (Tone::Good, format!("{by} {via}")),
                (PodCidrState::InForce, Some(via), Some(why)) => (Tone::Good, format!("{by} {via}: {why}")),
                (PodCidrState::Missing, Some(via), _) => {
                    (Tone::Bad, format!("{by} {via}: the kernel does not have it"))
                }
                (_, _, why) => (Tone::Bad, format!("none: {}", why.as_deref().unwrap_or("no reason given"))),
            };
            rows.push([head.to_vec(), vec![token(&to.cidr), cell(route).tone(tone)]].concat());
            head = [token(""), token("")];
        }
    }
    table(style, &["NODE", "ADDRESSES", "POD CIDR", "ROUTE"], rows)
}

#[cfg(test)]
mod tests {
    use wharf_api::{ClusterNode, ClusterPod, FeedRows, FeedWatch, PodCidr, RefusedRow};

    use super::*;
    use crate::render::sample::HOSTILE;

    fn view() -> ClusterView {
        let cidr = |cidr: &str, state, via: Option<&str>, why: Option<&str>| PodCidr {
            cidr: cidr.to_owned(),
            state,
            via: via.map(|via| via.parse().expect("address")),
            overlay: false,
            why: why.map(str::to_owned),
        };
        let node = |name: &str, own, address: &str, pod_cidrs| ClusterNode {
            name: name.to_owned(),
            own,
            addresses: vec![address.parse().expect("address")],
            pod_cidrs,
        };
        ClusterView {
            node: "a".to_owned(),
            file: Some("/etc/wharf/nodes.toml".to_owned()),
            feed: None,
            problem: None,
            nodes: vec![
                node("a", true, "192.0.2.1", vec![cidr("10.87.0.0/24", PodCidrState::Own, None, None)]),
                node(
                    "b",
                    false,
                    "192.0.2.2",
                    vec![
                        cidr("10.88.0.0/24", PodCidrState::InForce, Some("192.0.2.2"), None),
                        cidr(
                            "fd88::/64",
                            PodCidrState::Refused,
                            None,
                            Some("it overlaps fd88::/60, a pool of this node"),
                        ),
                    ],
                ),
                node(HOSTILE, false, "192.0.2.3", Vec::new()),
            ],
        }
    }

    #[test]
    fn a_list_of_pods_says_what_it_leaves_out() {
        let pod = ClusterPod {
            uid: "1".to_owned(),
            namespace: "shop".to_owned(),
            name: HOSTILE.to_owned(),
            node: "b".to_owned(),
            addresses: vec!["10.88.0.9".parse().expect("address"), "fd88::9".parse().expect("address")],
            labels: [("app".to_owned(), "web".to_owned())].into(),
        };
        insta::assert_snapshot!(pods(&ClusterPods { total: 3, pods: vec![pod] }, &Style::plain()));
    }

    #[test]
    fn each_network_has_a_line() {
        insta::assert_snapshot!(nodes(&view(), &Style::plain()));
    }

    #[test]
    fn a_route_by_the_overlay_has_its_node() {
        let mut view = view();
        view.nodes[1].pod_cidrs[0].overlay = true;
        assert!(nodes(&view, &Style::plain()).contains("overlay to 192.0.2.2"));
        view.nodes[1].pod_cidrs[0].why = Some("the direct path is lossy".to_owned());
        let shown = nodes(&view, &Style::plain());
        assert!(shown.contains("overlay to 192.0.2.2:") && shown.contains("lossy"), "{shown}");
    }

    #[test]
    fn the_summary_counts_routes_and_names_a_problem() {
        let mut view = view();
        assert!(is_well(&view));
        assert_eq!(
            status(&view, 0),
            "this node:  a\nfile:       /etc/wharf/nodes.toml (3 nodes)\nroutes:     1 of 2 in force\n"
        );
        view.problem = Some("line 3: no\u{1b}".to_owned());
        assert!(!is_well(&view) && status(&view, 0).contains("problem:    line 3: no\\u{1b}"), "{}", status(&view, 0));
        assert!(status(&ClusterView::default(), 0).starts_with("no cluster"));
    }

    #[test]
    fn the_feed_has_its_producer_rows_and_refusals() {
        let rows =
            FeedRows { kind: "pod".to_owned(), in_force: 12, complete: true, refused: 1, stale: 1, conflicts: 0 };
        let refused = RefusedRow {
            kind: "pod".to_owned(),
            name: HOSTILE.to_owned(),
            reason: "nine-addresses".to_owned(),
            stale: true,
            ..RefusedRow::default()
        };
        let mut one = ClusterFeed {
            socket: "/run/wharf/feed/feed.sock".to_owned(),
            producer: Some("kube".to_owned()),
            cluster: Some("one".to_owned()),
            connected_since_unix_ms: Some(1_000),
            rows: vec![rows],
            processed: Some(7),
            in_force: Some(6),
            watches: vec![FeedWatch {
                name: "CiliumClusterwideNetworkPolicy".to_owned(),
                state: "failing".to_owned(),
                since_unix_ms: 31_000,
                error: Some(format!("the-API-server-answers-403 {HOSTILE} {}", "so it is ".repeat(12))),
            }],
            refused_total: 3,
            refused: vec![refused],
            problem: None,
        };
        let style = Style { now_unix_ms: 61_000, ..Style::plain() };
        let shown = feed(Some(&one), &style);
        for part in [
            "producer:   kube, connected for 1m\n",
            "cluster:    one\n",
            "messages:   7 processed, 6 in force\n",
            "nine-addresses",
            "CiliumClusterwideNetworkPolicy  failing  30s  the-API-server-answers-403",
            "and 2 more\n",
        ] {
            assert!(shown.contains(part), "{part}: {shown}");
        }
        assert!(shown.lines().all(|line| line.chars().count() <= 100), "{shown}");
        let view = ClusterView { file: None, feed: Some(one.clone()), ..view() };
        assert!(status(&view, 61_000).contains("feed:       kube, connected for 1m (3 nodes)\n"));
        one.connected_since_unix_ms = None;
        assert!(feed(Some(&one), &style).contains("kube, not connected"));
        assert!(feed(None, &style).starts_with("no cluster feed"));
    }
}
