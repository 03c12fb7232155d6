//! Problems with cause and next step.

use wharf_api::{AgentStatus, ComponentStatus, ControllerStatus, Health, IpFamily};

use super::{FROM_ADMIN, controller_name, health, is_nearly_full, map_fill};
use crate::render::{Tone, text};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Problem {
    pub(super) tone: Tone,
    pub(super) what: String,
    pub(super) next: String,
}

pub(super) fn problems(s: &AgentStatus, now: u64) -> Vec<Problem> {
    let mut out = Vec::new();
    let mut add = |tone, what: String, next: &str| out.push(Problem { tone, what, next: next.to_owned() });
    if s.from_admin {
        add(
            Tone::Bad,
            FROM_ADMIN.to_owned(),
            "`runtime` and `api` above; the agent's log: journalctl -u wharf-agent -e",
        );
    }
    if !s.serving {
        let what = "the agent does not accept new endpoints; it is starting, stopping, or a component below failed";
        add(Tone::Bad, what.to_owned(), "the agent's log: journalctl -u wharf-agent -e");
    }
    // Listed below: unhealthy controllers, exhausted pools.
    let told = |c: &ComponentStatus| match c.name.as_str() {
        "controllers" => s.controllers.iter().any(ControllerStatus::is_unwell),
        "ipam" => c.stale_ms.is_none() && s.ipam.iter().any(|p| p.used >= p.total),
        _ => false,
    };
    for c in s.components.iter().filter(|c| c.health > Health::Pending && !told(c)) {
        let (tone, word) = health(c.health);
        let stale = c.stale_ms.map_or_else(String::new, |age| format!(" and stale for {}", text::span(age)));
        add(tone, format!("{} is {word}{stale}: {}", c.name, c.message), component_next(c));
    }
    for c in s.controllers.iter().filter(|c| c.is_unwell()) {
        let name = controller_name(c);
        if c.overdue {
            let ran = text::age(now, c.running_since_unix_ms.unwrap_or(0));
            let what = format!("controller {name}: its run has not ended for {ran}");
            add(Tone::Warn, what, "what it waits for does not answer; wharf status --all-controllers");
            continue;
        }
        let times = text::count(c.consecutive_failures, "time");
        let when = text::ago(now, c.last_failure_unix_ms.unwrap_or(0));
        let why = c.last_error.as_deref().unwrap_or("no reason given");
        let what = format!("controller {name} failed {times} in a row, last {when}: {why}");
        add(Tone::Warn, what, "it is tried again by itself; wharf status --all-controllers");
    }
    for p in &s.ipam {
        let family = match p.family {
            IpFamily::Ipv4 => "IPv4",
            IpFamily::Ipv6 => "IPv6",
        };
        let fill = text::fill(p.used, p.total);
        let next = "wharf ipam list shows who holds them, wharf audit finds leaked ones; or add a CIDR to the pool";
        if p.used >= p.total {
            add(Tone::Bad, format!("pool {} has no free {family} address: {fill}", p.name), next);
        } else if u128::from(p.used) * 10 >= u128::from(p.total) * 9 {
            add(Tone::Warn, format!("pool {} is nearly out of {family} addresses: {fill}", p.name), next);
        }
    }
    let failed = s.endpoints.get("invalid").copied().unwrap_or(0);
    if failed > 0 {
        let what = format!("{} could not be created", text::count(failed, "endpoint"));
        add(Tone::Warn, what, "wharf endpoint list --state invalid, then wharf endpoint log ID");
    }
    for m in s.bpf_maps.iter().filter(|m| is_nearly_full(m)) {
        add(Tone::Warn, format!("BPF map {} fills up: {}", m.name, map_fill(m)), "wharf bpf map list");
    }
    if s.proxy.timed_out_completions > 0 {
        let what = format!("the proxy did not answer {}", text::count(s.proxy.timed_out_completions, "time"));
        add(Tone::Warn, what, "wharf proxy status; the agent's log, which has Envoy's: journalctl -u wharf-agent -e");
    }
    out.sort_by_key(|p| p.tone != Tone::Bad);
    out
}

fn component_next(c: &ComponentStatus) -> &'static str {
    // Advice depends on whether the component answers.
    let answers = c.stale_ms.is_none() && c.health == Health::Degraded;
    match c.name.as_str() {
        "api" | "admin" | "store" if answers => {
            "it works again, and nothing is lost; find who touches the agent's run directory"
        }
        "ipam" => "wharf ipam list",
        "cluster" => "wharf cluster nodes",
        "datapath" => "wharf audit; wharf bpf map list",
        "masquerade" => "the command above, if there is one; wharf audit",
        "runtime" | "api" => {
            "the agent is stuck; systemd restarts it (traffic goes on), or: systemctl restart wharf-agent"
        }
        "endpoints" => "wharf explain ID explains each",
        "deletion-queue" => {
            "a record that was put aside is a delete that nobody does: delete its container, remove the file"
        }
        "leaks" => "wharf audit; wharf audit --repair",
        "records" => {
            "recreate their containers one after the other; wharf audit --repair disconnects all of them at once"
        }
        "delegate" => {
            "is the service that makes this node's network running? the page \"Delegated mode\" of the documentation (/usr/share/doc/wharf)"
        }
        "flows" => "wharf bpf ct list",
        "policy" => "wharf policy get",
        "proxy" => "wharf proxy status; wharf proxy listeners",
        "self-check" => "wharf endpoint health ID",
        "health" => "wharf health status",
        "controllers" => "wharf status --all-controllers",
        "stuck-steps" => "wharf endpoint log ID; the agent's log: journalctl -u wharf-agent -e",
        "store" => "is the disk of the run directory full or stuck? journalctl -u wharf-agent -e",
        _ => "the agent's log: journalctl -u wharf-agent -e",
    }
}
