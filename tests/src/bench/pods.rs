//! Pods of containerd: their start and stop with Wharf beside `ptp` with `host-local`, on one node, by one containerd.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::{Value, json};

use super::{
    churn::ms,
    findings::{Better, Group, Mark, Part},
    phases::Phases,
    plugin::{PTP, WHARF, settle},
};
use crate::{
    Node, NodeConfig,
    containerd::{Containerd, Network},
};

/// The runtime classes, one for each network.
const CLASSES: [&str; 2] = [WHARF, PTP];

/// One at a time, then many at once; a few pods more tell how much of a start is the plugin's.
///
/// # Errors
/// When a pod does not start or stop, or containerd cannot be run here.
pub fn measure(agent: &NodeConfig, rounds: usize, at_once: usize, waves: usize) -> Result<Part> {
    let mut node = Node::start(agent.clone())?;
    let wharf = json!({"type": "wharf-cni", "socket": node.dirs().socket()});
    let leases = node.dirs().root.join("leases");
    let ipam = json!({"type": "host-local", "ranges": [[{"subnet": "10.204.0.0/16"}]], "routes": [{"dst": "0.0.0.0/0"}], "dataDir": leases});
    let ptp = json!({"type": "ptp", "ipMasq": false, "ipam": ipam});
    let networks = [(WHARF, wharf), (PTP, ptp)].map(|(handler, plugin)| Network { handler, list: list(plugin) });
    let containerd = Containerd::start(node.space(), &networks, &["ptp", "host-local"])?;
    let bench = Bench { node: &node, containerd: &containerd };

    bench.warm_up()?;
    let (mut groups, mut marks) = bench.one_at_a_time(rounds)?;
    let start = groups.first_mut().context("no group")?;
    start.note("from the request over the CRI to its answer; wharf gives IPv4 and IPv6, ptp IPv4 only (with IPv6 it waits for DAD)");
    start.note(bench.share_of_the_plugin(rounds.min(20))?);
    let (more, judged) = bench.many_at_once(at_once, waves)?;
    groups.extend(more);
    marks.extend(judged);

    let left = containerd.left_behind()?;
    ensure!(left.is_empty(), "containerd left behind: {left:?}");
    drop(containerd);
    node.finish()?;
    Ok((groups, marks))
}

fn list(plugin: Value) -> Value {
    json!({"cniVersion": "1.0.0", "name": "bench", "plugins": [plugin]})
}

struct Bench<'a> {
    node: &'a Node,
    containerd: &'a Containerd,
}

impl Bench<'_> {
    /// What is made once only is there afterwards.
    fn warm_up(&self) -> Result<()> {
        CLASSES.iter().try_for_each(|class| self.one(class, "warm").map(drop))
    }

    /// A pod that comes and goes: the time of RunPodSandbox, and that of StopPodSandbox.
    fn one(&self, class: &str, name: &str) -> Result<(Duration, Duration)> {
        let cri = self.containerd.cri();
        settle(self.node)?;
        let begin = Instant::now();
        let id = cri.run_pod(&self.containerd.pod(name), class)?;
        let run = begin.elapsed();
        settle(self.node)?;
        let begin = Instant::now();
        cri.stop_pod(&id)?;
        let stop = begin.elapsed();
        cri.remove_pod(&id)?;
        Ok((run, stop))
    }

    fn one_at_a_time(&self, rounds: usize) -> Result<Part> {
        let mut samples = [[Vec::new(), Vec::new()], [Vec::new(), Vec::new()]];
        for round in 0..rounds {
            for turn in 0..CLASSES.len() {
                let place = (round + turn) % CLASSES.len();
                let class = CLASSES.get(place).context("a class in turn")?;
                let (run, stop) = self.one(class, &format!("one{round}"))?;
                for (samples, took) in samples.iter_mut().zip([run, stop]) {
                    samples.get_mut(place).context("a class in turn")?.push(ms(took));
                }
            }
        }
        let titles = ["start of a pod, one at a time", "stop of a pod, one at a time"];
        compared(titles, samples, "ms", Better::Lower)
    }

    fn many_at_once(&self, count: usize, waves: usize) -> Result<Part> {
        let mut samples = [[Vec::new(), Vec::new()], [Vec::new(), Vec::new()]];
        for wave in 0..waves {
            for turn in 0..CLASSES.len() {
                let place = (wave + turn) % CLASSES.len();
                let class = *CLASSES.get(place).context("a class in turn")?;
                let names: Vec<String> = (0..count).map(|n| format!("many{wave}-{n}")).collect();
                let cri = self.containerd.cri();
                settle(self.node)?;
                let (run, ids) = at_once(&names, |name| Ok(cri.run_pod(&self.containerd.pod(name), class)?))?;
                settle(self.node)?;
                let (stop, _) = at_once(&ids, |id| Ok(cri.stop_pod(id)?))?;
                at_once(&ids, |id| Ok(cri.remove_pod(id)?))?;
                for (samples, took) in samples.iter_mut().zip([run, stop]) {
                    // A few dozen: exact.
                    samples.get_mut(place).context("a class in turn")?.push(count as f64 / took.as_secs_f64());
                }
            }
        }
        let titles = [format!("start of pods, {count} at once"), format!("stop of pods, {count} at once")];
        compared([&titles[0], &titles[1]], samples, "per second", Better::Higher)
    }

    /// How much of a pod's start is spent in wharf-cni, and how much of that in the agent. A script tells when the
    /// plugin begins and ends; its own start is not in that time, and pods with it are in no other number.
    fn share_of_the_plugin(&self, rounds: usize) -> Result<String> {
        let (dir, plugin) = (self.containerd.dir(), self.containerd.plugins().join("wharf-cni"));
        let real = fs::read(&plugin).context("read the plugin")?;
        fs::copy(&plugin, dir.join("real")).context("copy the plugin")?;
        let (dir, times) = (dir.display(), dir.join("times"));
        let timer = format!(
            "#!/bin/bash\nLC_ALL=C\nbegin=$EPOCHREALTIME\n{dir}/real\ncode=$?\n\
             echo \"$CNI_COMMAND $begin $EPOCHREALTIME\" >> {}\nexit $code\n",
            times.display()
        );
        self.containerd.set_plugin(timer.as_bytes())?;
        let before = Phases::of(self.node)?;
        let mut whole = Duration::ZERO;
        for round in 0..rounds {
            whole += self.one(WHARF, &format!("timed{round}"))?.0;
        }
        let inside = Phases::of(self.node)?.mean_ms(&before, "create").context("the agent counted nothing")?;
        self.containerd.set_plugin(&real)?;
        let took = took(&fs::read_to_string(&times).context("what the timer wrote")?, "ADD")?;
        ensure!(took.len() == rounds, "{} ADDs instead of {rounds}", took.len());
        // Both are means over the same pods.
        let (plugin, whole) = (took.iter().sum::<f64>() / rounds as f64, ms(whole) / rounds as f64);
        let percent = 100.0 * plugin / whole;
        Ok(format!(
            "of {whole:.1} ms with wharf (mean of {rounds} more pods) wharf-cni takes {plugin:.2} ms, {percent:.1} %, of which {inside:.2} ms are \
             the agent's"
        ))
    }
}

/// Milliseconds of each call of a command, out of lines `COMMAND BEGIN END` in seconds.
fn took(lines: &str, command: &str) -> Result<Vec<f64>> {
    let of = |line: &str| {
        let mut words = line.split(' ').skip(1).map(str::parse::<f64>);
        match (words.next(), words.next()) {
            (Some(Ok(begin)), Some(Ok(end))) => Ok((end - begin) * 1e3),
            _ => Err(anyhow!("a line of the timer: {line:?}")),
        }
    };
    lines.lines().filter(|line| line.split(' ').next() == Some(command)).map(of).collect()
}

/// A group for each title with both networks, and its mark: Wharf takes no longer than ptp, and has a higher rate.
fn compared(titles: [&str; 2], samples: [[Vec<f64>; 2]; 2], unit: &'static str, better: Better) -> Result<Part> {
    let (mut groups, mut marks) = (Vec::new(), Vec::new());
    for (title, samples) in titles.into_iter().zip(samples) {
        let mut group = Group::new(title, unit, better);
        for (class, samples) in CLASSES.into_iter().zip(samples) {
            group.add(class, samples)?;
        }
        group.compare_to(PTP)?;
        let aim = if better == Better::Lower { "no slower" } else { "faster" };
        let target = format!("{title}: {aim} than with ptp");
        marks.push(Mark::judge(&target, unit, better, group.median(WHARF)?, group.median(PTP)?));
        groups.push(group);
    }
    Ok((groups, marks))
}

/// Does it for all of them at the same time; the time until the last has ended, and the results.
fn at_once<I: Sync, T: Send>(items: &[I], work: impl Fn(&I) -> Result<T> + Sync) -> Result<(Duration, Vec<T>)> {
    let (work, begin) = (&work, Instant::now());
    thread::scope(|scope| {
        let threads: Vec<_> = items.iter().map(|item| scope.spawn(move || work(item))).collect();
        let ended = threads.into_iter().map(|thread| thread.join().map_err(|_| anyhow!("a thread panicked"))?);
        let results = ended.collect::<Result<Vec<_>>>()?;
        Ok((begin.elapsed(), results))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_one_command_are_milliseconds() -> Result<()> {
        let lines = "ADD 1.000000 1.004500\nDEL 2.000000 2.002000\nADD 3.5 3.5025\n";
        let seen: Vec<String> = took(lines, "ADD")?.into_iter().map(|ms| format!("{ms:.1}")).collect();
        assert_eq!(seen, ["4.5", "2.5"]);
        assert!(took("ADD 1\n", "ADD").is_err());
        Ok(())
    }
}
