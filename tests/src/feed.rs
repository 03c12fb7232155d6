//! A producer of the cluster feed.

use std::{collections::BTreeMap, path::Path, time::Duration};

use anyhow::{Context, Result, bail};
use prost::Message as _;
use tokio::{runtime::Runtime, sync::mpsc, time::timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Streaming, transport::Endpoint};
use wharf_feed::{
    MAX_CHANGES, MAX_MESSAGE,
    v1::{
        self, agent_message::Body, change::Change as Kind, cluster_feed_client::ClusterFeedClient,
        producer_message::Body as Sent, row::Row,
    },
};

use crate::wait::PATIENCE;

/// Messages that wait to be sent.
const QUEUE: usize = 16;

/// A stream to an agent; ended when dropped.
#[derive(Debug)]
pub struct Producer {
    messages: mpsc::Sender<v1::ProducerMessage>,
    answers: Streaming<v1::AgentMessage>,
    sequence: u64,
    in_force: u64,
    report: Option<v1::Report>,
    /// For each answer.
    patience: Duration,
    /// Dropped last.
    runtime: Runtime,
}

impl Producer {
    /// A stream without an opening.
    ///
    /// # Errors
    /// When no agent listens.
    pub fn connect(socket: &Path) -> Result<Self> {
        Self::connect_with(socket, None)
    }

    /// As [`Self::connect`]. The agent sends at most `window` bytes of answers that the caller does not take.
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub fn connect_with(socket: &Path, window: Option<u32>) -> Result<Self> {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(1).enable_all().build().context("start a tokio runtime")?;
        let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display())).context("the feed's socket")?;
        let endpoint = endpoint.initial_stream_window_size(window);
        let (messages, queue) = mpsc::channel(QUEUE);
        let answers = runtime.block_on(async {
            let channel = endpoint.connect().await.context("connect to the feed's socket")?;
            let mut client = ClusterFeedClient::new(channel);
            anyhow::Ok(client.feed(ReceiverStream::new(queue)).await.context("open a stream")?.into_inner())
        })?;
        Ok(Self { messages, answers, sequence: 0, in_force: 0, report: None, patience: PATIENCE, runtime })
    }

    /// With another time limit for each answer.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// A stream whose opening the agent answered, and the reason of a rejection.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn open(socket: &Path, opening: v1::Opening) -> Result<(Self, Option<String>)> {
        let mut producer = Self::connect(socket)?;
        producer.say(Sent::Opening(opening))?;
        let rejected = match producer.answer()? {
            Some(Body::Opened(_)) => None,
            Some(Body::Rejected(v1::Rejected { reason })) => Some(reason),
            other => bail!("the opening is answered with {other:?}"),
        };
        Ok((producer, rejected))
    }

    /// As [`Self::open`], for an opening that is accepted.
    ///
    /// # Errors
    /// When it is rejected.
    pub fn opened(socket: &Path, opening: v1::Opening) -> Result<Self> {
        match Self::open(socket, opening)? {
            (producer, None) => Ok(producer),
            (_, Some(reason)) => bail!("the opening is rejected: {reason}"),
        }
    }

    /// Sends a message and waits until it is processed.
    ///
    /// # Errors
    /// When the stream ends.
    pub fn send(&mut self, changes: Vec<v1::Change>) -> Result<v1::Processed> {
        self.say(Sent::Changes(v1::Changes { changes }))?;
        loop {
            match self.answer()?.context("the stream has ended")? {
                Body::Processed(processed) if processed.sequence == self.sequence => return Ok(processed),
                Body::Processed(other) => bail!("message {} is processed, not {}", other.sequence, self.sequence),
                _ => {}
            }
        }
    }

    /// Waits until the last message is in force.
    ///
    /// # Errors
    /// When the stream ends.
    pub fn settle(&mut self) -> Result<()> {
        while self.in_force < self.sequence {
            self.answer()?.context("the stream has ended")?;
        }
        Ok(())
    }

    /// The agent's last report.
    #[must_use]
    pub fn report(&self) -> Option<&v1::Report> {
        self.report.as_ref()
    }

    /// Sends a message without a wait for the answer.
    ///
    /// # Errors
    /// When the stream has ended.
    pub fn say(&mut self, body: Sent) -> Result<()> {
        self.sequence += 1;
        let message = v1::ProducerMessage { sequence: self.sequence, body: Some(body) };
        self.runtime.block_on(self.messages.send(message)).context("the stream has ended")
    }

    /// As [`Self::say`]; false if the agent does not take the message within a time limit.
    ///
    /// # Errors
    /// As [`Self::say`].
    pub fn offer(&mut self, body: Sent, patience: Duration) -> Result<bool> {
        let message = v1::ProducerMessage { sequence: self.sequence + 1, body: Some(body) };
        let Self { runtime, messages, .. } = self;
        match runtime.block_on(async { timeout(patience, messages.send(message)).await }) {
            Ok(sent) => sent.context("the stream has ended")?,
            Err(_) => return Ok(false),
        }
        self.sequence += 1;
        Ok(true)
    }

    /// The next answer; `None` at the end of the stream.
    ///
    /// # Errors
    /// With the gRPC status that ended the stream, or without an answer in time.
    pub fn answer(&mut self) -> Result<Option<Body>> {
        let Self { runtime, answers, patience, .. } = self;
        let answer = runtime.block_on(async { timeout(*patience, answers.message()).await });
        let body = answer.context("the agent does not answer")??.and_then(|message| message.body);
        match &body {
            Some(Body::InForce(v1::InForce { sequence })) => self.in_force = *sequence,
            Some(Body::Report(report)) => self.report = Some(report.clone()),
            _ => {}
        }
        Ok(body)
    }
}

/// Changes in as few messages as the feed's limits permit.
#[must_use]
pub fn messages(changes: Vec<v1::Change>) -> Vec<Vec<v1::Change>> {
    // Tag and length of a change; a row has at most 1.5 MiB.
    const FRAME: usize = 5;
    // The rest of a message.
    const SPARE: usize = 64;
    let (mut all, mut bytes) = (vec![Vec::new()], 0);
    for change in changes {
        let size = FRAME + change.encoded_len();
        if bytes + size > MAX_MESSAGE - SPARE || all.last().is_some_and(|message| message.len() >= MAX_CHANGES) {
            all.push(Vec::new());
            bytes = 0;
        }
        bytes += size;
        if let Some(message) = all.last_mut() {
            message.push(change);
        }
    }
    all
}

/// An opening with these kinds.
#[must_use]
pub fn opening(producer: &str, cluster: &str, node: &str, kinds: &[&str]) -> v1::Opening {
    v1::Opening {
        producer: producer.to_owned(),
        cluster: cluster.to_owned(),
        node: node.to_owned(),
        kinds: texts(kinds),
    }
}

/// Begins a snapshot.
#[must_use]
pub fn begin(kind: &str) -> v1::Change {
    change(Kind::Begin(v1::Begin { kind: kind.to_owned() }))
}

/// Completes a snapshot.
#[must_use]
pub fn complete(kind: &str) -> v1::Change {
    change(Kind::Complete(v1::Complete { kind: kind.to_owned() }))
}

/// Removes a row.
#[must_use]
pub fn delete(kind: &str, key: &str) -> v1::Change {
    change(Kind::Delete(v1::Delete { kind: kind.to_owned(), key: key.to_owned() }))
}

#[must_use]
pub fn node(name: &str, addresses: &[&str], pod_cidrs: &[&str]) -> v1::Change {
    node_with_routers(name, addresses, pod_cidrs, &[])
}

#[must_use]
pub fn node_with_routers(name: &str, addresses: &[&str], pod_cidrs: &[&str], routers: &[&str]) -> v1::Change {
    put(Row::Node(v1::Node {
        name: name.to_owned(),
        uid: format!("uid-of-{name}"),
        addresses: texts(addresses),
        pod_cidrs: texts(pod_cidrs),
        health_addresses: Vec::new(),
        router_addresses: texts(routers),
    }))
}

/// A pod of namespace `shop`; its uid is its name.
#[must_use]
pub fn pod(name: &str, node: &str, addresses: &[&str], labels: &[(&str, &str)]) -> v1::Change {
    pod_with(name, ("shop", name), node, addresses, labels, &[])
}

/// A pod by its namespace and name, with named TCP ports.
#[must_use]
pub fn pod_with(
    uid: &str,
    (namespace, name): (&str, &str),
    node: &str,
    addresses: &[&str],
    labels: &[(&str, &str)],
    ports: &[(&str, u16)],
) -> v1::Change {
    let port = |(name, port): &(&str, u16)| v1::NamedPort {
        name: (*name).to_owned(),
        protocol: v1::named_port::Protocol::Tcp.into(),
        port: (*port).into(),
    };
    put(Row::Pod(v1::Pod {
        uid: uid.to_owned(),
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        node: node.to_owned(),
        addresses: texts(addresses),
        labels: pairs(labels),
        named_ports: ports.iter().map(port).collect(),
    }))
}

#[must_use]
pub fn namespace(name: &str, labels: &[(&str, &str)]) -> v1::Change {
    put(Row::Namespace(v1::Namespace { name: name.to_owned(), labels: pairs(labels) }))
}

#[must_use]
pub fn policy(key: &str, text: &str) -> v1::Change {
    put(Row::Policy(v1::Policy { key: key.to_owned(), text: text.to_owned() }))
}

fn put(row: Row) -> v1::Change {
    change(Kind::Put(v1::Row { row: Some(row) }))
}

fn change(change: Kind) -> v1::Change {
    v1::Change { change: Some(change) }
}

fn texts(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

fn pairs(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}
