//! Routes and external addresses of a create request.

use std::{collections::BTreeSet, net::IpAddr};

use wharf_api::{ContainerRoute, EndpointCreate};
use wharf_core::{endpoint::MAX_ROUTES, ids::Attachment};
use wharf_names::rules;

use crate::{
    endpoint::create::External,
    rest::error::{Answer, invalid},
};

pub(super) fn external(attachment: &Attachment, body: &EndpointCreate) -> Answer<Option<External>> {
    let bad = |what: String| invalid(format!("create endpoint {attachment}: {what}"));
    let gateways = body.gateways.clone();
    let external = match &body.ipam {
        Some(plugin) => External::Ipam { plugin: plugin.clone(), gateways },
        None if !gateways.is_empty() => return Err(bad("gateways belong to ipam".to_owned())),
        None if body.chained => External::Chain,
        None => return Ok(None),
    };
    if body.ips.is_empty() {
        return Err(bad(format!("{external} leased no address")));
    }
    if body.chained {
        fits_chained(attachment, body)?;
    }
    if let Some(ipam) = &body.ipam {
        rules::name(ipam).map_err(|rule| bad(format!("ipam {rule}")))?;
    }
    if let Some(pool) = &body.pool {
        let pool: String = pool.chars().take(80).collect();
        return Err(bad(format!("pool {pool} is named beside {external}; the addresses come from one of them")));
    }
    for ip in body.ips.iter().chain(&body.gateways) {
        if !is_of_one_host(ip) {
            return Err(bad(format!("{external}: {ip} is no address that one host can have")));
        }
    }
    let of_family = |v6: bool| body.gateways.iter().filter(|ip| ip.is_ipv6() == v6).count();
    if of_family(false) > 1 || of_family(true) > 1 {
        return Err(bad("at most one gateway of each family".to_owned()));
    }
    Ok(Some(external))
}

fn fits_chained(attachment: &Attachment, body: &EndpointCreate) -> Answer<()> {
    let refused = |what: &str, whose: &str| {
        Err(invalid(format!("create endpoint {attachment}: another plugin made the interface, so {what} is {whose}")))
    };
    let makers = "the job of the plugin that made it";
    match body {
        EndpointCreate { pool: Some(_), .. } => refused("the pool of its addresses", makers),
        EndpointCreate { ipam: Some(_), .. } => refused("leasing its addresses (`ipam`)", makers),
        EndpointCreate { mtu: Some(_), .. } => refused("its MTU", makers),
        EndpointCreate { routes: Some(_), .. } => refused("what it reaches", makers),
        EndpointCreate { masquerade: Some(_), .. } => refused("masquerading (`ipMasq`)", makers),
        EndpointCreate { source_prefixes, .. } if !source_prefixes.is_empty() => refused(
            "a source prefix (`sourcePrefixes`)",
            "refused: its link may be a bridge, which forwards past the programs",
        ),
        EndpointCreate { ports, .. } if !ports.is_empty() => refused(
            "publishing its ports",
            "the job of the plugin portmap; put it behind wharf-cni in the list of plugins",
        ),
        _ => Ok(()),
    }
}

fn is_of_one_host(ip: &IpAddr) -> bool {
    let link_local = match ip {
        IpAddr::V4(ip) => {
            ip.is_link_local() || ip.is_broadcast() || ip.octets().first().is_some_and(|first| *first == 0)
        }
        IpAddr::V6(ip) => ip.is_unicast_link_local() || ip.to_ipv4_mapped().is_some(),
    };
    !(link_local || ip.is_unspecified() || ip.is_loopback() || ip.is_multicast())
}

pub(super) fn routes(
    attachment: &Attachment,
    routes: Option<Vec<ContainerRoute>>,
) -> Answer<Option<Vec<ContainerRoute>>> {
    let Some(routes) = routes else { return Ok(None) };
    let bad = |what: String| invalid(format!("create endpoint {attachment}: {what}"));
    if routes.len() > MAX_ROUTES {
        return Err(bad(format!("{} routes, at most {MAX_ROUTES} are taken", routes.len())));
    }
    let mut seen = BTreeSet::new();
    for ContainerRoute { dst, gw } in &routes {
        if dst.trunc() != *dst {
            return Err(bad(format!("route to {dst}: host bits are set; write {}", dst.trunc())));
        }
        if gw.is_some_and(|gw| gw.is_ipv4() != dst.addr().is_ipv4()) {
            return Err(bad(format!("route to {dst}: its gateway is of the other family")));
        }
        if !seen.insert(*dst) {
            return Err(bad(format!("route to {dst}: it is there twice")));
        }
    }
    Ok(Some(routes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rest::error::Failure;

    fn read(keys: &serde_json::Value) -> Result<(Option<External>, Option<Vec<ContainerRoute>>), String> {
        let mut body = serde_json::json!({"container_id": "c1", "ifname": "eth0", "network": "net", "netns": "/x"});
        for (key, value) in keys.as_object().expect("an object") {
            body[key] = value.clone();
        }
        let body: EndpointCreate = serde_json::from_value(body).map_err(|e| e.to_string())?;
        let parse = wharf_core::ids::ContainerId::parse("c1").expect("an id");
        let attachment = Attachment {
            network: wharf_core::ids::NetworkName::parse("net").expect("a name"),
            container_id: parse,
            ifname: wharf_core::ids::IfName::parse("eth0").expect("a name"),
        };
        let external = external(&attachment, &body).map_err(|Failure(e)| e.message)?;
        Ok((external, routes(&attachment, body.routes).map_err(|Failure(e)| e.message)?))
    }

    #[test]
    fn addresses_of_another_ipam_come_with_its_name_and_gateways() {
        let keys = serde_json::json!({"ipam": "host-local", "ips": ["10.1.0.2"], "gateways": ["10.1.0.1"]});
        let external = External::Ipam { plugin: "host-local".to_owned(), gateways: vec![[10, 1, 0, 1].into()] };
        assert_eq!(read(&keys), Ok((Some(external), None)));
        let with = |ips: &[&str], gateways: &[&str]| serde_json::json!({"ipam": "x", "ips": ips, "gateways": gateways});
        for (keys, words) in [
            (serde_json::json!({"gateways": ["10.1.0.1"]}), "gateways belong to ipam"),
            (serde_json::json!({"ipam": "../x", "ips": ["10.1.0.2"]}), "ipam must start"),
            (serde_json::json!({"ipam": "x", "ips": ["10.1.0.2"], "pool": "blue"}), "pool blue"),
            (with(&[], &[]), "leased no address"),
            (with(&["127.0.0.1"], &[]), "127.0.0.1 is no address"),
            (with(&["0.0.0.7"], &[]), "0.0.0.7 is no address"),
            (with(&["169.254.0.7"], &[]), "169.254.0.7 is no address"),
            (with(&["255.255.255.255"], &[]), "no address"),
            (with(&["224.0.0.1"], &[]), "224.0.0.1 is no address"),
            (with(&["fe80::1"], &[]), "fe80::1 is no address"),
            (with(&["::ffff:10.1.0.2"], &[]), "no address"),
            (with(&["10.1.0.2"], &["::"]), ":: is no address"),
            (with(&["10.1.0.2"], &["10.1.0.1", "10.1.0.3"]), "one gateway of each family"),
            (serde_json::json!({"chained": true}), "the plugin that made the interface leased no address"),
            (serde_json::json!({"chained": true, "ips": ["fe80::1"]}), "fe80::1 is no address"),
            (serde_json::json!({"chained": true, "ips": ["10.1.0.2"], "gateways": ["10.1.0.1"]}), "belong to ipam"),
            (serde_json::json!({"chained": true, "ips": ["10.1.0.2"], "ipam": "x"}), "(`ipam`) is the job"),
            (serde_json::json!({"chained": true, "ips": ["10.1.0.2"], "routes": []}), "what it reaches is the job"),
            (
                serde_json::json!({"chained": true, "ips": ["10.1.0.2"], "source_prefixes": ["10.200.0.0/16"]}),
                "(`sourcePrefixes`) is refused",
            ),
        ] {
            let refused = read(&keys).expect_err(&keys.to_string());
            assert!(refused.contains(words), "{keys}: {refused}");
        }
    }

    #[test]
    fn routes_are_networks_and_few() {
        let with = |routes: serde_json::Value| serde_json::json!({ "routes": routes });
        assert_eq!(read(&with(serde_json::json!([]))), Ok((None, Some(Vec::new()))));
        let many: Vec<_> = (0..=MAX_ROUTES).map(|n| serde_json::json!({"dst": format!("10.{n}.0.0/16")})).collect();
        for (routes, words) in [
            (serde_json::json!([{"dst": "10.2.0.1/16"}]), "write 10.2.0.0/16"),
            (serde_json::json!([{"dst": "10.2.0.0/16"}, {"dst": "10.2.0.0/16"}]), "there twice"),
            (serde_json::json!([{"dst": "10.2.0.0/16", "gw": "fd00::1"}]), "other family"),
            (serde_json::json!([{"dst": "10.2.0.0/16", "via": "x"}]), "unknown field"),
            (many.into(), "at most 64"),
        ] {
            let keys = with(routes);
            let refused = read(&keys).expect_err(&keys.to_string());
            assert!(refused.contains(words), "{keys}: {refused}");
        }
    }
}
