//! `wharf bpf ...`.

use wharf_api::{FlowQuery, MetricRow};

use super::{Context, monitor};
use crate::{
    args::{
        BpfCommand, BpfCtCommand, BpfEndpointCommand, BpfEventsCommand, BpfMapCommand, BpfMetricsCommand,
        BpfPolicyCommand, EventKind,
    },
    error::{CliError, Exit},
    output::remark,
    render::{bpf, flow, policy, text},
    target::Target,
};

/// The shared map from an address to its endpoint.
const ENDPOINTS: &str = "ENDPOINTS";

pub(super) async fn run(cx: &Context, command: BpfCommand) -> Result<Exit, CliError> {
    match command {
        BpfCommand::Endpoint(BpfEndpointCommand::List) => dump(cx, ENDPOINTS).await,
        BpfCommand::Metrics(BpfMetricsCommand::List { dropped, endpoint }) => {
            metrics(cx, dropped, endpoint.as_ref()).await
        }
        BpfCommand::Events(BpfEventsCommand::List(mut args)) => {
            if args.filter.kinds.is_empty() {
                args.filter.kinds = vec![EventKind::Drop, EventKind::Trace];
            }
            monitor::run(cx, args.filter, Some(args.count), Some(args.time)).await
        }
        BpfCommand::Ct(BpfCtCommand::List { filter, limit }) => {
            let found = cx.client.flows(&FlowQuery { limit: Some(limit), ..filter.query() }).await?;
            cx.out.emit(&found, |style| flow::list(&found.flows, style, cx.out.is_wide()))?;
            if found.more > 0 && cx.out.is_table() {
                let more = text::count(found.more, "more flow");
                remark(&format!("wharf: {more} not shown; a filter or a larger --limit shows others"));
            }
            Ok(Exit::Ok)
        }
        BpfCommand::Ct(BpfCtCommand::Flush { filter, all }) => {
            let query = FlowQuery { all: all.then_some(true), ..filter.query() };
            let done = cx.client.remove_flows(&query).await?;
            cx.out.emit(&done, |_| format!("{} removed\n", text::count(done.removed, "flow")))?;
            Ok(Exit::Ok)
        }
        BpfCommand::Policy(BpfPolicyCommand::Get { endpoint }) => {
            let rules = cx.client.endpoint_policy(endpoint.as_str()).await?;
            cx.out.emit(&rules, |style| policy::rules(&rules, style, cx.out.is_wide()))?;
            Ok(Exit::Ok)
        }
        BpfCommand::Map(BpfMapCommand::List) => {
            let maps = cx.client.maps().await?;
            cx.out.emit(&maps, |style| bpf::maps(&maps, style))?;
            Ok(Exit::Ok)
        }
        BpfCommand::Map(BpfMapCommand::Get { name }) => dump(cx, &name.0).await,
    }
}

async fn dump(cx: &Context, name: &str) -> Result<Exit, CliError> {
    // The name is one path segment, in which the API takes `.` for the `/` of a per-endpoint map.
    let dump = cx.client.map(&name.replace('/', ".")).await?;
    cx.out.emit(&dump, |style| bpf::dump(&dump, style))?;
    Ok(Exit::Ok)
}

async fn metrics(cx: &Context, dropped: bool, endpoint: Option<&Target>) -> Result<Exit, CliError> {
    let only = match endpoint {
        Some(target) => Some(cx.client.endpoint(target.as_str()).await?.id),
        None => None,
    };
    let rows: Vec<MetricRow> = cx
        .client
        .metrics_rows()
        .await?
        .into_iter()
        .filter(|m| (!dropped || m.dropped) && (only.is_none() || m.endpoint == only))
        .collect();
    cx.out.emit(&rows, |style| bpf::metrics(&rows, style))?;
    Ok(Exit::Ok)
}
