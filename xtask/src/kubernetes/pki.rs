//! Certificates and kubeconfigs, made with openssl.

use std::{fs, path::PathBuf, process::Command};

use anyhow::{Context, Result};
use serde_json::json;

use super::{network, place::said};

const SERVER: &str = "DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,\
                      DNS:kubernetes.default.svc.cluster.local,DNS:localhost,IP:127.0.0.1";

/// File name and subject.
const CLIENTS: [(&str, &str); 6] = [
    ("admin", "/O=system:masters/CN=admin"),
    ("controller-manager", "/CN=system:kube-controller-manager"),
    ("scheduler", "/CN=system:kube-scheduler"),
    ("proxy", "/CN=system:kube-proxy"),
    ("kubelet-client", "/O=system:masters/CN=kube-apiserver-kubelet-client"),
    ("front-proxy", "/CN=front-proxy-client"),
];

#[derive(Debug)]
pub(crate) struct Pki {
    directory: PathBuf,
}

impl Pki {
    pub(crate) fn make(directory: PathBuf, nodes: &[network::Host]) -> Result<Self> {
        fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
        let pki = Self { directory };
        pki.openssl("req -x509 -newkey rsa:2048 -nodes -days 3650 -subj /CN=wharf-test -keyout ca.key -out ca.crt")?;
        pki.openssl("genrsa -out service-account.key 2048")?;
        pki.openssl("rsa -in service-account.key -pubout -out service-account.pub")?;
        let server =
            format!("{SERVER},IP:{},IP:{}", network::CONTROL, network::SERVICES.map(first_address).join(",IP:"));
        pki.certificate("apiserver", "/CN=kube-apiserver", Some(&server))?;
        for (name, subject) in CLIENTS {
            pki.certificate(name, subject, None)?;
            pki.kubeconfig(name)?;
        }
        // For the image of agnhost.
        pki.openssl(
            "req -x509 -newkey rsa:2048 -nodes -days 3650 -subj /CN=localhost \
             -addext subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1 -keyout localhost.key -out localhost.crt",
        )?;
        for node in nodes {
            let names = format!("DNS:{},IP:{},IP:{}", node.name, node.ipv4(), node.ipv6());
            pki.certificate(&node.name, &format!("/O=system:nodes/CN=system:node:{}", node.name), Some(&names))?;
            pki.kubeconfig(&node.name)?;
        }
        Ok(pki)
    }

    /// `NAME.crt`, `NAME.key` or `NAME.conf`.
    pub(crate) fn file(&self, name: &str) -> String {
        self.directory.join(name).display().to_string()
    }

    fn openssl(&self, words: &str) -> Result<()> {
        said(Command::new("openssl").current_dir(&self.directory).args(words.split(' '))).map(drop)
    }

    fn certificate(&self, name: &str, subject: &str, names: Option<&str>) -> Result<()> {
        let names = names.map(|names| format!("subjectAltName={names}\n")).unwrap_or_default();
        let path = self.directory.join(format!("{name}.ext"));
        fs::write(&path, format!("extendedKeyUsage=clientAuth,serverAuth\n{names}"))
            .with_context(|| format!("write {}", path.display()))?;
        self.openssl(&format!("req -newkey rsa:2048 -nodes -subj {subject} -keyout {name}.key -out {name}.csr"))?;
        self.openssl(&format!(
            "x509 -req -in {name}.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 3650 -extfile {name}.ext \
             -out {name}.crt"
        ))
    }

    fn kubeconfig(&self, name: &str) -> Result<()> {
        let server = format!("https://{}:6443", network::CONTROL);
        let user = json!({
            "client-certificate": self.file(&format!("{name}.crt")), "client-key": self.file(&format!("{name}.key")),
        });
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{
                "name": "test", "cluster": {"server": server, "certificate-authority": self.file("ca.crt")},
            }],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
        });
        let path = self.directory.join(format!("{name}.conf"));
        fs::write(&path, config.to_string()).with_context(|| format!("write {}", path.display()))
    }
}

/// For the service `kubernetes`: 10.96.0.1 of `10.96.0.0/16`.
fn first_address(network: &str) -> String {
    let base = network.split('/').next().unwrap_or_default();
    base.strip_suffix('0').map_or_else(|| format!("{base}1"), |base| format!("{base}1"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_service_kubernetes_has_the_first_address() {
        assert_eq!(network::SERVICES.map(first_address), ["10.96.0.1", "fd96::1"]);
    }
}
