//! The Debian package: files of `install` below `/usr`, scripts of `dist/debian`.

use std::{fs, os::unix::fs::MetadataExt, path::Path, process::Command};

use anyhow::{Context, Result};

use super::{Release, VERSION, output, tree};
use crate::{
    install::{ENVOY, GROUP, UNIT},
    manifest::Kind,
};

const SCRIPTS: [&str; 4] = ["preinst", "postinst", "prerm", "postrm"];

pub(super) fn make(release: &Release<'_>, book: &Path) -> Result<()> {
    let root = release.work.join("deb");
    let items = release.items("/usr", "/usr/lib/cni", "/usr/lib/systemd/system")?;
    tree::put(&root, &items)?;
    changelog(release, &root)?;
    compress(&root)?;
    let document = |name: &str| format!("usr/share/doc/wharf/{name}");
    tree::add(&root, &document("copyright"), release.filled("debian/copyright", &[])?.as_bytes(), 0o644)?;
    tree::copy(book, &root.join(document("html")))?;
    let overrides = release.filled("debian/lintian-overrides", &[])?;
    tree::add(&root, "usr/share/lintian/overrides/wharf", overrides.as_bytes(), 0o644)?;

    let mut sums = Vec::new();
    let (mut kibibytes, mut files) = (0, tree::files(&root)?);
    files.sort();
    for file in &files {
        let path = file.strip_prefix(&root).unwrap_or(file);
        kibibytes += fs::metadata(file).with_context(|| format!("look at {}", file.display()))?.size().div_ceil(1024);
        sums.extend(output(Command::new("md5sum").current_dir(&root).arg("--").arg(path))?);
    }
    let configuration = items.iter().filter(|item| item.kind == Kind::Config);
    let configuration: String = configuration.map(|item| format!("{}\n", item.path.display())).collect();
    let control = release.filled("debian/control", &[("size", &kibibytes.to_string())])?;
    tree::add(&root, "DEBIAN/control", control.as_bytes(), 0o644)?;
    tree::add(&root, "DEBIAN/conffiles", configuration.as_bytes(), 0o644)?;
    tree::add(&root, "DEBIAN/md5sums", &sums, 0o644)?;
    for script in SCRIPTS {
        let names = [("group", GROUP), ("envoy", ENVOY), ("unit", UNIT)];
        let text = release.filled(&format!("debian/{script}"), &names)?;
        tree::add(&root, &format!("DEBIAN/{script}"), text.as_bytes(), 0o755)?;
    }
    tree::settle(&root)?;
    let package = release.out.join(format!("wharf_{VERSION}_{}.deb", release.architecture));
    let mut command = Command::new("dpkg-deb");
    command.env("SOURCE_DATE_EPOCH", release.epoch.to_string());
    // xz's output depends on it.
    command.env("DPKG_DEB_THREADS_MAX", "1");
    command.args(["--root-owner-group", "-Zxz", "-z2", "--build"]).arg(&root).arg(&package);
    output(&mut command).context("is dpkg installed?").map(drop)
}

/// Debian policy requires `gzip -9`.
fn compress(root: &Path) -> Result<()> {
    let mut files = tree::files(&root.join("usr/share/man"))?;
    files.push(root.join("usr/share/doc/wharf/changelog"));
    output(Command::new("gzip").args(["--no-name", "--best", "--"]).args(files)).map(drop)
}

fn changelog(release: &Release<'_>, root: &Path) -> Result<()> {
    let time =
        output(Command::new("date").env("LC_ALL", "C").args(["-u", "-R", "-d"]).arg(format!("@{}", release.epoch)))?;
    let text = format!(
        "wharf ({VERSION}) unstable; urgency=medium\n\n  * CHANGELOG.md of the sources has the changes.\n\n -- Wharf <wharf@wharf.invalid>  {}\n",
        String::from_utf8_lossy(&time).trim()
    );
    tree::add(root, "usr/share/doc/wharf/changelog", text.as_bytes(), 0o644)
}
