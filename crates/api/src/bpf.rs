//! BPF maps and counters.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Element of the body of `GET /v1/map`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BpfMap {
    /// `ENDPOINTS`, or `<endpoint id>/CONFIG` (in `GET /v1/map/{name}` also `1.CONFIG`).
    pub name: String,
    /// Kernel map type.
    pub kind: String,
    /// Rows in use, if countable.
    pub entries: Option<u64>,
    /// Capacity in rows; for a ring buffer in bytes.
    pub max_entries: u64,
    /// Kernel memory, bytes.
    pub memlock_bytes: u64,
}

/// Body of `GET /v1/map/{name}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BpfMapDump {
    /// The map.
    pub map: BpfMap,
    /// Rows by column name.
    pub rows: Vec<BTreeMap<String, String>>,
}

/// A row of counters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MetricRow {
    /// Endpoint id; absent for the overlay and for totals of deleted endpoints.
    pub endpoint: Option<u16>,
    /// `ingress` or `egress`.
    pub direction: String,
    /// Name of the reason.
    pub reason: String,
    /// Whether the packets were dropped.
    pub dropped: bool,
    /// Packets.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
}
