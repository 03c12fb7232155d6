//! The Wharf node agent.
//!
//! | task | inputs | outputs |
//! |---|---|---|
//! | api ([`serve`], [`socket`]) | requests on the unix socket | commands to endpoints, answers |
//! | endpoint ([`endpoint`]), one each | mailbox, build permits | kernel and store changes, its picture |
//! | delete, one for each request | the endpoints | teardown commands, one store transaction |
//! | kernel call ([`node::jobs`]), one at a time for each endpoint id | a step of a create, build, delete or undo | kernel changes |
//! | store writer ([`store`], a thread) | change sets | commits |
//! | events | the ring buffer of the programs | [`monitor`] |
//! | program log, with `--debug-programs` | the log buffer of the programs | the agent's log |
//! | deletion queue ([`endpoint::deletions`]) | the directory's events, a tick | deletes |
//! | held-back log lines ([`telemetry`]) | time | the log |
//! | stuck steps ([`stuck`]) | time | the log, the monitor |
//! | health endpoint ([`health`]) | time, its process, who asks for a round | the health endpoint, its picture |
//! | self-check ([`selfcheck`]) | time | test packets, alarms, regenerations |
//! | admin ([`admin`], a thread with a runtime of its own) | requests on `admin.sock`, looks of the [`status`] | answers |
//! | watchdog ([`watchdog`]), on the admin thread | signs of life ([`pulse`]), the store | systemd |
//! | heartbeat ([`pulse`]) | time | the sign of life of the main runtime |
//! | controllers ([`controller`]): prepared programs, node datapath, address rest, leak audit | time, what was taken | kernel changes, their rows in status |
//!
//! At a stop: no new work, requests that run are answered, operations end, endpoint tasks end, prepared sets are
//! unpinned, the store is closed. Endpoints keep their programs; traffic goes on.

pub mod addresses;
pub mod admin;
pub mod audit;
pub mod cleanup;
pub mod clock;
pub mod config;
pub mod controller;
pub mod endpoint;
pub mod explain;
pub mod findings;
pub mod gate;
pub mod health;
pub mod log_ring;
pub mod memory;
pub mod metrics;
pub mod monitor;
pub mod node;
pub mod pages;
pub mod process;
pub mod proxy;
pub mod pulse;
pub mod reconcile;
mod refused;
pub mod rest;
pub mod restore;
pub mod selfcheck;
pub mod serve;
pub mod socket;
pub mod status;
pub mod store;
pub mod stuck;
pub mod sync;
pub mod telemetry;
pub mod turn;
pub mod upgrade;
pub mod watchdog;

use std::{os::unix::fs::DirBuilderExt as _, path::Path, sync::Arc, sync::atomic::Ordering, time::Duration};

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};
use tracing::Instrument as _;
use wharf_core::{ipam::Ipam, kernel::Kernel as _};
use wharf_datapath::{LinuxKernel, OpenOptions};

use crate::{
    addresses::{pools, resting},
    admin::Admin,
    config::AgentConfig,
    endpoint::{deletions, prepared, resume},
    node::{LinuxNode, Node, queue, timeline},
    proxy::NoProxy,
    socket::Socket,
    store::Store,
    sync::lock,
    telemetry::LogFilter,
};

/// How long running requests and operations may take at a stop.
const GRACE: Duration = Duration::from_secs(15);

/// How often the node's own objects (the router's link, shared pins, pools' routes) are restored. Without the shared
/// pins no endpoint can be created or deleted; a check takes a millisecond.
const NODE_INTERVAL: Duration = Duration::from_secs(10);
/// How often the pools are compared with the node's networks; a comparison reads every route of the node.
const POOLS_INTERVAL: Duration = Duration::from_secs(60);

/// Runs an agent until SIGTERM or SIGINT.
///
/// # Errors
/// When the agent cannot start. The error names the operation, its subject, the cause and the remedy.
pub async fn agent(config: AgentConfig, ipam: Ipam, log: LogFilter) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    // The locks are taken before the kernel is opened, because the open installs this version's sink.
    let turn = turn::Turn::take()?.and_bpffs(&config.bpffs)?;
    let kernel = LinuxKernel::open(OpenOptions { bpffs: config.bpffs.clone(), attach_mode: config.attach_mode })?;
    make_directory(&config.run_dir).context("--run-dir")?;
    make_directory(&config.state_dir).context("--state-dir")?;
    let _turn = turn.and_state(&config.state_dir)?;
    let boot_id = boot_id()?;
    store::check::run(&config.store(), &boot_id);
    let opened = Store::open(&config.store(), &boot_id)?;
    if let Some(aside) = &opened.set_aside {
        tracing::warn!("the store could not be used and was put aside: {aside}");
    }
    let events = kernel.events()?;
    let metrics_listener = match config.metrics_listen {
        Some(address) => {
            Some(tokio::net::TcpListener::bind(address).await.with_context(|| format!("listen on {address}"))?)
        }
        None => None,
    };

    let (config, ipam) = restore::with_ipv6_of(&opened.snapshot, config, ipam)?;
    restore::fits(&opened.snapshot, &kernel.dump().await?, &ipam)?;
    // The upgrade follows every check that may refuse the start, so that a refusal leaves other versions' endpoints
    // unchanged.
    upgrade::upgrade(&kernel, &config, &opened.snapshot).await?;
    let (socket, node_name) = (config.socket(), config.node_name.clone());
    let node = Node::new(config, kernel, opened.store, ipam, Arc::new(NoProxy));
    let listener = Socket::bind(&socket, node.pulses.api_socket.clone()).await?;
    node.tasks.spawn(telemetry::tell_suppressed(log.clone(), node.stop.clone()));
    let admin = Admin::start(&node, log.clone()).await?;
    let beat = {
        let node = Arc::clone(&node);
        move || node.pulses.api.beat()
    };
    let api = tokio::spawn(serve::api(listener, rest::router(Arc::clone(&node), log), node.stop.clone(), beat));
    let owned = Arc::clone(&node);
    node.endpoints.spawn(async move {
        // The heartbeat runs until the endpoint tasks are told to end.
        tokio::select! {
            () = owned.halt.cancelled() => {}
            () = owned.pulses.runtime.keep() => {}
        }
    });
    node.kernel.ensure_node(&node.spec()).await?;
    pools::look(&node.addresses).await.map_err(anyhow::Error::msg)?;
    lock(&node.addresses.ipam).set_rest(node.config.ip_rest_ms);
    let restoring = telemetry::operation::OpId::next(telemetry::operation::Kind::Restore).span();
    restore::restore(&node, opened.snapshot, opened.lost).instrument(restoring).await?;
    health::reserve(&node).await;
    // The queue is drained before the agent serves: an endpoint deleted while no agent ran must be gone before its
    // container is added again.
    let drained = deletions::drain(&node, queue::Cause::Start).await.map(drop);
    if let Err(why) = &drained {
        tracing::warn!("drain the deletion queue: {why}; it is tried again while the agent runs");
    }
    // From its first answer on, status tells how the queue fares.
    node.controllers.record(deletions::CONTROLLER, drained);
    wharf_crash::point("start/after-drain");
    node.tasks.spawn(read_events(Arc::clone(&node), events));
    if node.config.debug_programs {
        node.tasks.spawn(read_program_log(Arc::clone(&node)));
    }
    start_controllers(&node, admin.handle());
    if let Some(listener) = metrics_listener {
        let (router, stop) = (rest::metrics_router(Arc::clone(&node)), node.stop.clone());
        node.tasks.spawn(serve::metrics(listener, router, stop));
    }
    if let Err(error) = memory::give_back() {
        tracing::warn!(%error, "return the memory that the start freed");
    }
    node.serving.store(true, Ordering::Release);
    tracing::info!(socket = %socket.display(), node = node_name, version = env!("CARGO_PKG_VERSION"), "serving");
    node.monitor.agent(None, "agent-started", format!("version {}", env!("CARGO_PKG_VERSION")));
    notify(&[sd_notify::NotifyState::Ready]);

    tokio::select! {
        _ = terminate.recv() => tracing::info!("SIGTERM: stopping"),
        _ = interrupt.recv() => tracing::info!("SIGINT: stopping"),
    }
    notify(&[sd_notify::NotifyState::Stopping]);
    stop(node, api, admin, opened.writer).await;
    Ok(())
}

/// Stops the agent; the crate documentation gives the order.
async fn stop(
    node: Arc<LinuxNode>,
    api: tokio::task::JoinHandle<()>,
    admin: Admin,
    writer: std::thread::JoinHandle<()>,
) {
    node.stop.cancel();
    match tokio::time::timeout(GRACE, api).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::error!("serve the API: {error}"),
        Err(_) => tracing::warn!("requests were still running after {GRACE:?}"),
    }
    node.tasks.close();
    if tokio::time::timeout(GRACE, node.tasks.wait()).await.is_err() {
        tracing::warn!("operations were still running after {GRACE:?}; the next start resumes them");
    }
    node.halt.cancel();
    node.endpoints.close();
    if tokio::time::timeout(GRACE, node.endpoints.wait()).await.is_err() {
        tracing::warn!("endpoints were still busy after {GRACE:?}; the next start resumes them");
    }
    prepared::drain(&node).await;
    if let Err(why) =
        timeline::write(&node.timelines, &node.store, &node.registry, clock::unix_ms(), node.config.timeline_keep).await
    {
        tracing::warn!("{why}; what was not written is not told after the next start");
    }
    // The admin thread stops late, so that a hanging stop can be inspected, but before the store, because it holds a
    // handle to the store.
    admin.stop().await;
    drop(node);
    // The writer commits everything queued, and ends when the last handle to the store is dropped. A task that
    // exceeded its grace period may still hold one.
    let joined = tokio::time::timeout(GRACE, tokio::task::spawn_blocking(move || writer.join())).await;
    if !matches!(joined, Ok(Ok(Ok(())))) {
        tracing::warn!("the store's thread did not end; what it was asked to write is in the store or not, as a whole");
    }
    tracing::info!("stopped; endpoints keep their programs");
}

fn start_controllers(node: &Arc<LinuxNode>, admin: &tokio::runtime::Handle) {
    let prepare = Arc::clone(node);
    node.tasks.spawn(async move {
        let (controllers, stop) = (prepare.controllers.clone(), prepare.stop.clone());
        loop {
            let run = controllers.begin("prepared-programs");
            let failed = run.end(prepared::refill(&prepare).await);
            let retry = wharf_core::state::retry_delay_ms(u32::try_from(failed).unwrap_or(u32::MAX), rand::random());
            tokio::select! {
                () = stop.cancelled() => return,
                () = prepare.prepared.taken(), if failed == 0 => {}
                () = tokio::time::sleep(Duration::from_millis(retry)), if failed > 0 => {}
            }
        }
    });
    node.tasks.spawn(deletions::watch(Arc::clone(node)));
    node.tasks.spawn(stuck::watch(Arc::clone(node)));
    if !node.config.health_interval.is_zero() {
        node.tasks.spawn(health::run(Arc::clone(node), health::ThisHost));
    }
    if !node.config.selfcheck_interval.is_zero() {
        node.tasks.spawn(selfcheck::watch(Arc::clone(node)));
    }
    let owned = Arc::clone(node);
    node.tasks.spawn(async move {
        let work = || {
            timeline::write(
                &owned.timelines,
                &owned.store,
                &owned.registry,
                clock::unix_ms(),
                owned.config.timeline_keep,
            )
        };
        owned.controllers.run("timeline", timeline::INTERVAL, owned.stop.clone(), work).await;
    });
    let owned = Arc::clone(node);
    node.tasks.spawn(async move {
        // A lost store file must be found while the agent runs: when the agent ends, the records are gone.
        let work = || owned.store.ping();
        owned.controllers.run("store-file", store::LOOK, owned.stop.clone(), work).await;
    });
    let owned = Arc::clone(node);
    node.tasks.spawn(async move {
        let work = || resting::wake(&owned.addresses);
        owned.controllers.run("address-rest", resting::TICK, owned.stop.clone(), work).await;
    });
    let owned = Arc::clone(node);
    node.tasks.spawn(async move {
        let work = || resume::resume(&owned);
        owned.controllers.run("delete-resume", resume::INTERVAL, owned.stop.clone(), work).await;
    });
    if !node.config.audit_interval.is_zero() {
        let owned = Arc::clone(node);
        node.tasks.spawn(async move {
            let mut reconcile = reconcile::Reconcile::default();
            loop {
                tokio::select! {
                    () = owned.stop.cancelled() => return,
                    () = tokio::time::sleep(owned.config.audit_interval) => {}
                }
                let run = owned.controllers.begin("leak-audit");
                let result = reconcile.run(&owned).await;
                if let Err(why) = &result {
                    tracing::warn!(controller = "leak-audit", "{why}");
                }
                run.end(result);
                let interval = owned.config.audit_interval;
                owned.controllers.plan("leak-audit", interval, interval);
            }
        });
    }
    let owned = Arc::clone(node);
    node.tasks.spawn(async move {
        let work = || async { owned.kernel.ensure_node(&owned.spec()).await };
        owned.controllers.run("node-datapath", NODE_INTERVAL, owned.stop.clone(), work).await;
    });
    let owned = Arc::clone(node);
    node.tasks.spawn(async move {
        let work = || pools::look(&owned.addresses);
        owned.controllers.run("pool-overlap", POOLS_INTERVAL, owned.stop.clone(), work).await;
    });
    if let Some(interval) = sd_notify::watchdog_enabled() {
        node.tasks.spawn_on(watchdog::feed(Arc::clone(node), interval), admin);
    }
}

async fn read_events(node: Arc<LinuxNode>, mut events: wharf_datapath::EventReader) {
    loop {
        let result = tokio::select! {
            () = node.stop.cancelled() => return,
            result = events.next() => result,
        };
        match result {
            Ok(batch) => node.monitor.packets(&batch),
            Err(error) => {
                node.controllers.record("events", Err(&error));
                tracing::error!("read events: {error}; `wharf monitor` shows no packets until the agent is restarted");
                return;
            }
        }
    }
}

/// Copies the programs' log to the agent's log; only with `--debug-programs`. All programs write to one buffer, which
/// is reachable through any of them. A set is therefore prepared, and then given back for normal use.
async fn read_program_log(node: Arc<LinuxNode>) {
    let read = async {
        let (set, programs, guard) = prepared::load(&node).await?;
        node.prepared.give_back(set);
        drop(guard);
        let mut log = node.kernel.program_log(programs.program_ids[0]).await?;
        loop {
            log.next().await?;
        }
    };
    let result: anyhow::Result<()> = tokio::select! {
        () = node.stop.cancelled() => return,
        result = read => result,
    };
    if let Err(error) = result {
        node.controllers.record("program-log", Err(&error));
        tracing::error!("read the programs' log: {error}");
    }
}

fn notify(state: &[sd_notify::NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!("tell systemd: {error}");
    }
}

/// Makes a directory that only its owner writes to, whatever the umask is.
fn make_directory(path: &Path) -> anyhow::Result<()> {
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o755).create(path);
    made.with_context(|| format!("make directory {}", path.display()))
}

/// Identifies this boot (random(4), /proc/sys/kernel/random/boot_id).
fn boot_id() -> anyhow::Result<String> {
    let path = "/proc/sys/kernel/random/boot_id";
    Ok(std::fs::read_to_string(path).with_context(|| format!("read {path}"))?.trim().to_owned())
}
