//! Model packets for foreign forward chains: sets of packets with known bits. A test holds for all, some or none, or is
//! not understood.

use ipnet::IpNet;

use super::{expr::Expression, table::octets, wire};

const TCP: u8 = 6;
/// `linux/netfilter/nf_conntrack_common.h`, also of xt's `conntrack`.
const ESTABLISHED: u32 = 2;
const NEW: u32 = 8;
const IPS_DST_NAT: u32 = 0x20;

/// Value and mask of known bits; `None` if not modelled.
pub(super) type Byte = Option<(u8, u8)>;
pub(super) const ANY: Byte = Some((0, 0));

fn exactly(bytes: &[u8]) -> Vec<Byte> {
    bytes.iter().map(|byte| Some((*byte, 0xff))).collect()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// A container's first packet.
    Out,
    Answer,
    /// A first packet to a published port.
    Published,
}

pub(super) struct Packets<'a> {
    pub(super) pool: IpNet,
    pub(super) way: Way,
    /// The only interface to other networks.
    pub(super) uplink: Option<&'a str>,
}

impl Packets<'_> {
    pub(super) fn header(&self, offset: usize, length: usize) -> Option<Vec<Byte>> {
        let v4 = self.pool.addr().is_ipv4();
        let (protocol, source, bytes, whole) = if v4 { (9, 12, 4, 20) } else { (6, 8, 16, 40) };
        let mut header = vec![ANY; whole];
        *header.first_mut()? = Some(if v4 { (0x45, 0xff) } else { (0x60, 0xf0) });
        *header.get_mut(protocol)? = Some((TCP, 0xff));
        let address = source + if self.way == Way::Out { 0 } else { bytes };
        let known: Vec<_> =
            octets(self.pool.network()).into_iter().zip(octets(self.pool.netmask())).map(Some).collect();
        header.get_mut(address..address + bytes)?.copy_from_slice(&known);
        header.get(offset..offset.checked_add(length)?).map(<[Byte]>::to_vec)
    }

    /// `near`: the container's.
    fn interface(&self, near: bool) -> Vec<Byte> {
        let mut name = match (near, self.uplink) {
            (true, _) => [exactly(b"wh"), vec![ANY; 12]].concat(),
            (false, Some(uplink)) => exactly(uplink.as_bytes()),
            (false, None) => vec![ANY; 16],
        };
        name.resize(16, Some((0, 0xff)));
        name
    }

    pub(super) fn meta(&self, key: u32) -> Vec<Byte> {
        let v4 = self.pool.addr().is_ipv4();
        match key {
            1 => exactly(&if v4 { [8, 0] } else { [0x86, 0xdd] }),
            4 | 5 => vec![ANY; 4],
            6 => self.interface(self.way == Way::Out),
            7 => self.interface(self.way != Way::Out),
            15 => exactly(&[if v4 { wire::IPV4 } else { wire::IPV6 }]),
            16 => exactly(&[TCP]),
            _ => vec![None; 16],
        }
    }

    pub(super) fn connection(&self, key: u32) -> Vec<Byte> {
        let translated = if self.way == Way::Published { IPS_DST_NAT } else { 0 };
        match key {
            0 => exactly(&self.state().to_ne_bytes()),
            2 => translated.to_ne_bytes().into_iter().zip(IPS_DST_NAT.to_ne_bytes()).map(Some).collect(),
            _ => vec![None; 16],
        }
    }

    const fn state(&self) -> u32 {
        if matches!(self.way, Way::Answer) { ESTABLISHED } else { NEW }
    }

    pub(super) fn xt(&self, expression: &Expression) -> Option<Sure> {
        // `struct xt_conntrack_mtinfo2` and 3.
        const STATE: u16 = 1;
        const ALIAS: u16 = 1 << 13;
        const DST_NAT: u16 = 1 << 7;
        match expression.text(1).as_str() {
            "comment" => Some(Sure::All),
            "tcp" | "udp" | "multiport" | "icmp" | "icmp6" | "limit" => Some(Sure::Some),
            "conntrack" if expression.number(2) >= Some(2) => {
                let info = expression.value(3).unwrap_or_default();
                let half = |at| Some(u16::from_ne_bytes(info.get(at..at + 2)?.try_into().ok()?));
                let (Some(kinds), Some(inverted), Some(states)) = (half(146), half(148), half(150)) else {
                    return Some(Sure::Unclear);
                };
                if kinds & !ALIAS != STATE {
                    return Some(Sure::Unclear);
                }
                let translated = if self.way == Way::Published { u32::from(DST_NAT) } else { 0 };
                let held = u32::from(states) & (self.state() | translated) != 0;
                (held != (inverted & STATE != 0)).then_some(Sure::All)
            }
            _ => Some(Sure::Unclear),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Sure {
    All,
    Some,
    Unclear,
}

/// An exception for some packets leaves most of them.
pub(super) fn not(test: Option<Sure>) -> Option<Sure> {
    match test {
        None => Some(Sure::All),
        Some(Sure::All) => None,
        Some(_) => Some(Sure::Unclear),
    }
}

pub(super) fn equal(bytes: &[Byte], value: &[u8]) -> Option<Sure> {
    let mut sure = if bytes.len() < value.len() { Sure::Unclear } else { Sure::All };
    for (byte, wanted) in bytes.iter().zip(value) {
        sure = sure.max(match byte {
            Some((is, known)) if (is ^ wanted) & known != 0 => return None,
            Some((_, 0xff)) => Sure::All,
            Some(_) => Sure::Some,
            None => Sure::Unclear,
        });
    }
    Some(sure)
}

/// The bytes are big-endian, the range inclusive.
pub(super) fn between(bytes: &[Byte], first: &[u8], last: &[u8]) -> Option<Sure> {
    let known: Option<Vec<_>> = bytes.iter().copied().collect();
    let Some(known) = known else { return Some(Sure::Unclear) };
    let lowest: Vec<u8> = known.iter().map(|(is, known)| is & known).collect();
    let highest: Vec<u8> = known.iter().map(|(is, known)| is | !known).collect();
    if highest.as_slice() < first || lowest.as_slice() > last {
        return None;
    }
    Some(if lowest.as_slice() >= first && highest.as_slice() <= last { Sure::All } else { Sure::Some })
}
