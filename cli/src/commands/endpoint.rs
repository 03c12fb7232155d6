//! `wharf endpoint ...`.

use wharf_api::{DeleteQuery, Endpoint, EndpointFilter, EndpointPatch, Health};

use super::Context;
use crate::{
    args::{DeleteArgs, EndpointCommand, Level, ListFilter},
    error::{CliError, Exit},
    render::endpoint,
    target::{Target, pick},
};

pub(super) async fn run(cx: &Context, command: EndpointCommand) -> Result<Exit, CliError> {
    match command {
        EndpointCommand::List(filter) => list(cx, filter).await,
        EndpointCommand::Get { id } => {
            let e = cx.client.endpoint(&resolve(cx, &id).await?.id).await?;
            cx.out.emit(&e, |style| endpoint::get(&e, style))?;
            Ok(Exit::Ok)
        }
        EndpointCommand::Log { id } => {
            let entries = cx.client.endpoint_log(&resolve(cx, &id).await?.id).await?;
            cx.out.emit(&entries, |style| endpoint::log(&entries, style))?;
            Ok(Exit::Ok)
        }
        EndpointCommand::Health { id } => {
            let h = cx.client.endpoint_health(&resolve(cx, &id).await?.id).await?;
            cx.out.emit(&h, |style| endpoint::endpoint_health(&h, style))?;
            Ok(Exit::well(h.overall <= Health::Pending))
        }
        EndpointCommand::Labels { id, set } => labels(cx, &id, set).await,
        EndpointCommand::Regenerate { id, level } => regenerate(cx, &id, level).await,
        EndpointCommand::Delete(args) => delete(cx, args).await,
        EndpointCommand::Config { id, trace } => config(cx, &id, trace).await,
    }
}

/// An endpoint as the API names it.
pub(super) struct Resolved {
    /// Id of the API.
    pub(super) id: String,
    /// Its epoch, when it was looked up: what is done next is meant for this attachment and no later one.
    epoch: Option<u64>,
}

/// A bare container id is looked up here, because a table shows only its beginning; the API takes the rest as it is.
pub(super) async fn resolve(cx: &Context, target: &Target) -> Result<Resolved, CliError> {
    match target {
        Target::Api(id) => Ok(Resolved { id: id.clone(), epoch: None }),
        Target::Container(text) => {
            let all = cx.client.endpoints(&EndpointFilter::default()).await?;
            let found = pick(text, &all)?;
            Ok(Resolved { id: found.id.to_string(), epoch: Some(found.epoch) })
        }
    }
}

async fn list(cx: &Context, args: ListFilter) -> Result<Exit, CliError> {
    let ListFilter { container_id, network, state, label, pod_name, wide } = args;
    let filter = EndpointFilter { container_id, network, state, label, pod_name };
    let endpoints = cx.client.endpoints(&filter).await?;
    cx.out.emit(&endpoints, |style| endpoint::list(&endpoints, style, wide))?;
    Ok(Exit::Ok)
}

async fn patch(cx: &Context, id: &str, patch: EndpointPatch) -> Result<Endpoint, CliError> {
    Ok(cx.client.patch_endpoint(id, &patch).await?)
}

async fn labels(cx: &Context, id: &Target, set: Vec<String>) -> Result<Exit, CliError> {
    let id = resolve(cx, id).await?.id;
    if !set.is_empty() {
        patch(cx, &id, EndpointPatch { labels: Some(set), ..EndpointPatch::default() }).await?;
    }
    let l = cx.client.endpoint_labels(&id).await?;
    cx.out.emit(&l, |style| endpoint::labels(&l, style))?;
    Ok(Exit::Ok)
}

async fn regenerate(cx: &Context, id: &Target, level: Level) -> Result<Exit, CliError> {
    let id = resolve(cx, id).await?.id;
    let e = patch(cx, &id, EndpointPatch { regenerate: Some(level.into()), ..EndpointPatch::default() }).await?;
    cx.out.emit(&e, |_| endpoint::regenerated(&e))?;
    // The agent answers when the build is over; a build that failed keeps the last good state and is tried again.
    Ok(Exit::well(e.status.last_error.is_none()))
}

async fn delete(cx: &Context, args: DeleteArgs) -> Result<Exit, CliError> {
    let DeleteArgs { id, container_id, keep_ip, epoch } = args;
    let mut query = DeleteQuery { no_ip_release: keep_ip.then_some(true), epoch, ..DeleteQuery::default() };
    let result = match (id, container_id) {
        (Some(target), _) => {
            let resolved = resolve(cx, &target).await?;
            query.epoch = query.epoch.or(resolved.epoch);
            cx.client.delete_endpoint(&resolved.id, &query).await?
        }
        (None, Some(container)) => cx.client.delete_container(&container, &query).await?,
        (None, None) => return Err(CliError::usage("name an endpoint, or a container with --container-id")),
    };
    cx.out.emit(&result, |_| endpoint::deleted(&result))?;
    Ok(Exit::well(result.errors.is_empty()))
}

async fn config(cx: &Context, id: &Target, trace: Option<bool>) -> Result<Exit, CliError> {
    let id = resolve(cx, id).await?.id;
    if trace.is_some() {
        patch(cx, &id, EndpointPatch { trace, ..EndpointPatch::default() }).await?;
    }
    let c = cx.client.endpoint_config(&id).await?;
    cx.out.emit(&c, |style| endpoint::config(&c, style))?;
    Ok(Exit::Ok)
}
