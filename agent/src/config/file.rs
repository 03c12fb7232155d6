//! The configuration file.

use std::{
    io::Read as _,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
};

use serde::Deserialize;
use wharf_core::policy::Enforcement;
use wharf_kit::telemetry::LogFormat;

use super::{
    cidr::Cidr,
    error::ConfigError,
    flags::{AttachChoice, DeviceChoice, LocalDelivery, RoutingChoice, Switch},
};

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct File {
    pub(super) run_dir: Option<PathBuf>,
    pub(super) state_dir: Option<PathBuf>,
    pub(super) bpffs: Option<PathBuf>,
    pub(super) ipv4_pool: Option<Vec<Cidr>>,
    pub(super) ipv6_pool: Option<Vec<Cidr>>,
    pub(super) node_name: Option<String>,
    pub(super) metrics_listen: Option<SocketAddr>,
    pub(super) otlp_endpoint: Option<String>,
    pub(super) log_level: Option<String>,
    pub(super) log_format: Option<LogFormat>,
    pub(super) mtu: Option<u32>,
    pub(super) attach_mode: Option<AttachChoice>,
    pub(super) device_mode: Option<DeviceChoice>,
    pub(super) local_delivery: Option<LocalDelivery>,
    pub(super) masquerade: Option<Switch>,
    pub(super) masquerade_exclude: Option<Vec<Cidr>>,
    pub(super) masquerade_source: Option<Vec<IpAddr>>,
    pub(super) announce: Option<Switch>,
    pub(super) policy_dir: Option<PathBuf>,
    pub(super) cluster_file: Option<PathBuf>,
    pub(super) cluster_feed: Option<PathBuf>,
    pub(super) cluster_feed_group: Option<String>,
    pub(super) pools_from_cluster: Option<Switch>,
    pub(super) routing: Option<RoutingChoice>,
    pub(super) overlay_port: Option<u16>,
    pub(super) overlay_vni: Option<u32>,
    pub(super) service_cidr: Option<Vec<Cidr>>,
    pub(super) policy_enforcement: Option<Enforcement>,
    pub(super) policy_audit: Option<Switch>,
    pub(super) policy_keep_flows: Option<Switch>,
    pub(super) labels_timeout_ms: Option<u64>,
    pub(super) prepared_programs: Option<usize>,
    pub(super) proxy_timeout_ms: Option<u64>,
    pub(super) envoy: Option<PathBuf>,
    pub(super) proxy_port: Option<u16>,
    pub(super) ip_rest_ms: Option<u64>,
    pub(super) gone_grace_ms: Option<u64>,
    pub(super) audit_interval_ms: Option<u64>,
    pub(super) health_interval_ms: Option<u64>,
    pub(super) selfcheck_interval_ms: Option<u64>,
    pub(super) timeline_keep_s: Option<u64>,
    pub(super) delegate: Option<PathBuf>,
    pub(super) debug_programs: Option<bool>,
    #[serde(default)]
    pub(super) pool: Vec<FilePool>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct FilePool {
    pub(super) name: String,
    pub(super) cidrs: Vec<Cidr>,
    pub(super) masquerade: Option<Switch>,
}

/// Bytes; bounds the read of a device.
const MAX_FILE: u64 = 1 << 20;

pub(super) fn read_file(path: &Path) -> Result<(File, Vec<String>), ConfigError> {
    let mut text = String::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(MAX_FILE + 1).read_to_string(&mut text))
        .and_then(|read| match read as u64 {
            0..=MAX_FILE => Ok(()),
            _ => Err(std::io::Error::other(format!("it is larger than {} KiB", MAX_FILE >> 10))),
        })
        .map_err(|cause| ConfigError::Read { path: path.to_owned(), cause })?;
    let wrong =
        |e: toml::de::Error| ConfigError::Parse { path: path.to_owned(), message: e.to_string().trim().to_owned() };
    let file: File = toml::from_str(&text).map_err(wrong)?;
    let mut keys: Vec<String> = toml::from_str::<toml::Table>(&text).map_err(wrong)?.keys().cloned().collect();
    keys.extend(file.pool.iter().map(|pool| format!("pool.{}", pool.name)));
    Ok((file, keys))
}
