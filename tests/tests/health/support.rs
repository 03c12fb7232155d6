//! What the scenarios share.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result, ensure};
use nix::unistd::Pid;
use wharf_api::{HealthReport, HealthState, NodeHealth};
use wharf_tests::{Node, NodeConfig, space::Space, wait};

const ON: &str = "--health-interval-ms=200";
const OFF: &str = "--health-interval-ms=0";

/// With the health endpoint, probed often; nothing but its controller mends what a test breaks.
pub(crate) fn config() -> NodeConfig {
    let flags = ["--node-name", "quay", "--prepared-programs", "4", "--audit-interval-ms", "0", ON];
    NodeConfig { flags: flags.map(str::to_owned).to_vec(), toml: None }
}

/// From the next start on, the agent has a health endpoint, or none.
pub(crate) fn turn(node: &mut Node, on: bool) {
    node.set_flag(ON, on);
    node.set_flag(OFF, !on);
}

/// As `wharf health status -o json` tells it.
pub(crate) fn health(node: &Node) -> Result<NodeHealth> {
    let shown = node.wharf(&["health", "status", "-o", "json"])?;
    let report: HealthReport = serde_json::from_str(&shown.stdout).with_context(|| shown.describe())?;
    let [one] = report.nodes.as_slice() else { anyhow::bail!("not one node: {report:?}") };
    ensure!((shown.code() == 0) == (one.state == HealthState::Ok), "{}", shown.describe());
    Ok(one.clone())
}

/// Waits until it is as the test wants it.
pub(crate) fn await_health(node: &Node, what: &str, fits: impl Fn(&NodeHealth) -> bool) -> Result<NodeHealth> {
    let mut last = None;
    let found = wait::until(what, || {
        let now = health(node)?;
        let fit = fits(&now).then(|| now.clone());
        last = Some(now);
        Ok(fit)
    });
    found.with_context(|| format!("the last that was seen: {last:#?}"))
}

/// Waits until every probe of a round is answered.
pub(crate) fn await_ok(node: &Node) -> Result<NodeHealth> {
    await_health(node, "the health endpoint to be ok", |h| h.state == HealthState::Ok && h.pid.is_some())
}

/// Waits until another one than `before` is ok, which has the same addresses.
pub(crate) fn await_anew(node: &Node, before: &NodeHealth) -> Result<NodeHealth> {
    let is_new = |h: &NodeHealth| h.state == HealthState::Ok && h.pid.is_some() && h.pid != before.pid;
    let after = await_health(node, "the health endpoint to be relaunched", is_new)?;
    ensure!((after.ipv4, after.ipv6) == (before.ipv4, before.ipv6), "{before:?}\nbecame\n{after:?}");
    Ok(after)
}

/// Its process id, as long as it is its own.
pub(crate) fn pid(h: &NodeHealth) -> Result<Pid> {
    ensure!(is_process(h), "process {:?} is not the health endpoint's any more", h.pid);
    Ok(Pid::from_raw(i32::try_from(h.pid.context("a process")?)?))
}

/// Whether its process is there: a number alone may be another's by now.
pub(crate) fn is_process(h: &NodeHealth) -> bool {
    let Some(pid) = h.pid else { return false };
    fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "wharf-health")
}

/// Its network namespace.
pub(crate) fn space_of(h: &NodeHealth) -> Result<Space> {
    Space::open(&PathBuf::from(format!("/proc/{}/ns/net", pid(h)?)))
}

/// The host side of its link.
pub(crate) fn link(node: &Node, h: &NodeHealth) -> Result<String> {
    let id = h.endpoint.context("an endpoint")?;
    let all = node.endpoints()?;
    Ok(all.into_iter().find(|e| e.id == id).context("its endpoint")?.host_ifname)
}

/// Kernel and store hold what they should, all of it explained.
pub(crate) fn well(node: &Node) -> Result<()> {
    let mut last = Vec::new();
    let empty = wait::until("an empty audit", || {
        last = node.audit()?.findings;
        Ok(last.is_empty().then_some(()))
    });
    empty.with_context(|| format!("{last:#?}"))
}

/// Stops the agent for good: nothing of the health endpoint may be left. Then an agent without one takes over, which is
/// what the end of a scenario wants to see.
pub(crate) fn end(node: &mut Node, last: &NodeHealth) -> Result<()> {
    node.stop_agent()?;
    ensure!(!is_process(last), "the process outlived the agent: {last:?}");
    let links = node.endpoint_links()?;
    ensure!(links.is_empty(), "links outlived the agent: {links:?}");
    let pins = node.attached_pins()?;
    ensure!(pins.is_empty(), "pins outlived the agent: {pins:?}");
    turn(node, false);
    node.start_agent()
}
