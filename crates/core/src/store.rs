//! The edge to the store: one transaction for an endpoint and its leases.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::{
    endpoint::EndpointRecord,
    ids::{Attachment, EndpointId, Epoch, PoolName},
    timeline::Life,
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

/// What the names of owners begin with whose addresses a delete kept.
const KEPT: &str = "kept:";

impl LeaseOwner {
    /// Who holds an address whose endpoint was deleted without giving it back: that attachment, when it comes again.
    #[must_use]
    pub fn kept_for(attachment: &Attachment) -> Self {
        Self::Caller { name: format!("{KEPT}{}:{}", attachment.container_id, attachment.ifname) }
    }

    /// The container and interface for which a delete kept the address; none of other owners.
    #[must_use]
    pub fn kept(&self) -> Option<&str> {
        match self {
            Self::Caller { name } => name.strip_prefix(KEPT),
            Self::Attachment { .. } | Self::Node => None,
        }
    }
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

/// An address that was given back and rests: whatever still speaks for its old owner is to forget it first.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Rest {
    /// Address.
    pub ip: IpAddr,
    /// Pool it comes from.
    pub pool: PoolName,
    /// Who held it, in words.
    pub last_owner: String,
    /// When it was given back, milliseconds since the Unix epoch.
    pub since_unix_ms: u64,
}

/// How often an endpoint could not be brought back at a start, since it last could.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreFailure {
    /// Starts in a row.
    pub times: u32,
    /// What failed last, and why.
    pub why: String,
}

/// A record that was taken out of service after it failed at three starts: kept, shown, and not tried again. Its id and
/// addresses stay reserved, and what the kernel holds for it stays as it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutOfService {
    /// Id, as the row's key says.
    pub id: EndpointId,
    /// The record as it was stored (JSON, as far as it is text).
    pub record: String,
    /// Its addresses, as far as they can be told.
    pub addresses: Vec<IpAddr>,
    /// Why it was taken out.
    pub why: String,
    /// When, milliseconds since the Unix epoch.
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
    /// An address begins to rest.
    PutRest(Rest),
    /// An address has rested, or was leased again.
    RemoveRest(IpAddr),
    /// An endpoint could not be brought back at a start.
    PutRestoreFailure(EndpointId, RestoreFailure),
    /// An endpoint was brought back, or is gone.
    RemoveRestoreFailure(EndpointId),
    /// Takes whatever record has this id out of service.
    TakeOutOfService(Box<OutOfService>),
    /// Forgets a record out of service, and a row of that id which cannot be read.
    RemoveOutOfService(EndpointId),
    /// Insert or replace the life of an endpoint. One that has not ended is written only where there is a record of its
    /// epoch: a late note must not bring back what has ended. A store without room makes all other changes of a
    /// transaction without these two.
    PutLife(Box<Life>),
    /// Forget a life.
    RemoveLife(EndpointId, Epoch),
    /// Epochs below this one may be in use; none of them is given out after a restart.
    ReserveEpochs(Epoch),
    /// What lives without a record since a store was lost is held: from now on what nothing explains is leaked.
    LossHandled,
}

impl Change {
    /// It is for people to read later; nothing depends on it.
    #[must_use]
    pub fn is_of_timeline(&self) -> bool {
        matches!(self, Self::PutLife(_) | Self::RemoveLife(..))
    }
}

/// Everything the store holds but the lives of endpoints, which only `wharf explain` asks for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Endpoints by id.
    pub endpoints: Vec<EndpointRecord>,
    /// Leases by address.
    pub leases: Vec<Lease>,
    /// Open intents.
    pub intents: Vec<(EndpointId, Epoch, Intent)>,
    /// Addresses that rest.
    pub resting: Vec<Rest>,
    /// Endpoints that could not be brought back at the last start, by id.
    pub failures: Vec<(EndpointId, RestoreFailure)>,
    /// Records out of service.
    pub out_of_service: Vec<OutOfService>,
    /// Rows of the table of endpoints that cannot be read: key, text as far as it is text, and what is wrong.
    pub unreadable: Vec<(u16, String, String)>,
}
