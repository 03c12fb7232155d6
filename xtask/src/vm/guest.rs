//! Runs a guest in QEMU and reads its report on a serial line.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufRead, BufReader, Write},
    path::Path,
    process::Stdio,
    sync::mpsc::{Receiver, RecvTimeoutError, sync_channel},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use serde_json::Value;

use super::{image::TEST_LIMIT_SECONDS, kernel::Kernel, tools::Tools};
use crate::progress::{Step, spell};

const SILENCE: Duration = Duration::from_secs(TEST_LIMIT_SECONDS + 120);

/// Without `no_timer_check` the kernel panics at too few timer ticks, as on a busy machine.
const COMMAND_LINE: &str = "console=ttyS0 panic=-1 quiet no_timer_check";

/// Tests between progress lines.
const LOG_EVERY: usize = 50;

/// The agent's error without tcx.
const REFUSES_TCX: &str = "the kernel has no tcx";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Passed,
    Failed,
    NoTcx,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Ran {
    /// `FILE::NAME`.
    pub(crate) name: String,
    pub(crate) verdict: Verdict,
    /// Duration in the guest.
    pub(crate) hundredths: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Told {
    /// `uname -r`.
    pub(crate) release: String,
    pub(crate) attach_mode: String,
    pub(crate) device_mode: String,
    /// By names of `wharf status`.
    pub(crate) features: BTreeMap<String, bool>,
    pub(crate) tests: Vec<Ran>,
    /// Failures of set-up, the agent's probe, or the kernel.
    pub(crate) broken: Vec<String>,
    /// The plan is complete.
    pub(crate) done: bool,
    output: Vec<String>,
}

impl Told {
    /// Returns a failed test's output.
    pub(crate) fn on_line(&mut self, line: &str) -> Option<Vec<String>> {
        if let Some(output) = line.strip_prefix('|') {
            self.output.push(output.to_owned());
            return None;
        }
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match word {
            "@kernel" => rest.clone_into(&mut self.release),
            "@status" => self.on_status(rest),
            "@broken" => self.broken.push(rest.to_owned()),
            "@kernel-said" => self.broken.push(format!("the kernel said: {rest}")),
            "@start" => self.output.clear(),
            "@end" => return self.on_end(rest),
            "@done" => self.done = true,
            _ => {}
        }
        None
    }

    fn on_status(&mut self, text: &str) {
        let Ok(status) = serde_json::from_str::<Value>(text) else {
            self.broken.push("the agent told nothing of the kernel".to_owned());
            return;
        };
        let modes = [("/kernel/attach_mode", &mut self.attach_mode), ("/network/device_mode", &mut self.device_mode)];
        for (pointer, mode) in modes {
            status.pointer(pointer).and_then(Value::as_str).unwrap_or_default().clone_into(mode);
        }
        let features = status.pointer("/kernel/features").and_then(Value::as_object);
        for (name, value) in features.into_iter().flatten() {
            self.features.insert(name.clone(), value.as_bool().unwrap_or_default());
        }
    }

    /// `FILE NAME CODE HUNDREDTHS`.
    fn on_end(&mut self, text: &str) -> Option<Vec<String>> {
        let mut words = text.split(' ');
        let (Some(file), Some(test), Some(code), Some(time)) = (words.next(), words.next(), words.next(), words.next())
        else {
            self.broken.push(format!("the guest told half a line: {text}"));
            return None;
        };
        let refused = self.features.get("tcx") == Some(&false) && self.output.iter().any(|l| l.contains(REFUSES_TCX));
        let verdict = match code {
            "0" => Verdict::Passed,
            _ if refused => Verdict::NoTcx,
            _ => Verdict::Failed,
        };
        let hundredths = time.parse().unwrap_or_default();
        self.tests.push(Ran { name: format!("{file}::{test}"), verdict, hundredths });
        (verdict == Verdict::Failed).then(|| std::mem::take(&mut self.output))
    }

    pub(crate) fn count(&self, verdict: Verdict) -> usize {
        self.tests.iter().filter(|test| test.verdict == verdict).count()
    }
}

#[derive(Debug)]
pub(crate) struct Boot<'a> {
    pub(crate) kernel: &'a Kernel,
    pub(crate) device_mode: &'a str,
    pub(crate) archive: &'a Path,
    pub(crate) console: &'a Path,
    pub(crate) log: &'a Path,
    pub(crate) planned: usize,
}

/// Reports a hung or dead guest in [`Told::broken`].
pub(crate) fn run(step: &Step, tools: &Tools, boot: &Boot<'_>) -> Result<Told> {
    let mut command = tools.qemu();
    command
        .args(["-M", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-m", "2560", "-smp", "2"])
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
        .arg("-serial")
        .arg(format!("file:{}", boot.console.display()))
        .args(["-serial", "stdio", "-append"])
        // The kernel gives unknown variables to process 1.
        .arg(format!("{COMMAND_LINE} WHARF_DEVICE_MODE={}", boot.device_mode))
        .arg("-kernel")
        .arg(&boot.kernel.image)
        .arg("-initrd")
        .arg(boot.archive)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().context("start QEMU")?;
    let output = child.stdout.take().context("read the guest's output")?;
    // Bounded: a slow terminal slows the guest.
    let (sender, lines) = sync_channel::<String>(256);
    let pump = thread::spawn(move || {
        for line in BufReader::new(output).split(b'\n') {
            let Ok(line) = line else { break };
            if sender.send(String::from_utf8_lossy(&line).trim_end().to_owned()).is_err() {
                break;
            }
        }
    });
    let mut told = Told::default();
    let heard = hear(step, boot, &lines, &mut told);
    drop(lines);
    if !matches!(heard, Ok(End::Off)) {
        // Hung, or its log failed.
        child.kill().context("end QEMU")?;
    }
    let left = child.wait_with_output().context("wait for QEMU")?;
    anyhow::ensure!(pump.join().is_ok(), "read the guest's output: the reading thread died");
    if heard? == End::Silent {
        told.broken.push(format!("the guest said nothing for {}", spell(SILENCE)));
    }
    if !told.done {
        let said = String::from_utf8_lossy(&left.stderr);
        told.broken.push(format!("the guest did not get to its end; see {} {}", boot.console.display(), said.trim()));
    }
    Ok(told)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Off,
    /// No output for [`SILENCE`].
    Silent,
}

fn hear(step: &Step, boot: &Boot<'_>, lines: &Receiver<String>, told: &mut Told) -> Result<End> {
    let mut log = File::create(boot.log).with_context(|| format!("create {}", boot.log.display()))?;
    let begun = Instant::now();
    loop {
        let line = match lines.recv_timeout(SILENCE) {
            Ok(line) => line,
            Err(RecvTimeoutError::Disconnected) => return Ok(End::Off),
            Err(RecvTimeoutError::Timeout) => return Ok(End::Silent),
        };
        writeln!(log, "{line}").with_context(|| format!("write {}", boot.log.display()))?;
        let ran = told.tests.len();
        if let Some(output) = told.on_line(&line) {
            step.clear_line();
            for line in output {
                eprintln!("  | {line}");
            }
            if let Some(test) = told.tests.last() {
                eprintln!("  FAILED on Linux {}: {}", told.release, test.name);
            }
        }
        if told.tests.len() > ran && told.tests.len().is_multiple_of(LOG_EVERY) {
            step.clear_line();
            eprintln!("  {} of {} tests after {}", told.tests.len(), boot.planned, spell(begun.elapsed()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = r#"@status {"kernel":{"attach_mode":"clsact","features":{"tcx":false,"btf":true}}}"#;

    fn heard(lines: &[&str]) -> Told {
        let mut told = Told::default();
        for line in lines {
            told.on_line(line);
        }
        told
    }

    #[test]
    fn a_guests_words_become_verdicts() {
        let mut told = heard(&["noise", "@kernel 6.1.0-50", STATUS, "@start a x::y", "@end a x::y 0 123"]);
        assert_eq!((told.release.as_str(), told.attach_mode.as_str()), ("6.1.0-50", "clsact"));
        assert_eq!(told.features.get("btf"), Some(&true));
        assert_eq!(told.tests, [Ran { name: "a::x::y".into(), verdict: Verdict::Passed, hundredths: 123 }]);
        assert!(!told.done && told.broken.is_empty());

        told.on_line("@start a z");
        told.on_line("|left: 1");
        assert_eq!(told.on_line("@end a z 101 7"), Some(vec!["left: 1".to_owned()]));
        assert_eq!((told.count(Verdict::Passed), told.count(Verdict::Failed)), (1, 1));
        told.on_line("@done");
        assert!(told.done);
    }

    #[test]
    fn a_refusal_of_tcx_excuses_a_test_only_where_there_is_none() {
        let test = ["@start a t", "|cause: the kernel has no tcx (Linux 6.6)", "@end a t 101 7"];
        let without = heard(&[&[STATUS], test.as_slice()].concat());
        assert_eq!(without.count(Verdict::NoTcx), 1);
        let with = STATUS.replace("\"tcx\":false", "\"tcx\":true");
        let with = heard(&[&[with.as_str()], test.as_slice()].concat());
        assert_eq!(with.count(Verdict::Failed), 1);
        let next = heard(&[&[STATUS], test.as_slice(), &["@start a u", "|else", "@end a u 101 7"]].concat());
        assert_eq!(next.count(Verdict::Failed), 1);
    }

    #[test]
    fn half_a_line_and_an_agent_without_words_are_told() {
        let told = heard(&["@status ", "@end a", "@kernel-said BUG: x", "@broken insmod veth.ko"]);
        assert_eq!(told.broken.len(), 4, "{:?}", told.broken);
    }
}
