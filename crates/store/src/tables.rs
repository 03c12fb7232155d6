//! Tables of the file.

use std::{borrow::Borrow, cell::RefCell, collections::HashMap, net::IpAddr};

use redb::{
    Database, Key, ReadTransaction, ReadableDatabase, ReadableTable, StorageError, Table, TableDefinition, TableError,
    TableHandle as _, Value, WriteTransaction,
};
use serde::{Serialize, de::DeserializeOwned};
use wharf_core::{
    endpoint::EndpointRecord,
    ids::{EndpointId, Epoch},
    store::{Change, Intent, Lease, LeaseOwner, OutOfService, Rest, RestoreFailure, Snapshot},
    timeline::Life,
};

use super::error::Cause;

/// Newer versions are refused. Version 1 is migrated at the open: rests, restore failures and quarantine begin empty.
pub(super) const SCHEMA_VERSION: u64 = 2;
pub(super) const OLDEST_SCHEMA: u64 = 1;

type Definition<K> = &'static TableDefinition<'static, K, &'static [u8]>;

const META: TableDefinition<&str, &[u8]> = TableDefinition::new("meta");
const LOST: &str = "lost";
const ENDPOINTS: TableDefinition<u16, &[u8]> = TableDefinition::new("endpoints");
const LEASES: TableDefinition<&str, &[u8]> = TableDefinition::new("leases");
const INTENTS: TableDefinition<(u16, u64), &[u8]> = TableDefinition::new("intents");
/// Since schema 2.
const RESTS: TableDefinition<&str, &[u8]> = TableDefinition::new("rests");
/// Since schema 2.
const FAILURES: TableDefinition<u16, &[u8]> = TableDefinition::new("restore-failures");
/// Since schema 2.
const QUARANTINE: TableDefinition<u16, &[u8]> = TableDefinition::new("quarantine");

/// Added without a new schema version: older agents leave it unchanged, newer ones end lives left open.
const TIMELINE: TableDefinition<(u16, u64), &[u8]> = TableDefinition::new("timeline");

/// All rows except the timeline's, for a rewrite without foreign writes.
#[derive(Default)]
pub(super) struct Rows(HashMap<RowKey, Box<[u8]>>);

type RowKey = (&'static str, Box<[u8]>);

/// `None` if removed.
type Changed = (RowKey, Option<Box<[u8]>>);

impl Rows {
    pub(super) fn load(database: &Database) -> Result<Self, Cause> {
        let read = database.begin_read()?;
        let mut rows = Self::default();
        rows.load_table(&read, &META)?;
        rows.load_table(&read, &ENDPOINTS)?;
        rows.load_table(&read, &LEASES)?;
        rows.load_table(&read, &INTENTS)?;
        rows.load_table(&read, &RESTS)?;
        rows.load_table(&read, &FAILURES)?;
        rows.load_table(&read, &QUARANTINE)?;
        Ok(rows)
    }

    fn load_table<K: Key + 'static>(&mut self, read: &ReadTransaction, definition: Definition<K>) -> Result<(), Cause> {
        let Some(table) = existing(read.open_table(*definition))? else { return Ok(()) };
        for row in table.iter()? {
            let (key, value) = row?;
            let key = K::as_bytes(&key.value()).as_ref().into();
            self.0.insert((definition.name(), key), value.value().into());
        }
        Ok(())
    }

    fn change(&mut self, changed: Vec<Changed>) {
        for (key, value) in changed {
            match value {
                Some(value) => drop(self.0.insert(key, value)),
                None => drop(self.0.remove(&key)),
            }
        }
    }

    fn write_table<K: Key + 'static>(&self, write: &WriteTransaction, definition: Definition<K>) -> Result<(), Cause> {
        let mut table = write.open_table(*definition)?;
        for ((_, key), value) in self.0.iter().filter(|((name, _), _)| *name == definition.name()) {
            table.insert(K::from_bytes(key), &**value)?;
        }
        Ok(())
    }
}

/// A table that records changes for [`Rows`].
struct Noted<'t, K: Key + 'static> {
    table: Table<'t, K, &'static [u8]>,
    name: &'static str,
    changed: &'t RefCell<Vec<Changed>>,
}

impl<'t, K: Key + 'static> Noted<'t, K> {
    fn open(
        txn: &'t WriteTransaction,
        definition: Definition<K>,
        changed: &'t RefCell<Vec<Changed>>,
    ) -> Result<Self, Cause> {
        let table = txn.open_table(*definition)?;
        Ok(Self { table, name: definition.name(), changed })
    }

    fn insert<'k>(&mut self, key: impl Borrow<K::SelfType<'k>>, value: &[u8]) -> Result<(), StorageError> {
        self.note(key.borrow(), Some(value));
        self.table.insert(key, value).map(drop)
    }

    fn remove<'k>(&mut self, key: impl Borrow<K::SelfType<'k>>) -> Result<(), StorageError> {
        self.note(key.borrow(), None);
        self.table.remove(key).map(drop)
    }

    fn note<'k>(&self, key: &K::SelfType<'k>, value: Option<&[u8]>) {
        self.changed.borrow_mut().push(((self.name, K::as_bytes(key).as_ref().into()), value.map(Into::into)));
    }
}

pub(super) fn apply<'a>(
    database: &Database,
    rows: &mut Rows,
    changes: impl Iterator<Item = &'a Change> + Clone,
) -> Result<(), Cause> {
    wharf_crash::point("store/before-transaction");
    let txn = database.begin_write()?;
    let changed = RefCell::default();
    {
        let mut meta = Noted::open(&txn, &META, &changed)?;
        let mut endpoints = Noted::open(&txn, &ENDPOINTS, &changed)?;
        let mut leases = Noted::open(&txn, &LEASES, &changed)?;
        let mut intents = Noted::open(&txn, &INTENTS, &changed)?;
        let mut rests = Noted::open(&txn, &RESTS, &changed)?;
        let mut failures = Noted::open(&txn, &FAILURES, &changed)?;
        let mut quarantine = Noted::open(&txn, &QUARANTINE, &changed)?;
        // Only for its changes: its damage affects nothing else.
        let mut timeline = match changes.clone().any(Change::is_of_timeline) {
            true => Some(txn.open_table(TIMELINE)?),
            false => None,
        };
        for change in changes {
            match change {
                Change::PutEndpoint(r) => endpoints.insert(r.id.get(), encode(r)?.as_slice()),
                Change::RemoveEndpoint(id, epoch) => {
                    if has_record(&endpoints.table, *id, *epoch)? {
                        endpoints.remove(id.get())
                    } else {
                        Ok(())
                    }
                }
                Change::PutLease(l) => {
                    // A lease ends a rest.
                    rests.remove(l.ip.to_string().as_str())?;
                    leases.insert(l.ip.to_string().as_str(), encode(l)?.as_slice())
                }
                Change::RemoveLease(ip) => leases.remove(ip.to_string().as_str()),
                Change::RemoveOwnedLease(ip, owner) => {
                    let held = is_held_by(&leases.table, *ip, owner)?;
                    if held { leases.remove(ip.to_string().as_str()) } else { Ok(()) }
                }
                Change::ReplaceOwnedLease(l, owner) => {
                    let held = is_held_by(&leases.table, l.ip, owner)?;
                    if held { leases.insert(l.ip.to_string().as_str(), encode(l)?.as_slice()) } else { Ok(()) }
                }
                Change::PutIntent(id, epoch, Intent::Delete { .. }) if !has_record(&endpoints.table, *id, *epoch)? => {
                    Ok(())
                }
                Change::PutIntent(id, epoch, intent) => intents.insert((id.get(), epoch.0), encode(intent)?.as_slice()),
                Change::RemoveIntent(id, epoch) => intents.remove((id.get(), epoch.0)),
                // After overlapping deletes, the address may have a new owner.
                Change::PutRest(r) if leases.table.get(r.ip.to_string().as_str())?.is_some() => Ok(()),
                Change::PutRest(r) => rests.insert(r.ip.to_string().as_str(), encode(r)?.as_slice()),
                Change::RemoveRest(ip) => rests.remove(ip.to_string().as_str()),
                Change::PutRestoreFailure(id, f) => failures.insert(id.get(), encode(f)?.as_slice()),
                Change::RemoveRestoreFailure(id) => failures.remove(id.get()),
                Change::TakeOutOfService(q) => {
                    endpoints.remove(q.id.get())?;
                    failures.remove(q.id.get())?;
                    quarantine.insert(q.id.get(), encode(q)?.as_slice())
                }
                Change::RemoveOutOfService(id) => {
                    failures.remove(id.get())?;
                    if is_unreadable(&endpoints.table, *id)? {
                        endpoints.remove(id.get())?;
                    }
                    quarantine.remove(id.get())
                }
                Change::PutLife(l) if l.ended.is_none() && !has_record(&endpoints.table, l.who.id, l.who.epoch)? => {
                    Ok(())
                }
                Change::PutLife(l) => match &mut timeline {
                    Some(table) => table.insert((l.who.id.get(), l.who.epoch.0), encode(l)?.as_slice()).map(drop),
                    None => Ok(()),
                },
                Change::RemoveLife(id, epoch) => match &mut timeline {
                    Some(table) => table.remove((id.get(), epoch.0)).map(drop),
                    None => Ok(()),
                },
                Change::ReserveEpochs(high) => meta.insert("epoch-high", high.0.to_le_bytes().as_slice()),
                Change::LossHandled => meta.remove(LOST),
            }?;
        }
    }
    wharf_crash::point("store/before-commit");
    txn.commit()?;
    rows.change(changed.into_inner());
    wharf_crash::point("store/after-commit");
    Ok(())
}

/// One transaction into an empty file; the timeline is from `old`.
pub(super) fn write_all(rows: &Rows, old: Option<&Database>, to: &Database) -> Result<(), Cause> {
    let write = to.begin_write()?;
    rows.write_table(&write, &META)?;
    rows.write_table(&write, &ENDPOINTS)?;
    rows.write_table(&write, &LEASES)?;
    rows.write_table(&write, &INTENTS)?;
    rows.write_table(&write, &RESTS)?;
    rows.write_table(&write, &FAILURES)?;
    rows.write_table(&write, &QUARANTINE)?;
    if let Some(old) = old {
        let read = old.begin_read()?;
        if !matches!(read.open_table(TIMELINE), Err(TableError::TableTypeMismatch { .. })) {
            copy_table(&read, &write, TIMELINE)?;
        }
    }
    Ok(write.commit()?)
}

fn copy_table<K: Key + 'static, V: Value + 'static>(
    read: &ReadTransaction,
    write: &WriteTransaction,
    definition: TableDefinition<K, V>,
) -> Result<(), Cause> {
    let Some(from) = existing(read.open_table(definition))? else { return Ok(()) };
    let mut to = write.open_table(definition)?;
    for row in from.iter()? {
        let (key, value) = row?;
        to.insert(key.value(), value.value())?;
    }
    Ok(())
}

pub(super) fn live_bytes(database: &Database) -> Result<u64, Cause> {
    let stats = database.begin_write()?.stats()?;
    Ok(stats.stored_bytes() + stats.metadata_bytes())
}

fn has_record(endpoints: &impl ReadableTable<u16, &'static [u8]>, id: EndpointId, epoch: Epoch) -> Result<bool, Cause> {
    let row = endpoints.get(id.get())?;
    Ok(row.is_some_and(|v| decode::<EndpointRecord>(v.value()).is_ok_and(|r| r.epoch == epoch)))
}

fn is_unreadable(endpoints: &impl ReadableTable<u16, &'static [u8]>, id: EndpointId) -> Result<bool, Cause> {
    let row = endpoints.get(id.get())?;
    Ok(row.is_some_and(|v| read_record(id.get(), v.value()).is_err()))
}

fn is_held_by(
    leases: &impl ReadableTable<&'static str, &'static [u8]>,
    ip: IpAddr,
    owner: &LeaseOwner,
) -> Result<bool, Cause> {
    let row = leases.get(ip.to_string().as_str())?;
    Ok(row.is_some_and(|v| decode::<Lease>(v.value()).is_ok_and(|l| l.owner == *owner)))
}

/// Counting on from it never wraps.
const MAX_EPOCH: u64 = u64::MAX / 2;

#[derive(Default)]
pub(super) struct Meta {
    pub(super) schema: Option<u64>,
    pub(super) boot_id: Option<String>,
    pub(super) epoch_high: u64,
    /// No start has accounted for endpoints without a record.
    pub(super) lost: bool,
}

pub(super) fn read_meta(database: &impl ReadableDatabase) -> Result<Meta, Cause> {
    let txn = database.begin_read()?;
    let Some(table) = existing(txn.open_table(META))? else { return Ok(Meta::default()) };
    let number = |key: &str| -> Result<Option<u64>, Cause> {
        let Some(value) = table.get(key)? else { return Ok(None) };
        let bytes = value.value().try_into();
        bytes.map(|b| Some(u64::from_le_bytes(b))).map_err(|_| Cause::Damaged(format!("meta row {key}: not a number")))
    };
    let epoch_high = number("epoch-high")?.unwrap_or(0);
    if epoch_high > MAX_EPOCH {
        return Err(Cause::Damaged(format!("meta row epoch-high: {epoch_high} is more than any node comes to")));
    }
    let boot_id = table.get("boot-id")?;
    Ok(Meta {
        schema: number("schema")?,
        boot_id: boot_id.map(|v| String::from_utf8_lossy(v.value()).into_owned()),
        epoch_high,
        lost: table.get(LOST)?.is_some(),
    })
}

/// Without `lost`, the next start takes unrecorded endpoints for leaks.
pub(super) fn write_meta(database: &Database, boot_id: &str, epoch_high: u64, lost: bool) -> Result<(), Cause> {
    let txn = database.begin_write()?;
    {
        let mut meta = txn.open_table(META)?;
        for (key, value) in [
            ("schema", SCHEMA_VERSION.to_le_bytes().as_slice()),
            ("boot-id", boot_id.as_bytes()),
            ("epoch-high", epoch_high.to_le_bytes().as_slice()),
        ] {
            meta.insert(key, value)?;
        }
        if lost {
            meta.insert(LOST, [].as_slice())?;
        }
        for open in [
            txn.open_table(ENDPOINTS).map(drop),
            txn.open_table(LEASES).map(drop),
            txn.open_table(INTENTS).map(drop),
            txn.open_table(RESTS).map(drop),
            txn.open_table(FAILURES).map(drop),
            txn.open_table(QUARANTINE).map(drop),
        ] {
            open?;
        }
    }
    Ok(txn.commit()?)
}

pub(super) fn read_snapshot(database: &Database) -> Result<Snapshot, Cause> {
    let txn = database.begin_read()?;
    let mut snapshot = Snapshot::default();
    let bad = |table: &str, key: String, e: serde_json::Error| Cause::at(format!("{table} row {key}"), e);
    let Some(endpoints) = existing(txn.open_table(ENDPOINTS))? else { return Ok(snapshot) };
    for row in endpoints.iter()? {
        let (key, value) = row?;
        // It affects only its endpoint.
        match read_record(key.value(), value.value()) {
            Ok(record) => snapshot.endpoints.push(record),
            Err(why) => {
                let text = String::from_utf8_lossy(value.value()).into_owned();
                snapshot.unreadable.push((key.value(), text, why.to_string()));
            }
        }
    }
    let leases = txn.open_table(LEASES)?;
    for row in leases.iter()? {
        let (key, value) = row?;
        let lease: Lease = decode(value.value()).map_err(|e| bad("leases", key.value().to_owned(), e))?;
        filed_under("leases", key.value(), lease.ip)?;
        snapshot.leases.push(lease);
    }
    let intents = txn.open_table(INTENTS)?;
    for row in intents.iter()? {
        let (key, value) = row?;
        let (id, epoch) = key.value();
        let intent: Intent = decode(value.value()).map_err(|e| bad("intents", format!("{id}@{epoch}"), e))?;
        let id = EndpointId::try_from(id).map_err(|e| Cause::Damaged(format!("intents row: {e}")))?;
        snapshot.intents.push((id, Epoch(epoch), intent));
    }
    // Schema 1 lacks these tables until the first write.
    if let Some(rests) = existing(txn.open_table(RESTS))? {
        for row in rests.iter()? {
            let (key, value) = row?;
            let rest: Rest = decode(value.value()).map_err(|e| bad("rests", key.value().to_owned(), e))?;
            filed_under("rests", key.value(), rest.ip)?;
            snapshot.resting.push(rest);
        }
    }
    let id_of = |n: u16| EndpointId::try_from(n).map_err(|e| Cause::Damaged(format!("row {n}: {e}")));
    if let Some(failures) = existing(txn.open_table(FAILURES))? {
        for row in failures.iter()? {
            let (key, value) = row?;
            let failure: RestoreFailure =
                decode(value.value()).map_err(|e| bad("restore-failures", key.value().to_string(), e))?;
            snapshot.failures.push((id_of(key.value())?, failure));
        }
    }
    if let Some(quarantine) = existing(txn.open_table(QUARANTINE))? {
        for row in quarantine.iter()? {
            let (key, value) = row?;
            let out_of_service: OutOfService =
                decode(value.value()).map_err(|e| bad("quarantine", key.value().to_string(), e))?;
            filed_under("quarantine", key.value(), out_of_service.id)?;
            snapshot.out_of_service.push(out_of_service);
        }
    }
    Ok(snapshot)
}

pub(super) fn read_lives(database: &Database) -> Result<(Vec<Life>, u64), Cause> {
    let txn = database.begin_read()?;
    let Some(table) = existing(txn.open_table(TIMELINE))? else { return Ok((Vec::new(), 0)) };
    let (mut lives, mut unreadable) = (Vec::new(), 0);
    for row in table.iter()? {
        let (key, value) = row?;
        match read_life(key.value(), value.value()) {
            Some(life) => lives.push(life),
            None => unreadable += 1,
        }
    }
    Ok((lives, unreadable))
}

pub(super) fn read_one_life(database: &Database, id: EndpointId, epoch: Epoch) -> Result<Option<Life>, Cause> {
    let txn = database.begin_read()?;
    let Some(table) = existing(txn.open_table(TIMELINE))? else { return Ok(None) };
    let key = (id.get(), epoch.0);
    let row = table.get(key)?;
    Ok(row.and_then(|value| read_life(key, value.value())))
}

fn read_life(key: (u16, u64), value: &[u8]) -> Option<Life> {
    decode::<Life>(value).ok().filter(|l| (l.who.id.get(), l.who.epoch.0) == key)
}

fn read_record(key: u16, value: &[u8]) -> Result<EndpointRecord, Cause> {
    let record: EndpointRecord = decode(value).map_err(|e| Cause::at("it cannot be read", e))?;
    if record.id.get() != key {
        return Err(Cause::Damaged(format!("it is filed under {key} and says {}", record.id)));
    }
    Ok(record)
}

/// Rejects rows under a wrong key: writes would duplicate them, removes would miss them.
fn filed_under(table: &str, key: impl ToString, says: impl ToString) -> Result<(), Cause> {
    let (key, says) = (key.to_string(), says.to_string());
    if key == says { Ok(()) } else { Err(Cause::Damaged(format!("{table} row {key}: it says {says}"))) }
}

/// `None` without the table.
fn existing<T>(table: Result<T, TableError>) -> Result<Option<T>, Cause> {
    match table {
        Ok(table) => Ok(Some(table)),
        Err(TableError::TableDoesNotExist(_)) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// JSON: readable with any redb tool, extensible without a migration.
fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, serde_json::Error> {
    serde_json::to_vec(value)
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, serde_json::Error> {
    serde_json::from_slice(bytes)
}
