//! Restart: records against what the kernel has.

use wharf_core::{
    endpoint::{EndpointRecord, host_ifname},
    identity::Identity,
    ids::{EndpointId, Epoch},
    kernel::KernelErrorKind as Kind,
    plan::DeleteOptions,
    state::State,
    store::{Change, Intent, LeaseOwner},
};
use wharf_datapath::fake::Operation as Op;

use crate::support::*;

fn record_of(agent: &Agent, id: u16) -> EndpointRecord {
    agent.handle(id).shared.read(|v| v.record.clone())
}

#[test]
fn endpoints_come_back_as_they_were_and_are_rebuilt_by_update() {
    let machine = Machine::new();
    let before: Vec<_> = machine.life(async |agent| {
        for name in ["c1", "c2", "c3"] {
            agent.create(name).await;
        }
        (1..=3).map(|n| record_of(&agent, n)).collect()
    });
    machine.life(async |agent| {
        agent.assert_healthy().await;
        for record in before {
            let handle = agent.handle(record.id.get());
            assert_eq!(state(&handle), State::Ready);
            assert_eq!(handle.epoch, record.epoch);
            assert!(addresses(&handle).iter().all(|ip| agent.lease_owner(*ip).is_some()));
            assert_eq!(handle.shared.read(|v| v.record.clone()), record);
        }
        let operations = agent.operations();
        assert_eq!(operations.iter().filter(|o| **o == Op::EnsurePrograms).count(), 3);
        let torn = [Op::RemoveAttached, Op::RemoveReachable, Op::RemovePrograms, Op::RemoveLink, Op::EnsureLink];
        assert!(operations.iter().all(|o| !torn.contains(o)), "{operations:?}");
        assert_eq!(agent.identities.list()[0].references, 3);
    });
}

#[test]
fn a_restored_endpoint_keeps_others_from_its_id_its_addresses_and_its_attachment() {
    let machine = Machine::new().with_cidrs(&["10.88.0.0/29", "fd88::/64"]);
    machine.life(async |agent| {
        agent.create("c1").await;
        agent.create("c2").await;
        agent.delete(&agent.handle(1)).await;
    });
    machine.life(async |agent| {
        let old = record_of(&agent, 2);
        agent.try_create(Agent::spec("c2", "eth0")).await.expect_err("there already");
        for n in 10..14 {
            let new = agent.create(&format!("c{n}")).await;
            assert_ne!(new.id, old.id);
            assert!(addresses(&new).iter().all(|ip| !old.addresses().any(|a| a == *ip)));
        }
        agent.try_create(agent.container("c20")).await.expect_err("all five IPv4 addresses are given out");
        agent.assert_healthy().await;
    });
}

#[test]
fn an_endpoint_whose_link_is_gone_is_deleted_and_its_lease_given_back() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.create("c1").await;
        agent.create("c2").await;
    });
    machine.kernel.remove_netns(&netns_path("c1"));
    machine.life(async |agent| {
        agent.assert_healthy().await;
        let left: Vec<_> = agent.life.endpoints.registry.list().iter().map(|h| h.id.get()).collect();
        assert_eq!(left, [2]);
        assert_eq!(agent.snapshot().await.leases.len(), 2);
        agent.delete(&agent.handle(2)).await;
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_link_of_another_index_under_the_same_name_is_not_the_endpoints() {
    let machine = Machine::new();
    let record = machine.life(async |agent| {
        agent.create("c1").await;
        record_of(&agent, 1)
    });
    assert!(machine.kernel.remove_link_behind_the_back(record.host_ifname.as_str()));
    machine.life(async |agent| {
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_delete_that_failed_is_finished_by_the_next_agent() {
    for op in [Op::RemoveReachable, Op::RemovePrograms, Op::RemoveLink] {
        let machine = Machine::new();
        machine.life(async |agent| {
            let handle = agent.create("c1").await;
            agent.kernel.fail_next(op, Kind::Other);
            assert!(agent.delete(&handle).await.deleted.is_empty());
        });
        machine.life(async |agent| agent.assert_nothing_left().await);
    }
}

#[test]
fn a_dead_endpoint_on_a_callers_address_leaves_the_lease_to_the_caller() {
    let machine = Machine::new();
    let lease = machine.life(async |agent| {
        let lease = agent.lease_to_caller("job 7").await;
        let mut spec = agent.container("c1");
        spec.ips = vec![lease.ip];
        agent.try_create(spec).await.expect("created");
        lease
    });
    machine.kernel.remove_netns(&netns_path("c1"));
    machine.life(async |agent| {
        agent.assert_healthy().await;
        assert!(agent.life.endpoints.registry.is_empty());
        assert_eq!(agent.lease_owner(lease.ip), Some(lease.owner.clone()));
        assert_eq!(agent.snapshot().await.leases, [lease]);
    });
}

#[test]
fn a_create_that_cannot_be_undone_at_start_keeps_its_intent_for_the_next_start() {
    let machine = Machine::new();
    let hold = machine.kernel.hold(Op::EnsureReachable);
    machine.life(async |agent| {
        let _create = agent.spawn_create(agent.container("c1"));
        hold.reached().await;
    });
    hold.release();
    machine.kernel.fail_always(Op::RemoveLink, Kind::Exhausted);
    machine.life(async |agent| {
        let intents = agent.snapshot().await.intents;
        assert!(matches!(intents[..], [(_, _, Intent::Create { .. })]), "its link is still there: {intents:?}");
        let findings = agent.findings(false).await;
        let link = findings.iter().find(|f| f.object == "link").expect("the link is found");
        assert!(link.owner.as_ref().is_some_and(|o| o.starts_with("net/c1:eth0")), "and whose it was: {link:?}");
    });
    machine.kernel.mend(Op::RemoveLink);
    machine.life(async |agent| agent.assert_nothing_left().await);
}

#[test]
fn a_lease_without_an_endpoint_is_released() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.create("c1").await;
        let snapshot = agent.snapshot().await;
        let mut lease = snapshot.leases[0].clone();
        lease.ip = "10.88.0.99".parse().expect("address");
        lease.owner = LeaseOwner::Attachment { attachment: attachment("gone", "eth0"), epoch: Epoch(1) };
        agent.commit(vec![Change::PutLease(lease)]).await;
    });
    machine.life(async |agent| {
        assert_eq!(agent.lease_owner("10.88.0.99".parse().expect("address")), None);
        assert_eq!(agent.snapshot().await.leases.len(), 2);
        agent.assert_healthy().await;
    });
}

#[test]
fn of_two_records_with_one_attachment_the_agent_keeps_the_first_and_serves() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.create("c1").await;
        let mut twin = record_of(&agent, 1);
        (twin.id, twin.epoch) = (id(9), Epoch(9));
        twin.host_ifname = host_ifname(id(9), Epoch(9));
        (twin.ipv4, twin.ipv6) = (Some([10, 88, 0, 200].into()), None);
        agent.commit(vec![Change::PutEndpoint(Box::new(twin))]).await;
    });
    machine.life(async |agent| {
        let ids: Vec<EndpointId> = agent.life.endpoints.registry.list().iter().map(|h| h.id).collect();
        assert_eq!(ids, [id(1)]);
        agent.create("c2").await;
        agent.delete(&agent.handle(1)).await;
        // The other is not silently forgotten either.
        assert!(
            agent.findings(false).await.iter().any(|f| f.subject.contains("endpoints/9")),
            "{:?}",
            agent.findings(false).await
        );
    });
}

#[test]
fn an_identity_that_stands_for_other_labels_is_resolved_anew() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.create("c1").await;
        let mut spec = agent.container("c2");
        spec.labels = ["k8s:app=db".parse().expect("label")].into();
        agent.try_create(spec).await.expect("created");
        let mut second = record_of(&agent, 2);
        second.identity = record_of(&agent, 1).identity;
        agent.commit(vec![Change::PutEndpoint(Box::new(second))]).await;
    });
    machine.life(async |agent| {
        agent.assert_healthy().await;
        let identities: Vec<Identity> = [1, 2].map(|n| record_of(&agent, n).identity).into();
        assert_ne!(identities[0], identities[1]);
        assert_eq!(agent.identities.list().len(), 2);
        for n in [1, 2] {
            agent.delete(&agent.handle(n)).await;
        }
        agent.assert_nothing_left().await;
    });
}

#[test]
fn an_endpoint_of_a_pool_that_was_taken_away_lives_on() {
    let mut machine = Machine::new();
    machine.life(async |agent| {
        agent.create("c1").await;
    });
    machine = machine.with_cidrs(&["10.99.0.0/24", "fd99::/64"]);
    machine.life(async |agent| {
        agent.quiet().await;
        assert_eq!(state(&agent.handle(1)), State::Ready);
        let new = agent.create("c2").await;
        assert!(addresses(&new)[0].to_string().starts_with("10.99."));
        agent.delete(&agent.handle(1)).await;
        agent.delete(&new).await;
        agent.quiet().await;
        assert_eq!(agent.snapshot().await.endpoints, []);
        assert!(agent.kernel.is_clean());
    });
}

#[test]
fn what_the_kernel_has_and_no_record_explains_is_removed() {
    let machine = Machine::new();
    machine.life(async |agent| {
        let handle = agent.create("c1").await;
        let record = record_of(&agent, 1);
        agent
            .commit(
                vec![Change::RemoveEndpoint(handle.id, handle.epoch)]
                    .into_iter()
                    .chain(record.addresses().map(Change::RemoveLease))
                    .collect(),
            )
            .await;
    });
    machine.life(async |agent| agent.assert_nothing_left().await);
}

#[test]
fn an_agent_that_cannot_repair_everything_serves_all_the_same() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.create("c1").await;
        agent.create("c2").await;
    });
    machine.kernel.remove_netns(&netns_path("c1"));
    machine.kernel.fail_always(Op::RemoveReachable, Kind::Other);
    machine.life(async |agent| {
        assert_eq!(state(&agent.handle(1)), State::Disconnecting, "shown, not forgotten");
        agent.kernel.mend(Op::RemoveReachable);
        agent.create("c3").await;
        let result = agent.spawn_delete(&[&agent.handle(1)], DeleteOptions::default()).await.expect("task");
        assert_eq!(result.errors, []);
        agent.assert_healthy().await;
        assert_eq!(agent.life.kernel.dump().await.expect("dump").links.len(), 2);
    });
}
