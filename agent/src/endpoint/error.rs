//! Errors of an endpoint's life.

use std::{net::IpAddr, path::PathBuf, time::Duration};

use ipnet::IpNet;
use wharf_core::{
    admission::Refusal,
    identity_allocator::IdentityError,
    ids::{Attachment, EndpointId, IfName, MacAddr, PoolName},
    ipam::IpamError,
    kernel::KernelError,
    nat::Publish,
    plan::{CreateStep, DeleteStep, UndoStep},
    state::State,
};

use crate::{memory::NoRoom, node::error::JobError, policy::error::PolicyError, proxy::ProxyError, store::StoreError};

/// Failure of a removal.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RemoveError {
    /// Kernel call of the step.
    #[error(transparent)]
    Job(#[from] JobError),
    /// The kernel did not report or release an object.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The policy rows could not be written.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The proxy still has redirects.
    #[error("{}", .0.iter().map(|(redirect, why)| format!("redirect {redirect}: {why}")).collect::<Vec<_>>().join("; "))]
    Proxy(Vec<(String, ProxyError)>),
    /// No answer in time.
    #[error("no answer within {0:?}")]
    NoAnswer(Duration),
    /// Steps of a removal.
    #[error("{}", steps(.0))]
    Removal(Vec<(DeleteStep, Self)>),
    /// Steps of an undo.
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
    /// The attachment.
    pub attachment: Attachment,
    /// Cause.
    pub cause: CreateCause,
}

/// Why a create failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CreateCause {
    /// The memory limit.
    #[error(transparent)]
    Memory(#[from] NoRoom),
    /// Too many creates wait.
    #[error("{} creates wait, and this one would wait about {} ms", .0.waiting, .0.predicted_wait_ms)]
    Overloaded(Refusal),
    /// The agent stops.
    #[error("the agent is stopping")]
    Stopping,
    /// The deadline passed; `0` says when.
    #[error("{0}")]
    Deadline(&'static str),
    /// The deadline passed before the first step.
    #[error("its namespace {} or the store did not answer before the deadline", .0.display())]
    NotBegun(PathBuf),
    /// A step overran its bound.
    #[error("step {0} did not end in time; it is undone as soon as it ends")]
    Overrun(CreateStep),
    /// A delete came; `0` says when.
    #[error("{0}")]
    Deleted(&'static str),
    /// A queued delete of the attachment's last endpoint failed.
    #[error("a delete of the one before is still to be finished")]
    DeletePending,
    /// The path is not a container's network namespace.
    #[error(transparent)]
    Netns(KernelError),
    /// A step failed in the kernel.
    #[error("{1}")]
    Kernel(CreateStep, KernelError),
    /// The policy rows could not be written.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The addresses.
    #[error(transparent)]
    Ipam(#[from] IpamError),
    /// The labels have no identity.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The requested addresses have several owners.
    #[error("of the addresses asked for some are leased by the caller and some are not")]
    MixedOwners,
    /// Every id is taken.
    #[error("every endpoint id of this node is in use")]
    NoId,
    /// The interface's endpoint is being created or deleted.
    #[error("endpoint {id} of this interface is being {doing}")]
    InterfaceBusy {
        /// That endpoint.
        id: EndpointId,
        /// Its operation.
        doing: &'static str,
    },
    /// The interface has an endpoint.
    #[error("endpoint {id} has this interface already ({state})")]
    InterfaceTaken {
        /// That endpoint.
        id: EndpointId,
        /// Its state.
        state: State,
    },
    /// Another endpoint has the address.
    #[error("endpoint {id} has the address {ip} already")]
    AddressTaken {
        /// That endpoint.
        id: EndpointId,
        /// The address.
        ip: IpAddr,
    },
    /// Another IPAM leased an address that it may not lease.
    #[error("the address {ip}, leased by {by}: {why}")]
    External {
        /// Who leased it.
        by: String,
        /// The address.
        ip: IpAddr,
        /// Cause.
        why: String,
    },
    /// Another IPAM leased an address that is in use here.
    #[error("the address {ip}, leased by {by}: {why}")]
    ExternalHeld {
        /// Who leased it.
        by: String,
        /// The address.
        ip: IpAddr,
        /// User of the address.
        why: String,
    },
    /// Masquerading of addresses that another IPAM leased.
    #[error(
        "masquerading is asked for (`ipMasq`), and the node masquerades its own pools, not addresses that {by} leased"
    )]
    ExternalNotMasqueraded {
        /// Who leased it.
        by: String,
    },
    /// A route by another gateway than the endpoint's.
    #[error("the route to {route} is to go by {asked}, and the gateway is {gateway}")]
    RouteGateway {
        /// Destination.
        route: IpNet,
        /// Requested gateway.
        asked: IpAddr,
        /// The endpoint's gateway.
        gateway: IpAddr,
    },
    /// A route of a family without an address.
    #[error("the route to {route} has no gateway: the endpoint has no address of its family")]
    RouteFamily {
        /// Destination.
        route: IpNet,
    },
    /// Masquerading is off on this node.
    #[error("masquerading is asked for (`ipMasq`), and this node's agent runs with --masquerade off")]
    MasqueradeOff,
    /// Masquerading is off for the pool.
    #[error("masquerading is asked for (`ipMasq`), and containers of pool {0} keep their addresses")]
    PoolNotMasqueraded(PoolName),
    /// No masquerading, and so no table for ports.
    #[error("{0}: this node publishes no ports, because its agent runs with --masquerade off")]
    PortsOff(Publish),
    /// No address of the host IP's family.
    #[error("{0}: the container gets no {1} address, because pool {2} has none")]
    PortFamily(Publish, &'static str, PoolName),
    /// Another endpoint publishes the port.
    #[error("{port}: endpoint {id} ({attachment}) has published this port already")]
    PortTaken {
        /// Requested port.
        port: Publish,
        /// That endpoint.
        id: EndpointId,
        /// Its attachment.
        attachment: Attachment,
    },
    /// Another endpoint is on the plugin's link.
    #[error("another plugin made the interface, and endpoint {id} of {attachment} is on its link already")]
    LinkTaken {
        /// That endpoint.
        id: EndpointId,
        /// Its attachment.
        attachment: Attachment,
    },
    /// The plugin reported an address that its interface lacks.
    #[error("the plugin that made the interface told the address {ip}, and {ifname} in the container does not have it")]
    NotOnLink {
        /// The address.
        ip: IpAddr,
        /// The interface.
        ifname: IfName,
    },
    /// The plugin's interface has another MAC address.
    #[error("MAC address {asked} is asked for, and the plugin that made {ifname} in the container gave it {has}")]
    OtherMac {
        /// Requested.
        asked: MacAddr,
        /// Actual.
        has: MacAddr,
        /// The interface.
        ifname: IfName,
    },
    /// The plugin's interface cannot be used.
    #[error(transparent)]
    PluginLink(KernelError),
    /// An address to publish on is missing, or a process holds a port.
    #[error(transparent)]
    Ports(KernelError),
    /// The create failed, and so did its undo.
    #[error("{cause}; and undoing it: {left}")]
    NotUndone {
        /// Cause of the failure.
        cause: Box<Self>,
        /// What the undo left.
        left: RemoveError,
    },
}
