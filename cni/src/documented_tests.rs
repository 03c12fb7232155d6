//! The plugin accepts every network configuration in the documents.

use std::{collections::BTreeMap, fs, path::Path};

use serde_json::{Deserializer, Value};

use crate::request::{Env, Request};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

fn configurations(text: &str) -> Vec<Value> {
    let mut found = Vec::new();
    let mut begin = 0;
    for line in text.split_inclusive('\n') {
        let rest = &text[begin..];
        begin += line.len();
        if line.trim_start().starts_with('{')
            && let Some(Ok(value)) = Deserializer::from_str(rest).into_iter::<Value>().next()
            && value.get("cniVersion").is_some()
        {
            found.push(value);
        }
    }
    found
}

fn inputs(configuration: Value) -> Vec<Value> {
    let Some(plugins) = configuration.get("plugins").and_then(Value::as_array) else { return vec![configuration] };
    let versions = configuration.get("cniVersions").and_then(Value::as_array).cloned();
    let versions = versions.unwrap_or_else(|| vec![configuration["cniVersion"].clone()]);
    let ours = plugins.iter().filter(|plugin| plugin["type"] == "wharf-cni");
    ours.flat_map(|plugin| {
        versions.iter().map(|version| {
            let mut input = plugin.clone();
            input["cniVersion"] = version.clone();
            input["name"] = configuration["name"].clone();
            input
        })
    })
    .collect()
}

/// Runtimes with `cniVersions` send STATUS and GC; older ones refuse versions above 1.0.0.
#[test]
fn the_shipped_list_offers_status_and_keeps_old_runtimes() {
    let text = fs::read_to_string(Path::new(ROOT).join("dist/10-wharf.conflist")).expect("read the list");
    let list: Value = serde_json::from_str(&text).expect("a list");
    assert_eq!(list["cniVersion"], "1.0.0");
    let status = |input: &Value| {
        let env = Env { command: Some("STATUS".into()), ..Env::default() };
        Request::read(&env, &mut input.to_string().as_bytes()).is_ok()
    };
    assert_eq!(inputs(list).iter().map(status).collect::<Vec<_>>(), [false, true]);
}

#[test]
fn the_plugin_takes_every_configuration_that_is_documented() {
    let folder = fs::read_dir(Path::new(ROOT).join("docs")).expect("list docs");
    let pages = folder.map(|page| page.expect("list docs").path()).filter(|page| page.is_file());
    let files = pages.chain(["README.md", "dist/10-wharf.conflist"].map(|file| Path::new(ROOT).join(file)));
    let mut taken: BTreeMap<String, usize> = BTreeMap::new();
    for file in files {
        let text = fs::read_to_string(&file).expect("read a document");
        let name = file.file_name().expect("a name").to_string_lossy().into_owned();
        for configuration in configurations(&text) {
            if configuration.get("interfaces").is_some() {
                continue;
            }
            for input in inputs(configuration) {
                let env = Env {
                    command: Some("ADD".into()),
                    container_id: Some("c1".into()),
                    netns: Some("/run/netns/c1".into()),
                    ifname: Some("eth0".into()),
                    args: None,
                    runtime: None,
                    path: Some("/opt/cni/bin".into()),
                };
                let asked = Request::read(&env, &mut input.to_string().as_bytes());
                assert!(asked.is_ok(), "{name}: {input:#}\n{asked:?}");
                *taken.entry(name.clone()).or_default() += 1;
            }
        }
    }
    for name in ["README.md", "cni.md", "quick-start.md", "10-wharf.conflist"] {
        assert!(taken.contains_key(name), "{name} has no configuration: {taken:?}");
    }
}
