//! Overload: who goes first, who is told to come again, and what hangs.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;
use wharf_agent::stuck;
use wharf_api::ErrorCode;
use wharf_core::{
    admission::AdmissionConfig,
    plan::{CreateStep, DeleteOptions, DeleteStep},
};
use wharf_datapath::fake::Operation as Op;
use wharf_kit::gate::Gate;

use crate::support::*;

#[test]
fn a_node_that_is_idle_refuses_nobody_whatever_it_measured_before() {
    Machine::new().life(async |agent| {
        // Creates that took long, as the gate saw it, and whose callers had little time.
        for n in 0..3 {
            let hold = agent.kernel.hold(Op::EnsureLink);
            let creates: Vec<_> = (0..8).map(|m| agent.spawn_create(agent.container(&format!("c{n}-{m}")))).collect();
            eventually("all are at it", || agent.life.endpoints.admission.gate.status().running == 8).await;
            std::thread::sleep(Duration::from_millis(20)); // what they cost
            hold.release();
            for create in creates {
                create.await.expect("task").expect("created");
            }
        }
        agent.quiet().await;
        assert!(agent.life.endpoints.admission.gate.is_idle());
        for n in 0..3 {
            agent.create(&format!("later-{n}")).await;
        }
        assert_eq!(agent.life.endpoints.admission.gate.status().refused, 0);
        agent.assert_healthy().await;
    });
}

#[test]
fn a_caller_without_patience_is_refused_at_once_when_there_is_no_room_and_leaves_nothing() {
    Machine::new().life(async |agent| {
        let hold = agent.kernel.hold(Op::EnsureLink);
        let running: Vec<_> = (0..8).map(|n| agent.spawn_create(agent.container(&format!("c{n}")))).collect();
        eventually("there is no room", || agent.life.endpoints.admission.gate.status().running == 8).await;
        let mut spec = agent.container("late");
        spec.deadline = Instant::now();
        let error = agent.try_create(spec).await.expect_err("no room");
        assert_eq!(error.code, ErrorCode::Overloaded, "{}", error.message);
        assert!(error.retry_after_ms.is_some_and(|ms| (50..=5_000).contains(&ms)), "{error:?}");
        assert_eq!(agent.life.endpoints.registry.len(), 8, "nothing was reserved for it");
        assert_eq!(agent.life.endpoints.admission.gate.status().refused, 1);
        hold.release();
        for create in running {
            create.await.expect("task").expect("created");
        }
        agent.assert_healthy().await;
        agent.create("late").await;
    });
}

#[test]
fn a_delete_never_waits_for_creates_and_goes_first() {
    Machine::new().life(async |agent| {
        let goes = agent.create("goes").await;
        let hold = agent.kernel.hold(Op::EnsureLink);
        let creates: Vec<_> = (0..20).map(|n| agent.spawn_create(agent.container(&format!("c{n}")))).collect();
        eventually("there is no room", || agent.life.endpoints.admission.gate.status().running == 8).await;
        eventually("others wait", || agent.life.endpoints.admission.gate.status().waiting == 12).await;
        let result = agent.delete(&goes).await;
        assert_eq!((result.deleted, result.errors), (vec![goes.id.get()], vec![]), "while all creates stand still");
        hold.release();
        for create in creates {
            create.await.expect("task").expect("created");
        }
        agent.assert_healthy().await;
        assert_eq!(agent.life.endpoints.registry.len(), 20);
    });
}

/// On a gate whose creates never starve, so that time alone starts none of them.
#[test]
fn while_a_delete_runs_fewer_creates_start() {
    Machine::new().life(async |_| {
        let config = AdmissionConfig { starved_ms: u64::MAX, ..AdmissionConfig::default() };
        let gate = Arc::new(Gate::new(config));
        let deletes = gate.deletes(1);
        let starts: Vec<_> =
            (0..8).map(|_| tokio::spawn(gate.offer(Duration::from_secs(60)).expect("there is room").start())).collect();
        eventually("as many as may run beside a delete do", || {
            gate.status().running == u64::from(config.parallel_while_deleting)
        })
        .await;
        let_all_run().await;
        let status = gate.status();
        assert_eq!((status.running, status.waiting, status.deletes), (2, 6, 1));
        drop(deletes);
        eventually("the others start", || gate.status().running == 8).await;
        for start in starts {
            drop(start.await.expect("task"));
        }
        assert!(gate.is_idle());
    });
}

#[test]
fn a_create_that_gives_its_place_up_leaves_room_for_the_next() {
    Machine::new().life(async |agent| {
        let hold = agent.kernel.hold(Op::EnsureLink);
        let running: Vec<_> = (0..8).map(|n| agent.spawn_create(agent.container(&format!("c{n}")))).collect();
        eventually("there is no room", || agent.life.endpoints.admission.gate.status().running == 8).await;
        let mut spec = agent.container("gives-up");
        spec.deadline = Instant::now() + Duration::from_millis(200);
        let gives_up = agent.spawn_create(spec);
        let waits = agent.spawn_create(agent.container("waits"));
        let error = gives_up.await.expect("task").expect_err("no room in time");
        assert!(matches!(error.code, ErrorCode::DeadlineExceeded | ErrorCode::Overloaded), "{error:?}");
        hold.release();
        for create in running.into_iter().chain([waits]) {
            create.await.expect("task").expect("created");
        }
        agent.assert_healthy().await;
        assert_eq!(agent.life.endpoints.registry.len(), 9);
    });
}

/// Sets back when the step of an endpoint began: as if so much time had passed, for whoever shows it.
fn begun_earlier(agent: &Agent, n: u16, ms: u64) {
    agent.handle(n).shared.update(|v| v.step_since -= Duration::from_millis(ms));
}

#[test]
fn a_step_of_a_create_that_hangs_is_named_with_since_and_bound_until_it_ends() {
    Machine::new().life(async |agent| {
        let hold = agent.kernel.hold(Op::EnsureLink);
        let create = agent.spawn_create(agent.container("c1"));
        hold.reached().await;
        assert_eq!(agent.stuck(), [], "it has its time");
        let bound = CreateStep::EnsureLink.deadline_ms();
        begun_earlier(&agent, 1, bound + 60_000);
        let found = agent.stuck();
        let [step] = &found[..] else { panic!("{found:?}") };
        assert_eq!((step.endpoint, step.step.as_str(), step.bound_ms), (1, "ensure-link", bound));
        assert_eq!(step.attachment, "net/c1:eth0");
        assert!(step.for_ms >= bound + 60_000, "{step:?}");
        hold.release();
        create.await.expect("task").expect("created");
        assert_eq!(agent.stuck(), [], "it has ended");
        agent.assert_healthy().await;
    });
}

#[test]
fn a_step_of_a_delete_that_hangs_is_told_to_the_log_once() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        let hold = agent.kernel.hold(Op::RemoveLink);
        let delete = agent.spawn_delete(&[&handle], DeleteOptions::default());
        hold.reached().await;
        begun_earlier(&agent, 1, DeleteStep::RemoveLink.deadline_ms() + 60_000);
        let mut events = agent.life.telemetry.monitor.subscribe();
        agent.life.tasks.operations.spawn(stuck::watch(agent.life.clone()));
        let told = || log_of(&handle).iter().filter(|l| l.starts_with("stuck: step remove-link")).count();
        eventually("it is told", || told() > 0).await;
        // It looks again each second; the second look is waited for by what it would say of another.
        let other = agent.create("c2").await;
        let second = agent.kernel.hold(Op::EnsureConfig);
        let built = agent.request(&other, wharf_core::state::Level::Policy).await;
        second.reached().await;
        begun_earlier(&agent, 2, CreateStep::EnsureConfig.deadline_ms() + 60_000);
        eventually("the other is told", || log_of(&other).iter().any(|l| l.starts_with("stuck: "))).await;
        assert_eq!(told(), 1, "once");
        let mut names = Vec::new();
        while let Ok(event) = events.try_recv() {
            if let wharf_api::MonitorEvent::Agent(e) = &*event {
                names.push(e.event.clone());
            }
        }
        assert_eq!(names.iter().filter(|n| *n == "endpoint-stuck").count(), 2, "{names:?}");
        second.release();
        drop(built);
        hold.release();
        agent.life.tasks.stop.cancel();
        assert_eq!(delete.await.expect("task").errors, []);
        agent.quiet().await;
        assert_eq!(agent.stuck(), []);
    });
}
