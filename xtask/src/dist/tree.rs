//! File trees and reproducible archives.

use std::{
    fs::{self, File},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

use super::{name_of, output};
use crate::{
    manifest::below,
    pieces::{self, Item},
};

pub(super) fn put(root: &Path, items: &[Item]) -> Result<()> {
    for item in items {
        let bytes = item.bytes.as_deref().with_context(|| format!("pack {}: it is not built", item.path.display()))?;
        pieces::put(&below(Some(root), &item.path), bytes, item.mode)?;
    }
    Ok(())
}

pub(crate) fn add(root: &Path, path: &str, bytes: &[u8], mode: u32) -> Result<()> {
    pieces::put(&root.join(path), bytes, mode)
}

pub(crate) fn link(root: &Path, path: &str, target: &str) -> Result<()> {
    let place = root.join(path);
    let folder = place.parent().with_context(|| format!("link {path}: it has no directory"))?;
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    std::os::unix::fs::symlink(target, &place).with_context(|| format!("link {}", place.display()))
}

pub(super) fn copy(from: &Path, to: &Path) -> Result<()> {
    for file in files(from)? {
        let bytes = fs::read(&file).with_context(|| format!("read {}", file.display()))?;
        pieces::put(&to.join(file.strip_prefix(from)?), &bytes, 0o644)?;
    }
    Ok(())
}

pub(super) fn names(directory: &Path) -> Result<Vec<String>> {
    let listed = fs::read_dir(directory).with_context(|| format!("list {}", directory.display()))?;
    listed.map(|entry| name_of(&entry.with_context(|| format!("list {}", directory.display()))?.path())).collect()
}

/// Links are neither followed nor listed.
pub(super) fn files(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for name in names(directory)? {
        let path = directory.join(name);
        let kind = fs::symlink_metadata(&path).with_context(|| format!("look at {}", path.display()))?.file_type();
        if kind.is_dir() {
            found.extend(files(&path)?);
        } else if kind.is_file() {
            found.push(path);
        }
    }
    Ok(found)
}

/// Ignores the umask.
pub(super) fn settle(directory: &Path) -> Result<()> {
    let failed = || format!("set the mode of {}", directory.display());
    fs::set_permissions(directory, fs::Permissions::from_mode(0o755)).with_context(failed)?;
    for name in names(directory)? {
        let path = directory.join(name);
        if fs::symlink_metadata(&path).with_context(failed)?.is_dir() {
            settle(&path)?;
        }
    }
    Ok(())
}

/// Sorted, owned by root, with one mtime.
pub(crate) fn tar(epoch: u64, directory: &Path, what: &str, archive: &Path) -> Result<()> {
    settle(&directory.join(what))?;
    write_tar(epoch, directory, &[what.into()], archive)
}

/// Omits directories: unpacking on a node must not change modes or owners, nor replace links.
pub(super) fn tar_of_files(epoch: u64, directory: &Path, what: &str, archive: &Path) -> Result<()> {
    let found = files(&directory.join(what))?.into_iter();
    let mut inside: Vec<PathBuf> =
        found.map(|file| Ok(file.strip_prefix(directory)?.to_owned())).collect::<Result<_>>()?;
    inside.sort();
    write_tar(epoch, directory, &inside, archive)
}

fn write_tar(epoch: u64, directory: &Path, what: &[PathBuf], archive: &Path) -> Result<()> {
    let mut command = Command::new("tar");
    command.args(["--create", "--format=ustar", "--sort=name", "--owner=0", "--group=0", "--numeric-owner"]);
    command.arg(format!("--mtime=@{epoch}")).arg("--file").arg(archive).arg("--directory").arg(directory).args(what);
    output(&mut command).map(drop)
}

pub(crate) fn gzip(from: &Path, to: &Path) -> Result<()> {
    let input = File::open(from).with_context(|| format!("open {}", from.display()))?;
    let file = File::create(to).with_context(|| format!("create {}", to.display()))?;
    let mut command = Command::new("gzip");
    command.args(["--no-name", "--stdout"]).stdin(input).stdout(file).stderr(Stdio::inherit());
    let status = command.status().context("run gzip")?;
    if !status.success() {
        bail!("compress {}: gzip failed ({status})", from.display());
    }
    Ok(())
}

pub(crate) fn sha256(path: &Path) -> Result<String> {
    let said = output(Command::new("sha256sum").arg("--").arg(path))?;
    let said = String::from_utf8_lossy(&said);
    let sum = said.trim_start_matches('\\').split(' ').next().unwrap_or_default();
    if sum.len() != 64 {
        bail!("hash {}: sha256sum said `{}`", path.display(), said.trim());
    }
    Ok(sum.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_depends_on_its_files_and_the_time_alone() -> Result<()> {
        let root = tempfile::tempdir()?;
        let make = |name: &str, order: [&str; 2], mode| -> Result<Vec<u8>> {
            let tree = root.path().join(name).join("tree");
            for file in order {
                add(&tree, file, file.as_bytes(), 0o644)?;
            }
            link(&tree, "link", "bin/a")?;
            fs::set_permissions(tree.join("bin"), fs::Permissions::from_mode(mode))?;
            let (archive, packed) = (root.path().join(name).join("a.tar"), root.path().join(name).join("a.tar.gz"));
            tar(1_000_000_000, &root.path().join(name), "tree", &archive)?;
            gzip(&archive, &packed)?;
            assert_eq!(sha256(&packed)?.len(), 64);
            Ok(fs::read(packed)?)
        };
        let first = make("one", ["bin/a", "etc/b"], 0o700)?;
        assert_eq!(first, make("two", ["etc/b", "bin/a"], 0o775)?);
        assert_ne!(first, make("three", ["etc/b", "bin/c"], 0o775)?);
        assert_eq!(names(&root.path().join("one/tree"))?.len(), 3);
        assert_eq!(files(&root.path().join("one/tree"))?.len(), 2, "links are no files");
        Ok(())
    }
}
