//! Network policy, as an operator writes it and packets meet it.

mod change;
mod facts;
mod flood;
mod gaps;
mod headers;
mod packets;
mod pods;
mod published;
mod services;
mod settings;
mod truth;

use anyhow::{Context as _, Result, ensure};
use wharf_tests::{
    NodeConfig,
    echo::{self, EchoServer},
    scenario,
};

use crate::pods::{Ask, Pod, forget, import};

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

#[test]
fn only_the_front_end_reaches_the_database() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let web = Pod::container(node, "web", "web")?;
        let other = Pod::container(node, "other", "other")?;
        let db = Pod::container(node, "db", "db")?;
        let echo = EchoServer::start(db.sandbox.space()?)?;
        for address in db.end.both()? {
            ensure!(other.reaches(address, Ask::Tcp(80))?, "before there is a policy");
        }
        import(node, DB)?;
        for address in db.end.both()? {
            let to = echo.tcp_at(address);
            echo::tcp(web.space()?, to, 1_000).context("the front end")?;
            echo::tcp(node.space(), to, 1_000).context("the node's own probe")?;
            ensure!(!other.reaches(address, Ask::Tcp(to.port()))?, "another one to {to}");
        }
        let dropped = node.packets(node.endpoint(&other.end)?.id, "egress", "peer-policy-denied")?;
        ensure!(dropped > 0, "counted: {dropped}");
        forget(node)?;
        for address in db.end.both()? {
            echo::tcp(other.space()?, echo.tcp_at(address), 1_000).context("without a policy again")?;
        }
        [web, other, db].iter().try_for_each(|pod| node.detach(&pod.end))
    })
}
