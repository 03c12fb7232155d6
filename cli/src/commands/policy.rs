//! `wharf policy ...`.

mod documents;
mod file;
mod import;
mod unselective;
mod wait;

use wharf_api::{PolicyChange, PolicyInfo, PolicyVerdict};

use super::Context;
use crate::{
    args::{PolicyCommand, PolicyDeleteArgs, PolicyExplainArgs},
    error::{CliError, Exit},
    render::policy::{changes, explanation, get},
};

pub(super) async fn run(cx: &Context, command: PolicyCommand) -> Result<Exit, CliError> {
    match command {
        PolicyCommand::Validate { files } => documents::validate(&cx.out, &files),
        PolicyCommand::Import { files } => import::run(cx, &files).await,
        PolicyCommand::Get { name } => list(cx, name.as_deref()).await,
        PolicyCommand::Delete(args) => delete(cx, args).await,
        PolicyCommand::Explain(args) => explain(cx, &args).await,
        PolicyCommand::Wait { revision, timeout } => wait::run(cx, revision, timeout).await,
    }
}

async fn list(cx: &Context, name: Option<&str>) -> Result<Exit, CliError> {
    let mut found = cx.client.policies().await?;
    if let Some(name) = name {
        found.policies.retain(|policy| is_named(policy, name));
        if found.policies.is_empty() {
            let error = CliError::refused(format!("show policies: no policy is named {name}"));
            return Err(error.hint("`wharf policy get` lists all of them"));
        }
    }
    cx.out.emit(&found, |style| get(&found, style, cx.out.is_wide()))?;
    Ok(Exit::Ok)
}

/// Whether this is the policy's name, with or without its namespace.
fn is_named(policy: &PolicyInfo, name: &str) -> bool {
    match name.split_once('/') {
        Some((namespace, name)) => policy.namespace.as_deref() == Some(namespace) && policy.name == name,
        None => policy.name == name,
    }
}

async fn delete(cx: &Context, args: PolicyDeleteArgs) -> Result<Exit, CliError> {
    let Some(query) = args.query() else {
        let error = CliError::usage("delete a policy: a clusterwide kind has no namespace");
        return Err(error.hint("leave --namespace out"));
    };
    let done = cx.client.delete_policy(&query).await?;
    cx.out.emit(&done, |_| changes(std::slice::from_ref(&done)))?;
    Ok(Exit::well(PolicyChange::is_in_force(&done)))
}

async fn explain(cx: &Context, args: &PolicyExplainArgs) -> Result<Exit, CliError> {
    let answer = cx.client.explain_policy(&args.query()).await?;
    cx.out.emit(&answer, |style| explanation(&answer, style))?;
    Ok(Exit::well(answer.verdict == PolicyVerdict::Accept))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_is_found_with_and_without_its_namespace() {
        let policy = |namespace: Option<&str>| PolicyInfo {
            kind: "NetworkPolicy".to_owned(),
            namespace: namespace.map(str::to_owned),
            name: "db".to_owned(),
            tier: "namespaced".to_owned(),
            priority: None,
            subject: "all endpoints".to_owned(),
            isolates: Vec::new(),
            ingress_rules: 0,
            egress_rules: 0,
            file: "db.yaml".to_owned(),
            line: 1,
            endpoints: Vec::new(),
        };
        for (namespace, name, wanted) in [
            (Some("shop"), "db", true),
            (Some("shop"), "shop/db", true),
            (Some("shop"), "other/db", false),
            (Some("shop"), "shop", false),
            (None, "db", true),
            (None, "shop/db", false),
        ] {
            assert_eq!(is_named(&policy(namespace), name), wanted, "{namespace:?} {name}");
        }
    }
}
