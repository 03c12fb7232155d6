//! The agent's store. The first byte selects the meaning of the rest: `r` rows for an empty file, one per line (`Row`);
//! `b` the file; otherwise, damage to a valid file, eight bytes each (`damaged`).
//!
//! redb may panic on a foreign file. That ends a start, but a later start must succeed.

use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::{Once, OnceLock},
};

use redb::{Database, TableDefinition};
use wharf_core::store::{Change, Intent, Snapshot};
use wharf_store::{Store, StoreError};

const BOOT_ID: &str = "3b3b1f0e-9a57-4a52-8b52-111111111111";
/// Starts until an agent runs: three die from the file, the next sets it aside.
const MAX_STARTS: usize = 4;
/// Bytes of a redb page.
const PAGE: usize = 4096;

const META: TableDefinition<&str, &[u8]> = TableDefinition::new("meta");
const ENDPOINTS: TableDefinition<u16, &[u8]> = TableDefinition::new("endpoints");
const LEASES: TableDefinition<&str, &[u8]> = TableDefinition::new("leases");
const INTENTS: TableDefinition<(u16, u64), &[u8]> = TableDefinition::new("intents");
const RESTS: TableDefinition<&str, &[u8]> = TableDefinition::new("rests");
const FAILURES: TableDefinition<u16, &[u8]> = TableDefinition::new("restore-failures");
const QUARANTINE: TableDefinition<u16, &[u8]> = TableDefinition::new("quarantine");

/// Starts agents on one file.
pub fn run(data: &[u8]) {
    pass_over_panics_of_redb();
    let Some((first, rest)) = data.split_first() else { return };
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("state.redb");
    let unreadable_at_most = match first {
        b'r' => {
            open(&path).expect("a new store");
            Some(put_rows(&path, rest))
        }
        b'b' => {
            fs::write(&path, rest).expect("write the store");
            None
        }
        _ => {
            fs::write(&path, damaged(rest)).expect("write the store");
            None
        }
    };
    starts(&path, unreadable_at_most);
}

/// An agent starts, or refuses the file and leaves it unchanged.
fn starts(path: &Path, endpoint_rows: Option<usize>) {
    let before = fs::read(path).expect("read the store");
    let found = match come_up(path) {
        Ok(found) => found,
        Err(error) => {
            let told = error.to_string();
            assert!(told.starts_with("store open ") && told.contains("state.redb"), "no subject: {told}");
            // Only another schema prevents a start; the file may be of another version.
            assert!(told.contains("its schema is version"), "{told}");
            assert_eq!(before.len(), fs::read(path).expect("read the store").len(), "a refused store was changed");
            return;
        }
    };
    if found.set_aside.is_some() {
        assert_eq!(found.snapshot, Snapshot::default(), "half of a store that was put aside is used");
    } else if let Some(rows) = endpoint_rows {
        let all = found.snapshot.endpoints.len() + found.snapshot.unreadable.len();
        assert_eq!(all, rows, "a record is neither read nor said to be unreadable");
    }
    for (_, _, why) in &found.snapshot.unreadable {
        assert!(!why.is_empty());
    }
    let again = come_up(path).expect("an agent that came up comes up again");
    // Unless this start took the last epochs.
    if again.set_aside.as_ref().is_some_and(|why| why.contains("epoch-high")) {
        return;
    }
    assert_eq!(again.snapshot, found.snapshot, "the second start reads something else");
    assert_eq!(again.set_aside, None);
    let other = path.with_file_name("other.redb");
    let writable = writable(found.snapshot);
    write(&other, &writable);
    assert_eq!(come_up(&other).expect("a store of the agent's own").snapshot, writable, "rows change on their way");
}

struct Found {
    snapshot: Snapshot,
    set_aside: Option<String>,
}

/// Starts until redb does not panic.
fn come_up(path: &Path) -> Result<Found, StoreError> {
    for _ in 0..MAX_STARTS {
        if let Ok(result) = catch_unwind(AssertUnwindSafe(|| open(path))) {
            return result;
        }
    }
    panic!("an agent dies over {} at {MAX_STARTS} starts", path.display());
}

fn open(path: &Path) -> Result<Found, StoreError> {
    let opened = Store::open(path, BOOT_ID)?;
    drop(opened.store);
    opened.writer.join().expect("the store's thread ends");
    Ok(Found { snapshot: opened.snapshot, set_aside: opened.set_aside })
}

fn write(path: &Path, snapshot: &Snapshot) {
    let Snapshot { endpoints, leases, intents, resting, failures, out_of_service, unreadable: _ } = snapshot.clone();
    let opened = Store::open(path, BOOT_ID).expect("a new store");
    // Quarantine removes a record with the same id.
    let mut changes: Vec<Change> = out_of_service.into_iter().map(|q| Change::TakeOutOfService(Box::new(q))).collect();
    changes.extend(endpoints.into_iter().map(|record| Change::PutEndpoint(Box::new(record))));
    changes.extend(leases.into_iter().map(Change::PutLease));
    changes.extend(resting.into_iter().map(Change::PutRest));
    changes.extend(failures.into_iter().map(|(id, failure)| Change::PutRestoreFailure(id, failure)));
    changes.extend(intents.into_iter().map(|(id, epoch, intent)| Change::PutIntent(id, epoch, intent)));
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(opened.store.commit(changes)).expect("rows that were read can be written");
    drop(opened.store);
    opened.writer.join().expect("the store's thread ends");
}

/// No unreadable record, and no intent to delete an unknown one.
fn writable(mut snapshot: Snapshot) -> Snapshot {
    let Snapshot { endpoints, intents, unreadable, .. } = &mut snapshot;
    unreadable.clear();
    intents.retain(|(id, epoch, intent)| {
        let recorded = endpoints.iter().any(|record| (record.id, record.epoch) == (*id, *epoch));
        recorded || !matches!(intent, Intent::Delete { .. })
    });
    snapshot
}

/// A line: the table's letter, the key, a space, the value.
///
/// `E 7 {..}` endpoint, `L 10.0.0.7 {..}` lease, `I 7@42 {..}` intent, `R 10.0.0.7 {..}` rest, `F 7 {..}` restore
/// failure, `Q 7 {..}` a record out of service, `M schema 3` a number in the table of the file's own facts.
struct Row<'a> {
    table: u8,
    key: &'a str,
    value: &'a [u8],
}

impl<'a> Row<'a> {
    fn parse(line: &'a [u8]) -> Option<Self> {
        let (table, rest) = line.split_first()?;
        let rest = rest.strip_prefix(b" ")?;
        let blank = rest.iter().position(|b| *b == b' ')?;
        let (key, value) = rest.split_at(blank);
        Some(Self { table: *table, key: std::str::from_utf8(key).ok()?, value: value.strip_prefix(b" ")? })
    }
}

/// Returns the file's number of endpoints.
fn put_rows(path: &Path, text: &[u8]) -> usize {
    let database = Database::open(path).expect("a valid store");
    let txn = database.begin_write().expect("a transaction");
    let endpoint_rows = {
        let mut meta = txn.open_table(META).expect("a table");
        let mut endpoints = txn.open_table(ENDPOINTS).expect("a table");
        let mut leases = txn.open_table(LEASES).expect("a table");
        let mut intents = txn.open_table(INTENTS).expect("a table");
        let mut rests = txn.open_table(RESTS).expect("a table");
        let mut failures = txn.open_table(FAILURES).expect("a table");
        let mut quarantine = txn.open_table(QUARANTINE).expect("a table");
        for Row { table, key, value } in text.split(|b| *b == b'\n').filter_map(Row::parse) {
            let number = key.parse::<u16>();
            let pair = key.split_once('@').and_then(|(id, epoch)| Some((id.parse().ok()?, epoch.parse().ok()?)));
            match (table, number, pair) {
                (b'E', Ok(id), _) => drop(endpoints.insert(id, value).expect("a row")),
                (b'F', Ok(id), _) => drop(failures.insert(id, value).expect("a row")),
                (b'Q', Ok(id), _) => drop(quarantine.insert(id, value).expect("a row")),
                (b'I', _, Some(key)) => drop(intents.insert(key, value).expect("a row")),
                (b'L', ..) => drop(leases.insert(key, value).expect("a row")),
                (b'R', ..) => drop(rests.insert(key, value).expect("a row")),
                (b'M', ..) => {
                    let number = std::str::from_utf8(value).ok().and_then(|text| text.parse::<u64>().ok());
                    let bytes = number.map_or_else(|| value.to_vec(), |number| number.to_le_bytes().to_vec());
                    drop(meta.insert(key, bytes.as_slice()).expect("a row"));
                }
                _ => {}
            }
        }
        usize::try_from(redb::ReadableTableMetadata::len(&endpoints).expect("a length")).expect("a length")
    };
    txn.commit().expect("a commit");
    endpoint_rows
}

/// A closed store with a row of each kind.
struct Valid {
    file: Vec<u8>,
    /// Pages that are not zero.
    used: Vec<usize>,
}

fn valid() -> &'static Valid {
    static VALID: OnceLock<Valid> = OnceLock::new();
    VALID.get_or_init(|| {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("state.redb");
        open(&path).expect("a new store");
        put_rows(&path, include_bytes!("../corpus/store/rows-of-each-kind").get(1..).unwrap_or_default());
        let file = fs::read(&path).expect("read the store");
        let holds = |page: &[u8]| page.iter().any(|byte| *byte != 0);
        let used = file.chunks(PAGE).enumerate().filter(|(_, page)| holds(page)).map(|(at, _)| at).collect();
        Valid { file, used }
    })
}

/// Damage: four bytes (little-endian) give a position in the used pages, the next four are XORed there. `ffffffff`
/// truncates the file at the page that the next four give.
fn damaged(spots: &[u8]) -> Vec<u8> {
    let Valid { file, used } = valid();
    let mut damaged = file.clone();
    for spot in spots.chunks_exact(8) {
        let word = |at: usize| u32::from_le_bytes([spot[at], spot[at + 1], spot[at + 2], spot[at + 3]]) as usize;
        if word(0) == 0xffff_ffff {
            damaged.truncate(word(4) % (file.len() / PAGE) * PAGE);
            continue;
        }
        let place = word(0) % (used.len() * PAGE);
        let start = used[place / PAGE] * PAGE + place % PAGE;
        for (byte, change) in damaged.iter_mut().skip(start).zip(&spot[4..]) {
            *byte ^= change;
        }
    }
    damaged
}

/// Silences panics of redb, which unwind to [`come_up`].
fn pass_over_panics_of_redb() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let redb = panic.location().is_some_and(|place| place.file().contains("/redb-"));
            if !redb {
                before(panic);
            }
        }));
    });
}
