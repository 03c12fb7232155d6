//! What a test can do to the fake.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests fail by panicking")]

mod support;

use support::*;
use wharf_common::PeerRow;
use wharf_core::{
    endpoint::EndpointRecord,
    flow::FlowFilter,
    ids::{Epoch, IfName},
    kernel::{
        EndpointKernel, FlowKernel, KernelErrorKind, NatKernel, NextHop, NodeKernel, NodeSpec, OverlayNode,
        OverlaySpec, PeerRoute, PolicyKernel, RouteRow,
    },
    nat::NatEntry,
    policy::{Mode, RowChange},
};
use wharf_datapath::{
    FakeKernel,
    fake::{Operation, Peers},
};

fn run<F: Future<Output = ()>>(test: F) {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime").block_on(test);
}

#[test]
fn a_failure_comes_once_before_or_after_the_effect() {
    run(async {
        let k = FakeKernel::new();
        let netns = k.add_netns("/run/netns/c");
        let r = record(1, 10, &netns, "eth0");
        k.fail_next(Operation::EnsureLink, KernelErrorKind::Exhausted);
        let e = k.ensure_link(&link_spec(&r)).await.expect_err("asked for");
        assert_eq!(e.kind, KernelErrorKind::Exhausted);
        assert_eq!(k.dump().await.expect("dump").links, [], "before the effect");
        k.fail_next_after_effect(Operation::EnsureLink, KernelErrorKind::Other);
        k.ensure_link(&link_spec(&r)).await.expect_err("asked for");
        assert_eq!(k.dump().await.expect("dump").links.len(), 1, "after the effect");
        k.ensure_link(&link_spec(&r)).await.expect("the failures are used up");
        assert_eq!(k.calls(Operation::EnsureLink), 3);
        assert_eq!(k.call_log()[0], (Operation::EnsureLink, "endpoint 1".to_owned()));
    });
}

#[test]
fn a_lasting_failure_ends_when_mended() {
    run(async {
        let k = FakeKernel::new();
        k.fail_always(Operation::Dump, KernelErrorKind::Other);
        for _ in 0..3 {
            k.dump().await.expect_err("asked for");
        }
        k.mend(Operation::Dump);
        k.dump().await.expect("mended");
    });
}

#[test]
fn a_held_call_has_no_effect_until_released_and_may_be_given_up() {
    run(async {
        let k = FakeKernel::new();
        let netns = k.add_netns("/run/netns/c");
        let r = record(1, 10, &netns, "eth0");
        let hold = k.hold(Operation::EnsurePrograms);
        let (kernel, spec) = (k.clone(), program_spec(&r));
        let given_up = tokio::spawn(async move { kernel.ensure_programs(&spec).await });
        hold.reached().await;
        given_up.abort();
        assert!(given_up.await.expect_err("aborted").is_cancelled());
        let (kernel, spec) = (k.clone(), program_spec(&r));
        let waits = tokio::spawn(async move { kernel.ensure_programs(&spec).await });
        hold.reached().await;
        assert_eq!(k.dump().await.expect("dump").pins, [], "neither has had an effect");
        hold.release();
        waits.await.expect("task").expect("programs");
        assert_eq!(k.dump().await.expect("dump").pins.len(), 1);
        k.ensure_programs(&program_spec(&r)).await.expect("nothing is held any more");
    });
}

#[test]
fn a_change_of_policy_fails_half_way() {
    run(async {
        let k = FakeKernel::new();
        let peer = |net: &str| RowChange::Peer(net.parse().expect("net"), Some(PeerRow { identity: 2, class: 1 }));
        let changes = vec![peer("10.0.0.0/8"), peer("192.0.2.0/24"), peer("::/0")];
        let mode = Mode { audits: true, ..Mode::default() };
        k.fail_policy_at(1, KernelErrorKind::Exhausted);
        let e = k.change_policy(changes.clone(), mode).await.expect_err("asked for");
        assert!(e.kind == KernelErrorKind::Exhausted && e.subject.contains("192.0.2.0/24"), "{e}");
        let (rows, is) = k.policy();
        assert_eq!((rows.peers.len(), rows.generation, is), (1, 1, Mode::default()));
        k.change_policy(changes, mode).await.expect("the failure is used up");
        let (rows, is) = k.policy();
        assert_eq!((rows.peers.len(), rows.generation, is), (3, 2, mode));
        assert_eq!(k.calls(Operation::ChangePolicy), 2);
    });
}

#[test]
fn routes_to_other_nodes_and_the_overlay_change_one_object_at_a_time() {
    run(async {
        let k = FakeKernel::new();
        let via = NextHop::Overlay { remote: [198, 51, 100, 2].into(), local: None };
        let peer = PeerRoute { to: "10.2.0.0/16".parse().expect("network"), via };
        let node =
            OverlayNode { name: "b".to_owned(), addresses: vec![[198, 51, 100, 2].into()], cidrs: vec![peer.to] };
        let overlay = OverlaySpec { vni: 7, port: 4_789, mtu: 1_450, nodes: vec![node] };
        let spec = NodeSpec { peers: vec![peer], overlay: Some(overlay), ..node_spec() };
        // A row of the filter, the device, the unreachable route; the last change is the route.
        for made in 1..=3 {
            let hold = k.hold_node(1);
            let (kernel, wanted) = (k.clone(), spec.clone());
            let killed = tokio::spawn(async move { kernel.ensure_node(&wanted).await });
            hold.reached().await;
            killed.abort();
            assert!(killed.await.expect_err("aborted").is_cancelled());
            let Peers { routes, unreachable, device, rows } = k.peers();
            assert_eq!(routes.len() + unreachable.len() + usize::from(device.is_some()) + rows.len(), made);
        }
        k.ensure_node(&spec).await.expect("the rest");
        assert_eq!(k.observe_node(&spec).await.expect("observe"), []);
        k.change_peers_behind_the_back(Peers::remove_device);
        assert_eq!(k.observe_node(&spec).await.expect("observe").len(), 2, "the route and the device");
        k.ensure_node(&spec).await.expect("again");
        k.ensure_node(&node_spec()).await.expect("without other nodes");
        assert_eq!(k.peers(), Peers::default());
    });
}

#[test]
fn clones_are_one_kernel() {
    run(async {
        let k = FakeKernel::new();
        let netns = k.add_netns("/run/netns/c");
        let mut r = record(1, 10, &netns, "eth0");
        create(&k, &mut r).await;
        let restarted = k.clone();
        drop(k);
        assert_eq!(restarted.observe_endpoint(&r).await.expect("observe"), []);
        assert!(!restarted.is_clean());
        delete(&restarted, &r).await;
        assert!(restarted.is_clean());
    });
}

/// Calls a verb; every one of [`Operation::ALL`] has an arm here.
async fn call(k: &FakeKernel, operation: Operation, r: &EndpointRecord) -> wharf_core::kernel::Result<()> {
    let ip = first_address(r);
    match operation {
        Operation::EnsureNode => k.ensure_node(&node_spec()).await.map(drop),
        Operation::EnsureNat => k.ensure_nat(&node_spec()).await,
        Operation::ObserveNat => k.observe_nat(&node_spec()).await.map(drop),
        Operation::ObservePorts => k.observe_ports(&r.attachment.container_id, &[]).await,
        Operation::RemoveNatEntry => k.remove_nat_entry(&NatEntry::Own([10, 0, 0, 2].into())).await,
        Operation::ObserveNetns => k.observe_netns(&r.netns.path).await.map(drop),
        Operation::EnsurePrograms => k.ensure_programs(&program_spec(r)).await.map(drop),
        Operation::EnsureLink => k.ensure_link(&link_spec(r)).await.map(drop),
        Operation::ObservePluginLink => {
            let [inside, host] = ["plugin0", "veth0"].map(|name| IfName::parse(name).expect("a name"));
            assert!(k.add_plugin_link(&r.netns.path, inside.clone(), host, []));
            k.observe_plugin_link(&r.netns, &inside).await.map(drop)
        }
        Operation::RemoveFromPluginLink => k.remove_from_plugin_link(&link_ref(r)).await,
        Operation::EnsureConfig => k.ensure_config(r.id, &config_spec(r)).await,
        Operation::EnsureAttached => k.ensure_attached(&link_ref(r)).await.map(drop),
        Operation::EnsureConnected => k.ensure_connected(r).await,
        Operation::EnsureMtu => k.ensure_mtu(r, 1_400).await.map(drop),
        Operation::EnsureReachable => k.ensure_reachable(r).await,
        Operation::RemoveReachable => k.remove_reachable(r).await,
        Operation::RemoveAttached => k.remove_attached(&link_ref(r)).await,
        Operation::RemovePrograms => k.remove_programs(r.id).await.map(drop),
        Operation::RemoveLink | Operation::ReleaseLink => k.remove_link(&link_ref(r)).await,
        Operation::ObserveEndpoint => k.observe_endpoint(r).await.map(drop),
        Operation::ObserveMissing => k.observe_missing(&[link_ref(r)]).await.map(drop),
        Operation::ObserveCounters => k.observe_counters(r.id).await.map(drop),
        Operation::ObserveVerdicts => verdicts(k, id(1), &[]).await.map(drop),
        Operation::ObserveMaps => k.observe_maps().await.map(drop),
        Operation::DumpMap => k.dump_map("ENDPOINTS").await.map(drop),
        Operation::CollectFlows => k.collect_flows().await.map(drop),
        Operation::EndProxyConnections => k.end_proxy_connections(&[]).await.map(drop),
        Operation::ObserveOpenedToProxies => k.observe_opened_to_proxies().await.map(drop),
        Operation::LimitProxyClients => k.limit_proxy_clients(1).await.map(drop),
        Operation::ObserveFlows => k.observe_flows(&FlowFilter::default(), 1).await.map(drop),
        Operation::RemoveFlows => k.remove_flows(&FlowFilter::default()).await.map(drop),
        Operation::RemoveEndpointRow => k.remove_endpoint_row(ip, Epoch(9)).await,
        Operation::RemoveCallSlot => k.remove_call_slot(9).await,
        Operation::RemoveRoute => k.remove_route(&RouteRow { destination: ip.into(), ifindex: None }).await,
        Operation::ChangePolicy => k.change_policy(Vec::new(), Mode::default()).await,
        Operation::EnsureWayToProxy => k.ensure_way_to_proxy(true).await,
        Operation::ObserveAddresses => k.observe_addresses().await.map(drop),
        Operation::ObservePolicy => k.observe_policy().await.map(drop),
        Operation::ObserveNode => k.observe_node(&node_spec()).await.map(drop),
        Operation::ObserveNetworks => k.observe_networks(&node_spec().cidrs).await.map(drop),
        Operation::ObservePeers => k.observe_peers().await.map(drop),
        Operation::ObserveNetworksOf => k.observe_networks_of(&[ip]).await.map(drop),
        Operation::ObservePluginLinks => k.observe_plugin_links().await.map(drop),
        Operation::ObserveUplinks => k.observe_uplinks().await.map(drop),
        Operation::ObserveSpeakers => k.observe_speakers(ip).await.map(drop),
        Operation::RemoveConnections => k.remove_connections(&[ip]).await.map(drop),
        Operation::Dump => k.dump().await.map(drop),
        Operation::CallSlots => k.call_slots().await.map(drop),
        Operation::RemoveNode => k.remove_node().await,
    }
}

#[test]
fn every_verb_fails_with_each_kind_that_is_asked_for() {
    run(async {
        let kinds = [KernelErrorKind::Permission, KernelErrorKind::Exhausted, KernelErrorKind::Other];
        for operation in Operation::ALL.iter().copied() {
            let k = FakeKernel::new();
            let netns = k.add_netns("/run/netns/c");
            let mut r = record(1, 10, &netns, "eth0");
            create(&k, &mut r).await;
            for kind in kinds {
                k.clear_call_log();
                k.fail_next(operation, kind);
                let e = call(&k, operation, &r).await.expect_err("asked for");
                assert_eq!((e.kind, e.operation), (kind, operation.as_str()));
                k.fail_always(operation, kind);
                for _ in 0..2 {
                    assert_eq!(call(&k, operation, &r).await.expect_err("asked for").kind, kind);
                }
                k.mend(operation);
                assert_eq!(k.calls(operation), 3, "the failed calls of {} count", operation.as_str());
                if operation == Operation::ReleaseLink {
                    // The link was removed before its release was refused.
                    create(&k, &mut r).await;
                }
                assert_eq!(k.observe_endpoint(&r).await.expect("observe"), [], "{} had no effect", operation.as_str());
            }
            call(&k, operation, &r).await.expect("mended");
        }
    });
}
