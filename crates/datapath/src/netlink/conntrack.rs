//! The node's conntrack rows, by ctnetlink.
//!
//! A row outlives the owner of its address: a new owner would inherit the old translations and states. Only the
//! addresses, the id and the zone of a row are read. The tuple that identifies the row is sent back unchanged, so
//! unknown protocols and attributes of a newer kernel do no harm.

use std::{
    collections::HashSet,
    fs, io,
    net::IpAddr,
    time::{Duration, Instant},
};

use nix::sys::{
    socket::{setsockopt, sockopt},
    time::TimeVal,
};
use rtnetlink::{
    packet_core::{DefaultNla, Emitable, NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NlaBuffer, NlasIterator},
    sys::{Socket, SocketAddr, protocols::NETLINK_NETFILTER},
};
use wharf_core::kernel::{KernelErrorKind, Result};
use wharf_crash as crash;

use super::{
    Refusal,
    batch::{Body, HEADER_LEN, frames},
};
use crate::error::{fail, wrap};

const OPERATION: &str = "remove connections";
const SUBJECT: &str = "conntrack";

/// Rows in the namespace of the thread that opens it. It is there as soon as the kernel tracks anything at all.
const COUNT: &str = "/proc/sys/net/netfilter/nf_conntrack_count";

/// Message types of `linux/netfilter/nfnetlink_conntrack.h`, in the subsystem `NFNL_SUBSYS_CTNETLINK`.
const CT_GET: u16 = 1 << 8 | 1;
const CT_DELETE: u16 = 1 << 8 | 2;
/// Length of `struct nfgenmsg`: family, version, resource id (big endian).
const GENERIC_LEN: usize = 4;

/// Attributes of a row (`enum ctattr_type`).
const TUPLE_ORIG: u16 = 1;
const TUPLE_REPLY: u16 = 2;
const ID: u16 = 12;
const ZONE: u16 = 18;
/// Attribute of a tuple (`enum ctattr_tuple`).
const TUPLE_IP: u16 = 1;
/// Addresses of a tuple (`enum ctattr_ip`), source and destination.
const IPV4: [u16; 2] = [1, 2];
const IPV6: [u16; 2] = [3, 4];

/// Maximum rows found in one pass; the next pass finds more.
const LOOK: usize = 16_384;
/// Maximum passes of one call: four million rows, more than any node's table has.
const LOOKS: usize = 256;
/// Deletes in one `sendmsg`: their answers must fit the socket's receive buffer.
const CHUNK: usize = 32;
/// The kernel answers before `sendmsg` returns; this only bounds a wait that a bug would make endless.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// A table of millions of rows is read in a second or two.
const DUMP_TIMEOUT: Duration = Duration::from_secs(60);

/// Whether the kernel tracks connections in the calling thread's network namespace.
pub(crate) fn is_there() -> bool {
    count() != 0 || fs::exists(COUNT).unwrap_or(false)
}

/// Rows in the calling thread's network namespace. 0 where the kernel tracks nothing: the module is not loaded, and
/// asking for the rows would load it.
fn count() -> u64 {
    fs::read_to_string(COUNT).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// Removes every row in which one of the addresses occurs, in either direction and any zone; says how many there were.
pub(crate) fn remove(ips: &[IpAddr]) -> Result<u64> {
    if ips.is_empty() || count() == 0 {
        return Ok(0);
    }
    let wanted: HashSet<IpAddr> = ips.iter().map(IpAddr::to_canonical).collect();
    let mut removed = 0;
    for _ in 0..LOOKS {
        let Some(found) = Tracker::open()?.find(&wanted)? else { return Ok(removed) };
        let all = found.len() < LOOK;
        removed += Tracker::open()?.delete(found)?;
        if all {
            return Ok(removed);
        }
    }
    let cause = "new rows of the addresses keep coming; who uses them?";
    Err(fail(OPERATION, SUBJECT, KernelErrorKind::Exhausted, cause))
}

/// A row's family and the attributes that identify the row to the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Row {
    /// `AF_INET` or `AF_INET6`.
    family: u8,
    name: Vec<DefaultNla>,
}

/// A netfilter socket and its next sequence number.
struct Tracker {
    socket: Socket,
    sequence: u32,
}

impl Tracker {
    /// Opens a socket in the calling thread's network namespace.
    fn open() -> Result<Self> {
        Self::try_open().map_err(|e| wrap("open netlink socket", "NETLINK_NETFILTER", &e))
    }

    fn try_open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_NETFILTER)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        socket.set_cap_ack(true)?;
        let timeout = TimeVal::new(ANSWER_TIMEOUT.as_secs().cast_signed(), 0);
        setsockopt(&socket, sockopt::ReceiveTimeout, &timeout)?;
        Ok(Self { socket, sequence: 0 })
    }

    /// Looks through the table, both families at once; [`LOOK`] rows at most, then the look ends. `None` when there is
    /// no table.
    fn find(mut self, wanted: &HashSet<IpAddr>) -> Result<Option<Vec<Row>>> {
        let mut request = Vec::new();
        self.append(&mut request, CT_GET, NLM_F_DUMP, libc::AF_UNSPEC, &[]);
        self.send(&request)?;
        let until = Instant::now() + DUMP_TIMEOUT;
        let mut found = Vec::new();
        loop {
            for frame in self.receive()? {
                if frame.sequence != self.sequence {
                    continue;
                }
                match frame.body {
                    Body::Message(bytes) => match read(&bytes, wanted) {
                        Ok(row) => found.extend(row),
                        Err(Unreadable) => {
                            let cause = "the kernel answered with a row that cannot be read";
                            return Err(fail(OPERATION, SUBJECT, KernelErrorKind::Other, cause));
                        }
                    },
                    Body::Refused(refusal) if is_missing(&refusal) => return Ok(None),
                    // The kernel has rows but no ctnetlink to list them.
                    Body::Refused(refusal) if refusal.is(libc::EINVAL) => {
                        let cause = "the kernel tracks connections but has no ctnetlink; load nf_conntrack_netlink";
                        return Err(fail(OPERATION, SUBJECT, KernelErrorKind::Unsupported, cause));
                    }
                    Body::Refused(refusal) => return Err(refusal.into_error(OPERATION, SUBJECT)),
                    Body::Done | Body::Ack => return Ok(Some(found)),
                }
                if found.len() >= LOOK {
                    return Ok(Some(found));
                }
            }
            if Instant::now() > until {
                let cause = format!("the table was not read within {DUMP_TIMEOUT:?}; try again");
                return Err(fail(OPERATION, SUBJECT, KernelErrorKind::Exhausted, cause));
            }
        }
    }

    /// Deletes rows. Rows that are already gone are not counted.
    fn delete(mut self, rows: Vec<Row>) -> Result<u64> {
        let mut removed = 0;
        let mut first = None;
        for chunk in rows.chunks(CHUNK) {
            crash::point("datapath/connections/before-delete");
            let mut requests = Vec::new();
            let before = self.sequence;
            for row in chunk {
                self.append(&mut requests, CT_DELETE, NLM_F_ACK, row.family.into(), &row.name);
            }
            self.send(&requests)?;
            let mut open: HashSet<u32> = (1..=chunk.len() as u64)
                .filter_map(|n| u32::try_from(n).ok())
                .map(|n| before.wrapping_add(n))
                .collect();
            while !open.is_empty() {
                for frame in self.receive()? {
                    let answers = matches!(frame.body, Body::Ack | Body::Refused(_)) && open.remove(&frame.sequence);
                    match frame.body {
                        Body::Ack if answers => removed += 1,
                        Body::Refused(refusal) if answers && !refusal.is(libc::ENOENT) => {
                            first.get_or_insert(refusal);
                        }
                        _ => {}
                    }
                }
            }
        }
        match first {
            Some(refusal) => Err(refusal.into_error(OPERATION, SUBJECT)),
            None => Ok(removed),
        }
    }

    fn append(&mut self, buffer: &mut Vec<u8>, kind: u16, flags: u16, family: i32, attributes: &[DefaultNla]) {
        self.sequence = self.sequence.wrapping_add(1);
        let payload = attributes.buffer_len();
        let length = HEADER_LEN + GENERIC_LEN + payload;
        buffer.extend(u32::try_from(length).unwrap_or(u32::MAX).to_ne_bytes());
        buffer.extend(kind.to_ne_bytes());
        buffer.extend((flags | NLM_F_REQUEST).to_ne_bytes());
        buffer.extend(self.sequence.to_ne_bytes());
        buffer.extend(0u32.to_ne_bytes());
        // `nfgenmsg`: family, version 0, resource id 0.
        buffer.extend([u8::try_from(family).unwrap_or_default(), 0, 0, 0]);
        let start = buffer.len();
        buffer.resize(start + payload.next_multiple_of(4), 0);
        if let Some(room) = buffer.get_mut(start..start + payload) {
            attributes.emit(room);
        }
    }

    fn send(&self, buffer: &[u8]) -> Result<()> {
        let sent = self.socket.send(buffer, 0).map_err(|e| wrap(OPERATION, SUBJECT, &e))?;
        if sent == buffer.len() {
            return Ok(());
        }
        Err(fail(OPERATION, SUBJECT, KernelErrorKind::Other, "the kernel took only a part of the request"))
    }

    fn receive(&self) -> Result<Vec<super::batch::Frame>> {
        let datagram = loop {
            match self.socket.recv_from_full() {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                other => break other.map_err(|e| wrap(OPERATION, SUBJECT, &e))?.0,
            }
        };
        if datagram.is_empty() {
            return Err(fail(OPERATION, SUBJECT, KernelErrorKind::Other, "empty answer"));
        }
        frames(&datagram).map_err(|e| wrap(OPERATION, SUBJECT, &e))
    }
}

/// The kernel tracks nothing.
fn is_missing(refusal: &Refusal) -> bool {
    [libc::EPROTONOSUPPORT, libc::EOPNOTSUPP, libc::ENOENT, libc::EAFNOSUPPORT].iter().any(|e| refusal.is(*e))
}

/// Not the message of a row.
#[derive(Debug)]
struct Unreadable;

/// Reads a row; `None` when it is of none of the addresses.
fn read(message: &[u8], wanted: &HashSet<IpAddr>) -> std::result::Result<Option<Row>, Unreadable> {
    let family = *message.get(HEADER_LEN).ok_or(Unreadable)?;
    let attributes = message.get(HEADER_LEN + GENERIC_LEN..).ok_or(Unreadable)?;
    let (mut name, mut ours, mut named) = (Vec::new(), false, false);
    for attribute in NlasIterator::new(attributes) {
        let attribute = attribute.map_err(|_| Unreadable)?;
        match attribute.kind() {
            kind @ (TUPLE_ORIG | TUPLE_REPLY) => {
                ours |= has_address(attribute.value(), wanted)?;
                named |= kind == TUPLE_ORIG;
                if kind == TUPLE_ORIG {
                    name.push(copy(&attribute));
                }
            }
            ID | ZONE => name.push(copy(&attribute)),
            _ => {}
        }
    }
    if named { Ok(ours.then_some(Row { family, name })) } else { Err(Unreadable) }
}

/// Whether a row is of one of the addresses, for [`crate::outside`]; `None` when it cannot be read.
pub(crate) fn is_of(message: &[u8], wanted: &HashSet<IpAddr>) -> Option<bool> {
    read(message, wanted).ok().map(|row| row.is_some())
}

fn copy(attribute: &NlaBuffer<&[u8]>) -> DefaultNla {
    DefaultNla::new(attribute.kind(), attribute.value().to_vec())
}

/// Whether one of the addresses is the source or the destination of a tuple.
fn has_address(tuple: &[u8], wanted: &HashSet<IpAddr>) -> std::result::Result<bool, Unreadable> {
    let mut found = false;
    for part in NlasIterator::new(tuple) {
        let part = part.map_err(|_| Unreadable)?;
        if part.kind() != TUPLE_IP {
            continue;
        }
        for address in NlasIterator::new(part.value()) {
            let address = address.map_err(|_| Unreadable)?;
            let ip = match address.kind() {
                kind if IPV4.contains(&kind) => <[u8; 4]>::try_from(address.value()).map(IpAddr::from),
                kind if IPV6.contains(&kind) => <[u8; 16]>::try_from(address.value()).map(IpAddr::from),
                _ => continue,
            };
            found |= wanted.contains(&ip.map_err(|_| Unreadable)?);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use rtnetlink::packet_core::Nla;

    use super::*;

    fn nest(kind: u16, parts: &[DefaultNla]) -> DefaultNla {
        let mut value = vec![0; parts.buffer_len()];
        parts.emit(&mut value);
        DefaultNla::new(kind, value)
    }

    fn tuple(kind: u16, source: [u8; 4], destination: [u8; 4]) -> DefaultNla {
        let addresses = [DefaultNla::new(1, source.to_vec()), DefaultNla::new(2, destination.to_vec())];
        nest(kind, &[nest(TUPLE_IP, &addresses), nest(2, &[DefaultNla::new(1, vec![17])])])
    }

    fn message(attributes: &[DefaultNla]) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_LEN + GENERIC_LEN + attributes.buffer_len()];
        if let Some(family) = bytes.get_mut(HEADER_LEN) {
            *family = 2;
        }
        if let Some(room) = bytes.get_mut(HEADER_LEN + GENERIC_LEN..) {
            attributes.emit(room);
        }
        bytes
    }

    fn wanted(ip: [u8; 4]) -> HashSet<IpAddr> {
        HashSet::from([IpAddr::from(ip)])
    }

    /// 10.0.0.1 to 10.0.0.9, which is 10.0.0.2 behind a translation.
    fn row() -> Vec<DefaultNla> {
        vec![
            tuple(TUPLE_ORIG, [10, 0, 0, 1], [10, 0, 0, 9]),
            tuple(TUPLE_REPLY, [10, 0, 0, 2], [10, 0, 0, 1]),
            DefaultNla::new(ID, vec![1, 2, 3, 4]),
            DefaultNla::new(ZONE, vec![0, 7]),
            DefaultNla::new(99, vec![1; 5]),
        ]
    }

    #[test]
    fn a_row_is_of_each_address_of_either_direction_and_keeps_its_name() {
        for ip in [[10, 0, 0, 1], [10, 0, 0, 9], [10, 0, 0, 2]] {
            let found = read(&message(&row()), &wanted(ip)).ok().flatten();
            let kinds = found.as_ref().map(|r| (r.family, r.name.iter().map(Nla::kind).collect::<Vec<_>>()));
            assert_eq!(kinds, Some((2, vec![TUPLE_ORIG, ID, ZONE])), "{ip:?}");
            assert_eq!(
                found.map(|r| r.name),
                row().get(..1).map(|orig| [orig, row().get(2..4).unwrap_or(&[])].concat())
            );
        }
        assert!(read(&message(&row()), &wanted([10, 0, 0, 3])).is_ok_and(|r| r.is_none()));
    }

    #[test]
    fn a_damaged_row_is_an_error_or_none_of_ours_but_no_panic() {
        let whole = message(&row());
        for length in 0..whole.len() {
            let cut = whole.get(..length).unwrap_or_default();
            let _either = read(cut, &wanted([10, 0, 0, 3])).is_ok();
            for byte in [0u8, 1, 255] {
                let mut bent = whole.clone();
                if let Some(b) = bent.get_mut(length) {
                    *b = byte;
                }
                let _either = read(&bent, &wanted([10, 0, 0, 1])).is_ok();
            }
        }
        let short = nest(TUPLE_ORIG, &[nest(TUPLE_IP, &[DefaultNla::new(1, vec![10, 0])])]);
        assert!(read(&message(&[short]), &wanted([10, 0, 0, 1])).is_err(), "half an address");
        assert!(read(&message(&row()[1..]), &wanted([10, 0, 0, 1])).is_err(), "a row without a name");
        assert!(read(&[], &wanted([10, 0, 0, 1])).is_err());
    }
}
