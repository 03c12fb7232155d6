//! What containers take of the proxy's connections.

use std::{io::Write as _, net::SocketAddr, net::TcpStream, time::Duration};

use anyhow::{Context as _, Result, ensure};
use nix::sys::resource::{Resource, setrlimit};
use wharf_api::Health;
use wharf_tests::{
    Node, NodeConfig,
    process::{command_in, run},
    scenario, wait,
    web::{WebServer, get},
};

use crate::{
    PORT, Scene, await_realized, ingress,
    pods::{Pod, import},
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
        ensure!(held.len() <= OF_CLIENT && held.len() > OF_CLIENT / 2, "{} connections", held.len());
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
        let address = gone.end.v4()?.to_string();
        let open = || {
            let mut list = command_in(node.space(), "ss")?;
            list.args(["-Htn", "state", "established", "dst", &address]);
            anyhow::Ok(run(list, b"", wait::PATIENCE)?.ok()?.lines().count())
        };
        ensure!(open()? >= OF_CLIENT / 2, "{} connections of the one that goes", open()?);
        node.detach(&gone.end)?;
        wait::until("the proxy's connections of a client that is gone", || Ok((open()? == 0).then_some(())))?;
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
