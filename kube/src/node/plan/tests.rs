use wharf_feed::v1;

use super::*;

fn condition(name: &str, holds: bool) -> v1::Condition {
    v1::Condition { name: name.into(), holds, message: if holds { String::new() } else { format!("no {name}") } }
}

fn state(ready: bool, routes: bool, is_in_force: bool) -> AgentState {
    let report = v1::Report {
        conditions: vec![condition("Ready", ready), condition("RoutesInForce", routes)],
        problems: Vec::new(),
        router_addresses: vec!["10.1.0.1".into()],
        health_addresses: vec!["10.1.0.9".into(), "fd00::9".into()],
    };
    AgentState { report: Some(report), is_in_force, refused: Vec::new() }
}

fn node(text: Value) -> Node {
    serde_json::from_value(text).expect("a node")
}

fn taint(state: &AgentState, unsettled: Duration) -> Option<bool> {
    Wanted::new(state, unsettled, Duration::ZERO).taint
}

#[test]
fn the_taint_goes_only_with_ready_routes_and_rows_in_force() {
    let soon = Duration::from_secs(1);
    assert_eq!(taint(&state(true, true, true), soon), Some(false));
    assert_eq!(taint(&state(false, true, true), soon), Some(true));
    assert_eq!(taint(&state(true, false, true), soon), None, "routes are on their way");
    assert_eq!(taint(&state(false, false, true), soon), Some(true));
    let late = Wanted::new(&state(true, false, true), Duration::ZERO, GRACE);
    assert_eq!(late.taint, Some(false), "a node that no other can reach closes none");
    let network = late.network.expect("a condition");
    assert_eq!(
        (network.is_available, network.reason, network.message.as_str()),
        (true, "RoutesMissing", "no RoutesInForce")
    );
    assert_eq!(taint(&state(true, true, false), soon), None, "the snapshot is on its way");
    assert_eq!(taint(&state(false, true, false), soon), Some(true));
    assert_eq!(taint(&state(true, true, false), GRACE), Some(true));
    assert_eq!(taint(&AgentState::default(), soon), None, "an agent that restarts");
    assert_eq!(taint(&AgentState::default(), GRACE), Some(true));
    let silent = AgentState { report: Some(v1::Report::default()), is_in_force: true, refused: Vec::new() };
    assert_eq!(taint(&silent, soon), Some(true), "an absent condition does not hold");
}

/// A stream without a complete snapshot, to an agent that reports whether it has every row of an earlier stream.
fn incomplete(ready: bool, routes: bool, has_rows: bool) -> AgentState {
    let mut state = state(ready, routes, false);
    if let Some(report) = &mut state.report {
        report.conditions.push(condition("RowsComplete", has_rows));
    }
    state
}

#[test]
fn an_agent_with_the_rows_of_an_earlier_stream_is_as_one_with_those_of_this_stream() {
    for (ready, routes) in [(true, true), (false, true), (true, false), (false, false)] {
        for (unsettled, without_routes) in [(Duration::ZERO, Duration::ZERO), (GRACE, GRACE)] {
            let wanted = |state: &AgentState| Wanted::new(state, unsettled, without_routes);
            let settled = wanted(&state(ready, routes, true));
            assert_eq!(wanted(&incomplete(ready, routes, true)), settled, "{ready} {routes} {unsettled:?}");
        }
    }
    let mut state = incomplete(true, true, true);
    if let Some(report) = &mut state.report {
        report.health_addresses.clear();
    }
    let removed = Wanted::new(&state, Duration::ZERO, Duration::ZERO).annotations;
    assert_eq!(removed.first(), Some(&(HEALTH, None)));
}

#[test]
fn an_agent_that_never_had_every_row_waits() {
    let new = incomplete(true, true, false);
    assert_eq!(taint(&new, Duration::ZERO), None, "the snapshot is on its way");
    let late = Wanted::new(&new, GRACE, Duration::ZERO);
    assert_eq!((late.taint, late.network.map(|network| network.reason)), (Some(true), Some("WharfIsStarting")));
    let without_report = AgentState { report: None, ..incomplete(true, true, true) };
    assert_eq!(taint(&without_report, GRACE), Some(true));
}

#[test]
fn a_patch_keeps_other_taints_and_names_the_version() {
    let other = json!({"key": "a", "effect": "NoExecute", "value": "v", "timeAdded": "2026-01-01T00:00:00Z"});
    let tainted = node(json!({"metadata": {"name": "a", "resourceVersion": "7"},
        "spec": {"taints": [other, {"key": TAINT, "effect": "NoSchedule"}]}}));
    let wanted = Wanted::new(&state(true, true, true), Duration::ZERO, Duration::ZERO);
    let patch = wanted.patch(&tainted).expect("a patch");
    assert_eq!(patch["metadata"]["resourceVersion"], "7");
    assert_eq!(patch["spec"]["taints"], json!([other]));
    assert_eq!(patch["metadata"]["annotations"][HEALTH], "10.1.0.9,fd00::9");
    let away = Wanted::new(&AgentState::default(), GRACE, Duration::ZERO);
    let plain = node(json!({"metadata": {"name": "a", "resourceVersion": "8"}, "spec": {"taints": [other]}}));
    let patch = away.patch(&plain).expect("a patch");
    assert_eq!(patch["spec"]["taints"], json!([other, {"key": TAINT, "effect": "NoSchedule"}]));
    assert_eq!(patch["metadata"].get("annotations"), None, "an agent that is away removes no address");
    assert_eq!(away.patch(&tainted), None);
}

#[test]
fn a_node_as_wanted_has_no_patch() {
    let wanted = Wanted::new(&state(true, true, true), Duration::ZERO, Duration::ZERO);
    let node =
        node(json!({"metadata": {"name": "a", "annotations": {HEALTH: "10.1.0.9,fd00::9", ROUTERS: "10.1.0.1"}},
        "status": {"conditions": [{"type": CONDITION, "status": "False", "reason": "WharfIsUp",
            "message": "routes to the containers of all nodes are in force"}]}}));
    assert_eq!(wanted.patch(&node), None);
    assert_eq!(wanted.status_patch(&node, Timestamp::UNIX_EPOCH), None);
}

#[test]
fn empty_addresses_remove_an_annotation_of_a_settled_agent_only() {
    let mut state = state(true, true, true);
    if let Some(report) = &mut state.report {
        report.health_addresses.clear();
    }
    let node = node(json!({"metadata": {"name": "a", "annotations": {HEALTH: "10.1.0.9", ROUTERS: "10.1.0.1"}}}));
    let patch = Wanted::new(&state, Duration::ZERO, Duration::ZERO).patch(&node).expect("a patch");
    assert_eq!(patch["metadata"]["annotations"], json!({HEALTH: null}));
    state.is_in_force = false;
    assert_eq!(Wanted::new(&state, Duration::ZERO, Duration::ZERO).patch(&node), None);
}

#[test]
fn the_condition_changes_its_transition_time_only_with_its_status() {
    let now = Timestamp::UNIX_EPOCH;
    let wanted = Wanted::new(&state(true, true, true), Duration::ZERO, Duration::ZERO);
    let patch = wanted.status_patch(&Node::default(), now).expect("a patch");
    let condition = &patch["status"]["conditions"][0];
    assert_eq!((&condition["status"], &condition["reason"]), (&json!("False"), &json!("WharfIsUp")));
    assert_eq!(condition["lastTransitionTime"], "1970-01-01T00:00:00Z");
    let found = node(json!({"metadata": {"name": "a"}, "status": {"conditions": [
        {"type": CONDITION, "status": "True", "reason": "WharfIsAway", "message": "other"}]}}));
    let broken = Wanted::new(&AgentState::default(), GRACE, Duration::ZERO);
    let patch = broken.status_patch(&found, now).expect("a patch");
    let condition = &patch["status"]["conditions"][0];
    assert_eq!(
        (&condition["status"], &condition["message"]),
        (&json!("True"), &json!("the agent of the node is not connected"))
    );
    assert_eq!(condition.get("lastTransitionTime"), None);
    assert_eq!(Wanted::new(&AgentState::default(), Duration::ZERO, Duration::ZERO).status_patch(&found, now), None);
}
