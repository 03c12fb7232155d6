//! BPF maps and counters.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Element of the body of `GET /v1/map`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BpfMap {
    /// `ENDPOINTS`, or `<endpoint id>/CONFIG` (`GET /v1/map/{name}` also accepts `.` for the `/`: `1.CONFIG`).
    pub name: String,
    /// Map type, in the kernel's terms.
    pub kind: String,
    /// Rows in use, if they can be counted.
    pub entries: Option<u64>,
    /// Capacity, rows (bytes for a ring buffer).
    pub max_entries: u64,
    /// Kernel memory, bytes.
    pub memlock_bytes: u64,
}

/// Body of `GET /v1/map/{name}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BpfMapDump {
    /// The map.
    pub map: BpfMap,
    /// Rows: column name to value.
    pub rows: Vec<BTreeMap<String, String>>,
}

/// A row of counters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MetricRow {
    /// Endpoint id; absent for the totals of deleted endpoints, and for the overlay.
    pub endpoint: Option<u16>,
    /// `ingress` or `egress`.
    pub direction: String,
    /// Name of the reason.
    pub reason: String,
    /// True when the packets were dropped.
    pub dropped: bool,
    /// Packets.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
}
