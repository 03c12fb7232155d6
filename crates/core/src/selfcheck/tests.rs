use super::*;
use crate::{fixtures::record, identity::Identity, ids::Epoch, ids::IfIndex, sources::SourcePrefixes};

fn config(r: &EndpointRecord, live: bool) -> ConfigSpec {
    ConfigSpec {
        epoch: Epoch(1),
        host_ifindex: IfIndex(101),
        identity: Identity(300),
        ipv4: r.ipv4,
        ipv6: r.ipv6,
        gateway4: r.gateway4,
        gateway6: r.gateway6,
        live,
        trace: false,
        local_by_stack: false,
        chained: !r.link_owner.is_wharf(),
        bandwidth: r.bandwidth,
        sources: r.sources.clone(),
    }
}

/// Of a correct datapath.
fn right(case: &Case) -> Outcome {
    Outcome {
        verdict: case.verdict,
        packet: case.fields.iter().flat_map(|f| f.bytes.clone()).collect(),
        reports: case.reports.clone(),
    }
}

#[test]
fn the_cases_of_an_endpoint_with_a_neighbour() {
    let (a, b) = (record(7, 1), record(9, 2));
    let lines: Vec<String> = cases(&a, &config(&a, true), Some(&b))
        .iter()
        .map(|case| {
            let judged = case.judge(&Ok(right(case)));
            assert!(judged.same && judged.got == judged.expected, "{judged:?}");
            format!("{}: {} -> {}", judged.name, case.hook.program(), judged.expected)
        })
        .collect();
    insta::assert_snapshot!(lines.join("\n"), @r"
    to-gateway-ipv4: from_container -> pass, egress forwarded-stack
    false-source-ip-ipv4: from_container -> drop, egress invalid-source-ip
    false-source-mac-ipv4: from_container -> drop, egress invalid-source-mac
    gateway-resolution-ipv4: from_container -> redirect, egress neighbour-answered
    from-node-ipv4: to_container -> pass, ingress forwarded-stack
    to-itself-ipv4: from_container -> redirect, egress forwarded-local, ingress forwarded-local
    to-endpoint-ipv4: from_container -> redirect, egress forwarded-local, ingress forwarded-local at endpoint 9
    to-gateway-ipv6: from_container -> pass, egress forwarded-stack
    false-source-ip-ipv6: from_container -> drop, egress invalid-source-ip
    false-source-mac-ipv6: from_container -> drop, egress invalid-source-mac
    gateway-resolution-ipv6: from_container -> redirect, egress neighbour-answered
    from-node-ipv6: to_container -> pass, ingress forwarded-stack
    to-itself-ipv6: from_container -> redirect, egress forwarded-local, ingress forwarded-local
    to-endpoint-ipv6: from_container -> redirect, egress forwarded-local, ingress forwarded-local at endpoint 9
    ");
}

#[test]
fn the_cases_of_a_chained_endpoint_and_of_its_neighbour() {
    let plugin = crate::endpoint::LinkOwner::Plugin { hooks: crate::endpoint::HooksFound::None };
    let chained = EndpointRecord { link_owner: plugin, gateway4: None, gateway6: None, ..record(7, 1) };
    let lines = |of: &EndpointRecord, peer: &EndpointRecord| -> Vec<String> {
        let cases = cases(of, &config(of, true), Some(peer));
        let told = cases.iter().map(|case| case.judge(&Ok(right(case))));
        told.map(|judged| format!("{} -> {}", judged.name, judged.expected)).collect()
    };
    let own = lines(&chained, &record(9, 2));
    for line in [
        "gateway-resolution-ipv4 -> pass, egress forwarded-stack",
        "gateway-resolution-ipv6 -> pass, egress forwarded-stack",
        "false-neighbour-ipv4 -> drop, egress neighbour-spoof",
        "false-neighbour-ipv6 -> drop, egress neighbour-spoof",
        "to-itself-ipv4 -> pass, egress forwarded-stack",
        "to-endpoint-ipv6 -> pass, egress forwarded-stack",
    ] {
        assert!(own.iter().any(|is| is == line), "{line} is not in {own:#?}");
    }
    let others = lines(&record(9, 2), &chained);
    assert!(others.iter().any(|is| is == "to-endpoint-ipv4 -> pass, egress forwarded-stack"), "{others:#?}");
}

#[test]
fn source_prefixes_pass_and_their_neighbours_do_not() {
    let prefixes: [IpNet; 2] = ["10.200.0.0/16", "fd00:9::/64"].map(|prefix| prefix.parse().expect("a prefix"));
    let a = EndpointRecord { sources: SourcePrefixes::new(prefixes.into()).expect("prefixes"), ..record(7, 1) };
    let cases = cases(&a, &config(&a, true), None);
    let of = |kind: Kind| cases.iter().filter(move |c| c.kind == kind);
    for prefix in prefixes {
        for (kind, expected) in [
            (Kind::Source(prefix), format!("source-{prefix}: pass, egress forwarded-stack")),
            (Kind::BesideSource(prefix), format!("beside-source-{prefix}: drop, egress invalid-source-ip")),
        ] {
            let judged: Vec<String> = of(kind)
                .map(|case| case.judge(&Ok(right(case))))
                .map(|judged| format!("{}: {}", judged.name, judged.got))
                .collect();
            assert_eq!(judged, [expected]);
        }
    }
}

#[test]
fn an_endpoint_that_is_to_be_closed_drops_all_of_them() {
    let a = record(7, 1);
    let closed = cases(&a, &config(&a, false), None);
    assert_eq!(closed.len(), 12);
    for case in closed {
        assert_eq!(case.verdict, Verdict::Drop, "{}", case.name());
        assert!(case.reports.iter().all(|r| r.reason == "endpoint-not-ready"), "{}", case.name());
    }
}

#[test]
fn a_family_it_does_not_have_is_not_tried() {
    let mut a = record(7, 1);
    a.ipv6 = None;
    let four = cases(&a, &config(&a, true), Some(&record(9, 2)));
    assert!(!four.is_empty() && four.iter().all(|c| c.family == Family::Ipv4));
    a.gateway4 = None;
    let kinds: Vec<Kind> = cases(&a, &config(&a, true), None).iter().map(|c| c.kind).collect();
    assert!(!kinds.contains(&Kind::Neighbour) && kinds.contains(&Kind::Honest), "{kinds:?}");
}

#[test]
fn both_sides_of_a_mismatch_are_told() {
    let (a, b) = (record(7, 1), record(9, 2));
    let all = cases(&a, &config(&a, true), None);
    let of = |kind: Kind| all.iter().find(|c| c.kind == kind && c.family == Family::Ipv4).expect("a case");
    let told = |kind: Kind, change: &dyn Fn(&mut Outcome)| {
        let mut outcome = right(of(kind));
        change(&mut outcome);
        let judged = of(kind).judge(&Ok(outcome));
        assert!(!judged.same, "{judged:?}");
        format!("{} -> {}", judged.expected, judged.got)
    };
    let lines = [
        told(Kind::FalseIp, &|o| {
            (o.verdict, o.reports[0].reason) = (Verdict::Pass, "forwarded-stack");
        }),
        told(Kind::Honest, &|o| (o.verdict, o.reports) = (Verdict::Drop, vec![])),
        told(Kind::Honest, &|o| (o.verdict, o.reports[0].endpoint) = (Verdict::Drop, b.id)),
        told(Kind::Honest, &|o| o.verdict = Verdict::Other(3)),
        told(Kind::Neighbour, &|o| {
            o.packet.splice(22..28, [2, 0, 0, 0, 9, 9]);
        }),
        told(Kind::FromNode, &|o| o.packet.push(0)),
        told(Kind::FromNode, &|o| o.packet.clear()),
        told(Kind::ToItself, &|o| o.reports.truncate(1)),
        told(Kind::ToItself, &|o| o.reports[1].endpoint = b.id),
        told(Kind::FromNode, &|o| o.reports.push(Report { direction: "egress", ..o.reports[0] })),
    ];
    insta::assert_snapshot!(lines.join("\n"), @r"
    drop, egress invalid-source-ip -> pass, egress forwarded-stack
    pass, egress forwarded-stack -> drop, not reported
    pass, egress forwarded-stack -> drop, egress forwarded-stack at endpoint 9
    pass, egress forwarded-stack -> action 3, egress forwarded-stack
    redirect, egress neighbour-answered -> redirect, egress neighbour-answered; ARP sender MAC 02:00:00:00:09:09 instead of 02:00:00:00:01:07
    pass, ingress forwarded-stack -> pass, ingress forwarded-stack; 43 bytes instead of 42
    pass, ingress forwarded-stack -> pass, ingress forwarded-stack; 0 bytes instead of 42
    redirect, egress forwarded-local, ingress forwarded-local -> redirect, egress forwarded-local
    redirect, egress forwarded-local, ingress forwarded-local -> redirect, egress forwarded-local, ingress forwarded-local at endpoint 9
    pass, ingress forwarded-stack -> pass, ingress forwarded-stack, egress forwarded-stack
    ");
    let not_run = of(Kind::Honest).judge(&Err("no such pin".into()));
    assert!(!not_run.same && not_run.got == "not run: no such pin", "{not_run:?}");
}
