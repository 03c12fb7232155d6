//! `wharf namespace ...`.

use std::collections::BTreeMap;

use wharf_api::NamespaceLabels;

use super::Context;
use crate::{
    args::{LabelChange, LabelChanges, Labels, NamespaceCommand},
    error::{CliError, Exit},
    render::{
        namespace::{labelled, list},
        text::{count, safe},
    },
};

pub(super) async fn run(cx: &Context, command: NamespaceCommand) -> Result<Exit, CliError> {
    match command {
        NamespaceCommand::List => {
            let all = cx.client.namespaces().await?;
            cx.out.emit(&all, |style| list(&all, style))?;
        }
        NamespaceCommand::Label { name, changes } => {
            let changes = LabelChanges::all(changes)?;
            let mut all = cx.client.namespaces().await?;
            let known = all.iter_mut().find(|namespace| namespace.name == name);
            let mut labels = known.map(|namespace| std::mem::take(&mut namespace.labels)).unwrap_or_default();
            for change in changes {
                match change {
                    LabelChange::Set(label) => {
                        let one = Labels::by_key(vec![Labels::from(label)], "a namespace", "k8s")?;
                        labels.extend(one);
                    }
                    LabelChange::Remove { key, .. } => drop(labels.remove(&key)),
                }
            }
            let done = cx.client.put_namespace(&name, &NamespaceLabels { labels }).await?;
            cx.out.emit(&done, |_| labelled(&done))?;
        }
        NamespaceCommand::Set { name, labels } => {
            let labels = Labels::by_key(labels, "a namespace", "k8s")?;
            let set = u64::try_from(labels.len()).unwrap_or(u64::MAX);
            let done = cx.client.put_namespace(&name, &NamespaceLabels { labels }).await?;
            cx.out.emit(&done, |_| format!("{}: {} set\n", safe(&done.name), count(set, "label")))?;
        }
        NamespaceCommand::Delete { name } => {
            cx.client.delete_namespace(&name).await?;
            let done = BTreeMap::from([("deleted", &name)]);
            cx.out.emit(&done, |_| format!("{}: its labels are forgotten\n", safe(&name)))?;
        }
    }
    Ok(Exit::Ok)
}
