//! A node: namespaces, root directory, containerd, kubelet and kube-proxy.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result};
use serde_json::json;

use super::{
    network::{DNS, Host, PODS},
    pki::Pki,
    place::{Place, Space, make_directory, until},
    programs::Programs,
};

const ROOT: &str = include_str!("node.sh");
const CGROUPS: &str = include_str!("cgroups.sh");
const SETTLE: &str = include_str!("settle.sh");

const LIMIT: Duration = Duration::from_secs(60);

/// `wharf-kube` removes it.
pub(crate) const TAINT: &str = "wharf.dev/agent-not-ready";

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) host: Host,
    pub(crate) place: Place,
    /// First process of the node, in the machine's PID namespace.
    pub(crate) pid: u32,
    logs: PathBuf,
    daemons: Vec<(&'static str, PathBuf, Vec<String>)>,
}

#[derive(Debug)]
pub(crate) struct Setup<'a> {
    pub(crate) space: &'a Space,
    pub(crate) programs: &'a Programs,
    pub(crate) pki: &'a Pki,
    /// Same path on the nodes.
    pub(crate) work: &'a Path,
    pub(crate) run: &'a Path,
    pub(crate) logs: &'a Path,
    pub(crate) release: &'a Path,
}

impl Node {
    pub(crate) fn make(setup: &Setup<'_>, host: &Host) -> Result<Self> {
        let name = host.name.as_str();
        let directory = make_directory(&setup.run.join(name))?;
        let ready = directory.join("ready");
        let visible = [setup.work, &setup.programs.directory, setup.release].map(|path| path.display().to_string());
        let cgroups = ["sh", "-c", CGROUPS, "cgroups", &setup.space.cgroups, name].map(str::to_owned).to_vec();
        let inside = setup.space.in_network(name);
        let log = setup.logs.join(format!("{name}-root.log"));
        let mut arguments = cgroups.clone();
        let words = ["unshare", "--mount", "--uts", "--cgroup", "--pid", "--fork", "--propagation", "private"];
        arguments.extend(words.map(str::to_owned));
        arguments.extend(["sh", "-c", ROOT, "node", name].map(str::to_owned));
        arguments.extend([&directory, &ready].map(|path| path.display().to_string()));
        arguments.extend(visible);
        let (program, arguments) = arguments.split_first().context("start a node: no command line")?;
        inside.start(&format!("{name}-root"), &log, Path::new(program), arguments)?;
        let pid = until(&format!("the root of {name}"), LIMIT, || {
            Ok(fs::read_to_string(&ready).ok().and_then(|text| text.trim().parse::<u32>().ok()))
        })?;
        setup.space.root().output("sh", &["-c", SETTLE, "settle", &setup.space.cgroups, name])?;
        let place = setup.space.root().of_process(pid, cgroups);
        let daemons = daemons(setup, host, &directory)?;
        let node = Self { host: host.clone(), place, pid, logs: setup.logs.to_owned(), daemons };
        node.start("containerd")?;
        until(&format!("containerd of {name}"), LIMIT, || {
            node.place.output(setup.programs.ctr(), &["version"]).map(Some)
        })?;
        Ok(node)
    }

    pub(crate) fn name(&self) -> &str {
        &self.host.name
    }

    pub(crate) fn import(&self, ctr: &Path, archive: &Path) -> Result<()> {
        // As in [`CONTAINERD`].
        let words = ["--namespace=k8s.io", "images", "import", "--local", "--snapshotter=native"];
        self.place.output(ctr, &[&words[..], &[&archive.display().to_string()]].concat()).map(drop)
    }

    pub(crate) fn start(&self, name: &str) -> Result<()> {
        let daemon = self.daemons.iter().find(|(known, ..)| *known == name);
        let (_, program, arguments) = daemon.with_context(|| format!("start {name}: a node has no such daemon"))?;
        self.place.start(name, &self.logs.join(format!("{}-{name}.log", self.name())), program, arguments)
    }

    /// Starts missing daemons and waits for them.
    pub(crate) fn join(&self) -> Result<()> {
        for (name, port) in [("kubelet", 10248), ("kube-proxy", 10256)] {
            if !self.place.is_running(name) {
                self.start(name)?;
            }
            let url = format!("http://127.0.0.1:{port}/healthz");
            until(&format!("{name} of {}", self.name()), LIMIT, || {
                let answer = self.place.output("curl", &["--silent", "--max-time", "2", &url]);
                answer.map(Some)
            })?;
        }
        Ok(())
    }
}

fn daemons(setup: &Setup<'_>, host: &Host, directory: &Path) -> Result<Vec<(&'static str, PathBuf, Vec<String>)>> {
    let write = |name: &str, text: &str| -> Result<String> {
        let path = directory.join(name);
        fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
        Ok(path.display().to_string())
    };
    let containerd = write("containerd.toml", CONTAINERD)?;
    let kubelet = write("kubelet.json", &kubelet(setup.pki, &host.name))?;
    let path = format!("PATH={}:/usr/sbin:/usr/bin:/sbin:/bin", setup.programs.containerd.display());
    let program = setup.programs.containerd.join("containerd").display().to_string();
    Ok(vec![
        ("containerd", "env".into(), vec![path, program, "--config".to_owned(), containerd]),
        (
            "kubelet",
            setup.programs.path("kubelet"),
            vec![
                format!("--config={kubelet}"),
                format!("--kubeconfig={}", setup.pki.file(&format!("{}.conf", host.name))),
                format!("--hostname-override={}", host.name),
                format!("--node-ip={},{}", host.ipv4(), host.ipv6()),
                format!("--register-with-taints={TAINT}:NoSchedule"),
                "--v=2".to_owned(),
            ],
        ),
        (
            "kube-proxy",
            setup.programs.path("kube-proxy"),
            vec![
                format!("--kubeconfig={}", setup.pki.file("proxy.conf")),
                format!("--hostname-override={}", host.name),
                "--proxy-mode=iptables".to_owned(),
                format!("--cluster-cidr={}", PODS.join(",")),
                // It is a setting of the whole machine.
                "--conntrack-max-per-core=0".to_owned(),
            ],
        ),
    ])
}

/// `native`: the run's file system may not support upper layers of overlayfs.
const CONTAINERD: &str = r#"version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.erofs", "io.containerd.snapshotter.v1.blockfile",
]
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "native"
  use_local_image_pull = true
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "localhost/pause:test"
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      SystemdCgroup = false
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["/opt/cni/bin"]
    conf_dir = "/etc/cni/net.d"
    max_conf_num = 1
    use_internal_loopback = true
"#;

fn kubelet(pki: &Pki, name: &str) -> String {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": false}, "webhook": {"enabled": true}, "x509": {"clientCAFile": pki.file("ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": pki.file(&format!("{name}.crt")), "tlsPrivateKeyFile": pki.file(&format!("{name}.key")),
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "cgroupDriver": "cgroupfs", "failCgroupV1": false, "failSwapOn": false, "makeIPTablesUtilChains": false,
        // Disk and memory are shared with other programs.
        "imageGCHighThresholdPercent": 100, "imageGCLowThresholdPercent": 99,
        "evictionHard": {
            "memory.available": "100Mi", "nodefs.available": "1%", "nodefs.inodesFree": "1%",
            "imagefs.available": "1%", "imagefs.inodesFree": "1%",
        },
        // Without `--e2e`, no server has the address; without an address, each pod gets an Event.
        "clusterDNS": [DNS[0]], "clusterDomain": "cluster.local",
        "resolvConf": "", "healthzBindAddress": "127.0.0.1", "shutdownGracePeriod": "0s",
        // Detects a silent node within seconds.
        "nodeStatusUpdateFrequency": "4s", "nodeStatusReportFrequency": "10s",
    })
    .to_string()
}
