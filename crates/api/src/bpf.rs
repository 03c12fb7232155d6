//! BPF maps and counters.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Body of `GET /v1/map`: a row for each map.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BpfMap {
    /// `ENDPOINTS`, or `<endpoint id>/CONFIG` (`GET /v1/map/{name}` takes `.` for the `/` too: `1.CONFIG`).
    pub name: String,
    /// Kind in the kernel's words.
    pub kind: String,
    /// Rows in use, where that can be counted.
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
    /// Its rows in readable form: column name to value.
    pub rows: Vec<BTreeMap<String, String>>,
}

/// A row of counters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MetricRow {
    /// Endpoint id; none for the totals of endpoints that are gone.
    pub endpoint: Option<u16>,
    /// `ingress` or `egress`.
    pub direction: String,
    /// Reason's name.
    pub reason: String,
    /// True when the packets were dropped.
    pub dropped: bool,
    /// Packets.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
}
