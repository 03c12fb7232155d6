//! Endpoint ids: one user at a time, and as long a rest as can be.

use std::collections::BTreeSet;

use wharf_agent::node::registry::Registry;
use wharf_core::ids::MAX_ENDPOINT_ID;

use crate::support::*;

#[test]
fn an_id_rests_as_long_as_others_are_free() {
    let registry = Registry::default();
    let first = registry.take_id().expect("free");
    registry.free_id(first);
    let rest: Vec<_> = (1..MAX_ENDPOINT_ID).map(|_| registry.take_id().expect("free")).collect();
    assert!(!rest.contains(&first));
    assert_eq!(registry.take_id(), Some(first));
    assert_eq!(registry.take_id(), None);
}

#[test]
fn the_id_that_is_free_longest_comes_first() {
    let registry = Registry::default();
    while registry.take_id().is_some() {}
    for n in [7, 3, 5] {
        registry.free_id(id(n));
    }
    assert_eq!([registry.take_id(), registry.take_id(), registry.take_id()], [Some(id(7)), Some(id(3)), Some(id(5))]);
}

#[test]
fn an_id_that_a_restored_endpoint_had_is_given_out_once() {
    let registry = Registry::default();
    assert!(registry.claim_id(id(5)));
    assert!(!registry.claim_id(id(5)));
    registry.free_id(id(5));
    let mut given = BTreeSet::new();
    while let Some(taken) = registry.take_id() {
        assert!(given.insert(taken), "id {taken} has two users");
    }
    assert_eq!(given.len(), usize::from(MAX_ENDPOINT_ID));
}

#[test]
fn an_id_freed_twice_is_given_out_once() {
    let registry = Registry::default();
    while registry.take_id().is_some() {}
    registry.free_id(id(5));
    registry.free_id(id(5));
    assert_eq!([registry.take_id(), registry.take_id()], [Some(id(5)), None]);
}
