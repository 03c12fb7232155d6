//! CHECK: compares ADD's result, the agent's record and the kernel ([`kernel`]).

pub(crate) mod kernel;

use std::{net::IpAddr, os::unix::fs::MetadataExt as _};

use ipnet::IpNet;
use wharf_api::{Endpoint, EndpointHealth, EndpointMode, Finding, Health, MendedBy};

use crate::{
    fault::{Code, Fault, first_of},
    json::Object,
    request::Target,
    rules::{self, cut},
};

/// The fields for CHECK; later plugins may add to them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PrevResult {
    interfaces: Vec<Interface>,
    ips: Vec<Ip>,
    /// Destination and gateway; omits routes without a gateway.
    routes: Vec<(IpNet, IpAddr)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Interface {
    name: String,
    mac: String,
    sandbox: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Ip {
    address: IpAddr,
    gateway: Option<IpAddr>,
    interface: Option<usize>,
}

impl PrevResult {
    pub(crate) fn parse(root: &Object<'_>) -> Result<Option<Self>, Fault> {
        let Some(prev) = root.object("prevResult")? else { return Ok(None) };
        let mut parsed = Self::default();
        for (path, item) in prev.list("interfaces")? {
            let item = Object::at(path, item)?;
            let part = |key| item.string(key).map(|text| text.unwrap_or_default().to_owned());
            parsed.interfaces.push(Interface { name: part("name")?, mac: part("mac")?, sandbox: part("sandbox")? });
        }
        for (path, item) in prev.list("ips")? {
            let item = Object::at(path, item)?;
            let text = item.required_string("address")?;
            let address = rules::address(text).map_err(|rule| {
                Fault::config(format!("netconf: key {:?}: {:?} {rule}", item.path_of("address"), cut(text)))
            })?;
            let interface = item.u32("interface")?.and_then(|index| usize::try_from(index).ok());
            // Read only without an agent, so an invalid value is no error.
            let gateway = item.value("gateway").and_then(|gateway| gateway.as_str()?.parse().ok());
            parsed.ips.push(Ip { address, gateway, interface });
        }
        let routes = prev.value("routes").and_then(|routes| routes.as_array()).into_iter().flatten();
        parsed.routes = routes
            .filter_map(|route| {
                let part = |key| route.get(key)?.as_str();
                Some((part("dst")?.parse::<IpNet>().ok()?.trunc(), part("gw")?.parse().ok()?))
            })
            .collect();
        Ok(Some(parsed))
    }

    fn container_side(&self, ifname: &str) -> Option<(usize, &Interface)> {
        self.interfaces.iter().enumerate().find(|(_, i)| i.name == ifname && !i.sandbox.is_empty())
    }

    fn differences(&self, ifname: &str, endpoint: &Endpoint) -> Vec<String> {
        let mut differences = Vec::new();
        let side = self.container_side(ifname);
        let ours = side.map(|(index, _)| index);
        match side.map(|(_, side)| side) {
            None => differences.push(format!("prevResult has no interface {ifname} with a sandbox")),
            Some(i) if !i.mac.is_empty() && !i.mac.eq_ignore_ascii_case(&endpoint.container_mac) => differences.push(
                format!("prevResult has MAC {} for {ifname}, the endpoint {}", cut(&i.mac), endpoint.container_mac),
            ),
            Some(_) => {}
        }
        // The epoch in the name of Wharf's host side identifies the attachment. Names of other plugins have none; a
        // delegated network may have no host side.
        let (host, own) =
            (&endpoint.host_ifname, endpoint.mode == EndpointMode::Own && !endpoint.host_ifname.is_empty());
        if own && !self.interfaces.iter().any(|i| i.name == *host && i.sandbox.is_empty()) {
            differences.push(format!("prevResult does not have the endpoint's host side {}", endpoint.host_ifname));
        }
        let held: Vec<IpAddr> =
            endpoint.ipv4.map(IpAddr::from).into_iter().chain(endpoint.ipv6.map(IpAddr::from)).collect();
        for ip in &held {
            if !self.ips.iter().any(|told| told.address == *ip) {
                differences.push(format!("prevResult does not have the endpoint's address {ip}"));
            }
        }
        for told in self.ips.iter().filter(|told| told.interface.is_some() && told.interface == ours) {
            if !held.contains(&told.address) {
                differences.push(format!("prevResult has {}, which the endpoint does not hold", told.address));
            }
        }
        differences
    }
}

pub(crate) fn without_result(subject: &str, network: &str, endpoint: &Endpoint) -> Fault {
    let id = name_of(endpoint);
    if endpoint.network != network {
        let there = &endpoint.network;
        let msg = format!("{subject}: no such attachment; endpoint {id} has this interface on network {there}");
        return Fault::new(Code::UnknownContainer, msg);
    }
    let msg = format!("{subject}: the runtime holds no result of this attachment's ADD to compare endpoint {id} with");
    Fault::config(msg).with_details(
        "another runtime added the attachment, or this one lost its cache of results (/var/lib/cni/results); recreate the \
         container",
    )
}

/// Ignores an unreadable path: the runtime may see other mounts.
pub(crate) fn same_namespace(subject: &str, netns: &str, endpoint: &Endpoint) -> Result<(), Fault> {
    let id = |path: &str| std::fs::metadata(path).ok().map(|file| (file.dev(), file.ino()));
    match (id(netns), id(&endpoint.netns)) {
        (Some(asked), Some(held)) if asked != held => {
            let difference = format!("CNI_NETNS {} is not the endpoint's namespace {}", cut(netns), endpoint.netns);
            Err(fault(subject, Code::OtherAttachment, endpoint, &[difference]))
        }
        _ => Ok(()),
    }
}

pub(crate) fn verdict(
    subject: &str,
    network: &str,
    target: &Target,
    prev: &PrevResult,
    endpoint: &Endpoint,
    health: &EndpointHealth,
) -> Result<(), Fault> {
    let mut differences = prev.differences(&target.ifname, endpoint);
    if endpoint.network != network {
        differences.insert(0, format!("the endpoint is on network {}", endpoint.network));
    }
    if !differences.is_empty() {
        return Err(fault(subject, Code::OtherAttachment, endpoint, &differences));
    }
    // Pending is normal after ADD.
    if health.overall < Health::Degraded {
        return Ok(());
    }
    let faults = health.findings.iter().filter(|f| f.mended_by != MendedBy::Nobody);
    let mut findings: Vec<String> = faults.map(finding).collect();
    if findings.is_empty() {
        for (part, state) in [
            ("bpf", health.bpf),
            ("policy", health.policy),
            ("connected", health.connected),
            ("self-check", health.self_check.state),
        ] {
            if state >= Health::Degraded {
                findings.push(format!("{part} is {}", if state == Health::Failing { "failing" } else { "degraded" }));
            }
        }
        if findings.is_empty() {
            findings.push("the agent calls the endpoint unhealthy and does not say why".into());
        }
    }
    Err(fault(subject, Code::NotAsItShouldBe, endpoint, &findings))
}

fn finding(finding: &Finding) -> String {
    format!("{} {}: {}", finding.object, finding.subject, finding.problem)
}

fn name_of(endpoint: &Endpoint) -> String {
    match endpoint.id {
        0 => format!("cni-attachment-id:{}:{}", endpoint.container_id, endpoint.ifname),
        id => id.to_string(),
    }
}

fn fault(subject: &str, code: Code, endpoint: &Endpoint, found: &[String]) -> Fault {
    Fault::new(code, format!("{subject}: {}", first_of(found)))
        .with_details(format!("all of it: wharf endpoint health {}", name_of(endpoint)))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use wharf_api::{EndpointState, EndpointStatus};

    use super::*;

    fn endpoint() -> Endpoint {
        Endpoint {
            id: 7,
            epoch: 9,
            state: EndpointState::Ready,
            container_id: "c1".into(),
            ifname: "eth0".into(),
            network: "net".into(),
            identity: 256,
            labels: vec![],
            ipv4: Some([10, 0, 0, 7].into()),
            ipv6: Some("fd00::7".parse().unwrap()),
            ifindex: 12,
            host_ifname: "wh7-9".into(),
            container_mac: "02:00:00:00:00:0a".into(),
            host_mac: "02:00:00:00:00:0b".into(),
            gateway4: None,
            gateway6: None,
            mtu: 1500,
            pool: "default".into(),
            ipam: None,
            routes: None,
            netns: "/run/netns/c1".into(),
            pod_name: None,
            pod_namespace: None,
            runtime: None,
            created_unix_ms: 1,
            ports: Vec::new(),
            ports_off: false,
            masquerade: None,
            bandwidth: wharf_api::Bandwidth::default(),
            source_prefixes: Vec::new(),
            policy_enforcement: wharf_api::Enforcement::Default,
            named_ports: Default::default(),
            mode: wharf_api::EndpointMode::Own,
            delegated: None,
            status: EndpointStatus::default(),
        }
    }

    fn healthy() -> EndpointHealth {
        let ok = Health::Ok;
        let self_check = wharf_api::SelfCheck { state: ok, ..Default::default() };
        EndpointHealth {
            overall: ok,
            bpf: ok,
            policy: ok,
            connected: ok,
            findings: vec![],
            desired_revision: 1,
            realized_revision: 1,
            self_check,
        }
    }

    fn prev() -> Value {
        json!({
            "interfaces": [
                {"name": "wh7-9", "mac": "02:00:00:00:00:0b"},
                {"name": "eth0", "mac": "02:00:00:00:00:0A", "sandbox": "/run/netns/c1"},
            ],
            "ips": [
                {"version": "4", "address": "10.0.0.7/32", "interface": 1},
                {"version": "6", "address": "fd00::7/128", "interface": 1},
            ],
        })
    }

    fn check(prev: &Value, health: &EndpointHealth) -> Result<(), Fault> {
        let document = json!({ "prevResult": prev });
        let prev = PrevResult::parse(&Object::root(document.as_object().unwrap()))?.unwrap();
        verdict("CHECK c1/eth0", "net", &target(), &prev, &endpoint(), health)
    }

    fn target() -> Target {
        Target { container_id: "c1".into(), ifname: "eth0".into() }
    }

    #[test]
    fn what_was_added_and_is_well_passes() {
        assert_eq!(check(&prev(), &healthy()), Ok(()));
    }

    #[test]
    fn a_network_that_the_agent_did_not_make_may_have_no_host_side() {
        let mut prev = prev();
        prev["interfaces"].as_array_mut().unwrap().remove(0);
        prev["ips"][0]["interface"] = json!(0);
        prev["ips"][1]["interface"] = json!(0);
        let document = json!({ "prevResult": prev });
        let read = PrevResult::parse(&Object::root(document.as_object().unwrap())).unwrap().unwrap();
        let made = Endpoint { id: 0, host_ifname: String::new(), ..endpoint() };
        assert_eq!(verdict("CHECK", "net", &target(), &read, &made, &healthy()), Ok(()));
        assert_eq!(read.differences("eth0", &endpoint()).len(), 1, "one that has a host side misses it");
        let fault = verdict("CHECK", "other", &target(), &read, &made, &healthy()).unwrap_err();
        assert_eq!(fault.details, "all of it: wharf endpoint health cni-attachment-id:c1:eth0");
    }

    #[test]
    fn later_plugins_may_add_to_the_result() {
        let mut prev = prev();
        prev["interfaces"].as_array_mut().unwrap().push(json!({"name": "ifb0"}));
        prev["ips"].as_array_mut().unwrap().push(json!({"address": "192.0.2.1/24", "interface": 2}));
        prev["ips"].as_array_mut().unwrap().push(json!({"address": "192.0.2.2/24"}));
        prev["routes"] = json!([{"dst": "192.0.2.0/24"}]);
        assert_eq!(check(&prev, &healthy()), Ok(()));
    }

    #[test]
    fn a_chained_endpoints_host_side_is_another_plugins() {
        let prev = json!({
            "interfaces": [{"name": "eth0", "mac": "02:00:00:00:00:0a", "sandbox": "/run/netns/c1"}],
            "ips": prev()["ips"].as_array().unwrap().iter().map(|ip| {
                let mut ip = ip.clone();
                ip["interface"] = json!(0);
                ip
            }).collect::<Vec<_>>(),
        });
        let prev = json!({ "prevResult": prev });
        let prev = PrevResult::parse(&Object::root(prev.as_object().unwrap())).unwrap().unwrap();
        let verdict = |mode| verdict("CHECK", "net", &target(), &prev, &Endpoint { mode, ..endpoint() }, &healthy());
        assert_eq!(verdict(EndpointMode::Chained), Ok(()));
        assert!(verdict(EndpointMode::Own).unwrap_err().msg.contains("host side"), "an own link has its name");
    }

    #[test]
    fn another_attachments_result_is_refused() {
        for (pointer, value, words) in [
            ("/interfaces/0/name", json!("wh7-8"), "host side wh7-9"),
            ("/interfaces/1/name", json!("eth1"), "no interface eth0"),
            ("/interfaces/1/sandbox", json!(""), "no interface eth0"),
            ("/interfaces/1/mac", json!("02:00:00:00:00:0c"), "MAC"),
            ("/ips/0/address", json!("10.0.0.8/32"), "10.0.0.8"),
            ("/ips", json!([]), "fd00::7"),
            ("/ips", Value::Null, "10.0.0.7"),
            ("/interfaces", Value::Null, "no interface"),
        ] {
            let mut prev = prev();
            *prev.pointer_mut(pointer).unwrap() = value.clone();
            let fault = check(&prev, &healthy()).expect_err(pointer);
            assert_eq!(fault.code, Code::OtherAttachment, "{pointer}");
            assert!(fault.msg.contains(words), "{pointer} = {value}: {}", fault.msg);
        }
    }

    #[test]
    fn an_endpoint_of_another_network_is_not_the_one_that_was_added() {
        let document = json!({ "prevResult": prev() });
        let prev = PrevResult::parse(&Object::root(document.as_object().unwrap())).unwrap().unwrap();
        let fault = verdict("CHECK c1/eth0", "other", &target(), &prev, &endpoint(), &healthy()).unwrap_err();
        assert_eq!(fault.code, Code::OtherAttachment);
        assert!(fault.msg.contains("on network net"), "{}", fault.msg);
    }

    #[test]
    fn without_a_result_the_missing_attachment_is_named() {
        let fault = without_result("CHECK c1/eth0 on network net", "net", &endpoint());
        assert_eq!(fault.code, Code::Config);
        assert!(fault.msg.contains("c1/eth0") && fault.msg.contains("endpoint 7"), "{}", fault.msg);
        let fault = without_result("CHECK c1/eth0 on network other", "other", &endpoint());
        assert_eq!(fault.code, Code::UnknownContainer);
        assert!(fault.msg.contains("no such attachment") && fault.msg.contains("network net"), "{}", fault.msg);
    }

    #[test]
    fn findings_are_told_the_first_of_them() {
        let finding = |n: usize| Finding {
            object: "route".into(),
            subject: format!("r{n}"),
            problem: "is missing".into(),
            owner: None,
            repairable: true,
            ..Finding::default()
        };
        let health = EndpointHealth { overall: Health::Failing, findings: (0..8).map(finding).collect(), ..healthy() };
        let fault = check(&prev(), &health).unwrap_err();
        assert_eq!(fault.code, Code::NotAsItShouldBe);
        assert!(fault.msg.contains("route r0: is missing") && fault.msg.ends_with("and 3 more"), "{}", fault.msg);
        assert_eq!(fault.details, "all of it: wharf endpoint health 7");
    }

    #[test]
    fn a_notice_is_no_fault() {
        let mtu = Finding { object: "mtu".into(), mended_by: MendedBy::Nobody, ..Finding::default() };
        let noticed = EndpointHealth { findings: vec![mtu.clone()], ..healthy() };
        assert_eq!(check(&prev(), &noticed), Ok(()));
        let failing = EndpointHealth { overall: Health::Failing, bpf: Health::Failing, ..noticed };
        assert!(check(&prev(), &failing).unwrap_err().msg.ends_with("bpf is failing"));
    }

    #[test]
    fn a_part_that_fails_is_named_and_a_pending_one_passes() {
        let failing = EndpointHealth { overall: Health::Failing, bpf: Health::Failing, ..healthy() };
        assert!(check(&prev(), &failing).unwrap_err().msg.contains("bpf is failing"));
        let odd = EndpointHealth { overall: Health::Degraded, ..healthy() };
        assert_eq!(check(&prev(), &odd).unwrap_err().code, Code::NotAsItShouldBe);
        let pending = EndpointHealth { overall: Health::Pending, policy: Health::Pending, ..healthy() };
        assert_eq!(check(&prev(), &pending), Ok(()));
    }
}
