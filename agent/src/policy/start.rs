//! The start: saved state, endpoints, then the first rows.

use std::sync::atomic::Ordering;

use wharf_core::endpoint::EndpointRecord;
use wharf_dns::cache::Cache;
use wharf_kit::sync::lock;

use super::{
    Guard, Policy, Unrecorded, directory,
    documents::Documents,
    error::PolicyError,
    inner::Inner,
    names,
    redirects::{self, Ports},
    rounds::Rounds,
};

impl Policy {
    /// Loads the saved state, before the agent changes anything.
    ///
    /// # Errors
    /// Unusable policy file, or directory without saved texts.
    pub async fn load(&self) -> Result<(), PolicyError> {
        let mut inner = self.lock_early().await;
        inner.kept_ports = redirects::load(&self.redirects_file).unwrap_or_else(|why| {
            let file = self.redirects_file.display();
            tracing::warn!(%file, "read the proxy's ports: {why}; connections through the proxy begin anew");
            Ports::default()
        });
        inner.rounds = Rounds::new(inner.kept_ports.rounds.clone());
        self.uses_proxy.store(!inner.kept_ports.listeners.is_empty(), Ordering::Relaxed);
        inner.names = names::load(&self.names_file).unwrap_or_else(|why| {
            let file = self.names_file.display();
            tracing::warn!(%file, "read names: {why}; containers must ask for them again");
            Cache::default()
        });
        inner.wanted = Documents::load(&self.file)?;
        inner.wanted.awaits_cluster &= self.has_feed;
        inner.wanted.awaits_namespaces = self.has_feed;
        inner.kept = !inner.wanted.lost;
        let kept = inner.wanted.texts.take();
        if let (Some(directory), Some(kept)) = (&self.directory, &kept) {
            inner.files.remember(directory, kept);
        }
        if let Some(found) = self.look_at_directory(&mut inner, directory::Age::Any).await? {
            let Inner { wanted, files, .. } = &mut *inner;
            files.refuse(wanted.set_directory(found));
        }
        if inner.kept && inner.wanted.texts != kept {
            self.keep_or_warn(&mut inner, "the next start needs all files of the policy directory good").await;
        }
        Ok(())
    }

    /// At a start, after [`Policy::load`], takes the endpoints. `unrecorded`: those in the kernel without a record.
    pub async fn begin(
        &self,
        records: impl IntoIterator<Item = EndpointRecord>,
        unrecorded: impl IntoIterator<Item = Unrecorded>,
    ) {
        let mut inner = self.lock_early().await;
        for record in records {
            inner.put(&record);
        }
        // Until the rows are read, so that a failure is retried.
        inner.active = true;
        inner.unrecorded = unrecorded.into_iter().collect();
    }

    /// At a start, after [`Policy::begin`] and the rows of the cluster feed's file, writes all rows in one change.
    /// Until it returns, the kernel keeps the rows of before, and everything but the removal of endpoints waits.
    ///
    /// # Errors
    /// Rows do not fit, also without rows of the cluster feed, or the kernel refused; the earlier rows stay.
    pub async fn start(&self) -> Result<(), PolicyError> {
        let inner = self.lock_early().await;
        let (mut inner, mut result) = self.first_rows(inner).await;
        if matches!(result, Err(PolicyError::Rows(_))) {
            let wanted = inner.wanted.clone();
            (inner, result) = self.fit_rows(inner, wanted).await;
        }
        let removed = lock(&self.removed_early).take().unwrap_or_default();
        let gone = removed.into_iter().filter_map(|(id, epoch)| inner.remove(id, epoch)).collect::<Vec<_>>();
        if result.is_ok() && !gone.is_empty() {
            (inner, result) = self.realize(inner, gone).await;
        }
        self.started.send_replace(true);
        drop(inner);
        result
    }

    async fn first_rows(&self, mut inner: Guard) -> (Guard, Result<(), PolicyError>) {
        let looked = async {
            inner.node = self.kernel.observe_addresses().await?.into_iter().collect();
            // Rows of an earlier agent must be changed also if no policy needs rows now.
            let is_active = inner.is_needed() || self.kernel.observe_policy().await?.generation != 0;
            self.look_at_limits(&mut inner).await?;
            Ok(is_active)
        };
        inner.active = match looked.await {
            Ok(is_active) => is_active,
            Err(why) => return (inner, Err(why)),
        };
        inner.realized = if inner.active { 0 } else { inner.wanted.revision };
        self.realize(inner, Vec::new()).await
    }

    /// Returns once [`Policy::start`] has.
    pub async fn started(&self) {
        // Fails only if the sender is gone, which lives as long as `self`.
        drop(self.started.subscribe().wait_for(|started| *started).await);
    }

    /// Whether [`Policy::start`] has returned.
    #[must_use]
    pub fn has_started(&self) -> bool {
        *self.started.borrow()
    }
}
