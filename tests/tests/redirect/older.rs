//! Connections that are older than the rule that redirects them.

use anyhow::{Result, ensure};
use wharf_common::policy::ACCEPT;
use wharf_tests::{NodeConfig, process::command_in, scenario, space::Space};

use crate::{
    Open, Scene,
    rules::{Side, rule},
};

/// Has the namespace drop packets that it gets.
fn drop_in(space: &Space, which: &str) -> Result<()> {
    let table = format!("table inet t {{ chain c {{ type filter hook input priority 0; {which} drop; }}; }}");
    let done = command_in(space, "nft")?.arg(&table).output()?;
    ensure!(done.status.success(), "nft {table}: {done:?}");
    Ok(())
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
