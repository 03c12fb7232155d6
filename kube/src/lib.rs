//! `wharf-kube`: reports the nodes, pods, namespaces and policies of a Kubernetes cluster to the Wharf agent of its
//! node over the cluster feed, and the agent's report to the node's object. It needs no privileges on the node.
//!
//! | task | input | output |
//! |---|---|---|
//! | [`watch`], one a source | the API: lists and watches | updates of rows |
//! | [`producer`] | updates of rows; the agent's answers | the cluster feed; the state of the agent |
//! | [`node`] | the state of the agent; changes of the node's object | taint, condition, annotations; Events |
//! | [`api::endpoints`] | addresses of the API servers | the list of servers, also on disk |
//! | [`metrics`] | scrapes | metrics |
//!
//! [`run`] starts the tasks and ends them together. [`objects`] and [`rows`] are pure.
#![forbid(unsafe_code)]

pub mod api;
mod args;
pub mod metrics;
pub mod node;
pub mod objects;
pub mod producer;
pub mod rows;
pub mod run;
pub mod source;
pub mod watch;

use std::process::ExitCode;

use clap::Parser as _;

use crate::args::Args;

/// The program.
#[must_use]
pub fn main() -> ExitCode {
    let args = Args::parse();
    run::log();
    match run::main(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("wharf-kube: {error:#}");
            ExitCode::FAILURE
        }
    }
}
