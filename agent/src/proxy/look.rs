//! Views of the proxy.

use std::{collections::BTreeMap, time::Duration};

use wharf_api::{PolicyRedirect, ProxyListener, ProxyServer, ProxyState};
use wharf_core::ids::EndpointId;
use wharf_policy::model::Direction;
use wharf_proxy::{EnvoyState, ListenerKey, Status};

use super::{Awaited, Redirect, RedirectTable, words};

/// State of the proxy.
#[derive(Debug, Clone, Default)]
pub struct Look {
    /// `None` without a proxy.
    pub status: Option<Status>,
    /// The agent starts Envoy.
    pub supervised: bool,
    /// Envoy's redirects without leaving members.
    pub wanted: RedirectTable,
    /// The DNS proxy's redirects.
    pub dns: RedirectTable,
    /// Ports that did not open.
    pub dns_refused: BTreeMap<u16, String>,
    /// Unacknowledged listeners, with refusals.
    pub unacknowledged: BTreeMap<String, Option<String>>,
    /// How long Envoy has owed an answer.
    pub unanswered_for: Option<Duration>,
    /// The longest first.
    pub awaited: Vec<Awaited>,
}

impl Look {
    /// Envoy's state.
    #[must_use]
    pub fn state(&self) -> ProxyState {
        match self.status.as_ref().map(|status| status.state) {
            None | Some(EnvoyState::Absent) => ProxyState::Absent,
            Some(EnvoyState::Starting) => ProxyState::Starting,
            Some(EnvoyState::Serving) => ProxyState::Serving,
            Some(EnvoyState::Waiting) => ProxyState::Waiting,
        }
    }

    /// Listeners by port.
    #[must_use]
    pub fn listeners(&self) -> Vec<ProxyListener> {
        let mut all: Vec<_> = self.all().map(|(port, redirect)| self.listener(*port, redirect)).collect();
        all.sort_unstable_by_key(|listener| listener.port);
        all
    }

    fn all(&self) -> impl Iterator<Item = (&u16, &Redirect)> {
        self.wanted.iter().chain(&self.dns)
    }

    /// Listeners not served as wanted, with reasons.
    #[must_use]
    pub fn outstanding(&self) -> Vec<(String, Option<String>)> {
        let unopened = self
            .dns_refused
            .iter()
            .filter_map(|(port, why)| Some((name(*port, self.dns.get(port)?.listener.direction), Some(why.clone()))));
        let of_envoy = self.unacknowledged.iter().map(|(name, refusal)| (name.clone(), refusal.clone()));
        of_envoy.chain(unopened).collect()
    }

    /// Refused listeners and unopened ports.
    #[must_use]
    pub fn refused(&self) -> usize {
        self.unacknowledged.values().flatten().count() + self.dns_refused.len()
    }

    /// An endpoint's redirects with direction.
    #[must_use]
    pub fn of_endpoint(&self, id: EndpointId) -> Vec<(String, PolicyRedirect)> {
        let own = self.all().filter(|(_, redirect)| redirect.members.keys().any(|(of, _)| *of == id));
        let told = |(port, redirect)| {
            let listener: ProxyListener = self.listener(port, redirect);
            (listener.direction, self.redirect(port, listener.passes, listener.fails_open))
        };
        own.map(|(port, redirect)| told((*port, redirect))).collect()
    }

    /// A flow's redirect.
    #[must_use]
    pub fn redirect(&self, port: u16, passes: Vec<String>, fails_open: bool) -> PolicyRedirect {
        PolicyRedirect { port, passes, fails_open, problem: self.problem(port) }
    }

    fn problem(&self, port: u16) -> Option<String> {
        if self.dns.contains_key(&port) {
            return self.dns_refused.get(&port).cloned();
        }
        if self.state() != ProxyState::Serving {
            return Some(format!("no proxy serves (Envoy is {})", self.state().as_str()));
        }
        let Some(redirect) = self.wanted.get(&port) else {
            return Some("the proxy does not know of it yet".to_owned());
        };
        let name = name(port, redirect.listener.direction);
        Some(match self.unacknowledged.get(&name)? {
            Some(reason) => format!("Envoy refused it: {reason}"),
            None => "Envoy has not acknowledged it".to_owned(),
        })
    }

    fn listener(&self, port: u16, Redirect { listener, members, .. }: &Redirect) -> ProxyListener {
        let (name, refused) = (name(port, listener.direction), self.dns_refused.get(&port));
        let answer = self.unacknowledged.get(&name);
        ProxyListener {
            served_by: if self.dns.contains_key(&port) { ProxyServer::Agent } else { ProxyServer::Envoy },
            port,
            direction: listener.direction.to_string(),
            passes: words::passes(&listener.requests),
            fails_open: listener.requests.fails_open,
            endpoints: members.keys().map(|(id, _)| id.get()).collect(),
            acknowledged: answer.is_none() && refused.is_none(),
            refusal: answer.cloned().flatten().or_else(|| refused.cloned()),
            name,
        }
    }
}

/// Name of a listener (`ingress-15000`).
#[must_use]
pub fn name(port: u16, of: Direction) -> String {
    ListenerKey { direction: of, port }.to_string()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use wharf_core::ids::Epoch;
    use wharf_policy::{
        compile::{Listener, Share},
        requests::{HttpRule, Requests},
    };
    use wharf_proxy::Proxy;

    use super::*;
    use crate::proxy::{Redirects as _, envoy::Envoy};

    fn id(n: u16) -> EndpointId {
        EndpointId::try_from(n).expect("id")
    }

    fn wanted() -> RedirectTable {
        let requests = Arc::new(Requests { http: [HttpRule::default()].into(), ..Requests::default() });
        let members = [((id(7), Epoch(3)), vec!["10.0.0.7".parse().expect("address")])].into();
        let listener = Arc::new(Listener { direction: Direction::Ingress, requests, share: Share::default() });
        [(15_000, Redirect { listener, members, rounds: BTreeMap::new() })].into()
    }

    #[tokio::test]
    async fn what_envoy_was_asked_and_who_waits_is_told() {
        let (proxy, _records) = Proxy::new(1);
        let envoy = Envoy::new(proxy, false);
        assert_eq!((envoy.look().state(), envoy.look().wanted.len()), (ProxyState::Absent, 0));
        let waits = envoy.set(wanted());
        let look = envoy.look();
        let [listener] = &look.listeners()[..] else { panic!("{look:?}") };
        assert_eq!((listener.name.as_str(), listener.endpoints.as_slice()), ("ingress-15000", [7].as_slice()));
        assert_eq!(listener.passes, ["every HTTP request"]);
        assert!(!listener.acknowledged && listener.refusal.is_none() && look.unanswered_for.is_some());
        let by: Vec<_> = look.awaited.iter().map(|wait| (wait.listener.as_str(), wait.endpoint)).collect();
        assert_eq!(by, [("ingress-15000", None)]);
        let own = look.of_endpoint(id(7));
        let problem = own.first().and_then(|(_, redirect)| redirect.problem.as_deref());
        assert_eq!(problem, Some("no proxy serves (Envoy is absent)"));
        assert_eq!(look.of_endpoint(id(8)), []);

        drop(waits);
        assert!(envoy.look().awaited.is_empty());
        let waits = envoy.remove_redirects(id(7), Epoch(3));
        let by: Vec<_> = envoy.look().awaited.iter().map(|wait| wait.endpoint).collect();
        assert_eq!((by, waits.len()), (vec![Some(id(7))], 1));
    }

    #[test]
    fn a_refusal_is_told_where_the_listener_is() {
        let unacknowledged = [("ingress-15000".to_owned(), Some("no such filter".to_owned()))].into();
        let (proxy, _records) = Proxy::new(1);
        let status = Status { state: EnvoyState::Serving, ..proxy.status() };
        let look = Look { wanted: wanted(), unacknowledged, status: Some(status), ..Look::default() };
        let refusals: Vec<_> = look.listeners().into_iter().map(|listener| listener.refusal).collect();
        assert_eq!((look.refused(), refusals), (1, vec![Some("no such filter".to_owned())]));
        let own = look.of_endpoint(id(7));
        let problem = own.first().and_then(|(_, redirect)| redirect.problem.as_deref());
        assert_eq!(problem, Some("Envoy refused it: no such filter"));
        let served = Look { unacknowledged: BTreeMap::new(), ..look };
        assert!(served.of_endpoint(id(7)).iter().all(|(_, redirect)| redirect.problem.is_none()));
    }
}
