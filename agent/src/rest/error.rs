//! Errors as HTTP responses.

use std::time::Duration;

use axum::{
    Json,
    extract::{FromRequest, FromRequestParts, Request, rejection::JsonRejection},
    http::{HeaderValue, StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
};
use serde::de::DeserializeOwned;
use tokio::time::timeout;
use wharf_api::{ApiError, ErrorCode, object::Object};

use crate::rest::operation;

/// An error on its way to the client.
#[derive(Debug)]
pub struct Failure(pub ApiError);

/// Result of a handler.
pub type Answer<T> = Result<T, Failure>;

impl Failure {
    /// With a code and a message.
    #[must_use]
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self(ApiError { code, message: message.into(), hint: None, retry_after_ms: None, op: None })
    }

    /// Adds a hint about what the user can do.
    #[must_use]
    pub fn hint(mut self, hint: &str) -> Self {
        self.0.hint = Some(hint.to_owned());
        self
    }
}

impl From<ApiError> for Failure {
    fn from(e: ApiError) -> Self {
        Self(e)
    }
}

/// The HTTP status of each code.
#[must_use]
pub fn status(code: ErrorCode) -> StatusCode {
    match code {
        ErrorCode::InvalidRequest | ErrorCode::InvalidNetns => StatusCode::BAD_REQUEST,
        ErrorCode::Exists => StatusCode::CONFLICT,
        ErrorCode::NotFound => StatusCode::NOT_FOUND,
        // These conditions may end by themselves or through an operator, so the client should retry.
        ErrorCode::PoolExhausted | ErrorCode::LimitReached | ErrorCode::Overloaded | ErrorCode::Busy => {
            StatusCode::TOO_MANY_REQUESTS
        }
        ErrorCode::Unsupported => StatusCode::UNPROCESSABLE_ENTITY,
        ErrorCode::Unavailable | ErrorCode::DeadlineExceeded => StatusCode::SERVICE_UNAVAILABLE,
        ErrorCode::Kernel | ErrorCode::Store | ErrorCode::Internal => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

impl IntoResponse for Failure {
    fn into_response(mut self) -> Response {
        let retry = self.0.retry_after_ms;
        let code = status(self.0.code);
        if operation::is_told(code) {
            self.0.op = self.0.op.or_else(|| crate::telemetry::operation::current().map(|op| op.to_string().into()));
        }
        let told = operation::Told { code: self.0.code, message: self.0.message.clone() };
        let mut response = (code, Json(self.0)).into_response();
        response.extensions_mut().insert(told);
        if let Some(ms) = retry {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(ms.div_ceil(1000)));
        }
        response
    }
}

/// Maximum length kept at each end of a parser's message, bytes.
const MAX_END: usize = 400;

/// Refuses input that a parser rejected. The parser's message may repeat a field name of any length in its middle,
/// and ends with what was expected.
fn unreadable(operation: &str, mut words: String) -> Failure {
    if words.len() > 2 * MAX_END {
        let middle = words.floor_char_boundary(MAX_END)..words.ceil_char_boundary(words.len() - MAX_END);
        words.replace_range(middle, " ... ");
    }
    Failure::new(ErrorCode::InvalidRequest, format!("{operation}: {words}"))
}

/// Time limit for reading a request's body.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// A JSON object as the request's body. Invalid JSON is answered with 400 and the position of the error.
pub struct Body<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, state: &S) -> Result<Self, Failure> {
        let read = timeout(BODY_TIMEOUT, Json::<Object<T>>::from_request(request, state)).await.map_err(|_| {
            Failure::new(ErrorCode::InvalidRequest, format!("read body: it did not arrive within {BODY_TIMEOUT:?}"))
        })?;
        match read {
            Ok(Json(Object(value))) => Ok(Self(value)),
            Err(JsonRejection::MissingJsonContentType(_)) => {
                Err(Failure::new(ErrorCode::InvalidRequest, "read body: content-type must be application/json"))
            }
            Err(e) => Err(unreadable("read body", e.body_text())),
        }
    }
}

/// Query parameters; invalid ones are answered with 400.
pub struct Query<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Query<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        match axum::extract::Query::<T>::from_request_parts(parts, state).await {
            Ok(axum::extract::Query(value)) => Ok(Self(value)),
            Err(e) => Err(unreadable("read query", e.body_text())),
        }
    }
}

/// A path parameter; one that is not UTF-8 after decoding is answered with 400.
pub struct Segment(pub String);

impl<S: Send + Sync> FromRequestParts<S> for Segment {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        match axum::extract::Path::<String>::from_request_parts(parts, state).await {
            Ok(axum::extract::Path(value)) => Ok(Self(value)),
            Err(e) => Err(unreadable("read path", e.body_text())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_repeats_no_more_than_both_ends_of_what_a_parser_says() {
        let said = format!("unknown field `{}`, expected `epoch`", "ü".repeat(5_000));
        let message = unreadable("read query", said).0.message;
        assert!(message.starts_with("read query: unknown field `üü"), "{message}");
        assert!(message.contains("ü ... ü") && message.ends_with("ü`, expected `epoch`"), "{message}");
        assert!(message.len() <= 2 * MAX_END + 20, "{} bytes", message.len());
        let short = "unknown field `x`".to_owned();
        assert_eq!(unreadable("read query", short).0.message, "read query: unknown field `x`");
    }
}
