//! Latency from a change of the API to packets.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader},
    process::{Child, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::{
    super::{
        api::{Pod, in_url, text},
        cluster::Cluster,
        network::CONTROL,
        place::said_with,
        probe::now,
    },
    samples,
};

const NAMESPACE: &str = "latency";
const ROUNDS: usize = 50;
const PORT: u16 = 9999;
/// Until a change takes effect.
const LIMIT: Duration = Duration::from_secs(10);
/// Goals, in milliseconds: half of the changes, and 99 of 100.
const GOALS: (f64, f64) = (20.0, 100.0);

/// Times of one kind of change, in milliseconds.
#[derive(Debug, Default)]
struct Times(Vec<f64>);

impl Times {
    /// The nearest rank.
    fn percentile(&self, percent: usize) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let rank = (sorted.len() * percent).div_ceil(100).max(1);
        sorted.get(rank - 1).copied().unwrap_or_default()
    }

    fn text(&self) -> String {
        format!("p50 {:.0} ms, p99 {:.0} ms", self.percentile(50), self.percentile(99))
    }

    fn are_short(&self) -> bool {
        self.percentile(50) <= GOALS.0 && self.percentile(99) <= GOALS.1
    }
}

/// This program in a pod's network namespace; ends with its input.
struct Probe(Child);

impl Drop for Probe {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        drop(self.0.wait());
    }
}

struct Stream {
    _client: Probe,
    changes: Receiver<(bool, u128)>,
}

/// Creates and deletes a NetworkPolicy on all nodes.
pub(super) fn policies(cluster: &Cluster<'_>) -> Result<String> {
    let bench = Bench::make(cluster)?;
    let spec = json!({"podSelector": {"matchLabels": {"role": "server"}}, "policyTypes": ["Ingress"]});
    let policy = samples::policy(NAMESPACE, "deny", &spec).to_string();
    let list = format!("/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies");
    let (mut denied, mut allowed) = (Times::default(), Times::default());
    for _ in 0..ROUNDS {
        let sent = request(cluster, "POST", &list, &policy)?;
        bench.wait(false, sent, &mut denied)?;
        let sent = request(cluster, "DELETE", &format!("{list}/deny"), "")?;
        bench.wait(true, sent, &mut allowed)?;
    }
    bench.end()?;
    judged([&denied, &allowed], format!("on all nodes: dropped {}; passed {}", denied.text(), allowed.text()))
}

/// Changes a label of clients, which the servers' policy selects.
pub(super) fn labels(cluster: &Cluster<'_>) -> Result<String> {
    let bench = Bench::make(cluster)?;
    let from = json!([{"from": [{"podSelector": {"matchLabels": {"friend": "yes"}}}]}]);
    let spec = json!({
        "podSelector": {"matchLabels": {"role": "server"}}, "policyTypes": ["Ingress"], "ingress": from,
    });
    cluster.api.apply(&[samples::policy(NAMESPACE, "friends", &spec)])?;
    bench.wait(false, now(), &mut Times::default())?;
    let (mut denied, mut allowed) = (Times::default(), Times::default());
    for _ in 0..ROUNDS {
        for (word, is_up) in [(json!("yes"), true), (Value::Null, false)] {
            let patch = json!({"metadata": {"labels": {"friend": word}}}).to_string();
            for (stream, client) in bench.streams.iter().zip(&bench.clients) {
                let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/{}", client.name);
                let sent = request(cluster, "PATCH", &path, &patch)?;
                let times = if is_up { &mut allowed } else { &mut denied };
                times.0.push(wait(stream, is_up, sent)?);
            }
        }
    }
    bench.end()?;
    judged([&denied, &allowed], format!("allowed {}; denied {}", allowed.text(), denied.text()))
}

fn judged(all: [&Times; 2], text: String) -> Result<String> {
    let (half, most) = GOALS;
    ensure!(all.iter().all(|times| times.are_short()), "{text}; the goals are p50 {half} ms, p99 {most} ms");
    Ok(text)
}

struct Bench<'a> {
    cluster: &'a Cluster<'a>,
    clients: Vec<Pod>,
    streams: Vec<Stream>,
    _servers: Vec<Probe>,
}

impl<'a> Bench<'a> {
    /// A server on each node, its client on the next.
    fn make(cluster: &'a Cluster<'_>) -> Result<Self> {
        let mut objects = vec![samples::namespace(NAMESPACE)];
        let mut next = cluster.nodes.iter().cycle().skip(1);
        for node in &cluster.nodes {
            let Some(other) = next.next() else { bail!("a cluster without nodes") };
            for (role, node) in [("server", node), ("client", other)] {
                let mut pod = samples::pod(NAMESPACE, &format!("{role}-{}", objects.len() / 2), node.name());
                pod["metadata"]["labels"] = json!({"role": role});
                objects.push(pod);
            }
        }
        cluster.api.apply(&objects)?;
        let namespace = format!("--namespace={NAMESPACE}");
        cluster.api.run(&["wait", &namespace, "--for=condition=Ready", "pods", "--all", "--timeout=60s"])?;
        let sorted = |role: &str| -> Result<Vec<Pod>> {
            let mut pods = cluster.api.pods(NAMESPACE, role)?;
            pods.sort_by(|a, b| a.name.cmp(&b.name));
            Ok(pods)
        };
        let (servers, clients) = (sorted("role=server")?, sorted("role=client")?);
        let answering = servers
            .iter()
            .map(|pod| probe(cluster, pod, &["--port", &PORT.to_string()]))
            .collect::<Result<Vec<_>>>()?;
        // The families alternate.
        let pairs = servers.iter().zip(&clients).zip([0, 1].into_iter().cycle());
        let streams = pairs
            .map(|((server, client), family)| stream(cluster, server, client, family))
            .collect::<Result<Vec<_>>>()?;
        let bench = Self { cluster, clients, streams, _servers: answering };
        bench.wait(true, now(), &mut Times::default())?;
        Ok(bench)
    }

    /// The time until the change is in force on all nodes.
    fn wait(&self, is_up: bool, since: u128, times: &mut Times) -> Result<()> {
        let all: Vec<f64> = self.streams.iter().map(|stream| wait(stream, is_up, since)).collect::<Result<_>>()?;
        times.0.push(all.into_iter().fold(0.0, f64::max));
        Ok(())
    }

    fn end(self) -> Result<()> {
        let cluster = self.cluster;
        drop(self);
        cluster.api.delete(&["namespace", NAMESPACE])
    }
}

/// In milliseconds.
fn wait(stream: &Stream, is_up: bool, since: u128) -> Result<f64> {
    loop {
        let word = if is_up { "answers" } else { "silence" };
        let (found, at) = stream.changes.recv_timeout(LIMIT).with_context(|| format!("wait for {word}"))?;
        if found == is_up {
            let nanoseconds = u32::try_from(at.saturating_sub(since)).unwrap_or(u32::MAX);
            return Ok(f64::from(nanoseconds) / 1e6);
        }
    }
}

fn stream(cluster: &Cluster<'_>, server: &Pod, client: &Pod, family: usize) -> Result<Stream> {
    let address = server.addresses.get(family).or(server.addresses.first()).context("a pod without addresses")?;
    let to = format!("{}:{PORT}", in_url(address));
    let mut client = probe(cluster, client, &["--to", &to])?;
    let output = client.0.stdout.take().context("read the probe's output")?;
    let (sender, changes) = channel();
    thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            let Some((word, at)) = line.split_once(' ') else { continue };
            if let Ok(at) = at.parse()
                && sender.send((word == "up", at)).is_err()
            {
                return;
            }
        }
    });
    Ok(Stream { _client: client, changes })
}

fn probe(cluster: &Cluster<'_>, pod: &Pod, arguments: &[&str]) -> Result<Probe> {
    let node = cluster.node(&pod.node)?;
    let endpoints = cluster.wharf(node, &["endpoint", "list"])?;
    let is_of_pod = |endpoint: &&Value| {
        ["/ipv4", "/ipv6"].iter().any(|field| pod.addresses.iter().any(|address| text(endpoint, field) == address))
    };
    let endpoint = endpoints.as_array().into_iter().flatten().find(is_of_pod);
    let endpoint = endpoint.with_context(|| format!("no endpoint of {}", pod.name))?;
    // The absolute link /var/run does not work outside of the node's root.
    let netns = text(endpoint, "/netns").trim_start_matches("/var");
    let program = std::env::current_exe().context("find this program")?;
    let mut command = cluster.parts.privilege.command(std::path::Path::new("nsenter"), &[]);
    command.arg(format!("--net=/proc/{}/root{netns}", node.pid)).arg("--").arg(program).arg("kubernetes-probe");
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    command.spawn().map(Probe).with_context(|| format!("start a probe in {}", pod.name))
}

/// Returns when curl sent the request. kubectl starts too slowly to measure.
fn request(cluster: &Cluster<'_>, method: &str, path: &str, body: &str) -> Result<u128> {
    let pki = &cluster.pki;
    let kind = if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
    let mut command = cluster.api.place.command("curl");
    command.args(["--silent", "--show-error", "--fail-with-body", "--output", "/dev/null", "--request", method]);
    command.args(["--cacert", &pki.file("ca.crt"), "--cert", &pki.file("admin.crt"), "--key", &pki.file("admin.key")]);
    command.args(["--header", &format!("Content-Type: {kind}"), "--data-binary", "@-"]);
    command.args(["--write-out", "%{time_pretransfer} %{time_total}"]);
    command.arg(format!("https://{}:6443{path}", CONTROL));
    let said = said_with(&mut command, body.as_bytes())?;
    let ended = now();
    let seconds: BTreeMap<usize, f64> =
        said.split_whitespace().filter_map(|word| word.parse().ok()).enumerate().collect();
    ensure!(seconds.len() == 2, "curl said {said:?}");
    let took = seconds.get(&1).unwrap_or(&0.0) - seconds.get(&0).unwrap_or(&0.0);
    Ok(ended.saturating_sub(Duration::from_secs_f64(took.max(0.0)).as_nanos()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_nearest_rank() {
        let times = Times((1..=200).map(f64::from).collect());
        assert_eq!((times.percentile(50), times.percentile(99)), (100.0, 198.0));
        assert_eq!(Times(vec![7.0]).text(), "p50 7 ms, p99 7 ms");
        assert!(Times(vec![20.0, 21.0]).are_short() && !Times(vec![20.0, 101.0]).are_short());
    }
}
