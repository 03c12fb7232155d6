//! Creates that fail half-way leave nothing.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::time::{Instant, timeout};
use wharf_agent::{
    endpoint::{prepared, resume, unknown},
    node::aside::Wanted,
};
use wharf_api::ErrorCode;
use wharf_core::{
    kernel::KernelErrorKind as Kind,
    plan::CreateStep,
    store::{Intent, LeaseOwner},
};
use wharf_datapath::fake::Operation as Op;
use wharf_kit::sync::lock;

use crate::support::*;

/// The kernel's part of a create, in order.
pub(crate) const STEPS: [Op; 6] = [
    Op::EnsurePrograms,
    Op::EnsureLink,
    Op::EnsureConfig,
    Op::EnsureAttached,
    Op::EnsureConnected,
    Op::EnsureReachable,
];

#[test]
fn a_failure_of_any_step_before_or_after_its_effect_leaves_nothing() {
    let kinds = [
        Kind::Exists,
        Kind::NotFound,
        Kind::NotANetns,
        Kind::Permission,
        Kind::Unsupported,
        Kind::Exhausted,
        Kind::Conflict,
        Kind::Other,
    ];
    Machine::new().life(async |agent| {
        for step in STEPS {
            for kind in kinds {
                for after_effect in [false, true] {
                    if after_effect {
                        agent.kernel.fail_next_after_effect(step, kind);
                    } else {
                        agent.kernel.fail_next(step, kind);
                    }
                    let error = agent.try_create(agent.container("c1")).await.expect_err("asked for");
                    assert!(error.message.contains("the test asked for this failure"), "{}", error.message);
                    assert!(!error.message.contains("undoing"), "{}", error.message);
                    agent.assert_nothing_left().await;
                }
            }
        }
        agent.create("c1").await;
        agent.assert_healthy().await;
    });
}

#[test]
fn a_failure_says_what_the_caller_may_do_about_it() {
    let expected = [
        (Kind::Exists, ErrorCode::Exists),
        (Kind::NotFound, ErrorCode::InvalidNetns),
        (Kind::NotANetns, ErrorCode::InvalidNetns),
        (Kind::Permission, ErrorCode::Kernel),
        (Kind::Unsupported, ErrorCode::Kernel),
        (Kind::Exhausted, ErrorCode::LimitReached),
        (Kind::Conflict, ErrorCode::Kernel),
        (Kind::Other, ErrorCode::Kernel),
    ];
    Machine::new().life(async |agent| {
        for (kind, code) in expected {
            agent.kernel.fail_next(Op::EnsureLink, kind);
            let error = agent.try_create(agent.container("c1")).await.expect_err("asked for");
            assert_eq!(error.code, code, "{kind:?}: {}", error.message);
            agent.quiet().await;
        }
    });
}

#[test]
fn a_full_disk_at_the_intent_stops_the_create_before_its_first_side_effect() {
    Machine::new().life(async |agent| {
        agent.disk.fill();
        let error = agent.try_create(agent.container("c1")).await.expect_err("no intent, no create");
        assert_eq!(error.code, ErrorCode::Store);
        assert_eq!(agent.operations(), [], "nothing was done in the kernel");
        agent.disk.mend();
        agent.assert_nothing_left().await;
        agent.create("c1").await;
        agent.assert_healthy().await;
    });
}

#[test]
fn a_disk_that_fills_before_the_commit_takes_the_endpoint_back() {
    let machine = Machine::new();
    machine.life(async |agent| {
        let hold = agent.kernel.hold(Op::EnsureReachable);
        let create = agent.spawn_create(agent.container("c1"));
        hold.reached().await;
        agent.disk.fill();
        hold.release();
        let error = create.await.expect("task").expect_err("not durable, not created");
        assert_eq!(error.code, ErrorCode::Store);
        agent.quiet().await;
        assert!(agent.life.endpoints.registry.is_empty());
        assert!(agent.kernel.is_clean(), "the kernel's part is undone without the disk");
        agent.disk.mend();
        // Nobody knows whether the commit got through, so the id is not given out again by this agent.
        assert!(!agent.is_free(id(1)));
        assert_eq!(agent.create("c1").await.id, id(2));
    });
    machine.life(async |agent| {
        agent.assert_healthy().await;
        agent.delete(&agent.handle(2)).await;
        agent.assert_nothing_left().await;
    });
}

#[test]
fn an_undo_that_fails_is_named_and_keeps_what_it_could_not_take_back_from_others() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.kernel.fail_next(Op::EnsureReachable, Kind::Other);
        agent.kernel.fail_next(Op::RemoveLink, Kind::Exhausted);
        let error = agent.try_create(agent.container("c1")).await.expect_err("asked for");
        assert!(error.message.contains("undoing it: remove-link"), "{}", error.message);
        agent.quiet().await;
        assert!(!agent.is_free(id(1)), "its link is still there");
        let held = lock(&agent.life.network.addresses.ipam).owned_by(|o| matches!(o, LeaseOwner::Attachment { .. }));
        assert_eq!(held.len(), 2, "its link may still speak with them");
        let intents = agent.snapshot().await.intents;
        assert!(matches!(intents[..], [(_, _, Intent::Create { .. })]), "{intents:?}");
        assert!(!agent.kernel.is_clean());
    });
    machine.life(async |agent| agent.assert_nothing_left().await);
}

#[test]
fn an_undo_that_failed_is_resumed_until_nothing_is_left() {
    for (failing, undo) in [(Op::EnsureReachable, Op::RemoveLink), (Op::EnsureLink, Op::RemovePrograms)] {
        Machine::new().life(async |agent| {
            agent.kernel.fail_next(failing, Kind::Other);
            agent.kernel.fail_always(undo, Kind::Exhausted);
            agent.try_create(agent.container("c1")).await.expect_err("asked for");
            agent.quiet().await;
            resume::resume(&agent.life).await.expect_err("it fails again");
            assert!(!agent.is_free(id(1)), "something is left of it");
            agent.kernel.mend(undo);
            assert_eq!(resume::resume(&agent.life).await, Ok(()));
            assert!(agent.is_free(id(1)));
            agent.assert_nothing_left().await;
        });
    }
}

#[test]
fn an_undo_waits_for_a_late_proxy_before_it_unpins_or_frees_anything() {
    Machine::new().life(async |agent| {
        agent.kernel.fail_next(Op::EnsureReachable, Kind::Other);
        agent.proxy.answers(id(1), "quick");
        let acknowledge = agent.proxy.answers_late(id(1), "slow");
        let create = agent.spawn_create(agent.container("c1"));
        let pending = &agent.life.policy.proxy.pending;
        eventually("one completion is awaited", || pending.load(Ordering::Relaxed) == 1).await;
        let_all_run().await;
        let operations = agent.operations();
        assert!(
            operations.ends_with(&[Op::EnsureReachable, Op::RemoveReachable, Op::RemoveAttached]),
            "unreachable, and nothing more: {operations:?}"
        );
        let handle = agent.handle(1);
        assert_eq!(handle.shared.read(|v| v.status.phase.clone()), "await-proxy");
        assert!(addresses(&handle).into_iter().all(|ip| agent.lease_owner(ip).is_some()));
        acknowledge.send(()).expect("awaited");
        let error = create.await.expect("task").expect_err("asked for");
        assert!(!error.message.contains("undoing"), "{}", error.message);
        assert_eq!(agent.life.policy.proxy.timed_out.load(Ordering::Relaxed), 0);
        agent.assert_nothing_left().await;
    });
}

#[test]
fn an_undo_asks_the_proxy_from_the_step_on_that_may_have_told_it() {
    for (told, step) in STEPS.into_iter().enumerate() {
        Machine::new().life(async |agent| {
            agent.kernel.fail_next(step, Kind::Other);
            agent.try_create(agent.container("c1")).await.expect_err("asked for");
            let asked: Vec<_> = agent.proxy.asked().into_iter().map(|(id, _)| id).collect();
            let told = STEPS[..=told].contains(&Op::EnsureConfig);
            assert_eq!(asked, if told { vec![id(1)] } else { vec![] }, "{step:?}");
        });
    }
}

#[test]
fn a_proxy_that_never_answers_is_recorded_counted_and_holds_no_undo_up_beyond_its_bound() {
    let mut machine = Machine::new();
    machine.config.proxy_timeout = Duration::from_millis(20);
    machine.life(async |agent| {
        agent.kernel.fail_next(Op::EnsureReachable, Kind::Other);
        agent.proxy.never_answers(id(1), "stuck");
        let error = agent.try_create(agent.container("c1")).await.expect_err("asked for");
        assert!(error.message.contains("undoing it: await-proxy: no answer within 20ms"), "{}", error.message);
        assert_eq!(agent.life.policy.proxy.timed_out.load(Ordering::Relaxed), 1);
        assert_eq!(agent.life.policy.proxy.pending.load(Ordering::Relaxed), 0);
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_delete_waits_for_an_undo_that_is_tried_again_and_releases_none_of_its_leases_before() {
    Machine::new().life(async |agent| {
        agent.kernel.fail_next(Op::EnsureReachable, Kind::Other);
        agent.kernel.fail_next(Op::RemoveLink, Kind::Exhausted);
        agent.try_create(agent.container("c1")).await.expect_err("asked for");
        agent.quiet().await;
        let (hold, before) = (agent.kernel.hold(Op::RemoveLink), agent.kernel.calls(Op::RemoveLink));
        let life = Arc::clone(&agent.life);
        let resumed = tokio::spawn(async move { resume::resume(&life).await });
        eventually("it is tried again", || agent.kernel.calls(Op::RemoveLink) > before).await;
        let (life, attachment) = (Arc::clone(&agent.life), agent.container("c1").attachment);
        let mut deleted = tokio::spawn(async move { unknown::remove(&life, &Wanted::of(&attachment)).await });
        timeout(Duration::from_secs(1), &mut deleted).await.expect_err("it waits");
        let held = lock(&agent.life.network.addresses.ipam).owned_by(|o| matches!(o, LeaseOwner::Attachment { .. }));
        assert_eq!(held.len(), 2, "its link may still speak with them");
        drop(hold);
        assert_eq!(resumed.await.expect("task"), Ok(()));
        assert_eq!(deleted.await.expect("task").errors, []);
        assert!(agent.is_free(id(1)));
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_repair_of_what_an_undo_left_gives_back_the_addresses_too() {
    Machine::new().life(async |agent| {
        agent.kernel.fail_next(Op::EnsureLink, Kind::Other);
        agent.kernel.fail_next(Op::RemovePrograms, Kind::Exhausted);
        agent.try_create(agent.container("c1")).await.expect_err("asked for");
        agent.quiet().await;
        let findings = agent.findings(true).await;
        assert!(findings.iter().all(|f| f.repair.as_deref() == Some("mended")), "{findings:?}");
        agent.assert_nothing_left().await;
    });
}

#[test]
fn an_undo_that_ends_after_its_bound_takes_nothing_from_the_next_of_that_id() {
    Machine::new().life(async |agent| {
        agent.kernel.fail_next(Op::EnsureLink, Kind::Other);
        let hold = agent.kernel.hold(Op::RemovePrograms);
        let create = agent.spawn_create(agent.container("c1"));
        hold.reached().await;
        let error = after(Duration::from_secs(5), create).await.expect("task").expect_err("asked for");
        assert!(error.message.contains("undoing it: remove-programs: no answer"), "{}", error.message);
        assert!(!agent.is_free(id(1)));
        hold.release();
        agent.quiet().await;
        assert_eq!(resume::resume(&agent.life).await, Ok(()));
        agent.assert_nothing_left().await;
    });
}

#[test]
fn an_id_whose_load_ahead_of_need_and_its_undo_failed_is_freed_later() {
    let mut machine = Machine::new();
    machine.config.prepared_programs = 1;
    machine.life(async |agent| {
        agent.kernel.fail_next_after_effect(Op::EnsurePrograms, Kind::Other);
        agent.kernel.fail_next(Op::RemovePrograms, Kind::Exhausted);
        let why = prepared::refill(&agent.life).await.expect_err("asked for");
        assert!(why.to_string().contains("and undoing it"), "{why}");
        assert!(!agent.is_free(id(1)));
        assert_eq!(resume::resume(&agent.life).await, Ok(()));
        assert!(agent.is_free(id(1)));
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_create_that_fails_before_its_intent_with_programs_that_stay_is_resumed_too() {
    let mut machine = Machine::new();
    machine.config.prepared_programs = 1;
    machine.life(async |agent| {
        prepared::refill(&agent.life).await.expect("refilled");
        agent.disk.fill();
        agent.kernel.fail_next(Op::RemovePrograms, Kind::Exhausted);
        agent.try_create(agent.container("c1")).await.expect_err("no intent, no create");
        agent.quiet().await;
        agent.disk.mend();
        assert!(!agent.is_free(id(1)));
        assert_eq!(resume::resume(&agent.life).await, Ok(()));
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_step_that_hangs_is_answered_at_its_deadline_and_its_late_result_undone() {
    for step in STEPS {
        for fails in [false, true] {
            Machine::new().life(async |agent| {
                if fails {
                    agent.kernel.fail_next_after_effect(step, Kind::Other);
                }
                let hold = agent.kernel.hold(step);
                let create = agent.spawn_create(agent.container("c1"));
                hold.reached().await;
                let error = after(Duration::from_secs(20), create).await.expect("task").expect_err("late");
                assert_eq!(error.code, ErrorCode::DeadlineExceeded, "{}", error.message);
                assert_eq!(agent.life.endpoints.registry.len(), 1, "the step still runs");
                let view = agent.handle(1).shared.view();
                assert!(view.status.waits_for.starts_with("step"), "{:?}", view.status);
                hold.release();
                agent.assert_nothing_left().await;
            });
        }
    }
}

#[test]
fn the_callers_deadline_counts_when_it_is_the_shorter_one() {
    Machine::new().life(async |agent| {
        let hold = agent.kernel.hold(Op::EnsurePrograms);
        let mut spec = agent.container("c1");
        let patience = Duration::from_millis(CreateStep::EnsurePrograms.deadline_ms() - 2_000);
        spec.deadline = Instant::now() + patience;
        let create = agent.spawn_create(spec);
        hold.reached().await;
        let error = after(patience, create).await.expect("task").expect_err("late");
        assert_eq!(error.code, ErrorCode::DeadlineExceeded, "{}", error.message);
        hold.release();
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_commit_that_ends_after_its_deadline_is_taken_back() {
    Machine::new().life(async |agent| {
        let hold = agent.kernel.hold(Op::EnsureReachable);
        let create = agent.spawn_create(agent.container("c1"));
        hold.reached().await;
        agent.disk.hold();
        hold.release();
        agent.disk.reached().await;
        let error = after(Duration::from_secs(20), create).await.expect("task").expect_err("late");
        assert_eq!(error.code, ErrorCode::DeadlineExceeded);
        agent.disk.mend();
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_namespace_that_does_not_answer_does_not_hold_the_caller_beyond_its_deadline() {
    Machine::new().life(async |agent| {
        let hold = agent.kernel.hold(Op::ObserveNetns);
        let mut spec = agent.container("c1");
        spec.deadline = Instant::now() + Duration::from_millis(20);
        let answer = tokio::time::timeout(Duration::from_secs(10), agent.try_create(spec)).await.expect("answered");
        assert_eq!(answer.expect_err("late").code, ErrorCode::DeadlineExceeded);
        hold.release();
        agent.assert_nothing_left().await;
    });
}

#[test]
fn an_undo_that_hangs_does_not_hold_the_caller_beyond_its_deadline() {
    Machine::new().life(async |agent| {
        agent.kernel.fail_next(Op::EnsureAttached, Kind::Other);
        let hold = agent.kernel.hold(Op::RemoveLink);
        let mut spec = agent.container("c1");
        spec.deadline = Instant::now() + Duration::from_millis(100);
        let answer = tokio::time::timeout(Duration::from_secs(10), agent.try_create(spec)).await.expect("answered");
        answer.expect_err("asked for");
        hold.release();
        agent.assert_nothing_left().await;
    });
}

#[test]
fn an_agent_that_stops_takes_back_what_it_had_begun() {
    Machine::new().life(async |agent| {
        let hold = agent.kernel.hold(Op::EnsureConfig);
        let create = agent.spawn_create(agent.container("c1"));
        hold.reached().await;
        agent.life.tasks.stop.cancel();
        hold.release();
        assert_eq!(create.await.expect("task").expect_err("stopping").code, ErrorCode::Unavailable);
        agent.assert_nothing_left().await;
    });
}
