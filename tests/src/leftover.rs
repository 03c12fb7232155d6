//! What is left of endpoints that are gone: the test's own look at the kernel and the bpffs, beside the agent's audit.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};
use wharf_api::{Endpoint, EndpointState, Finding};

use crate::{node::Node, wait};

impl Node {
    /// What of ours is still there, by the test's own look at the kernel and the bpffs, and by the agent's audit. Empty
    /// when nothing is left but the node's own part: router interface, its addresses, programs made ahead of need.
    ///
    /// # Errors
    /// When something cannot be looked at.
    pub fn left_behind(&self) -> Result<Vec<String>> {
        let mut left: Vec<String> =
            self.endpoint_links()?.into_iter().map(|name| format!("interface {name}")).collect();
        left.extend(self.attached_pins()?.into_iter().map(|path| format!("pin {}", path.display())));
        if self.has_agent() {
            let endpoints = self.endpoints()?;
            left.extend(
                endpoints.iter().map(|e| format!("endpoint {} ({}:{}), {:?}", e.id, e.container_id, e.ifname, e.state)),
            );
            let leases = self.ask(async |client| client.ipam().await)?.leases;
            left.extend(leases.iter().filter(|l| l.owner != "node").map(|l| format!("lease {} of {}", l.ip, l.owner)));
            left.extend(self.found_amiss()?.into_iter().map(|finding| format!("audit: {finding}")));
        }
        Ok(left)
    }

    /// Waits until the kernel has released the links of endpoints whose DEL was answered: records and addresses stay
    /// until then, and a busy machine's kernel takes longer than the second that the agent makes a reader wait for it.
    ///
    /// # Errors
    /// When they are still there after the harness's patience, or the agent does not answer.
    pub fn await_released(&self) -> Result<()> {
        if !self.has_agent() {
            return Ok(());
        }
        wait::until("the kernel releases what was deleted", || {
            let leaves = |e: &Endpoint| e.state == EndpointState::Disconnecting;
            Ok((!self.endpoints()?.iter().any(leaves)).then_some(()))
        })
    }

    /// What the audit names, without deletion records that were put aside: those stay until an operator removes them.
    ///
    /// # Errors
    /// When the agent does not answer.
    pub fn found_amiss(&self) -> Result<Vec<String>> {
        let is_aside = |f: &Finding| f.object == "queue-file" && f.problem.starts_with("put aside, ");
        let told = |f: Finding| format!("{} {}: {}", f.object, f.subject, f.problem);
        Ok(self.audit()?.findings.into_iter().filter(|f| !is_aside(f)).map(told).collect())
    }

    /// Host sides of veth pairs that carry an endpoint's name (`wh` and twelve hex digits).
    ///
    /// # Errors
    /// When the namespace cannot be looked at.
    pub fn endpoint_links(&self) -> Result<Vec<String>> {
        let ours = |name: &String| {
            name.strip_prefix("wh").is_some_and(|hex| hex.len() == 12 && hex.bytes().all(|b| b.is_ascii_hexdigit()))
        };
        Ok(self.space().links()?.into_iter().filter(ours).collect())
    }

    /// Pins of attached programs. A set made ahead of need has programs and maps, but no link.
    ///
    /// # Errors
    /// When the bpffs cannot be read.
    pub fn attached_pins(&self) -> Result<BTreeSet<PathBuf>> {
        let mut pins = BTreeSet::new();
        for directory in self.pin_directories()? {
            let links = read_dir(&directory)?.into_iter().filter(|p| name_of(p).starts_with("link_"));
            pins.extend(links);
        }
        Ok(pins)
    }

    /// Directories of endpoints' pins, of every ABI version.
    fn pin_directories(&self) -> Result<Vec<PathBuf>> {
        let mut directories = Vec::new();
        for version in self.dirs().version_trees()? {
            let endpoints = self.dirs().bpffs.join("wharf").join(version).join("endpoints");
            if endpoints.is_dir() {
                directories.extend(read_dir(&endpoints)?);
            }
        }
        Ok(directories)
    }

    /// The end of a scenario that went well: nothing is left, and the agent ends in good order.
    ///
    /// # Errors
    /// When something is left, or the agent does not end well.
    pub fn finish(&mut self) -> Result<()> {
        self.await_released()?;
        let left = self.left_behind()?;
        if !left.is_empty() {
            bail!("left behind:\n  {}", left.join("\n  "));
        }
        if self.has_agent() {
            self.stop_agent()?;
        }
        let left = self.left_behind()?;
        ensure!(left.is_empty(), "left behind after the agent ended:\n  {}", left.join("\n  "));
        for socket in [self.dirs().socket(), self.dirs().admin_socket()] {
            ensure!(!socket.exists(), "the agent left {} behind", socket.display());
        }
        let pinned = self.pin_directories()?;
        ensure!(pinned.is_empty(), "left pinned after the agent ended: {pinned:?}");
        Ok(())
    }
}

fn read_dir(path: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(path).with_context(|| format!("read {}", path.display()))?;
    entries.map(|e| Ok(e.with_context(|| format!("read {}", path.display()))?.path())).collect()
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
