//! The network configuration on stdin.

use std::path::PathBuf;

use serde::Serialize;
use serde_json::{Map, Value};
use wharf_api::{DEFAULT_SOCKET, EndpointDns};

use crate::{
    fault::{Code, Fault, Origin},
    json::Object,
    log::Level,
    rules::{self, cut},
};

/// Bytes: `sun_path` without its terminator.
const MAX_SOCKET_BYTES: usize = 107;

/// Oldest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Version {
    V0_3_1,
    V0_4_0,
    V1_0_0,
    V1_1_0,
}

impl Version {
    pub(crate) const ALL: [Self; 4] = [Self::V0_3_1, Self::V0_4_0, Self::V1_0_0, Self::V1_1_0];
    pub(crate) const NEWEST: Self = Self::V1_1_0;

    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::V0_3_1 => "0.3.1",
            Self::V0_4_0 => "0.4.0",
            Self::V1_0_0 => "1.0.0",
            Self::V1_1_0 => "1.1.0",
        }
    }

    pub(crate) fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|version| version.as_str() == text)
    }

    pub(crate) fn list() -> String {
        Self::ALL.map(Self::as_str).join(", ")
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Dns {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) nameservers: Vec<String>,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) domain: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) search: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) options: Vec<String>,
}

impl Dns {
    pub(crate) fn or(self, other: Self) -> Self {
        let list = |own: Vec<String>, other| if own.is_empty() { other } else { own };
        Self {
            nameservers: list(self.nameservers, other.nameservers),
            domain: if self.domain.is_empty() { other.domain } else { self.domain },
            search: list(self.search, other.search),
            options: list(self.options, other.options),
        }
    }
}

impl From<&EndpointDns> for Dns {
    fn from(dns: &EndpointDns) -> Self {
        let EndpointDns { nameservers, domain, search, options } = dns;
        Self {
            nameservers: nameservers.iter().map(ToString::to_string).collect(),
            domain: domain.clone(),
            search: search.clone(),
            options: options.clone(),
        }
    }
}

/// Without keys of containers ([`crate::args`]) and of single commands.
#[derive(Debug, Clone)]
pub(crate) struct NetConf {
    pub(crate) version: Version,
    pub(crate) name: String,
    /// Absolute.
    pub(crate) socket: PathBuf,
    /// Bytes; `None` for the agent's default.
    pub(crate) mtu: Option<u32>,
    pub(crate) pool: Option<String>,
    /// `None` for the pool's setting.
    pub(crate) ip_masq: Option<bool>,
    pub(crate) log: Level,
    pub(crate) dns: Dns,
    document: Map<String, Value>,
}

impl NetConf {
    /// `deletes`: a command that tolerates unneeded invalid keys.
    pub(crate) fn parse(document: Map<String, Value>, deletes: Option<&str>) -> Result<Self, Fault> {
        let root = Object::root(&document);
        let version = root.string("cniVersion")?.unwrap_or_default();
        let Some(version) = Version::parse(version) else {
            let asked = if version.is_empty() { "no cniVersion, which means 0.1.0" } else { version };
            return Err(Fault::new(Code::IncompatibleVersion, format!("netconf asks for {:?}", cut(asked)))
                .with_details(format!("supported: {}", Version::list())));
        };
        let name = root.required_string("name")?;
        rules::name(name).map_err(|rule| Fault::config(format!("netconf: name {:?} {rule}", cut(name))))?;
        root.required_string("type")?;
        let log = or_pass(log_level(&root), Level::Warn, deletes, Level::Warn)?;
        Ok(Self {
            version,
            name: name.to_owned(),
            socket: socket(&root)?,
            // 0 means unset, as in other plugins.
            mtu: or_pass(root.u32("mtu"), None, deletes, log)?.filter(|mtu| *mtu != 0),
            pool: or_pass(root.string("pool"), None, deletes, log)?.filter(|pool| !pool.is_empty()).map(str::to_owned),
            ip_masq: or_pass(root.boolean("ipMasq"), None, deletes, log)?,
            log,
            dns: or_pass(dns(&root), Dns::default(), deletes, log)?,
            document,
        })
    }

    /// `None`: the agent leases the addresses.
    pub(crate) fn ipam_type(&self) -> Result<Option<&str>, Fault> {
        let root = self.document();
        let hint = "name an IPAM plugin, or remove the key: the agent then leases from the pool that \"pool\" names";
        let Some(ipam) = root.object("ipam").map_err(|fault| fault.with_details(hint))? else { return Ok(None) };
        let plugin = ipam.required_string("type").map_err(|fault| fault.with_details(hint))?;
        // Searched only in CNI_PATH.
        rules::name(plugin)
            .map_err(|rule| Fault::config(format!("netconf: key \"ipam.type\": {:?} {rule}", cut(plugin))))?;
        // Prevents endless recursion.
        if Some(plugin) == root.string("type")? {
            let msg = format!("netconf: key \"ipam.type\": {plugin:?} is this plugin itself");
            return Err(Fault::config(msg).with_details(hint));
        }
        Ok(Some(plugin))
    }

    pub(crate) fn document(&self) -> Object<'_> {
        Object::root(&self.document)
    }
}

impl Origin {
    pub(crate) fn of(document: &Map<String, Value>) -> Self {
        let root = Object::root(document);
        let network = root.string("name").ok().flatten().filter(|name| rules::name(name).is_ok()).unwrap_or_default();
        Self { network: network.to_owned(), socket: socket(&root).ok() }
    }
}

/// A changed configuration must not prevent deletions.
fn or_pass<T>(read: Result<T, Fault>, otherwise: T, deletes: Option<&str>, log: Level) -> Result<T, Fault> {
    match (read, deletes) {
        (Err(fault), Some(command)) => {
            log.say(Level::Warn, format_args!("{command} goes on in spite of: {}", fault.msg));
            Ok(otherwise)
        }
        (read, _) => read,
    }
}

fn socket(root: &Object<'_>) -> Result<PathBuf, Fault> {
    let path = root.string("socket")?.filter(|path| !path.is_empty()).unwrap_or(DEFAULT_SOCKET);
    // The runtime's working directory is unknown.
    if !path.starts_with('/') || path.len() > MAX_SOCKET_BYTES || path.contains('\0') {
        return Err(Fault::config(format!(
            "netconf: socket {:?} must be an absolute path of at most {MAX_SOCKET_BYTES} bytes",
            cut(path)
        )));
    }
    Ok(PathBuf::from(path))
}

fn log_level(root: &Object<'_>) -> Result<Level, Fault> {
    let name = root.string("log-level")?.filter(|name| !name.is_empty()).unwrap_or("warn");
    Level::parse(name)
        .ok_or_else(|| Fault::config(format!("netconf: log-level {:?} must be {}", cut(name), Level::NAMES)))
}

pub(crate) fn dns(root: &Object<'_>) -> Result<Dns, Fault> {
    let Some(dns) = root.object("dns")? else { return Ok(Dns::default()) };
    Ok(Dns {
        nameservers: dns.strings("nameservers")?,
        domain: dns.string("domain")?.unwrap_or_default().to_owned(),
        search: dns.strings("search")?,
        options: dns.strings("options")?,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(value: Value) -> Result<NetConf, Fault> {
        match value {
            Value::Object(map) => NetConf::parse(map, None),
            other => panic!("test document is no object: {other}"),
        }
    }

    fn with(key: &str, value: Value) -> Result<NetConf, Fault> {
        let mut document = json!({"cniVersion": "1.1.0", "name": "net", "type": "wharf-cni"});
        document[key] = value;
        parse(document)
    }

    #[test]
    fn the_smallest_netconf_is_enough() {
        let conf = with("socket", json!("/tmp/s")).unwrap();
        assert_eq!(conf.socket, PathBuf::from("/tmp/s"));
        assert_eq!((conf.mtu, conf.pool, conf.ip_masq, conf.log), (None, None, None, Level::Warn));
    }

    #[test]
    fn unknown_keys_pass_and_null_is_absence() {
        let conf = with("capabilities", json!({"ips": true})).unwrap();
        assert_eq!(conf.socket, PathBuf::from(DEFAULT_SOCKET));
        for key in ["socket", "mtu", "pool", "ipMasq", "log-level", "dns", "args", "runtimeConfig"] {
            with(key, Value::Null).unwrap();
        }
    }

    #[test]
    fn an_ipam_plugin_is_a_name_and_null_is_absence() {
        for ipam in
            [json!({}), json!({"type": ""}), json!({"type": 5}), json!("host-local"), json!({"subnet": "10.1.0.0/16"})]
        {
            let fault = with("ipam", ipam.clone()).unwrap().ipam_type().expect_err(&ipam.to_string());
            assert_eq!(fault.code, Code::Config, "{ipam}");
            assert!(fault.msg.contains("\"ipam") && fault.details.contains("\"pool\""), "{fault:?}");
        }
        for plugin in ["wharf-cni", "../host-local", "/bin/sh", ".", "..", "a/b", "-a", "a b", &"n".repeat(254)] {
            let fault = with("ipam", json!({"type": plugin})).unwrap().ipam_type().expect_err(plugin);
            assert!(fault.code == Code::Config && fault.msg.contains("ipam.type"), "{fault:?}");
        }
        assert_eq!(with("ipam", Value::Null).unwrap().ipam_type(), Ok(None));
        assert_eq!(with("ipam", json!({"type": "host-local"})).unwrap().ipam_type(), Ok(Some("host-local")));
    }

    #[test]
    fn wrong_types_and_values_are_config_errors_that_name_the_key() {
        for (key, value) in [
            ("name", json!(7)),
            ("name", json!("")),
            ("name", json!("../x")),
            ("name", json!("n".repeat(254))),
            ("type", Value::Null),
            ("type", json!([])),
            ("socket", json!("relative")),
            ("socket", json!(["/a"])),
            ("socket", json!(format!("/{}", "a".repeat(MAX_SOCKET_BYTES)))),
            ("socket", json!("/a\0b")),
            ("mtu", json!("1500")),
            ("mtu", json!(-1)),
            ("mtu", json!(1500.5)),
            ("mtu", json!(u64::from(u32::MAX) + 1)),
            ("pool", json!({})),
            ("ipMasq", json!("true")),
            ("ipMasq", json!(1)),
            ("log-level", json!("loud")),
            ("dns", json!([])),
            ("dns", json!({"nameservers": "1.1.1.1"})),
        ] {
            let fault = with(key, value.clone()).expect_err(&format!("{key} = {value}"));
            assert_eq!(fault.code, Code::Config, "{key} = {value}");
            assert!(fault.msg.contains(key), "{}", fault.msg);
            let document = json!({"cniVersion": "1.1.0", "name": "net", "type": "wharf-cni", key: value});
            let deletes = NetConf::parse(document.as_object().unwrap().clone(), Some("DEL"));
            assert_eq!(deletes.is_err(), ["name", "type", "socket"].contains(&key), "{key}: {deletes:?}");
        }
    }

    #[test]
    fn other_versions_are_incompatible_and_ours_are_listed() {
        for version in [json!("0.2.0"), json!("9.9.9"), json!(""), Value::Null] {
            let fault = with("cniVersion", version).unwrap_err();
            assert_eq!(fault.code, Code::IncompatibleVersion);
            assert_eq!(fault.details, "supported: 0.3.1, 0.4.0, 1.0.0, 1.1.0");
        }
    }
}
