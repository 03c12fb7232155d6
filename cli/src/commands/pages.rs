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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_command_has_a_page_with_an_example() {
        fn walk(command: &clap::Command, name: &str, directory: &Path, bare: &mut Vec<String>) -> usize {
            let page = std::fs::read_to_string(directory.join(format!("{name}.1"))).unwrap_or_default();
            if !page.contains("SYNOPSIS") || !page.contains("Example") {
                bare.push(name.to_owned());
            }
            let shown = command.get_subcommands().filter(|sub| !sub.is_hide_set());
            1 + shown.map(|sub| walk(sub, &format!("{name}-{}", sub.get_name()), directory, bare)).sum::<usize>()
        }
        let directory = tempfile::tempdir().expect("make directory");
        man(directory.path()).expect("writes");
        let mut bare = Vec::new();
        let pages = walk(&Cli::command(), "wharf", directory.path(), &mut bare);
        assert_eq!(bare, Vec::<String>::new(), "pages that are missing or have no example");
        assert!(pages > 30, "only {pages} commands were found");
    }
}
