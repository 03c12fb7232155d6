//! The leak audit: mends what two looks in a row have named, and nothing that only an operator can decide.

use std::time::Duration;

use wharf_agent::reconcile::Reconcile;
use wharf_core::{
    ids::Epoch,
    kernel::{EndpointKernel as _, KernelErrorKind as Kind, NodeKernel as _, ProgramSpec},
    plan::DeleteOptions,
    state::State,
    store::{Change, LeaseOwner},
};
use wharf_datapath::fake::Operation as Op;
use wharf_kit::sync::lock;

use crate::support::*;

/// Pins of an endpoint that never was.
async fn leak_pins(agent: &Agent, n: u16) {
    let macs = ["02:00:00:00:00:01", "02:00:00:00:00:02"].map(|m| m.parse().expect("MAC"));
    let spec = ProgramSpec { id: id(n), container_mac: macs[0], host_mac: macs[1], debug: false, keep: false };
    agent.kernel.ensure_programs(&spec).await.expect("loaded");
}

fn left(agent: &Agent) -> Option<u64> {
    lock(&agent.node.audit_findings).map(|left| left.amiss)
}

#[test]
fn what_one_look_names_stays_and_what_two_name_is_mended() {
    Machine::new().life(async |agent| {
        agent.create("c1").await;
        leak_pins(&agent, 77).await;
        let mut reconcile = Reconcile::default();
        reconcile.run(&agent.life, &agent.node.audit_findings).await.expect("audit");
        assert_eq!(agent.kernel.dump().await.expect("dump").pins.len(), 2, "seen once");
        assert_eq!(left(&agent), Some(1));
        reconcile.run(&agent.life, &agent.node.audit_findings).await.expect("audit");
        assert_eq!(agent.kernel.dump().await.expect("dump").pins.len(), 1, "seen twice");
        assert_eq!(left(&agent), Some(0));
        agent.assert_healthy().await;
    });
}

#[test]
fn an_audit_asks_the_kernel_once_about_each_endpoint_and_dumps_it_once() {
    Machine::new().life(async |agent| {
        let mut others = Vec::new();
        for count in [3, 40] {
            while others.len() < count {
                others.push(agent.create(&format!("c{}", others.len())).await);
            }
            agent.kernel.clear_call_log();
            Reconcile::default().run(&agent.life, &agent.node.audit_findings).await.expect("audit");
            let mut called: Vec<_> = agent.kernel.call_log().into_iter().map(|(op, _)| op).collect();
            called.retain(|op| *op != Op::ObserveEndpoint);
            assert_eq!(called, [Op::Dump, Op::CallSlots, Op::ObserveNode, Op::ObserveNetworks]);
            assert_eq!(agent.kernel.call_log().len(), called.len() + count);
        }
    });
}

#[test]
fn what_was_seen_once_and_then_not_is_seen_for_the_first_time_when_it_comes_again() {
    Machine::new().life(async |agent| {
        let mut reconcile = Reconcile::default();
        leak_pins(&agent, 77).await;
        reconcile.run(&agent.life, &agent.node.audit_findings).await.expect("audit");
        agent.kernel.remove_programs(id(77)).await.expect("removed");
        reconcile.run(&agent.life, &agent.node.audit_findings).await.expect("audit");
        leak_pins(&agent, 77).await;
        reconcile.run(&agent.life, &agent.node.audit_findings).await.expect("audit");
        assert!(!agent.kernel.is_clean(), "seen once");
        reconcile.run(&agent.life, &agent.node.audit_findings).await.expect("audit");
        assert!(agent.kernel.is_clean(), "seen twice");
    });
}

#[test]
fn a_lease_of_nobody_is_given_back_and_rests() {
    Machine::new().life(async |agent| {
        agent.create("c1").await;
        let mut lease = agent.snapshot().await.leases[0].clone();
        lease.ip = "10.88.0.99".parse().expect("address");
        lease.owner = LeaseOwner::Attachment { attachment: attachment("gone", "eth0"), epoch: Epoch(1) };
        lease.since_unix_ms = 1;
        lock(&agent.life.network.addresses.ipam).claim(lease.clone()).expect("claimed");
        agent.commit(vec![Change::PutLease(lease.clone())]).await;
        let mut reconcile = Reconcile::default();
        reconcile.run(&agent.life, &agent.node.audit_findings).await.expect("audit");
        assert!(agent.lease_owner(lease.ip).is_some(), "seen once");
        reconcile.run(&agent.life, &agent.node.audit_findings).await.expect("audit");
        assert_eq!(agent.lease_owner(lease.ip), None, "seen twice");
        assert_eq!(agent.resting(), [(lease.ip, None)]);
        agent.assert_healthy().await;
    });
}

#[test]
fn an_endpoint_that_lost_a_part_is_mended_by_the_second_look() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        assert!(agent.kernel.remove_route_behind_the_back(addresses(&handle)[0]));
        let mut reconcile = Reconcile::default();
        reconcile.run(&agent.life, &agent.node.audit_findings).await.expect("audit");
        let record = handle.shared.read(|v| v.record.clone());
        assert_ne!(agent.kernel.observe_endpoint(&record).await.expect("observe"), [], "seen once");
        reconcile.run(&agent.life, &agent.node.audit_findings).await.expect("audit");
        agent.assert_healthy().await;
    });
}

#[test]
fn a_build_that_waits_holds_up_neither_the_audit_nor_the_repair_of_others() {
    Machine::new().life(async |agent| {
        let (waits, other) = (agent.create("c1").await, agent.create("c2").await);
        for handle in [&waits, &other] {
            assert!(agent.kernel.remove_route_behind_the_back(addresses(handle)[0]));
        }
        waits.shared.update(|v| v.fsm.not_before_ms += 3_600_000);
        let asked = agent.clone();
        let audit = tokio::spawn(async move { asked.audit(true).await });
        let regenerated = || other.shared.read(|v| v.status.regenerations) == 2;
        eventually("the other is mended meanwhile", || regenerated() && state(&other) == State::Ready).await;
        let bounded = after(Duration::from_secs(11), tokio::time::timeout(Duration::from_secs(60), audit)).await;
        let report = bounded.expect("the audit ends").expect("task").expect("audit");
        let outcomes: Vec<_> = report.findings.iter().filter_map(|f| f.repair.as_deref()).collect();
        let waiting = "not mended: the build is still waiting for the backoff after a failed build after 10s";
        assert_eq!(outcomes, [waiting, "mended"]);
    });
}

#[test]
fn what_cannot_be_mended_is_counted_and_tried_again() {
    Machine::new().life(async |agent| {
        leak_pins(&agent, 77).await;
        agent.kernel.fail_always(Op::RemovePrograms, Kind::Permission);
        let mut reconcile = Reconcile::default();
        for _ in 0..3 {
            reconcile.run(&agent.life, &agent.node.audit_findings).await.expect("audit");
            assert_eq!(left(&agent), Some(1));
        }
        agent.kernel.mend(Op::RemovePrograms);
        reconcile.run(&agent.life, &agent.node.audit_findings).await.expect("audit");
        assert_eq!(left(&agent), Some(0));
        assert!(agent.kernel.is_clean());
    });
}

#[test]
fn work_that_is_under_way_is_not_judged_however_long_it_takes() {
    Machine::new().life(async |agent| {
        let hold = agent.kernel.hold(Op::EnsureConnected);
        let create = agent.spawn_create(agent.container("c1"));
        hold.reached().await;
        let mut reconcile = Reconcile::default();
        for _ in 0..3 {
            reconcile.run(&agent.life, &agent.node.audit_findings).await.expect("audit");
            assert_eq!(left(&agent), Some(0));
        }
        hold.release();
        create.await.expect("task").expect("created");
        let handle = agent.handle(1);
        let hold = agent.kernel.hold(Op::RemoveLink);
        let delete = agent.spawn_delete(&[&handle], DeleteOptions::default());
        hold.reached().await;
        for _ in 0..3 {
            reconcile.run(&agent.life, &agent.node.audit_findings).await.expect("audit");
            assert_eq!(left(&agent), Some(0));
        }
        hold.release();
        assert_eq!(delete.await.expect("task").errors, []);
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_node_that_lost_its_own_part_is_mended_by_the_second_look() {
    Machine::new().life(async |agent| {
        agent.create("c1").await;
        agent.kernel.remove_node().await.expect("removed");
        let mut reconcile = Reconcile::default();
        reconcile.run(&agent.life, &agent.node.audit_findings).await.expect("audit");
        assert_ne!(left(&agent), Some(0), "seen once");
        reconcile.run(&agent.life, &agent.node.audit_findings).await.expect("audit");
        reconcile.run(&agent.life, &agent.node.audit_findings).await.expect("audit");
        assert_eq!(left(&agent), Some(0));
        agent.assert_healthy().await;
    });
}
