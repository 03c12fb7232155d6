//! Starts the tasks and ends them together.

use std::{io::IsTerminal as _, sync::Arc, time::Duration};

use anyhow::Context as _;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{mpsc, watch},
    task::JoinSet,
    time::sleep,
};
use tracing_subscriber::EnvFilter;

use crate::{
    api::{
        Api, endpoints,
        servers::{Servers, Settings},
    },
    args::Args,
    metrics::{self, Metrics},
    node::Reconciler,
    objects::Any,
    producer::{self, AgentState, Names, Producer},
    rows::Reader,
    source::Source,
    watch::{States, Watcher, backoff::Delays},
};

/// Updates between watchers and producer, which does not wait. A full queue briefly stops lists and watches.
const QUEUE: usize = 64;

/// Logs to standard error; `RUST_LOG` is the filter.
pub fn log() {
    // The watch layer logs failed requests.
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info,kube_client=off"));
    let ansi = std::io::stderr().is_terminal();
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(ansi).init();
}

/// Runs until SIGTERM or SIGINT.
///
/// # Errors
/// A setting cannot be used, or a task ends.
pub fn main(args: Args) -> anyhow::Result<()> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(2).enable_all().build().context("start the runtime")?;
    let result = runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).context("handle SIGTERM")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("handle SIGINT")?;
        tokio::select! {
            _ = terminate.recv() => Ok(()),
            _ = interrupt.recv() => Ok(()),
            result = run(args) => result,
        }
    });
    // A file system call does not delay the end.
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

async fn run(args: Args) -> anyhow::Result<()> {
    let Args { node_name, feed, kubeconfig, api_server, state_dir, metrics_listen } = args;
    let metrics = Arc::new(Metrics::default());
    let mut tasks: JoinSet<anyhow::Result<()>> = JoinSet::new();
    if let Some(address) = metrics_listen {
        tasks.spawn(metrics::serve(Arc::clone(&metrics), address));
    }
    let servers = Arc::new(Servers::new(Settings { kubeconfig, explicit: api_server, state_dir }));
    let api = Arc::new(Api::new(Box::new(Arc::clone(&servers))));
    let connect = producer::unix(&feed).context("the feed's socket")?;
    let cluster = cluster_id(&api).await;
    let names = Names { cluster, node: node_name };
    start(&mut tasks, &api, names, connect, &metrics);
    tasks.spawn(async move {
        endpoints::follow(&api, &servers).await;
        Ok(())
    });
    match tasks.join_next().await {
        Some(ended) => ended.context("a task failed")?.and_then(|()| anyhow::bail!("a task ended")),
        None => Ok(()),
    }
}

/// Starts the tasks of feed and node.
pub fn start(
    tasks: &mut JoinSet<anyhow::Result<()>>,
    api: &Arc<Api>,
    names: Names,
    connect: producer::Connect,
    metrics: &Arc<Metrics>,
) {
    let (updates, queue) = mpsc::channel(QUEUE);
    let (state, agent) = watch::channel(AgentState::default());
    let (own, changes) = watch::channel(0);
    let (states, watches) = watch::channel(States::default());
    for source in Source::ALL {
        let reader = Reader { source, own: names.node.clone() };
        let (updates, states) = (updates.clone(), states.clone());
        let mut watcher = Watcher::new(Arc::clone(api), reader, updates, states, Arc::clone(metrics));
        if source == Source::Node {
            watcher = watcher.report_own(own.clone());
        }
        tasks.spawn(async move {
            watcher.run().await;
            Ok(())
        });
    }
    let reconciler = Reconciler::new(Arc::clone(api), names.node.clone(), agent, changes, Arc::clone(metrics));
    tasks.spawn(async move {
        reconciler.run().await;
        Ok(())
    });
    let producer = Producer::new(names, connect, queue, watches, state, Arc::clone(metrics));
    tasks.spawn(async move {
        producer.run().await;
        Ok(())
    });
}

/// Uid of the namespace `kube-system`.
async fn cluster_id(api: &Api) -> String {
    let mut delays = Delays::default();
    loop {
        let delay = match api.object::<Any>("/api/v1/namespaces/kube-system").await {
            Ok(Any { metadata }) if !metadata.uid.is_empty() => return metadata.uid,
            Ok(_) => delays.next(None),
            Err(failure) => {
                let delay = delays.next(failure.retry_after());
                tracing::warn!(?delay, "the id of the cluster cannot be read: {failure}");
                delay
            }
        };
        sleep(delay).await;
    }
}
