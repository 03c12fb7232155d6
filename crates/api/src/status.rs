//! Body of `GET /v1/healthz`: all data of `wharf status`.

use std::{collections::BTreeMap, net::IpAddr};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{BpfMap, DelegateStatus, Health, PoolView, ProxyRequests, ProxyState};

/// A component of the agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ComponentStatus {
    /// `store`, `datapath`, `ipam`, `proxy`, ...
    pub name: String,
    /// Health.
    pub health: Health,
    /// Description.
    pub message: String,
    /// Age of this status in milliseconds while the component does not answer. Health is then at least degraded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stale_ms: Option<u64>,
    /// Health that readiness follows: ignores containers that use up their shares of the node's pools. Absent when
    /// equal to `health`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub without_containers: Option<Health>,
}

impl ComponentStatus {
    /// A current status.
    #[must_use]
    pub fn new(name: impl Into<String>, health: Health, message: impl Into<String>) -> Self {
        Self { name: name.into(), health, message: message.into(), stale_ms: None, without_containers: None }
    }

    /// Sets the health that the component has apart from containers that use up their shares.
    #[must_use]
    pub fn by_containers(self, health: Health) -> Self {
        Self { without_containers: (health != self.health).then_some(health), ..self }
    }

    /// Health for the node's readiness.
    #[must_use]
    pub fn readiness(&self) -> Health {
        self.without_containers.unwrap_or(self.health)
    }
}

/// Verdict for scripts: the word of `wharf status --brief` and `GET /v1/healthz?brief=true`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Serving and healthy.
    Ok,
    /// Serving, but partly unhealthy.
    Degraded,
    /// Not serving, or failing.
    Down,
}

impl Verdict {
    /// The name in the API.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Degraded => "degraded",
            Self::Down => "down",
        }
    }
}

/// Container networking of the node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NetworkStatus {
    /// Kind of container link.
    pub device_mode: String,
    /// Routing on and off the node.
    pub routing: String,
    /// Source address translation for packets that leave the node.
    pub masquerading: String,
    /// Kernel connection tracking for masquerading; absent without masquerading.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connections: Option<ConnectionStatus>,
    /// Flow tables; absent before the first collection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flows: Option<FlowStatus>,
    /// Default link MTU in bytes, and its source.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub mtu: String,
}

/// Fill of kernel connection tracking.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConnectionStatus {
    /// Connections in the node's network namespace.
    pub entries: u64,
    /// Maximum (`net.netfilter.nf_conntrack_max`).
    pub limit: u64,
}

/// Flow tables of the programs after the last collection. Counters survive restarts and upgrades.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FlowStatus {
    /// Flows protected from eviction.
    pub rows: u64,
    /// Capacity.
    pub limit: u64,
    /// Ended flows collected.
    pub expired: u64,
    /// Flows collected after deletion of their endpoint.
    pub orphaned: u64,
    /// Packets whose flow may be evicted because of its endpoint's quota.
    pub over_quota: u64,
    /// Packets whose flow may be evicted because of a full table.
    pub no_room: u64,
    /// Packets whose flow is untracked because its endpoint started too many at once.
    pub untracked: u64,
    /// End of the collection, Unix ms.
    pub collected_unix_ms: u64,
    /// Microseconds of the collection.
    pub took_us: u64,
}

/// A function that runs repeatedly.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ControllerStatus {
    /// Name.
    pub name: String,
    /// Endpoint; absent for a node controller.
    #[serde(default)]
    pub endpoint: Option<u16>,
    /// Successful runs.
    pub successes: u64,
    /// Failed runs.
    pub failures: u64,
    /// Failures since the last success.
    pub consecutive_failures: u64,
    /// Milliseconds since the Unix epoch.
    pub last_success_unix_ms: Option<u64>,
    /// Milliseconds since the Unix epoch.
    pub last_failure_unix_ms: Option<u64>,
    /// Last error.
    pub last_error: Option<String>,
    /// Milliseconds between successful runs; absent when run on demand.
    #[serde(default)]
    pub interval_ms: Option<u64>,
    /// Next run, Unix ms; absent while running, on demand, or stopped.
    #[serde(default)]
    pub next_run_unix_ms: Option<u64>,
    /// Start of the current run, Unix ms.
    #[serde(default)]
    pub running_since_unix_ms: Option<u64>,
    /// Milliseconds of the last run.
    #[serde(default)]
    pub last_duration_ms: Option<u64>,
    /// Whether the current run takes too long.
    #[serde(default)]
    pub overdue: bool,
    /// Whether it has stopped permanently.
    #[serde(default)]
    pub stopped: bool,
}

impl ControllerStatus {
    /// Whether the last run failed or the current run is overdue.
    #[must_use]
    pub fn is_unwell(&self) -> bool {
        self.consecutive_failures > 0 || self.overdue
    }
}

/// Deletion queue: records of shims that did not reach the agent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeletionQueueStatus {
    /// Waiting records.
    pub records: u64,
    /// Milliseconds since the oldest record; 0 without records.
    pub oldest_age_ms: u64,
    /// Unusable records since start.
    pub unusable: u64,
    /// Processed records since start, including the canary.
    pub drained: u64,
    /// Result of the canary.
    pub canary: String,
}

/// CNI commands since the agent's start, including later reports.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CommandStatus {
    /// Successful commands.
    pub succeeded: u64,
    /// Failed commands.
    pub failed: u64,
    /// Successful DELs with a durable record for later processing.
    pub deferred: u64,
    /// Last failed command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_failure: Option<CommandFailure>,
}

/// A failed CNI command. Missing names are empty.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CommandFailure {
    /// `ADD`, `DEL`, `CHECK` or `GC`.
    pub command: String,
    /// Network.
    pub network: String,
    /// Container.
    pub container_id: String,
    /// Interface.
    pub ifname: String,
    /// Pod.
    pub pod_name: String,
    /// Namespace of the pod.
    pub pod_namespace: String,
    /// Reason.
    pub message: String,
    /// End, Unix ms.
    pub ended_unix_ms: u64,
}

/// A step beyond its time limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StuckStep {
    /// Endpoint id.
    pub endpoint: u16,
    /// Attachment.
    pub attachment: String,
    /// Step.
    pub step: String,
    /// Milliseconds so far.
    pub for_ms: u64,
    /// Limit in milliseconds.
    pub bound_ms: u64,
}

/// Load of the agent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AdmissionStatus {
    /// Queued creates.
    pub waiting: u64,
    /// Running creates.
    pub running: u64,
    /// Running deletes.
    pub deletes: u64,
    /// Measured milliseconds between completions of queued creates.
    pub cost_ms: u64,
    /// Creates rejected since start because of their expected wait.
    pub refused: u64,
}

/// A released address that is not available yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RestingAddress {
    /// Address.
    #[schema(value_type = String)]
    pub ip: IpAddr,
    /// Pool.
    pub pool: String,
    /// Last owner.
    pub last_owner: String,
    /// Release, Unix ms.
    pub since_unix_ms: u64,
    /// Why it is unavailable after its rest.
    pub blocked: Option<String>,
}

/// A quarantined record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct QuarantinedRecord {
    /// Endpoint id.
    pub endpoint: u16,
    /// Addresses that stay reserved.
    #[schema(value_type = Vec<String>)]
    pub addresses: Vec<IpAddr>,
    /// Reason.
    pub why: String,
    /// Time, milliseconds since the Unix epoch.
    pub since_unix_ms: u64,
}

/// Kernel features of the node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KernelStatus {
    /// `uname -r`.
    pub release: String,
    /// `tcx` or `clsact`.
    pub attach_mode: String,
    /// Features by name.
    pub features: BTreeMap<String, bool>,
}

/// Summary of the proxy.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProxyStatus {
    /// False without a proxy and without rules that need it.
    pub enabled: bool,
    /// Redirects in force.
    pub redirects: u64,
    /// Pending completions.
    pub pending_completions: u64,
    /// Completions that timed out.
    pub timed_out_completions: u64,
    /// State of Envoy.
    #[serde(default)]
    pub state: ProxyState,
    /// Desired listeners.
    #[serde(default)]
    pub listeners: u64,
    /// Listeners that Envoy rejected.
    #[serde(default)]
    pub refused: u64,
    /// Restarts of Envoy since the agent's start.
    #[serde(default)]
    pub restarts: u64,
    /// Request records lost because the agent read too slowly.
    #[serde(default)]
    pub records_lost: u64,
    /// Requests by verdict.
    #[serde(default)]
    pub requests: ProxyRequests,
    /// Addresses of resolved DNS names.
    #[serde(default)]
    pub name_addresses: u64,
}

/// Body of `GET /v1/healthz`: all data of `wharf status`. Status 200 while the agent serves, else 503.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AgentStatus {
    /// Worst of the components.
    pub overall: Health,
    /// Whether the agent accepts new endpoints.
    pub serving: bool,
    /// Version of the agent.
    pub version: String,
    /// ABI version of the pinned maps.
    pub abi_version: u32,
    /// Node name.
    pub node_name: String,
    /// Process id of the agent.
    pub pid: u32,
    /// Milliseconds since the agent's start.
    pub uptime_ms: u64,
    /// Router addresses.
    #[schema(value_type = Vec<String>)]
    pub router: Vec<IpAddr>,
    /// Kernel.
    pub kernel: KernelStatus,
    /// How containers are connected.
    #[serde(default)]
    pub network: NetworkStatus,
    /// Components.
    pub components: Vec<ComponentStatus>,
    /// Node controllers, and endpoint controllers that fail or are overdue; all with `?all-controllers=true`.
    pub controllers: Vec<ControllerStatus>,
    /// Number of all controllers.
    #[serde(default)]
    pub controllers_total: u64,
    /// Number of failing or overdue controllers.
    #[serde(default)]
    pub controllers_unwell: u64,
    /// IPAM.
    pub ipam: Vec<PoolView>,
    /// Endpoints by state.
    pub endpoints: BTreeMap<String, u64>,
    /// Steps beyond their time limits.
    #[serde(default)]
    pub stuck: Vec<StuckStep>,
    /// Quarantined records.
    #[serde(default)]
    pub quarantined: Vec<QuarantinedRecord>,
    /// Deletion queue.
    #[serde(default)]
    pub deletion_queue: DeletionQueueStatus,
    /// CNI commands.
    #[serde(default)]
    pub commands: CommandStatus,
    /// Admission of creates.
    #[serde(default)]
    pub admission: AdmissionStatus,
    /// Remaining findings of the last audit, if any.
    #[serde(default)]
    pub audit_findings: Option<u64>,
    /// Rejected state transitions since start.
    pub refused_transitions: u64,
    /// Shared maps, and the sum of per-endpoint maps.
    pub bpf_maps: Vec<BpfMap>,
    /// Programs verified in advance.
    pub prepared: PreparedStatus,
    /// Proxy.
    pub proxy: ProxyStatus,
    /// Network service in delegated mode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delegate: Option<DelegateStatus>,
    /// Resident memory in bytes.
    pub resident_bytes: u64,
    /// Whether the admin thread answered instead of the API.
    #[serde(default)]
    pub from_admin: bool,
}

impl AgentStatus {
    /// Verdict for scripts. [`Health::Pending`] is no fault.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        self.verdict_on(self.overall)
    }

    /// [`Self::verdict`] for a readiness probe: a container that exhausts its shares of the node's pools cannot make
    /// the node unready.
    #[must_use]
    pub fn readiness(&self) -> Verdict {
        let of_components = self.components.iter().map(ComponentStatus::readiness).max().unwrap_or(Health::Ok);
        // The API did not answer.
        let of_api = if self.from_admin { Health::Degraded } else { Health::Ok };
        self.verdict_on(of_components.max(of_api))
    }

    fn verdict_on(&self, health: Health) -> Verdict {
        match health {
            _ if !self.serving => Verdict::Down,
            Health::Failing => Verdict::Down,
            Health::Degraded => Verdict::Degraded,
            Health::Ok | Health::Pending => Verdict::Ok,
        }
    }
}

/// Query of `GET /v1/healthz`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::IntoParams)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct StatusQuery {
    /// Answer with one `Verdict` word as plain text.
    pub brief: Option<bool>,
    /// Include all endpoint controllers.
    pub all_controllers: Option<bool>,
}

/// Program sets verified in advance.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PreparedStatus {
    /// Ready sets.
    pub ready: u64,
    /// Target number of ready sets.
    pub target: u64,
}
