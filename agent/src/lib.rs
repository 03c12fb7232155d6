//! The Wharf node agent.
//!
//! | task | inputs | outputs |
//! |---|---|---|
//! | api ([`serve`], [`wharf_kit::socket`]) | requests on the unix socket | endpoint commands, answers |
//! | endpoint ([`endpoint`]), one each | mailbox, build permits | kernel and store changes, view |
//! | delete, one per request | endpoints | teardown commands, a store transaction |
//! | kernel call ([`node::jobs`]), one per endpoint id | a step | kernel changes |
//! | store writer ([`wharf_store`], a thread) | change sets | commits |
//! | events | the programs' ring buffer | [`monitor`] |
//! | links ([`endpoint::links`]) | link changes | regenerations |
//! | program log, with `--debug-programs` | the programs' log buffer | log |
//! | node addresses ([`policy::addresses`]) | kernel notifications | policy rows |
//! | deletion queue ([`endpoint::deletions`]) | directory events, a tick | deletes |
//! | command reports ([`commands::reports`]) | directory events, a tick | counters, log |
//! | OTLP exporter, with `--otlp-endpoint` | ended CNI commands | spans |
//! | suppressed log lines ([`telemetry`]) | time | log |
//! | stuck steps ([`stuck`]) | time | log, monitor |
//! | refused listeners ([`endpoint::refusals`]) | time, refusals | endpoint logs |
//! | cluster feed ([`cluster::feed::server`]), with `--cluster-feed` | producers on `feed.sock` | rows, answers |
//! | feed rows ([`cluster::feed`]) | changed rows | kernel changes, [`policy`] |
//! | health endpoint ([`health`]) | time, its process, requested rounds | endpoint, view |
//! | health mesh ([`health::mesh`]), with a cluster | time, cluster nodes | probes, view |
//! | self-check ([`selfcheck`]) | time | test packets, alarms, regenerations |
//! | admin ([`admin`], a thread and runtime) | requests on `admin.sock`, [`status`] | answers |
//! | watchdog ([`watchdog`]), on the admin thread | heartbeats ([`wharf_kit::pulse`]), store | systemd |
//! | heartbeat ([`wharf_kit::pulse`]) | time | the main runtime's heartbeat |
//! | controllers ([`wharf_kit::controller`]), listed in `start_controllers` | time | kernel, status |
//!
//! Order of a stop: no new work, answer requests, end operations, end endpoint tasks, unpin prepared sets, close the
//! store. Endpoints keep their programs, so traffic continues. A restart in place for other pools begins with the same
//! stop; then [`process`] executes the program again.

pub mod addresses;
pub mod admin;
pub mod audit;
pub mod capabilities;
pub mod cleanup;
pub mod clients;
pub mod cluster;
pub mod commands;
pub mod config;
pub mod delegate;
pub mod endpoint;
pub mod explain;
pub mod export;
pub mod findings;
pub mod flows;
pub mod health;
pub mod memory;
pub mod metrics;
pub mod monitor;
pub mod node;
pub mod pages;
pub mod policy;
pub mod process;
pub mod proxy;
pub mod reconcile;
mod refused;
pub mod rest;
pub mod restore;
pub mod selfcheck;
pub mod status;
pub mod stuck;
pub mod turn;
pub mod upgrade;
pub mod watchdog;

use std::{sync::Arc, sync::atomic::Ordering, time::Duration};

use anyhow::Context;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
};
use tracing::Instrument as _;
use wharf_core::{identities::LocalIdentities, ipam::Ipam, kernel::NodeKernel as _};
use wharf_datapath::{LinuxKernel, Loader, OpenOptions};
use wharf_handover::report::Reports;
use wharf_kit::{
    clock, kept, serve,
    socket::Socket,
    sync::lock,
    systemd,
    telemetry::{self, LogFilter},
};
use wharf_proxy::Proxy;
use wharf_store::{Store, StoreError};

use crate::{
    addresses::{pools, resting},
    admin::Admin,
    cluster::Cluster,
    commands::reports,
    config::AgentConfig,
    endpoint::{abandoned, deletions, links, mtu, prepared, refusals, resume},
    monitor::Judged,
    node::{
        Node,
        endpoints::Endpoints,
        lifecycle::{Lifecycle, Tasks},
        queue, timeline,
    },
    policy::Policy,
    proxy::{
        Proxies,
        dns::Dns,
        envoy::{self, Envoy},
    },
};

/// Milliseconds of a busy proxy.
const RECORDS: usize = 4_096;

/// Over a minute of a busy node.
const EXPORTS: usize = 1_024;

/// Batches of packets that policy dropped.
const DROPPED: usize = 16;

/// Requests and operations at a stop.
const GRACE: Duration = Duration::from_secs(15);
/// Last write of the cluster feed's rows.
const KEEP: Duration = Duration::from_secs(3);

/// Without the node's objects, no endpoint can be created or deleted.
const NODE_INTERVAL: Duration = Duration::from_secs(10);
const MASQUERADE: &str = "masquerade";
const POLICY_INTERVAL: Duration = Duration::from_secs(2);
/// Reads every route.
const POOLS_INTERVAL: Duration = Duration::from_secs(60);

/// End of an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// SIGTERM or SIGINT.
    Stopped,
    /// The process must execute the agent again.
    Restart,
}

/// Runs an agent until SIGTERM, SIGINT, or a restart for other pools.
///
/// # Errors
/// Why the agent cannot start, and the remedy.
pub async fn agent(config: AgentConfig, ipam: Ipam, log: LogFilter) -> anyhow::Result<End> {
    process::note_signals().context("handle SIGTERM and SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    if process::stops() {
        // Tokio reports only later signals.
        return Ok(End::Stopped);
    }
    let turn = turn::Turn::take()?;
    kept::make_directory(&config.run_dir).context("--run-dir")?;
    kept::make_directory(&config.state_dir).context("--state-dir")?;
    // Before the kernel is opened, which installs this version's sink.
    let turn = turn.and_bpffs(&config.bpffs)?;
    delegate::records::leave(&config.run_dir)?;
    let loader = Loader::default();
    give_memory_back();
    let options = OpenOptions {
        bpffs: config.bpffs.clone(),
        run_dir: config.run_dir.clone(),
        attach_mode: config.attach_mode,
        device_mode: config.device_mode,
    };
    let kernel = Arc::new(LinuxKernel::open(options, loader)?);
    let _turn = turn.and_state(&config.state_dir)?;
    let boot_id = clock::boot_id()?;
    wharf_store::check::run(&config.store(), &boot_id);
    let opened = Store::open(&config.store(), &boot_id)?;
    if let Some(aside) = &opened.set_aside {
        tracing::warn!("the store could not be used and was put aside: {aside}");
    }
    let (events, address_changes) = (kernel.events()?, kernel.address_changes()?);
    let metrics_listener = match config.metrics_listen {
        Some(address) => Some(serve::listen_for_metrics(address).await?),
        None => None,
    };

    let dump = kernel.dump().await?;
    let (config, ipam) = restore::with_fitting_pools(&opened.snapshot, &dump, config, ipam)?;
    drop(dump);
    cluster::pools::note_attempt(&config, &boot_id);
    // A refused start must leave other versions' endpoints unchanged.
    upgrade::upgrade(&kernel, &config, &opened.snapshot).await?;
    let (socket, node_name) = (config.socket(), config.node_name.clone());
    let identities = Arc::new(LocalIdentities::default());
    let (proxy, requests) = wharf_proxy::Proxy::new(RECORDS);
    let envoy = Envoy::new(proxy.clone(), config.envoy.is_some());
    let (dns, resolver, answers, queries) = Dns::new(RECORDS);
    let (sender, queue) = mpsc::channel(EXPORTS);
    let exporter = config.otlp_endpoint.is_some().then_some(sender);
    let own = Arc::clone(&kernel);
    let node = Node::new(config, own, opened.store, ipam, Arc::new(Proxies { envoy, dns }), identities, exporter);
    let (life, tasks) = (&node.life, &node.life.tasks);
    life.policy.load().await?;
    // They end after all operations, which wait for them.
    tasks.endpoints.spawn(resolver.serve(tasks.halt.clone()));
    let listener = Socket::bind(&socket, node.pulses.api_socket.clone()).await?;
    let feed_listener = match life.network.cluster.feed() {
        Some(feed) => Some(cluster::feed::server::bind(feed).await.context("--cluster-feed")?),
        None => None,
    };
    export::start(&node.life.config, &node.commands, tasks, commands::Mode::Own, queue)?;
    tasks.operations.spawn(telemetry::tell_suppressed(log.clone(), tasks.stop.clone()));
    let admin = Admin::start(&node, log.clone()).await?;
    let beat = {
        let node = Arc::clone(&node);
        move || node.pulses.api.beat()
    };
    let api = tokio::spawn(serve::api(listener, rest::router(Arc::clone(&node), log), tasks.stop.clone(), beat));
    let owned = Arc::clone(&node);
    tasks.endpoints.spawn(async move {
        tokio::select! {
            () = owned.life.tasks.halt.cancelled() => {}
            () = owned.pulses.runtime.keep() => {}
        }
    });
    mtu::observe(&life.network).await?;
    life.network.load_cluster(&boot_id).await?;
    life.network.set_cluster().await?;
    life.network.ensure_node().await?;
    pools::look(&life.network.addresses).await.map_err(anyhow::Error::msg)?;
    // After all checks. Without masquerading, the node's containers still reach each other.
    let masquerading = life.network.ensure_nat().await;
    if let Err(why) = &masquerading {
        tracing::warn!("containers do not reach other networks: {why}");
    }
    tasks.controllers.record(MASQUERADE, masquerading);
    lock(&life.network.addresses.ipam).set_rest(life.config.ip_rest_ms);
    let restoring = telemetry::operation::OpId::next(telemetry::operation::Kind::Restore).span();
    restore::restore(life, opened.snapshot, opened.lost).instrument(restoring).await?;
    let (owned, started) = (Arc::clone(&node), Started { feed_listener, proxy, requests, queries, answers });
    let starting = async move { start_policy(&owned, started).await };
    let starting = match life.network.cluster.feed() {
        Some(_) => Some(tasks.operations.spawn(starting)),
        None => {
            starting.await;
            None
        }
    };
    health::reserve(life, &node.health).await;
    // Before serving: deleted endpoints are gone before their containers are added again.
    let drained = deletions::drain(life, queue::Cause::Start).await.map(drop);
    if let Err(why) = &drained {
        tracing::warn!("drain the deletion queue: {why}; it is tried again while the agent runs");
    }
    tasks.controllers.record(deletions::CONTROLLER, drained);
    wharf_crash::point("start/after-drain");
    // Only pools of a successful start; before the controller that changes them.
    cluster::pools::keep_at_start(&life.config, &boot_id);
    tasks.operations.spawn(read_events(Arc::clone(life), events));
    tasks.operations.spawn(links::watch(Arc::clone(life), Arc::clone(&kernel)));
    tasks.operations.spawn(follow_addresses(Arc::clone(&life.policy), tasks.clone(), address_changes));
    if life.config.debug_programs {
        tasks.operations.spawn(read_program_log(Arc::clone(life), kernel));
    }
    start_controllers(&node, admin.handle());
    if let Some(listener) = metrics_listener {
        let (router, stop) = (rest::metrics_router(Arc::clone(&node)), tasks.stop.clone());
        tasks.operations.spawn(serve::metrics(listener, router, stop));
    }
    give_memory_back();
    if let Err(why) = life.endpoints.admission.memory.admit() {
        tracing::warn!("every ADD is refused: {why} (docs/sizing.md)");
    }
    node.serving.store(true, Ordering::Release);
    tracing::info!(socket = %socket.display(), node = node_name, version = env!("CARGO_PKG_VERSION"), "serving");
    life.telemetry.monitor.agent(None, "agent-started", format!("version {}", env!("CARGO_PKG_VERSION")));
    systemd::ready();

    let end = tokio::select! {
        _ = terminate.recv() => {
            tracing::info!("SIGTERM: stopping");
            End::Stopped
        }
        _ = interrupt.recv() => {
            tracing::info!("SIGINT: stopping");
            End::Stopped
        }
        () = other_pools(&life.network.cluster) => End::Restart,
        panicked = panic_of(starting) => std::panic::resume_unwind(panicked),
    };
    match end {
        End::Stopped => systemd::notify(&[sd_notify::NotifyState::Stopping]),
        End::Restart => systemd::restarting(),
    }
    stop(node, api, admin, opened.writer).await;
    Ok(end)
}

/// Returns only after a panic, without which every create would wait.
async fn panic_of(task: Option<tokio::task::JoinHandle<()>>) -> Box<dyn std::any::Any + Send> {
    if let Some(task) = task
        && let Err(failed) = task.await
        && let Ok(panic) = failed.try_into_panic()
    {
        return panic;
    }
    std::future::pending().await
}

async fn other_pools(cluster: &Cluster) {
    match cluster.own_pools() {
        Some(own) => own.restarts().await,
        None => std::future::pending().await,
    }
}

fn give_memory_back() {
    if let Err(error) = memory::give_back() {
        tracing::warn!(%error, "return the memory that the start freed");
    }
}

async fn stop(node: Arc<Node>, api: tokio::task::JoinHandle<()>, admin: Admin, writer: std::thread::JoinHandle<()>) {
    let tasks = node.life.tasks.clone();
    tasks.stop.cancel();
    match tokio::time::timeout(GRACE, api).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::error!("serve the API: {error}"),
        Err(_) => tracing::warn!("requests were still running after {GRACE:?}"),
    }
    tasks.operations.close();
    if tokio::time::timeout(GRACE, tasks.operations.wait()).await.is_err() {
        tracing::warn!("operations were still running after {GRACE:?}; the next start resumes them");
    }
    tasks.halt.cancel();
    tasks.endpoints.close();
    if tokio::time::timeout(GRACE, tasks.endpoints.wait()).await.is_err() {
        tracing::warn!("endpoints were still busy after {GRACE:?}; the next start resumes them");
    }
    prepared::drain(&node.life.endpoints).await;
    if let Some(feed) = node.life.network.cluster.feed() {
        match tokio::time::timeout(KEEP, feed.keep()).await {
            Ok(Ok(())) => {}
            Ok(Err(why)) => tracing::warn!("{why}"),
            Err(_) => tracing::warn!("the rows of the cluster feed are not written within {KEEP:?}"),
        }
    }
    if let Err(why) = write_timeline(Arc::clone(&node.life)).await {
        tracing::warn!("{why}; what was not written is not told after the next start");
    }
    // Late, to inspect a hanging stop; before the store, to which it has a handle.
    admin.stop().await;
    drop(node);
    // A late task may have a handle, which keeps the thread.
    let joined = tokio::time::timeout(GRACE, tokio::task::spawn_blocking(move || writer.join())).await;
    if !matches!(joined, Ok(Ok(Ok(())))) {
        tracing::warn!("the store's thread did not end; what it was asked to write is in the store or not, as a whole");
    }
    tracing::info!("stopped; endpoints keep their programs");
}

struct Started {
    feed_listener: Option<Socket>,
    proxy: Proxy,
    requests: mpsc::Receiver<wharf_proxy::Record>,
    queries: mpsc::Receiver<wharf_dns::Record>,
    answers: mpsc::Receiver<proxy::dns::Noted>,
}

/// With a cluster feed, this runs beside the API, because the rows of many pods take seconds. Meanwhile, the kernel
/// keeps the rows of the last agent.
async fn start_policy(node: &Arc<Node>, started: Started) {
    let (life, tasks) = (&node.life, &node.life.tasks);
    let Started { feed_listener, proxy, requests, queries, answers } = started;
    // First, so that no packet meets a policy without the feed's pods and namespaces.
    if let Some(feed) = life.network.cluster.feed() {
        feed.load_rest().await;
        if feed.is_lost() {
            life.policy.lacks_rows().await;
        }
        if let Err(why) = feed.take(&**life).await {
            tracing::warn!(
                "rows of the cluster feed are not in force: {why}; they are tried again while the agent runs"
            );
        }
    }
    if let Err(why) = life.policy.start().await {
        tracing::error!("{why}");
    }
    // After all listeners are known: a running Envoy drops missing ones.
    tell(life, requests);
    tell(life, queries);
    let owned = Arc::clone(life);
    tasks.endpoints.spawn(async move { owned.policy.follow_names(answers, owned.tasks.halt.clone()).await });
    if let Err(why) = start_proxy(&life.config, tasks, proxy) {
        // Until then, connections with L7 rules are dropped, or pass with `failOpen`.
        tracing::error!("nobody can start an Envoy with this agent's settings until the agent is restarted: {why:#}");
    }
    if let Some(listener) = feed_listener {
        serve_feed(node, listener);
    }
    give_memory_back();
}

fn start_proxy(config: &AgentConfig, tasks: &Tasks, proxy: Proxy) -> anyhow::Result<()> {
    let process = envoy::process(config);
    process.remember(&proxy, config.envoy.is_some())?;
    let socket = process.socket();
    let (served, halt) = (proxy.clone(), tasks.halt.clone());
    if config.envoy.is_some() {
        proxy.serve_only_supervised();
    }
    // It ends after all operations, which wait for Envoy's answers.
    tasks.endpoints.spawn(async move {
        if let Err(error) = served.serve(socket, halt.cancelled_owned()).await {
            tracing::error!(%error, "rules about requests do not change until the agent is restarted");
        }
    });
    if config.envoy.is_some() {
        let stop = tasks.stop.clone();
        tasks.operations.spawn(async move { process.supervise(&proxy, stop.cancelled_owned()).await });
    } else {
        process.prepare()?;
    }
    Ok(())
}

fn tell<R: Judged + Send + 'static>(life: &Arc<Lifecycle>, mut records: mpsc::Receiver<R>) {
    let owned = Arc::clone(life);
    life.tasks.operations.spawn(async move {
        while let Some(record) = tokio::select! {
            () = owned.tasks.stop.cancelled() => None,
            record = records.recv() => record,
        } {
            owned.telemetry.monitor.request(record);
        }
    });
}

fn start_controllers(node: &Arc<Node>, admin: &tokio::runtime::Handle) {
    let (life, tasks) = (&node.life, &node.life.tasks);
    let prepare = Arc::clone(life);
    tasks.operations.spawn(async move {
        let Tasks { controllers, stop, .. } = &prepare.tasks;
        loop {
            let run = controllers.begin("prepared-programs");
            let failed = run.end(prepared::refill(&prepare).await);
            let retry = wharf_core::state::retry_delay_ms(u32::try_from(failed).unwrap_or(u32::MAX), rand::random());
            tokio::select! {
                () = stop.cancelled() => return,
                () = prepare.endpoints.prepared.taken(), if failed == 0 => {}
                () = tokio::time::sleep(Duration::from_millis(retry)), if failed > 0 => {}
            }
        }
    });
    tasks.operations.spawn(deletions::watch(Arc::clone(life)));
    let (reports, controllers) = (Reports::new(&life.config.run_dir), tasks.controllers.clone());
    tasks.operations.spawn(reports::watch(Arc::clone(&node.commands), reports, controllers, tasks.stop.clone()));
    tasks.operations.spawn(stuck::watch(Arc::clone(life)));
    tasks.operations.spawn(refusals::watch(Arc::clone(life)));
    let (kernel, policy) = (Arc::clone(&life.kernel), Arc::clone(&life.policy));
    tasks.operations.spawn(clients::watch(kernel, policy, tasks.clone(), Arc::clone(&node.proxy_clients)));
    if !life.config.health_interval.is_zero() {
        tasks.operations.spawn(health::run(Arc::clone(life), Arc::clone(&node.health), health::ThisHost));
        tasks.operations.spawn(health::mesh::run(Arc::clone(life), Arc::clone(&node.health)));
    }
    if !life.config.selfcheck_interval.is_zero() {
        tasks.operations.spawn(selfcheck::watch(Arc::clone(life), Arc::clone(&node.self_checks)));
    }
    every(life, "timeline", timeline::INTERVAL, write_timeline);
    // Finds a lost store file while the agent has the records.
    every(life, "store-file", wharf_store::LOOK, |life| async move { life.store.ping().await });
    every(life, "address-rest", resting::TICK, |life| async move { resting::wake(&life.network.addresses).await });
    every(life, "delete-resume", resume::INTERVAL, |life| async move { resume::resume(&life).await });
    let interval = abandoned::interval(life.config.gone_grace);
    every(life, abandoned::CONTROLLER, interval, |life| async move { abandoned::look(&life).await });
    if !life.config.audit_interval.is_zero() {
        let owned = Arc::clone(node);
        tasks.operations.spawn(async move {
            let (life, Tasks { controllers, stop, .. }) = (&owned.life, &owned.life.tasks);
            let interval = life.config.audit_interval;
            let mut reconcile = reconcile::Reconcile::default();
            loop {
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = tokio::time::sleep(interval) => {}
                }
                let run = controllers.begin("leak-audit");
                let result = reconcile.run(life, &owned.audit_findings).await;
                if let Err(why) = &result {
                    tracing::warn!(controller = "leak-audit", "{why}");
                }
                run.end(result);
                controllers.plan("leak-audit", interval, interval);
            }
        });
    }
    every(life, mtu::CONTROLLER, NODE_INTERVAL, mtu::follow);
    every(life, node::network::CONTROLLER, NODE_INTERVAL, |life| async move { life.network.ensure_node().await });
    every(life, MASQUERADE, NODE_INTERVAL, |life| async move { life.network.ensure_nat().await });
    every(life, cluster::CONTROLLER, cluster::INTERVAL, |life| async move { life.network.follow_cluster().await });
    if life.network.cluster.own_pools().is_some() {
        let name = cluster::pools::CONTROLLER;
        every(life, name, cluster::pools::INTERVAL, |life| async move { life.follow_row().await });
    }
    if life.network.cluster.probes_paths() {
        let name = health::paths::CONTROLLER;
        every(life, name, health::paths::INTERVAL, |life| async move { health::paths::look(&life.network).await });
    }
    let kept = Arc::clone(&node.flows);
    every(life, flows::CONTROLLER, flows::INTERVAL, move |life| {
        let kept = Arc::clone(&kept);
        async move { flows::collect(&*life.kernel, &kept).await }
    });
    every(life, policy::CONTROLLER, POLICY_INTERVAL, |life| async move { life.policy.ensure().await });
    every(life, policy::NAMES_CONTROLLER, policy::NAMES_INTERVAL, |life| async move {
        life.policy.forget_names(life.policy.names_now()).await
    });
    every(life, "pool-overlap", POOLS_INTERVAL, |life| async move { pools::look(&life.network.addresses).await });
    if let Some(interval) = sd_notify::watchdog_enabled() {
        tasks.operations.spawn_on(watchdog::feed(Arc::clone(node), interval), admin);
    }
}

fn serve_feed(node: &Arc<Node>, listener: Socket) {
    let (life, tasks) = (&node.life, &node.life.tasks);
    let Some(feed) = life.network.cluster.feed() else { return };
    tasks.operations.spawn(cluster::feed::server::serve(Arc::clone(feed), listener, tasks.stop.clone()));
    let (followed, owned) = (Arc::clone(feed), Arc::clone(life));
    tasks.operations.spawn(async move {
        followed.follow(&*owned, &owned.tasks.controllers, &owned.tasks.stop).await;
    });
    let kept = Arc::clone(feed);
    every(life, cluster::feed::KEEP_CONTROLLER, cluster::feed::KEEP_INTERVAL, move |_| {
        let kept = Arc::clone(&kept);
        async move { kept.keep().await }
    });
    let (reported, reporter) = (Arc::clone(feed), Arc::new(status::feed::Reporter::new(node)));
    every(life, cluster::feed::REPORT_CONTROLLER, cluster::feed::REPORT_INTERVAL, move |life| {
        let (reported, reporter) = (Arc::clone(&reported), Arc::clone(&reporter));
        async move {
            // Waits for a policy change, whose delay the report names.
            let looked = tokio::time::timeout(cluster::feed::REPORT_INTERVAL, reported.look(&*life)).await;
            if looked.is_err() {
                tracing::debug!("the report has the refused rows of before: a policy change takes long");
            }
            reported.report(reporter.report().await);
            Ok::<(), std::convert::Infallible>(())
        }
    });
}

fn every<F, E>(
    life: &Arc<Lifecycle>,
    name: &'static str,
    interval: Duration,
    work: impl Fn(Arc<Lifecycle>) -> F + Send + Sync + 'static,
) where
    F: Future<Output = Result<(), E>> + Send + 'static,
    E: std::fmt::Display + Send + 'static,
{
    let owned = Arc::clone(life);
    life.tasks.operations.spawn(async move {
        let work = || work(Arc::clone(&owned));
        owned.tasks.controllers.run(name, interval, owned.tasks.stop.clone(), work).await;
    });
}

async fn write_timeline(life: Arc<Lifecycle>) -> Result<(), StoreError> {
    let Endpoints { timelines, registry, .. } = &life.endpoints;
    timeline::write(timelines, &life.store, registry, clock::unix_ms(), life.config.timeline_keep).await
}

async fn read_events(life: Arc<Lifecycle>, mut events: wharf_datapath::EventReader) {
    let (sender, dropped) = mpsc::channel(DROPPED);
    life.tasks.operations.spawn(count_unknown_pods(Arc::clone(&life), dropped));
    loop {
        let result = tokio::select! {
            () = life.tasks.stop.cancelled() => return,
            result = events.next() => result,
        };
        match result {
            Ok(batch) => {
                let dropped = cluster::unknown::dropped(&batch);
                if !dropped.is_empty() {
                    // What does not fit is not counted: the count must not delay events.
                    sender.try_send(dropped).ok();
                }
                let none = life.telemetry.monitor.readers() == 0;
                let rules = if none { vec![None; batch.len()] } else { life.policy.why(&batch).await };
                life.telemetry.monitor.packets(batch.into_iter().zip(rules));
            }
            Err(error) => {
                life.tasks.controllers.record("events", Err(&error));
                tracing::error!("read events: {error}; `wharf monitor` shows no packets until the agent is restarted");
                return;
            }
        }
    }
}

/// Until the reader of events ends.
async fn count_unknown_pods(life: Arc<Lifecycle>, mut dropped: mpsc::Receiver<Vec<cluster::unknown::Dropped>>) {
    while let Some(dropped) = dropped.recv().await {
        life.telemetry.metrics.unknown_pods(life.network.cluster.unknown_pods(&dropped).await);
    }
}

async fn follow_addresses(policy: Arc<Policy>, tasks: Tasks, changes: wharf_datapath::AddressChanges) {
    let Tasks { controllers, stop, .. } = tasks;
    policy::addresses::follow(&policy, changes, &controllers, &stop).await;
}

/// All endpoints' `deliver` write to one log buffer; a prepared set gives access.
async fn read_program_log(life: Arc<Lifecycle>, kernel: Arc<LinuxKernel>) {
    let read = async {
        let (set, programs, guard) = prepared::load(&life.endpoints, &life.config).await?;
        life.endpoints.prepared.give_back(set);
        drop(guard);
        let [.., deliver] = programs.program_ids;
        let mut log = kernel.program_log(deliver).await?;
        loop {
            log.next().await?;
        }
    };
    let result: anyhow::Result<()> = tokio::select! {
        () = life.tasks.stop.cancelled() => return,
        result = read => result,
    };
    if let Err(error) = result {
        life.tasks.controllers.record("program-log", Err(&error));
        tracing::error!("read the programs' log: {error}");
    }
}
