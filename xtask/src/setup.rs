//! BPF toolchain: packages, core's sources, linker.

use std::{
    fs::{self, File, TryLockError},
    path::PathBuf,
};

use anyhow::{Context, Result};

use crate::{
    args::CoreSources,
    core_sources, linker,
    packages::{self, Need},
    privilege::Privilege,
    progress::Progress,
    rustc::Rustc,
    workspace::Workspace,
};

pub(crate) const STEPS: usize = 3;

#[derive(Debug)]
pub(crate) struct Toolchain {
    pub(crate) rustc: Rustc,
    pub(crate) core_sources: PathBuf,
    pub(crate) linker: PathBuf,
}

/// `needs`: further packages.
pub(crate) fn ensure(
    progress: &mut Progress,
    workspace: &Workspace,
    privilege: &Privilege,
    needs: &[Need],
    way: CoreSources,
) -> Result<Toolchain> {
    let directory = workspace.bpf_toolchain();
    fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    let lock = File::create(directory.join(".lock")).with_context(|| format!("lock {}", directory.display()))?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            eprintln!("another `cargo xtask` is preparing the toolchain; waiting for it");
            lock.lock().with_context(|| format!("lock {}", directory.display()))?;
        }
        Err(TryLockError::Error(error)) => {
            return Err(error).with_context(|| format!("lock {}", directory.display()));
        }
    }

    progress.step("Debian packages", |step| packages::ensure(step, privilege, &[packages::BUILD, needs]))?;
    let rustc = Rustc::detect()?;
    let core_sources =
        progress.step("Sources of Rust's core", |step| core_sources::ensure(step, &rustc, &directory, way))?;
    let linker =
        progress.step("BPF linker (about 90 s the first time)", |step| linker::ensure(step, &rustc, &directory))?;
    Ok(Toolchain { rustc, core_sources, linker })
}
