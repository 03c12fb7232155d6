//! The CNI plugin `wharf-cni`: environment and stdin become one request to the agent, its answer becomes stdout.
//!
//! No policy, no state. In order of use:
//! - [`request`]: environment and stdin to a checked [`request::Request`] (pure), by way of
//!   `netconf` (the network configuration), `args` (what is asked for this one container), `json` and `rules`;
//! - `commands`: each command's request to the agent, with `retry`; `check` and `status` judge its answer;
//! - `ipam`: the IPAM plugin that the network names, if any, one command after another by `turn`; [`leased`]: its result; `routes`: routes of either;
//! - `away`: a DEL that finds no agent leaves a record for it and takes the container's link away itself, by `link`,
//!   the shim's only netlink; `check::kernel`: a CHECK that finds no agent compares `prevResult` with the kernel, by `link::sides`;
//! - `runtime`: which program runs the plugin;
//! - `result`: the result of ADD in the version asked for; [`fault`]: errors and their CNI codes;
//! - `report`: what the agent is told of this run, with each request or by a report; `log`: lines on stderr.
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
mod ipam;
mod json;
pub mod leased;
mod link;
mod log;
mod netconf;
mod ports;
mod report;
pub mod request;
mod result;
mod retry;
mod routes;
mod rules;
mod runtime;
mod status;
mod turn;

use std::{
    io::{self, Write},
    process::ExitCode,
};

use crate::{
    commands::Limits,
    fault::{Code, Failure, Fault, Origin},
    log::Level,
    report::{End, Run},
    request::{Ask, Env, Request},
};

/// The whole run of the plugin, with this process's environment, stdin and stdout.
#[must_use]
pub fn run() -> ExitCode {
    let env = Env::of_process();
    let run = Run::of(&env);
    match Request::read(&env, &mut io::stdin().lock()) {
        Ok(Request::Version { cni_version }) => match print(&result::versions(&cni_version)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        },
        Ok(Request::Ask(ask)) => answer(&ask, run),
        Err(failure) => fail(&failure, run, Level::Warn),
    }
}

/// Asks the agent, prints what it answers, and tells how that ended.
fn answer(ask: &Ask, run: Option<Run>) -> ExitCode {
    let conf = &ask.conf;
    let origin = Origin { network: conf.name.clone(), socket: Some(conf.socket.clone()) };
    let run = run.map(|run| run.on(&conf.name)).map(|run| if ask.ipam.is_some() { run.with_ipam() } else { run });
    let done = commands::run(ask, &Limits::default(), run.as_ref());
    let failed = |fault| fail(&Failure::new(conf.version.as_str(), fault).of(origin.clone()), run.clone(), conf.log);
    let done = match done {
        Ok(done) => done,
        Err(fault) => return failed(fault),
    };
    // Whoever ran us must not take silence for success.
    if let Some(Err(e)) = done.stdout.as_deref().map(print) {
        return failed(Fault::new(Code::Io, format!("writing the result to standard output: {e}")));
    }
    let success = End::Success { counted: true, found_nothing: done.found_nothing };
    let end = if done.deferred { End::Deferred } else { success };
    report(run, &end, &origin, conf.log);
    ExitCode::SUCCESS
}

/// Prints the error, and tells of it.
fn fail(failure: &Failure, run: Option<Run>, log: Level) -> ExitCode {
    // The exit status says it where nobody reads.
    let _ = print(&failure.to_json());
    report(run, &End::Failure(&failure.fault), &failure.origin, log);
    ExitCode::FAILURE
}

fn report(run: Option<Run>, end: &End<'_>, origin: &Origin, log: Level) {
    if let Some(Err(why)) = run.map(|run| run.report(end, origin)) {
        log.say(Level::Warn, format_args!("{why}"));
    }
}

fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.write_all(b"\n")?;
    out.flush()
}
