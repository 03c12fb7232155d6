//! The encoded rows of the objects, and the keys whose row the agent lacks.
//!
//! A new stream gets its snapshot from memory, so restarts of all agents do not load the API servers. A pod takes about
//! 500 bytes. Memory is bounded by the rows of the objects and the keys of the agent's rows.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
};

use prost::Message as _;
use tokio::time::Instant;
use wharf_feed::v1::{self, change::Change as Sent};

use crate::{
    rows::Defined,
    source::{Kind, Source},
    watch::{Event, Update},
};

/// Bytes of a message's rows. The last row, of at most 3 MiB, may exceed it.
const MESSAGE: usize = 512 << 10;
/// Changes of a message.
const CHANGES: usize = 4_096;

#[derive(Debug)]
struct Entry {
    uid: Box<str>,
    row: Box<[u8]>,
    /// Of the last list or event that had the object.
    generation: u64,
    /// The agent has a row with the key.
    is_sent: bool,
    /// Position in the kind's queue.
    queued: Option<u64>,
}

#[derive(Debug, Default)]
struct Objects {
    entries: BTreeMap<Box<str>, Entry>,
    generation: u64,
    /// After a complete list, or if the cluster lacks the resource.
    is_complete: bool,
}

#[derive(Debug, Clone)]
struct Waiting {
    source: Source,
    object: Box<str>,
    /// When the oldest change was read; `None` in a snapshot.
    since: Option<Instant>,
}

/// A kind's state in the stream.
#[derive(Debug, Default)]
struct Queue {
    /// In the order of their first change.
    puts: BTreeMap<u64, Waiting>,
    /// Rows of the agent without an object.
    deletes: BTreeMap<String, Instant>,
    has_begun: bool,
    is_complete: bool,
}

#[derive(Debug, Default)]
pub(super) struct Message {
    pub(super) changes: Vec<v1::Change>,
    pub(super) since: Option<Instant>,
    /// All kinds are complete with this message.
    pub(super) completes: bool,
}

/// The object of a policy's row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subject {
    pub api_version: String,
    pub kind: &'static str,
    /// Empty without a namespace.
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

#[derive(Debug, Default)]
pub(super) struct Table {
    objects: BTreeMap<Source, Objects>,
    queues: BTreeMap<Kind, Queue>,
    /// Next position in a queue.
    next: u64,
}

impl Table {
    pub(super) fn apply(&mut self, update: Update) {
        let Update { source, at, event } = update;
        let objects = self.objects.entry(source).or_default();
        match event {
            Event::Begin => objects.generation += 1,
            Event::Put(defined) => self.put(source, defined, at),
            Event::Keep { object, uid } => {
                let generation = objects.generation;
                match objects.entries.get_mut(object.as_str()) {
                    Some(entry) if *entry.uid == *uid => entry.generation = generation,
                    Some(_) => self.remove(source, &object, at),
                    None => {}
                }
            }
            Event::Gone { object, uid } => {
                // Spares a successor with the same name.
                if objects.entries.get(object.as_str()).is_some_and(|entry| *entry.uid == *uid) {
                    self.remove(source, &object, at);
                }
            }
            Event::Complete => self.complete(source, at),
            Event::Absent => {
                objects.generation += 1;
                self.complete(source, at);
            }
        }
    }

    /// Queues a snapshot for a new stream.
    pub(super) fn open_stream(&mut self) {
        self.queues.clear();
        for (source, objects) in &mut self.objects {
            let queue = self.queues.entry(source.kind()).or_default();
            for (object, entry) in &mut objects.entries {
                entry.is_sent = false;
                entry.queued = Some(self.next);
                let waiting = Waiting { source: *source, object: object.clone(), since: None };
                queue.puts.insert(self.next, waiting);
                self.next += 1;
            }
        }
    }

    /// Queues these rows again, unless they wait already.
    pub(super) fn resend(&mut self, rows: &BTreeSet<(Kind, String)>) {
        for (source, objects) in &mut self.objects {
            let Some(queue) = self.queues.get_mut(&source.kind()) else { continue };
            for (object, entry) in &mut objects.entries {
                let key = source.row_key(object, &entry.uid);
                if entry.queued.is_none() && rows.contains(&(source.kind(), key)) {
                    entry.queued = Some(self.next);
                    queue.puts.insert(self.next, Waiting { source: *source, object: object.clone(), since: None });
                    self.next += 1;
                }
            }
        }
    }

    /// `None` when the agent has everything.
    pub(super) fn next_message(&mut self) -> Option<Message> {
        let mut message = Message::default();
        let mut room = Room { bytes: MESSAGE, changes: CHANGES };
        let was_complete = self.is_complete();
        for kind in Kind::ALL {
            if room.is_full() {
                break;
            }
            self.fill(kind, &mut message, &mut room);
        }
        message.completes = !was_complete && self.is_complete();
        (!message.changes.is_empty()).then_some(message)
    }

    /// Whether [`Self::next_message`] has a message.
    pub(super) fn is_waiting(&self) -> bool {
        Kind::ALL.into_iter().any(|kind| {
            let Some(queue) = self.queues.get(&kind) else { return true };
            let can_complete = !queue.is_complete && self.has_all(kind);
            !queue.has_begun || !queue.puts.is_empty() || !queue.deletes.is_empty() || can_complete
        })
    }

    pub(super) fn count(&self, kind: Kind) -> usize {
        let of_kind = self.objects.iter().filter(|(source, _)| source.kind() == kind);
        of_kind.map(|(_, objects)| objects.entries.len()).sum()
    }

    pub(super) fn waiting(&self) -> usize {
        self.queues.values().map(|queue| queue.puts.len() + queue.deletes.len()).sum()
    }

    pub(super) fn subject(&self, key: &str) -> Option<Subject> {
        let (source, object) = Source::of_policy(key)?;
        let entry = self.objects.get(&source)?.entries.get(object)?;
        let (namespace, name) = object.split_once('/').unwrap_or(("", object));
        let row = v1::Row::decode(&*entry.row).ok()?;
        let Some(v1::row::Row::Policy(v1::Policy { text, .. })) = row.row else { return None };
        Some(Subject {
            api_version: api_version(&text)?,
            kind: source.object_kind(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: entry.uid.to_string(),
        })
    }

    fn put(&mut self, source: Source, defined: Defined, at: Instant) {
        let Defined { object, uid, row, .. } = defined;
        let objects = self.objects.entry(source).or_default();
        let old = objects.entries.get_mut(object.as_str());
        let Some(row) = row else {
            if old.is_some() {
                self.remove(source, &object, at);
            }
            return;
        };
        if let Some(entry) = old {
            if *entry.uid == *uid {
                entry.generation = objects.generation;
                if entry.row != row {
                    entry.row = row;
                    if entry.queued.is_none() {
                        entry.queued = Some(self.next);
                        self.queue(source, object.into_boxed_str(), at);
                    }
                }
                return;
            }
            self.remove(source, &object, at);
        }
        let key = source.row_key(&object, &uid);
        let is_sent = self.queues.entry(source.kind()).or_default().deletes.remove(&key).is_some();
        let objects = self.objects.entry(source).or_default();
        let object = object.into_boxed_str();
        let (generation, queued) = (objects.generation, Some(self.next));
        objects.entries.insert(object.clone(), Entry { uid: uid.into_boxed_str(), row, generation, is_sent, queued });
        self.queue(source, object, at);
    }

    fn queue(&mut self, source: Source, object: Box<str>, at: Instant) {
        let waiting = Waiting { source, object, since: Some(at) };
        self.queues.entry(source.kind()).or_default().puts.insert(self.next, waiting);
        self.next += 1;
    }

    fn remove(&mut self, source: Source, object: &str, at: Instant) {
        let Some(entry) = self.objects.get_mut(&source).and_then(|objects| objects.entries.remove(object)) else {
            return;
        };
        let queue = self.queues.entry(source.kind()).or_default();
        if let Some(number) = entry.queued {
            queue.puts.remove(&number);
        }
        if entry.is_sent {
            queue.deletes.insert(source.row_key(object, &entry.uid), at);
        }
    }

    fn complete(&mut self, source: Source, at: Instant) {
        let Some(objects) = self.objects.get_mut(&source) else { return };
        objects.is_complete = true;
        let missed = objects.entries.iter().filter(|(_, entry)| entry.generation != objects.generation);
        let missed: Vec<Box<str>> = missed.map(|(object, _)| object.clone()).collect();
        for object in missed {
            self.remove(source, &object, at);
        }
    }

    /// Every source had a complete list.
    fn has_all(&self, kind: Kind) -> bool {
        let mut of_kind = Source::ALL.into_iter().filter(|source| source.kind() == kind);
        of_kind.all(|source| self.objects.get(&source).is_some_and(|objects| objects.is_complete))
    }

    fn is_complete(&self) -> bool {
        Kind::ALL.iter().all(|kind| self.queues.get(kind).is_some_and(|queue| queue.is_complete))
    }

    fn fill(&mut self, kind: Kind, message: &mut Message, room: &mut Room) {
        let has_all = self.has_all(kind);
        let queue = self.queues.entry(kind).or_default();
        if !mem::replace(&mut queue.has_begun, true) {
            message.push(Sent::Begin(v1::Begin { kind: kind.name().to_owned() }), None);
        }
        while !room.is_full()
            && let Some((key, since)) = queue.deletes.pop_first()
        {
            room.take(key.len());
            message.push(Sent::Delete(v1::Delete { kind: kind.name().to_owned(), key }), Some(since));
        }
        while !room.is_full()
            && let Some((_, Waiting { source, object, since })) = queue.puts.pop_first()
        {
            let entry = self.objects.get_mut(&source).and_then(|objects| objects.entries.get_mut(&object));
            let Some(entry) = entry else { continue };
            entry.queued = None;
            entry.is_sent = true;
            room.take(entry.row.len());
            // This process encoded the bytes.
            if let Ok(row) = v1::Row::decode(&*entry.row) {
                message.push(Sent::Put(row), since);
            }
        }
        if queue.puts.is_empty() && queue.deletes.is_empty() && has_all && !queue.is_complete {
            queue.is_complete = true;
            message.push(Sent::Complete(v1::Complete { kind: kind.name().to_owned() }), None);
        }
    }
}

struct Room {
    bytes: usize,
    changes: usize,
}

impl Room {
    const fn is_full(&self) -> bool {
        self.bytes == 0 || self.changes == 0
    }

    const fn take(&mut self, bytes: usize) {
        self.bytes = self.bytes.saturating_sub(bytes);
        self.changes -= 1;
    }
}

impl Message {
    fn push(&mut self, change: Sent, since: Option<Instant>) {
        self.changes.push(v1::Change { change: Some(change) });
        self.since = match (self.since, since) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        };
    }
}

fn api_version(document: &str) -> Option<String> {
    #[derive(serde::Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Versioned {
        api_version: String,
    }
    serde_json::from_str::<Versioned>(document).ok().map(|versioned| versioned.api_version)
}

#[cfg(test)]
mod tests;
