//! Events of the API. An Event's name hashes object and text: nodes that refuse a policy for the same reason share one
//! Event.

use std::{collections::BTreeMap, fmt::Write as _, time::Duration};

use jiff::Timestamp;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;

use crate::{
    api::{Api, Failure},
    objects::node::Node,
    producer::{self, AgentState, Refused, Subject},
};

const CONTROLLER: &str = "wharf.dev/wharf-kube";
/// Bytes of a note.
const MAX_NOTE: usize = 1_024;
/// Lifetime of an Event, which is created again while its cause lasts.
const AGAIN: Duration = Duration::from_secs(3_600);
/// Until a refused Event is retried.
const REFUSED: Duration = Duration::from_secs(600);
/// Events in a [`WINDOW`].
const MAX_EVENTS: u32 = 20;
const WINDOW: Duration = Duration::from_secs(60);
/// Names of Events that are remembered.
const MAX_NAMES: usize = 4_096;

#[derive(Debug, Clone, PartialEq, Eq)]
struct Event {
    namespace: String,
    reason: &'static str,
    action: &'static str,
    note: String,
    subject: Subject,
}

/// Creates Events: each once an hour, at most 20 a minute.
#[derive(Debug)]
pub struct Events {
    node: String,
    /// Time of creation by name.
    created: BTreeMap<String, Instant>,
    /// Cause and next attempt by name.
    refused: BTreeMap<String, (String, Instant)>,
    began: Instant,
    in_window: u32,
}

impl Events {
    /// For the node with this name.
    #[must_use]
    pub fn new(node: String) -> Self {
        Self { node, created: BTreeMap::new(), refused: BTreeMap::new(), began: Instant::now(), in_window: 0 }
    }

    /// Creates the state's Events; those beyond the limit wait for a later call. A refused Event is logged once for
    /// each cause and retried after 10 minutes.
    ///
    /// # Errors
    /// The request of an Event has no answer, or one about all requests (401, 429); others are not tried.
    pub async fn report(&mut self, api: &Api, node: &Node, state: &AgentState) -> Result<(), Failure> {
        self.created.retain(|_, at| at.elapsed() < AGAIN);
        if self.began.elapsed() >= WINDOW {
            (self.began, self.in_window) = (Instant::now(), 0);
        }
        let events: Vec<_> = events(node, state).into_iter().map(|event| (event.name(), event)).collect();
        self.refused.retain(|name, _| events.iter().any(|(of, _)| of == name));
        for (name, event) in events {
            let is_refused = self.refused.get(&name).is_some_and(|(_, until)| *until > Instant::now());
            if is_refused || self.created.contains_key(&name) {
                continue;
            }
            if self.in_window >= MAX_EVENTS || self.created.len() >= MAX_NAMES {
                return Ok(());
            }
            self.in_window += 1;
            let path = format!("/apis/events.k8s.io/v1/namespaces/{}/events", event.namespace);
            match api.create(&path, &event.object(&name, &self.node, Timestamp::now())).await {
                Ok(()) => {}
                // Created by another node or an earlier run, or the namespace is ending.
                Err(failure) if matches!(failure.code(), Some(403 | 404 | 409)) => {
                    tracing::debug!(name, "no Event: {failure}");
                }
                // Refused, for example by a webhook.
                Err(failure) if failure.code().is_some_and(|code| code != 401 && code != 429) => {
                    let (why, until) = (failure.to_string(), Instant::now() + REFUSED);
                    let before = self.refused.insert(name, (why.clone(), until));
                    if before.is_none_or(|(before, _)| before != why) {
                        let Subject { kind, namespace, name, .. } = event.subject;
                        tracing::warn!(kind, namespace, name, "the Event {} is not created: {why}", event.reason);
                    }
                    continue;
                }
                Err(failure) => return Err(failure),
            }
            self.refused.remove(&name);
            self.created.insert(name, Instant::now());
        }
        Ok(())
    }
}

const PROBLEM: &str = "AgentProblem";

fn events(node: &Node, state: &AgentState) -> Vec<Event> {
    let policies = state.refused.iter().filter_map(policy);
    let problems = state.report.iter().flat_map(|report| &report.problems).map(|problem| Event {
        namespace: "default".to_owned(),
        reason: PROBLEM,
        action: "Check",
        note: problem.clone(),
        subject: Subject {
            api_version: "v1".to_owned(),
            kind: "Node",
            namespace: String::new(),
            name: node.metadata.name.clone(),
            uid: node.metadata.uid.clone(),
        },
    });
    policies.chain(problems).collect()
}

fn policy(refused: &Refused) -> Option<Event> {
    let subject = refused.subject.clone()?;
    // The flags do not show whether the policy's pods are open. A stale row has an earlier version, or lacks only the
    // proxy's acknowledgement. For other rows, the kernel can have rules of an earlier version.
    let state = match (refused.row.stale, refused.row.conflict) {
        (true, _) => "The policy is not in force as written. An earlier version or a part of it may be in force.",
        (false, true) => "Another policy with its name is in force instead.",
        (false, false) => "The policy is not in force as written. Its pods may be open.",
    };
    // Events without a namespace are in `default`.
    let namespace = if subject.namespace.is_empty() { "default".to_owned() } else { subject.namespace.clone() };
    let note = format!("{state} {}", refused.row.reason);
    Some(Event { namespace, reason: "PolicyRefused", action: "ApplyPolicy", note, subject })
}

impl Event {
    /// Equal on all nodes for one object and cause.
    fn name(&self) -> String {
        let mut hash = Sha256::new();
        let cause = match self.reason {
            PROBLEM => producer::cause(&self.note),
            _ => self.note.as_str(),
        };
        for part in [self.subject.uid.as_str(), self.subject.kind, &self.subject.name, self.reason, cause] {
            hash.update(part.as_bytes());
            hash.update([0]);
        }
        let mut name = "wharf-".to_owned();
        for byte in hash.finalize().iter().take(16) {
            // A write to a String does not fail.
            let _ = write!(name, "{byte:02x}");
        }
        name
    }

    fn object(&self, name: &str, node: &str, now: Timestamp) -> Value {
        let Subject { api_version, kind, namespace, name: subject, uid } = &self.subject;
        let mut end = self.note.len().min(MAX_NOTE);
        while !self.note.is_char_boundary(end) {
            end -= 1;
        }
        json!({
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": self.namespace},
            "eventTime": format!("{now:.6}"),
            "type": "Warning",
            "reason": self.reason,
            "action": self.action,
            "note": self.note.get(..end).unwrap_or_default(),
            "reportingController": CONTROLLER,
            "reportingInstance": node.get(..node.len().min(128)).unwrap_or_default(),
            "regarding": {"apiVersion": api_version, "kind": kind, "namespace": namespace, "name": subject, "uid": uid},
        })
    }
}

#[cfg(test)]
mod tests {
    use wharf_feed::v1;

    use super::*;

    fn refused(stale: bool, namespace: &str) -> Refused {
        let subject = Subject {
            api_version: "networking.k8s.io/v1".into(),
            kind: "NetworkPolicy",
            namespace: namespace.into(),
            name: "web".into(),
            uid: "p1".into(),
        };
        let row = v1::RefusedRow { reason: "é".repeat(900), stale, ..v1::RefusedRow::default() };
        Refused { row, subject: Some(subject) }
    }

    #[test]
    fn a_problem_with_other_numbers_is_the_same_event() {
        let names = |problem: &str| {
            let report = v1::Report { problems: vec![problem.into()], ..v1::Report::default() };
            let state = AgentState { report: Some(report), ..AgentState::default() };
            events(&Node::default(), &state).iter().map(Event::name).collect::<Vec<_>>()
        };
        assert_eq!(names("cluster: 3 nodes; pods 7"), names("cluster: 3 nodes; pods 8"));
        assert_ne!(names("cluster: 3 nodes"), names("store: 3 commits"));
    }

    #[test]
    fn an_event_says_what_is_in_force_and_fits() {
        let earlier = policy(&refused(true, "shop")).expect("an event");
        let written = "The policy is not in force as written.";
        let stale = format!("{written} An earlier version or a part of it may be in force. é");
        assert!(earlier.note.starts_with(&stale), "also a new policy whose proxy is absent is stale");
        assert_eq!(earlier.namespace, "shop");
        let none = policy(&refused(false, "")).expect("an event");
        let open = format!("{written} Its pods may be open. é");
        assert!(none.note.starts_with(&open), "the kernel may have rules of a policy that this version cannot read");
        assert_eq!(none.namespace, "default");
        let object = none.object(&none.name(), "a", Timestamp::UNIX_EPOCH);
        assert!(object["note"].as_str().is_some_and(|note| note.len() <= MAX_NOTE && note.len() > MAX_NOTE - 4));
        assert_eq!(object["eventTime"], "1970-01-01T00:00:00.000000Z");
        assert_ne!(earlier.name(), none.name());
        assert_eq!(none.name(), policy(&refused(false, "")).expect("an event").name());
    }
}
