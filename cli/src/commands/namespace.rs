//! `wharf namespace ...`.

use std::collections::BTreeMap;

use wharf_api::NamespaceLabels;

use super::Context;
use crate::{
    args::{Label, NamespaceCommand},
    error::{CliError, Exit},
    render::{
        namespace::list,
        text::{count, safe},
    },
};

pub(super) async fn run(cx: &Context, command: NamespaceCommand) -> Result<Exit, CliError> {
    match command {
        NamespaceCommand::List => {
            let all = cx.client.namespaces().await?;
            cx.out.emit(&all, |style| list(&all, style))?;
        }
        NamespaceCommand::Set { name, labels } => {
            let labels = Label::by_key(labels)
                .map_err(|key| CliError::usage(format!("set the labels of a namespace: {key} is there twice")))?;
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
