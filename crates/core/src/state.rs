//! The endpoint's state machine: one exhaustive, pure `step`.
//!
//! Time is an argument and work is returned as [`Action`]s, for record and replay. A test compares this code with the
//! checked-in table (`snapshots/`) and diagram (`docs/endpoint-states.md`).

use std::fmt;

use serde::{Deserialize, Serialize};
pub use wharf_names::endpoint::{Level, State};

/// An endpoint event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Event {
    /// The labels have an identity.
    IdentityResolved,
    /// The labels changed and have no identity yet.
    IdentityLost,
    /// A regeneration is requested.
    BuildRequested(Level),
    /// The build pool granted a permit.
    BuildStarted,
    /// The build reached the desired revision.
    BuildSucceeded,
    /// The build failed; the last good state stays in force.
    BuildFailed,
    /// Regenerate the endpoint from its record.
    RestoreStarted,
    /// The first build failed permanently; the create was undone.
    CreateFailed,
    /// Network namespace and link are gone; the delete is awaited.
    NetnsGone,
    DeleteRequested,
    /// Every step was done or recorded as failed.
    DeleteFinished,
}

impl Event {
    /// In table order.
    pub const ALL: [Self; 12] = [
        Self::IdentityResolved,
        Self::IdentityLost,
        Self::BuildRequested(Level::Policy),
        Self::BuildRequested(Level::Datapath),
        Self::BuildStarted,
        Self::BuildSucceeded,
        Self::BuildFailed,
        Self::RestoreStarted,
        Self::CreateFailed,
        Self::NetnsGone,
        Self::DeleteRequested,
        Self::DeleteFinished,
    ];

    /// In logs and metrics labels.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::IdentityResolved => "identity-resolved",
            Self::IdentityLost => "identity-lost",
            Self::BuildRequested(Level::Policy) => "build-requested(policy)",
            Self::BuildRequested(Level::Datapath) => "build-requested(datapath)",
            Self::BuildStarted => "build-started",
            Self::BuildSucceeded => "build-succeeded",
            Self::BuildFailed => "build-failed",
            Self::RestoreStarted => "restore-started",
            Self::CreateFailed => "create-failed",
            Self::NetnsGone => "netns-gone",
            Self::DeleteRequested => "delete-requested",
            Self::DeleteFinished => "delete-finished",
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Work for the caller of [`Fsm::step`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Action {
    /// Replaces the queued build.
    QueueBuild {
        level: Level,
        /// As `now_ms` of [`Fsm::step`].
        not_before_ms: u64,
    },
    /// Dequeue the build, or cancel the running one and await its end: its result must not count for the next.
    CancelBuild,
    /// Run the delete plan.
    RunDelete,
    /// Inform subscribers; remove the endpoint from the tables.
    PublishRemoval,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::QueueBuild { level, not_before_ms } => write!(f, "queue-build({level}, not before {not_before_ms})"),
            Self::CancelBuild => f.write_str("cancel-build"),
            Self::RunDelete => f.write_str("run-delete"),
            Self::PublishRemoval => f.write_str("publish-removal"),
        }
    }
}

/// A rejected event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[error("{event} refused in state {state}: {why}")]
pub struct Rejected {
    /// Current state.
    pub state: State,
    pub event: Event,
    /// Violated rule.
    pub why: &'static str,
}

/// The state machine. Times are milliseconds on a monotonic clock: setting Unix time back would prolong a backoff.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fsm {
    pub state: State,
    /// Of the pending build; during a build, requested since its start.
    pub owed: Option<Level>,
    /// Of the running build, while [`State::Regenerating`].
    pub building: Option<Level>,
    /// Failed builds since the last success.
    pub failures: u32,
    /// Built or restored: the create cannot fail.
    pub realized: bool,
    /// Start of this state.
    pub since_ms: u64,
    /// Backoff of the pending build.
    pub not_before_ms: u64,
}

type Step = Result<(Fsm, Vec<Action>), Rejected>;

impl Fsm {
    /// With its first build pending.
    #[must_use]
    pub fn new_created(now_ms: u64) -> Self {
        Self {
            state: State::WaitingForIdentity,
            owed: Some(Level::Datapath),
            building: None,
            failures: 0,
            realized: false,
            since_ms: now_ms,
            not_before_ms: now_ms,
        }
    }

    /// Waits for [`Event::RestoreStarted`] or a request.
    #[must_use]
    pub fn new_restored(now_ms: u64) -> Self {
        Self { state: State::Restoring, realized: true, ..Self::new_created(now_ms) }
    }

    /// Returns ordered actions. Retries wait for the full delay.
    ///
    /// # Errors
    /// The event is invalid in this state.
    pub fn step(&self, event: Event, now_ms: u64) -> Step {
        self.step_with_jitter(event, now_ms, 1.0)
    }

    /// `jitter` from 0 to 1 spreads retries ([`retry_delay_ms`]).
    ///
    /// # Errors
    /// As [`Fsm::step`].
    pub fn step_with_jitter(&self, event: Event, now_ms: u64, jitter: f64) -> Step {
        match self.state {
            State::WaitingForIdentity => self.waiting_for_identity(event, now_ms),
            State::WaitingToRegenerate => self.waiting_to_regenerate(event, now_ms),
            State::Regenerating => self.regenerating(event, now_ms, jitter),
            State::Ready => self.ready(event, now_ms),
            State::Restoring => self.restoring(event, now_ms),
            State::Disconnecting => match event {
                Event::DeleteFinished => Ok((self.moved(State::Disconnected, now_ms), vec![Action::PublishRemoval])),
                Event::DeleteRequested => self.reject(event, "it is being deleted already"),
                _ => self.reject(event, "it is being deleted"),
            },
            State::Disconnected => self.reject(event, "it is gone"),
            State::Invalid => self.reject(event, "its create failed and was undone"),
        }
    }

    fn waiting_for_identity(&self, event: Event, now_ms: u64) -> Step {
        match event {
            Event::IdentityResolved => {
                // A build is always pending here.
                let level = self.owed.unwrap_or(Level::Datapath);
                self.owe(State::WaitingToRegenerate, level, now_ms)
            }
            Event::BuildRequested(level) => Ok((Self { owed: self.owed.max(Some(level)), ..self.clone() }, vec![])),
            Event::CreateFailed => self.create_failed(event, now_ms),
            Event::NetnsGone => self.netns_gone(event, now_ms),
            Event::DeleteRequested => self.delete(now_ms),
            Event::IdentityLost => self.reject(event, "it waits for an identity already"),
            Event::BuildStarted => self.reject(event, "it has no identity to build for"),
            Event::RestoreStarted => self.reject(event, "it has no identity to restore with"),
            Event::BuildSucceeded | Event::BuildFailed => self.reject(event, NO_BUILD_RUNS),
            Event::DeleteFinished => self.reject(event, NO_DELETE_RUNS),
        }
    }

    fn waiting_to_regenerate(&self, event: Event, now_ms: u64) -> Step {
        match event {
            Event::IdentityLost => self.identity_lost(now_ms),
            Event::BuildRequested(level) if self.owed >= Some(level) => Ok((self.clone(), vec![])),
            // Keep the backoff: requests must not become a stream of failing builds.
            Event::BuildRequested(level) => self.owe(State::WaitingToRegenerate, level, now_ms),
            Event::BuildStarted => self.build_started(now_ms),
            Event::RestoreStarted => self.restore_started(event, now_ms),
            Event::CreateFailed => self.create_failed(event, now_ms),
            Event::NetnsGone => self.netns_gone(event, now_ms),
            Event::DeleteRequested => self.delete(now_ms),
            Event::IdentityResolved => self.reject(event, NOT_WAITING_FOR_IDENTITY),
            Event::BuildSucceeded | Event::BuildFailed => self.reject(event, NO_BUILD_RUNS),
            Event::DeleteFinished => self.reject(event, NO_DELETE_RUNS),
        }
    }

    fn regenerating(&self, event: Event, now_ms: u64, jitter: f64) -> Step {
        match event {
            Event::IdentityLost => self.identity_lost(now_ms),
            // The running build's end queues it.
            Event::BuildRequested(level) => Ok((Self { owed: self.owed.max(Some(level)), ..self.clone() }, vec![])),
            Event::BuildSucceeded => {
                let done = Self { building: None, failures: 0, realized: true, not_before_ms: now_ms, ..self.clone() };
                match self.owed {
                    None => Ok((done.moved(State::Ready, now_ms), vec![])),
                    Some(level) => done.owe(State::WaitingToRegenerate, level, now_ms),
                }
            }
            Event::BuildFailed => {
                let failures = self.failures.saturating_add(1);
                let not_before_ms = now_ms.saturating_add(retry_delay_ms(failures, jitter));
                let failed = Self { building: None, failures, not_before_ms, ..self.clone() };
                failed.owe(State::WaitingToRegenerate, self.building.unwrap_or(Level::Datapath), now_ms)
            }
            Event::RestoreStarted => self.restore_started(event, now_ms),
            Event::CreateFailed => self.create_failed(event, now_ms),
            Event::DeleteRequested => self.delete(now_ms),
            Event::IdentityResolved => self.reject(event, NOT_WAITING_FOR_IDENTITY),
            Event::NetnsGone => self.reject(event, "a build of it runs"),
            Event::BuildStarted => self.reject(event, "a build of it runs already"),
            Event::DeleteFinished => self.reject(event, NO_DELETE_RUNS),
        }
    }

    fn ready(&self, event: Event, now_ms: u64) -> Step {
        match event {
            Event::IdentityLost => self.identity_lost(now_ms),
            Event::BuildRequested(level) => self.owe(State::WaitingToRegenerate, level, now_ms),
            Event::RestoreStarted => self.restore_started(event, now_ms),
            Event::NetnsGone => self.netns_gone(event, now_ms),
            Event::DeleteRequested => self.delete(now_ms),
            Event::IdentityResolved => self.reject(event, NOT_WAITING_FOR_IDENTITY),
            Event::BuildStarted => self.reject(event, "no build is owed"),
            Event::BuildSucceeded | Event::BuildFailed => self.reject(event, NO_BUILD_RUNS),
            Event::CreateFailed => self.reject(event, CREATED),
            Event::DeleteFinished => self.reject(event, NO_DELETE_RUNS),
        }
    }

    fn restoring(&self, event: Event, now_ms: u64) -> Step {
        match event {
            Event::RestoreStarted => self.owe(State::Restoring, Level::Datapath, now_ms),
            Event::BuildRequested(level) => self.owe(State::Restoring, level, now_ms),
            Event::BuildStarted => self.build_started(now_ms),
            Event::DeleteRequested => self.delete(now_ms),
            Event::IdentityResolved | Event::IdentityLost => {
                self.reject(event, "its record says its identity; labels change after the rebuild")
            }
            Event::BuildSucceeded | Event::BuildFailed => self.reject(event, NO_BUILD_RUNS),
            Event::NetnsGone => self.reject(event, "its restore decides whether it lives"),
            Event::CreateFailed => self.reject(event, CREATED),
            Event::DeleteFinished => self.reject(event, NO_DELETE_RUNS),
        }
    }

    fn owe(&self, state: State, level: Level, now_ms: u64) -> Step {
        let level = self.owed.map_or(level, |owed| owed.max(level));
        let not_before_ms = self.not_before_ms.max(now_ms);
        let next = Self { owed: Some(level), not_before_ms, ..self.moved(state, now_ms) };
        Ok((next, vec![Action::QueueBuild { level, not_before_ms }]))
    }

    fn build_started(&self, now_ms: u64) -> Step {
        let building = Some(self.owed.unwrap_or(Level::Datapath));
        Ok((Self { building, owed: None, ..self.moved(State::Regenerating, now_ms) }, vec![]))
    }

    /// A build is pending until the new labels resolve.
    fn identity_lost(&self, now_ms: u64) -> Step {
        let owed = self.owed.max(self.building).max(Some(Level::Policy));
        let next = Self { owed, building: None, ..self.moved(State::WaitingForIdentity, now_ms) };
        Ok((next, if self.state == State::Ready { vec![] } else { vec![Action::CancelBuild] }))
    }

    fn restore_started(&self, event: Event, now_ms: u64) -> Step {
        if !self.realized {
            return self.reject(event, "its create has not ended, so there is no record to restore from");
        }
        let (next, mut actions) =
            Self { building: None, ..self.clone() }.owe(State::Restoring, Level::Datapath, now_ms)?;
        if self.state != State::Ready {
            actions.insert(0, Action::CancelBuild);
        }
        Ok((next, actions))
    }

    fn create_failed(&self, event: Event, now_ms: u64) -> Step {
        if self.realized {
            return self.reject(event, CREATED);
        }
        let next = Self { owed: None, building: None, ..self.moved(State::Invalid, now_ms) };
        Ok((next, vec![Action::CancelBuild, Action::PublishRemoval]))
    }

    fn netns_gone(&self, event: Event, now_ms: u64) -> Step {
        if !self.realized {
            return self.reject(event, "its create has not ended, and undoes itself");
        }
        let next = Self { owed: None, building: None, ..self.moved(State::Disconnecting, now_ms) };
        Ok((next, if self.state == State::Ready { vec![] } else { vec![Action::CancelBuild] }))
    }

    fn delete(&self, now_ms: u64) -> Step {
        let next = Self { owed: None, building: None, ..self.moved(State::Disconnecting, now_ms) };
        Ok((next, vec![Action::CancelBuild, Action::RunDelete]))
    }

    /// `since_ms` changes only with the state.
    fn moved(&self, state: State, now_ms: u64) -> Self {
        let since_ms = if state == self.state { self.since_ms } else { now_ms };
        Self { state, since_ms, ..self.clone() }
    }

    fn reject(&self, event: Event, why: &'static str) -> Step {
        Err(Rejected { state: self.state, event, why })
    }

    /// The cause of the wait, and its end.
    #[must_use]
    pub fn waits_for(&self, now_ms: u64) -> Option<(&'static str, &'static str)> {
        match self.state {
            State::WaitingForIdentity => {
                Some(("an identity for its labels", "the identity allocator answers, or the endpoint is deleted"))
            }
            State::WaitingToRegenerate if now_ms < self.not_before_ms => {
                Some(("the backoff after a failed build", "the delay passes and a build succeeds"))
            }
            State::WaitingToRegenerate => Some(("a permit of the build pool", "a build before it ends")),
            State::Regenerating => Some(("the build that runs", "the build succeeds or fails")),
            State::Restoring => Some(("its rebuild after a restart", "all endpoints are restored and its build ends")),
            State::Disconnecting => Some(("the steps of its delete", "the last step is done or its deadline passes")),
            State::Ready | State::Disconnected | State::Invalid => None,
        }
    }
}

const NO_BUILD_RUNS: &str = "no build of it runs";
const NO_DELETE_RUNS: &str = "no delete of it runs";
const NOT_WAITING_FOR_IDENTITY: &str = "it does not wait for an identity";
const CREATED: &str = "its create has succeeded";

/// Milliseconds: longer than a build (2-3 ms); a short cause has passed.
const FIRST_RETRY_MS: u64 = 100;
/// Milliseconds; a hundred permanent failures cost a few builds per second.
const LONGEST_RETRY_MS: u64 = 30_000;

/// Milliseconds after `failures` failed builds: 100 ms, doubled each time, at most 30 s; 0 without failures. `jitter`
/// from 0 to 1 (NaN: 1) scales it from half to all: endpoints with a common cause must not retry together.
#[must_use]
pub fn retry_delay_ms(failures: u32, jitter: f64) -> u64 {
    if failures == 0 {
        return 0;
    }
    let doublings = (failures - 1).min(16);
    let whole = (FIRST_RETRY_MS << doublings).min(LONGEST_RETRY_MS);
    let jitter = if jitter.is_nan() { 1.0 } else { jitter.clamp(0.0, 1.0) };
    let half = whole / 2;
    // Within 0..=1: the cast cannot truncate.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let thousandths = (jitter * 1000.0) as u64;
    half + (whole - half) * thousandths / 1000
}

#[cfg(test)]
mod tests;
