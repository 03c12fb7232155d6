//! The address: the same through restarts, a new installation and a reboot; another where it cannot be had again.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result, ensure};
use nix::mount::{MntFlags, umount2};
use redb::{Database, TableDefinition};
use serde_json::{Value, json};
use wharf_api::NodeHealth;
use wharf_tests::{Node, scenario, scratch, wait};

use crate::support::{await_ok, config, end, turn, well};

const META: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("meta");

fn file(node: &Node) -> PathBuf {
    node.dirs().state.join("health.json")
}

fn kept(node: &Node) -> Result<Value> {
    let text = fs::read_to_string(file(node)).context("read health.json")?;
    serde_json::from_str(&text).context("health.json is JSON")
}

fn same(before: &NodeHealth, after: &NodeHealth) -> Result<()> {
    ensure!((before.ipv4, before.ipv6) == (after.ipv4, after.ipv6), "{before:?}\nbecame\n{after:?}");
    ensure!(after.address_note.is_none(), "{after:?}");
    Ok(())
}

#[test]
fn it_is_the_same_after_twenty_restarts() -> Result<()> {
    scenario(config(), |node| {
        let first = await_ok(node)?;
        let mut last = first.clone();
        for n in 0..20 {
            match n % 2 {
                0 => node.kill_agent()?,
                _ => node.stop_agent()?,
            }
            node.start_agent()?;
            // Some are killed before they have launched it, or while they do.
            if n % 3 != 0 {
                last = await_ok(node)?;
                same(&first, &last)?;
            }
        }
        well(node)?;
        end(node, &last)
    })
}

/// The first container comes as soon as the agent serves; by then the address is leased.
fn is_taken_by_nobody_else(node: &mut Node, before: &NodeHealth) -> Result<()> {
    let web = node.sandbox("web")?;
    node.start_agent()?;
    let endpoint = node.attach(&web)?;
    let after = await_ok(node)?;
    same(before, &after)?;
    ensure!(Some(endpoint.v4()?) != before.ipv4 && Some(endpoint.v6()?) != before.ipv6, "{endpoint:?}");
    node.detach(&endpoint)?;
    well(node)?;
    end(node, &after)
}

#[test]
fn it_is_the_same_after_a_new_installation() -> Result<()> {
    scenario(config(), |node| {
        let before = await_ok(node)?;
        node.stop_agent()?;
        fs::remove_dir_all(&node.dirs().run).context("remove the run directory")?;
        fs::create_dir(&node.dirs().run).context("make it anew")?;
        let bpffs = node.dirs().bpffs.clone();
        umount2(&bpffs, MntFlags::MNT_DETACH).context("unmount the bpffs")?;
        fs::remove_dir(&bpffs).context("remove its mount point")?;
        scratch::mount_bpffs(&bpffs)?;
        is_taken_by_nobody_else(node, &before)
    })
}

#[test]
fn it_is_the_same_after_a_reboot() -> Result<()> {
    scenario(config(), |node| {
        let before = await_ok(node)?;
        node.kill_agent()?;
        // A boot leaves no link.
        wait::until("its link to go", || Ok(node.endpoint_links()?.is_empty().then_some(())))?;
        let path = node.dirs().run.join("state.redb");
        let database = Database::open(&path).context("open the store")?;
        let txn = database.begin_write()?;
        txn.open_table(META)?.insert("boot-id", b"11111111-2222-3333-4444-555555555555".as_slice())?;
        txn.commit().context("write the boot id")?;
        drop(database);
        is_taken_by_nobody_else(node, &before)
    })
}

/// The records of this boot are lost while the kernel may still show the old link.
#[test]
fn it_is_the_same_after_the_store_was_lost() -> Result<()> {
    scenario(config(), |node| {
        let before = await_ok(node)?;
        node.kill_agent()?;
        fs::write(node.dirs().run.join("state.redb"), [0xa5; 4_096]).context("damage the store")?;
        is_taken_by_nobody_else(node, &before)
    })
}

#[test]
fn leased_to_another_before_the_start_it_becomes_another_and_that_is_said() -> Result<()> {
    scenario(config(), |node| {
        let before = await_ok(node)?;
        let web = node.sandbox("web")?;
        let endpoint = node.attach(&web)?;
        node.stop_agent()?;
        let (v4, v6) = (endpoint.v4()?, endpoint.v6()?);
        let mut edited = kept(node)?;
        (edited["ipv4"], edited["ipv6"]) = (json!(v4), json!(v6));
        fs::write(file(node), edited.to_string())?;
        node.start_agent()?;
        let after = await_ok(node)?;
        let note = after.address_note.as_deref().context("a note")?;
        for word in [&format!("{v4}, kept from before"), &format!("{v6}, kept from before"), "harbour/web:eth0"] {
            ensure!(note.contains(word), "no {word:?} in {note:?}");
        }
        ensure!(after.ipv4 != Some(v4) && after.ipv6 != Some(v6), "{after:?}");
        ensure!(node.log().contains("cannot be had again"), "the log does not tell");
        ensure!(kept(node)?["ipv4"] == json!(after.ipv4), "{}", kept(node)?);
        ensure!(before.ipv4.is_some() && node.endpoint(&endpoint)?.ipv4 == Some(v4));
        // The others are kept from now on.
        node.kill_agent()?;
        node.start_agent()?;
        let last = await_ok(node)?;
        same(&NodeHealth { address_note: None, ..after }, &last)?;
        node.detach(&endpoint)?;
        well(node)?;
        end(node, &last)
    })
}

#[test]
fn of_no_pool_any_more_it_becomes_another_and_that_is_said() -> Result<()> {
    scenario(config(), |node| {
        await_ok(node)?;
        node.stop_agent()?;
        let mut edited = kept(node)?;
        edited["ipv4"] = json!("192.0.2.7");
        fs::write(file(node), edited.to_string())?;
        node.start_agent()?;
        let after = await_ok(node)?;
        let note = after.address_note.as_deref().context("a note")?;
        ensure!(note.contains("192.0.2.7") && note.contains("no pool has it"), "{note}");
        ensure!(kept(node)?["ipv4"] == json!(after.ipv4), "{}", kept(node)?);
        well(node)?;
        end(node, &after)
    })
}

#[test]
fn with_another_pool_its_lease_is_released() -> Result<()> {
    let mut node = Node::start(config())?;
    let before = await_ok(&node)?.ipv4.context("an address")?;
    node.stop_agent()?;
    node.set_flag("--ipv4-pool=10.99.0.0/24", true);
    node.start_agent()?;
    let after = await_ok(&node)?;
    let note = after.address_note.as_deref().context("a note")?;
    ensure!(note.contains(&before.to_string()) && note.contains("no pool has it"), "{note}");
    ensure!(after.ipv4.is_some_and(|ip| ip.octets()[..3] == [10, 99, 0]), "{after:?}");
    let listed = node.wharf(&["ipam", "list"])?.ok()?;
    ensure!(
        !listed.lines().any(|line| line.starts_with(&format!("{before} ")) && line.contains("wharf-health")),
        "{listed}"
    );
    end(&mut node, &after)?;
    node.finish()
}

#[test]
fn a_damaged_file_is_told_and_replaced() -> Result<()> {
    scenario(config(), |node| {
        let before = await_ok(node)?;
        for damage in [&b"{\"version\":1,"[..], b"", b"\0\0\0\0", b"{\"version\":99}"] {
            node.kill_agent()?;
            fs::write(file(node), damage)?;
            node.start_agent()?;
            let after = await_ok(node)?;
            let note = after.address_note.as_deref().context("a note")?;
            ensure!(note.contains("health.json cannot be used"), "{note}");
            // The store of this boot still told the address.
            ensure!((before.ipv4, before.ipv6) == (after.ipv4, after.ipv6), "{after:?}");
            ensure!(kept(node)?["ipv4"] == json!(after.ipv4), "{}", kept(node)?);
        }
        let last = await_ok(node)?;
        end(node, &last)
    })
}

#[test]
fn it_comes_back_after_a_time_without_a_health_endpoint() -> Result<()> {
    scenario(config(), |node| {
        let before = await_ok(node)?;
        end(node, &before)?;
        // Given back, it is free to others, but nobody wants it.
        ensure!(node.ask(async |c| c.ipam().await)?.leases.iter().all(|l| l.owner == "node"));
        node.stop_agent()?;
        turn(node, true);
        is_taken_by_nobody_else(node, &before)
    })
}

fn one_family(toml: &str, v4: bool) -> Result<()> {
    scenario(config().toml(toml), |node| {
        let before = await_ok(node)?;
        ensure!(before.ipv4.is_some() == v4 && before.ipv6.is_some() != v4, "{before:?}");
        ensure!(before.probes.len() == 3, "{:?}", before.probes);
        node.kill_agent()?;
        node.start_agent()?;
        let after = await_ok(node)?;
        same(&before, &after)?;
        well(node)?;
        end(node, &after)
    })
}

#[test]
fn ipv4_alone() -> Result<()> {
    one_family("ipv6-pool = []\n", true)
}

#[test]
fn ipv6_alone() -> Result<()> {
    one_family("ipv4-pool = []\n", false)
}
