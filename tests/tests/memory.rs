//! What the agent's memory comes back to after its busiest hours.

use std::{
    fs,
    io::Write as _,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::json;
use wharf_api::DeleteQuery;
use wharf_tests::{Node, NodeConfig, Sandbox, scenario};

/// Endpoints that are there at once.
const ENDPOINTS: usize = 250;
/// Times that they come and go in a busy hour.
const ROUNDS: usize = 2;
/// Connections that send half a request, at once and in all.
const SLOW: usize = 500;
const SLOW_ROUNDS: usize = 2;
/// Requests under way at once.
const PARALLEL: usize = 8;
/// How long the agent may take to give memory back.
const PATIENCE: Duration = Duration::from_secs(40);
/// How long some 150 endpoints may take to be back after a restart.
const RESTORED: Duration = Duration::from_secs(120);

/// A number of the agent's `/proc/PID/status`.
fn process_status(node: &Node, field: &str) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{}/status", node.agent_pid()?)).context("read its status")?;
    let line = text.lines().find_map(|l| l.strip_prefix(field)).with_context(|| format!("it has no {field}"))?;
    line.trim().trim_end_matches(" kB").parse().with_context(|| format!("{field} is {line:?}"))
}

/// KiB of memory of the agent.
fn resident(node: &Node) -> Result<u64> {
    process_status(node, "VmRSS:")
}

fn id(n: usize) -> String {
    format!("cni-attachment-id:{n:064}:e{n}")
}

fn create(node: &Node, container: &Sandbox, n: usize) -> Result<()> {
    let create = serde_json::from_value(json!({
        "container_id": format!("{n:064}"), "ifname": format!("e{n}"), "network": "harbour",
        "netns": container.path(), "pod_name": format!("a-deployment-of-some-service-7d4b9c5f6d-{n}"),
        "pod_namespace": "a-namespace-of-a-tenant", "deadline_ms": 60_000,
    }))?;
    node.ask(async |client| client.put_endpoint(&id(n), &create).await).map(drop)
}

/// As a runtime does: one that ran into its bound on a slow machine is asked for again.
fn delete(node: &Node, n: usize) -> Result<()> {
    let mut errors = Vec::new();
    for _ in 0..3 {
        errors = node.ask(async |client| client.delete_endpoint(&id(n), &DeleteQuery::default()).await)?.errors;
        if errors.is_empty() {
            return Ok(());
        }
    }
    Err(anyhow!("delete endpoint {n}: {errors:?}"))
}

/// So many endpoints come, all in one container, and go.
fn churn(node: &Node, container: &Sandbox, count: usize) -> Result<()> {
    in_parallel(count, &|n| create(node, container, n))?;
    in_parallel(count, &|n| delete(node, n))
}

/// Does something for each number below `count`.
fn in_parallel(count: usize, work: &(dyn Fn(usize) -> Result<()> + Sync)) -> Result<()> {
    thread::scope(|scope| {
        let share = |first: usize| move || (first..count).step_by(PARALLEL).try_for_each(work);
        let shares: Vec<_> = (0..PARALLEL).map(|first| scope.spawn(share(first))).collect();
        shares.into_iter().try_for_each(|share| share.join().map_err(|_| anyhow!("a share panicked"))?)
    })
}

/// So many clients begin a request, never end it, and go.
fn dawdle(node: &Node, count: usize) -> Result<()> {
    let mut clients = Vec::new();
    for _ in 0..count {
        let mut client = UnixStream::connect(node.dirs().socket()).context("connect")?;
        client.write_all(b"GET /v1/healthz HTTP/1.1\r\nhost: wh").context("write half a request")?;
        clients.push(client);
    }
    Ok(())
}

/// Endpoints and connections come and go.
fn busy_hour(node: &Node, container: &Sandbox) -> Result<()> {
    for _ in 0..ROUNDS {
        churn(node, container, ENDPOINTS)?;
    }
    for _ in 0..SLOW_ROUNDS {
        dawdle(node, SLOW)?;
    }
    Ok(())
}

/// What busy hours needed is given back, and nothing is kept for each endpoint or connection that is gone.
#[test]
fn memory_comes_back_after_endpoints_and_connections_that_came_and_went() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        ensure!(process_status(node, "THP_enabled:")? == 0, "the kernel may give the agent huge pages");
        let start = resident(node)?;
        let container = node.sandbox("all")?;
        for _ in 0..2 {
            busy_hour(node, &container)?;
        }
        let end = Instant::now() + PATIENCE;
        loop {
            let now = resident(node)?;
            if now * 10 <= start * 13 {
                return Ok(());
            }
            ensure!(Instant::now() < end, "the agent has {now} KiB, and had {start} before");
            thread::sleep(Duration::from_millis(500));
        }
    })
}

/// A control group of this process, with a memory limit. The process leaves it, and it goes, when this is dropped.
struct Limited {
    home: PathBuf,
    group: PathBuf,
}

impl Limited {
    fn new(limit: u64) -> Result<Self> {
        let own = fs::read_to_string("/proc/self/cgroup").context("read the control groups")?;
        let v1 = own.lines().find_map(|l| l.split_once(":memory:").map(|(_, path)| path.trim_start_matches('/')));
        let (home, file) = match v1 {
            Some(path) => (PathBuf::from("/sys/fs/cgroup/memory").join(path), "memory.limit_in_bytes"),
            None => (PathBuf::from("/sys/fs/cgroup"), "memory.max"),
        };
        let group = home.join(format!("wharf-test-{}", std::process::id()));
        fs::create_dir(&group).with_context(|| format!("make control group {}", group.display()))?;
        let limited = Self { home, group };
        fs::write(limited.group.join(file), limit.to_string()).context("limit its memory")?;
        Ok(limited)
    }

    /// What is started meanwhile is in the group; this process is not.
    fn start(&self, node: &mut Node) -> Result<()> {
        let enter = |group: &Path| fs::write(group.join("cgroup.procs"), std::process::id().to_string());
        enter(&self.group).context("enter the control group")?;
        let started = node.start_agent();
        enter(&self.home).context("leave the control group")?;
        started
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        // It can be removed a moment after its last process has ended.
        let gone = wharf_tests::wait::until("the control group to go", || Ok(fs::remove_dir(&self.group).ok()));
        if let Err(error) = gone {
            eprintln!("{}: {error:#}", self.group.display());
        }
    }
}

#[test]
fn creates_are_refused_before_the_memory_limit_and_a_restart_there_survives() -> Result<()> {
    let limited = Limited::new(96 << 20)?;
    let mut node = Node::without_agent(NodeConfig::default())?;
    limited.start(&mut node)?;
    let container = node.sandbox("all")?;
    // The kernel frees what the last creates needed for a moment while the next one is refused already.
    let (mut made, end) = (0, Instant::now() + RESTORED);
    loop {
        if let Err(refused) = create(&node, &container, made) {
            let refused = format!("{refused:#}");
            ensure!(made > 50 && refused.contains("the agent's control group has"), "after {made}: {refused}");
            let shown = node.wharf(&["status"])?.stdout;
            if shown.contains("no room for another endpoint") {
                break;
            }
            ensure!(Instant::now() < end, "refused, and yet: {shown}");
        } else {
            made += 1;
            ensure!(made < 1_000, "a thousand endpoints fit into 96 MiB");
        }
    }
    for _ in 0..2 {
        node.kill_agent()?;
        limited.start(&mut node)?;
        let end = Instant::now() + RESTORED;
        loop {
            let all = node.endpoints()?;
            let ready = all.iter().filter(|e| e.state == wharf_api::EndpointState::Ready).count();
            if ready == made {
                break;
            }
            ensure!(Instant::now() < end, "{ready} of {made} endpoints are back after {RESTORED:?}");
            thread::sleep(Duration::from_millis(200));
        }
    }
    in_parallel(made, &|n| delete(&node, n))?;
    create(&node, &container, 0)?;
    delete(&node, 0)?;
    node.finish()
}
