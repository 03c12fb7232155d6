#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    path::Path,
};

use proptest::prelude::*;

use super::*;

const NOW: u64 = 1_000;

fn after(fsm: Fsm, events: &[Event]) -> Fsm {
    events.iter().fold(fsm, |fsm, event| fsm.step(*event, NOW).unwrap().0)
}

fn ready() -> Fsm {
    after(Fsm::new_created(NOW), &[Event::IdentityResolved, Event::BuildStarted, Event::BuildSucceeded])
}

/// Without times and failures, which affect only a build's start.
fn shape(fsm: &Fsm) -> String {
    let level = |level: Option<Level>| level.map_or("nothing", Level::as_str);
    let mut text = format!("owes {}", level(fsm.owed));
    if let Some(building) = fsm.building {
        write!(text, ", builds {building}").unwrap();
    }
    if !fsm.realized {
        text.push_str(", never built");
    }
    text
}

fn reachable() -> BTreeMap<State, BTreeMap<String, Fsm>> {
    let mut found: BTreeMap<State, BTreeMap<String, Fsm>> = BTreeMap::new();
    let mut open = vec![Fsm::new_created(NOW), Fsm::new_restored(NOW)];
    while let Some(fsm) = open.pop() {
        if found.entry(fsm.state).or_default().insert(shape(&fsm), fsm.clone()).is_none() {
            open.extend(Event::ALL.iter().filter_map(|event| fsm.step(*event, NOW).ok()).map(|(next, _)| next));
        }
    }
    found
}

fn outcome(fsm: &Fsm, event: Event) -> String {
    match fsm.step(event, NOW) {
        Err(rejected) => format!("refused: {}", rejected.why),
        Ok((next, actions)) => {
            let mut text = format!("{} ({})", next.state, shape(&next));
            for action in actions {
                match action {
                    Action::QueueBuild { level, .. } => write!(text, " + queue-build({level})").unwrap(),
                    other => write!(text, " + {other}").unwrap(),
                }
            }
            text
        }
    }
}

#[test]
fn every_state_is_reachable() {
    let states: BTreeSet<State> = reachable().into_keys().collect();
    assert_eq!(states, BTreeSet::from(State::ALL));
}

#[test]
fn the_table_of_every_state_and_event_is_the_one_checked_in() {
    let mut table = String::new();
    for (state, shapes) in reachable() {
        writeln!(table, "## {state}").unwrap();
        for event in Event::ALL {
            let mut outcomes: BTreeMap<String, Vec<&str>> = BTreeMap::new();
            for (shape, fsm) in &shapes {
                outcomes.entry(outcome(fsm, event)).or_default().push(shape);
            }
            if let [(outcome, _)] = outcomes.iter().collect::<Vec<_>>().as_slice() {
                writeln!(table, "{event} -> {outcome}").unwrap();
                continue;
            }
            writeln!(table, "{event}").unwrap();
            for (outcome, shapes) in outcomes {
                writeln!(table, "    [{}] -> {outcome}", shapes.join("; ")).unwrap();
            }
        }
        table.push('\n');
    }
    insta::assert_snapshot!("state_table", table);
}

/// Target states, and whether the event may be rejected.
fn successors(shapes: &BTreeMap<String, Fsm>, event: Event) -> (BTreeSet<State>, bool) {
    let steps: Vec<_> = shapes.values().map(|fsm| fsm.step(event, NOW)).collect();
    let refused = steps.iter().any(Result::is_err);
    (steps.into_iter().flatten().map(|(next, _)| next.state).collect(), refused)
}

fn document() -> String {
    let reachable = reachable();
    let mut text = String::from(
        "# Endpoint states\n\n\
         Written by a test of `wharf-core` from `crates/core/src/state.rs`; do not edit. After a change of the state machine:\n\
         `WHARF_UPDATE_DOCS=1 cargo test -p wharf-core state`. The same table with what each move owes and does is\n\
         `crates/core/src/state/snapshots/`.\n\n\
         ```mermaid\nstateDiagram-v2\n    [*] --> waiting_for_identity: created\n    [*] --> restoring: read from the store\n",
    );
    let node = |state: State| state.as_str().replace('-', "_");
    let mut arrows: BTreeMap<(State, State), Vec<String>> = BTreeMap::new();
    for (state, shapes) in &reachable {
        for event in Event::ALL {
            for to in successors(shapes, event).0.into_iter().filter(|to| to != state) {
                arrows.entry((*state, to)).or_default().push(event.to_string());
            }
        }
    }
    for ((from, to), events) in arrows {
        writeln!(text, "    {} --> {}: {}", node(from), node(to), events.join(", ")).unwrap();
    }
    for state in State::ALL.into_iter().filter(|s| s.is_terminal()) {
        writeln!(text, "    {} --> [*]", node(state)).unwrap();
    }
    text.push_str(
        "```\n\nA cell names the state after the event; `stays` is an accepted event that is remembered or already answered;\n\
         `-` is refused: counted, shown in the endpoint's log, and nothing changes. Two answers in a cell depend on what the\n\
         endpoint owes, or on whether it was ever built.\n\n| event |",
    );
    for state in State::ALL {
        write!(text, " {state} |").unwrap();
    }
    text.push_str("\n|---|");
    text.push_str(&"---|".repeat(State::ALL.len()));
    text.push('\n');
    for event in Event::ALL {
        write!(text, "| {event} |").unwrap();
        for (state, shapes) in &reachable {
            let (next, refused) = successors(shapes, event);
            let mut cell: Vec<&str> = next.iter().map(|to| if to == state { "stays" } else { to.as_str() }).collect();
            if refused {
                cell.push("-");
            }
            write!(text, " {} |", cell.join(" / ")).unwrap();
        }
        text.push('\n');
    }
    text
}

#[test]
fn the_diagram_in_the_documentation_is_the_machine() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/endpoint-states.md");
    let wanted = document();
    if std::env::var_os("WHARF_UPDATE_DOCS").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, &wanted).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == wanted,
        "{} is not up to date; run: WHARF_UPDATE_DOCS=1 cargo test -p wharf-core state",
        path.display()
    );
}

#[test]
fn names_are_those_of_serde() {
    for state in State::ALL {
        assert_eq!(serde_plain(&state), state.as_str());
    }
    for level in [Level::Policy, Level::Datapath] {
        assert_eq!(serde_plain(&level), level.as_str());
    }
}

fn serde_plain(value: &impl Serialize) -> String {
    serde_json::to_value(value).unwrap().as_str().unwrap().to_owned()
}

#[test]
fn a_request_while_a_build_runs_is_built_after_it() {
    let running = after(ready(), &[Event::BuildRequested(Level::Policy), Event::BuildStarted]);
    let asked = after(running, &[Event::BuildRequested(Level::Datapath), Event::BuildRequested(Level::Policy)]);
    assert_eq!((asked.state, asked.owed), (State::Regenerating, Some(Level::Datapath)));

    let (next, actions) = asked.step(Event::BuildSucceeded, NOW + 5).unwrap();
    assert_eq!((next.state, next.owed, next.since_ms), (State::WaitingToRegenerate, Some(Level::Datapath), NOW + 5));
    assert_eq!(actions, [Action::QueueBuild { level: Level::Datapath, not_before_ms: NOW + 5 }]);
}

#[test]
fn a_failed_build_is_owed_at_its_level_and_backs_off() {
    let running = after(ready(), &[Event::BuildRequested(Level::Datapath), Event::BuildStarted]);
    let (failed, actions) = running.step(Event::BuildFailed, NOW).unwrap();
    assert_eq!((failed.state, failed.owed, failed.failures), (State::WaitingToRegenerate, Some(Level::Datapath), 1));
    assert_eq!(actions, [Action::QueueBuild { level: Level::Datapath, not_before_ms: NOW + 100 }]);

    let again = after(failed, &[Event::BuildStarted]);
    let (failed, actions) = again.step_with_jitter(Event::BuildFailed, NOW + 100, 0.0).unwrap();
    assert_eq!(failed.failures, 2);
    assert_eq!(actions, [Action::QueueBuild { level: Level::Datapath, not_before_ms: NOW + 200 }]);

    let (mended, _) = after(failed, &[Event::BuildStarted]).step(Event::BuildSucceeded, NOW + 300).unwrap();
    assert_eq!((mended.state, mended.failures, mended.owed), (State::Ready, 0, None));
}

#[test]
fn a_request_does_not_shorten_the_backoff() {
    let running = after(ready(), &[Event::BuildRequested(Level::Policy), Event::BuildStarted]);
    let (failed, _) = running.step(Event::BuildFailed, NOW).unwrap();
    let (same, actions) = failed.step(Event::BuildRequested(Level::Policy), NOW + 1).unwrap();
    assert_eq!((&same, actions.as_slice()), (&failed, [].as_slice()));
    let (raised, actions) = failed.step(Event::BuildRequested(Level::Datapath), NOW + 1).unwrap();
    assert_eq!(raised.since_ms, failed.since_ms);
    assert_eq!(actions, [Action::QueueBuild { level: Level::Datapath, not_before_ms: NOW + 100 }]);
}

#[test]
fn an_identity_that_is_lost_keeps_the_build_owed() {
    let running = after(ready(), &[Event::BuildRequested(Level::Datapath), Event::BuildStarted]);
    let (lost, actions) = running.step(Event::IdentityLost, NOW).unwrap();
    assert_eq!((lost.state, lost.owed, lost.building), (State::WaitingForIdentity, Some(Level::Datapath), None));
    assert_eq!(actions, [Action::CancelBuild]);
    let (found, actions) = lost.step(Event::IdentityResolved, NOW + 7).unwrap();
    assert_eq!(found.state, State::WaitingToRegenerate);
    assert_eq!(actions, [Action::QueueBuild { level: Level::Datapath, not_before_ms: NOW + 7 }]);
}

#[test]
fn a_create_can_fail_only_before_its_first_build_has_succeeded() {
    let first = after(Fsm::new_created(NOW), &[Event::IdentityResolved, Event::BuildStarted]);
    let (failed, actions) = first.step(Event::CreateFailed, NOW).unwrap();
    assert_eq!(failed.state, State::Invalid);
    assert_eq!(actions, [Action::CancelBuild, Action::PublishRemoval]);

    let later = after(ready(), &[Event::BuildRequested(Level::Policy), Event::BuildStarted]);
    let rejected = later.step(Event::CreateFailed, NOW).unwrap_err();
    assert_eq!(rejected.to_string(), "create-failed refused in state regenerating: its create has succeeded");
}

#[test]
fn delays_grow_to_a_cap_and_jitter_halves_them_at_most() {
    assert_eq!(retry_delay_ms(0, 1.0), 0);
    let whole: Vec<u64> = (1..=11).map(|n| retry_delay_ms(n, 1.0)).collect();
    assert_eq!(whole, [100, 200, 400, 800, 1600, 3200, 6400, 12_800, 25_600, 30_000, 30_000]);
    assert_eq!(retry_delay_ms(u32::MAX, 1.0), 30_000);
    assert_eq!(retry_delay_ms(u32::MAX, 0.0), 15_000);
    assert_eq!(retry_delay_ms(1, 0.5), 75);
    for odd in [f64::NAN, f64::INFINITY, 2.0] {
        assert_eq!(retry_delay_ms(1, odd), 100);
    }
    assert_eq!(retry_delay_ms(1, -1.0), 50);
}

fn any_start() -> impl Strategy<Value = Fsm> {
    prop_oneof![Just(Fsm::new_created(NOW)), Just(Fsm::new_restored(NOW))]
}

fn any_events() -> impl Strategy<Value = Vec<(Event, u64)>> {
    // Deletes and failed creates end a run; they are rare.
    let event = prop_oneof![
        20 => prop::sample::select(&Event::ALL[..8]),
        1 => prop::sample::select(&Event::ALL[8..]),
    ];
    prop::collection::vec((event, 0u64..500), 1..80)
}

proptest! {
    #[test]
    fn nothing_leads_out_of_a_terminal_state(start in any_start(), events in any_events()) {
        let mut fsm = start;
        let mut now = NOW;
        for (event, elapsed) in events {
            now += elapsed;
            let terminal = fsm.state.is_terminal();
            if let Ok((next, _)) = fsm.step(event, now) {
                prop_assert!(!terminal, "{event} led out of {}", fsm.state);
                fsm = next;
            }
        }
    }

    #[test]
    fn an_owed_build_is_never_forgotten(start in any_start(), events in any_events()) {
        // Outstanding builds, independent of the state machine.
        let mut wanted: Option<Level> = Some(Level::Datapath);
        let mut running: Option<Level> = None;
        let mut queued: Option<(Level, u64)> = None;
        let mut fsm = start;
        let mut now = NOW;
        for (event, elapsed) in events {
            now += elapsed;
            let before = fsm.clone();
            if event == Event::BuildStarted && queued.is_none_or(|(_, not_before)| now < not_before) {
                continue;
            }
            let Ok((next, actions)) = fsm.step(event, now) else {
                prop_assert!(event != Event::BuildStarted, "a queued build was refused in {}", before.state);
                continue;
            };
            for action in &actions {
                match action {
                    Action::QueueBuild { level, not_before_ms } => {
                        prop_assert!(*not_before_ms >= now);
                        queued = Some((*level, *not_before_ms));
                    }
                    Action::CancelBuild => {
                        queued = None;
                        wanted = wanted.max(running.take());
                    }
                    Action::RunDelete | Action::PublishRemoval => {}
                }
            }
            match event {
                Event::BuildRequested(level) => wanted = wanted.max(Some(level)),
                Event::BuildStarted => {
                    let (level, _) = queued.take().unwrap();
                    prop_assert!(Some(level) >= wanted, "builds {level}, wanted {wanted:?}");
                    running = Some(level);
                    wanted = None;
                }
                Event::BuildSucceeded => running = None,
                Event::BuildFailed => wanted = wanted.max(running.take()),
                _ => {}
            }
            fsm = next;
            match fsm.state {
                State::Disconnecting | State::Disconnected | State::Invalid => {
                    prop_assert_eq!((fsm.owed, fsm.building), (None, None));
                    break;
                }
                State::Ready => {
                    prop_assert_eq!((fsm.owed, fsm.building, fsm.failures), (None, None, 0));
                    prop_assert_eq!((wanted, queued), (None, None));
                }
                state => {
                    prop_assert_eq!(fsm.building.is_some(), state == State::Regenerating);
                    prop_assert!(fsm.owed >= wanted, "owed {:?}, wanted {wanted:?} in {state}", fsm.owed);
                    prop_assert!(fsm.owed.is_some() || fsm.building.is_some());
                    if state == State::WaitingToRegenerate {
                        prop_assert_eq!(queued.map(|(level, _)| level), fsm.owed);
                    }
                }
            }
        }
    }

    #[test]
    fn a_delete_is_always_possible_until_the_end(start in any_start(), events in any_events()) {
        let mut fsm = start;
        for (event, _) in events {
            if let Ok((next, _)) = fsm.step(event, NOW) {
                fsm = next;
            }
            let delete = fsm.step(Event::DeleteRequested, NOW);
            if fsm.state.is_terminal() || fsm.state == State::Disconnecting {
                prop_assert!(delete.is_err());
            } else {
                let (next, actions) = delete.unwrap();
                prop_assert_eq!(next.state, State::Disconnecting);
                prop_assert_eq!(actions, [Action::CancelBuild, Action::RunDelete]);
                prop_assert_eq!(next.step(Event::DeleteFinished, NOW).unwrap().0.state, State::Disconnected);
            }
        }
    }

    #[test]
    fn since_is_when_the_state_was_entered(start in any_start(), events in any_events()) {
        let mut fsm = start;
        let mut now = NOW;
        for (event, elapsed) in events {
            now += elapsed;
            if let Ok((next, _)) = fsm.step(event, now) {
                let expected = if next.state == fsm.state { fsm.since_ms } else { now };
                prop_assert_eq!(next.since_ms, expected);
                fsm = next;
            }
        }
    }
}
