//! A service whose calls meet a fate each.

use std::{
    collections::{BTreeMap, VecDeque},
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::stream;
use tokio::{net::UnixListener, runtime::Runtime};
use tonic::{Request, Response, Status, async_trait, transport::Server};
use wharf_delegate::v1::{
    self,
    delegate_server::{Delegate, DelegateServer},
};

/// What becomes of an Add or a Del.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fate {
    /// Done and answered.
    Done,
    /// The call never came.
    Lost,
    /// Done, and the answer never came.
    AnswerLost,
    /// Not done, and said so.
    Failed,
    /// Done after so many milliseconds, then answered.
    Slow(u64),
}

#[derive(Debug, Default)]
struct State {
    attached: BTreeMap<String, v1::Attachment>,
    fates: VecDeque<Fate>,
    calls: Vec<String>,
    /// DELs so far, by container: an ADD that one came after is ended by it.
    dels: BTreeMap<String, u32>,
    /// Calls that run, by container.
    running: BTreeMap<String, u32>,
    /// A rule that the agent broke.
    broken: Option<String>,
}

#[derive(Debug, Clone)]
struct Core(Arc<Mutex<State>>);

/// The service.
pub(crate) struct Fake {
    core: Core,
    _runtime: Runtime,
}

impl Fake {
    pub(crate) fn start(socket: &Path, fates: Vec<Fate>) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
        let core = Core(Arc::new(Mutex::new(State { fates: fates.into(), ..State::default() })));
        let _inside = runtime.enter();
        let listener = UnixListener::bind(socket).expect("bound");
        let incoming = stream::unfold(listener, |listener| async {
            let accepted = listener.accept().await.map(|(stream, _)| stream);
            Some((accepted, listener))
        });
        let server = Server::builder().add_service(DelegateServer::new(core.clone()));
        runtime.spawn(async move { server.serve_with_incoming(incoming).await.expect("served") });
        Self { core, _runtime: runtime }
    }

    /// No more fates.
    pub(crate) fn be_well(&self) {
        self.core.0.lock().unwrap().fates.clear();
    }

    pub(crate) fn attached(&self) -> Vec<String> {
        self.core.0.lock().unwrap().attached.keys().cloned().collect()
    }

    pub(crate) fn calls(&self) -> Vec<String> {
        self.core.0.lock().unwrap().calls.clone()
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.core.0.lock().unwrap().running.values().all(|n| *n == 0)
    }

    pub(crate) fn broken(&self) -> Option<String> {
        self.core.0.lock().unwrap().broken.clone()
    }
}

/// Two calls of a live agent about one container never run at once.
struct Running(Core, String);

impl Drop for Running {
    fn drop(&mut self) {
        *self.0.0.lock().unwrap().running.get_mut(&self.1).expect("it runs") -= 1;
    }
}

impl Core {
    async fn meet(&self, call: &str, container: &str) -> (Fate, Running) {
        let fate = {
            let mut state = self.0.lock().unwrap();
            let fate = state.fates.pop_front().unwrap_or(Fate::Done);
            state.calls.push(format!("{call} {container} {fate:?}"));
            let running = state.running.entry(container.to_owned()).or_default();
            *running += 1;
            if *running > 1 {
                state.broken = Some(format!("two calls at once about {container}"));
            }
            fate
        };
        let running = Running(self.clone(), container.to_owned());
        if let Fate::Slow(ms) = fate {
            tokio::time::sleep(Duration::from_millis(ms)).await;
        }
        (fate, running)
    }
}

fn lost() -> Status {
    Status::unavailable("lost")
}

fn failed() -> v1::Failure {
    v1::Failure { code: 123, message: "it was told to".into(), ..v1::Failure::default() }
}

#[async_trait]
impl Delegate for Core {
    async fn add(&self, request: Request<v1::AddRequest>) -> Result<Response<v1::AddResponse>, Status> {
        use v1::add_response::Outcome;
        let v1::AddRequest { key, netns, .. } = request.into_inner();
        let key = key.expect("a key");
        let dels = || self.0.lock().unwrap().dels.get(&key.container_id).copied();
        let before = dels();
        let (fate, _running) = self.meet("Add", &key.container_id).await;
        // Of an agent that was killed meanwhile.
        let fate = if dels() == before { fate } else { Fate::Failed };
        let outcome = match fate {
            Fate::Lost => return Err(lost()),
            Fate::Failed => Outcome::Failure(failed()),
            Fate::Done | Fate::Slow(_) | Fate::AnswerLost => {
                let container = v1::Interface { name: key.interface.clone(), mac: String::new(), mtu: 1500 };
                let made = v1::Attachment {
                    key: Some(key.clone()),
                    netns,
                    container: Some(container),
                    ..v1::Attachment::default()
                };
                let mut state = self.0.lock().unwrap();
                if state.attached.insert(key.container_id.clone(), made.clone()).is_some() {
                    state.broken = Some(format!("an Add of what is attached: {}", key.container_id));
                }
                Outcome::Added(made)
            }
        };
        if matches!(fate, Fate::AnswerLost) {
            return Err(lost());
        }
        Ok(Response::new(v1::AddResponse { outcome: Some(outcome) }))
    }

    async fn del(&self, request: Request<v1::DelRequest>) -> Result<Response<v1::DelResponse>, Status> {
        use v1::del_response::Outcome;
        let key = request.into_inner().key.expect("a key");
        let (fate, _running) = self.meet("Del", &key.container_id).await;
        let outcome = match fate {
            Fate::Lost => return Err(lost()),
            Fate::Failed => Outcome::Failure(failed()),
            Fate::Done | Fate::Slow(_) | Fate::AnswerLost => {
                let mut state = self.0.lock().unwrap();
                *state.dels.entry(key.container_id.clone()).or_default() += 1;
                state.attached.remove(&key.container_id);
                Outcome::Deleted(v1::Deleted {})
            }
        };
        if matches!(fate, Fate::AnswerLost) {
            return Err(lost());
        }
        Ok(Response::new(v1::DelResponse { outcome: Some(outcome) }))
    }

    async fn check(&self, _: Request<v1::CheckRequest>) -> Result<Response<v1::CheckResponse>, Status> {
        Err(Status::unimplemented("not asked"))
    }

    async fn gc(&self, _: Request<v1::GcRequest>) -> Result<Response<v1::GcResponse>, Status> {
        Err(Status::unimplemented("not asked"))
    }

    async fn status(&self, _: Request<v1::StatusRequest>) -> Result<Response<v1::StatusResponse>, Status> {
        Err(Status::unimplemented("not asked"))
    }
}
