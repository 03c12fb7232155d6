//! Wanted policies and namespace labels, and the file that keeps imports and the policy directory's last good texts.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::Arc,
};

use imbl::{OrdMap, ordmap::DiffItem};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use wharf_policy::{
    compile::Event,
    model::{Labels, NAMESPACE_NAME, Policy, PolicyName, UNKNOWN_LABELS},
    read::read,
};

use crate::error::{PolicyError, told};

const VERSION: u32 = 1;
/// Of a file; leaves room for changes.
const MAX_REVISION: u64 = u64::MAX / 2;
/// Bytes of imports, and of the directory's texts.
pub const MAX_TEXTS: usize = 16 << 20;
/// Bytes of a readable file.
pub const MAX_FILE: u64 = 5 * MAX_TEXTS as u64;
const MAX_NAMESPACES: usize = 10_000;
const MAX_LABELS: usize = 256;
const MAX_LABEL: usize = 512;

/// Origin of a policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    Import,
    /// The policy directory.
    Directory,
    /// Kept by the cluster feed.
    Cluster,
}

/// Policies by row of the cluster feed; `None`: removed.
pub type FeedRows = BTreeMap<String, Option<Vec<Policy>>>;

/// A row of the cluster feed that is not wholly in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedPolicy {
    pub why: String,
    /// The row's earlier policies are in force.
    pub stale: bool,
    /// A policy of this name has another source or row.
    pub conflict: bool,
}

/// Policies of one name (several with `specs`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    pub policies: Arc<Vec<Policy>>,
    /// Where they come from.
    pub source: Source,
}

/// The policy directory's last good texts, by path.
pub type Texts = BTreeMap<String, Arc<str>>;

/// Policies and labels of namespaces. Copies share their content.
#[derive(Debug, Clone, Default)]
pub struct Documents {
    /// Grows with each change.
    pub revision: u64,
    /// The policy file was lost and not replaced.
    pub lost: bool,
    imports: Vec<Arc<Import>>,
    /// `None` without a file, or with an older agent's.
    pub texts: Option<Texts>,
    documents: OrdMap<PolicyName, Document>,
    namespaces: Arc<BTreeMap<String, Labels>>,
    /// Of the cluster feed.
    rows: OrdMap<String, Arc<Row>>,
    claims: OrdMap<PolicyName, BTreeSet<String>>,
    of_cluster: OrdMap<String, Labels>,
    /// The file records policies of the cluster feed, whose rows are not all known.
    pub awaits_cluster: bool,
    /// Rows of the cluster feed were lost, and a producer has not sent every row again.
    pub lacks_rows: bool,
    /// The cluster feed's namespaces are not all known.
    pub awaits_namespaces: bool,
    /// Namespaces whose rows the cluster feed refuses.
    pub refused_namespaces: Arc<BTreeSet<String>>,
}

type Row = BTreeMap<PolicyName, Arc<Vec<Policy>>>;

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Import {
    file: String,
    text: Arc<str>,
    names: BTreeSet<Name>,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Name {
    kind: String,
    namespace: String,
    name: String,
}

impl From<&PolicyName> for Name {
    fn from(name: &PolicyName) -> Self {
        let PolicyName { kind, namespace, name } = name.clone();
        Self { kind, namespace, name }
    }
}

#[derive(Serialize, Deserialize)]
struct File {
    version: u32,
    revision: u64,
    #[serde(default)]
    lost: bool,
    imports: Vec<Arc<Import>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    directory: Option<Texts>,
    namespaces: Arc<BTreeMap<String, Labels>>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    cluster: bool,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    lacks_rows: bool,
}

/// Names of changed policies.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Changed {
    /// New or changed.
    pub put: BTreeSet<PolicyName>,
    pub removed: BTreeSet<PolicyName>,
}

/// A valid text to import.
pub struct Parsed {
    file: String,
    text: Arc<str>,
    policies: Vec<Policy>,
}

impl Parsed {
    /// Reads a text.
    ///
    /// # Errors
    /// Refused.
    pub fn new(file: &str, text: &str) -> Result<Self, PolicyError> {
        let policies = read(file, text).map_err(PolicyError::Refused)?;
        Ok(Self { file: file.to_owned(), text: text.into(), policies })
    }
}

impl Documents {
    /// Reads the file's content; without it, policies are lost.
    ///
    /// # Errors
    /// Why the content cannot be used.
    pub fn parse(text: Option<&[u8]>) -> Result<Self, String> {
        let Some(text) = text else { return Ok(Self { lost: true, ..Self::default() }) };
        let file: File = serde_json::from_slice(text).map_err(|e| e.to_string())?;
        if file.version != VERSION {
            return Err(format!("it is of version {}, this agent knows {VERSION}", file.version));
        }
        if file.revision > MAX_REVISION {
            return Err(format!("its revision is {}, at most {MAX_REVISION} is possible", file.revision));
        }
        let File { revision, lost, imports, directory: texts, namespaces, cluster, lacks_rows, .. } = file;
        let awaits_cluster = cluster;
        let mut documents =
            Self { revision, lost, imports, texts, namespaces, awaits_cluster, lacks_rows, ..Self::default() };
        for import in &documents.imports {
            let policies = read(&import.file, &import.text).map_err(|refusals| told(&refusals))?;
            let mut missing = import.names.clone();
            for (name, policies) in by_name(policies) {
                if missing.remove(&Name::from(&name)) {
                    let document = Document { policies: Arc::new(policies), source: Source::Import };
                    documents.documents.insert(name, document);
                }
            }
            if let Some(Name { kind, namespace, name }) = missing.pop_first() {
                let name = PolicyName { kind, namespace, name };
                return Err(format!("the text of {} has no {name}", import.file));
            }
        }
        Ok(documents)
    }

    /// The file's content.
    ///
    /// # Errors
    /// Too large to be read.
    pub fn to_text(&self) -> io::Result<Vec<u8>> {
        let Self { revision, lost, imports, texts: directory, namespaces, .. } = self.clone();
        let [cluster, lacks_rows] = self.flags();
        let file = File { version: VERSION, revision, lost, imports, directory, namespaces, cluster, lacks_rows };
        let text = serde_json::to_vec(&file)?;
        if text.len() as u64 > MAX_FILE {
            let bytes = text.len();
            return Err(io::Error::other(format!(
                "{bytes} bytes, at most {MAX_FILE} are read again; delete policies or namespaces"
            )));
        }
        Ok(text)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&PolicyName, &Document)> {
        self.documents.iter()
    }

    /// There is no policy.
    pub fn is_empty(&self) -> bool {
        self.documents.is_empty()
    }

    /// Replaces imports of the same names.
    ///
    /// # Errors
    /// A name is another source's, or the texts are too long.
    pub fn import(&mut self, Parsed { file, text, policies }: Parsed) -> Result<Changed, PolicyError> {
        let mut changed = Changed::default();
        for (name, policies) in by_name(policies) {
            match self.documents.get(&name) {
                Some(Document { policies, source: Source::Directory }) => {
                    return Err(PolicyError::OfDirectory { name, file: file_of(policies) });
                }
                Some(Document { source: Source::Cluster, .. }) => return Err(PolicyError::OfCluster { name }),
                Some(Document { source: Source::Import, .. }) | None => {}
            }
            self.forget_import(&name);
            let document = Document { policies: Arc::new(policies), source: Source::Import };
            self.documents.insert(name.clone(), document);
            changed.put.insert(name);
        }
        if changed.put.is_empty() {
            return Ok(changed);
        }
        let names = changed.put.iter().map(Name::from).collect();
        self.imports.push(Arc::new(Import { file, text, names }));
        let bytes: usize = self.imports.iter().map(|import| import.text.len()).sum();
        if bytes > MAX_TEXTS {
            return Err(PolicyError::Texts { bytes, most: MAX_TEXTS });
        }
        self.lost = false;
        self.revision += 1;
        Ok(changed)
    }

    /// Removes an imported policy.
    ///
    /// # Errors
    /// Unknown, or not imported.
    pub fn delete(&mut self, name: &PolicyName) -> Result<Changed, PolicyError> {
        match self.documents.get(name) {
            None => {
                let same = |other: &&PolicyName| {
                    other.kind == name.kind && other.name == name.name && !other.namespace.is_empty()
                };
                let elsewhere = self.documents.keys().filter(same).map(|other| other.namespace.clone()).collect();
                return Err(PolicyError::Unknown { name: name.clone(), elsewhere });
            }
            Some(Document { policies, source: Source::Directory }) => {
                return Err(PolicyError::OfDirectory { name: name.clone(), file: file_of(policies) });
            }
            Some(Document { source: Source::Cluster, .. }) => {
                return Err(PolicyError::OfCluster { name: name.clone() });
            }
            Some(Document { source: Source::Import, .. }) => {}
        }
        self.documents.remove(name);
        self.forget_import(name);
        self.settle(name);
        self.revision += 1;
        Ok(Changed { removed: BTreeSet::from([name.clone()]), ..Changed::default() })
    }

    /// Removes all imported policies.
    pub fn delete_all(&mut self) -> Changed {
        let gone = self.documents.iter().filter(|(_, document)| document.source == Source::Import);
        let removed: BTreeSet<PolicyName> = gone.map(|(name, _)| name.clone()).collect();
        for name in &removed {
            self.documents.remove(name);
            self.settle(name);
        }
        self.imports.clear();
        self.revision += u64::from(!removed.is_empty() || self.lost);
        self.lost = false;
        Changed { removed, ..Changed::default() }
    }

    /// Policies were lost and not replaced, or the cluster feed's rows are not all known.
    #[must_use]
    pub const fn is_lost(&self) -> bool {
        self.lost || self.is_cluster_lost()
    }

    pub(crate) const fn is_cluster_lost(&self) -> bool {
        self.awaits_cluster || self.lacks_rows
    }

    /// In the file: policies of the cluster feed are in force, or were; rows of the feed were lost.
    pub(crate) fn flags(&self) -> [bool; 2] {
        [self.awaits_cluster || !self.rows.is_empty(), self.lacks_rows]
    }

    pub(crate) fn has_row(&self, row: &str) -> bool {
        self.rows.contains_key(row)
    }

    pub(crate) fn rows_with_requests(&self) -> impl Iterator<Item = &String> {
        let has_requests = |policies: &Arc<Vec<Policy>>| {
            policies.iter().flat_map(|policy| &policy.rules).any(|rule| rule.requests.is_some())
        };
        self.rows.iter().filter(move |(_, row)| row.values().any(has_requests)).map(|(row, _)| row)
    }

    pub(crate) fn take_rows(&mut self) -> FeedRows {
        let mut rows = FeedRows::new();
        for (row, policies) in &self.rows {
            rows.insert(row.clone(), Some(policies.values().flat_map(|named| named.iter().cloned()).collect()));
        }
        for row in rows.keys() {
            self.set_row(row, None);
        }
        rows
    }

    /// With these rows of the cluster feed.
    #[must_use]
    pub fn with_rows(&self, rows: &FeedRows) -> Self {
        let mut documents = self.clone();
        for (row, policies) in rows {
            documents.set_row(row, policies.clone());
        }
        documents
    }

    /// `None` removes the row.
    pub(crate) fn set_row(&mut self, row: &str, policies: Option<Vec<Policy>>) {
        let policies = by_name(policies.unwrap_or_default()).into_iter();
        let now: Row = policies.map(|(name, policies)| (name, Arc::new(policies))).collect();
        let mut names: BTreeSet<PolicyName> = now.keys().cloned().collect();
        for name in &names {
            self.claims.entry(name.clone()).or_default().insert(row.to_owned());
        }
        let before =
            if now.is_empty() { self.rows.remove(row) } else { self.rows.insert(row.to_owned(), Arc::new(now)) };
        for name in before.iter().flat_map(|before| before.keys()) {
            if names.insert(name.clone()) {
                let rows = self.claims.remove(name).unwrap_or_default();
                let others: BTreeSet<String> = rows.into_iter().filter(|other| other != row).collect();
                if !others.is_empty() {
                    self.claims.insert(name.clone(), others);
                }
            }
        }
        for name in &names {
            self.settle(name);
        }
    }

    /// A policy of the cluster feed is in force unless an import or the policy directory has its name. Of several rows,
    /// the first by key has it.
    fn settle(&mut self, name: &PolicyName) {
        if self.documents.get(name).is_some_and(|document| document.source != Source::Cluster) {
            return;
        }
        let first = self.claims.get(name).and_then(BTreeSet::first);
        let policies = first.and_then(|row| self.rows.get(row)?.get(name)).cloned();
        let is_changed = match policies.map(|policies| Document { policies, source: Source::Cluster }) {
            Some(document) => self.documents.insert(name.clone(), document.clone()) != Some(document),
            None => self.documents.remove(name).is_some(),
        };
        self.revision += u64::from(is_changed);
    }

    /// Rows of the cluster feed with a policy that is not in force, and the cause.
    pub(crate) fn rows_in_conflict(&self) -> BTreeMap<String, String> {
        let mut found = BTreeMap::new();
        for (name, rows) in &self.claims {
            let (why, first) = match self.documents.get(name) {
                Some(Document { source: Source::Import, .. }) => (format!("{name} was imported, too"), None),
                Some(Document { source: Source::Directory, policies }) => {
                    (format!("{name} is of the policy directory's file {}, too", file_of(policies)), None)
                }
                _ => (format!("{name} is of row {}, too", rows.first().map_or("", String::as_str)), rows.first()),
            };
            for row in rows.iter().filter(|row| Some(*row) != first) {
                found.entry(row.clone()).or_insert_with(|| why.clone());
            }
        }
        found
    }

    /// Sets labels of the cluster feed. Returns whether they changed.
    pub fn set_labels_of_cluster(&mut self, name: &str, labels: Option<Labels>) -> bool {
        let before = match labels.clone() {
            Some(labels) => self.of_cluster.insert(name.to_owned(), labels),
            None => self.of_cluster.remove(name),
        };
        before != labels
    }

    /// Sets the directory's policies and texts. Returns names that imports keep.
    pub fn set_directory(&mut self, wanted: BTreeMap<PolicyName, Vec<Policy>>, texts: Texts) -> BTreeSet<PolicyName> {
        self.texts = Some(texts);
        let before = self.documents.clone();
        let mut refused = BTreeSet::new();
        for (name, document) in before.iter() {
            if document.source == Source::Directory && !wanted.contains_key(name) {
                self.documents.remove(name);
                self.settle(name);
            }
        }
        for (name, policies) in wanted {
            match self.documents.get(&name) {
                Some(Document { source: Source::Import, .. }) => drop(refused.insert(name)),
                Some(Document { policies: there, source: Source::Directory }) if **there == policies => {}
                _ => {
                    let document = Document { policies: Arc::new(policies), source: Source::Directory };
                    self.documents.insert(name, document);
                }
            }
        }
        self.revision += u64::from(self.documents != before);
        refused
    }

    /// Manual labels take precedence. The namespace's name is a label.
    pub fn labels_of(&self, namespace: &str) -> Labels {
        let mut labels = self.of_cluster.get(namespace).cloned().unwrap_or_default();
        labels.extend(self.namespaces.get(namespace).into_iter().flatten().map(|(k, v)| (k.clone(), v.clone())));
        labels.insert(NAMESPACE_NAME.to_owned(), namespace.to_owned());
        labels
    }

    /// For this node's endpoints. Without a row, labels are unknown while the cluster feed's namespaces are not all
    /// known or the row is refused.
    pub(crate) fn labels_here(&self, namespace: &str) -> Labels {
        self.labels_or_unknown(namespace, self.awaits_namespaces)
    }

    /// For other nodes' containers, whose namespaces exist: labels are unknown until the cluster feed or an operator
    /// names the namespace.
    pub(crate) fn labels_elsewhere(&self, namespace: &str) -> Labels {
        self.labels_or_unknown(namespace, self.awaits_namespaces || !self.namespaces.contains_key(namespace))
    }

    fn labels_or_unknown(&self, namespace: &str, is_unknown: bool) -> Labels {
        let mut labels = self.labels_of(namespace);
        let is_unknown = is_unknown || self.refused_namespaces.contains(namespace);
        if is_unknown && !self.of_cluster.contains_key(namespace) {
            labels.insert(UNKNOWN_LABELS.to_owned(), String::new());
        }
        labels
    }

    pub fn namespaces(&self) -> impl Iterator<Item = (&str, Labels)> {
        let names: BTreeSet<&String> = self.namespaces.keys().chain(self.of_cluster.keys()).collect();
        names.into_iter().map(|name| (name.as_str(), self.labels_of(name)))
    }

    /// Sets manual labels; `None` removes them.
    ///
    /// # Errors
    /// Invalid name or labels.
    pub fn set_namespace(&mut self, name: &str, labels: Option<Labels>) -> Result<(), PolicyError> {
        let bad = |why: String| Err(PolicyError::Namespace { name: name.chars().take(80).collect(), why });
        let is_dns_label = |name: &str| {
            let inner = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-';
            (1..=63).contains(&name.len()) && name.bytes().all(inner) && !name.starts_with('-') && !name.ends_with('-')
        };
        if !is_dns_label(name) {
            return bad("a name has 1 to 63 lower-case letters, digits and hyphens (RFC 1123)".to_owned());
        }
        let Some(mut labels) = labels else {
            return match Arc::make_mut(&mut self.namespaces).remove(name) {
                Some(_) => {
                    self.revision += 1;
                    Ok(())
                }
                None => Err(PolicyError::UnknownNamespace(name.to_owned())),
            };
        };
        let is_long = |(key, value): (&String, &String)| key.is_empty() || key.len() + value.len() > MAX_LABEL;
        if labels.len() > MAX_LABELS || labels.iter().any(is_long) {
            return bad(format!("at most {MAX_LABELS} labels of at most {MAX_LABEL} bytes are taken, with keys"));
        }
        if labels.keys().chain(labels.values()).any(|text| text.chars().any(char::is_control)) {
            return bad("labels have no control characters".to_owned());
        }
        if labels.remove(NAMESPACE_NAME).is_some_and(|value| value != name) {
            return bad(format!("{NAMESPACE_NAME} is the namespace's name, and cannot be another"));
        }
        if self.namespaces.len() >= MAX_NAMESPACES && !self.namespaces.contains_key(name) {
            return bad(format!("{MAX_NAMESPACES} namespaces have labels already; delete some"));
        }
        if Arc::make_mut(&mut self.namespaces).insert(name.to_owned(), labels.clone()) != Some(labels) {
            self.revision += 1;
        }
        Ok(())
    }

    pub(crate) fn says_the_same_of_endpoints(&self, before: &Self) -> bool {
        self.namespaces == before.namespaces
            && self.of_cluster == before.of_cluster
            && self.awaits_namespaces == before.awaits_namespaces
            && self.refused_namespaces == before.refused_namespaces
            && self.is_empty() == before.is_empty()
    }

    /// With the exceptions behind `services`.
    pub(crate) fn events_since(&self, before: &Self, services: &[IpNet]) -> Vec<Event> {
        let mut events = Vec::new();
        for item in before.documents.diff(&self.documents) {
            let (name, old, new) = match item {
                DiffItem::Add(name, new) => (name, None, Some(&new.policies)),
                DiffItem::Remove(name, old) => (name, Some(&old.policies), None),
                DiffItem::Update { old: (_, old), new: (name, new) } => {
                    (name, Some(&old.policies), Some(&new.policies))
                }
            };
            if old == new {
                continue;
            }
            let kept = new.map_or(0, |new| new.len());
            let gone = kept..old.map_or(0, |old| old.len());
            events.extend(gone.map(|spec| Event::NoPolicy(numbered(name, spec))));
            let policies = new.into_iter().flat_map(|new| new.iter()).enumerate();
            events.extend(policies.map(|(spec, policy)| {
                let policy = Policy { name: numbered(name, spec), ..policy.clone() };
                Event::Policy(policy.with_exceptions_behind(services))
            }));
        }
        events
    }

    fn forget_import(&mut self, name: &PolicyName) {
        let name = Name::from(name);
        for import in &mut self.imports {
            if import.names.contains(&name) {
                Arc::make_mut(import).names.remove(&name);
            }
        }
        self.imports.retain(|import| !import.names.is_empty());
    }
}

fn numbered(name: &PolicyName, spec: usize) -> PolicyName {
    match spec {
        0 => name.clone(),
        _ => PolicyName { name: format!("{}#{}", name.name, spec + 1), ..name.clone() },
    }
}

/// Groups policies by name.
pub fn by_name(policies: Vec<Policy>) -> BTreeMap<PolicyName, Vec<Policy>> {
    let mut named: BTreeMap<PolicyName, Vec<Policy>> = BTreeMap::new();
    for policy in policies {
        named.entry(policy.name.clone()).or_default().push(policy);
    }
    named
}

fn file_of(policies: &[Policy]) -> String {
    policies.first().map(|policy| policy.origin.file.to_string()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str =
        "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: db}\nspec: {podSelector: {}}\n";

    #[test]
    fn a_file_whose_text_has_not_the_policy_that_it_names_is_damaged() {
        let mut documents = Documents::default();
        documents.import(Parsed::new("db.yaml", TEXT).expect("policies")).expect("import");
        let kept = String::from_utf8(documents.to_text().expect("text")).expect("UTF-8");
        assert_eq!(Documents::parse(Some(kept.as_bytes())).expect("parsed").documents.len(), 1);
        let damaged = kept.replace("\"name\":\"db\"", "\"name\":\"other\"");
        let why = Documents::parse(Some(damaged.as_bytes())).expect_err("damaged");
        assert!(why.contains("db.yaml has no NetworkPolicy default/other"), "{why}");
    }

    #[test]
    fn a_delete_in_the_wrong_namespace_names_the_right_ones() {
        let mut documents = Documents::default();
        for namespace in ["shop", "store"] {
            let text = TEXT.replace("name: db", &format!("name: db, namespace: {namespace}"));
            documents.import(Parsed::new("db.yaml", &text).expect("policies")).expect("import");
        }
        let missing = |kind: &str| PolicyName { kind: kind.into(), namespace: "default".into(), name: "db".into() };
        let elsewhere = |documents: &mut Documents, kind| match documents.delete(&missing(kind)) {
            Err(PolicyError::Unknown { elsewhere, .. }) => elsewhere,
            other => panic!("{other:?}"),
        };
        assert_eq!(elsewhere(&mut documents, "NetworkPolicy"), ["shop", "store"]);
        assert_eq!(elsewhere(&mut documents, "CiliumNetworkPolicy"), Vec::<String>::new());
    }

    #[test]
    fn a_namespace_without_a_row_has_unknown_labels_until_every_namespace_is_known() {
        let labels = |team: &str| Labels::from([("team".to_owned(), team.to_owned())]);
        let is_unknown = |labels: Labels| labels.contains_key(UNKNOWN_LABELS);
        let mut documents = Documents { awaits_namespaces: true, ..Documents::default() };
        documents.set_namespace("hand", Some(labels("red"))).expect("labels");
        documents.set_labels_of_cluster("shop", Some(labels("blue")));
        let found = |documents: &Documents| {
            ["shop", "hand", "other"].map(|namespace| {
                (is_unknown(documents.labels_here(namespace)), is_unknown(documents.labels_elsewhere(namespace)))
            })
        };
        assert_eq!(found(&documents), [(false, false), (true, true), (true, true)]);
        assert_eq!(documents.labels_here("hand").get("team").map(String::as_str), Some("red"), "set by hand");
        assert_eq!(documents.labels_here("other").get(NAMESPACE_NAME).map(String::as_str), Some("other"));
        let complete = Documents { awaits_namespaces: false, ..documents.clone() };
        assert!(!complete.says_the_same_of_endpoints(&documents));
        assert_eq!(found(&complete), [(false, false), (false, false), (false, true)]);
        let refused = Documents { refused_namespaces: Arc::new(["other".to_owned()].into()), ..complete.clone() };
        assert!(!refused.says_the_same_of_endpoints(&complete));
        assert_eq!(found(&refused), [(false, false), (false, false), (true, true)], "a refused row is no empty one");
        assert!(documents.namespaces().all(|(_, labels)| !is_unknown(labels)), "the mark is shown");
    }

    #[test]
    fn what_would_not_be_read_again_is_not_kept() {
        let labels: Labels = (0..MAX_LABELS).map(|n| (format!("{n:0>200}"), "v".repeat(63))).collect();
        let mut documents = Documents::default();
        for n in 0.. {
            documents.set_namespace(&format!("ns{n}"), Some(labels.clone())).expect("labels");
            if (n * MAX_LABELS * 263) as u64 > MAX_FILE {
                break;
            }
        }
        let why = documents.to_text().expect_err("too large").to_string();
        assert!(why.contains("delete policies or namespaces"), "{why}");
    }
}
