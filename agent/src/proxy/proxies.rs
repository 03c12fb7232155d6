//! The node's two proxies: Envoy, and the agent's for DNS.

use std::{future::Future, net::IpAddr, pin::Pin, time::Duration};

use wharf_core::ids::{EndpointId, Epoch};

use super::{
    Completion, Look, ProxyError, RedirectTable, Redirects,
    dns::Dns,
    envoy::{Envoy, PATIENCE},
};

/// Sends redirects to their proxy.
pub struct Proxies {
    /// HTTP requests and TLS handshakes.
    pub envoy: Envoy,
    /// DNS queries. A port with names and requests serves names only.
    pub dns: Dns,
}

impl Redirects for Proxies {
    fn set(&self, wanted: RedirectTable) -> Vec<(String, Completion)> {
        let (names, requests) =
            wanted.into_iter().partition(|(_, redirect)| !redirect.listener.requests.names.is_empty());
        let mut waits = self.dns.set(names);
        let of_envoy = self.envoy.set(requests);
        let patience = self.envoy.patience();
        let bounded = |(name, completion): (String, Completion)| -> (String, Completion) {
            let ends = async move {
                let late = |_| Err(ProxyError::NoAnswer("Envoy does not answer".to_owned()));
                tokio::time::timeout(patience, completion).await.unwrap_or_else(late)
            };
            (name, Box::pin(ends))
        };
        waits.extend(of_envoy.into_iter().map(bounded));
        waits
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }

    fn outstanding(&self) -> Vec<String> {
        [self.dns.outstanding(), self.envoy.outstanding()].concat()
    }

    fn answered(&self) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        self.envoy.answered()
    }

    fn remove_redirects(&self, id: EndpointId, epoch: Epoch) -> Vec<(String, Completion)> {
        let mut waits = self.dns.remove_redirects(id, epoch);
        waits.extend(self.envoy.remove_redirects(id, epoch));
        waits
    }

    fn count(&self) -> u64 {
        self.dns.count() + self.envoy.count()
    }

    fn enabled(&self) -> bool {
        self.dns.enabled() || self.envoy.enabled()
    }

    fn watch(&self) -> Option<wharf_proxy::Watching> {
        self.envoy.watch()
    }

    fn speakers(&self, ip: IpAddr) -> Vec<String> {
        self.envoy.speakers(ip)
    }

    fn look(&self) -> Look {
        let (dns, dns_refused) = self.dns.look();
        Look { dns, dns_refused, ..self.envoy.look() }
    }
}
