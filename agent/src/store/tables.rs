//! What is in the file: tables, and how they are read and changed.

use std::net::IpAddr;

use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition, TableError};
use serde::{Serialize, de::DeserializeOwned};
use wharf_core::{
    endpoint::EndpointRecord,
    ids::{EndpointId, Epoch},
    store::{Change, Intent, Lease, LeaseOwner, Snapshot},
};

use super::SCHEMA_VERSION;

const META: TableDefinition<&str, &[u8]> = TableDefinition::new("meta");
const ENDPOINTS: TableDefinition<u16, &[u8]> = TableDefinition::new("endpoints");
const LEASES: TableDefinition<&str, &[u8]> = TableDefinition::new("leases");
const INTENTS: TableDefinition<(u16, u64), &[u8]> = TableDefinition::new("intents");

/// Makes all changes in one transaction.
pub(super) fn apply<'a>(database: &Database, changes: impl Iterator<Item = &'a Change>) -> Result<(), String> {
    let txn = database.begin_write().map_err(words)?;
    {
        let mut meta = txn.open_table(META).map_err(words)?;
        let mut endpoints = txn.open_table(ENDPOINTS).map_err(words)?;
        let mut leases = txn.open_table(LEASES).map_err(words)?;
        let mut intents = txn.open_table(INTENTS).map_err(words)?;
        for change in changes {
            match change {
                Change::PutEndpoint(r) => endpoints.insert(r.id.get(), encode(r)?.as_slice()).map(drop),
                Change::RemoveEndpoint(id, epoch) => {
                    if has_record(&endpoints, *id, *epoch)? {
                        endpoints.remove(id.get()).map(drop)
                    } else {
                        Ok(())
                    }
                }
                Change::PutLease(l) => leases.insert(l.ip.to_string().as_str(), encode(l)?.as_slice()).map(drop),
                Change::RemoveLease(ip) => leases.remove(ip.to_string().as_str()).map(drop),
                Change::RemoveOwnedLease(ip, owner) => {
                    let held = is_held_by(&leases, *ip, owner)?;
                    if held { leases.remove(ip.to_string().as_str()).map(drop) } else { Ok(()) }
                }
                Change::ReplaceOwnedLease(l, owner) => {
                    let held = is_held_by(&leases, l.ip, owner)?;
                    if held {
                        leases.insert(l.ip.to_string().as_str(), encode(l)?.as_slice()).map(drop)
                    } else {
                        Ok(())
                    }
                }
                Change::PutIntent(id, epoch, Intent::Delete { .. }) if !has_record(&endpoints, *id, *epoch)? => Ok(()),
                Change::PutIntent(id, epoch, intent) => {
                    intents.insert((id.get(), epoch.0), encode(intent)?.as_slice()).map(drop)
                }
                Change::RemoveIntent(id, epoch) => intents.remove((id.get(), epoch.0)).map(drop),
                Change::ReserveEpochs(high) => meta.insert("epoch-high", high.0.to_le_bytes().as_slice()).map(drop),
            }
            .map_err(words)?;
        }
    }
    txn.commit().map_err(words)
}

fn has_record(
    endpoints: &impl ReadableTable<u16, &'static [u8]>,
    id: EndpointId,
    epoch: Epoch,
) -> Result<bool, String> {
    let row = endpoints.get(id.get()).map_err(words)?;
    Ok(row.is_some_and(|v| decode::<EndpointRecord>(v.value()).is_ok_and(|r| r.epoch == epoch)))
}

fn is_held_by(
    leases: &impl ReadableTable<&'static str, &'static [u8]>,
    ip: IpAddr,
    owner: &LeaseOwner,
) -> Result<bool, String> {
    let row = leases.get(ip.to_string().as_str()).map_err(words)?;
    Ok(row.is_some_and(|v| decode::<Lease>(v.value()).is_ok_and(|l| l.owner == *owner)))
}

/// What the file says of itself.
#[derive(Default)]
pub(super) struct Meta {
    pub(super) schema: Option<u64>,
    pub(super) boot_id: Option<String>,
    pub(super) epoch_high: u64,
}

pub(super) fn read_meta(database: &Database) -> Result<Meta, ReadError> {
    let txn = database.begin_read()?;
    let table = match txn.open_table(META) {
        Ok(table) => table,
        Err(TableError::TableDoesNotExist(_)) => return Ok(Meta::default()),
        Err(e) => return Err(e.into()),
    };
    let number = |key: &str| -> Result<Option<u64>, ReadError> {
        let Some(value) = table.get(key)? else { return Ok(None) };
        let bytes = value.value().try_into();
        bytes
            .map(|b| Some(u64::from_le_bytes(b)))
            .map_err(|_| ReadError::Damaged(format!("meta row {key}: not a number")))
    };
    let boot_id = table.get("boot-id")?;
    Ok(Meta {
        schema: number("schema")?,
        boot_id: boot_id.map(|v| String::from_utf8_lossy(v.value()).into_owned()),
        epoch_high: number("epoch-high")?.unwrap_or(0),
    })
}

pub(super) fn write_meta(database: &Database, boot_id: &str, epoch_high: u64) -> Result<(), String> {
    let txn = database.begin_write().map_err(words)?;
    {
        let mut meta = txn.open_table(META).map_err(words)?;
        for (key, value) in [
            ("schema", SCHEMA_VERSION.to_le_bytes().as_slice()),
            ("boot-id", boot_id.as_bytes()),
            ("epoch-high", epoch_high.to_le_bytes().as_slice()),
        ] {
            meta.insert(key, value).map_err(words)?;
        }
        for open in
            [txn.open_table(ENDPOINTS).map(drop), txn.open_table(LEASES).map(drop), txn.open_table(INTENTS).map(drop)]
        {
            open.map_err(words)?;
        }
    }
    txn.commit().map_err(words)
}

/// Why reading failed.
pub(super) enum ReadError {
    /// The disk, or the like: it may pass.
    Store(String),
    /// What is stored is not what this agent stores.
    Damaged(String),
}

impl ReadError {
    pub(super) fn cause(&self) -> &str {
        let (Self::Store(cause) | Self::Damaged(cause)) = self;
        cause
    }
}

impl<E: Into<redb::Error>> From<E> for ReadError {
    fn from(error: E) -> Self {
        let error: redb::Error = error.into();
        match error {
            redb::Error::Io(_) | redb::Error::PreviousIo => Self::Store(error.to_string()),
            _ => Self::Damaged(error.to_string()),
        }
    }
}

pub(super) fn read_snapshot(database: &Database) -> Result<Snapshot, ReadError> {
    let txn = database.begin_read()?;
    let mut snapshot = Snapshot::default();
    let bad = |table: &str, key: String, e: serde_json::Error| ReadError::Damaged(format!("{table} row {key}: {e}"));
    match txn.open_table(ENDPOINTS) {
        Ok(table) => {
            for row in table.iter()? {
                let (key, value) = row?;
                let record: EndpointRecord =
                    decode(value.value()).map_err(|e| bad("endpoints", key.value().to_string(), e))?;
                if record.id.get() != key.value() {
                    return Err(ReadError::Damaged(format!("endpoints row {}: its id is {}", key.value(), record.id)));
                }
                snapshot.endpoints.push(record);
            }
        }
        Err(TableError::TableDoesNotExist(_)) => return Ok(snapshot),
        Err(e) => return Err(e.into()),
    }
    let leases = txn.open_table(LEASES)?;
    for row in leases.iter()? {
        let (key, value) = row?;
        snapshot.leases.push(decode(value.value()).map_err(|e| bad("leases", key.value().to_owned(), e))?);
    }
    let intents = txn.open_table(INTENTS)?;
    for row in intents.iter()? {
        let (key, value) = row?;
        let (id, epoch) = key.value();
        let intent: Intent = decode(value.value()).map_err(|e| bad("intents", format!("{id}@{epoch}"), e))?;
        let id = EndpointId::try_from(id).map_err(|e| ReadError::Damaged(format!("intents row: {e}")))?;
        snapshot.intents.push((id, Epoch(epoch), intent));
    }
    Ok(snapshot)
}

/// JSON: a record can be read by a person with any redb tool, and fields can be added without a migration.
fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, String> {
    serde_json::to_vec(value).map_err(words)
}

pub(super) fn words(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, serde_json::Error> {
    serde_json::from_slice(bytes)
}
