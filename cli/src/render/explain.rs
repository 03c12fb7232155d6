//! `wharf explain`.

use wharf_api::{Explanation, Health, KernelLook, LogStatus, MetricRow, SubjectKind, TimelineEntry};

use super::{
    Style, Tone, audit,
    screen::Screen,
    table::{cell, number, table, token},
    text,
};

pub(crate) fn explain(e: &Explanation, style: &Style) -> String {
    let mut screen = Screen::new(style);
    let (tone, word) = match (e.kind, e.health) {
        (SubjectKind::Several | SubjectKind::Unknown, _) => (Tone::Warn, ""),
        (SubjectKind::PastEndpoint, Health::Ok) => (Tone::Dim, "Gone"),
        (_, Health::Ok) => (Tone::Good, "OK"),
        (_, Health::Pending) => (Tone::Warn, "Pending"),
        (_, Health::Degraded) => (Tone::Warn, "Degraded"),
        (_, Health::Failing) => (Tone::Bad, "Failing"),
    };
    let subject = text::cut(&e.subject, 60);
    // The operator's spelling keeps its case.
    let subject = match e.kind {
        SubjectKind::Address | SubjectKind::Several | SubjectKind::Unknown => subject,
        _ => capital(&subject),
    };
    screen.toned(&subject, tone, word, &e.summary);
    for fact in &e.facts {
        screen.line(&capital(&fact.name), &fact.value);
    }
    if let Some(state) = e.endpoint.as_ref().map(|e| super::endpoint::state(e.state)) {
        screen.line("State", state);
    }
    if let Some(wait) = &e.waits {
        let since = text::ago(style.now_unix_ms, wait.since_unix_ms);
        screen
            .line("Waits for", &format!("{}, since {} ({since})", wait.waits_for, text::timestamp(wait.since_unix_ms)));
        if !wait.ends_when.is_empty() {
            screen.line("What ends the wait", &wait.ends_when);
        }
    }
    if let Some(look) = &e.kernel {
        kernel(&mut screen, look, e.kind);
    }
    if !e.errors.is_empty() {
        screen.gap();
        screen.heading("Errors, the last first");
        for error in &e.errors {
            let when = text::ago(style.now_unix_ms, error.time_unix_ms);
            screen.item(Tone::Bad, &format!("{when}, {} {}: {}", error.operation, error.phase, error.text));
        }
    }
    if !e.verdicts.is_empty() {
        screen.gap();
        screen.heading(&verdict_summary(&e.verdicts));
        screen.block(&verdicts(&e.verdicts, style));
    }
    if !e.timeline.is_empty() {
        screen.gap();
        let left_out = if e.left_out > 0 { format!("; {} between are left out", e.left_out) } else { String::new() };
        screen.heading(&format!("Timeline, from {} (UTC){left_out}", began(&e.timeline)));
        screen.block(&timeline(&e.timeline, style));
    }
    if !e.before.is_empty() {
        screen.gap();
        screen.heading("Before");
        let rows = e.before.iter().map(|b| {
            vec![
                token(text::cut(&b.attachment, 40)),
                number(b.endpoint),
                number(b.epoch),
                token(text::timestamp(b.created_unix_ms)),
                cell(format!("{}, {}", b.end, text::ago(style.now_unix_ms, b.ended_unix_ms))),
            ]
        });
        screen.block(&table(style, &["ATTACHMENT", "ID", "EPOCH", "CREATED", "END"], rows.collect()));
    }
    if !e.candidates.is_empty() {
        screen.gap();
        screen.heading(if e.kind == SubjectKind::Several { "Ask for one of" } else { "What is near" });
        for candidate in &e.candidates {
            screen.item(Tone::Plain, &format!("{}  {}", candidate.subject, candidate.what));
        }
    }
    if !e.searched.is_empty() {
        screen.gap();
        screen.heading("Searched");
        for place in &e.searched {
            screen.item(Tone::Dim, place);
        }
    }
    screen.finish()
}

fn capital(name: &str) -> String {
    let mut chars = name.chars();
    match chars.next() {
        Some(first) if name.starts_with(|c: char| c.is_ascii_lowercase()) && !name.starts_with("wh0") => {
            first.to_ascii_uppercase().to_string() + chars.as_str()
        }
        _ => name.to_owned(),
    }
}

fn kernel(screen: &mut Screen<'_>, look: &KernelLook, kind: SubjectKind) {
    match (&look.could_not_look, look.findings.as_slice()) {
        (Some(why), _) => screen.toned("Kernel", Tone::Warn, "could not look", why),
        (None, []) if kind == SubjectKind::PastEndpoint => screen.line("Kernel", "holds nothing of it"),
        (None, []) => screen.line("Kernel", "holds what it should, and nothing else"),
        (None, findings) => {
            let many = findings.len() as u64;
            screen.toned("Kernel", Tone::Bad, "does not match", &format!("in {}", text::count(many, "thing")));
            for finding in findings {
                screen.item(Tone::Bad, &audit::words(finding));
            }
        }
    }
}

fn verdict_summary(rows: &[MetricRow]) -> String {
    let sum = |dropped: bool| rows.iter().filter(|r| r.dropped == dropped).map(|r| r.packets).sum::<u64>();
    format!("Packets: {} forwarded, {} dropped", sum(false), sum(true))
}

fn verdicts(rows: &[MetricRow], style: &Style) -> String {
    let row = |r: &MetricRow| {
        let (tone, verdict) = if r.dropped { (Tone::Bad, "dropped") } else { (Tone::Plain, "forwarded") };
        vec![token(&r.direction), token(verdict).tone(tone), token(&r.reason), number(r.packets), number(r.bytes)]
    };
    table(style, &["DIRECTION", "VERDICT", "REASON", "PACKETS", "BYTES"], rows.iter().map(row).collect())
}

fn began(timeline: &[TimelineEntry]) -> String {
    timeline.first().map(|e| text::timestamp(e.time_unix_ms)).unwrap_or_default()
}

/// With time, offset from the first entry, and duration.
fn timeline(entries: &[TimelineEntry], style: &Style) -> String {
    let first = entries.first().map_or(0, |e| e.time_unix_ms);
    let row = |e: &TimelineEntry| {
        let (tone, outcome) = match e.outcome {
            LogStatus::Ok => (Tone::Plain, "ok"),
            LogStatus::Warning => (Tone::Warn, "warning"),
            LogStatus::Failure => (Tone::Bad, "failed"),
        };
        vec![
            token(text::time_of_day(e.time_unix_ms)),
            number(format!("+{}", length_ms(e.time_unix_ms.saturating_sub(first)))),
            token(&e.operation),
            token(&e.phase),
            number(e.took_us.map_or_else(|| "-".to_owned(), length_us)),
            token(outcome).tone(tone),
            cell(&e.text),
        ]
    };
    let header = ["TIME", "AFTER", "OPERATION", "PHASE", "TOOK", "OUTCOME", "WHAT"];
    table(style, &header, entries.iter().map(row).collect())
}

fn length_ms(ms: u64) -> String {
    if ms < 10_000 { format!("{ms}ms") } else { text::span(ms) }
}

/// `3us`, `1.2ms`, `3.4s`, `2m10s`.
fn length_us(us: u64) -> String {
    match us {
        0..1_000 => format!("{us}us"),
        1_000..1_000_000 => format!("{}.{}ms", us / 1_000, us % 1_000 / 100),
        1_000_000..60_000_000 => format!("{}.{}s", us / 1_000_000, us % 1_000_000 / 100_000),
        _ => text::span(us / 1_000),
    }
}

#[cfg(test)]
mod tests;
