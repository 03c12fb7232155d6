//! Runs programs as root.

use std::{
    ffi::{OsStr, OsString},
    fs,
    io::{self, IsTerminal},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

use crate::workspace::find_program;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Privilege {
    Root,
    Sudo(PathBuf),
    None,
}

impl Privilege {
    /// Without a password.
    pub(crate) fn detect() -> Result<Self> {
        // The effective user owns /proc/self; needs no libc.
        let user = fs::metadata("/proc/self").context("find out which user this is: read /proc/self")?.uid();
        Ok(match (user, find_program("sudo")) {
            (0, _) => Self::Root,
            (_, Some(sudo)) => Self::Sudo(sudo),
            (_, None) => Self::None,
        })
    }

    /// Requests the password before long work.
    pub(crate) fn confirm(&self, what_for: &str) -> Result<()> {
        let Self::Sudo(sudo) = self else {
            if *self == Self::None {
                bail!("{what_for} needs root, and there is no sudo: run it as root, or install sudo");
            }
            return Ok(());
        };
        let mut command = Command::new(sudo);
        if io::stdin().is_terminal() {
            eprintln!("{what_for} needs root for a part of its work; the build stays yours");
            command.arg("--validate");
        } else {
            command.args(["--non-interactive", "true"]);
        }
        let status = command.status().with_context(|| format!("run {}", sudo.display()))?;
        if !status.success() {
            bail!("{what_for} needs root, and sudo refused: run it as root, or as a user that sudo lets run commands");
        }
        Ok(())
    }

    /// Keeps sudo's password cached during a long build.
    pub(crate) fn refresh(&self) {
        if let Self::Sudo(sudo) = self {
            let quiet = Command::new(sudo)
                .args(["--non-interactive", "--validate"])
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status();
            drop(quiet);
        }
    }

    /// Passes `variables` even through sudo.
    pub(crate) fn command(&self, program: &Path, variables: &[(&str, OsString)]) -> Command {
        match self {
            Self::Root | Self::None => {
                let mut command = Command::new(program);
                command.envs(variables.iter().map(|(name, value)| (name, value)));
                command
            }
            Self::Sudo(sudo) => {
                let mut command = Command::new(sudo);
                command.arg("--").arg("env");
                for (name, value) in variables {
                    let mut assignment = OsString::from(name);
                    assignment.push("=");
                    assignment.push(value);
                    command.arg(assignment);
                }
                command.arg(program);
                command
            }
        }
    }

    /// For test binaries.
    pub(crate) fn test_runner(&self) -> Option<String> {
        match self {
            Self::Sudo(sudo) => Some(format!("{} --non-interactive --preserve-env --", sudo.display())),
            Self::Root | Self::None => None,
        }
    }

    /// Changes the owner of files of a root command.
    pub(crate) fn give_back(&self, path: &Path) -> Result<()> {
        if !matches!(self, Self::Sudo(_)) || !path.exists() {
            return Ok(());
        }
        let owner = fs::metadata("/proc/self").context("read /proc/self")?;
        let status = self
            .command(OsStr::new("chown").as_ref(), &[])
            .args(["--recursive", "--no-dereference"])
            .arg(format!("{}:{}", owner.uid(), owner.gid()))
            .arg(path)
            .status()
            .context("run chown")?;
        if !status.success() {
            bail!("give {} back to its user: chown failed; `sudo chown -R $USER` it", path.display());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(command: &Command) -> Vec<String> {
        std::iter::once(command.get_program())
            .chain(command.get_args())
            .map(|word| word.to_string_lossy().into_owned())
            .collect()
    }

    #[test]
    fn sudo_gets_the_variables_as_words() {
        let sudo = Privilege::Sudo("/usr/bin/sudo".into());
        let command = sudo.command(Path::new("/x/demo"), &[("WHARF_BIN_DIR", "/x y".into())]);
        assert_eq!(words(&command), ["/usr/bin/sudo", "--", "env", "WHARF_BIN_DIR=/x y", "/x/demo"]);
        assert_eq!(sudo.test_runner().as_deref(), Some("/usr/bin/sudo --non-interactive --preserve-env --"));
    }

    #[test]
    fn root_runs_things_directly() {
        let command = Privilege::Root.command(Path::new("/x/demo"), &[("A", "b".into())]);
        assert_eq!(words(&command), ["/x/demo"]);
        assert_eq!(command.get_envs().count(), 1);
        assert_eq!(Privilege::Root.test_runner(), None);
    }

    #[test]
    fn neither_root_nor_sudo_is_a_clear_error() {
        let error = Privilege::None.confirm("the demo").map_err(|error| error.to_string());
        assert_eq!(error, Err("the demo needs root, and there is no sudo: run it as root, or install sudo".to_owned()));
    }
}
