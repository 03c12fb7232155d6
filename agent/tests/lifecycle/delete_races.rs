//! Deletes that meet other work on the same endpoint.

use std::time::Duration;

use wharf_agent::{endpoint::resume, node::endpoint::MAILBOX};
use wharf_api::ErrorCode;
use wharf_core::{
    plan::{DeleteOptions, TEARDOWN_BOUND},
    state::{Level, State},
    store::LeaseOwner,
};
use wharf_datapath::fake::Operation as Op;

use crate::support::*;

#[test]
fn of_two_deletes_at_once_both_succeed_and_the_kernel_is_asked_once() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        let hold = agent.kernel.hold(Op::RemoveAttached);
        let both = [(); 2].map(|()| agent.spawn_delete(&[&handle], DeleteOptions::default()));
        hold.reached().await;
        is_asked(&handle).await;
        hold.release();
        for delete in both {
            assert_eq!(delete.await.expect("task").errors, []);
        }
        assert_eq!(agent.kernel.calls(Op::RemoveLink), 1);
        agent.assert_nothing_left().await;
    });
}

/// A batch that also names an endpoint which another delete has finished, and whose address has a new owner by then.
#[test]
fn a_slow_delete_does_not_take_the_lease_of_the_endpoint_that_came_after() {
    for no_ip_release in [false, true] {
        // One IPv4 and one IPv6 address for the first endpoint, one each for the second; the router has the others.
        let machine = Machine::new().with_cidrs(&["10.88.0.0/29", "fd88::/64"]);
        machine.life(async |agent| {
            let mut spec = agent.container("c1");
            spec.ips = vec!["10.88.0.5".parse().expect("address")];
            let first = agent.handle(agent.try_create(spec).await.expect("created").id);
            let second = agent.create("c2").await;
            let acknowledge_first = agent.proxy.answers_late(first.id, "slow");
            let acknowledge_second = agent.proxy.answers_late(second.id, "slower");
            let quick = agent.spawn_delete(&[&first], DeleteOptions::default());
            let slow = agent.spawn_delete(&[&first, &second], DeleteOptions { no_ip_release });
            let pending = &agent.life.policy.proxy.pending;
            eventually("both are awaited", || pending.load(std::sync::atomic::Ordering::Relaxed) == 2).await;
            is_asked(&first).await;
            acknowledge_first.send(()).expect("awaited");
            assert_eq!(quick.await.expect("task").errors, []);

            let mut spec = agent.container("c3");
            spec.ips = vec!["10.88.0.5".parse().expect("address")];
            let third = agent.handle(agent.try_create(spec).await.expect("the address is free").id);
            acknowledge_second.send(()).expect("awaited");
            assert_eq!(slow.await.expect("task").errors, []);

            let ip = addresses(&third)[0];
            let stored = agent.snapshot().await.leases.into_iter().find(|l| l.ip == ip);
            let owner = stored.map(|l| l.owner);
            assert!(
                matches!(&owner, Some(LeaseOwner::Attachment { epoch, .. }) if *epoch == third.epoch),
                "the store says {owner:?}"
            );
            assert_eq!(agent.lease_owner(ip), owner);
            agent.assert_healthy().await;
        });
    }
}

#[test]
fn a_delete_ends_a_build_at_its_next_step() {
    let steps = [Op::EnsurePrograms, Op::EnsureConfig, Op::EnsureAttached, Op::EnsureConnected];
    for step in steps {
        Machine::new().life(async |agent| {
            let handle = agent.create("c1").await;
            let hold = agent.kernel.hold(step);
            let built = agent.request(&handle, Level::Datapath).await;
            hold.reached().await;
            let delete = agent.spawn_delete(&[&handle], DeleteOptions::default());
            is_told_to_end(&handle).await;
            agent.kernel.clear_call_log();
            hold.release();
            let refused = built.await.expect("answered").expect_err("deleted meanwhile");
            assert!(refused.to_string().contains("delete"), "{refused}");
            let result = delete.await.expect("task");
            assert_eq!((result.deleted.len(), result.errors), (1, vec![]));
            assert_eq!(
                agent.operations(),
                [Op::RemoveAttached, Op::RemoveReachable, Op::RemovePrograms, Op::RemoveLink, Op::ReleaseLink],
                "no further step of the build"
            );
            agent.assert_nothing_left().await;
        });
    }
}

#[test]
fn a_build_that_hangs_does_not_hold_a_delete_for_ever() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        let hold = agent.kernel.hold(Op::EnsureConfig);
        let built = agent.request(&handle, Level::Policy).await;
        hold.reached().await;
        let delete = agent.spawn_delete(&[&handle], DeleteOptions::default());
        eventually("the delete has begun", || handle.cancel.is_cancelled()).await;
        agent.snapshot().await; // the intent is written when this is answered
        let result = after(Duration::from_secs(2), delete).await.expect("task");
        assert!(result.errors.iter().all(|e| e.message.contains("it waits for ensure-config")), "{:?}", result.errors);
        assert_eq!(result.deleted, Vec::<u16>::new(), "what may still come of the build keeps its id");
        built.await.expect("answered").expect_err("it never ended");
        hold.release();
        agent.quiet().await;
        assert_eq!(resume::resume(&agent.life).await, Ok(()));
        agent.assert_nothing_left().await;
    });
}

/// The kernel finishes what it was asked for, whoever has given it up.
#[test]
fn a_load_that_ends_after_its_bound_pins_nothing_behind_the_delete() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        let hold = agent.kernel.hold(Op::EnsurePrograms);
        let built = agent.request(&handle, Level::Datapath).await;
        hold.reached().await;
        let why = after(Duration::from_secs(9), built).await.expect("answered").expect_err("it hangs");
        assert!(why.to_string().contains("ensure-programs: no answer within 8s"), "{why}");
        let delete = agent.spawn_delete(&[&handle], DeleteOptions::default());
        is_told_to_end(&handle).await;
        agent.snapshot().await; // the intent is written when this is answered
        let_all_run().await;
        hold.release();
        let result = delete.await.expect("task");
        assert_eq!((result.deleted, result.errors), (vec![handle.id.get()], vec![]));
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_kernel_call_that_goes_on_after_its_step_was_given_up_is_named_until_it_ends() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        let hold = agent.kernel.hold(Op::EnsurePrograms);
        let built = agent.request(&handle, Level::Datapath).await;
        hold.reached().await;
        let stuck = after(Duration::from_secs(9) + Duration::from_millis(1), async {
            built.await.expect("answered").expect_err("it hangs");
            agent.stuck()
        })
        .await;
        assert!(stuck.iter().any(|s| s.step == "ensure-programs" && s.endpoint == handle.id.get()), "{stuck:?}");
        hold.release();
        eventually("the retry succeeds", || state(&handle) == State::Ready).await;
        assert_eq!(agent.stuck(), []);
        agent.assert_healthy().await;
    });
}

#[test]
fn a_delete_that_finds_no_place_in_the_mailbox_is_resumed() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        let full = handle.mailbox.reserve_many(MAILBOX).await.expect("places");
        let delete = agent.spawn_delete(&[&handle], DeleteOptions::default());
        is_told_to_end(&handle).await;
        agent.snapshot().await; // the intent is written when this is answered
        let_all_run().await;
        let result = after(TEARDOWN_BOUND + Duration::from_secs(1), delete).await.expect("task");
        assert_eq!((result.deleted, result.errors.len()), (vec![], 1), "it has not even begun");
        assert_eq!(state(&handle), State::Ready);
        drop(full);
        assert_eq!(resume::resume(&agent.life).await, Ok(()));
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_create_that_waits_for_its_turn_ends_at_once_when_its_delete_comes() {
    Machine::new().life(async |agent| {
        let hold = agent.kernel.hold(Op::EnsureLink);
        let running: Vec<_> = (0..8).map(|n| agent.spawn_create(agent.container(&format!("c{n}")))).collect();
        eventually("there is no room", || agent.life.endpoints.admission.gate.status().running == 8).await;
        let waits = agent.spawn_create(agent.container("waits"));
        eventually("it waits", || agent.life.endpoints.registry.len() == 9).await;
        let wanted = attachment("waits", "eth0");
        let delete = agent.del(&wanted, DeleteOptions::default());
        let result =
            tokio::time::timeout(Duration::from_secs(5), delete).await.expect("the delete waits for a turn too");
        assert_eq!(result.errors, []);
        assert_eq!(waits.await.expect("task").expect_err("deleted").code, ErrorCode::Busy);
        assert_eq!(agent.life.endpoints.registry.len(), 8);
        hold.release();
        for create in running {
            create.await.expect("task").expect("created");
        }
        agent.assert_healthy().await;
    });
}

#[test]
fn a_regeneration_asked_for_during_a_delete_is_refused() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        let hold = agent.kernel.hold(Op::RemoveReachable);
        let delete = agent.spawn_delete(&[&handle], DeleteOptions::default());
        hold.reached().await;
        let answer = agent.request(&handle, Level::Datapath).await;
        hold.release();
        assert_eq!(delete.await.expect("task").errors, []);
        // Refused by the endpoint, or dropped unanswered with it.
        assert!(answer.await.is_ok_and(|r| r.is_err()), "a client is told");
        agent.assert_nothing_left().await;
    });
}

#[test]
fn what_waits_for_its_backoff_is_deleted_without_waiting() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        agent.kernel.fail_always(Op::EnsureConfig, wharf_core::kernel::KernelErrorKind::Other);
        agent.request(&handle, Level::Policy).await.await.expect("answered").expect_err("asked for");
        let result = agent.delete(&handle).await;
        assert_eq!((result.deleted.len(), result.errors), (1, vec![]));
        agent.kernel.mend(Op::EnsureConfig);
        agent.assert_nothing_left().await;
    });
}
