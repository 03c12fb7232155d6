#![allow(clippy::panic, reason = "a test fails by panicking")]

use std::fmt::Write as _;

use proptest::prelude::*;

use super::*;
use crate::fixtures::record;

/// What a runtime gives an ADD or a DEL at least.
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
fn deletes_of_one_endpoint() {
    let own = record(1, 10);
    let callers = EndpointRecord { ip_owner: IpOwner::Caller, ..record(2, 20) };
    let mut text = String::new();
    for (title, record, no_ip_release) in [
        ("delete", &own, false),
        ("delete, NoIPRelease asked for", &own, true),
        ("delete, the caller owns the addresses", &callers, false),
    ] {
        text += &format!("# {title}\n{}", lines(plan_delete(record, DeleteOptions { no_ip_release })));
    }
    insta::assert_snapshot!("delete", text);
}

#[test]
fn delete_of_a_container_with_three_endpoints() {
    let callers = EndpointRecord { ip_owner: IpOwner::Caller, ..record(2, 20) };
    let records = [record(1, 10), callers, record(3, 30)];
    let text = |options| lines(plan_delete_container(&records, options).into_iter().map(|(id, s)| format!("{id} {s}")));
    insta::assert_snapshot!("delete_container", text(DeleteOptions::default()));
    let kept = text(DeleteOptions { no_ip_release: true });
    assert!(!kept.contains("release-ips"), "{kept}");
    assert_eq!(plan_delete_container(&[], DeleteOptions::default()), []);
}

#[test]
fn deadlines_fit_into_a_runtimes_patience() {
    let create: u64 = CreateStep::ALL.into_iter().map(CreateStep::deadline_ms).sum();
    let delete: u64 = DeleteStep::ALL.into_iter().map(DeleteStep::deadline_ms).sum();
    assert!(create < RUNTIME_PATIENCE_MS, "{create}");
    assert!(delete < RUNTIME_PATIENCE_MS, "{delete}");
}

#[test]
fn names_are_unique() {
    let create: std::collections::BTreeSet<&str> = CreateStep::ALL.into_iter().map(CreateStep::name).collect();
    let delete: std::collections::BTreeSet<&str> = DeleteStep::ALL.into_iter().map(DeleteStep::name).collect();
    assert_eq!((create.len(), delete.len()), (CreateStep::ALL.len(), DeleteStep::ALL.len()));
}

proptest! {
    /// Whatever the mix of owners: a batch is each endpoint's own plan, no address is released before every link is
    /// gone, and no record removed before every address is released.
    #[test]
    fn a_batch_keeps_each_plan_and_the_order_between_them(callers in prop::collection::vec(any::<bool>(), 1..6), keep: bool) {
        let records: Vec<EndpointRecord> = (1u8..)
            .zip(&callers)
            .map(|(n, caller)| EndpointRecord {
                ip_owner: if *caller { IpOwner::Caller } else { IpOwner::Endpoint },
                ..record(n, u64::from(n))
            })
            .collect();
        let options = DeleteOptions { no_ip_release: keep };
        let batch = plan_delete_container(&records, options);
        for record in &records {
            let own: Vec<DeleteStep> = batch.iter().filter(|(id, _)| *id == record.id).map(|(_, step)| *step).collect();
            prop_assert_eq!(own, plan_delete(record, options));
        }
        let first = |wanted| batch.iter().position(|(_, step)| *step == wanted).unwrap_or(usize::MAX);
        let last = |wanted| batch.iter().rposition(|(_, step)| *step == wanted).unwrap_or(0);
        prop_assert!(last(DeleteStep::WriteIntent) < first(DeleteStep::RefuseWork));
        prop_assert!(last(DeleteStep::RemoveLink) < first(DeleteStep::ReleaseIps));
        prop_assert!(last(DeleteStep::RemoveLink) < first(DeleteStep::RemoveRecord));
        prop_assert!(last(DeleteStep::ReleaseIps) < first(DeleteStep::RemoveRecord));
    }
}
