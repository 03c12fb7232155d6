//! The agent's man page and completion scripts, made from the command line's own description, for packaging:
//! `wharf-agent man DIR` and `wharf-agent completion SHELL`. They are no commands that help tells of.

use std::{ffi::OsString, io::Write as _, path::Path, process::ExitCode};

use anyhow::{Context, bail};
use clap::{CommandFactory, ValueEnum as _};
use clap_complete::Shell;

use crate::config::Flags;

/// The program's name: the package's.
const NAME: &str = env!("CARGO_PKG_NAME");

/// Writes pages when the arguments ask for that; `None` when they ask for an agent.
pub fn asked(mut arguments: impl Iterator<Item = OsString>) -> Option<ExitCode> {
    let written = match arguments.next()?.to_str()? {
        "man" => man(arguments.next()),
        "completion" => completion(arguments.next()),
        _ => return None,
    };
    Some(match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{NAME}: {error:#}");
            ExitCode::FAILURE
        }
    })
}

fn command() -> clap::Command {
    Flags::command().name(NAME).bin_name(NAME)
}

fn man(directory: Option<OsString>) -> anyhow::Result<()> {
    let directory = directory.context("write the man page: name a directory, as in `wharf-agent man DIR`")?;
    let path = Path::new(&directory);
    clap_mangen::generate_to(command(), path).with_context(|| format!("write the man page into {}", path.display()))
}

fn completion(shell: Option<OsString>) -> anyhow::Result<()> {
    let Some(shell) = shell.as_ref().and_then(|s| s.to_str()).and_then(|s| Shell::from_str(s, false).ok()) else {
        let known: Vec<String> = Shell::value_variants().iter().map(ToString::to_string).collect();
        bail!("write completions: name a shell, one of {}", known.join(", "));
    };
    // Into memory first: the generator panics when its writer fails, as a pipe to `head` does.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command(), NAME, &mut script);
    std::io::stdout().write_all(&script).context("write completions")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_names_every_setting_and_has_an_example() {
        let directory = tempfile::tempdir().expect("make directory");
        man(Some(directory.path().into())).expect("writes");
        let page = std::fs::read_to_string(directory.path().join("wharf-agent.1")).expect("the page");
        let page = page.replace('\\', "");
        assert!(page.contains("Examples:") && page.contains("wharf-agent --config /etc/wharf/agent.toml"), "{page}");
        for argument in Flags::command().get_arguments().filter(|a| !a.is_hide_set()) {
            let flag = format!("--{}", argument.get_long().expect("every argument is a flag"));
            assert!(page.contains(&flag), "{flag} is not in the page");
        }
    }

    #[test]
    fn only_its_own_words_are_taken() {
        let asks = |words: &[&str]| asked(words.iter().map(OsString::from)).is_some();
        assert!(!asks(&[]) && !asks(&["--mtu", "1500"]) && !asks(&["manual"]));
        assert!(asks(&["completion", "no-such-shell"]) && asks(&["man"]));
    }
}
