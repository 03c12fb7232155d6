//! Addresses of the API servers, from the EndpointSlices of the service `default/kubernetes`.

use std::{net::IpAddr, sync::Arc, time::Duration};

use serde::Deserialize;
use tokio::{task::spawn_blocking, time::sleep};

use super::{Api, Failure, servers::Servers};
use crate::watch::backoff::spread;

const PATH: &str = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices?labelSelector=kubernetes.io%2Fservice-name%3Dkubernetes";
const PERIOD: Duration = Duration::from_secs(300);
const RETRY: Duration = Duration::from_secs(30);

#[derive(Debug, Deserialize)]
struct Slices {
    #[serde(default)]
    items: Vec<Slice>,
}

#[derive(Debug, Deserialize)]
struct Slice {
    #[serde(default)]
    endpoints: Option<Vec<Endpoint>>,
    #[serde(default)]
    ports: Option<Vec<Port>>,
}

#[derive(Debug, Deserialize)]
struct Endpoint {
    addresses: Vec<IpAddr>,
    #[serde(default)]
    conditions: Conditions,
}

#[derive(Debug, Default, Deserialize)]
struct Conditions {
    /// Absent: true.
    ready: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct Port {
    name: Option<String>,
    port: Option<u16>,
}

/// Keeps the list of servers current; does not end.
pub async fn follow(api: &Api, servers: &Arc<Servers>) {
    loop {
        let period = match look(api).await {
            Ok(addresses) => {
                let servers = Arc::clone(servers);
                // It awaits the disk.
                let learned = spawn_blocking(move || servers.learn(addresses)).await.unwrap_or_else(|e| Err(e.into()));
                if let Err(error) = learned {
                    tracing::warn!(%error, "the addresses of the API servers cannot be written");
                }
                PERIOD
            }
            Err(failure) => {
                tracing::debug!(%failure, "the addresses of the API servers cannot be read");
                RETRY
            }
        };
        sleep(spread(period)).await;
    }
}

async fn look(api: &Api) -> Result<Vec<String>, Failure> {
    Ok(urls(api.object::<Slices>(PATH).await?))
}

fn urls(slices: Slices) -> Vec<String> {
    let mut all = Vec::new();
    for slice in slices.items {
        let ports = slice.ports.unwrap_or_default();
        let named = |port: &&Port| port.name.as_deref() == Some("https");
        let Some(port) = ports.iter().find(named).or(ports.first()).and_then(|port| port.port) else { continue };
        let ready = |endpoint: &Endpoint| endpoint.conditions.ready.unwrap_or(true);
        for address in slice.endpoints.unwrap_or_default().into_iter().filter(ready).flat_map(|e| e.addresses) {
            all.push(format!("https://{}", std::net::SocketAddr::new(address, port)));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_endpoints_become_urls() {
        let slices = r#"{"items": [
            {"endpoints": [{"addresses": ["192.0.2.1"], "conditions": {"ready": true}}, {"addresses": ["192.0.2.2"], "conditions": {"ready": false}}],
             "ports": [{"name": "https", "port": 6443}]},
            {"endpoints": [{"addresses": ["2001:db8::1"]}], "ports": [{"name": "https", "port": 6443}]},
            {"endpoints": null, "ports": null}]}"#;
        let slices = serde_json::from_str(slices).expect("decoded");
        assert_eq!(urls(slices), ["https://192.0.2.1:6443", "https://[2001:db8::1]:6443"]);
    }
}
