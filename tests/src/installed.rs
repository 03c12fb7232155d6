//! Programs of the machine that tests with real container runtimes run.

use std::{
    env,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};

/// Where they are looked for; helpers of runtimes are in the `sbin` directories.
pub(crate) const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Where a program is.
///
/// # Errors
/// When it is not there.
pub(crate) fn find(program: &str) -> Result<PathBuf> {
    find_in(program, PATH).with_context(|| format!("{program} is not in {PATH}"))
}

/// Makes sure that all of these are there: program, Debian package.
///
/// # Errors
/// Names each that is missing, with the package.
pub(crate) fn require(needs: &[(&str, &str)]) -> Result<()> {
    let missing = missing(needs, PATH);
    ensure!(
        missing.is_empty(),
        "this test runs real containers; missing on this machine: {}. Install the Debian packages named, or run \
         `cargo xtask setup`, which does",
        missing.join(", ")
    );
    Ok(())
}

fn find_in(program: &str, path: &str) -> Option<PathBuf> {
    env::split_paths(path).map(|dir| dir.join(program)).find(|p| Path::is_file(p))
}

fn missing(needs: &[(&str, &str)], path: &str) -> Vec<String> {
    let absent = needs.iter().filter(|(program, _)| find_in(program, path).is_none());
    absent.map(|(program, package)| format!("{program} (package {package})")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_with_its_package() {
        let needs = [("sh", "dash"), ("no-such-program", "some-package")];
        assert_eq!(missing(&needs, PATH), ["no-such-program (package some-package)"]);
        assert_eq!(missing(&needs, "/nonexistent").len(), 2);
    }
}
