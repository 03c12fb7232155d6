//! The kernel datapath: maps, features, counters.

use std::{collections::BTreeMap, sync::Arc};

use wharf_api::{BpfMap, ComponentStatus, Health, MetricRow};
use wharf_common::DropReason;
use wharf_core::kernel::{CounterRow, Kernel, KernelError, KernelErrorKind, KernelFeatures, MapInfo};
use wharf_kit::sync::lock;

use super::Source;
use crate::{
    metrics::Metrics,
    node::{part::Fill, registry::Registry},
};

pub(super) fn source() -> Source {
    Source {
        name: "datapath",
        look: |node| Box::pin(async move { look(&*node.life.kernel).await }),
        silent: |_| (Health::Degraded, "waits for the kernel to tell of the BPF maps".into()),
    }
}

async fn look(kernel: &dyn Kernel) -> Fill {
    match kernel.observe_maps().await {
        Ok(maps) => {
            let (maps, mode) = (summary(maps), kernel.features().attach_mode.to_string());
            Arc::new(move |status| {
                status.bpf_maps.clone_from(&maps);
                status.components.push(ComponentStatus::new("datapath", Health::Ok, mode.clone()));
            })
        }
        Err(error) => Arc::new(move |status| {
            status.components.push(ComponentStatus::new("datapath", Health::Failing, error.to_string()));
        }),
    }
}

pub(super) fn features(features: &KernelFeatures) -> BTreeMap<String, bool> {
    BTreeMap::from([
        ("tcx".to_owned(), features.tcx),
        ("netkit".to_owned(), features.netkit),
        ("redirect-peer".to_owned(), features.redirect_peer),
        ("btf".to_owned(), features.btf),
        ("netns-cookie".to_owned(), features.netns_cookie),
        ("conntrack".to_owned(), features.conntrack),
    ])
}

/// API object.
#[must_use]
pub fn api_map(m: MapInfo) -> BpfMap {
    BpfMap {
        name: m.name,
        kind: m.kind,
        entries: m.entries,
        max_entries: m.max_entries,
        memlock_bytes: m.memlock_bytes,
    }
}

/// Shared maps, and one row per name of endpoints' maps (`*/CONFIG`).
fn summary(maps: Vec<MapInfo>) -> Vec<BpfMap> {
    let (mut rows, mut sums) = (Vec::new(), BTreeMap::<String, BpfMap>::new());
    for map in maps {
        let Some((_, name)) = map.name.split_once('/') else {
            rows.push(api_map(map));
            continue;
        };
        let name = format!("*/{name}");
        let sum = sums.entry(name.clone()).or_insert_with(|| BpfMap {
            name,
            kind: map.kind,
            entries: Some(0),
            max_entries: u64::from(wharf_common::MAX_ENDPOINT_ID),
            memlock_bytes: 0,
        });
        sum.entries = sum.entries.map(|n| n + 1);
        sum.memlock_bytes += map.memlock_bytes;
    }
    rows.extend(sums.into_values());
    rows
}

/// Nonzero counters: of endpoints, of deleted ones in total, and of the overlay.
pub async fn verdicts(
    kernel: &dyn Kernel,
    registry: &Registry,
    metrics: &Metrics,
) -> Result<Vec<MetricRow>, KernelError> {
    let past = lock(&metrics.past_counters).clone();
    let mut rows: Vec<MetricRow> = past
        .into_iter()
        .map(|((direction, reason), (packets, bytes))| row(None, CounterRow { direction, reason, packets, bytes }))
        .collect();
    let of_overlay = kernel.observe_overlay().await?.drops;
    rows.extend(of_overlay.into_iter().map(|c| MetricRow { dropped: true, ..row(None, c) }));
    for handle in registry.list() {
        match kernel.observe_counters(handle.id).await {
            Ok(counters) => rows.extend(counters.into_iter().map(|c| row(Some(handle.id.get()), c))),
            Err(e) if e.kind == KernelErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
    }
    Ok(rows)
}

fn row(endpoint: Option<u16>, c: CounterRow) -> MetricRow {
    let dropped = DropReason::ALL.iter().any(|r| r.as_str() == c.reason && r.is_drop());
    MetricRow { endpoint, direction: c.direction, reason: c.reason, dropped, packets: c.packets, bytes: c.bytes }
}
