//! `wharf-kube`: reports nodes, pods, namespaces and policies of a Kubernetes cluster to the node's Wharf agent over
//! the cluster feed, and the agent's state to the node's object. Needs no privileges on the node.
//!
//! [`watch`] sends rows to [`producer`], which feeds the agent and publishes the agent's state to [`node`]. [`run`]
//! starts the tasks and ends them together. [`objects`] and [`rows`] are pure.
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
