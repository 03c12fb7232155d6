//! Records of the cluster's services, as in Kubernetes' DNS specification.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use serde_json::Value;

use crate::kubernetes::api::{elements, text};

pub(super) const DOMAIN: &str = "cluster.local";

/// Domains with an SOA record.
const APEXES: [&str; 3] = [DOMAIN, "in-addr.arpa", "ip6.arpa"];

const LONGEST_LABEL: usize = 63;
const LONGEST_NAME: usize = 255;

/// Wire format in lower case.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Name(Vec<u8>);

impl Name {
    /// `None` if a label or the name is too long, or a label is empty.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut wire = Vec::new();
        for label in text.strip_suffix('.').unwrap_or(text).split('.') {
            if label.is_empty() || label.len() > LONGEST_LABEL {
                return None;
            }
            wire.push(u8::try_from(label.len()).ok()?);
            wire.extend(label.bytes().map(|byte| byte.to_ascii_lowercase()));
        }
        wire.push(0);
        (wire.len() <= LONGEST_NAME).then_some(Self(wire))
    }

    /// The name at the start of `bytes`, which has no compression, and the rest.
    pub(super) fn read(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let mut rest = bytes;
        loop {
            let (length, more) = rest.split_first()?;
            let length = usize::from(*length);
            if length > LONGEST_LABEL {
                return None;
            }
            rest = more.get(length..)?;
            if length == 0 {
                break;
            }
        }
        let wire = bytes.get(..bytes.len().checked_sub(rest.len())?)?;
        // Lengths are at most 63, which is no letter.
        (wire.len() <= LONGEST_NAME).then(|| (Self(wire.to_ascii_lowercase()), rest))
    }

    pub(super) fn wire(&self) -> &[u8] {
        &self.0
    }

    /// The name, its parents, and the root.
    fn suffixes(&self) -> impl Iterator<Item = &[u8]> {
        std::iter::successors(Some(self.wire()), |suffix| {
            let (length, more) = suffix.split_first()?;
            if *length == 0 { None } else { more.get(usize::from(*length)..) }
        })
    }

    pub(super) fn is_below(&self, domain: &Self) -> bool {
        self.suffixes().any(|suffix| suffix == domain.wire())
    }

    fn of_address(address: IpAddr) -> Option<Self> {
        let labels: Vec<String> = match address {
            IpAddr::V4(address) => address.octets().iter().rev().map(u8::to_string).collect(),
            IpAddr::V6(address) => {
                let bytes = address.octets();
                bytes.iter().rev().flat_map(|byte| [format!("{:x}", byte & 15), format!("{:x}", byte >> 4)]).collect()
            }
        };
        let domain = if address.is_ipv4() { "in-addr.arpa" } else { "ip6.arpa" };
        Self::parse(&format!("{}.{domain}", labels.join(".")))
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Data {
    A(Ipv4Addr),
    Aaaa(Ipv6Addr),
    Cname(Name),
    Ptr(Name),
    Srv { port: u16, target: Name },
}

#[derive(Debug)]
struct Service {
    name: String,
    is_headless: bool,
    publishes_unready: bool,
}

#[derive(Debug, Default)]
pub(super) struct Zone {
    records: BTreeMap<Name, Vec<Data>>,
    /// Includes parents, which may have no records.
    existing: BTreeSet<Vec<u8>>,
}

impl Zone {
    /// `list` has Services and EndpointSlices.
    pub(super) fn of(list: &Value) -> Self {
        let mut zone = Self::default();
        for apex in APEXES {
            zone.extend_existing(Name::parse(apex).as_ref());
        }
        let of_kind =
            |kind: &'static str| elements(list, "/items").iter().filter(move |object| text(object, "/kind") == kind);
        let mut services = BTreeMap::new();
        for object in of_kind("Service") {
            if let Some(service) = zone.add_service(object) {
                services.insert((text(object, "/metadata/namespace"), text(object, "/metadata/name")), service);
            }
        }
        for slice in of_kind("EndpointSlice") {
            let service = text(slice, "/metadata/labels/kubernetes.io~1service-name");
            if let Some(service) = services.get(&(text(slice, "/metadata/namespace"), service)) {
                zone.add_slice(service, slice);
            }
        }
        zone
    }

    pub(super) fn records(&self, name: &Name) -> &[Data] {
        self.records.get(name).map(Vec::as_slice).unwrap_or_default()
    }

    pub(super) fn contains(&self, name: &Name) -> bool {
        self.existing.contains(name.wire())
    }

    /// Number of names with records.
    pub(super) fn size(&self) -> usize {
        self.records.len()
    }

    /// Domain of the SOA record in a negative answer.
    pub(super) fn apex(name: &Name) -> Option<Name> {
        APEXES.iter().filter_map(|apex| Name::parse(apex)).find(|apex| name.is_below(apex))
    }

    /// `None` for a service of the type ExternalName, which has no endpoints.
    fn add_service(&mut self, object: &Value) -> Option<Service> {
        let (namespace, name) = (text(object, "/metadata/namespace"), text(object, "/metadata/name"));
        let name = format!("{name}.{namespace}.svc.{DOMAIN}");
        if text(object, "/spec/type") == "ExternalName" {
            let target = Name::parse(text(object, "/spec/externalName"))?;
            self.add(&name, Data::Cname(target));
            return None;
        }
        let addresses: Vec<_> = elements(object, "/spec/clusterIPs").iter().filter_map(Value::as_str).collect();
        let is_headless = addresses.contains(&"None");
        self.extend_existing(Name::parse(&name).as_ref());
        for address in addresses {
            self.add_address(&name, address);
            self.add_reverse(address, &name);
        }
        if !is_headless {
            for port in elements(object, "/spec/ports") {
                self.add_port(&name, port, &name);
            }
        }
        let publishes_unready = object.pointer("/spec/publishNotReadyAddresses") == Some(&Value::Bool(true));
        Some(Service { name, is_headless, publishes_unready })
    }

    fn add_slice(&mut self, service: &Service, slice: &Value) {
        for endpoint in elements(slice, "/endpoints") {
            let is_unready = endpoint.pointer("/conditions/ready") == Some(&Value::Bool(false));
            if is_unready && !service.publishes_unready {
                continue;
            }
            let hostname = text(endpoint, "/hostname");
            if !service.is_headless && hostname.is_empty() {
                continue;
            }
            for address in elements(endpoint, "/addresses").iter().filter_map(Value::as_str) {
                let label = if hostname.is_empty() { address.replace(['.', ':'], "-") } else { hostname.to_owned() };
                let name = format!("{label}.{}", service.name);
                self.add_address(&name, address);
                self.add_reverse(address, &name);
                if service.is_headless {
                    self.add_address(&service.name, address);
                    for port in elements(slice, "/ports") {
                        self.add_port(&service.name, port, &name);
                    }
                }
            }
        }
    }

    fn add_address(&mut self, name: &str, address: &str) {
        match address.parse() {
            Ok(IpAddr::V4(address)) => self.add(name, Data::A(address)),
            Ok(IpAddr::V6(address)) => self.add(name, Data::Aaaa(address)),
            // `None` of headless services.
            Err(_) => {}
        }
    }

    fn add_reverse(&mut self, address: &str, target: &str) {
        let owner = address.parse().ok().and_then(Name::of_address);
        if let (Some(owner), Some(target)) = (owner, Name::parse(target)) {
            self.insert(owner, Data::Ptr(target));
        }
    }

    /// Ports without names have no SRV record.
    fn add_port(&mut self, service: &str, port: &Value, target: &str) {
        let name = text(port, "/name");
        let protocol = port.get("protocol").and_then(Value::as_str).unwrap_or("TCP").to_lowercase();
        let number = port.get("port").and_then(Value::as_u64).and_then(|number| u16::try_from(number).ok());
        if let (false, Some(port), Some(target)) = (name.is_empty(), number, Name::parse(target)) {
            self.add(&format!("_{name}._{protocol}.{service}"), Data::Srv { port, target });
        }
    }

    fn add(&mut self, name: &str, data: Data) {
        if let Some(name) = Name::parse(name) {
            self.insert(name, data);
        }
    }

    fn insert(&mut self, name: Name, data: Data) {
        self.extend_existing(Some(&name));
        let records = self.records.entry(name).or_default();
        if !records.contains(&data) {
            records.push(data);
        }
    }

    fn extend_existing(&mut self, name: Option<&Name>) {
        let suffixes = name.into_iter().flat_map(Name::suffixes).map(<[u8]>::to_vec);
        self.existing.extend(suffixes);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::json;

    use super::*;

    pub(crate) fn zone() -> Zone {
        let service = |name: &str, spec: Value| {
            let metadata = json!({"namespace": "shop", "name": name});
            json!({"kind": "Service", "metadata": metadata, "spec": spec})
        };
        let slice = |service: &str, ports: Value, endpoints: Value| {
            let labels = json!({"kubernetes.io/service-name": service});
            json!({
                "kind": "EndpointSlice", "metadata": {"namespace": "shop", "name": "s", "labels": labels},
                "ports": ports, "endpoints": endpoints,
            })
        };
        let http = json!([{"name": "http", "port": 80, "protocol": "TCP"}, {"port": 81}]);
        let pods = json!([
            {"addresses": ["10.244.1.2"], "conditions": {"ready": true}, "hostname": "first"},
            {"addresses": ["10.244.1.3"], "conditions": {"ready": false}},
            {"addresses": ["10.244.1.4"]},
        ]);
        Zone::of(&json!({"kind": "List", "items": [
            slice("cluster", http.clone(), json!([{"addresses": ["10.244.1.9"]}])),
            slice("headless", http.clone(), pods.clone()),
            slice("headless", http.clone(), json!([{"addresses": ["fd44::1"]}])),
            slice("unready", json!(null), pods),
            slice("unknown", http.clone(), json!(null)),
            service("cluster", json!({"type": "ClusterIP", "clusterIPs": ["10.96.0.7", "fd96::7"], "ports": http})),
            service("headless", json!({"clusterIPs": ["None"], "ports": http})),
            service("unready", json!({"clusterIPs": ["None"], "publishNotReadyAddresses": true})),
            service("alias", json!({"type": "ExternalName", "externalName": "Cluster.shop.svc.cluster.local."})),
            service("away", json!({"type": "ExternalName", "externalName": "foo.example.com"})),
            service("loop", json!({"type": "ExternalName", "externalName": "loop.shop.svc.cluster.local"})),
            service("bad", json!({"type": "ExternalName", "externalName": "a..b"})),
            {"kind": "Service"}, {"kind": "EndpointSlice", "endpoints": 7}, 3,
        ]}))
    }

    pub(crate) fn name(text: &str) -> Name {
        Name::parse(text).unwrap()
    }

    fn shop(text: &str) -> Name {
        name(&format!("{text}.shop.svc.cluster.local"))
    }

    #[test]
    fn services_have_addresses_ports_and_reverse_names() {
        let zone = zone();
        let [a, aaaa] = [Data::A(Ipv4Addr::new(10, 96, 0, 7)), Data::Aaaa("fd96::7".parse().unwrap())];
        assert_eq!(zone.records(&shop("cluster")), [a, aaaa]);
        let target = shop("cluster");
        assert_eq!(zone.records(&shop("_http._tcp.cluster")), [Data::Srv { port: 80, target: target.clone() }]);
        assert_eq!(zone.records(&name("7.0.96.10.in-addr.arpa")), [Data::Ptr(target.clone())]);
        let reverse = format!("7.{}6.9.d.f.ip6.arpa", "0.".repeat(27));
        assert_eq!(zone.records(&name(&reverse)), [Data::Ptr(target)]);
        assert!(zone.records(&shop("10-244-1-9.cluster")).is_empty());
    }

    #[test]
    fn headless_services_have_the_addresses_of_ready_endpoints() {
        let zone = zone();
        let a = |last| Data::A(Ipv4Addr::new(10, 244, 1, last));
        let third = Data::Aaaa("fd44::1".parse().unwrap());
        assert_eq!(zone.records(&shop("headless")), [a(2), a(4), third.clone()]);
        assert_eq!(zone.records(&shop("unready")), [a(2), a(3), a(4)]);
        assert_eq!(zone.records(&shop("first.headless")), [a(2)]);
        assert_eq!(zone.records(&shop("10-244-1-4.headless")), [a(4)]);
        assert_eq!(zone.records(&shop("fd44--1.headless")), [third]);
        let targets = ["first", "10-244-1-4", "fd44--1"].map(|label| shop(&format!("{label}.headless")));
        let expected = targets.map(|target| Data::Srv { port: 80, target });
        assert_eq!(zone.records(&shop("_http._tcp.headless")), expected);
    }

    #[test]
    fn parents_of_names_exist_without_records() {
        let zone = zone();
        for parent in ["svc.cluster.local", "shop.svc.cluster.local", "_tcp.cluster.shop.svc.cluster.local", "arpa"] {
            assert!(zone.contains(&name(parent)) && zone.records(&name(parent)).is_empty(), "{parent}");
        }
        assert!(!zone.contains(&shop("no")) && !zone.contains(&shop("bad")) && !zone.contains(&name("example.com")));
        assert_eq!(Zone::apex(&shop("no")), Some(name("cluster.local")));
        assert_eq!(Zone::apex(&name("notcluster.local")), None);
    }

    #[test]
    fn names_have_limits() {
        let label = "a".repeat(63);
        assert!(Name::parse(&label).is_some() && Name::parse(&format!("{label}a")).is_none());
        assert!(Name::parse("").is_none() && Name::parse(".").is_none() && Name::parse("a..b").is_none());
        let long = [&*label, &label, &label].join(".");
        assert!(Name::parse(&format!("{long}.{}", "b".repeat(61))).is_some());
        assert!(Name::parse(&format!("{long}.{}", "b".repeat(62))).is_none());
        assert_eq!(Name::read(b"\x01A\x02bC\0rest"), Some((name("a.bc"), &b"rest"[..])));
        for wire in [&b""[..], b"\x01", b"\x01a", b"\x40a", b"\xc0\x0c", &[1; 300]] {
            assert_eq!(Name::read(wire), None, "{wire:?}");
        }
    }
}
