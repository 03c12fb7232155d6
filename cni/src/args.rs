//! Settings of one container: `CNI_ARGS`, netconf's `args.cni` and `runtimeConfig`. Runtimes combine them: equal values
//! are merged, contradictions are an error.

use std::net::IpAddr;

use ipnet::IpNet;
use wharf_api::{Bandwidth, ContainerRoute, PublishedPort};

use crate::{
    bandwidth,
    fault::Fault,
    json::{Object, text},
    netconf::{Dns, NetConf},
    ports, routes,
    rules::{self, cut},
};

/// Requested by netconf's `capabilities`.
const ANNOTATIONS: &str = "io.kubernetes.cri.pod-annotations";
/// Overrides netconf's `pool`.
const ANNOTATION_POOL: &str = "wharf/pool";
const ANNOTATION_IPS: &str = "wharf/ips";
const ANNOTATION_MAC: &str = "wharf/mac";

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ContainerArgs {
    pub(crate) pod_name: Option<String>,
    pub(crate) pod_namespace: Option<String>,
    /// `source:key=value`.
    pub(crate) labels: Vec<String>,
    /// Six lower-case hex bytes with `:`.
    pub(crate) mac: Option<String>,
    /// At most one per family.
    pub(crate) ips: Vec<IpAddr>,
    pub(crate) pool: Option<String>,
    pub(crate) ports: Vec<PublishedPort>,
    pub(crate) bandwidth: Bandwidth,
    pub(crate) source_prefixes: Vec<IpNet>,
    /// Replace the default routes.
    pub(crate) routes: Option<Vec<ContainerRoute>>,
    pub(crate) dns: Dns,
    /// ADD fails at once when the agent answers "not now".
    pub(crate) no_wait: bool,
}

impl ContainerArgs {
    pub(crate) fn parse(cni_args: &str, conf: &NetConf) -> Result<Self, Fault> {
        let mut found = Self { pool: conf.pool.clone(), dns: conf.dns.clone(), ..Self::default() };
        let root = conf.document();
        for (path, item) in root.list("sourcePrefixes")? {
            found.source_prefixes.push(prefix(&path, text(&path, item)?, Fault::config)?);
        }
        found.add_environment(cni_args)?;
        if let Some(args) = root.object("args")?.map(|args| args.object("cni")).transpose()?.flatten() {
            found.add_args(&args)?;
        }
        let runtime = root.object("runtimeConfig")?;
        found.bandwidth = bandwidth::parse(&root, runtime.as_ref())?;
        found.routes = routes::parse(&root, "routes")?;
        if let Some(runtime) = runtime {
            found.add_runtime_config(&runtime)?;
        }
        Ok(found)
    }

    /// `KEY=VALUE` with `;`. Ignores unknown keys, because runtimes omit `IgnoreUnknown`.
    fn add_environment(&mut self, cni_args: &str) -> Result<(), Fault> {
        for pair in cni_args.split(';').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair
                .split_once('=')
                .ok_or_else(|| Fault::environment(format!("CNI_ARGS: {:?} is not KEY=VALUE", cut(pair))))?;
            if value.is_empty() {
                continue;
            }
            match key {
                // The kubelet's label keys.
                "K8S_POD_NAME" => {
                    self.pod_name = Some(value.to_owned());
                    self.label("k8s", "io.kubernetes.pod.name", value);
                }
                "K8S_POD_NAMESPACE" => {
                    self.pod_namespace = Some(value.to_owned());
                    self.label("k8s", "io.kubernetes.pod.namespace", value);
                }
                "K8S_POD_UID" => self.label("k8s", "io.kubernetes.pod.uid", value),
                "IP" => self.add_ips("CNI_ARGS IP", value, Fault::environment)?,
                "MAC" => self.add_mac("CNI_ARGS MAC", value, Fault::environment)?,
                // Replaces the network's prefixes.
                "WHARF_SOURCE_PREFIXES" => {
                    let read = |item| prefix("CNI_ARGS WHARF_SOURCE_PREFIXES", item, Fault::environment);
                    self.source_prefixes = value.split(',').map(read).collect::<Result<_, _>>()?;
                }
                "NoWait" => self.no_wait = matches!(value, "1" | "true"),
                // K8S_POD_INFRA_CONTAINER_ID repeats CNI_CONTAINERID.
                _ => {}
            }
        }
        Ok(())
    }

    fn add_args(&mut self, args: &Object<'_>) -> Result<(), Fault> {
        for (path, item) in args.list("labels")? {
            let label = Object::at(path, item)?;
            let key = label.required_string("key")?;
            let value = label.string("value")?.unwrap_or_default();
            self.label("cni", key, value);
        }
        self.add_address_keys(args)
    }

    fn add_runtime_config(&mut self, runtime: &Object<'_>) -> Result<(), Fault> {
        self.add_address_keys(runtime)?;
        self.ports = ports::parse(runtime)?;
        if let Some(dns) = runtime.object("dns")?.map(Object::in_any_case) {
            let Dns { nameservers, search, options, .. } = &mut self.dns;
            // The result has other keys.
            for (to, key) in [(nameservers, "servers"), (search, "searches"), (options, "options")] {
                let asked = dns.strings(key)?;
                if !asked.is_empty() {
                    *to = asked;
                }
            }
        }
        let Some(annotations) = runtime.object(ANNOTATIONS)? else { return Ok(()) };
        if let Some(pool) = annotations.string(ANNOTATION_POOL)?.filter(|pool| !pool.is_empty()) {
            self.pool = Some(pool.to_owned());
        }
        if let Some(ips) = annotations.string(ANNOTATION_IPS)? {
            self.add_ips(&annotations.path_of(ANNOTATION_IPS), ips, Fault::config)?;
        }
        if let Some(mac) = annotations.string(ANNOTATION_MAC)? {
            self.add_mac(&annotations.path_of(ANNOTATION_MAC), mac, Fault::config)?;
        }
        Ok(())
    }

    fn add_address_keys(&mut self, from: &Object<'_>) -> Result<(), Fault> {
        for (path, item) in from.list("ips")? {
            self.add_ips(&path, text(&path, item)?, Fault::config)?;
        }
        if let Some(mac) = from.string("mac")?.filter(|mac| !mac.is_empty()) {
            self.add_mac(&from.path_of("mac"), mac, Fault::config)?;
        }
        Ok(())
    }

    fn label(&mut self, source: &str, key: &str, value: &str) {
        self.labels.push(format!("{source}:{key}={value}"));
    }

    fn add_ips(&mut self, place: &str, list: &str, fault: fn(String) -> Fault) -> Result<(), Fault> {
        for item in list.split(',').map(str::trim).filter(|item| !item.is_empty()) {
            let ip = rules::address(item).map_err(|rule| fault(format!("{place}: {:?} {rule}", cut(item))))?;
            if self.ips.contains(&ip) {
                continue;
            }
            if let Some(other) = self.ips.iter().find(|other| other.is_ipv4() == ip.is_ipv4()) {
                return Err(fault(format!(
                    "{place}: {ip} is asked for beside {other}; an endpoint has one address of each family"
                )));
            }
            self.ips.push(ip);
        }
        Ok(())
    }

    fn add_mac(&mut self, place: &str, mac: &str, fault: fn(String) -> Fault) -> Result<(), Fault> {
        let mac = rules::mac(mac).map_err(|rule| fault(format!("{place}: MAC address {:?} {rule}", cut(mac))))?;
        match &self.mac {
            Some(other) if *other != mac => Err(fault(format!("{place}: {mac} is asked for beside {other}"))),
            _ => {
                self.mac = Some(mac);
                Ok(())
            }
        }
    }
}

fn prefix(place: &str, text: &str, fault: fn(String) -> Fault) -> Result<IpNet, Fault> {
    text.trim().parse().map_err(|_| fault(format!("{place}: {:?} is not ADDRESS/PREFIX", cut(text))))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fault::Code;

    fn parse(cni_args: &str, keys: Value) -> Result<ContainerArgs, Fault> {
        let mut document = json!({"cniVersion": "1.0.0", "name": "net", "type": "wharf-cni"});
        for (key, value) in keys.as_object().unwrap() {
            document[key] = value.clone();
        }
        ContainerArgs::parse(cni_args, &NetConf::parse(document.as_object().unwrap().clone(), None).unwrap())
    }

    #[test]
    fn kubernetes_arguments_become_labels_and_names() {
        let args = parse(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_INFRA_CONTAINER_ID=abc;K8S_POD_UID=u-1;",
            json!({}),
        )
        .unwrap();
        assert_eq!(args.pod_name.as_deref(), Some("web-0"));
        assert_eq!(args.pod_namespace.as_deref(), Some("shop"));
        assert_eq!(
            args.labels,
            [
                "k8s:io.kubernetes.pod.namespace=shop",
                "k8s:io.kubernetes.pod.name=web-0",
                "k8s:io.kubernetes.pod.uid=u-1"
            ]
        );
    }

    #[test]
    fn a_runtime_may_ask_not_to_wait() {
        let no_wait = |cni_args: &str| parse(cni_args, json!({})).unwrap().no_wait;
        assert!(no_wait("IgnoreUnknown=1;NoWait=1") && no_wait("NoWait=true"));
        assert!(!no_wait("IgnoreUnknown=1") && !no_wait("NoWait=0"));
    }

    #[test]
    fn the_same_wish_in_every_place_is_one_wish() {
        let args = parse(
            "IP=10.1.0.5;MAC=02:00:00:00:00:AA",
            json!({
                "args": {"cni": {"ips": ["10.1.0.5", "fd00::5"], "mac": "02:00:00:00:00:aa",
                                 "labels": [{"key": "app", "value": "web"}, {"key": "edge"}]}},
                "runtimeConfig": {"ips": ["10.1.0.5/16"], "mac": "02:00:00:00:00:aa",
                                  "io.kubernetes.cri.pod-annotations": {"wharf/pool": "blue", "wharf/ips": "fd00::5", "x": "y"}},
            }),
        )
        .unwrap();
        assert_eq!(args.ips, ["10.1.0.5".parse::<IpAddr>().unwrap(), "fd00::5".parse().unwrap()]);
        assert_eq!(args.mac.as_deref(), Some("02:00:00:00:00:aa"));
        assert_eq!(args.labels, ["cni:app=web", "cni:edge="]);
        assert_eq!(args.pool.as_deref(), Some("blue"));
    }

    #[test]
    fn source_prefixes_of_a_container_replace_the_networks() {
        let network = json!({"sourcePrefixes": ["10.200.0.0/16", "fd00:9::/64"]});
        let of = |cni_args: &str| {
            let args = parse(cni_args, network.clone()).unwrap();
            args.source_prefixes.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(of(""), ["10.200.0.0/16", "fd00:9::/64"]);
        assert_eq!(of("WHARF_SOURCE_PREFIXES=10.201.0.0/16, 10.202.0.0/16"), ["10.201.0.0/16", "10.202.0.0/16"]);
    }

    #[test]
    fn contradictions_and_nonsense_name_their_place() {
        for (cni_args, keys, code, place) in [
            ("K8S_POD_NAME", json!({}), Code::Environment, "CNI_ARGS"),
            ("IP=10.0.0.300", json!({}), Code::Environment, "CNI_ARGS IP"),
            ("MAC=02:00", json!({}), Code::Environment, "CNI_ARGS MAC"),
            ("MAC=02:00:00:00:00:0g", json!({}), Code::Environment, "CNI_ARGS MAC"),
            ("MAC=01:00:5e:00:00:01", json!({}), Code::Environment, "CNI_ARGS MAC"),
            ("IP=10.0.0.1/33", json!({}), Code::Environment, "CNI_ARGS IP"),
            ("", json!({"args": 5}), Code::Config, "args"),
            ("", json!({"args": {"cni": []}}), Code::Config, "args.cni"),
            ("", json!({"args": {"cni": {"labels": {"a": "b"}}}}), Code::Config, "args.cni.labels"),
            ("", json!({"args": {"cni": {"labels": [{"value": "b"}]}}}), Code::Config, "args.cni.labels[0].key"),
            ("", json!({"runtimeConfig": {"ips": "10.0.0.1"}}), Code::Config, "runtimeConfig.ips"),
            ("", json!({"sourcePrefixes": "10.200.0.0/16"}), Code::Config, "sourcePrefixes"),
            ("", json!({"sourcePrefixes": ["10.200.0.0/16", "10.201.0.0"]}), Code::Config, "sourcePrefixes[1]"),
            ("WHARF_SOURCE_PREFIXES=10.200.0.0/33", json!({}), Code::Environment, "CNI_ARGS WHARF_SOURCE_PREFIXES"),
            ("IP=10.0.0.1", json!({"runtimeConfig": {"ips": ["10.0.0.2"]}}), Code::Config, "runtimeConfig.ips[0]"),
            (
                "MAC=02:00:00:00:00:01",
                json!({"runtimeConfig": {"mac": "02:00:00:00:00:02"}}),
                Code::Config,
                "runtimeConfig.mac",
            ),
        ] {
            let fault = parse(cni_args, keys.clone()).expect_err(&format!("{cni_args} {keys}"));
            assert_eq!(fault.code, code, "{}", fault.msg);
            assert!(fault.msg.contains(place), "{} does not name {place}", fault.msg);
        }
    }

    #[test]
    fn dns_of_the_runtime_goes_before_the_networks() {
        let network = json!({"nameservers": ["10.0.0.53"], "domain": "example.org", "search": ["example.org"]});
        let asked = json!({"dns": {"servers": ["10.0.0.10"], "searches": [], "options": ["ndots:5"]}});
        let args = parse("", json!({"dns": network, "runtimeConfig": asked})).unwrap();
        let expected = json!({"nameservers": ["10.0.0.10"], "domain": "example.org", "search": ["example.org"], "options": ["ndots:5"]});
        assert_eq!(serde_json::to_value(args.dns).unwrap(), expected);
        let containerd = json!({"dns": {"Servers": ["10.0.0.10"], "Searches": [], "Options": ["ndots:5"]}});
        let args = parse("", json!({"dns": network, "runtimeConfig": containerd})).unwrap();
        assert_eq!(serde_json::to_value(args.dns).unwrap(), expected);
        let fault = parse("", json!({"runtimeConfig": {"dns": {"servers": "10.0.0.10"}}})).unwrap_err();
        assert!(fault.msg.contains("runtimeConfig.dns.servers"), "{}", fault.msg);
    }

    #[test]
    fn other_args_pass() {
        let args = parse(
            "FOO=BAR;IP=;MAC=",
            json!({"args": {"podman_labels": {"a": "b"}}, "runtimeConfig": {"portMappings": []}}),
        );
        assert_eq!(args, Ok(ContainerArgs::default()));
    }
}
