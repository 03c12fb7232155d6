//! promtool checks metrics and alert rules. Unpacked from Debian's `prometheus`, whose installation would start a
//! server.

use std::{fs, process::Command};

use anyhow::{Context, Result, bail};

use crate::{
    core_sources,
    packages::apt,
    privilege::Privilege,
    progress::Step,
    workspace::{Workspace, find_program},
};

const PACKAGE: &str = "prometheus";
const PROGRAM: &str = "usr/bin/promtool";

/// On the PATH, or in target/promtool.
pub(crate) fn ensure(step: &Step, workspace: &Workspace, privilege: &Privilege) -> Result<()> {
    if find_program("promtool").is_some() {
        step.note("the machine's own");
        return Ok(());
    }
    let directory = workspace.target().join("promtool");
    if directory.join(PROGRAM).is_file() {
        step.note("there");
        return Ok(());
    }
    let Some(apt_get) = find_program("apt-get") else {
        bail!("get promtool: this machine has no apt-get; install promtool (it comes with Prometheus), then try again");
    };
    let fresh = directory.with_extension("new");
    core_sources::remove_directory(&fresh)?;
    fs::create_dir_all(&fresh).with_context(|| format!("create {}", fresh.display()))?;
    let download = || {
        let mut command = Command::new(&apt_get);
        command.current_dir(&fresh).args(["download", PACKAGE]);
        command
    };
    // Most machines need no `update`.
    if step.run_quietly(&mut download())?.is_err() {
        step.run(apt(privilege, &apt_get).arg("update"))?;
        step.run(&mut download())?;
    }
    let entries = fs::read_dir(&fresh).with_context(|| format!("list {}", fresh.display()))?;
    let deb = entries
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .with_context(|| format!("get promtool: apt-get succeeded, yet {} holds no package", fresh.display()))?;
    core_sources::unpack(&deb, &fresh, &format!("./{PROGRAM}"))?;
    fs::remove_file(&deb).with_context(|| format!("remove {}", deb.display()))?;
    core_sources::remove_directory(&directory)?;
    fs::rename(&fresh, &directory).with_context(|| format!("rename {} to {}", fresh.display(), directory.display()))?;
    step.note(format!("Debian's package {PACKAGE}"));
    Ok(())
}
