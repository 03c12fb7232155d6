//! The state of each watch, for the agent.

use std::{
    collections::BTreeMap,
    mem::discriminant,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use tokio::sync::watch;
use wharf_feed::v1;

use crate::source::Source;

/// State of a watch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum State {
    /// The first list is not complete.
    Listing,
    /// The server has accepted a watch.
    Watching,
    /// Lists or watches fail, with the last cause.
    Failing(String),
    /// The cluster does not have the resource.
    Absent,
}

/// State of every watch, with the time since 1970 at which it began. A later cause of a failure keeps the time.
#[derive(Debug, Clone, Default)]
pub struct States(BTreeMap<Source, (State, Duration)>);

impl States {
    /// Whether the state differs from the one before.
    fn set(&mut self, source: Source, state: State) -> bool {
        let before = self.0.get(&source);
        let is_first_list = before.is_none_or(|(before, _)| *before == State::Absent);
        if state == State::Listing && !is_first_list || before.is_some_and(|(before, _)| *before == state) {
            return false;
        }
        let same = before.filter(|(before, _)| discriminant(before) == discriminant(&state));
        let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let since = same.map_or_else(now, |(_, since)| *since);
        self.0.insert(source, (state, since));
        true
    }

    /// The message of the feed.
    #[must_use]
    pub fn message(&self) -> v1::Watches {
        let watches = self.0.iter().map(|(source, (state, since))| {
            let (state, error) = match state {
                State::Listing => ("listing", ""),
                State::Watching => ("watching", ""),
                State::Failing(why) => ("failing", why.as_str()),
                State::Absent => ("absent", ""),
            };
            v1::Watch {
                name: source.to_string(),
                state: state.to_owned(),
                since_unix_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
                error: error.to_owned(),
            }
        });
        v1::Watches { watches: watches.collect() }
    }
}

/// Sets the state of a watch, and wakes the producer if it differs.
pub(super) fn set(states: &watch::Sender<States>, source: Source, state: State) {
    states.send_if_modified(|states| states.set(source, state));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_keeps_its_time_until_a_watch_is_accepted() {
        let mut states = States::default();
        let failing = |why: &str| State::Failing(why.to_owned());
        assert!(states.set(Source::Pod, State::Listing));
        assert!(states.set(Source::Pod, failing("one")));
        let [before] = &states.message().watches[..] else { panic!("one watch") };
        assert_eq!((before.name.as_str(), before.state.as_str(), before.error.as_str()), ("Pod", "failing", "one"));
        assert!(!states.set(Source::Pod, State::Listing), "the next attempt");
        assert!(states.set(Source::Pod, failing("two")) && !states.set(Source::Pod, failing("two")));
        let [after] = &states.message().watches[..] else { panic!("one watch") };
        assert_eq!((after.since_unix_ms, after.error.as_str()), (before.since_unix_ms, "two"));
        assert!(states.set(Source::Pod, State::Watching) && !states.set(Source::Pod, State::Listing), "a later list");
        assert!(states.set(Source::Pod, State::Absent) && states.set(Source::Pod, State::Listing));
        assert_eq!(states.message().watches.len(), 1);
    }
}
