//! Times that the documentation promises: until policy knows a new address of the node, and what a CHECK costs.

use std::{
    net::Ipv4Addr,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use aya::maps::{LpmTrie, Map, MapData, lpm_trie::Key};
use serde_json::Value;
use tokio::task::JoinSet;
use wharf_common::{EndpointKey, PeerRow, map, policy::IDENTITY_NODE};

use super::{
    churn::ms,
    findings::{Better, Group, Mark, Part},
    plugin::Plugin,
    policy::{import, open},
    stats::p99,
};
use crate::{Node, NodeConfig, Sandbox, process::ip, wait::PATIENCE};

/// Label of the container that has a policy.
const APP: &str = "times";
/// A policy that is about it.
const POLICY: &str = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: times}\nspec: {podSelector: \
                      {matchLabels: {app: times}}, policyTypes: [Egress], egress: [{}]}\n";
/// How often the table is read while a row is waited for.
const POLL: Duration = Duration::from_micros(200);
/// Addresses that the node gets: TEST-NET-1 (RFC 5737).
const ADDRESSES: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 0);
/// The longest that a new address may take, milliseconds (docs/policy.md).
const ADDRESS_MS: f64 = 100.0;
/// The longest that a CHECK may take in the agent, milliseconds.
const CHECK_MS: f64 = 4.0;
/// The longest that a hundred CHECKs at once may take, milliseconds.
const CHECKS_MS: f64 = 300.0;

/// `samples` of each time; `endpoints` are checked at once.
///
/// # Errors
/// When an ADD, a CHECK or a DEL fails, or an address is not known in time.
pub fn measure(agent: &NodeConfig, samples: usize, endpoints: usize) -> Result<Part> {
    let plugin = Plugin::wharf(agent)?;
    plugin.warm_up()?;
    let mut adds = Vec::new();
    let mut members: Vec<(Sandbox, Value)> = Vec::new();
    for sandbox in plugin.sandboxes("times", endpoints)? {
        plugin.settle()?;
        let (took, added) = plugin.add_labelled(&sandbox, APP)?;
        adds.push(ms(took));
        members.push((sandbox, added));
    }
    let node = plugin.node().context("wharf's node")?;
    let (checks, at_once) = checks(node, samples)?;
    let addresses = addresses(node, samples)?;
    for (sandbox, added) in &members {
        plugin.del(sandbox, added)?;
    }
    drop(members);
    plugin.finish()?;

    let worst = |samples: &[f64]| p99(samples).context("no samples");
    let (address_p99, check_p99) = (worst(&addresses)?, worst(&checks)?);
    let marks = vec![
        mark("a new address of the node in IPCACHE: 99 of 100 within 100 ms", address_p99, ADDRESS_MS),
        mark("CHECK in the agent: 99 of 100 within 4 ms", check_p99, CHECK_MS),
        mark("100 CHECKs at once: all within 0.3 s", worst(&at_once)?, CHECKS_MS),
    ];
    let mut known = Group::new("until a new address of the node is in IPCACHE", "ms", Better::Lower);
    known.add("ip addr add", addresses)?;
    known.note(format!("99 of 100 within {address_p99:.2} ms; the start of `ip` is included"));
    let mut single = Group::new("CHECK in the agent, one at a time", "ms", Better::Lower);
    single.add("CHECK (a request to the agent)", checks)?;
    single.add("ADD (the plugin)", adds)?;
    single.note(format!("99 of 100 CHECKs within {check_p99:.2} ms"));
    let mut many = Group::new("CHECKs of all endpoints at once", "ms", Better::Lower);
    many.add("all of them", at_once)?;
    many.note(format!("{endpoints} endpoints"));
    Ok((vec![known, single, many], marks))
}

fn mark(target: &str, measured: f64, limit: f64) -> Mark {
    Mark::judge(target, "ms", Better::Lower, measured, limit)
}

/// Milliseconds of `samples` CHECKs one after the other, and of [`ROUNDS`] times one of each endpoint at once.
fn checks(node: &Node, samples: usize) -> Result<(Vec<f64>, Vec<f64>)> {
    let ids: Vec<String> = node.endpoints()?.iter().map(|endpoint| endpoint.id.to_string()).collect();
    let (mut single, mut many) = (Vec::new(), Vec::new());
    for id in ids.iter().cycle().take(samples) {
        let begin = Instant::now();
        let health = node.ask(async |client| client.endpoint_health(id).await)?;
        single.push(ms(begin.elapsed()));
        ensure!(health.findings.is_empty(), "endpoint {id} is not well: {health:?}");
    }
    for _ in 0..ROUNDS {
        let begin = Instant::now();
        let answered = node.ask(async |client| {
            let mut asked = JoinSet::new();
            for id in ids.clone() {
                let client = client.clone();
                asked.spawn(async move { client.endpoint_health(&id).await });
            }
            let mut answered = 0;
            // A task that panicked has no answer.
            while let Some(Ok(answer)) = asked.join_next().await {
                answer?;
                answered += 1;
            }
            Ok(answered)
        })?;
        many.push(ms(begin.elapsed()));
        ensure!(answered == ids.len(), "{answered} of {} CHECKs were answered", ids.len());
    }
    Ok((single, many))
}

/// Rounds of CHECKs at once.
const ROUNDS: usize = 3;

/// Milliseconds from before `ip addr add` until the address has the row of the node.
fn addresses(node: &Node, samples: usize) -> Result<Vec<f64>> {
    import(node, POLICY.to_owned())?;
    ip(node.space(), "link set lo up")?;
    let peers: LpmTrie<MapData, EndpointKey, PeerRow> = Map::LpmTrie(open(node, map::IPCACHE)?).try_into()?;
    let mut times = Vec::new();
    for last in 1..=samples {
        let last = u8::try_from(last).context("more samples than addresses")?;
        let [a, b, c, _] = ADDRESSES.octets();
        let (address, key) = (Ipv4Addr::new(a, b, c, last), Key::new(128, EndpointKey::v4([a, b, c, last])));
        let is_known = || peers.get(&key, 0).is_ok_and(|row| row.identity == IDENTITY_NODE);
        ensure!(!is_known(), "{address} is the node's before it is added");
        let begin = Instant::now();
        ip(node.space(), &format!("addr add {address}/32 dev lo"))?;
        while !is_known() {
            ensure!(begin.elapsed() < PATIENCE, "{address} is not known to policy after {PATIENCE:?}");
            thread::sleep(POLL);
        }
        times.push(ms(begin.elapsed()));
        ip(node.space(), &format!("addr del {address}/32 dev lo"))?;
    }
    super::policy::forget(node)?;
    Ok(times)
}
