//! The disk of the run directory, and the records on it.

use std::{fs, io::Write, path::PathBuf};

use anyhow::{Context, Result, bail, ensure};
use nix::mount::{MsFlags, mount};
use wharf_tests::{Attached, Node, NodeConfig, icmp::ping, scenario};

use crate::{
    phrases::{DAMAGED_STORE, DISK_FULL},
    support::{all_is_well, await_status, config, id, remedy, two, wharf},
};

/// Takes what space there is, to the last byte.
fn fill(node: &Node) -> Result<PathBuf> {
    let path = node.dirs().run.join("core.1234");
    let mut file = fs::File::create(&path).context("create the filler")?;
    for size in [65_536, 4_096, 512, 1] {
        loop {
            match file.write(&vec![b'x'; size]) {
                Ok(n) if n > 0 => {}
                Ok(_) => break,
                Err(e) if e.raw_os_error() == Some(libc::ENOSPC) => break,
                Err(e) => return Err(e).context("fill the disk"),
            }
        }
    }
    Ok(path)
}

/// Leases addresses until the store has no room left in its own file.
fn exhaust(node: &Node) -> Result<Vec<String>> {
    let mut leased = Vec::new();
    for n in 0..4_000 {
        let ip = format!("10.87.{}.{}", 100 + n / 200, 10 + n % 200);
        let answer = node.http("POST", &format!("/v1/ipam/{ip}?owner=somebody"), None)?;
        if answer.status >= 300 {
            return Ok(leased);
        }
        leased.push(ip);
    }
    bail!("the store always found room")
}

fn on_a_full_disk(node: &mut Node) -> Result<()> {
    let [(_a, ea), (b, eb)] = two(node)?;
    let ia = id(node, &ea)?;
    let filler = fill(node)?;
    let leased = exhaust(node)?;
    let refused = node.cni("DEL").of(&ea.container, &ea.netns, "eth0").conf(&node.netconf()).run()?.failure()?;
    ensure!(refused.code == 11, "{refused:?}");
    await_status(node, 2, DISK_FULL.status)?;
    let told = wharf(node, &["explain", "web-3f9c51aa"])?;
    told.must(1, DISK_FULL.explain)?;
    told.must_say(&[&node.dirs().run.join("state.redb").display().to_string()])?;
    ensure!(!told.says("nothing of it is left"), "it tells of an end that was not: {told:?}");
    // Containers that are there notice nothing.
    ping(b.space()?, eb.gateways()?[0])?.must_answer()?;

    fs::remove_file(filler).context("make room")?;
    remedy(node, DISK_FULL.remedy, &[("ID", &ia)])?;
    for ip in leased {
        let gone = node.http("DELETE", &format!("/v1/ipam/{ip}"), None)?;
        ensure!(gone.status < 300, "{}", gone.text());
    }
    all_is_well(node)?;
    node.detach(&eb)?;
    node.finish()
}

#[test]
fn the_disk_is_full() -> Result<()> {
    let mut node = Node::without_agent(config())?;
    mount(Some("small"), &node.dirs().run, Some("tmpfs"), MsFlags::empty(), Some("size=16m,mode=0755"))
        .context("mount a small tmpfs")?;
    let outcome = node.start_agent().and_then(|()| on_a_full_disk(&mut node));
    outcome.with_context(|| format!("the agent's log:\n{}", node.log()))
}

/// The node's routes to their containers would go with the gateway.
#[test]
fn pools_without_the_addresses_of_endpoints_whose_records_are_lost_are_refused() -> Result<()> {
    const POOL: &str = "--ipv4-pool=10.87.0.0/24";
    scenario(NodeConfig::default().flags(&[POOL]), |node| {
        let a = node.sandbox("a")?;
        let ea = node.attach(&a)?;
        node.kill_agent()?;
        fs::write(node.dirs().run.join("state.redb"), [0xa5; 8192]).context("damage the store")?;
        node.set_flag(POOL, false);
        for _ in 0..2 {
            let refused = node.run_agent_to_end(&["--ipv4-pool=10.99.0.0/24"])?;
            let told = ["10.87.0.2, which no pool has", "start with the pools of before"];
            ensure!(told.iter().all(|part| refused.stderr.contains(part)), "{}", refused.stderr);
            ping(a.space()?, ea.gateways()?[0])?.must_answer()?;
        }
        node.set_flag(POOL, true);
        node.start_agent()?;
        await_status(node, 1, &["1 endpoint lost its record"])?;
        ping(a.space()?, ea.gateways()?[0])?.must_answer()?;
        node.detach(&ea)
    })
}

#[test]
fn the_records_are_lost() -> Result<()> {
    scenario(config(), |node| {
        let [(a, ea), (b, eb)] = two(node)?;
        let old = id(node, &ea)?;
        node.kill_agent()?;
        let path = node.dirs().run.join("state.redb");
        let length = usize::try_from(fs::metadata(&path)?.len())?;
        fs::write(&path, vec![0xa5; length]).context("damage the store")?;
        node.start_agent()?;
        await_status(node, 1, DAMAGED_STORE.status)?;
        let audit = wharf(node, &["audit"])?;
        audit.must(1, DAMAGED_STORE.audit)?;
        audit.must_say(&["owner harbour/web-3f9c51aa:eth0", "owner harbour/db-77e0c2d1:eth0"])?;
        for subject in ["web-3f9c51aa", old.as_str(), &ea.v4()?.to_string()] {
            wharf(node, &["explain", subject])?.must(1, DAMAGED_STORE.explain)?;
        }
        // They are there and work, until they are created anew.
        ping(a.space()?, eb.v4()?.into())?.must_answer()?;
        let anew: Vec<Attached> = [(&a, &ea), (&b, &eb)]
            .into_iter()
            .map(|(sandbox, endpoint)| {
                node.detach(endpoint)?;
                node.attach(sandbox)
            })
            .collect::<Result<_>>()?;
        all_is_well(node)?;
        for endpoint in &anew {
            ping(node.space(), endpoint.v4()?.into())?.must_answer()?;
            node.detach(endpoint)?;
        }
        Ok(())
    })
}
