//! Runs cargo's tests, counts results and ends hung tests.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    process::{Command, Stdio},
    sync::mpsc::{RecvTimeoutError, sync_channel},
    thread,
    time::Duration,
};

use anyhow::{Context, Result};

use crate::{
    privilege::Privilege,
    progress::{Step, describe},
    test_results::{Tally, parse_libtest},
    workspace::find_program,
};

/// Longer than the slowest test.
const SILENCE: Duration = Duration::from_secs(300);

/// Passes the output through while counting. libtest has no time limit: after [`SILENCE`], the test binary is killed,
/// and cargo continues.
pub(crate) fn run(step: &Step, privilege: &Privilege, command: &mut Command) -> Result<(Tally, bool)> {
    step.clear_line();
    let mut child = command.stdout(Stdio::piped()).spawn().with_context(|| format!("start `{}`", describe(command)))?;
    let output = child.stdout.take().context("read the test runner's output")?;
    // Bounded: a slow terminal slows the tests.
    let (sender, lines) = sync_channel(256);
    let pump = thread::spawn(move || {
        for line in BufReader::new(output).split(b'\n') {
            let Ok(line) = line else { break };
            if sender.send(line).is_err() {
                break;
            }
        }
    });

    let mut tally = Tally::default();
    let mut hung = false;
    let mut terminal = std::io::stdout().lock();
    loop {
        match lines.recv_timeout(SILENCE) {
            Ok(line) => {
                terminal
                    .write_all(&line)
                    .and_then(|()| terminal.write_all(b"\n"))
                    .context("write to standard output")?;
                if let Some(counted) = parse_libtest(String::from_utf8_lossy(&line).trim_end()) {
                    tally += counted;
                }
            }
            Err(RecvTimeoutError::Timeout) => {
                hung = true;
                let minutes = SILENCE.as_secs() / 60;
                eprintln!(
                    "error: tests said nothing for {minutes} minutes: the one named last, or one beside it, hangs"
                );
                end_descendants(privilege, child.id())?;
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    let status = child.wait().context("wait for the test runner")?;
    anyhow::ensure!(pump.join().is_ok(), "read the test runner's output: the reading thread died");
    if hung {
        tally.failed += 1;
    }
    Ok((tally, status.success()))
}

fn end_descendants(privilege: &Privilege, parent: u32) -> Result<()> {
    let processes = descendants(parent)?;
    if processes.is_empty() {
        return Ok(());
    }
    let mut kill = privilege.command(&find_program("kill").context("end a test that hangs: there is no `kill`")?, &[]);
    // A survivor causes further silence.
    kill.arg("-KILL").args(processes.iter().map(u32::to_string)).status().context("end a test that hangs: run kill")?;
    Ok(())
}

/// Parents before children.
fn descendants(parent: u32) -> Result<Vec<u32>> {
    let mut pairs = Vec::new();
    for entry in fs::read_dir("/proc").context("list /proc")? {
        let entry = entry.context("list /proc")?;
        let Some(process) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        // Exited since the listing.
        let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else { continue };
        // `pid (name) state ppid ...` with any name.
        let above = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1)?.parse::<u32>().ok());
        pairs.extend(above.map(|above| (above, process)));
    }
    let mut found = vec![parent];
    let mut next = 0;
    while let Some(&above) = found.get(next) {
        found.extend(pairs.iter().filter(|(parent, _)| *parent == above).map(|(_, process)| *process));
        next += 1;
    }
    found.remove(0);
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn what_hangs_below_a_runner_is_found_and_ended() -> Result<()> {
        let script = "echo ready; sh -c 'sleep 3600; true'; echo went on";
        let mut runner = Command::new("sh").args(["-c", script]).stdout(Stdio::piped()).spawn()?;
        let mut lines = BufReader::new(runner.stdout.take().context("output")?).lines();
        assert_eq!(lines.next().transpose()?.as_deref(), Some("ready"));
        let deadline = Instant::now() + Duration::from_secs(20);
        while descendants(runner.id())?.len() < 2 {
            anyhow::ensure!(Instant::now() < deadline, "the runner started no test");
            thread::yield_now();
        }
        end_descendants(&Privilege::Root, runner.id())?;
        assert_eq!(lines.next().transpose()?.as_deref(), Some("went on"));
        assert!(runner.wait()?.success());
        Ok(())
    }
}
