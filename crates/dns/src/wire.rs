//! DNS messages (RFC 1035, section 4), for hostile input.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    net::IpAddr,
    time::Duration,
};

use domain::{
    base::{
        Message, Ttl,
        iana::{Class, Rcode, Rtype},
        name::ToName as _,
        wire::ParseError,
    },
    rdata::{A, Aaaa, Cname},
};

/// Bytes (RFC 1035, section 4.1.1).
const HEADER: usize = 12;
/// Bytes on the wire (RFC 1035, section 2.3.4).
const MAX_NAME: usize = 255;
/// Greater values are compression or unused (RFC 1035, section 4.1.4).
const MAX_LABEL: usize = 63;
/// BIND and Unbound follow 11.
const MAX_CHAIN: usize = 16;

const QR: u8 = 0x80;
const OPCODE: u8 = 0x78;
const RD: u8 = 0x01;

/// Response code of an unreadable query (RFC 1035, section 4.1.1).
pub const FORMERR: u8 = 1;
/// Response code: server failure.
pub const SERVFAIL: u8 = 2;
/// Response code: unsupported query.
pub const NOTIMP: u8 = 4;
/// Response code: refused by policy.
pub const REFUSED: u8 = 5;

/// IXFR, AXFR (IANA).
const TRANSFERS: [u16; 2] = [251, 252];

/// The question of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// Lower case, without trailing dot; the root is `.`. Printable ASCII is literal, a dot or backslash in a label has
    /// a backslash, other bytes are `\DDD` (RFC 4343, section 2.1).
    pub name: String,
    /// Record type (IANA, DNS parameters).
    pub rtype: u16,
    /// Record class; 1 is the internet.
    pub class: u16,
    /// Offset behind the question, at least 17.
    pub end: usize,
}

/// An unusable query.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Truncated header.
    #[error("the message is shorter than a header")]
    Short,
    #[error("the message is an answer, not a query")]
    Answer,
    /// Opcode of another kind of query.
    #[error("the message is no standard query (opcode {0})")]
    Kind(u8),
    /// A zone transfer (RFC 5936, RFC 1995).
    #[error("the message asks for a zone transfer")]
    Transfer,
    /// Not exactly one question.
    #[error("the message has {0} questions instead of one")]
    Questions(u16),
    /// Invalid, or compressed.
    #[error("the question cannot be read")]
    Question,
}

/// An answer with invalid records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the records of the answer cannot be read")]
pub struct Unreadable;

impl From<ParseError> for Unreadable {
    fn from(_: ParseError) -> Self {
        Self
    }
}

/// Parses a query.
///
/// # Errors
/// Not a standard query with one uncompressed question: a compressed name could point to the id, which the proxy
/// changes.
pub fn question(message: &[u8]) -> Result<Question, Malformed> {
    let [_, _, flags, ..] = header(message)?;
    if flags & QR != 0 {
        return Err(Malformed::Answer);
    }
    let opcode = (flags & OPCODE) >> 3;
    if opcode != 0 {
        return Err(Malformed::Kind(opcode));
    }
    let question = only_question(message)?;
    if TRANSFERS.contains(&question.rtype) {
        return Err(Malformed::Transfer);
    }
    Ok(question)
}

fn header(message: &[u8]) -> Result<[u8; HEADER], Malformed> {
    message.first_chunk().copied().ok_or(Malformed::Short)
}

fn only_question(message: &[u8]) -> Result<Question, Malformed> {
    let [_, _, _, _, high, low, ..] = header(message)?;
    let count = u16::from_be_bytes([high, low]);
    if count != 1 {
        return Err(Malformed::Questions(count));
    }
    let mut rest = message.get(HEADER..).unwrap_or_default();
    let (mut name, mut length) = (String::new(), 0);
    loop {
        let (&size, after) = rest.split_first().ok_or(Malformed::Question)?;
        let size = usize::from(size);
        length += 1 + size;
        if size > MAX_LABEL || length > MAX_NAME {
            return Err(Malformed::Question);
        }
        let (label, after) = after.split_at_checked(size).ok_or(Malformed::Question)?;
        rest = after;
        if label.is_empty() {
            break;
        }
        if !name.is_empty() {
            name.push('.');
        }
        push_label(&mut name, label);
    }
    if name.is_empty() {
        name.push('.');
    }
    let (&[t1, t2, c1, c2], rest) = rest.split_first_chunk().ok_or(Malformed::Question)?;
    let (rtype, class) = (u16::from_be_bytes([t1, t2]), u16::from_be_bytes([c1, c2]));
    Ok(Question { name, rtype, class, end: message.len() - rest.len() })
}

fn push_label(name: &mut String, label: &[u8]) {
    for &byte in label {
        match byte {
            b'.' | b'\\' => name.extend(['\\', char::from(byte)]),
            b'!'..=b'~' => name.push(char::from(byte.to_ascii_lowercase())),
            _ => {
                let digit = |place: u8| char::from(b'0' + byte / place % 10);
                name.extend(['\\', digit(100), digit(10), digit(1)]);
            }
        }
    }
}

/// The message's id.
#[must_use]
pub fn id(message: &[u8]) -> Option<u16> {
    message.first_chunk().map(|bytes| u16::from_be_bytes(*bytes))
}

pub fn set_id(message: &mut [u8], id: u16) {
    if let Some(bytes) = message.first_chunk_mut() {
        *bytes = id.to_be_bytes();
    }
}

/// Response code (RFC 1035, section 4.1.1), without EDNS extension.
#[must_use]
pub fn rcode(message: &[u8]) -> u8 {
    message.get(3).map_or(0, |flags| flags & 0x0f)
}

/// An answer without records; `None` for an answer.
#[must_use]
pub fn reply(query: &[u8], question: Option<&Question>, rcode: u8) -> Option<Vec<u8>> {
    let [id1, id2, flags, ..] = header(query).ok()?;
    if flags & QR != 0 {
        return None;
    }
    let question = question.and_then(|question| query.get(HEADER..question.end)).unwrap_or_default();
    let count = u8::from(!question.is_empty());
    let flags = QR | flags & (OPCODE | RD);
    let mut answer = vec![id1, id2, flags, rcode & 0x0f, 0, count, 0, 0, 0, 0, 0, 0];
    answer.extend_from_slice(question);
    Some(answer)
}

/// Whether the message answers the query; an error may lack the question.
#[must_use]
pub fn is_answer(message: &[u8], id: u16, question: &Question) -> bool {
    let Ok([id1, id2, flags, ..]) = header(message) else { return false };
    if u16::from_be_bytes([id1, id2]) != id || flags & (QR | OPCODE) != QR {
        return false;
    }
    match only_question(message) {
        Ok(answered) => same(&answered, question),
        Err(Malformed::Questions(0)) => rcode(message) != 0,
        Err(_) => false,
    }
}

fn same(one: &Question, other: &Question) -> bool {
    (&one.name, one.rtype, one.class) == (&other.name, other.rtype, other.class)
}

/// Addresses of the queried name: A and AAAA records at the end of its CNAME chain, with the shortest TTL. IPv4-mapped
/// addresses become IPv4. Empty for an error or another question.
///
/// # Errors
/// Invalid records (in a truncated answer, the valid ones count), or too many CNAME records.
pub fn addresses(message: &[u8], question: &Question) -> Result<Vec<(IpAddr, Duration)>, Unreadable> {
    let answers = only_question(message).is_ok_and(|answered| same(&answered, question));
    let Ok(message) = Message::from_octets(message) else { return Err(Unreadable) };
    if !answers || rcode(message.as_slice()) != 0 {
        return Ok(Vec::new());
    }
    let (mut chain, mut ends) = (Vec::new(), Vec::new());
    for record in message.answer()? {
        let record = match record {
            Ok(record) => record,
            Err(_) if message.header().tc() => break,
            Err(error) => return Err(error.into()),
        };
        if record.class() != Class::IN {
            continue;
        }
        let (owner, ttl) = (record.owner(), seconds(record.ttl()));
        match record.rtype() {
            Rtype::CNAME => {
                let Some(data) = record.to_record::<Cname<_>>()? else { continue };
                chain.push((owner, data.into_data().into_cname(), ttl));
            }
            Rtype::A => {
                let Some(data) = record.to_record::<A>()? else { continue };
                ends.push((owner, IpAddr::V4(data.data().addr()), ttl));
            }
            Rtype::AAAA => {
                let Some(data) = record.to_record::<Aaaa>()? else { continue };
                ends.push((owner, IpAddr::V6(data.data().addr()).to_canonical(), ttl));
            }
            _ => {}
        }
        if chain.len() > MAX_CHAIN {
            return Err(Unreadable);
        }
    }
    let mut name = *message.sole_question()?.qname();
    let mut shortest = u32::MAX;
    // Each step consumes a record: a cycle ends.
    while let Some(place) = chain.iter().position(|(owner, ..)| owner.name_eq(&name)) {
        let (_, target, ttl) = chain.remove(place);
        (name, shortest) = (target, shortest.min(ttl));
    }
    let mut found = BTreeMap::new();
    for (_, address, ttl) in ends.into_iter().filter(|(owner, ..)| owner.name_eq(&name)) {
        let ttl = shortest.min(ttl);
        match found.entry(address) {
            Entry::Vacant(place) => drop(place.insert(ttl)),
            Entry::Occupied(mut before) => *before.get_mut() = ttl.min(*before.get()),
        }
    }
    Ok(found.into_iter().map(|(address, ttl)| (address, Duration::from_secs(ttl.into()))).collect())
}

/// The highest bit means 0 (RFC 2181, section 8).
fn seconds(ttl: Ttl) -> u32 {
    let seconds = ttl.as_secs();
    if i32::try_from(seconds).is_ok() { seconds } else { 0 }
}

/// Such as `A`, `TYPE65280`.
#[must_use]
pub fn type_name(rtype: u16) -> String {
    Rtype::from_int(rtype).to_string()
}

/// Such as `NXDOMAIN`.
#[must_use]
pub fn rcode_name(rcode: u8) -> String {
    Rcode::masked_from_int(rcode).to_string()
}

#[cfg(test)]
mod tests;
