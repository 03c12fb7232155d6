//! `x-forwarded-proto` as the client sent it, or not at all.
//!
//! Envoy's connection manager adds the header to every request that lacks it, and has no setting against that. The rules would see it, and so would
//! servers. So the client's own value is set aside before the manager looks (an early mutation) and put back before the rules do.

use envoy_types::pb::envoy::{
    config::{
        common::mutation_rules::v3::{HeaderMutation, header_mutation::Action},
        core::v3::{HeaderValue, HeaderValueOption, TypedExtensionConfig, header_value_option::HeaderAppendAction},
    },
    extensions::{
        filters::http::header_mutation::v3::{HeaderMutation as MutationFilter, Mutations},
        http::early_header_mutation::header_mutation::v3::HeaderMutation as EarlyMutation,
    },
};

use super::pack;

const HEADER: &str = "x-forwarded-proto";
/// Where the client's value is meanwhile. A client's own header of this name is dropped.
const ASIDE: &str = "x-wharf-forwarded-proto";

/// Sets the value aside.
pub(super) fn set_aside() -> TypedExtensionConfig {
    TypedExtensionConfig {
        name: "envoy.http.early_header_mutation.header_mutation".into(),
        typed_config: Some(pack(&EarlyMutation { mutations: vec![remove(ASIDE), copy(HEADER, ASIDE)] })),
    }
}

/// The filter that puts it back.
pub(super) fn put_back() -> MutationFilter {
    MutationFilter {
        mutations: Some(Mutations {
            request_mutations: vec![remove(HEADER), copy(ASIDE, HEADER), remove(ASIDE)],
            ..Mutations::default()
        }),
        ..MutationFilter::default()
    }
}

fn remove(name: &str) -> HeaderMutation {
    HeaderMutation { action: Some(Action::Remove(name.into())) }
}

/// Nothing, if there is nothing to copy.
fn copy(from: &str, to: &str) -> HeaderMutation {
    let header = HeaderValue { key: to.into(), value: format!("%REQ({from})%"), ..HeaderValue::default() };
    HeaderMutation {
        action: Some(Action::Append(HeaderValueOption {
            header: Some(header),
            append_action: HeaderAppendAction::OverwriteIfExistsOrAdd.into(),
            keep_empty_value: false,
            ..HeaderValueOption::default()
        })),
    }
}
