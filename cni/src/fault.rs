//! CNI errors.

use std::{fmt, path::PathBuf};

use serde::Serialize;
use wharf_api::{
    ApiError, ErrorCode,
    client::{ClientError, why_agent_is_away},
};

use crate::{netconf::Version, retry::NOT_NOW};

/// The specification (CNI 1.1.0, section 5, "Error") defines codes below 100.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Code {
    /// Also for the command.
    IncompatibleVersion,
    UnknownContainer,
    /// The message names the `CNI_*` variable.
    Environment,
    /// A read failed, or the peer is no agent.
    Io,
    Decode,
    Config,
    TryAgain,
    /// STATUS: ADD would fail.
    NotAvailable,
    Limited,
    /// CHECK: the state differs.
    NotAsItShouldBe,
    OtherAttachment,
    /// From an IPAM plugin or delegated service.
    Delegate(u32),
}

impl Code {
    pub(crate) const fn of_service(code: u32) -> Self {
        match code {
            11 => Self::TryAgain,
            code => Self::Delegate(code),
        }
    }

    pub(crate) const fn number(self) -> u32 {
        match self {
            Self::IncompatibleVersion => 1,
            Self::UnknownContainer => 3,
            Self::Environment => 4,
            Self::Io => 5,
            Self::Decode => 6,
            Self::Config => 7,
            Self::TryAgain => 11,
            Self::NotAvailable => 50,
            Self::Limited => 51,
            Self::NotAsItShouldBe => 110,
            Self::OtherAttachment => 111,
            Self::Delegate(code) => code,
        }
    }
}

const MAX_TOLD: usize = 5;

pub(crate) fn first_of(items: &[String]) -> String {
    let told: Vec<&str> = items.iter().take(MAX_TOLD).map(String::as_str).collect();
    let rest = items.len().saturating_sub(told.len());
    let more = if rest == 0 { String::new() } else { format!("; and {rest} more") };
    told.join("; ") + &more
}

/// `msg` names operation, subject and cause; `details` is an optional hint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    pub(crate) code: Code,
    pub(crate) msg: String,
    pub(crate) details: String,
    /// The agent counted the command.
    pub(crate) counted: bool,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.msg)
    }
}

impl Fault {
    pub(crate) fn new(code: Code, msg: impl Into<String>) -> Self {
        Self { code, msg: msg.into(), details: String::new(), counted: false }
    }

    pub(crate) fn config(msg: impl Into<String>) -> Self {
        Self::new(Code::Config, msg)
    }

    pub(crate) fn environment(msg: impl Into<String>) -> Self {
        Self::new(Code::Environment, msg)
    }

    pub(crate) fn and(self, other: Self) -> Self {
        let details: Vec<String> = [self.details, other.details].into_iter().filter(|text| !text.is_empty()).collect();
        Self {
            code: self.code,
            msg: format!("{}; {}", self.msg, other.msg),
            details: details.join("; "),
            counted: self.counted,
        }
    }

    pub(crate) fn with_details(mut self, details: impl Into<String>) -> Self {
        self.details = details.into();
        self
    }

    /// `subject`: command and object.
    pub(crate) fn of_client(subject: &str, error: &ClientError) -> Self {
        let message = message_of(error);
        let msg = if message.contains("create endpoint ") { message } else { format!("{message} ({subject})") };
        let mut fault = Self::new(code_of(error), msg);
        // The shim retries or reports the failure.
        fault.counted = matches!(error, ClientError::Api { status, .. } if !NOT_NOW.contains(status));
        match error {
            ClientError::Api { error, .. } => {
                let op = error.op.as_ref().map(|op| format!("operation {op} in the agent's log"));
                fault.with_details(error.hint.iter().cloned().chain(op).collect::<Vec<_>>().join("; "))
            }
            error if is_absent(error) => fault.with_details(format!("nothing was changed; {}", why_agent_is_away())),
            _ => fault,
        }
    }
}

/// The agent has not seen the request. A connection is reset if the agent ends before it accepts it.
pub(crate) fn is_absent(error: &ClientError) -> bool {
    use std::io::ErrorKind::{ConnectionRefused, ConnectionReset, NotFound};
    let ClientError::Connect { cause, .. } = error else { return false };
    matches!(cause.kind(), NotFound | ConnectionRefused | ConnectionReset)
}

fn message_of(error: &ClientError) -> String {
    match error {
        ClientError::Api { error, .. } => error.message.clone(),
        other => other.to_string(),
    }
}

/// 11: a retry may succeed. 4, 7: runtime or configuration must change. 5: the peer is no agent. See `docs/cni.md`.
fn code_of(error: &ClientError) -> Code {
    match error {
        ClientError::Connect { cause, .. } if cause.kind() == std::io::ErrorKind::PermissionDenied => Code::Io,
        ClientError::Connect { .. } | ClientError::Closed { .. } | ClientError::Timeout { .. } => Code::TryAgain,
        ClientError::Protocol { .. } => Code::Io,
        ClientError::Api { error: ApiError { cni_code: Some(code), .. }, .. } => Code::of_service(code.get()),
        ClientError::Api { error, .. } => match error.code {
            ErrorCode::Delegate => Code::Io,
            // NotFound means a pool; endpoints are handled earlier.
            ErrorCode::InvalidRequest | ErrorCode::NotFound | ErrorCode::Unsupported => Code::Config,
            ErrorCode::InvalidNetns | ErrorCode::Exists => Code::Environment,
            ErrorCode::PoolExhausted
            | ErrorCode::LimitReached
            | ErrorCode::Overloaded
            | ErrorCode::Busy
            | ErrorCode::DeadlineExceeded
            | ErrorCode::Kernel
            | ErrorCode::Store
            | ErrorCode::Unavailable
            | ErrorCode::Internal => Code::TryAgain,
        },
    }
}

/// A fault and its CNI version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub(crate) version: String,
    pub(crate) fault: Fault,
    pub(crate) origin: Box<Origin>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Origin {
    /// Empty without a valid name.
    pub(crate) network: String,
    pub(crate) socket: Option<PathBuf>,
}

#[derive(Serialize)]
struct Body<'a> {
    #[serde(rename = "cniVersion")]
    cni_version: &'a str,
    code: u32,
    msg: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    details: &'a str,
}

impl Failure {
    pub(crate) fn new(version: &str, fault: Fault) -> Self {
        Self { version: version.to_owned(), fault, origin: Box::default() }
    }

    pub(crate) fn unversioned(fault: Fault) -> Self {
        Self::new(Version::NEWEST.as_str(), fault)
    }

    pub(crate) fn of(self, origin: Origin) -> Self {
        Self { origin: Box::new(origin), ..self }
    }

    /// JSON for stdout.
    #[must_use]
    pub fn to_json(&self) -> String {
        let Fault { code, msg, details, counted: _ } = &self.fault;
        let body = Body { cni_version: &self.version, code: code.number(), msg, details };
        serde_json::to_string(&body).unwrap_or_else(|_| format!(r#"{{"code":{},"msg":"error"}}"#, code.number()))
    }
}

#[cfg(test)]
mod tests {
    use std::{io, num::NonZeroU32};

    use super::*;

    fn api(code: ErrorCode) -> ClientError {
        let error = ApiError {
            code,
            message: "because".into(),
            hint: Some("do this".into()),
            retry_after_ms: None,
            cni_code: None,
            op: Some("c-000012".into()),
        };
        ClientError::Api { operation: "PUT /".into(), status: 500, error }
    }

    #[test]
    fn agent_codes_map_by_who_can_mend_it() {
        for (code, want) in [
            (ErrorCode::InvalidRequest, Code::Config),
            (ErrorCode::InvalidNetns, Code::Environment),
            (ErrorCode::Exists, Code::Environment),
            (ErrorCode::PoolExhausted, Code::TryAgain),
            (ErrorCode::Unavailable, Code::TryAgain),
        ] {
            assert_eq!(Fault::of_client("ADD", &api(code)).code, want, "{code:?}");
        }
    }

    #[test]
    fn the_code_of_the_service_of_delegated_mode_goes_before_the_agents() {
        let of = |code, cni_code: Option<u32>| {
            let ClientError::Api { operation, status, error } = api(code) else { panic!("an answer") };
            let error = ClientError::Api {
                operation,
                status,
                error: ApiError { cni_code: cni_code.and_then(NonZeroU32::new), ..error },
            };
            Fault::of_client("ADD", &error).code
        };
        assert_eq!(of(ErrorCode::Delegate, Some(123)), Code::Delegate(123));
        assert_eq!(
            of(ErrorCode::Busy, Some(11)),
            Code::TryAgain,
            "the same as the agent's own, for an IPAM plugin's sake"
        );
        assert_eq!(of(ErrorCode::Delegate, None), Code::Io, "an answer that cannot be used");
    }

    #[test]
    fn message_and_hint_are_told_once_each() {
        let fault = Fault::of_client("ADD c/eth0", &api(ErrorCode::Kernel));
        assert_eq!(
            (fault.msg.as_str(), fault.details.as_str()),
            ("because (ADD c/eth0)", "do this; operation c-000012 in the agent's log")
        );
        let ClientError::Api { operation, status, error } = api(ErrorCode::Kernel) else { panic!("an answer") };
        let message = "no berth is free (create endpoint net/c:eth0)".to_owned();
        let named = ClientError::Api { operation, status, error: ApiError { message: message.clone(), ..error } };
        assert_eq!(Fault::of_client("ADD c/eth0", &named).msg, message, "the attachment is named twice");
    }

    #[test]
    fn no_permission_is_not_mended_by_a_retry() {
        let error = |kind: io::ErrorKind| ClientError::Connect { socket: "/s".into(), cause: kind.into() };
        assert_eq!(Fault::of_client("ADD", &error(io::ErrorKind::PermissionDenied)).code, Code::Io);
        assert_eq!(Fault::of_client("ADD", &error(io::ErrorKind::NotFound)).code, Code::TryAgain);
    }

    #[test]
    fn an_agent_that_ended_before_it_accepted_is_absent() {
        let error = |kind: io::ErrorKind| ClientError::Connect { socket: "/s".into(), cause: kind.into() };
        assert!(is_absent(&error(io::ErrorKind::ConnectionReset)), "its queue of connections ended with it");
        assert!(!is_absent(&error(io::ErrorKind::PermissionDenied)));
    }
}
