//! `--cluster-file`: nodes whose containers reach each other by routes.

use std::{
    fs,
    net::{IpAddr, TcpStream, UdpSocket},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use wharf_api::{PolicyDeleteQuery, PolicyImport};
use wharf_tests::{
    Node,
    cluster::{
        Container, FAR, Nodes, address, await_routes, cleanup, component, own_row, pool, routes, row, seen_by, to,
        unreachable,
    },
    crash,
    echo::{self, EchoServer},
    frame::{self, PacketSocket},
    icmp,
    process::{command_in, ip, run},
    stream::UdpStream,
    wait,
};

/// The scenarios are about native routes.
const ROUTING: &str = "native";
/// How long a connection that must not be made is waited for: TCP repeats its first packet after a second.
const DENIED: Duration = Duration::from_millis(1_300);

fn nft(node: &Node, arguments: &[&str]) -> Result<String> {
    let mut command = command_in(node.space(), "nft")?;
    command.args(arguments);
    run(command, b"", wait::PATIENCE)?.ok()
}

fn state(path: &Path) -> PathBuf {
    path.join("cluster.json")
}

/// With rules about a container's sender, each of these would be taken for a container or the node.
#[test]
fn packets_from_outside_in_the_name_of_this_node_are_dropped() -> Result<()> {
    let joined = Nodes::start(2, ROUTING)?;
    let [a, b] = [&joined.nodes[0], &joined.nodes[1]];
    await_routes(a, to(1))?;
    let (one, other) = (Container::start(a, "one")?, Container::start(a, "other")?);
    let import = PolicyImport {
        file: "one.yaml".to_owned(),
        text: "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: one}\n\
               spec: {podSelector: {matchLabels: {app: one}}, ingress: [{from: [{podSelector: {}}]}, \
               {from: [{ipBlock: {cidr: 0.0.0.0/0}}]}, {from: [{ipBlock: {cidr: '::/0'}}]}]}\n"
            .to_owned(),
    };
    a.ask(async |client| client.import_policy(&import).await)?;
    for interface in ["all", "up0"] {
        let setting = format!("/proc/sys/net/ipv4/conf/{interface}/rp_filter");
        a.space().run(|| fs::write(&setting, "0"))?.with_context(|| setting.clone())?;
    }
    let inbox = one.space()?.run(|| UdpSocket::bind("[::]:0"))?.context("bind a receiver")?;
    inbox.set_read_timeout(Some(wait::PATIENCE)).context("set a time limit")?;
    let port = inbox.local_addr().context("the receiver's port")?.port();
    let (wire, near) = (PacketSocket::open(b.space(), "up0")?, PacketSocket::open(a.space(), "up0")?.mac()?);
    let receivers = one.end.both()?.into_iter().zip(other.end.both()?).zip(one.end.gateways()?);
    for (v6, ((receiver, container), router)) in [false, true].into_iter().zip(receivers) {
        let ethertype = if v6 { frame::IPV6 } else { frame::IPV4 };
        let send = |from: IpAddr, text: &str| {
            let datagram = frame::udp(from, receiver, (9, port), text.as_bytes());
            wire.send(&frame::ethernet(near, wire.mac()?, ethertype, &frame::ip(from, receiver, 17, &datagram)))
        };
        let outside: IpAddr = if v6 { "2001:db8:5::1" } else { "192.0.2.1" }.parse()?;
        let of_a: IpAddr = address(0, v6).parse()?;
        for (name, from) in [("a container", container), ("itself", receiver), ("the router", router), ("node a", of_a)]
        {
            send(from, "bad")?;
            send(outside, name)?;
            let mut buffer = [0; 64];
            let n = inbox.recv(&mut buffer).with_context(|| format!("nothing arrives after {name}, {from}"))?;
            ensure!(&buffer[..n] == name.as_bytes(), "a packet in the name of {name}, {from}, arrives");
        }
    }
    ensure!(a.found_amiss()?.is_empty(), "{:?}", a.found_amiss()?);
    a.detach(&one.end)?;
    a.detach(&other.end)?;
    joined.end()
}

#[test]
fn containers_of_two_nodes_reach_each_other_with_their_own_addresses() -> Result<()> {
    let joined = Nodes::start(2, ROUTING)?;
    let [a, b] = [&joined.nodes[0], &joined.nodes[1]];
    await_routes(a, to(1))?;
    await_routes(b, to(0))?;
    let (one, two) = (Container::start(a, "one")?, Container::start(b, "two")?);
    for (near, far) in [(&one, &two), (&two, &one)] {
        for (own, address) in near.end.both()?.into_iter().zip(far.end.both()?) {
            icmp::ping(near.space()?, address)?.must_answer()?;
            echo::tcp(near.space()?, far.echo.tcp_at(address), 200_000)?;
            echo::udp(near.space()?, far.echo.udp_at(address), 4_000).context("fragments")?;
            ensure!(seen_by(far.space()?, near.space()?, address)? == own, "{own} is masqueraded to {address}");
        }
    }
    // A node to the other's container, and a container to the other node.
    let of_b = EchoServer::start(b.space())?;
    for (v6, address_of_two) in [false, true].into_iter().zip(two.end.both()?) {
        echo::tcp(a.space(), two.echo.tcp_at(address_of_two), 10_000).context("from the node")?;
        echo::tcp(one.space()?, of_b.tcp_at(address(1, v6).parse()?), 10_000).context("to the other node")?;
    }
    // Policy sees the other node's container by its address.
    let only = |cidrs: [String; 2]| {
        let peers = cidrs.map(|cidr| format!("{{ipBlock: {{cidr: '{cidr}'}}}}")).join(", ");
        format!(
            "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{name: two}}\n\
             spec: {{podSelector: {{matchLabels: {{app: two}}}}, ingress: [{{from: [{peers}]}}]}}\n"
        )
    };
    for (n, expected) in [(5, false), (0, true)] {
        let import = PolicyImport { file: "two.yaml".to_owned(), text: only([pool(n, false), pool(n, true)]) };
        b.ask(async |client| client.import_policy(&import).await)?;
        for address in two.end.both()? {
            let to = two.echo.tcp_at(address);
            let connected = one.space()?.run(|| TcpStream::connect_timeout(&to, DENIED))?.is_ok();
            ensure!(connected == expected, "{to} from {} while {} may", pool(0, false), pool(n, false));
        }
    }

    // It is not the world.
    for (entity, expected) in [("world", false), ("all", true)] {
        let text = format!(
            "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {{name: two}}\n\
             spec: {{endpointSelector: {{matchLabels: {{app: two}}}}, ingress: [{{fromEntities: [{entity}]}}]}}\n"
        );
        let all = PolicyDeleteQuery { all: Some(true), ..PolicyDeleteQuery::default() };
        b.ask(async |client| client.delete_policy(&all).await)?;
        let import = PolicyImport { file: "two.yaml".to_owned(), text };
        b.ask(async |client| client.import_policy(&import).await)?;
        for address in two.end.both()? {
            let to = two.echo.tcp_at(address);
            let connected = one.space()?.run(|| TcpStream::connect_timeout(&to, DENIED))?.is_ok();
            ensure!(connected == expected, "{to} while {entity} may");
        }
    }

    let table = a.wharf(&["cluster", "nodes"])?.ok()?;
    ensure!(table.contains("a (this node)") && table.contains("via 198.51.100.2"), "{table}");
    let status = a.wharf(&["cluster", "status"])?.ok()?;
    ensure!(status.contains("2 of 2 in force"), "{status}");
    ensure!(component(a)? == ("ok".to_owned(), "2 nodes, 2 routes".to_owned()), "{:?}", component(a)?);
    let told = a.wharf(&["explain", &two.end.v4()?.to_string()])?.ok()?;
    ensure!(told.contains("of node b: packets to it go via 198.51.100.2"), "{told}");
    ensure!(a.found_amiss()?.is_empty() && b.found_amiss()?.is_empty(), "{:?}", a.found_amiss()?);
    a.detach(&one.end)?;
    b.detach(&two.end)?;
    joined.end()
}

#[test]
fn a_node_without_a_common_network_is_named_and_a_router_may_know_the_way() -> Result<()> {
    let joined = Nodes::start(3, ROUTING)?;
    let [a, c] = [&joined.nodes[0], &joined.nodes[FAR]];
    await_routes(a, to(1))?;
    let (health, message) = component(a)?;
    ensure!(health == "degraded" && message.contains("no route to 10.87.2.0/24 of node c"), "{message}");
    let status = a.wharf(&["cluster", "status"])?;
    ensure!(status.code() == 1 && status.stdout.contains("2 of 4 in force"), "{}", status.describe());
    for n in [0, FAR] {
        ip(joined.switch()?, &format!("route add {} via {}", pool(n, false), address(n, false)))?;
        ip(joined.switch()?, &format!("-6 route add {} via {}", pool(n, true), address(n, true)))?;
    }
    let (one, three) = (Container::start(a, "one")?, Container::start(c, "three")?);
    for (own, address) in one.end.both()?.into_iter().zip(three.end.both()?) {
        ensure!(seen_by(three.space()?, one.space()?, address)? == own, "{own} is masqueraded to {address}");
    }
    a.detach(&one.end)?;
    c.detach(&three.end)?;
    joined.end()
}

#[test]
fn routes_follow_the_file_and_nothing_that_is_not_in_it_stays() -> Result<()> {
    let mut joined = Nodes::start(2, ROUTING)?;
    await_routes(&joined.nodes[0], to(1))?;
    // A node that is new, and one whose networks are others'.
    let third = |n: usize| row("third", &["198.51.100.77".to_owned()], &[pool(n, false)]);
    joined.write(&[own_row(0), own_row(1), third(7)].concat())?;
    let with_third = |n: usize| [to(1), vec![format!("{} via 198.51.100.77", pool(n, false))]].concat();
    await_routes(&joined.nodes[0], with_third(7)).context("a new node")?;
    let swapped = row("b", &[address(1, false), address(1, true)], &[pool(7, false), pool(1, true)]);
    joined.write(&[own_row(0), swapped, third(1)].concat())?;
    let expected = vec![
        format!("{} via {}", pool(7, false), address(1, false)),
        format!("{} via {}", pool(1, true), address(1, true)),
        format!("{} via 198.51.100.77", pool(1, false)),
    ];
    await_routes(&joined.nodes[0], expected.clone()).context("networks that two nodes exchanged")?;

    // Refused, cut, or gone: nothing changes.
    for text in ["[[node]]\nname = 'a'\n", "", "[[node]", &own_row(1)] {
        joined.write(text)?;
        wait::until("the file is refused", || {
            let (health, message) = component(&joined.nodes[0])?;
            Ok((health == "degraded" && message.contains("nodes.toml")).then_some(()))
        })?;
        ensure!(routes(&joined.nodes[0])?.len() == 3, "{text:?}: {:?}", routes(&joined.nodes[0])?);
    }
    fs::remove_file(&joined.file)?;
    wait::until("the file is missed", || Ok(component(&joined.nodes[0])?.1.contains("no such file").then_some(())))?;
    joined.nodes[0].kill_agent()?;
    joined.nodes[0].start_agent().context("a start without the file")?;
    await_routes(&joined.nodes[0], expected).context("after a start without the file")?;

    // Changes while no agent runs, and a route that a killed agent left.
    joined.nodes[0].stop_agent()?;
    joined.write(&[own_row(0), third(9)].concat())?;
    joined.nodes[0].start_agent()?;
    await_routes(&joined.nodes[0], vec![format!("{} via 198.51.100.77", pool(9, false))])
        .context("a node that went")?;
    let kept = state(&joined.nodes[0].dirs().state);
    ensure!(fs::read_to_string(&kept)?.contains("third"), "the last good text is not kept");

    // An address in its row that it does not have.
    joined.write(&[row("a", &["198.51.100.200".to_owned()], &[pool(0, false), pool(0, true)]), third(9)].concat())?;
    wait::until("the address is missed", || {
        Ok(component(&joined.nodes[0])?.1.contains("198.51.100.200 of this node's row").then_some(()))
    })?;

    // A text that cannot be kept is told, and kept later.
    let blocked = joined.nodes[0].dirs().state.join("cluster.json.new");
    fs::create_dir(&blocked)?;
    joined.write(&[own_row(0), third(9), own_row(1)].concat())?;
    wait::until("the failed write is told", || {
        Ok(component(&joined.nodes[0])?.1.contains("keep the cluster's nodes").then_some(()))
    })?;
    fs::remove_dir(&blocked)?;
    wait::until("the text is kept", || Ok((component(&joined.nodes[0])?.0 == "ok").then_some(())))?;
    ensure!(fs::read_to_string(&kept)?.contains("10.87.1.0/24"), "the text is not kept");

    // Without the setting, its routes go; a first start needs a good file.
    let flag = format!("--cluster-file={}", joined.file.display());
    joined.nodes[0].stop_agent()?;
    joined.nodes[0].set_flag(&flag, false);
    joined.nodes[0].start_agent()?;
    await_routes(&joined.nodes[0], Vec::new()).context("without the setting")?;
    wait::until_equal("unreachable routes", &Vec::new(), || unreachable(&joined.nodes[0]))?;
    joined.nodes[0].stop_agent()?;
    fs::remove_file(kept)?;
    joined.write("[[node]]\nname = 'x'\naddresses = ['198.51.100.9']\n")?;
    let refused = joined.nodes[0].run_agent_to_end(&[&flag])?;
    ensure!(refused.code() == 1 && refused.stderr.contains("no node is named a"), "{}", refused.describe());
    joined.nodes[0].start_agent()?;
    // The second node refuses the last texts, which lack its row, and keeps its routes.
    joined.end()
}

#[test]
fn what_is_not_wharfs_is_never_replaced_and_cleanup_takes_the_routes() -> Result<()> {
    let mut joined = Nodes::join(2, ROUTING)?;
    let theirs = format!("{} via 198.51.100.99", pool(1, false));
    ip(joined.nodes[0].space(), &format!("route add {theirs}"))?;
    // Of their number, without their metric.
    ip(joined.nodes[0].space(), "route add 192.0.2.0/24 via 198.51.100.99 proto 88")?;
    joined.nodes[0].start_agent()?;
    let a = &joined.nodes[0];
    let foreign = "192.0.2.0/24 via 198.51.100.99".to_owned();
    await_routes(a, vec![to(1)[1].clone(), foreign.clone()])?;
    let all = ip(a.space(), "-4 route")?;
    ensure!(all.contains(&theirs), "{all}");
    let message = component(a)?.1;
    ensure!(message.contains("overlaps the node's route 10.87.1.0/24 via 198.51.100.99"), "{message}");
    ensure!(unreachable(a)? == [pool(1, true)], "{:?}", unreachable(a)?);
    let excluded = nft(a, &["list", "set", "inet", "wharf", "excluded4"])?;
    // Merged with the node's own.
    ensure!(excluded.contains("10.87.0.0/23"), "packets over somebody else's route are masqueraded: {excluded}");
    ip(a.space(), &format!("route del {theirs}"))?;
    await_routes(a, [to(1), vec![foreign.clone()]].concat()).context("after the conflict")?;

    // A route that somebody removed comes back, and the audit names it meanwhile.
    wait::until("the audit names the missing route", || {
        // Fails if the agent has not yet restored it.
        let _ = ip(a.space(), &format!("route del {} proto 88", pool(1, false)));
        Ok(a.audit()?.findings.iter().any(|f| f.subject.contains("10.87.1.0/24")).then_some(()))
    })?;
    await_routes(a, [to(1), vec![foreign.clone()]].concat()).context("a route that was removed")?;

    joined.nodes[0].kill_agent()?;
    let listed = cleanup(&joined.nodes[0], &["--dry-run"])?;
    ensure!(listed.stdout.contains("route 10.87.1.0/24 via 198.51.100.2"), "{}", listed.describe());
    cleanup(&joined.nodes[0], &["--force"])?.ok()?;
    ensure!(routes(&joined.nodes[0])? == [foreign], "{:?}", routes(&joined.nodes[0])?);
    ensure!(!state(&joined.nodes[0].dirs().state).exists(), "cleanup left the kept text");
    joined.nodes[0].start_agent()?;
    joined.end()
}

#[test]
fn traffic_between_nodes_goes_on_while_an_agent_is_killed_and_its_address_changes() -> Result<()> {
    let mut joined = Nodes::start(2, ROUTING)?;
    await_routes(&joined.nodes[0], to(1))?;
    await_routes(&joined.nodes[1], to(0))?;
    let one = Container::start(&joined.nodes[0], "one")?;
    let two = Container::start(&joined.nodes[1], "two")?;
    let stream = UdpStream::start(one.space()?, two.space()?, two.end.v4()?.into(), 1_000)?;
    stream.await_more(300)?;
    joined.nodes[0].kill_agent()?;
    stream.await_more(300)?;
    joined.nodes[0].start_agent()?;
    joined.nodes[0].await_rebuilt()?;
    stream.await_more(300)?;
    stream.stop()?.must_be_perfect()?;

    // The other node has another address.
    let moved = "198.51.100.42";
    ip(joined.nodes[1].space(), &format!("addr add {moved}/24 dev up0"))?;
    joined.write(&[own_row(0), row("b", &[moved.to_owned()], &[pool(1, false)])].concat())?;
    await_routes(&joined.nodes[0], vec![format!("{} via {moved}", pool(1, false))])?;
    echo::tcp(one.space()?, two.echo.tcp_at(two.end.v4()?.into()), 10_000)?;
    joined.nodes[0].detach(&one.end)?;
    joined.nodes[1].detach(&two.end)?;
    joined.end()
}

#[test]
fn a_kill_amid_a_change_of_routes_leaves_what_the_next_start_completes() -> Result<()> {
    let mut joined = Nodes::join(2, ROUTING)?;
    let other = |n: usize, via: &str| [own_row(0), row("b", &[via.to_owned()], &[pool(n, false)])].concat();
    // Nothing kept, then a text that is kept already and another next hop and network.
    for (turn, (n, via)) in [(1, "198.51.100.2"), (1, "198.51.100.3"), (4, "198.51.100.3")].into_iter().enumerate() {
        joined.write(&other(n, via))?;
        let points =
            ["kept/after-write", "kept/after-rename", "datapath/peers/before", "datapath/peers/after"].into_iter();
        for point in points {
            let node = &mut joined.nodes[0];
            crash::wish(node.dirs(), point)?;
            // A turn's later kills find the text kept, or the routes made.
            let killed = !node.start_armed_agent()?;
            crash::forget_wish(node.dirs())?;
            ensure!(killed || turn > 0 || point.ends_with("after") || point.starts_with("kept"), "{turn} {point}");
            if !killed {
                node.kill_agent()?;
            }
        }
        joined.nodes[0].start_agent()?;
        await_routes(&joined.nodes[0], vec![format!("{} via {via}", pool(n, false))])?;
        ensure!(joined.nodes[0].found_amiss()?.is_empty(), "{:?}", joined.nodes[0].found_amiss()?);
        joined.nodes[0].stop_agent()?;
    }
    joined.nodes[0].start_agent()?;
    joined.end()
}
