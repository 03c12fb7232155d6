//! ADD and DEL of endpoints whose connections are redirected: how long they wait for the proxy.

use std::time::Instant;

use anyhow::{Context, Result};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::{Extent, acknowledged, documents::policy, import};
use crate::{
    Node, NodeConfig, Sandbox,
    bench::{
        churn::{at_once, ms},
        findings::{Better, Group, Mark, Part},
        plugin::Plugin,
        stats::p99,
    },
    wait,
};

/// The label of containers whose requests are judged.
const WEB: &str = "web";
/// A label that no policy names.
const OTHER: &str = "other";

const NONE: &str = "no redirects";
const ALONE: &str = "redirects";

/// What a bound is of: how long a DEL waits for the proxy.
const BOUND_MS: u32 = 1_000;

/// Times of an endpoint's ADD, its DEL, and of that the wait for the proxy; milliseconds.
#[derive(Default)]
struct Times {
    add: Vec<f64>,
    del: Vec<f64>,
    wait: Vec<f64>,
}

/// A proxy that answers.
pub(super) fn healthy(agent: &NodeConfig, extent: &Extent) -> Result<Part> {
    let plugin = Plugin::wharf_as("wharf", &agent.clone().with_envoy()?, &json!([]))?;
    let node = plugin.node().context("wharf has a node")?;
    import(node, &policy(WEB, "ingress", true))?;
    let [mut none, mut alone, mut among] = [Times::default(), Times::default(), Times::default()];
    let kinds = [(plugin.sandboxes("none", extent.deletes)?, OTHER), (plugin.sandboxes("alone", extent.deletes)?, WEB)];
    for round in 0..extent.deletes {
        for turn in 0..kinds.len() {
            let place = (round + turn) % kinds.len();
            let (sandboxes, app) = &kinds[place];
            let times = if place == 0 { &mut none } else { &mut alone };
            once(&plugin, sandboxes.get(round).context("a sandbox of the round")?, app, times)?;
        }
    }
    let crowd = gather(&plugin, extent.others)?;
    let sandboxes = plugin.sandboxes("among", extent.deletes)?;
    sandboxes.iter().try_for_each(|sandbox| once(&plugin, sandbox, WEB, &mut among))?;
    let gone = leave(&plugin, &crowd)?;

    let beside = format!("redirects, beside {} members", extent.others);
    let mut adds = Group::new("l7: ADD", "ms", Better::Lower);
    let mut dels = Group::new("l7: DEL", "ms", Better::Lower);
    let mut waits = Group::new("l7: a DEL's wait for the proxy", "ms", Better::Lower);
    let mut marks = Vec::new();
    for (name, times) in [(NONE, none), (ALONE, alone), (&beside, among)] {
        if name != NONE {
            let slow = p99(&times.wait).context("no samples")?;
            waits.note(format!("{name}: p99 {slow:.1} ms"));
            let target = format!("a DEL's wait for the proxy, p99, {name}");
            marks.push(Mark::judge(&target, "ms", Better::Lower, slow, 50.0));
            waits.add(name, times.wait)?;
        }
        adds.add(name, times.add)?;
        dels.add(name, times.del)?;
    }
    adds.note("with the wait until the proxy has the endpoint, half a second at most");
    for group in [&mut adds, &mut dels] {
        group.compare_to(NONE)?;
    }
    drop((kinds, sandboxes, crowd));
    forget(node)?;
    plugin.finish()?;
    Ok((vec![adds, dels, waits, gone], marks))
}

/// ADD and DEL of one endpoint.
fn once(plugin: &Plugin, sandbox: &Sandbox, app: &str, times: &mut Times) -> Result<()> {
    let node = plugin.node().context("wharf has a node")?;
    let (add, added) = plugin.add_labelled(sandbox, app)?;
    acknowledged(node)?;
    plugin.settle()?;
    let del = plugin.del(sandbox, &added)?;
    times.add.push(ms(add));
    times.del.push(ms(del));
    times.wait.push(waited(node, sandbox)?);
    // What the agent does afterwards must not be in the next one's time.
    acknowledged(node)?;
    plugin.settle()
}

/// Milliseconds that the last DEL of a container waited for the proxy.
fn waited(node: &Node, sandbox: &Sandbox) -> Result<f64> {
    let name = format!("cni-attachment-id:{}:eth0", sandbox.name());
    let told = node.ask(async |client| client.explain(&name).await)?;
    let of = told.timeline.iter().rev().find(|entry| entry.operation == "delete" && entry.phase == "await-proxy");
    let took =
        of.and_then(|entry| entry.took_us).with_context(|| format!("{name} did not wait: {:?}", told.timeline))?;
    // Seconds at most: exact.
    Ok(took as f64 / 1e3)
}

/// Members of one listener. They are there before the policy, which tells the proxy of all at once.
fn gather(plugin: &Plugin, count: usize) -> Result<Vec<(Sandbox, Value)>> {
    let node = plugin.node().context("wharf has a node")?;
    forget(node)?;
    let sandboxes = plugin.sandboxes("crowd", count)?;
    let (_, added) = at_once(&sandboxes, |sandbox| plugin.add_labelled(sandbox, WEB).map(|(_, added)| added))?;
    import(node, &policy(WEB, "ingress", true))?;
    plugin.settle()?;
    Ok(sandboxes.into_iter().zip(added).collect())
}

/// Deletes them all, sixteen at once.
fn leave(plugin: &Plugin, crowd: &[(Sandbox, Value)]) -> Result<Group> {
    let (took, dels) = at_once(crowd, |(sandbox, added)| plugin.del(sandbox, added))?;
    let mut gone =
        Group::new(&format!("l7: DEL of {} with redirects, 16 at once", crowd.len()), "ms each", Better::Lower);
    gone.add("wharf", dels.into_iter().map(ms).collect())?;
    gone.note(format!("all of them in {:.2} s", took.as_secs_f64()));
    let node = plugin.node().context("wharf has a node")?;
    wait::until("no listener has a member", || {
        let proxy = node.ask(async |client| client.proxy().await)?;
        Ok(proxy.listeners.iter().all(|listener| listener.endpoints.is_empty()).then_some(()))
    })?;
    Ok(gone)
}

fn forget(node: &Node) -> Result<()> {
    let all = wharf_api::PolicyDeleteQuery { all: Some(true), ..wharf_api::PolicyDeleteQuery::default() };
    node.ask(async |client| client.delete_policy(&all).await).map(drop)
}

/// A proxy that does not answer: a DEL waits as long as it may, and no longer.
pub(super) fn stopped(agent: &NodeConfig, extent: &Extent) -> Result<Part> {
    let bound = BOUND_MS.to_string();
    let config = agent.clone().flags(&["--proxy-timeout-ms", &bound]).with_envoy()?;
    let plugin = Plugin::wharf_as("wharf", &config, &json!([]))?;
    let node = plugin.node().context("wharf has a node")?;
    import(node, &policy(WEB, "ingress", true))?;
    let sandboxes = plugin.sandboxes("stopped", extent.stopped)?;
    let mut times = Vec::new();
    for sandbox in &sandboxes {
        let (_, added) = plugin.add_labelled(sandbox, WEB)?;
        acknowledged(node)?;
        plugin.settle()?;
        node.signal_envoy(Signal::SIGSTOP)?;
        let start = Instant::now();
        plugin.del(sandbox, &added).context("a proxy that does not answer fails no DEL")?;
        times.push(ms(start.elapsed()));
        node.signal_envoy(Signal::SIGCONT)?;
        acknowledged(node)?;
    }
    let slowest = times.iter().copied().fold(0.0, f64::max);
    let mut group = Group::new("l7: DEL while the proxy is stopped", "ms", Better::Lower);
    group.add(&format!("--proxy-timeout-ms {BOUND_MS}"), times)?;
    let ratio = slowest / f64::from(BOUND_MS);
    let mark = Mark::judge("DEL while the proxy is stopped, the slowest to its bound", "x", Better::Lower, ratio, 1.10);
    drop(sandboxes);
    forget(node)?;
    plugin.finish()?;
    Ok((vec![group], vec![mark]))
}
