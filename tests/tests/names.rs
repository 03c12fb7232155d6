//! Rules about names: queries of DNS, and servers by name.

#[path = "policy/pods.rs"]
#[allow(dead_code, reason = "shared with the tests of policy")]
mod pods;

use std::{
    io::{Read as _, Write as _},
    net::IpAddr,
};

use anyhow::{Context as _, Result, ensure};
use wharf_tests::{
    Node, NodeConfig,
    dns::{DnsServer, NXDOMAIN, Over, REFUSED, Zone, ask},
    echo,
    process::ip,
    scenario, wait,
    world::{WORLD, World},
};

use crate::pods::{Ask, Pod, forget, import};

/// Servers of the world beside its resolver.
const API: [&str; 2] = ["198.51.100.3", "2001:db8:7::3"];
/// See [`API`].
const ELSEWHERE: [&str; 2] = ["198.51.100.4", "2001:db8:7::4"];

/// Clients may ask the servers of these networks for names below `test`, and reach `api.test` and what is below
/// `app.test`.
fn rules(more: &str) -> String {
    format!(
        "apiVersion: cilium.io/v2\nkind: CiliumClusterwideNetworkPolicy\nmetadata: {{name: names}}\nspec:\n  \
         endpointSelector: {{matchLabels: {{app: web}}}}\n  egress:\n  - toEntities: [all]\n    toPorts:\n    - ports: [{{port: '53', \
         protocol: ANY}}]\n      rules: {{dns: [{{matchName: api.test}}, {{matchPattern: '*.app.test'}}, {{matchName: none.test}}]{more}}}\n  \
         - toFQDNs: [{{matchName: api.test}}, {{matchPattern: '*.app.test'}}]\n"
    )
}

fn both(texts: [&str; 2]) -> Result<[IpAddr; 2]> {
    let [v4, v6] = texts;
    Ok([v4.parse()?, v6.parse()?])
}

fn zone() -> Result<Zone> {
    let (api, elsewhere) = (both(API)?, both(ELSEWHERE)?);
    let names = [("api.test", api), ("eu.app.test", elsewhere), ("secret.test", elsewhere)];
    Ok(names.map(|(name, addresses)| (name.to_owned(), addresses.to_vec())).into())
}

struct Scene {
    world: World,
    resolver: DnsServer,
    web: Pod,
}

impl Scene {
    fn new(node: &Node) -> Result<Self> {
        let world = World::join(node)?;
        for [v4, v6] in [API, ELSEWHERE] {
            ip(world.space()?, &format!("address add {v4}/24 dev eth0"))?;
            ip(world.space()?, &format!("address add {v6}/64 dev eth0 nodad"))?;
        }
        let resolver = DnsServer::start(world.space()?, &both(WORLD)?, zone()?)?;
        Ok(Self { world, resolver, web: Pod::container(node, "web", "web")? })
    }

    /// Whether the web reaches a server of the world.
    fn reaches(&self, address: IpAddr) -> Result<bool> {
        self.web.reaches(address, Ask::Tcp(self.world.echo().tcp_at(address).port()))
    }

    fn ask(&self, server: IpAddr, name: &str, over: Over) -> Result<(u8, Vec<IpAddr>)> {
        ask(self.web.space()?, server, name, over)
    }

    fn end(self, node: &Node) -> Result<()> {
        node.detach(&self.web.end)?;
        forget(node)?;
        wait::until("the way to the proxy is taken away", || Ok(node.audit()?.findings.is_empty().then_some(())))
    }
}

#[test]
fn an_address_is_reached_as_soon_as_its_name_is_answered_and_no_other_is() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let scene = Scene::new(node)?;
        import(node, &rules(""))?;
        for (index, server) in both(WORLD)?.into_iter().enumerate() {
            let (api, elsewhere) = (both(API)?[index], both(ELSEWHERE)?[index]);
            ensure!(!scene.reaches(api)?, "{api} before its name is known");
            ensure!(scene.ask(server, "api.test", Over::Udp)? == (0, vec![api]), "over UDP");
            // At once: the answer comes after the rows.
            echo::tcp(scene.web.space()?, scene.world.echo().tcp_at(api), 10_000).context("by name")?;
            for over in [Over::Udp, Over::Tcp] {
                ensure!(scene.ask(server, "secret.test", over)? == (REFUSED, vec![]), "{over:?}: a name of no rule");
                ensure!(scene.ask(server, "none.test", over)? == (NXDOMAIN, vec![]), "{over:?}: a name that is not");
            }
            ensure!(!scene.reaches(elsewhere)?, "{elsewhere} has no name yet");
            ensure!(scene.ask(server, "EU.App.Test", Over::Tcp)? == (0, vec![elsewhere]), "over TCP");
            echo::tcp(scene.web.space()?, scene.world.echo().tcp_at(elsewhere), 100).context("by a pattern")?;
        }
        let asked = scene.resolver.asked();
        ensure!(asked.iter().all(|(_, name)| name != "secret.test"), "the resolver is not asked: {asked:?}");
        let told = node.wharf(&["proxy", "names"])?.ok()?;
        ensure!(told.contains("api.test") && told.contains(ELSEWHERE[1]) && !told.contains("secret"), "{told}");
        let told = node.wharf(&["proxy", "listeners"])?.ok()?;
        ensure!(told.contains("DNS of *.app.test") && told.contains("serves"), "{told}");
        let findings = node.audit()?.findings;
        ensure!(findings.is_empty(), "{findings:?}");
        scene.end(node)
    })
}

#[test]
fn a_query_may_have_the_port_that_the_agent_had_to_the_same_server() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let scene = Scene::new(node)?;
        import(node, &rules(""))?;
        for space in [node.space(), scene.web.space()?] {
            space.choose_ports_from(40_000, 40_015)?;
        }
        for (server, api) in both(WORLD)?.into_iter().zip(both(API)?) {
            for nth in 0..40 {
                let answer =
                    scene.ask(server, "api.test", Over::Udp).with_context(|| format!("{server}, query {nth}"))?;
                ensure!(answer == (0, vec![api]), "{server}, query {nth}: {answer:?}");
            }
        }
        scene.end(node)
    })
}

#[test]
fn names_outlive_the_agent_and_queries_wait_for_it() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let scene = Scene::new(node)?;
        import(node, &rules(""))?;
        let ([server, _], [api, _]) = (both(WORLD)?, both(API)?);
        ensure!(scene.ask(server, "api.test", Over::Udp)?.1 == [api], "before");
        let mut stream = scene.web.connect(scene.world.echo().tcp_at(api))?;
        for round in 0..3 {
            node.kill_agent()?;
            ensure!(scene.reaches(api)?, "round {round}: without an agent");
            ensure!(scene.ask(server, "api.test", Over::Udp).is_err(), "round {round}: nobody judges");
            node.start_agent()?;
            ensure!(scene.reaches(api)?, "round {round}: with the next agent");
            ensure!(!scene.reaches(both(ELSEWHERE)?[0])?, "round {round}: nothing else");
            ensure!(scene.ask(server, "api.test", Over::Udp)?.1 == [api], "round {round}: asked again");
        }
        stream.write_all(b"on").and_then(|()| stream.read_exact(&mut [0; 2])).context("a connection goes on")?;
        scene.end(node)
    })
}

#[test]
fn the_resolver_may_be_the_node_or_another_container() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let scene = Scene::new(node)?;
        let resolver = Pod::container(node, "dns", "dns")?;
        // The node's own address as the container sees it.
        let gateways = scene.web.end.gateways()?;
        let _on_the_node = DnsServer::start(node.space(), &gateways, zone()?)?;
        let in_a_container = DnsServer::start(resolver.space()?, &resolver.end.both()?, zone()?)?;
        import(node, &rules(""))?;
        for (index, api) in both(API)?.into_iter().enumerate() {
            let elsewhere = both(ELSEWHERE)?[index];
            for over in [Over::Udp, Over::Tcp] {
                let answer = scene.ask(gateways[index], "api.test", over)?;
                ensure!(answer == (0, vec![api]), "{over:?}: of the node {answer:?}");
                let answer = scene.ask(resolver.end.both()?[index], "eu.app.test", over)?;
                ensure!(answer == (0, vec![elsewhere]), "{over:?}: of a container {answer:?}");
            }
            ensure!(scene.reaches(api)? && scene.reaches(elsewhere)?, "both are known");
        }
        let own = scene.web.end.both()?;
        let asked = in_a_container.asked();
        ensure!(
            asked.iter().all(|(client, _)| own.contains(&client.ip().to_canonical())),
            "in the client's name: {asked:?}"
        );
        node.detach(&resolver.end)?;
        scene.end(node)
    })
}

#[test]
fn queries_pass_unseen_without_an_agent_where_the_rule_says_so() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let scene = Scene::new(node)?;
        import(node, &rules(", failOpen: true"))?;
        let [server, _] = both(WORLD)?;
        ensure!(scene.ask(server, "secret.test", Over::Udp)?.0 == REFUSED, "judged");
        node.kill_agent()?;
        ensure!(scene.ask(server, "secret.test", Over::Udp)?.0 == 0, "unseen");
        node.start_agent()?;
        ensure!(scene.ask(server, "secret.test", Over::Udp)?.0 == REFUSED, "judged again");
        scene.end(node)
    })
}
