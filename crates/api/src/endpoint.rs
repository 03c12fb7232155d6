//! Endpoints.

use std::{
    collections::BTreeMap,
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    num::NonZeroU16,
};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::{
    ToSchema,
    openapi::{Object, ObjectBuilder, OneOfBuilder, Ref, Schema, schema::Type},
};

use crate::{DelegatedEndpoint, Finding, Health, PolicyEnforcement};

/// Body of `PUT /v1/endpoint/{id}`: everything an ADD needs, in one request.
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
    /// Path of the container's network namespace.
    #[schema(pattern = "^/", max_length = 4096)]
    pub netns: String,
    /// IPAM pool; the agent's default pool when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length = 253)]
    pub pool: Option<String>,
    /// MTU in bytes; the agent's default when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1280, maximum = 65535)]
    pub mtu: Option<u32>,
    /// MAC address asked for; a random one when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^([0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2}$")]
    pub mac: Option<String>,
    /// Addresses asked for, at most one of each family; any free ones when empty.
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
    /// Name of the container runtime: of the program that ran the CNI plugin. A GC by another one keeps the endpoint while its
    /// network namespace exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^[A-Za-z0-9_.-]+$", max_length = 15)]
    pub runtime: Option<String>,
    /// The caller gives up after this many milliseconds; the agent then undoes what it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u64>,
    /// Ports of the node that lead to the container, at most 1,024.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 1024)]
    pub ports: Vec<PublishedPort>,
    /// Whether what the container sends to other networks takes an address of the node; as the pool has it when absent.
    /// true is refused where the pool is not masqueraded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub masquerade: Option<bool>,
    /// Limits of the bandwidth.
    #[serde(default, skip_serializing_if = "Bandwidth::is_unlimited")]
    pub bandwidth: Bandwidth,
    /// Type of the CNI IPAM plugin that leased `ips`. The agent leases and releases nothing then; the addresses must be in none
    /// of its pools, and `pool` must be absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length = 253)]
    pub ipam: Option<String>,
    /// Gateways of `ips`, at most one of each family, only with `ipam`; the router's addresses for families without one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>, max_items = 2)]
    pub gateways: Vec<IpAddr>,
    /// What the container reaches by its gateways, at most 64 destinations; everything when absent, nothing when empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_items = 64)]
    pub routes: Option<Vec<ContainerRoute>>,
    /// Another plugin made the interface, and leased its addresses, which are `ips`. The agent attaches programs and policy to it, and neither changes nor
    /// removes anything of it; so pool, IPAM, MTU, MAC address, routes, ports and masquerading cannot be asked for.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub chained: bool,
}

/// A route of a container by its gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ContainerRoute {
    /// Destination, without host bits.
    #[schema(value_type = String, example = "10.2.0.0/16")]
    pub dst: IpNet,
    /// The gateway of the destination's family, which is the only one there is; it may be left out of a request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub gw: Option<IpAddr>,
}

/// Limits of an endpoint's bandwidth.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Bandwidth {
    /// Toward the container.
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
    /// Bits a second; 0 is no limit.
    pub rate: u64,
    /// Bits that may pass at once after a pause; 0, and the largest numbers that runtimes send when they have no wish, are a
    /// burst that follows from the rate.
    #[serde(default)]
    pub burst: u64,
}

/// Protocol of a published port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum PortProtocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

impl fmt::Display for PortProtocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        })
    }
}

/// A port of an endpoint that has a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NamedPort {
    /// Port of the container.
    #[schema(value_type = u16, minimum = 1)]
    pub port: NonZeroU16,
    /// Protocol.
    pub protocol: PortProtocol,
}

/// A port of the node that leads to a port of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PublishedPort {
    /// Protocol of both ports.
    pub protocol: PortProtocol,
    /// The one address of the node that has the port. When absent, every address of each family that the container has;
    /// 0.0.0.0 and :: are every address of their family.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub host_ip: Option<IpAddr>,
    /// Port of the node.
    #[schema(value_type = u16, minimum = 1)]
    pub host_port: NonZeroU16,
    /// Port of the container.
    #[schema(value_type = u16, minimum = 1)]
    pub container_port: NonZeroU16,
}

impl PublishedPort {
    /// The node's side, as users write it: `198.51.100.1:8080/tcp`, `8080/udp`.
    #[must_use]
    pub fn host_side(&self) -> String {
        let port = self.host_port.get();
        match self.host_ip {
            Some(ip) => format!("{}/{}", SocketAddr::new(ip, port), self.protocol),
            None => format!("{port}/{}", self.protocol),
        }
    }
}

/// Endpoint state; the words are those of the state machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum EndpointState {
    /// Labels are not resolved to an identity yet.
    WaitingForIdentity,
    /// A build is owed.
    WaitingToRegenerate,
    /// A build runs.
    Regenerating,
    /// Realized is desired.
    Ready,
    /// Read from the store after a restart, not rebuilt yet.
    Restoring,
    /// Being taken away.
    Disconnecting,
    /// Gone.
    Disconnected,
    /// Its create failed.
    Invalid,
}

/// Who made an endpoint's link, connects it and removes it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum EndpointMode {
    /// Wharf.
    #[default]
    Own,
    /// Another plugin, behind which Wharf is chained.
    Chained,
}

impl EndpointMode {
    /// True for a link of Wharf's own.
    #[must_use]
    pub const fn is_own(&self) -> bool {
        matches!(self, Self::Own)
    }
}

/// An endpoint as clients see it. `wharf endpoint list -o json` prints an array of these; the names are kept stable.
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
    /// Index of the host side of its veth pair.
    pub ifindex: u32,
    /// Name of the host side.
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
    /// Pool its addresses come from; empty when another IPAM leased them.
    pub pool: String,
    /// Type of the CNI IPAM plugin that leased its addresses and will release them; absent when the agent or a caller of its
    /// API leased them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipam: Option<String>,
    /// Its routes by its gateways; absent when it has the default routes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routes: Option<Vec<ContainerRoute>>,
    /// Path of the container's network namespace as the runtime gave it.
    pub netns: String,
    /// Pod name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_name: Option<String>,
    /// Pod namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_namespace: Option<String>,
    /// Name of the container runtime that added it, where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runtime: Option<String>,
    /// When it was created, milliseconds since the Unix epoch.
    pub created_unix_ms: u64,
    /// Published ports.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<PublishedPort>,
    /// True where nothing translates its ports: it was made before the agent was started with `--masquerade off`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ports_off: bool,
    /// Whether what it sends to other networks takes an address of the node; as the pool has it when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub masquerade: Option<bool>,
    /// Limits of its bandwidth.
    #[serde(default, skip_serializing_if = "Bandwidth::is_unlimited")]
    pub bandwidth: Bandwidth,
    /// Enforcement of policy that it has in place of the node's mode; `default` follows the mode.
    #[serde(default, skip_serializing_if = "PolicyEnforcement::is_default")]
    pub policy_enforcement: PolicyEnforcement,
    /// Ports that rules of policies name, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub named_ports: BTreeMap<String, NamedPort>,
    /// Who made its link.
    #[serde(default, skip_serializing_if = "EndpointMode::is_own")]
    pub mode: EndpointMode,
    /// In delegated mode: what the service says beside the rest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delegated: Option<Box<DelegatedEndpoint>>,
    /// What it is doing.
    pub status: EndpointStatus,
}

/// What an endpoint is doing, since when, and what would end the wait.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EndpointStatus {
    /// Phase of the create, build or delete that runs; empty when nothing runs.
    pub phase: String,
    /// Since when, milliseconds since the Unix epoch.
    pub since_unix_ms: u64,
    /// What it waits for; empty when it does not wait.
    pub waits_for: String,
    /// What would end the wait.
    pub ends_when: String,
    /// Policy revision asked for; 0 while the endpoint has no policy.
    pub desired_revision: u64,
    /// Policy revision in force; 0 while the endpoint has no policy.
    pub realized_revision: u64,
    /// Builds that succeeded.
    pub regenerations: u64,
    /// Builds that failed since the last that succeeded.
    pub failures: u32,
    /// Last error, if the last build failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// Why it has no network although no build failed: its link is gone, as a look at the kernel shows when this is answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// How a log entry is to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LogStatus {
    /// As it should.
    Ok,
    /// Refused or odd, nothing lost.
    Warning,
    /// Failed.
    Failure,
}

/// A line of the endpoint's status log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EndpointLogEntry {
    /// Milliseconds since the Unix epoch.
    pub time_unix_ms: u64,
    /// How to read it.
    pub status: LogStatus,
    /// State after it.
    pub state: EndpointState,
    /// Event of the state machine, or the step.
    pub event: String,
    /// In words.
    pub message: String,
}

/// Body of `GET /v1/endpoint/{id}/healthz`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EndpointHealth {
    /// Worst of the parts.
    pub overall: Health,
    /// Programs and maps are what they should be.
    pub bpf: Health,
    /// Realized policy is desired policy.
    pub policy: Health,
    /// Link, addresses, routes, MTU are what they should be.
    pub connected: Health,
    /// What was found amiss, by looking at the kernel now.
    pub findings: Vec<Finding>,
    /// Policy revision asked for; 0 while the endpoint has no policy.
    #[serde(default)]
    pub desired_revision: u64,
    /// Policy revision in force; 0 while the endpoint has no policy.
    #[serde(default)]
    pub realized_revision: u64,
    /// Test packets through its programs.
    #[serde(default)]
    pub self_check: crate::SelfCheck,
}

/// Body of `PATCH /v1/endpoint/{id}`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EndpointPatch {
    /// New labels (all of them), `source:key=value`, at most 256; a change of identity regenerates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_items = 256, example = json!(["k8s:app=web"]))]
    pub labels: Option<Vec<String>>,
    /// Trace forwarded packets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace: Option<bool>,
    /// Enforcement of policy in place of the node's mode: `always`, in both directions; `never`, no policy is about it; `default`
    /// follows the mode. The mode `never` goes before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy_enforcement: Option<PolicyEnforcement>,
    /// Named ports that are put or, with `null`, removed (RFC 7396); those that are not named here stay. 64 at most remain. A name
    /// is an IANA service name (RFC 6335 section 5.1).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schema(schema_with = named_port_changes)]
    pub named_ports: BTreeMap<String, Option<NamedPort>>,
    /// Regenerate at this level, and answer when it is done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub regenerate: Option<RegenerateLevel>,
}

/// Named ports or null, by name.
fn named_port_changes() -> Object {
    let null = ObjectBuilder::new().schema_type(Type::Null);
    let either = OneOfBuilder::new().item(null).item(Ref::from_schema_name("NamedPort")).build();
    let example = json!({"http": {"port": 80, "protocol": "tcp"}, "metrics": null});
    ObjectBuilder::new().additional_properties(Some(Schema::OneOf(either))).examples([example]).build()
}

/// How much a regeneration renews.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RegenerateLevel {
    /// Maps (and redirects) only.
    Policy,
    /// Programs too.
    Datapath,
}

/// Body of `GET /v1/endpoint/{id}/labels`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EndpointLabels {
    /// All labels, sorted.
    pub labels: Vec<String>,
    /// Those that make the identity.
    pub security_relevant: Vec<String>,
    /// The identity they make.
    pub identity: u32,
}

/// Body of `GET /v1/endpoint/{id}/config`: desired and realized side by side.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EndpointConfigView {
    /// What the agent wants.
    pub desired: BTreeMap<String, String>,
    /// What the kernel holds now.
    pub realized: BTreeMap<String, String>,
}

/// An error of one step of a delete.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StepError {
    /// Step.
    pub step: String,
    /// Endpoint.
    pub endpoint: String,
    /// What failed and why.
    pub message: String,
}

/// Answer of a delete: 200 when `errors` is empty, 206 otherwise.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeleteResult {
    /// Endpoints deleted.
    pub deleted: Vec<u16>,
    /// Leases released that belonged to no endpoint.
    #[serde(default)]
    #[schema(value_type = Vec<String>)]
    pub leases_released: Vec<IpAddr>,
    /// Steps that failed; the rest was done all the same.
    pub errors: Vec<StepError>,
    /// In delegated mode: the service does not answer, and a durable record stands for the delete.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub deferred: bool,
    /// Of `POST /v1/gc`: endpoints that are not listed and stay, because another runtime added them and their network namespaces
    /// still exist.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kept: Vec<KeptEndpoint>,
}

/// An endpoint that a GC did not delete.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KeptEndpoint {
    /// Endpoint.
    pub endpoint: u16,
    /// Name of the container runtime that added it.
    pub runtime: String,
}

/// Body of `POST /v1/gc`: everything of `network` that is not listed goes, except what another runtime added whose network
/// namespace still exists.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GcRequest {
    /// CNI network name.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length = 253)]
    pub network: String,
    /// Attachments to keep.
    #[serde(deserialize_with = "crate::object::list")]
    pub valid: Vec<GcAttachment>,
    /// Name of the container runtime whose list this is. When absent, endpoints of every runtime go.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^[A-Za-z0-9_.-]+$", max_length = 15)]
    pub runtime: Option<String>,
}

/// An attachment the runtime still knows.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GcAttachment {
    /// CNI container id.
    pub container_id: String,
    /// Interface name.
    pub ifname: String,
}

/// Query of `GET /v1/endpoint`; all filters must match.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct EndpointFilter {
    /// CNI container id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container_id: Option<String>,
    /// CNI network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
    /// State.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<EndpointState>,
    /// A label that it carries, `source:key=value`.
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
    /// Of `DELETE /v1/endpoint`: the container whose endpoints go. Required there, refused elsewhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container_id: Option<String>,
    /// Keep the leases (NoIPRelease).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_ip_release: Option<bool>,
    /// Delete only if the endpoint is of this network: an interface name is unique in a container, so the id alone would
    /// also fit an endpoint that another network gave it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
    /// Delete only if the endpoint is of this epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<u64>,
}
