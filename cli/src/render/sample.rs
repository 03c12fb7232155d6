//! Objects for render tests.

use std::collections::BTreeMap;

use wharf_api::{
    AdmissionStatus, AgentStatus, BpfMap, CommandStatus, ComponentStatus, ControllerStatus, DeletionQueueStatus,
    Endpoint, EndpointState, EndpointStatus, Health, IpFamily, KernelStatus, NetworkStatus, PoolView, PreparedStatus,
    ProxyStatus,
};

/// 2026-10-01T12:00:00Z.
pub(crate) const NOW: u64 = 1_790_856_000_000;

/// Attempts to control the terminal.
pub(crate) const HOSTILE: &str = "k8s:app=\u{1b}[2J\u{9b}31m\u{202e}evil\r\nfake row";

pub(crate) fn endpoint() -> Endpoint {
    Endpoint {
        id: 7,
        epoch: 41,
        state: EndpointState::Ready,
        container_id: "3f9c51aa01b2d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d".to_owned(),
        ifname: "eth0".to_owned(),
        network: "wharf".to_owned(),
        identity: 65_537,
        labels: vec!["k8s:app=web".to_owned(), "k8s:io.kubernetes.pod.namespace=default".to_owned()],
        ipv4: "10.88.0.7".parse().ok(),
        ipv6: "fd00:88::7".parse().ok(),
        ifindex: 12,
        host_ifname: "wh0007a1b2".to_owned(),
        container_mac: "02:00:00:00:00:07".to_owned(),
        host_mac: "02:00:00:00:01:07".to_owned(),
        gateway4: "10.88.0.1".parse().ok(),
        gateway6: "fd00:88::1".parse().ok(),
        mtu: 1500,
        pool: "default".to_owned(),
        ipam: None,
        routes: None,
        netns: "/run/netns/cni-1".to_owned(),
        pod_name: Some("web-1".to_owned()),
        pod_namespace: Some("default".to_owned()),
        runtime: Some("containerd".to_owned()),
        created_unix_ms: NOW - 312_000,
        ports: Vec::new(),
        ports_off: false,
        masquerade: None,
        bandwidth: wharf_api::Bandwidth::default(),
        source_prefixes: Vec::new(),
        delegated: None,
        policy_enforcement: wharf_api::Enforcement::Default,
        named_ports: BTreeMap::new(),
        mode: wharf_api::EndpointMode::Own,
        status: EndpointStatus {
            desired_revision: 3,
            realized_revision: 3,
            regenerations: 2,
            since_unix_ms: NOW - 12_000,
            ..EndpointStatus::default()
        },
    }
}

pub(crate) fn map(name: &str, kind: &str, entries: Option<u64>, max: u64) -> BpfMap {
    BpfMap { name: name.to_owned(), kind: kind.to_owned(), entries, max_entries: max, memlock_bytes: 1 << 20 }
}

pub(crate) fn controller(name: &str) -> ControllerStatus {
    ControllerStatus {
        name: name.to_owned(),
        successes: 120,
        failures: 1,
        consecutive_failures: 0,
        last_success_unix_ms: Some(NOW - 12_000),
        last_failure_unix_ms: Some(NOW - 3_600_000),
        last_error: None,
        interval_ms: Some(60_000),
        next_run_unix_ms: Some(NOW + 48_000),
        last_duration_ms: Some(3),
        ..ControllerStatus::default()
    }
}

pub(crate) fn status() -> AgentStatus {
    let component = |name: &str, message: &str| ComponentStatus::new(name, Health::Ok, message);
    let pool = |family, cidr: &str, used, total| PoolView {
        name: "default".to_owned(),
        family,
        cidrs: vec![cidr.to_owned()],
        used,
        resting: 0,
        total,
        masquerade: None,
    };
    AgentStatus {
        overall: Health::Ok,
        serving: true,
        version: "0.1.0".to_owned(),
        abi_version: 1,
        node_name: "node-a".to_owned(),
        pid: 412,
        uptime_ms: 11_520_000,
        router: ["10.88.0.1", "fd00:88::1"].iter().filter_map(|ip| ip.parse().ok()).collect(),
        kernel: KernelStatus {
            release: "6.18.5".to_owned(),
            attach_mode: "tcx".to_owned(),
            features: BTreeMap::from([
                ("btf".to_owned(), true),
                ("netkit".to_owned(), false),
                ("redirect-peer".to_owned(), true),
            ]),
        },
        network: NetworkStatus {
            device_mode: "veth".to_owned(),
            routing: "the node's routes; redirect-peer between local endpoints".to_owned(),
            masquerading: "none".to_owned(),
            connections: None,
            flows: None,
            mtu: "1400 (uplink eth0)".to_owned(),
        },
        components: vec![
            component("datapath", "programs and maps as they should be"),
            component("ipam", "2 pools"),
            component("store", "/run/wharf/state.redb"),
        ],
        controllers: vec![controller("deletion-queue"), controller("lease-audit")],
        controllers_total: 2,
        controllers_unwell: 0,
        ipam: vec![pool(IpFamily::Ipv4, "10.88.0.0/24", 12, 253), pool(IpFamily::Ipv6, "fd00:88::/64", 12, u64::MAX)],
        endpoints: BTreeMap::from([("ready".to_owned(), 10), ("regenerating".to_owned(), 2)]),
        stuck: Vec::new(),
        quarantined: Vec::new(),
        deletion_queue: DeletionQueueStatus { canary: "came out after 3 ms".to_owned(), ..Default::default() },
        commands: CommandStatus::default(),
        admission: AdmissionStatus::default(),
        audit_findings: Some(0),
        refused_transitions: 3,
        bpf_maps: vec![
            map("ENDPOINTS", "hash", Some(24), 32_768),
            map("EVENTS", "ringbuf", None, 1 << 20),
            map("endpoints/*", "array", Some(24), 24),
        ],
        prepared: PreparedStatus { ready: 4, target: 4 },
        proxy: ProxyStatus::default(),
        delegate: None,
        resident_bytes: 22_334_000,
        from_admin: false,
    }
}
