//! `x-forwarded-proto` as the client sent it, or not at all.
//!
//! Envoy's connection manager adds the header to every request that lacks it, and has no setting against that. The rules would see it, and so would
//! servers. So the client's own value is set aside before the manager looks (an early mutation), rules look for it there, and it is put back where the
//! request leaves for its server.

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
/// Where the client's value is meanwhile. A client's own header of this name is dropped.
const ASIDE: &str = "x-wharf-forwarded-proto";

/// Sets the value aside.
pub(super) fn set_aside() -> TypedExtensionConfig {
    let remove = HeaderMutation { action: Some(Action::Remove(ASIDE.into())) };
    let copy = HeaderMutation { action: Some(Action::Append(copy(HEADER, ASIDE))) };
    TypedExtensionConfig {
        name: "envoy.http.early_header_mutation.header_mutation".into(),
        typed_config: Some(pack(&EarlyMutation { mutations: vec![remove, copy] })),
    }
}

/// Where a rule finds the header of this name; `None` for one that no request has there.
pub(super) fn place(name: &str) -> Option<&str> {
    match name {
        HEADER => Some(ASIDE),
        ASIDE => None,
        other => Some(other),
    }
}

/// Puts it back. Envoy removes before it adds, and goes from virtual hosts to the whole: the value must be read before its place is cleared.
pub(super) fn put_back(mut routes: RouteConfiguration) -> RouteConfiguration {
    routes.request_headers_to_remove.push(ASIDE.into());
    for host in &mut routes.virtual_hosts {
        host.request_headers_to_remove = vec![HEADER.into()];
        host.request_headers_to_add = vec![copy(ASIDE, HEADER)];
    }
    routes
}

/// Nothing, if there is nothing to copy.
fn copy(from: &str, to: &str) -> HeaderValueOption {
    let header = HeaderValue { key: to.into(), value: format!("%REQ({from})%"), ..HeaderValue::default() };
    HeaderValueOption {
        header: Some(header),
        append_action: HeaderAppendAction::OverwriteIfExistsOrAdd.into(),
        keep_empty_value: false,
        ..HeaderValueOption::default()
    }
}
