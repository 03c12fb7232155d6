//! Creates that succeed, and those that are refused before they begin.

use std::{net::IpAddr, path::Path, time::Duration};

use tokio::time::Instant;
use wharf_agent::endpoint::{create::CreateSpec, prepared};
use wharf_api::ErrorCode;
use wharf_core::{
    endpoint::IpOwner,
    kernel::KernelErrorKind,
    plan::DeleteOptions,
    state::State,
    store::{Intent, LeaseOwner},
};
use wharf_datapath::fake::Operation as Op;
use wharf_kit::sync::lock;

use crate::support::*;

#[test]
fn an_endpoint_is_policed_before_it_is_connected_and_reachable_last() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        let expected = [
            // Of each address: the node does not have it.
            Op::ObserveNetworksOf,
            Op::EnsurePrograms,
            Op::EnsureLink,
            Op::EnsureConfig,
            Op::EnsureAttached,
            Op::EnsureConnected,
            Op::EnsureReachable,
        ];
        assert_eq!(agent.operations(), expected);
        assert_eq!(state(&handle), State::Ready);
        agent.assert_healthy().await;
    });
}

#[test]
fn the_intent_is_durable_before_the_first_side_effect_and_record_with_leases_after_the_last() {
    Machine::new().life(async |agent| {
        let first = agent.kernel.hold(Op::EnsurePrograms);
        let last = agent.kernel.hold(Op::EnsureReachable);
        let create = agent.spawn_create(agent.container("c1"));
        first.reached().await;
        let begun = agent.snapshot().await;
        assert!(matches!(begun.intents[..], [(n, _, Intent::Create { .. })] if n == id(1)), "{begun:?}");
        first.release();
        last.reached().await;
        let snapshot = agent.snapshot().await;
        assert_eq!(snapshot, begun, "nothing else is durable before all of it is done");
        last.release();
        let endpoint = create.await.expect("task").expect("created");
        let snapshot = agent.snapshot().await;
        assert_eq!((snapshot.endpoints.len(), snapshot.leases.len(), snapshot.intents.len()), (1, 2, 0));
        assert_eq!(snapshot.endpoints[0], agent.handle(endpoint.id).shared.read(|v| v.record.clone()));
    });
}

#[test]
fn a_create_takes_programs_verified_ahead_of_need() {
    let mut machine = Machine::new();
    machine.config.prepared_programs = 2;
    machine.life(async |agent| {
        prepared::refill(&agent.life).await.expect("refilled");
        assert_eq!(agent.life.endpoints.prepared.fill(), (2, 2));
        let ids = agent.life.endpoints.prepared.ids();
        agent.kernel.clear_call_log();
        let handle = agent.create("c1").await;
        assert!(ids.contains(&handle.id));
        assert_eq!(agent.kernel.calls(Op::EnsurePrograms), 0);
        assert_eq!(agent.life.endpoints.prepared.fill(), (1, 2));
        agent.assert_healthy().await;
    });
}

#[test]
fn a_create_loads_its_own_programs_when_none_are_ready_or_a_mac_is_asked_for() {
    let mut machine = Machine::new();
    machine.config.prepared_programs = 1;
    machine.life(async |agent| {
        prepared::refill(&agent.life).await.expect("refilled");
        agent.kernel.clear_call_log();
        let mut spec = agent.container("c1");
        spec.mac = Some("02:11:22:33:44:55".parse().expect("MAC"));
        let endpoint = agent.try_create(spec).await.expect("created");
        assert_eq!(endpoint.container_mac, "02:11:22:33:44:55");
        assert_eq!((agent.kernel.calls(Op::EnsurePrograms), agent.life.endpoints.prepared.fill().0), (1, 1));
        agent.create("c2").await;
        agent.create("c3").await;
        assert_eq!((agent.kernel.calls(Op::EnsurePrograms), agent.life.endpoints.prepared.fill().0), (2, 0));
        agent.assert_healthy().await;
    });
}

#[test]
fn a_refused_create_gives_a_prepared_set_back() {
    let mut machine = Machine::new();
    machine.config.prepared_programs = 1;
    machine.life(async |agent| {
        prepared::refill(&agent.life).await.expect("refilled");
        let mut spec = agent.container("c1");
        spec.labels = ["reserved:nobody".parse().expect("label")].into();
        agent.try_create(spec).await.expect_err("no such reserved label");
        assert_eq!(agent.life.endpoints.prepared.fill(), (1, 1));
        agent.assert_healthy().await;
    });
}

#[test]
fn a_failed_create_unpins_the_prepared_set_it_took() {
    let mut machine = Machine::new();
    machine.config.prepared_programs = 1;
    machine.life(async |agent| {
        prepared::refill(&agent.life).await.expect("refilled");
        agent.kernel.fail_next(Op::EnsureLink, KernelErrorKind::Other);
        agent.try_create(agent.container("c1")).await.expect_err("asked for");
        assert_eq!(agent.life.endpoints.prepared.fill(), (0, 1));
        agent.assert_nothing_left().await;
    });
}

#[test]
fn of_two_creates_of_one_attachment_at_once_one_wins() {
    Machine::new().life(async |agent| {
        let hold = agent.kernel.hold(Op::ObserveNetns);
        let spec = agent.container("c1");
        let both = [agent.spawn_create(spec.clone()), agent.spawn_create(spec)];
        eventually("both have begun", || agent.kernel.calls(Op::ObserveNetns) == 2).await;
        hold.release();
        let [one, other] = both;
        let results = [one.await.expect("task"), other.await.expect("task")];
        let codes: Vec<_> = results.iter().filter_map(|r| r.as_ref().err().map(|e| e.code)).collect();
        assert_eq!(codes, [ErrorCode::Busy], "the other may fail yet, so that is for a retry to tell");
        assert_eq!(agent.life.endpoints.registry.len(), 1);
        agent.assert_healthy().await;
        agent.delete(&agent.life.endpoints.registry.list()[0]).await;
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_second_create_of_an_attachment_is_refused_and_another_interface_is_not() {
    Machine::new().life(async |agent| {
        let first = agent.create("c1").await;
        let error = agent.try_create(Agent::spec("c1", "eth0")).await.expect_err("there already");
        assert_eq!(error.code, ErrorCode::Exists);
        assert!(error.message.contains(&format!("endpoint {}", first.id)), "{}", error.message);
        agent.try_create(Agent::spec("c1", "eth1")).await.expect("another interface");
        agent.assert_healthy().await;
    });
}

#[test]
fn an_interface_that_is_not_ours_is_left_alone() {
    Machine::new().life(async |agent| {
        let spec = agent.container("c1");
        assert!(agent.kernel.add_foreign_interface(&spec.netns, "eth0"));
        let error = agent.try_create(spec.clone()).await.expect_err("taken");
        assert_eq!(error.code, ErrorCode::Exists);
        agent.assert_nothing_left().await;
        let again = agent.try_create(spec).await.expect_err("it is still there");
        assert_eq!(again.code, ErrorCode::Exists);
    });
}

#[test]
fn a_path_that_is_no_namespace_is_refused_without_side_effects() {
    Machine::new().life(async |agent| {
        agent.kernel.add_plain_file("/run/netns/file");
        for path in ["/run/netns/gone", "/run/netns/file"] {
            let mut spec = Agent::spec("c1", "eth0");
            spec.netns = Path::new(path).to_owned();
            let error = agent.try_create(spec).await.expect_err(path);
            assert_eq!(error.code, ErrorCode::InvalidNetns);
            assert!(error.message.contains(path), "{}", error.message);
        }
        assert_eq!(agent.operations(), []);
        agent.assert_nothing_left().await;
    });
}

#[test]
fn too_many_creates_at_once_are_told_when_to_come_again() {
    Machine::new().life(async |agent| {
        let hold = agent.kernel.hold(Op::EnsureLink);
        let (mut waiting, mut refused) = (Vec::new(), None);
        // No create ends, so the wait that is predicted grows with each, until it is longer than any is let wait.
        while refused.is_none() {
            let mut create = agent.spawn_create(agent.container(&format!("c{}", waiting.len())));
            let n = waiting.len() as u64 + 1;
            let places = || {
                let s = agent.life.endpoints.admission.gate.status();
                s.waiting + s.running
            };
            eventually("it has a place or an answer", || places() == n || create.is_finished()).await;
            if create.is_finished() {
                refused = Some((&mut create).await.expect("task").expect_err("refused"));
            } else {
                waiting.push(create);
            }
        }
        let error = refused.expect("one was refused");
        assert!(waiting.len() > 8, "what has room is never refused: {}", waiting.len());
        assert!(waiting.len() <= 1_024 + 8, "memory is bounded: {}", waiting.len());
        assert_eq!(error.code, ErrorCode::Overloaded);
        assert!(error.retry_after_ms.is_some_and(|ms| ms > 0));
        for create in waiting {
            create.abort();
        }
        hold.release();
        agent.assert_nothing_left().await;
        agent.create("late").await;
    });
}

#[test]
fn a_node_without_a_free_id_says_so_and_serves_again_when_one_is_free() {
    Machine::new().life(async |agent| {
        let mut last = None;
        while let Some(taken) = agent.life.endpoints.registry.take_id() {
            last = Some(taken);
        }
        let error = agent.try_create(agent.container("c1")).await.expect_err("no id");
        assert_eq!(error.code, ErrorCode::LimitReached);
        let free = last.expect("ids were free");
        agent.life.endpoints.registry.free_id(free);
        assert_eq!(agent.create("c1").await.id, free);
        agent.assert_healthy().await;
    });
}

#[test]
fn an_exhausted_family_rolls_the_other_back() {
    // Two IPv4 addresses, of which the router has one.
    Machine::new().with_cidrs(&["10.88.0.0/30", "fd88::/64"]).life(async |agent| {
        let first = agent.create("c1").await;
        let error = agent.try_create(agent.container("c2")).await.expect_err("no IPv4 address");
        assert_eq!(error.code, ErrorCode::PoolExhausted);
        let held = lock(&agent.life.network.addresses.ipam).owned_by(|o| *o != LeaseOwner::Node);
        assert_eq!(held.len(), 2, "only the first endpoint's: {held:?}");
        agent.delete(&first).await;
        agent.create("c3").await;
        agent.assert_healthy().await;
    });
}

#[test]
fn an_address_asked_for_is_given_or_refused_naming_its_holder() {
    Machine::new().life(async |agent| {
        let ip: IpAddr = "10.88.0.77".parse().expect("address");
        let mut spec = agent.container("c1");
        spec.ips = vec![ip];
        let endpoint = agent.try_create(spec).await.expect("created");
        assert_eq!(endpoint.ipv4.map(IpAddr::V4), Some(ip));
        let mut spec = agent.container("c2");
        spec.ips = vec![ip];
        let error = agent.try_create(spec).await.expect_err("taken");
        assert_eq!(error.code, ErrorCode::Exists);
        assert!(error.message.contains("net/c1:eth0"), "{}", error.message);
        agent.assert_healthy().await;
    });
}

#[test]
fn a_callers_address_survives_a_failed_create_and_a_delete() {
    Machine::new().life(async |agent| {
        let lease = agent.lease_to_caller("job 7").await;
        let mut spec = agent.container("c1");
        spec.ips = vec![lease.ip];
        agent.kernel.fail_next(Op::EnsureReachable, KernelErrorKind::Other);
        agent.try_create(spec.clone()).await.expect_err("asked for");
        assert_eq!(agent.lease_owner(lease.ip), Some(lease.owner.clone()), "after a failed create");
        let endpoint = agent.try_create(spec).await.expect("created");
        let handle = agent.handle(endpoint.id);
        let (owner, gateway6) = handle.shared.read(|v| (v.record.ip_owner, v.record.gateway6));
        assert_eq!(owner, IpOwner::Caller);
        assert_eq!((endpoint.ipv6, gateway6), (None, None), "no gateway of a family it does not speak");
        agent.assert_healthy().await;
        assert_eq!(agent.delete(&handle).await.errors, []);
        assert_eq!(agent.lease_owner(lease.ip), Some(lease.owner.clone()), "after the delete");
        assert_eq!(agent.snapshot().await.leases, [lease]);
    });
}

#[test]
fn a_callers_address_serves_one_endpoint_at_a_time() {
    Machine::new().life(async |agent| {
        let lease = agent.lease_to_caller("job 7").await;
        let specs = ["c1", "c2"].map(|name| {
            let mut spec = agent.container(name);
            spec.ips = vec![lease.ip];
            spec
        });
        let [first, second] = specs;
        agent.try_create(first).await.expect("created");
        let error = agent.try_create(second).await.expect_err("in use");
        assert_eq!(error.code, ErrorCode::Exists);
        agent.assert_healthy().await;
    });
}

#[test]
fn an_address_of_the_callers_beside_one_that_is_not_is_refused() {
    Machine::new().life(async |agent| {
        let lease = agent.lease_to_caller("job 7").await;
        let mut spec = agent.container("c1");
        spec.ips = vec![lease.ip, "fd88::77".parse().expect("address")];
        let error = agent.try_create(spec).await.expect_err("mixed");
        assert_eq!(error.code, ErrorCode::InvalidRequest);
        assert_eq!(agent.operations(), []);
    });
}

#[test]
fn a_create_that_waits_for_its_turn_beyond_its_deadline_is_answered_and_leaves_nothing() {
    Machine::new().life(async |agent| {
        let hold = agent.kernel.hold(Op::EnsureLink);
        let running: Vec<_> = (0..8).map(|n| agent.spawn_create(agent.container(&format!("c{n}")))).collect();
        eventually("all turns are taken", || agent.kernel.calls(Op::EnsureLink) == 8).await;
        let mut spec = agent.container("late");
        spec.deadline = Instant::now() + Duration::from_millis(30);
        let error = agent.try_create(spec).await.expect_err("its turn does not come");
        assert_eq!(error.code, ErrorCode::DeadlineExceeded);
        assert_eq!(agent.kernel.calls(Op::EnsureLink), 8);
        hold.release();
        for create in running {
            create.await.expect("task").expect("created");
        }
        agent.assert_healthy().await;
        assert_eq!(agent.life.endpoints.registry.len(), 8);
        assert_eq!(agent.life.kernel.dump().await.expect("dump").pins.len(), 8);
    });
}

#[test]
fn addresses_that_a_delete_kept_go_back_to_their_attachment_and_to_nobody_else() {
    Machine::new().life(async |agent| {
        let first = agent.create("c1").await;
        let kept = addresses(&first);
        let options = DeleteOptions { no_ip_release: true };
        assert_eq!(agent.spawn_delete(&[&first], options).await.expect("task").errors, []);
        let owner = LeaseOwner::kept_for(&attachment("c1", "eth0"));
        let held = |agent: &Agent| kept.iter().all(|ip| agent.lease_owner(*ip) == Some(owner.clone()));
        assert!(held(&agent));

        let asks = |name: &str| CreateSpec { ips: vec![kept[0]], ..agent.container(name) };
        let refused = agent.try_create(asks("c2")).await.expect_err("it is kept for another");
        assert_eq!(refused.code, ErrorCode::Exists, "{refused:?}");
        for part in ["kept it for c1:eth0", &format!("`wharf ipam release {}`", kept[0])] {
            assert!(refused.message.contains(part), "{part}: {}", refused.message);
        }

        // A create that fails leaves the address kept.
        let before = agent.snapshot().await.leases;
        agent.kernel.fail_next(Op::EnsureConnected, KernelErrorKind::Other);
        agent.try_create(asks("c1")).await.expect_err("as asked");
        agent.quiet().await;
        assert!(held(&agent));
        assert_eq!(agent.snapshot().await.leases, before);

        let endpoint = agent.try_create(asks("c1")).await.expect("it is this one's");
        let handle = agent.handle(endpoint.id);
        let now = addresses(&handle);
        assert_eq!((now.len(), now[0]), (2, kept[0]), "and the other family as usual");
        agent.assert_healthy().await;
        assert_eq!(agent.delete(&handle).await.errors, []);
        assert_eq!(agent.lease_owner(kept[0]), None, "the endpoint's own, and given back with it");
        assert_eq!(agent.lease_owner(kept[1]), Some(owner), "not asked for");
    });
}
