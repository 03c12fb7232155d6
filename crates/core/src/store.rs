//! The store interface: one transaction for an endpoint and its leases.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::{
    endpoint::EndpointRecord,
    ids::{Attachment, EndpointId, Epoch, PoolName},
    kernel::LinkRef,
    timeline::Life,
};

#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LeaseOwner {
    /// An attachment at an epoch.
    Attachment {
        /// CNI key.
        attachment: Attachment,
        epoch: Epoch,
    },
    /// Of `POST /v1/ipam`.
    Caller {
        /// From the request.
        name: String,
    },
    /// The node (router addresses).
    Node,
}

const KEPT: &str = "kept:";
const LOST_RECORD: &str = "lost-record:";

impl LeaseOwner {
    /// Reserves a kept address for the same attachment.
    #[must_use]
    pub fn kept_for(attachment: &Attachment) -> Self {
        Self::Caller { name: format!("{KEPT}{}:{}", attachment.container_id, attachment.ifname) }
    }

    /// Owner of an address without a record, by link name.
    #[must_use]
    pub fn lost_record(link: &str) -> Self {
        Self::Caller { name: format!("{LOST_RECORD}{link}") }
    }

    /// Inverse of [`Self::lost_record`].
    #[must_use]
    pub fn link_without_record(&self) -> Option<&str> {
        match self {
            Self::Caller { name } => name.strip_prefix(LOST_RECORD),
            Self::Attachment { .. } | Self::Node => None,
        }
    }

    /// Container and interface of a kept address.
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
    pub ip: IpAddr,
    pub pool: PoolName,
    pub owner: LeaseOwner,
    /// Milliseconds since the Unix epoch.
    pub since_unix_ms: u64,
}

/// A resting address: caches and connections of the old owner must expire.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Rest {
    pub ip: IpAddr,
    pub pool: PoolName,
    /// In words.
    pub last_owner: String,
    /// Milliseconds since the Unix epoch.
    pub since_unix_ms: u64,
}

/// Failed restores since the last success.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreFailure {
    /// Consecutive agent starts.
    pub times: u32,
    /// Last cause.
    pub why: String,
}

/// A record after three failed restores. Id and addresses stay reserved, kernel objects unchanged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutOfService {
    /// From the row's key.
    pub id: EndpointId,
    /// JSON, as far as it is text.
    pub record: String,
    /// As far as known.
    pub addresses: Vec<IpAddr>,
    pub why: String,
    /// Milliseconds since the Unix epoch.
    pub since_unix_ms: u64,
}

/// A create or delete, written before its first side effect.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "intent")]
pub enum Intent {
    /// Side effects of this id and epoch may exist.
    Create {
        /// CNI key.
        attachment: Attachment,
        /// Of the container side.
        netns_path: std::path::PathBuf,
        /// Another plugin's link; names of Wharf's links follow from id and epoch.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        link: Option<Box<LinkRef>>,
    },
    /// A delete of the endpoint.
    Delete {
        /// NoIPRelease.
        no_ip_release: bool,
    },
}

/// A store change. Changes of a transaction become durable together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Insert or replace a record.
    PutEndpoint(Box<EndpointRecord>),
    /// If it has this epoch.
    RemoveEndpoint(EndpointId, Epoch),
    /// Insert or replace a lease.
    PutLease(Lease),
    RemoveLease(IpAddr),
    /// Of this owner: a late delete must not remove another owner's lease.
    RemoveOwnedLease(IpAddr, LeaseOwner),
    ReplaceOwnedLease(Lease, LeaseOwner),
    /// A delete needs a record of this epoch: otherwise nothing would resume or close it.
    PutIntent(EndpointId, Epoch, Intent),
    /// Close an intent.
    RemoveIntent(EndpointId, Epoch),
    /// Insert a rest.
    PutRest(Rest),
    /// Remove a rest: the address is free or leased.
    RemoveRest(IpAddr),
    /// Insert or replace a restore failure.
    PutRestoreFailure(EndpointId, RestoreFailure),
    RemoveRestoreFailure(EndpointId),
    /// Take a record out of service.
    TakeOutOfService(Box<OutOfService>),
    /// Remove a record out of service and the unreadable row.
    RemoveOutOfService(EndpointId),
    /// An unended life needs a record of its epoch: a late write must not revive an ended life. A full store drops
    /// these changes.
    PutLife(Box<Life>),
    RemoveLife(EndpointId, Epoch),
    /// No epoch below this one is allocated after a restart.
    ReserveEpochs(Epoch),
    /// Objects without a record are orphans from now on.
    LossHandled,
}

impl Change {
    /// Lives are for operators; no decision depends on them.
    #[must_use]
    pub fn is_of_timeline(&self) -> bool {
        matches!(self, Self::PutLife(_) | Self::RemoveLife(..))
    }
}

/// The store without lives, which only `wharf explain` reads.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// By id.
    pub endpoints: Vec<EndpointRecord>,
    /// By address.
    pub leases: Vec<Lease>,
    /// Open intents.
    pub intents: Vec<(EndpointId, Epoch, Intent)>,
    /// Resting addresses.
    pub resting: Vec<Rest>,
    /// Of the last start, by endpoint.
    pub failures: Vec<(EndpointId, RestoreFailure)>,
    /// Records out of service.
    pub out_of_service: Vec<OutOfService>,
    /// Key, text, error.
    pub unreadable: Vec<(u16, String, String)>,
}
