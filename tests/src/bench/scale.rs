//! A thousand endpoints: whether the last comes as fast as the first, what they cost in memory and at rest, and how
//! soon they are back after the agent was killed.

use std::{collections::BTreeSet, fs, os::fd::AsFd, os::fd::AsRawFd, thread, time::Duration, time::Instant};

use anyhow::{Context, Result, bail, ensure};
use aya::{maps::MapInfo, programs::ProgramInfo};
use wharf_api::EndpointState;

use super::{
    churn::{at_once, ms},
    findings::{Better, Group, Mark, Part},
    phases::Phases,
    plugin::{Plugin, settle},
    rest,
};
use crate::{Node, NodeConfig};

/// Adds at each end of the row that are compared.
const WINDOW: usize = 20;
/// What a kernel's memory is told in.
pub(super) const KIB: f64 = 1024.0;

/// Adds that many endpoints one after another, leaves them alone for `at_rest` (an audit and a round of self-checks
/// take place each minute), and deletes them.
///
/// # Errors
/// When an ADD or DEL fails.
pub fn measure(agent: &NodeConfig, endpoints: usize, at_rest: Duration) -> Result<Part> {
    ensure!(endpoints > 3 * WINDOW, "{endpoints} endpoints are too few to compare {WINDOW} with {WINDOW}");
    let mut plugin = Plugin::wharf(agent)?;
    let node = plugin.node().context("wharf has a node")?;
    let sandboxes = plugin.sandboxes("scale", endpoints)?;
    settle(node)?;
    let (empty, before) = (Memory::of(node)?, Phases::of(node)?);

    let (mut times, mut added) = (Vec::with_capacity(endpoints), Vec::with_capacity(endpoints));
    let start = Instant::now();
    let last = endpoints - WINDOW;
    let quarter = endpoints / 4;
    let (mut audited, mut audits_of_quarter) = (Duration::ZERO, Vec::new());
    for sandbox in sandboxes.iter().take(last) {
        if added.len() == quarter {
            let pause = Instant::now();
            settle(node)?;
            audits_of_quarter = rest::audits(node)?;
            audited = pause.elapsed();
        }
        let (took, result) = plugin.add(sandbox)?;
        times.push(ms(took));
        added.push(result);
    }
    let in_a_row = start.elapsed().saturating_sub(audited);
    // The first found the agent with programs at hand; so shall the last.
    settle(node)?;
    let full_before = Phases::of(node)?;
    for sandbox in sandboxes.iter().skip(last) {
        let (took, result) = plugin.add(sandbox)?;
        times.push(ms(took));
        added.push(result);
    }
    let full_after = Phases::of(node)?;
    settle(node)?;
    let full = Memory::of(node)?;
    let listed = node.endpoints()?.len();
    ensure!(listed == endpoints, "{listed} endpoints are listed, {endpoints} were added");
    let kernel = kernel_memory(node)?;
    let (few, all) = (format!("{quarter} endpoints"), format!("{endpoints} endpoints"));
    let mut audits = Group::new("processor time of an audit", "ms", Better::Lower);
    audits.add(&few, audits_of_quarter)?;
    audits.add(&all, rest::audits(node)?)?;
    audits.compare_to(&few)?;
    let share = rest::share(node, at_rest)?;
    let mut resting = Group::new(
        &format!("the agent with {endpoints} endpoints, {} s at rest", at_rest.as_secs()),
        "%",
        Better::Lower,
    );
    resting.add("of one processor", vec![share])?;
    let growth = audits.median(&all)? / audits.median(&few)?;

    let (restart, rebuild) = restarts(plugin.node_mut().context("wharf has a node")?, endpoints)?;

    let window = |from: usize| times.iter().skip(from).take(WINDOW).copied().collect::<Vec<_>>();
    let mut adds = Group::new(&format!("ADD, {endpoints} in a row"), "ms", Better::Lower);
    let first = format!("first {WINDOW}");
    let late = format!("last {WINDOW}");
    adds.add(&first, window(0))?;
    adds.add(&format!("all but the last {WINDOW}"), times.iter().take(last).copied().collect())?;
    adds.add(&format!("{WINDOW} before the last {WINDOW}"), window(last - WINDOW))?;
    adds.add(&late, window(last))?;
    adds.compare_to(&first)?;
    adds.note("first and last found the agent with programs verified ahead of need; those between had to wait for it");
    // A thousand at most: exact.
    let rate = last as f64 / in_a_row.as_secs_f64();
    adds.note(format!("one after another without a pause: {rate:.0} a second"));

    let pairs: Vec<_> = sandboxes.iter().zip(&added).collect();
    let (took, dels) = at_once(&pairs, |(sandbox, added)| plugin.del(sandbox, added))?;
    let mut gone = Group::new(&format!("DEL of {endpoints}, 16 at once"), "ms each", Better::Lower);
    gone.add("wharf", dels.into_iter().map(ms).collect())?;
    gone.note(format!(
        "all of them in {:.2} s, {:.0} a second",
        took.as_secs_f64(),
        endpoints as f64 / took.as_secs_f64()
    ));

    let each = |now: f64, then: f64| (now - then) / endpoints as f64;
    let mut memory = Group::new("memory of the agent", "KiB", Better::Lower);
    for (name, value) in [
        ("resident, no endpoints".to_owned(), empty.rss),
        ("proportional share, no endpoints".to_owned(), empty.pss),
        (format!("resident, {endpoints} endpoints"), full.rss),
        (format!("proportional share, {endpoints} endpoints"), full.pss),
        ("resident, for each endpoint".to_owned(), each(full.rss, empty.rss)),
        ("proportional share, for each endpoint".to_owned(), each(full.pss, empty.pss)),
    ] {
        memory.add(&name, vec![value])?;
    }
    let (slope, mebi) = (memory.median("resident, for each endpoint")?, empty.rss / KIB);
    let ratio = adds.median(&late)? / adds.median(&first)?;
    let marks = vec![
        Mark::judge(&format!("ADD number {endpoints}: within 1.5 of the first"), "x", Better::Lower, ratio, 1.5),
        Mark::judge(
            &format!("{endpoints} endpoints at rest: under 1 % of a processor"),
            "%",
            Better::Lower,
            share,
            1.0,
        ),
        Mark::judge(
            &format!("audit of {endpoints} endpoints: within 4.5 of {quarter}"),
            "x",
            Better::Lower,
            growth,
            4.5,
        ),
        Mark::judge("the agent at rest: at most 18 MiB resident", "MiB", Better::Lower, mebi, 18.0),
        Mark::judge("the agent, each endpoint: 15 KiB more", "KiB", Better::Lower, slope, 15.0),
        Mark::judge(
            &format!("the agent serves after a kill with {endpoints} endpoints: 0.15 s"),
            "s",
            Better::Lower,
            restart.median("serves")?,
            0.15,
        ),
        Mark::judge(
            &format!("{endpoints} endpoints are back after a kill: 0.5 s"),
            "s",
            Better::Lower,
            restart.median("all rebuilt")?,
            0.5,
        ),
    ];
    let groups = vec![
        adds,
        full_after.group(&full_before, "create", &format!("where the last {WINDOW} ADDs' time goes in the agent"))?,
        full_before.group(&before, "create", "where the time of ADDs in a row goes in the agent")?,
        gone,
        restart,
        rebuild,
        memory,
        kernel,
        audits,
        resting,
    ];
    drop(sandboxes);
    plugin.finish()?;
    Ok((groups, marks))
}

/// Kills the agent and starts it again: until it serves, and until every endpoint has the new agent's programs.
/// Also tells where the last of the restarts spent its time.
fn restarts(node: &mut Node, endpoints: usize) -> Result<(Group, Group)> {
    const ROUNDS: usize = 3;
    let (mut serves, mut rebuilt) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        node.kill_agent()?;
        let start = Instant::now();
        node.start_agent()?;
        serves.push(start.elapsed().as_secs_f64());
        while node.endpoints()?.iter().filter(|e| e.state == EndpointState::Ready).count() < endpoints {
            ensure!(start.elapsed() < Duration::from_secs(120), "not every endpoint came back within two minutes");
            // Without a pause, the lists of all endpoints would take a processor from the agent.
            thread::sleep(Duration::from_millis(20));
        }
        rebuilt.push(start.elapsed().as_secs_f64());
        settle(node)?;
    }
    let mut group = Group::new(&format!("restart with {endpoints} endpoints, after SIGKILL"), "s", Better::Lower);
    group.add("serves", serves)?;
    group.add("all rebuilt", rebuilt)?;
    group.note("traffic goes on all the while: programs and links are pinned");
    let title = "where the time of an endpoint's rebuild goes, after the last of them";
    Ok((group, Phases::of(node)?.group(&Phases::default(), "regenerate", title)?))
}

/// Memory of a process, KiB.
pub(super) struct Memory {
    pub(super) rss: f64,
    pss: f64,
}

impl Memory {
    pub(super) fn of(node: &Node) -> Result<Self> {
        let path = format!("/proc/{}/smaps_rollup", node.agent_pid()?);
        let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
        let field = |name: &str| {
            let line = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'));
            line.and_then(|l| l.split_whitespace().next()?.parse().ok()).with_context(|| format!("{path}: no {name}"))
        };
        Ok(Self { rss: field("Rss")?, pss: field("Pss")? })
    }
}

/// What the kernel holds for one endpoint's programs and for the maps that only they use, by the kernel's own account.
fn kernel_memory(node: &Node) -> Result<Group> {
    let endpoints = node.endpoints()?;
    let [one, other, ..] = endpoints.as_slice() else { bail!("fewer than two endpoints") };
    let mut group = Group::new("kernel memory of one endpoint", "KiB", Better::Lower);
    let (mut total, mut maps) = (0.0, BTreeSet::new());
    for name in ["from_container", "to_container", "deliver"] {
        let program = |id: u16| {
            let path = node.dirs().endpoint_pins().join(id.to_string()).join(name);
            ProgramInfo::from_pin(&path).with_context(|| format!("open {}", path.display()))
        };
        let used = |info: &ProgramInfo| -> Result<BTreeSet<u32>> {
            Ok(info.map_ids().with_context(|| format!("maps of {name}"))?.unwrap_or_default().into_iter().collect())
        };
        let (info, shared) = (program(one.id)?, used(&program(other.id)?)?);
        let size = f64::from(info.memory_locked().with_context(|| format!("size of {name}"))?) / KIB;
        total += size;
        group.add(&format!("program {name}"), vec![size])?;
        maps.extend(used(&info)?.difference(&shared));
    }
    for id in maps {
        let info = MapInfo::from_id(id).with_context(|| format!("open map {id}"))?;
        let name = info.name_as_str().unwrap_or_default().to_owned();
        let size = memlock(&info.fd().with_context(|| format!("open map {name}"))?)? / KIB;
        total += size;
        group.add(&format!("map {name}"), vec![size])?;
    }
    group.add("all of it", vec![total])?;
    group.note("memlock of fdinfo; programs also hold their JIT image, metadata and line information beside it");
    Ok(group)
}

/// `memlock` of a map, bytes.
pub(super) fn memlock(map: &impl AsFd) -> Result<f64> {
    let path = format!("/proc/self/fdinfo/{}", map.as_fd().as_raw_fd());
    let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    let line = text.lines().find_map(|l| l.strip_prefix("memlock:"));
    line.and_then(|l| l.trim().parse().ok()).with_context(|| format!("{path}: no memlock"))
}
