//! What is left over, and what is kept though it should go.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::ids::{EndpointId, Epoch, IfIndex};

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
