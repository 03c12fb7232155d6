//! The netfilter socket: queries and transactions.

use std::{io, time::Duration};

use nix::sys::{
    socket::{setsockopt, sockopt},
    time::TimeVal,
};
use rtnetlink::{
    packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST},
    sys::{Socket, SocketAddr, protocols::NETLINK_NETFILTER},
};

use super::{
    super::{
        Refusal,
        batch::{Body, Frame, HEADER_LEN, frames},
    },
    wire::{Attributes, BATCH_BEGIN, BATCH_END, BATCH_GENID, GENERIC_LEN, INET, SUBSYSTEM, message},
};

/// Guards against bugs.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes. Each refusal in a transaction costs about 1 KiB.
const RECEIVE_BUFFER: usize = 4 << 20;
/// Default `SO_SNDBUF`, bytes. A transaction is one `sendmsg`.
const SEND_BUFFER: usize = 128 << 10;

/// Bytes; more would delay a status.
const MAX_FOREIGN: usize = 512 << 10;
const MAX_FOREIGN_SET: usize = 64 << 10;

/// `NLM_F_REQUEST` is implied.
#[derive(Debug, Clone)]
pub(super) struct Message {
    pub(super) kind: u16,
    pub(super) flags: u16,
    pub(super) attributes: Attributes,
}

/// Of a transaction. Only `Done` changes the ruleset.
#[derive(Debug)]
pub(super) enum Outcome {
    Done,
    /// Another ruleset generation than expected.
    Stale,
    /// Messages by index.
    Refused(Vec<(usize, Refusal)>),
    /// nf_tables is missing or not permitted, or the commit failed.
    Failed(Refusal),
}

pub(super) struct Netfilter {
    socket: Socket,
    sequence: u32,
}

impl Netfilter {
    pub(super) fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_NETFILTER)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        socket.set_cap_ack(true)?;
        socket.set_ext_ack(true)?;
        let timeout = TimeVal::new(ANSWER_TIMEOUT.as_secs().cast_signed(), 0);
        setsockopt(&socket, sockopt::ReceiveTimeout, &timeout)?;
        // Not permitted in a user namespace, where the default suffices.
        let _default = setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER);
        Ok(Self { socket, sequence: 0 })
    }

    pub(super) fn get(&mut self, kind: u16, attributes: &Attributes) -> io::Result<Result<Vec<Vec<u8>>, Refusal>> {
        self.ask(INET, kind, NLM_F_ACK, attributes, usize::MAX)
    }

    /// [`io::ErrorKind::Interrupted`]: the ruleset changed.
    pub(super) fn dump(&mut self, kind: u16, attributes: &Attributes) -> io::Result<Result<Vec<Vec<u8>>, Refusal>> {
        self.ask(INET, kind, NLM_F_DUMP, attributes, usize::MAX)
    }

    /// Of foreign tables. [`io::ErrorKind::FileTooLarge`]: longer than the limit.
    pub(super) fn dump_of(
        &mut self,
        family: u8,
        kind: u16,
        attributes: &Attributes,
    ) -> io::Result<Result<Vec<Vec<u8>>, Refusal>> {
        let limit = if kind == message::GET_SET_ELEM { MAX_FOREIGN_SET } else { MAX_FOREIGN };
        self.ask(family, kind, NLM_F_DUMP, attributes, limit)
    }

    fn ask(
        &mut self,
        family: u8,
        kind: u16,
        flags: u16,
        attributes: &Attributes,
        limit: usize,
    ) -> io::Result<Result<Vec<Vec<u8>>, Refusal>> {
        let mut request = Vec::new();
        self.append(&mut request, SUBSYSTEM << 8 | kind, flags, (family, 0), attributes);
        self.send(&request)?;
        let mut found = Vec::new();
        let (mut interrupted, mut length) = (false, 0);
        loop {
            for frame in self.receive()? {
                if frame.sequence != self.sequence {
                    continue;
                }
                interrupted |= frame.interrupted;
                match frame.body {
                    Body::Message(bytes) => {
                        length += bytes.len();
                        if length > limit {
                            // Discards the rest: the kernel scans a large set for each datagram.
                            *self = Self::open()?;
                            return Err(io::ErrorKind::FileTooLarge.into());
                        }
                        found.push(bytes);
                    }
                    Body::Refused(refusal) => return Ok(Err(refusal)),
                    // Another dump may start only now.
                    Body::Done | Body::Ack if interrupted => return Err(io::ErrorKind::Interrupted.into()),
                    Body::Done | Body::Ack => return Ok(Ok(found)),
                }
            }
        }
    }

    /// Fails at another ruleset generation.
    pub(super) fn commit(&mut self, generation: Option<u32>, messages: &[Message]) -> io::Result<Outcome> {
        let subsystem = (0, SUBSYSTEM);
        let mut buffer = Vec::new();
        let expected = generation.map(|g| Attributes::default().number(BATCH_GENID, g)).unwrap_or_default();
        self.append(&mut buffer, BATCH_BEGIN, 0, subsystem, &expected);
        let begin = self.sequence;
        for (index, message) in messages.iter().enumerate() {
            // Refusals are sent before the last message's acknowledgement.
            let last = if index + 1 == messages.len() { NLM_F_ACK } else { 0 };
            let kind = SUBSYSTEM << 8 | message.kind;
            self.append(&mut buffer, kind, message.flags | last, (INET, 0), &message.attributes);
        }
        let end = self.sequence;
        self.append(&mut buffer, BATCH_END, 0, subsystem, &Attributes::default());
        if buffer.len() >= SEND_BUFFER {
            setsockopt(&self.socket, sockopt::SndBufForce, &(2 * buffer.len()))?;
        }
        self.send(&buffer)?;
        let mut refused = Vec::new();
        loop {
            for frame in self.receive()? {
                let index = frame.sequence.wrapping_sub(begin);
                if index > end.wrapping_sub(begin) {
                    continue;
                }
                match frame.body {
                    Body::Refused(refusal) if index == 0 && refusal.is(libc::ERESTART) => return Ok(Outcome::Stale),
                    Body::Refused(refusal) if index == 0 => return Ok(Outcome::Failed(refusal)),
                    Body::Refused(refusal) => refused.push(((index - 1) as usize, refusal)),
                    _ => {}
                }
                if frame.sequence == end {
                    return Ok(if refused.is_empty() { Outcome::Done } else { Outcome::Refused(refused) });
                }
            }
        }
    }

    /// `generic`: family and resource id (big endian on the wire).
    fn append(&mut self, buffer: &mut Vec<u8>, kind: u16, flags: u16, generic: (u8, u16), attributes: &Attributes) {
        self.sequence = self.sequence.wrapping_add(1);
        let length = HEADER_LEN + GENERIC_LEN + attributes.0.len();
        buffer.extend(u32::try_from(length).unwrap_or(u32::MAX).to_ne_bytes());
        buffer.extend(kind.to_ne_bytes());
        buffer.extend((flags | NLM_F_REQUEST).to_ne_bytes());
        buffer.extend(self.sequence.to_ne_bytes());
        buffer.extend(0u32.to_ne_bytes());
        buffer.extend([generic.0, 0]);
        buffer.extend(generic.1.to_be_bytes());
        buffer.extend(&attributes.0);
    }

    fn send(&self, buffer: &[u8]) -> io::Result<()> {
        let sent = self.socket.send(buffer, 0)?;
        if sent == buffer.len() { Ok(()) } else { Err(io::Error::other("the kernel took only a part of the request")) }
    }

    fn receive(&self) -> io::Result<Vec<Frame>> {
        let datagram = loop {
            match self.socket.recv_from_full() {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                other => break other?.0,
            }
        };
        if datagram.is_empty() { Err(io::Error::other("empty answer")) } else { frames(&datagram) }
    }
}
