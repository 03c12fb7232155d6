//! Controllers, and the failing ones.

use std::sync::Arc;

use wharf_api::{ComponentStatus, ControllerStatus, Health};
use wharf_kit::controller::{Controllers, OVERDUE};

use super::{Source, of};
use crate::node::part::Fill;

const NAMED: usize = 4;

pub(super) fn source() -> Source {
    Source {
        name: "controllers",
        look: |node| Box::pin(async move { look(&node.life.tasks.controllers) }),
        silent: |_| (Health::Degraded, "waits for the table of controllers".into()),
    }
}

fn look(controllers: &Controllers) -> Fill {
    let (all, omitted) = (controllers.list(), controllers.omitted());
    let unwell: Vec<&ControllerStatus> = all.iter().filter(|c| c.is_unwell()).collect();
    let count = unwell.len();
    let mut message = if unwell.is_empty() { "all succeed".to_owned() } else { describe(&unwell) };
    if omitted > 0 {
        message = format!("{message}; the table is full: {omitted} runs of others are not in it");
    }
    Arc::new(move |status| {
        status.controllers.clone_from(&all);
        status.controllers_total = all.len() as u64;
        status.controllers_unwell = count as u64;
        let health = of(count > 0 || omitted > 0, Health::Degraded);
        status.components.push(ComponentStatus::new("controllers", health, message.clone()));
    })
}

fn describe(unwell: &[&ControllerStatus]) -> String {
    let name = |c: &ControllerStatus| {
        let of = c.endpoint.map_or_else(String::new, |id| format!(" of endpoint {id}"));
        let what =
            if c.overdue { format!(" (a run has not ended for {} s)", OVERDUE.as_secs()) } else { String::new() };
        format!("{}{of}{what}", c.name)
    };
    let named: Vec<String> = unwell.iter().take(NAMED).map(|c| name(c)).collect();
    let more = unwell.len() - named.len();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("failing: {}{more}", named.join(", "))
}
