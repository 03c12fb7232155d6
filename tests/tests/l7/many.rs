//! Many deletes at once, and a proxy that is slow: everything ends, and nothing is left of it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use wharf_tests::{Node, NodeConfig, scenario, wait};

use crate::{Scene, await_realized, end, ingress, pods::Pod, pods::import};

/// Endpoints that are deleted at once.
const MANY: usize = 200;

/// No address is kept for the proxy's sake, no listener has a member, and nobody waits for Envoy.
pub(crate) fn nothing_left(node: &Node) -> Result<()> {
    wait::until_equal("what the proxy has, and addresses that wait for it", &(Vec::new(), Vec::new(), 0), || {
        let proxy = node.ask(async |client| client.proxy().await)?;
        let waits = proxy.completions.len();
        let members: Vec<u16> = proxy.listeners.into_iter().flat_map(|listener| listener.endpoints).collect();
        let resting = node.ask(async |client| client.ipam().await)?.resting;
        Ok((members, resting.into_iter().filter_map(|address| address.blocked).collect::<Vec<_>>(), waits))
    })
}

#[test]
fn two_hundred_deletes_at_once_leave_no_member_and_no_address_behind() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--ip-rest-ms", "200"]).with_envoy()?, |node| {
        let names: Vec<String> = (0..MANY).map(|n| format!("web{n}")).collect();
        // Sixteen threads, as a busy runtime has.
        let pods = thread::scope(|scope| -> Result<Vec<Pod>> {
            let node = &*node;
            let adding: Vec<_> = names
                .chunks(MANY.div_ceil(16))
                .map(|names| {
                    scope.spawn(move || {
                        names.iter().map(|name| Pod::container(node, name, "web")).collect::<Result<Vec<_>>>()
                    })
                })
                .collect();
            let added = adding.into_iter().map(|thread| thread.join().map_err(|_| anyhow!("a thread panicked"))?);
            Ok(added.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
        })?;
        // All at once: each further member costs Envoy another look at all of them.
        import(node, &ingress("web", "[{path: /public}]"))?;
        await_realized(node)?;
        let members = node.ask(async |client| client.proxy().await)?.listeners;
        ensure!(members.iter().map(|listener| listener.endpoints.len()).sum::<usize>() == MANY, "{members:?}");

        let start = Instant::now();
        let failed = thread::scope(|scope| -> Result<Vec<String>> {
            let node = &*node;
            let deleting: Vec<_> = pods.iter().map(|pod| scope.spawn(move || node.detach(&pod.end))).collect();
            let mut failed = Vec::new();
            for thread in deleting {
                let deleted = thread.join().map_err(|_| anyhow!("a thread panicked"))?;
                failed.extend(deleted.err().map(|why| format!("{why:#}")));
            }
            Ok(failed)
        })?;
        println!("{MANY} deletes at once: {:?}", start.elapsed());
        ensure!(failed.is_empty(), "{} of {MANY} deletes failed, the first: {:?}", failed.len(), failed.first());
        let given_up = node.ask(async |client| client.proxy().await)?.completions_timed_out;
        ensure!(given_up == 0, "{given_up} of {MANY} deletes did not wait until Envoy had acknowledged");
        nothing_left(node)?;
        end(node)
    })
}

/// Stops the proxy for most of the time, until it is dropped.
struct Slowed {
    stop: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Slowed {
    fn start(envoy: Pid) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                for (signal, millis) in [(Signal::SIGSTOP, 100), (Signal::SIGCONT, 50)] {
                    // It lives as long as the node.
                    kill(envoy, signal).ok();
                    thread::sleep(Duration::from_millis(millis));
                }
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Slowed {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It ends with SIGCONT.
            thread.join().ok();
        }
    }
}

/// Longest that a change of policy or a delete may take under a slow proxy: a change waits half a second for it, a
/// delete a second. A busy machine is given as much again several times.
const CHANGE: Duration = Duration::from_secs(5);

#[test]
fn a_slow_proxy_delays_changes_and_deletes_and_loses_none() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--ip-rest-ms", "200"]).with_envoy()?, |node| {
        let scene = Scene::new(node)?;
        import(node, &ingress("db", "[{path: /public}]"))?;
        await_realized(node)?;
        let slowed = Slowed::start(node.envoy().context("Envoy")?);
        let mut slowest = [Duration::ZERO; 2];
        for round in 0..20 {
            let more = ["/a", "/b"][round % 2];
            let start = Instant::now();
            import(node, &ingress("db", &format!("[{{path: /public}}, {{path: {more}}}]")))?;
            slowest[0] = slowest[0].max(start.elapsed());
            let pod = Pod::container(node, &format!("db{round}"), "db")?;
            let start = Instant::now();
            node.detach(&pod.end).with_context(|| format!("round {round}: a delete within its bound"))?;
            slowest[1] = slowest[1].max(start.elapsed());
        }
        println!("a slow proxy: the slowest change {:?}, the slowest delete {:?}", slowest[0], slowest[1]);
        ensure!(slowest.iter().all(|slowest| *slowest < CHANGE), "a change or a delete took {slowest:?}");
        drop(slowed);
        await_realized(node)?;
        let answers = ["/public", "/b", "/a", "/secret"].map(|path| scene.get(path));
        let answers = answers.into_iter().collect::<Result<Vec<_>>>()?;
        ensure!(answers == [200, 200, 403, 403], "the last change is in force: {answers:?}");
        scene.end(node)?;
        nothing_left(node)
    })
}
