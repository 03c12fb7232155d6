//! `dist`: packs the static programs and the files of `install`, reproducibly for the same files and time.

mod deb;
mod image;
pub(crate) mod oci;
mod sbom;
pub(crate) mod tree;

use std::{
    ffi::OsStr,
    fs, io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

use crate::{
    args::{DistArgs, InstallArgs, Layout},
    book, build,
    install::share,
    launch,
    pieces::{self, Item, Sources},
    privilege::Privilege,
    progress::{Progress, Step, describe},
    rustc::Rustc,
    workspace::{Workspace, write_if_changed},
};

const VERSION: &str = env!("CARGO_PKG_VERSION");

struct Release<'a> {
    workspace: &'a Workspace,
    sources: Sources,
    /// As in `x86_64`.
    machine: String,
    /// As in `amd64` (Debian, OCI).
    architecture: &'static str,
    /// Mtime of all files, Unix seconds.
    epoch: u64,
    out: PathBuf,
    work: PathBuf,
}

pub(crate) fn dist(workspace: &Workspace, privilege: &Privilege, verbose: bool, arguments: &DistArgs) -> Result<()> {
    if !arguments.prebuilt {
        launch::build(workspace, privilege, verbose)?;
    }
    let sources = Sources::of(workspace, workspace.release());
    build::must_be_there(&sources.programs)?;
    for name in build::PRODUCT {
        must_be_static(&sources.programs.join(name))?;
    }
    let out = Progress::new(1, verbose, privilege).step("Packages", |step| make(step, workspace, sources))?;
    let mut files = tree::files(&out)?;
    files.sort();
    for file in files {
        let bytes = fs::metadata(&file).with_context(|| format!("look at {}", file.display()))?.len();
        println!("{:>8}  {}", size(bytes), file.strip_prefix(workspace.root()).unwrap_or(&file).display());
    }
    Ok(())
}

pub(crate) fn make(step: &Step, workspace: &Workspace, sources: Sources) -> Result<PathBuf> {
    pieces::generate(&sources)?;
    let book = book::build(step, workspace)?;
    let (out, work) = (workspace.target().join("dist"), workspace.target().join("dist.work"));
    let release = Release::begin(step, workspace, sources, out, work)?;
    deb::make(&release, &book)?;
    release.tarball(&book)?;
    image::make(&release)?;
    release.manifest()?;
    sbom::make(&release)?;
    release.checksums()?;
    release.end()
}

/// Files for a cluster; replaces `directory`.
pub(crate) fn for_cluster(step: &Step, workspace: &Workspace, directory: &Path) -> Result<ForCluster> {
    let sources = Sources::of(workspace, workspace.release());
    for name in build::PRODUCT {
        must_be_static(&sources.programs.join(name))?;
    }
    let (out, work) = (directory.to_owned(), directory.with_extension("work"));
    let release = Release::begin(step, workspace, sources, out, work)?;
    let files = ForCluster {
        image: image::make(&release)?,
        manifest: release.manifest()?,
        architecture: release.architecture,
        epoch: release.epoch,
    };
    release.end()?;
    Ok(files)
}

#[derive(Debug)]
pub(crate) struct ForCluster {
    /// An OCI archive.
    pub(crate) image: PathBuf,
    pub(crate) manifest: PathBuf,
    pub(crate) architecture: &'static str,
    pub(crate) epoch: u64,
}

impl<'a> Release<'a> {
    /// Empties the directories.
    fn begin(step: &Step, workspace: &'a Workspace, sources: Sources, out: PathBuf, work: PathBuf) -> Result<Self> {
        let host = Rustc::detect()?.host;
        let machine = host.split('-').next().unwrap_or_default().to_owned();
        let architecture = match machine.as_str() {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => bail!("make packages for {other}: only x86_64 and aarch64 have names in them"),
        };
        for directory in [&out, &work] {
            match fs::remove_dir_all(directory) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    return Err(e).with_context(|| format!("remove {}", directory.display()));
                }
                _ => fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?,
            }
        }
        let epoch = epoch(step, workspace)?;
        Ok(Self { workspace, sources, machine, architecture, epoch, out, work })
    }

    fn end(self) -> Result<PathBuf> {
        fs::remove_dir_all(&self.work).with_context(|| format!("remove {}", self.work.display()))?;
        Ok(self.out)
    }
}

impl Release<'_> {
    /// Without files for `uninstall`.
    fn items(&self, prefix: &str, cni_bin_dir: &str, unit_dir: &str) -> Result<Vec<Item>> {
        let prefix = PathBuf::from(prefix);
        let own = share(&prefix);
        let arguments = InstallArgs {
            layout: Layout { root: None, prefix },
            cni_bin_dir: cni_bin_dir.into(),
            cni_conf_dir: "/etc/cni/net.d".into(),
            unit_dir: unit_dir.into(),
            now: false,
            prebuilt: true,
            dry_run: false,
        };
        let mut items = pieces::plan(&self.sources, &arguments)?;
        items.retain(|item| !item.path.starts_with(&own));
        Ok(items)
    }

    fn filled(&self, file: &str, more: &[(&str, &str)]) -> Result<String> {
        let path = self.workspace.root().join("dist").join(file);
        let mut text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        let all = [("version", VERSION), ("architecture", self.architecture)];
        for (name, value) in all.iter().chain(more) {
            text = text.replace(&format!("@{name}@"), value);
        }
        Ok(text)
    }

    fn tarball(&self, book: &Path) -> Result<()> {
        let name = format!("wharf-{VERSION}-{}-linux", self.machine);
        let root = self.work.join(&name);
        tree::put(&root, &self.items("/usr/local", "/opt/cni/bin", "/usr/local/lib/systemd/system")?)?;
        tree::add(&root, "usr/local/share/doc/wharf/LICENSE", &self.licence()?, 0o644)?;
        tree::copy(book, &root.join("usr/local/share/doc/wharf/html"))?;
        let tar = self.work.join("tarball.tar");
        tree::tar_of_files(self.epoch, &self.work, &name, &tar)?;
        tree::gzip(&tar, &self.out.join(format!("{name}.tar.gz")))
    }

    fn licence(&self) -> Result<Vec<u8>> {
        let path = self.workspace.root().join("LICENSE");
        fs::read(&path).with_context(|| format!("read {}", path.display()))
    }

    fn manifest(&self) -> Result<PathBuf> {
        // Also used by `wharf-kube`'s tests.
        let path = self.workspace.root().join("kube/rbac.yaml");
        let rbac = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        let text = self.filled("kubernetes/wharf.yaml", &[("rbac", rbac.trim_end()), ("feed", image::FEED)])?;
        let manifest = self.out.join(format!("wharf-{VERSION}.yaml"));
        write_if_changed(&manifest, text.as_bytes())?;
        Ok(manifest)
    }

    fn checksums(&self) -> Result<()> {
        let mut names = tree::names(&self.out)?;
        names.sort();
        let sums = output(Command::new("sha256sum").current_dir(&self.out).arg("--").args(names))?;
        write_if_changed(&self.out.join("SHA256SUMS"), &sums).map(drop)
    }
}

/// SOURCE_DATE_EPOCH, or the commit's time.
fn epoch(step: &Step, workspace: &Workspace) -> Result<u64> {
    if let Some(given) = std::env::var_os("SOURCE_DATE_EPOCH") {
        let number = given.to_str().and_then(|text| text.parse().ok());
        return number.with_context(|| format!("read SOURCE_DATE_EPOCH: {given:?} is no number of seconds"));
    }
    let git = |arguments: &[&str]| output(Command::new("git").current_dir(workspace.root()).args(arguments));
    let hint = "outside of a git checkout, set SOURCE_DATE_EPOCH to the release's time in seconds";
    let time = git(&["log", "-1", "--format=%ct"]).context(hint)?;
    if !git(&["status", "--porcelain"])?.is_empty() {
        step.note("of a tree with changes that are not committed");
    }
    String::from_utf8_lossy(&time).trim().parse().context("read the commit's time")
}

fn output(command: &mut Command) -> Result<Vec<u8>> {
    let tool = describe(command);
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("run `{tool}`"))?;
    if !output.status.success() {
        bail!("`{tool}` failed ({}): {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(output.stdout)
}

/// Other distributions may lack the dynamic linker; the image does.
fn must_be_static(program: &Path) -> Result<()> {
    let bytes = fs::read(program).with_context(|| format!("read {}", program.display()))?;
    match interpreted(&bytes) {
        Some(false) => Ok(()),
        Some(true) => bail!(
            "pack {}: it is linked dynamically; install the C library for static linking (Debian: libc6-dev), then build again",
            program.display()
        ),
        None => bail!("pack {}: it is no 64-bit ELF program of this machine", program.display()),
    }
}

/// Whether a 64-bit little-endian ELF file has a PT_INTERP header; `None` for other files.
fn interpreted(elf: &[u8]) -> Option<bool> {
    const PT_INTERP: [u8; 4] = [3, 0, 0, 0];
    if !elf.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let small = |at: usize| Some(usize::from(u16::from_le_bytes(elf.get(at..at + 2)?.try_into().ok()?)));
    let table = usize::try_from(u64::from_le_bytes(elf.get(32..40)?.try_into().ok()?)).ok()?;
    let (entry, count) = (small(54)?, small(56)?);
    let headers = elf.get(table..table.checked_add(entry.checked_mul(count)?)?)?;
    Some(entry > 0 && headers.chunks(entry).any(|header| header.starts_with(&PT_INTERP)))
}

fn size(bytes: u64) -> String {
    match bytes {
        0..1_048_576 => format!("{} KiB", bytes.div_ceil(1024)),
        _ => format!("{}.{} MiB", bytes / 1_048_576, bytes % 1_048_576 * 10 / 1_048_576),
    }
}

fn name_of(path: &Path) -> Result<String> {
    let name = path.file_name().and_then(OsStr::to_str).map(str::to_owned);
    name.with_context(|| format!("pack {}: its name is not text", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_rounded_for_people() {
        assert_eq!([size(1), size(2048), size(1_048_576), size(11_900_000)], ["1 KiB", "2 KiB", "1.0 MiB", "11.3 MiB"]);
    }

    #[test]
    fn a_program_that_needs_a_dynamic_linker_is_told_from_one_that_does_not() -> Result<()> {
        let mut elf = vec![0; 64 + 2 * 56];
        elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
        (elf[32], elf[54], elf[56], elf[64]) = (64, 56, 2, 1);
        assert_eq!(interpreted(&elf), Some(false));
        elf[64 + 56] = 3;
        assert_eq!(interpreted(&elf), Some(true));
        assert_eq!(interpreted(&elf[..100]), None, "cut short");
        assert_eq!(interpreted(b"#!/bin/sh\n"), None);
        Ok(())
    }
}
