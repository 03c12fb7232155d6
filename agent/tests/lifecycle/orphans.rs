//! Endpoints whose records were lost with the store: they live on, and go with their containers.

use wharf_agent::restore;
use wharf_core::{
    endpoint::EndpointRecord,
    ids::PoolName,
    ipam::{Ipam, PoolConfig},
    kernel::{EndpointKernel as _, KernelErrorKind as Kind, NodeKernel as _},
    plan::DeleteOptions,
};
use wharf_datapath::fake::Operation as Op;
use wharf_kit::sync::lock;

use crate::support::*;

/// A machine whose store was overwritten while two endpoints lived.
fn lost() -> (Machine, [EndpointRecord; 2]) {
    let machine = Machine::new();
    let records = machine.life(async |agent| {
        [agent.create("c1").await, agent.create("c2").await].map(|h| h.shared.read(|v| v.record.clone()))
    });
    std::fs::write(machine.store_path(), vec![0xa5; 65_536]).expect("overwrite");
    (machine, records)
}

async fn assert_untouched(agent: &Agent, record: &EndpointRecord) {
    assert_eq!(agent.kernel.observe_endpoint(record).await.expect("observe"), [], "{}", record.attachment);
    assert!(!agent.is_free(record.id), "its id is not given out");
    assert!(record.addresses().all(|ip| agent.lease_owner(ip).is_some()), "nor are its addresses");
}

#[test]
fn endpoints_whose_records_were_lost_live_on_over_starts_and_leak_audits() {
    let (machine, records) = lost();
    for n in 0..3 {
        machine.life(async |agent| {
            agent.quiet().await;
            assert_eq!(agent.set_aside.is_some(), n == 0);
            for record in &records {
                assert_untouched(&agent, record).await;
                let findings = agent.findings(false).await;
                let of_it = |f: &&wharf_api::Finding| {
                    f.object == "link" && f.owner.as_ref().is_some_and(|o| o.contains(&record.attachment.to_string()))
                };
                assert!(findings.iter().find(of_it).is_some(), "the audit shows it, and whose it is: {findings:?}");
            }
            let mut reconcile = wharf_agent::reconcile::Reconcile::default();
            for _ in 0..3 {
                reconcile.run(&agent.life, &agent.node.audit_findings).await.expect("audit");
            }
            for record in &records {
                assert_untouched(&agent, record).await;
            }
            let new = agent.create(&format!("new{n}")).await;
            assert!(records.iter().all(|r| r.id != new.id && r.addresses().all(|ip| !addresses(&new).contains(&ip))));
        });
    }
}

#[test]
fn starts_that_end_early_do_not_forget_that_records_were_lost() {
    let (machine, records) = lost();
    for _ in 0..2 {
        let opened = wharf_store::Store::open(&machine.store_path(), &machine.boot_id).expect("open");
        assert!(opened.lost, "nothing has held what lives");
        drop(opened.store);
        opened.writer.join().expect("the writer ends");
    }
    for _ in 0..2 {
        machine.life(async |agent| {
            agent.quiet().await;
            for record in &records {
                assert_untouched(&agent, record).await;
            }
        });
    }
    let opened = wharf_store::Store::open(&machine.store_path(), &machine.boot_id).expect("open");
    assert!(!opened.lost, "what lives is held");
}

#[test]
fn the_delete_of_its_container_takes_a_lost_endpoint_away_and_no_other() {
    for starts in 1..=2 {
        let (machine, [first, second]) = lost();
        for _ in 1..starts {
            machine.life(async |agent| agent.quiet().await);
        }
        machine.life(async |agent| {
            let stranger = agent.del(&attachment("stranger", "eth0"), DeleteOptions::default()).await;
            assert_eq!(stranger, wharf_api::DeleteResult::default());
            let gone = agent.del(&first.attachment, DeleteOptions::default()).await;
            assert_eq!((gone.deleted, gone.errors), (vec![first.id.get()], vec![]));
            assert_eq!(agent.proxy.asked(), [(first.id, first.epoch)], "its redirects go too");
            let mut released = gone.leases_released;
            released.sort();
            assert_eq!(released, first.addresses().collect::<Vec<_>>());
            assert_untouched(&agent, &second).await;
            let dump = agent.kernel.dump().await.expect("dump");
            let slots = agent.kernel.call_slots().await.expect("slots");
            assert_eq!((dump.links.len(), dump.pins.len(), slots.len()), (1, 1, 1), "link, programs, slot");
            assert_eq!(dump.endpoint_rows.len(), 2, "rows");
            assert!(agent.is_free(first.id));
            assert_eq!(agent.resting().len(), 2, "its addresses rest");
            let again = agent.del(&first.attachment, DeleteOptions::default()).await;
            assert_eq!(again, wharf_api::DeleteResult::default(), "the second delete has nothing to do");
        });
        machine.life(async |agent| {
            agent.quiet().await;
            assert_untouched(&agent, &second).await;
            agent.del(&second.attachment, DeleteOptions::default()).await;
            agent.assert_nothing_left().await;
        });
    }
}

#[test]
fn a_lost_endpoint_keeps_programs_and_addresses_until_the_proxy_has_let_go() {
    let (machine, [first, _]) = lost();
    machine.life(async |agent| {
        let acknowledge = agent.proxy.answers_late(first.id, "slow");
        let delete = agent.del(&first.attachment, DeleteOptions::default());
        tokio::pin!(delete);
        let waits = async { eventually("the proxy is asked", || !agent.proxy.asked().is_empty()).await };
        tokio::select! {
            biased;
            gone = &mut delete => panic!("the proxy has not answered: {gone:?}"),
            () = waits => {}
        }
        let dump = agent.kernel.dump().await.expect("dump");
        assert!(dump.pins.iter().any(|(directory, _)| *directory == first.id.to_string()), "{:?}", dump.pins);
        assert!(first.addresses().all(|ip| agent.lease_owner(ip).is_some()));
        acknowledge.send(()).expect("it waits");
        let gone = delete.await;
        assert_eq!((gone.deleted, gone.errors), (vec![first.id.get()], vec![]));
    });
}

#[test]
fn a_lost_endpoint_whose_programs_cannot_be_detached_goes_with_its_link() {
    let (machine, [first, _]) = lost();
    machine.life(async |agent| {
        agent.kernel.fail_next(Op::RemoveAttached, Kind::Permission);
        let gone = agent.del(&first.attachment, DeleteOptions::default()).await;
        assert_eq!((gone.deleted, gone.errors), (vec![first.id.get()], vec![]));
        assert_eq!(agent.kernel.dump().await.expect("dump").links.len(), 1);
    });
}

#[test]
fn a_lost_endpoint_that_cannot_be_taken_away_stays_until_the_next_delete() {
    for op in [Op::RemoveEndpointRow, Op::RemoveCallSlot, Op::RemovePrograms, Op::RemoveLink] {
        for kind in [Kind::Permission, Kind::Exhausted] {
            let (machine, [first, second]) = lost();
            machine.life(async |agent| {
                agent.kernel.fail_next(op, kind);
                let refused = agent.del(&first.attachment, DeleteOptions::default()).await;
                assert_eq!((refused.deleted.len(), refused.errors.len()), (0, 1), "{op:?}: {refused:?}");
                assert!(!agent.is_free(first.id), "{op:?}");
                assert!(first.addresses().all(|ip| agent.lease_owner(ip).is_some()), "{op:?}");
                for record in [&first, &second] {
                    let gone = agent.del(&record.attachment, DeleteOptions::default()).await;
                    assert_eq!((gone.deleted, gone.errors), (vec![record.id.get()], vec![]), "{op:?}");
                }
                agent.assert_nothing_left().await;
            });
        }
    }
}

#[test]
fn a_container_that_is_added_again_beside_its_lost_endpoint_keeps_what_is_new() {
    let (machine, [first, _]) = lost();
    machine.life(async |agent| {
        // Its interface is still there.
        let refused = agent.try_create(Agent::spec("c1", "eth0")).await.expect_err("it has the interface");
        assert_eq!(refused.code, wharf_api::ErrorCode::Exists);
        agent.quiet().await;
        assert_untouched(&agent, &first).await;
        agent.del(&first.attachment, DeleteOptions::default()).await;
        agent.try_create(Agent::spec("c1", "eth0")).await.expect("created");
    });
}

#[test]
fn pools_that_have_no_address_of_a_lost_endpoint_are_refused() {
    let (machine, [first, second]) = lost();
    machine.life(async |agent| {
        let (dump, snapshot) = (agent.kernel.dump().await.expect("dump"), agent.snapshot().await);
        let fits = |cidrs: &[&str]| {
            let cidrs = cidrs.iter().map(|cidr| cidr.parse().expect("a CIDR")).collect();
            let name = PoolName::parse("default").expect("a name");
            let ipam = Ipam::new(vec![PoolConfig { name: name.clone(), cidrs }], name).expect("pools");
            restore::fits(&snapshot, &dump, &ipam)
        };
        let refused = fits(&["10.99.0.0/24", "fd99::/64"]).expect_err("other pools").to_string();
        let named = [&first, &second].iter().any(|r| r.addresses().any(|ip| refused.contains(&ip.to_string())));
        assert!(named && refused.contains("which no pool has"), "{refused}");
        restore::fits(&snapshot, &dump, &lock(&agent.life.network.addresses.ipam)).expect("the pools of before");
    });
}
