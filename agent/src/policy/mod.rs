//! Network policy: wanted documents, the rows computed from them (`wharf_policy`), and the kernel's rows.
//!
//! | file | content |
//! |---|---|
//! | `documents` | policies, namespace labels, and their file |
//! | `members` | endpoints as policy sees them |
//! | `inner` | the state, and the rows of a change |
//! | `limits` | rows that the kernel's tables hold |
//! | `proxied` | keeps the proxy in step |
//! | `names` | addresses of names, from DNS answers |
//! | `redirects` | listeners, members, and the file of ports |
//! | `rounds` | members that restart connections |
//! | `rows` | conversion from and to the kernel's rows |
//! | `look` | views for the API |
//! | `probes` | test packets for the self-check |
//! | `directory` | the policy directory |
//! | `feed` | rows of the cluster feed |
//! | `start` | saved state, endpoints, then the first rows |
//!
//! **Order.** Changes run one at a time: compute the rows, save the wanted state, change the kernel's rows in an order
//! that never lets pass what both states deny. After a partial failure, the next change starts from the kernel's rows.
//!
//! **The proxy.** Rules with requests redirect to its listeners. Before rows change, the proxy gets listeners and
//! members of both states, and the agent waits for its acknowledgement, unless it does not answer; a refused listener
//! refuses the change. Then the proxy gets the new state; a listener keeps a lost member for another half second, so
//! that open handshakes complete ([`redirects`]). If rows lead some of a member's connections away from a listener that
//! stays, the member begins another round: half a second later, the proxy ends its earlier connections. A revision is
//! realized when the proxy has acknowledged and connections judged by earlier requests have ended. A connection to a
//! missing listener is dropped, or passes if the rule says so.
//!
//! Nothing is computed until there is a policy, or an endpoint that is isolated without one. [`Policy::put_endpoint`]
//! precedes the attachment of programs, so that they find their rows.
//!
//! **A lost file.** The wanted state is saved before any row is written: rules in the kernel without that file mean
//! lost policies. The agent then keeps the rows and refuses changes ([`PolicyError::Lost`]) until an import or the
//! removal of all policies; otherwise isolated containers would become reachable. The file does not have the policies
//! of the cluster feed, only whether there are any: until the feed's rows are all known and read, they count as lost,
//! also without rules in the kernel.

pub mod addresses;
mod directory;
mod documents;
pub mod error;
mod feed;
mod inner;
mod limits;
mod look;
mod members;
mod names;
mod probes;
mod proxied;
pub mod redirects;
mod rounds;
mod rows;
mod start;

use std::{
    collections::BTreeSet,
    io,
    net::IpAddr,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use ipnet::IpNet;
use tokio::sync::{Mutex, OwnedMutexGuard, watch};
use wharf_api::{Namespace, PolicyChange};
use wharf_common::SetsRow;
use wharf_core::{
    endpoint::EndpointRecord,
    ids::{EndpointId, Epoch},
    kernel::{Kernel, KernelError},
    policy::{Enforcement, Mode, RowChange},
};
use wharf_kit::sync::lock;
use wharf_policy::{
    compile::{EndpointKey, Engine, Event, ListenerId},
    model::{Labels, PolicyName},
};

use self::{
    documents::{Changed, Documents, Parsed},
    error::PolicyError,
    feed::ChangedPod,
    inner::{Inner, advance, is_quick},
    limits::PARTS,
    proxied::Prepared,
};
use crate::{
    config::AgentConfig,
    proxy::{ProxyError, Redirects},
};

pub use directory::check as check_directory;
pub use documents::RefusedPolicy;
pub use look::{Ask, Summary, destination};
pub use members::Unrecorded;
pub use names::{CONTROLLER as NAMES_CONTROLLER, INTERVAL as NAMES_INTERVAL};
pub use probes::Probes;

/// Retries failures, and polls addresses and the policy directory.
pub const CONTROLLER: &str = "policy";

/// Policy of the node.
pub struct Policy {
    kernel: Arc<dyn Kernel>,
    file: PathBuf,
    directory: Option<PathBuf>,
    redirects_file: PathBuf,
    first_port: u16,
    names_file: PathBuf,
    redirects: Arc<dyn Redirects>,
    uses_proxy: AtomicBool,
    /// Without what depends on the policies.
    mode: Mode,
    services: Arc<[IpNet]>,
    has_feed: bool,
    /// The first rows are computed; see [`Policy::start`].
    started: watch::Sender<bool>,
    /// Endpoints removed before [`Policy::start`] has written the first rows, which does not hold up their removal.
    removed_early: std::sync::Mutex<Option<Vec<(EndpointId, Epoch)>>>,
    /// Orders the changes of rows: held across kernel calls, which the caller bounds.
    inner: Arc<Mutex<Inner>>,
}

type Guard = OwnedMutexGuard<Inner>;

type Computed = Result<Option<Change>, PolicyError>;

/// `moved`: members whose connections partly leave a listener that stays.
struct Change {
    engine: Engine,
    rows: Vec<RowChange>,
    moved: BTreeSet<(ListenerId, EndpointKey)>,
}

impl Policy {
    /// Policy before [`Policy::load`].
    #[must_use]
    pub fn new(config: &AgentConfig, kernel: Arc<dyn Kernel>, redirects: Arc<dyn Redirects>) -> Self {
        Self {
            kernel,
            file: config.state_dir.join("policy.json"),
            directory: config.policy_dir.clone(),
            redirects_file: config.state_dir.join("redirects.json"),
            first_port: config.proxy_port,
            names_file: config.state_dir.join("names.json"),
            redirects,
            uses_proxy: AtomicBool::new(false),
            mode: Mode { keeps_flows: config.policy_keep_flows, audits: config.policy_audit },
            services: config.service_cidr.as_slice().into(),
            has_feed: config.cluster_feed.is_some(),
            started: watch::Sender::new(false),
            removed_early: std::sync::Mutex::new(Some(Vec::new())),
            inner: Arc::new(Mutex::new(Inner::new(config.policy_enforcement))),
        }
    }

    /// Adds or updates an endpoint and its rows.
    ///
    /// # Errors
    /// As [`Policy::start`].
    pub async fn put_endpoint(&self, record: &EndpointRecord) -> Result<(), PolicyError> {
        let mut inner = self.lock().await;
        let before = inner.members.get(record.id).cloned();
        let Some(event) = inner.put(record) else { return Ok(()) };
        let (mut inner, result) = self.realize(inner, vec![event]).await;
        if result.is_err() {
            inner.members.put_back(record.id, before);
        }
        result
    }

    /// Rolls back [`Policy::put_endpoint`].
    ///
    /// # Errors
    /// The kernel refused: retried.
    pub async fn put_back_endpoint(&self, record: &EndpointRecord) -> Result<(), PolicyError> {
        let mut inner = self.lock().await;
        let event = inner.put(record);
        self.realize(inner, event.into_iter().collect()).await.1
    }

    /// Removes an endpoint's rows, after its link left every look-up: without rows its programs accept everything.
    ///
    /// # Errors
    /// The kernel refused: retried.
    pub async fn remove_endpoint(&self, id: EndpointId, epoch: Epoch) -> Result<(), PolicyError> {
        if let Some(removed) = &mut *lock(&self.removed_early) {
            // The start removes the rows before another endpoint gets the id or address.
            removed.push((id, epoch));
            return Ok(());
        }
        let mut inner = self.lock().await;
        let Some(event) = inner.remove(id, epoch) else { return Ok(()) };
        match self.realize(inner, vec![event]).await.1 {
            // These rows go with the lost policies; before, no endpoint gets the id or address.
            Err(PolicyError::Lost { .. }) => Ok(()),
            result => result,
        }
    }

    /// Imports all policies of a text, or none.
    ///
    /// # Errors
    /// Text, row or listener refused, or saving failed: nothing has changed. The kernel refused: retried.
    pub async fn import(&self, file: &str, text: &str) -> Result<PolicyChange, PolicyError> {
        let (file, text) = (file.to_owned(), text.to_owned());
        let parsed = tokio::task::spawn_blocking(move || Parsed::new(&file, &text));
        let parsed = parsed.await.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()))?;
        self.change(|wanted| wanted.import(parsed)).await
    }

    /// Removes an imported policy.
    ///
    /// # Errors
    /// Unknown, of the directory, or as [`Policy::import`].
    pub async fn delete(&self, name: &PolicyName) -> Result<PolicyChange, PolicyError> {
        self.change(|wanted| wanted.delete(name)).await
    }

    /// Removes all imported policies.
    ///
    /// # Errors
    /// As [`Policy::import`].
    pub async fn delete_all(&self) -> Result<PolicyChange, PolicyError> {
        self.change(|wanted| Ok(wanted.delete_all())).await
    }

    /// Replaces a namespace's labels; `None` removes them.
    ///
    /// # Errors
    /// Invalid name or label, or as [`Policy::import`].
    pub async fn set_namespace(&self, name: &str, labels: Option<Labels>) -> Result<Namespace, PolicyError> {
        self.change(|wanted| wanted.set_namespace(name, labels).map(|()| Changed::default())).await?;
        let labels = self.lock().await.wanted.labels_of(name);
        Ok(Namespace { name: name.to_owned(), labels })
    }

    /// Sets when policy is enforced, until the agent ends.
    ///
    /// # Errors
    /// Rows do not fit, or the kernel refused: retried.
    pub async fn set_enforcement(&self, enforcement: Enforcement) -> Result<(), PolicyError> {
        let mut inner = self.lock().await;
        if inner.enforcement == enforcement {
            return Ok(());
        }
        self.check_lost(&mut inner).await?;
        inner.enforcement = enforcement;
        inner.renew();
        inner.active |= inner.is_needed();
        inner.engine = None;
        self.realize(inner, Vec::new()).await.1
    }

    /// Whether rows redirect to the proxy, or may soon.
    #[must_use]
    pub fn uses_proxy(&self) -> bool {
        self.uses_proxy.load(Ordering::Relaxed)
    }

    /// When policy is enforced.
    pub async fn enforcement(&self) -> Enforcement {
        self.lock().await.enforcement
    }

    /// Follows addresses and the policy directory, and retries failures.
    ///
    /// # Errors
    /// A remaining failure.
    pub async fn ensure(&self) -> Result<(), PolicyError> {
        let mut inner = self.lock().await;
        let directory = match self.look_at_directory(&mut inner, directory::Age::Settled).await {
            Ok(Some(found)) => {
                let result = self.follow_directory(inner, found).await;
                inner = self.lock().await;
                result
            }
            other => other.map(drop),
        };
        match self.check_lost(&mut inner).await {
            Err(PolicyError::Lost { .. }) => return directory,
            result => result?,
        }
        if inner.kept && matches!(self.file.try_exists(), Ok(false)) {
            tracing::warn!(file = %self.file.display(), "the file of the policies was removed: it is written again");
            self.keep_or_warn(&mut inner, "the next start would take the policies for lost").await;
        }
        self.look_at_proxy(&mut inner).await?;
        let moved = self.look_at_addresses(&mut inner).await?;
        if moved.is_some() || inner.engine.is_none() {
            let result;
            (inner, result) = self.realize(inner, moved.into_iter().collect()).await;
            result?;
        }
        self.retry_rows(inner).await?;
        directory
    }

    /// Follows the node's addresses.
    ///
    /// # Errors
    /// As [`Policy::start`]; [`Policy::ensure`] retries.
    pub async fn follow_addresses(&self) -> Result<(), PolicyError> {
        let mut inner = self.lock().await;
        let Some(moved) = self.look_at_addresses(&mut inner).await? else { return Ok(()) };
        match self.realize(inner, vec![moved]).await.1 {
            Err(PolicyError::Lost { .. }) => Ok(()),
            result => result,
        }
    }

    /// Replaces the networks of containers of other nodes, and the addresses of other nodes.
    ///
    /// # Errors
    /// As [`Policy::start`]; [`Policy::ensure`] retries.
    pub async fn set_cluster(
        &self,
        pods: impl IntoIterator<Item = IpNet>,
        nodes: impl IntoIterator<Item = IpAddr>,
    ) -> Result<(), PolicyError> {
        let pods: BTreeSet<IpNet> = pods.into_iter().collect();
        let nodes: BTreeSet<IpAddr> = nodes.into_iter().collect();
        let mut inner = self.lock_early().await;
        let mut events = Vec::new();
        if inner.pods != pods {
            inner.pods.clone_from(&pods);
            events.push(Event::Pods(pods));
        }
        if inner.other_nodes != nodes {
            inner.other_nodes.clone_from(&nodes);
            events.push(Event::OtherNodes(nodes));
        }
        if events.is_empty() || !inner.active || !self.has_started() {
            return Ok(());
        }
        match self.realize(inner, events).await.1 {
            Err(PolicyError::Lost { .. }) => Ok(()),
            result => result,
        }
    }

    async fn look_at_limits(&self, inner: &mut Inner) -> Result<(), PolicyError> {
        let peers = self.kernel.observe_peers_max().await?;
        inner.limits.ipcache = (peers as usize).saturating_sub(1);
        Ok(())
    }

    async fn look_at_addresses(&self, inner: &mut Inner) -> Result<Option<Event>, PolicyError> {
        let node: BTreeSet<IpAddr> = self.kernel.observe_addresses().await?.into_iter().collect();
        if node == inner.node {
            return Ok(None);
        }
        inner.node.clone_from(&node);
        Ok(Some(Event::Node(node)))
    }

    /// Policies that did not fit are retried when files, wanted revision or rows change.
    async fn follow_directory(&self, mut inner: Guard, found: directory::Found) -> Result<(), PolicyError> {
        let mut wanted = inner.wanted.clone();
        let names = wanted.set_directory(found);
        inner.files.refuse(names);
        if wanted.revision == inner.wanted.revision {
            inner.files.not_taken = None;
            return Ok(());
        }
        let state = (inner.files.changes(), inner.wanted.revision, inner.writes);
        if let Some((at, why)) = &inner.too_large
            && *at == state
        {
            return Err(why.clone());
        }
        let (mut inner, result) = self.take(inner, wanted, &[], Saves::Always).await;
        inner.files.not_taken = result.as_ref().err().cloned();
        if let Err(why @ PolicyError::Rows(_)) = &result {
            inner.too_large = Some((state, why.clone()));
        }
        result
    }

    /// Reads the kernel's rows back and corrects them.
    ///
    /// # Errors
    /// As [`Policy::start`].
    pub async fn put_right(&self) -> Result<(), PolicyError> {
        let mut inner = self.lock().await;
        if !inner.active {
            return Ok(());
        }
        inner.engine = None;
        self.realize(inner, Vec::new()).await.1
    }

    async fn look_at_directory(
        &self,
        inner: &mut Inner,
        age: directory::Age,
    ) -> Result<Option<directory::Found>, PolicyError> {
        let Some(path) = self.directory.clone() else { return Ok(None) };
        let mut files = std::mem::take(&mut inner.files);
        let looked = tokio::task::spawn_blocking(move || {
            let found = files.look(&path, age);
            (files, found)
        });
        let (files, found) = looked.await.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()));
        inner.files = files;
        found.map(Some)
    }

    async fn lock(&self) -> Guard {
        self.started().await;
        self.lock_early().await
    }

    /// Also before [`Policy::start`].
    async fn lock_early(&self) -> Guard {
        Arc::clone(&self.inner).lock_owned().await
    }

    async fn change(
        &self,
        change: impl FnOnce(&mut Documents) -> Result<Changed, PolicyError>,
    ) -> Result<PolicyChange, PolicyError> {
        let inner = self.lock().await;
        let mut wanted = inner.wanted.clone();
        let Changed { put, removed } = change(&mut wanted)?;
        let revision = wanted.revision;
        self.take(inner, wanted, &[], Saves::Always).await.1?;
        let names = |names: BTreeSet<PolicyName>| names.iter().map(ToString::to_string).collect();
        let realized = self.settled(revision, None).await;
        Ok(PolicyChange { revision, realized, put: names(put), removed: names(removed) })
    }

    /// Reads the node's addresses first, so that a realized revision covers them. What does not fit, or the proxy
    /// refuses, changes nothing.
    async fn take(
        &self,
        mut inner: Guard,
        wanted: Documents,
        pods: &[ChangedPod],
        saves: Saves,
    ) -> (Guard, Result<(), PolicyError>) {
        let mut events = if inner.enforcement == Enforcement::Never {
            Vec::new()
        } else {
            wanted.events_since(&inner.wanted, &self.services)
        };
        let node = inner.node.clone();
        match self.look_at_addresses(&mut inner).await {
            Ok(moved) => events.extend(moved),
            // Computes everything, with another read of the addresses.
            Err(_) => inner.engine = None,
        }
        let before = std::mem::replace(&mut inner.wanted, wanted);
        let members = inner.members.clone();
        if !inner.wanted.says_the_same_of_endpoints(&before) {
            events.extend(inner.renew());
        }
        for (uid, pod) in pods {
            events.extend(inner.put_elsewhere(uid, pod.clone()));
        }
        let was_active = inner.active;
        inner.active = was_active || inner.is_needed();
        if (before.lost && !inner.wanted.lost) || (before.awaits_cluster && !inner.wanted.awaits_cluster) {
            inner.engine = None;
        }
        let known = inner.engine.clone();
        let (inner, computed) = self.compute(inner, events).await;
        // `compute` may have sent the proxy the kernel's redirects.
        let told = inner.told.clone();
        let (mut inner, prepared) = self.propose(inner, computed).await;
        let prepared = match prepared {
            Ok(Some(Prepared { acknowledged: Err(ProxyError::Refused(why) | ProxyError::Taken(_, why)), .. })) => {
                Err(PolicyError::Proxy(why))
            }
            other => other,
        };
        let is_saved = saves == Saves::IfNeeded && before.has_cluster() == inner.wanted.has_cluster();
        let kept = match &prepared {
            Err(PolicyError::Rows(_) | PolicyError::Proxy(_)) => Ok(()),
            _ if is_saved => Ok(()),
            _ => self
                .keep(&mut inner)
                .await
                .map_err(|why| PolicyError::NotKept { path: self.file.clone(), why: Arc::new(why) }),
        };
        let refused = match (prepared, kept) {
            (Ok(Some(prepared)), Ok(())) => {
                let result = self.write(&mut inner, prepared).await;
                return (inner, result);
            }
            (Ok(None), Ok(())) => {
                (inner.realized, inner.problem) = (inner.wanted.revision, None);
                return (inner, Ok(()));
            }
            // Applies once the lost policies are replaced.
            (Err(PolicyError::Lost { .. }), Ok(())) => return (inner, Ok(())),
            // Stays wanted and is retried.
            (Err(kernel @ PolicyError::Kernel(_)), Ok(())) => {
                inner.problem = Some(kernel.to_string());
                return (inner, Err(kernel));
            }
            (Err(refused), _) | (Ok(_), Err(refused)) => refused,
        };
        drop(self.tell_proxy(&mut inner, told));
        inner.engine = known;
        inner.wanted = before;
        inner.node = node;
        inner.members = members;
        inner.active = was_active;
        (inner, Err(refused))
    }

    async fn realize(&self, inner: Guard, events: Vec<Event>) -> (Guard, Result<(), PolicyError>) {
        let (inner, computed) = self.compute(inner, events).await;
        let (mut inner, prepared) = self.propose(inner, computed).await;
        let result = match prepared {
            Ok(None) => Ok(()),
            Ok(Some(prepared)) => self.write(&mut inner, prepared).await,
            Err(why) => Err(why),
        };
        if let Err(why) = &result {
            if !matches!(why, PolicyError::Lost { .. }) {
                // The events are gone: the next change computes everything.
                inner.engine = None;
            }
            inner.problem = Some(why.to_string());
        }
        (inner, result)
    }

    /// Without an engine, computes everything from the kernel's rows.
    async fn compute(&self, mut inner: Guard, events: Vec<Event>) -> (Guard, Computed) {
        if let Err(why) = self.check_lost(&mut inner).await {
            return (inner, Err(why));
        }
        if !inner.active {
            return (inner, Ok(None));
        }
        let (engine, events) = match &inner.engine {
            Some(engine) => (engine.clone().without_listeners(Arc::clone(&inner.taken)), events),
            None => {
                let rows = match self.kernel.observe_policy().await {
                    Ok(rows) => rows,
                    Err(why) => return (inner, Err(why.into())),
                };
                if let Err(why) = self.look_at_addresses(&mut inner).await {
                    return (inner, Err(why));
                }
                if let Err(why) = self.look_at_limits(&mut inner).await {
                    return (inner, Err(why));
                }
                let tables = self.take_over(&mut inner, &rows);
                let networks = if self.has_feed { inner.limits.ipcache / PARTS } else { usize::MAX };
                let engine = Engine::after(inner.limits, tables).with_networks_at_most(networks);
                let engine = engine.with_rows_of(&self.services);
                let engine = engine.with_listeners_from(self.first_port);
                (engine.without_listeners(Arc::clone(&inner.taken)), inner.all(&self.services))
            }
        };
        if is_quick(&engine, &events) {
            return advance(inner, engine, events, &self.services);
        }
        let services = Arc::clone(&self.services);
        // Many rows take tens of milliseconds.
        let computed = tokio::task::spawn_blocking(move || advance(inner, engine, events, &services)).await;
        computed.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()))
    }

    /// Keeps the rows of lost policies. Without the file and without rules in the kernel there were none; with
    /// enforcement `Never` they do not matter. A file that says that the feed had policies is right without rules, too:
    /// after a boot, or when they selected no endpoint.
    async fn check_lost(&self, inner: &mut Inner) -> Result<(), PolicyError> {
        if !inner.wanted.lost && !inner.wanted.awaits_cluster {
            return Ok(());
        }
        let lost = PolicyError::Lost { path: self.file.clone(), of_cluster: inner.wanted.awaits_cluster };
        if inner.engine.is_some() {
            return Err(lost);
        }
        let rows = self.kernel.observe_policy().await?;
        let has_rules = rows.sets.values().any(|sets| *sets != SetsRow::default());
        if inner.enforcement == Enforcement::Never || !(has_rules || inner.wanted.awaits_cluster) {
            (inner.wanted.lost, inner.wanted.awaits_cluster, inner.kept) = (false, false, false);
            return Ok(());
        }
        if has_rules {
            self.kernel.change_policy(Vec::new(), self.mode).await?;
        }
        let tables = self.take_over(inner, &rows);
        inner.engine = Some(Engine::after(inner.limits, tables));
        inner.problem = Some(lost.to_string());
        Err(lost)
    }

    /// Answers after the fsync, which may take longer than a runtime thread may be blocked.
    async fn keep(&self, inner: &mut Inner) -> io::Result<()> {
        let (wanted, file) = (inner.wanted.clone(), self.file.clone());
        let saved = tokio::task::spawn_blocking(move || wanted.save(&file)).await;
        saved.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()))?;
        inner.kept = true;
        Ok(())
    }

    async fn keep_or_warn(&self, inner: &mut Inner, otherwise: &str) {
        if let Err(why) = self.keep(inner).await {
            tracing::warn!(file = %self.file.display(), "keep policies: {why}; {otherwise}");
        }
    }
}

/// Whether a change of the wanted policies writes the policy file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Saves {
    Always,
    /// It does not have the rows of the cluster feed, only whether there are any.
    IfNeeded,
}

fn or_problem(inner: &mut Inner, result: Result<(), KernelError>) -> Result<(), PolicyError> {
    result.map_err(|why| {
        let why = PolicyError::from(why);
        inner.problem = Some(why.to_string());
        why
    })
}
