//! The health endpoint on the real datapath: what is done to it, what the agent makes of it, and the address that it
//! keeps through all of that.

mod address;
mod fault;
mod stranger;
mod support;

use std::{fs, net::IpAddr};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::json;
use wharf_api::{HealthReport, HealthState, ProbeKind, ProbeOutcome};
use wharf_tests::{icmp::ping, process, scenario, wait};

use crate::support::{await_ok, config, end, health, is_process, pid, space_of, well};

#[test]
fn it_is_an_endpoint_like_any_other_and_answers_every_probe() -> Result<()> {
    scenario(config(), |node| {
        let h = await_ok(node)?;
        ensure!((h.node.as_str(), h.local, h.launches, h.failed_launches) == ("quay", true, 1, 0), "{h:?}");
        let kinds: Vec<(ProbeKind, bool)> = h.probes.iter().map(|p| (p.probe, p.address.is_ipv6())).collect();
        let all = [ProbeKind::Icmp, ProbeKind::Tcp, ProbeKind::Http];
        ensure!(kinds == [all.map(|k| (k, false)), all.map(|k| (k, true))].concat(), "{kinds:?}");
        for p in &h.probes {
            ensure!(p.outcome == ProbeOutcome::Answered && p.error.is_empty(), "{p:?}");
            ensure!(p.min_us <= p.mean_us && p.mean_us <= p.max_us && p.sent >= 1, "{p:?}");
        }
        let all = node.endpoints()?;
        let [it] = all.as_slice() else { anyhow::bail!("more or less than one endpoint: {all:?}") };
        ensure!((it.identity, it.labels.as_slice()) == (4, &["reserved:health=".to_owned()][..]), "{it:?}");
        ensure!((&*it.container_id, &*it.network, &*it.ifname) == ("wharf-health", "wharf-health", "eth0"));
        ensure!((Some(it.id), it.ipv4, it.ipv6) == (h.endpoint, h.ipv4, h.ipv6), "{it:?} {h:?}");
        // A container reaches it as the node does, and it does not see anything else of the node.
        let web = node.sandbox("web")?;
        let endpoint = node.attach(&web)?;
        for ip in [IpAddr::V4(h.ipv4.context("IPv4")?), IpAddr::V6(h.ipv6.context("IPv6")?)] {
            ping(web.space()?, ip)?.must_answer()?;
        }
        node.detach(&endpoint)?;
        well(node)?;
        end(node, &h)
    })
}

#[test]
fn its_process_holds_no_power_and_no_secret() -> Result<()> {
    scenario(config(), |node| {
        let h = await_ok(node)?;
        let pid = h.pid.context("a process")?;
        let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).context("read its /proc");
        let status = read("status")?;
        for line in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
            let set = status.lines().find_map(|l| l.strip_prefix(line)).context("a capability set")?;
            ensure!(set.trim_start_matches(':').trim() == "0000000000000000", "{line}{set}");
        }
        ensure!(status.lines().any(|l| l.replace('\t', " ") == "NoNewPrivs: 1"), "{status}");
        ensure!(read("environ")?.is_empty(), "it has an environment");
        ensure!(read("cmdline")? == "wharf-agent\0health-endpoint\0", "{:?}", read("cmdline")?);
        let links = space_of(&h)?.links()?;
        ensure!(links == ["lo", "eth0"], "{links:?}");
        end(node, &h)
    })
}

#[test]
fn nothing_of_it_outlives_the_agent() -> Result<()> {
    scenario(config(), |node| {
        let before = await_ok(node)?;
        node.kill_agent()?;
        wait::until("the process to end with its agent", || Ok((!is_process(&before)).then_some(())))?;
        wait::until("its link to go", || Ok(node.endpoint_links()?.is_empty().then_some(())))?;
        node.start_agent()?;
        let after = await_ok(node)?;
        ensure!((after.ipv4, after.ipv6) == (before.ipv4, before.ipv6), "{before:?} {after:?}");
        // A stopped process cannot read the end of its input; it goes all the same.
        process::signal(pid(&after)?, Signal::SIGSTOP)?;
        node.kill_agent()?;
        wait::until("the stopped process to end with its agent", || Ok((!is_process(&after)).then_some(())))?;
        node.start_agent()?;
        let last = await_ok(node)?;
        well(node)?;
        end(node, &last)
    })
}

#[test]
fn the_operator_is_told() -> Result<()> {
    scenario(config(), |node| {
        let h = await_ok(node)?;
        // A single lost probe is told too; then it is looked at once more.
        let shown = wait::until("a round without a loss", || {
            let shown = node.wharf(&["health", "status"])?;
            Ok((shown.code() == 0).then_some(shown))
        })?;
        for word in ["quay", "ICMP", "TCP", "HTTP", "answered", &h.ipv4.context("IPv4")?.to_string()] {
            ensure!(shown.stdout.contains(word), "no {word} in\n{}", shown.stdout);
        }
        ensure!(shown.stdout.lines().all(|l| l.chars().count() <= 100), "{}", shown.stdout);
        let before = health(node)?.rounds;
        let probed = node.wharf(&["health", "probe", "-o", "json"])?;
        let report: HealthReport = serde_json::from_str(&probed.stdout).with_context(|| probed.describe())?;
        ensure!(report.nodes.len() == 1 && report.nodes[0].rounds > before, "{report:?}");
        wait::until("the component to be ok", || {
            let status = node.ask(async |c| c.status().await)?;
            let component = status.components.iter().find(|c| c.name == "health").context("a component")?;
            Ok((component.health == wharf_api::Health::Ok).then_some(()))
        })?;
        wait::until("the metrics", || {
            let metrics = node.http("GET", "/metrics", None)?.text();
            let trip = "wharf_health_probe_trip_seconds{probe=\"HTTP\",family=\"ipv6\"}";
            let all = ["wharf_health_endpoint_up 1", "wharf_health_endpoint_launches_total 1", trip];
            Ok(all.iter().all(|line| metrics.contains(line)).then_some(()))
        })?;
        end(node, &h)?;
        // Turned off: that is said, and is not "ok".
        let off = node.wharf(&["health", "status"])?;
        ensure!(off.code() == 1 && off.stdout.contains("off"), "{}", off.describe());
        ensure!(health(node)?.state == HealthState::Off);
        let refused = node.http("POST", "/v1/health/probe", None)?;
        ensure!(refused.status == 503, "{}", refused.text());
        let status = node.ask(async |c| c.status().await)?;
        let component = status.components.iter().find(|c| c.name == "health").context("a component")?;
        ensure!(component.health == wharf_api::Health::Ok && component.message.contains("off"), "{component:?}");
        Ok(())
    })
}

#[test]
fn no_container_gets_its_names_its_identity_or_its_address() -> Result<()> {
    scenario(config(), |node| {
        let h = await_ok(node)?;
        let ip = h.ipv4.context("IPv4")?;
        let sandbox = node.sandbox("wharf-health")?;
        for conf in [node.netconf(), node.netconf().with("name", json!("wharf-health"))] {
            let failure = node.cni("ADD").of(sandbox.name(), sandbox.path(), "eth1").conf(&conf).run()?.failure()?;
            ensure!(failure.msg.contains("agent's own"), "{failure:?}");
        }
        let other = node.sandbox("other")?;
        let conf = node.netconf().with("name", json!("wharf-health"));
        let failure = node.cni("ADD").of(other.name(), other.path(), "eth0").conf(&conf).run()?.failure()?;
        ensure!(failure.msg.contains("agent's own"), "{failure:?}");
        let refused = |method: &str, target: &str, body: Option<&str>, status: u16| -> Result<()> {
            let answer = node.http(method, target, body)?;
            ensure!(answer.status == status, "{method} {target}: {} {}", answer.status, answer.text());
            Ok(())
        };
        refused("DELETE", &format!("/v1/ipam/{ip}"), None, 409)?;
        refused("POST", &format!("/v1/ipam/{ip}?owner=x"), None, 409)?;
        refused("POST", "/v1/ipam", Some("{\"owner\":\"wharf-health\"}"), 400)?;
        let create = |ips: &str, labels: &str| {
            format!(
                "{{\"container_id\":\"other\",\"ifname\":\"eth0\",\"network\":\"n\",\"netns\":\"{}\",\"ips\":[{ips}],\
                 \"labels\":[{labels}]}}",
                other.path().display()
            )
        };
        let target = "/v1/endpoint/cni-attachment-id:other:eth0";
        refused("PUT", target, Some(&create(&format!("\"{ip}\""), "")), 409)?;
        refused("PUT", target, Some(&create("", "\"reserved:health=\"")), 400)?;
        let id = h.endpoint.context("an endpoint")?;
        refused("PATCH", &format!("/v1/endpoint/{id}"), Some("{\"labels\":[\"k8s:app=web\"]}"), 400)?;
        well(node)?;
        end(node, &h)
    })
}
