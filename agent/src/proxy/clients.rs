//! Counts the connections that endpoints have open to the node's proxies, and bounds them: each client has a share.
//!
//! The programs refuse connections between two counts, by the limits that the last count wrote
//! ([`wharf_core::kernel::FlowKernel::limit_proxy_clients`]).
//! A client whose connections are many and short would reach its limit between two counts, so a count comes sooner when many
//! connections were opened.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::time::Instant;
use wharf_core::{flow::ProxyClients, ids::EndpointId, kernel::KernelError};
use wharf_proxy::Connections;

use crate::{node::lifecycle::Lifecycle, sync::lock};

/// Name of the controller.
const CONTROLLER: &str = "proxy-clients";
/// Time between two looks at the number of connections that were opened.
const LOOK: Duration = Duration::from_millis(100);
/// Time between two counts while clients have connections.
const BUSY: Duration = Duration::from_secs(1);
/// The same while none has, and the longest in any case: limits hold for about 4 s.
const IDLE: Duration = Duration::from_secs(2);
/// Counts take a twentieth of the time, if that makes none later than [`IDLE`]: the kernel lists every TCP socket of the node.
const PART: u32 = 20;
/// More than any client can have: when the agent ends, nothing counts until the next one.
const NO_SHARE: u32 = u32::MAX / 2;
/// How long a client is told after a count that found its share spent.
const TOLD: Duration = Duration::from_secs(60);

/// Clients that had their share of connections open.
#[derive(Debug, Default)]
pub struct Clients(Mutex<BTreeMap<EndpointId, Instant>>);

impl Clients {
    fn note(&self, spent: Vec<EndpointId>, now: Instant) {
        let mut told = lock(&self.0);
        told.retain(|_, at| now.saturating_duration_since(*at) < TOLD);
        told.extend(spent.into_iter().map(|id| (id, now)));
    }

    /// Those of the last minute.
    pub fn spent(&self, now: Instant) -> Vec<EndpointId> {
        let is_recent = |at: &Instant| now.saturating_duration_since(*at) < TOLD;
        lock(&self.0).iter().filter(|(_, at)| is_recent(at)).map(|(id, _)| *id).collect()
    }
}

/// Connections that one client may have open.
#[must_use]
pub fn share() -> u32 {
    u32::try_from(Connections::here().of_client).unwrap_or(u32::MAX)
}

/// The last count.
#[derive(Debug, Clone, Copy)]
struct Count {
    at: Instant,
    /// How long it took.
    took: Duration,
    /// Connections opened until then, since the table was made.
    opened: u32,
    /// Connections that were open.
    open: u64,
}

impl Count {
    /// Whether another one is due when `opened` connections were opened until now.
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

/// Counts while rules redirect connections, until the agent stops.
pub async fn watch(life: Arc<Lifecycle>, clients: Arc<Clients>) {
    let (tasks, share) = (&life.tasks, share());
    let (mut last, mut wait): (Option<Count>, _) = (None, LOOK);
    loop {
        tokio::select! {
            () = tasks.stop.cancelled() => break,
            () = tokio::time::sleep(wait) => {}
        }
        if life.proxy.redirects.count() == 0 {
            last = None;
            continue;
        }
        let looked = async {
            let (opened, now) = (life.kernel.observe_opened_to_proxies().await?, Instant::now());
            if last.is_some_and(|last| !last.is_over(opened, share, now)) {
                return Ok(None);
            }
            let ProxyClients { open, spent } = life.kernel.limit_proxy_clients(share).await?;
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
        && let Err(why) = life.kernel.limit_proxy_clients(NO_SHARE).await
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

    #[test]
    fn a_client_is_told_for_a_minute() {
        let (clients, id, began) = (Clients::default(), EndpointId::try_from(7).expect("an id"), Instant::now());
        clients.note(vec![id], began);
        clients.note(Vec::new(), began + TOLD / 2);
        assert_eq!(clients.spent(began + TOLD / 2), [id]);
        assert_eq!(clients.spent(began + TOLD), []);
    }
}
