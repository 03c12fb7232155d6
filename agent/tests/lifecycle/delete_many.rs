//! Deletes of several endpoints at once, and those that keep the addresses.

use wharf_agent::{
    endpoint::{
        create::{CreateSpec, External},
        unknown,
    },
    node::aside::Wanted,
};
use wharf_core::{
    ids::Epoch,
    ipam::LeaseRequest,
    kernel::KernelErrorKind as Kind,
    plan::DeleteOptions,
    store::{Change, LeaseOwner, Snapshot},
};
use wharf_datapath::fake::Operation as Op;
use wharf_kit::sync::lock;

use crate::support::*;

const KEEP: DeleteOptions = DeleteOptions { no_ip_release: true };

#[test]
fn a_delete_without_release_leaves_the_lease_to_a_caller_in_one_transaction() {
    let machine = Machine::new();
    let kept = machine.life(async |agent| {
        let handle = agent.create("c1").await;
        let ips = addresses(&handle);
        let hold = agent.kernel.hold(Op::RemoveLink);
        let delete = agent.spawn_delete(&[&handle], KEEP);
        hold.reached().await;
        let before = agent.life.store.stats().commits.load(std::sync::atomic::Ordering::Relaxed);
        hold.release();
        assert_eq!(delete.await.expect("task").errors, []);
        assert_eq!(agent.life.store.stats().commits.load(std::sync::atomic::Ordering::Relaxed), before + 1);
        let owner = LeaseOwner::Caller { name: "kept:c1:eth0".into() };
        for ip in &ips {
            assert_eq!(agent.lease_owner(*ip), Some(owner.clone()));
        }
        let snapshot = agent.snapshot().await;
        assert!(snapshot.leases.iter().all(|l| l.owner == owner && ips.contains(&l.ip)));
        assert_eq!(snapshot, Snapshot { leases: snapshot.leases.clone(), ..Snapshot::default() });
        assert_eq!(snapshot.leases.len(), 2);
        agent.assert_healthy().await;
        snapshot.leases
    });
    machine.life(async |agent| {
        assert_eq!(agent.snapshot().await.leases, kept, "also after a restart");
        let mut spec = agent.container("c1");
        spec.ips = kept.iter().map(|l| l.ip).collect();
        let endpoint = agent.try_create(spec).await.expect("a create of that attachment may ask for them");
        agent.assert_healthy().await;
        agent.delete(&agent.handle(endpoint.id)).await;
        assert_eq!(agent.snapshot().await.leases, [], "they were the endpoint's own again");
    });
}

#[test]
fn a_failed_delete_that_is_repeated_without_release_keeps_the_lease() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        agent.kernel.fail_next(Op::RemoveLink, Kind::Other);
        agent.delete(&handle).await;
        let result = agent.spawn_delete(&[&handle], KEEP).await.expect("task");
        assert_eq!(result.errors, []);
        assert_eq!(agent.snapshot().await.leases.len(), 2);
        agent.assert_healthy().await;
    });
}

#[test]
fn no_address_of_a_batch_is_released_before_the_last_endpoint_is_down() {
    Machine::new().life(async |agent| {
        let first = agent.create("c1").await;
        let other = agent.try_create(Agent::spec("c1", "eth1")).await.expect("created");
        let second = agent.handle(other.id);
        let acknowledge = agent.proxy.answers_late(second.id, "slow");
        let delete = agent.spawn_delete(&[&first, &second], DeleteOptions::default());
        let removed = |id| {
            let wanted = (Op::RemoveLink, format!("endpoint {id}"));
            agent.kernel.call_log().contains(&wanted)
        };
        eventually("the first endpoint's link goes", || removed(first.id)).await;
        let_all_run().await;
        assert!(!removed(second.id));
        assert!(addresses(&first).iter().all(|ip| agent.lease_owner(*ip).is_some()));
        let snapshot = agent.snapshot().await;
        assert_eq!((snapshot.endpoints.len(), snapshot.leases.len(), snapshot.intents.len()), (2, 4, 2));
        assert!(!agent.is_free(first.id));
        acknowledge.send(()).expect("awaited");
        let result = delete.await.expect("task");
        assert_eq!((result.deleted.len(), result.errors), (2, vec![]));
        agent.assert_nothing_left().await;
    });
}

#[test]
fn an_endpoint_of_a_batch_that_stays_does_not_keep_the_others() {
    Machine::new().life(async |agent| {
        let handles = [agent.create("c1").await, agent.create("c2").await, agent.create("c3").await];
        agent.kernel.fail_next(Op::RemoveLink, Kind::Other);
        let result = agent.spawn_delete(&handles.each_ref(), DeleteOptions::default()).await.expect("task");
        assert_eq!((result.deleted.len(), result.errors.len()), (2, 1));
        assert_eq!(agent.life.endpoints.registry.len(), 1);
        let stays = agent.life.endpoints.registry.list()[0].clone();
        assert_eq!(agent.snapshot().await.leases.len(), 2);
        assert!(addresses(&stays).iter().all(|ip| agent.lease_owner(*ip).is_some()));
        agent.delete(&stays).await;
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_batch_costs_two_commits_however_many_endpoints_it_has() {
    Machine::new().life(async |agent| {
        let handles = [agent.create("c1").await, agent.create("c2").await, agent.create("c3").await];
        agent.quiet().await;
        let commits = || agent.life.store.stats().commits.load(std::sync::atomic::Ordering::Relaxed);
        let before = commits();
        agent.spawn_delete(&handles.each_ref(), DeleteOptions::default()).await.expect("task");
        assert_eq!(commits() - before, 2, "the intents, and what goes");
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_delete_of_nothing_writes_nothing() {
    Machine::new().life(async |agent| {
        let commits = || agent.life.store.stats().commits.load(std::sync::atomic::Ordering::Relaxed);
        let before = commits();
        let result = agent.spawn_delete(&[], DeleteOptions::default()).await.expect("task");
        assert_eq!((result.deleted, result.errors), (vec![], vec![]));
        assert_eq!(commits(), before);
    });
}

#[test]
fn the_leases_of_endpoints_that_stay_are_not_touched() {
    Machine::new().life(async |agent| {
        let (goes, stays) = (agent.create("c1").await, agent.create("c2").await);
        agent.delete(&goes).await;
        let held = lock(&agent.life.network.addresses.ipam).owned_by(|o| *o != LeaseOwner::Node);
        assert_eq!(held.into_iter().map(|l| l.ip).collect::<Vec<_>>(), addresses(&stays));
        agent.assert_healthy().await;
    });
}

#[test]
fn a_containers_delete_gives_back_its_own_addresses_alone_and_is_resumed_where_it_stopped() {
    Machine::new().life(async |agent| {
        let own = agent.create("c1").await;
        let lease = agent.lease_to_caller("job 7").await;
        let of_caller = CreateSpec { ips: vec![lease.ip], ..Agent::spec("c1", "eth1") };
        let external = External::Ipam { plugin: "host-local".to_owned(), gateways: Vec::new() };
        let external =
            CreateSpec { ips: vec![[10, 1, 0, 2].into()], external: Some(external), ..Agent::spec("c1", "eth2") };
        let mut handles = vec![own.clone()];
        for spec in [of_caller, external] {
            let made = agent.try_create(spec).await.expect("created");
            handles.push(agent.handle(made.id));
        }
        for round in [1, 2] {
            agent.kernel.fail_next(Op::RemoveLink, Kind::Exhausted);
            let all: Vec<&_> = handles.iter().collect();
            let result = agent.spawn_delete(&all, DeleteOptions::default()).await.expect("task");
            assert_eq!(result.errors.len(), 1, "{round}: {:?}", result.errors);
            handles = agent.life.endpoints.registry.list();
            assert_eq!(handles.len(), 1, "the others are gone");
            assert_eq!(agent.lease_owner(lease.ip), Some(lease.owner.clone()));
        }
        let result = agent.spawn_delete(&[&handles[0]], DeleteOptions::default()).await.expect("task");
        assert_eq!(result.errors, []);
        assert_eq!(agent.snapshot().await.leases, [lease], "the caller's, and none of the other IPAM's");
        let mut rested: Vec<_> = agent.resting().into_iter().map(|(ip, _)| ip).collect();
        rested.sort();
        assert_eq!(rested, addresses(&own));
    });
}

#[test]
fn a_delete_of_an_unknown_container_gives_back_all_that_is_leased_in_its_name() {
    Machine::new().life(async |agent| {
        let stays = agent.create("c1").await;
        for ifname in ["eth0", "eth1"] {
            let owner = LeaseOwner::Attachment { attachment: attachment("gone", ifname), epoch: Epoch(7) };
            lock(&agent.life.network.addresses.ipam).lease(&LeaseRequest::default(), owner, 0).expect("leased");
        }
        let left = lock(&agent.life.network.addresses.ipam).of_container(&attachment("gone", "eth0").container_id);
        agent.commit(left.into_iter().map(Change::PutLease).collect()).await;
        let container_id = attachment("gone", "eth0").container_id;
        let wanted = |container_id| Wanted { network: None, container_id, ifname: None };
        let result = unknown::remove(&agent.life, &wanted(container_id.clone())).await;
        assert_eq!((result.leases_released.len(), result.errors), (4, vec![]));
        let again = unknown::remove(&agent.life, &wanted(container_id)).await;
        assert_eq!(again, wharf_api::DeleteResult::default());
        let owners = agent.snapshot().await.leases;
        assert_eq!(owners.iter().map(|l| l.ip).collect::<Vec<_>>(), addresses(&stays), "of an endpoint that is there");
    });
}
