//! The caller's configuration.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    future::Future,
    net::IpAddr,
    pin::Pin,
    sync::Arc,
    time::Duration,
};

/// Whether a name ([`crate::wire::Question::name`]) may be queried.
pub type Passes = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// A port, for endpoints with the same allowed names.
#[derive(Clone)]
pub struct Listener {
    /// The allowed names.
    pub asks: Passes,
    /// Addresses; of two members, an address belongs to the later epoch.
    pub members: BTreeMap<Member, Vec<IpAddr>>,
    /// A new number (absent: 0) closes the member's connections at their next query.
    pub rounds: BTreeMap<Member, u32>,
}

impl Listener {
    /// Whether the name ([`crate::wire::Question::name`]) may be queried.
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

/// An endpoint that uses a listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Member {
    pub id: u16,
    /// Distinguishes endpoints with the same id.
    pub epoch: u64,
}

/// Answered addresses of a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The querying member.
    pub member: Member,
    /// Queried name, as in [`crate::wire::Question::name`].
    pub name: String,
    /// Distinct, 1 to 4,096 (a 65,535-byte message). Untrusted: may be the node's.
    pub addresses: Vec<(IpAddr, Duration)>,
}

/// Learns answered addresses.
pub trait Names: Send + Sync {
    /// Resolves when policy knows the addresses. On an error (for the operator) or after 2 s, the client gets no
    /// answer.
    fn learn<'a>(&'a self, answer: Answer) -> Pin<Box<dyn Future<Output = Result<(), String>> + Send + 'a>>;
}

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
