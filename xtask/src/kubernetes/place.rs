//! Namespaces of the run, for commands and daemons.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Write},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use crate::{privilege::Privilege, progress::describe};

const KEEPER: &str = include_str!("keeper.sh");

const PAUSE: Duration = Duration::from_millis(100);

/// Mount and PID namespaces of the run. Processes, mounts and named network namespaces end with it, even if this
/// process is killed.
#[derive(Debug)]
pub(crate) struct Space {
    keeper: Child,
    /// `None` once closed.
    input: Option<ChildStdin>,
    pub(crate) cgroups: String,
    root: Place,
}

impl Space {
    pub(crate) fn open(privilege: &Privilege) -> Result<Self> {
        let cgroups = format!("wharf-kubernetes-{}", std::process::id());
        let mut command = privilege.command(Path::new("sh"), &[]);
        command.args(["-c", KEEPER, "keeper", &cgroups]).stdin(Stdio::piped()).stdout(Stdio::piped());
        // Ctrl-C signals only this process; the keeper cleans up.
        let mut keeper = command.process_group(0).spawn().context("start the keeper of the namespaces")?;
        let (input, output) = (keeper.stdin.take(), keeper.stdout.take());
        let mut line = String::new();
        if let Some(output) = output {
            BufReader::new(output).read_line(&mut line).context("read the keeper's process id")?;
        }
        let Ok(pid) = line.trim().parse::<u32>() else {
            bail!("make the namespaces: unshare or mount failed (it needs root)");
        };
        let enter = ["nsenter", "--target", &pid.to_string(), "--mount", "--pid", "--wd", "--"].map(str::to_owned);
        let root = Place { privilege: privilege.clone(), enter: enter.to_vec(), daemon: Vec::new() };
        Ok(Self { keeper, input, cgroups, root })
    }

    /// Has no network.
    pub(crate) fn root(&self) -> &Place {
        &self.root
    }

    /// The network namespace is made by `network.sh`.
    pub(crate) fn in_network(&self, name: &str) -> Place {
        let mut place = self.root.clone();
        place.enter.extend(["nsenter".to_owned(), format!("--net=/run/netns/{name}"), "--".to_owned()]);
        place
    }

    /// Ends all processes, and waits for it.
    pub(crate) fn close(mut self) -> Result<()> {
        drop(self.input.take());
        let status = self.keeper.wait().context("wait for the keeper of the namespaces")?;
        if !status.success() {
            bail!("clean up: the keeper of the namespaces failed ({status})");
        }
        Ok(())
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Place {
    privilege: Privilege,
    enter: Vec<String>,
    /// Command line before daemons.
    daemon: Vec<String>,
}

impl Place {
    /// Namespaces and root directory of a process in this run.
    pub(crate) fn of_process(&self, pid: u32, daemon: Vec<String>) -> Self {
        let pid = pid.to_string();
        let namespaces = ["--mount", "--net", "--uts", "--cgroup", "--pid", "--root", "--wd", "--"];
        let mut enter = vec!["nsenter".to_owned(), "--target".to_owned(), pid];
        enter.extend(namespaces.map(str::to_owned));
        Self { privilege: self.privilege.clone(), enter, daemon }
    }

    pub(crate) fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut words = self.enter.iter();
        let mut command = self.privilege.command(Path::new(words.next().map_or("nsenter", String::as_str)), &[]);
        command.args(words).arg(program.as_ref()).stdin(Stdio::null());
        command
    }

    pub(crate) fn output(&self, program: impl AsRef<Path>, arguments: &[&str]) -> Result<String> {
        said(self.command(program).args(arguments))
    }

    /// Starts a program until [`Place::signal`]; appends output to `log`.
    pub(crate) fn start(&self, name: &str, log: &Path, program: &Path, arguments: &[String]) -> Result<()> {
        let mut enter = self.enter.clone();
        // Joins the machine's cgroups first: they are invisible inside.
        enter.splice(0..0, self.daemon.iter().cloned());
        let mut words = enter.iter();
        let mut command = self.privilege.command(Path::new(words.next().map_or("nsenter", String::as_str)), &[]);
        let file = File::options().create(true).append(true).open(log);
        let file = file.with_context(|| format!("open {}", log.display()))?;
        let second = file.try_clone().context("open a log twice")?;
        command.args(words).args(["sh", "-c", "echo $$ >\"/run/$0.pid\"; exec \"$@\"", name]);
        command.arg(program).args(arguments).process_group(0).stdin(Stdio::null()).stdout(file).stderr(second);
        let mut child = command.spawn().with_context(|| format!("start {name}"))?;
        thread::spawn(move || child.wait());
        Ok(())
    }

    /// Ignores an ended daemon.
    pub(crate) fn signal(&self, name: &str, signal: &str) -> Result<()> {
        let script = "pid=$(cat \"/run/$0.pid\") && kill -s \"$1\" \"$pid\" 2>/dev/null; true";
        self.output("sh", &["-c", script, name, signal]).map(drop)
    }

    pub(crate) fn is_running(&self, name: &str) -> bool {
        self.output("sh", &["-c", "kill -s 0 \"$(cat \"/run/$0.pid\")\"", name]).is_ok()
    }

    /// By SIGTERM, after 20 s by SIGKILL.
    pub(crate) fn stop(&self, name: &str) -> Result<()> {
        self.signal(name, "TERM")?;
        if until(&format!("{name} ends"), Duration::from_secs(20), || Ok((!self.is_running(name)).then_some(())))
            .is_err()
        {
            self.kill(name)?;
        }
        Ok(())
    }

    pub(crate) fn kill(&self, name: &str) -> Result<()> {
        self.signal(name, "KILL")?;
        until(&format!("{name} ends"), Duration::from_secs(10), || Ok((!self.is_running(name)).then_some(())))
    }
}

/// Standard output; fails with the command.
pub(crate) fn said(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("start `{}`", brief(command)))?;
    checked(command, &output)
}

/// [`said`] with standard input.
pub(crate) fn said_with(command: &mut Command, input: &[u8]) -> Result<String> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("start `{}`", brief(command)))?;
    if let Some(mut pipe) = child.stdin.take() {
        // A program that fails early reads nothing; its status has the reason.
        drop(pipe.write_all(input));
    }
    let output = child.wait_with_output().with_context(|| format!("wait for `{}`", brief(command)))?;
    checked(command, &output)
}

fn checked(command: &Command, output: &Output) -> Result<String> {
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        bail!("`{}` failed ({}): {}", brief(command), output.status, error.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Omits the words that enter namespaces.
fn brief(command: &Command) -> String {
    let whole = describe(command);
    whole.rsplit_once(" -- ").map_or(whole.clone(), |(_, own)| own.to_owned())
}

/// Waits for a value of `look`; a failure includes its last error.
pub(crate) fn until<T>(what: &str, limit: Duration, mut look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let started = Instant::now();
    loop {
        let result = look();
        if let Ok(Some(value)) = result {
            return Ok(value);
        }
        if started.elapsed() > limit {
            let reason = result.err().map(|error| format!(": {error:#}")).unwrap_or_default();
            bail!("{what}: not within {} s{reason}", limit.as_secs());
        }
        thread::sleep(PAUSE);
    }
}

/// As [`until`]; `look` returns the remaining differences.
pub(crate) fn until_right(
    what: &str,
    limit: Duration,
    mut look: impl FnMut() -> Result<Vec<String>>,
) -> Result<Duration> {
    let started = Instant::now();
    until(what, limit, || {
        let wrong = look()?;
        if wrong.is_empty() { Ok(Some(started.elapsed())) } else { bail!("{}", wrong.join("; ")) }
    })
}

pub(crate) fn make_directory(path: &Path) -> Result<PathBuf> {
    fs::create_dir_all(path).with_context(|| format!("create {}", path.display()))?;
    Ok(path.to_owned())
}
