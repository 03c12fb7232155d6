//! Upgrade and downgrade at a start: endpoints of other ABI versions are taken over before the agent serves.
//!
//! `wharf_core::upgrade` selects the endpoints. `wharf-datapath` takes them over, and restores the other version when
//! that fails. The agent then does not start: it never runs beside endpoints that it failed to take over.

use std::time::Instant;

use anyhow::Context as _;
use wharf_core::{
    endpoint::EndpointRecord,
    kernel::{Kernel as _, ProgramSpec},
    store::Snapshot,
    upgrade::{Takeover, plan_upgrade},
};
use wharf_datapath::LinuxKernel;

use crate::{config::AgentConfig, endpoint::build};

/// Takes over the endpoints that other ABI versions have pinned, if there are any.
///
/// # Errors
/// When an endpoint cannot be taken over. The previous programs are then in force again, and the message gives the
/// remedy.
pub async fn upgrade(kernel: &LinuxKernel, config: &AgentConfig, snapshot: &Snapshot) -> anyhow::Result<()> {
    let others = kernel.other_versions().await?;
    if others.is_empty() {
        return Ok(());
    }
    let since = Instant::now();
    let links = kernel.dump().await.context("look for endpoints of other versions")?.links;
    let plan = plan_upgrade(&others, snapshot, &links);
    let takeover = |record: EndpointRecord| Takeover {
        programs: ProgramSpec { keep: true, ..build::desired_programs(config, &record) },
        // Tracing that the previous agent enabled is not carried over.
        config: build::config_of(&record, false),
        record,
    };
    let endpoints = plan.take_over.into_iter().map(takeover).collect();
    let done = kernel.upgrade(endpoints, plan.keep.clone()).await?;
    let from = others.iter().map(|tree| format!("v{}", tree.version)).collect::<Vec<_>>().join(", ");
    let to = wharf_common::ABI_VERSION;
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
