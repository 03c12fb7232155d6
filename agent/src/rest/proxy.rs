//! `/v1/proxy`: the L7 proxy, and names from DNS.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use axum::{Json, extract::State};
use wharf_api::{ProxyCompletion, ProxyName, ProxyOutstanding, ProxyRequests, ProxyView};
use wharf_kit::clock;

use crate::{
    monitor::Requests,
    node::Node,
    proxy::{Awaited, Look, envoy},
};

/// Envoy, its listeners, and pending acknowledgements.
#[utoipa::path(get, path = "/v1/proxy", tag = "proxy", responses((status = 200, body = ProxyView)))]
pub async fn get(State(node): State<Arc<Node>>) -> Json<ProxyView> {
    let (life, look) = (&node.life, node.life.policy.proxy.redirects.look());
    let Requests { forwarded, denied, failed } = life.telemetry.monitor.requests();
    let of_envoy = look.status.as_ref().map_or(0, |status| status.forwarded);
    Json(ProxyView {
        bootstrap: envoy::bootstrap(&life.config.run_dir).display().to_string(),
        requests: ProxyRequests { forwarded: forwarded + of_envoy, denied, failed },
        completions_pending: life.policy.proxy.pending.load(Ordering::Relaxed),
        completions_timed_out: life.policy.proxy.timed_out.load(Ordering::Relaxed),
        ..view(&look, life.config.proxy_timeout)
    })
}

/// Names that containers resolved, with their addresses.
#[utoipa::path(get, path = "/v1/proxy/names", tag = "proxy", responses((status = 200, body = Vec<ProxyName>)))]
pub async fn names(State(node): State<Arc<Node>>) -> Json<Vec<ProxyName>> {
    Json(node.life.policy.names().await)
}

fn view(look: &Look, at_most: Duration) -> ProxyView {
    let status = look.status.as_ref();
    let told = |(listener, refusal)| ProxyOutstanding { listener, refusal };
    ProxyView {
        state: look.state(),
        since_unix_ms: status.map_or(0, |status| clock::unix_ms_of(status.since)),
        supervised: look.supervised,
        version: status.and_then(|status| status.version.clone()),
        pid: status.and_then(|status| status.pid),
        restarts: status.map_or(0, |status| status.restarts),
        last_error: status.and_then(|status| status.last_error.clone()),
        streams: status.map_or(0, |status| status.connected_streams as u64),
        records_lost: status.map_or(0, |status| status.records_lost),
        outstanding: look.outstanding().into_iter().map(told).collect(),
        listeners: look.listeners(),
        completions: look.awaited.iter().map(|wait| completion(wait, at_most)).collect(),
        ..ProxyView::default()
    }
}

fn completion(wait: &Awaited, at_most: Duration) -> ProxyCompletion {
    let bound = u64::try_from(wait.at_most.unwrap_or(at_most).as_millis()).unwrap_or(u64::MAX);
    ProxyCompletion {
        listener: wait.listener.clone(),
        endpoint: wait.endpoint.map(|id| id.get()),
        since_unix_ms: wait.since_unix_ms,
        until_unix_ms: wait.since_unix_ms.saturating_add(bound),
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use wharf_api::ProxyState;
    use wharf_core::ids::EndpointId;
    use wharf_proxy::{EnvoyState, Proxy, Status};

    use super::*;

    #[test]
    fn what_is_looked_at_is_told() {
        let wait =
            |endpoint, at_most| Awaited { listener: "ingress-15000".into(), endpoint, since_unix_ms: 10, at_most };
        let (proxy, _records) = Proxy::new(1);
        let since = UNIX_EPOCH + Duration::from_millis(7);
        let status = Status { state: EnvoyState::Waiting, since, restarts: 2, ..proxy.status() };
        let look = Look {
            status: Some(Status { last_error: Some("it ended with status 1".into()), ..status }),
            supervised: true,
            unacknowledged: [("ingress-15000".to_owned(), Some("bad".to_owned()))].into(),
            awaited: vec![wait(None, Some(Duration::from_millis(500))), wait(EndpointId::try_from(7).ok(), None)],
            ..Look::default()
        };
        let told = view(&look, Duration::from_secs(3));
        assert_eq!((told.state, told.since_unix_ms, told.restarts, told.supervised), (ProxyState::Waiting, 7, 2, true));
        assert_eq!(told.last_error.as_deref(), Some("it ended with status 1"));
        assert_eq!(told.outstanding.first().and_then(|of| of.refusal.as_deref()), Some("bad"));
        let waits: Vec<_> = told.completions.iter().map(|of| (of.endpoint, of.until_unix_ms)).collect();
        assert_eq!(waits, [(None, 510), (Some(7), 3_010)]);
    }
}
