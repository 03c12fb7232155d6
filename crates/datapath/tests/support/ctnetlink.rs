//! Conntrack rows made by hand, in the calling thread's network namespace.

use std::{io, net::IpAddr};

use rtnetlink::{
    packet_core::{DefaultNla, Emitable, NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REQUEST},
    sys::{Socket, SocketAddr, protocols::NETLINK_NETFILTER},
};

pub(crate) const ICMP: u8 = 1;
pub(crate) const TCP: u8 = 6;
pub(crate) const UDP: u8 = 17;
pub(crate) const ICMP6: u8 = 58;

/// `NFNL_SUBSYS_CTNETLINK`, `IPCTNL_MSG_CT_NEW`.
const CT_NEW: u16 = 1 << 8;
const HEADER_LEN: usize = 16;

fn nest(kind: u16, parts: &[DefaultNla]) -> DefaultNla {
    const NESTED: u16 = 0x8000;
    let mut value = vec![0; parts.buffer_len()];
    parts.emit(&mut value);
    DefaultNla::new(kind | NESTED, value)
}

fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(a) => a.octets().to_vec(),
        IpAddr::V6(a) => a.octets().to_vec(),
    }
}

/// `CTA_TUPLE_IP` and `CTA_TUPLE_PROTO` of one direction.
fn tuple(kind: u16, source: IpAddr, destination: IpAddr, protocol: u8, reply: bool) -> DefaultNla {
    let first = if source.is_ipv4() { 1 } else { 3 };
    let addresses = [DefaultNla::new(first, octets(source)), DefaultNla::new(first + 1, octets(destination))];
    let mut parts = vec![DefaultNla::new(1, vec![protocol])];
    match protocol {
        // Identifier, type (echo request or its reply), code.
        ICMP => parts.extend([(4, vec![0, 9]), (5, vec![if reply { 0 } else { 8 }]), (6, vec![0])].map(nla)),
        ICMP6 => parts.extend([(7, vec![0, 9]), (8, vec![if reply { 129 } else { 128 }]), (9, vec![0])].map(nla)),
        _ => parts.extend([(2, vec![0x30, 0x39]), (3, vec![0x30, 0x39])].map(nla)),
    }
    nest(kind, &[nest(1, &addresses), nest(2, &parts)])
}

fn nla((kind, value): (u16, Vec<u8>)) -> DefaultNla {
    DefaultNla::new(kind, value)
}

/// Adds a row. False where the kernel tracks nothing.
pub(crate) fn add(source: IpAddr, destination: IpAddr, protocol: u8, zone: u16) -> bool {
    match try_add(source, destination, protocol, zone) {
        Ok(()) => true,
        // No netfilter netlink; none of conntrack.
        Err(e) if matches!(e.raw_os_error(), Some(libc::EPROTONOSUPPORT | libc::EINVAL)) && !is_tracking() => false,
        Err(e) => panic!("add conntrack row {source} {destination} of protocol {protocol}: {e}"),
    }
}

/// Rows in the calling thread's network namespace.
pub(crate) fn count() -> u64 {
    let text = std::fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_count").expect("count of rows");
    text.trim().parse().expect("a number")
}

fn is_tracking() -> bool {
    std::fs::exists("/proc/sys/net/netfilter/nf_conntrack_count").expect("sysctl")
}

fn try_add(source: IpAddr, destination: IpAddr, protocol: u8, zone: u16) -> io::Result<()> {
    let mut attributes = vec![
        tuple(1, source, destination, protocol, false),
        tuple(2, destination, source, protocol, true),
        // CTA_TIMEOUT, seconds: longer than any test.
        DefaultNla::new(7, 3600u32.to_be_bytes().to_vec()),
    ];
    if zone != 0 {
        attributes.push(DefaultNla::new(18, zone.to_be_bytes().to_vec()));
    }
    let attributes = attributes.as_slice();
    let mut message = Vec::new();
    let length = HEADER_LEN + 4 + attributes.buffer_len();
    message.extend(u32::try_from(length).expect("length").to_ne_bytes());
    message.extend(CT_NEW.to_ne_bytes());
    message.extend((NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL).to_ne_bytes());
    message.extend([0; 8]);
    let family = if source.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    message.extend([u8::try_from(family).expect("family"), 0, 0, 0]);
    message.resize(length, 0);
    attributes.emit(&mut message[HEADER_LEN + 4..]);
    let mut socket = Socket::new(NETLINK_NETFILTER)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    socket.send(&message, 0)?;
    let (answer, _) = socket.recv_from_full()?;
    let errno = i32::from_ne_bytes(answer[HEADER_LEN..HEADER_LEN + 4].try_into().expect("errno"));
    if errno == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(-errno)) }
}
