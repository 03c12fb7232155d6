//! `wharf cluster`.

use wharf_api::{ClusterView, PodCidrState};

use super::{
    Style, Tone,
    table::{cell, lines, table, token},
    text::{count, safe},
};

pub(crate) fn is_well(view: &ClusterView) -> bool {
    let missing = view.nodes.iter().flat_map(|node| &node.pod_cidrs).any(|cidr| cidr.state == PodCidrState::Missing);
    view.problem.is_none() && !missing
}

pub(crate) fn status(view: &ClusterView) -> String {
    let Some(file) = &view.file else {
        return "no cluster: the agent has no --cluster-file\n".to_owned();
    };
    let all = || view.nodes.iter().flat_map(|node| &node.pod_cidrs).filter(|cidr| cidr.state != PodCidrState::Own);
    let in_force = all().filter(|cidr| cidr.state == PodCidrState::InForce).count();
    let nodes = count(u64::try_from(view.nodes.len()).unwrap_or(u64::MAX), "node");
    let mut text = format!(
        "this node:  {}\nfile:       {} ({nodes})\nroutes:     {in_force} of {} in force\n",
        safe(&view.node),
        safe(file),
        all().count()
    );
    if let Some(problem) = &view.problem {
        text.push_str(&format!("problem:    {}\n", safe(problem)));
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
            let (tone, route) = match (to.state, &to.via, &to.why) {
                (PodCidrState::Own, ..) => (Tone::Plain, "-".to_owned()),
                (PodCidrState::InForce, Some(via), _) => (Tone::Good, format!("via {via}")),
                (PodCidrState::Missing, Some(via), _) => (Tone::Bad, format!("via {via}: the kernel does not have it")),
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
    use wharf_api::{ClusterNode, PodCidr};

    use super::*;
    use crate::render::sample::HOSTILE;

    fn view() -> ClusterView {
        let cidr = |cidr: &str, state, via: Option<&str>, why: Option<&str>| PodCidr {
            cidr: cidr.to_owned(),
            state,
            via: via.map(|via| via.parse().expect("address")),
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
    fn each_network_has_a_line() {
        insta::assert_snapshot!(nodes(&view(), &Style::plain()));
    }

    #[test]
    fn the_summary_counts_routes_and_names_a_problem() {
        let mut view = view();
        assert!(is_well(&view));
        assert_eq!(
            status(&view),
            "this node:  a\nfile:       /etc/wharf/nodes.toml (3 nodes)\nroutes:     1 of 2 in force\n"
        );
        view.problem = Some("line 3: no\u{1b}".to_owned());
        assert!(!is_well(&view) && status(&view).contains("problem:    line 3: no\\u{1b}"), "{}", status(&view));
        assert!(status(&ClusterView::default()).starts_with("no cluster"));
    }
}
