//! Opens the file in any state.

use std::{
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use redb::{Database, DatabaseError, ReadOnlyDatabase};
use wharf_core::store::Snapshot;

use super::{
    error::Cause,
    tables::{Meta, OLDEST_SCHEMA, SCHEMA_VERSION, read_meta, read_snapshot},
};

/// Unfinished opens before a file counts as damaged: an agent killed at start must not lose its store at once.
const FATAL_OPENINGS: usize = 3;

const MARKER: &str = "opening";

pub(super) const NEW: &str = "redb.new";
/// redb's page cache. Its default is 1 GiB; the file is in memory (tmpfs).
pub(super) const CACHE_BYTES: usize = 256 << 10;

pub(super) struct Found {
    pub(super) database: Database,
    pub(super) meta: Meta,
    pub(super) snapshot: Snapshot,
    /// With the reason.
    pub(super) set_aside: Option<String>,
    /// Endpoints may exist without a record of this boot.
    pub(super) lost: bool,
}

/// Sets an unusable file aside.
pub(super) fn open(
    opener: &impl Fn(&Path) -> Result<Database, DatabaseError>,
    path: &Path,
    boot_id: &str,
) -> Result<Found, Cause> {
    finish_writing_anew(path).map_err(|e| Cause::at("finish writing it anew", e))?;
    let attempt = Attempt::begin(path).map_err(|e| Cause::at("note that it is being opened", e))?;
    let loaded = if attempt.earlier < FATAL_OPENINGS {
        load(opener, path, boot_id)
    } else {
        Err(damaged(Cause::Damaged("every process that opens it ends over it".into())))
    };
    let fresh = |why: &str, what: &str, meta: Meta, lost: bool| {
        let aside = put_aside(path, why).map_err(|e| Cause::at(format!("put it aside ({what})"), e))?;
        let database = opener(path)?;
        Ok(Found { database, meta, snapshot: Snapshot::default(), set_aside: Some(format!("{aside}: {what}")), lost })
    };
    let found = match loaded {
        // Without a schema it is new: endpoints lost their records with an earlier file.
        Ok((database, meta, snapshot)) => {
            let lost = meta.schema.is_none() || meta.lost;
            Ok(Found { database, meta, snapshot, set_aside: None, lost })
        }
        Err(Unusable::Refused(cause)) => Err(cause),
        Err(Unusable::OtherBoot(meta)) => fresh("other-boot", "it is of another boot", meta, false),
        Err(Unusable::Damaged(what, meta)) => fresh("damaged", &what.to_string(), meta, true),
    }?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
        .map_err(|e| Cause::at("set its mode to 0600", e))?;
    Ok(found)
}

/// Opens and closes the file; may end the process.
pub(super) fn try_open(opener: &impl Fn(&Path) -> Result<Database, DatabaseError>, path: &Path, boot_id: &str) {
    if let Ok((database, ..)) = load(opener, path, boot_id) {
        drop(database);
    }
}

/// The next open sets the file aside.
pub(super) fn condemn(path: &Path) -> std::io::Result<()> {
    std::fs::write(path.with_extension(MARKER), [b'x'; FATAL_OPENINGS])
}

/// The marker's length is the number of opens that never ended.
struct Attempt {
    marker: PathBuf,
    earlier: usize,
}

impl Attempt {
    fn begin(path: &Path) -> std::io::Result<Self> {
        let marker = path.with_extension(MARKER);
        let earlier = std::fs::metadata(&marker).map_or(0, |m| usize::try_from(m.len()).unwrap_or(usize::MAX));
        let earlier = earlier.min(FATAL_OPENINGS);
        std::fs::write(&marker, vec![b'x'; earlier + 1])?;
        Ok(Self { marker, earlier })
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        // After a panic, the open has not ended.
        if !std::thread::panicking()
            && let Err(error) = std::fs::remove_file(&self.marker)
        {
            tracing::warn!(target: "wharf_agent::store::opening", "remove {}: {error}", self.marker.display());
        }
    }
}

enum Unusable {
    /// The agent does not start.
    Refused(Cause),
    /// Its endpoints ended with the boot.
    OtherBoot(Meta),
    /// With readable metadata.
    Damaged(Cause, Meta),
}

fn load(
    opener: &impl Fn(&Path) -> Result<Database, DatabaseError>,
    path: &Path,
    boot_id: &str,
) -> Result<(Database, Meta, Snapshot), Unusable> {
    // Opening a FIFO blocks forever.
    if std::fs::metadata(path).is_ok_and(|there| !there.is_file()) {
        return Err(damaged(Cause::Damaged("it is not a regular file".into())));
    }
    // First: an open for writing changes the file.
    if let Some(schema) = peek_schema(path) {
        refuse_unknown(schema)?;
    }
    let mut database = opener(path).map_err(|error| match error {
        DatabaseError::DatabaseAlreadyOpen => Unusable::Refused(Cause::Held),
        // No agent wrote older formats.
        DatabaseError::RepairAborted
        | DatabaseError::UpgradeRequired(_)
        | DatabaseError::Storage(redb::StorageError::Corrupted(_)) => damaged(error),
        error if is_not_a_database(&error) => damaged(error),
        error => Unusable::Refused(error.into()),
    })?;
    // Reads every page: redb later uses pages without verifying their checksums.
    match database.check_integrity() {
        Ok(_) => {}
        Err(DatabaseError::Storage(redb::StorageError::Io(error))) if !is_damage(&error) => {
            return Err(Unusable::Refused(error.into()));
        }
        Err(error) => return Err(damaged(error)),
    }
    let found = read_meta(&database).map_err(|cause| unreadable(cause, Meta::default()))?;
    if let Some(schema) = found.schema {
        refuse_unknown(schema)?;
    }
    if found.boot_id.as_deref().is_some_and(|b| b != boot_id) {
        return Err(Unusable::OtherBoot(found));
    }
    match read_snapshot(&database) {
        Ok(snapshot) => Ok((database, found, snapshot)),
        Err(cause) => Err(unreadable(cause, found)),
    }
}

fn damaged(cause: impl Into<Cause>) -> Unusable {
    Unusable::Damaged(cause.into(), Meta::default())
}

/// An I/O error may be temporary; others mean damage.
fn unreadable(cause: Cause, meta: Meta) -> Unusable {
    match &cause {
        Cause::Redb(e) if matches!(**e, redb::Error::Io(_) | redb::Error::PreviousIo) => Unusable::Refused(cause),
        _ => Unusable::Damaged(cause, meta),
    }
}

/// If readable without a write: not if the file was never closed.
fn peek_schema(path: &Path) -> Option<u64> {
    let database = ReadOnlyDatabase::open(path).ok()?;
    read_meta(&database).ok()?.schema
}

fn refuse_unknown(schema: u64) -> Result<(), Unusable> {
    if (OLDEST_SCHEMA..=SCHEMA_VERSION).contains(&schema) {
        return Ok(());
    }
    Err(Unusable::Refused(Cause::Schema(schema)))
}

fn is_not_a_database(error: &DatabaseError) -> bool {
    matches!(error, DatabaseError::Storage(redb::StorageError::Io(e)) if is_damage(e))
}

/// redb's errors for foreign and truncated files.
fn is_damage(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::InvalidData | std::io::ErrorKind::UnexpectedEof)
}

/// After an interrupted rewrite: the new file replaces a missing store, otherwise it is removed.
fn finish_writing_anew(path: &Path) -> std::io::Result<()> {
    let new = path.with_extension(NEW);
    match std::fs::symlink_metadata(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => match std::fs::rename(&new, path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
            done => done,
        },
        _ => match std::fs::remove_file(&new) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
            done => done,
        },
    }
}

pub(super) fn put_aside(path: &Path, why: &str) -> std::io::Result<String> {
    let stamp = wharf_kit::clock::unix_ms();
    let aside = path.with_extension(format!("redb.{why}-{stamp}"));
    std::fs::rename(path, &aside)?;
    Ok(aside.display().to_string())
}
