//! TCP connections that the node's proxies have with clients, by sock_diag (sock_diag(7), `linux/inet_diag.h`).
//!
//! A proxy's listening socket is transparent, and so are the sockets of the connections that it accepts. The sockets by which a
//! proxy speaks to servers are transparent too, and have a mark. Neither mark nor owner is in the fixed part of a message: both
//! attributes that are read here come without being asked for (`inet_diag_msg_attrs_fill` of `net/ipv4/inet_diag.c`).

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::{Duration, Instant},
};

use nix::sys::{
    socket::{setsockopt, sockopt},
    time::TimeVal,
};
use rtnetlink::{
    packet_core::{NLM_F_DUMP, NLM_F_REQUEST, NlasIterator},
    sys::{Socket, SocketAddr, protocols::NETLINK_SOCK_DIAG},
};
use wharf_common::policy::{MARK_PROXIED_EGRESS, MARK_PROXIED_INGRESS};
use wharf_core::kernel::{KernelErrorKind, Result};

use super::batch::{Body, HEADER_LEN, frames};
use crate::error::{fail, wrap};

const OPERATION: &str = "count connections of the proxies";
const SUBJECT: &str = "sock_diag";

/// `SOCK_DIAG_BY_FAMILY` of `linux/sock_diag.h`.
const BY_FAMILY: u16 = 20;
/// Length of `struct inet_diag_req_v2`: family, protocol, attributes, pad, states, and a `struct inet_diag_sockid`.
const REQUEST_LEN: usize = 56;
/// Length of `struct inet_diag_msg`.
const MESSAGE_LEN: usize = 72;
/// Places in it.
const STATE: usize = 1;
const REMOTE: usize = 24;
const INODE: usize = 68;
/// `INET_DIAG_MARK`: 32 bits, for those who may know (`CAP_NET_ADMIN`).
const MARK: u16 = 15;
/// `INET_DIAG_SOCKOPT`, Linux 5.10: `struct inet_diag_sockopt`, flags.
const OPTIONS: u16 = 22;
/// `inet_diag_sockopt.transparent`, in its first byte.
const TRANSPARENT: u8 = 1 << 5;
/// States of TCP (`enum` of `net/tcp_states.h`) in which a process may hold the socket.
const ESTABLISHED: u8 = 1;
const FIN_WAIT1: u8 = 4;
const FIN_WAIT2: u8 = 5;
const CLOSE_WAIT: u8 = 8;
const STATES: [u8; 4] = [ESTABLISHED, FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT];
/// The kernel answers at once; this only bounds a wait that a bug would make endless.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Counts the connections by the client's address, in the calling thread's network namespace.
pub(crate) fn of_proxies() -> Result<HashMap<IpAddr, u32>> {
    let mut counts = HashMap::new();
    for family in [libc::AF_INET, libc::AF_INET6] {
        each(family, &mut |client| *counts.entry(client).or_default() += 1)?;
    }
    Ok(counts)
}

/// Calls `with` with the client of each connection of this family. A connection that comes or goes meanwhile may be left out.
fn each(family: i32, with: &mut dyn FnMut(IpAddr)) -> Result<()> {
    let failed = |e: &io::Error| wrap(OPERATION, SUBJECT, e);
    let socket = open().map_err(|e| failed(&e))?;
    let request = request(family);
    if socket.send(&request, 0).map_err(|e| failed(&e))? != request.len() {
        return Err(fail(OPERATION, SUBJECT, KernelErrorKind::Other, "the kernel took only a part of the request"));
    }
    let until = Instant::now() + ANSWER_TIMEOUT;
    loop {
        let datagram = match socket.recv_from_full() {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            other => other.map_err(|e| failed(&e))?.0,
        };
        for frame in frames(&datagram).map_err(|e| failed(&e))? {
            match frame.body {
                Body::Message(message) => match client_of(&message) {
                    Ok(client) => client.into_iter().for_each(&mut *with),
                    Err(Unreadable) => {
                        let cause = "the kernel answered with a socket that cannot be read";
                        return Err(fail(OPERATION, SUBJECT, KernelErrorKind::Other, cause));
                    }
                },
                Body::Refused(refusal) if refusal.is(libc::ENOENT) => {
                    let cause = "the kernel cannot list TCP sockets; load tcp_diag";
                    return Err(fail(OPERATION, SUBJECT, KernelErrorKind::Unsupported, cause));
                }
                Body::Refused(refusal) => return Err(refusal.into_error(OPERATION, SUBJECT)),
                Body::Done | Body::Ack => return Ok(()),
            }
        }
        if Instant::now() > until {
            let cause = format!("the sockets were not told within {ANSWER_TIMEOUT:?}");
            return Err(fail(OPERATION, SUBJECT, KernelErrorKind::Exhausted, cause));
        }
    }
}

fn open() -> io::Result<Socket> {
    let mut socket = Socket::new(NETLINK_SOCK_DIAG)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    let timeout = TimeVal::new(ANSWER_TIMEOUT.as_secs().cast_signed(), 0);
    setsockopt(&socket, sockopt::ReceiveTimeout, &timeout)?;
    Ok(socket)
}

/// Asks for all TCP sockets of a family in [`STATES`].
fn request(family: i32) -> Vec<u8> {
    let length = HEADER_LEN + REQUEST_LEN;
    let mut buffer = Vec::with_capacity(length);
    buffer.extend(u32::try_from(length).unwrap_or(u32::MAX).to_ne_bytes());
    buffer.extend(BY_FAMILY.to_ne_bytes());
    buffer.extend((NLM_F_REQUEST | NLM_F_DUMP).to_ne_bytes());
    // Sequence number and port: one request for each socket.
    buffer.extend([0; 8]);
    let protocol = libc::IPPROTO_TCP;
    buffer.extend([family, protocol].map(|number| u8::try_from(number).unwrap_or_default()));
    buffer.extend([0; 2]);
    let states = STATES.iter().fold(0_u32, |states, state| states | 1 << state);
    buffer.extend(states.to_ne_bytes());
    // The kernel reads no address or port for a dump.
    buffer.resize(length, 0);
    buffer
}

/// Not the message of a socket.
#[derive(Debug)]
pub(crate) struct Unreadable;

/// The client's address; none for a socket that is not a proxy's connection with a client.
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
    // A process has closed it when it has no inode; one that waits to be accepted has none yet.
    let is_held = [ESTABLISHED, CLOSE_WAIT].contains(&state) || fixed.get(INODE..) != Some(&[0; 4]);
    if !is_transparent || mark & (MARK_PROXIED_EGRESS | MARK_PROXIED_INGRESS) != 0 || !is_held {
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
        let request = request(libc::AF_INET6);
        assert_eq!((request.len(), request[16], request[17]), (72, 10, 6));
        assert_eq!(request[20..24], (1_u32 << 1 | 1 << 4 | 1 << 5 | 1 << 8).to_ne_bytes());
    }
}
