//! A node: a network namespace with an agent that serves it.

use std::{fs, os::unix::fs::PermissionsExt, path::PathBuf, process::Command, time::Duration};

use anyhow::{Context, Result, ensure};
use wharf_api::{
    AuditReport, EndpointFilter, MetricRow,
    client::{Client, ClientError},
};

use crate::{
    agent::{Agent, Dirs, read_log},
    attached::Attached,
    cni::{Call, NetConf},
    crash, http,
    process::{Finished, bin, bounded, command_in, crash_bin, next_abi, run},
    sandbox::Sandbox,
    scratch,
    space::Space,
    wait,
};

/// Longest the operator's CLI may take.
const CLI_LIMIT: Duration = Duration::from_secs(60);

/// How a node's agent is started.
#[derive(Debug, Clone)]
pub struct NodeConfig {
    /// Flags besides those that name the node's directories.
    pub flags: Vec<String>,
    /// Text of the file given as `--config`; no file when `None`.
    pub toml: Option<String>,
}

impl Default for NodeConfig {
    /// Few programs ahead of need: tests run side by side and each has few endpoints. No health endpoint: tests count
    /// endpoints, addresses and packets.
    fn default() -> Self {
        let flags = ["--node-name", "quay", "--prepared-programs", "4", "--health-interval-ms", "0"];
        Self { flags: flags.map(str::to_owned).to_vec(), toml: None }
    }
}

impl NodeConfig {
    /// Adds flags.
    #[must_use]
    pub fn flags(mut self, flags: &[&str]) -> Self {
        self.flags.extend(flags.iter().map(|f| (*f).to_owned()));
        self
    }

    /// Sets the configuration file's text.
    #[must_use]
    pub fn toml(mut self, text: &str) -> Self {
        self.toml = Some(text.to_owned());
        self
    }
}

/// Runs a scenario on a fresh node. Whatever the outcome nothing stays behind; when it fails, the agent's log is
/// printed; when it succeeds, the node must be clean ([`Node::finish`]).
///
/// # Errors
/// Those of the scenario, and of a node that is not clean after it.
pub fn scenario(config: NodeConfig, body: impl FnOnce(&mut Node) -> Result<()>) -> Result<()> {
    let mut node = Node::start(config)?;
    let outcome = body(&mut node).and_then(|()| node.finish());
    if outcome.is_err() {
        node.print_log();
    }
    node.told = true;
    outcome
}

/// A node namespace and the agent in it.
#[derive(Debug)]
pub struct Node {
    space: Space,
    dirs: Dirs,
    flags: Vec<String>,
    agent: Option<Agent>,
    next_version: bool,
    /// A systemd unit whose capabilities bound the agent's.
    unit: Option<String>,
    /// It made the namespace and the directories, and ends what lives in them.
    owner: bool,
    told: bool,
}

impl Node {
    /// Makes the namespace and the directories, and starts the agent.
    ///
    /// # Errors
    /// Without root, without the binaries, or when the agent does not get ready.
    pub fn start(config: NodeConfig) -> Result<Self> {
        let mut node = Self::without_agent(config)?;
        node.start_agent()?;
        Ok(node)
    }

    /// Makes the namespace and the directories only.
    ///
    /// # Errors
    /// Without root, or when the kernel refuses.
    pub fn without_agent(config: NodeConfig) -> Result<Self> {
        let dirs = Dirs::under(&scratch::fresh_dir("node")?);
        fs::create_dir(&dirs.run).context("create the run directory")?;
        fs::create_dir(&dirs.state).context("create the state directory")?;
        scratch::mount_bpffs(&dirs.bpffs)?;
        let mut flags = config.flags;
        if let Some(text) = config.toml {
            let path = dirs.root.join("agent.toml");
            fs::write(&path, text).context("write the configuration file")?;
            flags.extend(["--config".to_owned(), path.display().to_string()]);
        }
        Ok(Self {
            space: Space::create()?,
            dirs,
            flags,
            agent: None,
            next_version: false,
            unit: None,
            owner: true,
            told: false,
        })
    }

    /// Another value for the same namespace and directories, without an agent of its own: for threads that call the
    /// plugin while this one's agent comes and goes.
    ///
    /// # Errors
    /// When the namespace's descriptor cannot be copied.
    pub fn twin(&self) -> Result<Self> {
        let space = self.space.try_clone()?;
        // What fails is told by the node that has the agent.
        let (dirs, flags, next_version) = (self.dirs.clone(), self.flags.clone(), self.next_version);
        Ok(Self { space, dirs, flags, agent: None, next_version, unit: None, owner: false, told: true })
    }

    /// The node's network namespace.
    #[must_use]
    pub fn space(&self) -> &Space {
        &self.space
    }

    /// The node's directories.
    #[must_use]
    pub fn dirs(&self) -> &Dirs {
        &self.dirs
    }

    /// True from a start of the agent until it is stopped or killed.
    #[must_use]
    pub fn has_agent(&self) -> bool {
        self.agent.is_some()
    }

    /// Process id of the agent.
    ///
    /// # Errors
    /// When no agent runs.
    pub fn agent_pid(&self) -> Result<u32> {
        Ok(self.agent.as_ref().context("no agent runs")?.pid())
    }

    /// Starts the agent and waits until it is ready.
    ///
    /// # Errors
    /// When one runs already, or it does not get ready.
    pub fn start_agent(&mut self) -> Result<()> {
        ensure!(self.agent.is_none(), "an agent runs already");
        let mut command = self.agent_command(false)?;
        if let Some(unit) = &self.unit {
            bounded(&mut command, unit)?;
        }
        self.agent = Some(Agent::start(command, &self.dirs, &self.flags)?);
        Ok(())
    }

    /// From the next start on, the agent has the capabilities of this systemd unit alone, given as its text.
    pub fn set_unit(&mut self, unit: &str) {
        self.unit = Some(unit.to_owned());
    }

    /// From the next start on, the agent is the one of the next ABI version, or that of this one.
    pub fn set_next_version(&mut self, next: bool) {
        self.next_version = next;
    }

    /// The agent without arguments, with its crash points if it is `armed`.
    fn agent_command(&self, armed: bool) -> Result<Command> {
        let is_other = armed || self.next_version;
        let mut command = self.command(if is_other { crash_bin("wharf-agent") } else { bin("wharf-agent") }?)?;
        if armed {
            command.envs(crash::environment(&self.dirs));
        }
        if self.next_version {
            command.envs([next_abi()?]);
        }
        Ok(command)
    }

    /// From the next start on, the agent has this flag, or has it no more.
    pub fn set_flag(&mut self, flag: &str, on: bool) {
        self.flags.retain(|f| f != flag);
        if on {
            self.flags.push(flag.to_owned());
        }
    }

    /// Starts an agent with crash points and waits until it is ready; false when it was killed at one first.
    ///
    /// # Errors
    /// When one runs already, or it ends in another way.
    pub fn start_armed_agent(&mut self) -> Result<bool> {
        ensure!(self.agent.is_none(), "an agent runs already");
        self.agent = Agent::start_armed(self.agent_command(true)?, &self.dirs, &self.flags)?;
        Ok(self.agent.is_some())
    }

    /// Waits until the agent is killed at a crash point.
    ///
    /// # Errors
    /// When it is not.
    pub fn await_crash(&mut self) -> Result<()> {
        self.agent.take().context("no agent runs")?.await_crash()
    }

    /// Waits until the agent is killed at a crash point; false when it was not within `patience`, and was killed then.
    ///
    /// # Errors
    /// When it ends otherwise.
    pub fn await_crash_for(&mut self, patience: Duration) -> Result<bool> {
        self.agent.take().context("no agent runs")?.await_crash_for(patience)
    }

    /// Sends the agent a signal.
    ///
    /// # Errors
    /// When none runs.
    pub fn signal_agent(&self, signal: nix::sys::signal::Signal) -> Result<()> {
        self.agent.as_ref().context("no agent runs")?.signal(signal)
    }

    /// Ends the agent with SIGTERM; it must end with 0.
    ///
    /// # Errors
    /// When none runs, or it does not end well.
    pub fn stop_agent(&mut self) -> Result<()> {
        let status = self.agent.take().context("no agent runs")?.stop()?;
        ensure!(status.success(), "the agent ended with {status} after SIGTERM");
        Ok(())
    }

    /// Ends the agent with SIGKILL.
    ///
    /// # Errors
    /// When none runs.
    pub fn kill_agent(&mut self) -> Result<()> {
        self.agent.take().context("no agent runs")?.kill()
    }

    /// What the agent wrote so far, over all its starts.
    #[must_use]
    pub fn log(&self) -> String {
        read_log(&self.dirs)
    }

    fn print_log(&mut self) {
        self.told = true;
        eprintln!("---- log of the node's agent\n{}---- end of the log", self.log());
    }

    // ---- containers

    /// A new sandbox. Its name is its container id.
    ///
    /// # Errors
    /// When the name is taken.
    pub fn sandbox(&self, name: &str) -> Result<Sandbox> {
        Sandbox::create(&self.dirs.root.join("netns"), name)
    }

    /// A netconf for this node's agent.
    #[must_use]
    pub fn netconf(&self) -> NetConf {
        NetConf::new(&self.dirs.socket())
    }

    /// A call of the CNI plugin from this node.
    #[must_use]
    pub fn cni(&self, command: &str) -> Call<'_> {
        Call::new(&self.space, command)
    }

    /// CNI ADD of `eth0` with the plainest netconf.
    ///
    /// # Errors
    /// When ADD fails.
    pub fn attach(&self, sandbox: &Sandbox) -> Result<Attached> {
        self.attach_with(sandbox, "eth0", &self.netconf())
    }

    /// CNI ADD.
    ///
    /// # Errors
    /// When ADD fails.
    pub fn attach_with(&self, sandbox: &Sandbox, ifname: &str, conf: &NetConf) -> Result<Attached> {
        let answer = self.cni("ADD").of(sandbox.name(), sandbox.path(), ifname).conf(conf).run()?;
        Ok(Attached {
            container: sandbox.name().to_owned(),
            netns: sandbox.path().to_owned(),
            ifname: ifname.to_owned(),
            conf: conf.clone(),
            result: answer.result()?,
        })
    }

    /// CNI DEL, given what ADD answered.
    ///
    /// # Errors
    /// When DEL fails.
    pub fn detach(&self, attached: &Attached) -> Result<()> {
        let conf = attached.conf.clone().after(&attached.result);
        self.cni("DEL").of(&attached.container, &attached.netns, &attached.ifname).conf(&conf).run()?.silent()
    }

    /// CNI CHECK, given what ADD answered.
    ///
    /// # Errors
    /// When the plugin cannot be run.
    pub fn check(&self, attached: &Attached) -> Result<crate::cni::Answer> {
        let conf = attached.conf.clone().after(&attached.result);
        self.cni("CHECK").of(&attached.container, &attached.netns, &attached.ifname).conf(&conf).run()
    }

    // ---- the agent's interfaces

    /// Waits until every endpoint that a start took over is rebuilt.
    ///
    /// # Errors
    /// When it does not happen in time.
    pub fn await_rebuilt(&self) -> Result<()> {
        crate::wait::until("the endpoints are rebuilt", || {
            let all = self.endpoints()?;
            Ok(all.iter().all(|e| e.state == wharf_api::EndpointState::Ready).then_some(()))
        })
    }

    /// A client of the agent's API.
    #[must_use]
    pub fn client(&self) -> Client {
        Client::new(self.dirs.socket())
    }

    /// Asks the agent's API and waits for the answer.
    ///
    /// # Errors
    /// Those of the client; `ask`'s error is kept whole for `downcast_ref`.
    pub fn ask<T>(&self, ask: impl AsyncFnOnce(Client) -> Result<T, ClientError>) -> Result<T> {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().context("start a tokio runtime")?;
        Ok(runtime.block_on(ask(self.client()))?)
    }

    /// Every endpoint.
    ///
    /// # Errors
    /// When the agent does not answer.
    pub fn endpoints(&self) -> Result<Vec<wharf_api::Endpoint>> {
        self.ask(async |client| client.endpoints(&EndpointFilter::default()).await)
    }

    /// The endpoint of an attachment.
    ///
    /// # Errors
    /// When the agent does not know it.
    pub fn endpoint(&self, attached: &Attached) -> Result<wharf_api::Endpoint> {
        let id = attached.id();
        self.ask(async |client| client.endpoint(&id).await)
    }

    /// Packets an endpoint counted for a direction and reason (names as in `wharf bpf metrics list`).
    ///
    /// # Errors
    /// When the agent does not answer.
    pub fn packets(&self, endpoint: u16, direction: &str, reason: &str) -> Result<u64> {
        let rows: Vec<MetricRow> = self.ask(async |client| client.metrics_rows().await)?;
        let of = |r: &&MetricRow| r.endpoint == Some(endpoint) && r.direction == direction && r.reason == reason;
        Ok(rows.iter().find(of).map_or(0, |r| r.packets))
    }

    /// The agent's audit.
    ///
    /// # Errors
    /// When the agent does not answer.
    pub fn audit(&self) -> Result<AuditReport> {
        self.ask(async |client| client.audit(false).await)
    }

    /// One plain HTTP request to the agent.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn http(&self, method: &str, target: &str, body: Option<&str>) -> Result<http::Response> {
        http::request(&self.dirs.socket(), method, target, body)
    }

    /// Runs the operator's CLI against this node's agent.
    ///
    /// # Errors
    /// When it cannot be started or does not end.
    pub fn wharf(&self, arguments: &[&str]) -> Result<Finished> {
        run(self.wharf_command(arguments)?, b"", CLI_LIMIT)
    }

    /// The operator's CLI against this node's agent, to be run by the caller.
    ///
    /// # Errors
    /// When it was not built.
    pub fn wharf_command(&self, arguments: &[&str]) -> Result<Command> {
        let mut command = self.command(bin("wharf")?)?;
        command.arg("--socket").arg(self.dirs.socket()).args(arguments).env("NO_COLOR", "1");
        Ok(command)
    }

    /// A command that runs inside the node's namespace.
    ///
    /// # Errors
    /// When the namespace's descriptor cannot be copied.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Result<Command> {
        command_in(&self.space, program)
    }

    /// Runs the agent's binary to its end, with this node's directories: for starts that must fail.
    ///
    /// # Errors
    /// When it cannot be started, or does not end.
    pub fn run_agent_to_end(&self, flags: &[&str]) -> Result<Finished> {
        let mut command = self.agent_command(false)?;
        command.args(self.dirs.flags()).args(&self.flags).args(flags).env("NO_COLOR", "1");
        run(command, b"", wait::PATIENCE)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if self.owner {
            self.end_envoy();
        }
        if std::thread::panicking() && !self.told {
            self.print_log();
        }
    }
}

/// Makes a copy of a binary that any user may run.
///
/// # Errors
/// When it cannot be copied.
pub fn runnable_by_all(name: &str) -> Result<PathBuf> {
    let copy = scratch::fresh_dir("bin")?.join(name);
    fs::copy(bin(name)?, &copy).with_context(|| format!("copy {name}"))?;
    fs::set_permissions(&copy, fs::Permissions::from_mode(0o755)).with_context(|| format!("chmod {name}"))?;
    Ok(copy)
}
