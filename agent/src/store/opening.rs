//! From a path to an open file, whatever is there: nothing, a store, one of another boot, a damaged one.

use std::{
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use redb::{Database, DatabaseError, ReadOnlyDatabase};
use wharf_core::store::Snapshot;

use super::tables::{Meta, OLDEST_SCHEMA, ReadError, SCHEMA_VERSION, read_meta, read_snapshot};

/// Starts that may die over a file before it is held to be damaged, where nothing was learned from the check before
/// ([`super::check`]): an agent that is killed while it starts must not lose its store at once.
const FATAL_OPENINGS: usize = 3;

/// Extension of the file that counts them.
const MARKER: &str = "opening";

/// Name of the file that is to take the store's place, beside it.
pub(super) const NEW: &str = "redb.new";
/// Pages of the file that redb keeps in memory; its own default is 1 GiB. The file is in memory already (tmpfs).
pub(super) const CACHE_BYTES: usize = 256 << 10;

/// What came of opening.
pub(super) struct Found {
    pub(super) database: Database,
    pub(super) meta: Meta,
    pub(super) snapshot: Snapshot,
    /// Set when a file was put aside, with the reason.
    pub(super) set_aside: Option<String>,
    /// What was put aside told of this boot, or there was nothing: there may be endpoints that nothing tells of any more.
    pub(super) lost: bool,
}

/// Opens the file, or makes it; puts aside what cannot be used.
pub(super) fn open(
    opener: &impl Fn(&Path) -> Result<Database, DatabaseError>,
    path: &Path,
    boot_id: &str,
) -> Result<Found, String> {
    finish_writing_anew(path).map_err(|e| format!("finish writing it anew: {e}"))?;
    let attempt = Attempt::begin(path).map_err(|e| format!("note that it is being opened: {e}"))?;
    let loaded = if attempt.earlier < FATAL_OPENINGS {
        load(opener, path, boot_id)
    } else {
        Err(Unusable::Damaged("every process that opens it ends over it".into(), Meta::default()))
    };
    let fresh = |why: &str, what: &str, meta: Meta, lost: bool| {
        let aside = put_aside(path, why).map_err(|e| format!("put it aside ({what}): {e}"))?;
        let database = opener(path).map_err(|e| e.to_string())?;
        Ok(Found { database, meta, snapshot: Snapshot::default(), set_aside: Some(format!("{aside}: {what}")), lost })
    };
    let found = match loaded {
        // A store that was never written to knows nothing: if the kernel does, what it knew was lost with its file.
        Ok((database, meta, snapshot)) => {
            let lost = meta.schema.is_none() || meta.lost;
            Ok(Found { database, meta, snapshot, set_aside: None, lost })
        }
        Err(Unusable::Refused(cause)) => Err(cause),
        Err(Unusable::OtherBoot(meta)) => fresh("other-boot", "it is of another boot", meta, false),
        Err(Unusable::Damaged(what, meta)) => fresh("damaged", &what, meta, true),
    }?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
        .map_err(|e| format!("set its mode to 0600: {e}"))?;
    Ok(found)
}

/// Opens the file and closes it again, for a process that may die over it.
pub(super) fn try_open(opener: &impl Fn(&Path) -> Result<Database, DatabaseError>, path: &Path, boot_id: &str) {
    if let Ok((database, ..)) = load(opener, path, boot_id) {
        drop(database);
    }
}

/// A process died over the file: the next opening sets it aside.
pub(super) fn condemn(path: &Path) -> std::io::Result<()> {
    std::fs::write(path.with_extension(MARKER), [b'x'; FATAL_OPENINGS])
}

/// A file beside the store that says, by its length, how often opening was begun and never ended.
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
        // An opening that panics has not ended, though it comes by here where panics unwind.
        if !std::thread::panicking()
            && let Err(error) = std::fs::remove_file(&self.marker)
        {
            tracing::warn!("remove {}: {error}", self.marker.display());
        }
    }
}

/// Why a file that is there cannot be used.
enum Unusable {
    /// It stays where it is, and the agent does not start.
    Refused(String),
    /// What it tells died with that boot.
    OtherBoot(Meta),
    /// What is wrong with it, and what could be read all the same.
    Damaged(String, Meta),
}

fn load(
    opener: &impl Fn(&Path) -> Result<Database, DatabaseError>,
    path: &Path,
    boot_id: &str,
) -> Result<(Database, Meta, Snapshot), Unusable> {
    // Opening a FIFO never ends.
    if std::fs::metadata(path).is_ok_and(|there| !there.is_file()) {
        return Err(Unusable::Damaged("it is not a regular file".into(), Meta::default()));
    }
    // Before anything is opened to be written, because that changes the file.
    if let Some(schema) = peek_schema(path) {
        refuse_unknown(schema)?;
    }
    let mut database = opener(path).map_err(|error| match error {
        DatabaseError::DatabaseAlreadyOpen => {
            Unusable::Refused("another agent has it open; stop that one, or use another --run-dir".into())
        }
        // No agent has written a file of an older format.
        DatabaseError::RepairAborted
        | DatabaseError::UpgradeRequired(_)
        | DatabaseError::Storage(redb::StorageError::Corrupted(_)) => {
            Unusable::Damaged(error.to_string(), Meta::default())
        }
        error if is_not_a_database(&error) => Unusable::Damaged(error.to_string(), Meta::default()),
        error => Unusable::Refused(error.to_string()),
    })?;
    // Reads every page: what is damaged must be known before anything relies on it, and redb itself relies on pages
    // whose checksums it has not looked at.
    match database.check_integrity() {
        Ok(_) => {}
        Err(DatabaseError::Storage(redb::StorageError::Io(error))) if !is_damage(&error) => {
            return Err(Unusable::Refused(error.to_string()));
        }
        Err(error) => return Err(Unusable::Damaged(error.to_string(), Meta::default())),
    }
    let found = read_meta(&database).map_err(|e| match e {
        ReadError::Store(cause) => Unusable::Refused(cause),
        ReadError::Damaged(what) => Unusable::Damaged(what, Meta::default()),
    })?;
    if let Some(schema) = found.schema {
        refuse_unknown(schema)?;
    }
    if found.boot_id.as_deref().is_some_and(|b| b != boot_id) {
        return Err(Unusable::OtherBoot(found));
    }
    match read_snapshot(&database) {
        Ok(snapshot) => Ok((database, found, snapshot)),
        Err(ReadError::Store(cause)) => Err(Unusable::Refused(cause)),
        Err(ReadError::Damaged(what)) => Err(Unusable::Damaged(what, found)),
    }
}

/// The version of a file's content, where it can be told without writing to it: not of one that was never closed.
fn peek_schema(path: &Path) -> Option<u64> {
    let database = ReadOnlyDatabase::open(path).ok()?;
    read_meta(&database).ok()?.schema
}

fn refuse_unknown(schema: u64) -> Result<(), Unusable> {
    if (OLDEST_SCHEMA..=SCHEMA_VERSION).contains(&schema) {
        return Ok(());
    }
    Err(Unusable::Refused(format!(
        "its schema is version {schema}, this agent knows {OLDEST_SCHEMA} to {SCHEMA_VERSION}; it stays as it is: run the \
         agent that wrote it, or move the file away"
    )))
}

fn is_not_a_database(error: &DatabaseError) -> bool {
    matches!(error, DatabaseError::Storage(redb::StorageError::Io(e)) if is_damage(e))
}

/// redb answers such I/O errors for a file that is not one of its own, and for one that was cut off.
fn is_damage(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::InvalidData | std::io::ErrorKind::UnexpectedEof)
}

/// At an open: the copy that was to take the store's place, when the agent died between the two.
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
    let stamp = crate::clock::unix_ms();
    let aside = path.with_extension(format!("redb.{why}-{stamp}"));
    std::fs::rename(path, &aside)?;
    Ok(aside.display().to_string())
}
