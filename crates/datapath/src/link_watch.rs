//! Watches the host sides of endpoints for a carrier that was lost and came up again.
//!
//! When a container takes its interface down, the kernel removes the routes and IPv6 addresses of the container's side, and does not add
//! them again when the interface comes up. The node sees both changes: the host side loses its carrier and regains it.

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

/// How often the carrier of each host side came up, by interface index.
#[derive(Debug, Clone, Default)]
pub struct Carriers(BTreeMap<IfIndex, u32>);

impl Carriers {
    /// Records a link. True when its carrier came up again since the link was recorded; the first time is the link's creation.
    fn came_up_again(&mut self, seen: &LinkSeen) -> bool {
        if parse_host_ifname(&seen.name).is_none() {
            return false;
        }
        let before = self.0.insert(seen.ifindex, seen.carrier_ups);
        before.is_some_and(|before| before > 0 && seen.carrier_ups > before)
    }

    /// Records what the kernel reports of links. Returns those whose carrier came up again.
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

/// The watch. The first one reports nothing about the time before it; a later one that takes over [`Self::carriers`] reports the
/// changes in between.
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

/// An opened watch that no runtime polls yet.
pub(crate) struct Opened(Connection, Carriers, Vec<IfIndex>);

/// Subscribes to changes of links, then reads all links: a change in between is seen twice and reported once.
pub(crate) fn open(mut carriers: Carriers) -> Result<Opened> {
    let mut connection = Connection::open()?;
    connection.hear_links()?;
    let links = connection.dump(&link::get_all_veth())?.map_err(|refusal| refusal.into_error(OPERATION, "veth"))?;
    // Links that are gone leave the record.
    let mut there = Carriers::default();
    there.record(links.clone());
    let mut reported = carriers.record(links);
    connection.socket().set_non_blocking(true).map_err(|e| wrap(OPERATION, "NETLINK_ROUTE", &e))?;
    reported.extend(there.record(connection.heard(Instant::now())?));
    Ok(Opened(connection, there, reported))
}

impl LinkWatch {
    pub(crate) fn new(Opened(connection, carriers, reported): Opened) -> Result<Self> {
        // SAFETY: `Watched` owns the socket and never replaces it, and the connection is not handed out by value.
        let socket = unsafe { AsyncFd::register_with_interest(Watched(connection), Interest::READABLE) }
            .map_err(|e| wrap(OPERATION, "NETLINK_ROUTE", &io::Error::from(e)))?;
        Ok(Self { socket, carriers, reported })
    }

    /// Waits for host sides whose carrier came up again, and returns their indexes. Dropping the future loses nothing.
    ///
    /// # Errors
    /// When messages were lost or the socket fails. A new watch with [`Self::carriers`] then reports what this one missed.
    pub async fn next(&mut self) -> Result<Vec<IfIndex>> {
        while self.reported.is_empty() {
            let mut guard = self.socket.readable_mut().await.map_err(|e| wrap(OPERATION, "NETLINK_ROUTE", &e))?;
            let messages = guard.get_inner_mut().0.heard(Instant::now())?;
            if messages.is_empty() {
                guard.clear_ready();
            }
            self.reported = self.carriers.record(messages);
        }
        Ok(mem::take(&mut self.reported))
    }

    /// What the watch knows of the links' carriers.
    #[must_use]
    pub fn carriers(self) -> Carriers {
        self.carriers
    }
}

#[cfg(test)]
mod tests {
    use rtnetlink::packet_route::link::LinkMessage;

    use super::*;

    #[test]
    fn only_a_later_carrier_of_an_endpoints_link_counts() {
        let mut carriers = Carriers::default();
        let name = wharf_core::endpoint::host_ifname(
            wharf_core::ids::EndpointId::try_from(7).expect("an id"),
            wharf_core::ids::Epoch(9),
        );
        let mut seen = LinkSeen { name: name.to_string(), ..link::read(&LinkMessage::default()) };
        for (ups, expected) in [(0, false), (1, false), (1, false), (2, true), (2, false), (600, true)] {
            seen.carrier_ups = ups;
            assert_eq!(carriers.came_up_again(&seen), expected, "{ups}");
        }
        (seen.name, seen.carrier_ups) = ("eth0".to_owned(), 601);
        assert!(!carriers.came_up_again(&seen), "a link of no endpoint");
    }
}
