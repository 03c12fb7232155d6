//! A part of the status, with its last answer.
//!
//! A read answers with a look that began after the request or, on timeout, with the last answer and its age. One look
//! runs at a time: a stuck part blocks one thread.

use std::{
    collections::BTreeMap,
    future::Future,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::{runtime::Handle, sync::Notify, time::timeout_at};
use wharf_api::{AgentStatus, MetricRow};
use wharf_core::kernel::KernelError;
use wharf_kit::sync::lock;

/// Per read: a look may panic, and a stopped runtime drops looks.
const LOOKS: u32 = 2;

/// Writes an answer into a status.
pub type Fill = Arc<dyn Fn(&mut AgentStatus) + Send + Sync>;

/// All parts.
#[derive(Default)]
pub struct Parts {
    fills: Mutex<BTreeMap<&'static str, Arc<Part<Fill>>>>,
    pub(crate) counters: Arc<Part<Result<Vec<MetricRow>, KernelError>>>,
    /// Independent of the main runtime.
    runtime: OnceLock<Handle>,
    pub(crate) stale: AtomicU64,
}

impl Parts {
    /// Sets the looks' runtime once.
    pub fn look_on(&self, runtime: Handle) {
        let _ = self.runtime.set(runtime);
    }

    /// Unanswered at the last status.
    #[must_use]
    pub fn stale(&self) -> u64 {
        self.stale.load(Ordering::Relaxed)
    }

    pub(crate) fn part(&self, name: &'static str) -> Arc<Part<Fill>> {
        Arc::clone(lock(&self.fills).entry(name).or_default())
    }

    pub(crate) fn runtime(&self) -> Handle {
        self.runtime.get().cloned().unwrap_or_else(Handle::current)
    }
}

/// Result of a read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reading<T> {
    /// From a look after the request.
    Fresh(T),
    /// A timeout.
    Stale {
        /// Last answer.
        value: T,
        age: Duration,
        /// Age of the running look.
        waiting: Duration,
    },
    /// A timeout, without an earlier answer.
    Unknown {
        /// Age of the running look.
        waiting: Duration,
    },
}

/// Shared by readers and the look.
#[derive(Debug)]
pub struct Part<T> {
    slot: Mutex<Slot<T>>,
    ended: Notify,
}

#[derive(Debug)]
struct Slot<T> {
    last: Option<Answer<T>>,
    looking: Option<Instant>,
}

#[derive(Debug)]
struct Answer<T> {
    value: T,
    began: Instant,
    ended: Instant,
}

impl<T> Default for Part<T> {
    fn default() -> Self {
        Self { slot: Mutex::new(Slot { last: None, looking: None }), ended: Notify::new() }
    }
}

impl<T: Clone + Send + 'static> Part<T> {
    /// A look runs on a blocking thread of `runtime`, and continues without readers.
    pub async fn read<F>(
        self: &Arc<Self>,
        runtime: &Handle,
        until: tokio::time::Instant,
        look: impl Fn() -> F,
    ) -> Reading<T>
    where
        F: Future<Output = T> + Send + 'static,
    {
        let asked = Instant::now();
        let mut started = 0;
        loop {
            let ended = self.ended.notified();
            tokio::pin!(ended);
            // Before the read, so that no end is missed.
            ended.as_mut().enable();
            let is_free = {
                let mut slot = lock(&self.slot);
                if let Some(answer) = slot.last.as_ref().filter(|answer| answer.began >= asked) {
                    return Reading::Fresh(answer.value.clone());
                }
                let is_free = slot.looking.is_none();
                if is_free && started < LOOKS {
                    slot.looking = Some(Instant::now());
                }
                is_free
            };
            if is_free {
                if started == LOOKS {
                    return self.overdue(asked);
                }
                started += 1;
                self.start(runtime, look());
            }
            if timeout_at(until, ended).await.is_err() {
                return self.overdue(asked);
            }
        }
    }

    fn overdue(&self, asked: Instant) -> Reading<T> {
        let slot = lock(&self.slot);
        let waiting = slot.looking.unwrap_or(asked).elapsed();
        match &slot.last {
            Some(answer) if answer.began >= asked => Reading::Fresh(answer.value.clone()),
            Some(answer) => Reading::Stale { value: answer.value.clone(), age: answer.ended.elapsed(), waiting },
            None => Reading::Unknown { waiting },
        }
    }

    fn start<F>(self: &Arc<Self>, runtime: &Handle, look: F)
    where
        F: Future<Output = T> + Send + 'static,
    {
        let (open, handle) = (Look { part: Arc::clone(self), found: None }, runtime.clone());
        drop(runtime.spawn_blocking(move || open.end(handle.block_on(look))));
    }
}

struct Look<T> {
    part: Arc<Part<T>>,
    found: Option<T>,
}

impl<T> Look<T> {
    fn end(mut self, found: T) {
        self.found = Some(found);
    }
}

impl<T> Drop for Look<T> {
    fn drop(&mut self) {
        let mut slot = lock(&self.part.slot);
        if let (Some(value), Some(began)) = (self.found.take(), slot.looking) {
            slot.last = Some(Answer { value, began, ended: Instant::now() });
        }
        slot.looking = None;
        drop(slot);
        self.part.ended.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        atomic::{AtomicU64, Ordering},
        mpsc,
    };

    use super::*;

    fn soon() -> tokio::time::Instant {
        tokio::time::Instant::now() + Duration::from_millis(20)
    }

    fn patient() -> tokio::time::Instant {
        tokio::time::Instant::now() + Duration::from_secs(60)
    }

    #[tokio::test]
    async fn each_question_gets_a_look_of_its_own_while_the_part_answers() {
        let (part, looks, runtime) = (Arc::new(Part::default()), Arc::new(AtomicU64::new(0)), Handle::current());
        for n in 1..=3 {
            let looks = Arc::clone(&looks);
            let look = move || std::future::ready(looks.fetch_add(1, Ordering::Relaxed) + 1);
            assert_eq!(part.read(&runtime, patient(), look).await, Reading::Fresh(n));
        }
    }

    struct Stuck {
        begun: Arc<AtomicU64>,
        go: Arc<Mutex<mpsc::Receiver<u64>>>,
    }

    impl Stuck {
        fn new() -> (Self, mpsc::Sender<u64>) {
            let (tell, told) = mpsc::channel();
            (Self { begun: Arc::default(), go: Arc::new(Mutex::new(told)) }, tell)
        }

        fn look(&self) -> impl Future<Output = u64> + Send + 'static {
            let (begun, go) = (Arc::clone(&self.begun), Arc::clone(&self.go));
            async move {
                begun.fetch_add(1, Ordering::Relaxed);
                lock(&go).recv().unwrap_or(0)
            }
        }
    }

    #[tokio::test]
    async fn a_part_that_is_stuck_is_unknown_then_stale_and_has_one_look_under_way() {
        let (part, runtime) = (Arc::new(Part::default()), Handle::current());
        let (stuck, tell) = Stuck::new();
        for _ in 0..3 {
            let reading = part.read(&runtime, soon(), || stuck.look()).await;
            assert!(matches!(reading, Reading::Unknown { .. }), "{reading:?}");
        }
        tell.send(1).expect("somebody listens");
        tell.send(2).expect("somebody listens");
        assert_eq!(part.read(&runtime, patient(), || stuck.look()).await, Reading::Fresh(2));
        for _ in 0..3 {
            let reading = part.read(&runtime, soon(), || stuck.look()).await;
            assert!(matches!(reading, Reading::Stale { value: 2, .. }), "{reading:?}");
        }
        assert_eq!(stuck.begun.load(Ordering::Relaxed), 3, "looks piled up");
        drop(tell);
    }

    #[tokio::test]
    async fn many_questions_at_once_share_a_look() {
        let (part, runtime) = (Arc::new(Part::default()), Handle::current());
        let (stuck, tell) = Stuck::new();
        let ask = || part.read(&runtime, patient(), || stuck.look());
        let answer = async {
            for n in 0..10 {
                tell.send(n).expect("somebody listens");
            }
        };
        let (a, b, c, ()) = tokio::join!(ask(), ask(), ask(), answer);
        for reading in [a, b, c] {
            assert!(matches!(reading, Reading::Fresh(_)), "{reading:?}");
        }
        assert!(stuck.begun.load(Ordering::Relaxed) <= 2);
    }

    #[test]
    fn a_runtime_that_has_ended_gives_no_answer_and_no_hang() {
        let runtime = |()| tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let (here, ended) = (runtime(()), runtime(()));
        let handle = ended.handle().clone();
        drop(ended);
        let part: Arc<Part<u64>> = Arc::default();
        let reading = here.block_on(async { part.read(&handle, patient(), || std::future::ready(1)).await });
        assert!(matches!(reading, Reading::Unknown { .. }), "{reading:?}");
    }

    #[tokio::test]
    async fn a_look_that_panics_does_not_block_the_next() {
        let (part, runtime) = (Arc::new(Part::default()), Handle::current());
        let count = AtomicU64::new(0);
        let look = || {
            let first = count.fetch_add(1, Ordering::Relaxed) == 0;
            async move {
                assert!(!first, "the look of this test that is to fail");
                7
            }
        };
        assert_eq!(part.read(&runtime, patient(), look).await, Reading::Fresh(7));
    }
}
