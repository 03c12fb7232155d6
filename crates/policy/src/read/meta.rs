//! Kinds, metadata and lists of objects.

use super::{
    MAX_DOCUMENTS,
    field::{Field, Object, Read, Reader, quoted},
    tree::{Node, Value},
    values,
};
use crate::model::PolicyName;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Kubernetes,
    Cluster,
    Cilium,
    CiliumClusterwide,
}

const KINDS: [(&str, &str, Kind); 5] = [
    ("networking.k8s.io/v1", "NetworkPolicy", Kind::Kubernetes),
    ("policy.networking.k8s.io/v1alpha2", "ClusterNetworkPolicy", Kind::Cluster),
    ("policy.networking.k8s.io/v1beta1", "ClusterNetworkPolicy", Kind::Cluster),
    ("cilium.io/v2", "CiliumNetworkPolicy", Kind::Cilium),
    ("cilium.io/v2", "CiliumClusterwideNetworkPolicy", Kind::CiliumClusterwide),
];

const REPLACED: [(&str, &str); 2] = [
    ("AdminNetworkPolicy", "write a ClusterNetworkPolicy with tier Admin"),
    ("BaselineAdminNetworkPolicy", "write a ClusterNetworkPolicy with tier Baseline"),
];

/// meta/v1 ObjectMeta; only name and namespace have an effect.
const METADATA: [&str; 15] = [
    "name",
    "namespace",
    "labels",
    "annotations",
    "uid",
    "resourceVersion",
    "generation",
    "generateName",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "ownerReferences",
    "finalizers",
    "managedFields",
    "selfLink",
];

impl Kind {
    const fn is_namespaced(self) -> bool {
        matches!(self, Self::Kubernetes | Self::Cilium)
    }

    const fn has_specs(self) -> bool {
        matches!(self, Self::Cilium | Self::CiliumClusterwide)
    }
}

#[derive(Debug)]
pub(super) struct Document<'a> {
    pub(super) kind: Kind,
    pub(super) name: PolicyName,
    pub(super) object: Object<'a>,
}

impl<'a> Document<'a> {
    pub(super) fn spec(&self, reader: &mut Reader) -> Read<Field<'a>> {
        reader.required(&self.object, "spec", "write the policy")
    }
}

/// Version and kind of a list, whose items may omit them.
type Listed = Option<(&'static str, &'static str)>;

#[derive(Debug)]
pub(super) struct Item<'a> {
    node: &'a Node,
    listed: Listed,
}

pub(super) fn items<'a>(reader: &mut Reader, documents: &'a [Node]) -> Vec<Item<'a>> {
    let mut all = Vec::new();
    for (at, node) in documents.iter().enumerate() {
        reader.document = format!("document {}", at + 1).into();
        match list(reader, node) {
            Ok(Some((items, listed))) => all.extend(items.iter().map(|node| Item { node, listed })),
            Ok(None) => all.push(Item { node, listed: None }),
            Err(_) => {}
        }
    }
    if let Some(Item { node, .. }) = all.get(MAX_DOCUMENTS) {
        let (line, count) = (node.line, all.len());
        reader.refuse_text(line, format!("{count} policies, more than {MAX_DOCUMENTS}"), "split the text");
        all.truncate(MAX_DOCUMENTS);
    }
    all
}

fn list<'a>(reader: &mut Reader, node: &'a Node) -> Read<Option<(&'a [Node], Listed)>> {
    let root = Field::root(node);
    let object = reader.map(&root)?;
    let word = |key| {
        object.get(key).and_then(|field| if let Value::Text(text) = field.value() { Some(text.as_str()) } else { None })
    };
    let (version, kind) = (word("apiVersion"), word("kind"));
    let of_kind = |(of, name, _): &&(&str, &str, Kind)| {
        Some(*of) == version && kind.and_then(|k| k.strip_suffix("List")) == Some(*name)
    };
    let listed = KINDS.iter().find(of_kind).map(|(version, kind, _)| (*version, *kind));
    if listed.is_none() && (version, kind) != (Some("v1"), Some("List")) {
        return Ok(None);
    }
    reader.object(&root, &["apiVersion", "kind", "metadata", "items"], &[])?;
    let items = reader.required(&object, "items", "write the policies, or an empty list")?;
    match items.value() {
        Value::List(items) => Ok(Some((items, listed))),
        other => Err(reader.refuse(&items, format!("is {}", other.kind()), "write a list")),
    }
}

pub(super) fn document<'a>(reader: &mut Reader, item: &Item<'a>, number: usize) -> Read<Document<'a>> {
    reader.document = format!("policy {number}").into();
    let root = Field::root(item.node);
    let object = reader.map(&root)?;
    if let Some(named) = named(&object, item.listed) {
        reader.document = named.into();
    }
    let kind = kind(reader, &object, item.listed)?;
    let name = name(reader, &object, kind)?;
    reader.document = name.to_string().into();
    let known: &[_] = if kind.has_specs() { &["specs"] } else { &[] };
    let known = [&["apiVersion", "kind", "metadata", "spec", "status"], known].concat();
    let object = reader.object(&root, &known, &[])?;
    Ok(Document { kind, name, object })
}

fn named(object: &Object<'_>, listed: Listed) -> Option<String> {
    let word = |value: &'_ Value| match value {
        Value::Text(text) if values::is_label_key(text) => Some(text.clone()),
        _ => None,
    };
    let kind = object.get("kind").and_then(|field| word(field.value()));
    let kind = kind.or_else(|| listed.map(|(_, kind)| kind.to_owned()))?;
    let metadata = object.get("metadata");
    let name = match metadata.as_ref().map(Field::value) {
        Some(Value::Map(entries)) => entries.iter().find(|entry| entry.key == "name").map(|entry| &entry.node.value),
        _ => None,
    };
    Some(match name.and_then(word) {
        Some(name) => format!("{kind} {name}"),
        None => kind,
    })
}

fn kind(reader: &mut Reader, object: &Object<'_>, listed: Listed) -> Read<Kind> {
    let mut text = |key, remedy| match (object.get(key), listed) {
        (None, Some((version, kind))) => Ok(if key == "kind" { kind } else { version }),
        _ => reader.required(object, key, remedy).and_then(|field| reader.text(&field)),
    };
    let version = text("apiVersion", "write the version of the API, such as networking.k8s.io/v1");
    let kind = text("kind", "write the kind, such as NetworkPolicy");
    let (version, kind) = (version?, kind?);
    if let Some((listed_version, listed_kind)) = listed
        && (version, kind) != (listed_version, listed_kind)
    {
        let reason = format!("is {} of {} in a list of {listed_kind}", quoted(kind), quoted(version));
        return Err(reader.refuse_key(object, "kind", reason, "put it into a List of v1, or remove it"));
    }
    if let Some((_, _, known)) = KINDS.iter().find(|known| (known.0, known.1) == (version, kind)) {
        return Ok(*known);
    }
    let of_kind: Vec<_> = KINDS.iter().filter(|known| known.1 == kind).map(|known| known.0).collect();
    if !of_kind.is_empty() {
        let remedy = format!("write {}", of_kind.join(" or "));
        return Err(reader.refuse_key(
            object,
            "apiVersion",
            format!("{} is not known for {kind}", quoted(version)),
            remedy,
        ));
    }
    let remedy = match REPLACED.iter().find(|(name, _)| *name == kind) {
        Some((_, remedy)) => (*remedy).to_owned(),
        None => {
            format!("remove it; known are {}", KINDS.map(|(version, kind, _)| format!("{version} {kind}")).join(", "))
        }
    };
    Err(reader.refuse_key(object, "kind", format!("{} of {} is not supported", quoted(kind), quoted(version)), remedy))
}

fn name(reader: &mut Reader, object: &Object<'_>, kind: Kind) -> Read<PolicyName> {
    let label = KINDS.iter().find(|(_, _, known)| *known == kind).map_or("", |(_, name, _)| *name);
    let metadata = reader.required(object, "metadata", "write metadata with the policy's name")?;
    let metadata = reader.object(&metadata, &METADATA, &[])?;
    let name =
        reader.required(&metadata, "name", "name the policy").and_then(|field| values::object_name(reader, &field));
    let namespace = match (metadata.get("namespace"), kind.is_namespaced()) {
        (Some(field), true) => values::namespace_name(reader, &field),
        (None, true) => Ok("default".to_owned()),
        (None, false) => Ok(String::new()),
        (Some(field), false) => Err(reader.refuse(&field, format!("a {label} is in no namespace"), "remove the field")),
    };
    Ok(PolicyName { kind: label.to_owned(), namespace: namespace?, name: name? })
}
