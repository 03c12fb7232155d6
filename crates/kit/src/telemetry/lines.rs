//! Writes log lines: the event's fields, then its operation's. Foreign text is escaped: it cannot end a line, drive a
//! terminal or look like a field.

use std::{
    borrow::Cow,
    collections::hash_map::DefaultHasher,
    fmt,
    hash::{Hash, Hasher},
    io::Write as _,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use serde::Deserialize;
use serde_json::Value;
use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    span,
};
use tracing_subscriber::{
    fmt::{
        format::Writer,
        time::{FormatTime, SystemTime},
    },
    layer::{Context, Layer},
    registry::LookupSpan,
};

use super::{
    limit::{Limiter, Place, Suppressed},
    operation::FIELDS,
};
use crate::{log_ring::LogRing, sync::lock};

/// Line format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// For people.
    Text,
    /// For machines.
    Json,
}

impl LogFormat {
    /// Name in settings.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Json => "json",
        }
    }
}

/// Characters; longer values are cut.
const MAX_VALUE: usize = 4096;

/// Fields that name the rate limit's subject, by preference.
const SUBJECTS: [&str; 7] = ["endpoint", "attachment", "container", "file", "controller", "ip", "path"];

type Sink = Box<dyn Fn(&str) + Send + Sync>;

/// Format and destination.
pub struct Shape {
    json: AtomicBool,
    colour: bool,
    sink: Sink,
    limiter: Mutex<Limiter<Line>>,
}

impl Shape {
    /// Writes to standard error and the ring.
    #[must_use]
    pub fn to_stderr(format: LogFormat, colour: bool, ring: LogRing) -> Self {
        let sink = move |line: &str| {
            ring.push(line);
            // A failed write cannot be reported.
            drop(std::io::stderr().lock().write_all(line.as_bytes()));
        };
        Self::new(format, colour, Box::new(sink))
    }

    fn new(format: LogFormat, colour: bool, sink: Sink) -> Self {
        Self { json: AtomicBool::new(format == LogFormat::Json), colour, sink, limiter: Mutex::default() }
    }

    pub(super) fn set(&self, format: LogFormat) {
        self.json.store(format == LogFormat::Json, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> LogFormat {
        if self.json.load(Ordering::Relaxed) { LogFormat::Json } else { LogFormat::Text }
    }

    pub(super) fn sweep(&self) {
        let ended = lock(&self.limiter).sweep(Instant::now());
        ended.into_iter().for_each(|s| self.write(&told(s)));
    }

    fn write(&self, line: &Line) {
        let text = match self.get() {
            LogFormat::Json => line.json(),
            LogFormat::Text => line.text(self.colour),
        };
        (self.sink)(&text);
    }
}

fn told(suppressed: Suppressed<Line>) -> Line {
    let mut line = suppressed.sample;
    let message = line.fields.take("message").map(|v| plain(&v)).unwrap_or_default();
    line.fields.0.insert(0, ("message", Value::from(format!("suppressed {} like this: {message}", suppressed.count))));
    line
}

#[derive(Debug, Clone, Default, PartialEq)]
struct Fields(Vec<(&'static str, Value)>);

impl Fields {
    fn set(&mut self, name: &'static str, value: Value) {
        match self.0.iter_mut().find(|(n, _)| *n == name) {
            Some((_, there)) => *there = value,
            None => self.0.push((name, value)),
        }
    }

    fn get(&self, name: &str) -> Option<&Value> {
        self.0.iter().find(|(n, _)| *n == name).map(|(_, v)| v)
    }

    fn take(&mut self, name: &str) -> Option<Value> {
        let at = self.0.iter().position(|(n, _)| *n == name)?;
        Some(self.0.remove(at).1)
    }
}

impl Visit for Fields {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.set(field.name(), Value::from(value));
    }
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.set(field.name(), Value::from(value));
    }
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.set(field.name(), Value::from(value));
    }
    fn record_bool(&mut self, field: &Field, value: bool) {
        self.set(field.name(), Value::from(value));
    }
    fn record_str(&mut self, field: &Field, value: &str) {
        self.set(field.name(), Value::from(cut(value)));
    }
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.set(field.name(), Value::from(cut(&format!("{value:?}"))));
    }
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(MAX_VALUE) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}

#[derive(Debug, Clone)]
struct Line {
    level: Level,
    target: Cow<'static, str>,
    fields: Fields,
}

impl Line {
    fn text(&self, colour: bool) -> String {
        let mut out = now();
        let level = self.level.as_str();
        if colour {
            out += &format!(" \u{1b}[{}m{level:>5}\u{1b}[0m {}: ", colour_of(self.level), self.target);
        } else {
            out += &format!(" {level:>5} {}: ", self.target);
        }
        if let Some(message) = self.fields.get("message") {
            escape_into(&mut out, &plain(message));
        }
        for (name, value) in self.fields.0.iter().filter(|(name, _)| *name != "message") {
            out += &format!(" {name}=");
            let text = plain(value);
            if text.is_empty()
                || text.chars().any(|c| c.is_whitespace() || is_hidden(c) || matches!(c, '"' | '=' | '\\'))
            {
                out.push('"');
                text.chars().for_each(|c| match c {
                    '"' | '\\' => out.extend(['\\', c]),
                    c => escape(&mut out, c),
                });
                out.push('"');
            } else {
                out.push_str(&text);
            }
        }
        out.push('\n');
        out
    }

    fn json(&self) -> String {
        let mut object = serde_json::Map::new();
        for (name, value) in &self.fields.0 {
            object.insert((*name).to_owned(), value.clone());
        }
        object.insert("timestamp".to_owned(), Value::from(now()));
        object.insert("level".to_owned(), Value::from(self.level.as_str()));
        object.insert("target".to_owned(), Value::from(&*self.target));
        let mut out = String::new();
        // The encoder only escapes characters below U+0020.
        for c in Value::Object(object).to_string().chars() {
            if is_hidden(c) {
                c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| out += &format!("\\u{unit:04x}"));
            } else {
                out.push(c);
            }
        }
        out.push('\n');
        out
    }
}

fn now() -> String {
    let mut out = String::new();
    if SystemTime.format_time(&mut Writer::new(&mut out)).is_err() {
        out.push('-');
    }
    out
}

const fn colour_of(level: Level) -> u8 {
    match level {
        Level::ERROR => 31,
        Level::WARN => 33,
        Level::INFO => 32,
        Level::DEBUG => 34,
        Level::TRACE => 35,
    }
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Control characters, and those that change how text is shown.
fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

fn escape(out: &mut String, c: char) {
    if is_hidden(c) {
        out.extend(c.escape_default());
    } else {
        out.push(c);
    }
}

fn escape_into(out: &mut String, text: &str) {
    text.chars().for_each(|c| escape(out, c));
}

/// The layer that writes lines.
pub struct Lines {
    shape: Arc<Shape>,
}

impl Lines {
    /// Writes through `shape`.
    #[must_use]
    pub fn new(shape: Arc<Shape>) -> Self {
        Self { shape }
    }

    /// Debug and trace lines are not limited: they were requested.
    fn passes(&self, metadata: &'static Metadata<'static>, line: &Line) -> bool {
        if line.level > Level::INFO {
            return true;
        }
        let subject = SUBJECTS.iter().find_map(|name| line.fields.get(name)).map(|value| {
            let mut hasher = DefaultHasher::new();
            plain(value).hash(&mut hasher);
            hasher.finish()
        });
        let place: Place = std::ptr::from_ref(metadata).addr();
        let (pass, ended) = lock(&self.shape.limiter).admit(place, subject, Instant::now(), || line.clone());
        if let Some(suppressed) = ended {
            self.shape.write(&told(suppressed));
        }
        pass
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Lines {
    fn on_new_span(&self, attributes: &span::Attributes<'_>, id: &span::Id, cx: Context<'_, S>) {
        let Some(span) = cx.span(id) else { return };
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        span.extensions_mut().insert(fields);
    }

    fn on_record(&self, id: &span::Id, values: &span::Record<'_>, cx: Context<'_, S>) {
        let Some(span) = cx.span(id) else { return };
        if let Some(fields) = span.extensions_mut().get_mut::<Fields>() {
            values.record(fields);
        }
    }

    fn on_event(&self, event: &Event<'_>, cx: Context<'_, S>) {
        let mut own = Fields::default();
        event.record(&mut own);
        // The crate `log` sends these fields.
        let target = own.take("log.target").map(|target| plain(&target));
        for origin in ["log.module_path", "log.file", "log.line"] {
            own.take(origin);
        }
        let mut fields = Fields::default();
        if let Some(message) = own.take("message") {
            fields.set("message", message);
        }
        // Inner spans win: a delete within a restore is a delete.
        let mut around = Fields::default();
        for span in cx.event_scope(event).into_iter().flatten() {
            if let Some(of_span) = span.extensions().get::<Fields>() {
                for (name, value) in &of_span.0 {
                    if around.get(name).is_none() {
                        around.set(name, value.clone());
                    }
                }
            }
        }
        for name in FIELDS {
            let (own, around) = (own.take(name), around.take(name));
            if let Some(value) = own.or(around) {
                fields.set(name, value);
            }
        }
        for (name, value) in own.0.into_iter().chain(around.0) {
            if fields.get(name).is_none() {
                fields.set(name, value);
            }
        }
        let metadata = event.metadata();
        let line = Line {
            level: *metadata.level(),
            target: target.map_or(Cow::Borrowed(metadata.target()), Cow::Owned),
            fields,
        };
        if self.passes(metadata, &line) {
            self.shape.write(&line);
        }
    }
}

#[cfg(test)]
#[path = "lines_tests.rs"]
mod tests;
