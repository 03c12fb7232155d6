//! Flow tables: garbage collection and API view.

use std::time::Duration;

use wharf_api as api;
use wharf_common::FlowState;
use wharf_core::{
    flow::{Flow, FlowEnd, FlowFilter},
    kernel::{Kernel, KernelError},
};
use wharf_kit::clock;

use crate::node::flows::{Collection, Flows};

/// Controller name.
pub const CONTROLLER: &str = "flows";
/// The shortest timeout: of a closed flow.
pub const INTERVAL: Duration = Duration::from_secs(10);

/// Collects expired flows and keeps the usage.
///
/// # Errors
/// The kernel refused; the last usage stays.
pub async fn collect(kernel: &dyn Kernel, flows: &Flows) -> Result<(), KernelError> {
    let usage = kernel.collect_flows().await?;
    flows.note(Collection { usage, at_unix_ms: clock::unix_ms() });
    Ok(())
}

/// At most `limit` matching flows, sorted.
pub async fn list(kernel: &dyn Kernel, filter: &FlowFilter, limit: usize) -> Result<api::FlowList, KernelError> {
    let mut found = kernel.observe_flows(filter, limit).await?;
    found.flows.sort_unstable();
    Ok(api::FlowList { flows: found.flows.iter().map(in_api).collect(), more: found.more })
}

fn in_api(flow: &Flow) -> api::Flow {
    let end = |end: FlowEnd| api::FlowEnd { address: end.address, port: end.port };
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    api::Flow {
        protocol: api::FlowProtocol(flow.protocol),
        source: end(flow.source),
        destination: end(flow.destination),
        state: match flow.state {
            FlowState::New => api::FlowState::New,
            FlowState::Established => api::FlowState::Established,
            FlowState::Closing => api::FlowState::Closing,
            FlowState::Closed => api::FlowState::Closed,
        },
        owner: flow.owner.map(wharf_core::ids::EndpointId::get),
        by_stack: flow.by_stack,
        by_proxy: flow.by_proxy,
        kept: flow.kept,
        idle_ms: millis(flow.idle),
        left_ms: millis(flow.left),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_the_timeouts_of_each_state_and_protocol() {
        use wharf_common::{
            flow::{ICMP, SCTP, TCP, UDP},
            map,
        };
        const OTHER: u8 = 47;
        let page = include_str!("../../docs/connectivity.md");
        let told = |state: FlowState| {
            let name = format!("| `{}` |", state.as_str());
            let row = page.lines().find_map(|line| line.strip_prefix(&name)).expect("a row");
            row.split('|').skip(1).take(5).map(|cell| cell.trim().replace(',', "")).collect::<Vec<_>>()
        };
        for state in FlowState::ALL.iter().copied() {
            let is_open = matches!(state, FlowState::New | FlowState::Established);
            let time = |protocol| match protocol {
                TCP | SCTP => state.timeout(protocol).to_string(),
                _ if is_open => state.timeout(protocol).to_string(),
                _ => String::new(),
            };
            assert_eq!(told(state), [TCP, UDP, SCTP, ICMP, OTHER].map(time), "{}", state.as_str());
        }
        for number in
            [map::FLOWS_KEPT_MAX, map::FLOWS_RECENT_MAX, map::FLOWS_NEW_MAX, map::FLOWS_QUOTA, map::FLOWS_PER_TICK]
        {
            let thousands = format!("{},{:03}", number / 1_000, number % 1_000);
            assert!(page.contains(&thousands), "{thousands}");
        }
    }
}
