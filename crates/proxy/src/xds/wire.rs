//! Conversion of messages.

use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse, Resource,
};

use super::{Request, Response};

pub(crate) fn sotw_request(request: DiscoveryRequest) -> Request {
    Request {
        type_url: request.type_url,
        nonce: request.response_nonce,
        error: request.error_detail.map(|status| status.message),
        version: request.version_info,
        has: Vec::new(),
        names: request.resource_names,
    }
}

pub(crate) fn sotw_response(response: Response) -> DiscoveryResponse {
    DiscoveryResponse {
        version_info: response.version.to_string(),
        resources: response.resources.into_iter().map(|(_, _, resource)| resource).collect(),
        type_url: response.type_url,
        nonce: response.nonce,
        ..DiscoveryResponse::default()
    }
}

pub(crate) fn delta_request(request: DeltaDiscoveryRequest) -> Request {
    let mut has: Vec<_> = request.initial_resource_versions.into_iter().collect();
    has.sort_unstable();
    Request {
        type_url: request.type_url,
        nonce: request.response_nonce,
        error: request.error_detail.map(|status| status.message),
        version: String::new(),
        has,
        names: request.resource_names_subscribe,
    }
}

pub(crate) fn delta_response(response: Response) -> DeltaDiscoveryResponse {
    let resources = response.resources.into_iter().map(|(name, version, resource)| Resource {
        name,
        version: version.to_string(),
        resource: Some(resource),
        ..Resource::default()
    });
    DeltaDiscoveryResponse {
        system_version_info: response.version.to_string(),
        resources: resources.collect(),
        type_url: response.type_url,
        removed_resources: response.removed,
        nonce: response.nonce,
        ..DeltaDiscoveryResponse::default()
    }
}
