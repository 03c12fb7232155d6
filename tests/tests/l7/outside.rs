//! Requests that leave the node, and those that come from beyond it.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use wharf_tests::{
    Node, NodeConfig, scenario,
    web::{WebClient, WebServer, get},
    world::{NODE, World},
};

use crate::{
    PORT, await_realized, end,
    pods::{Ask, Pod, answers_every_error, import},
};

/// The port of the node that leads to the container's server.
const PUBLISHED: u16 = 8_080;

/// `/public` alone passes between an endpoint and the world.
fn rules(app: &str, direction: &str, peers: &str) -> String {
    format!(
        "apiVersion: cilium.io/v2\nkind: CiliumClusterwideNetworkPolicy\nmetadata: {{name: outside}}\nspec:\n  \
         endpointSelector: {{matchLabels: {{app: {app}}}}}\n  {direction}:\n  - {peers}: [world]\n    toPorts:\n    \
         - ports: [{{port: '{PORT}', protocol: TCP}}]\n      rules: {{http: [{{path: /public}}]}}\n"
    )
}

/// Who a server saw, for each request.
fn clients(server: &WebServer) -> Vec<String> {
    server.served().iter().map(|request| request.client.ip().to_canonical().to_string()).collect()
}

#[test]
fn requests_to_the_world_are_judged_and_leave_with_the_nodes_address() -> Result<()> {
    scenario(NodeConfig::default().with_envoy()?, |node| {
        let (world, web) = (World::join(node)?, Pod::container(node, "web", "web")?);
        let server = WebServer::start(world.space()?, PORT)?;
        import(node, &rules("web", "egress", "toEntities"))?;
        await_realized(node)?;
        for address in world.addresses() {
            let to = SocketAddr::new(address, PORT);
            let answers = (get(web.space()?, to, "/public")?, get(web.space()?, to, "/secret")?);
            ensure!(answers == (200, 403), "{to}: {answers:?}");
            ensure!(!web.reaches(address, Ask::Tcp(PORT + 1))?, "{to}: another port");
        }
        ensure!(clients(&server) == NODE, "the world sees {:?}", clients(&server));
        node.detach(&web.end)?;
        end(node)
    })
}

#[test]
fn a_client_may_have_the_port_that_the_proxy_has_to_the_same_server() -> Result<()> {
    scenario(NodeConfig::default().with_envoy()?, |node| {
        let (world, web) = (World::join(node)?, Pod::container(node, "web", "web")?);
        let server = WebServer::start(world.space()?, PORT)?;
        import(node, &rules("web", "egress", "toEntities"))?;
        await_realized(node)?;
        // Twelve of sixteen are the client's and twelve the proxy's: eight or more are both's.
        for space in [node.space(), web.space()?] {
            space.choose_ports_from(40_000, 40_015)?;
        }
        for address in world.addresses() {
            let mut clients = Vec::new();
            for nth in 0..12 {
                let mut client = WebClient::connect(web.space()?, SocketAddr::new(address, PORT))?;
                let status =
                    client.ask("GET", "/public", "db", "").with_context(|| format!("{address}, connection {nth}"))?;
                ensure!(status == 200, "{address}, connection {nth}: {status}");
                clients.push(client);
            }
            for client in &mut clients {
                ensure!(client.ask("GET", "/public", "db", "")? == 200, "{address}: all of them go on");
            }
        }
        drop(server);
        node.detach(&web.end)?;
        end(node)
    })
}

/// A server whose port the node publishes.
fn published(node: &Node) -> Result<(Pod, WebServer)> {
    let sandbox = node.sandbox("db")?;
    let server = WebServer::start(sandbox.space()?, PORT)?;
    let ports = json!([{"hostPort": PUBLISHED, "containerPort": PORT, "protocol": "tcp"}]);
    let labels = json!({"cni": {"labels": [{"key": "app", "value": "db"}]}});
    let conf = node.netconf().with("args", labels).with("runtimeConfig", json!({ "portMappings": ports }));
    let end = node.attach_with(&sandbox, "eth0", &conf)?;
    answers_every_error(sandbox.space()?)?;
    Ok((Pod { sandbox, end }, server))
}

#[test]
fn requests_from_the_world_to_a_published_port_are_judged_and_keep_their_address() -> Result<()> {
    scenario(NodeConfig::default().with_envoy()?, |node| {
        let (world, web, (db, server)) = (World::join(node)?, Pod::container(node, "web", "web")?, published(node)?);
        import(node, &rules("db", "ingress", "fromEntities"))?;
        await_realized(node)?;
        for (address, client) in NODE.into_iter().zip(world.addresses()) {
            let to = SocketAddr::new(address.parse()?, PUBLISHED);
            let answers = (get(world.space()?, to, "/public")?, get(world.space()?, to, "/secret")?);
            ensure!(answers == (200, 403), "{to}: {answers:?}");
            ensure!(clients(&server).last() == Some(&client.to_string()), "the server sees {:?}", clients(&server));
            ensure!(!web.reaches(to.ip(), Ask::Tcp(PUBLISHED))?, "{to}: a neighbour is not of the world");
        }
        ensure!(clients(&server).len() == 2, "the server sees {:?}", clients(&server));
        [web, db].iter().try_for_each(|pod| node.detach(&pod.end))?;
        end(node)
    })
}
