//! CNI GC: deletes attachments that the runtime no longer lists.
//!
//! Runtimes may share a network name: other runtimes' endpoints stay while their namespaces exist.

use std::{
    collections::{BTreeSet, HashSet},
    sync::Arc,
    time::Duration,
};

use tokio::time::{Instant, timeout_at};
use wharf_api::{DeleteResult, GcAttachment, KeptEndpoint};
use wharf_core::{
    ids::{Attachment, NetworkName, RuntimeName},
    kernel::{Kernel, KernelErrorKind},
    plan::DeleteOptions,
    store::LeaseOwner,
    timeline::{Operation, Outcome},
};
use wharf_kit::sync::lock;

use crate::{
    endpoint::{delete, unknown},
    node::{aside::Wanted, endpoint::Handle, health, lifecycle::Lifecycle},
};

/// Deletes the network's unlisted endpoints and leftovers. `runtime`: sender of the list.
pub async fn collect(
    life: &Arc<Lifecycle>,
    network: &NetworkName,
    valid: &BTreeSet<GcAttachment>,
    runtime: Option<&RuntimeName>,
) -> DeleteResult {
    let is_stale = |a: &Attachment| {
        a.network == *network
            && !health::is_reserved(a)
            && !valid.contains(&GcAttachment { container_id: a.container_id.to_string(), ifname: a.ifname.to_string() })
    };
    let stale = |h: &Handle| h.shared.read(|v| v.committed && is_stale(&v.record.attachment));
    let unlisted = life.endpoints.registry.list().into_iter().filter(stale).collect();
    let (handles, kept) = spare_others(&*life.kernel, network, unlisted, runtime).await;
    warn_of_living(&*life.kernel, network, &handles).await;
    let mut result = delete::delete(life, handles, DeleteOptions::default(), delete::Answer::Finished).await;
    result.kept = kept;

    let leftovers = &life.endpoints.leftovers;
    let mut left: HashSet<Attachment> = leftovers.orphans.attachments().into_iter().collect();
    left.extend(leftovers.out_of_service.attachments());
    left.extend(leftovers.unfinished.attachments());
    left.extend(lock(&life.network.addresses.ipam).owned_by(|_| true).into_iter().filter_map(
        |lease| match lease.owner {
            LeaseOwner::Attachment { attachment, .. } => Some(attachment),
            LeaseOwner::Caller { .. } | LeaseOwner::Node => None,
        },
    ));
    left.retain(|a| is_stale(a) && life.endpoints.registry.by_interface(&a.container_id, &a.ifname).is_none());
    for attachment in left {
        unknown::join(&mut result, unknown::remove(life, &Wanted::of(&attachment)).await);
    }
    result
}

/// Bounds each of a GC's two rounds of namespace look-ups.
const LOOKS: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Seen {
    Living,
    Gone,
    Unknown,
}

async fn look(kernel: &dyn Kernel, handle: &Handle, until: Instant) -> Seen {
    let netns = handle.shared.read(|v| v.record.netns.clone());
    match timeout_at(until, kernel.observe_netns(&netns.path)).await {
        Ok(Ok(there)) if there.same(&netns) => Seen::Living,
        Ok(Ok(_)) => Seen::Gone,
        Ok(Err(e)) if matches!(e.kind, KernelErrorKind::NotFound | KernelErrorKind::NotANetns) => Seen::Gone,
        Ok(Err(_)) | Err(_) => Seen::Unknown,
    }
}

/// Other runtimes' endpoints stay unless their namespaces are certainly gone.
async fn spare_others(
    kernel: &dyn Kernel,
    network: &NetworkName,
    unlisted: Vec<Handle>,
    runtime: Option<&RuntimeName>,
) -> (Vec<Handle>, Vec<KeptEndpoint>) {
    let (mut stale, mut kept, until) = (Vec::new(), Vec::new(), Instant::now() + LOOKS);
    for handle in unlisted {
        let adder = handle.shared.read(|v| v.record.runtime.clone());
        match (adder, runtime) {
            (Some(adder), Some(runtime)) if adder != *runtime => {
                if look(kernel, &handle, until).await == Seen::Gone {
                    stale.push(handle);
                    continue;
                }
                let text =
                    format!("{runtime}'s GC of network {network} does not list it; {adder} added it, so it stays");
                handle.shared.note(Operation::Notice, "gc", None, Outcome::Ok, &text);
                kept.push(KeptEndpoint { endpoint: handle.id.get(), runtime: adder.to_string() });
            }
            _ => stale.push(handle),
        }
    }
    if let (Some(first), Some(runtime)) = (kept.first(), runtime) {
        tracing::info!(
            network = network.as_str(),
            %runtime,
            endpoints = kept.len(),
            first = first.endpoint,
            added_by = first.runtime,
            "GC keeps endpoints that another runtime added"
        );
    }
    (stale, kept)
}

/// Another runtime may have added them.
async fn warn_of_living(kernel: &dyn Kernel, network: &NetworkName, handles: &[Handle]) {
    let (mut living, until) = (Vec::new(), Instant::now() + LOOKS);
    for handle in handles {
        if look(kernel, handle, until).await == Seen::Living {
            let text =
                format!("the runtime's GC of network {network} does not list it; its network namespace still exists");
            handle.shared.note(Operation::Notice, "gc", None, Outcome::Warning, &text);
            living.push(handle.shared.read(|v| v.record.attachment.to_string()));
        }
    }
    if let Some(first) = living.first() {
        tracing::warn!(
            network = network.as_str(),
            endpoints = living.len(),
            first,
            "GC deletes endpoints whose network namespaces still exist; if their containers run, another runtime uses the \
             same network name: give each runtime another name (page \"wharf-cni, the CNI plugin\" of the documentation)"
        );
    }
}
