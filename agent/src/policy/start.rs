//! The start: saved state, endpoints, first rows.

use std::sync::atomic::Ordering;

use wharf_core::endpoint::EndpointRecord;
use wharf_dns::cache::Cache;
use wharf_enforce::{
    documents::{self, Documents},
    inputs::{Input, Inputs},
    redirects::Ports,
    transaction::Terms,
};
use wharf_kit::{kept, sync::lock};

use super::{Policy, Unrecorded, directory, effects, error::PolicyError, names};

impl Policy {
    /// Loads the saved state, before the agent changes anything.
    ///
    /// # Errors
    /// Unusable policy file, or directory without saved texts.
    pub async fn load(&self) -> Result<(), PolicyError> {
        let mut inner = self.lock_early().await;
        let ports = kept::read(&self.redirects_file, Ports::MAX_FILE);
        let ports = ports.and_then(|text| text.map_or(Ok(Ports::default()), |text| Ports::parse(&text)));
        let ports = ports.unwrap_or_else(|why| {
            let file = self.redirects_file.display();
            tracing::warn!(%file, "read the proxy's ports: {why}; connections through the proxy begin anew");
            Ports::default()
        });
        self.uses_proxy.store(!ports.listeners.is_empty(), Ordering::Relaxed);
        let names = names::load(&self.names_file).unwrap_or_else(|why| {
            let file = self.names_file.display();
            tracing::warn!(%file, "read names: {why}; containers must ask for them again");
            Cache::default()
        });
        let unusable = |why: String| PolicyError::Unusable { path: self.file.clone(), why };
        let text = kept::read(&self.file, documents::MAX_FILE).map_err(|why| unusable(why.to_string()))?;
        let mut documents = Documents::parse(text.as_deref()).map_err(unusable)?;
        documents.awaits_cluster &= self.settings.has_feed;
        documents.lacks_rows &= self.settings.has_feed;
        documents.awaits_namespaces = self.settings.has_feed;
        let is_kept = !documents.lost;
        let texts = documents.texts.take();
        if let (Some(directory), Some(texts)) = (&self.directory, &texts) {
            inner.files.remember(directory, texts);
        }
        if let Some(found) = self.look_at_directory(&mut inner, directory::Age::Any).await? {
            inner.files.refuse(documents.set_directory(found.policies, found.texts));
        }
        let is_other = documents.texts != texts;
        let enforcement = inner.state.inputs().enforcement;
        inner.state.load(Inputs { documents, names, ..Inputs::new(enforcement) }, ports, is_kept);
        if is_kept && is_other {
            self.keep_or_warn(&mut inner, "the next start needs all files of the policy directory good").await;
        }
        Ok(())
    }

    /// Rows of the cluster feed are lost: rules of the kernel stay until a producer has sent every row. To be called
    /// before [`Policy::start`].
    pub async fn lacks_rows(&self) {
        let mut inner = self.lock_early().await;
        inner.state.lacks_rows();
        // Before the feed writes its file, which then lacks the rows.
        self.keep_cluster(&mut inner).await;
    }

    /// Takes the endpoints, after [`Policy::load`]. `unrecorded`: in the kernel without a record.
    pub async fn begin(
        &self,
        records: impl IntoIterator<Item = EndpointRecord>,
        unrecorded: impl IntoIterator<Item = Unrecorded>,
    ) {
        let mut inner = self.lock_early().await;
        records.into_iter().for_each(|record| inner.state.take(Input::Endpoint(record.into())));
        inner.state.begin(unrecorded.into_iter().collect());
    }

    /// Writes all rows in one change, after [`Policy::begin`] and the rows of the cluster feed's file. Until then, the
    /// kernel keeps the earlier rows, and everything except removals of endpoints waits.
    ///
    /// # Errors
    /// Rows do not fit, also without rows of the cluster feed, or the kernel refused; the earlier rows stay.
    pub async fn start(&self) -> Result<(), PolicyError> {
        let (mut inner, mut result) = self.first_rows().await;
        self.keep_cluster(&mut inner).await;
        if matches!(result, Err(PolicyError::Rows(_))) {
            let documents = inner.state.inputs().documents.clone();
            (inner, result) = self.fit(inner, documents).await;
        }
        let removed = lock(&self.removed_early).take().unwrap_or_default();
        removed.iter().for_each(|(id, _)| inner.state.forget_unrecorded(*id));
        let members = &inner.state.inputs().members;
        let is_member = |(id, epoch): &(_, _)| members.get(*id).is_some_and(|place| place.epoch == *epoch);
        let gone = removed.into_iter().filter(is_member).map(|(id, epoch)| Input::NoEndpoint(id, epoch));
        let gone: Vec<Input> = gone.collect();
        if result.is_ok() && !gone.is_empty() {
            (inner, result) = self.realize(inner, Terms::FACT, gone).await;
        } else {
            gone.into_iter().for_each(|input| inner.state.take(input));
        }
        self.started.send_replace(true);
        drop(inner);
        result
    }

    async fn first_rows(&self) -> effects::Realized {
        let mut inner = self.lock_early().await;
        let has_rows = match inner.state.inputs().need_rows() {
            true => Ok(true),
            false => self.kernel.observe_policy().await.map(|rows| rows.generation != 0),
        };
        match has_rows {
            Ok(has_rows) => inner.state.start(has_rows),
            Err(why) => return (inner, Err(why.into())),
        }
        let change = match self.kernel.observe_addresses().await {
            Ok(addresses) => vec![Input::Node(addresses.into_iter().collect())],
            Err(why) => return (inner, Err(why.into())),
        };
        self.realize(inner, Terms::FACT, change).await
    }

    /// Returns after [`Policy::start`].
    pub async fn started(&self) {
        drop(self.started.subscribe().wait_for(|started| *started).await);
    }

    /// Whether [`Policy::start`] has returned.
    #[must_use]
    pub fn has_started(&self) -> bool {
        *self.started.borrow()
    }
}
