//! Policies without the format that they were written in.
//!
//! **Precedence.** A packet is judged twice: at its sender (egress) and at its receiver (ingress); both must let it pass. One direction
//! of one endpoint is judged by the policies whose subject selects the endpoint, tier after tier ([`Tier`]):
//!
//! 1. *Admin*: policies by ascending priority, then by name; their rules in order. The first rule that matches decides: accept and deny
//!    are final, pass goes on to the next tier.
//! 2. *Namespaced*: if a deny rule matches, deny. Else, if an accept rule matches, accept: whatever the connection carries, if one of them has no
//!    requests, else what one of them lets pass ([`Requests`]). Else, if a policy isolates this direction, deny: no rule allows the packet. Else
//!    the next tier.
//! 3. *Baseline*: as admin.
//!
//! A packet that no tier decides is accepted. An endpoint may be isolated without a policy, or be the subject of none ([`Enforcement`]).

use std::{collections::BTreeMap, collections::BTreeSet, fmt, net::IpAddr, ops::RangeInclusive, sync::Arc};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::{names::NamePattern, requests::Requests};

/// Label that every namespace has: its name (Kubernetes, well-known labels).
pub const NAMESPACE_NAME: &str = "kubernetes.io/metadata.name";

/// Labels by key, of a pod or of a namespace. A pod's keys have their source in front (`k8s:app`), a namespace's have none.
pub type Labels = BTreeMap<String, String>;

/// Where something was written.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Origin {
    /// The file, or what else the text came from.
    pub file: Arc<str>,
    /// Line, from 1.
    pub line: u32,
    /// Kind and name of the document: `NetworkPolicy shop/db`.
    pub document: Arc<str>,
    /// Path of the field: `spec.ingress[0]`.
    pub field: String,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}, {}", self.file, self.line, self.document, self.field)
    }
}

/// Order in which policies decide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// Before what namespaces say.
    Admin,
    /// `NetworkPolicy` and Cilium-style rules.
    Namespaced,
    /// What holds where nothing else decides.
    Baseline,
}

/// One document's worth of rules about one set of endpoints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// Kind, namespace and name: a later document with the same one replaces this.
    pub name: PolicyName,
    /// The endpoints that it is about.
    pub subject: Selector,
    /// When it decides.
    pub tier: Tier,
    /// Within the tier, lower first. 0 to 1,000; 0 in the namespaced tier, which has no order.
    pub priority: u16,
    /// Directions in which its subjects accept only what some rule accepts.
    pub isolates: Directions,
    /// In the order of the document.
    pub rules: Vec<Rule>,
    /// Where it was written.
    pub origin: Origin,
}

/// What identifies a policy.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PolicyName {
    /// `NetworkPolicy`, `ClusterNetworkPolicy`, `CiliumNetworkPolicy`, `CiliumClusterwideNetworkPolicy`.
    pub kind: String,
    /// Empty for what is not in a namespace.
    pub namespace: String,
    /// Name.
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
    /// To the endpoint.
    pub ingress: bool,
    /// From the endpoint.
    pub egress: bool,
}

/// A direction, as the endpoint sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Direction {
    /// To the endpoint.
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

/// What a rule does with what it matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Action {
    /// Lets it pass.
    Accept,
    /// Drops it.
    Deny,
    /// Leaves it to the next tier; not in the namespaced tier.
    Pass,
}

/// Matches a packet whose other end is one of the peers and whose destination is one of the ports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// Direction.
    pub direction: Direction,
    /// What becomes of it.
    pub action: Action,
    /// Other ends; `None` for every one. An empty list matches nothing.
    pub peers: Option<Vec<Peer>>,
    /// Ports; `None` for every packet, also of protocols without ports. An empty list matches nothing.
    pub ports: Option<Vec<Port>>,
    /// What the connections may carry; `None` for anything. Only of rules of the namespaced tier that accept; without ports, such a rule matches
    /// nothing.
    pub requests: Option<Arc<Requests>>,
    /// Where it was written.
    pub origin: Origin,
}

/// Other ends of a packet.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Peer {
    /// Endpoints by their labels. Never anything else.
    Endpoints(Selector),
    /// Addresses, endpoints' own included, without those of the exceptions (each inside the network).
    Network {
        /// The network, without host bits.
        net: IpNet,
        /// Networks inside it that do not match.
        except: Vec<IpNet>,
    },
    /// Addresses of the names of DNS that match, as far as they are known, but for those of endpoints and of the node: whoever answers for a name
    /// opens no container.
    Names(NamePattern),
    /// What has no labels.
    Entity(Entity),
}

/// Other ends without labels of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Entity {
    /// Every other end.
    All,
    /// What is neither an endpoint nor the node.
    World,
    /// The node itself.
    Host,
    /// Endpoints, those of the health check included.
    Cluster,
    /// The node's health endpoint.
    Health,
}

/// Destination of a packet.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Port {
    /// Numbers of TCP, UDP or SCTP ports; 0 to 65,535 for the whole protocol.
    Numbers {
        /// Protocol.
        protocol: Protocol,
        /// Destination ports.
        ports: PortRange,
    },
    /// The number that the receiving endpoint declares under this name and protocol; nothing where it declares none.
    Named {
        /// Protocol.
        protocol: Protocol,
        /// The port's name.
        name: String,
    },
    /// ICMP messages, for ICMP and ICMPv6 apart; `None` for every type.
    Icmp {
        /// ICMPv6, else ICMP.
        v6: bool,
        /// Type (RFC 792, RFC 4443).
        kind: Option<u8>,
    },
}

/// First and last port, ordered as a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortRange {
    /// First.
    pub first: u16,
    /// Last, not below the first.
    pub last: u16,
}

impl PortRange {
    /// All ports.
    pub const ALL: Self = Self { first: 0, last: u16::MAX };

    /// As a range of the standard library.
    #[must_use]
    pub const fn range(self) -> RangeInclusive<u16> {
        self.first..=self.last
    }
}

/// Protocols with ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

/// Endpoints for which every requirement holds; without requirements, every endpoint.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Selector(pub BTreeSet<Requirement>);

/// What a label must be.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Requirement {
    /// Whose label.
    pub of: LabelOf,
    /// Key. Of a pod with its source (`k8s:app`), or `any:app` for the key of any source.
    pub key: String,
    /// What holds of its value.
    pub holds: Holds,
}

/// Whose label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LabelOf {
    /// The endpoint's own.
    Endpoint,
    /// Those of its namespace; an endpoint without a namespace has none.
    Namespace,
}

/// What holds of a label's value.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Holds {
    /// There, with one of these values.
    In(BTreeSet<String>),
    /// Not there, or with another value than these.
    NotIn(BTreeSet<String>),
    /// There.
    Exists,
    /// Not there.
    DoesNotExist,
}

/// What policy knows of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Endpoint {
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// Its labels; keys with source.
    pub labels: Labels,
    /// Labels of its namespace, with `kubernetes.io/metadata.name`; `None` without a namespace.
    pub namespace: Option<Labels>,
    /// Ports that it declares by name.
    pub ports: BTreeMap<(Protocol, String), u16>,
    /// It is the node's health endpoint.
    pub health: bool,
    /// Whether policies are about it.
    pub enforcement: Enforcement,
}

/// Whether policies are about an endpoint. Rules about other endpoints know it as a peer all the same.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Enforcement {
    /// Those that select it.
    #[default]
    Default,
    /// Those that select it, and in both directions it accepts only what some rule accepts, as if a policy of this name isolated it.
    Always(Arc<PolicyName>),
    /// None.
    Never,
}

impl Endpoint {
    /// Whether the policy with this subject is about the endpoint.
    #[must_use]
    pub fn is_subject(&self, subject: &Selector) -> bool {
        self.enforcement != Enforcement::Never && subject.selects(&self.labels, self.namespace.as_ref())
    }
}

impl Selector {
    /// Whether the endpoint is selected.
    #[must_use]
    pub fn selects(&self, labels: &Labels, namespace: Option<&Labels>) -> bool {
        self.0.iter().all(|requirement| requirement.holds_for(labels, namespace))
    }
}

/// In words: `k8s:app=db, in namespace shop`.
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

/// Values of a label, of which an empty one is shown as such.
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

    fn holds_for(&self, labels: &Labels, namespace: Option<&Labels>) -> bool {
        match self.of {
            LabelOf::Endpoint => match self.key.strip_prefix("any:") {
                // A key may be there from several sources; requirements are about each of them, and "not" about all.
                Some(key) => {
                    let of = |label: &&String| label.split_once(':').is_some_and(|(_, own)| own == key);
                    self.holds.holds(labels.iter().filter(|(label, _)| of(label)).map(|(_, value)| value))
                }
                None => self.holds.holds(labels.get(&self.key).into_iter()),
            },
            LabelOf::Namespace => self.holds.holds(namespace.and_then(|n| n.get(&self.key)).into_iter()),
        }
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
