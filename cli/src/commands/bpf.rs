//! `wharf bpf ...`.

use std::collections::BTreeSet;

use wharf_api::{BpfMap, EndpointFilter, FlowQuery, MetricRow};

use super::{
    Context, monitor,
    repeat::{self, Answer},
};
use crate::{
    args::{
        BpfCommand, BpfCtCommand, BpfEndpointCommand, BpfEventsCommand, BpfMapCommand, BpfMetricsCommand,
        BpfPolicyCommand, EventKind, Follow,
    },
    error::{CliError, Exit},
    render::{bpf, flow, policy, text},
    target::Target,
};

/// Map from addresses to endpoints.
const ENDPOINTS: &str = "ENDPOINTS";
const OTHERS_MOST: usize = 8;

pub(super) async fn run(cx: &Context, command: BpfCommand) -> Result<Exit, CliError> {
    match command {
        BpfCommand::Endpoint(BpfEndpointCommand::List(follow)) => dump(cx, ENDPOINTS, follow).await,
        BpfCommand::Metrics(BpfMetricsCommand::List { dropped, endpoint, follow }) => {
            metrics(cx, dropped, endpoint.as_ref(), follow).await
        }
        BpfCommand::Events(BpfEventsCommand::List(mut args)) => {
            if args.filter.kinds.is_empty() {
                args.filter.kinds = vec![EventKind::Drop, EventKind::Trace];
            }
            monitor::run(cx, args.filter, Some(args.count), Some(args.time)).await
        }
        BpfCommand::Ct(BpfCtCommand::List { filter, limit, follow }) => {
            let query = FlowQuery { limit: Some(limit), ..filter.query() };
            let ask = async || {
                let value = cx.client.flows(&query).await?;
                let more = text::count(value.more, "more flow");
                let told = format!("{more} not shown; a filter or a larger --limit shows others");
                Ok(Answer { remark: (value.more > 0).then_some(told), value })
            };
            let wide = cx.out.is_wide();
            repeat::show(cx, follow.watch, ask, |found, style| flow::list(&found.flows, style, wide)).await?;
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
        BpfCommand::Map(BpfMapCommand::List { all, follow }) => {
            let ask = async || maps(cx, all).await;
            repeat::show(cx, follow.watch, ask, |maps, style| bpf::maps(maps, style)).await?;
            Ok(Exit::Ok)
        }
        BpfCommand::Map(BpfMapCommand::Get { name }) => dump(cx, &name.0, Follow::default()).await,
    }
}

/// `all` includes maps of prepared programs.
async fn maps(cx: &Context, all: bool) -> Result<Answer<Vec<BpfMap>>, CliError> {
    let mut maps = cx.client.maps().await?;
    if all {
        return Ok(Answer::plain(maps));
    }
    let endpoints = cx.client.endpoints(&EndpointFilter::default()).await?;
    let endpoints: BTreeSet<u16> = endpoints.into_iter().map(|e| e.id).collect();
    let hidden = hide_prepared(&mut maps, &endpoints);
    let told = format!("{} of prepared programs not shown; `--all` shows them", text::count(hidden, "map"));
    Ok(Answer { value: maps, remark: (hidden > 0).then_some(told) })
}

/// Selects by the id in `ID/NAME`; returns the number of removed maps.
fn hide_prepared(maps: &mut Vec<BpfMap>, endpoints: &BTreeSet<u16>) -> u64 {
    let before = maps.len();
    maps.retain(|map| match map.name.split_once('/') {
        Some((id, _)) => id.parse().map_or(true, |id: u16| endpoints.contains(&id)),
        None => true,
    });
    u64::try_from(before.saturating_sub(maps.len())).unwrap_or(u64::MAX)
}

async fn dump(cx: &Context, name: &str, follow: Follow) -> Result<Exit, CliError> {
    // The API accepts `.` for `/`.
    let name = name.replace('/', ".");
    let ask = async || Ok(Answer::plain(cx.client.map(&name).await?));
    repeat::show(cx, follow.watch, ask, bpf::dump).await?;
    Ok(Exit::Ok)
}

async fn metrics(cx: &Context, dropped: bool, endpoint: Option<&Target>, follow: Follow) -> Result<Exit, CliError> {
    let only = match endpoint {
        Some(target) => Some(cx.client.endpoint(target.as_str()).await?.id),
        None => None,
    };
    let ask = async || {
        let mut rows = cx.client.metrics_rows().await?;
        let remark = only.and_then(|id| counted_elsewhere(&rows, id));
        rows.retain(|m| (!dropped || m.dropped) && (only.is_none() || m.endpoint == only));
        Ok(Answer { value: rows, remark })
    };
    repeat::show(cx, follow.watch, ask, |rows, style| bpf::metrics(rows, style)).await?;
    Ok(Exit::Ok)
}

/// A drop by the policy of `id` counts for the peer.
fn counted_elsewhere(rows: &[MetricRow], id: u16) -> Option<String> {
    let by_peer = |m: &&MetricRow| m.reason == monitor::BY_PEER && m.packets > 0 && m.endpoint != Some(id);
    let others: BTreeSet<u16> = rows.iter().filter(by_peer).filter_map(|m| m.endpoint).collect();
    let named: Vec<String> = others.iter().take(OTHERS_MOST).map(ToString::to_string).collect();
    let more = if others.len() > OTHERS_MOST { ", ..." } else { "" };
    (!named.is_empty()).then(|| {
        format!(
            "a packet that the policy of endpoint {id} drops is counted at its other end, as {}; endpoints with this count: \
             {}{more}. `wharf bpf policy get {id}` counts the drops of endpoint {id} by rule",
            monitor::BY_PEER,
            named.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::sample;

    #[test]
    fn maps_of_prepared_programs_are_left_out() {
        let mut maps: Vec<BpfMap> =
            ["ENDPOINTS", "7/CONFIG", "12/CONFIG", "12/METRICS"].map(|name| sample::map(name, "array", None, 1)).into();
        assert_eq!(hide_prepared(&mut maps, &BTreeSet::from([7])), 2);
        let names: Vec<&str> = maps.iter().map(|map| map.name.as_str()).collect();
        assert_eq!(names, ["ENDPOINTS", "7/CONFIG"]);
    }

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
