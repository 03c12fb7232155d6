//! The interface to the store: one transaction for an endpoint and its leases.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::{
    endpoint::EndpointRecord,
    ids::{Attachment, EndpointId, Epoch, PoolName},
    kernel::LinkRef,
    timeline::Life,
};

/// Owner of a lease.
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
    /// A caller of `POST /v1/ipam`, by the name in its request.
    Caller {
        /// Name given by the caller.
        name: String,
    },
    /// The node itself (router addresses).
    Node,
}

/// Prefix of the owner names of leases that a delete kept.
const KEPT: &str = "kept:";
/// Prefix of the owner names of leases for endpoints without a record; the link's name follows.
const LOST_RECORD: &str = "lost-record:";

impl LeaseOwner {
    /// The owner of an address whose endpoint was deleted without releasing it. The address is kept for the same
    /// attachment.
    #[must_use]
    pub fn kept_for(attachment: &Attachment) -> Self {
        Self::Caller { name: format!("{KEPT}{}:{}", attachment.container_id, attachment.ifname) }
    }

    /// The owner of an address of an endpoint whose record is lost, by the name of the endpoint's link.
    #[must_use]
    pub fn lost_record(link: &str) -> Self {
        Self::Caller { name: format!("{LOST_RECORD}{link}") }
    }

    /// The link of the endpoint without a record that the address is held for.
    #[must_use]
    pub fn link_without_record(&self) -> Option<&str> {
        match self {
            Self::Caller { name } => name.strip_prefix(LOST_RECORD),
            Self::Attachment { .. } | Self::Node => None,
        }
    }

    /// The container and interface for which a delete kept the address; none for other owners.
    #[must_use]
    pub fn kept(&self) -> Option<&str> {
        match self {
            Self::Caller { name } => name.strip_prefix(KEPT),
            Self::Attachment { .. } | Self::Node => None,
        }
    }
}

/// A leased address.
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

/// A released address in quarantine: caches and connections of the old owner must expire before the next lease.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Rest {
    /// Address.
    pub ip: IpAddr,
    /// Pool it comes from.
    pub pool: PoolName,
    /// The last owner, in words.
    pub last_owner: String,
    /// Time of the release, milliseconds since the Unix epoch.
    pub since_unix_ms: u64,
}

/// Failed restores of an endpoint since the last successful one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreFailure {
    /// Consecutive agent starts with a failed restore.
    pub times: u32,
    /// The last failure and its cause.
    pub why: String,
}

/// A record that was taken out of service after three failed restores. The record is kept and shown, and not restored
/// again. Its id and addresses stay reserved, and its kernel objects are left unchanged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutOfService {
    /// Id, as the row's key says.
    pub id: EndpointId,
    /// The record as it was stored (JSON, as far as it is text).
    pub record: String,
    /// The record's addresses, as far as they are known.
    pub addresses: Vec<IpAddr>,
    /// Why it was taken out.
    pub why: String,
    /// When, milliseconds since the Unix epoch.
    pub since_unix_ms: u64,
}

/// A planned create or delete, written before its first side effect.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "intent")]
pub enum Intent {
    /// Side effects of a create may exist for this id and epoch.
    Create {
        /// CNI key.
        attachment: Attachment,
        /// Namespace for the container side.
        netns_path: std::path::PathBuf,
        /// The link of another plugin's that programs may be attached to; none for a link of Wharf's own, whose name follows from id and epoch.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        link: Option<Box<LinkRef>>,
    },
    /// The endpoint is being deleted.
    Delete {
        /// NoIPRelease: the leases are kept.
        no_ip_release: bool,
    },
}

/// One change of the store. All changes of a transaction become durable together, or none does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Insert or replace a record.
    PutEndpoint(Box<EndpointRecord>),
    /// Remove a record if it has this epoch.
    RemoveEndpoint(EndpointId, Epoch),
    /// Insert or replace a lease.
    PutLease(Lease),
    /// Remove a lease if it exists.
    RemoveLease(IpAddr),
    /// Remove a lease if this owner holds it, so that a late delete cannot remove the next owner's lease.
    RemoveOwnedLease(IpAddr, LeaseOwner),
    /// Replace a lease if this owner holds it.
    ReplaceOwnedLease(Lease, LeaseOwner),
    /// Write an intent. A delete intent is written only when a record of this epoch exists: without a record there is
    /// nothing to resume, and the intent would never be closed.
    PutIntent(EndpointId, Epoch, Intent),
    /// Close an intent.
    RemoveIntent(EndpointId, Epoch),
    /// Insert the quarantine of an address.
    PutRest(Rest),
    /// Remove the quarantine of an address, which is free or leased again.
    RemoveRest(IpAddr),
    /// Insert or replace the failed restore of an endpoint.
    PutRestoreFailure(EndpointId, RestoreFailure),
    /// Remove the failed restore of an endpoint that was restored or deleted.
    RemoveRestoreFailure(EndpointId),
    /// Take the record with this id out of service.
    TakeOutOfService(Box<OutOfService>),
    /// Remove the record out of service with this id, and an unreadable row with this id.
    RemoveOutOfService(EndpointId),
    /// Insert or replace the life of an endpoint. A life that has not ended is written only when a record of its
    /// epoch exists, so that a late write cannot revive an ended life. When the store is full, a transaction is
    /// written without its changes of lives.
    PutLife(Box<Life>),
    /// Remove a life.
    RemoveLife(EndpointId, Epoch),
    /// Epochs below this one may be in use. None of them is allocated after a restart.
    ReserveEpochs(Epoch),
    /// Endpoints that lost their records with a lost store are registered. From now on, objects without a record are
    /// orphans.
    LossHandled,
}

impl Change {
    /// True for a change of a life. Lives are for people to read; no decision depends on them.
    #[must_use]
    pub fn is_of_timeline(&self) -> bool {
        matches!(self, Self::PutLife(_) | Self::RemoveLife(..))
    }
}

/// The whole store except the lives of endpoints, which only `wharf explain` reads.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Endpoints by id.
    pub endpoints: Vec<EndpointRecord>,
    /// Leases by address.
    pub leases: Vec<Lease>,
    /// Open intents.
    pub intents: Vec<(EndpointId, Epoch, Intent)>,
    /// Addresses in quarantine.
    pub resting: Vec<Rest>,
    /// Endpoints whose restore failed at the last start, by id.
    pub failures: Vec<(EndpointId, RestoreFailure)>,
    /// Records out of service.
    pub out_of_service: Vec<OutOfService>,
    /// Unreadable rows of the table of endpoints: key, the row as text where it is text, and the error.
    pub unreadable: Vec<(u16, String, String)>,
}
