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

/// Why a step of a removal failed, or what of a removal is left.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RemoveError {
    /// The kernel call of the step.
    #[error(transparent)]
    Job(#[from] JobError),
    /// The kernel refused to say or to release something.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The rows of its policy.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The proxy still has redirects.
    #[error("{}", .0.iter().map(|(redirect, why)| format!("redirect {redirect}: {why}")).collect::<Vec<_>>().join("; "))]
    Proxy(Vec<(String, ProxyError)>),
    /// Kernel, store or proxy did not answer.
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
    /// The attachment that has no endpoint.
    pub attachment: Attachment,
    /// Why.
    pub cause: CreateCause,
}

/// Why a create failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CreateCause {
    /// The memory limit.
    #[error(transparent)]
    Memory(#[from] NoRoom),
    /// More creates wait than can be served in time.
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
    /// A delete of the attachment's last endpoint was asked for while no agent ran, and failed now.
    #[error("a delete of the one before is still to be finished")]
    DeletePending,
    /// The path is not a container's network namespace.
    #[error(transparent)]
    Netns(KernelError),
    /// A step failed in the kernel.
    #[error("{1}")]
    Kernel(CreateStep, KernelError),
    /// The rows of its policy.
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
    /// The interface has an endpoint that is neither settled nor gone.
    #[error("endpoint {id} of this interface is being {doing}")]
    InterfaceBusy {
        /// That endpoint.
        id: EndpointId,
        /// What happens to it.
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
    /// Another IPAM leased an address that is not its to lease.
    #[error("the address {ip}, leased by {by}: {why}")]
    External {
        /// Who leased it.
        by: String,
        /// The address.
        ip: IpAddr,
        /// What is wrong with it.
        why: String,
    },
    /// Another IPAM leased an address that is held here.
    #[error("the address {ip}, leased by {by}: {why}")]
    ExternalHeld {
        /// Who leased it.
        by: String,
        /// The address.
        ip: IpAddr,
        /// Who holds it.
        why: String,
    },
    /// The container is to be masqueraded, and another IPAM leased its addresses.
    #[error(
        "masquerading is asked for (`ipMasq`), and the node masquerades its own pools, not addresses that {by} leased"
    )]
    ExternalNotMasqueraded {
        /// Who leased it.
        by: String,
    },
    /// A route by a gateway that is not the endpoint's.
    #[error("the route to {route} is to go by {asked}, and the gateway is {gateway}")]
    RouteGateway {
        /// Destination.
        route: IpNet,
        /// The gateway asked for.
        asked: IpAddr,
        /// The endpoint's.
        gateway: IpAddr,
    },
    /// A route of a family that the endpoint has no address of.
    #[error("the route to {route} has no gateway: the endpoint has no address of its family")]
    RouteFamily {
        /// Destination.
        route: IpNet,
    },
    /// The container is to be masqueraded, and the node does not do that.
    #[error("masquerading is asked for (`ipMasq`), and this node's agent runs with --masquerade off")]
    MasqueradeOff,
    /// The container is to be masqueraded, and its pool is not.
    #[error("masquerading is asked for (`ipMasq`), and containers of pool {0} keep their addresses")]
    PoolNotMasqueraded(PoolName),
    /// The node does not masquerade, so it has no table for published ports.
    #[error("{0}: this node publishes no ports, because its agent runs with --masquerade off")]
    PortsOff(Publish),
    /// The container gets no address of the host IP's family.
    #[error("{0}: the container gets no {1} address, because pool {2} has none")]
    PortFamily(Publish, &'static str, PoolName),
    /// Another endpoint has published the port.
    #[error("{port}: endpoint {id} ({attachment}) has published this port already")]
    PortTaken {
        /// The port that is asked for.
        port: Publish,
        /// That endpoint.
        id: EndpointId,
        /// Its attachment.
        attachment: Attachment,
    },
    /// Another endpoint is on the link that another plugin made.
    #[error("another plugin made the interface, and endpoint {id} of {attachment} is on its link already")]
    LinkTaken {
        /// That endpoint.
        id: EndpointId,
        /// Its attachment.
        attachment: Attachment,
    },
    /// The interface that another plugin made does not have an address that the plugin told.
    #[error("the plugin that made the interface told the address {ip}, and {ifname} in the container does not have it")]
    NotOnLink {
        /// The address.
        ip: IpAddr,
        /// The interface.
        ifname: IfName,
    },
    /// The interface that another plugin made does not have the MAC address that the runtime asks for.
    #[error("MAC address {asked} is asked for, and the plugin that made {ifname} in the container gave it {has}")]
    OtherMac {
        /// The one asked for.
        asked: MacAddr,
        /// Its own.
        has: MacAddr,
        /// The interface.
        ifname: IfName,
    },
    /// The interface of another plugin's cannot be taken.
    #[error(transparent)]
    PluginLink(KernelError),
    /// The node lacks an address that ports are to be published on, or a process holds a port.
    #[error(transparent)]
    Ports(KernelError),
    /// It failed, and so did steps of its undo.
    #[error("{cause}; and undoing it: {left}")]
    NotUndone {
        /// Why the create failed.
        cause: Box<Self>,
        /// What is left of it.
        left: RemoveError,
    },
}
