//! Pods.

use std::net::IpAddr;

use serde::Deserialize;

use super::Metadata;

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct Pod {
    pub metadata: Metadata,
    /// Wanted.
    #[serde(default)]
    pub spec: Spec,
    /// Found.
    #[serde(default)]
    pub status: Status,
}

/// Wanted state of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Spec {
    /// Absent until the pod is scheduled.
    #[serde(default)]
    pub node_name: Option<String>,
    /// Uses the node's network.
    #[serde(default)]
    pub host_network: Option<bool>,
    #[serde(default)]
    pub containers: Option<Vec<Container>>,
    /// Those with `restartPolicy: Always` keep running.
    #[serde(default)]
    pub init_containers: Option<Vec<Container>>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Container {
    #[serde(default)]
    pub ports: Option<Vec<Port>>,
    /// Only of init containers.
    #[serde(default)]
    pub restart_policy: Option<String>,
}

/// A port of a container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Port {
    /// Policies select it.
    #[serde(default)]
    pub name: Option<String>,
    #[serde(default)]
    pub container_port: u32,
    /// `TCP` when absent.
    #[serde(default)]
    pub protocol: Option<String>,
}

/// Found state of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// `Running` and others.
    #[serde(default)]
    pub phase: Option<String>,
    /// The first address.
    #[serde(default, rename = "podIP")]
    pub pod_ip: Option<String>,
    #[serde(default, rename = "podIPs")]
    pub pod_ips: Option<Vec<PodIp>>,
}

/// An address of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct PodIp {
    pub ip: String,
}

impl Pod {
    /// Has its own network and has not ended.
    #[must_use]
    pub fn is_live(&self) -> bool {
        let has_ended = matches!(self.status.phase.as_deref(), Some("Succeeded" | "Failed"));
        !has_ended && !self.spec.host_network.unwrap_or(false)
    }

    /// As in the API. Invalid addresses stay: the agent refuses the row and names them.
    #[must_use]
    pub fn addresses(&self) -> Vec<String> {
        let listed: Vec<&str> = self.status.pod_ips.iter().flatten().map(|ip| ip.ip.as_str()).collect();
        let first = self.status.pod_ip.as_deref();
        let all = if listed.is_empty() { first.into_iter().collect() } else { listed };
        let mut addresses: Vec<String> = Vec::with_capacity(all.len());
        for text in all.into_iter().filter(|text| !text.is_empty()) {
            let address = text.parse::<IpAddr>().map_or_else(|_| text.to_owned(), |address| address.to_string());
            if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        addresses
    }
}
