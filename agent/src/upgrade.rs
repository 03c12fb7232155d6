//! Takes over endpoints of other ABI versions before the agent serves, or restores the other version.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use wharf_core::{
    endpoint::EndpointRecord,
    kernel::{EndpointKernel as _, LinkRef, NodeKernel as _, ProgramSpec},
    store::Snapshot,
    upgrade::{Takeover, plan_upgrade},
};
use wharf_datapath::LinuxKernel;

use crate::{config::AgentConfig, endpoint::build};

/// Extension of systemd's TimeoutStartSec=, and its interval.
const MORE_TIME: Duration = Duration::from_secs(60);
const ASKED_EVERY: Duration = Duration::from_secs(5);

/// Called after each endpoint: ten thousand exceed the timeout (sd_notify(3), EXTEND_TIMEOUT_USEC=).
fn more_time() -> impl Fn() + Send {
    let asked = std::cell::Cell::new(None::<Instant>);
    let usec = u32::try_from(MORE_TIME.as_micros()).unwrap_or(u32::MAX);
    move || {
        if asked.get().is_none_or(|at| at.elapsed() >= ASKED_EVERY) {
            asked.set(Some(Instant::now()));
            wharf_kit::systemd::notify(&[sd_notify::NotifyState::ExtendTimeoutUsec(usec)]);
        }
    }
}

/// Takes over endpoints of other ABI versions.
///
/// # Errors
/// An endpoint cannot be taken over; the previous programs are in force. Has the remedy.
pub async fn upgrade(kernel: &LinuxKernel, config: &AgentConfig, snapshot: &Snapshot) -> anyhow::Result<()> {
    let others = kernel.other_versions().await?;
    if others.is_empty() {
        return Ok(());
    }
    let since = Instant::now();
    let links = kernel.dump().await.context("look for endpoints of other versions")?.links;
    let of_plugins = snapshot.endpoints.iter().filter(|r| !r.link_owner.is_wharf());
    let of_plugins: Vec<LinkRef> = of_plugins.map(LinkRef::of).collect();
    let gone = kernel.observe_missing(&of_plugins).await.context("look for links of other plugins")?;
    let plan = plan_upgrade(&others, snapshot, &links, &gone.into_iter().collect());
    let takeover = |record: EndpointRecord| Takeover {
        programs: ProgramSpec { keep: true, ..build::desired_programs(config, &record) },
        config: build::config_of(config, &record, false),
        record,
    };
    let endpoints = plan.take_over.into_iter().map(takeover).collect();
    let done = kernel.upgrade(endpoints, plan.keep.clone(), more_time()).await?;
    let from = others.iter().map(|tree| format!("v{}", tree.version)).collect::<Vec<_>>().join(", ");
    let to = wharf_common::abi::version();
    if let Some((endpoints, why)) = done.counters_lost {
        tracing::warn!(endpoints, "upgrade from {from} to v{to}: counters begin at zero: {why}");
    }
    if !plan.keep.is_empty() {
        let ids: Vec<String> = plan.keep.iter().map(ToString::to_string).collect();
        tracing::warn!(
            "upgrade from {from} to v{to}: the programs of {from} stay in force for endpoints without a record in service, \
             until their links are removed: {}",
            ids.join(", ")
        );
    }
    for left in done.left {
        tracing::warn!("upgrade from {from} to v{to}: {left}; nothing uses it, and the next start removes it");
    }
    tracing::info!(
        endpoints = done.taken_over,
        kept = plan.keep.len(),
        took_ms = since.elapsed().as_millis(),
        "upgraded from {from} to v{to}"
    );
    Ok(())
}
