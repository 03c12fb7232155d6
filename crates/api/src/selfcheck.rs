//! Self-check of endpoints with test packets.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Health;

/// A test packet and its result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SelfCheckCase {
    /// `to-gateway-ipv4`, `false-source-mac-ipv6`, ... (docs/selfcheck.md).
    pub name: String,
    /// Expected verdict and counters.
    pub expected: String,
    /// Actual verdict and counters.
    pub got: String,
    /// Whether both are equal.
    pub ok: bool,
}

/// A confirmed mismatch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SelfCheckAlarm {
    /// Start, Unix ms.
    pub since_unix_ms: u64,
    /// Action taken.
    pub done: String,
}

/// Self-check of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SelfCheck {
    /// `ok`, `failing`, or `pending` before a result.
    pub state: Health,
    /// Time of the test packets, Unix ms, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checked_unix_ms: Option<u64>,
    /// The test packets.
    #[serde(default)]
    pub cases: Vec<SelfCheckCase>,
    /// The current alarm, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alarm: Option<SelfCheckAlarm>,
    /// Why there is no result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl Default for SelfCheck {
    fn default() -> Self {
        Self { state: Health::Pending, checked_unix_ms: None, cases: Vec::new(), alarm: None, error: None }
    }
}
