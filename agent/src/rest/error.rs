//! Errors as responses.

use std::fmt::Display;

use axum::{
    Json,
    extract::{FromRequest, FromRequestParts, Request, rejection::JsonRejection},
    http::{HeaderValue, StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
};
use serde::de::DeserializeOwned;
use wharf_api::{ApiError, ErrorCode, object::Object};
use wharf_core::{
    identity_allocator::IdentityError,
    ipam::IpamError,
    kernel::{KernelError, KernelErrorKind},
    plan::CreateStep,
};
use wharf_policy::model::PolicyName;
use wharf_store::StoreError;

use crate::{
    audit::AuditError,
    endpoint::error::{CreateCause, CreateError},
    node::error::{CommandError, SourcesRefusal},
    policy::error::PolicyError,
    rest::operation,
};

/// An error for the client.
#[derive(Debug)]
pub struct Failure(pub ApiError);

/// A handler's result.
pub type Answer<T> = Result<T, Failure>;

/// Error 400.
#[must_use]
pub fn invalid(message: String) -> Failure {
    Failure::new(ErrorCode::InvalidRequest, message)
}

impl Failure {
    /// Without hint and retry.
    #[must_use]
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self(ApiError { code, message: message.into(), hint: None, retry_after_ms: None, cni_code: None, op: None })
    }

    /// Adds a hint.
    #[must_use]
    pub fn hint(mut self, hint: &str) -> Self {
        self.0.hint = Some(hint.to_owned());
        self
    }

    /// Adds a retry delay, milliseconds.
    #[must_use]
    pub fn retry(mut self, after_ms: u64) -> Self {
        self.0.retry_after_ms = Some(after_ms);
        self
    }

    /// Appends the subject.
    #[must_use]
    pub fn of(mut self, what: impl Display) -> Self {
        self.0.message = format!("{} ({what})", self.0.message);
        self
    }
}

impl From<ApiError> for Failure {
    fn from(e: ApiError) -> Self {
        Self(e)
    }
}

impl From<KernelError> for Failure {
    fn from(e: KernelError) -> Self {
        let code = match e.kind {
            KernelErrorKind::NotANetns => ErrorCode::InvalidNetns,
            KernelErrorKind::Exhausted => ErrorCode::LimitReached,
            _ => ErrorCode::Kernel,
        };
        Self::new(code, e.to_string())
    }
}

impl From<StoreError> for Failure {
    fn from(e: StoreError) -> Self {
        Self::new(ErrorCode::Store, e.to_string())
            .hint("check the space and the health of the file system that holds the run directory")
            .retry(1_000)
    }
}

impl From<IpamError> for Failure {
    fn from(e: IpamError) -> Self {
        let code = match e {
            IpamError::Exhausted { .. } | IpamError::Withheld { .. } => ErrorCode::PoolExhausted,
            IpamError::AlreadyLeased { .. } | IpamError::TakenByNode { .. } => ErrorCode::Exists,
            IpamError::Resting { .. } => return Self::new(ErrorCode::Busy, e.to_string()).retry(1_000),
            _ => ErrorCode::InvalidRequest,
        };
        Self::new(code, e.to_string())
    }
}

impl From<IdentityError> for Failure {
    fn from(e: IdentityError) -> Self {
        Self::new(ErrorCode::LimitReached, e.to_string())
    }
}

impl From<CommandError> for Failure {
    fn from(e: CommandError) -> Self {
        match e {
            CommandError::Refused { .. } | CommandError::Deleted | CommandError::NotCreated => {
                Self::new(ErrorCode::Busy, e.to_string())
            }
            CommandError::Build(_) => Self::new(ErrorCode::Kernel, e.to_string()),
            CommandError::Identity(e) => e.into(),
            CommandError::Store(e) => e.into(),
            CommandError::NoIdentity(_) => Self::new(ErrorCode::DeadlineExceeded, e.to_string()).retry(1_000),
            CommandError::NamedPorts(_) => Self::new(ErrorCode::LimitReached, e.to_string()),
            CommandError::Sources(ref why) => {
                let message = e.to_string();
                let Self(answer) = why.clone().into();
                Self(ApiError { message, ..answer })
            }
            CommandError::Policy(ref why) => {
                let message = e.to_string();
                let Self(answer) = why.clone().into();
                Self(ApiError { message, ..answer })
            }
        }
    }
}

impl From<SourcesRefusal> for Failure {
    fn from(e: SourcesRefusal) -> Self {
        let invalid = |hint| Self::new(ErrorCode::InvalidRequest, e.to_string()).hint(hint);
        match &e {
            SourcesRefusal::Chained => invalid("remove `sourcePrefixes`, or let wharf-cni make the interface"),
            SourcesRefusal::Taken { .. } => invalid(
                "choose a prefix without addresses of containers (`wharf ipam list`), services and the node (`ip address`)",
            ),
            SourcesRefusal::Kernel(e) => e.clone().into(),
        }
    }
}

impl From<PolicyError> for Failure {
    fn from(e: PolicyError) -> Self {
        let text = e.to_string();
        let says = move |code| Self::new(code, text);
        match e {
            PolicyError::Refused(_) | PolicyError::Namespace { .. } => says(ErrorCode::InvalidRequest),
            PolicyError::Unknown { name, elsewhere } => unknown_policy(says(ErrorCode::NotFound), &name, &elsewhere),
            PolicyError::UnknownNamespace(_) => says(ErrorCode::NotFound),
            PolicyError::OfDirectory { .. } | PolicyError::OfCluster { .. } => says(ErrorCode::Exists),
            PolicyError::Texts { .. } | PolicyError::Rows(_) => says(ErrorCode::LimitReached),
            PolicyError::Proxy(_) => says(ErrorCode::Unsupported),
            PolicyError::Kernel(_) => says(ErrorCode::Kernel).retry(2_000),
            PolicyError::NotKept { .. }
            | PolicyError::Directory { .. }
            | PolicyError::Lost { .. }
            | PolicyError::Unusable { .. } => says(ErrorCode::Store),
        }
    }
}

const NAMESPACES_MOST: usize = 5;

fn unknown_policy(failure: Failure, PolicyName { kind, name, .. }: &PolicyName, elsewhere: &[String]) -> Failure {
    match elsewhere {
        [] => failure.hint("`wharf policy list` shows all policies"),
        [one] => failure.hint(&format!("{kind} {name} is in namespace {one}: add `-n {one}`")),
        several => {
            let more = several.len().saturating_sub(NAMESPACES_MOST);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            let named = several.iter().take(NAMESPACES_MOST).map(String::as_str).collect::<Vec<_>>().join(", ");
            failure.hint(&format!("{kind} {name} is in the namespaces {named}{more}: name one with `-n`"))
        }
    }
}

impl From<AuditError> for Failure {
    fn from(e: AuditError) -> Self {
        match e {
            AuditError::Kernel(e) => e.into(),
            AuditError::Store(e) => e.into(),
            AuditError::Orphan(e) => Self::new(ErrorCode::Kernel, e.to_string()),
        }
    }
}

impl From<CreateCause> for Failure {
    fn from(cause: CreateCause) -> Self {
        let text = cause.to_string();
        let says = move |code| Self::new(code, text);
        match cause {
            CreateCause::Memory(_) => says(ErrorCode::LimitReached)
                .hint("raise the memory limit of the agent's service (MemoryMax=), or delete endpoints"),
            CreateCause::Overloaded(refusal) => says(ErrorCode::Overloaded).retry(refusal.retry_after_ms),
            CreateCause::Stopping => says(ErrorCode::Unavailable),
            CreateCause::NoPools(_) => says(ErrorCode::Unavailable)
                .hint("give this node's row pod CIDRs that no other row has (`wharf cluster nodes` shows the rows)"),
            CreateCause::Deadline(_) | CreateCause::NotBegun(_) | CreateCause::Overrun(_) => {
                says(ErrorCode::DeadlineExceeded)
            }
            CreateCause::Deleted(_) => says(ErrorCode::Busy),
            CreateCause::DeletePending => says(ErrorCode::Busy).retry(500),
            CreateCause::InterfaceBusy { .. } => says(ErrorCode::Busy).retry(100),
            CreateCause::InterfaceTaken { .. } => says(ErrorCode::Exists).hint("delete that one first"),
            CreateCause::AddressTaken { .. } => {
                says(ErrorCode::Exists).hint("delete that one first, or ask for another address")
            }
            CreateCause::External { .. } => says(ErrorCode::InvalidRequest)
                .hint("give the IPAM plugin a range that is neither the agent's (`wharf ipam list`) nor the node's (`ip route`)"),
            CreateCause::ExternalHeld { .. } => says(ErrorCode::Exists)
                .hint("delete that one first; two IPAMs, or two data directories of one, lease from the same range"),
            CreateCause::ExternalNotMasqueraded { .. } => says(ErrorCode::InvalidRequest)
                .hint("remove `ipMasq`, or `ipam` and use a pool; a router of your network can translate the addresses"),
            CreateCause::RouteGateway { .. } => {
                says(ErrorCode::InvalidRequest).hint("leave `gw` out: a container has one gateway of each family")
            }
            CreateCause::RouteFamily { .. } => says(ErrorCode::InvalidRequest)
                .hint("remove the route, or give the container an address of that family"),
            CreateCause::Sources(e) => e.into(),
            CreateCause::MasqueradeOff => says(ErrorCode::Unsupported)
                .hint("start the agent with --masquerade on, or remove `ipMasq` from the network's configuration"),
            CreateCause::PoolNotMasqueraded(_) => says(ErrorCode::InvalidRequest).hint(
                "remove masquerade = \"off\" of the pool from the agent's configuration, name another pool, or remove `ipMasq`",
            ),
            CreateCause::PortsOff(_) => says(ErrorCode::Unsupported)
                .hint("start the agent with --masquerade on, or remove the ports (`runtimeConfig.portMappings`)"),
            CreateCause::PortFamily(..) => {
                says(ErrorCode::InvalidRequest).hint("give a host IP of another family, none, or another pool")
            }
            CreateCause::PortTaken { .. } => {
                says(ErrorCode::Exists).hint("delete that one first, or publish another port")
            }
            CreateCause::Ports(e) => match e.kind {
                KernelErrorKind::Exists => says(ErrorCode::Exists),
                KernelErrorKind::NotFound => says(ErrorCode::InvalidRequest),
                KernelErrorKind::Unsupported => says(ErrorCode::InvalidRequest),
                _ => e.into(),
            },
            CreateCause::LinkTaken { .. } => says(ErrorCode::Exists).hint("delete that one first"),
            CreateCause::NotOnLink { .. } => says(ErrorCode::InvalidRequest)
                .hint("see what the plugins before wharf-cni did: `prevResult` is to tell what the interface has"),
            CreateCause::OtherMac { .. } => says(ErrorCode::InvalidRequest)
                .hint("put the plugin `tuning` with the capability `mac` before wharf-cni in the list of plugins, or ask for none"),
            CreateCause::PluginLink(e) => match e.kind {
                KernelErrorKind::NotFound | KernelErrorKind::Unsupported | KernelErrorKind::Conflict => {
                    says(ErrorCode::InvalidRequest).hint("put a plugin that makes a veth (ptp, bridge) before wharf-cni in the list of plugins")
                }
                _ => e.into(),
            },
            CreateCause::MixedOwners => says(ErrorCode::InvalidRequest),
            CreateCause::NoId => says(ErrorCode::LimitReached),
            CreateCause::Netns(e) => match e.kind {
                KernelErrorKind::NotFound | KernelErrorKind::NotANetns | KernelErrorKind::Permission => {
                    says(ErrorCode::InvalidNetns)
                        .hint("give the path of the container's network namespace, for example /run/netns/NAME")
                }
                _ => e.into(),
            },
            CreateCause::Kernel(step, e) => match (step, e.kind) {
                (CreateStep::EnsureLink, KernelErrorKind::Exists) => {
                    says(ErrorCode::Exists).hint("choose another CNI_IFNAME, or delete the interface that is there")
                }
                (
                    CreateStep::EnsureLink | CreateStep::EnsureConnected,
                    KernelErrorKind::NotFound | KernelErrorKind::NotANetns,
                ) => says(ErrorCode::InvalidNetns)
                    .hint("the container's network namespace went away; recreate the container"),
                _ => e.into(),
            },
            CreateCause::Policy(e) => e.into(),
            CreateCause::Store(e) => e.into(),
            CreateCause::Ipam(e) => e.into(),
            CreateCause::Identity(e) => e.into(),
            CreateCause::NotUndone { cause, .. } => Self::from(*cause),
        }
    }
}

impl From<CreateError> for Failure {
    fn from(e: CreateError) -> Self {
        let message = e.to_string();
        let Self(answer) = e.cause.into();
        Self(ApiError { message, ..answer })
    }
}

/// HTTP status of a code.
#[must_use]
pub fn status(code: ErrorCode) -> StatusCode {
    match code {
        ErrorCode::InvalidRequest | ErrorCode::InvalidNetns => StatusCode::BAD_REQUEST,
        ErrorCode::Exists => StatusCode::CONFLICT,
        ErrorCode::NotFound => StatusCode::NOT_FOUND,
        // It may end without a changed request.
        ErrorCode::PoolExhausted | ErrorCode::LimitReached | ErrorCode::Overloaded | ErrorCode::Busy => {
            StatusCode::TOO_MANY_REQUESTS
        }
        ErrorCode::Unsupported => StatusCode::UNPROCESSABLE_ENTITY,
        ErrorCode::Unavailable | ErrorCode::DeadlineExceeded => StatusCode::SERVICE_UNAVAILABLE,
        ErrorCode::Delegate => StatusCode::BAD_GATEWAY,
        ErrorCode::Kernel | ErrorCode::Store | ErrorCode::Internal => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

impl IntoResponse for Failure {
    fn into_response(mut self) -> Response {
        let retry = self.0.retry_after_ms;
        let code = status(self.0.code);
        if operation::is_told(code) {
            self.0.op =
                self.0.op.or_else(|| wharf_kit::telemetry::operation::current().map(|op| op.to_string().into()));
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

/// Bytes kept at each end.
const MAX_END: usize = 400;

/// A message may repeat a long field name in its middle, and ends with the expected input.
fn unreadable(operation: &str, mut words: String) -> Failure {
    if words.len() > 2 * MAX_END {
        let middle = words.floor_char_boundary(MAX_END)..words.ceil_char_boundary(words.len() - MAX_END);
        words.replace_range(middle, " ... ");
    }
    Failure::new(ErrorCode::InvalidRequest, format!("{operation}: {words}"))
}

/// JSON; answers 400 with the position if invalid.
pub struct Body<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, state: &S) -> Result<Self, Failure> {
        match Json::<Object<T>>::from_request(request, state).await {
            Ok(Json(Object(value))) => Ok(Self(value)),
            Err(JsonRejection::MissingJsonContentType(_)) => {
                Err(Failure::new(ErrorCode::InvalidRequest, "read body: content-type must be application/json"))
            }
            Err(e) => Err(unreadable("read body", e.body_text())),
        }
    }
}

/// Answers 400 if invalid.
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

/// Answers 400 if not UTF-8.
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
    fn a_policy_of_another_namespace_is_hinted_at() {
        let hint = |elsewhere: &[&str]| {
            let name = PolicyName { kind: "NetworkPolicy".into(), namespace: "default".into(), name: "db".into() };
            let elsewhere = elsewhere.iter().map(|&namespace| namespace.to_owned()).collect();
            let error = Failure::from(PolicyError::Unknown { name, elsewhere }).0;
            assert_eq!(error.message, "delete NetworkPolicy default/db: there is no such policy");
            error.hint.unwrap_or_default()
        };
        assert_eq!(hint(&["shop"]), "NetworkPolicy db is in namespace shop: add `-n shop`");
        let many = hint(&["a", "b", "c", "d", "e", "f", "g"]);
        assert_eq!(many, "NetworkPolicy db is in the namespaces a, b, c, d, e and 2 more: name one with `-n`");
        assert_eq!(hint(&[]), "`wharf policy list` shows all policies");
    }

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
