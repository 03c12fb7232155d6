//! Nodes that follow one cluster file: some on one switch, others on a second one behind a router.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    path::PathBuf,
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use wharf_api::HealthState;
use wharf_feed::v1;

use crate::{
    attached::Attached,
    echo::EchoServer,
    feed::{self, Producer},
    node::{Node, NodeConfig},
    process::{Finished, bin, ip, run},
    sandbox::Sandbox,
    scratch,
    space::Space,
    wait,
};

/// Names of the nodes, by number.
pub const NAMES: [&str; 6] = ["a", "b", "c", "d", "e", "f"];
/// Number of the first node behind the router.
pub const FAR: usize = 2;
/// Nodes of a cluster with one node behind the router.
pub const THREE: usize = FAR + 1;
/// Interface of the overlay.
pub const DEVICE: &str = "vxlan-wharf";
/// Without a health endpoint.
const NO_HEALTH: &str = "--health-interval-ms=0";
/// With one, and probes of the other nodes.
const HEALTH: &str = "--health-interval-ms=300";
/// Modes of `--routing`.
const MODES: [&str; 3] = ["auto", "native", "overlay"];

/// Node `n` is behind the router.
#[must_use]
pub fn is_far(n: usize) -> bool {
    [FAR, FAR + 2].contains(&n)
}

/// Address of node `n`: on the switch, or behind the router.
#[must_use]
pub fn address(n: usize, v6: bool) -> String {
    match (is_far(n), v6) {
        (true, false) => format!("203.0.113.{n}"),
        (true, true) => format!("2001:db8:9::{n}"),
        (false, false) => format!("198.51.100.{}", n + 1),
        (false, true) => format!("2001:db8:7::{}", n + 1),
    }
}

/// Network of the containers of node `n`.
#[must_use]
pub fn pool(n: usize, v6: bool) -> String {
    if v6 { format!("fd87:0:0:{}::/64", n + 1) } else { format!("10.87.{n}.0/24") }
}

/// A node in the file.
#[must_use]
pub fn row(name: &str, addresses: &[String], cidrs: &[String]) -> String {
    format!("[[node]]\nname = {name:?}\naddresses = {addresses:?}\npod-cidrs = {cidrs:?}\n\n")
}

/// Node `n` in the file.
#[must_use]
pub fn own_row(n: usize) -> String {
    row(NAMES[n], &[address(n, false), address(n, true)], &[pool(n, false), pool(n, true)])
}

/// Node `n` in the file, with addresses of another key.
#[must_use]
pub fn with(n: usize, key: &str, addresses: &[IpAddr]) -> String {
    format!("{}\n{key} = {}\n\n", own_row(n).trim_end(), list(addresses))
}

fn list(addresses: &[IpAddr]) -> String {
    let texts: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    format!("{texts:?}")
}

/// A container and its echo server.
#[derive(Debug)]
pub struct Container {
    sandbox: Sandbox,
    /// Its attachment.
    pub end: Attached,
    pub echo: EchoServer,
}

impl Container {
    /// Starts one with the label `app`, whose value is the container's name.
    ///
    /// # Errors
    /// ADD fails, or the server does not start.
    pub fn start(node: &Node, name: &str) -> Result<Self> {
        Self::start_with(node, name, json!({}))
    }

    /// As [`Self::start`], with these addresses.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_at(node: &Node, name: &str, addresses: &[&str]) -> Result<Self> {
        Self::start_with(node, name, json!({"ips": addresses}))
    }

    /// With more arguments of the plugin.
    fn start_with(node: &Node, name: &str, mut arguments: Value) -> Result<Self> {
        let sandbox = node.sandbox(name)?;
        arguments["labels"] = json!([{"key": "app", "value": name}]);
        let conf = node.netconf().with("args", json!({"cni": arguments}));
        let end = node.attach_with(&sandbox, "eth0", &conf)?;
        let echo = EchoServer::start(sandbox.space()?)?;
        Ok(Self { sandbox, end, echo })
    }

    /// Its namespace.
    ///
    /// # Errors
    /// The namespace is gone.
    pub fn space(&self) -> Result<&Space> {
        self.sandbox.space()
    }
}

/// Nodes that follow one file.
#[derive(Debug)]
pub struct Nodes {
    /// By number.
    pub nodes: Vec<Node>,
    /// The cluster file.
    pub file: PathBuf,
    switch: Sandbox,
}

impl Nodes {
    /// `count` nodes with their own rows and a mode of `--routing`; their agents do not run yet.
    ///
    /// # Errors
    /// A namespace, a link or an address cannot be made.
    pub fn join(count: usize, routing: &str) -> Result<Self> {
        let directory = scratch::fresh_dir("cluster")?;
        let file = directory.join("nodes.toml");
        let mut nodes = Vec::new();
        for (n, name) in NAMES.into_iter().enumerate().take(count) {
            let flags = vec![format!("--node-name={name}"), "--prepared-programs=4".to_owned()];
            let mut node = Node::without_agent(NodeConfig { flags, toml: None })?;
            set_pools(&mut node, n);
            node.set_flag(&format!("--cluster-file={}", file.display()), true);
            node.set_flag(NO_HEALTH, true);
            set_routing(&mut node, routing);
            nodes.push(node);
        }
        let switch = nodes.first().context("a cluster without nodes")?.sandbox("switch")?;
        for (bridge, v4, v6) in [("br0", "198.51.100.254", "2001:db8:7::fe"), ("br1", "203.0.113.1", "2001:db8:9::1")] {
            ip(switch.space()?, &format!("link add {bridge} type bridge"))?;
            ip(switch.space()?, &format!("link set {bridge} up"))?;
            ip(switch.space()?, &format!("addr add {v4}/24 dev {bridge}"))?;
            ip(switch.space()?, &format!("addr add {v6}/64 dev {bridge} nodad"))?;
        }
        for (n, node) in nodes.iter().enumerate() {
            let port = port(n);
            let to = switch.path().display().to_string();
            ip(node.space(), &format!("link add up0 type veth peer name {port} netns {to}"))?;
            let (bridge, gateway) = match is_far(n) {
                true => ("br1", ["203.0.113.1", "2001:db8:9::1"]),
                false => ("br0", ["198.51.100.254", "2001:db8:7::fe"]),
            };
            ip(node.space(), &format!("addr add {}/24 dev up0", address(n, false)))?;
            ip(node.space(), &format!("addr add {}/64 dev up0 nodad", address(n, true)))?;
            ip(node.space(), "link set up0 up")?;
            ip(node.space(), "link set lo up")?;
            ip(node.space(), &format!("route add default via {}", gateway[0]))?;
            ip(node.space(), &format!("-6 route add default via {}", gateway[1]))?;
            ip(switch.space()?, &format!("link set {port} master {bridge}"))?;
            ip(switch.space()?, &format!("link set {port} up"))?;
        }
        for setting in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
            switch.space()?.run(|| fs::write(format!("/proc/sys/net/{setting}"), "1"))?.context(setting)?;
        }
        let joined = Self { nodes, file, switch };
        joined.write(&(0..count).map(own_row).collect::<String>())?;
        Ok(joined)
    }

    /// As [`Self::join`], with running agents.
    ///
    /// # Errors
    /// As [`Self::join`], or an agent does not start.
    pub fn start(count: usize, routing: &str) -> Result<Self> {
        let mut joined = Self::join(count, routing)?;
        joined.nodes.iter_mut().try_for_each(Node::start_agent)?;
        Ok(joined)
    }

    /// Namespace of switches and router.
    ///
    /// # Errors
    /// The namespace is gone.
    pub fn switch(&self) -> Result<&Space> {
        self.switch.space()
    }

    /// Replaces the file, as an editor does.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, text: &str) -> Result<()> {
        let new = self.file.with_extension("new");
        fs::write(&new, text).context("write the cluster file")?;
        fs::rename(&new, &self.file).context("replace the cluster file")
    }

    /// From the next start of the agents on, each follows a producer ([`Feeds`]) in place of the file.
    pub fn set_feed(&mut self) {
        let file = format!("--cluster-file={}", self.file.display());
        for node in &mut self.nodes {
            let directory = feed_directory(node).display().to_string();
            node.set_flag(&file, false);
            node.set_flag(&format!("--cluster-feed={directory}"), true);
        }
    }

    /// Sets the health endpoint and the probes of other nodes for the next start of the agents.
    pub fn set_health(&mut self, on: bool) {
        for node in &mut self.nodes {
            node.set_flag(NO_HEALTH, !on);
            node.set_flag(HEALTH, on);
        }
    }

    /// The nodes' rows with the addresses of their health endpoints, which must be up, and of their routers.
    ///
    /// # Errors
    /// A health endpoint is not up in time.
    pub fn rows(&self) -> Result<String> {
        let mut text = String::new();
        for (n, node) in self.nodes.iter().enumerate() {
            let own = wait::until("a health endpoint", || {
                let report = node.ask(async |client| client.health().await)?;
                Ok(report.nodes.into_iter().find(|h| h.local && h.state == HealthState::Ok))
            })?;
            let status = node.ask(async |client| client.status().await)?;
            let health: Vec<IpAddr> = own.ipv4.map(IpAddr::V4).into_iter().chain(own.ipv6.map(IpAddr::V6)).collect();
            text.push_str(&with(n, "health-addresses", &health));
            text.truncate(text.trim_end().len());
            text.push_str(&format!("\nrouter-addresses = {}\n\n", list(&status.router)));
        }
        Ok(text)
    }

    /// Runs a scenario, and prints the agents' logs if it fails.
    ///
    /// # Errors
    /// Those of the scenario.
    pub fn run(mut self, body: impl FnOnce(&mut Self) -> Result<()>) -> Result<Self> {
        let outcome = body(&mut self);
        if outcome.is_err() {
            for (name, node) in NAMES.into_iter().zip(&self.nodes) {
                eprintln!("---- log of the agent of node {name}\n{}---- end of the log", node.log());
            }
        }
        outcome.map(|()| self)
    }

    /// Ends the scenario: [`Node::finish`] for each node.
    ///
    /// # Errors
    /// A node is not clean.
    pub fn end(mut self) -> Result<()> {
        self.nodes.iter_mut().try_for_each(Node::finish)
    }

    /// As [`Self::end`], after a start without health endpoints.
    ///
    /// # Errors
    /// A node is not clean.
    pub fn end_without_health(mut self) -> Result<()> {
        self.nodes.iter_mut().try_for_each(Node::stop_agent)?;
        self.set_health(false);
        self.nodes.iter_mut().try_for_each(Node::start_agent)?;
        self.end()
    }
}

fn feed_directory(node: &Node) -> PathBuf {
    node.dirs().root.join("feed")
}

/// Kinds of rows of [`Feeds`].
const KINDS: [&str; 4] = ["node", "namespace", "pod", "policy"];

/// A producer for each node of [`Nodes::set_feed`]. All of them report the same rows.
#[derive(Debug)]
pub struct Feeds(Vec<Producer>);

impl Feeds {
    /// Sends a snapshot of the nodes and these rows, and waits until it is in force.
    ///
    /// # Errors
    /// An agent does not accept the producer or a row.
    pub fn start(joined: &Nodes, rows: Vec<v1::Change>) -> Result<Self> {
        let of_node = |n: usize| {
            let [addresses, cidrs] = [address, pool].map(|of| [of(n, false), of(n, true)]);
            feed::node(NAMES[n], &addresses.each_ref().map(String::as_str), &cidrs.each_ref().map(String::as_str))
        };
        let nodes = (0..joined.nodes.len()).map(of_node);
        let begins = KINDS.into_iter().map(feed::begin);
        let completes = KINDS.into_iter().map(feed::complete);
        let snapshot: Vec<v1::Change> = begins.chain(nodes).chain(rows).chain(completes).collect();
        let connect = |(node, name): (&Node, &str)| {
            let socket = feed_directory(node).join(wharf_feed::SOCKET);
            Producer::opened(&socket, feed::opening("kube", "one", name, &KINDS))
        };
        let producers = joined.nodes.iter().zip(NAMES).map(connect).collect::<Result<_>>()?;
        let mut feeds = Self(producers);
        feeds.send(&snapshot)?;
        Ok(feeds)
    }

    /// Sends changes to every agent, and waits until they are in force.
    ///
    /// # Errors
    /// A row is refused, or a stream ends.
    pub fn send(&mut self, changes: &[v1::Change]) -> Result<()> {
        for (producer, name) in self.0.iter_mut().zip(NAMES) {
            let processed = producer.send(changes.to_vec()).with_context(|| format!("node {name}"))?;
            ensure!(processed.refused.is_empty(), "node {name}: {:?}", processed.refused);
        }
        self.0.iter_mut().try_for_each(Producer::settle)
    }
}

/// Interface of the switch's namespace that leads to node `n`.
#[must_use]
pub fn port(n: usize) -> String {
    format!("port{n}")
}

/// Gives a node the pools of node `n`, from the next start of its agent on.
pub fn set_pools(node: &mut Node, n: usize) {
    for (other, v6) in (0..NAMES.len()).flat_map(|other| [(other, false), (other, true)]) {
        let flag = if v6 { "--ipv6-pool" } else { "--ipv4-pool" };
        node.set_flag(&format!("{flag}={}", pool(other, v6)), other == n);
    }
}

/// Sets `--routing` for the next start of the agent.
pub fn set_routing(node: &mut Node, routing: &str) {
    for mode in MODES {
        node.set_flag(&format!("--routing={mode}"), mode == routing);
    }
}

/// Text of unreachable routes before their destination.
const UNREACHABLE: &str = "unreachable ";

fn of_protocol(node: &Node) -> Result<String> {
    let mut all = ip(node.space(), "-4 route show proto 88")?;
    all.push_str(&ip(node.space(), "-6 route show proto 88")?);
    Ok(all)
}

/// Routes to other nodes, sorted: `CIDR via ADDRESS`, or `CIDR overlay to ADDRESS from ADDRESS mtu N`. Without those of
/// [`unreachable()`].
///
/// # Errors
/// The routes cannot be read.
pub fn routes(node: &Node) -> Result<Vec<String>> {
    let all = of_protocol(node)?;
    let mut routes: Vec<String> = all.lines().filter(|line| !line.starts_with(UNREACHABLE)).map(next_hop).collect();
    routes.sort();
    Ok(routes)
}

/// Destinations of the unreachable routes behind those to other nodes, sorted.
///
/// # Errors
/// The routes cannot be read.
pub fn unreachable(node: &Node) -> Result<Vec<String>> {
    let all = of_protocol(node)?;
    let destination = |line: &str| Some(line.strip_prefix(UNREACHABLE)?.split_whitespace().next()?.to_owned());
    let mut destinations: Vec<String> = all.lines().filter_map(destination).collect();
    destinations.sort();
    Ok(destinations)
}

/// Destination and next hop of a route.
fn next_hop(route: &str) -> String {
    let words: Vec<&str> = route.split_whitespace().collect();
    let Some(tunnel) = words.iter().position(|word| *word == "encap") else {
        return words.into_iter().take(3).collect::<Vec<_>>().join(" ");
    };
    // Another `src`, of the node's own packets, follows the tunnel's.
    let (before, after) = words.split_at(tunnel);
    let value = |name: &str| {
        let value = after.iter().skip_while(|word| **word != name).nth(1);
        value.copied().unwrap_or("(none)")
    };
    format!("{} overlay to {} from {} mtu {}", before.join(" "), value("dst"), value("src"), value("mtu"))
}

/// Native routes to node `n`.
#[must_use]
pub fn to(n: usize) -> Vec<String> {
    vec![format!("{} via {}", pool(n, false), address(n, false)), format!("{} via {}", pool(n, true), address(n, true))]
}

/// Waits until the node has exactly these routes to other nodes.
///
/// # Errors
/// The node has other routes at the deadline.
pub fn await_routes(node: &Node, mut expected: Vec<String>) -> Result<()> {
    expected.sort();
    wait::until_equal("routes to the other nodes", &expected, || routes(node))
}

/// Client address that a TCP server at an address sees.
///
/// # Errors
/// There is no connection.
pub fn seen_by(server: &Space, client: &Space, to: IpAddr) -> Result<IpAddr> {
    let to = SocketAddr::new(to, 7_777);
    let listener = server.run(|| TcpListener::bind(to))?.with_context(|| format!("listen at {to}"))?;
    let stream = client.run(|| TcpStream::connect_timeout(&to, wait::PATIENCE))?;
    let mut stream = stream.with_context(|| format!("connect {to}"))?;
    let (mut accepted, from) = listener.accept().context("accept")?;
    stream.write_all(b"x").with_context(|| format!("write to {to}"))?;
    accepted.read_exact(&mut [0]).with_context(|| format!("read at {to}"))?;
    Ok(from.ip())
}

/// Health and message of the component `cluster` of the status.
///
/// # Errors
/// The status has no such component.
pub fn component(node: &Node) -> Result<(String, String)> {
    let status: Value = serde_json::from_str(&node.wharf(&["status", "-o", "json"])?.stdout)?;
    let rows = status["components"].as_array().context("components")?;
    let row = rows.iter().find(|row| row["name"] == "cluster").context("no cluster in the status")?;
    let text = |name: &str| row[name].as_str().unwrap_or_default().to_owned();
    Ok((text("health"), text("message")))
}

/// Runs `wharf-agent cleanup`.
///
/// # Errors
/// The program cannot be started or does not end.
pub fn cleanup(node: &Node, arguments: &[&str]) -> Result<Finished> {
    let mut command = node.command(bin("wharf-agent")?)?;
    command.arg("cleanup").args(arguments).args(node.dirs().flags()).env("NO_COLOR", "1");
    run(command, b"", wait::PATIENCE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_has_the_ends_of_its_own_tunnel() {
        let native = "10.87.1.0/24 via 198.51.100.2 dev up0 metric 2003304447";
        assert_eq!(next_hop(native), "10.87.1.0/24 via 198.51.100.2");
        let tunnel = "10.87.2.0/24  encap ip id 88 src 198.51.100.1 dst 203.0.113.2 ttl 0 tos 0 via 169.254.88.1 dev \
                      vxlan-wharf src 10.87.0.1 metric 2003304447 mtu 1450 onlink";
        assert_eq!(next_hop(tunnel), "10.87.2.0/24 overlay to 203.0.113.2 from 198.51.100.1 mtu 1450");
    }
}
