//! The manifests: their shape, and that they agree with the unit and the image.

use std::{collections::BTreeSet, fs};

use anyhow::{Context, Result, ensure};
use serde::Deserialize as _;
use serde_json::{Value, json};
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

/// Every container of the pod.
fn containers(pod: &Value) -> impl Iterator<Item = &Value> {
    ["initContainers", "containers"].into_iter().flat_map(move |list| pod[list].as_array().into_iter().flatten())
}

pub(crate) fn container<'a>(pod: &'a Value, name: &str) -> Result<&'a Value> {
    containers(pod).find(|container| container["name"] == name).with_context(|| format!("no container {name}"))
}

/// Names of the volumes that a container mounts.
fn mounted(container: &Value) -> BTreeSet<&str> {
    let mounts = container["volumeMounts"].as_array().into_iter().flatten();
    mounts.filter_map(|mount| mount["name"].as_str()).collect()
}

pub(crate) fn texts(list: &Value) -> Vec<String> {
    list.as_array().into_iter().flatten().filter_map(|item| item.as_str().map(str::to_owned)).collect()
}

#[test]
fn the_daemonset_has_the_units_capabilities_and_no_more() -> Result<()> {
    let pod = pod()?;
    let agent = &container(&pod, "agent")?["securityContext"];
    let added: BTreeSet<String> =
        texts(&agent["capabilities"]["add"]).into_iter().map(|name| format!("CAP_{name}")).collect();
    let unit: BTreeSet<String> = process::bounds(UNIT)?.iter().map(ToString::to_string).collect();
    ensure!(added == unit, "the pod adds {added:?}, the unit allows {unit:?}");
    ensure!(texts(&agent["capabilities"]["drop"]) == ["ALL"] && agent["privileged"].is_null(), "{agent}");
    // The API server refuses `false` beside SYS_ADMIN.
    ensure!(agent["allowPrivilegeEscalation"].is_null(), "{agent}");
    // CHOWN gives the state directory to wharf-kube's user.
    let plugin = &pod["initContainers"][0]["securityContext"]["capabilities"];
    ensure!(texts(&plugin["add"]) == ["CHOWN"] && texts(&plugin["drop"]) == ["ALL"], "{plugin}");
    let user = container(&pod, "wharf-kube")?["securityContext"]["runAsUser"].to_string();
    ensure!(texts(&pod["initContainers"][0]["command"]).last() == Some(&user), "it is given to another user");
    Ok(())
}

#[test]
fn the_daemonset_is_complete_and_has_one_agent_on_each_node() -> Result<()> {
    let all = documents()?;
    let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
    let of = |d: &Value| [&d["kind"], &d["metadata"]["namespace"], &d["metadata"]["name"]].map(text).join(" ");
    let kinds: Vec<String> = all.iter().map(of).collect();
    let expected = [
        "Namespace - wharf",
        "ServiceAccount wharf wharf-kube",
        "ClusterRole - wharf-kube",
        "Role default wharf-kube",
        "ClusterRoleBinding - wharf-kube",
        "RoleBinding default wharf-kube",
        "ConfigMap wharf wharf",
        "DaemonSet wharf wharf",
    ];
    ensure!(kinds == expected, "{kinds:?}");
    let set = &all.last().context("no document")?["spec"];
    ensure!(set["selector"]["matchLabels"] == set["template"]["metadata"]["labels"], "the selector selects others");
    ensure!(set["updateStrategy"]["rollingUpdate"]["maxSurge"] == 0, "two agents of one node would run at once");
    let pod = pod()?;
    ensure!(pod["hostNetwork"] == true && pod["tolerations"][0]["operator"] == "Exists", "{pod}");
    // One image has the programs of one architecture.
    let architecture = if cfg!(target_arch = "x86_64") { "amd64" } else { "arm64" };
    let selector = json!({"kubernetes.io/os": "linux", "kubernetes.io/arch": architecture});
    ensure!(pod["nodeSelector"] == selector, "{}", pod["nodeSelector"]);
    let image = format!("localhost/wharf:{}", env!("CARGO_PKG_VERSION"));
    let volumes = pod["volumes"].as_array().into_iter().flatten();
    let volumes: BTreeSet<&str> = volumes.filter_map(|volume| volume["name"].as_str()).collect();
    ensure!(containers(&pod).all(|container| container["image"] == image.as_str()), "{pod}");
    let used: BTreeSet<&str> = containers(&pod).flat_map(mounted).collect();
    ensure!(used == volumes, "mounted: {used:?}, there are {volumes:?}");
    let host = |name: &str| {
        let volumes = pod["volumes"].as_array().into_iter().flatten();
        volumes.clone().find(|v| v["name"] == name).map(|v| v["hostPath"]["path"].clone()).unwrap_or_default()
    };
    // What the conflist, the unit and the operator's tool on the host take for granted.
    for (name, path) in [
        ("run", "/run/wharf"),
        ("feed", "/run/wharf/feed"),
        ("state", "/var/lib/wharf"),
        ("bpffs", "/sys/fs/bpf"),
        ("netns", "/run/netns"),
        ("plugins", "/opt/cni/bin"),
        ("networks", "/etc/cni/net.d"),
        ("servers", "/var/lib/wharf-kube"),
    ] {
        ensure!(host(name) == path, "{name}: {}", host(name));
    }
    let netns =
        container(&pod, "agent")?["volumeMounts"].as_array().into_iter().flatten().find(|m| m["name"] == "netns");
    ensure!(netns.is_some_and(|m| m["mountPropagation"] == "HostToContainer"), "later namespaces would not be seen");
    Ok(())
}

#[test]
fn wharf_kube_has_no_privileges_and_alone_has_the_token() -> Result<()> {
    let pod = pod()?;
    ensure!(pod["automountServiceAccountToken"] == false && pod["serviceAccountName"] == "wharf-kube", "{pod}");
    let kube = container(&pod, "wharf-kube")?;
    let security = json!({
        "runAsNonRoot": true, "runAsUser": 65588, "runAsGroup": 65588,
        "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
        "seccompProfile": {"type": "RuntimeDefault"}, "capabilities": {"drop": ["ALL"]},
    });
    ensure!(kube["securityContext"] == security, "{}", kube["securityContext"]);
    // Of the node's directories, it has the feed's and its own.
    ensure!(mounted(kube) == ["feed", "servers", "token"].into(), "{:?}", mounted(kube));
    let volumes = || pod["volumes"].as_array().into_iter().flatten();
    let with = |kind: &str| -> Vec<&Value> { volumes().filter(|v| !v[kind].is_null()).map(|v| &v["name"]).collect() };
    ensure!(with("projected") == ["token"] && with("emptyDir").is_empty() && with("secret").is_empty(), "{pod}");
    let holders: Vec<&Value> =
        containers(&pod).filter(|container| mounted(container).contains("token")).map(|c| &c["name"]).collect();
    ensure!(holders == ["wharf-kube"], "{holders:?}");
    Ok(())
}

#[test]
fn the_roles_allow_what_wharf_kube_needs_and_no_more() -> Result<()> {
    let all = documents()?;
    let rules: Vec<String> = all
        .iter()
        .flat_map(|role| role["rules"].as_array().into_iter().flatten().map(move |rule| (role, rule)))
        .map(|(role, rule)| {
            let [groups, resources, names, verbs] =
                ["apiGroups", "resources", "resourceNames", "verbs"].map(|key| texts(&rule[key]).join(" "));
            let names = if names.is_empty() { names } else { format!(" ({names})") };
            format!("{}: {groups}/ {resources}{names}: {verbs}", role["kind"].as_str().unwrap_or_default())
        })
        .collect();
    let expected = [
        "ClusterRole: / nodes: get list watch patch",
        "ClusterRole: / nodes/status: patch",
        "ClusterRole: / namespaces pods: list watch",
        "ClusterRole: / namespaces (kube-system): get",
        "ClusterRole: networking.k8s.io/ networkpolicies: list watch",
        "ClusterRole: policy.networking.k8s.io/ clusternetworkpolicies: list watch",
        "ClusterRole: cilium.io/ ciliumnetworkpolicies ciliumclusterwidenetworkpolicies: list watch",
        "ClusterRole: apiextensions.k8s.io/ customresourcedefinitions (clusternetworkpolicies.policy.networking.k8s.io \
         ciliumnetworkpolicies.cilium.io ciliumclusterwidenetworkpolicies.cilium.io): get",
        "ClusterRole: events.k8s.io/ events: create",
        "Role: discovery.k8s.io/ endpointslices: list",
    ];
    ensure!(rules == expected, "{rules:#?}");
    for (binding, role) in [("ClusterRoleBinding", "ClusterRole"), ("RoleBinding", "Role")] {
        let binding = all.iter().find(|d| d["kind"] == binding).context("no binding")?;
        let subjects = json!([{"kind": "ServiceAccount", "name": "wharf-kube", "namespace": "wharf"}]);
        ensure!(binding["roleRef"]["kind"] == role && binding["roleRef"]["name"] == "wharf-kube", "{binding}");
        ensure!(binding["subjects"] == subjects, "{binding}");
    }
    Ok(())
}

#[test]
fn the_configuration_of_the_configmap_is_one_that_the_agent_accepts() -> Result<()> {
    let all = documents()?;
    let map = all.iter().find(|d| d["kind"] == "ConfigMap").context("no ConfigMap")?;
    // Only the image has the group.
    let text = map["data"]["agent.toml"].as_str().context("no agent.toml")?.replace("wharf-feed", "root");
    // As it is, and with everything that it suggests.
    let suggested = |line: &str| line.strip_prefix('#').is_some_and(|rest| !rest.starts_with(' '));
    let all: Vec<&str> = text.lines().map(|line| if suggested(line) { &line[1..] } else { line }).collect();
    for text in [&text, &all.join("\n")] {
        let file = wharf_tests::scratch::fresh_dir("config")?.join("agent.toml");
        fs::write(&file, text)?;
        let mut command = std::process::Command::new(process::bin("wharf-agent")?);
        command.arg("--check-config").arg("--config").arg(&file).env_clear();
        process::run(command, b"", wharf_tests::wait::PATIENCE)?.ok()?;
    }
    Ok(())
}
