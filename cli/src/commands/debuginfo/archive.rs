//! A .tar.gz archive, written atomically.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use flate2::{Compression, GzBuilder, write::GzEncoder};
use tar::{Builder, EntryType, Header};

use crate::error::CliError;

pub(super) const ROOT: &str = "wharf-debuginfo";

/// Temporary file until [`Self::finish`].
pub(super) struct Archive {
    builder: Option<Builder<GzEncoder<File>>>,
    temporary: PathBuf,
    place: PathBuf,
    time_s: u64,
    files: usize,
}

impl Archive {
    /// `time_s`: mtime of every file, seconds since the Unix epoch.
    pub(super) fn create(place: &Path, time_s: u64) -> io::Result<Self> {
        if place.is_dir() {
            return Err(io::Error::from(io::ErrorKind::IsADirectory));
        }
        let Some(name) = place.file_name() else { return Err(io::Error::from(io::ErrorKind::InvalidInput)) };
        let mut temporary = std::ffi::OsString::from(".");
        temporary.push(name);
        temporary.push(format!(".{}", std::process::id()));
        let temporary = place.with_file_name(temporary);
        // Unreadable for other users; does not follow symbolic links.
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        let gz = GzBuilder::new().mtime(0).write(file, Compression::default());
        Ok(Self { builder: Some(Builder::new(gz)), temporary, place: place.to_owned(), time_s, files: 0 })
    }

    /// `name` must be trusted and relative.
    pub(super) fn add(&mut self, name: &str, content: &[u8]) -> Result<(), CliError> {
        let failed = |e: io::Error| CliError::refused(format!("write {}: {e}", self.place.display()));
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::Regular);
        header.set_mode(0o600);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(self.time_s);
        header.set_size(content.len() as u64);
        let Some(builder) = &mut self.builder else { return Ok(()) };
        builder.append_data(&mut header, format!("{ROOT}/{name}"), content).map_err(failed)?;
        self.files += 1;
        Ok(())
    }

    /// Renames the archive into place. Returns its bytes and number of files.
    pub(super) fn finish(mut self) -> io::Result<(u64, usize)> {
        let Some(builder) = self.builder.take() else { return Err(io::Error::from(io::ErrorKind::InvalidInput)) };
        let mut file = builder.into_inner()?.finish()?;
        file.flush()?;
        file.sync_all()?;
        let bytes = file.metadata()?.len();
        std::fs::rename(&self.temporary, &self.place)?;
        Ok((bytes, self.files))
    }
}

impl Drop for Archive {
    fn drop(&mut self) {
        // Removes an incomplete archive; fails after the rename.
        let _ = std::fs::remove_file(&self.temporary);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn the_same_parts_make_the_same_bytes() -> Result<(), Box<dyn std::error::Error>> {
        let directory = tempfile::tempdir()?;
        let mut made = Vec::new();
        for name in ["a.tar.gz", "b.tar.gz"] {
            let place = directory.path().join(name);
            let mut archive = Archive::create(&place, 1_790_856_000)?;
            archive.add("x.json", b"{}").map_err(|e| e.to_string())?;
            archive.add("y/z.txt", b"z").map_err(|e| e.to_string())?;
            let (bytes, files) = archive.finish()?;
            assert_eq!((bytes, files), (std::fs::metadata(&place)?.len(), 2));
            assert_eq!(std::fs::metadata(&place)?.permissions().mode() & 0o777, 0o600);
            made.push(std::fs::read(&place)?);
        }
        assert_eq!(made[0], made[1]);
        assert_eq!(std::fs::read_dir(directory.path())?.count(), 2, "nothing temporary is left");
        Ok(())
    }

    #[test]
    fn one_that_is_given_up_leaves_nothing() -> Result<(), Box<dyn std::error::Error>> {
        let directory = tempfile::tempdir()?;
        let place = directory.path().join("a.tar.gz");
        std::fs::write(&place, b"the one before")?;
        drop(Archive::create(&place, 0)?);
        assert_eq!(std::fs::read(&place)?, b"the one before");
        assert_eq!(std::fs::read_dir(directory.path())?.count(), 1);
        assert!(Archive::create(directory.path(), 0).is_err(), "a directory is no archive");
        assert!(Archive::create(&directory.path().join("none/a"), 0).is_err());
        Ok(())
    }
}
