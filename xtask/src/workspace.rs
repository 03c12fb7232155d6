//! Paths in the checkout.

use std::{
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

/// Absolute paths. Builds always write to `target/`, where root's commands find them.
#[derive(Debug, Clone)]
pub(crate) struct Workspace {
    root: PathBuf,
}

impl Workspace {
    pub(crate) fn find() -> Result<Self> {
        // Cargo's path, or the compiled-in path if xtask is run directly.
        let package =
            std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| OsString::from(env!("CARGO_MANIFEST_DIR")));
        let package = PathBuf::from(package);
        let Some(root) = package.parent().filter(|root| root.join("xtask/Cargo.toml").is_file()) else {
            bail!("find the checkout: {} is not its xtask folder; run `cargo xtask` inside it", package.display());
        };
        Ok(Self { root: root.to_path_buf() })
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn target(&self) -> PathBuf {
        self.root.join("target")
    }

    /// Read by the build of `wharf-datapath`.
    pub(crate) fn bpf_objects(&self) -> PathBuf {
        self.target().join("bpf")
    }

    pub(crate) fn next_bpf_objects(&self) -> PathBuf {
        self.bpf_objects().join("next")
    }

    pub(crate) fn bpf_toolchain(&self) -> PathBuf {
        self.target().join("ebpf-toolchain")
    }

    pub(crate) fn release(&self) -> PathBuf {
        self.target().join("release")
    }

    /// Programs of the test build.
    pub(crate) fn debug(&self) -> PathBuf {
        self.target().join("debug")
    }

    /// Without settings that redirect or change cargo's output.
    pub(crate) fn cargo(&self) -> Command {
        let mut command = bare_cargo();
        command.current_dir(&self.root).env("CARGO_TARGET_DIR", self.target());
        command
    }
}

/// Without variables of the outer `cargo run` and of the user.
pub(crate) fn bare_cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo")));
    for name in ["CARGO_BUILD_TARGET", "CARGO_TARGET_DIR", "CARGO_BUILD_TARGET_DIR", "WHARF_BPF_DIR"] {
        command.env_remove(name);
    }
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")) {
            command.env_remove(name);
        }
    }
    command
}

/// Returns whether the bytes differ. An unchanged file keeps its mtime, which avoids rebuilds.
pub(crate) fn write_if_changed(path: &Path, bytes: &[u8]) -> Result<bool> {
    match fs::read(path) {
        Ok(present) if present == bytes => return Ok(false),
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error).with_context(|| format!("read {}", path.display())),
    }
    let parent = path.parent().with_context(|| format!("write {}: it has no directory", path.display()))?;
    fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    let fresh = PathBuf::from(name);
    fs::write(&fresh, bytes).with_context(|| format!("write {}", fresh.display()))?;
    fs::rename(&fresh, path).with_context(|| format!("rename {} to {}", fresh.display(), path.display()))?;
    Ok(true)
}

/// Also searches sbin, which a user's PATH may lack.
pub(crate) fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from))
        .map(|directory| directory.join(name))
        .find(|candidate| is_executable(candidate))
}

fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    fs::metadata(path).is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unchanged_bytes_leave_the_file_alone() -> Result<()> {
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("deep/object.o");
        assert!(write_if_changed(&path, b"one")?);
        let inode = |path: &Path| fs::metadata(path).map(|m| std::os::unix::fs::MetadataExt::ino(&m));
        let before = inode(&path)?;
        assert!(!write_if_changed(&path, b"one")?);
        assert_eq!(inode(&path)?, before);
        assert!(write_if_changed(&path, b"two")?);
        assert_eq!(fs::read(&path)?, b"two");
        assert_eq!(fs::read_dir(directory.path().join("deep"))?.count(), 1, "no temporary file stays");
        Ok(())
    }

    #[test]
    fn programs_are_found_and_files_that_are_not_programs_are_not() {
        assert!(find_program("sh").is_some());
        assert_eq!(find_program("no-such-program-anywhere"), None);
    }
}
