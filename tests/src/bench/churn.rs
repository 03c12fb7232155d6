//! ADD and DEL through the plugins' binaries: one at a time, and many at once.

use std::{
    process::Command,
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};
use serde_json::Value;

use super::{
    findings::{Better, Group, Mark, Part},
    phases::Phases,
    plugin::{PTP, Plugin, WHARF},
};
use crate::{NodeConfig, Sandbox, process::run_from, scratch, space::Space};

/// Processes at once.
const AT_ONCE: usize = 16;
const LIMIT: Duration = Duration::from_secs(10);
const TRUE: &str = "/bin/true";
const FLOOR: &str = "ip link (a process and the kernel's floor)";

/// One at a time: in each round every plugin adds and deletes one container, in an order that rotates. The sandboxes
/// are all made before and removed after.
///
/// # Errors
/// When a plugin fails.
pub fn one_at_a_time(agent: &NodeConfig, rounds: usize) -> Result<Part> {
    let plugins = Plugin::all(agent)?;
    let sandboxes: Vec<Vec<Sandbox>> = plugins.iter().map(|p| p.sandboxes("one", rounds)).collect::<Result<_>>()?;
    let floor = Floor::make()?;
    let wharf = plugins.iter().find_map(Plugin::node).context("no wharf among the plugins")?;
    let before = Phases::of(wharf)?;

    let (mut adds, mut dels, mut noops) = (vec![Vec::new(); 4], vec![Vec::new(); 4], vec![Vec::new(); 4]);
    for round in 0..rounds {
        for turn in 0..4 {
            let place = (round + turn) % 4;
            let (add, del, noop) = match (plugins.get(place), sandboxes.get(place).and_then(|s| s.get(round))) {
                (Some(plugin), Some(sandbox)) => {
                    plugin.settle()?;
                    let (add, added) = plugin.add(sandbox)?;
                    let del = plugin.del(sandbox, &added)?;
                    // What the kernel does after the answer must not be in the next one's time.
                    plugin.settle()?;
                    (add, del, plugin.version()?)
                }
                _ => (floor.add()?, floor.del()?, floor.noop()?),
            };
            for (samples, took) in [(&mut adds, add), (&mut dels, del), (&mut noops, noop)] {
                if let Some(samples) = samples.get_mut(place) {
                    samples.push(ms(took));
                }
            }
        }
    }

    let after = Phases::of(wharf)?;
    let inside = |operation| after.mean_ms(&before, operation).context("the agent counted nothing");
    let (create, delete) = (inside("create")?, inside("delete")?);
    let mut groups = vec![
        compared("ADD, one at a time", &plugins, adds, FLOOR)?,
        compared("DEL, one at a time", &plugins, dels, FLOOR)?,
        compared("a plugin that does nothing (VERSION)", &plugins, noops, TRUE)?,
        after.group(&before, "create", "where ADD's time goes in the agent")?,
        after.group(&before, "delete", "where DEL's time goes in the agent")?,
    ];
    let [add, del, noop, ..] = groups.as_mut_slice() else { anyhow::bail!("groups are missing") };
    add.note("wharf gives IPv4 and IPv6 and its own programs; ptp and bridge IPv4 only (with IPv6 they wait for DAD)");
    add.note("wharf's programs are verified ahead of need: `16 at once, in a row` has to wait for it, this has not");
    let marks = vec![
        Mark::judge(
            "ADD, one at a time: 0.45 of ptp's",
            "ms",
            Better::Lower,
            add.median(WHARF)?,
            add.median(PTP)? * 0.45,
        ),
        Mark::judge(
            "DEL, one at a time: a quarter of ptp's",
            "ms",
            Better::Lower,
            del.median(WHARF)?,
            del.median(PTP)? / 4.0,
        ),
    ];
    let spawn = noop.median(WHARF)?;
    for (group, inside) in [(add, create), (del, delete)] {
        let outside = group.median(WHARF)? - inside - spawn;
        group.note(format!(
            "of wharf's: {inside:.2} ms in the agent (mean), {spawn:.2} ms to start a process, {outside:.2} ms the rest"
        ));
    }
    drop(sandboxes);
    finish(plugins)?;
    Ok((groups, marks))
}

/// Sixteen at once, in bursts that find the agent rested, and in a row of sixteens that it must keep up with.
///
/// # Errors
/// When a plugin fails.
pub fn many_at_once(agent: &NodeConfig, bursts: usize, rows: usize, waves: usize) -> Result<Part> {
    let plugins = Plugin::all(agent)?;
    let mut groups = Vec::new();
    let mut marks = Vec::new();
    for (title, rounds, waves) in
        [("16 at once, a burst", bursts, 1), (&format!("16 at once, {waves} in a row each"), rows, waves)]
    {
        let sandboxes: Vec<Vec<Sandbox>> =
            plugins.iter().map(|p| p.sandboxes(&format!("w{waves}n"), AT_ONCE * waves)).collect::<Result<_>>()?;
        let (mut adds, mut dels) = (vec![Vec::new(); 3], vec![Vec::new(); 3]);
        for round in 0..rounds {
            for turn in 0..plugins.len() {
                let place = (round + turn) % plugins.len();
                let (Some(plugin), Some(sandboxes)) = (plugins.get(place), sandboxes.get(place)) else { continue };
                plugin.settle()?;
                let (add, added) = at_once(sandboxes, |sandbox| plugin.add(sandbox).map(|(_, added)| added))?;
                plugin.settle()?;
                let pairs: Vec<(&Sandbox, Value)> = sandboxes.iter().zip(added).collect();
                let (del, _) = at_once(&pairs, |(sandbox, added)| plugin.del(sandbox, added))?;
                for (samples, took) in [(&mut adds, add), (&mut dels, del)] {
                    if let Some(samples) = samples.get_mut(place) {
                        samples.push(rate(sandboxes.len(), took));
                    }
                }
            }
        }
        for (verb, samples) in [("ADD", adds), ("DEL", dels)] {
            let mut group = Group::new(&format!("{verb}, {title}"), "per second", Better::Higher);
            for (plugin, samples) in plugins.iter().zip(samples) {
                group.add(plugin.name(), samples)?;
            }
            group.compare_to(PTP)?;
            let (wanted, words) = if verb == "ADD" { (2.0, "twice ptp's") } else { (1.0, "no slower than ptp's") };
            let (target, limit) = (format!("{verb}, {title}: {words}"), wanted * group.median(PTP)?);
            marks.push(Mark::judge(&target, "/s", Better::Higher, group.median(WHARF)?, limit));
            groups.push(group);
        }
    }
    finish(plugins)?;
    Ok((groups, marks))
}

/// Does `work` on every item, [`AT_ONCE`] threads side by side; time from the common start to the last end, and the
/// results in the items' order.
pub(super) fn at_once<I: Sync, T: Send>(
    items: &[I],
    work: impl Fn(&I) -> Result<T> + Sync,
) -> Result<(Duration, Vec<T>)> {
    let start = Barrier::new(AT_ONCE + 1);
    let (work, gate) = (&work, &start);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..AT_ONCE)
            .map(|first| {
                scope.spawn(move || {
                    gate.wait();
                    let mine = items.iter().enumerate().skip(first).step_by(AT_ONCE);
                    mine.map(|(place, item)| Ok((place, work(item)?))).collect::<Result<Vec<_>>>()
                })
            })
            .collect();
        start.wait();
        let begin = Instant::now();
        let ended: Vec<_> = threads.into_iter().map(thread::ScopedJoinHandle::join).collect();
        let took = begin.elapsed();
        let mut results = Vec::with_capacity(items.len());
        for outcome in ended {
            results.extend(outcome.map_err(|_| anyhow!("a thread panicked"))??);
        }
        results.sort_by_key(|(place, _)| *place);
        Ok((took, results.into_iter().map(|(_, result)| result).collect()))
    })
}

/// The three plugins' samples, and a fourth series, with ratios to ptp.
fn compared(title: &str, plugins: &[Plugin], samples: Vec<Vec<f64>>, fourth: &'static str) -> Result<Group> {
    let mut group = Group::new(title, "ms", Better::Lower);
    for (name, samples) in plugins.iter().map(Plugin::name).chain([fourth]).zip(samples) {
        group.add(name, samples)?;
    }
    group.compare_to(PTP)?;
    Ok(group)
}

fn finish(plugins: Vec<Plugin>) -> Result<()> {
    plugins.into_iter().try_for_each(|plugin| {
        let name = plugin.name();
        plugin.finish().with_context(|| format!("{name} after the measurement"))
    })
}

/// What no plugin can be faster than: `ip` makes a veth pair and deletes it.
struct Floor {
    node: Space,
    sandbox: Sandbox,
}

impl Floor {
    fn make() -> Result<Self> {
        let dir = scratch::fresh_dir("floor")?;
        Ok(Self { node: Space::create()?, sandbox: Sandbox::create(&dir, "floor")? })
    }

    fn add(&self) -> Result<Duration> {
        let netns = self.sandbox.path().display();
        self.run("ip", &format!("link add floor0 type veth peer name eth0 netns {netns}"))
    }

    fn del(&self) -> Result<Duration> {
        self.run("ip", "link del floor0")
    }

    fn noop(&self) -> Result<Duration> {
        self.run(TRUE, "")
    }

    fn run(&self, program: &str, arguments: &str) -> Result<Duration> {
        let mut command = Command::new(program);
        command.args(arguments.split_whitespace());
        let finished = run_from(&self.node, command, b"", LIMIT)?;
        let took = finished.took;
        finished.ok()?;
        Ok(took)
    }
}

pub(super) fn ms(took: Duration) -> f64 {
    took.as_secs_f64() * 1e3
}

fn rate(count: usize, took: Duration) -> f64 {
    // A few hundred at most: exact.
    count as f64 / took.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_at_once_comes_back_in_order_and_an_error_is_told() -> Result<()> {
        let items: Vec<usize> = (0..50).collect();
        let (_, doubled) = at_once(&items, |n| Ok(n * 2))?;
        assert_eq!(doubled, items.iter().map(|n| n * 2).collect::<Vec<_>>());
        assert!(at_once(&items, |n| if *n == 33 { Err(anyhow!("33")) } else { Ok(()) }).is_err());
        Ok(())
    }
}
