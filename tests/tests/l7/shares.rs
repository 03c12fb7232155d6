//! What a container takes of the proxy's connections.

use std::{io::Write as _, net::SocketAddr, net::TcpStream};

use anyhow::{Context as _, Result, ensure};
use nix::sys::resource::{Resource, setrlimit};
use wharf_api::Health;
use wharf_tests::{
    NodeConfig, scenario, wait,
    web::{WebServer, get},
};

use crate::{
    PORT, Scene, await_realized, ingress,
    pods::{Pod, import},
};

/// Files that the agent and Envoy may open, and connections that Envoy takes with them: less 512, the half.
const FILES: u64 = 3_072;
const CONNECTIONS: usize = 1_280;

#[test]
fn a_container_that_spends_its_share_takes_no_other_ones_and_is_named() -> Result<()> {
    setrlimit(Resource::RLIMIT_NOFILE, FILES, FILES)?;
    scenario(NodeConfig::default().with_envoy()?, |node| {
        let scene = Scene::new(node)?;
        let other = Pod::container(node, "other", "other")?;
        let server = WebServer::start(other.space()?, PORT)?;
        import(node, &(ingress("db", "[{path: /public}]") + &ingress("other", "[{path: /other}]")))?;
        await_realized(node)?;
        let to = SocketAddr::new(other.end.both()?[0], PORT);
        ensure!(get(scene.web.space()?, to, "/other")? == 200, "before");

        let [db, _] = scene.servers()?;
        let held: Vec<TcpStream> = scene.web.space()?.run(|| {
            let half = |mut stream: TcpStream| stream.write_all(b"GET /public HTTP/1.1\r\nX: ").map(|()| stream).ok();
            (0..CONNECTIONS + 64).filter_map(|_| half(TcpStream::connect(db).ok()?)).collect()
        })?;
        ensure!(held.len() > CONNECTIONS / 2, "{} connections", held.len());
        ensure!(get(scene.web.space()?, to, "/other")? == 200, "another container's requests pass");
        let id = node.endpoint(&scene.db.end)?.id;
        let mut last = String::new();
        let named = wait::until("the status names the container", || {
            let status = node.ask(async |client| client.status().await)?;
            let proxy = status.components.into_iter().find(|row| row.name == "proxy").context("the proxy")?;
            last = proxy.message;
            let named = last.contains(&format!("endpoint {id} (")) && last.contains("has used its share of 80 proxy");
            Ok((named && proxy.health == Health::Degraded).then_some(()))
        });
        named.with_context(|| last)?;

        drop(held);
        wait::until("the share is free", || Ok((scene.get("/public").ok() == Some(200)).then_some(())))?;
        drop(server);
        node.detach(&other.end)?;
        scene.end(node)
    })
}
