//! What endpoints have in the node's table, published ports and addresses that are not masqueraded: one endpoint has
//! each port, all go with their endpoint, and the audit compares them with records.

use wharf_agent::{endpoint::create::CreateSpec, reconcile::Reconcile};
use wharf_api::ErrorCode;
use wharf_core::{
    kernel::{KernelErrorKind as Kind, NatKernel as _},
    nat::{Masquerade, NatEntry, PortMapping, Protocol, PublishedPort},
    plan::DeleteOptions,
};
use wharf_datapath::fake::Operation as Op;

use crate::support::*;

fn machine() -> Machine {
    let mut machine = Machine::new();
    machine.config.masquerade = Some(Masquerade::default());
    machine
}

fn port(host_port: u16) -> PublishedPort {
    PublishedPort {
        protocol: Protocol::Tcp,
        host_ip: None,
        host_port: host_port.try_into().expect("port"),
        container_port: 80.try_into().expect("port"),
    }
}

fn asks(agent: &Agent, name: &str, ports: &[PublishedPort]) -> CreateSpec {
    CreateSpec { ports: ports.to_vec(), ..agent.container(name) }
}

async fn with_table(agent: &Agent) {
    agent.kernel.ensure_nat(&agent.life.network.spec()).await.expect("table");
}

#[test]
fn ports_come_and_go_with_their_endpoint_and_outlive_the_agent() {
    let machine = machine();
    machine.life(async |agent| {
        with_table(&agent).await;
        let made = agent.try_create(asks(&agent, "c1", &[port(8080), port(8081)])).await.expect("created");
        assert_eq!(made.ports.iter().map(ToString::to_string).collect::<Vec<_>>(), ["8080/tcp", "8081/tcp"]);
        assert_eq!(agent.kernel.nat().len(), 4, "both families");
        agent.assert_healthy().await;
    });
    machine.life(async |agent| {
        assert_eq!(agent.kernel.nat().len(), 4);
        agent.assert_healthy().await;
        let refused = agent.try_create(asks(&agent, "c2", &[port(8081)])).await.expect_err("taken");
        assert_eq!(refused.code, ErrorCode::Exists);
        assert!(refused.message.contains("8081/tcp") && refused.message.contains("c1"), "{}", refused.message);
        agent.del(&attachment("c1", "eth0"), DeleteOptions::default()).await;
        assert_eq!(agent.kernel.nat().len(), 0);
        agent.try_create(asks(&agent, "c2", &[port(8081)])).await.expect("free");
    });
}

#[test]
fn of_two_creates_for_one_port_at_once_one_wins() {
    machine().life(async |agent| {
        with_table(&agent).await;
        let [a, b] = ["a", "b"].map(|name| agent.try_create(asks(&agent, name, &[port(8080)])));
        let (a, b) = tokio::join!(a, b);
        assert!(a.is_ok() != b.is_ok(), "{a:?} {b:?}");
        let refused = a.err().or(b.err()).expect("one is refused");
        assert_eq!(refused.code, ErrorCode::Exists);
        assert_eq!(agent.kernel.nat().len(), 2);
        agent.assert_healthy().await;
    });
}

#[test]
fn a_refused_or_failed_create_leaves_no_port() {
    machine().life(async |agent| {
        with_table(&agent).await;
        agent.kernel.hold_port(8082);
        let refused = agent.try_create(asks(&agent, "c1", &[port(8082)])).await.expect_err("held");
        assert_eq!(refused.code, ErrorCode::Exists, "{}", refused.message);
        let six = PublishedPort { host_ip: Some([192, 0, 2, 1].into()), ..port(8080) };
        agent.kernel.fail_next_after_effect(Op::EnsureReachable, Kind::Other);
        agent.try_create(asks(&agent, "c2", &[six])).await.expect_err("asked for");
        assert_eq!(agent.kernel.nat().len(), 0);
        agent.assert_healthy().await;
    });
    Machine::new().with_cidrs(&["10.88.0.0/24"]).life(async |agent| {
        let off = agent.try_create(asks(&agent, "c1", &[port(8080)])).await.expect_err("off");
        assert_eq!(off.code, ErrorCode::Unsupported);
        assert!(off.hint.is_some_and(|hint| hint.contains("--masquerade on")));
    });
    machine().with_cidrs(&["10.88.0.0/24"]).life(async |agent| {
        with_table(&agent).await;
        let six = PublishedPort { host_ip: Some("2001:db8::1".parse().expect("address")), ..port(8080) };
        let refused = agent.try_create(asks(&agent, "c1", &[six])).await.expect_err("no IPv6");
        assert_eq!(refused.code, ErrorCode::InvalidRequest);
        assert!(refused.message.contains("no IPv6 address"), "{}", refused.message);
        assert!(agent.life.endpoints.registry.is_empty());
    });
}

#[test]
fn a_stray_port_and_a_missing_one_are_mended_when_they_were_seen_twice() {
    machine().life(async |agent| {
        with_table(&agent).await;
        let made = agent.try_create(asks(&agent, "c1", &[port(8080)])).await.expect("created");
        let stray = NatEntry::Port(PortMapping::of(&port(9090), [10, 88, 0, 99].into()).expect("one family"));
        let own = NatEntry::Port(PortMapping::of(&port(8080), made.ipv4.expect("address").into()).expect("one family"));
        agent.kernel.add_nat_behind_the_back(stray);
        assert!(agent.kernel.remove_nat_behind_the_back(&own));
        let mut reconcile = Reconcile::default();
        for (mended, when) in [(false, "seen once"), (true, "seen twice")] {
            reconcile.run(&agent.life, &agent.node.audit_findings).await.expect("audit");
            let ports = agent.kernel.nat();
            assert_eq!((ports.contains(&own), !ports.contains(&stray)), (mended, mended), "{when}");
        }
        agent.assert_healthy().await;
    });
}

#[test]
fn a_container_that_is_not_masqueraded_is_in_the_table_while_it_lives_and_in_its_record() {
    let machine = machine();
    machine.life(async |agent| {
        with_table(&agent).await;
        let spec = CreateSpec { masquerade: Some(false), ..agent.container("c1") };
        let made = agent.try_create(spec).await.expect("created");
        assert_eq!(made.masquerade, Some(false));
        let (v4, v6) = (made.ipv4.expect("IPv4").into(), made.ipv6.expect("IPv6").into());
        let own = [NatEntry::Own(v4), NatEntry::Own(v6)];
        assert_eq!(agent.kernel.nat(), own.into());
        // Taken out, and put in for nobody, by somebody else: both are mended.
        let stray = NatEntry::Own([10, 88, 0, 99].into());
        agent.kernel.add_nat_behind_the_back(stray);
        assert!(agent.kernel.remove_nat_behind_the_back(&own[0]));
        let mut reconcile = Reconcile::default();
        for _ in 0..2 {
            reconcile.run(&agent.life, &agent.node.audit_findings).await.expect("audit");
        }
        assert_eq!(agent.kernel.nat(), own.into());
    });
    machine.life(async |agent| {
        assert_eq!(agent.kernel.nat().len(), 2, "after a restart");
        agent.assert_healthy().await;
        agent.del(&attachment("c1", "eth0"), DeleteOptions::default()).await;
        assert_eq!(agent.kernel.nat().len(), 0);
    });
}

#[test]
fn masquerading_that_is_asked_for_where_there_is_none_is_refused() {
    let wants = |agent: &Agent| CreateSpec { masquerade: Some(true), ..agent.container("c1") };
    Machine::new().life(async |agent| {
        let off = agent.try_create(wants(&agent)).await.expect_err("off");
        assert_eq!(off.code, ErrorCode::Unsupported);
        assert!(off.hint.is_some_and(|hint| hint.contains("--masquerade on")));
        assert!(agent.life.endpoints.registry.is_empty());
        let own = CreateSpec { masquerade: Some(false), ..agent.container("c2") };
        agent.try_create(own).await.expect("it keeps its address anyway");
    });
    machine().life(async |agent| {
        let off = agent.try_create(wants(&agent)).await.expect_err("the pool is not masqueraded");
        assert_eq!(off.code, ErrorCode::InvalidRequest);
        assert!(off.message.contains("pool default") && off.hint.is_some_and(|hint| hint.contains("masquerade = ")));
        assert!(agent.life.endpoints.registry.is_empty());
    });
    let mut machine = machine();
    let pools = machine.config.pools[0].cidrs.clone();
    machine.config.masquerade = Some(Masquerade { pools, ..Masquerade::default() });
    machine.life(async |agent| {
        let made = agent.try_create(wants(&agent)).await.expect("created");
        assert_eq!(made.masquerade, Some(true));
    });
}
