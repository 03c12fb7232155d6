//! DNS messages, put together by hand: also such as no library writes.

use std::net::IpAddr;

/// Types and codes (IANA, DNS parameters).
pub const A: u16 = 1;
pub const CNAME: u16 = 5;
pub const TXT: u16 = 16;
pub const AAAA: u16 = 28;
pub const NXDOMAIN: u8 = 3;

/// A name on the wire, without compression, in the case that it is given in.
pub fn name(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for label in text.split('.').filter(|label| !label.is_empty()) {
        bytes.push(u8::try_from(label.len()).expect("a short label"));
        bytes.extend(label.as_bytes());
    }
    bytes.push(0);
    bytes
}

/// A query with recursion desired, for class IN.
pub fn query(id: u16, text: &str, rtype: u16) -> Vec<u8> {
    let mut bytes = id.to_be_bytes().to_vec();
    bytes.extend([1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    bytes.extend(name(text));
    bytes.extend(rtype.to_be_bytes());
    bytes.extend([0, 1]);
    bytes
}

/// The query with an OPT record (RFC 6891) that has a cookie, and a version and flags that nobody knows.
pub fn with_edns(mut query: Vec<u8>) -> Vec<u8> {
    query[11] = 1;
    query.extend([0, 0, 41, 0x10, 0, 0, 7, 0x80, 0x55, 0, 12, 0, 10, 0, 8, 1, 2, 3, 4, 5, 6, 7, 8]);
    query
}

/// A record of class IN.
pub fn record(owner: &[u8], rtype: u16, ttl: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = owner.to_vec();
    bytes.extend(rtype.to_be_bytes());
    bytes.extend([0, 1]);
    bytes.extend(ttl.to_be_bytes());
    bytes.extend(u16::try_from(data.len()).expect("short data").to_be_bytes());
    bytes.extend(data);
    bytes
}

/// An address record.
pub fn address(owner: &str, address: &str, ttl: u32) -> Vec<u8> {
    match address.parse().expect("an address") {
        IpAddr::V4(ip) => record(&name(owner), A, ttl, &ip.octets()),
        IpAddr::V6(ip) => record(&name(owner), AAAA, ttl, &ip.octets()),
    }
}

pub fn alias(owner: &str, target: &str, ttl: u32) -> Vec<u8> {
    record(&name(owner), CNAME, ttl, &name(target))
}

/// The answer to a query, with its id, question and OPT record, and these records.
pub fn answer(query: &[u8], rcode: u8, records: &[Vec<u8>]) -> Vec<u8> {
    let end = 12 + query[12..].iter().position(|byte| *byte == 0).expect("an end of the name") + 5;
    let mut bytes = query[..end].to_vec();
    bytes[2] |= 0x80;
    bytes[3] = 0x80 | rcode;
    bytes[6..8].copy_from_slice(&u16::try_from(records.len()).expect("few records").to_be_bytes());
    bytes.extend(records.concat());
    bytes.extend(&query[end..]);
    bytes
}
