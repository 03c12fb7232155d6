//! Errors.

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Stable error codes; clients act on these, people read the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorCode {
    /// The body or a parameter does not parse, or breaks a rule.
    InvalidRequest,
    /// The network namespace is gone, is not one, or is the node's own.
    InvalidNetns,
    /// An endpoint, or an interface of that name, is there already.
    Exists,
    /// No such endpoint, lease, map or pool.
    NotFound,
    /// The pool has no free address.
    PoolExhausted,
    /// No free endpoint id, or another limit of the node.
    LimitReached,
    /// Too much at once; try again after `retry_after_ms`.
    Overloaded,
    /// The endpoint is in a state that does not allow this now (being created, being deleted).
    Busy,
    /// The request's own deadline passed; what was done is undone.
    DeadlineExceeded,
    /// The kernel refused an operation.
    Kernel,
    /// The store refused an operation.
    Store,
    /// The agent is starting or stopping.
    Unavailable,
    /// Understood, and not something this agent can do.
    Unsupported,
    /// In delegated mode: the service that makes the network failed; `cni_code` is the code that it gives, absent for an answer that
    /// cannot be used.
    Delegate,
    /// A fault of the agent itself.
    Internal,
}

/// Body of every answer that is an error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ApiError {
    /// Stable code.
    pub code: ErrorCode,
    /// Operation, subject and cause.
    pub message: String,
    /// What the user can do, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// After how many milliseconds a retry makes sense (429 and 503).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
    /// CNI error code for the container runtime, where the service of delegated mode gives one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>, minimum = 1)]
    pub cni_code: Option<NonZeroU32>,
    /// The operation this is about, as the agent's log lines name it in their field `op` (for example `c-000012`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub op: Option<Box<str>>,
}
