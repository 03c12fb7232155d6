//! The rows of policy that the kernel has, without the numbers that an agent gives: two agents that want the same have
//! the same.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, ensure};
use wharf_common::policy::PORT_UNKNOWN;
use wharf_tests::Node;

/// A row of a map in readable form.
type Row = BTreeMap<String, String>;

/// What the rows say, a line each, endpoints by their containers' names.
pub(crate) type Rules = BTreeSet<String>;

/// The rows of the kernel's maps, all of which must be of use, and must be those that the agent tells of.
pub(crate) fn observe(node: &Node) -> Result<Rules> {
    let map = |name: &str| node.ask(async |client| client.map(name).await).map(|dump| dump.rows);
    let endpoints = node.endpoints()?;
    let mut names: BTreeMap<String, String> = BTreeMap::new();
    for e in &endpoints {
        let addresses = [e.ipv4.map(|ip| format!("{ip}/32")), e.ipv6.map(|ip| format!("{ip}/128"))];
        let families = ["IPv4", "IPv6"].map(|family| format!("{family} of {}", e.container_id));
        names.extend(addresses.into_iter().zip(families).filter_map(|(ip, name)| Some((ip?, name))));
    }
    let (peers, ports, cells, sets) =
        (map("IPCACHE")?, map("POLICY_PORTS")?, map("POLICY_CELLS")?, map("POLICY_SETS")?);
    let mut rules = Rules::new();
    let mut peers_of: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for row in &peers {
        let prefix = cell(row, "prefix")?;
        let peer = names.get(prefix).cloned().unwrap_or_else(|| prefix.to_owned());
        rules.insert(format!("peer {peer}"));
        peers_of.entry(cell(row, "class")?).or_default().insert(peer);
    }
    let mut ports_of: BTreeMap<(&str, &str), BTreeSet<String>> = BTreeMap::new();
    for row in &ports {
        let of = format!("{}/{}", cell(row, "protocol")?, cell(row, "ports")?);
        ports_of.entry((cell(row, "set")?, cell(row, "class")?)).or_default().insert(of);
    }
    let [any, unknown] = ["any", "unknown"].map(|ports| BTreeSet::from([ports.to_owned()]));
    let mut rows_of: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    let mut verdicts_of: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for row in &cells {
        let (set, class, port) = (cell(row, "set")?, cell(row, "class")?, cell(row, "port_class")?);
        let peers = if class == "0" { Some(&any) } else { peers_of.get(class) };
        let peers = peers.with_context(|| format!("a row of peer class {class}, which no address has: {row:?}"))?;
        let ports = match port {
            "0" => Some(&any),
            port if port == PORT_UNKNOWN.to_string() => Some(&unknown),
            port => ports_of.get(&(set, port)),
        };
        let ports = ports.with_context(|| format!("a row of port class {port}, which no port has: {row:?}"))?;
        let hits = ["admin", "rest"].map(|tier| cell(row, tier)).into_iter().collect::<Result<Vec<_>>>()?;
        let told = hits.iter().map(|hit| without_number(hit)).collect::<Vec<_>>().join("; ");
        rows_of.entry(set).or_default().insert(format!("{peers:?} {ports:?}: {told}"));
        verdicts_of.entry(set).or_default().extend(
            hits.iter()
                .filter_map(|hit| hit.split(' ').next())
                .filter(|verdict| !verdict.is_empty())
                .map(str::to_owned),
        );
    }
    let mut used = BTreeSet::from(["0"]);
    for row in &sets {
        let id = cell(row, "endpoint")?;
        let of = endpoints.iter().find(|e| e.id.to_string() == id);
        let of = of.with_context(|| format!("rule sets of endpoint {id}, which is not there: {row:?}"))?;
        let told = node.ask(async |client| client.endpoint_policy(&of.id.to_string()).await)?;
        for (direction, told) in [("ingress", told.ingress), ("egress", told.egress)] {
            let set = cell(row, direction)?;
            used.insert(set);
            let rows = rows_of.get(set).cloned().unwrap_or_default();
            rules.extend(rows.into_iter().map(|row| format!("{} {direction} {row}", of.container_id)));
            rules.insert(format!("{} {direction} has {}", of.container_id, if set == "0" { "none" } else { "rules" }));
            let mut verdicts = verdicts_of.get(set).cloned().unwrap_or_default();
            // Of a redirect, without its port.
            let verdict = |verdict: &str| verdict.split(' ').next().unwrap_or_default().to_owned();
            let mut told: Vec<String> = told.rows.into_iter().map(|row| verdict(&row.verdict)).collect();
            verdicts.sort();
            told.sort();
            ensure!(verdicts == told, "{} {direction}: rows {verdicts:?}, told {told:?}", of.container_id);
        }
    }
    let with_rows = ports.iter().chain(&cells).map(|row| cell(row, "set")).collect::<Result<BTreeSet<_>>>()?;
    let leaked: Vec<_> = with_rows.difference(&used).collect();
    ensure!(leaked.is_empty(), "rows of rule sets {leaked:?}, which no endpoint has");
    let list = node.ask(async |client| client.policies().await)?;
    ensure!(list.problem.is_none() && list.realized == list.revision, "not in force: {list:?}");
    let told = [list.rows.peers, list.rows.ports, list.rows.cells];
    let there = [peers.len() as u64, ports.len() as u64, cells.len() as u64];
    ensure!(there == told, "peers, ports and cells: the kernel has {there:?}, the agent tells of {told:?}");
    Ok(rules)
}

fn cell<'r>(row: &'r Row, column: &str) -> Result<&'r str> {
    row.get(column).map(String::as_str).with_context(|| format!("no column {column}: {row:?}"))
}

/// `deny rule 7 rank 3` without the rule's number.
fn without_number(hit: &str) -> String {
    let words: Vec<&str> = hit.split(' ').collect();
    match words[..] {
        [ruling, "rule", rule, "rank", rank] => {
            format!("{ruling} rank {rank}{}", if rule == "0" { " of none" } else { "" })
        }
        _ => hit.to_owned(),
    }
}
