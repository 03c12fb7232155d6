//! Podman 4 with its CNI backend, on a node of the test: the real client of the plugin.
//!
//! Nothing on the machine is used but the programs: storage, settings, locks and the network configuration are the
//! test's own (see `jail`), and the image is made of the machine's busybox.

mod inspect;

use std::{fs, path::PathBuf, process::Command, time::Duration};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use crate::{
    installed,
    jail::Jail,
    node::Node,
    process::{Finished, bin, command_in, run},
    scratch,
    space::Space,
    wait,
};
pub use inspect::{Attachment, Container};

/// The image that every container is made of: one static busybox.
pub const IMAGE: &str = "localhost/busybox:wharf";
/// The networks there are, each a conflist with the plugin alone.
pub const NETWORKS: [&str; 2] = ["harbour", "annex"];
/// The network of the shipped list, which asks for all capabilities.
pub const SHIPPED: &str = "wharf";
/// The shipped list, as the installation puts it in place.
const SHIPPED_LIST: &str = include_str!("../../dist/10-wharf.conflist");

/// Longest one podman command may take; on an idle machine they take well under a second.
const LIMIT: Duration = Duration::from_secs(50);
/// What must be on the machine: program, Debian package.
const NEEDS: [(&str, &str); 5] =
    [("podman", "podman"), ("runc", "runc"), ("conmon", "conmon"), ("busybox", "busybox-static"), ("tar", "tar")];
/// The programs of the image, all of them busybox.
const APPLETS: [&str; 14] = [
    "cat", "echo", "hostname", "httpd", "ip", "mkdir", "nc", "ping", "sh", "sleep", "timeout", "true", "false", "wget",
];

/// Podman on a node. What it runs ends when this is dropped.
#[derive(Debug)]
pub struct Podman {
    jail: Jail,
    dir: PathBuf,
    node: Space,
}

impl Podman {
    /// Sets podman up on a node, with the networks of [`NETWORKS`], [`SHIPPED`] and the image [`IMAGE`].
    ///
    /// # Errors
    /// When a program is missing, or podman is not one with CNI; the message says which package helps.
    pub fn start(node: &Node) -> Result<Self> {
        installed::require(&NEEDS)?;
        let dir = scratch::fresh_dir("podman")?;
        let jail = Jail::create(node.space())?;
        let node_space = Space::open(&jail.path("/proc/1/ns/net"))?;
        let podman = Self { jail, dir, node: node_space };
        podman.write_settings(node)?;
        podman.require_cni()?;
        podman.import_image()?;
        Ok(podman)
    }

    fn write_settings(&self, node: &Node) -> Result<()> {
        for part in ["plugins", "networks", "home/.config/containers", "tmp", "hooks", "image/bin", "image/www"] {
            fs::create_dir_all(self.dir.join(part)).with_context(|| format!("create {part}"))?;
        }
        fs::copy(bin("wharf-cni")?, self.dir.join("plugins/wharf-cni")).context("copy wharf-cni")?;
        for network in NETWORKS {
            // 1.0.0 is the newest version this podman's libcni knows.
            let capabilities = json!({"portMappings": true});
            let plugin = json!({"type": "wharf-cni", "socket": node.dirs().socket(), "capabilities": capabilities});
            let list = json!({"cniVersion": "1.0.0", "name": network, "plugins": [plugin]});
            self.write(&format!("networks/{network}.conflist"), &list.to_string())?;
        }
        let mut shipped: serde_json::Value = serde_json::from_str(SHIPPED_LIST).context("read the shipped list")?;
        ensure!(shipped["name"] == SHIPPED, "{shipped}");
        shipped["plugins"][0]["socket"] = json!(node.dirs().socket());
        self.write("networks/10-wharf.conflist", &shipped.to_string())?;
        let dir = self.dir.display();
        self.write(
            "containers.conf",
            &format!(
                r#"[containers]
apparmor_profile = "unconfined"
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
label = false
log_driver = "k8s-file"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
hooks_dir = ["{dir}/hooks"]
runtime = "runc"
[network]
cni_plugin_dirs = ["{dir}/plugins"]
default_network = "harbour"
network_backend = "cni"
network_config_dir = "{dir}/networks"
"#
            ),
        )?;
        self.write(
            "storage.conf",
            "[storage]\ndriver = \"vfs\"\ngraphroot = \"/var/lib/containers/storage\"\nrunroot = \"/run/containers/storage\"\n",
        )?;
        self.write("registries.conf", "unqualified-search-registries = []\n")?;
        let policy = json!({"default": [{"type": "insecureAcceptAnything"}]});
        self.write("home/.config/containers/policy.json", &policy.to_string())
    }

    fn write(&self, name: &str, text: &str) -> Result<()> {
        fs::write(self.dir.join(name), text).with_context(|| format!("write podman's {name}"))
    }

    fn require_cni(&self) -> Result<()> {
        let backend = self.finish(&["info", "--format", "{{.Version.Version}} {{.Host.NetworkBackend}}"])?;
        let said = backend.stdout.trim();
        ensure!(
            backend.status.success() && said.ends_with(" cni"),
            "this test needs a podman with the CNI backend, which podman 4 has and podman 5 has not (Debian 12's and Ubuntu \
             24.04's package `podman` have it): {}",
            backend.describe()
        );
        Ok(())
    }

    fn import_image(&self) -> Result<()> {
        let image = self.dir.join("image");
        let busybox = installed::find("busybox")?;
        fs::copy(&busybox, image.join("bin/busybox")).with_context(|| format!("copy {}", busybox.display()))?;
        for applet in APPLETS {
            std::os::unix::fs::symlink("busybox", image.join("bin").join(applet)).context("link an applet")?;
        }
        let mut alone = command_in(&self.node, "chroot")?;
        alone.arg(&image).args(["/bin/busybox", "true"]);
        run(alone, b"", wait::PATIENCE)?.ok().with_context(|| {
            format!("{} does not run by itself: install the Debian package busybox-static", busybox.display())
        })?;
        let archive = self.dir.join("image.tar");
        let mut tar = command_in(&self.node, "tar")?;
        tar.arg("--create").arg("--file").arg(&archive).arg("--directory").arg(&image).arg(".");
        run(tar, b"", wait::PATIENCE)?.ok()?;
        let bytes = fs::read(&archive).context("read the image")?;
        self.jail.run(self.command(&["import", "-", IMAGE])?, &bytes, LIMIT)?.ok()?;
        Ok(())
    }

    fn command(&self, arguments: &[&str]) -> Result<Command> {
        let mut command = command_in(&self.node, installed::find("podman")?)?;
        command.args(arguments).env_clear().env("PATH", installed::PATH).env("LC_ALL", "C");
        command.env("HOME", self.dir.join("home")).env("TMPDIR", self.dir.join("tmp"));
        command.env("CONTAINERS_CONF", self.dir.join("containers.conf"));
        command.env("CONTAINERS_STORAGE_CONF", self.dir.join("storage.conf"));
        command.env("CONTAINERS_REGISTRIES_CONF", self.dir.join("registries.conf"));
        Ok(command)
    }

    /// Runs a podman command to its end, whatever that is.
    ///
    /// # Errors
    /// When it cannot be started or does not end.
    pub fn finish(&self, arguments: &[&str]) -> Result<Finished> {
        self.jail.run(self.command(arguments)?, b"", LIMIT)
    }

    /// Runs a podman command that must succeed, and gives what it printed.
    ///
    /// # Errors
    /// When it fails, or logs an error: podman reports success of a removal whose network clean-up failed. The message
    /// holds everything it wrote.
    pub fn ok(&self, arguments: &[&str]) -> Result<String> {
        let finished = self.finish(arguments)?;
        ensure!(!finished.stderr.contains("level=error"), "{}", finished.describe());
        Ok(finished.ok()?.trim_end().to_owned())
    }

    /// Runs a podman command that must fail; gives its exit code and what it wrote to standard error.
    ///
    /// # Errors
    /// When it succeeds, or is killed.
    pub fn refused(&self, arguments: &[&str]) -> Result<(i32, String)> {
        let finished = self.finish(arguments)?;
        ensure!(finished.code() > 0, "a failure was expected: {}", finished.describe());
        Ok((finished.code(), finished.stderr))
    }

    /// The arguments of `podman run` of a program in [`IMAGE`], so that nothing is fetched and no cgroup is left.
    #[must_use]
    pub fn run_line<'a>(&'a self, options: &[&'a str], program: &[&'a str]) -> Vec<&'a str> {
        let ours = ["run", "--pull", "never", "--cgroup-parent", self.jail.cgroup()];
        [&ours, options, &[IMAGE], program].concat()
    }

    /// `podman run --detach`.
    ///
    /// # Errors
    /// When podman fails.
    pub fn run(&self, name: &str, options: &[&str], program: &[&str]) -> Result<Container> {
        self.ok(&self.run_line(&[&["--detach", "--name", name], options].concat(), program))?;
        self.inspect(name)
    }

    /// `podman pod create` on the first network; its infra container is made of [`IMAGE`] too. Gives the infra
    /// container, which owns the network.
    ///
    /// # Errors
    /// When podman fails.
    pub fn create_pod(&self, name: &str, options: &[&str]) -> Result<Container> {
        let infra = ["--infra-image", IMAGE, "--infra-command", "/bin/sleep infinity"];
        let place = ["--cgroup-parent", self.jail.cgroup(), "--network", NETWORKS[0]];
        self.ok(&[&["pod", "create", "--name", name][..], &infra, &place, options].concat())?;
        self.ok(&["pod", "start", name])?;
        self.inspect(&self.ok(&["pod", "inspect", "--format", "{{.InfraContainerID}}", name])?)
    }

    /// Runs a program in a container and gives what it printed.
    ///
    /// # Errors
    /// When it fails.
    pub fn exec(&self, container: &str, program: &[&str]) -> Result<String> {
        self.ok(&[&["exec", container], program].concat())
    }

    /// `podman inspect` of a container.
    ///
    /// # Errors
    /// When podman fails, or prints what is not understood.
    pub fn inspect(&self, container: &str) -> Result<Container> {
        let text = self.ok(&["inspect", "--type", "container", container])?;
        Container::read(&text).with_context(|| format!("podman inspect {container}: {text}"))
    }

    /// What podman and its CNI library still hold: containers, pods, bound namespaces, cached results, processes.
    /// Monitors and clean-up commands may end a moment after the command that made them; they get that moment.
    ///
    /// # Errors
    /// When something cannot be looked at, or a process does not end.
    pub fn left_behind(&self) -> Result<Vec<String>> {
        let mut left = Vec::new();
        for list in
            [&["ps", "--all", "--format", "container {{.Names}}"][..], &["pod", "ps", "--format", "pod {{.Name}}"]]
        {
            left.extend(self.ok(list)?.lines().filter(|l| !l.is_empty()).map(str::to_owned));
        }
        if left.is_empty() {
            let mut running = Vec::new();
            let ended = wait::until("podman's processes to end", || {
                running = self.jail.running()?;
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
