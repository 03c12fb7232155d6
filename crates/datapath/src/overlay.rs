//! The overlay's device: one VXLAN interface for all nodes and both families (docs/design/datapath.md, "Overlay").
//! Routes have the tunnel's ends (`peers`); the filter (`bpf::overlay`) judges what arrives.

use std::{
    hash::{BuildHasher as _, Hasher as _, RandomState},
    net::IpAddr,
    path::Path,
};

use rtnetlink::{
    LinkMessageBuilder, LinkUnspec, LinkVxlan,
    packet_core::{NLM_F_CREATE, NLM_F_EXCL},
    packet_route::{
        RouteNetlinkMessage,
        link::{InfoData, InfoKind, InfoVxlan, LinkAttribute, LinkInfo, LinkMessage},
    },
};
use wharf_core::{
    finding::NodeProblem,
    ids::{IfIndex, MacAddr},
    kernel::{KernelError, KernelErrorKind, NodeSpec, OverlaySpec, Result},
};
use wharf_crash as crash;

use crate::{
    OVERLAY_IFNAME,
    bpf::Bpf,
    error::fail,
    netlink::{
        Connection, address,
        link::{self, LinkSeen},
    },
};

const OPERATION: &str = "set up overlay";
/// No endpoint's mark has this form.
const MARK: &str = "wharf:overlay";
const MODULE: &str = "/sys/module/vxlan";

struct Device {
    seen: LinkSeen,
    /// `None` for another kind.
    port: Option<u16>,
    external: bool,
}

struct Found {
    named: Option<Device>,
    renamed: Option<Device>,
}

impl Found {
    /// Lists all VXLAN interfaces only if the name does not lead to the mark.
    fn look(connection: &mut Connection) -> Result<Self> {
        let named = Device::by_name(connection)?;
        if named.as_ref().is_some_and(Device::is_marked) {
            return Ok(Self { named, renamed: None });
        }
        Ok(Self { named, renamed: Device::by_mark(connection)? })
    }

    fn ours(self) -> Option<Device> {
        self.renamed.or(self.named.filter(Device::is_ours))
    }
}

impl Device {
    fn by_mark(connection: &mut Connection) -> Result<Option<Self>> {
        // Without the module, the kernel would list every link.
        if !Path::new(MODULE).exists() {
            return Ok(None);
        }
        let all = connection.dump(&link::get_all(InfoKind::Vxlan))?.map_err(|r| r.into_error("list links", "vxlan"))?;
        let mut devices = all.iter().filter_map(|m| match m {
            RouteNetlinkMessage::NewLink(m) => Some(Self::read(m)),
            _ => None,
        });
        Ok(devices.find(Self::is_marked))
    }

    fn by_name(connection: &mut Connection) -> Result<Option<Self>> {
        let mut answers = connection.batch(vec![link::get_by_name(OVERLAY_IFNAME)])?;
        match answers.pop() {
            Some(Ok(messages)) => Ok(messages.iter().find_map(|m| match m {
                RouteNetlinkMessage::NewLink(m) => Some(Self::read(m)),
                _ => None,
            })),
            Some(Err(refusal)) if !refusal.is(libc::ENODEV) => Err(refusal.into_error("look up link", OVERLAY_IFNAME)),
            _ => Ok(None),
        }
    }

    fn read(message: &LinkMessage) -> Self {
        let mut device = Self { seen: link::read(message), port: None, external: false };
        let infos =
            message.attributes.iter().filter_map(|a| if let LinkAttribute::LinkInfo(i) = a { Some(i) } else { None });
        for info in infos.flatten() {
            let LinkInfo::Data(InfoData::Vxlan(settings)) = info else { continue };
            for setting in settings {
                match setting {
                    InfoVxlan::Port(port) => device.port = Some(*port),
                    InfoVxlan::CollectMetadata(external) => device.external = *external,
                    _ => {}
                }
            }
        }
        device
    }

    fn is_marked(&self) -> bool {
        self.port.is_some() && self.seen.alias.as_deref() == Some(MARK)
    }

    /// By its mark, or an unmarked device that is down: an interrupted creation.
    fn is_ours(&self) -> bool {
        let is_made_here = self.seen.mac.is_some_and(|mac| mac.0.starts_with(&MAC_PREFIX));
        let is_unfinished = self.external && is_made_here && !self.seen.up && self.seen.alias.is_none();
        self.is_marked() || self.port.is_some() && is_unfinished
    }

    fn fits(&self, spec: &OverlaySpec) -> bool {
        self.external && self.port == Some(spec.port) && self.is_marked()
    }
}

/// Without a specification, removes the device. An error leaves a device that was never up down or absent, unless only
/// an address is refused.
pub(crate) fn ensure(connection: &mut Connection, bpf: &Bpf, node: &NodeSpec) -> Result<Option<IfIndex>> {
    let Found { named, renamed } = Found::look(connection)?;
    let Some(spec) = &node.overlay else {
        for device in named.into_iter().chain(renamed).filter(Device::is_ours) {
            remove(connection, device.seen.ifindex)?;
        }
        bpf.forget_overlay();
        return Ok(None);
    };
    bpf.ensure_overlay(spec)?;
    let kept = match (named, renamed) {
        (Some(device), _) if !device.is_ours() => {
            let cause = "an interface of that name is there and is not Wharf's; rename or remove it";
            return Err(fail(OPERATION, OVERLAY_IFNAME, KernelErrorKind::Conflict, cause));
        }
        (unfinished, Some(device)) => {
            if let Some(unfinished) = unfinished {
                remove(connection, unfinished.seen.ifindex)?;
            }
            let is_back = device.fits(spec) && rename_back(connection, &device)?;
            if !is_back {
                remove(connection, device.seen.ifindex)?;
            }
            Some(device).filter(|_| is_back)
        }
        (Some(device), None) if !device.fits(spec) => {
            remove(connection, device.seen.ifindex)?;
            None
        }
        (found, None) => found,
    };
    let device = match kept {
        Some(device) => device,
        None => create(connection, spec)?,
    };
    let ifindex = device.seen.ifindex;
    if device.seen.mtu != spec.mtu || device.seen.arp {
        let settings = LinkUnspec::new_with_index(ifindex.0).mtu(spec.mtu).arp(false).build();
        run(connection, vec![link::set(settings)])?;
        crash::point("datapath/overlay/after-settings");
    }
    if let Err(e) = bpf.attach_overlay(connection, ifindex) {
        // No frame passes unjudged.
        run(connection, vec![link::set(LinkUnspec::new_with_index(ifindex.0).down().build())])?;
        return Err(e);
    }
    crash::point("datapath/overlay/after-filter");
    if !device.seen.up {
        up(connection, ifindex, spec)?;
        crash::point("datapath/overlay/after-up");
    }
    ensure_addresses(connection, ifindex, &node.routers())?;
    Ok(Some(ifindex))
}

/// False if the kernel renames only links that are down (before 6.2); the routes would be lost.
fn rename_back(connection: &mut Connection, device: &Device) -> Result<bool> {
    let LinkSeen { name, ifindex, .. } = &device.seen;
    tracing::warn!(from = name, to = OVERLAY_IFNAME, "the overlay's interface was renamed; renaming it back");
    let rename = link::set(LinkUnspec::new_with_index(ifindex.0).name(OVERLAY_IFNAME.to_owned()).build());
    match connection.batch(vec![rename])?.pop() {
        Some(Err(refusal)) if refusal.is(libc::EBUSY) => Ok(false),
        Some(Err(refusal)) => Err(refusal.into_error("rename link", format!("{OVERLAY_IFNAME} (now {name})"))),
        _ => Ok(true),
    }
}

/// Without IPv6 on the device, [`observe`] reports the missing address.
fn ensure_addresses(connection: &mut Connection, ifindex: IfIndex, routers: &[IpAddr]) -> Result<()> {
    let (old, new) = address::difference(&address::list(connection, ifindex)?, routers);
    let removals = old.iter().map(|a| address::remove(ifindex, *a));
    let requests = removals.chain(new.iter().map(|a| address::add_again(ifindex, *a))).collect();
    for (answer, address) in connection.batch(requests)?.into_iter().zip(old.iter().chain(&new)) {
        let Err(refusal) = answer else { continue };
        let is_done = refusal.is(libc::EADDRNOTAVAIL) || refusal.is(libc::EEXIST);
        let lacks_ipv6 = [libc::EACCES, libc::EAFNOSUPPORT, libc::EOPNOTSUPP].into_iter().any(|e| refusal.is(e));
        if !(is_done || address.is_ipv6() && lacks_ipv6) {
            return Err(refusal.into_error(OPERATION, format!("address {address} on {OVERLAY_IFNAME}")));
        }
    }
    if !(old.is_empty() && new.is_empty()) {
        crash::point("datapath/overlay/after-addresses");
    }
    Ok(())
}

fn create(connection: &mut Connection, spec: &OverlaySpec) -> Result<Device> {
    let create = LinkMessageBuilder::<LinkVxlan>::new(OVERLAY_IFNAME)
        .append_info_data(InfoVxlan::CollectMetadata(true))
        .append_info_data(InfoVxlan::Learning(false))
        .port(spec.port)
        .mtu(spec.mtu)
        .arp(false)
        .address(random_mac().0.to_vec())
        .build();
    if let Err(refusal) = connection.one(RouteNetlinkMessage::NewLink(create), NLM_F_CREATE | NLM_F_EXCL)? {
        let (lacks_vxlan, is_taken) = (refusal.is(libc::EOPNOTSUPP), refusal.is(libc::EEXIST));
        let told = refusal.into_error(OPERATION, OVERLAY_IFNAME);
        if is_taken {
            return Err(taken(spec.port));
        }
        if lacks_vxlan {
            let cause =
                "the kernel has no VXLAN (CONFIG_VXLAN; `modprobe vxlan`); without it, use --routing native".to_owned();
            return Err(KernelError { kind: KernelErrorKind::Unsupported, cause, ..told });
        }
        return Err(told);
    }
    crash::point("datapath/overlay/after-device");
    let Some(device) = Device::by_name(connection)? else {
        return Err(fail(OPERATION, OVERLAY_IFNAME, KernelErrorKind::NotFound, "it went away as soon as it was made"));
    };
    let ifindex = device.seen.ifindex;
    let addresses =
        LinkUnspec::new_with_index(ifindex.0).append_extra_attribute(link::no_generated_addresses()).build();
    let steps = vec![link::set(addresses), link::set_mark(ifindex, MARK.to_owned())];
    for answer in connection.batch(steps)? {
        match answer {
            // Without IPv6.
            Err(refusal) if !refusal.is(libc::EAFNOSUPPORT) => {
                return Err(refusal.into_error(OPERATION, OVERLAY_IFNAME));
            }
            _ => {}
        }
    }
    crash::point("datapath/overlay/after-mark");
    Ok(device)
}

fn taken(port: u16) -> KernelError {
    let cause = format!(
        "UDP port {port} is in use by another program or VXLAN interface; free it, or use another port on all nodes \
         (--overlay-port)"
    );
    fail(OPERATION, OVERLAY_IFNAME, KernelErrorKind::Conflict, cause)
}

/// Of an interface that is not marked yet: locally administered.
const MAC_PREFIX: [u8; 2] = [0x0a, 0x57];

/// Unique, because a node drops frames with its own address as source. The address that udev derives from the machine's
/// id is the same on clones.
fn random_mac() -> MacAddr {
    let [a, b, c, d, ..] = RandomState::new().build_hasher().finish().to_be_bytes();
    let [first, second] = MAC_PREFIX;
    MacAddr([first, second, a, b, c, d])
}

fn up(connection: &mut Connection, ifindex: IfIndex, spec: &OverlaySpec) -> Result<()> {
    match connection.batch(vec![link::up(ifindex)])?.pop() {
        Some(Err(refusal)) if refusal.is(libc::EADDRINUSE) => Err(taken(spec.port)),
        Some(Err(refusal)) => Err(refusal.into_error(OPERATION, OVERLAY_IFNAME)),
        _ => Ok(()),
    }
}

fn run(connection: &mut Connection, steps: Vec<crate::netlink::Request>) -> Result<()> {
    for answer in connection.batch(steps)? {
        answer.map_err(|refusal| refusal.into_error(OPERATION, OVERLAY_IFNAME))?;
    }
    Ok(())
}

/// Succeeds when already gone.
pub(crate) fn remove(connection: &mut Connection, ifindex: IfIndex) -> Result<()> {
    match connection.batch(vec![link::delete(ifindex)])?.pop() {
        Some(Err(refusal)) if !refusal.is(libc::ENODEV) => {
            return Err(refusal.into_error("remove overlay", OVERLAY_IFNAME));
        }
        _ => {}
    }
    crash::point("datapath/overlay/after-removal");
    Ok(())
}

pub(crate) fn ours(connection: &mut Connection) -> Result<Option<IfIndex>> {
    Ok(Found::look(connection)?.ours().map(|device| device.seen.ifindex))
}

/// A foreign interface of that name is a problem only if the overlay is needed.
pub(crate) fn observe(connection: &mut Connection, bpf: &Bpf, node: &NodeSpec) -> Result<Vec<NodeProblem>> {
    let problem = |cause: String| vec![NodeProblem::Overlay { cause, repairable: true }];
    let found = Found::look(connection)?;
    let Some(spec) = &node.overlay else {
        let left = found.ours().map(|device| problem(format!("no route uses it, but {} is there", device.seen.name)));
        return Ok(left.unwrap_or_default());
    };
    // After a failed set-up, the finding is not repairable: a repair would fail as well.
    let failure = bpf.overlay_failure();
    let after_failure = |what: &str| {
        let why = failure.as_ref().map_or_else(String::new, |why| format!(": {why}"));
        NodeProblem::Overlay { cause: format!("{what}{why}"), repairable: failure.is_none() }
    };
    if found.named.as_ref().is_some_and(|device| !device.is_ours()) {
        let cause = format!("an interface named {OVERLAY_IFNAME} is there and is not Wharf's; rename or remove it");
        return Ok(vec![NodeProblem::Overlay { cause, repairable: false }]);
    }
    let Some(device) = found.ours() else {
        return Ok(vec![after_failure(&format!("expected the interface {OVERLAY_IFNAME}, it is not there"))]);
    };
    let mut wrong = Vec::new();
    if device.seen.name != OVERLAY_IFNAME {
        wrong.extend(problem(format!("{OVERLAY_IFNAME} was renamed to {}", device.seen.name)));
    }
    if !device.fits(spec) {
        let port = device.port.unwrap_or_default();
        wrong.extend(problem(format!(
            "{OVERLAY_IFNAME} has port {port} or other settings, expected port {}",
            spec.port
        )));
    }
    if !device.seen.up {
        wrong.push(after_failure(&format!("{OVERLAY_IFNAME} is down")));
    }
    if device.seen.mtu != spec.mtu {
        wrong.push(NodeProblem::LinkMtu {
            name: OVERLAY_IFNAME.to_owned(),
            expected: spec.mtu,
            found: device.seen.mtu,
        });
    }
    wrong.extend(node.overlay_mtu_problem());
    let of_filter = bpf.overlay_problem(connection, spec, device.seen.ifindex)?;
    wrong.extend(of_filter.map(|cause| NodeProblem::Overlay { cause: cause.to_owned(), repairable: true }));
    let there = address::list(connection, device.seen.ifindex)?;
    wrong.extend(address::problems(&there, &node.routers(), OVERLAY_IFNAME));
    Ok(wrong)
}
