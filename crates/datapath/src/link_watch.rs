//! Detects host sides whose carrier came up again: when a container takes its interface down, the kernel removes the
//! container side's routes and IPv6 addresses for good.

use std::{
    collections::BTreeMap,
    io, mem,
    os::fd::{AsRawFd, RawFd},
    time::Instant,
};

use rtnetlink::packet_route::RouteNetlinkMessage;
use tokio::io::{Interest, unix::AsyncFd};
use wharf_core::{endpoint::parse_host_ifname, ids::IfIndex, kernel::Result};

use crate::{
    error::wrap,
    netlink::{
        Connection,
        link::{self, LinkSeen},
    },
};

const OPERATION: &str = "watch links";

/// Carrier-up counts of host sides.
#[derive(Debug, Clone, Default)]
pub struct Carriers(BTreeMap<IfIndex, u32>);

impl Carriers {
    /// The first record, at the link's creation, does not count.
    fn came_up_again(&mut self, seen: &LinkSeen) -> bool {
        if parse_host_ifname(&seen.name).is_none() {
            return false;
        }
        let before = self.0.insert(seen.ifindex, seen.carrier_ups);
        before.is_some_and(|before| before > 0 && seen.carrier_ups > before)
    }

    fn record(&mut self, messages: Vec<RouteNetlinkMessage>) -> Vec<IfIndex> {
        let mut again = Vec::new();
        for message in messages {
            match message {
                RouteNetlinkMessage::NewLink(message) => {
                    let seen = link::read(&message);
                    if self.came_up_again(&seen) {
                        again.push(seen.ifindex);
                    }
                }
                RouteNetlinkMessage::DelLink(message) => {
                    self.0.remove(&IfIndex(message.header.index));
                }
                _ => {}
            }
        }
        again
    }
}

/// A watch of the endpoints' links; also reports changes since the given [`Carriers`].
pub struct LinkWatch {
    socket: AsyncFd<Watched>,
    carriers: Carriers,
    reported: Vec<IfIndex>,
}

struct Watched(Connection);

impl AsRawFd for Watched {
    fn as_raw_fd(&self) -> RawFd {
        self.0.socket().as_raw_fd()
    }
}

pub(crate) struct Opened(Connection, Carriers, Vec<IfIndex>);

/// Subscribes, then reads: a change in between is seen twice and reported once.
pub(crate) fn open(mut carriers: Carriers) -> Result<Opened> {
    let mut connection = Connection::open()?;
    connection.hear_links()?;
    let links = link::pairs(&mut connection)?;
    let mut there = Carriers::default();
    there.record(links.clone());
    let mut reported = carriers.record(links);
    connection.socket().set_non_blocking(true).map_err(|e| wrap(OPERATION, "NETLINK_ROUTE", &e))?;
    reported.extend(there.record(connection.heard(Instant::now())?));
    Ok(Opened(connection, there, reported))
}

impl LinkWatch {
    pub(crate) fn new(Opened(connection, carriers, reported): Opened) -> Result<Self> {
        // SAFETY: `Watched` owns the socket, never replaces it, and is not handed out by value.
        let socket = unsafe { AsyncFd::register_with_interest(Watched(connection), Interest::READABLE) }
            .map_err(|e| wrap(OPERATION, "NETLINK_ROUTE", &io::Error::from(e)))?;
        Ok(Self { socket, carriers, reported })
    }

    /// Waits for host sides whose carrier came up again. Cancel safe.
    ///
    /// # Errors
    /// Lost messages or a failed socket; a new watch with [`Self::carriers`] reports the missed changes.
    pub async fn next(&mut self) -> Result<Vec<IfIndex>> {
        while self.reported.is_empty() {
            let mut guard = self.socket.readable_mut().await.map_err(|e| wrap(OPERATION, "NETLINK_ROUTE", &e))?;
            match guard.get_inner_mut().0.heard_datagram(Instant::now())? {
                Some(messages) => self.reported = self.carriers.record(messages),
                // Only now the socket is empty: an unparsable datagram may precede others.
                None => guard.clear_ready(),
            }
        }
        Ok(mem::take(&mut self.reported))
    }

    /// The state for a later watch.
    #[must_use]
    pub fn carriers(self) -> Carriers {
        self.carriers
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixDatagram, time::Duration};

    use rtnetlink::{
        packet_core::NetlinkMessage,
        packet_route::link::{LinkAttribute, LinkMessage},
    };

    use super::*;

    fn host_side() -> String {
        let id = wharf_core::ids::EndpointId::try_from(7).expect("an id");
        wharf_core::endpoint::host_ifname(id, wharf_core::ids::Epoch(9)).to_string()
    }

    fn about_link(ifindex: u32, carrier_ups: u32) -> Vec<u8> {
        let mut link = LinkMessage::default();
        link.header.index = ifindex;
        link.attributes = vec![LinkAttribute::IfName(host_side()), LinkAttribute::CarrierUpCount(carrier_ups)];
        let mut message = NetlinkMessage::from(RouteNetlinkMessage::NewLink(link));
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        bytes
    }

    #[tokio::test]
    async fn a_datagram_without_a_known_message_holds_no_later_one_back() {
        let (ours, kernel) = UnixDatagram::pair().expect("a socket pair");
        ours.set_nonblocking(true).expect("not blocking");
        let mut carriers = Carriers::default();
        carriers.0.insert(IfIndex(5), 1);
        let mut watch = LinkWatch::new(Opened(Connection::over(ours.into()), carriers, Vec::new())).expect("a watch");
        let unknown = [&16_u32.to_ne_bytes()[..], &u16::MAX.to_ne_bytes(), &[0; 10]].concat();
        for datagram in [unknown.clone(), unknown, about_link(5, 2)] {
            kernel.send(&datagram).expect("send");
        }
        let again = tokio::time::timeout(Duration::from_secs(5), watch.next()).await;
        assert_eq!(again.expect("it waits for another datagram").expect("a report"), [IfIndex(5)]);
        assert!(tokio::time::timeout(Duration::from_millis(50), watch.next()).await.is_err());
        kernel.send(&about_link(5, 3)).expect("send");
        assert_eq!(watch.next().await.expect("a report"), [IfIndex(5)]);
    }

    #[test]
    fn only_a_later_carrier_of_an_endpoints_link_counts() {
        let mut carriers = Carriers::default();
        let name = host_side();
        let mut seen = LinkSeen { name, ..link::read(&LinkMessage::default()) };
        for (ups, expected) in [(0, false), (1, false), (1, false), (2, true), (2, false), (600, true)] {
            seen.carrier_ups = ups;
            assert_eq!(carriers.came_up_again(&seen), expected, "{ups}");
        }
        (seen.name, seen.carrier_ups) = ("eth0".to_owned(), 601);
        assert!(!carriers.came_up_again(&seen), "a link of no endpoint");
    }
}
