//! Rows of `BANDWIDTH`: an endpoint's token buckets.

use std::collections::BTreeMap;

use wharf_common::{
    Bucket, Direction,
    map::{self, limit_flag},
};
use wharf_core::{
    bandwidth::{Bandwidth, Limit},
    ids::EndpointId,
    kernel::Result,
};
use wharf_crash as crash;

use super::{Bpf, maps};
use crate::error::wrap;

pub(super) fn of(bandwidth: &Bandwidth, direction: Direction) -> Option<Limit> {
    match direction {
        Direction::Ingress => bandwidth.ingress,
        Direction::Egress => bandwidth.egress,
    }
}

pub(super) fn flags(bandwidth: &Bandwidth) -> u32 {
    let limited = Direction::ALL.into_iter().filter(|direction| of(bandwidth, *direction).is_some());
    limited.fold(0, |flags, direction| flags | limit_flag(direction))
}

pub(super) fn told(limit: Limit) -> String {
    format!("{} bit/s, full after {} ns", limit.rate, limit.burst_ns())
}

impl Bpf {
    /// A bucket with an unchanged limit keeps its fill; a changed one starts full.
    pub(super) fn ensure_bandwidth(&self, id: EndpointId, bandwidth: &Bandwidth) -> Result<()> {
        if bandwidth.is_unlimited() {
            return Ok(());
        }
        let failed = |e: &(dyn std::error::Error + 'static)| wrap("limit bandwidth", format!("endpoint {id}"), e);
        let mut rows = maps::bandwidth(&self.pins.endpoint(id, map::BANDWIDTH))?;
        for direction in Direction::ALL {
            let Some(limit) = of(bandwidth, direction) else { continue };
            let index = direction as u32;
            let wanted = Bucket { rate: limit.rate.get(), burst_ns: limit.burst_ns(), empty_at_ns: 0 };
            let is = rows.get(&index, 0).map_err(|e| failed(&e))?;
            if (is.rate, is.burst_ns) != (wanted.rate, wanted.burst_ns) {
                rows.set(index, wanted, 0).map_err(|e| failed(&e))?;
            }
            crash::point("datapath/config/after-bandwidth");
        }
        Ok(())
    }

    pub(super) fn bandwidth_rows(&self, id: EndpointId) -> Result<Vec<BTreeMap<String, String>>> {
        let rows = maps::bandwidth(&self.pins.endpoint(id, map::BANDWIDTH))?;
        let row = |direction: Direction| {
            let failed = |e: &(dyn std::error::Error + 'static)| wrap("read limits", format!("endpoint {id}"), e);
            let bucket = rows.get(&(direction as u32), 0).map_err(|e| failed(&e))?;
            let columns = [
                ("direction", direction.as_str().to_owned()),
                ("rate", bucket.rate.to_string()),
                ("burst_ns", bucket.burst_ns.to_string()),
                ("empty_at_ns", bucket.empty_at_ns.to_string()),
            ];
            Ok(columns.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
        };
        Direction::ALL.into_iter().map(row).collect()
    }
}
