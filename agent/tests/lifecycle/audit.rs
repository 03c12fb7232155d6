//! The audit on a running agent: every kind of leak is found with its owner, mended, and nothing that works is judged.

use std::net::IpAddr;

use wharf_agent::{explain, reconcile::Reconcile};
use wharf_api::{Finding, Health};
use wharf_core::{
    endpoint::{EndpointRecord, host_ifname},
    ids::{Epoch, IfIndex},
    ipam::{LeaseRequest, Wanted},
    kernel::{EndpointKernel as _, KernelErrorKind, LinkRef, LinkSpec, NodeKernel as _, NodeSpec, ProgramSpec},
    overlap::{NodeNetwork, Way},
    plan::DeleteOptions,
    state::Level,
    store::{Change, Intent, Lease, LeaseOwner},
};
use wharf_datapath::fake::Operation as Op;
use wharf_kit::sync::lock;

use crate::support::*;

/// What an endpoint 9 of container `lost` would be; nothing of it is anywhere yet.
fn lost(agent: &Agent) -> EndpointRecord {
    let netns = agent.kernel.add_netns(netns_path("lost"));
    let epoch = Epoch(9_000);
    let mut record = agent.life.endpoints.registry.list()[0].shared.read(|v| v.record.clone());
    record.id = id(9);
    record.epoch = epoch;
    record.attachment = attachment("lost", "eth0");
    record.netns = netns;
    record.host_ifname = host_ifname(record.id, epoch);
    (record.ipv4, record.ipv6) = (Some([10, 88, 0, 99].into()), None);
    record
}

async fn plant_intent(agent: &Agent, record: &EndpointRecord) {
    let intent =
        Intent::Create { attachment: record.attachment.clone(), netns_path: record.netns.path.clone(), link: None };
    agent.commit(vec![Change::PutIntent(record.id, record.epoch, intent)]).await;
}

async fn plant_pins(agent: &Agent, record: &EndpointRecord) {
    let spec = ProgramSpec {
        id: record.id,
        container_mac: record.container_mac,
        host_mac: record.host_mac,
        debug: false,
        keep: false,
    };
    agent.kernel.ensure_programs(&spec).await.expect("pins");
}

async fn plant_link(agent: &Agent, record: &mut EndpointRecord) {
    let spec = LinkSpec {
        id: record.id,
        epoch: record.epoch,
        attachment: record.attachment.clone(),
        host_ifname: record.host_ifname.clone(),
        netns: record.netns.clone(),
        ifname: record.attachment.ifname.clone(),
        container_mac: record.container_mac,
        host_mac: record.host_mac,
        mtu: record.mtu,
    };
    let link = agent.kernel.ensure_link(&spec).await.expect("link");
    (record.host_ifindex, record.container_ifindex) = (link.host_ifindex, link.container_ifindex);
}

fn objects(findings: &[Finding]) -> Vec<&str> {
    findings.iter().map(|f| f.object.as_str()).collect()
}

/// The findings are these, repair mends them, and nothing is amiss afterwards.
async fn assert_mended(agent: &Agent, expected: &[&str]) {
    let looked = agent.findings(false).await;
    assert_eq!(objects(&looked), expected, "{looked:#?}");
    assert!(looked.iter().all(|f| f.repairable && f.repair.is_none()), "{looked:#?}");
    assert_eq!(objects(&agent.findings(false).await), expected, "looking changes nothing");
    let mended = agent.findings(true).await;
    assert!(mended.iter().all(|f| f.repair.as_deref() == Some("mended")), "{mended:#?}");
    agent.assert_healthy().await;
}

#[test]
fn everything_of_a_lost_create_is_found_with_its_owner_and_mended() {
    Machine::new().life(async |agent| {
        agent.create("c1").await;
        let mut record = lost(&agent);
        plant_intent(&agent, &record).await;
        plant_pins(&agent, &record).await;
        plant_link(&agent, &mut record).await;
        agent.kernel.ensure_attached(&LinkRef::of(&record)).await.expect("attached");
        agent.kernel.ensure_connected(&record).await.expect("connected");
        agent.kernel.ensure_reachable(&record).await.expect("reachable");
        let findings = agent.findings(false).await;
        for finding in &findings {
            let owner = finding.owner.as_deref().unwrap_or_default();
            assert!(owner.starts_with("net/lost:eth0 (epoch 9000)"), "{finding:?}");
        }
        assert_mended(&agent, &["link", "pin", "endpoint-row", "call-slot", "route", "intent"]).await;
    });
}

#[test]
fn a_route_of_a_pool_that_is_no_more_is_found_and_removed() {
    Machine::new().life(async |agent| {
        agent.create("c1").await;
        let mut spec = agent.life.network.spec();
        spec.cidrs.push("10.123.0.0/16".parse().expect("CIDR"));
        agent.kernel.ensure_node(&spec).await.expect("node");
        assert_mended(&agent, &["route"]).await;
    });
}

#[test]
fn a_missing_pool_route_is_found() {
    Machine::new().life(async |agent| {
        let NodeSpec { cidrs, .. } = agent.life.network.spec();
        agent
            .kernel
            .ensure_node(&NodeSpec { cidrs: cidrs[1..].to_vec(), ..agent.life.network.spec() })
            .await
            .expect("node");
        let findings = agent.findings(false).await;
        assert_eq!(objects(&findings), ["node"]);
        assert!(findings[0].subject.contains(&cidrs[0].to_string()), "{findings:?}");
    });
}

#[test]
fn a_lease_without_an_endpoint_is_found_and_released() {
    Machine::new().life(async |agent| {
        agent.create("c1").await;
        let ip: IpAddr = "10.88.0.99".parse().expect("address");
        let owner = LeaseOwner::Attachment { attachment: attachment("lost", "eth0"), epoch: Epoch(9_000) };
        let wanted = LeaseRequest { pool: None, ipv4: Wanted::Exact([10, 88, 0, 99].into()), ipv6: Wanted::None };
        lock(&agent.life.network.addresses.ipam).lease(&wanted, owner.clone(), 0).expect("leased");
        let pool = agent.life.config.default_pool.clone();
        agent.commit(vec![Change::PutLease(Lease { ip, pool, owner, since_unix_ms: 0 })]).await;
        let findings = agent.findings(false).await;
        assert!(findings[0].owner.as_deref().is_some_and(|o| o.contains("net/lost:eth0")), "{findings:?}");
        assert_mended(&agent, &["lease"]).await;
        assert_eq!(agent.lease_owner(ip), None, "in memory too");
    });
}

#[test]
fn a_lease_that_only_memory_knows_is_found_with_its_owner() {
    Machine::new().life(async |agent| {
        let owner = LeaseOwner::Attachment { attachment: attachment("lost", "eth0"), epoch: Epoch(9_000) };
        lock(&agent.life.network.addresses.ipam).lease(&LeaseRequest::default(), owner, 0).expect("leased");
        let findings = agent.findings(false).await;
        assert_eq!(objects(&findings), ["lease", "lease"]);
        assert!(findings.iter().all(|f| f.problem.contains("not in the store")), "{findings:?}");
        assert!(findings[0].owner.as_deref().is_some_and(|o| o.contains("net/lost:eth0")), "{findings:?}");
    });
}

#[test]
fn an_endpoint_without_a_record_is_found() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        agent.commit(vec![Change::RemoveEndpoint(handle.id, handle.epoch)]).await;
        let findings = agent.findings(false).await;
        let endpoint = findings.iter().find(|f| f.object == "endpoint").expect("found");
        assert!(endpoint.problem.contains("no record"), "{endpoint:?}");
        assert_eq!(endpoint.owner.as_deref(), Some("net/c1:eth0"));
    });
}

#[test]
fn what_a_live_endpoint_lacks_is_found_and_rebuilt() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        let record = handle.shared.read(|v| v.record.clone());
        let ip = addresses(&handle)[0];

        agent.kernel.remove_route_behind_the_back(ip);
        assert_mended(&agent, &["route"]).await;
        agent.kernel.remove_endpoint_row(ip, handle.epoch).await.expect("row");
        assert_mended(&agent, &["endpoint-row"]).await;
        agent.kernel.remove_call_slot(handle.id.get().into()).await.expect("slot");
        assert_mended(&agent, &["call-slot"]).await;
        agent.kernel.remove_programs(handle.id).await.expect("pins");
        assert_mended(&agent, &["pin", "call-slot"]).await;
        let mut wrong = record.clone();
        wrong.host_ifindex = IfIndex(4_711);
        agent.kernel.ensure_reachable(&wrong).await.expect("rows");
        assert_mended(&agent, &["endpoint-row", "endpoint-row"]).await;
    });
}

#[test]
fn a_link_that_was_taken_away_is_found_and_not_mended() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        let host = handle.shared.read(|v| v.record.host_ifname.clone());
        agent.kernel.remove_link_behind_the_back(host.as_str());
        let findings = agent.findings(false).await;
        let link = findings.iter().find(|f| f.object == "link").expect("found");
        assert!(!link.repairable);
        agent.delete(&handle).await;
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_delete_that_stopped_half_way_is_found_and_left_to_a_delete() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        agent.kernel.fail_next(Op::RemoveLink, wharf_core::kernel::KernelErrorKind::Other);
        agent.delete(&handle).await;
        let findings = agent.findings(true).await;
        let intent = findings.iter().find(|f| f.object == "intent").expect("found");
        assert!(!intent.repairable, "{intent:?}");
        assert_eq!(agent.snapshot().await.intents.len(), 1, "not forgotten");
        agent.delete(&handle).await;
        agent.assert_nothing_left().await;
    });
}

#[test]
fn an_intent_stays_open_as_long_as_what_it_tells_of_cannot_be_removed() {
    Machine::new().life(async |agent| {
        agent.create("c1").await;
        let mut record = lost(&agent);
        plant_intent(&agent, &record).await;
        plant_link(&agent, &mut record).await;
        agent.kernel.fail_next(Op::RemoveLink, wharf_core::kernel::KernelErrorKind::Other);
        let findings = agent.findings(true).await;
        assert!(
            findings.iter().all(|f| f.repair.as_deref().is_some_and(|r| r.starts_with("not mended"))),
            "{findings:?}"
        );
        assert_mended(&agent, &["link", "intent"]).await;
    });
}

#[test]
fn a_create_at_any_step_is_not_judged() {
    for step in crate::create_undone::STEPS {
        Machine::new().life(async |agent| {
            let hold = agent.kernel.hold(step);
            let create = agent.spawn_create(agent.container("c1"));
            hold.reached().await;
            assert_eq!(agent.findings(true).await, []);
            hold.release();
            create.await.expect("task").expect("created");
            agent.assert_healthy().await;
        });
    }
}

#[test]
fn a_delete_at_any_step_is_not_judged() {
    for step in [Op::RemoveAttached, Op::RemoveReachable, Op::RemovePrograms, Op::RemoveLink] {
        Machine::new().life(async |agent| {
            let handle = agent.create("c1").await;
            let hold = agent.kernel.hold(step);
            let delete = agent.spawn_delete(&[&handle], DeleteOptions::default());
            hold.reached().await;
            assert_eq!(agent.findings(true).await, []);
            hold.release();
            assert_eq!(delete.await.expect("task").errors, []);
            agent.assert_nothing_left().await;
        });
    }
}

/// The build's work ends while the delete's goes on: the endpoint is still worked on.
#[test]
fn a_delete_that_followed_a_build_is_not_judged() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        let build = agent.kernel.hold(Op::EnsureConfig);
        let teardown = agent.kernel.hold(Op::RemoveLink);
        let _built = agent.request(&handle, Level::Policy).await;
        build.reached().await;
        let delete = agent.spawn_delete(&[&handle], DeleteOptions::default());
        is_told_to_end(&handle).await;
        build.release();
        teardown.reached().await;
        assert_eq!(agent.findings(true).await, []);
        teardown.release();
        assert_eq!(delete.await.expect("task").errors, []);
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_create_between_the_look_at_the_store_and_that_at_memory_is_not_judged() {
    Machine::new().life(async |agent| {
        let hold = agent.kernel.hold(Op::ObserveNode);
        let asked = agent.clone();
        let audit = tokio::spawn(async move { asked.findings(false).await });
        hold.reached().await;
        agent.create("c1").await;
        hold.release();
        assert_eq!(audit.await.expect("task"), []);
    });
}

#[test]
fn programs_ready_ahead_of_need_are_not_judged() {
    let mut machine = Machine::new();
    machine.config.prepared_programs = 3;
    machine.life(async |agent| {
        let hold = agent.kernel.hold(Op::EnsurePrograms);
        let life = agent.life.clone();
        let refill = tokio::spawn(async move { wharf_agent::endpoint::prepared::refill(&life).await });
        hold.reached().await;
        assert_eq!(agent.findings(true).await, []);
        hold.release();
        refill.await.expect("task").expect("refilled");
        assert_eq!(agent.findings(true).await, []);
        assert_eq!(agent.life.endpoints.prepared.fill(), (3, 3));
    });
}

/// Between the look and the repair the id may have got a new user.
#[test]
fn pins_whose_id_was_given_out_meanwhile_are_not_removed() {
    let mut machine = Machine::new();
    machine.config.prepared_programs = 1;
    machine.life(async |agent| {
        agent.create("c1").await;
        let mut leaked = lost(&agent);
        leaked.id = id(2);
        leaked.host_ifname = host_ifname(leaked.id, leaked.epoch);
        plant_link(&agent, &mut leaked).await;
        plant_pins(&agent, &leaked).await;
        // The link is mended first; while that stands still, the id of the leaked pins is taken for a prepared set.
        let hold = agent.kernel.hold(Op::RemoveLink);
        let asked = agent.clone();
        let repair = tokio::spawn(async move { asked.audit(true).await });
        hold.reached().await;
        wharf_agent::endpoint::prepared::refill(&agent.life).await.expect("refilled");
        assert!(agent.life.endpoints.prepared.ids().contains(&id(2)));
        hold.release();
        let findings = repair.await.expect("task").expect("audit").findings;
        let pin = findings.iter().find(|f| f.object == "pin").expect("it was found");
        assert!(pin.repair.as_deref().is_some_and(|r| r.starts_with("not mended")), "{pin:?}");
        agent.create("c2").await;
        agent.assert_healthy().await;
    });
}

#[test]
fn addresses_that_rest_are_counted_as_they_are_listed() {
    let mut machine = Machine::new();
    machine.config.ip_rest_ms = 3_600_000;
    machine.life(async |agent| {
        let handle = agent.create("c1").await;
        assert_eq!(agent.delete(&handle).await.errors, []);
        // The addresses of a create that was undone rest in memory alone: the store never had their leases.
        agent.kernel.fail_next(Op::EnsureLink, KernelErrorKind::Other);
        agent.try_create(agent.container("c2")).await.expect_err("asked for");
        let report = wharf_agent::audit::audit(&agent.life, &agent.node.audit_findings, false).await.expect("audit");
        assert_eq!(lock(&agent.life.network.addresses.ipam).resting().len(), 4);
        assert_eq!(report.examined.get("resting-addresses"), Some(&4), "{:?}", report.examined);
    });
}

#[test]
fn a_network_that_comes_to_overlap_a_pool_is_named_until_it_is_gone_and_nothing_is_tried() {
    Machine::new().life(async |agent| {
        agent.create("c1").await;
        let (net, way) =
            ("10.88.0.128/25".parse().expect("CIDR"), Way::OnLink { by_kernel: true, point_to_point: false });
        agent.kernel.set_networks(vec![NodeNetwork { net, way, ifname: Some("lan0".to_owned()) }]);
        let findings = agent.findings(true).await;
        let [finding] = findings.as_slice() else { panic!("{findings:?}") };
        assert_eq!((finding.object.as_str(), finding.subject.as_str()), ("node", "pool 10.88.0.0/24"));
        assert!(finding.problem.contains("10.88.0.128/25 dev lan0"), "{finding:?}");
        assert_eq!((finding.repairable, finding.repair.as_deref()), (false, None), "{finding:?}");
        Reconcile::default().run(&agent.life, &agent.node.audit_findings).await.expect("leak audit");
        assert_eq!(lock(&agent.node.audit_findings).map(|left| left.amiss), Some(1), "status is degraded");
        let told = explain::explain(&agent.node, "10.88.0.200").await.expect("explained");
        assert_eq!(told.health, Health::Degraded, "{}", told.summary);
        assert!(told.summary.contains("10.88.0.128/25 dev lan0 overlaps the pool"), "{}", told.summary);
        agent.kernel.set_networks(Vec::new());
        assert_eq!(agent.findings(false).await, []);
    });
}
