//! `NetworkPolicy` of networking.k8s.io/v1.

use super::{
    field::{Field, Object, Read, Reader},
    meta::Document,
    tree::Value,
    values::{self, PROTOCOLS},
};
use crate::model::{Action, Direction, Directions, Peer, Policy, Port, PortRange, Protocol, Rule, Selector, Tier};

pub(super) fn read(reader: &mut Reader, document: &Document<'_>) -> Read<Vec<Policy>> {
    let spec = document.spec(reader)?;
    let object = reader.object(&spec, &["podSelector", "policyTypes", "ingress", "egress"], &[])?;
    let namespace = &document.name.namespace;
    let subject = match object.get("podSelector") {
        Some(field) => pods(reader, &field, namespace),
        None => Ok(Selector([values::in_namespace(namespace)].into())),
    };
    let isolates = directions(reader, &object);
    let ingress = rules(reader, &object, Direction::Ingress, namespace);
    let egress = rules(reader, &object, Direction::Egress, namespace);
    let (subject, isolates, ingress, egress) = (subject?, isolates?, ingress?, egress?);
    // Rules of other directions have no effect.
    let ingress = ingress.into_iter().filter(|_| isolates.ingress);
    let rules = ingress.chain(egress.into_iter().filter(|_| isolates.egress)).collect();
    let (name, tier, origin) = (document.name.clone(), Tier::Namespaced, reader.origin(&spec));
    Ok(vec![Policy { name, subject, tier, priority: 0, isolates, rules, origin }])
}

fn pods(reader: &mut Reader, field: &Field<'_>, namespace: &str) -> Read<Selector> {
    let mut requirements = values::label_selector(reader, field, &values::pod_key)?;
    requirements.insert(values::in_namespace(namespace));
    Ok(Selector(requirements))
}

/// Default: ingress, and egress if there are egress rules.
fn directions(reader: &mut Reader, spec: &Object<'_>) -> Read<Directions> {
    let types = match spec.get("policyTypes") {
        Some(field) => reader.each(&field, |reader, field| {
            reader.word(field, &[("Ingress", Direction::Ingress), ("Egress", Direction::Egress)])
        })?,
        None => Vec::new(),
    };
    if types.is_empty() {
        let has_rules = |field: Field<'_>| matches!(field.value(), Value::List(rules) if !rules.is_empty());
        return Ok(Directions { ingress: true, egress: spec.get("egress").is_some_and(has_rules) });
    }
    Ok(Directions { ingress: types.contains(&Direction::Ingress), egress: types.contains(&Direction::Egress) })
}

fn rules(reader: &mut Reader, spec: &Object<'_>, direction: Direction, namespace: &str) -> Read<Vec<Rule>> {
    let (key, peers_key) = match direction {
        Direction::Ingress => ("ingress", "from"),
        Direction::Egress => ("egress", "to"),
    };
    let Some(field) = spec.get(key) else { return Ok(Vec::new()) };
    reader.each(&field, |reader, field| {
        let object = reader.object(field, &[peers_key, "ports"], &[])?;
        let peers = all_or_some(reader, &object, peers_key, |reader, field| peer(reader, field, namespace));
        let ports = all_or_some(reader, &object, "ports", port);
        let origin = reader.origin(field);
        Ok(Rule { direction, action: Action::Accept, peers: peers?, ports: ports?, requests: None, origin })
    })
}

fn all_or_some<'a, T>(
    reader: &mut Reader,
    object: &Object<'a>,
    key: &str,
    read: impl FnMut(&mut Reader, &Field<'a>) -> Read<T>,
) -> Read<Option<Vec<T>>> {
    let Some(field) = object.get(key) else { return Ok(None) };
    let items = reader.each(&field, read)?;
    Ok((!items.is_empty()).then_some(items))
}

fn peer(reader: &mut Reader, field: &Field<'_>, namespace: &str) -> Read<Peer> {
    let object = reader.object(field, &["podSelector", "namespaceSelector", "ipBlock"], &[])?;
    match (object.get("ipBlock"), object.get("namespaceSelector"), object.get("podSelector")) {
        (Some(block), None, None) => {
            let object = reader.object(&block, &["cidr", "except"], &[])?;
            values::network_except(reader, &object)
        }
        (Some(_), ..) => {
            let remedy = "write ipBlock and the selectors as peers of their own";
            Err(reader.refuse(field, "has ipBlock and a selector", remedy))
        }
        (None, Some(namespaces), pods) => {
            values::pods_of(reader, Some(&namespaces), pods.as_ref()).map(Peer::Endpoints)
        }
        (None, None, Some(field)) => pods(reader, &field, namespace).map(Peer::Endpoints),
        (None, None, None) => {
            let remedy = "write podSelector, namespaceSelector or ipBlock; for every peer, leave the list away";
            Err(reader.refuse_empty(&object, "names no peer", remedy))
        }
    }
}

fn port(reader: &mut Reader, field: &Field<'_>) -> Read<Port> {
    let object = reader.object(field, &["protocol", "port", "endPort"], &[])?;
    let protocol = object.get("protocol").map_or(Ok(Protocol::Tcp), |field| reader.word(&field, &PROTOCOLS));
    let end = object.get("endPort");
    let Some(port) = object.get("port") else {
        if end.is_some() {
            return Err(reader.refuse_key(&object, "endPort", "is there without port", "write the first port as port"));
        }
        return Ok(Port::Numbers { protocol: protocol?, ports: PortRange::ALL });
    };
    if let Value::Text(text) = port.value() {
        let name = values::port_name(reader, &port, text);
        if end.is_some() {
            let remedy = "write the first port as a number, or remove endPort";
            return Err(reader.refuse_key(&object, "endPort", "is there with the name of a port", remedy));
        }
        return Ok(Port::Named { protocol: protocol?, name: name? });
    }
    let ports = reader.number(&port, 1..=u16::MAX).and_then(|first| values::up_to(reader, first, end));
    Ok(Port::Numbers { protocol: protocol?, ports: ports? })
}
