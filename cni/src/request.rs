//! Parses environment and stdin.

use std::{
    collections::BTreeSet,
    env,
    ffi::{OsStr, OsString},
    io::Read,
};

use serde_json::{Map, Value};
use wharf_api::GcAttachment;

use crate::{
    args::ContainerArgs,
    chain::Chain,
    check::PrevResult,
    fault::{Code, Failure, Fault, Origin},
    ipam::Ipam,
    json::Object,
    log::Level,
    netconf::{NetConf, Version},
    rules::{self, cut},
    runtime,
};

/// Bytes; a GC of 5,000 attachments takes half.
const MAX_STDIN_BYTES: u64 = 1 << 20;
/// Of the specification, and of libcni 1.2.0 to 1.2.2.
const GC_KEYS: [&str; 2] = ["cni.dev/valid-attachments", "cni.dev/attachments"];

/// Unparsed `CNI_*` variables.
#[derive(Debug, Clone, Default)]
pub struct Env {
    /// `CNI_COMMAND`.
    pub command: Option<OsString>,
    /// `CNI_CONTAINERID`.
    pub container_id: Option<OsString>,
    /// `CNI_NETNS`.
    pub netns: Option<OsString>,
    /// `CNI_IFNAME`.
    pub ifname: Option<OsString>,
    /// `CNI_ARGS`.
    pub args: Option<OsString>,
    /// Program that runs the plugin.
    pub runtime: Option<String>,
    /// `CNI_PATH`: directories of IPAM plugins.
    pub path: Option<OsString>,
}

impl Env {
    /// Reads this process's environment.
    #[must_use]
    pub fn of_process() -> Self {
        Self {
            command: env::var_os("CNI_COMMAND"),
            container_id: env::var_os("CNI_CONTAINERID"),
            netns: env::var_os("CNI_NETNS"),
            ifname: env::var_os("CNI_IFNAME"),
            args: env::var_os("CNI_ARGS"),
            runtime: runtime::of_process(),
            path: env::var_os("CNI_PATH"),
        }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) container_id: String,
    pub(crate) ifname: String,
}

#[derive(Debug, Clone)]
pub(crate) enum Command {
    /// `chain`: another plugin made the interface.
    Add {
        target: Target,
        netns: String,
        args: Box<ContainerArgs>,
        chain: Option<Chain>,
    },
    Del {
        target: Target,
    },
    Check {
        target: Target,
        netns: String,
        prev: Option<PrevResult>,
    },
    Gc {
        valid: Vec<GcAttachment>,
    },
    Status,
}

/// A command for the agent.
#[derive(Debug, Clone)]
pub struct Ask {
    pub(crate) conf: NetConf,
    pub(crate) command: Command,
    pub(crate) runtime: Option<String>,
    pub(crate) ipam: Option<Ipam>,
}

/// A checked request.
#[derive(Debug, Clone)]
pub enum Request {
    /// Needs neither agent nor valid stdin.
    Version {
        /// Version of the answer.
        cni_version: String,
    },
    /// Every other command.
    Ask(Box<Ask>),
}

impl Request {
    /// Checks environment, then stdin.
    ///
    /// # Errors
    /// The broken rule, in stdin's version if known.
    pub fn read(env: &Env, stdin: &mut dyn Read) -> Result<Self, Failure> {
        let Some(verb) = Verb::of(env).map_err(Failure::unversioned)? else {
            return Ok(Self::Version { cni_version: version_of_probe(stdin) });
        };
        let subject = verb.subject(env).map_err(Failure::unversioned)?;
        let netconf = read_all(stdin).map_err(Failure::unversioned)?;
        let document = decode(&netconf).map_err(Failure::unversioned)?;
        let (version, origin) = (echoed_version(&document), Origin::of(&document));
        let deletes = matches!(verb, Verb::Del | Verb::Gc).then_some(verb.name());
        let ask = NetConf::parse(document, deletes)
            .and_then(|conf| subject.with_conf(verb, conf, netconf))
            .map_err(|fault| Failure::new(&version, fault).of(origin))?;
        Ok(Self::Ask(Box::new(Ask { runtime: env.runtime.clone(), ..ask })))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verb {
    Add,
    Del,
    Check,
    Gc,
    Status,
}

impl Verb {
    fn of(env: &Env) -> Result<Option<Self>, Fault> {
        let known = "ADD, DEL, CHECK, GC, STATUS or VERSION";
        match env.command.as_deref().and_then(OsStr::to_str).unwrap_or_default() {
            "ADD" => Ok(Some(Self::Add)),
            "DEL" => Ok(Some(Self::Del)),
            "CHECK" => Ok(Some(Self::Check)),
            "GC" => Ok(Some(Self::Gc)),
            "STATUS" => Ok(Some(Self::Status)),
            "VERSION" => Ok(None),
            "" => Err(Fault::environment(format!("CNI_COMMAND is not set; it must be {known}")).with_details(concat!(
                "wharf-cni ",
                env!("CARGO_PKG_VERSION"),
                " is run by container runtimes"
            ))),
            other => Err(Fault::environment(format!("CNI_COMMAND {:?} must be {known}", cut(other)))),
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Del => "DEL",
            Self::Check => "CHECK",
            Self::Gc => "GC",
            Self::Status => "STATUS",
        }
    }

    const fn since(self) -> Version {
        match self {
            Self::Add | Self::Del => Version::V0_3_1,
            Self::Check => Version::V0_4_0,
            Self::Gc | Self::Status => Version::V1_1_0,
        }
    }

    fn subject(self, env: &Env) -> Result<Subject, Fault> {
        if !matches!(self, Self::Add | Self::Del | Self::Check) {
            return Ok(Subject { path: env.path.clone(), ..Subject::default() });
        }
        let mut problems = Vec::new();
        let container_id = variable("CNI_CONTAINERID", env.container_id.as_ref(), rules::name, &mut problems);
        let ifname = variable("CNI_IFNAME", env.ifname.as_ref(), rules::ifname, &mut problems);
        // The namespace may be gone.
        let netns = match self {
            Self::Del => String::new(),
            _ => variable("CNI_NETNS", env.netns.as_ref(), rules::netns, &mut problems),
        };
        if !problems.is_empty() {
            return Err(Fault::environment(problems.join("; ")));
        }
        let args = env.args.clone().unwrap_or_default();
        Ok(Subject { target: Target { container_id, ifname }, netns, args, path: env.path.clone() })
    }
}

#[derive(Debug, Default)]
struct Subject {
    target: Target,
    netns: String,
    args: OsString,
    path: Option<OsString>,
}

impl Subject {
    fn with_conf(self, verb: Verb, conf: NetConf, netconf: Vec<u8>) -> Result<Ask, Fault> {
        if conf.version < verb.since() {
            return Err(Fault::new(
                Code::IncompatibleVersion,
                format!(
                    "netconf asks for {}, which has no {}; it came with {}",
                    conf.version.as_str(),
                    verb.name(),
                    verb.since().as_str()
                ),
            ));
        }
        let plugin = match conf.ipam_type() {
            Err(fault) if matches!(verb, Verb::Del | Verb::Gc) => {
                conf.log.say(Level::Warn, format_args!("{} goes on in spite of: {}", verb.name(), fault.msg));
                None
            }
            plugin => plugin?.map(str::to_owned),
        };
        let ipam = plugin.map(|plugin| {
            let (path, version, log) = (self.path.clone(), conf.version, conf.log);
            Ipam { plugin, path, netconf, version, log }
        });
        let command = match verb {
            Verb::Add => {
                let chain = Chain::parse(&conf, &self.target, &self.netns)?;
                let args = Box::new(self.container_args(&conf, ipam.as_ref())?);
                chain.as_ref().map_or(Ok(()), |chain| chain.fulfils(&args))?;
                Command::Add { target: self.target, netns: self.netns, args, chain }
            }
            Verb::Del => {
                // Not needed for a deletion.
                if let Err(fault) = self.container_args(&conf, None) {
                    conf.log.say(Level::Warn, format_args!("DEL goes on in spite of: {}", fault.msg));
                }
                Command::Del { target: self.target }
            }
            Verb::Check => {
                self.container_args(&conf, ipam.as_ref())?;
                let prev = PrevResult::parse(&conf.document())?;
                Command::Check { target: self.target, netns: self.netns, prev }
            }
            Verb::Gc => {
                let valid = valid_attachments(&conf.document())?;
                if !GC_KEYS.iter().any(|key| conf.document().has_key(key)) {
                    let [key, _] = GC_KEYS;
                    conf.log.say(
                        Level::Warn,
                        format_args!("GC without {key:?} deletes every attachment of network {}", conf.name),
                    );
                }
                Command::Gc { valid }
            }
            Verb::Status => {
                self.container_args(&conf, ipam.as_ref())?;
                Command::Status
            }
        };
        Ok(Ask { conf, command, runtime: None, ipam })
    }

    /// Rejects settings of the agent's IPAM if a plugin leases addresses.
    fn container_args(&self, conf: &NetConf, ipam: Option<&Ipam>) -> Result<ContainerArgs, Fault> {
        let args = ContainerArgs::parse(&self.cni_args()?, conf)?;
        let Some(Ipam { plugin, .. }) = ipam else { return Ok(args) };
        if let Some(pool) = &args.pool {
            let hint = "take out the pool, or \"ipam\" to have the agent lease from it";
            return Err(Fault::config(format!(
                "netconf: pool {:?} is named beside IPAM plugin {plugin}, which leases the addresses",
                cut(pool)
            ))
            .with_details(hint));
        }
        if conf.ip_masq == Some(true) {
            let rule = "the node masquerades the agent's pools alone";
            return Err(Fault::config(format!(
                "netconf: key \"ipMasq\" is true, and IPAM plugin {plugin} leases the addresses: {rule}"
            ))
            .with_details("take out ipMasq, or \"ipam\" to have the agent lease from a pool"));
        }
        Ok(args)
    }

    fn cni_args(&self) -> Result<String, Fault> {
        match self.args.to_str() {
            Some(args) => Ok(args.to_owned()),
            None => Err(Fault::environment("CNI_ARGS is not UTF-8")),
        }
    }
}

/// Returns the broken rule.
type Rule = fn(&str) -> Result<(), &'static str>;

/// Collects all problems.
fn variable(name: &str, value: Option<&OsString>, rule: Rule, problems: &mut Vec<String>) -> String {
    let Some(value) = value.filter(|value| !value.is_empty()) else {
        problems.push(format!("{name} is not set"));
        return String::new();
    };
    let text = value.to_string_lossy();
    let verdict = if value.to_str().is_none() { Err("must be UTF-8") } else { rule(&text) };
    if let Err(broken) = verdict {
        problems.push(format!("{name} {:?} {broken}", cut(&text)));
    }
    text.into_owned()
}

/// The union of both keys; invalid entries are errors. The next GC corrects an extra entry, but not a wrong deletion.
/// An absent list is empty: libcni omits the key without attachments (`cnitool gc`).
fn valid_attachments(root: &Object<'_>) -> Result<Vec<GcAttachment>, Fault> {
    let mut valid = BTreeSet::new();
    for key in GC_KEYS {
        for (path, item) in root.list(key)? {
            let item = Object::at(path, item)?;
            let checked = |key, rule: Rule| {
                let text = item.required_string(key)?;
                let broken =
                    |rule| Fault::config(format!("netconf: key {:?}: {:?} {rule}", item.path_of(key), cut(text)));
                rule(text).map(|()| text.to_owned()).map_err(broken)
            };
            let container_id = checked("containerID", rules::name)?;
            valid.insert(GcAttachment { container_id, ifname: checked("ifname", rules::ifname)? });
        }
    }
    Ok(valid.into_iter().collect())
}

fn read_all(stdin: &mut dyn Read) -> Result<Vec<u8>, Fault> {
    let mut bytes = Vec::new();
    stdin
        .take(MAX_STDIN_BYTES.saturating_add(1))
        .read_to_end(&mut bytes)
        .map_err(|e| Fault::new(Code::Io, format!("reading netconf from stdin: {e}")))?;
    if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > MAX_STDIN_BYTES {
        return Err(Fault::config(format!("netconf is longer than {MAX_STDIN_BYTES} bytes")));
    }
    Ok(bytes)
}

fn decode(netconf: &[u8]) -> Result<Map<String, Value>, Fault> {
    match serde_json::from_slice(netconf) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(Fault::config("netconf is not a JSON object")),
        Err(e) => Err(Fault::new(Code::Decode, format!("netconf on stdin is not JSON: {e}"))),
    }
}

fn echoed_version(document: &Map<String, Value>) -> String {
    match document.get("cniVersion").and_then(Value::as_str) {
        Some(text) if !text.is_empty() && text.len() <= 32 && text.bytes().all(is_version_byte) => text.to_owned(),
        _ => Version::NEWEST.as_str().to_owned(),
    }
}

fn is_version_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'+')
}

fn version_of_probe(stdin: &mut dyn Read) -> String {
    let version = match read_all(stdin).and_then(|netconf| decode(&netconf)) {
        Ok(document) => document.get("cniVersion").and_then(Value::as_str).and_then(Version::parse),
        Err(_) => None,
    };
    version.unwrap_or(Version::NEWEST).as_str().to_owned()
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
