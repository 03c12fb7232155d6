//! `wharf endpoint ...`.

mod list;

use std::fmt::Write as _;

use wharf_api::{
    DeleteResult, Endpoint, EndpointConfigView, EndpointHealth, EndpointLabels, EndpointLogEntry, EndpointMode,
    EndpointState, Enforcement, LogStatus, NamedPort, SelfCheck, SelfCheckCase,
};

use super::{
    Style, Tone, audit,
    screen::Screen,
    status::health,
    table::{Cell, cell, lines, table, token},
    text,
};

pub(crate) use list::{Columns, Following, list, short_ids};

pub(crate) fn state(state: EndpointState) -> &'static str {
    match state {
        EndpointState::WaitingForIdentity => "waiting-for-identity",
        EndpointState::WaitingToRegenerate => "waiting-to-regenerate",
        EndpointState::Regenerating => "regenerating",
        EndpointState::Ready => "ready",
        EndpointState::Restoring => "restoring",
        EndpointState::Disconnecting => "disconnecting",
        EndpointState::Disconnected => "disconnected",
        EndpointState::Invalid => "invalid",
    }
}

fn state_tone(state: EndpointState) -> Tone {
    match state {
        EndpointState::Ready => Tone::Good,
        EndpointState::Invalid => Tone::Bad,
        EndpointState::Disconnected => Tone::Dim,
        _ => Tone::Warn,
    }
}

fn state_cell(e: &Endpoint) -> Cell {
    let word = state(e.state);
    if e.status.problem.is_some() {
        return token("failing").tone(Tone::Bad);
    }
    if e.status.failures > 0 {
        let failures = text::count(u64::from(e.status.failures), "failure");
        // Keeps the line break; no part is untrusted.
        return lines(&[word, &format!("({failures})")], 2).whole().tone(Tone::Bad);
    }
    token(word).tone(state_tone(e.state))
}

fn pod(e: &Endpoint) -> Option<String> {
    let name = e.pod_name.as_deref()?;
    Some(match e.pod_namespace.as_deref() {
        Some(namespace) => format!("{namespace}/{name}"),
        None => name.to_owned(),
    })
}

/// Remark on untranslated ports.
pub(crate) const PORTS_OFF: &str = "off: the agent runs with --masquerade off, so nothing translates these ports; restart it with \
     --masquerade on, or recreate the container without them";

/// `redirects`: the proxy's actions for the endpoint.
pub(crate) fn get(e: &Endpoint, redirects: &[String], style: &Style) -> String {
    let mut screen = Screen::new(style);
    let now = style.now_unix_ms;
    screen.line("Endpoint", &format!("{} (epoch {})", e.id, e.epoch));
    match &e.status.problem {
        Some(problem) => screen.toned("State", Tone::Bad, "failing:", problem),
        None => screen.toned("State", state_tone(e.state), state(e.state), ""),
    }
    activity(&mut screen, e, now);
    screen.line("Identity", &e.identity.to_string());
    for (i, label) in e.labels.iter().enumerate() {
        screen.line(if i == 0 { "Labels" } else { "" }, label);
    }
    screen.line("Container", &format!("{} {}", e.container_id, e.ifname));
    screen.line("Network", &e.network);
    if let Some(pod) = pod(e) {
        screen.line("Pod", &pod);
    }
    if let Some(runtime) = &e.runtime {
        screen.line("Runtime", runtime);
    }
    screen.line("Netns", &e.netns);
    let address = |ip: Option<String>, gateway: Option<String>| match (ip, gateway) {
        (Some(ip), Some(gateway)) => format!("{ip}  gateway {gateway}"),
        (Some(ip), None) => ip,
        (None, _) => "none".to_owned(),
    };
    screen.line("IPv4", &address(e.ipv4.map(|ip| ip.to_string()), e.gateway4.map(|ip| ip.to_string())));
    screen.line("IPv6", &address(e.ipv6.map(|ip| ip.to_string()), e.gateway6.map(|ip| ip.to_string())));
    for (i, port) in e.ports.iter().enumerate() {
        let lead = format!("{} to port {}", port, port.container_port);
        screen.line(if i == 0 { "Ports" } else { "" }, &lead);
    }
    if e.ports_off {
        screen.toned("", Tone::Warn, PORTS_OFF, "");
    }
    if let Some(masquerade) = e.masquerade {
        screen.line(
            "Masquerade",
            if masquerade { "on (ipMasq)" } else { "off (ipMasq): other networks see its address" },
        );
    }
    for (title, limit) in [("Ingress limit", e.bandwidth.ingress), ("Egress limit", e.bandwidth.egress)] {
        if let Some(limit) = limit {
            screen.line(title, &format!("{}bit/s, burst {}bit", text::decimal(limit.rate), text::decimal(limit.burst)));
        }
    }
    for (i, prefix) in e.source_prefixes.iter().enumerate() {
        screen.line(if i == 0 { "Source prefixes" } else { "" }, &prefix.to_string());
    }
    if e.policy_enforcement != Enforcement::Default {
        let mode = if e.policy_enforcement == Enforcement::Always { "always" } else { "never" };
        screen.line("Enforcement", &format!("{mode} (its own, in place of the node's mode)"));
    }
    for (i, (name, NamedPort { port, protocol })) in e.named_ports.iter().enumerate() {
        screen.line(if i == 0 { "Named ports" } else { "" }, &format!("{name} {port}/{protocol}"));
    }
    for (i, redirect) in redirects.iter().enumerate() {
        screen.line(if i == 0 { "Redirects" } else { "" }, redirect);
    }
    match (&e.ipam, e.mode) {
        (Some(plugin), _) => {
            screen.line("IPAM", &format!("{plugin} (CNI plugin; it leases and releases the addresses)"))
        }
        (None, EndpointMode::Chained) => {
            screen.line("Mode", "chained (another plugin made the link and leased the addresses)");
        }
        (None, _) => screen.line("Pool", &e.pool),
    }
    for (i, route) in e.routes.iter().flatten().enumerate() {
        let by = route.gw.map_or_else(String::new, |gw| format!(" by {gw}"));
        screen.line(if i == 0 { "Routes" } else { "" }, &format!("{}{by}", route.dst));
    }
    if e.routes.as_ref().is_some_and(Vec::is_empty) {
        screen.line("Routes", "none: it reaches nobody by this interface but its gateways");
    }
    screen.line("MAC", &e.container_mac);
    screen.line("MTU", &e.mtu.to_string());
    screen.line("Host interface", &format!("{} (index {}, MAC {})", e.host_ifname, e.ifindex, e.host_mac));
    let created = format!("{} ({})", text::timestamp(e.created_unix_ms), text::ago(now, e.created_unix_ms));
    screen.line("Created", &created);
    screen.finish()
}

fn activity(screen: &mut Screen<'_>, e: &Endpoint, now: u64) {
    let s = &e.status;
    let since = text::ago(now, s.since_unix_ms);
    if !s.phase.is_empty() {
        screen.line("Phase", &format!("{}, began {since}", s.phase));
    }
    if !s.waits_for.is_empty() {
        let ends = if s.ends_when.is_empty() { String::new() } else { format!("; ends when {}", s.ends_when) };
        screen.line("Waits for", &format!("{}, since {since}{ends}", s.waits_for));
    }
    screen.line("Builds", &format!("{} succeeded", s.regenerations));
    if s.failures > 0 || s.last_error.is_some() {
        let why = s.last_error.as_deref().unwrap_or("no reason given");
        let times = format!("{} in a row:", text::count(u64::from(s.failures), "failure"));
        screen.toned("Last build", Tone::Bad, &times, why);
    }
}

pub(crate) fn log(entries: &[EndpointLogEntry], style: &Style) -> String {
    let rows = entries
        .iter()
        .map(|e| {
            let (tone, word) = match e.status {
                LogStatus::Ok => (Tone::Good, "ok"),
                LogStatus::Warning => (Tone::Warn, "warning"),
                LogStatus::Failure => (Tone::Bad, "failure"),
            };
            vec![
                token(text::timestamp(e.time_unix_ms)),
                token(word).tone(tone),
                token(state(e.state)),
                token(&e.event),
                cell(&e.message),
            ]
        })
        .collect();
    table(style, &["TIME", "STATUS", "STATE", "EVENT", "MESSAGE"], rows)
}

pub(crate) fn endpoint_health(h: &EndpointHealth, style: &Style) -> String {
    let mut screen = Screen::new(style);
    for (key, value, words) in [
        ("Overall", h.overall, String::new()),
        ("BPF", h.bpf, String::new()),
        ("Self-check", h.self_check.state, self_check_words(&h.self_check, style)),
        // Field `policy` is the last build's result.
        ("Last build", h.policy, String::new()),
        ("Connected", h.connected, String::new()),
    ] {
        let (tone, word) = health(value);
        screen.toned(key, tone, word, &words);
    }
    if let Some(alarm) = &h.self_check.alarm {
        screen.line("Alarm", &format!("for {}; {}", text::age(style.now_unix_ms, alarm.since_unix_ms), alarm.done));
    }
    if !h.findings.is_empty() {
        screen.gap();
        screen.heading("Findings:");
        for finding in &h.findings {
            screen.item(Tone::Warn, &audit::words(finding));
        }
    }
    if !h.self_check.cases.is_empty() {
        screen.gap();
        let rows = h.self_check.cases.iter().map(self_check_row).collect();
        screen.block(&table(style, &["TEST PACKET", "EXPECTED", "GOT"], rows));
    }
    screen.finish()
}

fn self_check_words(check: &SelfCheck, style: &Style) -> String {
    let well = check.cases.iter().filter(|case| case.ok).count();
    let when = check.checked_unix_ms.map(|then| {
        format!(
            "{well} of {} as expected, {}",
            text::count(check.cases.len() as u64, "test packet"),
            text::ago(style.now_unix_ms, then)
        )
    });
    let words: Vec<&str> = when.as_deref().into_iter().chain(check.error.as_deref()).collect();
    words.join("; ")
}

fn self_check_row(case: &SelfCheckCase) -> Vec<Cell> {
    let got = if case.ok { cell("the same") } else { cell(&case.got).tone(Tone::Bad) };
    vec![token(&case.name), cell(&case.expected), got]
}

/// Marks security-relevant labels.
pub(crate) fn labels(l: &EndpointLabels, style: &Style) -> String {
    let rows = l
        .labels
        .iter()
        .map(|label| {
            let relevant = l.security_relevant.contains(label);
            vec![cell(label), token(if relevant { "yes" } else { "no" })]
        })
        .collect();
    let mut screen = Screen::new(style);
    screen.line("Identity", &l.identity.to_string());
    screen.block(&table(style, &["LABEL", "MAKES IDENTITY"], rows));
    screen.finish()
}

/// Marks differing realized settings.
pub(crate) fn config(c: &EndpointConfigView, style: &Style) -> String {
    let mut keys: Vec<&String> = c.desired.keys().chain(c.realized.keys()).collect();
    keys.sort();
    keys.dedup();
    let rows = keys
        .into_iter()
        .map(|key| {
            let (desired, realized) = (c.desired.get(key), c.realized.get(key));
            let tone = if desired == realized { Tone::Plain } else { Tone::Bad };
            let value = |v: Option<&String>| cell(v.map_or("-", String::as_str));
            vec![token(key), value(desired), value(realized).tone(tone)]
        })
        .collect();
    table(style, &["SETTING", "DESIRED", "REALIZED"], rows)
}

pub(crate) fn regenerated(e: &Endpoint) -> String {
    let s = &e.status;
    match &s.last_error {
        Some(why) => format!(
            "endpoint {} not regenerated: {}\nthe last good state stays in force; it is tried again\n",
            e.id,
            text::safe(why),
        ),
        None => format!("endpoint {} regenerated, {}\n", e.id, state(e.state)),
    }
}

pub(crate) fn deleted(d: &DeleteResult) -> String {
    let mut out = String::new();
    for id in &d.deleted {
        let _ = writeln!(out, "endpoint {id} deleted");
    }
    for ip in &d.leases_released {
        let _ = writeln!(out, "lease {ip} released");
    }
    for e in &d.errors {
        let _ =
            writeln!(out, "failed: {} of {}: {}", text::safe(&e.step), text::safe(&e.endpoint), text::safe(&e.message));
    }
    if out.is_empty() {
        out.push_str("nothing to delete\n");
    }
    out
}

#[cfg(test)]
mod tests;
