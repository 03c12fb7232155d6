//! Every endpoint's own check: an alarm that a second look confirms, one regeneration for it, and never a false one.

use std::{sync::Arc, time::Duration};

use wharf_agent::{
    endpoint::build::desired_config,
    node::{
        endpoint::Handle,
        self_checks::{AT_ONCE, Lane, PACE},
    },
    selfcheck,
};
use wharf_api::{Health, LogStatus, SelfCheck};
use wharf_common::SetsRow;
use wharf_core::{
    kernel::{EndpointKernel as _, KernelErrorKind as Kind, NodeKernel as _, PolicyKernel as _},
    policy::{Mode, RowChange},
    state::Level,
};
use wharf_datapath::fake::Operation as Op;

use crate::support::*;

async fn visit(agent: &Agent, handle: &Handle) {
    agent.checker().visit(handle).await.expect("checked");
}

fn last(agent: &Agent, handle: &Handle) -> SelfCheck {
    agent.node.self_checks.last(handle.id, handle.epoch)
}

/// Writes another configuration row behind the agent's back: closed, or with another's address.
async fn close_behind_the_back(agent: &Agent, handle: &Handle) {
    let record = handle.shared.read(|v| v.record.clone());
    let mut config = desired_config(&agent.life.config, &agent.life.telemetry.trace_all, &record, false);
    config.live = false;
    agent.kernel.ensure_config(handle.id, &config).await.expect("written");
}

/// Status and message of the log's lines about the self-check.
fn told(handle: &Handle) -> Vec<(LogStatus, String)> {
    let lines = handle.shared.log_lines().into_iter().filter(|l| l.event == "self-check");
    lines.map(|l| (l.status, l.message)).collect()
}

fn regenerations(handle: &Handle) -> u64 {
    handle.shared.read(|v| v.status.regenerations)
}

#[test]
fn an_endpoint_that_does_as_desired_raises_no_alarm() {
    Machine::new().life(async |agent| {
        let (a, b) = (agent.create("a").await, agent.create("b").await);
        assert_eq!(last(&agent, &a), SelfCheck::default(), "not looked at yet");
        for handle in [&a, &b] {
            visit(&agent, handle).await;
            let seen = last(&agent, handle);
            assert_eq!((seen.state, seen.cases.len(), seen.alarm), (Health::Ok, 14, None));
            assert!(seen.cases.iter().all(|c| c.ok && c.got == c.expected));
            assert_eq!(told(handle), []);
        }
        assert_eq!(
            selfcheck::component(&agent.node.self_checks, agent.life.config.selfcheck_interval).health,
            Health::Ok
        );
        agent.assert_healthy().await;
    });
}

/// A runtime that starts sends a CHECK for each of its containers.
#[test]
fn clients_do_not_wait_for_the_pace_of_the_background() {
    Machine::new().life(async |agent| {
        let handles = [agent.create("a").await, agent.create("b").await, agent.create("c").await];
        tokio::time::pause();
        let began = tokio::time::Instant::now();
        visit(&agent, &handles[0]).await;
        let checker = agent.checker();
        let asked = handles.iter().cycle().take(30).map(|handle| checker.ask(handle, Lane::Client));
        let seen = futures::future::join_all(asked).await;
        assert!(seen.iter().all(|s| s.state == Health::Ok && s.error.is_none()), "{seen:?}");
        assert_eq!(began.elapsed(), Duration::ZERO, "clients waited");
        visit(&agent, &handles[0]).await;
        assert!(began.elapsed() >= PACE, "the background has no pace");
        tokio::time::resume();
    });
}

/// A hundred CHECKs come at once while other clients' checks do not end.
#[test]
fn a_check_waits_for_no_other_client_and_takes_one_look() {
    Machine::new().life(async |agent| {
        let handles = [agent.create("a").await, agent.create("b").await, agent.create("c").await];
        let looks = || agent.kernel.call_log().iter().filter(|(op, _)| *op == Op::ObserveVerdicts).count();
        let before = looks();
        let stuck = agent.kernel.hold(Op::ObserveVerdicts);
        let mut clients = tokio::task::JoinSet::new();
        for _ in 0..2 * AT_ONCE {
            let (agent, handle) = (agent.clone(), handles[0].clone());
            clients.spawn(async move { agent.checker().ask(&handle, Lane::Client).await });
        }
        eventually("clients stand in the kernel", || looks() == before + AT_ONCE).await;
        let_all_run().await;
        assert_eq!(looks(), before + AT_ONCE, "a bounded number at a time");
        // Calls that come from now on pass; those at the first hold stay there.
        agent.kernel.hold(Op::ObserveVerdicts).release();
        let checker = agent.checker();
        let checks = handles.iter().cycle().take(100).map(|handle| checker.ask(handle, Lane::Check));
        let seen = futures::future::join_all(checks).await;
        assert!(seen.iter().all(|s| s.state == Health::Ok && s.error.is_none()), "{seen:?}");
        assert_eq!(looks(), before + AT_ONCE + 100, "one look for each, while no other client got a turn");
        stuck.release();
        clients.join_all().await;
    });
}

#[test]
fn a_mismatch_is_told_with_both_sides_and_regenerated_away() {
    Machine::new().life(async |agent| {
        let handle = agent.create("a").await;
        close_behind_the_back(&agent, &handle).await;
        let before = regenerations(&handle);
        visit(&agent, &handle).await;
        assert_eq!(regenerations(&handle), before + 1);
        let [(LogStatus::Failure, alarm), (LogStatus::Ok, end)] = &told(&handle)[..] else {
            panic!("{:?}", told(&handle));
        };
        let both = "to-gateway-ipv4: expected pass, egress forwarded-stack; got drop, egress endpoint-not-ready";
        assert!(alarm.starts_with(both), "{alarm}");
        assert!(end.contains("regenerated the datapath"), "{end}");
        let seen = last(&agent, &handle);
        assert_eq!((seen.state, seen.alarm), (Health::Ok, None));
        agent.assert_healthy().await;
    });
}

#[test]
fn an_alarm_asks_for_one_regeneration_and_lasts_until_the_endpoint_is_well() {
    Machine::new().life(async |agent| {
        let handle = agent.create("a").await;
        close_behind_the_back(&agent, &handle).await;
        agent.kernel.fail_next(Op::EnsurePrograms, Kind::Exhausted);
        let hold = agent.kernel.hold(Op::EnsureConfig);
        // The first build fails before it comes to the row; its retry stands at the hold.
        visit(&agent, &handle).await;
        let alarm = last(&agent, &handle).alarm.expect("an alarm");
        assert!(alarm.done.contains("which failed"), "{}", alarm.done);
        let component = selfcheck::component(&agent.node.self_checks, agent.life.config.selfcheck_interval);
        assert_eq!(component.health, Health::Degraded);
        let hint = format!("wharf endpoint health {}", handle.id);
        assert!(component.message.contains(&hint), "{}", component.message);
        assert_eq!(agent.node.self_checks.failing(), 1);
        hold.reached().await;
        visit(&agent, &handle).await;
        assert_eq!(last(&agent, &handle).alarm, Some(alarm), "what is being built is not judged");
        hold.release();
        eventually("the retry succeeds", || regenerations(&handle) > 0).await;
        agent.quiet().await;
        visit(&agent, &handle).await;
        assert_eq!(last(&agent, &handle).alarm, None);
        assert_eq!(told(&handle).len(), 2, "told when it began and when it ended: {:?}", told(&handle));
        assert_eq!(agent.node.self_checks.failing(), 0);
        agent.assert_healthy().await;
    });
}

#[test]
fn one_endpoint_is_no_failure_of_the_node_and_most_endpoints_are() {
    Machine::new().life(async |agent| {
        let handles = [agent.create("a").await, agent.create("b").await, agent.create("c").await];
        for handle in &handles {
            visit(&agent, handle).await;
        }
        agent.kernel.fail_always(Op::EnsurePrograms, Kind::Exhausted);
        let of_node = async |handle: &Handle| {
            close_behind_the_back(&agent, handle).await;
            visit(&agent, handle).await;
            assert!(last(&agent, handle).alarm.is_some());
            selfcheck::of_node(&agent.node.self_checks)
        };
        assert_eq!(of_node(&handles[0]).await, None);
        let why = of_node(&handles[1]).await.expect("most endpoints fail");
        assert!(why.starts_with("2 of 3 endpoints"), "{why}");
    });
}

#[test]
fn a_client_that_sees_the_endpoint_well_ends_the_alarm() {
    Machine::new().life(async |agent| {
        let handle = agent.create("a").await;
        close_behind_the_back(&agent, &handle).await;
        agent.kernel.fail_next(Op::EnsurePrograms, Kind::Exhausted);
        visit(&agent, &handle).await;
        assert!(last(&agent, &handle).alarm.is_some());
        eventually("the retry succeeds", || regenerations(&handle) > 0).await;
        agent.quiet().await;
        assert!(last(&agent, &handle).alarm.is_some(), "nobody has looked since");
        let asked = agent.checker().ask(&handle, Lane::Client).await;
        assert_eq!((asked.state, asked.alarm), (Health::Ok, None));
        assert_eq!(
            selfcheck::component(&agent.node.self_checks, agent.life.config.selfcheck_interval).health,
            Health::Ok
        );
    });
}

#[test]
fn a_second_alarm_asks_again() {
    Machine::new().life(async |agent| {
        let handle = agent.create("a").await;
        for n in 1..=2 {
            close_behind_the_back(&agent, &handle).await;
            visit(&agent, &handle).await;
            assert_eq!(told(&handle).len(), 2 * n);
        }
        agent.assert_healthy().await;
    });
}

#[test]
fn what_changes_meanwhile_is_not_judged() {
    Machine::new().life(async |agent| {
        let handle = agent.create("a").await;
        let hold = agent.kernel.hold(Op::ObserveVerdicts);
        let (asked, of) = (agent.clone(), handle.clone());
        let looking = tokio::spawn(async move { asked.checker().visit(&of).await });
        hold.reached().await;
        close_behind_the_back(&agent, &handle).await;
        // Began and ended while the test packets were under way.
        let built = agent.request(&handle, Level::Datapath).await;
        built.await.expect("answered").expect("built");
        close_behind_the_back(&agent, &handle).await;
        hold.release();
        looking.await.expect("ends").expect("checked");
        assert_eq!((last(&agent, &handle), told(&handle)), (SelfCheck::default(), vec![]));
        let guard = agent.life.endpoints.jobs.working_on(handle.id);
        visit(&agent, &handle).await;
        assert_eq!(last(&agent, &handle), SelfCheck::default(), "something works on it");
        drop(guard);
        visit(&agent, &handle).await;
        assert_eq!(told(&handle).len(), 2);
        agent.assert_healthy().await;
    });
}

#[test]
fn an_endpoint_that_is_deleted_meanwhile_is_not_judged_and_leaves_nothing() {
    Machine::new().life(async |agent| {
        let handle = agent.create("a").await;
        let hold = agent.kernel.hold(Op::ObserveVerdicts);
        let (asked, of) = (agent.clone(), handle.clone());
        let looking = tokio::spawn(async move { asked.checker().visit(&of).await });
        hold.reached().await;
        assert_eq!(agent.delete(&handle).await.errors, []);
        hold.release();
        looking.await.expect("ends").expect("checked");
        assert_eq!((last(&agent, &handle), told(&handle)), (SelfCheck::default(), vec![]));
        assert!(agent.kernel.is_clean());
    });
}

#[test]
fn a_kernel_that_cannot_be_asked_says_nothing_about_the_endpoint() {
    Machine::new().life(async |agent| {
        let handle = agent.create("a").await;
        agent.kernel.fail_next(Op::ObserveVerdicts, Kind::Exhausted);
        let why = agent.checker().visit(&handle).await.expect_err("not asked");
        assert!(why.to_string().starts_with(&format!("check endpoint {}: ", handle.id)), "{why}");
        assert_eq!((last(&agent, &handle), told(&handle)), (SelfCheck::default(), vec![]));
        agent.kernel.fail_next(Op::ObserveVerdicts, Kind::Exhausted);
        let shown = agent.checker().ask(&handle, Lane::Client).await;
        assert_eq!((shown.state, shown.error.is_some()), (Health::Pending, true));
        agent.assert_healthy().await;
    });
}

#[test]
fn maps_that_are_gone_are_an_alarm_too() {
    Machine::new().life(async |agent| {
        let handle = agent.create("a").await;
        agent.kernel.remove_programs(handle.id).await.expect("removed");
        visit(&agent, &handle).await;
        let lines = told(&handle);
        assert!(lines.first().is_some_and(|(_, m)| m.starts_with("maps: expected pinned")), "{lines:?}");
        assert_eq!((lines.len(), last(&agent, &handle).alarm), (2, None), "regenerated");
        agent.assert_healthy().await;
    });
}

#[test]
fn a_client_is_shown_a_mismatch_and_changes_nothing() {
    Machine::new().life(async |agent| {
        let handle = agent.create("a").await;
        close_behind_the_back(&agent, &handle).await;
        let before = regenerations(&handle);
        let shown = agent.checker().ask(&handle, Lane::Client).await;
        assert_eq!((shown.state, shown.alarm), (Health::Failing, None));
        assert!(shown.cases.iter().any(|c| !c.ok && c.got.contains("endpoint-not-ready")), "{:?}", shown.cases);
        assert_eq!((regenerations(&handle), told(&handle)), (before, vec![]));
        visit(&agent, &handle).await;
        assert_eq!(agent.checker().ask(&handle, Lane::Client).await.state, Health::Ok);
        agent.assert_healthy().await;
    });
}

#[test]
fn the_other_endpoints_fault_is_told_of_the_other_alone() {
    Machine::new().life(async |agent| {
        let (a, b) = (agent.create("a").await, agent.create("b").await);
        agent.kernel.remove_call_slot(u32::from(b.id.get())).await.expect("emptied");
        visit(&agent, &a).await;
        let seen = last(&agent, &a);
        assert_eq!((seen.state, seen.cases.len(), told(&a)), (Health::Ok, 12, vec![]), "a does what it should");
        visit(&agent, &b).await;
        assert_eq!((told(&b).len(), last(&agent, &b).alarm), (2, None), "b was told of, and regenerated");
        visit(&agent, &a).await;
        assert_eq!(last(&agent, &a).cases.len(), 14);
        agent.assert_healthy().await;
    });
}

#[test]
fn the_controller_sees_every_endpoint_and_forgets_those_that_are_gone() {
    let mut machine = Machine::new();
    machine.config.selfcheck_interval = std::time::Duration::from_millis(100);
    machine.life(async |agent| {
        let watching = tokio::spawn(selfcheck::watch(Arc::clone(&agent.life), Arc::clone(&agent.node.self_checks)));
        let (a, b) = (agent.create("a").await, agent.create("b").await);
        let seen = |h: &Handle| last(&agent, h).checked_unix_ms.is_some();
        eventually("both were looked at", || seen(&a) && seen(&b)).await;
        assert_eq!(agent.delete(&a).await.errors, []);
        eventually("the deleted one is forgotten", || !seen(&a)).await;
        close_behind_the_back(&agent, &b).await;
        eventually("the alarm has come and gone", || told(&b).len() == 2).await;
        agent.life.tasks.stop.cancel();
        watching.await.expect("ends");
        let row = agent.life.tasks.controllers.list().into_iter().find(|c| c.name == selfcheck::CONTROLLER);
        assert!(row.is_some_and(|c| c.successes > 0 && c.failures == 0));
    });
}

#[test]
fn rules_of_policy_are_tried_and_those_that_somebody_changed_are_written_again() {
    const DB: &str = "{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: db}, spec: {podSelector: {}, \
                      ingress: [{from: [{ipBlock: {cidr: 198.51.100.0/24}}], ports: [{port: 5432}]}]}}";
    Machine::new().life(async |agent| {
        let handle = agent.create("a").await;
        agent.life.policy.import("db.yaml", DB).await.expect("imported");
        visit(&agent, &handle).await;
        let seen = last(&agent, &handle);
        let of_policy = |name: &str| seen.cases.iter().filter(|case| case.name.starts_with(name)).count();
        assert_eq!(seen.state, Health::Ok, "{seen:?}");
        assert_eq!(
            (of_policy("ingress-allowed"), of_policy("ingress-denied"), of_policy("egress")),
            (1, 2, 0),
            "{seen:?}"
        );

        let rows = agent.kernel.observe_policy().await.expect("rows");
        let open = RowChange::Sets(handle.id, SetsRow::default());
        agent.kernel.change_policy(vec![open], Mode::default()).await.expect("written");
        visit(&agent, &handle).await;
        let [(LogStatus::Failure, alarm), (LogStatus::Ok, _)] = &told(&handle)[..] else {
            panic!("{:?}", told(&handle));
        };
        assert!(alarm.starts_with("ingress-denied-ipv4: expected drop, ingress policy-denied; got pass"), "{alarm}");
        let now = agent.kernel.observe_policy().await.expect("rows");
        assert_ne!(now.sets[&handle.id].ingress, 0, "a rule set of another number");
        assert_eq!(now.cells.len(), rows.cells.len());
        agent.assert_healthy().await;
    });
}
