//! `wharf sandbox ...`, with `wharf_sandbox` on a separate thread.

use std::{
    ffi::OsString,
    io::{self, IsTerminal as _},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};
use wharf_sandbox::{
    Handle, Launch, Output as To, Progress, Removed, Resizer, SandboxError, SandboxName, Sandboxes, Spec, Stopped,
    Terminal,
};

use super::QUIET;
use crate::{
    args::{CreateArgs, ExecArgs, GraceArgs, Labels, RunArgs, SandboxArgs, SandboxCommand},
    error::{CliError, Exit},
    output::{Output, remark},
    render::{
        sandbox::{created, list},
        text::{escape_in_json, safe},
    },
};

/// Interval of lines about a running plugin.
const BETWEEN_LINES: Duration = Duration::from_secs(5);

/// Status of `run` without a sandbox, as in other runtimes.
const NO_SANDBOX: u8 = 125;

#[derive(Debug, Serialize)]
struct Done {
    name: SandboxName,
    outcome: &'static str,
    #[serde(skip)]
    told: &'static str,
}

#[derive(Clone)]
struct Worker {
    sandboxes: Arc<Sandboxes>,
    step: Arc<Mutex<Option<(String, Instant)>>>,
}

impl Worker {
    fn new(args: &SandboxArgs) -> Self {
        let step = Arc::new(Mutex::new(None));
        let told = Arc::clone(&step);
        let printed = Mutex::new(None::<Instant>);
        let tell = move |progress: Progress<'_>| match progress {
            Progress::Step(text) => {
                *told.lock().unwrap_or_else(PoisonError::into_inner) = Some((text.to_owned(), Instant::now()));
            }
            Progress::Said(line) => {
                let mut printed = printed.lock().unwrap_or_else(PoisonError::into_inner);
                if printed.is_none_or(|at| at.elapsed() >= BETWEEN_LINES) {
                    *printed = Some(Instant::now());
                    remark(&format!("wharf: {}", safe(line)));
                }
            }
        };
        let no_wait = match &args.command {
            SandboxCommand::Create { wait, .. }
            | SandboxCommand::Start { wait, .. }
            | SandboxCommand::Run(RunArgs { wait, .. }) => wait.no_wait,
            _ => false,
        };
        Self { sandboxes: Arc::new(Sandboxes::new(args.places.dirs(), tell).no_wait(no_wait)), step }
    }

    /// Prints steps longer than [`QUIET`].
    async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Sandboxes) -> Result<T, SandboxError> + Send + 'static,
    ) -> Result<T, CliError> {
        let sandboxes = Arc::clone(&self.sandboxes);
        let mut work = tokio::task::spawn_blocking(move || work(&sandboxes));
        loop {
            tokio::select! {
                biased;
                done = &mut work => {
                    return match done {
                        Ok(result) => result.map_err(CliError::from),
                        Err(e) => Err(CliError::refused(format!("sandbox: {e}"))),
                    };
                }
                () = tokio::time::sleep(QUIET / 4) => self.tell(),
            }
        }
    }

    fn tell(&self) {
        let mut step = self.step.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((text, _)) = step.take_if(|(_, since)| since.elapsed() >= QUIET) {
            remark(&format!("wharf: {}", safe(&text)));
        }
    }
}

pub(super) async fn run(out: &Output, args: SandboxArgs) -> Result<Exit, CliError> {
    let worker = Worker::new(&args);
    match args.command {
        SandboxCommand::Create { name, wishes, wait: _ } => {
            let spec = spec(wishes)?;
            let made = worker.run(move |s| s.create(&name, &spec)).await?;
            out.emit(&made, |_| created(&made))?;
            Ok(Exit::Ok)
        }
        SandboxCommand::Start { names, wait: _ } => each(out, &worker, names, start).await,
        SandboxCommand::Exec(args) => exec(&worker, args).await,
        SandboxCommand::Run(args) => command(out, &worker, args).await,
        SandboxCommand::List => {
            let all = worker.run(Sandboxes::list).await?;
            out.emit(&all, |style| list(&all, style))?;
            Ok(Exit::Ok)
        }
        SandboxCommand::Inspect { name, check } => {
            let details = worker.run(move |s| s.inspect(&name, check)).await?;
            let text = serde_json::to_string_pretty(&details).unwrap_or_default();
            out.emit(&details, |_| escape_in_json(&text) + "\n")?;
            Ok(Exit::well(details.is_well()))
        }
        SandboxCommand::Stop { names, grace } => each(out, &worker, names, move |s, name| stop(s, name, grace)).await,
        SandboxCommand::Rm { names, force, grace } => {
            each(out, &worker, names, move |s, name| remove(s, name, grace, force)).await
        }
    }
}

fn spec(wishes: CreateArgs) -> Result<Spec, CliError> {
    let CreateArgs { networks, labels, ports, ips, mac } = wishes;
    let labels = Labels::by_key(labels, "a sandbox", "cni")?;
    Ok(Spec { networks, labels, ports, ips, mac })
}

fn start(sandboxes: &Sandboxes, name: SandboxName) -> Result<Done, SandboxError> {
    let (outcome, told) = match sandboxes.start(&name)? {
        Some(_) => ("started", "started"),
        None => ("already-ready", "was ready already"),
    };
    Ok(Done { name, outcome, told })
}

fn stop(sandboxes: &Sandboxes, name: SandboxName, grace: GraceArgs) -> Result<Done, SandboxError> {
    let (outcome, told) = match sandboxes.stop(&name, grace.grace)? {
        Stopped::Now => ("stopped", "stopped"),
        Stopped::Replaced => ("stopped", "stopped; another network namespace has its name, and was left alone"),
        Stopped::Before => ("already-stopped", "was stopped already"),
        Stopped::Unknown => ("unknown", "no sandbox has this name; nothing to stop"),
    };
    Ok(Done { name, outcome, told })
}

fn remove(sandboxes: &Sandboxes, name: SandboxName, grace: GraceArgs, force: bool) -> Result<Done, SandboxError> {
    let (outcome, told) = match sandboxes.remove(&name, grace.grace, force)? {
        Removed::Now => ("removed", "removed"),
        Removed::RecordAlone => {
            ("record-removed", "its record is removed; its namespace and networks were not touched")
        }
        Removed::Unknown => ("unknown", "no sandbox has this name; nothing to remove"),
    };
    Ok(Done { name, outcome, told })
}

/// Continues after failures.
async fn each(
    out: &Output,
    worker: &Worker,
    names: Vec<SandboxName>,
    act: impl Fn(&Sandboxes, SandboxName) -> Result<Done, SandboxError> + Clone + Send + 'static,
) -> Result<Exit, CliError> {
    let (mut done, mut well) = (Vec::new(), true);
    for name in names {
        let act = act.clone();
        match worker.run(move |s| act(s, name)).await {
            Ok(one) => done.push(one),
            Err(error) => {
                remark(&error.to_string());
                well = false;
            }
        }
    }
    out.emit(&done, |_| done.iter().map(|d| format!("{}: {}\n", d.name, d.told)).collect())?;
    Ok(Exit::well(well))
}

async fn command(out: &Output, worker: &Worker, args: RunArgs) -> Result<Exit, CliError> {
    let RunArgs { name, wishes, wait: _, rm, detach, log, command } = args;
    let spec = spec(wishes)?;
    let launch = launch(command, if detach { To::Detached(log) } else { To::Inherited })?;
    let of = name.clone();
    let made = worker.run(move |s| ensure(s, &of, &spec)).await.map_err(no_sandbox)?;
    // Signals are forwarded from here.
    let signals = if detach { None } else { Some(Signals::new().map_err(|e| refused("run", &e))?) };
    let of = name.clone();
    let started = worker.run(move |s| Ok(s.launch(&of, &launch))).await.map_err(no_sandbox)?;
    let ended = match started {
        Err(error) => Err(not_started(error)),
        Ok(started) => match signals {
            None => {
                let pid = started.pid();
                out.emit(&std::collections::BTreeMap::from([("pid", pid)]), |_| format!("{pid}\n"))?;
                return Ok(Exit::Ok);
            }
            Some(signals) => {
                let handle = started.handle().map_err(not_awaited)?;
                // On a terminal, the command gets interrupts from its process group.
                let is_alone = !io::stdin().is_terminal();
                signals.wait(&handle, is_alone, None, move || started.wait()).await.map(Exit::Command)
            }
        },
    };
    if rm && made {
        worker.run(move |s| s.remove(&name, GRACE, false)).await.map_err(no_sandbox)?;
    }
    ended
}

async fn exec(worker: &Worker, args: ExecArgs) -> Result<Exit, CliError> {
    let ExecArgs { name, stdin, tty, command } = args;
    let terminal = tty.then(Terminal::open).transpose().map_err(|e| refused("make a terminal", &e))?;
    let output = match &terminal {
        Some(terminal) => To::Terminal(terminal.command_end()),
        None if stdin => To::Inherited,
        None => To::NoInput,
    };
    let launch = launch(command, output)?;
    let signals = Signals::new().map_err(|e| refused("run", &e))?;
    let started = worker.run(move |s| Ok(s.launch(&name, &launch))).await.map_err(no_sandbox)?.map_err(not_started)?;
    let Some(terminal) = terminal else {
        let handle = started.handle().map_err(not_awaited)?;
        let is_alone = !io::stdin().is_terminal();
        return signals.wait(&handle, is_alone, None, move || started.wait()).await.map(Exit::Command);
    };
    let session = terminal.join(started, stdin).map_err(not_awaited)?;
    let (handle, resizer) = (session.handle().map_err(not_awaited)?, session.resizer());
    signals.wait(&handle, true, Some(&resizer), move || session.run()).await.map(Exit::Command)
}

fn launch(command: Vec<OsString>, output: To) -> Result<Launch, CliError> {
    let mut words = command.into_iter();
    let no_program = || CliError::usage("run in a sandbox: the command is empty; name a program behind `--`");
    let program = words.next().filter(|program| !program.is_empty()).ok_or_else(no_program)?;
    Ok(Launch { program, arguments: words.collect(), output })
}

fn refused(operation: &str, error: &io::Error) -> CliError {
    no_sandbox(CliError::refused(format!("{operation}: {error}")))
}

fn not_started(error: SandboxError) -> CliError {
    CliError { exit: Exit::Command(error.start_status().unwrap_or(NO_SANDBOX)), ..CliError::from(error) }
}

fn not_awaited(error: io::Error) -> CliError {
    refused("wait for the command", &error)
}

/// Between SIGTERM and SIGKILL, for remaining processes of `run --rm`.
const GRACE: Duration = Duration::from_secs(10);

/// True when this call created the sandbox.
fn ensure(sandboxes: &Sandboxes, name: &SandboxName, spec: &Spec) -> Result<bool, SandboxError> {
    if sandboxes.exists(name) && spec.is_empty() {
        return Ok(false);
    }
    match sandboxes.create(name, spec) {
        Ok(_) => Ok(true),
        // Created by another command meanwhile.
        Err(SandboxError::Exists { .. }) if spec.is_empty() => Ok(false),
        Err(error) => Err(error),
    }
}

fn no_sandbox(error: CliError) -> CliError {
    CliError { exit: Exit::Command(NO_SANDBOX), ..error }
}

struct Signals {
    terminate: tokio::signal::unix::Signal,
    hangup: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    quit: tokio::signal::unix::Signal,
    resize: tokio::signal::unix::Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
            interrupt: signal(SignalKind::interrupt())?,
            quit: signal(SignalKind::quit())?,
            resize: signal(SignalKind::window_change())?,
        })
    }

    /// Forwards interrupts unless the terminal sends them.
    async fn wait(
        mut self,
        handle: &Handle,
        passes_interrupts: bool,
        resizer: Option<&Resizer>,
        wait: impl FnOnce() -> io::Result<u8> + Send + 'static,
    ) -> Result<u8, CliError> {
        let mut wait = tokio::task::spawn_blocking(wait);
        loop {
            let number = tokio::select! {
                ended = &mut wait => {
                    let status = ended.map_err(io::Error::other).and_then(|status| status);
                    return status.map_err(not_awaited);
                }
                _ = self.terminate.recv() => SignalKind::terminate(),
                _ = self.hangup.recv() => SignalKind::hangup(),
                _ = self.interrupt.recv() => if passes_interrupts { SignalKind::interrupt() } else { continue },
                _ = self.quit.recv() => if passes_interrupts { SignalKind::quit() } else { continue },
                _ = self.resize.recv() => {
                    // Fails on a hung-up terminal; `wait` then ends.
                    let _ = resizer.map(Resizer::resize);
                    continue;
                }
            };
            handle.signal(number.as_raw_value()).map_err(not_awaited)?;
        }
    }
}
