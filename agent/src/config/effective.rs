//! The settings as text.

use std::{collections::BTreeMap, net::IpAddr};

use wharf_cluster::routes::Routing;
use wharf_core::nat::Masquerade;

use super::{AgentConfig, delegate};

/// Settings at start; `GET /v1/config` overlays later changes.
#[must_use]
pub fn effective(config: &AgentConfig) -> BTreeMap<String, String> {
    let family = |v6: bool| {
        let cidrs = config.pools.first().map(|p| p.cidrs.as_slice()).unwrap_or_default();
        let texts: Vec<String> =
            cidrs.iter().filter(|c| matches!(c.addr(), IpAddr::V6(_)) == v6).map(ToString::to_string).collect();
        texts.join(",")
    };
    let masqueraded = |texts: &dyn Fn(&Masquerade) -> Vec<String>| {
        config.masquerade.as_ref().map(texts).unwrap_or_default().join(",")
    };
    let mut map = BTreeMap::from([
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
        ("device-mode".to_owned(), config.device_mode.to_string()),
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
        (
            "cluster-file".to_owned(),
            config.cluster_file.as_ref().map(|path| path.display().to_string()).unwrap_or_default(),
        ),
        (
            "cluster-feed".to_owned(),
            config.cluster_feed.as_ref().map(|path| path.display().to_string()).unwrap_or_default(),
        ),
        ("cluster-feed-group".to_owned(), config.cluster_feed_group.clone().unwrap_or_default()),
        ("pools-from-cluster".to_owned(), if config.pools_from_cluster.is_some() { "on" } else { "off" }.to_owned()),
        ("routing".to_owned(), routing(config.routing).to_owned()),
        ("overlay-port".to_owned(), config.overlay_port.to_string()),
        ("overlay-vni".to_owned(), config.overlay_vni.to_string()),
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
        ("gone-grace-ms".to_owned(), config.gone_grace.as_millis().to_string()),
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

const fn routing(routing: Routing) -> &'static str {
    match routing {
        Routing::Auto => "auto",
        Routing::Native => "native",
        Routing::Overlay => "overlay",
    }
}
