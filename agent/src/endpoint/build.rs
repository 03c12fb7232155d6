//! Build: bring realized to desired.
//!
//! At level *policy* only map rows change; at level *datapath* new programs are loaded beside the old ones, and take
//! their place by one atomic update of each link and of the program array. Nothing is detached in between, so no
//! packet is lost and none passes unpoliced; when any step fails, the old state is still in force.

use std::sync::{Arc, atomic::Ordering};

use tokio::time::Instant;
use wharf_core::{
    endpoint::EndpointRecord,
    kernel::{ConfigSpec, Kernel, KernelError, ProgramSpec},
    state::Level,
};

use crate::{
    endpoint::{create::link_ref, view::Shared},
    node::Node,
};

/// The configuration row an endpoint is to have.
#[must_use]
pub fn desired_config<K: Kernel>(node: &Node<K>, record: &EndpointRecord, trace: bool) -> ConfigSpec {
    ConfigSpec {
        epoch: record.epoch,
        host_ifindex: record.host_ifindex,
        identity: record.identity,
        ipv4: record.ipv4,
        ipv6: record.ipv6,
        gateway4: record.gateway4,
        gateway6: record.gateway6,
        live: true,
        trace: trace || node.trace_all.load(Ordering::Relaxed),
    }
}

/// Runs a build to its end.
///
/// # Errors
/// The step that failed and why; the last good state is in force.
pub async fn build<K: Kernel>(node: &Node<K>, shared: &Arc<Shared>, level: Level) -> Result<(), String> {
    let (record, trace) = shared.read(|v| (v.record.clone(), v.trace));
    let step = |name: &'static str| {
        shared.update(|v| {
            v.status.phase = name.into();
            v.status.since_unix_ms = crate::clock::unix_ms();
        });
        Instant::now()
    };
    let ended = |name: &'static str, since: Instant, result: Result<(), KernelError>| {
        node.metrics.phase("regenerate", name, since.elapsed());
        result.map_err(|e| format!("{name}: {e}"))
    };
    if level == Level::Datapath {
        let since = step("ensure-programs");
        let spec = ProgramSpec {
            id: record.id,
            container_mac: record.container_mac,
            host_mac: record.host_mac,
            debug: node.config.debug_programs,
        };
        ended("ensure-programs", since, node.kernel.ensure_programs(&spec).await.map(drop))?;
    }
    let since = step("ensure-config");
    let config = desired_config(node, &record, trace);
    ended("ensure-config", since, node.kernel.ensure_config(record.id, &config).await)?;
    if level == Level::Datapath {
        let since = step("ensure-attached");
        ended("ensure-attached", since, node.kernel.ensure_attached(&link_ref(&record)).await.map(drop))?;
        // Addresses and routes that somebody took away come back too; what is there stays as it is.
        let since = step("ensure-connected");
        ended("ensure-connected", since, node.kernel.ensure_connected(&record).await)?;
    }
    let since = step("ensure-reachable");
    ended("ensure-reachable", since, node.kernel.ensure_reachable(&record).await)
}
