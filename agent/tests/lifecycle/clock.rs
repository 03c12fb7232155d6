//! Somebody sets the machine's clock: what is shown follows it, what is decided does not.

use std::time::Duration;

use wharf_agent::reconcile::Reconcile;
use wharf_api::Health;
use wharf_core::{
    ids::Epoch,
    kernel::KernelErrorKind as Kind,
    state::{Level, State},
    store::{Lease, LeaseOwner},
};
use wharf_datapath::fake::Operation as Op;
use wharf_kit::{clock, sync::lock};

use crate::support::*;

const HOUR_MS: i64 = 3_600_000;

/// A build that does not wait for the clock ends in milliseconds.
async fn regenerate(agent: &Agent, handle: &wharf_agent::node::endpoint::Handle) {
    let answer = agent.request(handle, Level::Datapath).await;
    let answer = tokio::time::timeout(Duration::from_secs(5), answer).await.expect("the build waits for the clock");
    answer.expect("answered").expect("built");
}

#[test]
fn a_clock_that_is_set_back_or_forward_delays_no_build() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        for step in [-HOUR_MS, 2 * HOUR_MS, -HOUR_MS] {
            clock::step_unix_time(step);
            regenerate(&agent, &handle).await;
        }
        assert_eq!(state(&handle), State::Ready);
        agent.assert_healthy().await;
    });
}

#[test]
fn after_the_clock_was_set_back_the_leak_audit_still_mends() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        clock::step_unix_time(-HOUR_MS);
        assert!(agent.kernel.remove_route_behind_the_back(addresses(&handle)[0]));
        let mut reconcile = Reconcile::default();
        for _ in 0..2 {
            let round = reconcile.run(&agent.life, &agent.node.audit_findings);
            let round = tokio::time::timeout(Duration::from_secs(5), round).await;
            round.expect("the audit waits for the clock").expect("audit");
        }
        agent.assert_healthy().await;
    });
}

#[test]
fn a_step_is_stuck_by_the_time_it_took_not_by_the_clock() {
    Machine::new().life(async |agent| {
        let hold = agent.kernel.hold(Op::EnsureLink);
        let create = agent.spawn_create(agent.container("c1"));
        hold.reached().await;
        clock::step_unix_time(HOUR_MS);
        assert_eq!(agent.stuck(), [], "it has its time");
        hold.release();
        create.await.expect("task").expect("created");
    });
}

#[test]
fn a_deletion_record_that_waits_is_as_old_as_it_was_when_the_clock_is_set_back() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        let mut old = deletion(&attachment("c1", "eth0"), Some(&handle), agent.life.store.boot_id().to_owned());
        old.written_unix_ms -= 120_000;
        agent.life.endpoints.deletions.queue.put(&old).expect("written");
        agent.kernel.fail_always(Op::RemoveLink, Kind::Exhausted);
        assert_eq!(agent.drain().await, 1);
        let health = |agent: &Agent| agent.life.endpoints.deletions.status().1;
        assert_eq!(health(&agent), Health::Degraded);
        clock::step_unix_time(-HOUR_MS);
        assert_eq!(agent.drain().await, 1);
        assert_eq!(health(&agent), Health::Degraded, "it waits for two minutes still");
        let findings = agent.findings(false).await;
        assert!(findings.iter().any(|f| f.object == "queue-file"), "{findings:?}");
        agent.kernel.mend(Op::RemoveLink);
        assert_eq!(agent.drain().await, 0);
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_lease_from_the_future_is_not_taken_for_a_young_one() {
    Machine::new().life(async |agent| {
        let owner = LeaseOwner::Attachment { attachment: attachment("gone", "eth0"), epoch: Epoch(1) };
        let (ip, pool) = ("10.88.0.99".parse().expect("address"), agent.life.config.default_pool.clone());
        let lost = Lease { ip, pool, owner, since_unix_ms: clock::unix_ms() };
        lock(&agent.life.network.addresses.ipam).claim(lost).expect("claimed");
        assert_eq!(agent.findings(false).await, [], "it may be on its way to the store");
        clock::step_unix_time(-HOUR_MS);
        let findings = agent.findings(true).await;
        assert_eq!(findings.iter().filter(|f| f.repair.as_deref() == Some("mended")).count(), 1, "{findings:?}");
        agent.assert_nothing_left().await;
    });
}
