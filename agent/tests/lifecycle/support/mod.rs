//! A machine with one agent on it, which can be started, crashed and started again.

mod disk;
mod identities;
pub(crate) mod life;
mod proxy;

use std::{
    collections::BTreeSet,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tempfile::TempDir;
use tokio::{sync::oneshot, time::Instant};
use wharf_agent::{
    addresses::resting,
    audit::{self, AuditError},
    config::{AgentConfig, LocalDelivery},
    endpoint::{
        create::{self, CreateSpec},
        delete, deletions,
        error::CreateError,
        unknown,
    },
    node::{
        Node, aside,
        endpoint::{Command, Handle},
        error::CommandError,
        lifecycle::Lifecycle,
        queue::Cause,
        timeline,
    },
    rest::error::Failure,
    selfcheck::Checker,
    stuck,
};
use wharf_api::{ApiError, AuditReport, DeleteResult, Endpoint, Finding, StuckStep};
use wharf_cluster::routes::Routing;
use wharf_core::{
    ids::{Attachment, ContainerId, EndpointId, IfName, NetworkName, PoolName},
    ipam::{LeaseRequest, PoolConfig, Wanted},
    kernel::{EndpointKernel as _, NodeKernel as _},
    plan::DeleteOptions,
    policy::Enforcement,
    state::{Level, State},
    store::{Change, Lease, LeaseOwner, Snapshot},
};
use wharf_datapath::{FakeKernel, fake::Operation};
use wharf_handover::queue::{Deletion, EndpointRef, VERSION};
use wharf_kit::{sync::lock, telemetry::LogFormat};
use wharf_store::StoreError;

pub(crate) use disk::Disk;
pub(crate) use identities::Slow;
pub(crate) use proxy::Proxy;

/// Longest wait for something that is bound to happen; a failure, not a pace.
const PATIENCE: Duration = Duration::from_secs(30);

/// What outlives an agent: its files, the kernel, the disk, the proxy.
pub(crate) struct Machine {
    pub(crate) kernel: FakeKernel,
    pub(crate) disk: Disk,
    pub(crate) proxy: Arc<Proxy>,
    pub(crate) config: AgentConfig,
    pub(crate) boot_id: String,
    directory: TempDir,
}

impl Machine {
    /// Pools of 253 IPv4 addresses and many IPv6 ones, no programs ahead of need, a proxy without redirects.
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir_in(memory()).expect("make directory");
        let default_pool = PoolName::parse("default").expect("pool name");
        let cidrs = ["10.88.0.0/24", "fd88::/64"].map(|c| c.parse().expect("CIDR")).to_vec();
        let config = AgentConfig {
            run_dir: directory.path().to_owned(),
            state_dir: directory.path().to_owned(),
            bpffs: directory.path().to_owned(),
            pools: vec![PoolConfig { name: default_pool.clone(), cidrs }],
            default_pool,
            ipv6_off: None,
            node_name: "test".into(),
            metrics_listen: None,
            log_level: "info".into(),
            log_format: LogFormat::Text,
            mtu: None,
            attach_mode: None,
            device_mode: Default::default(),
            local_delivery: LocalDelivery::Direct,
            masquerade: None,
            announce: false,
            policy_dir: None,
            cluster_file: None,
            cluster_feed: None,
            cluster_feed_group: None,
            pools_from_cluster: None,
            routing: Routing::Auto,
            overlay_port: 4_789,
            overlay_vni: 88,
            service_cidr: Vec::new(),
            policy_enforcement: Enforcement::Default,
            policy_audit: false,
            policy_keep_flows: false,
            labels_timeout: Duration::ZERO,
            prepared_programs: 0,
            proxy_timeout: PATIENCE,
            otlp_endpoint: None,
            envoy: None,
            proxy_port: 15_000,
            ip_rest_ms: 0,
            gone_grace: Duration::from_secs(60),
            audit_interval: Duration::ZERO,
            health_interval: Duration::ZERO,
            selfcheck_interval: Duration::ZERO,
            timeline_keep: Duration::from_secs(86_400),
            delegate: None,
            debug_programs: false,
            origins: std::collections::BTreeMap::new(),
        };
        Self {
            kernel: FakeKernel::new(),
            disk: Disk::default(),
            proxy: Arc::default(),
            config,
            boot_id: "first boot".into(),
            directory,
        }
    }

    /// The same, with the store's file in memory: for tests of thousands of lives.
    pub(crate) fn in_memory() -> Self {
        Self { disk: Disk::in_memory(), ..Self::new() }
    }

    pub(crate) fn with_cidrs(mut self, cidrs: &[&str]) -> Self {
        self.config.pools[0].cidrs = cidrs.iter().map(|c| c.parse().expect("CIDR")).collect();
        self
    }

    pub(crate) fn store_path(&self) -> PathBuf {
        self.config.store()
    }

    /// Files beside the store.
    pub(crate) fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.directory.path()).expect("read directory");
        let mut names: Vec<String> =
            entries.map(|e| e.expect("entry").file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// An agent's life, from start and restore to its end, which comes as by SIGKILL when `life` returns: every task
    /// ends where it stands. Only what was handed to the store is still written, as a kernel would.
    pub(crate) fn life<T>(&self, life: impl AsyncFnOnce(Agent) -> T) -> T {
        self.try_life(life).expect("agent starts")
    }

    /// The same, for agents that may refuse to start.
    pub(crate) fn try_life<T>(&self, life: impl AsyncFnOnce(Agent) -> T) -> Result<T, StoreError> {
        let running = self.start()?;
        let result = running.run(life(running.agent.clone()));
        running.kill();
        Ok(result)
    }
}

/// A running agent.
#[derive(Clone)]
pub(crate) struct Agent {
    pub(crate) node: Arc<Node>,
    pub(crate) life: Arc<Lifecycle>,
    pub(crate) kernel: FakeKernel,
    pub(crate) disk: Disk,
    pub(crate) proxy: Arc<Proxy>,
    pub(crate) identities: Arc<Slow>,
    pub(crate) set_aside: Option<String>,
}

/// Where a container's namespace is.
pub(crate) fn netns_path(container: &str) -> PathBuf {
    Path::new("/run/netns").join(container)
}

pub(crate) fn attachment(container: &str, ifname: &str) -> Attachment {
    Attachment {
        network: NetworkName::parse("net").expect("network"),
        container_id: ContainerId::parse(container).expect("container id"),
        ifname: IfName::parse(ifname).expect("interface name"),
    }
}

/// A record that a shim leaves for an attachment.
pub(crate) fn deletion(a: &Attachment, endpoint: Option<&Handle>, boot_id: String) -> Deletion {
    Deletion {
        version: VERSION,
        network: a.network.to_string(),
        container_id: a.container_id.to_string(),
        ifname: a.ifname.to_string(),
        endpoint: endpoint.map(|h| EndpointRef { id: h.id.get(), epoch: h.epoch.0 }),
        boot_id,
        written_unix_ms: wharf_kit::clock::unix_ms(),
        canary: None,
    }
}

pub(crate) fn id(n: u16) -> EndpointId {
    EndpointId::try_from(n).expect("endpoint id")
}

impl Agent {
    /// A new container, and the request to attach it.
    pub(crate) fn container(&self, name: &str) -> CreateSpec {
        self.kernel.add_netns(netns_path(name));
        Self::spec(name, "eth0")
    }

    /// The request for another interface of a container.
    pub(crate) fn spec(name: &str, ifname: &str) -> CreateSpec {
        CreateSpec {
            attachment: attachment(name, ifname),
            netns: netns_path(name),
            pool: None,
            mtu: None,
            mac: None,
            ips: Vec::new(),
            labels: BTreeSet::from(["k8s:app=web".parse().expect("label")]),
            pod_name: None,
            pod_namespace: None,
            runtime: None,
            ports: Vec::new(),
            masquerade: None,
            bandwidth: Default::default(),
            sources: Default::default(),
            external: None,
            routes: None,
            deadline: Instant::now() + PATIENCE,
        }
    }

    pub(crate) async fn try_create(&self, spec: CreateSpec) -> Result<Endpoint, ApiError> {
        created(create::create(&self.life, spec).await)
    }

    /// Creates a container with an endpoint.
    pub(crate) async fn create(&self, name: &str) -> Handle {
        let endpoint = self.try_create(self.container(name)).await.expect("created");
        self.handle(endpoint.id)
    }

    /// Starts a create that may wait. Aborting it is the caller's going away.
    pub(crate) fn spawn_create(&self, spec: CreateSpec) -> tokio::task::JoinHandle<Result<Endpoint, ApiError>> {
        let life = Arc::clone(&self.life);
        tokio::spawn(async move { created(create::create(&life, spec).await) })
    }

    pub(crate) async fn delete(&self, handle: &Handle) -> DeleteResult {
        delete::delete(&self.life, vec![handle.clone()], DeleteOptions::default(), delete::Answer::Finished).await
    }

    /// Writes what the timelines have noted, as the controller does. `now_ms`: milliseconds since the Unix epoch.
    pub(crate) async fn write_timeline(&self, now_ms: u64) -> Result<(), StoreError> {
        let life = &self.life;
        timeline::write(
            &life.endpoints.timelines,
            &life.store,
            &life.endpoints.registry,
            now_ms,
            life.config.timeline_keep,
        )
        .await
    }

    /// A runtime's DEL of an attachment, as the API serves it.
    pub(crate) async fn del(&self, a: &Attachment, options: DeleteOptions) -> DeleteResult {
        match self.life.endpoints.registry.by_interface(&a.container_id, &a.ifname) {
            Some(handle) if handle.shared.read(|v| v.record.attachment.network == a.network) => {
                let result = delete::delete(&self.life, vec![handle], options, delete::Answer::Unlisted).await;
                // Every other request waits for the deletes that are answered.
                self.life.endpoints.registry.settled(|_| true).await;
                result
            }
            // What the runtime asks for is not there, and that is a success.
            Some(_) => DeleteResult::default(),
            None => unknown::remove(&self.life, &aside::Wanted::of(a)).await,
        }
    }

    pub(crate) fn spawn_delete(
        &self,
        handles: &[&Handle],
        options: DeleteOptions,
    ) -> tokio::task::JoinHandle<DeleteResult> {
        let life = Arc::clone(&self.life);
        let handles: Vec<Handle> = handles.iter().map(|h| (*h).clone()).collect();
        tokio::spawn(async move { delete::delete(&life, handles, options, delete::Answer::Finished).await })
    }

    /// Asks for a build; the answer comes when it is realized.
    pub(crate) async fn request(&self, handle: &Handle, level: Level) -> oneshot::Receiver<Result<(), CommandError>> {
        let (done, answer) = oneshot::channel();
        handle.mailbox.send(Command::Regenerate(level, done)).await.expect("the endpoint is there");
        answer
    }

    pub(crate) fn handle(&self, n: u16) -> Handle {
        self.life.endpoints.registry.get(id(n)).expect("endpoint is there")
    }

    pub(crate) async fn snapshot(&self) -> Snapshot {
        self.life.store.snapshot().await.expect("store reads")
    }

    pub(crate) async fn commit(&self, changes: Vec<Change>) {
        self.life.store.commit(changes).await.expect("store writes");
    }

    /// Who holds an address, in memory.
    pub(crate) fn lease_owner(&self, ip: IpAddr) -> Option<LeaseOwner> {
        lock(&self.life.network.addresses.ipam).get(ip).map(|l| l.owner.clone())
    }

    /// Leases an IPv4 address to a caller, as `POST /v1/ipam` does.
    pub(crate) async fn lease_to_caller(&self, name: &str) -> Lease {
        let owner = LeaseOwner::Caller { name: name.into() };
        let request = LeaseRequest { pool: None, ipv4: Wanted::Any, ipv6: Wanted::None };
        let leased = lock(&self.life.network.addresses.ipam).lease(&request, owner, 0).expect("leased");
        let ip = IpAddr::V4(leased.ipv4.expect("IPv4"));
        let lease = lock(&self.life.network.addresses.ipam).get(ip).cloned().expect("lease");
        self.commit(vec![Change::PutLease(lease.clone())]).await;
        lease
    }

    /// Leaves a deletion record, as a shim does that found no agent.
    pub(crate) fn queue_deletion(&self, a: &Attachment, endpoint: Option<&Handle>) -> String {
        let boot_id = self.life.store.boot_id().to_owned();
        self.life.endpoints.deletions.queue.put(&deletion(a, endpoint, boot_id)).expect("written")
    }

    /// Serves the deletion queue, as when its directory's event comes; how many records stay.
    pub(crate) async fn drain(&self) -> usize {
        deletions::drain(&self.life, Cause::Event).await.expect("drained")
    }

    /// Addresses that rest, in memory, and what speaks for them.
    pub(crate) fn resting(&self) -> Vec<(IpAddr, Option<String>)> {
        lock(&self.life.network.addresses.ipam).resting().into_iter().map(|r| (r.rest.ip, r.blocked)).collect()
    }

    /// The operations called so far, observations and the node's own part left out.
    pub(crate) fn operations(&self) -> Vec<Operation> {
        let observing = [
            Operation::ObserveNetns,
            Operation::Dump,
            Operation::CallSlots,
            Operation::ObserveEndpoint,
            Operation::ObserveNode,
            Operation::ObserveNetworks,
            Operation::ObserveAddresses,
            Operation::ObservePluginLinks,
            Operation::ObservePolicy,
            Operation::ObserveSpeakers,
            Operation::RemoveConnections,
            Operation::EnsureNode,
        ];
        self.kernel.call_log().into_iter().map(|(o, _)| o).filter(|o| !observing.contains(o)).collect()
    }

    /// Waits until every create and delete has ended; endpoints that live are not waited for.
    pub(crate) async fn quiet(&self) {
        eventually("creates and deletes end", || {
            self.life.endpoints.admission.gate.is_idle()
                && self.life.tasks.operations.is_empty()
                && self.life.tasks.endpoints.len() == self.life.endpoints.registry.len()
                && self.life.endpoints.registry.list().iter().all(|h| !is_changing(h))
        })
        .await;
    }

    pub(crate) async fn audit(&self, repair: bool) -> Result<AuditReport, AuditError> {
        audit::audit(&self.life, &self.node.audit_findings, repair).await
    }

    pub(crate) async fn findings(&self, repair: bool) -> Vec<Finding> {
        self.audit(repair).await.expect("audit").findings
    }

    pub(crate) fn checker(&self) -> Checker<'_> {
        Checker::new(&self.life, &self.node.self_checks)
    }

    pub(crate) fn stuck(&self) -> Vec<StuckStep> {
        stuck::stuck(&self.life.endpoints.registry, &self.life.endpoints.jobs, self.life.config.proxy_timeout)
    }

    /// Nothing is amiss, and nothing works.
    pub(crate) async fn assert_healthy(&self) {
        self.quiet().await;
        assert_eq!(self.findings(false).await, [], "audit");
        for handle in self.life.endpoints.registry.list() {
            let record = handle.shared.read(|v| v.record.clone());
            assert_eq!(self.kernel.observe_endpoint(&record).await.expect("observe"), [], "{}", record.attachment);
        }
    }

    /// An endpoint whose record was lost lives on: its link is there and its addresses are held for it, the audit shows
    /// it, and a repair takes it away.
    pub(crate) async fn assert_lost_but_living(&self) {
        self.quiet().await;
        let links = self.kernel.dump().await.expect("dump").links.len();
        assert_eq!(links, self.life.endpoints.registry.len() + 1, "one link more than there are endpoints");
        let held = lock(&self.life.network.addresses.ipam)
            .owned_by(|o| matches!(o, LeaseOwner::Caller { name } if name.starts_with("lost-record:")));
        assert_eq!(held.len(), 2, "its two addresses: {held:?}");
        assert!(self.findings(false).await.iter().any(|f| f.object == "link" && f.repairable), "the audit shows it");
        self.findings(true).await;
        self.assert_healthy().await;
    }

    /// As if no endpoint had ever been: in memory, in the store, in the kernel.
    pub(crate) async fn assert_nothing_left(&self) {
        self.quiet().await;
        let left: Vec<_> = self.life.endpoints.registry.list().iter().map(log_of).collect();
        assert!(left.is_empty(), "registry: {left:#?}");
        // What was given back rests until it is found that nobody speaks for it.
        resting::wake(&self.life.network.addresses).await.expect("rests end");
        assert_eq!(lock(&self.life.network.addresses.ipam).resting(), [], "rests");
        assert_eq!(self.snapshot().await, Snapshot::default(), "store");
        let leases = lock(&self.life.network.addresses.ipam).owned_by(|o| *o != LeaseOwner::Node);
        assert_eq!(leases, [], "leases in memory");
        assert_eq!(self.identities.list(), [], "identities");
        self.remove_prepared().await;
        assert!(self.kernel.is_clean(), "kernel: {:?}", self.kernel.dump().await.expect("dump"));
        assert_eq!(self.findings(false).await, [], "audit");
        assert!(self.is_free(id(1)), "an id stays reserved");
    }

    /// True when a create could get this id.
    pub(crate) fn is_free(&self, id: EndpointId) -> bool {
        let free = self.life.endpoints.registry.claim_id(id);
        if free {
            self.life.endpoints.registry.free_id(id);
        }
        free
    }

    async fn remove_prepared(&self) {
        wharf_agent::endpoint::prepared::drain(&self.life.endpoints).await;
    }
}

pub(crate) fn is_changing(handle: &Handle) -> bool {
    let state = handle.shared.read(|v| v.fsm.state);
    matches!(state, State::WaitingToRegenerate | State::Regenerating | State::Restoring | State::WaitingForIdentity)
}

pub(crate) fn state(handle: &Handle) -> State {
    handle.shared.read(|v| v.fsm.state)
}

pub(crate) fn addresses(handle: &Handle) -> Vec<IpAddr> {
    handle.shared.read(|v| v.record.addresses().collect())
}

/// Messages of the endpoint's log.
pub(crate) fn log_of(handle: &Handle) -> Vec<String> {
    handle.shared.log_lines().into_iter().map(|l| format!("{}: {}", l.event, l.message)).collect()
}

/// Lets the tasks run until the condition holds.
pub(crate) async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let begun = std::time::Instant::now();
    while !condition() {
        assert!(begun.elapsed() < PATIENCE, "in vain: {what}");
        tokio::task::yield_now().await;
    }
}

/// Waits until a delete of the endpoint has begun: its create or build is to end.
pub(crate) async fn is_told_to_end(handle: &Handle) {
    eventually("a delete has begun", || handle.cancel.is_cancelled()).await;
}

/// Waits until a command waits for the endpoint's task, which is busy.
pub(crate) async fn is_asked(handle: &Handle) {
    let asked = || handle.mailbox.capacity() < handle.mailbox.max_capacity();
    eventually("a command waits for the endpoint", asked).await;
}

/// Lets every task that can run do so; what still stands waits for something that the test controls. Only before an
/// assertion that something has not happened: what must have happened is awaited.
pub(crate) async fn let_all_run() {
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
}

/// Moves the clock, and then waits for something that the deadlines that passed have made ready. Nothing that runs may
/// need the disk meanwhile: a clock that is moved by hand does not wait for threads.
pub(crate) async fn after<T>(time: Duration, something: impl Future<Output = T>) -> T {
    tokio::time::pause();
    tokio::time::advance(time).await;
    let outcome = something.await;
    tokio::time::resume();
    outcome
}

/// Where directories that end with their test are made: in memory where there is such a place. Processes die in these
/// tests, machines do not, so that nothing is learned from waiting for a disk.
fn memory() -> std::path::PathBuf {
    let shm = std::path::Path::new("/dev/shm");
    if shm.is_dir() { shm.to_owned() } else { std::env::temp_dir() }
}

/// As the API answers it.
fn created(result: Result<Endpoint, CreateError>) -> Result<Endpoint, ApiError> {
    result.map_err(|e| Failure::from(e).0)
}
