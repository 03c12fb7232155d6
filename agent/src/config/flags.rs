//! Command line and environment.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

use clap::{
    ArgMatches, CommandFactory, Parser,
    error::{ContextKind, ContextValue},
    parser::ValueSource,
};
use ipnet::IpNet;
use serde::Deserialize;
use wharf_api::SettingOrigin;
use wharf_core::policy::Enforcement;
use wharf_kit::telemetry::LogFormat;

use super::cidr::{Cidr, CidrError};

const EXAMPLES: &str = "Examples:
  wharf-agent                                      serve this network namespace with the defaults
  wharf-agent --ipv4-pool 10.12.0.0/20 --ipv6-pool fd12::/64 --metrics-listen 127.0.0.1:9478
  wharf-agent --ipv6-pool=                         IPv4 alone
  wharf-agent cleanup --dry-run                    list what agents left on this node; without the flag, remove it
  wharf-agent --config /etc/wharf/agent.toml       the same keys in TOML, plus [[pool]] tables for named pools

  wharf-agent --config /etc/wharf/agent.toml --check-config       before a restart: can these settings be used?

Every setting is also an environment variable (WHARF_RUN_DIR, ...) and a key of the TOML file (run-dir, ...).
The pages that are named here are in the documentation: /usr/share/doc/wharf.

Exit status:
  0  ended when asked to; with --check-config: the settings can be used
  1  could not start or failed; standard error says why
  3  the command line, an environment variable or the file is wrong";

/// The Wharf node agent: gives each container a network, with separate BPF programs and maps.
#[derive(Debug, Default, Parser)]
#[command(version, after_help = EXAMPLES)]
pub struct Flags {
    /// Directory for the socket and the store; it is empty after a reboot [default: /run/wharf]
    #[arg(long, env = "WHARF_RUN_DIR", value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
    /// Directory for the state that survives a reboot [default: /var/lib/wharf]
    #[arg(long, env = "WHARF_STATE_DIR", value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Mounted BPF file system; pins go under DIR/wharf [default: /sys/fs/bpf]
    #[arg(long, env = "WHARF_BPFFS", value_name = "DIR")]
    pub bpffs: Option<PathBuf>,
    /// TOML file with any of these settings, and `[[pool]]` tables
    #[arg(long, env = "WHARF_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// IPv4 CIDRs of the default pool; may be repeated; empty (--ipv4-pool=) gives no IPv4 addresses
    /// [default: 10.87.0.0/16]
    #[arg(long, env = "WHARF_IPV4_POOL", value_name = "CIDR,...", value_parser = cidrs)]
    pub ipv4_pool: Option<Vec<Cidrs>>,
    /// IPv6 CIDRs of the default pool; may be repeated; empty (--ipv6-pool=) gives no IPv6 addresses
    /// [default: fd57:4a7f:e8f::/64, or none on a node whose IPv6 is off]
    #[arg(long, env = "WHARF_IPV6_POOL", value_name = "CIDR,...", value_parser = cidrs)]
    pub ipv6_pool: Option<Vec<Cidrs>>,
    /// Name of this node in status and metrics [default: the host name]
    #[arg(long, env = "WHARF_NODE_NAME", value_name = "NAME")]
    pub node_name: Option<String>,
    /// Address and port for Prometheus metrics; they are always on the socket as GET /metrics too
    #[arg(long, env = "WHARF_METRICS_LISTEN", value_name = "ADDR:PORT")]
    pub metrics_listen: Option<SocketAddr>,
    /// OpenTelemetry collector that gets a span for each CNI command, by OTLP over gRPC (`http://HOST:PORT`); needs a
    /// build with the feature `otlp` (page "Metrics and alerts")
    #[arg(long, env = "WHARF_OTLP_ENDPOINT", value_name = "URL")]
    pub otlp_endpoint: Option<String>,
    /// Log filter: error, warn, info, debug, trace, or target=level pairs [default: info]
    #[arg(long, env = "WHARF_LOG_LEVEL", value_name = "FILTER")]
    pub log_level: Option<String>,
    /// Log lines as text or JSON [default: text]
    #[arg(long, env = "WHARF_LOG_FORMAT", value_name = "FORMAT")]
    pub log_format: Option<LogFormat>,
    /// MTU of containers without a requested MTU, bytes [default: the smallest MTU of the uplinks]
    #[arg(long, env = "WHARF_MTU", value_name = "BYTES")]
    pub mtu: Option<u32>,
    /// How programs are attached: auto (clsact: attaches and detaches without waiting), tcx or clsact [default: auto]
    #[arg(long, env = "WHARF_ATTACH_MODE", value_name = "MODE")]
    pub attach_mode: Option<AttachChoice>,
    /// Kind of the links of new containers: veth, netkit (Linux 6.10) or auto (veth) [default: auto]
    #[arg(long, env = "WHARF_DEVICE_MODE", value_name = "MODE")]
    pub device_mode: Option<DeviceChoice>,
    /// Path of packets between two containers of the node: direct, or through the node's stack and its firewall
    /// (page "Connectivity") [default: direct]
    #[arg(long, env = "WHARF_LOCAL_DELIVERY", value_name = "WAY")]
    pub local_delivery: Option<LocalDelivery>,
    /// Whether packets of containers to other networks are forwarded with an address of the node: on or off
    /// (page "Connectivity") [default: on]
    #[arg(long, env = "WHARF_MASQUERADE", value_name = "SWITCH")]
    pub masquerade: Option<Switch>,
    /// Destinations that see the containers' addresses, besides the pools: CIDRs, separated by commas
    #[arg(long, env = "WHARF_MASQUERADE_EXCLUDE", value_name = "CIDR,...", value_parser = cidrs)]
    pub masquerade_exclude: Option<Vec<Cidrs>>,
    /// Addresses of the node to masquerade with, at most one for each family, separated by commas; otherwise the
    /// addresses of the outgoing interface
    #[arg(long, env = "WHARF_MASQUERADE_SOURCE", value_name = "IP,...", value_delimiter = ',')]
    pub masquerade_source: Option<Vec<IpAddr>>,
    /// Whether the node answers its neighbours for containers whose pool is a part of their network: on or off
    /// (page "Connectivity") [default: off]
    #[arg(long, env = "WHARF_ANNOUNCE", num_args = 0..=1, default_missing_value = "on", value_name = "SWITCH")]
    pub announce: Option<Switch>,
    /// A directory whose files (`*.yaml`, `*.yml`, `*.json`) are policies, followed while the agent runs (page
    /// "Network policy")
    #[arg(long, env = "WHARF_POLICY_DIR", value_name = "DIR")]
    pub policy_dir: Option<PathBuf>,
    /// A TOML file that lists the cluster's nodes, followed while the agent runs: this node gets routes to the
    /// containers of the others (page "Several nodes")
    #[arg(long, env = "WHARF_CLUSTER_FILE", value_name = "FILE")]
    pub cluster_file: Option<PathBuf>,
    /// A directory for `feed.sock`, on which a producer reports the nodes, pods, namespaces and policies of a cluster
    /// (page "Cluster feed"); not together with --cluster-file
    #[arg(long, env = "WHARF_CLUSTER_FEED", value_name = "DIR")]
    pub cluster_feed: Option<PathBuf>,
    /// The group that may connect to `feed.sock` besides root
    #[arg(long, env = "WHARF_CLUSTER_FEED_GROUP", value_name = "GROUP")]
    pub cluster_feed_group: Option<String>,
    /// The default pool has the pod CIDRs of this node's row in the cluster file or the cluster feed (page "Several
    /// nodes"); not together with other settings of pools [default: off]
    #[arg(long, env = "WHARF_POOLS_FROM_CLUSTER", num_args = 0..=1, default_missing_value = "on", value_name = "SWITCH")]
    pub pools_from_cluster: Option<Switch>,
    /// Routes to other nodes: native, overlay (VXLAN), or auto: native first (page "Several nodes") [default: auto]
    #[arg(long, env = "WHARF_ROUTING", value_name = "MODE")]
    pub routing: Option<RoutingChoice>,
    /// UDP port of the overlay, the same on all nodes [default: 4789]
    #[arg(long, env = "WHARF_OVERLAY_PORT", value_name = "PORT")]
    pub overlay_port: Option<u16>,
    /// VXLAN network identifier of the overlay, 1 to 16777215, the same on all nodes [default: 88]
    #[arg(long, env = "WHARF_OVERLAY_VNI", value_name = "N")]
    pub overlay_vni: Option<u32>,
    /// Addresses of services, which the node translates to addresses of containers: policy applies to the containers
    /// (page "Network policy"). CIDRs, separated by commas
    #[arg(long, env = "WHARF_SERVICE_CIDR", value_name = "CIDR,...", value_parser = cidrs)]
    pub service_cidr: Option<Vec<Cidrs>>,
    /// When policy is enforced (page "Network policy") [default: default]
    #[arg(long, env = "WHARF_POLICY_ENFORCEMENT", value_name = "MODE")]
    pub policy_enforcement: Option<Enforcement>,
    /// Packets that policy denies pass, and are counted [default: off]
    #[arg(long, env = "WHARF_POLICY_AUDIT", num_args = 0..=1, default_missing_value = "on", value_name = "SWITCH")]
    pub policy_audit: Option<Switch>,
    /// Connections continue when a change of policy denies new ones [default: off]
    #[arg(long, env = "WHARF_POLICY_KEEP_FLOWS", num_args = 0..=1, default_missing_value = "on", value_name = "SWITCH")]
    pub policy_keep_flows: Option<Switch>,
    /// How long a pod without labels is isolated while it waits for them, milliseconds; 0 means not at all
    /// (page "Network policy") [default: 0]
    #[arg(long, env = "WHARF_LABELS_TIMEOUT_MS", value_name = "MS")]
    pub labels_timeout_ms: Option<u64>,
    /// Program sets kept verified ahead of need [default: 32]
    #[arg(long, env = "WHARF_PREPARED_PROGRAMS", value_name = "N")]
    pub prepared_programs: Option<usize>,
    /// How long a delete waits for the proxy's acknowledgement, milliseconds, 3000 at most [default: 3000]
    #[arg(long, env = "WHARF_PROXY_TIMEOUT_MS", value_name = "MS")]
    pub proxy_timeout_ms: Option<u64>,
    /// Envoy, which the agent starts as proxy for rules about requests; without this flag, an Envoy may connect to
    /// `proxy/xds.sock` in the run directory (page "HTTP, TLS and DNS rules")
    #[arg(long, env = "WHARF_ENVOY", value_name = "PATH")]
    pub envoy: Option<PathBuf>,
    /// The first of 1000 ports of the node for the proxy [default: 15000]
    #[arg(long, env = "WHARF_PROXY_PORT", value_name = "PORT")]
    pub proxy_port: Option<u16>,
    /// How long an address rests after its release, milliseconds; cut short when a pool runs out [default: 30000]
    #[arg(long, env = "WHARF_IP_REST_MS", value_name = "MS")]
    pub ip_rest_ms: Option<u64>,
    /// How long an endpoint whose network namespace is gone waits for the runtime's DEL before the agent deletes it,
    /// milliseconds [default: 60000]
    #[arg(long, env = "WHARF_GONE_GRACE_MS", value_name = "MS")]
    pub gone_grace_ms: Option<u64>,
    /// How often kernel and store are compared and leaks removed, milliseconds; 0 is never [default: 60000]
    #[arg(long, env = "WHARF_AUDIT_INTERVAL_MS", value_name = "MS")]
    pub audit_interval_ms: Option<u64>,
    /// How often each endpoint's programs are given test packets, milliseconds; 0 is never [default: 60000]
    #[arg(long, env = "WHARF_SELFCHECK_INTERVAL_MS", value_name = "MS")]
    pub selfcheck_interval_ms: Option<u64>,
    /// How long the timeline of a deleted endpoint is kept for `wharf explain`, seconds [default: 86400]
    #[arg(long, env = "WHARF_TIMELINE_KEEP_S", value_name = "SECONDS")]
    pub timeline_keep_s: Option<u64>,
    /// How often the health endpoint is probed, milliseconds, 100 at least; 0 turns it off [default: 10000]
    #[arg(long, env = "WHARF_HEALTH_INTERVAL_MS", value_name = "MS")]
    pub health_interval_ms: Option<u64>,
    /// The unix socket of a service that makes the network of this node's containers; the agent only forwards commands
    /// (page "Delegated mode")
    #[arg(long, env = "WHARF_DELEGATE", value_name = "SOCKET")]
    pub delegate: Option<PathBuf>,
    /// Load the programs with debug log records compiled in (slow; for developers)
    #[arg(long, env = "WHARF_DEBUG_PROGRAMS", num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub debug_programs: Option<bool>,
    /// Check the settings, the files that they name and the pools against the node's networks; print the resulting
    /// settings, and exit with 0 if they can be used, else with 3. Nothing is changed
    #[arg(long)]
    pub check_config: bool,
}

/// CIDRs of a flag.
#[derive(Debug, Clone)]
pub struct Cidrs(pub(super) Vec<IpNet>);

/// Splits at commas; an empty text is an empty list.
fn cidrs(text: &str) -> Result<Cidrs, CidrError> {
    let parts = text.split(',').filter(|_| !text.trim().is_empty());
    parts.map(|cidr| cidr.parse::<Cidr>().map(|cidr| cidr.0)).collect::<Result<_, _>>().map(Cidrs)
}

/// Requested attach mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum AttachChoice {
    /// clsact, whose ADD and DEL are shorter.
    Auto,
    /// tcx or an error.
    Tcx,
    /// clsact.
    Clsact,
}

/// Requested kind of links.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceChoice {
    /// veth.
    Auto,
    /// veth.
    Veth,
    /// netkit or an error.
    Netkit,
}

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Switch {
    /// On.
    On,
    /// Off.
    Off,
}

/// Path of packets between two endpoints of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum LocalDelivery {
    /// From link to link; the node's stack gets only flows that a rule of the node sent there.
    Direct,
    /// Through the node's stack with its firewall and connection tracking. The node must forward.
    Stack,
}

impl LocalDelivery {
    /// Name in settings.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Stack => "stack",
        }
    }
}

/// Requested routing to containers of other nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum RoutingChoice {
    /// Native to nodes in a network of this node's links, else overlay.
    Auto,
    /// The other node is the next hop; nodes in other networks get no route.
    Native,
    /// Overlay to all nodes.
    Overlay,
}

/// Parses the command line, then the environment.
///
/// # Errors
/// clap's, including `--help` and `--version`; names an invalid value's variable.
pub fn parse(arguments: &[OsString]) -> Result<ArgMatches, clap::Error> {
    Flags::command().try_get_matches_from(arguments).map_err(|error| name_variable(error, arguments))
}

/// clap names the flag for a value from the environment too. The flag is at fault if it also fails alone.
fn name_variable(mut error: clap::Error, arguments: &[OsString]) -> clap::Error {
    let of_flags = Flags::command().mut_args(|a| a.env(None::<&'static str>)).try_get_matches_from(arguments).err();
    let invalid = |e: &clap::Error| e.get(ContextKind::InvalidArg).map(ToString::to_string);
    let Some(flag) = invalid(&error).filter(|flag| of_flags.as_ref().and_then(invalid).as_ref() != Some(flag)) else {
        return error;
    };
    let mut command = Flags::command();
    command.build();
    let variable = command.get_arguments().find(|a| a.to_string() == flag).and_then(|a| a.get_env());
    if let Some(variable) = variable {
        let words = format!("environment variable {}", variable.display());
        error.insert(ContextKind::InvalidArg, ContextValue::String(words));
    }
    error
}

pub(super) fn given(matches: &ArgMatches) -> BTreeMap<String, SettingOrigin> {
    let mut origins = BTreeMap::new();
    for argument in Flags::command().get_arguments() {
        let origin = match matches.value_source(argument.get_id().as_str()) {
            Some(ValueSource::CommandLine) => SettingOrigin::Flag,
            Some(ValueSource::EnvVariable) => SettingOrigin::Environment,
            _ => continue,
        };
        if let Some(name) = argument.get_long() {
            origins.insert(name.to_owned(), origin);
        }
    }
    origins
}
