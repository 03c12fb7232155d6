//! Services: addresses of `--service-cidr`, which the node translates. A client's rules are about what is behind them.

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use wharf_tests::{
    Node, NodeConfig,
    echo::{self, EchoServer},
    process::{command_in, run},
    scenario, wait,
    world::{NODE, World},
};

use crate::{
    pods::{Ask, DENIED, Pod, document, forget, import, network_policy},
    published::talk,
};

const CIDRS: &str = "--service-cidr=198.18.5.0/24,2001:db8:5::/64";
const PORT: u16 = 80;

/// What a service leads to.
#[derive(Debug, Clone, Copy)]
enum Behind {
    Db = 1,
    Cache,
    World,
    Node,
}

/// The service's address in each family.
fn service(behind: Behind) -> Result<[IpAddr; 2]> {
    let n = behind as u8;
    Ok([format!("198.18.5.{n}").parse()?, format!("2001:db8:5::{n}").parse()?])
}

fn nft(node: &Node, rules: &str) -> Result<()> {
    let mut command = command_in(node.space(), "nft")?;
    command.args(["-f", "-"]);
    run(command, rules.as_bytes(), Duration::from_secs(10))?.ok().map(drop)
}

/// Leads every port of a service of TCP and UDP to a server's.
fn lead(node: &Node, behind: Behind, to: [IpAddr; 2], echo: &EchoServer) -> Result<()> {
    for (service, to) in service(behind)?.into_iter().zip(to) {
        let (family, to) = match to {
            IpAddr::V4(to) => ("ip", to.to_string()),
            IpAddr::V6(to) => ("ip6", format!("[{to}]")),
        };
        let (tcp, udp) = (echo.tcp_at(service).port(), echo.udp_at(service).port());
        nft(
            node,
            &format!(
                "table {family} services {{ chain c {{ type nat hook prerouting priority -100;
                   {family} daddr {service} tcp dport {PORT} dnat to {to}:{tcp}
                   {family} daddr {service} udp dport {PORT} dnat to {to}:{udp}
                 }}
                 }}"
            ),
        )?;
    }
    Ok(())
}

/// Whom a client reaches.
fn hold(web: &Pod, passes: &[Behind], when: &str) -> Result<()> {
    wait::all([Behind::Db, Behind::Cache, Behind::World, Behind::Node], |behind| {
        let expected = passes.iter().any(|one| *one as u8 == behind as u8);
        wait::all(service(behind)?, |address| {
            // The node answers a datagram from another address of its own.
            let asks: &[Ask] =
                if matches!(behind, Behind::Node) { &[Ask::Tcp(PORT)] } else { &[Ask::Tcp(PORT), Ask::Udp(PORT)] };
            wait::all(asks, |ask| {
                let answered = web.reaches(address, *ask)?;
                ensure!(answered == expected, "{when}: the service of {behind:?} at {address}, {ask:?}: {answered}");
                Ok(())
            })
        })
    })
}

/// A policy of the client's: it sends to these alone.
fn allow(node: &Node, peers: &str) -> Result<()> {
    let spec = format!("{{podSelector: {{matchLabels: {{app: web}}}}, policyTypes: [Egress], egress: [{peers}]}}");
    import(node, &network_policy("web", &spec)).map(drop)
}

#[test]
fn a_clients_rules_are_about_the_pods_behind_a_service() -> Result<()> {
    scenario(NodeConfig::default().flags(&[CIDRS]), |node| {
        let world = World::join(node)?;
        let web = Pod::container(node, "web", "web")?;
        let [db, cache] = ["db", "cache"].map(|name| Pod::container(node, name, name));
        let (db, cache) = (db?, cache?);
        let echoes = [EchoServer::start(db.space()?)?, EchoServer::start(cache.space()?)?];
        lead(node, Behind::Db, db.end.both()?, &echoes[0])?;
        lead(node, Behind::Cache, cache.end.both()?, &echoes[1])?;
        lead(node, Behind::World, world.addresses(), world.echo())?;
        let own = EchoServer::start(node.space())?;
        lead(node, Behind::Node, [NODE[0].parse()?, NODE[1].parse()?], &own)?;

        hold(&web, &[Behind::Db, Behind::Cache, Behind::World, Behind::Node], "without a policy")?;
        let streams = service(Behind::Cache)?.map(|to| web.connect(SocketAddr::new(to, PORT)));
        let streams = streams.into_iter().collect::<Result<Vec<TcpStream>>>()?;
        streams.iter().try_for_each(|stream| talk(stream, DENIED)).context("without a policy")?;

        allow(node, "{to: [{podSelector: {matchLabels: {app: db}}}]}")?;
        for stream in &streams {
            ensure!(talk(stream, DENIED).is_err(), "a connection to a service that is denied goes on");
        }
        hold(&web, &[Behind::Db], "the pods of the database alone")?;
        let (of_client, of_cache) = (node.endpoint(&web.end)?.id, node.endpoint(&cache.end)?.id);
        ensure!(node.packets(of_cache, "ingress", "peer-policy-denied")? > 0, "told at the one that was not reached");
        ensure!(node.packets(of_client, "egress", "policy-denied")? == 0, "undecided at the client");
        // Large datagrams in both directions: of their fragments only the first has ports.
        for address in service(Behind::Db)? {
            echo::udp(web.space()?, SocketAddr::new(address, PORT), 4_000).context("fragments")?;
            echo::tcp(web.space()?, SocketAddr::new(address, PORT), 200_000)?;
        }

        // As it was written, too: the service's own address.
        allow(node, "{to: [{ipBlock: {cidr: 198.18.5.3/32}}, {ipBlock: {cidr: '2001:db8:5::3/128'}}]}")?;
        hold(&web, &[Behind::World], "the address of the service")?;

        allow(node, "{to: [{podSelector: {matchLabels: {app: cache}}}]}")?;
        hold(&web, &[Behind::Cache], "the pods of the cache alone")?;
        forget(node)?;
        hold(&web, &[Behind::Db, Behind::Cache, Behind::World, Behind::Node], "without a policy again")?;
        [web, db, cache].iter().try_for_each(|pod| node.detach(&pod.end))
    })
}

/// A server behind a service that sends without being asked.
struct Sender {
    client: TcpStream,
    server: TcpStream,
}

impl Sender {
    fn start(node: &Node, web: &Pod, cache: &Pod) -> Result<Self> {
        const HERE: u16 = 8_181;
        let ([service, _], to) = (service(Behind::Cache)?, cache.end.v4()?);
        nft(node, &format!("add rule ip services c ip daddr {service} tcp dport {HERE} dnat to {to}:{HERE}"))?;
        let listener = cache.space()?.run(|| TcpListener::bind((to, HERE)))??;
        let client = web.connect(SocketAddr::new(service, HERE))?;
        let (server, _) = listener.accept()?;
        [&client, &server].iter().try_for_each(|end| end.set_read_timeout(Some(DENIED)))?;
        Ok(Self { client, server })
    }

    /// Whether a byte arrives, at the client or at the server.
    fn arrives(&self, at_client: bool) -> Result<bool> {
        let (mut from, mut to) = if at_client { (&self.server, &self.client) } else { (&self.client, &self.server) };
        from.write_all(b"x")?;
        Ok(to.read(&mut [0; 1]).is_ok_and(|bytes| bytes == 1))
    }
}

#[test]
fn the_address_of_a_service_is_accepted_wherever_it_leads() -> Result<()> {
    scenario(NodeConfig::default().flags(&[CIDRS]), |node| {
        let (web, cache) = (Pod::container(node, "web", "web")?, Pod::container(node, "cache", "cache")?);
        let echo = EchoServer::start(cache.space()?)?;
        lead(node, Behind::Cache, cache.end.both()?, &echo)?;
        let accepts = "{to: [{ipBlock: {cidr: 198.18.5.2/32}}, {ipBlock: {cidr: '2001:db8:5::2/128'}}]}";
        let explain = |to: IpAddr| -> Result<Value> {
            let from = node.endpoint(&web.end)?.id.to_string();
            let query = ["policy", "explain", "--from", &from, "--to", &to.to_string(), "--port", "80", "-o", "json"];
            Ok(serde_json::from_str(&node.wharf(&query)?.stdout)?)
        };
        allow(node, accepts)?;
        for (address, own) in service(Behind::Cache)?.into_iter().zip(cache.end.both()?) {
            ensure!(web.reaches(address, Ask::Tcp(PORT))? && web.reaches(address, Ask::Udp(PORT))?, "{address}");
            echo::udp(web.space()?, SocketAddr::new(address, PORT), 4_000).context("fragments")?;
            ensure!(explain(address)?["verdict"] == "accept", "{address} explained");
            ensure!(explain(own)?["verdict"] == "deny", "{own} explained");
        }
        ensure!(!web.reaches(cache.end.both()?[0], Ask::Tcp(PORT))?, "the container without its service");

        // Answers come first after changes of policy.
        let sender = Sender::start(node, &web, &cache)?;
        import(node, &network_policy("other", "{podSelector: {matchLabels: {app: nobody}}}"))?;
        ensure!(sender.arrives(true)? && sender.arrives(false)?, "after a change that is about neither");
        allow(node, "")?;
        ensure!(!sender.arrives(true)?, "an answer of a service that is not accepted any more");
        ensure!(!sender.arrives(false)?, "what is sent to it after the answer");

        allow(node, accepts)?;
        let deny =
            "{endpointSelector: {matchLabels: {app: web}}, egressDeny: [{toEndpoints: [{matchLabels: {app: cache}}]}]}";
        import(node, &document("cilium.io/v2", "CiliumNetworkPolicy", "{name: deny}", deny))?;
        let [address, _] = service(Behind::Cache)?;
        ensure!(!web.reaches(address, Ask::Tcp(PORT))?, "a deny rule about the container");
        let told = explain(address)?;
        ensure!(told["note"].as_str().is_some_and(|note| note.contains("deny rules about the endpoint")), "{told}");
        [web, cache].iter().try_for_each(|pod| node.detach(&pod.end))
    })
}

#[test]
fn explain_says_that_a_service_is_judged_behind_its_address() -> Result<()> {
    scenario(NodeConfig::default().flags(&[CIDRS]), |node| {
        let web = Pod::container(node, "web", "web")?;
        allow(node, "{to: [{podSelector: {matchLabels: {app: db}}}]}")?;
        let explain = |to: &str| -> Result<Value> {
            let from = node.endpoint(&web.end)?.id.to_string();
            let told = node.wharf(&["policy", "explain", "--from", &from, "--to", to, "--port", "80", "-o", "json"])?;
            Ok(serde_json::from_str(&told.stdout)?)
        };
        let note = explain("198.18.5.1")?["note"].as_str().unwrap_or_default().to_owned();
        ensure!(note.contains("service"), "{note:?}");
        ensure!(explain("198.18.6.1")?["note"].is_null(), "an address that is no service's");
        forget(node)?;
        node.detach(&web.end)
    })
}
