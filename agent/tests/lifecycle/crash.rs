//! An agent that is killed at any step: the next one takes back what was begun, or finishes it.

use wharf_core::{
    kernel::NodeKernel as _,
    plan::DeleteOptions,
    state::{Level, State},
    store::LeaseOwner,
};
use wharf_datapath::fake::Operation as Op;

use crate::{create_undone::STEPS as CREATE, support::*};

const DELETE: [Op; 5] = [Op::RemoveAttached, Op::RemoveReachable, Op::RemovePrograms, Op::RemoveLink, Op::ReleaseLink];

#[test]
fn killed_at_any_step_of_a_create_it_leaves_nothing_to_the_next() {
    for step in CREATE {
        let machine = Machine::new();
        let hold = machine.kernel.hold(step);
        machine.life(async |agent| {
            let _create = agent.spawn_create(agent.container("c1"));
            hold.reached().await;
        });
        hold.release();
        machine.life(async |agent| {
            agent.assert_nothing_left().await;
            agent.create("c1").await;
            agent.assert_healthy().await;
        });
    }
}

#[test]
fn killed_right_after_any_step_of_a_create_it_leaves_nothing_to_the_next() {
    // The step has its effect and then fails, so the undo begins; the agent is killed at its first act.
    for step in CREATE {
        let machine = Machine::new();
        machine.life(async |agent| {
            agent.kernel.fail_next_after_effect(step, wharf_core::kernel::KernelErrorKind::Other);
            let holds = DELETE.map(|op| agent.kernel.hold(op));
            let create = agent.spawn_create(agent.container("c1"));
            eventually("the undo begins", || DELETE.iter().any(|op| agent.kernel.calls(*op) > 0)).await;
            drop(create);
            std::mem::forget(holds);
        });
        for op in DELETE {
            machine.kernel.hold(op).release();
        }
        machine.life(async |agent| agent.assert_nothing_left().await);
    }
}

#[test]
fn killed_over_an_unclaimed_prepared_set_it_leaves_no_pins() {
    let mut machine = Machine::new();
    machine.config.prepared_programs = 3;
    machine.life(async |agent| wharf_agent::endpoint::prepared::refill(&agent.life).await.expect("refilled"));
    assert!(!machine.kernel.is_clean());
    machine.life(async |agent| agent.assert_nothing_left().await);
}

#[test]
fn killed_at_any_step_of_a_delete_the_next_agent_finishes_it() {
    for no_ip_release in [false, true] {
        for step in DELETE {
            let machine = Machine::new();
            machine.life(async |agent| {
                agent.create("c1").await;
            });
            let hold = machine.kernel.hold(step);
            machine.life(async |agent| {
                let handle = agent.handle(1);
                let _delete = agent.spawn_delete(&[&handle], DeleteOptions { no_ip_release });
                hold.reached().await;
            });
            hold.release();
            machine.life(async |agent| {
                agent.quiet().await;
                assert!(agent.life.endpoints.registry.is_empty());
                assert!(machine.kernel.is_clean());
                let leases = agent.snapshot().await.leases;
                let kept = leases.iter().filter(|l| matches!(l.owner, LeaseOwner::Caller { .. })).count();
                assert_eq!((leases.len(), kept), if no_ip_release { (2, 2) } else { (0, 0) });
                agent.assert_healthy().await;
                assert!(agent.is_free(id(1)));
            });
        }
    }
}

#[test]
fn killed_during_a_batch_the_next_agent_finishes_all_of_it() {
    let machine = Machine::new();
    machine.life(async |agent| {
        let handles = [agent.create("c1").await, agent.create("c2").await, agent.create("c3").await];
        agent.proxy.never_answers(handles[1].id, "slow");
        let _delete = agent.spawn_delete(&handles.each_ref(), DeleteOptions::default());
        let pending = &agent.life.policy.proxy.pending;
        eventually("one is awaited", || pending.load(std::sync::atomic::Ordering::Relaxed) == 1).await;
    });
    machine.life(async |agent| agent.assert_nothing_left().await);
}

#[test]
fn killed_at_any_step_of_a_build_the_endpoint_comes_back_and_is_rebuilt() {
    for step in [Op::EnsurePrograms, Op::EnsureConfig, Op::EnsureAttached, Op::EnsureConnected, Op::EnsureReachable] {
        let machine = Machine::new();
        let record = machine.life(async |agent| {
            let handle = agent.create("c1").await;
            let hold = agent.kernel.hold(step);
            let _built = agent.request(&handle, Level::Datapath).await;
            hold.reached().await;
            handle.shared.read(|v| v.record.clone())
        });
        machine.life(async |agent| {
            let handle = agent.handle(1);
            eventually("rebuilt", || state(&handle) == State::Ready).await;
            assert_eq!(handle.shared.read(|v| v.record.clone()), record);
            agent.assert_healthy().await;
        });
    }
}

#[test]
fn killed_over_a_commit_the_endpoint_is_there_whole_or_not_at_all() {
    let machine = Machine::new();
    machine.life(async |agent| {
        let hold = agent.kernel.hold(Op::EnsureReachable);
        let _create = agent.spawn_create(agent.container("c1"));
        hold.reached().await;
        agent.disk.hold();
        hold.release();
        agent.disk.reached().await;
    });
    machine.life(async |agent| {
        // What was handed to the disk was written; nobody was told, but the runtime's DEL follows every ADD.
        let snapshot = agent.snapshot().await;
        assert_eq!((snapshot.endpoints.len(), snapshot.leases.len(), snapshot.intents.len()), (1, 2, 0));
        agent.assert_healthy().await;
        agent.delete(&agent.handle(1)).await;
        agent.assert_nothing_left().await;
    });
}

/// Every write of a create to the disk in turn is the last one.
#[test]
fn killed_over_any_write_of_a_create_the_endpoint_is_there_whole_or_not_at_all() {
    let (mut whole, mut nothing) = (0, 0);
    for writes in 0.. {
        let machine = Machine::in_memory();
        let life = machine.start().expect("starts");
        machine.disk.hold_after(writes);
        let done = life.run(async {
            let mut create = life.agent.spawn_create(life.agent.container("c1"));
            tokio::select! {
                biased;
                result = &mut create => Some(result),
                () = machine.disk.reached() => None,
            }
        });
        if let Some(result) = done {
            result.expect("task").expect("created");
            life.kill();
            break;
        }
        life.kill_and_tear();
        machine.life(async |agent| {
            agent.quiet().await;
            match agent.life.endpoints.registry.len() {
                0 => nothing += 1,
                n => whole += n,
            }
            agent.assert_healthy().await;
            agent.del(&attachment("c1", "eth0"), DeleteOptions::default()).await;
            agent.assert_nothing_left().await;
        });
    }
    assert!(nothing > 1 && whole + nothing > 4, "{whole} whole, {nothing} nothing");
}

#[test]
fn killed_at_any_step_of_a_start_the_next_agent_finishes_it() {
    for step in [Op::EnsureNode, Op::Dump, Op::RemoveAttached, Op::RemoveReachable, Op::RemovePrograms, Op::RemoveLink]
    {
        let machine = Machine::new();
        let hold = machine.kernel.hold(Op::EnsureConnected);
        machine.life(async |agent| {
            let _create = agent.spawn_create(agent.container("interrupted"));
            hold.reached().await;
        });
        hold.release();
        machine.life(async |agent| {
            agent.create("lives").await;
            agent.create("dead").await;
        });
        machine.kernel.remove_netns(&netns_path("dead"));
        let hold = machine.kernel.hold(step);
        assert!(machine.start_and_kill_at(&hold).expect("starts"), "{step:?}");
        hold.release();
        machine.life(async |agent| {
            agent.assert_healthy().await;
            assert_eq!(agent.life.endpoints.registry.len(), 1, "{step:?}");
            agent.del(&attachment("lives", "eth0"), DeleteOptions::default()).await;
            agent.assert_nothing_left().await;
        });
    }
}

#[test]
fn an_agent_that_is_stopped_leaves_its_endpoints_as_they_are_and_nothing_else() {
    let mut machine = Machine::new();
    machine.config.prepared_programs = 3;
    let life = machine.start().expect("starts");
    let record = life.run(async {
        let handle = life.agent.create("c1").await;
        wharf_agent::endpoint::prepared::refill(&life.agent.life).await.expect("refilled");
        handle.shared.read(|v| v.record.clone())
    });
    life.stop();
    let dump = futures::executor::block_on(machine.kernel.dump()).expect("dump");
    assert_eq!((dump.links.len(), dump.pins.len()), (1, 1), "the prepared sets are unpinned");
    machine.life(async |agent| {
        agent.assert_healthy().await;
        assert_eq!(agent.handle(1).shared.read(|v| v.record.clone()), record);
    });
}
