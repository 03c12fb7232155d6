//! What rules about requests cost: deletes that wait for the proxy, requests through it, and flows that have none of
//! it.
//!
//! | file | what |
//! |---|---|
//! | `documents` | the policies |
//! | `deletes` | the wait of a DEL for a proxy that answers, and for one that does not |
//! | `requests` | requests a second through a redirect, beside the same Envoy as a plain reverse proxy |
//! | `plain` | that reverse proxy |
//! | `load` | the web server and its clients |

mod deletes;
mod documents;
mod load;
mod plain;
mod requests;

use std::time::Duration;

use anyhow::{Context, Result};
use wharf_api::PolicyImport;

use super::findings::Part;
use crate::{Node, NodeConfig, wait};

/// How much is measured.
#[derive(Debug, Clone)]
pub struct Extent {
    /// Deletes of each kind.
    deletes: usize,
    /// Members of a listener beside the one that is deleted.
    others: usize,
    /// Deletes while the proxy is stopped.
    stopped: usize,
    /// Rounds of requests and of traffic.
    rounds: usize,
    /// Time that one kind of requests or traffic takes in a round.
    span: Duration,
}

impl Extent {
    /// That of the smoke run, or the whole.
    #[must_use]
    pub fn of(quick: bool, deletes: usize, rounds: usize) -> Self {
        let (others, stopped, millis) = if quick { (20, 1, 100) } else { (200, 10, 1_000) };
        Self { deletes, others, stopped, rounds, span: Duration::from_millis(millis) }
    }
}

/// Requests, traffic, deletes, in that order: those that leave the kernel work to do come last.
///
/// # Errors
/// When a node cannot be made, when Envoy is not there, or when rules do not do what is measured.
pub fn measure(agent: &NodeConfig, extent: &Extent) -> Result<Part> {
    let (mut groups, mut marks) = (Vec::new(), Vec::new());
    let mut take = |(more, judged): Part| {
        groups.extend(more);
        marks.extend(judged);
    };
    take(requests::measure(agent, extent).context("requests")?);
    take(deletes::healthy(agent, extent).context("deletes")?);
    take(deletes::stopped(agent, extent).context("deletes while the proxy is stopped")?);
    Ok((groups, marks))
}

/// Imports policies, and waits until kernel and proxy have them.
fn import(node: &Node, text: &str) -> Result<()> {
    let import = PolicyImport { file: "bench.yaml".to_owned(), text: text.to_owned() };
    node.ask(async |client| client.import_policy(&import).await)?;
    wait::until("the proxy has what policy asks", || {
        let list = node.ask(async |client| client.policies().await)?;
        Ok((list.realized == list.revision).then_some(()))
    })
}

/// Waits until the proxy has acknowledged all that it was told.
fn acknowledged(node: &Node) -> Result<()> {
    wait::until("the proxy acknowledges", || {
        Ok(node.ask(async |client| client.proxy().await)?.outstanding.is_empty().then_some(()))
    })
}
