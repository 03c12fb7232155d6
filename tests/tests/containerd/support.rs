//! containerd on a node, and what is asked of its pods.

use std::fs;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use wharf_api::Endpoint;
use wharf_tests::{
    Node, NodeConfig,
    containerd::{Containerd, Network, Pod},
    scenario, wait,
};

/// A container that does nothing.
pub(crate) const SLEEP: [&str; 2] = ["sleep", "infinity"];
/// A runtime class whose list of plugins has no capabilities.
pub(crate) const WITHOUT_CAPABILITIES: &str = "bare";

/// containerd on a fresh node, its network the list that Wharf ships; after the body containerd must hold nothing, then
/// the node nothing.
pub(crate) fn with_containerd(body: impl FnOnce(&mut Node, &mut Containerd) -> Result<()>) -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let list = shipped(node)?;
        let mut bare = list.clone();
        bare["plugins"][0].as_object_mut().context("a plugin")?.remove("capabilities");
        let networks = [Network { handler: "wharf", list }, Network { handler: WITHOUT_CAPABILITIES, list: bare }];
        let mut containerd = Containerd::start(node.space(), &networks, &[])?;
        let outcome = body(node, &mut containerd);
        if outcome.is_err() {
            eprintln!("---- log of containerd\n{}---- end of the log", containerd.log());
        }
        outcome?;
        nothing_left(node, &containerd)
    })
}

/// `dist/10-wharf.conflist`, with the socket of this node's agent.
fn shipped(node: &Node) -> Result<Value> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../dist/10-wharf.conflist");
    let mut list: Value = serde_json::from_str(&fs::read_to_string(path).context(path)?).context(path)?;
    list["plugins"][0]["socket"] = Value::String(node.dirs().socket().display().to_string());
    Ok(list)
}

/// Neither containerd nor the node has anything of a pod.
pub(crate) fn nothing_left(node: &Node, containerd: &Containerd) -> Result<()> {
    let left = containerd.left_behind()?;
    ensure!(left.is_empty(), "containerd left behind: {left:?}");
    node.await_released()?;
    let left = node.left_behind()?;
    ensure!(left.is_empty(), "left behind:\n  {}", left.join("\n  "));
    Ok(())
}

pub(crate) fn endpoints(node: &Node, pod: &str) -> Result<Vec<Endpoint>> {
    Ok(node.endpoints()?.into_iter().filter(|e| e.container_id == pod).collect())
}

/// The one endpoint of a pod. What containerd tells of it must be what the agent has.
pub(crate) fn endpoint(node: &Node, pod: &Pod) -> Result<Endpoint> {
    let [endpoint] = <[_; 1]>::try_from(endpoints(node, &pod.id)?)
        .map_err(|found| anyhow::anyhow!("not one endpoint of {}: {found:#?}", pod.id))?;
    let name = pod.config.metadata.as_ref().map(|m| m.name.as_str());
    ensure!(
        (endpoint.ipv4, endpoint.ipv6) == (Some(pod.v4), pod.v6)
            && endpoint.pod_name.as_deref() == name
            && endpoint.runtime.as_deref() == Some("containerd"),
        "containerd has {pod:#?}\nthe agent has {endpoint:#?}"
    );
    Ok(endpoint)
}

/// A container that serves this text on port 80 of both families.
pub(crate) fn serve(containerd: &Containerd, pod: &Pod, text: &str) -> Result<String> {
    containerd.container(pod, &["sh", "-c", &format!("echo {text} > /www/index.html && exec httpd -f -h /www")])
}

/// What is served there. The server may have been started a moment ago: refused connections are tried again.
pub(crate) fn fetch(containerd: &Containerd, from: &str, url: &str) -> Result<String> {
    wait::until(&format!("{url} to be served"), || match containerd.cri().exec(from, &["wget", "-q", "-O", "-", url]) {
        Err(e) if e.to_string().contains("refused") => Ok(None),
        answer => answer.map(Some),
    })
}
