//! Command lines that are not carried out.

use std::process::ExitCode;

/// Exit status when the settings cannot be used: starting again does not help, correcting them does.
pub(crate) const BAD_SETTINGS: u8 = 3;

/// Prints why a command line is not carried out, and gives the exit status.
pub(crate) fn refuse(error: &clap::Error) -> ExitCode {
    // Help and version are answers, everything else is a mistake. Nobody may be left to read either.
    let _ = error.print();
    if error.use_stderr() { ExitCode::from(BAD_SETTINGS) } else { ExitCode::SUCCESS }
}
