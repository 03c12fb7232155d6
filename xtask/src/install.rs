//! `install`: checks everything, then writes the manifest, then each file atomically. Never replaces a foreign file.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

use crate::{
    args::InstallArgs,
    build, launch,
    manifest::{Kind, Manifest, below},
    pieces::{Item, Sources, generate, plan, put},
    privilege::Privilege,
    uninstall,
    workspace::Workspace,
};

/// Members may use the agent's socket.
pub(crate) const GROUP: &str = "wharf";

pub(crate) const ENVOY: &str = "wharf-envoy";

/// Creates [`ENVOY`]; lacks the name.
pub(crate) const USERADD: [&str; 6] =
    ["useradd", "--system", "--user-group", "--no-create-home", "--shell", "/usr/sbin/nologin"];

pub(crate) const UNIT: &str = "wharf-agent.service";

pub(crate) fn share(prefix: &Path) -> PathBuf {
    prefix.join("share/wharf")
}

pub(crate) fn manifest_file(prefix: &Path) -> PathBuf {
    share(prefix).join("manifest")
}

/// Original of a configuration file, to detect edits.
pub(crate) fn delivered(prefix: &Path, config: &Path) -> PathBuf {
    let name = config.file_name().unwrap_or(config.as_os_str());
    share(prefix).join("delivered").join(name)
}

pub(crate) fn install(
    workspace: &Workspace,
    privilege: &Privilege,
    verbose: bool,
    arguments: &InstallArgs,
) -> Result<()> {
    let staged = arguments.layout.root.is_some();
    let sources = Sources::of(workspace, workspace.release());
    if arguments.dry_run {
        for line in preview(&sources, arguments)? {
            println!("{line}");
        }
        return Ok(());
    }
    if !staged {
        privilege.confirm("installing")?;
    }
    if arguments.prebuilt {
        build::must_be_there(&sources.programs)?;
    } else {
        launch::build(workspace, privilege, verbose)?;
    }
    if !arguments.prebuilt || !sources.generated.exists() {
        generate(&sources)?;
    }
    if !staged && *privilege != Privilege::Root {
        return as_root(workspace, privilege, arguments);
    }

    let items = plan(&sources, arguments)?;
    let mut report = apply(&items, arguments)?;
    if !staged {
        ensure_accounts(arguments, &mut report)?;
    }
    for line in report {
        println!("{line}");
    }
    if staged { Ok(()) } else { service(arguments.now) }
}

fn as_root(workspace: &Workspace, privilege: &Privilege, arguments: &InstallArgs) -> Result<()> {
    let this = std::env::current_exe().context("find this program's own file")?;
    let mut command = privilege.command(&this, &[("CARGO_MANIFEST_DIR", workspace.root().join("xtask").into())]);
    command.args(["install", "--prebuilt", "--prefix"]).arg(&arguments.layout.prefix);
    command.arg("--cni-bin-dir").arg(&arguments.cni_bin_dir).arg("--cni-conf-dir").arg(&arguments.cni_conf_dir);
    command.arg("--unit-dir").arg(&arguments.unit_dir);
    if arguments.now {
        command.arg("--now");
    }
    let status = command.status().context("install as root: run sudo")?;
    if !status.success() {
        bail!("install as root: it failed ({status}); its message is above");
    }
    Ok(())
}

struct Decision<'a> {
    kept: Vec<&'a Path>,
    /// Any foreign file prevents the install.
    foreign: Vec<&'a Path>,
    manifest: Manifest,
    obsolete: Manifest,
}

fn decide<'a>(items: &'a [Item], arguments: &InstallArgs) -> Result<Decision<'a>> {
    let prefix = &arguments.layout.prefix;
    let root = arguments.layout.root.as_deref();
    let earlier = Manifest::read(&below(root, &manifest_file(prefix)))?.unwrap_or_default();
    let foreign = items
        .iter()
        .filter(|item| item.kind == Kind::File && !earlier.contains(Kind::File, &item.path))
        .filter(|item| differs(&below(root, &item.path), item.bytes.as_deref()))
        .map(|item| item.path.as_path())
        .collect();

    // Before the delivered copies are replaced.
    let mut manifest = Manifest::default();
    let mut kept = Vec::new();
    for item in items {
        let place = below(root, &item.path);
        let ours = earlier.contains(item.kind, &item.path) || !place.exists();
        if item.kind == Kind::Config && place.exists() && !uninstall::unedited(root, prefix, &item.path) {
            kept.push(item.path.as_path());
        }
        if ours || item.kind == Kind::File {
            manifest.add(item.kind, &item.path);
        }
    }
    manifest.add(Kind::File, &manifest_file(prefix));
    for path in items.iter().map(|item| item.path.as_path()).chain([manifest_file(prefix).as_path()]) {
        for folder in path.ancestors().skip(1).filter(|folder| folder.parent().is_some()) {
            if !below(root, folder).exists() {
                manifest.add(Kind::Directory, folder);
            }
        }
    }
    let obsolete = obsolete(&earlier, &manifest);
    for folder in earlier.of(Kind::Directory) {
        manifest.add(Kind::Directory, folder);
    }
    for kind in [Kind::Group, Kind::User] {
        earlier.of(kind).for_each(|name| manifest.add(kind, name));
    }
    Ok(Decision { kept, foreign, manifest, obsolete })
}

/// The report of a dry run, with unbuilt files.
fn preview(sources: &Sources, arguments: &InstallArgs) -> Result<Vec<String>> {
    let prefix = &arguments.layout.prefix;
    let root = arguments.layout.root.as_deref();
    let items = plan(sources, arguments)?;
    let decision = decide(&items, arguments)?;
    let exists = |path: &Path| below(root, path).exists();
    let line = |what: &str, path: &Path| format!("{what:<9} {}", path.display());
    let mut report = Vec::new();
    for item in &items {
        let path = item.path.as_path();
        report.push(match &item.bytes {
            _ if decision.foreign.contains(&path) => line("refused", path) + " (not Wharf's; move it away)",
            _ if decision.kept.contains(&path) => line("kept", path) + " (yours)",
            _ if !exists(path) => line("new", path),
            Some(bytes) if !differs(&below(root, path), Some(bytes)) => line("unchanged", path),
            _ => line("replaced", path),
        });
    }
    let manifest = manifest_file(prefix);
    report.push(line(if exists(&manifest) { "replaced" } else { "new" }, &manifest));
    for kind in [Kind::Config, Kind::File] {
        report.extend(decision.obsolete.of(kind).map(|path| line("removed", path)));
    }
    report.extend(decision.manifest.of(Kind::Directory).filter(|f| !exists(f)).map(|f| line("new", f) + "/"));
    if root.is_none() {
        report.push(format!("{:<9} the group {GROUP} and the user {ENVOY}, unless they are there", "new"));
    }
    if items.iter().any(|item| item.bytes.is_none()) || !sources.generated.exists() {
        report.push("some of it is not built yet, manual pages and completions may be missing above".to_owned());
    }
    report.push("nothing was changed".to_owned());
    Ok(report)
}

fn apply(items: &[Item], arguments: &InstallArgs) -> Result<Vec<String>> {
    let prefix = &arguments.layout.prefix;
    let root = arguments.layout.root.as_deref();
    let Decision { kept, foreign, manifest, obsolete } = decide(items, arguments)?;
    if !foreign.is_empty() {
        let foreign: Vec<String> = foreign.iter().map(|path| path.display().to_string()).collect();
        bail!("install: these files are there and are not Wharf's; move them away first: {}", foreign.join(", "));
    }

    // First, to repeat or uninstall an interrupted install.
    put(&below(root, &manifest_file(prefix)), manifest.text().as_bytes(), 0o644)?;
    let mut report = Vec::new();
    for item in items {
        if kept.contains(&item.path.as_path()) {
            report.push(format!("kept      {} (yours)", item.path.display()));
            continue;
        }
        let bytes =
            item.bytes.as_deref().with_context(|| format!("install {}: it is not built", item.path.display()))?;
        put(&below(root, &item.path), bytes, item.mode)?;
        // Omits many pages, and copies for uninstall.
        if !item.path.starts_with(prefix.join("share")) {
            report.push(format!("installed {}", item.path.display()));
        }
    }
    report.push(format!("installed manual pages and completions below {}", prefix.join("share").display()));
    report.extend(uninstall::remove_items(root, prefix, &obsolete, false)?);
    Ok(report)
}

fn obsolete(earlier: &Manifest, now: &Manifest) -> Manifest {
    let mut obsolete = Manifest::default();
    for kind in [Kind::File, Kind::Config] {
        for path in earlier.of(kind).filter(|path| !now.contains(kind, path)) {
            obsolete.add(kind, path);
        }
    }
    obsolete
}

fn differs(path: &Path, bytes: Option<&[u8]>) -> bool {
    match fs::read(path) {
        Ok(present) => bytes != Some(present.as_slice()),
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    }
}

/// The manifest lists only created accounts.
fn ensure_accounts(arguments: &InstallArgs, report: &mut Vec<String>) -> Result<()> {
    if ensure_account(arguments, Kind::Group, GROUP, "group", &["groupadd", "--system"])? {
        report.push(format!("made      the group {GROUP}; its members may use the socket: usermod -aG {GROUP} USER"));
    }
    if ensure_account(arguments, Kind::User, ENVOY, "passwd", &USERADD)? {
        report.push(format!("made      the user {ENVOY}, which runs Envoy"));
    }
    Ok(())
}

/// False if the `database` of getent has the account.
fn ensure_account(arguments: &InstallArgs, kind: Kind, name: &str, database: &str, add: &[&str]) -> Result<bool> {
    let known = Command::new("getent").args([database, name]).stdout(Stdio::null()).status();
    if known.with_context(|| format!("look for {name}: run getent"))?.success() {
        return Ok(false);
    }
    let [program, options @ ..] = add else { bail!("make {name}: no command") };
    let status = Command::new(program).args(options).arg(name).status().with_context(|| format!("make {name}"))?;
    if !status.success() {
        bail!("make {name}: {program} failed ({status})");
    }
    let file = manifest_file(&arguments.layout.prefix);
    let mut manifest = Manifest::read(&file)?.unwrap_or_default();
    manifest.add(kind, Path::new(name));
    put(&file, manifest.text().as_bytes(), 0o644)?;
    Ok(true)
}

fn service(now: bool) -> Result<()> {
    if !now {
        println!(
            "\nto start it, now and at every boot:  systemctl daemon-reload && systemctl enable --now {UNIT}\n\
             after an upgrade:                    systemctl daemon-reload && systemctl restart {UNIT}\n\
             (containers keep their network while it restarts)"
        );
        return Ok(());
    }
    systemctl(&["daemon-reload"])?;
    systemctl(&["enable", "--now", UNIT])?;
    println!("\n{UNIT} runs; `wharf status` shows it");
    Ok(())
}

pub(crate) fn systemctl(arguments: &[&str]) -> Result<()> {
    let status = Command::new("systemctl")
        .args(arguments)
        .status()
        .with_context(|| format!("run systemctl {}", arguments.join(" ")))?;
    if !status.success() {
        bail!("systemctl {} failed ({status}); `journalctl -u {UNIT}` may say why", arguments.join(" "));
    }
    Ok(())
}

#[cfg(test)]
#[path = "install_tests.rs"]
mod tests;
