//! Settings: low arguments (flags, environment, TOML) become one checked [`AgentConfig`].
//!
//! A flag wins over its `WHARF_*` variable, which wins over the file, which wins over the default. Unknown keys of the
//! file are errors: a misspelt setting that is silently ignored is worse than an agent that does not start.

mod cidr;
mod delegate;
mod effective;
mod error;
mod file;
mod flags;
mod merge;

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use clap::{ArgMatches, CommandFactory as _, FromArgMatches as _};
use ipnet::IpNet;
use wharf_api::SettingOrigin;
use wharf_core::{ids::PoolName, ipam::PoolConfig, kernel::AttachMode, nat::Masquerade};

use crate::telemetry::LogFormat;

pub use effective::effective;
pub use error::ConfigError;
use file::{File, read_file};
use flags::given;
pub use flags::{AttachChoice, Cidrs, Enforcement, Flags, LocalDelivery, Switch, parse};

/// Name of the agent's socket in the run directory.
pub const SOCKET: &str = "wharf.sock";

/// Name of the pool that `--ipv4-pool` and `--ipv6-pool` make.
pub const DEFAULT_POOL: &str = "default";

/// Ports of the proxy: as many listeners may be there, those of a change beside those before it.
pub const PROXY_PORTS: u16 = 1_000;

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
    /// How long an endpoint whose network namespace is gone waits for its DEL.
    pub gone_grace: std::time::Duration,
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
        let mut config = merge::merge(flags, file, wharf_datapath::ipv6_off())?;
        config.origins = keys.into_iter().map(|key| (key, SettingOrigin::File)).collect();
        Ok(config)
    }

    /// Gives the default pool the IPv6 CIDR that it did not get because IPv6 is off on the node.
    pub fn keep_ipv6(&mut self) {
        self.ipv6_off = None;
        for pool in self.pools.iter_mut().filter(|pool| pool.name == self.default_pool) {
            pool.cidrs.push(merge::DEFAULT_V6);
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
/// When the file cannot be read or parsed, or a directory is the root or has no name.
pub fn directories(flags: &Flags) -> Result<Directories, ConfigError> {
    let file = flags.config.as_deref().map(read_file).transpose()?.map(|(file, _)| file).unwrap_or_default();
    merge::directories_of(flags, &file)
}

#[cfg(test)]
mod tests;
