#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::*;
use crate::{
    ids::{ContainerId, NetworkName},
    plan::{CreateStep, DeleteStep},
};

fn entry(operation: Operation, phase: &str, at_unix_ms: u64) -> Entry {
    Entry { at_unix_ms, operation, phase: phase.into(), took_us: Some(1), outcome: Outcome::Ok, text: String::new() }
}

fn past(id: u16, epoch: u64, ended: u64) -> PastLife {
    let who = Who {
        id: EndpointId::try_from(id).unwrap(),
        epoch: Epoch(epoch),
        attachment: Attachment {
            network: NetworkName::parse("net").unwrap(),
            container_id: ContainerId::parse(&format!("c{id}")).unwrap(),
            ifname: IfName::parse("eth0").unwrap(),
        },
        addresses: Vec::new(),
        identity: None,
        host_ifname: None,
        pod_name: None,
        pod_namespace: None,
        created_unix_ms: 0,
    };
    PastLife { who, ended: Ended { at_unix_ms: ended, how: End::Deleted } }
}

#[test]
fn create_and_last_delete_outlive_everything_between() {
    let mut entries = Entries::default();
    for step in ["write-intent", "lease", "ensure-link", "commit"] {
        entries.push(entry(Operation::Create, step, 1));
    }
    for n in 0..1_000 {
        entries.push(entry(Operation::Regenerate, "realized", n));
    }
    for at in 0..50 {
        entries.push(entry(Operation::Delete, DELETE_BEGINS, 2_000 + at));
        entries.push(entry(Operation::Delete, "detach", 2_000 + at));
    }
    let list = entries.list();
    assert_eq!(list.len(), MAX_ENTRIES);
    assert_eq!(list.iter().filter(|e| e.operation == Operation::Create).count(), 4);
    assert_eq!(list.first().map(|e| e.phase.as_str()), Some("write-intent"));
    assert_eq!(list.last().map(|e| (e.phase.as_str(), e.at_unix_ms)), Some(("detach", 2_049)));
    assert_eq!(entries.left_out(), 1_104 - 64);
    assert!(list.is_sorted_by_key(|e| e.at_unix_ms), "in the order they came");
}

#[test]
fn a_create_that_never_ends_is_bounded_too() {
    let mut entries = Entries::default();
    for n in 0..200 {
        entries.push(entry(Operation::Create, "step", n));
    }
    assert_eq!(entries.list().len(), MAX_ENTRIES);
    assert_eq!(entries.list()[0].at_unix_ms, 0, "the first stays");
    assert_eq!(entries.list()[MAX_ENTRIES - 1].at_unix_ms, 199);
}

#[test]
fn long_words_are_cut_and_repeated_ones_left_out() {
    let mut entries = Entries::default();
    entries.push(Entry { text: "ä".repeat(1_000), ..entry(Operation::Notice, "check", 1) });
    assert!(entries.list()[0].text.len() <= MAX_TEXT && entries.list()[0].text.ends_with("..."));
    let failed = Entry { outcome: Outcome::Failed, text: "no space".into(), ..entry(Operation::Create, "lease", 2) };
    entries.push(failed.clone());
    entries.push(Entry { took_us: None, phase: "create".into(), ..failed.clone() });
    assert_eq!(entries.list().len(), 2, "the same words again");
    entries.push(Entry { took_us: None, text: "another".into(), ..failed });
    assert_eq!(entries.list().len(), 3);
}

#[test]
fn what_is_old_or_too_much_goes_oldest_first_in_batches() {
    let mut all = Past::default();
    for n in 1..=10_u16 {
        all.insert(&past(n, u64::from(n), u64::from(n) * 1_000), n);
    }
    let ids = |lives: Vec<(EndpointId, Epoch)>| lives.iter().map(|(id, _)| id.get()).collect::<Vec<_>>();
    assert_eq!(ids(all.outdated(10_000, 100_000, 100, 100)), [0_u16; 0], "nothing is old");
    assert_eq!(ids(all.outdated(10_000, 7_000, 100, 100)), [1, 2, 3]);
    assert_eq!(ids(all.outdated(10_000, 7_000, 100, 2)), [1, 2], "a batch");
    assert_eq!(ids(all.outdated(10_000, 100_000, 6, 100)), [1, 2, 3, 4], "too many");
    let gone = all.outdated(10_000, 7_000, 100, 2);
    all.forget(&gone);
    assert_eq!(all.len(), 8);
    assert_eq!(ids(all.outdated(10_000, 7_000, 100, 2)), [3]);
    assert_eq!(all.iter().take(2).collect::<Vec<_>>(), [&10, &9]);
}

#[test]
fn a_life_comes_back_from_json_as_it_was() {
    let mut entries = Entries::default();
    entries.push(entry(Operation::Create, "lease", 1));
    entries.push(Entry {
        outcome: Outcome::Failed,
        text: "why".into(),
        took_us: None,
        ..entry(Operation::Delete, "x", 2)
    });
    let life = Life { who: past(3, 4, 5).who, ended: Some(Ended { at_unix_ms: 5, how: End::Deleted }), entries };
    let text = serde_json::to_string(&life).unwrap();
    assert_eq!(serde_json::from_str::<Life>(&text).unwrap(), life);
}

/// Long kubelet names, both families, every step of a create and a delete.
fn pods_life(failure: &str) -> Life {
    let mut who = past(7, 1_234_567, 0).who;
    who.attachment.container_id = ContainerId::parse(&"0123456789abcdef".repeat(4)).unwrap();
    who.addresses = vec!["10.87.123.234".parse().unwrap(), "fd57:4a7f:e8f::1:ffff".parse().unwrap()];
    who.identity = Some(Identity(65_000));
    who.host_ifname = Some(IfName::parse("wh3fff1234567").unwrap());
    who.pod_name = Some("a-deployment-of-some-service-7d4b9c5f6d-x2x7q".into());
    who.pod_namespace = Some("a-namespace-of-a-tenant".into());
    who.created_unix_ms = 1_790_000_000_000;
    let mut entries = Entries::default();
    let steps = ["write-intent", "lease", "ensure-programs", "ensure-link", "ensure-config", "ensure-attached"];
    for (n, step) in (0_u64..).zip(steps.into_iter().cycle().take(24)) {
        let operation = if n < 12 { Operation::Create } else { Operation::Delete };
        let took_us = Some(10_000 + 1_000 * n);
        entries.push(Entry { took_us, ..entry(operation, step, 1_790_000_000_000 + n) });
    }
    entries.push(Entry {
        outcome: Outcome::Failed,
        text: failure.into(),
        ..entry(Operation::Create, "commit", 1_790_000_001_000)
    });
    Life { who, ended: Some(Ended { at_unix_ms: 1_790_000_001_000, how: End::Deleted }), entries }
}

#[test]
fn an_ended_life_fits_its_place_in_the_store_and_keeps_what_failed_and_what_took_long() {
    for failure in ["no space left on device", &"\"\u{1}long".repeat(300)] {
        let mut life = pods_life(failure);
        let before = life.entries.list().len() as u64;
        life.trim();
        let text = serde_json::to_string(&life).unwrap();
        assert!(text.len() <= MAX_ENDED, "{} bytes: {text}", text.len());
        let list = life.entries.list();
        assert_eq!(list.last().map(|e| e.outcome), Some(Outcome::Failed));
        assert_eq!(life.entries.left_out() + list.len() as u64, before);
        assert!(list.is_sorted_by_key(|e| e.at_unix_ms), "in the order they came");
        assert_eq!(serde_json::from_str::<Life>(&text).unwrap(), life);
    }
    let mut life = pods_life("no space left on device");
    life.trim();
    let slowest = life.entries.list().iter().filter_map(|e| e.took_us).max();
    assert_eq!(slowest, Some(33_000), "the slowest step stays");
    assert!(life.entries.list().len() > 8, "{:?}", life.entries);
}

#[test]
fn every_step_of_a_pods_create_and_delete_is_kept_however_long_it_took() {
    let mut life = pods_life("");
    life.entries = Entries::default();
    let at = |operation, phase, n: u64| Entry { took_us: Some(9_999_999), ..entry(operation, phase, 10_000 * n) };
    for (n, step) in (1..).zip(CreateStep::ALL) {
        life.entries.push(at(Operation::Create, step.name(), n));
    }
    let told = |s: &DeleteStep| {
        !matches!(
            s,
            DeleteStep::RefuseWork | DeleteStep::ReleaseIdentity | DeleteStep::ReleaseIps | DeleteStep::RemoveRecord
        )
    };
    for (n, step) in (20..).zip(DeleteStep::ALL.into_iter().filter(told)) {
        life.entries.push(at(Operation::Delete, step.name(), n));
    }
    let last = entry(Operation::Delete, "remove-record", 400_000);
    life.entries.push(Entry { text: "nothing of it is left; time of the whole delete".into(), ..last });
    life.trim();
    assert_eq!(life.entries.left_out(), 0, "{} bytes", serde_json::to_string(&life).unwrap().len());
}

#[test]
fn a_life_written_with_the_names_of_its_fields_is_read() {
    let named = r#"{"list":[{"at":5,"op":"create","phase":"lease","us":7},
        {"at":3,"op":"delete","phase":"x","outcome":"failed","text":"why"}],"left_out":2}"#;
    let entries: Entries = serde_json::from_str(named).unwrap();
    assert_eq!(entries.list()[0], Entry { took_us: Some(7), ..entry(Operation::Create, "lease", 5) });
    assert_eq!((entries.list()[1].at_unix_ms, entries.list()[1].text.as_str(), entries.left_out()), (3, "why", 2));
    let again = serde_json::to_string(&entries).unwrap();
    assert_eq!(serde_json::from_str::<Entries>(&again).unwrap(), entries, "a clock that went back: {again}");
}

#[test]
fn the_oldest_makes_room_only_when_there_is_none() {
    let mut all = Past::default();
    assert_eq!(all.make_room(2), None);
    for n in 1..=2 {
        all.insert(&past(n, u64::from(n), u64::from(n)), n);
    }
    assert_eq!(all.make_room(3), None);
    assert_eq!(all.make_room(2).map(|(id, _)| id.get()), Some(1));
    assert_eq!(all.len(), 1);
}
