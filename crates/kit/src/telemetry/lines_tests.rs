use tracing_subscriber::layer::SubscriberExt;
use wharf_core::ids::{Attachment, ContainerId, IfName, NetworkName};

use super::*;
use crate::telemetry::operation::{Kind, OpId};

const HOSTILE: &str = "a\nINFO forged: \u{1b}[2J\u{9b}31m\u{202e}evil\u{200b}\"=\\";

fn logged(format: LogFormat, body: impl FnOnce(&Shape)) -> Vec<String> {
    let written = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&written);
    let shape = Arc::new(Shape::new(format, false, Box::new(move |line| lock(&sink).push(line.to_owned()))));
    let subscriber = tracing_subscriber::registry().with(Lines::new(Arc::clone(&shape)));
    tracing::subscriber::with_default(subscriber, || body(&shape));
    std::mem::take(&mut *lock(&written))
}

fn body_of(line: &str) -> &str {
    line.split_once(' ').map_or(line, |(_, rest)| rest)
}

fn one_line(lines: &[String]) -> &str {
    assert_eq!(lines.len(), 1, "{lines:?}");
    let line = lines[0].strip_suffix('\n').expect("a line ends");
    assert!(!line.chars().any(is_hidden), "{line:?}");
    line
}

#[test]
fn hostile_bytes_cannot_end_a_line_or_drive_a_terminal() {
    let text =
        logged(LogFormat::Text, |_| tracing::warn!(file = HOSTILE, path = %HOSTILE, kind = ?HOSTILE, "{HOSTILE}"));
    let line = body_of(one_line(&text)).to_owned();
    let escaped = r"a\nINFO forged: \u{1b}[2J\u{9b}31m\u{202e}evil\u{200b}";
    assert!(line.trim_start().starts_with(&format!("WARN wharf_kit::telemetry::lines::tests: {escaped}")), "{line}");
    assert!(line.contains(&format!(r#"file="{escaped}\"=\\" path="{escaped}"#)), "{line}");

    let json = logged(LogFormat::Json, |_| tracing::warn!(file = HOSTILE, path = %HOSTILE, "{HOSTILE}"));
    let object: Value = serde_json::from_str(one_line(&json)).expect("JSON");
    assert_eq!(
        (&object["file"], &object["path"], &object["message"]),
        (&HOSTILE.into(), &HOSTILE.into(), &HOSTILE.into())
    );
}

#[test]
fn a_field_cannot_take_the_place_of_the_lines_own() {
    let json = logged(LogFormat::Json, |_| tracing::warn!(level = "ERROR", target = "x", timestamp = 0, "m"));
    let object: Value = serde_json::from_str(one_line(&json)).expect("JSON");
    assert_eq!((object["level"].as_str(), object["message"].as_str()), (Some("WARN"), Some("m")));
    assert!(object["timestamp"].is_string() && object["target"] != "x", "{object}");
}

#[test]
fn a_line_tells_the_operation_it_belongs_to_and_nothing_twice() {
    let attachment = Attachment {
        network: NetworkName::parse("harbour").expect("name"),
        container_id: ContainerId::parse("c1").expect("id"),
        ifname: IfName::parse("eth0").expect("name"),
    };
    let op = OpId::next(Kind::Create);
    let text = logged(LogFormat::Text, |_| {
        let outer = OpId::next(Kind::Restore).span();
        let span = outer.in_scope(|| op.span());
        let ids = Some(("7".parse().expect("id"), wharf_core::ids::Epoch(41)));
        crate::telemetry::operation::about(&span, ids, &attachment);
        span.in_scope(|| tracing::error!(endpoint = 7, step = "ensure-link", "create: {}", "no"));
    });
    let line = body_of(one_line(&text));
    assert_eq!(
        line.trim_start(),
        format!(
            "ERROR wharf_kit::telemetry::lines::tests: create: no op={op} endpoint=7 epoch=41 attachment={attachment} step=ensure-link"
        )
    );
}

#[test]
fn a_span_crosses_a_spawned_task() {
    use tracing::Instrument;
    let op = OpId::next(Kind::Delete);
    let lines = logged(LogFormat::Json, |_| {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("runtime");
        runtime.block_on(async {
            let work = async { tokio::spawn(async { tracing::info!("inside") }.in_current_span()).await };
            work.instrument(op.span()).await.expect("joined");
        });
    });
    let object: Value = serde_json::from_str(one_line(&lines)).expect("JSON");
    assert_eq!(object["op"], op.to_string());
}

#[test]
fn the_format_changes_between_two_lines() {
    let lines = logged(LogFormat::Text, |shape| {
        tracing::info!("one");
        shape.set(LogFormat::Json);
        tracing::info!("two");
    });
    assert!(lines[0].contains(" INFO ") && lines[1].starts_with('{'), "{lines:?}");
}

#[test]
fn a_flood_is_cut_short_and_its_rest_is_told() {
    let lines = logged(LogFormat::Text, |shape| {
        for n in 0..1_000 {
            tracing::warn!(file = "x.json", "deletion record {n}");
        }
        let ended = lock(&shape.limiter).sweep(Instant::now() + std::time::Duration::from_secs(2));
        ended.into_iter().for_each(|s| shape.write(&told(s)));
    });
    // A slow machine may begin another window.
    let suppressed: u64 =
        lines.iter().filter_map(|l| l.split_once("suppressed ")?.1.split_once(' ')?.0.parse::<u64>().ok()).sum();
    let written = lines.iter().filter(|l| !l.contains("suppressed ")).count() as u64;
    assert!(
        suppressed > 0 && lines.last().is_some_and(|l| l.contains(" like this: deletion record 999 file=x.json")),
        "{lines:?}"
    );
    assert_eq!(suppressed + written, 1_000);
}

#[test]
fn debug_lines_are_not_held_back() {
    let lines = logged(LogFormat::Text, |_| (0..200).for_each(|n| tracing::debug!("{n}")));
    assert_eq!(lines.len(), 200);
}

#[test]
fn a_long_value_is_cut() {
    let long = "ä".repeat(10_000);
    let lines = logged(LogFormat::Text, |_| tracing::info!(path = long, "x"));
    assert!(one_line(&lines).ends_with("ä…") && lines[0].len() < 9_000, "{}", lines[0].len());
}
