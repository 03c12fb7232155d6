//! Endpoints.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::{
    ToSchema,
    openapi::{Object, ObjectBuilder, OneOfBuilder, Ref, Schema, schema::Type},
};

pub use wharf_names::{
    endpoint::{Enforcement, Level as RegenerateLevel, State as EndpointState},
    port::{NamedPort, Protocol, PublishedPort},
};

use crate::{DelegatedEndpoint, Finding, Health};

/// Body of `PUT /v1/endpoint/{id}`: everything that an ADD needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EndpointCreate {
    /// CNI container id.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length = 253)]
    pub container_id: String,
    /// Interface name inside the container, at most 15 bytes.
    #[schema(pattern = r"^[^/:%\s]+$", max_length = 15)]
    pub ifname: String,
    /// CNI network name.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length = 253)]
    pub network: String,
    /// Path of the network namespace.
    #[schema(pattern = "^/", max_length = 4096)]
    pub netns: String,
    /// IPAM pool; the agent's default when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length = 253)]
    pub pool: Option<String>,
    /// MTU in bytes; the agent's default when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1280, maximum = 65535)]
    pub mtu: Option<u32>,
    /// Requested MAC address; random when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^([0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2}$")]
    pub mac: Option<String>,
    /// Requested addresses, at most one of each family; any free addresses when empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub ips: Vec<IpAddr>,
    /// Labels, `source:key=value`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub labels: Vec<String>,
    /// Pod name (`K8S_POD_NAME`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_name: Option<String>,
    /// Pod namespace (`K8S_POD_NAMESPACE`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_namespace: Option<String>,
    /// Name of the container runtime that ran the CNI plugin. A GC by another runtime keeps the endpoint while its
    /// network namespace exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^[A-Za-z0-9_.-]+$", max_length = 15)]
    pub runtime: Option<String>,
    /// Milliseconds until the caller gives up; the agent then rolls the create back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u64>,
    /// Published ports, at most 1,024.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 1024)]
    pub ports: Vec<PublishedPort>,
    /// Whether traffic to other networks is masqueraded; the pool's setting when absent. The agent rejects true for a
    /// pool without masquerading.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub masquerade: Option<bool>,
    /// Bandwidth limits.
    #[serde(default, skip_serializing_if = "Bandwidth::is_unlimited")]
    pub bandwidth: Bandwidth,
    /// Prefixes that the container may use as sources besides its addresses, without host bits, at most 8 of both
    /// families together. They contain no address of pools, services, the node and its endpoints.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>, max_items = 8)]
    pub source_prefixes: Vec<IpNet>,
    /// Type of the CNI IPAM plugin that leased `ips`. The agent then neither leases nor releases. The addresses must
    /// not be in its pools; `pool` must be absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length = 253)]
    pub ipam: Option<String>,
    /// Gateways of `ips`, at most one of each family; only with `ipam`. The router's address replaces an absent
    /// gateway.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>, max_items = 2)]
    pub gateways: Vec<IpAddr>,
    /// Destinations that the container reaches through its gateways, at most 64; everything when absent, nothing when
    /// empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_items = 64)]
    pub routes: Option<Vec<ContainerRoute>>,
    /// Whether another plugin made the interface and leased `ips`. The agent attaches programs and policy, and neither
    /// changes nor removes the interface. Pool, IPAM, MTU, MAC address, routes, ports, masquerading and source prefixes
    /// cannot be requested.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub chained: bool,
}

/// A route of a container through its gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ContainerRoute {
    /// Destination, without host bits.
    #[schema(value_type = String, example = "10.2.0.0/16")]
    pub dst: IpNet,
    /// Gateway of the destination's family; optional in a request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub gw: Option<IpAddr>,
}

/// Bandwidth limits of an endpoint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Bandwidth {
    /// To the container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ingress: Option<BandwidthLimit>,
    /// From the container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<BandwidthLimit>,
}

impl Bandwidth {
    /// True without limits.
    #[must_use]
    pub fn is_unlimited(&self) -> bool {
        *self == Self::default()
    }
}

/// The limit of one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BandwidthLimit {
    /// Bits per second; 0 for no limit.
    pub rate: u64,
    /// Burst in bits. 0, and the very large numbers that runtimes send for no preference, mean a burst derived from
    /// the rate.
    #[serde(default)]
    pub burst: u64,
}

/// Owner of an endpoint's link.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum EndpointMode {
    /// Wharf.
    #[default]
    Own,
    /// Another plugin that Wharf is chained after.
    Chained,
}

impl EndpointMode {
    /// True for a link that Wharf made.
    #[must_use]
    pub const fn is_own(&self) -> bool {
        matches!(self, Self::Own)
    }
}

/// An endpoint. Field names are stable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Endpoint {
    /// Endpoint id.
    pub id: u16,
    /// Epoch of the attachment.
    pub epoch: u64,
    /// State.
    pub state: EndpointState,
    /// CNI container id.
    pub container_id: String,
    /// Interface name inside the container.
    pub ifname: String,
    /// CNI network name.
    pub network: String,
    /// Security identity.
    pub identity: u32,
    /// Labels, sorted.
    pub labels: Vec<String>,
    /// IPv4 address, without a prefix length.
    #[schema(value_type = Option<String>)]
    pub ipv4: Option<Ipv4Addr>,
    /// IPv6 address, without a prefix length.
    #[schema(value_type = Option<String>)]
    pub ipv6: Option<Ipv6Addr>,
    /// Interface index on the host side.
    pub ifindex: u32,
    /// Interface name on the host side.
    pub host_ifname: String,
    /// MAC of the container side.
    pub container_mac: String,
    /// MAC of the host side.
    pub host_mac: String,
    /// IPv4 gateway of the container.
    #[schema(value_type = Option<String>)]
    pub gateway4: Option<Ipv4Addr>,
    /// IPv6 gateway of the container.
    #[schema(value_type = Option<String>)]
    pub gateway6: Option<Ipv6Addr>,
    /// MTU, bytes.
    pub mtu: u32,
    /// Address pool; empty with another IPAM.
    pub pool: String,
    /// Type of the CNI IPAM plugin that leased its addresses and releases them; absent when the agent or an API
    /// caller leased them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipam: Option<String>,
    /// Routes through the gateways; absent for default routes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routes: Option<Vec<ContainerRoute>>,
    /// Path of the network namespace, from the runtime.
    pub netns: String,
    /// Pod name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_name: Option<String>,
    /// Pod namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_namespace: Option<String>,
    /// Container runtime that added it, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runtime: Option<String>,
    /// Time of creation, milliseconds since the Unix epoch.
    pub created_unix_ms: u64,
    /// Published ports.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<PublishedPort>,
    /// Whether port translation is off because the agent now runs with `--masquerade off`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ports_off: bool,
    /// Whether traffic to other networks is masqueraded; the pool's setting when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub masquerade: Option<bool>,
    /// Bandwidth limits.
    #[serde(default, skip_serializing_if = "Bandwidth::is_unlimited")]
    pub bandwidth: Bandwidth,
    /// Additional source prefixes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub source_prefixes: Vec<IpNet>,
    /// Policy enforcement; `default` follows the node's mode.
    #[serde(default, skip_serializing_if = "Enforcement::is_default")]
    pub policy_enforcement: Enforcement,
    /// Ports by the names in policy rules.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub named_ports: BTreeMap<String, NamedPort>,
    /// Owner of the link.
    #[serde(default, skip_serializing_if = "EndpointMode::is_own")]
    pub mode: EndpointMode,
    /// Data from the service in delegated mode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delegated: Option<Box<DelegatedEndpoint>>,
    /// Current activity.
    pub status: EndpointStatus,
}

/// Current activity of an endpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EndpointStatus {
    /// Phase of the current create, build or delete; otherwise empty.
    pub phase: String,
    /// Start of the phase, Unix ms.
    pub since_unix_ms: u64,
    /// Awaited condition; empty without a wait.
    pub waits_for: String,
    /// What ends the wait.
    pub ends_when: String,
    /// Desired policy revision; 0 without policy.
    pub desired_revision: u64,
    /// Realized policy revision; 0 without policy.
    pub realized_revision: u64,
    /// Successful builds.
    pub regenerations: u64,
    /// Failed builds since the last success.
    pub failures: u32,
    /// Error of the last build, if it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// Why the network fails although no build failed: the kernel has no link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// Severity of a log entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LogStatus {
    /// Success.
    Ok,
    /// Refused or unusual, without loss.
    Warning,
    /// Failed.
    Failure,
}

/// An entry of an endpoint's log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EndpointLogEntry {
    /// Milliseconds since the Unix epoch.
    pub time_unix_ms: u64,
    /// Severity.
    pub status: LogStatus,
    /// State after the event.
    pub state: EndpointState,
    /// State machine event, or step.
    pub event: String,
    /// In words.
    pub message: String,
}

/// Body of `GET /v1/endpoint/{id}/healthz`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EndpointHealth {
    /// Worst of the parts.
    pub overall: Health,
    /// Programs and maps match the desired state.
    pub bpf: Health,
    /// Realized policy equals desired.
    pub policy: Health,
    /// Link, addresses, routes and MTU match.
    pub connected: Health,
    /// Mismatches in the kernel.
    pub findings: Vec<Finding>,
    /// Desired policy revision; 0 without policy.
    #[serde(default)]
    pub desired_revision: u64,
    /// Realized policy revision; 0 without policy.
    #[serde(default)]
    pub realized_revision: u64,
    /// Results of test packets.
    #[serde(default)]
    pub self_check: crate::SelfCheck,
}

/// Body of `PATCH /v1/endpoint/{id}`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EndpointPatch {
    /// New labels (replace all), `source:key=value`, at most 256; a change of identity regenerates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_items = 256, example = json!(["k8s:app=web"]))]
    pub labels: Option<Vec<String>>,
    /// Trace forwarded packets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace: Option<bool>,
    /// Enforcement of policy for this endpoint: `always`, in both directions; `never`, no policy applies; `default`
    /// follows the node's mode. The node's mode `never` takes precedence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy_enforcement: Option<Enforcement>,
    /// Named ports to set or, with `null`, remove (RFC 7396). At most 64 may remain. A name is an IANA service name
    /// (RFC 6335 section 5.1).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schema(schema_with = named_port_changes)]
    pub named_ports: BTreeMap<String, Option<NamedPort>>,
    /// New source prefixes instead of the current ones, as in a create. Rejected for a chained endpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<String>>, max_items = 8, example = json!(["10.200.0.0/16"]))]
    pub source_prefixes: Option<Vec<IpNet>>,
    /// Regenerate at this level; the answer waits for completion.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub regenerate: Option<RegenerateLevel>,
}

fn named_port_changes() -> Object {
    let null = ObjectBuilder::new().schema_type(Type::Null);
    let either = OneOfBuilder::new().item(null).item(Ref::from_schema_name("NamedPort")).build();
    let example = json!({"http": {"port": 80, "protocol": "tcp"}, "metrics": null});
    ObjectBuilder::new().additional_properties(Some(Schema::OneOf(either))).examples([example]).build()
}

/// Body of `GET /v1/endpoint/{id}/labels`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EndpointLabels {
    /// All labels, sorted.
    pub labels: Vec<String>,
    /// Labels that determine the identity.
    pub security_relevant: Vec<String>,
    /// Identity.
    pub identity: u32,
}

/// Body of `GET /v1/endpoint/{id}/config`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EndpointConfigView {
    /// Desired settings.
    pub desired: BTreeMap<String, String>,
    /// Settings in the kernel.
    pub realized: BTreeMap<String, String>,
}

/// A failed step of a delete.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StepError {
    /// Step.
    pub step: String,
    /// Endpoint.
    pub endpoint: String,
    /// Failure and cause.
    pub message: String,
}

/// Result of a delete: 200 without `errors`, otherwise 206.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeleteResult {
    /// Deleted endpoints.
    pub deleted: Vec<u16>,
    /// Released leases without an endpoint.
    #[serde(default)]
    #[schema(value_type = Vec<String>)]
    pub leases_released: Vec<IpAddr>,
    /// Failed steps; other steps are complete.
    pub errors: Vec<StepError>,
    /// In delegated mode: the service does not answer; the delete has a durable record.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub deferred: bool,
    /// Of `POST /v1/gc`: unlisted endpoints that stay, because another runtime added them and their network
    /// namespaces still exist.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kept: Vec<KeptEndpoint>,
}

/// An endpoint that a GC did not delete.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KeptEndpoint {
    /// Endpoint.
    pub endpoint: u16,
    /// Container runtime that added it.
    pub runtime: String,
}

/// Body of `POST /v1/gc`: deletes every attachment of `network` that is not listed, except those that another runtime
/// added and whose network namespace still exists.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GcRequest {
    /// CNI network name.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length = 253)]
    pub network: String,
    /// Attachments to keep.
    #[serde(deserialize_with = "crate::object::list")]
    pub valid: Vec<GcAttachment>,
    /// Container runtime of the list; endpoints of every runtime are deleted when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^[A-Za-z0-9_.-]+$", max_length = 15)]
    pub runtime: Option<String>,
}

/// An attachment to keep.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GcAttachment {
    /// CNI container id.
    pub container_id: String,
    /// Interface name.
    pub ifname: String,
}

/// Filters of `GET /v1/endpoint`; all must match.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct EndpointFilter {
    /// CNI container id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container_id: Option<String>,
    /// CNI network name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
    /// State.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<EndpointState>,
    /// A label, `source:key=value`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// Pod name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_name: Option<String>,
}

/// Query of `DELETE /v1/endpoint/{id}` and `DELETE /v1/endpoint`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct DeleteQuery {
    /// Container whose endpoints are deleted: required for `DELETE /v1/endpoint`, rejected elsewhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container_id: Option<String>,
    /// Keep the leases (NoIPRelease).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_ip_release: Option<bool>,
    /// Delete only in this network: an id with an interface name may exist in several networks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
    /// Delete only an endpoint with this epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<u64>,
}
