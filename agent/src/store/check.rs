//! Whether the file can be opened at all, tried by another process.
//!
//! redb panics over some damaged pages, and a panic ends the process. So a process of its own opens the file first and
//! reads all of it; the agent sets the file aside when that process dies.

use std::{
    os::unix::process::ExitStatusExt as _,
    path::Path,
    process::{Command, ExitCode, ExitStatus, Stdio},
};

use nix::{
    libc,
    sys::resource::{Resource, setrlimit},
};

use super::opening::{self, CACHE_BYTES};

/// First argument that makes the agent's binary this process; the file and the boot id follow.
pub const MODE: &str = "store-check";

/// This agent's own binary, also when its file was replaced since.
const PROGRAM: &str = "/proc/self/exe";
/// What a panic that unwinds ends with.
const PANICKED: i32 = 101;

/// The process. Whatever it finds is found again by the agent, which says so: only its death tells something.
pub fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(2);
    let (Some(path), Some(boot_id)) = (arguments.next(), arguments.next()) else {
        return ExitCode::from(2);
    };
    // The dump of a process that is expected to die is of no use; without this one more file is left behind.
    let _ = setrlimit(Resource::RLIMIT_CORE, 0, 0);
    let opener = |path: &Path| redb::Database::builder().set_cache_size(CACHE_BYTES).create(path);
    opening::try_open(&opener, Path::new(&path), &boot_id.to_string_lossy());
    ExitCode::SUCCESS
}

/// Tries whether a process survives to open the file; the next [`super::Store::open`] sets it aside when none does. Where
/// that cannot be tried, the agent opens the file all the same.
pub fn run(path: &Path, boot_id: &str) {
    if !path.exists() {
        return;
    }
    let mut command = Command::new(PROGRAM);
    command.arg(MODE).arg(path).arg(boot_id).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    match command.status() {
        Ok(status) if is_fatal(status) => {
            if let Err(error) = opening::condemn(path) {
                tracing::warn!("note that {} cannot be opened: {error}", path.display());
            }
        }
        Ok(_) => {}
        Err(error) => tracing::warn!("start a process that checks {}: {error}", path.display()),
    }
}

/// It ended by itself over what it read. One that was killed says nothing about the file.
fn is_fatal(status: ExitStatus) -> bool {
    status.code() == Some(PANICKED)
        || matches!(status.signal(), Some(libc::SIGABRT | libc::SIGSEGV | libc::SIGBUS | libc::SIGILL | libc::SIGFPE))
}
