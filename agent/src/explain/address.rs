//! Explains addresses without an endpoint.

use std::{net::IpAddr, sync::Arc};

use ipnet::IpNet;
use wharf_api::{Explanation, Health, SubjectKind};
use wharf_core::store::LeaseOwner;
use wharf_kit::{clock, sync::lock};

use super::{
    MAX_LISTED, blank,
    cluster::{Elsewhere, Rows, identity},
    conclude, end_in_words, fact, look,
};
use crate::{
    config::AgentConfig,
    node::{Node, endpoints::Endpoints, health, lifecycle::Lifecycle, looks::Purpose, network::NodeNetwork, sources},
};

/// Network or broadcast address (IPv4), subnet-router anycast (IPv6, RFC 4291 2.6.1).
fn is_no_hosts(cidr: IpNet, ip: IpAddr) -> bool {
    cidr.max_prefix_len() - cidr.prefix_len() > 1 && (ip == cidr.network() || ip.is_ipv4() && ip == cidr.broadcast())
}

pub(super) async fn explain(node: &Arc<Node>, ip: IpAddr) -> Explanation {
    let Lifecycle { config, network, endpoints, kernel, .. } = &*node.life;
    let rows = Rows::of(&network.cluster, config, ip);
    let (mut answer, is_elsewhere) = by_rows(config, network, endpoints, &rows);
    if is_elsewhere {
        let kernel = Arc::clone(kernel);
        let row = look(node, Purpose::Explanation, async move { kernel.observe_peer_rows(&[ip]).await }).await;
        let row = row.map(|rows| rows.into_iter().next().flatten());
        answer.facts.push(fact("identity", identity(row)));
    }
    answer
}

/// Also returns whether the address is outside this node's pools and a row of the cluster claims it.
fn by_rows(config: &AgentConfig, network: &NodeNetwork, endpoints: &Endpoints, rows: &Rows<'_>) -> (Explanation, bool) {
    let ip = rows.ip;
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
    let mut claims = if in_pool.is_some() { rows.claims() } else { Vec::new() };
    let mut is_elsewhere = false;
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
        (None, None) if in_pool.is_some() => {
            let free = match &last {
                Some(last) => {
                    let ago = conclude::span(now.saturating_sub(last.ended.at_unix_ms));
                    let who = &last.who.attachment;
                    format!("free; {who} had it last ({} {ago} ago)", end_in_words(last.ended.how))
                }
                None => "free; nobody has had it as far back as the agent remembers".to_owned(),
            };
            match std::mem::take(&mut claims).as_slice() {
                [] => (Health::Ok, free),
                claims => (Health::Degraded, format!("{free}; but also {}", claims.join("; "))),
            }
        }
        (None, None) => {
            if let Some(Elsewhere { health, summary, facts: of_cluster }) = rows.elsewhere() {
                is_elsewhere = true;
                facts.extend(of_cluster);
                (health, summary)
            } else {
                let pools = cidrs.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
                (Health::Ok, format!("outside this node's pools ({pools}); Wharf never gives it out"))
            }
        }
    };
    let mut answer = blank(ip.to_string(), SubjectKind::Address, health, summary);
    if let Some(cidr) = in_pool {
        let pool = config.pools.iter().find(|p| p.cidrs.contains(cidr));
        let name = pool.map_or_else(|| "default".to_owned(), |p| p.name.to_string());
        answer.facts.push(fact("pool", format!("{name} ({cidr})")));
        answer.facts.extend(rows.overlaps(*cidr).into_iter().map(|overlap| fact("overlap", overlap)));
    }
    answer.facts.extend(facts);
    answer.facts.extend(claims.into_iter().map(|claim| fact("conflict", claim)));
    let senders = sources::allowed_to(&endpoints.registry, ip).into_iter().take(MAX_LISTED);
    answer.facts.extend(senders.map(|(id, how)| fact("may be a source of", format!("endpoint {id} ({how})"))));
    (answer, is_elsewhere)
}
