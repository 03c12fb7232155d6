//! Network policy: [`wharf_enforce`] decides, this module performs.
//!
//! **Order.** One change at a time: compute rows, save the wanted state, change the kernel's rows in an order that
//! never passes what both states deny. After a partial failure, the next change starts from the kernel's rows.
//!
//! **Proxy.** Rules with requests redirect to its listeners. Before rows change, the proxy gets listeners and members
//! of both states, and the agent waits for its acknowledgement, unless it does not answer; a refused listener refuses
//! the change. Then the proxy gets the new state; a listener keeps a lost member for half a second, for open handshakes
//! ([`wharf_enforce::redirects`]). If some of a member's connections no longer belong to a remaining listener, the
//! proxy ends the member's earlier connections half a second later. A revision is realized when the proxy has
//! acknowledged it and earlier connections have ended. A connection to a missing listener is dropped, unless the rule
//! lets it pass.
//!
//! Nothing is computed without a policy or an endpoint that is isolated without one. [`Policy::put_endpoint`] precedes
//! the attachment of programs, which then find their rows.
//!
//! **Lost file.** The wanted state is saved before rows: kernel rules without that file mean lost policies. The agent
//! then keeps the rows and refuses changes ([`PolicyError::Lost`]) until an import or the removal of all policies;
//! otherwise isolated containers would become reachable. Of the cluster feed's policies, the file has only whether
//! there are any; until all rows of the feed are read, they count as lost.

pub mod addresses;
mod directory;
mod effects;
mod feed;
mod look;
mod names;
mod probes;
mod proxied;
mod start;

use std::{
    collections::BTreeSet,
    net::IpAddr,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use ipnet::IpNet;
use tokio::{
    sync::{Mutex, OwnedMutexGuard, watch},
    time::Instant,
};
use wharf_api::{Namespace, PolicyChange};
use wharf_core::{
    endpoint::EndpointRecord,
    ids::{EndpointId, Epoch},
    kernel::Kernel,
    policy::{Enforcement, Mode},
};
use wharf_enforce::{
    documents::{Changed, Documents, Parsed},
    inputs::Input,
    state::{Settings, State},
    transaction::{Terms, Transaction},
};
use wharf_kit::{kept, sync::lock};
use wharf_policy::model::{Labels, PolicyName};

use self::error::PolicyError;
use crate::{
    config::AgentConfig,
    proxy::{Proxy, Redirects},
};

pub use directory::check as check_directory;
pub use look::{Ask, Summary, destination};
pub use names::{CONTROLLER as NAMES_CONTROLLER, INTERVAL as NAMES_INTERVAL};
pub use probes::Probes;
pub use wharf_enforce::{documents::RefusedPolicy, error, members::Unrecorded};

/// Retries failures, and polls addresses and the policy directory.
pub const CONTROLLER: &str = "policy";

/// Policy of the node.
pub struct Policy {
    kernel: Arc<dyn Kernel>,
    file: PathBuf,
    directory: Option<PathBuf>,
    redirects_file: PathBuf,
    names_file: PathBuf,
    /// Enforces rules about requests and names.
    pub proxy: Proxy,
    uses_proxy: AtomicBool,
    mode: Mode,
    settings: Settings,
    started: watch::Sender<bool>,
    /// Removals before the first rows do not wait for them.
    removed_early: std::sync::Mutex<Option<Vec<(EndpointId, Epoch)>>>,
    /// Orders changes of rows. Held across kernel calls, which the caller bounds.
    inner: Arc<Mutex<Inner>>,
}

type Guard = OwnedMutexGuard<Inner>;

struct Inner {
    state: State,
    files: directory::Files,
    too_large: Option<((u64, u64, u64), PolicyError)>,
    names_stale: bool,
    left_proxy: Option<Instant>,
}

/// Follows a test's paused clock.
fn now() -> std::time::Instant {
    Instant::now().into_std()
}

impl Policy {
    /// Policy before [`Policy::load`].
    #[must_use]
    pub fn new(config: &AgentConfig, kernel: Arc<dyn Kernel>, redirects: Arc<dyn Redirects>) -> Self {
        let settings = Settings {
            file: config.state_dir.join("policy.json"),
            services: config.service_cidr.as_slice().into(),
            first_port: config.proxy_port,
            has_feed: config.cluster_feed.is_some(),
        };
        let state = State::new(settings.clone(), config.policy_enforcement);
        let inner =
            Inner { state, files: directory::Files::default(), too_large: None, names_stale: false, left_proxy: None };
        Self {
            kernel,
            file: settings.file.clone(),
            directory: config.policy_dir.clone(),
            redirects_file: config.state_dir.join("redirects.json"),
            names_file: config.state_dir.join("names.json"),
            proxy: Proxy::new(redirects),
            uses_proxy: AtomicBool::new(false),
            mode: Mode { keeps_flows: config.policy_keep_flows, audits: config.policy_audit },
            settings,
            started: watch::Sender::new(false),
            removed_early: std::sync::Mutex::new(Some(Vec::new())),
            inner: Arc::new(Mutex::new(inner)),
        }
    }

    /// Adds or updates an endpoint and its rows.
    ///
    /// # Errors
    /// As [`Policy::start`]. The endpoint is as before for policy; after a failure of the kernel, [`Policy::ensure`]
    /// corrects its rows.
    pub async fn put_endpoint(&self, record: &EndpointRecord) -> Result<(), PolicyError> {
        let inner = self.lock().await;
        self.realize(inner, Terms::ENDPOINT, vec![Input::Endpoint(record.clone().into())]).await.1
    }

    /// Rolls back [`Policy::put_endpoint`]; a kernel error is retried.
    pub async fn put_back_endpoint(&self, record: &EndpointRecord) -> Result<(), PolicyError> {
        let inner = self.lock().await;
        self.realize(inner, Terms::FACT, vec![Input::Endpoint(record.clone().into())]).await.1
    }

    /// Removes an endpoint's rows; a kernel error is retried. Its link must have left every look-up: without rows its
    /// programs accept everything.
    pub async fn remove_endpoint(&self, id: EndpointId, epoch: Epoch) -> Result<(), PolicyError> {
        if let Some(removed) = &mut *lock(&self.removed_early) {
            // The start removes the rows before another endpoint gets the id or address.
            removed.push((id, epoch));
            return Ok(());
        }
        let mut inner = self.lock().await;
        inner.state.forget_unrecorded(id);
        // Rows of lost policies go with them; no endpoint gets the id or address earlier.
        or_lost(self.realize(inner, Terms::FACT, vec![Input::NoEndpoint(id, epoch)]).await.1)
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

    /// Removes all imported policies. Errors as [`Policy::import`].
    pub async fn delete_all(&self) -> Result<PolicyChange, PolicyError> {
        self.change(|wanted| Ok(wanted.delete_all())).await
    }

    /// Replaces a namespace's labels; `None` removes them.
    ///
    /// # Errors
    /// Invalid name or label, or as [`Policy::import`].
    pub async fn set_namespace(&self, name: &str, labels: Option<Labels>) -> Result<Namespace, PolicyError> {
        self.change(|wanted| wanted.set_namespace(name, labels).map(|()| Changed::default())).await?;
        let labels = self.lock().await.state.inputs().documents.labels_of(name);
        Ok(Namespace { name: name.to_owned(), labels })
    }

    /// Sets when policy is enforced, until the agent ends.
    ///
    /// # Errors
    /// Rows do not fit, or the kernel refused: retried.
    pub async fn set_enforcement(&self, enforcement: Enforcement) -> Result<(), PolicyError> {
        let mut inner = self.lock().await;
        if inner.state.inputs().enforcement == enforcement {
            return Ok(());
        }
        if inner.state.inputs().documents.is_lost() {
            let result;
            (inner, result) = self.follow(inner).await;
            result?;
        }
        let correct = Transaction::correct(&inner.state, Terms::FACT, vec![Input::Enforcement(enforcement)], now());
        self.perform(inner, correct).await.1
    }

    /// Rows redirect to the proxy, or may soon.
    #[must_use]
    pub fn uses_proxy(&self) -> bool {
        self.uses_proxy.load(Ordering::Relaxed)
    }

    /// When policy is enforced.
    pub async fn enforcement(&self) -> Enforcement {
        self.lock().await.state.inputs().enforcement
    }

    /// Follows addresses and the policy directory, and retries failures.
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
        let result;
        (inner, result) = self.follow(inner).await;
        if matches!(result, Err(PolicyError::Lost { .. })) {
            return directory;
        }
        if inner.state.is_kept() && matches!(self.file.try_exists(), Ok(false)) {
            tracing::warn!(file = %self.file.display(), "the file of the policies was removed: it is written again");
            self.keep_or_warn(&mut inner, "the next start would take the policies for lost").await;
        }
        self.keep_cluster(&mut inner).await;
        inner = self.look_at_proxy(inner).await?;
        result?;
        self.retry_rows(inner).await?;
        directory
    }

    async fn follow(&self, inner: Guard) -> effects::Realized {
        let addresses = match self.kernel.observe_addresses().await {
            Ok(addresses) => addresses.into_iter().collect(),
            Err(why) => return (inner, Err(why.into())),
        };
        let inputs = inner.state.inputs();
        if *inputs.node == addresses && inner.state.is_settled() && !inputs.documents.is_lost() {
            return (inner, Ok(()));
        }
        self.realize(inner, Terms::FACT, vec![Input::Node(addresses)]).await
    }

    /// Follows the node's addresses. After an error, [`Policy::ensure`] retries.
    pub async fn follow_addresses(&self) -> Result<(), PolicyError> {
        let inner = self.lock().await;
        let addresses = self.kernel.observe_addresses().await?.into_iter().collect();
        if *inner.state.inputs().node == addresses {
            return Ok(());
        }
        or_lost(self.realize(inner, Terms::FACT, vec![Input::Node(addresses)]).await.1)
    }

    /// Replaces addresses and container networks of other nodes. After an error, [`Policy::ensure`] retries.
    pub async fn set_cluster(
        &self,
        pods: impl IntoIterator<Item = IpNet>,
        nodes: impl IntoIterator<Item = IpAddr>,
    ) -> Result<(), PolicyError> {
        let pods: BTreeSet<IpNet> = pods.into_iter().collect();
        let nodes: BTreeSet<IpAddr> = nodes.into_iter().collect();
        let mut inner = self.lock_early().await;
        let inputs = inner.state.inputs();
        if *inputs.pod_networks == pods && *inputs.other_nodes == nodes {
            return Ok(());
        }
        let change = vec![Input::PodNetworks(pods), Input::OtherNodes(nodes)];
        if !self.has_started() {
            change.into_iter().for_each(|input| inner.state.take(input));
            return Ok(());
        }
        or_lost(self.realize(inner, Terms::FACT, change).await.1)
    }

    /// Retries policies that did not fit when files, revision or rows change.
    async fn follow_directory(&self, mut inner: Guard, found: directory::Found) -> Result<(), PolicyError> {
        let before = &inner.state.inputs().documents;
        let revision = before.revision;
        let mut documents = before.clone();
        let names = documents.set_directory(found.policies, found.texts);
        inner.files.refuse(names);
        if documents.revision == revision {
            inner.files.not_taken = None;
            return Ok(());
        }
        let at = (inner.files.changes(), revision, inner.state.writes());
        if let Some((tried, why)) = &inner.too_large
            && *tried == at
        {
            return Err(why.clone());
        }
        let (mut inner, result) = self.take(inner, documents).await;
        inner.files.not_taken = result.as_ref().err().cloned();
        if let Err(why @ PolicyError::Rows(_)) = &result {
            inner.too_large = Some((at, why.clone()));
        }
        result
    }

    /// Corrects the kernel's rows. Errors as [`Policy::start`].
    pub async fn put_right(&self) -> Result<(), PolicyError> {
        let inner = self.lock().await;
        if !inner.state.is_active() {
            return Ok(());
        }
        let correct = Transaction::correct(&inner.state, Terms::FACT, Vec::new(), now());
        self.perform(inner, correct).await.1
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

    async fn lock_early(&self) -> Guard {
        Arc::clone(&self.inner).lock_owned().await
    }

    async fn change(
        &self,
        change: impl FnOnce(&mut Documents) -> Result<Changed, PolicyError>,
    ) -> Result<PolicyChange, PolicyError> {
        let inner = self.lock().await;
        let mut documents = inner.state.inputs().documents.clone();
        let Changed { put, removed } = change(&mut documents)?;
        let revision = documents.revision;
        self.take(inner, documents).await.1?;
        let names = |names: BTreeSet<PolicyName>| names.iter().map(ToString::to_string).collect();
        let realized = self.settled(revision, None).await;
        Ok(PolicyChange { revision, realized, put: names(put), removed: names(removed) })
    }

    /// Documents take effect after lost policies are replaced.
    async fn take(&self, inner: Guard, documents: Documents) -> effects::Realized {
        let change = vec![Input::Documents(documents)];
        let (inner, result) = self.realize_with_addresses(inner, Terms::DOCUMENTS, change).await;
        (inner, or_lost(result))
    }

    /// The last agent may have been killed between the files of feed and policy.
    async fn keep_cluster(&self, inner: &mut Inner) {
        if inner.state.lacks_cluster() {
            self.keep_or_warn(inner, "a start without the rows of the cluster feed would open containers").await;
        }
    }

    async fn keep_or_warn(&self, inner: &mut Inner, otherwise: &str) {
        let (documents, file) = (inner.state.inputs().documents.clone(), self.file.clone());
        let write = move || documents.to_text().and_then(|text| kept::write(&file, &text));
        let written = tokio::task::spawn_blocking(write).await;
        match written.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic())) {
            Ok(()) => inner.state.set_kept(),
            Err(why) => tracing::warn!(file = %self.file.display(), "keep policies: {why}; {otherwise}"),
        }
    }
}

fn or_lost(result: Result<(), PolicyError>) -> Result<(), PolicyError> {
    match result {
        Err(PolicyError::Lost { .. }) => Ok(()),
        result => result,
    }
}
