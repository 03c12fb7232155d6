use wharf_api::{ProxyCompletion, ProxyNameAddress, ProxyOutstanding};

use super::*;
use crate::render::sample::{HOSTILE, NOW};

fn listener(port: u16, direction: &str, passes: &[&str]) -> ProxyListener {
    ProxyListener {
        name: format!("{direction}-{port}"),
        served_by: ProxyServer::Envoy,
        port,
        direction: direction.to_owned(),
        passes: passes.iter().map(|of| (*of).to_owned()).collect(),
        fails_open: false,
        endpoints: vec![7, 9],
        acknowledged: true,
        refusal: None,
    }
}

fn serving() -> ProxyView {
    let rules = ["GET /public...", "POST /cart, host shop.example.com, header x-token (of a value)"];
    let many = ["TLS to a.example.com", "TLS to b.example.com", "TLS to c.example.com", "TLS to **.d", "TLS to e"];
    ProxyView {
        state: ProxyState::Serving,
        since_unix_ms: NOW - 11_520_000,
        supervised: true,
        version: Some("1.36.2".to_owned()),
        pid: Some(4_711),
        streams: 1,
        bootstrap: "/run/wharf/proxy/bootstrap.json".to_owned(),
        requests: ProxyRequests { forwarded: 120, denied: 3, failed: 1 },
        listeners: vec![listener(15_000, "ingress", &rules), listener(15_001, "egress", &many)],
        ..ProxyView::default()
    }
}

/// With a refused and an unacknowledged listener, a waiting delete and a waiting policy change.
fn late() -> ProxyView {
    let mut view = serving();
    let refusal = Some(format!("unknown filter {HOSTILE}"));
    for listener in &mut view.listeners {
        listener.acknowledged = false;
    }
    if let Some(first) = view.listeners.first_mut() {
        first.refusal.clone_from(&refusal);
    }
    let outstanding = |listener: &str, refusal| ProxyOutstanding { listener: listener.to_owned(), refusal };
    view.outstanding = vec![outstanding("egress-15001", None), outstanding("ingress-15000", refusal)];
    let wait = |listener: &str, endpoint, since, until| ProxyCompletion {
        listener: listener.to_owned(),
        endpoint,
        since_unix_ms: NOW - since,
        until_unix_ms: NOW + until,
    };
    view.completions = vec![wait("ingress-15000", Some(7), 1_200, 1_800), wait("egress-15001", None, 100, 400)];
    (view.completions_pending, view.completions_timed_out, view.records_lost) = (1, 2, 5);
    view
}

fn absent() -> ProxyView {
    let mut listeners = serving().listeners;
    for listener in &mut listeners {
        listener.acknowledged = false;
    }
    if let Some(first) = listeners.first_mut() {
        first.fails_open = true;
    }
    ProxyView { listeners, bootstrap: serving().bootstrap, ..ProxyView::default() }
}

#[test]
fn a_proxy_that_serves() {
    insta::assert_snapshot!(status(&serving(), &Style::plain()));
    assert!(is_well(&serving()));
}

#[test]
fn what_is_outstanding_is_told() {
    insta::assert_snapshot!(status(&late(), &Style::plain()));
    assert!(!is_well(&late()));
}

#[test]
fn a_proxy_that_is_missing_is_told_with_the_remedy() {
    insta::assert_snapshot!(status(&absent(), &Style::plain()));
    assert!(!is_well(&absent()));
    let nobody_asks = ProxyView::default();
    assert!(is_well(&nobody_asks));
    let told = status(&nobody_asks, &Style::plain());
    assert!(told.starts_with("Proxy:              absent  no rule needs it, and the agent starts none\n"), "{told}");
}

#[test]
fn an_envoy_that_does_not_start_is_told_with_its_error() {
    let view = ProxyView {
        state: ProxyState::Waiting,
        supervised: true,
        restarts: 4,
        since_unix_ms: NOW - 2_000,
        last_error: Some("start Envoy (/x): no such file; is the program there?".to_owned()),
        ..ProxyView::default()
    };
    insta::assert_snapshot!(status(&view, &Style::plain()));
    assert!(!is_well(&view));
}

#[test]
fn ports_and_what_passes() {
    let shown = listeners(&late(), &Style::plain(), false);
    assert!(shown.lines().all(|line| line.chars().count() <= 100), "{shown}");
    insta::assert_snapshot!(shown);
    let wide = listeners(&serving(), &Style::plain(), true);
    assert!(wide.contains("TLS to e") && !shown.contains("TLS to e"), "{wide}");
    assert!(listeners(&absent(), &Style::plain(), false).contains("no proxy"));
}

#[test]
fn who_waits() {
    let shown = completions(&late(), &Style::plain());
    insta::assert_snapshot!(shown, @r"
    LISTENER       AWAITED BY             FOR      AT MOST
    ingress-15000  removal of endpoint 7  1200 ms  1800 ms
    egress-15001   change of policy       100 ms   400 ms
    ");
}

#[test]
fn redirects_of_an_endpoint() {
    assert_eq!(of_endpoint(&serving(), 8), Vec::<String>::new());
    let first = |view: &ProxyView| of_endpoint(view, 7).into_iter().nth(1).unwrap_or_default();
    let told =
        "egress, port 15001: TLS to a.example.com; TLS to b.example.com; TLS to c.example.com; TLS to **.d; TLS to e";
    assert_eq!(first(&serving()), told);
    assert_eq!(first(&late()), format!("{told}; Envoy has not acknowledged it"));
    assert_eq!(first(&absent()), format!("{told}; no proxy serves"));
}

/// The agent could open only one of two ports.
fn dns() -> ProxyView {
    let mut listeners = [15_002, 15_003]
        .map(|port| ProxyListener { served_by: ProxyServer::Agent, ..listener(port, "egress", &["DNS of *.a"]) });
    let why = "listen for DNS queries at 127.0.0.1:15003 (UDP): in use".to_owned();
    listeners[1].acknowledged = false;
    listeners[1].refusal = Some(why.clone());
    let outstanding = vec![ProxyOutstanding { listener: "egress-15003".to_owned(), refusal: Some(why) }];
    ProxyView { listeners: listeners.into(), outstanding, ..ProxyView::default() }
}

#[test]
fn listeners_of_the_agent_need_no_envoy() {
    let (style, mut view) = (Style::plain(), dns());
    assert!(!is_well(&view));
    let told = listeners(&view, &style, false);
    assert!(told.contains("serves") && told.contains("refused: listen") && !told.contains("no proxy"), "{told}");
    assert!(!status(&view, &style).contains("What to do"), "{}", status(&view, &style));
    assert_eq!(of_endpoint(&view, 7).first().map(String::as_str), Some("egress, port 15002: DNS of *.a"));
    view.listeners.truncate(1);
    view.outstanding.clear();
    assert!(is_well(&view));
    view.listeners[0].acknowledged = false;
    assert_eq!(of_endpoint(&view, 7), ["egress, port 15002: DNS of *.a; it is not open yet"]);
}

#[test]
fn names_and_how_long_their_addresses_last() {
    let address =
        |address: &str, until_unix_ms| ProxyNameAddress { address: address.parse().expect("address"), until_unix_ms };
    let (api, other) = (
        vec![address("192.0.2.7", NOW + 60_000), address("2001:db8::7", NOW - 1)],
        vec![address("192.0.2.9", NOW + 5_000)],
    );
    let of = |name: &str, addresses| ProxyName { name: name.to_owned(), addresses };
    let all = [of("api.example.com", api), of(HOSTILE, other)];
    let style = Style::plain();
    let told = names(&all, &style);
    let [_, first, second, third] = &told.lines().collect::<Vec<_>>()[..] else { panic!("{told}") };
    assert!(first.contains("api.example.com") && first.contains("192.0.2.7") && first.contains("1m"), "{told}");
    assert!(second.contains("2001:db8::7") && second.contains("in use"), "{told}");
    assert!(third.contains("192.0.2.9") && !told.contains('\u{202e}'), "{told}");

    let both = ["2001:db8:1111:2222:3333:4444:5555:6666", "2001:db8:1111:2222:3333:4444:5555:7777"];
    let ends = [NOW + 60_000, NOW + 7_200_000];
    let long = of(
        &"a.very.long.name.of.many.labels.".repeat(3),
        both.iter().zip(ends).map(|(ip, end)| address(ip, end)).collect(),
    );
    let told = names(&[long], &Style { width: 60, ..style });
    let line = |end: &str| told.lines().find(|line| line.contains(end)).unwrap_or_default().to_owned();
    assert!(line("6666").ends_with("1m") && line("7777").ends_with("2h"), "{told}");
}
