//! Orphans and inconsistent records.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::{
    ids::{EndpointId, Epoch, IfIndex},
    nat::NatEntry,
};

/// An object without a record.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stray {
    /// A link with a host side's name.
    Link {
        /// Name.
        name: String,
        /// Index.
        ifindex: IfIndex,
        /// In the name.
        id: EndpointId,
        /// Low 32 bits, in the name.
        epoch: u32,
        /// A mark or an intent proves Wharf's ownership.
        ours: bool,
    },
    /// A renamed link with Wharf's mark.
    MarkedLink {
        /// Name.
        name: String,
        /// Index.
        ifindex: IfIndex,
    },
    /// A foreign object under the pin root.
    ForeignPin {
        /// Or name under `endpoints/`.
        path: String,
    },
    /// Pins without an endpoint record.
    Pins {
        /// Endpoint id.
        id: EndpointId,
        /// Count.
        count: usize,
    },
    /// An endpoint-table row.
    Row {
        /// Address.
        address: IpAddr,
        /// As stored.
        endpoint_id: u32,
        /// Epoch.
        epoch: Epoch,
    },
    /// An nftables entry.
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
        /// None for an unreachable route.
        ifindex: Option<IfIndex>,
        /// Wharf owns interface or destination.
        ours: bool,
    },
    /// Its attachment has no endpoint.
    Lease {
        /// Address.
        ip: IpAddr,
    },
    /// A node lease for another address than the router's.
    NodeLease {
        /// Address.
        ip: IpAddr,
    },
    /// In memory but not in the store.
    UnstoredLease {
        /// Address.
        ip: IpAddr,
        /// No endpoint will release it.
        nobodys: bool,
    },
    /// Open, without a running operation.
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

/// Inconsistent store or deletion queue.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kept {
    /// An endpoint's address has no lease.
    LeaseMissing {
        /// Address.
        ip: IpAddr,
        /// Endpoint id.
        id: EndpointId,
    },
    /// An endpoint's address has another lease owner.
    LeaseHeld {
        /// Address.
        ip: IpAddr,
        /// Endpoint id.
        id: EndpointId,
        /// Owner.
        holder: String,
    },
    /// Outside all pools.
    LeaseOutside {
        /// Address.
        ip: IpAddr,
        /// Former pool.
        pool: String,
        /// None for an API caller.
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
        /// Owner.
        holder: String,
    },
    /// Outside all pools.
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
    /// A moved deletion record: its delete never runs.
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
