//! Metrics of the L7 proxy.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};
use wharf_api::{ProxyRequests, ProxyState, ProxyStatus};

use super::{counter, gauge};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Judged {
    verdict: &'static str,
}

pub(super) fn register(registry: &mut Registry, proxy: &ProxyStatus) {
    let up = u64::from(proxy.state == ProxyState::Serving);
    gauge(registry, "proxy_up", "1 while Envoy runs and is connected", up);
    gauge(registry, "proxy_listeners", "Listeners of the proxy that policy asks for", proxy.listeners);
    gauge(registry, "proxy_listeners_refused", "Listeners that the proxy refused", proxy.refused);
    counter(registry, "proxy_restarts", "New starts of Envoy", proxy.restarts);
    counter(registry, "proxy_records_lost", "Records of requests that nobody took in time", proxy.records_lost);
    let ProxyRequests { forwarded, denied, failed } = proxy.requests;
    let requests = Family::<Judged, Counter>::default();
    for (verdict, count) in [("forwarded", forwarded), ("denied", denied), ("failed", failed)] {
        requests.get_or_create(&Judged { verdict }).inc_by(count);
    }
    registry.register("proxy_requests", "Requests, TLS connections and DNS queries that the proxy judged", requests);
    gauge(registry, "proxy_name_addresses", "Addresses of names that containers asked DNS for", proxy.name_addresses);
    let (pending, timed_out) = (proxy.pending_completions, proxy.timed_out_completions);
    gauge(registry, "proxy_completions_pending", "Proxy completions that deletes wait for", pending);
    counter(registry, "proxy_completions_timed_out", "Proxy completions that deletes gave up", timed_out);
}
