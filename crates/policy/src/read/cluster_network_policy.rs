//! `ClusterNetworkPolicy` of policy.networking.k8s.io v1alpha2 and v1beta1 (network-policy-api.sigs.k8s.io).

use super::{
    field::{Field, Object, Read, Reader},
    meta::Document,
    values::{self, Notation, PROTOCOLS},
};
use crate::model::{Action, Direction, Directions, Peer, Policy, Port, PortRange, Protocol, Rule, Selector, Tier};

const MAX_ITEMS: usize = 25;
/// Characters of a rule's name.
const MAX_NAME: usize = 100;
const ACTIONS: [(&str, Action); 3] = [("Accept", Action::Accept), ("Deny", Action::Deny), ("Pass", Action::Pass)];
const OTHER_PEERS: [(&str, &str); 2] =
    [("nodes", "write the nodes' addresses as networks"), ("domainNames", "write the names' addresses as networks")];

pub(super) fn read(reader: &mut Reader, document: &Document<'_>) -> Read<Vec<Policy>> {
    let spec = document.spec(reader)?;
    let object = reader.object(&spec, &["tier", "priority", "subject", "ingress", "egress"], &[])?;
    let tier = reader
        .required(&object, "tier", "write Admin or Baseline")
        .and_then(|field| reader.word(&field, &[("Admin", Tier::Admin), ("Baseline", Tier::Baseline)]));
    let priority = reader
        .required(&object, "priority", "write a number from 0, which decides first, to 1000")
        .and_then(|field| reader.number(&field, 0..=1000));
    let subject = reader.required(&object, "subject", "write whom the policy is about").and_then(|field| {
        let object = reader.object(&field, &["namespaces", "pods"], &[])?;
        let key = one_of(reader, &object, &["namespaces", "pods"])?;
        pods(reader, &object, key)
    });
    let ingress = rules(reader, &object, Direction::Ingress);
    let egress = rules(reader, &object, Direction::Egress);
    let (tier, priority, subject, mut rules, egress) = (tier?, priority?, subject?, ingress?, egress?);
    rules.extend(egress);
    let (name, isolates, origin) = (document.name.clone(), Directions::default(), reader.origin(&spec));
    Ok(vec![Policy { name, subject, tier, priority, isolates, rules, origin }])
}

fn one_of<'k>(reader: &mut Reader, object: &Object<'_>, keys: &[&'k str]) -> Read<&'k str> {
    match object.set(keys).as_slice() {
        [key] => Ok(*key),
        [] => Err(reader.refuse_empty(object, "is empty", format!("write one of {}", keys.join(", ")))),
        set => {
            Err(reader.refuse(object.field(), format!("has {}", set.join(" and ")), "write each as an item of its own"))
        }
    }
}

fn items<'a, T>(
    reader: &mut Reader,
    field: &Field<'a>,
    read: impl FnMut(&mut Reader, &Field<'a>) -> Read<T>,
) -> Read<Vec<T>> {
    let items = reader.some(field, "write at least one item", read)?;
    if items.len() > MAX_ITEMS {
        let remedy = format!("write at most {MAX_ITEMS}, and the rest into another rule or policy");
        return Err(reader.refuse(field, format!("has {} items", items.len()), remedy));
    }
    Ok(items)
}

fn pods(reader: &mut Reader, object: &Object<'_>, key: &str) -> Read<Selector> {
    let field = reader.required(object, key, "write a selector")?;
    if key == "namespaces" {
        return values::pods_of(reader, Some(&field), None);
    }
    let object = reader.object(&field, &["namespaceSelector", "podSelector"], &[])?;
    let pods = reader.required(&object, "podSelector", "write a selector; {} is every pod")?;
    values::pods_of(reader, object.get("namespaceSelector").as_ref(), Some(&pods))
}

fn rules(reader: &mut Reader, spec: &Object<'_>, direction: Direction) -> Read<Vec<Rule>> {
    let key = match direction {
        Direction::Ingress => "ingress",
        Direction::Egress => "egress",
    };
    let Some(field) = spec.get(key) else { return Ok(Vec::new()) };
    let rules = reader.each(&field, |reader, field| rule(reader, field, direction))?;
    if rules.len() > MAX_ITEMS {
        let remedy = format!("write at most {MAX_ITEMS}, and the rest into another policy");
        return Err(reader.refuse(&field, format!("has {} rules", rules.len()), remedy));
    }
    Ok(rules)
}

fn rule(reader: &mut Reader, field: &Field<'_>, direction: Direction) -> Read<Rule> {
    let peers_key = match direction {
        Direction::Ingress => "from",
        Direction::Egress => "to",
    };
    let object = reader.object(field, &["name", "action", peers_key, "protocols"], &[])?;
    let name = object.get("name").map_or(Ok(()), |field| {
        let name = reader.text(&field)?;
        let length = name.chars().count();
        if length <= MAX_NAME {
            return Ok(());
        }
        Err(reader.refuse(&field, format!("has {length} characters"), format!("write at most {MAX_NAME}")))
    });
    let action = reader
        .required(&object, "action", "write Accept, Deny or Pass")
        .and_then(|field| reader.word(&field, &ACTIONS));
    let peers = reader
        .required(&object, peers_key, "write at least one peer")
        .and_then(|field| items(reader, &field, |reader, field| peer(reader, field, direction)));
    let protocols = object.get("protocols").map(|field| items(reader, &field, ports)).transpose();
    let (_, action, peers, protocols) = (name?, action?, peers?, protocols?);
    let peers: Vec<_> = peers.into_iter().flatten().collect();
    let ports: Option<Vec<_>> = protocols.map(|protocols| protocols.into_iter().flatten().collect());
    let named = ports.iter().flatten().any(|port| matches!(port, Port::Named { .. }));
    if named && peers.iter().any(|peer| matches!(peer, Peer::Network { .. })) {
        let remedy = "write the port's number, or the networks in a rule of their own";
        return Err(reader.refuse_key(&object, "protocols", "name a port, which networks do not have", remedy));
    }
    Ok(Rule { direction, action, peers: Some(peers), ports, requests: None, origin: reader.origin(field) })
}

fn peer(reader: &mut Reader, field: &Field<'_>, direction: Direction) -> Read<Vec<Peer>> {
    let (known, other): (&[_], &[_]) = match direction {
        Direction::Ingress => (&["namespaces", "pods"], &[]),
        Direction::Egress => (&["namespaces", "pods", "networks"], &OTHER_PEERS),
    };
    let object = reader.object(field, known, other)?;
    match one_of(reader, &object, known)? {
        "networks" => {
            let field = reader.required(&object, "networks", "write networks")?;
            let network = |reader: &mut Reader, field: &Field<'_>| {
                let net = values::network(reader, field, Notation::Exact)?;
                Ok(Peer::Network { net, except: Vec::new() })
            };
            items(reader, &field, network)
        }
        key => Ok(vec![Peer::Endpoints(pods(reader, &object, key)?)]),
    }
}

fn ports(reader: &mut Reader, field: &Field<'_>) -> Read<Vec<Port>> {
    const KEYS: [&str; 4] = ["tcp", "udp", "sctp", "destinationNamedPort"];
    let object = reader.object(field, &KEYS, &[])?;
    let key = one_of(reader, &object, &KEYS)?;
    let field = reader.required(&object, key, "write a port")?;
    let protocol = match key {
        "tcp" => Protocol::Tcp,
        "udp" => Protocol::Udp,
        "sctp" => Protocol::Sctp,
        _ => {
            let text = reader.text(&field)?;
            let name = values::port_name(reader, &field, text)?;
            // They apply to every protocol.
            return Ok(PROTOCOLS.map(|(_, protocol)| Port::Named { protocol, name: name.clone() }).into());
        }
    };
    let object = reader.object(&field, &["destinationPort"], &[])?;
    let port = reader.required(&object, "destinationPort", "write a number or a range; 1 to 65535 is every port")?;
    Ok(vec![Port::Numbers { protocol, ports: port_range(reader, &port)? }])
}

fn port_range(reader: &mut Reader, field: &Field<'_>) -> Read<PortRange> {
    let object = reader.object(field, &["number", "range"], &[])?;
    let key = one_of(reader, &object, &["number", "range"])?;
    let field = reader.required(&object, key, "write a port")?;
    if key == "number" {
        let first = reader.number(&field, 1..=u16::MAX)?;
        return Ok(PortRange { first, last: first });
    }
    let object = reader.object(&field, &["start", "end"], &[])?;
    let mut port = |key| {
        let field = reader.required(&object, key, "write a port")?;
        reader.number(&field, 1..=u16::MAX)
    };
    let (start, end) = (port("start"), port("end"));
    let (first, last) = (start?, end?);
    if first >= last {
        return Err(reader.refuse(
            &field,
            format!("starts at {first} and ends at {last}"),
            "write the lower port as start",
        ));
    }
    Ok(PortRange { first, last })
}
