//! Preserves the client's `x-forwarded-proto`, or its absence. Envoy adds a missing header, so another header holds the
//! client's value until the request leaves.

use envoy_types::pb::envoy::{
    config::{
        common::mutation_rules::v3::{HeaderMutation, header_mutation::Action},
        core::v3::{HeaderValue, HeaderValueOption, TypedExtensionConfig, header_value_option::HeaderAppendAction},
        route::v3::RouteConfiguration,
    },
    extensions::http::early_header_mutation::header_mutation::v3::HeaderMutation as EarlyMutation,
};

use super::pack;

const HEADER: &str = "x-forwarded-proto";
/// A client's header of this name is dropped.
const ASIDE: &str = "x-wharf-forwarded-proto";

pub(super) fn set_aside() -> TypedExtensionConfig {
    let remove = HeaderMutation { action: Some(Action::Remove(ASIDE.into())) };
    let copy = HeaderMutation { action: Some(Action::Append(copy(HEADER, ASIDE))) };
    TypedExtensionConfig {
        name: "envoy.http.early_header_mutation.header_mutation".into(),
        typed_config: Some(pack(&EarlyMutation { mutations: vec![remove, copy] })),
    }
}

/// Header for a rule; `None` if no request has it.
pub(super) fn place(name: &str) -> Option<&str> {
    match name {
        HEADER => Some(ASIDE),
        ASIDE => None,
        other => Some(other),
    }
}

/// Envoy applies virtual hosts first: they read [`ASIDE`] before its removal.
pub(super) fn put_back(mut routes: RouteConfiguration) -> RouteConfiguration {
    routes.request_headers_to_remove.push(ASIDE.into());
    for host in &mut routes.virtual_hosts {
        host.request_headers_to_remove = vec![HEADER.into()];
        host.request_headers_to_add = vec![copy(ASIDE, HEADER)];
    }
    routes
}

fn copy(from: &str, to: &str) -> HeaderValueOption {
    let header = HeaderValue { key: to.into(), value: format!("%REQ({from})%"), ..HeaderValue::default() };
    HeaderValueOption {
        header: Some(header),
        append_action: HeaderAppendAction::OverwriteIfExistsOrAdd.into(),
        keep_empty_value: false,
        ..HeaderValueOption::default()
    }
}
