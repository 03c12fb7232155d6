//! Configurations of networks and plugins (CNI specification, sections 1 and 3).

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read as _},
    net::IpAddr,
    path::{Path, PathBuf},
};

use serde_json::{Map, Value, json};
use wharf_names::ids::{IfName, NetworkName};

use crate::record::Attachment;

/// Oldest first. Before 0.3.0, plugins get no previous result.
const VERSIONS: [&str; 5] = ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];
const MAX_BYTES: u64 = 1 << 20;

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Network {
    pub(crate) name: NetworkName,
    file: PathBuf,
    version: String,
    check: bool,
    plugins: Vec<Map<String, Value>>,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Wishes<'a> {
    pub(crate) labels: Option<&'a BTreeMap<String, String>>,
    /// As capability `portMappings`.
    pub(crate) ports: &'a [Value],
    pub(crate) ips: &'a [IpAddr],
    pub(crate) mac: Option<&'a str>,
}

/// Why a network is unusable.
#[derive(Debug, thiserror::Error)]
pub enum ConfError {
    /// The directory cannot be listed.
    #[error("list network configurations in {}: {source}", directory.display())]
    Directory {
        directory: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// No configuration exists.
    #[error("choose a network: {} holds no network configuration", directory.display())]
    Nothing { directory: PathBuf },
    /// A file breaks a rule.
    #[error("read network configuration {}: {why}", file.display())]
    File {
        file: PathBuf,
        /// Broken rule.
        why: String,
    },
    /// No configuration has the name.
    #[error("find network {name}: {} has {known}", directory.display())]
    Unknown {
        name: NetworkName,
        directory: PathBuf,
        /// The configured networks.
        known: String,
    },
    /// No plugin supports the option.
    #[error("network {network}: no plugin of {} has the capability {capability}, which {option} needs", file.display())]
    Capability { network: NetworkName, file: PathBuf, capability: &'static str, option: &'static str },
}

impl ConfError {
    pub(crate) fn hint(&self) -> Option<String> {
        match self {
            Self::Directory { .. } | Self::Nothing { .. } => {
                Some("`cargo xtask install` puts Wharf's there; another directory: --conf-dir".to_owned())
            }
            Self::Capability { capability, .. } => {
                Some(format!("add \"capabilities\": {{\"{capability}\": true}} to the plugin that has it"))
            }
            Self::Unknown { .. } => Some("--network takes the \"name\" in a configuration".to_owned()),
            Self::File { .. } => None,
        }
    }
}

/// Plugin types in execution order; `is_list` for a `*.conflist`.
///
/// # Errors
/// Why the configuration cannot be used for a sandbox.
pub fn plugin_types(text: &[u8], is_list: bool) -> Result<Vec<String>, String> {
    let network = Network::parse(Path::new(""), text, is_list)?;
    let types = network.plugins.iter().filter_map(|plugin| plugin.get("type")?.as_str().map(str::to_owned));
    Ok(types.collect())
}

impl Network {
    /// Without a name, the directory's first, as runtimes choose.
    pub(crate) fn find(directory: &Path, name: Option<&NetworkName>) -> Result<Self, ConfError> {
        let files = files(directory)?;
        let Some(name) = name else {
            let first = files.first().ok_or_else(|| ConfError::Nothing { directory: directory.to_owned() })?;
            return Self::read(first);
        };
        let (mut known, mut broken) = (Vec::new(), Vec::new());
        for file in &files {
            match Self::read(file) {
                Ok(network) if network.name == *name => return Ok(network),
                Ok(network) => known.push(network.name.to_string()),
                Err(error) => broken.push(error.to_string()),
            }
        }
        let known = if known.is_empty() { "no other".to_owned() } else { known.join(", ") };
        let known = if broken.is_empty() { known } else { format!("{known}; {}", broken.join("; ")) };
        Err(ConfError::Unknown { name: name.clone(), directory: directory.to_owned(), known })
    }

    fn read(file: &Path) -> Result<Self, ConfError> {
        let fail = |why: String| ConfError::File { file: file.to_owned(), why };
        let mut text = Vec::new();
        fs::File::open(file)
            .and_then(|f| f.take(MAX_BYTES + 1).read_to_end(&mut text))
            .map_err(|e| fail(e.to_string()))?;
        if u64::try_from(text.len()).is_ok_and(|length| length > MAX_BYTES) {
            return Err(fail(format!("it is longer than {MAX_BYTES} bytes")));
        }
        let is_list = file.extension().is_some_and(|e| e == "conflist");
        Self::parse(file, &text, is_list).map_err(fail)
    }

    fn parse(file: &Path, text: &[u8], is_list: bool) -> Result<Self, String> {
        let mut document: Map<String, Value> = serde_json::from_slice(text).map_err(|e| e.to_string())?;
        let name = document.get("name").and_then(Value::as_str).ok_or("\"name\" is missing or no text")?;
        let name = NetworkName::parse(name).map_err(|e| e.to_string())?;
        let version = version(&document)?;
        let check = !document.get("disableCheck").and_then(Value::as_bool).unwrap_or_default();
        let plugins: Vec<Map<String, Value>> = if is_list {
            let plugins = document.remove("plugins").ok_or("\"plugins\" is missing")?;
            serde_json::from_value(plugins).map_err(|e| format!("\"plugins\": {e}"))?
        } else {
            vec![document]
        };
        if plugins.is_empty() {
            return Err("\"plugins\" is empty".to_owned());
        }
        for plugin in &plugins {
            let kind = plugin.get("type").and_then(Value::as_str).unwrap_or_default();
            // The type becomes a file name in a plugin directory.
            if kind.is_empty() || kind == "." || kind == ".." || kind.contains(['/', '\0']) {
                return Err(format!("a plugin's \"type\" must be the name of a program, not {kind:?}"));
            }
        }
        Ok(Self { name, file: file.to_owned(), version, check, plugins })
    }

    pub(crate) fn attachment(&self, ifname: IfName, wishes: &Wishes<'_>) -> Result<Attachment, ConfError> {
        let (capabilities, cni_args) = self.arguments(wishes)?;
        let plugins = self.plugins.iter().map(|plugin| self.execution(plugin, &capabilities, wishes)).collect();
        Ok(Attachment {
            network: self.name.clone(),
            ifname,
            plugins,
            cni_args,
            check: self.check && self.version.as_str() >= "0.4.0",
            to_delete: 0,
            result: None,
        })
    }

    /// Capability arguments and `CNI_ARGS`. Addresses without a capable plugin go into `CNI_ARGS`, where IPAM plugins
    /// and `tuning` read them.
    fn arguments(&self, wishes: &Wishes<'_>) -> Result<(Map<String, Value>, String), ConfError> {
        let (mut capabilities, mut cni_args) = (Map::new(), vec!["IgnoreUnknown=1".to_owned()]);
        if !wishes.ports.is_empty() {
            if !self.has("portMappings") {
                return Err(ConfError::Capability {
                    network: self.name.clone(),
                    file: self.file.clone(),
                    capability: "portMappings",
                    option: "--publish",
                });
            }
            capabilities.insert("portMappings".to_owned(), wishes.ports.into());
        }
        if !wishes.ips.is_empty() {
            let texts: Vec<String> = wishes.ips.iter().map(ToString::to_string).collect();
            if self.has("ips") {
                capabilities.insert("ips".to_owned(), texts.into());
            } else {
                cni_args.push(format!("IP={}", texts.join(",")));
            }
        }
        if let Some(mac) = wishes.mac {
            if self.has("mac") {
                capabilities.insert("mac".to_owned(), mac.into());
            } else {
                cni_args.push(format!("MAC={mac}"));
            }
        }
        Ok((capabilities, cni_args.join(";")))
    }

    fn has(&self, capability: &str) -> bool {
        self.plugins.iter().any(|plugin| declares(plugin, capability))
    }

    fn execution(&self, plugin: &Map<String, Value>, arguments: &Map<String, Value>, wishes: &Wishes<'_>) -> Value {
        let mut conf = plugin.clone();
        conf.remove("capabilities");
        conf.insert("cniVersion".to_owned(), self.version.as_str().into());
        conf.insert("name".to_owned(), self.name.as_str().into());
        let wanted: Vec<_> = arguments.iter().filter(|(key, _)| declares(plugin, key)).collect();
        if !wanted.is_empty() {
            let mut runtime = take_object(&mut conf, "runtimeConfig");
            runtime.extend(wanted.into_iter().map(|(key, value)| (key.clone(), value.clone())));
            conf.insert("runtimeConfig".to_owned(), runtime.into());
        }
        if let Some(labels) = wishes.labels.filter(|labels| !labels.is_empty()) {
            let mut args = take_object(&mut conf, "args");
            let mut cni = take_object(&mut args, "cni");
            let mut all = cni.remove("labels").and_then(|v| v.as_array().cloned()).unwrap_or_default();
            all.retain(|own| !own.get("key").and_then(Value::as_str).is_some_and(|key| labels.contains_key(key)));
            all.extend(labels.iter().map(|(key, value)| json!({ "key": key, "value": value })));
            cni.insert("labels".to_owned(), all.into());
            args.insert("cni".to_owned(), cni.into());
            conf.insert("args".to_owned(), args.into());
        }
        conf.into()
    }
}

fn take_object(map: &mut Map<String, Value>, key: &str) -> Map<String, Value> {
    match map.remove(key) {
        Some(Value::Object(object)) => object,
        _ => Map::new(),
    }
}

fn declares(plugin: &Map<String, Value>, capability: &str) -> bool {
    plugin.get("capabilities").and_then(|c| c.get(capability)?.as_bool()).unwrap_or_default()
}

/// The newest common version.
fn version(document: &Map<String, Value>) -> Result<String, String> {
    let one = document.get("cniVersion").and_then(Value::as_str);
    let more = document.get("cniVersions").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
    let offered: Vec<&str> = one.into_iter().chain(more).collect();
    let found = VERSIONS.iter().rev().find(|version| offered.contains(version));
    let spoken = || format!("{} are supported", VERSIONS.join(", "));
    match (found, offered.is_empty()) {
        (Some(version), _) => Ok((*version).to_owned()),
        (None, true) => Err(format!("\"cniVersion\" is missing; {}", spoken())),
        (None, false) => Err(format!("\"cniVersion\" {} is not supported; {}", offered.join(", "), spoken())),
    }
}

/// Sorted by name.
fn files(directory: &Path) -> Result<Vec<PathBuf>, ConfError> {
    let failed = |source| ConfError::Directory { directory: directory.to_owned(), source };
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let known = path.extension().is_some_and(|e| e == "conflist" || e == "conf" || e == "json");
        if known && path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
#[path = "conf_tests.rs"]
mod tests;
