//! A link whose removal is reported is out of everybody's sight, whatever the kernel still does with it.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests fail by panicking")]

mod support;

use std::{fs, net::UdpSocket, path::Path};

use nix::net::if_::if_indextoname;
use support::*;
use wharf_core::{
    endpoint::EndpointRecord,
    ids::IfIndex,
    kernel::{AttachMode, Kernel, LinkRelease, NodeKernel},
};

/// Whether the kernel finds an interface by its index: a lookup that takes no lock.
fn is_found(ifindex: IfIndex) -> bool {
    // The library gives an empty name for an index that the kernel refuses.
    if_indextoname(ifindex.0).is_ok_and(|name| !name.is_empty())
}

/// The node's routes over an interface, of both families. Reading these files takes no lock on links.
fn routes_over(ifname: &str) -> Vec<String> {
    let tables = ["/proc/thread-self/net/route", "/proc/thread-self/net/ipv6_route"];
    let read = |table| fs::read_to_string(table).expect("routes").lines().map(str::to_owned).collect::<Vec<_>>();
    tables.into_iter().flat_map(read).filter(|line| line.split_whitespace().any(|word| word == ifname)).collect()
}

/// Whether anything of the container's side is found: the interface, its settings, its addresses.
fn inside_is_found(r: &EndpointRecord) -> bool {
    let (path, ifindex): (&Path, _) = (&r.netns.path, r.container_ifindex);
    let (settings, address) = (format!("/proc/sys/net/ipv4/conf/{}", r.attachment.ifname), r.ipv4.expect("IPv4"));
    LinuxWorld::inside(path, move || {
        is_found(ifindex) || Path::new(&settings).exists() || UdpSocket::bind((address, 0)).is_ok()
    })
}

async fn close(k: &impl Kernel, r: &EndpointRecord) {
    k.remove_attached(&link_ref(r)).await.expect("detach");
    k.remove_reachable(r).await.expect("unreachable");
    k.remove_programs(r.id).await.expect("programs");
}

async fn unlist(k: &impl Kernel, r: &EndpointRecord) -> LinkRelease {
    let release = k.unlist_link(&link_ref(r)).await.expect("unlisted");
    let name = r.host_ifname.as_str();
    assert!(!is_found(r.host_ifindex), "{name} on the node");
    assert!(!inside_is_found(r), "the container's side of {name}");
    assert_eq!(routes_over(name), [] as [String; 0]);
    release
}

fn an_unlisted_link_is_found_by_nobody(mode: AttachMode) {
    in_linux_world(Some(mode), |w| async move {
        let k = &w.kernel;
        k.ensure_node(&node_spec()).await.expect("node");
        // One by one, then as a group.
        for ids in [1..=1, 2..=2, 3..=14] {
            let mut records = Vec::new();
            for n in ids {
                records.push(new_endpoint(&w, n, u64::from(n)).await);
            }
            for r in &records {
                assert!(is_found(r.host_ifindex) && inside_is_found(r));
                assert!(routes_over(r.host_ifname.as_str()).len() >= 2, "one of each family");
                close(k, r).await;
            }
            let releases = futures::future::join_all(records.iter().map(|r| unlist(k, r))).await;
            for release in releases {
                release.await.expect("released");
            }
            assert_no_endpoints(k).await;
        }
    });
}

#[test]
fn an_unlisted_link_is_found_by_nobody_with_tcx() {
    an_unlisted_link_is_found_by_nobody(AttachMode::Tcx);
}

#[test]
fn an_unlisted_link_is_found_by_nobody_with_clsact() {
    an_unlisted_link_is_found_by_nobody(AttachMode::Clsact);
}

#[test]
fn a_bridge_that_loses_its_port_is_no_removal() {
    in_linux_world(None, |w| async move {
        let k = &w.kernel;
        k.ensure_node(&node_spec()).await.expect("node");
        let r = new_endpoint(&w, 1, 1).await;
        run("ip", &["link", "add", "br7", "type", "bridge"]);
        run("ip", &["link", "set", r.host_ifname.as_str(), "master", "br7"]);
        close(k, &r).await;
        unlist(k, &r).await.await.expect("released");
        assert_no_endpoints(k).await;
    });
}

#[test]
fn a_second_removal_finds_nothing_and_needs_no_wait() {
    in_linux_world(None, |w| async move {
        let k = &w.kernel;
        k.ensure_node(&node_spec()).await.expect("node");
        let r = new_endpoint(&w, 1, 1).await;
        close(k, &r).await;
        let (first, second) = futures::join!(unlist(k, &r), unlist(k, &r));
        let third = unlist(k, &r).await;
        for release in [first, second, third] {
            release.await.expect("released");
        }
        assert_no_endpoints(k).await;
    });
}
