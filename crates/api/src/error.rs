//! Errors.

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Stable error codes for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorCode {
    /// Invalid body or parameter.
    InvalidRequest,
    /// The network namespace is missing, invalid, or the node's.
    InvalidNetns,
    /// The endpoint or interface exists.
    Exists,
    /// No such endpoint, lease, map or pool.
    NotFound,
    /// The pool has no free address.
    PoolExhausted,
    /// No free endpoint id, or another node limit.
    LimitReached,
    /// Overload; retry after `retry_after_ms`.
    Overloaded,
    /// A create or delete of the endpoint is in progress.
    Busy,
    /// The deadline passed; the operation was rolled back.
    DeadlineExceeded,
    /// A kernel operation failed.
    Kernel,
    /// A store operation failed.
    Store,
    /// The agent is starting or stopping.
    Unavailable,
    /// Not supported by this agent.
    Unsupported,
    /// In delegated mode: failure of the service; `cni_code` is absent for an unusable answer.
    Delegate,
    /// An internal fault of the agent.
    Internal,
}

/// Body of error answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ApiError {
    /// Stable code.
    pub code: ErrorCode,
    /// Operation, subject and cause.
    pub message: String,
    /// Advice, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// Milliseconds until a retry (429 and 503).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
    /// In delegated mode: the service's CNI error code, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>, minimum = 1)]
    pub cni_code: Option<NonZeroU32>,
    /// Operation id, in field `op` of the agent's log: `c-000012`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub op: Option<Box<str>>,
}
