//! `CiliumNetworkPolicy` and `CiliumClusterwideNetworkPolicy` of cilium.io/v2.
//!
//! - A direction with rules is isolated, unless `enableDefaultDeny` overrides it.
//! - A rule `{}` only isolates. With only ports, a rule matches every peer.
//! - An empty list of peers matches nothing; `[{}]` matches all endpoints, of a namespaced policy those in its
//!   namespace.
//!
//! Differences from Cilium: `docs/policy.md`.

use std::collections::BTreeSet;

use super::{
    cilium_names,
    cilium_ports::{self, Destinations},
    field::{Field, Object, Read, Reader, quoted},
    meta::Document,
    values::{self, Notation},
};
use crate::model::{
    Action, Direction, Directions, Entity, LabelOf, Labels, Peer, Policy, Requirement, Rule, Selector, Tier,
};

const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
const NAMESPACE_LABELS: &str = "io.cilium.k8s.namespace.labels.";
/// Label of an endpoint with unknown labels.
const WITHOUT_LABELS: &str = "reserved:init";
/// Sources of labels that no endpoint has.
const OTHER_SOURCES: [&str; 5] = ["reserved", "cidr", "cidrgroup", "fqdn", "node"];
/// Cilium's cluster includes the node.
const ENTITIES: [(&str, &[Entity]); 6] = [
    ("all", &[Entity::All]),
    ("world", &[Entity::World]),
    ("host", &[Entity::Host]),
    ("cluster", &[Entity::Cluster, Entity::Host]),
    ("health", &[Entity::Health]),
    ("remote-node", &[Entity::RemoteNode]),
];

pub(super) fn read(reader: &mut Reader, document: &Document<'_>) -> Read<Vec<Policy>> {
    let mut policies = Vec::new();
    if let Some(spec) = document.object.get("spec") {
        policies.push(policy(reader, &spec, document));
    }
    if let Some(specs) = document.object.get("specs") {
        policies.extend(reader.list(&specs)?.iter().map(|spec| policy(reader, spec, document)));
    }
    if policies.is_empty() {
        return Err(reader.refuse_key(&document.object, "spec", "is missing", "write the policy as spec or specs"));
    }
    policies.into_iter().collect()
}

fn policy(reader: &mut Reader, spec: &Field<'_>, document: &Document<'_>) -> Read<Policy> {
    const SECTIONS: [(&str, Direction, Action); 4] = [
        ("ingress", Direction::Ingress, Action::Accept),
        ("ingressDeny", Direction::Ingress, Action::Deny),
        ("egress", Direction::Egress, Action::Accept),
        ("egressDeny", Direction::Egress, Action::Deny),
    ];
    const KNOWN: [&str; 8] = [
        "endpointSelector",
        "ingress",
        "ingressDeny",
        "egress",
        "egressDeny",
        "enableDefaultDeny",
        "labels",
        "description",
    ];
    let unsupported = [("nodeSelector", "write endpointSelector: policies of nodes are not supported")];
    let object = reader.object(spec, &KNOWN, &unsupported)?;
    let namespace = Some(document.name.namespace.as_str()).filter(|namespace| !namespace.is_empty());
    let subject = reader
        .required(&object, "endpointSelector", "write a selector; {} is every endpoint")
        .and_then(|field| subject(reader, &field, namespace));
    let sections = SECTIONS.map(|(key, direction, action)| {
        let Some(field) = object.get(key) else { return Ok(Vec::new()) };
        reader.each(&field, |reader, field| rules(reader, field, direction, action, namespace))
    });
    let default_deny = default_deny(reader, &object);
    let sections: Vec<_> = sections.into_iter().collect::<Read<_>>()?;
    let rules: Vec<Rule> = sections.into_iter().flatten().flatten().collect();
    if rules.is_empty() {
        let remedy = "write a rule in ingress, ingressDeny, egress or egressDeny; {} only isolates";
        return Err(reader.refuse_empty(&object, "has no rules", remedy));
    }
    let has = |direction| rules.iter().any(|rule: &Rule| rule.direction == direction);
    let (ingress, egress) = default_deny?;
    let isolates = Directions {
        ingress: ingress.unwrap_or_else(|| has(Direction::Ingress)),
        egress: egress.unwrap_or_else(|| has(Direction::Egress)),
    };
    let (name, tier, origin) = (document.name.clone(), Tier::Namespaced, reader.origin(spec));
    Ok(Policy { name, subject: subject?, tier, priority: 0, isolates, rules, origin })
}

fn default_deny(reader: &mut Reader, spec: &Object<'_>) -> Read<(Option<bool>, Option<bool>)> {
    let Some(field) = spec.get("enableDefaultDeny") else { return Ok((None, None)) };
    let object = reader.object(&field, &["ingress", "egress"], &[])?;
    let mut said = |key| object.get(key).map(|field| reader.boolean(&field)).transpose();
    let (ingress, egress) = (said("ingress"), said("egress"));
    Ok((ingress?, egress?))
}

fn rules(
    reader: &mut Reader,
    field: &Field<'_>,
    direction: Direction,
    action: Action,
    namespace: Option<&str>,
) -> Read<Vec<Rule>> {
    const PEERS: &str = "write the peers as endpoints, networks or entities";
    const ASKS: &str = "write it into egress: an endpoint asks for the names of what it connects to";
    const DENIES: &str =
        "write the names that may pass into egress, which denies the rest: not all addresses of a name are known";
    const AUTHENTICATION: (&str, &str) = ("authentication", "remove it: peers are not authenticated");
    const TO: [(&str, &str); 5] =
        [("toRequires", PEERS), ("toNodes", PEERS), ("toGroups", PEERS), ("toServices", PEERS), AUTHENTICATION];
    let (peer_keys, unsupported): (&[_], &[_]) = match (direction, action) {
        (Direction::Ingress, _) => (
            &["fromEndpoints", "fromCIDR", "fromCIDRSet", "fromEntities"],
            &[("fromRequires", PEERS), ("fromNodes", PEERS), ("fromGroups", PEERS), ("toFQDNs", ASKS), AUTHENTICATION],
        ),
        (Direction::Egress, Action::Deny) => {
            (&["toEndpoints", "toCIDR", "toCIDRSet", "toEntities"], &[&TO[..], &[("toFQDNs", DENIES)]].concat())
        }
        (Direction::Egress, _) => (&["toEndpoints", "toCIDR", "toCIDRSet", "toEntities", "toFQDNs"], &TO),
    };
    let object = reader.object(field, &[peer_keys, &["toPorts", "icmps"]].concat(), unsupported)?;
    let peers = peers(reader, &object, peer_keys, namespace);
    let destinations = cilium_ports::read(reader, &object, direction, action);
    let (peers, destinations) = (peers?, destinations?);
    let everywhere = destinations.iter().any(|to| to.ports.is_none());
    let peers = if peers.is_none() && everywhere { Some(Vec::new()) } else { peers };
    let origin = reader.origin(field);
    let rule = |Destinations { ports, requests }| Rule {
        direction,
        action,
        peers: peers.clone(),
        ports,
        requests,
        origin: origin.clone(),
    };
    Ok(destinations.into_iter().map(rule).collect())
}

fn peers(
    reader: &mut Reader,
    rule: &Object<'_>,
    keys: &[&'static str],
    namespace: Option<&str>,
) -> Read<Option<Vec<Peer>>> {
    const GROUPS: [(&str, &str); 2] =
        [("cidrGroupRef", "write the group's networks"), ("cidrGroupSelector", "write the groups' networks")];
    let set = rule.set(keys);
    let (key, field) = match set.as_slice() {
        [] => return Ok(None),
        [key] => (*key, rule.get(key)),
        _ => {
            let remedy = "write a rule for each of them";
            return Err(reader.refuse(rule.field(), format!("has {}", set.join(" and ")), remedy));
        }
    };
    let Some(field) = field else { return Ok(None) };
    let peers = match key {
        "fromEndpoints" | "toEndpoints" => {
            reader.each(&field, |reader, field| Ok(Peer::Endpoints(endpoints_of(reader, field, namespace)?)))
        }
        "fromCIDR" | "toCIDR" => reader.each(&field, |reader, field| {
            let net = values::network(reader, field, Notation::CidrOrAddress)?;
            Ok(Peer::Network { net, except: Vec::new() })
        }),
        "fromCIDRSet" | "toCIDRSet" => reader.each(&field, |reader, field| {
            let object = reader.object(field, &["cidr", "except"], &GROUPS)?;
            values::network_except(reader, &object)
        }),
        "toFQDNs" => reader.each(&field, |reader, field| Ok(Peer::Names(cilium_names::read(reader, field)?))),
        _ => {
            let named = reader.each(&field, |reader, field| reader.word(field, &ENTITIES))?;
            Ok(named.into_iter().flatten().copied().map(Peer::Entity).collect())
        }
    };
    peers.map(Some)
}

/// In the policy's namespace, unless the selector names one.
fn endpoints_of(reader: &mut Reader, field: &Field<'_>, namespace: Option<&str>) -> Read<Selector> {
    let mut requirements = values::label_selector(reader, field, &key)?;
    if let Some(namespace) = namespace {
        if requirements.iter().any(|requirement| requirement.of == LabelOf::Namespace) {
            requirements = values::in_some_namespace(requirements);
        } else {
            requirements.insert(values::in_namespace(namespace));
        }
    }
    Ok(Selector(requirements))
}

fn subject(reader: &mut Reader, field: &Field<'_>, namespace: Option<&str>) -> Read<Selector> {
    let mut requirements = values::label_selector(reader, field, &key)?;
    let Some(namespace) = namespace else { return Ok(Selector(requirements)) };
    let own = values::in_namespace(namespace);
    let of_name = |requirement: &&Requirement| requirement.of == LabelOf::Namespace && requirement.key == own.key;
    let named = Selector(requirements.iter().filter(of_name).cloned().collect::<BTreeSet<_>>());
    let labels = Labels::from([(own.key.clone(), namespace.to_owned())]);
    if !named.selects(&Labels::new(), Some(&labels)) {
        let remedy = "write the policy in that namespace, or as CiliumClusterwideNetworkPolicy";
        return Err(reader.refuse(field, format!("names another namespace than the policy's, {namespace}"), remedy));
    }
    requirements.insert(own);
    Ok(Selector(requirements))
}

/// `SOURCE:KEY`, or `KEY` for any source.
fn key(reader: &mut Reader, field: &Field<'_>, text: &str) -> Read<(LabelOf, String)> {
    let (source, key) = text.split_once(':').unwrap_or(("any", text));
    if source.is_empty() || !source.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit()) {
        let remedy = "write k8s:KEY, or KEY for that of any source";
        return Err(reader.refuse(field, format!("{} has no source of labels", quoted(text)), remedy));
    }
    if OTHER_SOURCES.contains(&source) && text != WITHOUT_LABELS {
        let remedy = "write entities or networks as peers";
        return Err(reader.refuse(field, format!("{} is a label that no endpoint has", quoted(text)), remedy));
    }
    let of_kubernetes = matches!(source, "any" | "k8s");
    if of_kubernetes && key == POD_NAMESPACE {
        return Ok((LabelOf::Namespace, values::NAMESPACE_NAME.to_owned()));
    }
    if of_kubernetes && let Some(label) = key.strip_prefix(NAMESPACE_LABELS) {
        return values::namespace_key(reader, field, label);
    }
    if of_kubernetes && key.starts_with("io.cilium.") {
        let remedy = format!("write {POD_NAMESPACE}, {NAMESPACE_LABELS}KEY or a label of the pod");
        return Err(reader.refuse(field, format!("{} is a label that no endpoint has", quoted(text)), remedy));
    }
    Ok((LabelOf::Endpoint, format!("{source}:{}", values::checked_key(reader, field, key)?)))
}
