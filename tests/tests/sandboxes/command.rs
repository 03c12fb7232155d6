//! `wharf sandbox run`.

use std::{fs, os::unix::process::CommandExt as _, process::Stdio, time::Duration};

use anyhow::{Context, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::{Pid, getsid},
};
use wharf_tests::{
    process::{self, run},
    wait,
};

use crate::scene::with_sandboxes;

#[test]
fn a_command_has_the_sandboxs_network_and_its_own_ends() -> Result<()> {
    with_sandboxes(|node, s| {
        // It makes the sandbox, and the sandbox stays.
        let mut command =
            s.command(node, &["run", "web", "--", "sh", "-c", "cat; echo oops >&2; ls /sys/class/net; exit 42"])?;
        command.env("KEPT", "1");
        let done = run(command, b"hello\n", wait::PATIENCE)?;
        ensure!(done.code() == 42, "{}", done.describe());
        ensure!(done.stdout == "hello\neth0\nlo\n" && done.stderr == "oops\n", "{}", done.describe());
        ensure!(s.states(node)? == [("web".into(), "ready".into())]);
        let conf = s.ok(node, &["run", "web", "--", "cat", "/etc/resolv.conf"])?;
        ensure!(conf == "nameserver 10.0.0.53\nsearch example.org\n", "{conf}");
        let own = fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
        ensure!(own != conf, "the machine's resolv.conf was replaced");
        ensure!(fs::read_dir("/sys/class/net")?.count() != 2 || std::path::Path::new("/sys/kernel").exists());
        let ended = s.wharf(node, &["run", "web", "--", "sh", "-c", "kill -TERM $$"])?;
        ensure!(ended.code() == 128 + 15, "{}", ended.describe());
        s.fails(node, &["run", "web", "--", "/no/such/program"], 127, &["run /no/such/program in sandbox web"])?;
        s.fails(node, &["run", "web", "--", "/etc/passwd"], 126, &["run /etc/passwd in sandbox web"])?;
        s.fails(node, &["run", "web", "--label", "a=b", "--", "true"], 125, &["it exists, and is ready", "exec web"])?;
        s.fails(node, &["run", "web"], 3, &["COMMAND"])?;
        s.fails(node, &["run", "new", "--", ""], 3, &["the command is empty"])?;
        ensure!(s.states(node)? == [("web".into(), "ready".into())]);
        ensure!(s.inspect(node, "web")?["running"].as_array().is_some_and(Vec::is_empty));
        s.ok(node, &["rm", "web"]).map(drop)
    })
}

#[test]
fn exec_runs_in_what_is_ready_with_a_terminal_where_one_is_asked_for() -> Result<()> {
    with_sandboxes(|node, s| {
        let exec = |arguments: &[&str], input: &[u8]| {
            run(s.command(node, &[&["exec"], arguments].concat())?, input, wait::PATIENCE)
        };
        s.fails(node, &["exec", "web", "--", "true"], 125, &["run in sandbox web: no sandbox has this name"])?;
        s.ok(node, &["create", "web"])?;
        ensure!(exec(&["-i", "web", "--", "cat"], b"hello\n")?.ok()? == "hello\n");
        ensure!(exec(&["web", "--", "cat"], b"hello\n")?.ok()?.is_empty(), "input without -i");
        ensure!(exec(&["web", "--", "ls", "/sys/class/net"], b"")?.ok()? == "eth0\nlo\n");
        ensure!(exec(&["web", "--", "/no/such/program"], b"")?.code() == 127);
        // The command leads a session, whose terminal is the new one.
        let script = "test -t 0 && test -t 2 && read line && echo \"got $line\" > /dev/tty; exit 7";
        let done = exec(&["-it", "web", "--", "sh", "-c", script], b"hello\n")?;
        ensure!(done.code() == 7 && done.stdout.contains("got hello\r\n"), "{}", done.describe());
        // The end of input reaches it, also on a line that has not ended.
        let done = exec(&["-it", "web", "--", "wc", "-c"], b"1234")?;
        ensure!(done.code() == 0 && done.stdout.trim_end().ends_with('4'), "{}", done.describe());
        // What it leaves behind does not keep the tool.
        let done = exec(&["-t", "web", "--", "sh", "-c", "trap '' HUP; sleep 600 & echo done"], b"")?;
        ensure!(done.code() == 0 && done.stdout == "done\r\n", "{}", done.describe());
        // At a terminal: its size is passed on, and its modes come back.
        let tool = s.command(node, &["exec", "-it", "web", "--", "sh", "-c", "stty size; exit 5"])?;
        let words: Vec<String> = std::iter::once(tool.get_program())
            .chain(tool.get_args())
            .map(|word| format!("'{}'", word.to_string_lossy()))
            .collect();
        let script = format!("stty rows 33 cols 77; {}; echo status $?; stty -a", words.join(" "));
        let mut command = node.command("script")?;
        command.args(["-qec", &script, "/dev/null"]).env("SHELL", "/bin/sh");
        let told = run(command, b"", wait::PATIENCE)?.ok()?;
        let wanted = ["33 77\r\n", "status 5\r\n", " icanon"];
        ensure!(wanted.iter().all(|word| told.contains(word)), "{told}");
        s.ok(node, &["rm", "web"]).map(drop)
    })
}

#[test]
fn rm_takes_away_what_this_run_made_and_nothing_else() -> Result<()> {
    with_sandboxes(|node, s| {
        let done = s.wharf(node, &["run", "--rm", "probe", "--label", "app=probe", "--", "sh", "-c", "exit 3"])?;
        ensure!(done.code() == 3, "{}", done.describe());
        ensure!(s.left()?.is_empty(), "{:?}", s.left()?);
        s.fails(node, &["run", "--rm", "probe", "--", "/no/such/program"], 127, &[])?;
        ensure!(s.left()?.is_empty(), "{:?}", s.left()?);
        s.fails(node, &["run", "--rm", "probe", "--network", "nowhere", "--", "true"], 125, &["nowhere"])?;
        ensure!(s.left()?.is_empty(), "{:?}", s.left()?);
        // What the command leaves in the sandbox goes with it.
        s.ok(node, &["run", "--rm", "probe", "--", "sh", "-c", "sleep 600 > /dev/null 2>&1 &"])?;
        ensure!(s.left()?.is_empty(), "{:?}", s.left()?);
        s.ok(node, &["create", "web"])?;
        s.ok(node, &["run", "--rm", "web", "--", "true"])?;
        ensure!(s.states(node)? == [("web".into(), "ready".into())]);
        s.ok(node, &["rm", "web"]).map(drop)
    })
}

#[test]
fn signals_reach_the_command() -> Result<()> {
    with_sandboxes(|node, s| {
        s.ok(node, &["create", "web"])?;
        let ready = node.dirs().root.join("ready");
        let script = format!("trap 'echo told; exit 9' TERM; : > {}; while :; do sleep 0.1; done", ready.display());
        let mut command = s.command(node, &["run", "web", "--", "sh", "-c", &script])?;
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0).spawn()?;
        wait::until("the command runs", || Ok(ready.exists().then_some(())))?;
        let running = s.inspect(node, "web")?;
        ensure!(running["running"].as_array().is_some_and(|r| !r.is_empty()), "{running}");
        kill(Pid::from_raw(i32::try_from(child.id())?), Signal::SIGTERM)?;
        let status = process::wait(&mut child, wait::PATIENCE)?.context("the tool does not end")?;
        ensure!(status.code() == Some(9), "{status}");
        s.ok(node, &["rm", "web"]).map(drop)
    })
}

#[test]
fn a_detached_command_outlives_the_tool_and_ends_with_the_sandbox() -> Result<()> {
    with_sandboxes(|node, s| {
        let log = node.dirs().root.join("web.log");
        let of_log = log.display().to_string();
        // It ignores SIGTERM, and has a child in another network namespace that nobody started by `run`.
        let script = "trap '' TERM; echo started; while :; do sleep 0.1; done";
        let told = s.ok(node, &["run", "--detach", "--log", &of_log, "web", "--", "sh", "-c", script])?;
        let pid: i32 = told.trim().parse().with_context(|| told.clone())?;
        let session = getsid(Some(Pid::from_raw(pid)))?;
        ensure!(session.as_raw() == pid, "it is in session {session}, whose terminal and end are the caller's");
        wait::until("the log", || Ok((fs::read_to_string(&log)? == "started\n").then_some(())))?;
        let running = s.inspect(node, "web")?;
        ensure!(running["processes"][0]["pid"] == pid, "{running}");
        ensure!(running["running"].as_array().is_some_and(|r| r.iter().any(|p| p["pid"] == pid)), "{running}");
        ensure!(s.list(node)?[0]["processes"].as_u64().is_some_and(|n| n > 0));
        s.ok(node, &["stop", "web", "--grace", "300ms"])?;
        ensure!(!lives(pid), "process {pid} lives");
        s.ok(node, &["rm", "web"]).map(drop)
    })
}

#[test]
fn a_stop_ends_who_left_the_namespace_and_who_came_into_it_but_not_others() -> Result<()> {
    with_sandboxes(|node, s| {
        let name = |text: &str| node.dirs().root.join(text);
        // Started by `run`, and in a namespace of its own now.
        let leave = format!("exec unshare -n sh -c ': > {}; exec sleep 600'", name("left").display());
        let left: i32 = s.ok(node, &["run", "--detach", "web", "--", "sh", "-c", &leave])?.trim().parse()?;
        wait::until("the command left", || Ok(name("left").exists().then_some(())))?;
        // Started by somebody else in the sandbox, as `ip netns exec` does.
        let mut guest = process::command_in(&s.space("web")?, "sleep")?.arg("600").spawn()?;
        let mut stranger = node.command("sleep")?.arg("600").spawn()?;
        let id = i32::try_from(guest.id())?;
        wait::until("the guest is inside", || {
            let running = s.inspect(node, "web")?;
            Ok(running["running"].as_array().is_some_and(|r| r.iter().any(|p| p["pid"] == id)).then_some(()))
        })?;
        s.ok(node, &["rm", "web"])?;
        ensure!(!lives(left), "process {left} lives");
        let ended = process::wait(&mut guest, Duration::from_secs(5))?.context("the guest lives")?;
        ensure!(!ended.success(), "{ended}");
        ensure!(stranger.try_wait()?.is_none(), "a process of the node was ended");
        stranger.kill()?;
        stranger.wait()?;
        Ok(())
    })
}

#[test]
fn a_command_that_cannot_be_written_down_does_not_run() -> Result<()> {
    with_sandboxes(|node, s| {
        s.ok(node, &["create", "web"])?;
        // The record cannot be written: its new file is a directory.
        let new = s.state.join("web.new");
        fs::create_dir(&new)?;
        s.fails(node, &["run", "--detach", "web", "--", "sleep", "600"], 125, &["write record"])?;
        ensure!(s.inspect(node, "web")?["running"].as_array().is_some_and(Vec::is_empty), "the command runs");
        s.fails(node, &["stop", "web"], 1, &["write record"])?;
        ensure!(s.states(node)? == [("web".into(), "ready".into())], "{:?}", s.states(node)?);
        fs::remove_dir(&new)?;
        s.ok(node, &["rm", "web"]).map(drop)
    })
}

#[test]
fn a_stop_from_inside_is_refused() -> Result<()> {
    with_sandboxes(|node, s| {
        s.ok(node, &["create", "web"])?;
        let inner = s.command(node, &["stop", "web"])?;
        let mut command = s.command(node, &["run", "web", "--"])?;
        command.arg(inner.get_program()).args(inner.get_args());
        let done = run(command, b"", wait::PATIENCE)?;
        ensure!(done.code() == 1 && done.stderr.contains("runs inside its network namespace"), "{}", done.describe());
        s.ok(node, &["rm", "web"]).map(drop)
    })
}

#[test]
fn a_process_of_one_sandbox_does_not_keep_anothers_namespace() -> Result<()> {
    with_sandboxes(|node, s| {
        s.ok(node, &["create", "first"])?;
        let pid: i32 = s.ok(node, &["run", "--detach", "second", "--", "sleep", "600"])?.trim().parse()?;
        let mounts = || fs::read_to_string(format!("/proc/{pid}/mountinfo")).context("its mounts");
        let path = s.names.join("first").display().to_string();
        ensure!(mounts()?.contains(&path), "the test sees nothing: {}", mounts()?);
        s.ok(node, &["rm", "first"])?;
        ensure!(!mounts()?.contains(&path), "{}", mounts()?);
        // Nothing that it mounted is on the node.
        let own = fs::read_to_string("/proc/thread-self/mountinfo")?;
        ensure!(!own.contains("wharf-sandbox"), "{own}");
        s.ok(node, &["rm", "second"]).map(drop)
    })
}

/// Whether a process runs; one that has ended and is not reaped does not.
fn lives(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
}
