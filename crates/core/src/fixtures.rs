//! Endpoints for tests, also of other crates (feature `fixtures`).

use std::path::PathBuf;

use crate::{
    endpoint::{EndpointRecord, IpOwner, NetnsRef, host_ifname},
    identity::Identity,
    ids::{Attachment, ContainerId, EndpointId, Epoch, IfIndex, IfName, MacAddr, NetworkName, PoolName},
};

/// An attachment to the network `net`.
#[must_use]
#[allow(clippy::expect_used, reason = "a test's own constants")]
pub fn attachment(container: &str, ifname: &str) -> Attachment {
    Attachment {
        network: NetworkName::parse("net").expect("network name"),
        container_id: ContainerId::parse(container).expect("container id"),
        ifname: IfName::parse(ifname).expect("interface name"),
    }
}

#[must_use]
#[allow(clippy::expect_used, reason = "a test's own constants")]
pub fn id(n: u16) -> EndpointId {
    EndpointId::try_from(n).expect("endpoint id")
}

/// Endpoint `n` (1 to 250): container `c<n>`, addresses 10.0.0.n and fd00::n, interface index 100 + n.
#[must_use]
#[allow(clippy::expect_used, reason = "a test's own constants")]
pub fn record(n: u8, epoch: u64) -> EndpointRecord {
    let id = id(u16::from(n));
    EndpointRecord {
        id,
        epoch: Epoch(epoch),
        attachment: attachment(&format!("c{n}"), "eth0"),
        netns: NetnsRef { path: PathBuf::from(format!("/run/netns/c{n}")), dev: 4, inode: 4_026_532_000, cookie: 7 },
        pool: PoolName::parse("default").expect("pool name"),
        ip_owner: IpOwner::Endpoint,
        ipv4: Some([10, 0, 0, n].into()),
        ipv6: Some([0xfd00, 0, 0, 0, 0, 0, 0, u16::from(n)].into()),
        gateway4: Some([10, 0, 0, 254].into()),
        gateway6: Some([0xfd00, 0, 0, 0, 0, 0, 0, 0xfe].into()),
        host_ifname: host_ifname(id, Epoch(epoch)),
        host_ifindex: IfIndex(100 + u32::from(n)),
        container_ifindex: IfIndex(2),
        container_mac: MacAddr([2, 0, 0, 0, 0, n]),
        host_mac: MacAddr([2, 0, 0, 0, 1, n]),
        mtu: 1500,
        mtu_follows: true,
        container_mtu: None,
        labels: std::collections::BTreeSet::new(),
        identity: Identity(300),
        pod_name: None,
        pod_namespace: None,
        runtime: None,
        created_unix_ms: 0,
        ports: Vec::new(),
        masquerade: None,
        bandwidth: crate::bandwidth::Bandwidth::default(),
        sources: crate::sources::SourcePrefixes::default(),
        policy_enforcement: crate::policy::Enforcement::Default,
        named_ports: std::collections::BTreeMap::new(),
        awaits_labels: false,
        ipam: None,
        routes: None,
        link_owner: crate::endpoint::LinkOwner::Wharf,
        pod_row: None,
    }
}
