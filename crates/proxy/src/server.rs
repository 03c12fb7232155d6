//! gRPC server: ADS, access logs, metrics.

use std::{convert::Infallible, future::Future, pin::Pin, sync::Arc, time::Duration};

use envoy_types::pb::envoy::{
    config::core::v3::{Node, node::UserAgentVersionType},
    service::{
        accesslog::v3::{
            StreamAccessLogsMessage, StreamAccessLogsResponse,
            access_log_service_server::{AccessLogService, AccessLogServiceServer},
        },
        discovery::v3::{
            DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
            aggregated_discovery_service_server::{AggregatedDiscoveryService, AggregatedDiscoveryServiceServer},
        },
        metrics::v3::{
            StreamMetricsMessage, StreamMetricsResponse,
            metrics_service_server::{MetricsService, MetricsServiceServer},
        },
    },
};
use futures::Stream;
use tokio::{sync::watch, time::Instant};
use tonic::{Request, Response, Status, Streaming, transport::server::UdsConnectInfo};

use crate::{
    bootstrap::NODE_ID,
    envoy::{Connection, Socket, directory},
    forwarded,
    ledger::{LISTENER_TYPE, RUNTIME_TYPE},
    process::{Process, ProcessId},
    proxy::{Proxy, Shared, State},
    records::{self, Record, Verdict},
    shares, xds,
};

/// Bytes: a name and version per listener.
const MAX_REQUEST: usize = 1 << 20;
/// Bytes: 16 KiB of buffer, and an entry with 60 KiB of headers, some twice.
const MAX_LOGS: usize = 1 << 18;
/// Bytes: some hundred counters of 100 bytes.
const MAX_COUNTERS: usize = 1 << 20;
/// Per connection. Envoy's main thread has ADS and metrics, each worker access logs.
const MAX_STREAMS: u32 = 16;
/// One, and streams of ending Envoys; as many without a first request.
const MAX_ADS_STREAMS: usize = 8;
/// Maximum wait for the first request of a stream, and of an access log's Envoy.
const FIRST: Duration = Duration::from_secs(5);

const PING: Duration = Duration::from_secs(5);

/// Time for open streams to end: a peer may not read.
const GRACE: Duration = Duration::from_secs(1);

/// Failure of the server.
#[derive(Debug, thiserror::Error)]
#[error("serve xDS to Envoy: {0}")]
pub struct ServeError(#[from] tonic::transport::Error);

impl Proxy {
    /// Serves only an Envoy of [`Envoy::supervise`](crate::Envoy::supervise). Precedes [`Proxy::serve`].
    pub fn serve_only_supervised(&self) {
        self.shared.lock().supervised.only_supervised = true;
    }

    /// Serves Envoy until at most 1 s after `shutdown` resolves, then cancels all waits.
    ///
    /// # Errors
    /// The socket failed.
    pub async fn serve(&self, socket: Socket, shutdown: impl Future<Output = ()> + Send) -> Result<(), ServeError> {
        let _closes = Closes(&self.shared);
        let (closing, closed) = watch::channel(false);
        let service = Service { shared: Arc::clone(&self.shared), closing: closed.clone() };
        let ads = AggregatedDiscoveryServiceServer::new(service.clone()).max_decoding_message_size(MAX_REQUEST);
        let logs = AccessLogServiceServer::new(service.clone()).max_decoding_message_size(MAX_LOGS);
        let counters = MetricsServiceServer::new(service).max_decoding_message_size(MAX_COUNTERS);
        let mut closed_long_ago = closed.clone();
        let serving = tonic::transport::Server::builder()
            .max_concurrent_streams(MAX_STREAMS)
            .http2_keepalive_interval(Some(PING))
            .http2_keepalive_timeout(Some(PING))
            .add_service(ads)
            .add_service(logs)
            .add_service(counters)
            .serve_with_incoming_shutdown(incoming(socket), async move {
                shutdown.await;
                // The server waits for the streams.
                closing.send_replace(true);
            });
        tokio::select! {
            result = serving => Ok(result?),
            () = async {
                drop(closed_long_ago.wait_for(|closing| *closing).await);
                tokio::time::sleep(GRACE).await;
            } => Ok(()),
            // Never ends while `self` exists.
            () = watch_process(&self.shared) => Ok(()),
        }
    }
}

fn incoming(socket: Socket) -> impl Stream<Item = Result<Connection, Infallible>> {
    futures::stream::unfold(socket, |mut socket| async { Some((Ok(socket.accept().await), socket)) })
}

struct Closes<'a>(&'a Shared);

impl Drop for Closes<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

async fn watch_process(shared: &Shared) {
    let mut processes = shared.process.subscribe();
    loop {
        let process = processes.borrow_and_update().clone();
        let ended = async {
            match &process {
                Some(process) => process.ended().await.map(|()| process.id),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = processes.changed() => {}
            result = ended => {
                match result {
                    Ok(id) => shared.on_process_end(id),
                    Err(error) => tracing::warn!(%error, "cannot watch Envoy's process"),
                }
                if processes.changed().await.is_err() {
                    return;
                }
            }
        }
    }
}

#[derive(Debug, Clone)]
struct Service {
    shared: Arc<Shared>,
    closing: watch::Receiver<bool>,
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl AggregatedDiscoveryService for Service {
    type StreamAggregatedResourcesStream = Answers<DiscoveryResponse>;
    type DeltaAggregatedResourcesStream = Answers<DeltaDiscoveryResponse>;

    async fn stream_aggregated_resources(
        &self,
        request: Request<Streaming<DiscoveryRequest>>,
    ) -> Result<Response<Self::StreamAggregatedResourcesStream>, Status> {
        let read = |mut request: DiscoveryRequest| (request.node.take(), xds::sotw_request(request));
        self.answers(request, xds::Variant::Sotw, read, xds::sotw_response)
    }

    async fn delta_aggregated_resources(
        &self,
        request: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaAggregatedResourcesStream>, Status> {
        let read = |mut request: DeltaDiscoveryRequest| (request.node.take(), xds::delta_request(request));
        self.answers(request, xds::Variant::Delta, read, xds::delta_response)
    }
}

#[tonic::async_trait]
impl AccessLogService for Service {
    async fn stream_access_logs(
        &self,
        request: Request<Streaming<StreamAccessLogsMessage>>,
    ) -> Result<Response<StreamAccessLogsResponse>, Status> {
        let take = |message| {
            let counted = self.shared.lock().forwarded.is_counted();
            for record in records::records(message) {
                let is_counted = counted && record.verdict == Verdict::Forwarded;
                self.shared.record(Record { is_counted, ..record });
            }
        };
        self.read(request, take).await?;
        Ok(Response::new(StreamAccessLogsResponse {}))
    }
}

#[tonic::async_trait]
impl MetricsService for Service {
    async fn stream_metrics(
        &self,
        request: Request<Streaming<StreamMetricsMessage>>,
    ) -> Result<Response<StreamMetricsResponse>, Status> {
        let take = |message| {
            let (forwarded, refused) = (forwarded::counter(&message), shares::counters(&message));
            let mut state = self.shared.lock();
            if let Some(value) = forwarded {
                state.forwarded.on_counter(value);
            }
            state.refusals.on_counters(refused, std::time::Instant::now());
        };
        self.read(request, take).await?;
        Ok(Response::new(StreamMetricsResponse {}))
    }
}

impl Service {
    async fn read<M>(&self, request: Request<Streaming<M>>, take: impl Fn(M)) -> Result<(), Status> {
        let id = peer(&request)?.id;
        let mut served = self.shared.process.subscribe();
        let is_other = |served: &Option<Arc<Process>>| served.as_ref().is_none_or(|served| served.id != id);
        // After an agent restart, messages can precede Envoy's first request.
        drop(tokio::time::timeout(FIRST, served.wait_for(Option::is_some)).await);
        let (mut messages, mut closing) = (request.into_inner(), self.closing.clone());
        loop {
            tokio::select! {
                biased;
                _ = closing.wait_for(|closing| *closing) => return Ok(()),
                _ = served.wait_for(is_other) => {
                    return Err(Status::permission_denied(format!("process {} is not served", id.pid)));
                }
                message = messages.message() => match message? {
                    Some(message) => take(message),
                    None => return Ok(()),
                },
            }
        }
    }

    fn answers<Q: Send + 'static, A: Send + 'static>(
        &self,
        request: Request<Streaming<Q>>,
        variant: xds::Variant,
        read: fn(Q) -> (Option<Node>, xds::Request),
        write: fn(xds::Response) -> A,
    ) -> Result<Response<Answers<A>>, Status> {
        let process = peer(&request)?;
        let (open, number) = Open::begin(&self.shared, process.id)?;
        let session = Session {
            open,
            stream: xds::Stream::new(variant, number),
            requests: request.into_inner(),
            noted: false,
            id: process.id,
            process: Some(process),
            first_until: Instant::now() + FIRST,
            changed: self.shared.changed.subscribe(),
            closing: self.closing.clone(),
            read,
        };
        let answers = futures::stream::unfold(Some(session), move |session| async move {
            let mut session = session?;
            match session.next().await {
                Ok(Some(response)) => Some((Ok(write(response)), Some(session))),
                Ok(None) => None,
                Err(status) => Some((Err(status), None)),
            }
        });
        Ok(Response::new(Box::pin(answers)))
    }
}

fn peer<Q>(request: &Request<Q>) -> Result<Process, Status> {
    let pid = request.extensions().get::<UdsConnectInfo>().and_then(|info| info.peer_cred?.pid());
    let pid = pid.ok_or_else(|| Status::permission_denied("the socket does not tell whose it is"))?;
    Process::open(pid).map_err(|error| Status::unavailable(format!("look at process {pid}: {error}")))
}

struct Open {
    shared: Arc<Shared>,
    is_served: bool,
}

impl Open {
    fn begin(shared: &Arc<Shared>, id: ProcessId) -> Result<(Self, u64), Status> {
        let mut state = shared.lock();
        may_be_served(&state, id)?;
        take_place(&mut state.new_streams)?;
        state.next_stream = state.next_stream.saturating_add(1);
        Ok((Self { shared: Arc::clone(shared), is_served: false }, state.next_stream))
    }

    fn serve(&mut self) -> Result<(), Status> {
        let mut state = self.shared.lock();
        take_place(&mut state.streams)?;
        state.new_streams = state.new_streams.saturating_sub(1);
        self.is_served = true;
        Ok(())
    }
}

fn take_place(streams: &mut usize) -> Result<(), Status> {
    if *streams >= MAX_ADS_STREAMS {
        return Err(Status::resource_exhausted(format!("{MAX_ADS_STREAMS} streams are open")));
    }
    *streams += 1;
    Ok(())
}

impl Drop for Open {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        let streams = if self.is_served { &mut state.streams } else { &mut state.new_streams };
        *streams = streams.saturating_sub(1);
    }
}

struct Session<Q> {
    open: Open,
    stream: xds::Stream,
    requests: Streaming<Q>,
    id: ProcessId,
    /// Recorded for the next agent.
    noted: bool,
    /// `None` once the first request identified the node.
    process: Option<Process>,
    first_until: Instant,
    changed: watch::Receiver<()>,
    closing: watch::Receiver<bool>,
    read: fn(Q) -> (Option<Node>, xds::Request),
}

impl<Q> Session<Q> {
    async fn next(&mut self) -> Result<Option<xds::Response>, Status> {
        loop {
            // Before reading the tables: a later change wakes the stream.
            self.changed.mark_unchanged();
            if let Some(response) = self.due()? {
                return Ok(Some(response));
            }
            let request = tokio::select! {
                _ = self.closing.wait_for(|closing| *closing) => return Ok(None),
                _ = self.changed.changed() => continue,
                () = tokio::time::sleep_until(self.first_until), if self.process.is_some() => {
                    return Err(Status::deadline_exceeded(format!("no request within {FIRST:?}")));
                }
                request = self.requests.message() => request?,
            };
            match request {
                Some(request) => self.on_request(request)?,
                None => return Ok(None),
            }
        }
    }

    fn due(&mut self) -> Result<Option<xds::Response>, Status> {
        if self.process.is_some() {
            return Ok(None);
        }
        let (response, told) = {
            let mut state = self.open.shared.lock();
            must_be_served(&state, self.id)?;
            let (response, ended) = self.stream.next_response(&mut state.ledgers);
            state.tell(ended);
            (response, state.told.clone())
        };
        let tells = |response: &xds::Response| response.type_url == LISTENER_TYPE && !response.resources.is_empty();
        if response.as_ref().is_some_and(tells) && !self.noted {
            self.noted = true;
            // Before sending: the next agent must know that this process can have listeners.
            if let Some(Err(error)) = told.map(|path| directory::note(&path, self.id)) {
                let pid = self.id.pid;
                tracing::warn!(%error, pid, "after a restart of the agent, addresses are given out again without a look at this Envoy");
            }
        }
        Ok(response)
    }

    fn on_request(&mut self, request: Q) -> Result<(), Status> {
        let (node, request) = (self.read)(request);
        if let Some(process) = self.process.take() {
            let node = node.unwrap_or_default();
            if node.id != NODE_ID {
                return Err(Status::permission_denied(format!("this server serves the node {NODE_ID:?} alone")));
            }
            may_be_served(&self.open.shared.lock(), self.id)?;
            self.open.serve()?;
            self.open.shared.on_process(Arc::new(process));
            self.open.shared.lock().version = version(&node);
        }
        if let Some(reason) = &request.error {
            let reason: String = reason.chars().take(1024).collect();
            tracing::warn!(type_url = %request.type_url, reason, "Envoy refused a response");
        }
        let mut state = self.open.shared.lock();
        must_be_served(&state, self.id)?;
        if request.type_url == RUNTIME_TYPE {
            state.forwarded.begin();
        }
        let ended = self
            .stream
            .on_request(request, &mut state.ledgers)
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        state.tell(ended);
        drop(state);
        self.open.shared.answered.send_replace(());
        Ok(())
    }
}

fn may_be_served(state: &State, ProcessId { pid, started }: ProcessId) -> Result<(), Status> {
    // Another Envoy would hold listener ports.
    match state.supervised.running {
        Some(expected) if expected != (ProcessId { pid, started }) => {
            let expected = expected.pid;
            tracing::warn!(pid, expected, "an Envoy that this agent did not start wants to be served; end it");
            return Err(Status::permission_denied(format!("process {expected} is served, not {pid}")));
        }
        None if state.supervised.only_supervised => {
            return Err(Status::unavailable("no Envoy runs yet that this agent started or took over"));
        }
        _ => {}
    }
    // Two unsupervised Envoys must not replace each other forever.
    match state.process {
        Some(served) if (started, pid) < (served.started, served.pid) => {
            Err(Status::permission_denied(format!("process {} is served, which began after {pid}", served.pid)))
        }
        _ => Ok(()),
    }
}

/// Answers of a replaced Envoy do not count.
fn must_be_served(state: &State, id: ProcessId) -> Result<(), Status> {
    if state.process == Some(id) {
        return Ok(());
    }
    Err(Status::aborted(format!("process {} is no longer served", id.pid)))
}

fn version(node: &Node) -> Option<String> {
    match node.user_agent_version_type.as_ref()? {
        UserAgentVersionType::UserAgentVersion(text) => Some(text.chars().take(64).collect()),
        UserAgentVersionType::UserAgentBuildVersion(build) => {
            let version = build.version.as_ref()?;
            Some(format!("{}.{}.{}", version.major_number, version.minor_number, version.patch))
        }
    }
}
