//! Checks in a child process whether the file can be opened.
//!
//! redb panics on some damaged pages, which ends the process: a child reads the whole file first.

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

/// First argument; file and boot id follow.
pub const MODE: &str = "store-check";

const TARGET: &str = "wharf_agent::store::check";
/// The running binary, even if replaced.
const PROGRAM: &str = "/proc/self/exe";
const PANICKED: i32 = 101;

/// The child. Only its death counts: the agent finds other errors itself.
pub fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(2);
    let (Some(path), Some(boot_id)) = (arguments.next(), arguments.next()) else {
        return ExitCode::from(2);
    };
    // Avoids a core file.
    let _ = setrlimit(Resource::RLIMIT_CORE, 0, 0);
    let opener = |path: &Path| redb::Database::builder().set_cache_size(CACHE_BYTES).create(path);
    opening::try_open(&opener, Path::new(&path), &boot_id.to_string_lossy());
    ExitCode::SUCCESS
}

/// If the child dies, the next [`super::Store::open`] sets the file aside; if it cannot run, the file is opened
/// unchecked.
pub fn run(path: &Path, boot_id: &str) {
    if !path.exists() {
        return;
    }
    let mut command = Command::new(PROGRAM);
    command.arg(MODE).arg(path).arg(boot_id).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    match command.status() {
        Ok(status) if is_fatal(status) => {
            if let Err(error) = opening::condemn(path) {
                tracing::warn!(target: TARGET, "note that {} cannot be opened: {error}", path.display());
            }
        }
        Ok(_) => {}
        Err(error) => tracing::warn!(target: TARGET, "start a process that checks {}: {error}", path.display()),
    }
}

/// A killed process says nothing about the file.
fn is_fatal(status: ExitStatus) -> bool {
    status.code() == Some(PANICKED)
        || matches!(status.signal(), Some(libc::SIGABRT | libc::SIGSEGV | libc::SIGBUS | libc::SIGILL | libc::SIGFPE))
}
