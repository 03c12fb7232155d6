//! What a person reads while the demo runs: headings, checks with their marks, and the count at the end.

use std::{
    env,
    io::{self, IsTerminal, Write},
    time::Instant,
};

use anyhow::{Context, Result};

/// Marks and colours that the terminal can show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Style {
    /// Check marks instead of words.
    pub unicode: bool,
    pub colour: bool,
}

impl Style {
    /// What the locale and the terminal say (`LC_ALL`, `LC_CTYPE`, `LANG`; `NO_COLOR`).
    #[must_use]
    pub fn detect() -> Self {
        let locale =
            ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(|n| env::var(n).ok().filter(|v| !v.is_empty()));
        Self {
            unicode: is_utf8(locale.as_deref().unwrap_or("C")),
            colour: io::stdout().is_terminal() && env::var_os("NO_COLOR").is_none_or(|v| v.is_empty()),
        }
    }

    fn mark(self, good: bool) -> &'static str {
        match (good, self.unicode, self.colour) {
            (true, true, false) => "\u{2713}",
            (true, true, true) => "\u{1b}[32m\u{2713}\u{1b}[0m",
            (true, false, false) => "ok  ",
            (true, false, true) => "\u{1b}[32mok\u{1b}[0m  ",
            (false, true, false) => "\u{2717}",
            (false, true, true) => "\u{1b}[31m\u{2717}\u{1b}[0m",
            (false, false, false) => "FAIL",
            (false, false, true) => "\u{1b}[31mFAIL\u{1b}[0m",
        }
    }
}

fn is_utf8(locale: &str) -> bool {
    let lower = locale.to_ascii_lowercase();
    lower.ends_with("utf-8") || lower.ends_with("utf8") || lower.contains("utf-8@") || lower.contains("utf8@")
}

/// The running account of a demo.
#[derive(Debug)]
pub struct Report<W> {
    out: W,
    style: Style,
    start: Instant,
    held: u32,
    failed: Vec<String>,
}

impl<W: Write> Report<W> {
    /// Starts one.
    #[must_use]
    pub fn new(out: W, style: Style) -> Self {
        Self { out, style, start: Instant::now(), held: 0, failed: Vec::new() }
    }

    /// A heading.
    ///
    /// # Errors
    /// When the reader is gone.
    pub fn heading(&mut self, text: &str) -> Result<()> {
        let (on, off) = if self.style.colour { ("\u{1b}[1m", "\u{1b}[0m") } else { ("", "") };
        self.line(&format!("\n{on}{text}{off}"))
    }

    /// A plain line.
    ///
    /// # Errors
    /// When the reader is gone.
    pub fn line(&mut self, text: &str) -> Result<()> {
        let ascii = |c: char| match c {
            '\u{2192}' => "->".to_owned(),
            '\u{b7}' => "-".to_owned(),
            c => c.to_string(),
        };
        let text: String = if self.style.unicode { text.to_owned() } else { text.chars().map(ascii).collect() };
        writeln!(self.out, "{text}").and_then(|()| self.out.flush()).context("write to standard output")
    }

    /// A command and what it printed.
    ///
    /// # Errors
    /// When the reader is gone.
    pub fn shown(&mut self, command: &str, output: &str) -> Result<()> {
        self.line(&format!("  $ {command}"))?;
        output.trim_end().lines().try_for_each(|l| self.line(format!("    {l}").trim_end()))
    }

    /// One check: its finding when it held, its error when not. A check that fails does not end the demo; what builds
    /// on it gets `None`.
    ///
    /// # Errors
    /// When the reader is gone.
    pub fn check<T>(&mut self, what: &str, outcome: Result<(T, String)>) -> Result<Option<T>> {
        match outcome {
            Ok((value, finding)) => {
                self.held += 1;
                let mark = self.style.mark(true);
                let separator = if finding.is_empty() { "" } else { " \u{b7} " };
                self.line(&format!("  {mark} {what}{separator}{finding}"))?;
                Ok(Some(value))
            }
            Err(error) => {
                self.failed.push(what.to_owned());
                let mark = self.style.mark(false);
                self.line(&format!("  {mark} {what}"))?;
                format!("{error:#}").lines().try_for_each(|l| self.line(&format!("      {l}")))?;
                Ok(None)
            }
        }
    }

    /// True while no check has failed.
    #[must_use]
    pub fn all_held(&self) -> bool {
        self.failed.is_empty()
    }

    /// The last line. True when every check held, and there was one.
    ///
    /// # Errors
    /// When the reader is gone.
    pub fn end(&mut self) -> Result<bool> {
        let seconds = self.start.elapsed().as_secs_f64();
        let all = self.failed.is_empty() && self.held > 0;
        let text = if all {
            format!("\n{} all {} checks held, in {seconds:.1} s", self.style.mark(true), self.held)
        } else {
            let failed = self.failed.join("\n    ");
            format!(
                "\n{} {} of {} checks failed, in {seconds:.1} s:\n    {failed}",
                self.style.mark(false),
                self.failed.len(),
                usize::try_from(self.held).unwrap_or(usize::MAX).saturating_add(self.failed.len()),
            )
        };
        self.line(&text)?;
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(style: Style, outcome: Result<((), String)>) -> Result<(String, bool)> {
        let mut out = Vec::new();
        let mut report = Report::new(&mut out, style);
        report.check("a \u{2192} b", outcome)?;
        let all = report.end()?;
        Ok((String::from_utf8(out)?, all))
    }

    #[test]
    fn a_terminal_without_utf8_gets_ascii_only() -> Result<()> {
        let (text, all) = told(Style { unicode: false, colour: false }, Ok(((), "3 ms".into())))?;
        assert!(text.is_ascii() && text.starts_with("  ok   a -> b - 3 ms\n"), "{text:?}");
        assert!(all);
        Ok(())
    }

    #[test]
    fn a_failed_check_is_named_and_decides() -> Result<()> {
        let (text, all) = told(Style { unicode: true, colour: false }, Err(anyhow::anyhow!("lost 3")))?;
        assert!(text.contains("\u{2717} a \u{2192} b\n      lost 3\n"), "{text}");
        assert!(text.contains("1 of 1 checks failed"), "{text}");
        assert!(!all);
        Ok(())
    }

    #[test]
    fn a_demo_that_checked_nothing_did_not_go_well() -> Result<()> {
        assert!(!Report::new(Vec::new(), Style { unicode: true, colour: false }).end()?);
        Ok(())
    }

    #[test]
    fn the_locale_decides_on_marks() {
        assert!(is_utf8("C.UTF-8") && is_utf8("de_DE.utf8") && is_utf8("de_DE.UTF-8@euro"));
        assert!(!is_utf8("C") && !is_utf8("POSIX") && !is_utf8("en_US.ISO-8859-1"));
    }
}
