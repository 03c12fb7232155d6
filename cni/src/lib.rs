//! The CNI plugin `wharf-cni`: environment and stdin become one request to the agent, its answer becomes stdout.
//!
//! No policy, no state. In order of use:
//! - [`request`]: environment and stdin to a checked [`request::Request`] (pure), by way of
//!   `netconf` (the network configuration), `args` (what is asked for this one container), `json` and `rules`;
//! - `commands`: each command's request to the agent, with `retry`; `check` and `status` judge its answer;
//! - `away`: a DEL that finds no agent leaves a record for it and takes the container's link away itself, by `link`,
//!   the shim's only netlink;
//! - `result`: the result of ADD in the version asked for; [`fault`]: errors and their CNI codes;
//! - `log`: lines on stderr.
//!
//! Stdout holds the result, or the error, or nothing. The exit status is 0 or 1. This is a library so that what reads
//! bytes from outside can be fuzzed; nobody else links it.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking"))]

mod args;
mod away;
mod bandwidth;
mod chain;
mod check;
mod commands;
#[cfg(test)]
mod documented_tests;
pub mod fault;
mod json;
mod link;
mod log;
mod netconf;
mod ports;
pub mod request;
mod result;
mod retry;
mod rules;
mod status;

use std::{
    io::{self, Write},
    process::ExitCode,
};

use crate::{
    commands::Limits,
    fault::Failure,
    request::{Env, Request},
};

/// The whole run of the plugin, with this process's environment, stdin and stdout.
#[must_use]
pub fn run() -> ExitCode {
    match answer() {
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some(answer)) => print(&answer, ExitCode::SUCCESS),
        Err(failure) => print(&failure.to_json(), ExitCode::FAILURE),
    }
}

/// What goes to stdout, if anything.
fn answer() -> Result<Option<String>, Failure> {
    let request = Request::read(&Env::of_process(), &mut io::stdin().lock())?;
    match request {
        Request::Version { cni_version } => Ok(Some(result::versions(&cni_version))),
        Request::Ask(ask) => {
            commands::run(&ask, &Limits::default()).map_err(|fault| Failure::new(ask.conf.version.as_str(), fault))
        }
    }
}

fn print(text: &str, code: ExitCode) -> ExitCode {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.write_all(b"\n")).and_then(|()| out.flush()) {
        Ok(()) => code,
        // Nobody reads us: whoever ran us must not take silence for success.
        Err(_) => ExitCode::FAILURE,
    }
}
