#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::path::PathBuf;

use super::*;
use crate::{
    endpoint::{HooksFound, LinkOwner},
    finding::Side,
    fixtures::{attachment, id, record},
    ids::{MacAddr, PoolName},
    nat::{NatEntry, PortMapping, Protocol, PublishedPort},
};

mod aside;

/// The previous version's format: without an owner.
fn mark(record: &EndpointRecord) -> String {
    format!("wharf:{}:{}", record.id, record.epoch)
}

/// A healthy node with endpoints 1 (epoch 10) and 2 (epoch 20).
struct Node {
    dump: KernelDump,
    snapshot: Snapshot,
    call_slots: Vec<u32>,
    prepared: BTreeSet<EndpointId>,
    in_flight: BTreeSet<EndpointId>,
    pool_cidrs: Vec<IpNet>,
    node: Vec<NodeProblem>,
    queue: Vec<QueueFile>,
}

impl Node {
    fn healthy() -> Self {
        let mut node = Self {
            dump: KernelDump::default(),
            call_slots: Vec::new(),
            snapshot: Snapshot::default(),
            prepared: BTreeSet::new(),
            in_flight: BTreeSet::new(),
            pool_cidrs: vec!["10.0.0.0/24".parse().unwrap(), "fd00::/64".parse().unwrap()],
            node: Vec::new(),
            queue: Vec::new(),
        };
        let unreachable = |cidr: &IpNet| RouteRow { destination: *cidr, ifindex: None };
        node.dump.routes = node.pool_cidrs.iter().map(unreachable).collect();
        for router in ["10.0.0.254", "fd00::fe"] {
            node.snapshot.leases.push(lease(router, LeaseOwner::Node));
        }
        for record in [record(1, 10), record(2, 20)] {
            node.add(record);
        }
        node
    }

    fn add(&mut self, record: EndpointRecord) {
        self.dump.links.push(LinkRow {
            name: record.host_ifname.to_string(),
            ifindex: record.host_ifindex,
            alias: Some(mark(&record)),
        });
        self.dump.pins.push((record.id.to_string(), names(&[&REQUIRED_PINS[..], &LINK_PINS].concat())));
        self.call_slots.push(u32::from(record.id.get()));
        for address in record.addresses() {
            self.dump.endpoint_rows.push(row(&record, address));
            let route = RouteRow { destination: IpNet::from(address), ifindex: Some(record.host_ifindex) };
            self.dump.routes.push(route);
            let owner = LeaseOwner::Attachment { attachment: record.attachment.clone(), epoch: record.epoch };
            self.snapshot.leases.push(lease(&address.to_string(), owner));
        }
        self.snapshot.endpoints.push(record);
    }

    fn forget_two(&mut self) {
        self.snapshot.endpoints.retain(|r| r.id != id(2));
        self.snapshot.leases.retain(|l| l.ip != ip("10.0.0.2") && l.ip != ip("fd00::2"));
    }

    fn audit(&self) -> Vec<AuditFinding> {
        audit(&AuditView {
            dump: &self.dump,
            call_slots: &self.call_slots,
            snapshot: &self.snapshot,
            prepared: &self.prepared,
            in_flight: &self.in_flight,
            pool_cidrs: &self.pool_cidrs,
            router: [Some(ip("10.0.0.254")), Some(ip("fd00::fe"))],
            node: &self.node,
            queue: &self.queue,
        })
    }

    fn found(&self) -> Vec<String> {
        self.audit()
            .into_iter()
            .map(|f| {
                let repair = f.repair.map_or("no repair".to_owned(), |r| name(&r));
                format!("{} {}: {repair}", f.problem.object(), f.problem.subject())
            })
            .collect()
    }
}

fn name(repair: &Repair) -> String {
    match repair {
        Repair::RemoveLink(link) => format!("remove-link {} epoch {}", link.host_ifname, link.epoch),
        Repair::RemovePins(id) => format!("remove-pins {id}"),
        Repair::RemoveEndpointRow(ip, epoch) => format!("remove-row {ip} epoch {epoch}"),
        Repair::RemoveCallSlot(slot) => format!("remove-slot {slot}"),
        Repair::RemoveNat(entry) => format!("remove-nat {entry}"),
        Repair::ReleaseLease(ip) => format!("release {ip}"),
        Repair::RemoveRoute(route) => format!("remove-route {}", route.destination),
        Repair::Regenerate(id, level) => format!("regenerate {id} {level}"),
        Repair::CloseIntent(id, epoch, _) => format!("close-intent {id} epoch {epoch}"),
        Repair::EnsureNode => "ensure-node".to_owned(),
        Repair::DrainQueue => "drain-queue".to_owned(),
        Repair::RemoveQueueFile(name) => format!("remove-file {name}"),
        Repair::ForgetRest(ip) => format!("forget-rest {ip}"),
        Repair::ReleaseOutOfService(id) => format!("release-out-of-service {id}"),
    }
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn names(pins: &[&str]) -> Vec<String> {
    pins.iter().map(|p| (*p).to_owned()).collect()
}

fn lease(address: &str, owner: LeaseOwner) -> Lease {
    Lease { ip: ip(address), pool: PoolName::parse("default").unwrap(), owner, since_unix_ms: 0 }
}

fn row(record: &EndpointRecord, address: IpAddr) -> EndpointTableRow {
    EndpointTableRow {
        address,
        endpoint_id: u32::from(record.id.get()),
        direct: u32::from(record.id.get()),
        epoch: record.epoch,
        ifindex: record.host_ifindex,
        identity: record.identity.0,
        mac: record.container_mac,
    }
}

fn create_intent(n: u16, epoch: u64) -> (EndpointId, Epoch, Intent) {
    let intent = Intent::Create {
        attachment: attachment(&format!("c{n}"), "eth0"),
        netns_path: PathBuf::from(format!("/run/netns/c{n}")),
        link: None,
    };
    (id(n), Epoch(epoch), intent)
}

#[test]
fn a_healthy_node_has_no_findings() {
    let node = Node::healthy();
    assert_eq!(node.audit(), []);
    assert_eq!(audit(&AuditView { router: [None; 2], pool_cidrs: &[], ..empty_view() }), []);
}

fn empty_view() -> AuditView<'static> {
    static NONE: BTreeSet<EndpointId> = BTreeSet::new();
    static DUMP: std::sync::LazyLock<KernelDump> = std::sync::LazyLock::new(KernelDump::default);
    static SNAPSHOT: std::sync::LazyLock<Snapshot> = std::sync::LazyLock::new(Snapshot::default);
    AuditView {
        dump: &DUMP,
        call_slots: &[],
        snapshot: &SNAPSHOT,
        prepared: &NONE,
        in_flight: &NONE,
        pool_cidrs: &[],
        router: [None; 2],
        node: &[],
        queue: &[],
    }
}

#[test]
fn what_the_kernel_holds_of_an_endpoint_without_record_is_leaked() {
    let mut node = Node::healthy();
    node.forget_two();
    assert_eq!(
        node.found(),
        [
            "link wh000200000014 (ifindex 102): remove-link wh000200000014 epoch 20",
            "pin endpoints/2: remove-pins 2",
            "endpoint-row 10.0.0.2 (endpoint 2, epoch 20): remove-row 10.0.0.2 epoch 20",
            "endpoint-row fd00::2 (endpoint 2, epoch 20): remove-row fd00::2 epoch 20",
            "call-slot 2: remove-slot 2",
            "route 10.0.0.2/32 (dev ifindex 102): remove-route 10.0.0.2/32",
            "route fd00::2/128 (dev ifindex 102): remove-route fd00::2/128",
        ]
    );
}

#[test]
fn what_is_in_flight_is_not_judged() {
    // Create: kernel objects, but only an intent in the store.
    let mut node = Node::healthy();
    node.forget_two();
    node.in_flight.insert(id(2));
    node.snapshot.intents.push(create_intent(2, 20));
    let owner = LeaseOwner::Attachment { attachment: attachment("c2", "eth0"), epoch: Epoch(20) };
    node.snapshot.leases.push(lease("10.0.0.2", owner));
    assert_eq!(node.audit(), []);
    // Links were dumped before the link existed, routes after.
    node.dump.links.retain(|l| l.ifindex != IfIndex(102));
    assert_eq!(node.audit(), []);

    // Delete: a record without kernel objects.
    let mut node = Node::healthy();
    node.in_flight.insert(id(2));
    node.snapshot.intents.push((id(2), Epoch(20), Intent::Delete { no_ip_release: false }));
    node.dump.links.retain(|l| l.ifindex != IfIndex(102));
    node.dump.pins.retain(|(directory, _)| directory != "2");
    node.dump.endpoint_rows.retain(|r| r.endpoint_id != 2);
    assert_eq!(node.audit(), []);
}

#[test]
fn an_endpoint_that_lacks_something_is_regenerated() {
    let mut node = Node::healthy();
    node.dump.pins.retain(|(directory, _)| directory != "2");
    node.call_slots.retain(|slot| *slot != 2);
    node.dump.endpoint_rows.retain(|r| r.endpoint_id != 2);
    node.dump.routes.retain(|r| r.ifindex != Some(IfIndex(102)));
    assert_eq!(
        node.found(),
        [
            "pin endpoints/2: regenerate 2 datapath",
            "call-slot 2: regenerate 2 policy",
            "endpoint-row 10.0.0.2: regenerate 2 policy",
            "route 10.0.0.2/32: regenerate 2 datapath",
            "endpoint-row fd00::2: regenerate 2 policy",
            "route fd00::2/128: regenerate 2 datapath",
        ]
    );
    assert!(node.audit().iter().all(|f| f.owner.as_deref() == Some("net/c2:eth0 (endpoint 2, epoch 20)")));
}

#[test]
fn a_link_that_is_gone_or_replaced_is_past_repair() {
    let mut node = Node::healthy();
    node.dump.links.retain(|l| l.ifindex != IfIndex(102));
    assert_eq!(node.found(), ["link wh000200000014: no repair"]);

    let mut node = Node::healthy();
    node.dump.links[1].ifindex = IfIndex(555);
    assert_eq!(node.found(), ["link wh000200000014: no repair"]);
}

#[test]
fn each_pin_that_is_missing_is_named() {
    let mut node = Node::healthy();
    node.dump.pins[1].1 = names(&["from_container", "deliver", "CONFIG", "METRICS", "link_to_container", "stranger"]);
    assert_eq!(
        node.found(),
        [
            "pin endpoints/2/stranger: no repair",
            "pin endpoints/2/to_container: regenerate 2 datapath",
            "pin endpoints/2/BANDWIDTH: regenerate 2 datapath",
            "pin endpoints/2/link_from_container: regenerate 2 datapath",
        ]
    );
    node.dump.pins[1].1 = names(&REQUIRED_PINS);
    assert_eq!(node.audit(), []);
}

#[test]
fn a_prepared_set_is_expected_but_only_its_pins() {
    let mut node = Node::healthy();
    node.prepared.insert(id(9));
    node.dump.pins.push(("9".to_owned(), names(&REQUIRED_PINS)));
    assert_eq!(node.audit(), []);
    node.call_slots.push(9);
    assert_eq!(node.found(), ["call-slot 9: remove-slot 9"]);
}

#[test]
fn what_is_not_ours_is_named_and_never_touched() {
    let mut node = Node::healthy();
    node.dump.foreign_pins.push(PathBuf::from("/sys/fs/bpf/wharf/v1/shared/stranger"));
    node.dump.pins.push(("lost+found".to_owned(), vec![]));
    node.dump.pins.push(("99999".to_owned(), vec![]));
    // No ids: the router's pair and links of the same prefix.
    for (n, name) in (900..).zip(["wharf0", "wharf0p", "whatever", "wh000000000001", "whffff00000001"]) {
        node.dump.links.push(LinkRow { name: name.to_owned(), ifindex: IfIndex(n), alias: None });
    }
    assert_eq!(
        node.found(),
        [
            "pin /sys/fs/bpf/wharf/v1/shared/stranger: no repair",
            "pin endpoints/lost+found: no repair",
            "pin endpoints/99999: no repair",
        ]
    );
}

#[test]
fn an_old_epochs_leftovers_do_not_touch_the_endpoint_that_came_after() {
    let mut node = Node::healthy();
    let old = record(2, 19);
    node.dump.links.push(LinkRow { name: old.host_ifname.to_string(), ifindex: IfIndex(77), alias: Some(mark(&old)) });
    node.dump.routes.push(RouteRow { destination: "10.0.0.2/32".parse().unwrap(), ifindex: Some(IfIndex(77)) });
    node.dump.endpoint_rows.retain(|r| r.address != ip("10.0.0.2"));
    node.dump.endpoint_rows.push(EndpointTableRow { ifindex: IfIndex(77), ..row(&old, ip("10.0.0.2")) });
    assert_eq!(
        node.found(),
        [
            "link wh000200000013 (ifindex 77): remove-link wh000200000013 epoch 19",
            "endpoint-row 10.0.0.2 (endpoint 2, epoch 19): remove-row 10.0.0.2 epoch 19",
            "route 10.0.0.2/32 (dev ifindex 77): remove-route 10.0.0.2/32",
            "endpoint-row 10.0.0.2: regenerate 2 policy",
        ]
    );
}

#[test]
fn a_row_that_differs_says_how() {
    let mut node = Node::healthy();
    let row = &mut node.dump.endpoint_rows[0];
    (row.ifindex, row.identity, row.mac) = (IfIndex(5), 1, MacAddr([2; 6]));
    let findings = node.audit();
    assert_eq!(findings.len(), 1);
    assert_eq!(
        findings[0].problem.to_string(),
        "differs from the record: ifindex 5, not 101, identity 1, not 300, MAC 02:02:02:02:02:02, not 02:00:00:00:00:01"
    );
    assert_eq!(findings[0].repair, Some(Repair::Regenerate(id(1), Level::Policy)));
}

#[test]
fn numbers_from_maps_that_are_no_ids_are_leaks_and_nothing_worse() {
    let mut node = Node::healthy();
    let hostile = EndpointTableRow { endpoint_id: u32::MAX, ..row(&record(3, 30), ip("10.0.0.3")) };
    let alias = EndpointTableRow { endpoint_id: 65_536 + 1, ..row(&record(1, 10), ip("10.0.0.4")) };
    node.dump.endpoint_rows.extend([hostile, alias]);
    node.call_slots.extend([0, u32::MAX]);
    assert_eq!(
        node.found(),
        [
            "endpoint-row 10.0.0.3 (endpoint 4294967295, epoch 30): remove-row 10.0.0.3 epoch 30",
            "endpoint-row 10.0.0.4 (endpoint 65537, epoch 10): remove-row 10.0.0.4 epoch 10",
            "call-slot 0: remove-slot 0",
            "call-slot 4294967295: remove-slot 4294967295",
        ]
    );
}

#[test]
fn routes_of_pools_are_expected_exactly() {
    let mut node = Node::healthy();
    node.pool_cidrs.push("10.7.0.0/24".parse().unwrap());
    node.dump.routes.push(RouteRow { destination: "10.8.0.0/24".parse().unwrap(), ifindex: None });
    // It would send the whole pool's traffic to one endpoint.
    node.dump.routes.push(RouteRow { destination: "10.0.0.0/24".parse().unwrap(), ifindex: Some(IfIndex(101)) });
    node.dump.routes.push(RouteRow { destination: "10.0.0.254/32".parse().unwrap(), ifindex: Some(IfIndex(3)) });
    assert_eq!(
        node.found(),
        [
            "route 10.8.0.0/24 (unreachable): remove-route 10.8.0.0/24",
            "route 10.0.0.0/24 (dev ifindex 101): remove-route 10.0.0.0/24",
            "node route 10.7.0.0/24: ensure-node",
        ]
    );
}

#[test]
fn only_an_endpoints_own_address_is_routed_to_it() {
    let mut node = Node::healthy();
    node.add(record(128, 30));
    assert_eq!(node.audit(), []);
    node.dump.routes.push(RouteRow { destination: "10.0.0.128/25".parse().unwrap(), ifindex: Some(IfIndex(228)) });
    node.dump.routes.push(RouteRow { destination: "10.0.0.1/32".parse().unwrap(), ifindex: Some(IfIndex(228)) });
    assert_eq!(
        node.found(),
        [
            "route 10.0.0.128/25 (dev ifindex 228): remove-route 10.0.0.128/25",
            "route 10.0.0.1/32 (dev ifindex 228): remove-route 10.0.0.1/32",
        ]
    );
}

#[test]
fn leases_and_endpoints_answer_for_each_other() {
    let mut node = Node::healthy();
    let of =
        |n: u8, epoch| LeaseOwner::Attachment { attachment: attachment(&format!("c{n}"), "eth0"), epoch: Epoch(epoch) };
    node.snapshot.leases.retain(|l| l.ip != ip("10.0.0.1") && l.ip != ip("10.0.0.2"));
    node.snapshot.leases.extend([
        lease("10.0.0.2", of(2, 19)),
        lease("10.0.0.60", of(1, 10)),
        lease("10.0.0.61", of(6, 60)),
        lease("10.0.0.62", LeaseOwner::Node),
        lease("10.0.0.63", LeaseOwner::Caller { name: "somebody".to_owned() }),
    ]);
    assert_eq!(
        node.found(),
        [
            "lease 10.0.0.2: release 10.0.0.2",
            "lease 10.0.0.60: release 10.0.0.60",
            "lease 10.0.0.61: release 10.0.0.61",
            "lease 10.0.0.62: release 10.0.0.62",
            "lease 10.0.0.1: no repair",
            "lease 10.0.0.2: no repair",
        ]
    );
}

#[test]
fn addresses_that_the_caller_owns_need_a_lease_of_anyone() {
    let mut node = Node::healthy();
    node.snapshot.endpoints[0].ip_owner = IpOwner::Caller;
    for lease in node.snapshot.leases.iter_mut().filter(|l| l.ip == ip("10.0.0.1") || l.ip == ip("fd00::1")) {
        lease.owner = LeaseOwner::Caller { name: "external".to_owned() };
    }
    assert_eq!(node.audit(), []);
    node.snapshot.leases.retain(|l| l.ip != ip("fd00::1"));
    assert_eq!(node.found(), ["lease fd00::1: no repair"]);
    node.pool_cidrs.retain(|c| matches!(c, IpNet::V4(_)));
    node.dump.routes.retain(|r| r.destination != "fd00::/64".parse().unwrap());
    assert_eq!(node.found(), ["lease fd00::2: no repair"], "of the endpoint that holds its own lease");
}

#[test]
fn leases_of_addresses_that_no_pool_has_are_an_operators_matter() {
    let mut node = Node::healthy();
    node.snapshot.leases.push(lease("192.0.2.7", LeaseOwner::Caller { name: "somebody".to_owned() }));
    node.snapshot.leases.push(lease("10.0.0.63", LeaseOwner::Caller { name: "somebody".to_owned() }));
    // A shrunk CIDR's broadcast address.
    node.snapshot.leases.push(lease("10.0.0.255", LeaseOwner::Caller { name: "somebody".to_owned() }));
    node.pool_cidrs.retain(|c| matches!(c, IpNet::V4(_)));
    node.dump.routes.retain(|r| r.destination != "fd00::/64".parse().unwrap());
    let findings = node.audit();
    let lines: Vec<String> = findings
        .iter()
        .map(|f| {
            let (problem, owner) = (&f.problem, f.owner.as_deref().unwrap_or_default());
            assert_eq!((problem.object(), problem.mender(), &f.repair), ("lease", Mender::Operator, &None));
            assert_eq!(problem.verdict(), crate::finding::Verdict::Amiss, "the status counts it");
            format!("{} of {owner}: {problem}\n-> {}", problem.subject(), problem.remedy())
        })
        .collect();
    let words = "leased, but no pool has it today (it was of pool default); its owner keeps it until it is released";
    let of = |n: u8, epoch: u8| {
        format!(
            "fd00::{n} of net/c{n}:eth0 (epoch {epoch}): {words}\n-> recreate the container of endpoint {n}: it gets an \
             address of a pool; or start the agent with a pool that has this address"
        )
    };
    let of_caller = |ip: &str| {
        format!(
            "{ip} of somebody: {words}\n-> when no container has it: `wharf ipam release {ip}`; or start the agent with a \
             pool that has this address"
        )
    };
    assert_eq!(lines, [of(1, 10), of(2, 20), of_caller("192.0.2.7"), of_caller("10.0.0.255")]);
    node.in_flight = BTreeSet::from([id(1), id(2)]);
    assert_eq!(node.found(), ["lease 192.0.2.7: no repair", "lease 10.0.0.255: no repair"]);
}

#[test]
fn two_endpoints_with_one_address_are_named() {
    let mut node = Node::healthy();
    let mut twin = record(3, 30);
    twin.ipv4 = Some([10, 0, 0, 1].into());
    node.add(twin);
    let findings = node.audit();
    let shared = findings.iter().find(|f| f.problem.object() == "endpoint").unwrap();
    assert_eq!((shared.problem.subject(), &shared.repair), ("10.0.0.1".to_owned(), &None));
    assert_eq!(shared.owner.as_deref(), Some("net/c1:eth0 (endpoint 1, epoch 10), net/c3:eth0 (endpoint 3, epoch 30)"));
}

#[test]
fn intents_left_open_are_closed_unless_a_delete_is_to_be_taken_up_again() {
    let mut node = Node::healthy();
    node.snapshot.intents.extend([
        create_intent(7, 70),
        (id(2), Epoch(20), Intent::Delete { no_ip_release: false }),
        (id(2), Epoch(19), Intent::Delete { no_ip_release: true }),
    ]);
    assert_eq!(
        node.found(),
        [
            "intent create of endpoint 7, epoch 70: close-intent 7 epoch 70",
            "intent delete of endpoint 2, epoch 20: no repair",
            "intent delete of endpoint 2, epoch 19: close-intent 2 epoch 19",
        ]
    );
}

#[test]
fn what_a_delete_that_could_not_finish_has_taken_away_is_not_missing() {
    let mut node = Node::healthy();
    node.snapshot.intents.push((id(2), Epoch(20), Intent::Delete { no_ip_release: false }));
    node.dump.links.retain(|l| !l.name.starts_with("wh0002"));
    node.dump.pins.retain(|(directory, _)| directory != "2");
    assert_eq!(node.found(), ["intent delete of endpoint 2, epoch 20: no repair"]);
    node.snapshot.intents = vec![(id(2), Epoch(19), Intent::Delete { no_ip_release: false })];
    let found = node.found();
    assert!(found.iter().any(|f| f.starts_with("link wh0002")), "{found:?}");
}

#[test]
fn an_open_intent_tells_whose_a_leak_was_and_its_whole_epoch() {
    let epoch = 0x7_0000_0021;
    let mut node = Node::healthy();
    let leaked = record(7, epoch);
    node.dump.links.push(LinkRow {
        name: leaked.host_ifname.to_string(),
        ifindex: leaked.host_ifindex,
        alias: Some(mark(&leaked)),
    });
    node.snapshot.intents.push(create_intent(7, epoch));
    let findings = node.audit();
    assert_eq!(findings[0].owner.as_deref(), Some("net/c7:eth0 (epoch 30064771105)"));
    let link = LinkRef {
        id: id(7),
        epoch: Epoch(epoch),
        host_ifname: leaked.host_ifname,
        host_ifindex: Some(leaked.host_ifindex),
        container: None,
        owner: crate::endpoint::LinkOwner::Wharf,
    };
    assert_eq!(findings[0].repair, Some(Repair::RemoveLink(link)));
}

#[test]
fn a_link_or_a_route_that_only_looks_like_ours_is_named_and_left_alone() {
    let mut node = Node::healthy();
    let foreign = |alias: Option<&str>| LinkRow {
        name: "wh00aa000000aa".to_owned(),
        ifindex: IfIndex(200),
        alias: alias.map(str::to_owned),
    };
    for alias in [None, Some("my own thing"), Some("wharf:171:170:net/c/eth0")] {
        node.dump.links.push(foreign(alias));
        assert_eq!(node.found(), ["link wh00aa000000aa (ifindex 200): no repair"], "{alias:?}");
        assert!(node.audit()[0].problem.to_string().ends_with("left alone"), "{:?}", node.audit());
        node.dump.links.pop();
    }
    let far = RouteRow { destination: "203.0.113.0/24".parse().unwrap(), ifindex: Some(IfIndex(1)) };
    node.dump.routes.push(far);
    assert_eq!(node.found(), ["route 203.0.113.0/24 (dev ifindex 1): no repair"]);
    let near = RouteRow { destination: "10.0.0.77/32".parse().unwrap(), ifindex: Some(IfIndex(1)) };
    node.dump.routes.pop();
    node.dump.routes.push(near);
    assert_eq!(node.found(), ["route 10.0.0.77/32 (dev ifindex 1): remove-route 10.0.0.77/32"]);
}

#[test]
fn a_link_that_was_renamed_is_told_by_its_mark() {
    let mut node = Node::healthy();
    let record = record(2, 20);
    node.dump.links.retain(|l| l.ifindex != record.host_ifindex);
    node.dump.links.push(LinkRow {
        name: "renamed0".to_owned(),
        ifindex: record.host_ifindex,
        alias: Some("wharf:2:20:net/c2/eth0".to_owned()),
    });
    let findings = node.audit();
    let name = "wh000200000014".to_owned();
    let renamed = EndpointProblem::LinkRenamed { side: Side::Node, name, found: "renamed0".to_owned() };
    let of_links: Vec<_> = findings.iter().filter(|f| f.problem.object() == "link").collect();
    assert_eq!(of_links, [&AuditFinding::of_endpoint(&record, renamed)]);
    assert_eq!(of_links[0].repair, None);
}

#[test]
fn a_port_is_explained_by_a_record_or_by_the_row_of_a_lost_one() {
    let mut node = Node::healthy();
    let port = |host_port: u16| PublishedPort {
        protocol: Protocol::Tcp,
        host_ip: None,
        host_port: host_port.try_into().unwrap(),
        container_port: 80.try_into().unwrap(),
    };
    node.snapshot.endpoints[0].ports = vec![port(8080)];
    let to = |host_port, address: &str| NatEntry::Port(PortMapping::of(&port(host_port), ip(address)).unwrap());
    node.dump.nat = vec![to(8080, "10.0.0.1"), to(8080, "fd00::1")];
    assert_eq!(node.found(), Vec::<String>::new());
    node.dump.nat = vec![to(8081, "10.0.0.1"), to(8080, "10.0.0.77")];
    let strays =
        ["tcp port 8081 of every IPv4 address to 10.0.0.1:80", "tcp port 8080 of every IPv4 address to 10.0.0.77:80"];
    assert_eq!(node.found(), strays.map(|port| format!("port {port}: remove-nat {port}")));
    node.in_flight.insert(id(1));
    node.dump.nat = vec![to(8081, "10.0.0.1")];
    assert_eq!(node.found(), Vec::<String>::new());
    node.in_flight.clear();
    node.dump.nat = vec![NatEntry::Own(ip("10.0.0.1"))];
    assert_eq!(node.found(), ["own-address 10.0.0.1: remove-nat own address 10.0.0.1"]);
    node.snapshot.endpoints[0].masquerade = Some(false);
    assert_eq!(node.found(), Vec::<String>::new());
    // The ports belong to the row's finding.
    node.dump.nat = vec![to(8082, "10.0.0.2")];
    node.forget_two();
    assert!(node.found().iter().all(|line| !line.starts_with("port")), "{:?}", node.found());
}

#[test]
fn another_plugins_link_has_no_place_in_the_dump_and_no_direct_way() {
    let mut node = Node::healthy();
    let record = &mut node.snapshot.endpoints[0];
    record.link_owner = LinkOwner::Plugin { hooks: HooksFound::None };
    (record.ip_owner, record.ipv4, record.ipv6) = (IpOwner::External, Some([10, 9, 0, 2].into()), None);
    let (record, addresses) = (record.clone(), [ip("10.0.0.1"), ip("fd00::1")]);
    node.dump.links.retain(|l| l.name != record.host_ifname.as_str());
    node.dump.routes.retain(|r| r.ifindex != Some(record.host_ifindex));
    node.dump.endpoint_rows.retain(|r| !addresses.contains(&r.address));
    node.snapshot.leases.retain(|l| !addresses.contains(&l.ip));
    node.dump.endpoint_rows.push(EndpointTableRow { direct: 0, ..row(&record, ip("10.9.0.2")) });
    assert_eq!(node.audit(), []);
    node.dump.endpoint_rows.last_mut().unwrap().direct = 1;
    assert_eq!(node.found(), ["endpoint-row 10.9.0.2: regenerate 1 policy"]);
    node.dump.endpoint_rows.pop();
    assert_eq!(node.found(), ["endpoint-row 10.9.0.2: regenerate 1 policy"]);
}

#[test]
fn an_open_create_on_another_plugins_link_is_closed_with_what_it_attached() {
    let mut node = Node::healthy();
    let left = EndpointRecord { link_owner: LinkOwner::Plugin { hooks: HooksFound::None }, ..record(7, 70) };
    let (id, epoch, mut intent) = create_intent(7, 70);
    if let Intent::Create { link, .. } = &mut intent {
        *link = Some(Box::new(LinkRef::of(&left)));
    }
    node.snapshot.intents.push((id, epoch, intent));
    let repairs: Vec<_> = node.audit().into_iter().filter_map(|f| f.repair).collect();
    assert_eq!(repairs, [Repair::CloseIntent(id, epoch, Some(Box::new(LinkRef::of(&left))))]);
}
