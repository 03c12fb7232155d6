//! Rules about requests: policy, the programs and a real Envoy together.

mod closed;
mod grpc;
mod killed;
mod kinds;
mod load;
mod many;
mod moved;
mod nodes;
mod outside;
#[path = "../policy/pods.rs"]
#[allow(dead_code, reason = "shared with the tests of policy")]
mod pods;
mod refused;
mod shares;
#[path = "../../../crates/proxy/tests/world/tls.rs"]
#[allow(unreachable_pub, reason = "shared with the tests of the proxy")]
mod tls;
mod told;

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use wharf_tests::{
    Node, NodeConfig, scenario, wait,
    web::{WebClient, WebServer, get},
};

use crate::pods::{Pod, forget, import};

/// The server's port.
const PORT: u16 = 80;

/// What everybody may ask pods with this label for: a list of `http` rules.
fn ingress(app: &str, http: &str) -> String {
    rule(app, "ingress", http, "")
}

fn rule(app: &str, direction: &str, http: &str, more: &str) -> String {
    format!(
        "apiVersion: cilium.io/v2\nkind: CiliumClusterwideNetworkPolicy\nmetadata: {{name: {app}-{direction}}}\nspec:\n  \
         endpointSelector: {{matchLabels: {{app: {app}}}}}\n  {direction}:\n  - toPorts:\n    - ports: [{{port: '80', \
         protocol: TCP}}]\n      rules: {{http: {http}{more}}}\n---\n"
    )
}

/// A client and a server.
struct Scene {
    web: Pod,
    db: Pod,
    server: WebServer,
}

impl Scene {
    fn new(node: &Node) -> Result<Self> {
        let (web, db) = (Pod::container(node, "web", "web")?, Pod::container(node, "db", "db")?);
        let server = WebServer::start(db.space()?, PORT)?;
        Ok(Self { web, db, server })
    }

    fn servers(&self) -> Result<[SocketAddr; 2]> {
        Ok(self.db.end.both()?.map(|address: IpAddr| SocketAddr::new(address, PORT)))
    }

    /// The status of the answer, by both families.
    fn get(&self, path: &str) -> Result<u16> {
        let [v4, v6] = self.servers()?;
        let (by4, by6) = (get(self.web.space()?, v4, path)?, get(self.web.space()?, v6, path)?);
        ensure!(by4 == by6, "IPv4 {by4}, IPv6 {by6}");
        Ok(by4)
    }

    fn end(self, node: &Node) -> Result<()> {
        let Self { web, db, server } = self;
        drop(server);
        [web, db].iter().try_for_each(|pod| node.detach(&pod.end))?;
        end(node)
    }
}

/// Without rules, and without the way to the proxy, which stays some seconds for connections that end.
fn end(node: &Node) -> Result<()> {
    forget(node)?;
    wait::until("the way to the proxy is taken away", || Ok(node.audit()?.findings.is_empty().then_some(())))
}

/// Waits until Envoy is connected and has all that policy asks.
fn await_realized(node: &Node) -> Result<()> {
    wait::until("policy is realized", || {
        let list = node.ask(async |client| client.policies().await)?;
        Ok((list.realized == list.revision).then_some(()))
    })
}

#[test]
fn requests_that_rules_name_pass_and_others_are_refused() -> Result<()> {
    scenario(NodeConfig::default().with_envoy()?, |node| {
        let scene = Scene::new(node)?;
        ensure!(scene.get("/secret")? == 200, "before there is a policy");
        import(node, &ingress("db", "[{method: GET, path: /public}]"))?;
        await_realized(node)?;
        ensure!(scene.get("/public")? == 200, "allowed");
        ensure!(scene.get("/secret")? == 403, "denied");
        ensure!(scene.get("/public/../secret")? == 403, "denied by another name");
        let served = scene.server.served();
        let own = scene.web.end.both()?;
        ensure!(
            served.iter().all(|request| own.contains(&request.client.ip().to_canonical())),
            "the server sees the client's own address: {served:?}"
        );
        // The egress rules of the client, too: both must let a request pass.
        import(node, &rule("web", "egress", "[{path: '/.*'}]", ""))?;
        await_realized(node)?;
        ensure!((scene.get("/public")?, scene.get("/secret")?) == (200, 403), "both proxied");
        import(node, &rule("web", "egress", "[{path: /other}]", ""))?;
        await_realized(node)?;
        ensure!(scene.get("/public")? == 403, "the client's rules deny");
        scene.end(node)
    })
}

#[test]
fn the_proxy_goes_on_without_the_agent_and_the_agent_without_the_proxy() -> Result<()> {
    scenario(NodeConfig::default().with_envoy()?, |node| {
        let scene = Scene::new(node)?;
        import(node, &ingress("db", "[{path: /public}]"))?;
        await_realized(node)?;
        let [to, _] = scene.servers()?;
        let mut client = WebClient::connect(scene.web.space()?, to)?;
        ensure!(client.ask("GET", "/public", "db", "")? == 200, "before");
        let envoy = node.envoy().context("Envoy")?;
        node.kill_agent()?;
        ensure!(client.ask("GET", "/public", "db", "")? == 200, "an old connection, without an agent");
        ensure!(scene.get("/public")? == 200 && scene.get("/secret")? == 403, "new ones, without an agent");
        node.start_agent()?;
        // Envoy connects again some time after the agent is ready.
        let change = import(node, &pods::network_policy("other", "{podSelector: {matchLabels: {app: other}}}"))?;
        ensure!(change.realized == change.revision, "right after the agent's start: {change:?}");
        ensure!(client.ask("GET", "/public", "db", "")? == 200, "after the agent's start");
        await_realized(node)?;
        ensure!(node.envoy() == Some(envoy), "the next agent takes it over");
        ensure!(scene.get("/public")? == 200 && scene.get("/secret")? == 403, "as before");

        node.signal_envoy(Signal::SIGKILL)?;
        wait::until("another Envoy serves", || {
            let other = node.envoy().is_some_and(|pid| pid != envoy);
            Ok((other && scene.get("/public").ok() == Some(200)).then_some(()))
        })?;
        ensure!(scene.get("/secret")? == 403, "by the new one, too");
        scene.end(node)
    })
}

#[test]
fn without_a_proxy_connections_are_dropped_or_pass_as_the_rule_says() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--ip-rest-ms", "200"]), |node| {
        let scene = Scene::new(node)?;
        let [to, _] = scene.servers()?;
        import(node, &ingress("db", "[{path: /public}]"))?;
        let reaches = || scene.web.reaches(to.ip(), pods::Ask::Tcp(PORT));
        ensure!(!reaches()?, "dropped");
        let [from, at] = [scene.web.end.v4()?.to_string(), to.ip().to_string()];
        let explain = || node.wharf(&["policy", "explain", "--from", &from, "--to", &at, "--port", "80"]);
        let told = explain()?;
        ensure!(
            told.code() == 1 && told.stdout.starts_with("denied: a rule hands it to the proxy"),
            "{}",
            told.describe()
        );
        let dropped = node.packets(node.endpoint(&scene.web.end)?.id, "egress", "proxy-unavailable")?;
        ensure!(dropped > 0, "and told");
        import(node, &rule("db", "ingress", "[{path: /public}]", ", failOpen: true"))?;
        ensure!(scene.get("/secret")? == 200, "passes unseen");
        let told = explain()?;
        ensure!(told.code() == 0 && told.stdout.contains("passes unseen"), "{}", told.describe());
        // Names of TLS handshakes, too.
        let of_names = |more: &str| {
            let rule = rule("db", "ingress", "[{}]", "");
            import(node, &rule.replace("rules: {http: [{}]}", &format!("serverNames: [db.example]{more}")))
        };
        of_names("")?;
        ensure!(!reaches()?, "dropped");
        of_names("\n      rules: {failOpen: true}")?;
        ensure!(scene.get("/secret")? == 200, "passes unseen");
        let began = std::time::Instant::now();
        node.detach(&scene.db.end).context("a proxy that is not there holds no delete")?;
        ensure!(began.elapsed() < wait::PATIENCE / 10, "the delete took {:?}", began.elapsed());
        many::nothing_left(node)?;
        let Scene { web, server, .. } = scene;
        drop(server);
        node.detach(&web.end)?;
        end(node)
    })
}

#[test]
fn a_proxy_that_is_paused_holds_a_delete_no_longer_than_its_bound() -> Result<()> {
    addresses_rest_until(Signal::SIGCONT)
}

#[test]
fn the_addresses_of_a_delete_that_gave_up_are_free_when_the_proxy_has_ended() -> Result<()> {
    addresses_rest_until(Signal::SIGKILL)
}

/// A delete gives a paused Envoy up; its addresses are not given out before Envoy has got this signal.
fn addresses_rest_until(signal: Signal) -> Result<()> {
    scenario(
        NodeConfig::default().flags(&["--proxy-timeout-ms", "1000", "--ip-rest-ms", "200"]).with_envoy()?,
        |node| {
            let scene = Scene::new(node)?;
            import(node, &ingress("db", "[{path: /public}]"))?;
            await_realized(node)?;
            node.signal_envoy(Signal::SIGSTOP)?;
            let began = std::time::Instant::now();
            node.detach(&scene.db.end).context("a proxy that does not answer fails no delete")?;
            let took = began.elapsed();
            ensure!(took.as_millis() >= 1_000 && took.as_millis() < 4_000, "{took:?}");
            let blocked = || -> Result<Vec<String>> {
                let ipam: wharf_api::IpamView = serde_json::from_value(node.http("GET", "/v1/ipam", None)?.json()?)?;
                Ok(ipam.resting.into_iter().filter_map(|address| address.blocked).collect())
            };
            wait::until("its addresses rest until the proxy forgot them", || {
                let blocked = blocked()?;
                Ok((blocked.len() == 2 && blocked.iter().all(|by| by.contains("ingress-15000"))).then_some(()))
            })?;
            node.signal_envoy(signal)?;
            wait::until("the addresses are free", || Ok(blocked()?.is_empty().then_some(())))?;
            let Scene { web, server, .. } = scene;
            drop(server);
            node.detach(&web.end)?;
            end(node)
        },
    )
}
