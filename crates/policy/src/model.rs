//! Policies independent of their document format.
//!
//! **Precedence.** The sender (egress) and the receiver (ingress) must both accept a packet. The policies that select
//! the endpoint apply, by tier ([`Tier`]):
//!
//! 1. *Admin*: by ascending priority, then by name; rules in order. The first matching rule decides; pass continues
//!    with the next tier.
//! 2. *Namespaced*: deny if a deny rule matches. Else accept if an accept rule matches: any content if one of them has
//!    no requests, else what one of them accepts ([`Requests`]). Else deny if a policy isolates this direction, by the
//!    first matching exception ([`Action::Except`]) if there is one. Else the next tier.
//! 3. *Baseline*: like admin.
//!
//! Otherwise the packet is accepted. [`Enforcement`] may isolate or exempt an endpoint.
//!
//! **Unknown labels of a namespace** ([`UNKNOWN_LABELS`]). A packet passes only if it would pass with any labels there:
//! an accept rule must match for certain, by subject and peer; a deny rule and isolation apply if they could. A pass of
//! the admin tier that could apply denies.

use std::{collections::BTreeMap, collections::BTreeSet, fmt, net::IpAddr, ops::RangeInclusive, sync::Arc};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
pub use wharf_names::port::Protocol;

use crate::{names::NamePattern, requests::Requests};

/// Kubernetes' label with a namespace's name.
pub const NAMESPACE_NAME: &str = "kubernetes.io/metadata.name";

/// Marks a namespace with other, unknown labels; the value is empty. No label has an empty key.
pub const UNKNOWN_LABELS: &str = "";

/// Labels by key; a pod's keys have a source prefix (`k8s:app`).
pub type Labels = BTreeMap<String, String>;

/// Numbers by protocol and name.
pub type NamedPorts = BTreeMap<(Protocol, String), u16>;

/// Location in a document.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Origin {
    /// File or other source.
    pub file: Arc<str>,
    /// From 1.
    pub line: u32,
    /// As `NetworkPolicy shop/db`.
    pub document: Arc<str>,
    /// As `spec.ingress[0]`.
    pub field: String,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}, {}", self.file, self.line, self.document, self.field)
    }
}

/// Evaluation order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// Before namespaced policies.
    Admin,
    /// `NetworkPolicy` and Cilium rules.
    Namespaced,
    /// Where no other tier decides.
    Baseline,
}

/// Rules for a set of endpoints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// A later document with an equal name replaces the policy.
    pub name: PolicyName,
    /// Selects its endpoints.
    pub subject: Selector,
    pub tier: Tier,
    /// Lower first: 0 to 1,000; always 0 in the namespaced tier.
    pub priority: u16,
    /// Directions in which subjects need an accept rule.
    pub isolates: Directions,
    /// In document order.
    pub rules: Vec<Rule>,
    /// Source.
    pub origin: Origin,
}

impl Policy {
    /// Adds rules ([`Action::Except`]) for the exceptions of egress networks that accept one of `services`: an excepted
    /// container can be behind it.
    #[must_use]
    pub fn with_exceptions_behind(mut self, services: &[IpNet]) -> Self {
        if self.tier != Tier::Namespaced {
            return self;
        }
        let excepting = |rule: &Rule| {
            let is_of_egress = rule.direction == Direction::Egress && rule.action == Action::Accept;
            let peers = rule.peers.iter().flatten().filter(|_| is_of_egress);
            let nets: Vec<Peer> = peers.flat_map(|peer| peer.exceptions_behind(services)).collect();
            let rule = || Rule { action: Action::Except, ports: None, requests: None, ..rule.clone() };
            (!nets.is_empty()).then(|| Rule { peers: Some(nets), ..rule() })
        };
        let more: Vec<Rule> = self.rules.iter().filter_map(excepting).collect();
        self.rules.extend(more);
        self
    }
}

/// Kind, namespace and name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PolicyName {
    /// `NetworkPolicy`, `ClusterNetworkPolicy`, `CiliumNetworkPolicy`, `CiliumClusterwideNetworkPolicy`.
    pub kind: String,
    /// Empty without a namespace.
    pub namespace: String,
    pub name: String,
}

impl fmt::Display for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, namespace, name } = self;
        if namespace.is_empty() { write!(f, "{kind} {name}") } else { write!(f, "{kind} {namespace}/{name}") }
    }
}

/// Set of directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Directions {
    /// Toward the endpoint.
    pub ingress: bool,
    /// From the endpoint.
    pub egress: bool,
}

/// A direction, from the endpoint's view.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Direction {
    /// Toward the endpoint.
    Ingress,
    /// From the endpoint.
    Egress,
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        })
    }
}

/// Effect of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Action {
    Accept,
    /// Drop.
    Deny,
    /// Continue with the next tier; not in the namespaced tier.
    Pass,
    /// In an isolated direction, drop what no accept rule matches ([`Policy::with_exceptions_behind`]).
    Except,
}

/// Matches a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    pub direction: Direction,
    pub action: Action,
    /// `None` for all; empty for none.
    pub peers: Option<Vec<Peer>>,
    /// `None` for all; empty for none.
    pub ports: Option<Vec<Port>>,
    /// `None` for all. Only for namespaced accept rules with ports.
    pub requests: Option<Arc<Requests>>,
    /// Source.
    pub origin: Origin,
}

/// Peers of a packet.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Peer {
    /// Endpoints, by labels.
    Endpoints(Selector),
    /// Addresses, including endpoints'.
    Network {
        /// Without host bits.
        net: IpNet,
        /// Each inside the network.
        except: Vec<IpNet>,
    },
    /// Known addresses, except of endpoints and the node: a DNS server opens no access to containers.
    Names(NamePattern),
    /// Without labels.
    Entity(Entity),
}

impl Peer {
    /// Exceptions of a network that accepts one of `services`.
    fn exceptions_behind(&self, services: &[IpNet]) -> Vec<Self> {
        let Self::Network { net, except } = self else { return Vec::new() };
        let accepts = |service: &IpNet| net.contains(service) && !except.iter().any(|except| except.contains(service));
        if !services.iter().any(accepts) {
            return Vec::new();
        }
        except.iter().map(|net| Self::Network { net: *net, except: Vec::new() }).collect()
    }
}

/// Peers without labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Entity {
    /// Every peer.
    All,
    /// Neither an endpoint nor a node.
    World,
    /// The node.
    Host,
    /// Endpoints, also the health endpoint, and other nodes.
    Cluster,
    /// Other nodes of the cluster.
    RemoteNode,
    /// The node's health endpoint.
    Health,
}

/// A destination.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Port {
    /// TCP, UDP or SCTP.
    Numbers { protocol: Protocol, ports: PortRange },
    /// The receiver's number; without one, no match.
    Named { protocol: Protocol, name: String },
    /// ICMP or ICMPv6.
    Icmp {
        /// ICMPv6, else ICMP.
        v6: bool,
        /// Type (RFC 792, RFC 4443); `None` for all.
        kind: Option<u8>,
    },
}

/// Inclusive port range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortRange {
    pub first: u16,
    /// At least `first`.
    pub last: u16,
}

impl PortRange {
    /// All ports.
    pub const ALL: Self = Self { first: 0, last: u16::MAX };

    /// As a standard range.
    #[must_use]
    pub const fn range(self) -> RangeInclusive<u16> {
        self.first..=self.last
    }
}

/// Endpoints that meet every requirement.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Selector(pub BTreeSet<Requirement>);

/// A requirement on a label.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Requirement {
    /// Label owner.
    pub of: LabelOf,
    /// A pod's key has its source (`k8s:app`), or `any:`.
    pub key: String,
    /// On the value.
    pub holds: Holds,
}

/// Owner of a label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LabelOf {
    Endpoint,
    /// Its namespace, if any.
    Namespace,
}

/// Condition on a label's value.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Holds {
    /// Present with one of these values.
    In(BTreeSet<String>),
    /// Absent, or with another value.
    NotIn(BTreeSet<String>),
    /// Present.
    Exists,
    /// Absent.
    DoesNotExist,
}

/// An endpoint for policy. Endpoints with equal labels and ports may share them: a cluster has many such containers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Endpoint {
    pub addresses: Arc<[IpAddr]>,
    /// Keys with source.
    pub labels: Arc<Labels>,
    /// With [`NAMESPACE_NAME`], perhaps [`UNKNOWN_LABELS`]; `None` without a namespace.
    pub namespace: Option<Arc<Labels>>,
    pub ports: Arc<NamedPorts>,
    /// The node's health endpoint.
    pub health: bool,
    /// On another node: only a peer.
    pub elsewhere: bool,
    /// Enforcement mode.
    pub enforcement: Enforcement,
}

/// Which policies apply.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Enforcement {
    /// As selected.
    #[default]
    Default,
    /// As default, and isolated in both directions.
    Always(Arc<PolicyName>),
    /// None.
    Never,
}

impl Endpoint {
    /// Whether a policy with this subject can apply.
    #[must_use]
    pub fn is_subject(&self, subject: &Selector) -> bool {
        !self.elsewhere
            && self.enforcement != Enforcement::Never
            && subject.may_select(&self.labels, self.namespace.as_deref())
    }
}

impl Selector {
    /// All requirements hold for any values of unknown labels.
    #[must_use]
    pub fn selects(&self, labels: &Labels, namespace: Option<&Labels>) -> bool {
        self.0.iter().all(|requirement| requirement.holds_for(labels, namespace) == Some(true))
    }

    /// All requirements hold for some values of unknown labels.
    #[must_use]
    pub fn may_select(&self, labels: &Labels, namespace: Option<&Labels>) -> bool {
        self.0.iter().all(|requirement| requirement.holds_for(labels, namespace) != Some(false))
    }

    pub(crate) fn needs_namespace_labels(&self) -> bool {
        self.0.iter().any(|requirement| requirement.of == LabelOf::Namespace && requirement.key != NAMESPACE_NAME)
    }
}

/// As `k8s:app=db, in namespace shop`.
impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = |of| self.0.iter().filter(move |requirement| requirement.of == of);
        let mut words: Vec<_> = of(LabelOf::Endpoint).map(Requirement::words).collect();
        if words.is_empty() {
            words.push("all endpoints".to_owned());
        }
        words.extend(of(LabelOf::Namespace).map(Requirement::of_namespace));
        f.write_str(&words.join(", "))
    }
}

fn any_of(values: &BTreeSet<String>) -> String {
    let shown = values.iter().map(|value| if value.is_empty() { "\"\"" } else { value.as_str() });
    shown.collect::<Vec<_>>().join(" or ")
}

impl Requirement {
    fn words(&self) -> String {
        let Self { key, holds, .. } = self;
        match holds {
            Holds::In(values) => format!("{key}={}", any_of(values)),
            Holds::NotIn(values) => format!("{key} not {}", any_of(values)),
            Holds::Exists => format!("with {key}"),
            Holds::DoesNotExist => format!("without {key}"),
        }
    }

    fn of_namespace(&self) -> String {
        if self.key != NAMESPACE_NAME {
            return format!("namespace {}", self.words());
        }
        match &self.holds {
            Holds::In(names) => format!("in namespace {}", any_of(names)),
            Holds::NotIn(names) => format!("not in namespace {}", any_of(names)),
            Holds::Exists => "in any namespace".to_owned(),
            Holds::DoesNotExist => "in no namespace".to_owned(),
        }
    }

    /// `None` if it depends on an unknown label.
    fn holds_for(&self, labels: &Labels, namespace: Option<&Labels>) -> Option<bool> {
        Some(match self.of {
            LabelOf::Endpoint => match self.key.strip_prefix("any:") {
                // Requirements match any source, negations all sources.
                Some(key) => {
                    let of = |label: &&String| label.split_once(':').is_some_and(|(_, own)| own == key);
                    self.holds.holds(labels.iter().filter(|(label, _)| of(label)).map(|(_, value)| value))
                }
                None => self.holds.holds(labels.get(&self.key).into_iter()),
            },
            LabelOf::Namespace => {
                let value = namespace.and_then(|labels| labels.get(&self.key));
                if value.is_none() && namespace.is_some_and(|labels| labels.contains_key(UNKNOWN_LABELS)) {
                    return None;
                }
                self.holds.holds(value.into_iter())
            }
        })
    }
}

impl Holds {
    fn holds<'a>(&self, mut values: impl Iterator<Item = &'a String>) -> bool {
        match self {
            Self::In(set) => values.any(|value| set.contains(value)),
            Self::NotIn(set) => !values.any(|value| set.contains(value)),
            Self::Exists => values.next().is_some(),
            Self::DoesNotExist => values.next().is_none(),
        }
    }
}
