//! STATUS: whether an ADD would succeed now.

use std::collections::BTreeSet;

use wharf_api::{AgentStatus, Health, IpFamily, PoolView};

use crate::{
    fault::{Code, Fault, first_of},
    log::Level,
    netconf::NetConf,
    rules::cut,
};

/// Their failure limits existing endpoints.
const CARRIES_TRAFFIC: [&str; 1] = ["datapath"];
const DEFAULT_POOL: &str = "default";

/// Code 51: existing endpoints are limited; 50: ADD would fail. `delegated`: an IPAM plugin leases addresses.
pub(crate) fn verdict(subject: &str, conf: &NetConf, delegated: bool, status: &AgentStatus) -> Result<(), Fault> {
    if let Some(refusal) = status.delegate.as_ref().and_then(|service| service.refusal.as_ref()) {
        let code = Code::of_service(refusal.code);
        return Err(Fault::new(code, format!("{subject}: {}", refusal.message)).with_details(&refusal.details));
    }
    let unwell: Vec<String> = (status.components.iter())
        .filter(|c| c.health >= Health::Degraded)
        .map(|c| format!("{}: {}", c.name, c.message))
        .collect();
    let reasons = if unwell.is_empty() { "it is starting or stopping".into() } else { first_of(&unwell) };
    // Programs outlive the agent: a silent component does not limit traffic.
    let limited = (status.components.iter())
        .any(|c| c.health >= Health::Degraded && c.stale_ms.is_none() && CARRIES_TRAFFIC.contains(&c.name.as_str()));
    if limited {
        return Err(Fault::new(Code::Limited, format!("{subject}: existing endpoints may be limited: {reasons}")));
    }
    if !status.serving || status.components.iter().any(|c| c.health == Health::Failing) {
        return Err(Fault::new(Code::NotAvailable, format!("{subject}: the agent takes no new endpoints: {reasons}")));
    }
    // Otherwise the delegated service reports addresses.
    if !delegated && status.delegate.is_none() {
        addresses(subject, conf, &status.ipam)?;
    }
    if !unwell.is_empty() {
        conf.log.say(Level::Warn, format_args!("{subject}: {reasons}"));
    }
    Ok(())
}

/// ADD needs an address of each family of the pool; pools of annotations are unknown.
fn addresses(subject: &str, conf: &NetConf, rows: &[PoolView]) -> Result<(), Fault> {
    let pool = conf.pool.as_deref().unwrap_or(DEFAULT_POOL);
    let mut families = rows.iter().filter(|row| row.name == pool).peekable();
    if families.peek().is_none() {
        let known: BTreeSet<&str> = rows.iter().map(|row| row.name.as_str()).collect();
        let known: Vec<String> = known.into_iter().map(str::to_owned).collect();
        let known = if known.is_empty() { "none".into() } else { first_of(&known) };
        let origin = if conf.pool.is_some() { "netconf's key \"pool\"" } else { "netconf names none" };
        return Err(Fault::new(
            Code::NotAvailable,
            format!("{subject}: the agent has no pool {:?} ({origin}); its pools: {known}", cut(pool)),
        )
        .with_details("name one of the agent's pools in the network configuration, or configure that pool"));
    }
    if conf.ip_masq == Some(true) && families.clone().any(|row| row.masquerade == Some(false)) {
        let rule = "netconf: key \"ipMasq\" is true, and the node does not masquerade the pool";
        return Err(Fault::config(format!("{subject}: {rule} {}", cut(pool)))
            .with_details("start the agent with --masquerade on, give the network another pool, or take the key out"));
    }
    let full: Vec<String> = families.filter(|row| row.used >= row.total).map(in_use).collect();
    if full.is_empty() {
        return Ok(());
    }
    Err(Fault::new(Code::NotAvailable, format!("{subject}: pool {pool} has {}", full.join("; ")))
        .with_details("delete endpoints, release leases (see `wharf ipam list`), or give the pool another CIDR"))
}

fn in_use(row: &PoolView) -> String {
    let family = match row.family {
        IpFamily::Ipv4 => "IPv4",
        IpFamily::Ipv6 => "IPv6",
    };
    format!("no free {family} address: {} of {} are in use ({})", row.used, row.total, first_of(&row.cidrs))
}
