//! One container in three networks: two pools of the agent and one of an IPAM plugin, each with routes, labels and an
//! MTU of its own.

use std::net::IpAddr;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use wharf_api::{DeleteQuery, EndpointPatch, PolicyDeleteQuery, PolicyImport, RegenerateLevel};
use wharf_tests::{
    Attached, Node, NodeConfig, Sandbox,
    cni::{DEBIANS_PLUGINS, NetConf},
    crash,
    icmp::{Ping, ping},
    process::ip,
    scenario, wait,
};

const POOLS: &str = "[[pool]]\nname = 'blue'\ncidrs = ['10.99.0.0/16', 'fd99::/64']\n";
/// Interface, label of the network, MTU, and a destination of each family.
const FURTHER: [(&str, &str, u64, [&str; 2]); 2] =
    [("eth1", "blue", 1400, ["10.99.0.0/16", "fd99::/64"]), ("eth2", "far", 1300, ["10.1.0.0/24", "fd01::/64"])];

fn labelled(conf: NetConf, labels: &[(&str, &str)]) -> NetConf {
    let labels: Vec<Value> = labels.iter().map(|(key, value)| json!({"key": key, "value": value})).collect();
    conf.with("args", json!({"cni": {"labels": labels}}))
}

/// The network `blue`: a pool, with routes of the configuration.
fn blue(node: &Node, labels: &[(&str, &str)]) -> NetConf {
    let routes: Vec<Value> = FURTHER[0].3.iter().map(|dst| json!({ "dst": dst })).collect();
    let conf = node.netconf().with("name", json!("blue")).with("pool", json!("blue")).with("mtu", json!(1400));
    labelled(conf.with("routes", routes.into()), labels)
}

/// The network `far`: an IPAM plugin, which has the routes.
fn far(node: &Node, labels: &[(&str, &str)]) -> NetConf {
    let ranges = json!([[{"subnet": "10.1.0.0/24"}], [{"subnet": "fd01::/64"}]]);
    let routes: Vec<Value> = FURTHER[1].3.iter().map(|dst| json!({ "dst": dst })).collect();
    let directory = node.dirs().root.join("host-local");
    let ipam = json!({"type": "host-local", "dataDir": directory, "ranges": ranges, "routes": routes});
    let conf = node.netconf().version("1.0.0").with("name", json!("far")).with("mtu", json!(1300));
    labelled(conf.with("ipam", ipam), labels)
}

/// The container, its interfaces, and a peer in each network.
struct Scene {
    inside: Sandbox,
    ends: [Attached; 3],
    peers: [(Sandbox, Attached); 3],
}

fn scene(node: &Node) -> Result<Scene> {
    let program = format!("{DEBIANS_PLUGINS}/host-local");
    ensure!(std::path::Path::new(&program).exists(), "{program} is missing: install containernetworking-plugins");
    let inside = node.sandbox("inside")?;
    let own = |network| [("app", "inside"), ("network", network)];
    let ends = [
        node.attach(&inside)?,
        node.attach_with(&inside, "eth1", &blue(node, &own("blue")))?,
        node.attach_with(&inside, "eth2", &far(node, &own("far")))?,
    ];
    let peer = |name: &str, conf: &NetConf| -> Result<(Sandbox, Attached)> {
        let sandbox = node.sandbox(name)?;
        let end = node.attach_with(&sandbox, "eth0", conf)?;
        Ok((sandbox, end))
    };
    let friend = [("app", "friend")];
    let peers =
        [peer("near", &node.netconf())?, peer("blue", &blue(node, &friend))?, peer("far", &far(node, &friend))?];
    Ok(Scene { inside, ends, peers })
}

impl Scene {
    /// Each network's peer and the container reach each other by that network's interface; as policy lets them.
    fn talk(&self, admitted: [bool; 3]) -> Result<()> {
        let networks = self.ends.iter().zip(&self.peers).zip(admitted);
        for ((end, (peer, peer_end)), admitted) in networks {
            for address in end.both()? {
                let report = Ping { to: address, count: 1, payload: 56 }.run(peer.space()?)?;
                ensure!((report.answered == 1) == admitted, "to {} at {address}: {report:?}", end.ifname);
            }
            for address in peer_end.both()? {
                ping(self.inside.space()?, address)?.must_answer().with_context(|| format!("from {}", end.ifname))?;
            }
        }
        Ok(())
    }

    /// The container has one default route of each family, and each further network's routes and MTU alone.
    fn routed(&self) -> Result<()> {
        let space = self.inside.space()?;
        for family in ["-4", "-6"] {
            let default = ip(space, &format!("{family} route show default"))?;
            ensure!(default.lines().count() == 1 && default.contains("dev eth0"), "{family}: {default}");
        }
        for (ifname, _, mtu, destinations) in FURTHER {
            ensure!(ip(space, &format!("link show {ifname}"))?.contains(&format!("mtu {mtu} ")), "{ifname}");
            for (family, to) in ["-4", "-6"].into_iter().zip(destinations) {
                let route = ip(space, &format!("{family} route show {to}"))?;
                ensure!(route.contains(ifname), "{ifname} has no route to {to}: {route}");
            }
        }
        Ok(())
    }
}

#[test]
fn each_network_of_a_container_has_its_own_routes_mtu_and_policy() -> Result<()> {
    scenario(NodeConfig::default().toml(POOLS), |node| {
        let s = scene(node)?;
        for (end, (_, _, mtu, destinations)) in s.ends.iter().skip(1).zip(FURTHER) {
            let told: Vec<&str> =
                end.result["routes"].as_array().into_iter().flatten().filter_map(|r| r["dst"].as_str()).collect();
            ensure!(told == destinations, "{}", end.result);
            ensure!(u64::from(node.endpoint(end)?.mtu) == mtu, "{:?}", node.endpoint(end)?);
        }
        s.routed()?;
        s.talk([true; 3])?;
        // Whoever asks, and whatever the container's other routes are: the answer leaves by the interface that was
        // asked.
        let (wide, conf) =
            (node.sandbox("wide")?, node.netconf().with("name", json!("wide")).with("pool", json!("blue")));
        let wide_end = node.attach_with(&wide, "eth0", &conf)?;
        let [first, further @ ..] = &s.ends;
        for address in first.both()? {
            ping(wide.space()?, address)?.must_answer().context("from the second network to the first interface")?;
        }
        for end in further {
            for address in end.both()? {
                ping(s.peers[0].0.space()?, address)?.must_answer().context("from the first network")?;
                ping(node.space(), address)?.must_answer().context("from the node")?;
            }
        }
        node.detach(&wide_end)?;
        // The label of the network is what tells one interface from another.
        let deny = "{podSelector: {matchLabels: {app: inside, network: blue}}, policyTypes: [Ingress]}";
        let allow = "{podSelector: {matchLabels: {network: far}}, policyTypes: [Ingress], \
                     ingress: [{from: [{podSelector: {matchLabels: {app: friend}}}]}]}";
        let document = |name: &str, spec: &str| {
            format!(
                "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{name: {name}}}\nspec: {spec}\n---\n"
            )
        };
        let import =
            PolicyImport { file: "test.yaml".to_owned(), text: document("deny", deny) + &document("allow", allow) };
        node.ask(async |client| client.import_policy(&import).await)?;
        s.talk([true, false, true])?;
        node.kill_agent()?;
        node.start_agent()?;
        node.await_rebuilt()?;
        s.routed().context("after a restart")?;
        s.talk([true, false, true]).context("after a restart")?;
        let all = PolicyDeleteQuery { all: Some(true), ..PolicyDeleteQuery::default() };
        node.ask(async |client| client.delete_policy(&all).await)?;
        s.talk([true; 3])?;

        // A route that somebody removed is found, and a regeneration puts it back.
        ip(s.inside.space()?, "route del 10.99.0.0/16 dev eth1")?;
        let [_, second, _] = &s.ends;
        let ill = node.check(second)?.failure()?;
        ensure!(ill.code == 110 && ill.text().contains("10.99.0.0/16"), "{ill:?}");
        let found = node.found_amiss()?;
        ensure!(found.iter().any(|finding| finding.contains("10.99.0.0/16")), "{found:?}");
        let patch = EndpointPatch { regenerate: Some(RegenerateLevel::Datapath), ..EndpointPatch::default() };
        node.ask(async |client| client.patch_endpoint(&second.id(), &patch).await)?;
        s.routed().context("after a regeneration")?;
        node.check(second)?.silent()?;
        for end in s.ends.iter().chain(s.peers.iter().map(|(_, end)| end)) {
            node.detach(end)?;
        }
        let left = ip(s.inside.space()?, "rule show")?;
        ensure!(!left.contains("lookup 2003"), "rules are left: {left}");
        Ok(())
    })
}

#[test]
fn a_delete_of_a_container_that_is_killed_half_way_is_finished_by_the_next() -> Result<()> {
    let config = NodeConfig::default().toml(POOLS);
    scenario(config, |node| {
        let s = scene(node)?;
        let all =
            async |client: wharf_api::client::Client| client.delete_container("inside", &DeleteQuery::default()).await;
        for point in ["delete/before-unpin:2", "delete/before-remove-record"] {
            node.stop_agent()?;
            ensure!(node.start_armed_agent()?, "the agent was killed at a crash point that nobody wished for");
            node.await_rebuilt()?;
            crash::wish(node.dirs(), point)?;
            let cut = node.ask(all);
            // The last step comes after the answer.
            ensure!(cut.is_err() || point.ends_with("remove-record"), "{point}: {cut:?}");
            node.await_crash()?;
            crash::forget_wish(node.dirs())?;
            node.start_agent()?;
            match node.ask(all) {
                Err(e) => ensure!(e.to_string().contains("it has none"), "{point}: {e:#}"),
                Ok(result) => ensure!(result.errors.is_empty(), "{point}: {result:?}"),
            }
            wait::until("the container is gone", || {
                let there = node.endpoints()?;
                Ok((!there.iter().any(|e| e.container_id == "inside")).then_some(()))
            })?;
            ensure!(s.inside.space()?.links()? == ["lo"], "{point}: {:?}", s.inside.space()?.links()?);
            // The third has no route to the node.
            let [near, blue, _] = &s.peers;
            let kept: Vec<IpAddr> = [near, blue].into_iter().flat_map(|(_, end)| end.addresses()).collect();
            for address in kept {
                ping(node.space(), address)?.must_answer().context("another container's")?;
            }
            // The agent does not know who leased the third: its DEL does.
            for end in &s.ends {
                node.detach(end)?;
            }
            for (end, conf) in s.ends.iter().map(|end| (end, end.conf.clone())) {
                node.attach_with(&s.inside, &end.ifname, &conf)?;
            }
        }
        for end in s.ends.iter().chain(s.peers.iter().map(|(_, end)| end)) {
            node.detach(end)?;
        }
        Ok(())
    })
}
