//! The L7 proxy.

use std::{
    path::Path,
    sync::{Arc, atomic::Ordering},
    time::{Duration, SystemTime},
};

use tokio::time::Instant;
use wharf_api::{ComponentStatus, Health, ProxyRequests, ProxyState, ProxyStatus};
use wharf_core::{endpoint::EndpointRecord, ids::EndpointId};
use wharf_proxy::{Connections, Share};

use super::Source;
use crate::{
    monitor::Requests,
    node::{lifecycle::Lifecycle, part::Fill},
    proxy::{Look, envoy},
};

const PATIENCE: Duration = Duration::from_secs(10);
const NAMED: usize = 3;

pub(super) fn source() -> Source {
    Source {
        name: "proxy",
        look: |node| {
            Box::pin(async move {
                let name_addresses = node.life.policy.name_addresses().await;
                look(&node.life, name_addresses, &node.proxy_clients.spent(Instant::now()))
            })
        },
        silent: |_| (Health::Degraded, "a change of its listeners does not end".into()),
    }
}

fn look(life: &Lifecycle, name_addresses: u64, clients: &[EndpointId]) -> Fill {
    let (look, redirects) = (life.policy.proxy.redirects.look(), &life.policy.proxy.redirects);
    let Requests { forwarded, denied, failed } = life.telemetry.monitor.requests();
    let count = |of: fn(&wharf_proxy::Status) -> u64| look.status.as_ref().map_or(0, of);
    let proxy = ProxyStatus {
        enabled: redirects.enabled(),
        redirects: redirects.count(),
        pending_completions: life.policy.proxy.pending.load(Ordering::Relaxed),
        timed_out_completions: life.policy.proxy.timed_out.load(Ordering::Relaxed),
        state: look.state(),
        listeners: (look.wanted.len() + look.dns.len()) as u64,
        refused: look.refused() as u64,
        restarts: count(|status| status.restarts),
        records_lost: count(|status| status.records_lost),
        requests: ProxyRequests { forwarded: forwarded + count(|status| status.forwarded), denied, failed },
        name_addresses,
    };
    let name = |id: u16| {
        let id = EndpointId::try_from(id).ok()?;
        Some(life.endpoints.registry.get(id)?.shared.read(|view| words(&view.record)))
    };
    let component = component(&look, clients, &life.config.run_dir, &name);
    Arc::new(move |status| {
        status.proxy = proxy.clone();
        status.components.push(component.clone());
    })
}

fn component(
    look: &Look,
    clients: &[EndpointId],
    run_dir: &Path,
    name: &dyn Fn(u16) -> Option<String>,
) -> ComponentStatus {
    let state = look.state();
    let (own, message) = match (state, look.wanted.is_empty()) {
        (ProxyState::Serving, _) => serving(look),
        (ProxyState::Absent, true) if !look.supervised => (Health::Ok, "Envoy is not asked for".to_owned()),
        (_, true) => (idle(look), unserved(look, run_dir)),
        (_, false) => (Health::Degraded, format!("{}; {}", missing(look), unserved(look, run_dir))),
    };
    let (own, message) = match look.dns_refused.values().next() {
        Some(why) => {
            (own.max(Health::Degraded), format!("{why}; queries that rules with dns judge are dropped; {message}"))
        }
        None if look.dns.is_empty() => (own, message),
        None => (own, format!("the agent serves {} of DNS; {message}", listeners(look.dns.len()))),
    };
    match spent(look, clients, name).filter(|_| state == ProxyState::Serving || !clients.is_empty()) {
        Some(spent) => {
            ComponentStatus::new("proxy", own.max(Health::Degraded), format!("{spent}; {message}")).by_containers(own)
        }
        None => ComponentStatus::new("proxy", own, message),
    }
}

fn words(record: &EndpointRecord) -> String {
    match (&record.pod_namespace, &record.pod_name) {
        (Some(namespace), Some(pod)) => format!("pod {namespace}/{pod}"),
        _ => format!("container {}", record.attachment.container_id),
    }
}

/// Clients first: they open the connections.
fn spent(look: &Look, clients: &[EndpointId], name: &dyn Fn(u16) -> Option<String>) -> Option<String> {
    let status = look.status.as_ref()?;
    let Connections { all, of_listener, of_endpoint, of_client } = status.connections;
    let named = |id: u16| name(id).map_or_else(|| format!("endpoint {id}"), |name| format!("endpoint {id} ({name})"));
    let told = |(share, refused): (&Share, &u64)| {
        let (who, share, at) = match share {
            Share::Endpoint(key, member) => (named(member.id), of_endpoint, format!(" at the listener {key}")),
            Share::Listener(key) => (format!("the listener {key}"), of_listener, String::new()),
            Share::All(key) => ("Envoy".to_owned(), all, format!(", seen at the listener {key}")),
        };
        format!("{who} has used its share of {share} proxy connections{at}: {refused} were refused")
    };
    let opened = |id: &EndpointId| {
        let who = named(id.get());
        format!("{who} had its share of {of_client} proxy connections open as a client: further ones are dropped")
    };
    let (mut spent, mut more) = (Vec::new(), 0);
    for list in [clients.iter().map(opened).collect::<Vec<_>>(), status.spent.iter().rev().map(told).collect()] {
        more += list.len().saturating_sub(NAMED);
        spent.extend(list.into_iter().take(NAMED));
    }
    if more > 0 {
        spent.push(format!("{more} more shares are used"));
    }
    if !spent.is_empty() && status.connections.are_few() {
        let files = Connections::MOST_FILES;
        spent.push(format!(
            "shares are small because the agent may open few files: {all} connections (LimitNOFILE={files})"
        ));
    }
    (!spent.is_empty()).then(|| spent.join("; "))
}

/// Only a failed start is a fault.
fn idle(look: &Look) -> Health {
    let since = look.status.as_ref().and_then(|status| SystemTime::now().duration_since(status.since).ok());
    let is_late = since.is_some_and(|since| since >= PATIENCE);
    super::of(look.state() == ProxyState::Waiting || is_late, Health::Degraded).max(Health::Pending)
}

fn serving(look: &Look) -> (Health, String) {
    let version = look.status.as_ref().and_then(|status| status.version.as_deref());
    let serves =
        format!("Envoy {} serves {}", version.unwrap_or("of a version not told"), listeners(look.wanted.len()));
    let refused = look.unacknowledged.iter().find_map(|(name, reason)| Some((name, reason.as_ref()?)));
    let late = look.unanswered_for.is_some_and(|since| since >= PATIENCE);
    let what = match (refused, look.unacknowledged.keys().next()) {
        (Some((name, reason)), _) => format!("{name} was refused: {reason}; change the rules that need it"),
        (None, Some(name)) if late => format!("{name} is not acknowledged; is Envoy stuck?"),
        _ => return (Health::Ok, serves),
    };
    let more = look.unacknowledged.len() - 1;
    let more = if more > 0 { format!(" ({more} more: wharf proxy status)") } else { String::new() };
    (Health::Degraded, format!("{serves}; {what}{more}"))
}

fn missing(look: &Look) -> String {
    let open = look.wanted.values().filter(|redirect| redirect.listener.requests.fails_open).count();
    let fate = match (open, look.wanted.len() - open) {
        (0, _) => "are dropped".to_owned(),
        (_, 0) => "pass unseen (failOpen)".to_owned(),
        (open, closed) => format!("of {closed} are dropped, of {open} pass unseen (failOpen)"),
    };
    format!("rules need {} and no proxy serves: connections {fate}", listeners(look.wanted.len()))
}

fn listeners(n: usize) -> String {
    if n == 1 { "1 listener".to_owned() } else { format!("{n} listeners") }
}

fn unserved(look: &Look, run_dir: &Path) -> String {
    let why = look.status.as_ref().and_then(|status| status.last_error.as_deref()).unwrap_or("no reason given");
    match look.state() {
        ProxyState::Serving => "Envoy serves".to_owned(),
        ProxyState::Absent if look.supervised => "Envoy is not started yet".to_owned(),
        ProxyState::Absent => {
            let settings = envoy::bootstrap(run_dir);
            format!("start the agent with --envoy PATH, or Envoy with {}", settings.display())
        }
        ProxyState::Starting => "Envoy runs and has not connected".to_owned(),
        ProxyState::Waiting => format!("Envoy does not run and is started again: {why}"),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use wharf_policy::{
        compile::{self, Listener},
        model::Direction,
        requests,
    };
    use wharf_proxy::{EnvoyState, ListenerKey, Member, Proxy, Status};

    use super::*;
    use crate::proxy::Redirect;

    fn look(state: EnvoyState, fails_open: &[bool]) -> Look {
        let redirect = |(port, fails_open): (u16, &bool)| {
            let requests = requests::Requests { fails_open: *fails_open, ..Default::default() }.into();
            let listener =
                Listener { direction: Direction::Ingress, requests, share: compile::Share::default() }.into();
            (port, Redirect { listener, members: BTreeMap::new(), rounds: BTreeMap::new() })
        };
        let (proxy, _records) = Proxy::new(1);
        let status = Status { state, version: Some("1.36.2".into()), ..proxy.status() };
        Look { status: Some(status), wanted: (15_000..).zip(fails_open).map(redirect).collect(), ..Look::default() }
    }

    fn told(look: &Look) -> (Health, String) {
        let of = |id: u16| (id == 7).then(|| "pod shop/web".to_owned());
        let ComponentStatus { name, health, message, .. } = component(look, &[], Path::new("/run/wharf"), &of);
        assert_eq!(name, "proxy");
        (health, message)
    }

    #[test]
    fn a_proxy_that_nobody_asks_for_is_no_fault() {
        assert_eq!(told(&Look::default()), (Health::Ok, "Envoy is not asked for".to_owned()));
        assert_eq!(told(&look(EnvoyState::Absent, &[])), (Health::Ok, "Envoy is not asked for".to_owned()));
        assert_eq!(told(&look(EnvoyState::Starting, &[])).0, Health::Pending);
        let mut failing = Look { supervised: true, ..look(EnvoyState::Waiting, &[]) };
        failing.status.as_mut().expect("status").last_error = Some("no such file".into());
        let message = "Envoy does not run and is started again: no such file".to_owned();
        assert_eq!(told(&failing), (Health::Degraded, message));
        let mut late = look(EnvoyState::Starting, &[]);
        late.status.as_mut().expect("status").since = SystemTime::now() - 2 * PATIENCE;
        assert_eq!(told(&late), (Health::Degraded, "Envoy runs and has not connected".to_owned()));
    }

    #[test]
    fn what_becomes_of_connections_is_told_while_none_serves() {
        for (open, fate) in [
            (&[false] as &[bool], "rules need 1 listener and no proxy serves: connections are dropped; "),
            (&[true], "rules need 1 listener and no proxy serves: connections pass unseen (failOpen); "),
            (
                &[true, false, false],
                "rules need 3 listeners and no proxy serves: connections of 2 are dropped, of 1 pass unseen (failOpen); ",
            ),
        ] {
            let (health, message) = told(&look(EnvoyState::Absent, open));
            let remedy = "start the agent with --envoy PATH, or Envoy with /run/wharf/proxy/bootstrap.json";
            assert_eq!((health, message), (Health::Degraded, format!("{fate}{remedy}")));
        }
    }

    #[test]
    fn who_has_used_a_share_of_the_connections_is_named() {
        let mut serving = look(EnvoyState::Serving, &[false]);
        let key = ListenerKey { direction: Direction::Ingress, port: 15_000 };
        let member = |id| Share::Endpoint(key, Member { id, epoch: 3 });
        let status = serving.status.as_mut().expect("status");
        status.connections = Connections { all: 1_600, of_listener: 400, of_endpoint: 100, of_client: 50 };
        status.spent = [(member(7), 12)].into();
        let used = "endpoint 7 (pod shop/web) has used its share of 100 proxy connections at the listener ingress-15000: 12 were refused";
        let serves = "Envoy 1.36.2 serves 1 listener";
        let few = "shares are small because the agent may open few files: 1600 connections (LimitNOFILE=65536)";
        assert_eq!(told(&serving), (Health::Degraded, format!("{used}; {few}; {serves}")));
        let mut many = serving.clone();
        many.status.as_mut().expect("status").connections.all = 32_512;
        assert_eq!(told(&many), (Health::Degraded, format!("{used}; {serves}")), "as many as Envoy can have");
        let readiness = component(&serving, &[], Path::new("/run/wharf"), &|_| None).readiness();
        assert_eq!(readiness, Health::Ok, "no container makes the agent unready");
        let status = serving.status.as_mut().expect("status");
        status.spent.extend([(member(8), 1), (Share::Listener(key), 2), (Share::All(key), 3)]);
        let message = told(&serving).1;
        let of_listener = "; the listener ingress-15000 has used its share of 400 proxy connections: 2 were refused; 1 more shares are used; ";
        assert!(message.starts_with("endpoint 8 has used ") && message.contains(used), "{message}");
        assert!(message.contains(of_listener), "{message}");
        let client = EndpointId::try_from(9).expect("an id");
        let named = component(&serving, &[client], Path::new("/run/wharf"), &|_| Some("pod shop/loud".to_owned()));
        let begin = "endpoint 9 (pod shop/loud) had its share of 50 proxy connections open as a client: further ones are dropped; ";
        assert!(named.message.starts_with(begin) && named.readiness() == Health::Ok, "{}", named.message);
    }

    #[test]
    fn a_refusal_is_told_at_once_and_a_missing_answer_when_it_is_late() {
        let serving = look(EnvoyState::Serving, &[false, false]);
        let serves = "Envoy 1.36.2 serves 2 listeners".to_owned();
        assert_eq!(told(&serving), (Health::Ok, serves.clone()));
        let owes = |reason: Option<&str>, unanswered_for| Look {
            unacknowledged: ["ingress-15000", "ingress-15001"].map(|of| (of.into(), reason.map(Into::into))).into(),
            unanswered_for: Some(unanswered_for),
            ..serving.clone()
        };
        assert_eq!(told(&owes(None, Duration::ZERO)), (Health::Ok, serves.clone()));
        let more = "(1 more: wharf proxy status)";
        let late = format!("{serves}; ingress-15000 is not acknowledged; is Envoy stuck? {more}");
        assert_eq!(told(&owes(None, PATIENCE)), (Health::Degraded, late));
        let refused = format!("{serves}; ingress-15000 was refused: bad; change the rules that need it {more}");
        assert_eq!(told(&owes(Some("bad"), Duration::ZERO)), (Health::Degraded, refused));
    }
}
