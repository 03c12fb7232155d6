//! `test` and `lint`.

use std::{
    process::{Command, ExitCode},
    time::{Duration, Instant},
};

use anyhow::Result;

use crate::{
    args::{CoreSources, TestArgs},
    build, checks, dist, envoy, libtest, packages,
    pieces::Sources,
    privilege::Privilege,
    progress::{Progress, Step, spell},
    promtool,
    rustc::{Rustc, cargo_target_variable},
    schemathesis, setup, soak,
    test_results::{Tally, forget_junit, read_junit},
    workspace::{Workspace, find_program},
};

struct Report<'a> {
    progress: Progress,
    workspace: &'a Workspace,
    phases: Vec<(&'static str, Duration, String)>,
    tally: Tally,
}

impl Report<'_> {
    fn check(&mut self, name: &'static str, work: impl FnOnce(&Step, &Workspace) -> Result<()>) {
        let started = Instant::now();
        let workspace = self.workspace;
        let result = self.progress.step(name, |step| work(step, workspace));
        let verdict = match &result {
            Ok(()) => {
                self.tally.passed += 1;
                "ok".to_owned()
            }
            Err(error) => {
                eprintln!("error: {error:#}");
                self.tally.failed += 1;
                "FAILED".to_owned()
            }
        };
        self.phases.push((name, started.elapsed(), verdict));
    }

    fn tests(&mut self, name: &'static str, work: impl FnOnce(&Step, &Workspace) -> Result<(Tally, bool)>) {
        let started = Instant::now();
        let workspace = self.workspace;
        let mut counted = Tally::default();
        let result = self.progress.step(name, |step| {
            let (tally, good) = work(step, workspace)?;
            counted = tally;
            step.note(format!("{} passed, {} failed, {} ignored", tally.passed, tally.failed, tally.ignored));
            // Build failed or runner stopped.
            anyhow::ensure!(good, if tally.failed > 0 { "some tests failed" } else { "the test runner failed" });
            Ok(())
        });
        self.tally += counted;
        let verdict = match result {
            Ok(()) => format!("{} passed", counted.passed),
            Err(error) => {
                eprintln!("error: {error:#}");
                if counted.failed == 0 {
                    self.tally.failed += 1;
                }
                format!("{} passed, FAILED {}", counted.passed, counted.failed.max(1))
            }
        };
        self.phases.push((name, started.elapsed(), verdict));
    }

    fn prepare<T>(&mut self, name: &'static str, work: impl FnOnce(&mut Progress) -> Result<T>) -> Result<T> {
        let started = Instant::now();
        let result = work(&mut self.progress);
        let verdict = if result.is_ok() { "ok" } else { "FAILED" };
        self.phases.push((name, started.elapsed(), verdict.to_owned()));
        if result.is_err() {
            self.tally.failed += 1;
        }
        result
    }

    fn finish(self, total: Duration) -> ExitCode {
        println!();
        for (name, time, verdict) in &self.phases {
            println!("{name:<28} {:>12}  {verdict}", spell(*time));
        }
        if self.tally.ignored > 0 {
            println!("{} tests are marked as ignored and did not run", self.tally.ignored);
        }
        println!("{} passed, {} failed  (in {})", self.tally.passed, self.tally.failed, spell(total));
        if self.tally.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

pub(crate) fn test(
    workspace: &Workspace,
    privilege: &Privilege,
    verbose: bool,
    arguments: &TestArgs,
) -> Result<ExitCode> {
    let started = Instant::now();
    privilege.confirm("testing (tests make network namespaces)")?;
    let everything = arguments.filters.is_empty();
    let quick = if everything { checks::QUICK } else { &[] };
    // promtool, Envoy, BPF programs of two ABI versions, packages, test build, tests; for all tests also clippy,
    // rustdoc, schemathesis, demo, and with nextest the documentation's tests.
    let own = match (everything, has_nextest()) {
        (false, _) => 7,
        (true, false) => 11,
        (true, true) => 12,
    };
    let steps = quick.len() + setup::STEPS + own;
    let mut report = Report {
        progress: Progress::new(steps, verbose, privilege),
        workspace,
        phases: Vec::new(),
        tally: Tally::default(),
    };
    let outcome = phases(&mut report, privilege, quick, everything, arguments);
    if let Err(error) = outcome {
        eprintln!("error: {error:#}");
    }
    Ok(report.finish(started.elapsed()))
}

fn phases(
    report: &mut Report<'_>,
    privilege: &Privilege,
    quick: &[checks::Check],
    everything: bool,
    arguments: &TestArgs,
) -> Result<()> {
    let workspace = report.workspace;
    for (name, check) in quick {
        report.check(name, check);
    }
    if report.tally.failed > 0 && !arguments.keep_going {
        eprintln!("a quick check failed: no test was run (`--keep-going` runs them all the same)");
        return Ok(());
    }
    let toolchain = report.prepare("Toolchain", |progress| {
        setup::ensure(progress, workspace, privilege, packages::TEST, CoreSources::Auto)
    })?;
    report.prepare("promtool", |progress| {
        progress.step("promtool, for metrics and alert rules", |step| promtool::ensure(step, workspace, privilege))
    })?;
    report.prepare("Envoy", |progress| progress.step(envoy::STEP, |step| envoy::ensure(step, workspace)))?;
    report.prepare("BPF programs", |progress| build::objects(progress, workspace, &toolchain))?;
    if everything {
        report.check("Clippy", |step, workspace| checks::clippy(step, workspace, &toolchain));
        report.check("Rustdoc", checks::rustdoc);
        if report.tally.failed > 0 && !arguments.keep_going {
            eprintln!("a check failed: no test was run (`--keep-going` runs them all the same)");
            return Ok(());
        }
    }
    let rustc = &toolchain.rustc;
    report.prepare("Test build", |progress| {
        build::next_objects(progress, workspace, &toolchain)?;
        // Includes programs of packages with integration tests.
        progress.step("Test binaries (a few minutes the first time)", |step| {
            step.run(runner(workspace, privilege, rustc, &[]).arg("--no-run"))?;
            step.run(workspace.cargo().args(["build", "--locked", "--package", "wharf-node"]))?;
            build::must_be_there(&workspace.debug())
        })
    })?;
    report.check("Packages", |step, workspace| {
        dist::make(step, workspace, Sources::of(workspace, workspace.debug())).map(drop)
    });
    report.tests("Tests", |step, workspace| run_tests(step, workspace, privilege, rustc, arguments));
    if everything {
        report.check("The API by schemathesis", |step, workspace| schemathesis::check(step, workspace, privilege));
        report.check("The demo", |step, workspace| demo(step, workspace, privilege));
    }
    if everything && has_nextest() {
        // nextest skips documentation tests.
        report.tests("Examples in documentation", |step, workspace| {
            let mut command = workspace.cargo();
            // One package would rebuild libraries with other features.
            command.args(["test", "--doc", "--workspace", "--locked", "--quiet"]);
            libtest::run(step, privilege, &mut command)
        });
    }
    Ok(())
}

pub(crate) fn lint(workspace: &Workspace, privilege: &Privilege, verbose: bool) -> Result<ExitCode> {
    let started = Instant::now();
    let mut report = Report {
        progress: Progress::new(checks::QUICK.len() + setup::STEPS + 3, verbose, privilege),
        workspace,
        phases: Vec::new(),
        tally: Tally::default(),
    };
    for (name, check) in checks::QUICK {
        report.check(name, check);
    }
    let outcome = (|| {
        let toolchain = report
            .prepare("Toolchain", |progress| setup::ensure(progress, workspace, privilege, &[], CoreSources::Auto))?;
        report.prepare("BPF programs", |progress| build::objects(progress, workspace, &toolchain))?;
        report.check("Clippy", |step, workspace| checks::clippy(step, workspace, &toolchain));
        report.check("Rustdoc", checks::rustdoc);
        anyhow::Ok(())
    })();
    if let Err(error) = outcome {
        eprintln!("error: {error:#}");
    }
    Ok(report.finish(started.elapsed()))
}

fn demo(step: &Step, workspace: &Workspace, privilege: &Privilege) -> Result<()> {
    let program = workspace.target().join("debug/wharf-demo");
    step.run(&mut privilege.command(&program, &[("WHARF_BIN_DIR", workspace.debug().into())]))
}

fn has_nextest() -> bool {
    find_program("cargo-nextest").is_some()
}

fn runner(workspace: &Workspace, privilege: &Privilege, rustc: &Rustc, filters: &[String]) -> Command {
    let mut command = workspace.cargo();
    if has_nextest() {
        // Most tests wait for kernel, timers or a proxy.
        let threads = 2 * std::thread::available_parallelism().map_or(1, usize::from);
        command.args(["nextest", "run", "--test-threads", &threads.to_string()]);
    } else {
        command.args(["test", "--no-fail-fast"]);
    }
    command
        .args(["--workspace", "--locked"])
        .env("WHARF_BIN_DIR", workspace.debug())
        // Never rewrites snapshots.
        .env("INSTA_UPDATE", "no");
    if let Some(runner) = privilege.test_runner() {
        command.env(cargo_target_variable(&rustc.host, "RUNNER"), runner);
    }
    if !filters.is_empty() {
        command.arg("--").args(filters);
    }
    command
}

fn run_tests(
    step: &Step,
    workspace: &Workspace,
    privilege: &Privilege,
    rustc: &Rustc,
    arguments: &TestArgs,
) -> Result<(Tally, bool)> {
    let mut command = runner(workspace, privilege, rustc, &arguments.filters);
    if arguments.filters.is_empty() && !arguments.all_points {
        let commits = commits(workspace);
        let share = soak::share(commits, CRASH_SHARES);
        println!(
            "crash points: the share {share}; model: {MODEL_CASES} histories of the seed {commits}; by the number of commits \
             (`--all-points`: all points, and the histories of the fixed seed)"
        );
        command.env("WHARF_CRASH_SHARE", share);
        command.env("WHARF_MODEL_CASES", MODEL_CASES).env("WHARF_MODEL_SEED", commits.to_string());
    }
    if !has_nextest() {
        return libtest::run(step, privilege, &mut command);
    }
    let junit = workspace.target().join("nextest/default/junit.xml");
    forget_junit(&junit)?;
    let status = step.run_open(&mut command)?;
    Ok((read_junit(&junit)?, status.success()))
}

/// Two minutes of both processors.
const CRASH_SHARES: u64 = 24;

/// A minute of a processor. `cargo xtask soak` runs thousands.
const MODEL_CASES: &str = "96";

/// Selects the share of crash points; 0 without git.
fn commits(workspace: &Workspace) -> u64 {
    let output = Command::new("git").arg("-C").arg(workspace.root()).args(["rev-list", "--count", "HEAD"]).output();
    let told = output.ok().filter(|output| output.status.success());
    told.and_then(|output| String::from_utf8_lossy(&output.stdout).trim().parse().ok()).unwrap_or(0)
}
