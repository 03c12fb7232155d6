//! What policy is told of one endpoint: its own enforcement, its named ports, labels that come late.

use std::num::NonZeroU16;

use anyhow::{Context as _, Result, ensure};
use wharf_api::{EndpointPatch, Enforcement, NamedPort, Protocol};
use wharf_tests::{Node, NodeConfig, scenario, wait};

use crate::pods::{Ask, Pod, change, document, import, network_policy, relabel};

fn named(port: u16) -> Result<EndpointPatch> {
    let port = NamedPort { port: NonZeroU16::new(port).context("a port")?, protocol: Protocol::Tcp };
    Ok(EndpointPatch { named_ports: [("api".to_owned(), Some(port))].into(), ..EndpointPatch::default() })
}

fn enforcement(mode: Enforcement) -> EndpointPatch {
    EndpointPatch { policy_enforcement: Some(mode), ..EndpointPatch::default() }
}

/// Whether the port is reached over both families, as it should.
fn reached(from: &Pod, to: &Pod, port: u16, passes: bool) -> Result<()> {
    wait::all(to.end.both()?, |address| {
        let reached = from.reaches(address, Ask::Tcp(port))?;
        ensure!(reached == passes, "{address}, port {port}: {reached}");
        Ok(())
    })
}

fn detach(node: &Node, pods: &[&Pod]) -> Result<()> {
    pods.iter().try_for_each(|pod| node.detach(&pod.end))
}

#[test]
fn each_peer_has_its_own_number_of_a_named_port_and_an_endpoint_its_own_enforcement() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let web = Pod::container(node, "web", "web")?;
        let (one, other) = (Pod::container(node, "one", "db")?, Pod::container(node, "other", "db")?);
        let to = "{to: [{podSelector: {matchLabels: {app: db}}}], ports: [{port: api}]}";
        let spec = format!("{{podSelector: {{matchLabels: {{app: web}}}}, policyTypes: [Egress], egress: [{to}]}}");
        import(node, &network_policy("web", &spec))?;
        change(node, &one.end, &named(80)?)?;
        change(node, &other.end, &named(81)?)?;
        let by_name = || {
            let ways = [(&one, 80, true), (&one, 81, false), (&other, 81, true), (&other, 80, false)];
            wait::all(ways, |(to, port, passes)| reached(&web, to, port, passes))
        };
        by_name()?;
        reached(&one, &web, 80, true)?;
        change(node, &web.end, &enforcement(Enforcement::Always))?;
        by_name().context("always")?;
        reached(&one, &web, 80, false).context("always")?;
        node.kill_agent()?;
        node.start_agent()?;
        node.await_rebuilt()?;
        by_name().context("after a restart")?;
        reached(&one, &web, 80, false).context("after a restart")?;
        change(node, &web.end, &enforcement(Enforcement::Never))?;
        reached(&web, &one, 81, true).context("never")?;
        reached(&one, &web, 80, true).context("never")?;
        detach(node, &[&web, &one, &other])
    })
}

#[test]
fn a_pod_without_labels_is_isolated_until_they_come() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--labels-timeout-ms=3600000"]), |node| {
        let web = Pod::kubernetes(node, "shop", "web", &["k8s:app=web"])?;
        let late = Pod::without_labels(node, "shop", "late")?;
        reached(&web, &late, 80, true).context("without a policy")?;
        let db = "{podSelector: {matchLabels: {app: db}}, policyTypes: [Ingress]}";
        import(node, &document("networking.k8s.io/v1", "NetworkPolicy", "{name: db, namespace: shop}", db))?;
        for round in ["new", "restarted"] {
            reached(&web, &late, 80, false).context(round)?;
            reached(&late, &web, 80, false).context(round)?;
            node.kill_agent()?;
            node.start_agent()?;
            node.await_rebuilt()?;
        }
        let second = Pod::without_labels(node, "shop", "second")?;
        reached(&web, &second, 80, false).context("one that comes after the policy")?;
        relabel(node, &late.end, &["k8s:app=web", "k8s:io.kubernetes.pod.namespace=shop"])?;
        relabel(node, &second.end, &["k8s:app=db", "k8s:io.kubernetes.pod.namespace=shop"])?;
        reached(&web, &late, 80, true)?;
        reached(&late, &web, 80, true)?;
        reached(&web, &second, 80, false).context("a database")?;
        reached(&second, &web, 80, true).context("a database")?;
        detach(node, &[&web, &late, &second])
    })
}

#[test]
fn a_container_that_is_no_pod_is_in_the_namespace_of_its_label() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let (web, db) = (Pod::container(node, "web", "web")?, Pod::container(node, "db", "db")?);
        let shop = "{podSelector: {matchLabels: {app: db}}, policyTypes: [Ingress]}";
        import(node, &document("networking.k8s.io/v1", "NetworkPolicy", "{name: db, namespace: shop}", shop))?;
        reached(&web, &db, 80, true)?;
        relabel(node, &db.end, &["k8s:app=db", "k8s:io.kubernetes.pod.namespace=shop"])?;
        reached(&web, &db, 80, false)?;
        detach(node, &[&web, &db])
    })
}
