//! A network beyond the node: one more namespace, joined to the node's by one link, without a route back to any container.

use std::net::IpAddr;

use anyhow::Result;

use crate::{echo::EchoServer, node::Node, process::ip, sandbox::Sandbox, space::Space};

/// The node's addresses on the link, IPv4 first.
pub const NODE: [&str; 2] = ["198.51.100.1", "2001:db8:7::1"];
/// The world's addresses on the link.
pub const WORLD: [&str; 2] = ["198.51.100.2", "2001:db8:7::2"];

/// The network, with an echo server in it.
#[derive(Debug)]
pub struct World {
    sandbox: Sandbox,
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
        ip(node.space(), &format!("link add up0 type veth peer name eth0 netns {}", sandbox.path().display()))?;
        for (space, name, [v4, v6]) in [(node.space(), "up0", NODE), (sandbox.space()?, "eth0", WORLD)] {
            ip(space, &format!("addr add {v4}/24 dev {name}"))?;
            ip(space, &format!("addr add {v6}/64 dev {name} nodad"))?;
            ip(space, &format!("link set {name} up"))?;
            ip(space, "link set lo up")?;
        }
        let echo = EchoServer::start(sandbox.space()?)?;
        Ok(Self { sandbox, addresses: [WORLD[0].parse()?, WORLD[1].parse()?], echo })
    }

    /// Its addresses, IPv4 first.
    #[must_use]
    pub fn addresses(&self) -> [IpAddr; 2] {
        self.addresses
    }

    /// Its echo server.
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
