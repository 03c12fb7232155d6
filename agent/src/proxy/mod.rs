//! The edge to the L7 proxy: what it is to do, and what waits for it.
//!
//! A redirect hands connections of endpoints to a port of the proxy. Policy says which redirects there are ([`Redirects::set`]); a
//! delete takes an endpoint out of all of them ([`Redirects::remove_redirects`]). Each answers with completions, which are over when the proxy
//! has acknowledged. [`Proxies`] is both proxies of a node; tests put another one in its place.

mod awaited;
pub mod clients;
pub mod dns;
pub mod envoy;
mod look;
mod proxies;
mod words;

use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
    net::IpAddr,
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use wharf_core::ids::{EndpointId, Epoch};
use wharf_policy::compile::Listener;

pub use self::{awaited::Awaited, look::Look, proxies::Proxies, words::passes};

/// Resolves when the proxy has done what was asked; an error says why it never will.
pub type Completion = Pin<Box<dyn Future<Output = Result<(), ProxyError>> + Send>>;

/// Why the proxy has not done what was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProxyError {
    /// It refused, with this reason; what it had before stays in force.
    #[error("{0}")]
    Refused(String),
    /// It refused, with this reason, because another program has this port.
    #[error("{1}")]
    Taken(u16, String),
    /// It did not answer, or has ended.
    #[error("{0}")]
    NoAnswer(String),
}

impl ProxyError {
    /// A refusal of the listener at this port.
    fn refused(port: u16, why: String) -> Self {
        // Both proxies end their reasons with the kernel's words.
        if why.contains("Address already in use") { Self::Taken(port, why) } else { Self::Refused(why) }
    }
}

/// Redirects by port of the proxy, host byte order.
pub type Wanted = BTreeMap<u16, Redirect>;

/// What the proxy does with the connections that a port is handed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Redirect {
    /// What they may carry.
    pub listener: Arc<Listener>,
    /// The endpoints whose connections they are, each with its addresses.
    pub members: BTreeMap<(EndpointId, Epoch), Vec<IpAddr>>,
    /// How often connections of an endpoint were to begin anew, because rows led some of them elsewhere; zero for those that are not here.
    pub rounds: BTreeMap<(EndpointId, Epoch), u32>,
}

impl Redirect {
    /// Its listener's name, by which completions are given (`ingress-15000`).
    #[must_use]
    pub fn name(&self, port: u16) -> String {
        look::name(port, self.listener.direction)
    }

    /// The members, as a proxy knows them: by number and epoch.
    fn members<M: Ord>(&self, member: impl Fn(u16, u64) -> M) -> BTreeMap<M, Vec<IpAddr>> {
        let members = self.members.iter();
        members.map(|((id, epoch), addresses)| (member(id.get(), epoch.0), addresses.clone())).collect()
    }

    /// The rounds, likewise.
    fn rounds<M: Ord>(&self, member: impl Fn(u16, u64) -> M) -> BTreeMap<M, u32> {
        self.rounds.iter().map(|((id, epoch), round)| (member(id.get(), epoch.0), *round)).collect()
    }
}

/// Endpoints that were taken out of all redirects, as long as policy still names them.
#[derive(Debug, Default)]
struct Leaving(BTreeSet<(EndpointId, Epoch)>);

impl Leaving {
    fn insert(&mut self, id: EndpointId, epoch: Epoch) {
        self.0.insert((id, epoch));
    }

    /// Takes them out of what policy wants, and forgets those that it no longer names.
    fn leave_out_of(&mut self, wanted: &mut Wanted) {
        self.0.retain(|member| wanted.values().any(|redirect| redirect.members.contains_key(member)));
        for redirect in wanted.values_mut() {
            redirect.members.retain(|member, _| !self.0.contains(member));
        }
    }
}

/// Where redirects are asked for and completions come from.
pub trait Redirects: Send + Sync + 'static {
    /// Makes these all the redirects that there are; one completion for each that is new, has other members, goes, or was refused: such a one is
    /// asked for again. Endpoints that were taken out by [`Redirects::remove_redirects`] are left out.
    fn set(&self, wanted: Wanted) -> Vec<(String, Completion)>;

    /// How long it is worth while to wait for completions of [`Redirects::set`]: not at all while no proxy answers.
    fn patience(&self) -> Duration;

    /// What the proxy has not acknowledged of all that was asked, in words; a refusal with its reason.
    fn outstanding(&self) -> Vec<String>;

    /// Resolves when a proxy that runs has answered about all that was asked, or none runs.
    fn answered(&self) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(std::future::ready(()))
    }

    /// Asks the proxy to drop every redirect of the endpoint; one completion for each.
    fn remove_redirects(&self, id: EndpointId, epoch: Epoch) -> Vec<(String, Completion)>;

    /// Redirects in force, all endpoints.
    fn count(&self) -> u64;

    /// Whether there is a proxy at all.
    fn enabled(&self) -> bool;

    /// Listeners that still speak for an address which no endpoint has, in words: it is not given out again before.
    fn speakers(&self, ip: IpAddr) -> Vec<String>;

    /// The proxy now, for whoever asks.
    fn look(&self) -> Look {
        Look::default()
    }

    /// Has the proxy tell of each request, as long as somebody holds what is given; else it tells of those that were denied or failed. `None`
    /// from a proxy that knows no such difference.
    fn watch(&self) -> Option<wharf_proxy::Watching> {
        None
    }
}
