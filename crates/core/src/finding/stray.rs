//! Orphans, and inconsistencies in the store and the deletion queue.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::{
    ids::{EndpointId, Epoch, IfIndex},
    nat::NatEntry,
};

/// An object without a record.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stray {
    /// A link with the name of a host side, of an endpoint that has no record.
    Link {
        /// Name.
        name: String,
        /// Index.
        ifindex: IfIndex,
        /// Endpoint id that the name carries.
        id: EndpointId,
        /// Low 32 bits of the epoch, from the name.
        epoch: u32,
        /// A mark or an intent proves that the link is Wharf's.
        ours: bool,
    },
    /// A link that has Wharf's mark and another name, of an endpoint that has no record.
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
    /// A row of the kernel's endpoint table.
    Row {
        /// Address.
        address: IpAddr,
        /// Endpoint id as stored.
        endpoint_id: u32,
        /// Epoch.
        epoch: Epoch,
    },
    /// A published port, or an address that is not masqueraded, in the node's table.
    Nat {
        /// The entry.
        entry: NatEntry,
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
        /// The interface or the destination is Wharf's.
        ours: bool,
    },
    /// A lease whose attachment has no endpoint.
    Lease {
        /// Address.
        ip: IpAddr,
    },
    /// A lease that the node holds for an address other than the router's.
    NodeLease {
        /// Address.
        ip: IpAddr,
    },
    /// A lease that is in memory and not in the store.
    UnstoredLease {
        /// Address.
        ip: IpAddr,
        /// The lease has no endpoint that will release it.
        nobodys: bool,
    },
    /// An open intent without a running operation.
    Intent {
        /// Endpoint id.
        id: EndpointId,
        /// Epoch.
        epoch: Epoch,
        /// `create` or `delete`.
        what: &'static str,
    },
    /// A delete that began and did not finish; its endpoint still exists.
    Delete {
        /// Endpoint id.
        id: EndpointId,
        /// Epoch.
        epoch: Epoch,
    },
}

/// An inconsistency in the store or the deletion queue.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kept {
    /// An address of an endpoint has no lease.
    LeaseMissing {
        /// Address.
        ip: IpAddr,
        /// Endpoint id.
        id: EndpointId,
    },
    /// An address of an endpoint is leased to another owner.
    LeaseHeld {
        /// Address.
        ip: IpAddr,
        /// Endpoint id.
        id: EndpointId,
        /// Who holds it.
        holder: String,
    },
    /// An address is leased and no pool has it.
    LeaseOutside {
        /// Address.
        ip: IpAddr,
        /// Pool of which it was.
        pool: String,
        /// Endpoint that holds the lease; none when a caller of the API does.
        id: Option<EndpointId>,
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
