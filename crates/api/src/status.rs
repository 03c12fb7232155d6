//! Body of `GET /v1/healthz`: all data of `wharf status`.

use std::{collections::BTreeMap, net::IpAddr};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{BpfMap, DelegateStatus, Health, PoolView, ProxyRequests, ProxyState};

/// A part of the agent in `wharf status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ComponentStatus {
    /// `store`, `datapath`, `ipam`, `proxy`, ...
    pub name: String,
    /// Health.
    pub health: Health,
    /// Description.
    pub message: String,
    /// Age of this status, milliseconds: set while the component does not answer and its last status is shown. Health
    /// is then at least degraded.
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
    /// The agent serves, and all parts are healthy.
    Ok,
    /// The agent serves, and some part is unhealthy.
    Degraded,
    /// The agent does not serve, or a part fails.
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

/// How containers are connected on this node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NetworkStatus {
    /// Kind of link between container and node.
    pub device_mode: String,
    /// Routing on the node and off it.
    pub routing: String,
    /// Whether source addresses are translated when packets leave the node.
    pub masquerading: String,
    /// Kernel connection tracking, used for masquerading; absent while the node does not masquerade.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connections: Option<ConnectionStatus>,
    /// Flow tables of the programs; absent before the first collection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flows: Option<FlowStatus>,
    /// Default MTU of links, bytes, and its source.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub mtu: String,
}

/// Fill of the kernel's connection tracking.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConnectionStatus {
    /// Connections tracked in the node's network namespace.
    pub entries: u64,
    /// Maximum (`net.netfilter.nf_conntrack_max`).
    pub limit: u64,
}

/// Flow tables of the programs after the last collection. Counters start when the tables are created and survive
/// restarts and upgrades.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FlowStatus {
    /// Flows used by both ends.
    pub rows: u64,
    /// Capacity.
    pub limit: u64,
    /// Flows collected because they ended.
    pub expired: u64,
    /// Flows collected because their endpoint was deleted.
    pub orphaned: u64,
    /// Packets whose flow may be evicted because its endpoint has reached its flow quota.
    pub over_quota: u64,
    /// Packets whose flow may be evicted because the table is full.
    pub no_room: u64,
    /// Packets whose flow is untracked because its endpoint started too many flows at once.
    pub untracked: u64,
    /// End of the collection, milliseconds since the Unix epoch.
    pub collected_unix_ms: u64,
    /// Duration of the collection, microseconds.
    pub took_us: u64,
}

/// A controller: a function that runs repeatedly.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ControllerStatus {
    /// Name.
    pub name: String,
    /// The endpoint that it serves; absent for a controller of the node.
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
    /// Interval between successful runs, milliseconds; absent when it runs on demand.
    #[serde(default)]
    pub interval_ms: Option<u64>,
    /// Next run, milliseconds since the Unix epoch; absent while it runs, when on demand, or when stopped.
    #[serde(default)]
    pub next_run_unix_ms: Option<u64>,
    /// Start of the current run, milliseconds since the Unix epoch.
    #[serde(default)]
    pub running_since_unix_ms: Option<u64>,
    /// Duration of the last run, milliseconds.
    #[serde(default)]
    pub last_duration_ms: Option<u64>,
    /// Whether the current run exceeds its expected duration.
    #[serde(default)]
    pub overdue: bool,
    /// Whether it was stopped and will not run again.
    #[serde(default)]
    pub stopped: bool,
}

impl ControllerStatus {
    /// Whether its last run failed, or the current one is overdue.
    #[must_use]
    pub fn is_unwell(&self) -> bool {
        self.consecutive_failures > 0 || self.overdue
    }
}

/// The deletion queue: records of shims that did not reach the agent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeletionQueueStatus {
    /// Waiting records.
    pub records: u64,
    /// Age of the oldest record, milliseconds; 0 without records.
    pub oldest_age_ms: u64,
    /// Unusable records set aside since start.
    pub unusable: u64,
    /// Processed records since start, with the canary.
    pub drained: u64,
    /// Result of the canary of this start.
    pub canary: String,
}

/// CNI commands since the agent's start, including those that the plugin reported later.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CommandStatus {
    /// Successful commands.
    pub succeeded: u64,
    /// Failed commands.
    pub failed: u64,
    /// DELs that succeeded with a durable record, to be processed later.
    pub deferred: u64,
    /// Last failed command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_failure: Option<CommandFailure>,
}

/// A failed CNI command. A name is empty if the command has none.
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
    /// End, milliseconds since the Unix epoch.
    pub ended_unix_ms: u64,
}

/// A step that exceeds its time limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StuckStep {
    /// Endpoint id.
    pub endpoint: u16,
    /// Attachment.
    pub attachment: String,
    /// Step.
    pub step: String,
    /// Duration so far, milliseconds.
    pub for_ms: u64,
    /// Time limit, milliseconds.
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
    /// Measured time between the ends of two queued creates, milliseconds.
    pub cost_ms: u64,
    /// Creates refused since start because their wait would have been too long.
    pub refused: u64,
}

/// A released address that cannot be leased yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RestingAddress {
    /// Address.
    #[schema(value_type = String)]
    pub ip: IpAddr,
    /// Pool.
    pub pool: String,
    /// Last owner.
    pub last_owner: String,
    /// Time of the release, milliseconds since the Unix epoch.
    pub since_unix_ms: u64,
    /// Why it is still not free after its rest.
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

/// Kernel features.
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
    /// False while there is no proxy and no rule needs one.
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
    /// Request records dropped because the agent read them too slowly.
    #[serde(default)]
    pub records_lost: u64,
    /// Requests by verdict.
    #[serde(default)]
    pub requests: ProxyRequests,
    /// Addresses of DNS names that containers resolved.
    #[serde(default)]
    pub name_addresses: u64,
}

/// Body of `GET /v1/healthz`: all data of `wharf status`. Status 200 while the agent serves, else 503.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AgentStatus {
    /// The worst of the components.
    pub overall: Health,
    /// Whether the agent accepts new endpoints.
    pub serving: bool,
    /// Version of the agent.
    pub version: String,
    /// ABI version of the pinned maps.
    pub abi_version: u32,
    /// Node name.
    pub node_name: String,
    /// Process id.
    pub pid: u32,
    /// Milliseconds since the agent started.
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
    /// Controllers of the node, and endpoint controllers that fail or are overdue; all with `?all-controllers=true`.
    pub controllers: Vec<ControllerStatus>,
    /// Number of controllers of the node and of endpoints.
    #[serde(default)]
    pub controllers_total: u64,
    /// Number of failing or overdue controllers.
    #[serde(default)]
    pub controllers_unwell: u64,
    /// IPAM.
    pub ipam: Vec<PoolView>,
    /// Endpoints by state.
    pub endpoints: BTreeMap<String, u64>,
    /// Steps that exceed their time limits.
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
    /// Remaining findings of the last leak audit; absent before the first.
    #[serde(default)]
    pub audit_findings: Option<u64>,
    /// Rejected transitions of state machines since start.
    pub refused_transitions: u64,
    /// Shared maps, and the sum of the per-endpoint maps.
    pub bpf_maps: Vec<BpfMap>,
    /// Programs verified in advance.
    pub prepared: PreparedStatus,
    /// Proxy.
    pub proxy: ProxyStatus,
    /// The service that makes the network instead of the agent; only in delegated mode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delegate: Option<DelegateStatus>,
    /// Resident memory of the agent, bytes.
    pub resident_bytes: u64,
    /// Whether the admin thread answered instead of the API.
    #[serde(default)]
    pub from_admin: bool,
}

impl AgentStatus {
    /// Verdict for scripts. A pending part (unknown or not applicable) is no fault.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        self.verdict_on(self.overall)
    }

    /// [`Self::verdict`] for a readiness probe: ignores containers that use up their shares of the node's pools, so
    /// that a container cannot make the node unready.
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
    /// Answer with one word as plain text, see `Verdict`.
    pub brief: Option<bool>,
    /// Every controller of every endpoint.
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
