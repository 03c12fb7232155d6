use wharf_names::mark::Mark;

use super::*;
use crate::store::Rest;

fn rest(address: &str) -> Rest {
    Rest {
        ip: ip(address),
        pool: PoolName::parse("default").unwrap(),
        last_owner: "net/c9:eth0 (epoch 90)".to_owned(),
        since_unix_ms: 0,
    }
}

fn out_of_service(n: u16, addresses: &[&str]) -> OutOfService {
    OutOfService {
        id: id(n),
        record: "{\"hostile".to_owned(),
        addresses: addresses.iter().map(|a| ip(a)).collect(),
        why: "its delete failed at 3 starts".to_owned(),
        since_unix_ms: 0,
    }
}

fn alias(record: &EndpointRecord) -> Option<String> {
    let a = &record.attachment;
    let mark =
        Mark::new(record.id.get(), record.epoch.0, a.network.as_str(), a.container_id.as_str(), a.ifname.as_str());
    Some(mark.to_string())
}

#[test]
fn the_mark_on_a_link_tells_whose_everything_was() {
    let epoch = 0x7_0000_0021;
    let mut node = Node::healthy();
    node.add(record(7, epoch));
    node.dump.links[2].alias = alias(&record(7, epoch));
    node.snapshot.endpoints.retain(|r| r.id != id(7));
    node.snapshot.leases.retain(|l| l.ip != ip("10.0.0.7") && l.ip != ip("fd00::7"));
    let findings = node.audit();
    let objects: Vec<&str> = findings.iter().map(|f| f.problem.object()).collect();
    assert_eq!(objects, ["link", "pin", "endpoint-row", "endpoint-row", "call-slot", "route", "route"]);
    for finding in &findings {
        assert_eq!(finding.owner.as_deref(), Some("net/c7:eth0 (epoch 30064771105)"), "{finding:?}");
    }
    let Some(Repair::RemoveLink(link)) = &findings[0].repair else { panic!("{:?}", findings[0]) };
    assert_eq!(link.epoch, Epoch(epoch));
}

#[test]
fn a_mark_that_says_other_than_the_name_says_nothing() {
    for alias in [alias(&record(8, 70)), alias(&record(7, 71)), Some("uplink".to_owned()), None] {
        let mut node = Node::healthy();
        let leaked = record(7, 70);
        node.dump.links.push(LinkRow {
            name: leaked.host_ifname.to_string(),
            ifindex: leaked.host_ifindex,
            alias: alias.clone(),
        });
        let findings = node.audit();
        assert_eq!(findings.len(), 1, "{findings:?}");
        assert_eq!(findings[0].owner, None, "{alias:?}");
    }
}

#[test]
fn of_two_links_of_one_id_neither_answers_for_the_ids_pins() {
    let mut node = Node::healthy();
    for epoch in [70, 71] {
        let leaked = record(7, epoch);
        node.dump.links.push(LinkRow {
            name: leaked.host_ifname.to_string(),
            ifindex: IfIndex(700 + u32::try_from(epoch).unwrap()),
            alias: alias(&leaked),
        });
    }
    node.dump.pins.push(("7".to_owned(), names(&REQUIRED_PINS)));
    let owners: Vec<Option<String>> = node.audit().into_iter().map(|f| f.owner).collect();
    let of = |epoch| Some(format!("net/c7:eth0 (epoch {epoch})"));
    assert_eq!(owners, [of(70), of(71), None]);
}

#[test]
fn a_record_out_of_service_is_named_once() {
    let mut node = Node::healthy();
    node.snapshot.endpoints.retain(|r| r.id != id(2));
    node.snapshot.out_of_service.push(out_of_service(2, &["10.0.0.2", "fd00::2"]));
    node.snapshot.intents.push(create_intent(2, 20));
    assert_eq!(node.found(), ["record 2: release-out-of-service 2"]);
    let finding = &node.audit()[0];
    assert_eq!(
        finding.problem.to_string(),
        "out of service: its delete failed at 3 starts; its id and addresses (10.0.0.2, fd00::2) stay reserved until its \
         container is deleted"
    );
    assert_eq!(finding.owner.as_deref(), Some("net/c2:eth0 (epoch 20)"));
    node.in_flight.insert(id(2));
    assert_eq!(node.audit(), []);
}

#[test]
fn a_record_out_of_service_excuses_nothing_but_its_own() {
    let mut node = Node::healthy();
    node.snapshot.out_of_service.push(out_of_service(5, &[]));
    node.forget_two();
    let of_three = LeaseOwner::Attachment { attachment: attachment("c3", "eth0"), epoch: Epoch(30) };
    node.snapshot.leases.push(lease("10.0.0.3", of_three));
    let found = node.found();
    assert!(found.contains(&"link wh000200000014 (ifindex 102): remove-link wh000200000014 epoch 20".to_owned()));
    assert!(found.contains(&"lease 10.0.0.3: release 10.0.0.3".to_owned()), "{found:?}");
    assert!(found.contains(&"record 5: release-out-of-service 5".to_owned()), "{found:?}");
}

#[test]
fn a_record_that_cannot_be_read_is_named_once_and_explains_what_is_there() {
    let mut node = Node::healthy();
    node.snapshot.endpoints.retain(|r| r.id != id(2));
    let unreadable = |key| (key, "{".to_owned(), "EOF while parsing".to_owned());
    node.snapshot.unreadable.extend([unreadable(2), unreadable(0)]);
    assert_eq!(node.found(), ["record 2: release-out-of-service 2", "record 0: no repair"]);
    let findings = node.audit();
    assert!(findings[0].problem.to_string().starts_with("cannot be read: EOF while parsing"), "{:?}", findings[0]);
    assert_eq!(findings[0].owner.as_deref(), Some("net/c2:eth0 (epoch 20)"));
    assert_eq!(findings[1].owner, None);
}

#[test]
fn what_rests_is_a_pools_and_nobodys_lease() {
    let mut node = Node::healthy();
    node.snapshot.resting.extend([rest("10.0.0.77"), rest("10.0.0.1"), rest("192.0.2.1")]);
    assert_eq!(node.found(), ["rest 10.0.0.1: forget-rest 10.0.0.1", "rest 192.0.2.1: forget-rest 192.0.2.1"]);
    let findings = node.audit();
    assert_eq!(findings[0].problem.to_string(), "rests, and is leased to net/c1:eth0 (epoch 10); the lease counts");
    assert_eq!(findings[1].problem.to_string(), "rests, but no pool has it today (it was of pool default)");
    assert!(findings.iter().all(|f| f.owner.as_deref() == Some("net/c9:eth0 (epoch 90)")));
}

#[test]
fn an_endpoint_whose_address_rests_has_no_lease() {
    let mut node = Node::healthy();
    node.snapshot.leases.retain(|l| l.ip != ip("10.0.0.2"));
    node.snapshot.resting.push(rest("10.0.0.2"));
    assert_eq!(node.found(), ["lease 10.0.0.2: no repair"]);
}

#[test]
fn deletes_that_nobody_took_up_are_named_and_so_is_what_is_no_delete() {
    let mut node = Node::healthy();
    let file = |name: &str, age_ms, problem: Option<&str>| QueueFile {
        name: name.to_owned(),
        age_ms,
        owner: problem.is_none().then(|| "net/c5:eth0".to_owned()),
        problem: problem.map(str::to_owned),
    };
    node.queue = vec![
        file("young", 60_000, None),
        file("old", 60_001, None),
        file("torn", 0, Some("EOF while parsing a value")),
    ];
    assert_eq!(node.found(), ["queue-file old: drain-queue", "queue-file torn: remove-file torn"]);
    let findings = node.audit();
    assert_eq!(findings[0].owner.as_deref(), Some("net/c5:eth0"));
    assert_eq!(findings[0].problem.to_string(), "a delete that waits for 60 s and was not taken up");
    assert_eq!(findings[1].problem.to_string(), "of no use: EOF while parsing a value");
}

#[test]
fn the_nodes_own_part_is_mended_by_making_it_again_and_a_route_is_named_once() {
    let mut node = Node::healthy();
    node.dump.routes.retain(|r| r.ifindex.is_some());
    let cidr = "10.0.0.0/24".parse().unwrap();
    node.node =
        vec![NodeProblem::LinkMissing { name: "wharf0".to_owned() }, NodeProblem::PoolRoute { cidr, found: None }];
    assert_eq!(
        node.found(),
        ["node link wharf0: ensure-node", "node route 10.0.0.0/24: ensure-node", "node route fd00::/64: ensure-node",]
    );
    assert!(node.audit().iter().all(|f| f.owner.as_deref() == Some("node")));
}
