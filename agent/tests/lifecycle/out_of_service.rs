//! Records that cannot be brought back: counted, taken out of service at the third start, and let go.

use redb::{Database, TableDefinition};
use wharf_core::{
    endpoint::EndpointRecord,
    kernel::{EndpointKernel as _, KernelErrorKind as Kind},
    plan::DeleteOptions,
    store::LeaseOwner,
};
use wharf_datapath::fake::Operation as Op;

use crate::support::*;

/// Starts at which a record may fail.
const STARTS: u32 = 3;

/// Failures counted, by endpoint.
async fn counted(agent: &Agent) -> Vec<(u16, u32)> {
    agent.snapshot().await.failures.iter().map(|(id, f)| (id.get(), f.times)).collect()
}

/// A machine with an endpoint that is dead and cannot be deleted, started so often.
fn dead(starts: u32) -> (Machine, EndpointRecord) {
    let machine = Machine::new();
    let record = machine.life(async |agent| {
        agent.create("lives").await;
        agent.create("c1").await.shared.read(|v| v.record.clone())
    });
    machine.kernel.remove_netns(&netns_path("c1"));
    machine.kernel.fail_always(Op::RemoveReachable, Kind::Permission);
    for n in 1..=starts {
        machine.life(async |agent| {
            assert_eq!(agent.life.endpoints.registry.get(record.id).is_some(), n < STARTS, "at start {n}");
            let expected = if n < STARTS { vec![(record.id.get(), n)] } else { vec![] };
            assert_eq!(counted(&agent).await, expected);
            let tasks_are_known = || agent.life.tasks.endpoints.len() == agent.life.endpoints.registry.len();
            eventually("the task of what is out of service ends", tasks_are_known).await;
        });
    }
    (machine, record)
}

async fn assert_out_of_service(agent: &Agent, record: &EndpointRecord) {
    agent.quiet().await;
    let snapshot = agent.snapshot().await;
    let [aside] = &snapshot.out_of_service[..] else { panic!("{:?}", snapshot.out_of_service) };
    assert_eq!((aside.id, &aside.addresses), (record.id, &record.addresses().collect()));
    assert!(snapshot.endpoints.iter().all(|r| r.id != record.id), "not tried again");
    assert!(agent.life.endpoints.registry.get(record.id).is_none());
    assert!(!agent.is_free(record.id), "its id stays reserved");
    for ip in record.addresses() {
        let owner = LeaseOwner::Attachment { attachment: record.attachment.clone(), epoch: record.epoch };
        assert_eq!(agent.lease_owner(ip), Some(owner), "its addresses stay reserved");
    }
    assert_eq!(agent.life.endpoints.leftovers.out_of_service.list().len(), 1, "status shows it");
    let findings = agent.findings(false).await;
    let [finding] = &findings[..] else { panic!("the audit shows it, and nothing else: {findings:?}") };
    assert_eq!((finding.object.as_str(), finding.repairable), ("record", true));
    assert!(finding.problem.contains("out of service"), "{finding:?}");
    let owner = finding.owner.as_deref().unwrap_or_default();
    assert!(owner.contains(&record.attachment.to_string()), "whose it is: {finding:?}");
}

#[test]
fn a_dead_endpoint_whose_delete_fails_goes_out_of_service_at_the_third_start() {
    let (machine, record) = dead(STARTS);
    for _ in 0..2 {
        machine.life(async |agent| {
            assert_out_of_service(&agent, &record).await;
            let why = agent.snapshot().await.out_of_service[0].why.clone();
            assert!(why.contains("3 starts") && why.contains("remove-reachable"), "{why}");
            assert_eq!(state(&agent.handle(1)), wharf_core::state::State::Ready, "the other lives");
        });
    }
}

#[test]
fn a_record_out_of_service_keeps_others_from_its_id_and_its_addresses() {
    let (machine, record) = dead(STARTS);
    machine.life(async |agent| {
        let mut spec = agent.container("c2");
        spec.ips = record.addresses().collect();
        agent.try_create(spec).await.expect_err("they are reserved");
        for n in 10..14 {
            let new = agent.create(&format!("c{n}")).await;
            assert_ne!(new.id, record.id);
            assert!(addresses(&new).iter().all(|ip| !record.addresses().any(|a| a == *ip)));
        }
        assert_out_of_service(&agent, &record).await;
    });
}

#[test]
fn the_delete_of_its_container_lets_a_record_out_of_service_go() {
    for audited in [false, true] {
        let (machine, record) = dead(STARTS);
        machine.life(async |agent| {
            let refused = agent.del(&record.attachment, DeleteOptions::default()).await;
            assert_eq!(refused.errors.len(), 1, "the kernel still refuses: {refused:?}");
            assert_out_of_service(&agent, &record).await;
            agent.kernel.mend(Op::RemoveReachable);
            if audited {
                let findings = agent.findings(true).await;
                assert!(findings.iter().all(|f| f.repair.as_deref() == Some("mended")), "{findings:?}");
            } else {
                let other = agent.del(&attachment("other", "eth0"), DeleteOptions::default()).await;
                assert_eq!(other, wharf_api::DeleteResult::default(), "another container's delete is not its own");
                assert_out_of_service(&agent, &record).await;
                let gone = agent.del(&record.attachment, DeleteOptions::default()).await;
                assert_eq!((gone.deleted, gone.errors), (vec![record.id.get()], vec![]));
                assert_eq!(gone.leases_released, record.addresses().collect::<Vec<_>>());
                assert!(agent.proxy.asked().contains(&(record.id, record.epoch)), "its redirects go too");
            }
            assert!(agent.is_free(record.id));
            assert!(record.addresses().all(|ip| agent.lease_owner(ip).is_none()));
            agent.assert_healthy().await;
            agent.delete(&agent.handle(1)).await;
            agent.assert_nothing_left().await;
        });
        machine.life(async |agent| agent.assert_nothing_left().await);
    }
}

#[test]
fn a_record_that_recovers_loses_its_count() {
    let (machine, _) = dead(STARTS - 1);
    machine.kernel.mend(Op::RemoveReachable);
    machine.life(async |agent| {
        assert_eq!(counted(&agent).await, [], "it is gone");
        agent.assert_healthy().await;
    });
    machine.life(async |agent| agent.assert_healthy().await);
}

#[test]
fn a_delete_takes_the_count_along() {
    let (machine, record) = dead(1);
    machine.kernel.mend(Op::RemoveReachable);
    machine.kernel.fail_always(Op::RemoveLink, Kind::Exhausted);
    machine.life(async |agent| {
        assert_eq!(counted(&agent).await, [(record.id.get(), 2)]);
        agent.kernel.mend(Op::RemoveLink);
        assert_eq!(agent.del(&record.attachment, DeleteOptions::default()).await.errors, []);
        assert_eq!(counted(&agent).await, []);
        agent.assert_healthy().await;
    });
}

const ENDPOINTS: TableDefinition<u16, &[u8]> = TableDefinition::new("endpoints");

/// Writes an endpoint's row anew; what was there.
fn rewrite(machine: &Machine, record: &EndpointRecord, bytes: &[u8]) -> Vec<u8> {
    let database = Database::create(machine.store_path()).expect("open");
    let txn = database.begin_write().expect("begin");
    let before = {
        let mut table = txn.open_table(ENDPOINTS).expect("table");
        let before = table.insert(record.id.get(), bytes).expect("insert").expect("it was there");
        before.value().to_vec()
    };
    txn.commit().expect("commit");
    before
}

#[test]
fn a_record_that_cannot_be_read_goes_out_of_service_at_the_third_start_and_its_container_keeps_its_network() {
    let machine = Machine::new();
    let record = machine.life(async |agent| {
        agent.create("lives").await;
        agent.create("c1").await.shared.read(|v| v.record.clone())
    });
    rewrite(&machine, &record, b"{\"torn\":");
    for n in 1..=STARTS + 1 {
        machine.life(async |agent| {
            agent.quiet().await;
            assert_eq!(agent.kernel.observe_endpoint(&record).await.expect("observe"), [], "start {n}");
            assert!(!agent.is_free(record.id));
            assert!(record.addresses().all(|ip| agent.lease_owner(ip).is_some()));
            if n < STARTS {
                assert_eq!(counted(&agent).await, [(record.id.get(), n)]);
            } else {
                assert_out_of_service(&agent, &record).await;
                assert_eq!(agent.snapshot().await.out_of_service[0].record, "{\"torn\":");
            }
            // Nor does the leak audit take it away, however often it looks.
            let mut reconcile = wharf_agent::reconcile::Reconcile::default();
            for _ in 0..3 {
                reconcile.run(&agent.life, &agent.node.audit_findings).await.expect("audit");
            }
            assert_eq!(agent.kernel.observe_endpoint(&record).await.expect("observe"), [], "start {n}");
            agent.create(&format!("new{n}")).await;
        });
    }
}

#[test]
fn a_record_that_could_not_be_read_for_a_while_comes_back() {
    let machine = Machine::new();
    let record = machine.life(async |agent| agent.create("c1").await.shared.read(|v| v.record.clone()));
    let bytes = rewrite(&machine, &record, b"not json");
    machine.life(async |agent| assert_eq!(counted(&agent).await, [(record.id.get(), 1)]));
    rewrite(&machine, &record, &bytes);
    machine.life(async |agent| {
        assert_eq!(counted(&agent).await, []);
        agent.assert_healthy().await;
        assert_eq!(agent.handle(record.id.get()).shared.read(|v| v.record.clone()), record);
        agent.delete(&agent.handle(record.id.get())).await;
        agent.assert_nothing_left().await;
    });
}

#[test]
fn the_delete_of_its_container_takes_away_what_a_record_that_cannot_be_read_stands_for() {
    for (starts, audited) in (1..=STARTS + 1).flat_map(|n| [(n, false), (n, true)]) {
        let machine = Machine::new();
        let record = machine.life(async |agent| agent.create("c1").await.shared.read(|v| v.record.clone()));
        rewrite(&machine, &record, b"not json");
        for _ in 1..starts {
            machine.life(async |agent| agent.quiet().await);
        }
        machine.life(async |agent| {
            agent.quiet().await;
            if audited {
                let findings = agent.findings(true).await;
                assert!(findings.iter().all(|f| f.repair.as_deref() == Some("mended")), "start {starts}: {findings:?}");
            } else {
                let gone = agent.del(&record.attachment, DeleteOptions::default()).await;
                assert_eq!((gone.deleted, gone.errors), (vec![record.id.get()], vec![]), "start {starts}");
            }
            assert_eq!(agent.proxy.asked(), [(record.id, record.epoch)], "start {starts}");
            agent.assert_nothing_left().await;
        });
        machine.life(async |agent| agent.assert_nothing_left().await);
    }
}
