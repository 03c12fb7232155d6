//! `toPorts` and `icmps` in rules of cilium.io/v2.

use std::sync::Arc;

use super::{
    cilium_l7,
    field::{Field, Object, Read, Reader, quoted},
    tree::Value,
    values::{self, PROTOCOLS},
};
use crate::{
    model::{Action, Direction, Port, PortRange, Protocol},
    requests::Requests,
};

const MAX_ITEMS: usize = 40;

/// IANA; spelt as in Cilium.
const ICMP_TYPES: [(&str, u8); 15] = [
    ("EchoReply", 0),
    ("DestinationUnreachable", 3),
    ("Redirect", 5),
    ("Echo", 8),
    ("EchoRequest", 8),
    ("RouterAdvertisement", 9),
    ("RouterSelection", 10),
    ("RouterSolicitation", 10),
    ("TimeExceeded", 11),
    ("ParameterProblem", 12),
    ("Timestamp", 13),
    ("TimestampReply", 14),
    ("Photuris", 40),
    ("ExtendedEchoRequest", 42),
    ("ExtendedEchoReply", 43),
];

/// IANA; spelt as in Cilium.
const ICMPV6_TYPES: [(&str, u8); 27] = [
    ("DestinationUnreachable", 1),
    ("PacketTooBig", 2),
    ("TimeExceeded", 3),
    ("ParameterProblem", 4),
    ("EchoRequest", 128),
    ("EchoReply", 129),
    ("MulticastListenerQuery", 130),
    ("MulticastListenerReport", 131),
    ("MulticastListenerDone", 132),
    ("RouterSolicitation", 133),
    ("RouterAdvertisement", 134),
    ("NeighborSolicitation", 135),
    ("NeighborAdvertisement", 136),
    ("RedirectMessage", 137),
    ("RouterRenumbering", 138),
    ("ICMPNodeInformationQuery", 139),
    ("ICMPNodeInformationResponse", 140),
    ("InverseNeighborDiscoverySolicitation", 141),
    ("InverseNeighborDiscoveryAdvertisement", 142),
    ("HomeAgentAddressDiscoveryRequest", 144),
    ("HomeAgentAddressDiscoveryReply", 145),
    ("MobilePrefixSolicitation", 146),
    ("MobilePrefixAdvertisement", 147),
    ("DuplicateAddressRequestCodeSuffix", 157),
    ("DuplicateAddressConfirmationCodeSuffix", 158),
    ("ExtendedEchoRequest", 160),
    ("ExtendedEchoReply", 161),
];

pub(super) struct Destinations {
    pub(super) ports: Option<Vec<Port>>,
    pub(super) requests: Option<Arc<Requests>>,
}

/// First all destinations without requests, then each `toPorts` item with requests.
pub(super) fn read(
    reader: &mut Reader,
    rule: &Object<'_>,
    direction: Direction,
    action: Action,
) -> Read<Vec<Destinations>> {
    let to_ports = |reader: &mut Reader, field: &Field<'_>| to_ports(reader, field, direction, action);
    let ports = rule.get("toPorts").map_or(Ok(Vec::new()), |field| reader.each(&field, to_ports));
    let icmps = rule.get("icmps").map_or(Ok(Vec::new()), |field| reader.each(&field, icmps));
    let (ports, icmps) = (ports?, icmps?);
    if !ports.is_empty() && !icmps.is_empty() {
        return Err(reader.refuse(rule.field(), "has toPorts and icmps", "write a rule for each of them"));
    }
    if ports.is_empty() && icmps.is_empty() {
        return Ok(vec![Destinations { ports: None, requests: None }]);
    }
    let (with, without): (Vec<_>, Vec<_>) = ports.into_iter().partition(|(_, requests)| requests.is_some());
    let plain: Vec<_> = without.into_iter().map(|(ports, _)| ports).chain(icmps).flatten().collect();
    let plain = (!plain.is_empty()).then_some(Destinations { ports: Some(plain), requests: None });
    let with = with.into_iter().map(|(ports, requests)| Destinations { ports: Some(ports), requests });
    Ok(plain.into_iter().chain(with).collect())
}

fn items(
    reader: &mut Reader,
    object: &Object<'_>,
    key: &str,
    read: impl FnMut(&mut Reader, &Field<'_>) -> Read<Vec<Port>>,
) -> Read<Vec<Port>> {
    const REMEDY: &str = "write at least one item, or leave out the list around this";
    let field = reader.required(object, key, REMEDY)?;
    let items = reader.some(&field, REMEDY, read)?;
    if items.len() > MAX_ITEMS {
        let remedy = format!("write at most {MAX_ITEMS}, and the rest into another item");
        return Err(reader.refuse(&field, format!("has {} items", items.len()), remedy));
    }
    Ok(items.into_iter().flatten().collect())
}

fn to_ports(
    reader: &mut Reader,
    field: &Field<'_>,
    direction: Direction,
    action: Action,
) -> Read<(Vec<Port>, Option<Arc<Requests>>)> {
    const PASSED_ON: &str = "remove it: TLS is passed on as it is, and listeners are made from the rules";
    const DENIES: &str = "remove it: write what may pass into a rule of ingress or egress, which denies the rest";
    const ALL: [Protocol; 3] = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp];
    const OF_DNS: [Protocol; 2] = [Protocol::Tcp, Protocol::Udp];
    let unsupported = ["listener", "terminatingTLS", "originatingTLS"].map(|key| (key, PASSED_ON));
    let accepts = action == Action::Accept;
    let (known, denies): (&[_], &[_]) = if accepts {
        (&["ports", "rules", "serverNames"], &[])
    } else {
        (&["ports"], &[("rules", DENIES), ("serverNames", DENIES)])
    };
    let object = reader.object(field, known, &[&unsupported, denies].concat())?;
    let requests = if accepts { cilium_l7::read(reader, &object, direction) } else { Ok(None) };
    let asks = matches!(&requests, Ok(Some(requests)) if !requests.names.is_empty());
    let any = if asks { &OF_DNS[..] } else { &ALL };
    let ports = items(reader, &object, "ports", |reader, field| port(reader, field, any));
    let (ports, requests) = (ports?, requests?.map(Arc::new));
    let (carry, reason, remedy) = match &requests {
        None => return Ok((ports, None)),
        Some(_) if asks => (
            &OF_DNS[..],
            "has other protocols than UDP and TCP, which carry no queries of DNS",
            "write protocol: UDP, TCP or ANY at each port, and the other protocols into another item",
        ),
        Some(_) => (
            &[Protocol::Tcp][..],
            "has other protocols than TCP, which carry no such requests",
            "write protocol: TCP at each port, and the other protocols into another item",
        ),
    };
    let carries = |port: &Port| match port {
        Port::Numbers { protocol, .. } | Port::Named { protocol, .. } => carry.contains(protocol),
        Port::Icmp { .. } => false,
    };
    if !ports.iter().all(carries) {
        return Err(reader.refuse_key(&object, "ports", reason, remedy));
    }
    Ok((ports, requests))
}

fn port(reader: &mut Reader, field: &Field<'_>, any: &[Protocol]) -> Read<Vec<Port>> {
    const ANY: (&str, Option<Protocol>) = ("ANY", None);
    let object = reader.object(field, &["port", "endPort", "protocol"], &[])?;
    let [tcp, udp, sctp] = PROTOCOLS.map(|(word, protocol)| (word, Some(protocol)));
    let protocol = object.get("protocol").map_or(Ok(None), |field| reader.word(&field, &[tcp, udp, sctp, ANY]));
    let port = reader.required(&object, "port", "write a number or a name, in quotes")?;
    let end = object.get("endPort");
    let port = match number(reader, &port)? {
        Some(0) => {
            if end.is_some() {
                return Err(reader.refuse_key(
                    &object,
                    "endPort",
                    "is there with port 0",
                    "write the first port as port",
                ));
            }
            if protocol?.is_none() {
                let remedy = "name the protocol, or leave out toPorts, which is every packet";
                return Err(reader.refuse(&port, "is 0, every port, of any protocol", remedy));
            }
            Written::Numbers(PortRange::ALL)
        }
        Some(first) => Written::Numbers(values::up_to(reader, first, end)?),
        None if end.is_some() => {
            let remedy = "write the first port as a number, or remove endPort";
            return Err(reader.refuse_key(&object, "endPort", "is there with the name of a port", remedy));
        }
        None => {
            // Case-insensitive (RFC 6335, section 5.1).
            let text = reader.text(&port)?.to_ascii_lowercase();
            Written::Name(values::port_name(reader, &port, &text)?)
        }
    };
    let of = |protocol| match &port {
        Written::Numbers(ports) => Port::Numbers { protocol, ports: *ports },
        Written::Name(name) => Port::Named { protocol, name: name.clone() },
    };
    Ok(match protocol? {
        Some(protocol) => vec![of(protocol)],
        None => any.iter().copied().map(of).collect(),
    })
}

enum Written {
    Numbers(PortRange),
    Name(String),
}

/// Quoted or plain, 0 to 65,535; `None` for other characters.
fn number(reader: &mut Reader, field: &Field<'_>) -> Read<Option<u16>> {
    let text = match field.value() {
        Value::Text(text) => text,
        _ => return reader.number(field, 0..=u16::MAX).map(Some),
    };
    if text.is_empty() || !text.bytes().all(|b| b.is_ascii_digit()) {
        return Ok(None);
    }
    match text.parse::<u16>() {
        // Cilium reads it as octal.
        Ok(number) if number.to_string() == *text => Ok(Some(number)),
        _ => Err(reader.refuse(field, format!("is {}", quoted(text)), "write a whole number from 0 to 65535")),
    }
}

fn icmps(reader: &mut Reader, field: &Field<'_>) -> Read<Vec<Port>> {
    let object = reader.object(field, &["fields"], &[])?;
    items(reader, &object, "fields", icmp)
}

fn icmp(reader: &mut Reader, field: &Field<'_>) -> Read<Vec<Port>> {
    let object = reader.object(field, &["family", "type"], &[])?;
    let family =
        object.get("family").map_or(Ok(false), |field| reader.word(&field, &[("IPv4", false), ("IPv6", true)]));
    let kind = reader.required(&object, "type", "write the type's number or name")?;
    let v6 = family?;
    let kind = match kind.value() {
        Value::Text(text) => match text.parse::<u8>() {
            Ok(number) if number.to_string() == *text => number,
            _ => {
                let names: &[_] = if v6 { &ICMPV6_TYPES } else { &ICMP_TYPES };
                reader.word(&kind, names)?
            }
        },
        _ => reader.number(&kind, 0..=u8::MAX)?,
    };
    Ok(vec![Port::Icmp { v6, kind: Some(kind) }])
}
