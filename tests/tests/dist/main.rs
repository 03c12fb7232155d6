//! What `cargo xtask dist` makes: the Debian package through its life, the image under podman, the manifests, the
//! checksums.

mod debian;
mod image;
mod kubernetes;
mod machine;

use std::{fs, os::unix::fs::PermissionsExt as _, path::PathBuf, process::Command};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use wharf_tests::process::{Finished, bin_dir, run};

/// The directory of the packages: beside that of the programs.
fn directory() -> PathBuf {
    bin_dir().with_file_name("dist")
}

/// The one package whose name ends like this.
fn package(suffix: &str) -> Result<PathBuf> {
    let directory = directory();
    let hint = || format!("{} has no *{suffix}: `cargo xtask dist` makes it", directory.display());
    let names = fs::read_dir(&directory).with_context(hint)?;
    let paths = names.filter_map(|entry| Some(entry.ok()?.path()));
    paths.into_iter().find(|path| path.to_string_lossy().ends_with(suffix)).with_context(hint)
}

/// Runs a tool that reads files alone.
fn tool(program: &str, arguments: &[&str]) -> Result<Finished> {
    let mut command = Command::new(program);
    command.args(arguments).current_dir(directory());
    run(command, b"", std::time::Duration::from_secs(60))
}

#[test]
fn every_file_is_in_the_checksums_and_they_hold() -> Result<()> {
    let said = tool("sha256sum", &["--check", "--strict", "SHA256SUMS"])?.ok()?;
    let mut checked: Vec<String> = said.lines().filter_map(|l| Some(l.strip_suffix(": OK")?.to_owned())).collect();
    let entries = fs::read_dir(directory())?.map(|e| Ok(e?.file_name().to_string_lossy().into_owned()));
    let mut there = entries.collect::<Result<Vec<String>>>()?;
    there.retain(|name| name != "SHA256SUMS");
    checked.sort();
    there.sort();
    ensure!(checked == there && there.len() == 5, "checked {checked:?}, there are {there:?}");
    Ok(())
}

#[test]
fn the_tarball_is_unpacked_beside_what_is_there_and_its_programs_run() -> Result<()> {
    let root = wharf_tests::scratch::fresh_dir("tarball")?;
    let (archive, into) = (package(".tar.gz")?, root.display().to_string());
    // A node whose /opt is elsewhere, and whose /etc is its own business: both stay as they are.
    let (opt, etc) = (root.join("opt"), root.join("etc"));
    std::fs::create_dir_all(root.join("var/opt"))?;
    std::os::unix::fs::symlink("var/opt", &opt)?;
    std::fs::create_dir(&etc)?;
    std::fs::set_permissions(&etc, std::fs::Permissions::from_mode(0o700))?;
    tool(
        "tar",
        &["--extract", "--strip-components=1", "--directory", &into, "--file", &archive.display().to_string()],
    )?
    .ok()?;
    ensure!(opt.is_symlink() && root.join("var/opt/cni/bin/wharf-cni").is_file(), "the link /opt was replaced");
    ensure!(std::fs::metadata(&etc)?.permissions().mode() & 0o7777 == 0o700, "the mode of /etc was changed");
    // `cargo xtask dist` refuses programs that need a library of the machine; the test build's do.
    let program = |path: &str| root.join(path).display().to_string();
    let version = format!("wharf-agent {}", env!("CARGO_PKG_VERSION"));
    let said = tool(&program("usr/local/bin/wharf-agent"), &["--version"])?.ok()?;
    ensure!(said.trim() == version, "{said}");
    let said = tool(&program("usr/local/bin/wharf"), &["version", "--client"])?.ok()?;
    ensure!(said.contains(env!("CARGO_PKG_VERSION")), "{said}");
    let mut plugin = Command::new(program("opt/cni/bin/wharf-cni"));
    plugin.env("CNI_COMMAND", "VERSION");
    let said = run(plugin, br#"{"cniVersion":"1.0.0"}"#, std::time::Duration::from_secs(20))?.ok()?;
    ensure!(said.contains("supportedVersions"), "{said}");
    for file in [
        "usr/local/lib/systemd/system/wharf-agent.service",
        "etc/wharf/agent.toml",
        "usr/local/share/man/man8/wharf-cni.8",
        "usr/local/share/doc/wharf/html/index.html",
        "usr/local/share/doc/wharf/html/policy.html",
    ] {
        ensure!(root.join(file).is_file(), "{file} is not there");
    }
    let pages = root.join("usr/local/share/doc/wharf/html");
    let names = fs::read_dir(pages)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let names = names.collect::<Result<Vec<String>>>()?;
    ensure!(names.iter().any(|name| name.starts_with("searchindex")), "the book has no search index: {names:?}");
    Ok(())
}

#[test]
fn the_sbom_names_what_the_programs_are_made_of() -> Result<()> {
    let bom: Value = serde_json::from_slice(&fs::read(package(".cdx.json")?)?)?;
    ensure!(bom["bomFormat"] == "CycloneDX" && bom["specVersion"] == "1.5", "{}", bom["bomFormat"]);
    let components = bom["components"].as_array().context("no components")?;
    let references: Vec<&str> = components.iter().filter_map(|c| c["bom-ref"].as_str()).collect();
    for name in ["tokio", "aya", "redb", "aya-ebpf", "wharf-agent", "wharf-cni", "wharf-kube", "wharf-node"] {
        let known = format!("pkg:cargo/{name}@");
        ensure!(references.iter().any(|reference| reference.starts_with(&known)), "{name} is not in it");
    }
    for build_only in ["prost-build", "serde_derive", "insta", "proptest"] {
        let known = format!("pkg:cargo/{build_only}@");
        ensure!(!references.iter().any(|reference| reference.starts_with(&known)), "{build_only} is in it");
    }
    for component in components {
        ensure!(component["licenses"].is_array(), "{} has no licence", component["bom-ref"]);
        ensure!(component["purl"].is_null() || component["hashes"].is_array(), "{} has no hash", component["bom-ref"]);
    }
    // Whatever is referred to is there.
    let dependencies = bom["dependencies"].as_array().context("no dependencies")?;
    for needed in dependencies.iter().filter_map(|d| d["dependsOn"].as_array()).flatten() {
        ensure!(needed.as_str().is_some_and(|needed| references.contains(&needed)), "{needed} is not a component");
    }
    Ok(())
}
