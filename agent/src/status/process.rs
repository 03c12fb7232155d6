//! The process: service, runtime, API and memory.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use wharf_api::{ComponentStatus, Health};
use wharf_kit::{pulse::Pulse, socket::Reach};

use super::{Source, seconds};
use crate::{
    memory::{self, Memory, Room},
    node::{Node, part::Fill},
};

/// Twenty beats.
pub(crate) const LIFELESS: Duration = Duration::from_secs(5);

pub(super) fn serves(node: &Node) -> bool {
    node.serving.load(Ordering::Acquire) && !node.life.tasks.stop.is_cancelled()
}

pub(super) fn components(node: &Node) -> Vec<ComponentStatus> {
    let (health, message) = if serves(node) {
        (Health::Ok, "serving")
    } else if node.life.tasks.stop.is_cancelled() {
        (Health::Pending, "stopping")
    } else {
        (Health::Pending, "starting")
    };
    let mut all = vec![ComponentStatus::new("agent", health, message)];
    let pulses = &node.pulses;
    all.push(lives("runtime", &pulses.runtime, "runs its tasks", "its workers are all blocked"));
    if !node.life.tasks.stop.is_cancelled() {
        let api = lives("api", &pulses.api, "takes connections", "connections are not taken");
        all.push(reached(&pulses.api_socket).map_or(api, |(health, why)| ComponentStatus::new("api", health, why)));
        all.extend(reached(&pulses.admin_socket).map(|(health, why)| ComponentStatus::new("admin", health, why)));
    }
    all
}

fn reached(reach: &Reach) -> Option<(Health, String)> {
    let again = |ago| (Health::Degraded, format!("its socket was gone and is bound again since {}", seconds(ago)));
    reach.lost().map(|why| (Health::Failing, why)).or_else(|| reach.bound_again().map(again))
}

fn lives(name: &str, pulse: &Pulse, well: &str, ill: &str) -> ComponentStatus {
    match pulse.age() {
        None => ComponentStatus::new(name, Health::Pending, "not started yet"),
        Some(age) if age > LIFELESS => {
            ComponentStatus::new(name, Health::Failing, format!("{ill}: no sign of life for {}", seconds(age)))
        }
        Some(_) => ComponentStatus::new(name, Health::Ok, well),
    }
}

pub(super) fn source() -> Source {
    Source {
        name: "process",
        look: |node| Box::pin(async move { look(&node.life.endpoints.admission.memory) }),
        silent: |_| (Health::Degraded, "waits for what /proc tells".into()),
    }
}

fn look(memory: &Memory) -> Fill {
    let (resident, room) = (memory::resident_bytes(), memory.room());
    Arc::new(move |status| {
        if let Some(Room { limit, used, endpoints }) = room {
            let what = format!("{} of {} MiB of the control group in use", used >> 20, limit >> 20);
            let (health, left) = match endpoints {
                0 => (Health::Degraded, "no room for another endpoint: new ones are refused".to_owned()),
                n => (Health::Ok, format!("room for about {n} more endpoints")),
            };
            status.components.push(ComponentStatus::new("memory", health, format!("{what}; {left}")));
        }
        status.resident_bytes = resident;
    })
}
