//! `docs`: renders docs/ with mdBook to target/docs.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result};

use crate::{
    core_sources,
    privilege::Privilege,
    progress::{Progress, Step},
    workspace::{Workspace, bare_cargo},
};

/// Other releases may render other bytes.
const VERSION: &str = "0.5.4";

const STEP: &str = "The documentation (a minute the first time)";

pub(crate) fn docs(workspace: &Workspace, privilege: &Privilege, verbose: bool) -> Result<()> {
    let book = Progress::new(1, verbose, privilege).step(STEP, |step| build(step, workspace))?;
    println!("{}", book.join("index.html").display());
    Ok(())
}

pub(crate) fn build(step: &Step, workspace: &Workspace) -> Result<PathBuf> {
    let mdbook = ensure(step, workspace)?;
    let book = workspace.target().join("docs");
    core_sources::remove_directory(&book)?;
    let mut command = std::process::Command::new(mdbook);
    command.arg("build").arg(workspace.root().join("docs")).arg("--dest-dir").arg(&book);
    step.run(&mut command)?;
    // Settings, and a marker for GitHub Pages.
    for name in ["book.toml", ".nojekyll"] {
        fs::remove_file(book.join(name)).with_context(|| format!("remove {name} from {}", book.display()))?;
    }
    Ok(book)
}

fn ensure(step: &Step, workspace: &Workspace) -> Result<PathBuf> {
    let prefix = workspace.target().join("mdbook");
    let program = prefix.join(format!("{VERSION}/bin/mdbook"));
    if program.is_file() {
        return Ok(program);
    }
    fs::create_dir_all(&prefix).with_context(|| format!("create {}", prefix.display()))?;
    let scratch = prefix.join("build");
    let mut command = bare_cargo();
    command
        .args(["install", "mdbook", "--version", VERSION, "--locked", "--force"])
        .args(["--no-default-features", "--features", "search", "--root"])
        .arg(prefix.join(VERSION))
        // A third of a release build's time.
        .arg("--debug")
        .env("CARGO_PROFILE_DEV_DEBUG", "false")
        .env("CARGO_TARGET_DIR", &scratch)
        // Keeps out build settings of checkout and user.
        .current_dir(&prefix)
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("CARGO_BUILD_RUSTFLAGS");
    step.run(&mut command)?;
    core_sources::remove_directory(&scratch)?;
    Ok(program)
}
