//! The timeline of an endpoint: a bounded list of entries, kept in the store from its create until a day after its
//! delete.
//!
//! Pure: this module decides which entries are kept, in which order, and which are dropped first. Times are
//! milliseconds since the Unix epoch, for people; only the age of an ended life is decided by them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use serde::{Deserialize, Serialize};

use crate::{
    endpoint::EndpointRecord,
    identity::Identity,
    ids::{Attachment, EndpointId, Epoch, IfName},
};

/// Most entries of one endpoint. Entries between the create and the last delete are dropped first.
pub const MAX_ENTRIES: usize = 64;
/// Longest text of an entry, bytes.
pub const MAX_TEXT: usize = 400;
/// Lives that are kept after their end.
pub const MAX_PAST: usize = 4_096;
/// Largest JSON of an ended life, bytes. Every step of a pod's create and delete fits, however long each took. Three rows
/// fit into a page of the store (4 KiB), and a split page has at least two, so a life takes at most 2 KiB of the file.
pub const MAX_ENDED: usize = 1_340;
/// Space that the entries of an ended life have at least, bytes, however long its names are.
const MIN_ENTRIES_BYTES: usize = 400;

/// What an entry is part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Operation {
    /// Its create.
    Create,
    /// The undo of a create that failed.
    Undo,
    /// A build while it lives.
    Regenerate,
    /// New labels.
    Relabel,
    /// What a start of the agent did with it.
    Restore,
    /// A delete.
    Delete,
    /// Something that was noticed: a check, an alarm.
    Notice,
}

impl Operation {
    /// Name in metrics' labels and in what people read.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Undo => "undo",
            Self::Regenerate => "regenerate",
            Self::Relabel => "relabel",
            Self::Restore => "restore",
            Self::Delete => "delete",
            Self::Notice => "notice",
        }
    }
}

/// How it went.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// As it should.
    #[default]
    Ok,
    /// Odd; nothing is lost.
    Warning,
    /// Failed.
    Failed,
}

/// One thing that happened. Read from JSON as it was written before `Row`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Entry {
    /// When it ended, milliseconds since the Unix epoch.
    #[serde(rename = "at")]
    pub at_unix_ms: u64,
    /// What it is part of.
    #[serde(rename = "op")]
    pub operation: Operation,
    /// Step, or event of the state machine.
    pub phase: String,
    /// How long it took, microseconds; none for what has no length.
    #[serde(rename = "us", default)]
    pub took_us: Option<u64>,
    /// How it went.
    #[serde(default)]
    pub outcome: Outcome,
    /// In words; empty when there is nothing to add.
    #[serde(default)]
    pub text: String,
}

/// The entries of one endpoint, oldest first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Written", into = "Written")]
pub struct Entries {
    list: Vec<Entry>,
    left_out: u64,
}

/// Entries as the store has them.
#[derive(Serialize, Deserialize)]
struct Written {
    list: Vec<WrittenEntry>,
    #[serde(default)]
    left_out: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum WrittenEntry {
    Row(Row),
    Named(#[serde(skip_serializing)] Entry),
}

/// An entry without field names: milliseconds since the entry before, operation, phase, duration; then outcome and
/// text, unless it is a success without text.
#[derive(Serialize, Deserialize)]
struct Row(
    i64,
    Operation,
    String,
    Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")] Option<(Outcome, String)>,
);

impl From<Entries> for Written {
    fn from(entries: Entries) -> Self {
        let mut before = 0_u64;
        let row = |e: Entry| {
            let since = e.at_unix_ms.wrapping_sub(before).cast_signed();
            before = e.at_unix_ms;
            let words = (!e.says_nothing()).then_some((e.outcome, e.text));
            WrittenEntry::Row(Row(since, e.operation, e.phase, e.took_us, words))
        };
        Self { list: entries.list.into_iter().map(row).collect(), left_out: entries.left_out }
    }
}

impl From<Written> for Entries {
    fn from(written: Written) -> Self {
        let mut before = 0_u64;
        let entry = |e: WrittenEntry| {
            let entry = match e {
                WrittenEntry::Named(entry) => entry,
                WrittenEntry::Row(Row(since, operation, phase, took_us, words)) => {
                    let (outcome, text) = words.unwrap_or_default();
                    Entry { at_unix_ms: before.wrapping_add_signed(since), operation, phase, took_us, outcome, text }
                }
            };
            before = entry.at_unix_ms;
            entry
        };
        Self { list: written.list.into_iter().map(entry).collect(), left_out: written.left_out }
    }
}

impl Entries {
    /// Adds an entry, unless its text only repeats the entry before. Beyond [`MAX_ENTRIES`], the oldest entry that
    /// belongs neither to the create nor to the last delete is dropped; if there is none, the second entry is.
    pub fn push(&mut self, mut entry: Entry) {
        cut(&mut entry.text, MAX_TEXT);
        cut(&mut entry.phase, MAX_TEXT);
        let repeats = |last: &Entry| {
            !entry.text.is_empty()
                && entry.took_us.is_none()
                && last.outcome == entry.outcome
                && last.text.contains(&entry.text)
        };
        if self.list.last().is_some_and(repeats) {
            return;
        }
        self.list.push(entry);
        while self.list.len() > MAX_ENTRIES {
            let at = self.least_needed();
            self.list.remove(at);
            self.left_out += 1;
        }
    }

    /// Index of the entry to drop next.
    fn least_needed(&self) -> usize {
        // Each repeated delete request begins a new delete, so only the last one counts.
        let last_delete = self.list.iter().rposition(|e| e.operation == Operation::Delete && e.phase == DELETE_BEGINS);
        let is_needed = |(at, e): (usize, &Entry)| match e.operation {
            Operation::Create => true,
            Operation::Delete => last_delete.is_none_or(|begun| at >= begun),
            _ => false,
        };
        self.list.iter().enumerate().position(|e| !is_needed(e)).unwrap_or(1)
    }

    /// Drops entries until the rest takes at most `budget` bytes of JSON: first successful steps without text, the
    /// quickest first; then successes with text and warnings, the oldest first; then failures, the oldest first. The
    /// last failure stays; its text is cut.
    fn trim(&mut self, budget: usize) {
        let mut size: usize = self.list.iter().map(Entry::written_len).sum();
        while size > budget && self.list.len() > 1 {
            let last_failure = self.list.iter().rposition(|e| e.outcome == Outcome::Failed);
            let weight = |(at, e): (usize, &Entry)| match e.outcome {
                Outcome::Ok if e.says_nothing() => (0, e.took_us.unwrap_or(0), at),
                Outcome::Failed if last_failure == Some(at) => (3, 0, at),
                Outcome::Failed => (2, 0, at),
                Outcome::Ok | Outcome::Warning => (1, 0, at),
            };
            let Some((_, _, at)) = self.list.iter().enumerate().map(weight).min() else { break };
            size -= self.list.remove(at).written_len();
            self.left_out += 1;
        }
        if size > budget
            && let Some(entry) = self.list.first_mut()
        {
            // A character of JSON takes up to six bytes.
            cut(&mut entry.text, (budget / 6).min(MAX_TEXT));
        }
        self.list.shrink_to_fit();
    }

    /// All of them, oldest first.
    #[must_use]
    pub fn list(&self) -> &[Entry] {
        &self.list
    }

    /// Number of dropped entries.
    #[must_use]
    pub fn left_out(&self) -> u64 {
        self.left_out
    }
}

/// Phase of the entry with which a delete begins.
pub const DELETE_BEGINS: &str = "write-intent";

fn cut(text: &mut String, most: usize) {
    if text.len() > most {
        let end = (0..=most.saturating_sub(3)).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
        text.push_str("...");
    }
}

/// Bytes of a text in JSON, without the quotes.
fn json_len(text: &str) -> usize {
    let one = |c: char| match c {
        '"' | '\\' => 2,
        c if c.is_ascii_control() => 6,
        c => c.len_utf8(),
    };
    text.chars().map(one).sum()
}

impl Entry {
    /// A success without words.
    fn says_nothing(&self) -> bool {
        self.outcome == Outcome::Ok && self.text.is_empty()
    }

    /// Bytes of its row in JSON: the marks, a time since the entry before of up to a minute, the rest as it is.
    fn written_len(&self) -> usize {
        let took = self.took_us.map_or(4, |us| us.checked_ilog10().unwrap_or(0) as usize + 1);
        let words = if self.says_nothing() { 0 } else { 14 + json_len(&self.text) };
        15 + self.operation.name().len() + json_len(&self.phase) + took + words
    }
}

/// How a life ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum End {
    /// Deleted, and nothing of it is left.
    Deleted,
    /// Its create failed and was undone.
    CreateFailed,
    /// The record was gone at an agent's start, and how it was removed was not recorded.
    Unnoted,
}

/// When and how a life ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Ended {
    /// Milliseconds since the Unix epoch.
    pub at_unix_ms: u64,
    /// How.
    pub how: End,
}

/// Who it was: what is needed to find a life that has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Who {
    /// Endpoint id; others have had it, and others may have it now.
    pub id: EndpointId,
    /// Epoch: with the id, the life's name.
    pub epoch: Epoch,
    /// CNI key.
    pub attachment: Attachment,
    /// Addresses, IPv4 first.
    pub addresses: Vec<IpAddr>,
    /// Identity; none of a create that was interrupted.
    pub identity: Option<Identity>,
    /// Host side's name.
    pub host_ifname: Option<IfName>,
    /// Pod name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_name: Option<String>,
    /// Pod namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_namespace: Option<String>,
    /// When it was created, milliseconds since the Unix epoch.
    pub created_unix_ms: u64,
}

impl Who {
    /// As the record says.
    #[must_use]
    pub fn of(record: &EndpointRecord) -> Self {
        Self {
            id: record.id,
            epoch: record.epoch,
            attachment: record.attachment.clone(),
            addresses: record.addresses().collect(),
            identity: Some(record.identity),
            host_ifname: Some(record.host_ifname.clone()),
            pod_name: record.pod_name.clone(),
            pod_namespace: record.pod_namespace.clone(),
            created_unix_ms: record.created_unix_ms,
        }
    }

    /// About how many bytes it and what is around it take in JSON: names of fields, numbers, then what varies.
    fn written_len(&self) -> usize {
        let pod = [&self.pod_name, &self.pod_namespace].into_iter().flatten().map(|name| 18 + json_len(name));
        let a = &self.attachment;
        let names = a.network.as_str().len() + a.container_id.as_str().len() + a.ifname.as_str().len();
        290 + names + 20 * self.addresses.len() + pod.sum::<usize>()
    }
}

/// The life of an endpoint, as the store keeps it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Life {
    /// Who.
    pub who: Who,
    /// Set when it has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<Ended>,
    /// What happened.
    pub entries: Entries,
}

impl Life {
    /// Cuts a life that has ended down to [`MAX_ENDED`] bytes.
    pub fn trim(&mut self) {
        self.entries.trim(MAX_ENDED.saturating_sub(self.who.written_len()).max(MIN_ENTRIES_BYTES));
    }
}

/// A life without an endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PastLife {
    /// Who it was.
    pub who: Who,
    /// When and how it ended.
    pub ended: Ended,
}

/// The ended lives, at most [`MAX_PAST`], in the caller's packed form. The entries are in the store.
#[derive(Debug, Clone)]
pub struct Past<T> {
    /// By when it ended (milliseconds since the Unix epoch), epoch and id.
    by_end: BTreeMap<(u64, u64, u16), T>,
}

impl<T> Default for Past<T> {
    fn default() -> Self {
        Self { by_end: BTreeMap::new() }
    }
}

impl<T> Past<T> {
    /// Adds one.
    pub fn insert(&mut self, past: &PastLife, packed: T) {
        self.by_end.insert((past.ended.at_unix_ms, past.who.epoch.0, past.who.id.get()), packed);
    }

    /// The lives to remove, oldest first, at most `batch`: those that ended more than `keep_ms` ago, and those in
    /// excess of `most`. They stay in this list until the caller has removed them from the store and calls
    /// [`Self::forget`].
    #[must_use]
    pub fn outdated(&self, now_ms: u64, keep_ms: u64, most: usize, batch: usize) -> Vec<(EndpointId, Epoch)> {
        let excess = self.by_end.len().saturating_sub(most);
        // Keys are ordered by age, so the first life to keep ends the search.
        let is_old =
            |(n, (ended, ..)): &(usize, &(u64, u64, u16))| *n < excess || ended.saturating_add(keep_ms) <= now_ms;
        self.by_end.keys().enumerate().take_while(is_old).take(batch).filter_map(|(_, key)| life_of(*key)).collect()
    }

    /// Forgets lives.
    pub fn forget(&mut self, lives: &[(EndpointId, Epoch)]) {
        if lives.is_empty() {
            return;
        }
        let lives: BTreeSet<_> = lives.iter().collect();
        self.by_end.retain(|key, _| life_of(*key).is_none_or(|life| !lives.contains(&life)));
    }

    /// Forgets the oldest one when there are `most` or more: then there is room for another.
    pub fn make_room(&mut self, most: usize) -> Option<(EndpointId, Epoch)> {
        let oldest = (self.by_end.len() >= most).then(|| self.by_end.pop_first()).flatten();
        oldest.and_then(|(key, _)| life_of(key))
    }

    /// All of them, the last that ended first.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.by_end.values().rev()
    }

    /// How many.
    #[must_use]
    pub fn len(&self) -> usize {
        self.by_end.len()
    }

    /// None.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_end.is_empty()
    }
}

fn life_of((_, epoch, id): (u64, u64, u16)) -> Option<(EndpointId, Epoch)> {
    Some((EndpointId::try_from(id).ok()?, Epoch(epoch)))
}

#[cfg(test)]
mod tests;
