//! Reads the producer's changes: hostile input.

use std::{collections::BTreeMap, str::FromStr};

use wharf_api::FeedWatch;
use wharf_cluster::feed::{Change, FeedNamespace, FeedNode, FeedPod, FeedPolicy, Key, Kind, Row};
use wharf_core::nat::Protocol;
use wharf_feed::v1;

/// Characters of a refused text in a message.
const MAX_QUOTED: usize = 80;
const MAX_WATCHES: usize = 32;
/// Characters of a watch's name, and of its state.
const MAX_WORD: usize = 63;
/// Characters of a watch's error.
const MAX_ERROR: usize = 512;

/// A change of a message.
#[derive(Debug)]
pub enum Read {
    Change(Change),
    /// An unreadable row and the cause. Only its key and name matter.
    Unreadable(Row, String),
}

pub(super) fn kind(name: &str) -> Option<Kind> {
    Kind::ALL.into_iter().find(|kind| kind.to_string() == name)
}

pub(super) fn shown(text: &str) -> String {
    clipped(text, MAX_QUOTED)
}

fn clipped(text: &str, characters: usize) -> String {
    text.chars().filter(|c| !c.is_control()).take(characters).collect()
}

/// Watches are only displayed: what breaks a rule is dropped or cut.
pub(super) fn read_watches(sent: v1::Watches) -> Vec<FeedWatch> {
    let read = |v1::Watch { name, state, since_unix_ms, error }| {
        let [name, state] = [name, state].map(|word| clipped(&word, MAX_WORD));
        let error = Some(clipped(&error, MAX_ERROR)).filter(|error| !error.is_empty());
        (!name.is_empty() && !state.is_empty()).then_some(FeedWatch { name, state, since_unix_ms, error })
    };
    sent.watches.into_iter().filter_map(read).take(MAX_WATCHES).collect()
}

/// Reads the changes of a message. Slow for policies.
///
/// # Errors
/// A change that no stream may have.
pub fn read(changes: v1::Changes) -> Result<Vec<Read>, String> {
    changes.changes.into_iter().map(change).collect()
}

fn change(sent: v1::Change) -> Result<Read, String> {
    use v1::change::Change as Sent;
    let named = |name: &str| kind(name).ok_or_else(|| format!("kind {:?} is not known", shown(name)));
    let change = match sent.change.ok_or("a change has no content that this agent knows")? {
        Sent::Begin(begin) => Change::Begin(named(&begin.kind)?),
        Sent::Complete(complete) => Change::Complete(named(&complete.kind)?),
        Sent::Delete(delete) => Change::Delete(Key { kind: named(&delete.kind)?, key: delete.key }),
        Sent::Put(put) => {
            let mut reader = Reader::default();
            let size = put.size();
            if size > wharf_feed::MAX_ROW {
                reader.refuse(|| format!("it has {size} bytes; at most {} fit", wharf_feed::MAX_ROW));
            }
            let row = reader.row(put.row.ok_or("a row has no content that this agent knows")?);
            if let Some(why) = reader.problem {
                return Ok(Read::Unreadable(row, why));
            }
            Change::Put(row)
        }
    };
    Ok(Read::Change(change))
}

#[derive(Default)]
struct Reader {
    problem: Option<String>,
}

impl Reader {
    fn refuse(&mut self, why: impl FnOnce() -> String) {
        if self.problem.is_none() {
            self.problem = Some(why());
        }
    }

    fn row(&mut self, row: v1::row::Row) -> Row {
        match row {
            v1::row::Row::Node(node) => Row::Node(FeedNode {
                name: node.name,
                uid: node.uid,
                addresses: self.list(&node.addresses, "IP address"),
                pod_cidrs: self.list(&node.pod_cidrs, "CIDR (ADDRESS/PREFIX)"),
                health_addresses: self.list(&node.health_addresses, "IP address"),
                router_addresses: self.list(&node.router_addresses, "IP address"),
            }),
            v1::row::Row::Pod(pod) => Row::Pod(FeedPod {
                uid: pod.uid.into(),
                namespace: pod.namespace.into(),
                name: pod.name.into(),
                addresses: self.list(&pod.addresses, "IP address").into(),
                node: pod.node.into(),
                labels: pod.labels.into(),
                named_ports: self.ports(pod.named_ports).into(),
            }),
            v1::row::Row::Namespace(namespace) => {
                Row::Namespace(FeedNamespace { name: namespace.name, labels: namespace.labels })
            }
            v1::row::Row::Policy(policy) => {
                self.check_policy(&policy);
                Row::Policy(FeedPolicy { key: policy.key, text: policy.text })
            }
        }
    }

    /// Skips invalid texts.
    fn list<T: FromStr>(&mut self, texts: &[String], what: &str) -> Vec<T> {
        let mut read = Vec::with_capacity(texts.len());
        for text in texts {
            match text.parse::<T>() {
                Ok(value) => read.push(value),
                Err(_) => self.refuse(|| format!("{:?} is no {what}", shown(text))),
            }
        }
        read
    }

    fn ports(&mut self, ports: Vec<v1::NamedPort>) -> BTreeMap<(Protocol, String), u16> {
        let mut read = BTreeMap::new();
        for port in ports {
            let protocol = match port.protocol() {
                v1::named_port::Protocol::Tcp => Protocol::Tcp,
                v1::named_port::Protocol::Udp => Protocol::Udp,
                v1::named_port::Protocol::Sctp => Protocol::Sctp,
                v1::named_port::Protocol::Unspecified => {
                    self.refuse(|| format!("port {:?} has no protocol that is known", shown(&port.name)));
                    continue;
                }
            };
            match u16::try_from(port.port) {
                Ok(number) => {
                    read.insert((protocol, port.name), number);
                }
                Err(_) => self.refuse(|| format!("port {:?} has the number {}", shown(&port.name), port.port)),
            }
        }
        read
    }

    /// Before the row replaces its predecessor: an invalid document must not remove a policy, also not after a restart.
    fn check_policy(&mut self, policy: &v1::Policy) {
        if self.problem.is_some() {
            return;
        }
        if let Err(refusals) = wharf_policy::read::read(&policy.key, &policy.text) {
            self.refuse(|| refusals.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "));
        }
    }
}

#[cfg(test)]
mod tests {
    use wharf_cluster::feed::{ApplyError, Feed, Limits};

    use super::*;

    #[test]
    fn watches_are_bounded_in_number_and_length() {
        let watch = |name: &str, state: &str, error: &str| v1::Watch {
            name: name.into(),
            state: state.into(),
            since_unix_ms: u64::MAX,
            error: error.into(),
        };
        let one = |name: &str, state: &str, error: &str| {
            read_watches(v1::Watches { watches: vec![watch(name, state, error)] }).pop()
        };
        let long = format!("a\u{1b}{}", "é".repeat(2 * MAX_ERROR));
        let read = one("Pod", "of-a-later-version", &long).expect("a watch");
        assert_eq!(read.error.map(|error| error.chars().count()), Some(MAX_ERROR));
        assert_eq!(one("Pod", "watching", "\n").and_then(|watch| watch.error), None);
        assert_eq!(one(&long, "watching", "").map(|watch| watch.name.chars().count()), Some(MAX_WORD));
        assert_eq!([one("", "watching", ""), one("\n", "watching", ""), one("Pod", "", "")], [None, None, None]);
        assert_eq!(read_watches(v1::Watches { watches: vec![watch("Pod", "listing", ""); 99] }).len(), MAX_WATCHES);
    }

    fn put(row: v1::row::Row) -> v1::Change {
        v1::Change { change: Some(v1::change::Change::Put(v1::Row { row: Some(row) })) }
    }

    fn node(address: &str, cidr: &str) -> v1::Change {
        put(v1::row::Row::Node(v1::Node {
            name: "b".into(),
            uid: "1".into(),
            addresses: vec![address.into()],
            pod_cidrs: vec![cidr.into()],
            health_addresses: Vec::new(),
            router_addresses: Vec::new(),
        }))
    }

    fn pod(port: v1::NamedPort) -> v1::Change {
        put(v1::row::Row::Pod(v1::Pod {
            uid: "1".into(),
            namespace: "shop".into(),
            name: "web".into(),
            node: "b".into(),
            addresses: vec!["10.88.0.9".into()],
            labels: BTreeMap::from([("app".into(), "web".into())]),
            named_ports: vec![port],
        }))
    }

    fn port(protocol: i32, port: u32) -> v1::NamedPort {
        v1::NamedPort { name: "http".into(), protocol, port }
    }

    fn policy(text: &str) -> v1::Change {
        put(v1::row::Row::Policy(v1::Policy { key: "NetworkPolicy shop/web".into(), text: text.into() }))
    }

    fn begin(kind: &str) -> v1::Change {
        v1::Change { change: Some(v1::change::Change::Begin(v1::Begin { kind: kind.into() })) }
    }

    const DENY: &str = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: web, namespace: shop}\n\
                        spec: {podSelector: {}}\n";

    fn feed() -> Feed {
        let mut feed = Feed::new("a", Limits::default());
        feed.open(Kind::ALL.into_iter().collect());
        let rows = [node("192.0.2.2", "10.88.0.0/24"), pod(port(1, 80)), policy(DENY)];
        let changes = ["node", "pod", "namespace", "policy"].map(begin).into_iter().chain(rows).collect();
        for read in read(v1::Changes { changes }).expect("changes") {
            match read {
                Read::Change(change) => feed.apply(change).expect("applied"),
                Read::Unreadable(_, why) => panic!("{why}"),
            }
        }
        feed
    }

    #[test]
    fn a_row_that_cannot_be_read_is_refused_and_its_predecessor_stays() {
        for (sent, why) in [
            (node("192.0.2", "10.88.0.0/24"), "\"192.0.2\" is no IP address"),
            (node("192.0.2.2", "10.88.0.0"), "\"10.88.0.0\" is no CIDR (ADDRESS/PREFIX)"),
            (pod(port(1, 65_536)), "port \"http\" has the number 65536"),
            (pod(port(9, 80)), "port \"http\" has no protocol that is known"),
            (policy("kind: Nothing"), ""),
            (policy(&" ".repeat(wharf_feed::MAX_ROW)), "bytes; at most 1572864 fit"),
        ] {
            let mut feed = feed();
            let mut all = read(v1::Changes { changes: vec![sent] }).expect("a change");
            let Some(Read::Unreadable(row, told)) = all.pop() else { panic!("{why}: it is read") };
            assert!(told.contains(why), "{told}, not {why}");
            match feed.refuse(row, told) {
                Err(ApplyError::Refused(refusal)) => assert!(refusal.stale, "{refusal:?}"),
                other => panic!("{why}: {other:?}"),
            }
        }
    }

    #[test]
    fn an_unknown_change_or_kind_is_named() {
        let all = |change| read(v1::Changes { changes: vec![change] }).expect_err("refused");
        assert!(all(v1::Change { change: None }).contains("no content"));
        assert!(all(put_nothing()).contains("no content"));
        assert_eq!(all(begin("service\u{1b}")), "kind \"service\" is not known");
    }

    fn put_nothing() -> v1::Change {
        v1::Change { change: Some(v1::change::Change::Put(v1::Row { row: None })) }
    }
}
