//! DNS messages as bytes (RFC 1035, section 4): what is asked, what is answered. Pure, for input from hostile clients and servers.
//!
//! Messages are looked at, never written anew: what passes is what was sent, but for the id. The answers that the proxy gives by itself
//! ([`reply`]) have the query's own question.

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

/// Bytes before the question (RFC 1035, section 4.1.1).
const HEADER: usize = 12;
/// Longest name, bytes on the wire (RFC 1035, section 2.3.4).
const MAX_NAME: usize = 255;
/// Longest label, bytes; above it are compression and unused kinds (RFC 1035, section 4.1.4).
const MAX_LABEL: usize = 63;
/// CNAME records of one answer. Resolvers follow fewer (BIND and Unbound: 11).
const MAX_CHAIN: usize = 16;

/// Bit of the third byte: the message is an answer.
const QR: u8 = 0x80;
/// Bits of the third byte: the kind of query.
const OPCODE: u8 = 0x78;
/// Bit of the third byte: the client wants recursion.
const RD: u8 = 0x01;

/// Code of an answer: the server cannot read the query (RFC 1035, section 4.1.1, as are the next ones).
pub const FORMERR: u8 = 1;
/// Code of an answer: the server has a problem.
pub const SERVFAIL: u8 = 2;
/// Code of an answer: the server does not know such queries.
pub const NOTIMP: u8 = 4;
/// Code of an answer: the server refuses for reasons of policy.
pub const REFUSED: u8 = 5;

/// Types whose answers are several messages: zone transfers (IANA, DNS parameters: IXFR, AXFR).
const TRANSFERS: [u16; 2] = [251, 252];

/// What a message asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// The name in lower case, without the last dot; the root is `.`. Only letters, digits and other printable ASCII are as they are: a dot
    /// or a backslash inside a label has a backslash before it, any other byte is `\` and three decimal digits (RFC 4343, section 2.1).
    pub name: String,
    /// Type of the records that are asked for (IANA, DNS parameters).
    pub rtype: u16,
    /// Class of the records that are asked for; 1 is the internet.
    pub class: u16,
    /// Offset of the first byte behind the question, 17 and more.
    pub end: usize,
}

/// Why a message is no query that can be passed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// There is no whole header.
    #[error("the message is shorter than a header")]
    Short,
    /// It is an answer.
    #[error("the message is an answer, not a query")]
    Answer,
    /// Another kind than a standard query, by its opcode (RFC 1035, section 4.1.1).
    #[error("the message is no standard query (opcode {0})")]
    Kind(u8),
    /// A query whose answer may be several messages (RFC 5936, RFC 1995).
    #[error("the message asks for a zone transfer")]
    Transfer,
    /// Not one question.
    #[error("the message has {0} questions instead of one")]
    Questions(u16),
    /// The question cannot be read, or its name is compressed.
    #[error("the question cannot be read")]
    Question,
}

/// An answer whose records cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the records of the answer cannot be read")]
pub struct Unreadable;

impl From<ParseError> for Unreadable {
    fn from(_: ParseError) -> Self {
        Self
    }
}

/// What a query asks.
///
/// # Errors
///
/// The message is not a standard query with one question. A compressed name is refused: it could point to the id, which the proxy changes,
/// and the server would read another name than was judged.
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

/// The id of a message, if it has a header.
#[must_use]
pub fn id(message: &[u8]) -> Option<u16> {
    message.first_chunk().map(|bytes| u16::from_be_bytes(*bytes))
}

/// Gives a message another id.
pub fn set_id(message: &mut [u8], id: u16) {
    if let Some(bytes) = message.first_chunk_mut() {
        *bytes = id.to_be_bytes();
    }
}

/// The code of an answer (RFC 1035, section 4.1.1), without what EDNS adds to it.
#[must_use]
pub fn rcode(message: &[u8]) -> u8 {
    message.get(3).map_or(0, |flags| flags & 0x0f)
}

/// An answer without records to what may be no query at all. It has the question if that is known. `None`: nothing is to be
/// answered, because there is no header, or the message is an answer itself.
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

/// Whether a message is the answer to a query with that id and question. An error may have none: servers that do not understand a query leave
/// the question out.
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

/// The addresses that an answer gives for the name that was asked: those of the A and AAAA records at the end of the chain of CNAME records
/// that begins at that name, each once, for as long as the shortest-lived record of the way lives. Records of other names are
/// ignored. An IPv4 address in an AAAA record is told as what it is. An answer with an error, or to another question, gives none.
///
/// # Errors
///
/// The records cannot be read, or there are more CNAME records than anybody follows. Of a truncated answer (TC) those count that can be read.
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
    // Each step takes one record of the chain away, so a circle ends.
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

/// A value with the highest bit set counts as 0 (RFC 2181, section 8).
fn seconds(ttl: Ttl) -> u32 {
    let seconds = ttl.as_secs();
    if i32::try_from(seconds).is_ok() { seconds } else { 0 }
}

/// The name of a type of records, `A` or `TYPE65280`.
#[must_use]
pub fn type_name(rtype: u16) -> String {
    Rtype::from_int(rtype).to_string()
}

/// The name of an answer's code: `NOERROR`, `NXDOMAIN`.
#[must_use]
pub fn rcode_name(rcode: u8) -> String {
    Rcode::masked_from_int(rcode).to_string()
}

#[cfg(test)]
mod tests;
