//! `rules` and `serverNames` of `toPorts`.

use wharf_policy::{
    model::{Action, Rule},
    requests::{HeaderRule, HttpRule, Pattern, Requests, ServerName},
};

use crate::{accepted, refused};

fn document(section: &str) -> String {
    format!(
        "{{apiVersion: cilium.io/v2, kind: CiliumNetworkPolicy, metadata: {{name: p, namespace: shop}},\n spec: {{endpointSelector: {{}}, {section}}}}}"
    )
}

fn rules(section: &str) -> Vec<Rule> {
    accepted(&document(section)).remove(0).rules
}

/// What an item of `toPorts` with port 80 of TCP says besides.
fn item(said: &str) -> String {
    format!("ingress: [{{toPorts: [{{ports: [{{port: '80', protocol: TCP}}], {said}}}]}}]")
}

/// What the only rule of a policy with this item lets pass.
fn requests(said: &str) -> Requests {
    let rules = rules(&item(said));
    assert_eq!(rules.len(), 1, "{said}");
    Requests::clone(rules[0].requests.as_ref().expect("requests"))
}

fn path(path: &str) -> Option<Pattern> {
    requests(&format!("rules: {{http: [{{path: '{path}'}}]}}")).http.first().expect("a rule").path.clone()
}

#[test]
fn expressions_that_are_a_text_or_its_beginning_become_one() {
    let exact = |text: &str| Some(Pattern::Exact(text.to_owned()));
    let prefix = |text: &str| Some(Pattern::Prefix(text.to_owned()));
    let regex = |text: &str| Some(Pattern::Regex(text.to_owned()));
    assert_eq!(path("/public"), exact("/public"));
    assert_eq!(path("^/public$"), exact("/public"));
    assert_eq!(path(r"/index\.html"), exact("/index.html"));
    assert_eq!(path("/public/.*"), prefix("/public/"));
    assert_eq!(path("^/public/.*$"), prefix("/public/"));
    assert_eq!(path("/(?s).*"), prefix("/"));
    for other in ["/public/.+", "/index.html", "/a|/b", "/[ab]", "(?i)/a", "/a*", "/a.*b", ".*", "/a.*?b.*", "/a{2,3}"]
    {
        assert_eq!(path(other), regex(other), "{other}");
    }
    assert_eq!(path(""), None);
}

#[test]
fn what_both_syntaxes_read_alike_is_accepted() {
    let longest = format!("[^/]{{1000}}{}", "(a{2,}){3}".repeat(20));
    for text in [r"\x41[\x20-\x7e]\x{7f}", "(?P<a_1>b)(?<c>d)", "(?:a*)*", "a{0}b{10}?c{1,20}d{3,}", &longest] {
        assert_eq!(path(text), Some(Pattern::Regex(text.to_owned())), "{text}");
    }
}

#[test]
fn server_names_count_as_rules_of_a_document() {
    let names: Vec<String> = (0..10_001).map(|n| format!("n{n}")).collect();
    let refusals = refused(&document(&item(&format!("serverNames: [{}]", names.join(", ")))));
    assert!(refusals.contains("10001 rules, more than 10000; split the policy"), "{refusals}");
}

#[test]
fn every_field_of_a_request_is_read() {
    let all = requests(
        "rules: {http: [{method: GET, path: /a, host: 'a\\.example', headers: ['X-One: 1 2', x-two],
         headerMatches: [{name: X-Three, value: '3'}, {name: X-Four}]}]}",
    );
    let exact = |text: &str| Some(Pattern::Exact(text.to_owned()));
    let header =
        |name: &str, value: Option<&str>| HeaderRule { name: name.to_owned(), value: value.map(str::to_owned) };
    let headers =
        [header("x-one", Some("1 2")), header("x-two", None), header("x-three", Some("3")), header("x-four", None)];
    let rule = HttpRule { method: exact("GET"), path: exact("/a"), host: exact("a.example"), headers: headers.into() };
    assert_eq!(all, Requests { http: [rule].into(), ..Requests::default() });
    assert_eq!(requests("rules: {http: [{}]}").http, [HttpRule::default()].into());
    assert!(requests("rules: {http: [{}], failOpen: true}").fails_open);
    let names = [ServerName::Exact("a.example".to_owned()), ServerName::Under("b.example".to_owned())];
    assert_eq!(requests("serverNames: [A.example, '**.b.example']").server_names, names.into());
    let open = requests("serverNames: [a.example], rules: {failOpen: true}");
    assert!(open.fails_open && open.server_names.len() == 1);
}

#[test]
fn an_item_with_requests_is_a_rule_of_its_own() {
    let rules = rules(
        "egress: [{toEntities: [world], toPorts: [
            {ports: [{port: '53'}]}, {ports: [{port: '80', protocol: TCP}], rules: {http: [{}]}},
            {ports: [{port: '54'}]}, {ports: [{port: '443', protocol: TCP}], serverNames: [a]}]}]",
    );
    let shown = rules.iter().map(|rule| (rule.ports.as_ref().map_or(0, Vec::len), rule.requests.is_some()));
    assert_eq!(shown.collect::<Vec<_>>(), [(6, false), (1, true), (1, true)]);
    assert!(rules.iter().all(|rule| rule.action == Action::Accept && rule.peers == rules[0].peers));
    assert!(rules.iter().all(|rule| rule.origin.field == "spec.egress[0]"));
}

#[test]
fn what_a_proxy_could_not_tell_or_would_read_in_another_way_is_refused() {
    let http = |rule: &str| item(&format!("rules: {{http: [{rule}]}}"));
    let deny = "ingressDeny: [{toPorts: [{ports: [{port: '80', protocol: TCP}], rules: {http: [{}]}}]}]";
    for (section, expected) in [
        (item("rules: {}"), "rules.http: is missing; write the requests that may pass; {} is every one"),
        (item("rules: {http: []}"), "rules.http: is empty"),
        (item("rules: {dns: [{matchName: a}]}"), "rules.dns: is not supported; write it into egress"),
        (item("rules: {http: [{}], dns: [{matchName: a}]}"), "rules.dns: is not supported; write it into egress"),
        (item("rules: {http: [{}], failOpen: yes please}"), "failOpen: is text"),
        (item("rules: {http: [{}]}, serverNames: [a]"), "rules: is there with serverNames"),
        (item("rules: {failOpen: true, l7: []}, serverNames: [a]"), "rules.l7: is no field here"),
        (item("serverNames: []"), "serverNames: is empty"),
        (item("serverNames: ['*.example.com']"), "serverNames[0]: is \"*.example.com\"; write a name of DNS"),
        (item("serverNames: [a..b]"), "serverNames[0]: is \"a..b\""),
        (item("listener: {}"), "listener: is not supported"),
        (deny.to_owned(), "rules: is not supported; remove it: write what may pass"),
        (http("{path: '('}"), "path: is \"(\": unclosed group"),
        (http("{path: '[a&&b]'}"), "which has a class made of two"),
        (http("{path: '[[a]b]'}"), "which has a class within a class"),
        (http("{path: '(?x)a'}"), "which has a flag other than"),
        (http("{path: '(?u:a)'}"), "which has a flag other than"),
        (http(r"{path: '\b{start}a'}"), "which has a boundary of half a word"),
        (http(&format!("{{path: '{}'}}", "a".repeat(1_001))), "path: has 1001 bytes; write at most 1000"),
        (http("{path: '(a{40}){40}'}"), "which repeats a part more than 1000 times"),
        (http("{path: 'a**'}"), "is \"a**\", which has a repetition of a repetition"),
        (http("{path: 'a++'}"), "which has a repetition of a repetition"),
        (http("{path: 'a*??'}"), "which has a repetition of a repetition"),
        (http("{path: 'a{2}{3}'}"), "which has a repetition of a repetition"),
        (http(r"{path: '\u0041'}"), r"which has \u, \U, or \x above 7f"),
        (http(r"{path: '\u{41}'}"), r"which has \u, \U, or \x above 7f"),
        (http(r"{path: '\U00000041'}"), r"which has \u, \U, or \x above 7f"),
        (http(r"{path: '\x80'}"), r"which has \u, \U, or \x above 7f"),
        (http(r"{path: '\x{e4}'}"), r"which has \u, \U, or \x above 7f"),
        (http(r"{path: '[\x80]'}"), r"which has \u, \U, or \x above 7f"),
        (http(r"{path: '[a\x20-\xff]'}"), r"which has \u, \U, or \x above 7f"),
        (http(r"{path: '[\u0041]'}"), r"which has \u, \U, or \x above 7f"),
        (http("{path: '(?P<a.b>c)'}"), "which has a group whose name"),
        (http("{path: '(?<a[0]>c)'}"), "which has a group whose name"),
        (http("{path: '(?P<\u{e4}>c)'}"), "which has a group whose name"),
        (http("{path: 'a{ 2}'}"), "which has blanks, a leading zero"),
        (http("{path: 'a{2 }'}"), "which has blanks, a leading zero"),
        (http("{path: 'a{1, 2}'}"), "which has blanks, a leading zero"),
        (http("{path: 'a{02}'}"), "which has blanks, a leading zero"),
        (http(&format!("{{path: '{}'}}", "a{1000}".repeat(60))), "whose repetitions are too large together; repeat"),
        (http("{path: '[^/]{1000}[^a]{1000}[^b]{1000}[^c]{1000}'}"), "whose repetitions are too large together"),
        (http("{method: 1}"), "method: is a number, not text"),
        (http("{headers: ['a b']}"), "headers[0]: names \"a b\""),
        (http("{headers: [': b']}"), "headers[0]: names \"\""),
        (http("{headers: ['Connection: close']}"), "headers[0]: names \"Connection\", which no request has"),
        (http("{headers: [X-Envoy-Internal]}"), "headers[0]: names \"X-Envoy-Internal\""),
        (http("{headers: [X-Wharf-Forwarded-Proto]}"), "headers[0]: names \"X-Wharf-Forwarded-Proto\""),
        (http("{headers: ['Upgrade: foo']}"), "headers[0]: names \"Upgrade\""),
        (http("{headers: ['a:']}"), "headers[0]: has the value \"\""),
        (http("{headerMatches: [{value: a}]}"), "headerMatches[0].name: is missing"),
        (http("{headerMatches: [{name: a, mismatch: LOG}]}"), "headerMatches[0].mismatch: is not supported"),
    ] {
        let refusals = refused(&document(&section));
        assert!(refusals.contains(expected), "{section}: {refusals}");
        assert_eq!(refusals.lines().count(), 1, "{section}: {refusals}");
    }
}
