//! Lists of endpoints, with lost links.

use std::{collections::BTreeSet, sync::Arc};

use wharf_api::Endpoint;

use super::{Unknown, look};
use crate::{
    endpoint,
    node::{
        Node,
        endpoint::{Handle, api_endpoint},
        looks::Purpose,
    },
};

/// API views with link problems, within [`super::DEADLINE`].
pub async fn with_problems(node: &Arc<Node>, purpose: Purpose, handles: &[Handle]) -> Vec<Endpoint> {
    let unlinked = unlinked(node, purpose, handles.to_vec()).await;
    let masquerades = node.life.config.masquerade.is_some();
    let shown = |handle: &Handle| {
        let mut shown = handle.shared.read(|view| api_endpoint(view, masquerades));
        shown.status.problem = match &unlinked {
            Ok(ids) => ids.contains(&handle.id).then(|| "its link is gone".to_owned()),
            Err(why) => Some(format!("whether its link is there is not known: {why}")),
        };
        shown
    };
    handles.iter().map(shown).collect()
}

async fn unlinked(
    node: &Arc<Node>,
    purpose: Purpose,
    handles: Vec<Handle>,
) -> Result<BTreeSet<wharf_core::ids::EndpointId>, Unknown> {
    if handles.is_empty() {
        return Ok(BTreeSet::new());
    }
    let life = Arc::clone(&node.life);
    look(node, purpose, async move { endpoint::look::unlinked(&*life.kernel, &life.endpoints.jobs, &handles).await })
        .await
}
