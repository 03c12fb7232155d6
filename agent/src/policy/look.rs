//! Views of policy, from the kernel's tables.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv6Addr},
};

use ipnet::IpNet;
use wharf_api::{
    EndpointPolicy, EndpointRules, Namespace, POLICY_ROW_PEERS_MOST, PolicyExplanation, PolicyInfo, PolicyJudgement,
    PolicyList, PolicyProtocol, PolicyRedirect, PolicyRow, PolicyRule, PolicySizes, PolicyVerdict,
};
use wharf_common::{Direction as EventDirection, DropReason, Event, flow};
use wharf_core::{
    ids::EndpointId,
    policy::{Enforcement, PolicyRows},
};
use wharf_enforce::{
    members::Place,
    rows::{cell_key, key},
    state::State,
};
use wharf_policy::{
    compile::{Hit, L4, LookUp, PeerClass, PortClass, PortPrefix, Rows, RuleIndex, Ruling, SetId, Tables},
    model::{self, Direction, Origin, Protocol, Tier},
    oracle::{Destination, Verdict},
};

use super::{Inner, Policy, error::PolicyError};
use crate::proxy;

/// A packet to explain.
#[derive(Debug, Clone, Copy)]
pub struct Ask {
    /// Sender, if an endpoint.
    pub from: Option<EndpointId>,
    pub source: IpAddr,
    /// Receiver, if an endpoint.
    pub to: Option<EndpointId>,
    pub destination: IpAddr,
    /// Port or ICMP type.
    pub to_port: Destination,
}

/// RFC 8200, 4.7; for protocols without ports.
const NO_NEXT_HEADER: u8 = 59;

const NAMESPACES_AWAITED: &str = "the producer of the cluster feed has not sent every namespace: rules that select by \
                                  labels of the others accept nothing, and deny";

/// `None` for an ICMP type over 255 (RFC 792, RFC 4443).
#[must_use]
pub fn destination(protocol: PolicyProtocol, port: u16) -> Option<Destination> {
    let icmp = |v6| Some(Destination::Icmp { v6, kind: u8::try_from(port).ok()? });
    let protocol = match protocol {
        PolicyProtocol::Tcp => Protocol::Tcp,
        PolicyProtocol::Udp => Protocol::Udp,
        PolicyProtocol::Sctp => Protocol::Sctp,
        PolicyProtocol::Icmp => return icmp(false),
        PolicyProtocol::Icmpv6 => return icmp(true),
        PolicyProtocol::Other => return Some(Destination::Other(NO_NEXT_HEADER)),
        PolicyProtocol::Unknown => return Some(Destination::Unknown),
    };
    Some(Destination::Ports { protocol, port })
}

impl Policy {
    /// Policies and revisions.
    pub async fn list(&self) -> PolicyList {
        let inner = self.lock().await;
        let sizes = inner.state.sizes().unwrap_or_default();
        let count = |n: usize| n as u64;
        let mut policies = Vec::new();
        for policy in inner.state.inputs().documents.iter().flat_map(|(_, document)| document.policies.iter()) {
            policies.push(info(policy, &inner.state));
        }
        PolicyList {
            revision: inner.state.inputs().documents.revision,
            realized: inner.state.realized(),
            enforcement: inner.state.inputs().enforcement,
            audit: self.mode.audits,
            problem: problem(&inner),
            rows: PolicySizes {
                peers: count(sizes.ipcache),
                peers_limit: count(inner.state.limits().ipcache),
                ports: count(sizes.ports),
                ports_limit: count(inner.state.limits().ports),
                cells: count(sizes.rules),
                cells_limit: count(inner.state.limits().rules),
                sets: count(sizes.sets),
                sets_limit: count(inner.state.limits().sets),
            },
            policies,
        }
    }

    /// Namespaces with labels.
    pub async fn namespaces(&self) -> Vec<Namespace> {
        let inner = self.lock().await;
        inner
            .state
            .inputs()
            .documents
            .namespaces()
            .map(|(name, labels)| Namespace { name: name.to_owned(), labels })
            .collect()
    }

    /// The verdict on a flow's first packet.
    pub async fn explain(&self, ask: Ask) -> PolicyExplanation {
        let inner = self.lock().await;
        let look = self.proxy.redirects.look();
        let judge = |id, direction, peer| {
            let mut judgement = judge(&inner.state, id, direction, peer, ask.to_port);
            if let Some(PolicyRedirect { port, passes, fails_open, .. }) = judgement.redirect {
                judgement.redirect = Some(look.redirect(port, passes, fails_open));
            }
            judgement
        };
        let egress = ask.from.map(|id| judge(id, Direction::Egress, ask.destination));
        let from_node = ask.from.is_none() && inner.state.inputs().node.contains(&ask.source);
        let ingress = ask.to.map(|id| match from_node {
            true => open(id),
            false => judge(id, Direction::Ingress, ask.source),
        });
        let denies = |judgement: &Option<PolicyJudgement>| {
            judgement.as_ref().is_some_and(|judgement| judgement.verdict == PolicyVerdict::Deny)
        };
        let redirect = |judgement: &Option<PolicyJudgement>| judgement.as_ref().and_then(|j| j.redirect.clone());
        let is_redirected = |judgement: &Option<PolicyJudgement>| redirect(judgement).is_some();
        let is_unserved = |judgement: &Option<PolicyJudgement>| {
            let drops = |way: PolicyRedirect| way.problem.is_some() && !way.fails_open;
            !self.mode.audits && redirect(judgement).is_some_and(drops)
        };
        let ends = [&egress, &ingress];
        let drops = ends.iter().any(|end| denies(end) || is_unserved(end));
        let verdict = if drops { PolicyVerdict::Deny } else { PolicyVerdict::Accept };
        let note = if from_node && ask.to.is_some() {
            Some("the node's own packets always reach its endpoints".to_owned())
        } else if self.mode.audits && verdict == PolicyVerdict::Deny {
            Some("audit mode: the packet passes, and is counted".to_owned())
        } else if self.mode.audits && ends.iter().any(|end| is_redirected(end)) {
            Some("audit mode: the connection does not go through the proxy, and passes unseen".to_owned())
        } else if egress.as_ref().is_some_and(|judgement| judgement.enforced)
            && !denies(&ingress)
            && self.settings.services.iter().any(|net| net.contains(&ask.destination))
        {
            Some(if verdict == PolicyVerdict::Deny {
                "an address of a service: what the node translates it to is judged; ask for the endpoint behind it"
                    .to_owned()
            } else {
                "an address of a service: deny rules about the endpoint behind it, and the rules of that endpoint, still \
                 count; ask for the endpoint behind it"
                    .to_owned()
            })
        } else {
            problem(&inner)
                .or_else(|| inner.state.inputs().documents.awaits_namespaces.then(|| NAMESPACES_AWAITED.to_owned()))
        };
        PolicyExplanation { verdict, egress, ingress, note }
    }

    /// Counts, revisions and problem.
    pub async fn summary(&self) -> Summary {
        let inner = self.lock().await;
        Summary {
            policies: inner.state.inputs().documents.iter().map(|(_, document)| document.policies.len()).sum(),
            revision: inner.state.inputs().documents.revision,
            realized: inner.state.realized(),
            enforcement: inner.state.inputs().enforcement,
            audits: self.mode.audits,
            without_labels: inner.state.inputs().members.without_labels(),
            problem: problem(&inner),
        }
    }

    /// Why current rules drop each event's packet.
    pub async fn why(&self, events: &[Event]) -> Vec<Option<String>> {
        if !events.iter().any(of_policy) {
            return vec![None; events.len()];
        }
        let inner = self.lock().await;
        events.iter().map(|event| why(&inner.state, event)).collect()
    }

    /// An endpoint's rule sets, with rows and counters.
    ///
    /// # Errors
    /// Unreadable rows.
    pub async fn endpoint(&self, id: EndpointId) -> Result<EndpointPolicy, PolicyError> {
        let inner = self.lock().await;
        let kernel = if inner.state.is_active() { self.kernel.observe_policy().await? } else { PolicyRows::default() };
        let rules = |direction| rules(&inner.state, &kernel, id, direction);
        let own = inner.state.inputs().members.get(id).map(|place| place.own).unwrap_or_default();
        Ok(EndpointPolicy {
            endpoint: id.get(),
            enforcement: match (inner.state.inputs().enforcement, own) {
                (Enforcement::Never, _) | (_, Enforcement::Default) => inner.state.inputs().enforcement,
                (_, own) => own,
            },
            audit: self.mode.audits,
            desired_revision: inner.state.inputs().documents.revision,
            realized_revision: inner.state.realized(),
            ingress: rules(Direction::Ingress),
            egress: rules(Direction::Egress),
        })
    }
}

/// Result of [`Policy::summary`].
#[derive(Debug, Clone)]
pub struct Summary {
    /// Number of policies.
    pub policies: usize,
    /// Wanted revision.
    pub revision: u64,
    /// Revision in force.
    pub realized: u64,
    /// When policy is enforced.
    pub enforcement: Enforcement,
    /// Audit mode: denied packets pass.
    pub audits: bool,
    /// Endpoints without known labels.
    pub without_labels: usize,
    /// Current problem.
    pub problem: Option<String>,
}

fn of_policy(event: &Event) -> bool {
    event.reason == DropReason::PolicyDenied as u32 || event.reason == DropReason::PeerPolicyDenied as u32
}

fn why(state: &State, event: &Event) -> Option<String> {
    if !of_policy(event) {
        return None;
    }
    let own = u16::try_from(event.endpoint_id).ok().and_then(|id| EndpointId::try_from(id).ok())?;
    let address = |bytes: [u8; 16]| Ipv6Addr::from(bytes).to_canonical();
    let (source, target) = (address(event.source), address(event.destination));
    let sends = event.direction == EventDirection::Egress as u32;
    let by_own = event.reason == DropReason::PolicyDenied as u32;
    let by_sender = sends == by_own;
    let peer = if by_sender { target } else { source };
    let judges =
        if by_own { own } else { state.inputs().members.by_address(if by_sender { source } else { target })? };
    let port = u16::from_be_bytes(event.destination_port);
    let to = match event.protocol {
        flow::TCP => Destination::Ports { protocol: Protocol::Tcp, port },
        flow::UDP => Destination::Ports { protocol: Protocol::Udp, port },
        flow::SCTP => Destination::Ports { protocol: Protocol::Sctp, port },
        flow::ICMP => Destination::Icmp { v6: false, kind: event.source_port[0] },
        flow::ICMPV6 => Destination::Icmp { v6: true, kind: event.source_port[0] },
        other => Destination::Other(other),
    };
    let direction = if by_sender { Direction::Egress } else { Direction::Ingress };
    let judgement = judge(state, judges, direction, peer, to);
    if judgement.verdict == PolicyVerdict::Accept {
        return None;
    }
    Some(match judgement.rule {
        Some(PolicyRule { file, line, document, field }) => format!("{file}:{line}: {document}, {field}"),
        None => format!("no rule allows it ({})", judgement.isolated_by.join(", ")),
    })
}

fn problem(inner: &Inner) -> Option<String> {
    inner.state.problem().map(str::to_owned).or_else(|| inner.files.problem())
}

fn info(policy: &model::Policy, state: &State) -> PolicyInfo {
    let model::PolicyName { kind, namespace, name } = policy.name.clone();
    let of = |direction| policy.rules.iter().filter(|rule| rule.direction == direction).count() as u64;
    let selects = |place: &Place| place.member.endpoint.is_subject(&policy.subject);
    PolicyInfo {
        kind,
        namespace: (!namespace.is_empty()).then_some(namespace),
        name,
        tier: tier(policy.tier).to_owned(),
        priority: (policy.tier != Tier::Namespaced).then_some(policy.priority),
        subject: policy.subject.to_string(),
        isolates: isolates(policy),
        ingress_rules: of(Direction::Ingress),
        egress_rules: of(Direction::Egress),
        file: policy.origin.file.to_string(),
        line: policy.origin.line,
        endpoints: state.inputs().members.iter().filter(|(_, place)| selects(place)).map(|(id, _)| id.get()).collect(),
    }
}

fn isolates(policy: &model::Policy) -> Vec<String> {
    let directions = [(policy.isolates.ingress, "ingress"), (policy.isolates.egress, "egress")];
    directions.into_iter().filter(|(isolates, _)| *isolates).map(|(_, name)| name.to_owned()).collect()
}

const fn tier(tier: Tier) -> &'static str {
    match tier {
        Tier::Admin => "admin",
        Tier::Namespaced => "namespaced",
        Tier::Baseline => "baseline",
    }
}

fn open(id: EndpointId) -> PolicyJudgement {
    PolicyJudgement {
        endpoint: id.get(),
        enforced: false,
        verdict: PolicyVerdict::Accept,
        rule: None,
        redirect: None,
        isolated_by: Vec::new(),
        rule_set: 0,
        peer_class: 0,
        port_class: 0,
    }
}

fn judge(state: &State, id: EndpointId, direction: Direction, peer: IpAddr, to: Destination) -> PolicyJudgement {
    let Some(tables) = state.tables() else { return open(id) };
    let Some(LookUp { set, class, port, decision }) = tables.look_up(key(id), direction, peer, to) else {
        return open(id);
    };
    let redirect = decision.listener.and_then(|port| Some((port, tables.listeners.get(&port)?)));
    let redirect = redirect.map(|(port, listener)| PolicyRedirect {
        port: port.0,
        passes: proxy::passes(&listener.requests),
        fails_open: listener.requests.fails_open,
        problem: None,
    });
    let (rule, isolated_by) = match tables.explain(key(id), direction, decision) {
        Some(Verdict::Accept { rule, .. }) => (rule.map(rule_of), Vec::new()),
        Some(Verdict::Deny { rule, isolated_by }) => {
            (rule.map(rule_of), isolated_by.iter().map(ToString::to_string).collect())
        }
        Some(Verdict::DenyUnknown) | None => (None, Vec::new()),
    };
    PolicyJudgement {
        enforced: set != SetId::NONE,
        verdict: if decision.accept { PolicyVerdict::Accept } else { PolicyVerdict::Deny },
        rule,
        redirect,
        isolated_by,
        rule_set: set.0,
        peer_class: class.0,
        port_class: port.0,
        ..open(id)
    }
}

fn rule_of(origin: &Origin) -> PolicyRule {
    let Origin { file, line, document, field } = origin;
    PolicyRule { file: file.to_string(), line: *line, document: document.to_string(), field: field.clone() }
}

fn rules(state: &State, kernel: &PolicyRows, id: EndpointId, direction: Direction) -> EndpointRules {
    let Some((tables, sets)) = state.tables().and_then(|t| Some((t, t.sets.get(&key(id))?))) else {
        return EndpointRules::default();
    };
    let set = sets.of(direction);
    let Some(rows) = tables.rules.get(&set) else { return EndpointRules::default() };
    let place = state.inputs().members.get(id).map(|place| &place.member.endpoint);
    let says = |policy: &&model::Policy| {
        let isolates = match direction {
            Direction::Ingress => policy.isolates.ingress,
            Direction::Egress => policy.isolates.egress,
        };
        let has_rule = policy.rules.iter().any(|rule| rule.direction == direction);
        (isolates || has_rule) && place.is_some_and(|endpoint| endpoint.is_subject(&policy.subject))
    };
    let policies = state.inputs().documents.iter().filter(|(_, document)| document.policies.iter().any(|p| says(&p)));
    let mut peers: BTreeMap<PeerClass, Vec<&IpNet>> = BTreeMap::new();
    for (net, known) in tables.ipcache.iter() {
        peers.entry(known.class).or_default().push(net);
    }
    let mut shown = Vec::new();
    for ((class, port), cell) in &rows.cells {
        let judged = kernel.cells.get(&cell_key(set, (*class, *port))).map(|(_, judged)| *judged).unwrap_or_default();
        let of_class = peers.get(class).map(Vec::as_slice).unwrap_or_default();
        let any = *class == PeerClass::ANY;
        let told = of_class.iter().take(POLICY_ROW_PEERS_MOST).map(ToString::to_string).collect();
        let row = PolicyRow {
            peers: if any { vec!["any".to_owned()] } else { told },
            more_peers: if any { 0 } else { of_class.len().saturating_sub(POLICY_ROW_PEERS_MOST) as u64 },
            ports: ports(rows, *port),
            verdict: String::new(),
            rule: None,
            tier: String::new(),
            packets: judged.packets,
            bytes: judged.bytes,
        };
        let hits = [(cell.admin, true), (cell.rest, false)];
        shown.extend(
            hits.into_iter().filter_map(|(hit, admin)| Some(with_hit(state, tables, row.clone(), hit?, admin))),
        );
    }
    EndpointRules { rule_set: set.0, policies: policies.map(|(name, _)| name.to_string()).collect(), rows: shown }
}

fn with_hit(state: &State, tables: &Tables, row: PolicyRow, hit: Hit, admin: bool) -> PolicyRow {
    let verdict = match hit.ruling {
        Ruling::Accept => "accept".to_owned(),
        Ruling::Deny | Ruling::DenyUnknown => "deny".to_owned(),
        Ruling::Pass => "pass".to_owned(),
        Ruling::Redirect { listener, .. } => format!("redirect {}", listener.0),
    };
    let origin = hit.rule.and_then(|rule: RuleIndex| tables.origins.get(&rule));
    let of_baseline = |origin: &Origin| {
        let policies = state.inputs().documents.iter().flat_map(|(_, document)| document.policies.iter());
        policies.filter(|p| p.tier == Tier::Baseline).any(|p| p.rules.iter().any(|rule| rule.origin == *origin))
    };
    let tier_of = match origin {
        _ if admin => Tier::Admin,
        Some(origin) if of_baseline(origin) => Tier::Baseline,
        _ => Tier::Namespaced,
    };
    let rule = origin.map(|origin| rule_of(origin));
    PolicyRow { verdict, rule, tier: tier(tier_of).to_owned(), ..row }
}

fn ports(rows: &Rows, class: PortClass) -> Vec<String> {
    match class {
        PortClass::ANY => return vec!["any".to_owned()],
        PortClass::UNKNOWN => return vec!["unknown".to_owned()],
        _ => {}
    }
    let mut ranges: Vec<(L4, u16, u16)> = Vec::new();
    for (PortPrefix { l4, first, length }, _) in rows.ports.iter().filter(|(_, of)| **of == class) {
        let last = first | u16::MAX.checked_shr((*length).into()).unwrap_or(0);
        match ranges.last_mut() {
            Some((before, _, end)) if before == l4 && end.checked_add(1) == Some(*first) => *end = last,
            _ => ranges.push((*l4, *first, last)),
        }
    }
    let name = |l4| match l4 {
        L4::Tcp => "TCP",
        L4::Udp => "UDP",
        L4::Sctp => "SCTP",
        L4::Icmp => "ICMP type",
        L4::Icmp6 => "ICMPv6 type",
    };
    let told = |(l4, first, last)| match (first, last) {
        (0, u16::MAX) => name(l4).trim_end_matches(" type").to_owned(),
        _ if first == last => format!("{} {first}", name(l4)),
        _ => format!("{} {first}-{last}", name(l4)),
    };
    ranges.into_iter().map(told).collect()
}

#[cfg(test)]
mod tests;
