//! Rejected command lines.

use std::process::ExitCode;

/// Unusable settings: a restart does not help.
pub(crate) const BAD_SETTINGS: u8 = 3;

pub(crate) fn refuse(error: &clap::Error) -> ExitCode {
    // Help and version are answers. The reader may be gone.
    let _ = error.print();
    if error.use_stderr() { ExitCode::from(BAD_SETTINGS) } else { ExitCode::SUCCESS }
}
