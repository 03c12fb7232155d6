//! ADD after another plugin: returns its result (`prevResult`).

use std::net::IpAddr;

use serde_json::{Map, Value};

use crate::{
    args::ContainerArgs,
    fault::Fault,
    json::Object,
    netconf::{NetConf, Version},
    request::Target,
    rules::{self, cut},
};

const KEY: &str = "prevResult";

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Chain {
    /// At most one per family.
    pub(crate) ips: Vec<IpAddr>,
    result: Map<String, Value>,
}

impl Chain {
    /// `None` if wharf-cni makes the interface.
    pub(crate) fn parse(conf: &NetConf, target: &Target, netns: &str) -> Result<Option<Self>, Fault> {
        let root = conf.document();
        let Some(prev) = root.object(KEY)? else { return Ok(None) };
        if root.value("ipam").is_some() {
            let text = "netconf: key \"ipam\" is there beside prevResult, so another plugin made the interface and leased its addresses";
            return Err(Fault::config(text).with_details("remove the key \"ipam\" of wharf-cni"));
        }
        let at = interface(&prev, target, netns)?;
        let ips = addresses(&prev, at)?;
        if ips.is_empty() {
            let msg = format!("netconf: {KEY} has no address for interface {}", target.ifname);
            return Err(Fault::config(msg).with_details("the plugin that made the interface needs an IPAM (\"ipam\")"));
        }
        Ok(Some(Self { ips, result: prev.map().clone() }))
    }

    /// Rejects requested addresses that were not leased.
    pub(crate) fn fulfils(&self, args: &ContainerArgs) -> Result<(), Fault> {
        let unmet = args.ips.iter().find(|ip| !self.ips.contains(ip));
        unmet.map_or(Ok(()), |ip| {
            let got: Vec<String> = self.ips.iter().map(ToString::to_string).collect();
            let got = got.join(", ");
            Err(Fault::config(format!(
                "address {ip} is asked for, and the plugin that made the interface leased {got}"
            )))
        })
    }

    pub(crate) fn result(&self, version: Version) -> String {
        let mut result = self.result.clone();
        result.insert("cniVersion".to_owned(), Value::from(version.as_str()));
        if version <= Version::V0_4_0
            && let Some(Value::Array(ips)) = result.get_mut("ips")
        {
            for ip in ips.iter_mut().filter_map(Value::as_object_mut) {
                let is_ipv6 = ip.get("address").and_then(Value::as_str).is_some_and(|text| text.contains(':'));
                ip.entry("version").or_insert_with(|| Value::from(if is_ipv6 { "6" } else { "4" }));
            }
        }
        Value::Object(result).to_string()
    }
}

fn interface(prev: &Object<'_>, target: &Target, netns: &str) -> Result<usize, Fault> {
    let mut fitting = Vec::new();
    for (at, (path, item)) in prev.list("interfaces")?.into_iter().enumerate() {
        let item = Object::at(path, item)?;
        let (name, sandbox) = (item.string("name")?.unwrap_or_default(), item.string("sandbox")?.unwrap_or_default());
        if name == target.ifname && !sandbox.is_empty() {
            fitting.push((at, sandbox == netns));
        }
    }
    // Only decides between several namespaces, because runtimes spell a path in several ways.
    let exact: Vec<usize> = fitting.iter().filter(|(_, same)| *same).map(|(at, _)| *at).collect();
    match (exact.as_slice(), fitting.as_slice()) {
        ([at], _) | ([], [(at, _)]) => Ok(*at),
        ([], []) => Err(Fault::config(format!("netconf: {KEY} has no interface {} with a sandbox", target.ifname))
            .with_details(
                "put a plugin that makes the interface CNI_IFNAME before wharf-cni in the list of plugins, or none",
            )),
        _ => Err(Fault::config(format!("netconf: {KEY} has several interfaces {}", target.ifname))),
    }
}

fn addresses(prev: &Object<'_>, at: usize) -> Result<Vec<IpAddr>, Fault> {
    let interfaces = prev.list("interfaces")?;
    let mut sandboxed = 0;
    for (path, item) in &interfaces {
        let item = Object::at(path.clone(), item)?;
        sandboxed += usize::from(item.string("sandbox")?.is_some_and(|sandbox| !sandbox.is_empty()));
    }
    let mut found: Vec<IpAddr> = Vec::new();
    for (path, item) in prev.list("ips")? {
        let item = Object::at(path, item)?;
        let text = item.required_string("address")?;
        let broken =
            |rule: &str| Fault::config(format!("netconf: key {:?}: {:?} {rule}", item.path_of("address"), cut(text)));
        let ip = rules::address(text).map_err(&broken)?;
        if let Some(family) = item.string("version")?
            && family != if ip.is_ipv4() { "4" } else { "6" }
        {
            return Err(broken(&format!("is not of the IP version {:?} beside it", cut(family))));
        }
        let of = match item.u32("interface")? {
            // Ambiguous with several sandboxed interfaces.
            None if sandboxed == 1 => at,
            None => continue,
            Some(index) => match usize::try_from(index).ok().filter(|index| *index < interfaces.len()) {
                Some(index) => index,
                None => {
                    let key = item.path_of("interface");
                    return Err(Fault::config(format!("netconf: key {key:?}: {index} is the index of no interface")));
                }
            },
        };
        if of != at || found.contains(&ip) {
            continue;
        }
        if let Some(other) = found.iter().find(|other| other.is_ipv4() == ip.is_ipv4()) {
            return Err(broken(&format!("stands beside {other}; an endpoint has one address of each family")));
        }
        found.push(ip);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fault::Code;

    const NETNS: &str = "/run/netns/c1";

    fn prev() -> Value {
        json!({
            "cniVersion": "1.0.0",
            "interfaces": [
                {"name": "veth1a2b", "mac": "02:00:00:00:00:0b"},
                {"name": "eth0", "mac": "02:00:00:00:00:0a", "sandbox": NETNS, "socketPath": "/x"},
            ],
            "ips": [
                {"address": "10.1.0.2/24", "gateway": "10.1.0.1", "interface": 1},
                {"address": "fd01::2/64", "interface": 1, "odd": true},
            ],
            "routes": [{"dst": "0.0.0.0/0", "mtu": 1400}],
            "dns": {"nameservers": ["10.1.0.53"]},
            "ours": {"nested": [1, 2, 3]},
        })
    }

    fn conf(version: &str, keys: Value) -> NetConf {
        let mut document = json!({"cniVersion": version, "name": "net", "type": "wharf-cni"});
        for (key, value) in keys.as_object().unwrap() {
            document[key] = value.clone();
        }
        NetConf::parse(document.as_object().unwrap().clone(), None).unwrap()
    }

    fn parse(prev: &Value) -> Result<Option<Chain>, Fault> {
        let target = Target { container_id: "c1".into(), ifname: "eth0".into() };
        Chain::parse(&conf("1.0.0", json!({"prevResult": prev})), &target, NETNS)
    }

    fn ips(prev: &Value) -> Vec<String> {
        parse(prev).unwrap().unwrap().ips.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn the_interface_and_its_addresses_are_found() {
        assert_eq!(ips(&prev()), ["10.1.0.2", "fd01::2"]);
        assert_eq!(parse(&Value::Null).unwrap(), None);
        let mut other = prev();
        other["interfaces"][1]["sandbox"] = json!("/var/run/netns/c1");
        other["ips"][0].as_object_mut().unwrap().remove("interface");
        assert_eq!(ips(&other), ["10.1.0.2", "fd01::2"]);
        let mut more = prev();
        more["interfaces"].as_array_mut().unwrap().push(json!({"name": "eth1", "sandbox": NETNS}));
        more["ips"].as_array_mut().unwrap().extend([
            json!({"address": "10.9.0.2/24", "interface": 2}),
            json!({"address": "10.9.0.3/24"}),
            json!({"address": "10.1.0.2/32", "interface": 1}),
        ]);
        assert_eq!(ips(&more), ["10.1.0.2", "fd01::2"]);
        let mut two = prev();
        two["interfaces"][0] = json!({"name": "eth0", "sandbox": "/run/netns/c2"});
        assert_eq!(ips(&two), ["10.1.0.2", "fd01::2"]);
    }

    #[test]
    fn what_names_no_interface_or_no_address_is_a_config_error() {
        for (pointer, value, words) in [
            ("", json!([]), "prevResult"),
            ("/interfaces", json!([]), "no interface eth0"),
            ("/interfaces", Value::Null, "no interface eth0"),
            ("/interfaces", json!({}), "prevResult.interfaces"),
            ("/interfaces/1", json!(7), "prevResult.interfaces[1]"),
            ("/interfaces/1/name", json!("eth1"), "no interface eth0"),
            ("/interfaces/1/name", json!(["eth0"]), "prevResult.interfaces[1].name"),
            ("/interfaces/1/sandbox", json!(""), "no interface eth0"),
            ("/interfaces/0", json!({"name": "eth0", "sandbox": NETNS}), "several interfaces eth0"),
            ("/ips", json!([]), "no address"),
            ("/ips", Value::Null, "no address"),
            ("/ips/0/address", json!(""), "prevResult.ips[0].address"),
            ("/ips/0/address", json!("10.1.0.300/24"), "10.1.0.300"),
            ("/ips/0/address", json!("10.1.0.2/33"), "10.1.0.2/33"),
            ("/ips/0/interface", json!(-1), "prevResult.ips[0].interface"),
            ("/ips/0/interface", json!(2), "index of no interface"),
            ("/ips/0/interface", json!(u32::MAX), "index of no interface"),
            ("/ips/0/version", json!("6"), "IP version"),
            ("/ips/1/address", json!("10.1.0.3/24"), "one address of each family"),
        ] {
            let mut prev = prev();
            match prev.pointer_mut(pointer) {
                Some(place) => *place = value.clone(),
                None => prev["ips"][0]["version"] = value.clone(),
            }
            let fault = parse(&prev).expect_err(pointer);
            assert_eq!(fault.code, Code::Config, "{pointer}");
            assert!(fault.msg.contains(words), "{pointer} = {value}: {}", fault.msg);
        }
        let target = Target { container_id: "c1".into(), ifname: "eth0".into() };
        let ipam = conf("1.0.0", json!({"prevResult": prev(), "ipam": {"type": "host-local"}}));
        let fault = Chain::parse(&ipam, &target, NETNS).unwrap_err();
        assert!(fault.msg.contains("\"ipam\""), "{}", fault.msg);
    }

    #[test]
    fn the_answer_is_the_result_in_the_version_asked_for() {
        let chain = parse(&prev()).unwrap().unwrap();
        for version in Version::ALL {
            let answer: Value = serde_json::from_str(&chain.result(version)).unwrap();
            let mut expected = prev();
            expected["cniVersion"] = json!(version.as_str());
            if version <= Version::V0_4_0 {
                expected["ips"][0]["version"] = json!("4");
                expected["ips"][1]["version"] = json!("6");
            }
            assert_eq!(answer, expected);
        }
    }

    #[test]
    fn wishes_that_were_not_fulfilled_are_refused() {
        let chain = parse(&prev()).unwrap().unwrap();
        let wish = |ip: &str| ContainerArgs { ips: vec![ip.parse().unwrap()], ..ContainerArgs::default() };
        assert_eq!(chain.fulfils(&ContainerArgs::default()), Ok(()));
        assert_eq!(chain.fulfils(&wish("10.1.0.2")), Ok(()));
        let fault = chain.fulfils(&wish("10.1.0.9")).unwrap_err();
        assert!(fault.msg.contains("10.1.0.9") && fault.msg.contains("leased 10.1.0.2, fd01::2"), "{}", fault.msg);
    }
}
