//! The edge to the store: one transaction for an endpoint and its leases.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::{
    endpoint::EndpointRecord,
    ids::{Attachment, EndpointId, Epoch, PoolName},
};

/// Who a lease belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LeaseOwner {
    /// An attachment, at an epoch.
    Attachment {
        /// CNI key.
        attachment: Attachment,
        /// Epoch.
        epoch: Epoch,
    },
    /// A caller of `POST /v1/ipam`, by the name it gave.
    Caller {
        /// Name given by the caller.
        name: String,
    },
    /// The node itself (router addresses).
    Node,
}

/// An address that is given out.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Lease {
    /// Address.
    pub ip: IpAddr,
    /// Pool it comes from.
    pub pool: PoolName,
    /// Owner.
    pub owner: LeaseOwner,
    /// Milliseconds since the Unix epoch.
    pub since_unix_ms: u64,
}

/// What the agent is about to do, written before it does it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "intent")]
pub enum Intent {
    /// Side effects of a create may exist for this id and epoch.
    Create {
        /// CNI key.
        attachment: Attachment,
        /// Where the container side is to be born.
        netns_path: std::path::PathBuf,
    },
    /// The endpoint is being taken away.
    Delete {
        /// Leases stay when set.
        no_ip_release: bool,
    },
}

/// One change of the store; all of a transaction's changes become durable together or not at all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Insert or replace a record.
    PutEndpoint(Box<EndpointRecord>),
    /// Remove a record if it is there at this epoch.
    RemoveEndpoint(EndpointId, Epoch),
    /// Insert or replace a lease.
    PutLease(Lease),
    /// Remove a lease if it is there.
    RemoveLease(IpAddr),
    /// Remove a lease if this owner holds it: a delete that comes late never takes the lease of the one who came after.
    RemoveOwnedLease(IpAddr, LeaseOwner),
    /// Replace a lease if this owner holds it.
    ReplaceOwnedLease(Lease, LeaseOwner),
    /// Write an intent. One to delete is written only where there is a record of this epoch: without one there is nothing
    /// to resume, and nobody would ever close it.
    PutIntent(EndpointId, Epoch, Intent),
    /// Close an intent.
    RemoveIntent(EndpointId, Epoch),
    /// Epochs below this one may be in use; none of them is given out after a restart.
    ReserveEpochs(Epoch),
}

/// Everything the store holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Endpoints by id.
    pub endpoints: Vec<EndpointRecord>,
    /// Leases by address.
    pub leases: Vec<Lease>,
    /// Open intents.
    pub intents: Vec<(EndpointId, Epoch, Intent)>,
}
