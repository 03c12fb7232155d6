//! What a success prints: ADD's result in the version asked for, and VERSION's answer.

use std::net::IpAddr;

use serde::Serialize;
use wharf_api::Endpoint;

use crate::netconf::{Dns, Version};

/// Index of the container's side among the interfaces.
const CONTAINER_SIDE: usize = 1;

#[derive(Serialize)]
struct AddResult<'a> {
    #[serde(rename = "cniVersion")]
    cni_version: &'static str,
    interfaces: [Interface<'a>; 2],
    ips: Vec<Ip>,
    routes: Vec<Route>,
    dns: &'a Dns,
}

#[derive(Serialize)]
struct Interface<'a> {
    name: &'a str,
    mac: &'a str,
    /// From 1.1.0 on.
    #[serde(skip_serializing_if = "Option::is_none")]
    mtu: Option<u32>,
    /// Only inside a container.
    #[serde(skip_serializing_if = "str::is_empty")]
    sandbox: &'a str,
}

#[derive(Serialize)]
struct Ip {
    /// Until 0.4.0.
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<&'static str>,
    interface: usize,
    address: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    gateway: Option<IpAddr>,
}

#[derive(Serialize)]
struct Route {
    dst: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    gw: Option<IpAddr>,
}

/// The result of ADD.
pub(crate) fn added(version: Version, dns: &Dns, netns: &str, endpoint: &Endpoint) -> serde_json::Result<String> {
    let mtu = (version >= Version::V1_1_0).then_some(endpoint.mtu);
    let mut ips = Vec::new();
    let mut routes = Vec::new();
    let families = [
        (endpoint.ipv4.map(IpAddr::from), endpoint.gateway4.map(IpAddr::from), 32, "4", "0.0.0.0/0"),
        (endpoint.ipv6.map(IpAddr::from), endpoint.gateway6.map(IpAddr::from), 128, "6", "::/0"),
    ];
    for (ip, gateway, prefix, family, everything) in families {
        let Some(ip) = ip else { continue };
        ips.push(Ip {
            version: (version <= Version::V0_4_0).then_some(family),
            interface: CONTAINER_SIDE,
            address: format!("{ip}/{prefix}"),
            gateway,
        });
        if gateway.is_some() && endpoint.routes.is_none() {
            routes.push(Route { dst: everything.to_owned(), gw: gateway });
        }
    }
    let own = endpoint.routes.iter().flatten();
    routes.extend(own.map(|route| Route { dst: route.dst.to_string(), gw: route.gw }));
    serde_json::to_string(&AddResult {
        cni_version: version.as_str(),
        interfaces: [
            Interface { name: &endpoint.host_ifname, mac: &endpoint.host_mac, mtu, sandbox: "" },
            Interface { name: &endpoint.ifname, mac: &endpoint.container_mac, mtu, sandbox: netns },
        ],
        ips,
        routes,
        dns,
    })
}

/// The answer to VERSION.
pub(crate) fn versions(cni_version: &str) -> String {
    let supported = Version::ALL.map(Version::as_str);
    serde_json::json!({ "cniVersion": cni_version, "supportedVersions": supported }).to_string()
}
