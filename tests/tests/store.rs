//! Stores that the agent did not leave like this: of the schema before, of one to come, with a record that cannot be
//! read. The containers live through all of it.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition, TableHandle};
use wharf_tests::{
    Attached, Node, NodeConfig, Sandbox,
    echo::{self, EchoServer},
    icmp::ping,
    process::Finished,
    scenario, wait,
};

const META: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("meta");
const ENDPOINTS: TableDefinition<'_, u16, &[u8]> = TableDefinition::new("endpoints");
/// Tables of schema 1; the others came with schema 2.
const SCHEMA_1: [&str; 4] = ["meta", "endpoints", "leases", "intents"];

fn two(node: &Node) -> Result<[(Sandbox, Attached); 2]> {
    let (a, b) = (node.sandbox("a")?, node.sandbox("b")?);
    let (ea, eb) = (node.attach(&a)?, node.attach(&b)?);
    Ok([(a, ea), (b, eb)])
}

fn path_of(node: &Node) -> PathBuf {
    node.dirs().run.join("state.redb")
}

fn schema(node: &Node) -> Result<u64> {
    let database = Database::open(path_of(node)).context("open the store")?;
    let meta = database.begin_read()?.open_table(META)?;
    let value = meta.get("schema")?.context("the store has no schema")?;
    Ok(u64::from_le_bytes(value.value().try_into().context("the schema's version is a number")?))
}

fn set_schema(node: &Node, version: u64) -> Result<()> {
    let database = Database::open(path_of(node)).context("open the store")?;
    let txn = database.begin_write()?;
    txn.open_table(META)?.insert("schema", version.to_le_bytes().as_slice())?;
    txn.commit().context("write the schema")
}

/// Makes the store one of schema 1, as the agent before this one left it.
fn downgrade(node: &Node) -> Result<()> {
    let database = Database::open(path_of(node)).context("open the store")?;
    let txn = database.begin_write()?;
    let newer: Vec<_> = txn.list_tables()?.filter(|t| !SCHEMA_1.contains(&t.name())).collect();
    ensure!(!newer.is_empty(), "schema 2 has no table that schema 1 lacks: this test is for another version");
    for table in newer {
        txn.delete_table(table)?;
    }
    txn.commit().context("take the newer tables out")?;
    drop(database);
    set_schema(node, 1)
}

/// Files that were put aside.
fn aside(node: &Node) -> Result<Vec<String>> {
    let names = fs::read_dir(&node.dirs().run)?.map(|e| Ok(e?.file_name().to_string_lossy().into_owned()));
    let names: Vec<String> = names.collect::<Result<_>>()?;
    Ok(names.into_iter().filter(|n| n.starts_with("state.") && n != "state.redb").collect())
}

fn all_ready(node: &Node, count: usize) -> Result<()> {
    wait::until("every endpoint to be ready", || {
        let all = node.endpoints()?;
        Ok((all.len() == count && all.iter().all(|e| e.state == wharf_api::EndpointState::Ready)).then_some(()))
    })
}

fn findings(node: &Node) -> Result<Vec<String>> {
    Ok(node.audit()?.findings.iter().map(|f| format!("{} {}: {}", f.object, f.subject, f.problem)).collect())
}

#[test]
fn a_store_of_the_schema_before_is_migrated_under_living_containers() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let [(a, ea), (b, eb)] = two(node)?;
        let c = node.sandbox("c")?;
        let ec = node.attach(&c)?;
        node.detach(&ec)?;
        let current = {
            node.kill_agent()?;
            schema(node)?
        };
        downgrade(node)?;
        ensure!(schema(node)? == 1 && current > 1);
        ping(a.space()?, eb.v4()?.into())?.must_answer()?;
        node.start_agent()?;
        all_ready(node, 2)?;
        ensure!(findings(node)?.is_empty(), "{:?}", findings(node)?);
        ensure!(aside(node)?.is_empty(), "put aside: {:?}", aside(node)?);
        ping(b.space()?, ea.v6()?.into())?.must_answer()?;
        let ec = node.attach(&c)?;
        node.detach(&ec)?;
        node.kill_agent()?;
        ensure!(schema(node)? == current, "the store is of schema {} still", schema(node)?);
        node.start_agent()?;
        all_ready(node, 2)?;
        node.detach(&ea)?;
        node.detach(&eb)
    })
}

#[test]
fn a_store_of_a_newer_schema_is_refused_and_stays_as_it_is() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let [(a, ea), (_b, eb)] = two(node)?;
        node.kill_agent()?;
        let current = schema(node)?;
        set_schema(node, 99)?;
        let before = fs::read(path_of(node))?;
        for _ in 0..4 {
            let refused: Finished = node.run_agent_to_end(&[])?;
            ensure!(refused.code() == 1, "{}", refused.describe());
            for word in ["version 99", "state.redb", "it stays as it is"] {
                ensure!(refused.stderr.contains(word), "the error lacks {word:?}: {}", refused.describe());
            }
        }
        ensure!(fs::read(path_of(node))? == before, "the refused store was written to");
        ensure!(aside(node)?.is_empty(), "put aside: {:?}", aside(node)?);
        ping(a.space()?, eb.v4()?.into())?.must_answer()?;
        // The agent that knows it comes.
        set_schema(node, current)?;
        node.start_agent()?;
        all_ready(node, 2)?;
        node.detach(&ea)?;
        node.detach(&eb)
    })
}

/// Cuts the record of an endpoint in half.
fn tear(node: &Node, id: u16) -> Result<()> {
    let database = Database::open(path_of(node)).context("open the store")?;
    let txn = database.begin_write()?;
    {
        let mut table = txn.open_table(ENDPOINTS)?;
        let record = table.get(id)?.context("the endpoint's record")?.value().to_vec();
        table.insert(id, record.get(..record.len() / 2).context("half a record")?)?;
    }
    txn.commit().context("write the torn record")
}

#[test]
fn a_record_that_cannot_be_read_at_three_starts_is_quarantined_and_its_container_lives() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let [(a, ea), (b, eb)] = two(node)?;
        let echo = EchoServer::start(a.space()?)?;
        let talk = || -> Result<()> {
            for address in ea.both()? {
                echo::udp(b.space()?, echo.udp_at(address), 100)?;
                echo::tcp(b.space()?, echo.tcp_at(address), 100)?;
            }
            ping(a.space()?, eb.v4()?.into())?.must_answer()
        };
        let id = node.endpoint(&ea)?.id;
        node.kill_agent()?;
        tear(node, id)?;
        for start in 1..=4 {
            node.start_agent()?;
            all_ready(node, 1)?;
            talk().with_context(|| format!("start {start}"))?;
            let status = node.ask(async |c| c.status().await)?;
            let quarantined: Vec<u16> = status.quarantined.iter().map(|q| q.endpoint).collect();
            ensure!(quarantined == [id], "start {start}: out of service are {quarantined:?}");
            // Its row is left for an agent that can read it until it has failed at three starts.
            let problems: Vec<String> = node.audit()?.findings.into_iter().map(|f| f.problem).collect();
            let told = if start < 3 { "cannot be read: " } else { "out of service: " };
            ensure!(problems.iter().any(|p| p.starts_with(told)), "start {start}: {problems:?}");
            let shown = node.wharf(&["status"])?.stdout;
            ensure!(shown.contains("record"), "start {start}: `wharf status` does not tell of it:\n{shown}");
            let audit = node.wharf(&["audit"])?;
            ensure!(audit.code() == 1, "start {start}: the audit finds nothing: {}", audit.describe());
            // Neither its id nor its addresses go to another.
            let c = node.sandbox("c")?;
            let ec = node.attach(&c)?;
            ensure!(node.endpoint(&ec)?.id != id, "start {start}: the id was given out again");
            ensure!(ec.addresses().iter().all(|ip| !ea.addresses().contains(ip)), "start {start}: {}", ec.result);
            talk().with_context(|| format!("start {start}, beside another container"))?;
            node.detach(&ec)?;
            node.kill_agent()?;
        }
        node.start_agent()?;
        drop(echo);
        node.detach(&ea)?;
        ensure!(a.space()?.links()? == ["lo"], "DEL left {:?} in the container", a.space()?.links()?);
        wait::until_equal("findings", &Vec::new(), || findings(node))?;
        let ea = node.attach(&a)?;
        ping(a.space()?, eb.v4()?.into())?.must_answer()?;
        node.detach(&ea)?;
        node.detach(&eb)
    })
}

#[test]
fn a_container_whose_record_cannot_be_read_is_deleted_by_its_mark() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let [(a, ea), (_b, eb)] = two(node)?;
        let id = node.endpoint(&ea)?.id;
        node.kill_agent()?;
        tear(node, id)?;
        node.start_agent()?;
        node.detach(&ea)?;
        ensure!(a.space()?.links()? == ["lo"], "DEL left {:?} in the container", a.space()?.links()?);
        wait::until_equal("findings", &Vec::new(), || findings(node))?;
        let ea = node.attach(&a)?;
        ping(a.space()?, eb.v4()?.into())?.must_answer()?;
        node.detach(&ea)?;
        node.detach(&eb)
    })
}

/// What the status says of a component.
/// The store with one page overwritten, such that redb panics when it opens it: a panic ends an agent.
fn fatal(whole: &[u8], scratch: &Path) -> Result<Vec<u8>> {
    for page in (0..whole.len()).step_by(4096) {
        let mut damaged = whole.to_vec();
        damaged.iter_mut().skip(page).take(4096).for_each(|byte| *byte = 0xa5);
        fs::write(scratch, &damaged)?;
        let opened = std::panic::catch_unwind(|| Database::open(scratch).and_then(|mut d| d.check_integrity()));
        if opened.is_err() {
            return Ok(damaged);
        }
    }
    bail!("redb panics over no page: this test proves nothing");
}

#[test]
fn a_store_over_which_a_process_dies_is_set_aside_at_the_first_start() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let [(a, ea), (_b, eb)] = two(node)?;
        node.stop_agent()?;
        let damaged = fatal(&fs::read(path_of(node))?, &node.dirs().root.join("scratch.redb"))?;
        fs::write(path_of(node), damaged)?;
        node.start_agent()?;
        let aside = aside(node)?;
        ensure!(aside.len() == 1 && aside[0].contains("damaged"), "{aside:?}");
        ping(a.space()?, eb.v4()?.into())?.must_answer()?;
        node.detach(&ea)?;
        node.detach(&eb)
    })
}

fn component(node: &Node, name: &str) -> Result<Option<(wharf_api::Health, String)>> {
    let status = node.ask(async |c| c.status().await)?;
    Ok(status.components.into_iter().find(|c| c.name == name).map(|c| (c.health, c.message)))
}

#[test]
fn a_store_that_is_removed_under_the_agent_is_written_anew_with_every_record() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let [(a, ea), (b, eb)] = two(node)?;
        let c = node.sandbox("c")?;
        fs::remove_file(path_of(node))?;
        // Refused by whoever notices first: this ADD, or the agent's own look, and then it succeeds.
        let first = node.attach(&c);
        if let Err(refused) = &first {
            let refused = format!("{refused:#}");
            ensure!(refused.contains("the file was removed") && refused.contains("\"code\":11"), "{refused}");
        }
        wait::until("status to tell of it", || {
            let told = component(node, "store")?;
            Ok(told.filter(|(_, message)| message.contains("written anew")).map(drop))
        })?;
        let ec = first.or_else(|_| node.attach(&c))?;
        node.kill_agent()?;
        node.start_agent()?;
        all_ready(node, 3)?;
        ensure!(findings(node)?.is_empty() && aside(node)?.is_empty(), "{:?} {:?}", findings(node)?, aside(node)?);
        ping(a.space()?, ec.v4()?.into())?.must_answer()?;
        ping(b.space()?, ea.v6()?.into())?.must_answer()?;
        [ea, eb, ec].iter().try_for_each(|e| node.detach(e))
    })
}

#[test]
fn sockets_and_run_directory_that_are_removed_come_back_by_themselves() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let [(a, ea), (_b, eb)] = two(node)?;
        let mode = |path: &PathBuf| fs::metadata(path).map(|m| m.permissions().mode() & 0o777);
        for socket in [node.dirs().socket(), node.dirs().admin_socket()] {
            fs::remove_file(&socket)?;
            wait::until("the socket to come back", || Ok(mode(&socket).ok().filter(|m| *m == 0o660)))?;
        }
        for name in ["api", "admin"] {
            // The file is there a moment before status tells of it.
            wait::until("status to tell of the socket", || {
                Ok(component(node, name)?.filter(|(_, message)| message.contains("bound again")).map(drop))
            })?;
        }
        // Renamed first: the agent may bind a socket again while a directory's files are removed one after another.
        let gone = node.dirs().run.with_extension("gone");
        fs::rename(&node.dirs().run, &gone)?;
        fs::remove_dir_all(&gone)?;
        wait::until("the store to come back", || Ok(path_of(node).exists().then_some(())))?;
        wait::until("the API to answer", || Ok(node.endpoints().ok().filter(|all| all.len() == 2)))?;
        wait::until("the admin thread to answer", || Ok(mode(&node.dirs().admin_socket()).ok()))?;
        // Without an agent: the queue of deletes is there too.
        let queue = wharf_handover::queue::Queue::new(&node.dirs().run);
        wait::until("the deletion queue to come back", || Ok(queue.path().is_dir().then_some(())))?;
        node.kill_agent()?;
        node.detach(&eb)?;
        node.start_agent()?;
        all_ready(node, 1)?;
        ping(a.space()?, ea.gateways()?[0])?.must_answer()?;
        node.detach(&ea)?;
        node.stop_agent()?;
        ensure!(
            !node.dirs().socket().exists() && !node.dirs().admin_socket().exists(),
            "a socket stays after the stop"
        );
        node.start_agent()
    })
}
