//! Errors of an endpoint's life.

use std::{net::IpAddr, path::PathBuf, time::Duration};

use ipnet::IpNet;
use wharf_core::{
    admission::Refusal,
    identity_allocator::IdentityError,
    ids::{Attachment, EndpointId, IfName, MacAddr, PoolName},
    ipam::IpamError,
    kernel::KernelError,
    nat::PublishedPort,
    plan::{CreateStep, DeleteStep, UndoStep},
    state::State,
};
use wharf_store::StoreError;

use crate::{
    memory::NoRoom,
    node::error::{JobError, SourcesRefusal},
    policy::error::PolicyError,
    proxy::ProxyError,
};

/// A failed removal.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RemoveError {
    /// A kernel call.
    #[error(transparent)]
    Job(#[from] JobError),
    /// The kernel kept or did not report an object.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The policy rows.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// Remaining redirects.
    #[error("{}", .0.iter().map(|(redirect, why)| format!("redirect {redirect}: {why}")).collect::<Vec<_>>().join("; "))]
    Proxy(Vec<(String, ProxyError)>),
    /// A timeout.
    #[error("no answer within {0:?}")]
    NoAnswer(Duration),
    /// Failed steps.
    #[error("{}", steps(.0))]
    Removal(Vec<(DeleteStep, Self)>),
    /// Failed steps.
    #[error("{}", steps(.0))]
    Undo(Vec<(UndoStep, Self)>),
}

fn steps(failed: &[(impl std::fmt::Display, RemoveError)]) -> String {
    failed.iter().map(|(step, why)| format!("{step}: {why}")).collect::<Vec<_>>().join("; ")
}

/// A failed create.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{cause} (create endpoint {attachment})")]
pub struct CreateError {
    pub attachment: Attachment,
    pub cause: CreateCause,
}

/// Why a create failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CreateCause {
    /// The memory limit.
    #[error(transparent)]
    Memory(#[from] NoRoom),
    /// Too many waiting creates.
    #[error("{} creates wait, and this one would wait about {} ms", .0.waiting, .0.predicted_wait_ms)]
    Overloaded(Refusal),
    /// The agent stops.
    #[error("the agent is stopping")]
    Stopping,
    /// Why no container can have an address of `--pools-from-cluster`.
    #[error("the node has no addresses for containers: {0}")]
    NoPools(String),
    /// Deadline passed; `0` says when.
    #[error("{0}")]
    Deadline(&'static str),
    /// Deadline passed before the first step.
    #[error("its namespace {} or the store did not answer before the deadline", .0.display())]
    NotBegun(PathBuf),
    /// A step overran its bound.
    #[error("step {0} did not end in time; it is undone as soon as it ends")]
    Overrun(CreateStep),
    /// A delete came; `0` says when.
    #[error("{0}")]
    Deleted(&'static str),
    /// A queued delete of the last endpoint failed.
    #[error("a delete of the one before is still to be finished")]
    DeletePending,
    /// Not a container's network namespace.
    #[error(transparent)]
    Netns(KernelError),
    /// A step's kernel call.
    #[error("{1}")]
    Kernel(CreateStep, KernelError),
    /// The policy rows.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The addresses.
    #[error(transparent)]
    Ipam(#[from] IpamError),
    /// The labels' identity.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// Requested addresses of several owners.
    #[error("of the addresses asked for some are leased by the caller and some are not")]
    MixedOwners,
    /// Every id is taken.
    #[error("every endpoint id of this node is in use")]
    NoId,
    /// The interface's endpoint is being created or deleted.
    #[error("endpoint {id} of this interface is being {doing}")]
    InterfaceBusy {
        id: EndpointId,
        /// Operation.
        doing: &'static str,
    },
    /// The interface has an endpoint.
    #[error("endpoint {id} has this interface already ({state})")]
    InterfaceTaken { id: EndpointId, state: State },
    /// Another endpoint has the address.
    #[error("endpoint {id} has the address {ip} already")]
    AddressTaken { id: EndpointId, ip: IpAddr },
    /// An address that another IPAM may not lease.
    #[error("the address {ip}, leased by {by}: {why}")]
    External {
        /// Plugin.
        by: String,
        ip: IpAddr,
        why: String,
    },
    /// Another IPAM's address, in use here.
    #[error("the address {ip}, leased by {by}: {why}")]
    ExternalHeld {
        /// Plugin.
        by: String,
        ip: IpAddr,
        /// User.
        why: String,
    },
    /// `ipMasq` for another IPAM's addresses.
    #[error(
        "masquerading is asked for (`ipMasq`), and the node masquerades its own pools, not addresses that {by} leased"
    )]
    ExternalNotMasqueraded {
        /// Plugin.
        by: String,
    },
    /// A route by another gateway.
    #[error("the route to {route} is to go by {asked}, and the gateway is {gateway}")]
    RouteGateway {
        /// Destination.
        route: IpNet,
        /// Requested.
        asked: IpAddr,
        /// Actual.
        gateway: IpAddr,
    },
    /// A route of a family without an address.
    #[error("the route to {route} has no gateway: the endpoint has no address of its family")]
    RouteFamily {
        /// Destination.
        route: IpNet,
    },
    /// Source prefixes.
    #[error(transparent)]
    Sources(#[from] SourcesRefusal),
    #[error("masquerading is asked for (`ipMasq`), and this node's agent runs with --masquerade off")]
    MasqueradeOff,
    /// The pool's masquerading is off.
    #[error("masquerading is asked for (`ipMasq`), and containers of pool {0} keep their addresses")]
    PoolNotMasqueraded(PoolName),
    /// Masquerading is off, and so is publishing.
    #[error("{0}: this node publishes no ports, because its agent runs with --masquerade off")]
    PortsOff(PublishedPort),
    /// The pool lacks the host IP's family.
    #[error("{0}: the container gets no {1} address, because pool {2} has none")]
    PortFamily(PublishedPort, &'static str, PoolName),
    /// Another endpoint publishes the port.
    #[error("{port}: endpoint {id} ({attachment}) has published this port already")]
    PortTaken {
        /// Requested.
        port: PublishedPort,
        id: EndpointId,
        attachment: Attachment,
    },
    /// The plugin's link has an endpoint.
    #[error("another plugin made the interface, and endpoint {id} of {attachment} is on its link already")]
    LinkTaken { id: EndpointId, attachment: Attachment },
    /// The plugin's interface lacks a reported address.
    #[error("the plugin that made the interface told the address {ip}, and {ifname} in the container does not have it")]
    NotOnLink { ip: IpAddr, ifname: IfName },
    /// The plugin's interface has another MAC.
    #[error("MAC address {asked} is asked for, and the plugin that made {ifname} in the container gave it {has}")]
    OtherMac {
        /// Requested.
        asked: MacAddr,
        /// Actual.
        has: MacAddr,
        ifname: IfName,
    },
    /// The plugin's link is unusable.
    #[error(transparent)]
    PluginLink(KernelError),
    /// No address to publish on, or a port in use.
    #[error(transparent)]
    Ports(KernelError),
    /// Create and undo failed.
    #[error("{cause}; and undoing it: {left}")]
    NotUndone {
        /// Why it failed.
        cause: Box<Self>,
        /// Failed undo.
        left: RemoveError,
    },
}
