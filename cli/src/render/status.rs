//! `wharf status`.

mod problem;

use wharf_api::{AgentStatus, BpfMap, ControllerStatus, Health, IpFamily};

use self::problem::problems;
use super::{
    Style, Tone,
    screen::Screen,
    table::{Cell, cell, number, table, token},
    text,
};

/// How much is shown.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Detail {
    /// Everything.
    pub(crate) verbose: bool,
    /// Every controller, not only those that fail.
    pub(crate) all_controllers: bool,
}

/// True when nothing is amiss: the agent serves and no component is degraded or failing. A component that is pending
/// (not known yet, or not applicable) is no fault.
pub(crate) fn is_well(status: &AgentStatus) -> bool {
    status.serving && status.overall <= Health::Pending
}

/// One word for a probe.
pub(crate) fn brief(status: &AgentStatus) -> &'static str {
    match (status.serving, status.overall) {
        (false, _) => "not-serving",
        (true, Health::Ok | Health::Pending) => "OK",
        (true, Health::Degraded) => "degraded",
        (true, Health::Failing) => "failing",
    }
}

/// Health in a word and its tone.
pub(super) fn health(health: Health) -> (Tone, &'static str) {
    match health {
        Health::Ok => (Tone::Good, "OK"),
        Health::Pending => (Tone::Dim, "pending"),
        Health::Degraded => (Tone::Warn, "degraded"),
        Health::Failing => (Tone::Bad, "failing"),
    }
}

/// The whole screen.
pub(crate) fn status(s: &AgentStatus, style: &Style, detail: Detail) -> String {
    let mut screen = Screen::new(style);
    agent(&mut screen, s, detail);
    components(&mut screen, s);
    controllers(&mut screen, s, style, detail);
    ipam(&mut screen, s);
    endpoints(&mut screen, s, detail);
    maps(&mut screen, s);
    if s.admission.waiting > 0 || s.admission.refused > 0 || detail.verbose {
        let a = &s.admission;
        let deletes = text::count(a.deletes, "delete");
        let admission = format!("{} waiting, {} running beside {deletes}, {} refused", a.waiting, a.running, a.refused);
        screen.line("Creates", &admission);
    }
    screen.line("Prepared programs", &format!("{}/{}", s.prepared.ready, s.prepared.target));
    screen.line("Proxy", &proxy(s));
    screen.line("Memory", &format!("{} resident", text::bytes(s.resident_bytes)));
    let problems = problems(s, style.now_unix_ms);
    if !problems.is_empty() {
        screen.gap();
        screen.heading("Problems:");
        for problem in problems {
            screen.item(problem.tone, &problem.what);
            screen.below_item(&format!("-> {}", problem.next));
        }
    }
    screen.finish()
}

fn agent(screen: &mut Screen<'_>, s: &AgentStatus, detail: Detail) {
    let (tone, word) = if s.serving { health(s.overall) } else { (Tone::Bad, "not serving") };
    let agent = format!("version {} (ABI {}), pid {}, up {}", s.version, s.abi_version, s.pid, text::span(s.uptime_ms));
    screen.toned("Wharf", tone, word, &agent);
    let router: Vec<String> = s.router.iter().map(ToString::to_string).collect();
    let router =
        if router.is_empty() { "no router address".to_owned() } else { format!("router {}", router.join(", ")) };
    screen.toned("Node", Tone::Plain, &s.node_name, &router);
    screen.toned("Kernel", Tone::Plain, &s.kernel.release, &format!("attach mode {}", s.kernel.attach_mode));
    let features = |wanted: bool| -> String {
        let names: Vec<&str> =
            s.kernel.features.iter().filter(|(_, has)| **has == wanted).map(|(name, _)| name.as_str()).collect();
        names.join(", ")
    };
    if detail.verbose {
        screen.line("  has", &features(true));
        screen.line("  has not", &features(false));
    }
}

fn components(screen: &mut Screen<'_>, s: &AgentStatus) {
    let well = s.components.iter().filter(|c| c.health <= Health::Pending).count();
    screen.line("Components", &format!("{well}/{} healthy", s.components.len()));
    for component in &s.components {
        let (tone, word) = health(component.health);
        screen.toned(&format!("  {}", text::cut(&component.name, 24)), tone, word, &component.message);
    }
}

fn controllers(screen: &mut Screen<'_>, s: &AgentStatus, style: &Style, detail: Detail) {
    let failing = |c: &&ControllerStatus| c.consecutive_failures > 0;
    let well = s.controllers.len() - s.controllers.iter().filter(failing).count();
    screen.line("Controllers", &format!("{well}/{} healthy", s.controllers.len()));
    let all = detail.verbose || detail.all_controllers;
    let rows: Vec<Vec<Cell>> =
        s.controllers.iter().filter(|c| all || failing(c)).map(|c| controller_row(c, style.now_unix_ms)).collect();
    if !rows.is_empty() {
        let header = ["  NAME", "LAST SUCCESS", "LAST ERROR", "COUNT", "IN A ROW", "MESSAGE"];
        screen.block(&table(style, &header, rows));
    }
}

fn controller_row(c: &ControllerStatus, now: u64) -> Vec<Cell> {
    let tone = if c.consecutive_failures > 0 { Tone::Bad } else { Tone::Plain };
    vec![
        token(format!("  {}", c.name)),
        token(text::ago(now, c.last_success_unix_ms.unwrap_or(0))),
        token(text::ago(now, c.last_failure_unix_ms.unwrap_or(0))),
        number(c.failures),
        number(c.consecutive_failures).tone(tone),
        cell(c.last_error.as_deref().unwrap_or("no error")).tone(tone),
    ]
}

fn ipam(screen: &mut Screen<'_>, s: &AgentStatus) {
    screen.line("IPAM", if s.ipam.is_empty() { "no pools" } else { "" });
    for pool in &s.ipam {
        let family = match pool.family {
            IpFamily::Ipv4 => "IPv4",
            IpFamily::Ipv6 => "IPv6",
        };
        let tone = if pool.used >= pool.total { Tone::Bad } else { Tone::Plain };
        let key = format!("  {} {family}", text::cut(&pool.name, 24));
        let resting = if pool.resting > 0 { format!("; {} resting", pool.resting) } else { String::new() };
        let rest = format!("{}{resting}", pool.cidrs.join(", "));
        screen.toned(&key, tone, &text::fill(pool.used, pool.total), &rest);
    }
}

fn endpoints(screen: &mut Screen<'_>, s: &AgentStatus, detail: Detail) {
    let total: u64 = s.endpoints.values().fold(0, |sum, n| sum.saturating_add(*n));
    let states: Vec<String> =
        s.endpoints.iter().filter(|(_, n)| **n > 0).map(|(state, n)| format!("{n} {state}")).collect();
    let refused = if detail.verbose {
        format!(" ({} since start)", text::count(s.refused_transitions, "refused move"))
    } else {
        String::new()
    };
    screen.toned("Endpoints", Tone::Plain, &total.to_string(), &(states.join(", ") + &refused));
}

fn maps(screen: &mut Screen<'_>, s: &AgentStatus) {
    let memory = s.bpf_maps.iter().fold(0u64, |sum, m| sum.saturating_add(m.memlock_bytes));
    screen.line("BPF maps", &format!("{} of kernel memory", text::bytes(memory)));
    for map in &s.bpf_maps {
        let tone = if is_nearly_full(map) { Tone::Warn } else { Tone::Plain };
        let rest = format!("{}, {}", map.kind, text::bytes(map.memlock_bytes));
        screen.toned(&format!("  {}", text::cut(&map.name, 24)), tone, &map_fill(map), &rest);
    }
}

/// `24/32768 (0.1%)`, or the capacity alone where rows cannot be counted or are always there.
pub(super) fn map_fill(map: &BpfMap) -> String {
    match map.entries {
        Some(entries) if entries == map.max_entries && map.kind.contains("array") => text::count(entries, "row"),
        Some(entries) => text::fill(entries, map.max_entries),
        None if map.kind.contains("ring") => text::bytes(map.max_entries),
        None => format!("-/{}", map.max_entries),
    }
}

/// A table that fills up refuses new rows. An array is always full and means nothing by it.
pub(super) fn is_nearly_full(map: &BpfMap) -> bool {
    !map.kind.contains("array")
        && map.entries.is_some_and(|n| u128::from(n) * 10 >= u128::from(map.max_entries) * 9 && map.max_entries > 0)
}

fn proxy(s: &AgentStatus) -> String {
    if s.proxy.enabled {
        format!(
            "{}, {} awaited, {} timed out",
            text::count(s.proxy.redirects, "redirect"),
            text::count(s.proxy.pending_completions, "completion"),
            s.proxy.timed_out_completions,
        )
    } else {
        "none".to_owned()
    }
}

#[cfg(test)]
mod tests;
