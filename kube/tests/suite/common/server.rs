//! A scripted API server: objects with versions, lists in pages, watches with bookmarks, patches, faults.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use bytes::Bytes;
use futures::future::BoxFuture;
use http::{Method, Request, Response};
use http_body_util::BodyExt as _;
use kube_client::{Client, client::Body};
use serde_json::{Value, json};
use tokio::sync::watch;
use wharf_kube::{
    api::{Connect, Failure},
    source::Source,
};

use super::{
    objects::{Id, is_live, key},
    patch, rbac,
    streams::{self, ScriptedBody, WatchFault, WatchStream},
};

/// What happens to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// A status, with the seconds of Retry-After.
    Status(u16, Option<u64>),
    /// No answer.
    Hang,
    /// The connection is reset.
    Reset,
    /// The body ends early.
    Cut,
    /// The body does not end.
    Stall,
    /// The body is no JSON.
    Garbage,
}

#[derive(Debug, Clone)]
pub(super) struct Change {
    pub(super) version: u64,
    pub(super) source: Source,
    pub(super) kind: &'static str,
    pub(super) object: Value,
}

#[derive(Debug, Default)]
pub(super) struct World {
    pub(super) version: u64,
    objects: BTreeMap<Id, Value>,
    pub(super) log: Vec<Change>,
    /// Watches from a lower version are refused.
    pub(super) compacted: u64,
    /// States of earlier versions, for a restore.
    snapshots: BTreeMap<u64, BTreeMap<Id, Value>>,
    /// Lists by the token of their next page.
    lists: BTreeMap<String, (String, Vec<Value>)>,
    tokens: u64,
    /// For the next requests whose target contains the text.
    faults: VecDeque<(String, Fault)>,
    /// Ends watches that began before, with a fault.
    pub(super) broken: (u64, Option<WatchFault>),
    /// Number of the last fault at a restore: the store's server restarts, so no watch from before it ends as asked.
    pub(super) restored: u64,
    /// Objects of a page, at most.
    page: usize,
    requests: Vec<String>,
    /// Requests that `rbac.yaml` does not allow.
    forbidden: Vec<String>,
    definitions: BTreeMap<Source, Value>,
    events: Vec<Value>,
    is_shuffled: bool,
    pub(super) next_node_patch: Option<Value>,
}

#[derive(Clone)]
pub struct Server {
    world: Arc<Mutex<World>>,
    /// Wakes watches.
    changed: watch::Sender<()>,
}

impl Server {
    /// With the namespace kube-system.
    pub fn start() -> Self {
        let world = World { version: 1, page: usize::MAX, ..World::default() };
        let server = Self { world: Arc::new(Mutex::new(world)), changed: watch::Sender::new(()) };
        server.put((Source::Namespace, json!({"metadata": {"name": "kube-system", "uid": "cluster"}})));
        server
    }

    /// Creates or replaces an object.
    pub fn put(&self, (source, object): (Source, Value)) {
        let id = (source, key(&object));
        let mut world = self.lock();
        let found = world.objects.get(&id).cloned();
        let was_live = found.as_ref().is_some_and(|found| is_live(source, found));
        if let Some(found) = &found
            && found["metadata"]["uid"] != object["metadata"]["uid"]
        {
            drop(world);
            self.delete(source, &id.1);
            return self.put((source, object));
        }
        let object = world.store(id, object);
        let kind = match (was_live, is_live(source, &object)) {
            (false, true) => "ADDED",
            (true, true) => "MODIFIED",
            (true, false) => "DELETED",
            (false, false) => return,
        };
        world.append(source, kind, object);
        drop(world);
        self.wake();
    }

    pub fn delete(&self, source: Source, key: &str) {
        let mut world = self.lock();
        let Some(mut object) = world.objects.remove(&(source, key.to_owned())) else { return };
        world.version += 1;
        object["metadata"]["resourceVersion"] = json!(world.version.to_string());
        if is_live(source, &object) {
            world.append(source, "DELETED", object);
        }
        drop(world);
        self.wake();
    }

    pub fn objects(&self) -> BTreeMap<Id, Value> {
        self.lock().objects.clone()
    }

    pub fn object(&self, source: Source, key: &str) -> Option<Value> {
        self.lock().objects.get(&(source, key.to_owned())).cloned()
    }

    /// Keeps the state for a restore.
    pub fn snapshot(&self) -> u64 {
        let mut world = self.lock();
        let (version, objects) = (world.version, world.objects.clone());
        world.snapshots.insert(version, objects);
        version
    }

    /// Objects of other resources take versions.
    pub fn advance(&self, versions: u64) {
        self.lock().version += versions;
    }

    /// As a restored store: an earlier state, at the version that it had.
    pub fn restore(&self, version: u64) {
        let mut world = self.lock();
        let objects = world.snapshots.get(&version).expect("a snapshot").clone();
        (world.version, world.objects, world.compacted) = (version, objects, 0);
        world.restored = world.broken.0;
        // Versions up to the restored one are the same in both histories.
        world.log.retain(|change| change.version <= version);
        world.lists.clear();
    }

    /// Watches and pages of earlier versions answer 410.
    pub fn compact(&self) {
        let mut world = self.lock();
        world.compacted = world.version;
        world.lists.clear();
    }

    /// Breaks all watches that run.
    pub fn break_watches(&self, fault: WatchFault) {
        let mut world = self.lock();
        world.broken = (world.broken.0 + 1, Some(fault));
        drop(world);
        self.wake();
    }

    /// For the next request whose target contains the text.
    pub fn fail(&self, target: &str, fault: Fault) {
        self.lock().faults.push_back((target.to_owned(), fault));
    }

    pub fn heal(&self) {
        self.lock().faults.clear();
    }

    pub fn set_page(&self, objects: usize) {
        self.lock().page = objects;
    }

    /// Lists have another order each time.
    pub fn shuffle(&self) {
        self.lock().is_shuffled = true;
    }

    /// Adds or removes the definition of a custom resource. Its objects go with it.
    pub fn define(&self, source: Source, is_defined: bool) {
        let custom = source.custom().expect("a custom resource");
        if is_defined {
            let versions = custom.versions.iter().map(|name| json!({"name": name, "served": true})).collect::<Vec<_>>();
            let status = json!({"conditions": [{"type": "Established", "status": "True"}]});
            self.lock().definitions.insert(source, json!({"spec": {"versions": versions}, "status": status}));
            return;
        }
        let keys: Vec<_> = self.objects().into_keys().filter(|(of, _)| *of == source).collect();
        for (_, key) in keys {
            self.delete(source, &key);
        }
        self.lock().definitions.remove(&source);
        self.break_watches(WatchFault::End);
    }

    /// Method and target of each request.
    pub fn requests(&self) -> Vec<String> {
        self.lock().requests.clone()
    }

    pub fn last_requests(&self) -> Vec<String> {
        self.requests().into_iter().rev().take(12).collect()
    }

    pub fn count(&self, text: &str) -> usize {
        self.lock().requests.iter().filter(|request| request.contains(text)).count()
    }

    pub fn forbidden(&self) -> Vec<String> {
        self.lock().forbidden.clone()
    }

    pub fn events(&self) -> Vec<Value> {
        self.lock().events.clone()
    }

    /// Another writer replaces this node just before the next patch of it.
    pub fn race_node(&self, node: Value) {
        self.lock().next_node_patch = Some(node);
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, World> {
        self.world.lock().expect("not poisoned")
    }

    pub(super) fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    fn wake(&self) {
        self.changed.send_replace(());
    }

    /// Answers a request.
    pub async fn answer(
        self,
        method: Method,
        target: String,
        body: Bytes,
    ) -> Result<Response<ScriptedBody>, std::io::Error> {
        let fault = {
            let mut world = self.lock();
            world.requests.push(format!("{method} {target}"));
            if !rbac::allows(method.as_str(), &target) {
                world.forbidden.push(format!("{method} {target}"));
                return Ok(streams::status(403, None));
            }
            let at = world.faults.iter().position(|(text, _)| target.contains(text.as_str()));
            at.and_then(|at| world.faults.remove(at)).map(|(_, fault)| fault)
        };
        match fault {
            Some(Fault::Hang) => std::future::pending().await,
            Some(Fault::Reset) => Err(std::io::ErrorKind::ConnectionReset.into()),
            Some(Fault::Status(code, after)) => Ok(streams::status(code, after)),
            other => {
                let answer = match method {
                    Method::GET => self.get(&target),
                    Method::PATCH => self.patch(&target, &body),
                    _ => self.create(&target, &body),
                };
                Ok(streams::damage(answer, other))
            }
        }
    }

    fn get(&self, target: &str) -> Response<ScriptedBody> {
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let parameters: BTreeMap<&str, &str> = query.split('&').filter_map(|pair| pair.split_once('=')).collect();
        let custom = |source: &Source| source.custom().is_some_and(|custom| custom.definition() == path);
        if let Some(source) = Source::ALL.into_iter().find(custom) {
            return self.lock().definitions.get(&source).map_or_else(|| streams::status(404, None), streams::object);
        }
        let Some(source) = Source::ALL.into_iter().find(|source| source.built_in().path == path) else {
            let found = match path.strip_prefix("/api/v1/nodes/") {
                Some(name) => self.object(Source::Node, name),
                None => path.strip_prefix("/api/v1/namespaces/").and_then(|name| self.object(Source::Namespace, name)),
            };
            return found.as_ref().map_or_else(|| streams::status(404, None), streams::object);
        };
        if source.custom().is_some() && !self.lock().definitions.contains_key(&source) {
            return streams::status(404, None);
        }
        assert!(source != Source::Pod || query.contains("fieldSelector="), "pods are selected: {target}");
        if parameters.get("watch") == Some(&"true") {
            return self.watch(source, &parameters);
        }
        assert_eq!(parameters.get("resourceVersion"), None, "a list is a consistent read");
        self.list(source, &parameters)
    }

    fn list(&self, source: Source, parameters: &BTreeMap<&str, &str>) -> Response<ScriptedBody> {
        let mut world = self.lock();
        let limit: usize = parameters.get("limit").expect("a limit").parse().expect("a number");
        let limit = limit.min(world.page);
        let (version, mut items) = match parameters.get("continue") {
            Some(token) => match world.lists.remove(*token) {
                Some(list) => list,
                None => return streams::status(410, None),
            },
            None => {
                let of_source =
                    world.objects.iter().filter(|((of, _), object)| *of == source && is_live(source, object));
                let mut items: Vec<Value> = of_source.map(|(_, object)| object.clone()).collect();
                if world.is_shuffled {
                    items.reverse();
                    let middle = items.len() / 2;
                    items.rotate_left(middle);
                }
                (world.version.to_string(), items)
            }
        };
        let rest = items.split_off(limit.min(items.len()));
        let mut metadata = json!({"resourceVersion": version});
        if !rest.is_empty() {
            world.tokens += 1;
            let token = format!("t{}", world.tokens);
            metadata["continue"] = json!(token);
            world.lists.insert(token, (version, rest));
        }
        streams::object(&json!({"kind": format!("{source}List"), "metadata": metadata, "items": items}))
    }

    fn watch(&self, source: Source, parameters: &BTreeMap<&str, &str>) -> Response<ScriptedBody> {
        let from: u64 = parameters.get("resourceVersion").expect("a version").parse().expect("a number");
        let seconds: u64 = parameters.get("timeoutSeconds").expect("a limit").parse().expect("seconds");
        assert!(seconds < 30 && parameters.get("allowWatchBookmarks") == Some(&"true"));
        let world = self.lock();
        if from < world.compacted {
            return streams::status(410, None);
        }
        if from > world.version {
            return streams::status(504, None);
        }
        let broken = world.broken.0;
        drop(world);
        WatchStream::new(self.clone(), source, from, Duration::from_secs(seconds), broken).into_answer()
    }

    fn patch(&self, target: &str, body: &[u8]) -> Response<ScriptedBody> {
        let wanted: Value = serde_json::from_slice(body).expect("a patch");
        let path = target.strip_prefix("/api/v1/nodes/").expect("a node");
        let name = path.trim_end_matches("/status");
        let race = self.lock().next_node_patch.take();
        if let Some(node) = race {
            self.put((Source::Node, node));
        }
        let Some(mut node) = self.object(Source::Node, name) else { return streams::status(404, None) };
        let version = &wanted["metadata"]["resourceVersion"];
        if !version.is_null() && *version != node["metadata"]["resourceVersion"] {
            return streams::status(409, None);
        }
        if path.ends_with("/status") {
            patch::merge_conditions(&mut node, &wanted);
        } else {
            patch::merge(&mut node, &wanted);
        }
        self.put((Source::Node, node.clone()));
        streams::object(&node)
    }

    fn create(&self, target: &str, body: &[u8]) -> Response<ScriptedBody> {
        assert!(target.starts_with("/apis/events.k8s.io/v1/namespaces/"), "{target}");
        let event: Value = serde_json::from_slice(body).expect("an event");
        let mut world = self.lock();
        if world.events.iter().any(|other| other["metadata"] == event["metadata"]) {
            return streams::status(409, None);
        }
        world.events.push(event.clone());
        streams::object(&event)
    }
}

impl World {
    fn store(&mut self, id: Id, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.objects.insert(id, object.clone());
        object
    }

    fn append(&mut self, source: Source, kind: &'static str, object: Value) {
        self.log.push(Change { version: self.version, source, kind, object });
    }
}

impl Connect for Server {
    fn connect(&self, _attempt: usize) -> BoxFuture<'_, Result<Client, Failure>> {
        let server = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let server = server.clone();
            async move {
                let (parts, body) = request.into_parts();
                let body = body.collect().await.map_err(std::io::Error::other)?.to_bytes();
                let target = parts.uri.path_and_query().map(ToString::to_string).unwrap_or_default();
                server.answer(parts.method, target, body).await
            }
        });
        Box::pin(async { Ok(Client::new(service, "default")) })
    }
}
