use std::{collections::BTreeMap, net::IpAddr};

use wharf_api::{Finding, Health, SelfCheckAlarm, StepError};

use super::*;
use crate::render::sample::{self, HOSTILE, NOW};

fn plain() -> Style {
    Style::plain()
}

pub(super) fn hostile() -> Endpoint {
    let mut e = sample::endpoint();
    e.labels = vec![HOSTILE.to_owned(), "größe=日本🦀".to_owned(), "x".repeat(10_000)];
    for text in [&mut e.ifname, &mut e.network, &mut e.netns, &mut e.pool, &mut e.host_ifname, &mut e.container_id] {
        *text = HOSTILE.to_owned();
    }
    e.pod_name = Some(HOSTILE.to_owned());
    e.status.last_error = Some(HOSTILE.to_owned());
    e.status.phase = HOSTILE.to_owned();
    e.status.waits_for = HOSTILE.to_owned();
    e
}

#[test]
fn hostile_names_do_not_reach_the_terminal() {
    let text = get(&hostile(), &[], &plain());
    assert!(!text.chars().any(|c| (c.is_control() && c != '\n') || c == '\u{202e}'), "{text:?}");
}

#[test]
fn everything_about_one() {
    let redirects = ["ingress, port 15000: GET /public...".to_owned()];
    insta::assert_snapshot!(get(&sample::endpoint(), &redirects, &plain()), @r"
    Endpoint:           7 (epoch 41)
    State:              ready
    Builds:             2 succeeded
    Identity:           65537
    Labels:             k8s:app=web
                        k8s:io.kubernetes.pod.namespace=default
    Container:          3f9c51aa01b2d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d eth0
    Network:            wharf
    Pod:                default/web-1
    Runtime:            containerd
    Netns:              /run/netns/cni-1
    IPv4:               10.88.0.7  gateway 10.88.0.1
    IPv6:               fd00:88::7  gateway fd00:88::1
    Redirects:          ingress, port 15000: GET /public...
    Pool:               default
    MAC:                02:00:00:00:00:07
    MTU:                1500
    Host interface:     wh0007a1b2 (index 12, MAC 02:00:00:00:01:07)
    Created:            2026-10-01T11:54:48.000Z (5m12s ago)
    ");
}

#[test]
fn one_that_waits_says_for_what() {
    let mut e = sample::endpoint();
    e.state = EndpointState::Regenerating;
    e.ipv6 = None;
    e.status.phase = "awaiting-proxy".to_owned();
    e.status.waits_for = "2 completions of the proxy".to_owned();
    e.status.ends_when = "the proxy answers, or 5s have passed".to_owned();
    e.status.failures = 1;
    e.status.last_error = Some("attaching to_container: no such device".to_owned());
    insta::assert_snapshot!(get(&e, &[], &plain()), @r"
    Endpoint:           7 (epoch 41)
    State:              regenerating
    Phase:              awaiting-proxy, began 12s ago
    Waits for:          2 completions of the proxy, since 12s ago; ends when the proxy answers, or 5s
                        have passed
    Builds:             2 succeeded
    Last build:         1 failure in a row:  attaching to_container: no such device
    Identity:           65537
    Labels:             k8s:app=web
                        k8s:io.kubernetes.pod.namespace=default
    Container:          3f9c51aa01b2d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d eth0
    Network:            wharf
    Pod:                default/web-1
    Runtime:            containerd
    Netns:              /run/netns/cni-1
    IPv4:               10.88.0.7  gateway 10.88.0.1
    IPv6:               none
    Pool:               default
    MAC:                02:00:00:00:00:07
    MTU:                1500
    Host interface:     wh0007a1b2 (index 12, MAC 02:00:00:00:01:07)
    Created:            2026-10-01T11:54:48.000Z (5m12s ago)
    ");
}

#[test]
fn the_log() {
    let entry = |status, event: &str, message: &str| EndpointLogEntry {
        time_unix_ms: NOW,
        status,
        state: EndpointState::Ready,
        event: event.to_owned(),
        message: message.to_owned(),
    };
    let entries = [
        entry(LogStatus::Ok, "built", "revision 3 in 2.4 ms"),
        entry(LogStatus::Warning, "refused", "restore is not allowed in ready"),
        entry(LogStatus::Failure, "built", HOSTILE),
    ];
    insta::assert_snapshot!(log(&entries, &plain()), @r"
    TIME                      STATUS   STATE  EVENT    MESSAGE
    2026-10-01T12:00:00.000Z  ok       ready  built    revision 3 in 2.4 ms
    2026-10-01T12:00:00.000Z  warning  ready  refused  restore is not allowed in ready
    2026-10-01T12:00:00.000Z  failure  ready  built    k8s:app=\u{1b}[2J\u{9b}31m\u{202e}evil\r\nfake
                                                       row
    ");
    insta::assert_snapshot!(log(&[], &plain()), @"TIME  STATUS  STATE  EVENT  MESSAGE");
}

fn test_packet(name: &str, expected: &str, got: &str) -> SelfCheckCase {
    SelfCheckCase { name: name.to_owned(), expected: expected.to_owned(), got: got.to_owned(), ok: expected == got }
}

#[test]
fn the_health() {
    let passed = "pass, egress forwarded-stack";
    let mut h = EndpointHealth {
        overall: Health::Ok,
        bpf: Health::Ok,
        policy: Health::Ok,
        connected: Health::Ok,
        findings: Vec::new(),
        desired_revision: 3,
        realized_revision: 3,
        self_check: SelfCheck {
            state: Health::Ok,
            checked_unix_ms: Some(NOW - 12_000),
            cases: vec![
                test_packet("to-gateway-ipv4", passed, passed),
                test_packet(
                    "to-itself-ipv4",
                    "redirect, egress forwarded-local, ingress forwarded-local",
                    "redirect, egress forwarded-local, ingress forwarded-local",
                ),
            ],
            ..SelfCheck::default()
        },
    };
    insta::assert_snapshot!(endpoint_health(&h, &plain()), @r"
    Overall:            OK
    BPF:                OK
    Self-check:         OK  2 of 2 test packets as expected, 12s ago
    Last build:         OK
    Connected:          OK

    TEST PACKET      EXPECTED                                                   GOT
    to-gateway-ipv4  pass, egress forwarded-stack                               the same
    to-itself-ipv4   redirect, egress forwarded-local, ingress forwarded-local  the same
    ");
    h.overall = Health::Failing;
    h.connected = Health::Failing;
    h.policy = Health::Pending;
    h.findings = vec![Finding {
        object: "route".to_owned(),
        subject: "10.88.0.7/32".to_owned(),
        problem: "wanted dev wh0007a1b2, the kernel has none".to_owned(),
        owner: None,
        repairable: true,
        ..Finding::default()
    }];
    h.self_check.state = Health::Failing;
    h.self_check.cases.push(test_packet(
        "false-source-ip-ipv4",
        "drop, egress invalid-source-ip",
        "pass, egress forwarded-stack",
    ));
    let done = "regenerated the datapath".to_owned();
    h.self_check.alarm = Some(SelfCheckAlarm { since_unix_ms: NOW - 72_000, done });
    insta::assert_snapshot!(endpoint_health(&h, &plain()), @r"
    Overall:            failing
    BPF:                OK
    Self-check:         failing  2 of 3 test packets as expected, 12s ago
    Last build:         pending
    Connected:          failing
    Alarm:              for 1m12s; regenerated the datapath

    Findings:
      - route 10.88.0.7/32: wanted dev wh0007a1b2, the kernel has none

    TEST PACKET           EXPECTED                                   GOT
    to-gateway-ipv4       pass, egress forwarded-stack               the same
    to-itself-ipv4        redirect, egress forwarded-local, ingress  the same
                          forwarded-local
    false-source-ip-ipv4  drop, egress invalid-source-ip             pass, egress forwarded-stack
    ");
    h.self_check = SelfCheck { error: Some(HOSTILE.to_owned()), ..SelfCheck::default() };
    h.findings.clear();
    insta::assert_snapshot!(endpoint_health(&h, &plain()), @r"
    Overall:            failing
    BPF:                OK
    Self-check:         pending  k8s:app=\u{1b}[2J\u{9b}31m\u{202e}evil\r\nfake row
    Last build:         pending
    Connected:          failing
    ");
}

#[test]
fn labels_and_settings() {
    let l = EndpointLabels {
        labels: vec!["k8s:app=web".to_owned(), "k8s:pod-template-hash=1".to_owned()],
        security_relevant: vec!["k8s:app=web".to_owned()],
        identity: 65_537,
    };
    insta::assert_snapshot!(labels(&l, &plain()), @r"
    Identity:           65537
    LABEL                    MAKES IDENTITY
    k8s:app=web              yes
    k8s:pod-template-hash=1  no
    ");
    let side = |mtu: &str, extra: Option<&str>| -> BTreeMap<String, String> {
        let mut side = BTreeMap::from([("mtu".to_owned(), mtu.to_owned()), ("trace".to_owned(), "off".to_owned())]);
        side.extend(extra.map(|k| (k.to_owned(), "1".to_owned())));
        side
    };
    let c = EndpointConfigView { desired: side("1500", None), realized: side("1400", Some("gate")) };
    insta::assert_snapshot!(config(&c, &plain()), @r"
    SETTING  DESIRED  REALIZED
    gate     -        1
    mtu      1500     1400
    trace    off      off
    ");
}

#[test]
fn deletes() {
    let ip: Option<IpAddr> = "10.88.0.7".parse().ok();
    let d = DeleteResult {
        deferred: false,
        deleted: vec![7, 8],
        leases_released: ip.into_iter().collect(),
        errors: vec![StepError {
            step: "unpin".to_owned(),
            endpoint: "7".to_owned(),
            message: "removing \x1b[31mpin".to_owned(),
        }],
        kept: Vec::new(),
    };
    insta::assert_snapshot!(deleted(&d), @r"
    endpoint 7 deleted
    endpoint 8 deleted
    lease 10.88.0.7 released
    failed: unpin of 7: removing \u{1b}[31mpin
    ");
    insta::assert_snapshot!(deleted(&DeleteResult::default()), @"nothing to delete");
}
