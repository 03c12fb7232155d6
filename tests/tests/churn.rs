//! Adds and deletes, many at once, while the agent is killed at random: nothing is lost, nothing leaks, and no error is
//! seen but "try again later".

use std::{
    env,
    hash::{BuildHasher, RandomState},
    str::FromStr,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use wharf_tests::{
    Attached, Node, NodeConfig, Sandbox,
    echo::{self, EchoServer},
    icmp::ping,
    scenario, wait,
};

/// Containers that come and go at once.
const PARALLEL: usize = 16;
/// ADDs in all, and as many DELs.
const ADDS: u64 = 1000;
/// CNI's "try again later".
const LATER: u32 = 11;
/// All of it takes half a minute; a machine under load gets much more, one that hangs is noticed.
const BOUND: Duration = Duration::from_secs(600);
/// Tries of one operation: each meets another death of the agent.
const TRIES: u32 = 200;

/// A variable's value, or what is usual. `cargo xtask soak` sets them.
fn setting<T: FromStr>(name: &str, usual: T) -> Result<T> {
    match env::var(name) {
        Ok(text) => text.parse().map_err(|_| anyhow!("{name}={text}: not a number")),
        Err(_) => Ok(usual),
    }
}

/// A sequence of numbers that a seed determines (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Evenly from the range, both ends included.
    fn between(&mut self, least: u64, most: u64) -> u64 {
        least + self.next() % (most - least + 1)
    }
}

/// What the threads share.
struct Churn<'a> {
    node: &'a Node,
    adds: AtomicU64,
    done: AtomicU64,
    later: AtomicU64,
    stop: AtomicBool,
    end: Instant,
    total: u64,
}

impl Churn<'_> {
    /// One container's life, again and again.
    fn live(&self, sandbox: &Sandbox) -> Result<()> {
        while !self.stop.load(Ordering::Relaxed) && self.adds.fetch_add(1, Ordering::Relaxed) < self.total {
            let attached = self.add(sandbox)?;
            ensure!(attached.addresses().len() == 2, "ADD answered {}", attached.result);
            self.done.fetch_add(1, Ordering::Relaxed);
            self.del(sandbox)?;
            let links = sandbox.space()?.links()?;
            ensure!(links == ["lo"], "{} still has {links:?} after its DEL", sandbox.name());
            self.done.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// As a runtime does: an ADD that failed is followed by a DEL, then tried again.
    fn add(&self, sandbox: &Sandbox) -> Result<Attached> {
        for _ in 0..TRIES {
            let (conf, node) = (self.node.netconf(), self.node);
            let answer = node.cni("ADD").of(sandbox.name(), sandbox.path(), "eth0").conf(&conf).run()?;
            if answer.finished.status.success() {
                return Ok(Attached {
                    container: sandbox.name().to_owned(),
                    netns: sandbox.path().to_owned(),
                    ifname: "eth0".to_owned(),
                    conf,
                    result: answer.result()?,
                });
            }
            let failure = answer.failure()?;
            ensure!(failure.code == LATER, "ADD of {}: {failure:?}", sandbox.name());
            self.wait_a_little()?;
            self.del(sandbox)?;
        }
        bail!("ADD of {} did not succeed in {TRIES} tries", sandbox.name())
    }

    fn del(&self, sandbox: &Sandbox) -> Result<()> {
        for _ in 0..TRIES {
            let call = self.node.cni("DEL").of(sandbox.name(), sandbox.path(), "eth0").conf(&self.node.netconf());
            let answer = call.run()?;
            if answer.finished.status.success() {
                return answer.silent();
            }
            let failure = answer.failure()?;
            ensure!(failure.code == LATER, "DEL of {}: {failure:?}", sandbox.name());
            self.wait_a_little()?;
        }
        bail!("DEL of {} did not succeed in {TRIES} tries", sandbox.name())
    }

    /// A runtime comes back later; how much later does not matter.
    fn wait_a_little(&self) -> Result<()> {
        self.later.fetch_add(1, Ordering::Relaxed);
        ensure!(Instant::now() < self.end, "not done within the time there is");
        thread::sleep(Duration::from_millis(50));
        Ok(())
    }
}

#[test]
fn adds_and_dels_while_the_agent_is_killed_at_random_lose_and_leak_nothing() -> Result<()> {
    let seed = setting("WHARF_CHURN_SEED", RandomState::new().hash_one(0_u8))?;
    let total = setting("WHARF_CHURN_ADDS", ADDS)?;
    println!("seed {seed} (WHARF_CHURN_SEED={seed} runs with it again)");
    let mut random = Random(seed);
    scenario(NodeConfig::default(), |node| {
        let (witness, sandboxes) = (node.sandbox("witness")?, sandboxes(node)?);
        let lives = node.attach(&witness)?;
        let echo = EchoServer::start(witness.space()?)?;
        let began = Instant::now();
        // The agent comes and goes on this thread, because it dies with the thread that started it; the node that the
        // others use is another value for the same namespace and directories.
        let twin = node.twin()?;
        let churn = Churn {
            node: &twin,
            adds: AtomicU64::new(0),
            done: AtomicU64::new(0),
            later: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            end: began + BOUND * u32::try_from(total.div_ceil(ADDS))?,
            total,
        };
        let mut kills = 0_u64;
        thread::scope(|scope| {
            let threads: Vec<_> = sandboxes.iter().map(|s| scope.spawn(|| churn.live(s))).collect();
            let mut killing = || -> Result<()> {
                while threads.iter().any(|t| !t.is_finished()) {
                    let until = Instant::now() + Duration::from_millis(random.between(500, 1500));
                    while Instant::now() < until && threads.iter().any(|t| !t.is_finished()) {
                        thread::sleep(Duration::from_millis(5));
                    }
                    node.kill_agent()?;
                    kills += 1;
                    echo::udp(node.space(), echo.udp_at(lives.v4()?.into()), 100).context("while no agent runs")?;
                    thread::sleep(Duration::from_millis(random.between(0, 400)));
                    node.start_agent()?;
                }
                Ok(())
            };
            let killed = killing();
            churn.stop.store(true, Ordering::Relaxed);
            let lived: Vec<Result<()>> =
                threads.into_iter().map(|t| t.join().map_err(|_| anyhow!("a thread panicked"))?).collect();
            killed.and_then(|()| lived.into_iter().collect::<Result<()>>())
        })?;
        let (done, later) = (churn.done.into_inner(), churn.later.into_inner());
        println!(
            "{done} operations, {kills} kills, {later} times \"later\", in {:.1} s",
            began.elapsed().as_secs_f64()
        );
        ensure!(done == 2 * total, "{done} operations of {}", 2 * total);
        ensure!(kills > 0, "the agent was never killed");
        let left = wait::until_equal("what is left", &1, || Ok(node.endpoints()?.len()));
        left.with_context(|| format!("{:?}", node.endpoints()))?;
        ping(witness.space()?, lives.gateways()?[0])?.must_answer()?;
        node.detach(&lives)?;
        wait::until_equal("what is left", &Vec::<String>::new(), || node.left_behind())
    })
}

fn sandboxes(node: &Node) -> Result<Vec<Sandbox>> {
    (0..PARALLEL).map(|n| node.sandbox(&format!("c{n}"))).collect()
}
