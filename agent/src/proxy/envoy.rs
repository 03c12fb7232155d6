//! Envoy as the proxy.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    path::Path,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use wharf_core::ids::{EndpointId, Epoch};
use wharf_policy::compile;
use wharf_proxy::{Listener, ListenerKey, Member, Proxy, User, Wait};

use super::{Completion, Look, ProxyError, Redirect, Redirects, Wanted, awaited::Waits};
use crate::{config::AgentConfig, sync::lock};

/// Longest wait for acknowledgements before rows follow. A healthy Envoy needs some milliseconds; a create has a second for its rows.
pub(super) const PATIENCE: Duration = Duration::from_millis(500);

/// The user that owns nothing, on every distribution of today.
const NOBODY: User = User { uid: 65_534, gid: 65_534 };

/// Redirects of the node, and the Envoy that has them.
#[derive(Debug)]
pub struct Envoy {
    proxy: Proxy,
    /// The agent starts it.
    supervised: bool,
    /// Held for map operations and for handing resources to `proxy`, which keeps their order.
    state: Mutex<State>,
    waits: Waits,
}

#[derive(Debug, Default)]
struct State {
    /// What was asked for, without what leaves.
    wanted: Wanted,
    /// Endpoints that were taken out, as long as somebody wants them.
    leaving: BTreeSet<(EndpointId, Epoch)>,
    /// Since when Envoy has owed an answer. A refusal is an answer.
    unanswered_since: Option<Instant>,
}

impl Envoy {
    /// Redirects that this proxy has. `supervised`: the agent starts it, so that there is one even while none runs.
    #[must_use]
    pub fn new(proxy: Proxy, supervised: bool) -> Self {
        Self { proxy, supervised, state: Mutex::default(), waits: Waits::default() }
    }

    /// A completion for whoever waits: the removal of this endpoint, or a change of policy.
    fn completion(&self, name: String, wait: Wait, of: Option<EndpointId>) -> (String, Completion) {
        let waiting = self.waits.begin(name.clone(), of, of.is_none().then_some(PATIENCE));
        let ended = async move {
            let ended = wait.await.map_err(|why| ProxyError(why.to_string()));
            drop(waiting);
            ended
        };
        (name, Box::pin(ended))
    }
}

/// Envoy's process, as the settings say.
#[must_use]
pub fn process(config: &AgentConfig) -> wharf_proxy::Envoy {
    process_in(&config.run_dir, config.envoy.as_deref())
}

/// Envoy's directory below the run directory.
pub const DIRECTORY: &str = "proxy";

/// The process of an agent with this run directory. It outlives the agent, and connections with it.
#[must_use]
pub fn process_in(run_dir: &Path, program: Option<&Path>) -> wharf_proxy::Envoy {
    wharf_proxy::Envoy {
        program: program.unwrap_or(Path::new("envoy")).to_owned(),
        directory: run_dir.join(DIRECTORY),
        // Who starts Envoy in another way chooses its user.
        user: program.map(|_| NOBODY),
        threads: 2,
        ends_with_agent: false,
    }
}

fn key(port: u16, redirect: &Redirect) -> ListenerKey {
    listener(port, redirect).key()
}

fn listener(port: u16, Redirect { listener, members }: &Redirect) -> Listener {
    let member = |((id, epoch), addresses): (&(EndpointId, Epoch), &Vec<IpAddr>)| {
        (Member { id: id.get(), epoch: epoch.0 }, addresses.clone())
    };
    let compile::Listener { direction, requests } = &**listener;
    let members = members.iter().map(member).collect();
    Listener { port, direction: *direction, requests: Arc::clone(requests), members }
}

impl Redirects for Envoy {
    fn set(&self, mut wanted: Wanted) -> Vec<(String, Completion)> {
        let mut state = lock(&self.state);
        let state = &mut *state;
        state.leaving.retain(|member| wanted.values().any(|redirect| redirect.members.contains_key(member)));
        for redirect in wanted.values_mut() {
            redirect.members.retain(|member, _| !state.leaving.contains(member));
        }
        if !self.proxy.is_unanswered() {
            state.unanswered_since = None;
        }
        let mut waits = Vec::new();
        for (port, redirect) in &state.wanted {
            let own = key(*port, redirect);
            if wanted.get(port).is_none_or(|redirect| key(*port, redirect) != own) {
                // Nobody waits: no row leads there.
                drop(self.proxy.remove(own));
            }
        }
        for (port, redirect) in &wanted {
            if state.wanted.get(port) != Some(redirect) {
                let listener = listener(*port, redirect);
                let name = listener.key().to_string();
                waits.push(self.completion(name, self.proxy.ensure(listener), None));
            }
        }
        state.wanted = wanted;
        if !waits.is_empty() {
            state.unanswered_since.get_or_insert_with(Instant::now);
        }
        waits
    }

    fn patience(&self) -> Duration {
        if self.proxy.status().connected_streams == 0 {
            return Duration::ZERO;
        }
        let since = lock(&self.state).unanswered_since;
        PATIENCE.saturating_sub(since.map_or(Duration::ZERO, |since| since.elapsed()))
    }

    fn outstanding(&self) -> Vec<String> {
        let told = |(key, refusal): (String, Option<String>)| match refusal {
            Some(reason) => format!("{key} was refused: {reason}"),
            None => format!("{key} is not acknowledged"),
        };
        self.proxy.unacknowledged().into_iter().map(told).collect()
    }

    fn remove_redirects(&self, id: EndpointId, epoch: Epoch) -> Vec<(String, Completion)> {
        let mut state = lock(&self.state);
        let mut waits = Vec::new();
        if !self.proxy.is_unanswered() {
            state.unanswered_since = None;
        }
        for (port, redirect) in &mut state.wanted {
            if redirect.members.remove(&(id, epoch)).is_none() {
                continue;
            }
            let listener = listener(*port, redirect);
            let name = listener.key().to_string();
            waits.push(self.completion(name, self.proxy.ensure(listener), Some(id)));
        }
        if !waits.is_empty() {
            state.leaving.insert((id, epoch));
            state.unanswered_since.get_or_insert_with(Instant::now);
        }
        waits
    }

    fn count(&self) -> u64 {
        let of = |redirect: &Redirect| redirect.members.len() as u64;
        lock(&self.state).wanted.values().map(of).sum()
    }

    fn enabled(&self) -> bool {
        self.supervised || self.proxy.status().connected_streams > 0 || !lock(&self.state).wanted.is_empty()
    }

    fn speakers(&self, ip: IpAddr) -> Vec<String> {
        self.proxy.speakers(ip).into_iter().map(|key| format!("the proxy's listener {key}")).collect()
    }

    fn look(&self) -> Look {
        let (status, unacknowledged) = (Some(self.proxy.status()), self.proxy.unacknowledged());
        let is_unanswered = unacknowledged.values().any(Option::is_none);
        let state = lock(&self.state);
        Look {
            status,
            supervised: self.supervised,
            wanted: state.wanted.clone(),
            unanswered_for: state.unanswered_since.filter(|_| is_unanswered).map(|since| since.elapsed()),
            unacknowledged,
            awaited: self.waits.list(),
            ..Look::default()
        }
    }
}
