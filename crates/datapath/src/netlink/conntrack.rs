//! The node's conntrack rows, over ctnetlink. A row outlives its address's owner: a new owner would inherit
//! translations and states. It also keeps a flow's destination when a port is published later. The identifying tuple is
//! sent back unchanged, with unknown attributes.

use std::{
    collections::{BTreeSet, HashSet},
    fs, io,
    net::IpAddr,
    time::{Duration, Instant},
};

use ipnet::IpNet;
use nix::sys::{
    socket::{setsockopt, sockopt},
    time::TimeVal,
};
use rtnetlink::{
    packet_core::{DefaultNla, Emitable, NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NlaBuffer, NlasIterator},
    sys::{Socket, SocketAddr, protocols::NETLINK_NETFILTER},
};
use wharf_core::{
    kernel::{KernelErrorKind, Result, Tracked},
    nat::{PortMapping, Protocol},
};
use wharf_crash as crash;

use super::{
    Refusal,
    batch::{Body, HEADER_LEN, frames},
};
use crate::error::{fail, wrap};

const OPERATION: &str = "remove connections";
const SUBJECT: &str = "conntrack";

const COUNT: &str = "/proc/sys/net/netfilter/nf_conntrack_count";

const LIMIT: &str = "/proc/sys/net/netfilter/nf_conntrack_max";

/// `linux/netfilter/nfnetlink_conntrack.h`, in `NFNL_SUBSYS_CTNETLINK`.
const CT_GET: u16 = 1 << 8 | 1;
const CT_DELETE: u16 = 1 << 8 | 2;
/// `struct nfgenmsg`: family, version, resource id (big endian).
const GENERIC_LEN: usize = 4;

/// `enum ctattr_type`.
const TUPLE_ORIG: u16 = 1;
const TUPLE_REPLY: u16 = 2;
const ID: u16 = 12;
const ZONE: u16 = 18;
const FILTER: u16 = 25;
/// `enum ctattr_tuple`.
const TUPLE_IP: u16 = 1;
const TUPLE_PROTO: u16 = 2;
const IPV4: [u16; 2] = [1, 2];
const IPV6: [u16; 2] = [3, 4];
/// `enum ctattr_l4proto`.
const PROTO_NUM: u16 = 1;
const PROTO_PORTS: [u16; 2] = [2, 3];
/// Original protocol and destination port (`enum ctattr_filter`, Linux 5.9). Older kernels return all rows.
const FILTER_ORIG_FLAGS: u16 = 1;
const FILTER_PROTO_AND_DST_PORT: u32 = 1 << 3 | 1 << 5;
const NESTED: u16 = 1 << 15;

/// Rows found per pass.
const LOOK: usize = 16_384;
/// Ports with a filtered pass each.
const FILTERS: usize = 8;
/// Rows that may be scanned while a create waits.
const SMALL: u64 = 4_096;
/// Per call: four million rows.
const LOOKS: usize = 256;
/// The answers must fit the receive buffer.
const CHUNK: usize = 32;
/// Guards against bugs.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
const DUMP_TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) fn is_there() -> bool {
    count() != 0 || fs::exists(COUNT).unwrap_or(false)
}

/// 0 without the module, which a netlink query would load.
fn count() -> u64 {
    number(COUNT).unwrap_or(0)
}

fn number(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

pub(crate) fn fill() -> Option<Tracked> {
    Some(Tracked { entries: number(COUNT)?, limit: number(LIMIT)? })
}

/// In either direction and any zone.
pub(crate) fn remove(ips: &[IpAddr]) -> Result<u64> {
    if ips.is_empty() || count() == 0 {
        return Ok(0);
    }
    let wanted: HashSet<IpAddr> = ips.iter().map(IpAddr::to_canonical).collect();
    remove_where(None, &|original, reply| original.is_of(&wanted) || reply.is_of(&wanted))
}

pub(crate) struct Published<'a> {
    pub(crate) mappings: &'a [PortMapping],
    pub(crate) own: &'a HashSet<IpAddr>,
    pub(crate) node: &'a HashSet<IpAddr>,
    pub(crate) pools: &'a [IpNet],
}

/// Rows that began before their port was published, or without the table.
pub(crate) fn remove_stale(published: &Published<'_>) -> Result<u64> {
    if published.mappings.is_empty() && published.own.is_empty() || count() == 0 {
        return Ok(0);
    }
    let is_stale = |original: &Ends, reply: &Ends| published.is_stale(original, reply);
    let udp = published.mappings.iter().filter(|m| m.protocol == Protocol::Udp);
    let filter = |m: &PortMapping| Filter {
        family: if m.container.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 },
        protocol: m.protocol.number(),
        port: m.host_port.get(),
    };
    let filters: BTreeSet<Filter> = udp.map(filter).collect();
    if filters.len() > FILTERS || !published.own.is_empty() {
        return remove_where(None, &is_stale);
    }
    filters.into_iter().map(|filter| remove_where(Some(filter), &is_stale)).sum()
}

pub(crate) fn is_small() -> bool {
    count() <= SMALL
}

impl Published<'_> {
    fn is_stale(&self, original: &Ends, reply: &Ends) -> bool {
        let ([from, Some(to)], [answers, back]) = (original.addresses, reply.addresses) else { return false };
        let keeps_its_address = |ip: IpAddr| self.own.contains(&ip) && back != Some(ip);
        if from.is_some_and(keeps_its_address) {
            return true;
        }
        let is_own = self.node.contains(&to) || to.is_ipv4() && to.is_loopback();
        // Foreign rules' translations stay.
        let is_ours = answers == Some(to) || answers.is_some_and(|ip| self.pools.iter().any(|pool| pool.contains(&ip)));
        // A TCP or SCTP flow is a connection that its peer knows.
        is_ours
            && self.mappings.iter().filter(|m| m.protocol == Protocol::Udp).any(|m| {
                m.host_ip.map_or(is_own && to.is_ipv4() == m.container.is_ipv4(), |of| of == to)
                    && (original.protocol, original.ports[1]) == (Some(m.protocol.number()), Some(m.host_port.get()))
                    && (answers, reply.ports[0]) != (Some(m.container), Some(m.container_port.get()))
            })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Filter {
    family: i32,
    protocol: u8,
    port: u16,
}

impl Filter {
    fn attributes(self) -> [DefaultNla; 2] {
        let [_, destination] = PROTO_PORTS;
        let proto = [
            DefaultNla::new(PROTO_NUM, vec![self.protocol]),
            DefaultNla::new(destination, self.port.to_be_bytes().to_vec()),
        ];
        let flags = DefaultNla::new(FILTER_ORIG_FLAGS, FILTER_PROTO_AND_DST_PORT.to_ne_bytes().to_vec());
        [nest(TUPLE_ORIG, &[nest(TUPLE_PROTO, &proto)]), nest(FILTER | NESTED, &[flags])]
    }
}

fn nest(kind: u16, parts: &[DefaultNla]) -> DefaultNla {
    let mut value = vec![0; parts.buffer_len()];
    parts.emit(&mut value);
    DefaultNla::new(kind, value)
}

type Wanted<'a> = &'a dyn Fn(&Ends, &Ends) -> bool;

fn remove_where(filter: Option<Filter>, wanted: Wanted<'_>) -> Result<u64> {
    let mut removed = 0;
    for _ in 0..LOOKS {
        let Some(found) = Tracker::open()?.find(filter, wanted)? else { return Ok(removed) };
        let all = found.len() < LOOK;
        removed += Tracker::open()?.delete(found)?;
        if all {
            return Ok(removed);
        }
    }
    let cause = "new rows keep coming; who uses the addresses or ports?";
    Err(fail(OPERATION, SUBJECT, KernelErrorKind::Exhausted, cause))
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Row {
    family: u8,
    name: Vec<DefaultNla>,
}

struct Tracker {
    socket: Socket,
    sequence: u32,
}

impl Tracker {
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

    /// Both families, until [`LOOK`] rows are found. `None` without a table.
    fn find(mut self, filter: Option<Filter>, wanted: Wanted<'_>) -> Result<Option<Vec<Row>>> {
        let mut request = Vec::new();
        match filter {
            Some(filter) => self.append(&mut request, CT_GET, NLM_F_DUMP, filter.family, &filter.attributes()),
            None => self.append(&mut request, CT_GET, NLM_F_DUMP, libc::AF_UNSPEC, &[]),
        }
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

fn is_missing(refusal: &Refusal) -> bool {
    [libc::EPROTONOSUPPORT, libc::EOPNOTSUPP, libc::ENOENT, libc::EAFNOSUPPORT].iter().any(|e| refusal.is(*e))
}

#[derive(Debug)]
struct Unreadable;

fn read(message: &[u8], wanted: Wanted<'_>) -> std::result::Result<Option<Row>, Unreadable> {
    let family = *message.get(HEADER_LEN).ok_or(Unreadable)?;
    let attributes = message.get(HEADER_LEN + GENERIC_LEN..).ok_or(Unreadable)?;
    let (mut name, mut original, mut reply) = (Vec::new(), None, Ends::default());
    for attribute in NlasIterator::new(attributes) {
        let attribute = attribute.map_err(|_| Unreadable)?;
        match attribute.kind() {
            TUPLE_ORIG => {
                original = Some(ends(attribute.value())?);
                name.push(copy(&attribute));
            }
            TUPLE_REPLY => reply = ends(attribute.value())?,
            ID | ZONE => name.push(copy(&attribute)),
            _ => {}
        }
    }
    let original = original.ok_or(Unreadable)?;
    Ok(wanted(&original, &reply).then_some(Row { family, name }))
}

pub(crate) fn is_of(message: &[u8], wanted: &HashSet<IpAddr>) -> Option<bool> {
    let is_of = |original: &Ends, reply: &Ends| original.is_of(wanted) || reply.is_of(wanted);
    read(message, &is_of).ok().map(|row| row.is_some())
}

fn copy(attribute: &NlaBuffer<&[u8]>) -> DefaultNla {
    DefaultNla::new(attribute.kind(), attribute.value().to_vec())
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Ends {
    addresses: [Option<IpAddr>; 2],
    protocol: Option<u8>,
    /// Only if the protocol has ports.
    ports: [Option<u16>; 2],
}

impl Ends {
    fn is_of(&self, wanted: &HashSet<IpAddr>) -> bool {
        self.addresses.iter().flatten().any(|ip| wanted.contains(ip))
    }
}

fn ends(tuple: &[u8]) -> std::result::Result<Ends, Unreadable> {
    let mut found = Ends::default();
    for part in NlasIterator::new(tuple) {
        let part = part.map_err(|_| Unreadable)?;
        for attribute in NlasIterator::new(part.value()) {
            let attribute = attribute.map_err(|_| Unreadable)?;
            let (kind, value) = (attribute.kind(), attribute.value());
            let of = |kinds: [u16; 2]| kinds.iter().position(|k| *k == kind);
            match part.kind() {
                TUPLE_IP => {
                    let (place, ip) = match (of(IPV4), of(IPV6)) {
                        (Some(place), _) => (place, <[u8; 4]>::try_from(value).map(IpAddr::from)),
                        (_, Some(place)) => (place, <[u8; 16]>::try_from(value).map(IpAddr::from)),
                        _ => continue,
                    };
                    let ip = ip.map_err(|_| Unreadable)?;
                    found.addresses.get_mut(place).map(|there| there.replace(ip));
                }
                TUPLE_PROTO if kind == PROTO_NUM => found.protocol = value.first().copied(),
                TUPLE_PROTO => {
                    let Some(place) = of(PROTO_PORTS) else { continue };
                    let port = <[u8; 2]>::try_from(value).map_err(|_| Unreadable)?;
                    found.ports.get_mut(place).map(|there| there.replace(u16::from_be_bytes(port)));
                }
                _ => {}
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use rtnetlink::packet_core::Nla;

    use super::*;

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

    fn is_of(message: &[u8], ip: [u8; 4]) -> std::result::Result<Option<Row>, Unreadable> {
        let wanted = HashSet::from([IpAddr::from(ip)]);
        read(message, &|original, reply| original.is_of(&wanted) || reply.is_of(&wanted))
    }

    /// 10.0.0.1 to 10.0.0.9, translated to 10.0.0.2.
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
            let found = is_of(&message(&row()), ip).ok().flatten();
            let kinds = found.as_ref().map(|r| (r.family, r.name.iter().map(Nla::kind).collect::<Vec<_>>()));
            assert_eq!(kinds, Some((2, vec![TUPLE_ORIG, ID, ZONE])), "{ip:?}");
            assert_eq!(
                found.map(|r| r.name),
                row().get(..1).map(|orig| [orig, row().get(2..4).unwrap_or(&[])].concat())
            );
        }
        assert!(is_of(&message(&row()), [10, 0, 0, 3]).is_ok_and(|r| r.is_none()));
    }

    #[test]
    fn a_flow_to_a_port_is_stale_where_it_leads_elsewhere() {
        let ends = |to: [u8; 4], port: u16| Ends {
            addresses: [Some([192, 0, 2, 9].into()), Some(to.into())],
            protocol: Some(17),
            ports: [Some(5_000), Some(port)],
        };
        let back = |e: Ends| Ends { addresses: [e.addresses[1], e.addresses[0]], ports: [e.ports[1], e.ports[0]], ..e };
        let (node, container) = ([192, 0, 2, 1], [10, 0, 0, 2]);
        let own = HashSet::from([IpAddr::from(node)]);
        let mapping = |host_ip: Option<[u8; 4]>| PortMapping {
            protocol: Protocol::Udp,
            host_ip: host_ip.map(Into::into),
            host_port: 53.try_into().unwrap(),
            container: container.into(),
            container_port: 5353.try_into().unwrap(),
        };
        let every = mapping(None);
        for (original, translated, of, stale) in [
            (ends(node, 53), ends(node, 53), every, true),
            (ends([127, 0, 0, 1], 53), ends([127, 0, 0, 1], 53), every, true),
            (ends(node, 53), ends([10, 0, 0, 3], 5353), every, true),
            (ends(node, 53), ends(container, 80), every, true),
            // Another tool's translation.
            (ends(node, 53), ends([10, 9, 0, 3], 5353), every, false),
            (ends(node, 53), ends(container, 5353), every, false),
            (ends(node, 54), ends(node, 54), every, false),
            (ends([198, 51, 100, 7], 53), ends([198, 51, 100, 7], 53), every, false),
            (Ends { protocol: Some(6), ..ends(node, 53) }, ends(node, 53), every, false),
            (ends(node, 53), ends(node, 53), mapping(Some([192, 0, 2, 2])), false),
            (ends(node, 53), ends(node, 53), mapping(Some(node)), true),
        ] {
            let pools = ["10.0.0.0/24".parse().unwrap()];
            let none = HashSet::new();
            let published = Published { mappings: &[of], own: &none, node: &own, pools: &pools };
            let is = published.is_stale(&original, &back(translated));
            assert_eq!(is, stale, "{original:?} {translated:?} {of:?}");
            let tcp = PortMapping { protocol: Protocol::Tcp, ..of };
            let (original, back) = (Ends { protocol: Some(6), ..original }, back(translated));
            assert!(!Published { mappings: &[tcp], ..published }.is_stale(&original, &back), "a connection goes on");
        }
        let (ends, keeps) = (ends([198, 51, 100, 7], 53), HashSet::from([IpAddr::from([192, 0, 2, 9])]));
        let published = Published { mappings: &[], own: &keeps, node: &own, pools: &[] };
        assert!(!published.is_stale(&ends, &back(ends)));
        let masqueraded = Ends { addresses: [Some(node.into()), ends.addresses[1]], ..ends };
        assert!(published.is_stale(&ends, &back(masqueraded)));
    }

    #[test]
    fn a_damaged_row_is_an_error_or_none_of_ours_but_no_panic() {
        let whole = message(&row());
        for length in 0..whole.len() {
            let cut = whole.get(..length).unwrap_or_default();
            let _either = is_of(cut, [10, 0, 0, 3]).is_ok();
            for byte in [0u8, 1, 255] {
                let mut bent = whole.clone();
                if let Some(b) = bent.get_mut(length) {
                    *b = byte;
                }
                let _either = is_of(&bent, [10, 0, 0, 1]).is_ok();
            }
        }
        let short = nest(TUPLE_ORIG, &[nest(TUPLE_IP, &[DefaultNla::new(1, vec![10, 0])])]);
        assert!(is_of(&message(&[short]), [10, 0, 0, 1]).is_err(), "half an address");
        assert!(is_of(&message(&row()[1..]), [10, 0, 0, 1]).is_err(), "a row without a name");
        assert!(is_of(&[], [10, 0, 0, 1]).is_err());
    }
}
