#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::{Side::*, *};
use crate::{
    fixtures::id,
    ids::{IfIndex, MacAddr, PoolName},
    kernel::AttachMode,
    nat::{NatEntry, PortMapping, Protocol},
    overlap::{NodeNetwork, Overlap, Way},
};

fn name() -> String {
    "eth0".to_owned()
}

fn port() -> PortMapping {
    PortMapping {
        protocol: Protocol::Tcp,
        host_ip: None,
        host_port: 8080.try_into().unwrap(),
        container: [10, 0, 0, 2].into(),
        container_port: 80.try_into().unwrap(),
    }
}

fn mtu(side: Side, found: u32) -> EndpointProblem {
    EndpointProblem::LinkMtu { side, name: name(), expected: 1500, found }
}

fn route(found: Option<RouteSeen>) -> EndpointProblem {
    EndpointProblem::NodeRoute { to: "10.0.0.2/32".parse().unwrap(), expected: "wh1".to_owned(), found }
}

fn shadowed(found: Option<Lookup>) -> EndpointProblem {
    EndpointProblem::NodeRouteShadowed { to: "10.0.0.2/32".parse().unwrap(), expected: "wh1".to_owned(), found }
}

/// Every kind of endpoint problem.
fn all() -> Vec<EndpointProblem> {
    use EndpointProblem as P;
    let (program, pin) = (|| "from_container".to_owned(), || "link_from_container".to_owned());
    let both = |problem: &dyn Fn(Side) -> P| [problem(Node), problem(Container)];
    let mut all = vec![P::Netns { path: "/run/netns/c1".to_owned(), cause: "not a network namespace".to_owned() }];
    all.extend(both(&|side| P::LinkMissing { side, name: name() }));
    all.push(P::LinkDeleted { name: name() });
    all.extend(both(&|side| P::LinkRenamed { side, name: name(), found: "up0".to_owned() }));
    all.extend(both(&|side| P::LinkReplaced { side, name: name(), expected: IfIndex(4), found: IfIndex(5) }));
    all.extend(both(&|side| P::LinkDown { side, name: name() }));
    all.extend(both(&|side| P::LinkMac { side, name: name(), expected: MacAddr([2; 6]), found: None }));
    all.extend([mtu(Node, 1400), mtu(Container, 1400), mtu(Container, 9000)]);
    all.extend([
        P::LinkArp { side: Node, name: name() },
        P::LinkArp { side: Container, name: name() },
        P::LinkEnslaved { name: name(), master: "br0".to_owned() },
        P::PluginLink { side: Node, name: name(), what: "expected up, is down".to_owned() },
        P::PluginLink { side: Container, name: name(), what: "expected up, is down".to_owned() },
        P::LinkQueue { name: name(), kind: "tbf".to_owned() },
        P::LinkAlias { name: name(), expected: "wharf:1:1:net/c/eth0".to_owned(), found: None },
        P::Address { address: [10, 0, 0, 2].into(), found: None },
        P::Address { address: [10, 0, 0, 2].into(), found: Some(24) },
        route(None),
        route(Some(RouteSeen::Ours(None))),
        route(Some(RouteSeen::Foreign(Some("up0".to_owned())))),
        route(Some(RouteSeen::OtherSource { expected: "10.0.0.1".parse().unwrap(), found: None })),
        shadowed(None),
        shadowed(Some(Lookup {
            destination: "0.0.0.0/0".parse().unwrap(),
            table: 77,
            ifname: Some("up0".to_owned()),
            gateway: Some([192, 0, 2, 7].into()),
        })),
        P::ContainerRoute { to: "0.0.0.0/0".parse().unwrap(), gateway: [10, 0, 0, 1].into(), table: None },
        P::ContainerRoute { to: "0.0.0.0/0".parse().unwrap(), gateway: [10, 0, 0, 1].into(), table: Some(7) },
        P::ContainerRule { from: [10, 0, 0, 2].into(), table: 7 },
        P::Program { program: program(), ifname: name(), mode: AttachMode::Clsact, expected: 7, found: vec![] },
        P::Program { program: program(), ifname: name(), mode: AttachMode::Tcx, expected: 7, found: vec![8] },
        P::Sink { program: program(), id: 7 },
        P::StrayFilter { program: program(), id: 7 },
        P::StrayLink { path: "/sys/fs/bpf/x".to_owned() },
        P::PinMissing { name: pin() },
        P::PinsMissing,
        P::PinStale { name: pin(), expected: 7, found: 8 },
        P::MapUnused { map: "CONFIG".to_owned(), pinned: 7, used: vec![8] },
        P::MapUnreadable { map: "CONFIG".to_owned(), cause: "it has another layout".to_owned() },
        P::Config { field: "epoch", expected: "1".to_owned(), found: "2".to_owned() },
        P::Row { address: [10, 0, 0, 2].into(), found: None },
        P::Row { address: [10, 0, 0, 2].into(), found: Some("ifindex 5, not 4".to_owned()) },
        P::CallSlot { expected: Some(7), found: None },
        P::CallSlot { expected: Some(7), found: Some(8) },
        P::Nat { entry: NatEntry::Port(port()) },
        P::Nat { entry: NatEntry::Own([10, 0, 0, 2].into()) },
    ]);
    all
}

/// Shows every change of a problem's name, mender or remedy.
#[test]
fn every_problem_of_an_endpoint_has_a_mender_and_a_remedy() {
    let line = |problem| line(&Problem::Endpoint(id(7), problem));
    insta::assert_snapshot!(all().into_iter().map(line).collect::<String>());
}

fn line(problem: &Problem) -> String {
    let (object, subject) = (problem.object(), problem.subject());
    format!("{object} {subject}: {problem}\n  {:?}\n  -> {}\n", problem.mender(), problem.remedy())
}

#[test]
fn an_overlap_names_both_sides_and_is_an_operators_matter() {
    let overlap = Overlap {
        pool: PoolName::parse("default").unwrap(),
        cidr: "10.87.0.0/16".parse().unwrap(),
        network: NodeNetwork {
            net: "10.87.9.0/24".parse().unwrap(),
            way: Way::OnLink { by_kernel: true, point_to_point: false },
            ifname: Some("lan0".to_owned()),
        },
    };
    assert_eq!(
        line(&Problem::Node(NodeProblem::PoolOverlap(overlap))),
        "node pool 10.87.0.0/16: overlaps the node's route 10.87.9.0/24 dev lan0: addresses that both have are given to no \
         container\n  Operator\n  -> remove the node's route 10.87.9.0/24 dev lan0, or start the agent with another range \
         for pool default (--ipv4-pool, --ipv6-pool or `cidrs` of the pool)\n"
    );
}

#[test]
fn a_link_of_which_both_sides_are_missed_is_one_problem() {
    let missing = |side| EndpointProblem::LinkMissing { side, name: name() };
    let pin = EndpointProblem::PinsMissing;
    let deleted = EndpointProblem::LinkDeleted { name: name() };
    assert_eq!(joined(vec![missing(Node), route(None), pin.clone(), missing(Container)]), [deleted, pin]);
    for side in [Node, Container] {
        assert_eq!(joined(vec![missing(side)]), [missing(side)]);
    }
}

#[test]
fn what_is_on_the_node_is_never_called_the_containers_own_doing() {
    for problem in all() {
        let text = format!("{problem:?}");
        let is_own = matches!(problem.mender(), Mender::Container { .. } | Mender::Nobody);
        assert!(!(is_own && text.contains("side: Node")), "{text}");
        assert!(!(problem.is_of_bpf() && is_own), "{text}: containers have no hand in programs and maps");
    }
}

#[test]
fn the_worst_finding_is_the_verdict_and_a_notice_is_none() {
    let of = |problems: &[EndpointProblem]| {
        let problems: Vec<_> = problems.iter().map(|p| Problem::Endpoint(id(7), p.clone())).collect();
        verdict(&problems)
    };
    assert_eq!(of(&[]), Verdict::Well);
    assert_eq!(of(&[mtu(Container, 1400)]), Verdict::Well);
    assert_eq!(of(&[mtu(Container, 9000), mtu(Container, 1400)]), Verdict::ContainersOwn);
    assert_eq!(of(&[mtu(Container, 9000), mtu(Node, 1400)]), Verdict::Amiss);
}

#[test]
fn two_looks_at_one_thing_are_about_the_same_whatever_they_found() {
    let problem = |found| Problem::Endpoint(id(7), route(found));
    assert!(problem(None).is_about_the_same(&problem(Some(RouteSeen::Ours(None)))));
    let other = Problem::Endpoint(id(7), EndpointProblem::LinkArp { side: Node, name: name() });
    assert!(!problem(None).is_about_the_same(&other));
}
