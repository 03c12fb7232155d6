//! `wharf status`.

mod problem;

use wharf_api::{AgentStatus, BpfMap, CommandStatus, ControllerStatus, DelegateStatus, Health, IpFamily};

use self::problem::problems;
use super::{
    Style, Tone,
    screen::Screen,
    table::{Cell, cell, number, table, token},
    text,
};

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Detail {
    pub(crate) verbose: bool,
    pub(crate) all_controllers: bool,
}

/// Characters of the last failed CNI command; the log has all.
const MAX_SUBJECT: usize = 40;
const MAX_WHY: usize = 160;
/// Longest socket path, bytes.
const MAX_SOCKET: usize = 107;

/// Fill in percent at which a map is a problem.
const PRESSURE: u8 = 80;
const NEARLY_FULL: u8 = 90;

pub(crate) const FROM_ADMIN: &str = "the API does not answer; this is from the admin thread";

pub(super) fn health(health: Health) -> (Tone, &'static str) {
    match health {
        Health::Ok => (Tone::Good, "OK"),
        Health::Pending => (Tone::Dim, "pending"),
        Health::Degraded => (Tone::Warn, "degraded"),
        Health::Failing => (Tone::Bad, "failing"),
    }
}

pub(crate) fn status(s: &AgentStatus, style: &Style, detail: Detail) -> String {
    let mut screen = Screen::new(style);
    agent(&mut screen, s, detail);
    components(&mut screen, s);
    controllers(&mut screen, s, style, detail);
    match &s.delegate {
        Some(delegate) => screen.line("Delegate", &service(delegate, s.deletion_queue.records, style.now_unix_ms)),
        None => {
            ipam(&mut screen, s);
            endpoints(&mut screen, s, detail);
            maps(&mut screen, s, detail);
        }
    }
    if let Some(commands) = commands(&s.commands, style.now_unix_ms) {
        screen.line("CNI commands", &commands);
    }
    if s.admission.waiting > 0 || s.admission.refused > 0 || detail.verbose {
        let a = &s.admission;
        let deletes = text::count(a.deletes, "delete");
        let admission = format!("{} waiting, {} running beside {deletes}, {} refused", a.waiting, a.running, a.refused);
        screen.line("Creates", &admission);
    }
    if let Some(flows) = s.network.flows.filter(|_| detail.verbose) {
        let (ago, took) = (text::ago(style.now_unix_ms, flows.collected_unix_ms), flows.took_us);
        let collected = format!("{} expired, {} orphaned; last {ago}, in {took} µs", flows.expired, flows.orphaned);
        screen.line("Flows collected", &collected);
    }
    if s.delegate.is_none() {
        screen.line("Prepared programs", &format!("{}/{}", s.prepared.ready, s.prepared.target));
        screen.line("Proxy", &proxy(s));
    }
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
    if s.delegate.is_some() {
        screen.toned("Node", Tone::Plain, &s.node_name, "its network is made by a service");
        return;
    }
    let router: Vec<String> = s.router.iter().map(ToString::to_string).collect();
    let router =
        if router.is_empty() { "no router address".to_owned() } else { format!("router {}", router.join(", ")) };
    screen.toned("Node", Tone::Plain, &s.node_name, &router);
    screen.toned("Kernel", Tone::Plain, &s.kernel.release, &format!("attach mode {}", s.kernel.attach_mode));
    if !s.network.device_mode.is_empty() {
        screen.line("Device mode", &s.network.device_mode);
        if !s.network.mtu.is_empty() {
            screen.line("MTU", &s.network.mtu);
        }
        screen.line("Routing", &s.network.routing);
    }
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
        let stale = component.stale_ms.map(|age| format!("{word}, stale {}", text::span(age)));
        let head = stale.as_deref().unwrap_or(word);
        screen.toned(&format!("  {}", text::cut(&component.name, 24)), tone, head, &component.message);
    }
}

fn controllers(screen: &mut Screen<'_>, s: &AgentStatus, style: &Style, detail: Detail) {
    let well = s.controllers_total.saturating_sub(s.controllers_unwell);
    screen.line("Controllers", &format!("{well}/{} healthy", s.controllers_total));
    let all = detail.verbose || detail.all_controllers;
    let now = style.now_unix_ms;
    let rows: Vec<Vec<Cell>> =
        s.controllers.iter().filter(|c| all || c.is_unwell()).map(|c| controller_row(c, now)).collect();
    if !rows.is_empty() {
        let header = ["  NAME", "LAST SUCCESS", "LAST ERROR", "COUNT", "NEXT RUN", "MESSAGE"];
        screen.block(&table(style, &header, rows));
    }
}

/// `endpoint-7-regeneration`, or only the controller's name.
pub(super) fn controller_name(c: &ControllerStatus) -> String {
    c.endpoint.map_or_else(|| c.name.clone(), |id| format!("endpoint-{id}-{}", c.name))
}

fn controller_row(c: &ControllerStatus, now: u64) -> Vec<Cell> {
    let tone = if c.is_unwell() { Tone::Bad } else { Tone::Plain };
    let next = match (c.running_since_unix_ms, c.next_run_unix_ms) {
        _ if c.stopped => "stopped".to_owned(),
        (Some(since), _) => format!("runs {}", text::age(now, since)),
        (None, Some(next)) if next < now.saturating_add(1_000) => "now".to_owned(),
        (None, Some(next)) => format!("in {}", text::span(next.saturating_sub(now))),
        (None, None) => "on demand".to_owned(),
    };
    let message = match (&c.last_error, c.overdue) {
        (_, true) => "does not end",
        (Some(error), false) if c.consecutive_failures > 0 => error,
        _ => "no error",
    };
    vec![
        token(format!("  {}", controller_name(c))),
        token(text::ago(now, c.last_success_unix_ms.unwrap_or(0))),
        token(text::ago(now, c.last_failure_unix_ms.unwrap_or(0))),
        number(c.failures),
        token(next),
        cell(message).tone(tone),
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

fn service(s: &DelegateStatus, deletions: u64, now: u64) -> String {
    let name = if s.service.is_empty() { String::new() } else { format!("{} at ", text::cut(&s.service, MAX_SUBJECT)) };
    let since = text::age(now, s.since_unix_ms);
    let socket = text::cut(&s.socket, MAX_SOCKET);
    let mut line = match s.reachable {
        None => format!("{socket}, not asked yet"),
        Some(true) => format!("{name}{socket}, reached for {since}"),
        // The component shows the reason.
        Some(false) => format!("{name}{socket}, not reached for {since}"),
    };
    if let Some(refusal) = &s.refusal {
        line.push_str(&format!("; it takes no ADD: {} (code {})", text::cut(&refusal.message, MAX_WHY), refusal.code));
    }
    match deletions {
        0 => {}
        1 => line.push_str("; 1 deletion waits"),
        n => line.push_str(&format!("; {n} deletions wait")),
    }
    if s.unfinished > 0 {
        line.push_str(&format!("; {} to be undone", text::count(s.unfinished, "ADD")));
    }
    line
}

fn commands(c: &CommandStatus, now: u64) -> Option<String> {
    if c.succeeded == 0 && c.failed == 0 && c.deferred == 0 {
        return None;
    }
    let mut line = format!("{} ok, {} failed", c.succeeded, c.failed);
    if c.deferred > 0 {
        line.push_str(&format!(", {} deferred", c.deferred));
    }
    if let Some(last) = &c.last_failure {
        let name = if last.pod_name.is_empty() { &last.container_id } else { &last.pod_name };
        let subject = if name.is_empty() { &last.network } else { name };
        let (subject, why) = (text::cut(subject, MAX_SUBJECT), text::cut(&last.message, MAX_WHY));
        line.push_str(&format!(" (last: {} {subject} {}: {why})", last.command, text::ago(now, last.ended_unix_ms)));
    }
    Some(line)
}

/// `verbose`: one row per map.
fn maps(screen: &mut Screen<'_>, s: &AgentStatus, detail: Detail) {
    let memory = s.bpf_maps.iter().fold(0u64, |sum, m| sum.saturating_add(m.memlock_bytes));
    screen.line("BPF maps", &format!("{} of kernel memory", text::bytes(memory)));
    for map in s.bpf_maps.iter().filter(|map| detail.verbose || is_filled(map, PRESSURE)) {
        let tone = if is_nearly_full(map) { Tone::Warn } else { Tone::Plain };
        let rest = format!("{}, {}", map.kind, text::bytes(map.memlock_bytes));
        screen.toned(&format!("  {}", text::cut(&map.name, 24)), tone, &map_fill(map), &rest);
    }
}

/// `24/32768 (0.1%)`, or only the capacity for uncountable or constant rows.
pub(super) fn map_fill(map: &BpfMap) -> String {
    match map.entries {
        Some(entries) if entries == map.max_entries && map.kind.contains("array") => text::count(entries, "row"),
        Some(entries) => text::fill(entries, map.max_entries),
        None if map.kind.contains("ring") => text::bytes(map.max_entries),
        None => format!("-/{}", map.max_entries),
    }
}

pub(super) fn is_nearly_full(map: &BpfMap) -> bool {
    is_filled(map, NEARLY_FULL)
}

/// False for arrays, which are always full.
fn is_filled(map: &BpfMap, percent: u8) -> bool {
    let reaches = |n: u64| u128::from(n) * 100 >= u128::from(map.max_entries) * u128::from(percent);
    !map.kind.contains("array") && map.max_entries > 0 && map.entries.is_some_and(reaches)
}

fn proxy(s: &AgentStatus) -> String {
    if s.proxy.enabled {
        format!(
            "{}, {}, {} awaited, {} timed out",
            s.proxy.state.as_str(),
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
