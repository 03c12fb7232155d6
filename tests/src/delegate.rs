//! A reference service of delegated mode: it keeps a table and makes a veth pair for each attachment, as the interface
//! of `crates/delegate` says, or does on order what a bad service does.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result};
use tokio::{net::UnixListener, runtime::Runtime, sync::Notify};
use tonic::{Code, Request, Response, Status, async_trait, transport::Server};
use wharf_delegate::v1::{
    self,
    delegate_server::{Delegate, DelegateServer},
};

use crate::{process::ip, space::Space};

/// Gateway of every container, on the host's side of its link; nothing else of the node has it.
pub const GATEWAY: &str = "169.254.77.1";
/// What the service calls itself.
pub const NAME: &str = "reference 1";

/// What the service does with a call of one kind.
#[derive(Debug, Clone, Default)]
pub enum Mood {
    /// What the interface says.
    #[default]
    Well,
    /// Fails, and makes nothing.
    Fail(v1::Failure),
    /// Answers with this gRPC status, and makes nothing.
    Refuse(Code),
    /// Waits until the mood changes, and then does what it was asked, unless a later DEL ended it.
    Hang,
    /// Does what it was asked, and answers with this in place of what it made.
    Lie(Box<v1::Attachment>),
    /// Does what it was asked after this long.
    Slow(Duration),
    /// Refuses calls about subjects with this text with the gRPC status UNAVAILABLE.
    AwayFor(&'static str),
}

/// An attachment's place: container and interface.
type Place = (String, String);

#[derive(Debug, Default)]
struct State {
    attached: BTreeMap<Place, v1::Attachment>,
    /// ADDs that began, by place; one whose number has changed was ended by a DEL.
    adds: BTreeMap<Place, u64>,
    moods: BTreeMap<&'static str, Mood>,
    findings: Vec<String>,
    calls: Vec<String>,
    /// Status calls, which the agent sends on its own too.
    looks: u64,
    asked: Vec<v1::AddRequest>,
    numbers: u32,
}

#[derive(Debug)]
struct Core {
    /// Where links are made; none for a table alone.
    space: Option<Space>,
    state: Mutex<State>,
    changed: Notify,
}

/// A service; ended when dropped.
#[derive(Debug)]
pub struct Reference {
    socket: PathBuf,
    core: Arc<Core>,
    runtime: Option<Runtime>,
}

impl Reference {
    /// A service that makes links in this namespace, at this socket.
    ///
    /// # Errors
    /// When the socket cannot be bound.
    pub fn start(space: Option<&Space>, socket: &Path) -> Result<Self> {
        let space = space.map(Space::try_clone).transpose()?;
        let core = Arc::new(Core { space, state: Mutex::default(), changed: Notify::new() });
        let mut service = Self { socket: socket.to_owned(), core, runtime: None };
        service.rise()?;
        Ok(service)
    }

    /// Serves again after [`Self::die`], with the table that it had.
    ///
    /// # Errors
    /// When the socket cannot be bound.
    pub fn rise(&mut self) -> Result<()> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .context("start the service's runtime")?;
        let _inside = runtime.enter();
        let listener = UnixListener::bind(&self.socket).context("bind the service's socket")?;
        let incoming = tokio_stream::wrappers::UnixListenerStream::new(listener);
        let server = DelegateServer::from_arc(Arc::clone(&self.core));
        runtime.spawn(async move {
            if let Err(error) = Server::builder().add_service(server).serve_with_incoming(incoming).await {
                eprintln!("the service of delegated mode: {error}");
            }
        });
        self.runtime = Some(runtime);
        Ok(())
    }

    /// Ends the service at once: its connections break, and its socket has no listener. Calls that run end without an
    /// effect.
    ///
    /// # Errors
    /// When the socket's file cannot be removed.
    pub fn die(&mut self) -> Result<()> {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(5));
        }
        fs::remove_file(&self.socket).context("remove the service's socket")
    }

    /// What it does with calls of this kind (`Add`, `Del`, `Check`, `Gc`, `Status`) from now on.
    pub fn mood(&self, call: &'static str, mood: Mood) {
        self.state().moods.insert(call, mood);
        self.core.changed.notify_waiters();
    }

    /// What a Check finds from now on.
    pub fn findings(&self, findings: &[&str]) {
        self.state().findings = findings.iter().map(|text| (*text).to_owned()).collect();
    }

    /// The calls so far, without Status: `Add net/c1/eth0`.
    #[must_use]
    pub fn calls(&self) -> Vec<String> {
        self.state().calls.clone()
    }

    /// Status calls so far.
    #[must_use]
    pub fn looks(&self) -> u64 {
        self.state().looks
    }

    /// Bodies of the Adds so far.
    #[must_use]
    pub fn asked(&self) -> Vec<v1::AddRequest> {
        self.state().asked.clone()
    }

    /// Containers that are attached.
    #[must_use]
    pub fn attached(&self) -> BTreeSet<String> {
        self.state().attached.keys().map(|(container, _)| container.clone()).collect()
    }

    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.core.state()
    }
}

impl Drop for Reference {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

#[must_use]
pub fn failure(code: u32, message: &str, details: &str, retry_after_ms: u32) -> v1::Failure {
    v1::Failure { code, message: message.to_owned(), details: details.to_owned(), retry_after_ms }
}

/// An attachment that keeps every rule of the interface.
#[must_use]
pub fn attachment(key: &v1::AttachmentKey, netns: &str, number: u32) -> v1::Attachment {
    let (high, low) = (number / 250, number % 250 + 2);
    let interface = |name: &str, mac: &str| v1::Interface { name: name.to_owned(), mac: mac.to_owned(), mtu: 1400 };
    v1::Attachment {
        key: Some(key.clone()),
        netns: netns.to_owned(),
        container: Some(interface(&key.interface, &format!("02:77:00:00:{high:02x}:{low:02x}"))),
        host: Some(interface(&format!("ref{number}"), &format!("02:77:01:00:{high:02x}:{low:02x}"))),
        addresses: vec![v1::Address {
            address: format!("10.77.{high}.{low}"),
            prefix_len: 24,
            gateway: Some(GATEWAY.to_owned()),
        }],
        routes: vec![v1::Route { dst: "0.0.0.0/0".to_owned(), gateway: Some(GATEWAY.to_owned()) }],
        dns: Some(v1::Dns { nameservers: vec!["10.77.255.53".to_owned()], ..v1::Dns::default() }),
    }
}

fn place(key: &v1::AttachmentKey) -> Place {
    (key.container_id.clone(), key.interface.clone())
}

impl Core {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a call and waits as its mood says; a failure to be answered comes back.
    async fn begin(&self, call: &'static str, subject: &str) -> Result<Option<v1::Failure>, Status> {
        if call == "Status" {
            self.state().looks += 1;
        } else {
            self.state().calls.push(format!("{call} {subject}"));
        }
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let mood = self.state().moods.get(call).cloned().unwrap_or_default();
            match mood {
                Mood::Well | Mood::Lie(_) => return Ok(None),
                Mood::Fail(failure) => return Ok(Some(failure)),
                Mood::AwayFor(text) if subject.contains(text) => return Err(Status::unavailable("as it was told to")),
                Mood::AwayFor(_) => return Ok(None),
                Mood::Refuse(code) => return Err(Status::new(code, "as it was told to")),
                Mood::Slow(time) => {
                    tokio::time::sleep(time).await;
                    return Ok(None);
                }
                Mood::Hang => changed.await,
            }
        }
    }

    fn connect(&self, made: &v1::Attachment) -> Result<()> {
        let Some(space) = &self.space else { return Ok(()) };
        let (host, container) = (made.host.clone().unwrap_or_default(), made.container.clone().unwrap_or_default());
        let peer = &container.name;
        ip(
            space,
            &format!(
                "link add {} address {} mtu 1400 type veth peer name {peer} address {} mtu 1400 netns {}",
                host.name, host.mac, container.mac, made.netns
            ),
        )?;
        ip(space, &format!("addr add {GATEWAY}/32 dev {}", host.name))?;
        ip(space, &format!("link set {} up", host.name))?;
        let inside = Space::open(Path::new(&made.netns))?;
        ip(&inside, "link set lo up")?;
        ip(&inside, &format!("link set {peer} up"))?;
        for address in &made.addresses {
            ip(&inside, &format!("addr add {}/{} dev {peer}", address.address, address.prefix_len))?;
            ip(space, &format!("route add {} dev {}", address.address, host.name))?;
        }
        ip(&inside, &format!("route add {GATEWAY}/32 dev {peer}"))?;
        ip(&inside, &format!("route add default via {GATEWAY} dev {peer}"))?;
        Ok(())
    }

    fn disconnect(&self, gone: &v1::Attachment) -> Result<()> {
        let Some(space) = &self.space else { return Ok(()) };
        let host = gone.host.clone().unwrap_or_default().name;
        // The container's namespace may have gone before, and the link with it.
        if space.links()?.contains(&host) {
            ip(space, &format!("link del {host}"))?;
        }
        Ok(())
    }

    fn remove(&self, key: &v1::AttachmentKey) -> Result<bool, Status> {
        let gone = {
            let mut state = self.state();
            *state.adds.entry(place(key)).or_default() += 1;
            match state.attached.get(&place(key)) {
                Some(there) if there.key.as_ref().is_some_and(|k| k.network == key.network) => {
                    state.attached.remove(&place(key))
                }
                _ => None,
            }
        };
        let Some(gone) = gone else { return Ok(false) };
        self.disconnect(&gone).map_err(|e| Status::internal(format!("{e:#}")))?;
        Ok(true)
    }
}

fn keyed(key: Option<v1::AttachmentKey>) -> Result<(v1::AttachmentKey, String), Status> {
    let key = key.ok_or_else(|| Status::invalid_argument("no key"))?;
    let subject = format!("{}/{}/{}", key.network, key.container_id, key.interface);
    Ok((key, subject))
}

#[async_trait]
impl Delegate for Core {
    async fn add(&self, request: Request<v1::AddRequest>) -> Result<Response<v1::AddResponse>, Status> {
        use v1::add_response::Outcome;
        let request = request.into_inner();
        let (key, subject) = keyed(request.key.clone())?;
        let begun = {
            let mut state = self.state();
            state.asked.push(request.clone());
            *state.adds.entry(place(&key)).or_default()
        };
        let answer = |outcome| Ok(Response::new(v1::AddResponse { outcome: Some(outcome) }));
        if let Some(failure) = self.begin("Add", &subject).await? {
            return answer(Outcome::Failure(failure));
        }
        let made = {
            let mut state = self.state();
            if state.adds.get(&place(&key)) != Some(&begun) {
                return answer(Outcome::Failure(failure(11, "a DEL ended it", "", 0)));
            }
            if state.attached.contains_key(&place(&key)) {
                let what = format!("container {} has an interface {} already", key.container_id, key.interface);
                return answer(Outcome::Failure(failure(4, &what, "delete it first", 0)));
            }
            state.numbers += 1;
            let mut made = attachment(&key, &request.netns, state.numbers);
            if request.ipam.is_some() {
                let leased = |address: &String| v1::Address {
                    address: address.clone(),
                    prefix_len: 32,
                    gateway: request.gateways.first().cloned(),
                };
                made.addresses = request.addresses.iter().map(leased).collect();
            }
            state.attached.insert(place(&key), made.clone());
            made
        };
        self.connect(&made).map_err(|e| Status::internal(format!("{e:#}")))?;
        let lie = match self.state().moods.get("Add") {
            Some(Mood::Lie(lie)) => Some(lie.clone()),
            _ => None,
        };
        answer(Outcome::Added(lie.map_or(made, |lie| *lie)))
    }

    async fn del(&self, request: Request<v1::DelRequest>) -> Result<Response<v1::DelResponse>, Status> {
        use v1::del_response::Outcome;
        let (key, subject) = keyed(request.into_inner().key)?;
        let outcome = match self.begin("Del", &subject).await? {
            Some(failure) => Outcome::Failure(failure),
            None => {
                self.remove(&key)?;
                Outcome::Deleted(v1::Deleted {})
            }
        };
        Ok(Response::new(v1::DelResponse { outcome: Some(outcome) }))
    }

    async fn check(&self, request: Request<v1::CheckRequest>) -> Result<Response<v1::CheckResponse>, Status> {
        use v1::check_response::Outcome;
        let (key, subject) = keyed(request.into_inner().key)?;
        let failed = self.begin("Check", &subject).await?;
        let state = self.state();
        let outcome = match (failed, state.attached.get(&place(&key))) {
            (Some(failure), _) => Outcome::Failure(failure),
            (None, None) => Outcome::Failure(failure(3, "nothing is attached there", "", 0)),
            (None, Some(there)) => {
                Outcome::Checked(v1::Checked { attachment: Some(there.clone()), findings: state.findings.clone() })
            }
        };
        Ok(Response::new(v1::CheckResponse { outcome: Some(outcome) }))
    }

    async fn gc(&self, request: Request<v1::GcRequest>) -> Result<Response<v1::GcResponse>, Status> {
        use v1::gc_response::Outcome;
        let v1::GcRequest { network, valid, runtime: _ } = request.into_inner();
        if let Some(failure) = self.begin("Gc", &network).await? {
            return Ok(Response::new(v1::GcResponse { outcome: Some(Outcome::Failure(failure)) }));
        }
        let valid: BTreeSet<Place> = valid.iter().map(place).collect();
        let stale: Vec<v1::AttachmentKey> = {
            let state = self.state();
            let keys = state.attached.values().filter_map(|there| there.key.clone());
            keys.filter(|key| key.network == network && !valid.contains(&place(key))).collect()
        };
        let mut removed = 0;
        for key in stale {
            removed += u32::from(self.remove(&key)?);
        }
        let outcome = Outcome::Collected(v1::Collected { removed });
        Ok(Response::new(v1::GcResponse { outcome: Some(outcome) }))
    }

    async fn status(&self, _: Request<v1::StatusRequest>) -> Result<Response<v1::StatusResponse>, Status> {
        use v1::status_response::Outcome;
        let outcome = match self.begin("Status", "").await? {
            Some(failure) => Outcome::Failure(failure),
            None => Outcome::Ready(v1::Ready { service: NAME.to_owned() }),
        };
        Ok(Response::new(v1::StatusResponse { outcome: Some(outcome) }))
    }
}
