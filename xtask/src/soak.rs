//! `soak`: runs random tests for a given time. [`PARTS`] share it. A part is a sequence of runs of about a minute; a
//! failure prints its seed.

use std::{
    process::{Command, ExitCode},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use crate::{
    args::{CoreSources, SoakArgs},
    build, packages,
    privilege::Privilege,
    progress::{Progress, Step, spell},
    rustc::cargo_target_variable,
    setup,
    vm::plan::{output_of, parse_list},
    workspace::Workspace,
};

struct Part {
    title: &'static str,
    test: &'static str,
    /// Percent.
    share: u32,
    seed: &'static str,
    runs: Runs,
}

enum Runs {
    /// The whole binary.
    Whole { variables: &'static [(&'static str, &'static str)], does: &'static str },
    /// A test for each processor; the next run takes the next tests and share of points.
    Turns { does: &'static str },
}

impl Runs {
    const fn does(&self) -> &'static str {
        match self {
            Self::Whole { does, .. } | Self::Turns { does } => does,
        }
    }
}

const PARTS: [Part; 4] = [
    Part {
        title: "Churn with kills",
        test: "churn",
        share: 25,
        seed: "WHARF_CHURN_SEED",
        runs: Runs::Whole { variables: &[("WHARF_CHURN_ADDS", "1000")], does: "2,000 operations each" },
    },
    Part {
        title: "Crash matrix at random",
        test: "crash_matrix",
        share: 45,
        seed: "WHARF_CRASH_SEED",
        runs: Runs::Turns { does: "one crash test for each processor" },
    },
    Part {
        title: "Model",
        test: "model",
        share: 20,
        seed: "WHARF_MODEL_SEED",
        runs: Runs::Whole { variables: &[("WHARF_MODEL_CASES", "1000")], does: "1,000 histories each" },
    },
    Part {
        title: "Histories of wharf-kube",
        test: "suite",
        share: 10,
        seed: "WHARF_KUBE_SEED",
        runs: Runs::Whole { variables: &[("WHARF_KUBE_HISTORIES", "10000")], does: "10,000 histories each" },
    },
];

/// Limits a run to one or two minutes.
const SHARES: u64 = 8;

pub(crate) fn run(
    workspace: &Workspace,
    privilege: &Privilege,
    verbose: bool,
    arguments: &SoakArgs,
) -> Result<ExitCode> {
    privilege.confirm("soaking (tests make network namespaces)")?;
    let mut progress = Progress::new(setup::STEPS + 3 + PARTS.len(), verbose, privilege);
    let toolchain = setup::ensure(&mut progress, workspace, privilege, packages::TEST, CoreSources::Auto)?;
    build::objects(&mut progress, workspace, &toolchain)?;
    build::next_objects(&mut progress, workspace, &toolchain)?;
    let variable = cargo_target_variable(&toolchain.rustc.host, "RUNNER");
    let soak = Soak { workspace, runner: privilege.test_runner().map(|runner| (variable, runner)) };
    // As `cargo xtask test`, with the programs.
    progress.step("Test binaries (a few minutes the first time)", |step| {
        step.run(workspace.cargo().args(["test", "--no-run", "--workspace", "--locked"]))
    })?;

    let started = Instant::now();
    let whole = Duration::from_secs(arguments.minutes.saturating_mul(60));
    let seed = arguments.seed.unwrap_or_else(random);
    for part in &PARTS {
        let time = whole * part.share / 100;
        progress.step(&format!("{}, for {}", part.title, spell(time)), |step| {
            let runs = soak.part(step, privilege, part, seed, time)?;
            step.note(format!("{runs} runs, {}", part.runs.does()));
            Ok(())
        })?;
    }
    println!("all held, in {}", spell(started.elapsed()));
    Ok(ExitCode::SUCCESS)
}

struct Soak<'a> {
    workspace: &'a Workspace,
    runner: Option<(String, String)>,
}

impl Soak<'_> {
    /// Returns the number of runs. Each has the next seed, which repeats a failed run.
    fn part(&self, step: &Step, privilege: &Privilege, part: &Part, seed: u64, time: Duration) -> Result<u64> {
        let tests = self.tests(part)?;
        let (mut runs, mut longest) = (0_u64, Duration::ZERO);
        while runs == 0 || fits(step.elapsed(), longest, time) {
            let seed = seed.wrapping_add(runs);
            privilege.refresh();
            let began = Instant::now();
            let mut command = self.cargo_test(part);
            command.env(part.seed, seed.to_string());
            command.args(["--", "--nocapture"]);
            if !tests.is_empty() {
                command.env("WHARF_CRASH_SHARE", share(seed, SHARES));
                command.arg("--exact").args(chosen(&tests, seed, thread::available_parallelism()?.get()));
            }
            step.run(&mut command).with_context(|| {
                format!("{}: run {} failed; `cargo xtask soak --seed {seed}` begins with it", part.title, runs + 1)
            })?;
            longest = longest.max(began.elapsed());
            runs += 1;
        }
        Ok(runs)
    }

    fn tests(&self, part: &Part) -> Result<Vec<String>> {
        let Runs::Turns { .. } = part.runs else { return Ok(Vec::new()) };
        let mut command = self.cargo_test(part);
        let tests = parse_list(&output_of(command.args(["--", "--list", "--format", "terse"]))?);
        ensure!(!tests.is_empty(), "list the tests of {}: there are none", part.test);
        Ok(tests)
    }

    fn cargo_test(&self, part: &Part) -> Command {
        let mut command = self.workspace.cargo();
        command
            .args(["test", "--locked", "--workspace", "--test", part.test])
            .env("WHARF_BIN_DIR", self.workspace.debug());
        if let Runs::Whole { variables, .. } = part.runs {
            command.envs(variables.iter().copied());
        }
        if let Some((name, value)) = &self.runner {
            command.env(name, value);
        }
        command
    }
}

/// One of `parts` shares of the crash points; consecutive numbers cover all, which take an hour.
pub(crate) fn share(number: u64, parts: u64) -> String {
    format!("{}/{parts}", number % parts)
}

/// Assumes the longest duration so far.
fn fits(elapsed: Duration, longest: Duration, time: Duration) -> bool {
    elapsed + longest <= time
}

/// Consecutive seeds continue through the tests.
fn chosen(tests: &[String], seed: u64, count: usize) -> impl Iterator<Item = &String> {
    let place = usize::try_from(seed % tests.len() as u64).unwrap_or(0);
    tests.iter().cycle().skip(place * count % tests.len()).take(count.min(tests.len()))
}

/// The kernel seeds hash maps.
fn random() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0_u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_share_all_of_the_time() {
        assert_eq!(PARTS.iter().map(|part| part.share).sum::<u32>(), 100);
    }

    #[test]
    fn a_run_that_would_end_too_late_is_not_begun() {
        let [elapsed, longest] = [60, 30].map(Duration::from_secs);
        assert!(fits(elapsed, longest, Duration::from_secs(90)));
        assert!(!fits(elapsed, longest, Duration::from_secs(89)));
    }

    #[test]
    fn runs_take_turns_over_all_tests_and_a_seed_repeats_its_own() {
        let tests: Vec<String> = (0..23).map(|n| n.to_string()).collect();
        let run = |seed| chosen(&tests, seed, 2).cloned().collect::<Vec<_>>();
        assert_eq!([run(22), run(23), run(24)], [["21", "22"], ["0", "1"], ["2", "3"]]);
        let mut seen: Vec<_> = (1_000..1_012).flat_map(run).collect();
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), tests.len());
        assert_eq!(chosen(&tests[..1], 7, 4).count(), 1);
    }
}
