//! What the caller wants of the proxy: listeners, the endpoints that use them, and where the addresses go that it learns.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    future::Future,
    net::IpAddr,
    pin::Pin,
    sync::Arc,
    time::Duration,
};

/// Whether a name may be asked: lower case, no last dot (see [`crate::wire::Question::name`]).
pub type Passes = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// A listener: one port of the node's loopback addresses, shared by every endpoint whose policy lets the same names be asked.
#[derive(Clone)]
pub struct Listener {
    /// Which names may be asked.
    pub asks: Passes,
    /// Endpoints and their addresses. An address that two members name is that of the one with the later epoch.
    pub members: BTreeMap<Member, Vec<IpAddr>>,
    /// How often connections of a member were to begin anew; zero for those that are not here. Those that began with another number are closed at
    /// their next query.
    pub rounds: BTreeMap<Member, u32>,
}

impl Listener {
    /// Whether the name may be asked: lower case, no last dot.
    #[must_use]
    pub fn passes(&self, name: &str) -> bool {
        (self.asks)(name)
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Listener").field("members", &self.members).finish_non_exhaustive()
    }
}

/// An endpoint, as listeners know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Member {
    /// Endpoint id.
    pub id: u16,
    /// Epoch of the endpoint: tells it from an earlier one with the same id.
    pub epoch: u64,
}

/// The addresses that a server gave for a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// Who asked.
    pub member: Member,
    /// The name that was asked, in lower case and without the last dot (see [`crate::wire::Question::name`]).
    pub name: String,
    /// The addresses, at least one, each once, with the time that clients may keep it (TTL). At most 4,096 or so: what a message of
    /// 65,535 bytes has. The server is not trusted: an address may be one of the node's own.
    pub addresses: Vec<(IpAddr, Duration)>,
}

/// The node, which takes note of addresses before a client learns them.
pub trait Names: Send + Sync {
    /// Done when connections to these addresses are judged by the name. An error, in words for an operator, and more than 2 s keep the
    /// answer from the client; the future is dropped then.
    fn learn<'a>(&'a self, answer: Answer) -> Pin<Box<dyn Future<Output = Result<(), String>> + Send + 'a>>;
}

/// A listener with its members by address.
pub(crate) struct Served {
    listener: Listener,
    members: HashMap<IpAddr, Member>,
}

impl Served {
    pub(crate) fn new(listener: Listener) -> Self {
        let mut members = HashMap::new();
        for (member, addresses) in &listener.members {
            for address in addresses {
                let known = members.entry(address.to_canonical()).or_insert(*member);
                if known.epoch < member.epoch {
                    *known = *member;
                }
            }
        }
        Self { listener, members }
    }

    pub(crate) fn member(&self, address: IpAddr) -> Option<Member> {
        self.members.get(&address).copied()
    }

    pub(crate) fn round(&self, member: Member) -> u32 {
        self.listener.rounds.get(&member).copied().unwrap_or(0)
    }

    pub(crate) fn passes(&self, name: &str) -> bool {
        self.listener.passes(name)
    }
}
