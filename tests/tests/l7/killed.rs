//! Envoy stopped or killed, or the agent killed, while somebody waits for Envoy.

use std::{
    fs,
    net::IpAddr,
    os::unix::fs::{PermissionsExt as _, symlink},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use nix::sys::signal::Signal;
use serde_json::json;
use wharf_api::PolicyChange;
use wharf_tests::{Node, NodeConfig, envoy, scenario, wait};

use crate::{
    PORT, Scene, await_realized, end, ingress,
    many::nothing_left,
    pods::{Pod, import},
    rule,
};

/// Longest that a change of policy may take while Envoy does not answer: it waits half a second. A busy machine is
/// given as much again several times.
const CHANGE: Duration = Duration::from_secs(5);
/// Longest until an Envoy that hangs is killed: after 10 s its stream ends, and 10 s later the agent kills it. A busy
/// machine is given as much again.
const KILLED: Duration = Duration::from_secs(40);
/// The listener of the first rules, and of the next ones.
const LISTENERS: [&str; 2] = ["ingress-15000", "ingress-15001"];

/// Runs an operation, and a look at what goes on meanwhile.
fn during<T: Send>(operation: impl FnOnce() -> Result<T> + Send, look: impl FnOnce() -> Result<()>) -> Result<T> {
    thread::scope(|scope| {
        let operation = scope.spawn(operation);
        let looked = look();
        let result = operation.join().map_err(|_| anyhow!("the operation panicked"))?;
        looked?;
        result
    })
}

/// Waits until somebody waits for Envoy: the removal of this endpoint, or a change of policy.
fn await_wait(node: &Node, listener: &str, endpoint: Option<u16>) -> Result<()> {
    let wait = wait::until("somebody to wait for Envoy", || {
        let waits = node.ask(async |client| client.proxy().await)?.completions;
        Ok(waits.into_iter().find(|wait| wait.listener == listener && wait.endpoint == endpoint))
    })?;
    ensure!(wait.until_unix_ms > wait.since_unix_ms, "the wait has a bound: {wait:?}");
    Ok(())
}

/// The operator sees that the endpoint's delete waits for Envoy, and for how long at most.
fn shows_the_wait(node: &Node, id: u16) -> Result<()> {
    await_wait(node, LISTENERS[0], Some(id))?;
    let told = node.wharf(&["proxy", "completions"])?.ok()?;
    let row = told.lines().find(|line| line.contains(LISTENERS[0])).with_context(|| told.clone())?;
    ensure!(row.contains(&format!("removal of endpoint {id}")) && row.contains(" ms"), "{told}");
    let told = node.wharf(&["explain", &id.to_string()])?;
    let words = told.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    let waits = "the proxy to let go of its connections (step await-proxy)";
    ensure!(words.contains("disconnecting") && words.contains(waits), "{}", told.describe());
    Ok(())
}

/// The policy that was taken last is not realized, and the operator sees what it waits for.
fn is_not_realized(node: &Node, scene: &Scene) -> Result<()> {
    let list = node.ask(async |client| client.policies().await)?;
    let problem = list.problem.clone().unwrap_or_default();
    // The removal of the old listener, and the new one.
    let late = "is not acknowledged and 1 more";
    ensure!(list.realized < list.revision && problem.contains(late), "{list:?}");
    let told = node.wharf(&["proxy", "status"])?.stdout;
    ensure!(told.contains(&format!("{} is not acknowledged", LISTENERS[1])), "{told}");
    let told = node.wharf(&["proxy", "listeners"])?.ok()?;
    ensure!(told.contains("15001") && told.contains("not acknowledged"), "{told}");
    let id = node.endpoint(&scene.db.end)?.id.to_string();
    let told = node.wharf(&["explain", &id])?.stdout;
    let words = told.split_whitespace().collect::<Vec<_>>().join(" ");
    ensure!(words.contains("Envoy has not acknowledged it"), "{told}");
    Ok(())
}

/// A scene whose policy allows `/a`.
fn first_rules(node: &Node) -> Result<Scene> {
    let scene = Scene::new(node)?;
    import(node, &ingress("db", "[{path: /a}]"))?;
    await_realized(node)?;
    ensure!((scene.get("/a")?, scene.get("/b")?) == (200, 403), "by the first rules");
    Ok(scene)
}

/// Imports rules that allow `/b` alone while Envoy is stopped. The import answers within its bound.
fn next_rules(node: &Node, meanwhile: impl FnOnce() -> Result<()>) -> Result<PolicyChange> {
    let text = ingress("db", "[{path: /b}]");
    let began = Instant::now();
    let change = during(
        || import(node, &text),
        || {
            await_wait(node, LISTENERS[1], None)?;
            meanwhile()
        },
    )?;
    let took = began.elapsed();
    ensure!(took < CHANGE, "the change took {took:?}");
    Ok(change)
}

#[test]
fn a_change_while_envoy_is_stopped_is_bounded_and_realized_when_envoy_goes_on() -> Result<()> {
    scenario(NodeConfig::default().with_envoy()?, |node| {
        let scene = first_rules(node)?;
        node.signal_envoy(Signal::SIGSTOP)?;
        let change = next_rules(node, || Ok(()))?;
        ensure!(change.realized < change.revision, "{change:?}");
        is_not_realized(node, &scene)?;
        node.signal_envoy(Signal::SIGCONT)?;
        await_realized(node)?;
        ensure!((scene.get("/a")?, scene.get("/b")?) == (403, 200), "by the next rules");
        scene.end(node)
    })
}

/// The change is kept whole or not at all.
#[test]
fn a_change_whose_agent_is_killed_while_it_waits_is_in_force_or_is_not() -> Result<()> {
    scenario(NodeConfig::default().with_envoy()?, |node| {
        let scene = first_rules(node)?;
        node.signal_envoy(Signal::SIGSTOP)?;
        let (twin, next) = (node.twin()?, ingress("db", "[{path: /b}]"));
        let kill = || {
            await_wait(node, LISTENERS[1], None)?;
            node.kill_agent()
        };
        let taken = during(|| Ok(import(&twin, &next)), kill)?;
        ensure!(taken.is_err(), "an agent that is gone has answered: {taken:?}");
        // Envoy is stopped: the next agent does not wait for it for ever.
        node.start_agent()?;
        node.signal_envoy(Signal::SIGCONT)?;
        await_realized(node)?;
        let now = (scene.get("/a")?, scene.get("/b")?);
        ensure!([(200, 403), (403, 200)].contains(&now), "{now:?}");
        import(node, &next)?;
        await_realized(node)?;
        ensure!((scene.get("/a")?, scene.get("/b")?) == (403, 200), "by the next rules");
        scene.end(node)
    })
}

#[test]
fn a_change_whose_envoy_is_killed_is_realized_by_the_next_envoy() -> Result<()> {
    scenario(NodeConfig::default().with_envoy()?, |node| {
        let scene = first_rules(node)?;
        let envoy = node.envoy().context("Envoy")?;
        // A stopped Envoy leaves the change no way to end before the kill.
        node.signal_envoy(Signal::SIGSTOP)?;
        next_rules(node, || node.signal_envoy(Signal::SIGKILL))?;
        await_realized(node)?;
        ensure!(node.envoy().is_some_and(|next| next != envoy), "another Envoy serves");
        ensure!((scene.get("/a")?, scene.get("/b")?) == (403, 200), "by the next rules");
        scene.end(node)
    })
}

/// What becomes of addresses whose endpoint was deleted.
#[derive(Debug, PartialEq, Eq)]
enum Address {
    Free,
    Leased,
    Rests,
    /// It would be free, but for something that still speaks for it.
    Blocked,
}

fn addresses(node: &Node, of: &[IpAddr]) -> Result<Vec<Address>> {
    let ipam = node.ask(async |client| client.ipam().await)?;
    let now = |ip: &IpAddr| match ipam.resting.iter().find(|address| address.ip == *ip) {
        Some(address) if address.blocked.is_some() => Address::Blocked,
        Some(_) => Address::Rests,
        None if ipam.leases.iter().any(|lease| lease.ip == *ip) => Address::Leased,
        None => Address::Free,
    };
    Ok(of.iter().map(now).collect())
}

fn await_free(node: &Node, of: &[IpAddr]) -> Result<()> {
    wait::until_equal("the addresses", &vec![Address::Free, Address::Free], || addresses(node, of))
}

#[test]
fn a_delete_whose_envoy_is_killed_succeeds_and_its_addresses_are_free_again() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--ip-rest-ms", "200"]).with_envoy()?, |node| {
        let Scene { web, db, server } = first_rules(node)?;
        let (id, own) = (node.endpoint(&db.end)?.id, db.end.both()?);
        node.signal_envoy(Signal::SIGSTOP)?;
        let looks = || {
            shows_the_wait(node, id)?;
            node.signal_envoy(Signal::SIGKILL)
        };
        during(|| node.detach(&db.end), looks).context("an Envoy that has ended holds no delete")?;
        await_free(node, &own)?;
        // The next owner of the addresses has rules of its own.
        let wish = node.netconf().with("args", json!({"cni": {"labels": [{"key": "app", "value": "db"}]}}));
        let wish = wish.with("runtimeConfig", json!({ "ips": own }));
        let end = node.attach_with(&db.sandbox, "eth0", &wish)?;
        ensure!(end.both()? == own, "{:?} in place of {own:?}", end.both()?);
        await_realized(node)?;
        let scene = Scene { web, db: Pod { sandbox: db.sandbox, end }, server };
        ensure!((scene.get("/a")?, scene.get("/b")?) == (200, 403), "by the next Envoy");
        scene.end(node)?;
        nothing_left(node)
    })
}

#[test]
fn a_delete_whose_agent_is_killed_is_finished_by_the_next_agent() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--ip-rest-ms", "200"]).with_envoy()?, |node| {
        let Scene { web, db, server } = first_rules(node)?;
        let (id, own) = (node.endpoint(&db.end)?.id, db.end.both()?);
        node.signal_envoy(Signal::SIGSTOP)?;
        let twin = node.twin()?;
        let kill = || {
            shows_the_wait(node, id)?;
            node.kill_agent()
        };
        during(|| twin.detach(&db.end), kill).context("the plugin leaves the rest to the next agent")?;
        ensure!(db.space()?.links()? == ["lo"], "the container has {:?}", db.space()?.links()?);
        // Envoy is stopped: the next agent cannot wait for it for ever.
        node.start_agent()?;
        wait::until("the next agent finishes the delete", || {
            let ids: Vec<u16> = node.endpoints()?.into_iter().map(|endpoint| endpoint.id).collect();
            Ok((!ids.contains(&id)).then_some(()))
        })?;
        ensure!(node.endpoint_links()?.len() == 1, "{:?}", node.endpoint_links()?);
        // The stopped Envoy still speaks for the addresses.
        wait::until_equal("the addresses", &vec![Address::Blocked, Address::Blocked], || addresses(node, &own))?;
        node.signal_envoy(Signal::SIGCONT)?;
        await_free(node, &own)?;
        await_realized(node)?;
        nothing_left(node)?;
        // The same again is judged by the same rules.
        let Pod { sandbox, .. } = db;
        let scene = Scene { web, db: Pod::of(node, sandbox, "db")?, server };
        await_realized(node)?;
        ensure!((scene.get("/a")?, scene.get("/b")?) == (200, 403), "by the Envoy of before, at port {PORT}");
        let Scene { web, db, server } = scene;
        drop(server);
        [web, db].iter().try_for_each(|pod| node.detach(&pod.end))?;
        nothing_left(node)?;
        end(node)
    })
}

#[test]
fn an_envoy_that_hangs_is_killed_and_connections_pass_by_fail_open_until_the_next_one_serves() -> Result<()> {
    let directory = tempfile::tempdir().context("a directory for Envoy's program")?;
    // Envoy's own user opens it.
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755))?;
    let program = directory.path().join("envoy");
    symlink(envoy::program()?, &program)?;
    let path = program.to_str().context("the program's path")?;
    scenario(NodeConfig::default().flags(&["--envoy", path]), |node| {
        let scene = Scene::new(node)?;
        import(node, &rule("db", "ingress", "[{path: /public}]", ", failOpen: true"))?;
        await_realized(node)?;
        ensure!((scene.get("/public")?, scene.get("/secret")?) == (200, 403), "judged");
        let hung = node.envoy().context("Envoy")?;
        // The next start fails, so that a time without a proxy is there to be seen.
        fs::remove_file(&program)?;
        node.signal_envoy(Signal::SIGSTOP)?;
        wait::until_within(KILLED, "the agent to kill the Envoy that hangs", || {
            Ok((node.envoy() != Some(hung)).then_some(()))
        })?;
        // The kernel closes a process's sockets after it has given up the memory by which the process is known.
        wait::until("connections to pass unseen", || Ok((scene.get("/secret").ok() == Some(200)).then_some(())))?;
        let told = node.wharf(&["proxy", "status"])?.stdout;
        ensure!(told.contains("pass unseen (failOpen), because no proxy serves"), "{told}");
        symlink(envoy::program()?, &program)?;
        wait::until("the next Envoy judges", || {
            let answers = (scene.get("/public").ok(), scene.get("/secret").ok());
            Ok((answers == (Some(200), Some(403))).then_some(()))
        })?;
        scene.end(node)
    })
}
