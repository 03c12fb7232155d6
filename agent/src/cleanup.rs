//! `wharf-agent cleanup`: removes every trace of a stopped agent from the node.
//!
//! Order: links, routes, router, pins, the agent's Envoy, files. Objects that may belong to another program stay and
//! are listed.

use std::{
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, bail};
use clap::{CommandFactory as _, Parser};
use wharf_core::ids::Attachment;
use wharf_datapath::{
    PROGRAMS_STEM,
    leftovers::{self, Leftover, Leftovers},
    settings,
};
use wharf_handover::{IPAM_TURNS, queue, report};
use wharf_names::mark::Mark;

use crate::{
    cluster::feed,
    config::{self, Directories, Flags},
    delegate::records,
    node::health,
    proxy::envoy,
    refused, turn,
};

/// Command name.
pub const COMMAND: &str = "cleanup";

const EXAMPLES: &str = "Examples:
  wharf-agent cleanup --dry-run                            list, change nothing; exits 1 while endpoints live, 0 while an
                                                           agent runs without any (it says that it is to be stopped)
  wharf-agent cleanup --config /etc/wharf/agent.toml       the directories of that agent
  wharf-agent cleanup --force                              cut off the containers that still live, forget what a
                                                           service of --delegate is owed

Needs a node without a running agent. Binaries, configuration and CNI network are not touched: `cargo xtask uninstall`
removes those, and runs this first.";

/// Remove what agents left on this node: links, routes, pins, the Envoy that they started, run and state directory.
#[derive(Debug, Parser)]
#[command(name = "wharf-agent cleanup", bin_name = "wharf-agent cleanup", version, after_help = EXAMPLES)]
struct Arguments {
    /// List what would be removed, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Also while endpoints live: their containers lose their network; or while deletions wait for the service of
    /// --delegate
    #[arg(long)]
    force: bool,
    /// Run directory of the agent [default: /run/wharf]
    #[arg(long, env = "WHARF_RUN_DIR", value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// State directory of the agent [default: /var/lib/wharf]
    #[arg(long, env = "WHARF_STATE_DIR", value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// BPF file system of the agent [default: /sys/fs/bpf]
    #[arg(long, env = "WHARF_BPFFS", value_name = "DIR")]
    bpffs: Option<PathBuf>,
    /// TOML file of the agent, for its directories
    #[arg(long, env = "WHARF_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
}

/// Command line, for completions.
pub fn command() -> clap::Command {
    Arguments::command().name(COMMAND)
}

/// Runs if the first argument names it.
pub fn asked(mut arguments: impl Iterator<Item = OsString>) -> Option<ExitCode> {
    if arguments.next()? != COMMAND {
        return None;
    }
    let name = OsString::from("wharf-agent cleanup");
    let arguments = match Arguments::try_parse_from(std::iter::once(name).chain(arguments)) {
        Ok(arguments) => arguments,
        Err(error) => return Some(refused::refuse(&error)),
    };
    Some(match run(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("wharf-agent cleanup: {error:#}");
            ExitCode::FAILURE
        }
    })
}

fn run(arguments: Arguments) -> anyhow::Result<()> {
    let Arguments { dry_run, force, run_dir, state_dir, bpffs, config } = arguments;
    wharf_datapath::check_capabilities()?;
    let directories = config::directories(&Flags { run_dir, state_dir, bpffs, config, ..Flags::default() })?;
    let _turn = if dry_run { None } else { Some(take_turn(&directories)?) };
    let found = leftovers::list(&directories.bpffs, &directories.run)?;
    let files = files(&directories)?;
    let envoy = Proxy::in_directory(&directories.run)?;
    let living = living(&found);
    if !living.is_empty() && !force {
        if dry_run {
            list(&found, &files, &envoy)?;
        }
        bail!("endpoints live: {}; delete their containers, or pass --force, which cuts them off", first_of(&living));
    }
    if !force {
        records::must_owe_nothing(&directories.run)?;
    }
    if !dry_run {
        return remove_all(&found, &files, &envoy, &directories);
    }
    list(&found, &files, &envoy)?;
    // `cargo xtask uninstall` does the dry run while the agent runs.
    if let Err(error) = turn::Turn::take() {
        eprintln!("wharf-agent cleanup: without --dry-run this is refused: {error:#}");
    }
    Ok(())
}

/// Ends at a kernel object that stays: the files explain it.
fn remove_all(found: &Leftovers, files: &Files, envoy: &Proxy, directories: &Directories) -> anyhow::Result<()> {
    for leftover in &found.ours {
        leftovers::remove(leftover)?;
        println!("removed {leftover}");
    }
    let ended = envoy.end()?;
    ended.iter().for_each(|pid| println!("removed {}", envoy_of(*pid)));
    let mut kept = 0;
    for file in &files.ours {
        match remove(file, ![&directories.run, &directories.state].contains(&file)) {
            Ok(Removed::Whole) => println!("removed {}", file.display()),
            Ok(Removed::Content) => println!("emptied {}: it is a mount point", file.display()),
            Err(error) => {
                eprintln!("wharf-agent cleanup: {error:#}");
                kept += 1;
            }
        }
    }
    list_foreign(found, files);
    list_nothing(found, files, &ended);
    if kept > 0 {
        bail!("{kept} files are left; remove them by hand, or run the cleanup again");
    }
    Ok(())
}

fn take_turn(directories: &Directories) -> anyhow::Result<turn::Turn> {
    let mut held = turn::Turn::take()?;
    if wharf_datapath::has_pin_root(&directories.bpffs) {
        held = held.and_bpffs(&directories.bpffs)?;
    }
    if directories.state.is_dir() {
        held = held.and_state(&directories.state)?;
    }
    Ok(held)
}

fn living(found: &Leftovers) -> Vec<String> {
    let owner = |leftover: &Leftover| match leftover {
        Leftover::Link { mark, .. } if !is_health(mark) => Some(mark.owner.clone()),
        // Without the filter, a closed link's container would send unpoliced packets.
        Leftover::Filters { name, .. } => Some(format!("the container behind link {name} of another plugin")),
        _ => None,
    };
    found.ours.iter().filter_map(owner).collect()
}

fn is_health(mark: &Mark) -> bool {
    let of = |Attachment { network, container_id, ifname }: Attachment| {
        mark.is_of(network.as_str(), container_id.as_str(), ifname.as_str())
    };
    health::attachment().is_ok_and(of)
}

const TOLD: usize = 5;

fn first_of(living: &[String]) -> String {
    let mut text = living.iter().take(TOLD).cloned().collect::<Vec<_>>().join(", ");
    if living.len() > TOLD {
        text.push_str(&format!(" and {} more", living.len() - TOLD));
    }
    text
}

fn list(found: &Leftovers, files: &Files, envoy: &Proxy) -> anyhow::Result<()> {
    let living = envoy.pids()?;
    found.ours.iter().for_each(|leftover| println!("would remove {leftover}"));
    living.iter().for_each(|pid| println!("would remove {}", envoy_of(*pid)));
    files.ours.iter().for_each(|file| println!("would remove {}", file.display()));
    list_foreign(found, files);
    list_nothing(found, files, &living);
    Ok(())
}

fn envoy_of(pid: i32) -> String {
    format!("Envoy (process {pid})")
}

fn list_foreign(found: &Leftovers, files: &Files) {
    found.foreign.iter().for_each(|foreign| println!("left alone: {foreign}"));
    files.foreign.iter().for_each(|foreign| println!("left alone: {}", foreign.display()));
}

fn list_nothing(found: &Leftovers, files: &Files, envoys: &[i32]) {
    if found.ours.is_empty() && files.ours.is_empty() && envoys.is_empty() {
        println!("nothing of Wharf's is left on this node");
    }
}

#[derive(Debug, Default)]
struct Files {
    ours: Vec<PathBuf>,
    foreign: Vec<PathBuf>,
}

fn files(directories: &Directories) -> anyhow::Result<Files> {
    let mut files = Files::default();
    // Created only by agents (mode 0700, 0750).
    let whole = [queue::DIRECTORY, queue::UNFINISHED, report::DIRECTORY, envoy::DIRECTORY, feed::DIRECTORY, IPAM_TURNS];
    let in_run = |name: &str| {
        [config::SOCKET, wharf_api::ADMIN_SOCKET].contains(&name)
            || whole.contains(&name)
            || name.starts_with("state.redb")
            || name == "state.opening"
            || [settings::RECORD_STEM, PROGRAMS_STEM].iter().any(|stem| name.starts_with(stem))
    };
    let derived = ["health.json", "cluster.json", "feed.json", "pools.json", "paths.json"];
    let in_state = |name: &str| name == turn::STATE_LOCK || derived.iter().any(|file| name.starts_with(file));
    let in_either = |name: &str| in_run(name) || in_state(name);
    let mut places = vec![(&directories.run, &in_run as &dyn Fn(&str) -> bool), (&directories.state, &in_state)];
    if is_same(&directories.run, &directories.state) {
        places = vec![(&directories.run, &in_either)];
    }
    places.sort_by_key(|(directory, _)| std::cmp::Reverse(directory.components().count()));
    for (directory, known) in places {
        let (mut mine, mut others) = (Vec::new(), Vec::new());
        let entries = match fs::read_dir(directory) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => return Err(e).with_context(|| format!("list {}", directory.display())),
        };
        for entry in entries {
            let entry = entry.with_context(|| format!("list {}", directory.display()))?;
            let path = entry.path();
            if files.ours.contains(&path) {
                continue;
            }
            let is_dir = entry.file_type().with_context(|| format!("look at {}", path.display()))?.is_dir();
            let name = entry.file_name();
            let ours = name.to_str().is_some_and(|name| known(name) && (!is_dir || whole.contains(&name)));
            if ours { &mut mine } else { &mut others }.push(path);
        }
        mine.sort();
        others.sort();
        files.ours.extend(mine);
        if others.is_empty() {
            files.ours.push(directory.clone());
        }
        files.foreign.extend(others);
    }
    Ok(files)
}

fn is_same(a: &Path, b: &Path) -> bool {
    a == b || matches!((fs::canonicalize(a), fs::canonicalize(b)), (Ok(a), Ok(b)) if a == b)
}

struct Proxy {
    process: wharf_proxy::Envoy,
    runtime: tokio::runtime::Runtime,
}

impl Proxy {
    fn in_directory(run_dir: &Path) -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("start a runtime")?;
        Ok(Self { process: envoy::process_in(run_dir, None), runtime })
    }

    fn pids(&self) -> anyhow::Result<Vec<i32>> {
        Ok(self.runtime.block_on(async { self.process.pids() })?)
    }

    fn end(&self) -> anyhow::Result<Vec<i32>> {
        Ok(self.runtime.block_on(self.process.stop())?)
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Removed {
    Whole,
    Content,
}

fn remove(path: &Path, whole: bool) -> anyhow::Result<Removed> {
    let removed = match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_dir() && whole => fs::remove_dir_all(path),
        Ok(meta) if meta.is_dir() => fs::remove_dir(path),
        Ok(_) => fs::remove_file(path),
        Err(e) => Err(e),
    };
    let is_empty = || fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none());
    match removed {
        Err(e) if e.kind() == io::ErrorKind::ResourceBusy && is_empty() => Ok(Removed::Content),
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e).with_context(|| format!("remove {}", path.display())),
        _ => Ok(Removed::Whole),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_proxys_directory_is_an_agents_and_foreign_ones_are_not() {
        let root = tempfile::tempdir().expect("directory");
        let [run, state] = ["run", "state"].map(|name| root.path().join(name));
        for directory in [run.join("proxy/admin"), run.join("other"), state.join("proxy")] {
            fs::create_dir_all(directory).expect("made");
        }
        let directories = Directories { run: run.clone(), state: state.clone(), bpffs: root.path().join("bpf") };
        let Files { ours, foreign } = files(&directories).expect("listed");
        assert_eq!((ours, foreign), (vec![run.join("proxy")], vec![run.join("other"), state.join("proxy")]));
        let envoy = Proxy::in_directory(&run).expect("a runtime");
        assert_eq!((envoy.pids().expect("listed"), envoy.end().expect("none runs")), (Vec::new(), Vec::new()));
        remove(&run.join("other"), true).expect("removed");
        let Files { ours, .. } = files(&directories).expect("listed");
        assert_eq!(ours, [run.join("proxy"), run.clone()]);
        assert!(remove(&run, false).is_err(), "the run directory goes when it is empty");
        for file in ours {
            remove(&file, file != run).expect("removed");
        }
        assert!(!run.exists() && state.join("proxy").exists());
    }
}
