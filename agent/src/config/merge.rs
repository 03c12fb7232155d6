//! Merges flags and file, and checks each setting.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::{Component, Path, PathBuf},
    time::Duration,
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use wharf_cluster::routes::Routing;
use wharf_core::{
    ids::PoolName,
    ipam::PoolConfig,
    kernel::{AttachMode, DeviceMode, MIN_MTU},
    mtu::MAX_MTU,
    nat::Masquerade,
    plan::DeleteStep,
    policy::Enforcement,
};
use wharf_kit::telemetry::{LogFilter, LogFormat};

use super::{
    AgentConfig, AttachChoice, ConfigError, DEFAULT_POOL, DeviceChoice, Directories, Flags, FromCluster, LocalDelivery,
    PROXY_PORTS, RoutingChoice, Switch, cidr::nets, delegate, error::setting, file::File, flags::Cidrs,
};

/// Rejects the root and nameless paths: the agent empties these directories.
pub(super) fn directories_of(flags: &Flags, file: &File) -> Result<Directories, ConfigError> {
    let of = |name, flag: &Option<PathBuf>, file: &Option<PathBuf>, default: &str| {
        let directory = flag.as_ref().or(file.as_ref()).map_or_else(|| default.into(), PathBuf::clone);
        if directory.components().any(|part| matches!(part, Component::Normal(_))) {
            return Ok(directory);
        }
        Err(setting(name, format!("{directory:?} is not a directory of the agent's own")))
    };
    Ok(Directories {
        run: of("run-dir", &flags.run_dir, &file.run_dir, "/run/wharf")?,
        state: of("state-dir", &flags.state_dir, &file.state_dir, "/var/lib/wharf")?,
        bpffs: of("bpffs", &flags.bpffs, &file.bpffs, "/sys/fs/bpf")?,
    })
}

fn otlp(url: String) -> Result<String, ConfigError> {
    let refused = |message: &str| Err(setting("otlp-endpoint", format!("{url:?} {message}")));
    if !cfg!(feature = "otlp") {
        return refused(
            "cannot be used: this wharf-agent was built without the feature otlp; see the page \"Metrics and alerts\" of the \
             documentation (/usr/share/doc/wharf)",
        );
    }
    let is_plain = |uri: &axum::http::Uri| {
        uri.scheme_str() == Some("http") && uri.port().is_some() && uri.path() == "/" && uri.query().is_none()
    };
    match url.parse() {
        Ok(uri) if is_plain(&uri) => Ok(url),
        _ => refused("is not http://HOST:PORT"),
    }
}

/// `ipv6_off`: why the node has no IPv6.
pub(super) fn merge(flags: Flags, file: File, ipv6_off: Option<&'static str>) -> Result<AgentConfig, ConfigError> {
    let directories = directories_of(&flags, &file)?;
    let from_cluster = flags.pools_from_cluster.or(file.pools_from_cluster) == Some(Switch::On);
    if from_cluster {
        alone(&flags, &file).map_err(|why| setting("pools-from-cluster", why))?;
    }
    let flat = |flag: Vec<Cidrs>| flag.into_iter().flat_map(|c| c.0).collect::<Vec<_>>();
    let v4 = flags.ipv4_pool.map(flat).or(file.ipv4_pool.map(nets)).unwrap_or_else(|| vec![DEFAULT_V4]);
    let asked_v6 = flags.ipv6_pool.map(flat).or(file.ipv6_pool.map(nets));
    let ipv6_off_by_itself = ipv6_off.filter(|_| asked_v6.is_none() && !from_cluster);
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
    if from_cluster {
        pools.clear();
    }
    let mut with_own_address = Vec::new();
    for p in file.pool {
        let cidrs: Vec<IpNet> = nets(p.cidrs).iter().map(IpNet::trunc).collect();
        if p.masquerade == Some(Switch::Off) {
            with_own_address.extend(cidrs.iter().copied());
        }
        pools.push(PoolConfig { name: pool_name(&p.name)?, cidrs });
    }
    let service_cidr: Vec<IpNet> = flags.service_cidr.map(flat).or(file.service_cidr.map(nets)).unwrap_or_default();
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
            let excluded = flags.masquerade_exclude.map(flat).or(file.masquerade_exclude.map(nets)).unwrap_or_default();
            let sources = flags.masquerade_source.or(file.masquerade_source).unwrap_or_default();
            let all = pools.iter().flat_map(|p| &p.cidrs).copied();
            Some(Masquerade {
                pools: all.filter(|cidr| !with_own_address.contains(cidr)).collect(),
                // Containers of all pools see each other's addresses.
                excluded: excluded.into_iter().chain(with_own_address).collect(),
                source4: source(&sources, |ip| if let IpAddr::V4(ip) = ip { Some(ip) } else { None })?,
                source6: source(&sources, |ip| if let IpAddr::V6(ip) = ip { Some(ip) } else { None })?,
                services: !service_cidr.is_empty(),
                former: Vec::new(),
                overlay: None,
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
    let cluster_file = flags.cluster_file.or(file.cluster_file);
    let cluster_feed = flags.cluster_feed.or(file.cluster_feed);
    if let Some(feed) = &cluster_feed {
        check_feed(feed, cluster_file.as_deref(), &directories).map_err(|why| setting("cluster-feed", why))?;
    }
    let overlay_port = flags.overlay_port.or(file.overlay_port).unwrap_or(VXLAN_PORT);
    if overlay_port == 0 {
        return Err(setting("overlay-port", format!("{overlay_port} is not within 1 to 65535")));
    }
    let overlay_vni = flags.overlay_vni.or(file.overlay_vni).unwrap_or(DEFAULT_VNI);
    if !(1..=MAX_VNI).contains(&overlay_vni) {
        return Err(setting("overlay-vni", format!("{overlay_vni} is not within 1 to {MAX_VNI}")));
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
    if (proxy_port..proxy_port.saturating_add(PROXY_PORTS)).contains(&overlay_port) {
        return Err(setting(
            "overlay-port",
            format!("{overlay_port} is one of the proxy's ports, from proxy-port {proxy_port} on"),
        ));
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
        device_mode: match flags.device_mode.or(file.device_mode).unwrap_or(DeviceChoice::Auto) {
            DeviceChoice::Auto | DeviceChoice::Veth => DeviceMode::Veth,
            DeviceChoice::Netkit => DeviceMode::Netkit,
        },
        local_delivery: flags.local_delivery.or(file.local_delivery).unwrap_or(LocalDelivery::Direct),
        masquerade,
        announce: flags.announce.or(file.announce) == Some(Switch::On),
        policy_dir: flags.policy_dir.or(file.policy_dir),
        cluster_file,
        cluster_feed,
        cluster_feed_group: flags.cluster_feed_group.or(file.cluster_feed_group),
        pools_from_cluster: from_cluster.then(FromCluster::default),
        routing: match flags.routing.or(file.routing).unwrap_or(RoutingChoice::Auto) {
            RoutingChoice::Auto => Routing::Auto,
            RoutingChoice::Native => Routing::Native,
            RoutingChoice::Overlay => Routing::Overlay,
        },
        overlay_port,
        overlay_vni,
        service_cidr,
        policy_enforcement: flags.policy_enforcement.or(file.policy_enforcement).unwrap_or(Enforcement::Default),
        policy_audit: flags.policy_audit.or(file.policy_audit) == Some(Switch::On),
        policy_keep_flows: flags.policy_keep_flows.or(file.policy_keep_flows) == Some(Switch::On),
        labels_timeout: Duration::from_millis(labels_timeout_ms),
        prepared_programs,
        proxy_timeout: Duration::from_millis(proxy_timeout_ms),
        envoy: flags.envoy.or(file.envoy),
        proxy_port,
        ip_rest_ms: flags.ip_rest_ms.or(file.ip_rest_ms).unwrap_or(30_000),
        gone_grace: Duration::from_millis(flags.gone_grace_ms.or(file.gone_grace_ms).unwrap_or(60_000)),
        audit_interval: Duration::from_millis(audit_interval_ms),
        health_interval: Duration::from_millis(health_interval_ms),
        selfcheck_interval: Duration::from_millis(selfcheck_interval_ms),
        timeline_keep: Duration::from_secs(flags.timeline_keep_s.or(file.timeline_keep_s).unwrap_or(86_400)),
        delegate: flags.delegate.or(file.delegate).map(delegate::socket).transpose()?,
        debug_programs: flags.debug_programs.or(file.debug_programs).unwrap_or(false),
        origins: BTreeMap::new(),
    })
}

/// `pools-from-cluster` requires a row and excludes other settings of pools.
fn alone(flags: &Flags, file: &File) -> Result<(), String> {
    for (name, is_set) in [
        ("ipv4-pool", flags.ipv4_pool.is_some() || file.ipv4_pool.is_some()),
        ("ipv6-pool", flags.ipv6_pool.is_some() || file.ipv6_pool.is_some()),
        ("pool", !file.pool.is_empty()),
    ] {
        if is_set {
            return Err(format!(
                "on beside {name}: the pools come from this node's row or from settings; leave one of the two out"
            ));
        }
    }
    let has_rows = flags.cluster_file.is_some()
        || file.cluster_file.is_some()
        || flags.cluster_feed.is_some()
        || file.cluster_feed.is_some();
    if has_rows { Ok(()) } else { Err("needs a list of nodes: set cluster-file or cluster-feed".to_owned()) }
}

/// The agent changes the directory's mode and group.
fn check_feed(feed: &Path, file: Option<&Path>, directories: &Directories) -> Result<(), String> {
    let shown = feed.display();
    if let Some(file) = file {
        return Err(format!(
            "{shown} beside cluster-file {}: the nodes come from the feed or from the file; leave one of the two out",
            file.display()
        ));
    }
    let most = delegate::MAX_SOCKET - wharf_feed::SOCKET.len() - 1;
    if !feed.is_absolute() || feed.as_os_str().len() > most {
        return Err(format!("{shown} is not an absolute path of at most {most} bytes"));
    }
    let Directories { run, state, bpffs } = directories;
    if feed.parent().is_none() || [run, state, bpffs].into_iter().any(|other| other.starts_with(feed)) {
        return Err(format!("{shown} is not a directory for the socket alone"));
    }
    Ok(())
}

fn source<T>(all: &[IpAddr], family: impl Fn(IpAddr) -> Option<T>) -> Result<Option<T>, ConfigError> {
    let mut of_family = all.iter().filter_map(|ip| family(*ip));
    let first = of_family.next();
    match of_family.next() {
        Some(_) => Err(setting("masquerade-source", "has two addresses of one family".to_owned())),
        None => Ok(first),
    }
}

/// UDP, RFC 7348.
const VXLAN_PORT: u16 = 4_789;
const DEFAULT_VNI: u32 = 88;
/// 24 bits.
const MAX_VNI: u32 = (1 << 24) - 1;

const MAX_LABELS_TIMEOUT_MS: u64 = 86_400_000;

/// The delete step's deadline, also the default.
const MAX_PROXY_TIMEOUT_MS: u64 = DeleteStep::AwaitProxy.deadline_ms();

pub(super) const DEFAULT_V4: IpNet = IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(10, 87, 0, 0), 16));
pub(super) const DEFAULT_V6: IpNet =
    IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::new(0xfd57, 0x4a7f, 0x0e8f, 0, 0, 0, 0, 0), 64));

fn pool_name(name: &str) -> Result<PoolName, ConfigError> {
    PoolName::parse(name).map_err(|e| setting("pool", e.to_string()))
}
