//! States of the watches, for the agent.

use std::{
    collections::BTreeMap,
    mem::discriminant,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use tokio::sync::watch;
use wharf_feed::v1;

use crate::source::Source;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum State {
    /// Until the first list is complete.
    Listing,
    Watching,
    /// With the last cause.
    Failing(String),
    /// The cluster lacks the resource.
    Absent,
}

/// A watch that fails sooner after a failure did not work: a server may accept watches and end them at once.
const WORKS: Duration = Duration::from_secs(30);

/// States of all watches.
#[derive(Debug, Clone, Default)]
pub struct States(BTreeMap<Source, Since>);

/// Times since 1970.
#[derive(Debug, Clone)]
struct Since {
    state: State,
    /// Begin of the state; another cause of a failure keeps it.
    began: Duration,
    /// Begin of the preceding failures.
    failing: Option<Duration>,
}

impl States {
    /// Whether the state changed.
    fn set(&mut self, source: Source, state: State, now: Duration) -> bool {
        let before = self.0.get(&source);
        let is_first_list = before.is_none_or(|before| before.state == State::Absent);
        if state == State::Listing && !is_first_list || before.is_some_and(|before| before.state == state) {
            return false;
        }
        let (mut began, mut failing) = (now, None);
        if let Some(before) = before {
            let is_same = discriminant(&before.state) == discriminant(&state);
            let is_again = matches!(state, State::Failing(_)) && now.saturating_sub(before.began) < WORKS;
            began = if is_same { before.began } else { before.failing.filter(|_| is_again).unwrap_or(now) };
            failing = matches!(before.state, State::Failing(_)).then_some(before.began);
        }
        self.0.insert(source, Since { state, began, failing });
        true
    }

    /// The message of the feed.
    #[must_use]
    pub fn message(&self) -> v1::Watches {
        let watches = self.0.iter().map(|(source, Since { state, began, .. })| {
            let (state, error) = match state {
                State::Listing => ("listing", ""),
                State::Watching => ("watching", ""),
                State::Failing(why) => ("failing", why.as_str()),
                State::Absent => ("absent", ""),
            };
            v1::Watch {
                name: source.to_string(),
                state: state.to_owned(),
                since_unix_ms: u64::try_from(began.as_millis()).unwrap_or(u64::MAX),
                error: error.to_owned(),
            }
        });
        v1::Watches { watches: watches.collect() }
    }
}

/// Sets a watch's state, and wakes the producer after a change.
pub(super) fn set(states: &watch::Sender<States>, source: Source, state: State) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    states.send_if_modified(|states| states.set(source, state, now));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_keeps_its_time_until_a_watch_works() {
        let mut states = States::default();
        let mut set = |state, seconds| {
            let differs = states.set(Source::Pod, state, Duration::from_secs(seconds));
            let [watch] = &states.message().watches[..] else { panic!("one watch") };
            (differs, watch.state.clone(), watch.since_unix_ms / 1_000, watch.error.clone())
        };
        let failing = |why: &str| State::Failing(why.to_owned());
        let is = |differs, state: &str, since, why: &str| (differs, state.to_owned(), since, why.to_owned());
        assert_eq!(set(State::Listing, 1), is(true, "listing", 1, ""));
        assert_eq!(set(failing("one"), 2), is(true, "failing", 2, "one"));
        assert_eq!(set(State::Listing, 3), is(false, "failing", 2, "one"), "the next attempt");
        assert_eq!(set(failing("two"), 4), is(true, "failing", 2, "two"));
        assert_eq!(set(State::Watching, 5), is(true, "watching", 5, ""));
        assert_eq!(set(failing("three"), 6), is(true, "failing", 2, "three"), "an accepted watch that ends at once");
        assert_eq!(set(State::Watching, 7), is(true, "watching", 7, ""));
        assert_eq!(set(State::Listing, 8), is(false, "watching", 7, ""), "a later list");
        assert_eq!(set(failing("four"), 50), is(true, "failing", 50, "four"), "it has worked");
        assert_eq!(set(State::Absent, 51), is(true, "absent", 51, ""));
        assert_eq!(set(State::Listing, 52), is(true, "listing", 52, ""));
    }
}
