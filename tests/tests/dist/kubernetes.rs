//! The manifests: their shape, and that they agree with the unit and the image.

use std::{collections::BTreeSet, fs};

use anyhow::{Context, Result, ensure};
use serde::Deserialize as _;
use serde_json::Value;
use wharf_tests::process;

use crate::package;

const UNIT: &str = include_str!("../../../dist/wharf-agent.service");

/// The documents of the shipped file.
pub(crate) fn documents() -> Result<Vec<Value>> {
    let text = fs::read_to_string(package(".yaml")?)?;
    serde_norway::Deserializer::from_str(&text).map(|d| Value::deserialize(d).context("a document")).collect()
}

/// The pod of the DaemonSet.
pub(crate) fn pod() -> Result<Value> {
    let mut documents = documents()?.into_iter();
    let set = documents.find(|d| d["kind"] == "DaemonSet").context("no DaemonSet")?;
    Ok(set["spec"]["template"]["spec"].clone())
}

/// Texts of a list.
pub(crate) fn texts(list: &Value) -> Vec<String> {
    list.as_array().into_iter().flatten().filter_map(|item| item.as_str().map(str::to_owned)).collect()
}

#[test]
fn the_daemonset_has_the_units_capabilities_and_no_more() -> Result<()> {
    let pod = pod()?;
    let agent = &pod["containers"][0]["securityContext"];
    let added: BTreeSet<String> =
        texts(&agent["capabilities"]["add"]).into_iter().map(|name| format!("CAP_{name}")).collect();
    let unit: BTreeSet<String> = process::bounds(UNIT)?.iter().map(ToString::to_string).collect();
    ensure!(added == unit, "the pod adds {added:?}, the unit allows {unit:?}");
    ensure!(texts(&agent["capabilities"]["drop"]) == ["ALL"] && agent["privileged"].is_null(), "{agent}");
    // The API server refuses `false` beside SYS_ADMIN.
    ensure!(agent["allowPrivilegeEscalation"].is_null(), "{agent}");
    let plugin = &pod["initContainers"][0]["securityContext"];
    ensure!(plugin["capabilities"]["add"].is_null() && texts(&plugin["capabilities"]["drop"]) == ["ALL"], "{plugin}");
    Ok(())
}

#[test]
fn the_daemonset_is_complete_and_has_one_agent_on_each_node() -> Result<()> {
    let all = documents()?;
    let kinds =
        all.iter().map(|d| (d["kind"].as_str(), d["metadata"]["name"].as_str(), d["metadata"]["namespace"].as_str()));
    let (wharf, kinds) = (Some("wharf"), kinds.collect::<Vec<_>>());
    let expected =
        [(Some("Namespace"), wharf, None), (Some("ConfigMap"), wharf, wharf), (Some("DaemonSet"), wharf, wharf)];
    ensure!(kinds == expected, "{kinds:?}");
    let set = &all[2]["spec"];
    ensure!(set["selector"]["matchLabels"] == set["template"]["metadata"]["labels"], "the selector selects others");
    ensure!(set["updateStrategy"]["rollingUpdate"]["maxSurge"] == 0, "two agents of one node would run at once");
    let pod = pod()?;
    ensure!(pod["hostNetwork"] == true && pod["tolerations"][0]["operator"] == "Exists", "{pod}");
    let image = format!("localhost/wharf:{}", env!("CARGO_PKG_VERSION"));
    let volumes: BTreeSet<_> = pod["volumes"].as_array().into_iter().flatten().map(|v| v["name"].to_string()).collect();
    let mut mounted = BTreeSet::new();
    for container in [&pod["containers"][0], &pod["initContainers"][0]] {
        ensure!(container["image"] == image.as_str(), "{}", container["image"]);
        mounted.extend(container["volumeMounts"].as_array().into_iter().flatten().map(|m| m["name"].to_string()));
    }
    ensure!(mounted == volumes, "mounted: {mounted:?}, there are {volumes:?}");
    let host = |name: &str| {
        let volumes = pod["volumes"].as_array().into_iter().flatten();
        volumes.clone().find(|v| v["name"] == name).map(|v| v["hostPath"]["path"].clone()).unwrap_or_default()
    };
    // What the conflist, the unit and the operator's tool on the host take for granted.
    for (name, path) in [
        ("run", "/run/wharf"),
        ("state", "/var/lib/wharf"),
        ("bpffs", "/sys/fs/bpf"),
        ("netns", "/run/netns"),
        ("plugins", "/opt/cni/bin"),
        ("networks", "/etc/cni/net.d"),
    ] {
        ensure!(host(name) == path, "{name}: {}", host(name));
    }
    let netns = pod["containers"][0]["volumeMounts"].as_array().into_iter().flatten().find(|m| m["name"] == "netns");
    ensure!(netns.is_some_and(|m| m["mountPropagation"] == "HostToContainer"), "later namespaces would not be seen");
    Ok(())
}

#[test]
fn the_configuration_of_the_configmap_is_one_that_the_agent_accepts() -> Result<()> {
    let all = documents()?;
    let text = all[1]["data"]["agent.toml"].as_str().context("no agent.toml")?;
    // As it is, and with everything that it suggests.
    for text in [text.to_owned(), text.replace("\n#", "\n")] {
        let file = wharf_tests::scratch::fresh_dir("config")?.join("agent.toml");
        fs::write(&file, text)?;
        let mut command = std::process::Command::new(process::bin("wharf-agent")?);
        command.arg("--check-config").arg("--config").arg(&file).env_clear();
        process::run(command, b"", wharf_tests::wait::PATIENCE)?.ok()?;
    }
    Ok(())
}
