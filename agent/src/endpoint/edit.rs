//! Changes of labels, policy enforcement, named ports and source prefixes, by clients and by the pod's row.

use std::{collections::BTreeSet, net::IpAddr, time::Duration};

use tokio::time::{Instant, timeout};
use wharf_api::LogStatus;
use wharf_core::{
    endpoint::EndpointRecord,
    identity::{Identity, Label},
    policy::MAX_NAMED_PORTS,
    state::{Event, Level, State},
    store::Change,
    timeline::{Operation, Outcome},
};

use crate::{
    endpoint::{identity, task::EndpointTask},
    node::{
        edit::Edit,
        endpoint::Done,
        error::{CommandError, SourcesRefusal},
        sources,
    },
};

const AGAIN: Duration = Duration::from_secs(5);

impl EndpointTask {
    /// Answers labels and source prefixes after their build, other edits when the kernel has the policy rows.
    pub(super) async fn on_edit(&mut self, edit: Edit, done: Done) {
        let builds = edit.labels.is_some() || edit.sources.is_some();
        match self.edit(edit).await {
            Ok(()) if builds => self.request(Level::Policy, done),
            result => drop(done.send(result)),
        }
    }

    pub(super) async fn catch_up(&mut self) {
        if self.take_pod_row().await.is_ok_and(|differs| differs) {
            self.transition(Event::BuildRequested(Level::Policy));
        }
    }

    pub(super) async fn on_pod_row(&mut self, done: Done) {
        match self.take_pod_row().await {
            Ok(false) if self.shared.read(|v| v.fsm.state) == State::Ready => drop(done.send(Ok(()))),
            Ok(_) => self.request(Level::Policy, done),
            Err(why) => drop(done.send(Err(why))),
        }
    }

    /// Takes labels and named ports of its pod's row; their build follows. False if unchanged. After an error, the
    /// consumer of the feed asks again.
    async fn take_pod_row(&mut self) -> Result<bool, CommandError> {
        let old = self.shared.read(|v| v.record.clone());
        let Some(record) = self.life.endpoints.pods.with_row(&old) else { return Ok(false) };
        let result = self.replace(&old, record, false, true).await;
        if let Err(why) = &result {
            self.shared.log(LogStatus::Warning, "pod-row", why.to_string());
        }
        result.map(|()| true)
    }

    async fn edit(&mut self, edit: Edit) -> Result<(), CommandError> {
        let old = self.shared.read(|v| v.record.clone());
        let mut record = edit.without_labels(&old);
        let ports = record.named_ports.len();
        if ports > MAX_NAMED_PORTS {
            return Err(CommandError::NamedPorts(ports));
        }
        if edit.sources.is_some() {
            self.may_use(&record).await?;
        }
        let (of_policy, relabels) = (record != old, edit.labels.is_some());
        if let Some(labels) = edit.labels {
            record.set_own_labels(labels);
            record = self.life.endpoints.pods.with_row(&record).unwrap_or(record);
        }
        self.replace(&old, record, of_policy, relabels).await
    }

    /// Enforcement and ports (`of_policy`) precede the commit, because the kernel may refuse their rows. Labels, the
    /// pod's row (`relabels`) and source prefixes precede their build, which is retried.
    async fn replace(
        &mut self,
        old: &EndpointRecord,
        mut record: EndpointRecord,
        of_policy: bool,
        relabels: bool,
    ) -> Result<(), CommandError> {
        let state = self.shared.read(|v| v.fsm.state);
        if state == State::Disconnecting || state.is_terminal() {
            // A delete may have removed the record; a commit would restore it.
            return Err(CommandError::Refused { command: "change", state });
        }
        if relabels {
            record.identity = self.identity_of(&record.labels).await?;
        }
        if let Err(error) = self.keep(&record, of_policy).await {
            if of_policy && let Err(why) = self.life.policy.put_back_endpoint(old).await {
                self.shared.log(LogStatus::Warning, "change", format!("take it back: {why}"));
            }
            if relabels {
                identity::release(&*self.life.endpoints.identities, record.identity).await;
            }
            return Err(error);
        }
        if relabels {
            identity::release(&*self.life.endpoints.identities, old.identity).await;
            let change = format!("identity {} -> {}", old.identity, record.identity);
            self.shared.note(Operation::Relabel, "relabel", None, Outcome::Ok, &change);
            self.shared.log(LogStatus::Ok, "relabel", change);
        }
        if of_policy {
            let change = told(&record);
            self.shared.note(Operation::Notice, "change", None, Outcome::Ok, &change);
            self.shared.log(LogStatus::Ok, "change", change);
        }
        self.shared.update(|v| v.record = record);
        Ok(())
    }

    async fn may_use(&self, record: &EndpointRecord) -> Result<(), CommandError> {
        if !record.sources.is_empty() && !record.link_owner.is_wharf() {
            return Err(SourcesRefusal::Chained.into());
        }
        let gateways: Vec<IpAddr> = record.addresses().filter_map(|own| record.gateway_of(own)).collect();
        tokio::select! {
            biased;
            () = self.cancel.cancelled() => Err(CommandError::Deleted),
            checked = sources::check(&self.life, &record.sources, Some(record.id), &gateways) => Ok(checked?),
        }
    }

    /// The old identity stays in force meanwhile; a delete ends the wait.
    async fn identity_of(&mut self, labels: &BTreeSet<Label>) -> Result<Identity, CommandError> {
        // Other states await a rebuild after a restart.
        let waits = self.shared.read(|v| matches!(v.fsm.state, State::Ready | State::WaitingToRegenerate));
        if waits {
            self.transition(Event::IdentityLost);
        }
        let acquired = tokio::select! {
            biased;
            () = self.cancel.cancelled() => return Err(CommandError::Deleted),
            acquired = timeout(identity::BOUND, self.life.endpoints.identities.acquire(labels)) => acquired,
        };
        if waits {
            self.transition(Event::IdentityResolved);
        }
        Ok(acquired.map_err(|_| CommandError::NoIdentity(identity::BOUND))??)
    }

    /// Time from which the present labels count as complete; never with the cluster feed, since a policy may select by
    /// missing ones.
    pub(super) fn labels_due(&self) -> Option<Instant> {
        let awaits = self.shared.read(|v| v.record.awaits_labels && !self.life.endpoints.pods.expects_row(&v.record));
        awaits.then(|| Instant::now() + self.life.config.labels_timeout)
    }

    /// Returns when to retry.
    pub(super) async fn on_labels_due(&mut self) -> Option<Instant> {
        let record = self.shared.read(|v| v.record.clone());
        if !record.awaits_labels || self.cancel.is_cancelled() {
            return None;
        }
        match self.edit(Edit::labels(record.labels)).await {
            Ok(()) => {
                self.transition(Event::BuildRequested(Level::Policy));
                None
            }
            Err(why) => {
                self.shared.log(LogStatus::Warning, "labels", format!("{why}; it is tried again in {AGAIN:?}"));
                Some(Instant::now() + AGAIN)
            }
        }
    }

    async fn keep(&self, record: &EndpointRecord, of_policy: bool) -> Result<(), CommandError> {
        if of_policy {
            self.life.policy.put_endpoint(record).await?;
        }
        Ok(self.life.store.commit(vec![Change::PutEndpoint(Box::new(record.clone()))]).await?)
    }
}

fn told(record: &EndpointRecord) -> String {
    let (enforcement, sources) = (record.policy_enforcement.as_str(), sources::in_words(&record.sources));
    format!("policy-enforcement {enforcement}, {} named ports, {sources}", record.named_ports.len())
}
