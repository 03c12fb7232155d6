//! Settings: flags, environment and TOML become a checked [`AgentConfig`].
//!
//! Precedence: flag, `WHARF_*` variable, file. Unknown keys of the file are errors.

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
use wharf_cluster::routes::Routing;
use wharf_core::{
    ids::PoolName,
    ipam::{Ipam, IpamError, PoolConfig},
    kernel::{AttachMode, DeviceMode},
    nat::Masquerade,
};
use wharf_kit::telemetry::LogFormat;

pub use effective::effective;
pub use error::ConfigError;
use file::{File, read_file};
use flags::given;
pub use flags::{AttachChoice, Cidrs, DeviceChoice, Flags, LocalDelivery, RoutingChoice, Switch, parse};

/// Socket file in the run directory.
pub const SOCKET: &str = "wharf.sock";

/// Pool of `--ipv4-pool` and `--ipv6-pool`.
pub const DEFAULT_POOL: &str = "default";

/// Bound of the proxy's listeners, old and new together.
pub use wharf_enforce::limits::PROXY_PORTS;

/// Checked settings.
#[derive(Debug, Clone)]
pub struct AgentConfig {
    /// Socket and store.
    pub run_dir: PathBuf,
    /// State that outlives a boot.
    pub state_dir: PathBuf,
    /// BPF file system.
    pub bpffs: PathBuf,
    /// Pools, the default pool first; empty only with `pools_from_cluster`.
    pub pools: Vec<PoolConfig>,
    /// Pool of requests without a pool.
    pub default_pool: PoolName,
    /// Why the default pool lacks IPv6.
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
    /// Default MTU of links, bytes; `None`: the uplinks'.
    pub mtu: Option<u32>,
    /// Attach mode; `None`: auto.
    pub attach_mode: Option<AttachMode>,
    /// Kind of new links.
    pub device_mode: DeviceMode,
    /// Path between two endpoints of the node.
    pub local_delivery: LocalDelivery,
    /// `None`: firewall and forwarding stay unchanged.
    pub masquerade: Option<Masquerade>,
    /// Answer neighbours for pool addresses in their network.
    pub announce: bool,
    /// Directory of policy files.
    pub policy_dir: Option<PathBuf>,
    /// The cluster's nodes.
    pub cluster_file: Option<PathBuf>,
    /// Directory of the cluster feed's socket; `None` with a file.
    pub cluster_feed: Option<PathBuf>,
    /// Group of that socket.
    pub cluster_feed_group: Option<String>,
    /// This node's row as source of the pools; `None`: pools are settings.
    pub pools_from_cluster: Option<FromCluster>,
    /// Routing to other nodes.
    pub routing: Routing,
    /// Overlay's UDP port, not 0.
    pub overlay_port: u16,
    /// VXLAN network identifier, 1 to 2^24 - 1.
    pub overlay_vni: u32,
    /// Service addresses, translated by the node.
    pub service_cidr: Vec<IpNet>,
    /// When policy is enforced.
    pub policy_enforcement: wharf_core::policy::Enforcement,
    /// Audit mode: denied packets pass.
    pub policy_audit: bool,
    /// Connections survive a change that forbids them.
    pub policy_keep_flows: bool,
    /// Wait for a pod's labels; zero is none.
    pub labels_timeout: std::time::Duration,
    /// Program sets kept ready.
    pub prepared_programs: usize,
    /// A delete's wait for the proxy.
    pub proxy_timeout: std::time::Duration,
    /// Envoy to start, if any.
    pub envoy: Option<std::path::PathBuf>,
    /// First of [`PROXY_PORTS`] ports, host byte order.
    pub proxy_port: u16,
    /// Rest of a released address, milliseconds.
    pub ip_rest_ms: u64,
    /// Wait for the DEL after a namespace ended.
    pub gone_grace: std::time::Duration,
    /// Audit interval; zero is off.
    pub audit_interval: std::time::Duration,
    /// Self-check interval; zero is off.
    pub selfcheck_interval: std::time::Duration,
    /// Retention of deleted endpoints' timelines.
    pub timeline_keep: std::time::Duration,
    /// Health probe interval; zero is off.
    pub health_interval: std::time::Duration,
    /// Service of delegated mode.
    pub delegate: Option<PathBuf>,
    /// Load debug programs.
    pub debug_programs: bool,
    /// Sources of non-default settings, by flag.
    pub origins: BTreeMap<String, SettingOrigin>,
}

/// Pools of a start with `--pools-from-cluster`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FromCluster {
    /// Source in words; empty without pools.
    pub source: String,
    /// Why pod CIDRs are not used.
    pub problem: Option<String>,
    /// Pools last in use, if others; for a start that refuses the pools.
    pub earlier: Vec<IpNet>,
}

impl AgentConfig {
    /// From parsed command line, environment and file.
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

    /// Merges flags and file.
    ///
    /// # Errors
    /// Unreadable file or invalid setting.
    pub fn load(flags: Flags) -> Result<Self, ConfigError> {
        let (file, keys) = match &flags.config {
            Some(path) => read_file(path)?,
            None => (File::default(), Vec::new()),
        };
        let mut config = merge::merge(flags, file, wharf_datapath::ipv6_off())?;
        config.origins = keys.into_iter().map(|key| (key, SettingOrigin::File)).collect();
        Ok(config)
    }

    /// Sets the CIDRs of the default pool, the only one with `--pools-from-cluster`.
    pub fn set_pools(&mut self, cidrs: Vec<IpNet>) {
        if let Some(masquerade) = &mut self.masquerade {
            masquerade.pools.clone_from(&cidrs);
        }
        let pool = (!cidrs.is_empty()).then(|| PoolConfig { name: self.default_pool.clone(), cidrs });
        self.pools = pool.into_iter().collect();
    }

    /// The pools without leases.
    pub fn ipam(&self) -> Result<Ipam, IpamError> {
        if self.pools.is_empty() {
            return Ok(Ipam::without_pools(self.default_pool.clone()));
        }
        Ipam::new(self.pools.clone(), self.default_pool.clone())
    }

    /// Restores the default pool's IPv6 CIDR.
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

    /// The admin socket.
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

/// An agent's directories.
#[derive(Debug, Clone)]
pub struct Directories {
    /// Socket and store.
    pub run: PathBuf,
    /// State that outlives a boot.
    pub state: PathBuf,
    /// BPF file system.
    pub bpffs: PathBuf,
}

/// Directories from flags and file, otherwise unchecked.
///
/// # Errors
/// Unreadable file, or a directory that is the root or nameless.
pub fn directories(flags: &Flags) -> Result<Directories, ConfigError> {
    let file = flags.config.as_deref().map(read_file).transpose()?.map(|(file, _)| file).unwrap_or_default();
    merge::directories_of(flags, &file)
}

#[cfg(test)]
mod tests;
