//! Taking endpoints over from another ABI version's pin tree, on the real kernel. The other version is this one under
//! another number: its tree is renamed, which is all that a version's name is to the kernel.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests fail by panicking")]

mod support;

use std::{
    collections::BTreeSet,
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
};

use aya::maps::{LpmTrie, Map, MapData, PerCpuArray, PerCpuValues};
use support::{
    traffic::{Load, converse},
    *,
};
use wharf_common::{
    ABI_VERSION, Counter, Direction, DropReason, EndpointKey, PeerRow, SetsRow,
    drop_reason::metrics_index,
    map::{IPCACHE_LEAST, METRICS_MAX},
};
use wharf_core::{
    endpoint::EndpointRecord,
    ids::EndpointId,
    kernel::{AttachMode, EndpointKernel, KernelError, NodeKernel, PolicyKernel, ProgramSpec},
    policy::{Mode, RowChange},
    upgrade::{Takeover, Upgraded},
};
use wharf_datapath::LinuxKernel;

const OTHER: &str = "v9";

fn own() -> String {
    format!("v{ABI_VERSION}")
}

/// Renames this version's tree to another's, as if that one had made it; another agent then opens the bpffs.
fn upgraded_agent(bpffs: &Path, mode: AttachMode) -> LinuxKernel {
    rename(bpffs, &own(), OTHER);
    agent(bpffs, mode)
}

fn rename(bpffs: &Path, from: &str, to: &str) {
    let root = bpffs.join("wharf");
    fs::rename(root.join(from), root.join(to)).expect("rename the tree");
}

fn agent(bpffs: &Path, mode: AttachMode) -> LinuxKernel {
    support::open(bpffs, &bpffs.with_extension("run"), Some(mode)).expect("open kernel")
}

async fn take_over(k: &LinuxKernel, records: &[&EndpointRecord], keep: &[u16]) -> Result<Upgraded, KernelError> {
    let takeover = |r: &&EndpointRecord| Takeover {
        record: (*r).clone(),
        programs: ProgramSpec { keep: true, ..program_spec(r) },
        config: config_spec(r),
    };
    let keep: BTreeSet<EndpointId> = keep.iter().map(|n| id(*n)).collect();
    k.upgrade(records.iter().map(takeover).collect(), keep, || {}).await
}

/// Names in a directory; none when it is not there.
fn names(path: PathBuf) -> Vec<String> {
    let entries = fs::read_dir(path).into_iter().flatten();
    let mut names: Vec<String> =
        entries.map(|e| e.expect("entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn versions(bpffs: &Path) -> Vec<String> {
    names(bpffs.join("wharf"))
}

/// Everything that the endpoint's programs have counted.
async fn counted(k: &LinuxKernel, r: &EndpointRecord) -> u64 {
    k.observe_counters(r.id).await.expect("counters").iter().map(|c| c.packets).sum()
}

async fn packets(k: &LinuxKernel, r: &EndpointRecord, direction: &str, reason: &str) -> u64 {
    let counters = k.observe_counters(r.id).await.expect("counters");
    counters.iter().find(|c| c.direction == direction && c.reason == reason).map_or(0, |c| c.packets)
}

fn v4(r: &EndpointRecord) -> IpAddr {
    IpAddr::V4(r.ipv4.expect("an IPv4 address"))
}

async fn assert_whole(k: &LinuxKernel, r: &EndpointRecord) {
    let problems = k.observe_endpoint(r).await.expect("look");
    assert!(problems.is_empty(), "{problems:?}");
}

fn carried_over_without_loss(before: AttachMode, after: AttachMode) {
    in_linux_world(Some(before), move |w| async move {
        w.kernel.ensure_node(&node_spec()).await.expect("node");
        let a = new_endpoint(&w, 1, 10).await;
        let b = new_endpoint(&w, 2, 11).await;
        let mut load = Load::start(&a.netns.path, &b.netns.path, v4(&b), None);
        load.advance(50).await;
        let mut mode = before;
        for _ in 0..4 {
            let sent = counted(&agent(&w.bpffs(), mode), &a).await;
            mode = if mode == before { after } else { before };
            let k = upgraded_agent(&w.bpffs(), mode);
            let others = k.other_versions().await.expect("other versions");
            assert_eq!(others.iter().map(|t| (t.version, t.endpoints.len())).collect::<Vec<_>>(), [(9, 2)]);
            load.advance(20).await;
            let done = take_over(&k, &[&a, &b], &[]).await.expect("upgrade");
            assert_eq!((done.taken_over, done.left.clone(), done.counters_lost.clone()), (2, vec![], None), "{done:?}");
            assert_eq!(versions(&w.bpffs()), [own()], "the other version's tree is gone");
            assert!(counted(&k, &a).await >= sent, "counters went backward");
            load.advance(20).await;
            assert_whole(&k, &a).await;
            assert_whole(&k, &b).await;
            // Once more changes nothing.
            let again = take_over(&k, &[], &[]).await.expect("nothing to do");
            assert_eq!(again, Upgraded::default());
        }
        let told = load.finish();
        assert_eq!(told.received, told.sent, "{told:?}");
        let k = agent(&w.bpffs(), mode);
        delete(&k, &a).await;
        delete(&k, &b).await;
        assert_no_endpoints(&k).await;
    });
}

#[test]
fn endpoints_are_carried_over_without_loss_with_tcx() {
    carried_over_without_loss(AttachMode::Tcx, AttachMode::Tcx);
}

#[test]
fn endpoints_are_carried_over_without_loss_with_clsact() {
    carried_over_without_loss(AttachMode::Clsact, AttachMode::Clsact);
}

#[test]
fn endpoints_are_carried_over_without_loss_into_another_attach_mode() {
    carried_over_without_loss(AttachMode::Tcx, AttachMode::Clsact);
}

/// One stays in the other version, because its record was lost: both reach each other, the node too, and its pins go
/// with its link.
fn one_that_stays_keeps_its_network(mode: AttachMode) {
    in_linux_world(Some(mode), move |w| async move {
        w.kernel.ensure_node(&node_spec()).await.expect("node");
        let a = new_endpoint(&w, 1, 10).await;
        let lost = new_endpoint(&w, 2, 11).await;
        let k = upgraded_agent(&w.bpffs(), mode);
        take_over(&k, &[&a], &[2]).await.expect("upgrade");
        assert_eq!(versions(&w.bpffs()), [own(), OTHER.to_owned()]);
        let other = w.bpffs().join("wharf").join(OTHER);
        assert_eq!(names(other.join("endpoints")), ["2"]);
        assert_eq!(
            names(other.join("shared")),
            [
                "ADDRESS_GENERATIONS",
                "CALLS",
                "ENDPOINTS",
                "EVENTS",
                "FLOWS",
                "FLOWS_NEW",
                "FLOWS_RECENT",
                "FLOW_CACHE",
                "FLOW_CACHE_ENDS",
                "FLOW_TOTALS",
                "FLOW_USE",
                "FRAGMENTS",
                "FRAGMENT_SLOTS",
                "IPCACHE",
                "NODE_CALLS",
                "POLICY_CELLS",
                "POLICY_PORTS",
                "POLICY_SETS",
                "POLICY_STATE",
                "PROFILES",
                "PROXY_USE",
                "SOURCES",
                "STACK_PATHS",
                "STACK_USERS",
                "sink"
            ]
        );
        let (in_a, in_lost) = (a.netns.path.as_path(), lost.netns.path.as_path());
        assert_eq!(converse(Some(in_a), Some(in_lost), v4(&lost)), v4(&a), "to the one that stays");
        let received = packets(&k, &a, "ingress", "forwarded-local").await;
        assert_eq!(converse(Some(in_lost), Some(in_a), v4(&a)), v4(&lost), "from the one that stays");
        let since = packets(&k, &a, "ingress", "forwarded-local").await;
        assert!(since > received, "the receiver's new programs police what it sends");
        assert_eq!(converse(Some(in_lost), None, IpAddr::V4(ROUTER4)), v4(&lost), "from it to the node");
        // What it sends to one that came later takes the node's stack.
        fs::write("/proc/sys/net/ipv4/ip_forward", "1").expect("let the node forward");
        let netns = k.observe_netns(&w.add_netns("later")).await.expect("netns");
        let mut later = record(3, 12, &netns, "eth0");
        create(&k, &mut later).await;
        let in_later = later.netns.path.as_path();
        assert_eq!(converse(Some(in_later), Some(in_lost), v4(&lost)), v4(&later), "from one that came later");
        // A second start does the same.
        let k = agent(&w.bpffs(), mode);
        take_over(&k, &[], &[2]).await.expect("nothing to take over");
        assert_eq!(names(other.join("endpoints")), ["2"]);
        assert_eq!(converse(Some(in_lost), Some(in_a), v4(&a)), v4(&lost), "after another start");
        delete(&k, &a).await;
        delete(&k, &later).await;
        let refused = k.remove_node().await.expect_err("an endpoint of the other version lives");
        assert!(refused.to_string().contains(OTHER), "{refused}");
        delete(&k, &lost).await;
        assert_eq!(versions(&w.bpffs()), [own()], "the other version's tree went with its last endpoint");
        assert_no_endpoints(&k).await;
    });
}

#[test]
fn one_that_stays_keeps_its_network_with_tcx() {
    one_that_stays_keeps_its_network(AttachMode::Tcx);
}

#[test]
fn one_that_stays_keeps_its_network_with_clsact() {
    one_that_stays_keeps_its_network(AttachMode::Clsact);
}

/// An upgrade that stayed half done, and then another version starts.
#[test]
fn a_third_version_takes_over_from_two() {
    for mode in [AttachMode::Tcx, AttachMode::Clsact] {
        in_linux_world(Some(mode), move |w| async move {
            w.kernel.ensure_node(&node_spec()).await.expect("node");
            let a = new_endpoint(&w, 1, 10).await;
            let b = new_endpoint(&w, 2, 11).await;
            let mut load = Load::start(&a.netns.path, &b.netns.path, v4(&b), None);
            let second = upgraded_agent(&w.bpffs(), mode);
            take_over(&second, &[&a], &[2]).await.expect("one of them");
            load.advance(20).await;
            rename(&w.bpffs(), &own(), "v8");
            let third = agent(&w.bpffs(), mode);
            let others = third.other_versions().await.expect("other versions");
            let pinned: Vec<_> = others.iter().map(|t| (t.version, t.endpoints.iter().copied().collect())).collect();
            assert_eq!(pinned, [(9, vec![b.id]), (8, vec![a.id])]);
            take_over(&third, &[&a, &b], &[]).await.expect("both");
            load.advance(20).await;
            let told = load.finish();
            assert_eq!(told.received, told.sent, "{told:?}");
            assert!(packets(&third, &b, "ingress", "forwarded-local").await > 20, "the counters came along");
            assert_eq!(versions(&w.bpffs()), [own()]);
            for record in [&a, &b] {
                assert_whole(&third, record).await;
                delete(&third, record).await;
            }
            assert_no_endpoints(&third).await;
        });
    }
}

/// A load that fails in the middle leaves the other version in force, and nothing of this one but what is not ours.
fn a_load_that_fails_changes_nothing(mode: AttachMode) {
    in_linux_world(Some(mode), move |w| async move {
        w.kernel.ensure_node(&node_spec()).await.expect("node");
        let a = new_endpoint(&w, 1, 10).await;
        let b = new_endpoint(&w, 2, 11).await;
        let mut load = Load::start(&a.netns.path, &b.netns.path, v4(&b), None);
        let k = upgraded_agent(&w.bpffs(), mode);
        let in_the_way = w.bpffs().join("wharf").join(own()).join("endpoints/2/deliver");
        fs::create_dir_all(&in_the_way).expect("a directory in a pin's place");
        load.advance(20).await;
        let e = take_over(&k, &[&a, &b], &[]).await.expect_err("the second one's programs cannot be pinned");
        for part in ["upgrade endpoints", "v9", "deliver", "in force as before", "start the version that uses v9"] {
            assert!(e.to_string().contains(part), "{part} is missing in: {e}");
        }
        load.advance(20).await;
        assert_eq!(names(w.bpffs().join("wharf").join(own()).join("endpoints")), ["2"], "only what is not ours");
        assert!(!w.bpffs().join("wharf").join(OTHER).join("endpoints/1/next_deliver").exists());
        drop(k);
        // The other version starts again.
        fs::remove_dir(&in_the_way).expect("remove the directory");
        let told = load.finish();
        assert_eq!(told.received, told.sent, "{told:?}");
        let k = agent(&w.bpffs(), mode);
        take_over(&k, &[&a, &b], &[]).await.expect("with the cause gone");
        assert_whole(&k, &a).await;
        delete(&k, &a).await;
        delete(&k, &b).await;
        assert_eq!(versions(&w.bpffs()), [own()]);
    });
}

#[test]
fn a_load_that_fails_changes_nothing_with_tcx() {
    a_load_that_fails_changes_nothing(AttachMode::Tcx);
}

#[test]
fn a_load_that_fails_changes_nothing_with_clsact() {
    a_load_that_fails_changes_nothing(AttachMode::Clsact);
}

/// A swap that fails puts the endpoints back that were swapped before.
#[test]
fn a_swap_that_fails_puts_the_others_back() {
    in_linux_world(Some(AttachMode::Clsact), |w| async move {
        w.kernel.ensure_node(&node_spec()).await.expect("node");
        let a = new_endpoint(&w, 1, 10).await;
        let b = new_endpoint(&w, 2, 11).await;
        let c = new_endpoint(&w, 3, 12).await;
        let mut load = Load::start(&a.netns.path, &c.netns.path, v4(&c), None);
        load.advance(20).await;
        let filter = |r: &EndpointRecord| run("tc", &["filter", "show", "dev", r.host_ifname.as_str(), "ingress"]);
        let before = filter(&a);
        // Somebody took the place of the second one's filters.
        let dev = b.host_ifname.as_str();
        run("tc", &["filter", "del", "dev", dev, "ingress"]);
        let all = ["protocol", "all", "u32", "match", "u32", "0", "0", "classid", "1:1"];
        run("tc", &[&["filter", "add", "dev", dev, "ingress", "prio", "1"][..], &all].concat());
        let k = upgraded_agent(&w.bpffs(), AttachMode::Clsact);
        let e = take_over(&k, &[&a, &b, &c], &[]).await.expect_err("the second one's filters cannot be put in place");
        assert!(e.to_string().contains("a filter that is not ours has our place"), "{e}");
        assert!(e.to_string().contains("in force as before"), "{e}");
        load.advance(20).await;
        assert_eq!(filter(&a), before, "the very program of before");
        assert_eq!(versions(&w.bpffs()), [OTHER], "nothing is left of the attempt");
        drop(k);
        run("tc", &["filter", "del", "dev", dev, "ingress"]);
        let k = agent(&w.bpffs(), AttachMode::Clsact);
        take_over(&k, &[&a, &b, &c], &[]).await.expect("with the cause gone");
        load.advance(20).await;
        let told = load.finish();
        assert_eq!(told.received, told.sent, "{told:?}");
        for record in [&a, &b, &c] {
            assert_whole(&k, record).await;
            delete(&k, record).await;
        }
        assert_eq!(versions(&w.bpffs()), [own()]);
    });
}

/// A link that is being deleted stays closed, and its pins move over.
#[test]
fn a_closed_link_stays_closed() {
    in_linux_world(Some(AttachMode::Tcx), |w| async move {
        w.kernel.ensure_node(&node_spec()).await.expect("node");
        let a = new_endpoint(&w, 1, 10).await;
        let closing = new_endpoint(&w, 2, 11).await;
        w.kernel.remove_attached(&link_ref(&closing)).await.expect("closed");
        w.kernel.remove_reachable(&closing).await.expect("unreachable");
        w.kernel.remove_programs(closing.id).await.expect("unpinned");
        let k = upgraded_agent(&w.bpffs(), AttachMode::Tcx);
        take_over(&k, &[&a], &[2]).await.expect("upgrade");
        assert_eq!(versions(&w.bpffs()), [own()]);
        let moved = w.bpffs().join("wharf").join(own()).join("closing").join(closing.host_ifname.as_str());
        assert_eq!(names(moved), ["link_from_container", "link_to_container"]);
        assert!(!support::traffic::reaches_node(&closing.netns.path), "a closed link let a packet pass");
        k.remove_link(&link_ref(&closing)).await.expect("removed");
        delete(&k, &a).await;
        assert_no_endpoints(&k).await;
    });
}

/// The rows of policy are one for all versions, so that a change during an upgrade counts for every endpoint.
#[test]
fn policy_is_shared_between_versions() {
    in_linux_world(Some(AttachMode::Clsact), |w| async move {
        w.kernel.ensure_node(&node_spec()).await.expect("node");
        let a = new_endpoint(&w, 1, 10).await;
        let lost = new_endpoint(&w, 2, 11).await;
        let sets = |id| RowChange::Sets(id, SetsRow { ingress: 1, egress: 2 });
        let peer = |net: &str| RowChange::Peer(net.parse().expect("net"), Some(PeerRow { identity: 2, class: 1 }));
        w.kernel.change_policy(vec![peer("10.77.0.0/16"), sets(a.id)], Mode::default()).await.expect("before");
        let k = upgraded_agent(&w.bpffs(), AttachMode::Clsact);
        take_over(&k, &[&a], &[2]).await.expect("upgrade");
        let rows = k.observe_policy().await.expect("rows");
        assert_eq!((rows.sets.len(), rows.peers.len(), rows.generation), (1, 1, 1), "those of before");
        k.change_policy(vec![peer("192.0.2.0/24"), sets(lost.id)], Mode::default()).await.expect("after");
        // The other version's agent sees them too.
        rename(&w.bpffs(), &own(), "v8");
        rename(&w.bpffs(), OTHER, &own());
        let old = agent(&w.bpffs(), AttachMode::Clsact);
        let rows = old.observe_policy().await.expect("rows");
        assert_eq!((rows.sets.len(), rows.peers.len(), rows.generation), (2, 2, 2), "{rows:?}");
    });
}

/// A table of version 5 has fewer rows. It stays in use, so that policy applies to every endpoint.
#[test]
fn the_smaller_address_table_of_version_5_is_shared() {
    in_linux_world(Some(AttachMode::Clsact), |w| async move {
        w.kernel.ensure_node(&node_spec()).await.expect("node");
        let path = w.bpffs().join("wharf").join(own()).join("shared/IPCACHE");
        fs::remove_file(&path).expect("unpin");
        let earlier = LpmTrie::<MapData, EndpointKey, PeerRow>::create(IPCACHE_LEAST, 1).expect("table");
        earlier.pin(&path).expect("pin");
        fs::remove_file(path.with_file_name("ADDRESS_GENERATIONS")).expect("unpin");
        let k = upgraded_agent(&w.bpffs(), AttachMode::Clsact);
        k.ensure_node(&node_spec()).await.expect("node");
        let netns = k.observe_netns(&w.add_netns("a")).await.expect("netns");
        let mut a = record(1, 10, &netns, "eth0");
        create(&k, &mut a).await;
        let peer = |net: &str| RowChange::Peer(net.parse().expect("net"), Some(PeerRow { identity: 2, class: 1 }));
        let sets = RowChange::Sets(a.id, SetsRow { ingress: 1, egress: 2 });
        k.change_policy(vec![peer("10.77.0.0/32"), sets], Mode::default()).await.expect("change");
        assert_eq!(MapData::from_pin(&path).expect("map").info().expect("info").max_entries(), IPCACHE_LEAST);
        assert_eq!(k.observe_peers_max().await.expect("its size"), IPCACHE_LEAST);
        // Programs of another version compare the generation of all rules alone.
        k.change_policy(vec![peer("10.77.0.1/32")], Mode::default()).await.expect("change");
        assert_eq!(k.observe_policy().await.expect("rows").generation, 2);
        fs::remove_dir_all(w.bpffs().join("wharf").join(OTHER)).expect("the other tree is removed");
        k.change_policy(vec![peer("10.77.0.2/32")], Mode::default()).await.expect("change");
        let rows = k.observe_policy().await.expect("rows");
        assert_eq!((rows.peers.len(), rows.generation), (3, 2));
    });
}

/// Version 1 kept in rows of their own how many test packets other rows had counted.
#[test]
fn counters_of_version_1_are_carried_without_its_test_packets() {
    in_linux_world(Some(AttachMode::Clsact), |w| async move {
        w.kernel.ensure_node(&node_spec()).await.expect("node");
        let a = new_endpoint(&w, 1, 10).await;
        let path = w.bpffs().join("wharf").join(own()).join("endpoints/1/METRICS");
        let data = aya::maps::MapData::from_pin(path).expect("the counters");
        let mut metrics: PerCpuArray<_, Counter> = Map::PerCpuArray(data).try_into().expect("rows");
        let mut set = |row, packets| {
            let mut values = metrics.get(&row, 0).expect("row").to_vec();
            values.fill(Counter::default());
            *values.last_mut().expect("a CPU") = Counter { packets, bytes: packets * 100 };
            metrics.set(row, PerCpuValues::try_from(values).expect("values"), 0).expect("set");
        };
        run("ip", &["link", "set", a.host_ifname.as_str(), "down"]);
        for row in 0..METRICS_MAX {
            set(row, 0);
        }
        set(metrics_index(Direction::Ingress, DropReason::ForwardedStack), 50);
        set(metrics_index(Direction::Ingress, DropReason::ForwardedLocal) - DropReason::ForwardedLocal as u32 + 25, 20);
        set(metrics_index(Direction::Egress, DropReason::Multicast), 7);
        rename(&w.bpffs(), &own(), "v1");
        let k = agent(&w.bpffs(), AttachMode::Clsact);
        take_over(&k, &[&a], &[]).await.expect("upgrade");
        let counters = k.observe_counters(a.id).await.expect("counters");
        let rows: Vec<_> = counters.iter().map(|c| (c.reason.as_str(), c.packets, c.bytes)).collect();
        assert_eq!(rows, [("forwarded-stack", 30, 3000), ("multicast-unsupported", 7, 700)]);
        delete(&k, &a).await;
    });
}

/// A SIGKILL in the middle of the removal leaves the other version's counters behind.
#[test]
fn counters_of_an_endpoint_in_force_are_not_copied_again() {
    in_linux_world(Some(AttachMode::Clsact), |w| async move {
        w.kernel.ensure_node(&node_spec()).await.expect("node");
        let a = new_endpoint(&w, 1, 10).await;
        converse(Some(&a.netns.path), None, IpAddr::V4(ROUTER4));
        let metrics = w.bpffs().join("wharf").join(own()).join("endpoints/1/METRICS");
        let before = aya::maps::MapData::from_pin(&metrics).expect("the counters of before");
        let k = upgraded_agent(&w.bpffs(), AttachMode::Clsact);
        take_over(&k, &[&a], &[]).await.expect("upgrade");
        converse(Some(&a.netns.path), None, IpAddr::V4(ROUTER4));
        let since = counted(&k, &a).await;
        let left = w.bpffs().join("wharf").join(OTHER).join("endpoints/1");
        fs::create_dir_all(&left).expect("directory");
        before.pin(left.join("METRICS")).expect("pin");
        take_over(&k, &[&a], &[]).await.expect("the next start");
        assert!(counted(&k, &a).await >= since, "counters went backward");
        assert_eq!(versions(&w.bpffs()), [own()]);
        delete(&k, &a).await;
    });
}

#[test]
fn counters_of_another_shape_begin_at_zero_and_that_is_told() {
    in_linux_world(Some(AttachMode::Clsact), |w| async move {
        w.kernel.ensure_node(&node_spec()).await.expect("node");
        let a = new_endpoint(&w, 1, 10).await;
        converse(Some(&a.netns.path), None, IpAddr::V4(ROUTER4));
        let metrics = w.bpffs().join("wharf").join(own()).join("endpoints/1/METRICS");
        fs::remove_file(&metrics).expect("unpin");
        aya::maps::Array::<aya::maps::MapData, u64>::create(5, 0).expect("map").pin(&metrics).expect("pin");
        // What the container's kernel says by itself is counted too.
        run("ip", &["link", "set", a.host_ifname.as_str(), "down"]);
        let k = upgraded_agent(&w.bpffs(), AttachMode::Clsact);
        let done = take_over(&k, &[&a], &[]).await.expect("upgrade");
        let (endpoints, why) = done.counters_lost.expect("told");
        assert_eq!(endpoints, 1);
        assert!(why.contains("another layout"), "{why}");
        assert_eq!(counted(&k, &a).await, 0);
        delete(&k, &a).await;
    });
}

#[test]
fn a_tree_without_endpoints_goes_and_what_is_no_version_stays() {
    in_namespaces(|dir| {
        let bpffs = dir.join("bpf");
        for path in ["wharf/v9/shared", "wharf/v9/endpoints/7", "wharf/v09/endpoints/7", "wharf/theirs/endpoints/1"] {
            fs::create_dir_all(bpffs.join(path)).expect("directory");
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
        runtime.block_on(async {
            let k = agent(&bpffs, AttachMode::Clsact);
            // Endpoint 7 has no link: a set that was loaded ahead of need.
            take_over(&k, &[], &[]).await.expect("nothing to take over");
        });
        assert_eq!(versions(&bpffs), ["theirs".to_owned(), "v09".to_owned(), own()]);
    });
}
