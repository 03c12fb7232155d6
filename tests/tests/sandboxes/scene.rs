//! A node with directories of its own for sandboxes, networks and plugins.

use std::{
    collections::BTreeSet,
    fs,
    net::IpAddr,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};
use nix::mount::{MntFlags, umount2};
use serde_json::{Value, json};
use wharf_tests::{
    Node, NodeConfig,
    process::{self, Finished, bin, crash_bin, run},
    scenario,
    space::Space,
    wait,
};

/// Name of the first network.
pub(crate) const FRONT: &str = "front";
/// Name of the second one.
pub(crate) const BACK: &str = "back";

/// Directories that the commands get.
#[derive(Debug, Clone)]
pub(crate) struct Scene {
    pub(crate) state: PathBuf,
    pub(crate) names: PathBuf,
    pub(crate) conf: PathBuf,
    pub(crate) plugins: PathBuf,
}

/// Runs a scenario on a fresh node with two networks; whatever it leaves of a sandbox fails it.
pub(crate) fn with_sandboxes(body: impl FnOnce(&mut Node, &Scene) -> Result<()>) -> Result<()> {
    with_sandboxes_on(NodeConfig::default(), body)
}

/// The same on a node of another kind.
pub(crate) fn with_sandboxes_on(config: NodeConfig, body: impl FnOnce(&mut Node, &Scene) -> Result<()>) -> Result<()> {
    scenario(config, |node| {
        let scene = Scene::new(node)?;
        let mounts = mounts()?;
        body(node, &scene)?;
        let left = scene.left()?;
        ensure!(left.is_empty(), "left of sandboxes: {left:?}");
        let gone: Vec<_> = mounts.difference(&self::mounts()?).cloned().collect();
        ensure!(gone.is_empty(), "unmounted: {gone:?}");
        Ok(())
    })
}

/// Where something is mounted on the test's own machine.
fn mounts() -> Result<BTreeSet<String>> {
    let table = fs::read_to_string("/proc/thread-self/mountinfo").context("read the mounts")?;
    // proc(5): the fifth field is the mount point.
    Ok(table.lines().filter_map(|line| line.split(' ').nth(4)).map(str::to_owned).collect())
}

impl Scene {
    pub(crate) fn new(node: &Node) -> Result<Self> {
        let root = &node.dirs().root;
        let scene = Self {
            state: root.join("sandboxes"),
            names: root.join("names"),
            conf: root.join("net.d"),
            plugins: root.join("plugins"),
        };
        fs::create_dir(&scene.conf)?;
        fs::create_dir(&scene.plugins)?;
        symlink(bin("wharf-cni")?, scene.plugins.join("wharf-cni"))?;
        scene.network(node, "10-front.conflist", FRONT, &[])?;
        scene.network(node, "20-back.conflist", BACK, &[])?;
        Ok(scene)
    }

    /// A network of Wharf's, with these plugins behind it.
    pub(crate) fn network(&self, node: &Node, file: &str, name: &str, more: &[&str]) -> Result<()> {
        let capabilities = json!({"portMappings": true, "ips": true, "mac": true});
        let dns = json!({"nameservers": ["10.0.0.53"], "search": ["example.org"]});
        let wharf =
            json!({"type": "wharf-cni", "socket": node.dirs().socket(), "capabilities": capabilities, "dns": dns});
        let all = [vec![wharf], more.iter().map(|kind| json!({"type": kind})).collect()].concat();
        let list = json!({"cniVersion": "1.0.0", "name": name, "plugins": all});
        fs::write(self.conf.join(file), list.to_string()).context("write a network")
    }

    /// A plugin that writes each call to `calls` and does what the lines of shell say; an ADD passes on the result
    /// before it.
    pub(crate) fn plugin(&self, name: &str, lines: &str) -> Result<()> {
        let script = format!(
            "#!/bin/sh\ncd \"$(dirname \"$0\")\"\necho \"$CNI_COMMAND $CNI_IFNAME [$CNI_NETNS]\" >> calls\nconf=$(cat)\n{lines}\n\
             if [ \"$CNI_COMMAND\" = ADD ]; then echo \"$conf\" | sed 's/.*\"prevResult\":\\(.*\\),\"type\".*/\\1/'; fi\n"
        );
        let path = self.plugins.join(name);
        fs::write(&path, script)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).context("make a plugin executable")
    }

    /// Calls of plugins since the last look.
    pub(crate) fn calls(&self) -> Vec<String> {
        let file = self.plugins.join("calls");
        let text = fs::read_to_string(&file).unwrap_or_default();
        fs::remove_file(file).ok();
        text.lines().map(str::to_owned).collect()
    }

    pub(crate) fn places(&self) -> Vec<String> {
        let all = [
            ("--state-dir", &self.state),
            ("--netns-dir", &self.names),
            ("--conf-dir", &self.conf),
            ("--cni-bin-dir", &self.plugins),
        ];
        let pairs = all.into_iter().flat_map(|(flag, dir)| [flag.to_owned(), dir.display().to_string()]);
        std::iter::once("sandbox".to_owned()).chain(pairs).collect()
    }

    /// `wharf sandbox ...`, to be run by the caller.
    pub(crate) fn command(&self, node: &Node, arguments: &[&str]) -> Result<Command> {
        let mut command = node.wharf_command(&[])?;
        command.args(self.places()).args(arguments);
        Ok(command)
    }

    /// Runs `wharf sandbox ...`.
    pub(crate) fn wharf(&self, node: &Node, arguments: &[&str]) -> Result<Finished> {
        run(self.command(node, arguments)?, b"", 4 * wait::PATIENCE)
    }

    /// [`Self::wharf`] that must succeed; what it printed.
    pub(crate) fn ok(&self, node: &Node, arguments: &[&str]) -> Result<String> {
        self.wharf(node, arguments)?.ok()
    }

    /// [`Self::wharf`] that must fail with this exit status and say this on standard error.
    pub(crate) fn fails(&self, node: &Node, arguments: &[&str], code: i32, words: &[&str]) -> Result<()> {
        let done = self.wharf(node, arguments)?;
        let said = words.iter().all(|word| done.stderr.contains(word));
        ensure!(done.code() == code && said, "wanted {code} and {words:?}: {}", done.describe());
        ensure!(!done.stderr.contains("panicked") && !done.stderr.contains("backtrace"), "{}", done.describe());
        Ok(())
    }

    /// Runs the tool with crash points.
    pub(crate) fn armed(&self, node: &Node, arguments: &[&str], variable: &str, value: &str) -> Result<Finished> {
        let mut command = node.command(crash_bin("wharf")?)?;
        command.args(self.places()).args(arguments).env(variable, value).env("NO_COLOR", "1");
        run(command, b"", 4 * wait::PATIENCE)
    }

    /// Starts `wharf sandbox ...`, waits until it says this on standard error, goes on with `then`, and waits for its
    /// end. What it said.
    pub(crate) fn told(
        &self,
        node: &Node,
        arguments: &[&str],
        words: &str,
        then: impl FnOnce() -> Result<()>,
    ) -> Result<String> {
        let file = self.conf.join("stderr");
        let mut child = self.command(node, arguments)?.stderr(fs::File::create(&file)?).spawn()?;
        wait::until(words, || Ok(fs::read_to_string(&file)?.contains(words).then_some(())))?;
        then()?;
        let status = process::wait(&mut child, 4 * wait::PATIENCE)?.context("it does not end")?;
        let said = fs::read_to_string(&file)?;
        ensure!(status.success(), "{status}: {said}");
        Ok(said)
    }

    pub(crate) fn inspect(&self, node: &Node, name: &str) -> Result<Value> {
        serde_json::from_str(&self.ok(node, &["inspect", name])?).context("read what inspect prints")
    }

    pub(crate) fn list(&self, node: &Node) -> Result<Vec<Value>> {
        serde_json::from_str(&self.ok(node, &["list", "-o", "json"])?).context("read what list prints")
    }

    /// The states of all sandboxes, by name.
    pub(crate) fn states(&self, node: &Node) -> Result<Vec<(String, String)>> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        Ok(self.list(node)?.iter().map(|s| (text(&s["name"]), text(&s["state"]))).collect())
    }

    pub(crate) fn space(&self, name: &str) -> Result<Space> {
        Space::open(&self.names.join(name))
    }

    /// Addresses of an interface, IPv4 first.
    pub(crate) fn addresses(&self, node: &Node, name: &str, interface: usize) -> Result<[IpAddr; 2]> {
        let all = self.inspect(node, name)?;
        let ips = all["attachments"][interface]["result"]["ips"].as_array().context("ips")?.clone();
        let of = |ip: &Value| ip["address"].as_str()?.split('/').next()?.parse::<IpAddr>().ok();
        let found: Vec<IpAddr> = ips.iter().filter_map(of).collect();
        match found.as_slice() {
            [v4, v6] => Ok([*v4, *v6]),
            other => bail!("addresses {other:?}"),
        }
    }

    /// Takes a name away as a reboot does: the file goes, and with it the namespace.
    pub(crate) fn vanish(&self, name: &str) -> Result<()> {
        let path = self.names.join(name);
        umount2(&path, MntFlags::MNT_DETACH).with_context(|| format!("unmount {}", path.display()))?;
        fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))
    }

    pub(crate) fn record(&self, name: &str) -> PathBuf {
        self.state.join(format!("{name}.json"))
    }

    /// Files of sandboxes and names of namespaces.
    pub(crate) fn left(&self) -> Result<Vec<PathBuf>> {
        Ok([files(&self.state)?, files(&self.names)?].concat())
    }
}

fn files(directory: &Path) -> Result<Vec<PathBuf>> {
    if !directory.exists() {
        return Ok(Vec::new());
    }
    fs::read_dir(directory)?.map(|entry| Ok(entry?.path())).collect()
}
