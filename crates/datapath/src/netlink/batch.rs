//! Several requests in one `sendmsg`, answers matched by sequence number.

use std::{
    collections::VecDeque,
    io,
    os::fd::AsRawFd,
    time::{Duration, Instant},
};

use nix::sys::{
    socket::{setsockopt, sockopt},
    time::TimeVal,
};
use rtnetlink::{
    packet_core::{
        NLM_F_ACK, NLM_F_ACK_TLVS, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload,
    },
    packet_route::RouteNetlinkMessage,
    sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE},
};
use wharf_core::kernel::{KernelError, KernelErrorKind, Result};

use crate::error::{fail, kind_of, wrap};

/// Requests per `sendmsg`. Answers that exceed the receive buffer (208 KiB by default, about 4 KiB per link) are lost.
const CHUNK: usize = 32;
/// Bytes; the kernel sends at most 32 KiB (`netlink_dump` of `af_netlink.c`).
const DATAGRAM: usize = 64 << 10;
/// The kernel answers before `sendmsg` returns; guards against bugs.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
const DUMP_TRIES: usize = 5;

/// Multicast groups (`linux/rtnetlink.h`).
const RTNLGRP_LINK: u32 = 1;
const RTNLGRP_IPV6_ROUTE: u32 = 11;
/// `struct nlmsghdr`.
pub(super) const HEADER_LEN: usize = 16;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const ATTR_MSG: u16 = 1;

pub(crate) struct Request {
    message: RouteNetlinkMessage,
    flags: u16,
}

impl Request {
    /// `NLM_F_REQUEST` and `NLM_F_ACK` are implied.
    pub(crate) fn new(message: RouteNetlinkMessage, flags: u16) -> Self {
        Self { message, flags: flags | NLM_F_REQUEST | NLM_F_ACK }
    }
}

#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) errno: io::Error,
    pub(crate) reason: Option<String>,
}

impl Refusal {
    pub(crate) fn is(&self, errno: i32) -> bool {
        self.errno.raw_os_error() == Some(errno)
    }

    pub(crate) fn into_error(self, operation: &'static str, subject: impl Into<String>) -> KernelError {
        let kind = kind_of(&self.errno);
        let cause = match self.reason {
            Some(reason) => format!("{} ({reason})", self.errno),
            None => self.errno.to_string(),
        };
        fail(operation, subject, kind, cause)
    }
}

pub(crate) type Answer = std::result::Result<Vec<RouteNetlinkMessage>, Refusal>;

pub(crate) struct Dump {
    pub(crate) known: Vec<RouteNetlinkMessage>,
    pub(crate) left_out: usize,
}

pub(crate) struct Connection {
    socket: Socket,
    sequence: u32,
    heard: Heard,
    datagram: Vec<u8>,
}

/// Multicast messages received while waiting for an answer: they come only once.
#[derive(Default)]
struct Heard {
    frames: VecDeque<Frame>,
}

impl Heard {
    const CAPACITY: usize = 4_096;

    fn sort(&mut self, frames: Vec<Frame>, to_group: bool) -> io::Result<Option<Vec<Frame>>> {
        if !to_group {
            return Ok(Some(frames));
        }
        if self.frames.len().saturating_add(frames.len()) > Self::CAPACITY {
            // As for a full socket buffer.
            return Err(io::Error::from_raw_os_error(libc::ENOBUFS));
        }
        self.frames.extend(frames);
        Ok(None)
    }

    fn take(&mut self) -> Vec<Frame> {
        self.frames.drain(..).collect()
    }
}

impl Connection {
    pub(crate) fn open() -> Result<Self> {
        Self::try_open().map_err(|e| wrap("open netlink socket", "NETLINK_ROUTE", &e))
    }

    fn try_open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        socket.set_ext_ack(true)?;
        socket.set_cap_ack(true)?;
        // The kernel filters dumps (Linux 4.20).
        socket.set_netlink_get_strict_chk(true)?;
        let connection = Self { socket, sequence: 0, heard: Heard::default(), datagram: Vec::new() };
        connection.set_timeout(ANSWER_TIMEOUT)?;
        Ok(connection)
    }

    #[cfg(test)]
    pub(crate) fn over(socket: std::os::fd::OwnedFd) -> Self {
        use std::os::fd::{FromRawFd as _, IntoRawFd as _};
        // SAFETY: an open socket that nothing else owns.
        let socket = unsafe { Socket::from_raw_fd(socket.into_raw_fd()) };
        Self { socket, sequence: 0, heard: Heard::default(), datagram: Vec::new() }
    }

    pub(crate) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Answers are in order; the kernel continues after a refusal.
    ///
    /// # Errors
    /// Only when the socket fails; the outcome is then unknown.
    pub(crate) fn batch(&mut self, requests: Vec<Request>) -> Result<Vec<Answer>> {
        let mut answers = Vec::with_capacity(requests.len());
        let mut left = requests.into_iter().peekable();
        while left.peek().is_some() {
            let chunk: Vec<Request> = left.by_ref().take(CHUNK).collect();
            self.exchange(chunk, &mut answers).map_err(|e| wrap("talk to kernel", "NETLINK_ROUTE", &e))?;
        }
        Ok(answers)
    }

    /// For objects that the message library lacks. Returns the raw answer.
    pub(crate) fn one_of_kind(&mut self, kind: u16, payload: &[u8]) -> Result<std::result::Result<Vec<u8>, Refusal>> {
        self.try_one_of_kind(kind, payload).map_err(|e| wrap("talk to kernel", "NETLINK_ROUTE", &e))
    }

    fn try_one_of_kind(&mut self, kind: u16, payload: &[u8]) -> io::Result<std::result::Result<Vec<u8>, Refusal>> {
        self.sequence = self.sequence.wrapping_add(1);
        let length = u32::try_from(HEADER_LEN + payload.len()).unwrap_or(u32::MAX);
        let [kind, flags] = [kind, NLM_F_REQUEST].map(u16::to_ne_bytes);
        let sequence = self.sequence.to_ne_bytes();
        self.send(&[&length.to_ne_bytes()[..], &kind, &flags, &sequence, &[0; 4], payload].concat())?;
        loop {
            for frame in self.receive()?.into_iter().filter(|frame| frame.sequence == self.sequence) {
                match frame.body {
                    Body::Message(bytes) => return Ok(Ok(bytes)),
                    Body::Refused(refusal) => return Ok(Err(refusal)),
                    Body::Ack | Body::Done => {}
                }
            }
        }
    }

    pub(crate) fn one(&mut self, message: RouteNetlinkMessage, flags: u16) -> Result<Answer> {
        let mut answers = self.batch(vec![Request::new(message, flags)])?;
        answers.pop().ok_or_else(|| fail("talk to kernel", "NETLINK_ROUTE", KernelErrorKind::Other, "no answer"))
    }

    fn exchange(&mut self, chunk: Vec<Request>, answers: &mut Vec<Answer>) -> io::Result<()> {
        let first = self.sequence.wrapping_add(1);
        let count = chunk.len();
        let mut buffer = Vec::with_capacity(256 * count);
        for request in chunk {
            self.append(&mut buffer, request.message, request.flags);
        }
        self.send(&buffer)?;
        let mut open: Vec<Option<Answer>> = (0..count).map(|_| None).collect();
        let mut brought: Vec<Vec<RouteNetlinkMessage>> = (0..count).map(|_| Vec::new()).collect();
        while open.iter().any(Option::is_none) {
            for frame in self.receive()? {
                let at = frame.sequence.wrapping_sub(first) as usize;
                let (Some(slot), Some(messages)) = (open.get_mut(at), brought.get_mut(at)) else { continue };
                match frame.body {
                    Body::Done => {}
                    Body::Ack => *slot = Some(Ok(std::mem::take(messages))),
                    Body::Refused(refusal) => *slot = Some(Err(refusal)),
                    Body::Message(bytes) => messages.extend(parse(&bytes)),
                }
            }
        }
        answers.extend(open.into_iter().flatten());
        Ok(())
    }

    pub(crate) fn hear_links(&mut self) -> Result<()> {
        self.socket.add_membership(RTNLGRP_LINK).map_err(|e| wrap("listen to links", "NETLINK_ROUTE", &e))
    }

    pub(crate) fn hear_ipv6_routes(&mut self) -> Result<()> {
        self.socket.add_membership(RTNLGRP_IPV6_ROUTE).map_err(|e| wrap("listen to IPv6 routes", "NETLINK_ROUTE", &e))
    }

    /// Queued messages first; empty at `until`.
    pub(crate) fn heard(&mut self, until: Instant) -> Result<Vec<RouteNetlinkMessage>> {
        Ok(self.heard_datagram(until)?.unwrap_or_default())
    }

    /// `None` when nothing arrived. Omits unparsable messages.
    pub(crate) fn heard_datagram(&mut self, until: Instant) -> Result<Option<Vec<RouteNetlinkMessage>>> {
        let frames = match self.heard.take() {
            frames if frames.is_empty() => {
                self.listen(until).map_err(|e| wrap("listen to changes", "NETLINK_ROUTE", &e))?
            }
            frames => Some(frames),
        };
        let message = |frame: Frame| match frame.body {
            Body::Message(bytes) => parse(&bytes),
            _ => None,
        };
        Ok(frames.map(|frames| frames.into_iter().filter_map(message).collect()))
    }

    fn listen(&mut self, until: Instant) -> io::Result<Option<Vec<Frame>>> {
        // Zero would mean no timeout.
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        self.set_timeout(left)?;
        let received = self.receive_any();
        self.set_timeout(ANSWER_TIMEOUT)?;
        match received {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            other => other.map(|(frames, _)| Some(frames)),
        }
    }

    fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        let seconds = libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX);
        let timeout = TimeVal::new(seconds, libc::suseconds_t::from(timeout.subsec_micros().cast_signed()));
        Ok(setsockopt(&self.socket, sockopt::ReceiveTimeout, &timeout)?)
    }

    /// Consistent. Omits unparsable messages, which concern foreign objects.
    pub(crate) fn dump(&mut self, request: &RouteNetlinkMessage) -> Result<Answer> {
        self.dump_without(request, |_| false)
    }

    /// Omits messages that `skips` selects: parsing thousands takes long.
    pub(crate) fn dump_without(&mut self, request: &RouteNetlinkMessage, skips: fn(&[u8]) -> bool) -> Result<Answer> {
        Ok(self.consistent(request, skips)?.map(|whole| whole.known))
    }

    /// With the number of unparsable messages.
    pub(crate) fn dump_whole(&mut self, request: &RouteNetlinkMessage) -> Result<std::result::Result<Dump, Refusal>> {
        self.consistent(request, |_| false)
    }

    fn consistent(
        &mut self,
        request: &RouteNetlinkMessage,
        skips: fn(&[u8]) -> bool,
    ) -> Result<std::result::Result<Dump, Refusal>> {
        for _ in 0..DUMP_TRIES {
            let seen = self.try_dump(request.clone(), skips).map_err(|e| wrap("dump", "NETLINK_ROUTE", &e))?;
            if let Some(answer) = seen {
                return Ok(answer);
            }
        }
        Err(fail("dump", "NETLINK_ROUTE", KernelErrorKind::Exhausted, "it changed each time it was read; try again"))
    }

    fn try_dump(
        &mut self,
        request: RouteNetlinkMessage,
        skips: fn(&[u8]) -> bool,
    ) -> io::Result<Option<std::result::Result<Dump, Refusal>>> {
        let mut buffer = Vec::with_capacity(128);
        self.append(&mut buffer, request, NLM_F_REQUEST | NLM_F_DUMP);
        self.send(&buffer)?;
        let mut dump = Dump { known: Vec::new(), left_out: 0 };
        let mut consistent = true;
        loop {
            for frame in self.receive()? {
                if frame.sequence != self.sequence {
                    continue;
                }
                consistent &= !frame.interrupted;
                match frame.body {
                    Body::Message(bytes) if skips(&bytes) => {}
                    Body::Message(bytes) => match parse(&bytes) {
                        Some(message) => dump.known.push(message),
                        None => dump.left_out += 1,
                    },
                    Body::Refused(refusal) => return Ok(Some(Err(refusal))),
                    Body::Done | Body::Ack => return Ok(consistent.then_some(Ok(dump))),
                }
            }
        }
    }

    fn append(&mut self, buffer: &mut Vec<u8>, message: RouteNetlinkMessage, flags: u16) {
        self.sequence = self.sequence.wrapping_add(1);
        let mut packet = NetlinkMessage::from(message);
        packet.header.sequence_number = self.sequence;
        packet.header.flags = flags;
        packet.finalize();
        let start = buffer.len();
        let end = start + packet.buffer_len().next_multiple_of(4);
        buffer.resize(end, 0);
        if let Some(room) = buffer.get_mut(start..) {
            packet.serialize(room);
        }
    }

    fn send(&self, buffer: &[u8]) -> io::Result<()> {
        let sent = self.socket.send(buffer, 0)?;
        if sent == buffer.len() { Ok(()) } else { Err(io::Error::other("the kernel took only a part of the request")) }
    }

    fn receive(&mut self) -> io::Result<Vec<Frame>> {
        loop {
            let (frames, to_group) = self.receive_any()?;
            if let Some(answer) = self.heard.sort(frames, to_group)? {
                return Ok(answer);
            }
        }
    }

    fn receive_any(&mut self) -> io::Result<(Vec<Frame>, bool)> {
        self.datagram.clear();
        self.datagram.reserve(DATAGRAM);
        let (length, from) = loop {
            match self.socket.recv_from(&mut self.datagram, libc::MSG_TRUNC) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        if length == 0 || length > self.datagram.len() {
            let socket = self.socket.as_raw_fd();
            return Err(io::Error::other(format!("an answer of {length} bytes on socket {socket}")));
        }
        Ok((frames(&self.datagram)?, from.multicast_groups() != 0))
    }
}

pub(super) enum Body {
    Ack,
    Done,
    Refused(Refusal),
    Message(Vec<u8>),
}

pub(super) struct Frame {
    pub(super) sequence: u32,
    pub(super) interrupted: bool,
    pub(super) body: Body,
}

pub(super) fn frames(mut datagram: &[u8]) -> io::Result<Vec<Frame>> {
    let mut frames = Vec::new();
    while datagram.len() >= HEADER_LEN {
        let cut = || io::Error::other("answer cut short");
        let length = read_u32(datagram, 0).ok_or_else(cut)? as usize;
        let kind = read_u16(datagram, 4).ok_or_else(cut)?;
        let flags = read_u16(datagram, 6).ok_or_else(cut)?;
        let sequence = read_u32(datagram, 8).ok_or_else(cut)?;
        let message = datagram.get(..length).filter(|m| m.len() >= HEADER_LEN).ok_or_else(cut)?;
        let body = match kind {
            NLMSG_ERROR => refusal(message, flags).map_or(Body::Ack, Body::Refused),
            // The errno is at the ACK's position.
            NLMSG_DONE => refusal(message, flags).map_or(Body::Done, Body::Refused),
            _ => Body::Message(message.to_vec()),
        };
        frames.push(Frame { sequence, interrupted: flags & NLM_F_DUMP_INTR != 0, body });
        datagram = datagram.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(frames)
}

pub(crate) fn in_words(datagram: &[u8]) -> io::Result<Vec<(u32, Option<String>)>> {
    let words = |body| match body {
        Body::Ack => Some("ack".to_owned()),
        Body::Done => Some("done".to_owned()),
        Body::Refused(refusal) => Some(format!("{refusal:?}")),
        Body::Message(bytes) => parse(&bytes).map(|message| format!("{message:?}")),
    };
    Ok(frames(datagram)?.into_iter().map(|frame| (frame.sequence, words(frame.body))).collect())
}

fn refusal(message: &[u8], flags: u16) -> Option<Refusal> {
    let code = read_u32(message, HEADER_LEN)?.cast_signed();
    if code == 0 {
        return None;
    }
    let mut reason = None;
    if flags & NLM_F_ACK_TLVS != 0 {
        // After the errno and the request's header (NETLINK_CAP_ACK).
        let mut attributes = message.get(2 * HEADER_LEN + 4..).unwrap_or_default();
        while let (Some(length), Some(kind)) = (read_u16(attributes, 0), read_u16(attributes, 2)) {
            let Some(value) = attributes.get(4..usize::from(length)) else { break };
            if kind == ATTR_MSG {
                reason = Some(String::from_utf8_lossy(value).trim_end_matches('\0').to_owned());
            }
            attributes = attributes.get(usize::from(length).next_multiple_of(4)..).unwrap_or_default();
        }
    }
    Some(Refusal { errno: io::Error::from_raw_os_error(code.saturating_neg()), reason })
}

fn parse(bytes: &[u8]) -> Option<RouteNetlinkMessage> {
    match NetlinkMessage::<RouteNetlinkMessage>::deserialize(bytes).map(NetlinkMessage::into_parts) {
        Ok((_, NetlinkPayload::InnerMessage(message))) => Some(message),
        Ok(_) => None,
        Err(error) => {
            tracing::debug!(%error, "netlink message left out");
            None
        }
    }
}

fn read_u16(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2)?.try_into().ok().map(u16::from_ne_bytes)
}

fn read_u32(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_frame(code: i32, reason: Option<&str>) -> Vec<u8> {
        let mut tlv = Vec::new();
        if let Some(reason) = reason {
            let length = 4 + reason.len() + 1;
            tlv.extend(u16::try_from(length).unwrap_or(0).to_ne_bytes());
            tlv.extend(ATTR_MSG.to_ne_bytes());
            tlv.extend(reason.as_bytes());
            tlv.push(0);
            tlv.resize(length.next_multiple_of(4), 0);
        }
        let mut frame = Vec::new();
        frame.extend(u32::try_from(36 + tlv.len()).unwrap_or(0).to_ne_bytes());
        frame.extend(NLMSG_ERROR.to_ne_bytes());
        frame.extend((if reason.is_some() { NLM_F_ACK_TLVS } else { 0 }).to_ne_bytes());
        frame.extend(7u32.to_ne_bytes());
        frame.extend(0u32.to_ne_bytes());
        frame.extend(code.to_ne_bytes());
        frame.extend([0; HEADER_LEN]);
        frame.extend(tlv);
        frame
    }

    #[test]
    fn a_refusal_carries_errno_and_the_kernels_words() {
        let mut datagram = error_frame(-libc::EEXIST, Some("File is there"));
        datagram.extend(error_frame(0, None));
        let frames = frames(&datagram).unwrap_or_default();
        assert_eq!(frames.len(), 2);
        match frames.first().map(|f| (&f.body, f.sequence)) {
            Some((Body::Refused(r), 7)) => {
                assert!(r.is(libc::EEXIST));
                assert_eq!(r.reason.as_deref(), Some("File is there"));
            }
            _ => unreachable!("the first frame is a refusal of request 7"),
        }
        assert!(matches!(frames.get(1).map(|f| &f.body), Some(Body::Ack)));
    }

    #[test]
    fn what_is_heard_before_an_answer_is_kept_in_order_and_within_a_bound() {
        let frame = |sequence| Frame { sequence, interrupted: false, body: Body::Ack };
        let mut heard = Heard::default();
        assert!(matches!(heard.sort(vec![frame(1), frame(2)], true), Ok(None)));
        assert!(matches!(heard.sort(vec![frame(9)], false), Ok(Some(answer)) if answer.len() == 1));
        assert!(matches!(heard.sort(vec![frame(3)], true), Ok(None)));
        assert_eq!(heard.take().iter().map(|f| f.sequence).collect::<Vec<_>>(), [1, 2, 3]);
        assert!(heard.take().is_empty(), "nothing is heard twice");
        let flood = (0..u32::try_from(Heard::CAPACITY).unwrap_or(0)).map(frame).collect();
        assert!(matches!(heard.sort(flood, true), Ok(None)));
        assert!(heard.sort(vec![frame(0)], true).is_err(), "what does not fit is an error, not lost");
    }

    #[test]
    fn a_cut_datagram_is_an_error_not_a_panic() {
        let whole = error_frame(-libc::EEXIST, Some("reason"));
        for length in HEADER_LEN..whole.len() {
            assert!(frames(whole.get(..length).unwrap_or_default()).is_err(), "cut at {length}");
        }
    }
}
