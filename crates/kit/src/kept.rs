//! State files: their directories, bounded reads, atomic writes.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufWriter, Read as _, Write as _},
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use nix::{
    errno::Errno,
    unistd::{AccessFlags, eaccess},
};

/// Makes a directory that only its owner may change, for any umask.
///
/// # Errors
/// It cannot be made or written; says what to do.
pub fn make_directory(path: &Path) -> anyhow::Result<()> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o755).create(path);
    made.with_context(|| format!("make directory {}", path.display()))?;
    let denied = match eaccess(path, AccessFlags::W_OK | AccessFlags::X_OK) {
        Err(Errno::EROFS) => anyhow::bail!(
            "{}: write to directory {}; mount it writable, or choose another directory",
            Errno::EROFS.desc(),
            path.display()
        ),
        Err(denied @ Errno::EACCES) => denied,
        _ => return Ok(()),
    };
    let meta = fs::metadata(path).with_context(|| format!("look at directory {}", path.display()))?;
    let (shown, user) = (path.display(), nix::unistd::geteuid());
    anyhow::bail!(
        "{}: write to directory {shown}, which belongs to user {} (mode {:04o}): the agent runs without CAP_DAC_OVERRIDE; \
         `chown {user} {shown}`, or choose another directory",
        denied.desc(),
        meta.uid(),
        meta.mode() & 0o7777,
    )
}

/// `None` without a file.
///
/// # Errors
/// Unreadable, not regular, or longer than `most` bytes.
pub fn read(path: &Path, most: u64) -> io::Result<Option<Vec<u8>>> {
    let Some(file) = open(path, most)? else { return Ok(None) };
    let mut text = Vec::new();
    file.take(most + 1).read_to_end(&mut text)?;
    if text.len() as u64 > most {
        return Err(too_long(most));
    }
    Ok(Some(text))
}

/// Opens a file to read it in parts; `None` without a file.
///
/// # Errors
/// As [`read`].
pub fn open(path: &Path, most: u64) -> io::Result<Option<File>> {
    // A FIFO would block.
    let file = match OpenOptions::new().read(true).custom_flags(nix::libc::O_NONBLOCK).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::other("it is not a file"));
    }
    if metadata.len() > most { Err(too_long(most)) } else { Ok(Some(file)) }
}

fn too_long(most: u64) -> io::Error {
    io::Error::other(format!("it has more than {most} bytes"))
}

/// Renames a damaged file to `PATH.damaged`, replacing an earlier one; returns that path.
///
/// # Errors
/// The file system's.
pub fn set_aside(path: &Path) -> io::Result<PathBuf> {
    let aside = aside(path);
    fs::rename(path, &aside)?;
    wharf_crash::point("kept/after-set-aside");
    Ok(aside)
}

/// The path of [`set_aside`].
#[must_use]
pub fn aside(path: &Path) -> PathBuf {
    let mut aside = path.as_os_str().to_owned();
    aside.push(".damaged");
    aside.into()
}

/// As [`write_by`].
///
/// # Errors
/// The file system's; the old file remains.
pub fn write(path: &Path, text: &[u8]) -> io::Result<()> {
    write_by(path, |file| file.write_all(text))
}

/// Writes with mode 0600. A crash leaves the old or the new file. `content` writes it, in parts.
///
/// # Errors
/// The file system's, or of `content`; the old file remains.
pub fn write_by(path: &Path, content: impl FnOnce(&mut BufWriter<&File>) -> io::Result<()>) -> io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".new");
    let temporary = PathBuf::from(temporary);
    replace(path, &temporary, content).inspect_err(|_| {
        // A part of the content would keep a full disk full.
        drop(fs::remove_file(&temporary));
    })
}

fn replace(
    path: &Path,
    temporary: &Path,
    content: impl FnOnce(&mut BufWriter<&File>) -> io::Result<()>,
) -> io::Result<()> {
    let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(temporary)?;
    wharf_crash::point("kept/after-create");
    let mut writer = BufWriter::new(&file);
    content(&mut writer)?;
    writer.flush()?;
    wharf_crash::point("kept/after-write");
    file.sync_all()?;
    wharf_crash::point("kept/after-sync");
    fs::rename(temporary, path)?;
    wharf_crash::point("kept/after-rename");
    if let Some(directory) = path.parent() {
        File::open(directory)?.sync_all()?;
    }
    wharf_crash::point("kept/after-directory-sync");
    Ok(())
}
