//! What must hold after every step.

use std::collections::{BTreeMap, BTreeSet};

use wharf_core::{
    endpoint::parse_host_ifname,
    ids::EndpointId,
    kernel::{EndpointKernel as _, NodeKernel as _},
    store::{LeaseOwner, Snapshot},
};
use wharf_kit::sync::lock;

use super::Play;
use crate::expected::{Endpoint, Health, Model};

impl Play {
    /// Holds memory, store and kernel against the model.
    pub(super) fn check(&self) {
        self.run(self.settled());
        if let Err(difference) = self.compare(&self.model) {
            panic!("{difference}");
        }
        self.nobody_shares_an_address();
        self.kernel_holds_what_it_should();
        self.policy_is_in_force();
        self.audit_finds_nothing_new();
    }

    /// The difference between a model and what there is, if any.
    pub(super) fn compare(&self, model: &Model) -> Result<(), String> {
        let agent = &self.life().agent;
        let alike = |what: &str, is: String, should: String| {
            if is == should { Ok(()) } else { Err(format!("{what}:\n  is     {is}\n  should {should}")) }
        };
        let expected: BTreeMap<EndpointId, &Endpoint> = model.endpoints.values().map(|e| (e.id, e)).collect();
        let expected = expected.values().map(|e| in_words(e)).collect::<Vec<_>>().join("; ");
        let running = agent.life.endpoints.registry.list();
        let running = running.iter().map(|h| h.shared.read(|v| in_words(&Endpoint::of(&v.record))));
        alike("endpoints in memory", running.collect::<Vec<_>>().join("; "), expected.clone())?;

        let leases = model.leases();
        let in_memory = lock(&agent.life.network.addresses.ipam).owned_by(|o| *o != LeaseOwner::Node);
        let in_memory: BTreeMap<_, _> = in_memory.into_iter().map(|l| (l.ip, l.owner)).collect();
        if model.is_murky() {
            // An undo that has not ended still holds the kept addresses that its create took over.
            let holds = |is: &LeaseOwner, kept: &LeaseOwner| match is {
                LeaseOwner::Attachment { attachment, .. } => LeaseOwner::kept_for(attachment) == *kept,
                LeaseOwner::Caller { .. } | LeaseOwner::Node => false,
            };
            let is_there = |ip, owner| in_memory.get(ip).is_some_and(|is| is == owner || holds(is, owner));
            let lost = leases.iter().find(|(ip, owner)| !is_there(ip, owner));
            alike("a lease in memory", "gone".into(), lost.map_or("gone".into(), |l| format!("{l:?}")))?;
        } else {
            alike("leases in memory", format!("{in_memory:?}"), format!("{leases:?}"))?;
        }

        let queued = agent.life.endpoints.deletions.queue.list().map_err(|e| e.to_string())?.len();
        alike("deletion records", queued.to_string(), model.queue.len().to_string())?;
        if model.disk_full {
            // A store that could not be written may be unreadable until the disk has space.
            return Ok(());
        }
        let snapshot = self.snapshot();
        let mut stored: Vec<_> = snapshot.endpoints.iter().map(Endpoint::of).collect();
        stored.sort_by_key(|e| e.id);
        let stored = stored.iter().map(in_words).collect::<Vec<_>>().join("; ");
        alike("endpoints in the store", stored, expected)?;
        let stored: BTreeMap<_, _> = snapshot.leases.iter().map(|l| (l.ip, l.owner.clone())).collect();
        alike("leases in the store", format!("{stored:?}"), format!("{leases:?}"))?;
        let aside: BTreeSet<_> = model.aside.iter().map(|(_, e)| e.id).collect();
        let is: BTreeSet<_> = snapshot.out_of_service.iter().map(|q| q.id).collect();
        alike("records out of service", format!("{is:?}"), format!("{aside:?}"))?;
        self.compare_intents(model, &snapshot)
    }

    fn compare_intents(&self, model: &Model, snapshot: &Snapshot) -> Result<(), String> {
        for (id, epoch, intent) in &snapshot.intents {
            let of = model.endpoints.values().find(|e| e.id == *id && e.epoch == *epoch);
            let explained = of.is_some_and(|e| matches!(e.health, Health::Going { .. }));
            if !explained && !model.is_murky() {
                return Err(format!("an intent was never closed: {id} {epoch} {intent:?}"));
            }
        }
        for (id, failure) in &snapshot.failures {
            let of = model.endpoints.values().find(|e| e.id == *id);
            if of.is_none_or(|e| e.failed == 0) {
                return Err(format!("a failure is counted against nobody: endpoint {id} {failure:?}"));
            }
        }
        Ok(())
    }

    fn nobody_shares_an_address(&self) {
        let ipam = lock(&self.life().agent.life.network.addresses.ipam);
        for rest in ipam.resting() {
            assert!(ipam.get(rest.rest.ip).is_none(), "{} rests, and is leased", rest.rest.ip);
        }
        let mut seen = BTreeSet::new();
        let all = self.model.endpoints.values().chain(self.model.aside.iter().map(|(_, e)| e));
        for ip in all.flat_map(|e| e.addresses.iter()) {
            assert!(seen.insert(*ip), "{ip} is in two hands");
            assert!(ipam.get(*ip).is_some(), "{ip} is spoken with, and not leased");
        }
    }

    fn kernel_holds_what_it_should(&self) {
        let kernel = &self.machine.kernel;
        let dump = self.run(kernel.dump()).expect("dump");
        let links: BTreeSet<EndpointId> =
            dump.links.iter().filter_map(|l| parse_host_ifname(&l.name)).map(|(id, _)| id).collect();
        for well in self.model.endpoints.values().filter(|e| e.health == Health::Well) {
            let record = self.life().agent.handle(well.id.get()).shared.read(|v| v.record.clone());
            let mismatches = self.run(kernel.observe_endpoint(&record)).expect("observe");
            assert_eq!(mismatches, [], "{}", well.attachment);
            assert!(links.contains(&well.id), "{} has no link", well.attachment);
        }
        if self.model.is_murky() {
            return;
        }
        let known: BTreeSet<EndpointId> =
            self.model.endpoints.values().chain(self.model.aside.iter().map(|(_, e)| e)).map(|e| e.id).collect();
        assert_eq!(dump.links.len(), links.len(), "two links of one endpoint: {:?}", dump.links);
        assert!(links.is_subset(&known), "links of {links:?}, endpoints {known:?}");
        let known_text: BTreeSet<String> = known.iter().map(ToString::to_string).collect();
        for (directory, _) in &dump.pins {
            assert!(known_text.contains(directory), "pins of endpoint {directory}, which is not there");
        }
        let known_numbers: BTreeSet<u32> = known.iter().map(|id| u32::from(id.get())).collect();
        for row in &dump.endpoint_rows {
            assert!(known_numbers.contains(&row.endpoint_id), "a row of nobody: {row:?}");
        }
        let slots = self.run(kernel.call_slots()).expect("slots");
        assert!(slots.iter().all(|slot| known_numbers.contains(slot)), "slots {slots:?}");
    }

    /// What is known to be amiss is named, and nothing else is.
    fn audit_finds_nothing_new(&self) {
        if self.model.disk_full || self.model.is_murky() {
            return;
        }
        let amiss = self.model.endpoints.values().filter(|e| e.health != Health::Well);
        let amiss: Vec<String> =
            amiss.chain(self.model.aside.iter().map(|(_, e)| e)).map(|e| e.attachment.to_string()).collect();
        let findings = self.run(self.life().agent.findings(false));
        let new: Vec<_> = findings
            .into_iter()
            .filter(|f| !amiss.iter().any(|a| f.owner.as_ref().is_some_and(|owner| owner.contains(a))))
            .collect();
        assert_eq!(new, [], "audit; known to be amiss are {amiss:?}");
    }
}

fn in_words(e: &Endpoint) -> String {
    let caller = if e.of_caller { " of a caller" } else { "" };
    let labels: Vec<String> = e.labels.iter().map(ToString::to_string).collect();
    format!("{}@{} {} {:?}{caller} {}", e.id, e.epoch, e.attachment, e.addresses, labels.join(","))
}
