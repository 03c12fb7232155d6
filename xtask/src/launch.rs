//! Builds and starts demo, bench or agent.

use std::{
    ffi::OsString,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
};

use anyhow::{Context, Result};

use crate::{
    args::{CoreSources, Passed},
    build, envoy, packages,
    privilege::Privilege,
    progress::{Progress, describe},
    setup,
    uninstall::CONFIG,
    workspace::Workspace,
};

const STEPS: usize = setup::STEPS + build::STEPS;

pub(crate) fn build(workspace: &Workspace, privilege: &Privilege, verbose: bool) -> Result<()> {
    prepare(workspace, privilege, verbose)
}

pub(crate) fn demo(workspace: &Workspace, privilege: &Privilege, verbose: bool, passed: &Passed) -> Result<ExitStatus> {
    privilege.confirm("the demo (it makes network namespaces)")?;
    let mut progress = Progress::new(STEPS + 1, verbose, privilege);
    let toolchain = setup::ensure(&mut progress, workspace, privilege, packages::DEMO, CoreSources::Auto)?;
    progress.step(envoy::STEP, |step| envoy::ensure(step, workspace))?;
    build::objects(&mut progress, workspace, &toolchain)?;
    build::demo(&mut progress, workspace)?;
    eprintln!();
    run(as_root(workspace.debug(), workspace, privilege, "wharf-demo", passed))
}

pub(crate) fn bench(
    workspace: &Workspace,
    privilege: &Privilege,
    verbose: bool,
    passed: &Passed,
) -> Result<ExitStatus> {
    privilege.confirm("the bench (it makes network namespaces)")?;
    let mut progress = Progress::new(STEPS + 1, verbose, privilege);
    let toolchain = setup::ensure(&mut progress, workspace, privilege, packages::BENCH, CoreSources::Auto)?;
    progress.step(envoy::STEP, |step| envoy::ensure(step, workspace))?;
    build::ensure(&mut progress, workspace, &toolchain, &["wharf-bench"])?;
    eprintln!();
    let status = run(as_root(workspace.release(), workspace, privilege, "wharf-bench", passed))?;
    privilege.give_back(&workspace.target().join("bench"))?;
    Ok(status)
}

/// Replaces this process; returns only on failure.
pub(crate) fn agent(
    workspace: &Workspace,
    privilege: &Privilege,
    verbose: bool,
    passed: &Passed,
) -> Result<std::convert::Infallible> {
    privilege.confirm("the agent (it configures this machine's network)")?;
    prepare(workspace, privilege, verbose)?;
    let mut command = as_root(workspace.release(), workspace, privilege, "wharf-agent", passed);
    // sudo drops the environment.
    let variable = *privilege == Privilege::Root && std::env::var_os("WHARF_CONFIG").is_some();
    if !variable && Path::new(CONFIG).exists() && takes_installed_settings(&passed.args) {
        eprintln!("\nthe settings of {CONFIG} apply; other ones: `cargo xtask run -- --config FILE`");
        command.args(["--config", CONFIG]);
    }
    eprintln!("\nstarting {}; Ctrl-C stops it, containers keep their network", describe(&command));
    let error = command.exec();
    Err(error).with_context(|| format!("start `{}`", describe(&command)))
}

/// The installed settings apply to options without `--config`.
fn takes_installed_settings(arguments: &[String]) -> bool {
    arguments.first().is_none_or(|first| first.starts_with('-'))
        && !arguments.iter().any(|argument| argument == "--config" || argument.starts_with("--config="))
}

fn prepare(workspace: &Workspace, privilege: &Privilege, verbose: bool) -> Result<()> {
    let mut progress = Progress::new(STEPS, verbose, privilege);
    let toolchain = setup::ensure(&mut progress, workspace, privilege, &[], CoreSources::Auto)?;
    build::ensure(&mut progress, workspace, &toolchain, &[])
}

fn as_root(binaries: PathBuf, workspace: &Workspace, privilege: &Privilege, name: &str, passed: &Passed) -> Command {
    let mut variables =
        vec![("WHARF_BIN_DIR", OsString::from(&binaries)), ("WHARF_TARGET_DIR", OsString::from(workspace.target()))];
    // Needed variables that sudo drops.
    for name in ["RUST_LOG", "RUST_BACKTRACE", "NO_COLOR", "TERM", "LANG", "LC_ALL"] {
        if let Some(value) = std::env::var_os(name) {
            variables.push((name, value));
        }
    }
    let mut command = privilege.command(&binaries.join(name), &variables);
    command.args(&passed.args);
    command
}

fn run(mut command: Command) -> Result<ExitStatus> {
    command.status().with_context(|| format!("start `{}`", describe(&command)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_installed_settings_apply_unless_the_arguments_name_others() {
        let takes = |arguments: &[&str]| {
            takes_installed_settings(&arguments.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        assert!(takes(&[]) && takes(&["--mtu", "1400"]));
        assert!(!takes(&["--mtu", "1400", "--config", "a.toml"]) && !takes(&["--config=a.toml"]));
        assert!(!takes(&["cleanup", "--dry-run"]), "another command");
    }
}
