//! A problem in words.

use std::{fmt, net::IpAddr};

use super::{EndpointProblem, Kept, Lookup, NodeProblem, Problem, RouteSeen, Side, Stray};
use crate::{ids::EndpointId, kernel::AttachMode, nat::NatEntry, overlap::Overlap};

const MISSING: &str = "expected, is not there";

impl Problem {
    /// Kind of object, for example `link`, `address` or `lease`.
    #[must_use]
    pub const fn object(&self) -> &'static str {
        match self {
            Self::Endpoint(_, problem) => problem.object(),
            Self::Node(_) => "node",
            Self::Stray(stray) => match stray {
                Stray::Link { .. } | Stray::MarkedLink { .. } => "link",
                Stray::ForeignPin { .. } | Stray::Pins { .. } => "pin",
                Stray::Row { .. } => "endpoint-row",
                Stray::CallSlot { .. } => "call-slot",
                Stray::Nat { entry } => entry.kind(),
                Stray::Route { .. } => "route",
                Stray::Lease { .. } | Stray::NodeLease { .. } | Stray::UnstoredLease { .. } => "lease",
                Stray::Intent { .. } | Stray::Delete { .. } => "intent",
            },
            Self::Kept(kept) => match kept {
                Kept::LeaseMissing { .. } | Kept::LeaseHeld { .. } | Kept::LeaseOutside { .. } => "lease",
                Kept::SharedAddress { .. } | Kept::RecordMissing { .. } => "endpoint",
                Kept::RestLeased { .. } | Kept::RestOutside { .. } => "rest",
                Kept::RecordAside { .. } | Kept::RecordUnreadable { .. } => "record",
                Kept::QueueFile { .. } | Kept::QueueAside { .. } | Kept::QueuedDelete { .. } | Kept::Queue { .. } => {
                    "queue-file"
                }
            },
        }
    }

    #[must_use]
    pub fn subject(&self) -> String {
        match self {
            Self::Endpoint(id, problem) => problem.subject(*id),
            Self::Node(problem) => problem.subject(),
            Self::Stray(stray) => stray.subject(),
            Self::Kept(kept) => kept.subject(),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Endpoint(_, problem) => problem.fmt(f),
            Self::Node(problem) => problem.fmt(f),
            Self::Stray(stray) => stray.fmt(f),
            Self::Kept(kept) => kept.fmt(f),
        }
    }
}

impl EndpointProblem {
    /// As [`Problem::object`].
    #[must_use]
    pub const fn object(&self) -> &'static str {
        match self {
            Self::Netns { .. } => "netns",
            Self::LinkMissing { .. }
            | Self::LinkDeleted { .. }
            | Self::LinkRenamed { .. }
            | Self::LinkReplaced { .. }
            | Self::LinkDown { .. }
            | Self::LinkMac { .. }
            | Self::LinkArp { .. }
            | Self::LinkEnslaved { .. }
            | Self::LinkQueue { .. }
            | Self::PluginLink { .. }
            | Self::LinkAlias { .. } => "link",
            Self::LinkMtu { .. } => "mtu",
            Self::Address { .. } => "address",
            Self::NodeRoute { .. } | Self::NodeRouteShadowed { .. } | Self::ContainerRoute { .. } => "route",
            Self::ContainerRule { .. } => "rule",
            Self::Program { .. } | Self::Sink { .. } | Self::StrayFilter { .. } => "program",
            Self::StrayLink { .. } | Self::PinMissing { .. } | Self::PinsMissing | Self::PinStale { .. } => "pin",
            Self::MapUnused { .. } | Self::MapUnreadable { .. } | Self::Config { .. } => "map",
            Self::Row { .. } => "endpoint-row",
            Self::CallSlot { .. } => "call-slot",
            Self::Nat { entry } => entry.kind(),
        }
    }

    fn subject(&self, id: EndpointId) -> String {
        match self {
            Self::Netns { path, .. } | Self::StrayLink { path } => path.clone(),
            Self::LinkMissing { name, .. }
            | Self::LinkDeleted { name }
            | Self::LinkRenamed { name, .. }
            | Self::LinkReplaced { name, .. }
            | Self::LinkDown { name, .. }
            | Self::LinkMac { name, .. }
            | Self::LinkMtu { name, .. }
            | Self::LinkArp { name, .. }
            | Self::LinkEnslaved { name, .. }
            | Self::LinkQueue { name, .. }
            | Self::PluginLink { name, .. }
            | Self::LinkAlias { name, .. } => name.clone(),
            Self::Address { address, .. } | Self::Row { address, .. } => address.to_string(),
            Self::NodeRoute { to, .. } | Self::NodeRouteShadowed { to, .. } | Self::ContainerRoute { to, .. } => {
                to.to_string()
            }
            Self::ContainerRule { from, .. } => format!("from {from}"),
            Self::Program { program, .. } | Self::Sink { program, .. } | Self::StrayFilter { program, .. } => {
                program.clone()
            }
            Self::PinMissing { name } | Self::PinStale { name, .. } => format!("endpoints/{id}/{name}"),
            Self::PinsMissing => format!("endpoints/{id}"),
            Self::MapUnused { map, .. } | Self::MapUnreadable { map, .. } => format!("{id}/{map}"),
            Self::Config { field, .. } => format!("{id}/CONFIG {field}"),
            Self::CallSlot { .. } => id.to_string(),
            Self::Nat { entry } => nat_entry(entry),
        }
    }
}

impl fmt::Display for EndpointProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Netns { cause, .. } | Self::MapUnreadable { cause, .. } => f.write_str(cause),
            Self::LinkMissing { side: Side::Node, .. } => f.write_str("expected on the node, is not there"),
            Self::LinkMissing { side: Side::Container, .. } => {
                f.write_str("expected in the container, is not there; was it moved to another network namespace?")
            }
            Self::LinkDeleted { .. } => {
                f.write_str("the container's interface is gone, and with it the host side: somebody deleted it")
            }
            Self::LinkRenamed { side: Side::Node, found, .. } => write!(f, "was renamed on the node to {found}"),
            Self::LinkRenamed { side: Side::Container, found, .. } => {
                write!(f, "was renamed in the container to {found}")
            }
            Self::LinkReplaced { side, expected, found, .. } => {
                write!(f, "{}: expected index {expected}, found {found}; it is another interface", place(*side))
            }
            Self::LinkDown { side, .. } => write!(f, "{}: expected up, is down", place(*side)),
            Self::LinkMac { side, expected, found, .. } => {
                write!(f, "{}: MAC: expected {expected}, found {}", place(*side), or_none(found.as_ref()))
            }
            Self::LinkMtu { side, expected, found, .. } => {
                write!(f, "{}: expected {expected}, found {found}", place(*side))
            }
            Self::LinkArp { side: Side::Node, .. } => {
                f.write_str("ARP: expected off, is on; nobody answers what the node asks there")
            }
            Self::LinkArp { side: Side::Container, .. } => {
                f.write_str("in the container: ARP: expected on, is off; the container resolves no neighbour")
            }
            Self::LinkEnslaved { master, .. } => write!(
                f,
                "on the node: is a port of interface {master} (a bridge, bond or VRF), which receives the container's \
                 packets to the node in its place"
            ),
            Self::PluginLink { side, what, .. } => write!(f, "{}: {what}; another plugin made the link", place(*side)),
            Self::LinkQueue { kind, .. } => write!(
                f,
                "on the node: has a queue {kind} that limits its rate; what other containers of the node send passes it by"
            ),
            Self::LinkAlias { expected, found, .. } => {
                write!(f, "alias: expected {expected}, found {}", or_none(found.as_ref()))
            }
            Self::Address { found: None, .. } => f.write_str("expected in the container, is not there"),
            Self::Address { address, found: Some(length) } => {
                write!(f, "expected prefix length {} in the container, found {length}", single(*address))
            }
            Self::NodeRoute { expected, found, .. } => match found {
                None => write!(f, "expected on the node by interface {expected}, is not there"),
                Some(RouteSeen::OtherSource { expected, found }) => {
                    write!(f, "expected with the source {expected}, found {}", or_none(found.as_ref()))
                }
                Some(RouteSeen::Ours(is)) => write!(f, "expected by interface {expected}, {}", goes(is.as_deref())),
                Some(RouteSeen::Foreign(is)) => write!(
                    f,
                    "expected by interface {expected}; a route that is not Wharf's is in its place and {}",
                    goes(is.as_deref())
                ),
            },
            Self::NodeRouteShadowed { expected, found: Some(found), .. } => {
                write!(f, "expected by interface {expected}, but the node's look-up finds {found}")
            }
            Self::NodeRouteShadowed { expected, found: None, .. } => write!(
                f,
                "expected by interface {expected}, but the node's look-up is refused: a rule or route that leads nowhere \
                 comes first"
            ),
            Self::ContainerRoute { gateway, table: None, .. } => {
                write!(f, "expected in the container (by {gateway}), is not there")
            }
            Self::ContainerRoute { gateway, table: Some(table), .. } => {
                write!(f, "expected in the container's table {table} (by {gateway}), is not there")
            }
            Self::ContainerRule { table, .. } => {
                write!(f, "expected a rule in the container that looks in table {table}, is not there")
            }
            Self::Program { ifname, mode, expected, found, .. } => match (mode, found.as_slice()) {
                (AttachMode::Clsact, []) => write!(
                    f,
                    "expected program id {expected} in a filter on {ifname}, found none of ours (was it removed, or its \
                     clsact qdisc?)"
                ),
                (AttachMode::Clsact, [is, ..]) => {
                    write!(f, "expected program id {expected} in a filter on {ifname}, found program id {is}")
                }
                (AttachMode::Tcx, is) => write!(f, "expected program id {expected} on {ifname}, found {is:?}"),
            },
            Self::Sink { id, .. } => write!(f, "the sink (program id {id}) still drops everything"),
            Self::StrayFilter { id, .. } => {
                write!(f, "a clsact filter with program id {id} is left, the mode is tcx")
            }
            Self::StrayLink { .. } => f.write_str("a tcx link is left, the mode is clsact"),
            Self::PinMissing { .. } => f.write_str(MISSING),
            Self::PinsMissing => f.write_str("expected programs and maps, there are none"),
            Self::PinStale { expected, found, .. } => {
                write!(f, "expected program id {expected} behind it, found {found}")
            }
            Self::MapUnused { pinned, used, .. } => {
                write!(f, "pinned is map id {pinned}, the endpoint's programs use {used:?}")
            }
            Self::Config { expected, found, .. } => write!(f, "expected {expected}, found {found}"),
            Self::Row { found: None, .. } => {
                f.write_str("expected, is not there: other endpoints cannot reach this one at this address")
            }
            Self::Row { found: Some(differences), .. } => write!(f, "differs from the record: {differences}"),
            Self::CallSlot { found: None, .. } => {
                f.write_str("expected a program, is empty: other endpoints cannot reach this one")
            }
            Self::CallSlot { expected, found: Some(found) } => {
                write!(f, "expected program id {}, found {found}", or_none(expected.as_ref()))
            }
            Self::Nat { entry } => {
                let effect = match entry {
                    NatEntry::Port(_) => "nobody reaches this port",
                    NatEntry::Own(_) => {
                        "its traffic is masqueraded, though its network has \"ipMasq\": false or an IPAM of its own"
                    }
                };
                write!(f, "expected in the table inet wharf, is not there: {effect}")
            }
        }
    }
}

impl fmt::Display for Lookup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in table {} first", self.destination, self.table)?;
        if let Some(gateway) = self.gateway {
            write!(f, ", via {gateway}")?;
        }
        self.ifname.as_ref().map_or(Ok(()), |ifname| write!(f, ", by interface {ifname}"))
    }
}

impl NodeProblem {
    fn subject(&self) -> String {
        match self {
            Self::LinkMissing { name }
            | Self::LinkRenamed { name, .. }
            | Self::LinkForeign { name }
            | Self::LinkDown { name } => format!("link {name}"),
            Self::LinkMtu { name, .. } => format!("mtu {name}"),
            Self::Address { address, .. } => format!("address {address}"),
            Self::PoolRoute { cidr, .. } => format!("route {cidr}"),
            Self::PeerRoute { to, .. } => format!("route {to}"),
            Self::PeerUnreachable { to, .. } => format!("unreachable route {to}"),
            Self::Overlay { .. } => "overlay".to_owned(),
            Self::PoolOverlap(overlap) => format!("pool {}", overlap.cidr),
            Self::Outbound { what, .. } => what.clone(),
            Self::Setting { name, .. } => format!("setting {name}"),
            Self::Bpffs { path, .. } => format!("bpffs {path}"),
            Self::PinMissing { path } | Self::Pin { path, .. } => format!("pin {path}"),
        }
    }
}

impl fmt::Display for NodeProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LinkMissing { .. } => f.write_str("expected on the node, is not there"),
            Self::LinkRenamed { found, .. } => write!(f, "was renamed to {found}"),
            Self::LinkForeign { .. } => f.write_str("expected Wharf's own veth, found another interface of that name"),
            Self::LinkDown { .. } => f.write_str("expected up, is down"),
            Self::LinkMtu { expected, found, .. } => write!(f, "expected {expected}, found {found}"),
            Self::Address { ifname, found: None, .. } => write!(f, "expected on {ifname}, is not there"),
            Self::Address { address, ifname, found: Some(length) } => {
                write!(f, "expected prefix length {} on {ifname}, found {length}", single(*address))
            }
            Self::PoolRoute { found: None, .. } => f.write_str(
                "expected unreachable, is not there: traffic to addresses of the pool that no endpoint has leaves the node",
            ),
            Self::PoolRoute { found: Some(is), .. } => write!(f, "expected unreachable, goes to interface {is}"),
            Self::PeerRoute { expected: Some(via), found: None, .. } => {
                write!(f, "expected {via}, is not there: containers of that node are not reached")
            }
            Self::PeerRoute { expected: Some(via), found: Some(is), .. } if via == is => {
                write!(f, "expected {via}, has another source address, MTU or network identifier")
            }
            Self::PeerRoute { expected: Some(via), found: Some(is), .. } => write!(f, "expected {via}, goes {is}"),
            Self::PeerUnreachable { expected: true, .. } => f.write_str(
                "expected, is not there: without the route to these containers, packets to them take the node's other routes",
            ),
            Self::PeerRoute { expected: None, .. } | Self::PeerUnreachable { expected: false, .. } => {
                f.write_str("no node of the cluster has these containers")
            }
            Self::PoolOverlap(Overlap { network, .. }) => {
                write!(f, "overlaps {network}: addresses that both have are given to no container")
            }
            Self::PinMissing { .. } => f.write_str(MISSING),
            Self::Setting { expected, found, .. } => write!(f, "expected {expected}, is {found}"),
            Self::Bpffs { cause, .. }
            | Self::Pin { cause, .. }
            | Self::Outbound { cause, .. }
            | Self::Overlay { cause, .. } => f.write_str(cause),
        }
    }
}

impl Stray {
    fn subject(&self) -> String {
        match self {
            Self::Link { name, ifindex, .. } | Self::MarkedLink { name, ifindex } => {
                format!("{name} (ifindex {ifindex})")
            }
            Self::ForeignPin { path } => path.clone(),
            Self::Pins { id, .. } => format!("endpoints/{id}"),
            Self::Row { address, endpoint_id, epoch } => format!("{address} (endpoint {endpoint_id}, epoch {epoch})"),
            Self::CallSlot { slot } => slot.to_string(),
            Self::Nat { entry } => nat_entry(entry),
            Self::Route { to, ifindex, .. } => {
                let through = ifindex.map_or_else(|| "unreachable".to_owned(), |i| format!("dev ifindex {i}"));
                format!("{to} ({through})")
            }
            Self::Lease { ip } | Self::NodeLease { ip } | Self::UnstoredLease { ip, .. } => ip.to_string(),
            Self::Intent { id, epoch, what } => format!("{what} of endpoint {id}, epoch {epoch}"),
            Self::Delete { id, epoch } => format!("delete of endpoint {id}, epoch {epoch}"),
        }
    }
}

impl fmt::Display for Stray {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Link { id, epoch, ours, .. } => {
                let proof = if *ours { "" } else { "; it does not carry Wharf's mark, so it is left alone" };
                write!(f, "no record: its name says endpoint {id}, epoch ...{epoch:08x}, which is not there{proof}")
            }
            Self::MarkedLink { .. } => {
                f.write_str("carries a mark of Wharf under a name that is not Wharf's; left alone")
            }
            Self::ForeignPin { .. } => f.write_str("not of Wharf's making: never touched"),
            Self::Pins { count, .. } => write!(f, "{count} pins of an endpoint that is not there"),
            Self::Row { .. } => f.write_str("no endpoint of this id and epoch has this address"),
            Self::CallSlot { .. } => f.write_str("holds a program of an endpoint that is not there"),
            Self::Nat { entry } => {
                let asked = if matches!(entry, NatEntry::Port(_)) { "published" } else { "asked for" };
                write!(f, "in the table inet wharf, but no endpoint has {asked} it")
            }
            Self::Route { ours, .. } => {
                let proof = if *ours {
                    ""
                } else {
                    "; neither its interface nor its destination is Wharf's, so it is left alone"
                };
                write!(f, "carries Wharf's protocol number, but no endpoint and no pool asks for it{proof}")
            }
            Self::Lease { .. } => f.write_str("no endpoint of this attachment and epoch has this address"),
            Self::NodeLease { .. } => f.write_str("held by the node, but not a router address of today's pools"),
            Self::UnstoredLease { .. } => f.write_str("held in memory, not in the store"),
            Self::Intent { what, .. } => write!(f, "{what} begun and never closed; nothing works on it"),
            Self::Delete { .. } => f.write_str("delete begun and not finished"),
        }
    }
}

impl Kept {
    fn subject(&self) -> String {
        match self {
            Self::LeaseMissing { ip, .. }
            | Self::LeaseHeld { ip, .. }
            | Self::LeaseOutside { ip, .. }
            | Self::SharedAddress { ip, .. }
            | Self::RestLeased { ip, .. }
            | Self::RestOutside { ip, .. } => ip.to_string(),
            Self::RecordAside { id, .. } | Self::RecordMissing { id } => id.to_string(),
            Self::RecordUnreadable { key, .. } => key.to_string(),
            Self::QueueFile { name, .. } | Self::QueuedDelete { name, .. } => name.clone(),
            Self::QueueAside { path } | Self::Queue { path, .. } => path.clone(),
        }
    }
}

impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LeaseMissing { id, .. } => {
                write!(f, "missing: the pool may give the address of endpoint {id} to another")
            }
            Self::LeaseHeld { id, holder, .. } => write!(f, "held by {holder}, not by endpoint {id}"),
            Self::LeaseOutside { pool, .. } => {
                write!(
                    f,
                    "leased, but no pool has it today (it was of pool {pool}); its owner keeps it until it is released"
                )
            }
            Self::SharedAddress { count, .. } => write!(f, "{count} endpoints have this address"),
            Self::RestLeased { holder, .. } => write!(f, "rests, and is leased to {holder}; the lease counts"),
            Self::RestOutside { pool, .. } => write!(f, "rests, but no pool has it today (it was of pool {pool})"),
            Self::RecordAside { why, addresses, .. } => write!(
                f,
                "out of service: {why}; its id and addresses ({}) stay reserved until its container is deleted",
                in_words(addresses)
            ),
            Self::RecordUnreadable { why, .. } => {
                write!(f, "cannot be read: {why}; it is taken out of service when it fails at three starts")
            }
            Self::RecordMissing { .. } => f.write_str("runs, but has no record in the store"),
            Self::QueueFile { why, .. } => write!(f, "of no use: {why}"),
            Self::QueueAside { .. } => {
                f.write_str("put aside, because it is no deletion record: whatever delete it asked for was not done")
            }
            Self::QueuedDelete { age_ms, .. } => {
                write!(f, "a delete that waits for {} s and was not taken up", age_ms / 1_000)
            }
            Self::Queue { why, .. } => f.write_str(why),
        }
    }
}

/// Without its kind ([`NatEntry::kind`]).
fn nat_entry(entry: &NatEntry) -> String {
    match entry {
        NatEntry::Port(mapping) => mapping.to_string(),
        NatEntry::Own(ip) => ip.to_string(),
    }
}

fn place(side: Side) -> &'static str {
    match side {
        Side::Node => "on the node",
        Side::Container => "in the container",
    }
}

fn or_none<T: fmt::Display>(value: Option<&T>) -> String {
    value.map_or_else(|| "none".to_owned(), T::to_string)
}

fn goes(to: Option<&str>) -> String {
    to.map_or_else(|| "goes nowhere".to_owned(), |i| format!("goes to interface {i}"))
}

fn single(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

fn in_words(addresses: &[IpAddr]) -> String {
    if addresses.is_empty() {
        return "none known".to_owned();
    }
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
