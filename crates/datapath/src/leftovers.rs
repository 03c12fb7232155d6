//! Leftovers on a node without an agent, and their removal. Objects that are not provably Wharf's (by mark, protocol
//! number, or place and name) are only reported.

use std::{
    collections::BTreeSet,
    fmt, fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
};

use ipnet::IpNet;
use nix::sys::statfs::statfs;
use rtnetlink::packet_route::RouteNetlinkMessage;
use wharf_core::{
    endpoint::parse_host_ifname,
    ids::IfIndex,
    kernel::{KernelErrorKind, PeerRoute, Result, RouteRow},
};
use wharf_names::mark::Mark;

use crate::{
    OVERLAY_IFNAME, ROUTE_PROTOCOL,
    announce::{self, Announcer},
    bpf::{
        clsact,
        pins::{self, BPF_FS_MAGIC, PinTree},
    },
    error::wrap,
    forwarding::{Forwarding, dotted},
    netlink::{Connection, link, nft::Nft, proxy::Proxy, route},
    overlay, peers, plugin_link, redirects,
    router::Pair,
    translated,
};

/// A leftover object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Leftover {
    /// An endpoint's link.
    Link {
        name: String,
        ifindex: IfIndex,
        /// The owner's mark.
        mark: Mark,
    },
    /// Filters on another plugin's link, which stays.
    Filters {
        /// Link's name.
        name: String,
        /// Link's index.
        ifindex: IfIndex,
    },
    /// A route with Wharf's protocol number.
    Route(RouteRow),
    /// A route to another node.
    PeerRoute(PeerRoute),
    /// The unreachable route behind it.
    PeerUnreachable(IpNet),
    /// The router's veth pair, or one end.
    Router { name: String, ifindex: IfIndex },
    /// The overlay's interface.
    Overlay(IfIndex),
    /// An announced address.
    Announcement {
        address: IpAddr,
        /// Link's index.
        ifindex: IfIndex,
        /// Link's name.
        ifname: String,
    },
    /// Rules and routes to the proxy.
    Redirects(Vec<String>),
    /// The nftables table.
    Table,
    /// Changed settings (`sysctl`).
    Settings {
        /// Directory of the record.
        run_dir: PathBuf,
        /// For announcements, not for forwarding.
        announced: bool,
        names: Vec<String>,
    },
    /// A pin, or a directory of pins.
    Pin(PathBuf),
}

impl Leftover {
    fn ifindex(&self) -> Option<IfIndex> {
        match self {
            Self::Link { ifindex, .. } => Some(*ifindex),
            _ => None,
        }
    }
}

impl fmt::Display for Leftover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Link { name, mark, .. } => write!(f, "link {name} of {}", mark.owner),
            Self::Filters { name, .. } => write!(f, "filters on link {name} of another plugin"),
            Self::Route(RouteRow { destination, ifindex: None }) => write!(f, "unreachable route {destination}"),
            Self::Route(RouteRow { destination, .. }) => write!(f, "route {destination}"),
            Self::PeerRoute(PeerRoute { to, via }) => write!(f, "route {to} {via}"),
            Self::PeerUnreachable(to) => write!(f, "unreachable route {to} behind a route to another node"),
            Self::Overlay(_) => write!(f, "link {OVERLAY_IFNAME} of the overlay"),
            Self::Router { name, .. } => write!(f, "link {name} of the node's router"),
            Self::Announcement { address, ifname, .. } => write!(f, "announcement of {address} on {ifname}"),
            Self::Redirects(what) => f.write_str(&what.join(", ")),
            Self::Table => f.write_str("nftables table inet wharf"),
            Self::Settings { names, .. } => write!(f, "changes of settings: {}", names.join(", ")),
            Self::Pin(path) => write!(f, "pin {}", path.display()),
        }
    }
}

/// The objects found on a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Leftovers {
    /// Links precede their programs.
    pub ours: Vec<Leftover>,
    /// Not provably Wharf's.
    pub foreign: Vec<String>,
}

/// Lists Wharf's objects in this thread's network namespace and on a bpffs.
///
/// # Errors
/// A failed query or read.
pub fn list(bpffs: &Path, run_dir: &Path) -> Result<Leftovers> {
    let mut found = Leftovers::default();
    let mut connection = Connection::open()?;
    for message in link::pairs(&mut connection)? {
        let RouteNetlinkMessage::NewLink(m) = message else { continue };
        let seen = link::read(&m);
        let named = parse_host_ifname(&seen.name);
        match (seen.alias.as_deref().and_then(Mark::parse), named) {
            _ if !seen.pair => {}
            (Some(mark), _) => found.ours.push(Leftover::Link { name: seen.name, ifindex: seen.ifindex, mark }),
            (None, Some(_)) => found.foreign.push(format!("link {} (it has no mark of Wharf's)", seen.name)),
            (None, None) => {}
        }
    }
    found.ours.extend(plugin_link::taken()?.into_iter().filter_map(|link| {
        Some(Leftover::Filters { name: link.host_ifname.to_string(), ifindex: link.host_ifindex? })
    }));
    let routes = route::list(&mut connection, Some(ROUTE_PROTOCOL))?;
    let links: BTreeSet<IfIndex> = found.ours.iter().filter_map(Leftover::ifindex).collect();
    for route in routes {
        // Unreachable, or over a Wharf link.
        if route.ifindex.is_none_or(|ifindex| links.contains(&ifindex)) {
            let row = RouteRow { destination: route.destination, ifindex: route.ifindex };
            found.ours.push(Leftover::Route(row));
        } else {
            found.foreign.push(format!("route {} (over a link that is not Wharf's)", route.destination));
        }
    }
    for route in route::to_peers(&mut connection)? {
        let peer = route.next_hop().map(|via| PeerRoute { to: route.destination, via });
        found.ours.extend(peer.map(Leftover::PeerRoute));
    }
    found.ours.extend(peers::unreachable_to(&mut connection)?.into_iter().map(Leftover::PeerUnreachable));
    found.ours.extend(overlay::ours(&mut connection)?.map(Leftover::Overlay));
    let router = Pair::find(&mut connection)?;
    let mut gone_with = None;
    for link in router.links().filter(|l| gone_with.replace(l.ifindex) != Some(l.peer)) {
        found.ours.push(Leftover::Router { name: link.name.clone(), ifindex: link.ifindex });
    }
    for end in router.ends().iter().filter(|end| end.is_taken()) {
        found.foreign.push(format!("link {} (it is not Wharf's)", end.name));
    }
    let mut redirects = redirects::ours(&mut connection)?;
    redirects.extend(translated::ours(&mut connection)?);
    found.ours.extend((!redirects.is_empty()).then_some(Leftover::Redirects(redirects)));
    match Nft::default().look() {
        Ok(Some(_)) => found.ours.push(Leftover::Table),
        Ok(None) => {}
        Err(e) if e.kind == KernelErrorKind::Unsupported => {}
        Err(e) if e.kind == KernelErrorKind::Conflict => {
            found.foreign.push("nftables table inet wharf (it has no mark of Wharf's)".to_owned());
        }
        Err(e) => return Err(e),
    }
    for Proxy { address, ifindex } in announce::ours(&mut connection)? {
        let ifname = link::name_of(&mut connection, ifindex)?;
        found.ours.push(Leftover::Announcement { address, ifindex, ifname });
    }
    let changed = [
        (false, Forwarding::new(run_dir).changed()?.keys().map(|path| dotted(path)).collect()),
        (true, Announcer::new(run_dir).changed()?),
    ];
    for (announced, names) in changed.into_iter().filter(|(_, names): &(_, Vec<_>)| !names.is_empty()) {
        found.ours.push(Leftover::Settings { run_dir: run_dir.to_owned(), announced, names });
    }
    if statfs(bpffs).is_ok_and(|fs| fs.filesystem_type().0 == BPF_FS_MAGIC) {
        let root = bpffs.join(pins::ROOT);
        let (mut ours, mut foreign, mut trees) = (Vec::new(), Vec::new(), Vec::new());
        for tree in PinTree::all(bpffs)? {
            let (mine, others) = tree.listing()?;
            ours.extend(mine);
            foreign.extend(others);
            trees.push(tree.root().to_owned());
        }
        foreign
            .extend(pins::names(&root)?.into_iter().map(|name| root.join(name)).filter(|path| !trees.contains(path)));
        ours.extend(root.is_dir().then_some(root));
        // A directory with foreign entries stays.
        ours.retain(|path| !foreign.iter().any(|other| other.starts_with(path)));
        found.ours.extend(ours.into_iter().map(Leftover::Pin));
        found.foreign.extend(foreign.into_iter().map(|path| format!("pin {}", path.display())));
    }
    Ok(found)
}

/// Removes an object. Succeeds when already gone.
///
/// # Errors
/// A refusal, or new entries in a pin directory.
pub fn remove(leftover: &Leftover) -> Result<()> {
    match leftover {
        Leftover::Link { name, ifindex, .. } => remove_link(*ifindex, name),
        Leftover::Filters { name, .. } => clsact::remove_from(name),
        Leftover::Router { name, ifindex } => remove_link(*ifindex, name),
        Leftover::Overlay(ifindex) => overlay::remove(&mut Connection::open()?, *ifindex),
        Leftover::Route(row) => route::remove_row(row),
        Leftover::PeerRoute(peer) => peers::remove(peer),
        Leftover::PeerUnreachable(to) => peers::remove_unreachable(*to),
        Leftover::Redirects(_) => {
            redirects::remove()?;
            translated::remove(&mut Connection::open()?)
        }
        Leftover::Table => Nft::default().remove().map(drop),
        Leftover::Announcement { address, ifindex, .. } => announce::withdraw(*address, *ifindex),
        Leftover::Settings { run_dir, announced: true, .. } => Announcer::new(run_dir).remove(),
        Leftover::Settings { run_dir, .. } => Forwarding::new(run_dir).take_back(),
        Leftover::Pin(path) if path.is_dir() => match fs::remove_dir(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(wrap("remove pins", path.display().to_string(), &e)),
            _ => Ok(()),
        },
        Leftover::Pin(path) => pins::unpin(path).map(drop),
    }
}

fn remove_link(ifindex: IfIndex, name: &str) -> Result<()> {
    let mut connection = Connection::open()?;
    match connection.batch(vec![link::delete(ifindex)])?.pop() {
        Some(Err(refusal)) if !refusal.is(libc::ENODEV) => Err(refusal.into_error("remove link", name)),
        _ => Ok(()),
    }
}
