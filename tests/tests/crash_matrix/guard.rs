//! Policies that are in force on a node, floods that they keep out, and what is known of the rows that follow from
//! them.

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use wharf_tests::{Attached, Node, Sandbox, wait};

use crate::{
    flood::{Door, Flood, PORT},
    pods::{Pod, forget, import, network_policy, relabel},
    rules::{self, Rules},
};

/// Three containers. The database accepts what comes from the front end alone; somebody else floods it, and the
/// container that operations are about floods the witness that echoes, which it may not reach there.
pub(crate) struct Guard {
    web: Pod,
    other: Pod,
    db: Pod,
    doors: [Door; 2],
    floods: [Flood; 2],
    base: String,
    /// The rows that followed from what is wanted when nothing was interrupted, by what was wanted.
    known: BTreeMap<String, Rules>,
}

/// A policy with many rows, about all three kinds of containers.
pub(crate) fn more() -> String {
    network_policy(
        "more",
        "{podSelector: {matchExpressions: [{key: app, operator: In, values: [db, web]}]}, policyTypes: [Ingress, Egress],
          ingress: [{from: [{podSelector: {matchLabels: {app: web}}}, {ipBlock: {cidr: 198.51.100.0/24, except: [198.51.100.8/30]}}],
            ports: [{port: 5432}, {protocol: UDP, port: 2000, endPort: 2005}]}],
          egress: [{to: [{podSelector: {matchLabels: {app: db}}}]}, {to: [{ipBlock: {cidr: '2001:db8::/32'}}], ports: [{port: 443}]}]}",
    )
}

/// The database's policy, another one than at first.
pub(crate) fn changed() -> String {
    network_policy(
        "db",
        "{podSelector: {matchLabels: {app: db}}, ingress: [{from: [{podSelector: {matchLabels: {app: web}}}], ports: [{port: 5432}]},
          {from: [{ipBlock: {cidr: 192.0.2.0/24, except: [192.0.2.64/26]}}], ports: [{protocol: UDP, port: 1000, endPort: 1010}]}]}",
    )
}

/// The database accepts what comes from namespaces with a label.
pub(crate) fn of_teams() -> String {
    network_policy(
        "teams",
        "{podSelector: {matchLabels: {app: db}}, ingress: [{from: [{namespaceSelector: {matchLabels: {team: a}}}], ports: [{port: 6000}]}]}",
    )
}

/// All but the door.
fn base(gateways: &[std::net::IpAddr; 2]) -> String {
    let all_but_door = [(1, PORT - 1), (PORT + 1, u16::MAX)]
        .map(|(first, last)| {
            ["TCP", "UDP"].map(|l4| format!("{{protocol: {l4}, port: {first}, endPort: {last}}}")).join(", ")
        })
        .join(", ");
    let [v4, v6] = gateways;
    let db = "{podSelector: {matchLabels: {app: db}}, ingress: [{from: [{podSelector: {matchLabels: {app: web}}}]}]}";
    let x = format!(
        "{{podSelector: {{matchLabels: {{app: x}}}}, policyTypes: [Ingress, Egress],
          ingress: [{{from: [{{podSelector: {{matchLabels: {{app: web}}}}}}]}}],
          egress: [{{ports: [{all_but_door}]}}, {{to: [{{ipBlock: {{cidr: {v4}/32}}}}, {{ipBlock: {{cidr: '{v6}/128'}}}}]}}]}}"
    );
    network_policy("db", db) + &network_policy("x", &x)
}

impl Guard {
    /// `b`: the witness that echoes; `x`: the container that operations are about, not attached yet.
    pub(crate) fn new(node: &Node, b: &(Sandbox, Attached), x: &Sandbox) -> Result<Self> {
        let (web, other) = (Pod::container(node, "web", "web")?, Pod::container(node, "other", "other")?);
        let db = Pod::container(node, "db", "db")?;
        let base = base(&db.end.gateways()?);
        import(node, &base)?;
        let doors = [Door::open(db.space()?)?, Door::open(b.0.space()?)?];
        let floods = [Flood::start(other.space()?, &db.end.both()?)?, Flood::start(x.space()?, &b.1.both()?)?];
        Ok(Self { web, other, db, doors, floods, base, known: BTreeMap::new() })
    }

    /// Its endpoints.
    pub(crate) fn ends(&self) -> [&Attached; 3] {
        [&self.web.end, &self.other.end, &self.db.end]
    }

    /// The front end.
    pub(crate) fn web(&self) -> &Attached {
        &self.web.end
    }

    /// What is wanted at first, and some more.
    pub(crate) fn reset(&self, node: &Node, more: &[String]) -> Result<()> {
        let there = node.ask(async |client| client.namespaces().await)?;
        if !there.is_empty() {
            node.wharf(&["namespace", "delete", "default"])?.ok()?;
        }
        import(node, &(self.base.clone() + &more.concat()))?;
        for name in ["more", "teams"] {
            let wanted = more.iter().any(|text| text.contains(&format!("name: {name}}}")));
            let list = node.ask(async |client| client.policies().await)?;
            if !wanted && list.policies.iter().any(|policy| policy.name == name) {
                node.wharf(&["policy", "delete", "NetworkPolicy", name])?.ok()?;
            }
        }
        relabel(node, &self.web.end, &["cni:app=web"])
    }

    /// The floods go on, with an agent or without, and nobody has entered.
    pub(crate) fn holds(&self) -> Result<()> {
        self.floods.iter().try_for_each(|flood| flood.await_more(20)).context("the flood")?;
        let entered = self.doors.each_ref().map(Door::entered);
        ensure!(entered == [0, 0], "entered at the database and at the witness: {entered:?}");
        Ok(())
    }

    /// The kernel has the rows that follow from what is wanted, and what is wanted is known. What was not interrupted
    /// makes it known.
    pub(crate) fn rules_follow(&mut self, node: &Node, is_whole: bool) -> Result<()> {
        self.holds()?;
        let wanted = wanted(node)?;
        let rules = rules::observe(node).with_context(|| format!("wanted: {wanted}"))?;
        match self.known.get(&wanted) {
            Some(known) => {
                let (lost, new): (Vec<_>, Vec<_>) =
                    (known.difference(&rules).collect(), rules.difference(known).collect());
                ensure!(
                    lost.is_empty() && new.is_empty(),
                    "wanted: {wanted}\nrows that miss: {lost:#?}\nrows too many: {new:#?}"
                );
            }
            None if is_whole => drop(self.known.insert(wanted, rules)),
            None => anyhow::bail!("neither what was wanted before nor what is wanted after: {wanted}"),
        }
        Ok(())
    }

    /// Lets the floods in, and takes all of it away.
    pub(crate) fn end(self, node: &Node) -> Result<()> {
        self.holds()?;
        forget(node)?;
        wait::until("the flood to enter", || Ok((self.doors[0].entered() > 0).then_some(())))?;
        ensure!(self.known.len() > 1, "only {:?} was wanted", self.known.keys());
        for flood in self.floods {
            flood.stop()?;
        }
        for door in self.doors {
            door.close()?;
        }
        [&self.web, &self.other, &self.db].iter().try_for_each(|pod| node.detach(&pod.end))
    }
}

/// Labels of `x` that a policy selects, as ADD takes them.
pub(crate) fn labels_of_x() -> serde_json::Value {
    json!({"cni": {"labels": [{"key": "app", "value": "x"}]}})
}

/// A file for the operator's CLI.
pub(crate) fn file(node: &Node, text: &str) -> Result<PathBuf> {
    let path = node.dirs().root.join("policy.yaml");
    std::fs::write(&path, text).context("write policies")?;
    Ok(path)
}

/// Policies, labels of namespaces and endpoints with their labels, as the agent tells them.
fn wanted(node: &Node) -> Result<String> {
    let list = node.ask(async |client| client.policies().await)?;
    let policies: Vec<_> =
        list.policies.iter().map(|p| format!("{} {}/{}", p.name, p.ingress_rules, p.egress_rules)).collect();
    let namespaces = node.ask(async |client| client.namespaces().await)?;
    // Of one whose delete waits for another try the link is gone, and with it its rows.
    let mut there = node.endpoints()?;
    there.retain(|e| e.state != wharf_api::EndpointState::Disconnecting);
    let mut endpoints: Vec<_> = there.iter().map(|e| format!("{} {:?}", e.container_id, e.labels)).collect();
    endpoints.sort();
    Ok(format!("{policies:?} {:?} {endpoints:?}", namespaces.iter().map(|n| &n.labels).collect::<Vec<_>>()))
}
