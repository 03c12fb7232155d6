//! Endpoints whose records were lost with a damaged store.
//!
//! Their containers live, and their programs police them as before; removing what no record explains would cut them
//! off. So they stay as they are: their ids are not given out again, their addresses are held under the name of their
//! link, and `wharf audit` shows them, so that `wharf audit --repair` takes them away when the operator wants it.
//! A runtime's DEL finds nothing and succeeds; the link then goes with the container's namespace, and its address at
//! the agent's next start.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use wharf_core::{
    endpoint::parse_host_ifname,
    ids::EndpointId,
    kernel::{Kernel, KernelDump},
    store::{Change, Lease, LeaseOwner},
};

use crate::{clock, node::Node, sync::lock};

/// Owner of an address whose endpoint's record was lost, before the link's name.
const PREFIX: &str = "lost-record:";

/// The link that a lost endpoint's address is held for.
#[must_use]
pub fn link_of(lease: &Lease) -> Option<&str> {
    match &lease.owner {
        LeaseOwner::Caller { name } => name.strip_prefix(PREFIX),
        LeaseOwner::Attachment { .. } | LeaseOwner::Node => None,
    }
}

/// Keeps what the kernel holds; removes only program sets that no link uses.
pub async fn keep<K: Kernel>(node: &Arc<Node<K>>, dump: &KernelDump) {
    let mut living = BTreeSet::new();
    let mut held = Vec::new();
    for link in &dump.links {
        let Some((id, _)) = parse_host_ifname(&link.name) else { continue };
        living.insert(id);
        node.registry.claim_id(id);
        for row in dump.endpoint_rows.iter().filter(|r| r.ifindex == link.ifindex) {
            held.extend(hold(node, row.address, &link.name));
        }
    }
    tracing::warn!(
        links = living.len(),
        "the records of this boot were lost; containers keep their network, and `wharf audit` shows them"
    );
    if let Err(error) = node.store.commit(held).await {
        tracing::warn!("hold the addresses of lost endpoints: {error}");
    }
    for (directory, _) in &dump.pins {
        let Ok(id) = directory.parse::<EndpointId>() else { continue };
        if !living.contains(&id)
            && node.registry.get(id).is_none()
            && let Err(error) = node.kernel.remove_programs(id).await
        {
            tracing::warn!(endpoint = id.get(), "remove programs that nothing uses: {error}");
        }
    }
}

/// Holds an address in memory; the change that makes it durable.
fn hold<K: Kernel>(node: &Node<K>, ip: IpAddr, link: &str) -> Option<Change> {
    let pool = node.config.pools.iter().find(|p| p.cidrs.iter().any(|c| c.contains(&ip)))?.name.clone();
    let owner = LeaseOwner::Caller { name: format!("{PREFIX}{link}") };
    let lease = Lease { ip, pool, owner, since_unix_ms: clock::unix_ms() };
    match lock(&node.ipam).claim(lease.clone()) {
        Ok(()) => Some(Change::PutLease(lease)),
        Err(error) => {
            tracing::warn!(%ip, link, "hold the address of a lost endpoint: {error}");
            None
        }
    }
}
