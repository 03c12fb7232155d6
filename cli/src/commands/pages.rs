//! Completion scripts and man pages, made from the command line's own description.

use std::path::Path;

use clap::CommandFactory;

use crate::{
    args::Cli,
    error::{CliError, Exit},
    output::write_text,
};

pub(super) fn completion(shell: clap_complete::Shell) -> Result<Exit, CliError> {
    // Into memory first: the generator panics when its writer fails, as a pipe to `head` does.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "wharf", &mut script);
    write_text(&String::from_utf8_lossy(&script))?;
    Ok(Exit::Ok)
}

pub(super) fn man(dir: &Path) -> Result<Exit, CliError> {
    clap_mangen::generate_to(Cli::command(), dir)
        .map_err(|e| CliError::refused(format!("writing man pages into {}: {e}", dir.display())))?;
    Ok(Exit::Ok)
}
