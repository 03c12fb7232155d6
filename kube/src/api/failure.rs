//! Failures of requests.

use std::{error::Error, fmt::Write as _, time::Duration};

use serde::Deserialize;

const MAX_RETRY_AFTER: Duration = Duration::from_secs(60);
/// Characters of a server's message.
const MAX_MESSAGE: usize = 512;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// A failure status, in an answer or a watch event.
    #[error("the API server answers {code} {reason}: {message}")]
    Refused {
        /// HTTP status.
        code: u16,
        /// Machine-readable; may be empty.
        reason: String,
        /// For people.
        message: String,
        /// Delay that the server requests, at most 60 s.
        retry_after: Option<Duration>,
    },
    /// No byte for this time.
    #[error("the API server is silent for {0:?}")]
    Silent(Duration),
    /// Failure of the connection, TLS or HTTP.
    #[error("connection to the API server: {0}")]
    Connection(String),
    /// Unreadable credentials or addresses.
    #[error("settings of the API client: {0}")]
    Settings(String),
    /// A request that cannot be sent.
    #[error("request: {0}")]
    Request(String),
    /// The answer exceeds this limit, bytes.
    #[error("the answer has more than {0} bytes")]
    TooLarge(usize),
    /// Not the JSON that the API defines.
    #[error("the answer does not decode: {0}")]
    Undecodable(#[source] serde_json::Error),
    /// A version decreases.
    #[error("resourceVersion {now} follows {before}: the cluster's store was restored")]
    Rewound {
        /// Earlier.
        before: u64,
        /// Later.
        now: u64,
    },
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Status {
    code: u16,
    reason: String,
    message: String,
    details: Option<Details>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Details {
    retry_after_seconds: Option<u64>,
}

impl Failure {
    /// From an answer's body, or the object of an ERROR event.
    #[must_use]
    pub fn refusal(code: u16, body: &[u8], retry_after: Option<Duration>) -> Self {
        let status: Status = serde_json::from_slice(body).unwrap_or_default();
        let asked = status.details.and_then(|details| details.retry_after_seconds).map(Duration::from_secs);
        Self::Refused {
            code: if code == 0 { status.code } else { code },
            reason: clip(&status.reason),
            message: clip(&status.message),
            retry_after: retry_after.or(asked).map(|delay| delay.min(MAX_RETRY_AFTER)),
        }
    }

    pub(super) fn connection(error: impl Error) -> Self {
        Self::Connection(chain(&error))
    }

    pub(super) fn request(error: &dyn Error) -> Self {
        Self::Request(chain(error))
    }

    pub(super) fn settings(error: impl Error) -> Self {
        Self::Settings(chain(&error))
    }

    /// Status of HTTP.
    #[must_use]
    pub const fn code(&self) -> Option<u16> {
        match self {
            Self::Refused { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// Delay that the server requests.
    #[must_use]
    pub const fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Refused { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// Whether another connection, server or token may help.
    #[must_use]
    pub const fn is_of_connection(&self) -> bool {
        match self {
            Self::Refused { code, .. } => *code == 401 || *code >= 500,
            Self::Silent(_) | Self::Connection(_) => true,
            _ => false,
        }
    }

    /// Label of metrics.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Refused { code: 401 | 403, .. } => "forbidden",
            Self::Refused { code: 410, .. } => "expired",
            Self::Refused { code: 429, .. } => "throttled",
            Self::Refused { .. } => "refused",
            Self::Silent(_) => "silent",
            Self::Connection(_) => "connection",
            Self::Settings(_) | Self::Request(_) => "settings",
            Self::TooLarge(_) => "size",
            Self::Undecodable(_) => "undecodable",
            Self::Rewound { .. } => "rewound",
        }
    }
}

/// The error and its causes.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let shown = cause.to_string();
        // Libraries repeat the cause in their text.
        if !text.ends_with(&shown) {
            // A write to a String does not fail.
            let _ = write!(text, ": {shown}");
        }
        source = cause.source();
    }
    clip(&text)
}

fn clip(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(MAX_MESSAGE).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_has_code_message_and_a_bounded_delay() {
        let body = br#"{"kind":"Status","code":429,"reason":"TooManyRequests","message":"slow\ndown","details":{"retryAfterSeconds":9000}}"#;
        let failure = Failure::refusal(0, body, None);
        assert_eq!(failure.code(), Some(429));
        assert_eq!(failure.retry_after(), Some(MAX_RETRY_AFTER));
        assert_eq!(failure.to_string(), "the API server answers 429 TooManyRequests: slowdown");
        let header = Failure::refusal(429, b"no json", Some(Duration::from_secs(3)));
        assert_eq!((header.code(), header.retry_after()), (Some(429), Some(Duration::from_secs(3))));
        assert!(!header.is_of_connection());
        assert!(Failure::refusal(401, b"", None).is_of_connection());
    }
}
