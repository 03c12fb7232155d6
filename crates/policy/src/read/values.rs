//! Values of several formats.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;

use super::field::{Field, Object, Read, Reader, quoted};
use crate::model::{Holds, LabelOf, Peer, PortRange, Protocol, Requirement, Selector};

pub(super) use crate::model::NAMESPACE_NAME;

pub(super) const PROTOCOLS: [(&str, Protocol); 3] =
    [("TCP", Protocol::Tcp), ("UDP", Protocol::Udp), ("SCTP", Protocol::Sctp)];

/// RFC 1123: lower-case letters, digits and `-`, alphanumeric at both ends, at most 63.
fn is_dns_label(text: &str) -> bool {
    text.len() <= 63 && is_dns_part(text)
}

/// RFC 1123: labels with dots, at most 253 characters (Kubernetes limits only the whole).
fn is_dns_subdomain(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_dns_part)
}

fn is_dns_part(text: &str) -> bool {
    !text.is_empty()
        && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        && !text.starts_with('-')
        && !text.ends_with('-')
}

/// Letters, digits, `-`, `_` and `.`, alphanumeric at both ends, 1 to 63.
fn is_qualified_part(text: &str) -> bool {
    let end = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    bytes.len() <= 63
        && bytes.iter().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(b))
        && end(bytes.first())
        && end(bytes.last())
}

/// A name, optionally after a subdomain and `/`.
#[must_use]
pub fn is_label_key(text: &str) -> bool {
    match text.split_once('/') {
        Some((prefix, name)) => is_dns_subdomain(prefix) && is_qualified_part(name),
        None => is_qualified_part(text),
    }
}

/// Empty, or like a key's name.
#[must_use]
pub fn is_label_value(text: &str) -> bool {
    text.is_empty() || is_qualified_part(text)
}

/// RFC 6335, section 5.1.
fn is_port_name(text: &str) -> bool {
    (1..=15).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        && text.bytes().any(|b| b.is_ascii_lowercase())
        && !text.starts_with('-')
        && !text.ends_with('-')
        && !text.contains("--")
}

pub(super) fn object_name(reader: &mut Reader, field: &Field<'_>) -> Read<String> {
    let text = reader.text(field)?;
    if is_dns_subdomain(text) {
        return Ok(text.to_owned());
    }
    let remedy = "write lower-case letters, digits, - and ., a letter or digit at both ends, at most 253";
    Err(reader.refuse(field, format!("{} is no name", quoted(text)), remedy))
}

pub(super) fn namespace_name(reader: &mut Reader, field: &Field<'_>) -> Read<String> {
    let text = reader.text(field)?;
    if is_dns_label(text) {
        return Ok(text.to_owned());
    }
    let remedy = "write lower-case letters, digits and -, a letter or digit at both ends, at most 63";
    Err(reader.refuse(field, format!("{} is no namespace", quoted(text)), remedy))
}

pub(super) fn port_name(reader: &mut Reader, field: &Field<'_>, text: &str) -> Read<String> {
    if is_port_name(text) {
        return Ok(text.to_owned());
    }
    let remedy = "write a number from 1 to 65535, or a name of lower-case letters, digits and single -, at most 15";
    Err(reader.refuse(field, format!("{} is no port", quoted(text)), remedy))
}

pub(super) type Keys<'k> = &'k dyn Fn(&mut Reader, &Field<'_>, &str) -> Read<(LabelOf, String)>;

pub(super) fn pod_key(reader: &mut Reader, field: &Field<'_>, key: &str) -> Read<(LabelOf, String)> {
    Ok((LabelOf::Endpoint, format!("k8s:{}", checked_key(reader, field, key)?)))
}

pub(super) fn namespace_key(reader: &mut Reader, field: &Field<'_>, key: &str) -> Read<(LabelOf, String)> {
    Ok((LabelOf::Namespace, checked_key(reader, field, key)?.to_owned()))
}

pub(super) fn checked_key<'k>(reader: &mut Reader, field: &Field<'_>, key: &'k str) -> Read<&'k str> {
    if is_label_key(key) {
        return Ok(key);
    }
    let remedy = "write PREFIX/NAME or NAME: a DNS name, then letters, digits, -, _ and ., at most 63";
    Err(reader.refuse(field, format!("{} is no label key", quoted(key)), remedy))
}

fn label_value(reader: &mut Reader, field: &Field<'_>) -> Read<String> {
    let text = reader.text(field)?;
    if is_label_value(text) {
        return Ok(text.to_owned());
    }
    let remedy = "write letters, digits, -, _ and ., a letter or digit at both ends, at most 63";
    Err(reader.refuse(field, format!("{} is no label value", quoted(text)), remedy))
}

/// meta/v1 LabelSelector.
pub(super) fn label_selector(reader: &mut Reader, field: &Field<'_>, keys: Keys<'_>) -> Read<BTreeSet<Requirement>> {
    let object = reader.object(field, &["matchLabels", "matchExpressions"], &[])?;
    let labels = object.get("matchLabels").map_or(Ok(Vec::new()), |labels| match_labels(reader, &labels, keys));
    let expressions = object
        .get("matchExpressions")
        .map_or(Ok(Vec::new()), |all| reader.each(&all, |reader, one| match_expression(reader, one, keys)));
    let mut requirements: BTreeSet<_> = labels?.into_iter().collect();
    requirements.extend(expressions?);
    Ok(requirements)
}

fn match_labels(reader: &mut Reader, field: &Field<'_>, keys: Keys<'_>) -> Read<Vec<Requirement>> {
    let map = reader.map(field)?;
    let one = |(key, field): (&str, Field<'_>)| {
        let key = keys(reader, &field, key);
        let value = label_value(reader, &field);
        let (of, key) = key?;
        Ok(Requirement { of, key, holds: Holds::In(BTreeSet::from([value?])) })
    };
    let all: Vec<_> = map.entries().map(one).collect();
    all.into_iter().collect()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Operator {
    In,
    NotIn,
    Exists,
    DoesNotExist,
}

fn match_expression(reader: &mut Reader, field: &Field<'_>, keys: Keys<'_>) -> Read<Requirement> {
    const OPERATORS: [(&str, Operator); 4] = [
        ("In", Operator::In),
        ("NotIn", Operator::NotIn),
        ("Exists", Operator::Exists),
        ("DoesNotExist", Operator::DoesNotExist),
    ];
    let object = reader.object(field, &["key", "operator", "values"], &[])?;
    let key = reader.required(&object, "key", "name the label").and_then(|field| {
        let text = reader.text(&field)?;
        keys(reader, &field, text)
    });
    let operator = reader
        .required(&object, "operator", "write In, NotIn, Exists or DoesNotExist")
        .and_then(|field| reader.word(&field, &OPERATORS));
    let values = object.get("values").map_or(Ok(Vec::new()), |field| reader.each(&field, label_value));
    let ((of, key), operator, values) = (key?, operator?, values?);
    let takes_values = matches!(operator, Operator::In | Operator::NotIn);
    if takes_values == values.is_empty() {
        let (reason, remedy) = if takes_values {
            ("is empty or missing", "write the values that In and NotIn compare with")
        } else {
            ("is not empty", "remove it: Exists and DoesNotExist compare with no value")
        };
        return Err(reader.refuse_key(&object, "values", reason, remedy));
    }
    let values = values.into_iter().collect();
    let holds = match operator {
        Operator::In => Holds::In(values),
        Operator::NotIn => Holds::NotIn(values),
        Operator::Exists => Holds::Exists,
        Operator::DoesNotExist => Holds::DoesNotExist,
    };
    Ok(Requirement { of, key, holds })
}

pub(super) fn in_namespace(namespace: &str) -> Requirement {
    let holds = Holds::In(BTreeSet::from([namespace.to_owned()]));
    Requirement { of: LabelOf::Namespace, key: NAMESPACE_NAME.to_owned(), holds }
}

/// A namespace selector never selects endpoints without a namespace.
pub(super) fn in_some_namespace(mut requirements: BTreeSet<Requirement>) -> BTreeSet<Requirement> {
    let says_so = |r: &Requirement| r.of == LabelOf::Namespace && matches!(r.holds, Holds::In(_) | Holds::Exists);
    if !requirements.iter().any(says_so) {
        let key = NAMESPACE_NAME.to_owned();
        requirements.insert(Requirement { of: LabelOf::Namespace, key, holds: Holds::Exists });
    }
    requirements
}

pub(super) fn pods_of(reader: &mut Reader, namespaces: Option<&Field<'_>>, pods: Option<&Field<'_>>) -> Read<Selector> {
    let mut read = |field: Option<&Field<'_>>, keys: Keys<'_>| {
        field.map_or(Ok(BTreeSet::new()), |field| label_selector(reader, field, keys))
    };
    let (namespaces, pods) = (read(namespaces, &namespace_key), read(pods, &pod_key));
    let mut requirements = in_some_namespace(namespaces?);
    requirements.extend(pods?);
    Ok(Selector(requirements))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Notation {
    /// Host bits are cleared, as in Kubernetes.
    Cidr,
    /// Without host bits.
    Exact,
    /// Also a single address.
    CidrOrAddress,
}

pub(super) fn network(reader: &mut Reader, field: &Field<'_>, notation: Notation) -> Read<IpNet> {
    const REMEDY: &str = "write ADDRESS/LENGTH, such as 192.0.2.0/24 or 2001:db8::/32";
    let text = reader.text(field)?;
    let Some(net) = parse_network(text, notation) else {
        return Err(reader.refuse(field, format!("{} is no network", quoted(text)), REMEDY));
    };
    if let IpAddr::V6(ip) = net.addr()
        && ip.to_ipv4_mapped().is_some()
    {
        let reason = format!("{} is an IPv4 address in IPv6 notation, which no packet has", quoted(text));
        return Err(reader.refuse(field, reason, "write the IPv4 network"));
    }
    if notation == Notation::Exact && net != net.trunc() {
        return Err(reader.refuse(field, format!("{net} has host bits"), format!("write {}", net.trunc())));
    }
    Ok(net.trunc())
}

fn parse_network(text: &str, notation: Notation) -> Option<IpNet> {
    let Some((address, length)) = text.split_once('/') else {
        let address = (notation == Notation::CidrOrAddress).then(|| text.parse::<IpAddr>().ok())??;
        return Some(IpNet::from(address));
    };
    let (address, bits) = (address.parse::<IpAddr>().ok()?, length.parse::<u8>().ok()?);
    let net = IpNet::new(address, bits).ok()?;
    (bits.to_string() == length).then_some(net)
}

pub(super) fn network_except(reader: &mut Reader, object: &Object<'_>) -> Read<Peer> {
    let net = reader
        .required(object, "cidr", "write the network")
        .and_then(|field| network(reader, &field, Notation::Cidr))?;
    let except = object.get("except").map_or(Ok(Vec::new()), |field| {
        reader.each(&field, |reader, field| {
            let except = network(reader, field, Notation::Cidr)?;
            if net.contains(&except) && net != except {
                return Ok(except);
            }
            let reason = format!("{except} is not strictly inside {net}");
            Err(reader.refuse(field, reason, "write a part of the network, or remove the exception"))
        })
    });
    Ok(Peer::Network { net, except: except? })
}

pub(super) fn up_to(reader: &mut Reader, first: u16, last: Option<Field<'_>>) -> Read<PortRange> {
    let Some(field) = last else { return Ok(PortRange { first, last: first }) };
    let last = reader.number(&field, 1..=u16::MAX)?;
    if last < first {
        let reason = format!("{last} is below the first port, {first}");
        return Err(reader.refuse(&field, reason, "write the higher port here"));
    }
    Ok(PortRange { first, last })
}
