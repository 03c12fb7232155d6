//! The CNI plugins that are compared, each in a node namespace of its own.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::{
    Node, NodeConfig, Sandbox,
    process::{Finished, bin, run_from},
    scratch,
    space::Space,
    wait,
};

/// Where Debian puts the plugins of `containernetworking-plugins`.
const DEBIAN: &str = "/usr/lib/cni";
/// Where programs are that plugins run.
const SBIN: &str = "/usr/sbin:/usr/bin:/sbin:/bin";
/// Longest one call may take.
const LIMIT: Duration = Duration::from_secs(70);
/// What all plugins here can speak.
const CNI_VERSION: &str = "1.0.0";

/// Name of the plugin that ratios are taken to.
pub const PTP: &str = "ptp";
/// Name of Wharf's own.
pub const WHARF: &str = "wharf";

/// A plugin, its network configuration and its node.
#[derive(Debug)]
pub struct Plugin {
    name: &'static str,
    program: PathBuf,
    conf: Value,
    /// A plugin that runs behind it, as a list of plugins has it.
    then: Option<(PathBuf, Value)>,
    home: Home,
    sandboxes: PathBuf,
}

#[derive(Debug)]
enum Home {
    Agent(Box<Node>),
    Bare(Space),
}

impl Plugin {
    /// Wharf's.
    ///
    /// # Errors
    /// When the agent does not get ready.
    pub fn wharf(agent: &NodeConfig) -> Result<Self> {
        Self::wharf_as(WHARF, agent, &json!([]))
    }

    /// Wharf's under another name, with these published ports for every container.
    ///
    /// # Errors
    /// When the agent does not get ready.
    pub fn wharf_as(name: &'static str, agent: &NodeConfig, ports: &Value) -> Result<Self> {
        let node = Node::start(agent.clone())?;
        let conf = json!({"cniVersion": CNI_VERSION, "name": "bench", "type": "wharf-cni", "socket": node.dirs().socket(),
            "runtimeConfig": {"portMappings": ports}});
        let (program, sandboxes) = (bin("wharf-cni")?, node.dirs().root.join("netns"));
        Ok(Self { name, program, conf, then: None, home: Home::Agent(Box::new(node)), sandboxes })
    }

    /// Debian's `ptp` with `ipMasq`, and `portmap` behind it. `None` where `portmap` or iptables, which both need, is
    /// not there.
    ///
    /// # Errors
    /// When the package of `ptp` is not installed.
    pub fn ptp_and_portmap(name: &'static str, ports: &Value) -> Result<Option<Self>> {
        let portmap = Path::new(DEBIAN).join("portmap");
        if !portmap.is_file() || !is_installed("iptables") {
            return Ok(None);
        }
        let behind = json!({"cniVersion": CNI_VERSION, "name": "bench", "type": "portmap", "snat": true,
            "capabilities": {"portMappings": true}, "runtimeConfig": {"portMappings": ports}});
        let ptp = Self::debian(PTP, "10.203.0.0/16", json!({"type": "ptp", "ipMasq": true}))?;
        Ok(Some(Self { name, then: Some((portmap, behind)), ..ptp }))
    }

    /// Debian's `ptp`: a veth pair, a route, forwarding; no datapath of its own.
    ///
    /// # Errors
    /// When the package is not installed.
    pub fn ptp() -> Result<Self> {
        Self::debian(PTP, "10.201.0.0/16", json!({"type": "ptp", "ipMasq": false}))
    }

    /// Debian's `bridge`: a veth pair, one end in a Linux bridge that is the gateway.
    ///
    /// # Errors
    /// When the package is not installed.
    pub fn bridge() -> Result<Self> {
        let keys = json!({"type": "bridge", "bridge": "bench0", "isGateway": true, "ipMasq": false});
        Self::debian("bridge", "10.202.0.0/16", keys)
    }

    /// One with `host-local` IPAM, whose files are on the same tmpfs as the agent's.
    ///
    /// IPv4 only: with IPv6 these plugins wait a second and more for duplicate address detection, which would be no
    /// comparison.
    fn debian(name: &'static str, subnet: &str, mut conf: Value) -> Result<Self> {
        let program = Path::new(DEBIAN).join(name);
        ensure!(
            program.is_file(),
            "compare with {name}: {} is not there; install Debian's containernetworking-plugins",
            program.display()
        );
        let home = scratch::fresh_dir(name)?;
        let keys = conf.as_object_mut().context("a netconf is an object")?;
        keys.insert("cniVersion".into(), json!(CNI_VERSION));
        keys.insert("name".into(), json!("bench"));
        keys.insert(
            "ipam".into(),
            json!({
                "type": "host-local",
                "ranges": [[{"subnet": subnet}]],
                "routes": [{"dst": "0.0.0.0/0"}],
                "dataDir": home.join("leases"),
            }),
        );
        let sandboxes = home.join("netns");
        Ok(Self { name, program, conf, then: None, home: Home::Bare(Space::create()?), sandboxes })
    }

    /// All three, Wharf's first.
    ///
    /// # Errors
    /// Those of each.
    pub fn all(agent: &NodeConfig) -> Result<Vec<Self>> {
        let all = vec![Self::wharf(agent)?, Self::ptp()?, Self::bridge()?];
        for plugin in &all {
            plugin.warm_up().with_context(|| format!("warm {} up", plugin.name))?;
        }
        Ok(all)
    }

    /// Name in the tables.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The plugin's binary.
    #[must_use]
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// The agent's node, for Wharf's own plugin.
    #[must_use]
    pub fn node(&self) -> Option<&Node> {
        match &self.home {
            Home::Agent(node) => Some(node),
            Home::Bare(_) => None,
        }
    }

    /// The same, to stop its agent and start it again.
    #[must_use]
    pub fn node_mut(&mut self) -> Option<&mut Node> {
        match &mut self.home {
            Home::Agent(node) => Some(node),
            Home::Bare(_) => None,
        }
    }

    /// The node's namespace.
    #[must_use]
    pub fn space(&self) -> &Space {
        match &self.home {
            Home::Agent(node) => node.space(),
            Home::Bare(space) => space,
        }
    }

    /// Makes sandboxes; their names are unique for each `prefix`.
    ///
    /// # Errors
    /// When a name is taken.
    pub fn sandboxes(&self, prefix: &str, count: usize) -> Result<Vec<Sandbox>> {
        (0..count).map(|n| Sandbox::create(&self.sandboxes, &format!("{prefix}{n}"))).collect()
    }

    /// ADD of `eth0`: the time from before the start of the process until its end, and what it printed.
    ///
    /// # Errors
    /// When it fails.
    pub fn add(&self, sandbox: &Sandbox) -> Result<(Duration, Value)> {
        self.add_with(sandbox, &self.conf)
    }

    /// As [`Self::add`], for a container with the label `app`.
    ///
    /// # Errors
    /// When it fails.
    pub fn add_labelled(&self, sandbox: &Sandbox, app: &str) -> Result<(Duration, Value)> {
        self.add_with(sandbox, &with(&self.conf, "args", label(app))?)
    }

    fn add_with(&self, sandbox: &Sandbox, conf: &Value) -> Result<(Duration, Value)> {
        let finished = self.call(&self.program, "ADD", Some(sandbox), conf)?;
        let mut took = finished.took;
        let result: Value =
            serde_json::from_str(&finished.ok()?).with_context(|| format!("{}'s answer to ADD", self.name))?;
        if let Some((program, conf)) = &self.then {
            let finished = self.call(program, "ADD", Some(sandbox), &with(conf, "prevResult", result.clone())?)?;
            took += finished.took;
            finished.ok()?;
        }
        Ok((took, result))
    }

    /// DEL of `eth0`, given what ADD printed.
    ///
    /// # Errors
    /// When it fails.
    pub fn del(&self, sandbox: &Sandbox, added: &Value) -> Result<Duration> {
        let behind = self.then.iter().map(|(program, conf)| (program, conf));
        let mut took = Duration::ZERO;
        for (program, conf) in behind.chain([(&self.program, &self.conf)]) {
            let finished = self.call(program, "DEL", Some(sandbox), &with(conf, "prevResult", added.clone())?)?;
            took += finished.took;
            finished.ok()?;
        }
        Ok(took)
    }

    /// VERSION, which does nothing: the cost of starting the process.
    ///
    /// # Errors
    /// When it fails.
    pub fn version(&self) -> Result<Duration> {
        let finished = self.call(&self.program, "VERSION", None, &json!({"cniVersion": CNI_VERSION}))?;
        let took = finished.took;
        finished.ok()?;
        Ok(took)
    }

    /// Waits until the agent has as many programs ready as it wants, so that what it does in its own time is not in the
    /// next plugin's measurement, nor the last one's in its own.
    ///
    /// # Errors
    /// When that takes too long.
    pub fn settle(&self) -> Result<()> {
        self.node().map_or(Ok(()), settle)
    }

    /// One ADD and DEL that nobody counts: whatever is made once only is there afterwards.
    ///
    /// # Errors
    /// When one fails.
    pub fn warm_up(&self) -> Result<()> {
        for sandbox in &self.sandboxes("warm", 2)? {
            let (_, added) = self.add(sandbox)?;
            self.del(sandbox, &added)?;
        }
        self.settle()
    }

    fn call(&self, program: &Path, command: &str, sandbox: Option<&Sandbox>, conf: &Value) -> Result<Finished> {
        let mut process = Command::new(program);
        process.env_clear().env("CNI_COMMAND", command).env("CNI_PATH", DEBIAN).env("PATH", SBIN);
        if let Some(sandbox) = sandbox {
            process.env("CNI_CONTAINERID", sandbox.name()).env("CNI_NETNS", sandbox.path()).env("CNI_IFNAME", "eth0");
        }
        run_from(self.space(), process, conf.to_string().as_bytes(), LIMIT)
    }

    /// The end: Wharf's node must be clean.
    ///
    /// # Errors
    /// When something was left behind.
    pub fn finish(self) -> Result<()> {
        match self.home {
            Home::Agent(mut node) => node.finish(),
            Home::Bare(_) => Ok(()),
        }
    }
}

fn is_installed(program: &str) -> bool {
    SBIN.split(':').any(|dir| Path::new(dir).join(program).is_file())
}

/// A configuration with one more key.
fn with(conf: &Value, key: &str, value: Value) -> Result<Value> {
    let mut conf = conf.clone();
    conf.as_object_mut().context("a netconf is an object")?.insert(key.to_owned(), value);
    Ok(conf)
}

/// `args` of a configuration that gives a container the label `app`.
pub(super) fn label(app: &str) -> Value {
    json!({"cni": {"labels": [{"key": "app", "value": app}]}})
}

/// Waits until a node's agent has as many programs ready as it wants.
///
/// # Errors
/// When that takes too long.
pub fn settle(node: &Node) -> Result<()> {
    wait::until("programs ahead of need", || {
        let prepared = node.ask(async |client| client.status().await)?.prepared;
        Ok((prepared.ready >= prepared.target).then_some(()))
    })
}
