//! CNI commands, each counted, logged and exported once by the process that observes its outcome: the agent for final
//! answers to ADD, DEL and GC (`rest::command`), else the shim ([`reports`]).

#[cfg(feature = "otlp")]
pub mod otlp;
pub mod reports;

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use tokio::sync::mpsc;
use wharf_api::{CommandFailure, CommandStatus};
use wharf_handover::{command::Command, report::Outcome};
use wharf_kit::{clock, sync::lock};

use crate::metrics::{CommandMetrics, Loss};

/// Beyond, the oldest command is counted without a report.
const MAX_ABANDONED: usize = 1_024;

/// Which program makes the attachments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The agent.
    Own,
    /// The service at `--delegate`.
    Delegated,
}

impl Mode {
    /// Name in metrics and logs.
    #[must_use]
    pub const fn of(self, command: &Command) -> &'static str {
        match self {
            Self::Own if command.chained => "chained",
            Self::Own => "own",
            Self::Delegated => "delegated",
        }
    }
}

/// An ended command.
#[derive(Debug, Clone)]
pub struct Ended {
    pub command: Command,
    pub outcome: Outcome,
    /// A DEL without an attachment.
    pub found_nothing: bool,
    /// API code or CNI error number.
    pub code: Option<String>,
    /// Failure cause.
    pub message: String,
    /// Duration since the shim's start.
    pub took: Duration,
    /// Unix time, milliseconds.
    pub ended_unix_ms: u64,
}

/// Counts, logs and exports CNI commands.
pub struct Commands {
    mode: Mode,
    metrics: Arc<CommandMetrics>,
    recent: Mutex<Recent>,
    exporter: Option<mpsc::Sender<Arc<Ended>>>,
}

#[derive(Default)]
struct Recent {
    /// With the time of their disconnect, oldest first.
    abandoned: VecDeque<(Instant, Ended)>,
    last_failure: Option<CommandFailure>,
}

impl Commands {
    /// An agent's commands.
    #[must_use]
    pub fn new(mode: Mode, metrics: Arc<CommandMetrics>, exporter: Option<mpsc::Sender<Arc<Ended>>>) -> Self {
        Self { mode, metrics, recent: Mutex::default(), exporter }
    }

    /// Registers a request; `age`: its shim's run time.
    #[must_use]
    pub fn begin(self: &Arc<Self>, command: Command, age: Duration) -> Running {
        Running { commands: Arc::clone(self), command: Some(command), age, began: Instant::now() }
    }

    /// Counts, logs and exports.
    pub fn ended(&self, ended: Ended) {
        let Ended { command, outcome, found_nothing, code, message, took, ended_unix_ms } = &ended;
        let mode = self.mode.of(command);
        self.metrics.ended(command.verb, &command.network, mode, *outcome, *took);
        let Command { verb, network, container_id, ifname, pod_name, pod_namespace, .. } = command;
        let verb = verb.as_str();
        let duration_us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        macro_rules! line {
            ($level:ident, $($text:tt)*) => {
                tracing::$level!(
                    command = verb,
                    network = named(network),
                    mode,
                    container = named(container_id),
                    interface = named(ifname),
                    pod = named(pod_name),
                    namespace = named(pod_namespace),
                    outcome = outcome.as_str(),
                    duration_us,
                    code,
                    $($text)*
                )
            };
        }
        match outcome {
            Outcome::Success if *found_nothing => line!(debug, "CNI {verb} succeeded: nothing was there"),
            Outcome::Success => line!(info, "CNI {verb} succeeded"),
            Outcome::Deferred => line!(info, "CNI {verb} succeeded by a deletion record"),
            Outcome::Failure => {
                line!(warn, "CNI {verb} failed: {message}");
                lock(&self.recent).last_failure = Some(CommandFailure {
                    command: verb.to_owned(),
                    network: network.clone(),
                    container_id: container_id.clone(),
                    ifname: ifname.clone(),
                    pod_name: pod_name.clone(),
                    pod_namespace: pod_namespace.clone(),
                    message: message.clone(),
                    ended_unix_ms: *ended_unix_ms,
                });
            }
        }
        if let Some(exporter) = &self.exporter
            && exporter.try_send(Arc::new(ended)).is_err()
        {
            self.metrics.lost(Loss::Export, 1);
        }
    }

    /// Counts a plugin's report.
    pub fn reported(&self, ended: Ended) {
        lock(&self.recent).abandoned.retain(|(_, abandoned)| abandoned.command.id != ended.command.id);
        self.ended(ended);
    }

    /// Counts commands without a report after `patience`.
    pub fn settle(&self, patience: Duration) {
        let is_due = |(since, _): &mut (Instant, Ended)| since.elapsed() >= patience;
        while let Some((_, ended)) = self.oldest_if(is_due) {
            self.ended(ended);
        }
    }

    fn abandon(&self, ended: Ended) {
        let full = {
            let abandoned = &mut lock(&self.recent).abandoned;
            abandoned.push_back((Instant::now(), ended));
            abandoned.len() > MAX_ABANDONED
        };
        if let Some((_, oldest)) = self.oldest_if(|_| full) {
            self.ended(oldest);
        }
    }

    /// Separate, so that the caller counts without the lock.
    fn oldest_if(&self, holds: impl FnOnce(&mut (Instant, Ended)) -> bool) -> Option<(Instant, Ended)> {
        lock(&self.recent).abandoned.pop_front_if(holds)
    }

    /// The counters.
    #[must_use]
    pub fn metrics(&self) -> &Arc<CommandMetrics> {
        &self.metrics
    }

    /// Totals and last failure.
    #[must_use]
    pub fn status(&self) -> CommandStatus {
        let [succeeded, failed, deferred] = self.metrics.outcomes();
        CommandStatus { succeeded, failed, deferred, last_failure: lock(&self.recent).last_failure.clone() }
    }
}

fn named(text: &str) -> Option<&str> {
    (!text.is_empty()).then_some(text)
}

/// A command in progress; dropping it is a disconnect.
pub struct Running {
    commands: Arc<Commands>,
    command: Option<Command>,
    age: Duration,
    began: Instant,
}

impl Running {
    /// The answer ends the command.
    pub fn end(mut self, outcome: Outcome, code: Option<String>, message: String) {
        if let Some(ended) = self.take(outcome, code, message) {
            self.commands.ended(ended);
        }
    }

    /// Ends a command without an attachment.
    pub fn end_with_nothing(mut self) {
        if let Some(ended) = self.take(Outcome::Success, None, String::new()) {
            self.commands.ended(Ended { found_nothing: true, ..ended });
        }
    }

    /// The answer does not end the command.
    pub fn pass(mut self) {
        self.command = None;
    }

    fn take(&mut self, outcome: Outcome, code: Option<String>, message: String) -> Option<Ended> {
        let took = self.age.saturating_add(self.began.elapsed());
        let ended_unix_ms = clock::unix_ms();
        let found_nothing = false;
        self.command.take().map(|command| Ended { command, outcome, found_nothing, code, message, took, ended_unix_ms })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let message = "the caller went away before the answer".to_owned();
        if let Some(ended) = self.take(Outcome::Failure, None, message) {
            self.commands.abandon(ended);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use wharf_handover::command::Verb;

    use super::*;

    pub(crate) fn command(id: u64, verb: Verb) -> Command {
        Command {
            id,
            verb,
            network: "net".into(),
            container_id: "c1".into(),
            ifname: "eth0".into(),
            pod_name: "web-0".into(),
            pod_namespace: "shop".into(),
            chained: false,
            runtime: String::new(),
        }
    }

    pub(crate) fn commands() -> Arc<Commands> {
        Arc::new(Commands::new(Mode::Own, Arc::default(), None))
    }

    #[test]
    fn a_command_whose_caller_goes_away_has_failed_unless_the_plugin_tells_its_end() {
        let commands = commands();
        drop(commands.begin(command(7, Verb::Add), Duration::from_millis(5)));
        drop(commands.begin(command(8, Verb::Del), Duration::from_millis(5)));
        commands.settle(Duration::from_secs(600));
        assert_eq!(commands.status(), CommandStatus::default(), "a report may come");
        let (outcome, took) = (Outcome::Deferred, Duration::from_secs(30));
        let message = String::new();
        commands.reported(Ended {
            command: command(8, Verb::Del),
            outcome,
            found_nothing: false,
            code: None,
            message,
            took,
            ended_unix_ms: 1,
        });
        commands.settle(Duration::ZERO);
        let status = commands.status();
        assert_eq!((status.succeeded, status.failed, status.deferred), (0, 1, 1));
        let last = status.last_failure.expect("a failure");
        assert_eq!(
            (last.pod_name.as_str(), last.message.as_str()),
            ("web-0", "the caller went away before the answer")
        );
    }

    #[test]
    fn an_answer_that_ends_nothing_is_not_counted() {
        let commands = commands();
        commands.begin(command(1, Verb::Add), Duration::ZERO).pass();
        commands.begin(command(1, Verb::Add), Duration::ZERO).end(Outcome::Success, None, String::new());
        assert_eq!(commands.status(), CommandStatus { succeeded: 1, ..CommandStatus::default() });
    }

    #[test]
    fn a_full_exporter_is_counted_and_blocks_nobody() {
        let (sender, mut queue) = mpsc::channel(1);
        let metrics = Arc::new(CommandMetrics::default());
        let commands = Arc::new(Commands::new(Mode::Own, Arc::clone(&metrics), Some(sender)));
        for id in 0..3 {
            commands.begin(command(id, Verb::Del), Duration::ZERO).end(Outcome::Success, None, String::new());
        }
        assert_eq!(queue.try_recv().map(|ended| ended.command.id), Ok(0));
        assert!(queue.try_recv().is_err());
        assert_eq!((metrics.outcomes(), metrics.losses(Loss::Export)), ([3, 0, 0], 2));
    }

    #[test]
    fn not_more_than_so_many_wait_for_a_report() {
        let commands = commands();
        for id in 0..=MAX_ABANDONED as u64 {
            drop(commands.begin(command(id, Verb::Add), Duration::ZERO));
        }
        assert_eq!(commands.status().failed, 1, "the oldest is counted at once");
    }
}
