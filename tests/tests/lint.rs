//! What others' tools say of what Wharf gives them: metrics and alert rules by promtool, manual pages by mandoc.

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use wharf_tests::{
    NodeConfig,
    frame::{self, PacketSocket},
    http, icmp, process, scenario, scratch, wait,
};

const HEALTH_ON: &str = "--health-interval-ms=100";
const HEALTH_OFF: &str = "--health-interval-ms=0";
const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// The machine's promtool, or the one that `cargo xtask test` unpacks.
fn promtool() -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|directory| directory.join("promtool"))
        .find(|program| program.is_file())
        .unwrap_or_else(|| Path::new(ROOT).join("target/promtool/usr/bin/promtool"))
}

/// Runs a checker over a text; all it says is an error.
fn silent(command: &mut Command, input: &str) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("run {program}; `cargo xtask test` gets it"))?;
    child.stdin.take().context("its standard input")?.write_all(input.as_bytes()).context("give it the text")?;
    let output = child.wait_with_output().with_context(|| format!("wait for {program}"))?;
    let told = [output.stdout, output.stderr].concat();
    let told = String::from_utf8_lossy(&told);
    ensure!(output.status.success() && told.is_empty(), "{program} ({}) says:\n{told}\nof:\n{input}", output.status);
    Ok(())
}

/// The metrics of a text, as `# TYPE` names them.
fn names(text: &str) -> Vec<&str> {
    text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect()
}

#[test]
fn promtool_accepts_every_metric_of_a_node_that_has_been_used() -> Result<()> {
    let flags = ["--node-name", "quay", HEALTH_ON, "--audit-interval-ms", "1000"];
    let config = NodeConfig { flags: flags.map(str::to_owned).to_vec(), toml: None };
    scenario(config, |node| {
        let (a, b) = (node.sandbox("a")?, node.sandbox("b")?);
        let (ea, eb) = (node.attach(&a)?, node.attach(&b)?);
        icmp::ping(a.space()?, eb.v4()?.into())?.must_answer()?;
        // LLDP is not for containers: dropped, so that there is a counter of drops.
        let socket = PacketSocket::open(a.space()?, "eth0")?;
        socket.send(&frame::ethernet(frame::BROADCAST, socket.mac()?, 0x88cc, &[0; 50]))?;
        let page = include_str!("../../docs/metrics.md");
        let listed: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
        // This node has neither delegated mode nor a cluster feed.
        let of_others = ["wharf_delegate_", "wharf_cluster_feed_"];
        let is_here = |name: &&str| name.starts_with("wharf_") && !of_others.iter().any(|of| name.starts_with(of));
        let listed: Vec<&str> = listed.into_iter().filter(is_here).collect();
        ensure!(listed.len() > 30, "only {} metrics are on the page", listed.len());
        // Some come with the first round of the leak audit, of the self-check and of the health probes.
        let metrics = wait::until("every metric of docs/metrics.md", || {
            let text = node.http("GET", "/metrics", None)?.text();
            let there = names(&text);
            Ok(listed.iter().all(|name| there.contains(name)).then_some(text))
        })?;
        let unlisted: Vec<&str> = names(&metrics).into_iter().filter(|name| !listed.contains(name)).collect();
        ensure!(unlisted.is_empty(), "not in docs/metrics.md: {unlisted:?}");
        silent(Command::new(promtool()).args(["check", "metrics"]), &metrics)?;

        let accept = "GET /metrics HTTP/1.1\r\nHost: wharf\r\nConnection: close\r\n\
                      Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5\r\n\r\n";
        let answer = http::raw(&node.dirs().socket(), accept.as_bytes())?;
        let kind = answer.header("content-type").unwrap_or_default();
        ensure!(kind.starts_with("application/openmetrics-text") && answer.text().ends_with("# EOF\n"), "{kind}");
        node.detach(&ea)?;
        node.detach(&eb)?;
        // The health endpoint is the agent's own; without it nothing may be left behind.
        node.stop_agent()?;
        node.set_flag(HEALTH_ON, false);
        node.set_flag(HEALTH_OFF, true);
        node.start_agent()
    })
}

#[test]
fn promtool_accepts_the_alert_rules() -> Result<()> {
    let rules = Path::new(ROOT).join("dist/wharf-alerts.rules.yml");
    let output = Command::new(promtool()).args(["check", "rules"]).arg(&rules).output();
    let output = output.context("run promtool; `cargo xtask test` gets it")?;
    let told = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    ensure!(output.status.success() && told.contains("SUCCESS"), "{told}");
    Ok(())
}

#[test]
fn mandoc_accepts_the_manual_pages() -> Result<()> {
    let directory = scratch::fresh_dir("man")?;
    for program in ["wharf", "wharf-agent"] {
        let output = Command::new(process::bin(program)?).arg("man").arg(&directory).output()?;
        ensure!(output.status.success(), "{program} man: {}", String::from_utf8_lossy(&output.stderr));
    }
    let mut pages = vec![Path::new(ROOT).join("dist/wharf-cni.8")];
    for entry in fs::read_dir(&directory).context("list the pages")? {
        pages.push(entry.context("list the pages")?.path());
    }
    ensure!(pages.len() > 30, "only {} pages", pages.len());
    for page in pages {
        let text = fs::read_to_string(&page).with_context(|| format!("read {}", page.display()))?;
        silent(Command::new("mandoc").args(["-T", "lint", "-W", "warning"]), &text)
            .with_context(|| page.display().to_string())?;
    }
    Ok(())
}
