//! containerd with its CRI, on a node of the test: the runtime that most kubelets have.
//!
//! Nothing on the machine is used but the programs: state, images, settings and the network configuration are the
//! test's own (see `jail`), and the image is made of the machine's busybox.

mod cri;
mod image;

use std::{
    ffi::OsString,
    fs::{self, OpenOptions},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::{
    agent::Dirs,
    crash, installed,
    jail::Jail,
    process::{bin, command_in, crash_bin},
    scratch,
    space::Space,
    wait,
};
pub use cri::{Cri, CriError, PodSandboxConfig, PortMapping};
use cri::{LinuxPodSandboxConfig, PodSandboxMetadata};
pub use image::IMAGE;

/// Longest a command beside the CRI may take.
const LIMIT: Duration = Duration::from_secs(50);
/// What must be on the machine: program, Debian package.
const NEEDS: [(&str, &str); 4] =
    [("containerd", "containerd"), ("ctr", "containerd"), ("runc", "runc"), ("busybox", "busybox-static")];
/// Where Debian puts the plugins of `containernetworking-plugins`.
const DEBIAN: &str = "/usr/lib/cni";
const SOCKET: &str = "/run/containerd/containerd.sock";

/// A network of a runtime class: pods of this handler get this list of plugins. Pods without a handler get the first
/// one's.
#[derive(Debug, Clone)]
pub struct Network {
    /// Name of the runtime class.
    pub handler: &'static str,
    pub list: Value,
}

/// containerd on a node. What it runs ends when this is dropped.
#[derive(Debug)]
pub struct Containerd {
    jail: Jail,
    dir: PathBuf,
    node: Space,
    cri: Arc<Cri>,
    daemon: Option<Child>,
    /// What the plugin's crash points need, in containerd's environment, which it hands on.
    crash: Vec<(&'static str, OsString)>,
}

/// A pod that runs.
#[derive(Debug, Clone)]
pub struct Pod {
    /// Its id, which is the CNI container id.
    pub id: String,
    /// As it was asked for.
    pub config: PodSandboxConfig,
    /// IPv4 address, as containerd read it out of the plugin's result.
    pub v4: Ipv4Addr,
    /// IPv6 address; none where the network gives none.
    pub v6: Option<Ipv6Addr>,
}

impl Pod {
    /// Both addresses.
    ///
    /// # Errors
    /// When it has not both.
    pub fn both(&self) -> Result<[IpAddr; 2]> {
        Ok([self.v4.into(), self.v6.with_context(|| format!("no IPv6 address: {self:?}"))?.into()])
    }
}

impl Containerd {
    /// Starts one in the namespace of a node, with wharf-cni, `loopback` and these of Debian's plugins, and imports
    /// [`IMAGE`].
    ///
    /// # Errors
    /// When a program is missing (the message says which package helps), or containerd does not get ready.
    pub fn start(node: &Space, networks: &[Network], neighbours: &[&str]) -> Result<Self> {
        installed::require(&NEEDS)?;
        let dir = scratch::fresh_dir("containerd")?;
        let jail = Jail::create(node)?;
        let (node, cri) = (node.try_clone()?, Arc::new(Cri::new(Path::new(SOCKET))?));
        let mut containerd = Self { jail, dir, node, cri, daemon: None, crash: Vec::new() };
        containerd.write_settings(networks)?;
        containerd.set_plugin(&fs::read(bin("wharf-cni")?).context("read wharf-cni")?)?;
        for plugin in neighbours.iter().chain(&["loopback"]) {
            let (from, to) = (Path::new(DEBIAN).join(plugin), containerd.plugins().join(plugin));
            fs::copy(&from, to)
                .with_context(|| format!("copy {} (package containernetworking-plugins)", from.display()))?;
        }
        containerd.start_daemon()?;
        containerd.import_image()?;
        Ok(containerd)
    }

    fn write_settings(&self, networks: &[Network]) -> Result<()> {
        let dir = self.dir.display();
        fs::create_dir(self.plugins()).context("create the directory of plugins")?;
        let first = networks.first().context("no network")?.handler;
        // No AppArmor and no OOM score: both would be the machine's.
        let mut text = format!(
            r#"version = 2
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs"]
[grpc]
address = "{SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{IMAGE}"
restrict_oom_score_adj = true
disable_apparmor = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{dir}/plugins"
conf_dir = "{dir}/{first}"
[plugins."io.containerd.grpc.v1.cri".containerd]
default_runtime_name = "{first}"
"#
        );
        for Network { handler, list } in networks {
            text += &format!(
                r#"[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{handler}]
runtime_type = "io.containerd.runc.v2"
cni_conf_dir = "{dir}/{handler}"
"#
            );
            let conf = self.dir.join(handler);
            fs::create_dir(&conf).with_context(|| format!("create {}", conf.display()))?;
            fs::write(conf.join("10-test.conflist"), list.to_string()).context("write a list of plugins")?;
        }
        fs::write(self.dir.join("config.toml"), text).context("write containerd's settings")
    }

    /// Starts the daemon and waits until it can run pods.
    ///
    /// # Errors
    /// When it runs already, or does not get ready; its log is in the message.
    pub fn start_daemon(&mut self) -> Result<()> {
        ensure!(self.daemon.is_none(), "containerd runs already");
        let log =
            OpenOptions::new().create(true).append(true).open(self.log_file()).context("open containerd's log")?;
        let mut command = self.command("containerd")?;
        command.arg("--config").arg(self.dir.join("config.toml")).envs(self.crash.iter().cloned());
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.daemon = Some(self.jail.spawn(command)?);
        let mut said = String::new();
        let ready = wait::until("containerd to be ready", || {
            said = match self.cri.not_ready() {
                Ok(reasons) if reasons.is_empty() => return Ok(Some(())),
                Ok(reasons) => reasons.join("; "),
                Err(error) => error.to_string(),
            };
            Ok(None)
        });
        ready.with_context(|| format!("{said}\n{}", self.log()))
    }

    /// From here on the plugin is the one with crash points ([`crate::crash`]), of the node with these directories.
    ///
    /// # Errors
    /// When it was not built, or containerd does not get ready again.
    pub fn arm(&mut self, dirs: &Dirs) -> Result<()> {
        self.set_plugin(&fs::read(crash_bin("wharf-cni")?).context("read wharf-cni-crash")?)?;
        self.crash = crash::environment(dirs).into();
        self.kill_daemon()?;
        self.start_daemon()
    }

    /// Ends the daemon with SIGKILL. Its pods go on.
    ///
    /// # Errors
    /// When it does not run.
    pub fn kill_daemon(&mut self) -> Result<()> {
        let mut daemon = self.daemon.take().context("containerd does not run")?;
        daemon.kill().context("kill containerd")?;
        daemon.wait().context("wait for containerd's end").map(drop)
    }

    fn import_image(&self) -> Result<()> {
        let busybox = installed::find("busybox")?;
        let bytes = fs::read(&busybox).with_context(|| format!("read {}", busybox.display()))?;
        let archive = self.dir.join("image.tar");
        fs::write(&archive, image::archive(&bytes)?).context("write the image")?;
        let mut import = self.command("ctr")?;
        import.args(["--address", SOCKET, "--namespace", "k8s.io", "images", "import"]).arg(&archive);
        self.jail.run(import, b"", LIMIT)?.ok()?;
        // The CRI hears of it by an event.
        wait::until("the image to be there", || Ok(self.cri.has_image(IMAGE)?.then_some(())))
    }

    fn command(&self, program: &str) -> Result<Command> {
        let mut command = command_in(&self.node, installed::find(program)?)?;
        command.env_clear().env("PATH", installed::PATH).env("HOME", &self.dir);
        Ok(command)
    }

    /// Its CRI, also for threads that ask while this one ends the daemon.
    #[must_use]
    pub fn cri(&self) -> Arc<Cri> {
        Arc::clone(&self.cri)
    }

    /// Where the plugins are that it runs.
    #[must_use]
    pub fn plugins(&self) -> PathBuf {
        self.dir.join("plugins")
    }

    /// A directory of the test's own, which containerd and its plugins see.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Puts another program in place of wharf-cni.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn set_plugin(&self, program: &[u8]) -> Result<()> {
        // By a rename: the one before may run just now.
        let new = self.dir.join("plugin.new");
        fs::write(&new, program).context("write the plugin")?;
        fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).context("make the plugin runnable")?;
        fs::rename(&new, self.plugins().join("wharf-cni")).context("put the plugin in place")
    }

    /// What it wrote so far, over all its starts.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read(self.log_file())
            .map_or_else(|e| format!("(no log: {e})"), |b| String::from_utf8_lossy(&b).into_owned())
    }

    fn log_file(&self) -> PathBuf {
        self.dir.join("containerd.log")
    }

    /// What a pod of this name would be, without ports, labels and annotations.
    #[must_use]
    pub fn pod(&self, name: &str) -> PodSandboxConfig {
        let metadata = PodSandboxMetadata {
            name: name.to_owned(),
            uid: format!("uid-{name}"),
            namespace: "default".to_owned(),
            attempt: 0,
        };
        PodSandboxConfig {
            metadata: Some(metadata),
            hostname: name.to_owned(),
            linux: Some(LinuxPodSandboxConfig { cgroup_parent: format!("/{}", self.jail.cgroup()) }),
            ..PodSandboxConfig::default()
        }
    }

    /// Runs a pod and asks for its addresses.
    ///
    /// # Errors
    /// containerd's.
    pub fn run(&self, config: PodSandboxConfig) -> Result<Pod> {
        self.run_as(config, "")
    }

    /// The same, of a runtime class.
    ///
    /// # Errors
    /// containerd's.
    pub fn run_as(&self, config: PodSandboxConfig, handler: &str) -> Result<Pod> {
        let id = self.cri.run_pod(&config, handler)?;
        let network = self.cri.pod_status(&id)?.network.unwrap_or_default();
        let others = network.additional_ips.iter().map(|other| &other.ip);
        let mut pod = Pod { id, config, v4: Ipv4Addr::UNSPECIFIED, v6: None };
        for text in [&network.ip].into_iter().chain(others) {
            match text.parse().with_context(|| format!("a pod's address {text:?}"))? {
                IpAddr::V4(v4) => pod.v4 = v4,
                IpAddr::V6(v6) => pod.v6 = Some(v6),
            }
        }
        ensure!(!pod.v4.is_unspecified(), "no IPv4 address: {network:?}");
        Ok(pod)
    }

    /// Starts a container in a pod.
    ///
    /// # Errors
    /// containerd's.
    pub fn container(&self, pod: &Pod, command: &[&str]) -> Result<String> {
        Ok(self.cri.start_container(&pod.id, &pod.config, IMAGE, command)?)
    }

    /// Stops a pod and removes it.
    ///
    /// # Errors
    /// containerd's.
    pub fn remove(&self, pod: &str) -> Result<()> {
        self.cri.stop_pod(pod)?;
        Ok(self.cri.remove_pod(pod)?)
    }

    /// Ends by SIGKILL the one process whose command line has this in it.
    ///
    /// # Errors
    /// When there is none, or more than one.
    pub fn kill_process(&self, part: &str) -> Result<()> {
        let all = self.jail.running()?;
        let found: Vec<&str> =
            all.iter().filter(|(_, line)| line.contains(part)).map(|(pid, _)| pid.as_str()).collect();
        let [pid] = found[..] else { bail!("{} processes with {part} instead of one: {all:#?}", found.len()) };
        let mut kill = self.command("kill")?;
        kill.args(["-9", pid]);
        self.jail.run(kill, b"", LIMIT)?.ok().map(drop)
    }

    /// Whether a process runs whose command line has this in it.
    ///
    /// # Errors
    /// When the processes cannot be listed.
    pub fn is_running(&self, part: &str) -> Result<bool> {
        Ok(self.jail.running()?.iter().any(|(_, line)| line.contains(part)))
    }

    /// What containerd and its CNI library still hold: pods, bound namespaces, cached results, processes beside the
    /// daemon. Shims may end a moment after the call that ended their pods; they get that moment.
    ///
    /// # Errors
    /// When something cannot be looked at, or a process does not end.
    pub fn left_behind(&self) -> Result<Vec<String>> {
        let mut left: Vec<String> = self.cri.pods()?.into_iter().map(|pod| format!("pod {}", pod.id)).collect();
        if left.is_empty() {
            let mut running = Vec::new();
            let ended = wait::until("containerd's processes to end", || {
                running = self.jail.running()?;
                running.retain(|(_, line)| !line.contains("containerd --config"));
                Ok(running.is_empty().then_some(()))
            });
            ended.with_context(|| format!("still running: {running:?}"))?;
        }
        for (what, dir) in [("namespace", "/run/netns"), ("cached result", "/var/lib/cni/results")] {
            left.extend(self.jail.entries(dir)?.into_iter().map(|name| format!("{what} {dir}/{name}")));
        }
        Ok(left)
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            // An error means that it has ended by itself, which is what is wanted.
            if daemon.kill().is_ok() {
                daemon.wait().ok();
            }
        }
    }
}
