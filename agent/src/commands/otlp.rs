//! OTLP export over gRPC: one span per CNI command.
//!
//! A batch is retried with the same span ids, unless the collector rejects it.

use std::{sync::Arc, time::Duration};

use opentelemetry_proto::tonic::{
    collector::trace::v1::{ExportTraceServiceRequest, trace_service_client::TraceServiceClient},
    common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value::Value},
    resource::v1::Resource,
    trace::v1::{ResourceSpans, ScopeSpans, Span, Status, span::SpanKind, status::StatusCode},
};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::{
    Code,
    transport::{Channel, Endpoint},
};
use wharf_core::state::retry_delay_ms;
use wharf_handover::{command::Command, report::Outcome};

use super::{Ended, Mode};
use crate::metrics::{CommandMetrics, Loss};

/// A span takes about 1 KiB.
const MAX_BATCH: usize = 256;
const GATHER: Duration = Duration::from_millis(200);
/// Per answer and per connection.
const TIMEOUT: Duration = Duration::from_secs(10);
const FAREWELL: Duration = Duration::from_secs(2);

/// Sends commands to a collector.
pub struct Exporter {
    client: TraceServiceClient<Channel>,
    endpoint: String,
    node: String,
    mode: Mode,
    metrics: Arc<CommandMetrics>,
}

impl Exporter {
    /// Connects to `http://HOST:PORT` at the first batch.
    ///
    /// # Errors
    /// Invalid URI.
    pub fn new(
        endpoint: &str,
        node: &str,
        mode: Mode,
        metrics: Arc<CommandMetrics>,
    ) -> Result<Self, tonic::transport::Error> {
        let channel = Endpoint::from_shared(endpoint.to_owned())?.connect_timeout(TIMEOUT).timeout(TIMEOUT);
        let client = TraceServiceClient::new(channel.connect_lazy());
        Ok(Self { client, endpoint: endpoint.to_owned(), node: node.to_owned(), mode, metrics })
    }

    /// Sends the queue until `stop`, then its rest.
    pub async fn run(mut self, mut queue: mpsc::Receiver<Arc<Ended>>, stop: CancellationToken) {
        let mut batch = Vec::new();
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                received = queue.recv_many(&mut batch, MAX_BATCH) => if received == 0 {
                    return;
                },
            }
            tokio::select! {
                () = stop.cancelled() => break,
                () = tokio::time::sleep(GATHER) => {}
            }
            while batch.len() < MAX_BATCH
                && let Ok(more) = queue.try_recv()
            {
                batch.push(more);
            }
            tokio::select! {
                () = stop.cancelled() => break,
                () = self.deliver(&batch) => batch.clear(),
            }
        }
        queue.close();
        while let Ok(ended) = queue.try_recv() {
            batch.push(ended);
        }
        let sent = tokio::time::timeout(FAREWELL, self.send(&batch)).await;
        if !matches!(sent, Ok(Ok(()))) {
            self.metrics.lost(Loss::Export, batch.len() as u64);
        }
    }

    async fn deliver(&mut self, batch: &[Arc<Ended>]) {
        let mut failures = 0_u32;
        while let Err(status) = self.send(batch).await {
            if !is_retryable(status.code()) {
                self.metrics.lost(Loss::Export, batch.len() as u64);
                tracing::warn!(
                    endpoint = self.endpoint,
                    "export {} CNI commands by OTLP: the collector refuses them: {}: {}",
                    batch.len(),
                    status.code(),
                    status.message()
                );
                return;
            }
            failures = failures.saturating_add(1);
            if failures == 1 {
                tracing::warn!(
                    endpoint = self.endpoint,
                    "export CNI commands by OTLP: {}: {}; it is tried again",
                    status.code(),
                    status.message()
                );
            }
            tokio::time::sleep(Duration::from_millis(retry_delay_ms(failures, rand::random()))).await;
        }
    }

    async fn send(&mut self, batch: &[Arc<Ended>]) -> Result<(), tonic::Status> {
        if batch.is_empty() {
            return Ok(());
        }
        let answer = self.client.export(self.request(batch)).await?.into_inner();
        if let Some(partial) = answer.partial_success.filter(|partial| partial.rejected_spans > 0) {
            let rejected = u64::try_from(partial.rejected_spans).unwrap_or(0).min(batch.len() as u64);
            self.metrics.lost(Loss::Export, rejected);
            tracing::warn!(
                endpoint = self.endpoint,
                "export CNI commands by OTLP: the collector refuses {rejected}: {}",
                partial.error_message
            );
        }
        Ok(())
    }

    fn request(&self, batch: &[Arc<Ended>]) -> ExportTraceServiceRequest {
        let version = env!("CARGO_PKG_VERSION");
        let scope = InstrumentationScope {
            name: "wharf-agent".to_owned(),
            version: version.to_owned(),
            ..InstrumentationScope::default()
        };
        let spans = batch.iter().map(|ended| span(ended, self.mode)).collect();
        let attributes = [("service.name", "wharf-agent"), ("service.version", version), ("host.name", &self.node)];
        ExportTraceServiceRequest {
            resource_spans: vec![ResourceSpans {
                resource: Some(Resource {
                    attributes: attributes.iter().filter_map(|(key, value)| attribute(key, value)).collect(),
                    ..Resource::default()
                }),
                scope_spans: vec![ScopeSpans { scope: Some(scope), spans, ..ScopeSpans::default() }],
                ..ResourceSpans::default()
            }],
        }
    }
}

fn is_retryable(code: Code) -> bool {
    matches!(
        code,
        Code::Unavailable
            | Code::ResourceExhausted
            | Code::DeadlineExceeded
            | Code::Aborted
            | Code::Cancelled
            | Code::OutOfRange
            | Code::DataLoss
    )
}

fn span(ended: &Ended, mode: Mode) -> Span {
    let Ended { command, outcome, found_nothing: _, code, message, took, ended_unix_ms } = ended;
    let Command { id, verb, network, container_id, ifname, pod_name, pod_namespace, runtime, chained: _ } = command;
    let end = ended_unix_ms.saturating_mul(1_000_000);
    let start = end.saturating_sub(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    let span_id = id.max(&1).to_be_bytes();
    let attributes = [
        ("cni.command", verb.as_str()),
        ("cni.network", network),
        ("cni.interface", ifname),
        ("container.id", container_id),
        ("container.runtime", runtime),
        ("k8s.pod.name", pod_name),
        ("k8s.namespace.name", pod_namespace),
        ("wharf.mode", mode.of(command)),
        ("wharf.outcome", outcome.as_str()),
        ("error.type", code.as_deref().unwrap_or_default()),
    ];
    let failed = *outcome == Outcome::Failure;
    Span {
        trace_id: [span_id, ended_unix_ms.to_be_bytes()].concat(),
        span_id: span_id.to_vec(),
        name: format!("CNI {}", verb.as_str()),
        kind: SpanKind::Server.into(),
        start_time_unix_nano: start,
        end_time_unix_nano: end,
        attributes: attributes.iter().filter_map(|(key, value)| attribute(key, value)).collect(),
        status: Some(Status {
            message: if failed { message.clone() } else { String::new() },
            code: if failed { StatusCode::Error } else { StatusCode::Unset }.into(),
        }),
        ..Span::default()
    }
}

fn attribute(key: &str, value: &str) -> Option<KeyValue> {
    (!value.is_empty()).then(|| KeyValue {
        key: key.to_owned(),
        value: Some(AnyValue { value: Some(Value::StringValue(value.to_owned())) }),
        ..KeyValue::default()
    })
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeMap,
        sync::atomic::{AtomicUsize, Ordering},
    };

    use opentelemetry_proto::tonic::collector::trace::v1::{
        ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    };
    use tonic::{Request, Response};
    use wharf_handover::command::Verb;

    use super::{super::tests::command, *};

    const PATIENCE: Duration = Duration::from_secs(30);

    #[derive(Default)]
    struct Collector {
        refusals: Vec<Code>,
        asked: AtomicUsize,
        taken: Option<mpsc::UnboundedSender<ExportTraceServiceRequest>>,
    }

    #[tonic::async_trait]
    impl TraceService for Collector {
        async fn export(
            &self,
            request: Request<ExportTraceServiceRequest>,
        ) -> Result<Response<ExportTraceServiceResponse>, tonic::Status> {
            match self.refusals.get(self.asked.fetch_add(1, Ordering::SeqCst)) {
                Some(code) => Err(tonic::Status::new(*code, "not this one")),
                None => {
                    let taken = self.taken.as_ref().expect("a collector that takes");
                    taken.send(request.into_inner()).expect("the test listens");
                    Ok(Response::new(ExportTraceServiceResponse::default()))
                }
            }
        }
    }

    struct Scene {
        sender: mpsc::Sender<Arc<Ended>>,
        metrics: Arc<CommandMetrics>,
        stop: CancellationToken,
        running: tokio::task::JoinHandle<()>,
        taken: mpsc::UnboundedReceiver<ExportTraceServiceRequest>,
    }

    async fn scene(refusals: Vec<Code>) -> Scene {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bound");
        let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
        let (taken, received) = mpsc::unbounded_channel();
        let collector = Collector { refusals, taken: Some(taken), ..Collector::default() };
        let service = tower_of(collector);
        tokio::spawn(async move { axum::serve(listener, service).await });
        let (metrics, stop) = (Arc::new(CommandMetrics::default()), CancellationToken::new());
        let exporter = Exporter::new(&endpoint, "quay", Mode::Own, Arc::clone(&metrics)).expect("a URI");
        let (sender, queue) = mpsc::channel(16);
        let running = tokio::spawn(exporter.run(queue, stop.clone()));
        Scene { sender, metrics, stop, running, taken: received }
    }

    fn tower_of(collector: Collector) -> axum::Router {
        tonic::service::Routes::new(TraceServiceServer::new(collector)).into_axum_router()
    }

    fn ended(id: u64, outcome: Outcome) -> Arc<Ended> {
        let failed = outcome == Outcome::Failure;
        Arc::new(Ended {
            command: command(id, Verb::Add),
            outcome,
            found_nothing: false,
            code: failed.then(|| "exists".to_owned()),
            message: if failed { "it is there".to_owned() } else { String::new() },
            took: Duration::from_millis(4),
            ended_unix_ms: 1_700_000_000_000,
        })
    }

    fn spans(request: ExportTraceServiceRequest) -> Vec<Span> {
        request.resource_spans.into_iter().flat_map(|r| r.scope_spans).flat_map(|s| s.spans).collect()
    }

    #[tokio::test]
    async fn a_command_is_a_span_with_its_names() {
        let mut scene = scene(Vec::new()).await;
        scene.sender.send(ended(7, Outcome::Failure)).await.expect("queued");
        let request = tokio::time::timeout(PATIENCE, scene.taken.recv()).await.expect("in time").expect("a request");
        let resource = request.resource_spans[0].resource.clone().expect("a resource");
        assert!(resource.attributes.iter().any(|a| a.key == "host.name"), "{resource:?}");
        let [span] = &spans(request)[..] else { panic!("one span") };
        let text = |value: &Option<AnyValue>| match value.as_ref().and_then(|v| v.value.as_ref()) {
            Some(Value::StringValue(text)) => text.clone(),
            other => panic!("{other:?}"),
        };
        let attributes: BTreeMap<&str, String> =
            span.attributes.iter().map(|a| (a.key.as_str(), text(&a.value))).collect();
        for (key, value) in [
            ("cni.command", "ADD"),
            ("cni.network", "net"),
            ("container.id", "c1"),
            ("k8s.pod.name", "web-0"),
            ("k8s.namespace.name", "shop"),
            ("wharf.mode", "own"),
            ("wharf.outcome", "failure"),
            ("error.type", "exists"),
        ] {
            assert_eq!(attributes.get(key).map(String::as_str), Some(value), "{key}");
        }
        assert_eq!(span.end_time_unix_nano - span.start_time_unix_nano, 4_000_000);
        let status = span.status.clone().expect("a status");
        assert_eq!((status.code(), status.message.as_str()), (StatusCode::Error, "it is there"));
    }

    #[tokio::test]
    async fn a_batch_that_is_not_taken_now_is_sent_again_and_none_is_lost() {
        let mut scene = scene(vec![Code::Unavailable, Code::ResourceExhausted]).await;
        for id in 1..=3 {
            scene.sender.send(ended(id, Outcome::Success)).await.expect("queued");
        }
        let mut ids = Vec::new();
        while ids.len() < 3 {
            let request =
                tokio::time::timeout(PATIENCE, scene.taken.recv()).await.expect("in time").expect("a request");
            ids.extend(spans(request).into_iter().map(|span| span.span_id));
        }
        assert_eq!(ids, [1_u64, 2, 3].map(|id| id.to_be_bytes().to_vec()));
        assert_eq!(scene.metrics.losses(Loss::Export), 0);
    }

    #[tokio::test]
    async fn a_batch_that_is_refused_is_counted_and_the_next_one_goes() {
        let mut scene = scene(vec![Code::InvalidArgument]).await;
        scene.sender.send(ended(1, Outcome::Success)).await.expect("queued");
        let refused = async {
            while scene.metrics.losses(Loss::Export) == 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, refused).await.expect("counted");
        scene.sender.send(ended(2, Outcome::Success)).await.expect("queued");
        let request = tokio::time::timeout(PATIENCE, scene.taken.recv()).await.expect("in time").expect("a request");
        assert_eq!(spans(request)[0].span_id, 2_u64.to_be_bytes());
        assert_eq!(scene.metrics.losses(Loss::Export), 1);
    }

    #[tokio::test]
    async fn a_stop_sends_what_is_left_and_waits_for_no_dead_collector() {
        let mut living = scene(Vec::new()).await;
        living.sender.send(ended(1, Outcome::Success)).await.expect("queued");
        living.stop.cancel();
        living.running.await.expect("ended");
        assert_eq!(spans(living.taken.recv().await.expect("a request")).len(), 1);

        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bound");
        let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
        let (metrics, stop) = (Arc::new(CommandMetrics::default()), CancellationToken::new());
        let exporter = Exporter::new(&endpoint, "quay", Mode::Own, Arc::clone(&metrics)).expect("a URI");
        let (sender, queue) = mpsc::channel(16);
        sender.send(ended(1, Outcome::Success)).await.expect("queued");
        stop.cancel();
        tokio::time::timeout(PATIENCE, exporter.run(queue, stop)).await.expect("it ends");
        assert_eq!(metrics.losses(Loss::Export), 1);
    }
}
