//! The store interface: one transaction for an endpoint and its leases.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::{
    endpoint::EndpointRecord,
    ids::{Attachment, EndpointId, Epoch, PoolName},
    kernel::LinkRef,
    timeline::Life,
};

/// Lease owner.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LeaseOwner {
    /// An attachment at an epoch.
    Attachment {
        /// CNI key.
        attachment: Attachment,
        /// Epoch.
        epoch: Epoch,
    },
    /// A caller of `POST /v1/ipam`.
    Caller {
        /// Name from the request.
        name: String,
    },
    /// The node (router addresses).
    Node,
}

/// Owner name prefix of leases that a delete kept.
const KEPT: &str = "kept:";
/// Owner name prefix of leases for endpoints without a record, before the link's name.
const LOST_RECORD: &str = "lost-record:";

impl LeaseOwner {
    /// Owner of a deleted endpoint's kept address: reserved for the same attachment.
    #[must_use]
    pub fn kept_for(attachment: &Attachment) -> Self {
        Self::Caller { name: format!("{KEPT}{}:{}", attachment.container_id, attachment.ifname) }
    }

    /// Owner of an address of an endpoint whose record was lost, by link name.
    #[must_use]
    pub fn lost_record(link: &str) -> Self {
        Self::Caller { name: format!("{LOST_RECORD}{link}") }
    }

    /// Link of the endpoint without a record that uses the address.
    #[must_use]
    pub fn link_without_record(&self) -> Option<&str> {
        match self {
            Self::Caller { name } => name.strip_prefix(LOST_RECORD),
            Self::Attachment { .. } | Self::Node => None,
        }
    }

    /// Container and interface for which a delete kept the address; none for other owners.
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
    /// Pool.
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
    /// Pool.
    pub pool: PoolName,
    /// Last owner, in words.
    pub last_owner: String,
    /// Release time, milliseconds since the Unix epoch.
    pub since_unix_ms: u64,
}

/// Failed restores of an endpoint since the last success.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreFailure {
    /// Consecutive agent starts with a failed restore.
    pub times: u32,
    /// Last failure and cause.
    pub why: String,
}

/// A record out of service after three failed restores: kept and shown. Its id and addresses stay reserved, its
/// kernel objects unchanged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutOfService {
    /// Id, from the row's key.
    pub id: EndpointId,
    /// The stored record (JSON, as far as it is text).
    pub record: String,
    /// Known addresses of the record.
    pub addresses: Vec<IpAddr>,
    /// Cause.
    pub why: String,
    /// Start, milliseconds since the Unix epoch.
    pub since_unix_ms: u64,
}

/// A create or delete, written before its first side effect.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "intent")]
pub enum Intent {
    /// A create of this id and epoch may have side effects.
    Create {
        /// CNI key.
        attachment: Attachment,
        /// Namespace of the container side.
        netns_path: std::path::PathBuf,
        /// Another plugin's link with possible attachments; none for Wharf's links, whose names follow from id and
        /// epoch.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        link: Option<Box<LinkRef>>,
    },
    /// A delete of the endpoint.
    Delete {
        /// NoIPRelease: keep the leases.
        no_ip_release: bool,
    },
}

/// A store change. A transaction's changes become durable together, or none does.
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
    /// Remove a lease of this owner, so that a late delete cannot remove the next owner's lease.
    RemoveOwnedLease(IpAddr, LeaseOwner),
    /// Replace a lease of this owner.
    ReplaceOwnedLease(Lease, LeaseOwner),
    /// Write an intent. A delete intent needs a record of this epoch: otherwise nothing would resume or close it.
    PutIntent(EndpointId, Epoch, Intent),
    /// Close an intent.
    RemoveIntent(EndpointId, Epoch),
    /// Insert the rest of an address.
    PutRest(Rest),
    /// Remove the rest of an address that is free or leased again.
    RemoveRest(IpAddr),
    /// Insert or replace the restore failure of an endpoint.
    PutRestoreFailure(EndpointId, RestoreFailure),
    /// Remove the restore failure of a restored or deleted endpoint.
    RemoveRestoreFailure(EndpointId),
    /// Take the record of this id out of service.
    TakeOutOfService(Box<OutOfService>),
    /// Remove the record out of service, and the unreadable row, of this id.
    RemoveOutOfService(EndpointId),
    /// Insert or replace a life. An unended one needs a record of its epoch, so that a late write cannot revive an
    /// ended life. A full store drops changes of lives from the transaction.
    PutLife(Box<Life>),
    /// Remove a life.
    RemoveLife(EndpointId, Epoch),
    /// Reserve the epochs below this one: none of them is allocated after a restart.
    ReserveEpochs(Epoch),
    /// Endpoints of a lost store are registered: from now on, objects without a record are orphans.
    LossHandled,
}

impl Change {
    /// True for a change of a life. Lives are for operators; no decision depends on them.
    #[must_use]
    pub fn is_of_timeline(&self) -> bool {
        matches!(self, Self::PutLife(_) | Self::RemoveLife(..))
    }
}

/// The store without the lives, which only `wharf explain` reads.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Endpoints by id.
    pub endpoints: Vec<EndpointRecord>,
    /// Leases by address.
    pub leases: Vec<Lease>,
    /// Open intents.
    pub intents: Vec<(EndpointId, Epoch, Intent)>,
    /// Resting addresses.
    pub resting: Vec<Rest>,
    /// Restore failures of the last start, by endpoint.
    pub failures: Vec<(EndpointId, RestoreFailure)>,
    /// Records out of service.
    pub out_of_service: Vec<OutOfService>,
    /// Unreadable endpoint rows: key, text, error.
    pub unreadable: Vec<(u16, String, String)>,
}
