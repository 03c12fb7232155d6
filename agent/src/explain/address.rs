//! Explains addresses without an endpoint.

use std::net::IpAddr;

use ipnet::IpNet;
use wharf_api::{Explanation, Health, SubjectKind};
use wharf_cluster::feed::FeedPod;
use wharf_core::{kernel::NextHop, store::LeaseOwner};
use wharf_kit::{clock, sync::lock};

use super::{MAX_LISTED, blank, conclude, end_in_words, fact};
use crate::{
    cluster::Cluster,
    config::AgentConfig,
    node::{endpoints::Endpoints, health, network::NodeNetwork, sources},
};

/// Network or broadcast address (IPv4), subnet-router anycast (IPv6, RFC 4291 2.6.1).
fn is_no_hosts(cidr: IpNet, ip: IpAddr) -> bool {
    cidr.max_prefix_len() - cidr.prefix_len() > 1 && (ip == cidr.network() || ip.is_ipv4() && ip == cidr.broadcast())
}

fn of_cluster(cluster: &Cluster, own: &str, ip: IpAddr) -> Option<String> {
    if let Some((pod, has_namespace)) = cluster.feed().and_then(|feed| feed.owner_of(ip))
        && !pod.is_of(own)
    {
        let unknown =
            if has_namespace { "" } else { "; its namespace has no row: rules by labels of it accept nothing" };
        let FeedPod { namespace, name, node, .. } = pod;
        return Some(format!("an address of pod {namespace}/{name} on node {node} of the cluster{unknown}"));
    }
    let cluster = cluster.in_force();
    let node = cluster.nodes.of_address(ip)?;
    if node.addresses.contains(&ip) {
        return Some(format!("an address of node {} of the cluster", node.name));
    }
    let to = cluster.destinations.iter().find(|to| to.cidr.contains(&ip))?;
    Some(match &to.via {
        Ok(via) => {
            let by = if matches!(via, NextHop::Overlay { .. }) { "by " } else { "" };
            format!("in {} of node {}: packets to it go {by}{via}", to.cidr, node.name)
        }
        Err(why) => format!("in {} of node {}, to which this node has no route: {why}", to.cidr, node.name),
    })
}

pub(super) fn explain(config: &AgentConfig, network: &NodeNetwork, endpoints: &Endpoints, ip: IpAddr) -> Explanation {
    let now = clock::unix_ms();
    let (lease, rest, cidrs, withheld) = {
        let ipam = lock(&network.addresses.ipam);
        let rest = ipam.resting().into_iter().find(|r| r.rest.ip == ip);
        (ipam.get(ip).cloned(), rest, ipam.cidrs(), ipam.withheld(ip).map(|w| w.why.clone()))
    };
    let in_pool = cidrs.iter().find(|cidr| cidr.contains(&ip));
    let last = endpoints.timelines.past(|p| p.who.addresses.contains(&ip)).into_iter().next();
    let out_of_service =
        endpoints.leftovers.out_of_service.list().iter().find(|q| q.addresses.contains(&ip)).map(|q| q.id);
    let mut facts = Vec::new();
    let (health, summary) = match (&lease, rest) {
        _ if out_of_service.is_some() => {
            let id = out_of_service.map_or_else(String::new, |id| id.to_string());
            (
                Health::Degraded,
                format!("reserved by endpoint {id}, whose record is out of service; `wharf explain {id}`"),
            )
        }
        (Some(lease), _) => {
            let held = conclude::since(now, lease.since_unix_ms);
            match &lease.owner {
                LeaseOwner::Node => {
                    (Health::Ok, "the node's own: endpoints have it as their gateway, and it is never given out".into())
                }
                owner if health::holds(owner) => (
                    Health::Ok,
                    format!("held {held} for the health endpoint; the agent keeps it and does not give it back"),
                ),
                LeaseOwner::Caller { name } => match (lease.owner.link_without_record(), lease.owner.kept()) {
                    (Some(link), _) => {
                        let what = format!("held {held} for the endpoint behind link {link}, whose record was lost");
                        (Health::Degraded, what)
                    }
                    (None, Some(of)) => {
                        let mend = format!("`wharf ipam release {ip}` gives it back");
                        (Health::Ok, format!("held {held}: the delete of {of} was asked to keep its address; {mend}"))
                    }
                    (None, None) => {
                        (Health::Ok, format!("held {held} by a caller of the API, {name:?}; no endpoint uses it"))
                    }
                },
                LeaseOwner::Attachment { attachment, epoch } => {
                    facts.push(fact("owner", format!("{attachment} (epoch {epoch})")));
                    let text = "leased to an attachment whose endpoint is not there; one that is created or deleted at this \
                                moment is no fault, otherwise `wharf audit --repair` gives it back";
                    (Health::Degraded, format!("{held}: {text}"))
                }
            }
        }
        (None, _) if withheld.is_some() => {
            let why = withheld.unwrap_or_default();
            (Health::Degraded, format!("not given out while {why} overlaps the pool; `wharf audit` says what to do"))
        }
        (None, Some(rest)) => {
            let since = rest.rest.since_unix_ms;
            let over = since.saturating_add(config.ip_rest_ms);
            facts.push(fact("last owner", rest.rest.last_owner));
            let ends = match (&rest.blocked, over.checked_sub(now)) {
                (Some(why), _) => {
                    format!("its time is over, but something still speaks for it: {why}; it is looked at again")
                }
                (None, Some(left)) if left > 0 => {
                    format!("it is looked at in {}, and free when nothing speaks for it", conclude::span(left))
                }
                (None, _) => "its time is over; it is free when nothing speaks for it".to_owned(),
            };
            (Health::Ok, format!("resting {} after it was given back: {ends}", conclude::since(now, since)))
        }
        (None, None) if in_pool.is_some_and(|cidr| is_no_hosts(*cidr, ip)) => {
            (Health::Ok, "reserved: the pool's first or last address, which no host may have".to_owned())
        }
        (None, None) => match (in_pool, &last) {
            (None, _) => {
                let pools = || cidrs.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
                let outside = || format!("outside this node's pools ({}); Wharf never gives it out", pools());
                (Health::Ok, of_cluster(&network.cluster, &config.node_name, ip).unwrap_or_else(outside))
            }
            (Some(_), Some(last)) => {
                let ago = conclude::span(now.saturating_sub(last.ended.at_unix_ms));
                let who = &last.who.attachment;
                (Health::Ok, format!("free; {who} had it last ({} {ago} ago)", end_in_words(last.ended.how)))
            }
            (Some(_), None) => (Health::Ok, "free; nobody has had it as far back as the agent remembers".to_owned()),
        },
    };
    let mut answer = blank(ip.to_string(), SubjectKind::Address, health, summary);
    if let Some(cidr) = in_pool {
        let pool = config.pools.iter().find(|p| p.cidrs.contains(cidr));
        let name = pool.map_or_else(|| "default".to_owned(), |p| p.name.to_string());
        answer.facts.push(fact("pool", format!("{name} ({cidr})")));
    }
    answer.facts.extend(facts);
    let senders = sources::allowed_to(&endpoints.registry, ip).into_iter().take(MAX_LISTED);
    answer.facts.extend(senders.map(|(id, how)| fact("may be a source of", format!("endpoint {id} ({how})"))));
    answer
}
