//! Bounded reads and atomic writes of state files.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

/// `None` without a file.
///
/// # Errors
/// Unreadable, not regular, or longer than `most` bytes.
pub fn read(path: &Path, most: u64) -> io::Result<Option<Vec<u8>>> {
    // A FIFO would block.
    let file = match OpenOptions::new().read(true).custom_flags(nix::libc::O_NONBLOCK).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is not a file"));
    }
    let mut text = Vec::new();
    file.take(most + 1).read_to_end(&mut text)?;
    if text.len() as u64 > most {
        return Err(io::Error::other(format!("it has more than {most} bytes")));
    }
    Ok(Some(text))
}

/// Writes with mode 0600. A crash leaves the old or the new file.
///
/// # Errors
/// The file system's; the old file remains.
pub fn write(path: &Path, text: &[u8]) -> io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".new");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
    wharf_crash::point("kept/after-create");
    file.write_all(text)?;
    wharf_crash::point("kept/after-write");
    file.sync_all()?;
    wharf_crash::point("kept/after-sync");
    fs::rename(&temporary, path)?;
    wharf_crash::point("kept/after-rename");
    if let Some(directory) = path.parent() {
        File::open(directory)?.sync_all()?;
    }
    wharf_crash::point("kept/after-directory-sync");
    Ok(())
}
