//! Connections that are older than the rule that redirects them.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use wharf_common::policy::{ACCEPT, DENY};
use wharf_tests::{NodeConfig, process::command_in, scenario, space::Space, wait};

use crate::{
    Open, Scene, connect_from,
    rules::{Side, rule},
};

/// How long a reset may take: the first retransmission of what is lost comes later.
const AT_ONCE: Duration = Duration::from_secs(1);

/// Has the namespace drop packets that it gets.
fn drop_in(space: &Space, which: &str) -> Result<()> {
    let table = format!("table inet t {{ chain c {{ type filter hook input priority 0; {which} drop; }}; }}");
    let done = command_in(space, "nft")?.arg(&table).output()?;
    ensure!(done.status.success(), "nft {table}: {done:?}");
    Ok(())
}

/// The connection is reset as soon as it sends.
fn is_reset(mut stream: &TcpStream) -> Result<()> {
    let start = Instant::now();
    let got = stream.write_all(b"ahoy").and_then(|()| stream.read(&mut [0; 4]));
    ensure!(got.as_ref().is_err_and(|e| e.kind() == ErrorKind::ConnectionReset), "not reset: {got:?}");
    ensure!(start.elapsed() < AT_ONCE, "reset after {:?}", start.elapsed());
    Ok(())
}

#[test]
fn open_connections_follow_the_rules() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let scene = Scene::new(node)?;
        for to in scene.servers()? {
            rule(node, &scene.web.end, Side::Egress, ACCEPT)?;
            let plain = Open::new(&scene.web, to)?;
            scene.redirect(node, Side::Egress, false)?;
            is_reset(&plain.0).with_context(|| format!("{to}: older than the redirect"))?;
            let proxied = Open(connect_from(&scene.web, plain.0.local_addr()?.port(), to)?);
            ensure!(proxied.echoes()?, "{to}: a new connection from the same port");
            scene.redirect(node, Side::Egress, false)?;
            ensure!(proxied.echoes()?, "{to}: after a change that is not about it");
            rule(node, &scene.web.end, Side::Egress, ACCEPT)?;
            ensure!(proxied.echoes()?, "{to}: accepted without the proxy");
            let direct = Open::new(&scene.web, to)?;
            ensure!(direct.echoes()?);
            rule(node, &scene.web.end, Side::Egress, DENY)?;
            ensure!(!proxied.echoes()?, "{to}: denied");
            // The cells are the same, so they can be told again.
            rule(node, &scene.web.end, Side::Egress, ACCEPT)?;
        }
        let taken = scene.egress.taken().len();
        ensure!(taken == 2, "{taken} connections went to the proxy");
        scene.end(node)
    })
}

/// A client may ignore the reset and go on.
#[test]
fn an_older_connection_never_goes_on_past_the_proxy() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let scene = Scene::new(node)?;
        drop_in(scene.web.space()?, "tcp flags & rst != 0")?;
        for (side, end) in [(Side::Egress, &scene.web.end), (Side::Ingress, &scene.db.end)] {
            for to in scene.servers()? {
                let open = Open::new(&scene.web, to)?;
                scene.redirect(node, side, false)?;
                ensure!(!open.echoes()?, "{to}, {side:?}: it goes on past the proxy");
                rule(node, end, side, ACCEPT)?;
            }
        }
        ensure!(scene.egress.taken().is_empty() && scene.ingress.taken().is_empty(), "it went to the proxy");
        scene.end(node)
    })
}

/// A client that waits for an answer when the rule comes repeats its first packet, which begins a connection to the
/// proxy.
#[test]
fn a_connection_that_is_about_to_begin_goes_to_the_proxy() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let scene = Scene::new(node)?;
        drop_in(scene.db.space()?, "tcp flags & syn != 0")?;
        for to in scene.servers()? {
            rule(node, &scene.web.end, Side::Egress, ACCEPT)?;
            thread::scope(|scope| {
                let connects = scope.spawn(|| connect(scene.web.space()?, to));
                let port = to.port().to_string();
                wait::until("the first packet", || {
                    let flows = node.wharf(&["bpf", "ct", "list", "--state", "new", "--port", &port])?.ok()?;
                    Ok(flows.contains(&format!("{to}")).then_some(()))
                })?;
                scene.redirect(node, Side::Egress, false)?;
                connects.join().map_err(|_| anyhow!("the client panicked"))?
            })?;
        }
        wait::until_equal("connections of the proxy's", &2, || Ok(scene.egress.taken().len()))?;
        scene.end(node)
    })
}

fn connect(from: &Space, to: SocketAddr) -> Result<()> {
    from.run(|| TcpStream::connect_timeout(&to, Duration::from_secs(10)))?
        .with_context(|| format!("connect {to}"))
        .map(drop)
}
