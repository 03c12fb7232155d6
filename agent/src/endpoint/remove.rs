//! Removes an endpoint from kernel and proxy.

use std::{
    net::IpAddr,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use futures::FutureExt as _;
use tokio::time::{Instant, timeout};
use wharf_core::{
    endpoint::EndpointRecord,
    ids::{EndpointId, Epoch},
    kernel::{Kernel, LinkRef},
    plan::DeleteStep,
};

use crate::{
    endpoint::error::RemoveError,
    node::{endpoint::Release, jobs::Jobs, lifecycle::Lifecycle},
    policy::Policy,
    proxy::Proxy,
};

/// What to remove.
#[derive(Debug, Clone)]
pub enum Subject {
    /// From a record.
    Recorded(Box<EndpointRecord>),
    /// Found by id, without a readable record.
    Remnant {
        id: EndpointId,
        /// One, unless a mark was copied.
        links: Vec<LinkRef>,
        /// In `ENDPOINTS`.
        rows: Vec<(IpAddr, Epoch)>,
    },
}

impl Subject {
    /// From a record.
    #[must_use]
    pub fn of(record: &EndpointRecord) -> Self {
        Self::Recorded(Box::new(record.clone()))
    }

    fn id(&self) -> EndpointId {
        match self {
            Self::Recorded(record) => record.id,
            Self::Remnant { id, .. } => *id,
        }
    }

    fn links(&self) -> Vec<LinkRef> {
        match self {
            Self::Recorded(record) => vec![LinkRef::of(record)],
            Self::Remnant { links, .. } => links.clone(),
        }
    }

    fn epochs(&self) -> Vec<Epoch> {
        match self {
            Self::Recorded(record) => vec![record.epoch],
            Self::Remnant { links, rows, .. } => {
                let mut epochs: Vec<_> = links.iter().map(|l| l.epoch).chain(rows.iter().map(|(_, e)| *e)).collect();
                epochs.sort_unstable();
                epochs.dedup();
                epochs
            }
        }
    }
}

/// Runs all steps of [`DeleteStep::REMOVAL`], also after a failure. Returns the release of the links, unless the
/// kernel still lists them.
pub async fn teardown(
    life: &Arc<Lifecycle>,
    subject: &Subject,
    begins: impl Fn(DeleteStep),
    mut ended: impl FnMut(DeleteStep, Duration, Result<(), RemoveError>),
) -> Option<Release> {
    let mut release = None;
    for step in DeleteStep::REMOVAL {
        begins(step);
        let since = Instant::now();
        let result = match step {
            DeleteStep::RemoveLink => {
                unlist(&life.endpoints.jobs, &life.policy, subject).await.map(|links| release = Some(links))
            }
            _ => self::step(life, subject, step).await,
        };
        ended(step, since.elapsed(), result);
    }
    release
}

/// [`teardown`], then the kernel's release of the links.
///
/// # Errors
/// Failed steps that must succeed.
pub async fn all(life: &Arc<Lifecycle>, subject: &Subject) -> Result<(), RemoveError> {
    let mut left = Vec::new();
    let ended = |step: DeleteStep, _, result| match result {
        Err(why) if step.must_succeed() => left.push((step, why)),
        Err(why) => tracing::warn!(endpoint = subject.id().get(), step = step.name(), "remove an endpoint: {why}"),
        Ok(()) => {}
    };
    if let Some(release) = teardown(life, subject, |_| {}, ended).await
        && let Err(why) = await_kernel(&release).await
    {
        left.push((DeleteStep::AwaitKernel, why));
    }
    if left.is_empty() { Ok(()) } else { Err(RemoveError::Removal(left)) }
}

/// Runs one bounded step of [`DeleteStep::REMOVAL`]; other steps do nothing.
pub async fn step(life: &Arc<Lifecycle>, subject: &Subject, step: DeleteStep) -> Result<(), RemoveError> {
    let jobs = &life.endpoints.jobs;
    let (id, name, links) = (subject.id(), step.name(), subject.links());
    let bound = match step {
        DeleteStep::AwaitProxy => life.config.proxy_timeout,
        _ => Duration::from_millis(step.deadline_ms()),
    };
    match step {
        DeleteStep::WriteIntent
        | DeleteStep::RefuseWork
        | DeleteStep::ReleaseIdentity
        | DeleteStep::AwaitKernel
        | DeleteStep::ReleaseIps
        | DeleteStep::RemoveRecord => Ok(()),
        DeleteStep::Detach => {
            let call = move |k: Arc<dyn Kernel>| async move {
                for link in &links {
                    k.remove_attached(link).await?;
                }
                Ok(())
            };
            Ok(jobs.bounded(id, name, bound, call).await?)
        }
        DeleteStep::RemoveReachable => {
            let subject = subject.clone();
            let call = move |k: Arc<dyn Kernel>| async move {
                match &subject {
                    Subject::Recorded(record) => k.remove_reachable(record).await,
                    Subject::Remnant { rows, .. } => {
                        for (ip, epoch) in rows {
                            k.remove_endpoint_row(*ip, *epoch).await?;
                        }
                        k.remove_call_slot(u32::from(id.get())).await
                    }
                }
            };
            Ok(jobs.bounded(id, name, bound, call).await?)
        }
        DeleteStep::AwaitProxy => {
            timeout(bound, await_proxy(&life.policy.proxy, subject)).await.unwrap_or(Err(RemoveError::NoAnswer(bound)))
        }
        DeleteStep::Unpin => {
            let unpin = move |k: Arc<dyn Kernel>| async move { k.remove_programs(id).await };
            let counters = jobs.bounded(id, name, bound, unpin).await?;
            life.telemetry.metrics.keep_counters(&counters);
            Ok(())
        }
        DeleteStep::RemoveLink => {
            let release = unlist(jobs, &life.policy, subject).await?;
            await_kernel(&release).await
        }
    }
}

/// Removes links from every look-up, then policy rows: without rows, attached programs accept everything. The kernel
/// releases the links later.
pub async fn unlist(jobs: &Arc<Jobs>, policy: &Policy, subject: &Subject) -> Result<Release, RemoveError> {
    let (id, step, links) = (subject.id(), DeleteStep::RemoveLink, subject.links());
    let call = move |k: Arc<dyn Kernel>| async move {
        let mut releases = Vec::with_capacity(links.len());
        for link in &links {
            releases.push(k.unlist_link(link).await?);
        }
        Ok(releases)
    };
    let bound = Duration::from_millis(step.deadline_ms());
    let releases = jobs.bounded(id, step.name(), bound, call).await?;
    remove_policy(policy, id, subject.epochs()).await;
    let release = async { futures::future::try_join_all(releases).await.map(drop) };
    Ok(release.boxed().shared())
}

async fn remove_policy(policy: &Policy, id: EndpointId, epochs: Vec<Epoch>) {
    for epoch in epochs {
        if let Err(why) = policy.remove_endpoint(id, epoch).await {
            tracing::warn!(endpoint = id.get(), epoch = epoch.0, "remove rows of policy: {why}");
        }
    }
}

/// Undoes a create's changes to another plugin's link, then removes policy rows.
pub async fn restore_link(
    jobs: &Arc<Jobs>,
    policy: &Policy,
    record: &EndpointRecord,
    bound: Duration,
) -> Result<(), RemoveError> {
    let (id, link) = (record.id, LinkRef::of(record));
    let call = move |k: Arc<dyn Kernel>| async move { k.remove_from_plugin_link(&link).await };
    jobs.bounded(id, "restore-link", bound, call).await?;
    remove_policy(policy, id, vec![record.epoch]).await;
    Ok(())
}

/// Waits for the kernel to release links.
pub async fn await_kernel(release: &Release) -> Result<(), RemoveError> {
    let bound = Duration::from_millis(DeleteStep::AwaitKernel.deadline_ms());
    Ok(timeout(bound, release.clone()).await.map_err(|_| RemoveError::NoAnswer(bound))??)
}

/// A dropped wait counts as timed out.
async fn await_proxy(proxy: &Proxy, subject: &Subject) -> Result<(), RemoveError> {
    struct Pending<'a> {
        counters: &'a Proxy,
        answered: bool,
    }
    impl Drop for Pending<'_> {
        fn drop(&mut self) {
            self.counters.pending.fetch_sub(1, Ordering::Relaxed);
            if !self.answered {
                self.counters.timed_out.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
    let of = |epoch| proxy.redirects.remove_redirects(subject.id(), epoch);
    let asked: Vec<_> = subject.epochs().into_iter().flat_map(of).collect();
    if asked.is_empty() {
        return Ok(());
    }
    wharf_crash::point("proxy/after-asking");
    let waits = asked.into_iter().map(|(redirect, completion)| {
        proxy.pending.fetch_add(1, Ordering::Relaxed);
        let pending = Pending { counters: proxy, answered: false };
        async move {
            let mut pending = pending; // moves the whole guard, not only the field set below
            let result = completion.await;
            pending.answered = true;
            result.err().map(|why| (redirect, why))
        }
    });
    let failed: Vec<_> = futures::future::join_all(waits).await.into_iter().flatten().collect();
    if failed.is_empty() { Ok(()) } else { Err(RemoveError::Proxy(failed)) }
}
