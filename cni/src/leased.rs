//! Result of an IPAM plugin's ADD.

use std::net::IpAddr;

use serde_json::Value;
use wharf_api::ContainerRoute;

use crate::{
    fault::{Code, Fault},
    json::Object,
    netconf::{self, Dns, Version},
    routes,
    rules::{self, cut},
};

/// Leased addresses, gateways, routes and DNS settings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Leased {
    /// At most one per family.
    pub(crate) ips: Vec<IpAddr>,
    /// At most one per family of `ips`.
    pub(crate) gateways: Vec<IpAddr>,
    pub(crate) routes: Option<Vec<ContainerRoute>>,
    pub(crate) dns: Dns,
}

impl Leased {
    /// The leased addresses.
    #[must_use]
    pub fn ips(&self) -> &[IpAddr] {
        &self.ips
    }

    #[must_use]
    pub fn gateways(&self) -> &[IpAddr] {
        &self.gateways
    }

    /// Parses a result and ignores its interfaces.
    ///
    /// # Errors
    /// Code 6 for an invalid result, 7 for one that an endpoint cannot have.
    pub fn parse(bytes: &[u8]) -> Result<Self, Fault> {
        let document = match serde_json::from_slice(bytes) {
            Ok(Value::Object(document)) => document,
            Ok(_) => return Err(Fault::new(Code::Decode, "its answer is no JSON object")),
            Err(e) => return Err(Fault::new(Code::Decode, format!("its answer is no JSON: {e}"))),
        };
        Self::read(&Object::root(&document)).map_err(|fault| {
            let what = fault.msg.strip_prefix("netconf: ").unwrap_or(&fault.msg);
            Fault { msg: format!("its answer: {what}"), ..fault }
        })
    }

    fn read(root: &Object<'_>) -> Result<Self, Fault> {
        let version = root.string("cniVersion")?.unwrap_or_default();
        if !version.is_empty() && Version::parse(version).is_none() {
            return Err(Fault::new(Code::IncompatibleVersion, format!("it is of CNI version {:?}", cut(version)))
                .with_details(format!("supported: {}", Version::list())));
        }
        let mut leased = Self { routes: routes::parse(root, "routes")?, dns: netconf::dns(root)?, ..Self::default() };
        for (path, item) in root.list("ips")? {
            let item = Object::at(path, item)?;
            let address = |key: &str, text: &str| {
                rules::address(text)
                    .map_err(|rule| Fault::config(format!("key {:?}: {:?} {rule}", item.path_of(key), cut(text))))
            };
            let ip = address("address", item.required_string("address")?)?;
            if let Some(other) = leased.ips.iter().find(|other| other.is_ipv4() == ip.is_ipv4()) {
                return Err(Fault::config(format!("{ip} beside {other}; an endpoint has one address of each family")));
            }
            leased.ips.push(ip);
            if let Some(text) = item.string("gateway")?.filter(|text| !text.is_empty()) {
                let gateway = address("gateway", text)?;
                if gateway.is_ipv4() != ip.is_ipv4() {
                    return Err(Fault::config(format!("the gateway {gateway} of {ip} is of the other family")));
                }
                leased.gateways.push(gateway);
            }
        }
        if leased.ips.is_empty() {
            return Err(Fault::config("it has no address"));
        }
        Ok(leased)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(result: &Value) -> Result<Leased, Fault> {
        Leased::parse(result.to_string().as_bytes())
    }

    #[test]
    fn a_result_of_each_version_is_read() {
        let ips = json!([{"version": "4", "address": "10.1.0.2/24", "gateway": "10.1.0.1", "interface": 0},
                         {"version": "6", "address": "fd01::2/64"}]);
        for version in [json!("0.3.1"), json!("1.1.0"), json!(""), Value::Null] {
            let leased = parse(&json!({"cniVersion": version, "ips": ips, "dns": {"domain": "x.example"}})).unwrap();
            assert_eq!(leased.ips, ["10.1.0.2".parse::<IpAddr>().unwrap(), "fd01::2".parse().unwrap()]);
            assert_eq!(leased.gateways, ["10.1.0.1".parse::<IpAddr>().unwrap()]);
            assert_eq!(leased.routes, None);
        }
        let routes = json!([{"dst": "10.0.0.0/8", "gw": "10.1.0.1", "mtu": 1400, "priority": 5}, {"dst": "0.0.0.0/0"}]);
        let leased = parse(&json!({"ips": ips, "routes": routes})).unwrap();
        assert_eq!(leased.routes.unwrap().len(), 2);
        assert_eq!(parse(&json!({"ips": ips, "routes": []})).unwrap().routes, Some(Vec::new()));
    }

    #[test]
    fn what_an_endpoint_cannot_have_is_refused_by_name() {
        for (result, code, words) in [
            (json!([]), Code::Decode, "no JSON object"),
            (json!({}), Code::Config, "no address"),
            (json!({"ips": {}}), Code::Config, "\"ips\" must be a list"),
            (json!({"ips": [{}]}), Code::Config, "ips[0].address"),
            (json!({"ips": [{"address": "10.1.0.300/24"}]}), Code::Config, "ips[0].address"),
            (json!({"ips": [{"address": "10.1.0.2/24", "gateway": "fd01::1"}]}), Code::Config, "other family"),
            (json!({"ips": [{"address": "10.1.0.2/24"}, {"address": "10.2.0.2/24"}]}), Code::Config, "10.2.0.2 beside"),
            (json!({"cniVersion": "0.2.0", "ip4": {"ip": "10.1.0.2/24"}}), Code::IncompatibleVersion, "0.2.0"),
            (json!({"ips": [{"address": "10.1.0.2/24"}], "routes": [{}]}), Code::Config, "routes[0].dst"),
            (json!({"ips": [{"address": "10.1.0.2/24"}], "dns": 1}), Code::Config, "dns"),
        ] {
            let fault = parse(&result).expect_err(&result.to_string());
            assert_eq!(fault.code, code, "{result}: {}", fault.msg);
            assert!(fault.msg.contains(words) && !fault.msg.contains("netconf"), "{result}: {}", fault.msg);
        }
        assert_eq!(Leased::parse(b"").unwrap_err().code, Code::Decode);
    }
}
