//! A stream. At most one response per type is unacknowledged.

use std::collections::BTreeMap;

use envoy_types::pb::google::protobuf::Any;

use crate::ledger::{Carried, Ended, Ledger, Ledgers, Version};

/// Envoy requests three.
const MAX_TYPES: usize = 16;
/// Maximum names in a request.
const MAX_NAMES: usize = 4096;
/// Maximum bytes of a name.
const MAX_NAME: usize = 512;
/// Maximum bytes of a refusal's reason.
const MAX_REASON: usize = 1024;

/// Protocol variant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// State of the world: responses hold all resources.
    Sotw,
    /// Incremental: responses hold changes.
    Delta,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) type_url: String,
    /// Of the answered response, or empty.
    pub(crate) nonce: String,
    pub(crate) error: Option<String>,
    /// SotW: the client's, or empty.
    pub(crate) version: String,
    /// Delta: the client's resources, in the first request.
    pub(crate) has: Vec<(String, String)>,
    /// Used only for unknown types.
    pub(crate) names: Vec<String>,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Response {
    pub(crate) type_url: String,
    pub(crate) nonce: String,
    pub(crate) version: Version,
    pub(crate) resources: Vec<(String, Version, Any)>,
    /// Delta: names to remove.
    pub(crate) removed: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum StreamError {
    #[error("the stream asks for more than {MAX_TYPES} types")]
    Types,
    #[error("a request names more than {MAX_NAMES} resources, or has a name of more than {MAX_NAME} bytes")]
    Names,
}

#[derive(Debug)]
struct InFlight {
    nonce: String,
    carried: Vec<Carried>,
    /// Delta: previous versions, for a refusal.
    before: Vec<(String, Option<Version>)>,
}

#[derive(Debug, Default)]
struct Subscription {
    in_flight: Option<InFlight>,
    /// Last sent or known version.
    sent: Option<Version>,
    /// Delta: the client's resources; 0 for other servers' versions.
    has: BTreeMap<String, Version>,
    /// Delta: unacknowledged removals.
    dropped: BTreeMap<String, Version>,
    /// Delta: one resource per response, after an unspecific refusal.
    alone: bool,
    absent: Option<Vec<String>>,
}

#[derive(Debug)]
pub(crate) struct Stream {
    variant: Variant,
    id: u64,
    nonces: u64,
    types: BTreeMap<String, Subscription>,
}

impl Stream {
    pub(crate) const fn new(variant: Variant, id: u64) -> Self {
        Self { variant, id, nonces: 0, types: BTreeMap::new() }
    }

    pub(crate) fn on_request(&mut self, request: Request, ledgers: &mut Ledgers) -> Result<Ended, StreamError> {
        let longest = request.names.iter().chain(request.has.iter().map(|(name, _)| name)).map(String::len).max();
        if request.names.len().max(request.has.len()) > MAX_NAMES || longest.is_some_and(|length| length > MAX_NAME) {
            return Err(StreamError::Names);
        }
        let first = !self.types.contains_key(&request.type_url);
        if first && (self.types.len() >= MAX_TYPES || request.type_url.len() > MAX_NAME) {
            return Err(StreamError::Types);
        }
        let ledger = ledgers.of(&request.type_url);
        let subscription = self.types.entry(request.type_url).or_default();
        let Some(ledger) = ledger else {
            if first || (request.nonce.is_empty() && !request.names.is_empty()) {
                subscription.absent = Some(request.names);
            }
            return Ok(Ended::new());
        };
        if first {
            return Ok(match self.variant {
                Variant::Sotw => subscription.resume_sotw(&request.version, ledger),
                Variant::Delta => subscription.resume_delta(&request.has, ledger),
            });
        }
        // A stale nonce answers an earlier response; without a nonce only names change.
        let Some(in_flight) = subscription.in_flight.take_if(|in_flight| in_flight.nonce == request.nonce) else {
            return Ok(Ended::new());
        };
        Ok(match request.error {
            None => {
                let ended = ledger.accepted(&in_flight.carried);
                if subscription.sent.is_some() {
                    ledger.caught_up();
                }
                ended
            }
            Some(reason) => subscription.on_refusal(in_flight, &reason, self.variant, ledger),
        })
    }

    /// Also returns ended waits.
    pub(crate) fn next_response(&mut self, ledgers: &mut Ledgers) -> (Option<Response>, Ended) {
        let mut ended = Ended::new();
        for (type_url, subscription) in &mut self.types {
            if subscription.in_flight.is_some() {
                continue;
            }
            let nonce = format!("{}-{}", self.id, self.nonces);
            let content = match ledgers.of(type_url) {
                None => {
                    subscription.absent.take().map(|names| Content { version: 0, removed: names, ..Content::default() })
                }
                Some(ledger) if subscription.sent == Some(ledger.version()) => None,
                Some(ledger) => {
                    let content = match self.variant {
                        Variant::Sotw => subscription.everything(ledger),
                        Variant::Delta => subscription.changes(ledger, &mut ended),
                    };
                    if let Some(content) = &content {
                        ledger.offered(&content.carried);
                        let carried = content.carried.clone();
                        subscription.in_flight =
                            Some(InFlight { nonce: nonce.clone(), carried, before: content.before.clone() });
                    }
                    content
                }
            };
            if let Some(Content { version, resources, removed, .. }) = content {
                self.nonces = self.nonces.saturating_add(1);
                let type_url = type_url.clone();
                return (Some(Response { type_url, nonce, version, resources, removed }), ended);
            }
        }
        (None, ended)
    }
}

#[derive(Debug, Default)]
struct Content {
    version: Version,
    resources: Vec<(String, Version, Any)>,
    removed: Vec<String>,
    carried: Vec<Carried>,
    before: Vec<(String, Option<Version>)>,
}

impl Subscription {
    fn resume_sotw(&mut self, version: &str, ledger: &mut Ledger) -> Ended {
        let Some(version) = version.parse().ok().filter(|version| ledger.gave(*version)) else { return Ended::new() };
        self.sent = Some(version);
        let entries = ledger.entries().iter();
        let has: Vec<_> = entries
            .filter(|(_, entry)| entry.version <= version)
            .map(|(name, entry)| (name.clone(), entry.version))
            .collect();
        ledger.accepted(&has)
    }

    fn resume_delta(&mut self, has: &[(String, String)], ledger: &mut Ledger) -> Ended {
        let ours = |version: &String| version.parse().ok().filter(|version| ledger.gave(*version)).unwrap_or(0);
        self.has = has.iter().map(|(name, version)| (name.clone(), ours(version))).collect();
        let has: Vec<_> = self.has.iter().map(|(name, version)| (name.clone(), *version)).collect();
        ledger.accepted(&has)
    }

    #[expect(clippy::unnecessary_wraps, reason = "the other variant may have nothing to send")]
    fn everything(&mut self, ledger: &Ledger) -> Option<Content> {
        self.sent = Some(ledger.version());
        let entries = ledger.entries();
        let resources = entries
            .iter()
            .filter_map(|(name, entry)| Some((name.clone(), entry.version, entry.resource.clone()?)))
            .collect();
        let carried = entries.iter().map(|(name, entry)| (name.clone(), entry.version)).collect();
        Some(Content { version: ledger.version(), resources, carried, ..Content::default() })
    }

    fn changes(&mut self, ledger: &mut Ledger, ended: &mut Ended) -> Option<Content> {
        let mut content = Content { version: ledger.version(), ..Content::default() };
        let limit = if self.alone { 1 } else { usize::MAX };
        // Unsent resources need no acknowledged removal.
        let never_there: Vec<_> = ledger
            .entries()
            .iter()
            .filter(|(name, entry)| entry.resource.is_none() && !entry.offered && !self.has.contains_key(*name))
            .map(|(name, entry)| (name.clone(), entry.version))
            .collect();
        ended.extend(ledger.accepted(&never_there));

        let entries = ledger.entries();
        let pending = |name: &String, version: Version| {
            entries.get(name).is_some_and(|entry| entry.resource.is_none() && entry.version == version)
        };
        self.dropped.retain(|name, version| pending(name, *version));
        // From an earlier server.
        for name in self.has.keys().filter(|name| !entries.contains_key(*name)) {
            content.removed.push(name.clone());
            content.carried.push((name.clone(), 0));
        }
        for (name, entry) in entries.iter().filter(|(_, entry)| entry.resource.is_none()) {
            if self.dropped.get(name) != Some(&entry.version) {
                content.removed.push(name.clone());
                content.carried.push((name.clone(), entry.version));
            }
        }
        for (name, entry) in entries {
            if let Some(resource) = &entry.resource
                && self.has.get(name) != Some(&entry.version)
            {
                content.resources.push((name.clone(), entry.version, resource.clone()));
                content.carried.push((name.clone(), entry.version));
            }
        }
        let all = content.carried.len() <= limit;
        if !all {
            content.carried.truncate(limit);
            content.removed.truncate(limit);
            content.resources.truncate(limit.saturating_sub(content.removed.len()));
        }
        let first = self.sent.is_none() && !self.alone;
        self.sent = all.then_some(content.version);
        self.alone = !all;
        if content.carried.is_empty() && !first {
            return None;
        }
        content.before = content.carried.iter().map(|(name, _)| (name.clone(), self.has.get(name).copied())).collect();
        self.has.extend(content.resources.iter().map(|(name, version, _)| (name.clone(), *version)));
        for name in &content.removed {
            self.has.remove(name);
        }
        let removals = content.carried.iter().take(content.removed.len());
        self.dropped.extend(removals.map(|(name, version)| (name.clone(), *version)));
        Some(content)
    }

    /// Envoy names the failed listeners and applies the others; of an unreadable response, it names and applies none.
    fn on_refusal(&mut self, in_flight: InFlight, reason: &str, variant: Variant, ledger: &mut Ledger) -> Ended {
        let named: Vec<_> = in_flight.carried.iter().filter_map(|it| Some((it, reason_of(&it.0, reason)?))).collect();
        if !named.is_empty() {
            let mut ended = Ended::new();
            for (carried, reason) in &named {
                ended.extend(ledger.refused(std::slice::from_ref(carried), cut(reason)));
            }
            let good: Vec<_> =
                in_flight.carried.iter().filter(|it| named.iter().all(|(bad, _)| bad != it)).cloned().collect();
            ended.extend(ledger.accepted(&good));
            return ended;
        }
        if variant == Variant::Delta && in_flight.carried.len() > 1 {
            for (name, version) in in_flight.before {
                self.dropped.remove(&name);
                match version {
                    Some(version) => self.has.insert(name, version),
                    None => self.has.remove(&name),
                };
            }
            (self.alone, self.sent) = (true, None);
            return Ended::new();
        }
        ledger.refused(&in_flight.carried, cut(reason))
    }
}

/// `Error adding/updating listener(s) NAME: REASON`, and a line per further name.
fn reason_of<'a>(name: &str, text: &'a str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let line = line.strip_prefix("Error adding/updating listener(s) ").unwrap_or(line);
        line.strip_prefix(name)?.strip_prefix(": ")
    })
}

fn cut(reason: &str) -> &str {
    reason.get(..reason.floor_char_boundary(MAX_REASON)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::{CLUSTER_TYPE, LISTENER_TYPE};

    const ROUTES: &str = "type.googleapis.com/envoy.config.route.v3.RouteConfiguration";

    fn ledgers() -> Ledgers {
        Ledgers::new(1)
    }

    fn request(type_url: &str, names: &[&str]) -> Request {
        let names = names.iter().map(ToString::to_string).collect();
        Request { type_url: type_url.into(), names, ..Request::default() }
    }

    #[test]
    fn a_type_that_this_server_has_nothing_of_is_answered_so_once() {
        let mut ledgers = ledgers();
        for variant in [Variant::Sotw, Variant::Delta] {
            let mut stream = Stream::new(variant, 1);
            stream.on_request(request(ROUTES, &["a", "b"]), &mut ledgers).expect("a small request");
            let (response, _) = stream.next_response(&mut ledgers);
            let response = response.expect("an answer");
            assert_eq!((response.type_url.as_str(), response.resources.len()), (ROUTES, 0));
            assert_eq!(response.removed, ["a", "b"], "they are not there");
            assert_eq!(stream.next_response(&mut ledgers).0, None);
        }
    }

    #[test]
    fn each_type_is_answered_and_nothing_more_before_it_is_acknowledged() {
        let mut ledgers = ledgers();
        let mut stream = Stream::new(Variant::Delta, 1);
        for type_url in [LISTENER_TYPE, CLUSTER_TYPE] {
            stream.on_request(request(type_url, &[]), &mut ledgers).expect("a small request");
        }
        let mut answered: Vec<_> = std::iter::from_fn(|| stream.next_response(&mut ledgers).0).collect();
        answered.sort_by(|a, b| a.type_url.cmp(&b.type_url));
        let types: Vec<_> = answered.iter().map(|response| response.type_url.as_str()).collect();
        assert_eq!(types, [CLUSTER_TYPE, LISTENER_TYPE], "also with nothing: Envoy waits for the first answer");
        ledgers.listeners.set("egress-1", Some(Any::default()));
        assert_eq!(stream.next_response(&mut ledgers).0, None, "one response is on its way");
        let nonce = answered.pop().expect("the listeners").nonce;
        stream.on_request(Request { nonce, ..request(LISTENER_TYPE, &[]) }, &mut ledgers).expect("a small request");
        let (response, _) = stream.next_response(&mut ledgers);
        assert_eq!(response.expect("the change").resources.len(), 1);
    }

    #[test]
    fn what_an_earlier_server_told_is_gone_when_all_of_this_ones_is_acknowledged() {
        for variant in [Variant::Sotw, Variant::Delta] {
            let mut ledgers = ledgers();
            ledgers.listeners.process_began();
            ledgers.listeners.inherit();
            for name in ["egress-1", "egress-2"] {
                ledgers.listeners.set(name, Some(Any::default()));
            }
            let mut stream = Stream::new(variant, 1);
            let has = vec![("egress-1".to_owned(), "0".to_owned()), ("egress-3".to_owned(), "0".to_owned())];
            stream.on_request(Request { has, ..request(LISTENER_TYPE, &[]) }, &mut ledgers).expect("a small request");
            let mut answer = |ledgers: &mut Ledgers, error: Option<&str>| {
                let nonce = stream.next_response(ledgers).0.expect("a response").nonce;
                assert!(ledgers.listeners.is_inherited(), "it has not answered");
                let answer = Request { nonce, error: error.map(str::to_owned), ..request(LISTENER_TYPE, &[]) };
                stream.on_request(answer, ledgers).expect("a small request");
            };
            answer(&mut ledgers, Some("Error adding/updating listener(s) egress-1: no"));
            assert!(ledgers.listeners.is_inherited(), "egress-1 is as it was");
            ledgers.listeners.set("egress-2", Some(Any { type_url: "other".into(), ..Any::default() }));
            answer(&mut ledgers, Some("Error adding/updating listener(s) egress-1: no\negress-2: no"));
            ledgers.listeners.set("egress-1", Some(Any { type_url: "other".into(), ..Any::default() }));
            answer(&mut ledgers, None);
            assert!(!ledgers.listeners.is_inherited(), "{variant:?}: each was acknowledged once");
        }
    }

    #[test]
    fn what_a_stream_may_ask_is_bounded() {
        let mut ledgers = ledgers();
        let mut stream = Stream::new(Variant::Delta, 1);
        for number in 0..MAX_TYPES {
            stream.on_request(request(&number.to_string(), &[]), &mut ledgers).expect("few types");
        }
        assert_eq!(stream.on_request(request("another", &[]), &mut ledgers), Err(StreamError::Types));
        let many = vec!["a"; MAX_NAMES + 1];
        assert_eq!(stream.on_request(request("0", &many), &mut ledgers), Err(StreamError::Names));
        let long = "a".repeat(MAX_NAME + 1);
        assert_eq!(stream.on_request(request("0", &[&long]), &mut ledgers), Err(StreamError::Names));
        let has = vec![(long, String::new())];
        assert_eq!(stream.on_request(Request { has, ..request("0", &[]) }, &mut ledgers), Err(StreamError::Names));
    }

    #[test]
    fn a_reason_is_that_of_its_listener() {
        let text = "Error adding/updating listener(s) egress-1: no\negress-10: never\n";
        assert_eq!(reason_of("egress-1", text), Some("no"));
        assert_eq!(reason_of("egress-10", text), Some("never"));
        assert_eq!(reason_of("egress-100", text), None);
        assert_eq!(cut(&"ä".repeat(MAX_REASON)).len(), MAX_REASON);
    }
}
