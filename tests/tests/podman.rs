//! A real client: podman 4 with its CNI backend runs containers and a pod on a wharf network.

use std::net::{Ipv4Addr, Ipv6Addr};

use anyhow::{Context, Result, ensure};
use wharf_api::{Endpoint, EndpointState};
use wharf_tests::{
    Node, NodeConfig,
    echo::{self, EchoServer},
    icmp::ping,
    podman::{Container, NETWORKS, Podman, SHIPPED},
    scenario,
    stream::{TcpFlow, UdpStream},
    wait,
};

const HARBOUR: &str = NETWORKS[0];
const ANNEX: &str = NETWORKS[1];
const SLEEP: [&str; 2] = ["sleep", "infinity"];
/// Serves its own name on port 80 of both families.
const SERVE: [&str; 3] = ["sh", "-c", "hostname > /www/index.html && exec httpd -f -h /www"];

/// Podman on a fresh node; after the body podman must hold nothing, then the node nothing.
fn with_podman(body: impl FnOnce(&mut Node, &Podman) -> Result<()>) -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let podman = Podman::start(node)?;
        body(node, &podman)?;
        let left = podman.left_behind()?;
        ensure!(left.is_empty(), "podman left behind: {left:?}");
        Ok(())
    })
}

/// What `wharf endpoint list -o json` shows of a container.
fn listed(node: &Node, container: &str) -> Result<Vec<Endpoint>> {
    let text = node.wharf(&["endpoint", "list", "-o", "json"])?.ok()?;
    let all: Vec<Endpoint> = serde_json::from_str(&text).with_context(|| text.clone())?;
    Ok(all.into_iter().filter(|e| e.container_id == container).collect())
}

/// The one endpoint of a container. What podman shows of it must be what wharf lists.
fn endpoint(node: &Node, container: &Container) -> Result<Endpoint> {
    let [endpoint] = <[_; 1]>::try_from(listed(node, &container.id)?)
        .map_err(|found| anyhow::anyhow!("not one endpoint of {}: {found:#?}", container.id))?;
    let place = container.networks.get(&endpoint.network).context("the endpoint's network is unknown to podman")?;
    ensure!(
        (endpoint.ipv4, 32, endpoint.ipv6, 128) == (place.v4, place.v4_prefix, place.v6, place.v6_prefix)
            && (endpoint.gateway4, endpoint.gateway6) == (place.gateway4, place.gateway6)
            && endpoint.container_mac == place.mac
            && endpoint.ifname == "eth0"
            && endpoint.state == EndpointState::Ready,
        "podman shows {place:#?}\nwharf lists {endpoint:#?}"
    );
    Ok(endpoint)
}

/// Waits until a container has no endpoint: podman's clean-up of one that ended runs by itself.
fn await_no_endpoint(node: &Node, container: &str) -> Result<()> {
    wait::until(&format!("the endpoint of {container} to go"), || Ok(listed(node, container)?.is_empty().then_some(())))
}

/// Ping and HTTP over both families, by programs inside the containers. The server must be a `SERVE`.
fn reaches(podman: &Podman, from: &str, (v4, v6): (Ipv4Addr, Ipv6Addr), hostname: &str) -> Result<()> {
    for to in [v4.to_string(), v6.to_string()] {
        podman.exec(from, &["ping", "-c", "2", "-W", "5", &to])?;
    }
    for url in [format!("http://{v4}:80/"), format!("http://[{v6}]:80/")] {
        let answer = fetch(podman, from, &url)?;
        ensure!(answer == hostname, "{url} answered {answer:?} instead of {hostname:?}");
    }
    Ok(())
}

/// The server may have been started a moment ago: refused connections are tried again. (Debian's static busybox crashes
/// when wget has to look up a port's name or to set an alarm of its own; so the port is in the URL, and `timeout` is
/// used.)
fn fetch(podman: &Podman, from: &str, url: &str) -> Result<String> {
    wait::until(&format!("{url} to be served"), || {
        let finished = podman.finish(&["exec", from, "timeout", "5", "wget", "-q", "-O", "-", url])?;
        if finished.stderr.contains("refused") {
            return Ok(None);
        }
        Ok(Some(finished.ok()?.trim_end().to_owned()))
    })
}

/// A port at the gateways of an endpoint, asked for by its container, leads to the server of that name.
fn leads(podman: &Podman, from: &str, (endpoint, port): (&Endpoint, u16), name: &str) -> Result<()> {
    let (v4, v6) = (endpoint.gateway4.context("gateway4")?, endpoint.gateway6.context("gateway6")?);
    for url in [format!("http://{v4}:{port}/"), format!("http://[{v6}]:{port}/")] {
        let answer = fetch(podman, from, &url)?;
        ensure!(answer == name, "{url} answered {answer:?} instead of {name:?}");
    }
    Ok(())
}

/// No container has a port of the node.
fn has_no_port(node: &Node) -> Result<bool> {
    let ports: Vec<serde_json::Value> = serde_json::from_str(&node.wharf(&["port", "list", "-o", "json"])?.ok()?)?;
    Ok(ports.is_empty())
}

fn serve<'a>(podman: &Podman, name: &'a str) -> Result<(Container, &'a str)> {
    Ok((podman.run(name, &["--hostname", name], &SERVE)?, name))
}

#[test]
fn a_port_that_podman_publishes_leads_to_its_container() -> Result<()> {
    with_podman(|node, podman| {
        let a = podman.run("a", &["--hostname", "a", "-p", "8080:80"], &SERVE)?;
        let (b, _) = serve(podman, "b")?;
        let of_b = endpoint(node, &b)?;
        let ports = node.wharf(&["port", "list"])?.ok()?;
        ensure!(ports.contains("8080/tcp") && ports.contains(&a.id[..13]), "{ports}");
        let leads_to_a = |when: &str| leads(podman, "b", (&of_b, 8080), "a").context(when.to_owned());
        leads_to_a("at first")?;
        podman.ok(&["restart", "--time", "0", "a"])?;
        leads_to_a("after a restart")?;
        podman.ok(&["stop", "--time", "0", "a"])?;
        await_no_endpoint(node, &a.id)?;
        ensure!(has_no_port(node)?, "a port of a container that is stopped");
        podman.ok(&["start", "a"])?;
        leads_to_a("after a stop and a start")?;
        podman.ok(&["rm", "--force", "--time", "0", "a", "b"])?;
        await_no_endpoint(node, &a.id)?;
        await_no_endpoint(node, &b.id)?;
        ensure!(has_no_port(node)?, "a port of nobody");
        Ok(())
    })
}

/// Podman's monitor holds the port while the container runs. The agent has the rights of its unit: it looks at
/// processes of root's.
#[test]
fn a_port_of_the_shipped_list_survives_a_reload_and_a_disconnect() -> Result<()> {
    with_podman(|node, podman| {
        node.stop_agent()?;
        node.set_unit(include_str!("../../dist/wharf-agent.service"));
        node.start_agent()?;
        let serve = |name, more: &[&str]| {
            podman.run(name, &[&["--network", SHIPPED, "--hostname", name], more].concat(), &SERVE)
        };
        serve("a", &["-p", "8080:80", "-p", "127.0.0.1:8081:80", "-p", "8082:82/udp", "--ip", "10.87.3.77"])?;
        let of_b = endpoint(node, &serve("b", &[])?)?;
        let is_well = |when: &str| -> Result<()> {
            leads(podman, "b", (&of_b, 8080), "a").context(when.to_owned())?;
            let ports = node.wharf(&["port", "list"])?.ok()?;
            ensure!(["8080/tcp", "8081/tcp", "8082/udp"].iter().all(|port| ports.contains(port)), "{when}: {ports}");
            reaches(podman, "b", podman.inspect("a")?.on(SHIPPED)?, "a").context(when.to_owned())
        };
        is_well("at first")?;
        podman.ok(&["network", "reload", "a"])?;
        is_well("after a reload")?;
        podman.ok(&["network", "disconnect", SHIPPED, "a"])?;
        ensure!(has_no_port(node)?, "a port of no network");
        let (_, said) = podman.refused(
            &podman.run_line(&["--detach", "--name", "thief", "--network", SHIPPED, "-p", "8080:80"], &SLEEP),
        )?;
        ensure!(said.contains("holds this port"), "the port of a container that runs: {said}");
        podman.ok(&["rm", "--force", "--time", "0", "thief"])?;
        podman.ok(&["network", "connect", SHIPPED, "a"])?;
        is_well("after a disconnect and a connect")?;
        podman.ok(&["rm", "--force", "--time", "0", "a", "b"])?;
        ensure!(has_no_port(node)? && node.endpoints()?.is_empty(), "{:#?}", node.endpoints()?);
        Ok(())
    })
}

/// What docs/runtimes.md says of podman: with a list without `ips`, where podman asks for addresses, as it does at each
/// reload, it does not pass the ports.
#[test]
fn a_port_that_podman_does_not_pass_at_a_reload_is_back_after_a_restart() -> Result<()> {
    with_podman(|node, podman| {
        let a = podman.run("a", &["--hostname", "a", "-p", "8080:80"], &SERVE)?;
        let (b, _) = serve(podman, "b")?;
        let of_b = endpoint(node, &b)?;
        podman.ok(&["network", "reload", "a"])?;
        ensure!(has_no_port(node)?, "podman passes them by now: correct docs/runtimes.md");
        reaches(podman, "b", podman.inspect("a")?.on(HARBOUR)?, "a")?;
        podman.ok(&["restart", "--time", "0", "a"])?;
        leads(podman, "b", (&of_b, 8080), "a")?;
        podman.ok(&["rm", "--force", "--time", "0", "a"])?;
        await_no_endpoint(node, &a.id)?;
        let fixed = podman.run("fixed", &["-p", "8080:80", "--ip", "10.87.3.77"], &SERVE)?;
        ensure!(has_no_port(node)?, "podman passes them by now: correct docs/runtimes.md");
        podman.ok(&["rm", "--force", "--time", "0", "fixed"])?;
        await_no_endpoint(node, &fixed.id)?;
        podman.ok(&["rm", "--force", "--time", "0", "b"])?;
        Ok(())
    })
}

#[test]
fn a_port_of_a_pod_leads_to_whichever_of_its_containers_serves_it() -> Result<()> {
    with_podman(|node, podman| {
        let infra = podman.create_pod("crew", &["--publish", "8080:80", "--publish", "8081:81"])?;
        podman.run("cook", &["--pod", "crew"], &SERVE)?;
        podman.run(
            "mate",
            &["--pod", "crew"],
            &["sh", "-c", "echo mate > /www/index.html && httpd -f -p 81 -h /www"],
        )?;
        let (outsider, _) = serve(podman, "outsider")?;
        let of_outsider = endpoint(node, &outsider)?;
        let both_lead = |when: &str| -> Result<()> {
            leads(podman, "outsider", (&of_outsider, 8080), "crew").context(when.to_owned())?;
            leads(podman, "outsider", (&of_outsider, 8081), "mate").context(when.to_owned())
        };
        both_lead("at first")?;
        let of_pod = endpoint(node, &infra)?;
        podman.ok(&["restart", "--time", "0", "mate"])?;
        ensure!(endpoint(node, &infra)? == of_pod, "the restart of one container changed the pod's endpoint");
        both_lead("after the restart of one container")?;
        podman.ok(&["pod", "stop", "--time", "0", "crew"])?;
        await_no_endpoint(node, &infra.id)?;
        podman.ok(&["pod", "start", "crew"])?;
        ensure!(endpoint(node, &podman.inspect(&infra.id)?)?.epoch > of_pod.epoch, "the pod's endpoint is not renewed");
        both_lead("after the restart of the pod")?;
        podman.ok(&["pod", "rm", "--force", "--time", "0", "crew"])?;
        ensure!(listed(node, &infra.id)?.is_empty() && has_no_port(node)?, "{:#?}", node.endpoints()?);
        podman.ok(&["rm", "--force", "--time", "0", "outsider"])?;
        Ok(())
    })
}

#[test]
fn containers_of_podman_talk_to_each_other_and_to_the_node() -> Result<()> {
    with_podman(|node, podman| {
        let (a, _) = serve(podman, "a")?;
        let (b, _) = serve(podman, "b")?;
        let (of_a, of_b) = (endpoint(node, &a)?, endpoint(node, &b)?);
        ensure!(of_a.pod_name.as_deref() == Some("a") && of_a.network == HARBOUR, "{of_a:#?}");
        ensure!(of_a.labels.iter().any(|l| l.ends_with(".pod.name=a")), "{:?}", of_a.labels);
        ensure!(of_a.netns == a.netns.display().to_string(), "{of_a:#?} against {a:#?}");
        ensure!((of_a.ipv4, of_a.ipv6) != (of_b.ipv4, of_b.ipv6), "{of_a:#?} and {of_b:#?}");

        reaches(podman, "a", b.on(HARBOUR)?, "b")?;
        reaches(podman, "b", a.on(HARBOUR)?, "a")?;
        let hosts = podman.exec("a", &["cat", "/etc/hosts"])?;
        ensure!(hosts.contains(&a.on(HARBOUR)?.0.to_string()), "podman did not take the address over:\n{hosts}");

        let (v4, v6) = a.on(HARBOUR)?;
        ping(node.space(), v4.into())?.must_answer()?;
        ping(node.space(), v6.into())?.must_answer()?;
        let (inside, outside) = (EchoServer::start(&a.space()?)?, EchoServer::start(node.space())?);
        let gateways = [of_a.gateway4.context("gateway4")?.into(), of_a.gateway6.context("gateway6")?.into()];
        for (from, server, to) in [
            (node.space(), &inside, [v4.into(), v6.into()]),
            (&b.space()?, &inside, [v4.into(), v6.into()]),
            (&a.space()?, &outside, gateways),
        ] {
            for address in to {
                echo::tcp(from, server.tcp_at(address), 1 << 20)?;
                echo::udp(from, server.udp_at(address), 8000)?;
            }
        }
        podman.ok(&["rm", "--force", "--time", "0", "a", "b"])?;
        ensure!(node.endpoints()?.is_empty(), "{:#?}", node.endpoints()?);
        Ok(())
    })
}

#[test]
fn a_pod_is_one_endpoint_shared_by_its_containers() -> Result<()> {
    with_podman(|node, podman| {
        let infra = podman.create_pod("crew", &[])?;
        podman.run("cook", &["--pod", "crew"], &SERVE)?;
        podman.run("mate", &["--pod", "crew"], &SLEEP)?;
        let (outsider, _) = serve(podman, "outsider")?;

        let of_pod = endpoint(node, &infra)?;
        ensure!(of_pod.pod_name.as_deref() == Some("crew"), "{of_pod:#?}");
        ensure!(
            node.endpoints()?.len() == 2,
            "the pod's containers have endpoints of their own: {:#?}",
            node.endpoints()?
        );

        ensure!(fetch(podman, "mate", "http://127.0.0.1:80/")? == "crew");
        reaches(podman, "mate", infra.on(HARBOUR)?, "crew")?;
        reaches(podman, "outsider", infra.on(HARBOUR)?, "crew")?;
        reaches(podman, "mate", outsider.on(HARBOUR)?, "outsider")?;

        podman.ok(&["rm", "--force", "--time", "0", "cook"])?;
        ensure!(endpoint(node, &infra)? == of_pod, "the end of one container of the pod changed the pod's endpoint");
        podman.ok(&["pod", "rm", "--force", "--time", "0", "crew"])?;
        ensure!(listed(node, &infra.id)?.is_empty(), "{:#?}", node.endpoints()?);
        podman.ok(&["rm", "--force", "--time", "0", "outsider"])?;
        Ok(())
    })
}

#[test]
fn a_reload_of_the_network_keeps_addresses_and_leaves_others_alone() -> Result<()> {
    with_podman(|node, podman| {
        let ((a, _), (b, _), (c, _)) = (serve(podman, "a")?, serve(podman, "b")?, serve(podman, "c")?);
        let (before, (sb, sc)) = (endpoint(node, &a)?, (b.space()?, c.space()?));
        let udp = UdpStream::start(&sb, &sc, c.on(HARBOUR)?.0.into(), 1000)?;
        let tcp = TcpFlow::start(&sc, &sb, b.on(HARBOUR)?.1.into())?;
        udp.await_more(100)?;
        podman.ok(&["network", "reload", "a"])?;
        udp.await_more(100)?;
        udp.stop()?.must_be_perfect()?;
        tcp.stop()?.must_be_whole()?;

        let after = endpoint(node, &podman.inspect("a")?)?;
        let kept = |e: &Endpoint| (e.container_id.clone(), e.ipv4, e.ipv6, e.container_mac.clone(), e.netns.clone());
        ensure!(kept(&before) == kept(&after), "{before:#?}\nbecame\n{after:#?}");
        ensure!(after.epoch > before.epoch, "epoch {} after {}", after.epoch, before.epoch);
        reaches(podman, "a", b.on(HARBOUR)?, "b")?;
        reaches(podman, "b", a.on(HARBOUR)?, "a")?;
        podman.ok(&["rm", "--force", "--time", "0", "--all"])?;
        Ok(())
    })
}

#[test]
fn a_container_restarted_stopped_and_started_is_each_time_a_new_endpoint() -> Result<()> {
    with_podman(|node, podman| {
        let ((a, _), (b, _)) = (serve(podman, "a")?, serve(podman, "b")?);
        let mut epoch = endpoint(node, &a)?.epoch;
        for commands in [
            &[&["restart", "--time", "0", "a"][..]][..],
            &[&["stop", "--time", "0", "a"], &["start", "a"]],
            &[&["kill", "a"], &["wait", "a"], &["start", "a"]],
        ] {
            for command in commands {
                podman.ok(command)?;
                // What ended without a start has no endpoint any more, and podman says so.
                if command.contains(&"stop") || command.contains(&"wait") {
                    await_no_endpoint(node, &a.id)?;
                    ensure!(podman.inspect("a")?.on(HARBOUR).is_err(), "{:#?}", podman.inspect("a")?);
                }
            }
            let now = podman.inspect("a")?;
            let of_now = endpoint(node, &now)?;
            ensure!(of_now.epoch > epoch, "epoch {} after {epoch}", of_now.epoch);
            epoch = of_now.epoch;
            reaches(podman, "b", now.on(HARBOUR)?, "a")?;
            reaches(podman, "a", b.on(HARBOUR)?, "b")?;
        }
        podman.ok(&["kill", "a"])?;
        podman.ok(&["wait", "a"])?;
        podman.ok(&["rm", "a"])?;
        await_no_endpoint(node, &a.id)?;
        podman.ok(&["rm", "--force", "--time", "0", "b"])?;
        Ok(())
    })
}

#[test]
fn a_container_that_ends_by_itself_leaves_no_endpoint() -> Result<()> {
    with_podman(|node, podman| {
        for _ in 0..3 {
            let shown = podman.ok(&podman.run_line(&["--rm"], &["ip", "-o", "address", "show", "eth0"]))?;
            ensure!(shown.contains("inet ") && shown.contains("inet6 "), "{shown}");
        }
        let (code, said) = podman.refused(&podman.run_line(&["--rm"], &["false"]))?;
        ensure!(code == 1, "podman gave {code} instead of the container's exit code: {said}");
        ensure!(node.endpoints()?.is_empty(), "{:#?}", node.endpoints()?);
        // In the background nobody but podman's monitor sees the end.
        let brief = podman.ok(&podman.run_line(&["--rm", "--detach"], &["true"]))?;
        await_no_endpoint(node, &brief)?;
        let gone = || Ok(podman.ok(&["ps", "--all", "--quiet"])?.is_empty().then_some(()));
        wait::until("podman to remove the container", gone)
    })
}

#[test]
fn two_networks_are_two_interfaces_that_come_and_go_while_the_container_runs() -> Result<()> {
    with_podman(|node, podman| {
        let a = podman.run("a", &["--network", HARBOUR, "--network", ANNEX, "--hostname", "a"], &SERVE)?;
        let (b, _) = serve(podman, "b")?;
        let names = |id: &str| -> Result<Vec<(String, String)>> {
            let mut names: Vec<_> = listed(node, id)?.into_iter().map(|e| (e.ifname, e.network)).collect();
            names.sort_unstable();
            Ok(names)
        };
        let (_, networks): (Vec<_>, Vec<_>) = names(&a.id)?.into_iter().unzip();
        ensure!(networks.len() == 2 && networks.iter().all(|n| [HARBOUR, ANNEX].contains(&n.as_str())), "{networks:?}");
        for network in [HARBOUR, ANNEX] {
            reaches(podman, "b", a.on(network)?, "a").context(network)?;
        }
        podman.ok(&["network", "disconnect", ANNEX, "a"])?;
        ensure!(listed(node, &a.id)?.len() == 1, "{:?}", names(&a.id)?);
        reaches(podman, "b", a.on(HARBOUR)?, "a")?;
        podman.ok(&["network", "connect", ANNEX, "b"])?;
        ensure!(
            names(&b.id)? == [("eth0".into(), HARBOUR.into()), ("eth1".into(), ANNEX.into())],
            "{:?}",
            names(&b.id)?
        );
        reaches(podman, "a", podman.inspect("b")?.on(ANNEX)?, "b")?;
        podman.ok(&["rm", "--force", "--time", "0", "a", "b"])?;
        ensure!(node.endpoints()?.is_empty(), "{:#?}", node.endpoints()?);
        Ok(())
    })
}

#[test]
fn addresses_asked_for_are_given_and_a_taken_or_foreign_one_is_refused_without_a_trace() -> Result<()> {
    with_podman(|node, podman| {
        let (v4, v6, mac) = ("10.87.3.77", "fd57:4a7f:e8f::3:78", "02:57:00:00:00:77");
        let a = podman.run("a", &["--hostname", "a", "--ip", v4, "--ip6", v6, "--mac-address", mac], &SERVE)?;
        let (b, _) = serve(podman, "b")?;
        let of_a = endpoint(node, &a)?;
        ensure!(a.on(HARBOUR)? == (v4.parse()?, v6.parse()?) && of_a.container_mac == mac, "{of_a:#?}");
        reaches(podman, "b", a.on(HARBOUR)?, "a")?;
        reaches(podman, "a", b.on(HARBOUR)?, "b")?;

        for (options, reason) in [
            (["--ip", v4], format!("{v4} is held by")),
            (["--ip6", v6], format!("{v6} is held by")),
            (["--ip", "192.0.2.1"], "no pool has it".to_owned()),
        ] {
            let late = [&["--detach", "--name", "late"][..], &options].concat();
            let (_, said) = podman.refused(&podman.run_line(&late, &SLEEP))?;
            ensure!(said.contains(&reason), "{options:?}: {said}");
            podman.ok(&["rm", "--force", "--time", "0", "late"])?;
        }
        ensure!(node.endpoints()?.len() == 2 && endpoint(node, &a)? == of_a, "{:#?}", node.endpoints()?);
        ensure!(node.audit()?.findings.is_empty(), "{:#?}", node.audit()?.findings);
        podman.ok(&["rm", "--force", "--time", "0", "--all"])?;
        Ok(())
    })
}

#[test]
fn while_the_agent_is_away_containers_talk_and_none_can_be_started() -> Result<()> {
    with_podman(|node, podman| {
        let ((a, _), (b, _)) = (serve(podman, "a")?, serve(podman, "b")?);
        let before = endpoint(node, &a)?;
        node.kill_agent()?;
        reaches(podman, "a", b.on(HARBOUR)?, "b")?;
        reaches(podman, "b", a.on(HARBOUR)?, "a")?;
        let (_, said) = podman.refused(&podman.run_line(&["--detach", "--name", "late"], &["true"]))?;
        let socket = node.dirs().socket().display().to_string();
        ensure!(said.contains("(add)") && said.contains(&socket), "the agent's socket is not named: {said}");
        node.start_agent()?;
        wait::until("the endpoint to be ready again", || {
            Ok(listed(node, &a.id)?.iter().all(|e| e.state == EndpointState::Ready).then_some(()))
        })?;
        let after = endpoint(node, &a)?;
        ensure!((after.id, after.epoch) == (before.id, before.epoch), "{before:#?}\nbecame\n{after:#?}");
        podman.ok(&["start", "late"])?;
        podman.ok(&["rm", "--force", "--time", "0", "--all"])?;
        Ok(())
    })
}
