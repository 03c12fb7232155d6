//! Lists and watches of a source:
//!
//! - A list is a consistent read. Its end replaces the source's state, which finds missed deletions.
//! - A watch begins at the list's version; after an end as requested or a failed connection, at the last event or
//!   bookmark. A failed connection also causes a list within 60 s, later in a large cluster.
//! - Every other failure causes a list, after at most 30 s or the server's delay: an expired or refused version, an
//!   event that does not decode, a decreasing version.
//! - Lists are at most 15 min apart, plus 1.5 s for each 100 objects. While the server refuses them, the watch
//!   continues.

pub mod backoff;
mod definition;
mod lines;
mod list;
mod states;
mod stream;

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep, timeout_at},
};

use crate::{
    api::{Api, Failure},
    metrics::Metrics,
    rows::{Defined, Reader},
    source::{Served, Source},
};

pub use self::states::States;
use self::{
    backoff::{Delays, spread},
    states::State,
    stream::Version,
};

/// Two thirds of the longest time between lists.
const RELIST: Duration = Duration::from_secs(600);
/// Added to it for each object of the last list, and a fifth to the wait after a failed connection: the agents of all
/// nodes list all objects.
const FOR_OBJECT: Duration = Duration::from_millis(10);
/// Seconds until the list after a failed connection: a restored store may have other objects at the watch's version.
const VERIFY: std::ops::Range<f64> = 5.0..60.0;
/// Between two checks for an absent resource.
const ABSENT: Duration = Duration::from_secs(20);
/// A longer watch resets the delays.
const HEALTHY: Duration = Duration::from_secs(10);

/// A change of a source.
#[derive(Debug)]
pub struct Update {
    pub source: Source,
    /// When it was read.
    pub at: Instant,
    /// Change.
    pub event: Event,
}

/// What changes.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// A list begins; an earlier incomplete list is void.
    Begin,
    /// The object exists.
    Put(Defined),
    /// The object exists, but its row is unknown: the object's earlier row stays.
    Keep {
        /// As of `Gone`.
        object: String,
        uid: String,
    },
    /// The object is deleted.
    Gone {
        /// Key of the object: `NAMESPACE/NAME`, or the name without a namespace.
        object: String,
        uid: String,
    },
    /// The list is complete: other objects are deleted.
    Complete,
    /// The cluster lacks the resource.
    Absent,
}

/// Why watching ends.
#[derive(Debug)]
enum Stop {
    /// The updates' receiver is dropped.
    Closed,
    Failed(Failure),
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

/// What a watch continues.
#[derive(Debug)]
struct Followed {
    served: Served,
    version: Version,
}

/// When the next list begins.
#[derive(Debug)]
struct Due {
    at: Instant,
    for_objects: Duration,
}

impl Due {
    fn after(objects: u32) -> Self {
        let for_objects = FOR_OBJECT.saturating_mul(objects);
        Self { at: Instant::now() + spread(RELIST + for_objects), for_objects }
    }
}

/// Follows a source.
#[derive(Debug)]
pub struct Watcher {
    api: Arc<Api>,
    reader: Reader,
    updates: mpsc::Sender<Update>,
    states: watch::Sender<States>,
    metrics: Arc<Metrics>,
    /// Increased when this node's object changes.
    own: Option<watch::Sender<u64>>,
}

impl Watcher {
    /// A watcher of the reader's source.
    #[must_use]
    pub fn new(
        api: Arc<Api>,
        reader: Reader,
        updates: mpsc::Sender<Update>,
        states: watch::Sender<States>,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self { api, reader, updates, states, metrics, own: None }
    }

    /// Counts changes of this node's object; for the source of nodes.
    #[must_use]
    pub fn report_own(mut self, own: watch::Sender<u64>) -> Self {
        self.own = Some(own);
        self
    }

    /// Follows the source until the updates' receiver is dropped.
    pub async fn run(self) {
        let (mut delays, mut lists, mut followed) = (Delays::default(), Delays::default(), None);
        loop {
            let failure = match self.round(&mut followed, &mut delays, &mut lists).await {
                Ok(()) => continue,
                Err(Stop::Closed) => return,
                Err(Stop::Failed(failure)) => failure,
            };
            followed = None;
            let delay = delays.next(failure.retry_after());
            self.report(&failure, delay);
            sleep(delay).await;
        }
    }

    /// A list and its watches, until another list is due. `lists`: delays after refused lists.
    async fn round(
        &self,
        followed: &mut Option<Followed>,
        delays: &mut Delays,
        lists: &mut Delays,
    ) -> Result<(), Stop> {
        let mut has_begun = false;
        let due = match self.list_served(&mut has_begun).await {
            Ok(Some((now, objects))) => {
                *followed = Some(now);
                lists.reset();
                Due::after(objects)
            }
            Ok(None) => {
                *followed = None;
                self.set_state(State::Absent);
                self.send(Event::Absent).await?;
                delays.reset();
                sleep(spread(ABSENT)).await;
                return Ok(());
            }
            // A busy server refuses lists and serves watches. Rows of a cut list may be newer than the watch.
            Err(Stop::Failed(failure)) if followed.is_some() && !has_begun => {
                let delay = lists.next(failure.retry_after());
                self.report(&failure, delay);
                Due { at: Instant::now() + delay, for_objects: Duration::ZERO }
            }
            Err(stop) => return Err(stop),
        };
        match followed {
            Some(followed) => self.watch_until(followed, due, delays).await,
            None => Ok(()),
        }
    }

    /// `None` without the definition of a custom resource. `has_begun`: rows of the list were sent.
    async fn list_served(&self, has_begun: &mut bool) -> Result<Option<(Followed, u32)>, Stop> {
        let Some(served) = self.served().await? else { return Ok(None) };
        self.set_state(State::Listing);
        let (version, objects) = self.list(&served, has_begun).await?;
        self.metrics.list(self.reader.source);
        Ok(Some((Followed { served, version }, objects)))
    }

    /// Watches again and again, until a list is due.
    async fn watch_until(&self, followed: &mut Followed, mut due: Due, delays: &mut Delays) -> Result<(), Stop> {
        let Followed { served, version } = followed;
        // Separate from `delays`: lost connections do not delay a list.
        let mut lost = Delays::default();
        loop {
            let mut accepted = None;
            // The next list recovers an update that a cancelled watch loses.
            let ended = timeout_at(due.at, self.watch(served, version, &mut accepted)).await;
            if accepted.is_some_and(|at: Instant| at.elapsed() >= HEALTHY) {
                delays.reset();
                lost.reset();
            }
            let Ok(ended) = ended else { return Ok(()) };
            match ended {
                Ok(()) => self.metrics.watch_ended(self.reader.source),
                Err(Stop::Failed(failure @ (Failure::Connection(_) | Failure::Silent(_)))) => {
                    let wait = Duration::from_secs_f64(rand::random_range(VERIFY));
                    due.at = due.at.min(Instant::now() + wait + (due.for_objects / 5).mul_f64(rand::random()));
                    let delay = lost.next(None);
                    self.report(&failure, delay);
                    sleep(delay).await;
                }
                Err(stop) => return Err(stop),
            }
        }
    }

    /// `None` without the definition of a custom resource.
    async fn served(&self) -> Result<Option<Served>, Failure> {
        match self.reader.source.custom() {
            Some(custom) => definition::served(&self.api, &custom).await,
            None => Ok(Some(self.reader.source.built_in())),
        }
    }

    fn set_state(&self, state: State) {
        states::set(&self.states, self.reader.source, state);
    }

    async fn send(&self, event: Event) -> Result<(), Stop> {
        if let Some(own) = &self.own
            && let Event::Put(Defined { object, .. }) | Event::Gone { object, .. } = &event
            && *object == self.reader.own
        {
            own.send_modify(|changes| *changes = changes.wrapping_add(1));
        }
        let update = Update { source: self.reader.source, at: Instant::now(), event };
        self.updates.send(update).await.map_err(|_| Stop::Closed)
    }

    fn report(&self, failure: &Failure, delay: Duration) {
        let source = self.reader.source;
        self.metrics.failure(source, failure.label());
        self.set_state(State::Failing(failure.to_string()));
        if failure.code() == Some(410) || matches!(failure, Failure::Connection(_) | Failure::Silent(_)) {
            tracing::info!(%source, ?delay, "{failure}");
        } else {
            tracing::warn!(%source, ?delay, "{failure}");
        }
    }

    fn report_unusable(&self, object: &str, why: &dyn std::fmt::Display) {
        self.metrics.unusable(self.reader.source);
        tracing::warn!(source = %self.reader.source, object, "the object is skipped, and its earlier row stays: {why}");
    }
}
