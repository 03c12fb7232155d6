//! Announcements: the node answers for a container's address on a link whose network contains it. A proxy neighbour
//! entry ([`Proxy`]) makes the kernel answer; IPv6 also needs `proxy_ndp`. A row of the endpoint table is written
//! before its entry and removed before it: [`Announcer::ensure`] finds every entry that a crash left.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv6Addr, SocketAddrV6},
    os::fd::AsRawFd as _,
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
};

use ipnet::IpNet;
use nix::{
    errno::Errno,
    sys::socket::{
        AddressFamily, LinkAddr, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrIn6, SockaddrLike as _, sendto,
        setsockopt, socket, sockopt,
    },
};
use wharf_core::{
    finding::NodeProblem,
    ids::{IfIndex, MacAddr},
    kernel::{KernelError, NodeSpec, Result},
};
use wharf_crash as crash;

use crate::{
    netlink::{
        Connection, Request, link,
        proxy::{self, Proxy},
        route,
    },
    settings::{Settings, dotted, read},
};

const OPERATION: &str = "announce addresses";
const RECORD: &str = "announce.";

#[derive(Debug, Clone, PartialEq, Eq)]
struct OnLink {
    net: IpNet,
    ifindex: IfIndex,
    ifname: String,
    mac: MacAddr,
}

impl OnLink {
    fn setting(&self, name: &str) -> String {
        let family = if self.net.addr().is_ipv4() { "ipv4" } else { "ipv6" };
        format!("{family}/conf/{}/{name}", self.ifname)
    }
}

pub(crate) struct Announcer {
    settings: Settings,
    /// Empty while announcing is off. Locked, on blocking threads, while entries change.
    links: Mutex<Vec<OnLink>>,
}

type Wanted<'a> = BTreeMap<Proxy, &'a OnLink>;

fn wanted<'a>(links: &'a [OnLink], addresses: impl IntoIterator<Item = IpAddr>) -> Wanted<'a> {
    let of = |address: IpAddr| {
        let over = links.iter().filter(move |l| l.net.contains(&address));
        over.map(move |l| (Proxy { address, ifindex: l.ifindex }, l))
    };
    addresses.into_iter().flat_map(of).collect()
}

impl Announcer {
    pub(crate) fn new(run_dir: &Path) -> Self {
        Self { settings: Settings::new(run_dir, RECORD), links: Mutex::default() }
    }

    fn links(&self) -> MutexGuard<'_, Vec<OnLink>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn ensure(&self, spec: &NodeSpec, endpoints: impl Fn() -> Result<Vec<IpAddr>>) -> Result<()> {
        if !spec.announce {
            return self.remove();
        }
        let mut links = self.links();
        let mut connection = Connection::open()?;
        *links = on_links(&mut connection, &spec.cidrs)?;
        let mut settings = Vec::new();
        for path in links.iter().filter(|l| l.net.addr().is_ipv6()).map(|l| l.setting("proxy_ndp")) {
            if read(&path)? != "1" {
                settings.push((path, "1"));
            }
        }
        self.settings.change(settings, |_| Ok(Vec::new()))?;
        let wanted = wanted(&links, endpoints()?);
        let there: BTreeMap<Proxy, bool> = proxy::list(&mut connection)?.into_iter().collect();
        let old = there.iter().filter(|(proxy, ours)| **ours && !wanted.contains_key(proxy));
        remove_all(&mut connection, old.map(|(proxy, _)| *proxy))?;
        add_all(&mut connection, wanted.into_iter().filter(|(proxy, _)| !there.contains_key(proxy)))
    }

    /// Held while endpoint rows and their announcements change. `None` while announcing is off.
    pub(crate) fn hold(&self) -> Option<Held<'_>> {
        Some(self.links()).filter(|links| !links.is_empty()).map(Held)
    }

    pub(crate) fn observe(
        &self,
        spec: &NodeSpec,
        endpoints: impl Fn() -> Result<Vec<IpAddr>>,
    ) -> Result<Vec<NodeProblem>> {
        let _held = self.links();
        let mut connection = Connection::open()?;
        let links = if spec.announce { on_links(&mut connection, &spec.cidrs)? } else { Vec::new() };
        let wanted = if links.is_empty() { Wanted::new() } else { wanted(&links, endpoints()?) };
        let there: BTreeMap<Proxy, bool> = proxy::list(&mut connection)?.into_iter().collect();
        let missing = wanted.keys().filter(|proxy| !there.contains_key(proxy));
        let missing = missing.map(|proxy| (proxy, "expected, is not there: neighbours do not find the container"));
        let stray = there.iter().filter(|(proxy, ours)| **ours && !wanted.contains_key(proxy));
        let stray = stray.map(|(proxy, _)| (proxy, "is there, and no container has the address"));
        let mut problems = Vec::new();
        for (proxy, cause) in missing.chain(stray) {
            let what =
                format!("announcement of {} on {}", proxy.address, link::name_of(&mut connection, proxy.ifindex)?);
            problems.push(NodeProblem::Outbound { what, cause: cause.to_owned(), repairable: true });
        }
        let proxies = links.iter().filter(|l| l.net.addr().is_ipv6()).map(|l| (l.setting("proxy_ndp"), true));
        // Masquerading or another program owns forwarding.
        let forwards = links.iter().map(|l| (l.setting("forwarding"), false));
        for (path, repairable) in proxies.chain(forwards).collect::<BTreeSet<_>>() {
            let found = read(&path)?;
            if found == "0" {
                let (name, expected) = (dotted(&path), "1".to_owned());
                problems.push(NodeProblem::Setting { name, expected, found, repairable });
            }
        }
        Ok(problems)
    }

    pub(crate) fn remove(&self) -> Result<()> {
        self.links().clear();
        let mut connection = Connection::open()?;
        let ours = ours(&mut connection)?;
        remove_all(&mut connection, ours)?;
        self.settings.take_back()
    }

    pub(crate) fn changed(&self) -> Result<Vec<String>> {
        Ok(self.settings.changed()?.keys().map(|path| dotted(path)).collect())
    }
}

pub(crate) struct Held<'a>(MutexGuard<'a, Vec<OnLink>>);

impl Held<'_> {
    /// Only logs failures; [`Announcer::ensure`] retries.
    pub(crate) fn publish(&self, addresses: impl IntoIterator<Item = IpAddr>) {
        let add = || {
            let wanted = wanted(&self.0, addresses);
            let mut connection = Connection::open()?;
            let mut new = Wanted::new();
            for (proxy, link) in wanted {
                if proxy.look_up(&mut connection)?.is_none() {
                    new.insert(proxy, link);
                }
            }
            add_all(&mut connection, new)
        };
        if let Err(e) = add() {
            tracing::warn!("neighbours do not find a container until it is announced again: {e}");
        }
    }

    pub(crate) fn unpublish(&self, addresses: impl IntoIterator<Item = IpAddr>) -> Result<()> {
        let mut connection = Connection::open()?;
        let mut ours = Vec::new();
        for proxy in wanted(&self.0, addresses).into_keys() {
            if proxy.look_up(&mut connection)? == Some(true) {
                ours.push(proxy);
            }
        }
        remove_all(&mut connection, ours)
    }
}

pub(crate) fn ours(connection: &mut Connection) -> Result<Vec<Proxy>> {
    Ok(proxy::list(connection)?.into_iter().filter(|(_, ours)| *ours).map(|(proxy, _)| proxy).collect())
}

pub(crate) fn withdraw(address: IpAddr, ifindex: IfIndex) -> Result<()> {
    let (mut connection, proxy) = (Connection::open()?, Proxy { address, ifindex });
    match proxy.look_up(&mut connection)? {
        Some(true) => remove_all(&mut connection, [proxy]),
        _ => Ok(()),
    }
}

fn on_links(connection: &mut Connection, cidrs: &[IpNet]) -> Result<Vec<OnLink>> {
    let mut found = Vec::new();
    for route in route::of_networks(connection)? {
        let net = route.destination;
        if !cidrs.iter().any(|cidr| net != *cidr && net.contains(cidr)) {
            continue;
        }
        let Some(ifindex) = route.ifindex else { continue };
        let Some(seen) = link::look_up_index(connection, ifindex)? else { continue };
        if let Some(mac) = seen.mac.filter(|_| seen.up && seen.arp && !seen.point_to_point) {
            found.push(OnLink { net, ifindex, ifname: seen.name, mac });
        }
    }
    Ok(found)
}

fn remove_all(connection: &mut Connection, proxies: impl IntoIterator<Item = Proxy>) -> Result<()> {
    let proxies: Vec<Proxy> = proxies.into_iter().collect();
    let requests: Vec<Request> = proxies.iter().map(|proxy| proxy.remove()).collect();
    for (answer, proxy) in connection.batch(requests)?.into_iter().zip(proxies) {
        match answer {
            Err(refusal) if !refusal.is(libc::ENOENT) && !refusal.is(libc::ENODEV) => {
                return Err(refused(refusal, proxy));
            }
            _ => crash::point("datapath/announce/after-remove"),
        }
    }
    Ok(())
}

fn refused(refusal: crate::netlink::Refusal, proxy: Proxy) -> KernelError {
    refusal.into_error(OPERATION, format!("{} on link {}", proxy.address, proxy.ifindex))
}

fn add_all<'a>(connection: &mut Connection, proxies: impl IntoIterator<Item = (Proxy, &'a OnLink)>) -> Result<()> {
    let proxies: Vec<(Proxy, &OnLink)> = proxies.into_iter().collect();
    let requests: Vec<Request> = proxies.iter().map(|(proxy, _)| proxy.add()).collect();
    for (answer, (proxy, link)) in connection.batch(requests)?.into_iter().zip(proxies) {
        answer.map_err(|refusal| refused(refusal, proxy))?;
        crash::point("datapath/announce/after-add");
        // For neighbours that cached another address.
        if let Err(errno) = advertise(proxy.address, link) {
            tracing::warn!("tell neighbours on {} of {}: {errno}; they ask in time", link.ifname, proxy.address);
        }
    }
    Ok(())
}

/// Unsolicited neighbour advertisement (RFC 4861, 7.2.6), or ARP announcement (RFC 5227, 3).
fn advertise(address: IpAddr, link: &OnLink) -> nix::Result<()> {
    match address {
        IpAddr::V4(a) => {
            let socket = socket(AddressFamily::Packet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
            // Ethernet, IPv4, address lengths, request.
            let mut packet = vec![0, 1, 8, 0, 6, 4, 0, 1];
            packet.extend(link.mac.0);
            packet.extend(a.octets());
            packet.extend([0; 6]);
            packet.extend(a.octets());
            sendto(socket.as_raw_fd(), &packet, &everybody(link.ifindex)?, MsgFlags::empty()).map(drop)
        }
        IpAddr::V6(a) => {
            let socket = socket(AddressFamily::Inet6, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::IcmpV6)?;
            setsockopt(&socket, sockopt::Ipv6MulticastHops, &255)?;
            // Type 136; the kernel fills in checksum and source. Flags: router, override.
            let mut packet = vec![136, 0, 0, 0, 0xa0, 0, 0, 0];
            packet.extend(a.octets());
            // Target link-layer address, 8 bytes.
            packet.extend([2, 1]);
            packet.extend(link.mac.0);
            let all_nodes = SocketAddrV6::new(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1), 0, 0, link.ifindex.0);
            sendto(socket.as_raw_fd(), &packet, &SockaddrIn6::from(all_nodes), MsgFlags::empty()).map(drop)
        }
    }
}

fn everybody(ifindex: IfIndex) -> nix::Result<LinkAddr> {
    let address = libc::sockaddr_ll {
        sll_family: u16::try_from(libc::AF_PACKET).map_err(|_| Errno::EINVAL)?,
        sll_protocol: u16::try_from(libc::ETH_P_ARP).map_err(|_| Errno::EINVAL)?.to_be(),
        sll_ifindex: i32::try_from(ifindex.0).map_err(|_| Errno::EINVAL)?,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 6,
        sll_addr: [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0],
    };
    let length = libc::socklen_t::try_from(size_of_val(&address)).map_err(|_| Errno::EINVAL)?;
    // SAFETY: a whole `sockaddr_ll` of that length, which outlives the call.
    unsafe { LinkAddr::from_raw(std::ptr::from_ref(&address).cast(), Some(length)) }.ok_or(Errno::EINVAL)
}
