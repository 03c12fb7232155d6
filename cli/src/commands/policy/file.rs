//! Reads the operator's files within size limits.

use std::{
    ffi::OsStr,
    fmt,
    fs::{self, Metadata, OpenOptions},
    io::{self, Read},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use wharf_policy::read::MAX_TEXT;

const MAX_FILES: usize = 10_000;
const ENDINGS: [&str; 3] = ["yaml", "yml", "json"];

/// A refusal with place, cause and remedy.
#[derive(Debug, thiserror::Error)]
#[error("{file}: {reason}; {remedy}")]
pub(super) struct Unusable {
    /// May include the line.
    file: String,
    reason: String,
    remedy: &'static str,
}

impl Unusable {
    fn new(file: impl fmt::Display, reason: impl Into<String>, remedy: &'static str) -> Self {
        Self { file: file.to_string(), reason: reason.into(), remedy }
    }

    fn io(path: &Path, error: &io::Error) -> Self {
        Self::new(name(path), format!("cannot be read: {error}"), "check the path and its permissions")
    }
}

pub(super) fn is_standard_input(path: &Path) -> bool {
    path == Path::new("-")
}

pub(super) fn name(path: &Path) -> String {
    if is_standard_input(path) { "standard input".to_owned() } else { path.display().to_string() }
}

/// Visible files of a directory with extensions in `ENDINGS`, sorted, 1 to 10,000. Returns other paths unchanged.
pub(super) fn expand(path: &Path) -> Result<Vec<PathBuf>, Unusable> {
    // Missing paths fail later, when read.
    if is_standard_input(path) || !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(path).map_err(|error| Unusable::io(path, &error))? {
        let file = entry.map_err(|error| Unusable::io(path, &error))?.path();
        let is_hidden = file.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        let ending = file.extension().and_then(OsStr::to_str);
        if is_hidden || !ending.is_some_and(|ending| ENDINGS.contains(&ending)) {
            continue;
        }
        if files.len() == MAX_FILES {
            let reason = format!("the directory has more than {MAX_FILES} files with policies");
            return Err(Unusable::new(name(path), reason, "split the directory"));
        }
        files.push(file);
    }
    if files.is_empty() {
        let remedy = "name files, or a directory that has some";
        return Err(Unusable::new(name(path), "the directory has no *.yaml, *.yml or *.json", remedy));
    }
    files.sort();
    Ok(files)
}

/// Fails unless the file is regular, at most 4 MiB, and UTF-8.
pub(super) fn text(path: &Path) -> Result<String, Unusable> {
    let bytes = if is_standard_input(path) {
        bounded(path, io::stdin().lock())
    } else {
        // Opening devices may have side effects. If the path changes before the open, `O_NONBLOCK` avoids waiting for a
        // FIFO or /proc file.
        fs::metadata(path).map_err(|error| Unusable::io(path, &error)).and_then(|found| regular(path, &found))?;
        let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
        let file = opened.map_err(|error| Unusable::io(path, &error))?;
        file.metadata().map_err(|error| Unusable::io(path, &error)).and_then(|found| regular(path, &found))?;
        bounded(path, file)
    }?;
    String::from_utf8(bytes).map_err(|error| {
        let valid = error.as_bytes().iter().take(error.utf8_error().valid_up_to());
        let line = 1 + valid.filter(|byte| **byte == b'\n').count();
        Unusable::new(format_args!("{}:{line}", name(path)), "is not UTF-8", "save the file as UTF-8")
    })
}

fn regular(path: &Path, found: &Metadata) -> Result<(), Unusable> {
    if found.is_file() {
        return Ok(());
    }
    Err(if found.is_dir() {
        let remedy = "name it on the command line: directories in a directory are not read";
        Unusable::new(name(path), "is a directory", remedy)
    } else {
        Unusable::new(name(path), "is a FIFO, a socket or a device", "name a file, or write `-` and pipe the text in")
    })
}

/// Reads one byte beyond the limit to detect oversized input.
fn bounded(path: &Path, from: impl Read) -> Result<Vec<u8>, Unusable> {
    let mut bytes = Vec::new();
    let bound = u64::try_from(MAX_TEXT).unwrap_or(u64::MAX).saturating_add(1);
    from.take(bound).read_to_end(&mut bytes).map_err(|error| Unusable::io(path, &error))?;
    if bytes.len() > MAX_TEXT {
        return Err(Unusable::new(name(path), format!("has more than {MAX_TEXT} bytes"), "split the file"));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_without_end_is_read_to_its_bound() {
        let path = Path::new("f");
        let refused = bounded(path, io::repeat(b' ')).map(|bytes| bytes.len()).map_err(|error| error.to_string());
        assert_eq!(refused, Err("f: has more than 4194304 bytes; split the file".to_owned()));
        let longest = bounded(path, io::repeat(b' ').take(MAX_TEXT.try_into().unwrap()));
        assert_eq!(longest.map(|bytes| bytes.len()).map_err(|error| error.to_string()), Ok(MAX_TEXT));
    }

    #[test]
    fn a_directory_is_its_files_by_name() {
        let directory = tempfile::tempdir().unwrap();
        for name in ["b.yaml", "a.json", "c.yml", "d.txt", ".e.yaml", "yaml", "f.yaml~"] {
            fs::write(directory.path().join(name), "").unwrap();
        }
        fs::create_dir(directory.path().join("sub")).unwrap();
        fs::write(directory.path().join("sub/g.yaml"), "").unwrap();
        let files = expand(directory.path()).unwrap();
        let names: Vec<_> = files.iter().map(|file| file.strip_prefix(directory.path()).unwrap()).collect();
        assert_eq!(names, [Path::new("a.json"), Path::new("b.yaml"), Path::new("c.yml")]);
    }
}
