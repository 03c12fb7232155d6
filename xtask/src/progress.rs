//! Numbered and timed steps; a child's output is shown only on failure.

use std::{
    cell::RefCell,
    collections::VecDeque,
    io::{self, BufRead, BufReader, IsTerminal, Write},
    process::{Command, ExitStatus, Stdio},
    sync::mpsc::{RecvTimeoutError, sync_channel},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use crate::privilege::Privilege;

/// Of a failure: rustc's error is at the end.
const KEPT_LINES: usize = 1_000;

const BEAT: Duration = Duration::from_secs(1);

const LOG_BEAT: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(crate) struct Progress {
    total: usize,
    current: usize,
    verbose: bool,
    terminal: bool,
    privilege: Privilege,
}

impl Progress {
    pub(crate) fn new(total: usize, verbose: bool, privilege: &Privilege) -> Self {
        Self { total, current: 0, verbose, terminal: io::stderr().is_terminal(), privilege: privilege.clone() }
    }

    pub(crate) fn step<T>(&mut self, title: &str, work: impl FnOnce(&Step) -> Result<T>) -> Result<T> {
        self.current += 1;
        self.privilege.refresh();
        let step = Step {
            label: format!("[{}/{}] {title}", self.current, self.total),
            started: Instant::now(),
            verbose: self.verbose,
            terminal: self.terminal,
            note: RefCell::new(None),
        };
        step.begin();
        let result = work(&step);
        step.end(result.is_ok());
        result
    }
}

#[derive(Debug)]
pub(crate) struct Step {
    label: String,
    started: Instant,
    verbose: bool,
    terminal: bool,
    note: RefCell<Option<String>>,
}

impl Step {
    pub(crate) fn note(&self, note: impl Into<String>) {
        *self.note.borrow_mut() = Some(note.into());
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Shows output on failure or with `--verbose`.
    pub(crate) fn run(&self, command: &mut Command) -> Result<()> {
        let (status, output) =
            if self.verbose { (self.run_open(command)?, VecDeque::new()) } else { self.run_captured(command)? };
        if status.success() {
            return Ok(());
        }
        self.clear_line();
        for line in output {
            eprintln!("  | {line}");
        }
        bail!("`{}` failed ({status})", describe(command));
    }

    /// Returns the last output lines on failure.
    pub(crate) fn run_quietly(&self, command: &mut Command) -> Result<std::result::Result<(), Vec<String>>> {
        let (status, output) = self.run_captured(command)?;
        Ok(if status.success() { Ok(()) } else { Err(output.into()) })
    }

    pub(crate) fn run_open(&self, command: &mut Command) -> Result<ExitStatus> {
        self.clear_line();
        command.status().with_context(|| format!("start `{}`", describe(command)))
    }

    fn run_captured(&self, command: &mut Command) -> Result<(ExitStatus, VecDeque<String>)> {
        let (reader, writer) = io::pipe().context("make a pipe for a child's output")?;
        let second = writer.try_clone().context("make a pipe for a child's output")?;
        if self.terminal {
            command.env("CARGO_TERM_COLOR", "always");
        }
        command.env("CARGO_TERM_PROGRESS_WHEN", "never").stdin(Stdio::null()).stdout(writer).stderr(second);
        let mut child = command.spawn().with_context(|| format!("start `{}`", describe(command)))?;
        // Closes the write ends, or the pipe would never end.
        command.stdout(Stdio::null()).stderr(Stdio::null());

        // Bounded: a slow terminal slows the child.
        let (sender, lines) = sync_channel::<String>(256);
        let pump = thread::spawn(move || {
            let mut reader = BufReader::new(reader);
            let mut line = Vec::new();
            loop {
                line.clear();
                match reader.read_until(b'\n', &mut line) {
                    Ok(0) | Err(_) => break,
                    Ok(_) => {
                        let text = String::from_utf8_lossy(&line).trim_end().to_owned();
                        if sender.send(text).is_err() {
                            break;
                        }
                    }
                }
            }
        });

        let mut kept = VecDeque::new();
        let mut last_log = Instant::now();
        loop {
            match lines.recv_timeout(BEAT) {
                Ok(line) => {
                    if kept.len() == KEPT_LINES {
                        kept.pop_front();
                    }
                    kept.push_back(line);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            self.beat(kept.back().map(String::as_str), &mut last_log);
        }
        let status = child.wait().with_context(|| format!("wait for `{}`", describe(command)))?;
        if pump.join().is_err() {
            bail!("read the output of `{}`: the reading thread died", describe(command));
        }
        Ok((status, kept))
    }

    fn begin(&self) {
        if self.terminal && !self.verbose {
            self.draw("");
        } else {
            eprintln!("{} ...", self.label);
        }
    }

    /// Shows the elapsed time.
    pub(crate) fn beat(&self, line: Option<&str>, last_log: &mut Instant) {
        if self.terminal {
            if self.elapsed() > BEAT * 2 {
                let doing = strip_escapes(line.unwrap_or_default());
                self.draw(&format!("{}  {}", spell(self.elapsed()), doing.trim()));
            }
        } else if last_log.elapsed() > LOG_BEAT {
            *last_log = Instant::now();
            eprintln!("{} ... {} so far", self.label, spell(self.elapsed()));
        }
    }

    fn end(&self, good: bool) {
        self.clear_line();
        let note = self.note.borrow();
        let note = note.as_deref().map(|note| format!(", {note}")).unwrap_or_default();
        let verdict = if good { "done" } else { "FAILED" };
        eprintln!("{}: {verdict}{note} ({})", self.label, spell(self.elapsed()));
    }

    /// Cut to a terminal's usual width.
    fn draw(&self, doing: &str) {
        let line: String = format!("{} ... {doing}", self.label).chars().take(79).collect();
        eprint!("\r\x1b[K{line}");
        // The terminal may be closed.
        let _gone = io::stderr().flush();
    }

    pub(crate) fn clear_line(&self) {
        if self.terminal {
            eprint!("\r\x1b[K");
        }
    }
}

pub(crate) fn spell(time: Duration) -> String {
    match time.as_secs() {
        0..10 => format!("{:.1} s", time.as_secs_f64()),
        seconds @ 10..120 => format!("{seconds} s"),
        seconds => format!("{} min {:02} s", seconds / 60, seconds % 60),
    }
}

pub(crate) fn describe(command: &Command) -> String {
    let mut text = std::path::Path::new(command.get_program())
        .file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default();
    for argument in command.get_args() {
        text.push(' ');
        text.push_str(&argument.to_string_lossy());
    }
    text
}

fn strip_escapes(line: &str) -> String {
    let mut plain = String::with_capacity(line.len());
    let mut characters = line.chars();
    while let Some(character) = characters.next() {
        if character == '\x1b' {
            characters.by_ref().find(char::is_ascii_alphabetic);
        } else if !character.is_control() {
            plain.push(character);
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quiet() -> Progress {
        Progress { total: 1, current: 0, verbose: false, terminal: false, privilege: Privilege::Root }
    }

    #[test]
    fn a_failing_child_is_named_with_its_status() {
        let result = quiet().step("test", |step| step.run(Command::new("sh").args(["-c", "echo said; exit 7"])));
        let message = result.map_err(|error| error.to_string());
        assert_eq!(message, Err("`sh -c echo said; exit 7` failed (exit status: 7)".to_owned()));
    }

    #[test]
    fn output_beyond_what_is_kept_neither_blocks_nor_grows() -> Result<()> {
        quiet().step("test", |step| {
            let (status, output) = step.run_captured(Command::new("seq").arg("100000"))?;
            assert!(status.success());
            assert_eq!(output.len(), KEPT_LINES);
            assert_eq!(output.back().map(String::as_str), Some("100000"));
            Ok(())
        })
    }

    #[test]
    fn a_missing_program_is_named() {
        let result = quiet().step("test", |step| step.run(&mut Command::new("/nowhere/tool")));
        assert_eq!(result.map_err(|error| error.to_string()), Err("start `tool`".to_owned()));
    }

    #[test]
    fn times_and_escapes_read_well() {
        assert_eq!(spell(Duration::from_millis(840)), "0.8 s");
        assert_eq!(spell(Duration::from_secs(92)), "92 s");
        assert_eq!(spell(Duration::from_secs(125)), "2 min 05 s");
        assert_eq!(strip_escapes("\x1b[1m\x1b[32m   Compiling\x1b[0m x"), "   Compiling x");
    }
}
