//! `wharf debuginfo`: the archive opens, has its parts, and nothing that it should not have.

use std::{collections::BTreeMap, fs, io::Read as _, os::unix::fs::PermissionsExt as _, path::Path};

use anyhow::{Context, Result, ensure};
use flate2::read::GzDecoder;
use serde_json::Value;
use wharf_tests::{Node, NodeConfig, process::run, scenario};

const SECRET: &str = "correct-horse-battery-staple";

/// Every file of an archive, by its name below the archive's directory.
fn open(path: &Path) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut archive = tar::Archive::new(GzDecoder::new(fs::File::open(path).context("open the archive")?));
    let mut files = BTreeMap::new();
    for entry in archive.entries().context("read the archive")? {
        let mut entry = entry?;
        let name = entry.path()?.to_str().context("a name that is text")?.to_owned();
        ensure!(!name.starts_with('/') && !name.contains(".."), "{name}");
        ensure!(entry.header().mode()? == 0o600 && entry.header().uid()? == 0, "{name}");
        let mut content = Vec::new();
        entry.read_to_end(&mut content)?;
        let name = name.strip_prefix("wharf-debuginfo/").with_context(|| name.clone())?.to_owned();
        ensure!(files.insert(name.clone(), content).is_none(), "{name} twice");
    }
    Ok(files)
}

fn has(files: &BTreeMap<String, Vec<u8>>, text: &str) -> Option<String> {
    let text = text.as_bytes();
    let holds = |content: &Vec<u8>| content.windows(text.len()).any(|w| w == text);
    files.iter().find(|(_, content)| holds(content)).map(|(name, _)| name.clone())
}

/// Runs it with a secret in its environment.
fn collect(node: &Node, path: &Path) -> Result<wharf_tests::process::Finished> {
    let mut command = node.wharf_command(&["debuginfo", "--file", path.to_str().context("path")?, "-o", "json"])?;
    command.env("API_TOKEN", SECRET);
    run(command, b"", std::time::Duration::from_secs(120))
}

#[test]
fn the_archive_has_every_part_and_nothing_secret() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        let ea = node.attach(&a)?;
        let id = node.endpoint(&ea)?.id;
        fs::write(node.dirs().run.join("note.txt"), SECRET).context("write a file that is not ours")?;
        let path = node.dirs().root.join("out.tar.gz");
        let finished = collect(node, &path)?;
        let report: Value = serde_json::from_str(&finished.stdout).with_context(|| finished.describe())?;
        ensure!(finished.code() == i32::from(report["failed"] != serde_json::json!([])), "{}", finished.describe());
        // A kernel may lack a file of its own; the agent's parts must be there.
        let failed = report["failed"].as_array().context("failed")?;
        ensure!(failed.iter().all(|f| f["part"].as_str().is_some_and(|p| p.starts_with("kernel/"))), "{report:#}");
        ensure!(fs::metadata(&path)?.permissions().mode() & 0o777 == 0o600, "its mode");
        ensure!(report["bytes"].as_u64() == Some(fs::metadata(&path)?.len()), "{report:#}");

        let files = open(&path)?;
        let wanted = [
            "client.json",
            "agent/status.json",
            "agent/endpoints.json",
            "agent/ipam.json",
            "agent/config.json",
            "agent/audit.json",
            "agent/metrics.json",
            "agent/health.json",
            "agent/flows.json",
            "agent/policy.json",
            "agent/namespaces.json",
            "agent/cluster.json",
            "agent/log.txt",
            "agent/maps.json",
            "agent/maps/ENDPOINTS.json",
            "agent/maps/IPCACHE.json",
            "agent/maps/POLICY_CELLS.json",
            "agent/maps/POLICY_PORTS.json",
            "agent/maps/POLICY_SETS.json",
            &format!("agent/maps/{id}.CONFIG.json"),
            &format!("agent/explain/{id}.json"),
            "kernel/version.txt",
            "kernel/sysctl.json",
            "kernel/bpf-file-systems.txt",
            "files/run-directory.json",
            "files/pins.json",
            "failed.json",
        ];
        for name in wanted {
            ensure!(files.get(name).is_some_and(|c| !c.is_empty()), "no {name} among {:?}", files.keys());
        }
        let told: Value = serde_json::from_slice(&files[&format!("agent/explain/{id}.json")])?;
        ensure!(told["kind"] == "endpoint", "{told:#}");
        let log = String::from_utf8_lossy(&files["agent/log.txt"]).into_owned();
        ensure!(log.contains("serving"), "{log}");
        let names = String::from_utf8_lossy(&files["files/run-directory.json"]).into_owned();
        ensure!(names.contains("state.redb") && names.contains("note.txt"), "{names}");

        ensure!(has(&files, SECRET).is_none(), "the secret is in {:?}", has(&files, SECRET));
        let environment = fs::read(format!("/proc/{}/environ", node.agent_pid()?))?;
        for variable in environment.split(|b| *b == 0).filter(|v| v.len() > 8) {
            let variable = String::from_utf8_lossy(variable).into_owned();
            ensure!(has(&files, &variable).is_none(), "{variable} is in {:?}", has(&files, &variable));
        }
        fs::remove_file(node.dirs().run.join("note.txt"))?;
        node.detach(&ea)
    })
}

#[test]
fn without_an_agent_there_is_what_can_be_read_without_one() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        let ea = node.attach(&a)?;
        node.kill_agent()?;
        let path = node.dirs().root.join("out.tar.gz");
        let finished = collect(node, &path)?;
        ensure!(finished.code() == 1, "{}", finished.describe());
        let files = open(&path)?;
        for name in ["client.json", "kernel/version.txt", "files/run-directory.json", "failed.json"] {
            ensure!(files.contains_key(name), "no {name} among {:?}", files.keys());
        }
        let why = files.get("agent/status.json.error").context("why there is no status")?;
        ensure!(String::from_utf8_lossy(why).contains("wharf.sock"), "{}", String::from_utf8_lossy(why));
        let names = String::from_utf8_lossy(&files["files/run-directory.json"]).into_owned();
        ensure!(names.contains("state.redb"), "{names}");
        node.start_agent()?;
        node.detach(&ea)
    })
}

#[test]
fn a_place_that_cannot_be_written_is_said() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let none = node.dirs().root.join("no/such/directory/out.tar.gz");
        let finished = collect(node, &none)?;
        ensure!(finished.code() == 1 && finished.stderr.contains("no/such/directory"), "{}", finished.describe());
        Ok(())
    })
}
