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
        name: String,
        ifindex: IfIndex,
        /// In the name.
        id: EndpointId,
        /// Low 32 bits, in the name.
        epoch: u32,
        /// A mark or an intent proves Wharf's ownership.
        ours: bool,
    },
    /// A renamed link with Wharf's mark.
    MarkedLink { name: String, ifindex: IfIndex },
    /// A foreign object under the pin root.
    ForeignPin {
        /// Or name under `endpoints/`.
        path: String,
    },
    /// Pins without an endpoint record.
    Pins { id: EndpointId, count: usize },
    /// An endpoint-table row.
    Row {
        address: IpAddr,
        /// As stored.
        endpoint_id: u32,
        epoch: Epoch,
    },
    /// An nftables entry.
    Nat { entry: NatEntry },
    /// A program-array slot.
    CallSlot { slot: u32 },
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
    Lease { ip: IpAddr },
    /// A node lease for another address than the router's.
    NodeLease { ip: IpAddr },
    /// In memory but not in the store.
    UnstoredLease {
        ip: IpAddr,
        /// No endpoint will release it.
        nobodys: bool,
    },
    /// Open, without a running operation.
    Intent {
        id: EndpointId,
        epoch: Epoch,
        /// `create` or `delete`.
        what: &'static str,
    },
    /// An unfinished delete whose endpoint exists.
    Delete { id: EndpointId, epoch: Epoch },
}

/// Inconsistent store or deletion queue.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kept {
    /// An endpoint's address has no lease.
    LeaseMissing {
        ip: IpAddr,
        id: EndpointId,
    },
    /// An endpoint's address has another lease owner.
    LeaseHeld {
        ip: IpAddr,
        id: EndpointId,
        /// Owner.
        holder: String,
    },
    /// Outside all pools.
    LeaseOutside {
        ip: IpAddr,
        /// Former pool.
        pool: String,
        /// None for an API caller.
        id: Option<EndpointId>,
    },
    /// Several endpoints share an address.
    SharedAddress {
        ip: IpAddr,
        /// Endpoint count.
        count: usize,
    },
    /// A resting address is leased.
    RestLeased {
        ip: IpAddr,
        /// Owner.
        holder: String,
    },
    /// Outside all pools.
    RestOutside {
        ip: IpAddr,
        /// Former pool.
        pool: String,
    },
    /// A record is out of service.
    RecordAside {
        id: EndpointId,
        why: String,
        addresses: Vec<IpAddr>,
    },
    RecordUnreadable {
        key: u16,
        why: String,
    },
    /// A running endpoint has no record.
    RecordMissing {
        id: EndpointId,
    },
    /// An invalid file in the deletion queue.
    QueueFile {
        name: String,
        why: String,
    },
    /// A moved deletion record: its delete never runs.
    QueueAside {
        path: String,
    },
    /// An overdue deletion record.
    QueuedDelete {
        name: String,
        age_ms: u64,
    },
    /// The deletion queue is unreadable.
    Queue {
        path: String,
        why: String,
    },
}
