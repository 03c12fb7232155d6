//! `wharf-node`: setup of Wharf's container image, which has no shell.
//!
//! `install` copies the plugin to the host and prepares the state directory of `wharf-kube`, `run` executes the agent.
//! `ready` is the readiness probe: when the agent is ready, it copies the network configuration, by which the runtime
//! detects a ready network.

use std::{
    ffi::OsString,
    fs, io,
    os::unix::{
        fs::{MetadataExt as _, PermissionsExt as _, lchown},
        process::CommandExt as _,
    },
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use anyhow::{Context, Result, bail};
use nix::mount::{MsFlags, mount};

/// Path in the image, and host mode.
const PLUGIN: (&str, u32) = ("/opt/cni/bin/wharf-cni", 0o755);
const CONFLIST: (&str, u32) = ("/etc/cni/net.d/10-wharf.conflist", 0o644);
const AGENT: &str = "/usr/bin/wharf-agent";
const TOOL: &str = "/usr/bin/wharf";
/// In the run directory since the agent's first start in a boot.
const STORE: &str = "state.redb";

const USAGE: &str = "\
usage: wharf-node install PLUGIN-DIR NETWORK-DIR RUN-DIR STATE-DIR USER
                                                           copy the CNI plugin; remove the network of an earlier boot;
                                                           give STATE-DIR to the user and group with the id USER
       wharf-node run [ARGUMENT...]                        make /proc/sys writable here, then become wharf-agent
       wharf-node ready NETWORK-DIR                        copy the network if `wharf status --ready` succeeds";

fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    let done = match words.split_first() {
        Some((verb, [plugins, networks, run, state, user])) if verb == "install" => {
            // `wharf-kube` runs without the directory, and logs that it cannot write to it.
            if let Err(error) = parse_user(user).and_then(|user| give(state.as_ref(), user)) {
                eprintln!("wharf-node: {error:#}");
            }
            install(plugins.as_ref(), networks.as_ref(), run.as_ref())
        }
        Some((verb, [networks])) if verb == "ready" => ready(networks.as_ref()),
        Some((verb, arguments)) if verb == "run" => run(arguments),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("wharf-node: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn install(plugins: &Path, networks: &Path, run: &Path) -> Result<()> {
    println!("{}", put(Path::new(PLUGIN.0), plugins, PLUGIN.1)?);
    withdraw(Path::new(CONFLIST.0), networks, run)
}

/// Removes an earlier boot's network: the runtime waits for `ready`. A restarted agent keeps it, or the node would
/// become unready. A network that differs from the image's is the operator's.
fn withdraw(conflist: &Path, networks: &Path, run: &Path) -> Result<()> {
    let network = target(conflist, networks)?;
    let is_ours = || fs::read(&network).is_ok_and(|there| fs::read(conflist).is_ok_and(|ours| ours == there));
    if run.join(STORE).exists() || !is_ours() {
        return Ok(());
    }
    fs::remove_file(&network).with_context(|| format!("remove {}", network.display()))?;
    println!("removed {} of an earlier boot", network.display());
    Ok(())
}

fn parse_user(id: &OsString) -> Result<u32> {
    id.to_str().and_then(|id| id.parse().ok()).with_context(|| format!("{} is no id of a user", id.display()))
}

/// Gives a directory of this process's user to another user and to the group with the same id, with mode 0700. Needs
/// CAP_CHOWN. Without CAP_FOWNER, the mode is set first. A directory that the user has is kept as it is.
fn give(directory: &Path, user: u32) -> Result<()> {
    let found = fs::symlink_metadata(directory).with_context(|| format!("look at {}", directory.display()))?;
    let own = nix::unistd::geteuid().as_raw();
    if found.uid() == user && user != own {
        return Ok(());
    }
    if !found.is_dir() || found.uid() != own {
        bail!("{} is no directory of the user {own} or {user}", directory.display());
    }
    fs::set_permissions(directory, fs::Permissions::from_mode(0o700))
        .and_then(|()| lchown(directory, Some(user), Some(user)))
        .with_context(|| format!("give {} to the user {user}", directory.display()))
}

fn ready(networks: &Path) -> Result<()> {
    let status = Command::new(TOOL).args(["status", "--ready"]).status().with_context(|| format!("start {TOOL}"))?;
    if !status.success() {
        bail!("the agent is not ready");
    }
    offer(Path::new(CONFLIST.0), networks)
}

/// Keeps an existing network, which is the operator's, even if it is a dangling link.
fn offer(conflist: &Path, networks: &Path) -> Result<()> {
    let network = target(conflist, networks)?;
    match fs::symlink_metadata(&network) {
        Ok(_) => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            println!("{}", put(conflist, networks, CONFLIST.1)?);
            Ok(())
        }
        Err(e) => Err(e).with_context(|| format!("look at {}", network.display())),
    }
}

fn target(source: &Path, directory: &Path) -> Result<PathBuf> {
    let name = source.file_name().with_context(|| format!("copy {}: it has no name", source.display()))?;
    Ok(directory.join(name))
}

/// By rename: a running plugin keeps its file. An identical file stays, because runtimes watch the directory.
fn put(source: &Path, directory: &Path, mode: u32) -> Result<String> {
    let target = target(source, directory)?;
    let bytes = fs::read(source).with_context(|| format!("read {}", source.display()))?;
    if fs::read(&target).is_ok_and(|there| there == bytes) {
        return Ok(format!("unchanged {}", target.display()));
    }
    // Runtimes ignore this name.
    let name = target.file_name().unwrap_or_default().display();
    let fresh = directory.join(format!(".{name}.wharf-new"));
    fs::write(&fresh, bytes)
        .and_then(|()| fs::set_permissions(&fresh, fs::Permissions::from_mode(mode)))
        .and_then(|()| fs::rename(&fresh, &target))
        // For a full disk.
        .inspect_err(|_| drop(fs::remove_file(&fresh)))
        .with_context(|| format!("install {}: is the host's directory mounted there, writable?", target.display()))?;
    Ok(format!("installed {}", target.display()))
}

fn run(arguments: &[OsString]) -> Result<()> {
    // Runtimes mount it read-only with these flags, but the agent turns on forwarding.
    let flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    if is_read_only("/proc/sys")? {
        mount(None::<&str>, "/proc/sys", None::<&str>, flags, None::<&str>).context(
            "make /proc/sys writable: it needs CAP_SYS_ADMIN, and no AppArmor profile that forbids mounts \
             (appArmorProfile: Unconfined)",
        )?;
    }
    let error = Command::new(AGENT).args(arguments).exec();
    bail!("start {AGENT}: {error}")
}

fn is_read_only(path: &str) -> Result<bool> {
    let flags = nix::sys::statvfs::statvfs(path).with_context(|| format!("look at {path}"))?.flags();
    Ok(flags.contains(nix::sys::statvfs::FsFlags::ST_RDONLY))
}

#[cfg(test)]
#[allow(clippy::expect_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_whole_and_one_that_is_the_same_is_left_alone() {
        let root = tempfile::tempdir().expect("directory");
        let (source, host) = (root.path().join("wharf-cni"), root.path().join("host"));
        fs::create_dir(&host).expect("made");
        fs::write(&source, "one").expect("written");
        let target = host.join("wharf-cni");
        let inode = || fs::metadata(&target).expect("there").ino();
        assert!(put(&source, &host, 0o755).expect("copied").starts_with("installed"));
        assert_eq!(fs::metadata(&target).expect("there").permissions().mode() & 0o7777, 0o755);
        let before = inode();
        assert!(put(&source, &host, 0o755).expect("looked at").starts_with("unchanged"));
        assert_eq!(inode(), before);
        fs::write(&source, "two").expect("written");
        put(&source, &host, 0o755).expect("replaced");
        assert_eq!((fs::read(&target).expect("read"), inode() != before), (b"two".to_vec(), true));
        assert_eq!(fs::read_dir(&host).expect("listed").count(), 1, "no other file stays");
    }

    #[test]
    fn the_network_is_offered_once_and_withdrawn_after_a_boot_unless_it_is_the_operators() {
        let root = tempfile::tempdir().expect("directory");
        let [source, networks, run] = ["10-wharf.conflist", "networks", "run"].map(|name| root.path().join(name));
        fs::write(&source, "ours").expect("written");
        fs::create_dir(&networks).expect("made");
        let network = networks.join("10-wharf.conflist");
        let found = || fs::read_to_string(&network).ok();
        withdraw(&source, &networks, &run).expect("no network and no run directory");
        offer(&source, &networks).expect("copied");
        assert_eq!(found().as_deref(), Some("ours"));

        fs::create_dir(&run).expect("made");
        fs::write(run.join(STORE), "").expect("written");
        withdraw(&source, &networks, &run).expect("looked at");
        assert!(found().is_some(), "the agent restarts");
        fs::remove_file(run.join(STORE)).expect("removed");
        withdraw(&source, &networks, &run).expect("removed");
        assert_eq!(found(), None, "the node booted");

        fs::write(&network, "theirs").expect("written");
        withdraw(&source, &networks, &run).expect("looked at");
        offer(&source, &networks).expect("looked at");
        assert_eq!(found().as_deref(), Some("theirs"));
        fs::remove_file(&network).expect("removed");
        std::os::unix::fs::symlink("nowhere", &network).expect("linked");
        offer(&source, &networks).expect("looked at");
        assert!(network.is_symlink() && found().is_none(), "a dangling link is the operator's");
    }

    #[test]
    fn a_directory_is_given_once_and_one_of_another_user_is_refused() {
        let root = tempfile::tempdir().expect("directory");
        let (state, own) = (root.path().join("state"), nix::unistd::geteuid().as_raw());
        fs::create_dir(&state).expect("made");
        let seen = || {
            let found = fs::metadata(&state).expect("there");
            (found.uid(), found.gid(), found.mode() & 0o7777)
        };
        // Only root may give it to another user.
        let user = if own == 0 { 65_588 } else { own };
        give(&state, user).expect("given");
        assert_eq!(seen(), (user, user, 0o700));
        give(&state, user).expect("left alone");
        assert_eq!(seen(), (user, user, 0o700));
        if own == 0 {
            let refused = give(&state, user + 1).expect_err("it belongs to another user").to_string();
            assert!(refused.contains("state") && seen().0 == user, "{refused}");
        }
        std::os::unix::fs::symlink(&state, root.path().join("link")).expect("linked");
        give(&root.path().join("link"), user + 1).expect_err("a link");
        give(&root.path().join("absent"), user).expect_err("absent");
    }

    #[test]
    fn a_directory_that_is_not_there_is_an_error_that_names_it() {
        let root = tempfile::tempdir().expect("directory");
        let source = root.path().join("wharf-cni");
        fs::write(&source, "one").expect("written");
        let error = put(&source, &root.path().join("absent"), 0o755).expect_err("refused").to_string();
        assert!(error.contains("absent/wharf-cni") && error.contains("mounted"), "{error}");
    }
}
