//! A producer's stream. Answers are made when the producer reads them; without them no message is read.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    time::{Instant, Interval, MissedTickBehavior, interval, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;
use tonic::{Status, Streaming};
use wharf_api::FeedWatch;
use wharf_feed::v1::{self, agent_message::Body, producer_message::Body as Sent};

use super::{
    ClusterFeed, MAX_LISTED, Mark, NotOpen, Open, Opening, Step, Work, refused_row, replaced, rows, server::Place,
};
use crate::cluster::blocking;

/// For the opening.
const FIRST: Duration = Duration::from_secs(5);
const LOOKS: Duration = Duration::from_secs(1);
/// Bytes of a producer's name and of a cluster's id.
const MAX_NAME: usize = 253;

pub(super) struct Session {
    feed: Arc<ClusterFeed>,
    messages: Streaming<v1::ProducerMessage>,
    stop: CancellationToken,
    place: Option<Place>,
    stage: Stage,
    sequence: u64,
    work: Option<Work>,
    wait: Option<Instant>,
    in_force: watch::Receiver<Mark>,
    /// Sequence of the last [`v1::InForce`].
    told: u64,
    report: watch::Receiver<v1::Report>,
    report_due: bool,
    /// For the next look: a producer may send many.
    watches: Option<Vec<FeedWatch>>,
    refused: Refused,
}

enum Stage {
    Waiting,
    Open(Open),
    Ended,
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Some(place) = &self.place {
            place.ended();
        }
    }
}

struct Refused {
    looks: Interval,
    revision: u64,
    known: v1::RefusedRows,
    is_due: bool,
}

impl Session {
    pub(super) fn new(
        feed: Arc<ClusterFeed>,
        messages: Streaming<v1::ProducerMessage>,
        stop: CancellationToken,
        place: Option<Place>,
    ) -> Self {
        let (in_force, report) = (feed.in_force.subscribe(), feed.report.subscribe());
        let mut looks = interval(LOOKS);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self {
            feed,
            messages,
            stop,
            place,
            stage: Stage::Waiting,
            sequence: 0,
            work: None,
            wait: None,
            in_force,
            told: 0,
            report,
            report_due: true,
            watches: None,
            refused: Refused { looks, revision: 0, known: v1::RefusedRows::default(), is_due: false },
        }
    }

    /// The next answer; `None` at the end.
    pub(super) async fn next(&mut self) -> Result<Option<Body>, Status> {
        if matches!(self.stage, Stage::Waiting) {
            return self.begin().await;
        }
        let Stage::Open(open) = &self.stage else { return Ok(None) };
        let (stream, replacement) = (open.stream, open.replaced.clone());
        loop {
            if self.stop.is_cancelled() {
                return Ok(None);
            }
            if let Some(body) = self.due(stream) {
                return Ok(Some(body));
            }
            if self.wait.is_none()
                && let Some(mut work) = self.work.take()
            {
                let feed = Arc::clone(&self.feed);
                let (work, step) = blocking(move || {
                    let step = feed.apply(stream, &mut work);
                    (work, step)
                })
                .await;
                match step? {
                    Step::More => self.work = Some(work),
                    Step::Wait(until) => (self.work, self.wait) = (Some(work), Some(until)),
                    Step::Done(processed) => return Ok(Some(Body::Processed(processed))),
                }
                continue;
            }
            let reads = self.work.is_none() && !self.feed.is_full();
            let until = self.wait.unwrap_or_else(Instant::now);
            tokio::select! {
                () = self.stop.cancelled() => return Ok(None),
                () = replacement.cancelled() => return Err(replaced()),
                changed = self.in_force.changed() => changed.map_err(|_| ended())?,
                changed = self.report.changed() => {
                    changed.map_err(|_| ended())?;
                    self.report_due = true;
                }
                _ = self.refused.looks.tick() => {
                    self.look_at_refused();
                    if let (Stage::Open(open), Some(watches)) = (&self.stage, self.watches.take()) {
                        self.feed.set_watches(open.stream, watches);
                    }
                }
                () = sleep_until(until), if self.wait.is_some() => self.wait = None,
                message = self.messages.message(), if reads => match message? {
                    Some(message) => self.receive(message).await?,
                    None => return Ok(None),
                },
            }
        }
    }

    async fn begin(&mut self) -> Result<Option<Body>, Status> {
        let first = tokio::select! {
            () = self.stop.cancelled() => return Ok(None),
            first = timeout(FIRST, self.messages.message()) => first,
        };
        let late = |_| Status::deadline_exceeded(format!("no opening within {FIRST:?}"));
        let Some(v1::ProducerMessage { sequence, body }) = first.map_err(late)?? else { return Ok(None) };
        self.sequence = sequence;
        let opening = opening_of(body)?;
        match self.open(opening).await? {
            Ok(open) => {
                if let Some(place) = &self.place {
                    place.opened(open.replaced.clone());
                }
                self.stage = Stage::Open(open);
                let version = env!("CARGO_PKG_VERSION").to_owned();
                Ok(Some(Body::Opened(v1::Opened { version, accepts_watches: true })))
            }
            Err(reason) => {
                tracing::warn!("a producer is rejected by the cluster feed: {reason}");
                self.stage = Stage::Ended;
                Ok(Some(Body::Rejected(v1::Rejected { reason })))
            }
        }
    }

    /// The inner error is the cause of a rejection.
    async fn open(&self, opening: v1::Opening) -> Result<Result<Open, String>, Status> {
        let opening = match read(opening, &self.feed.own) {
            Ok(opening) => Arc::new(opening),
            Err(why) => return Ok(Err(why)),
        };
        loop {
            let (feed, opening) = (Arc::clone(&self.feed), Arc::clone(&opening));
            match blocking(move || feed.open(&opening)).await {
                Ok(open) => return Ok(Ok(open)),
                Err(NotOpen::Rejected(why)) => return Ok(Err(why)),
                Err(NotOpen::Later(until)) => tokio::select! {
                    () = self.stop.cancelled() => return Err(ended()),
                    () = sleep_until(until) => {}
                },
            }
        }
    }

    fn due(&mut self, stream: u64) -> Option<Body> {
        if self.report_due {
            self.report_due = false;
            return Some(Body::Report(self.report.borrow_and_update().clone()));
        }
        let Mark { stream: of, sequence } = *self.in_force.borrow_and_update();
        if of == stream && sequence > self.told {
            self.told = sequence;
            return Some(Body::InForce(v1::InForce { sequence }));
        }
        if self.refused.is_due {
            self.refused.is_due = false;
            return Some(Body::Refused(self.refused.known.clone()));
        }
        None
    }

    fn look_at_refused(&mut self) {
        let revision = self.feed.revision();
        if revision == self.refused.revision {
            return;
        }
        self.refused.revision = revision;
        let (refused, all) = self.feed.refused(MAX_LISTED);
        let unlisted = u64::try_from(all.saturating_sub(refused.len())).unwrap_or(u64::MAX);
        let now = v1::RefusedRows { rows: refused.into_iter().map(refused_row).collect(), unlisted };
        if now != self.refused.known {
            self.refused.known = now;
            self.refused.is_due = true;
        }
    }

    async fn receive(&mut self, message: v1::ProducerMessage) -> Result<(), Status> {
        let sequence = message.sequence;
        let content = content_of(message, self.sequence)?;
        self.sequence = sequence;
        let changes = match content {
            Content::Changes(changes) => changes,
            Content::Watches(watches) => {
                self.watches = Some(watches);
                return Ok(());
            }
        };
        let reading = Arc::clone(&self.feed.reading);
        let turn = tokio::select! {
            () = self.stop.cancelled() => return Ok(()),
            turn = reading.acquire_owned() => turn.map_err(|_| ended())?,
        };
        let read = move || {
            let _turn = turn;
            rows::read(changes)
        };
        let changes = blocking(read).await.map_err(Status::invalid_argument)?;
        self.work = Some(Work::new(sequence, changes));
        Ok(())
    }
}

/// The opening, which must be the first message.
pub(super) fn opening_of(body: Option<Sent>) -> Result<v1::Opening, Status> {
    match body {
        Some(Sent::Opening(opening)) => Ok(opening),
        _ => Err(Status::invalid_argument("the first message is not an opening")),
    }
}

pub(super) enum Content {
    Changes(v1::Changes),
    Watches(Vec<FeedWatch>),
}

/// `last`: sequence of the previous message.
pub(super) fn content_of(message: v1::ProducerMessage, last: u64) -> Result<Content, Status> {
    let v1::ProducerMessage { sequence, body } = message;
    if sequence <= last {
        return Err(Status::invalid_argument(format!("sequence {sequence} is not greater than {last}")));
    }
    match body {
        Some(Sent::Changes(changes)) => Ok(Content::Changes(changes)),
        Some(Sent::Watches(watches)) => Ok(Content::Watches(rows::read_watches(watches))),
        Some(Sent::Opening(_)) => Err(Status::invalid_argument("a second opening")),
        None => Err(Status::invalid_argument("a message has no content that this agent knows")),
    }
}

/// Unreachable: the feed's senders live as long as the feed.
fn ended() -> Status {
    Status::unavailable("the feed has ended")
}

pub(super) fn read(opening: v1::Opening, own: &str) -> Result<Opening, String> {
    let v1::Opening { producer, cluster, node, kinds: named } = opening;
    for (what, name) in [("producer", &producer), ("cluster", &cluster)] {
        if name.is_empty() || name.len() > MAX_NAME || name.chars().any(char::is_control) {
            return Err(format!("{what} must have 1 to {MAX_NAME} bytes without control characters"));
        }
    }
    if node != own {
        return Err(format!("the rows are for node {:?}, and this node is {own:?}", rows::shown(&node)));
    }
    let (mut kinds, mut unknown) = (BTreeSet::new(), Vec::new());
    for name in &named {
        match rows::kind(name) {
            Some(kind) => {
                kinds.insert(kind);
            }
            None => unknown.push(format!("{:?}", rows::shown(name))),
        }
    }
    if !unknown.is_empty() {
        unknown.truncate(8);
        return Err(format!("this agent does not know the kinds {}", unknown.join(", ")));
    }
    if kinds.is_empty() || kinds.len() != named.len() {
        return Err("an opening has at least one kind, and each once".to_owned());
    }
    Ok(Opening { producer, cluster, kinds })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opening() -> v1::Opening {
        v1::Opening {
            producer: "kube".into(),
            cluster: "one".into(),
            node: "a".into(),
            kinds: vec!["node".into(), "policy".into()],
        }
    }

    #[test]
    fn an_opening_is_checked_and_the_reason_names_what_is_wrong() {
        let Opening { kinds, .. } = read(opening(), "a").unwrap_or_else(|why| panic!("{why}"));
        assert_eq!(kinds.len(), 2);
        let refused = |change: &dyn Fn(&mut v1::Opening)| {
            let mut changed = opening();
            change(&mut changed);
            read(changed, "a").err().unwrap_or_default()
        };
        assert!(refused(&|o| o.node = "b".into()).contains("for node \"b\", and this node is \"a\""));
        assert!(refused(&|o| o.kinds.push("service".into())).ends_with("the kinds \"service\""));
        assert!(refused(&|o| o.kinds.push("node".into())).contains("each once"));
        assert!(refused(&|o| o.kinds.clear()).contains("at least one kind"));
        assert!(refused(&|o| o.producer = "a\n".into()).starts_with("producer must"));
        assert!(refused(&|o| o.cluster.clear()).starts_with("cluster must"));
    }
}
