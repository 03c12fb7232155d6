//! Ledger and streams against a model of Envoy.

use std::collections::{BTreeMap, BTreeSet};

use envoy_types::pb::google::protobuf::Any;
use proptest::prelude::*;

use super::{Request, Response, Stream, Variant};
use crate::ledger::{Ended, LISTENER_TYPE, Ledgers, Registered, WaitError, WaitId};

const NAMES: [&str; 3] = ["egress-1", "egress-10", "ingress-1"];
const FIRST: u64 = 1000;
/// Contents from this one are refused by name.
const BAD: u8 = 6;
/// Makes a whole response unreadable.
const UNREADABLE: u8 = 8;

#[derive(Debug, Clone, Copy)]
enum Step {
    Set(usize, Option<u8>),
    Cancel(usize),
    Open(Variant),
    /// Delivers and answers one response.
    Deliver,
    DeliverAndLose,
    Disconnect,
    Kill,
    /// The Envoy keeps running.
    NewServer,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let variant = prop_oneof![Just(Variant::Sotw), Just(Variant::Delta)];
    let step = prop_oneof![
        6 => (0..NAMES.len(), prop::option::weighted(0.7, 0..=UNREADABLE)).prop_map(|(name, content)| Step::Set(name, content)),
        1 => (0..4usize).prop_map(Step::Cancel),
        3 => variant.prop_map(Step::Open),
        8 => Just(Step::Deliver),
        1 => Just(Step::DeliverAndLose),
        1 => Just(Step::Disconnect),
        1 => Just(Step::Kill),
        1 => Just(Step::NewServer),
    ];
    prop::collection::vec(step, 1..60)
}

#[derive(Debug, Default)]
struct Envoy {
    in_force: BTreeMap<String, u8>,
    versions: BTreeMap<String, String>,
    version: String,
}

struct Connection {
    stream: Stream,
    variant: Variant,
    last_nonce: Option<String>,
}

struct Wait {
    id: WaitId,
    name: usize,
    set: usize,
    end: Option<Result<(), WaitError>>,
}

struct Model {
    ledgers: Ledgers,
    envoy: Option<Envoy>,
    connection: Option<Connection>,
    streams: u64,
    history: [Vec<Option<u8>>; NAMES.len()],
    waits: Vec<Wait>,
    cancelled: BTreeSet<WaitId>,
    /// `None` for an unreadable response.
    refused: BTreeSet<(Option<String>, u8)>,
}

fn content(any: &Any) -> u8 {
    any.value[0]
}

impl Model {
    fn new() -> Self {
        Self {
            ledgers: Ledgers::new(FIRST),
            envoy: None,
            connection: None,
            streams: 0,
            history: Default::default(),
            waits: Vec::new(),
            cancelled: BTreeSet::new(),
            refused: BTreeSet::new(),
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Set(name, content) => self.set(name, content),
            Step::Cancel(ago) => {
                if let Some(wait) = self.waits.iter().rev().nth(ago).filter(|wait| wait.end.is_none()) {
                    self.ledgers.listeners.cancel(wait.id);
                    self.cancelled.insert(wait.id);
                }
            }
            Step::Open(variant) => self.open(variant),
            Step::Deliver => {
                self.deliver(true);
            }
            Step::DeliverAndLose => {
                self.deliver(false);
                self.connection = None;
            }
            Step::Disconnect => self.connection = None,
            Step::Kill => self.kill(),
            Step::NewServer => self.new_server(),
        }
    }

    fn new_server(&mut self) {
        let first = self.ledgers.listeners.version() + 1;
        let envoy = self.envoy.take();
        *self = Self { streams: self.streams, ..Self::new() };
        self.ledgers = Ledgers::new(first);
        self.history = NAMES.map(|_| vec![None]);
        if let Some(mut envoy) = envoy {
            envoy.in_force.retain(|name, _| envoy.versions.contains_key(name));
            self.envoy = Some(envoy);
            self.ledgers.listeners.process_began();
        }
    }

    fn set(&mut self, name: usize, content: Option<u8>) {
        let resource = content.map(|content| Any { type_url: "t".into(), value: vec![content] });
        self.history[name].push(content);
        self.ledgers.listeners.set(NAMES[name], resource);
        let set = self.history[name].len() - 1;
        match self.ledgers.listeners.wait(NAMES[name], content.is_none()) {
            Registered::Ended if self.history[name].iter().all(Option::is_none) => {}
            Registered::Ended => self.check_acknowledged(name, set),
            Registered::Pending(id) => self.waits.push(Wait { id, name, set, end: None }),
        }
    }

    fn kill(&mut self) {
        self.connection = None;
        if self.envoy.take().is_some() {
            let ended = self.ledgers.listeners.process_ended();
            self.end(ended);
        }
    }

    fn open(&mut self, variant: Variant) {
        self.ledgers.listeners.process_began();
        let envoy = self.envoy.get_or_insert_default();
        self.streams += 1;
        let mut stream = Stream::new(variant, self.streams);
        let first = match variant {
            Variant::Sotw => Request { version: envoy.version.clone(), ..Request::default() },
            Variant::Delta => Request { has: envoy.versions.clone().into_iter().collect(), ..Request::default() },
        };
        let request = Request { type_url: LISTENER_TYPE.into(), ..first };
        let ended = stream.on_request(request, &mut self.ledgers).expect("a small request");
        self.connection = Some(Connection { stream, variant, last_nonce: None });
        self.end(ended);
    }

    fn deliver(&mut self, answer: bool) -> Option<usize> {
        let (Some(connection), Some(envoy)) = (&mut self.connection, &mut self.envoy) else { return None };
        let (response, ended) = connection.stream.next_response(&mut self.ledgers);
        let told = response.as_ref().map(|response| response.resources.len() + response.removed.len());
        let mut ended_later = Ended::new();
        if let Some(response) = response {
            let nonce = response.nonce.clone();
            let error = envoy.apply(response, connection.variant, &mut self.refused);
            if let Some(nonce) = connection.last_nonce.clone() {
                let stale = Request { type_url: LISTENER_TYPE.into(), nonce, ..Request::default() };
                let ended = connection.stream.on_request(stale, &mut self.ledgers).expect("a small request");
                assert_eq!(ended, [], "an old answer ends nothing");
            }
            if answer {
                let version = envoy.version.clone();
                let request = Request {
                    type_url: LISTENER_TYPE.into(),
                    nonce: nonce.clone(),
                    error,
                    version,
                    ..Request::default()
                };
                ended_later = connection.stream.on_request(request, &mut self.ledgers).expect("a small request");
                connection.last_nonce = Some(nonce);
            }
        }
        self.end(ended);
        self.end(ended_later);
        told
    }

    fn end(&mut self, ended: Ended) {
        for (id, result) in ended {
            assert!(!self.cancelled.contains(&id), "a wait that nobody has ended");
            let wait = self.waits.iter_mut().find(|wait| wait.id == id).expect("a wait that was given");
            assert_eq!(wait.end, None, "a wait ended twice");
            wait.end = Some(result.clone());
            let (name, set) = (wait.name, wait.set);
            match result {
                Ok(()) => self.check_acknowledged(name, set),
                Err(WaitError::Refused { listener, .. }) => {
                    assert_eq!(listener, NAMES[name]);
                    let wanted = &self.history[name][set..];
                    let refused = self.refused.iter().any(|(refused, content)| match refused {
                        Some(refused) => refused == NAMES[name] && wanted.contains(&Some(*content)),
                        None => true,
                    });
                    assert!(refused, "Envoy refused nothing of the kind");
                }
                Err(other) => panic!("{other}"),
            }
        }
    }

    fn check_acknowledged(&self, name: usize, set: usize) {
        let in_force = self.envoy.as_ref().and_then(|envoy| envoy.in_force.get(NAMES[name]).copied());
        let wanted = &self.history[name][set..];
        assert!(wanted.contains(&in_force), "{}: {in_force:?} is in force, wanted {wanted:?}", NAMES[name]);
    }

    fn settle(&mut self, variant: Variant) {
        self.open(variant);
        let mut responses = 0;
        while self.deliver(true).is_some() {
            responses += 1;
            assert!(responses < 20, "it never ends");
        }
        assert_eq!(self.ledgers.listeners.pending(), 0, "a wait was lost: {:?}", self.ledgers);
        for wait in &self.waits {
            assert!(wait.end.is_some() || self.cancelled.contains(&wait.id), "a wait was lost");
        }
        let in_force = &self.envoy.as_ref().expect("it lives").in_force;
        let unreadable = self.history.iter().any(|history| history.last() == Some(&Some(UNREADABLE)));
        for (name, history) in NAMES.iter().zip(&self.history) {
            let wanted = history.last().copied().flatten();
            // SotW repeats unreadable resources.
            if wanted.is_none_or(|content| content < BAD) && !(unreadable && variant == Variant::Sotw) {
                assert_eq!(in_force.get(*name).copied(), wanted, "{name}");
            }
        }
        let wanted = self.history.iter().filter_map(|history| history.last().copied().flatten());
        if variant == Variant::Delta && wanted.clone().all(|content| content < BAD) {
            self.open(variant);
            // A stream's first response can be empty.
            assert_eq!(self.deliver(true).unwrap_or(0), 0, "a stream that begins anew was told what Envoy has");
        }
    }
}

impl Envoy {
    fn apply(
        &mut self,
        response: Response,
        variant: Variant,
        refused: &mut BTreeSet<(Option<String>, u8)>,
    ) -> Option<String> {
        if response.resources.iter().any(|(_, _, any)| content(any) == UNREADABLE) {
            refused.insert((None, UNREADABLE));
            return Some("Proto constraint validation failed".into());
        }
        let mut bad = Vec::new();
        match variant {
            Variant::Sotw => {
                self.in_force.retain(|name, _| response.resources.iter().any(|(there, _, _)| there == name));
            }
            Variant::Delta => response.removed.iter().for_each(|name| {
                self.in_force.remove(name);
            }),
        }
        for (name, _, any) in &response.resources {
            if content(any) >= BAD {
                refused.insert((Some(name.clone()), content(any)));
                bad.push(format!("{name}: cannot be done"));
            } else {
                self.in_force.insert(name.clone(), content(any));
            }
        }
        if !bad.is_empty() {
            return Some(format!("Error adding/updating listener(s) {}\n", bad.join("\n")));
        }
        response.removed.iter().for_each(|name| {
            self.versions.remove(name);
        });
        self.versions.extend(response.resources.iter().map(|(name, version, _)| (name.clone(), version.to_string())));
        if variant == Variant::Sotw {
            self.version = response.version.to_string();
        }
        None
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn every_wait_ends_once_and_for_a_reason(steps in steps(), last in prop_oneof![Just(Variant::Sotw), Just(Variant::Delta)]) {
        let mut model = Model::new();
        for step in steps {
            model.step(step);
        }
        model.settle(last);
    }
}
