//! TCP connections between clients and the node's proxies, by sock_diag (sock_diag(7), `linux/inet_diag.h`).
//!
//! A proxy's accepted sockets are transparent; its sockets to servers are transparent and marked. The kernel reports
//! both attributes unasked (`inet_diag_msg_attrs_fill` of `net/ipv4/inet_diag.c`).

use std::{
    collections::{HashMap, HashSet},
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    ops::Range,
    time::{Duration, Instant},
};

use nix::sys::{
    socket::{setsockopt, sockopt},
    time::TimeVal,
};
use rtnetlink::{
    packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NlasIterator},
    sys::{Socket, SocketAddr, protocols::NETLINK_SOCK_DIAG},
};
use wharf_common::policy::{MARK_PROXIED_EGRESS, MARK_PROXIED_INGRESS};
use wharf_core::kernel::{KernelErrorKind, Result};

use super::batch::{Body, Frame, HEADER_LEN, frames};
use crate::error::{fail, wrap};

const OPERATION: &str = "list connections of the proxies";
const SUBJECT: &str = "sock_diag";

/// `linux/sock_diag.h`.
const BY_FAMILY: u16 = 20;
const DESTROY: u16 = 21;
/// `struct inet_diag_req_v2`: family, protocol, attributes, pad, states, and a `struct inet_diag_sockid`.
const REQUEST_LEN: usize = 56;
/// `struct inet_diag_msg`, and offsets in it.
const MESSAGE_LEN: usize = 72;
const STATE: usize = 1;
const ID: Range<usize> = 4..52;
const REMOTE: usize = 24;
const INODE: usize = 68;
/// 32 bits, only with `CAP_NET_ADMIN`.
const MARK: u16 = 15;
/// `INET_DIAG_SOCKOPT` (Linux 5.10): `struct inet_diag_sockopt`, flags.
const OPTIONS: u16 = 22;
const TRANSPARENT: u8 = 1 << 5;
/// TCP states (`net/tcp_states.h`) in which a process may hold the socket, and an unfinished handshake.
const ESTABLISHED: u8 = 1;
const SYN_RECV: u8 = 3;
const FIN_WAIT1: u8 = 4;
const FIN_WAIT2: u8 = 5;
const CLOSE_WAIT: u8 = 8;
const LAST_ACK: u8 = 9;
const CLOSING: u8 = 11;
const STATES: [u8; 7] = [ESTABLISHED, SYN_RECV, FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT, LAST_ACK, CLOSING];
const FAMILIES: [i32; 2] = [libc::AF_INET, libc::AF_INET6];
/// Guards against bugs.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// By the client's address, unfinished handshakes included.
pub(crate) fn of_proxies() -> Result<HashMap<IpAddr, u32>> {
    let mut counts = HashMap::new();
    for family in FAMILIES {
        each(family, &mut |client, _| *counts.entry(client).or_default() += 1)?;
    }
    Ok(counts)
}

/// Ends connections with clients of these addresses, or they would count for the address's next owner. Returns their
/// number; 0 without `CONFIG_INET_DIAG_DESTROY`.
pub(crate) fn end(ips: &[IpAddr]) -> Result<u64> {
    let wanted: HashSet<IpAddr> = ips.iter().map(IpAddr::to_canonical).collect();
    let mut ended = 0;
    for family in FAMILIES {
        let mut ids = Vec::new();
        match each(family, &mut |client, id| ids.extend(wanted.contains(&client).then(|| id.to_owned()))) {
            Err(e) if e.kind == KernelErrorKind::Unsupported => return Ok(ended),
            other => other?,
        }
        for id in ids {
            let socket = ask(&request(DESTROY, NLM_F_REQUEST | NLM_F_ACK, family, &id))?;
            for frame in receive(&socket)? {
                match frame.body {
                    Body::Refused(refusal) if refusal.is(libc::EOPNOTSUPP) => return Ok(ended),
                    Body::Refused(refusal) if refusal.is(libc::ENOENT) => {}
                    Body::Refused(refusal) => return Err(refusal.into_error("end connections of the proxies", SUBJECT)),
                    Body::Ack | Body::Done | Body::Message(_) => ended += 1,
                }
            }
        }
    }
    Ok(ended)
}

/// May miss connections that open or end meanwhile.
fn each(family: i32, with: &mut dyn FnMut(IpAddr, &[u8])) -> Result<()> {
    let socket = ask(&request(BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP, family, &[]))?;
    let until = Instant::now() + ANSWER_TIMEOUT;
    loop {
        for frame in receive(&socket)? {
            match frame.body {
                Body::Message(message) => {
                    match (client_of(&message), message.get(HEADER_LEN..).and_then(|m| m.get(ID))) {
                        (Ok(Some(client)), Some(id)) => with(client, id),
                        (Ok(None), _) => {}
                        (Err(Unreadable), _) | (_, None) => {
                            let cause = "the kernel answered with a socket that cannot be read";
                            return Err(fail(OPERATION, SUBJECT, KernelErrorKind::Other, cause));
                        }
                    }
                }
                Body::Refused(refusal) if refusal.is(libc::ENOENT) => {
                    let cause = "the kernel cannot list TCP sockets; load tcp_diag";
                    return Err(fail(OPERATION, SUBJECT, KernelErrorKind::Unsupported, cause));
                }
                Body::Refused(refusal) => return Err(refusal.into_error(OPERATION, SUBJECT)),
                Body::Done | Body::Ack => return Ok(()),
            }
        }
        if Instant::now() > until {
            let cause = format!("the kernel did not list the sockets within {ANSWER_TIMEOUT:?}");
            return Err(fail(OPERATION, SUBJECT, KernelErrorKind::Exhausted, cause));
        }
    }
}

fn ask(request: &[u8]) -> Result<Socket> {
    let failed = |e: &io::Error| wrap(OPERATION, SUBJECT, e);
    let open = || {
        let mut socket = Socket::new(NETLINK_SOCK_DIAG)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        let timeout = TimeVal::new(ANSWER_TIMEOUT.as_secs().cast_signed(), 0);
        setsockopt(&socket, sockopt::ReceiveTimeout, &timeout)?;
        Ok(socket)
    };
    let socket = open().map_err(|e| failed(&e))?;
    if socket.send(request, 0).map_err(|e| failed(&e))? != request.len() {
        return Err(fail(OPERATION, SUBJECT, KernelErrorKind::Other, "the kernel took only a part of the request"));
    }
    Ok(socket)
}

fn receive(socket: &Socket) -> Result<Vec<Frame>> {
    let failed = |e: &io::Error| wrap(OPERATION, SUBJECT, e);
    loop {
        match socket.recv_from_full() {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Ok((datagram, _)) if datagram.is_empty() => {
                return Err(fail(OPERATION, SUBJECT, KernelErrorKind::Other, "empty answer"));
            }
            other => return frames(&other.map_err(|e| failed(&e))?.0).map_err(|e| failed(&e)),
        }
    }
}

/// For sockets in [`STATES`], or the one with the id (`struct inet_diag_sockid`).
fn request(kind: u16, flags: u16, family: i32, id: &[u8]) -> Vec<u8> {
    let length = HEADER_LEN + REQUEST_LEN;
    let mut buffer = Vec::with_capacity(length);
    buffer.extend(u32::try_from(length).unwrap_or(u32::MAX).to_ne_bytes());
    buffer.extend(kind.to_ne_bytes());
    buffer.extend(flags.to_ne_bytes());
    buffer.extend([0; 8]);
    let protocol = libc::IPPROTO_TCP;
    buffer.extend([family, protocol].map(|number| u8::try_from(number).unwrap_or_default()));
    buffer.extend([0; 2]);
    let states = STATES.iter().fold(0_u32, |states, state| states | 1 << state);
    buffer.extend(states.to_ne_bytes());
    buffer.extend(id);
    buffer.resize(length, 0);
    buffer
}

#[derive(Debug)]
pub(crate) struct Unreadable;

/// `None` for sockets of no proxy.
pub(crate) fn client_of(message: &[u8]) -> std::result::Result<Option<IpAddr>, Unreadable> {
    let body = message.get(HEADER_LEN..).ok_or(Unreadable)?;
    let (fixed, attributes) = body.split_at_checked(MESSAGE_LEN).ok_or(Unreadable)?;
    let (mut mark, mut is_transparent) = (0, false);
    for attribute in NlasIterator::new(attributes) {
        let attribute = attribute.map_err(|_| Unreadable)?;
        match (attribute.kind(), attribute.value()) {
            (MARK, value) => mark = u32::from_ne_bytes(value.try_into().map_err(|_| Unreadable)?),
            (OPTIONS, [first, ..]) => is_transparent = first & TRANSPARENT != 0,
            _ => {}
        }
    }
    let [family, state] = [0, STATE].map(|at| fixed.get(at).copied().unwrap_or_default());
    // Without an inode: closed by its process, or not accepted yet.
    let is_held = [ESTABLISHED, CLOSE_WAIT].contains(&state) || fixed.get(INODE..) != Some(&[0; 4]);
    let is_proxys = is_transparent && mark & (MARK_PROXIED_EGRESS | MARK_PROXIED_INGRESS) == 0 && is_held;
    // Handshakes with other servers count, too: the kernel does not tell them apart, and a client could collect
    // unfinished ones and finish all at once.
    if !is_proxys && state != SYN_RECV {
        return Ok(None);
    }
    let remote = fixed.get(REMOTE..REMOTE + 16).ok_or(Unreadable)?;
    let client = if i32::from(family) == libc::AF_INET {
        let octets: [u8; 4] = remote.first_chunk().copied().ok_or(Unreadable)?;
        IpAddr::from(Ipv4Addr::from(octets))
    } else {
        let octets: [u8; 16] = remote.try_into().map_err(|_| Unreadable)?;
        Ipv6Addr::from(octets).to_canonical()
    };
    Ok(Some(client))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESS: [u8; 4] = [10, 87, 0, 5];

    fn message(state: u8, inode: u32, mark: u32, first_option: u8) -> Vec<u8> {
        let mut message = vec![0; HEADER_LEN + MESSAGE_LEN];
        let mut put = |at: usize, bytes: &[u8]| {
            message[HEADER_LEN + at..HEADER_LEN + at + bytes.len()].copy_from_slice(bytes);
        };
        put(0, &[u8::try_from(libc::AF_INET).expect("a small number"), state]);
        put(REMOTE, &ADDRESS);
        put(INODE, &inode.to_ne_bytes());
        message.extend([8, 0].into_iter().chain(MARK.to_ne_bytes()).chain(mark.to_ne_bytes()));
        message.extend([6, 0].into_iter().chain(OPTIONS.to_ne_bytes()).chain([first_option, 0, 0, 0]));
        message
    }

    #[test]
    fn a_connection_of_a_proxy_has_a_client() {
        let client = |state, inode, mark, option| client_of(&message(state, inode, mark, option)).expect("a socket");
        let own = Some(IpAddr::from(ADDRESS));
        assert_eq!(client(ESTABLISHED, 7, 0, TRANSPARENT), own);
        assert_eq!(client(ESTABLISHED, 0, 0, TRANSPARENT), own, "it waits to be accepted");
        assert_eq!(client(CLOSE_WAIT, 0, 0, TRANSPARENT), own);
        assert_eq!(client(FIN_WAIT2, 7, 0, TRANSPARENT), own, "half closed");
        assert_eq!(client(FIN_WAIT2, 0, 0, TRANSPARENT), None, "closed by its process");
        assert_eq!(client(ESTABLISHED, 7, 0, !TRANSPARENT), None, "no proxy's");
        assert_eq!(client(SYN_RECV, 0, 0, 0), own, "a handshake");
        for mark in [MARK_PROXIED_EGRESS, MARK_PROXIED_INGRESS] {
            assert_eq!(client(ESTABLISHED, 7, mark, TRANSPARENT), None, "with a server");
        }
    }

    #[test]
    fn what_is_cut_short_is_no_socket() {
        let whole = message(ESTABLISHED, 7, 0, TRANSPARENT);
        for length in 0..HEADER_LEN + MESSAGE_LEN {
            assert!(client_of(&whole[..length]).is_err(), "{length}");
        }
        assert_eq!(client_of(&whole[..HEADER_LEN + MESSAGE_LEN]).expect("a socket"), None, "without attributes");
    }

    #[test]
    fn a_request_has_the_kernels_layout() {
        let request = request(BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP, libc::AF_INET6, &[]);
        assert_eq!((request.len(), request[16], request[17]), (72, 10, 6));
        assert_eq!(request[20..24], (1_u32 << 1 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 8 | 1 << 9 | 1 << 11).to_ne_bytes());
    }
}
