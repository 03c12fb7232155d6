//! Pods with labels, the policies of a node, and probes.

use std::{
    io::ErrorKind,
    net::{IpAddr, SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};
use wharf_api::{EndpointPatch, PolicyChange, PolicyDeleteQuery, PolicyImport};
use wharf_tests::{Attached, Node, Sandbox, echo, icmp::Ping, space::Space, wait};

/// How long a packet that must not arrive is waited for. TCP repeats its first packet after a second; probes of UDP are
/// repeated, too.
pub(crate) const DENIED: Duration = Duration::from_millis(1_300);

/// A container and its endpoint.
#[derive(Debug)]
pub(crate) struct Pod {
    /// Network namespace.
    pub(crate) sandbox: Sandbox,
    /// Endpoint.
    pub(crate) end: Attached,
}

impl Pod {
    /// A container that is no pod, with the label `app`.
    pub(crate) fn container(node: &Node, name: &str, app: &str) -> Result<Self> {
        Self::of(node, node.sandbox(name)?, app)
    }

    /// As [`Self::container`], in a sandbox that is there already.
    pub(crate) fn of(node: &Node, sandbox: Sandbox, app: &str) -> Result<Self> {
        let labels = json!({"cni": {"labels": [{"key": "app", "value": app}]}});
        let end = node.attach_with(&sandbox, "eth0", &node.netconf().with("args", labels))?;
        answers_every_error(sandbox.space()?)?;
        Ok(Self { sandbox, end })
    }

    /// A pod of a namespace, with labels in the form `k8s:app=web`.
    pub(crate) fn kubernetes(node: &Node, namespace: &str, name: &str, labels: &[&str]) -> Result<Self> {
        let pod = Self::without_labels(node, namespace, name)?;
        let namespace = format!("k8s:io.kubernetes.pod.namespace={namespace}");
        relabel(node, &pod.end, &[labels, &[&namespace]].concat())?;
        Ok(pod)
    }

    /// A pod of a namespace, as a runtime attaches it.
    pub(crate) fn without_labels(node: &Node, namespace: &str, name: &str) -> Result<Self> {
        let (sandbox, conf) = (node.sandbox(&format!("{namespace}-{name}"))?, node.netconf());
        let arguments = format!("IgnoreUnknown=1;K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={name}");
        let add = node.cni("ADD").of(sandbox.name(), sandbox.path(), "eth0").conf(&conf).env("CNI_ARGS", &arguments);
        let (container, netns) = (sandbox.name().to_owned(), sandbox.path().to_owned());
        let end = Attached { container, netns, ifname: "eth0".to_owned(), conf, result: add.run()?.result()? };
        answers_every_error(sandbox.space()?)?;
        Ok(Self { sandbox, end })
    }

    /// Its network namespace.
    pub(crate) fn space(&self) -> Result<&Space> {
        self.sandbox.space()
    }

    /// Whether what is asked for is answered, by a refusal, too.
    pub(crate) fn reaches(&self, to: IpAddr, ask: Ask) -> Result<bool> {
        ask.is_answered(self.space()?, to, DENIED)
    }

    /// A TCP connection.
    pub(crate) fn connect(&self, to: SocketAddr) -> Result<TcpStream> {
        let stream = self.space()?.run(|| TcpStream::connect_timeout(&to, wait::PATIENCE))?;
        stream.with_context(|| format!("connect {to}"))
    }
}

/// Gives an endpoint other labels.
pub(crate) fn relabel(node: &Node, end: &Attached, labels: &[&str]) -> Result<()> {
    let labels = Some(labels.iter().map(|label| (*label).to_owned()).collect());
    change(node, end, &EndpointPatch { labels, ..EndpointPatch::default() })
}

pub(crate) fn change(node: &Node, end: &Attached, patch: &EndpointPatch) -> Result<()> {
    node.ask(async |client| client.patch_endpoint(&end.id(), patch).await).map(drop)
}

/// A probe of a port that nobody has is answered by an ICMP error, of which a host sends but a few a second.
pub(crate) fn answers_every_error(space: &Space) -> Result<()> {
    for setting in ["ipv4/icmp_ratelimit", "ipv6/icmp/ratelimit"] {
        space.run(|| std::fs::write(format!("/proc/sys/net/{setting}"), "0"))?.with_context(|| setting)?;
    }
    Ok(())
}

/// Imports policies.
pub(crate) fn import(node: &Node, text: &str) -> Result<PolicyChange> {
    let import = PolicyImport { file: "test.yaml".to_owned(), text: text.to_owned() };
    node.ask(async |client| client.import_policy(&import).await).with_context(|| text.to_owned())
}

/// Deletes every policy that was imported.
pub(crate) fn forget(node: &Node) -> Result<()> {
    let all = PolicyDeleteQuery { all: Some(true), ..PolicyDeleteQuery::default() };
    node.ask(async |client| client.delete_policy(&all).await).map(drop)
}

/// A document of `networking.k8s.io/v1` in the namespace `default`, from its `spec`.
pub(crate) fn network_policy(name: &str, spec: &str) -> String {
    document("networking.k8s.io/v1", "NetworkPolicy", &format!("{{name: {name}}}"), spec)
}

/// A document, to be followed by others.
pub(crate) fn document(version: &str, kind: &str, metadata: &str, spec: &str) -> String {
    format!("apiVersion: {version}\nkind: {kind}\nmetadata: {metadata}\nspec: {spec}\n---\n")
}

/// What a probe asks for. The receiver needs no server: that it refuses shows as well that packets go there and back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ask {
    Tcp(u16),
    Udp(u16),
    Echo,
}

impl Ask {
    /// From its text: `tcp 80`.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        match text.split_whitespace().collect::<Vec<_>>()[..] {
            ["tcp", port] => Ok(Self::Tcp(port.parse()?)),
            ["udp", port] => Ok(Self::Udp(port.parse()?)),
            ["echo"] => Ok(Self::Echo),
            _ => bail!("{text:?} is no probe"),
        }
    }

    /// Whether an answer comes back in time.
    pub(crate) fn is_answered(self, from: &Space, to: IpAddr, patience: Duration) -> Result<bool> {
        let of = |result: std::io::Result<()>| match result {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == ErrorKind::ConnectionRefused => Ok(true),
            Err(e) if matches!(e.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock) => Ok(false),
            Err(e) => bail!("{self:?} to {to}: {e}"),
        };
        match self {
            Self::Tcp(port) => {
                of(from.run(|| TcpStream::connect_timeout(&SocketAddr::new(to, port), patience))?.map(drop))
            }
            Self::Udp(port) => {
                let (socket, end) = (echo::udp_client(from, SocketAddr::new(to, port))?, Instant::now() + patience);
                socket.set_read_timeout(Some(Duration::from_millis(200)))?;
                while Instant::now() < end {
                    if of(socket.send(b"ahoy").and_then(|_| socket.recv(&mut [0; 16])).map(drop))? {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
            // It has a patience of its own.
            Self::Echo => Ok(Ping { to, count: 1, payload: 56 }.run(from)?.answered == 1),
        }
    }
}

/// Packets that the rules of an endpoint's ingress with this verdict decided about.
pub(crate) fn judged(node: &Node, end: &Attached, verdict: &str) -> Result<u64> {
    let policy = node.ask(async |client| client.endpoint_policy(&end.id()).await)?;
    Ok(policy.ingress.rows.iter().filter(|row| row.verdict == verdict).map(|row| row.packets).sum())
}

/// Changes settings of the running agent.
pub(crate) fn patch_config(node: &Node, patch: &Value) -> Result<()> {
    let answer = node.http("PATCH", "/v1/config", Some(&patch.to_string()))?;
    if answer.status != 200 {
        bail!("{}: {}", answer.status, answer.text());
    }
    Ok(())
}
