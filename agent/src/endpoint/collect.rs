//! CNI GC: deletes attachments of a network that the runtime no longer lists.

use std::{
    collections::{BTreeSet, HashSet},
    sync::Arc,
    time::Duration,
};

use tokio::time::{Instant, timeout_at};
use wharf_api::{DeleteResult, GcAttachment};
use wharf_core::{
    ids::{Attachment, NetworkName},
    kernel::Kernel,
    plan::DeleteOptions,
    store::LeaseOwner,
    timeline::{Operation, Outcome},
};

use crate::{
    endpoint::{delete, unknown},
    node::{aside::Wanted, endpoint::Handle, health, lifecycle::Lifecycle},
    sync::lock,
};

/// Deletes every endpoint of the network that is not listed, and unlisted leftovers: orphans, records out of service,
/// unfinished undos, leases without an endpoint.
pub async fn collect<K: Kernel>(
    life: &Arc<Lifecycle<K>>,
    network: &NetworkName,
    valid: &BTreeSet<GcAttachment>,
) -> DeleteResult {
    let is_stale = |a: &Attachment| {
        a.network == *network
            && !health::is_reserved(a)
            && !valid.contains(&GcAttachment { container_id: a.container_id.to_string(), ifname: a.ifname.to_string() })
    };
    // An endpoint under creation is not stale: the runtime cannot have listed it yet.
    let stale = |h: &Handle| h.shared.read(|v| v.committed && is_stale(&v.record.attachment));
    let handles: Vec<Handle> = life.registry.list().into_iter().filter(stale).collect();
    warn_of_living(&*life.kernel, network, &handles).await;
    let mut result = delete::delete(life, handles, DeleteOptions::default(), delete::Answer::Finished).await;

    let mut left: HashSet<Attachment> = life.orphans.attachments().into_iter().collect();
    left.extend(life.out_of_service.attachments());
    left.extend(life.unfinished.attachments());
    left.extend(lock(&life.addresses.ipam).owned_by(|_| true).into_iter().filter_map(|lease| match lease.owner {
        LeaseOwner::Attachment { attachment, .. } => Some(attachment),
        LeaseOwner::Caller { .. } | LeaseOwner::Node => None,
    }));
    // An attachment with an endpoint in the registry is not a leftover, whatever its state.
    left.retain(|a| is_stale(a) && life.registry.by_interface(&a.container_id, &a.ifname).is_none());
    for attachment in left {
        unknown::join(&mut result, unknown::remove(life, &Wanted::of(&attachment)).await);
    }
    result
}

/// Total time that [`warn_of_living`] may delay a GC: its result is only a warning.
const LOOKS: Duration = Duration::from_secs(1);

/// Notes the endpoints whose network namespace still exists. A GC lists the attachments of one runtime. When two
/// runtimes share a network name, each GC deletes the endpoints of the other; an existing namespace is the sign.
async fn warn_of_living<K: Kernel>(kernel: &K, network: &NetworkName, handles: &[Handle]) {
    let (mut living, until) = (Vec::new(), Instant::now() + LOOKS);
    for handle in handles {
        let (netns, attachment) = handle.shared.read(|v| (v.record.netns.clone(), v.record.attachment.to_string()));
        let look = timeout_at(until, kernel.observe_netns(&netns.path)).await;
        if look.is_ok_and(|seen| seen.is_ok_and(|there| there.same(&netns))) {
            let text =
                format!("the runtime's GC of network {network} does not list it; its network namespace still exists");
            handle.shared.note(Operation::Notice, "gc", None, Outcome::Warning, &text);
            living.push(attachment);
        }
    }
    if let Some(first) = living.first() {
        tracing::warn!(
            network = network.as_str(),
            endpoints = living.len(),
            first,
            "GC deletes endpoints whose network namespaces still exist; if their containers run, another runtime uses the \
             same network name: give each runtime a name of its own (docs/cni.md)"
        );
    }
}
