//! `wharf endpoint ...`.

use wharf_api::{DeleteQuery, Endpoint, EndpointFilter, EndpointPatch, Health, MendedBy, RegenerateLevel};

use super::{Context, describe, watch};
use crate::{
    args::{
        Choice, DeleteArgs, EndpointCommand, EndpointSetting, LabelChanges, Labels, ListFilter, NamespaceName, changed,
    },
    error::{CliError, Exit},
    output::remark,
    render::{
        audit::words,
        endpoint::{self, Columns},
        proxy, text,
    },
    target::Target,
};

pub(super) async fn run(cx: &Context, command: EndpointCommand) -> Result<Exit, CliError> {
    match command {
        EndpointCommand::List(filter) => list(cx, filter).await,
        EndpointCommand::Get { id: None, choice } => {
            let columns = Columns { wide: cx.out.is_wide(), labels: false };
            table(cx, &EndpointFilter::default(), &choice, columns).await
        }
        EndpointCommand::Get { id: Some(_), choice: Choice { selector: Some(_), .. } } => {
            Err(CliError::usage("show an endpoint: an ID and --selector exclude each other")
                .hint("leave one of them out"))
        }
        EndpointCommand::Get { id: Some(id), choice } => {
            let e = cx.client.endpoint(&named(&id, choice.namespace.as_ref())).await?;
            let redirects = if cx.out.is_table() { redirects(cx, e.id).await } else { Vec::new() };
            cx.out.emit(&e, |style| endpoint::get(&e, &redirects, style))?;
            Ok(Exit::Ok)
        }
        EndpointCommand::Describe { id, namespace } => describe::endpoint(cx, &named(&id, namespace.as_ref())).await,
        EndpointCommand::Log { id } => {
            let entries = cx.client.endpoint_log(id.as_str()).await?;
            cx.out.emit(&entries, |style| endpoint::log(&entries, style))?;
            Ok(Exit::Ok)
        }
        EndpointCommand::Health { id } => {
            let h = cx.client.endpoint_health(id.as_str()).await?;
            cx.out.emit(&h, |style| endpoint::endpoint_health(&h, style))?;
            Ok(Exit::well(h.overall <= Health::Pending))
        }
        EndpointCommand::Labels { id, changes, set } => labels(cx, &id, changes, set).await,
        EndpointCommand::Regenerate { id, level } => regenerate(cx, &id, level).await,
        EndpointCommand::Delete(args) => delete(cx, args).await,
        EndpointCommand::Config { id, settings, trace } => config(cx, &id, settings, trace).await,
    }
}

/// With a namespace, the id is a pod name.
fn named(id: &Target, namespace: Option<&NamespaceName>) -> String {
    match namespace {
        Some(NamespaceName(namespace)) => format!("pod-name:{namespace}/{}", id.as_str()),
        None => id.as_str().to_owned(),
    }
}

async fn list(cx: &Context, args: ListFilter) -> Result<Exit, CliError> {
    let ListFilter { choice, container_id, network, state, label, pod_name, wide, show_labels, watch } = args;
    let filter = EndpointFilter { container_id, network, state, label, pod_name };
    let columns = Columns { wide: wide || cx.out.is_wide(), labels: show_labels };
    if watch {
        return watch::run(cx, filter, &choice, columns).await;
    }
    table(cx, &filter, &choice, columns).await
}

async fn table(cx: &Context, filter: &EndpointFilter, choice: &Choice, columns: Columns) -> Result<Exit, CliError> {
    let mut endpoints = cx.client.endpoints(filter).await?;
    endpoints.retain(|e| choice.has(e));
    cx.out.emit(&endpoints, |style| endpoint::list(&endpoints, style, columns))?;
    Ok(Exit::Ok)
}

/// Supplementary: a failed request becomes a remark.
pub(super) async fn redirects(cx: &Context, id: u16) -> Vec<String> {
    match cx.client.proxy().await {
        Ok(view) => proxy::of_endpoint(&view, id),
        Err(error) => vec![format!("not known: {error}")],
    }
}

/// Resolves the target once for all requests of a command.
async fn one(cx: &Context, target: &Target) -> Result<String, CliError> {
    Ok(cx.client.endpoint(target.as_str()).await?.id.to_string())
}

async fn patch(cx: &Context, id: &str, patch: EndpointPatch) -> Result<Endpoint, CliError> {
    Ok(cx.client.patch_endpoint(id, &patch).await?)
}

async fn labels(cx: &Context, id: &Target, changes: Vec<LabelChanges>, set: Vec<Labels>) -> Result<Exit, CliError> {
    let replaces = !set.is_empty();
    let mut all = LabelChanges::all(changes)?;
    all.extend(LabelChanges::set(set)?);
    let endpoint = cx.client.endpoint(id.as_str()).await?;
    let id = endpoint.id.to_string();
    if !all.is_empty() {
        let labels = changed(if replaces { &[] } else { &endpoint.labels }, all);
        patch(cx, &id, EndpointPatch { labels: Some(labels), ..EndpointPatch::default() }).await?;
    }
    let l = cx.client.endpoint_labels(&id).await?;
    cx.out.emit(&l, |style| endpoint::labels(&l, style))?;
    Ok(Exit::Ok)
}

async fn regenerate(cx: &Context, id: &Target, level: RegenerateLevel) -> Result<Exit, CliError> {
    let e = patch(cx, id.as_str(), EndpointPatch { regenerate: Some(level), ..EndpointPatch::default() }).await?;
    cx.out.emit(&e, |_| endpoint::regenerated(&e))?;
    // A failed build keeps the last state; only the kernel shows a repair.
    let health = cx.client.endpoint_health(&e.id.to_string()).await?;
    for f in health.findings.iter().filter(|f| f.mended_by != MendedBy::Nobody) {
        remark(&format!("still amiss: {}", words(f)));
        remark(&format!("  -> {}", text::safe(&f.remedy)));
    }
    Ok(Exit::well(e.status.last_error.is_none() && health.overall <= Health::Pending))
}

async fn delete(cx: &Context, args: DeleteArgs) -> Result<Exit, CliError> {
    let DeleteArgs { id, container_id, keep_ip, epoch } = args;
    let query = DeleteQuery { no_ip_release: keep_ip.then_some(true), epoch, ..DeleteQuery::default() };
    let result = match (id, container_id) {
        (Some(target), _) => cx.client.delete_endpoint(target.as_str(), &query).await?,
        (None, Some(container)) => cx.client.delete_container(&container, &query).await?,
        (None, None) => return Err(CliError::usage("name an endpoint, or a container with --container-id")),
    };
    cx.out.emit(&result, |_| endpoint::deleted(&result))?;
    Ok(Exit::well(result.errors.is_empty()))
}

async fn config(
    cx: &Context,
    id: &Target,
    settings: Vec<EndpointSetting>,
    trace: Option<bool>,
) -> Result<Exit, CliError> {
    let changes_policy = !settings.is_empty();
    let change = change(settings, trace)?;
    let id = one(cx, id).await?;
    if change != EndpointPatch::default() {
        let e = patch(cx, &id, change).await?;
        if changes_policy {
            let redirects = if cx.out.is_table() { redirects(cx, e.id).await } else { Vec::new() };
            cx.out.emit(&e, |style| endpoint::get(&e, &redirects, style))?;
            return Ok(Exit::Ok);
        }
    }
    let c = cx.client.endpoint_config(&id).await?;
    cx.out.emit(&c, |style| endpoint::config(&c, style))?;
    Ok(Exit::Ok)
}

/// Rejects repeated settings: merging would hide the mistake.
fn change(settings: Vec<EndpointSetting>, trace: Option<bool>) -> Result<EndpointPatch, CliError> {
    let mut patch = EndpointPatch { trace, ..EndpointPatch::default() };
    for setting in settings {
        let twice = match setting {
            EndpointSetting::Enforcement(mode) => {
                patch.policy_enforcement.replace(mode).map(|_| "policy-enforcement".to_owned())
            }
            EndpointSetting::Port(name, port) => {
                patch.named_ports.insert(name.clone(), port).map(|_| format!("port.{name}"))
            }
            EndpointSetting::Sources(prefixes) => {
                patch.source_prefixes.replace(prefixes).map(|_| "source-prefixes".to_owned())
            }
        };
        if let Some(name) = twice {
            return Err(CliError::usage(format!("{name} is set twice")));
        }
    }
    Ok(patch)
}
