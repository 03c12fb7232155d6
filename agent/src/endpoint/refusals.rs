//! Logs refused listeners at the endpoints that use them.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use wharf_api::LogStatus;
use wharf_core::ids::{EndpointId, Epoch};

use crate::{
    node::{lifecycle::Lifecycle, registry::Registry},
    proxy::Redirects,
};

const TICK: Duration = Duration::from_secs(1);

/// Reasons by endpoint and listener.
pub type Told = BTreeMap<(EndpointId, Epoch, String), String>;

/// Runs until the agent stops.
pub async fn watch(life: Arc<Lifecycle>) {
    let mut told = Told::new();
    loop {
        tell(&*life.policy.proxy.redirects, &life.endpoints.registry, &mut told);
        tokio::select! {
            () = life.tasks.stop.cancelled() => return,
            () = tokio::time::sleep(TICK) => {}
        }
    }
}

/// Logs new refusals, forgets ended ones.
pub fn tell(redirects: &dyn Redirects, registry: &Registry, told: &mut Told) {
    if redirects.outstanding().is_empty() {
        told.clear();
        return;
    }
    let mut present = Told::new();
    for listener in redirects.look().listeners() {
        let Some(reason) = listener.refusal else { continue };
        let ids = listener.endpoints.into_iter().filter_map(|id| EndpointId::try_from(id).ok());
        for handle in ids.filter_map(|id| registry.get(id)) {
            let refusal = (handle.id, handle.epoch, listener.name.clone());
            if told.get(&refusal) != Some(&reason) {
                handle.shared.log(LogStatus::Failure, "proxy", format!("{} was refused: {reason}", listener.name));
            }
            present.insert(refusal, reason.clone());
        }
    }
    *told = present;
}
