//! Tests the REST API against its OpenAPI document.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use anyhow::{Context, Result};

use crate::{
    args::{CoreSources, SchemathesisArgs},
    build, packages,
    privilege::Privilege,
    progress::{Progress, Step},
    setup,
    workspace::Workspace,
};

const VERSIONS: &str = include_str!("schemathesis.txt");

pub(crate) fn run(
    workspace: &Workspace,
    privilege: &Privilege,
    verbose: bool,
    arguments: &SchemathesisArgs,
) -> Result<ExitCode> {
    privilege.confirm("schemathesis (its agent serves a network namespace of its own)")?;
    let mut progress = Progress::new(setup::STEPS + build::STEPS + 3, verbose, privilege);
    let toolchain = setup::ensure(&mut progress, workspace, privilege, packages::SCHEMATHESIS, CoreSources::Auto)?;
    build::objects(&mut progress, workspace, &toolchain)?;
    build::programs(&mut progress, workspace, &[])?;
    progress.step("The program that runs it", |step| {
        step.run(workspace.cargo().args([
            "build",
            "--locked",
            "--package",
            "wharf-tests",
            "--bin",
            "wharf-schemathesis",
        ]))
    })?;
    let st = progress.step("Schemathesis", |step| install(step, workspace))?;
    progress.step("The REST API against its document", |step| {
        let mut command = command(workspace, privilege, &st, workspace.release());
        command.args(["--examples", &arguments.examples.to_string(), "--seed", &arguments.seed.to_string()]);
        anyhow::ensure!(
            step.run_open(&mut command)?.success(),
            "an answer was not as the document says; it is told above"
        );
        Ok(())
    })?;
    Ok(ExitCode::SUCCESS)
}

/// With programs of the test build.
pub(crate) fn check(step: &Step, workspace: &Workspace, privilege: &Privilege) -> Result<()> {
    let st = install(step, workspace)?;
    step.run(&mut command(workspace, privilege, &st, workspace.debug()))
}

fn command(workspace: &Workspace, privilege: &Privilege, st: &Path, programs: PathBuf) -> Command {
    let program = workspace.target().join("debug/wharf-schemathesis");
    let mut command = privilege.command(&program, &[("WHARF_BIN_DIR", programs.into())]);
    command.arg("--st").arg(st);
    command
}

fn install(step: &Step, workspace: &Workspace) -> Result<PathBuf> {
    let directory = workspace.target().join("schemathesis");
    let (stamp, versions, venv) = (directory.join("installed"), directory.join("versions.txt"), directory.join("venv"));
    let st = venv.join("bin/st");
    // Written last. An upgrade may remove a virtual environment's interpreter.
    let whole = fs::read_to_string(&stamp).is_ok_and(|installed| installed == VERSIONS);
    if whole && step.run_quietly(Command::new(&st).arg("--version"))?.is_ok() {
        step.note("there");
        return Ok(st);
    }
    match fs::remove_dir_all(&directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("remove {}", directory.display()));
        }
        _ => {}
    }
    fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    fs::write(&versions, VERSIONS).with_context(|| format!("write {}", versions.display()))?;
    step.run(Command::new("python3").args(["-m", "venv"]).arg(&venv))
        .context("make a Python environment for schemathesis (Debian: python3-venv)")?;
    let mut pip = Command::new(venv.join("bin/python"));
    pip.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-input",
        "--disable-pip-version-check",
        "--only-binary",
        ":all:",
    ])
    .arg("--constraint")
    .arg(&versions)
    .arg(pinned(VERSIONS)?);
    step.run(&mut pip).context(
        "install schemathesis: pip could not get it; the package index of pip's configuration must be \
         reachable for this check, which is not skipped",
    )?;
    fs::write(&stamp, VERSIONS).with_context(|| format!("write {}", stamp.display()))?;
    step.note("installed");
    Ok(st)
}

fn pinned(versions: &str) -> Result<&str> {
    versions
        .lines()
        .find(|line| line.starts_with("schemathesis=="))
        .context("xtask/src/schemathesis.txt lacks schemathesis")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_version_is_pinned() -> Result<()> {
        assert!(pinned(VERSIONS)?.len() > "schemathesis==".len());
        for line in VERSIONS.lines().filter(|line| !line.starts_with('#')) {
            let (name, version) = line.split_once("==").with_context(|| format!("{line:?} is not NAME==VERSION"))?;
            assert!(!name.is_empty() && version.starts_with(|c: char| c.is_ascii_digit()), "{line}");
        }
        Ok(())
    }
}
