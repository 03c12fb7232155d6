//! Errors.

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Stable error codes for clients; the message is for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorCode {
    /// The body or a parameter does not parse, or is invalid.
    InvalidRequest,
    /// The network namespace does not exist, is not one, or is the node's.
    InvalidNetns,
    /// An endpoint or interface with that name exists.
    Exists,
    /// No such endpoint, lease, map or pool.
    NotFound,
    /// The pool has no free address.
    PoolExhausted,
    /// No free endpoint id, or another limit of the node is reached.
    LimitReached,
    /// Overload; retry after `retry_after_ms`.
    Overloaded,
    /// The endpoint's state does not allow this now (create or delete in progress).
    Busy,
    /// The request's deadline passed; the operation was rolled back.
    DeadlineExceeded,
    /// The kernel refused an operation.
    Kernel,
    /// The store refused an operation.
    Store,
    /// The agent is starting or stopping.
    Unavailable,
    /// This agent does not support the operation.
    Unsupported,
    /// In delegated mode: the service failed; `cni_code` is its CNI error code, absent for an unusable answer.
    Delegate,
    /// An internal fault of the agent.
    Internal,
}

/// Body of every error answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ApiError {
    /// Stable code.
    pub code: ErrorCode,
    /// Operation, subject and cause.
    pub message: String,
    /// What the user can do, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// Milliseconds until a retry makes sense (429 and 503).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
    /// In delegated mode: CNI error code for the container runtime, if the service gives one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>, minimum = 1)]
    pub cni_code: Option<NonZeroU32>,
    /// Id of the operation in the field `op` of the agent's log lines, for example `c-000012`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub op: Option<Box<str>>,
}
