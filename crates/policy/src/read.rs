//! Documents to the model.
//!
//! | format | read as |
//! |---|---|
//! | `NetworkPolicy` of networking.k8s.io/v1 | namespaced accept rules; isolates |
//! | `ClusterNetworkPolicy` of policy.networking.k8s.io v1alpha2, v1beta1 | admin or baseline rules |
//! | `CiliumNetworkPolicy`, `CiliumClusterwideNetworkPolicy` of cilium.io/v2 | namespaced rules; isolates |
//!
//! A text is YAML or JSON: policies or lists of them. Unknown content is refused: a misspelt field must not open
//! access. `status`, and metadata other than name and namespace, have no effect. A null field counts as absent.
//!
//! HTTP requests, server names and DNS names count as rules.

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

/// Bytes.
pub const MAX_TEXT: usize = 4 << 20;
const MAX_DOCUMENTS: usize = 10_000;
/// Per document; requests count.
const MAX_RULES: usize = 10_000;
const MAX_REFUSALS: usize = 20;

/// A refused text or field.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// An invalid field.
    #[error("{origin}: {reason}; {remedy}")]
    Field {
        /// Field.
        origin: Origin,
        /// Cause.
        reason: String,
        /// Correction.
        remedy: String,
    },
    /// An invalid text.
    #[error("{file}:{line}: {reason}; {remedy}")]
    Text {
        /// Or another source.
        file: Arc<str>,
        /// From 1.
        line: u32,
        /// Cause.
        reason: String,
        /// Correction.
        remedy: String,
    },
    /// Omitted refusals.
    #[error("{file}: {count} more refusals; correct those above first")]
    More {
        /// Or another source.
        file: Arc<str>,
        count: usize,
    },
}

impl Refusal {
    /// From 1; the maximum for a count.
    const fn line(&self) -> u32 {
        match self {
            Self::Field { origin, .. } => origin.line,
            Self::Text { line, .. } => *line,
            Self::More { .. } => u32::MAX,
        }
    }
}

/// Policies of a text, in order. `file` is only a name. Several `specs` (cilium.io/v2) share the document's name.
///
/// # Errors
/// The whole text is refused: at most 20 refusals by line, then the number of the others. Errors of syntax, size and
/// bounds are reported alone.
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
