//! Deletes that cannot finish, and deletes that found no agent.

use std::fs;

use anyhow::{Context, Result, ensure};
use wharf_tests::{icmp::ping, scenario};

use crate::{
    phrases::{AGENT_DOWN, STUCK_DELETE},
    support::{all_is_well, await_screen, await_status, config, id, remedy, two, wharf},
};

#[test]
fn a_delete_does_not_finish() -> Result<()> {
    scenario(config(), |node| {
        let [(_a, ea), (b, eb)] = two(node)?;
        let ia = id(node, &ea)?;
        let foreign = node.dirs().endpoint_pins().join(&ia).join("backup");
        fs::create_dir(&foreign).context("put something into the endpoint's pins")?;
        let refused = node.cni("DEL").of(&ea.container, &ea.netns, "eth0").conf(&node.netconf()).run()?.failure()?;
        ensure!(refused.code == 11, "{refused:?}");
        await_status(node, 1, STUCK_DELETE.status)?;
        for subject in [ia.as_str(), "web-3f9c51aa", &ea.v4()?.to_string()] {
            // The agent's own next try shows its steps for a moment.
            await_screen(node, &["explain", subject], |s| s.says_all(STUCK_DELETE.explain))?.must(
                1,
                &["disconnecting for", &format!("`wharf endpoint delete {ia}`"), "harbour/web-3f9c51aa:eth0"],
            )?;
        }
        // The audit names the thing itself, and not what a delete has taken away already.
        let audit = wharf(node, &["audit"])?;
        audit.must(
            1,
            &["not of Wharf's making", "remove it by hand if nobody needs it", &foreign.display().to_string()],
        )?;
        audit.must_say(&["2 found", "delete begun and not finished"])?;

        remedy(node, STUCK_DELETE.remedy, &[("PATH", &foreign.display().to_string()), ("ID", &ia)])?;
        all_is_well(node)?;
        ping(b.space()?, eb.gateways()?[0])?.must_answer()?;
        node.detach(&eb)
    })
}

#[test]
fn the_agent_was_down_while_containers_went() -> Result<()> {
    scenario(config(), |node| {
        let [(a, ea), (b, eb)] = two(node)?;
        node.kill_agent()?;
        node.detach(&ea)?;
        ensure!(a.space()?.links()? == ["lo"], "{:?}", a.space()?.links()?);
        // A record that a full disk or a dying machine cut off.
        fs::write(node.dirs().run.join("deletions/harbour-cut.json"), b"{\"version\":1,\"netw")
            .context("cut a record")?;
        for command in [&["status"][..], &["audit"], &["explain", "web-3f9c51aa"]] {
            wharf(node, command)?.must(2, AGENT_DOWN.status)?;
        }
        ping(b.space()?, eb.gateways()?[0])?.must_answer()?;

        // What `systemctl start wharf-agent` does.
        node.start_agent()?;
        await_status(node, 1, AGENT_DOWN.other)?;
        wharf(node, &["explain", "web-3f9c51aa"])?.must(0, AGENT_DOWN.explain)?;
        let bad = node.dirs().run.join("deletions/bad");
        let aside: Vec<_> = fs::read_dir(&bad).context("list what was put aside")?.collect::<Result<_, _>>()?;
        ensure!(aside.len() == 1, "{aside:?}");
        for file in aside {
            remedy(node, AGENT_DOWN.remedy, &[("PATH", &file.path().display().to_string())])?;
        }
        all_is_well(node)?;
        await_screen(node, &["status"], |s| s.says("deletion-queue: OK empty"))?;
        node.detach(&eb)
    })
}
