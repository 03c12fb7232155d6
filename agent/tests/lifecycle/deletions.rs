//! Deletion records: served at start and while the agent runs, and gone only when their delete has succeeded.

use std::{path::PathBuf, time::Duration};

use wharf_agent::{endpoint::deletions, node::queue::Cause, watchdog};
use wharf_api::{ErrorCode, Health};
use wharf_core::{
    kernel::{KernelErrorKind as Kind, NodeKernel as _},
    plan::DeleteOptions,
    store::{Intent, LeaseOwner},
};
use wharf_datapath::fake::Operation as Op;
use wharf_handover::queue::QueueError;
use wharf_kit::controller::OVERDUE;

use crate::support::*;

fn directory(agent: &Agent) -> PathBuf {
    agent.life.endpoints.deletions.queue.path().to_owned()
}

fn records(agent: &Agent) -> usize {
    agent.life.endpoints.deletions.queue.list().expect("listed").len()
}

#[test]
fn records_written_while_no_agent_ran_are_served_before_the_agent_serves() {
    let machine = Machine::new();
    let stays = machine.life(async |agent| {
        let (first, second) = (agent.create("c1").await, agent.create("c2").await);
        let stays = agent.create("c3").await;
        agent.queue_deletion(&attachment("c1", "eth0"), Some(&first));
        agent.queue_deletion(&attachment("c2", "eth0"), None);
        agent.queue_deletion(&attachment("stranger", "eth0"), None);
        drop(second);
        stays.id
    });
    machine.life(async |agent| {
        let ids: Vec<_> = agent.life.endpoints.registry.list().iter().map(|h| h.id).collect();
        assert_eq!((ids, records(&agent)), (vec![stays], 0));
        assert_eq!(agent.life.endpoints.deletions.status().0.drained, 3);
        agent.assert_healthy().await;
        agent.create("c1").await;
        agent.assert_healthy().await;
    });
}

#[test]
fn a_record_that_comes_while_the_agent_runs_is_served_without_being_asked_for() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        agent.life.tasks.operations.spawn(deletions::watch(agent.life.clone()));
        let canary = || agent.life.endpoints.deletions.status().0.canary;
        eventually("the canary comes out", || canary().starts_with("came out after")).await;
        assert_eq!(agent.life.endpoints.deletions.status().1, Health::Ok);
        agent.queue_deletion(&attachment("c1", "eth0"), Some(&handle));
        eventually("the endpoint goes", || agent.life.endpoints.registry.is_empty() && records(&agent) == 0).await;
        agent.life.tasks.stop.cancel();
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_queue_whose_directory_is_taken_away_is_watched_again() {
    Machine::new().life(async |agent| {
        agent.life.tasks.operations.spawn(deletions::watch(agent.life.clone()));
        let canary = || agent.life.endpoints.deletions.status().0.canary;
        eventually("the canary comes out", || canary().starts_with("came out after")).await;
        let handle = agent.create("c1").await;
        std::fs::remove_dir_all(directory(&agent)).expect("removed");
        eventually("the directory is made anew", || directory(&agent).is_dir()).await;
        agent.queue_deletion(&attachment("c1", "eth0"), Some(&handle));
        eventually("the endpoint goes", || agent.life.endpoints.registry.is_empty() && records(&agent) == 0).await;
        agent.life.tasks.stop.cancel();
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_queue_that_cannot_be_used_is_reported_and_recovers() {
    Machine::new().life(async |agent| {
        std::fs::write(directory(&agent), b"a file in the way").expect("written");
        agent.life.tasks.operations.spawn(deletions::watch(agent.life.clone()));
        let row = || agent.life.tasks.controllers.list().into_iter().find(|c| c.name == "deletion-queue");
        eventually("it is reported", || row().is_some_and(|r| r.consecutive_failures > 0)).await;
        assert!(row().and_then(|r| r.last_error).is_some_and(|e| e.contains("deletions")), "{:?}", row());
        std::fs::remove_file(directory(&agent)).expect("removed");
        eventually("it is used again", || row().is_some_and(|r| r.consecutive_failures == 0)).await;
        let canary = || agent.life.endpoints.deletions.status();
        eventually("the canary comes out", || canary().0.canary.starts_with("came out after")).await;
        agent.life.tasks.stop.cancel();
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_canary_that_could_not_be_sent_is_sent_again() {
    Machine::new().life(async |agent| {
        agent.life.tasks.operations.spawn(deletions::watch(agent.life.clone()));
        let canary = || agent.life.endpoints.deletions.status().0.canary;
        eventually("the canary comes out", || canary().starts_with("came out after")).await;
        let full = QueueError::Full { directory: directory(&agent) };
        agent.life.endpoints.deletions.canary_sent(Err(full.into()));
        assert!(canary().starts_with("could not be sent"), "{}", canary());
        eventually("the next tick sends another", || canary().starts_with("came out after")).await;
        agent.life.tasks.stop.cancel();
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_delete_that_fails_keeps_its_record_until_one_succeeds() {
    for op in [Op::RemoveReachable, Op::RemovePrograms, Op::RemoveLink] {
        let machine = Machine::new();
        machine.life(async |agent| {
            let handle = agent.create("c1").await;
            agent.queue_deletion(&attachment("c1", "eth0"), Some(&handle));
            agent.kernel.fail_always(op, Kind::Exhausted);
            for _ in 0..2 {
                assert_eq!((agent.drain().await, records(&agent)), (1, 1));
                assert_eq!(agent.life.endpoints.deletions.status().0.records, 1);
            }
        });
        machine.life(async |agent| {
            assert_eq!(
                (agent.life.endpoints.registry.len(), records(&agent)),
                (1, 1),
                "{op:?}: the start cannot serve it either"
            );
            agent.kernel.mend(op);
            assert_eq!((agent.drain().await, records(&agent)), (0, 0));
            agent.assert_nothing_left().await;
        });
    }
}

#[test]
fn a_full_disk_keeps_the_record_until_there_is_space() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        agent.queue_deletion(&attachment("c1", "eth0"), Some(&handle));
        agent.disk.fill();
        assert_eq!(agent.drain().await, 1);
        assert_eq!((agent.life.endpoints.registry.len(), records(&agent)), (1, 1));
        agent.disk.mend();
        assert_eq!(agent.drain().await, 0);
        assert_eq!(records(&agent), 0);
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_record_of_another_epoch_or_network_does_not_touch_the_endpoint_that_is_there() {
    Machine::new().life(async |agent| {
        let old = agent.create("c1").await;
        agent.delete(&old).await;
        agent.quiet().await;
        agent.try_create(Agent::spec("c1", "eth0")).await.expect("attached anew");
        agent.queue_deletion(&attachment("c1", "eth0"), Some(&old));
        let mut other = attachment("c1", "eth0");
        other.network = "other".parse().expect("network");
        agent.queue_deletion(&other, None);
        agent.kernel.clear_call_log();
        assert_eq!(agent.drain().await, 0);
        assert_eq!((agent.operations(), records(&agent)), (vec![], 0));
        assert_eq!(agent.life.endpoints.registry.len(), 1);
        agent.assert_healthy().await;
    });
}

#[test]
fn a_record_of_another_boot_is_dropped_unserved() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        let deletion = deletion(&attachment("c1", "eth0"), Some(&handle), "another boot".into());
        agent.life.endpoints.deletions.queue.put(&deletion).expect("written");
        assert_eq!((agent.drain().await, records(&agent)), (0, 0));
        assert_eq!(agent.life.endpoints.registry.len(), 1);
        agent.assert_healthy().await;
    });
}

#[test]
fn a_file_that_is_no_record_is_put_aside_and_the_others_are_served() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        agent.queue_deletion(&attachment("c1", "eth0"), Some(&handle));
        let path = directory(&agent);
        std::fs::write(path.join("garbage"), b"{\"version\":1,").expect("written");
        std::fs::write(path.join("large"), vec![b'x'; 1 << 20]).expect("written");
        std::fs::create_dir(path.join("directory")).expect("made");
        std::os::unix::fs::symlink("/etc/passwd", path.join("link")).expect("linked");
        assert_eq!(agent.drain().await, 0);
        assert_eq!(records(&agent), 0);
        assert!(agent.life.endpoints.registry.is_empty());
        let (status, health, message) = agent.life.endpoints.deletions.status();
        assert_eq!((status.unusable, health), (4, Health::Degraded), "{message}");
        let kept = std::fs::read_dir(path.join("bad")).expect("listed").count();
        assert_eq!(kept, 4, "kept for a person to look at");
        assert!(std::fs::metadata("/etc/passwd").is_ok_and(|m| m.is_file()), "what the link led to is untouched");
        // Status and audit agree, until that person has removed them.
        let findings = agent.findings(true).await;
        assert_eq!(findings.len(), 4, "{findings:?}");
        for finding in &findings {
            assert_eq!((finding.object.as_str(), finding.repairable), ("queue-file", false), "{finding:?}");
            assert!(finding.remedy.contains(&format!("`rm -r {}`", finding.subject)), "{finding:?}");
        }
        std::fs::remove_dir_all(path.join("bad")).expect("removed");
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_container_that_is_added_again_loses_the_endpoint_from_before_first() {
    Machine::new().life(async |agent| {
        let old = agent.create("c1").await;
        agent.queue_deletion(&attachment("c1", "eth0"), Some(&old));
        let new = agent.try_create(Agent::spec("c1", "eth0")).await.expect("the old one went first");
        assert!(new.epoch > old.epoch.0);
        assert_eq!(records(&agent), 0);
        assert_eq!(agent.drain().await, 0);
        assert_eq!(agent.life.endpoints.registry.len(), 1, "and the new one stays");
        agent.assert_healthy().await;
    });
}

#[test]
fn a_container_whose_queued_delete_cannot_be_finished_is_told_to_come_again() {
    Machine::new().life(async |agent| {
        let old = agent.create("c1").await;
        agent.queue_deletion(&attachment("c1", "eth0"), Some(&old));
        agent.kernel.fail_always(Op::RemoveLink, Kind::Exhausted);
        let error = agent.try_create(Agent::spec("c1", "eth0")).await.expect_err("not yet");
        assert_eq!(error.code, ErrorCode::Busy, "{}", error.message);
        assert!(error.retry_after_ms.is_some_and(|ms| ms > 0));
        // Others need not wait for it.
        agent.create("c2").await;
        agent.kernel.mend(Op::RemoveLink);
        agent.try_create(Agent::spec("c1", "eth0")).await.expect("now");
        agent.assert_healthy().await;
        assert_eq!((agent.life.endpoints.registry.len(), records(&agent)), (2, 0));
    });
}

#[test]
fn a_delete_that_comes_by_the_direct_way_serves_the_record_too() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        agent.queue_deletion(&attachment("c1", "eth0"), Some(&handle));
        assert_eq!(agent.delete(&handle).await.errors, []);
        assert_eq!(records(&agent), 0);
        agent.assert_nothing_left().await;
    });
}

#[test]
fn killed_at_any_step_of_a_queued_delete_the_next_agent_finishes_it_and_the_record_goes() {
    for op in [Op::RemoveAttached, Op::RemoveReachable, Op::RemovePrograms, Op::RemoveLink] {
        let machine = Machine::new();
        let hold = machine.life(async |agent| {
            let handle = agent.create("c1").await;
            agent.queue_deletion(&attachment("c1", "eth0"), Some(&handle));
            let hold = agent.kernel.hold(op);
            let life = agent.life.clone();
            let _drain = tokio::spawn(async move { deletions::drain(&life, Cause::Event).await });
            hold.reached().await;
            assert_eq!(records(&agent), 1, "{op:?}: not before the delete has succeeded");
            hold
        });
        hold.release();
        machine.life(async |agent| {
            assert_eq!(records(&agent), 0, "{op:?}");
            agent.assert_nothing_left().await;
        });
    }
}

#[test]
fn the_audit_shows_what_waits_too_long_and_what_is_of_no_use_and_mends_both() {
    Machine::new().life(async |agent| {
        agent.create("c1").await;
        let mut old = deletion(&attachment("c1", "eth0"), None, agent.life.store.boot_id().to_owned());
        old.written_unix_ms = 1;
        agent.life.endpoints.deletions.queue.put(&old).expect("written");
        std::fs::write(directory(&agent).join("garbage"), b"?").expect("written");
        let findings = agent.findings(false).await;
        let owners: Vec<_> = findings.iter().map(|f| (f.object.as_str(), f.owner.is_some(), f.repairable)).collect();
        assert_eq!(owners.len(), 2, "{findings:?}");
        assert!(
            owners.contains(&("queue-file", true, true)) && owners.contains(&("queue-file", false, true)),
            "{findings:?}"
        );
        let mended = agent.findings(true).await;
        assert!(mended.iter().all(|f| f.repair.as_deref() == Some("mended")), "{mended:?}");
        let left = agent.findings(false).await;
        assert_eq!(left.len(), 1, "what was put aside is for a person to look at: {left:?}");
        std::fs::remove_dir_all(directory(&agent).join("bad")).expect("removed");
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_record_for_what_is_left_of_a_failed_create_waits_until_the_disk_has_room() {
    Machine::new().life(async |agent| {
        agent.kernel.fail_next(Op::EnsureLink, Kind::Permission);
        agent.kernel.fail_next(Op::RemovePrograms, Kind::Other);
        agent.try_create(agent.container("c1")).await.expect_err("asked for");
        agent.quiet().await;
        agent.queue_deletion(&attachment("c1", "eth0"), None);
        agent.disk.fill();
        assert_eq!(agent.drain().await, 1, "its intent cannot be closed");
        agent.disk.mend();
        assert_eq!(agent.drain().await, 0);
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_drain_that_hangs_is_named_to_the_watchdog() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        agent.life.tasks.operations.spawn(deletions::watch(agent.life.clone()));
        let runs = || agent.life.tasks.controllers.list().into_iter().find(|c| c.name == deletions::CONTROLLER);
        eventually("the first look has ended", || runs().is_some_and(|c| c.successes > 0)).await;
        agent.disk.hold();
        agent.queue_deletion(&attachment("c1", "eth0"), Some(&handle));
        agent.disk.reached().await;
        eventually("the look is under way", || runs().is_some_and(|c| c.running_since_unix_ms.is_some())).await;
        let overdue = || agent.life.tasks.controllers.overdue(&watchdog::CRITICAL);
        assert_eq!(overdue(), None, "it has its time");
        after(OVERDUE + Duration::from_secs(1), async {
            assert!(overdue().is_some_and(|(name, ran)| name == deletions::CONTROLLER && ran > OVERDUE));
        })
        .await;
        agent.disk.mend();
        eventually("the look ends", || runs().is_some_and(|c| c.running_since_unix_ms.is_none())).await;
        assert_eq!(overdue(), None);
        agent.life.tasks.stop.cancel();
        agent.quiet().await;
        assert_eq!(records(&agent), 0);
    });
}

/// A delete of what the agent does not know, as a runtime sends it.
#[test]
fn a_delete_of_the_unknown_takes_back_what_is_left_in_that_name_and_nothing_else() {
    Machine::new().life(async |agent| {
        let stays = agent.create("c1").await;
        // Two creates whose undo could not take everything back: their addresses are still held.
        for name in ["c2", "c3"] {
            agent.kernel.fail_next(Op::EnsureReachable, Kind::Other);
            agent.kernel.fail_next(Op::RemoveLink, Kind::Exhausted);
            agent.try_create(agent.container(name)).await.expect_err("asked for");
            agent.quiet().await;
        }
        let held = |name: &str| {
            let of = |o: &LeaseOwner| matches!(o, LeaseOwner::Attachment { attachment: a, .. } if a.container_id.as_str() == name);
            wharf_kit::sync::lock(&agent.life.network.addresses.ipam).owned_by(of).len()
        };
        assert_eq!(["c1", "c2", "c3"].map(held), [2, 2, 2]);
        let mut other = attachment("c2", "eth0");
        other.network = "other".parse().expect("network");
        agent.del(&other, DeleteOptions::default()).await;
        assert_eq!(["c1", "c2", "c3"].map(held), [2, 2, 2], "of another network");
        let result = agent.del(&attachment("c2", "eth0"), DeleteOptions::default()).await;
        assert_eq!((result.leases_released.len(), result.errors), (2, vec![]));
        assert_eq!(["c1", "c2", "c3"].map(held), [2, 0, 2]);
        // Its link is gone, so nothing speaks for its addresses.
        wharf_agent::addresses::resting::wake(&agent.life.network.addresses).await.expect("checked");
        assert_eq!(agent.resting(), []);
        assert_eq!(agent.kernel.dump().await.expect("dump").links.len(), 2, "c1's, and what is left of c3");
        agent.kernel.fail_next(Op::RemoveLink, Kind::Exhausted);
        let failed = agent.del(&attachment("c3", "eth0"), DeleteOptions::default()).await;
        assert_eq!((failed.leases_released, failed.errors.len()), (vec![], 1), "its link is still there");
        assert_eq!(held("c3"), 2);
        assert!(agent.lease_owner(addresses(&stays)[0]).is_some(), "an endpoint's stay");
        let intents = agent.snapshot().await.intents;
        assert!(intents.iter().all(|(_, _, i)| matches!(i, Intent::Create { .. })), "{intents:?}");
    });
}
