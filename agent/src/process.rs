//! The process: settings, logs, pools, runtime, agent.

use std::{process::ExitCode, time::Duration};

use anyhow::Context;
use wharf_core::ipam::Ipam;

use crate::{agent, config::AgentConfig, health, pages, telemetry};

/// From the command line to the exit status.
#[must_use]
pub fn main() -> ExitCode {
    // Started by the agent itself, and of no use to anybody else: so it is no command that help tells of.
    if std::env::args_os().nth(1).is_some_and(|mode| mode == health::server::MODE) {
        return health::server::main();
    }
    if let Some(written) = pages::asked(std::env::args_os().skip(1)) {
        return written;
    }
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("wharf-agent: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<()> {
    let config = AgentConfig::of_process()?;
    let log = telemetry::init(&config.log_level, config.log_format)?;
    let ipam = Ipam::new(config.pools.clone(), config.default_pool.clone())?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2) // requests are short; what waits for the kernel runs on blocking threads
        .max_blocking_threads(64)
        .enable_all()
        .build()
        .context("start the runtime")?;
    let result = runtime.block_on(agent(config, ipam, log));
    // A kernel call that never returns must not keep a stopped agent alive.
    runtime.shutdown_timeout(Duration::from_secs(5));
    result
}
