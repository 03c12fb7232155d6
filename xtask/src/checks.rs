//! Checks without tests.

use std::process::ExitCode;

use anyhow::Result;

use crate::{
    build::bpf_cargo,
    doc_links, licences,
    privilege::Privilege,
    progress::{Progress, Step},
    rustc::Rustc,
    setup::Toolchain,
    workspace::{Workspace, bare_cargo, find_program},
};

pub(crate) type Check = (&'static str, fn(&Step, &Workspace) -> Result<()>);

pub(crate) const QUICK: &[Check] = &[("Formatting", formatting), ("Licences", licences), ("Links in documents", links)];

pub(crate) fn fmt(workspace: &Workspace, verbose: bool, check: bool) -> Result<ExitCode> {
    let mut progress = Progress::new(1, verbose, &Privilege::Root);
    progress
        .step("Formatting", |step| if check { formatting(step, workspace) } else { format(step, workspace, false) })?;
    Ok(ExitCode::SUCCESS)
}

fn formatting(step: &Step, workspace: &Workspace) -> Result<()> {
    if find_program("rustfmt").is_none() {
        step.note("not checked: no rustfmt (`rustup component add rustfmt`)");
        return Ok(());
    }
    format(step, workspace, true)
}

fn format(step: &Step, workspace: &Workspace, check: bool) -> Result<()> {
    for manifest in ["Cargo.toml", "ebpf/Cargo.toml"] {
        let mut command = workspace.cargo();
        command.args(["fmt", "--all", "--manifest-path", manifest]);
        if check {
            command.arg("--check");
        }
        step.run(&mut command)?;
    }
    Ok(())
}

fn licences(step: &Step, workspace: &Workspace) -> Result<()> {
    // Crates of other platforms are not fetched.
    let host = Rustc::detect()?.host;
    let mut crates = 0;
    for folder in [workspace.root().to_path_buf(), workspace.root().join("ebpf")] {
        let mut metadata = bare_cargo();
        metadata.current_dir(folder).args([
            "metadata",
            "--format-version",
            "1",
            "--locked",
            "--quiet",
            "--filter-platform",
            &host,
        ]);
        crates += licences::check(&mut metadata)?;
    }
    step.note(format!("{crates} crates"));
    // cargo-deny checks more; its advisories need a database.
    if find_program("cargo-deny").is_some() {
        step.run(workspace.cargo().args(["deny", "--offline", "check", "bans", "licenses", "sources"]))?;
        step.note(format!("{crates} crates, cargo deny too"));
    }
    Ok(())
}

fn links(step: &Step, workspace: &Workspace) -> Result<()> {
    step.note(format!("{} links", doc_links::check(workspace.root())?));
    Ok(())
}

pub(crate) fn clippy(step: &Step, workspace: &Workspace, toolchain: &Toolchain) -> Result<()> {
    if find_program("cargo-clippy").is_none() {
        step.note("not checked: no clippy (`rustup component add clippy`)");
        return Ok(());
    }
    let mut command = workspace.cargo();
    command.args(["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]);
    step.run(&mut command)?;
    let mut command = bpf_cargo(workspace, toolchain, "clippy")?;
    command.args(["--release", "--locked", "--", "-D", "warnings"]);
    step.run(&mut command)
}

pub(crate) fn rustdoc(step: &Step, workspace: &Workspace) -> Result<()> {
    let mut command = workspace.cargo();
    // Clippy's features: its checked libraries are reused.
    command.args([
        "doc",
        "--workspace",
        "--no-deps",
        "--locked",
        "--document-private-items",
        "--features",
        "wharf-agent/otlp,wharf-datapath/fake",
    ]);
    step.run(command.env("RUSTDOCFLAGS", "-D warnings"))
}
