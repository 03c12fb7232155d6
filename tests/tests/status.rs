//! The status while a part of the agent is stuck: it answers all the same, names the part, and exits as documented.
//!
//! The agent with crash points waits where a test tells it to, and so stands in for a disk, a kernel or a runtime that
//! does not answer.

use std::{
    fs,
    os::unix::{fs::PermissionsExt, net::UnixDatagram},
    path::PathBuf,
    process::{Child, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use nix::mount::{MsFlags, mount};
use wharf_api::{AgentStatus, ComponentStatus, Health};
use wharf_tests::{Node, NodeConfig, crash, http, process, scenario, wait};

/// Exit codes of `wharf status`.
const OK: i32 = 0;
const DEGRADED: i32 = 1;
const DOWN: i32 = 2;

/// A node whose agent has points to wait at.
fn armed(body: impl FnOnce(&mut Node) -> Result<()>) -> Result<()> {
    let mut node = Node::without_agent(NodeConfig::default())?;
    let outcome: Result<()> = (|| {
        ensure!(node.start_armed_agent()?, "the agent was killed at a crash point");
        body(&mut node)?;
        node.finish()
    })();
    outcome.with_context(|| format!("the agent's log:\n{}", node.log()))
}

/// `wharf status -o json`, its exit code, and what it said on standard error.
fn status(node: &Node) -> Result<(AgentStatus, i32, String)> {
    let finished = node.wharf(&["status", "-o", "json", "--all-controllers"])?;
    let status = serde_json::from_str(&finished.stdout).with_context(|| finished.describe())?;
    Ok((status, finished.code(), finished.stderr))
}

fn component(status: &AgentStatus, name: &str) -> Option<ComponentStatus> {
    status.components.iter().find(|c| c.name == name).cloned()
}

/// Waits for a status in which this part is stale, and gives it.
fn await_stale(node: &Node, part: &str) -> Result<(ComponentStatus, i32)> {
    wait::until(&format!("a status in which {part} is stale"), || {
        let (status, code, _) = status(node)?;
        Ok(component(&status, part).filter(|c| c.stale_ms.is_some()).map(|c| (c, code)))
    })
}

fn await_exit(node: &Node, code: i32) -> Result<()> {
    wait::until_equal("exit code of `wharf status`", &code, || Ok(node.wharf(&["status"])?.code()))
}

#[test]
fn a_stuck_store_is_named_and_holds_no_answer_up() -> Result<()> {
    armed(|node| {
        await_exit(node, OK)?;
        crash::hold(node.dirs(), &["store/before-transaction"])?;
        let asking = {
            let socket = node.dirs().socket();
            std::thread::spawn(move || http::request(&socket, "POST", "/v1/ipam/10.87.7.7?owner=somebody", None))
        };
        let (store, code) = await_stale(node, "store")?;
        ensure!(store.health >= Health::Degraded && [DEGRADED, DOWN].contains(&code), "{store:?}, exit {code}");
        ensure!(store.message.contains("commits"), "what it said last is not shown: {store:?}");
        // While it lasts it gets worse, and the words say what is waited for.
        wait::until("the store to be judged as failing", || {
            let (status, code, _) = status(node)?;
            Ok(component(&status, "store").filter(|c| c.health == Health::Failing && code == DOWN))
        })?;
        let table = node.wharf(&["status"])?;
        ensure!(table.code() == DOWN && table.stdout.contains("stale"), "{}", table.describe());
        ensure!(node.wharf(&["status", "--brief"])?.stdout == "down\n");
        let metrics = node.http("GET", "/metrics", None)?.text();
        ensure!(metrics.contains("wharf_status_stale_parts 1"), "{metrics}");
        crash::release(node.dirs())?;
        let answer = asking.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        ensure!(answer.status < 300, "{}", answer.text());
        await_exit(node, OK)?;
        ensure!(node.http("DELETE", "/v1/ipam/10.87.7.7", None)?.status < 300);
        Ok(())
    })
}

#[test]
fn a_stuck_kernel_call_is_named_and_the_rest_is_told() -> Result<()> {
    armed(|node| {
        let a = node.sandbox("a")?;
        let ea = node.attach(&a)?;
        await_exit(node, OK)?;
        crash::hold(node.dirs(), &["datapath/observe-maps"])?;
        let (datapath, code) = await_stale(node, "datapath")?;
        ensure!(datapath.health == Health::Degraded && code == DEGRADED, "{datapath:?}, exit {code}");
        let (status, _, _) = status(node)?;
        ensure!(status.endpoints.get("ready") == Some(&1), "{:?}", status.endpoints);
        let fresh: Vec<&str> =
            status.components.iter().filter(|c| c.stale_ms.is_none()).map(|c| c.name.as_str()).collect();
        for part in ["store", "ipam", "endpoints", "controllers", "deletion-queue"] {
            ensure!(fresh.contains(&part), "{part} is stale too: {:?}", status.components);
        }
        ensure!(!status.bpf_maps.is_empty(), "the maps as they were last are not shown");
        crash::release(node.dirs())?;
        await_exit(node, OK)?;
        node.detach(&ea)
    })
}

/// Without the leak audit: nothing but the status's own look can tell.
#[test]
fn a_container_whose_namespace_went_is_named_at_once() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--audit-interval-ms", "0"]), |node| {
        let (mut a, b) = (node.sandbox("a")?, node.sandbox("b")?);
        let (ea, eb) = (node.attach(&a)?, node.attach(&b)?);
        let (id, other) = (node.endpoint(&ea)?.id, node.endpoint(&eb)?.id);
        await_exit(node, OK)?;
        a.vanish()?;
        let told = wait::until("a status that names the endpoint", || {
            let (status, code, _) = status(node)?;
            Ok(component(&status, "endpoints").filter(|c| c.health == Health::Degraded && code == DEGRADED))
        })?;
        let (gone, there) = (format!("endpoint {id} (its link is gone)"), format!("endpoint {other}"));
        ensure!(told.message.contains(&gone) && !told.message.contains(&there), "{told:?}");
        node.detach(&ea)?;
        await_exit(node, OK)?;
        node.detach(&eb)
    })
}

#[test]
fn a_runtime_that_is_stuck_is_looked_at_through_the_admin_thread() -> Result<()> {
    armed(|node| {
        let sandboxes = [node.sandbox("a")?, node.sandbox("b")?, node.sandbox("c")?, node.sandbox("d")?];
        await_exit(node, OK)?;
        crash::hold(node.dirs(), &["create/before-ensure-link"])?;
        std::thread::scope(|scope| {
            let adding: Vec<_> = sandboxes
                .iter()
                .map(|sandbox| {
                    let twin = node.twin();
                    scope.spawn(move || -> Result<()> {
                        // Whether it succeeds in the end depends on how long it had to wait.
                        let twin = twin?;
                        twin.cni("ADD").of(sandbox.name(), sandbox.path(), "eth0").conf(&twin.netconf()).run()?;
                        Ok(())
                    })
                })
                .collect();
            let looked = (|| {
                let stuck = wait::until("a status from the admin thread that names what is stuck", || {
                    let (status, code, said) = status(node)?;
                    let stuck = ["runtime", "api"]
                        .iter()
                        .find_map(|name| component(&status, name).filter(|c| c.health == Health::Failing));
                    Ok(stuck.filter(|_| status.from_admin && code == DOWN).map(|stuck| (stuck, said)))
                })?;
                ensure!(stuck.1.contains("admin thread"), "{stuck:?}");
                let table = node.wharf(&["status"])?;
                ensure!(table.code() == DOWN && table.stdout.contains("admin thread"), "{}", table.describe());
                // What else may be looked at, and what may not.
                let socket = node.dirs().admin_socket();
                let list = http::request(&socket, "GET", "/v1/endpoint", None)?;
                ensure!(list.status == 200, "{}", list.text());
                let change = http::request(&socket, "DELETE", "/v1/endpoint/1", None)?;
                ensure!(change.status == 400 && change.text().contains("wharf.sock"), "{}", change.text());
                Ok(())
            })();
            crash::release(node.dirs())?;
            for thread in adding {
                thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
            }
            looked
        })?;
        await_exit(node, OK)?;
        for sandbox in &sandboxes {
            let conf = node.netconf();
            node.cni("DEL").of(sandbox.name(), sandbox.path(), "eth0").conf(&conf).run()?.silent()?;
        }
        Ok(())
    })
}

#[test]
fn a_full_disk_is_named() -> Result<()> {
    let mut node = Node::without_agent(NodeConfig::default())?;
    mount(Some("small"), &node.dirs().run, Some("tmpfs"), MsFlags::empty(), Some("size=16m,mode=0755"))
        .context("mount a small tmpfs")?;
    let outcome = node.start_agent().and_then(|()| {
        let filler = fill(&node)?;
        // The store may have room left in its file for a while.
        let mut leased = Vec::new();
        wait::until("a commit that fails", || {
            let ip = format!("10.87.{}.{}", 1 + leased.len() / 200, 10 + leased.len() % 200);
            let answer = node.http("POST", &format!("/v1/ipam/{ip}?owner=somebody"), None)?;
            if answer.status < 300 {
                leased.push(ip);
                return Ok(None);
            }
            ensure!(answer.code()? == "store", "{}", answer.text());
            Ok(Some(()))
        })?;
        let (status, code, _) = status(&node)?;
        let store = component(&status, "store").context("no store in the status")?;
        ensure!(store.health == Health::Failing && store.message.contains("disk full"), "{store:?}");
        ensure!(code == DOWN && store.stale_ms.is_none(), "exit {code}: {store:?}");
        fs::remove_file(filler)?;
        for ip in leased {
            let gone = node.http("DELETE", &format!("/v1/ipam/{ip}"), None)?;
            ensure!(gone.status < 300, "{}", gone.text());
        }
        node.finish()
    });
    outcome.with_context(|| format!("the agent's log:\n{}", node.log()))
}

/// Takes what space there is.
fn fill(node: &Node) -> Result<PathBuf> {
    use std::io::Write;
    let path = node.dirs().run.join("filler");
    let mut file = fs::File::create(&path).context("create the filler")?;
    let block = vec![b'x'; 4096];
    loop {
        match file.write(&block) {
            Ok(n) if n > 0 => {}
            Ok(_) => return Ok(path),
            Err(e) if e.raw_os_error() == Some(libc::ENOSPC) => return Ok(path),
            Err(e) => return Err(e).context("fill the disk"),
        }
    }
}

#[test]
fn controllers_are_told_in_full() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        let ea = node.attach(&a)?;
        let id = node.endpoint(&ea)?.id;
        node.wharf(&["endpoint", "regenerate", &id.to_string()])?.ok()?;
        let (all, _, _) = status(node)?;
        let own = all.controllers.iter().find(|c| c.endpoint == Some(id)).context("no row of the endpoint")?;
        ensure!(own.successes >= 1 && own.last_success_unix_ms.is_some(), "{own:?}");
        let node_row = wait::until("the next run of a controller of the node", || {
            let (all, _, _) = status(node)?;
            Ok(all.controllers.into_iter().find(|c| c.name == "node-datapath" && c.next_run_unix_ms.is_some()))
        })?;
        ensure!(node_row.interval_ms == Some(10_000) && node_row.last_duration_ms.is_some(), "{node_row:?}");
        let table = node.wharf(&["status", "--all-controllers"])?.ok()?;
        for word in ["NEXT RUN", "node-datapath", &format!("endpoint-{id}-")] {
            ensure!(table.contains(word), "no {word} in\n{table}");
        }
        ensure!(table.lines().all(|l| l.chars().count() <= 100), "wider than 100 columns:\n{table}");
        // Without being asked for, only what is not well is told of endpoints.
        let few: AgentStatus = serde_json::from_str(&node.http("GET", "/v1/healthz", None)?.text())?;
        ensure!(few.controllers.iter().all(|c| c.endpoint.is_none()), "{:?}", few.controllers);
        ensure!(few.controllers_total == all.controllers_total, "{few:?}");
        node.detach(&ea)?;
        let (after, _, _) = status(node)?;
        ensure!(after.controllers.iter().all(|c| c.endpoint.is_none()), "{:?}", after.controllers);
        let metrics = node.http("GET", "/metrics", None)?.text();
        for line in ["wharf_controllers_failing 0", "wharf_status_stale_parts 0", "wharf_controller_runs_total{name="] {
            ensure!(metrics.contains(line), "no {line} in\n{metrics}");
        }
        Ok(())
    })
}

#[test]
fn healthz_for_probes_is_one_word() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        for socket in [node.dirs().socket(), node.dirs().admin_socket()] {
            let brief = http::request(&socket, "GET", "/v1/healthz?brief=true", None)?;
            ensure!(brief.status == 200 && brief.text() == "ok\n", "{}: {}", socket.display(), brief.text());
            let wrong = http::request(&socket, "GET", "/v1/healthz?brief=perhaps", None)?;
            ensure!(wrong.status == 400 && wrong.code()? == "invalid-request", "{}", wrong.text());
            let whole = http::request(&socket, "GET", "/v1/healthz", None)?.json()?;
            ensure!(whole["from_admin"] == (socket == node.dirs().admin_socket()), "{whole}");
        }
        Ok(())
    })
}

#[test]
fn the_admin_socket_is_as_closed_as_the_agents_and_a_stale_one_is_replaced() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let socket = node.dirs().admin_socket();
        let mode = fs::metadata(&socket)?.permissions().mode() & 0o777;
        ensure!(mode == 0o660, "{mode:o}");
        let change = r#"{"log_level": "debug"}"#;
        let changed = http::request(&socket, "PATCH", "/v1/config", Some(change))?;
        ensure!(changed.status == 200 && changed.text().contains("debug"), "{}", changed.text());
        node.kill_agent()?;
        ensure!(socket.exists());
        ensure!(node.wharf(&["status"])?.code() == DOWN);
        node.start_agent()?;
        node.wharf(&["status"])?.ok()?;
        node.stop_agent()?;
        ensure!(!socket.exists(), "the agent left its admin socket behind");
        node.start_agent()
    })
}

/// An agent under a watchdog, and systemd's end of the notify socket.
struct Watched {
    child: Child,
    systemd: UnixDatagram,
}

impl Watched {
    fn start(node: &Node, interval: Duration) -> Result<Self> {
        let path = node.dirs().root.join("systemd.sock");
        let systemd = UnixDatagram::bind(&path).context("bind the notify socket")?;
        systemd.set_read_timeout(Some(Duration::from_millis(10))).context("set a time limit")?;
        let log = fs::OpenOptions::new().create(true).append(true).open(&node.dirs().log)?;
        let mut command = node.command(process::crash_bin("wharf-agent")?)?;
        command.args(node.dirs().flags()).args(NodeConfig::default().flags).envs(crash::environment(node.dirs()));
        command.env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", interval.as_micros().to_string());
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        Ok(Self { child: command.spawn().context("start the agent")?, systemd })
    }

    /// The next message, if one comes soon.
    fn heard(&self) -> Option<String> {
        let mut message = [0; 4096];
        let n = self.systemd.recv(&mut message).ok()?;
        Some(String::from_utf8_lossy(message.get(..n)?).into_owned())
    }

    fn await_message(&self, wanted: &str) -> Result<()> {
        wait::until(wanted, || Ok(self.heard().filter(|m| m.lines().any(|l| l == wanted)).map(drop)))
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        // An error means it has ended by itself.
        if self.child.kill().is_ok() {
            self.child.wait().ok();
        }
    }
}

#[test]
fn the_watchdog_is_fed_only_while_the_store_moves() -> Result<()> {
    let node = Node::without_agent(NodeConfig::default())?;
    let watched = Watched::start(&node, Duration::from_secs(6))?;
    let outcome: Result<()> = (|| {
        watched.await_message("READY=1")?;
        watched.await_message("WATCHDOG=1")?;
        crash::hold(node.dirs(), &["store/before-transaction"])?;
        let asking = {
            let socket = node.dirs().socket();
            std::thread::spawn(move || http::request(&socket, "POST", "/v1/ipam/10.87.7.7?owner=somebody", None))
        };
        // Its controller says why it does not feed; from then on nothing may come.
        let failures = wait::until("the watchdog to say that the store does not answer", || {
            let (status, _, _) = status(&node)?;
            let row = status.controllers.into_iter().find(|c| c.name == "watchdog").context("no watchdog")?;
            let says = row.last_error.as_deref().is_some_and(|e| e.contains("store does not answer"));
            Ok((says && row.consecutive_failures > 0).then_some(row.failures))
        })?;
        while watched.heard().is_some() {}
        wait::until("two more rounds that do not feed", || {
            if watched.heard().is_some_and(|m| m.contains("WATCHDOG=1")) {
                bail!("fed while the store is stuck");
            }
            let (status, _, _) = status(&node)?;
            Ok(status.controllers.iter().any(|c| c.name == "watchdog" && c.failures >= failures + 2).then_some(()))
        })?;
        crash::release(node.dirs())?;
        watched.await_message("WATCHDOG=1")?;
        asking.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        Ok(())
    })();
    outcome.with_context(|| format!("the agent's log:\n{}", node.log()))
}
