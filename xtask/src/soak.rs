//! `soak`: what `test` does for a minute, for as long as one likes, at random.
//!
//! Each round: ten times the churn with an agent that is killed at random, the crash matrix at random passes of its
//! points in random order, and thousands of the model's histories. The first failure ends it; its output names the seed.

use std::{
    process::{Command, ExitCode},
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};

use crate::{
    args::{CoreSources, SoakArgs},
    build, packages,
    privilege::Privilege,
    progress::{Progress, spell},
    rustc::cargo_target_variable,
    setup,
    workspace::Workspace,
};

/// A part of a round: package, test binary, and the variables that make it larger.
struct Part {
    title: &'static str,
    package: &'static str,
    test: &'static str,
    variables: &'static [(&'static str, &'static str)],
    /// The variable that takes a seed, where the test does not choose and tell its own.
    seed: Option<&'static str>,
}

const PARTS: [Part; 3] = [
    Part {
        title: "Churn, 20,000 operations",
        package: "wharf-tests",
        test: "churn",
        variables: &[("WHARF_CHURN_ADDS", "10000")],
        seed: Some("WHARF_CHURN_SEED"),
    },
    Part {
        title: "Crash matrix at random",
        package: "wharf-tests",
        test: "crash_matrix",
        variables: &[],
        seed: Some("WHARF_CRASH_SEED"),
    },
    Part {
        title: "Model, 5,000 histories",
        package: "wharf-agent",
        test: "model",
        variables: &[("WHARF_MODEL_CASES", "5000")],
        seed: None,
    },
];

/// Runs rounds until the time is over; at least one.
pub(crate) fn run(
    workspace: &Workspace,
    privilege: &Privilege,
    verbose: bool,
    arguments: &SoakArgs,
) -> Result<ExitCode> {
    privilege.confirm("soaking (tests make network namespaces)")?;
    let mut progress = Progress::new(setup::STEPS + build::STEPS + 2, verbose, privilege);
    let toolchain = setup::ensure(&mut progress, workspace, privilege, packages::TEST, CoreSources::Auto)?;
    build::ensure(&mut progress, workspace, &toolchain, &[])?;
    build::crash_programs(&mut progress, workspace)?;
    let variable = cargo_target_variable(&toolchain.rustc.host, "RUNNER");
    let runner = privilege.test_runner().map(|runner| (variable, runner));
    progress.step("Test binaries", |step| {
        PARTS.iter().try_for_each(|part| step.run(cargo_test(workspace, part, runner.as_ref()).arg("--no-run")))
    })?;

    let (started, limit) = (Instant::now(), Duration::from_secs(arguments.minutes.saturating_mul(60)));
    let mut rounds = 0_u64;
    while rounds == 0 || started.elapsed() < limit {
        rounds += 1;
        for part in &PARTS {
            let seed = arguments.seed.unwrap_or_else(random);
            privilege.refresh();
            let began = Instant::now();
            let mut command = cargo_test(workspace, part, runner.as_ref());
            if let Some(name) = part.seed {
                command.env(name, seed.to_string());
            }
            command.args(["--", "--nocapture"]);
            println!(
                "round {rounds}: {}{}",
                part.title,
                part.seed.map_or(String::new(), |name| format!(", {name}={seed}"))
            );
            let status = command.status()?;
            ensure!(status.success(), "round {rounds}: {} failed ({status})", part.title);
            println!("round {rounds}: {} held, in {}", part.title, spell(began.elapsed()));
        }
    }
    println!("{rounds} rounds held, in {}", spell(started.elapsed()));
    Ok(ExitCode::SUCCESS)
}

fn cargo_test(workspace: &Workspace, part: &Part, runner: Option<&(String, String)>) -> Command {
    let mut command = workspace.cargo();
    command
        .args(["test", "--locked", "--package", part.package, "--test", part.test])
        .env("WHARF_BIN_DIR", workspace.release())
        .env("WHARF_CRASH_DIR", build::crash_dir(workspace))
        .envs(part.variables.iter().copied());
    if let Some((name, value)) = runner {
        command.env(name, value);
    }
    command
}

/// The standard library seeds its hash maps from the kernel.
fn random() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0_u8)
}
