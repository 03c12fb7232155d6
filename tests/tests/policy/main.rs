//! Network policy, as an operator writes it and packets meet it.

mod busy;
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
use serde_json::Value;
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
        let receiver = node.endpoint(&db.end)?.id.to_string();
        let listed = node.wharf(&["bpf", "metrics", "list", "--dropped", "--endpoint", &receiver])?;
        let pointed_out = listed.stderr.contains(&format!("`wharf bpf policy get {receiver}`"));
        ensure!(listed.code() == 0 && pointed_out, "{}", listed.describe());
        let rules: Value =
            serde_json::from_str(&node.wharf(&["bpf", "policy", "get", &receiver, "-o", "json"])?.ok()?)?;
        let denied = rules["ingress"]["rows"].as_array().into_iter().flatten();
        let denied: u64 = denied.filter(|row| row["verdict"] == "deny").filter_map(|row| row["packets"].as_u64()).sum();
        ensure!(denied >= dropped, "{denied} of {dropped} drops are counted by the receiver's rules");
        forget(node)?;
        for address in db.end.both()? {
            echo::tcp(other.space()?, echo.tcp_at(address), 1_000).context("without a policy again")?;
        }
        [web, other, db].iter().try_for_each(|pod| node.detach(&pod.end))
    })
}
