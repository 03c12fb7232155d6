//! The timeline of an endpoint: a bounded list of entries, stored until a day after its delete.
//!
//! Pure. Times are Unix milliseconds; only the retention of ended lives depends on them.

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

/// Entries between the create and the last delete are dropped first.
pub const MAX_ENTRIES: usize = 64;
/// Longest entry, bytes.
pub const MAX_TEXT: usize = 400;
/// Most ended lives.
pub const MAX_PAST: usize = 4_096;
/// JSON bytes; fits all steps of a pod's create and delete. At least two rows share a store page (4 KiB).
pub const MAX_ENDED: usize = 1_340;
/// Bytes, for names of any length.
const MIN_ENTRIES_BYTES: usize = 400;

/// Operation of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Operation {
    Create,
    /// Undo of a failed create.
    Undo,
    /// Build.
    Regenerate,
    /// Labels changed.
    Relabel,
    /// At an agent start.
    Restore,
    Delete,
    /// A check, an alarm.
    Notice,
}

impl Operation {
    /// In labels and output.
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

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// Success.
    #[default]
    Ok,
    /// Unexpected but harmless.
    Warning,
    Failed,
}

/// A timeline entry. `Deserialize` also reads the old JSON format.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Entry {
    /// End, milliseconds since the Unix epoch.
    #[serde(rename = "at")]
    pub at_unix_ms: u64,
    #[serde(rename = "op")]
    pub operation: Operation,
    /// Step or state machine event.
    pub phase: String,
    /// Microseconds, if any.
    #[serde(rename = "us", default)]
    pub took_us: Option<u64>,
    #[serde(default)]
    pub outcome: Outcome,
    /// May be empty.
    #[serde(default)]
    pub text: String,
}

/// Entries, oldest first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Written", into = "Written")]
pub struct Entries {
    list: Vec<Entry>,
    left_out: u64,
}

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

/// Milliseconds since the previous entry, operation, phase, duration; then outcome and text, unless a plain success.
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
    /// Skips a repeated text. Above [`MAX_ENTRIES`], drops the oldest outside the create and the last delete, else the
    /// second.
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

    fn least_needed(&self) -> usize {
        // Repeated delete requests begin new deletes; only the last counts.
        let last_delete = self.list.iter().rposition(|e| e.operation == Operation::Delete && e.phase == DELETE_BEGINS);
        let is_needed = |(at, e): (usize, &Entry)| match e.operation {
            Operation::Create => true,
            Operation::Delete => last_delete.is_none_or(|begun| at >= begun),
            _ => false,
        };
        self.list.iter().enumerate().position(|e| !is_needed(e)).unwrap_or(1)
    }

    /// Drops entries to fit `budget` bytes of JSON, least informative first. Cuts the last failure.
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
            // A JSON character takes up to six bytes.
            cut(&mut entry.text, (budget / 6).min(MAX_TEXT));
        }
        self.list.shrink_to_fit();
    }

    /// Oldest first.
    #[must_use]
    pub fn list(&self) -> &[Entry] {
        &self.list
    }

    /// Dropped entries.
    #[must_use]
    pub fn left_out(&self) -> u64 {
        self.left_out
    }
}

/// First phase of a delete.
pub const DELETE_BEGINS: &str = "write-intent";

fn cut(text: &mut String, most: usize) {
    if text.len() > most {
        let end = (0..=most.saturating_sub(3)).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
        text.push_str("...");
    }
}

/// Without quotes, bytes.
fn json_len(text: &str) -> usize {
    let one = |c: char| match c {
        '"' | '\\' => 2,
        c if c.is_ascii_control() => 6,
        c => c.len_utf8(),
    };
    text.chars().map(one).sum()
}

impl Entry {
    fn says_nothing(&self) -> bool {
        self.outcome == Outcome::Ok && self.text.is_empty()
    }

    /// JSON bytes, for a time difference of up to a minute.
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
    /// Without remains.
    Deleted,
    /// The create failed and was undone.
    CreateFailed,
    /// The record was missing at an agent start.
    Unnoted,
}

/// End of a life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Ended {
    /// Milliseconds since the Unix epoch.
    pub at_unix_ms: u64,
    /// Cause.
    pub how: End,
}

/// Identifies an ended life.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Who {
    /// Reused by other lives.
    pub id: EndpointId,
    /// Identifies the life together with the id.
    pub epoch: Epoch,
    /// CNI key.
    pub attachment: Attachment,
    /// IPv4 first.
    pub addresses: Vec<IpAddr>,
    /// None for an interrupted create.
    pub identity: Option<Identity>,
    /// Host side's name.
    pub host_ifname: Option<IfName>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_namespace: Option<String>,
    /// Milliseconds since the Unix epoch.
    pub created_unix_ms: u64,
}

impl Who {
    /// From a record.
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

    /// Approximate JSON bytes without entries.
    fn written_len(&self) -> usize {
        let pod = [&self.pod_name, &self.pod_namespace].into_iter().flatten().map(|name| 18 + json_len(name));
        let a = &self.attachment;
        let names = a.network.as_str().len() + a.container_id.as_str().len() + a.ifname.as_str().len();
        290 + names + 20 * self.addresses.len() + pod.sum::<usize>()
    }
}

/// A stored life.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Life {
    /// Identification.
    pub who: Who,
    /// End, if ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<Ended>,
    pub entries: Entries,
}

impl Life {
    /// To [`MAX_ENDED`] bytes.
    pub fn trim(&mut self) {
        self.entries.trim(MAX_ENDED.saturating_sub(self.who.written_len()).max(MIN_ENTRIES_BYTES));
    }
}

/// A life without an endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PastLife {
    /// Identification.
    pub who: Who,
    pub ended: Ended,
}

/// At most [`MAX_PAST`] ended lives, in the caller's form.
#[derive(Debug, Clone)]
pub struct Past<T> {
    /// End time (Unix milliseconds), epoch, id.
    by_end: BTreeMap<(u64, u64, u16), T>,
}

impl<T> Default for Past<T> {
    fn default() -> Self {
        Self { by_end: BTreeMap::new() }
    }
}

impl<T> Past<T> {
    /// Adds a life.
    pub fn insert(&mut self, past: &PastLife, packed: T) {
        self.by_end.insert((past.ended.at_unix_ms, past.who.epoch.0, past.who.id.get()), packed);
    }

    /// At most `batch` lives to remove, oldest first: ended more than `keep_ms` ago, or above `most`. [`Self::forget`]
    /// them after their removal from the store.
    #[must_use]
    pub fn outdated(&self, now_ms: u64, keep_ms: u64, most: usize, batch: usize) -> Vec<(EndpointId, Epoch)> {
        let excess = self.by_end.len().saturating_sub(most);
        // Keys are in age order.
        let is_old =
            |(n, (ended, ..)): &(usize, &(u64, u64, u16))| *n < excess || ended.saturating_add(keep_ms) <= now_ms;
        self.by_end.keys().enumerate().take_while(is_old).take(batch).filter_map(|(_, key)| life_of(*key)).collect()
    }

    /// Removes lives.
    pub fn forget(&mut self, lives: &[(EndpointId, Epoch)]) {
        if lives.is_empty() {
            return;
        }
        let lives: BTreeSet<_> = lives.iter().collect();
        self.by_end.retain(|key, _| life_of(*key).is_none_or(|life| !lives.contains(&life)));
    }

    /// Removes the oldest of `most` or more lives.
    pub fn make_room(&mut self, most: usize) -> Option<(EndpointId, Epoch)> {
        let oldest = (self.by_end.len() >= most).then(|| self.by_end.pop_first()).flatten();
        oldest.and_then(|(key, _)| life_of(key))
    }

    /// Latest end first.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.by_end.values().rev()
    }

    /// Number of lives.
    #[must_use]
    pub fn len(&self) -> usize {
        self.by_end.len()
    }

    /// True without lives.
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
