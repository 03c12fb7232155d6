//! The Debian package on a machine of its own: installed, used, upgraded and downgraded under traffic, removed, purged.

use std::{
    fs::{self, OpenOptions},
    io::Write as _,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use nix::mount::{MsFlags, mount, umount};
use wharf_tests::{
    Attached, Sandbox, icmp,
    process::{command_in, crash_bin, ip, next_abi, run},
    stream::{TcpFlow, UdpStream},
    wait,
};

use crate::{
    machine::{CONFLIST, Machine, UNIT},
    package, tool,
};

/// The version of the package that is upgraded to.
const NEWER: &str = "99.0.0";
/// Exposure of the unit, of 10, that `systemd-analyze security` may find at most. What it still counts are the
/// capabilities, root, and the mount namespace that the unit must not have (its comments say why).
const EXPOSURE: &str = "67";

/// A later package: the agent of the next ABI version, and changed settings.
fn newer(machine: &Machine) -> Result<PathBuf> {
    let tree = machine.dirs().root.join("newer");
    let (deb, out) = (package(".deb")?, tree.with_extension("deb"));
    tool("dpkg-deb", &["--raw-extract", &deb.display().to_string(), &tree.display().to_string()])?.ok()?;
    let control = tree.join("DEBIAN/control");
    let text = fs::read_to_string(&control)?.replace(env!("CARGO_PKG_VERSION"), NEWER);
    fs::write(&control, text)?;
    let agent = tree.join("usr/bin/wharf-agent");
    fs::copy(crash_bin("wharf-agent")?, &agent)?;
    fs::set_permissions(&agent, fs::Permissions::from_mode(0o755))?;
    let (variable, objects) = next_abi()?;
    let unit = tree.join(UNIT.trim_start_matches('/'));
    let text = fs::read_to_string(&unit)?;
    let exec = text.find("ExecStart=").context("the unit has no ExecStart=")?;
    let (head, tail) = text.split_at(exec);
    fs::write(&unit, format!("{head}Environment={variable}={}\n{tail}", objects.display()))?;
    OpenOptions::new().append(true).open(tree.join("etc/wharf/agent.toml"))?.write_all(b"# A later version's.\n")?;
    tool("dpkg-deb", &["-Znone", "--build", &tree.display().to_string(), &out.display().to_string()])?.ok()?;
    fs::remove_dir_all(&tree)?;
    Ok(out)
}

fn version(machine: &Machine) -> Result<String> {
    let mut command = command_in(machine.space(), "dpkg-query")?;
    command.args(["--show", "--showformat=${db:Status-Abbrev}${Version}", "wharf"]);
    Ok(run(command, b"", wait::PATIENCE)?.ok()?.trim().to_owned())
}

/// The agent serves, and nothing is amiss once it has made its health endpoint.
fn serves(machine: &Machine) -> Result<()> {
    for question in [&["status", "--brief"][..], &["audit"]] {
        let mut said = String::new();
        wait::until("the agent is well", || {
            let answer = machine.wharf(question)?;
            said = answer.describe();
            Ok((answer.code() == 0).then_some(()))
        })
        .with_context(|| format!("{said}\n{}", machine.log()))?;
    }
    Ok(())
}

/// ABI versions that have pins.
fn trees(machine: &Machine) -> Result<usize> {
    Ok(machine.dirs().version_trees()?.len())
}

/// The kernel holds nothing of Wharf's: there are no links but loopback, no pins, routes, rules and packet filters.
fn untouched(machine: &Machine) -> Result<()> {
    let (links, trees) = (ip(machine.space(), "-brief link")?, trees(machine)?);
    ensure!(links.lines().count() == 1 && trees == 0, "{trees} trees of pins, and the links\n{links}{}", machine.log());
    for family in ["-4", "-6"] {
        let routes = ip(machine.space(), &format!("{family} route show table all"))?;
        let own = routes.lines().filter(|route| !route.contains(" lo "));
        ensure!(own.clone().next().is_none(), "routes {:?}", own.collect::<Vec<_>>());
        let rules = ip(machine.space(), &format!("{family} rule"))?;
        let named = rules.lines().all(|rule| ["local", "main", "default"].iter().any(|table| rule.ends_with(table)));
        ensure!(named, "rules {rules}");
    }
    let mut command = command_in(machine.space(), "nft")?;
    command.args(["list", "ruleset"]);
    let filters = run(command, b"", wait::PATIENCE)?.ok()?;
    ensure!(filters.is_empty(), "packet filters {filters}");
    Ok(())
}

fn analyze(machine: &Machine, arguments: &[&str]) -> Result<()> {
    let mut command = command_in(machine.space(), "systemd-analyze")?;
    command.args(arguments).env("SYSTEMD_LOG_LEVEL", "warning");
    let said = run(command, b"", wait::PATIENCE).context("`cargo xtask test` installs systemd for systemd-analyze")?;
    let ours = said.stderr.lines().any(|line| line.contains("wharf"));
    ensure!(said.code() == 0 && !ours, "{}", said.describe());
    Ok(())
}

#[test]
fn the_package_lives_as_debians_policy_has_it_and_never_stops_traffic() -> Result<()> {
    let mut machine = Machine::new()?;
    let deb = package(".deb")?.display().to_string();
    let next = newer(&machine)?.display().to_string();

    // Not beside an installation from the sources.
    let theirs = Path::new("/usr/local/share/wharf");
    fs::create_dir_all(theirs)?;
    fs::write(theirs.join("manifest"), "")?;
    let refused = machine.dpkg(&["--install", &deb])?;
    ensure!(refused.code() != 0 && refused.stderr.contains("cargo xtask uninstall"), "{}", refused.describe());
    fs::remove_dir_all(theirs)?;

    // Installed: accounts, files, a service that runs and is enabled.
    machine.dpkg(&["--install", &deb])?.ok()?;
    ensure!(machine.told == ["preset", "daemon-reload", "start"] && machine.agent().is_some(), "{:?}", machine.told);
    serves(&machine)?;
    for (database, name) in [("group", "wharf"), ("passwd", "wharf-envoy")] {
        let mut command = command_in(machine.space(), "getent")?;
        command.args([database, name]);
        run(command, b"", wait::PATIENCE)?.ok()?;
    }
    analyze(&machine, &["verify", "--man=no", UNIT])?;
    analyze(&machine, &["security", "--offline=yes", "--no-pager", &format!("--threshold={EXPOSURE}"), UNIT])?;
    for page in ["man8/wharf-agent.8.gz", "man8/wharf-cni.8.gz", "man1/wharf.1.gz"] {
        ensure!(Path::new("/usr/share/man").join(page).is_file(), "{page} is not there");
    }
    for place in
        ["bash-completion/completions/wharf", "zsh/vendor-completions/_wharf", "fish/vendor_completions.d/wharf.fish"]
    {
        ensure!(Path::new("/usr/share").join(place).is_file(), "{place} is not there");
    }

    // Used.
    let root = machine.dirs().root.join("netns");
    let (a, b) = (Sandbox::create(&root, "a")?, Sandbox::create(&root, "b")?);
    let (at_a, at_b): (Attached, Attached) = (machine.attach(&a)?, machine.attach(&b)?);
    let start = || -> Result<(Vec<UdpStream>, TcpFlow)> {
        let (sa, sb) = (a.space()?, b.space()?);
        let udp =
            vec![UdpStream::start(sa, sb, at_b.v4()?.into(), 300)?, UdpStream::start(sb, sa, at_a.v6()?.into(), 300)?];
        Ok((udp, TcpFlow::start(sa, sb, at_b.v4()?.into())?))
    };
    let edited = "# Edited.\nmtu = 1400\n";
    fs::write("/etc/wharf/agent.toml", edited)?;

    // Upgraded, downgraded, upgraded again to the same: what flows, flows on; what was edited stays.
    for (package, is) in [(&next, NEWER), (&deb, env!("CARGO_PKG_VERSION")), (&deb, env!("CARGO_PKG_VERSION"))] {
        let (udp, tcp) = start()?;
        let (pid, told) = (machine.agent(), machine.told.len());
        let said = machine.dpkg(&["--install", package])?;
        ensure!(said.code() == 0, "{}{}", said.describe(), machine.log());
        ensure!(
            machine.told.get(told..) == Some(&["daemon-reload".into(), "restart".into()][..]),
            "{:?}",
            machine.told
        );
        ensure!(machine.agent().is_some() && machine.agent() != pid, "the agent was not restarted");
        ensure!(version(&machine)? == format!("ii {is}"), "{}", version(&machine)?);
        serves(&machine)?;
        ensure!(trees(&machine)? == 1, "programs of one version: {}", machine.log());
        ensure!(fs::read_to_string("/etc/wharf/agent.toml")? == edited, "the settings were replaced");
        udp.iter().try_for_each(|stream| stream.await_more(20))?;
        tcp.await_more(5)?;
        udp.into_iter().try_for_each(|stream| stream.stop()?.must_be_perfect()).context(is)?;
        tcp.stop()?.must_be_whole().context(is)?;
    }

    // An agent that cannot start is told of, costs no container its network, and does not leave dpkg half-way.
    let (udp, tcp) = start()?;
    fs::write("/etc/wharf/agent.toml", "mtu = \"wide\"\n")?;
    let said = machine.dpkg(&["--install", &next])?;
    ensure!(said.code() == 0 && said.stderr.contains("the agent did not restart"), "{}", said.describe());
    ensure!(machine.agent().is_none() && version(&machine)? == format!("ii {NEWER}"), "{}", version(&machine)?);
    udp.iter().try_for_each(|stream| stream.await_more(20))?;
    fs::write("/etc/wharf/agent.toml", edited)?;
    machine.dpkg(&["--install", &deb])?.ok()?;
    serves(&machine)?;
    udp.into_iter().try_for_each(|stream| stream.stop()?.must_be_perfect())?;
    tcp.stop()?.must_be_whole()?;

    // Not removed while containers live, and nothing was stopped.
    let (udp, tcp) = start()?;
    let pid = machine.agent();
    let refused = machine.dpkg(&["--remove", "wharf"])?;
    ensure!(refused.code() != 0 && refused.stderr.contains("wharf: not removed"), "{}", refused.describe());
    ensure!(machine.agent() == pid && version(&machine)?.starts_with("ri"), "{}", version(&machine)?);
    serves(&machine)?;
    udp.into_iter().try_for_each(|stream| stream.stop()?.must_be_perfect())?;
    tcp.stop()?.must_be_whole()?;

    // Removed: nothing runs, nothing of the kernel's is left, the configuration is; no runtime takes the network any
    // more.
    for sandbox in [&a, &b] {
        machine.cni("DEL", sandbox)?.ok()?;
    }
    // Nor while sandboxes are there, whatever plugin their networks are of: nobody could detach them.
    let record = Path::new("/var/lib/wharf/sandboxes/web.json");
    fs::create_dir_all(record.parent().context("a directory")?)?;
    fs::write(record, "{}")?;
    let refused = machine.dpkg(&["--remove", "wharf"])?;
    ensure!(refused.code() != 0 && refused.stderr.contains("wharf sandbox rm"), "{}", refused.describe());
    fs::remove_file(record)?;
    machine.dpkg(&["--remove", "wharf"])?.ok()?;
    ensure!(machine.agent().is_none() && version(&machine)?.starts_with("rc"), "{}", version(&machine)?);
    untouched(&machine)?;
    ensure!(!Path::new("/run/wharf").exists() && !Path::new("/usr/bin/wharf-agent").exists(), "something stays");
    ensure!(fs::read_to_string("/etc/wharf/agent.toml")? == edited && !Path::new(CONFLIST).exists(), "configuration");

    // Installed again: as it was.
    machine.dpkg(&["--install", &deb])?.ok()?;
    serves(&machine)?;
    ensure!(fs::read_to_string("/etc/wharf/agent.toml")? == edited, "the settings were replaced");
    let at_a = machine.attach(&a)?;
    icmp::ping(machine.space(), at_a.v4()?.into())?.must_answer()?;
    machine.cni("DEL", &a)?.ok()?;

    // Purged: as it never was.
    ensure!(machine.traces()?.iter().any(|trace| trace.ends_with("etc/upper/group")), "the look for traces is blind");
    machine.dpkg(&["--purge", "wharf"])?.ok()?;
    let traces = machine.traces()?;
    ensure!(traces.is_empty(), "left: {traces:?}");
    untouched(&machine)?;
    Ok(())
}

/// Whether the machine has a group or user.
fn account(machine: &Machine, database: &str, name: &str) -> Result<bool> {
    let mut command = command_in(machine.space(), "getent")?;
    command.args([database, name]);
    Ok(run(command, b"", wait::PATIENCE)?.code() == 0)
}

#[test]
fn the_package_takes_nothing_that_was_there_before_it_or_came_after_it() -> Result<()> {
    let mut machine = Machine::new()?;
    let deb = package(".deb")?.display().to_string();
    let aside = format!("{CONFLIST}.wharf-removed");

    // Not beside the tarball's programs, whose unit would be the one that runs.
    fs::create_dir_all("/usr/local/bin")?;
    fs::write("/usr/local/bin/wharf-agent", "")?;
    let refused = machine.dpkg(&["--install", &deb])?;
    ensure!(refused.code() != 0 && refused.stderr.contains("tarball"), "{}", refused.describe());
    fs::remove_file("/usr/local/bin/wharf-agent")?;

    // Groups that the node has already, and the directory of plugins under both its names.
    for group in ["wharf", "wharf-envoy"] {
        let mut command = command_in(machine.space(), "groupadd")?;
        command.args(["--system", group]).env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        run(command, b"", wait::PATIENCE)?.ok()?;
    }
    fs::create_dir_all("/usr/lib/cni")?;
    fs::remove_dir_all("/opt/cni/bin").ok();
    fs::create_dir_all("/opt/cni")?;
    symlink("/usr/lib/cni", "/opt/cni/bin")?;
    for _ in 0..2 {
        machine.dpkg(&["--install", &deb])?.ok()?;
        ensure!(fs::symlink_metadata("/opt/cni/bin/wharf-cni")?.is_file(), "the plugin is not there");
    }
    serves(&machine)?;

    // A deletion that the service of a delegated agent is owed.
    let unfinished = Path::new("/run/wharf/unfinished-adds");
    fs::create_dir(unfinished)?;
    fs::write(unfinished.join("owed"), "")?;
    let refused = machine.dpkg(&["--remove", "wharf"])?;
    ensure!(refused.code() != 0 && refused.stderr.contains("--delegate"), "{}", refused.describe());
    fs::remove_dir_all(unfinished)?;
    machine.dpkg(&["--remove", "wharf"])?.ok()?;
    ensure!(
        Path::new("/opt/cni/bin").is_symlink() && !Path::new("/usr/lib/cni/wharf-cni").exists(),
        "the plugin stays"
    );

    // An installation that fails puts back what it found: the network of before, and one that somebody else has made.
    let of_before = fs::read_to_string(&aside)?;
    for theirs in [None, Some("{}")] {
        if let Some(text) = theirs {
            fs::write(CONFLIST, text)?;
        }
        let small = "/usr/share/man/man8";
        mount(Some("wharf-test"), small, Some("tmpfs"), MsFlags::empty(), Some("size=4096"))?;
        let failed = machine.dpkg(&["--install", &deb])?;
        umount(small)?;
        ensure!(failed.code() != 0 && failed.stderr.contains("No space left"), "{}", failed.describe());
        ensure!(fs::read_to_string(CONFLIST).ok().as_deref() == theirs, "{}", failed.describe());
        ensure!(fs::read_to_string(&aside)? == of_before, "the network of before: {}", failed.describe());
        ensure!(!Path::new("/usr/bin/wharf-agent").exists(), "half of the package");
    }

    // An agent of another origin has begun to use the directories.
    fs::create_dir_all("/run/wharf")?;
    fs::write("/run/wharf/state.redb", "")?;
    let said = machine.dpkg(&["--purge", "wharf"])?;
    ensure!(said.code() == 0 && said.stderr.contains("not the package's"), "{}", said.describe());
    ensure!(Path::new("/run/wharf/state.redb").exists() && account(&machine, "passwd", "wharf-envoy")?, "taken");
    fs::remove_dir_all("/run/wharf")?;

    machine.dpkg(&["--install", &deb])?.ok()?;
    machine.dpkg(&["--purge", "wharf"])?.ok()?;
    ensure!(!account(&machine, "passwd", "wharf-envoy")? && !Path::new("/var/lib/wharf").exists(), "something stays");
    // The other one was the group of the user alone, with which userdel takes it.
    ensure!(account(&machine, "group", "wharf")?, "the group wharf, which was there before the package");
    Ok(())
}
