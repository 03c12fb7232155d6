//! The CNI plugin `wharf-cni`: turns environment and stdin into one request to the agent, and the answer into stdout.
//! It has no policy and no state. [`request`] checks the input (pure), `commands` sends requests, `ipam` runs the
//! network's IPAM plugin. Without an agent, `away` and `link` serve a DEL, `check::kernel` a CHECK.
//!
//! The exit status is 0 or 1. The library exists for fuzz targets.
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

/// Runs the plugin in this process.
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
    // A missing result must not look like success.
    if let Some(Err(e)) = done.stdout.as_deref().map(print) {
        return failed(Fault::new(Code::Io, format!("writing the result to standard output: {e}")));
    }
    let success = End::Success { counted: true, found_nothing: done.found_nothing };
    let end = if done.deferred { End::Deferred } else { success };
    report(run, &end, &origin, conf.log);
    ExitCode::SUCCESS
}

fn fail(failure: &Failure, run: Option<Run>, log: Level) -> ExitCode {
    if print(&failure.to_json()).is_err() {
        log.say(Level::Error, format_args!("{}", failure.fault.msg));
    }
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
