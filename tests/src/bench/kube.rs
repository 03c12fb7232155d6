//! `wharf-kube` with a scripted API server and an agent: time until every row is in force, memory and processor time
//! during changes of pods, and rows that the agent writes when it is back after SIGKILL.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use wharf_api::ClusterFeed;
use wharf_kube::source::Source;

use super::{
    feed::{OWN, POOLS, Scene, addresses, cidrs, name},
    findings::{Better, Group, Mark, Part},
    policy::tables::Rows,
    rest::used_by,
    scale::KIB,
};
use crate::{
    Node, NodeConfig,
    kube::{Program, objects, serve, server::Server},
    process::ip,
    wait,
};

/// Values of the label `app`.
const APPS: u32 = 500;
/// Values of `app` that a rule selects.
const RULED: u32 = 5;
/// Changed pods in a second.
const RATE: u32 = 100;
/// Longest until every row is in force.
const LIMIT: Duration = Duration::from_secs(120);
/// Bytes of a pod's fields that no row has, as `kubectl get --output json --show-managed-fields` shows them.
const REST: [usize; 2] = [2_500, 1_500];

/// How much is measured.
#[derive(Debug, Clone, Copy)]
pub struct Extent {
    /// With this one.
    nodes: u32,
    pods: u32,
    /// Time of changes.
    span: Duration,
}

impl Extent {
    /// Of the smoke run, or of the whole one.
    #[must_use]
    pub fn of(quick: bool) -> Self {
        match quick {
            true => Self { nodes: 40, pods: 400, span: Duration::from_secs(2) },
            false => Self { nodes: 500, pods: 15_000, span: Duration::from_secs(30) },
        }
    }

    /// A pod of another node, `turn` changes later.
    fn pod(&self, pod: u32, turn: u32) -> (Source, Value) {
        let (node, host) = (1 + pod % (self.nodes - 1), 2 + pod / (self.nodes - 1));
        let address = Ipv4Addr::from_bits(cidrs(node).0.to_bits() + host).to_string();
        let (names, uid) = (format!("pod-{pod}"), format!("00000000-0000-0000-0000-{pod:012}"));
        let app = format!("app-{}", (pod + turn) % APPS);
        let (source, mut object) = objects::pod(&names, &uid, Some(&address), &app);
        let [fields, volumes] = REST;
        object["metadata"]["managedFields"] = json!([{"fieldsV1": "x".repeat(fields)}]);
        object["spec"]["volumes"] = json!([{"projected": "y".repeat(volumes)}]);
        object["spec"]["nodeName"] = json!(name(node));
        (source, object)
    }

    fn fill(&self, server: &Server) {
        ["default", "shop"].iter().for_each(|name| server.put(objects::namespace(name, "x")));
        (0..self.nodes).for_each(|node| server.put(node_object(node)));
        (0..self.pods).for_each(|pod| server.put(self.pod(pod, 0)));
        policies().into_iter().for_each(|policy| server.put(policy));
    }
}

fn node_object(node: u32) -> (Source, Value) {
    let [address, _] = addresses(node);
    let (source, mut object) = objects::node(&name(node), &address, &format!("{}/24", cidrs(node).0));
    if node == 0 {
        object["spec"]["podCIDRs"] = json!(POOLS);
    }
    (source, object)
}

/// The client reaches the server and nothing else; the server is reached by the client and by some pods of other nodes.
fn policies() -> [(Source, Value); 2] {
    let pods = |app: &str| json!({"matchLabels": {"app": app}});
    let elsewhere = (0..RULED).map(|app| json!({"podSelector": pods(&format!("app-{app}")), "namespaceSelector": {}}));
    let from: Vec<Value> = [json!({"podSelector": pods("client")})].into_iter().chain(elsewhere).collect();
    let policy = |name: &str, spec: Value| {
        let metadata = json!({"name": name, "namespace": "default", "uid": format!("uid-of-{name}")});
        (Source::NetworkPolicy, json!({"metadata": metadata, "spec": spec}))
    };
    [
        policy(
            "client",
            json!({
                "podSelector": pods("client"),
                "policyTypes": ["Egress"],
                "egress": [{"to": [{"podSelector": pods("server")}]}],
            }),
        ),
        policy("server", json!({"podSelector": pods("server"), "ingress": [{"from": from}]})),
    ]
}

/// Two endpoints under policy, an agent that has a feed, and the API server.
struct Cluster {
    scene: Scene,
    server: Server,
    address: SocketAddr,
    socket: PathBuf,
    extent: Extent,
    _runtime: Runtime,
}

impl Cluster {
    fn new(agent: &NodeConfig, extent: Extent) -> Result<Self> {
        let scene = Scene::new("wharf, wharf-kube", agent)?;
        ip(scene.node()?.space(), "link set lo up")?;
        let server = Server::start();
        extent.fill(&server);
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let address = serve(scene.node()?, &runtime, &server)?;
        let socket = scene.socket.clone();
        Ok(Self { scene, server, address, socket, extent, _runtime: runtime })
    }

    fn node(&self) -> Result<&Node> {
        self.scene.node()
    }

    /// A new process, and the seconds until every row is in force.
    fn start(&self) -> Result<(Program, f64)> {
        let begin = Instant::now();
        let program = Program::start(self.node()?, OWN, &self.socket, self.address)?;
        wait::until_within(LIMIT, "every row in force", || {
            let view = self.feed()?;
            let rows = |kind: &str| view.rows.iter().find(|rows| rows.kind == kind).map_or(0, |rows| rows.in_force);
            let has_all = view.connected_since_unix_ms.is_some()
                && view.rows.iter().all(|rows| rows.complete)
                && rows("pod") == u64::from(self.extent.pods)
                && rows("node") == u64::from(self.extent.nodes);
            Ok((has_all && view.processed.is_some() && view.processed == view.in_force).then_some(()))
        })?;
        Ok((program, begin.elapsed().as_secs_f64()))
    }

    fn feed(&self) -> Result<ClusterFeed> {
        self.node()?.ask(async |client| client.cluster().await)?.feed.context("no feed")
    }
}

/// Lists, changes and a restart, in that order.
///
/// # Errors
/// When the node cannot be made, or a row is not in force in time.
pub fn measure(agent: &NodeConfig, extent: Extent) -> Result<Part> {
    let cluster = Cluster::new(agent, extent)?;
    let (program, filled) = cluster.start()?;
    let (mut groups, mut marks) = changes(&cluster, &program)?;
    let revision = || Ok::<_, anyhow::Error>(cluster.node()?.ask(async |client| client.policies().await)?.revision);
    let (rows, before) = (Rows::of(cluster.node()?)?, revision()?);
    drop(program);
    let (program, again) = cluster.start()?;
    let written: f64 = Rows::of(cluster.node()?)?.written_since(&rows).iter().sum();
    let revisions = revision()? - before;
    drop(program);
    let Extent { nodes, pods, .. } = extent;
    let title =
        format!("kube: {nodes} nodes and {pods} pods, from the start of wharf-kube until all rows are in force");
    let mut starts = Group::new(&title, "s", Better::Lower);
    starts.add("the agent has no rows", vec![filled])?;
    starts.add("the agent has the rows, after SIGKILL", vec![again])?;
    starts.note(format!("after SIGKILL: {revisions} revisions of policy, {written} of its rows are others"));
    groups.insert(0, starts);
    marks.push(Mark::judge(
        "rows of policy written after wharf-kube was killed: none",
        "",
        Better::Lower,
        written,
        0.0,
    ));
    cluster.scene.finish()?;
    Ok((groups, marks))
}

/// Memory, processor time and the time until a changed pod is in force.
fn changes(cluster: &Cluster, program: &Program) -> Result<Part> {
    let (node, extent) = (cluster.node()?, &cluster.extent);
    let listed = Memory::of(program)?;
    let before = Buckets::read(&Program::metrics(node)?);
    let (used, agent) = (used_by(program.pid())?, used_by(node.agent_pid()?)?);
    let (begin, gap) = (Instant::now(), Duration::from_secs(1) / RATE);
    let (mut next, mut sent) = (begin, 0);
    while begin.elapsed() < extent.span {
        // A step that shares no factor with the number of pods.
        cluster.server.put(extent.pod(sent * 7 % extent.pods, 1 + sent));
        sent += 1;
        next += gap;
        thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    let seconds = begin.elapsed().as_secs_f64();
    let share = |now: Duration, before: Duration| now.saturating_sub(before).as_secs_f64() / seconds * 100.0;
    let shares = [share(used_by(program.pid())?, used), share(used_by(node.agent_pid()?)?, agent)];
    wait::until("the last change in force", || {
        let view = cluster.feed()?;
        Ok((view.processed == view.in_force).then_some(()))
    })?;
    let changed = Memory::of(program)?;
    let times = Buckets::read(&Program::metrics(node)?).since(&before);
    let [half, most] = [0.5, 0.99].map(|part| times.quantile(part) * 1_000.0);

    let mut memory = Group::new("kube: memory of wharf-kube", "KiB", Better::Lower);
    memory.add("resident, all rows in force", vec![listed.rss])?;
    memory.add("resident, after the changes", vec![changed.rss])?;
    memory.add("resident, the most", vec![changed.peak])?;
    let rate = f64::from(sent) / seconds;
    let mut load = Group::new(&format!("kube: processor time beside {RATE} pod changes a second"), "%", Better::Lower);
    load.add("wharf-kube", vec![shares[0]])?;
    load.add("agent", vec![shares[1]])?;
    load.note(format!("of one processor; {rate:.0} changes a second"));
    let mut force = Group::new("kube: from the arrival of a changed pod until it is in force", "ms", Better::Lower);
    force.add("half of the messages", vec![half])?;
    force.add("99 of 100 messages", vec![most])?;
    force.note(
        "by the metric wharf_kube_in_force_seconds, linear within its buckets, each twice as wide as the one before",
    );
    let marks = vec![
        Mark::judge("wharf-kube: at most 120 MiB resident", "MiB", Better::Lower, changed.peak / KIB, 120.0),
        Mark::judge(
            "wharf-kube beside 100 pod changes a second: at most 5 % of a processor",
            "%",
            Better::Lower,
            shares[0],
            5.0,
        ),
        Mark::judge("a changed pod in force: half within 20 ms", "ms", Better::Lower, half, 20.0),
        Mark::judge("a changed pod in force: 99 of 100 within 100 ms", "ms", Better::Lower, most, 100.0),
    ];
    Ok((vec![memory, load, force], marks))
}

/// Memory of wharf-kube, KiB.
struct Memory {
    rss: f64,
    peak: f64,
}

impl Memory {
    fn of(program: &Program) -> Result<Self> {
        let path = format!("/proc/{}/status", program.pid());
        let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|line| line.split_whitespace().next()?.parse().ok())
                .with_context(|| format!("{path}: no {name}"))
        };
        Ok(Self { rss: field("VmRSS:")?, peak: field("VmHWM:")? })
    }
}

/// Upper bounds of a histogram, and the observations up to each.
#[derive(Debug, Default)]
struct Buckets(Vec<(f64, f64)>);

impl Buckets {
    fn read(text: &str) -> Self {
        let bucket = |line: &str| {
            let (bound, count) = line.strip_prefix("wharf_kube_in_force_seconds_bucket{le=\"")?.split_once("\"} ")?;
            Some((bound.replace("+Inf", "inf").parse().ok()?, count.split(' ').next()?.parse().ok()?))
        };
        Self(text.lines().filter_map(bucket).collect())
    }

    fn since(self, before: &Self) -> Self {
        let pairs = self.0.into_iter().zip(before.0.iter().map(|(_, count)| *count).chain(std::iter::repeat(0.0)));
        Self(pairs.map(|((bound, count), before)| (bound, count - before)).collect())
    }

    /// Linear within a bucket; the lower bound of the last one.
    fn quantile(&self, part: f64) -> f64 {
        let wanted = self.0.last().map_or(0.0, |(_, all)| all * part);
        let (mut low, mut below) = (0.0, 0.0);
        for (bound, count) in &self.0 {
            if *count >= wanted && *count > below {
                let share = (wanted - below) / (count - below);
                return if bound.is_finite() { low + (bound - low) * share } else { low };
            }
            (low, below) = (*bound, *count);
        }
        low
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_linear_within_its_bucket() {
        let text = |counts: [u32; 3]| {
            let bounds = ["0.001", "0.002", "+Inf"];
            let lines = bounds.iter().zip(counts);
            lines.map(|(le, n)| format!("wharf_kube_in_force_seconds_bucket{{le=\"{le}\"}} {n}\n")).collect::<String>()
        };
        let times = Buckets::read(&text([12, 22, 23])).since(&Buckets::read(&text([2, 2, 2])));
        assert_eq!(times.0.iter().map(|(_, count)| *count).collect::<Vec<_>>(), [10.0, 20.0, 21.0]);
        assert!((times.quantile(0.5) - 0.00105).abs() < 1e-9, "{}", times.quantile(0.5));
        assert!((times.quantile(0.99) - 0.002).abs() < 1e-9, "beyond the last bound");
    }

    #[test]
    fn pods_have_addresses_of_their_own() {
        let extent = Extent::of(false);
        let address = |pod| extent.pod(pod, 0).1["status"]["podIP"].to_string();
        let all: std::collections::BTreeSet<String> = (0..extent.pods).map(address).collect();
        assert_eq!(u32::try_from(all.len()), Ok(extent.pods));
    }
}
