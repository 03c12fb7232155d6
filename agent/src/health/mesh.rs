//! Probes of the cluster's other nodes and their health endpoints.
//!
//! A sweep probes each node once, with starts spread over the interval. Nodes per sweep, start rate and concurrent
//! nodes are bounded; with more nodes, the next sweep continues.

use std::{
    collections::{BTreeMap, VecDeque},
    convert::Infallible,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    ops::Bound,
    sync::Arc,
    time::Duration,
};

use futures::{StreamExt as _, future::BoxFuture, stream::FuturesUnordered};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;
use wharf_api::{HealthState, NodeHealth, ProbeKind};
use wharf_cluster::routes;
use wharf_kit::clock;

use super::{
    host::ThisHost,
    probe::{self, Expected, Outcome, Probed},
    window::Windows,
};
use crate::{
    cluster::InForce,
    node::{
        health::{Health, PATIENCE, is_failing},
        lifecycle::Lifecycle,
    },
};

const CONTROLLER: &str = "health-mesh";
/// Nodes per sweep.
const MAX_OF_SWEEP: u32 = 500;
/// Minimum between the starts of two nodes.
const PACE: Duration = Duration::from_millis(10);
/// Concurrently probed nodes.
pub(super) const AT_ONCE: usize = 16;
/// Minimum between log lines about state changes.
const NEWS_PACE: Duration = Duration::from_secs(1);
const NAMED: usize = 4;
const NO_ADDRESS: &str = "this node's row has no address of its family";
const NO_CIDR: &str = "this node's row has no pod CIDR of its family";
const REFUSED: &str = "this node has no route to its network (`wharf cluster nodes`)";
/// Routes and rules come just after the first nodes.
const SETTLE: Duration = Duration::from_secs(1);

trait Prober: Sync {
    /// ICMP to each address, also TCP and HTTP to each address of the health endpoint.
    fn probe(&self, peer: &Peer) -> impl Future<Output = Vec<Probed>> + Send;
}

impl Prober for ThisHost {
    async fn probe(&self, peer: &Peer) -> Vec<Probed> {
        let of_health = probe::round(&peer.health, Expected::Name(&peer.name));
        let (mut probed, of_health) = tokio::join!(probe::echoes(&peer.addresses), of_health);
        probed.extend(of_health);
        probed
    }
}

trait Sink: Send + Sync {
    fn states(&self, states: &BTreeMap<HealthState, u64>);

    /// `is_well`: all states changed to ok.
    fn news(&self, is_well: bool, text: String);

    /// `wait`: until the next sweep.
    fn swept(&self, interval: Duration, wait: Duration);
}

impl Sink for Lifecycle {
    fn states(&self, states: &BTreeMap<HealthState, u64>) {
        self.telemetry.metrics.health_peers(states);
    }

    fn news(&self, is_well: bool, text: String) {
        if is_well {
            tracing::info!("health of other nodes: {text}");
        } else {
            tracing::warn!("health of other nodes: {text}");
        }
        self.telemetry.monitor.agent(None, "health", text);
    }

    fn swept(&self, interval: Duration, wait: Duration) {
        self.tasks.controllers.record(CONTROLLER, Ok::<(), Infallible>(()));
        self.tasks.controllers.plan(CONTROLLER, interval, wait);
    }
}

/// Probes the other nodes until the agent stops.
pub async fn run(life: Arc<Lifecycle>, health: Arc<Health>) {
    life.telemetry.metrics.health_peers(&BTreeMap::new());
    if life.network.cluster.file().is_none() && life.network.cluster.feed().is_none() {
        return;
    }
    let (nodes, stop) = (life.network.cluster.changes(), life.tasks.stop.clone());
    let (own, interval) = (life.config.node_name.clone(), life.config.health_interval);
    Mesh::new(own, interval, health, life).serve(&ThisHost, nodes, &stop).await;
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Peer {
    name: String,
    addresses: Vec<IpAddr>,
    health: Vec<IpAddr>,
    /// Addresses that are not probed, and why.
    skipped: Vec<(IpAddr, &'static str)>,
}

impl Peer {
    fn targets(&self) -> Vec<IpAddr> {
        self.addresses.iter().chain(&self.health).copied().collect()
    }

    fn ipv4(&self) -> Option<Ipv4Addr> {
        self.health.iter().find_map(|address| match address {
            IpAddr::V4(address) => Some(*address),
            IpAddr::V6(_) => None,
        })
    }

    fn ipv6(&self) -> Option<Ipv6Addr> {
        self.health.iter().find_map(|address| match address {
            IpAddr::V6(address) => Some(*address),
            IpAddr::V4(_) => None,
        })
    }
}

/// This node cannot reach a family that its own row lacks.
fn peers(cluster: &InForce, own: &str) -> BTreeMap<String, Peer> {
    let nodes = &cluster.nodes;
    let row = nodes.get(own);
    let has_address = |v6: bool| row.is_none_or(|row| row.addresses.iter().any(|a| a.is_ipv6() == v6));
    let has_cidr = |v6: bool| {
        row.is_none_or(|row| row.pod_cidrs.is_empty() || row.pod_cidrs.iter().any(|c| c.addr().is_ipv6() == v6))
    };
    let refused_cidrs = routes::refused(&cluster.destinations);
    let is_refused = |address: &IpAddr| refused_cidrs.iter().any(|cidr| cidr.contains(address));
    let peer = |name: &str, addresses: &[IpAddr], health: &[IpAddr]| {
        let (addresses, far): (Vec<IpAddr>, Vec<IpAddr>) =
            addresses.iter().copied().partition(|a| has_address(a.is_ipv6()));
        let (health, refused): (Vec<IpAddr>, Vec<IpAddr>) = health.iter().copied().partition(|a| !is_refused(a));
        let (health, far_health): (Vec<IpAddr>, Vec<IpAddr>) = health.into_iter().partition(|a| has_cidr(a.is_ipv6()));
        let why = |addresses: Vec<IpAddr>, why| addresses.into_iter().map(move |address| (address, why));
        let skipped = why(far, NO_ADDRESS).chain(why(refused, REFUSED)).chain(why(far_health, NO_CIDR)).collect();
        Peer { name: name.to_owned(), addresses, health, skipped }
    };
    let others = nodes.iter().filter(|node| node.name != own);
    others.map(|node| (node.name.clone(), peer(&node.name, &node.addresses, &node.health_addresses))).collect()
}

#[derive(Debug)]
struct Watched {
    peer: Peer,
    windows: Windows,
    rounds: u64,
    failed: u64,
    silent: u64,
}

impl Watched {
    fn new(peer: Peer) -> Self {
        Self { peer, windows: Windows::default(), rounds: 0, failed: 0, silent: 0 }
    }

    fn judge(&mut self, probed: &[Probed]) -> (HealthState, String) {
        self.rounds += 1;
        let failures: Vec<String> = probed.iter().filter_map(Probed::failure).collect();
        let answered = probed.iter().filter(|p| matches!(p.outcome, Outcome::Answered(_))).count();
        if failures.is_empty() {
            (self.failed, self.silent) = (0, 0);
            if answered > 0 {
                return (HealthState::Ok, format!("{answered} of {answered} probes answered"));
            }
            let why = probed.iter().find_map(|p| match &p.outcome {
                Outcome::NotTried(why) => Some(format!("{} to {}: {why}", p.kind.as_str(), p.address)),
                _ => None,
            });
            return (HealthState::Degraded, format!("no probe is sent: {}", why.unwrap_or_default()));
        }
        self.failed += 1;
        self.silent = if answered == 0 { self.silent + 1 } else { 0 };
        let is_foreign = probed.iter().any(|p| matches!(p.outcome, Outcome::WrongAnswer(_)));
        let why = named(&failures);
        if is_foreign {
            let remedy = "find out who has the address, or correct the addresses of the node's row";
            (HealthState::WrongAnswer, format!("{why}; {remedy}"))
        } else if self.silent >= PATIENCE {
            (HealthState::Down, format!("no answer in {} rounds in a row: {why}", self.silent))
        } else {
            (HealthState::Degraded, format!("{} of {} probes failed: {why}", failures.len(), answered + failures.len()))
        }
    }
}

fn named(failures: &[String]) -> String {
    let shown = failures.iter().take(NAMED).map(String::as_str).collect::<Vec<_>>().join("; ");
    match failures.len().saturating_sub(NAMED) {
        0 => shown,
        more => format!("{shown}; and {more} more"),
    }
}

#[derive(Debug)]
struct News {
    not_before: Instant,
    changes: u64,
    states: BTreeMap<HealthState, u64>,
    last: String,
}

impl News {
    fn new(now: Instant) -> Self {
        Self { not_before: now, changes: 0, states: BTreeMap::new(), last: String::new() }
    }

    fn add(&mut self, name: &str, before: HealthState, after: HealthState, message: &str) {
        self.changes += 1;
        *self.states.entry(after).or_default() += 1;
        self.last = format!("node {name}: {} -> {}: {message}", before.as_str(), after.as_str());
    }

    fn take(&mut self, now: Instant) -> Option<(bool, String)> {
        if self.changes == 0 {
            return None;
        }
        let changes = std::mem::take(&mut self.changes);
        let (states, last) = (std::mem::take(&mut self.states), std::mem::take(&mut self.last));
        self.not_before = now + NEWS_PACE;
        let is_well = states.keys().all(|state| *state == HealthState::Ok);
        if changes == 1 {
            return Some((is_well, last));
        }
        let states: Vec<String> = states.iter().map(|(state, n)| format!("{n} to {}", state.as_str())).collect();
        Some((is_well, format!("{changes} changes ({}); the last one: {last}", states.join(", "))))
    }
}

struct Mesh<S> {
    own: String,
    interval: Duration,
    health: Arc<Health>,
    sink: Arc<S>,
    watched: BTreeMap<String, Watched>,
    after: String,
    news: News,
}

impl<S: Sink> Mesh<S> {
    fn new(own: String, interval: Duration, health: Arc<Health>, sink: Arc<S>) -> Self {
        // Different first nodes for nodes that start together.
        let after = own.clone();
        Self { own, interval, health, sink, watched: BTreeMap::new(), after, news: News::new(Instant::now()) }
    }

    async fn serve<P: Prober>(
        &mut self,
        prober: &P,
        mut nodes: watch::Receiver<Arc<InForce>>,
        stop: &CancellationToken,
    ) {
        self.follow(&current(&mut nodes));
        let mut due: VecDeque<(Instant, String)> = VecDeque::new();
        let mut running: FuturesUnordered<BoxFuture<'_, (Peer, Vec<Probed>)>> = FuturesUnordered::new();
        let (mut next, mut is_sweeping) = (Instant::now(), false);
        let mut paced = next;
        loop {
            let now = Instant::now();
            let is_idle = due.is_empty() && running.is_empty();
            if is_idle && is_sweeping {
                is_sweeping = false;
                self.sink.swept(self.interval, next.saturating_duration_since(now));
            }
            if is_idle && now >= next && !self.watched.is_empty() {
                due = self.plan(now);
                next = now + self.interval;
                is_sweeping = true;
            }
            let start = match due.front() {
                Some((at, _)) => (running.len() < AT_ONCE).then_some(paced.max(*at)),
                None => (running.is_empty() && !self.watched.is_empty()).then_some(next),
            };
            let has_news = self.news.changes > 0;
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                changed = nodes.changed() => {
                    if changed.is_err() {
                        break;
                    }
                    let was_alone = self.watched.is_empty();
                    self.follow(&current(&mut nodes));
                    if was_alone {
                        next = next.max(Instant::now() + SETTLE);
                    }
                }
                Some((peer, probed)) = running.next(), if !running.is_empty() => self.record(&peer, probed),
                () = sleep_until(self.news.not_before), if has_news => {
                    if let Some((is_well, text)) = self.news.take(Instant::now()) {
                        self.sink.news(is_well, text);
                    }
                }
                () = sleep_until(start.unwrap_or(now)), if start.is_some() => {
                    if let Some((_, name)) = due.pop_front()
                        && let Some(watched) = self.watched.get(&name)
                    {
                        paced = Instant::now() + PACE;
                        running.push(Box::pin(probe_one(prober, watched.peer.clone())));
                    }
                }
            }
        }
        self.health.update_peers(BTreeMap::clear);
        self.sink.states(&BTreeMap::new());
    }

    fn follow(&mut self, cluster: &InForce) {
        let peers = peers(cluster, &self.own);
        self.watched.retain(|name, _| peers.contains_key(name));
        let message = match (peers.len(), self.size_of_sweep()) {
            (all, fit) if all > fit => format!("not probed yet: a sweep probes {fit} of {all} other nodes"),
            _ => "not probed yet".to_owned(),
        };
        let (since, interval) = (clock::unix_ms(), u64::try_from(self.interval.as_millis()).unwrap_or(u64::MAX));
        let watched = &mut self.watched;
        self.health.update_peers(|views| {
            views.retain(|name, _| peers.contains_key(name));
            for (name, peer) in peers {
                let (ipv4, ipv6) = (peer.ipv4(), peer.ipv6());
                match watched.get_mut(&name) {
                    Some(watched) if watched.peer == peer => continue,
                    Some(watched) => {
                        watched.windows.keep(&peer.targets());
                        if watched.peer.targets() != peer.targets() {
                            (watched.failed, watched.silent) = (0, 0);
                        }
                        watched.peer = peer;
                    }
                    None => drop(watched.insert(name.clone(), Watched::new(peer))),
                }
                let starting = || NodeHealth {
                    node: name.clone(),
                    state: HealthState::Starting,
                    message: message.clone(),
                    since_unix_ms: since,
                    interval_ms: interval,
                    ..NodeHealth::default()
                };
                let before = views.get(&name).map_or_else(starting, |view| NodeHealth::clone(view));
                let probes = watched.get(&name).map(|watched| watched.windows.status()).unwrap_or_default();
                views.insert(name, Arc::new(NodeHealth { ipv4, ipv6, probes, ..before }));
            }
        });
        self.sink.states(&self.health.peer_states());
    }

    fn size_of_sweep(&self) -> usize {
        let fit = self.interval.as_millis() / PACE.as_millis();
        let fit = u32::try_from(fit).unwrap_or(u32::MAX).clamp(1, MAX_OF_SWEEP);
        usize::try_from(fit).unwrap_or(usize::MAX)
    }

    fn plan(&mut self, now: Instant) -> VecDeque<(Instant, String)> {
        let after = (Bound::Excluded(self.after.clone()), Bound::Unbounded);
        let rest = self.watched.range::<String, _>(after).map(|(name, _)| name);
        let rest = rest.chain(self.watched.range::<String, _>(..=self.after.clone()).map(|(name, _)| name));
        let names: Vec<String> = rest.take(self.size_of_sweep()).cloned().collect();
        let is_part = names.len() < self.watched.len();
        if let Some(last) = names.last().filter(|_| is_part) {
            self.after.clone_from(last);
        }
        let count = u32::try_from(names.len()).unwrap_or(u32::MAX).max(1);
        (0_u32..).zip(names).map(|(i, name)| (now + self.interval.saturating_mul(i) / count, name)).collect()
    }

    fn record(&mut self, peer: &Peer, mut probed: Vec<Probed>) {
        let Some(watched) = self.watched.get_mut(&peer.name).filter(|watched| watched.peer == *peer) else { return };
        probed.extend(peer.skipped.iter().map(|(address, why)| Probed {
            address: *address,
            kind: ProbeKind::Icmp,
            outcome: Outcome::NotTried((*why).to_owned()),
        }));
        let (state, message) = watched.judge(&probed);
        watched.windows.add(probed);
        let (now, rounds, failed_rounds) = (clock::unix_ms(), watched.rounds, watched.failed);
        let probes = watched.windows.status();
        let changed = self.health.update_peers(|views| {
            let view = views.get_mut(&peer.name)?;
            let (before, was_failing) = (view.state, is_failing(view));
            let after = NodeHealth {
                state,
                message: message.clone(),
                since_unix_ms: if before == state { view.since_unix_ms } else { now },
                last_round_unix_ms: Some(now),
                rounds,
                failed_rounds,
                probes,
                ..NodeHealth::clone(view)
            };
            let is_news = was_failing != is_failing(&after);
            *view = Arc::new(after);
            Some((before, is_news))
        });
        let Some((before, is_news)) = changed else { return };
        if is_news {
            self.news.add(&peer.name, before, state, &message);
        }
        if before != state {
            self.sink.states(&self.health.peer_states());
        }
    }
}

fn current(nodes: &mut watch::Receiver<Arc<InForce>>) -> Arc<InForce> {
    Arc::clone(&nodes.borrow_and_update())
}

async fn probe_one<P: Prober>(prober: &P, peer: Peer) -> (Peer, Vec<Probed>) {
    let probed = prober.probe(&peer).await;
    (peer, probed)
}

#[cfg(test)]
#[path = "mesh_tests.rs"]
mod tests;
