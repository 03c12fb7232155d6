//! Settings: low arguments (flags, environment, TOML) become one checked [`AgentConfig`].
//!
//! A flag wins over its `WHARF_*` variable, which wins over the file, which wins over the default. Unknown keys of the
//! file are errors: a misspelt setting that is silently ignored is worse than an agent that does not start.

mod delegate;
mod error;
mod file;
mod flags;

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
};

use clap::{ArgMatches, CommandFactory as _, FromArgMatches as _};
use ipnet::IpNet;
use wharf_api::SettingOrigin;
use wharf_core::{
    ids::PoolName,
    ipam::PoolConfig,
    kernel::{AttachMode, MIN_MTU},
    mtu::MAX_MTU,
    nat::Masquerade,
    plan::DeleteStep,
};

use crate::telemetry::{LogFilter, LogFormat};

pub use error::ConfigError;
use file::{File, read_file};
use flags::given;
pub use flags::{AttachChoice, Cidrs, Enforcement, Flags, LocalDelivery, Switch, parse};

/// Name of the agent's socket in the run directory.
pub const SOCKET: &str = "wharf.sock";

/// Name of the pool that `--ipv4-pool` and `--ipv6-pool` make.
pub const DEFAULT_POOL: &str = "default";

/// Checked settings.
#[derive(Debug, Clone)]
pub struct AgentConfig {
    /// Socket and store.
    pub run_dir: PathBuf,
    /// What outlives a boot.
    pub state_dir: PathBuf,
    /// BPF file system.
    pub bpffs: PathBuf,
    /// Pools, the default pool first.
    pub pools: Vec<PoolConfig>,
    /// The pool used when a request names none.
    pub default_pool: PoolName,
    /// Why the default pool has no IPv6 although no setting says so: IPv6 is off on the node.
    pub ipv6_off: Option<&'static str>,
    /// Node name.
    pub node_name: String,
    /// Prometheus listener.
    pub metrics_listen: Option<SocketAddr>,
    /// OpenTelemetry collector, `http://HOST:PORT`.
    pub otlp_endpoint: Option<String>,
    /// Log filter.
    pub log_level: String,
    /// Log format.
    pub log_format: LogFormat,
    /// MTU of links whose creator asks for none, bytes; `None` is that of the uplinks.
    pub mtu: Option<u32>,
    /// Attach mode asked for; `None` is auto.
    pub attach_mode: Option<AttachMode>,
    /// Way of packets between two endpoints of the node.
    pub local_delivery: LocalDelivery,
    /// What is masqueraded, and how; `None` leaves the node's firewall and forwarding alone.
    pub masquerade: Option<Masquerade>,
    /// The node answers neighbours for addresses of pools that are a part of their network.
    pub announce: bool,
    /// Directory whose files are policies.
    pub policy_dir: Option<PathBuf>,
    /// Addresses of services, which the node translates to those of endpoints.
    pub service_cidr: Vec<IpNet>,
    /// When policy is enforced.
    pub policy_enforcement: Enforcement,
    /// What policy would drop passes.
    pub policy_audit: bool,
    /// Connections go on when a change of policy would no longer let them begin.
    pub policy_keep_flows: bool,
    /// How long a pod's endpoint that comes without labels waits for them; zero takes those that it comes with for all.
    pub labels_timeout: std::time::Duration,
    /// Program sets kept ready.
    pub prepared_programs: usize,
    /// Bound of the wait for the proxy at delete.
    pub proxy_timeout: std::time::Duration,
    /// Envoy's binary; `None` for one that somebody else starts, or none.
    pub envoy: Option<std::path::PathBuf>,
    /// First of the [`PROXY_PORTS`] ports of the proxy, host byte order.
    pub proxy_port: u16,
    /// Rest of an address that was given back, milliseconds.
    pub ip_rest_ms: u64,
    /// Pace of the leak audit; zero is never.
    pub audit_interval: std::time::Duration,
    /// In which time each endpoint's programs are given test packets; zero is never.
    pub selfcheck_interval: std::time::Duration,
    /// How long the timeline of a deleted endpoint is kept.
    pub timeline_keep: std::time::Duration,
    /// Pace of the health endpoint's probes; zero turns it off.
    pub health_interval: std::time::Duration,
    /// Socket of the service that makes the network in the agent's place.
    pub delegate: Option<PathBuf>,
    /// Debug programs.
    pub debug_programs: bool,
    /// Where those settings come from that are not defaults, by flag name.
    pub origins: BTreeMap<String, SettingOrigin>,
}

impl AgentConfig {
    /// The settings of a parsed command line and environment, and of the file that they name.
    ///
    /// # Errors
    /// As [`AgentConfig::load`].
    pub fn of(matches: &ArgMatches) -> Result<Self, ConfigError> {
        let flags = Flags::from_arg_matches(matches).unwrap_or_else(|e| e.exit());
        let (given, file) = (given(matches), flags.config.clone());
        let mut config = Self::load(flags).map_err(|error| with_origin(error, &given, file.as_deref()))?;
        config.origins.extend(given);
        delegate::alone(&config).map_err(|error| with_origin(error, &config.origins, file.as_deref()))?;
        Ok(config)
    }

    /// Reads the file named by the flags, if any, and merges.
    ///
    /// # Errors
    /// When the file cannot be read or parsed, or a setting breaks its rule.
    pub fn load(flags: Flags) -> Result<Self, ConfigError> {
        let (file, keys) = match &flags.config {
            Some(path) => read_file(path)?,
            None => (File::default(), Vec::new()),
        };
        let mut config = merge(flags, file, wharf_datapath::ipv6_off())?;
        config.origins = keys.into_iter().map(|key| (key, SettingOrigin::File)).collect();
        Ok(config)
    }

    /// Gives the default pool the IPv6 CIDR that it did not get because IPv6 is off on the node.
    pub fn keep_ipv6(&mut self) {
        self.ipv6_off = None;
        for pool in self.pools.iter_mut().filter(|pool| pool.name == self.default_pool) {
            pool.cidrs.push(DEFAULT_V6);
        }
    }

    /// The unix socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.run_dir.join(SOCKET)
    }

    /// The admin thread's unix socket.
    #[must_use]
    pub fn admin_socket(&self) -> PathBuf {
        self.run_dir.join(wharf_api::ADMIN_SOCKET)
    }

    /// The store's file.
    #[must_use]
    pub fn store(&self) -> PathBuf {
        self.run_dir.join("state.redb")
    }
}

/// Names where the value of a refused setting comes from.
fn with_origin(error: ConfigError, given: &BTreeMap<String, SettingOrigin>, file: Option<&Path>) -> ConfigError {
    let ConfigError::Setting { name, message, .. } = error else { return error };
    let variable = || {
        let command = Flags::command();
        let argument = command.get_arguments().find(|a| a.get_long() == Some(name));
        argument.and_then(|a| Some(a.get_env()?.display().to_string()))
    };
    let origin = match given.get(name) {
        Some(SettingOrigin::Flag) => Some(format!("--{name}")),
        Some(SettingOrigin::Environment) => variable(),
        _ => file.map(|path| path.display().to_string()),
    };
    ConfigError::Setting { name, origin, message }
}

/// Where an agent keeps its things.
#[derive(Debug, Clone)]
pub struct Directories {
    /// Socket and store.
    pub run: PathBuf,
    /// What outlives a boot.
    pub state: PathBuf,
    /// BPF file system.
    pub bpffs: PathBuf,
}

/// The directories that these flags and the file they name give an agent, whatever else the file says.
///
/// # Errors
/// When the file cannot be read or parsed.
pub fn directories(flags: &Flags) -> Result<Directories, ConfigError> {
    let file = flags.config.as_deref().map(read_file).transpose()?.map(|(file, _)| file).unwrap_or_default();
    Ok(directories_of(flags, &file))
}

fn directories_of(flags: &Flags, file: &File) -> Directories {
    let of = |flag: &Option<PathBuf>, file: &Option<PathBuf>, default: &str| {
        flag.as_ref().or(file.as_ref()).map_or_else(|| default.into(), PathBuf::clone)
    };
    Directories {
        run: of(&flags.run_dir, &file.run_dir, "/run/wharf"),
        state: of(&flags.state_dir, &file.state_dir, "/var/lib/wharf"),
        bpffs: of(&flags.bpffs, &file.bpffs, "/sys/fs/bpf"),
    }
}

/// Checks the address of an OTLP collector.
fn otlp(url: String) -> Result<String, ConfigError> {
    let refused = |message: &str| Err(setting("otlp-endpoint", format!("{url:?} {message}")));
    if !cfg!(feature = "otlp") {
        return refused("cannot be used: this wharf-agent was built without the feature otlp (docs/metrics.md)");
    }
    let is_plain = |uri: &axum::http::Uri| {
        uri.scheme_str() == Some("http") && uri.port().is_some() && uri.path() == "/" && uri.query().is_none()
    };
    match url.parse() {
        Ok(uri) if is_plain(&uri) => Ok(url),
        _ => refused("is not http://HOST:PORT"),
    }
}

/// `ipv6_off`: why the node has no IPv6, where that is so.
fn merge(flags: Flags, file: File, ipv6_off: Option<&'static str>) -> Result<AgentConfig, ConfigError> {
    let directories = directories_of(&flags, &file);
    let flat = |flag: Vec<Cidrs>| flag.into_iter().flat_map(|c| c.0).collect::<Vec<_>>();
    let v4 = flags.ipv4_pool.map(flat).or(file.ipv4_pool).unwrap_or_else(|| vec![DEFAULT_V4]);
    let asked_v6 = flags.ipv6_pool.map(flat).or(file.ipv6_pool);
    let ipv6_off_by_itself = ipv6_off.filter(|_| asked_v6.is_none());
    let v6 = asked_v6.unwrap_or_else(|| if ipv6_off.is_some() { Vec::new() } else { vec![DEFAULT_V6] });
    if let Some(bad) = v4.iter().find(|c| c.addr().is_ipv6()) {
        return Err(setting("ipv4-pool", format!("{bad} is not an IPv4 CIDR")));
    }
    if let Some(bad) = v6.iter().find(|c| c.addr().is_ipv4()) {
        return Err(setting("ipv6-pool", format!("{bad} is not an IPv6 CIDR")));
    }
    let default_pool = pool_name(DEFAULT_POOL)?;
    let mut pools =
        vec![PoolConfig { name: default_pool.clone(), cidrs: v4.into_iter().chain(v6).map(|c| c.trunc()).collect() }];
    let mut with_own_address = Vec::new();
    for p in file.pool {
        let cidrs: Vec<IpNet> = p.cidrs.iter().map(IpNet::trunc).collect();
        if p.masquerade == Some(Switch::Off) {
            with_own_address.extend(cidrs.iter().copied());
        }
        pools.push(PoolConfig { name: pool_name(&p.name)?, cidrs });
    }
    let service_cidr: Vec<IpNet> = flags.service_cidr.map(flat).or(file.service_cidr).unwrap_or_default();
    let overlapping =
        |net: &&IpNet| pools.iter().flat_map(|p| &p.cidrs).any(|pool| pool.contains(*net) || net.contains(pool));
    if let Some(bad) = service_cidr.iter().find(overlapping) {
        return Err(setting(
            "service-cidr",
            format!("{bad} overlaps a pool: addresses of containers are no service's"),
        ));
    }
    let masquerade = match flags.masquerade.or(file.masquerade).unwrap_or(Switch::On) {
        Switch::Off if !service_cidr.is_empty() => {
            let message = "needs the node's nftables table, and --masquerade off has none; leave one of the two out";
            return Err(setting("service-cidr", message.to_owned()));
        }
        Switch::Off => None,
        Switch::On => {
            let excluded = flags.masquerade_exclude.map(flat).or(file.masquerade_exclude).unwrap_or_default();
            let sources = flags.masquerade_source.or(file.masquerade_source).unwrap_or_default();
            let all = pools.iter().flat_map(|p| &p.cidrs).copied();
            Some(Masquerade {
                pools: all.filter(|cidr| !with_own_address.contains(cidr)).collect(),
                // Containers of every pool see each other's addresses.
                excluded: excluded.into_iter().chain(with_own_address).collect(),
                source4: source(&sources, |ip| if let IpAddr::V4(ip) = ip { Some(ip) } else { None })?,
                source6: source(&sources, |ip| if let IpAddr::V6(ip) = ip { Some(ip) } else { None })?,
                services: !service_cidr.is_empty(),
            })
        }
    };
    let first_v6 = || pools.iter().flat_map(|p| &p.cidrs).find(|c| c.addr().is_ipv6());
    if let (Some(why), Some(cidr)) = (ipv6_off, first_v6()) {
        let message = format!(
            "{cidr} cannot be used: IPv6 is off on this node ({why}); turn it on, or start without IPv6 pools (--ipv6-pool=)"
        );
        return Err(setting("ipv6-pool", message));
    }
    let mtu = flags.mtu.or(file.mtu);
    if let Some(mtu) = mtu.filter(|mtu| !(MIN_MTU..=MAX_MTU).contains(mtu)) {
        return Err(setting("mtu", format!("{mtu} is not within {MIN_MTU} (IPv6's least) to 65535")));
    }
    let prepared_programs = flags.prepared_programs.or(file.prepared_programs).unwrap_or(32);
    if prepared_programs > 1024 {
        return Err(setting("prepared-programs", format!("{prepared_programs} is above 1024")));
    }
    let labels_timeout_ms = flags.labels_timeout_ms.or(file.labels_timeout_ms).unwrap_or(0);
    if labels_timeout_ms > MAX_LABELS_TIMEOUT_MS {
        let message = format!("{labels_timeout_ms} is above {MAX_LABELS_TIMEOUT_MS}, a day");
        return Err(setting("labels-timeout-ms", message));
    }
    let proxy_timeout_ms = flags.proxy_timeout_ms.or(file.proxy_timeout_ms).unwrap_or(MAX_PROXY_TIMEOUT_MS);
    if proxy_timeout_ms > MAX_PROXY_TIMEOUT_MS {
        let message = format!(
            "{proxy_timeout_ms} is above {MAX_PROXY_TIMEOUT_MS}: a DEL that waits longer is given up by the shim"
        );
        return Err(setting("proxy-timeout-ms", message));
    }
    let proxy_port = flags.proxy_port.or(file.proxy_port).unwrap_or(15_000);
    if proxy_port == 0 || proxy_port.checked_add(PROXY_PORTS - 1).is_none() {
        let message = format!("{proxy_port}: the {PROXY_PORTS} ports from there on must be ports, from 1 to 65535");
        return Err(setting("proxy-port", message));
    }
    let audit_interval_ms = flags.audit_interval_ms.or(file.audit_interval_ms).unwrap_or(60_000);
    if (1..1_000).contains(&audit_interval_ms) {
        return Err(setting(
            "audit-interval-ms",
            format!("{audit_interval_ms} is neither 0 (never) nor 1000 and more"),
        ));
    }
    let selfcheck_interval_ms = flags.selfcheck_interval_ms.or(file.selfcheck_interval_ms).unwrap_or(60_000);
    if (1..100).contains(&selfcheck_interval_ms) {
        let message = format!("{selfcheck_interval_ms} is neither 0 (never) nor 100 and more");
        return Err(setting("selfcheck-interval-ms", message));
    }
    let health_interval_ms = flags.health_interval_ms.or(file.health_interval_ms).unwrap_or(10_000);
    if (1..100).contains(&health_interval_ms) {
        return Err(setting("health-interval-ms", format!("{health_interval_ms} is neither 0 (off) nor 100 and more")));
    }
    let log_level = flags.log_level.or(file.log_level).unwrap_or_else(|| "info".into());
    LogFilter::check(&log_level).map_err(|e| setting("log-level", e.to_string()))?;
    Ok(AgentConfig {
        run_dir: directories.run,
        state_dir: directories.state,
        bpffs: directories.bpffs,
        pools,
        default_pool,
        ipv6_off: ipv6_off_by_itself,
        node_name: match flags.node_name.or(file.node_name) {
            Some(name) if name.is_empty() || name.len() > 253 || name.chars().any(char::is_control) => {
                return Err(setting("node-name", "must be 1 to 253 bytes without control characters".into()));
            }
            Some(name) => name,
            None => nix::unistd::gethostname()
                .map_err(|e| setting("node-name", format!("read the host name: {e}")))?
                .to_string_lossy()
                .into_owned(),
        },
        metrics_listen: flags.metrics_listen.or(file.metrics_listen),
        otlp_endpoint: flags
            .otlp_endpoint
            .or(file.otlp_endpoint)
            .filter(|url| !url.is_empty())
            .map(otlp)
            .transpose()?,
        log_level,
        log_format: flags.log_format.or(file.log_format).unwrap_or(LogFormat::Text),
        mtu,
        attach_mode: match flags.attach_mode.or(file.attach_mode).unwrap_or(AttachChoice::Auto) {
            AttachChoice::Auto => None,
            AttachChoice::Tcx => Some(AttachMode::Tcx),
            AttachChoice::Clsact => Some(AttachMode::Clsact),
        },
        local_delivery: flags.local_delivery.or(file.local_delivery).unwrap_or(LocalDelivery::Direct),
        masquerade,
        announce: flags.announce.or(file.announce) == Some(Switch::On),
        policy_dir: flags.policy_dir.or(file.policy_dir),
        service_cidr,
        policy_enforcement: flags.policy_enforcement.or(file.policy_enforcement).unwrap_or(Enforcement::Default),
        policy_audit: flags.policy_audit.or(file.policy_audit) == Some(Switch::On),
        policy_keep_flows: flags.policy_keep_flows.or(file.policy_keep_flows) == Some(Switch::On),
        labels_timeout: std::time::Duration::from_millis(labels_timeout_ms),
        prepared_programs,
        proxy_timeout: std::time::Duration::from_millis(proxy_timeout_ms),
        envoy: flags.envoy.or(file.envoy),
        proxy_port,
        ip_rest_ms: flags.ip_rest_ms.or(file.ip_rest_ms).unwrap_or(30_000),
        audit_interval: std::time::Duration::from_millis(audit_interval_ms),
        health_interval: std::time::Duration::from_millis(health_interval_ms),
        selfcheck_interval: std::time::Duration::from_millis(selfcheck_interval_ms),
        timeline_keep: std::time::Duration::from_secs(flags.timeline_keep_s.or(file.timeline_keep_s).unwrap_or(86_400)),
        delegate: flags.delegate.or(file.delegate).map(delegate::socket).transpose()?,
        debug_programs: flags.debug_programs.or(file.debug_programs).unwrap_or(false),
        origins: BTreeMap::new(),
    })
}

/// The address of one family among the sources of masqueraded packets.
fn source<T>(all: &[IpAddr], family: impl Fn(IpAddr) -> Option<T>) -> Result<Option<T>, ConfigError> {
    let mut of_family = all.iter().filter_map(|ip| family(*ip));
    let first = of_family.next();
    match of_family.next() {
        Some(_) => Err(setting("masquerade-source", "has two addresses of one family".to_owned())),
        None => Ok(first),
    }
}

/// Longest wait for labels.
const MAX_LABELS_TIMEOUT_MS: u64 = 86_400_000;

/// Ports of the proxy: as many listeners may be there, those of a change beside those before it.
pub const PROXY_PORTS: u16 = 1_000;
/// Longest wait for the proxy, and the default: the bound of that step of a delete.
const MAX_PROXY_TIMEOUT_MS: u64 = DeleteStep::AwaitProxy.deadline_ms();

const DEFAULT_V4: IpNet = IpNet::V4(ipnet::Ipv4Net::new_assert(std::net::Ipv4Addr::new(10, 87, 0, 0), 16));
const DEFAULT_V6: IpNet =
    IpNet::V6(ipnet::Ipv6Net::new_assert(std::net::Ipv6Addr::new(0xfd57, 0x4a7f, 0x0e8f, 0, 0, 0, 0, 0), 64));

fn pool_name(name: &str) -> Result<PoolName, ConfigError> {
    PoolName::parse(name).map_err(|e| setting("pool", e.to_string()))
}

fn setting(name: &'static str, message: String) -> ConfigError {
    ConfigError::Setting { name, origin: None, message }
}

/// The settings as they are at start; `GET /v1/config` shows what was changed since in place of them.
#[must_use]
pub fn effective(config: &AgentConfig) -> std::collections::BTreeMap<String, String> {
    let family = |v6: bool| {
        let cidrs = config.pools.first().map(|p| p.cidrs.as_slice()).unwrap_or_default();
        let texts: Vec<String> =
            cidrs.iter().filter(|c| matches!(c.addr(), IpAddr::V6(_)) == v6).map(ToString::to_string).collect();
        texts.join(",")
    };
    let masqueraded = |texts: &dyn Fn(&Masquerade) -> Vec<String>| {
        config.masquerade.as_ref().map(texts).unwrap_or_default().join(",")
    };
    let mut map = std::collections::BTreeMap::from([
        ("run-dir".to_owned(), config.run_dir.display().to_string()),
        ("state-dir".to_owned(), config.state_dir.display().to_string()),
        ("bpffs".to_owned(), config.bpffs.display().to_string()),
        ("ipv4-pool".to_owned(), family(false)),
        ("ipv6-pool".to_owned(), family(true)),
        ("node-name".to_owned(), config.node_name.clone()),
        ("log-level".to_owned(), config.log_level.clone()),
        ("log-format".to_owned(), config.log_format.as_str().to_owned()),
        ("metrics-listen".to_owned(), config.metrics_listen.map(|a| a.to_string()).unwrap_or_default()),
        ("mtu".to_owned(), config.mtu.map_or_else(|| "uplink".to_owned(), |mtu| mtu.to_string())),
        ("attach-mode".to_owned(), config.attach_mode.map_or_else(|| "auto".to_owned(), |m| m.to_string())),
        ("local-delivery".to_owned(), config.local_delivery.as_str().to_owned()),
        ("masquerade".to_owned(), if config.masquerade.is_some() { "on" } else { "off" }.to_owned()),
        ("masquerade-exclude".to_owned(), masqueraded(&|m| m.excluded.iter().map(ToString::to_string).collect())),
        (
            "masquerade-source".to_owned(),
            masqueraded(&|m| {
                let sources = m.source4.map(IpAddr::V4).into_iter().chain(m.source6.map(IpAddr::V6));
                sources.map(|ip| ip.to_string()).collect()
            }),
        ),
        ("announce".to_owned(), if config.announce { "on" } else { "off" }.to_owned()),
        (
            "policy-dir".to_owned(),
            config.policy_dir.as_ref().map(|path| path.display().to_string()).unwrap_or_default(),
        ),
        ("service-cidr".to_owned(), config.service_cidr.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")),
        ("policy-enforcement".to_owned(), config.policy_enforcement.as_str().to_owned()),
        ("policy-audit".to_owned(), if config.policy_audit { "on" } else { "off" }.to_owned()),
        ("policy-keep-flows".to_owned(), if config.policy_keep_flows { "on" } else { "off" }.to_owned()),
        ("labels-timeout-ms".to_owned(), config.labels_timeout.as_millis().to_string()),
        ("prepared-programs".to_owned(), config.prepared_programs.to_string()),
        ("proxy-timeout-ms".to_owned(), config.proxy_timeout.as_millis().to_string()),
        ("otlp-endpoint".to_owned(), config.otlp_endpoint.clone().unwrap_or_default()),
        ("envoy".to_owned(), config.envoy.as_ref().map(|path| path.display().to_string()).unwrap_or_default()),
        ("proxy-port".to_owned(), config.proxy_port.to_string()),
        ("ip-rest-ms".to_owned(), config.ip_rest_ms.to_string()),
        ("audit-interval-ms".to_owned(), config.audit_interval.as_millis().to_string()),
        ("selfcheck-interval-ms".to_owned(), config.selfcheck_interval.as_millis().to_string()),
        ("timeline-keep-s".to_owned(), config.timeline_keep.as_secs().to_string()),
        ("delegate".to_owned(), config.delegate.as_ref().map(|path| path.display().to_string()).unwrap_or_default()),
        ("health-interval-ms".to_owned(), config.health_interval.as_millis().to_string()),
        ("debug-programs".to_owned(), config.debug_programs.to_string()),
    ]);
    for pool in config.pools.iter().skip(1) {
        let cidrs: Vec<String> = pool.cidrs.iter().map(ToString::to_string).collect();
        map.insert(format!("pool.{}", pool.name), cidrs.join(","));
    }
    if config.delegate.is_some() {
        map.retain(|name, _| delegate::is_allowed(name));
    }
    map
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use clap::Parser as _;

    use super::*;

    fn flags(args: &[&str]) -> Flags {
        Flags::try_parse_from(std::iter::once(&"wharf-agent").chain(args)).expect("flags parse")
    }

    #[test]
    fn a_flag_wins_over_the_file() {
        let file: File = toml::from_str("mtu = 1400\nnode-name = 'from-file'").expect("file parses");
        let config = merge(flags(&["--mtu", "9000"]), file, None).expect("merges");
        assert_eq!((config.mtu, config.node_name.as_str()), (Some(9000), "from-file"));
    }

    #[test]
    fn an_unknown_key_is_an_error_that_names_it() {
        let error = toml::from_str::<File>("ipv4-pol = ['10.0.0.0/8']").expect_err("refused");
        assert!(error.to_string().contains("ipv4-pol"), "{error}");
    }

    #[test]
    fn pools_of_the_file_follow_the_default_pool() {
        let file: File = toml::from_str("[[pool]]\nname = 'blue'\ncidrs = ['10.9.0.7/24']").expect("file parses");
        let config = merge(flags(&[]), file, None).expect("merges");
        assert_eq!(config.pools.len(), 2);
        assert_eq!(config.pools[1].cidrs[0].to_string(), "10.9.0.0/24");
    }

    #[test]
    fn a_family_mixed_up_is_refused() {
        let error = merge(flags(&["--ipv4-pool", "fd00::/64"]), File::default(), None).expect_err("refused");
        assert_eq!(error.to_string(), "setting ipv4-pool: fd00::/64 is not an IPv4 CIDR");
    }

    #[test]
    fn a_family_is_off_where_its_pool_is_empty() {
        let cidrs = |args: &[&str]| -> Vec<String> {
            let config = merge(flags(args), File::default(), None).expect("merges");
            config.pools.iter().flat_map(|p| &p.cidrs).map(ToString::to_string).collect()
        };
        assert_eq!(cidrs(&["--ipv6-pool="]), ["10.87.0.0/16"]);
        assert_eq!(cidrs(&["--ipv4-pool=", "--ipv6-pool", "fd01::/64,fd02::/64"]), ["fd01::/64", "fd02::/64"]);
        assert_eq!(
            cidrs(&["--ipv6-pool=fd01::/64", "--ipv6-pool=fd02::/64"]),
            ["10.87.0.0/16", "fd01::/64", "fd02::/64"]
        );
        assert!(Flags::try_parse_from(["wharf-agent", "--ipv4-pool", "10.0.0.0/8,"]).is_err(), "a CIDR is missing");
    }

    #[test]
    fn where_ipv6_is_off_the_default_is_ipv4_alone_and_an_explicit_pool_is_refused() {
        let off = Some("because");
        let config = merge(flags(&[]), File::default(), off).expect("merges");
        assert_eq!(config.pools[0].cidrs, [DEFAULT_V4]);
        assert_eq!(config.ipv6_off, off, "told, as nobody asked for it");
        let asked = merge(flags(&["--ipv6-pool="]), File::default(), off).expect("merges");
        assert_eq!((asked.pools[0].cidrs.len(), asked.ipv6_off), (1, None));
        let by_flag = merge(flags(&["--ipv6-pool", "fd01::/64"]), File::default(), off).expect_err("refused");
        let words = "setting ipv6-pool: fd01::/64 cannot be used: IPv6 is off on this node (because); turn it on, or start \
                     without IPv6 pools (--ipv6-pool=)";
        assert_eq!(by_flag.to_string(), words);
        let file: File = toml::from_str("[[pool]]\nname = 'blue'\ncidrs = ['fd02::/64']").expect("file parses");
        assert!(merge(flags(&[]), file, off).is_err(), "of another pool too");
    }

    #[test]
    fn each_setting_knows_where_it_comes_from() {
        let dir = tempfile::tempdir().expect("make directory");
        let path = dir.path().join("agent.toml");
        std::fs::write(&path, "mtu = 1400\nnode-name = 'x'\n[[pool]]\nname = 'blue'\ncidrs = []").expect("write");
        let arguments = ["wharf-agent", "--config", &path.display().to_string(), "--mtu", "9000"].map(str::to_owned);
        let matches = Flags::command().try_get_matches_from(&arguments).expect("flags parse");
        let mut config = AgentConfig::load(Flags::from_arg_matches(&matches).expect("flags")).expect("loads");
        config.origins.extend(given(&matches));
        let of = |name: &str| config.origins.get(name).copied();
        assert_eq!((of("mtu"), of("node-name")), (Some(SettingOrigin::Flag), Some(SettingOrigin::File)));
        assert_eq!((of("pool.blue"), of("run-dir")), (Some(SettingOrigin::File), None));
    }

    #[test]
    fn a_cause_is_told_once() {
        let error = AgentConfig::load(flags(&["--config", "/nonexistent/agent.toml"])).expect_err("no such file");
        let told = format!("{:#}", anyhow::Error::from(error));
        assert_eq!(told, "read configuration /nonexistent/agent.toml: No such file or directory (os error 2)");
    }

    #[test]
    fn a_refused_setting_names_where_it_comes_from() {
        let dir = tempfile::tempdir().expect("make directory");
        let path = dir.path().join("agent.toml");
        std::fs::write(&path, "mtu = 99").expect("write");
        let refused = |arguments: &[&str]| {
            let arguments: Vec<OsString> =
                std::iter::once("wharf-agent").chain(arguments.iter().copied()).map(OsString::from).collect();
            AgentConfig::of(&parse(&arguments).expect("parses")).expect_err("refused").to_string()
        };
        let file = path.display().to_string();
        assert!(refused(&["--mtu", "98"]).starts_with("setting mtu (--mtu): 98 is not within"));
        assert!(refused(&["--config", &file]).starts_with(&format!("setting mtu ({file}): 99 is not within")));
        assert!(refused(&["--config", &file, "--mtu", "98"]).starts_with("setting mtu (--mtu): 98 is not within"));
    }

    #[test]
    fn an_mtu_too_small_for_ipv6_is_refused() {
        assert!(merge(flags(&["--mtu", "1279"]), File::default(), None).is_err());
    }
    #[test]
    fn a_wait_for_the_proxy_that_outlasts_the_shim_is_refused() {
        let error = merge(flags(&["--proxy-timeout-ms", "3001"]), File::default(), None).expect_err("refused");
        assert!(error.to_string().starts_with("setting proxy-timeout-ms: 3001 is above 3000"), "{error}");
        assert!(merge(flags(&["--proxy-timeout-ms", "3000"]), File::default(), None).is_ok());
    }
}
