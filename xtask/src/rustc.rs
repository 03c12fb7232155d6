//! Facts about the compiler.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

/// Supported by the pinned bpf-linker.
const LINKER_LLVM: std::ops::RangeInclusive<u32> = 21..=23;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rustc {
    pub(crate) release: String,
    pub(crate) host: String,
    /// Identifies a compiler build.
    pub(crate) commit: String,
    pub(crate) llvm_major: u32,
    pub(crate) sysroot: PathBuf,
}

impl Rustc {
    pub(crate) fn detect() -> Result<Self> {
        let version = ask(&["-vV"])?;
        let sysroot = PathBuf::from(ask(&["--print", "sysroot"])?.trim());
        Self::parse(&version, sysroot)
    }

    fn parse(version: &str, sysroot: PathBuf) -> Result<Self> {
        let field = |name: &str| {
            version
                .lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
                .with_context(|| format!("read `rustc -vV`: it has no line `{name}`"))
        };
        let llvm = field("LLVM version")?;
        let llvm_major = llvm
            .split('.')
            .next()
            .and_then(|major| major.parse().ok())
            .with_context(|| format!("read `rustc -vV`: LLVM version `{llvm}` is not a number"))?;
        Ok(Self {
            release: field("release")?.to_owned(),
            host: field("host")?.to_owned(),
            commit: field("commit-hash").unwrap_or("unknown").to_owned(),
            llvm_major,
            sysroot,
        })
    }

    /// rustup's component `rust-src`.
    pub(crate) fn own_library(&self) -> PathBuf {
        self.sysroot.join("lib/rustlib/src/rust/library")
    }

    /// For the BPF linker: the LLVM that wrote the bitcode.
    pub(crate) fn llvm_library(&self) -> Result<PathBuf> {
        if !LINKER_LLVM.contains(&self.llvm_major) {
            bail!(
                "build the BPF linker: rustc {} has LLVM {}, and the linker knows LLVM {} to {}; \
                 `rustup toolchain install 1.95.0`, then `cargo +1.95.0 xtask ...`",
                self.release,
                self.llvm_major,
                LINKER_LLVM.start(),
                LINKER_LLVM.end()
            );
        }
        let directory = self.sysroot.join("lib");
        let prefix = format!("libLLVM.so.{}.", self.llvm_major);
        let entries = fs::read_dir(&directory).with_context(|| format!("list {}", directory.display()))?;
        for entry in entries {
            let entry = entry.with_context(|| format!("list {}", directory.display()))?;
            if entry.file_name().to_str().is_some_and(|name| name.starts_with(&prefix)) {
                return Ok(entry.path());
            }
        }
        bail!(
            "build the BPF linker: rustc {} keeps no {prefix}* in {}; use a toolchain of rustup's, which does",
            self.release,
            directory.display()
        )
    }

    pub(crate) fn bpf_target_arch(&self) -> Result<&'static str> {
        match self.host.split('-').next() {
            Some("x86_64") => Ok("x86_64"),
            Some("aarch64") => Ok("aarch64"),
            _ => bail!("build the BPF programs: {} is not supported; x86_64 and aarch64 Linux are", self.host),
        }
    }
}

pub(crate) fn cargo_target_variable(target: &str, setting: &str) -> String {
    format!("CARGO_TARGET_{}_{setting}", target.to_uppercase().replace('-', "_"))
}

fn ask(arguments: &[&str]) -> Result<String> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| OsString::from("rustc"));
    let output = Command::new(&rustc)
        .args(arguments)
        .output()
        .with_context(|| format!("run {}", Path::new(&rustc).display()))?;
    if !output.status.success() {
        bail!("run rustc {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    }
    String::from_utf8(output.stdout).with_context(|| format!("read the answer of rustc {}", arguments.join(" ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const VERSION: &str = "rustc 1.95.0 (59807616e 2026-04-14)\nbinary: rustc\ncommit-hash: 59807616\n\
                           commit-date: 2026-04-14\nhost: x86_64-unknown-linux-gnu\nrelease: 1.95.0\nLLVM version: 22.1.2\n";

    #[test]
    fn the_version_is_read() -> Result<()> {
        let rustc = Rustc::parse(VERSION, "/sys".into())?;
        assert_eq!((rustc.release.as_str(), rustc.llvm_major), ("1.95.0", 22));
        assert_eq!(rustc.own_library(), Path::new("/sys/lib/rustlib/src/rust/library"));
        assert_eq!(cargo_target_variable(&rustc.host, "RUNNER"), "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER");
        Ok(())
    }

    #[test]
    fn a_compiler_the_linker_cannot_follow_is_refused_with_a_way_out() -> Result<()> {
        let rustc = Rustc::parse(&VERSION.replace("22.1.2", "31.0.1"), "/sys".into())?;
        let message = rustc.llvm_library().map_err(|error| error.to_string()).err().unwrap_or_default();
        assert!(message.contains("LLVM 31") && message.contains("cargo +1.95.0 xtask"), "{message}");
        assert!(Rustc::parse(&VERSION.replace("release", "rel"), "/sys".into()).is_err());
        Ok(())
    }

    #[test]
    fn a_compiler_without_a_library_of_its_own_is_refused() -> Result<()> {
        let sysroot = tempfile::tempdir()?;
        fs::create_dir(sysroot.path().join("lib"))?;
        let rustc = Rustc::parse(VERSION, sysroot.path().to_path_buf())?;
        assert!(rustc.llvm_library().is_err_and(|error| error.to_string().contains("rustup")));
        let library = sysroot.path().join("lib/libLLVM.so.22.1-rust-1.95.0-stable");
        fs::write(&library, b"")?;
        assert_eq!(rustc.llvm_library()?, library);
        Ok(())
    }
}
