//! Request and response bodies.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Stable error codes; clients act on these, people read the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorCode {
    /// The body or a parameter does not parse, or breaks a rule.
    InvalidRequest,
    /// The network namespace is gone, is not one, or is the node's own.
    InvalidNetns,
    /// An endpoint, or an interface of that name, is there already.
    Exists,
    /// No such endpoint, lease, map or pool.
    NotFound,
    /// The pool has no free address.
    PoolExhausted,
    /// No free endpoint id, or another limit of the node.
    LimitReached,
    /// Too much at once; try again after `retry_after_ms`.
    Overloaded,
    /// The endpoint is in a state that does not allow this now (being created, being deleted).
    Busy,
    /// The request's own deadline passed; what was done is undone.
    DeadlineExceeded,
    /// The kernel refused an operation.
    Kernel,
    /// The store refused an operation.
    Store,
    /// The agent is starting or stopping.
    Unavailable,
    /// Understood, and not something this agent can do.
    Unsupported,
    /// A fault of the agent itself.
    Internal,
}

/// Body of every answer that is an error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ApiError {
    /// Stable code.
    pub code: ErrorCode,
    /// Operation, subject and cause.
    pub message: String,
    /// What the user can do, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// After how many milliseconds a retry makes sense (429 and 503).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
    /// The operation this is about, as the agent's log lines name it in their field `op` (for example `c-000012`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub op: Option<Box<str>>,
}

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
    /// The caller gives up after this many milliseconds; the agent then undoes what it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u64>,
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
    /// Pool its addresses come from.
    pub pool: String,
    /// Path of the container's network namespace as the runtime gave it.
    pub netns: String,
    /// Pod name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_name: Option<String>,
    /// Pod namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_namespace: Option<String>,
    /// When it was created, milliseconds since the Unix epoch.
    pub created_unix_ms: u64,
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

/// Overall or per-part health.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Health {
    /// As it should be.
    Ok,
    /// Not known yet, or not applicable now.
    Pending,
    /// Works in part.
    Degraded,
    /// Does not work.
    Failing,
}

/// Who mends a finding.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MendedBy {
    /// The agent: its leak audit, when it has seen it twice, or `audit --repair` at once.
    Agent,
    /// `audit --repair`, when an operator asks for it: it takes something away from a container that may live.
    Removal,
    /// The container, whose own doing it is: its endpoint fails, the node is well.
    Container,
    /// Nobody: a notice, nothing is amiss.
    Nobody,
    /// An operator.
    #[default]
    Operator,
}

/// Something that is not as it should be.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub struct Finding {
    /// Kind of object: `link`, `route`, `pin`, `lease`, `endpoint`, `map-row`, `program`, `address`, ...
    pub object: String,
    /// Which one.
    pub subject: String,
    /// What is wrong, both sides named.
    pub problem: String,
    /// Whom it belongs or belonged to, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// True when `audit --repair` may mend it.
    #[serde(default)]
    pub repairable: bool,
    /// Who mends it.
    #[serde(default)]
    pub mended_by: MendedBy,
    /// What an operator should do.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub remedy: String,
    /// What a repair did, or why it did not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repair: Option<String>,
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
    /// Regenerate at this level, and answer when it is done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub regenerate: Option<RegenerateLevel>,
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
}

/// Body of `POST /v1/gc`: everything of `network` that is not listed goes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GcRequest {
    /// CNI network name.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length = 253)]
    pub network: String,
    /// Attachments to keep.
    #[serde(deserialize_with = "crate::object::list")]
    pub valid: Vec<GcAttachment>,
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

/// Body of `POST /v1/ipam`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct IpamAllocate {
    /// Pool; the default pool when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length = 253, example = "default")]
    pub pool: Option<String>,
    /// `ipv4`, `ipv6`, or both when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub family: Option<IpFamily>,
    /// Who will hold it; shown in `wharf ipam list`.
    #[schema(pattern = r"^[^\x00-\x1f\x7f-\x9f]+$", max_length = 253, example = "me")]
    pub owner: String,
}

/// Address family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum IpFamily {
    /// IPv4.
    Ipv4,
    /// IPv6.
    Ipv6,
}

/// Answer of `POST /v1/ipam`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IpamAllocation {
    /// Leases made: none or one of each family.
    pub leases: Vec<IpamLease>,
}

/// A lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IpamLease {
    /// Address.
    #[schema(value_type = String)]
    pub ip: IpAddr,
    /// Pool.
    pub pool: String,
    /// Owner in words: an attachment, a caller's name, or `node`.
    pub owner: String,
    /// Milliseconds since the Unix epoch.
    pub since_unix_ms: u64,
}

/// Body of `GET /v1/ipam`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IpamView {
    /// Pools with their fill.
    pub pools: Vec<PoolView>,
    /// Every lease, by address.
    pub leases: Vec<IpamLease>,
    /// Addresses that rest, by address.
    #[serde(default)]
    pub resting: Vec<crate::RestingAddress>,
}

/// A pool's fill, one row for each family.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PoolView {
    /// Pool.
    pub name: String,
    /// Family.
    pub family: IpFamily,
    /// CIDRs.
    pub cidrs: Vec<String>,
    /// Addresses given out.
    pub used: u64,
    /// Addresses that were given back and rest.
    #[serde(default)]
    pub resting: u64,
    /// Addresses that can be given out in all (capped at `u64::MAX`).
    pub total: u64,
}

/// Body of `GET /v1/map`: a row for each map.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BpfMap {
    /// `ENDPOINTS`, or `<endpoint id>/CONFIG` (`GET /v1/map/{name}` takes `.` for the `/` too: `1.CONFIG`).
    pub name: String,
    /// Kind in the kernel's words.
    pub kind: String,
    /// Rows in use, where that can be counted.
    pub entries: Option<u64>,
    /// Capacity, rows (bytes for a ring buffer).
    pub max_entries: u64,
    /// Kernel memory, bytes.
    pub memlock_bytes: u64,
}

/// Body of `GET /v1/map/{name}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BpfMapDump {
    /// The map.
    pub map: BpfMap,
    /// Its rows in readable form: column name to value.
    pub rows: Vec<BTreeMap<String, String>>,
}

/// A row of counters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MetricRow {
    /// Endpoint id; none for the totals of endpoints that are gone.
    pub endpoint: Option<u16>,
    /// `ingress` or `egress`.
    pub direction: String,
    /// Reason's name.
    pub reason: String,
    /// True when the packets were dropped.
    pub dropped: bool,
    /// Packets.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
}

/// A line of `GET /v1/monitor` (newline-delimited JSON).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case", tag = "type")]
pub enum MonitorEvent {
    /// A packet was dropped.
    Drop(PacketEvent),
    /// A packet was forwarded (only for endpoints that trace).
    Trace(PacketEvent),
    /// The agent did something.
    Agent(AgentEvent),
    /// This reader was too slow, or the ring buffer was full.
    Lost {
        /// How many events.
        count: u64,
    },
}

/// Every [`PacketEvent::reason`], by number. Of `wharf-common`'s reasons those that are verdicts; a test of the agent
/// compares the two.
pub const PACKET_REASONS: &[&str] = &[
    "forwarded-local",
    "forwarded-stack",
    "neighbour-answered",
    "malformed",
    "unsupported-l2-protocol",
    "invalid-source-mac",
    "invalid-source-ip",
    "neighbour-spoof",
    "neighbour-unknown-target",
    "multicast-unsupported",
    "ttl-exceeded",
    "endpoint-not-ready",
    "destination-gone",
    "not-endpoint-address",
    "packet-write-failed",
    "no-config",
    "invalid-destination-mac",
    "invalid-destination-ip",
];

/// A packet seen by an endpoint's program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PacketEvent {
    /// Milliseconds since the Unix epoch.
    pub time_unix_ms: u64,
    /// Endpoint id.
    pub endpoint: u32,
    /// Epoch.
    pub epoch: u64,
    /// Identity.
    pub identity: u32,
    /// `ingress` or `egress`.
    pub direction: String,
    /// One of [`PACKET_REASONS`].
    pub reason: String,
    /// `IPv4`, `IPv6`, `ARP` or the number in hex.
    pub ethertype: String,
    /// IP protocol: its name, or `protocol` and its number. Empty unless the packet is IP.
    pub protocol: String,
    /// What an ICMP, ICMPv6 or ARP packet says, for example `echo-request`, `neighbor-solicitation`, `request`;
    /// `type 200 code 3` or `operation 9` when it has no name here.
    pub message: Option<String>,
    /// Source address.
    #[schema(value_type = Option<String>)]
    pub source: Option<IpAddr>,
    /// Source port; 0 unless the packet is TCP or UDP.
    pub source_port: u16,
    /// Destination address.
    #[schema(value_type = Option<String>)]
    pub destination: Option<IpAddr>,
    /// Destination port; 0 unless the packet is TCP or UDP.
    pub destination_port: u16,
    /// Bytes, Ethernet header included.
    pub length: u32,
}

/// Something the agent did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AgentEvent {
    /// Milliseconds since the Unix epoch.
    pub time_unix_ms: u64,
    /// Endpoint id, when it is about one.
    pub endpoint: Option<u16>,
    /// `endpoint-created`, `endpoint-regenerated`, `endpoint-deleted`, `agent-started`, ...
    pub event: String,
    /// In words.
    pub message: String,
}

/// Body of `GET|POST /v1/audit` (POST repairs).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuditReport {
    /// What does not match; empty is healthy.
    pub findings: Vec<Finding>,
    /// How many objects were looked at, by kind.
    pub examined: BTreeMap<String, u64>,
}

/// Body of `GET|PATCH /v1/config`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AgentConfigView {
    /// Effective settings, by flag name.
    pub effective: BTreeMap<String, String>,
    /// Names of those that `PATCH` may change.
    pub mutable: Vec<String>,
    /// Where each comes from, by the same names.
    #[serde(default)]
    pub origin: BTreeMap<String, SettingOrigin>,
}

/// Where a setting comes from; the later wins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SettingOrigin {
    /// Nobody said anything.
    Default,
    /// The configuration file.
    File,
    /// A `WHARF_*` variable.
    Environment,
    /// A flag of the command line.
    Flag,
    /// Set while the agent runs; a restart forgets it.
    RunTime,
}

impl SettingOrigin {
    /// Its name in words.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::File => "file",
            Self::Environment => "environment",
            Self::Flag => "flag",
            Self::RunTime => "run time",
        }
    }
}

/// Format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// For people.
    Text,
    /// An object a line.
    Json,
}

/// When policy is enforced. Source enforcement (a container speaks only with its own addresses) is not policy: it is
/// always on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyEnforcement {
    /// Where there is policy for an endpoint.
    Default,
    /// For every endpoint.
    Always,
    /// Nowhere.
    Never,
}

/// Body of `PATCH /v1/config`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AgentConfigPatch {
    /// `error`, `warn`, `info`, `debug`, `trace` or `off`, or `target=level` pairs with commas between.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 1024, example = "wharf_agent=debug,info")]
    pub log_level: Option<String>,
    /// Format of log lines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_format: Option<LogFormat>,
    /// Trace forwarded packets of every endpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace: Option<bool>,
    /// Of the traced packets that the programs report, one in so many is shown; 0 and 1 are all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 1_000_000)]
    pub trace_sampling: Option<u32>,
    /// When policy is enforced. There is no policy yet, so anything but `default` is refused (`unsupported`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy_enforcement: Option<PolicyEnforcement>,
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
