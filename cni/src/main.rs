//! `wharf-cni`, the CNI plugin: environment and stdin become one request to the agent, its answer becomes stdout.
//!
//! No policy, no netlink, no state. In order of use:
//! - [`request`]: environment and stdin to a checked [`request::Request`] (pure), by way of
//!   [`netconf`] (the network configuration), [`args`] (what is asked for this one container), [`json`] and [`rules`];
//! - [`commands`]: each command's request to the agent, with [`retry`]; [`check`] and [`status`] judge its answer;
//! - [`result`]: the result of ADD in the version asked for; [`fault`]: errors and their CNI codes;
//! - [`log`]: lines on stderr.
//!
//! Stdout holds the result, or the error, or nothing. The exit status is 0 or 1.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking"))]

mod args;
mod check;
mod commands;
mod fault;
mod json;
mod log;
mod netconf;
mod request;
mod result;
mod retry;
mod rules;
mod status;

use std::{
    io::{self, Write},
    process::ExitCode,
};

use crate::{
    fault::Failure,
    request::{Env, Request},
};

fn main() -> ExitCode {
    match run() {
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some(answer)) => print(&answer, ExitCode::SUCCESS),
        Err(failure) => print(&failure.to_json(), ExitCode::FAILURE),
    }
}

/// What goes to stdout, if anything.
fn run() -> Result<Option<String>, Failure> {
    let request = Request::read(&Env::of_process(), &mut io::stdin().lock())?;
    match request {
        Request::Version { cni_version } => Ok(Some(result::versions(&cni_version))),
        Request::Ask(ask) => commands::run(&ask).map_err(|fault| Failure::new(ask.conf.version.as_str(), fault)),
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
