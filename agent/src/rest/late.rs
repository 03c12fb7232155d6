//! Rejects changes whose caller has given up.
//!
//! Requests wait in a stopped agent's socket. A plugin that gives up a DEL leaves a deletion record; a later ADD may
//! have the attachment when the agent reads the request.

use axum::{
    extract::Request,
    http::{HeaderValue, Method},
    middleware::Next,
    response::{IntoResponse as _, Response},
};
use wharf_api::{ErrorCode, UNTIL_HEADER};
use wharf_kit::clock;

use crate::rest::error::Failure;

/// Rejects late changes.
pub async fn refuse(request: Request, next: Next) -> Response {
    match in_time(request.method(), request.headers().get(UNTIL_HEADER), clock::boot_ms()) {
        Ok(()) => next.run(request).await,
        Err(failure) => failure.into_response(),
    }
}

fn in_time(method: &Method, until: Option<&HeaderValue>, now_ms: u64) -> Result<(), Failure> {
    let Some(until) = until.filter(|_| !matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS)) else {
        return Ok(());
    };
    let Some(until) = until.to_str().ok().and_then(|text| text.parse::<u64>().ok()) else {
        let message = format!("header {UNTIL_HEADER}: must be milliseconds of the boot's clock");
        return Err(Failure::new(ErrorCode::InvalidRequest, message));
    };
    match now_ms.saturating_sub(until) {
        0 => Ok(()),
        late => {
            let message = format!("its caller gave up {late} ms before the agent read it; nothing was done");
            Err(Failure::new(ErrorCode::DeadlineExceeded, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_too_late_is_refused_unless_it_only_reads() {
        for (method, until, code) in [
            (Method::DELETE, Some("1000"), None),
            (Method::DELETE, Some("999"), Some(ErrorCode::DeadlineExceeded)),
            (Method::PUT, Some("0"), Some(ErrorCode::DeadlineExceeded)),
            (Method::POST, Some("soon"), Some(ErrorCode::InvalidRequest)),
            (Method::POST, Some("99999999999999999999"), Some(ErrorCode::InvalidRequest)),
            (Method::DELETE, None, None),
            (Method::GET, Some("0"), None),
        ] {
            let header = until.map(HeaderValue::from_static);
            let refused = in_time(&method, header.as_ref(), 1_000).err().map(|failure| failure.0.code);
            assert_eq!(refused, code, "{method} {until:?}");
        }
    }
}
