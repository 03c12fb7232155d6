//! Histories of the cluster's nodes. After each step, the kernel has exactly the routes, the unreachable routes and the
//! overlay that follow from the rows, the mode of routing, this node's networks and the verdicts on direct paths.

use std::{fmt::Write as _, fs, time::Duration};

use proptest::{prelude::*, sample::Index};
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest};
use wharf_cluster::{
    file,
    nodes::Nodes,
    paths::{Detours, Probed, Verdicts},
    routes::{self, Destination, Routing},
};
use wharf_core::{
    kernel::{NextHop, NodeKernel as _, OverlaySpec},
    overlap::{NodeNetwork, Way},
};
use wharf_datapath::fake::Peers;

use crate::support::{Agent, Machine, life::Life};

/// This node, as the machine names it.
const OWN: &str = "test";
const OTHERS: [&str; 3] = ["b", "c", "d"];
/// Networks of containers; network 0 overlaps the machine's pools.
const NETWORKS: usize = 4;
/// More changes of the kernel than most steps make.
const CHANGES: usize = 12;
/// Interval after which the agent compares this node's networks again.
const PLANS: Duration = Duration::from_secs(10);

/// Another node in the cluster file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    /// Its addresses are in a network of this node's link.
    near: bool,
    /// Which of its two pairs of addresses it has.
    moved: bool,
    /// Number of its network. Of two nodes with the same number, the first one has it.
    network: usize,
    has_routers: bool,
}

/// An object that another program removes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Object {
    Route(Index),
    Unreachable(Index),
    Device,
}

/// A step of a history. `killed`: the agent is killed when the kernel has this number of the changes.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    /// The cluster file changes.
    Rows { shapes: [Option<Shape>; 3], killed: Option<usize> },
    /// The cluster file is half-written.
    Torn,
    /// The networks of this node's link appear or disappear.
    Link(bool),
    /// Rounds of probes of the direct paths to a node.
    Probes { node: usize, answers: bool, rounds: usize },
    /// Another program removes an object.
    Removed(Object),
    /// The agent starts with these settings.
    Restart { routing: Routing, port: u16, is_graceful: bool, killed: Option<usize> },
}

/// Each step may follow each other one.
#[derive(Debug, Clone)]
pub(crate) struct Any;

pub(crate) struct NodeHistories;

fn shape() -> impl Strategy<Value = Shape> {
    (prop::bool::weighted(0.7), any::<bool>(), 0..NETWORKS, prop::bool::weighted(0.8))
        .prop_map(|(near, moved, network, has_routers)| Shape { near, moved, network, has_routers })
}

fn killed() -> impl Strategy<Value = Option<usize>> {
    prop::option::weighted(0.4, 0..CHANGES)
}

impl ReferenceStateMachine for NodeHistories {
    type State = Any;
    type Transition = Step;

    fn init_state() -> BoxedStrategy<Any> {
        Just(Any).boxed()
    }

    fn transitions(_: &Any) -> BoxedStrategy<Step> {
        let routing =
            prop::sample::select(vec![Routing::Auto, Routing::Auto, Routing::Auto, Routing::Native, Routing::Overlay]);
        let object = prop_oneof![
            2 => any::<Index>().prop_map(Object::Route),
            2 => any::<Index>().prop_map(Object::Unreachable),
            1 => Just(Object::Device),
        ];
        prop_oneof![
            6 => (prop::array::uniform3(prop::option::weighted(0.8, shape())), killed())
                .prop_map(|(shapes, killed)| Step::Rows { shapes, killed }),
            1 => Just(Step::Torn),
            1 => any::<bool>().prop_map(Step::Link),
            4 => (0..OTHERS.len(), prop::bool::weighted(0.3), 1..8_usize)
                .prop_map(|(node, answers, rounds)| Step::Probes { node, answers, rounds }),
            2 => object.prop_map(Step::Removed),
            2 => (routing, prop::sample::select(vec![4_789_u16, 4_790]), any::<bool>(), killed())
                .prop_map(|(routing, port, is_graceful, killed)|
                    Step::Restart { routing, port, is_graceful, killed }),
        ]
        .boxed()
    }

    fn apply(state: Any, _: &Step) -> Any {
        state
    }
}

/// The cluster file. Names, addresses and networks are those of one node each.
fn text(shapes: &[Option<Shape>; 3]) -> String {
    let mut text = format!("[[node]]\nname = {OWN:?}\naddresses = [\"192.0.2.1\", \"2001:db8::1\"]\n");
    let mut taken = Vec::new();
    for (i, (name, shape)) in OTHERS.iter().zip(shapes).enumerate() {
        let Some(Shape { near, moved, network, has_routers }) = *shape else { continue };
        let n = 10 + 2 * i + usize::from(moved);
        let (v4, v6) = if near { ("192.0.2", "2001:db8:") } else { ("198.51.100", "2001:db8:9:") };
        let addresses = [format!("{v4}.{n}"), format!("{v6}:{n}")];
        let (mut cidrs, mut routers) = (Vec::new(), Vec::new());
        if !taken.contains(&network) {
            taken.push(network);
            cidrs = match network {
                0 => ["10.88.0.0/16", "fd88::/48"].map(str::to_owned).to_vec(),
                n => vec![format!("10.{n}.0.0/24"), format!("fd00:{n}::/64")],
            };
            if has_routers && network > 0 {
                routers = vec![format!("10.{network}.0.1"), format!("fd00:{network}::1")];
            }
        }
        writeln!(text, "[[node]]\nname = {name:?}\naddresses = {addresses:?}").expect("text");
        writeln!(text, "pod-cidrs = {cidrs:?}\nrouter-addresses = {routers:?}").expect("text");
    }
    text
}

/// This node's addresses and, if its link is up, their networks.
fn networks(up: bool) -> Vec<NodeNetwork> {
    let network = |net: &str, way: &Way| NodeNetwork {
        net: net.parse().expect("network"),
        way: way.clone(),
        ifname: Some("up0".to_owned()),
    };
    let on_link = Way::OnLink { by_kernel: true, point_to_point: false };
    let addresses = ["192.0.2.1/32", "2001:db8::1/128"].map(|net| network(net, &Way::Address));
    let on_link = ["192.0.2.0/24", "2001:db8::/64"].map(|net| network(net, &on_link));
    addresses.into_iter().chain(on_link.into_iter().filter(|_| up)).collect()
}

/// The machine, the agent that runs on it, and what routes follow from.
pub(crate) struct NodesPlay {
    machine: Machine,
    life: Option<Life>,
    nodes: Nodes,
    networks: Vec<NodeNetwork>,
    /// Of this agent.
    verdicts: Verdicts,
}

impl StateMachineTest for NodesPlay {
    type SystemUnderTest = Self;
    type Reference = NodeHistories;

    fn init_test(_: &Any) -> Self {
        let mut machine = Machine::in_memory();
        machine.config.cluster_file = Some(machine.config.run_dir.join("nodes.toml"));
        let networks = networks(true);
        machine.kernel.set_networks(networks.clone());
        let mut play = Self { machine, life: None, nodes: Nodes::default(), networks, verdicts: Verdicts::default() };
        play.write(&[None; 3]);
        play.start();
        play.check();
        play
    }

    fn apply(mut play: Self, _: &Any, step: Step) -> Self {
        play.play(step);
        play.life().run(follow(&play.life().agent));
        play.check();
        play
    }

    fn teardown(mut play: Self, _: Any) {
        play.life.take().expect("an agent runs").kill();
    }
}

/// As the controllers `cluster` and `node-datapath` do.
async fn follow(agent: &Agent) {
    // The first look sees another text, and the second one takes it.
    for _ in 0..2 {
        agent.life.network.follow_cluster().await.expect("the nodes are in force");
    }
    agent.life.network.ensure_node().await.expect("the node's objects");
}

impl NodesPlay {
    fn life(&self) -> &Life {
        self.life.as_ref().expect("an agent runs")
    }

    fn write(&mut self, shapes: &[Option<Shape>; 3]) {
        let text = text(shapes);
        self.nodes = file::parse(&text).unwrap_or_else(|why| panic!("{why}:\n{text}"));
        self.write_text(&text);
    }

    fn write_text(&self, text: &str) {
        let file = self.machine.config.cluster_file.as_ref().expect("the setting");
        fs::write(file, text).expect("written");
    }

    fn start(&mut self) {
        self.life = Some(self.machine.start().expect("agent starts"));
        self.verdicts = Verdicts::default();
    }

    fn play(&mut self, step: Step) {
        match step {
            Step::Rows { shapes, killed } => {
                self.write(&shapes);
                if let Some(changes) = killed {
                    self.follow_and_kill(changes);
                }
            }
            Step::Torn => self.write_text("[[node"),
            Step::Link(up) => {
                self.networks = networks(up);
                self.machine.kernel.set_networks(self.networks.clone());
                self.life().run(async {
                    tokio::time::pause();
                    tokio::time::advance(PLANS).await;
                    tokio::time::resume();
                });
            }
            Step::Probes { node, answers, rounds } => {
                for _ in 0..rounds {
                    self.probe(OTHERS[node], answers);
                    self.check();
                }
            }
            Step::Removed(object) => self.machine.kernel.change_peers_behind_the_back(|peers| remove(peers, object)),
            Step::Restart { routing, port, is_graceful, killed } => {
                let life = self.life.take().expect("an agent runs");
                if is_graceful {
                    life.stop();
                } else {
                    life.kill();
                }
                (self.machine.config.routing, self.machine.config.overlay_port) = (routing, port);
                if let Some(changes) = killed {
                    let hold = self.machine.kernel.hold_node(changes);
                    self.machine.start_and_kill_at(&hold).expect("agent starts");
                    hold.release();
                }
                self.start();
            }
        }
    }

    /// Kills the agent when the kernel has so many of the changes, and starts another. An agent that makes fewer
    /// changes stays.
    fn follow_and_kill(&mut self, changes: usize) {
        let hold = self.machine.kernel.hold_node(changes);
        let life = self.life();
        let reached = life.run(async {
            tokio::select! {
                biased;
                () = hold.reached() => true,
                () = follow(&life.agent) => false,
            }
        });
        if reached {
            self.life.take().expect("an agent runs").kill();
        }
        hold.release();
        if reached {
            self.start();
        }
    }

    /// A round of probes of the open paths to a node. Its next hop answers; `answers`: its router address, too.
    fn probe(&mut self, node: &str, answers: bool) {
        let agent = &self.life().agent;
        if !agent.life.network.cluster.probes_paths() {
            return;
        }
        let probed = self.life().run(async {
            let open = agent.life.network.cluster.open_paths(&agent.life.network.routers()).await;
            let probed: Vec<Probed> = open
                .into_iter()
                .filter(|path| path.node == node)
                .map(|path| Probed { path, router: Some(answers), hop: Some(true) })
                .collect();
            agent.life.network.cluster.judge_paths(&probed).await;
            follow(agent).await;
            probed
        });
        self.verdicts.judge(&self.nodes, &probed);
    }

    /// What the kernel must have.
    fn expected(&mut self) -> Peers {
        let own = self.nodes.get(OWN).expect("this node's row").addresses.clone();
        self.verdicts.follow(&self.nodes, &own);
        let config = &self.machine.config;
        let with = |detours: &Detours| {
            routes::destinations(&self.nodes, OWN, config.routing, detours, &config.pools, &[], &self.networks)
        };
        let (destinations, on_trial) = (with(&self.verdicts.detours()), self.verdicts.trials());
        let trials = Verdicts::trial_routes(&self.nodes, &on_trial, &with(&on_trial));
        let all = [routes::routes(&destinations), trials].concat();
        let nodes = routes::overlay(&self.nodes, OWN, config.routing, &destinations);
        let is_over_ipv6 = |to: &Destination| matches!(to.via, Ok(NextHop::Overlay { remote, .. }) if remote.is_ipv6());
        let mtu = OverlaySpec::mtu_within(self.life().agent.life.network.mtu(), destinations.iter().any(is_over_ipv6));
        let (vni, port) = (config.overlay_vni, config.overlay_port);
        Peers {
            routes: all.iter().map(|route| (route.to, route.via)).collect(),
            unreachable: all.iter().map(|route| route.to).collect(),
            device: nodes.as_ref().map(|_| OverlaySpec { vni, port, mtu, nodes: Vec::new() }),
            rows: nodes.into_iter().flatten().map(|node| (node.name.clone(), node)).collect(),
        }
    }

    fn check(&mut self) {
        let expected = self.expected();
        assert_eq!(self.machine.kernel.peers(), expected, "{:?}", self.nodes);
        let life = self.life();
        let spec = life.agent.life.network.spec();
        assert_eq!(life.run(self.machine.kernel.observe_node(&spec)).expect("observed"), []);
    }
}

fn remove(peers: &mut Peers, object: Object) {
    match object {
        Object::Route(index) if !peers.routes.is_empty() => {
            let to = peers.routes.keys().nth(index.index(peers.routes.len())).copied();
            to.and_then(|to| peers.routes.remove(&to)).expect("a route");
        }
        Object::Unreachable(index) if !peers.unreachable.is_empty() => {
            let to = peers.unreachable.iter().nth(index.index(peers.unreachable.len())).copied();
            assert!(to.is_some_and(|to| peers.unreachable.remove(&to)), "an unreachable route");
        }
        Object::Device => peers.remove_device(),
        Object::Route(_) | Object::Unreachable(_) => {}
    }
}
