//! Limits each client's share of the connections to the node's proxies.
//!
//! The programs enforce the last count's limits ([`wharf_core::kernel::FlowKernel::limit_proxy_clients`]). An ended
//! connection frees its place at the next count, which therefore runs sooner after many opens: otherwise short
//! connections would reach the limit.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;
use wharf_core::{
    flow::ProxyClients,
    kernel::{Kernel, KernelError},
};
use wharf_proxy::Connections;

use crate::{
    node::{clients::Clients, lifecycle::Tasks},
    policy::Policy,
};

const CONTROLLER: &str = "proxy-clients";
const LOOK: Duration = Duration::from_millis(100);
/// Count interval while connections are open.
const BUSY: Duration = Duration::from_secs(1);
/// Count interval otherwise; limits are enforced for about 4 s.
const IDLE: Duration = Duration::from_secs(2);
/// Counts, which list all TCP sockets, take at most 1/`PART` of the time.
const PART: u32 = 20;
/// Effectively no limit: without an agent, ended connections free no places.
const NO_SHARE: u32 = u32::MAX / 2;

/// Maximum open connections per client.
#[must_use]
pub fn share() -> u32 {
    u32::try_from(Connections::here().of_client).unwrap_or(u32::MAX)
}

#[derive(Debug, Clone, Copy)]
struct Count {
    at: Instant,
    took: Duration,
    opened: u32,
    open: u64,
}

impl Count {
    fn is_over(self, opened: u32, share: u32, now: Instant) -> bool {
        let more = opened.wrapping_sub(self.opened);
        let wait = match more {
            _ if more > share / 4 => Duration::ZERO,
            0 if self.open == 0 => IDLE,
            _ => BUSY,
        };
        now.saturating_duration_since(self.at) >= wait.max((self.took * PART).min(IDLE))
    }
}

/// Runs while a proxy is enabled, until the agent stops.
pub async fn watch(kernel: Arc<dyn Kernel>, policy: Arc<Policy>, tasks: Tasks, clients: Arc<Clients>) {
    let share = share();
    // At once: clients may connect as soon as the agent serves.
    let (mut last, mut wait): (Option<Count>, _) = (None, Duration::ZERO);
    loop {
        tokio::select! {
            () = tasks.stop.cancelled() => break,
            () = tokio::time::sleep(wait) => {}
        }
        // Also before a rule redirects: limits precede its first connection.
        if !policy.proxy.redirects.enabled() {
            (last, wait) = (None, LOOK);
            continue;
        }
        let looked = async {
            let (opened, now) = (kernel.observe_opened_to_proxies().await?, Instant::now());
            if last.is_some_and(|last| !last.is_over(opened, share, now)) {
                return Ok(None);
            }
            let ProxyClients { open, spent } = kernel.limit_proxy_clients(share).await?;
            clients.note(spent, now);
            Ok::<_, KernelError>(Some(Count { at: now, took: now.elapsed(), opened, open }))
        };
        let looked = tokio::select! {
            () = tasks.stop.cancelled() => break,
            looked = looked => looked,
        };
        wait = if looked.is_err() { BUSY } else { LOOK };
        match looked {
            Ok(None) => {}
            Ok(count) => {
                last = count;
                tasks.controllers.record(CONTROLLER, Ok::<_, &str>(()));
            }
            Err(why) => _ = tasks.controllers.record(CONTROLLER, Err(why)),
        }
    }
    if last.is_some()
        && let Err(why) = kernel.limit_proxy_clients(NO_SHARE).await
    {
        tracing::warn!("the limits of the proxies' clients hold for some seconds more: {why}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_comes_sooner_when_many_connections_open() {
        let began = Instant::now();
        let count = Count { at: began, took: Duration::ZERO, opened: u32::MAX - 1, open: 0 };
        let is_over =
            |count: Count, more: u32, after| count.is_over(count.opened.wrapping_add(more), 1_016, began + after);
        assert!(!is_over(count, 0, IDLE - LOOK) && is_over(count, 0, IDLE));
        assert!(!is_over(count, 1, BUSY - LOOK) && is_over(count, 1, BUSY));
        assert!(!is_over(count, 254, LOOK) && is_over(count, 255, LOOK), "a quarter");
        let busy = Count { open: 1, ..count };
        assert!(!is_over(busy, 0, BUSY - LOOK) && is_over(busy, 0, BUSY), "one that is refused opens nothing");
        let slow = Count { took: LOOK / 2, ..count };
        assert!(!is_over(slow, 255, LOOK * 9) && is_over(slow, 255, LOOK * 10), "a twentieth of the time");
        assert!(is_over(Count { took: BUSY, ..slow }, 0, IDLE), "limits do not lapse");
    }
}
