//! Deletes of one endpoint: order, the proxy, failures.

use std::time::Duration;

use wharf_agent::endpoint::resume;
use wharf_core::{
    kernel::{CounterRow, KernelErrorKind as Kind},
    plan::{DeleteOptions, DeleteStep},
    state::State,
    store::Intent,
};
use wharf_datapath::fake::{Hold, Operation as Op};
use wharf_kit::sync::lock;

use crate::support::*;

/// The kernel's part of a delete, in order, and whether the endpoint can go without it.
const STEPS: [(Op, DeleteStep, bool); 5] = [
    (Op::RemoveAttached, DeleteStep::Detach, true),
    (Op::RemoveReachable, DeleteStep::RemoveReachable, false),
    (Op::RemovePrograms, DeleteStep::Unpin, false),
    (Op::RemoveLink, DeleteStep::RemoveLink, false),
    (Op::ReleaseLink, DeleteStep::AwaitKernel, false),
];

#[test]
fn the_kernels_part_goes_in_order() {
    Machine::new().life(async |agent| {
        let mut neighbours = Vec::new();
        // The same five calls, and no dump among them, however many others there are.
        for others in [0, 30] {
            while neighbours.len() < others {
                neighbours.push(agent.create(&format!("other-{}", neighbours.len())).await);
            }
            let handle = agent.create("c1").await;
            agent.kernel.clear_call_log();
            let result = agent.delete(&handle).await;
            assert_eq!((result.deleted, result.errors), (vec![handle.id.get()], vec![]));
            let called: Vec<_> = agent.kernel.call_log().into_iter().map(|(op, _)| op).collect();
            assert_eq!(called, STEPS.map(|(op, ..)| op), "beside {others}");
            assert_eq!(agent.proxy.asked().last(), Some(&(handle.id, handle.epoch)));
            assert_eq!(state(&handle), State::Disconnected);
        }
        for handle in neighbours {
            assert_eq!(agent.delete(&handle).await.errors, []);
        }
        agent.assert_nothing_left().await;
    });
}

#[test]
fn intent_first_and_addresses_record_and_id_last() {
    for (op, ..) in STEPS {
        Machine::new().life(async |agent| {
            let handle = agent.create("c1").await;
            let ip = addresses(&handle)[0];
            let hold = agent.kernel.hold(op);
            let delete = agent.spawn_delete(&[&handle], DeleteOptions::default());
            hold.reached().await;
            assert_eq!(state(&handle), State::Disconnecting);
            let snapshot = agent.snapshot().await;
            assert_eq!(snapshot.intents, [(handle.id, handle.epoch, Intent::Delete { no_ip_release: false })]);
            assert_eq!((snapshot.endpoints.len(), snapshot.leases.len()), (1, 2));
            assert!(agent.lease_owner(ip).is_some());
            assert!(!agent.is_free(handle.id));
            hold.release();
            assert_eq!(delete.await.expect("task").errors, []);
            agent.assert_nothing_left().await;
        });
    }
}

#[test]
fn record_leases_and_intent_go_in_one_transaction_before_the_addresses_are_free() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        let hold = agent.kernel.hold(Op::RemoveLink);
        let delete = agent.spawn_delete(&[&handle], DeleteOptions::default());
        hold.reached().await;
        let before = agent.life.store.stats().commits.load(std::sync::atomic::Ordering::Relaxed);
        agent.disk.hold();
        hold.release();
        agent.disk.reached().await;
        let_all_run().await;
        assert!(!agent.is_free(handle.id));
        assert!(agent.lease_owner(addresses(&handle)[0]).is_some(), "not free before it is durable");
        agent.disk.mend();
        delete.await.expect("task");
        assert_eq!(agent.life.store.stats().commits.load(std::sync::atomic::Ordering::Relaxed), before + 1);
        agent.assert_nothing_left().await;
    });
}

#[test]
fn the_delete_waits_for_a_late_proxy_before_it_unpins_or_frees_anything() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        agent.proxy.answers(handle.id, "quick");
        let acknowledge = agent.proxy.answers_late(handle.id, "slow");
        agent.kernel.clear_call_log();
        let delete = agent.spawn_delete(&[&handle], DeleteOptions::default());
        let pending = &agent.life.policy.proxy.pending;
        eventually("one completion is awaited", || pending.load(std::sync::atomic::Ordering::Relaxed) == 1).await;
        let_all_run().await;
        assert_eq!(agent.operations(), [Op::RemoveAttached, Op::RemoveReachable], "unreachable, and nothing more");
        assert!(agent.lease_owner(addresses(&handle)[0]).is_some());
        let status = handle.shared.read(|v| v.status.clone());
        assert_eq!(status.phase, "await-proxy");
        acknowledge.send(()).expect("awaited");
        let result = delete.await.expect("task");
        assert_eq!((result.deleted.len(), result.errors), (1, vec![]));
        assert_eq!(agent.life.policy.proxy.timed_out.load(std::sync::atomic::Ordering::Relaxed), 0);
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_proxy_that_never_answers_is_recorded_counted_and_passed() {
    let mut machine = Machine::new();
    machine.config.proxy_timeout = Duration::from_millis(20);
    machine.life(async |agent| {
        let handle = agent.create("c1").await;
        agent.proxy.never_answers(handle.id, "stuck");
        agent.proxy.answers(handle.id, "quick");
        let result = agent.delete(&handle).await;
        assert_eq!(result.deleted, [handle.id.get()]);
        assert_eq!(result.errors, [], "nothing is left for another delete");
        assert!(log_of(&handle).iter().any(|l| l.starts_with("await-proxy: no answer")), "{:?}", log_of(&handle));
        let completions = &agent.life.policy.proxy;
        assert_eq!(
            completions.timed_out.load(std::sync::atomic::Ordering::Relaxed),
            1,
            "the one that answered is not counted"
        );
        assert_eq!(completions.pending.load(std::sync::atomic::Ordering::Relaxed), 0);
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_proxy_that_refuses_is_recorded_and_passed() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        agent.proxy.refuses(handle.id, "web", "no such listener");
        let result = agent.delete(&handle).await;
        assert_eq!(result.deleted, [handle.id.get()]);
        assert_eq!(result.errors, []);
        let told = |line: &String| line.starts_with("await-proxy: ") && line.contains("redirect web: no such listener");
        assert!(log_of(&handle).iter().any(told), "{:?}", log_of(&handle));
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_failed_step_is_recorded_the_rest_runs_and_the_next_delete_finishes() {
    for (op, step, can_go) in STEPS {
        for after_effect in [false, true] {
            Machine::new().life(async |agent| {
                let handle = agent.create("c1").await;
                agent.kernel.clear_call_log();
                if after_effect {
                    agent.kernel.fail_next_after_effect(op, Kind::Other);
                } else {
                    agent.kernel.fail_next(op, Kind::Other);
                }
                let result = agent.delete(&handle).await;
                let release = (can_go || op == Op::ReleaseLink).then_some(Op::ReleaseLink);
                let all: Vec<_> = STEPS[..4].iter().map(|(op, ..)| *op).chain(release).collect();
                assert_eq!(agent.operations(), all, "none stops the rest");
                let steps: Vec<_> = result.errors.iter().map(|e| e.step.as_str()).collect();
                assert_eq!(steps, [step.name()]);
                assert_eq!(result.errors[0].endpoint, "net/c1:eth0");
                if can_go {
                    assert_eq!(result.deleted, [handle.id.get()]);
                } else {
                    assert!(result.deleted.is_empty(), "{result:?}");
                    assert_eq!(state(&handle), State::Disconnecting);
                    assert!(!agent.is_free(handle.id));
                    let snapshot = agent.snapshot().await;
                    assert_eq!(
                        (snapshot.endpoints.len(), snapshot.leases.len(), snapshot.intents.len()),
                        (1, 2, 1),
                        "record, addresses and intent stay while something may be left"
                    );
                    assert!(addresses(&handle).iter().all(|ip| agent.lease_owner(*ip).is_some()));
                    let again = agent.delete(&handle).await;
                    assert_eq!((again.deleted, again.errors), (vec![handle.id.get()], vec![]));
                }
                agent.assert_nothing_left().await;
            });
        }
    }
}

#[test]
fn a_delete_that_nobody_asks_for_again_is_resumed_as_it_was_asked_for() {
    for no_ip_release in [false, true] {
        Machine::new().life(async |agent| {
            let handle = agent.create("c1").await;
            let ips = addresses(&handle);
            agent.kernel.fail_next(Op::RemoveLink, Kind::Other);
            let delete = agent.spawn_delete(&[&handle], DeleteOptions { no_ip_release });
            assert!(!delete.await.expect("task").errors.is_empty());
            assert_eq!(state(&handle), State::Disconnecting);

            agent.kernel.fail_next(Op::RemoveLink, Kind::Other);
            let refused = resume::resume(&agent.life).await.expect_err("it fails once more");
            assert!(refused.to_string().contains("net/c1:eth0: remove-link"), "{refused}");

            let living = agent.create("c2").await;
            assert_eq!(resume::resume(&agent.life).await, Ok(()));
            assert_eq!(state(&handle), State::Disconnected);
            assert_eq!(state(&living), State::Ready, "what is not being deleted is left alone");
            let held = ips.iter().filter(|ip| agent.lease_owner(**ip).is_some()).count();
            assert_eq!(held, if no_ip_release { ips.len() } else { 0 });
            assert_eq!(agent.delete(&living).await.errors, []);
        });
    }
}

#[test]
fn a_delete_that_runs_is_not_resumed_beside_itself() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        let hold = agent.kernel.hold(Op::RemoveLink);
        let delete = agent.spawn_delete(&[&handle], DeleteOptions::default());
        hold.reached().await;
        agent.kernel.clear_call_log();
        assert_eq!(resume::resume(&agent.life).await, Ok(()));
        assert_eq!(agent.operations(), [], "it is left to who works on it");
        hold.release();
        assert_eq!(delete.await.expect("task").errors, []);
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_step_that_hangs_is_given_up_at_its_deadline_and_no_other_runs_beside_it() {
    // Without a removed link there is no release to wait for.
    let steps = &STEPS[..4];
    for (n, (op, step, _)) in steps.iter().copied().enumerate() {
        Machine::new().life(async |agent| {
            let handle = agent.create("c1").await;
            let hold = agent.kernel.hold(op);
            let delete = agent.spawn_delete(&[&handle], DeleteOptions::default());
            hold.reached().await;
            agent.kernel.clear_call_log();
            let result = after(Duration::from_millis(step.deadline_ms() + 1), delete).await.expect("task");
            let failed: Vec<_> = result.errors.iter().map(|e| e.step.as_str()).collect();
            assert_eq!(failed, steps[n..].iter().map(|(_, step, _)| step.name()).collect::<Vec<_>>());
            assert!(result.errors[0].message.contains("no answer within"), "{:?}", result.errors);
            let names_it = format!("it waits for {}", step.name());
            assert!(result.errors[1..].iter().all(|e| e.message.contains(&names_it)), "{:?}", result.errors);
            assert_eq!((result.deleted, agent.operations()), (vec![], vec![]), "nothing runs beside it");
            assert!(agent.lease_owner(addresses(&handle)[0]).is_some());
            // It goes on, and nobody is told of it as if it had ended.
            assert_eq!(resume::resume(&agent.life).await, Ok(()), "it is left alone while it runs");
            assert_eq!(agent.operations(), []);
            hold.release();
            agent.quiet().await;
            assert_eq!(resume::resume(&agent.life).await, Ok(()));
            agent.assert_nothing_left().await;
        });
    }
}

#[test]
fn a_delete_whose_every_step_hangs_is_answered_while_the_shim_still_waits() {
    let mut machine = Machine::new();
    machine.config.proxy_timeout = Duration::from_millis(DeleteStep::AwaitProxy.deadline_ms());
    machine.life(async |agent| {
        let handle = agent.create("c1").await;
        agent.proxy.never_answers(handle.id, "stuck");
        let holds = STEPS.map(|(op, ..)| agent.kernel.hold(op));
        let delete = agent.spawn_delete(&[&handle], DeleteOptions::default());
        holds[0].reached().await;
        // Nothing but deadlines is waited for from here on: the clock goes from one to the next.
        tokio::time::pause();
        let since = tokio::time::Instant::now();
        let result = delete.await.expect("task");
        let took = since.elapsed();
        tokio::time::resume();
        let steps: Vec<_> = result.errors.iter().map(|e| e.step.as_str()).collect();
        assert_eq!(steps, ["detach", "remove-reachable", "unpin", "remove-link"]);
        assert!(took < wharf_handover::DELETE_ANSWER, "{took:?}");
        holds.into_iter().for_each(Hold::release);
        agent.delete(&handle).await;
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_full_disk_keeps_the_record_and_the_next_delete_finishes() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        agent.disk.fill();
        let result = agent.delete(&handle).await;
        let steps: Vec<_> = result.errors.iter().map(|e| e.step.as_str()).collect();
        assert_eq!(steps, ["write-intent", "remove-record"]);
        assert!(result.deleted.is_empty(), "{result:?}");
        assert!(agent.lease_owner(addresses(&handle)[0]).is_some(), "not free before it is durable");
        agent.disk.mend();
        agent.kernel.clear_call_log();
        let again = agent.delete(&handle).await;
        assert_eq!((again.deleted, again.errors), (vec![handle.id.get()], vec![]));
        assert_eq!(agent.operations(), [], "the kernel's part was done");
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_client_that_goes_away_does_not_stop_the_delete() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        let hold = agent.kernel.hold(Op::RemovePrograms);
        let delete = agent.spawn_delete(&[&handle], DeleteOptions::default());
        hold.reached().await;
        delete.abort();
        assert!(delete.await.expect_err("gone").is_cancelled());
        hold.release();
        agent.assert_nothing_left().await;
    });
}

#[test]
fn the_last_counters_stay_in_the_nodes_totals() {
    Machine::new().life(async |agent| {
        for (name, packets) in [("c1", 3), ("c2", 4)] {
            let handle = agent.create(name).await;
            let row =
                CounterRow { direction: "egress".into(), reason: "forwarded".into(), packets, bytes: 10 * packets };
            assert!(agent.kernel.set_counters(handle.id, vec![row]));
            agent.delete(&handle).await;
        }
        let past = lock(&agent.life.telemetry.metrics.past_counters).clone();
        assert_eq!(past.into_iter().collect::<Vec<_>>(), [(("egress".into(), "forwarded".into()), (7, 70))]);
    });
}

#[test]
fn the_identity_goes_with_its_last_endpoint() {
    Machine::new().life(async |agent| {
        let (first, second) = (agent.create("c1").await, agent.create("c2").await);
        let identity = |h: &wharf_agent::node::endpoint::Handle| h.shared.read(|v| v.record.identity);
        assert_eq!(identity(&first), identity(&second), "same labels");
        let references = || agent.identities.list().first().map(|r| r.references);
        assert_eq!(references(), Some(2));
        agent.kernel.fail_next(Op::RemoveLink, Kind::Other);
        agent.delete(&first).await;
        assert_eq!(references(), Some(2), "something of it may still speak");
        agent.delete(&first).await;
        assert_eq!(references(), Some(1));
        agent.delete(&second).await;
        assert_eq!(references(), None);
    });
}

#[test]
fn a_late_delete_does_not_touch_the_endpoint_that_came_after() {
    Machine::new().life(async |agent| {
        let old = agent.create("c1").await;
        agent.delete(&old).await;
        agent.quiet().await;
        let new = agent.try_create(Agent::spec("c1", "eth0")).await.expect("attached anew");
        assert!(new.epoch > old.epoch.0);
        agent.kernel.clear_call_log();
        let result = agent.delete(&old).await;
        assert_eq!((result.deleted, result.errors), (vec![], vec![]));
        assert_eq!(agent.operations(), []);
        agent.assert_healthy().await;
        assert_eq!(agent.life.endpoints.registry.len(), 1);
    });
}
