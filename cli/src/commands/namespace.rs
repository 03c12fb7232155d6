//! `wharf namespace ...`.

use std::collections::BTreeMap;

use wharf_api::{Namespace, NamespaceLabels};

use super::{
    Context, describe,
    repeat::{self, Answer},
};
use crate::{
    args::{LabelChange, LabelChanges, Labels, NamespaceCommand, NamespaceName},
    error::{CliError, Exit},
    render::{
        namespace::{labelled, list},
        text::{count, safe},
    },
    selector::Selector,
};

pub(super) async fn run(cx: &Context, command: NamespaceCommand) -> Result<Exit, CliError> {
    match command {
        NamespaceCommand::List { selector, follow } => {
            let ask = async || {
                let mut all = cx.client.namespaces().await?;
                let has = |n: &Namespace, selector: &Selector| {
                    let labels: Vec<String> = n.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
                    selector.matches(labels.iter().map(String::as_str))
                };
                all.retain(|namespace| selector.as_ref().is_none_or(|selector| has(namespace, selector)));
                Ok(Answer::plain(all))
            };
            repeat::show(cx, follow.watch, ask, |all, style| list(all, style)).await?;
        }
        NamespaceCommand::Label { name: NamespaceName(name), changes } => {
            let of_namespace = |change: LabelChange| change.of_source("a namespace", "k8s");
            let changes = LabelChanges::all(changes)?.into_iter().map(of_namespace).collect::<Result<Vec<_>, _>>()?;
            let mut all = cx.client.namespaces().await?;
            let known = all.iter_mut().find(|namespace| namespace.name == name);
            let mut labels = known.map(|namespace| std::mem::take(&mut namespace.labels)).unwrap_or_default();
            for change in changes {
                change.apply(&mut labels);
            }
            let done = cx.client.put_namespace(&name, &NamespaceLabels { labels }).await?;
            cx.out.emit(&done, |_| labelled(&done))?;
        }
        NamespaceCommand::Get { name } => {
            let mut found = cx.client.namespaces().await?;
            if let Some(NamespaceName(name)) = name {
                found.retain(|namespace| namespace.name == name);
                if found.is_empty() {
                    let error = CliError::refused(format!("show namespace {name}: it was given no labels"));
                    return Err(error.hint("`wharf namespace list` shows those that have labels"));
                }
            }
            cx.out.emit(&found, |style| list(&found, style))?;
        }
        NamespaceCommand::Describe { name: NamespaceName(name) } => return describe::namespace(cx, &name).await,
        NamespaceCommand::Set { name: NamespaceName(name), labels } => {
            let labels = Labels::by_key(labels, "a namespace", "k8s")?;
            let set = u64::try_from(labels.len()).unwrap_or(u64::MAX);
            let done = cx.client.put_namespace(&name, &NamespaceLabels { labels }).await?;
            cx.out.emit(&done, |_| format!("{}: {} set\n", safe(&done.name), count(set, "label")))?;
        }
        NamespaceCommand::Delete { name: NamespaceName(name) } => {
            cx.client.delete_namespace(&name).await?;
            let done = BTreeMap::from([("deleted", &name)]);
            cx.out.emit(&done, |_| format!("{}: its labels are forgotten\n", safe(&name)))?;
        }
    }
    Ok(Exit::Ok)
}
