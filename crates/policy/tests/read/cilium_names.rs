//! `toFQDNs`, and `dns` in `rules` of `toPorts`.

use wharf_policy::{
    model::{Peer, Rule},
    names::NamePattern,
    requests::Requests,
};

use crate::{accepted, refused, shown};

fn document(sections: &str) -> String {
    format!(
        "{{apiVersion: cilium.io/v2, kind: CiliumNetworkPolicy, metadata: {{name: p, namespace: shop}},\n spec: {{endpointSelector: {{}}, {sections}}}}}"
    )
}

fn rules(section: &str) -> Vec<Rule> {
    accepted(&document(section)).remove(0).rules
}

/// The lines of the rules of a policy with this section.
fn lines(section: &str) -> Vec<String> {
    shown(&accepted(&document(section))[0]).split_off(1)
}

/// An item of `toPorts` with these ports and these names that may be asked for.
fn asks(ports: &str, names: &str) -> String {
    format!("egress: [{{toPorts: [{{ports: [{ports}], rules: {{dns: [{names}]}}}}]}}]")
}

fn patterns(texts: &[&str]) -> Vec<NamePattern> {
    texts.iter().map(|text| NamePattern::pattern(text).expect("a pattern")).collect()
}

#[test]
fn names_and_patterns_are_peers_alone_or_with_ports() {
    let both = "toFQDNs: [{matchName: API.example.com.}, {matchPattern: '*.Example.com'}, {matchPattern: '**.b'}]";
    let peers = "[names api.example.com, names *.example.com, names **.b]";
    assert_eq!(lines(&format!("egress: [{{{both}}}]")), [format!("Egress Accept {peers} *")]);
    let ports = "toPorts: [{ports: [{port: '443', protocol: TCP}]}]";
    assert_eq!(lines(&format!("egress: [{{{both}, {ports}}}]")), [format!("Egress Accept {peers} [Tcp 443-443]")]);
    assert_eq!(lines("egress: [{toFQDNs: []}]"), ["Egress Accept [] *"]);
    assert_eq!(lines("egress: [{toFQDNs: null}, {toFQDNs: [{matchPattern: '*'}]}]")[1], "Egress Accept [names *] *");
    let peers = rules("egress: [{toFQDNs: [{matchName: a.b}]}]").remove(0).peers;
    assert_eq!(peers, Some(vec![Peer::Names(NamePattern::name("a.b").expect("a name"))]));
}

#[test]
fn names_that_may_be_asked_for_are_requests_over_udp_and_tcp() {
    for (ports, expected) in [
        ("{port: '53', protocol: ANY}", "[Tcp 53-53, Udp 53-53]"),
        ("{port: '53'}", "[Tcp 53-53, Udp 53-53]"),
        ("{port: dns}", "[Tcp dns, Udp dns]"),
        ("{port: '53', protocol: UDP}", "[Udp 53-53]"),
        ("{port: '53', protocol: TCP}, {port: '5353', protocol: UDP}", "[Tcp 53-53, Udp 5353-5353]"),
    ] {
        assert_eq!(lines(&asks(ports, "{matchName: a}")), [format!("Egress Accept * {expected}")], "{ports}");
    }
    let said = |section: &str| Requests::clone(rules(section)[0].requests.as_ref().expect("requests"));
    let all = said(&asks("{port: '53'}", "{matchName: A.b}, {matchPattern: '*.c.'}, {matchPattern: '*'}"));
    let names = patterns(&["a.b", "*.c", "*"]).into_iter().collect();
    assert_eq!(all, Requests { names, ..Requests::default() });
    let open = "egress: [{toPorts: [{ports: [{port: '53'}], rules: {dns: [{matchName: a}], failOpen: true}}]}]";
    assert!(said(open).fails_open);
}

#[test]
fn an_item_of_queries_is_a_rule_of_its_own_and_the_other_items_keep_their_protocols() {
    let section = "egress: [{toCIDR: [192.0.2.53], toPorts: [
        {ports: [{port: '53'}], rules: {dns: [{matchName: a}]}}, {ports: [{port: '54'}]},
        {ports: [{port: '80', protocol: TCP}], rules: {http: [{}]}}]}]";
    let told = rules(section);
    let shown = told.iter().map(|rule| {
        let requests = rule.requests.as_ref().map(|requests| (requests.http.len(), requests.names.len()));
        (rule.ports.as_ref().map_or(0, Vec::len), requests)
    });
    assert_eq!(shown.collect::<Vec<_>>(), [(3, None), (2, Some((0, 1))), (1, Some((1, 0)))]);
    assert!(told.iter().all(|rule| rule.peers == told[0].peers));
}

#[test]
fn what_is_no_name_or_cannot_be_asked_for_is_refused() {
    let peer = |item: &str| format!("egress: [{{toFQDNs: [{item}]}}]");
    let port = |ports: &str| asks(ports, "{matchName: a}");
    let dns = |names: &str| asks("{port: '53'}", names);
    let item = |said: &str| format!("egress: [{{toPorts: [{{ports: [{{port: '53', protocol: UDP}}], {said}}}]}}]");
    let long = format!("{{matchName: {}}}", ["a".repeat(63).as_str(); 4].join("."));
    for (section, expected) in [
        (peer("{}"), "toFQDNs[0]: has no matchName and no matchPattern; write matchName and a name"),
        (peer("{matchName: a, matchPattern: b}"), "toFQDNs[0]: has matchName and matchPattern; write an item for each"),
        (peer("{matchname: a}"), "toFQDNs[0].matchname: is no field here"),
        (peer("a.example"), "toFQDNs[0]: is text; write a mapping"),
        (peer("{matchName: 1.5}"), "toFQDNs[0].matchName: is a number that is not written as a whole one"),
        (peer("{matchName: ''}"), "toFQDNs[0].matchName: is \"\", which has a label that is empty"),
        (peer("{matchName: '*.a'}"), "toFQDNs[0].matchName: is \"*.a\", which has a *, which only a pattern"),
        (
            peer("{matchName: a..b}"),
            "is \"a..b\", which has a label that is empty or longer than 63 bytes; write labels",
        ),
        (
            peer(&format!("{{matchName: {}}}", "a".repeat(64))),
            "which has a label that is empty or longer than 63 bytes",
        ),
        (peer(&long), "which is longer than 253 bytes; shorten it"),
        (peer("{matchName: a b}"), "is \"a b\", which has a character that is not of a name; write letters"),
        (peer("{matchName: '\u{e4}.example'}"), "which has a character that is not of a name; write letters"),
        (peer("{matchPattern: '**'}"), "toFQDNs[0].matchPattern: is \"**\", which has stars that stand for nothing"),
        (peer("{matchPattern: 'a.**.b'}"), "which has stars that stand for nothing; write * for characters of a label"),
        (peer("{matchPattern: 'a[0-9].b'}"), "which has a character that is not of a name"),
        (dns("{matchPattern: '*.'}"), "rules.dns[0].matchPattern: is \"*.\", which has stars"),
        (dns("{}"), "rules.dns[0]: has no matchName and no matchPattern"),
        (dns(""), "rules.dns: is empty; write the names that may be asked for"),
        (port("{port: '53', protocol: SCTP}"), "ports: has other protocols than UDP and TCP, which carry no queries"),
        (port("{port: '53', protocol: UDP}, {port: '54', protocol: SCTP}"), "ports: has other protocols than UDP"),
        (port("{port: '0'}"), "port: is 0, every port, of any protocol"),
        (item("rules: {dns: [{matchName: a}], http: [{}]}"), "rules: has http and dns; write an item"),
        (item("rules: {dns: [{matchName: a}]}, serverNames: [a]"), "rules: is there with serverNames"),
        (item("rules: {http: [{}]}"), "ports: has other protocols than TCP"),
        (item("rules: {}"), "rules.http: is missing"),
        (item("rules: {dns: [{matchName: a}], failOpen: 1}"), "rules.failOpen: is a number"),
    ] {
        let refusals = refused(&document(&section));
        assert!(refusals.contains(expected), "{section}: {refusals}");
        assert_eq!(refusals.lines().count(), 1, "{section}: {refusals}");
    }
    let denied = "egressDeny: [{toPorts: [{ports: [{port: '53'}], rules: {dns: [{matchName: a}]}}]}]";
    assert!(refused(&document(denied)).contains("rules: is not supported; remove it: write what may pass"));
}

#[test]
fn names_that_may_be_asked_for_count_as_rules_of_a_document() {
    let names: Vec<String> = (0..10_001).map(|n| format!("{{matchName: n{n}}}")).collect();
    let section = asks("{port: '53'}", &names.join(", "));
    let refusals = refused(&document(&section));
    assert!(refusals.contains("10001 rules, more than 10000; split the policy"), "{refusals}");
}

#[test]
fn requests_of_a_file_without_names_have_none() {
    let before = r#"{"http":[],"server_names":[{"Exact":"a"}],"fails_open":true}"#;
    let read: Requests = serde_json::from_str(before).expect("requests");
    assert!(read.names.is_empty() && read.fails_open);
    let names = patterns(&["*.a"]).into_iter().collect();
    let with = Requests { names, ..read.clone() };
    assert_eq!(serde_json::from_str::<Requests>(&serde_json::to_string(&with).expect("text")).expect("requests"), with);
    assert_eq!(with.union(&read), with);
    assert_eq!(read.union(&with), with);
}
