//! Network policy: what is wanted (`documents`), the rows that follow from it (`wharf_policy`), and that the kernel has them.
//!
//! | file | content |
//! |---|---|
//! | `documents` | imported policies, those of the directory, labels of namespaces; what is kept of them |
//! | `members` | endpoints as policy sees them |
//! | `inner` | all of it at one moment, and the rows that follow from a change |
//! | `proxied` | that the proxy has what rows lead to |
//! | `names` | addresses of names that DNS told |
//! | `redirects` | what the proxy is to do for rows, and the file that keeps its ports |
//! | `rounds` | connections that begin anew although their listener goes on |
//! | `rows` | rows as the kernel keeps them |
//! | `look` | what is told of all of it |
//! | `probes` | packets by which the self-check tries an endpoint's rules |
//! | `directory` | the policy directory |
//!
//! **Order.** One change after the other: rows are computed, what is wanted is kept, then the kernel's rows change, in the order
//! that lets nothing pass that both states deny. A change is answered when the kernel has it. Where the kernel refuses half-way,
//! its rows are read again before the next change, which leads from them to what is wanted.
//!
//! **The proxy.** Rows lead to listeners of the proxy where rules have requests. Before the rows change, the proxy is told all listeners and members
//! of both states; when it has acknowledged, or answers nobody, the rows follow; then it is told those of the new state alone, half a second later where
//! a listener loses a member: handshakes that began before go on there ([`redirects`]). A change of policy of which the proxy refuses a listener is refused as a whole. A revision is realized when the proxy has acknowledged, and no connection
//! is judged by requests of before any more. Where a listener stays and the change leads some of a member's connections elsewhere, the member begins another round there: the
//! proxy ends its connections of before, half a second later as well. A connection that is handed to a proxy that does not have its listener is dropped, or passes if the rule says so.
//!
//! Before there is a policy, or an endpoint that is isolated without one, nothing is computed and no row written. Programs of endpoints find their rows when they are
//! attached: [`Policy::put_endpoint`] comes before.
//!
//! **A lost file.** No row is written before there is a file of what is wanted, so a start that finds rules and no file knows that the
//! policies were lost. It keeps the kernel's rows as they are, and refuses what needs others ([`PolicyError::Lost`]), until an import or
//! the removal of all policies says what is wanted. Without that, containers would be reached that were closed.

pub mod addresses;
mod directory;
mod documents;
pub mod error;
mod inner;
mod look;
mod members;
mod names;
mod probes;
mod proxied;
pub mod redirects;
mod rounds;
mod rows;

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
use tokio::sync::{Mutex, OwnedMutexGuard};
use wharf_api::{Namespace, PolicyChange};
use wharf_common::SetsRow;
use wharf_core::{
    endpoint::EndpointRecord,
    ids::{EndpointId, Epoch},
    kernel::{Kernel, KernelError},
    policy::{Mode, RowChange},
};
use wharf_dns::cache::Cache;
use wharf_policy::{
    compile::{EndpointKey, Engine, Event, ListenerId},
    model::{Labels, PolicyName},
};

use self::{
    documents::{Changed, Documents, Parsed},
    error::PolicyError,
    inner::{Inner, LIMITS, advance, is_quick},
    proxied::Prepared,
    redirects::Ports,
    rounds::Rounds,
};
use crate::{
    config::{AgentConfig, Enforcement},
    proxy::{ProxyError, Redirects},
};

pub use directory::check as check_directory;
pub use look::{Ask, Summary, api_enforcement, destination};
pub use names::{CONTROLLER as NAMES_CONTROLLER, INTERVAL as NAMES_INTERVAL};
pub use probes::Probes;

/// Name of the controller that puts right what failed, and looks at the node's addresses and the policy directory.
pub const CONTROLLER: &str = "policy";

/// Policy of the node.
pub struct Policy {
    kernel: Arc<dyn Kernel>,
    file: PathBuf,
    directory: Option<PathBuf>,
    /// What keeps the ports of the proxy.
    redirects_file: PathBuf,
    /// The lowest of them.
    first_port: u16,
    /// What keeps the names.
    names_file: PathBuf,
    redirects: Arc<dyn Redirects>,
    /// Rows lead to the proxy, or may.
    uses_proxy: AtomicBool,
    mode: Mode,
    /// Addresses of services.
    services: Arc<[IpNet]>,
    /// Locked across the kernel's calls, each bounded by its caller: changes of rows have an order.
    inner: Arc<Mutex<Inner>>,
}

type Guard = OwnedMutexGuard<Inner>;

/// What a change comes to; `None` before there is a policy.
type Computed = Result<Option<Change>, PolicyError>;

/// The engine after a change, what the change is in the kernel, and of whose connections it leads some away from a listener that stays.
struct Change {
    engine: Engine,
    rows: Vec<RowChange>,
    moved: BTreeSet<(ListenerId, EndpointKey)>,
}

impl Policy {
    /// Policy as the settings say; [`Policy::load`] follows.
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
            inner: Arc::new(Mutex::new(Inner::new(config.policy_enforcement))),
        }
    }

    /// Reads what is kept. Before the agent changes anything: without it, containers would be reached that were closed.
    ///
    /// # Errors
    /// The file is there and cannot be used.
    pub async fn load(&self) -> Result<(), PolicyError> {
        let mut inner = self.lock().await;
        inner.kept_ports = redirects::load(&self.redirects_file).unwrap_or_else(|why| {
            let file = self.redirects_file.display();
            tracing::warn!(%file, "read the proxy's ports: {why}; connections through the proxy begin anew");
            Ports::default()
        });
        inner.rounds = Rounds::new(inner.kept_ports.rounds.clone());
        self.uses_proxy.store(!inner.kept_ports.listeners.is_empty(), Ordering::Relaxed);
        inner.names = names::load(&self.names_file).unwrap_or_else(|why| {
            let file = self.names_file.display();
            tracing::warn!(%file, "read names: {why}; containers must ask for them again");
            Cache::default()
        });
        inner.wanted = Documents::load(&self.file)?;
        inner.kept = !inner.wanted.lost;
        let kept = inner.wanted.texts.take();
        if let (Some(directory), Some(kept)) = (&self.directory, &kept) {
            inner.files.remember(directory, kept);
        }
        if let Some(found) = self.look_at_directory(&mut inner, directory::Age::Any).await? {
            let Inner { wanted, files, .. } = &mut *inner;
            files.refuse(wanted.set_directory(found));
        }
        if inner.kept && inner.wanted.texts != kept {
            self.keep_or_warn(&mut inner, "the next start needs all files of the policy directory good");
        }
        Ok(())
    }

    /// Puts the rows of the endpoints that there are at a start into the kernel, all at once: until then those from before the start
    /// are in force.
    ///
    /// # Errors
    /// The rows do not fit, or the kernel refused; those of before stay in force.
    pub async fn start(&self, records: impl IntoIterator<Item = EndpointRecord>) -> Result<(), PolicyError> {
        let mut inner = self.lock().await;
        for record in records {
            inner.put(&record);
        }
        // Until it is known that there is nothing to do: what fails here is tried again.
        inner.active = true;
        inner.node = self.kernel.observe_addresses().await?.into_iter().collect();
        let rows = self.kernel.observe_policy().await?;
        inner.active = rows.generation != 0 || inner.is_needed();
        inner.realized = if inner.active { 0 } else { inner.wanted.revision };
        self.realize(inner, Vec::new()).await.1
    }

    /// Gives an endpoint its place: its rows are in the kernel afterwards.
    ///
    /// # Errors
    /// The rows do not fit, or the kernel refused.
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

    /// Gives an endpoint back the place that a [`Policy::put_endpoint`] changed, because the change is given up.
    ///
    /// # Errors
    /// The kernel refused; it is tried again.
    pub async fn put_back_endpoint(&self, record: &EndpointRecord) -> Result<(), PolicyError> {
        let mut inner = self.lock().await;
        let event = inner.put(record);
        self.realize(inner, event.into_iter().collect()).await.1
    }

    /// Takes an endpoint's rows away, once its link is out of sight: without rows its programs let everything pass. Nothing happens to one of another epoch.
    ///
    /// # Errors
    /// The kernel refused; it is tried again.
    pub async fn remove_endpoint(&self, id: EndpointId, epoch: Epoch) -> Result<(), PolicyError> {
        let mut inner = self.lock().await;
        let Some(event) = inner.members.remove(id, epoch) else { return Ok(()) };
        match self.realize(inner, vec![event]).await.1 {
            // They go with the others. Until then no new endpoint takes its number or address.
            Err(PolicyError::Lost { .. }) => Ok(()),
            result => result,
        }
    }

    /// Takes a text: all of its policies or none.
    ///
    /// # Errors
    /// The text is refused, the rows do not fit, or it cannot be kept: nothing has changed. The kernel refused: it is tried again.
    pub async fn import(&self, file: &str, text: &str) -> Result<PolicyChange, PolicyError> {
        let (file, text) = (file.to_owned(), text.to_owned());
        // Neither on a thread that serves others, nor while endpoints wait for the lock.
        let parsed = tokio::task::spawn_blocking(move || Parsed::new(&file, &text));
        let parsed = parsed.await.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()))?;
        self.change(|wanted| wanted.import(parsed)).await
    }

    /// Removes an imported policy.
    ///
    /// # Errors
    /// It is unknown or of the directory, or as [`Policy::import`].
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

    /// Gives a namespace labels in place of those that it has; `None` forgets them. Its endpoints move without a gap.
    ///
    /// # Errors
    /// Name or labels break a rule, or as [`Policy::import`].
    pub async fn set_namespace(&self, name: &str, labels: Option<Labels>) -> Result<Namespace, PolicyError> {
        self.change(|wanted| wanted.set_namespace(name, labels).map(|()| Changed::default())).await?;
        let labels = self.lock().await.wanted.labels_of(name);
        Ok(Namespace { name: name.to_owned(), labels })
    }

    /// When policy is enforced, from now until the agent's end.
    ///
    /// # Errors
    /// The rows do not fit, or the kernel refused: it is tried again.
    pub async fn set_enforcement(&self, enforcement: Enforcement) -> Result<(), PolicyError> {
        let mut inner = self.lock().await;
        if inner.enforcement == enforcement {
            return Ok(());
        }
        self.check_lost(&mut inner).await?;
        inner.enforcement = enforcement;
        inner.renew();
        inner.active |= inner.is_needed();
        // From what the kernel has to all that is wanted now.
        inner.engine = None;
        self.realize(inner, Vec::new()).await.1
    }

    /// Whether connections are handed to the proxy, or may be in a moment.
    #[must_use]
    pub fn uses_proxy(&self) -> bool {
        self.uses_proxy.load(Ordering::Relaxed)
    }

    /// When policy is enforced.
    pub async fn enforcement(&self) -> Enforcement {
        self.lock().await.enforcement
    }

    /// Follows the node's addresses and the policy directory, and puts right what failed.
    ///
    /// # Errors
    /// What is still wrong.
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
        // What is wrong with the directory is no reason to leave the rest as it is.
        match self.check_lost(&mut inner).await {
            // It is told as the problem of policy.
            Err(PolicyError::Lost { .. }) => return directory,
            result => result?,
        }
        self.look_at_proxy(&mut inner).await?;
        let moved = self.look_at_addresses(&mut inner).await?;
        if moved.is_some() || inner.engine.is_none() {
            self.realize(inner, moved.into_iter().collect()).await.1?;
        }
        directory
    }

    /// Brings the rows to the addresses that the node has now.
    ///
    /// # Errors
    /// The addresses cannot be read, the rows do not fit, or the kernel refused; [`Policy::ensure`] retries.
    pub async fn follow_addresses(&self) -> Result<(), PolicyError> {
        let mut inner = self.lock().await;
        let Some(moved) = self.look_at_addresses(&mut inner).await? else { return Ok(()) };
        match self.realize(inner, vec![moved]).await.1 {
            // The rows of lost policies stay as they are.
            Err(PolicyError::Lost { .. }) => Ok(()),
            result => result,
        }
    }

    /// Reads the node's addresses. Returns the event for the engine if they have changed.
    async fn look_at_addresses(&self, inner: &mut Inner) -> Result<Option<Event>, PolicyError> {
        let node: BTreeSet<IpAddr> = self.kernel.observe_addresses().await?.into_iter().collect();
        if node == inner.node {
            return Ok(None);
        }
        inner.node.clone_from(&node);
        Ok(Some(Event::Node(node)))
    }

    /// Takes the policies of the directory. Those that did not fit are not computed again before they, or what else there is, have
    /// changed.
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
        let result = self.take(inner, wanted).await;
        let mut inner = self.lock().await;
        inner.files.not_taken = result.as_ref().err().cloned();
        if let Err(why @ PolicyError::Rows(_)) = &result {
            inner.too_large = Some((state, why.clone()));
        }
        result
    }

    /// Reads the kernel's rows, and leads them to what is wanted.
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

    /// The policies of the directory, where that is a setting.
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
        self.take(inner, wanted).await?;
        let names = |names: BTreeSet<PolicyName>| names.iter().map(ToString::to_string).collect();
        let realized = self.settled(revision).await;
        Ok(PolicyChange { revision, realized, put: names(put), removed: names(removed) })
    }

    /// Makes this what is wanted: computed, kept, then in the kernel. The node's addresses are read first, so that a revision in force covers
    /// those that the node has.
    async fn take(&self, mut inner: Guard, wanted: Documents) -> Result<(), PolicyError> {
        let mut events =
            if inner.enforcement == Enforcement::Never { Vec::new() } else { wanted.events_since(&inner.wanted) };
        let node = inner.node.clone();
        match self.look_at_addresses(&mut inner).await {
            Ok(moved) => events.extend(moved),
            // All rows are computed, which reads the addresses again: a failure there leaves the change wanted, and it is retried.
            Err(_) => inner.engine = None,
        }
        let before = std::mem::replace(&mut inner.wanted, wanted);
        let members = inner.members.clone();
        if !inner.wanted.says_the_same_of_endpoints(&before) {
            events.extend(inner.renew());
        }
        let was_active = inner.active;
        inner.active = was_active || inner.is_needed();
        if before.lost && !inner.wanted.lost {
            // The engine has what the lost policies left, and nothing of what is wanted.
            inner.engine = None;
        }
        let known = inner.engine.clone();
        let (inner, computed) = self.compute(inner, events).await;
        // Rows that were read just now may lead to more than the proxy was told before.
        let told = inner.told.clone();
        let (mut inner, prepared) = self.propose(inner, computed).await;
        let prepared = match prepared {
            Ok(Some(Prepared { acknowledged: Err(ProxyError::Refused(why) | ProxyError::Taken(_, why)), .. })) => {
                Err(PolicyError::Proxy(why))
            }
            other => other,
        };
        let kept = match &prepared {
            Err(PolicyError::Rows(_) | PolicyError::Proxy(_)) => Ok(()),
            _ => self
                .keep(&mut inner)
                .map_err(|why| PolicyError::NotKept { path: self.file.clone(), why: Arc::new(why) }),
        };
        let refused = match (prepared, kept) {
            (Ok(Some(prepared)), Ok(())) => return self.write(&mut inner, prepared).await,
            (Ok(None), Ok(())) => {
                inner.realized = inner.wanted.revision;
                return Ok(());
            }
            // It is wanted as soon as somebody says what else is.
            (Err(PolicyError::Lost { .. }), Ok(())) => return Ok(()),
            // The kernel's rows could not be read, or the way to the proxy not made: what is wanted stays, and is tried again.
            (Err(kernel @ PolicyError::Kernel(_)), Ok(())) => {
                inner.problem = Some(kernel.to_string());
                return Err(kernel);
            }
            (Err(refused), _) | (Ok(_), Err(refused)) => refused,
        };
        drop(self.tell_proxy(&mut inner, told));
        inner.engine = known;
        inner.wanted = before;
        inner.node = node;
        inner.members = members;
        inner.active = was_active;
        Err(refused)
    }

    /// Leads the kernel to what is wanted.
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
                // What the caller wanted is told by its events alone, so all of it is computed the next time.
                inner.engine = None;
            }
            inner.problem = Some(why.to_string());
        }
        (inner, result)
    }

    /// The engine after the events, and the changes of the kernel's rows; `None` before there is a policy. Where it is not known
    /// what the kernel has, they lead from what it has to all that is wanted.
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
                let tables = self.take_over(&mut inner, &rows);
                let engine = Engine::after(LIMITS, tables).with_rows_of(&self.services);
                let engine = engine.with_listeners_from(self.first_port);
                (engine.without_listeners(Arc::clone(&inner.taken)), inner.all(&self.services))
            }
        };
        if is_quick(&engine, &events) {
            return advance(inner, engine, events, &self.services);
        }
        let services = Arc::clone(&self.services);
        // A change of many rows takes tens of milliseconds.
        let computed = tokio::task::spawn_blocking(move || advance(inner, engine, events, &services)).await;
        computed.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()))
    }

    /// Holds the kernel's rows as they are where they are those of lost policies. Where the kernel has no rules there were no policies,
    /// and where none is to be enforced they do not matter.
    async fn check_lost(&self, inner: &mut Inner) -> Result<(), PolicyError> {
        if !inner.wanted.lost {
            return Ok(());
        }
        let lost = PolicyError::Lost { path: self.file.clone() };
        if inner.engine.is_some() {
            return Err(lost);
        }
        let rows = self.kernel.observe_policy().await?;
        if inner.enforcement == Enforcement::Never || rows.sets.values().all(|sets| *sets == SetsRow::default()) {
            (inner.wanted.lost, inner.kept) = (false, false);
            return Ok(());
        }
        self.kernel.change_policy(Vec::new(), self.mode).await?;
        let tables = self.take_over(inner, &rows);
        inner.engine = Some(Engine::after(LIMITS, tables));
        inner.problem = Some(lost.to_string());
        Err(lost)
    }

    fn keep(&self, inner: &mut Inner) -> io::Result<()> {
        inner.wanted.save(&self.file)?;
        inner.kept = true;
        Ok(())
    }

    fn keep_or_warn(&self, inner: &mut Inner, otherwise: &str) {
        if let Err(why) = self.keep(inner) {
            tracing::warn!(file = %self.file.display(), "keep policies: {why}; {otherwise}");
        }
    }
}

/// Notes what the kernel refused.
fn or_problem(inner: &mut Inner, result: Result<(), KernelError>) -> Result<(), PolicyError> {
    result.map_err(|why| {
        let why = PolicyError::from(why);
        inner.problem = Some(why.to_string());
        why
    })
}
