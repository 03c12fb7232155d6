//! Orphans and inconsistencies in the store and the deletion queue.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::{
    ids::{EndpointId, Epoch, IfIndex},
    nat::NatEntry,
};

/// An object without a record.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stray {
    /// A link with a host side's name and no endpoint record.
    Link {
        /// Name.
        name: String,
        /// Index.
        ifindex: IfIndex,
        /// Endpoint id in the name.
        id: EndpointId,
        /// Low 32 bits of the epoch in the name.
        epoch: u32,
        /// A mark or an intent proves that Wharf owns the link.
        ours: bool,
    },
    /// A renamed link with Wharf's mark and no endpoint record.
    MarkedLink {
        /// Name.
        name: String,
        /// Index.
        ifindex: IfIndex,
    },
    /// A foreign object under the pin root.
    ForeignPin {
        /// Path, or the name under `endpoints/`.
        path: String,
    },
    /// Pins without an endpoint record.
    Pins {
        /// Endpoint id.
        id: EndpointId,
        /// Count.
        count: usize,
    },
    /// A row of the endpoint table.
    Row {
        /// Address.
        address: IpAddr,
        /// Stored endpoint id.
        endpoint_id: u32,
        /// Epoch.
        epoch: Epoch,
    },
    /// An nftables entry of a published port or an unmasqueraded address.
    Nat {
        /// Entry.
        entry: NatEntry,
    },
    /// A program-array slot.
    CallSlot {
        /// Slot.
        slot: u32,
    },
    /// A route with Wharf's protocol number.
    Route {
        /// Destination.
        to: IpNet,
        /// Interface; none for an unreachable route.
        ifindex: Option<IfIndex>,
        /// Wharf owns the interface or the destination.
        ours: bool,
    },
    /// A lease whose attachment has no endpoint.
    Lease {
        /// Address.
        ip: IpAddr,
    },
    /// A node lease for an address other than the router's.
    NodeLease {
        /// Address.
        ip: IpAddr,
    },
    /// A lease in memory but not in the store.
    UnstoredLease {
        /// Address.
        ip: IpAddr,
        /// No endpoint will release it.
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
    /// An unfinished delete whose endpoint exists.
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
        /// Lease owner.
        holder: String,
    },
    /// A leased address outside all pools.
    LeaseOutside {
        /// Address.
        ip: IpAddr,
        /// Former pool.
        pool: String,
        /// Endpoint with the lease; none for an API caller.
        id: Option<EndpointId>,
    },
    /// Several endpoints share an address.
    SharedAddress {
        /// Address.
        ip: IpAddr,
        /// Endpoint count.
        count: usize,
    },
    /// A resting address is leased.
    RestLeased {
        /// Address.
        ip: IpAddr,
        /// Lease owner.
        holder: String,
    },
    /// A resting address outside all pools.
    RestOutside {
        /// Address.
        ip: IpAddr,
        /// Former pool.
        pool: String,
    },
    /// A record is out of service.
    RecordAside {
        /// Endpoint id.
        id: EndpointId,
        /// Cause.
        why: String,
        /// Addresses.
        addresses: Vec<IpAddr>,
    },
    /// A record is unreadable.
    RecordUnreadable {
        /// Key.
        key: u16,
        /// Cause.
        why: String,
    },
    /// A running endpoint has no record.
    RecordMissing {
        /// Endpoint id.
        id: EndpointId,
    },
    /// An invalid file in the deletion queue.
    QueueFile {
        /// Name.
        name: String,
        /// Cause.
        why: String,
    },
    /// An invalid deletion record that was moved aside: its delete never runs.
    QueueAside {
        /// Path.
        path: String,
    },
    /// An overdue deletion record.
    QueuedDelete {
        /// Name.
        name: String,
        /// Age, milliseconds.
        age_ms: u64,
    },
    /// The deletion queue is unreadable.
    Queue {
        /// Path.
        path: String,
        /// Cause.
        why: String,
    },
}
