#![allow(clippy::panic, reason = "a test fails by panicking")]

use std::fmt::Write as _;

use super::*;
use crate::fixtures::record;

const RUNTIME_PATIENCE_MS: u64 = 30_000;

fn lines<T: fmt::Display>(steps: impl IntoIterator<Item = T>) -> String {
    steps.into_iter().fold(String::new(), |mut text, step| {
        let _written = writeln!(text, "{step}");
        text
    })
}

#[test]
fn create_and_what_undoes_it() {
    let mut text = String::new();
    for (title, owner) in [("addresses of its own", IpOwner::Endpoint), ("the caller's addresses", IpOwner::Caller)] {
        let plan = plan_create(owner);
        text += &format!("# create with {title}\n{}", lines(&plan));
        for begun in 1..=plan.len() {
            let undo: Vec<&str> = plan_undo(&plan[..begun]).into_iter().map(UndoStep::name).collect();
            text += &format!("fails in {} -> {}\n", plan[begun - 1], undo.join(", "));
        }
    }
    insta::assert_snapshot!("create", text);
}

#[test]
fn a_delete_releases_only_addresses_that_the_endpoint_leased_itself() {
    let own = record(1, 10);
    let callers = EndpointRecord { ip_owner: IpOwner::Caller, ..record(2, 20) };
    for (record, no_ip_release, releases) in [(&own, false, true), (&own, true, false), (&callers, false, false)] {
        assert_eq!(DeleteOptions { no_ip_release }.releases_ips(record), releases);
    }
}

#[test]
fn deadlines_fit_into_a_runtimes_patience() {
    let create: u64 = CreateStep::ALL.into_iter().map(CreateStep::deadline_ms).sum();
    let before_answer = DeleteStep::ALL.into_iter().filter(|step| *step != DeleteStep::AwaitKernel);
    let delete: u64 = before_answer.map(DeleteStep::deadline_ms).sum();
    assert!(create < RUNTIME_PATIENCE_MS, "{create}");
    assert!(delete < RUNTIME_PATIENCE_MS, "{delete}");
}

#[test]
fn names_are_unique() {
    let create: std::collections::BTreeSet<&str> = CreateStep::ALL.into_iter().map(CreateStep::name).collect();
    let delete: std::collections::BTreeSet<&str> = DeleteStep::ALL.into_iter().map(DeleteStep::name).collect();
    assert_eq!((create.len(), delete.len()), (CreateStep::ALL.len(), DeleteStep::ALL.len()));
}

#[test]
fn a_removal_is_a_deletes_part_in_its_order() {
    let part = DeleteStep::ALL.into_iter().filter(|step| DeleteStep::REMOVAL.contains(step)).collect::<Vec<_>>();
    assert_eq!(part, DeleteStep::REMOVAL);
    let kept = DeleteStep::ALL.into_iter().filter(|step| step.must_succeed()).collect::<Vec<_>>();
    let must = [DeleteStep::RemoveReachable, DeleteStep::Unpin, DeleteStep::RemoveLink, DeleteStep::AwaitKernel];
    assert_eq!(kept, must);
}
