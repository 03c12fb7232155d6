//! Two containers, joined in each of the ways that are compared.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr},
};

use anyhow::{Context, Result, bail};
use aya::{
    Ebpf, EbpfLoader,
    maps::{Map, MapData, ProgramArray},
    programs::{
        LinkOrder, SchedClassifier,
        tc::{NlOptions, TcAttachOptions, TcAttachType, qdisc_add_clsact},
    },
};

use nix::sys::signal::Signal;
use wharf_common::map::{self, NodeCall};

use super::{plugin, programs::object};
use crate::{Node, NodeConfig, Sandbox, cluster::Nodes, process::ip, scratch, space::Space, wait};

/// The direct veth pair: what ratios are taken to.
pub const DIRECT: &str = "direct veth pair";
/// Two endpoints of a Wharf node, in each attach mode.
pub const WHARF: [&str; 2] = ["wharf, clsact", "wharf, tcx"];
/// Two endpoints of a Wharf node (clsact) whose flows are not tracked.
pub const UNTRACKED: &str = "wharf, clsact, untracked";
/// Two containers with the least program in place of Wharf's, in each attach mode.
pub const FLOOR: [&str; 2] = ["floor, clsact", "floor, tcx"];

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
    Space {
        _held: Space,
    },
    Programs {
        _held: Space,
        _programs: Vec<Ebpf>,
    },
    Agent(Box<Node>),
    Agents(Box<Nodes>),
    /// Without agents.
    Nodes {
        _held: Box<Nodes>,
    },
    /// Its agent is stopped: it would put another program's place right.
    Stopped(Box<Node>),
}

impl Wire {
    /// All of them: direct pair, Wharf and its floor in each attach mode that the kernel has, Wharf without tracking,
    /// routing, bridge.
    ///
    /// # Errors
    /// When one cannot be made.
    pub fn all(agent: &NodeConfig) -> Result<Vec<Self>> {
        let mut all = vec![Self::direct()?];
        let modes = if has_tcx() { &[false, true][..] } else { &[false] };
        for tcx in modes {
            all.extend([Self::wharf(agent, *tcx)?, Self::floor(*tcx)?]);
        }
        all.push(Self::untracked(agent)?);
        all.extend([Self::routed()?, Self::bridged()?]);
        Ok(all)
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
        let mut node = match self.between {
            Between::Agent(node) => node,
            Between::Stopped(node) => {
                node.signal_agent(Signal::SIGCONT)?;
                wait::until("the agent to put its own program back", || {
                    Ok(node.audit()?.findings.is_empty().then_some(()))
                })?;
                node
            }
            Between::Agents(joined) => {
                joined.nodes.iter().try_for_each(delete_endpoints)?;
                return joined.end();
            }
            _ => return Ok(()),
        };
        delete_endpoints(&node)?;
        node.finish()
    }

    /// A container on each of two nodes, which have agents or the kernel's own ways. `address`: of the second.
    #[must_use]
    pub(super) fn of_nodes(
        name: &'static str,
        [left, right]: [Sandbox; 2],
        address: IpAddr,
        nodes: Nodes,
        agents: bool,
    ) -> Self {
        let nodes = Box::new(nodes);
        let between = if agents { Between::Agents(nodes) } else { Between::Nodes { _held: nodes } };
        Self { name, left, right, address, between }
    }

    /// Two endpoints of a Wharf node (clsact): left with the label `app: client`, right with `app: server`.
    ///
    /// # Errors
    /// When the node cannot be made.
    pub fn labelled(name: &'static str, agent: &NodeConfig) -> Result<Self> {
        let node = Node::start(agent.clone())?;
        let (left, right) = (node.sandbox("left")?, node.sandbox("right")?);
        let attach = |sandbox, app| node.attach_with(sandbox, "eth0", &node.netconf().with("args", plugin::label(app)));
        attach(&left, "client")?;
        let address = attach(&right, "server")?.v4()?.into();
        Ok(Self { name, left, right, address, between: Between::Agent(Box::new(node)) })
    }

    /// Wharf's node, where its agent runs.
    #[must_use]
    pub fn node(&self) -> Option<&Node> {
        match &self.between {
            Between::Agent(node) => Some(node),
            _ => None,
        }
    }

    /// The same, to stop its agent and start it again.
    #[must_use]
    pub fn node_mut(&mut self) -> Option<&mut Node> {
        match &mut self.between {
            Between::Agent(node) => Some(node),
            _ => None,
        }
    }

    /// Two containers with one veth pair between them.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn direct() -> Result<Self> {
        let (left, right) = containers()?;
        ip(left.space()?, &format!("link add eth0 type veth peer name eth0 netns {}", right.path().display()))?;
        for (sandbox, address) in [(&left, "10.203.0.1/24"), (&right, "10.203.0.2/24")] {
            configure(sandbox, address, None)?;
        }
        let address = Ipv4Addr::new(10, 203, 0, 2).into();
        Ok(Self { name: DIRECT, left, right, address, between: Between::Nothing })
    }

    fn wharf(agent: &NodeConfig, tcx: bool) -> Result<Self> {
        let mode = if tcx { "tcx" } else { "clsact" };
        let mut agent = agent.clone();
        agent.flags.retain(|flag| !flag.starts_with("--attach-mode="));
        let node = Node::start(agent.flags(&[&format!("--attach-mode={mode}")]))?;
        let (left, right) = (node.sandbox("left")?, node.sandbox("right")?);
        node.attach(&left)?;
        let address = node.attach(&right)?.v4()?.into();
        let name = if tcx { WHARF[1] } else { WHARF[0] };
        Ok(Self { name, left, right, address, between: Between::Agent(Box::new(node)) })
    }

    fn untracked(agent: &NodeConfig) -> Result<Self> {
        let wire = Self::wharf(agent, false)?;
        let Between::Agent(node) = wire.between else { bail!("a wire of Wharf's without an agent") };
        node.signal_agent(Signal::SIGSTOP)?;
        let pins = node.dirs().endpoint_pins();
        let shared = pins.parent().context("the directory of the pins")?.join("shared");
        let mut loader = EbpfLoader::new();
        for name in [map::CALLS, map::NODE_CALLS, map::PROFILES, map::ENDPOINTS] {
            loader.map_pin_path(name, shared.join(name));
        }
        let mut loaded = loader.load(&object("untracked.o")?).context("load untracked.o")?;
        let slots = Map::ProgramArray(MapData::from_pin(shared.join(map::NODE_CALLS)).context("open NODE_CALLS")?);
        let mut slots: ProgramArray<MapData> = slots.try_into()?;
        let name = NodeCall::Judge.program();
        let program: &mut SchedClassifier = loaded.program_mut(name).context(name)?.try_into()?;
        program.load().with_context(|| format!("verify {name} of untracked.o"))?;
        for slot in [NodeCall::Judge, NodeCall::Established] {
            slots.set(slot as u32, program.fd()?, 0).with_context(|| format!("set the slot of {name}"))?;
        }
        Ok(Self { name: UNTRACKED, between: Between::Stopped(node), ..wire })
    }

    /// A node whose host sides have programs that hand each packet to the other container.
    fn floor(tcx: bool) -> Result<Self> {
        let (node, (left, right)) = (Space::create()?, containers()?);
        let sides = [("left0", &left, "10.207.0.1"), ("right0", &right, "10.207.0.2")];
        for (link, sandbox, address) in sides {
            plug(&node, link, sandbox)?;
            configure(sandbox, &format!("{address}/24"), None)?;
        }
        // Frames go to the host side's own MAC address, as with Wharf: else the receiver's stack would take the packet
        // for another host's.
        for ((link, sandbox, _), (.., other)) in sides.iter().zip(sides.iter().rev()) {
            let mac = link_mac(&node, link)?;
            ip(sandbox.space()?, &format!("neigh replace {other} lladdr {mac} nud permanent dev eth0"))?;
        }
        let programs = node.run(|| {
            let pairs = [("left0", "right0"), ("right0", "left0")];
            pairs.into_iter().map(|(link, receiver)| hand_over(link, receiver, tcx)).collect::<Result<Vec<_>>>()
        })??;
        let name = if tcx { FLOOR[1] } else { FLOOR[0] };
        let address = Ipv4Addr::new(10, 207, 0, 2).into();
        Ok(Self { name, left, right, address, between: Between::Programs { _held: node, _programs: programs } })
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

fn delete_endpoints(node: &Node) -> Result<()> {
    for endpoint in node.endpoints()? {
        let id = endpoint.id.to_string();
        node.ask(async |client| client.delete_endpoint(&id, &wharf_api::DeleteQuery::default()).await)?;
    }
    Ok(())
}

/// Whether the kernel has tcx; else it does not know the question.
fn has_tcx() -> bool {
    SchedClassifier::query_tcx("lo", TcAttachType::Ingress).is_ok()
}

/// Attaches a program to the ingress hook of `link` that hands each packet to the container behind `receiver`. Both are
/// in the caller's namespace. The program is attached for as long as the result lives.
fn hand_over(link: &str, receiver: &str, tcx: bool) -> Result<Ebpf> {
    let receiver = nix::net::if_::if_nametoindex(receiver).context("find the receiver's host side")?;
    let mut loader = EbpfLoader::new();
    loader.override_global("RECEIVER", &receiver, true);
    let mut loaded = loader.load(&object("floor.o")?).context("load floor.o")?;
    let program: &mut SchedClassifier = loaded.program_mut("floor").context("floor")?.try_into()?;
    program.load().context("verify floor")?;
    let options = if tcx {
        TcAttachOptions::TcxOrder(LinkOrder::default())
    } else {
        qdisc_add_clsact(link).context("add clsact")?;
        TcAttachOptions::Netlink(NlOptions::default())
    };
    program.attach_with_options(link, TcAttachType::Ingress, options).context("attach floor")?;
    Ok(loaded)
}

/// MAC address of a link of the node.
fn link_mac(node: &Space, link: &str) -> Result<String> {
    let shown: serde_json::Value =
        serde_json::from_str(&ip(node, &format!("-j link show {link}"))?).context("read ip's answer")?;
    let mac = shown.pointer("/0/address").and_then(serde_json::Value::as_str);
    Ok(mac.context("a link without a MAC address")?.to_owned())
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
