//! The record on the event ring buffer.

#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EventKind {
    /// Packet dropped.
    Drop = 1,
    /// Packet forwarded; only under `FLAG_TRACE`.
    Trace = 2,
}

impl EventKind {
    /// Parses the number in an event.
    #[must_use]
    pub const fn from_u32(n: u32) -> Option<Self> {
        match n {
            1 => Some(Self::Drop),
            2 => Some(Self::Trace),
            _ => None,
        }
    }
}

/// A record of `EVENTS`. Unreadable fields are zero.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct Event {
    /// Nanoseconds since boot (`bpf_ktime_get_ns`).
    pub timestamp_ns: u64,
    /// Epoch of the endpoint.
    pub epoch: u64,
    /// [`EventKind`] as a number.
    pub kind: u32,
    /// [`crate::DropReason`] as a number.
    pub reason: u32,
    /// [`crate::Direction`] as a number.
    pub direction: u32,
    /// Endpoint whose program reports.
    pub endpoint_id: u32,
    pub identity: u32,
    /// Bytes, Ethernet header included.
    pub length: u32,
    /// Network byte order; IPv4 as IPv4-mapped.
    pub source: [u8; 16],
    /// Like `source`.
    pub destination: [u8; 16],
    /// Source port (TCP, UDP), type and code (ICMP, ICMPv6), or operation (ARP); network byte order. Zero in later
    /// fragments.
    pub source_port: [u8; 2],
    /// Destination port (TCP, UDP) or zero; network byte order.
    pub destination_port: [u8; 2],
    /// Network byte order.
    pub ethertype: [u8; 2],
    /// IP protocol; for IPv6 behind the readable extension headers.
    pub protocol: u8,
    /// Zero.
    pub _pad: u8,
}

#[cfg(feature = "user")]
crate::pod!(Event);

const _: () = assert!(core::mem::size_of::<Event>() == 80);
