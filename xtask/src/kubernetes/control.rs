//! The control plane: etcd, API server, controller manager and scheduler.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Result, bail};

use super::{
    api::Api,
    network::{CONTROL, CONTROL_NAME, PODS, SERVICES},
    pki::Pki,
    place::{Place, Space, make_directory, until},
    programs::Programs,
};

const LIMIT: Duration = Duration::from_secs(120);

#[derive(Debug)]
pub(crate) struct Control {
    pub(crate) place: Place,
    directory: PathBuf,
    logs: PathBuf,
    programs: PathBuf,
    arguments: Vec<(&'static str, Vec<String>)>,
}

impl Control {
    pub(crate) fn new(space: &Space, programs: &Programs, pki: &Pki, work: &Path, logs: &Path) -> Result<Self> {
        let directory = make_directory(&work.join("control"))?;
        let arguments = vec![
            ("etcd", etcd(&directory)),
            ("kube-apiserver", apiserver(pki)),
            ("kube-controller-manager", controller_manager(pki, &directory)),
            ("kube-scheduler", scheduler(pki)),
        ];
        let (place, logs) = (space.in_network(CONTROL_NAME), logs.to_owned());
        Ok(Self { place, directory, logs, programs: programs.directory.clone(), arguments })
    }

    pub(crate) fn start_all(&self, api: &Api) -> Result<()> {
        for (name, _) in &self.arguments {
            self.start(name, api)?;
        }
        Ok(())
    }

    pub(crate) fn start(&self, name: &str, api: &Api) -> Result<()> {
        let Some((_, arguments)) = self.arguments.iter().find(|(known, _)| *known == name) else {
            bail!("start {name}: it is no program of the control plane");
        };
        self.place.start(name, &self.logs.join(format!("{name}.log")), &self.programs.join(name), arguments)?;
        until(&format!("{name} is ready"), LIMIT, || {
            match name {
                "etcd" => self.get("http://127.0.0.1:2379/health")?,
                "kube-controller-manager" => self.get("https://127.0.0.1:10257/healthz")?,
                "kube-scheduler" => self.get("https://127.0.0.1:10259/healthz")?,
                _ => api.run(&["get", "--raw", "/readyz"]).map(drop)?,
            }
            Ok(Some(()))
        })
    }

    fn get(&self, url: &str) -> Result<()> {
        self.place.output("curl", &["--silent", "--insecure", "--fail", "--max-time", "2", url]).map(drop)
    }

    /// Copies the stopped etcd's data.
    pub(crate) fn copy_of_etcd(&self, name: &str) -> Result<()> {
        self.copy("etcd", name)
    }

    /// Replaces the stopped etcd's data by an earlier copy.
    pub(crate) fn restore_etcd(&self, name: &str) -> Result<()> {
        let data = self.directory.join("etcd");
        self.place.output("rm", &["-rf", "--", &data.display().to_string()])?;
        self.copy(name, "etcd")
    }

    fn copy(&self, from: &str, to: &str) -> Result<()> {
        let [from, to] = [from, to].map(|name| self.directory.join(name).display().to_string());
        self.place.output("cp", &["-a", "--", &from, &to]).map(drop)
    }
}

fn words(list: &[&str]) -> Vec<String> {
    list.iter().map(|word| (*word).to_owned()).collect()
}

fn etcd(directory: &Path) -> Vec<String> {
    let data = format!("--data-dir={}", directory.join("etcd").display());
    let (client, peer) = ("http://127.0.0.1:2379", "http://127.0.0.1:2380");
    words(&[
        "--name=test",
        &data,
        "--unsafe-no-fsync",
        &format!("--listen-client-urls={client}"),
        &format!("--advertise-client-urls={client}"),
        &format!("--listen-peer-urls={peer}"),
        &format!("--initial-advertise-peer-urls={peer}"),
        &format!("--initial-cluster=test={peer}"),
        "--log-level=warn",
    ])
}

fn apiserver(pki: &Pki) -> Vec<String> {
    let files = [
        ("--tls-cert-file", "apiserver.crt"),
        ("--tls-private-key-file", "apiserver.key"),
        ("--client-ca-file", "ca.crt"),
        ("--kubelet-client-certificate", "kubelet-client.crt"),
        ("--kubelet-client-key", "kubelet-client.key"),
        ("--kubelet-certificate-authority", "ca.crt"),
        ("--service-account-key-file", "service-account.pub"),
        ("--service-account-signing-key-file", "service-account.key"),
        ("--requestheader-client-ca-file", "ca.crt"),
        ("--proxy-client-cert-file", "front-proxy.crt"),
        ("--proxy-client-key-file", "front-proxy.key"),
    ];
    let mut arguments = words(&[
        "--etcd-servers=http://127.0.0.1:2379",
        &format!("--advertise-address={CONTROL}"),
        "--bind-address=0.0.0.0",
        "--secure-port=6443",
        &format!("--service-cluster-ip-range={}", SERVICES.join(",")),
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        "--kubelet-preferred-address-types=InternalIP",
        "--service-account-issuer=https://kubernetes.default.svc",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--endpoint-reconciler-type=lease",
    ]);
    arguments.extend(files.map(|(flag, file)| format!("{flag}={}", pki.file(file))));
    arguments
}

fn clients(pki: &Pki, name: &str) -> Vec<String> {
    ["--kubeconfig", "--authentication-kubeconfig", "--authorization-kubeconfig"]
        .map(|flag| format!("{flag}={}", pki.file(&format!("{name}.conf"))))
        .to_vec()
}

fn controller_manager(pki: &Pki, directory: &Path) -> Vec<String> {
    let mut arguments = clients(pki, "controller-manager");
    arguments.extend(words(&[
        "--bind-address=127.0.0.1",
        "--allocate-node-cidrs=true",
        &format!("--cluster-cidr={}", PODS.join(",")),
        &format!("--service-cluster-ip-range={}", SERVICES.join(",")),
        &format!("--root-ca-file={}", pki.file("ca.crt")),
        &format!("--service-account-private-key-file={}", pki.file("service-account.key")),
        &format!("--cluster-signing-cert-file={}", pki.file("ca.crt")),
        &format!("--cluster-signing-key-file={}", pki.file("ca.key")),
        "--use-service-account-credentials=true",
        "--leader-elect=false",
        // The default is a directory of the machine.
        &format!("--flex-volume-plugin-dir={}", directory.join("plugins").display()),
    ]));
    arguments
}

fn scheduler(pki: &Pki) -> Vec<String> {
    let mut arguments = clients(pki, "scheduler");
    arguments.extend(words(&["--bind-address=127.0.0.1", "--leader-elect=false"]));
    arguments
}
