//! Five nodes whose list changes, partitions of two nodes, and a node that joins a cluster while its containers talk.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::ErrorKind,
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use wharf_api::{HealthState, NodeHealth, PolicyImport};
use wharf_tests::{
    Node,
    cluster::{
        Container, FAR, NAMES, Nodes, address, await_routes, is_far, pool, port, routes, row, seen_by, set_pools, to,
    },
    echo, icmp,
    process::ip,
    sctp::SctpSocket,
    space::Space,
    stream::{TcpFlow, UdpStream},
    wait,
};

/// Nodes at the beginning.
const COUNT: usize = 5;
/// Address of the switch of the near nodes, which is outside of the cluster.
const OUTSIDE: [&str; 2] = ["198.51.100.254", "2001:db8:7::fe"];
/// Port of a node, and of the container behind it.
const PUBLISHED: (u16, u16) = (8_080, 7_000);
/// Time without a link.
const OUTAGE: Duration = Duration::from_millis(2_200);
/// Identities in `IPCACHE`: other nodes, and containers without known labels.
const ELSEWHERE: [&str; 2] = ["6", "7"];

/// A row of the list.
#[derive(Debug, Clone)]
struct Member {
    n: usize,
    addresses: [String; 2],
    /// The node whose pools it has.
    pools: usize,
}

impl Member {
    fn new(n: usize) -> Self {
        Self { n, addresses: [address(n, false), address(n, true)], pools: n }
    }

    fn networks(&self) -> [String; 2] {
        [pool(self.pools, false), pool(self.pools, true)]
    }

    fn row(&self) -> String {
        row(NAMES[self.n], &self.addresses, &self.networks())
    }

    fn routes(&self, list: &[Self]) -> Vec<String> {
        let to = |other: &Self| {
            let ways = other.networks().into_iter().zip(other.addresses.clone());
            let way = |(cidr, via): (String, String)| match is_far(self.n) == is_far(other.n) {
                true => format!("{cidr} via {via}"),
                false => format!("{cidr} overlay to {} from {} mtu 1450", other.addresses[0], self.addresses[0]),
            };
            ways.map(way).collect::<Vec<_>>()
        };
        self.others(list).flat_map(to).collect()
    }

    /// Rows of `IPCACHE` about the other nodes: identity and prefix.
    fn peers(&self, list: &[Self]) -> BTreeSet<(String, String)> {
        let [node, unknown] = ELSEWHERE.map(str::to_owned);
        let of = |other: &Self| {
            let [v4, v6] = &other.addresses;
            let addresses = [format!("{v4}/32"), format!("{v6}/128")].map(|prefix| (node.clone(), prefix));
            let networks = other.networks().map(|prefix| (unknown.clone(), prefix));
            addresses.into_iter().chain(networks).collect::<Vec<_>>()
        };
        self.others(list).flat_map(of).collect()
    }

    fn others<'a>(&self, list: &'a [Self]) -> impl Iterator<Item = &'a Self> {
        let own = self.n;
        list.iter().filter(move |other| other.n != own)
    }
}

fn write(joined: &Nodes, list: &[Member]) -> Result<()> {
    joined.write(&list.iter().map(Member::row).collect::<String>())
}

/// As [`Member::peers`], from the kernel.
fn peers(node: &Node) -> Result<BTreeSet<(String, String)>> {
    let rows = node.ask(async |client| client.map("IPCACHE").await)?.rows;
    let cell = |row: &BTreeMap<String, String>, column: &str| row.get(column).cloned().context("a column");
    let pairs = rows.iter().map(|row| anyhow::Ok((cell(row, "identity")?, cell(row, "prefix")?)));
    let pairs = pairs.collect::<Result<BTreeSet<_>>>()?;
    Ok(pairs.into_iter().filter(|(identity, _)| ELSEWHERE.contains(&identity.as_str())).collect())
}

/// Every node has the routes to the others, and nothing else; node `e` knows their addresses for policy.
fn await_list(joined: &Nodes, list: &[Member]) -> Result<()> {
    for own in list {
        let node = &joined.nodes[own.n];
        let name = || format!("node {}", NAMES[own.n]);
        await_routes(node, own.routes(list)).with_context(name)?;
        if own.n == COUNT - 1 {
            wait::until_equal("the other nodes in IPCACHE", &own.peers(list), || peers(node)).with_context(name)?;
        }
        wait::until_equal("what is amiss", &Vec::new(), || node.found_amiss()).with_context(name)?;
        ensure!(node.wharf(&["cluster", "status"])?.code() == 0, "{}", name());
    }
    Ok(())
}

/// The first two packets of an association.
fn associate(near: &Space, far: &Space, own: IpAddr, to: IpAddr) -> Result<()> {
    let (client, server) = (SctpSocket::open(near, to.is_ipv4())?, SctpSocket::open(far, to.is_ipv4())?);
    let (from, to) = (SocketAddr::new(own, 5_000), SocketAddr::new(to, 7_000));
    client.init(from.port(), to)?;
    let asked = server.receive(false).context("the first packet")?;
    ensure!(asked == (from, to.port()), "{asked:?} asks");
    server.acknowledge(to.port(), from)?;
    let answered = client.receive(true).context("the answer")?;
    ensure!(answered == (to, from.port()), "{answered:?} answers");
    Ok(())
}

/// TCP between all pairs in both families; every protocol from each container to the next one, with its own address.
fn all_reach_each_other(pods: &BTreeMap<usize, Container>) -> Result<()> {
    let all: Vec<&Container> = pods.values().collect();
    for (i, near) in all.iter().enumerate() {
        for (j, far) in all.iter().enumerate().filter(|(j, _)| *j != i) {
            for (own, to) in near.end.both()?.into_iter().zip(far.end.both()?) {
                let both = || format!("{own} to {to}");
                let is_sample = (i + 1) % all.len() == j;
                // More than a packet of the path: TCP learns the MTU for the fragments.
                let bytes = if is_sample { 100_000 } else { 2_000 };
                echo::tcp(near.space()?, far.echo.tcp_at(to), bytes).with_context(both)?;
                if !is_sample {
                    continue;
                }
                icmp::ping(near.space()?, to)?.must_answer().with_context(both)?;
                echo::udp(near.space()?, far.echo.udp_at(to), 4_000).with_context(both).context("UDP, fragments")?;
                associate(near.space()?, far.space()?, own, to).with_context(both).context("SCTP")?;
                let seen = seen_by(far.space()?, near.space()?, to).with_context(both)?;
                ensure!(seen == own, "{own} is masqueraded to {to}: {seen}");
            }
        }
    }
    Ok(())
}

fn allow_all(node: &Node) -> Result<()> {
    let text = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: all}\n\
                spec: {podSelector: {}, ingress: [{}]}\n";
    let import = PolicyImport { file: "all.yaml".to_owned(), text: text.to_owned() };
    node.ask(async |client| client.import_policy(&import).await).map(drop)
}

/// Node d leaves, and node f is new. Nodes a and c have each other's networks, and node b has other addresses.
fn change(joined: &mut Nodes, pods: &mut BTreeMap<usize, Container>, list: &mut Vec<Member>) -> Result<()> {
    let (leaving, new, swapped, moved) = (3, COUNT, [0, FAR], 1);
    for n in [leaving, swapped[0], swapped[1]] {
        let pod = pods.remove(&n).context("a container of the node")?;
        joined.nodes[n].detach(&pod.end)?;
        joined.nodes[n].await_released()?;
        joined.nodes[n].stop_agent()?;
    }
    list.retain(|member| member.n != leaving);
    list.push(Member::new(new));
    let addresses = ["198.51.100.42".to_owned(), "2001:db8:7::42".to_owned()];
    for member in list.iter_mut() {
        match member.n {
            n if n == swapped[0] => member.pools = swapped[1],
            n if n == swapped[1] => member.pools = swapped[0],
            n if n == moved => {
                let space = joined.nodes[n].space();
                // The removal of the first address keeps the second one.
                let promote = || fs::write("/proc/sys/net/ipv4/conf/up0/promote_secondaries", "1");
                space.run(promote)?.context("keep the node's other address")?;
                for (new, old) in addresses.iter().zip(&member.addresses) {
                    let (length, unchecked) = if new.contains(':') { (64, " nodad") } else { (24, "") };
                    ip(space, &format!("addr add {new}/{length} dev up0{unchecked}"))?;
                    ip(space, &format!("addr del {old}/{length} dev up0"))?;
                }
                member.addresses.clone_from(&addresses);
            }
            _ => {}
        }
    }
    write(joined, list)?;
    for (n, pools) in [(swapped[0], swapped[1]), (swapped[1], swapped[0]), (new, new)] {
        set_pools(&mut joined.nodes[n], pools);
        joined.nodes[n].start_agent().with_context(|| format!("node {}", NAMES[n]))?;
        pods.insert(n, Container::start(&joined.nodes[n], &format!("later{n}"))?);
    }
    Ok(())
}

#[test]
fn five_nodes_reach_each_other_and_nothing_stays_of_nodes_that_change() -> Result<()> {
    let mut list: Vec<Member> = (0..COUNT).map(Member::new).collect();
    let joined = Nodes::join(COUNT + 1, "auto")?.run(|joined| {
        write(joined, &list)?;
        let mut pods = BTreeMap::new();
        for n in 0..COUNT {
            joined.nodes[n].start_agent()?;
            pods.insert(n, Container::start(&joined.nodes[n], &format!("pod{n}"))?);
        }
        // The rows of other nodes are in the kernel while a policy is.
        allow_all(&joined.nodes[COUNT - 1])?;
        await_list(joined, &list)?;
        all_reach_each_other(&pods)?;
        change(joined, &mut pods, &mut list)?;
        await_list(joined, &list).context("after the change")?;
        all_reach_each_other(&pods).context("after the change")?;
        pods.iter().try_for_each(|(n, pod)| joined.nodes[*n].detach(&pod.end))
    })?;
    joined.end()
}

/// Routes to other nodes, and rows of policy without link-local addresses, which the kernel adds some time after a
/// link.
fn rows(node: &Node) -> Result<BTreeSet<String>> {
    let mut rows: BTreeSet<String> = routes(node)?.into_iter().collect();
    let table = node.ask(async |client| client.map("IPCACHE").await)?.rows;
    rows.extend(table.into_iter().map(|row| format!("{row:?}")).filter(|row| !row.contains("fe80:")));
    Ok(rows)
}

fn health_of(node: &Node, name: &str) -> Result<NodeHealth> {
    let report = node.ask(async |client| client.health().await)?;
    report.nodes.into_iter().find(|h| h.node == name).context("a row of the other node")
}

/// Waits for an outage of the other node in which this address does not answer, or for its end with `None`. `check`
/// holds all the while.
fn await_health(node: &Node, name: &str, silent: Option<&str>, check: impl Fn() -> Result<()>) -> Result<NodeHealth> {
    wait::until(&format!("the health of node {name}, silent: {silent:?}"), || {
        check()?;
        let fits = |h: &NodeHealth| match silent {
            Some(address) => h.state != HealthState::Ok && h.message.contains(&format!("ICMP to {address}: ")),
            None => h.state == HealthState::Ok,
        };
        Ok(Some(health_of(node, name)?).filter(fits))
    })
}

/// How the connection between the nodes ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cut {
    /// Node b loses its carrier.
    Link,
    /// Node b has its carrier, and no packet passes. The neighbour entries of both nodes fail: after 10 s and more with
    /// the default settings of the kernel.
    Switch,
}

/// Lets an entry of an unreachable neighbour fail within about 2 s.
fn hasten_neighbours(node: &Node) -> Result<()> {
    let settings = [
        ("base_reachable_time_ms", 500),
        ("delay_first_probe_time", 1),
        ("retrans_time_ms", 200),
        ("ucast_solicit", 3),
    ];
    for (family, (name, value)) in ["ipv4", "ipv6"].into_iter().flat_map(|family| settings.map(|one| (family, one))) {
        let setting = format!("/proc/sys/net/{family}/neigh/up0/{name}");
        node.space().run(|| fs::write(&setting, value.to_string()))?.with_context(|| setting.clone())?;
    }
    Ok(())
}

/// True for an entry without a link-layer address, whose resolution fails or is tried again.
fn is_unreachable(node: &Node, neighbour: &str) -> Result<bool> {
    let entries = ip(node.space(), &format!("neigh show {neighbour} dev up0"))?;
    Ok(entries.contains("FAILED") || entries.contains("INCOMPLETE"))
}

/// Waits until all neighbour entries between the nodes have failed. Then new connections fail.
fn await_failed_neighbours(nodes: [&Node; 2], near: &Space, far: &Container) -> Result<()> {
    wait::until("the neighbour entries to fail", || {
        let failed = [false, true].map(|v6| {
            let of = |n: usize| is_unreachable(nodes[1 - n], &address(n, v6));
            anyhow::Ok(of(0)? && of(1)?)
        });
        let [v4, v6] = failed;
        Ok((v4? && v6?).then_some(()))
    })?;
    for address in far.end.both()? {
        let to = far.echo.tcp_at(address);
        let error = near.run(|| TcpStream::connect_timeout(&to, wait::PATIENCE))?.err();
        let error = error.with_context(|| format!("a connection to {to}"))?;
        ensure!(error.kind() == ErrorKind::HostUnreachable, "{to}: {error}");
    }
    Ok(())
}

/// A datagram and its echo. An error of an earlier one is reported at the next call.
fn exchange(socket: &UdpSocket, text: &str) -> Result<()> {
    let mut buffer = [0; 64];
    wait::until(&format!("the echo of a datagram {text} the outage"), || {
        let received = socket.send(text.as_bytes()).and_then(|_| socket.recv(&mut buffer));
        Ok(received.ok().filter(|n| buffer.get(..*n) == Some(text.as_bytes())).map(drop))
    })
}

fn partition(joined: &mut Nodes, cut: Cut) -> Result<()> {
    let [a, b] = [&joined.nodes[0], &joined.nodes[1]];
    await_routes(a, to(1))?;
    await_routes(b, to(0))?;
    let (one, two) = (Container::start(a, "one")?, Container::start(b, "two")?);
    let peers = [pool(0, false), pool(0, true)].map(|cidr| format!("{{ipBlock: {{cidr: '{cidr}'}}}}")).join(", ");
    let text = format!(
        "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{name: two}}\n\
         spec: {{podSelector: {{matchLabels: {{app: two}}}}, ingress: [{{from: [{peers}]}}]}}\n"
    );
    let import = PolicyImport { file: "two.yaml".to_owned(), text };
    b.ask(async |client| client.import_policy(&import).await)?;
    let flow = |address| TcpFlow::start(one.space()?, two.space()?, address);
    let flows = two.end.both()?.into_iter().map(flow).collect::<Result<Vec<_>>>()?;
    let others = [(a, NAMES[1], address(1, false)), (b, NAMES[0], address(0, false))];
    for (node, name) in [(a, NAMES[0]), (a, NAMES[1]), (b, NAMES[0]), (b, NAMES[1])] {
        await_health(node, name, None, || Ok(()))?;
    }
    flows.iter().try_for_each(|flow| flow.await_more(50))?;

    let datagrams = two.end.both()?.map(|address| echo::udp_client(one.space()?, two.echo.udp_at(address)));
    let datagrams = datagrams.into_iter().collect::<Result<Vec<_>>>()?;
    datagrams.iter().try_for_each(|socket| exchange(socket, "before"))?;
    let before = [rows(a)?, rows(b)?];
    let is_unchanged = || -> Result<()> {
        let now = [rows(a)?, rows(b)?];
        ensure!(now == before, "{before:#?} became {now:#?}");
        Ok(())
    };
    let change = |cut: &str| ip(joined.switch()?, &format!("link set {} {cut}", port(1)));
    change(if cut == Cut::Link { "down" } else { "nomaster" })?;
    let since = Instant::now();
    let mut missed = Vec::new();
    for (node, other, address) in &others {
        missed.push(await_health(node, other, Some(address.as_str()), is_unchanged)?);
    }
    if cut == Cut::Switch {
        await_failed_neighbours([a, b], one.space()?, &two)?;
    }
    wait::until("the end of the outage", || {
        is_unchanged()?;
        Ok((since.elapsed() >= OUTAGE).then_some(()))
    })?;
    change(if cut == Cut::Link { "up" } else { "master br0" })?;
    flows.iter().try_for_each(|flow| flow.await_more(50)).context("after the outage")?;
    datagrams.iter().try_for_each(|socket| exchange(socket, "after"))?;
    for ((node, other, _), missed) in others.iter().zip(&missed) {
        let row = await_health(node, other, None, is_unchanged)?;
        ensure!(row.since_unix_ms > missed.since_unix_ms, "{row:?} after {missed:?}");
    }
    for flow in flows {
        let report = flow.stop()?;
        report.must_be_whole()?;
        ensure!(report.longest >= Duration::from_secs(1), "the flow met no outage: {report:?}");
    }
    for address in two.end.both()? {
        echo::tcp(one.space()?, two.echo.tcp_at(address), 10_000).context("a new connection")?;
    }
    for node in [a, b] {
        wait::until_equal("what is amiss", &Vec::new(), || node.found_amiss())?;
    }
    a.detach(&one.end)?;
    b.detach(&two.end)
}

#[test]
fn a_connection_outlives_a_partition_and_nothing_is_removed_meanwhile() -> Result<()> {
    let mut joined = Nodes::join(2, "auto")?;
    joined.set_health(true);
    joined.nodes.iter_mut().try_for_each(Node::start_agent)?;
    joined.run(|joined| partition(joined, Cut::Link))?.end_without_health()
}

#[test]
fn a_connection_outlives_a_partition_in_which_neighbours_fail() -> Result<()> {
    let mut joined = Nodes::join(2, "auto")?;
    joined.set_health(true);
    joined.nodes.iter().try_for_each(hasten_neighbours)?;
    joined.nodes.iter_mut().try_for_each(Node::start_agent)?;
    joined.run(|joined| partition(joined, Cut::Switch))?.end_without_health()
}

fn join_while_containers_talk(joined: &mut Nodes, file: &str) -> Result<()> {
    let a = &joined.nodes[0];
    let (one, sandbox) = (Container::start(a, "one")?, a.sandbox("web")?);
    let (node_port, port) = PUBLISHED;
    let ports = json!({"portMappings": [{"hostPort": node_port, "containerPort": port, "protocol": "udp"}]});
    let web = a.attach_with(&sandbox, "eth0", &a.netconf().with("runtimeConfig", ports))?;
    let (inside, server, outside) = (one.space()?, sandbox.space()?, &joined.switch()?.try_clone()?);
    let mut streams = vec![
        ("to a neighbour", UdpStream::start(inside, server, web.v4()?.into(), 500)?),
        ("from a neighbour", UdpStream::start(server, inside, one.end.v6()?.into(), 500)?),
        ("to the outside", UdpStream::start(inside, outside, OUTSIDE[0].parse()?, 500)?),
    ];
    for (v6, own) in [false, true].into_iter().zip(web.both()?) {
        let receiver = server.run(|| UdpSocket::bind(SocketAddr::new(own, port)))?.context("bind the receiver")?;
        let at = SocketAddr::new(address(0, v6).parse()?, node_port);
        let stream = UdpStream::start_at(outside, receiver, at, 500).with_context(|| format!("to {at}"))?;
        streams.push(("to the published port", stream));
    }
    let flow = TcpFlow::start(inside, server, web.v6()?.into())?;
    let is_masqueraded = || -> Result<()> {
        for (v6, to) in OUTSIDE.into_iter().enumerate() {
            let seen = seen_by(outside, inside, to.parse()?)?;
            ensure!(seen == address(0, v6 == 1).parse::<IpAddr>()?, "{to} sees {seen}");
        }
        Ok(())
    };
    is_masqueraded()?;
    let go_on = || streams.iter().try_for_each(|(what, stream)| stream.await_more(100).context(*what));
    go_on()?;

    joined.nodes[0].stop_agent()?;
    go_on().context("without an agent")?;
    joined.nodes[0].set_flag(file, true);
    joined.nodes[0].start_agent()?;
    joined.nodes[0].await_rebuilt()?;
    let [a, b] = [&joined.nodes[0], &joined.nodes[1]];
    await_routes(a, to(1))?;
    let two = Container::start(b, "two")?;
    for (own, to) in one.end.both()?.into_iter().zip(two.end.both()?) {
        ensure!(seen_by(two.space()?, inside, to)? == own, "{own} is masqueraded to {to}");
        ensure!(seen_by(inside, two.space()?, own)? == to, "{to} is masqueraded to {own}");
    }
    is_masqueraded()?;
    go_on().context("with a cluster")?;
    for (what, stream) in streams {
        stream.stop()?.must_be_perfect().context(what)?;
    }
    flow.stop()?.must_be_whole()?;
    wait::until_equal("what is amiss", &Vec::new(), || a.found_amiss())?;
    a.detach(&one.end)?;
    a.detach(&web)?;
    b.detach(&two.end)
}

#[test]
fn a_node_joins_a_cluster_and_its_containers_lose_no_packet() -> Result<()> {
    let mut joined = Nodes::join(2, "auto")?;
    let file = format!("--cluster-file={}", joined.file.display());
    joined.nodes[0].set_flag(&file, false);
    joined.nodes.iter_mut().try_for_each(Node::start_agent)?;
    joined.run(|joined| join_while_containers_talk(joined, &file))?.end()
}
