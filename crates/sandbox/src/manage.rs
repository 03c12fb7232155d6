//! Creates, stops and removes sandboxes.

use std::{
    collections::BTreeMap,
    fmt,
    hash::{BuildHasher as _, RandomState},
    io,
    net::IpAddr,
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use wharf_names::ids::{ContainerId, IdError, IfName, MacAddr, NetworkName};

use crate::{
    conf::{Network, Wishes},
    error::{SandboxError, io},
    name::SandboxName,
    netns::{self, Gone, Namespace, Seen},
    network::Plugins,
    port::Port,
    process,
    record::{Attachment, Netns, Phase, Record, VERSION, boot_id},
    store::{Lock, Store},
    view::{Details, State},
};

/// Directories.
#[derive(Debug, Clone)]
pub struct Dirs {
    /// Records.
    pub state: PathBuf,
    /// Named network namespaces.
    pub netns: PathBuf,
    /// Network configurations.
    pub conf: PathBuf,
    /// Plugins, in search order.
    pub plugins: Vec<PathBuf>,
}

/// Options of a new sandbox.
#[derive(Debug, Clone, Default)]
pub struct Spec {
    /// If empty, the directory's first.
    pub networks: Vec<NetworkName>,
    pub labels: BTreeMap<String, String>,
    /// Published by the first network.
    pub ports: Vec<Port>,
    /// In the first network.
    pub ips: Vec<IpAddr>,
    /// In the first network.
    pub mac: Option<MacAddr>,
}

impl Spec {
    /// No option is set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.networks.is_empty()
            && self.labels.is_empty()
            && self.ports.is_empty()
            && self.ips.is_empty()
            && self.mac.is_none()
    }
}

/// Result of a stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// Stopped by this call.
    Now,
    /// Stopped by this call; another namespace has its path.
    Replaced,
    /// Already stopped.
    Before,
    /// No sandbox has the name.
    Unknown,
}

/// Result of a remove.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removed {
    /// Removed by this call.
    Now,
    /// Only the unusable record was removed.
    RecordAlone,
    /// No sandbox has the name.
    Unknown,
}

/// Progress of an operation.
#[derive(Debug, Clone, Copy)]
pub enum Progress<'a> {
    /// A long step begins.
    Step(&'a str),
    /// A plugin's line on standard error.
    Said(&'a str),
}

/// A node's sandboxes.
pub struct Sandboxes {
    pub(crate) dirs: Dirs,
    pub(crate) store: Store,
    tell: Box<dyn Fn(Progress<'_>) + Send + Sync>,
    no_wait: bool,
}

impl fmt::Debug for Sandboxes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sandboxes").field("dirs", &self.dirs).finish_non_exhaustive()
    }
}

impl Sandboxes {
    /// `tell` receives the progress.
    pub fn new(dirs: Dirs, tell: impl Fn(Progress<'_>) + Send + Sync + 'static) -> Self {
        Self { store: Store::new(&dirs.state), dirs, tell: Box::new(tell), no_wait: false }
    }

    /// With `no_wait`, ADDs fail instead of waiting (`NoWait=1` in `CNI_ARGS`).
    #[must_use]
    pub fn no_wait(self, no_wait: bool) -> Self {
        Self { no_wait, ..self }
    }

    pub(crate) fn lock(&self, name: &SandboxName) -> Result<Lock, SandboxError> {
        self.store.lock(name, |text| (self.tell)(Progress::Step(text)))
    }

    pub(crate) fn plugins<'a>(&'a self, lock: &'a Lock) -> Plugins<'a> {
        Plugins { store: &self.store, path: &self.dirs.plugins, lock, tell: &*self.tell, no_wait: self.no_wait }
    }

    /// Creates a namespace and attaches networks. A failed create leaves nothing.
    ///
    /// # Errors
    /// The name is taken, a network cannot be used, or a plugin or system call fails.
    pub fn create(&self, name: &SandboxName, spec: &Spec) -> Result<Details, SandboxError> {
        if name.names_an_endpoint() {
            let why = "other commands read it as the number or the address of an endpoint; choose a name such as web-1";
            return Err(io("create sandbox", name.as_ref())(io::Error::new(io::ErrorKind::InvalidInput, why)));
        }
        let attachments = self.attachments(spec)?;
        Plugins::installed(&self.dirs.plugins, &attachments)?;
        self.store.ensure()?;
        let lock = self.lock(name)?;
        if let Some(record) = self.store.load(name)? {
            return Err(SandboxError::Exists { name: name.clone(), state: self.state_held(&record)? });
        }
        let (mut record, namespace) = match self.begin(name, spec, attachments) {
            Ok(begun) => begun,
            Err(error) => {
                // Only these files exist. The first error is reported.
                let _ = self.store.remove(name, lock);
                return Err(error);
            }
        };
        match self.attach(&mut record, namespace, &lock) {
            Ok(()) => {
                wharf_crash::point("sandbox-create/after-ready");
                Ok(Details { state: State::Ready, record, running: Vec::new(), check: None })
            }
            Err(SandboxError::NamespaceTaken { name, path }) => {
                self.store.remove(&name, lock)?;
                Err(SandboxError::NamespaceTaken { name, path })
            }
            Err(cause) => Err(self.undo(record, lock, cause)),
        }
    }

    /// Binds a new namespace, and attaches the record's networks. After [`SandboxError::NamespaceTaken`], no part of
    /// the sandbox exists.
    pub(crate) fn attach(&self, record: &mut Record, namespace: Namespace, lock: &Lock) -> Result<(), SandboxError> {
        let path = &record.netns.path;
        match namespace.bind(path) {
            // Another program took the path since the check.
            Err(SandboxError::Io { source, path: at, .. })
                if source.kind() == io::ErrorKind::AlreadyExists && at == *path =>
            {
                return Err(SandboxError::NamespaceTaken { name: record.name.clone(), path: at });
            }
            bound => bound?,
        }
        wharf_crash::point("sandbox-create/after-mount");
        self.plugins(lock).add(record)?;
        record.phase = Phase::Ready;
        self.store.save(record)
    }

    pub(crate) fn free_path(&self, name: &SandboxName) -> Result<PathBuf, SandboxError> {
        let path = self.dirs.netns.join(name);
        match netns::look(&path)? {
            Seen::Nothing => Ok(path),
            _ => Err(SandboxError::NamespaceTaken { name: name.clone(), path }),
        }
    }

    fn begin(
        &self,
        name: &SandboxName,
        spec: &Spec,
        attachments: Vec<Attachment>,
    ) -> Result<(Record, Namespace), SandboxError> {
        let path = self.free_path(name)?;
        // Before the record, which needs its identity.
        let namespace = Namespace::create()?;
        let record = new_record(name, spec, attachments, Netns { path, identity: namespace.identity })?;
        self.store.save(&record)?;
        wharf_crash::point("sandbox-create/after-record");
        Ok((record, namespace))
    }

    /// Returns `cause`, with the error of a failed rollback.
    fn undo(&self, mut record: Record, lock: Lock, cause: SandboxError) -> SandboxError {
        let name = record.name.clone();
        let undone = self.tear_down(&mut record, &lock, Duration::ZERO);
        let undone = match undone {
            Ok(_) => self.store.remove(&name, lock),
            Err(error) => {
                record.phase = Phase::Broken;
                record.problem = Some(format!("{cause}; undo: {error}"));
                // The first failure is reported. The stored record says `creating`.
                let _ = self.store.save(&record);
                Err(error)
            }
        };
        match undone {
            Ok(()) => cause,
            Err(undo) => SandboxError::Undo { name, verb: "rm", cause: Box::new(cause), undo: Box::new(undo) },
        }
    }

    fn attachments(&self, spec: &Spec) -> Result<Vec<Attachment>, SandboxError> {
        let named: Vec<Option<&NetworkName>> = match spec.networks.as_slice() {
            [] => vec![None],
            names => names.iter().map(Some).collect(),
        };
        let ports: Vec<_> = spec.ports.iter().map(Port::mapping).collect();
        let mac = spec.mac.map(|mac| mac.to_string());
        let mut attachments = Vec::new();
        for (index, network) in named.into_iter().enumerate() {
            let of_first = Wishes { labels: None, ports: &ports, ips: &spec.ips, mac: mac.as_deref() };
            let wishes = if index == 0 { of_first } else { Wishes::default() };
            let wishes = Wishes { labels: Some(&spec.labels), ..wishes };
            let ifname = IfName::parse(&format!("eth{index}")).map_err(invalid)?;
            attachments.push(Network::find(&self.dirs.conf, network)?.attachment(ifname, &wishes)?);
        }
        Ok(attachments)
    }

    /// Ends processes, detaches networks, removes the namespace. Idempotent; resumes a failed stop.
    ///
    /// # Errors
    /// A process does not end, or a plugin or system call fails.
    pub fn stop(&self, name: &SandboxName, grace: Duration) -> Result<Stopped, SandboxError> {
        let Some(lock) = self.known(name)? else { return Ok(Stopped::Unknown) };
        match self.store.load(name)? {
            Some(mut record) => self.stop_held(&mut record, &lock, grace),
            None => {
                self.store.remove(name, lock)?;
                Ok(Stopped::Unknown)
            }
        }
    }

    pub(crate) fn stop_held(&self, record: &mut Record, lock: &Lock, grace: Duration) -> Result<Stopped, SandboxError> {
        if record.phase == Phase::Stopped {
            return Ok(Stopped::Before);
        }
        let name = record.name.clone();
        if namespace_of(record)?.is_some_and(|n| process::is_inside(n.identity)) {
            return Err(SandboxError::Inside { name });
        }
        (record.phase, record.problem) = (Phase::Stopping, None);
        self.store.save(record)?;
        wharf_crash::point("sandbox-stop/after-intent");
        let gone = match self.tear_down(record, lock, grace) {
            Ok(gone) => gone,
            Err(error) => {
                record.problem = Some(error.to_string());
                // Otherwise, the record still has the stop's progress.
                let _ = self.store.save(record);
                return Err(error);
            }
        };
        record.phase = Phase::Stopped;
        record.processes.clear();
        self.store.save(record)?;
        wharf_crash::point("sandbox-stop/after-stopped");
        Ok(if gone == Gone::Replaced { Stopped::Replaced } else { Stopped::Now })
    }

    /// Removes everything but the name.
    pub(crate) fn tear_down(&self, record: &mut Record, lock: &Lock, grace: Duration) -> Result<Gone, SandboxError> {
        let namespace = namespace_of(record)?;
        let identity = namespace.as_ref().map(|n| n.identity);
        let is_this_boot = is_this_boot(record)?;
        let known = if is_this_boot { record.processes.as_slice() } else { &[] };
        let proc = Path::new("/proc");
        (self.tell)(Progress::Step(&format!("ending the processes of sandbox {}", record.name)));
        let left = process::end(identity, known, grace).map_err(io("end processes by", proc))?;
        if !left.is_empty() {
            let pids = left.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            return Err(SandboxError::Unkillable { name: record.name.clone(), pids });
        }
        wharf_crash::point("sandbox-stop/after-processes");
        // Without a namespace, plugins get an empty path.
        let path = if namespace.is_some() { record.netns.path.clone() } else { PathBuf::new() };
        self.plugins(lock).del(record, &path)?;
        drop(namespace);
        netns::remove(&record.netns.path, is_this_boot.then_some(record.netns.identity))
    }

    /// Stops and removes a sandbox. `force` also removes an unusable record.
    ///
    /// # Errors
    /// The errors of a stop; the record then stays.
    pub fn remove(&self, name: &SandboxName, grace: Duration, force: bool) -> Result<Removed, SandboxError> {
        let Some(lock) = self.known(name)? else { return Ok(Removed::Unknown) };
        let removed = match self.store.load(name) {
            Ok(Some(mut record)) => {
                self.stop_held(&mut record, &lock, grace)?;
                Removed::Now
            }
            Ok(None) => Removed::Unknown,
            Err(SandboxError::Damaged { .. }) if force => Removed::RecordAlone,
            Err(error) => return Err(error),
        };
        self.store.remove(name, lock)?;
        Ok(removed)
    }

    /// `None` without files.
    pub(crate) fn known(&self, name: &SandboxName) -> Result<Option<Lock>, SandboxError> {
        if self.store.is_known(name)? { self.lock(name).map(Some) } else { Ok(None) }
    }

    /// A record exists.
    #[must_use]
    pub fn exists(&self, name: &SandboxName) -> bool {
        !matches!(self.store.load(name), Ok(None))
    }
}

fn invalid(error: IdError) -> SandboxError {
    io("name", Path::new("sandbox"))(io::Error::new(io::ErrorKind::InvalidInput, error))
}

fn new_record(
    name: &SandboxName,
    spec: &Spec,
    attachments: Vec<Attachment>,
    netns: Netns,
) -> Result<Record, SandboxError> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    // Seeded with the kernel's random numbers.
    let [a, b, c, d, ..] = RandomState::new().hash_one(now).to_le_bytes();
    Ok(Record {
        version: VERSION,
        name: name.clone(),
        container_id: ContainerId::of_sandbox(name.as_str(), u32::from_le_bytes([a, b, c, d])).map_err(invalid)?,
        created_unix_ms: u64::try_from(now).unwrap_or(u64::MAX),
        boot_id: this_boot()?,
        phase: Phase::Creating,
        problem: None,
        netns,
        labels: spec.labels.clone(),
        attachments,
        processes: Vec::new(),
    })
}

pub(crate) fn this_boot() -> Result<String, SandboxError> {
    boot_id().map_err(io("read the boot id in", Path::new("/proc")))
}

/// Inode numbers and pids are valid within one boot.
pub(crate) fn is_this_boot(record: &Record) -> Result<bool, SandboxError> {
    Ok(record.boot_id == this_boot()?)
}

/// `None` if not at its path.
pub(crate) fn namespace_of(record: &Record) -> Result<Option<Namespace>, SandboxError> {
    if is_this_boot(record)? { netns::find(&record.netns.path, record.netns.identity) } else { Ok(None) }
}
