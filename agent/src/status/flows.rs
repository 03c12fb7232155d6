//! The flow tables at the last collection.

use std::sync::Arc;

use wharf_api::{ComponentStatus, FlowStatus, Health};
use wharf_core::flow::FlowUsage;

use super::{Source, of};
use crate::node::{
    flows::{Collection, Flows},
    part::Fill,
};

pub(super) fn source() -> Source {
    Source {
        name: "flows",
        look: |node| Box::pin(async move { look(&node.flows) }),
        silent: |_| (Health::Degraded, "waits for the results of the last collection".into()),
    }
}

fn look(flows: &Flows) -> Fill {
    let recent = flows.recent();
    Arc::new(move |status| {
        let Some((last, before)) = recent else {
            let message = "not known before the first collection";
            status.components.push(ComponentStatus::new("flows", Health::Pending, message));
            return;
        };
        status.network.flows = Some(in_api(&last));
        status.components.push(component(&last.usage, &before.usage));
    })
}

fn in_api(collection: &Collection) -> FlowStatus {
    let FlowUsage { rows, limit, expired, orphaned, over_quota, no_room, untracked, took, busiest: _ } =
        collection.usage;
    FlowStatus {
        rows,
        limit,
        expired,
        orphaned,
        over_quota,
        no_room,
        untracked,
        collected_unix_ms: collection.at_unix_ms,
        took_us: u64::try_from(took.as_micros()).unwrap_or(u64::MAX),
    }
}

fn component(last: &FlowUsage, before: &FlowUsage) -> ComponentStatus {
    let share = if last.limit > 0 { last.rows as f64 * 100.0 / last.limit as f64 } else { 0.0 };
    let mut message = format!("{} of {} tracked ({share:.1} %)", last.rows, last.limit);
    let grown = |of: fn(&FlowUsage) -> u64| of(last).saturating_sub(of(before));
    let (quota, full, rate) = (grown(|u| u.over_quota), grown(|u| u.no_room), grown(|u| u.untracked));
    let nearly_full = last.is_nearly_full();
    if nearly_full {
        message += "; flows that come when all are taken may be forgotten while they last";
    }
    for (packets, why) in [
        (full, "of flows for which there is no room"),
        (quota, "of an endpoint with as many flows as one may have"),
        (rate, "of an endpoint that begins more flows a second than are tracked"),
    ] {
        if packets > 0 {
            message += &format!("; {packets} packets in the last minute {why}");
        }
    }
    // Caused by containers: the node's health is Ok.
    let amiss = nearly_full || quota + full + rate > 0;
    if let Some((endpoint, flows)) = last.busiest.filter(|_| amiss) {
        message += &format!("; the most are of endpoint {endpoint} ({flows})");
    }
    if amiss {
        message += ": `wharf bpf ct list` shows who opens them, `wharf bpf ct flush` removes them";
    }
    ComponentStatus::new("flows", of(amiss, Health::Degraded), message).by_containers(Health::Ok)
}

#[cfg(test)]
mod tests {
    use wharf_core::ids::EndpointId;

    use super::*;

    #[test]
    fn a_table_that_fills_and_flows_that_are_not_kept_are_told() {
        let usage = FlowUsage { rows: 79, limit: 100, over_quota: 5, no_room: 6, untracked: 7, ..FlowUsage::default() };
        let row = component(&usage, &usage);
        assert_eq!((row.health, row.message.as_str()), (Health::Ok, "79 of 100 tracked (79.0 %)"), "what was is past");
        let cases: [(FlowUsage, &str); 4] = [
            (FlowUsage { rows: 80, ..usage }, "when all are taken"),
            (FlowUsage { over_quota: 8, ..usage }, "3 packets in the last minute of an endpoint with as many flows"),
            (FlowUsage { no_room: 8, ..usage }, "2 packets in the last minute of flows for which there is no room"),
            (FlowUsage { untracked: 8, ..usage }, "1 packets in the last minute of an endpoint that begins more"),
        ];
        for (now, told) in cases {
            let row = component(&now, &usage);
            assert_eq!((row.health, row.readiness()), (Health::Degraded, Health::Ok), "{now:?}");
            assert!(row.message.contains(told) && row.message.contains("`wharf bpf ct list`"), "{}", row.message);
        }
        let busiest = EndpointId::try_from(7).ok().map(|id| (id, 98_304));
        let row = component(&FlowUsage { rows: 80, busiest, ..usage }, &usage);
        assert!(row.message.contains("; the most are of endpoint 7 (98304)"), "{}", row.message);
        let anew = component(&FlowUsage { limit: 100, ..FlowUsage::default() }, &usage);
        assert_eq!(anew.health, Health::Ok, "tables that were made anew count from zero");
    }
}
