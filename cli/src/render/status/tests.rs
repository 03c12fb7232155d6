use std::collections::BTreeMap;

use wharf_api::{ComponentStatus, PreparedStatus, ProxyStatus};

use super::*;
use crate::render::sample::{self, HOSTILE, NOW};

#[test]
fn a_healthy_node() {
    insta::assert_snapshot!(status(&sample::status(), &Style::plain(), Detail::default()), @r"
    Wharf:              OK  version 0.1.0 (ABI 1), pid 412, up 3h12m
    Node:               node-a  router 10.88.0.1, fd00:88::1
    Kernel:             6.18.5  attach mode tcx
    Components:         3/3 healthy
      datapath:         OK  programs and maps as they should be
      ipam:             OK  2 pools
      store:            OK  /run/wharf/state.redb
    Controllers:        2/2 healthy
    IPAM:
      default IPv4:     12/253 (4.7%)  10.88.0.0/24
      default IPv6:     12/2^64  fd00:88::/64
    Endpoints:          12  10 ready, 2 regenerating
    BPF maps:           3.0 MiB of kernel memory
      ENDPOINTS:        24/32768 (0.1%)  hash, 1.0 MiB
      EVENTS:           1.0 MiB  ringbuf, 1.0 MiB
      endpoints/*:      24 rows  array, 1.0 MiB
    Prepared programs:  4/4
    Proxy:              none
    Memory:             21.2 MiB resident
    ");
}

#[test]
fn a_healthy_node_in_full() {
    let detail = Detail { verbose: true, all_controllers: false };
    insta::assert_snapshot!(status(&sample::status(), &Style::plain(), detail), @r"
    Wharf:              OK  version 0.1.0 (ABI 1), pid 412, up 3h12m
    Node:               node-a  router 10.88.0.1, fd00:88::1
    Kernel:             6.18.5  attach mode tcx
      has:              btf, redirect-peer
      has not:          netkit
    Components:         3/3 healthy
      datapath:         OK  programs and maps as they should be
      ipam:             OK  2 pools
      store:            OK  /run/wharf/state.redb
    Controllers:        2/2 healthy
      NAME            LAST SUCCESS  LAST ERROR  COUNT  IN A ROW  MESSAGE
      deletion-queue  12s ago       1h ago          1         0  no error
      lease-audit     12s ago       1h ago          1         0  no error
    IPAM:
      default IPv4:     12/253 (4.7%)  10.88.0.0/24
      default IPv6:     12/2^64  fd00:88::/64
    Endpoints:          12  10 ready, 2 regenerating (3 refused moves since start)
    BPF maps:           3.0 MiB of kernel memory
      ENDPOINTS:        24/32768 (0.1%)  hash, 1.0 MiB
      EVENTS:           1.0 MiB  ringbuf, 1.0 MiB
      endpoints/*:      24 rows  array, 1.0 MiB
    Creates:            0 waiting, 0 running beside 0 deletes, 0 refused
    Prepared programs:  4/4
    Proxy:              none
    Memory:             21.2 MiB resident
    ");
}

fn sick() -> AgentStatus {
    let mut s = sample::status();
    s.overall = Health::Failing;
    s.serving = false;
    s.components.push(ComponentStatus {
        name: "proxy".to_owned(),
        health: Health::Degraded,
        message: "connection lost; a long explanation that does not fit into the rest of a line of a hundred columns"
            .to_owned(),
    });
    if let Some(store) = s.components.iter_mut().find(|c| c.name == "store") {
        store.health = Health::Failing;
        store.message = HOSTILE.to_owned();
    }
    if let Some(c) = s.controllers.first_mut() {
        c.consecutive_failures = 3;
        c.last_failure_unix_ms = Some(NOW - 4_000);
        c.last_error = Some("reading the queue: permission denied".to_owned());
    }
    for pool in &mut s.ipam {
        if pool.family == IpFamily::Ipv4 {
            pool.used = pool.total;
        }
    }
    s.endpoints.insert("invalid".to_owned(), 1);
    if let Some(map) = s.bpf_maps.first_mut() {
        map.entries = Some(30_000);
    }
    s.proxy = ProxyStatus { enabled: true, redirects: 2, pending_completions: 1, timed_out_completions: 1 };
    s
}

#[test]
fn a_sick_node_says_what_and_where_to_look() {
    insta::assert_snapshot!(status(&sick(), &Style::plain(), Detail::default()), @r"
    Wharf:              not serving  version 0.1.0 (ABI 1), pid 412, up 3h12m
    Node:               node-a  router 10.88.0.1, fd00:88::1
    Kernel:             6.18.5  attach mode tcx
    Components:         2/4 healthy
      datapath:         OK  programs and maps as they should be
      ipam:             OK  2 pools
      store:            failing  k8s:app=\u{1b}[2J\u{9b}31m\u{202e}evil\r\nfake row
      proxy:            degraded  connection lost; a long explanation that does not fit into the rest of
                        a line of a hundred columns
    Controllers:        1/2 healthy
      NAME            LAST SUCCESS  LAST ERROR  COUNT  IN A ROW  MESSAGE
      deletion-queue  12s ago       4s ago          1         3  reading the queue: permission denied
    IPAM:
      default IPv4:     253/253 (100.0%)  10.88.0.0/24
      default IPv6:     12/2^64  fd00:88::/64
    Endpoints:          13  1 invalid, 10 ready, 2 regenerating
    BPF maps:           3.0 MiB of kernel memory
      ENDPOINTS:        30000/32768 (91.5%)  hash, 1.0 MiB
      EVENTS:           1.0 MiB  ringbuf, 1.0 MiB
      endpoints/*:      24 rows  array, 1.0 MiB
    Prepared programs:  4/4
    Proxy:              2 redirects, 1 completion awaited, 1 timed out
    Memory:             21.2 MiB resident

    Problems:
      - the agent does not accept new endpoints; it is starting, stopping, or a component below failed
          -> the agent's log: journalctl -u wharf-agent -e
      - store is failing: k8s:app=\u{1b}[2J\u{9b}31m\u{202e}evil\r\nfake row
          -> wharf audit; the agent's log: journalctl -u wharf-agent -e
      - pool default has no free IPv4 address: 253/253 (100.0%)
          -> wharf ipam list shows who holds them, wharf audit finds leaked ones; or add a CIDR to the
          pool
      - proxy is degraded: connection lost; a long explanation that does not fit into the rest of a line
        of a hundred columns
          -> the agent's log: journalctl -u wharf-agent -e
      - controller deletion-queue failed 3 times in a row, last 4s ago: reading the queue: permission
        denied
          -> it is tried again by itself; wharf status --all-controllers
      - 1 endpoint could not be created
          -> wharf endpoint list --state invalid, then wharf endpoint log ID
      - BPF map ENDPOINTS fills up: 30000/32768 (91.5%)
          -> wharf bpf map list
      - the proxy did not answer 1 time
          -> the proxy's own log; wharf monitor --type agent
    ");
}

#[test]
fn an_empty_node() {
    let mut s = sample::status();
    s.components.clear();
    s.controllers.clear();
    s.ipam.clear();
    s.endpoints = BTreeMap::new();
    s.bpf_maps.clear();
    s.router.clear();
    s.prepared = PreparedStatus::default();
    insta::assert_snapshot!(status(&s, &Style::plain(), Detail::default()), @r"
    Wharf:              OK  version 0.1.0 (ABI 1), pid 412, up 3h12m
    Node:               node-a  no router address
    Kernel:             6.18.5  attach mode tcx
    Components:         0/0 healthy
    Controllers:        0/0 healthy
    IPAM:               no pools
    Endpoints:          0
    BPF maps:           0 B of kernel memory
    Prepared programs:  0/0
    Proxy:              none
    Memory:             21.2 MiB resident
    ");
}

#[test]
fn no_status_drives_the_terminal() {
    let mut s = sick();
    s.node_name = HOSTILE.to_owned();
    s.version = HOSTILE.to_owned();
    s.kernel.release = HOSTILE.to_owned();
    s.endpoints.insert(HOSTILE.to_owned(), 1);
    for map in &mut s.bpf_maps {
        map.name = HOSTILE.to_owned();
    }
    let all = Detail { verbose: true, all_controllers: true };
    let text = status(&s, &Style::plain(), all);
    assert!(!text.chars().any(|c| (c.is_control() && c != '\n') || c == '\u{202e}'), "{text:?}");
}

#[test]
fn the_word_and_the_exit_agree() {
    let mut s = sample::status();
    assert_eq!((brief(&s), is_well(&s)), ("OK", true));
    s.overall = Health::Pending;
    assert_eq!((brief(&s), is_well(&s)), ("OK", true));
    s.overall = Health::Degraded;
    assert_eq!((brief(&s), is_well(&s)), ("degraded", false));
    s.overall = Health::Failing;
    assert_eq!((brief(&s), is_well(&s)), ("failing", false));
    s.serving = false;
    assert_eq!((brief(&s), is_well(&s)), ("not-serving", false));
    s.overall = Health::Ok;
    assert_eq!((brief(&s), is_well(&s)), ("not-serving", false));
}
