//! Shims' reports: removed, then counted. A crash in between loses the removed reports.
//!
//! The watch precedes the listing, so no report is missed.

use std::{io, path::PathBuf, sync::Arc, time::Duration};

use futures::{FutureExt as _, StreamExt as _};
use inotify::{EventMask, Inotify, WatchMask};
use tokio_util::sync::CancellationToken;
use wharf_handover::report::{Entry, Report, Reports};
use wharf_kit::controller::Controllers;

use super::{Commands, Ended};
use crate::metrics::Loss;

/// Controller name.
pub const CONTROLLER: &str = "command-reports";
/// Finds reports of lost events.
const TICK: Duration = Duration::from_secs(10);
const WATCH_AGAIN: Duration = Duration::from_secs(3);
const PATIENCE: Duration = Duration::from_secs(10);
/// Age of an abandoned temporary file.
const LEFTOVER: Duration = Duration::from_secs(60);

/// Why reports do not arrive.
#[derive(Debug, thiserror::Error)]
pub enum ReportsError {
    /// File system error.
    #[error("{0} {path}: {2}", path = .1.display())]
    Io(&'static str, PathBuf, #[source] io::Error),
    /// Blocking task panicked or cancelled.
    #[error("take reports from {path}: {1}", path = .0.display())]
    Task(PathBuf, #[source] tokio::task::JoinError),
    /// Directory removed or moved.
    #[error("watch {path}: the directory was removed or moved", path = .0.display())]
    Moved(PathBuf),
}

/// Counts reports until `stop`, then commands without one.
pub async fn watch(commands: Arc<Commands>, reports: Reports, controllers: Controllers, stop: CancellationToken) {
    while let Err(why) = watch_until(&commands, &reports, &controllers, &stop).await {
        controllers.record(CONTROLLER, Err(&why));
        tracing::warn!(controller = CONTROLLER, "{why}; it is set up again");
        tokio::select! {
            () = stop.cancelled() => break,
            () = tokio::time::sleep(WATCH_AGAIN) => {}
        }
    }
    commands.settle(Duration::ZERO);
}

/// `stop` ends the waits alone: reports that were removed are counted.
async fn watch_until(
    commands: &Commands,
    reports: &Reports,
    controllers: &Controllers,
    stop: &CancellationToken,
) -> Result<(), ReportsError> {
    let path = reports.path();
    blocking(reports, "make directory", Reports::ensure_directory).await?;
    let failed = |e| ReportsError::Io("watch", path.to_owned(), e);
    let inotify = Inotify::init().map_err(failed)?;
    let wanted = WatchMask::MOVED_TO | WatchMask::DELETE_SELF | WatchMask::MOVE_SELF | WatchMask::ONLYDIR;
    inotify.watches().add(path, wanted).map_err(failed)?;
    let mut events = inotify.into_event_stream([0_u8; 4096]).map_err(failed)?;
    loop {
        let run = controllers.begin(CONTROLLER);
        let taken = take(commands, reports).await;
        let result = taken.as_ref().map(drop);
        run.end(result);
        controllers.plan(CONTROLLER, TICK, TICK);
        taken?;
        let event = tokio::select! {
            () = stop.cancelled() => return Ok(()),
            event = tokio::time::timeout(TICK, events.next()) => event,
        };
        let Ok(event) = event else { continue };
        let mut pending = Some(event);
        while let Some(event) = pending {
            let event = event.ok_or_else(|| ReportsError::Moved(path.to_owned()))?.map_err(failed)?;
            if event.mask.intersects(EventMask::IGNORED | EventMask::DELETE_SELF | EventMask::MOVE_SELF) {
                return Err(ReportsError::Moved(path.to_owned()));
            }
            pending = events.next().now_or_never();
        }
    }
}

/// Counts and removes all reports; returns their number.
pub async fn take(commands: &Commands, reports: &Reports) -> Result<usize, ReportsError> {
    let entries = blocking(reports, "take reports from", |reports| {
        reports.sweep(LEFTOVER)?;
        reports.take()
    })
    .await?;
    for entry in &entries {
        tell(commands, entry);
    }
    commands.settle(PATIENCE);
    Ok(entries.len())
}

fn tell(commands: &Commands, entry: &Entry) {
    let report = match &entry.content {
        Ok(report) => report,
        Err(why) => {
            commands.metrics().lost(Loss::Unusable, 1);
            tracing::warn!(file = %entry.name.to_string_lossy(), "report of a CNI command: {why}; it is removed");
            return;
        }
    };
    let report = report.clone();
    let Report { command, outcome, found_nothing, code, message, duration_us, ended_unix_ms, dropped, .. } = report;
    if dropped > 0 {
        commands.metrics().lost(Loss::Full, dropped);
        tracing::warn!(dropped, "reports of CNI commands were dropped by the plugin, because too many waited");
    }
    let (took, code) = (Duration::from_micros(duration_us), code.map(|code| code.to_string()));
    commands.reported(Ended { command, outcome, found_nothing, code, message, took, ended_unix_ms });
}

async fn blocking<T: Send + 'static>(
    reports: &Reports,
    operation: &'static str,
    work: impl FnOnce(&Reports) -> io::Result<T> + Send + 'static,
) -> Result<T, ReportsError> {
    let owned = reports.clone();
    match tokio::task::spawn_blocking(move || work(&owned)).await {
        Ok(result) => result.map_err(|e| ReportsError::Io(operation, reports.path().to_owned(), e)),
        Err(error) => Err(ReportsError::Task(reports.path().to_owned(), error)),
    }
}

#[cfg(test)]
mod tests {
    use wharf_handover::{
        command::Verb,
        report::{Outcome, VERSION},
    };

    use super::{
        super::tests::{command, commands},
        *,
    };

    fn report(id: u64, outcome: Outcome, dropped: u64) -> Report {
        Report {
            version: VERSION,
            command: command(id, Verb::Del),
            outcome,
            found_nothing: false,
            code: (outcome == Outcome::Failure).then_some(11),
            message: String::new(),
            duration_us: 1_500,
            ended_unix_ms: id,
            dropped,
        }
    }

    #[tokio::test]
    async fn reports_are_counted_once_and_removed() {
        let dir = tempfile::tempdir().expect("directory");
        let (reports, commands) = (Reports::new(dir.path()), commands());
        reports.ensure_directory().expect("made");
        for (id, outcome, dropped) in [(1, Outcome::Deferred, 0), (2, Outcome::Failure, 3), (3, Outcome::Success, 0)] {
            reports.put(&report(id, outcome, dropped)).expect("put");
        }
        std::fs::write(reports.path().join("junk"), "{").expect("written");
        drop(commands.begin(command(4, Verb::Del), Duration::ZERO));
        reports.put(&report(4, Outcome::Failure, 0)).expect("put");
        assert_eq!(take(&commands, &reports).await.expect("taken"), 5);
        assert_eq!(take(&commands, &reports).await.expect("taken"), 0);
        assert_eq!(commands.metrics().outcomes(), [1, 2, 1]);
        assert_eq!((commands.metrics().losses(Loss::Full), commands.metrics().losses(Loss::Unusable)), (3, 1));
        assert_eq!(std::fs::read_dir(reports.path()).expect("there").count(), 0);
    }

    #[tokio::test]
    async fn a_stop_counts_the_reports_that_were_removed() {
        for n in 1..=20 {
            let dir = tempfile::tempdir().expect("directory");
            let (reports, commands, stop) = (Reports::new(dir.path()), commands(), CancellationToken::new());
            reports.ensure_directory().expect("made");
            reports.put(&report(n, Outcome::Success, 0)).expect("put");
            let watched =
                tokio::spawn(watch(Arc::clone(&commands), reports.clone(), Controllers::default(), stop.clone()));
            while commands.metrics().outcomes()[0] == 0 {
                // Without an await in between, the removal is seen before the watch can count.
                if std::fs::read_dir(reports.path()).expect("there").count() == 0 {
                    stop.cancel();
                    break;
                }
                tokio::task::yield_now().await;
            }
            stop.cancel();
            watched.await.expect("ended");
            assert_eq!(commands.metrics().outcomes(), [1, 0, 0]);
        }
    }

    #[tokio::test]
    async fn a_directory_that_is_removed_is_made_and_watched_again() {
        let dir = tempfile::tempdir().expect("directory");
        let (reports, commands, stop) = (Reports::new(dir.path()), commands(), CancellationToken::new());
        let watched = tokio::spawn(watch(Arc::clone(&commands), reports.clone(), Controllers::default(), stop.clone()));
        for n in 1..=2_u64 {
            let arrives = async {
                while reports.put(&report(n, Outcome::Success, 0)).is_err() {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                while commands.metrics().outcomes()[0] < n {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            tokio::time::timeout(TICK * 4 / 5, arrives).await.expect("the report arrives");
            std::fs::remove_dir_all(reports.path()).expect("removed");
        }
        stop.cancel();
        watched.await.expect("ended");
    }
}
