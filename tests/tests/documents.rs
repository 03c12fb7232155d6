//! Commands that the documents tell people to copy, run as they stand.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use wharf_tests::{NodeConfig, process, scenario};

/// The first shell block of a page.
fn shell_block(page: &str) -> Result<&str> {
    let (_, rest) = page.split_once("```sh\n").context("a block of shell")?;
    Ok(rest.split_once("```").context("its end")?.0)
}

#[test]
fn the_add_and_del_of_the_cni_page_work_as_copied() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let sandbox = node.sandbox("demo")?;
        let copied = shell_block(include_str!("../../docs/cni.md"))?;
        ensure!(copied.contains("CNI_COMMAND=ADD") && copied.contains("CNI_COMMAND=DEL"), "{copied}");
        // The test has a namespace, a socket and a plugin of its own.
        let text = |path: &std::path::Path| path.display().to_string();
        let lines: Vec<&str> = copied.lines().filter(|line| !line.starts_with("ip netns")).collect();
        let script = lines
            .join("\n")
            .replace("/run/netns/demo", &text(sandbox.path()))
            .replace("/run/wharf/wharf.sock", &text(&node.dirs().socket()))
            .replace("/opt/cni/bin/wharf-cni", &text(&process::bin("wharf-cni")?))
            .replace("wharf.json", &text(&node.dirs().root.join("wharf.json")));
        let mut shell = node.command("sh")?;
        shell.args(["-ec", &script]);
        let printed = process::run(shell, b"", Duration::from_secs(60))?.ok()?;
        let result: Value = serde_json::from_str(&printed).with_context(|| printed.clone())?;
        ensure!(result["ips"].as_array().is_some_and(|ips| ips.len() == 2), "{result:#}");
        ensure!(node.endpoints()?.is_empty(), "DEL left {:?}", node.endpoints()?);
        Ok(())
    })
}
