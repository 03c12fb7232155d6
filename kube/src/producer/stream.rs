//! A stream to the agent.

use std::{
    collections::{BTreeSet, VecDeque},
    time::Duration,
};

use tokio::{
    pin,
    sync::mpsc,
    time::{Instant, sleep_until, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};
use wharf_feed::v1::{
    self, agent_message::Body, cluster_feed_client::ClusterFeedClient, producer_message::Body as Sent,
};

use super::{AgentState, Connect, NAME, Names, Producer, Refused};
use crate::source::Kind;

/// For connection and opening; the agent ends an earlier stream within 1 s.
const OPENING: Duration = Duration::from_secs(15);
const END: Duration = Duration::from_secs(1);
/// Messages that the transport has not taken. The table coalesces waiting changes, so one is enough.
const QUEUE: usize = 1;
/// Messages that the agent has not processed.
const UNPROCESSED: usize = 4;
/// Messages with a measured latency.
const MEASURED: usize = 1_024;
/// First and longest delay before refused rows are sent again; it doubles while rows are refused.
const AGAIN: [Duration; 2] = [Duration::from_secs(30), Duration::from_secs(600)];
/// Least time between reports of the watches.
const WATCHES: Duration = Duration::from_secs(1);
/// Refused rows to send again; the agent lists as many.
const MAX_AGAIN: usize = 1_024;

pub(super) enum Ended {
    /// All update senders are dropped.
    Closed,
    Stream(String),
    Rejected(String),
}

impl From<Status> for Ended {
    fn from(status: Status) -> Self {
        Self::Stream(format!("{:?}: {}", status.code(), status.message()))
    }
}

/// The sender is separate, because waiting for room borrows it.
type Opened = (mpsc::Sender<v1::ProducerMessage>, Stream);

struct Stream {
    answers: Streaming<v1::AgentMessage>,
    /// Of the last message.
    sequence: u64,
    unprocessed: usize,
    /// Messages not yet in force, with the time of their oldest change.
    measured: VecDeque<(u64, Instant)>,
    /// Message that completed the snapshot.
    complete: Option<u64>,
    in_force: u64,
    again: Again,
    /// When watch states may be sent; `None` if the agent does not accept them.
    watches_due: Option<Instant>,
}

/// Refused rows without an earlier version in force. The agent drops them, and needs them again when it has room.
struct Again {
    rows: BTreeSet<(Kind, String)>,
    delay: Duration,
    due: Instant,
}

impl Again {
    fn new() -> Self {
        let [delay, _] = AGAIN;
        Self { rows: BTreeSet::new(), delay, due: Instant::now() }
    }

    fn set(&mut self, refused: &[v1::RefusedRow]) {
        let is_alone = |row: &&v1::RefusedRow| !row.stale && !row.conflict;
        let key = |row: &v1::RefusedRow| {
            let kind = Kind::ALL.into_iter().find(|kind| kind.name() == row.kind)?;
            Some((kind, row.key.clone()))
        };
        let rows: BTreeSet<_> = refused.iter().filter(is_alone).filter_map(key).take(MAX_AGAIN).collect();
        if self.rows.is_empty() {
            let [delay, _] = AGAIN;
            (self.delay, self.due) = (delay, Instant::now() + delay);
        }
        self.rows = rows;
    }

    fn delayed(&mut self) {
        let [_, longest] = AGAIN;
        self.delay = (self.delay * 2).min(longest);
        self.due = Instant::now() + self.delay;
    }
}

impl Producer {
    pub(super) async fn stream(&mut self) -> Ended {
        let opening = open(self.connect.clone(), self.names.clone());
        pin!(opening);
        let opened = loop {
            tokio::select! {
                opened = &mut opening => break opened,
                update = self.updates.recv() => match update {
                    Some(update) => self.apply(update),
                    None => return Ended::Closed,
                },
            }
        };
        let (messages, mut stream) = match opened {
            Ok(opened) => opened,
            Err(ended) => return ended,
        };
        self.table.open_stream();
        self.metrics.connected(true);
        self.watches.mark_changed();
        loop {
            let can_send = stream.unprocessed < UNPROCESSED && self.table.is_waiting();
            let differ = self.watches.has_changed().unwrap_or(false);
            let report = stream.watches_due.filter(|_| differ);
            let reports = report.is_some_and(|due| due <= Instant::now());
            tokio::select! {
                update = self.updates.recv() => match update {
                    Some(update) => self.apply(update),
                    None => return Ended::Closed,
                },
                permit = messages.reserve(), if can_send || reports => match permit {
                    Ok(permit) if reports => {
                        stream.sequence += 1;
                        stream.watches_due = Some(Instant::now() + WATCHES);
                        let body = Some(Sent::Watches(self.watches.borrow_and_update().message()));
                        permit.send(v1::ProducerMessage { sequence: stream.sequence, body });
                    }
                    Ok(permit) => {
                        let Some(message) = self.table.next_message() else { continue };
                        stream.sequence += 1;
                        stream.unprocessed += 1;
                        if message.completes {
                            stream.complete = Some(stream.sequence);
                        }
                        if let Some(since) = message.since && stream.measured.len() < MEASURED {
                            stream.measured.push_back((stream.sequence, since));
                        }
                        self.metrics.sent(message.changes.len());
                        self.metrics.waiting(self.table.waiting());
                        let body = Some(Sent::Changes(v1::Changes { changes: message.changes }));
                        permit.send(v1::ProducerMessage { sequence: stream.sequence, body });
                    }
                    Err(_) => return end(&mut stream.answers).await,
                },
                () = sleep_until(stream.again.due), if !stream.again.rows.is_empty() => {
                    self.table.resend(&stream.again.rows);
                    stream.again.delayed();
                }
                () = sleep_until(report.unwrap_or_else(Instant::now)), if report.is_some() && !reports => {}
                changed = self.watches.changed(), if stream.watches_due.is_some() && !differ => match changed {
                    Ok(()) => self.watches.mark_changed(),
                    Err(_) => return Ended::Closed,
                },
                answer = stream.answers.message() => match answer {
                    Ok(Some(answer)) => self.answer(&mut stream, answer),
                    Ok(None) => return Ended::Stream("the agent ends it".to_owned()),
                    Err(status) => return status.into(),
                },
            }
        }
    }

    fn answer(&mut self, stream: &mut Stream, answer: v1::AgentMessage) {
        match answer.body {
            Some(Body::Processed(_)) => stream.unprocessed = stream.unprocessed.saturating_sub(1),
            Some(Body::InForce(v1::InForce { sequence })) => {
                stream.in_force = stream.in_force.max(sequence);
                while let Some((_, since)) = stream.measured.pop_front_if(|(of, _)| *of <= sequence) {
                    self.metrics.in_force(since.elapsed());
                }
                if stream.complete.take_if(|complete| stream.in_force >= *complete).is_some() {
                    tracing::info!("every row is in force");
                    self.change(|state| state.is_in_force = true);
                }
            }
            // The agent has not checked yet.
            Some(Body::Report(report)) if report.conditions.is_empty() => {}
            Some(Body::Report(report)) => self.change(|state| state.report = Some(report)),
            Some(Body::Refused(refused)) => {
                let unlisted = usize::try_from(refused.unlisted).unwrap_or(usize::MAX);
                self.metrics.refused(refused.rows.len().saturating_add(unlisted));
                stream.again.set(&refused.rows);
                let rows = refused.rows.into_iter();
                let refused = rows.map(|row| Refused { subject: self.table.subject(&row.key), row }).collect();
                self.change(|state| state.refused = refused);
            }
            // Later agent versions may send more.
            Some(Body::Opened(_) | Body::Rejected(_)) | None => {}
        }
    }

    fn change(&self, change: impl FnOnce(&mut AgentState)) {
        self.state.send_if_modified(|state| {
            let before = state.clone();
            change(state);
            state.differs(&before)
        });
    }
}

async fn open(connect: Connect, names: Names) -> Result<Opened, Ended> {
    let late = |_| Ended::Stream(format!("no answer to the opening within {OPENING:?}"));
    timeout(OPENING, opened(connect, names)).await.map_err(late)?
}

async fn opened(connect: Connect, names: Names) -> Result<Opened, Ended> {
    let failed = |error: tonic::transport::Error| {
        let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}")).unwrap_or_default();
        Ended::Stream(format!("{error}{cause}"))
    };
    let channel = connect().await.map_err(failed)?;
    let (messages, queue) = mpsc::channel(QUEUE);
    let Names { cluster, node } = names;
    let kinds = Kind::ALL.iter().map(|kind| kind.name().to_owned()).collect();
    let opening = v1::Opening { producer: NAME.to_owned(), cluster, node, kinds };
    let first = v1::ProducerMessage { sequence: 1, body: Some(Sent::Opening(opening)) };
    let ends = || Ended::Stream("the agent ends it without an answer".to_owned());
    messages.send(first).await.map_err(|_| ends())?;
    let mut client = ClusterFeedClient::new(channel).max_decoding_message_size(wharf_feed::MAX_MESSAGE);
    let mut answers = client.feed(ReceiverStream::new(queue)).await?.into_inner();
    match answers.message().await?.and_then(|answer| answer.body) {
        Some(Body::Opened(v1::Opened { version, accepts_watches })) => {
            tracing::info!(version, "the agent accepts the stream");
            let stream = Stream {
                answers,
                sequence: 1,
                unprocessed: 0,
                measured: VecDeque::new(),
                complete: None,
                in_force: 0,
                again: Again::new(),
                watches_due: accepts_watches.then(Instant::now),
            };
            Ok((messages, stream))
        }
        Some(Body::Rejected(v1::Rejected { reason })) => Err(Ended::Rejected(reason)),
        _ => Err(ends()),
    }
}

/// The cause of an end that the sender noticed first; the answers contain it.
async fn end(answers: &mut Streaming<v1::AgentMessage>) -> Ended {
    let end = async {
        loop {
            match answers.message().await {
                Ok(Some(_)) => {}
                Ok(None) => return Ended::Stream("the agent ends it".to_owned()),
                Err(status) => return status.into(),
            }
        }
    };
    timeout(END, end).await.unwrap_or_else(|_| Ended::Stream("the agent does not read it".to_owned()))
}
