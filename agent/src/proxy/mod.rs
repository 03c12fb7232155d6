//! Interface to the L7 proxy.
//!
//! A redirect hands endpoints' connections to a port of the proxy. Policy sets all redirects; a delete removes an
//! endpoint from them. [`Proxies`] combines the node's two proxies.

mod awaited;
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

/// Resolves when the proxy has acknowledged, or with the reason why not.
pub type Completion = Pin<Box<dyn Future<Output = Result<(), ProxyError>> + Send>>;

/// Why the proxy did not apply a change.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProxyError {
    /// Refused, with the reason; the previous state stays.
    #[error("{0}")]
    Refused(String),
    /// Refused: another program has the port.
    #[error("{1}")]
    Taken(u16, String),
    /// No answer, or no proxy.
    #[error("{0}")]
    NoAnswer(String),
}

impl ProxyError {
    fn refused(port: u16, why: String) -> Self {
        // With the kernel's message.
        if why.contains("Address already in use") { Self::Taken(port, why) } else { Self::Refused(why) }
    }
}

/// By the proxy's port, host byte order.
pub type Wanted = BTreeMap<u16, Redirect>;

/// Connections redirected to a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Redirect {
    /// What connections may carry.
    pub listener: Arc<Listener>,
    /// Endpoints and their addresses.
    pub members: BTreeMap<(EndpointId, Epoch), Vec<IpAddr>>,
    /// How often connections restarted because rows led some elsewhere.
    pub rounds: BTreeMap<(EndpointId, Epoch), u32>,
}

impl Redirect {
    /// The listener's name (`ingress-15000`).
    #[must_use]
    pub fn name(&self, port: u16) -> String {
        look::name(port, self.listener.direction)
    }

    fn members<M: Ord>(&self, member: impl Fn(u16, u64) -> M) -> BTreeMap<M, Vec<IpAddr>> {
        let members = self.members.iter();
        members.map(|((id, epoch), addresses)| (member(id.get(), epoch.0), addresses.clone())).collect()
    }

    fn rounds<M: Ord>(&self, member: impl Fn(u16, u64) -> M) -> BTreeMap<M, u32> {
        self.rounds.iter().map(|((id, epoch), round)| (member(id.get(), epoch.0), *round)).collect()
    }
}

/// Removed endpoints that policy still names.
#[derive(Debug, Default)]
struct Leaving(BTreeSet<(EndpointId, Epoch)>);

impl Leaving {
    fn insert(&mut self, id: EndpointId, epoch: Epoch) {
        self.0.insert((id, epoch));
    }

    fn leave_out_of(&mut self, wanted: &mut Wanted) {
        self.0.retain(|member| wanted.values().any(|redirect| redirect.members.contains_key(member)));
        for redirect in wanted.values_mut() {
            redirect.members.retain(|member, _| !self.0.contains(member));
        }
    }
}

/// A proxy's redirects.
pub trait Redirects: Send + Sync + 'static {
    /// Replaces all redirects. One completion for each that is new, changed, removed, or was refused. Omits endpoints
    /// of [`Redirects::remove_redirects`].
    fn set(&self, wanted: Wanted) -> Vec<(String, Completion)>;

    /// Maximum useful wait for completions; zero while no proxy answers.
    fn patience(&self) -> Duration;

    /// Unacknowledged redirects, with the reason of a refusal.
    fn outstanding(&self) -> Vec<String>;

    /// Resolves when no running proxy owes an answer.
    fn answered(&self) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(std::future::ready(()))
    }

    /// Removes the endpoint from every redirect; one completion for each.
    fn remove_redirects(&self, id: EndpointId, epoch: Epoch) -> Vec<(String, Completion)>;

    /// Redirects in force.
    fn count(&self) -> u64;

    /// Whether there is a proxy.
    fn enabled(&self) -> bool;

    /// Listeners that use an address without an endpoint: it is not leased.
    fn speakers(&self, ip: IpAddr) -> Vec<String>;

    /// Current state.
    fn look(&self) -> Look {
        Look::default()
    }

    /// The proxy reports all requests while the guard lives, not only denied and failed ones.
    fn watch(&self) -> Option<wharf_proxy::Watching> {
        None
    }
}
