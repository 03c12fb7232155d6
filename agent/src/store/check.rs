//! Checks in a separate process whether the file can be opened.
//!
//! redb panics on some damaged pages, and a panic ends the process. A child process therefore opens the file first
//! and reads all of it. The agent sets the file aside when that process dies.

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

/// First argument that runs the agent's binary as this process; the file and the boot id follow.
pub const MODE: &str = "store-check";

/// This agent's own binary, even if its file has been replaced.
const PROGRAM: &str = "/proc/self/exe";
/// Exit status of a process that a panic ends by unwinding.
const PANICKED: i32 = 101;

/// Entry point of the child process. The agent finds and reports every other error again, so only the death of this
/// process carries information.
pub fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(2);
    let (Some(path), Some(boot_id)) = (arguments.next(), arguments.next()) else {
        return ExitCode::from(2);
    };
    // A core file of this process is useless. If the limit cannot be set, the only harm is one extra file.
    let _ = setrlimit(Resource::RLIMIT_CORE, 0, 0);
    let opener = |path: &Path| redb::Database::builder().set_cache_size(CACHE_BYTES).create(path);
    opening::try_open(&opener, Path::new(&path), &boot_id.to_string_lossy());
    ExitCode::SUCCESS
}

/// Checks whether a child process survives opening the file. If it dies, the next [`super::Store::open`] sets the
/// file aside. If the check cannot run, the agent opens the file unchecked.
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

/// The process died because of what it read. A process that was killed says nothing about the file.
fn is_fatal(status: ExitStatus) -> bool {
    status.code() == Some(PANICKED)
        || matches!(status.signal(), Some(libc::SIGABRT | libc::SIGSEGV | libc::SIGBUS | libc::SIGILL | libc::SIGFPE))
}
