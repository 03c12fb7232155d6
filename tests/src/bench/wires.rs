//! Two containers, joined in each of the ways that are compared.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr},
};

use anyhow::{Context, Result};

use crate::{Node, NodeConfig, Sandbox, process::ip, scratch, space::Space};

/// The direct veth pair: what ratios are taken to.
pub const DIRECT: &str = "direct veth pair";
/// Two endpoints of a Wharf node.
pub const WHARF: &str = "wharf";

/// Two containers and what joins them.
#[derive(Debug)]
pub struct Wire {
    name: &'static str,
    left: Sandbox,
    right: Sandbox,
    /// Address of the right one.
    address: IpAddr,
    between: Between,
}

/// What lies between the containers; it must live as long as they talk.
#[derive(Debug)]
enum Between {
    Nothing,
    Space { _held: Space },
    Agent(Box<Node>),
}

impl Wire {
    /// All of them: direct pair, Wharf, routing, bridge.
    ///
    /// # Errors
    /// When one cannot be made.
    pub fn all(agent: &NodeConfig) -> Result<Vec<Self>> {
        Ok(vec![Self::direct()?, Self::wharf(agent)?, Self::routed()?, Self::bridged()?])
    }

    /// Name in the tables.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Address of the right container.
    #[must_use]
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// The one that asks and sends.
    ///
    /// # Errors
    /// Never, while the wire lives.
    pub fn left(&self) -> Result<&Space> {
        self.left.space()
    }

    /// The one that answers and receives.
    ///
    /// # Errors
    /// Never, while the wire lives.
    pub fn right(&self) -> Result<&Space> {
        self.right.space()
    }

    /// The end: Wharf's node must be clean.
    ///
    /// # Errors
    /// When something was left behind.
    pub fn finish(self) -> Result<()> {
        let Between::Agent(mut node) = self.between else { return Ok(()) };
        for endpoint in node.endpoints()? {
            let id = endpoint.id.to_string();
            node.ask(async |client| client.delete_endpoint(&id, &wharf_api::DeleteQuery::default()).await)?;
        }
        node.finish()
    }

    fn direct() -> Result<Self> {
        let (left, right) = containers()?;
        ip(left.space()?, &format!("link add eth0 type veth peer name eth0 netns {}", right.path().display()))?;
        for (sandbox, address) in [(&left, "10.203.0.1/24"), (&right, "10.203.0.2/24")] {
            configure(sandbox, address, None)?;
        }
        let address = Ipv4Addr::new(10, 203, 0, 2).into();
        Ok(Self { name: DIRECT, left, right, address, between: Between::Nothing })
    }

    fn wharf(agent: &NodeConfig) -> Result<Self> {
        let node = Node::start(agent.clone())?;
        let (left, right) = (node.sandbox("left")?, node.sandbox("right")?);
        node.attach(&left)?;
        let address = node.attach(&right)?.v4()?.into();
        Ok(Self { name: WHARF, left, right, address, between: Between::Agent(Box::new(node)) })
    }

    /// A node that forwards between two veth pairs, as `ptp` leaves it.
    fn routed() -> Result<Self> {
        let (node, (left, right)) = (Space::create()?, containers()?);
        for (link, sandbox, subnet) in [("left0", &left, "10.204.0"), ("right0", &right, "10.205.0")] {
            plug(&node, link, sandbox)?;
            ip(&node, &format!("addr add {subnet}.1/24 dev {link}"))?;
            configure(sandbox, &format!("{subnet}.2/24"), Some(&format!("{subnet}.1")))?;
        }
        // This file is the namespace's of whoever opens it.
        node.run(|| fs::write("/proc/sys/net/ipv4/ip_forward", "1"))?.context("let the node forward")?;
        let address = Ipv4Addr::new(10, 205, 0, 2).into();
        Ok(Self { name: "plain routing", left, right, address, between: Between::Space { _held: node } })
    }

    /// A node with a Linux bridge that holds two veth pairs, as `bridge` leaves it.
    fn bridged() -> Result<Self> {
        let (node, (left, right)) = (Space::create()?, containers()?);
        ip(&node, "link add bench0 type bridge")?;
        ip(&node, "link set bench0 up")?;
        for (link, sandbox, address) in [("left0", &left, "10.206.0.1/24"), ("right0", &right, "10.206.0.2/24")] {
            plug(&node, link, sandbox)?;
            ip(&node, &format!("link set {link} master bench0"))?;
            configure(sandbox, address, None)?;
        }
        let address = Ipv4Addr::new(10, 206, 0, 2).into();
        Ok(Self { name: "linux bridge", left, right, address, between: Between::Space { _held: node } })
    }
}

fn containers() -> Result<(Sandbox, Sandbox)> {
    let dir = scratch::fresh_dir("wire")?;
    Ok((Sandbox::create(&dir, "left")?, Sandbox::create(&dir, "right")?))
}

/// A veth pair from the node to the container's `eth0`.
fn plug(node: &Space, link: &str, sandbox: &Sandbox) -> Result<()> {
    ip(node, &format!("link add {link} type veth peer name eth0 netns {}", sandbox.path().display()))?;
    ip(node, &format!("link set {link} up"))?;
    Ok(())
}

fn configure(sandbox: &Sandbox, address: &str, gateway: Option<&str>) -> Result<()> {
    let space = sandbox.space()?;
    ip(space, &format!("addr add {address} dev eth0"))?;
    ip(space, "link set eth0 up")?;
    if let Some(gateway) = gateway {
        ip(space, &format!("route add default via {gateway}"))?;
    }
    Ok(())
}
