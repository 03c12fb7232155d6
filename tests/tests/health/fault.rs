//! One fault each: the endpoint is relaunched, for a reason that names the fault, at the same addresses.

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use wharf_api::{HealthState, NodeHealth};
use wharf_tests::{
    Node,
    process::{self, ip},
    scenario,
};

use crate::support::{await_anew, await_health, await_ok, config, end, link, pid, space_of, well};

type Fault = fn(&Node, &NodeHealth) -> Result<()>;

/// Its words in the reason of a relaunch that waits for three rounds.
const ROUNDS: &str = "3 rounds in a row failed";

fn killed(_: &Node, h: &NodeHealth) -> Result<()> {
    kill(pid(h)?, Signal::SIGKILL).context("kill its process")
}

fn stopped(_: &Node, h: &NodeHealth) -> Result<()> {
    process::signal(pid(h)?, Signal::SIGSTOP)
}

fn link_deleted(node: &Node, h: &NodeHealth) -> Result<()> {
    ip(node.space(), &format!("link del {}", link(node, h)?)).map(drop)
}

fn interface_deleted(_: &Node, h: &NodeHealth) -> Result<()> {
    ip(&space_of(h)?, "link del eth0").map(drop)
}

fn interface_down(_: &Node, h: &NodeHealth) -> Result<()> {
    ip(&space_of(h)?, "link set eth0 down").map(drop)
}

fn address_removed(_: &Node, h: &NodeHealth) -> Result<()> {
    ip(&space_of(h)?, "-4 addr flush dev eth0").map(drop)
}

fn unrouted(node: &Node, h: &NodeHealth) -> Result<()> {
    ip(node.space(), &format!("route del {}/32", h.ipv4.context("IPv4")?)).map(drop)
}

/// In the place of its route.
fn blackholed(node: &Node, h: &NodeHealth) -> Result<()> {
    ip(node.space(), &format!("route replace blackhole {}/32", h.ipv4.context("IPv4")?)).map(drop)
}

/// The program that drops all stands before its own.
fn dropping(node: &Node, h: &NodeHealth) -> Result<()> {
    let sink = node.dirs().endpoint_pins().with_file_name("shared").join("sink");
    let mut tc = wharf_tests::process::command_in(node.space(), "tc")?;
    let link = link(node, h)?;
    tc.args(["filter", "replace", "dev", &link, "egress", "prio", "1", "handle", "0x77680001", "protocol", "all"]);
    tc.args(["bpf", "direct-action", "object-pinned"]).arg(sink);
    wharf_tests::process::run(tc, b"", wharf_tests::wait::PATIENCE)?.ok().map(drop)
}

fn endpoint_deleted(node: &Node, h: &NodeHealth) -> Result<()> {
    let id = h.endpoint.context("an endpoint")?.to_string();
    node.wharf(&["endpoint", "delete", &id])?.ok().map(drop)
}

fn mends(fault: Fault, words: &[&str]) -> Result<()> {
    scenario(config(), |node| {
        let before = await_ok(node)?;
        fault(node, &before)?;
        let after = await_anew(node, &before)?;
        let relaunch = after.last_relaunch.as_ref().context("a reason")?;
        for word in words {
            ensure!(relaunch.reason.contains(word), "no {word:?} in {:?}", relaunch.reason);
        }
        ensure!(after.launches > before.launches, "{after:?}");
        let log = node.log();
        ensure!(log.contains("relaunched") && words.iter().all(|w| log.contains(w)), "the log does not tell why");
        well(node)?;
        end(node, &after)
    })
}

/// The same with an agent that is killed as soon as the fault is there.
fn mends_at_the_next_start(fault: Fault) -> Result<()> {
    scenario(config(), |node| {
        let before = await_ok(node)?;
        fault(node, &before)?;
        node.kill_agent()?;
        node.start_agent()?;
        let after = await_anew(node, &before)?;
        well(node)?;
        end(node, &after)
    })
}

#[test]
fn its_process_is_killed() -> Result<()> {
    mends(killed, &["its process", "is gone", "SIGKILL"])
}

#[test]
fn its_process_is_stopped() -> Result<()> {
    mends(stopped, &[ROUNDS, "HTTP to 10.87.", "HTTP to fd57:", "no answer"])
}

#[test]
fn its_route_is_deleted() -> Result<()> {
    mends(unrouted, &[ROUNDS, "ICMP to 10.87.", "TCP to 10.87.", "in the kernel: route 10.87."])
}

#[test]
fn its_program_is_replaced_by_one_that_drops() -> Result<()> {
    mends(dropping, &[ROUNDS, "ICMP to", "TCP to", "no answer"])
}

#[test]
fn its_link_is_deleted() -> Result<()> {
    mends(link_deleted, &["link wh", "expected on the node, is not there"])
}

#[test]
fn its_namespace_loses_its_interface() -> Result<()> {
    mends(interface_deleted, &["link ", "is not there"])
}

#[test]
fn its_interface_is_set_down() -> Result<()> {
    mends(interface_down, &[ROUNDS, "in the kernel: link"])
}

#[test]
fn its_address_is_taken_off() -> Result<()> {
    mends(address_removed, &[ROUNDS, "ICMP to 10.87.", "in the kernel: address 10.87."])
}

#[test]
fn its_endpoint_is_deleted_by_hand() -> Result<()> {
    mends(endpoint_deleted, &["its endpoint", "was deleted"])
}

#[test]
fn the_agent_is_killed_after_its_process_was() -> Result<()> {
    mends_at_the_next_start(killed)
}

#[test]
fn the_agent_is_killed_after_its_process_was_stopped() -> Result<()> {
    mends_at_the_next_start(stopped)
}

#[test]
fn the_agent_is_killed_after_its_route_was_deleted() -> Result<()> {
    mends_at_the_next_start(unrouted)
}

/// A route that is not ours is not ours to remove: that is told, and when it is gone all is well at the same address.
fn blackhole_is_told(between: fn(&mut Node) -> Result<()>) -> Result<()> {
    scenario(config(), |node| {
        let before = await_ok(node)?;
        let address = before.ipv4.context("IPv4")?;
        blackholed(node, &before)?;
        between(node)?;
        let is_told = |h: &NodeHealth| h.failed_launches >= 2 && h.message.contains("not Wharf's");
        let down = await_health(node, "launches that fail because of the route", is_told)?;
        ensure!(down.state == HealthState::Down && down.message.contains(&address.to_string()), "{down:?}");
        ip(node.space(), &format!("route del blackhole {address}/32"))?;
        let after = await_anew(node, &before)?;
        well(node)?;
        end(node, &after)
    })
}

#[test]
fn its_address_is_blackholed() -> Result<()> {
    blackhole_is_told(|_| Ok(()))
}

#[test]
fn the_agent_is_killed_after_its_address_was_blackholed() -> Result<()> {
    blackhole_is_told(|node| {
        node.kill_agent()?;
        node.start_agent()
    })
}

#[test]
fn the_agent_is_killed_after_its_program_was_replaced() -> Result<()> {
    mends_at_the_next_start(dropping)
}

#[test]
fn the_agent_is_killed_after_its_link_was_deleted() -> Result<()> {
    mends_at_the_next_start(link_deleted)
}

/// What cannot be mended by a launch: launches come later and later, the reason stays in sight, and when the fault is
/// gone all is well again at the same address.
#[test]
fn a_fault_that_stays_is_told_as_long_as_it_stays() -> Result<()> {
    scenario(config(), |node| {
        let before = await_ok(node)?;
        let address = before.ipv4.context("IPv4")?;
        ip(node.space(), &format!("rule add to {address}/32 blackhole pref 10"))?;
        let down = await_health(node, "two launches in vain", |h| {
            h.state == HealthState::Down && h.launches >= before.launches + 2
        })?;
        ensure!(down.last_relaunch.as_ref().is_some_and(|r| r.reason.contains("ICMP to 10.87.")), "{down:?}");
        let status = node.ask(async |c| c.status().await)?;
        let component = status.components.iter().find(|c| c.name == "health").context("a component")?;
        ensure!(component.health != wharf_api::Health::Ok, "{component:?}");
        ip(node.space(), &format!("rule del to {address}/32 blackhole pref 10"))?;
        let after = await_ok(node)?;
        ensure!((after.ipv4, after.ipv6) == (before.ipv4, before.ipv6), "{after:?}");
        well(node)?;
        end(node, &after)
    })
}
