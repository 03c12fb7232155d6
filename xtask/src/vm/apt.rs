//! Packages of other Debian releases, by apt with separate state and without root.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

use crate::{core_sources, progress::Step};

/// Part of every Debian.
const KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

#[derive(Debug)]
pub(crate) struct Apt {
    directory: PathBuf,
    suites: String,
}

impl Apt {
    /// Fetches all indexes from the first complete mirror.
    pub(crate) fn open(step: &Step, directory: &Path, suites: &[&str]) -> Result<Self> {
        let apt = Self { directory: directory.to_path_buf(), suites: suites.join(" and ") };
        if !Path::new(KEYS).exists() {
            bail!("fetch packages of {}: {KEYS} is not there; install debian-archive-keyring", apt.suites);
        }
        for part in ["lists/partial", "cache/archives/partial"] {
            let path = directory.join(part);
            fs::create_dir_all(&path).with_context(|| format!("create {}", path.display()))?;
        }
        // Without a status, dependencies always count as missing.
        apt.write("status", "")?;
        apt.write("apt.conf", &configuration(directory))?;
        let mut tried = Vec::new();
        for mirror in core_sources::mirrors()? {
            apt.write("sources.list", &sources(&mirror, suites))?;
            match step.run_quietly(apt.command("apt-get").arg("update"))? {
                Ok(()) => return Ok(apt),
                Err(output) => tried.push(format!("{mirror}: {}", core_sources::reason(&output))),
            }
        }
        let tried = if tried.is_empty() { "apt names no mirror".to_owned() } else { tried.join("; ") };
        bail!(
            "fetch packages of {}: no package mirror of this machine has them ({tried}); add a Debian mirror to apt's \
             sources",
            apt.suites
        )
    }

    pub(crate) fn dependencies(&self, package: &str) -> Result<Vec<String>> {
        let mut command = self.command("apt-cache");
        command.args(["depends", package]);
        let output = command
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("ask what {package} needs: run apt-cache"))?;
        if !output.status.success() {
            let told = String::from_utf8_lossy(&output.stderr);
            bail!("ask what {package} of {} needs: {}", self.suites, told.trim());
        }
        Ok(parse_depends(&String::from_utf8_lossy(&output.stdout)))
    }

    /// Downloads and unpacks exactly these packages.
    pub(crate) fn unpack(&self, step: &Step, packages: &[String], into: &Path) -> Result<()> {
        let debs = self.directory.join("download");
        empty_directory(&debs)?;
        step.run(self.command("apt-get").current_dir(&debs).arg("download").args(packages))?;
        unpack_all(step, &debs, into)?;
        fs::remove_dir_all(&debs).with_context(|| format!("remove {}", debs.display()))
    }

    /// With all dependencies; prefers `release`.
    pub(crate) fn unpack_whole(&self, step: &Step, packages: &[&str], release: &str, into: &Path) -> Result<()> {
        let mut command = self.command("apt-get");
        command.args(["install", "--download-only", "--yes", "--no-install-recommends", "--target-release", release]);
        step.run(command.args(packages))?;
        unpack_all(step, &self.directory.join("cache/archives"), into)?;
        step.run(self.command("apt-get").arg("clean"))
    }

    /// Read after the machine's configuration.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.arg("--config-file").arg(self.directory.join("apt.conf")).env("DEBIAN_FRONTEND", "noninteractive");
        command
    }

    fn write(&self, name: &str, text: &str) -> Result<()> {
        let path = self.directory.join(name);
        fs::write(&path, text).with_context(|| format!("write {}", path.display()))
    }
}

/// Keeps the machine's proxies; overrides the rest.
fn configuration(directory: &Path) -> String {
    let here = directory.display();
    format!(
        "#clear APT::Update::Pre-Invoke;\n#clear APT::Update::Post-Invoke;\n#clear APT::Update::Post-Invoke-Success;\n\
         #clear DPkg::Pre-Invoke;\n#clear DPkg::Post-Invoke;\n#clear DPkg::Pre-Install-Pkgs;\n\
         #clear Acquire::IndexTargets;\n\
         Acquire::IndexTargets {{ deb::Packages {{ MetaKey \"$(COMPONENT)/binary-$(ARCHITECTURE)/Packages\"; \
         flatMetaKey \"Packages\"; ShortDescription \"Packages\"; \
         Description \"$(RELEASE)/$(COMPONENT) $(ARCHITECTURE) Packages\"; Optional \"0\"; }}; }};\n\
         APT::Architecture \"amd64\";\n#clear APT::Architectures;\nAPT::Default-Release \"\";\n\
         APT::Sandbox::User \"root\";\nAPT::Update::Error-Mode \"any\";\n\
         Dir::State \"{here}\";\nDir::State::lists \"{here}/lists\";\nDir::State::status \"{here}/status\";\n\
         Dir::Cache \"{here}/cache\";\nDir::Cache::pkgcache \"\";\nDir::Cache::srcpkgcache \"\";\n\
         Dir::Etc::sourcelist \"{here}/sources.list\";\nDir::Etc::sourceparts \"/dev/null\";\n\
         Dir::Etc::preferences \"/dev/null\";\nDir::Etc::preferencesparts \"/dev/null\";\n"
    )
}

fn sources(mirror: &str, suites: &[&str]) -> String {
    suites.iter().map(|suite| format!("deb [signed-by={KEYS}] {mirror} {suite} main\n")).collect()
}

/// `  Depends: linux-image-6.1.0-50-cloud-amd64`; a bar marks alternatives.
fn parse_depends(output: &str) -> Vec<String> {
    output
        .lines()
        .filter_map(|line| line.trim().trim_start_matches('|').strip_prefix("Depends: "))
        .map(str::to_owned)
        .collect()
}

fn unpack_all(step: &Step, debs: &Path, into: &Path) -> Result<()> {
    let mut count = 0;
    for entry in fs::read_dir(debs).with_context(|| format!("list {}", debs.display()))? {
        let path = entry.with_context(|| format!("list {}", debs.display()))?.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            step.run(Command::new("dpkg-deb").arg("--extract").arg(&path).arg(into))?;
            count += 1;
        }
    }
    if count == 0 {
        bail!("unpack into {}: apt-get succeeded, yet {} holds no package", into.display(), debs.display());
    }
    Ok(())
}

pub(crate) fn empty_directory(path: &Path) -> Result<()> {
    core_sources::remove_directory(path)?;
    fs::create_dir_all(path).with_context(|| format!("create {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_suite_has_a_line_with_debians_key() {
        let list = sources("http://m.example/debian/", &["bookworm", "bookworm-backports"]);
        assert_eq!(
            list,
            format!(
                "deb [signed-by={KEYS}] http://m.example/debian/ bookworm main\n\
                 deb [signed-by={KEYS}] http://m.example/debian/ bookworm-backports main\n"
            )
        );
    }

    #[test]
    fn dependencies_are_read_and_other_relations_are_not() {
        let told = "linux-image\n  PreDepends: linux-base\n |Depends: dracut\n  Depends: linux-binary-7\n    dracut\n";
        assert_eq!(parse_depends(told), ["dracut", "linux-binary-7"]);
    }
}
