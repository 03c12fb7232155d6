//! The model: what there is, and what may come of a step.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use wharf_core::{
    endpoint::{EndpointRecord, IpOwner},
    identity::Label,
    ids::{Attachment, EndpointId, Epoch},
    store::LeaseOwner,
};

use crate::{
    history::{ADDRESSES, Who},
    support::attachment,
};

/// An attachment of the histories.
pub(crate) fn attached(who: Who, network: u8) -> Attachment {
    let mut a = attachment(&container(who.container), &format!("eth{}", who.interface));
    a.network = format!("net{network}").parse().expect("network");
    a
}

pub(crate) fn container(n: u8) -> String {
    format!("c{n}")
}

/// The IPv4 addresses of the pool, beside the router's.
pub(crate) fn address(n: u8) -> IpAddr {
    [10, 88, 0, 2 + n % ADDRESSES].into()
}

/// How an endpoint is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Health {
    Well,
    /// Its container's namespace is gone, and with it its link.
    CutOff,
    /// A delete began and could not end. `intent`: what the store knows of it, NoIPRelease or not. `linked`: its link
    /// is still there.
    Going {
        intent: Option<bool>,
        linked: bool,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Endpoint {
    pub(crate) id: EndpointId,
    pub(crate) epoch: Epoch,
    pub(crate) attachment: Attachment,
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) of_caller: bool,
    pub(crate) labels: BTreeSet<Label>,
    pub(crate) health: Health,
    /// Starts in a row at which its delete failed.
    pub(crate) failed: u32,
}

impl Endpoint {
    pub(crate) fn of(record: &EndpointRecord) -> Self {
        Self {
            id: record.id,
            epoch: record.epoch,
            attachment: record.attachment.clone(),
            addresses: record.addresses().collect(),
            of_caller: record.ip_owner == IpOwner::Caller,
            labels: record.labels.clone(),
            health: Health::Well,
            failed: 0,
        }
    }

    fn owner(&self) -> LeaseOwner {
        LeaseOwner::Attachment { attachment: self.attachment.clone(), epoch: self.epoch }
    }
}

/// A deletion record that waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Queued {
    pub(crate) epoch: Option<Epoch>,
    pub(crate) other_boot: bool,
}

/// Everything that must be there, and nothing else may.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Model {
    pub(crate) endpoints: BTreeMap<Who, Endpoint>,
    /// Records out of service.
    pub(crate) aside: Vec<(Who, Endpoint)>,
    /// Addresses of callers, and in whose name.
    pub(crate) callers: BTreeMap<IpAddr, String>,
    /// Addresses on which the proxy listens.
    pub(crate) listeners: BTreeSet<IpAddr>,
    pub(crate) queue: BTreeMap<(Who, u8), Queued>,
    pub(crate) disk_full: bool,
    /// Attachments of which the undo of a create failed: something is left until their delete comes, an audit repairs,
    /// or the agent starts again.
    pub(crate) left: BTreeSet<(Who, u8)>,
    /// A start could not undo what was left: something may be left until the next.
    pub(crate) left_by_start: bool,
    pub(crate) last_epoch: u64,
}

impl Model {
    /// Something may be left of a create that failed.
    pub(crate) fn is_murky(&self) -> bool {
        self.left_by_start || !self.left.is_empty()
    }

    pub(crate) fn leases(&self) -> BTreeMap<IpAddr, LeaseOwner> {
        let callers = self.callers.iter().map(|(ip, name)| (*ip, LeaseOwner::Caller { name: name.clone() }));
        let all = self.endpoints.values().chain(self.aside.iter().map(|(_, e)| e));
        let own = all.filter(|e| !e.of_caller).flat_map(|e| e.addresses.iter().map(|ip| (*ip, e.owner())));
        callers.chain(own).collect()
    }

    /// A delete kept the address for another attachment than this.
    pub(crate) fn is_kept_for_another(&self, ip: IpAddr, attachment: &Attachment) -> bool {
        let owner = self.callers.get(&ip).map(|name| LeaseOwner::Caller { name: name.clone() });
        owner.is_some_and(|owner| owner.kept().is_some() && owner != LeaseOwner::kept_for(attachment))
    }

    /// Who speaks with an address.
    pub(crate) fn speaks(&self, ip: IpAddr) -> bool {
        self.endpoints.values().chain(self.aside.iter().map(|(_, e)| e)).any(|e| e.addresses.contains(&ip))
    }

    /// A new endpoint. What must be true of every one is asserted here.
    pub(crate) fn add(&mut self, who: Who, record: &EndpointRecord) {
        let endpoint = Endpoint::of(record);
        assert!(endpoint.epoch.0 > self.last_epoch, "epoch {} after {}", endpoint.epoch, self.last_epoch);
        self.last_epoch = endpoint.epoch.0;
        let others: Vec<Endpoint> = self.endpoints.values().chain(self.aside.iter().map(|(_, e)| e)).cloned().collect();
        assert!(others.iter().all(|e| e.id != endpoint.id), "id {} has two endpoints", endpoint.id);
        let leases = self.leases();
        for ip in &endpoint.addresses {
            assert!(others.iter().all(|e| !e.addresses.contains(ip)), "{ip} has two endpoints");
            let lease = leases.get(ip);
            if lease == Some(&LeaseOwner::kept_for(&endpoint.attachment)) {
                assert!(!endpoint.of_caller, "{ip} was kept for it");
                self.callers.remove(ip);
                continue;
            }
            let callers = lease.is_some_and(|l| matches!(l, LeaseOwner::Caller { .. }) && l.kept().is_none());
            assert_eq!(callers, endpoint.of_caller, "{ip} of {lease:?} went to an endpoint");
            assert!(callers || lease.is_none(), "{ip} of {lease:?} went to an endpoint");
        }
        assert_eq!(self.endpoints.insert(who, endpoint), None, "an attachment has two endpoints");
    }

    /// The endpoint is gone; its addresses are free or, if `keep`, a caller's.
    pub(crate) fn remove(&mut self, who: Who, keep: bool) {
        let Some(gone) = self.endpoints.remove(&who) else { return };
        if keep && !gone.of_caller {
            let LeaseOwner::Caller { name } = LeaseOwner::kept_for(&gone.attachment) else { return };
            self.callers.extend(gone.addresses.into_iter().map(|ip| (ip, name.clone())));
        }
    }

    /// An undisturbed delete of this attachment.
    pub(crate) fn delete(&mut self, who: Who, network: u8, keep: bool) {
        let wanted = attached(who, network);
        match self.endpoints.get(&who) {
            Some(there) if there.attachment != wanted => {}
            Some(_) if self.disk_full => self.half_deleted(who, None, false),
            Some(_) => self.remove(who, keep),
            // A record out of service goes when nobody else has the name.
            None if self.disk_full => {}
            None => {
                self.aside.retain(|(_, e)| e.attachment != wanted);
                self.left.remove(&(who, network));
            }
        }
    }

    /// The delete began and did not end. An intent that was written before stays as it was.
    pub(crate) fn half_deleted(&mut self, who: Who, intent: Option<bool>, linked: bool) {
        if let Some(there) = self.endpoints.get_mut(&who) {
            let (before, was_linked) = match there.health {
                Health::Going { intent, linked } => (intent, linked),
                Health::Well => (None, true),
                Health::CutOff => (None, false),
            };
            there.health = Health::Going { intent: intent.or(before), linked: linked && was_linked };
        }
    }

    /// The records of the queue are served, in no order that matters.
    pub(crate) fn drain(&mut self) {
        let mut stays = BTreeMap::new();
        for ((who, network), queued) in std::mem::take(&mut self.queue) {
            if queued.other_boot {
                continue;
            }
            let wanted = attached(who, network);
            let there = self.endpoints.get(&who);
            if there.is_some_and(|e| e.attachment != wanted || queued.epoch.is_some_and(|epoch| epoch != e.epoch)) {
                continue;
            }
            let is_aside = self.aside.iter().any(|(_, e)| e.attachment == wanted);
            let is_left = self.left.contains(&(who, network));
            let unfinished = self.disk_full && (there.is_some() || is_aside || is_left);
            self.delete(who, network, false);
            if unfinished {
                stays.insert((who, network), queued);
            }
        }
        self.queue = stays;
    }

    /// Records that a delete by the direct way has served.
    pub(crate) fn served(&mut self, who: Who, network: u8) {
        self.queue.remove(&(who, network));
    }

    /// A start: what was going or dead goes, unless the kernel refuses `calls` of that kind.
    pub(crate) fn start(&mut self, refused: bool) {
        self.left_by_start = false;
        self.left.clear();
        self.disk_full = false;
        for who in self.endpoints.keys().copied().collect::<Vec<_>>() {
            let Some(there) = self.endpoints.get_mut(&who) else { continue };
            let intent = match there.health {
                Health::Well => {
                    there.failed = 0;
                    continue;
                }
                // Its delete never got as far as the store, nor as far as its link: it lives on.
                Health::Going { intent: None, linked: true } => {
                    (there.health, there.failed) = (Health::Well, 0);
                    continue;
                }
                Health::Going { intent, .. } => intent,
                Health::CutOff => None,
            };
            if !refused {
                self.remove(who, intent.unwrap_or(false));
                continue;
            }
            there.failed += 1;
            let linked = matches!(there.health, Health::Going { linked: true, .. });
            there.health = Health::Going { intent: Some(intent.unwrap_or(false)), linked };
        }
        self.drain();
    }
}
