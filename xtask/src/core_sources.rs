//! Finds the sources of Rust's core library for `-Z build-std=core`: the toolchain's, else rustup's component, else
//! Debian's package from the package mirror.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

use crate::{args::CoreSources, progress::Step, rustc::Rustc, workspace::find_program};

/// Uses the machine's proxies, and checks the hash.
const APT_HELPER: &str = "/usr/lib/apt/apt-helper";

#[derive(Debug)]
struct Package {
    release: &'static str,
    file: &'static str,
    sha256: &'static str,
}

const POOL: &str = "pool/main/r/rustc/";

/// For releases that must build without rustup's servers.
const PACKAGES: &[Package] = &[Package {
    release: "1.95.0",
    file: "rust-src_1.95.0+dfsg1-2~bpo13+1_all.deb",
    sha256: "7b76db5b880a77f9e52975d2baa6209d2f76d2c9c2789515c3088cb960e2c83b",
}];

pub(crate) fn ensure(step: &Step, rustc: &Rustc, toolchain: &Path, way: CoreSources) -> Result<PathBuf> {
    let own = rustc.own_library();
    if way == CoreSources::Auto && complete(&own) {
        step.note("the toolchain's own");
        return Ok(own);
    }
    let unpacked = toolchain.join(format!("core-{}", rustc.release));
    let library = unpacked.join(format!("usr/src/rustc-{}/library", rustc.release));
    if complete(&library) {
        step.note("Debian's, there already");
        return Ok(library);
    }
    if way == CoreSources::Auto && add_component(step, &own) {
        step.note("added by rustup");
        return Ok(own);
    }
    download(step, rustc, toolchain, &unpacked)?;
    if !complete(&library) {
        bail!("unpack core's sources: the package holds no {}", library.display());
    }
    step.note("Debian's package");
    Ok(library)
}

/// `-Z build-std` first reads the lock file.
fn complete(library: &Path) -> bool {
    library.join("Cargo.lock").is_file()
}

fn add_component(step: &Step, own: &Path) -> bool {
    let Some(rustup) = find_program("rustup") else { return false };
    // The outer cargo's RUSTUP_TOOLCHAIN selects the toolchain. Few retries, because Debian's package is equal.
    let mut command = Command::new(rustup);
    command.args(["component", "add", "rust-src"]).env("RUSTUP_MAX_RETRIES", "1");
    matches!(step.run_quietly(&mut command), Ok(Ok(()))) && complete(own)
}

fn download(step: &Step, rustc: &Rustc, toolchain: &Path, unpacked: &Path) -> Result<()> {
    let Some(package) = PACKAGES.iter().find(|package| package.release == rustc.release) else {
        bail!(
            "get core's sources for rustc {}: rustup could not add them, and no Debian package is pinned for this \
             release; run `rustup component add rust-src` where its servers can be reached, or use rustc {}",
            rustc.release,
            PACKAGES.iter().map(|package| package.release).collect::<Vec<_>>().join(" or ")
        );
    };
    let deb = toolchain.join(package.file);
    fetch(step, package, &deb)?;

    // Complete after the rename.
    let fresh = unpacked.with_extension("new");
    remove_directory(&fresh)?;
    fs::create_dir_all(&fresh).with_context(|| format!("create {}", fresh.display()))?;
    let pattern = format!("./usr/src/rustc-{}/library*", package.release);
    unpack(&deb, &fresh, &pattern)?;
    remove_directory(unpacked)?;
    fs::rename(&fresh, unpacked).with_context(|| format!("rename {} to {}", fresh.display(), unpacked.display()))?;
    fs::remove_file(&deb).with_context(|| format!("remove {}", deb.display()))
}

fn fetch(step: &Step, package: &Package, deb: &Path) -> Result<()> {
    if !Path::new(APT_HELPER).exists() {
        bail!(
            "get core's sources: rustup could not add them, and this machine has no {APT_HELPER} to fetch Debian's \
             package with; run `rustup component add rust-src` where rustup's servers can be reached"
        );
    }
    let mirrors = mirrors()?;
    let mut tried = Vec::new();
    for mirror in &mirrors {
        let address = format!("{}/{POOL}{}", mirror.trim_end_matches('/'), package.file);
        let mut command = Command::new(APT_HELPER);
        command.arg("download-file").arg(&address).arg(deb).arg(format!("SHA256:{}", package.sha256));
        match step.run_quietly(&mut command)? {
            Ok(()) => return Ok(()),
            Err(output) => tried.push(format!("{address}: {}", reason(&output))),
        }
    }
    let tried = if tried.is_empty() { "apt names no mirror".to_owned() } else { tried.join("; ") };
    bail!(
        "get core's sources: rustup could not add them, and no package mirror of this machine has Debian's \
         rust-src ({tried}); run `rustup component add rust-src` where rustup's servers can be reached, or add a \
         Debian mirror to apt's sources"
    )
}

pub(crate) fn reason(output: &[String]) -> String {
    output
        .iter()
        .rev()
        .find(|line| line.starts_with("E: Failed"))
        .or_else(|| output.last())
        .map_or_else(|| "no reason given".to_owned(), |line| line.trim_start_matches("E: ").to_owned())
}

/// Security mirrors last: they lack most packages.
pub(crate) fn mirrors() -> Result<Vec<String>> {
    // Empty before the first `apt-get update`.
    let mut mirrors = parse_targets(&ask(&["indextargets", "--format", "$(REPO_URI)"])?);
    if mirrors.is_empty() {
        mirrors = parse_plan(&ask(&["update", "--print-uris"])?);
    }
    mirrors.sort_by_key(|mirror| mirror.contains("security"));
    Ok(mirrors)
}

fn ask(arguments: &[&str]) -> Result<String> {
    let output = Command::new("apt-get")
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .context("ask apt for its mirrors: run apt-get")?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn parse_targets(output: &str) -> Vec<String> {
    unique(output.lines().map(str::trim))
}

/// `'http://mirror/debian/dists/bookworm/InRelease' file 0`.
fn parse_plan(output: &str) -> Vec<String> {
    unique(output.lines().filter_map(|line| line.strip_prefix('\'')?.split_once("/dists/")).map(|(mirror, _)| mirror))
}

fn unique<'a>(lines: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for line in lines.filter(|line| !line.is_empty()) {
        let line = format!("{}/", line.trim_end_matches('/'));
        if !found.contains(&line) {
            found.push(line);
        }
    }
    found
}

pub(crate) fn unpack(deb: &Path, into: &Path, pattern: &str) -> Result<()> {
    let mut source = Command::new("dpkg-deb")
        .arg("--fsys-tarfile")
        .arg(deb)
        .stdout(Stdio::piped())
        .spawn()
        .context("unpack a package: run dpkg-deb")?;
    let archive = source.stdout.take().context("unpack a package: dpkg-deb has no output")?;
    let extracted = Command::new("tar")
        .arg("-x")
        .arg("-C")
        .arg(into)
        .args(["--no-same-owner", "--wildcards", pattern])
        .stdin(archive)
        .output()
        .context("unpack a package: run tar");
    let read = source.wait().context("unpack a package: wait for dpkg-deb")?;
    let extracted = extracted?;
    if !read.success() || !extracted.status.success() {
        bail!(
            "unpack {} into {}: dpkg-deb {read}, tar {}: {}",
            deb.display(),
            into.display(),
            extracted.status,
            String::from_utf8_lossy(&extracted.stderr).trim()
        );
    }
    Ok(())
}

pub(crate) fn remove_directory(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error).with_context(|| format!("remove {}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mirrors_come_from_what_apt_says_each_once() {
        let targets = "http://m.example/debian/\nhttp://m.example/debian\n\nhttp://s.example/debian-security/\n";
        assert_eq!(parse_targets(targets), ["http://m.example/debian/", "http://s.example/debian-security/"]);
        let plan = "'http://m.example/debian/dists/bookworm/InRelease' m.example_debian_InRelease 0 \n\
                    'http://m.example/debian/dists/bookworm/main/binary-amd64/Packages.xz' x 0 \nnonsense\n";
        assert_eq!(parse_plan(plan), ["http://m.example/debian/"]);
        assert!(parse_plan("").is_empty());
    }

    #[test]
    fn the_reason_is_apts_own() {
        let output =
            ["Err:1 http://m", "  404  Not Found", "E: Failed to fetch http://m  404  Not Found", "E: Download Failed"];
        let output = output.map(str::to_owned);
        assert_eq!(reason(&output), "Failed to fetch http://m  404  Not Found");
        assert_eq!(reason(&[]), "no reason given");
    }

    #[test]
    fn pins_are_whole() {
        for package in PACKAGES {
            assert!(package.file.starts_with(&format!("rust-src_{}", package.release)));
            assert!(package.sha256.len() == 64 && package.sha256.bytes().all(|byte| byte.is_ascii_hexdigit()));
        }
    }
}
