//! Endpoints whose container is gone and whose DEL never comes.

use std::time::Duration;

use wharf_agent::{endpoint::abandoned, node::endpoint::Handle};
use wharf_core::{kernel::KernelErrorKind as Kind, state::State};
use wharf_datapath::fake::Operation as Op;

use crate::support::*;

async fn look(agent: &Agent) {
    abandoned::look(&agent.life).await.expect("looked");
    let_all_run().await;
}

/// Names of the agent's events so far.
fn events(events: &mut tokio::sync::broadcast::Receiver<std::sync::Arc<wharf_api::MonitorEvent>>) -> Vec<String> {
    let mut names = Vec::new();
    while let Ok(event) = events.try_recv() {
        if let wharf_api::MonitorEvent::Agent(e) = &*event {
            names.push(e.event.clone());
        }
    }
    names
}

fn waits_for(handle: &Handle) -> String {
    handle.shared.read(|v| format!("{}; {}", v.status.waits_for, v.status.ends_when))
}

#[test]
fn an_endpoint_without_its_namespace_is_not_ready_and_a_later_del_succeeds() {
    Machine::new().life(async |agent| {
        let [gone, living] = [agent.create("gone").await, agent.create("living").await];
        look(&agent).await;
        assert_eq!([&gone, &living].map(state), [State::Ready; 2]);
        let mut told = agent.life.telemetry.monitor.subscribe();
        agent.kernel.remove_netns(&netns_path("gone"));
        look(&agent).await;
        look(&agent).await;
        assert_eq!([&gone, &living].map(state), [State::Disconnecting, State::Ready]);
        assert!(waits_for(&gone).contains("DEL") && waits_for(&gone).contains("60 s"), "{}", waits_for(&gone));
        assert_eq!(events(&mut told), ["endpoint-netns-gone"], "told once");
        assert_eq!(agent.findings(true).await, [], "the agent deletes it, so the audit has nothing to mend");
        assert_eq!(agent.delete(&gone).await.errors, []);
        assert_eq!(agent.delete(&living).await.errors, []);
        agent.assert_nothing_left().await;
    });
}

#[test]
fn the_agent_deletes_it_after_the_grace_time() {
    let mut machine = Machine::new();
    machine.config.gone_grace = Duration::ZERO;
    machine.life(async |agent| {
        let (gone, bystander) = (agent.create("gone").await, agent.create("bystander").await);
        agent.kernel.remove_netns(&netns_path("gone"));
        let mut told = agent.life.telemetry.monitor.subscribe();
        look(&agent).await;
        look(&agent).await;
        assert!(
            agent.life.endpoints.registry.get(gone.id).is_none_or(|there| there.epoch != gone.epoch),
            "still there"
        );
        assert_eq!(events(&mut told), ["endpoint-netns-gone", "endpoint-abandoned", "endpoint-deleted"]);
        assert_eq!(state(&bystander), State::Ready);
        assert_eq!(agent.delete(&bystander).await.errors, []);
        agent.assert_nothing_left().await;
    });
}

#[test]
fn one_delete_that_does_not_end_keeps_no_other_waiting() {
    let mut machine = Machine::new();
    machine.config.gone_grace = Duration::ZERO;
    machine.life(async |agent| {
        for name in ["a", "b", "c"] {
            agent.create(name).await;
            agent.kernel.remove_netns(&netns_path(name));
        }
        look(&agent).await;
        let unpinned = || agent.kernel.call_log().iter().filter(|(op, _)| *op == Op::RemovePrograms).count();
        let (before, hold) = (unpinned(), agent.kernel.hold(Op::RemovePrograms));
        let deleting = agent.clone();
        let deleting = tokio::spawn(async move { abandoned::look(&deleting.life).await });
        eventually("all deletes come to the same step", || unpinned() == before + 3).await;
        hold.release();
        deleting.await.expect("ends").expect("deleted");
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_delete_that_fails_is_resumed_as_any_other() {
    let mut machine = Machine::new();
    machine.config.gone_grace = Duration::ZERO;
    machine.life(async |agent| {
        let gone = agent.create("gone").await;
        agent.kernel.remove_netns(&netns_path("gone"));
        look(&agent).await;
        agent.kernel.fail_next(Op::RemovePrograms, Kind::Exhausted);
        let failed = abandoned::look(&agent.life).await.expect_err("a step failed").to_string();
        assert!(failed.contains("unpin"), "{failed}");
        assert!(!gone.is_abandoned(), "a delete has begun");
        wharf_agent::endpoint::resume::resume(&agent.life).await.expect("resumed");
        agent.assert_nothing_left().await;
    });
}

/// A container can delete its link; a runtime, or a restart in other mounts, can hide its namespace.
#[test]
fn a_link_that_is_gone_with_its_namespace_there_is_no_proof() {
    let mut machine = Machine::new();
    machine.config.gone_grace = Duration::ZERO;
    machine.life(async |agent| {
        let handle = agent.create("c1").await;
        let host = handle.shared.read(|v| v.record.host_ifname.clone());
        assert!(agent.kernel.remove_link_behind_the_back(host.as_str()));
        look(&agent).await;
        look(&agent).await;
        assert_eq!(state(&handle), State::Ready);
        assert_eq!(agent.delete(&handle).await.errors, []);
        agent.assert_nothing_left().await;
    });
}
