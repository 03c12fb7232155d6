//! Errors of the endpoint's life in the API's words.

use wharf_api::{ApiError, ErrorCode};
use wharf_core::{
    ipam::IpamError,
    kernel::{KernelError, KernelErrorKind},
};

use crate::store::StoreError;

/// An error without a hint.
#[must_use]
pub fn error(code: ErrorCode, message: String) -> ApiError {
    ApiError { code, message, hint: None, retry_after_ms: None, op: None }
}

/// A kernel error in the API's words.
#[must_use]
pub fn kernel_error(e: &KernelError) -> ApiError {
    ApiError {
        code: match e.kind {
            KernelErrorKind::NotANetns => ErrorCode::InvalidNetns,
            KernelErrorKind::Exhausted => ErrorCode::LimitReached,
            _ => ErrorCode::Kernel,
        },
        message: e.to_string(),
        hint: None,
        retry_after_ms: None,
        op: None,
    }
}

/// A store error in the API's words.
#[must_use]
pub fn store_error(e: &StoreError) -> ApiError {
    ApiError {
        code: ErrorCode::Store,
        message: e.to_string(),
        hint: Some("check the space and the health of the file system that holds the run directory".into()),
        retry_after_ms: Some(1_000),
        op: None,
    }
}

/// An IPAM error in the API's words.
#[must_use]
pub fn from_ipam(operation: &str, e: &IpamError) -> ApiError {
    ApiError {
        code: match e {
            IpamError::Exhausted { .. } | IpamError::Withheld { .. } => ErrorCode::PoolExhausted,
            IpamError::AlreadyLeased { .. } | IpamError::TakenByNode { .. } => ErrorCode::Exists,
            IpamError::Resting { .. } => ErrorCode::Busy,
            _ => ErrorCode::InvalidRequest,
        },
        message: format!("{operation}: {e}"),
        hint: None,
        retry_after_ms: matches!(e, IpamError::Resting { .. }).then_some(1_000),
        op: None,
    }
}
