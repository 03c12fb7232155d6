//! Launches, probes and relaunches the health endpoint.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc, time::Duration};

use tokio::{
    sync::mpsc,
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;
use wharf_api::{HealthState, LogStatus, NodeHealth, Relaunch};
use wharf_core::{
    bandwidth::Bandwidth,
    endpoint::EndpointRecord,
    finding::{EndpointProblem, Problem},
    ids::Attachment,
    plan::DeleteOptions,
    sources::SourcePrefixes,
    state::retry_delay_ms,
};
use wharf_kit::clock;

use super::{
    address::{self, Kept},
    error::HealthError,
    host::{Host, Responder as _},
    judge::{Judge, Verdict},
    probe,
    window::Windows,
};
use crate::{
    endpoint::{
        create::{self, CreateSpec},
        delete,
    },
    findings,
    node::{
        endpoint::Handle,
        health::{Asker, Health, attachment},
        lifecycle::Lifecycle,
        prepared::Prepared,
    },
};

const CONTROLLER: &str = "health-endpoint";
const CREATE_BOUND: Duration = Duration::from_secs(20);
const OBSERVE_BOUND: Duration = Duration::from_secs(2);
const PREPARED_BOUND: Duration = Duration::from_secs(10);

struct Running<P> {
    process: P,
    handle: Handle,
    record: EndpointRecord,
    windows: Windows,
    judge: Judge,
}

struct Controller<H: Host> {
    life: Arc<Lifecycle>,
    health: Arc<Health>,
    host: H,
    attachment: Attachment,
    running: Option<Running<H::Process>>,
    fruitless: u32,
    not_before: Instant,
    last_error: String,
}

/// Runs until the agent stops. The addresses stay leased.
pub async fn run(life: Arc<Lifecycle>, health: Arc<Health>, host: impl Host) {
    let inbox = health.take_inbox();
    let (Some(inbox), Ok(attachment)) = (inbox, attachment()) else { return };
    health.set_on(true);
    await_prepared(&life.endpoints.prepared, &life.tasks.stop).await;
    let mut controller = Controller {
        host,
        attachment,
        running: None,
        fruitless: 0,
        not_before: Instant::now(),
        last_error: String::new(),
        life,
        health,
    };
    controller.serve(inbox).await;
    controller.shut_down().await;
}

/// The first launch must not use the verifier while a create may need it.
async fn await_prepared(prepared: &Prepared, stop: &CancellationToken) {
    let ready = async {
        while prepared.fill().0 == 0 && prepared.fill().1 > 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::select! {
        () = stop.cancelled() => {}
        _ = timeout(PREPARED_BOUND, ready) => {}
    }
}

impl<H: Host> Controller<H> {
    async fn serve(&mut self, mut inbox: mpsc::Receiver<Asker>) {
        let interval = self.life.config.health_interval;
        let stop = self.life.tasks.stop.clone();
        let mut askers: Vec<Asker> = Vec::new();
        while !stop.is_cancelled() {
            let run = self.life.tasks.controllers.begin(CONTROLLER);
            let result = self.round().await;
            run.end(result);
            for asker in askers.drain(..) {
                asker.send(()).ok(); // the asker may have gone
            }
            let next = match &self.running {
                Some(_) => Instant::now() + interval,
                None => self.not_before,
            };
            let wait = next.saturating_duration_since(Instant::now());
            self.life.tasks.controllers.plan(CONTROLLER, interval, wait);
            let ended = async {
                match &self.running {
                    Some(running) => drop(running.process.ended().wait_for(Option::is_some).await),
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = stop.cancelled() => {}
                asker = inbox.recv() => {
                    askers.extend(asker);
                    while let Ok(more) = inbox.try_recv() {
                        askers.push(more);
                    }
                }
                () = ended => {}
                () = tokio::time::sleep_until(next) => {}
            }
        }
        self.health.set_on(false);
    }

    async fn round(&mut self) -> Result<(), HealthError> {
        let amiss = match self.look().await {
            Look::Gone(why) => {
                self.take_down(why).await;
                None
            }
            Look::There(amiss) => amiss,
            Look::Nothing => None,
        };
        if self.running.is_none() {
            if Instant::now() < self.not_before {
                return Err(HealthError::Down(self.last_error.clone()));
            }
            self.launch().await?;
            return self.probe(None).await;
        }
        self.probe(amiss).await
    }

    async fn look(&self) -> Look {
        let Some(running) = &self.running else { return Look::Nothing };
        if let Some(how) = running.process.ended().borrow().clone() {
            return Look::Gone(format!("its process {} is gone: {how}", running.process.pid()));
        }
        let there = self.life.endpoints.registry.get(running.handle.id).filter(|h| h.epoch == running.handle.epoch);
        if there.is_none_or(|h| h.cancel.is_cancelled()) {
            return Look::Gone(format!("its endpoint {} was deleted", running.handle.id));
        }
        match timeout(OBSERVE_BOUND, self.life.kernel.observe_endpoint(&running.record)).await {
            Ok(Ok(problems)) => {
                let id = running.handle.id;
                let words = |p: &EndpointProblem| findings::in_words(&Problem::Endpoint(id, p.clone()));
                match problems.iter().find(|p| p.is_of_a_lost_link()) {
                    Some(lost) => Look::Gone(words(lost)),
                    None => {
                        // A relaunch would not help against a foreign route.
                        let own = |p: &&EndpointProblem| !matches!(p, EndpointProblem::NodeRouteShadowed { .. });
                        Look::There(Some(problems.iter().filter(own).map(words).collect()))
                    }
                }
            }
            Ok(Err(error)) => {
                tracing::debug!("health endpoint: {error}");
                Look::There(None)
            }
            Err(_) => Look::There(None),
        }
    }

    async fn probe(&mut self, amiss: Option<Vec<String>>) -> Result<(), HealthError> {
        let life = Arc::clone(&self.life);
        let Some(running) = &mut self.running else { return Err(HealthError::Down(self.last_error.clone())) };
        let addresses: Vec<IpAddr> = running.record.addresses().collect();
        let probed = tokio::select! {
            () = life.tasks.stop.cancelled() => return Ok(()),
            probed = self.host.probe(&running.process, &addresses) => probed,
        };
        let answered = probed.iter().filter(|p| matches!(p.outcome, probe::Outcome::Answered(_))).count();
        let verdict = running.judge.round(&probed, amiss.as_deref());
        running.windows.add(probed);
        let (windows, failed) = (running.windows.status(), running.judge.failed);
        let (state, message) = match &verdict {
            Verdict::Well => (HealthState::Ok, format!("{answered} of {answered} probes answered")),
            Verdict::Wait(why) if self.fruitless > 0 => {
                (HealthState::Down, format!("relaunched without success: {why}"))
            }
            Verdict::Wait(why) => {
                let rounds = if failed == 1 { "one round" } else { "two rounds in a row" };
                (HealthState::Degraded, format!("{rounds} failed: {why}"))
            }
            Verdict::Foreign(why) => {
                let means = "its own endpoint is as it should be, so it is not relaunched";
                (HealthState::WrongAnswer, format!("{why}; {means}; find who else has the address"))
            }
            Verdict::Relaunch(why) => (HealthState::Down, why.clone()),
        };
        self.tell(state, message.clone(), |h| {
            h.last_round_unix_ms = Some(clock::unix_ms());
            h.rounds += 1;
            h.failed_rounds = failed;
            h.probes = windows;
        });
        match verdict {
            Verdict::Well => {
                self.fruitless = 0;
                Ok(())
            }
            Verdict::Wait(_) | Verdict::Foreign(_) => Err(HealthError::Down(message)),
            Verdict::Relaunch(why) => {
                if self.fruitless > 0 && Instant::now() < self.not_before {
                    return Err(HealthError::Down(message));
                }
                self.take_down(why).await;
                self.launch().await?;
                Err(HealthError::Down(message))
            }
        }
    }

    async fn take_down(&mut self, why: String) {
        let Some(running) = self.running.take() else { return };
        let id = running.handle.id;
        tracing::warn!(endpoint = id.get(), epoch = running.handle.epoch.0, "health endpoint: relaunched: {why}");
        running.handle.shared.log(LogStatus::Failure, "health", format!("deleted to be relaunched: {why}"));
        self.life.telemetry.monitor.agent(Some(id), "health-endpoint-relaunch", why.clone());
        self.tell(HealthState::Down, format!("relaunched: {why}"), |h| {
            (h.endpoint, h.pid) = (None, None);
            h.last_relaunch = Some(Relaunch { unix_ms: clock::unix_ms(), reason: why.clone() });
        });
        self.last_error = why;
        running.process.end().await;
        self.remove(running.handle).await;
        self.not_before = self.pause();
        self.fruitless = self.fruitless.saturating_add(1);
    }

    fn pause(&self) -> Instant {
        Instant::now() + Duration::from_millis(retry_delay_ms(self.fruitless, rand::random()))
    }

    async fn remove(&self, handle: Handle) {
        let result =
            delete::delete(&self.life, vec![handle], DeleteOptions { no_ip_release: true }, delete::Answer::Finished)
                .await;
        for e in result.errors {
            tracing::warn!(endpoint = e.endpoint, step = e.step, "health endpoint: delete: {}", e.message);
        }
    }

    async fn launch(&mut self) -> Result<(), HealthError> {
        if self.life.tasks.stop.is_cancelled() {
            return Err(HealthError::Stopping);
        }
        if Instant::now() < self.not_before {
            return Err(HealthError::Down(self.last_error.clone()));
        }
        match self.try_launch().await {
            Ok(running) => {
                let (id, pid) = (running.handle.id, running.process.pid());
                let addresses: Vec<String> = running.record.addresses().map(|a| a.to_string()).collect();
                let what = format!("process {pid} at {}", addresses.join(", "));
                tracing::info!(endpoint = id.get(), pid, "health endpoint: launched at {}", addresses.join(", "));
                running.handle.shared.log(LogStatus::Ok, "health", format!("launched: {what}"));
                self.life.telemetry.monitor.agent(Some(id), "health-endpoint-launched", what);
                self.health.update(|h| {
                    (h.endpoint, h.pid) = (Some(id.get()), Some(pid));
                    (h.ipv4, h.ipv6) = (running.record.ipv4, running.record.ipv6);
                    h.launches += 1;
                    h.failed_rounds = 0;
                });
                self.running = Some(running);
                Ok(())
            }
            Err(why) => {
                self.fruitless = self.fruitless.saturating_add(1);
                self.not_before = self.pause();
                let why = format!("launch: {why}");
                if self.last_error != why {
                    tracing::warn!("health endpoint: {why}; it is tried again");
                    self.life.telemetry.monitor.agent(None, "health-endpoint-launch-failed", why.clone());
                }
                self.last_error.clone_from(&why);
                self.tell(HealthState::Down, format!("{why}; it is tried again"), |h| {
                    h.failed_launches += 1;
                    h.probes.clear();
                });
                Err(HealthError::Down(why))
            }
        }
    }

    async fn try_launch(&self) -> Result<Running<H::Process>, HealthError> {
        let life = &self.life;
        let old = || life.endpoints.registry.by_interface(&self.attachment.container_id, &self.attachment.ifname);
        if let Some(old) = old() {
            self.remove(old).await;
        }
        if let Some(old) = old() {
            return Err(HealthError::Before(old.id));
        }
        let kept = address::lease(life, &self.health).await?;
        let process = self.host.launch(&life.config.node_name).await?;
        let launched = self.attach(kept, &process).await;
        match launched {
            Ok((handle, record)) => {
                Ok(Running { process, handle, record, windows: Windows::default(), judge: Judge::default() })
            }
            Err(why) => {
                process.end().await;
                Err(why)
            }
        }
    }

    async fn attach(&self, kept: Kept, process: &H::Process) -> Result<(Handle, EndpointRecord), HealthError> {
        let spec = CreateSpec {
            attachment: self.attachment.clone(),
            netns: process.netns_path(),
            pool: None,
            mtu: None,
            mac: None,
            ips: kept.addresses(),
            labels: BTreeSet::from([super::label()]),
            pod_name: None,
            pod_namespace: None,
            runtime: None,
            ports: Vec::new(),
            masquerade: None,
            external: None,
            routes: None,
            bandwidth: Bandwidth::default(),
            sources: SourcePrefixes::default(),
            deadline: Instant::now() + CREATE_BOUND,
        };
        let made = create::create(&self.life, spec).await.map_err(|e| HealthError::Create(Box::new(e)))?;
        let there = self.life.endpoints.registry.by_interface(&self.attachment.container_id, &self.attachment.ifname);
        let handle = there.filter(|h| h.epoch.0 == made.epoch).ok_or(HealthError::Deleted)?;
        let record = handle.shared.read(|v| v.record.clone());
        if process.is_in(&record.netns) {
            return Ok((handle, record));
        }
        self.remove(handle).await;
        Err(HealthError::AnotherProcess)
    }

    async fn shut_down(&mut self) {
        let Some(running) = self.running.take() else { return };
        running.process.end().await;
        self.remove(running.handle).await;
        self.tell(HealthState::Off, "the agent is stopping".to_owned(), |h| (h.endpoint, h.pid) = (None, None));
    }

    fn tell(&self, state: HealthState, message: String, more: impl FnOnce(&mut NodeHealth)) {
        let before = self.health.update(|h| {
            let before = h.state;
            if before != state {
                h.since_unix_ms = clock::unix_ms();
            }
            (h.state, h.message) = (state, message.clone());
            more(h);
            self.life.telemetry.metrics.health(h);
            before
        });
        if before == state {
            return;
        }
        let what = format!("{} -> {}: {message}", before.as_str(), state.as_str());
        self.life.telemetry.monitor.agent(None, "health", what);
        match state {
            HealthState::Ok => tracing::info!("health endpoint: ok: {message}"),
            HealthState::Degraded | HealthState::WrongAnswer => {
                tracing::warn!("health endpoint: {}: {message}", state.as_str());
            }
            HealthState::Down | HealthState::Off | HealthState::Starting => {}
        }
    }
}

enum Look {
    Nothing,
    Gone(String),
    /// Kernel findings, if observed.
    There(Option<Vec<String>>),
}
