//! Envoy as the proxy.

use std::{
    future::Future,
    net::IpAddr,
    path::{Path, PathBuf},
    pin::Pin,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use wharf_core::ids::{EndpointId, Epoch};
use wharf_kit::{accounts, sync::lock};
use wharf_policy::compile;
use wharf_proxy::{EnvoyError, Listener, ListenerKey, Member, Proxy, User, Wait, WaitError};

use super::{Completion, Leaving, Look, ProxyError, Redirect, RedirectTable, Redirects, awaited::Waits};
use crate::config::AgentConfig;

/// Wait before rows change. A healthy Envoy needs milliseconds; a create has one second.
pub(super) const PATIENCE: Duration = Duration::from_millis(500);

/// Created by `cargo xtask install`.
const USER: &str = "wharf-envoy";
const NOBODY: User = User { uid: 65_534, gid: 65_534 };

/// Redirects to Envoy.
#[derive(Debug)]
pub struct Envoy {
    proxy: Proxy,
    supervised: bool,
    /// Held while `proxy` gets resources, to keep their order.
    state: Mutex<State>,
    waits: Waits,
}

#[derive(Debug, Default)]
struct State {
    wanted: RedirectTable,
    leaving: Leaving,
    /// Since when Envoy owes an answer; a refusal is one.
    unanswered_since: Option<Instant>,
}

impl Envoy {
    /// `supervised`: the agent starts Envoy, which counts as present.
    #[must_use]
    pub fn new(proxy: Proxy, supervised: bool) -> Self {
        Self { proxy, supervised, state: Mutex::default(), waits: Waits::default() }
    }

    /// Without `of`: a change of policy.
    fn completion(&self, key: ListenerKey, wait: Wait, of: Option<EndpointId>) -> (String, Completion) {
        let name = key.to_string();
        let waiting = self.waits.begin(name.clone(), of, of.is_none().then_some(PATIENCE));
        let ended = async move {
            let ended = wait.await.map_err(|why| match why {
                WaitError::Refused { .. } => super::refused(key.port, why.to_string()),
                _ => ProxyError::NoAnswer(why.to_string()),
            });
            drop(waiting);
            ended
        };
        (name, Box::pin(ended))
    }
}

/// Envoy's process.
#[must_use]
pub fn process(config: &AgentConfig) -> wharf_proxy::Envoy {
    let user = config.envoy.is_some().then(|| user(USER));
    wharf_proxy::Envoy { user, ..process_in(&config.run_dir, config.envoy.as_deref()) }
}

fn user(name: &str) -> User {
    let why = match accounts::user(name) {
        Ok(Some((uid, gid))) => return User { uid, gid },
        Ok(None) => "there is none".to_owned(),
        Err(error) => error.to_string(),
    };
    tracing::warn!(
        "Envoy runs as nobody, and other programs of nobody's may end it and use its admin socket: look for the user {name}: {why}; make it with \
         `useradd --system --user-group {name}`"
    );
    NOBODY
}

/// Checks that Envoy can start; returns why this process cannot check.
///
/// # Errors
/// It cannot.
pub fn check_program(config: &AgentConfig) -> Result<Option<String>, EnvoyError> {
    if config.envoy.is_some() { process(config).check_program() } else { Ok(None) }
}

/// Envoy's directory in the run directory.
pub const DIRECTORY: &str = "proxy";

/// Envoy's bootstrap file.
#[must_use]
pub fn bootstrap(run_dir: &Path) -> PathBuf {
    process_in(run_dir, None).bootstrap_path()
}

/// Envoy's process, which outlives the agent with its connections.
#[must_use]
pub fn process_in(run_dir: &Path, program: Option<&Path>) -> wharf_proxy::Envoy {
    wharf_proxy::Envoy {
        program: program.unwrap_or(Path::new("envoy")).to_owned(),
        directory: run_dir.join(DIRECTORY),
        user: None,
        threads: 2,
        ends_with_agent: false,
    }
}

fn key(port: u16, redirect: &Redirect) -> ListenerKey {
    listener(port, redirect).key()
}

fn listener(port: u16, redirect: &Redirect) -> Listener {
    let compile::Listener { direction, requests, share: _ } = &*redirect.listener;
    let member = |id, epoch| Member { id, epoch };
    let (members, rounds) = (redirect.members(member), redirect.rounds(member));
    Listener { port, direction: *direction, requests: Arc::clone(requests), members, rounds }
}

impl Redirects for Envoy {
    fn set(&self, mut wanted: RedirectTable) -> Vec<(String, Completion)> {
        let mut state = lock(&self.state);
        let state = &mut *state;
        state.leaving.leave_out_of(&mut wanted);
        if !self.proxy.is_unanswered() {
            state.unanswered_since = None;
        }
        let mut waits = Vec::new();
        for (port, redirect) in &state.wanted {
            let own = key(*port, redirect);
            if wanted.get(port).is_none_or(|redirect| key(*port, redirect) != own) {
                waits.push(self.completion(own, self.proxy.remove(own), None));
            }
        }
        let unacknowledged = self.proxy.unacknowledged();
        for (port, redirect) in &wanted {
            let listener = listener(*port, redirect);
            let name = listener.key().to_string();
            // The cause of a refusal may be gone.
            let refused = unacknowledged.get(&name).is_some_and(Option::is_some);
            if refused || state.wanted.get(port) != Some(redirect) {
                waits.push(self.completion(listener.key(), self.proxy.ensure(listener), None));
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

    fn answered(&self) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let proxy = self.proxy.clone();
        Box::pin(async move { proxy.answered().await })
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
            waits.push(self.completion(listener.key(), self.proxy.ensure(listener), Some(id)));
        }
        if !waits.is_empty() {
            state.leaving.insert(id, epoch);
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

    fn watch(&self) -> Option<wharf_proxy::Watching> {
        Some(self.proxy.watch())
    }

    fn speakers(&self, ip: IpAddr) -> Vec<String> {
        let listeners = self.proxy.speakers(ip).into_iter().map(|key| format!("the proxy's listener {key}"));
        let unknown = self.proxy.inherited().map(|pid| format!("Envoy (process {pid}), told by an earlier agent"));
        listeners.chain(unknown).collect()
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

#[cfg(test)]
mod tests {
    use envoy_types::pb::{
        envoy::{
            config::core::v3,
            service::discovery::v3::{
                DeltaDiscoveryRequest, DeltaDiscoveryResponse,
                aggregated_discovery_service_client::AggregatedDiscoveryServiceClient,
            },
        },
        google::rpc,
    };
    use tokio::{sync::mpsc, task::JoinSet};
    use tonic::{Streaming, transport::Endpoint};
    use wharf_policy::{
        model::Direction,
        requests::{HttpRule, Requests},
    };

    use super::*;

    const LISTENERS: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";

    struct Peer {
        requests: mpsc::Sender<DeltaDiscoveryRequest>,
        responses: Streaming<DeltaDiscoveryResponse>,
        nonce: String,
    }

    impl Peer {
        async fn connect(directory: &Path) -> Self {
            let endpoint = Endpoint::from_shared(format!("unix://{}/xds.sock", directory.display())).expect("address");
            let mut client = AggregatedDiscoveryServiceClient::new(endpoint.connect().await.expect("connected"));
            let (requests, mut queue) = mpsc::channel(4);
            let node = Some(v3::Node { id: "wharf".into(), ..Default::default() });
            let first = DeltaDiscoveryRequest { node, type_url: LISTENERS.into(), ..DeltaDiscoveryRequest::default() };
            requests.send(first).await.expect("room");
            let stream = futures::stream::poll_fn(move |context| queue.poll_recv(context));
            let responses = client.delta_aggregated_resources(stream).await.expect("served").into_inner();
            Self { requests, responses, nonce: String::new() }
        }

        async fn receive(&mut self) -> Vec<String> {
            let response = self.responses.message().await.expect("the stream lives").expect("a response");
            self.nonce = response.nonce;
            response.resources.into_iter().map(|resource| resource.name).collect()
        }

        async fn answer(&self, refusal: Option<&str>) {
            let error_detail = refusal.map(|message| rpc::Status { message: message.into(), ..rpc::Status::default() });
            let answer = DeltaDiscoveryRequest {
                type_url: LISTENERS.into(),
                response_nonce: self.nonce.clone(),
                error_detail,
                ..DeltaDiscoveryRequest::default()
            };
            self.requests.send(answer).await.expect("room");
        }
    }

    fn wanted(ports: &[u16]) -> RedirectTable {
        let requests = Arc::new(Requests { http: [HttpRule::default()].into(), ..Requests::default() });
        let listener =
            Arc::new(compile::Listener { direction: Direction::Egress, requests, share: compile::Share::default() });
        let id = EndpointId::try_from(7).expect("id");
        let members = [((id, Epoch(3)), vec![IpAddr::from([10, 0, 0, 7])])].into();
        let redirect = Redirect { listener, members, rounds: [].into() };
        ports.iter().map(|port| (*port, redirect.clone())).collect()
    }

    #[test]
    fn envoy_has_its_own_user_or_nobody() {
        assert_eq!(user("root"), User { uid: 0, gid: 0 });
        assert_eq!(user("wharf-none-of-that-name"), NOBODY);
    }

    #[tokio::test]
    async fn a_refused_listener_is_sent_again_and_later_changes_wait_for_their_answers() {
        let directory = tempfile::tempdir().expect("directory");
        let (proxy, _records) = Proxy::new(1);
        let socket = process_in(directory.path(), None).socket();
        let (served, envoy) = (proxy.clone(), Envoy::new(proxy, false));
        let mut tasks = JoinSet::new();
        tasks.spawn(async move { served.serve(socket, std::future::pending()).await });
        let mut peer = Peer::connect(&directory.path().join(DIRECTORY)).await;
        assert_eq!(peer.receive().await, [""; 0]);
        peer.answer(None).await;

        let [(name, refused)] = <[_; 1]>::try_from(envoy.set(wanted(&[15_000]))).ok().expect("one");
        assert_eq!(peer.receive().await, [name.as_str()]);
        peer.answer(Some("Error adding/updating listener(s) egress-15000: no port\n")).await;
        refused.await.expect_err("refused");
        assert_eq!(envoy.outstanding(), ["egress-15000 was refused: no port"]);
        assert_eq!(envoy.look().unanswered_for, None, "a refusal is an answer");

        tokio::time::sleep(PATIENCE).await;
        let asked: Vec<_> = envoy.set(wanted(&[15_000])).into_iter().map(|(name, _)| name).collect();
        assert_eq!(asked, ["egress-15000"], "asked for again");
        assert!(envoy.patience() > Duration::ZERO, "the refusal does not cost this change its time");
        assert_eq!(peer.receive().await, ["egress-15000"]);
        assert!(envoy.set(wanted(&[15_000])).is_empty(), "it is on its way");
        let [(_, accepted)] = <[_; 1]>::try_from(envoy.set(wanted(&[15_000, 15_001]))).ok().expect("the other one");
        peer.answer(None).await;
        assert_eq!(peer.receive().await, ["egress-15001"]);
        peer.answer(None).await;
        accepted.await.expect("acknowledged");
        assert!(envoy.outstanding().is_empty() && envoy.set(wanted(&[15_000, 15_001])).is_empty(), "nothing to ask");
    }

    #[tokio::test]
    async fn an_envoy_with_listeners_of_an_earlier_agent_may_speak_for_any_address() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut child = tokio::process::Command::new("sleep").arg("60").kill_on_drop(true).spawn().expect("sleep");
        let pid = child.id().expect("a number");
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("its status");
        let started = stat.split_ascii_whitespace().nth(21).expect("its start");
        std::fs::create_dir(dir.path().join(DIRECTORY)).expect("a directory");
        std::fs::write(dir.path().join(DIRECTORY).join("told.pid"), format!("{pid} {started}\n")).expect("written");

        let speakers = || {
            let (proxy, _records) = Proxy::new(1);
            process_in(dir.path(), None).remember(&proxy, false).expect("read");
            Envoy::new(proxy, false).speakers(IpAddr::from([10, 0, 0, 7]))
        };
        let [unknown] = &speakers()[..] else { panic!("{:?}", speakers()) };
        assert!(unknown.starts_with(&format!("Envoy (process {pid})")), "{unknown}");
        child.kill().await.expect("it ends");
        assert_eq!(speakers(), [""; 0]);
    }
}
