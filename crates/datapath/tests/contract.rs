//! The contract of `wharf_core::kernel::Kernel`, on the fake and on the real kernel with both attach modes.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests fail by panicking")]

mod support;

use std::{collections::BTreeMap, net::IpAddr, path::Path, sync::Arc};

use support::*;
use wharf_core::{
    endpoint::{EndpointRecord, HooksFound, IpOwner, LinkOwner},
    finding::{EndpointProblem, Problem, Side},
    flow::{FlowFilter, FlowList},
    ids::{ContainerId, Epoch, IfName, MacAddr},
    kernel::{
        AttachMode, Attached, EndpointKernel, FlowKernel, Kernel, KernelErrorKind, LinkRef, NatKernel, NodeKernel,
        NodeSpec, ProgramSpec, RouteRow,
    },
    selfcheck::{self, Judged},
    sources::SourcePrefixes,
};
use wharf_names::mark::Mark;

/// Makes a test of each function below for each world.
macro_rules! contract {
    ($($name:ident),+ $(,)?) => {
        mod fake { $( #[test] fn $name() { super::in_fake_world(super::$name) } )+ }
        mod linux_tcx {
            $( #[test] fn $name() { super::in_linux_world(Some(super::AttachMode::Tcx), super::$name) } )+
        }
        mod linux_clsact {
            $( #[test] fn $name() { super::in_linux_world(Some(super::AttachMode::Clsact), super::$name) } )+
        }
    };
}

contract! {
    full_life,
    every_ensure_and_remove_can_be_repeated,
    removing_what_never_was_succeeds,
    a_taken_interface_name_is_told_apart,
    a_failed_create_is_undone_in_any_state,
    what_is_not_a_namespace_is_refused,
    a_path_that_leads_to_another_namespace_is_not_followed,
    a_late_delete_leaves_the_successor_alone,
    twenty_links_go_together,
    regeneration_replaces_and_keeps_the_maps,
    programs_that_are_not_what_a_load_would_bring_are_not_kept,
    a_link_that_went_by_itself_is_told_and_cleaned_up,
    an_ended_namespace_is_told_and_cleaned_up,
    repair_verbs_take_only_what_they_name,
    the_node_follows_its_spec,
    maps_and_rows_can_be_read,
    without_flows_there_are_none_to_see_remove_or_collect,
    the_owners_mark_is_on_the_link_and_stays_there,
    the_nodes_part_is_observed_and_mended,
    what_speaks_for_an_address_is_named,
    connections_go_with_their_addresses_alone,
    a_left_over_pair_makes_room,
    a_plugins_link_is_taken_as_it_is_and_left_as_it_was,
    the_mtu_changes_but_for_a_smaller_one_of_the_containers,
    test_packets_get_the_verdicts_of_desired_state,
    a_test_packet_shows_what_is_amiss,
    source_prefixes_follow_the_configuration,
}

async fn full_life<W: World>(w: W) {
    let k = w.kernel();
    k.ensure_node(&node_spec()).await.expect("node");
    let a = new_endpoint(&w, 1, 10).await;
    let b = new_endpoint(&w, 2, 11).await;
    assert_eq!(k.observe_endpoint(&a).await.expect("observe"), []);
    assert_eq!(k.observe_endpoint(&b).await.expect("observe"), []);
    let mut other = b.clone();
    other.mtu += 1;
    let each = k.observe_endpoints(&[a.clone(), other, b.clone()]).await.expect("observe");
    assert_eq!(each.iter().map(Vec::is_empty).collect::<Vec<_>>(), [true, false, true], "each in its place: {each:?}");
    let dump = k.dump().await.expect("dump");
    assert_eq!(dump.links.len(), 2);
    assert_eq!(dump.endpoint_rows.len(), 4);
    assert_eq!(k.call_slots().await.expect("slots"), [1, 2]);
    assert_eq!(dump.pins.iter().map(|(d, _)| d.as_str()).collect::<Vec<_>>(), ["1", "2"]);
    assert_eq!(dump.routes.iter().filter(|r| r.ifindex == Some(a.host_ifindex)).count(), 2);
    delete(k, &a).await;
    assert_eq!(k.observe_endpoint(&b).await.expect("observe"), [], "the neighbour is as before");
    delete(k, &b).await;
    assert_no_endpoints(k).await;
    k.ensure_node(&node_spec()).await.expect("node again, after endpoints came and went");
    assert_no_endpoints(k).await;
    k.remove_node().await.expect("node gone");
    k.ensure_node(&node_spec()).await.expect("node after it was gone");
    delete(k, &new_endpoint(&w, 1, 12).await).await;
    assert_no_endpoints(k).await;
    k.remove_node().await.expect("node gone");
}

async fn every_ensure_and_remove_can_be_repeated<W: World>(w: W) {
    let k = w.kernel();
    k.ensure_node(&node_spec()).await.expect("node");
    k.ensure_node(&node_spec()).await.expect("node again");
    let a = new_endpoint(&w, 1, 10).await;
    let mut again = a.clone();
    create(k, &mut again).await;
    assert_eq!((again.host_ifindex, again.container_ifindex), (a.host_ifindex, a.container_ifindex), "same pair");
    assert_eq!(k.observe_endpoint(&a).await.expect("observe"), []);
    for _ in 0..2 {
        k.remove_attached(&link_ref(&a)).await.expect("detach");
    }
    for _ in 0..2 {
        k.remove_reachable(&a).await.expect("unreachable");
    }
    for _ in 0..2 {
        k.remove_programs(a.id).await.expect("programs");
    }
    // The order of a delete that resumes: its first steps run again after its later ones.
    k.remove_attached(&link_ref(&a)).await.expect("detach again");
    for _ in 0..2 {
        k.remove_link(&link_ref(&a)).await.expect("link");
    }
    k.remove_attached(&link_ref(&a)).await.expect("detach when gone");
    assert_no_endpoints(k).await;
    k.remove_node().await.expect("node gone");
    k.remove_node().await.expect("node gone already");
}

async fn removing_what_never_was_succeeds<W: World>(w: W) {
    let k = w.kernel();
    let path = w.add_netns("c");
    let netns = k.observe_netns(&path).await.expect("netns");
    let r = record(7, 3, &netns, "eth0");
    k.remove_attached(&link_ref(&r)).await.expect("detach");
    k.remove_reachable(&r).await.expect("unreachable");
    assert_eq!(k.remove_programs(r.id).await.expect("programs"), []);
    k.remove_link(&link_ref(&r)).await.expect("link");
    k.remove_endpoint_row(first_address(&r), Epoch(3)).await.expect("row");
    k.remove_call_slot(7).await.expect("slot");
    let route = RouteRow { destination: first_address(&r).into(), ifindex: None };
    k.remove_route(&route).await.expect("route");
    assert_no_endpoints(k).await;
}

async fn a_taken_interface_name_is_told_apart<W: World>(w: W) {
    let k = w.kernel();
    k.ensure_node(&node_spec()).await.expect("node");
    let a = new_endpoint(&w, 1, 10).await;
    // Another endpoint wants the same name in the same container.
    let b = record(2, 11, &a.netns, "eth0");
    let refused = k.ensure_link(&link_spec(&b)).await.expect_err("name is taken");
    assert_eq!(refused.kind, KernelErrorKind::Exists, "{refused}");
    assert!(refused.to_string().contains("eth0"), "{refused}");
    // Somebody else's interface has the name.
    w.add_foreign_interface(&a.netns.path, "eth1");
    let c = record(3, 12, &a.netns, "eth1");
    let refused = k.ensure_link(&link_spec(&c)).await.expect_err("name is taken");
    assert_eq!(refused.kind, KernelErrorKind::Exists, "{refused}");
    // A second interface with a name of its own.
    let mut d = record(4, 13, &a.netns, "net1");
    create(k, &mut d).await;
    assert_eq!(k.observe_endpoint(&a).await.expect("observe"), [], "nothing happened to the first");
    assert_eq!(k.observe_endpoint(&d).await.expect("observe"), []);
    assert_eq!(k.dump().await.expect("dump").links.len(), 2, "the refused left nothing");
    delete(k, &d).await;
    assert_eq!(k.observe_endpoint(&a).await.expect("observe"), []);
    delete(k, &a).await;
    assert_no_endpoints(k).await;
}

async fn a_failed_create_is_undone_in_any_state<W: World>(w: W) {
    let k = w.kernel();
    k.ensure_node(&node_spec()).await.expect("node");
    let path = w.add_netns("c");
    let netns = k.observe_netns(&path).await.expect("netns");
    for steps in 0..6 {
        let mut r = record(1, 10 + steps, &netns, "eth0");
        if steps > 0 {
            k.ensure_programs(&program_spec(&r)).await.expect("programs");
        }
        if steps > 1 {
            let link = k.ensure_link(&link_spec(&r)).await.expect("link");
            (r.host_ifindex, r.container_ifindex) = (link.host_ifindex, link.container_ifindex);
        }
        if steps > 2 {
            k.ensure_config(r.id, &config_spec(&r)).await.expect("config");
        }
        if steps > 3 {
            k.ensure_attached(&link_ref(&r)).await.expect("attached");
        }
        if steps > 4 {
            k.ensure_connected(&r).await.expect("connected");
        }
        delete(k, &r).await;
        assert_no_endpoints(k).await;
    }
}

async fn what_is_not_a_namespace_is_refused<W: World>(w: W) {
    let k = w.kernel();
    let missing = k.observe_netns(Path::new("/run/netns/never-was")).await.expect_err("missing");
    assert_eq!(missing.kind, KernelErrorKind::NotFound, "{missing}");
    let plain = k.observe_netns(&w.plain_file()).await.expect_err("plain file");
    assert_eq!(plain.kind, KernelErrorKind::NotANetns, "{plain}");
}

async fn a_path_that_leads_to_another_namespace_is_not_followed<W: World>(w: W) {
    let k = w.kernel();
    let path = w.add_netns("c");
    let old = k.observe_netns(&path).await.expect("netns");
    assert_eq!(k.observe_netns(&path).await.expect("netns"), old, "the same every time");
    w.end_netns(&path);
    assert_eq!(w.add_netns("c"), path);
    let new = k.observe_netns(&path).await.expect("netns");
    assert!(!new.same(&old));
    let r = record(1, 10, &old, "eth0");
    let refused = k.ensure_link(&link_spec(&r)).await.expect_err("another namespace");
    assert_eq!(refused.kind, KernelErrorKind::NotFound, "{refused}");
    assert_no_endpoints(k).await;
}

async fn a_late_delete_leaves_the_successor_alone<W: World>(w: W) {
    let k = w.kernel();
    k.ensure_node(&node_spec()).await.expect("node");
    let old = new_endpoint(&w, 1, 10).await;
    delete(k, &old).await;
    // The same id and the same addresses, one epoch on.
    let new = new_endpoint(&w, 1, 11).await;
    k.remove_attached(&link_ref(&old)).await.expect("late detach");
    k.remove_reachable(&old).await.expect("late unreachable");
    k.remove_link(&link_ref(&old)).await.expect("late link");
    // The index may have become the successor's: the name says whose it is.
    let mut confused = link_ref(&old);
    confused.host_ifindex = Some(new.host_ifindex);
    k.remove_attached(&confused).await.expect("late detach");
    k.remove_link(&confused).await.expect("late link");
    assert_eq!(k.observe_endpoint(&new).await.expect("observe"), []);
    delete(k, &new).await;
    assert_no_endpoints(k).await;
}

async fn twenty_links_go_together<W: World>(w: W) {
    let k = w.kernel();
    k.ensure_node(&node_spec()).await.expect("node");
    let mut records = Vec::new();
    for n in 1..=21 {
        records.push(new_endpoint(&w, n, u64::from(n)).await);
    }
    let stays = records.pop().expect("the last");
    let refs: Vec<_> = records.iter().map(link_ref).collect();
    for r in &records {
        k.remove_attached(&link_ref(r)).await.expect("detach");
        k.remove_reachable(r).await.expect("unreachable");
        k.remove_programs(r.id).await.expect("programs");
    }
    for result in futures::future::join_all(refs.iter().map(|l| k.remove_link(l))).await {
        result.expect("link");
    }
    let dump = k.dump().await.expect("dump");
    assert_eq!(dump.links.iter().map(|l| l.name.as_str()).collect::<Vec<_>>(), [stays.host_ifname.as_str()]);
    assert_eq!(dump.routes.iter().filter(|r| r.ifindex.is_some()).count(), 2, "routes went with their links");
    assert_eq!(k.observe_endpoint(&stays).await.expect("observe"), []);
    delete(k, &stays).await;
    assert_no_endpoints(k).await;
}

async fn regeneration_replaces_and_keeps_the_maps<W: World>(w: W) {
    let k = w.kernel();
    k.ensure_node(&node_spec()).await.expect("node");
    let path = w.add_netns("c");
    let netns = k.observe_netns(&path).await.expect("netns");
    let mut r = record(1, 10, &netns, "eth0");
    let first = k.ensure_programs(&program_spec(&r)).await.expect("programs");
    let link = k.ensure_link(&link_spec(&r)).await.expect("link");
    (r.host_ifindex, r.container_ifindex) = (link.host_ifindex, link.container_ifindex);
    k.ensure_config(r.id, &config_spec(&r)).await.expect("config");
    assert_eq!(k.ensure_attached(&link_ref(&r)).await.expect("attached"), Attached::New);
    k.ensure_connected(&r).await.expect("connected");
    k.ensure_reachable(&r).await.expect("reachable");
    let second = k.ensure_programs(&program_spec(&r)).await.expect("programs again");
    assert_ne!(second.program_ids, first.program_ids);
    assert_eq!(second.map_ids, first.map_ids, "configuration and counters stay");
    let between = k.observe_endpoint(&r).await.expect("observe");
    assert!(between.iter().any(|p| p.object() == "program"), "old programs are attached still: {between:?}");
    assert_eq!(k.ensure_attached(&link_ref(&r)).await.expect("attached"), Attached::Replaced);
    assert_eq!(k.observe_endpoint(&r).await.expect("observe"), [], "the slot has the new program too");
    let kept = k.ensure_programs(&ProgramSpec { keep: true, ..program_spec(&r) }).await.expect("programs kept");
    assert_eq!((kept.program_ids, kept.map_ids), (second.program_ids, second.map_ids), "what a load would only repeat");
    assert_eq!(k.ensure_attached(&link_ref(&r)).await.expect("attached"), Attached::Replaced);
    assert_eq!(k.observe_endpoint(&r).await.expect("observe"), [], "attaching what is attached changes nothing");
    delete(k, &r).await;
    assert_no_endpoints(k).await;
}

async fn programs_that_are_not_what_a_load_would_bring_are_not_kept<W: World>(w: W) {
    let k = w.kernel();
    k.ensure_node(&node_spec()).await.expect("node");
    let a = new_endpoint(&w, 1, 10).await;
    let first = k.ensure_programs(&program_spec(&a)).await.expect("programs");
    // Other constants.
    let mac = MacAddr([2, 0, 0, 0, 0xff, 0xfe]);
    let other = ProgramSpec { container_mac: mac, keep: true, ..program_spec(&a) };
    let second = k.ensure_programs(&other).await.expect("programs of another MAC");
    assert_ne!(second.program_ids, first.program_ids);
    // Nothing pinned at all.
    let none = ProgramSpec { keep: true, ..program_spec(&record(2, 20, &a.netns, "eth1")) };
    let third = k.ensure_programs(&none).await.expect("programs where none were");
    assert!(third.program_ids.iter().all(|id| !second.program_ids.contains(id)));
    k.remove_programs(none.id).await.expect("removed");
    delete(k, &a).await;
    assert_no_endpoints(k).await;
}

async fn a_link_that_went_by_itself_is_told_and_cleaned_up<W: World>(w: W) {
    let k = w.kernel();
    k.ensure_node(&node_spec()).await.expect("node");
    let a = new_endpoint(&w, 1, 10).await;
    w.delete_link(a.host_ifname.as_str());
    let wrong = k.observe_endpoint(&a).await.expect("observe");
    assert!(
        wrong.contains(&EndpointProblem::LinkMissing { side: Side::Node, name: a.host_ifname.to_string() }),
        "{wrong:?}"
    );
    let refused = k.ensure_attached(&link_ref(&a)).await.expect_err("nothing to attach to");
    assert_eq!(refused.kind, KernelErrorKind::NotFound, "{refused}");
    let refused = k.ensure_connected(&a).await.expect_err("nothing to connect");
    assert_eq!(refused.kind, KernelErrorKind::NotFound, "{refused}");
    // Made again for the same endpoint: pins of the attachment that is gone are no obstacle.
    let mut again = a.clone();
    create(k, &mut again).await;
    assert_eq!(k.observe_endpoint(&again).await.expect("observe"), []);
    delete(k, &again).await;
    assert_no_endpoints(k).await;
}

async fn an_ended_namespace_is_told_and_cleaned_up<W: World>(w: W) {
    let k = w.kernel();
    k.ensure_node(&node_spec()).await.expect("node");
    let a = new_endpoint(&w, 1, 10).await;
    w.end_netns(&a.netns.path);
    let wrong = k.observe_endpoint(&a).await.expect("observe");
    assert_ne!(wrong, []);
    delete(k, &a).await;
    assert_no_endpoints(k).await;
}

async fn repair_verbs_take_only_what_they_name<W: World>(w: W) {
    let k = w.kernel();
    k.ensure_node(&node_spec()).await.expect("node");
    let a = new_endpoint(&w, 1, 10).await;
    let address = first_address(&a);
    k.remove_endpoint_row(address, Epoch(9)).await.expect("another epoch's row");
    assert_eq!(k.observe_endpoint(&a).await.expect("observe"), [], "the row is of epoch 10");
    k.remove_endpoint_row(address, Epoch(10)).await.expect("row");
    k.remove_call_slot(1).await.expect("slot");
    let route = RouteRow { destination: address.into(), ifindex: Some(a.host_ifindex) };
    k.remove_route(&route).await.expect("route");
    let wrong = k.observe_endpoint(&a).await.expect("observe");
    let mut objects: Vec<&str> = wrong.iter().map(EndpointProblem::object).collect();
    objects.sort_unstable();
    assert_eq!(objects, ["call-slot", "endpoint-row", "route"], "{wrong:?}");
    k.ensure_connected(&a).await.expect("connect again");
    k.ensure_reachable(&a).await.expect("reachable again");
    assert_eq!(k.observe_endpoint(&a).await.expect("observe"), [], "mended");
    delete(k, &a).await;
    assert_no_endpoints(k).await;
}

async fn the_node_follows_its_spec<W: World>(w: W) {
    let k = w.kernel();
    let unreachable = async || {
        let routes = k.dump().await.expect("dump").routes;
        routes.iter().filter(|r| r.ifindex.is_none()).map(|r| r.destination.to_string()).collect::<Vec<_>>()
    };
    k.ensure_node(&node_spec()).await.expect("node");
    assert_eq!(unreachable().await, ["10.77.0.0/16", "fd77::/64"]);
    let mut other = node_spec();
    other.cidrs = vec!["10.77.0.0/16".parse().unwrap(), "10.99.0.0/24".parse().unwrap()];
    k.ensure_node(&other).await.expect("another spec");
    assert_eq!(unreachable().await, ["10.77.0.0/16", "10.99.0.0/24"]);
    k.remove_node().await.expect("node gone");
    let left = unreachable().await;
    assert_eq!(left, Vec::<String>::new());
}

async fn maps_and_rows_can_be_read<W: World>(w: W) {
    let k = w.kernel();
    k.ensure_node(&node_spec()).await.expect("node");
    let a = new_endpoint(&w, 1, 10).await;
    let maps = k.observe_maps().await.expect("maps");
    let names: Vec<&str> = maps.iter().map(|m| m.name.as_str()).collect();
    let own = ["1/CONFIG", "1/METRICS", "1/BANDWIDTH"];
    assert_eq!(
        names,
        [
            &["ENDPOINTS", "CALLS", "NODE_CALLS", "PROFILES", "EVENTS", "STACK_PATHS", "STACK_USERS"][..],
            &["SOURCES"],
            &[
                "FLOWS",
                "FLOWS_RECENT",
                "FLOWS_NEW",
                "FLOW_CACHE",
                "FLOW_CACHE_ENDS",
                "FRAGMENT_SLOTS",
                "FRAGMENTS",
                "FLOW_USE",
                "FLOW_TOTALS"
            ],
            &["PROXY_USE", "IPCACHE", "POLICY_PORTS", "POLICY_CELLS", "POLICY_SETS", "POLICY_STATE"],
            &["ADDRESS_GENERATIONS"],
            &own
        ]
        .concat()
    );
    let fill = |name: &str| maps.iter().find(|m| m.name == name).expect("map").entries;
    assert_eq!((fill("ENDPOINTS"), fill("CALLS"), fill("EVENTS")), (Some(2), Some(1), None));
    // A trie has memory for its rows alone.
    assert!(maps.iter().all(|m| m.memlock_bytes > 0 || m.kind == "lpm_trie"), "{maps:?}");
    let rows = k.dump_map("ENDPOINTS").await.expect("rows");
    let addresses: Vec<&str> = rows.iter().filter_map(|r| r.get("address")).map(String::as_str).collect();
    assert_eq!(addresses, ["10.77.0.2", "fd77::2"]);
    let config = k.dump_map("1/CONFIG").await.expect("config");
    assert_eq!(config.first().and_then(|c| c.get("epoch")).map(String::as_str), Some("10"));
    for bad in ["", "NOPE", "2/CONFIG", "1/NOPE", "x/CONFIG", "1/../1/CONFIG", "99999/CONFIG"] {
        let refused = k.dump_map(bad).await.expect_err(bad);
        assert_eq!(refused.kind, KernelErrorKind::NotFound, "{bad}: {refused}");
    }
    assert!(IfName::parse(a.host_ifname.as_str()).is_ok());
    delete(k, &a).await;
    assert_no_endpoints(k).await;
}

async fn without_flows_there_are_none_to_see_remove_or_collect<W: World>(w: W) {
    let k = w.kernel();
    k.ensure_node(&node_spec()).await.expect("node");
    let a = new_endpoint(&w, 1, 10).await;
    let any = FlowFilter::default();
    assert_eq!(k.observe_flows(&any, 1).await.expect("observed"), FlowList::default());
    assert_eq!(k.remove_flows(&any).await.expect("removed"), 0);
    for _ in 0..2 {
        let usage = k.collect_flows().await.expect("collected");
        assert_eq!((usage.rows, usage.expired, usage.orphaned, usage.no_room), (0, 0, 0, 0));
        assert!(usage.limit > 0 && !usage.is_nearly_full(), "{usage:?}");
    }
    delete(k, &a).await;
    k.remove_node().await.expect("node gone");
}

async fn the_owners_mark_is_on_the_link_and_stays_there<W: World>(w: W) {
    let k = w.kernel();
    k.ensure_node(&node_spec()).await.expect("node");
    let mut a = new_endpoint(&w, 1, 10).await;
    let host = a.host_ifname.as_str().to_owned();
    let mark = Mark::new(1, 10, "test", "container-1", "eth0").to_string();
    let alias = async || k.dump().await.expect("dump").links.first().and_then(|l| l.alias.clone());
    assert_eq!(alias().await.as_ref(), Some(&mark));
    // As the version before marks named an owner left it: ours, and brought up to date.
    for ensure in ["link", "connected"] {
        w.set_alias(&host, "wharf:1:10");
        assert_eq!(k.observe_endpoint(&a).await.expect("observe"), [], "still ours");
        match ensure {
            "link" => {
                let link = k.ensure_link(&link_spec(&a)).await.expect("the same link");
                assert_eq!((link.host_ifindex, link.container_ifindex), (a.host_ifindex, a.container_ifindex));
            }
            _ => k.ensure_connected(&a).await.expect("connected"),
        }
        assert_eq!(alias().await.as_ref(), Some(&mark), "after ensure {ensure}");
    }
    // Another's mark is told of, and mended.
    w.set_alias(&host, "wharf:1:10:test/another/eth0");
    let wrong = k.observe_endpoint(&a).await.expect("observe");
    assert_eq!(wrong.iter().map(EndpointProblem::object).collect::<Vec<_>>(), ["link"], "{wrong:?}");
    k.ensure_connected(&a).await.expect("connected");
    assert_eq!(k.observe_endpoint(&a).await.expect("observe"), []);
    delete(k, &a).await;
    // The longest id a container may have: the mark is cut off, and is the same on both sides.
    a.attachment.container_id = ContainerId::parse(&"c".repeat(253)).expect("container id");
    create(k, &mut a).await;
    let cut = alias().await.expect("an alias");
    assert!(Mark::parse(&cut).is_some_and(|m| m.is_of("test", a.attachment.container_id.as_str(), "eth0")), "{cut}");
    assert_eq!(k.observe_endpoint(&a).await.expect("observe"), []);
    delete(k, &a).await;
    assert_no_endpoints(k).await;
}

async fn the_mtu_changes_but_for_a_smaller_one_of_the_containers<W: World>(w: W) {
    let k = w.kernel();
    k.ensure_node(&node_spec()).await.expect("node");
    let mut a = new_endpoint(&w, 1, 10).await;
    for mtu in [1_400, 1_450] {
        k.ensure_mtu(&a, mtu).await.expect("changed");
        k.ensure_mtu(&a, mtu).await.expect("changed again");
        a.mtu = mtu;
        assert_eq!(k.observe_endpoint(&a).await.expect("observe"), [], "{mtu}");
    }
    // To a record of 1,460 the container's 1,450 is the container's own.
    a.mtu = 1_460;
    for (mtu, container) in [(1_480, 1_450), (1_450, 1_450), (1_430, 1_430), (1_500, 1_450)] {
        a.container_mtu = k.ensure_mtu(&a, mtu).await.expect("changed");
        assert_eq!(a.container_mtu, Some(1_450));
        a.mtu = mtu;
        let found = k.observe_endpoint(&EndpointRecord { mtu: container, ..a.clone() }).await.expect("observe");
        let sides: Vec<_> = found
            .into_iter()
            .map(|p| if let EndpointProblem::LinkMtu { side, found, .. } = p { (side, found) } else { panic!("{p}") })
            .collect();
        let expected: &[_] = if mtu == container { &[] } else { &[(Side::Node, mtu)] };
        assert_eq!(sides, expected, "{mtu}");
    }
    w.delete_link(a.host_ifname.as_str());
    k.ensure_mtu(&a, 1_400).await.expect("a link that is gone is left out");
    delete(k, &a).await;
}

async fn the_nodes_part_is_observed_and_mended<W: World>(w: W) {
    let k = w.kernel();
    let told = async |spec: &NodeSpec| {
        let problems = k.observe_node(spec).await.expect("observe").into_iter();
        // `link wharf0`: the first word is the kind.
        let kind = |p| Problem::Node(p).subject().split(' ').next().unwrap_or_default().to_owned();
        let mut objects: Vec<String> = problems.map(kind).collect();
        objects.dedup();
        objects
    };
    let spec = node_spec();
    assert!(told(&spec).await.contains(&"link".to_owned()), "not made yet");
    k.ensure_node(&spec).await.expect("node");
    assert_eq!(k.observe_node(&spec).await.expect("observe"), []);
    w.break_node();
    assert!(told(&spec).await.contains(&"link".to_owned()), "the router interface is down");
    k.ensure_node(&spec).await.expect("mended");
    assert_eq!(k.observe_node(&spec).await.expect("observe"), []);
    let mut other = spec.clone();
    other.mtu = 1400;
    assert_eq!(told(&other).await, ["mtu"], "another MTU");
    other = spec.clone();
    other.router4 = Some([10, 77, 0, 9].into());
    assert_eq!(told(&other).await, ["address"], "another router address");
    other = spec.clone();
    other.cidrs.push("10.99.0.0/24".parse().expect("cidr"));
    assert_eq!(told(&other).await, ["route"], "another pool");
    let route = RouteRow { destination: spec.cidrs[0], ifindex: None };
    k.remove_route(&route).await.expect("route");
    assert_eq!(told(&spec).await, ["route"]);
    k.ensure_node(&spec).await.expect("mended");
    assert_eq!(k.observe_node(&spec).await.expect("observe"), []);
    k.remove_node().await.expect("node gone");
    k.ensure_node(&spec).await.expect("node after it was gone");
    assert_eq!(k.observe_node(&spec).await.expect("observe"), []);
}

async fn what_speaks_for_an_address_is_named<W: World>(w: W) {
    let k = w.kernel();
    k.ensure_node(&node_spec()).await.expect("node");
    let a = new_endpoint(&w, 1, 10).await;
    let none: [String; 0] = [];
    for address in a.addresses() {
        let speakers = k.observe_speakers(address).await.expect("observe");
        assert_eq!(speakers.len(), 2, "{speakers:?}");
        assert!(speakers.iter().all(|s| s.contains(&address.to_string())), "{speakers:?}");
        assert!(speakers[0].contains("row") && speakers[0].contains("epoch 10"), "{speakers:?}");
        assert!(speakers[1].contains("route"), "{speakers:?}");
        k.remove_endpoint_row(address, Epoch(10)).await.expect("row");
        assert_eq!(k.observe_speakers(address).await.expect("observe").len(), 1, "the route is left");
    }
    // A neighbour, an address of no pool, the router's own.
    for quiet in ["10.77.0.3", "fd77::3", "192.0.2.1", "2001:db8::1", "10.77.0.1", "fd77::1"] {
        assert_eq!(k.observe_speakers(quiet.parse().unwrap()).await.expect("observe"), none, "{quiet}");
    }
    delete(k, &a).await;
    for address in a.addresses() {
        assert_eq!(k.observe_speakers(address).await.expect("observe"), none, "{address}");
    }
    k.remove_node().await.expect("node gone");
    assert_eq!(k.observe_speakers(first_address(&a)).await.expect("observe"), none, "without a node");
}

async fn connections_go_with_their_addresses_alone<W: World>(w: W) {
    let k = w.kernel();
    let ip = |text: &str| -> IpAddr { text.parse().expect("address") };
    let [a4, b4, c4] = ["10.77.0.2", "10.77.0.3", "10.77.0.4"].map(ip);
    let [a6, b6, c6] = ["fd77::2", "fd77::3", "fd77::4"].map(ip);
    assert_eq!(k.remove_connections(&[a4, a6]).await.expect("no rows"), 0);
    if !w.add_connection(a4, b4) {
        // A kernel that tracks nothing has nothing to remove.
        assert!(!k.features().conntrack);
        assert_eq!(k.remove_connections(&[a4]).await.expect("no conntrack"), 0);
        return;
    }
    for (source, destination) in [(c4, a4), (b4, c4), (a6, b6), (c6, a6), (c6, b6)] {
        assert!(w.add_connection(source, destination));
    }
    assert_eq!(k.remove_connections(&[]).await.expect("no addresses"), 0);
    assert_eq!(k.remove_connections(&[ip("10.77.0.9"), ip("fd77::9")]).await.expect("other addresses"), 0);
    assert_eq!(k.remove_connections(&[a4, a6]).await.expect("rows of a"), 4);
    assert_eq!(k.remove_connections(&[a4, a6]).await.expect("gone"), 0);
    assert_eq!(k.remove_connections(&[b4]).await.expect("row of b"), 1, "the neighbours' row had stayed");
    assert_eq!(k.remove_connections(&[b6]).await.expect("row of b"), 1, "the neighbours' row had stayed");
}

async fn a_left_over_pair_makes_room<W: World>(w: W) {
    let k = w.kernel();
    k.ensure_node(&node_spec()).await.expect("node");
    let path = w.add_netns("c");
    let netns = k.observe_netns(&path).await.expect("netns");
    let mut r = record(1, 10, &netns, "eth0");
    // A crash came between; the create that is tried again chose another address for the interface.
    let mut before = link_spec(&r);
    before.container_mac.0[5] ^= 0x80;
    let old = k.ensure_link(&before).await.expect("link");
    create(k, &mut r).await;
    assert_ne!(r.host_ifindex, old.host_ifindex, "another pair");
    assert_eq!(k.dump().await.expect("dump").links.len(), 1);
    assert_eq!(k.observe_endpoint(&r).await.expect("observe"), []);
    delete(k, &r).await;
    assert_no_endpoints(k).await;
}

/// Every case of an endpoint with a neighbour, as desired state has it.
async fn self_check<K: Kernel>(k: &K, r: &EndpointRecord, peer: &EndpointRecord) -> Vec<Judged> {
    let cases = selfcheck::cases(r, &config_spec(r), Some(peer));
    let results = verdicts(k, r.id, &cases).await.expect("verdicts");
    assert_eq!(results.len(), cases.len());
    cases.iter().zip(&results).map(|(case, result)| case.judge(result)).collect()
}

fn amiss(judged: Vec<Judged>) -> Vec<String> {
    judged.into_iter().filter(|j| !j.same).map(|j| format!("{}: {} -> {}", j.name, j.expected, j.got)).collect()
}

async fn test_packets_get_the_verdicts_of_desired_state<W: World>(w: W) {
    let k = w.kernel();
    k.ensure_node(&node_spec()).await.expect("node");
    let (a, b) = (new_endpoint(&w, 1, 10).await, new_endpoint(&w, 2, 11).await);
    // Only the test's own: what the node says by itself on a new link comes when it will.
    let counted = async |r: &EndpointRecord| {
        let mut rows = k.observe_counters(r.id).await.expect("counters");
        rows.retain(|row| row.reason != "multicast-unsupported" && row.reason != "neighbour-unknown-target");
        rows
    };
    let before = (counted(&a).await, counted(&b).await);
    for _ in 0..3 {
        let judged = self_check(k, &a, &b).await;
        assert_eq!(judged.len(), 14);
        assert_eq!(amiss(judged), Vec::<String>::new());
    }
    assert_eq!((counted(&a).await, counted(&b).await), before, "test packets are not traffic");
    assert_eq!(k.observe_endpoint(&a).await.expect("observe"), [], "nothing has changed");
    // One family alone.
    let mut four = a.clone();
    (four.ipv6, four.gateway6) = (None, None);
    assert_eq!(amiss(self_check(k, &four, &b).await), Vec::<String>::new());
    delete(k, &a).await;
    let cases = selfcheck::cases(&a, &config_spec(&a), None);
    let gone = verdicts(k, a.id, &cases).await.expect_err("it is gone");
    assert_eq!(gone.kind, KernelErrorKind::NotFound, "{gone}");
    delete(k, &b).await;
    assert_no_endpoints(k).await;
}

async fn a_test_packet_shows_what_is_amiss<W: World>(w: W) {
    let k = w.kernel();
    k.ensure_node(&node_spec()).await.expect("node");
    let (a, b) = (new_endpoint(&w, 1, 10).await, new_endpoint(&w, 2, 11).await);
    let failing = async |r: &EndpointRecord, peer: &EndpointRecord| -> Vec<String> {
        self_check(k, r, peer).await.into_iter().filter(|j| !j.same).map(|j| j.name).collect()
    };
    // Not live, where desired state wants it live: not even the lies get the verdict's reason.
    let mut config = config_spec(&a);
    config.live = false;
    k.ensure_config(a.id, &config).await.expect("config");
    let told = amiss(self_check(k, &a, &b).await);
    let honest = "to-gateway-ipv4: pass, egress forwarded-stack -> drop, egress endpoint-not-ready";
    assert!(told.iter().any(|t| t == honest), "{told:?}");
    assert!(told.iter().any(|t| t.starts_with("from-node-ipv6: ")), "{told:?}");
    // And what desired state wants closed is closed.
    let closed = selfcheck::cases(&a, &config, Some(&b));
    let results = verdicts(k, a.id, &closed).await.expect("verdicts");
    assert_eq!(amiss(closed.iter().zip(&results).map(|(c, r)| c.judge(r)).collect()), Vec::<String>::new());
    // Another's address.
    let mut config = config_spec(&a);
    config.ipv4 = b.ipv4;
    k.ensure_config(a.id, &config).await.expect("config");
    let names = failing(&a, &b).await;
    for name in ["to-gateway-ipv4", "gateway-resolution-ipv4", "from-node-ipv4", "to-itself-ipv4", "to-endpoint-ipv4"] {
        assert!(names.iter().any(|n| n == name), "{name} is not among {names:?}");
    }
    assert!(names.iter().all(|n| n.ends_with("-ipv4")), "{names:?}");
    k.ensure_config(a.id, &config_spec(&a)).await.expect("config");
    assert_eq!(amiss(self_check(k, &a, &b).await), Vec::<String>::new());
    // The slot of the program array is empty: no verdict about the endpoint's packets is recorded or carried out.
    k.remove_call_slot(1).await.expect("slot");
    let all: Vec<String> = selfcheck::cases(&a, &config_spec(&a), Some(&b)).iter().map(selfcheck::Case::name).collect();
    assert_eq!(failing(&a, &b).await, all);
    assert_eq!(failing(&b, &a).await, ["to-endpoint-ipv4", "to-endpoint-ipv6"]);
    k.ensure_reachable(&a).await.expect("reachable");
    // Programs of another MAC.
    let mut spec = program_spec(&a);
    spec.container_mac = b.container_mac;
    k.ensure_programs(&spec).await.expect("programs");
    k.ensure_reachable(&a).await.expect("reachable");
    let names = failing(&a, &b).await;
    assert!(names.iter().any(|n| n == "to-gateway-ipv6") && names.iter().any(|n| n == "to-itself-ipv4"), "{names:?}");
    k.ensure_programs(&program_spec(&a)).await.expect("programs");
    k.ensure_reachable(&a).await.expect("reachable");
    assert_eq!(amiss(self_check(k, &a, &b).await), Vec::<String>::new());
    delete(k, &a).await;
    delete(k, &b).await;
    assert_no_endpoints(k).await;
}

async fn source_prefixes_follow_the_configuration<W: World>(w: W) {
    let k = w.kernel();
    k.ensure_node(&node_spec()).await.expect("node");
    let (mut a, b) = (new_endpoint(&w, 1, 10).await, new_endpoint(&w, 2, 11).await);
    let rows = async || -> Vec<String> {
        let text = |row: &BTreeMap<String, String>| {
            ["endpoint", "epoch", "ifindex", "prefixes"].map(|name| row.get(name).map_or("", String::as_str)).join(" ")
        };
        k.dump_map("SOURCES").await.expect("rows").iter().map(text).collect()
    };
    let none: [String; 0] = [];
    assert_eq!(rows().await, none);
    for list in [&["10.200.0.0/16", "fd00:9::/64"][..], &["192.0.2.1/32"], &["2001:db8:9::/48"]] {
        let prefixes = list.iter().map(|text| text.parse().expect("a prefix")).collect();
        a.sources = SourcePrefixes::new(prefixes).expect("prefixes");
        let wrong = k.observe_endpoint(&a).await.expect("observe");
        let is_config = |p: &EndpointProblem| matches!(p, EndpointProblem::Config { .. });
        assert!(!wrong.is_empty() && wrong.iter().all(is_config), "{wrong:?}");
        for _ in 0..2 {
            k.ensure_config(a.id, &config_spec(&a)).await.expect("config");
        }
        assert_eq!(rows().await, [format!("1 10 {} {}", a.host_ifindex, list.join(","))]);
        assert_eq!(k.observe_endpoint(&a).await.expect("observe"), []);
        assert_eq!(amiss(self_check(k, &a, &b).await), Vec::<String>::new());
    }
    assert_eq!(k.observe_node(&node_spec()).await.expect("observe"), [], "no row is a stray");
    k.ensure_node(&node_spec()).await.expect("node again");
    assert_eq!(rows().await.len(), 1);
    // Without them, and with them again.
    let with = a.clone();
    a.sources = SourcePrefixes::default();
    assert_ne!(k.observe_endpoint(&a).await.expect("observe"), []);
    k.ensure_config(a.id, &config_spec(&a)).await.expect("config");
    assert_eq!(rows().await, none);
    assert_eq!(k.observe_endpoint(&a).await.expect("observe"), []);
    k.ensure_config(with.id, &config_spec(&with)).await.expect("config");
    // The link was made again: the row of the former one goes.
    w.delete_link(with.host_ifname.as_str());
    let mut again = with.clone();
    create(k, &mut again).await;
    assert_eq!(rows().await, [format!("1 10 {} 2001:db8:9::/48", again.host_ifindex)]);
    assert_eq!(k.observe_endpoint(&again).await.expect("observe"), []);
    delete(k, &again).await;
    assert_eq!(rows().await, none);
    // A late delete leaves the successor's.
    let mut next = new_endpoint(&w, 1, 12).await;
    next.sources = again.sources.clone();
    k.ensure_config(next.id, &config_spec(&next)).await.expect("config");
    k.remove_reachable(&again).await.expect("late unreachable");
    assert_eq!(rows().await.len(), 1);
    delete(k, &next).await;
    assert_eq!(rows().await, none);
    delete(k, &b).await;
    assert_no_endpoints(k).await;
}

/// The record of an endpoint on a link that a plugin made.
async fn on_plugin_link<W: World>(world: &W, n: u16, epoch: u64) -> EndpointRecord {
    let k = world.kernel();
    let path = world.add_netns(&format!("plugin-{n}"));
    let netns = k.observe_netns(&path).await.expect("a namespace");
    let mut r = record(n, epoch, &netns, "eth0");
    r.host_ifname = IfName::parse(&format!("veth{n}")).expect("a name");
    (r.gateway4, r.gateway6, r.mtu_follows, r.ip_owner) = (None, None, false, IpOwner::External);
    assert_eq!(
        k.observe_plugin_link(&netns, &r.attachment.ifname).await.expect_err("no interface").kind,
        KernelErrorKind::NotFound
    );
    world.add_plugin_link(&r);
    let seen = k.observe_plugin_link(&netns, &r.attachment.ifname).await.expect("a link");
    assert_eq!((&seen.host_ifname, seen.hooks), (&r.host_ifname, HooksFound::None));
    (r.host_ifindex, r.container_ifindex) = (seen.link.host_ifindex, seen.link.container_ifindex);
    (r.host_mac, r.container_mac, r.mtu) = (seen.host_mac, seen.container_mac, seen.mtu);
    r.link_owner = LinkOwner::Plugin { hooks: seen.hooks };
    r
}

async fn attach<W: World>(world: &W, r: &EndpointRecord) {
    let k = world.kernel();
    k.ensure_programs(&program_spec(r)).await.expect("programs");
    k.ensure_config(r.id, &config_spec(r)).await.expect("config");
    k.ensure_attached(&link_ref(r)).await.expect("attached");
    k.ensure_connected(r).await.expect("it is the link of the record");
    k.ensure_reachable(r).await.expect("reachable");
}

async fn a_plugins_link_is_taken_as_it_is_and_left_as_it_was<W: World>(world: W) {
    let k = world.kernel();
    k.ensure_node(&node_spec()).await.expect("node");
    let r = on_plugin_link(&world, 1, 10).await;
    let hooks = async || k.observe_plugin_link(&r.netns, &r.attachment.ifname).await.expect("a link").hooks;
    attach(&world, &r).await;
    assert_eq!(k.observe_endpoint(&r).await.expect("observed"), []);
    assert_eq!(k.observe_missing(&[link_ref(&r)]).await.expect("looked"), []);
    assert_eq!(k.dump().await.expect("dump").links, [], "it is not ours");
    let cases: Arc<[_]> = selfcheck::cases(&r, &config_spec(&r), None).into();
    let results = verdicts(k, r.id, &cases).await.expect("verdicts");
    for judged in cases.iter().zip(&results).map(|(case, result)| case.judge(result)) {
        assert!(judged.same, "{judged:?}");
    }

    // The undo of another epoch takes nothing, that of this one takes all.
    k.remove_from_plugin_link(&LinkRef { epoch: Epoch(9), ..link_ref(&r) }).await.expect("nothing of it");
    assert_eq!(k.observe_endpoint(&r).await.expect("observed"), []);
    for _ in 0..2 {
        k.remove_reachable(&r).await.expect("unreachable");
        k.remove_from_plugin_link(&link_ref(&r)).await.expect("taken off");
        k.remove_programs(r.id).await.expect("unpinned");
        assert_eq!(hooks().await, HooksFound::None);
    }

    // A delete leaves it closed, and never takes it away.
    attach(&world, &r).await;
    k.remove_attached(&link_ref(&r)).await.expect("detached");
    k.remove_reachable(&r).await.expect("unreachable");
    k.remove_programs(r.id).await.expect("unpinned");
    k.remove_link(&link_ref(&r)).await.expect("nothing to remove");
    assert!(world.has_link(r.host_ifname.as_str()));
    assert_eq!(hooks().await, HooksFound::Closed);

    // The next endpoint on it, undone: closed as it was found.
    let next =
        EndpointRecord { link_owner: LinkOwner::Plugin { hooks: HooksFound::Closed }, epoch: Epoch(11), ..r.clone() };
    attach(&world, &next).await;
    assert_eq!(k.observe_endpoint(&next).await.expect("observed"), []);
    k.remove_reachable(&next).await.expect("unreachable");
    k.remove_from_plugin_link(&link_ref(&next)).await.expect("closed again");
    k.remove_programs(next.id).await.expect("unpinned");
    assert_eq!(hooks().await, HooksFound::Closed);

    // Another interface took the name: whatever is asked for, nothing happens to it.
    world.delete_link(r.host_ifname.as_str());
    assert_eq!(k.observe_missing(&[link_ref(&r)]).await.expect("looked"), [r.id]);
    world.add_plugin_link(&r);
    assert_eq!(k.observe_missing(&[link_ref(&r)]).await.expect("looked"), [r.id]);
    for link in [link_ref(&r), LinkRef { host_ifindex: None, ..link_ref(&r) }] {
        k.remove_attached(&link).await.expect("not this one");
        k.remove_from_plugin_link(&link).await.expect("not this one");
        k.remove_link(&link).await.expect("not this one");
    }
    assert!(world.has_link(r.host_ifname.as_str()));
    assert_eq!(hooks().await, HooksFound::None);
    assert!(k.ensure_connected(&r).await.expect_err("another link").kind == KernelErrorKind::NotFound);
}
