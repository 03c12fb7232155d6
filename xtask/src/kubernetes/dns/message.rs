//! DNS messages: RFC 1035, with EDNS (RFC 6891) and negative answers (RFC 2308).

use super::zone::{Data, Name, Zone};

/// Seconds.
const TTL: u32 = 5;
/// Without EDNS.
const LONGEST_PLAIN: usize = 512;
/// Fits into the MTU of every network of the cluster.
const LONGEST_UDP: u16 = 1232;
/// CNAMEs in a chain.
const LONGEST_CHAIN: usize = 8;

const A: u16 = 1;
const CNAME: u16 = 5;
const SOA: u16 = 6;
const PTR: u16 = 12;
const AAAA: u16 = 28;
const SRV: u16 = 33;
const OPT: u16 = 41;
/// As type and as class.
const ANY: u16 = 255;
const INTERNET: u16 = 1;

const RESPONSE: u16 = 0x8000;
const OPCODE: u16 = 0x7800;
const AUTHORITATIVE: u16 = 0x0400;
const TRUNCATED: u16 = 0x0200;
const RECURSION_DESIRED: u16 = 0x0100;
const RECURSION_AVAILABLE: u16 = 0x0080;

/// The question's name.
const POINTER: u16 = 0xc00c;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Transport {
    Udp,
    Tcp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Code {
    NoError = 0,
    FormatError = 1,
    ServerFailure = 2,
    NoSuchName = 3,
    NotImplemented = 4,
    Refused = 5,
    /// Of EDNS.
    BadVersion = 16,
}

#[derive(Debug)]
struct Query<'a> {
    /// Echoed, with the case of its letters.
    question: &'a [u8],
    name: Name,
    kind: u16,
    class: u16,
    edns: Option<Edns>,
}

#[derive(Debug, Clone, Copy)]
struct Edns {
    longest: u16,
    version: u8,
}

#[derive(Debug)]
struct Reply<'a> {
    code: Code,
    answers: Vec<(Name, &'a Data)>,
    /// Domain of the SOA record.
    authority: Option<Name>,
}

impl Reply<'_> {
    fn only(code: Code) -> Self {
        Self { code, answers: Vec::new(), authority: None }
    }
}

/// `None` for messages that are no queries. `zone` is `None` until services are read.
pub(super) fn answer(message: &[u8], zone: Option<&Zone>, transport: Transport) -> Option<Vec<u8>> {
    let (id, flags) = (number(message, 0)?, number(message, 2)?);
    number(message, 10)?;
    if flags & RESPONSE != 0 {
        return None;
    }
    if flags & OPCODE != 0 {
        return Some(encode(id, flags, None, &Reply::only(Code::NotImplemented), LONGEST_PLAIN));
    }
    let Some(query) = Query::read(message) else {
        return Some(encode(id, flags, None, &Reply::only(Code::FormatError), LONGEST_PLAIN));
    };
    let longest = match (transport, query.edns) {
        (Transport::Tcp, _) => usize::from(u16::MAX),
        (Transport::Udp, None) => LONGEST_PLAIN,
        (Transport::Udp, Some(edns)) => usize::from(edns.longest.min(LONGEST_UDP)).max(LONGEST_PLAIN),
    };
    let reply = match zone {
        _ if query.edns.is_some_and(|edns| edns.version > 0) => Reply::only(Code::BadVersion),
        _ if ![INTERNET, ANY].contains(&query.class) => Reply::only(Code::Refused),
        None => Reply::only(Code::ServerFailure),
        Some(zone) => resolve(zone, &query.name, query.kind),
    };
    Some(encode(id, flags, Some(&query), &reply, longest))
}

impl<'a> Query<'a> {
    /// `None` if the message is malformed or has not exactly one question.
    fn read(message: &'a [u8]) -> Option<Self> {
        let [questions, answers, authorities, additional] = [4, 6, 8, 10].map(|at| number(message, at));
        let body = message.get(12..)?;
        if questions? != 1 || answers? != 0 || authorities? != 0 {
            return None;
        }
        let (name, rest) = Name::read(body)?;
        let (kind, class) = (number(rest, 0)?, number(rest, 2)?);
        let mut rest = rest.get(4..)?;
        let question = body.get(..body.len().checked_sub(rest.len())?)?;
        let mut edns = None;
        for _ in 0..additional? {
            let (_, record) = Name::read(rest)?;
            let length = usize::from(number(record, 8)?);
            if number(record, 0)? == OPT {
                edns = Some(Edns { longest: number(record, 2)?, version: *record.get(5)? });
            }
            rest = record.get(10..)?.get(length..)?;
        }
        Some(Self { question, name, kind, class, edns })
    }
}

fn resolve<'a>(zone: &'a Zone, name: &Name, kind: u16) -> Reply<'a> {
    let mut answers = Vec::new();
    let mut owner = name.clone();
    for _ in 0..LONGEST_CHAIN {
        let records = zone.records(&owner);
        let alias = records.iter().find(|data| matches!(data, Data::Cname(_)));
        if let (Some(data @ Data::Cname(target)), false) = (alias, [CNAME, ANY].contains(&kind)) {
            answers.push((owner, data));
            owner = target.clone();
            continue;
        }
        let found = records.iter().filter(|data| kind == ANY || data.kind() == kind);
        let before = answers.len();
        answers.extend(found.map(|data| (owner.clone(), data)));
        // RFC 6604: the code is of the last name.
        let code = if zone.contains(&owner) { Code::NoError } else { Code::NoSuchName };
        let authority = if answers.len() == before { Zone::apex(&owner) } else { None };
        return Reply { code, answers, authority };
    }
    Reply::only(Code::ServerFailure)
}

fn encode(id: u16, flags: u16, query: Option<&Query<'_>>, reply: &Reply<'_>, longest: usize) -> Vec<u8> {
    let echoed = flags & (OPCODE | RECURSION_DESIRED);
    let whole = message(id, echoed, query, reply);
    if whole.len() <= longest {
        return whole;
    }
    message(id, echoed | TRUNCATED, query, &Reply::only(reply.code))
}

fn message(id: u16, flags: u16, query: Option<&Query<'_>>, reply: &Reply<'_>) -> Vec<u8> {
    let edns = query.and_then(|query| query.edns);
    let code = reply.code as u16;
    let mut bytes = Vec::new();
    let own = RESPONSE | AUTHORITATIVE | RECURSION_AVAILABLE;
    put(&mut bytes, &[id, own | flags | (code & 15)]);
    let counts = [
        usize::from(query.is_some()),
        reply.answers.len(),
        usize::from(reply.authority.is_some()),
        usize::from(edns.is_some()),
    ];
    put(&mut bytes, &counts.map(|count| u16::try_from(count).unwrap_or(u16::MAX)));
    if let Some(query) = query {
        bytes.extend(query.question);
    }
    for (owner, data) in &reply.answers {
        if query.is_some_and(|query| query.name == *owner) {
            put(&mut bytes, &[POINTER]);
        } else {
            bytes.extend(owner.wire());
        }
        record(&mut bytes, data.kind(), &data.encoded());
    }
    if let Some(domain) = &reply.authority {
        bytes.extend(domain.wire());
        record(&mut bytes, SOA, &soa(domain));
    }
    if edns.is_some() {
        bytes.push(0);
        put(&mut bytes, &[OPT, LONGEST_UDP]);
        // High bits of the code; version 0 and no flags; no options.
        put(&mut bytes, &[(code >> 4) << 8, 0, 0]);
    }
    bytes
}

/// All but the owner.
fn record(bytes: &mut Vec<u8>, kind: u16, data: &[u8]) {
    put(bytes, &[kind, INTERNET]);
    bytes.extend(TTL.to_be_bytes());
    put(bytes, &[u16::try_from(data.len()).unwrap_or(u16::MAX)]);
    bytes.extend(data);
}

fn soa(domain: &Name) -> Vec<u8> {
    let mut bytes = Vec::new();
    for label in [&b"\x02ns"[..], b"\x0ahostmaster"] {
        bytes.extend(label);
        bytes.extend(domain.wire());
    }
    let (serial, refresh, retry, expire, negative) = (1_u32, 7200_u32, 1800_u32, 86400_u32, TTL);
    for number in [serial, refresh, retry, expire, negative] {
        bytes.extend(number.to_be_bytes());
    }
    bytes
}

impl Data {
    fn kind(&self) -> u16 {
        match self {
            Self::A(_) => A,
            Self::Aaaa(_) => AAAA,
            Self::Cname(_) => CNAME,
            Self::Ptr(_) => PTR,
            Self::Srv { .. } => SRV,
        }
    }

    fn encoded(&self) -> Vec<u8> {
        match self {
            Self::A(address) => address.octets().to_vec(),
            Self::Aaaa(address) => address.octets().to_vec(),
            Self::Cname(name) | Self::Ptr(name) => name.wire().to_vec(),
            Self::Srv { port, target } => {
                let mut bytes = Vec::new();
                let (priority, weight) = (0, 100);
                put(&mut bytes, &[priority, weight, *port]);
                bytes.extend(target.wire());
                bytes
            }
        }
    }
}

fn put(bytes: &mut Vec<u8>, numbers: &[u16]) {
    bytes.extend(numbers.iter().flat_map(|number| number.to_be_bytes()));
}

fn number(bytes: &[u8], at: usize) -> Option<u16> {
    let two = bytes.get(at..)?.first_chunk::<2>()?;
    Some(u16::from_be_bytes(*two))
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::json;

    use super::*;
    use crate::kubernetes::dns::zone::tests::{name, zone};

    const EDNS: [u8; 11] = [0, 0, 41, 16, 0, 0, 0, 0, 0, 0, 0];

    pub(crate) fn query(text: &str, kind: u16) -> Vec<u8> {
        let mut bytes = vec![0xab, 0xcd, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        for label in text.split('.').filter(|label| !label.is_empty()) {
            bytes.push(u8::try_from(label.len()).unwrap());
            bytes.extend(label.bytes());
        }
        bytes.push(0);
        put(&mut bytes, &[kind, INTERNET]);
        bytes
    }

    fn with_edns(mut query: Vec<u8>) -> Vec<u8> {
        query[11] = 1;
        query.extend(EDNS);
        query
    }

    /// Flags, and counts of answers and authorities.
    fn summary(reply: &[u8]) -> (u16, u16, u16) {
        (number(reply, 2).unwrap(), number(reply, 6).unwrap(), number(reply, 8).unwrap())
    }

    fn ask(text: &str, kind: u16) -> (u16, u16, u16) {
        summary(&answer(&query(text, kind), Some(&zone()), Transport::Udp).unwrap())
    }

    #[test]
    fn an_address_has_the_bytes_of_the_standard() {
        let asked = query("Cluster.SHOP.svc.cluster.local", A);
        let reply = answer(&asked, Some(&zone()), Transport::Udp).unwrap();
        let mut expected = vec![0xab, 0xcd, 0x85, 0x80, 0, 1, 0, 1, 0, 0, 0, 0];
        expected.extend(&asked[12..]);
        expected.extend([0xc0, 0x0c, 0, 1, 0, 1, 0, 0, 0, 5, 0, 4, 10, 96, 0, 7]);
        assert_eq!(reply, expected);
    }

    #[test]
    fn other_types_are_encoded() {
        let ends_with = |text: &str, kind: u16, data: &[u8]| {
            let reply = answer(&query(text, kind), Some(&zone()), Transport::Udp).unwrap();
            assert!(reply.ends_with(data), "{text} {reply:?}");
        };
        let target = name("cluster.shop.svc.cluster.local");
        ends_with("cluster.shop.svc.cluster.local", AAAA, &[0xfd, 0x96, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7]);
        ends_with("7.0.96.10.in-addr.arpa", PTR, target.wire());
        let port = [&[0, 0, 0, 100, 0, 80], target.wire()].concat();
        ends_with("_http._tcp.cluster.shop.svc.cluster.local", SRV, &port);
        ends_with("away.shop.svc.cluster.local", CNAME, name("foo.example.com").wire());
        assert_eq!(ask("cluster.shop.svc.cluster.local", ANY), (0x8580, 2, 0));
    }

    #[test]
    fn negative_answers_name_the_zone() {
        let (no_data, no_name) = ((0x8580, 0, 1), (0x8583, 0, 1));
        assert_eq!(ask("cluster.shop.svc.cluster.local", SRV), no_data);
        assert_eq!(ask("shop.svc.cluster.local", A), no_data);
        assert_eq!(ask("no.shop.svc.cluster.local", A), no_name);
        assert_eq!(ask("1.1.1.1.in-addr.arpa", PTR), no_name);
        assert_eq!(ask("example.com", A), (0x8583, 0, 0));
        // The label has a dot.
        let mut odd = query("cluster_shop.svc.cluster.local", A);
        odd[20] = b'.';
        assert_eq!(summary(&answer(&odd, Some(&zone()), Transport::Udp).unwrap()), no_name);
    }

    #[test]
    fn aliases_are_followed() {
        assert_eq!(ask("alias.shop.svc.cluster.local", A), (0x8580, 2, 0));
        assert_eq!(ask("alias.shop.svc.cluster.local", SRV), (0x8580, 1, 1));
        assert_eq!(ask("away.shop.svc.cluster.local", A), (0x8583, 1, 0));
        assert_eq!(ask("away.shop.svc.cluster.local", CNAME), (0x8580, 1, 0));
        assert_eq!(ask("loop.shop.svc.cluster.local", A), (0x8582, 0, 0));
    }

    #[test]
    fn long_answers_are_truncated_by_udp() {
        let endpoints: Vec<_> = (1..=60).map(|last| json!({"addresses": [format!("10.244.1.{last}")]})).collect();
        let labels = json!({"kubernetes.io/service-name": "many"});
        let zone = Zone::of(&json!({"items": [
            {"kind": "Service", "metadata": {"namespace": "n", "name": "many"}, "spec": {"clusterIPs": ["None"]}},
            {"kind": "EndpointSlice", "metadata": {"namespace": "n", "labels": labels}, "endpoints": endpoints},
        ]}));
        let plain = query("many.n.svc.cluster.local", A);
        let large = with_edns(plain.clone());
        let cut = answer(&plain, Some(&zone), Transport::Udp).unwrap();
        assert_eq!((summary(&cut), cut.len()), ((0x8780, 0, 0), plain.len()));
        let whole = answer(&plain, Some(&zone), Transport::Tcp).unwrap();
        assert_eq!((summary(&whole), whole.len()), ((0x8580, 60, 0), plain.len() + 60 * 16));
        let extended = answer(&large, Some(&zone), Transport::Udp).unwrap();
        assert_eq!((summary(&extended), extended.len()), ((0x8580, 60, 0), large.len() + 60 * 16));
        assert_eq!(extended.get(extended.len() - 11..), Some(&[0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 0][..]));
    }

    #[test]
    fn other_queries_are_rejected() {
        let code = |message: &[u8]| answer(message, Some(&zone()), Transport::Udp).and_then(|reply| number(&reply, 2));
        let good = query("cluster.shop.svc.cluster.local", A);
        let changed = |at: usize, byte: u8| {
            let mut message = good.clone();
            message[at] = byte;
            code(&message)
        };
        assert_eq!(changed(2, 0x81), None, "a response");
        assert_eq!(changed(2, 0x29), Some(0xad84), "an update");
        assert_eq!(changed(5, 0), Some(0x8581), "no question");
        assert_eq!(changed(5, 2), Some(0x8581), "two questions");
        assert_eq!(changed(11, 1), Some(0x8581), "a missing record");
        assert_eq!(changed(12, 0xc0), Some(0x8581), "a pointer");
        assert_eq!(changed(good.len() - 1, 3), Some(0x8585), "class CH");
        let mut edns = with_edns(good.clone());
        let version = edns.len() - 5;
        edns[version] = 1;
        let reply = answer(&edns, Some(&zone()), Transport::Udp).unwrap();
        assert_eq!((number(&reply, 2), reply.get(reply.len() - 6)), (Some(0x8580), Some(&1)), "{reply:?}");
        assert_eq!(answer(&good, None, Transport::Udp).and_then(|reply| number(&reply, 2)), Some(0x8582));
    }

    #[test]
    fn truncated_and_changed_queries_do_not_panic() {
        let zone = zone();
        let good = with_edns(query("cluster.shop.svc.cluster.local", A));
        for length in 0..good.len() {
            let reply = answer(&good[..length], Some(&zone), Transport::Udp);
            assert_eq!(reply.and_then(|reply| number(&reply, 2)), (length >= 12).then_some(0x8581), "{length}");
        }
        for at in 0..good.len() {
            for byte in 0..=255 {
                let mut message = good.clone();
                message[at] = byte;
                for transport in [Transport::Udp, Transport::Tcp] {
                    let reply = answer(&message, Some(&zone), transport);
                    assert!(reply.is_none_or(|reply| reply.get(..2) == message.get(..2)));
                }
            }
        }
        assert!(answer(&[0; 12], Some(&zone), Transport::Udp).is_some());
        assert!(answer(&[255; 600], Some(&zone), Transport::Udp).is_none());
    }
}
