//! Links that others change: the agent restores the host side; it leaves alone what a container does to its own
//! interface.

use std::time::Duration;

use wharf_agent::{endpoint::look, findings::Left, node::endpoint::Handle, reconcile::Reconcile};
use wharf_api::MendedBy;
use wharf_core::{
    finding::{Verdict, verdict},
    kernel::{KernelErrorKind, NodeKernel as _},
    state::{Level, State},
};
use wharf_datapath::fake::{LinkChange, Operation as Op};
use wharf_kit::sync::lock;

use crate::support::*;

fn change(agent: &Agent, handle: &Handle, change: LinkChange) {
    let host = handle.shared.read(|v| v.record.host_ifname.clone());
    assert!(agent.kernel.change_link_behind_the_back(host.as_str(), change), "the link is there");
}

fn regenerations(handle: &Handle) -> u64 {
    handle.shared.read(|v| v.status.regenerations)
}

#[test]
fn known_values_of_the_host_side_are_put_back() {
    let mac = "02:00:00:00:00:99".parse().expect("MAC");
    for tried in [LinkChange::HostMac(mac), LinkChange::HostArp, LinkChange::HostMtu(1400), LinkChange::HostDown] {
        Machine::new().life(async |agent| {
            let handle = agent.create("c1").await;
            change(&agent, &handle, tried.clone());
            let mut reconcile = Reconcile::default();
            reconcile.run(&agent.life, &agent.node.audit_findings).await.expect("audit");
            assert_eq!(lock(&agent.node.audit_findings).map(|left| left.amiss), Some(1), "{tried:?}: seen once");
            reconcile.run(&agent.life, &agent.node.audit_findings).await.expect("audit");
            assert_eq!(*lock(&agent.node.audit_findings), Some(Left::default()), "{tried:?}: seen twice");
            agent.assert_healthy().await;
        });
    }
}

#[test]
fn what_a_container_does_to_its_own_interface_is_reported_and_neither_regenerated_nor_the_nodes_fault() {
    let mac = "02:00:00:00:00:99".parse().expect("MAC");
    let renamed = || LinkChange::ContainerRenamed("mine0".to_owned());
    for tried in [LinkChange::ContainerMac(mac), LinkChange::ContainerMtu(9000), LinkChange::ContainerDown, renamed()] {
        Machine::new().life(async |agent| {
            let handle = agent.create("c1").await;
            let before = regenerations(&handle);
            change(&agent, &handle, tried.clone());
            let mut reconcile = Reconcile::default();
            for _ in 0..3 {
                reconcile.run(&agent.life, &agent.node.audit_findings).await.expect("audit");
                assert_eq!(
                    *lock(&agent.node.audit_findings),
                    Some(Left { containers: 1, ..Left::default() }),
                    "{tried:?}"
                );
            }
            assert_eq!(regenerations(&handle), before, "{tried:?}");
            let told = handle.shared.log_lines().into_iter().filter(|l| l.event == "audit").count();
            assert_eq!(told, 1, "{tried:?}: told once");
            let findings = agent.findings(false).await;
            assert_eq!(findings.len(), 1, "{findings:?}");
            assert_eq!(findings[0].mended_by, MendedBy::Container, "{findings:?}");
            // Who asks for it gets it back, where that can be.
            let mended = agent.findings(true).await;
            if matches!(tried, LinkChange::ContainerRenamed(_)) {
                assert_eq!((mended[0].repairable, &mended[0].repair), (false, &None), "{mended:?}");
                assert_eq!(agent.findings(false).await.len(), 1, "it stays in the audit");
            } else {
                agent.assert_healthy().await;
            }
        });
    }
}

/// Whether the container did it, or somebody on the node, cannot be told; nobody but this container is harmed.
#[test]
fn a_link_that_was_deleted_under_a_living_container_is_one_finding_with_one_remedy() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        let host = handle.shared.read(|v| v.record.host_ifname.clone());
        assert!(agent.kernel.remove_link_behind_the_back(host.as_str()));
        let mut reconcile = Reconcile::default();
        for _ in 0..3 {
            reconcile.run(&agent.life, &agent.node.audit_findings).await.expect("audit");
            assert_eq!(*lock(&agent.node.audit_findings), Some(Left { containers: 1, ..Left::default() }));
        }
        let told = handle.shared.log_lines().into_iter().filter(|l| l.event == "audit").count();
        assert_eq!(told, 1, "told once");
        let findings = agent.findings(true).await;
        let [finding] = findings.as_slice() else { panic!("{findings:?}") };
        assert_eq!((finding.subject.as_str(), finding.mended_by), ("eth0", MendedBy::Container), "{finding:?}");
        assert!(finding.remedy.starts_with("recreate the container"), "{finding:?}");
        // What somebody asks for all the same does not fail for ever.
        agent.request(&handle, Level::Datapath).await.await.expect("answered").expect("as far as it can be");
        assert_eq!(agent.findings(false).await.len(), 1, "it stays in the audit");
        // A container that is gone is another matter.
        agent.kernel.remove_netns(&handle.shared.read(|v| v.record.netns.path.clone()));
        let look = look::once(&agent.kernel, &handle).await.expect("looked");
        assert_eq!(verdict(&look.problems), Verdict::Amiss, "{look:?}");
        assert_eq!(agent.delete(&handle).await.errors, []);
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_smaller_mtu_in_a_container_is_a_notice() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        change(&agent, &handle, LinkChange::ContainerMtu(1300));
        assert_eq!(agent.findings(true).await, []);
        let look = look::once(&agent.kernel, &handle).await.expect("looked");
        assert_eq!((look.problems.len(), verdict(&look.problems)), (1, Verdict::Well));
        agent.request(&handle, Level::Datapath).await.await.expect("answered").expect("regenerated");
        assert_eq!(look::once(&agent.kernel, &handle).await.expect("looked").problems.len(), 1, "left as it is");
    });
}

/// The build cannot bring the interface back, and no try would.
#[test]
fn a_container_that_renamed_its_interface_does_not_make_builds_fail() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        change(&agent, &handle, LinkChange::ContainerRenamed("mine0".to_owned()));
        agent.request(&handle, Level::Datapath).await.await.expect("answered").expect("regenerated");
        assert_eq!(handle.shared.read(|v| (v.fsm.state, v.status.last_error.clone())), (State::Ready, None));
        assert_eq!(agent.findings(false).await.len(), 1);
    });
}

#[test]
fn an_endpoint_whose_repair_failed_stays_in_the_audit() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        change(&agent, &handle, LinkChange::HostArp);
        agent.kernel.fail_always(Op::EnsureConnected, KernelErrorKind::Other);
        let tried = agent.findings(true).await;
        assert!(tried[0].repair.as_deref().is_some_and(|r| r.starts_with("not mended")), "{tried:?}");
        assert_eq!(handle.shared.read(|v| v.fsm.state), State::WaitingToRegenerate);
        assert_eq!(agent.findings(false).await.len(), 1, "the broken endpoint is still named");
        agent.kernel.mend(Op::EnsureConnected);
    });
}

#[test]
fn one_finding_does_not_hide_another() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        change(&agent, &handle, LinkChange::HostArp);
        agent.kernel.remove_route_behind_the_back(addresses(&handle)[0]);
        let findings = agent.findings(false).await;
        let objects: Vec<&str> = findings.iter().map(|f| f.object.as_str()).collect();
        assert_eq!(objects, ["link", "route"], "{findings:?}");
    });
}

/// CHECK and `endpoint health` ask by this.
#[test]
fn a_look_at_an_endpoints_health_waits_for_the_build_that_mends_it() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        agent.kernel.remove_call_slot(handle.id.get().into()).await.expect("slot");
        let hold = agent.kernel.hold(Op::EnsureReachable);
        let build = agent.request(&handle, Level::Datapath).await;
        hold.reached().await;
        let (kernel, asked) = (agent.kernel.clone(), handle.clone());
        let look = tokio::spawn(async move { look::settled(&kernel, &asked, Duration::from_secs(5)).await });
        let early = look::once(&agent.kernel, &handle).await.expect("looked");
        assert!(!early.settled && verdict(&early.problems) == Verdict::Amiss, "{early:?}");
        hold.release();
        let look = look.await.expect("task").expect("looked");
        assert_eq!(look.problems, []);
        build.await.expect("answered").expect("built");
    });
}
