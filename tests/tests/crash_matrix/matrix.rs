//! Learning which points an operation has, and killing it at each.

use std::{collections::BTreeMap, os::unix::process::ExitStatusExt, time::Duration};

use anyhow::{Context, Result, anyhow, bail, ensure};
use wharf_tests::{Node, NodeConfig, crash, process::Finished, scenario};

use crate::{
    operation::{Operation, Victim, redirects::PROXY_PORT},
    scene::{Scene, await_quiet},
};

/// Runs an operation once for each of its points that are this run's.
pub(crate) fn run(operation: &Operation) -> Result<()> {
    with_scene(operation, |scene| {
        let learned = learn(scene, operation)?;
        let points = chosen(operation, learned)?;
        let mut tries = 0;
        for point in &points {
            let at = || format!("{}, killed at {point}", operation.name);
            tries += until_killed(|| crash_at(scene, operation, point)).with_context(at)?;
        }
        println!("{}: killed at each of {} points, in {tries} tries", operation.name, points.len());
        Ok(())
    })
}

/// The points that are this run's; an operation of which too few were learned has lost some.
fn chosen(operation: &Operation, learned: Vec<String>) -> Result<Vec<String>> {
    println!("{}: {} points", operation.name, learned.len());
    ensure!(learned.len() >= operation.least, "{}: only {} points: {learned:?}", operation.name, learned.len());
    crash::share(learned)
}

/// The same for a start on a node where nothing was before: each try has a node of its own.
pub(crate) fn starts(operation: &Operation) -> Result<()> {
    let points = chosen(operation, learn_start(operation)?)?;
    let mut tries = 0;
    for point in &points {
        let on_a_node = || {
            let mut node = Node::without_agent(config(operation)?)?;
            let result = start_at(&mut node, point);
            if result.is_err() {
                eprintln!("---- log of the node's agent\n{}---- end of the log", node.log());
            }
            result
        };
        tries += until_killed(on_a_node).with_context(|| format!("{}, killed at {point}", operation.name))?;
    }
    println!("{}: killed at each of {} points, in {tries} tries", operation.name, points.len());
    Ok(())
}

/// How long a later pass of a point is waited for: an operation takes milliseconds.
const LATER_PASS: Duration = Duration::from_secs(10);
/// Rows of policy after which the agent is killed, of all rows of a change.
const MOST_ROWS: usize = 10;
/// Tries to kill at a later pass of a point. Not every run of an operation comes to it, though both that were learned
/// from did.
const TRIES: usize = 4;

/// Tries until one was killed at its point; says how many that took. What a try leaves that missed the point is checked
/// as well, by the try itself.
fn until_killed(mut attempt: impl FnMut() -> Result<bool>) -> Result<usize> {
    for tried in 1..=TRIES {
        if attempt()? {
            return Ok(tried);
        }
    }
    bail!("the operation did not come to this point in {TRIES} tries")
}

fn config(operation: &Operation) -> Result<NodeConfig> {
    let config = NodeConfig { flags: operation.flags.iter().map(|f| (*f).to_owned()).collect(), toml: None };
    // Where Envoy is is known at run time only.
    if operation.flags.contains(&PROXY_PORT) { config.with_envoy() } else { Ok(config) }
}

fn with_scene(operation: &Operation, body: impl FnOnce(&mut Scene<'_>) -> Result<()>) -> Result<()> {
    scenario(config(operation)?, |node| {
        let mut scene = Scene::new(node)?;
        body(&mut scene)?;
        scene.end()
    })
}

fn learn_start(operation: &Operation) -> Result<Vec<String>> {
    let mut traces = Vec::new();
    for _ in 0..2 {
        let mut node = Node::without_agent(config(operation)?)?;
        ensure!(node.start_armed_agent()?, "the agent died at a crash point that nobody wished for");
        await_quiet(&node)?;
        traces.push(crash::trace(node.dirs())?);
        node.kill_agent()?;
    }
    common(&traces)
}

/// True when the agent was killed at the point.
fn start_at(node: &mut Node, point: &str) -> Result<bool> {
    crash::wish(node.dirs(), point)?;
    let mut killed = true;
    if node.start_armed_agent()? {
        killed = await_crash(node, point)?;
    }
    crash::forget_wish(node.dirs())?;
    node.start_agent()?;
    let mut scene = Scene::new(node)?;
    scene.check()?;
    scene.end()?;
    node.finish()?;
    Ok(killed)
}

/// Runs the operation twice without a wish. What both runs passed is what it always passes.
fn learn(scene: &mut Scene<'_>, operation: &Operation) -> Result<Vec<String>> {
    let mut traces = Vec::new();
    for _ in 0..2 {
        (operation.prepare)(scene)?;
        if scene.node.has_agent() {
            scene.rules_follow(true).context("before the operation")?;
        }
        crash::forget_trace(scene.node.dirs())?;
        let finished = match operation.victim {
            Victim::Agent | Victim::Plugin => (operation.act)(scene)?.run()?,
            Victim::Start => {
                scene.start()?;
                None
            }
        };
        if !scene.node.has_agent() {
            scene.node.start_agent()?;
        }
        if finished.is_none() {
            scene.await_quiet()?;
        }
        if operation.victim == Victim::Agent && finished.is_none() {
            // Nobody tells when it is over but what comes of it.
            (operation.go_on)(scene, None)?;
            traces.push(crash::trace(scene.node.dirs())?);
        } else {
            traces.push(crash::trace(scene.node.dirs())?);
            scene.rules_follow(true).context("after the operation")?;
            (operation.go_on)(scene, finished)?;
        }
        scene.rules_follow(true).context("after everything")?;
        scene.check()?;
    }
    common(&traces).with_context(|| format!("learn the points of {}", operation.name))
}

/// Set by `cargo xtask soak`: which pass of a point is the last, and the points' order, are then random.
fn seed() -> Result<Option<u64>> {
    let Ok(text) = std::env::var("WHARF_CRASH_SEED") else { return Ok(None) };
    let seed = text.parse().with_context(|| format!("WHARF_CRASH_SEED={text}: not a number"))?;
    Ok(Some(seed))
}

/// A sequence of numbers that a seed determines (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> Result<usize> {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let limit = u64::try_from(limit)?.max(1);
        Ok(usize::try_from((z ^ (z >> 31)) % limit)?)
    }
}

/// Each point that is in all traces; one of the store, of a file of the state directory and of policy as often as it is
/// passed, because each commit, file and step is another.
fn common(traces: &[Vec<String>]) -> Result<Vec<String>> {
    let mut points = Vec::new();
    let counts: Vec<BTreeMap<&str, usize>> = traces.iter().map(|trace| count(trace)).collect();
    let first = counts.first().context("a trace")?;
    let mut random = seed()?.map(Random);
    for name in first.keys() {
        let least = counts.iter().map(|c| c.get(name).copied().unwrap_or(0)).min().unwrap_or(0);
        match &mut random {
            _ if ["store/", "kept/", "policy/"].iter().any(|room| name.starts_with(room)) => {
                points.extend((1..=least).map(|n| format!("{name}:{n}")))
            }
            // Each leaves other rows.
            _ if *name == "datapath/policy/after-row" => {
                let every = least.div_ceil(MOST_ROWS).max(1);
                points.extend((1..=least).step_by(every).map(|n| format!("{name}:{n}")));
            }
            // How often the queue is looked at depends on how its events come together.
            Some(random) if least > 0 && !name.starts_with("drain/") && !name.starts_with("queue/") => {
                points.push(format!("{name}:{}", 1 + random.below(least)?))
            }
            _ => points.extend((least > 0).then(|| format!("{name}:1"))),
        }
    }
    if let Some(random) = &mut random {
        for last in (1..points.len()).rev() {
            points.swap(last, random.below(last + 1)?);
        }
    }
    ensure!(!points.is_empty(), "no crash point was passed");
    Ok(points)
}

fn count(trace: &[String]) -> BTreeMap<&str, usize> {
    let mut counts = BTreeMap::new();
    for name in trace {
        *counts.entry(name.as_str()).or_insert(0) += 1;
    }
    counts
}

/// Waits for the agent's death at the point. Every run comes to the first pass of a point. A run may miss a later one:
/// a controller's commit, or a rebuild that a delete overtakes, makes one pass more in one run than in another. The
/// agent is then killed when nothing goes on, and the answer is false.
fn await_crash(node: &mut Node, point: &str) -> Result<bool> {
    if point.ends_with(":1") {
        return node.await_crash().map(|()| true);
    }
    node.await_crash_for(LATER_PASS)
}

/// True when it was killed at the point; false when it did not come to it, see [`await_crash`].
fn crash_at(scene: &mut Scene<'_>, operation: &Operation, point: &str) -> Result<bool> {
    (operation.prepare)(scene).context("prepare")?;
    crash::wish(scene.node.dirs(), point)?;
    let mut killed = true;
    let finished = match operation.victim {
        Victim::Agent => {
            let act = (operation.act)(scene)?;
            let acting = std::thread::spawn(move || act.run());
            killed = await_crash(scene.node, point)?;
            crash::forget_wish(scene.node.dirs())?;
            scene.witnesses_talk().context("while no agent runs")?;
            scene.start()?;
            acting.join().map_err(|_| anyhow!("the call panicked"))??
        }
        Victim::Start => {
            if scene.node.start_armed_agent()? {
                killed = await_crash(scene.node, point)?;
            }
            crash::forget_wish(scene.node.dirs())?;
            scene.witnesses_talk().context("while no agent runs")?;
            scene.start()?;
            None
        }
        Victim::Plugin => {
            let finished = (operation.act)(scene)?.run()?.context("the plugin was not called")?;
            crash::forget_wish(scene.node.dirs())?;
            must_be_killed(&finished)?;
            scene.witnesses_talk()?;
            if !scene.node.has_agent() {
                scene.node.start_agent()?;
            }
            None
        }
    };
    scene.rules_follow(false).context("after the start")?;
    (operation.go_on)(scene, finished).context("going on as a runtime does")?;
    scene.rules_follow(false).context("after everything")?;
    scene.check()?;
    Ok(killed)
}

fn must_be_killed(finished: &Finished) -> Result<()> {
    let killed = finished.status.signal() == Some(nix::sys::signal::Signal::SIGKILL as i32);
    ensure!(killed, "the plugin did not come to its crash point: {}", finished.describe());
    Ok(())
}
