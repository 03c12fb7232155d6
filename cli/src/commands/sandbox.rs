//! `wharf sandbox ...`. The work is done by `wharf_sandbox`, on a thread of its own.

use std::{
    io::{self, IsTerminal as _},
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};
use wharf_sandbox::{Launch, Output as To, Removed, SandboxError, SandboxName, Sandboxes, Spec, Started, Stopped};

use super::QUIET;
use crate::{
    args::{CreateArgs, GraceArgs, Label, RunArgs, SandboxArgs, SandboxCommand},
    error::{CliError, Exit},
    output::{Output, remark},
    render::{
        sandbox::{created, list},
        text::{escape_in_json, safe},
    },
};

/// Exit status when there is no sandbox for the command of `run`, as other runtimes have it.
const NO_SANDBOX: u8 = 125;

/// What became of one of several sandboxes.
#[derive(Debug, Serialize)]
struct Done {
    name: SandboxName,
    outcome: &'static str,
    #[serde(skip)]
    told: &'static str,
}

/// The sandboxes, and the step that their thread is at.
#[derive(Clone)]
struct Worker {
    sandboxes: Arc<Sandboxes>,
    step: Arc<Mutex<Option<(String, Instant)>>>,
}

impl Worker {
    fn new(args: &SandboxArgs) -> Self {
        let step = Arc::new(Mutex::new(None));
        let told = Arc::clone(&step);
        let tell = move |text: &str| {
            *told.lock().unwrap_or_else(PoisonError::into_inner) = Some((text.to_owned(), Instant::now()));
        };
        Self { sandboxes: Arc::new(Sandboxes::new(args.places.dirs(), tell)), step }
    }

    /// Does the work; a step that takes longer than [`QUIET`] is told.
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
        SandboxCommand::Create { name, wishes } => {
            let spec = spec(wishes)?;
            let made = worker.run(move |s| s.create(&name, &spec)).await?;
            out.emit(&made, |_| created(&made))?;
            Ok(Exit::Ok)
        }
        SandboxCommand::Run(args) => command(out, &worker, args).await,
        SandboxCommand::List => {
            let all = worker.run(Sandboxes::list).await?;
            out.emit(&all, |style| list(&all, style))?;
            Ok(Exit::Ok)
        }
        SandboxCommand::Inspect { name, check } => {
            let details = worker.run(move |s| s.inspect(&name, check)).await?;
            // There is no table of it.
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
    let labels = Label::by_key(labels)
        .map_err(|key| CliError::usage(format!("create a sandbox: label {key} is there twice")))?;
    Ok(Spec { networks, labels, ports, ips, mac })
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

/// One after the other; a failure does not keep the rest from being done.
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
    let RunArgs { name, wishes, rm, detach, log, command } = args;
    let spec = spec(wishes)?;
    let mut words = command.into_iter();
    let no_program = || CliError::usage("run in a sandbox: the command is empty; name a program behind `--`");
    let program = words.next().filter(|program| !program.is_empty()).ok_or_else(no_program)?;
    let output = if detach { To::Detached(log) } else { To::Inherited };
    let launch = Launch { program, arguments: words.collect(), output };
    let of = name.clone();
    let made = worker.run(move |s| ensure(s, &of, &spec)).await.map_err(no_sandbox)?;
    // From here on a signal does not end this process, so that it can hand it on and clean up.
    let signals = if detach { None } else { Some(Signals::new().map_err(|e| CliError::refused(format!("run: {e}")))?) };
    let of = name.clone();
    let started = worker.run(move |s| Ok(s.start(&of, &launch))).await.map_err(no_sandbox)?;
    let ended = match started {
        Err(error) => {
            Err(CliError { exit: Exit::Command(error.start_status().unwrap_or(NO_SANDBOX)), ..CliError::from(error) })
        }
        Ok(started) => match signals {
            None => {
                let pid = started.pid();
                out.emit(&std::collections::BTreeMap::from([("pid", pid)]), |_| format!("{pid}\n"))?;
                return Ok(Exit::Ok);
            }
            Some(signals) => signals.wait(started).await.map(Exit::Command),
        },
    };
    if rm && made {
        worker.run(move |s| s.remove(&name, GRACE, false)).await.map_err(no_sandbox)?;
    }
    ended
}

/// Time between SIGTERM and SIGKILL for what a command of `run --rm` left behind.
const GRACE: std::time::Duration = std::time::Duration::from_secs(10);

/// Makes the sandbox if it is not there; true when it was made now.
fn ensure(sandboxes: &Sandboxes, name: &SandboxName, spec: &Spec) -> Result<bool, SandboxError> {
    if sandboxes.exists(name) && spec.is_empty() {
        return Ok(false);
    }
    match sandboxes.create(name, spec) {
        Ok(_) => Ok(true),
        // Another command made it meanwhile.
        Err(SandboxError::Exists { .. }) if spec.is_empty() => Ok(false),
        Err(error) => Err(error),
    }
}

fn no_sandbox(error: CliError) -> CliError {
    CliError { exit: Exit::Command(NO_SANDBOX), ..error }
}

/// The signals that are handed on to the command.
struct Signals {
    terminate: tokio::signal::unix::Signal,
    hangup: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    quit: tokio::signal::unix::Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
            interrupt: signal(SignalKind::interrupt())?,
            quit: signal(SignalKind::quit())?,
        })
    }

    /// Waits for the command's end; its exit status.
    async fn wait(mut self, started: Started) -> Result<u8, CliError> {
        let failed = |e: io::Error| no_sandbox(CliError::refused(format!("wait for the command: {e}")));
        let handle = started.handle().map_err(failed)?;
        let mut wait = tokio::task::spawn_blocking(move || started.wait());
        // At a terminal the command gets these two itself: it is in the same group.
        let is_alone = !io::stdin().is_terminal();
        loop {
            let number = tokio::select! {
                ended = &mut wait => {
                    let status = ended.map_err(io::Error::other).and_then(|status| status);
                    return status.map_err(failed);
                }
                _ = self.terminate.recv() => SignalKind::terminate(),
                _ = self.hangup.recv() => SignalKind::hangup(),
                _ = self.interrupt.recv() => if is_alone { SignalKind::interrupt() } else { continue },
                _ = self.quit.recv() => if is_alone { SignalKind::quit() } else { continue },
            };
            handle.signal(number.as_raw_value()).map_err(failed)?;
        }
    }
}
