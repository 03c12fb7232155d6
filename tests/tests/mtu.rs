//! The MTU of links: the uplink's unless somebody asks for another, and what becomes of packets that are too big.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    os::fd::AsRawFd as _,
};

use anyhow::{Context, Result, ensure};
use nix::sys::socket::{getsockopt, sockopt};
use serde_json::json;
use wharf_tests::{
    Attached, Node, NodeConfig, Sandbox, echo,
    process::ip,
    scenario,
    space::Space,
    wait,
    world::{WORLD, World},
};

fn default_routes(node: &Node) -> Result<()> {
    ip(node.space(), &format!("route add default via {}", WORLD[0]))?;
    ip(node.space(), &format!("-6 route add default via {}", WORLD[1]))?;
    Ok(())
}

fn await_mtu(node: &Node, told: &str) -> Result<()> {
    wait::until_equal("the status tells the MTU", &told.to_owned(), || {
        let status: serde_json::Value = serde_json::from_str(&node.wharf(&["status", "-o", "json"])?.stdout)?;
        Ok(status["network"]["mtu"].as_str().unwrap_or_default().to_owned())
    })
}

/// MTU of a link.
fn of(space: &Space, name: &str) -> Result<u32> {
    let text = ip(space, &format!("link show {name}"))?;
    let mtu = text.split_whitespace().skip_while(|word| *word != "mtu").nth(1).context("no MTU")?;
    Ok(mtu.parse()?)
}

/// MTU of the container's side, the host side, and the record.
fn of_endpoint(node: &Node, inside: &Sandbox, end: &Attached) -> Result<[u32; 3]> {
    let told = node.endpoint(end)?;
    Ok([of(inside.space()?, "eth0")?, of(node.space(), &told.host_ifname)?, told.mtu])
}

#[test]
fn links_have_the_uplinks_mtu_and_follow_it() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        await_mtu(node, "1500 (no interface has a default route)")?;
        let early = node.sandbox("early")?;
        let before = node.attach(&early)?;
        ensure!(of_endpoint(node, &early, &before)? == [1500; 3]);
        let _world = World::join(node)?;
        ip(node.space(), "link set up0 mtu 1400")?;
        // One of IPv6 alone counts too, and the smallest of several.
        ip(node.space(), &format!("-6 route add default via {}", WORLD[1]))?;
        await_mtu(node, "1400 (uplink up0)")?;
        ip(node.space(), "link add wide0 mtu 9000 type veth peer name wide1")?;
        ip(node.space(), "link set wide0 up")?;
        ip(node.space(), "link set wide1 up")?;
        ip(node.space(), "route add default dev wide0")?;

        let [plain, asked, own] = ["plain", "asked", "own"].map(|name| node.sandbox(name));
        let (plain, asked, own) = (plain?, asked?, own?);
        let follows = node.attach(&plain)?;
        let fixed = node.attach_with(&asked, "eth0", &node.netconf().with("mtu", json!(1300)))?;
        let chooses = node.attach(&own)?;
        ip(own.space()?, "link set eth0 mtu 1290")?;
        ensure!(of_endpoint(node, &plain, &follows)? == [1400; 3]);
        wait::until_equal("what was there before follows", &[1400; 3], || of_endpoint(node, &early, &before))?;
        for link in ["wharf0", "wharf0p"] {
            wait::until_equal("the router's pair follows", &1400, || of(node.space(), link))?;
        }

        ip(node.space(), "link set up0 mtu 1450")?;
        await_mtu(node, "1450 (uplink up0)")?;
        wait::until_equal("the link follows", &[1450; 3], || of_endpoint(node, &plain, &follows))?;
        wait::until_equal("the host side follows", &[1290, 1450, 1450], || of_endpoint(node, &own, &chooses))?;
        ensure!(of_endpoint(node, &asked, &fixed)? == [1300; 3], "an MTU that was asked for changed");
        for end in [&follows, &fixed, &before] {
            node.check(end)?.silent()?;
        }
        for link in ["wharf0", "wharf0p"] {
            wait::until_equal("the router's pair follows", &1450, || of(node.space(), link))?;
        }
        ensure!(node.audit()?.findings.is_empty(), "{:?}", node.audit()?.findings);

        node.kill_agent()?;
        ip(node.space(), "link set up0 mtu 1350")?;
        node.start_agent()?;
        wait::until_equal("the link follows a change without an agent", &[1350; 3], || {
            of_endpoint(node, &plain, &follows)
        })?;
        ensure!(of_endpoint(node, &asked, &fixed)? == [1300; 3]);
        ip(node.space(), "link del wide0")?;
        [before, follows, fixed, chooses].iter().try_for_each(|end| node.detach(end))
    })
}

#[test]
fn an_uplink_by_a_nexthop_object_is_an_uplink() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let _world = World::join(node)?;
        ip(node.space(), "link set up0 mtu 1400")?;
        ip(node.space(), "link add wide0 mtu 1380 type veth peer name wide1")?;
        ip(node.space(), "link set wide0 up")?;
        ip(node.space(), "link set wide1 up")?;
        // The kernel tells the object alone then.
        node.space().run(|| std::fs::write("/proc/sys/net/ipv4/nexthop_compat_mode", "0"))??;
        ip(node.space(), &format!("nexthop add id 7 via {} dev up0", WORLD[0]))?;
        ip(node.space(), "route add default nhid 7")?;
        await_mtu(node, "1400 (uplink up0)")?;
        ip(node.space(), "nexthop add id 8 dev wide0")?;
        ip(node.space(), "nexthop add id 9 group 7/8")?;
        ip(node.space(), "route replace default nhid 9")?;
        await_mtu(node, "1380 (uplink wide0)")?;
        // The node's own links get it right after the status tells it.
        wait::until("the node's links have it", || Ok(node.audit()?.findings.is_empty().then_some(())))?;
        ip(node.space(), "link del wide0")?;
        Ok(())
    })
}

/// What a socket of the container learns about the way to `to`, by sending packets that may not be cut until none is
/// too big.
fn path_mtu(from: &Space, to: SocketAddr, expected: i32) -> Result<()> {
    let socket = echo::udp_client(from, to)?;
    refuse_to_cut(&socket)?;
    let headers = if to.is_ipv4() { 28 } else { 48 };
    let known = || if to.is_ipv4() { getsockopt(&socket, sockopt::IpMtu) } else { ipv6_mtu(&socket) };
    wait::until_equal(&format!("{to} tells its MTU"), &expected, || {
        let mtu = known()?;
        let size = usize::try_from(mtu - headers)?;
        // Refused: the kernel has learnt a smaller MTU in between.
        socket.send(&vec![0; size]).ok();
        Ok(known()?)
    })
}

fn refuse_to_cut(socket: &UdpSocket) -> Result<()> {
    let (level, name) = match socket.local_addr()?.ip() {
        IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER),
        IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER),
    };
    // Both families give "do" the same number.
    let value = libc::IP_PMTUDISC_DO;
    // SAFETY: an open socket, and an int of its size.
    let done = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            (&raw const value).cast(),
            u32::try_from(size_of_val(&value))?,
        )
    };
    ensure!(done == 0, "{}", std::io::Error::last_os_error());
    Ok(())
}

fn ipv6_mtu(socket: &UdpSocket) -> nix::Result<i32> {
    let mut value = 0_i32;
    let mut length = libc::socklen_t::try_from(size_of_val(&value)).map_err(|_| nix::Error::EINVAL)?;
    // SAFETY: an open socket, and an int of its size.
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_IPV6,
            libc::IPV6_MTU,
            (&raw mut value).cast(),
            &raw mut length,
        )
    };
    nix::errno::Errno::result(done).map(|_| value)
}

#[test]
fn what_is_too_big_for_the_way_is_told_to_the_container() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let world = World::join(node)?;
        ip(node.space(), "link set up0 mtu 1400")?;
        default_routes(node)?;
        // A network beyond the world, by a router with a smaller MTU.
        let far = node.sandbox("far")?;
        ip(
            world.space()?,
            &format!("link add far0 mtu 1300 type veth peer name eth0 mtu 1300 netns {}", far.path().display()),
        )?;
        for (space, name, v4, v6) in [
            (world.space()?, "far0", "203.0.113.1/24", "2001:db8:8::1/64"),
            (far.space()?, "eth0", "203.0.113.2/24", "2001:db8:8::2/64"),
        ] {
            ip(space, &format!("addr add {v4} dev {name}"))?;
            ip(space, &format!("addr add {v6} dev {name} nodad"))?;
            ip(space, &format!("link set {name} up"))?;
        }
        world.space()?.run(|| -> Result<()> {
            std::fs::write("/proc/sys/net/ipv4/ip_forward", "1")?;
            Ok(std::fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1")?)
        })??;
        let inside = node.sandbox("inside")?;
        let end = node.attach_with(&inside, "eth0", &node.netconf().with("mtu", json!(1500)))?;
        let space = inside.space()?;
        for address in world.addresses() {
            path_mtu(space, world.echo().udp_at(address), 1400).context("the node answers")?;
        }
        for address in ["203.0.113.2:9", "[2001:db8:8::2]:9"] {
            path_mtu(space, address.parse()?, 1300).context("a router answers")?;
        }
        node.detach(&end)
    })
}
