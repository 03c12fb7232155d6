//! What Envoy shall have of one type of resource, what it has acknowledged, and who waits for that. Pure: no time, no tasks.
//!
//! Versions count changes, over all resources of the type. A resource's version is that of its last change, also of its removal:
//! an entry stays until Envoy has acknowledged that it is gone. Acknowledgements are kept by resource and not as one
//! number, because Envoy applies the good listeners of a response that it refuses for a bad one.

use std::collections::BTreeMap;

use envoy_types::pb::google::protobuf::Any;

/// Number of a change. They start at a number that no earlier server of this boot reached, so that what an Envoy says it
/// has from that server is never taken for ours.
pub(crate) type Version = u64;

/// Type of a listener in requests and responses.
pub(crate) const LISTENER_TYPE: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";
/// Type of a cluster.
pub(crate) const CLUSTER_TYPE: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";

/// Type of a layer of runtime values.
pub(crate) const RUNTIME_TYPE: &str = "type.googleapis.com/envoy.service.runtime.v3.Runtime";

/// A resource's name and the version of it that a response carried.
pub(crate) type Carried = (String, Version);

/// How a wait ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WaitError {
    /// Envoy refused the change, or a later one of the same listener. What it had before stays in force.
    #[error("Envoy refused {listener}: {reason}")]
    Refused {
        /// The listener (`egress-15001`).
        listener: String,
        /// Envoy's words, cut to 1 KiB.
        reason: String,
    },
    /// The proxy's server ended.
    #[error("the wait for Envoy's answer about {listener} was cancelled: the xDS server ended")]
    Cancelled {
        /// The listener.
        listener: String,
    },
    /// The deadline passed.
    #[error("Envoy did not answer about {listener} within {} ms; see the proxy's status", .after.as_millis())]
    TimedOut {
        /// The listener.
        listener: String,
        /// How long the wait lasted.
        after: std::time::Duration,
    },
}

/// Names a wait; never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct WaitId(u64);

impl WaitId {
    pub(crate) const fn number(self) -> u64 {
        self.0
    }
}

/// What became of a wait that was to be.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Registered {
    /// Envoy has it already.
    Ended,
    /// It ends later, unless it is cancelled.
    Pending(WaitId),
}

/// Waits that ended, each once.
pub(crate) type Ended = Vec<(WaitId, Result<(), WaitError>)>;

/// The types that this server has.
#[derive(Debug)]
pub(crate) struct Ledgers {
    pub(crate) listeners: Ledger,
    pub(crate) clusters: Ledger,
    pub(crate) runtime: Ledger,
}

impl Ledgers {
    /// Nothing of any type, as of that version.
    pub(crate) const fn new(first: Version) -> Self {
        Self { listeners: Ledger::new(first), clusters: Ledger::new(first), runtime: Ledger::new(first) }
    }

    /// An Envoy is there, which has nothing of this yet.
    pub(crate) const fn process_began(&mut self) {
        self.listeners.process_began();
        self.clusters.process_began();
        self.runtime.process_began();
    }

    /// That of a type, if there is one.
    pub(crate) fn of(&mut self, type_url: &str) -> Option<&mut Ledger> {
        match type_url {
            LISTENER_TYPE => Some(&mut self.listeners),
            CLUSTER_TYPE => Some(&mut self.clusters),
            RUNTIME_TYPE => Some(&mut self.runtime),
            _ => None,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Entry {
    /// Of the last change.
    pub(crate) version: Version,
    /// What Envoy shall have; `None` if nothing.
    pub(crate) resource: Option<Any>,
    /// Whether the present Envoy was sent any version. One that did not say so may have it all the same: what it applied of a
    /// response that it refused for another resource, it does not count as its own.
    pub(crate) offered: bool,
    /// The last version that Envoy acknowledged, 0 if none.
    accepted: Version,
    /// The last version that Envoy refused, if none was accepted since.
    refused: Option<(Version, String)>,
}

impl Entry {
    /// Why Envoy refused the last change, if it did.
    fn refusal(&self) -> Option<&str> {
        self.refused.as_ref().filter(|(version, _)| *version == self.version).map(|(_, reason)| reason.as_str())
    }
}

#[derive(Debug)]
struct Pending {
    name: String,
    version: Version,
    /// Whether an Envoy that has ended is as good as one that acknowledged.
    removal: bool,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Ledger {
    first: Version,
    version: Version,
    entries: BTreeMap<String, Entry>,
    waits: BTreeMap<WaitId, Pending>,
    next_wait: u64,
    /// Whether an Envoy lives that may have some of it.
    process: bool,
    /// Whether that Envoy may have what an earlier server told it.
    inherited: bool,
}

impl Ledger {
    /// Nothing, as of that version.
    pub(crate) const fn new(first: Version) -> Self {
        Self {
            first,
            version: first,
            entries: BTreeMap::new(),
            waits: BTreeMap::new(),
            next_wait: 0,
            process: false,
            inherited: false,
        }
    }

    pub(crate) const fn version(&self) -> Version {
        self.version
    }

    /// Whether this ledger gave that version.
    pub(crate) const fn gave(&self, version: Version) -> bool {
        self.first <= version && version <= self.version
    }

    pub(crate) const fn entries(&self) -> &BTreeMap<String, Entry> {
        &self.entries
    }

    /// The version of a resource that was set last, and the one that Envoy acknowledged last (0 if none). Of a resource that is not
    /// there, and that Envoy does not have, both are beyond every other version.
    pub(crate) fn versions(&self, name: &str) -> (Version, Version) {
        self.entries.get(name).map_or((Version::MAX, Version::MAX), |entry| (entry.version, entry.accepted))
    }

    pub(crate) fn pending(&self) -> usize {
        self.waits.len()
    }

    /// The resources of which Envoy has not the last version, with the reason if it refused that version. An Envoy that has ended has none of those that
    /// are gone.
    pub(crate) fn unacknowledged(&self) -> impl Iterator<Item = (&str, Option<&str>)> {
        self.entries.iter().filter_map(|(name, entry)| {
            let behind = entry.accepted < entry.version && (self.process || entry.resource.is_some());
            behind.then_some((name.as_str(), entry.refusal()))
        })
    }

    /// The last refusal of each resource that is still refused.
    pub(crate) fn refusals(&self) -> impl Iterator<Item = (&str, &str)> {
        self.entries.iter().filter_map(|(name, entry)| Some((name.as_str(), entry.refused.as_ref()?.1.as_str())))
    }

    /// Changes what Envoy shall have under that name. A resource equal to the present one is no change, unless Envoy refused
    /// it: then it is sent once more, because what Envoy lacked (a free port) may be there by now.
    pub(crate) fn set(&mut self, name: &str, resource: Option<Any>) {
        let same = match self.entries.get(name) {
            Some(entry) => entry.resource == resource && entry.refusal().is_none(),
            None => resource.is_none(),
        };
        if same {
            return;
        }
        self.version = self.version.saturating_add(1);
        let version = self.version;
        let entry = self.entries.entry(name.to_owned()).or_insert(Entry {
            version,
            resource: None,
            offered: false,
            accepted: 0,
            refused: None,
        });
        (entry.version, entry.resource) = (version, resource);
        self.forget_removed(name);
    }

    /// A wait until Envoy has what was last set under that name. `removal`: only less was wanted than before.
    pub(crate) fn wait(&mut self, name: &str, removal: bool) -> Registered {
        let Some(entry) = self.entries.get(name) else { return Registered::Ended };
        if entry.accepted >= entry.version || (removal && !self.process) {
            return Registered::Ended;
        }
        let id = WaitId(self.next_wait);
        self.next_wait = self.next_wait.saturating_add(1);
        self.waits.insert(id, Pending { name: name.to_owned(), version: entry.version, removal });
        Registered::Pending(id)
    }

    /// Nobody waits any more.
    pub(crate) fn cancel(&mut self, id: WaitId) {
        self.waits.remove(&id);
    }

    /// An Envoy is there, which has nothing of this yet.
    pub(crate) const fn process_began(&mut self) {
        self.process = true;
    }

    /// An earlier server told the Envoy that is there what nobody here knows.
    pub(crate) const fn inherit(&mut self) {
        self.inherited = true;
    }

    /// Whether the Envoy may still have that.
    pub(crate) const fn is_inherited(&self) -> bool {
        self.inherited
    }

    /// The Envoy acknowledged a response after which nothing was left to send: it has nothing of an earlier server any more, but
    /// for what it refused the successor of.
    pub(crate) fn caught_up(&mut self) {
        self.inherited &= self.entries.values().any(|entry| entry.offered && entry.accepted == 0);
    }

    /// The Envoy has ended, and with it everything that it had. Waits for less are over; waits for more go on, for the next one.
    pub(crate) fn process_ended(&mut self) -> Ended {
        (self.process, self.inherited) = (false, false);
        for entry in self.entries.values_mut() {
            (entry.offered, entry.accepted, entry.refused) = (false, 0, None);
        }
        self.entries.retain(|_, entry| entry.resource.is_some());
        let entries = &self.entries;
        take(&mut self.waits, |wait| (wait.removal || !entries.contains_key(&wait.name)).then_some(Ok(())))
    }

    /// These are on their way to Envoy.
    pub(crate) fn offered(&mut self, carried: &[Carried]) {
        for (name, _) in carried {
            if let Some(entry) = self.entries.get_mut(name) {
                entry.offered = true;
            }
        }
    }

    /// Envoy has these.
    pub(crate) fn accepted(&mut self, carried: &[Carried]) -> Ended {
        let mut ended = Ended::new();
        for (name, version) in carried {
            let Some(entry) = self.entries.get_mut(name) else { continue };
            entry.accepted = entry.accepted.max(*version);
            entry.refused.take_if(|(refused, _)| *refused <= *version);
            ended.extend(take(&mut self.waits, |wait| {
                (wait.name == *name && wait.version <= *version).then_some(Ok(()))
            }));
            self.forget_removed(name);
        }
        ended
    }

    /// Envoy refused these, for that reason.
    pub(crate) fn refused(&mut self, carried: &[Carried], reason: &str) -> Ended {
        let mut ended = Ended::new();
        for (name, version) in carried {
            let Some(entry) = self.entries.get_mut(name).filter(|entry| entry.accepted < *version) else { continue };
            entry.refused = Some((*version, reason.to_owned()));
            ended.extend(take(&mut self.waits, |wait| {
                (wait.name == *name && wait.version <= *version).then(|| Err(refused(name, reason)))
            }));
        }
        ended
    }

    /// An entry without a resource stays only while Envoy may have one.
    fn forget_removed(&mut self, name: &str) {
        let gone = |entry: &Entry| entry.resource.is_none() && (!self.process || entry.accepted >= entry.version);
        if self.entries.get(name).is_some_and(gone)
            && !self.waits.values().any(|wait| wait.name == name && !wait.removal)
        {
            self.entries.remove(name);
        }
    }
}

fn refused(name: &str, reason: &str) -> WaitError {
    WaitError::Refused { listener: name.to_owned(), reason: reason.to_owned() }
}

/// Takes out the waits that `end` has an end for.
fn take(
    waits: &mut BTreeMap<WaitId, Pending>,
    mut end: impl FnMut(&Pending) -> Option<Result<(), WaitError>>,
) -> Ended {
    let mut ended = Ended::new();
    waits.retain(|id, wait| match end(wait) {
        Some(result) => {
            ended.push((*id, result));
            false
        }
        None => true,
    });
    ended
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "egress-1";

    fn content(content: u8) -> Option<Any> {
        Some(Any { type_url: LISTENER_TYPE.to_owned(), value: vec![content] })
    }

    fn told(ledger: &Ledger) -> Vec<(&str, Option<&str>)> {
        ledger.unacknowledged().collect()
    }

    #[test]
    fn a_refusal_is_told_of_the_version_that_was_refused_and_of_no_later_one() {
        let mut ledger = Ledger::new(1);
        ledger.process_began();
        ledger.set(NAME, content(1));
        assert_eq!(told(&ledger), [(NAME, None)]);
        let refused = vec![(NAME.to_owned(), ledger.version())];
        ledger.refused(&refused, "no");
        assert_eq!(told(&ledger), [(NAME, Some("no"))]);
        ledger.set(NAME, content(2));
        assert_eq!(told(&ledger), [(NAME, None)], "the later version is not answered");
        let later = vec![(NAME.to_owned(), ledger.version())];
        ledger.accepted(&later);
        assert_eq!(told(&ledger), []);
    }

    #[test]
    fn what_was_refused_is_sent_once_more_when_it_is_asked_for_again() {
        let mut ledger = Ledger::new(1);
        ledger.process_began();
        ledger.set(NAME, content(1));
        let sent = ledger.version();
        ledger.set(NAME, content(1));
        assert_eq!(ledger.version(), sent, "no change");
        ledger.refused(&[(NAME.to_owned(), sent)], "no");
        ledger.set(NAME, content(1));
        assert_eq!(ledger.version(), sent + 1, "it is sent again");
        ledger.set(NAME, content(1));
        assert_eq!(ledger.version(), sent + 1, "it is on its way");
    }
}
