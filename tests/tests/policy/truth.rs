//! What policies mean: tables of documents and flows. Each flow is sent over both families, and explained; both must
//! agree with the table.

mod cilium;
mod cluster_network_policy;
mod network_policy;

use std::{collections::BTreeMap, net::IpAddr, thread};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use wharf_api::{NamespaceLabels, PolicyExplainQuery, PolicyProtocol, PolicyVerdict};
use wharf_tests::{
    Node, NodeConfig,
    process::ip,
    scenario,
    space::Space,
    wait,
    world::{NODE, World},
};

use crate::pods::{Ask, DENIED, Pod, answers_every_error, document, forget, import};

/// Kinds of documents.
#[derive(Debug, Clone, Copy)]
enum Kind {
    /// `NetworkPolicy` of the namespace `shop`.
    Kubernetes,
    /// `CiliumNetworkPolicy` of the namespace `shop`.
    Cilium,
    CiliumClusterwide,
    Cluster,
}

use Kind::{Cilium, CiliumClusterwide, Cluster, Kubernetes};

/// Policies, and the flows that pass and do not: `SENDER RECEIVER PROTOCOL PORT`.
struct Case {
    says: &'static str,
    /// The `spec` of each document. `$NAME.4` and `$NAME.6` are addresses of a pod or of the world, `$SHOP` is the
    /// subject that takes all pods of that namespace.
    policies: &'static [(Kind, &'static str)],
    passes: &'static [&'static str],
    denied: &'static [&'static str],
}

/// Whom flows go between: six pods of three namespaces, the node, and a host beyond it.
struct Scene {
    pods: BTreeMap<&'static str, Pod>,
    world: World,
}

impl Scene {
    fn start(node: &Node) -> Result<Self> {
        let labels = NamespaceLabels { labels: [("team".to_owned(), "a".to_owned())].into() };
        node.ask(async |client| client.put_namespace("ops", &labels).await)?;
        let pod = |namespace, name, labels| Pod::kubernetes(node, namespace, name, labels);
        let pods = BTreeMap::from([
            ("shop/web", pod("shop", "web", &["k8s:app=web", "k8s:tier=front"])?),
            ("shop/api", pod("shop", "api", &["k8s:app=api"])?),
            ("shop/db", pod("shop", "db", &["k8s:app=db"])?),
            ("ops/web", pod("ops", "web", &["k8s:app=web"])?),
            ("ops/probe", pod("ops", "probe", &["k8s:app=probe"])?),
            ("box", Pod::container(node, "box", "web")?),
        ]);
        let world = World::join(node)?;
        answers_every_error(world.space()?)?;
        answers_every_error(node.space())?;
        for address in pods.values().flat_map(|pod| pod.end.addresses()) {
            let (family, [v4, v6]) = (if address.is_ipv4() { "-4" } else { "-6" }, NODE);
            let router = if address.is_ipv4() { v4 } else { v6 };
            ip(world.space()?, &format!("{family} route add {address} via {router}"))?;
        }
        Ok(Self { pods, world })
    }

    fn pod(&self, name: &str) -> Result<&Pod> {
        self.pods.get(name).with_context(|| format!("there is no {name}"))
    }

    fn space<'a>(&'a self, node: &'a Node, name: &str) -> Result<&'a Space> {
        match name {
            "node" => Ok(node.space()),
            "world" => self.world.space(),
            _ => self.pod(name)?.space(),
        }
    }

    /// IPv4 first.
    fn addresses(&self, name: &str) -> Result<[IpAddr; 2]> {
        match name {
            "node" => self.pod("box")?.end.gateways(),
            "world" => Ok(self.world.addresses()),
            _ => self.pod(name)?.end.both(),
        }
    }

    fn text(&self, policies: &[(Kind, &str)]) -> Result<String> {
        let of = |(number, (kind, spec)): (usize, &(Kind, &str))| {
            let (version, kind, namespace) = match kind {
                Kubernetes => ("networking.k8s.io/v1", "NetworkPolicy", ", namespace: shop"),
                Cilium => ("cilium.io/v2", "CiliumNetworkPolicy", ", namespace: shop"),
                CiliumClusterwide => ("cilium.io/v2", "CiliumClusterwideNetworkPolicy", ""),
                Cluster => ("policy.networking.k8s.io/v1alpha2", "ClusterNetworkPolicy", ""),
            };
            document(version, kind, &format!("{{name: p{number}{namespace}}}"), spec)
        };
        const SHOP: &str = "{namespaces: {matchLabels: {kubernetes.io/metadata.name: shop}}}";
        let mut text: String = policies.iter().enumerate().map(of).collect::<String>().replace("$SHOP", SHOP);
        for name in self.pods.keys().copied().chain(["world", "node"]) {
            let [v4, v6] = self.addresses(name)?;
            text = text.replace(&format!("${name}.4"), &v4.to_string()).replace(&format!("${name}.6"), &v6.to_string());
        }
        Ok(text)
    }

    /// Sends a flow over one family (IPv4 first), and has it explained.
    fn check(&self, node: &Node, flow: &str, family: usize, passes: bool) -> Result<()> {
        let [from, to, ask] = flow.splitn(3, ' ').collect::<Vec<_>>().try_into().map_err(|_| anyhow!("{flow:?}"))?;
        let (ask, [source, destination]) =
            (Ask::parse(ask)?, [self.addresses(from)?[family], self.addresses(to)?[family]]);
        let patience = if passes { wait::PATIENCE } else { DENIED };
        let answered = ask.is_answered(self.space(node, from)?, destination, patience)?;
        ensure!(answered == passes, "{flow}, to {destination}: passes: {answered}");
        let (protocol, port) = match (ask, destination.is_ipv4()) {
            (Ask::Tcp(port), _) => (PolicyProtocol::Tcp, port),
            (Ask::Udp(port), _) => (PolicyProtocol::Udp, port),
            (Ask::Echo, true) => (PolicyProtocol::Icmp, 8),
            (Ask::Echo, false) => (PolicyProtocol::Icmpv6, 128),
        };
        let (from, to) = (source.to_string(), destination.to_string());
        let query = PolicyExplainQuery { from, to, protocol: Some(protocol), port: Some(port) };
        let told = node.ask(async |client| client.explain_policy(&query).await)?;
        ensure!((told.verdict == PolicyVerdict::Accept) == passes, "{flow}, to {destination}: explained as {told:#?}");
        Ok(())
    }

    fn hold(&self, node: &Node, case: &Case) -> Result<()> {
        let text = self.text(case.policies)?;
        if !case.policies.is_empty() {
            import(node, &text)?;
        }
        let flows = case.passes.iter().map(|flow| (flow, true)).chain(case.denied.iter().map(|flow| (flow, false)));
        let flows = flows.flat_map(|(flow, passes)| [(flow, 0, passes), (flow, 1, passes)]);
        let wrong: Vec<String> = thread::scope(|scope| {
            let all: Vec<_> = flows
                .map(|(flow, family, passes)| scope.spawn(move || self.check(node, flow, family, passes)))
                .collect();
            let outcomes = all.into_iter().map(|flow| flow.join().map_err(|_| anyhow!("a probe panicked")).flatten());
            outcomes.filter_map(|outcome| outcome.err().map(|e| format!("{e:#}"))).collect()
        });
        if !wrong.is_empty() {
            bail!("{}:\n{text}\n{}", case.says, wrong.join("\n"));
        }
        forget(node)
    }
}

/// Every case; all that are wrong are told.
fn hold(cases: &[Case]) -> Result<()> {
    hold_on(NodeConfig::default(), cases)
}

/// As [`hold`], on a node with these settings.
fn hold_on(config: NodeConfig, cases: &[Case]) -> Result<()> {
    scenario(config, |node| {
        let scene = Scene::start(node)?;
        let mut wrong = Vec::new();
        for case in cases {
            if let Err(e) = scene.hold(node, case) {
                wrong.push(format!("{e:#}"));
                forget(node)?;
            }
        }
        ensure!(wrong.is_empty(), "{} of {} cases:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
        scene.pods.values().try_for_each(|pod| node.detach(&pod.end))
    })
}
