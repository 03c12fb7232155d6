//! What an observation or the audit finds amiss, as data. Three functions read it, and nothing else decides by words:
//! [`Problem::mender`] says who mends it, [`Problem::remedy`] what an operator should do, [`verdict`] how bad it is.
//! Status, audit, explain, the health of an endpoint and CHECK all take their verdict from here, so that they agree.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::{
    ids::{EndpointId, Epoch, IfIndex, MacAddr},
    kernel::AttachMode,
    overlap::Overlap,
    state::Level,
};

mod remedy;
#[cfg(test)]
mod tests;
mod words;

/// Which end of an endpoint's veth pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Side {
    /// The host side, in the node's namespace. Containers cannot change it.
    Node,
    /// The container's side. A container with `CAP_NET_ADMIN` may do with it what it likes.
    Container,
}

/// What stands where the node's route to an endpoint's address should.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RouteSeen {
    /// A route of ours, by another interface, or unreachable.
    Ours(Option<IfIndex>),
    /// Somebody else's.
    Foreign(Option<IfIndex>),
}

/// The route by which a look-up of an endpoint's address leads elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lookup {
    /// Destination of the route.
    pub destination: IpNet,
    /// Its table.
    pub table: u32,
    /// Its interface; none where it names several or none.
    pub ifindex: Option<IfIndex>,
    /// Its gateway.
    pub gateway: Option<IpAddr>,
}

/// What the kernel holds for an endpoint otherwise than its record asks for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EndpointProblem {
    /// The container's network namespace is gone, or another one is at its path.
    Netns {
        /// Path.
        path: String,
        /// What is there.
        cause: String,
    },
    /// A side of the link is not there, while the other is: it is in another network namespace.
    LinkMissing {
        /// Side.
        side: Side,
        /// Its name.
        name: String,
    },
    /// Both sides of the link are gone, and the container's network namespace lives: it was deleted, which a container can
    /// do from its side. Whether it was done on the node's side cannot be told.
    LinkDeleted {
        /// Name of the container's side.
        name: String,
    },
    /// A side of the link has another name.
    LinkRenamed {
        /// Side.
        side: Side,
        /// Name expected.
        name: String,
        /// Name found.
        found: String,
    },
    /// Another interface has the name.
    LinkReplaced {
        /// Side.
        side: Side,
        /// Name.
        name: String,
        /// Index expected.
        expected: IfIndex,
        /// Index found.
        found: IfIndex,
    },
    /// A side of the link is down.
    LinkDown {
        /// Side.
        side: Side,
        /// Name.
        name: String,
    },
    /// A side of the link has another MAC address.
    LinkMac {
        /// Side.
        side: Side,
        /// Name.
        name: String,
        /// Address expected.
        expected: MacAddr,
        /// Address found.
        found: Option<MacAddr>,
    },
    /// A side of the link has another MTU.
    LinkMtu {
        /// Side.
        side: Side,
        /// Name.
        name: String,
        /// Bytes expected.
        expected: u32,
        /// Bytes found.
        found: u32,
    },
    /// The ARP flag of a side of the link. On the node ARP is to be off: the programs answer none of the node's requests. In
    /// the container it is to be on: without it the container learns no neighbour, and reaches nobody.
    LinkArp {
        /// Side.
        side: Side,
        /// Name.
        name: String,
    },
    /// The host side does not carry its owner's mark.
    LinkAlias {
        /// Name.
        name: String,
        /// Alias expected.
        expected: String,
        /// Alias found.
        found: Option<String>,
    },
    /// The container does not have an address, or with another prefix length.
    Address {
        /// Address.
        address: IpAddr,
        /// Prefix length found; none when the address is not there.
        found: Option<u8>,
    },
    /// The node's route to an address of the endpoint.
    NodeRoute {
        /// Destination.
        to: IpNet,
        /// Interface expected.
        expected: IfIndex,
        /// What is there instead; none when nothing is.
        found: Option<RouteSeen>,
    },
    /// The node's route to an address of the endpoint is in the main table, but a look-up by the node's rules leads
    /// elsewhere: a rule asks another table first, or another route comes before it.
    NodeRouteShadowed {
        /// Destination.
        to: IpNet,
        /// Interface expected.
        expected: IfIndex,
        /// Where the look-up leads; none when it is refused.
        found: Option<Lookup>,
    },
    /// A route in the container is not there.
    ContainerRoute {
        /// Destination.
        to: IpNet,
        /// Gateway.
        gateway: IpAddr,
        /// Table; none for the main one.
        table: Option<u32>,
    },
    /// A rule in the container is not there.
    ContainerRule {
        /// Source that the rule matches.
        from: IpAddr,
        /// Table that it looks in.
        table: u32,
    },
    /// A program of the endpoint is not on its hook.
    Program {
        /// Program.
        program: String,
        /// Host side's name.
        ifname: String,
        /// How programs are attached.
        mode: AttachMode,
        /// Program id expected.
        expected: u32,
        /// Program ids found.
        found: Vec<u32>,
    },
    /// The program that drops everything is still on the hook.
    Sink {
        /// Program in whose place it stands.
        program: String,
        /// Its program id.
        id: u32,
    },
    /// A filter is left on the hook though programs are attached by tcx.
    StrayFilter {
        /// Program in whose place it stands.
        program: String,
        /// Its program id.
        id: u32,
    },
    /// A tcx link is left though programs are attached by clsact.
    StrayLink {
        /// Its pin.
        path: String,
    },
    /// A pin is not there.
    PinMissing {
        /// Its name.
        name: String,
    },
    /// Nothing is pinned.
    PinsMissing,
    /// Another program is behind the pinned link.
    PinStale {
        /// Its name.
        name: String,
        /// Program id expected.
        expected: u32,
        /// Program id found.
        found: u32,
    },
    /// The endpoint's programs use another map than the one that is pinned.
    MapUnused {
        /// Map.
        map: String,
        /// Id of the pinned map.
        pinned: u32,
        /// Ids of the maps in use.
        used: Vec<u32>,
    },
    /// A map of the endpoint cannot be read.
    MapUnreadable {
        /// Map.
        map: String,
        /// Why.
        cause: String,
    },
    /// A field of the configuration row has another value.
    Config {
        /// Field.
        field: &'static str,
        /// Value expected.
        expected: String,
        /// Value found.
        found: String,
    },
    /// The endpoint's row in the table of endpoints is not there, or differs.
    Row {
        /// Address.
        address: IpAddr,
        /// How it differs; none when it is not there.
        found: Option<String>,
    },
    /// The endpoint's slot of the program array is empty, or holds another program.
    CallSlot {
        /// Program id expected, where it is known.
        expected: Option<u32>,
        /// Program id found.
        found: Option<u32>,
    },
}

/// What of the node's own part is not as the node's specification asks for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NodeProblem {
    /// A side of the router's link is not there.
    LinkMissing {
        /// Name.
        name: String,
    },
    /// A side of the router's link has another name.
    LinkRenamed {
        /// Name expected.
        name: String,
        /// Name found.
        found: String,
    },
    /// Something else has the name of the router's link.
    LinkForeign {
        /// Name.
        name: String,
    },
    /// A side of the router's link is down.
    LinkDown {
        /// Name.
        name: String,
    },
    /// A side of the router's link has another MTU.
    LinkMtu {
        /// Name.
        name: String,
        /// Bytes expected.
        expected: u32,
        /// Bytes found.
        found: u32,
    },
    /// The router does not have an address, or with another prefix length.
    Address {
        /// Address.
        address: IpAddr,
        /// Interface.
        ifname: String,
        /// Prefix length found; none when the address is not there.
        found: Option<u8>,
    },
    /// A pool's unreachable route is not there, or goes to an interface.
    PoolRoute {
        /// Pool's CIDR.
        cidr: IpNet,
        /// Interface found; none when there is no route.
        found: Option<IfIndex>,
    },
    /// A pool shares addresses with a network of the node.
    PoolOverlap(Overlap),
    /// The bpffs is none, or cannot be read.
    Bpffs {
        /// Path.
        path: String,
        /// What is there.
        cause: String,
    },
    /// A shared pin is not there.
    PinMissing {
        /// Path.
        path: String,
    },
    /// A shared pin is not what it should be.
    Pin {
        /// Path.
        path: String,
        /// What is there.
        cause: String,
    },
}

/// What no record explains, or what the records themselves contradict.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stray {
    /// A host side by its name, of an endpoint that has no record.
    Link {
        /// Name.
        name: String,
        /// Index.
        ifindex: IfIndex,
        /// Endpoint id that the name carries.
        id: EndpointId,
        /// What the name carries of the epoch.
        epoch: u32,
        /// A mark or an intent proves it to be ours.
        ours: bool,
    },
    /// A link with a mark of ours under another name, of an endpoint that has no record.
    MarkedLink {
        /// Name.
        name: String,
        /// Index.
        ifindex: IfIndex,
    },
    /// Something under the pin root that Wharf does not make.
    ForeignPin {
        /// Path, or the name under `endpoints/`.
        path: String,
    },
    /// Pins of an endpoint that has no record.
    Pins {
        /// Endpoint id.
        id: EndpointId,
        /// How many.
        count: usize,
    },
    /// A row of the table of endpoints.
    Row {
        /// Address.
        address: IpAddr,
        /// Endpoint id as stored.
        endpoint_id: u32,
        /// Epoch.
        epoch: Epoch,
    },
    /// A slot of the program array.
    CallSlot {
        /// Slot.
        slot: u32,
    },
    /// A route with our protocol number.
    Route {
        /// Destination.
        to: IpNet,
        /// Interface; none for an unreachable route.
        ifindex: Option<IfIndex>,
        /// Its interface or its destination is ours.
        ours: bool,
    },
    /// A lease whose attachment has no endpoint.
    Lease {
        /// Address.
        ip: IpAddr,
    },
    /// A lease of the node that is no router address.
    NodeLease {
        /// Address.
        ip: IpAddr,
    },
    /// A lease that only memory knows.
    UnstoredLease {
        /// Address.
        ip: IpAddr,
        /// No endpoint will ever give it back.
        nobodys: bool,
    },
    /// An intent on which nothing works.
    Intent {
        /// Endpoint id.
        id: EndpointId,
        /// Epoch.
        epoch: Epoch,
        /// `create` or `delete`.
        what: &'static str,
    },
    /// A delete that began and could not finish; its endpoint is still there.
    Delete {
        /// Endpoint id.
        id: EndpointId,
        /// Epoch.
        epoch: Epoch,
    },
}

/// What is kept aside, or contradicts itself in the store.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kept {
    /// An address of an endpoint has no lease.
    LeaseMissing {
        /// Address.
        ip: IpAddr,
        /// Endpoint id.
        id: EndpointId,
    },
    /// An address of an endpoint is leased to another.
    LeaseHeld {
        /// Address.
        ip: IpAddr,
        /// Endpoint id.
        id: EndpointId,
        /// Who holds it.
        holder: String,
    },
    /// Several endpoints have one address.
    SharedAddress {
        /// Address.
        ip: IpAddr,
        /// How many.
        count: usize,
    },
    /// An address is in quarantine and leased.
    RestLeased {
        /// Address.
        ip: IpAddr,
        /// Who holds it.
        holder: String,
    },
    /// An address is in quarantine and no pool has it.
    RestOutside {
        /// Address.
        ip: IpAddr,
        /// Pool of which it was.
        pool: String,
    },
    /// A record is out of service.
    RecordAside {
        /// Endpoint id.
        id: EndpointId,
        /// Why.
        why: String,
        /// Its addresses.
        addresses: Vec<IpAddr>,
    },
    /// A record cannot be read.
    RecordUnreadable {
        /// Its key.
        key: u16,
        /// Why.
        why: String,
    },
    /// An endpoint runs and has no record.
    RecordMissing {
        /// Endpoint id.
        id: EndpointId,
    },
    /// A file of the deletion queue is no deletion record.
    QueueFile {
        /// Its name.
        name: String,
        /// Why.
        why: String,
    },
    /// A file of the deletion queue that was put aside, because it is no deletion record: a delete that nobody does.
    QueueAside {
        /// Its path.
        path: String,
    },
    /// A deletion record that nobody took up.
    QueuedDelete {
        /// Its name.
        name: String,
        /// How long it has waited, milliseconds.
        age_ms: u64,
    },
    /// The deletion queue cannot be read.
    Queue {
        /// Its path.
        path: String,
        /// Why.
        why: String,
    },
}

/// Something amiss.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Problem {
    /// With an endpoint that has a record.
    Endpoint(EndpointId, EndpointProblem),
    /// With the node's own part.
    Node(NodeProblem),
    /// Something that no record explains.
    Stray(Stray),
    /// Something in the store or in the deletion queue.
    Kept(Kept),
}

/// Who mends a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mender {
    /// A regeneration of the endpoint at this level. The leak audit asks for it.
    Regeneration(Level),
    /// The audit's own repair. The leak audit makes it.
    Repair,
    /// The audit's own repair, when an operator asks for it: it takes something away from a container that may live.
    Removal,
    /// The container, whose own doing it is. Where `regenerable`, a datapath regeneration that an operator asks for puts
    /// it back. The agent does not by itself: the container would do it again, and nobody else is harmed.
    Container {
        /// A datapath regeneration puts it back.
        regenerable: bool,
    },
    /// Nobody: it is a notice, nothing is amiss.
    Nobody,
    /// Only an operator.
    Operator,
}

/// How bad findings are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verdict {
    /// Nothing is amiss; notices aside.
    Well,
    /// A container broke its own network. Its endpoint fails, the node is well.
    ContainersOwn,
    /// Something is amiss that is not a container's own doing.
    Amiss,
}

/// The worst of the findings.
#[must_use]
pub fn verdict<'a>(problems: impl IntoIterator<Item = &'a Problem>) -> Verdict {
    problems.into_iter().map(Problem::verdict).max().unwrap_or(Verdict::Well)
}

impl Problem {
    /// How bad this one is.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        match self.mender() {
            Mender::Nobody => Verdict::Well,
            Mender::Container { .. } => Verdict::ContainersOwn,
            Mender::Regeneration(_) | Mender::Repair | Mender::Removal | Mender::Operator => Verdict::Amiss,
        }
    }

    /// Who mends it.
    #[must_use]
    pub fn mender(&self) -> Mender {
        match self {
            Self::Endpoint(_, problem) => problem.mender(),
            // Making the node's part again does not remove what is not Wharf's.
            Self::Node(
                NodeProblem::LinkForeign { .. }
                | NodeProblem::PoolOverlap(_)
                | NodeProblem::Bpffs { .. }
                | NodeProblem::Pin { .. },
            ) => Mender::Operator,
            Self::Node(_) => Mender::Repair,
            Self::Stray(stray) => match stray {
                Stray::Link { ours: true, .. }
                | Stray::Pins { .. }
                | Stray::Row { .. }
                | Stray::CallSlot { .. }
                | Stray::Route { ours: true, .. }
                | Stray::Lease { .. }
                | Stray::NodeLease { .. }
                | Stray::UnstoredLease { nobodys: true, .. }
                | Stray::Intent { .. } => Mender::Repair,
                Stray::Link { ours: false, .. }
                | Stray::MarkedLink { .. }
                | Stray::ForeignPin { .. }
                | Stray::Route { ours: false, .. }
                | Stray::UnstoredLease { nobodys: false, .. }
                | Stray::Delete { .. } => Mender::Operator,
            },
            Self::Kept(kept) => match kept {
                Kept::RestLeased { .. }
                | Kept::RestOutside { .. }
                | Kept::QueueFile { .. }
                | Kept::QueuedDelete { .. } => Mender::Repair,
                Kept::RecordAside { .. } | Kept::RecordUnreadable { .. } => Mender::Removal,
                Kept::LeaseMissing { .. }
                | Kept::LeaseHeld { .. }
                | Kept::SharedAddress { .. }
                | Kept::RecordMissing { .. }
                | Kept::QueueAside { .. }
                | Kept::Queue { .. } => Mender::Operator,
            },
        }
    }

    /// True when the two tell of the same thing, whatever they found of it.
    #[must_use]
    pub fn is_about_the_same(&self, other: &Self) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
            && self.object() == other.object()
            && self.subject() == other.subject()
    }
}

impl EndpointProblem {
    /// Who mends it.
    #[must_use]
    pub fn mender(&self) -> Mender {
        use Side::{Container, Node};
        let own = |regenerable| Mender::Container { regenerable };
        match self {
            Self::Netns { .. }
            | Self::LinkMissing { side: Node, .. }
            | Self::LinkRenamed { side: Node, .. }
            | Self::LinkReplaced { side: Node, .. }
            | Self::NodeRoute { found: Some(RouteSeen::Foreign(_)), .. }
            | Self::NodeRouteShadowed { .. } => Mender::Operator,
            Self::LinkDeleted { .. }
            | Self::LinkMissing { side: Container, .. }
            | Self::LinkRenamed { side: Container, .. }
            | Self::LinkReplaced { side: Container, .. } => own(false),
            // Smaller packets harm nobody; larger ones do not arrive.
            Self::LinkMtu { side: Container, expected, found, .. } if found < expected => Mender::Nobody,
            Self::LinkDown { side: Container, .. }
            | Self::LinkMac { side: Container, .. }
            | Self::LinkMtu { side: Container, .. }
            | Self::LinkArp { side: Container, .. }
            | Self::Address { .. }
            | Self::ContainerRoute { .. }
            | Self::ContainerRule { .. } => own(true),
            Self::LinkDown { side: Node, .. }
            | Self::LinkMac { side: Node, .. }
            | Self::LinkMtu { side: Node, .. }
            | Self::LinkArp { side: Node, .. }
            | Self::LinkAlias { .. }
            | Self::NodeRoute { .. }
            | Self::Program { .. }
            | Self::Sink { .. }
            | Self::StrayFilter { .. }
            | Self::StrayLink { .. }
            | Self::PinMissing { .. }
            | Self::PinsMissing
            | Self::PinStale { .. }
            | Self::MapUnused { .. }
            | Self::MapUnreadable { .. } => Mender::Regeneration(Level::Datapath),
            Self::Config { .. } | Self::Row { .. } | Self::CallSlot { .. } => Mender::Regeneration(Level::Policy),
        }
    }

    /// True when it is a matter of programs and maps, and not of links, addresses and routes.
    #[must_use]
    pub fn is_of_bpf(&self) -> bool {
        match self {
            Self::Program { .. }
            | Self::Sink { .. }
            | Self::StrayFilter { .. }
            | Self::StrayLink { .. }
            | Self::PinMissing { .. }
            | Self::PinsMissing
            | Self::PinStale { .. }
            | Self::MapUnused { .. }
            | Self::MapUnreadable { .. }
            | Self::Config { .. }
            | Self::Row { .. }
            | Self::CallSlot { .. } => true,
            Self::Netns { .. }
            | Self::LinkMissing { .. }
            | Self::LinkDeleted { .. }
            | Self::LinkRenamed { .. }
            | Self::LinkReplaced { .. }
            | Self::LinkDown { .. }
            | Self::LinkMac { .. }
            | Self::LinkMtu { .. }
            | Self::LinkArp { .. }
            | Self::LinkAlias { .. }
            | Self::Address { .. }
            | Self::NodeRoute { .. }
            | Self::NodeRouteShadowed { .. }
            | Self::ContainerRoute { .. }
            | Self::ContainerRule { .. } => false,
        }
    }

    /// True when the endpoint's namespace or a side of its link is gone, or is another: no regeneration brings it back.
    #[must_use]
    pub fn is_of_a_lost_link(&self) -> bool {
        matches!(
            self,
            Self::Netns { .. } | Self::LinkMissing { .. } | Self::LinkDeleted { .. } | Self::LinkReplaced { .. }
        )
    }
}

/// One fact, one problem: a link whose two sides are both missed was deleted, and its routes went with it.
#[must_use]
pub fn joined(mut found: Vec<EndpointProblem>) -> Vec<EndpointProblem> {
    let missing =
        |wanted| move |p: &EndpointProblem| matches!(p, EndpointProblem::LinkMissing { side, .. } if *side == wanted);
    if !found.iter().any(missing(Side::Node)) {
        return found;
    }
    let inside = found.iter().find_map(|p| match p {
        EndpointProblem::LinkMissing { side: Side::Container, name } => Some(name.clone()),
        _ => None,
    });
    if let Some(name) = inside {
        let follows = |p: &EndpointProblem| {
            matches!(p, EndpointProblem::LinkMissing { .. } | EndpointProblem::NodeRoute { found: None, .. })
        };
        found.retain(|p| !follows(p));
        found.insert(0, EndpointProblem::LinkDeleted { name });
    }
    found
}
