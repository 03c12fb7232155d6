use std::collections::BTreeMap;

use wharf_api::{
    CommandFailure, CommandStatus, ComponentStatus, DelegateRefusal, DelegateStatus, FlowStatus, Health,
    PreparedStatus, ProxyStatus,
};

use super::*;
use crate::render::sample::{self, HOSTILE, NOW};

#[test]
fn a_healthy_node() {
    insta::assert_snapshot!(status(&sample::status(), &Style::plain(), Detail::default()), @r"
    Wharf:              OK  version 0.1.0 (ABI 1), pid 412, up 3h12m
    Node:               node-a  router 10.88.0.1, fd00:88::1
    Kernel:             6.18.5  attach mode tcx
    Device mode:        veth
    MTU:                1400 (uplink eth0)
    Routing:            the node's routes; redirect-peer between local endpoints
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
    Device mode:        veth
    MTU:                1400 (uplink eth0)
    Routing:            the node's routes; redirect-peer between local endpoints
      has:              btf, redirect-peer
      has not:          netkit
    Components:         3/3 healthy
      datapath:         OK  programs and maps as they should be
      ipam:             OK  2 pools
      store:            OK  /run/wharf/state.redb
    Controllers:        2/2 healthy
      NAME            LAST SUCCESS  LAST ERROR  COUNT  NEXT RUN  MESSAGE
      deletion-queue  12s ago       1h ago          1  in 48s    no error
      lease-audit     12s ago       1h ago          1  in 48s    no error
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

#[test]
fn a_map_has_a_row_when_it_fills_up_or_everything_is_shown() {
    let mut s = sample::status();
    s.bpf_maps = vec![
        sample::map("ENDPOINTS", "hash", Some(79), 100),
        sample::map("FLOWS", "hash", Some(80), 100),
        sample::map("CONFIG", "array", Some(100), 100),
    ];
    let rows = |verbose| {
        let text = status(&s, &Style::plain(), Detail { verbose, all_controllers: false });
        let names = ["ENDPOINTS:", "FLOWS:", "CONFIG:"];
        names.map(|name| text.lines().any(|line| line.trim_start().starts_with(name)))
    };
    assert_eq!((rows(false), rows(true)), ([false, true, false], [true; 3]));
    assert!(!status(&s, &Style::plain(), Detail::default()).contains("Problems"), "not a problem yet");
}

#[test]
fn the_collection_of_flows_in_full() {
    let mut s = sample::status();
    let (expired, orphaned) = (1_200, 3);
    let collected_unix_ms = sample::NOW - 4_000;
    s.network.flows = Some(FlowStatus { expired, orphaned, collected_unix_ms, took_us: 2_500, ..Default::default() });
    let line = |verbose| {
        let text = status(&s, &Style::plain(), Detail { verbose, all_controllers: false });
        text.lines().find(|line| line.starts_with("Flows")).map(str::to_owned)
    };
    let told = "Flows collected:    1200 expired, 3 orphaned; last 4s ago, in 2500 µs";
    assert_eq!((line(true).as_deref(), line(false)), (Some(told), None));
}

fn sick() -> AgentStatus {
    let mut s = sample::status();
    s.overall = Health::Failing;
    s.serving = false;
    s.components.push(ComponentStatus::new(
        "proxy",
        Health::Degraded,
        "connection lost; a long explanation that does not fit into the rest of a line of a hundred columns",
    ));
    if let Some(store) = s.components.iter_mut().find(|c| c.name == "store") {
        store.health = Health::Failing;
        store.message = HOSTILE.to_owned();
    }
    if let Some(c) = s.controllers.first_mut() {
        c.consecutive_failures = 3;
        c.next_run_unix_ms = Some(NOW + 800);
        c.last_failure_unix_ms = Some(NOW - 4_000);
        c.last_error = Some("reading the queue: permission denied".to_owned());
    }
    s.controllers_unwell = 1;
    for pool in &mut s.ipam {
        if pool.family == IpFamily::Ipv4 {
            pool.used = pool.total;
        }
    }
    // As in the agent; listed once.
    if let Some(ipam) = s.components.iter_mut().find(|c| c.name == "ipam") {
        (ipam.health, ipam.message) = (Health::Degraded, "exhausted: default IPv4".to_owned());
    }
    s.endpoints.insert("invalid".to_owned(), 1);
    if let Some(map) = s.bpf_maps.first_mut() {
        map.entries = Some(30_000);
    }
    s.proxy = ProxyStatus {
        enabled: true,
        redirects: 2,
        pending_completions: 1,
        timed_out_completions: 1,
        ..ProxyStatus::default()
    };
    s
}

#[test]
fn a_sick_node_says_what_and_where_to_look() {
    insta::assert_snapshot!(status(&sick(), &Style::plain(), Detail::default()), @r"
    Wharf:              not serving  version 0.1.0 (ABI 1), pid 412, up 3h12m
    Node:               node-a  router 10.88.0.1, fd00:88::1
    Kernel:             6.18.5  attach mode tcx
    Device mode:        veth
    MTU:                1400 (uplink eth0)
    Routing:            the node's routes; redirect-peer between local endpoints
    Components:         1/4 healthy
      datapath:         OK  programs and maps as they should be
      ipam:             degraded  exhausted: default IPv4
      store:            failing  k8s:app=\u{1b}[2J\u{9b}31m\u{202e}evil\r\nfake row
      proxy:            degraded  connection lost; a long explanation that does not fit into the rest of
                        a line of a hundred columns
    Controllers:        1/2 healthy
      NAME            LAST SUCCESS  LAST ERROR  COUNT  NEXT RUN  MESSAGE
      deletion-queue  12s ago       4s ago          1  now       reading the queue: permission denied
    IPAM:
      default IPv4:     253/253 (100.0%)  10.88.0.0/24
      default IPv6:     12/2^64  fd00:88::/64
    Endpoints:          13  1 invalid, 10 ready, 2 regenerating
    BPF maps:           3.0 MiB of kernel memory
      ENDPOINTS:        30000/32768 (91.5%)  hash, 1.0 MiB
    Prepared programs:  4/4
    Proxy:              absent, 2 redirects, 1 completion awaited, 1 timed out
    Memory:             21.2 MiB resident

    Problems:
      - the agent does not accept new endpoints; it is starting, stopping, or a component below failed
          -> the agent's log: journalctl -u wharf-agent -e
      - store is failing: k8s:app=\u{1b}[2J\u{9b}31m\u{202e}evil\r\nfake row
          -> is the disk of the run directory full or stuck? journalctl -u wharf-agent -e
      - pool default has no free IPv4 address: 253/253 (100.0%)
          -> wharf ipam list shows who holds them, wharf audit finds leaked ones; or add a CIDR to the
          pool
      - proxy is degraded: connection lost; a long explanation that does not fit into the rest of a line
        of a hundred columns
          -> wharf proxy status; wharf proxy listeners
      - controller deletion-queue failed 3 times in a row, last 4s ago: reading the queue: permission
        denied
          -> it is tried again by itself; wharf status --all-controllers
      - 1 endpoint could not be created
          -> wharf endpoint list --state invalid, then wharf endpoint log ID
      - BPF map ENDPOINTS fills up: 30000/32768 (91.5%)
          -> wharf bpf map list
      - the proxy did not answer 1 time
          -> wharf proxy status; the agent's log, which has Envoy's: journalctl -u wharf-agent -e
    ");
}

/// Without answers from store and API, and with an endless controller run.
fn stuck() -> AgentStatus {
    let mut s = sample::status();
    (s.overall, s.from_admin) = (Health::Failing, true);
    if let Some(store) = s.components.iter_mut().find(|c| c.name == "store") {
        (store.health, store.stale_ms) = (Health::Failing, Some(12_300));
        store.message =
            "118 commits, 0 failed; no answer for 11 s: its disk has been at one piece of work for 12 s".to_owned();
    }
    let why = "its workers are all blocked: no sign of life for 14 s";
    s.components.insert(0, ComponentStatus::new("runtime", Health::Failing, why));
    s.components.push(ComponentStatus::new("controllers", Health::Degraded, "failing: 2 of them"));
    let own = ControllerStatus {
        running_since_unix_ms: Some(NOW - 75_000),
        overdue: true,
        ..sample::controller("node-datapath")
    };
    let regeneration = ControllerStatus {
        endpoint: Some(16_383),
        consecutive_failures: 4,
        last_success_unix_ms: None,
        last_failure_unix_ms: Some(NOW - 2_000),
        last_error: Some("attach programs to wh3fff0000002a: device or resource busy".to_owned()),
        next_run_unix_ms: Some(NOW + 3_000),
        ..sample::controller("regeneration")
    };
    s.controllers.extend([own, regeneration]);
    (s.controllers_total, s.controllers_unwell) = (4, 2);
    s
}

#[test]
fn a_stuck_node_says_how_old_each_part_is() {
    insta::assert_snapshot!(status(&stuck(), &Style::plain(), Detail::default()), @r"
    Wharf:              failing  version 0.1.0 (ABI 1), pid 412, up 3h12m
    Node:               node-a  router 10.88.0.1, fd00:88::1
    Kernel:             6.18.5  attach mode tcx
    Device mode:        veth
    MTU:                1400 (uplink eth0)
    Routing:            the node's routes; redirect-peer between local endpoints
    Components:         2/5 healthy
      runtime:          failing  its workers are all blocked: no sign of life for 14 s
      datapath:         OK  programs and maps as they should be
      ipam:             OK  2 pools
      store:            failing, stale 12s  118 commits, 0 failed; no answer for 11 s: its disk has been
                        at one piece of work for 12 s
      controllers:      degraded  failing: 2 of them
    Controllers:        2/4 healthy
      NAME                         LAST SUCCESS  LAST ERROR  COUNT  NEXT RUN    MESSAGE
      node-datapath                12s ago       1h ago          1  runs 1m15s  does not end
      endpoint-16383-regeneration  never         2s ago          1  in 3s       attach programs to
                                                                                wh3fff0000002a: device
                                                                                or resource busy
    IPAM:
      default IPv4:     12/253 (4.7%)  10.88.0.0/24
      default IPv6:     12/2^64  fd00:88::/64
    Endpoints:          12  10 ready, 2 regenerating
    BPF maps:           3.0 MiB of kernel memory
    Prepared programs:  4/4
    Proxy:              none
    Memory:             21.2 MiB resident

    Problems:
      - the API does not answer; this is from the admin thread
          -> `runtime` and `api` above; the agent's log: journalctl -u wharf-agent -e
      - runtime is failing: its workers are all blocked: no sign of life for 14 s
          -> the agent is stuck; systemd restarts it (traffic goes on), or: systemctl restart
          wharf-agent
      - store is failing and stale for 12s: 118 commits, 0 failed; no answer for 11 s: its disk has been
        at one piece of work for 12 s
          -> is the disk of the run directory full or stuck? journalctl -u wharf-agent -e
      - controller node-datapath: its run has not ended for 1m15s
          -> what it waits for does not answer; wharf status --all-controllers
      - controller endpoint-16383-regeneration failed 4 times in a row, last 2s ago: attach programs to
        wh3fff0000002a: device or resource busy
          -> it is tried again by itself; wharf status --all-controllers
    ");
}

#[test]
fn every_controller_in_a_table() {
    let detail = Detail { verbose: false, all_controllers: true };
    let text = status(&stuck(), &Style::plain(), detail);
    let table: Vec<&str> = text.lines().skip_while(|l| !l.starts_with("Controllers:")).take(6).collect();
    insta::assert_snapshot!(table.join("\n"), @r"
    Controllers:        2/4 healthy
      NAME                         LAST SUCCESS  LAST ERROR  COUNT  NEXT RUN    MESSAGE
      deletion-queue               12s ago       1h ago          1  in 48s      no error
      lease-audit                  12s ago       1h ago          1  in 48s      no error
      node-datapath                12s ago       1h ago          1  runs 1m15s  does not end
      endpoint-16383-regeneration  never         2s ago          1  in 3s       attach programs to
    ");
}

#[test]
fn a_screen_has_a_hundred_columns_and_colour_only_where_it_is_wanted() {
    let detail = Detail { verbose: true, all_controllers: true };
    for s in [sample::status(), sick(), stuck()] {
        let text = status(&s, &Style::plain(), detail);
        assert!(text.lines().all(|l| l.chars().count() <= 100), "{text}");
        assert!(!text.contains('\u{1b}'));
        assert!(status(&s, &Style { color: true, ..Style::plain() }, detail).contains("\u{1b}[32mOK"));
    }
}

#[test]
fn an_empty_node() {
    let mut s = sample::status();
    s.components.clear();
    s.controllers.clear();
    s.controllers_total = 0;
    s.ipam.clear();
    s.endpoints = BTreeMap::new();
    s.bpf_maps.clear();
    s.router.clear();
    s.prepared = PreparedStatus::default();
    insta::assert_snapshot!(status(&s, &Style::plain(), Detail::default()), @r"
    Wharf:              OK  version 0.1.0 (ABI 1), pid 412, up 3h12m
    Node:               node-a  no router address
    Kernel:             6.18.5  attach mode tcx
    Device mode:        veth
    MTU:                1400 (uplink eth0)
    Routing:            the node's routes; redirect-peer between local endpoints
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
fn the_verdict_of_a_status() {
    let mut s = sample::status();
    let mut verdicts = Vec::new();
    for serving in [true, false] {
        for overall in [Health::Ok, Health::Pending, Health::Degraded, Health::Failing] {
            (s.serving, s.overall) = (serving, overall);
            verdicts.push(s.verdict().as_str());
        }
    }
    assert_eq!(verdicts, ["ok", "ok", "degraded", "down", "down", "down", "down", "down"]);
}

#[test]
fn what_works_again_is_not_taken_for_stuck() {
    let mut s = sample::status();
    s.components = vec![
        ComponentStatus::new("api", Health::Degraded, "its socket was gone and is bound again since 2 s"),
        ComponentStatus::new("store", Health::Degraded, "4 commits, 0 failed; written anew 2 s ago"),
    ];
    let next: Vec<String> = problem::problems(&s, NOW).into_iter().map(|p| p.next).collect();
    assert_eq!(next.len(), 2, "{next:?}");
    assert!(next.iter().all(|next| next.starts_with("it works again")), "{next:?}");
    // Last message before the failure.
    s.components.iter_mut().for_each(|c| c.stale_ms = Some(12_000));
    let next: Vec<String> = problem::problems(&s, NOW).into_iter().map(|p| p.next).collect();
    assert!(next.iter().all(|next| next.contains("stuck")), "{next:?}");
}

#[test]
fn cni_commands_are_counted_and_the_last_failure_is_told() {
    let line = |s: &AgentStatus| {
        let text = status(s, &Style::plain(), Detail::default());
        let mut lines = text.lines().skip_while(|line| !line.starts_with("CNI commands"));
        let first = lines.next()?;
        let rest = lines.take_while(|line| line.starts_with("      "));
        Some(std::iter::once(first).chain(rest.map(str::trim_start)).collect::<Vec<_>>().join(" "))
    };
    let mut s = sample::status();
    assert_eq!(line(&s), None, "none before the first command");
    s.commands = CommandStatus { succeeded: 1_204, failed: 3, deferred: 1, last_failure: None };
    s.commands.last_failure = Some(CommandFailure {
        command: "ADD".into(),
        network: "net".into(),
        container_id: "c1".into(),
        ifname: "eth0".into(),
        pod_name: "web-1".into(),
        pod_namespace: "shop".into(),
        message: "pool default has no free IPv4 address".into(),
        ended_unix_ms: NOW - 120_000,
    });
    insta::assert_snapshot!(line(&s).unwrap_or_default(), @"CNI commands:       1204 ok, 3 failed, 1 deferred (last: ADD web-1 2m ago: pool default has no free IPv4 address)");
    let failure = s.commands.last_failure.as_mut().expect("a failure");
    (failure.pod_name, failure.message) = (HOSTILE.into(), "x".repeat(1_000));
    let hostile = line(&s).expect("a line");
    assert!(hostile.len() < 700 && !hostile.contains(|c: char| c.is_control()), "{hostile:?}");
}

#[test]
fn a_service_that_makes_the_network_has_a_line_in_place_of_what_it_makes() {
    let mut s = sample::status();
    s.deletion_queue.records = 2;
    s.delegate = Some(DelegateStatus {
        socket: "/run/net.sock".into(),
        service: "overlay 1".into(),
        reachable: Some(false),
        since_unix_ms: NOW - 120_000,
        last_error: Some("no answer".into()),
        unfinished: 1,
        ..DelegateStatus::default()
    });
    let flat = |s: &AgentStatus| {
        let text = status(s, &Style::plain(), Detail::default());
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let text = flat(&s);
    let line = "Delegate: overlay 1 at /run/net.sock, not reached for 2m; 2 deletions wait; 1 ADD to be undone";
    assert!(text.contains(line), "{text}");
    for absent in ["IPAM", "BPF maps", "Prepared", "Kernel"] {
        assert!(!text.contains(absent), "{absent}: {text}");
    }
    let delegate = s.delegate.as_mut().expect("a service");
    delegate.reachable = Some(true);
    delegate.refusal = Some(DelegateRefusal { code: 50, message: HOSTILE.into(), details: String::new() });
    (delegate.socket, delegate.service) = (HOSTILE.into(), HOSTILE.into());
    let text = flat(&s);
    assert!(text.contains("it takes no ADD") && !text.contains(|c: char| c.is_control()), "{text:?}");
}
