//! `uninstall`: removes the manifest's items.

use std::{
    fs, io,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

use crate::{
    args::UninstallArgs,
    install::{UNIT, delivered, manifest_file, systemctl},
    manifest::{Kind, Manifest, below},
    privilege::Privilege,
    workspace::find_program,
};

const STATE: &str = "/var/lib/wharf";

/// Names the agent's directories.
pub(crate) const CONFIG: &str = "/etc/wharf/agent.toml";

pub(crate) fn uninstall(privilege: &Privilege, arguments: &UninstallArgs) -> Result<()> {
    let layout = &arguments.layout;
    let staged = layout.root.is_some();
    if !staged && *privilege != Privilege::Root {
        privilege.confirm("uninstalling")?;
        return as_root(privilege, arguments);
    }
    let file = below(layout.root.as_deref(), &manifest_file(&layout.prefix));
    let Some(manifest) = Manifest::read(&file)? else {
        bail!("uninstall: {} is not there; was Wharf installed with another --prefix?", file.display());
    };
    let systemd = !staged && find_program("systemctl").is_some();
    if systemd && running() {
        if !arguments.now {
            bail!("uninstall: {UNIT} runs; stop it with `systemctl disable --now {UNIT}`, or pass --now");
        }
        // Fails while endpoints live; the service then runs on.
        clean_up(&manifest, arguments, true)?;
        systemctl(&["disable", "--now", UNIT])?;
    }
    // Before the plugin is removed, which runtimes need for live containers.
    if !staged {
        clean_up(&manifest, arguments, false)?;
    }
    for line in take_away(&manifest, arguments)? {
        println!("{line}");
    }
    if !staged {
        remove_accounts(&manifest)?;
    }
    if systemd && arguments.now {
        systemctl(&["daemon-reload"])?;
    }
    Ok(())
}

fn as_root(privilege: &Privilege, arguments: &UninstallArgs) -> Result<()> {
    let this = std::env::current_exe().context("find this program's own file")?;
    let mut command = privilege.command(&this, &[]);
    command.args(["uninstall", "--prefix"]).arg(&arguments.layout.prefix);
    for (flag, set) in [("--purge", arguments.purge), ("--now", arguments.now), ("--force", arguments.force)] {
        if set {
            command.arg(flag);
        }
    }
    let status = command.status().context("uninstall as root: run sudo")?;
    if !status.success() {
        bail!("uninstall as root: it failed ({status}); its message is above");
    }
    Ok(())
}

/// Cleans up the node with the installed agent; fails while endpoints live or an agent runs, unless `--force`.
pub(crate) fn clean_up(manifest: &Manifest, arguments: &UninstallArgs, only_look: bool) -> Result<()> {
    let agent = arguments.layout.prefix.join("bin/wharf-agent");
    if !manifest.contains(Kind::File, &agent) || !agent.exists() {
        return Ok(());
    }
    let mut command = Command::new(&agent);
    command.arg("cleanup");
    if Path::new(CONFIG).exists() {
        command.args(["--config", CONFIG]);
    }
    for (flag, set) in [("--force", arguments.force), ("--dry-run", only_look)] {
        if set {
            command.arg(flag);
        }
    }
    if only_look {
        command.stdout(Stdio::null());
    }
    let status = command.status().with_context(|| format!("run {}", agent.display()))?;
    if !status.success() {
        bail!(
            "uninstall: `wharf-agent cleanup` failed (its message is above), and only an installed Wharf can repeat it; delete \
             the containers and stop the agent first, or pass --force, which disconnects living containers"
        );
    }
    Ok(())
}

fn running() -> bool {
    Command::new("systemctl")
        .args(["--quiet", "is-active", UNIT])
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

pub(crate) fn take_away(manifest: &Manifest, arguments: &UninstallArgs) -> Result<Vec<String>> {
    let root = arguments.layout.root.as_deref();
    let mut report = remove_items(root, &arguments.layout.prefix, manifest, arguments.purge)?;
    if arguments.purge {
        let state = below(root, Path::new(STATE));
        match fs::remove_dir_all(&state) {
            Ok(()) => report.push(format!("removed   {STATE}")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            // Only the content of a mount point is removed.
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && is_empty(&state) => {
                report.push(format!("emptied   {STATE} (a mount point)"));
            }
            Err(error) => return Err(error).with_context(|| format!("remove {}", state.display())),
        }
    }
    Ok(report)
}

fn is_empty(directory: &Path) -> bool {
    fs::read_dir(directory).is_ok_and(|mut entries| entries.next().is_none())
}

pub(crate) fn unedited(root: Option<&Path>, prefix: &Path, config: &Path) -> bool {
    let read = |path: &Path| fs::read(below(root, path)).ok();
    read(config).is_some_and(|now| read(&delivered(prefix, config)).is_some_and(|then| then == now))
}

/// Removes unedited configuration, files, then empty folders. Ignores missing items.
pub(crate) fn remove_items(
    root: Option<&Path>,
    prefix: &Path,
    manifest: &Manifest,
    purge: bool,
) -> Result<Vec<String>> {
    let mut report = Vec::new();
    let mut remove = |path: &Path| -> Result<()> {
        let place = below(root, path);
        match fs::remove_file(&place) {
            Ok(()) => report.push(format!("removed   {}", path.display())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error).with_context(|| format!("remove {}", place.display())),
        }
        Ok(())
    };
    let mut kept = Vec::new();
    for config in manifest.of(Kind::Config) {
        if purge || unedited(root, prefix, config) || !below(root, config).exists() {
            remove(config)?;
        } else {
            kept.push(format!("kept      {} (edited; --purge removes it)", config.display()));
        }
    }
    // Last, if nothing is left: `uninstall --purge` finds kept files by it.
    let own = manifest_file(prefix);
    for file in manifest.of(Kind::File).filter(|file| **file != *own) {
        remove(file)?;
    }
    if kept.is_empty() {
        if manifest.contains(Kind::File, &own) {
            remove(&own)?;
        }
    } else {
        let left = manifest.left(&own, |config| below(root, config).exists());
        fs::write(below(root, &own), left.text()).with_context(|| format!("write {}", own.display()))?;
    }
    for folder in manifest.of(Kind::Directory).rev() {
        let place = below(root, folder);
        match fs::remove_dir(&place) {
            Ok(()) => report.push(format!("removed   {}/", folder.display())),
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::DirectoryNotEmpty) => {}
            Err(error) => return Err(error).with_context(|| format!("remove {}", place.display())),
        }
    }
    report.extend(kept);
    Ok(report)
}

fn remove_accounts(manifest: &Manifest) -> Result<()> {
    for (kind, what, program) in [(Kind::Group, "group", "groupdel"), (Kind::User, "user", "userdel")] {
        for name in manifest.of(kind) {
            let name = name.display();
            let status = Command::new(program).arg(name.to_string()).status();
            let status = status.with_context(|| format!("remove the {what} {name}: run {program}"))?;
            // No such account.
            if !status.success() && status.code() != Some(6) {
                bail!("remove the {what} {name}: {program} failed ({status}); `{program}` it by hand");
            }
            println!("removed   the {what} {name}");
        }
    }
    Ok(())
}
