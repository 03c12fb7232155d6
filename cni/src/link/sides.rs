//! Both sides of a container's link, for CHECK.

use std::{
    fs::{self, File, OpenOptions},
    io,
    net::IpAddr,
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
    thread,
};

use futures::StreamExt as _;
use ipnet::IpNet;
use nix::sched::{CloneFlags, setns};
use rtnetlink::{
    Handle,
    packet_route::{
        AddressFamily, RouteNetlinkMessage,
        address::{AddressAttribute, AddressMessage},
        link::{LinkAttribute, LinkFlags, LinkMessage},
        route::{RouteAddress, RouteAttribute, RouteMessage},
        tc::{TcAttribute, TcFilterBpfOption, TcHandle, TcMessage, TcOption},
    },
};
use wharf_names::{
    attached::{FILTER_PREFIX, LINK_PINS, PIN_ENDPOINTS, PIN_ROOT, SINK},
    mark::Mark,
};

use super::{Cause, LinkError, dump, in_kernel, is_gone, marked};
use crate::{netconf::NetConf, request::Target};

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Inside {
    pub(crate) up: bool,
    /// Lower case.
    pub(crate) mac: String,
    /// Index in the host side's namespace.
    pub(crate) peer: Option<u32>,
    pub(crate) addresses: Vec<IpAddr>,
    /// Destination and gateway, of all tables.
    pub(crate) routes: Vec<(IpNet, Option<IpAddr>)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Outside {
    pub(crate) name: String,
    pub(crate) up: bool,
    pub(crate) owner: Owner,
    /// Ingress and egress.
    pub(crate) hooks: [Attached; 2],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    Target,
    Other,
    Plugin,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Attached {
    Program,
    Sink,
    Nothing,
    /// Neither filters nor pins, which show tcx links.
    Unknown,
}

/// `None` without the interface; [`LinkError::Netns`] if `netns` is no namespace.
pub(crate) fn inside(netns: &str, ifname: &str) -> Result<Option<Inside>, LinkError> {
    let not_one = |error| LinkError::Netns(netns.to_owned(), error);
    // Does not block on a FIFO.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(netns).map_err(not_one)?;
    let subject = format!("{ifname} in {netns}");
    let failed = |error| LinkError::Look(subject.clone(), error);
    let name = ifname.to_owned();
    // Only this thread enters the namespace.
    let thread = thread::Builder::new().spawn(move || visit(&file, name)).map_err(|e| failed(Cause::Kernel(e)))?;
    match thread.join() {
        Ok(Ok(seen)) => Ok(seen),
        Ok(Err(Visit::NotOne(error))) => Err(not_one(error)),
        Ok(Err(Visit::Failed(cause))) => Err(failed(cause)),
        Err(_) => Err(failed(Cause::Answer("its thread ended"))),
    }
}

enum Visit {
    NotOne(io::Error),
    Failed(Cause),
}

impl From<Cause> for Visit {
    fn from(cause: Cause) -> Self {
        Self::Failed(cause)
    }
}

fn visit(netns: &File, ifname: String) -> Result<Option<Inside>, Visit> {
    setns(netns, CloneFlags::CLONE_NEWNET).map_err(|errno| match errno {
        nix::errno::Errno::EINVAL => Visit::NotOne(errno.into()),
        _ => Visit::Failed(Cause::Kernel(errno.into())),
    })?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Cause::Kernel)?;
    Ok(runtime.block_on(in_kernel(async |mut handle| read_inside(&mut handle, ifname).await))?)
}

async fn read_inside(handle: &mut Handle, ifname: String) -> Result<Option<Inside>, Cause> {
    let Some(link) = one(handle.link().get().match_name(ifname).execute()).await? else { return Ok(None) };
    let index = link.header.index;
    let mut seen = Inside { up: is_up(&link), ..Inside::default() };
    for attribute in &link.attributes {
        match attribute {
            LinkAttribute::Address(bytes) => {
                seen.mac = bytes.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(":");
            }
            LinkAttribute::Link(peer) => seen.peer = Some(*peer),
            _ => {}
        }
    }
    let addresses = dump(handle, RouteNetlinkMessage::GetAddress(AddressMessage::default())).await?;
    seen.addresses = addresses.iter().flat_map(|message| addresses_of(message, index)).collect();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let mut question = RouteMessage::default();
        question.header.address_family = family;
        let routes = dump(handle, RouteNetlinkMessage::GetRoute(question)).await?;
        seen.routes.extend(routes.iter().filter_map(|message| route_over(message, index)));
    }
    Ok(Some(seen))
}

fn addresses_of(message: &RouteNetlinkMessage, index: u32) -> Vec<IpAddr> {
    let RouteNetlinkMessage::NewAddress(message) = message else { return Vec::new() };
    if message.header.index != index {
        return Vec::new();
    }
    let address = |attribute: &AddressAttribute| match attribute {
        AddressAttribute::Address(ip) | AddressAttribute::Local(ip) => Some(*ip),
        _ => None,
    };
    message.attributes.iter().filter_map(address).collect()
}

fn route_over(message: &RouteNetlinkMessage, index: u32) -> Option<(IpNet, Option<IpAddr>)> {
    let RouteNetlinkMessage::NewRoute(message) = message else { return None };
    let (mut destination, mut gateway, mut over) = (None, None, None);
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(ip) => destination = address(ip),
            RouteAttribute::Gateway(ip) => gateway = address(ip),
            RouteAttribute::Oif(ifindex) => over = Some(*ifindex),
            _ => {}
        }
    }
    // The kernel omits the address of a default route.
    let anywhere = match message.header.address_family {
        AddressFamily::Inet => IpAddr::from([0; 4]),
        _ => IpAddr::from([0; 16]),
    };
    let net = IpNet::new(destination.unwrap_or(anywhere), message.header.destination_prefix_length).ok()?;
    (over == Some(index)).then_some((net, gateway))
}

fn address(found: &RouteAddress) -> Option<IpAddr> {
    match found {
        RouteAddress::Inet(ip) => Some((*ip).into()),
        RouteAddress::Inet6(ip) => Some((*ip).into()),
        _ => None,
    }
}

pub(crate) async fn outside(index: u32, conf: &NetConf, target: &Target) -> Result<Option<Outside>, LinkError> {
    let seen = in_kernel(async |mut handle| {
        let Some(link) = one(handle.link().get().match_index(index).execute()).await? else { return Ok(None) };
        let (mut name, mut mark) = (String::new(), None);
        for attribute in &link.attributes {
            match attribute {
                LinkAttribute::IfName(text) => name.clone_from(text),
                LinkAttribute::IfAlias(alias) => mark = Mark::parse(alias),
                _ => {}
            }
        }
        let owner = match (&mark, marked(&link, conf, target)) {
            (_, Some(_)) => Owner::Target,
            (Some(_), None) => Owner::Other,
            (None, None) => Owner::Plugin,
        };
        let mut hooks = [Attached::Nothing; 2];
        for (hook, minor) in hooks.iter_mut().zip([TcHandle::MIN_INGRESS, TcHandle::MIN_EGRESS]) {
            *hook = on_hook(&mut handle, index, minor).await?;
        }
        // Netlink does not show tcx links.
        if hooks == [Attached::Nothing; 2]
            && let Some(mark) = mark
        {
            hooks = pinned(&bpf_mounts(), mark.id);
        }
        Ok(Some(Outside { name, up: is_up(&link), owner, hooks }))
    });
    seen.await.map_err(|cause| LinkError::Look(format!("link {index}"), cause))
}

async fn on_hook(handle: &mut Handle, index: u32, minor: u16) -> Result<Attached, Cause> {
    let mut question = TcMessage::default();
    question.header.index = index.cast_signed();
    question.header.parent = TcHandle { major: 0xffff, minor };
    let filters = dump(handle, RouteNetlinkMessage::GetTrafficFilter(question)).await?;
    Ok(filters.iter().filter_map(program_name).find_map(attached).unwrap_or(Attached::Nothing))
}

fn program_name(message: &RouteNetlinkMessage) -> Option<&str> {
    let RouteNetlinkMessage::NewTrafficFilter(message) = message else { return None };
    let options = message.attributes.iter().find_map(|attribute| match attribute {
        TcAttribute::Options(options) => Some(options),
        _ => None,
    });
    options?.iter().find_map(|option| match option {
        TcOption::Bpf(TcFilterBpfOption::ProgName(name)) => Some(name.as_str()),
        _ => None,
    })
}

/// A name begins with the program; on another plugin's link, id and epoch follow.
fn attached(filter: &str) -> Option<Attached> {
    let program = filter.strip_prefix(FILTER_PREFIX)?.split(':').next()?;
    Some(if program == SINK { Attached::Sink } else { Attached::Program })
}

fn bpf_mounts() -> Vec<String> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let is_bpf = |line: &str| {
        let mut fields = line.split(' ');
        let point = fields.nth(1)?;
        (fields.next() == Some("bpf")).then(|| point.to_owned())
    };
    mounts.lines().filter_map(is_bpf).collect()
}

/// In any bpffs and ABI version.
fn pinned(mounts: &[String], id: u16) -> [Attached; 2] {
    let versions = mounts.iter().filter_map(|mount| fs::read_dir(Path::new(mount).join(PIN_ROOT)).ok()).flatten();
    let pins = versions.flatten().map(|version| version.path().join(PIN_ENDPOINTS).join(id.to_string()));
    let pins: Vec<_> = pins.filter(|directory| directory.is_dir()).collect();
    if pins.is_empty() {
        return [Attached::Unknown; 2];
    }
    let is_linked = |link| pins.iter().any(|directory| directory.join(link).exists());
    LINK_PINS.map(|link| if is_linked(link) { Attached::Program } else { Attached::Nothing })
}

fn is_up(link: &LinkMessage) -> bool {
    link.header.flags.contains(LinkFlags::Up)
}

async fn one(
    answers: impl futures::Stream<Item = Result<LinkMessage, rtnetlink::Error>>,
) -> Result<Option<LinkMessage>, Cause> {
    match std::pin::pin!(answers).next().await {
        Some(Ok(link)) => Ok(Some(link)),
        Some(Err(error)) if is_gone(&error) => Ok(None),
        Some(Err(error)) => Err(Cause::Look(error)),
        None => Err(Cause::Answer("look at it: no answer")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_is_known_by_its_name() {
        for (name, expected) in [
            ("wharf/from_container", Some(Attached::Program)),
            ("wharf/from_container:7:9", Some(Attached::Program)),
            ("wharf/sink", Some(Attached::Sink)),
            ("wharf/sink:7:9", Some(Attached::Sink)),
            ("other", None),
        ] {
            assert_eq!(attached(name), expected, "{name}");
        }
    }

    #[test]
    fn tcx_links_are_known_by_their_pins() {
        let bpffs = tempfile::TempDir::new().unwrap();
        let mounts = [bpffs.path().to_str().unwrap().to_owned()];
        assert_eq!(pinned(&mounts, 7), [Attached::Unknown; 2]);
        let pins = bpffs.path().join("wharf/v30/endpoints/7");
        fs::create_dir_all(&pins).unwrap();
        assert_eq!(pinned(&mounts, 7), [Attached::Nothing; 2]);
        fs::write(pins.join("link_from_container"), "").unwrap();
        assert_eq!(pinned(&mounts, 7), [Attached::Program, Attached::Nothing]);
        assert_eq!(pinned(&mounts, 8), [Attached::Unknown; 2]);
    }

    #[test]
    fn a_path_that_is_no_network_namespace_is_no_failed_look() {
        let directory = tempfile::TempDir::new().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        for path in [directory.path().join("none"), file] {
            let error = inside(path.to_str().unwrap(), "eth0").unwrap_err();
            // Also the error without the capability to enter namespaces.
            let refused =
                matches!(&error, LinkError::Look(_, Cause::Kernel(e)) if e.raw_os_error() == Some(libc::EPERM));
            assert!(matches!(error, LinkError::Netns(..)) || refused, "{error}");
        }
    }
}
