//! SBOM of the programs (CycloneDX 1.5): linked crates, crates of the BPF programs, C library.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    process::Command,
};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{Release, VERSION, output};
use crate::{
    build,
    rustc::Rustc,
    workspace::{bare_cargo, write_if_changed},
};

pub(super) fn make(release: &Release<'_>) -> Result<()> {
    let root = release.workspace.root();
    let host = Rustc::detect()?.host;
    let mut crates = Crates::default();
    crates.take(&metadata(root, &host)?, &lock(root)?, Some(build::PRODUCT))?;
    let programs = root.join("ebpf");
    crates.take(&metadata(&programs, &host)?, &lock(&programs)?, None)?;
    let libc = output(Command::new("getconf").arg("GNU_LIBC_VERSION")).context("ask for the C library's version")?;
    let bom = crates.document(String::from_utf8_lossy(&libc).trim());
    let text = serde_json::to_string_pretty(&bom).context("write the SBOM as JSON")? + "\n";
    write_if_changed(&release.out.join(format!("wharf-{VERSION}.cdx.json")), text.as_bytes()).map(drop)
}

fn metadata(directory: &Path, host: &str) -> Result<Value> {
    let mut command = bare_cargo();
    command.current_dir(directory).args(["metadata", "--format-version", "1", "--locked", "--filter-platform", host]);
    serde_json::from_slice(&output(&mut command)?).context("read cargo metadata's answer")
}

fn lock(directory: &Path) -> Result<String> {
    let path = directory.join("Cargo.lock");
    std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))
}

fn checksums(lock: &str) -> BTreeMap<(&str, &str), &str> {
    let row = |package| Some(((field(package, "name")?, field(package, "version")?), field(package, "checksum")?));
    lock.split("[[package]]").filter_map(row).collect()
}

fn field<'a>(package: &'a str, key: &str) -> Option<&'a str> {
    let (_, rest) = package.split_once(&format!("\n{key} = \""))?;
    rest.split_once('"').map(|(value, _)| value)
}

#[derive(Default)]
struct Crates {
    components: BTreeMap<String, Value>,
    dependencies: BTreeMap<String, BTreeSet<String>>,
    roots: BTreeSet<String>,
}

impl Crates {
    /// `of`: packages, by default the whole workspace. Omits build scripts and macros.
    fn take(&mut self, metadata: &Value, lock: &str, of: Option<&[&str]>) -> Result<()> {
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let sums = checksums(lock);
        let packages: BTreeMap<String, Value> =
            list(&metadata["packages"]).into_iter().map(|package| (text(&package["id"]), package)).collect();
        let nodes: BTreeMap<String, Value> =
            list(&metadata["resolve"]["nodes"]).into_iter().map(|node| (text(&node["id"]), node)).collect();
        let members = list(&metadata["workspace_members"]).iter().map(text).collect::<Vec<_>>();
        let wanted = |id: &String| {
            of.is_none_or(|names| names.contains(&packages.get(id).map_or("", |p| p["name"].as_str().unwrap_or(""))))
        };
        let mut left: Vec<String> = members.into_iter().filter(wanted).collect();
        let mut seen = BTreeSet::new();
        for id in &left {
            self.roots.insert(reference(packages.get(id).context("a member that cargo metadata does not list")?));
        }
        while let Some(id) = left.pop() {
            if !seen.insert(id.clone()) {
                continue;
            }
            let package = packages.get(&id).with_context(|| format!("cargo metadata does not list {id}"))?;
            let mut needs = BTreeSet::new();
            for dependency in list(&nodes.get(&id).with_context(|| format!("{id} is not resolved"))?["deps"]) {
                let other = text(&dependency["pkg"]);
                let found = packages.get(&other).with_context(|| format!("cargo metadata does not list {other}"))?;
                let linked = list(&dependency["dep_kinds"]).iter().any(|kind| kind["kind"].is_null());
                let is_macro = list(&found["targets"]).iter().any(|target| target["kind"] == json!(["proc-macro"]));
                if linked && !is_macro {
                    needs.insert(reference(found));
                    left.push(other);
                }
            }
            let name = (package["name"].as_str().unwrap_or(""), package["version"].as_str().unwrap_or(""));
            self.components.insert(reference(package), component(package, sums.get(&name).copied()));
            self.dependencies.entry(reference(package)).or_default().extend(needs);
        }
        Ok(())
    }

    /// `libc`: `glibc 2.36`.
    fn document(mut self, libc: &str) -> Value {
        let (name, version) = libc.split_once(' ').unwrap_or((libc, ""));
        let library = format!("{name}@{version}");
        let licences = json!([{"license": {"id": "LGPL-2.1-or-later"}}]);
        self.components.insert(
            library.clone(),
            json!({"type": "library", "bom-ref": library, "name": name, "version": version, "licenses": licences}),
        );
        self.roots.insert(library.clone());
        self.dependencies.insert(library, BTreeSet::new());
        let product = format!("wharf@{VERSION}-release");
        self.dependencies.insert(product.clone(), self.roots);
        let dependencies: Vec<Value> =
            self.dependencies.iter().map(|(of, needs)| json!({"ref": of, "dependsOn": needs})).collect();
        json!({
            "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
            "metadata": {"component": {"type": "application", "bom-ref": product, "name": "wharf", "version": VERSION}},
            "components": self.components.into_values().collect::<Vec<_>>(),
            "dependencies": dependencies,
        })
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Package URL, the id for scanners.
fn reference(package: &Value) -> String {
    format!("pkg:cargo/{}@{}", text(&package["name"]), text(&package["version"]))
}

fn component(package: &Value, checksum: Option<&str>) -> Value {
    let url = reference(package);
    let mut component = json!({
        "type": "library", "bom-ref": url, "name": package["name"], "version": package["version"],
    });
    // Other crates have no valid package URL.
    if !package["source"].is_null() {
        component["purl"] = json!(url);
    }
    if let Some(expression) = package["license"].as_str() {
        component["licenses"] = json!([{"expression": expression.replace('/', " OR ")}]);
    }
    if let Some(sum) = checksum {
        component["hashes"] = json!([{"alg": "SHA-256", "content": sum}]);
    }
    component
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCK: &str = "version = 4\n\n[[package]]\nname = \"ours\"\nversion = \"1.0.0\"\ndependencies = [\n \"used\",\n]\n\n\
        [[package]]\nname = \"used\"\nversion = \"2.0.0\"\nsource = \"registry\"\nchecksum = \"abc\"\n";

    #[test]
    fn what_is_linked_is_listed_once_with_its_checksum_and_what_only_builds_is_not() -> Result<()> {
        let package = |name: &str, version: &str, source: Value, kind: &str| json!({"id": name, "name": name, "version": version, "source": source, "license": "MIT/Apache-2.0", "targets": [{"kind": [kind]}]});
        let on = |name: &str, kind: Value| json!({"pkg": name, "dep_kinds": [{"kind": kind}]});
        let metadata = json!({
            "workspace_members": ["ours", "other"],
            "packages": [
                package("ours", "1.0.0", Value::Null, "bin"), package("other", "1.0.0", Value::Null, "bin"),
                package("used", "2.0.0", json!("registry"), "lib"), package("derive", "1.0.0", json!("registry"), "proc-macro"),
                package("script", "1.0.0", json!("registry"), "lib"),
            ],
            "resolve": {"nodes": [
                {"id": "ours", "deps": [on("used", Value::Null), on("derive", Value::Null), on("script", json!("build"))]},
                {"id": "used", "deps": []},
            ]},
        });
        let mut crates = Crates::default();
        crates.take(&metadata, LOCK, Some(&["ours"]))?;
        let bom = crates.document("glibc 2.36");
        let names: Vec<_> = bom["components"].as_array().into_iter().flatten().map(|c| text(&c["name"])).collect();
        assert_eq!(names, ["glibc", "ours", "used"]);
        assert_eq!(bom["components"][2]["hashes"][0]["content"], "abc");
        assert_eq!(bom["components"][2]["licenses"][0]["expression"], "MIT OR Apache-2.0");
        assert_eq!(bom["components"][2]["purl"], "pkg:cargo/used@2.0.0");
        assert!(bom["components"][1].get("purl").is_none() && bom["components"][1].get("hashes").is_none());
        let of_ours = bom["dependencies"].as_array().into_iter().flatten().find(|d| d["ref"] == "pkg:cargo/ours@1.0.0");
        assert_eq!(of_ours.map(|d| &d["dependsOn"]), Some(&json!(["pkg:cargo/used@2.0.0"])));
        Ok(())
    }
}
