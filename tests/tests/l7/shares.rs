//! What containers take of the proxy's connections.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    os::fd::AsRawFd as _,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::{
    resource::{Resource, setrlimit},
    socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrStorage, sendto, socket},
};
use wharf_api::Health;
use wharf_tests::{
    Node, NodeConfig, frame,
    process::{command_in, run},
    scenario, wait,
    web::{WebClient, WebServer, get},
};

use crate::{
    PORT, Scene, await_realized, ingress,
    pods::{Pod, import},
    rule,
};

/// Files that the agent and Envoy may open. Envoy takes 1,280 connections with them: less 512, the half.
const FILES: u64 = 3_072;
/// Connections of a client, and of an endpoint whose rules redirect at a listener: a 32nd and a 16th of Envoy's.
const OF_CLIENT: usize = 40;
const OF_SERVER: usize = 80;
/// A handshake between two containers takes far less.
const HANDSHAKE: Duration = Duration::from_millis(300);

/// Half a request on each of as many connections as a client gets, with some attempts more.
fn half_requests(client: &Pod, server: SocketAddr) -> Result<Vec<TcpStream>> {
    client.space()?.run(|| {
        let half = |mut stream: TcpStream| stream.write_all(b"GET /public HTTP/1.1\r\nX: ").map(|()| stream).ok();
        (0..OF_CLIENT + 3).filter_map(|_| half(TcpStream::connect_timeout(&server, HANDSHAKE).ok()?)).collect()
    })
}

/// Connections of a client that the proxy has. The client itself takes one for open whose last packet was dropped.
fn open(node: &Node, client: &Pod) -> Result<usize> {
    let mut list = command_in(node.space(), "ss")?;
    list.args(["-Htn", "state", "established", "dst", &client.end.v4()?.to_string()]);
    Ok(run(list, b"", wait::PATIENCE)?.ok()?.lines().count())
}

/// Waits until the status has this of the proxy, and returns it.
fn await_told(node: &Node, told: &str) -> Result<()> {
    let mut last = String::new();
    let named = wait::until("the status names the container", || {
        let status = node.ask(async |client| client.status().await)?;
        let proxy = status.components.into_iter().find(|row| row.name == "proxy").context("the proxy")?;
        last = proxy.message;
        Ok((last.contains(told) && proxy.health == Health::Degraded).then_some(()))
    });
    named.with_context(|| last)
}

#[test]
fn a_client_that_spends_its_share_of_the_proxy_leaves_the_server_to_other_clients() -> Result<()> {
    setrlimit(Resource::RLIMIT_NOFILE, FILES, FILES)?;
    scenario(NodeConfig::default().with_envoy()?, |node| {
        let scene = Scene::new(node)?;
        let other = Pod::container(node, "other", "other")?;
        import(node, &ingress("db", "[{path: /public}]"))?;
        await_realized(node)?;
        let [db, _] = scene.servers()?;
        let id = node.endpoint(&scene.web.end)?.id;
        let dropped = || node.packets(id, "egress", "proxy-share-spent");
        ensure!(get(scene.web.space()?, db, "/public")? == 200 && dropped()? == 0, "before");

        let held = half_requests(&scene.web, db)?;
        let count = open(node, &scene.web)?;
        ensure!(count <= OF_CLIENT && count > OF_CLIENT / 2, "{count} connections");
        ensure!(dropped()? > 0, "further ones are dropped at the client");
        ensure!(get(other.space()?, db, "/public")? == 200, "another client of the server");
        await_told(node, &format!("endpoint {id} ("))?;
        await_told(node, &format!("had its share of {OF_CLIENT} proxy connections open as a client"))?;
        let (status, ready) = (node.wharf(&["status", "--brief"])?, node.wharf(&["status", "--ready"])?);
        ensure!(status.code() == 1, "degraded: {}", status.describe());
        ensure!(ready.code() == 0, "and ready: {}", ready.describe());

        drop(held);
        wait::until("the share is free", || Ok((scene.get("/public").ok() == Some(200)).then_some(())))?;

        // The next owner of its address has none of its connections, though no packet told their end.
        let gone = Pod::container(node, "gone", "gone")?;
        let held = half_requests(&gone, db)?;
        ensure!(open(node, &gone)? >= OF_CLIENT / 2, "{} connections of the one that goes", open(node, &gone)?);
        node.detach(&gone.end)?;
        let ended = || Ok((open(node, &gone)? == 0).then_some(()));
        wait::until("the proxy's connections of a client that is gone", ended)?;
        drop(held);
        node.detach(&other.end)?;
        scene.end(node)
    })
}

#[test]
fn a_server_whose_share_is_spent_by_several_clients_takes_no_other_ones_and_is_named() -> Result<()> {
    setrlimit(Resource::RLIMIT_NOFILE, FILES, FILES)?;
    scenario(NodeConfig::default().with_envoy()?, |node| {
        let scene = Scene::new(node)?;
        let clients = ["one", "two", "three"].map(|name| Pod::container(node, name, name));
        let clients = clients.into_iter().collect::<Result<Vec<_>>>()?;
        let other = Pod::container(node, "other", "other")?;
        let server = WebServer::start(other.space()?, PORT)?;
        import(node, &(ingress("db", "[{path: /public}]") + &ingress("other", "[{path: /other}]")))?;
        await_realized(node)?;
        let to = SocketAddr::new(other.end.both()?[0], PORT);
        ensure!(get(scene.web.space()?, to, "/other")? == 200, "before");

        let [db, _] = scene.servers()?;
        let mut held = Vec::new();
        for client in &clients {
            held.extend(half_requests(client, db)?);
        }
        ensure!(held.len() > OF_SERVER, "{} connections", held.len());
        ensure!(get(scene.web.space()?, to, "/other")? == 200, "another server's requests pass");
        let id = node.endpoint(&scene.db.end)?.id;
        await_told(node, &format!("endpoint {id} ("))?;
        await_told(node, &format!("has used its share of {OF_SERVER} proxy connections at the listener"))?;

        drop(held);
        wait::until("the share is free", || Ok((scene.get("/public").ok() == Some(200)).then_some(())))?;
        drop(server);
        node.detach(&other.end)?;
        clients.iter().try_for_each(|client| node.detach(&client.end))?;
        scene.end(node)
    })
}

/// An address that the node translates to the server's.
fn service(node: &Node, scene: &Scene) -> Result<SocketAddr> {
    let service = SocketAddr::from(([198, 51, 100, 7], PORT));
    let mut nft = command_in(node.space(), "nft")?;
    let (from, to) = (service.ip(), scene.db.end.v4()?);
    let chain = "type nat hook prerouting priority dstnat";
    nft.arg(format!("table ip services {{ chain to {{ {chain}; ip daddr {from} dnat to {to}; }}; }}"));
    run(nft, b"", wait::PATIENCE)?.ok()?;
    Ok(service)
}

/// Only the server's programs see the translated address.
#[test]
fn a_client_gets_no_more_than_its_share_through_a_translated_address() -> Result<()> {
    setrlimit(Resource::RLIMIT_NOFILE, FILES, FILES)?;
    scenario(NodeConfig::default().with_envoy()?, |node| {
        let scene = Scene::new(node)?;
        let service = service(node, &scene)?;
        import(node, &ingress("db", "[{path: /public}]"))?;
        await_realized(node)?;
        ensure!(get(scene.web.space()?, service, "/public")? == 200, "before");
        let held = half_requests(&scene.web, service)?;
        let count = open(node, &scene.web)?;
        ensure!(count <= OF_CLIENT && count > OF_CLIENT / 2, "{count} connections");
        let id = node.endpoint(&scene.db.end)?.id;
        ensure!(node.packets(id, "ingress", "proxy-share-spent")? > 0, "further ones are dropped at the server");
        drop(held);
        scene.end(node)
    })
}

/// The listener has a handshake before the client's last packet of it, and the programs see no later packet.
#[test]
fn handshakes_that_a_client_leaves_unfinished_keep_their_places() -> Result<()> {
    setrlimit(Resource::RLIMIT_NOFILE, FILES, FILES)?;
    scenario(NodeConfig::default().with_envoy()?, |node| {
        let scene = Scene::new(node)?;
        let service = service(node, &scene)?;
        import(node, &ingress("db", "[{path: /public}]"))?;
        await_realized(node)?;
        ensure!(get(scene.web.space()?, service, "/public")? == 200, "before");
        let nft = |rule: &str| {
            let mut nft = command_in(scene.web.space()?, "nft")?;
            nft.arg(rule);
            run(nft, b"", wait::PATIENCE)?.ok()
        };
        nft(
            "table ip holds { chain out { type filter hook output priority 0; tcp flags & (syn|ack) == ack drop; }; }",
        )?;
        // Refused ones take longer than the agent needs to count.
        let held = scene.web.space()?.run(|| {
            let connect = |_| TcpStream::connect_timeout(&service, HANDSHAKE).ok();
            (0..OF_CLIENT + 10).filter_map(connect).collect::<Vec<_>>()
        })?;
        ensure!(held.len() <= OF_CLIENT && held.len() > OF_CLIENT / 2, "{} handshakes", held.len());
        nft("delete table ip holds")?;
        wait::until("the handshakes to end", || Ok((open(node, &scene.web)? >= held.len()).then_some(())))?;
        let count = open(node, &scene.web)?;
        ensure!(count <= OF_CLIENT, "{count} connections");
        drop(held);
        scene.end(node)
    })
}

/// With HTTP/2, headers of many KiB cost a client a few bytes, and the proxy all of them.
#[test]
fn a_request_has_at_most_16_kib_of_headers() -> Result<()> {
    scenario(NodeConfig::default().with_envoy()?, |node| {
        let scene = Scene::new(node)?;
        import(node, &ingress("db", "[{path: /public}]"))?;
        await_realized(node)?;
        let [db, _] = scene.servers()?;
        for (bytes, status) in [(12_000, "200"), (17_000, "431")] {
            let answer = scene.web.space()?.run(|| {
                let mut stream = TcpStream::connect_timeout(&db, wait::PATIENCE)?;
                stream.set_read_timeout(Some(wait::PATIENCE))?;
                write!(stream, "GET /public HTTP/1.1\r\nHost: db\r\nX: {}\r\n\r\n", "x".repeat(bytes))?;
                let mut answer = [0; 12];
                stream.read_exact(&mut answer)?;
                anyhow::Ok(String::from_utf8_lossy(&answer).into_owned())
            })??;
            ensure!(answer == format!("HTTP/1.1 {status}"), "{bytes} bytes: {answer}");
        }
        scene.end(node)
    })
}

/// The proxy's sockets have the translated address, by which the client's programs find none.
#[test]
fn a_connection_through_a_translated_address_takes_one_place() -> Result<()> {
    setrlimit(Resource::RLIMIT_NOFILE, FILES, FILES)?;
    scenario(NodeConfig::default().with_envoy()?, |node| {
        let scene = Scene::new(node)?;
        let service = service(node, &scene)?;
        import(node, &rule("web", "egress", "[{path: '/.*'}]", ""))?;
        await_realized(node)?;
        let mut client = WebClient::connect(scene.web.space()?, service)?;
        for n in 0..10 * OF_CLIENT {
            ensure!(client.ask("GET", "/public", "web", "")? == 200, "request {n}");
        }
        let id = node.endpoint(&scene.web.end)?.id;
        for reason in ["proxy-share-spent", "proxy-unavailable"] {
            let dropped = node.packets(id, "egress", reason)?;
            ensure!(dropped == 0, "{reason}: {dropped}");
        }
        drop(client);
        scene.end(node)
    })
}

/// First packets of a flood at most, should the test fail.
const FLOOD: u32 = 400_000;

/// Sends first packets from ever new ports until told to end, about 10,000 in a second. The client's stack does not
/// see, and so does not reset, what comes back.
fn flood(client: &Pod, server: SocketAddr, ends: &AtomicBool) -> Result<()> {
    let mut deaf = command_in(client.space()?, "nft")?;
    deaf.arg("table inet deaf { chain in { type filter hook input priority 0; policy drop; }; }");
    run(deaf, b"", wait::PATIENCE)?.ok()?;
    const SYN: u8 = 2;
    let (from, to) = (client.end.v4()?.into(), SockaddrStorage::from(server));
    let open = || socket(AddressFamily::Inet, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::Tcp);
    let socket = client.space()?.run(open)?.context("make a raw socket")?;
    for (sequence, port) in (0..FLOOD).zip((1_024..60_000).cycle()) {
        if ends.load(Relaxed) {
            return Ok(());
        }
        let segment = frame::tcp(from, server.ip(), (port, server.port()), sequence, SYN);
        sendto(socket.as_raw_fd(), &segment, &to, MsgFlags::empty()).context("send a first packet")?;
        if sequence % 200 == 0 {
            thread::sleep(Duration::from_millis(20));
        }
    }
    bail!("all {FLOOD} first packets were sent before the others were done")
}

/// Handshakes that the node's stack completed with a SYN cookie.
fn cookies(node: &Node) -> Result<u64> {
    let counters =
        node.space().run(|| fs::read_to_string("/proc/thread-self/net/netstat"))?.context("read counters")?;
    let mut lines = counters.lines().filter_map(|line| line.strip_prefix("TcpExt: ")).map(str::split_whitespace);
    let (Some(mut names), Some(mut values)) = (lines.next(), lines.next()) else { bail!("no counters: {counters}") };
    let at = names.position(|name| name == "SyncookiesRecv").context("no such counter")?;
    Ok(values.nth(at).context("no value")?.parse()?)
}

#[test]
fn a_client_that_floods_a_listener_with_first_packets_keeps_no_other_client_from_it() -> Result<()> {
    scenario(NodeConfig::default().with_envoy()?, |node| {
        let scene = Scene::new(node)?;
        let other = Pod::container(node, "other", "other")?;
        import(node, &ingress("db", "[{path: /public}]"))?;
        await_realized(node)?;
        let [db, _] = scene.servers()?;
        ensure!(get(other.space()?, db, "/public")? == 200, "before");
        let ends = AtomicBool::new(false);
        let served = thread::scope(|scope| {
            let flood = scope.spawn(|| flood(&scene.web, db, &ends));
            let served = (|| {
                wait::until("a client completes a handshake with a cookie", || {
                    ensure!(get(other.space()?, db, "/public")? == 200, "during the flood");
                    Ok((cookies(node)? > 0).then_some(()))
                })?;
                (0..50).try_for_each(|n| {
                    let status = get(other.space()?, db, "/public").with_context(|| format!("request {n}"))?;
                    ensure!(status == 200, "request {n}: {status}");
                    Ok(())
                })
            })();
            ends.store(true, Relaxed);
            served.and(flood.join().map_err(|_| anyhow::anyhow!("the flood panicked"))?)
        });
        served?;
        let lost = node.packets(node.endpoint(&other.end)?.id, "egress", "proxy-unavailable")?;
        ensure!(lost == 0, "{lost} packets had no proxy");
        node.detach(&other.end)?;
        scene.end(node)
    })
}
