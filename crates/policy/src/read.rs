//! Documents to the model.
//!
//! | format | read as |
//! |---|---|
//! | `NetworkPolicy` of networking.k8s.io/v1 | accept rules of the namespaced tier; isolates |
//! | `ClusterNetworkPolicy` of policy.networking.k8s.io/v1alpha2 and v1beta1 | ordered rules of the admin or the baseline tier |
//! | `CiliumNetworkPolicy`, `CiliumClusterwideNetworkPolicy` of cilium.io/v2 | accept and deny rules of the namespaced tier; isolates |
//!
//! A text is YAML or JSON and holds any number of documents, each a policy or a list of policies (`List` of v1, or
//! `NetworkPolicyList` and the like). What is not understood is refused, not skipped: a misspelt field must not open a
//! hole. `status`, and what metadata has besides name and namespace, has no influence. A field that is null is a field
//! that is absent.
//!
//! Bounds, beyond which a text is refused: 4 MiB; 10,000 documents or items of lists; 10,000 rules a document, HTTP requests, server names and
//! names that may be asked for counted one by one; those of the parser (nesting, number of values, values copied by aliases).

mod cilium;
mod cilium_l7;
mod cilium_names;
mod cilium_ports;
mod cluster_network_policy;
mod field;
mod meta;
mod network_policy;
mod tree;
mod values;

pub use values::{is_label_key, is_label_value};

use std::{collections::BTreeMap, sync::Arc};

use self::{
    field::{Read, Reader},
    meta::{Document, Kind},
};
use crate::{
    model::{Origin, Policy, Rule},
    requests::Requests,
};

/// Longest text, bytes.
pub const MAX_TEXT: usize = 4 << 20;
/// Documents of a text, items of lists counted one by one.
const MAX_DOCUMENTS: usize = 10_000;
/// Rules of a document.
const MAX_RULES: usize = 10_000;
/// Refusals that are told; the rest are counted.
const MAX_REFUSALS: usize = 20;

/// Why a text was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A field of a document.
    #[error("{origin}: {reason}; {remedy}")]
    Field {
        /// The field.
        origin: Origin,
        /// What is wrong with it.
        reason: String,
        /// What to do.
        remedy: String,
    },
    /// The text as a whole.
    #[error("{file}:{line}: {reason}; {remedy}")]
    Text {
        /// The file, or what else the text came from.
        file: Arc<str>,
        /// Line, from 1.
        line: u32,
        /// What is wrong with it.
        reason: String,
        /// What to do.
        remedy: String,
    },
    /// Refusals that are left out.
    #[error("{file}: {count} more refusals; correct those above first")]
    More {
        /// The file, or what else the text came from.
        file: Arc<str>,
        /// How many.
        count: usize,
    },
}

impl Refusal {
    /// Where the mistake is, from 1; after all lines for what is only counted.
    const fn line(&self) -> u32 {
        match self {
            Self::Field { origin, .. } => origin.line,
            Self::Text { line, .. } => *line,
            Self::More { .. } => u32::MAX,
        }
    }
}

/// The policies of a text, in its order. `file` is where the text came from, for origins and refusals; it is not opened.
///
/// A document of several `specs` (cilium.io/v2) gives a policy for each of them, one after the other, all with the
/// document's name: together they are what the document says.
///
/// # Errors
/// If anything in the text is refused, all of it is: at most 20 refusals by line, then the number of the others. Syntax, size and bounds are told alone, because nothing is known of what follows.
pub fn read(file: &str, text: &str) -> Result<Vec<Policy>, Vec<Refusal>> {
    let mut reader = Reader::new(file);
    let policies = policies(&mut reader, text);
    let refusals = reader.refusals();
    match policies {
        Ok(policies) if refusals.is_empty() => Ok(policies),
        _ => Err(refusals),
    }
}

fn policies(reader: &mut Reader, text: &str) -> Read<Vec<Policy>> {
    if text.len() > MAX_TEXT {
        let reason = format!("{} bytes, more than {MAX_TEXT}", text.len());
        return Err(reader.refuse_text(1, reason, "split the text"));
    }
    let documents = tree::parse(text)
        .map_err(|malformed| reader.refuse_text(malformed.line, malformed.reason, malformed.remedy))?;
    let (mut all, mut lines) = (Vec::new(), BTreeMap::new());
    for (at, item) in meta::items(reader, &documents).iter().enumerate() {
        let Ok(document) = meta::document(reader, item, at + 1) else { continue };
        let line = document.object.field().line();
        if let Some(first) = lines.insert(document.name.clone(), line) {
            let reason = format!("is in the text twice, first in line {first}");
            reader.refuse(document.object.field(), reason, "remove or rename one of them");
        }
        if let Ok(policies) = policies_of(reader, &document) {
            all.extend(policies);
        }
    }
    Ok(all)
}

fn policies_of(reader: &mut Reader, document: &Document<'_>) -> Read<Vec<Policy>> {
    let policies = match document.kind {
        Kind::Kubernetes => network_policy::read(reader, document),
        Kind::Cluster => cluster_network_policy::read(reader, document),
        Kind::Cilium | Kind::CiliumClusterwide => cilium::read(reader, document),
    }?;
    let counted = |rule: &Rule| {
        let said = |of: &Arc<Requests>| of.http.len() + of.names.len() + of.server_names.len();
        rule.requests.as_ref().map_or(1, |requests| said(requests).max(1))
    };
    let rules: usize = policies.iter().flat_map(|policy| &policy.rules).map(counted).sum();
    if rules > MAX_RULES {
        let reason = format!("{rules} rules, more than {MAX_RULES}");
        return Err(reader.refuse(document.object.field(), reason, "split the policy"));
    }
    Ok(policies)
}
