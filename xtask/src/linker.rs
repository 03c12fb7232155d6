//! bpf-linker, built against the compiler's LLVM to read its bitcode.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result};

use crate::{
    progress::Step,
    rustc::Rustc,
    workspace::{bare_cargo, write_if_changed},
};

/// For the used aya releases.
const VERSION: &str = "0.13.0";

pub(crate) fn ensure(step: &Step, rustc: &Rustc, toolchain: &Path) -> Result<PathBuf> {
    let library = rustc.llvm_library()?;
    let prefix = toolchain.join(format!("bpf-linker-{VERSION}-rustc-{}", rustc.release));
    let linker = prefix.join("bin/bpf-linker");
    let stamp = prefix.join("built-for");
    let wanted = stamp_text(rustc, &prefix, &library);
    if fs::read_to_string(&stamp).is_ok_and(|found| found == wanted) && works(&linker) {
        step.note("there already");
        return Ok(linker);
    }

    fs::create_dir_all(prefix.join("lib")).with_context(|| format!("create {}/lib", prefix.display()))?;
    let file_name = library.file_name().with_context(|| format!("{} has no name", library.display()))?;
    // llvm-sys looks for libLLVM.so, the loader for the real name.
    link(&library, &prefix.join("lib").join(file_name))?;
    link(Path::new(file_name), &prefix.join("lib/libLLVM.so"))?;

    let scratch = toolchain.join("build-linker");
    let mut command = bare_cargo();
    command
        .args(["install", "bpf-linker", "--version", VERSION, "--locked", "--force", "--no-default-features"])
        .args(["--features", &format!("llvm-{}", rustc.llvm_major)])
        .arg("--root")
        .arg(&prefix)
        .env("LLVM_PREFIX", &prefix)
        .env("CARGO_TARGET_DIR", &scratch)
        .env("CARGO_PROFILE_RELEASE_DEBUG", "false")
        .current_dir(toolchain)
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("CARGO_BUILD_RUSTFLAGS");
    step.run(&mut command)?;
    step.run(Command::new(&linker).arg("--version"))
        .with_context(|| format!("try {}, just built", linker.display()))?;
    write_if_changed(&stamp, wanted.as_bytes())?;
    // Half a gigabyte.
    fs::remove_dir_all(&scratch).with_context(|| format!("remove {}", scratch.display()))?;
    step.note("built");
    Ok(linker)
}

/// Inputs of the linker. Its path of libLLVM is absolute: a moved checkout needs a rebuild.
fn stamp_text(rustc: &Rustc, prefix: &Path, library: &Path) -> String {
    format!(
        "bpf-linker {VERSION}\nrustc {} {}\nprefix {}\nllvm {}\n",
        rustc.release,
        rustc.commit,
        prefix.display(),
        library.display()
    )
}

fn works(linker: &Path) -> bool {
    Command::new(linker)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Replaces an existing file.
fn link(target: &Path, place: &Path) -> Result<()> {
    match fs::remove_file(place) {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(error).with_context(|| format!("remove {}", place.display())),
    }
    symlink(target, place).with_context(|| format!("link {} to {}", place.display(), target.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moved_checkout_is_noticed() {
        let rustc = Rustc {
            release: "1.95.0".into(),
            host: "x86_64-unknown-linux-gnu".into(),
            commit: "abc".into(),
            llvm_major: 22,
            sysroot: "/sys".into(),
        };
        let at = |place: &str| stamp_text(&rustc, Path::new(place), Path::new("/sys/lib/libLLVM.so.22.1"));
        assert_ne!(at("/one/checkout"), at("/another/checkout"));
        assert_eq!(at("/one/checkout"), at("/one/checkout"));
    }

    #[test]
    fn links_are_replaced() -> Result<()> {
        let directory = tempfile::tempdir()?;
        let place = directory.path().join("libLLVM.so");
        link(Path::new("old"), &place)?;
        link(Path::new("new"), &place)?;
        assert_eq!(fs::read_link(&place)?, Path::new("new"));
        assert!(!works(&place));
        Ok(())
    }
}
