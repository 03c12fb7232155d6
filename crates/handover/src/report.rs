//! Reports: outcomes of CNI commands that the agent did not answer, one file each in `<run-dir>/reports`.
//!
//! A shim [puts](Reports::put) a report of what the agent cannot know: no answer, a bad configuration, an unwritable
//! result, CHECK's verdict. The agent [takes](Reports::take) and counts reports. Only the agent creates the directory;
//! without it no report is written.
//!
//! Best effort, not synced. At [`MAX_REPORTS`], a new report evicts the oldest and carries the evicted count, which a
//! killed writer loses. No lock: the process that removes a file counts it, as taken or dropped; each concurrent writer
//! may exceed the bound by one. Files are untrusted until parsed.

use std::{
    ffi::OsString,
    fs::{self, DirBuilder, OpenOptions, Permissions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use crate::{
    command::Command,
    queue::{
        Unusable, is_older,
        record::{self, Found},
        token,
    },
};

/// In the run directory.
pub const DIRECTORY: &str = "reports";
/// Most waiting reports.
pub const MAX_REPORTS: usize = 512;
/// Longest message kept, bytes.
pub const MAX_MESSAGE_BYTES: usize = 1024;

/// Written version; no other is read. Unknown fields are ignored.
pub const VERSION: u32 = 1;
const TEMPORARY: &str = ".tmp-";
const MAX_LOOKED_AT: usize = 2 * MAX_REPORTS;
/// A concurrent listing may show removed files together with their replacements.
const MAX_EVICTED: u64 = 2;

/// Outcome for the runtime.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// The command succeeded.
    Success,
    /// Error or no answer.
    Failure,
    /// DEL that left a deletion record.
    Deferred,
}

impl Outcome {
    /// In metrics and logs.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Success => "success",
            Self::Failure => "failure",
            Self::Deferred => "deferred",
        }
    }
}

/// Outcome of a command.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Report {
    pub version: u32,
    pub command: Command,
    pub outcome: Outcome,
    /// DEL of a missing attachment.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub found_nothing: bool,
    /// CNI error code.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<u32>,
    /// CNI error message, [cut](Reports::put) to [`MAX_MESSAGE_BYTES`].
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// From start to answer, microseconds.
    pub duration_us: u64,
    pub ended_unix_ms: u64,
    /// Evicted for this report, with their counts.
    #[serde(default)]
    pub dropped: u64,
}

/// Parsed first, for [`Unusable::Version`].
#[derive(Deserialize)]
struct AnyVersion {
    version: u32,
}

impl Report {
    fn parse(bytes: &[u8]) -> Result<Self, Unusable> {
        let malformed = |e| Unusable::Json("it is not a report", e);
        let any: AnyVersion = serde_json::from_slice(bytes).map_err(malformed)?;
        if any.version != VERSION {
            return Err(Unusable::Version(any.version));
        }
        let report: Self = serde_json::from_slice(bytes).map_err(malformed)?;
        report.command.check()?;
        Ok(report)
    }
}

/// A report file.
#[derive(Debug, PartialEq)]
pub struct Entry {
    /// File name.
    pub name: OsString,
    /// Report, or its defect.
    pub content: Result<Report, Unusable>,
}

/// A run directory's reports.
#[derive(Debug, Clone)]
pub struct Reports {
    path: PathBuf,
}

impl Reports {
    /// Without file access.
    #[must_use]
    pub fn new(run_dir: &Path) -> Self {
        Self { path: run_dir.join(DIRECTORY) }
    }

    /// In the directory of the agent's socket.
    #[must_use]
    pub fn of_socket(socket: &Path) -> Self {
        Self::new(socket.parent().unwrap_or(Path::new("/")))
    }

    /// Directory of the reports.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Creates the directory (0700). Only the agent calls this.
    ///
    /// # Errors
    /// A file system error, or the path is not a directory.
    pub fn ensure_directory(&self) -> io::Result<()> {
        match DirBuilder::new().mode(0o700).create(&self.path) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            made => made?,
        }
        if !fs::symlink_metadata(&self.path)?.is_dir() {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        fs::set_permissions(&self.path, Permissions::from_mode(0o700))
    }

    /// Writes a report; evicts the oldest at the bound.
    ///
    /// # Errors
    /// No agent has run (no directory), or a file system error.
    pub fn put(&self, report: &Report) -> io::Result<()> {
        let names = self.names()?;
        let mut report = report.clone();
        report.message.truncate(report.message.floor_char_boundary(MAX_MESSAGE_BYTES));
        let excess = names.len().saturating_sub(MAX_REPORTS - 1);
        let mut evicted = 0;
        for oldest in names.iter().take(excess) {
            if evicted == MAX_EVICTED {
                break;
            }
            let path = self.path.join(oldest);
            let before = match record::read(&path, Report::parse) {
                Found::Record(oldest) => oldest.dropped,
                Found::Nothing | Found::Unusable { .. } => 0,
            };
            if remove_any(&path)? {
                evicted += 1;
                report.dropped = report.dropped.saturating_add(before).saturating_add(1);
            }
        }
        let bytes = serde_json::to_vec(&report)?;
        let token = token();
        let temporary = self.path.join(format!("{TEMPORARY}{token}"));
        let written = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&temporary)
            .and_then(|mut file| file.write_all(&bytes))
            // Names sort by age.
            .and_then(|()| fs::rename(&temporary, self.path.join(format!("{:016}-{token}", report.ended_unix_ms))));
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        written
    }

    /// The files, oldest first; at most twice [`MAX_REPORTS`].
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn list(&self) -> io::Result<Vec<Entry>> {
        let mut entries = Vec::new();
        for name in self.names()? {
            let content = match record::read(&self.path.join(&name), Report::parse) {
                Found::Nothing => continue,
                Found::Unusable { why, .. } => Err(why),
                Found::Record(report) => Ok(report),
            };
            entries.push(Entry { name, content });
        }
        Ok(entries)
    }

    /// Removes a listed file; false if another process removed it first.
    ///
    /// # Errors
    /// A file system error.
    pub fn remove(&self, entry: &Entry) -> io::Result<bool> {
        remove_any(&self.path.join(&entry.name))
    }

    /// Lists and removes the reports; skips those another process removed.
    ///
    /// # Errors
    /// The directory cannot be read, or the first file cannot be removed. A later failure ends the listing.
    pub fn take(&self) -> io::Result<Vec<Entry>> {
        let mut taken = Vec::new();
        for entry in self.list()? {
            match self.remove(&entry) {
                Ok(true) => taken.push(entry),
                Ok(false) => {}
                Err(e) if taken.is_empty() => return Err(e),
                Err(_) => break,
            }
        }
        Ok(taken)
    }

    /// Removes temporary files older than `older_than`.
    ///
    /// # Errors
    /// The directory cannot be read, or a file cannot be removed; the others are still tried.
    pub fn sweep(&self, older_than: Duration) -> io::Result<()> {
        let mut outcome = Ok(());
        for item in fs::read_dir(&self.path)?.take(MAX_LOOKED_AT) {
            let path = match item {
                Ok(item) => item.path(),
                // Reading the directory fails for its other entries too.
                Err(e) => return outcome.and(Err(e)),
            };
            let is_temporary = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(TEMPORARY));
            if is_temporary && is_older(&path, older_than) {
                outcome = outcome.and(remove_any(&path).map(drop));
            }
        }
        outcome
    }

    fn names(&self) -> io::Result<Vec<OsString>> {
        let mut names = Vec::new();
        for item in fs::read_dir(&self.path)?.take(MAX_LOOKED_AT) {
            let name = item?.file_name();
            if !name.to_string_lossy().starts_with(TEMPORARY) {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }
}

fn remove_any(path: &Path) -> io::Result<bool> {
    let removed = match fs::symlink_metadata(path) {
        Ok(there) if there.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(e) => Err(e),
    };
    match removed {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        removed => removed.map(|()| true),
    }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;
    use crate::command::Verb;

    fn report(at: u64) -> Report {
        let command = Command {
            id: at,
            verb: Verb::Del,
            network: "net".into(),
            container_id: format!("c{at}"),
            ifname: "eth0".into(),
            pod_name: String::new(),
            pod_namespace: String::new(),
            chained: false,
            runtime: String::new(),
        };
        let (outcome, message) = (Outcome::Failure, "because".into());
        Report {
            version: VERSION,
            command,
            outcome,
            found_nothing: false,
            code: Some(11),
            message,
            duration_us: 5,
            ended_unix_ms: at,
            dropped: 0,
        }
    }

    fn reports() -> (TempDir, Reports) {
        let dir = TempDir::new().unwrap();
        let reports = Reports::new(dir.path());
        reports.ensure_directory().unwrap();
        (dir, reports)
    }

    fn contents(reports: &Reports) -> Vec<Report> {
        reports.list().unwrap().into_iter().map(|entry| entry.content.unwrap()).collect()
    }

    #[test]
    fn reports_come_out_as_they_went_in_and_oldest_first() {
        let (_dir, reports) = reports();
        for at in [30, 10, 20] {
            reports.put(&report(at)).unwrap();
        }
        assert_eq!(contents(&reports), [report(10), report(20), report(30)]);
        for entry in reports.list().unwrap() {
            reports.remove(&entry).unwrap();
            reports.remove(&entry).unwrap();
        }
        assert_eq!(reports.list().unwrap(), []);
    }

    #[test]
    fn without_an_agents_directory_nothing_is_made() {
        let dir = TempDir::new().unwrap();
        let refused = Reports::new(dir.path()).put(&report(1)).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::NotFound);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn the_oldest_makes_place_and_no_loss_is_forgotten() {
        let (_dir, reports) = reports();
        let many = u64::try_from(MAX_REPORTS).unwrap();
        for at in 0..many + 3 {
            reports.put(&report(at)).unwrap();
        }
        let kept = contents(&reports);
        assert_eq!((kept.len(), kept[0].ended_unix_ms), (MAX_REPORTS, 3));
        assert_eq!(kept.iter().map(|r| r.dropped).sum::<u64>(), 3);
        for at in many + 3..2 * many + 4 {
            reports.put(&report(at)).unwrap();
        }
        assert_eq!(contents(&reports).iter().map(|r| r.dropped).sum::<u64>(), many + 4);
    }

    #[test]
    fn writers_and_a_reader_at_once_count_each_report_once() {
        let (_dir, reports) = reports();
        let (writers, many) = (8, u64::try_from(MAX_REPORTS).unwrap());
        let each = many / 4;
        let write_beside = |reader: fn(&Reports) -> Vec<Entry>| {
            std::thread::scope(|s| {
                let put = |writer| (0..each).for_each(|at| reports.put(&report(at * writers + writer)).unwrap());
                for writer in 0..writers {
                    s.spawn(move || put(writer));
                }
                reader(&reports)
            })
        };
        let count = |taken: &[Entry]| {
            let of = |entry: &Entry| 1 + entry.content.as_ref().unwrap().dropped;
            taken.iter().map(of).sum::<u64>()
        };
        let before = count(&write_beside(|reports| reports.take().unwrap()));
        assert_eq!(before + count(&reports.take().unwrap()), writers * each);
        // Without a reader, about the bound remains.
        write_beside(|_| Vec::new());
        let left = reports.take().unwrap();
        assert_eq!(count(&left), writers * each);
        assert!((many * 3 / 4..many + writers).contains(&u64::try_from(left.len()).unwrap()), "{}", left.len());
    }

    #[test]
    fn hostile_files_are_named_and_removed_and_hurt_nobody() {
        let (dir, reports) = reports();
        let outside = dir.path().join("outside");
        fs::write(&outside, serde_json::to_vec(&report(1)).unwrap()).unwrap();
        std::os::unix::fs::symlink(&outside, reports.path().join("link")).unwrap();
        fs::create_dir_all(reports.path().join("directory/inner")).unwrap();
        fs::write(reports.path().join("empty"), "").unwrap();
        fs::write(reports.path().join("large"), vec![b' '; 1 << 20]).unwrap();
        let version = Report { version: 2, ..report(1) };
        fs::write(reports.path().join("version"), serde_json::to_vec(&version).unwrap()).unwrap();
        let mut hostile = report(1);
        hostile.command.network = "../x".into();
        fs::write(reports.path().join("name"), serde_json::to_vec(&hostile).unwrap()).unwrap();
        let mut message = report(2);
        message.message = "ü".repeat(MAX_MESSAGE_BYTES);
        reports.put(&message).unwrap();

        let entries = reports.list().unwrap();
        assert_eq!(entries.len(), 7);
        for entry in &entries {
            match &entry.content {
                Ok(report) => assert_eq!((report.ended_unix_ms, report.message.len()), (2, MAX_MESSAGE_BYTES)),
                Err(why) => assert!(why.to_string().len() < 400, "{why}"),
            }
            reports.remove(entry).unwrap();
        }
        assert_eq!(reports.list().unwrap(), []);
        assert!(outside.exists(), "a link is removed, not what it leads to");
    }

    #[test]
    fn fields_of_a_later_version_are_passed_over() {
        let (_dir, reports) = reports();
        let mut later = serde_json::to_value(report(1)).unwrap();
        later["colour"] = "blue".into();
        fs::write(reports.path().join("1"), later.to_string()).unwrap();
        assert_eq!(contents(&reports), [report(1)]);
    }

    #[test]
    fn files_of_killed_writers_are_swept() {
        let (_dir, reports) = reports();
        fs::write(reports.path().join(".tmp-1"), "{").unwrap();
        assert_eq!(reports.list().unwrap(), []);
        reports.sweep(Duration::from_secs(600)).unwrap();
        assert!(reports.path().join(".tmp-1").exists());
        reports.sweep(Duration::ZERO).unwrap();
        assert!(!reports.path().join(".tmp-1").exists());
    }
}
