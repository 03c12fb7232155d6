//! Supervises an Envoy process.

use std::{
    future::Future,
    io,
    os::{fd::OwnedFd, unix::process::ExitStatusExt},
    process::{Child, ExitStatus},
    sync::Arc,
    time::{Duration, SystemTime},
};

use rustix::process::Signal;
use tokio::time::Instant;

use super::{Envoy, EnvoyError, output};
use crate::{
    process::{Process, ProcessId},
    proxy::{Proxy, Shared},
};

const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(30);
/// Run time that resets the backoff.
const STEADY: Duration = Duration::from_secs(60);
/// Time between SIGTERM and SIGKILL.
const GRACE: Duration = Duration::from_secs(5);

/// Checks, one per second. A healthy Envoy connects within a second.
const STUCK: u32 = 10;

struct Running {
    process: Arc<Process>,
    child: Option<(Child, OwnedFd)>,
}

impl Envoy {
    /// Takes over or starts Envoy, until `shutdown` resolves. Kills a stuck Envoy, and restarts an ended one after 100
    /// ms, doubling up to 30 s. Afterwards Envoy keeps running, unless it [ends with the
    /// agent](Envoy::ends_with_agent).
    pub async fn supervise(&self, proxy: &Proxy, shutdown: impl Future<Output = ()> + Send) {
        let shared = Arc::clone(&proxy.shared);
        proxy.serve_only_supervised();
        tokio::pin!(shutdown);
        let mut backoff = FIRST_BACKOFF;
        loop {
            let began = Instant::now();
            // A launch is never cancelled: it does not wait.
            let started = tokio::select! {
                biased;
                () = &mut shutdown => break,
                started = self.take_over_or_start(&shared) => started,
            };
            let failure = match started {
                Ok(running) => {
                    on_running(&shared, running.process.id);
                    let process = Arc::clone(&running.process);
                    let ended = ended(running);
                    tokio::pin!(ended);
                    tokio::select! {
                        failure = &mut ended => failure,
                        () = &mut shutdown => break,
                        () = is_stuck(&shared) => match process.signal(Signal::KILL) {
                            Ok(()) => format!("it did not answer for {STUCK} s: {}", ended.await),
                            Err(error) => format!("it does not answer and cannot be killed: {error}"),
                        },
                    }
                }
                Err(error) => error.to_string(),
            };
            if began.elapsed() >= STEADY {
                backoff = FIRST_BACKOFF;
            }
            tracing::warn!(failure, backoff_ms = backoff.as_millis(), "Envoy does not run; it is started again");
            on_failure(&shared, failure);
            tokio::select! {
                () = tokio::time::sleep(backoff) => {}
                () = &mut shutdown => break,
            }
            backoff = MAX_BACKOFF.min(backoff.saturating_mul(2));
        }
        if self.ends_with_agent
            && let Err(error) = self.stop().await
        {
            tracing::warn!(%error, "Envoy goes on");
        }
    }

    /// Ends all Envoys that an agent started with this directory: SIGTERM, after 5 s SIGKILL. Returns their numbers;
    /// takes ownership of the admin directory.
    ///
    /// # Errors
    /// The processes could not be listed, or one could not be ended.
    pub async fn stop(&self) -> Result<Vec<i32>, EnvoyError> {
        let living = self.living()?;
        end_all(&living).await?;
        self.take_back()?;
        Ok(living.iter().map(|process| process.id.pid).collect())
    }

    /// Process numbers of the living Envoys of this directory.
    ///
    /// # Errors
    /// The processes could not be listed.
    pub fn pids(&self) -> Result<Vec<i32>, EnvoyError> {
        Ok(self.living()?.iter().map(|process| process.id.pid).collect())
    }

    fn living(&self) -> Result<Vec<Process>, EnvoyError> {
        let mut living: Vec<_> = self.noted()?.into_iter().collect();
        for process in self.marked()? {
            if living.iter().all(|other| other.id != process.id) {
                living.push(process);
            }
        }
        Ok(living)
    }

    async fn take_over_or_start(&self, shared: &Shared) -> Result<Running, EnvoyError> {
        let noted = self.noted()?;
        let mut strays = self.marked()?;
        strays.retain(|stray| noted.as_ref().is_none_or(|process| process.id != stray.id));
        for stray in &strays {
            tracing::warn!(pid = stray.id.pid, "an Envoy of an earlier agent, whose file was lost, is ended");
        }
        end_all(&strays).await?;
        if let Some(process) = noted {
            if self.settings_are_current() {
                tracing::info!(pid = process.id.pid, "Envoy runs already");
                // Removals wait for it even before it connects: it can have an earlier agent's listeners.
                let process = Arc::new(process);
                shared.on_process(Arc::clone(&process));
                return Ok(Running { process, child: None });
            }
            tracing::info!(pid = process.id.pid, "Envoy runs with other settings; it is replaced");
            self.stop().await?;
        }
        self.prepare_to_launch()?;
        let (mut child, output) = self.launch()?;
        let pid = i32::try_from(child.id()).unwrap_or(i32::MAX);
        let watched = Process::open(pid).map_err(|source| EnvoyError::Process { operation: "watch", pid, source });
        match watched.and_then(|process| self.note(&process).map(|()| process)) {
            Ok(process) => Ok(Running { process: Arc::new(process), child: Some((child, output)) }),
            Err(error) => {
                // No later agent would find it.
                if let Err(source) = child.kill().and_then(|()| child.wait()) {
                    tracing::warn!(error = %source, pid, "an Envoy that cannot be watched goes on");
                }
                Err(error)
            }
        }
    }
}

async fn end_all(processes: &[Process]) -> Result<(), EnvoyError> {
    futures::future::join_all(processes.iter().map(end)).await.into_iter().collect()
}

async fn end(process: &Process) -> Result<(), EnvoyError> {
    let pid = process.id.pid;
    let failed = |operation| move |source| EnvoyError::Process { operation, pid, source };
    process.signal(Signal::TERM).map_err(failed("end"))?;
    match tokio::time::timeout(GRACE, process.ended()).await {
        Ok(result) => result.map_err(failed("wait for")),
        Err(_) => {
            process.signal(Signal::KILL).map_err(failed("kill"))?;
            let ended = tokio::time::timeout(GRACE, process.ended()).await;
            ended
                .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
                .map_err(failed("wait for the end of the killed"))
        }
    }
}

/// A stuck Envoy gets no rule changes.
async fn is_stuck(shared: &Shared) {
    // Not elapsed time: this process can have been stopped.
    let mut looks = 0;
    while looks < STUCK {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let state = shared.lock();
        looks = if state.streams > 0 || state.closed { 0 } else { looks + 1 };
    }
}

async fn ended(running: Running) -> String {
    let Running { process, child } = running;
    let Some((mut child, output)) = child else {
        return match process.ended().await {
            Ok(()) => "it ended".to_owned(),
            Err(error) => format!("cannot watch it: {error}"),
        };
    };
    // Not the end of the output: a child of Envoy can keep it open.
    let printed = output::log(output, child.id());
    tokio::pin!(printed);
    let (result, last) = tokio::select! {
        // The output is already in the pipe.
        result = process.ended() => (result, tokio::time::timeout(FIRST_BACKOFF, printed).await.unwrap_or_default()),
        last = &mut printed => (process.ended().await, last),
    };
    let how = match result.and_then(|()| reap(&mut child)) {
        Ok(Some(status)) => how(status),
        Ok(None) => "it ended".to_owned(),
        Err(error) => format!("cannot watch it: {error}"),
    };
    last.map_or_else(|| how.clone(), |line| format!("{how}; it last said: {line}"))
}

fn reap(child: &mut Child) -> io::Result<Option<ExitStatus>> {
    child.try_wait()
}

fn how(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("it ended with status {code}"),
        (None, Some(signal)) => format!("signal {signal} ended it"),
        (None, None) => "it ended".to_owned(),
    }
}

fn on_running(shared: &Shared, process: ProcessId) {
    let mut state = shared.lock();
    let supervised = &mut state.supervised;
    (supervised.running, supervised.waiting, supervised.since) = (Some(process), false, SystemTime::now());
}

fn on_failure(shared: &Shared, failure: String) {
    let mut state = shared.lock();
    let supervised = &mut state.supervised;
    (supervised.running, supervised.waiting, supervised.since) = (None, true, SystemTime::now());
    supervised.restarts = supervised.restarts.saturating_add(1);
    supervised.last_error = Some(failure);
}

#[cfg(test)]
mod tests {
    use std::{os::unix::process::CommandExt as _, process::Command};

    use super::*;

    fn envoy(directory: &tempfile::TempDir) -> Envoy {
        let directory = directory.path().join("envoy");
        Envoy { program: "/nowhere/envoy".into(), directory, user: None, threads: 1, ends_with_agent: false }
    }

    /// A stopped process: only SIGKILL ends it.
    struct Stray(Child);

    impl Stray {
        async fn start(envoy: &Envoy) -> Self {
            let stray = Self(Command::new("sleep").arg0(envoy.mark()).arg("600").spawn().expect("sleep"));
            stray.signal(nix::sys::signal::Signal::SIGSTOP);
            // A signal before the stop would end it.
            while !stray.line("State:").starts_with('T') {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            stray
        }

        fn signal(&self, signal: nix::sys::signal::Signal) {
            let pid = nix::unistd::Pid::from_raw(i32::try_from(self.0.id()).expect("a pid"));
            nix::sys::signal::kill(pid, signal).expect("a signal");
        }

        /// A line of proc_pid_status(5).
        fn line(&self, name: &str) -> String {
            let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id())).expect("its status");
            status.lines().find_map(|line| line.strip_prefix(name)).expect("a line").trim().to_owned()
        }

        async fn is_asked_to_end(&self) {
            let sigterm = 1 << (nix::libc::SIGTERM - 1);
            while u64::from_str_radix(&self.line("ShdPnd:"), 16).expect("a mask") & sigterm == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    }

    impl Drop for Stray {
        fn drop(&mut self) {
            self.0.kill().and_then(|()| self.0.wait()).expect("it ends");
        }
    }

    #[tokio::test]
    async fn strays_are_asked_to_end_all_at_once() {
        let directory = tempfile::tempdir().expect("a directory");
        let envoy = envoy(&directory);
        let mut strays = [Stray::start(&envoy).await, Stray::start(&envoy).await, Stray::start(&envoy).await];
        let stop = envoy.stop();
        tokio::pin!(stop);
        let asked = futures::future::join_all(strays.iter().map(Stray::is_asked_to_end));
        tokio::select! {
            ended = &mut stop => panic!("it ended before each was asked: {ended:?}"),
            _ = asked => {}
        }
        for stray in &mut strays {
            assert!(stray.0.try_wait().expect("its state").is_none(), "it is stopped");
            stray.signal(nix::sys::signal::Signal::SIGCONT);
        }
        assert_eq!(stop.await.expect("they end").len(), 3);
    }

    #[tokio::test]
    async fn a_shutdown_does_not_wait_for_strays() {
        let directory = tempfile::tempdir().expect("a directory");
        let envoy = envoy(&directory);
        let mut stray = Stray::start(&envoy).await;
        let (proxy, _records) = Proxy::new(1);
        envoy.supervise(&proxy, stray.is_asked_to_end()).await;
        assert!(stray.0.try_wait().expect("its state").is_none(), "the agent waited until it was killed");
    }

    #[tokio::test(start_paused = true)]
    async fn each_failure_doubles_the_time_until_the_next_start() {
        let directory = tempfile::tempdir().expect("a directory");
        let envoy = envoy(&directory);
        let (proxy, _records) = Proxy::new(1);
        let began = Instant::now();
        let starts = async {
            let (mut at, mut backoff) = (Duration::ZERO, FIRST_BACKOFF);
            for failed in 1..14 {
                tokio::time::sleep_until(began + at + Duration::from_millis(50)).await;
                assert_eq!(proxy.status().restarts, failed, "{at:?}");
                at += backoff;
                backoff = (backoff * 2).min(MAX_BACKOFF);
            }
            assert_eq!(at, Duration::from_millis(171_100), "25.6 s is the last that is doubled");
        };
        envoy.supervise(&proxy, starts).await;
    }
}
