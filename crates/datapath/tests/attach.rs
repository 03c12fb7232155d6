//! Attaching on the real kernel: replacement under load, a changed mode, and what others put on the same hooks.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests fail by panicking")]

mod support;

use std::{net::IpAddr, time::Duration};

use aya::programs::{SchedClassifier, TcAttachType};
use support::{
    traffic::{Delivered, Load, reaches_node},
    *,
};
use wharf_core::{
    endpoint::EndpointRecord,
    finding::EndpointProblem,
    kernel::{AttachMode, Attached, EndpointKernel, KernelErrorKind, NodeKernel},
};
use wharf_datapath::LinuxKernel;

const HOOKS: [(TcAttachType, &str); 2] = [(TcAttachType::Ingress, "ingress"), (TcAttachType::Egress, "egress")];

/// Another agent on the same bpffs, in a mode of its own.
fn agent(w: &LinuxWorld, mode: AttachMode) -> LinuxKernel {
    support::open(&w.bpffs(), &w.bpffs().with_extension("run"), Some(mode)).expect("open kernel")
}

const fn other(mode: AttachMode) -> AttachMode {
    match mode {
        AttachMode::Tcx => AttachMode::Clsact,
        AttachMode::Clsact => AttachMode::Tcx,
    }
}

/// Tcx programs on each hook.
fn tcx(r: &EndpointRecord) -> [usize; 2] {
    HOOKS.map(|(hook, _)| {
        SchedClassifier::query_tcx(r.host_ifname.as_str(), hook).map_or(0, |(_, programs)| programs.len())
    })
}

/// Our filters on each hook, by name.
fn filters(r: &EndpointRecord, name: &str) -> [usize; 2] {
    HOOKS.map(|(_, hook)| {
        let shown = run("tc", &["filter", "show", "dev", r.host_ifname.as_str(), hook]);
        shown.matches(&format!("wharf/{name} ")).count()
    })
}

fn qdisc(r: &EndpointRecord) -> String {
    run("tc", &["qdisc", "show", "dev", r.host_ifname.as_str(), "clsact"])
}

/// Asserts that the programs of one mode stand on the hooks, and none of the other's. Some kernels let go of a tcx link
/// a moment after they were told to.
async fn assert_only(mode: AttachMode, r: &EndpointRecord) {
    let wanted = match mode {
        AttachMode::Tcx => ([1, 1], [0, 0]),
        AttachMode::Clsact => ([0, 0], [1, 1]),
    };
    let standing = || {
        let [from, to] = [filters(r, "from_container")[0], filters(r, "to_container")[1]];
        let [sink_in, sink_out] = filters(r, "sink");
        (tcx(r), [from + sink_in, to + sink_out])
    };
    let settled = async {
        while standing() != wanted {
            tokio::task::yield_now().await;
        }
    };
    let done = tokio::time::timeout(Duration::from_secs(10), settled).await;
    assert!(done.is_ok(), "{mode} expected, tcx programs and filters on the hooks: {:?}", standing());
}

/// Packets that a counter of the endpoint has seen.
async fn packets(k: &LinuxKernel, r: &EndpointRecord, direction: &str, reason: &str) -> u64 {
    let counters = k.observe_counters(r.id).await.expect("counters");
    counters.iter().find(|c| c.direction == direction && c.reason == reason).map_or(0, |c| c.packets)
}

const FORGED: &str = "10.77.9.9";

/// Lets the container send without asking for the gateway's MAC, which would be refused while its link is closed and
/// for an address that is not its own.
fn know_gateway(r: &EndpointRecord) {
    let mac = r.host_mac.to_string();
    LinuxWorld::inside(&r.netns.path, move || {
        run("ip", &["neigh", "replace", &ROUTER4.to_string(), "lladdr", &mac, "dev", "eth0", "nud", "permanent"]);
    });
}

fn give_forged_address(r: &EndpointRecord) {
    know_gateway(r);
    LinuxWorld::inside(&r.netns.path, || run("ip", &["addr", "add", &format!("{FORGED}/32"), "dev", "eth0"]));
}

/// Replaces programs again and again while datagrams flow, and compares exact counts.
fn replacements_lose_nothing(mode: AttachMode, ipv6: bool) {
    const REPLACEMENTS: usize = 60;
    in_linux_world(Some(mode), move |w| async move {
        let k = &w.kernel;
        k.ensure_node(&node_spec()).await.expect("node");
        let a = new_endpoint(&w, 1, 10).await;
        let b = new_endpoint(&w, 2, 11).await;
        give_forged_address(&a);
        let (to, forged) = match ipv6 {
            false => (IpAddr::V4(b.ipv4.unwrap()), Some(FORGED.parse().expect("address"))),
            true => (IpAddr::V6(b.ipv6.unwrap()), None),
        };
        let mut load = Load::start(&a.netns.path, &b.netns.path, to, forged);
        for n in 0..REPLACEMENTS {
            load.advance(20).await;
            let r = if n % 2 == 0 { &a } else { &b };
            k.ensure_programs(&program_spec(r)).await.expect("programs");
            assert_eq!(k.ensure_attached(&link_ref(r)).await.expect("attached"), Attached::Replaced);
        }
        load.advance(20).await;
        let told = load.finish();
        assert!(told.sent >= 20 * REPLACEMENTS as u64, "{told:?}");
        assert_eq!(told, Delivered { sent: told.sent, received: told.sent, forged_received: 0 });
        assert_eq!(packets(k, &a, "egress", "forwarded-local").await, told.sent);
        assert_eq!(packets(k, &b, "ingress", "forwarded-local").await, told.sent);
        let forged_sent = if ipv6 { 0 } else { told.sent };
        assert_eq!(packets(k, &a, "egress", "invalid-source-ip").await, forged_sent);
        assert_only(mode, &a).await;
        assert_only(mode, &b).await;
        delete(k, &a).await;
        delete(k, &b).await;
        assert_no_endpoints(k).await;
    });
}

#[test]
fn replacements_lose_nothing_with_tcx() {
    replacements_lose_nothing(AttachMode::Tcx, false);
}

#[test]
fn replacements_lose_nothing_with_clsact() {
    replacements_lose_nothing(AttachMode::Clsact, false);
}

#[test]
fn replacements_lose_nothing_with_clsact_over_ipv6() {
    replacements_lose_nothing(AttachMode::Clsact, true);
}

/// An agent that was started again with the other mode takes the endpoint over, and back, while datagrams flow.
#[test]
fn a_changed_mode_loses_nothing_and_lets_nothing_through() {
    const CHANGES: usize = 20;
    in_linux_world(Some(AttachMode::Tcx), |w| async move {
        w.kernel.ensure_node(&node_spec()).await.expect("node");
        let a = new_endpoint(&w, 1, 10).await;
        let b = new_endpoint(&w, 2, 11).await;
        give_forged_address(&a);
        let agents = [AttachMode::Clsact, AttachMode::Tcx].map(|mode| (mode, agent(&w, mode)));
        let mut load =
            Load::start(&a.netns.path, &b.netns.path, b.ipv4.unwrap().into(), Some(FORGED.parse().expect("address")));
        for n in 0..CHANGES {
            let (mode, k) = &agents[n % 2];
            for r in [&a, &b] {
                load.advance(20).await;
                let left = k.observe_endpoint(r).await.expect("observe");
                assert!(left.iter().any(|p| p.object() == "program"), "programs of the other mode are told: {left:?}");
                // Every other time with new programs.
                if n % 4 > 1 {
                    k.ensure_programs(&program_spec(r)).await.expect("programs");
                }
                assert_eq!(k.ensure_attached(&link_ref(r)).await.expect("attached"), Attached::Replaced, "{mode}");
                assert_only(*mode, r).await;
                assert_eq!(k.observe_endpoint(r).await.expect("observe"), [], "{mode}");
            }
        }
        load.advance(20).await;
        let told = load.finish();
        assert_eq!(told, Delivered { sent: told.sent, received: told.sent, forged_received: 0 });
        let k = &w.kernel;
        assert_eq!(packets(k, &a, "egress", "forwarded-local").await, told.sent);
        assert_eq!(packets(k, &b, "ingress", "forwarded-local").await, told.sent);
        assert_eq!(packets(k, &a, "egress", "invalid-source-ip").await, told.sent);
        assert_eq!(qdisc(&a), "", "the qdisc went with our last filter");
        delete(k, &a).await;
        delete(k, &b).await;
        assert_no_endpoints(k).await;
    });
}

fn a_delete_after_the_mode_changed(from: AttachMode) {
    in_linux_world(Some(from), move |w| async move {
        w.kernel.ensure_node(&node_spec()).await.expect("node");
        let k = agent(&w, other(from));
        for begun_before in [false, true] {
            let a = new_endpoint(&w, 1, 10).await;
            let path = a.netns.path.clone();
            know_gateway(&a);
            assert!(reaches_node(&path), "before");
            if begun_before {
                // The agent of the old mode got this far and crashed.
                w.kernel.remove_attached(&link_ref(&a)).await.expect("detach");
            }
            k.remove_attached(&link_ref(&a)).await.expect("detach");
            assert!(!reaches_node(&path), "after detach");
            assert_only(other(from), &a).await;
            k.remove_reachable(&a).await.expect("unreachable");
            k.remove_programs(a.id).await.expect("programs");
            assert!(!reaches_node(&path), "after the programs' pins are gone");
            k.remove_link(&link_ref(&a)).await.expect("link");
            assert_no_endpoints(&k).await;
            w.end_netns(&path);
        }
    });
}

#[test]
fn a_delete_after_the_mode_changed_to_clsact() {
    a_delete_after_the_mode_changed(AttachMode::Tcx);
}

#[test]
fn a_delete_after_the_mode_changed_to_tcx() {
    a_delete_after_the_mode_changed(AttachMode::Clsact);
}

/// A create that comes after a delete in the other mode was begun (a delete that failed, then a repair).
#[test]
fn a_sink_of_the_other_mode_gives_way_to_programs() {
    in_linux_world(Some(AttachMode::Tcx), |w| async move {
        w.kernel.ensure_node(&node_spec()).await.expect("node");
        let a = new_endpoint(&w, 1, 10).await;
        know_gateway(&a);
        for mode in [AttachMode::Clsact, AttachMode::Tcx] {
            agent(&w, other(mode)).remove_attached(&link_ref(&a)).await.expect("detach");
            assert!(!reaches_node(&a.netns.path), "{mode}: closed");
            let k = agent(&w, mode);
            assert_ne!(k.observe_endpoint(&a).await.expect("observe"), [], "{mode}");
            assert_eq!(k.ensure_attached(&link_ref(&a)).await.expect("attached"), Attached::Replaced);
            assert_only(mode, &a).await;
            assert_eq!(k.observe_endpoint(&a).await.expect("observe"), [], "{mode}");
            assert!(reaches_node(&a.netns.path), "{mode}: open");
        }
        delete(&w.kernel, &a).await;
        assert_no_endpoints(&w.kernel).await;
    });
}

/// A filter of somebody else's that matches everything.
fn add_foreign_filter(r: &EndpointRecord, hook: &str, priority: &str) {
    let dev = r.host_ifname.as_str();
    let all = ["protocol", "all", "u32", "match", "u32", "0", "0", "classid", "1:1"];
    run("tc", &[&["filter", "add", "dev", dev, hook, "prio", priority][..], &all].concat());
}

fn foreign_filters(r: &EndpointRecord) -> Vec<String> {
    let shown = HOOKS.map(|(_, hook)| run("tc", &["filter", "show", "dev", r.host_ifname.as_str(), hook]));
    shown.iter().flat_map(|s| s.lines()).filter(|l| l.contains(" u32 ")).map(str::to_owned).collect()
}

#[test]
fn foreign_filters_beside_ours_are_left_alone() {
    in_linux_world(Some(AttachMode::Clsact), |w| async move {
        let k = &w.kernel;
        k.ensure_node(&node_spec()).await.expect("node");
        let a = new_endpoint(&w, 1, 10).await;
        add_foreign_filter(&a, "ingress", "7");
        add_foreign_filter(&a, "egress", "9");
        let theirs = foreign_filters(&a);
        assert!(theirs.len() >= 2, "{theirs:?}");
        assert_eq!(k.observe_endpoint(&a).await.expect("observe"), [], "others' filters are no mismatch");
        k.ensure_programs(&program_spec(&a)).await.expect("programs");
        assert_eq!(k.ensure_attached(&link_ref(&a)).await.expect("attached"), Attached::Replaced);
        assert_eq!(foreign_filters(&a), theirs, "after a replacement");
        // With their filters the qdisc stays, too.
        let k = agent(&w, AttachMode::Tcx);
        k.ensure_attached(&link_ref(&a)).await.expect("attached");
        assert_only(AttachMode::Tcx, &a).await;
        assert_eq!(foreign_filters(&a), theirs, "after our filters went");
        assert_eq!(k.observe_endpoint(&a).await.expect("observe"), []);
        k.remove_attached(&link_ref(&a)).await.expect("detach");
        w.kernel.remove_attached(&link_ref(&a)).await.expect("detach");
        assert_only(AttachMode::Clsact, &a).await;
        assert_eq!(foreign_filters(&a), theirs, "after the sink came");
        delete(&w.kernel, &a).await;
        assert_no_endpoints(&w.kernel).await;
    });
}

#[test]
fn what_is_in_our_place_is_named_and_left_alone() {
    in_linux_world(Some(AttachMode::Clsact), |w| async move {
        let k = &w.kernel;
        k.ensure_node(&node_spec()).await.expect("node");
        let path = w.add_netns("c");
        let netns = k.observe_netns(&path).await.expect("netns");
        let mut a = record(1, 10, &netns, "eth0");
        k.ensure_programs(&program_spec(&a)).await.expect("programs");
        let link = k.ensure_link(&link_spec(&a)).await.expect("link");
        (a.host_ifindex, a.container_ifindex) = (link.host_ifindex, link.container_ifindex);
        let dev = a.host_ifname.as_str();
        let refused = async |part: &str| {
            for attempt in ["attach", "detach"] {
                let e = match attempt {
                    "attach" => k.ensure_attached(&link_ref(&a)).await.map(drop).expect_err("attach"),
                    _ => k.remove_attached(&link_ref(&a)).await.expect_err("detach"),
                };
                assert_eq!(e.kind, KernelErrorKind::Conflict, "{e}");
                assert!(e.to_string().contains(part) && e.to_string().contains("--attach-mode tcx"), "{e}");
            }
        };
        // A filter of another kind at our priority.
        run("tc", &["qdisc", "add", "dev", dev, "clsact"]);
        add_foreign_filter(&a, "egress", "1");
        let theirs = foreign_filters(&a);
        refused("kind u32").await;
        assert_eq!(foreign_filters(&a), theirs);
        run("tc", &["qdisc", "del", "dev", dev, "clsact"]);
        // The older qdisc, on which both our filters would share one hook.
        run("tc", &["qdisc", "add", "dev", dev, "ingress"]);
        refused("tc qdisc del").await;
        assert_eq!(filters(&a, "from_container"), [0, 0]);
        run("tc", &["qdisc", "show", "dev", dev, "ingress"]);
        // What the errors advise helps.
        let tcx = agent(&w, AttachMode::Tcx);
        tcx.ensure_config(a.id, &config_spec(&a)).await.expect("config");
        assert_eq!(tcx.ensure_attached(&link_ref(&a)).await.expect("attached"), Attached::New);
        delete(&tcx, &a).await;
        assert_no_endpoints(&tcx).await;
    });
}

#[test]
fn a_deleted_qdisc_is_told_of_and_mended() {
    in_linux_world(Some(AttachMode::Clsact), |w| async move {
        let k = &w.kernel;
        k.ensure_node(&node_spec()).await.expect("node");
        let a = new_endpoint(&w, 1, 10).await;
        run("tc", &["qdisc", "del", "dev", a.host_ifname.as_str(), "clsact"]);
        let told = k.observe_endpoint(&a).await.expect("observe");
        assert_eq!(told.len(), 2, "one for each hook: {told:?}");
        assert!(
            told.iter().all(|p| matches!(p, EndpointProblem::Program { found, .. } if found.is_empty())),
            "{told:?}"
        );
        assert_eq!(k.ensure_attached(&link_ref(&a)).await.expect("attached"), Attached::New);
        assert_eq!(k.observe_endpoint(&a).await.expect("observe"), []);
        assert_only(AttachMode::Clsact, &a).await;
        // One filter gone.
        run("tc", &["filter", "del", "dev", a.host_ifname.as_str(), "egress"]);
        let told = k.observe_endpoint(&a).await.expect("observe");
        assert_eq!(told.len(), 1, "{told:?}");
        assert!(matches!(&told[0], EndpointProblem::Program { program, .. } if program == "to_container"), "{told:?}");
        assert_eq!(k.ensure_attached(&link_ref(&a)).await.expect("attached"), Attached::New);
        assert_eq!(k.observe_endpoint(&a).await.expect("observe"), []);
        // Gone while it is deleted: the sink comes all the same.
        run("tc", &["qdisc", "del", "dev", a.host_ifname.as_str(), "clsact"]);
        k.remove_attached(&link_ref(&a)).await.expect("detach");
        assert!(!reaches_node(&a.netns.path));
        delete(k, &a).await;
        assert_no_endpoints(k).await;
    });
}

#[test]
fn a_missing_link_pin_is_told_of_and_mended() {
    in_linux_world(Some(AttachMode::Tcx), |w| async move {
        let k = &w.kernel;
        k.ensure_node(&node_spec()).await.expect("node");
        let a = new_endpoint(&w, 1, 10).await;
        std::fs::remove_file(w.pins().join("endpoints/1/link_to_container")).expect("unpin");
        let told = k.observe_endpoint(&a).await.expect("observe");
        assert!(told.contains(&EndpointProblem::PinMissing { name: "link_to_container".to_owned() }), "{told:?}");
        // The kernel lets go of the link a moment after its pin went; until then the attempt is to be repeated.
        let mended = async {
            loop {
                match k.ensure_attached(&link_ref(&a)).await {
                    Err(e) => assert_eq!(e.kind, KernelErrorKind::Exhausted, "{e}"),
                    Ok(attached) => return attached,
                }
            }
        };
        let attached = tokio::time::timeout(Duration::from_secs(10), mended).await.expect("mended in time");
        assert_eq!(attached, Attached::New);
        assert_eq!(k.observe_endpoint(&a).await.expect("observe"), []);
        delete(k, &a).await;
        assert_no_endpoints(k).await;
    });
}

#[test]
fn an_empty_closing_directory_goes_when_the_programs_are_attached() {
    in_linux_world(Some(AttachMode::Tcx), |w| async move {
        w.kernel.ensure_node(&node_spec()).await.expect("node");
        let a = new_endpoint(&w, 1, 10).await;
        // As a crash leaves it that comes when the pins are back in the endpoint's directory.
        let closing = w.pins().join("closing").join(a.host_ifname.as_str());
        std::fs::create_dir(&closing).expect("directory");
        w.kernel.ensure_attached(&link_ref(&a)).await.expect("attached");
        assert!(!closing.exists());
        // The sink left in front of the programs is told of.
        w.kernel.remove_attached(&link_ref(&a)).await.expect("detach");
        let told = w.kernel.observe_endpoint(&a).await.expect("observe");
        assert!(told.iter().any(|p| matches!(p, EndpointProblem::Sink { .. })), "{told:?}");
        assert_eq!(w.kernel.ensure_attached(&link_ref(&a)).await.expect("attached"), Attached::Replaced);
        assert_eq!(w.kernel.observe_endpoint(&a).await.expect("observe"), []);
        delete(&w.kernel, &a).await;
        assert_no_endpoints(&w.kernel).await;
    });
}
