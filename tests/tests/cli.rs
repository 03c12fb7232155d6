//! The operator's CLI against a real agent: exit codes, and what scripts rely on.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use wharf_tests::{Attached, Node, NodeConfig, Sandbox, process::ip, programs, scenario, wait};

/// Keys of `wharf endpoint list -o json` that are promised.
const PROMISED: [&str; 10] =
    ["id", "epoch", "state", "container_id", "ifname", "identity", "labels", "ipv4", "ipv6", "ifindex"];

fn with_one(body: impl FnOnce(&mut Node, &Sandbox, &Attached) -> Result<()>) -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        let ea = node.attach(&a)?;
        body(node, &a, &ea)?;
        node.detach(&ea)
    })
}

#[test]
fn status_brief_exits_0_only_while_the_agent_serves() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let up = node.wharf(&["status", "--brief"])?;
        ensure!(up.code() == 0 && up.stdout.lines().count() == 1, "{}", up.describe());
        node.kill_agent()?;
        let dead = node.wharf(&["status", "--brief"])?;
        ensure!(dead.code() == 2, "{}", dead.describe());
        node.start_agent()?;
        node.stop_agent()?;
        let stopped = node.wharf(&["status", "--brief"])?;
        ensure!(stopped.code() == 2, "{}", stopped.describe());
        node.start_agent()?;
        node.wharf(&["status", "--brief"])?.ok()?;
        Ok(())
    })
}

#[test]
fn without_an_agent_every_command_exits_2_and_says_why() -> Result<()> {
    let node = Node::without_agent(NodeConfig::default())?;
    let calls: &[&[&str]] = &[
        &["status"],
        &["endpoint", "list"],
        &["audit"],
        &["ipam", "list"],
        &["port", "list"],
        &["monitor"],
        &["config", "get"],
    ];
    for call in calls {
        let finished = node.wharf(call)?;
        ensure!(finished.code() == 2 && finished.stdout.is_empty(), "{}", finished.describe());
        ensure!(
            finished.stderr.contains("wharf.sock") && finished.stderr.contains("running"),
            "{}",
            finished.describe()
        );
    }
    Ok(())
}

#[test]
fn endpoint_list_prints_the_promised_objects() -> Result<()> {
    with_one(|node, _, ea| {
        let text = node.wharf(&["endpoint", "list", "-o", "json"])?.ok()?;
        let list: Value = serde_json::from_str(&text)?;
        let objects = list.as_array().context("an array")?;
        ensure!(objects.len() == 1, "{text}");
        for key in PROMISED {
            ensure!(objects.iter().all(|o| o.get(key).is_some()), "no {key} in {text}");
        }
        ensure!(objects[0]["container_id"] == "a" && objects[0]["ipv4"] == ea.v4()?.to_string(), "{text}");
        let table = node.wharf(&["endpoint", "list"])?.ok()?;
        for word in ["ready", &ea.v4()?.to_string(), &ea.v6()?.to_string()] {
            ensure!(table.contains(word), "no {word} in\n{table}");
        }
        ensure!(!table.contains('\u{1b}'), "colours without a terminal: {table:?}");
        Ok(())
    })
}

#[test]
fn an_empty_node_lists_an_empty_array() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let text = node.wharf(&["endpoint", "list", "-o", "json"])?.ok()?;
        ensure!(serde_json::from_str::<Value>(&text)? == serde_json::json!([]), "{text}");
        node.wharf(&["endpoint", "list"])?.ok()?;
        Ok(())
    })
}

#[test]
fn what_an_operator_asks_is_answered() -> Result<()> {
    with_one(|node, _, ea| {
        let id = node.endpoint(ea)?.id.to_string();
        let v4 = ea.v4()?.to_string();
        let calls: Vec<(Vec<&str>, &str)> = vec![
            (vec!["status"], "quay"),
            (vec!["status", "-o", "json"], "\"serving\""),
            (vec!["status", "-o", "yaml"], "serving:"),
            (vec!["endpoint", "get", &id], &v4),
            (vec!["endpoint", "get", &v4], "eth0"),
            (vec!["endpoint", "get", "container-id:a"], &v4),
            (vec!["endpoint", "get"], &v4),
            (vec!["endpoint", "describe", &id], "Events:"),
            (vec!["policy", "list"], "Revision:"),
            (vec!["namespace", "describe", "default"], &v4),
            (vec!["endpoint", "log", &id], "ready"),
            (vec!["endpoint", "health", &id], ""),
            (vec!["endpoint", "regenerate", &id], ""),
            (vec!["ipam", "list"], &v4),
            (vec!["bpf", "endpoint", "list"], &v4),
            (vec!["bpf", "metrics", "list"], ""),
            (vec!["bpf", "map", "list"], "ENDPOINTS"),
            (vec!["config", "get"], "run-dir"),
            (vec!["completion", "bash"], "wharf"),
        ];
        for (call, word) in calls {
            let text = node.wharf(&call)?.ok()?;
            ensure!(text.contains(word), "no {word:?} in the answer to {call:?}:\n{text}");
        }
        Ok(())
    })
}

#[test]
fn what_is_not_found_exits_1_and_bad_usage_3() -> Result<()> {
    with_one(|node, _, _| {
        let missing = node.wharf(&["endpoint", "get", "9999"])?;
        ensure!(missing.code() == 1 && missing.stderr.contains("9999"), "{}", missing.describe());
        let usage = node.wharf(&["endpoint", "frobnicate"])?;
        ensure!(usage.code() == 3, "{}", usage.describe());
        Ok(())
    })
}

#[test]
fn delete_by_the_operator_is_a_whole_delete() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        let ea = node.attach(&a)?;
        let id = node.endpoint(&ea)?.id.to_string();
        node.wharf(&["endpoint", "delete", &id])?.ok()?;
        ensure!(a.space()?.links()? == ["lo"] && node.endpoints()?.is_empty());
        ensure!(node.wharf(&["endpoint", "delete", &id])?.code() == 1);
        Ok(())
    })
}

#[test]
fn audit_exits_0_when_nothing_is_amiss() -> Result<()> {
    with_one(|node, _, _| {
        let audit = node.wharf(&["audit"])?;
        ensure!(audit.code() == 0 && audit.stdout.trim().is_empty(), "{}", audit.describe());
        Ok(())
    })
}

/// Things made behind the agent's back that an audit must find and a repair must mend.
type Leak = (&'static str, fn(&Node, &Attached) -> Result<()>, &'static str);

const LEAKS: &[Leak] = &[
    (
        "a route to nobody",
        |node, _| ip(node.space(), "-4 route add unreachable 10.87.200.200/32 proto 87").map(drop),
        "10.87.200.200",
    ),
    (
        "an interface with the name and the mark of an endpoint that is gone",
        |node, _| {
            ip(node.space(), "link add wh00630000ffff type veth peer name whoever")?;
            ip(node.space(), "link set dev wh00630000ffff alias wharf:99:65535:net/gone/eth0").map(drop)
        },
        "net/gone:eth0",
    ),
    (
        "a program taken off",
        |node, endpoint| {
            let link = node.endpoint(endpoint)?.host_ifname;
            programs::take_off(node.space(), &link, "ingress")
        },
        "",
    ),
    (
        "the endpoint's route gone",
        |node, endpoint| {
            let link = node.endpoint(endpoint)?.host_ifname;
            ip(node.space(), &format!("-4 route del {}/32 dev {link}", endpoint.v4()?)).map(drop)
        },
        "",
    ),
];

#[test]
fn audit_finds_each_leak_prints_a_line_and_repairs_it() -> Result<()> {
    with_one(|node, _, ea| {
        for (what, make, word) in LEAKS {
            make(node, ea).with_context(|| format!("make {what}"))?;
            let found = node.wharf(&["audit"])?;
            ensure!(found.code() == 1 && found.stdout.contains(word), "{what}: {}", found.describe());
            ensure!(!found.stdout.trim().is_empty(), "{what}: {}", found.describe());
            let repair = node.wharf(&["audit", "--repair"])?;
            let after = node.wharf(&["audit"])?;
            ensure!(after.code() == 0, "{what}: after\n{}\nstill\n{}", repair.describe(), after.describe());
        }
        node.check(ea)?.silent()
    })
}

#[test]
fn monitor_shows_a_drop_with_its_reason() -> Result<()> {
    with_one(|node, a, ea| {
        let id = node.endpoint(ea)?.id.to_string();
        let watching = std::thread::scope(|scope| {
            let shared = &*node;
            let watcher = scope.spawn(|| {
                shared.wharf(&[
                    "monitor",
                    "--type",
                    "drop",
                    "--reason",
                    "invalid-source-ip",
                    "--endpoint",
                    &id,
                    "-n",
                    "1",
                ])
            });
            // The watcher may begin to listen at any moment: send until it has seen one and ended.
            let socket = wharf_tests::frame::PacketSocket::open(a.space()?, "eth0")?;
            let (from, to) = ([198, 51, 100, 1].into(), ea.v4()?.into());
            let udp = wharf_tests::frame::udp(from, to, (1, 2), b"x");
            let packet = wharf_tests::frame::ip(from, to, 17, &udp);
            let frame =
                wharf_tests::frame::ethernet([2, 0, 0, 0, 0, 1], socket.mac()?, wharf_tests::frame::IPV4, &packet);
            wait::until("the monitor's end", || {
                socket.send(&frame)?;
                Ok(watcher.is_finished().then_some(()))
            })?;
            watcher.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?
        })?;
        let text = watching.ok()?;
        ensure!(text.contains("invalid-source-ip") && text.contains("198.51.100.1"), "{text}");
        Ok(())
    })
}
