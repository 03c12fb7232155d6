//! Changes of rows, carried out one by one.

use std::sync::Arc;

use proptest::{collection::vec, prelude::*};
use wharf_policy::compile::{Change, Decision, EndpointKey, Engine, Tables, diff};

use crate::{
    ROOMY, event, events,
    universe::{self, Probe},
};

/// What a program's maps become by one change.
pub(crate) fn carry_out(change: &Change, tables: &mut Tables) {
    match change.clone() {
        Change::PutOrigin(rule, origin) => drop(tables.origins.insert(rule, origin)),
        Change::DropOrigin(rule) => assert!(tables.origins.remove(&rule).is_some(), "{change:?}"),
        Change::PutSets(key, sets) => drop(tables.sets.insert(key, sets)),
        Change::DropSets(key) => assert!(tables.sets.remove(&key).is_some(), "{change:?}"),
        Change::PutAddress(net, known) => drop(tables.ipcache.insert(net, known)),
        Change::DropAddress(net) => assert!(tables.ipcache.remove(&net).is_some(), "{change:?}"),
        Change::PutPorts(set, prefix, class) => {
            let rows = Arc::make_mut(tables.rules.entry(set).or_default());
            assert_eq!(rows.ports.insert(prefix, class), None, "{change:?}");
        }
        Change::PutCell(set, key, cell) => {
            let rows = Arc::make_mut(tables.rules.entry(set).or_default());
            assert_eq!(rows.cells.insert(key, cell), None, "{change:?}");
        }
        Change::DropPorts(set, prefix) => {
            let rows = Arc::make_mut(tables.rules.get_mut(&set).expect("set"));
            assert!(rows.ports.remove(&prefix).is_some(), "{change:?}");
        }
        Change::DropCell(set, key) => {
            let rows = Arc::make_mut(tables.rules.get_mut(&set).expect("set"));
            assert!(rows.cells.remove(&key).is_some(), "{change:?}");
        }
    }
}

/// The tables as the programs' maps have them: without sets that have no rows, and without what is not for the programs.
pub(crate) fn rows_alone(tables: &Tables) -> Tables {
    let mut tables = tables.clone();
    tables.rules.retain(|_, rows| !rows.ports.is_empty() || !rows.cells.is_empty());
    tables.rules.values_mut().for_each(|rows| Arc::make_mut(rows).isolated_by.clear());
    tables
}

fn decide(tables: &Tables, probe: &Probe) -> Option<Decision> {
    tables.decide(EndpointKey(probe.endpoint), probe.direction, probe.peer, probe.destination)
}

/// Carries out the difference, and fails where a flow of an endpoint of both states is decided in another way than before and after.
fn check(old: &Tables, new: &Tables, probes: &[Probe]) -> Result<(), TestCaseError> {
    let diff = diff(old, new);
    let mut now = rows_alone(old);
    let mut peak = now.sizes();
    let both: Vec<_> = probes.iter().filter_map(|p| Some((p, decide(old, p)?, decide(new, p)?))).collect();
    for (at, change) in diff.changes.iter().enumerate() {
        carry_out(change, &mut now);
        let sizes = now.sizes();
        peak.ipcache = peak.ipcache.max(sizes.ipcache);
        peak.ports = peak.ports.max(sizes.ports);
        peak.rules = peak.rules.max(sizes.rules);
        for (probe, before, after) in &both {
            let decided = decide(&now, probe).expect("the endpoint is there");
            prop_assert!(
                decided == *before || decided == *after,
                "{:?} is decided as {:?}, before as {:?}, after as {:?}, at change {} of {:#?}",
                probe,
                decided,
                before,
                after,
                at,
                diff.changes
            );
        }
    }
    prop_assert_eq!(rows_alone(&now), rows_alone(new));
    prop_assert_eq!((peak.ipcache, peak.ports, peak.rules), (diff.peak.ipcache, diff.peak.ports, diff.peak.rules));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn every_flow_is_decided_as_before_or_as_after_at_every_change(
        world in universe::world(),
        steps in vec(universe::step(), 1..5),
        probes in vec(universe::probe(), 48),
    ) {
        let mut engine = Engine::new(ROOMY);
        engine.apply(events(&world)).expect("it fits");
        let old = engine.tables().clone();
        let changes = engine.apply(steps.iter().map(event)).expect("it fits");
        prop_assert_eq!(changes, diff(&old, engine.tables()).changes);
        check(&old, engine.tables(), &probes)?;
    }

    #[test]
    fn an_engine_that_begins_anew_takes_over_without_another_verdict(
        world in universe::world(),
        steps in vec(universe::step(), 0..3),
        probes in vec(universe::probe(), 24),
    ) {
        let mut first = Engine::new(ROOMY);
        first.apply(events(&world)).expect("it fits");
        let mut world = world;
        steps.iter().for_each(|step| step.apply(&mut world));
        let mut second = Engine::after(ROOMY, first.tables().clone());
        second.apply(events(&world)).expect("it fits");
        check(first.tables(), second.tables(), &probes)?;
    }
}
