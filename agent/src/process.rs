//! The process: settings, logs, pools, runtime, agent.

use std::{
    ffi::OsString,
    fmt::Display,
    io::{self, Write as _},
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Command, ExitCode},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use anyhow::Context;
use nix::{
    libc::c_int,
    sys::{
        resource::{Resource, getrlimit, setrlimit},
        signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction},
        stat::{Mode, umask},
    },
};
use wharf_core::{ipam::Ipam, overlap::Refused};
use wharf_kit::{socket, telemetry};

use crate::{
    End,
    addresses::pools,
    agent, capabilities, cleanup, cluster,
    config::{self, AgentConfig},
    delegate, health, memory, pages, policy,
    proxy::envoy,
    refused::{BAD_SETTINGS, refuse},
};

/// SIGTERM or SIGINT arrived. Tokio reports signals only while its runtime lives.
static STOPS: AtomicBool = AtomicBool::new(false);

extern "C" fn note_stop(_: c_int) {
    STOPS.store(true, Ordering::Relaxed);
}

/// Records SIGTERM and SIGINT until the process ends. Before tokio's handlers, which call earlier ones.
pub(crate) fn note_signals() -> nix::Result<()> {
    let action = SigAction::new(SigHandler::Handler(note_stop), SaFlags::SA_RESTART, SigSet::empty());
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        // SAFETY: the handler only stores to an atomic, which is async-signal-safe (signal-safety(7)).
        unsafe { sigaction(signal, &action) }?;
    }
    Ok(())
}

/// SIGTERM or SIGINT arrived since [`note_signals`].
pub(crate) fn stops() -> bool {
    STOPS.load(Ordering::Relaxed)
}

/// Runs the process.
#[must_use]
pub fn main() -> ExitCode {
    // Only the agent starts these, so they are not in the help.
    match std::env::args_os().nth(1) {
        Some(mode) if mode == health::server::MODE => return health::server::main(),
        Some(mode) if mode == wharf_store::check::MODE => return wharf_store::check::main(),
        _ => {}
    }
    if let Some(written) = pages::asked(std::env::args_os().skip(1)) {
        return written;
    }
    if let Some(done) = cleanup::asked(std::env::args_os().skip(1)) {
        return done;
    }
    let settings = match Settings::of_process() {
        Ok(usable) => usable,
        Err(ended) => return ended,
    };
    let done = if settings.check_only {
        show(&settings.config)
    } else {
        run(settings.config, settings.ipam).and_then(|end| match end {
            End::Stopped => Ok(ExitCode::SUCCESS),
            End::Restart => execute_again(),
        })
    };
    match done {
        Ok(status) => status,
        Err(error) => {
            eprintln!("wharf-agent: {error:#}");
            ExitCode::FAILURE
        }
    }
}

struct Settings {
    config: AgentConfig,
    ipam: Ipam,
    check_only: bool,
}

impl Settings {
    fn of_process() -> Result<Self, ExitCode> {
        let arguments: Vec<OsString> = std::env::args_os().collect();
        let matches = config::parse(&arguments).map_err(|error| refuse(&error))?;
        let refused = |error: &dyn Display| {
            eprintln!("wharf-agent: {error}");
            ExitCode::from(BAD_SETTINGS)
        };
        let mut config = AgentConfig::of(&matches).map_err(|e| refused(&e))?;
        cluster::pools::resolve(&mut config);
        let ipam = config.ipam().map_err(|e| refused(&e))?;
        Ok(Self { config, ipam, check_only: matches.get_flag("check_config") })
    }
}

fn show(config: &AgentConfig) -> anyhow::Result<ExitCode> {
    let mut text = String::new();
    for (name, value) in config::effective(config) {
        let origin = config.origins.get(&name).map_or("default", |origin| origin.as_str());
        text.push_str(&format!("{name} = {value}  ({origin})\n"));
    }
    let (problems, remarks) = problems(config);
    if problems.is_empty() {
        text.push_str("the configuration is valid\n");
    }
    io::stdout().write_all(text.as_bytes()).context("write to standard output")?;
    for line in remarks.iter().chain(&problems) {
        eprintln!("wharf-agent: {line}");
    }
    Ok(if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(BAD_SETTINGS) })
}

fn problems(config: &AgentConfig) -> (Vec<String>, Vec<String>) {
    let (mut problems, mut remarks) = (Vec::new(), Vec::new());
    if let Some(Err(error)) = config.policy_dir.as_deref().map(policy::check_directory) {
        problems.push(format!("setting policy-dir: {error}"));
    }
    if let Some(Err(error)) = config.cluster_file.as_deref().map(|path| cluster::check(path, &config.node_name)) {
        problems.push(format!("setting cluster-file: {error}"));
    }
    if let Some(Err(error)) = config.cluster_feed_group.as_deref().map(socket::check_group) {
        problems.push(format!("setting cluster-feed-group: {error:#}"));
    }
    match envoy::check_program(config) {
        Ok(unchecked) => remarks.extend(unchecked.map(|why| format!("setting envoy: {why}"))),
        Err(error) => problems.push(format!("setting envoy: {error}")),
    }
    let from_cluster = config.pools_from_cluster.as_ref();
    remarks.extend(
        from_cluster.and_then(|from| from.problem.clone()).map(|why| format!("setting pools-from-cluster: {why}")),
    );
    if config.delegate.is_none()
        && let Err(error) = pools::check(config)
    {
        let list = if from_cluster.is_some() { &mut remarks } else { &mut problems };
        list.push(format!("{error:#}"));
    }
    (problems, remarks)
}

/// New files are never writable for others, whatever the umask. Call it before the first thread.
fn keep_others_from_writing() {
    umask(umask(Mode::S_IWOTH) | Mode::S_IWOTH);
}

/// A shell's limit of 1,024 is below the number of API connections.
fn allow_all_files() -> nix::Result<()> {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)
}

/// Pools of this node's row that overlap a network of the node are refused, and the agent starts with the pools that
/// were last in use: the row may change.
fn check_pools(config: &mut AgentConfig, ipam: &mut Ipam) -> anyhow::Result<()> {
    while let Err(why) = pools::check(config) {
        let overlap = why.downcast_ref::<Refused>().and_then(|refused| refused.0.first()).map(ToString::to_string);
        let Some(overlap) = overlap.filter(|_| config.pools_from_cluster.is_some()) else { return Err(why) };
        cluster::pools::refuse(config, &overlap);
        *ipam = config.ipam()?;
    }
    Ok(())
}

/// Executes this program again with the same arguments, environment and process id. With `no_new_privs`, exec as root
/// leaves exactly this thread's capabilities. Files are close-on-exec, which frees the locks of [`crate::turn`].
/// Returns only if exec fails, or after a signal.
fn execute_again() -> anyhow::Result<ExitCode> {
    const SELF: &str = "/proc/self/exe";
    // By file name if it still exists: it names the process.
    let name = std::fs::read_link(SELF).ok().filter(|path| path.exists());
    let mut arguments = std::env::args_os();
    let mut command = Command::new(name.as_deref().unwrap_or(Path::new(SELF)));
    if let Some(first) = arguments.next() {
        command.arg0(first);
    }
    command.args(arguments);
    if stops() {
        return Ok(ExitCode::SUCCESS);
    }
    Err(command.exec()).context("restart in place for other pools; the agent must be started again")
}

fn run(mut config: AgentConfig, mut ipam: Ipam) -> anyhow::Result<End> {
    keep_others_from_writing();
    allow_all_files().context("raise the limit of open files")?;
    // Capabilities are per thread: before the first other thread, and the allocator's is recreated.
    let lacks = match config.delegate {
        Some(_) => capabilities::keep_delegated()?,
        None => capabilities::keep_needed()?,
    };
    memory::renew_thread().context("make the allocator's thread anew")?;
    let huge_pages = memory::refuse_huge_pages();
    let log = telemetry::init(&config.log_level, config.log_format)?;
    if let Err(error) = huge_pages {
        tracing::warn!(
            "refuse huge pages: {error}; the agent may keep more memory than the page \"Sizing\" of the documentation says"
        );
    }
    if !lacks.is_empty() {
        tracing::warn!(
            "the agent lacks {}; the page \"Security\" of the documentation says what fails without",
            lacks.join(", ")
        );
    }
    if config.delegate.is_none() {
        wharf_datapath::check_capabilities()?;
        check_pools(&mut config, &mut ipam)?;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2) // requests are short; kernel calls run on blocking threads
        .max_blocking_threads(64)
        .enable_all()
        .build()
        .context("start the runtime")?;
    let result = match config.delegate.clone() {
        Some(service) => runtime.block_on(delegate::agent(config, &service, log)).map(|()| End::Stopped),
        None => runtime.block_on(agent(config, ipam, log)),
    };
    runtime.shutdown_timeout(Duration::from_secs(5));
    result
}

#[cfg(test)]
mod tests {
    use nix::sys::signal::raise;
    use tokio::signal::unix::{SignalKind, signal};

    use super::*;

    #[tokio::test]
    async fn a_signal_is_noted_also_without_a_runtime() {
        note_signals().expect("handlers");
        let mut terminate = signal(SignalKind::terminate()).expect("tokio's handler");
        assert!(!stops());
        raise(Signal::SIGTERM).expect("raised");
        terminate.recv().await.expect("reported");
        assert!(stops());
    }
}
