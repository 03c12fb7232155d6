//! A network beyond the node: one more namespace, joined to the node's by one link or by a router, without a route back
//! to any container.

use std::net::IpAddr;

use anyhow::{Context, Result};

use crate::{echo::EchoServer, node::Node, process::ip, sandbox::Sandbox, space::Space};

/// The node's addresses on the link, IPv4 first.
pub const NODE: [&str; 2] = ["198.51.100.1", "2001:db8:7::1"];
/// The world's addresses on the link.
pub const WORLD: [&str; 2] = ["198.51.100.2", "2001:db8:7::2"];

/// The router's addresses toward the node, where there is one.
pub const ROUTER: [&str; 2] = ["198.51.100.254", "2001:db8:7::fe"];
/// The router's addresses toward the world.
const BEYOND: [&str; 2] = ["203.0.113.1", "2001:db8:9::1"];
/// The world's addresses behind the router.
const WORLD_BEYOND: [&str; 2] = ["203.0.113.2", "2001:db8:9::2"];

/// The network, with an echo server in it.
#[derive(Debug)]
pub struct World {
    sandbox: Sandbox,
    /// Between the node and it.
    router: Option<Sandbox>,
    addresses: [IpAddr; 2],
    echo: EchoServer,
}

impl World {
    /// Joins a world to the node, by the node's interface `up0`.
    ///
    /// # Errors
    /// When the link or the server cannot be made.
    pub fn join(node: &Node) -> Result<Self> {
        let sandbox = node.sandbox("world")?;
        link((node.space(), "up0", NODE), (&sandbox, "eth0", WORLD))?;
        Self::new(sandbox, None, WORLD)
    }

    /// Joins a world behind a router, whose link to it has this MTU, bytes.
    ///
    /// # Errors
    /// When links, routes or the server cannot be made.
    pub fn behind_router(node: &Node, mtu: u32) -> Result<Self> {
        let (router, sandbox) = (node.sandbox("router")?, node.sandbox("world")?);
        link((node.space(), "up0", NODE), (&router, "eth0", ROUTER))?;
        link((router.space()?, "eth1", BEYOND), (&sandbox, "eth0", WORLD_BEYOND))?;
        ip(router.space()?, &format!("link set eth1 mtu {mtu}"))?;
        ip(sandbox.space()?, &format!("link set eth0 mtu {mtu}"))?;
        for (space, [v4, v6]) in [(node.space(), ROUTER), (sandbox.space()?, BEYOND)] {
            ip(space, &format!("route add default via {v4}"))?;
            ip(space, &format!("-6 route add default via {v6}"))?;
        }
        // Errors that a limit of the rate holds back would look like errors that are lost.
        for space in [node.space(), router.space()?, sandbox.space()?] {
            set(space, "ipv4/icmp_ratelimit", "0")?;
            set(space, "ipv6/icmp/ratelimit", "0")?;
        }
        set(router.space()?, "ipv4/ip_forward", "1")?;
        set(router.space()?, "ipv6/conf/all/forwarding", "1")?;
        Self::new(sandbox, Some(router), WORLD_BEYOND)
    }

    fn new(sandbox: Sandbox, router: Option<Sandbox>, [v4, v6]: [&str; 2]) -> Result<Self> {
        let echo = EchoServer::start(sandbox.space()?)?;
        Ok(Self { sandbox, router, addresses: [v4.parse()?, v6.parse()?], echo })
    }

    /// The router between, where there is one.
    #[must_use]
    pub fn router(&self) -> Option<&Sandbox> {
        self.router.as_ref()
    }

    /// Its addresses, IPv4 first.
    #[must_use]
    pub fn addresses(&self) -> [IpAddr; 2] {
        self.addresses
    }

    #[must_use]
    pub fn echo(&self) -> &EchoServer {
        &self.echo
    }

    /// Its namespace.
    ///
    /// # Errors
    /// When it is gone.
    pub fn space(&self) -> Result<&Space> {
        self.sandbox.space()
    }
}

/// Joins two namespaces by a link, with addresses of both families.
fn link(near: (&Space, &str, [&str; 2]), far: (&Sandbox, &str, [&str; 2])) -> Result<()> {
    let (space, name, _) = near;
    ip(space, &format!("link add {name} type veth peer name {} netns {}", far.1, far.0.path().display()))?;
    for (space, name, [v4, v6]) in [near, (far.0.space()?, far.1, far.2)] {
        ip(space, &format!("addr add {v4}/24 dev {name}"))?;
        ip(space, &format!("addr add {v6}/64 dev {name} nodad"))?;
        ip(space, &format!("link set {name} up"))?;
        ip(space, "link set lo up")?;
    }
    Ok(())
}

/// Sets a setting (`sysctl`) of a namespace that this harness made.
fn set(space: &Space, path: &str, value: &str) -> Result<()> {
    space.run(|| std::fs::write(format!("/proc/sys/net/{path}"), value))?.with_context(|| format!("set {path}"))
}
