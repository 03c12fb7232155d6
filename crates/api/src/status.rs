//! What `GET /v1/healthz` tells: the whole of `wharf status`.

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
    /// In words.
    pub message: String,
    /// How old this is, milliseconds: set while the part does not answer, and what is shown is what it said last. Health
    /// is then at least degraded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stale_ms: Option<u64>,
    /// Health apart from what containers do with their shares of the node's pools: readiness follows this one. Absent
    /// where it is `health`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub without_containers: Option<Health>,
}

impl ComponentStatus {
    /// What a part says of itself now.
    #[must_use]
    pub fn new(name: impl Into<String>, health: Health, message: impl Into<String>) -> Self {
        Self { name: name.into(), health, message: message.into(), stale_ms: None, without_containers: None }
    }

    /// The component, whose health would be `health` if no container spent its share.
    #[must_use]
    pub fn by_containers(self, health: Health) -> Self {
        Self { without_containers: (health != self.health).then_some(health), ..self }
    }

    /// Health that the node's readiness follows.
    #[must_use]
    pub fn readiness(&self) -> Health {
        self.without_containers.unwrap_or(self.health)
    }
}

/// What a script makes of a status: the words of `wharf status --brief` and of `GET /v1/healthz?brief=true`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The agent serves, and nothing is amiss.
    Ok,
    /// The agent serves, and something is amiss.
    Degraded,
    /// The agent does not serve, or a part of it does not work.
    Down,
}

impl Verdict {
    /// The word.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Degraded => "degraded",
            Self::Down => "down",
        }
    }
}

/// How containers are connected on this node, in words.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NetworkStatus {
    /// Kind of link between container and node.
    pub device_mode: String,
    /// How packets find their way on the node, and out of it.
    pub routing: String,
    /// Whether source addresses are translated when packets leave the node.
    pub masquerading: String,
    /// Connections that the kernel tracks, which translation needs; absent while the node does not masquerade.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connections: Option<ConnectionStatus>,
    /// The flow tables of the programs; absent before the first collection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flows: Option<FlowStatus>,
    /// MTU of links whose creator asks for none, bytes, and where it comes from.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub mtu: String,
}

/// The fill of the kernel's connection tracking.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConnectionStatus {
    /// Connections tracked in the node's network namespace.
    pub entries: u64,
    /// Maximum (`net.netfilter.nf_conntrack_max`).
    pub limit: u64,
}

/// The flow tables of the programs, as the last collection left them. Counts are since the tables were made: restarts and
/// upgrades keep them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FlowStatus {
    /// Flows that both ends use.
    pub rows: u64,
    /// So many fit.
    pub limit: u64,
    /// Flows collected because they were over.
    pub expired: u64,
    /// Flows collected because an endpoint of theirs was gone.
    pub orphaned: u64,
    /// Packets whose flow may be evicted because its endpoint has as many flows as one may.
    pub over_quota: u64,
    /// Packets whose flow may be evicted because the table is full.
    pub no_room: u64,
    /// Packets whose flow is not tracked because its endpoint began too many at once.
    pub untracked: u64,
    /// When that collection ended, milliseconds since the Unix epoch.
    pub collected_unix_ms: u64,
    /// How long it took, microseconds.
    pub took_us: u64,
}

/// A controller: something that runs again and again.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ControllerStatus {
    /// Name.
    pub name: String,
    /// The endpoint it works for; none for the node's own.
    #[serde(default)]
    pub endpoint: Option<u16>,
    /// Runs that succeeded.
    pub successes: u64,
    /// Runs that failed.
    pub failures: u64,
    /// Failures since the last success.
    pub consecutive_failures: u64,
    /// Milliseconds since the Unix epoch.
    pub last_success_unix_ms: Option<u64>,
    /// Milliseconds since the Unix epoch.
    pub last_failure_unix_ms: Option<u64>,
    /// Last error.
    pub last_error: Option<String>,
    /// Milliseconds from one run to the next while all is well; none when it runs on demand.
    #[serde(default)]
    pub interval_ms: Option<u64>,
    /// When it runs next, milliseconds since the Unix epoch; none while it runs, on demand, or when it is stopped.
    #[serde(default)]
    pub next_run_unix_ms: Option<u64>,
    /// Since when the run that is under way runs, milliseconds since the Unix epoch.
    #[serde(default)]
    pub running_since_unix_ms: Option<u64>,
    /// How long the last run took, milliseconds.
    #[serde(default)]
    pub last_duration_ms: Option<u64>,
    /// The run that is under way takes longer than any should.
    #[serde(default)]
    pub overdue: bool,
    /// It was told to stop and will not run again.
    #[serde(default)]
    pub stopped: bool,
}

impl ControllerStatus {
    /// Its last run failed, or the one under way does not end.
    #[must_use]
    pub fn is_unwell(&self) -> bool {
        self.consecutive_failures > 0 || self.overdue
    }
}

/// The deletion queue: records of shims that found no agent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeletionQueueStatus {
    /// Records that wait.
    pub records: u64,
    /// Age of the oldest, milliseconds; 0 when there is none.
    pub oldest_age_ms: u64,
    /// Records put aside since start because they could not be used.
    pub unusable: u64,
    /// Records served since start, the canary's included.
    pub drained: u64,
    /// What became of this start's canary, in words.
    pub canary: String,
}

/// CNI commands since the agent's start, those that the plugin reported afterwards included.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CommandStatus {
    /// Commands that did what was asked.
    pub succeeded: u64,
    /// Commands that failed.
    pub failed: u64,
    /// DELs that succeeded by a durable record, to be carried out later.
    pub deferred: u64,
    /// The last one that failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_failure: Option<CommandFailure>,
}

/// A CNI command that failed. A name is empty where the command has none.
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
    /// Why.
    pub message: String,
    /// When, milliseconds since the Unix epoch.
    pub ended_unix_ms: u64,
}

/// A step that has not ended in its time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StuckStep {
    /// Endpoint id.
    pub endpoint: u16,
    /// Attachment.
    pub attachment: String,
    /// Step.
    pub step: String,
    /// Milliseconds since it began.
    pub for_ms: u64,
    /// Its bound, milliseconds.
    pub bound_ms: u64,
}

/// How much is asked of the agent, and what it costs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AdmissionStatus {
    /// Creates that wait for their turn.
    pub waiting: u64,
    /// Creates at work in the kernel.
    pub running: u64,
    /// Deletes under way.
    pub deletes: u64,
    /// Milliseconds from one create's end to the next while some wait, as measured.
    pub cost_ms: u64,
    /// Creates refused since start because they would have waited too long.
    pub refused: u64,
}

/// An address that was given back and is not given out again yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RestingAddress {
    /// Address.
    #[schema(value_type = String)]
    pub ip: IpAddr,
    /// Pool.
    pub pool: String,
    /// Who held it.
    pub last_owner: String,
    /// When it was given back, milliseconds since the Unix epoch.
    pub since_unix_ms: u64,
    /// What still speaks for it, when its rest is over and it is not free.
    pub blocked: Option<String>,
}

/// A record out of service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct QuarantinedRecord {
    /// Endpoint id.
    pub endpoint: u16,
    /// Addresses that stay reserved.
    #[schema(value_type = Vec<String>)]
    pub addresses: Vec<IpAddr>,
    /// Why.
    pub why: String,
    /// When, milliseconds since the Unix epoch.
    pub since_unix_ms: u64,
}

/// What the kernel gives.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KernelStatus {
    /// `uname -r`.
    pub release: String,
    /// `tcx` or `clsact`.
    pub attach_mode: String,
    /// Features by name.
    pub features: BTreeMap<String, bool>,
}

/// The proxy's part.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProxyStatus {
    /// False while there is no proxy and no rule needs one.
    pub enabled: bool,
    /// Redirects in force.
    pub redirects: u64,
    /// Completions awaited now.
    pub pending_completions: u64,
    /// Completions that were never given and were passed.
    pub timed_out_completions: u64,
    /// What Envoy does.
    #[serde(default)]
    pub state: ProxyState,
    /// Listeners that policy asks for.
    #[serde(default)]
    pub listeners: u64,
    /// Listeners that Envoy refused.
    #[serde(default)]
    pub refused: u64,
    /// How often Envoy was started again since the agent's start.
    #[serde(default)]
    pub restarts: u64,
    /// Records of requests that were dropped because the agent did not take them in time.
    #[serde(default)]
    pub records_lost: u64,
    /// Requests by verdict.
    #[serde(default)]
    pub requests: ProxyRequests,
    /// Addresses that names have which containers asked DNS for.
    #[serde(default)]
    pub name_addresses: u64,
}

/// Body of `GET /v1/healthz`: the whole of `wharf status`. Answered with 200 while the agent serves, else 503.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AgentStatus {
    /// Worst of the components.
    pub overall: Health,
    /// True when new endpoints are accepted.
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
    /// Parts.
    pub components: Vec<ComponentStatus>,
    /// Controllers of the node, and those of endpoints that fail or do not end; all of them with
    /// `?all-controllers=true`.
    pub controllers: Vec<ControllerStatus>,
    /// How many controllers there are, of the node and of endpoints.
    #[serde(default)]
    pub controllers_total: u64,
    /// How many of them fail or do not end.
    #[serde(default)]
    pub controllers_unwell: u64,
    /// IPAM.
    pub ipam: Vec<PoolView>,
    /// Endpoints by state.
    pub endpoints: BTreeMap<String, u64>,
    /// Steps that have not ended in their time.
    #[serde(default)]
    pub stuck: Vec<StuckStep>,
    /// Records out of service.
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
    /// What the last leak audit found and left; none before the first.
    #[serde(default)]
    pub audit_findings: Option<u64>,
    /// Refused moves of the state machine since start.
    pub refused_transitions: u64,
    /// Shared maps, and the sum of the per-endpoint ones.
    pub bpf_maps: Vec<BpfMap>,
    /// Program sets verified ahead of need: ready, wanted.
    pub prepared: PreparedStatus,
    /// Proxy.
    pub proxy: ProxyStatus,
    /// The service that makes the network in the agent's place; absent while the agent makes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delegate: Option<DelegateStatus>,
    /// Memory of the agent, bytes resident.
    pub resident_bytes: u64,
    /// The admin thread answered, on a socket of its own, and not the API.
    #[serde(default)]
    pub from_admin: bool,
}

impl AgentStatus {
    /// What a script makes of it. A part that is pending (not known yet, or not applicable) is no fault.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        self.verdict_on(self.overall)
    }

    /// As [`Self::verdict`], apart from what containers do with their shares of the node's pools: what a readiness
    /// probe follows, so that no container can make the node unready.
    #[must_use]
    pub fn readiness(&self) -> Verdict {
        let of_components = self.components.iter().map(ComponentStatus::readiness).max().unwrap_or(Health::Ok);
        // The API, which everybody uses, did not answer.
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
    /// One word as plain text, see `Verdict`, instead of the whole.
    pub brief: Option<bool>,
    /// Every controller of every endpoint.
    pub all_controllers: Option<bool>,
}

/// Program sets verified ahead of need.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PreparedStatus {
    /// Ready to be taken.
    pub ready: u64,
    /// How many are kept ready.
    pub target: u64,
}
