//! The edge to the L7 proxy: what a delete must wait for.
//!
//! A redirect is removed by asking the proxy; it answers with a completion. Until a proxy is there, [`NoProxy`] has no
//! redirects and every wait is over at once; tests put a source here that answers, answers late, or never does.

use std::{future::Future, net::IpAddr, pin::Pin};

use wharf_core::ids::{EndpointId, Epoch};

/// Resolves when the proxy has let go; an error says why it never will.
pub type Completion = Pin<Box<dyn Future<Output = Result<(), ProxyError>> + Send>>;

/// What the proxy gave as its reason.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ProxyError(pub String);

/// Where redirects are asked for and completions come from.
pub trait Redirects: Send + Sync + 'static {
    /// Asks the proxy to drop every redirect of the endpoint; one completion for each.
    fn remove_redirects(&self, id: EndpointId, epoch: Epoch) -> Vec<(String, Completion)>;

    /// Redirects in force, all endpoints.
    fn count(&self) -> u64;

    /// Whether there is a proxy at all.
    fn enabled(&self) -> bool;

    /// Listeners that still speak for an address which no endpoint has, in words: it is not given out again before.
    fn speakers(&self, ip: IpAddr) -> Vec<String>;
}

/// No proxy on this node.
#[derive(Debug, Default)]
pub struct NoProxy;

impl Redirects for NoProxy {
    fn remove_redirects(&self, _: EndpointId, _: Epoch) -> Vec<(String, Completion)> {
        Vec::new()
    }

    fn count(&self) -> u64 {
        0
    }

    fn enabled(&self) -> bool {
        false
    }

    fn speakers(&self, _: IpAddr) -> Vec<String> {
        Vec::new()
    }
}
