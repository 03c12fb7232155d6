//! Requests between containers of two nodes: the rules of the client's node and of the server's node.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, Result, ensure};
use wharf_feed::v1;
use wharf_tests::{
    Node,
    cluster::{Feeds, NAMES, Nodes},
    envoy,
    feed::{namespace, pod},
    wait,
    web::{WebClient, WebServer, get},
};

use crate::{
    PORT, await_realized, end,
    pods::{Ask, Pod, forget, import},
};

const SHOP: &str = "shop";
/// Name, which is also the label `app`, and number of the node.
const PODS: [(&str, usize); 3] = [("web", 0), ("other", 0), ("db", 1)];

/// Requests between pods with the label `app`, by paths. `direction`: `ingress` and `fromEndpoints`, or `egress` and
/// `toEndpoints`.
fn rule(app: &str, [direction, peers]: [&str; 2], peer: &str, path: &str) -> String {
    format!(
        "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {{name: {app}, namespace: {SHOP}}}\nspec:\n  \
         endpointSelector: {{matchLabels: {{app: {app}}}}}\n  {direction}:\n  - {peers}: [{{matchLabels: {{app: \
         {peer}}}}}]\n    toPorts:\n    - ports: [{{port: '{PORT}', protocol: TCP}}]\n      rules: {{http: [{{path: \
         '{path}'}}]}}\n"
    )
}

const INGRESS: [&str; 2] = ["ingress", "fromEndpoints"];
const EGRESS: [&str; 2] = ["egress", "toEndpoints"];

/// Before its ADD, a pod has no addresses.
fn rows(pods: &[Pod]) -> Vec<v1::Change> {
    let mut rows = vec![namespace(SHOP, &[])];
    for (i, (name, node)) in PODS.into_iter().enumerate() {
        let addresses: Vec<String> =
            pods.get(i).into_iter().flat_map(|pod| pod.end.addresses()).map(|ip| ip.to_string()).collect();
        let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
        rows.push(pod(name, NAMES[node], &addresses, &[("app", name)]));
    }
    rows
}

/// A client and another one on node a, a server on node b.
struct Scene {
    web: Pod,
    other: Pod,
    db: Pod,
    server: WebServer,
    _feeds: Feeds,
}

impl Scene {
    fn start(joined: &Nodes) -> Result<Self> {
        let mut feeds = Feeds::start(joined, rows(&[]))?;
        let add = |(name, node): (&str, usize)| Pod::without_labels(&joined.nodes[node], SHOP, name);
        let pods = PODS.into_iter().map(add).collect::<Result<Vec<_>>>()?;
        feeds.send(&rows(&pods))?;
        let [web, other, db] = <[Pod; 3]>::try_from(pods).ok().context("three pods")?;
        let server = WebServer::start(db.space()?, PORT)?;
        Ok(Self { web, other, db, server, _feeds: feeds })
    }

    fn servers(&self) -> Result<[SocketAddr; 2]> {
        Ok(self.db.end.both()?.map(|address| SocketAddr::new(address, PORT)))
    }

    /// The client gets these statuses for `/public` and `/secret`. The server sees its own addresses.
    fn must_answer(&self, expected: [u16; 2], when: &str) -> Result<()> {
        let before = self.server.served().len();
        for to in self.servers()? {
            let mut client = WebClient::connect(self.web.space()?, to).context(when.to_owned())?;
            let ask = |client: &mut WebClient, path: &str| client.ask("GET", path, "db", "");
            let found = [ask(&mut client, "/public")?, ask(&mut client, "/secret")?];
            ensure!(found == expected, "{when}, {to}: {found:?}");
        }
        let served = self.server.served();
        let clients: Vec<IpAddr> = served[before..].iter().map(|request| request.client.ip().to_canonical()).collect();
        let passed = expected.into_iter().filter(|status| *status == 200).count();
        let own = self.web.end.both()?.map(|address| vec![address; passed]).concat();
        ensure!(clients == own, "{when}: the server sees {clients:?}, not {own:?}");
        Ok(())
    }

    /// Whether the client without a rule reaches the server.
    fn others_reach(&self, expected: bool) -> Result<()> {
        wait::all(self.servers()?, |to| {
            let reaches = self.other.reaches(to.ip(), Ask::Tcp(PORT))?;
            ensure!(reaches == expected, "the other client reaches {to}: {reaches}");
            Ok(())
        })
    }
}

fn requests(joined: &Nodes) -> Result<()> {
    let [a, b] = [&joined.nodes[0], &joined.nodes[1]];
    let scene = Scene::start(joined)?;
    scene.must_answer([200, 200], "without a policy")?;
    import(b, &rule("db", INGRESS, "web", "/public"))?;
    await_realized(b)?;
    scene.must_answer([200, 403], "by the server's rules")?;
    scene.others_reach(false)?;
    import(a, &rule("web", EGRESS, "db", "/secret"))?;
    await_realized(a)?;
    scene.must_answer([403, 403], "by the rules of both, which have no path in common")?;
    forget(b)?;
    scene.must_answer([403, 200], "by the client's rules")?;
    scene.others_reach(true)?;
    let [to, _] = scene.servers()?;
    ensure!(get(scene.other.space()?, to, "/public")? == 200, "a client without rules");
    let Scene { web, other, db, server, .. } = scene;
    drop(server);
    // Before the waits for their ends.
    forget(a)?;
    [(a, web), (a, other), (b, db)].iter().try_for_each(|(node, pod)| node.detach(&pod.end))?;
    [a, b].into_iter().try_for_each(end)
}

fn hold(routing: &str) -> Result<()> {
    let mut joined = Nodes::join(2, routing)?;
    joined.set_feed();
    let envoy = format!("--envoy={}", envoy::program()?.display());
    joined.nodes.iter_mut().for_each(|node| node.set_flag(&envoy, true));
    joined.nodes.iter_mut().try_for_each(Node::start_agent)?;
    joined.run(|joined| requests(joined))?.end()
}

#[test]
fn requests_to_another_node_are_judged_by_both_nodes_over_native_routes() -> Result<()> {
    hold("native")
}

#[test]
fn requests_to_another_node_are_judged_by_both_nodes_over_the_overlay() -> Result<()> {
    hold("overlay")
}
