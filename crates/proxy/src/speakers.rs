//! Addresses that Envoy may serve.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use crate::{ledger::Version, listener::ListenerKey};

/// The last version that served each address; versions since Envoy's last acknowledgement may be in force.
#[derive(Debug, Default)]
pub(crate) struct Speakers {
    listeners: BTreeMap<ListenerKey, BTreeMap<IpAddr, Version>>,
}

impl Speakers {
    /// `accepted`: last acknowledged version.
    pub(crate) fn set(
        &mut self,
        key: ListenerKey,
        version: Version,
        addresses: impl IntoIterator<Item = IpAddr>,
        accepted: Version,
    ) {
        let last = self.listeners.entry(key).or_default();
        last.retain(|_, version| *version >= accepted);
        last.extend(addresses.into_iter().map(|address| (address, version)));
        if last.is_empty() {
            self.listeners.remove(&key);
        }
    }

    pub(crate) fn process_ended(&mut self, newest: impl Fn(ListenerKey) -> Version) {
        self.listeners.retain(|key, last| {
            last.retain(|_, version| *version >= newest(*key));
            !last.is_empty()
        });
    }

    pub(crate) fn of(&self, address: IpAddr, accepted: impl Fn(ListenerKey) -> Version) -> BTreeSet<ListenerKey> {
        let may = |(key, last): (&ListenerKey, &BTreeMap<IpAddr, Version>)| {
            last.get(&address).is_some_and(|version| *version >= accepted(*key)).then_some(*key)
        };
        self.listeners.iter().filter_map(may).collect()
    }
}
