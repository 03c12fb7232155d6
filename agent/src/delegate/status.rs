//! Status and metrics of a delegated agent.

use std::collections::BTreeMap;

use wharf_api::{AgentStatus, ComponentStatus, DelegateStatus, Health, KernelStatus, NetworkStatus};
use wharf_kit::pulse::Pulse;

use crate::{delegate::Delegation, memory};

const LIFELESS: std::time::Duration = std::time::Duration::from_secs(5);

impl Delegation {
    /// Status from memory.
    #[must_use]
    pub fn status(&self) -> AgentStatus {
        let delegate = self.reach.status(&self.service, self.records.waiting());
        let (deletion_queue, mut queue_health, mut queue) = self.records.deletions.status();
        if let Some(why) = self.records.unwritable() {
            queue_health = Health::Failing;
            queue = format!("no ADD can be recorded, so none is passed on: {why}; {queue}");
        }
        let controllers = self.tasks.controllers.list();
        let unwell = controllers.iter().filter(|c| c.is_unwell()).count() as u64;
        let mut components = self.components();
        components.push(service(&delegate));
        components.push(ComponentStatus::new("deletion-queue", queue_health, queue));
        let health = if unwell > 0 { Health::Degraded } else { Health::Ok };
        let words = format!("{unwell} of {} fail", controllers.len());
        components.push(ComponentStatus::new("controllers", health, words));
        AgentStatus {
            overall: components.iter().map(|c| c.health).max().unwrap_or(Health::Ok),
            serving: self.serves(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            abi_version: wharf_common::abi::version(),
            node_name: self.config.node_name.clone(),
            pid: std::process::id(),
            uptime_ms: u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX),
            router: Vec::new(),
            kernel: KernelStatus::default(),
            network: NetworkStatus::default(),
            components,
            controllers_total: controllers.len() as u64,
            controllers_unwell: unwell,
            controllers,
            ipam: Vec::new(),
            endpoints: BTreeMap::new(),
            stuck: Vec::new(),
            quarantined: Vec::new(),
            deletion_queue,
            commands: self.commands.status(),
            admission: self.gate.status(),
            audit_findings: None,
            refused_transitions: 0,
            bpf_maps: Vec::new(),
            prepared: wharf_api::PreparedStatus::default(),
            proxy: wharf_api::ProxyStatus::default(),
            delegate: Some(delegate),
            resident_bytes: memory::resident_bytes(),
            from_admin: false,
        }
    }

    fn components(&self) -> Vec<ComponentStatus> {
        let (health, message) = if self.serves() {
            (Health::Ok, "serving")
        } else if self.tasks.stop.is_cancelled() {
            (Health::Pending, "stopping")
        } else {
            (Health::Pending, "starting")
        };
        let lives = |name: &str, pulse: &Pulse, well: &str| match pulse.age() {
            None => ComponentStatus::new(name, Health::Pending, "not started yet"),
            Some(age) if age > LIFELESS => {
                ComponentStatus::new(name, Health::Failing, format!("no sign of life for {} s", age.as_secs()))
            }
            Some(_) => ComponentStatus::new(name, Health::Ok, well),
        };
        let api = match self.pulses.api_socket.lost() {
            Some(why) => ComponentStatus::new("api", Health::Failing, why),
            None => lives("api", &self.pulses.api, "takes connections"),
        };
        vec![
            ComponentStatus::new("agent", health, message),
            lives("runtime", &self.pulses.runtime, "runs its tasks"),
            api,
        ]
    }
}

fn service(s: &DelegateStatus) -> ComponentStatus {
    let name = if s.service.is_empty() { String::new() } else { format!("{} ", s.service) };
    let (health, words) = match (s.reachable, &s.refusal, &s.last_error) {
        (None, ..) => (Health::Pending, format!("{} was not asked yet", s.socket)),
        (Some(true), None, _) => (Health::Ok, format!("{name}at {} is reached", s.socket)),
        (Some(true), Some(refusal), _) => (
            Health::Failing,
            format!("{name}at {} takes no ADD: {} (code {})", s.socket, refusal.message, refusal.code),
        ),
        (Some(false), _, Some(why)) => (Health::Failing, why.clone()),
        (Some(false), _, None) => (Health::Failing, format!("{} is not reached", s.socket)),
    };
    let owed = match s.unfinished {
        0 => String::new(),
        1 => "; 1 ADD is to be undone".to_owned(),
        n => format!("; {n} ADDs are to be undone"),
    };
    ComponentStatus::new("delegate", health, words + &owed)
}
