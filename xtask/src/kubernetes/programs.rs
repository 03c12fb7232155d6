//! Programs of a cluster.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};

use crate::{
    progress::Step,
    vm::apt::{Apt, empty_directory},
};

const NEEDED: [&str; 7] =
    ["kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl", "kube-proxy", "etcd"];

/// For `--e2e`. agnhost is from test/images/agnhost of Kubernetes' sources.
const E2E: [&str; 2] = ["e2e.test", "agnhost"];

/// bookworm's containerd 1.6 does not use the plugin's STATUS.
const CONTAINERD: (&str, &str) = ("containerd", "sid");

#[derive(Debug)]
pub(crate) struct Programs {
    pub(crate) directory: PathBuf,
    pub(crate) containerd: PathBuf,
}

impl Programs {
    /// Checks `--bin-dir`; `e2e` needs more programs.
    pub(crate) fn find(directory: &Path, e2e: bool) -> Result<PathBuf> {
        let directory = fs::canonicalize(directory).with_context(|| format!("open {}", directory.display()))?;
        let needed = NEEDED.into_iter().chain(E2E.into_iter().filter(|_| e2e));
        let missing: Vec<_> = needed.filter(|name| !directory.join(name).is_file()).collect();
        if missing.is_empty() {
            return Ok(directory);
        }
        bail!(
            "run a cluster: {} has no {}. Kubernetes' release archives have these programs \
             (kubernetes-server-linux-amd64.tar.gz at dl.k8s.io; e2e.test in kubernetes-test-linux-amd64.tar.gz), or \
             `make WHAT=cmd/kubelet` in its sources builds them, and `go build ./test/images/agnhost` builds agnhost. \
             etcd 3.5 or later is a release of etcd-io/etcd, or Debian's etcd-server",
            directory.display(),
            missing.join(", ")
        )
    }

    pub(crate) fn complete(step: &Step, directory: PathBuf, work: &Path) -> Result<Self> {
        let root = work.join("containerd");
        let programs = Self { directory, containerd: root.join("usr/bin") };
        if programs.containerd.join("containerd").is_file() {
            step.note("there already");
            return Ok(programs);
        }
        let fresh = work.join("containerd.new");
        empty_directory(&fresh)?;
        let (package, release) = CONTAINERD;
        let apt = Apt::open(step, &work.join("apt"), &[release])?;
        apt.unpack(step, &[package.to_owned()], &fresh)?;
        fs::rename(&fresh, &root).with_context(|| format!("rename {} to {}", fresh.display(), root.display()))?;
        Ok(programs)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    pub(crate) fn ctr(&self) -> PathBuf {
        self.containerd.join("ctr")
    }

    pub(crate) fn optional(&self, name: &str) -> Option<PathBuf> {
        Some(self.path(name)).filter(|path| path.is_file())
    }
}
