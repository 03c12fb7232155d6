//! A fake agent: the snapshot rules of the feed, and rows in memory. It does not check rows.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    io,
    pin::Pin,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::{Stream, StreamExt as _};
use hyper_util::rt::TokioIo;
use tokio::{
    io::DuplexStream,
    sync::{mpsc, watch},
    time::{Instant, sleep_until},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use wharf_feed::v1::{
    self,
    agent_message::Body,
    change::Change as Sent,
    cluster_feed_server::{ClusterFeed, ClusterFeedServer},
    producer_message::Body as Received,
    row::Row,
};
use wharf_kube::{
    producer::{Connect, endpoint},
    source::Source,
};

use super::{NODE, objects::Rows};

/// Between two snapshots of a kind.
const PAUSE: Duration = Duration::from_secs(10);
const KINDS: [&str; 4] = ["node", "namespace", "pod", "policy"];

#[derive(Debug, Clone, Default)]
struct Entry {
    row: Option<Row>,
    is_confirmed: bool,
}

/// Survives a restart of the agent.
#[derive(Debug, Default)]
struct World {
    rows: BTreeMap<(String, String), Entry>,
    begun: BTreeMap<String, Instant>,
    /// Kinds whose snapshot is complete in the current stream.
    complete: BTreeSet<String>,
    /// Deletions of a snapshot that is not complete.
    deletes: BTreeSet<(String, String)>,
    openings: Vec<v1::Opening>,
    /// Of the last report of the stream, by name.
    watches: BTreeMap<String, v1::Watch>,
    /// Broken rules.
    violations: Vec<String>,
}

/// What tests control.
#[derive(Debug, Clone, Default)]
struct Control {
    report: v1::Report,
    refused: v1::RefusedRows,
    /// Streams of an earlier number end.
    stream: u64,
    /// Reads nothing.
    is_stalled: bool,
    /// Refuses connections.
    is_away: bool,
    /// Of a version without `Watches`.
    is_older: bool,
}

#[derive(Clone)]
pub struct Agent {
    world: Arc<Mutex<World>>,
    control: watch::Sender<Control>,
    connections: mpsc::Sender<DuplexStream>,
}

impl Agent {
    /// Serves in a task of the runtime until it is dropped.
    pub fn start() -> Self {
        let (connections, incoming) = mpsc::channel::<DuplexStream>(4);
        let (control, _) = watch::channel(Control::default());
        let agent = Self { world: Arc::default(), control, connections };
        let service =
            ClusterFeedServer::new(Service { world: Arc::clone(&agent.world), control: agent.control.clone() });
        let incoming = ReceiverStream::new(incoming).map(Ok::<_, io::Error>);
        tokio::spawn(tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming));
        agent.report(&[("Ready", true), ("RoutesInForce", true)]);
        agent
    }

    /// The service of a listener that the test makes.
    pub fn service(&self) -> ClusterFeedServer<impl ClusterFeed> {
        ClusterFeedServer::new(Service { world: Arc::clone(&self.world), control: self.control.clone() })
    }

    /// Connects through memory.
    pub fn connect(&self) -> Connect {
        let (connections, control) = (self.connections.clone(), self.control.subscribe());
        Arc::new(move || {
            let (connections, control) = (connections.clone(), control.clone());
            Box::pin(async move {
                let connector = tower::service_fn(move |_| {
                    let connections = connections.clone();
                    let is_away = control.borrow().is_away;
                    async move {
                        if is_away {
                            return Err(io::Error::from(io::ErrorKind::ConnectionRefused));
                        }
                        let (near, far) = tokio::io::duplex(64 << 10);
                        connections.send(far).await.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
                        Ok(TokioIo::new(near))
                    }
                });
                endpoint("http://agent").expect("an endpoint").connect_with_connector(connector).await
            })
        })
    }

    pub fn rows(&self) -> Rows {
        let world = self.world.lock().expect("not poisoned");
        let found = world.rows.iter().filter_map(|((kind, key), entry)| {
            entry.row.as_ref().map(|row| (kind.clone(), key.clone(), format!("{row:?}")))
        });
        found.collect()
    }

    /// Every kind of the stream is complete.
    pub fn is_complete(&self) -> bool {
        self.world.lock().expect("not poisoned").complete.len() == KINDS.len()
    }

    pub fn openings(&self) -> Vec<v1::Opening> {
        self.world.lock().expect("not poisoned").openings.clone()
    }

    /// The state of a source's watch, and its error.
    pub fn watch(&self, source: Source) -> Option<(String, String)> {
        let world = self.world.lock().expect("not poisoned");
        world.watches.get(source.object_kind()).map(|watch| (watch.state.clone(), watch.error.clone()))
    }

    pub fn violations(&self) -> Vec<String> {
        self.world.lock().expect("not poisoned").violations.clone()
    }

    pub fn report(&self, conditions: &[(&str, bool)]) {
        let conditions = conditions.iter().map(|(name, holds)| v1::Condition {
            name: (*name).into(),
            holds: *holds,
            message: String::new(),
        });
        let report = v1::Report {
            conditions: conditions.collect(),
            problems: Vec::new(),
            router_addresses: vec!["10.1.0.1".into()],
            health_addresses: vec!["10.1.0.9".into()],
        };
        self.control.send_modify(|control| control.report = report);
    }

    pub fn problem(&self, text: String) {
        self.control.send_modify(|control| control.report.problems = vec![text]);
    }

    pub fn refuse(&self, rows: Vec<v1::RefusedRow>) {
        self.control.send_modify(|control| control.refused = v1::RefusedRows { rows, unlisted: 0 });
    }

    /// Ends the stream, as a restart does. The rows stay.
    pub fn end_stream(&self) {
        self.control.send_modify(|control| control.stream += 1);
    }

    pub fn stall(&self, is_stalled: bool) {
        self.control.send_modify(|control| control.is_stalled = is_stalled);
    }

    /// Another version; ends the stream.
    pub fn older(&self, is_older: bool) {
        self.control.send_modify(|control| {
            control.is_older = is_older;
            control.stream += 1;
        });
    }

    pub fn away(&self, is_away: bool) {
        self.control.send_modify(|control| {
            control.is_away = is_away;
            control.stream += 1;
        });
    }
}

struct Service {
    world: Arc<Mutex<World>>,
    control: watch::Sender<Control>,
}

struct Session {
    world: Arc<Mutex<World>>,
    control: watch::Receiver<Control>,
    messages: Streaming<v1::ProducerMessage>,
    answers: VecDeque<Body>,
    stream: u64,
    sequence: u64,
    is_open: bool,
    /// Kinds with a snapshot in this stream.
    begun: BTreeSet<String>,
    sent: Option<(v1::Report, v1::RefusedRows)>,
}

#[tonic::async_trait]
impl ClusterFeed for Service {
    type FeedStream = Pin<Box<dyn Stream<Item = Result<v1::AgentMessage, Status>> + Send>>;

    async fn feed(
        &self,
        request: Request<Streaming<v1::ProducerMessage>>,
    ) -> Result<Response<Self::FeedStream>, Status> {
        let control = self.control.subscribe();
        let stream = control.borrow().stream;
        let session = Session {
            world: Arc::clone(&self.world),
            control,
            messages: request.into_inner(),
            answers: VecDeque::new(),
            stream,
            sequence: 0,
            is_open: false,
            begun: BTreeSet::new(),
            sent: None,
        };
        let answers = futures::stream::unfold(Some(session), |session| async move {
            let mut session = session?;
            match session.next().await {
                Ok(Some(body)) => Some((Ok(v1::AgentMessage { body: Some(body) }), Some(session))),
                Ok(None) => None,
                Err(status) => Some((Err(status), None)),
            }
        });
        Ok(Response::new(Box::pin(answers)))
    }
}

impl Session {
    async fn next(&mut self) -> Result<Option<Body>, Status> {
        loop {
            if let Some(answer) = self.answers.pop_front() {
                return Ok(Some(answer));
            }
            let control = self.control.borrow_and_update().clone();
            if control.stream != self.stream {
                return Err(Status::aborted("the agent restarts"));
            }
            if self.is_open && self.sent.as_ref() != Some(&(control.report.clone(), control.refused.clone())) {
                self.sent = Some((control.report.clone(), control.refused.clone()));
                self.answers.push_back(Body::Report(control.report.clone()));
                self.answers.push_back(Body::Refused(control.refused.clone()));
                continue;
            }
            tokio::select! {
                changed = self.control.changed() => changed.map_err(|_| Status::unavailable("the agent ends"))?,
                message = self.messages.message(), if !control.is_stalled => match message? {
                    Some(message) => self.receive(message).await?,
                    None => return Ok(None),
                },
            }
        }
    }

    async fn receive(&mut self, message: v1::ProducerMessage) -> Result<(), Status> {
        if message.sequence <= self.sequence {
            return Err(self.violation("the sequence does not grow"));
        }
        self.sequence = message.sequence;
        match message.body {
            Some(Received::Opening(opening)) if !self.is_open => {
                if opening.node != NODE || opening.kinds != KINDS {
                    self.answers.push_back(Body::Rejected(v1::Rejected { reason: format!("{opening:?}") }));
                    return Ok(());
                }
                self.is_open = true;
                let mut world = self.world.lock().expect("not poisoned");
                world.openings.push(opening);
                world.complete.clear();
                world.deletes.clear();
                world.watches.clear();
                let accepts_watches = !self.control.borrow().is_older;
                self.answers.push_back(Body::Opened(v1::Opened { version: "fake".into(), accepts_watches }));
                Ok(())
            }
            Some(Received::Changes(changes)) if self.is_open => {
                for change in changes.changes {
                    let change = change.change.ok_or_else(|| self.violation("an empty change"))?;
                    if let Sent::Begin(begin) = &change {
                        self.pause(&begin.kind).await;
                    }
                    self.apply(change)?;
                }
                let sequence = self.sequence;
                self.answers.push_back(Body::Processed(v1::Processed { sequence, refused: Vec::new(), unlisted: 0 }));
                self.answers.push_back(Body::InForce(v1::InForce { sequence }));
                Ok(())
            }
            Some(Received::Watches(v1::Watches { watches })) if self.is_open && !self.control.borrow().is_older => {
                let watches = watches.into_iter().map(|watch| (watch.name.clone(), watch)).collect();
                self.world.lock().expect("not poisoned").watches = watches;
                Ok(())
            }
            other => Err(self.violation(&format!("{other:?} is not expected"))),
        }
    }

    async fn pause(&self, kind: &str) {
        let last = self.world.lock().expect("not poisoned").begun.get(kind).copied();
        if let Some(last) = last {
            sleep_until(last + PAUSE).await;
        }
    }

    fn apply(&mut self, change: Sent) -> Result<(), Status> {
        let mut world = self.world.lock().expect("not poisoned");
        let world = &mut *world;
        let stray = |what: &str| format!("{what} before the Begin of this stream");
        match change {
            Sent::Begin(v1::Begin { kind }) => {
                world.begun.insert(kind.clone(), Instant::now());
                world.complete.remove(&kind);
                for (_, entry) in world.rows.iter_mut().filter(|((of, _), _)| *of == kind) {
                    entry.is_confirmed = false;
                }
                self.begun.insert(kind);
            }
            Sent::Put(v1::Row { row }) => {
                let row = row.ok_or_else(|| Status::invalid_argument("an empty row"))?;
                let id = identify(&row);
                if !self.begun.contains(&id.0) {
                    world.violations.push(stray("a row"));
                }
                world.deletes.remove(&id);
                world.rows.insert(id, Entry { row: Some(row), is_confirmed: true });
            }
            Sent::Delete(v1::Delete { kind, key }) => {
                if !self.begun.contains(&kind) {
                    world.violations.push(stray("a deletion"));
                }
                let id = (kind, key);
                if world.complete.contains(&id.0) {
                    world.rows.remove(&id);
                } else {
                    world.deletes.insert(id);
                }
            }
            Sent::Complete(v1::Complete { kind }) => {
                world.complete.insert(kind.clone());
                let deleted: Vec<_> = world.deletes.iter().filter(|(of, _)| *of == kind).cloned().collect();
                for id in deleted {
                    world.deletes.remove(&id);
                    world.rows.remove(&id);
                }
                if world.complete.len() == KINDS.len() {
                    world.rows.retain(|_, entry| entry.is_confirmed);
                }
            }
        }
        Ok(())
    }

    fn violation(&self, what: &str) -> Status {
        self.world.lock().expect("not poisoned").violations.push(what.to_owned());
        Status::invalid_argument(what.to_owned())
    }
}

fn identify(row: &Row) -> (String, String) {
    let (kind, key) = match row {
        Row::Node(node) => ("node", &node.name),
        Row::Pod(pod) => ("pod", &pod.uid),
        Row::Namespace(namespace) => ("namespace", &namespace.name),
        Row::Policy(policy) => ("policy", &policy.key),
    };
    (kind.to_owned(), key.clone())
}
