//! `wharf policy ...`.

mod documents;
mod file;
mod import;
mod unselective;
mod wait;

use std::collections::BTreeSet;

use wharf_api::{PolicyChange, PolicyInfo, PolicyList, PolicyVerdict};

use super::{
    Context, describe,
    repeat::{self, Answer},
};
use crate::{
    args::{Follow, NamespaceName, PolicyCommand, PolicyDeleteArgs, PolicyExplainArgs, QualifiedPolicyName},
    error::{CliError, Exit},
    render::policy::{changes, explanation, get},
};

pub(super) async fn run(cx: &Context, command: PolicyCommand) -> Result<Exit, CliError> {
    match command {
        PolicyCommand::Validate { files } => documents::validate(&cx.out, &files),
        PolicyCommand::Import { files } => import::run(cx, &files).await,
        PolicyCommand::List { namespace, follow } => list(cx, None, namespace.as_ref(), follow).await,
        PolicyCommand::Get { name, namespace, follow } => list(cx, name.as_ref(), namespace.as_ref(), follow).await,
        PolicyCommand::Describe { name, namespace } => {
            let found = of_name(cx.client.policies().await?, Some(&name), namespace.as_ref())?;
            describe::policies(cx, found.policies).await
        }
        PolicyCommand::Delete(args) => delete(cx, args).await,
        PolicyCommand::Explain(args) => explain(cx, &args).await,
        PolicyCommand::Wait { revision, timeout } => wait::run(cx, revision, timeout).await,
    }
}

async fn list(
    cx: &Context,
    name: Option<&QualifiedPolicyName>,
    namespace: Option<&NamespaceName>,
    follow: Follow,
) -> Result<Exit, CliError> {
    let ask = async || Ok(Answer::plain(of_name(cx.client.policies().await?, name, namespace)?));
    repeat::show(cx, follow.watch, ask, |found, style| get(found, style, cx.out.is_wide())).await?;
    Ok(Exit::Ok)
}

/// Policies by name and namespace; fails without a match.
fn of_name(
    mut all: PolicyList,
    name: Option<&QualifiedPolicyName>,
    namespace: Option<&NamespaceName>,
) -> Result<PolicyList, CliError> {
    let namespace = namespace.map(|namespace| namespace.0.as_str());
    let is_in = |policy: &PolicyInfo| namespace.is_none_or(|wanted| policy.namespace.as_deref() == Some(wanted));
    let Some(QualifiedPolicyName(name)) = name else {
        all.policies.retain(is_in);
        return Ok(all);
    };
    all.policies.retain(|policy| is_named(policy, name));
    let elsewhere: BTreeSet<String> = all.policies.iter().filter_map(|policy| policy.namespace.clone()).collect();
    all.policies.retain(is_in);
    if !all.policies.is_empty() {
        return Ok(all);
    }
    let whose = namespace.map_or_else(String::new, |namespace| format!(" in namespace {namespace}"));
    let error = CliError::refused(format!("show policies: no policy{whose} is named {name}"));
    Err(match elsewhere.first() {
        Some(other) => error.hint(format!("there is one in namespace {other}: `-n {other}`")),
        None => error.hint("`wharf policy list` lists all of them"),
    })
}

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
