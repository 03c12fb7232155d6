//! Requests about one endpoint: text to types of the core.

use std::{net::Ipv4Addr, time::Duration};

use ipnet::IpNet;
use tokio::time::Instant;
use wharf_api::{EndpointCreate, EndpointPatch, ErrorCode, NamedPort, PublishedPort};
use wharf_core::{
    bandwidth::{Bandwidth, Limit},
    identity::Label,
    identity_allocator::RESERVED_SOURCE,
    ids::{Attachment, ContainerId, IfName, MacAddr, NetworkName, PoolName, PortName, RuntimeName},
    kernel::MIN_MTU,
    mtu::MAX_MTU,
    sources::SourcePrefixes,
};

use crate::{
    endpoint::create::CreateSpec,
    node::{edit::Edit, health},
    rest::{
        addressing,
        error::{Answer, Failure, invalid},
        id::{self, IdRef},
    },
};

/// Runtimes allow a minute or more.
const DEFAULT_DEADLINE: Duration = Duration::from_secs(30);
const MAX_DEADLINE: Duration = Duration::from_secs(600);
/// Kubernetes objects have a few dozen.
const MAX_LABELS: usize = 256;
const MAX_PORTS: usize = 1_024;
/// Key prefix of selectors for any source.
const ANY_SOURCE: &str = "any";

fn parse_labels(labels: &[String]) -> Answer<std::collections::BTreeSet<Label>> {
    if labels.len() > MAX_LABELS {
        return Err(invalid(format!("read labels: {} of them, at most {MAX_LABELS} are taken", labels.len())));
    }
    let parse = |text: &String| {
        let label: Label = text.parse().map_err(|e| invalid(format!("read labels: {e}")))?;
        if label.source == RESERVED_SOURCE {
            return Err(invalid(format!("read labels: {label}: only the agent gives {RESERVED_SOURCE} labels")));
        }
        if label.source == ANY_SOURCE {
            let why = "stands for every source in a policy; give the label's own source";
            return Err(invalid(format!("read labels: {label}: {ANY_SOURCE} {why}")));
        }
        Ok(label)
    };
    let labels = labels.iter().map(parse).collect::<Answer<std::collections::BTreeSet<Label>>>()?;
    // Labels of one key are adjacent. A selector would match only one value.
    let same_key = |(a, b): &(&Label, &Label)| (&a.source, &a.key) == (&b.source, &b.key);
    match labels.iter().zip(labels.iter().skip(1)).find(same_key) {
        Some((a, b)) => Err(invalid(format!("read labels: {a} and {b} are two values of one label; leave one out"))),
        None => Ok(labels),
    }
}

/// # Errors
/// 400 with the rule.
pub fn parse_edit(body: &EndpointPatch) -> Answer<Edit> {
    let named = |(name, port): (&String, &Option<NamedPort>)| {
        let name = PortName::parse(name).map_err(|e| invalid(format!("read named_ports: {e}")))?;
        Ok((name, *port))
    };
    Ok(Edit {
        labels: body.labels.as_deref().map(parse_labels).transpose()?,
        enforcement: body.policy_enforcement,
        named_ports: body.named_ports.iter().map(named).collect::<Answer<_>>()?,
        sources: body.source_prefixes.as_ref().map(|list| parse_sources("change endpoint", list)).transpose()?,
    })
}

fn parse_ports(attachment: &Attachment, ports: &[PublishedPort]) -> Answer<Vec<PublishedPort>> {
    if ports.len() > MAX_PORTS {
        let count = ports.len();
        return Err(invalid(format!("create endpoint {attachment}: {count} ports, at most {MAX_PORTS} are taken")));
    }
    let mut read: Vec<PublishedPort> = Vec::with_capacity(ports.len());
    for port in ports {
        if port.host_ip.is_some_and(|ip| ip.is_multicast() || ip == Ipv4Addr::BROADCAST) {
            let rule = "a port is published on an address of one node";
            return Err(invalid(format!("create endpoint {attachment}: port {port}: {rule}")));
        }
        if let Some(other) = read.iter().find(|other| other.overlaps(port)) {
            return Err(invalid(format!("create endpoint {attachment}: port {port} is asked for beside {other}")));
        }
        read.push(*port);
    }
    Ok(read)
}

fn parse_bandwidth(attachment: &Attachment, asked: wharf_api::Bandwidth) -> Answer<Bandwidth> {
    let limit = |direction: &str, asked: Option<wharf_api::BandwidthLimit>| {
        let Some(asked) = asked else { return Ok(None) };
        Limit::of(asked.rate, asked.burst)
            .map_err(|e| invalid(format!("create endpoint {attachment}: limit of {direction}: {e}")))
    };
    Ok(Bandwidth { ingress: limit("ingress", asked.ingress)?, egress: limit("egress", asked.egress)? })
}

fn parse_sources(what: &str, prefixes: &[IpNet]) -> Answer<SourcePrefixes> {
    SourcePrefixes::new(prefixes.to_vec()).map_err(|e| invalid(format!("{what}: {e}")))
}

/// Parses a create request; `text` is the path's id.
///
/// # Errors
/// 400 with the rule.
pub fn create_spec(text: &str, body: EndpointCreate) -> Answer<CreateSpec> {
    let bad = |e: wharf_core::ids::IdError| invalid(format!("create endpoint: {e}"));
    let attachment = Attachment {
        network: NetworkName::parse(&body.network).map_err(bad)?,
        container_id: ContainerId::parse(&body.container_id).map_err(bad)?,
        ifname: IfName::parse(&body.ifname).map_err(bad)?,
    };
    if health::is_reserved(&attachment) {
        let message =
            format!("create endpoint {attachment}: network and container id {} are the agent's own", health::NAME);
        return Err(invalid(message));
    }
    match id::parse(text)? {
        IdRef::Attachment(c, i) if c == attachment.container_id && i == attachment.ifname => {}
        IdRef::Attachment(..) => {
            return Err(invalid(format!("create endpoint {attachment}: the id in the path names another attachment")));
        }
        _ => return Err(invalid(format!("create endpoint {attachment}: the id must be cni-attachment-id:ID:IFNAME"))),
    }
    if !body.netns.starts_with('/') || body.netns.len() > 4096 || body.netns.contains('\0') {
        return Err(Failure::new(
            ErrorCode::InvalidNetns,
            format!("create endpoint {attachment}: netns must be an absolute path of at most 4096 bytes"),
        ));
    }
    if let Some(mtu) = body.mtu.filter(|mtu| !(MIN_MTU..=MAX_MTU).contains(mtu)) {
        return Err(invalid(format!("create endpoint {attachment}: mtu {mtu} is not within {MIN_MTU} to {MAX_MTU}")));
    }
    let of_family = |v6: bool| body.ips.iter().filter(|ip| ip.is_ipv6() == v6).count();
    if of_family(false) > 1 || of_family(true) > 1 {
        return Err(invalid(format!(
            "create endpoint {attachment}: at most one address of each family can be asked for"
        )));
    }
    let external = addressing::external(&attachment, &body)?;
    for (name, value) in [("pod_name", &body.pod_name), ("pod_namespace", &body.pod_namespace)] {
        if value.as_ref().is_some_and(|v| v.len() > 253 || v.chars().any(char::is_control)) {
            return Err(invalid(format!(
                "create endpoint {attachment}: {name} must be at most 253 bytes without control characters"
            )));
        }
    }
    let deadline = body.deadline_ms.map_or(DEFAULT_DEADLINE, Duration::from_millis).min(MAX_DEADLINE);
    Ok(CreateSpec {
        pool: body.pool.as_deref().map(PoolName::parse).transpose().map_err(bad)?,
        mac: body.mac.as_deref().map(str::parse::<MacAddr>).transpose().map_err(bad)?,
        labels: parse_labels(&body.labels)?,
        netns: body.netns.into(),
        mtu: body.mtu,
        ips: body.ips,
        pod_name: body.pod_name,
        pod_namespace: body.pod_namespace,
        runtime: body.runtime.as_deref().map(RuntimeName::parse).transpose().map_err(bad)?,
        ports: parse_ports(&attachment, &body.ports)?,
        masquerade: body.masquerade,
        bandwidth: parse_bandwidth(&attachment, body.bandwidth)?,
        sources: parse_sources(&format!("create endpoint {attachment}"), &body.source_prefixes)?,
        external,
        routes: addressing::routes(&attachment, body.routes)?,
        deadline: Instant::now() + deadline,
        attachment,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_has_one_value() {
        let parse = |labels: &[&str]| parse_labels(&labels.iter().map(|l| (*l).to_owned()).collect::<Vec<_>>());
        assert_eq!(parse(&["k8s:a=1", "cni:a=2", "k8s:b=1", "k8s:a=1"]).expect("labels").len(), 3);
        for source in ["any", "reserved"] {
            assert!(parse(&[&format!("{source}:a=1")]).is_err(), "{source}");
        }
        for labels in [&["k8s:a=1", "k8s:a=2"], &["k8s:a", "k8s:a=2"]] {
            let why = format!("{:?}", parse(labels).expect_err("two values"));
            assert!(why.contains("two values of one label"), "{why}");
        }
    }
}
