//! The file of what policy wants is gone, or is damaged, at a start: no container is opened because of that.

use std::{collections::BTreeMap, sync::Arc};

use wharf_agent::{
    endpoint::create::CreateSpec,
    node::{edit::Edit, endpoint::Command},
    policy::{Policy, error::PolicyError},
};
use wharf_api::ErrorCode;
use wharf_common::{SetsRow, policy::ACCEPT};
use wharf_core::{
    endpoint::EndpointRecord,
    kernel::KernelErrorKind as Kind,
    plan::DeleteOptions,
    policy::{Enforcement, PolicyRows},
};
use wharf_datapath::fake::Operation as Op;

use crate::{
    policy::{OF_NAMESPACES, ingress, isolates, rows},
    support::*,
};

/// A machine on which two containers are isolated, and no agent runs. The file of what is wanted is gone.
fn with_lost_policies() -> Machine {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.create("c1").await;
        agent.create("c2").await;
        agent.life.policy.import("a.yaml", &isolates("web")).await.expect("imported");
    });
    std::fs::remove_file(file(&machine)).expect("removed");
    machine
}

fn file(machine: &Machine) -> std::path::PathBuf {
    machine.config.state_dir.join("policy.json")
}

/// Rows without the number of their changes, which a start may let grow.
fn rules(machine: &Machine) -> PolicyRows {
    PolicyRows { generation: 0, ..rows(machine) }
}

async fn problem(agent: &Agent) -> Option<String> {
    agent.life.policy.summary().await.problem
}

#[test]
fn the_rules_of_lost_policies_stay_in_force_over_starts() {
    let machine = with_lost_policies();
    let before = rules(&machine);
    for _ in 0..2 {
        machine.life(async |agent| {
            agent.quiet().await;
            agent.life.policy.ensure().await.expect("nothing to do");
            let told = problem(&agent).await.expect("it is told");
            assert!(told.contains("policy.json") && told.contains("import") && told.contains("--all"), "{told}");
            let list = agent.life.policy.list().await;
            assert_eq!(
                (list.policies.len(), list.rows.cells),
                (0, before.cells.len() as u64),
                "what is in force is shown"
            );
            agent.assert_healthy().await;
        });
        assert_eq!(rules(&machine), before);
    }
}

#[test]
fn a_file_that_is_removed_under_the_agent_is_written_again() {
    let machine = with_lost_policies();
    machine.life(async |agent| {
        agent.life.policy.import("a.yaml", &isolates("web")).await.expect("imported");
        std::fs::remove_file(file(&machine)).expect("removed");
        agent.life.policy.ensure().await.expect("looked");
    });
    machine.life(async |agent| {
        assert_eq!(problem(&agent).await, None);
        assert_eq!(agent.life.policy.list().await.policies.len(), 1);
    });
}

#[test]
fn a_new_endpoint_is_refused_while_policies_are_lost() {
    let machine = with_lost_policies();
    let before = rules(&machine);
    machine.life(async |agent| {
        let refused = agent.try_create(agent.container("c3")).await.expect_err("refused");
        assert_eq!(refused.code, ErrorCode::Store);
        assert!(refused.message.contains("wharf policy import"), "{}", refused.message);
        assert_eq!(agent.life.endpoints.registry.len(), 2);
        // One that goes away needs nobody, and its rows go with the others.
        assert!(agent.delete(&agent.handle(2)).await.errors.is_empty());
        assert_eq!(rules(&machine), before);
        agent.life.policy.import("a.yaml", &isolates("web")).await.expect("imported");
        assert_eq!(rows(&machine).sets.keys().copied().collect::<Vec<_>>(), [id(1)]);
        let handle = agent.create("c3").await;
        assert_ne!(ingress(&machine, handle.id.get()), 0);
    });
}

/// The store is gone, with the labels; the policies are there.
#[test]
fn an_endpoint_that_policy_isolated_stays_isolated_when_its_record_is_lost() {
    let machine = Machine::new();
    let [closed, open]: [EndpointRecord; 2] = machine.life(async |agent| {
        let labels = ["k8s:app=other".parse().expect("label")].into();
        agent.try_create(CreateSpec { labels, ..agent.container("c2") }).await.expect("created");
        let made = [agent.create("c1").await, agent.handle(1)];
        agent.life.policy.import("a.yaml", &isolates("web")).await.expect("imported");
        made.map(|handle| handle.shared.read(|v| v.record.clone()))
    });
    let sets = |record: &EndpointRecord| rows(&machine).sets.get(&record.id).copied().unwrap_or_default();
    assert!(sets(&closed).ingress != 0 && sets(&open) == SetsRow::default());
    std::fs::write(machine.store_path(), vec![0xa5; 65_536]).expect("overwrite");
    for life in 0..3 {
        if life == 1 {
            // The start cannot read the rules; the controller tries again.
            machine.kernel.fail_next(Op::ObservePolicy, Kind::Other);
        }
        machine.life(async |agent| {
            agent.quiet().await;
            agent.life.policy.ensure().await.expect("looked");
            let (row, cells) = (sets(&closed), rows(&machine).cells);
            assert!(row.ingress != 0 && row.egress != 0, "{row:?}");
            let accepts = cells.iter().filter(|(key, _)| [row.ingress, row.egress].contains(&key.set));
            assert_eq!(accepts.filter(|(_, (cell, _))| cell.rest.ruling == ACCEPT).count(), 0, "{cells:?}");
            assert_eq!(sets(&open), SetsRow::default(), "no policy applied to it");
            let new = agent.create("new").await;
            assert_ne!(ingress(&machine, new.id.get()), 0, "new containers are policed");
            agent.delete(&new).await;
        });
    }
    machine.life(async |agent| {
        agent.del(&closed.attachment, DeleteOptions::default()).await;
        assert_eq!(sets(&closed), SetsRow::default(), "its rows go with it");
    });
}

#[test]
fn a_new_label_is_refused_while_policies_are_lost() {
    let machine = with_lost_policies();
    let before = rules(&machine);
    machine.life(async |agent| {
        let (done, answer) = tokio::sync::oneshot::channel();
        let labels = ["k8s:app=other".parse().expect("label")].into();
        agent.handle(1).mailbox.send(Command::Edit(Box::new(Edit::labels(labels)), done)).await.expect("sent");
        let refused = answer.await.expect("answered").expect_err("refused");
        assert!(refused.to_string().contains("wharf policy import"), "{refused}");
        assert_eq!(rules(&machine), before);
    });
}

#[test]
fn an_import_takes_the_place_of_lost_policies() {
    let machine = with_lost_policies();
    machine.life(async |agent| {
        let before = ingress(&machine, 1);
        agent.life.policy.import("a.yaml", &isolates("other")).await.expect("imported");
        assert_eq!((ingress(&machine, 1), problem(&agent).await), (0, None));
        agent.life.policy.import("a.yaml", &isolates("web")).await.expect("imported");
        assert!(before != 0 && ingress(&machine, 1) != 0 && ingress(&machine, 2) != 0);
    });
    machine.life(async |agent| {
        let list = agent.life.policy.list().await;
        assert_eq!((list.realized, list.revision, list.problem, list.policies.len()), (2, 2, None, 2));
    });
}

#[test]
fn the_removal_of_all_policies_opens_what_lost_ones_closed() {
    let machine = with_lost_policies();
    machine.life(async |agent| {
        let change = agent.life.policy.delete_all().await.expect("deleted");
        assert_eq!((change.revision, change.realized, ingress(&machine, 1)), (1, 1, 0));
        agent.create("c3").await;
    });
    machine.life(async |agent| assert_eq!((problem(&agent).await, ingress(&machine, 1)), (None, 0)));
}

#[test]
fn a_refused_import_leaves_the_rules_of_lost_policies() {
    let machine = with_lost_policies();
    let before = rules(&machine);
    machine.life(async |agent| {
        agent.life.policy.import("a.yaml", "kind: Nothing").await.expect_err("refused");
        std::fs::create_dir(file(&machine)).expect("in the way of the file");
        let failed = agent.life.policy.import("a.yaml", &isolates("other")).await.expect_err("not kept");
        assert!(matches!(failed, PolicyError::NotKept { .. }), "{failed}");
        assert_eq!(rules(&machine), before);
        std::fs::remove_dir(file(&machine)).expect("removed");
        agent.try_create(agent.container("c3")).await.expect_err("refused still");
        agent.life.policy.ensure().await.expect("nothing to do");
        assert_eq!(rules(&machine), before);
    });
}

#[test]
fn labels_of_a_namespace_and_the_directory_wait_for_lost_policies() {
    let mut machine = with_lost_policies();
    let directory = machine.config.state_dir.join("policies");
    std::fs::create_dir(&directory).expect("made");
    std::fs::write(directory.join("d.yaml"), isolates("db")).expect("written");
    machine.config.policy_dir = Some(directory);
    let before = rules(&machine);
    let dark = BTreeMap::from([("light".to_owned(), "off".to_owned())]);
    machine.life(async |agent| {
        agent.life.policy.set_namespace("default", Some(dark)).await.expect("kept");
        assert_eq!(rules(&machine), before);
    });
    // There is a file now, and the policies are lost all the same.
    machine.life(async |agent| {
        assert_eq!(rules(&machine), before);
        assert!(problem(&agent).await.is_some());
        agent.life.policy.import("a.yaml", OF_NAMESPACES).await.expect("imported");
        assert_ne!(ingress(&machine, 1), 0, "by the namespace's labels");
        let list = agent.life.policy.list().await;
        assert_eq!((list.policies.len(), list.realized, list.problem), (2, list.revision, None));
    });
}

#[test]
fn enforcement_does_not_change_while_policies_are_lost() {
    let machine = with_lost_policies();
    let before = rules(&machine);
    machine.life(async |agent| {
        agent.life.policy.set_enforcement(Enforcement::Never).await.expect_err("refused");
        assert_eq!((agent.life.policy.enforcement().await, rules(&machine)), (Enforcement::Default, before));
    });
}

#[test]
fn policies_are_not_taken_for_lost_where_no_file_was_needed_yet() {
    let mut machine = Machine::new();
    machine.life(async |agent| drop(agent.create("c1").await));
    machine.config.policy_enforcement = Enforcement::Always;
    machine.life(async |agent| assert!(problem(&agent).await.is_none() && ingress(&machine, 1) != 0));
    let directory = machine.config.state_dir.join("policies");
    std::fs::create_dir(&directory).expect("made");
    std::fs::write(directory.join("d.yaml"), isolates("web")).expect("written");
    (machine.config.policy_enforcement, machine.config.policy_dir) = (Enforcement::Default, Some(directory.clone()));
    machine.life(async |agent| assert!(problem(&agent).await.is_none() && ingress(&machine, 1) != 0));
    std::fs::remove_file(directory.join("d.yaml")).expect("removed");
    machine.life(async |agent| assert!(problem(&agent).await.is_none() && ingress(&machine, 1) == 0));
}

#[test]
fn rules_that_cannot_be_read_at_a_start_are_kept_when_they_can() {
    let machine = with_lost_policies();
    let before = rules(&machine);
    machine.kernel.fail_next(Op::ObservePolicy, Kind::Other);
    machine.life(async |agent| {
        agent.life.policy.ensure().await.expect("nothing to do");
        assert!(problem(&agent).await.is_some_and(|told| told.contains("wharf policy import")));
        assert_eq!(rules(&machine), before);
    });
}

#[test]
fn a_file_of_policies_that_cannot_be_used_is_no_start_without_them() {
    let machine = with_lost_policies();
    let before = rows(&machine);
    std::fs::write(file(&machine), "{").expect("written");
    let policy = Policy::new(&machine.config, Arc::new(machine.kernel.clone()), machine.proxy.clone());
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("runtime");
    let refused = runtime.block_on(policy.load()).expect_err("refused").to_string();
    assert!(refused.contains("policy.json") && refused.contains("remove it"), "{refused}");
    assert_eq!(rows(&machine), before);
}

#[test]
fn an_endpoint_removed_before_the_first_rows_has_none_after_them() {
    let machine = Machine::new();
    let records: Vec<EndpointRecord> = machine.life(async |agent| {
        agent.create("c1").await;
        agent.create("c2").await;
        agent.life.policy.import("a.yaml", &isolates("web")).await.expect("imported");
        agent.life.endpoints.registry.list().iter().map(|handle| handle.shared.read(|v| v.record.clone())).collect()
    });
    let isolated = |id| rows(&machine).sets.get(&id).is_some_and(|sets| *sets != SetsRow::default());
    let [gone, stays] = &records[..] else { panic!("{records:?}") };
    assert!(isolated(gone.id) && isolated(stays.id));
    let policy = Policy::new(&machine.config, Arc::new(machine.kernel.clone()), machine.proxy.clone());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    runtime.block_on(async {
        policy.load().await.expect("policies");
        policy.begin(records.clone(), []).await;
        policy.remove_endpoint(gone.id, gone.epoch).await.expect("without a wait for the first rows");
        assert!(isolated(gone.id), "the kernel keeps the rows of before");
        policy.start().await.expect("rows");
    });
    assert!(!isolated(gone.id) && isolated(stays.id));
}
