//! Install and uninstall below a temporary root, with fake programs.

use std::{collections::BTreeMap, os::unix::fs::PermissionsExt};

use clap::Parser;

use super::*;
use crate::args::{Cli, Task, UninstallArgs};

struct Machine {
    folder: tempfile::TempDir,
}

impl Machine {
    fn new() -> Result<Self> {
        let machine = Self { folder: tempfile::tempdir()? };
        for (file, text) in [
            ("release/wharf-agent", "agent 1"),
            ("release/wharf", "cli 1"),
            ("release/wharf-cni", "cni 1"),
            ("dist/wharf-agent.service", "[Service]\nExecStart=@prefix@/bin/wharf-agent\n"),
            ("dist/agent.toml", "# settings 1\n"),
            ("dist/10-wharf.conflist", "{}"),
            ("generated/man/wharf.1", "manual"),
            ("generated/man/wharf-agent.8", "manual"),
            ("dist/wharf-cni.8", "manual"),
            ("generated/wharf.bash", "bash"),
            ("generated/wharf.zsh", "zsh"),
            ("generated/wharf.fish", "fish"),
            ("generated/wharf-agent.bash", "bash"),
            ("generated/wharf-agent.zsh", "zsh"),
            ("generated/wharf-agent.fish", "fish"),
        ] {
            machine.source(file, text)?;
        }
        fs::create_dir_all(machine.root().join("etc"))?;
        Ok(machine)
    }

    fn root(&self) -> PathBuf {
        self.folder.path().join("root")
    }

    fn source(&self, file: &str, text: &str) -> Result<()> {
        let path = self.folder.path().join("sources").join(file);
        fs::create_dir_all(path.parent().context("parent")?)?;
        Ok(fs::write(path, text)?)
    }

    fn install(&self, extra: &[&str]) -> Result<Vec<String>> {
        let (sources, arguments) = self.asked(extra)?;
        apply(&plan(&sources, &arguments)?, &arguments)
    }

    fn dry_run(&self, extra: &[&str]) -> Result<Vec<String>> {
        let (sources, arguments) = self.asked(&[extra, &["--dry-run"]].concat())?;
        preview(&sources, &arguments)
    }

    fn asked(&self, extra: &[&str]) -> Result<(Sources, InstallArgs)> {
        let root = self.root();
        let mut words = vec!["xtask", "install", "--root", root.to_str().context("utf-8")?];
        words.extend(extra);
        let Task::Install(arguments) = Cli::try_parse_from(words)?.command else { bail!("not install") };
        let from = self.folder.path().join("sources");
        let sources =
            Sources { programs: from.join("release"), dist: from.join("dist"), generated: from.join("generated") };
        Ok((sources, arguments))
    }

    fn uninstall(&self, purge: bool) -> Result<Vec<String>> {
        let layout = crate::args::Layout { root: Some(self.root()), prefix: "/usr/local".into() };
        let manifest = Manifest::read(&below(Some(&self.root()), &manifest_file(&layout.prefix)))?;
        uninstall::take_away(
            &manifest.context("no manifest")?,
            &UninstallArgs { layout, purge, now: false, force: false },
        )
    }

    fn tree(&self) -> Result<BTreeMap<String, String>> {
        let mut tree = BTreeMap::new();
        let mut folders = vec![self.root()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder)? {
                let path = entry?.path();
                let name = path.strip_prefix(self.root())?.display().to_string();
                if path.is_dir() {
                    tree.insert(name, "/".to_owned());
                    folders.push(path);
                } else {
                    tree.insert(name, fs::read_to_string(&path)?);
                }
            }
        }
        Ok(tree)
    }

    fn read(&self, file: &str) -> Result<String> {
        Ok(fs::read_to_string(self.root().join(file))?)
    }

    fn write(&self, file: &str, text: &str) -> Result<()> {
        let path = self.root().join(file);
        fs::create_dir_all(path.parent().context("parent")?)?;
        Ok(fs::write(path, text)?)
    }
}

#[test]
fn uninstall_leaves_the_machine_as_install_found_it() -> Result<()> {
    let machine = Machine::new()?;
    machine.write("usr/local/bin/other", "not ours")?;
    machine.write("etc/cni/net.d/00-other.conflist", "not ours")?;
    let before = machine.tree()?;
    machine.install(&[])?;
    assert_eq!(machine.read("usr/local/bin/wharf-agent")?, "agent 1");
    assert_eq!(machine.read("opt/cni/bin/wharf-cni")?, "cni 1");
    assert_eq!(machine.read("etc/wharf/agent.toml")?, "# settings 1\n");
    assert!(machine.read("etc/systemd/system/wharf-agent.service")?.contains("ExecStart=/usr/local/bin/wharf-agent"));
    for page in ["man1/wharf.1", "man8/wharf-agent.8", "man8/wharf-cni.8"] {
        assert_eq!(machine.read(&format!("usr/local/share/man/{page}"))?, "manual", "{page}");
    }
    let mode = fs::metadata(machine.root().join("usr/local/bin/wharf"))?.permissions().mode();
    assert_eq!(mode & 0o777, 0o755);
    machine.uninstall(false)?;
    assert_eq!(machine.tree()?, before);
    Ok(())
}

#[test]
fn edited_configuration_survives_upgrade_and_uninstall_and_purge_takes_it() -> Result<()> {
    let machine = Machine::new()?;
    let before = machine.tree()?;
    machine.install(&[])?;
    machine.write("etc/wharf/agent.toml", "mtu = 1400\n")?;
    machine.source("dist/agent.toml", "# settings 2\n")?;
    machine.source("dist/10-wharf.conflist", "{\"new\":1}")?;
    machine.source("release/wharf", "cli 2")?;
    let report = machine.install(&[])?;
    assert!(report.contains(&"kept      /etc/wharf/agent.toml (yours)".to_owned()), "{report:?}");
    assert_eq!(machine.read("etc/wharf/agent.toml")?, "mtu = 1400\n");
    assert_eq!(machine.read("etc/cni/net.d/10-wharf.conflist")?, "{\"new\":1}", "unedited configuration follows");
    assert_eq!(machine.read("usr/local/bin/wharf")?, "cli 2");

    let report = machine.uninstall(false)?;
    assert!(report.iter().any(|line| line.contains("agent.toml") && line.contains("--purge")), "{report:?}");
    assert_eq!(machine.read("etc/wharf/agent.toml")?, "mtu = 1400\n");
    assert!(!machine.root().join("usr/local/bin").exists());

    machine.install(&[])?;
    assert_eq!(machine.read("etc/wharf/agent.toml")?, "mtu = 1400\n");

    machine.uninstall(false)?;
    machine.uninstall(true)?;
    assert_eq!(machine.tree()?, before);
    Ok(())
}

#[test]
fn purge_removes_edited_configuration_and_state() -> Result<()> {
    let machine = Machine::new()?;
    let before = machine.tree()?;
    machine.install(&[])?;
    machine.write("etc/wharf/agent.toml", "mtu = 1400\n")?;
    machine.write("var/lib/wharf/facts", "x")?;
    machine.uninstall(true)?;
    let mut after = machine.tree()?;
    assert_eq!((after.remove("var"), after.remove("var/lib")), (Some("/".into()), Some("/".into())));
    assert_eq!(after, before);
    Ok(())
}

#[test]
fn configuration_from_before_the_first_install_is_never_removed() -> Result<()> {
    let machine = Machine::new()?;
    machine.write("etc/wharf/agent.toml", "mtu = 1300\n")?;
    machine.install(&[])?;
    machine.uninstall(true)?;
    assert_eq!(machine.read("etc/wharf/agent.toml")?, "mtu = 1300\n");
    Ok(())
}

#[test]
fn a_file_that_is_not_ours_stops_the_install_before_it_changes_anything() -> Result<()> {
    let machine = Machine::new()?;
    machine.write("usr/local/bin/wharf", "somebody else's")?;
    let before = machine.tree()?;
    let message = machine.install(&[]).map_err(|error| error.to_string()).err().unwrap_or_default();
    assert!(message.contains("not Wharf's") && message.ends_with("/usr/local/bin/wharf"), "{message}");
    assert_eq!(machine.tree()?, before);
    Ok(())
}

#[test]
fn a_dry_run_says_what_an_install_does_and_changes_nothing() -> Result<()> {
    let machine = Machine::new()?;
    let says = |report: &[String], words: &str| report.iter().any(|line| line == words);
    let before = machine.tree()?;
    let report = machine.dry_run(&[])?;
    assert_eq!(machine.tree()?, before);
    for line in ["new       /usr/local/bin/wharf", "new       /etc/wharf/", "nothing was changed"] {
        assert!(says(&report, line), "{line}: {report:?}");
    }
    machine.install(&[])?;
    let named = |line: &String| line.strip_prefix("new ").map(|path| path.trim().trim_matches('/').to_owned());
    let mut promised: Vec<String> = before.keys().cloned().chain(report.iter().filter_map(named)).collect();
    promised.sort();
    assert_eq!(promised, machine.tree()?.into_keys().collect::<Vec<_>>());

    machine.write("etc/wharf/agent.toml", "mtu = 1400\n")?;
    machine.source("release/wharf", "cli 2")?;
    let before = machine.tree()?;
    let report = machine.dry_run(&["--cni-bin-dir", "/usr/lib/cni"])?;
    assert_eq!(machine.tree()?, before);
    for line in [
        "replaced  /usr/local/bin/wharf",
        "unchanged /usr/local/bin/wharf-agent",
        "kept      /etc/wharf/agent.toml (yours)",
        "new       /usr/lib/cni/wharf-cni",
        "removed   /opt/cni/bin/wharf-cni",
    ] {
        assert!(says(&report, line), "{line}: {report:?}");
    }
    machine.write("usr/lib/cni/wharf-cni", "somebody else's")?;
    let report = machine.dry_run(&["--cni-bin-dir", "/usr/lib/cni"])?;
    assert!(says(&report, "refused   /usr/lib/cni/wharf-cni (not Wharf's; move it away)"), "{report:?}");
    Ok(())
}

#[test]
fn what_is_not_built_is_listed_by_a_dry_run_and_refused_by_prebuilt() -> Result<()> {
    let machine = Machine::new()?;
    fs::remove_dir_all(machine.folder.path().join("sources/release"))?;
    fs::remove_dir_all(machine.folder.path().join("sources/generated"))?;
    let report = machine.dry_run(&[])?;
    assert!(report.contains(&"new       /usr/local/bin/wharf-agent".to_owned()), "{report:?}");
    assert!(report.iter().any(|line| line.contains("not built yet")), "{report:?}");
    let (sources, _) = machine.asked(&["--prebuilt"])?;
    let message = build::must_be_there(&sources.programs).map_err(|error| error.to_string()).err().unwrap_or_default();
    assert!(message.contains("is not built; run `cargo xtask build` first"), "{message}");
    Ok(())
}

#[test]
fn another_plugin_folder_moves_the_plugin() -> Result<()> {
    let machine = Machine::new()?;
    let before = machine.tree()?;
    machine.install(&[])?;
    machine.install(&["--cni-bin-dir", "/usr/lib/cni"])?;
    assert!(!machine.root().join("opt/cni/bin/wharf-cni").exists());
    assert_eq!(machine.read("usr/lib/cni/wharf-cni")?, "cni 1");
    machine.uninstall(false)?;
    assert_eq!(machine.tree()?, before);
    Ok(())
}

#[test]
fn an_install_that_was_cut_short_can_be_taken_away() -> Result<()> {
    let machine = Machine::new()?;
    let before = machine.tree()?;
    machine.install(&[])?;
    fs::remove_file(machine.root().join("usr/local/bin/wharf"))?;
    fs::remove_file(machine.root().join("etc/wharf/agent.toml"))?;
    machine.uninstall(false)?;
    assert_eq!(machine.tree()?, before);
    Ok(())
}

#[test]
fn a_missing_piece_or_a_bad_path_is_an_error_before_anything_is_written() -> Result<()> {
    let machine = Machine::new()?;
    let before = machine.tree()?;
    assert!(machine.install(&["--prefix", "relative"]).is_err());
    assert!(machine.install(&["--prefix", "/usr/../etc"]).is_err());
    fs::remove_file(machine.folder.path().join("sources/dist/agent.toml"))?;
    let message = machine.install(&[]).map_err(|error| error.to_string()).err().unwrap_or_default();
    assert!(message.ends_with("dist/agent.toml"), "{message}");
    assert_eq!(machine.tree()?, before);
    Ok(())
}

fn stand_in(prefix: &Path, status: u8) -> Result<Manifest> {
    let agent = prefix.join("bin/wharf-agent");
    fs::create_dir_all(prefix.join("bin"))?;
    let calls = prefix.join("calls");
    fs::write(&agent, format!("#!/bin/sh\necho \"$@\" >> {}\nexit {status}\n", calls.display()))?;
    fs::set_permissions(&agent, fs::Permissions::from_mode(0o755))?;
    let mut manifest = Manifest::default();
    manifest.add(Kind::File, &agent);
    Ok(manifest)
}

#[test]
fn uninstall_has_the_agent_clean_up_and_stops_where_that_is_refused() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let prefix = folder.path().to_owned();
    let arguments = |force| {
        let layout = crate::args::Layout { root: None, prefix: prefix.clone() };
        UninstallArgs { layout, purge: false, now: false, force }
    };
    let manifest = stand_in(&prefix, 0)?;
    uninstall::clean_up(&manifest, &arguments(false), true)?;
    uninstall::clean_up(&manifest, &arguments(true), false)?;
    let calls = fs::read_to_string(prefix.join("calls"))?;
    let flags: Vec<(bool, bool)> =
        calls.lines().map(|call| (call.contains("--dry-run"), call.contains("--force"))).collect();
    assert!(calls.lines().all(|call| call.starts_with("cleanup")), "{calls}");
    assert_eq!(flags, [(true, false), (false, true)]);

    let manifest = stand_in(&prefix, 1)?;
    let refused = uninstall::clean_up(&manifest, &arguments(false), false).map_err(|e| e.to_string());
    assert!(refused.as_ref().is_err_and(|e| e.contains("--force")), "{refused:?}");
    fs::remove_file(prefix.join("bin/wharf-agent"))?;
    uninstall::clean_up(&manifest, &arguments(false), false)?;
    Ok(())
}
