//! Regeneration: levels, failures, backoff, coalescing, labels.

use std::{collections::BTreeSet, sync::atomic::Ordering, time::Duration};

use tokio::{sync::oneshot, time::Instant};
use wharf_agent::node::{
    edit::Edit,
    endpoint::{Command, Handle},
    error::CommandError,
};
use wharf_core::{
    identity::{Identity, Label},
    kernel::{KernelErrorKind as Kind, NodeKernel as _},
    plan::DeleteOptions,
    state::{Level, State},
};
use wharf_datapath::fake::Operation as Op;

use crate::support::*;

fn labels(text: &str) -> BTreeSet<Label> {
    BTreeSet::from([text.parse().expect("label")])
}

async fn relabel(handle: &Handle, text: &str) -> oneshot::Receiver<Result<(), CommandError>> {
    let (done, answer) = oneshot::channel();
    handle
        .mailbox
        .send(Command::Edit(Box::new(Edit::labels(labels(text))), done))
        .await
        .expect("the endpoint is there");
    answer
}

fn identity(handle: &Handle) -> Identity {
    handle.shared.read(|v| v.record.identity)
}

/// The identity that the kernel holds for the endpoint's addresses.
async fn identity_in_force(agent: &Agent, handle: &Handle) -> Vec<u32> {
    let rows = agent.kernel.dump().await.expect("dump").endpoint_rows;
    let of_it = rows.into_iter().filter(|r| r.endpoint_id == u32::from(handle.id.get()));
    of_it.map(|r| r.identity).collect::<BTreeSet<_>>().into_iter().collect()
}

#[test]
fn a_policy_build_changes_rows_and_a_datapath_build_programs_too() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        for (level, expected) in [
            (Level::Policy, vec![Op::EnsureConfig, Op::EnsureReachable]),
            (
                Level::Datapath,
                vec![
                    Op::EnsurePrograms,
                    Op::EnsureConfig,
                    Op::EnsureAttached,
                    Op::EnsureConnected,
                    Op::EnsureReachable,
                ],
            ),
        ] {
            agent.kernel.clear_call_log();
            agent.request(&handle, level).await.await.expect("answered").expect("built");
            assert_eq!(agent.operations(), expected);
            assert_eq!(state(&handle), State::Ready);
            agent.assert_healthy().await;
        }
        assert_eq!(handle.shared.read(|v| v.status.regenerations), 3, "the create's, and two");
    });
}

#[test]
fn a_failed_build_keeps_the_last_good_state_shows_why_and_is_retried() {
    for step in [Op::EnsurePrograms, Op::EnsureConfig, Op::EnsureAttached, Op::EnsureConnected, Op::EnsureReachable] {
        Machine::new().life(async |agent| {
            let handle = agent.create("c1").await;
            agent.kernel.fail_next(step, Kind::Exhausted);
            let refused =
                agent.request(&handle, Level::Datapath).await.await.expect("answered").expect_err("asked for");
            assert!(refused.to_string().contains("last good state stays in force"), "{refused}");
            assert_eq!(state(&handle), State::WaitingToRegenerate);
            let status = handle.shared.read(|v| v.status.clone());
            assert_eq!(status.failures, 1);
            assert!(status.last_error.is_some_and(|e| e.contains(step.as_str())));
            assert_eq!(status.waits_for, "the backoff after a failed build");
            assert_eq!(agent.kernel.dump().await.expect("dump").endpoint_rows.len(), 2, "still reachable");
            eventually("the retry succeeds", || state(&handle) == State::Ready).await;
            let status = handle.shared.read(|v| v.status.clone());
            assert_eq!((status.failures, status.last_error), (0, None));
            agent.assert_healthy().await;
        });
    }
}

#[test]
fn retries_come_ever_later_but_within_half_a_minute() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        agent.quiet().await;
        agent.kernel.fail_always(Op::EnsureConfig, Kind::Other);
        agent.kernel.clear_call_log();
        // From here on nothing needs a thread, so the clock runs by itself from one timer to the next.
        tokio::time::pause();
        agent.request(&handle, Level::Policy).await.await.expect("answered").expect_err("asked for");
        let mut since = Instant::now();
        for failures in 1..=14_u32 {
            let calls = agent.kernel.calls(Op::EnsureConfig);
            while agent.kernel.calls(Op::EnsureConfig) == calls {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let whole = Duration::from_millis((100 << (failures - 1)).min(30_000));
            let waited = since.elapsed();
            let slack = Duration::from_millis(5);
            assert!(waited + slack >= whole / 2 && waited <= whole + slack, "{waited:?} after {failures} failures");
            since = Instant::now();
        }
        agent.kernel.mend(Op::EnsureConfig);
        while state(&handle) != State::Ready {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        tokio::time::resume();
        agent.assert_healthy().await;
    });
}

#[test]
fn a_request_during_the_backoff_does_not_shorten_it() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        agent.quiet().await;
        tokio::time::pause();
        agent.kernel.fail_next(Op::EnsurePrograms, Kind::Other);
        let begun = Instant::now();
        agent.request(&handle, Level::Datapath).await.await.expect("answered").expect_err("asked for");
        agent.request(&handle, Level::Datapath).await.await.expect("answered").expect("the retry served it");
        assert!(begun.elapsed() >= Duration::from_millis(49), "{:?}", begun.elapsed());
        assert_eq!(agent.kernel.calls(Op::EnsurePrograms), 3, "the create's, the failed one, the retry");
    });
}

#[test]
fn requests_that_come_during_a_build_share_the_next_one() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        let hold = agent.kernel.hold(Op::EnsureConfig);
        agent.kernel.clear_call_log();
        let first = agent.request(&handle, Level::Policy).await;
        hold.reached().await;
        let mut others = Vec::new();
        for level in [Level::Policy, Level::Datapath, Level::Policy, Level::Policy] {
            others.push(agent.request(&handle, level).await);
        }
        hold.release();
        first.await.expect("answered").expect("built");
        for other in others {
            other.await.expect("answered").expect("built");
        }
        assert_eq!(agent.kernel.calls(Op::EnsureConfig), 2, "five requests, two builds");
        assert_eq!(agent.kernel.calls(Op::EnsurePrograms), 1, "the second at the greatest level asked for");
    });
}

#[test]
fn the_build_pool_bounds_how_many_regenerate_at_once() {
    Machine::new().life(async |agent| {
        let permits = agent.life.endpoints.admission.build_permits.available_permits();
        assert!(permits >= 2);
        let mut handles = Vec::new();
        for n in 0..permits + 3 {
            handles.push(agent.create(&format!("c{n}")).await);
        }
        let hold = agent.kernel.hold(Op::EnsureConfig);
        agent.kernel.clear_call_log();
        let mut answers = Vec::new();
        for handle in &handles {
            answers.push(agent.request(handle, Level::Policy).await);
        }
        // A build begins by a timer, whose grain is a millisecond: wait for them all, then look for one too many.
        let builds = || agent.kernel.calls(Op::EnsureConfig);
        let waiting = || handles.iter().filter(|h| state(h) == State::WaitingToRegenerate).count();
        eventually("every permit is taken", || builds() == permits as u64 && waiting() == 3).await;
        let_all_run().await;
        assert_eq!((builds(), waiting()), (permits as u64, 3));
        hold.release();
        for answer in answers {
            answer.await.expect("answered").expect("built");
        }
        agent.assert_healthy().await;
    });
}

#[test]
fn new_labels_are_durable_before_their_identity_is_in_force() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        let old = identity(&handle);
        let hold = agent.kernel.hold(Op::EnsureConfig);
        let answer = relabel(&handle, "k8s:app=db").await;
        hold.reached().await;
        let stored = agent.snapshot().await.endpoints[0].clone();
        assert_ne!(stored.identity, old);
        assert_eq!(stored.labels, labels("k8s:app=db"));
        assert_eq!(identity_in_force(&agent, &handle).await, [old.0], "not before it is durable");
        hold.release();
        answer.await.expect("answered").expect("realized");
        assert_eq!(identity_in_force(&agent, &handle).await, [stored.identity.0]);
        let rows = agent.identities.list();
        assert_eq!(rows.iter().map(|r| (r.identity, r.references)).collect::<Vec<_>>(), [(stored.identity, 1)]);
        agent.assert_healthy().await;
    });
}

#[test]
fn new_labels_that_cannot_be_stored_change_nothing() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        let old = identity(&handle);
        agent.disk.fill();
        relabel(&handle, "k8s:app=db").await.await.expect("answered").expect_err("not durable");
        agent.disk.mend();
        assert_eq!(identity(&handle), old);
        assert_eq!(identity_in_force(&agent, &handle).await, [old.0]);
        assert_eq!(agent.identities.list().len(), 1);
        agent.assert_healthy().await;
    });
}

#[test]
fn new_labels_that_cannot_be_realized_are_retried_until_they_are() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        let old = identity(&handle);
        agent.kernel.fail_next(Op::EnsureReachable, Kind::Exhausted);
        relabel(&handle, "k8s:app=db").await.await.expect("answered").expect_err("asked for");
        assert_eq!(identity_in_force(&agent, &handle).await, [old.0], "the last good one");
        eventually("the retry succeeds", || state(&handle) == State::Ready).await;
        assert_eq!(identity_in_force(&agent, &handle).await, [identity(&handle).0]);
        assert_ne!(identity(&handle), old);
        agent.assert_healthy().await;
    });
}

#[test]
fn an_endpoint_that_is_being_deleted_takes_no_labels() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        let before = handle.shared.read(|v| v.record.clone());
        agent.kernel.fail_next(Op::RemoveLink, Kind::Other);
        agent.delete(&handle).await;
        relabel(&handle, "k8s:app=db").await.await.expect("answered").expect_err("it goes");
        assert_eq!(handle.shared.read(|v| v.record.clone()), before);
        assert_eq!(agent.snapshot().await.endpoints, [before]);
        agent.delete(&handle).await;
        agent.assert_nothing_left().await;
    });
}

/// The record is gone from the store and the task still answers: labels must not bring the record back.
#[test]
fn labels_that_come_between_the_last_steps_of_a_delete_do_not_bring_the_record_back() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        let hold = agent.kernel.hold(Op::RemoveLink);
        let delete = agent.spawn_delete(&[&handle], DeleteOptions::default());
        hold.reached().await;
        agent.disk.hold();
        hold.release();
        agent.disk.reached().await; // the removal of the record is on its way to the disk
        let answer = relabel(&handle, "k8s:app=db").await;
        let_all_run().await;
        agent.disk.mend();
        answer.await.expect("answered").expect_err("it goes");
        delete.await.expect("task");
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_refused_move_is_counted_and_in_the_log() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        agent.kernel.fail_next(Op::RemoveLink, Kind::Other);
        agent.delete(&handle).await;
        let refused = || agent.life.telemetry.metrics.refused_transitions.load(Ordering::Relaxed);
        assert_eq!(refused(), 0);
        let why = agent.request(&handle, Level::Policy).await.await.expect("answered").expect_err("it goes");
        assert!(why.to_string().contains("disconnecting"), "{why}");
        assert_eq!(refused(), 1);
        let line =
            "build-requested(policy): build-requested(policy) refused in state disconnecting: it is being deleted";
        assert!(log_of(&handle).contains(&line.to_owned()), "{:#?}", log_of(&handle));
        agent.delete(&handle).await;
        agent.assert_nothing_left().await;
    });
}
