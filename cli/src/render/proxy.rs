//! `wharf proxy ...`.

use wharf_api::{ProxyListener, ProxyName, ProxyRequests, ProxyServer, ProxyState, ProxyView};

use super::{
    Style, Tone,
    screen::Screen,
    table::{Cell, cell, lines, number, table, token},
    text,
};

/// Most entries of a list; the wide form has no limit.
const SHOWN: usize = 4;

/// Whether all needed listeners are served.
pub(crate) fn is_well(view: &ProxyView) -> bool {
    let is_served = match view.state {
        ProxyState::Serving => true,
        ProxyState::Absent | ProxyState::Starting => of_envoy(view).next().is_none(),
        ProxyState::Waiting => false,
    };
    is_served && view.outstanding.iter().all(|of| of.refusal.is_none())
}

fn of_envoy(view: &ProxyView) -> impl Iterator<Item = &ProxyListener> {
    view.listeners.iter().filter(|listener| listener.served_by == ProxyServer::Envoy)
}

/// Whether the listener needs Envoy while it does not serve.
fn has_no_proxy(listener: &ProxyListener, proxy: ProxyState) -> bool {
    listener.served_by == ProxyServer::Envoy && proxy != ProxyState::Serving
}

pub(crate) fn status(view: &ProxyView, style: &Style) -> String {
    let mut screen = Screen::new(style);
    let tone = match view.state {
        ProxyState::Serving => Tone::Good,
        _ if is_well(view) => Tone::Dim,
        _ => Tone::Bad,
    };
    let since = format!("for {}", text::age(style.now_unix_ms, view.since_unix_ms));
    let words = match view.state {
        ProxyState::Absent if of_envoy(view).next().is_none() => {
            "no rule needs it, and the agent starts none".to_owned()
        }
        ProxyState::Absent => "rules need it, and the agent starts none".to_owned(),
        ProxyState::Starting => format!("{since}; it runs and is not connected to the agent"),
        ProxyState::Serving => since,
        ProxyState::Waiting => format!("{since}; it does not run, and is started again soon"),
    };
    screen.toned("Proxy", tone, view.state.as_str(), &words);
    if view.state == ProxyState::Absent && of_envoy(view).next().is_some() {
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
    let unserved: Vec<_> = view.listeners.iter().filter(|listener| has_no_proxy(listener, view.state)).collect();
    if !unserved.is_empty() {
        let open = unserved.iter().filter(|listener| listener.fails_open).count();
        let fate = match (open, unserved.len() - open) {
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
        None if has_no_proxy(listener, proxy) => cell("no proxy").tone(Tone::Bad),
        None if listener.acknowledged => cell("serves").tone(Tone::Good),
        None => cell("not acknowledged").tone(Tone::Warn),
    }
}

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

/// Only a name's first row shows it.
pub(crate) fn names(names: &[ProxyName], style: &Style) -> String {
    let rows = names.iter().flat_map(|of| {
        of.addresses.iter().enumerate().map(|(at, address)| {
            let left = match address.until_unix_ms.saturating_sub(style.now_unix_ms) {
                0 => "in use".to_owned(),
                left => text::span(left),
            };
            let name = if at == 0 { of.name.as_str() } else { "" };
            vec![cell(name), token(address.address.to_string()), token(left)]
        })
    });
    table(style, &["NAME", "ADDRESS", "FOR"], rows.collect())
}

/// In milliseconds below 10 s.
fn span(ms: u64) -> String {
    if ms < 10_000 { format!("{ms} ms") } else { text::span(ms) }
}

/// One line per redirect.
pub(crate) fn of_endpoint(view: &ProxyView, id: u16) -> Vec<String> {
    let own = view.listeners.iter().filter(|listener| listener.endpoints.contains(&id));
    let told = |listener: &ProxyListener| {
        let ProxyListener { direction, port, passes, .. } = listener;
        let problem = match &listener.refusal {
            Some(why) if listener.served_by == ProxyServer::Agent => format!("; {why}"),
            Some(why) => format!("; Envoy refused it: {why}"),
            None if has_no_proxy(listener, view.state) => "; no proxy serves".to_owned(),
            None if listener.acknowledged => String::new(),
            None if listener.served_by == ProxyServer::Agent => "; it is not open yet".to_owned(),
            None => "; Envoy has not acknowledged it".to_owned(),
        };
        format!("{direction}, port {port}: {}{problem}", passes.join("; "))
    };
    own.map(told).collect()
}

#[cfg(test)]
mod tests;
