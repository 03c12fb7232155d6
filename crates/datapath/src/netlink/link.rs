//! Links: queries, changes, creation of veth and netkit pairs.

use std::os::fd::{AsFd, AsRawFd};

use rtnetlink::{
    LinkMessageBuilder, LinkUnspec,
    packet_core::{DefaultNla, NLM_F_CREATE, NLM_F_EXCL},
    packet_route::{
        RouteNetlinkMessage,
        link::{
            AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoData, InfoKind, InfoNetkit, InfoVeth, LinkAttribute,
            LinkExtentMask, LinkFlags, LinkInfo, LinkMessage, NetkitMode, State,
        },
    },
};
use wharf_core::{
    ids::{Attachment, EndpointId, Epoch, IfIndex, MacAddr},
    kernel::{DeviceMode, KernelErrorKind, Link, LinkSpec, MIN_MTU, Result},
};
use wharf_crash as crash;
use wharf_names::mark::Mark;

use super::{Connection, Request, batch::Answer};
use crate::{
    error::fail,
    netns::{self, NetnsThread},
};

const OPERATION: &str = "create link";

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LinkSeen {
    pub(crate) name: String,
    pub(crate) ifindex: IfIndex,
    pub(crate) peer: IfIndex,
    /// `None`: the same namespace.
    pub(crate) peer_netns: Option<i32>,
    pub(crate) up: bool,
    /// Both ends are up, and the kernel has activated the link.
    pub(crate) running: bool,
    pub(crate) carrier_ups: u32,
    pub(crate) mtu: u32,
    pub(crate) arp: bool,
    pub(crate) mac: Option<MacAddr>,
    pub(crate) alias: Option<String>,
    pub(crate) master: Option<IfIndex>,
    pub(crate) queue: Option<String>,
    pub(crate) veth: bool,
    /// veth or netkit.
    pub(crate) pair: bool,
    pub(crate) point_to_point: bool,
}

pub(crate) fn read(m: &LinkMessage) -> LinkSeen {
    let ifindex = IfIndex(m.header.index);
    let mut seen = LinkSeen {
        name: String::new(),
        ifindex,
        // Kernels before 5.8 omit it where it equals the link's index.
        peer: ifindex,
        peer_netns: None,
        up: m.header.flags.contains(LinkFlags::Up),
        running: false,
        carrier_ups: 0,
        mtu: 0,
        arp: !m.header.flags.contains(LinkFlags::Noarp),
        mac: None,
        alias: None,
        master: None,
        queue: None,
        veth: false,
        pair: false,
        point_to_point: m.header.flags.contains(LinkFlags::Pointopoint),
    };
    for attribute in &m.attributes {
        match attribute {
            LinkAttribute::IfName(name) => seen.name.clone_from(name),
            LinkAttribute::Link(peer) => seen.peer = IfIndex(*peer),
            LinkAttribute::LinkNetNsId(id) => seen.peer_netns = Some(*id),
            LinkAttribute::Mtu(mtu) => seen.mtu = *mtu,
            LinkAttribute::Address(mac) => seen.mac = mac.as_slice().try_into().ok().map(MacAddr),
            LinkAttribute::IfAlias(alias) => seen.alias = Some(alias.clone()),
            LinkAttribute::Controller(master) => seen.master = Some(IfIndex(*master)).filter(|m| m.0 != 0),
            LinkAttribute::Qdisc(kind) => seen.queue = Some(kind.clone()),
            LinkAttribute::CarrierUpCount(count) => seen.carrier_ups = *count,
            LinkAttribute::OperState(state) => seen.running = *state == State::Up,
            LinkAttribute::LinkInfo(infos) => {
                let is = |kind| infos.contains(&LinkInfo::Kind(kind));
                seen.veth = is(InfoKind::Veth);
                seen.pair = seen.veth || is(InfoKind::Netkit);
            }
            _ => {}
        }
    }
    seen
}

pub(crate) fn mark(id: EndpointId, epoch: Epoch, attachment: &Attachment) -> String {
    let Attachment { network, container_id, ifname } = attachment;
    Mark::new(id.get(), epoch.0, network.as_str(), container_id.as_str(), ifname.as_str()).to_string()
}

pub(crate) fn has_mark(alias: Option<&str>, id: EndpointId, epoch: Epoch) -> bool {
    let marked = |m: Mark| m.id == id.get() && m.epoch == epoch.0;
    has_short_mark(alias, id, epoch) || alias.and_then(Mark::parse).is_some_and(marked)
}

/// Older links have `wharf:ID:EPOCH`; connecting the endpoint updates them.
pub(crate) fn has_short_mark(alias: Option<&str>, id: EndpointId, epoch: Epoch) -> bool {
    alias.is_some_and(|alias| alias == format!("wharf:{id}:{epoch}"))
}

/// The longest mark leaves no room for a NUL.
fn alias_attribute(mark: String) -> LinkAttribute {
    LinkAttribute::Other(DefaultNla::new(libc::IFLA_IFALIAS, mark.into_bytes()))
}

pub(crate) fn set_mark(ifindex: IfIndex, mark: String) -> Request {
    set(LinkUnspec::new_with_index(ifindex.0).append_extra_attribute(alias_attribute(mark)).build())
}

pub(crate) fn get_by_name(name: &str) -> Request {
    let message = LinkUnspec::new_with_name(name)
        .append_extra_attribute(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]))
        .build();
    Request::new(RouteNetlinkMessage::GetLink(message), 0)
}

/// `index N` if the link is gone.
pub(crate) fn name_of(connection: &mut Connection, ifindex: IfIndex) -> Result<String> {
    Ok(look_up_index(connection, ifindex)?.map_or_else(|| format!("index {ifindex}"), |seen| seen.name))
}

pub(crate) fn look_up_index(connection: &mut Connection, ifindex: IfIndex) -> Result<Option<LinkSeen>> {
    let message = LinkUnspec::new_with_index(ifindex.0)
        .append_extra_attribute(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]))
        .build();
    found(connection.one(RouteNetlinkMessage::GetLink(message), 0)?, &format!("index {ifindex}"))
}

/// Links of the kinds that endpoints have.
pub(crate) fn pairs(connection: &mut Connection) -> Result<Vec<RouteNetlinkMessage>> {
    // Asked for an unknown kind, the kernel returns every link.
    let questions = match netns::has_netkit() {
        Ok(true) => vec![get_all(InfoKind::Veth), get_all(InfoKind::Netkit)],
        Ok(false) => vec![get_all(InfoKind::Veth)],
        Err(_) => vec![get_every()],
    };
    let mut pairs = Vec::new();
    for question in questions {
        pairs.extend(connection.dump(&question)?.map_err(|refusal| refusal.into_error("list links", "pairs"))?);
    }
    Ok(pairs)
}

pub(crate) fn get_all(kind: InfoKind) -> RouteNetlinkMessage {
    let message = LinkMessageBuilder::<LinkUnspec>::new_with_info_kind(kind)
        .append_extra_attribute(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]))
        .build();
    RouteNetlinkMessage::GetLink(message)
}

fn get_every() -> RouteNetlinkMessage {
    let mut message = LinkMessage::default();
    message.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
    RouteNetlinkMessage::GetLink(message)
}

pub(crate) fn found(answer: Answer, name: &str) -> Result<Option<LinkSeen>> {
    match answer {
        Ok(messages) => Ok(messages.iter().find_map(|m| match m {
            RouteNetlinkMessage::NewLink(m) => Some(read(m)),
            _ => None,
        })),
        Err(refusal) if refusal.is(libc::ENODEV) => Ok(None),
        Err(refusal) => Err(refusal.into_error("look up link", name)),
    }
}

pub(crate) fn look_up(connection: &mut Connection, name: &str) -> Result<Option<LinkSeen>> {
    let mut answers = connection.batch(vec![get_by_name(name)])?;
    match answers.pop() {
        Some(answer) => found(answer, name),
        None => Ok(None),
    }
}

/// Must be set before the link first comes up.
pub(crate) fn no_generated_addresses() -> LinkAttribute {
    LinkAttribute::AfSpecUnspec(vec![AfSpecUnspec::Inet6(vec![AfSpecInet6::AddrGenMode(In6AddrGenMode::None)])])
}

pub(crate) fn set(message: LinkMessage) -> Request {
    Request::new(RouteNetlinkMessage::SetLink(message), 0)
}

pub(crate) fn up(ifindex: IfIndex) -> Request {
    set(LinkUnspec::new_with_index(ifindex.0).up().build())
}

pub(crate) fn renew_host(ifindex: IfIndex, mac: MacAddr, mtu: u32) -> Request {
    set(LinkUnspec::new_with_index(ifindex.0).address(mac.0.to_vec()).mtu(mtu).arp(false).up().build())
}

pub(crate) fn release_from_master(ifindex: IfIndex) -> Request {
    set(LinkUnspec::new_with_index(ifindex.0).nocontroller().build())
}

pub(crate) fn set_mac(ifindex: IfIndex, mac: MacAddr) -> Request {
    set(LinkUnspec::new_with_index(ifindex.0).address(mac.0.to_vec()).build())
}

pub(crate) fn enable_arp(ifindex: IfIndex) -> Request {
    set(LinkUnspec::new_with_index(ifindex.0).arp(true).build())
}

pub(crate) fn set_mtu(ifindex: IfIndex, mtu: u32) -> Request {
    set(LinkUnspec::new_with_index(ifindex.0).mtu(mtu).build())
}

pub(crate) fn delete(ifindex: IfIndex) -> Request {
    Request::new(RouteNetlinkMessage::DelLink(LinkUnspec::new_with_index(ifindex.0).build()), 0)
}

fn describe(spec: &LinkSpec) -> String {
    format!("{} (endpoint {}, epoch {})", spec.host_ifname, spec.id, spec.epoch)
}

/// The peer comes with its own name, address and MTU.
fn create(device: DeviceMode, name: &str, mac: MacAddr, mtu: u32, peer: LinkMessage) -> Request {
    let (kind, data) = match device {
        DeviceMode::Veth => (InfoKind::Veth, InfoData::Veth(InfoVeth::Peer(peer))),
        DeviceMode::Netkit => {
            (InfoKind::Netkit, InfoData::Netkit(vec![InfoNetkit::Mode(NetkitMode::L2), InfoNetkit::Peer(peer)]))
        }
    };
    let message = LinkMessageBuilder::<LinkUnspec>::new_with_info_kind(kind)
        .name(name)
        .address(mac.0.to_vec())
        .mtu(mtu)
        // The programs answer the container's ARP and replace the node's link-layer address.
        .arp(false)
        .set_info_data(data)
        .build();
    Request::new(RouteNetlinkMessage::NewLink(message), NLM_F_CREATE | NLM_F_EXCL)
}

/// A pair as endpoints have it, for a namespace without links.
pub(crate) fn netkit_probe() -> Request {
    let mac = |last| MacAddr([2, 0, 0, 0, 0, last]);
    let peer = LinkUnspec::new_with_name("probe1").address(mac(1).0.to_vec()).mtu(MIN_MTU).build();
    create(DeviceMode::Netkit, "probe0", mac(0), MIN_MTU, peer)
}

fn create_batch(spec: &LinkSpec, device: DeviceMode, netns: &impl AsFd) -> Vec<Request> {
    let peer = LinkUnspec::new_with_name(spec.ifname.as_str())
        .address(spec.container_mac.0.to_vec())
        .mtu(spec.mtu)
        .setns_by_fd(netns.as_fd().as_raw_fd())
        .build();
    let host = spec.host_ifname.as_str();
    let name_owner = LinkUnspec::new_with_name(host)
        .append_extra_attribute(alias_attribute(mark(spec.id, spec.epoch, &spec.attachment)))
        .append_extra_attribute(no_generated_addresses())
        .build();
    vec![create(device, host, spec.host_mac, spec.mtu, peer), set(name_owner), get_by_name(host)]
}

pub(crate) fn ensure_link(thread: &NetnsThread, spec: &LinkSpec, device: DeviceMode) -> Result<Link> {
    let netns = thread.open(OPERATION, &spec.netns)?;
    let mut host = Connection::open()?;
    // The second attempt follows the removal of a left-over link.
    for last in [false, true] {
        crash::point("datapath/link/before-create");
        let mut answers = host.batch(create_batch(spec, device, &netns))?.into_iter();
        let (Some(created), Some(owned), Some(got)) = (answers.next(), answers.next(), answers.next()) else {
            return Err(fail(
                OPERATION,
                describe(spec),
                KernelErrorKind::Other,
                "the kernel left a request unanswered",
            ));
        };
        crash::point("datapath/link/after-create");
        let there = found(got, spec.host_ifname.as_str())?;
        match (created, there) {
            (Ok(_), Some(link)) => {
                if let Err(refusal) = owned
                    && !no_ipv6(&refusal)
                {
                    host.batch(vec![delete(link.ifindex)])?;
                    return Err(refusal.into_error("configure link", describe(spec)));
                }
                return Ok(Link { host_ifindex: link.ifindex, container_ifindex: link.peer });
            }
            (Ok(_), None) => {
                let cause = "the pair went away as soon as it was made; is the container ending?";
                return Err(fail(OPERATION, describe(spec), KernelErrorKind::NotFound, cause));
            }
            (Err(refusal), Some(link)) if refusal.is(libc::EEXIST) => {
                if let Some(same) = same_pair(thread, spec, &link)? {
                    crash::point("datapath/link/before-mark");
                    ensure_mark(&mut host, spec, &link)?;
                    return Ok(same);
                }
                if !link.pair || last {
                    let cause = format!(
                        "an interface of that name is there already (index {}, alias {:?}) and is not this endpoint's",
                        link.ifindex, link.alias
                    );
                    return Err(fail(OPERATION, describe(spec), KernelErrorKind::Conflict, cause));
                }
                if let Some(Err(refusal)) = host.batch(vec![delete(link.ifindex)])?.pop()
                    && !refusal.is(libc::ENODEV)
                {
                    return Err(refusal.into_error("remove left-over link", describe(spec)));
                }
                crash::point("datapath/link/after-left-over");
            }
            (Err(refusal), None) if refusal.is(libc::EEXIST) => {
                let cause = format!("the container already has an interface {}; choose another name", spec.ifname);
                return Err(fail(OPERATION, describe(spec), KernelErrorKind::Exists, cause));
            }
            (Err(refusal), _) => return Err(refusal.into_error(OPERATION, describe(spec))),
        }
    }
    Err(fail(OPERATION, describe(spec), KernelErrorKind::Conflict, "an interface of that name keeps coming back"))
}

/// The kernel has no IPv6: not built, or `ipv6.disable=1`.
fn no_ipv6(refusal: &super::Refusal) -> bool {
    refusal.is(libc::EAFNOSUPPORT)
}

fn same_pair(thread: &NetnsThread, spec: &LinkSpec, link: &LinkSeen) -> Result<Option<Link>> {
    let marked = link.alias == Some(mark(spec.id, spec.epoch, &spec.attachment));
    let ours = marked || has_short_mark(link.alias.as_deref(), spec.id, spec.epoch);
    if !link.pair || !ours || link.mac != Some(spec.host_mac) || link.mtu != spec.mtu {
        return Ok(None);
    }
    let mut inside = thread.connect(OPERATION, &spec.netns)?;
    let same = look_up(&mut inside, spec.ifname.as_str())?
        .is_some_and(|i| i.ifindex == link.peer && i.mac == Some(spec.container_mac) && i.mtu == spec.mtu);
    Ok(same.then_some(Link { host_ifindex: link.ifindex, container_ifindex: link.peer }))
}

fn ensure_mark(host: &mut Connection, spec: &LinkSpec, link: &LinkSeen) -> Result<()> {
    let mark = mark(spec.id, spec.epoch, &spec.attachment);
    if link.alias.as_ref() == Some(&mark) {
        return Ok(());
    }
    match host.batch(vec![set_mark(link.ifindex, mark)])?.pop() {
        Some(Err(refusal)) => Err(refusal.into_error("configure link", describe(spec))),
        _ => Ok(()),
    }
}
