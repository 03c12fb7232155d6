//! Delegated mode: the agent passes CNI commands to a service, which makes the containers' networks
//! (docs/delegation.md).
//!
//! The agent creates only its socket and files, and needs only the capability to set the socket's group.
//!
//! Order of a stop: no new work; running requests are answered within 4 s; calls to the service are cancelled, and
//! recorded before their tasks end.

pub mod answer;
pub mod api;
pub mod reach;
pub mod records;
pub mod request;
pub mod service;
pub mod status;
pub mod turns;
pub mod work;

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{Semaphore, mpsc},
};
use wharf_core::{admission::AdmissionConfig, state::retry_delay_ms};
use wharf_handover::report::Reports;
use wharf_kit::{
    clock,
    gate::Gate,
    kept::make_directory,
    pulse::{Pulse, Pulses},
    serve,
    socket::Socket,
    systemd::notify,
    telemetry::{self, LogFilter},
};

use crate::{
    commands::{Commands, Ended, Mode, reports},
    config::AgentConfig,
    delegate::{reach::Reach, records::Records, service::Service, turns::Turns},
    endpoint::deletions,
    export,
    metrics::Metrics,
    node::{lifecycle::Tasks, queue::Cause},
    turn::Turn,
};

/// Controller that polls the service.
pub const CONTROLLER: &str = "delegate";
const LOOK: Duration = Duration::from_secs(10);
/// Further ADDs wait within their deadlines.
const ADDS: u32 = 64;
/// Other concurrent calls except for records.
pub const CALLS: usize = 64;
const GRACE: Duration = Duration::from_secs(4);
const EXPORTS: usize = 1_024;

/// A delegated agent.
pub struct Delegation {
    config: AgentConfig,
    service: Service,
    reach: Reach,
    records: Records,
    turns: Arc<Turns>,
    gate: Arc<Gate>,
    places: Semaphore,
    tasks: Tasks,
    metrics: Metrics,
    commands: Arc<Commands>,
    pulses: Pulses,
    serving: AtomicBool,
    started: Instant,
}

impl Delegation {
    /// Without connecting or writing.
    #[must_use]
    pub fn new(
        config: AgentConfig,
        socket: &Path,
        boot_id: String,
        exporter: Option<mpsc::Sender<Arc<Ended>>>,
    ) -> Arc<Self> {
        let admission = AdmissionConfig { parallel: ADDS, parallel_while_deleting: ADDS, ..AdmissionConfig::default() };
        let metrics = Metrics::default();
        Arc::new(Self {
            service: Service::new(socket),
            reach: Reach::default(),
            records: Records::new(&config.run_dir, boot_id),
            turns: Arc::default(),
            gate: Arc::new(Gate::new(admission)),
            places: Semaphore::new(CALLS),
            tasks: Tasks::default(),
            commands: Arc::new(Commands::new(Mode::Delegated, Arc::clone(&metrics.commands), exporter)),
            metrics,
            pulses: Pulses::default(),
            serving: AtomicBool::new(false),
            started: Instant::now(),
            config,
        })
    }

    fn serves(&self) -> bool {
        self.serving.load(Ordering::Acquire) && !self.tasks.stop.is_cancelled()
    }
}

/// Runs until SIGTERM or SIGINT; `service` is the socket, possibly absent.
pub async fn agent(config: AgentConfig, service: &Path, log: LogFilter) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    let _turn = Turn::take()?;
    make_directory(&config.run_dir).context("--run-dir")?;
    has_no_store(&config)?;
    records::enter(&config.run_dir)?;
    let metrics_listener = match config.metrics_listen {
        Some(address) => Some(serve::listen_for_metrics(address).await?),
        None => None,
    };
    let (sender, queue) = mpsc::channel(EXPORTS);
    let exporter = config.otlp_endpoint.is_some().then_some(sender);
    let this = Delegation::new(config, service, clock::boot_id()?, exporter);
    let tasks = this.tasks.clone();
    let socket = this.config.socket();
    let listener = Socket::bind(&socket, this.pulses.api_socket.clone()).await?;
    export::start(&this.config, &this.commands, &tasks, Mode::Delegated, queue)?;
    tasks.operations.spawn(telemetry::tell_suppressed(log, tasks.stop.clone()));
    let beats = Arc::clone(&this);
    let api = serve::api(listener, api::router(&this), tasks.stop.clone(), move || beats.pulses.api.beat());
    let api = tokio::spawn(api);
    let owned = Arc::clone(&this);
    tasks.endpoints.spawn(async move {
        tokio::select! {
            () = owned.tasks.halt.cancelled() => {}
            () = owned.pulses.runtime.keep() => {}
        }
    });
    // A container deleted while no agent ran must be gone before it is added again. Without a service, each ADD checks
    // its records.
    let drained = this.drain(Cause::Start).await.map(drop);
    if let Err(why) = &drained {
        tracing::warn!("drain the deletion queue: {why}; it is tried again while the agent runs");
    }
    tasks.controllers.record(deletions::CONTROLLER, drained);
    start_controllers(&this);
    if let Some(listener) = metrics_listener {
        let router = api::metrics_router(&this);
        tasks.operations.spawn(serve::metrics(listener, router, tasks.stop.clone()));
    }
    this.serving.store(true, Ordering::Release);
    tracing::info!(
        socket = %socket.display(),
        node = this.config.node_name,
        version = env!("CARGO_PKG_VERSION"),
        delegate = %service.display(),
        "serving"
    );
    notify(&[sd_notify::NotifyState::Ready]);
    tokio::select! {
        _ = terminate.recv() => tracing::info!("SIGTERM: stopping"),
        _ = interrupt.recv() => tracing::info!("SIGINT: stopping"),
    }
    notify(&[sd_notify::NotifyState::Stopping]);
    stop(&tasks, api).await;
    Ok(())
}

/// The store's endpoints would not be served.
fn has_no_store(config: &AgentConfig) -> anyhow::Result<()> {
    let store = config.store();
    if store.exists() {
        bail!(
            "start: {} is of an agent that made the network itself; delete its containers and run `wharf-agent cleanup`, or use \
             another --run-dir",
            store.display()
        );
    }
    Ok(())
}

fn start_controllers(this: &Arc<Delegation>) {
    let tasks = &this.tasks;
    let owned = Arc::clone(this);
    tasks.operations.spawn(async move {
        let drains = |cause| {
            let this = Arc::clone(&owned);
            async move { this.drain(cause).await }
        };
        let Delegation { records, tasks, .. } = &*owned;
        deletions::follow(&records.deletions, records.boot_id(), tasks, drains).await;
    });
    tasks.operations.spawn(watch_service(Arc::clone(this)));
    let reports = Reports::new(&this.config.run_dir);
    tasks.operations.spawn(reports::watch(
        Arc::clone(&this.commands),
        reports,
        tasks.controllers.clone(),
        tasks.stop.clone(),
    ));
    if let Some(interval) = sd_notify::watchdog_enabled() {
        let owned = Arc::clone(this);
        tasks.operations.spawn(async move {
            let feed = || async {
                moves(&owned, interval / 2)?;
                notify(&[sd_notify::NotifyState::Watchdog]);
                Ok::<_, String>(())
            };
            owned.tasks.controllers.run("watchdog", interval / 3, owned.tasks.stop.clone(), feed).await;
        });
    }
}

/// Ignores the service, which a restart of the agent would not help.
fn moves(this: &Delegation, bound: Duration) -> Result<(), String> {
    let beats = |what: &str, pulse: &Pulse| match pulse.age() {
        Some(age) if age <= bound => Ok(()),
        _ => Err(format!("{what} shows no sign of life")),
    };
    beats("the main runtime", &this.pulses.runtime)?;
    beats("the API's listener", &this.pulses.api)
}

/// Drains records when the service is reached.
async fn watch_service(this: Arc<Delegation>) {
    let Tasks { controllers, stop, .. } = &this.tasks;
    let mut failures: u32 = 0;
    loop {
        let run = controllers.begin(CONTROLLER);
        let result = this.look().await;
        failures = if result.is_ok() { 0 } else { failures.saturating_add(1) };
        run.end(Ok::<_, String>(()));
        if result.is_ok()
            && this.records.any_waits()
            && let Err(why) = this.drain(Cause::Tick).await
        {
            tracing::warn!("drain the deletion queue: {why}; it is tried again");
        }
        let wait = match failures {
            0 => LOOK,
            n => Duration::from_millis(retry_delay_ms(n, rand::random())).min(LOOK),
        };
        controllers.plan(CONTROLLER, LOOK, wait);
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(wait) => {}
        }
    }
}

async fn stop(tasks: &Tasks, mut api: tokio::task::JoinHandle<()>) {
    tasks.stop.cancel();
    if tokio::time::timeout(GRACE, &mut api).await.is_err() {
        tracing::warn!("requests still wait for the service after {GRACE:?}; what they are owed is recorded");
    }
    tasks.halt.cancel();
    tasks.operations.close();
    tasks.endpoints.close();
    let ended = async {
        tasks.operations.wait().await;
        tasks.endpoints.wait().await;
        if !api.is_finished() {
            api.await.ok();
        }
    };
    if tokio::time::timeout(GRACE, ended).await.is_err() {
        tracing::warn!("operations were still running after {GRACE:?}; the next start resumes them");
    }
    tracing::info!("stopped; the service keeps the containers' network");
}
