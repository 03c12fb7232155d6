//! Files of an installation, for `install` and `dist`.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

use crate::{
    args::InstallArgs,
    install::{UNIT, delivered},
    manifest::{Kind, plain},
    workspace::Workspace,
};

#[derive(Debug)]
pub(crate) struct Sources {
    pub(crate) programs: PathBuf,
    /// Unit, conflist, sample configuration.
    pub(crate) dist: PathBuf,
    pub(crate) generated: PathBuf,
}

impl Sources {
    pub(crate) fn of(workspace: &Workspace, programs: PathBuf) -> Self {
        Self { programs, dist: workspace.root().join("dist"), generated: workspace.target().join("install") }
    }

    fn completion(&self, program: &str, shell: &str) -> PathBuf {
        self.generated.join(format!("{program}.{shell}"))
    }
}

#[derive(Debug)]
pub(crate) struct Item {
    pub(crate) kind: Kind,
    pub(crate) path: PathBuf,
    /// `None` if not built, in a dry run.
    pub(crate) bytes: Option<Vec<u8>>,
    pub(crate) mode: u32,
}

const DESCRIBED: [&str; 2] = ["wharf", "wharf-agent"];

const SHELLS: [&str; 3] = ["bash", "zsh", "fish"];

fn completion_place(prefix: &Path, shell: &str, program: &str) -> PathBuf {
    prefix.join(match shell {
        "bash" => format!("share/bash-completion/completions/{program}"),
        // Debian's zsh reserves site-functions for /usr/local.
        "zsh" if prefix == Path::new("/usr") => format!("share/zsh/vendor-completions/_{program}"),
        "zsh" => format!("share/zsh/site-functions/_{program}"),
        _ => format!("share/fish/vendor_completions.d/{program}.fish"),
    })
}

pub(crate) fn generate(sources: &Sources) -> Result<()> {
    match fs::remove_dir_all(&sources.generated) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("remove {}", sources.generated.display()));
        }
        _ => {}
    }
    let pages = sources.generated.join("man");
    fs::create_dir_all(&pages).with_context(|| format!("create {}", pages.display()))?;
    for name in DESCRIBED {
        let program = sources.programs.join(name);
        output(Command::new(&program).arg("man").arg(&pages))
            .with_context(|| format!("write the manual pages of {name}"))?;
        for shell in SHELLS {
            let script = output(Command::new(&program).args(["completion", shell]))
                .with_context(|| format!("write the completions of {name} for {shell}"))?;
            let file = sources.completion(name, shell);
            fs::write(&file, script).with_context(|| format!("write {}", file.display()))?;
        }
    }
    Ok(())
}

fn output(command: &mut Command) -> Result<Vec<u8>> {
    let output = command.stdin(Stdio::null()).output().context("run it")?;
    if !output.status.success() {
        bail!("it failed ({}): {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(output.stdout)
}

/// Writes nothing.
pub(crate) fn plan(sources: &Sources, arguments: &InstallArgs) -> Result<Vec<Item>> {
    let prefix = &arguments.layout.prefix;
    for path in [prefix, &arguments.cni_bin_dir, &arguments.cni_conf_dir, &arguments.unit_dir] {
        if !plain(path) {
            bail!("install below {}: give an absolute path without `..`", path.display());
        }
    }
    let read = |path: PathBuf| fs::read(&path).with_context(|| format!("read {}", path.display()));
    let built = |path: PathBuf| {
        let unbuilt = arguments.dry_run && !path.exists();
        if unbuilt { Ok(None) } else { read(path).map(Some) }
    };
    let mut items = Vec::new();
    let mut add = |kind, path: PathBuf, mode, bytes| items.push(Item { kind, path, bytes, mode });

    for name in ["wharf-agent", "wharf"] {
        add(Kind::File, prefix.join("bin").join(name), 0o755, built(sources.programs.join(name))?);
    }
    add(Kind::File, arguments.cni_bin_dir.join("wharf-cni"), 0o755, built(sources.programs.join("wharf-cni"))?);

    let pages = sources.generated.join("man");
    let listed = match fs::read_dir(&pages) {
        Err(error) if arguments.dry_run && error.kind() == io::ErrorKind::NotFound => None,
        listed => Some(listed.with_context(|| format!("list {}", pages.display()))?),
    };
    for page in listed.into_iter().flatten() {
        let page = page.with_context(|| format!("list {}", pages.display()))?.path();
        add(Kind::File, manual_place(prefix, &page)?, 0o644, built(page)?);
    }
    // The plugin cannot generate a page.
    let plugin_page = sources.dist.join("wharf-cni.8");
    add(Kind::File, manual_place(prefix, &plugin_page)?, 0o644, Some(read(plugin_page)?));
    for program in DESCRIBED {
        for shell in SHELLS {
            let place = completion_place(prefix, shell, program);
            add(Kind::File, place, 0o644, built(sources.completion(program, shell))?);
        }
    }

    let unit = String::from_utf8(read(sources.dist.join(UNIT))?).context("read the unit: it is not text")?;
    let unit = unit.replace("@prefix@", prefix.to_str().unwrap_or_default());
    add(Kind::File, arguments.unit_dir.join(UNIT), 0o644, Some(unit.into_bytes()));

    for (source, path) in [
        ("agent.toml", PathBuf::from("/etc/wharf/agent.toml")),
        ("10-wharf.conflist", arguments.cni_conf_dir.join("10-wharf.conflist")),
    ] {
        let bytes = read(sources.dist.join(source))?;
        add(Kind::File, delivered(prefix, &path), 0o644, Some(bytes.clone()));
        add(Kind::Config, path, 0o644, Some(bytes));
    }
    Ok(items)
}

/// The extension is the section.
fn manual_place(prefix: &Path, page: &Path) -> Result<PathBuf> {
    let name = page.file_name().unwrap_or_default();
    let section = page.extension().and_then(|section| section.to_str()).filter(|section| ["1", "8"].contains(section));
    let section =
        section.with_context(|| format!("install {}: it is no manual page of section 1 or 8", page.display()))?;
    Ok(prefix.join(format!("share/man/man{section}")).join(name))
}

/// By rename: a running program keeps its file, and readers see a complete file.
pub(crate) fn put(path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
    let folder = path.parent().with_context(|| format!("write {}: it has no directory", path.display()))?;
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let fresh = folder.join(format!(".{name}.wharf-new"));
    fs::write(&fresh, bytes).with_context(|| format!("write {}", fresh.display()))?;
    fs::set_permissions(&fresh, fs::Permissions::from_mode(mode))
        .with_context(|| format!("set the mode of {}", fresh.display()))?;
    fs::rename(&fresh, path).with_context(|| format!("rename {} to {}", fresh.display(), path.display()))
}
