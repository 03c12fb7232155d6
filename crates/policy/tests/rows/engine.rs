//! The tables of an engine whose policies and endpoints change, against tables that are compiled from nothing.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;
use proptest::{collection::vec, prelude::*};
use wharf_policy::{
    compile::{Cell, Engine, Hit, Identity, PeerClass, PortClass, PortPrefix, SetId, Tables, compile},
    model::{Direction, Origin, PolicyName},
};

use crate::{
    ROOMY, event, events,
    transition::{carry_out, rows_alone},
    universe,
};

/// A rule set by the first endpoint that has it.
type SetName = Option<(u32, Direction)>;
/// A class by its first prefix; `None` for every address.
type ClassName = Option<IpNet>;
/// A hit with the rule's origin.
type HitOf = Option<(Hit, Option<Origin>)>;

/// Tables without the numbers that engines choose.
#[derive(Debug, PartialEq)]
struct Canonical {
    sets: BTreeMap<u32, (SetName, SetName)>,
    ipcache: BTreeMap<IpNet, (Identity, ClassName)>,
    rules: BTreeMap<
        SetName,
        (BTreeMap<PortPrefix, PortClass>, BTreeMap<(ClassName, PortClass), (HitOf, HitOf)>, Vec<PolicyName>),
    >,
    origins: BTreeSet<Origin>,
}

fn canonical(tables: &Tables) -> Canonical {
    let mut set_names: BTreeMap<SetId, (u32, Direction)> = BTreeMap::new();
    for (key, sets) in &tables.sets {
        for direction in [Direction::Ingress, Direction::Egress] {
            set_names.entry(sets.of(direction)).or_insert((key.0, direction));
        }
    }
    set_names.remove(&SetId::NONE);
    let mut class_names: BTreeMap<PeerClass, IpNet> = BTreeMap::new();
    for (net, known) in &tables.ipcache {
        assert_ne!(known.class, PeerClass::ANY);
        class_names.entry(known.class).or_insert(*net);
    }
    let hit = |hit: Option<Hit>| {
        hit.map(|hit| {
            let origin = hit.rule.map(|rule| Origin::clone(tables.origins.get(&rule).expect("the rule's origin")));
            (Hit { rule: None, ..hit }, origin)
        })
    };
    let class = |class: PeerClass| {
        (class != PeerClass::ANY).then(|| *class_names.get(&class).expect("an address has the class"))
    };
    let cells = |((peer, port), cell): (&(PeerClass, PortClass), &Cell)| {
        ((class(*peer), *port), (hit(cell.admin), hit(cell.rest)))
    };
    let name = |set: SetId| set_names.get(&set).copied();
    let rules = tables.rules.iter().map(|(set, rows)| {
        assert!(name(*set).is_some(), "an endpoint has {set:?}");
        (name(*set), (rows.ports.clone(), rows.cells.iter().map(cells).collect(), rows.isolated_by.clone()))
    });
    Canonical {
        sets: tables.sets.iter().map(|(key, sets)| (key.0, (name(sets.ingress), name(sets.egress)))).collect(),
        ipcache: tables.ipcache.iter().map(|(net, known)| (*net, (known.identity, class(known.class)))).collect(),
        rules: rules.collect(),
        origins: tables.origins.values().map(|origin| Origin::clone(origin)).collect(),
    }
}

/// What a difference rests on: a rule set and a class of both tables mean the same in both.
fn check_that_meanings_stay(old: &Tables, new: &Tables) -> Result<(), TestCaseError> {
    let classes =
        |tables: &Tables| -> BTreeSet<PeerClass> { tables.ipcache.values().map(|known| known.class).collect() };
    let mut both = &classes(old) & &classes(new);
    both.insert(PeerClass::ANY);
    for (set, rows) in &old.rules {
        let Some(after) = new.rules.get(set) else { continue };
        prop_assert_eq!(&rows.ports, &after.ports);
        let shared = |cells: &BTreeMap<(PeerClass, PortClass), Cell>| -> Vec<_> {
            cells.iter().filter(|((class, _), _)| both.contains(class)).map(|(key, cell)| (*key, *cell)).collect()
        };
        prop_assert_eq!(shared(&rows.cells), shared(&after.cells), "{:?}", set);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn the_tables_of_a_history_are_those_of_its_end(
        world in universe::world(),
        history in vec(vec(universe::step(), 1..3), 1..8),
    ) {
        let mut world = world;
        let mut engine = Engine::new(ROOMY);
        let mut maps = Tables::default();
        for change in engine.apply(events(&world)).expect("it fits") {
            carry_out(&change, &mut maps);
        }
        for steps in history {
            let old = engine.tables().clone();
            for change in engine.apply(steps.iter().map(event)).expect("it fits") {
                carry_out(&change, &mut maps);
            }
            steps.iter().for_each(|step| step.apply(&mut world));
            let fresh = compile(events(&world), ROOMY).expect("it fits");
            prop_assert_eq!(canonical(engine.tables()), canonical(&fresh));
            prop_assert_eq!(rows_alone(&maps), rows_alone(engine.tables()));
            check_that_meanings_stay(&old, engine.tables())?;
        }
    }
}
