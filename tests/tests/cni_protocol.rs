//! wharf-cni by the letter of the CNI specification, every command and version.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use wharf_tests::{Attached, Node, NodeConfig, Sandbox, icmp::ping, process::ip, programs, scenario};

const VERSIONS: [&str; 4] = ["0.3.1", "0.4.0", "1.0.0", "1.1.0"];

fn one(node: &Node, name: &str) -> Result<(Sandbox, Attached)> {
    let sandbox = node.sandbox(name)?;
    let attached = node.attach(&sandbox)?;
    Ok((sandbox, attached))
}

#[test]
fn version_is_answered_without_agent_and_whatever_the_configuration() -> Result<()> {
    let node = Node::without_agent(NodeConfig::default())?;
    let probes: [&[u8]; 4] = [br#"{"cniVersion":"1.0.0"}"#, b"", b"no json", br#"{"cniVersion":17}"#];
    for stdin in probes {
        let answer = node.cni("VERSION").env("CNI_NETNS", "dummy").env("CNI_IFNAME", "dummy").stdin(stdin).run()?;
        let result = answer.result()?;
        ensure!(result["supportedVersions"] == json!(VERSIONS), "{result}");
        ensure!(result["cniVersion"].is_string(), "{result}");
    }
    Ok(())
}

#[test]
fn every_version_gets_its_own_form_of_the_result() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        for version in VERSIONS {
            let sandbox = node.sandbox(&format!("v{}", version.replace('.', "-")))?;
            let attached = node.attach_with(&sandbox, "eth0", &node.netconf().version(version))?;
            let r = &attached.result;
            ensure!(r["cniVersion"] == version, "{r}");
            let (ips, interfaces) = (list(r, "ips")?, list(r, "interfaces")?);
            ensure!(ips.len() == 2 && interfaces.len() == 2, "{r}");
            for (item, family) in ips.iter().zip(["4", "6"]) {
                let with_family = version.starts_with("0.");
                ensure!(item.get("version") == with_family.then(|| json!(family)).as_ref(), "{version}: {item}");
                let address = item["address"].as_str().unwrap_or_default();
                ensure!(address.ends_with(if family == "4" { "/32" } else { "/128" }), "{item}");
                let owner = item["interface"].as_u64().and_then(|n| interfaces.get(usize::try_from(n).ok()?));
                ensure!(owner.is_some_and(|i| i["name"] == "eth0"), "{item} is on {owner:?}");
            }
            let [host, container] = [&interfaces[0], &interfaces[1]];
            ensure!(host.get("sandbox").is_none_or(|s| s == ""), "{host}");
            ensure!(container["sandbox"] == json!(sandbox.path()), "{container}");
            ensure!(container["mac"].as_str().is_some_and(|m| m.len() == 17), "{container}");
            let mtu = (version == "1.1.0").then(|| json!(1500));
            ensure!(container.get("mtu") == mtu.as_ref(), "{version}: {container}");
            let destinations: Vec<&Value> = list(r, "routes")?.iter().map(|route| &route["dst"]).collect();
            ensure!(destinations == [&json!("0.0.0.0/0"), &json!("::/0")], "{r}");
            if version != "0.3.1" {
                node.check(&attached)?.silent()?;
            }
            node.detach(&attached)?;
        }
        Ok(())
    })
}

fn list<'a>(result: &'a Value, key: &str) -> Result<&'a Vec<Value>> {
    result[key].as_array().with_context(|| format!("no list {key} in {result}"))
}

#[test]
fn a_command_younger_than_the_version_is_refused() -> Result<()> {
    let node = Node::without_agent(NodeConfig::default())?;
    for (command, version) in [("CHECK", "0.3.1"), ("GC", "1.0.0"), ("STATUS", "1.0.0")] {
        let call = node.cni(command).of("c", Path::new("/nowhere"), "eth0").conf(&node.netconf().version(version));
        let failure = call.run()?.failure()?;
        ensure!(failure.code == 1 && failure.cni_version == version, "{command} in {version}: {failure:?}");
    }
    Ok(())
}

#[test]
fn pod_arguments_become_labels_and_can_be_asked_for() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        let arguments =
            "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=till-0;K8S_POD_INFRA_CONTAINER_ID=a;OTHER=x";
        let call = node.cni("ADD").of("a", a.path(), "eth0").conf(&node.netconf()).env("CNI_ARGS", arguments);
        call.run()?.result()?;
        let found = node.ask(async |c| c.endpoint("pod-name:shop/till-0").await)?;
        ensure!(found.pod_name.as_deref() == Some("till-0"), "{found:?}");
        ensure!(found.pod_namespace.as_deref() == Some("shop"), "{found:?}");
        ensure!(found.labels.iter().any(|l| l.starts_with("k8s:") && l.ends_with("=shop")), "{:?}", found.labels);
        node.cni("DEL").of("a", a.path(), "eth0").conf(&node.netconf()).run()?.silent()
    })
}

#[test]
fn addresses_and_mac_asked_for_are_given() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        let wish = json!({"ips": ["10.87.9.9/32", "fd57:4a7f:e8f::9:9/128"], "mac": "02:00:00:00:09:09"});
        let conf = node.netconf().with("runtimeConfig", wish);
        let attached = node.attach_with(&a, "eth0", &conf)?;
        ensure!(attached.v4()?.to_string() == "10.87.9.9", "{}", attached.result);
        ensure!(attached.v6()?.to_string() == "fd57:4a7f:e8f::9:9", "{}", attached.result);
        ensure!(node.endpoint(&attached)?.container_mac == "02:00:00:00:09:09", "{}", attached.result);
        for address in attached.both()? {
            ping(node.space(), address)?.must_answer()?;
        }
        let b = node.sandbox("b")?;
        let taken = node.cni("ADD").of("b", b.path(), "eth0").conf(&conf).run()?.failure()?;
        ensure!(taken.text().contains("10.87.9.9"), "{taken:?}");
        node.detach(&attached)
    })
}

#[test]
fn what_a_runtime_asks_for_by_any_way_is_given_and_told_in_the_result() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        // As podman says it, and as containerd does for a pod with the kubelet's annotations of bandwidth.
        let conf =
            node.netconf().version("1.0.0").with("dns", json!({"nameservers": ["10.0.0.53"], "domain": "example.org"}));
        let a = node.sandbox("a")?;
        let asks = "IgnoreUnknown=1;K8S_POD_NAME=a;IP=10.87.9.10;MAC=02:00:00:00:09:10";
        let add = node.cni("ADD").env("CNI_ARGS", asks).of("a", a.path(), "eth0").conf(&conf);
        let result = add.run()?.result()?;
        let told = result.to_string();
        ensure!(told.contains("10.87.9.10/32") && told.contains("02:00:00:00:09:10"), "{told}");
        ensure!(result["dns"] == json!({"nameservers": ["10.0.0.53"], "domain": "example.org"}), "{told}");
        let b = node.sandbox("b")?;
        let runtime = json!({
            "dns": {"servers": ["10.0.0.10"], "searches": ["svc.cluster.local"], "options": ["ndots:5"]},
            "bandwidth": {"ingressRate": 1_000_000, "ingressBurst": 4_294_967_295_u64, "egressRate": 0, "egressBurst": 0},
            "portMappings": null,
        });
        let wish = json!({"cni": {"ips": ["10.87.9.11"], "mac": "02:00:00:00:09:11"}});
        let eb = node.attach_with(&b, "eth0", &conf.clone().with("runtimeConfig", runtime).with("args", wish))?;
        let expected = json!({"nameservers": ["10.0.0.10"], "domain": "example.org", "search": ["svc.cluster.local"],
            "options": ["ndots:5"]});
        ensure!(eb.result["dns"] == expected, "{}", eb.result);
        let endpoint = node.endpoint(&eb)?;
        ensure!(endpoint.container_mac == "02:00:00:00:09:11" && eb.v4()?.to_string() == "10.87.9.11", "{endpoint:?}");
        let limits = endpoint.bandwidth;
        ensure!(limits.egress.is_none() && limits.ingress.is_some_and(|l| l.burst == 1_048_576), "{limits:?}");
        ping(b.space()?, "10.87.9.10".parse()?)?.must_answer()?;
        node.detach(&eb)?;
        node.cni("DEL").of("a", a.path(), "eth0").conf(&conf).run()?.silent()
    })
}

#[test]
fn add_twice_is_refused_and_the_first_lives_on() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let (a, ea) = one(node, "a")?;
        let before = node.endpoint(&ea)?;
        for network in ["harbour", "annex"] {
            let conf = node.netconf().with("name", json!(network));
            let failure = node.cni("ADD").of("a", a.path(), "eth0").conf(&conf).run()?.failure()?;
            ensure!(failure.code == 4 && failure.text().contains("eth0"), "{failure:?}");
        }
        ensure!(node.endpoint(&ea)? == before);
        ping(a.space()?, ea.gateways()?[0])?.must_answer()?;
        node.detach(&ea)
    })
}

#[test]
fn add_over_an_interface_of_somebody_else_is_refused_and_leaves_it() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        ip(a.space()?, "link add eth0 type veth peer name theirs")?;
        let failure = node.cni("ADD").of("a", a.path(), "eth0").conf(&node.netconf()).run()?.failure()?;
        ensure!(failure.code == 4 && failure.text().contains("eth0"), "{failure:?}");
        let links = a.space()?.links()?;
        ensure!(links.contains(&"eth0".to_owned()) && links.contains(&"theirs".to_owned()), "{links:?}");
        Ok(())
    })
}

#[test]
fn del_is_best_effort_and_repeatable() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let del = |container: &str, netns: &Path| {
            node.cni("DEL").of(container, netns, "eth0").conf(&node.netconf()).run()?.silent()
        };
        let (mut a, ea) = one(node, "a")?;
        let (b, _) = one(node, "b")?;
        del("never-seen", Path::new("/run/netns/never-seen")).context("DEL of the unknown")?;
        node.detach(&ea)?;
        node.detach(&ea).context("DEL again")?;
        a.vanish()?;
        del("a", a.path()).context("DEL again, the namespace gone")?;
        let call = node.cni("DEL").env("CNI_CONTAINERID", "b").env("CNI_IFNAME", "eth0").conf(&node.netconf());
        call.run()?.silent().context("DEL without CNI_NETNS")?;
        ensure!(b.space()?.links()? == ["lo"], "DEL without CNI_NETNS left {:?}", b.space()?.links()?);
        let (c, ec) = one(node, "c")?;
        del("c", Path::new("")).context("DEL with an empty CNI_NETNS")?;
        ensure!(c.space()?.links()? == ["lo"] && node.endpoint(&ec).is_err());
        Ok(())
    })
}

/// What is done to a container, and what CHECK must then say.
type Tampering = (&'static str, fn(&Node, &Sandbox, &Attached) -> Result<()>, &'static [&'static str]);

const TAMPERINGS: &[Tampering] = &[
    (
        "IPv4 address removed",
        |_, s, e| in_sandbox(s, &format!("addr del {}/32 dev eth0", e.v4()?)),
        &["address", "route"],
    ),
    ("IPv6 address removed", |_, s, e| in_sandbox(s, &format!("addr del {}/128 dev eth0", e.v6()?)), &["address"]),
    ("IPv4 default route removed", |_, s, _| in_sandbox(s, "-4 route del default"), &["route"]),
    ("IPv6 default route removed", |_, s, _| in_sandbox(s, "-6 route del default"), &["route"]),
    ("MTU changed inside", |_, s, _| in_sandbox(s, "link set eth0 mtu 9000"), &["mtu"]),
    ("MTU changed outside", |n, _, e| on_node(n, e, "link set LINK mtu 1300"), &["mtu"]),
    ("link down inside", |_, s, _| in_sandbox(s, "link set eth0 down"), &["link"]),
    ("link down outside", |n, _, e| on_node(n, e, "link set LINK down"), &["link"]),
    ("MAC changed inside", |_, s, _| in_sandbox(s, "link set eth0 address 02:00:00:00:00:77"), &["mac", "link"]),
    (
        "link renamed inside",
        |_, s, _| {
            in_sandbox(s, "link set eth0 down")?;
            in_sandbox(s, "link set eth0 name eth9")
        },
        &["link", "eth0"],
    ),
    (
        "node's IPv4 route removed",
        |n, _, e| on_node(n, e, &format!("-4 route del {}/32 dev LINK", e.v4()?)),
        &["route"],
    ),
    (
        "node's IPv6 route removed",
        |n, _, e| on_node(n, e, &format!("-6 route del {}/128 dev LINK", e.v6()?)),
        &["route"],
    ),
    (
        "node's IPv4 route without its source",
        |n, _, e| on_node(n, e, &format!("-4 route replace {}/32 dev LINK proto 87 scope link", e.v4()?)),
        &["route", "source"],
    ),
    (
        "node's IPv6 route without its source",
        |n, _, e| {
            on_node(n, e, &format!("-6 route del {}/128 dev LINK", e.v6()?))?;
            on_node(n, e, &format!("-6 route add {}/128 dev LINK proto 87", e.v6()?))
        },
        &["route", "source"],
    ),
    ("program on the way out detached", |n, _, e| take_off(n, e, "ingress"), &["program"]),
    ("program on the way in detached", |n, _, e| take_off(n, e, "egress"), &["program"]),
    ("map unpinned", |n, _, e| unpin(n, e, "CONFIG"), &["map", "pin"]),
    ("link deleted", |n, _, e| on_node(n, e, "link del LINK"), &["link"]),
];

fn in_sandbox(sandbox: &Sandbox, arguments: &str) -> Result<()> {
    ip(sandbox.space()?, arguments).map(drop)
}

fn take_off(node: &Node, endpoint: &Attached, direction: &str) -> Result<()> {
    programs::take_off(node.space(), &node.endpoint(endpoint)?.host_ifname, direction)
}

fn on_node(node: &Node, endpoint: &Attached, arguments: &str) -> Result<()> {
    let link = node.endpoint(endpoint)?.host_ifname;
    ip(node.space(), &arguments.replace("LINK", &link)).map(drop)
}

fn unpin(node: &Node, endpoint: &Attached, name: &str) -> Result<()> {
    let path = node.dirs().endpoint_pins().join(node.endpoint(endpoint)?.id.to_string()).join(name);
    std::fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))
}

#[test]
fn check_sees_every_kind_of_tampering_and_del_works_all_the_same() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let mut unseen = Vec::new();
        for (number, (what, tamper, words)) in TAMPERINGS.iter().enumerate() {
            let (sandbox, attached) = one(node, &format!("c{number}"))?;
            node.check(&attached)?.silent().with_context(|| format!("CHECK before {what}"))?;
            tamper(node, &sandbox, &attached).with_context(|| format!("do: {what}"))?;
            match node.check(&attached)?.failure() {
                Ok(failure) => {
                    let text = failure.text().to_lowercase();
                    if failure.code < 100 || !words.iter().any(|w| text.contains(w)) {
                        unseen.push(format!("{what}: {failure:?}"));
                    }
                }
                Err(error) => unseen.push(format!("{what}: {error:#}")),
            }
            node.detach(&attached).with_context(|| format!("DEL after {what}"))?;
            let left = node.left_behind()?;
            ensure!(left.is_empty(), "after {what} and DEL: {left:?}");
        }
        ensure!(unseen.is_empty(), "not seen by CHECK:\n{}", unseen.join("\n"));
        Ok(())
    })
}

#[test]
fn check_passes_over_what_others_added() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let (a, ea) = one(node, "a")?;
        in_sandbox(&a, "addr add 192.0.2.7/32 dev eth0")?;
        in_sandbox(&a, "-4 route add 198.51.100.0/24 dev eth0")?;
        in_sandbox(&a, "link add extra type veth peer name more")?;
        // As a chained plugin (tuning) does: only a larger one would break traffic.
        in_sandbox(&a, "link set eth0 mtu 1300")?;
        node.check(&ea)?.silent()?;
        node.detach(&ea)
    })
}

#[test]
fn check_of_the_unknown_and_without_prev_result_are_errors() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let (a, ea) = one(node, "a")?;
        let bare = node.cni("CHECK").of("a", a.path(), "eth0").conf(&node.netconf()).run()?.failure()?;
        ensure!(bare.code == 7 && bare.text().contains("a/eth0"), "{bare:?}");
        node.detach(&ea)?;
        let never = node.cni("CHECK").of("a", a.path(), "eth0").conf(&node.netconf()).run()?.failure()?;
        ensure!(never.code == 3 && never.text().contains("no such attachment"), "{never:?}");
        let gone = node.check(&ea)?.failure()?;
        ensure!(gone.code == 3, "{gone:?}");
        Ok(())
    })
}

#[test]
fn check_in_anothers_namespace_is_an_error() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let ((_a, ea), (b, eb)) = (one(node, "a")?, one(node, "b")?);
        let conf = ea.conf.clone().after(&ea.result);
        let refused = node.cni("CHECK").of("a", b.path(), "eth0").conf(&conf).run()?.failure()?;
        ensure!(refused.code == 111 && refused.text().contains("is not the endpoint's namespace"), "{refused:?}");
        node.check(&ea)?.silent()?;
        [ea, eb].iter().try_for_each(|e| node.detach(e))
    })
}

/// The kernel takes IPv6 off an interface whose MTU is less than IPv6 needs.
#[test]
fn an_mtu_without_ipv6_is_the_containers_own_doing_and_a_regeneration_mends_it() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--audit-interval-ms", "1000"]), |node| {
        let (a, ea) = one(node, "a")?;
        in_sandbox(&a, "link set eth0 mtu 576")?;
        let told = node.check(&ea)?.failure()?;
        ensure!(told.text().contains("mtu"), "{told:?}");
        node.stop_agent()?;
        node.start_agent()?;
        node.check(&ea)?.silent()?;
        ping(a.space()?, ea.v6()?.into())?.must_answer()?;
        in_sandbox(&a, "link set eth0 mtu 576")?;
        let regenerated = node.wharf(&["endpoint", "regenerate", &ea.id(), "--level", "datapath"])?;
        ensure!(regenerated.status.success(), "{regenerated:?}");
        node.check(&ea)?.silent()?;
        let status = node.wharf(&["status", "--brief"])?;
        ensure!(status.stdout.trim() == "ok", "{status:?}");
        node.detach(&ea)
    })
}

#[test]
fn gc_deletes_what_the_runtime_no_longer_lists_and_nothing_else() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let (a, ea) = one(node, "a")?;
        let (_b, _) = one(node, "b")?;
        let c = node.sandbox("c")?;
        let other_network = node.attach_with(&c, "eth0", &node.netconf().with("name", json!("annex")))?;
        let valid = json!([{"containerID": "a", "ifname": "eth0"}]);
        let gc = |key: &str, list: Value| node.cni("GC").conf(&node.netconf().with(key, list)).run()?.silent();
        gc("cni.dev/valid-attachments", valid.clone())?;
        let mut ids: Vec<String> = node.endpoints()?.into_iter().map(|e| e.container_id).collect();
        ids.sort_unstable();
        ensure!(ids == ["a", "c"], "after GC: {ids:?}");
        gc("cni.dev/attachments", valid)?;
        ping(a.space()?, ea.gateways()?[0])?.must_answer()?;
        gc("cni.dev/attachments", Value::Null)?;
        ensure!(node.endpoint(&ea).is_err(), "an older runtime's null list kept an endpoint");
        node.detach(&other_network)
    })
}

#[test]
fn gc_without_the_key_is_gc_with_an_empty_list() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let (_a, ea) = one(node, "a")?;
        let hostile = node.netconf().with("cni.dev/valid-attachments", json!("all"));
        ensure!(node.cni("GC").conf(&hostile).run()?.failure()?.code == 7);
        node.endpoint(&ea)?;
        let c = node.sandbox("c")?;
        let other_network = node.attach_with(&c, "eth0", &node.netconf().with("name", json!("annex")))?;
        node.cni("GC").conf(&node.netconf()).run()?.silent()?;
        let left: Vec<String> = node.endpoints()?.into_iter().map(|e| e.container_id).collect();
        ensure!(left == ["c"], "after GC: {left:?}");
        node.detach(&other_network)
    })
}

#[test]
fn an_ipam_without_a_plugin_is_refused_and_never_in_the_way_of_a_delete() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let (a, ea) = one(node, "a")?;
        let conf = node.netconf().with("ipam", json!({"subnet": "10.1.0.0/16"}));
        for command in ["ADD", "CHECK", "STATUS"] {
            let failure = node.cni(command).of("a", a.path(), "eth1").conf(&conf).run()?.failure()?;
            ensure!(failure.code == 7 && failure.text().contains("pool"), "{command}: {failure:?}");
        }
        ensure!(a.space()?.links()? == ["lo", "eth0"], "{:?}", a.space()?.links()?);
        node.cni("DEL").of("a", a.path(), "eth0").conf(&conf).run()?.silent()?;
        ensure!(node.endpoint(&ea).is_err(), "DEL did not delete");
        Ok(())
    })
}

#[test]
fn status_is_silent_while_the_agent_serves_and_50_without_it() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        node.cni("STATUS").conf(&node.netconf()).run()?.silent()?;
        node.stop_agent()?;
        let down = node.cni("STATUS").conf(&node.netconf()).run()?.failure()?;
        ensure!(down.code == 50 && down.text().contains("wharf-agent"), "{down:?}");
        node.start_agent()?;
        node.cni("STATUS").conf(&node.netconf()).run()?.silent()
    })
}

#[test]
fn an_exhausted_pool_is_told_by_add_and_by_status_and_mends_itself() -> Result<()> {
    // A /30 has two usable addresses; the node's own is one of them.
    let small = NodeConfig::default().flags(&["--ipv4-pool", "10.99.0.0/30", "--ipv6-pool", "fd99::/64"]);
    scenario(small, |node| {
        let (_a, ea) = one(node, "a")?;
        let b = node.sandbox("b")?;
        let full = node.cni("ADD").of("b", b.path(), "eth0").conf(&node.netconf()).run()?.failure()?;
        ensure!(full.code == 11 && full.text().contains("in use"), "{full:?}");
        ensure!(b.space()?.links()? == ["lo"], "{:?}", b.space()?.links()?);
        ensure!(node.endpoints()?.len() == 1);
        let leases = node.ask(async |c| c.ipam().await)?.leases;
        let others: Vec<_> = leases.iter().filter(|l| l.owner != "node").collect();
        ensure!(others.len() == 2, "the failed ADD kept the other family's lease: {others:?}");
        let status = node.cni("STATUS").conf(&node.netconf()).run()?.failure()?;
        ensure!(status.code == 50 && status.text().contains("10.99.0.0/30"), "{status:?}");
        node.detach(&ea)?;
        node.cni("STATUS").conf(&node.netconf()).run()?.silent()
    })
}

#[test]
fn without_agent_add_says_try_again_and_del_succeeds() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let (a, ea) = one(node, "a")?;
        let b = node.sandbox("b")?;
        node.kill_agent()?;
        let add = node.cni("ADD").of("b", b.path(), "eth0").conf(&node.netconf()).run()?.failure()?;
        ensure!(add.code == 11 && add.text().contains("wharf-agent"), "{add:?}");
        node.cni("DEL").of("a", a.path(), "eth0").conf(&node.netconf()).run()?.silent()?;
        node.start_agent()?;
        ensure!(node.endpoints()?.is_empty(), "the delete is done before the agent serves");
        node.detach(&ea)
    })
}

#[test]
fn an_agent_in_another_mount_namespace_is_named_as_the_cause() -> Result<()> {
    use nix::{
        mount::{MsFlags, mount},
        sched::{CloneFlags, unshare},
    };
    scenario(NodeConfig::default(), |node| {
        let shared = node.dirs().root.join("netns-elsewhere");
        let hidden = node.dirs().root.join("hidden");
        std::fs::create_dir(&shared)?;
        std::fs::create_dir(&hidden)?;
        let node: &Node = node;
        // The runtime's mounts, which the agent does not see: of the namespace alone, and of the directory with it.
        let runtime = || -> Result<()> {
            unshare(CloneFlags::CLONE_NEWNS)?;
            mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)?;
            mount(Some("runtime"), &hidden, Some("tmpfs"), MsFlags::empty(), None::<&str>)?;
            for (container, path) in [("a", shared.join("a")), ("b", hidden.join("b"))] {
                wharf_tests::space::Space::create()?.bind(&path)?;
                let failure = node.cni("ADD").of(container, &path, "eth0").conf(&node.netconf()).run()?.failure()?;
                ensure!(failure.code == 4, "{failure:?}");
                ensure!(failure.text().contains("mount namespace of its own"), "{failure:?}");
            }
            // What is no namespace for the plugin either, and the node's own, have other causes.
            std::fs::write(hidden.join("plain"), b"")?;
            node.space().bind(&hidden.join("own"))?;
            for name in ["plain", "own", "missing"] {
                let call = node.cni("ADD").of("c", &hidden.join(name), "eth0").conf(&node.netconf());
                let failure = call.run()?.failure()?;
                ensure!(!failure.text().contains("mount namespace"), "{name}: {failure:?}");
            }
            Ok(())
        };
        std::thread::scope(|s| s.spawn(runtime).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// What a runtime with libcni 1.2 or 1.3 (CRI-O, containerd 2) calls in the life of a node, with the empty lists as Go
/// writes them.
#[test]
fn the_calls_of_a_runtime_with_cni_1_1_in_their_order() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let conf = node.netconf().with("capabilities", json!({"portMappings": true}));
        let conf = conf.with("runtimeConfig", json!({"portMappings": null})).with("args", Value::Null);
        let status = || node.cni("STATUS").conf(&conf).run()?.silent().context("STATUS");
        // libcni 1.2.0 to 1.2.2 sends the older key alone, later ones both.
        let gc = |valid: &Value| {
            for keys in [&["cni.dev/attachments"][..], &["cni.dev/valid-attachments", "cni.dev/attachments"]] {
                let conf = keys.iter().fold(conf.clone(), |conf, key| conf.with(key, valid.clone()));
                node.cni("GC").conf(&conf).run()?.silent().with_context(|| format!("GC {valid} by {keys:?}"))?;
            }
            anyhow::Ok(())
        };
        let attached = |name: &str| json!({"containerID": name, "ifname": "eth0"});
        let check = |who: &Attached| node.check(who)?.silent().context("CHECK");
        let gone = |who: &Attached| {
            ensure!(node.endpoint(who).is_err(), "{:?} is still there", who.container);
            anyhow::Ok(())
        };

        // The runtime starts: it asks whether it may go on, and tells what it has.
        ensure!(node.cni("VERSION").conf(&conf).run()?.result()?["supportedVersions"] == json!(VERSIONS));
        status()?;
        gc(&Value::Null)?;

        let (mut a, b, c) = (node.sandbox("a")?, node.sandbox("b")?, node.sandbox("c")?);
        let (ea, eb) = (node.attach_with(&a, "eth0", &conf)?, node.attach_with(&b, "eth0", &conf)?);
        let ec = node.attach_with(&c, "eth0", &conf)?;
        for who in [&ea, &eb, &ec] {
            check(who)?;
        }
        ping(a.space()?, eb.v4()?.into())?.must_answer()?;

        // It ends and starts again, and has lost one.
        status()?;
        gc(&json!([attached("a"), attached("b"), attached("never-added")]))?;
        gone(&ec)?;
        for who in [&ea, &eb] {
            check(who).context("after GC")?;
        }
        ping(a.space()?, eb.v6()?.into())?.must_answer()?;
        ensure!(node.check(&ec)?.failure()?.code == 3, "CHECK of what GC deleted");

        // DEL, again when the namespace is gone, and of what GC deleted before.
        node.detach(&ea)?;
        a.vanish()?;
        node.cni("DEL").of("a", Path::new(""), "eth0").conf(&conf).run()?.silent().context("DEL again")?;
        node.detach(&ec).context("DEL after GC")?;
        gone(&ea)?;
        check(&eb)?;
        gc(&json!([]))?;
        gone(&eb)?;
        status()
    })
}
