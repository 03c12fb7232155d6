//! The flows that the programs track, as an operator sees and removes them.

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use wharf_api::{Flow, FlowList, FlowState};
use wharf_tests::{
    Attached, Node, NodeConfig, Sandbox,
    echo::{self, EchoServer},
    scenario, wait,
};

/// What `wharf bpf ct list` shows with these filters.
fn flows(node: &Node, filters: &[&str]) -> Result<Vec<Flow>> {
    let arguments = [&["bpf", "ct", "list", "-o", "json"], filters].concat();
    let list: FlowList = serde_json::from_str(&node.wharf(&arguments)?.ok()?)?;
    ensure!(list.more == 0, "{} flows are left out", list.more);
    Ok(list.flows)
}

/// The one flow of a client's port.
fn flow_of(node: &Node, client: SocketAddr) -> Result<Flow> {
    let (address, port) = (client.ip().to_string(), client.port().to_string());
    let found = flows(node, &["--address", &address, "--port", &port])?;
    ensure!(found.len() == 1, "of {client} there are {found:#?}");
    found.into_iter().next().context("a flow")
}

/// Asks and is answered, twice: the end that began the flow goes on after an answer.
fn talk(mut stream: &TcpStream) -> Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    for _ in 0..2 {
        stream.write_all(b"ahoy")?;
        let mut back = [0; 4];
        stream.read_exact(&mut back)?;
        ensure!(&back == b"ahoy", "{back:?} came back");
    }
    Ok(())
}

fn talk_udp(socket: &UdpSocket) -> Result<()> {
    socket.set_read_timeout(Some(Duration::from_secs(10)))?;
    for _ in 0..2 {
        socket.send(b"ahoy")?;
        socket.recv(&mut [0; 16])?;
    }
    Ok(())
}

fn connect(from: &Sandbox, to: SocketAddr) -> Result<TcpStream> {
    from.space()?
        .run(|| TcpStream::connect_timeout(&to, Duration::from_secs(10)))?
        .with_context(|| format!("connect {to}"))
}

/// A client, a server, and the server's echo.
fn scene(node: &Node) -> Result<([(Sandbox, Attached); 2], EchoServer)> {
    let (a, b) = (node.sandbox("client")?, node.sandbox("server")?);
    let (ea, eb) = (node.attach(&a)?, node.attach(&b)?);
    let echo = EchoServer::start(b.space()?)?;
    Ok(([(a, ea), (b, eb)], echo))
}

fn ends(flow: &Flow) -> [SocketAddr; 2] {
    [&flow.source, &flow.destination].map(|end| SocketAddr::new(end.address, end.port))
}

#[test]
fn flows_have_the_right_ends_state_and_owner_and_a_close_ends_them() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let ([(a, ea), (_b, eb)], echo) = scene(node)?;
        let owner = Some(node.endpoint(&ea)?.id);
        for address in eb.both()? {
            let tcp = connect(&a, echo.tcp_at(address))?;
            let client = tcp.local_addr()?;
            talk(&tcp)?;
            let open = flow_of(node, client)?;
            ensure!(ends(&open) == [client, echo.tcp_at(address)], "{open:#?}");
            let seen = (open.protocol.to_string(), open.state, open.owner, open.by_stack, open.kept);
            ensure!(seen == ("tcp".to_owned(), FlowState::Established, owner, false, true), "{open:#?}");
            ensure!(open.left_ms > 3_600_000, "an idle connection of TCP stays for two hours: {open:#?}");

            let udp = echo::udp_client(a.space()?, echo.udp_at(address))?;
            talk_udp(&udp)?;
            let datagrams = flow_of(node, udp.local_addr()?)?;
            ensure!(ends(&datagrams) == [udp.local_addr()?, echo.udp_at(address)], "{datagrams:#?}");
            let seen = (datagrams.protocol.to_string(), datagrams.state, datagrams.owner);
            ensure!(seen == ("udp".to_owned(), FlowState::Established, owner), "{datagrams:#?}");

            drop(tcp);
            wait::until("both ends to have closed", || {
                Ok((flow_of(node, client)?.state == FlowState::Closed).then_some(()))
            })?;
        }
        let table = node.wharf(&["bpf", "ct", "list", "--endpoint", &ea.id(), "--state", "closed"])?.ok()?;
        ensure!(table.lines().count() == 3 && table.lines().all(|line| line.len() <= 100), "{table}");
        node.detach(&ea)?;
        node.detach(&eb)
    })
}

#[test]
fn a_flush_removes_what_matches_and_the_connection_goes_on() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let ([(a, ea), (_b, eb)], echo) = scene(node)?;
        for address in eb.both()? {
            let [one, other] = [(); 2].map(|()| connect(&a, echo.tcp_at(address)));
            let (one, other) = (one?, other?);
            talk(&one)?;
            talk(&other)?;
            let port = one.local_addr()?.port().to_string();
            let said = node.wharf(&["bpf", "ct", "flush", "--endpoint", &ea.id(), "--port", &port])?.ok()?;
            // An acknowledgement that was delayed may begin it anew at once.
            ensure!(said == "1 flow removed\n", "{said}");
            flow_of(node, other.local_addr()?).context("the other one stays")?;
            talk(&one)?;
            let anew = flow_of(node, one.local_addr()?)?;
            ensure!(anew.state == FlowState::Established, "{anew:#?}");

            let udp = echo::udp_client(a.space()?, echo.udp_at(address))?;
            talk_udp(&udp)?;
            node.wharf(&["bpf", "ct", "flush", "--protocol", "udp"])?.ok()?;
            ensure!(flows(node, &["--protocol", "udp"])?.is_empty(), "it is there still");
            talk_udp(&udp)?;
            flow_of(node, udp.local_addr()?)?;
        }
        let said = node.wharf(&["bpf", "ct", "flush", "--all"])?.ok()?;
        ensure!(said.ends_with(" flows removed\n") && !said.starts_with("0 "), "{said}");
        let refused = node.http("DELETE", "/v1/bpf/ct", None)?;
        ensure!(refused.code()? == "invalid-request", "{}", refused.text());
        node.detach(&ea)?;
        node.detach(&eb)
    })
}

#[test]
fn flows_survive_the_agent_and_not_their_endpoint() -> Result<()> {
    // A pool so small that its addresses come round.
    let config = NodeConfig::default().flags(&["--ip-rest-ms=0", "--ipv4-pool=10.88.0.0/29"]);
    scenario(config, |node| {
        let ([(a, ea), (_b, eb)], echo) = scene(node)?;
        let server = echo.udp_at(eb.v4()?.into());
        let [used_again, left] = [(); 2].map(|()| echo::udp_client(a.space()?, server));
        let (used_again, left) = (used_again?, left?);
        let client = used_again.local_addr()?;
        talk_udp(&used_again)?;
        talk_udp(&left)?;
        let before = flow_of(node, client)?;
        ensure!(before.kept, "{before:#?}");
        for go in [Node::kill_agent, Node::stop_agent] {
            go(node)?;
            node.start_agent()?;
            let after = flow_of(node, client)?;
            let same = (ends(&after), after.state, after.owner, after.kept);
            ensure!(same == (ends(&before), before.state, before.owner, before.kept), "{after:#?}");
        }
        node.detach(&ea)?;
        // The pool's other addresses are given out first.
        let mut others = Vec::new();
        let (again, successor) = loop {
            let sandbox = node.sandbox(&format!("next-{}", others.len()))?;
            let attached = node.attach(&sandbox)?;
            if IpAddr::from(attached.v4()?) == client.ip() {
                break (sandbox, attached);
            }
            others.push((sandbox, attached));
        };
        // From the same port to the same port.
        let heir = again.space()?.run(|| UdpSocket::bind(client))??;
        heir.connect(server)?;
        heir.set_read_timeout(Some(Duration::from_secs(10)))?;
        heir.send(b"ahoy")?;
        heir.recv(&mut [0; 16])?;
        let id = Some(node.endpoint(&successor)?.id);
        let anew = flow_of(node, client)?;
        ensure!(anew.owner == id && !anew.kept, "after one answer it is no old flow: {anew:#?}");
        wait::until("the other flow of the endpoint that had the address to be collected", || {
            let orphan = flows(node, &["--port", &left.local_addr()?.port().to_string()])?;
            Ok(orphan.is_empty().then_some(()))
        })?;
        wait::until("the status to tell of the collection", || {
            let told = node.ask(async |client| client.status().await)?.network.flows;
            Ok(told.filter(|told| told.orphaned > 0))
        })?;
        others.push((again, successor));
        others.iter().try_for_each(|(_, end)| node.detach(end))?;
        node.detach(&eb)
    })
}
