//! A machine for dpkg: this thread's own overlays over the directories that a package writes to, a package database of
//! its own, and a stand-in for systemd.
//!
//! What it does not model: systemd itself. `/usr/bin/systemctl` is a script that hands its arguments to the test, which
//! starts and stops the agent as the installed unit says (command, variables, capabilities, directories, readiness by
//! notification), and does nothing else that the unit says.

use std::{
    fs::{self, File, OpenOptions},
    io::{Read as _, Write as _},
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use nix::{
    mount::{MsFlags, mount},
    sys::stat::Mode,
    unistd::mkfifo,
};
use serde_json::{Value, json};
use wharf_tests::{
    Attached, NetConf, Sandbox,
    agent::{Agent, Dirs, read_log},
    process::{Finished, bounded, command_in, mode, run},
    scratch,
    space::Space,
    wait,
};

/// Longest one call of dpkg may take.
const LIMIT: Duration = Duration::from_secs(120);
/// Where the script meets the test.
const MEETING: &str = "/run/systemctl";
const SYSTEMCTL: &str = r#"#!/bin/sh
echo "$*" > /run/systemctl/asked || exit 1
read -r code text < /run/systemctl/answer || exit 1
[ -z "$text" ] || echo "$text"
exit "$code"
"#;
pub(crate) const UNIT: &str = "/usr/lib/systemd/system/wharf-agent.service";
const ENABLED: &str = "/etc/systemd/system/multi-user.target.wants/wharf-agent.service";
pub(crate) const CONFLIST: &str = "/etc/cni/net.d/10-wharf.conflist";

/// The machine. Its mounts end with the test's thread.
pub(crate) struct Machine {
    space: Space,
    dirs: Dirs,
    /// What differs from the real directories, one directory for each.
    changes: PathBuf,
    agent: Option<Agent>,
    asked: File,
    answer: File,
    /// What systemctl was asked for, but for questions.
    pub(crate) told: Vec<String>,
}

impl Machine {
    pub(crate) fn new() -> Result<Self> {
        let root = scratch::fresh_dir("machine")?;
        let changes = root.join("changes");
        for directory in ["/etc", "/usr", "/opt", "/var/lib"] {
            overlay(Path::new(directory), &changes).with_context(|| format!("cover {directory}"))?;
        }
        // The unit's and the runtimes' directories.
        for directory in ["/run", "/var/lib/dpkg", "/etc/dpkg/dpkg.cfg.d"] {
            if directory == "/var/lib/dpkg" || Path::new(directory).is_dir() {
                let known = (directory == "/var/lib/dpkg").then(needed_packages).transpose()?;
                mount(Some("wharf-test"), directory, Some("tmpfs"), MsFlags::empty(), Some("mode=0755"))
                    .with_context(|| format!("cover {directory}"))?;
                if let Some(known) = known {
                    fs::write("/var/lib/dpkg/status", known)?;
                    for name in ["info", "updates", "triggers", "alternatives", "parts"] {
                        fs::create_dir(Path::new(directory).join(name))?;
                    }
                }
            }
        }
        mount(Some("bpf"), "/sys/fs/bpf", Some("bpf"), MsFlags::empty(), Some("mode=0700"))
            .context("cover the bpffs")?;
        for directory in ["/run/systemd/system", MEETING] {
            fs::create_dir_all(directory).with_context(|| format!("create {directory}"))?;
        }
        // The overlay's alone: where there is none, none has to go; where tests run in a container, services may be
        // forbidden.
        for name in ["/usr/bin/systemctl", "/usr/sbin/policy-rc.d"] {
            fs::remove_file(name).ok();
        }
        fs::write("/usr/bin/systemctl", SYSTEMCTL)?;
        fs::set_permissions("/usr/bin/systemctl", fs::Permissions::from_mode(0o755))?;
        let fifo = |name: &str| -> Result<File> {
            let path = Path::new(MEETING).join(name);
            mkfifo(&path, Mode::S_IRWXU).with_context(|| format!("make {}", path.display()))?;
            // Open for both, neither end waits for the other.
            let mut options = OpenOptions::new();
            options.read(true).write(true).custom_flags(nix::fcntl::OFlag::O_NONBLOCK.bits());
            options.open(&path).with_context(|| format!("open {}", path.display()))
        };
        let (asked, answer) = (fifo("asked")?, fifo("answer")?);
        let dirs = Dirs {
            log: root.join("agent.log"),
            root,
            run: "/run/wharf".into(),
            state: "/var/lib/wharf".into(),
            bpffs: "/sys/fs/bpf".into(),
        };
        Ok(Self { space: Space::create()?, dirs, changes, agent: None, asked, answer, told: Vec::new() })
    }

    pub(crate) fn space(&self) -> &Space {
        &self.space
    }

    pub(crate) fn dirs(&self) -> &Dirs {
        &self.dirs
    }

    pub(crate) fn log(&self) -> String {
        read_log(&self.dirs)
    }

    /// Process id of the agent, while the service runs.
    pub(crate) fn agent(&self) -> Option<u32> {
        self.agent.as_ref().map(Agent::pid)
    }

    /// Runs dpkg, and serves its scripts' systemctl meanwhile.
    pub(crate) fn dpkg(&mut self, arguments: &[&str]) -> Result<Finished> {
        let mut command = command_in(&self.space, "dpkg")?;
        command.args(["--log=/run/dpkg.log", "--force-confold"]).args(arguments);
        command.env("DEBIAN_FRONTEND", "noninteractive").env("LC_ALL", "C");
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        thread::scope(|scope| {
            let running = scope.spawn(|| run(command, b"", LIMIT));
            while !running.is_finished() {
                self.serve()?;
                thread::sleep(Duration::from_millis(2));
            }
            running.join().map_err(|_| anyhow::anyhow!("the thread that runs dpkg panicked"))?
        })
    }

    fn serve(&mut self) -> Result<()> {
        let mut line = [0; 512];
        let Ok(length) = self.asked.read(&mut line) else { return Ok(()) };
        let text = String::from_utf8_lossy(line.get(..length).unwrap_or_default()).into_owned();
        let words: Vec<&str> = text.split_whitespace().filter(|word| !word.starts_with('-')).collect();
        let answer = match words.as_slice() {
            ["is-enabled", _] if Path::new(ENABLED).is_symlink() => "0 enabled".to_owned(),
            ["is-enabled", _] => "1 disabled".to_owned(),
            ["is-active", _] => format!("{} ", u8::from(self.agent.is_none()) * 3),
            [verb, ..] => {
                self.told.push((*verb).to_owned());
                match self.act(verb) {
                    Ok(()) => "0 ".to_owned(),
                    Err(error) => {
                        eprintln!("systemctl {verb}: {error:#}");
                        "1 ".to_owned()
                    }
                }
            }
            [] => "1 ".to_owned(),
        };
        writeln!(self.answer, "{answer}").context("answer systemctl")
    }

    fn act(&mut self, verb: &str) -> Result<()> {
        if ["stop", "restart"].contains(&verb)
            && let Some(agent) = self.agent.take()
        {
            let status = agent.stop()?;
            ensure!(status.success(), "the agent ended with {status}");
        }
        match verb {
            "start" | "restart" if self.agent.is_none() => self.start(),
            // Debian's default for a service that has no preset: enabled.
            "preset" => {
                fs::create_dir_all(Path::new(ENABLED).parent().context("a directory")?)?;
                Ok(symlink(UNIT, ENABLED)?)
            }
            "start" | "stop" | "daemon-reload" => Ok(()),
            _ => bail!("the stand-in does not know it"),
        }
    }

    /// As the unit says.
    fn start(&mut self) -> Result<()> {
        let unit = fs::read_to_string(UNIT).context("read the unit")?;
        let line = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).context("no ExecStart=")?;
        let mut words = line.split(' ').map(str::to_owned);
        let mut command = command_in(&self.space, words.next().context("no program")?)?;
        for (directory, setting) in [(&self.dirs.run, "RuntimeDirectoryMode"), (&self.dirs.state, "StateDirectoryMode")]
        {
            fs::create_dir_all(directory)?;
            fs::set_permissions(directory, fs::Permissions::from_mode(mode(&unit, setting)?))?;
        }
        let variables = unit.lines().filter_map(|line| line.strip_prefix("Environment=")?.split_once('='));
        command.envs(variables);
        bounded(&mut command, &unit)?;
        self.agent = Some(Agent::start(command, &self.dirs, &words.collect::<Vec<_>>())?);
        Ok(())
    }

    /// Runs the installed tool of the operator.
    pub(crate) fn wharf(&self, arguments: &[&str]) -> Result<Finished> {
        let mut command = command_in(&self.space, "/usr/bin/wharf")?;
        command.args(arguments).env("NO_COLOR", "1");
        run(command, b"", wait::PATIENCE)
    }

    /// CNI ADD by the installed plugin and network, as a runtime does it.
    pub(crate) fn attach(&self, sandbox: &Sandbox) -> Result<Attached> {
        let result = self.cni("ADD", sandbox)?.ok()?;
        Ok(Attached {
            container: sandbox.name().to_owned(),
            netns: sandbox.path().to_owned(),
            ifname: "eth0".to_owned(),
            conf: NetConf::new(&self.dirs.socket()),
            result: serde_json::from_str(&result).with_context(|| format!("ADD answered {result}"))?,
        })
    }

    /// One call of the installed plugin.
    pub(crate) fn cni(&self, verb: &str, sandbox: &Sandbox) -> Result<Finished> {
        let list: Value = serde_json::from_slice(&fs::read(CONFLIST)?).context("read the network")?;
        let mut conf = list["plugins"][0].clone();
        for key in ["cniVersion", "name"] {
            conf[key] = list[key].clone();
        }
        conf["runtimeConfig"] = json!({});
        let mut command = command_in(&self.space, "/opt/cni/bin/wharf-cni")?;
        command.env("CNI_COMMAND", verb).env("CNI_CONTAINERID", sandbox.name()).env("CNI_NETNS", sandbox.path());
        command.env("CNI_IFNAME", "eth0").env("CNI_PATH", "/opt/cni/bin");
        run(command, conf.to_string().as_bytes(), wait::PATIENCE)
    }

    /// Files of these directories that name Wharf, or hold its name: what differs from the real ones.
    pub(crate) fn traces(&self) -> Result<Vec<String>> {
        let mut found = Vec::new();
        let mut left = vec![self.changes.clone()];
        while let Some(directory) = left.pop() {
            for entry in fs::read_dir(&directory).with_context(|| format!("list {}", directory.display()))? {
                let (path, kind) = entry.and_then(|entry| Ok((entry.path(), entry.file_type()?)))?;
                let name = path.strip_prefix(&self.changes).unwrap_or(&path).display().to_string();
                // Backups of the account tools, and the stand-in.
                let is_backup = name.ends_with('-') || name.ends_with("bin/systemctl");
                let holds =
                    || fs::read(&path).is_ok_and(|bytes| bytes.windows(5).any(|w| w.eq_ignore_ascii_case(b"wharf")));
                if kind.is_dir() {
                    left.push(path);
                } else if !is_backup && kind.is_file() && (name.contains("wharf") || holds())
                    || kind.is_symlink() && name.contains("wharf")
                {
                    found.push(name);
                }
            }
        }
        Ok(found)
    }
}

/// Covers a directory with an overlay of itself.
fn overlay(directory: &Path, changes: &Path) -> Result<()> {
    let name = directory.to_string_lossy().trim_start_matches('/').replace('/', "-");
    let (upper, work) = (changes.join(&name).join("upper"), changes.with_file_name("work").join(&name));
    fs::create_dir_all(&upper)?;
    fs::create_dir_all(&work)?;
    let options = format!("lowerdir={},upperdir={},workdir={}", directory.display(), upper.display(), work.display());
    Ok(mount(Some("overlay"), directory, Some("overlay"), MsFlags::empty(), Some(options.as_str()))?)
}

/// What the package depends on, as this machine's own database has it.
fn needed_packages() -> Result<String> {
    let mut command = std::process::Command::new("dpkg-query");
    command.args(["--status", "passwd"]);
    run(command, b"", wait::PATIENCE)?.ok().context("these tests need Debian's dpkg")
}
