//! A listener that Envoy refuses, because somebody else has its port.

use std::{
    net::{Ipv4Addr, TcpListener},
    time::Instant,
};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use wharf_api::ProxyState;
use wharf_tests::{Node, NodeConfig, scenario, wait};

use crate::{
    PORT, Scene, await_realized, ingress,
    many::nothing_left,
    pods::{Ask, Pod, import},
};

/// The first port of listeners.
const FIRST: u16 = 15_000;
/// Ports that a change tries before it is refused.
const TRIED: u16 = 9;

/// Takes a port of the node; Envoy cannot have it until this is dropped.
fn take(node: &Node, port: u16) -> Result<TcpListener> {
    let listener = node.space().run(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)))?;
    let listener = listener.with_context(|| format!("take port {port}"))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Envoy's words about that port.
fn reason(port: u16) -> String {
    format!("cannot bind '0.0.0.0:{port}': Address already in use")
}

/// What a command prints, as words between single blanks: tables break long lines.
fn words(node: &Node, arguments: &[&str]) -> Result<String> {
    let text = node.wharf(arguments)?.stdout;
    Ok(text.split_whitespace().collect::<Vec<_>>().join(" "))
}

#[test]
fn the_reason_of_a_refusal_is_told_wherever_the_listener_is() -> Result<()> {
    scenario(NodeConfig::default().with_envoy()?, |node| {
        let scene = Scene::new(node)?;
        import(node, &ingress("db", "[{path: /public}]"))?;
        await_realized(node)?;
        // The rows are in force already when the next Envoy refuses the listener.
        let id = node.endpoint(&scene.db.end)?.id.to_string();
        node.kill_agent()?;
        node.signal_envoy(Signal::SIGKILL)?;
        let stranger = wait::until("the port is free", || Ok(take(node, FIRST).ok()))?;
        node.start_agent()?;
        let reason = reason(FIRST);
        for arguments in [
            &["proxy", "listeners", "-o", "wide"] as &[&str],
            &["proxy", "status"],
            &["status"],
            &["explain", &id],
            &["endpoint", "get", &id],
            &["endpoint", "log", &id],
        ] {
            let mut last = String::new();
            let told = wait::until("the reason", || {
                last = words(node, arguments)?;
                Ok(last.contains(&reason).then_some(()))
            });
            told.with_context(|| format!("{arguments:?}: {last}"))?;
        }
        ensure!(node.wharf(&["proxy", "status"])?.code() == 1, "a refusal is no success");
        let status = node.ask(async |client| client.status().await)?;
        ensure!(status.proxy.refused == 1, "{:?}", status.proxy);
        // What is handed to the port is for Envoy alone.
        for address in scene.db.end.both()? {
            ensure!(!scene.web.reaches(address, Ask::Tcp(PORT))?, "{address} is reached without a proxy");
        }
        ensure!(stranger.accept().is_err(), "the stranger got a connection");

        // A delete waits for nobody who has refused.
        let other = Pod::container(node, "other", "db")?;
        let began = Instant::now();
        node.detach(&other.end)?;
        ensure!(began.elapsed() < wait::PATIENCE / 10, "the delete took {:?}", began.elapsed());

        let list = node.ask(async |client| client.policies().await)?;
        ensure!(list.realized < list.revision && list.problem.is_some(), "refused, and realized: {list:?}");

        // The agent asks again by itself.
        drop(stranger);
        await_realized(node)?;
        ensure!((scene.get("/public")?, scene.get("/secret")?) == (200, 403), "once the port is free");
        let told = words(node, &["proxy", "status"])?;
        ensure!(!told.contains("refused"), "{told}");
        scene.end(node)?;
        nothing_left(node)
    })
}

#[test]
fn a_port_that_is_taken_is_left_out_and_an_import_without_a_port_is_refused_whole() -> Result<()> {
    scenario(NodeConfig::default().with_envoy()?, |node| {
        let scene = Scene::new(node)?;
        let [first, next] = ["/a", "/b"].map(|path| ingress("db", &format!("[{{path: {path}}}]")));
        let file = node.dirs().root.join("policy.yaml");
        let file = file.to_str().context("a path")?;
        let refused = |text: &str, port: u16| -> Result<()> {
            let before = node.ask(async |client| client.policies().await)?;
            std::fs::write(file, text)?;
            let told = node.wharf(&["policy", "import", file])?;
            let words = told.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
            ensure!(told.code() != 0 && words.contains(&reason(port)), "{}", told.describe());
            let after = node.ask(async |client| client.policies().await)?;
            ensure!(
                (after.revision, after.realized) == (before.revision, before.realized) && after.problem.is_none(),
                "{before:?} became {after:?}"
            );
            ensure!(after.policies == before.policies, "{before:?} became {after:?}");
            Ok(())
        };
        // Nobody refuses before Envoy is connected: the rules would be in force at once.
        wait::until("Envoy is connected", || {
            let proxy = node.ask(async |client| client.proxy().await)?;
            Ok((proxy.state == ProxyState::Serving).then_some(()))
        })?;
        // The first policy: nothing was enforced before.
        let mut strangers = (FIRST..FIRST + TRIED).map(|port| take(node, port)).collect::<Result<Vec<_>>>()?;
        refused(&first, FIRST + TRIED - 1)?;
        ensure!((scene.get("/a")?, scene.get("/b")?) == (200, 200), "no policy is in force");
        // What was tried in vain is not tried again.
        import(node, &first)?;
        await_realized(node)?;
        ensure!((scene.get("/a")?, scene.get("/b")?) == (200, 403), "by the first policy");
        // The next one: the first stays in force.
        let after = FIRST + TRIED + 1;
        strangers.extend((after..after + TRIED).map(|port| take(node, port)).collect::<Result<Vec<_>>>()?);
        refused(&next, after + TRIED - 1)?;
        ensure!((scene.get("/a")?, scene.get("/b")?) == (200, 403), "still by the first policy");
        let told = words(node, &["proxy", "listeners"])?;
        let (own, refused) = ((FIRST + TRIED).to_string(), (after + TRIED - 1).to_string());
        ensure!(told.contains(&own) && !told.contains(&refused) && told.contains("serves"), "{told}");
        import(node, &next)?;
        await_realized(node)?;
        ensure!((scene.get("/a")?, scene.get("/b")?) == (403, 200), "by the next policy");
        drop(strangers);
        scene.end(node)
    })
}
