//! What is amiss in a status, why, and where to look next.

use wharf_api::{AgentStatus, Health, IpFamily};

use super::{health, is_nearly_full, map_fill};
use crate::render::{Tone, text};

/// Something an operator should look at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Problem {
    /// How bad.
    pub(super) tone: Tone,
    /// What and why.
    pub(super) what: String,
    /// What to do or to look at.
    pub(super) next: String,
}

/// Every problem of a status, the worst first.
pub(super) fn problems(s: &AgentStatus, now: u64) -> Vec<Problem> {
    let mut out = Vec::new();
    let mut add = |tone, what: String, next: &str| out.push(Problem { tone, what, next: next.to_owned() });
    if !s.serving {
        let what = "the agent does not accept new endpoints; it is starting, stopping, or a component below failed";
        add(Tone::Bad, what.to_owned(), "the agent's log: journalctl -u wharf-agent -e");
    }
    for c in s.components.iter().filter(|c| c.health > Health::Pending) {
        let (tone, word) = health(c.health);
        add(tone, format!("{} is {word}: {}", c.name, c.message), component_next(&c.name));
    }
    for c in s.controllers.iter().filter(|c| c.consecutive_failures > 0) {
        let times = text::count(c.consecutive_failures, "time");
        let when = text::ago(now, c.last_failure_unix_ms.unwrap_or(0));
        let why = c.last_error.as_deref().unwrap_or("no reason given");
        let what = format!("controller {} failed {times} in a row, last {when}: {why}", c.name);
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
        add(Tone::Warn, what, "the proxy's own log; wharf monitor --type agent");
    }
    out.sort_by_key(|p| p.tone != Tone::Bad);
    out
}

fn component_next(name: &str) -> &'static str {
    match name {
        "ipam" => "wharf ipam list",
        "datapath" => "wharf audit; wharf bpf map list",
        "endpoints" => "wharf endpoint list; wharf endpoint log ID",
        "deletion-queue" => "wharf audit; the directory deletions beside the agent's socket; the agent's log",
        "leaks" => "wharf audit; wharf audit --repair",
        "records" => "wharf audit names them; wharf audit --repair takes them away",
        "stuck-steps" => "wharf endpoint log ID; the agent's log: journalctl -u wharf-agent -e",
        "store" => "wharf audit; the agent's log: journalctl -u wharf-agent -e",
        _ => "the agent's log: journalctl -u wharf-agent -e",
    }
}
