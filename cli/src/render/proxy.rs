//! `wharf proxy ...`.

use wharf_api::{ProxyListener, ProxyRequests, ProxyState, ProxyView};

use super::{
    Style, Tone,
    screen::Screen,
    table::{Cell, cell, lines, number, table, token},
    text,
};

/// Entries of a list that are shown below each other; the wide form shows all.
const SHOWN: usize = 4;

/// Envoy serves what rules need, or no rule needs one.
pub(crate) fn is_well(view: &ProxyView) -> bool {
    match view.state {
        ProxyState::Serving => view.outstanding.iter().all(|of| of.refusal.is_none()),
        ProxyState::Absent | ProxyState::Starting => view.listeners.is_empty(),
        ProxyState::Waiting => false,
    }
}

/// How Envoy is, and what it has not done.
pub(crate) fn status(view: &ProxyView, style: &Style) -> String {
    let mut screen = Screen::new(style);
    let tone = match view.state {
        ProxyState::Serving => Tone::Good,
        _ if is_well(view) => Tone::Dim,
        _ => Tone::Bad,
    };
    let since = format!("for {}", text::age(style.now_unix_ms, view.since_unix_ms));
    let words = match view.state {
        ProxyState::Absent if view.listeners.is_empty() => "no rule needs it, and the agent starts none".to_owned(),
        ProxyState::Absent => "rules need it, and the agent starts none".to_owned(),
        ProxyState::Starting => format!("{since}; it runs and is not connected to the agent"),
        ProxyState::Serving => since,
        ProxyState::Waiting => format!("{since}; it does not run, and is started again soon"),
    };
    screen.toned("Proxy", tone, view.state.as_str(), &words);
    if view.state == ProxyState::Absent && !view.listeners.is_empty() {
        let next = format!("start the agent with --envoy PATH, or Envoy with {}", view.bootstrap);
        screen.line("What to do", &next);
    }
    if view.version.is_some() || view.pid.is_some() || view.supervised {
        let version = view.version.as_deref().unwrap_or("version not told");
        let pid = view.pid.map_or_else(String::new, |pid| format!(", process {pid}"));
        let by = if view.supervised { "the agent starts it" } else { "the agent does not start it" };
        screen.line("Envoy", &format!("{version}{pid}; {by}, {}", text::count(view.restarts, "new start")));
    }
    if let Some(why) = &view.last_error {
        screen.line("Last error", why);
    }
    screen.line("Streams", &view.streams.to_string());
    let late = view.listeners.iter().filter(|listener| !listener.acknowledged).count();
    let late = if late > 0 { format!(", {late} not acknowledged") } else { String::new() };
    screen.line("Listeners", &format!("{}{late}", view.listeners.len()));
    if view.state != ProxyState::Serving && !view.listeners.is_empty() {
        let open = view.listeners.iter().filter(|listener| listener.fails_open).count();
        let fate = match (open, view.listeners.len() - open) {
            (0, _) => "are dropped".to_owned(),
            (_, 0) => "pass unseen (failOpen)".to_owned(),
            (open, closed) => {
                format!("of {} are dropped, of {open} pass unseen (failOpen)", text::count(closed as u64, "listener"))
            }
        };
        screen.toned("Connections", Tone::Warn, &format!("{fate}, because no proxy serves"), "");
    }
    let ProxyRequests { forwarded, denied, failed } = view.requests;
    let lost = if view.records_lost > 0 { format!("; {} more not told", view.records_lost) } else { String::new() };
    screen.line("Requests", &format!("{forwarded} forwarded, {denied} denied, {failed} failed{lost}"));
    let (pending, timed_out) = (view.completions_pending, view.completions_timed_out);
    screen.line("Completions", &format!("{pending} awaited by deletes, {timed_out} timed out"));
    if !view.outstanding.is_empty() {
        screen.gap();
        screen.heading("Outstanding:");
        for of in &view.outstanding {
            match &of.refusal {
                Some(why) => screen.item(Tone::Bad, &format!("{} was refused: {why}", of.listener)),
                None => screen.item(Tone::Warn, &format!("{} is not acknowledged", of.listener)),
            }
        }
    }
    screen.finish()
}

/// A row for each port.
pub(crate) fn listeners(view: &ProxyView, style: &Style, wide: bool) -> String {
    let most = if wide { usize::MAX } else { SHOWN };
    let header = ["PORT", "DIRECTION", "ENDPOINTS", "PASSES", "NO PROXY", "STATE"];
    let rows = view.listeners.iter().map(|listener| {
        let endpoints: Vec<String> = listener.endpoints.iter().map(ToString::to_string).collect();
        vec![
            number(listener.port),
            token(&listener.direction),
            lines(&endpoints, most),
            lines(&listener.passes, most),
            token(if listener.fails_open { "passes" } else { "dropped" }),
            state(listener, view.state),
        ]
    });
    table(style, &header, rows.collect())
}

fn state(listener: &ProxyListener, proxy: ProxyState) -> Cell {
    match &listener.refusal {
        Some(why) => cell(format!("refused: {why}")).tone(Tone::Bad),
        None if proxy != ProxyState::Serving => cell("no proxy").tone(Tone::Bad),
        None if listener.acknowledged => cell("serves").tone(Tone::Good),
        None => cell("not acknowledged").tone(Tone::Warn),
    }
}

/// A row for each wait.
pub(crate) fn completions(view: &ProxyView, style: &Style) -> String {
    let now = style.now_unix_ms;
    let rows = view.completions.iter().map(|wait| {
        let who = wait.endpoint.map_or_else(|| "change of policy".to_owned(), |id| format!("removal of endpoint {id}"));
        vec![
            token(&wait.listener),
            token(who),
            token(span(now.saturating_sub(wait.since_unix_ms))),
            token(span(wait.until_unix_ms.saturating_sub(now))),
        ]
    });
    table(style, &["LISTENER", "AWAITED BY", "FOR", "AT MOST"], rows.collect())
}

/// Waits are short.
fn span(ms: u64) -> String {
    if ms < 10_000 { format!("{ms} ms") } else { text::span(ms) }
}

/// What the proxy does for an endpoint, a line for each redirect.
pub(crate) fn of_endpoint(view: &ProxyView, id: u16) -> Vec<String> {
    let own = view.listeners.iter().filter(|listener| listener.endpoints.contains(&id));
    let told = |listener: &ProxyListener| {
        let ProxyListener { direction, port, passes, .. } = listener;
        let problem = match &listener.refusal {
            Some(why) => format!("; Envoy refused it: {why}"),
            None if view.state != ProxyState::Serving => "; no proxy serves".to_owned(),
            None if listener.acknowledged => String::new(),
            None => "; Envoy has not acknowledged it".to_owned(),
        };
        format!("{direction}, port {port}: {}{problem}", passes.join("; "))
    };
    own.map(told).collect()
}

#[cfg(test)]
mod tests;
