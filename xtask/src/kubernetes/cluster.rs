//! A running cluster.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{
    api::{Api, elements, text},
    control::Control,
    dns, images,
    network::{self, Host, SERVICES},
    node::{Node, Setup},
    pki::Pki,
    place::{Space, make_directory, said, until},
    programs::Programs,
};
use crate::{
    dist::ForCluster,
    privilege::Privilege,
    progress::{Step, spell},
    vm::apt::empty_directory,
    workspace::Workspace,
};

const LIMIT: Duration = Duration::from_secs(180);

pub(crate) const WHARF: &str = "wharf";

#[derive(Debug, Clone, Copy)]
pub(crate) struct Parts<'a> {
    pub(crate) workspace: &'a Workspace,
    pub(crate) privilege: &'a Privilege,
    pub(crate) programs: &'a Programs,
    pub(crate) wharf: &'a ForCluster,
    pub(crate) work: &'a Path,
    /// Kubernetes' own tests need a DNS server.
    pub(crate) e2e: bool,
}

#[derive(Debug)]
pub(crate) struct Cluster<'a> {
    pub(crate) parts: Parts<'a>,
    pub(crate) space: Space,
    pub(crate) control: Control,
    pub(crate) api: Api,
    pub(crate) nodes: Vec<Node>,
    pub(crate) pki: Pki,
    pub(crate) churn: Duration,
    pub(crate) logs: PathBuf,
    pub(crate) run: PathBuf,
}

impl<'a> Cluster<'a> {
    /// Starts control plane and nodes, without Wharf.
    pub(crate) fn start(step: &Step, parts: &Parts<'a>, nodes: u8, churn: Duration) -> Result<Self> {
        let started = Instant::now();
        let run = parts.work.join("run");
        // Root owns them.
        said(parts.privilege.command(Path::new("rm"), &[]).arg("-rf").arg("--").arg(&run))?;
        let (run, logs) = (make_directory(&run)?, parts.work.join("logs"));
        empty_directory(&logs)?;
        let hosts = network::hosts(nodes);
        let pki = Pki::make(run.join("pki"), &hosts)?;
        let archives = images::make(parts.programs, parts.wharf, &pki, &run)?;

        let space = Space::open(parts.privilege)?;
        network::make(&space, &hosts)?;
        let control = Control::new(&space, parts.programs, &pki, &run, &logs)?;
        let api = Api::new(control.place.clone(), parts.programs.path("kubectl"), pki.file("admin.conf"));
        let setup = Setup {
            space: &space,
            programs: parts.programs,
            pki: &pki,
            work: parts.work,
            logs: &logs,
            run: &run,
            release: &parts.workspace.release(),
        };
        control.start_all(&api)?;
        if parts.e2e {
            dns::start(&control.place, &api, &logs)?;
        }
        let nodes = hosts.iter().map(|host| node(&setup, host, &archives)).collect::<Result<Vec<_>>>()?;
        step.note(format!("up in {}", spell(started.elapsed())));
        Ok(Self { parts: *parts, space, control, api, nodes, pki, churn, logs, run })
    }

    pub(crate) fn install(&self) -> Result<Duration> {
        let started = Instant::now();
        self.api.run(&["apply", "--filename", &self.manifest()?])?;
        self.ready()?;
        Ok(started.elapsed())
    }

    /// Path of the manifest, with service addresses for egress policies.
    pub(crate) fn manifest(&self) -> Result<String> {
        const SETTING: &str = "    #service-cidr = [\"10.96.0.0/12\"]";
        let source = &self.parts.wharf.manifest;
        let text = fs::read_to_string(source).with_context(|| format!("read {}", source.display()))?;
        ensure!(text.contains(SETTING), "the manifest has no line `{}`", SETTING.trim());
        let setting = format!("    service-cidr = [\"{}\"]", SERVICES.join("\", \""));
        let path = self.run.join("wharf.yaml");
        fs::write(&path, text.replace(SETTING, &setting)).with_context(|| format!("write {}", path.display()))?;
        Ok(path.display().to_string())
    }

    /// Waits until Wharf runs and all nodes are ready without taints.
    pub(crate) fn ready(&self) -> Result<()> {
        self.api.rolled_out(WHARF, "daemonset/wharf", LIMIT)?;
        for node in &self.nodes {
            until(&format!("{} is ready", node.name()), LIMIT, || self.node_is_ready(node.name()).map(Some))?;
        }
        Ok(())
    }

    pub(crate) fn node_is_ready(&self, name: &str) -> Result<()> {
        let node = self.api.get(&["node", name])?;
        let condition = |kind: &str| {
            let list = elements(&node, "/status/conditions");
            let found = list.iter().find(|condition| text(condition, "/type") == kind);
            found.map(|found| format!("{}, {}", text(found, "/status"), text(found, "/reason"))).unwrap_or_default()
        };
        let taints: Vec<&str> = elements(&node, "/spec/taints").iter().map(|taint| text(taint, "/key")).collect();
        ensure!(condition("Ready").starts_with("True"), "Ready is {}", condition("Ready"));
        ensure!(taints.is_empty(), "it has the taints {}", taints.join(", "));
        let network = condition("NetworkUnavailable");
        ensure!(network == "False, WharfIsUp", "NetworkUnavailable is {network}");
        Ok(())
    }

    pub(crate) fn node(&self, name: &str) -> Result<&Node> {
        self.nodes.iter().find(|node| node.name() == name).with_context(|| format!("there is no node {name}"))
    }

    /// JSON output of Wharf's CLI on a node, for any exit status.
    pub(crate) fn wharf(&self, node: &Node, arguments: &[&str]) -> Result<Value> {
        let mut command = node.place.command(self.parts.workspace.release().join("wharf"));
        let output = command.args(["--output", "json"]).args(arguments).output().context("start wharf")?;
        serde_json::from_slice(&output.stdout).with_context(|| {
            format!("`wharf {}` on {}: {}", arguments.join(" "), node.name(), String::from_utf8_lossy(&output.stderr))
        })
    }

    pub(crate) fn pod_cidrs(&self, node: &str) -> Result<Vec<String>> {
        let node = self.api.get(&["node", node])?;
        let list = elements(&node, "/spec/podCIDRs").iter();
        Ok(list.filter_map(Value::as_str).map(str::to_owned).collect())
    }

    pub(crate) fn how_to_enter(&self) -> String {
        let command = self.api.command(&[]);
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let words: Vec<_> = words.map(|word| word.to_string_lossy().into_owned()).collect();
        let mut lines = vec![format!("kubectl: {}", words.join(" "))];
        for node in &self.nodes {
            let command = node.place.command("bash");
            let words = std::iter::once(command.get_program()).chain(command.get_args());
            let words: Vec<_> = words.map(|word| word.to_string_lossy().into_owned()).collect();
            lines.push(format!("{}: {}", node.name(), words.join(" ")));
        }
        lines.join("\n")
    }

    pub(crate) fn wait(&self) -> Result<()> {
        self.space.root().output("sleep", &["infinity"]).map(drop)
    }

    /// Ends everything and removes the nodes' files except logs.
    pub(crate) fn end(self) -> Result<()> {
        self.space.close()?;
        said(self.parts.privilege.command(Path::new("rm"), &[]).arg("-rf").arg("--").arg(&self.run))?;
        self.parts.privilege.give_back(&self.logs)
    }
}

fn node(setup: &Setup<'_>, host: &Host, archives: &[PathBuf]) -> Result<Node> {
    let node = Node::make(setup, host)?;
    for archive in archives {
        node.import(&setup.programs.ctr(), archive)?;
    }
    node.join()?;
    Ok(node)
}
