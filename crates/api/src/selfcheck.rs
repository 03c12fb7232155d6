//! Every endpoint's own check: test packets through its programs, and what came of them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Health;

/// A test packet and what came of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SelfCheckCase {
    /// What was tried: `to-gateway-ipv4`, `false-source-mac-ipv6`, ... (docs/selfcheck.md lists them).
    pub name: String,
    /// What desired state says: verdict and counters.
    pub expected: String,
    /// What the programs did.
    pub got: String,
    /// They are the same.
    pub ok: bool,
}

/// A mismatch that a second look has confirmed, while it lasts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SelfCheckAlarm {
    /// When it began, milliseconds since the Unix epoch.
    pub since_unix_ms: u64,
    /// What was done about it.
    pub done: String,
}

/// The self-check of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SelfCheck {
    /// `ok`, `failing`, or `pending` as long as nothing was found out.
    pub state: Health,
    /// When the test packets were sent, milliseconds since the Unix epoch; none when they never were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checked_unix_ms: Option<u64>,
    /// The test packets.
    #[serde(default)]
    pub cases: Vec<SelfCheckCase>,
    /// The alarm that lasts, if one does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alarm: Option<SelfCheckAlarm>,
    /// Why nothing was found out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl Default for SelfCheck {
    fn default() -> Self {
        Self { state: Health::Pending, checked_unix_ms: None, cases: Vec::new(), alarm: None, error: None }
    }
}
