//! `wharf bpf ...`.

use std::collections::BTreeSet;

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
/// Most endpoints that a remark about counters names.
const OTHERS_MOST: usize = 8;

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
    let all = cx.client.metrics_rows().await?;
    let elsewhere = only.and_then(|id| counted_elsewhere(&all, id));
    let rows: Vec<MetricRow> =
        all.into_iter().filter(|m| (!dropped || m.dropped) && (only.is_none() || m.endpoint == only)).collect();
    cx.out.emit(&rows, |style| bpf::metrics(&rows, style))?;
    if let Some(elsewhere) = elsewhere.filter(|_| cx.out.is_table()) {
        remark(&elsewhere);
    }
    Ok(Exit::Ok)
}

/// Where drops by the policy of endpoint `id` are counted: at the other end of the packets.
fn counted_elsewhere(rows: &[MetricRow], id: u16) -> Option<String> {
    let by_peer = |m: &&MetricRow| m.reason == monitor::BY_PEER && m.packets > 0 && m.endpoint != Some(id);
    let others: BTreeSet<u16> = rows.iter().filter(by_peer).filter_map(|m| m.endpoint).collect();
    let named: Vec<String> = others.iter().take(OTHERS_MOST).map(ToString::to_string).collect();
    let more = if others.len() > OTHERS_MOST { ", ..." } else { "" };
    (!named.is_empty()).then(|| {
        format!(
            "wharf: a packet that the policy of endpoint {id} drops is counted at its other end, as {}; endpoints with this count: \
             {}{more}. `wharf bpf policy get {id}` counts the drops of endpoint {id} by rule",
            monitor::BY_PEER,
            named.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_at_the_other_end_are_pointed_out() {
        let row = |endpoint, reason: &str, packets| MetricRow {
            endpoint,
            direction: "egress".to_owned(),
            reason: reason.to_owned(),
            dropped: true,
            packets,
            bytes: 0,
        };
        let own =
            [row(Some(9), monitor::BY_PEER, 1), row(Some(7), "policy-denied", 1), row(Some(7), monitor::BY_PEER, 0)];
        assert_eq!(counted_elsewhere(&own, 9), None);
        let remark = counted_elsewhere(&[row(Some(7), monitor::BY_PEER, 3)], 9).unwrap_or_default();
        assert!(remark.contains("endpoints with this count: 7. `wharf bpf policy get 9`"), "{remark}");
    }
}
