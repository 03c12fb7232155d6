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
    collections::BTreeSet,
    future::Future,
    net::IpAddr,
    pin::Pin,
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use wharf_core::ids::{EndpointId, Epoch};

pub use self::{
    awaited::Awaited,
    look::{Look, name},
    proxies::Proxies,
    words::passes,
};
pub use wharf_enforce::redirects::{ProxyError, Redirect, RedirectTable};

/// Resolves when the proxy has acknowledged, or with the reason why not.
pub type Completion = Pin<Box<dyn Future<Output = Result<(), ProxyError>> + Send>>;

fn refused(port: u16, why: String) -> ProxyError {
    if why.contains("Address already in use") { ProxyError::Taken(port, why) } else { ProxyError::Refused(why) }
}

/// Deleted endpoints, which the listeners leave out until policy forgets them.
#[derive(Debug, Default)]
struct Leaving(BTreeSet<(EndpointId, Epoch)>);

impl Leaving {
    fn insert(&mut self, id: EndpointId, epoch: Epoch) {
        self.0.insert((id, epoch));
    }

    fn leave_out_of(&mut self, wanted: &mut RedirectTable) {
        self.0.retain(|member| wanted.values().any(|redirect| redirect.members.contains_key(member)));
        for redirect in wanted.values_mut() {
            redirect.members.retain(|member, _| !self.0.contains(member));
        }
    }
}

/// Redirects and counts of completions.
pub struct Proxy {
    pub redirects: Arc<dyn Redirects>,
    /// Awaited completions.
    pub pending: AtomicU64,
    /// Completions past their bound.
    pub timed_out: AtomicU64,
}

impl Proxy {
    /// With both counts zero.
    #[must_use]
    pub fn new(redirects: Arc<dyn Redirects>) -> Self {
        Self { redirects, pending: AtomicU64::new(0), timed_out: AtomicU64::new(0) }
    }
}

/// A proxy's redirects.
pub trait Redirects: Send + Sync + 'static {
    /// Replaces all redirects. One completion for each that is new, changed, removed, or was refused. Omits endpoints
    /// of [`Redirects::remove_redirects`].
    fn set(&self, wanted: RedirectTable) -> Vec<(String, Completion)>;

    /// Maximum useful wait for completions; zero while no proxy answers.
    fn patience(&self) -> Duration;

    /// Unacknowledged redirects, with the reason of a refusal.
    fn outstanding(&self) -> Vec<String>;

    /// Resolves when no running proxy owes an answer.
    fn answered(&self) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(std::future::ready(()))
    }

    /// Removes the endpoint from every redirect; one completion each.
    fn remove_redirects(&self, id: EndpointId, epoch: Epoch) -> Vec<(String, Completion)>;

    /// Redirects in force.
    fn count(&self) -> u64;

    /// Whether there is a proxy.
    fn enabled(&self) -> bool;

    /// Listeners that use an address without an endpoint, which must not be leased.
    fn speakers(&self, ip: IpAddr) -> Vec<String>;

    /// Current state.
    fn look(&self) -> Look {
        Look::default()
    }

    /// While the guard lives, the proxy reports all requests, not only denied and failed ones.
    fn watch(&self) -> Option<wharf_proxy::Watching> {
        None
    }
}
