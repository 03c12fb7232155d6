//! Random changes and faults.

#![allow(clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "a test fails by panicking")]

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use proptest::prelude::*;
use wharf_cluster::feed::FeedPod;
use wharf_common::{
    SetsRow,
    policy::{NO_RANK, REDIRECT, REDIRECT_PORT_SHIFT, RULING},
};
use wharf_core::{
    endpoint::EndpointRecord,
    fixtures,
    identity::{Identity, Label},
    ids::Epoch,
    kernel::{KernelError, KernelErrorKind},
    policy::{Enforcement, Judged, PolicyRows, RowChange},
};
use wharf_policy::{
    compile::{Engine, Limits, Tables},
    model::{Direction, Labels, PolicyName, Protocol},
    oracle::Destination,
    read::read,
};

use crate::{
    documents::{Documents, Parsed},
    error::PolicyError,
    inputs::{Input, Inputs},
    redirects::{Ports, ProxyError, RedirectTable},
    rows,
    state::{KernelRows, ProxyAnswer, ProxyUpdate, Settings, State},
    transaction::{Effect, File, Terms, Transaction},
};

const APPS: [&str; 3] = ["a", "b", "c"];
const PORTS: [u16; 3] = [80, 81, 9_000];

fn policy(n: usize) -> String {
    let (app, other) = (APPS[n % 3], APPS[(n + 1) % 3]);
    let head =
        |kind: &str, version: &str| format!("apiVersion: {version}\nkind: {kind}\nmetadata: {{name: p{n}}}\nspec:\n");
    let cilium =
        head("CiliumNetworkPolicy", "cilium.io/v2") + &format!("  endpointSelector: {{matchLabels: {{app: {app}}}}}\n");
    let kubernetes =
        head("NetworkPolicy", "networking.k8s.io/v1") + &format!("  podSelector: {{matchLabels: {{app: {app}}}}}\n");
    let from = format!("    - fromEndpoints: [{{matchLabels: {{app: {other}}}}}]\n");
    match n / 3 {
        0 => kubernetes + "  policyTypes: [Ingress]\n",
        1 => {
            kubernetes
                + &format!(
                    "  ingress: [{{from: [{{podSelector: {{matchLabels: {{app: {other}}}}}}}], ports: [{{port: 80}}]}}]\n"
                )
        }
        2 => kubernetes + "  policyTypes: [Egress]\n  egress: [{to: [{ipBlock: {cidr: 10.0.0.0/30}}]}]\n",
        3 => {
            cilium
                + "  ingress:\n"
                + &from
                + "      toPorts: [{ports: [{port: '80', protocol: TCP}], rules: {http: [{path: /a}]}}]\n"
        }
        4 => {
            cilium
                + "  ingress:\n"
                + &from
                + "      toPorts: [{ports: [{port: '80', protocol: TCP}], rules: {http: [{path: /b}]}}]\n"
        }
        _ => cilium + "  ingressDeny:\n" + &from,
    }
}

const POLICIES: usize = 18;
/// More than any step needs.
const PEERS_MAX: u32 = 10_000;

fn name(n: usize) -> PolicyName {
    let kind = if n / 3 < 3 { "NetworkPolicy" } else { "CiliumNetworkPolicy" };
    PolicyName { kind: kind.to_owned(), namespace: "default".to_owned(), name: format!("p{n}") }
}

#[derive(Debug, Clone)]
enum Step {
    Endpoint(u8, usize),
    NoEndpoint(u8),
    Import(usize),
    Delete(usize),
    DeleteAll,
    Namespace(bool),
    Feed(usize, bool),
    Pod(u8, Option<usize>),
    Enforcement(Enforcement),
    Node(u8),
    Due,
    Correct,
    Restart,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// A write of rows fails after some of them.
    Fails,
    Silence,
    Taken,
    DroppedBefore,
    Dropped,
}

fn steps() -> impl Strategy<Value = Vec<(Step, Vec<Fault>)>> {
    let step = prop_oneof![
        6 => (1..6_u8, 0..3_usize).prop_map(|(n, app)| Step::Endpoint(n, app)),
        2 => (1..6_u8).prop_map(Step::NoEndpoint),
        8 => (0..POLICIES).prop_map(Step::Import),
        4 => (0..POLICIES).prop_map(Step::Delete),
        1 => Just(Step::DeleteAll),
        1 => any::<bool>().prop_map(Step::Namespace),
        3 => (0..POLICIES, any::<bool>()).prop_map(|(n, is_there)| Step::Feed(n, is_there)),
        2 => (6..9_u8, prop::option::of(0..3_usize)).prop_map(|(n, app)| Step::Pod(n, app)),
        1 => prop_oneof![Just(Enforcement::Default), Just(Enforcement::Always), Just(Enforcement::Never)]
            .prop_map(Step::Enforcement),
        1 => (0..3_u8).prop_map(Step::Node),
        2 => Just(Step::Due),
        1 => Just(Step::Correct),
        1 => Just(Step::Restart),
    ];
    let fault = prop_oneof![
        20 => Just(Fault::None),
        2 => Just(Fault::Fails),
        1 => Just(Fault::Silence),
        1 => Just(Fault::Taken),
        1 => Just(Fault::DroppedBefore),
        1 => Just(Fault::Dropped),
    ];
    prop::collection::vec((step, prop::collection::vec(fault, 0..8)), 1..24)
}

struct World {
    state: State,
    records: BTreeMap<u8, EndpointRecord>,
    epoch: u64,
    node: BTreeSet<IpAddr>,
    kernel: PolicyRows,
    peers_max: u32,
    cells_max: usize,
    has_way: bool,
    proxy: RedirectTable,
    documents: Option<Vec<u8>>,
    ports: Option<Vec<u8>>,
    now: Instant,
}

/// Flows that do not just pass: endpoint, whether ingress, address of the other, port; whether they pass through the
/// proxy, and with which requests.
type Verdicts = BTreeMap<(u8, bool, IpAddr, u16), (bool, Option<String>)>;

fn address(n: u8) -> IpAddr {
    [10, 0, 0, n].into()
}

impl World {
    fn new(peers_max: u32) -> Self {
        let mut world = Self {
            state: Self::state(),
            records: BTreeMap::new(),
            epoch: 0,
            node: BTreeSet::new(),
            kernel: PolicyRows::default(),
            peers_max,
            cells_max: crate::limits::LIMITS.rules,
            has_way: false,
            proxy: RedirectTable::new(),
            documents: None,
            ports: None,
            now: Instant::now(),
        };
        world.start(&mut Vec::new());
        world
    }

    fn state() -> State {
        let settings = Settings {
            file: "policy.json".into(),
            services: ["10.96.0.0/16".parse().expect("network")].into(),
            first_port: 15_000,
            has_feed: false,
        };
        State::new(settings, Enforcement::Default)
    }

    /// Starts another agent with the files.
    fn start(&mut self, faults: &mut Vec<Fault>) -> bool {
        let mut documents = Documents::parse(self.documents.as_deref()).expect("documents");
        // As without a cluster feed.
        documents.awaits_cluster = false;
        let ports = self.ports.as_deref().map_or(Ok(Ports::default()), Ports::parse).expect("ports");
        let is_kept = !documents.lost;
        self.state = Self::state();
        self.state.limits.rules = self.cells_max;
        self.state.load(Inputs { documents, ..Inputs::new(Enforcement::Default) }, ports, is_kept);
        for record in self.records.values() {
            self.state.take(Input::Endpoint(record.clone().into()));
        }
        self.state.begin(Vec::new());
        self.state.start(self.kernel.generation != 0);
        let change = vec![Input::Node(self.node.clone())];
        let first = Transaction::begin(&self.state, Terms::FACT, change, self.now);
        self.run(first, faults).is_some_and(|result| result.is_ok())
    }

    fn verdicts(&self, tables: &Tables) -> Verdicts {
        let mut verdicts = Verdicts::new();
        let peers = (1..9).map(address).chain([[192, 0, 2, 1].into()]);
        for (n, peer) in (1..6_u8).flat_map(|n| peers.clone().map(move |peer| (n, peer))) {
            for (port, direction) in PORTS.into_iter().flat_map(|p| [(p, Direction::Ingress), (p, Direction::Egress)]) {
                let to = Destination::Ports { protocol: Protocol::Tcp, port };
                let decided = tables.decide(rows::key(fixtures::id(n.into())), direction, peer, to);
                let Some(decision) = decided.filter(|decision| !decision.accept || decision.listener.is_some()) else {
                    continue;
                };
                let requests = decision.listener.map(|port| format!("{:?}", tables.listeners[&port].requests));
                verdicts.insert((n, direction == Direction::Ingress, peer, port), (decision.accept, requests));
            }
        }
        verdicts
    }

    fn in_kernel(&self) -> Verdicts {
        let listeners = crate::redirects::listeners(&self.proxy);
        self.verdicts(&rows::tables(&self.kernel, &listeners))
    }

    /// Computed without history.
    fn wanted(&self) -> Verdicts {
        let mut engine =
            Engine::new(Limits { ipcache: usize::MAX, ..crate::limits::LIMITS }).with_listeners_from(15_000);
        engine = engine.with_rows_of(&self.state.settings.services);
        engine.apply(self.state.inputs.all(&self.state.settings.services)).expect("rows");
        self.verdicts(engine.tables())
    }

    fn change(&mut self, change: RowChange) {
        let PolicyRows { sets, peers, ports, cells, .. } = &mut self.kernel;
        match change {
            RowChange::Sets(id, row) if row == SetsRow::default() => drop(sets.remove(&id)),
            RowChange::Sets(id, row) => drop(sets.insert(id, row)),
            RowChange::Peer(net, None) => drop(peers.remove(&net)),
            RowChange::Peer(net, Some(row)) => drop(peers.insert(net, row)),
            RowChange::Ports(range, None) => drop(ports.remove(&range)),
            RowChange::Ports(range, Some(class)) => drop(ports.insert(range, class)),
            RowChange::Cell(key, None) => drop(cells.remove(&key)),
            RowChange::Cell(key, Some(cell)) => drop(cells.insert(key, (cell, Judged::default()))),
        }
        assert!(self.kernel.peers.len() <= self.peers_max as usize, "the table is full");
        assert!(self.kernel.cells.len() <= self.cells_max, "the table is full");
    }

    /// No row lets packets pass that the states before and after drop, or leads to a listener that the proxy lacks.
    fn write(&mut self, rows: Vec<RowChange>, fails: bool) -> Result<(), KernelError> {
        let most = if fails { rows.len() / 2 } else { rows.len() };
        let before = self.in_kernel();
        let mut between = Vec::new();
        let kernel = self.kernel.clone();
        for row in &rows {
            self.change(*row);
            if let Some(port) = port_of(row) {
                assert!(self.proxy.contains_key(&port), "the proxy lacks a listener");
            }
            between.push(self.in_kernel());
        }
        let after = self.in_kernel();
        let passes = |verdicts: &Verdicts, key| verdicts.get(key).is_none_or(|(accept, _)| *accept);
        for key in before.keys().filter(|key| !passes(&before, *key) && !passes(&after, *key)) {
            assert!(between.iter().all(|verdicts| !passes(verdicts, key)), "{key:?} passes while rows change");
        }
        self.kernel = kernel;
        self.kernel.generation += u32::from(!rows.is_empty());
        rows.into_iter().take(most).for_each(|row| self.change(row));
        if fails { Err(failure()) } else { Ok(()) }
    }

    fn update_proxy(&mut self, update: ProxyUpdate, fault: Fault) -> ProxyAnswer {
        let ProxyUpdate { ports, redirects, .. } = update;
        let is_kept = ports.is_some() && fault != Fault::Fails;
        if is_kept {
            self.ports = ports.map(|ports| ports.to_text().expect("text"));
        }
        let mut answer = Ok(());
        if let Some(redirects) = redirects {
            let new = redirects.keys().find(|port| !self.proxy.contains_key(port)).copied();
            answer = match (fault, new) {
                (Fault::Fails, Some(_)) => Err(ProxyError::Refused("refused".to_owned())),
                (Fault::Taken, Some(port)) => Err(ProxyError::Taken(port, "taken".to_owned())),
                (Fault::Silence, _) => Err(ProxyError::NoAnswer("silence".to_owned())),
                _ => Ok(()),
            };
            self.proxy = redirects;
        }
        ProxyAnswer { is_kept, answer, outstanding: Vec::new() }
    }

    /// `None` if the transaction was dropped.
    fn run(&mut self, mut effect: Effect, faults: &mut Vec<Fault>) -> Option<Result<(), PolicyError>> {
        for _ in 0..200 {
            self.now += Duration::from_millis(1);
            let now = self.now;
            let fault = match effect {
                Effect::Compute(_) | Effect::End(_) => Fault::None,
                _ => faults.pop().unwrap_or(Fault::None),
            };
            if fault == Fault::DroppedBefore && !matches!(effect, Effect::UpdateProxy(..)) {
                return None;
            }
            let done = if fault == Fault::Fails { Err(failure()) } else { Ok(()) };
            effect = match effect {
                Effect::Compute(next) => next.compute(&mut self.state),
                Effect::ReadKernel(next) => {
                    let (rows, addresses, peers_max) = (self.kernel.clone(), self.node.clone(), self.peers_max);
                    next.kernel_read(&mut self.state, done.map(|()| KernelRows { rows, addresses, peers_max }))
                }
                Effect::EnsureWay(next) => {
                    self.has_way |= done.is_ok();
                    next.way_ensured(&mut self.state, done)
                }
                Effect::UpdateProxy(update, next) => {
                    let answer = self.update_proxy(update, fault);
                    if fault == Fault::Dropped {
                        return None;
                    }
                    next.proxy_updated(&mut self.state, answer, now)
                }
                Effect::Save(file, next) => {
                    let saved = match (file, done) {
                        (File::Documents { documents, .. }, Ok(())) => {
                            self.documents = Some(documents.to_text().expect("text"));
                            Ok(())
                        }
                        (_, Err(_)) => {
                            let why = std::io::Error::other("full").into();
                            Err(PolicyError::NotKept { path: "policy.json".into(), why })
                        }
                        (File::Names(_), Ok(())) => Ok(()),
                    };
                    if fault == Fault::Dropped {
                        return None;
                    }
                    next.saved(&mut self.state, saved, now)
                }
                Effect::Write(ports, rows, next) => {
                    assert!(
                        self.has_way || rows.iter().all(|row| port_of(row).is_none()),
                        "there is no way to the proxy"
                    );
                    let is_kept = ports.is_some();
                    if let Some(ports) = ports {
                        self.ports = Some(ports.to_text().expect("text"));
                    }
                    let kept = self.ports.as_deref().map_or(Ok(Ports::default()), Ports::parse).expect("ports");
                    let is_kept_port = |port| kept.listeners.contains_key(&port);
                    assert!(rows.iter().filter_map(port_of).all(is_kept_port), "a start would not know a port");
                    let written = self.write(rows, fault == Fault::Fails);
                    if fault == Fault::Dropped {
                        return None;
                    }
                    next.written(&mut self.state, is_kept, written, now)
                }
                Effect::End(result) => return Some(result),
            };
        }
        panic!("a transaction has no end");
    }

    fn begin(&mut self, terms: Terms, input: Input, faults: &mut Vec<Fault>) -> Option<Result<(), PolicyError>> {
        let effect = Transaction::begin(&self.state, terms, vec![input], self.now);
        self.run(effect, faults)
    }

    fn play(&mut self, step: Step, mut faults: Vec<Fault>) {
        let faults = &mut faults;
        match step {
            Step::Endpoint(n, app) => {
                self.epoch += u64::from(!self.records.contains_key(&n));
                let epoch = self.records.get(&n).map_or(Epoch(self.epoch), |record| record.epoch);
                let label = Label { source: "k8s".into(), key: "app".into(), value: APPS[app].into() };
                let identity = Identity(300 + u32::try_from(app).expect("small"));
                let record = EndpointRecord { epoch, labels: [label].into(), identity, ..fixtures::record(n, 1) };
                let before = self.before();
                match self.begin(Terms::ENDPOINT, Input::Endpoint(record.clone().into()), faults) {
                    Some(Ok(())) => drop(self.records.insert(n, record)),
                    Some(Err(PolicyError::Rows(_))) => self.assert_unchanged(&before),
                    // A failed edit, or an abandoned create.
                    _ => match self.records.get(&n).cloned() {
                        Some(old) => {
                            self.begin(Terms::FACT, Input::Endpoint(old.into()), faults);
                        }
                        None => {
                            self.begin(Terms::FACT, Input::NoEndpoint(record.id, record.epoch), faults);
                        }
                    },
                }
            }
            Step::NoEndpoint(n) => {
                let Some(record) = self.records.remove(&n) else { return };
                self.begin(Terms::FACT, Input::NoEndpoint(record.id, record.epoch), faults);
            }
            Step::Import(n) => {
                let parsed = Parsed::new("p.yaml", &policy(n)).expect("a policy");
                self.documents(faults, |documents| documents.import(parsed).is_ok());
            }
            Step::Delete(n) => self.documents(faults, |documents| documents.delete(&name(n)).is_ok()),
            Step::DeleteAll => self.documents(faults, |documents| !documents.delete_all().removed.is_empty()),
            Step::Namespace(is_red) => {
                let labels = is_red.then(|| Labels::from([("team".to_owned(), "red".to_owned())]));
                self.documents(faults, |documents| documents.set_namespace("default", labels).is_ok());
            }
            Step::Feed(n, is_there) => {
                let policies = is_there.then(|| read("row", &policy(n)).expect("a policy"));
                let documents = self.state.inputs.documents.with_rows(&[(format!("row-{n}"), policies)].into());
                let before = self.before();
                let result = self.begin(Terms::FEED, Input::Documents(documents), faults);
                if let Some(Err(PolicyError::Rows(_) | PolicyError::Proxy(_))) = result {
                    self.assert_unchanged(&before);
                }
            }
            Step::Pod(n, app) => {
                let uid: Arc<str> = format!("pod-{n}").into();
                let labels = |app: usize| [("app".to_owned(), APPS[app].to_owned())].into();
                let pod = app.map(|app| FeedPod {
                    uid: Arc::clone(&uid),
                    namespace: "default".into(),
                    name: "pod".into(),
                    addresses: [address(n)].into(),
                    node: "other".into(),
                    labels: Arc::new(labels(app)),
                    named_ports: Arc::default(),
                });
                self.begin(Terms::FACT, Input::Pods(vec![(uid, pod.map(Arc::new))]), faults);
            }
            Step::Enforcement(enforcement) => {
                let change = vec![Input::Enforcement(enforcement)];
                let effect = Transaction::correct(&self.state, Terms::FACT, change, self.now);
                self.run(effect, faults);
            }
            Step::Node(n) => {
                self.node = [[10, 1, 0, n].into()].into();
                let node = self.node.clone();
                self.begin(Terms::FACT, Input::Node(node), faults);
            }
            Step::Due => {
                self.now += Duration::from_secs(3);
                let effect = Transaction::remove_due(&mut self.state, self.now);
                self.run(effect, faults);
                self.state.look_at_owed(&[], self.now);
            }
            Step::Correct => {
                let effect = Transaction::correct(&self.state, Terms::FACT, Vec::new(), self.now);
                self.run(effect, faults);
            }
            Step::Restart => {
                self.start(faults);
            }
        }
        self.check();
    }

    fn documents(&mut self, faults: &mut Vec<Fault>, change: impl FnOnce(&mut Documents) -> bool) {
        let mut documents = self.state.inputs.documents.clone();
        if !change(&mut documents) {
            return;
        }
        let revision = documents.revision;
        let before = self.before();
        match self.begin(Terms::DOCUMENTS, Input::Documents(documents), faults) {
            Some(Ok(())) => {
                let kept = Documents::parse(self.documents.as_deref()).expect("documents");
                assert_eq!(kept.revision, revision, "an import is answered after it is saved");
                assert!(self.state.is_settled(), "an import is answered after its rows are written");
            }
            Some(Err(PolicyError::Rows(_) | PolicyError::Proxy(_) | PolicyError::NotKept { .. })) => {
                self.assert_unchanged(&before);
            }
            _ => {}
        }
    }

    fn before(&self) -> (Inputs, Verdicts, [u64; 2]) {
        (self.state.inputs.clone(), self.in_kernel(), [self.state.realized(), self.state.is_active().into()])
    }

    fn assert_unchanged(&self, (inputs, kernel, numbers): &(Inputs, Verdicts, [u64; 2])) {
        let (now, in_kernel, now_numbers) = self.before();
        let members =
            |inputs: &Inputs| inputs.members.iter().map(|(id, place)| (id, place.clone())).collect::<Vec<_>>();
        assert_eq!(now.documents.revision, inputs.documents.revision, "a refused change stays");
        assert_eq!(members(&now), members(inputs), "a refused change stays");
        assert_eq!((in_kernel, now_numbers), (kernel.clone(), *numbers), "a refused change has an effect");
    }

    fn check(&self) {
        assert!(self.state.realized() <= self.state.inputs.documents.revision, "a refused change is realized");
        if self.state.is_settled() {
            assert_eq!(self.in_kernel(), self.wanted(), "the kernel has other rows than the inputs");
        }
    }

    fn settle(&mut self) {
        for _ in 0..3 {
            let node = self.node.clone();
            drop(self.begin(Terms::FACT, Input::Node(node), &mut Vec::new()));
            self.play(Step::Due, Vec::new());
        }
        if !self.state.is_settled() {
            // External events cannot be refused, and lost policies wait for an import.
            let why = self.state.problem().unwrap_or_default();
            let is_full = self.peers_max < PEERS_MAX && why.contains("that fit");
            assert!(is_full || self.state.inputs.documents.is_lost(), "{why}");
            return;
        }
        assert_eq!(self.state.realized(), self.state.inputs.documents.revision, "{:?}", self.state.problem());
        self.check();
        let has: BTreeSet<u16> = self.proxy.keys().copied().collect();
        let tables = self.state.tables().map(|tables| tables.listeners.keys().map(|port| port.0).collect());
        assert_eq!(has, tables.unwrap_or_default(), "the proxy has other listeners than the rows");
    }
}

fn failure() -> KernelError {
    KernelError {
        operation: "change rows",
        subject: "policy".to_owned(),
        cause: "a fault".to_owned(),
        kind: KernelErrorKind::Other,
    }
}

fn port_of(row: &RowChange) -> Option<u16> {
    let RowChange::Cell(_, Some(cell)) = row else { return None };
    let is_redirect = cell.rest.ruling & RULING == REDIRECT;
    is_redirect.then(|| u16::try_from(cell.rest.ruling >> REDIRECT_PORT_SHIFT).expect("a port"))
}

fn play(peers_max: u32, steps: Vec<(Step, Vec<Fault>)>) {
    let mut world = World::new(peers_max);
    for (step, faults) in steps {
        world.play(step, faults);
    }
    world.settle();
}

fn with_policies() -> (World, usize) {
    let mut world = World::new(PEERS_MAX);
    for n in 1..6 {
        world.play(Step::Endpoint(n, usize::from(n) % 3), Vec::new());
    }
    for n in 0..POLICIES {
        world.play(Step::Import(n), Vec::new());
    }
    world.settle();
    let (cells, verdicts) = (world.kernel.cells.len(), world.in_kernel());
    assert!(cells > 20 && verdicts.len() > 100, "{cells} {}", verdicts.len());
    (world, cells)
}

/// Ranks differ, with the same meaning.
fn raise_ranks(world: &mut World) {
    for (cell, _) in world.kernel.cells.values_mut() {
        for hit in [&mut cell.admin, &mut cell.rest].into_iter().filter(|hit| hit.rank != NO_RANK) {
            hit.rank += 1_000;
        }
    }
}

#[test]
fn a_start_keeps_the_rows_that_stay() {
    let (mut world, cells) = with_policies();
    // No room for another row.
    world.cells_max = cells;
    let before = world.kernel.clone();
    for _ in 0..2 {
        assert!(world.start(&mut Vec::new()), "{:?}", world.state.problem());
        assert_eq!(world.kernel, before);
    }
}

#[test]
fn a_start_has_the_policies_of_before_in_force_also_if_old_and_new_rows_do_not_fit_together() {
    let (mut world, cells) = with_policies();
    let verdicts = world.in_kernel();
    world.cells_max = cells + cells / 4;
    for _ in 0..2 {
        raise_ranks(&mut world);
        assert!(world.start(&mut Vec::new()), "{:?}", world.state.problem());
        assert_eq!((world.kernel.cells.len(), world.in_kernel()), (cells, verdicts.clone()));
    }
    // Isolation would not help: the earlier rows stay.
    world.cells_max = cells - 1;
    assert!(!world.start(&mut Vec::new()), "one cell too many");
    assert_eq!(world.kernel.cells.len(), cells);
    world.cells_max = cells + cells / 4;
    // Killed between the writes: endpoints stay isolated until the next start.
    raise_ranks(&mut world);
    let mut faults = vec![Fault::Dropped, Fault::None, Fault::None, Fault::None];
    assert!(!world.start(&mut faults));
    assert_ne!(world.in_kernel(), verdicts);
    world.play(Step::Restart, Vec::new());
    assert_eq!(world.in_kernel(), verdicts);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn rows_follow_the_inputs_through_faults_and_let_nothing_pass_meanwhile(steps in steps()) {
        play(PEERS_MAX, steps);
    }

    #[test]
    fn what_does_not_fit_changes_nothing(steps in steps()) {
        play(7, steps);
    }
}
