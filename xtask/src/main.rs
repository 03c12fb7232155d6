//! Commands for users and developers of Wharf; see `cargo xtask --help`.

mod args;
mod book;
mod build;
mod checks;
mod core_sources;
mod dist;
mod doc_links;
mod envoy;
mod fuzz;
mod install;
mod kubernetes;
mod launch;
mod libtest;
mod licences;
mod linker;
mod manifest;
mod packages;
mod pieces;
mod privilege;
mod progress;
mod promtool;
mod rustc;
mod schemathesis;
mod setup;
mod soak;
mod test_results;
mod tests_run;
mod uninstall;
mod vm;
mod workspace;

use std::process::{ExitCode, ExitStatus};

use anyhow::Result;
use clap::Parser;

use crate::{
    args::{Cli, Task},
    privilege::Privilege,
    progress::Progress,
    workspace::Workspace,
};

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<ExitCode> {
    let verbose = cli.verbose;
    let workspace = Workspace::find()?;
    let privilege = Privilege::detect()?;
    match cli.command {
        Task::Setup(arguments) => {
            let mut progress = Progress::new(setup::STEPS + 1, verbose, &privilege);
            setup::ensure(&mut progress, &workspace, &privilege, packages::ENVOY, arguments.core_sources)?;
            progress.step(envoy::STEP, |step| envoy::ensure(step, &workspace))?;
        }
        Task::Build => launch::build(&workspace, &privilege, verbose)?,
        Task::Demo(passed) => return Ok(exit_code(launch::demo(&workspace, &privilege, verbose, &passed)?)),
        Task::Bench(passed) => return Ok(exit_code(launch::bench(&workspace, &privilege, verbose, &passed)?)),
        Task::Run(passed) => match launch::agent(&workspace, &privilege, verbose, &passed)? {},
        Task::Test(arguments) => return tests_run::test(&workspace, &privilege, verbose, &arguments),
        Task::Soak(arguments) => return soak::run(&workspace, &privilege, verbose, &arguments),
        Task::Vm(arguments) => return vm::run(&workspace, &privilege, verbose, &arguments),
        Task::Kubernetes(arguments) => return kubernetes::run(&workspace, &privilege, verbose, &arguments),
        Task::KubernetesProbe(arguments) => kubernetes::probe::run(&arguments)?,
        Task::KubernetesDns(arguments) => kubernetes::dns::run(&arguments)?,
        Task::Install(arguments) => install::install(&workspace, &privilege, verbose, &arguments)?,
        Task::Uninstall(arguments) => uninstall::uninstall(&privilege, &arguments)?,
        Task::Docs => book::docs(&workspace, &privilege, verbose)?,
        Task::Dist(arguments) => dist::dist(&workspace, &privilege, verbose, &arguments)?,
        Task::Fuzz(arguments) => return fuzz::run(&workspace, &privilege, verbose, &arguments),
        Task::Schemathesis(arguments) => return schemathesis::run(&workspace, &privilege, verbose, &arguments),
        Task::Fmt(arguments) => return checks::fmt(&workspace, verbose, arguments.check),
        Task::Lint => return tests_run::lint(&workspace, &privilege, verbose),
    }
    Ok(ExitCode::SUCCESS)
}

/// A signal is a failure.
fn exit_code(status: ExitStatus) -> ExitCode {
    match status.code().map(u8::try_from) {
        Some(Ok(code)) => ExitCode::from(code),
        Some(Err(_)) | None => ExitCode::FAILURE,
    }
}
