//! Wanted and acknowledged state of one resource type, and its waits.
//!
//! Versions count changes over all resources of the type. A removed entry stays until Envoy acknowledges the removal.
//! Acknowledgements are per resource: of a response that it refuses, Envoy applies the good listeners.

use std::collections::BTreeMap;

use envoy_types::pb::google::protobuf::Any;

/// Greater than all versions of earlier servers.
pub(crate) type Version = u64;

pub(crate) const LISTENER_TYPE: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";
pub(crate) const CLUSTER_TYPE: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";

pub(crate) const RUNTIME_TYPE: &str = "type.googleapis.com/envoy.service.runtime.v3.Runtime";

pub(crate) type Carried = (String, Version);

/// Why a wait failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WaitError {
    /// Envoy refused this or a later change, and keeps the previous version.
    #[error("Envoy refused {listener}: {reason}")]
    Refused {
        /// Listener name (`egress-15001`).
        listener: String,
        /// Envoy's message, cut to 1 KiB.
        reason: String,
    },
    /// The xDS server ended.
    #[error("the wait for Envoy's answer about {listener} was cancelled: the xDS server ended")]
    Cancelled {
        /// Listener name.
        listener: String,
    },
    /// The deadline passed.
    #[error("Envoy did not answer about {listener} within {} ms; see the proxy's status", .after.as_millis())]
    TimedOut {
        /// Listener name.
        listener: String,
        /// Duration of the wait.
        after: std::time::Duration,
    },
}

/// Never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct WaitId(u64);

impl WaitId {
    pub(crate) const fn number(self) -> u64 {
        self.0
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Registered {
    /// Envoy has the version.
    Ended,
    Pending(WaitId),
}

pub(crate) type Ended = Vec<(WaitId, Result<(), WaitError>)>;

#[derive(Debug)]
pub(crate) struct Ledgers {
    pub(crate) listeners: Ledger,
    pub(crate) clusters: Ledger,
    pub(crate) runtime: Ledger,
}

impl Ledgers {
    pub(crate) const fn new(first: Version) -> Self {
        Self { listeners: Ledger::new(first), clusters: Ledger::new(first), runtime: Ledger::new(first) }
    }

    pub(crate) const fn process_began(&mut self) {
        self.listeners.process_began();
        self.clusters.process_began();
        self.runtime.process_began();
    }

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
    pub(crate) version: Version,
    pub(crate) resource: Option<Any>,
    /// Sent to the current Envoy.
    pub(crate) offered: bool,
    /// Acknowledged version, or 0.
    accepted: Version,
    /// Last refusal, unless followed by an acknowledgement.
    refused: Option<(Version, String)>,
}

impl Entry {
    fn refusal(&self) -> Option<&str> {
        self.refused.as_ref().filter(|(version, _)| *version == self.version).map(|(_, reason)| reason.as_str())
    }
}

#[derive(Debug)]
struct Pending {
    name: String,
    version: Version,
    /// Envoy's end counts as acknowledgement.
    removal: bool,
}

#[derive(Debug)]
pub(crate) struct Ledger {
    first: Version,
    version: Version,
    entries: BTreeMap<String, Entry>,
    waits: BTreeMap<WaitId, Pending>,
    next_wait: u64,
    process: bool,
    /// Envoy can have an earlier server's resources.
    inherited: bool,
}

impl Ledger {
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

    pub(crate) const fn gave(&self, version: Version) -> bool {
        self.first <= version && version <= self.version
    }

    pub(crate) const fn entries(&self) -> &BTreeMap<String, Entry> {
        &self.entries
    }

    /// Last set and last acknowledged version (0: none); both maximal for an unknown resource.
    pub(crate) fn versions(&self, name: &str) -> (Version, Version) {
        self.entries.get(name).map_or((Version::MAX, Version::MAX), |entry| (entry.version, entry.accepted))
    }

    pub(crate) fn pending(&self) -> usize {
        self.waits.len()
    }

    /// With the reason if refused. Without Envoy, removed resources are excluded.
    pub(crate) fn unacknowledged(&self) -> impl Iterator<Item = (&str, Option<&str>)> {
        self.entries.iter().filter_map(|(name, entry)| {
            let behind = entry.accepted < entry.version && (self.process || entry.resource.is_some());
            behind.then_some((name.as_str(), entry.refusal()))
        })
    }

    pub(crate) fn refusals(&self) -> impl Iterator<Item = (&str, &str)> {
        self.entries.iter().filter_map(|(name, entry)| Some((name.as_str(), entry.refused.as_ref()?.1.as_str())))
    }

    /// Equal content is a change only after a refusal, whose cause (a used port) can be gone.
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

    /// `removal`: the change only removes.
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

    pub(crate) fn cancel(&mut self, id: WaitId) {
        self.waits.remove(&id);
    }

    pub(crate) const fn process_began(&mut self) {
        self.process = true;
    }

    pub(crate) const fn inherit(&mut self) {
        self.inherited = true;
    }

    pub(crate) const fn is_inherited(&self) -> bool {
        self.inherited
    }

    /// All is acknowledged: earlier servers' resources are gone, unless Envoy refused a successor.
    pub(crate) fn caught_up(&mut self) {
        self.inherited &= self.entries.values().any(|entry| entry.offered && entry.accepted == 0);
    }

    /// Ends waits for removals; others continue with the next Envoy.
    pub(crate) fn process_ended(&mut self) -> Ended {
        (self.process, self.inherited) = (false, false);
        for entry in self.entries.values_mut() {
            (entry.offered, entry.accepted, entry.refused) = (false, 0, None);
        }
        self.entries.retain(|_, entry| entry.resource.is_some());
        let entries = &self.entries;
        take(&mut self.waits, |wait| (wait.removal || !entries.contains_key(&wait.name)).then_some(Ok(())))
    }

    pub(crate) fn offered(&mut self, carried: &[Carried]) {
        for (name, _) in carried {
            if let Some(entry) = self.entries.get_mut(name) {
                entry.offered = true;
            }
        }
    }

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
