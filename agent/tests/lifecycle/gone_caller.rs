//! Creates whose caller goes away, or whose endpoint is deleted before it is there.

use wharf_api::ErrorCode;
use wharf_core::{plan::DeleteOptions, state::State};
use wharf_datapath::fake::Operation as Op;

use crate::{create_undone::STEPS, support::*};

#[test]
fn a_caller_that_goes_before_anything_was_begun_leaves_nothing() {
    Machine::new().life(async |agent| {
        let hold = agent.kernel.hold(Op::ObserveNetns);
        let create = agent.spawn_create(agent.container("c1"));
        hold.reached().await;
        create.abort();
        assert!(create.await.expect_err("gone").is_cancelled());
        hold.release();
        agent.assert_nothing_left().await;
        assert_eq!(agent.operations(), []);
    });
}

#[test]
fn a_caller_that_goes_during_any_step_leaves_nothing() {
    for step in STEPS {
        Machine::new().life(async |agent| {
            let hold = agent.kernel.hold(step);
            let create = agent.spawn_create(agent.container("c1"));
            hold.reached().await;
            create.abort();
            assert!(create.await.expect_err("gone").is_cancelled());
            hold.release();
            agent.assert_nothing_left().await;
        });
    }
}

#[test]
fn an_endpoint_whose_caller_went_away_during_the_commit_is_taken_back() {
    Machine::new().life(async |agent| {
        let hold = agent.kernel.hold(Op::EnsureReachable);
        let create = agent.spawn_create(agent.container("c1"));
        hold.reached().await;
        agent.disk.hold();
        hold.release();
        agent.disk.reached().await;
        create.abort();
        assert!(create.await.expect_err("gone").is_cancelled());
        let mut events = agent.life.telemetry.monitor.subscribe();
        agent.disk.mend();
        agent.assert_nothing_left().await;
        let mut names = Vec::new();
        while let Ok(event) = events.try_recv() {
            if let wharf_api::MonitorEvent::Agent(e) = &*event {
                names.push(e.event.clone());
            }
        }
        assert_eq!(names, ["endpoint-created", "endpoint-deleted"], "it was complete, and then deleted as any other");
    });
}

#[test]
fn an_endpoint_whose_caller_goes_away_before_it_reads_the_answer_is_taken_back() {
    Machine::new().life(async |agent| {
        let mut create = Box::pin(agent.try_create(agent.container("c1")));
        assert!(futures::poll!(&mut create).is_pending());
        let ready = || agent.life.endpoints.registry.list().iter().any(|h| state(h) == State::Ready);
        eventually("the endpoint is ready", ready).await;
        let_all_run().await;
        drop(create);
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_delete_that_comes_during_any_step_ends_the_create_and_finds_nothing_left() {
    for step in STEPS {
        Machine::new().life(async |agent| {
            let hold = agent.kernel.hold(step);
            let create = agent.spawn_create(agent.container("c1"));
            hold.reached().await;
            let delete = agent.spawn_delete(&[&agent.handle(1)], DeleteOptions::default());
            is_asked(&agent.handle(1)).await;
            let_all_run().await;
            assert!(!delete.is_finished() && !create.is_finished());
            hold.release();
            assert_eq!(create.await.expect("task").expect_err("deleted").code, ErrorCode::Busy);
            let result = delete.await.expect("task");
            assert_eq!((result.deleted, result.errors), (vec![1], vec![]));
            agent.assert_nothing_left().await;
        });
    }
}

#[test]
fn a_delete_that_comes_during_the_commit_deletes_the_endpoint_or_finds_it_undone() {
    Machine::new().life(async |agent| {
        let hold = agent.kernel.hold(Op::EnsureReachable);
        let create = agent.spawn_create(agent.container("c1"));
        hold.reached().await;
        agent.disk.hold();
        hold.release();
        agent.disk.reached().await;
        let delete = agent.spawn_delete(&[&agent.handle(1)], DeleteOptions::default());
        is_asked(&agent.handle(1)).await;
        agent.disk.mend();
        create.await.expect("task").expect("the commit was the last step");
        let result = delete.await.expect("task");
        assert_eq!((result.deleted, result.errors), (vec![1], vec![]));
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_delete_of_an_endpoint_whose_create_could_not_be_undone_says_so() {
    Machine::new().life(async |agent| {
        let hold = agent.kernel.hold(Op::EnsureConfig);
        agent.kernel.fail_next(Op::RemoveLink, wharf_core::kernel::KernelErrorKind::Other);
        let create = agent.spawn_create(agent.container("c1"));
        hold.reached().await;
        let delete = agent.spawn_delete(&[&agent.handle(1)], DeleteOptions::default());
        is_asked(&agent.handle(1)).await;
        hold.release();
        create.await.expect("task").expect_err("deleted");
        let result = delete.await.expect("task");
        assert!(result.deleted.is_empty(), "{result:?}");
        assert_eq!(result.errors.len(), 1, "a delete that left something must not look like a success");
        assert!(result.errors[0].message.contains("remove-link"), "{:?}", result.errors);
    });
}
