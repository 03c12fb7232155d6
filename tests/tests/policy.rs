//! Network policy, as an operator writes it and packets meet it.

use std::{
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};
use wharf_tests::{
    Attached, Node, NodeConfig, Sandbox,
    echo::{self, EchoServer},
    scenario,
};

/// A database that only the front end may reach.
const DB: &str = "
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: db}
spec:
  podSelector: {matchLabels: {app: db}}
  policyTypes: [Ingress]
  ingress:
  - from:
    - podSelector: {matchLabels: {app: web}}
";

/// A container with labels.
struct Pod {
    sandbox: Sandbox,
    end: Attached,
}

impl Pod {
    fn start(node: &Node, name: &str, labels: Value) -> Result<Self> {
        let sandbox = node.sandbox(name)?;
        let end =
            node.attach_with(&sandbox, "eth0", &node.netconf().with("args", json!({"cni": {"labels": labels}})))?;
        Ok(Self { sandbox, end })
    }

    /// Whether a connection is made, to an address that answers.
    fn reaches(&self, to: SocketAddr) -> Result<bool> {
        let connect = || TcpStream::connect_timeout(&to, Duration::from_secs(1));
        match self.sandbox.space()?.run(connect)? {
            Ok(_) => Ok(true),
            Err(e) if e.kind() == std::io::ErrorKind::TimedOut => Ok(false),
            Err(e) => bail!("connect {to}: {e}"),
        }
    }
}

fn label(key: &str, value: &str) -> Value {
    json!([{"key": key, "value": value}])
}

fn import(node: &Node, text: &str) -> Result<Value> {
    let body = json!({"file": "test.yaml", "text": text}).to_string();
    let answer = node.http("PUT", "/v1/policy", Some(&body))?;
    ensure!(answer.status == 200, "{}: {}", answer.status, String::from_utf8_lossy(&answer.body));
    Ok(serde_json::from_slice(&answer.body)?)
}

#[test]
fn only_the_front_end_reaches_the_database() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let web = Pod::start(node, "web", label("app", "web"))?;
        let other = Pod::start(node, "other", label("app", "other"))?;
        let db = Pod::start(node, "db", label("app", "db"))?;
        let echo = EchoServer::start(db.sandbox.space()?)?;
        for address in db.end.both()? {
            ensure!(other.reaches(echo.tcp_at(address))?, "before there is a policy");
        }
        import(node, DB)?;
        for address in db.end.both()? {
            let to = echo.tcp_at(address);
            ensure!(web.reaches(to)?, "the front end to {to}");
            ensure!(!other.reaches(to)?, "another one to {to}");
            echo::tcp(node.space(), to, 1_000).context("the node's own probe")?;
        }
        let dropped = node.packets(node.endpoint(&other.end)?.id, "egress", "peer-policy-denied")?;
        ensure!(dropped > 0, "counted: {dropped}");
        let answer = node.http("DELETE", "/v1/policy?all=true", None)?;
        ensure!(answer.status == 200, "{}", String::from_utf8_lossy(&answer.body));
        for address in db.end.both()? {
            ensure!(other.reaches(echo.tcp_at(address))?, "without a policy again");
        }
        [web, other, db].iter().try_for_each(|pod| node.detach(&pod.end))
    })
}
