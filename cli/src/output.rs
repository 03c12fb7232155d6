//! Standard output: format, width and colour.

use std::{
    io::{self, IsTerminal, Write},
    time::{SystemTime, UNIX_EPOCH},
};

use serde::Serialize;

use crate::{
    args::{ColorWhen, Format},
    error::CliError,
    render::{
        Style,
        text::{escape_in_json, is_safe},
    },
};

const DEFAULT_WIDTH: u16 = 100;
/// Narrower columns would have one letter.
const MIN_WIDTH: u16 = 60;

/// ECMA-48: CUP, ED.
const CLEAR: &str = "\x1b[H\x1b[2J";

#[derive(Debug)]
pub(crate) struct Output {
    format: Format,
    color: bool,
    width: u16,
    terminal: bool,
}

impl Output {
    pub(crate) fn new(format: Format, color: ColorWhen) -> Self {
        let terminal = io::stdout().is_terminal();
        let color = match color {
            ColorWhen::Always => true,
            ColorWhen::Never => false,
            // https://no-color.org: an empty value has no effect.
            ColorWhen::Auto => {
                let dumb = std::env::var_os("TERM").is_some_and(|v| v == "dumb");
                terminal && !dumb && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
            }
        };
        let width = if terminal { comfy_table::Table::new().width() } else { None };
        Self { format, color, width: width.unwrap_or(DEFAULT_WIDTH).max(MIN_WIDTH), terminal }
    }

    pub(crate) fn is_table(&self) -> bool {
        matches!(self.format, Format::Table | Format::Wide)
    }

    pub(crate) fn is_wide(&self) -> bool {
        self.format == Format::Wide
    }

    pub(crate) fn style(&self) -> Style {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Style { width: self.width, color: self.color, now_unix_ms: u64::try_from(now.as_millis()).unwrap_or(u64::MAX) }
    }

    /// `table` renders `value` as a table.
    pub(crate) fn emit<T: Serialize>(&self, value: &T, table: impl FnOnce(&Style) -> String) -> Result<(), CliError> {
        let written = match self.format {
            Format::Table | Format::Wide => write_text(&table(&self.style())),
            Format::Json => write_text(&(to_json(value, true)? + "\n")),
            Format::Yaml => write_text(&to_yaml(value)?),
        };
        match written {
            // A closed pipe keeps the exit status.
            Err(error) if error.is_silent() => Ok(()),
            other => other,
        }
    }

    /// One object of a stream: a line or YAML document.
    pub(crate) fn emit_line<T: Serialize>(
        &self,
        value: &T,
        line: impl FnOnce(&Style) -> String,
    ) -> Result<(), CliError> {
        write_text(&self.line(value, |style| line(style) + "\n")?)
    }

    /// The text of [`Self::emit_line`].
    pub(crate) fn line<T: Serialize>(
        &self,
        value: &T,
        table: impl FnOnce(&Style) -> String,
    ) -> Result<String, CliError> {
        Ok(match self.format {
            Format::Table | Format::Wide => table(&self.style()),
            Format::Json => to_json(value, false)? + "\n",
            Format::Yaml => format!("---\n{}", to_yaml(value)?),
        })
    }

    /// Replaces the last text: clears the terminal for a table; otherwise appends after an empty line.
    pub(crate) fn replace(&self, text: &str, is_first: bool) -> Result<(), CliError> {
        let lead = match (self.is_table(), self.terminal, is_first) {
            (true, true, _) => CLEAR,
            (true, false, false) => "\n",
            _ => "",
        };
        write_text(&format!("{lead}{text}"))
    }
}

pub(crate) fn remark(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Flushes, to report errors before exit.
pub(crate) fn write_text(text: &str) -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|e| CliError::output(&e))
}

fn to_json<T: Serialize>(value: &T, pretty: bool) -> Result<String, CliError> {
    let text = if pretty { serde_json::to_string_pretty(value) } else { serde_json::to_string(value) };
    text.map(|t| escape_in_json(&t)).map_err(|e| CliError::refused(format!("writing JSON: {e}")))
}

/// YAML escapes control characters, but not characters that reorder or hide text; its JSON subset can.
fn to_yaml<T: Serialize>(value: &T) -> Result<String, CliError> {
    let yaml = serde_norway::to_string(value).map_err(|e| CliError::refused(format!("writing YAML: {e}")))?;
    if is_safe(&yaml) { Ok(yaml) } else { Ok(to_json(value, true)? + "\n") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_format_lets_a_label_drive_the_terminal() {
        let hostile = vec!["a\u{1b}]0;owned\u{7}\u{9b}31m\u{7f}\u{202e}b".to_owned()];
        let json = to_json(&hostile, false).unwrap_or_default();
        assert_eq!(json, "[\"a\\u001b]0;owned\\u0007\\u009b31m\\u007f\\u202eb\"]");
        let back: Vec<String> = serde_json::from_str(&json).unwrap_or_default();
        assert_eq!(back, hostile);
        for text in [&hostile, &vec!["a\u{202e}b".to_owned()], &vec!["a\u{9b}31m".to_owned()]] {
            let yaml = to_yaml(text).unwrap_or_default();
            assert!(is_safe(&yaml) && !yaml.is_empty(), "{yaml:?}");
            let back: Vec<String> = serde_norway::from_str(&yaml).unwrap_or_default();
            assert_eq!(&back, text);
        }
        assert_eq!(to_yaml(&["größe=日本🦀"]).unwrap_or_default(), "- größe=日本🦀\n");
    }
}
