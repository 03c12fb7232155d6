//! Requests to the service.

use wharf_core::{
    bandwidth::Limit,
    ids::Attachment,
    nat::{Protocol, PublishedPort},
};
use wharf_delegate::v1;

use crate::endpoint::create::{CreateSpec, External};

/// An attachment's key.
#[must_use]
pub fn key(attachment: &Attachment) -> v1::AttachmentKey {
    v1::AttachmentKey {
        network: attachment.network.to_string(),
        container_id: attachment.container_id.to_string(),
        interface: attachment.ifname.to_string(),
    }
}

#[must_use]
pub fn add(spec: &CreateSpec) -> v1::AddRequest {
    let limit = |l: Option<Limit>| l.map(|l| v1::Limit { rate: l.rate.get(), burst: l.burst.get() });
    let (ipam, gateways) = match &spec.external {
        Some(External::Ipam { plugin, gateways }) => (Some(plugin.clone()), gateways.as_slice()),
        _ => (None, [].as_slice()),
    };
    v1::AddRequest {
        key: Some(key(&spec.attachment)),
        netns: spec.netns.display().to_string(),
        pool: spec.pool.as_ref().map(ToString::to_string),
        mtu: spec.mtu,
        mac: spec.mac.map(|mac| mac.to_string()),
        addresses: spec.ips.iter().map(ToString::to_string).collect(),
        labels: spec.labels.iter().map(ToString::to_string).collect(),
        pod_name: spec.pod_name.clone(),
        pod_namespace: spec.pod_namespace.clone(),
        runtime: spec.runtime.as_ref().map(ToString::to_string),
        ports: spec.ports.iter().map(port).collect(),
        masquerade: spec.masquerade,
        ingress: limit(spec.bandwidth.ingress),
        egress: limit(spec.bandwidth.egress),
        source_prefixes: spec.sources.iter().map(ToString::to_string).collect(),
        ipam,
        gateways: gateways.iter().map(ToString::to_string).collect(),
        routes: spec.routes.as_ref().map(|routes| v1::Routes {
            routes: routes
                .iter()
                .map(|r| v1::Route { dst: r.dst.to_string(), gateway: r.gw.map(|gw| gw.to_string()) })
                .collect(),
        }),
    }
}

fn port(port: &PublishedPort) -> v1::Port {
    let protocol = match port.protocol {
        Protocol::Tcp => v1::port::Protocol::Tcp,
        Protocol::Udp => v1::port::Protocol::Udp,
        Protocol::Sctp => v1::port::Protocol::Sctp,
    };
    v1::Port {
        protocol: protocol.into(),
        host_ip: port.host_ip.map(|ip| ip.to_string()),
        host_port: port.host_port.get().into(),
        container_port: port.container_port.get().into(),
    }
}
