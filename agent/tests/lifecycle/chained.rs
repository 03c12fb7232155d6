//! Endpoints on links that another plugin made: what is the other plugin's stays, whatever happens.

use std::net::IpAddr;

use wharf_agent::{
    endpoint::create::{CreateSpec, External},
    node::self_checks::Lane,
};
use wharf_api::{EndpointMode, ErrorCode};
use wharf_core::{
    endpoint::{HooksFound, IpOwner, LinkOwner},
    ids::{IfName, MacAddr},
    kernel::{KernelErrorKind as Kind, LinkRef},
    overlap::{NodeNetwork, Way},
    plan::DeleteOptions,
    state::Level,
    store::{Change, Intent},
};
use wharf_datapath::fake::{Attachment, LinkChange, Operation as Op};

use crate::{create_undone::STEPS, support::*};

const HOST: &str = "veth1a2b3c4d";

fn ips() -> Vec<IpAddr> {
    ["10.1.0.2", "fd01::2"].map(|ip| ip.parse().expect("address")).to_vec()
}

fn named(text: &str) -> IfName {
    IfName::parse(text).expect("interface name")
}

/// A container whose `eth0` another plugin made, and the request to take it.
fn chained(agent: &Agent, name: &str) -> CreateSpec {
    agent.kernel.add_netns(netns_path(name));
    assert!(agent.kernel.add_plugin_link(&netns_path(name), named("eth0"), named(HOST), ips()));
    CreateSpec { external: Some(External::Chain), ips: ips(), ..Agent::spec(name, "eth0") }
}

/// Nothing of ours is on the link, which is there.
fn assert_untouched(agent: &Agent) {
    assert!(agent.kernel.has_link(HOST), "the other plugin's link is gone");
    assert_eq!(agent.kernel.attached(HOST), None, "something is left on the other plugin's link");
}

#[test]
fn a_life_on_another_plugins_link() {
    Machine::new().life(async |agent| {
        let made = agent.try_create(chained(&agent, "c1")).await.expect("created");
        assert_eq!((made.mode, made.pool.as_str(), made.host_ifname.as_str()), (EndpointMode::Chained, "", HOST));
        assert_eq!((made.gateway4, made.gateway6), (None, None));
        let handle = agent.handle(made.id);
        let record = handle.shared.read(|v| v.record.clone());
        assert_eq!(record.ip_owner, IpOwner::External);
        assert!(!record.mtu_follows && record.link_owner == LinkOwner::Plugin { hooks: HooksFound::None });
        assert!(ips().iter().all(|ip| agent.lease_owner(*ip).is_none()), "leased elsewhere");
        assert_eq!(agent.snapshot().await.leases, []);
        agent.assert_healthy().await;
        assert_eq!(agent.kernel.attached(HOST), Some(Attachment::Programs));
        agent.request(&handle, Level::Datapath).await.await.expect("answer").expect("built");
        agent.assert_healthy().await;
        let changing = [Op::EnsureMtu, Op::RemoveLink];
        assert!(agent.operations().iter().all(|o| !changing.contains(o)), "{:?}", agent.operations());

        // It stays closed until the plugin removes it.
        assert_eq!(agent.delete(&handle).await.errors, []);
        assert!(agent.kernel.has_link(HOST));
        assert_eq!(agent.kernel.attached(HOST), Some(Attachment::Sink));
        agent.assert_nothing_left().await;
        assert_eq!(agent.resting(), []);
    });
}

#[test]
fn a_failure_of_any_step_leaves_the_link_as_it_was_found() {
    Machine::new().life(async |agent| {
        let spec = chained(&agent, "c1");
        // The link is looked at, not made.
        for step in STEPS.into_iter().filter(|step| *step != Op::EnsureLink) {
            for after_effect in [false, true] {
                match after_effect {
                    true => agent.kernel.fail_next_after_effect(step, Kind::Other),
                    false => agent.kernel.fail_next(step, Kind::Other),
                }
                let error = agent.try_create(spec.clone()).await.expect_err("asked for");
                assert!(!error.message.contains("undoing"), "{step:?}: {}", error.message);
                assert_untouched(&agent);
                agent.assert_nothing_left().await;
            }
        }
        agent.kernel.fail_next(Op::ObservePluginLink, Kind::Unsupported);
        let error = agent.try_create(spec.clone()).await.expect_err("asked for");
        assert_eq!(error.code, ErrorCode::InvalidRequest, "{}", error.message);
        let other = MacAddr([2, 0, 0, 0, 0, 0x77]);
        let error = agent.try_create(CreateSpec { mac: Some(other), ..spec.clone() }).await.expect_err("asked for");
        assert!(error.message.contains("02:00:00:00:00:77 is asked for"), "{}", error.message);
        assert_untouched(&agent);
        agent.try_create(spec).await.expect("the link can still be taken");
        agent.assert_healthy().await;
    });
}

#[test]
fn an_undo_that_fails_is_resumed() {
    Machine::new().life(async |agent| {
        agent.kernel.fail_next(Op::EnsureReachable, Kind::Other);
        agent.kernel.fail_next(Op::RemoveFromPluginLink, Kind::Other);
        let error = agent.try_create(chained(&agent, "c1")).await.expect_err("asked for");
        assert!(error.message.contains("undoing"), "{}", error.message);
        assert_eq!(agent.kernel.attached(HOST), Some(Attachment::Sink), "closed until then");
        wharf_agent::endpoint::resume::resume(&agent.life).await.expect("resumed");
        assert_untouched(&agent);
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_link_that_was_found_closed_is_closed_again_by_an_undo() {
    Machine::new().life(async |agent| {
        let spec = chained(&agent, "c1");
        let made = agent.try_create(spec.clone()).await.expect("created");
        agent.delete(&agent.handle(made.id)).await;
        agent.kernel.fail_next(Op::EnsureReachable, Kind::Other);
        agent.try_create(spec.clone()).await.expect_err("asked for");
        assert_eq!(agent.kernel.attached(HOST), Some(Attachment::Sink));
        agent.try_create(spec).await.expect("created");
        assert_eq!(agent.kernel.attached(HOST), Some(Attachment::Programs));
        agent.assert_healthy().await;
    });
}

#[test]
fn a_restart_keeps_it_and_an_interrupted_create_leaves_the_link_as_it_was() {
    let machine = Machine::new();
    let record = machine.life(async |agent| {
        let made = agent.try_create(chained(&agent, "c1")).await.expect("created");
        agent.handle(made.id).shared.read(|v| v.record.clone())
    });
    machine.life(async |agent| {
        agent.assert_healthy().await;
        assert_eq!(agent.handle(record.id.get()).shared.read(|v| v.record.clone()), record);
        // As if the create had been killed before it was stored.
        let link = Some(Box::new(LinkRef::of(&record)));
        let intent =
            Intent::Create { attachment: record.attachment.clone(), netns_path: record.netns.path.clone(), link };
        let changes =
            vec![Change::RemoveEndpoint(record.id, record.epoch), Change::PutIntent(record.id, record.epoch, intent)];
        agent.commit(changes).await;
    });
    machine.life(async |agent| {
        assert_untouched(&agent);
        agent.assert_nothing_left().await;
    });
}

#[test]
fn an_endpoint_whose_link_the_plugin_removed_is_deleted_at_the_next_start() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.try_create(chained(&agent, "c1")).await.expect("created");
    });
    assert!(machine.kernel.remove_link_behind_the_back(HOST));
    machine.life(async |agent| agent.assert_nothing_left().await);
}

#[test]
fn an_interrupted_delete_ends_without_the_link() {
    let machine = Machine::new();
    machine.life(async |agent| {
        let made = agent.try_create(chained(&agent, "c1")).await.expect("created");
        agent.kernel.fail_always(Op::RemovePrograms, Kind::Other);
        assert_ne!(agent.delete(&agent.handle(made.id)).await.errors, []);
    });
    machine.kernel.mend(Op::RemovePrograms);
    machine.life(async |agent| {
        assert!(agent.kernel.has_link(HOST));
        assert_eq!(agent.kernel.attached(HOST), Some(Attachment::Sink));
        agent.assert_nothing_left().await;
    });
}

#[test]
fn what_is_amiss_with_the_link_is_told_and_not_changed() {
    Machine::new().life(async |agent| {
        let made = agent.try_create(chained(&agent, "c1")).await.expect("created");
        assert!(agent.kernel.change_link_behind_the_back(HOST, LinkChange::HostDown));
        let findings = agent.findings(true).await;
        let down = findings.iter().find(|f| f.problem.contains("down")).expect("told");
        assert!(down.problem.contains("another plugin") && !down.repairable, "{down:?}");
        assert!(agent.findings(false).await.iter().any(|f| f.problem.contains("down")), "brought up all the same");
        // Other differences from a link of ours are the plugin's business.
        for change in [LinkChange::HostMtu(1400), LinkChange::ContainerMtu(1400)] {
            assert!(agent.kernel.change_link_behind_the_back(HOST, change));
        }
        assert_eq!(agent.findings(false).await.len(), 1);
        agent.delete(&agent.handle(made.id)).await;
        agent.assert_nothing_left().await;
    });
}

#[test]
fn addresses_that_are_somebody_elses_are_refused() {
    Machine::new().life(async |agent| {
        let spec = chained(&agent, "c1");
        // The route of the other plugin's to the container is no reason; the node's own address is.
        let network = |net: &str, way| NodeNetwork { net: net.parse().expect("a network"), way, ifname: None };
        agent.kernel.set_networks(vec![
            network("10.1.0.0/24", Way::OnLink { by_kernel: true, point_to_point: false }),
            network("10.1.0.1/32", Way::Address),
        ]);
        for (ip, why) in [("10.88.0.7", "pool"), ("10.1.0.1", "the node's address")] {
            let wanted = CreateSpec { ips: vec![ip.parse().expect("address")], ..spec.clone() };
            let error = agent.try_create(wanted).await.expect_err(ip);
            assert_eq!(error.code, ErrorCode::InvalidRequest, "{ip}: {}", error.message);
            assert!(error.message.contains(ip) && error.message.contains(why), "{}", error.message);
        }
        agent.try_create(spec).await.expect("created");
        agent.kernel.add_netns(netns_path("c2"));
        assert!(agent.kernel.add_plugin_link(&netns_path("c2"), named("eth0"), named("veth2"), ips()));
        let second = CreateSpec { external: Some(External::Chain), ips: ips(), ..Agent::spec("c2", "eth0") };
        let error = agent.try_create(second).await.expect_err("the first has the addresses");
        assert_eq!(error.code, ErrorCode::Exists, "{}", error.message);
        assert_eq!(agent.kernel.attached("veth2"), None);
    });
}

#[test]
fn a_link_has_one_endpoint_and_an_endpoint_the_links_addresses() {
    Machine::new().life(async |agent| {
        let spec = chained(&agent, "c1");
        let (v4, v6) = (vec![ips()[0]], vec![ips()[1]]);
        let strange = vec!["10.55.0.98".parse().expect("address")];
        let error = agent.try_create(CreateSpec { ips: strange, ..spec.clone() }).await.expect_err("not on the link");
        assert!(error.code == ErrorCode::InvalidRequest && error.message.contains("10.55.0.98"), "{}", error.message);
        let first = agent.try_create(CreateSpec { ips: v4, ..spec.clone() }).await.expect("created");
        let other = Agent::spec("other", "eth0").attachment;
        let second = CreateSpec { ips: v6, attachment: other, ..spec };
        let error = agent.try_create(second.clone()).await.expect_err("the first is on the link");
        assert!(error.code == ErrorCode::Exists && error.message.contains("on its link"), "{}", error.message);
        agent.assert_healthy().await;
        agent.delete(&agent.handle(first.id)).await;
        agent.try_create(second).await.expect("the link is free");
    });
}

#[test]
fn an_endpoint_of_ours_beside_it_is_as_ever() {
    Machine::new().life(async |agent| {
        let made = agent.try_create(chained(&agent, "c1")).await.expect("created");
        let own = agent.create("own").await;
        for handle in [agent.handle(made.id), own.clone()] {
            let found = agent.checker().ask(&handle, Lane::Client).await;
            assert!(found.error.is_none() && found.cases.iter().all(|case| case.ok), "{found:?}");
        }
        let options = DeleteOptions::default();
        assert_eq!(agent.del(&attachment("c1", "eth0"), options).await.errors, []);
        assert!(agent.kernel.has_link(HOST));
        agent.delete(&own).await;
        agent.assert_nothing_left().await;
    });
}
