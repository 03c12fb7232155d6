//! Output of ADD and VERSION.

use std::net::IpAddr;

use serde::Serialize;
use wharf_api::Endpoint;

use crate::netconf::{Dns, Version};

#[derive(Serialize)]
struct AddResult<'a> {
    #[serde(rename = "cniVersion")]
    cni_version: &'static str,
    interfaces: Vec<Interface<'a>>,
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

pub(crate) fn added(version: Version, dns: &Dns, netns: &str, endpoint: &Endpoint) -> serde_json::Result<String> {
    let mtu = (version >= Version::V1_1_0).then_some(endpoint.mtu);
    let mut ips = Vec::new();
    let mut routes = Vec::new();
    let delegated = endpoint.delegated.as_deref();
    let prefix4 = delegated.and_then(|d| d.prefix4).unwrap_or(32);
    let prefix6 = delegated.and_then(|d| d.prefix6).unwrap_or(128);
    let families = [
        (endpoint.ipv4.map(IpAddr::from), endpoint.gateway4.map(IpAddr::from), prefix4, "4", "0.0.0.0/0"),
        (endpoint.ipv6.map(IpAddr::from), endpoint.gateway6.map(IpAddr::from), prefix6, "6", "::/0"),
    ];
    // A delegated network may have no host side.
    let host = (!endpoint.host_ifname.is_empty()).then(|| Interface {
        name: &endpoint.host_ifname,
        mac: &endpoint.host_mac,
        mtu,
        sandbox: "",
    });
    let container_side = usize::from(host.is_some());
    let container = Interface { name: &endpoint.ifname, mac: &endpoint.container_mac, mtu, sandbox: netns };
    for (ip, gateway, prefix, family, everything) in families {
        let Some(ip) = ip else { continue };
        ips.push(Ip {
            version: (version <= Version::V0_4_0).then_some(family),
            interface: container_side,
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
        interfaces: host.into_iter().chain([container]).collect(),
        ips,
        routes,
        dns,
    })
}

pub(crate) fn versions(cni_version: &str) -> String {
    let supported = Version::ALL.map(Version::as_str);
    serde_json::json!({ "cniVersion": cni_version, "supportedVersions": supported }).to_string()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use wharf_api::DelegatedEndpoint;

    use super::*;

    fn endpoint(host: &str) -> Endpoint {
        let mut endpoint = json!({
            "id": 0, "epoch": 0, "state": "ready", "container_id": "c1", "ifname": "eth0", "network": "net", "identity": 0, "labels": [],
            "ipv4": "10.1.0.7", "ipv6": null, "ifindex": 0, "host_ifname": host, "container_mac": "", "host_mac": "", "gateway4": "10.1.0.1",
            "gateway6": null, "mtu": 1400, "pool": "", "routes": [{"dst": "10.0.0.0/8", "gw": "10.1.0.1"}], "netns": "/n",
            "created_unix_ms": 0, "status": {"phase": "", "since_unix_ms": 0, "waits_for": "", "ends_when": "", "desired_revision": 0,
            "realized_revision": 0, "regenerations": 0, "failures": 0},
        });
        endpoint["delegated"] =
            serde_json::to_value(DelegatedEndpoint { prefix4: Some(24), ..DelegatedEndpoint::default() }).unwrap();
        serde_json::from_value(endpoint).unwrap()
    }

    #[test]
    fn an_attachment_of_the_service_has_its_own_prefix_and_perhaps_no_host_side() {
        let result = |host| -> Value {
            serde_json::from_str(&added(Version::V1_1_0, &Dns::default(), "/n", &endpoint(host)).unwrap()).unwrap()
        };
        let without = result("");
        assert_eq!(without["interfaces"], json!([{"name": "eth0", "mac": "", "mtu": 1400, "sandbox": "/n"}]));
        assert_eq!(without["ips"], json!([{"interface": 0, "address": "10.1.0.7/24", "gateway": "10.1.0.1"}]));
        assert_eq!(without["routes"], json!([{"dst": "10.0.0.0/8", "gw": "10.1.0.1"}]));
        let with = result("tap7");
        assert_eq!(
            (with["interfaces"][0]["name"].clone(), with["ips"][0]["interface"].clone()),
            (json!("tap7"), json!(1))
        );
    }
}
