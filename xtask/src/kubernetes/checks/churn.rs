//! Random kills while pods, labels and policies change.

use std::{
    hash::{BuildHasher, RandomState},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;

use super::{
    super::{
        cluster::Cluster,
        node::Node,
        place::{until, until_right},
    },
    basic::{self, LIMIT, NAMESPACE, WEB},
    connectivity, policy, rows, samples,
};

const BETWEEN: Duration = Duration::from_secs(4);
const SETTLE: Duration = Duration::from_secs(120);

/// API server, daemons of a node, processes in Wharf's pods.
const VICTIMS: [&str; 5] = [API_SERVER, "kubelet", "containerd", "wharf-agent", "wharf-kube"];
const API_SERVER: &str = "kube-apiserver";

/// Numbers that look random (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % u64::try_from(limit.max(1)).unwrap_or(1)).unwrap_or_default()
    }

    fn choose<'a, T>(&mut self, list: &'a [T]) -> Result<&'a T> {
        list.get(self.below(list.len())).context("choose from an empty list")
    }
}

pub(super) fn churn(cluster: &Cluster<'_>) -> Result<String> {
    let seed = RandomState::new().hash_one(0_u8) | 1;
    let time = cluster.churn;
    let ends = AtomicBool::new(false);
    let (changes, kills) = thread::scope(|scope| {
        let changes = scope.spawn(|| changes(cluster, &mut Random(seed), &ends));
        let kills = kills(cluster, &mut Random(seed.rotate_left(32) | 1), time);
        ends.store(true, Ordering::Relaxed);
        let changes = changes.join().unwrap_or_else(|_| bail!("the thread of the changes died"));
        (changes, kills)
    });
    let (changes, kills) = (changes?, kills?);
    settle(cluster).with_context(|| format!("after {changes} changes and {kills} kills, seed {seed}"))?;
    Ok(format!("{changes} changes, {kills} kills; rows and policy right, seed {seed}"))
}

fn kills(cluster: &Cluster<'_>, random: &mut Random, time: Duration) -> Result<usize> {
    let started = Instant::now();
    let mut count = 0;
    while started.elapsed() < time {
        let node = random.choose(&cluster.nodes)?;
        let victim = *random.choose(&VICTIMS)?;
        if victim == API_SERVER {
            cluster.control.place.kill(victim)?;
            cluster.control.start(victim, &cluster.api)?;
        } else {
            kill(node, victim)?;
        }
        count += 1;
        thread::sleep(BETWEEN);
    }
    Ok(count)
}

fn kill(node: &Node, victim: &str) -> Result<()> {
    if ["kubelet", "containerd"].contains(&victim) {
        node.place.kill(victim)?;
        return node.start(victim);
    }
    // The kubelet restarts the container.
    let script = r#"for file in /proc/[0-9]*/exe; do
        case $(readlink "$file") in */"$1") pid=${file#/proc/}; kill -9 "${pid%/exe}" ;; esac
    done; true"#;
    node.place.output("sh", &["-c", script, "kill", victim]).map(drop)
}

/// Changes objects until the end. Errors of the API are ignored: the final state counts.
fn changes(cluster: &Cluster<'_>, random: &mut Random, ends: &AtomicBool) -> Result<usize> {
    let api = &cluster.api;
    let deny = samples::policy(NAMESPACE, "churn", &json!({"podSelector": {"matchLabels": {"churn": "denied"}}}));
    let mut count = 0;
    while !ends.load(Ordering::Relaxed) {
        let pods = basic::pods(cluster).unwrap_or_default();
        let pod = pods.get(random.below(pods.len())).map(|pod| pod.name.clone()).unwrap_or_default();
        let name = format!("deployment/{WEB}");
        let result = match random.below(5) {
            0 => api.run(&["delete", "pod", &pod, "--wait=false", "--ignore-not-found"]).map(drop),
            1 => {
                let replicas = format!("--replicas={}", (2 + random.below(3)) * cluster.nodes.len());
                api.run(&["scale", &name, &replicas]).map(drop)
            }
            2 => api.run(&["label", "pod", &pod, "--overwrite", "churn=denied"]).map(drop),
            3 => api.apply(std::slice::from_ref(&deny)),
            _ => api.run(&["delete", "networkpolicy", "churn", "--ignore-not-found"]).map(drop),
        };
        drop(result);
        count += 1;
    }
    Ok(count)
}

/// Nodes and packets agree with the API.
fn settle(cluster: &Cluster<'_>) -> Result<()> {
    let api = &cluster.api;
    api.run(&["delete", "networkpolicy", "churn", "--ignore-not-found"])?;
    for node in &cluster.nodes {
        until(&format!("{} is ready", node.name()), SETTLE, || cluster.node_is_ready(node.name()).map(Some))?;
    }
    let replicas = basic::replicas(cluster);
    api.run(&["scale", &format!("deployment/{WEB}"), &format!("--replicas={replicas}")])?;
    api.rolled_out(NAMESPACE, &format!("deployment/{WEB}"), LIMIT)?;
    until("the pods of the Deployment", SETTLE, || basic::check_addresses(cluster).map(Some))?;
    until("the rows of all nodes", SETTLE, || rows::agree(cluster).map(Some))?;
    connectivity::all_reach(cluster, &basic::pods(cluster)?)?;
    policy::tables(cluster)?;
    for node in &cluster.nodes {
        until_right(&format!("the audit of {}", node.name()), SETTLE, || {
            let audit = cluster.wharf(node, &["audit"])?;
            Ok(super::super::api::elements(&audit, "/findings").iter().map(ToString::to_string).collect())
        })?;
        let network = node.place.output("find", &["/etc/cni/net.d", "-name", "10-wharf.conflist"])?;
        ensure!(Path::new(network.trim()).is_absolute(), "{} has no network", node.name());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_numbers_repeat_with_their_seed_and_stay_below_the_limit() -> Result<()> {
        let numbers = |seed| {
            let mut random = Random(seed);
            (0..100).map(|_| random.below(7)).collect::<Vec<_>>()
        };
        assert_eq!(numbers(3), numbers(3));
        assert_ne!(numbers(3), numbers(5));
        assert!(numbers(9).iter().all(|number| *number < 7));
        assert_eq!(Random(1).below(0), 0);
        assert!(Random(1).choose::<u8>(&[]).is_err());
        Ok(())
    }
}
