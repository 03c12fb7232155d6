//! Delete: whole, repeatable, side by side, and without the address when told so.

use std::{net::IpAddr, thread};

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use wharf_api::{DeleteQuery, DeleteResult, EndpointState};
use wharf_tests::{Attached, Node, NodeConfig, Sandbox, crash, icmp::ping, process::ip, scenario};

fn keep_ip() -> DeleteQuery {
    DeleteQuery { no_ip_release: Some(true), ..DeleteQuery::default() }
}

fn leased(node: &Node) -> Result<Vec<IpAddr>> {
    let leases = node.ask(async |c| c.ipam().await)?.leases;
    Ok(leases.into_iter().filter(|l| l.owner != "node").map(|l| l.ip).collect())
}

#[test]
fn a_link_that_somebody_renamed_goes_with_its_endpoint() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        let ea = node.attach(&a)?;
        let link = node.endpoint(&ea)?.host_ifname;
        ip(node.space(), &format!("link set {link} down"))?;
        ip(node.space(), &format!("link set {link} name elsewhere"))?;
        node.detach(&ea)?;
        ensure!(a.space()?.links()? == ["lo"], "{:?}", a.space()?.links()?);
        Ok(())
    })
}

#[test]
fn no_ip_release_deletes_the_endpoint_and_keeps_its_addresses() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        let ea = node.attach(&a)?;
        let addresses = ea.both()?;
        let done = node.ask(async |c| c.delete_endpoint(&ea.id(), &keep_ip()).await)?;
        ensure!(done.deleted.len() == 1 && done.errors.is_empty(), "{done:?}");
        ensure!(a.space()?.links()? == ["lo"] && node.endpoints()?.is_empty());
        ensure!(leased(node)? == addresses, "leased are {:?}", leased(node)?);

        let b = node.sandbox("b")?;
        let eb = node.attach(&b)?;
        ensure!(eb.both()?.iter().all(|ip| !addresses.contains(ip)), "a kept address went to who asked for any");
        node.detach(&eb)?;

        // They are the attachment's, if it comes again, and nobody else's.
        let wish = node.netconf().with("runtimeConfig", json!({"ips": [addresses[0]]}));
        let taken = node.cni("ADD").of("b", b.path(), "eth0").conf(&wish).run()?.failure()?;
        ensure!(taken.text().contains("wharf ipam release"), "{taken:?}");
        let again = node.attach_with(&a, "eth0", &wish)?;
        ensure!(again.both()?[0] == addresses[0], "{}", again.result);
        ping(node.space(), again.v4()?.into())?.must_answer()?;
        let refused = node.ask(async |c| c.release_ip(addresses[0]).await);
        ensure!(refused.is_err(), "an address was released under an endpoint that speaks with it");
        node.detach(&again)?;
        ensure!(leased(node)? == [addresses[1]], "leased are {:?}", leased(node)?);

        node.ask(async |c| c.release_ip(addresses[1]).await)?;
        ensure!(leased(node)?.is_empty(), "{:?}", leased(node)?);
        Ok(())
    })
}

#[test]
fn kept_addresses_outlive_the_agent() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        let ea = node.attach(&a)?;
        node.ask(async |c| c.delete_endpoint(&ea.id(), &keep_ip()).await)?;
        node.kill_agent()?;
        node.start_agent()?;
        ensure!(leased(node)? == ea.both()?, "leased are {:?}", leased(node)?);
        for address in ea.both()? {
            node.ask(async |c| c.release_ip(address).await)?;
        }
        Ok(())
    })
}

#[test]
fn a_containers_endpoints_go_all_at_once() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let (a, b) = (node.sandbox("a")?, node.sandbox("b")?);
        let other = node.attach(&b)?;
        for n in 0..3 {
            node.attach_with(&a, &format!("eth{n}"), &node.netconf().with("name", json!(format!("net{n}"))))?;
        }
        let done = node.ask(async |c| c.delete_container("a", &DeleteQuery::default()).await)?;
        ensure!(done.deleted.len() == 3 && done.errors.is_empty(), "{done:?}");
        ensure!(a.space()?.links()? == ["lo"], "{:?}", a.space()?.links()?);
        ensure!(leased(node)? == other.both()?, "leased are {:?}", leased(node)?);
        ping(b.space()?, other.gateways()?[0])?.must_answer()?;
        node.detach(&other)
    })
}

#[test]
fn a_delete_for_another_epoch_touches_nothing() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        let ea = node.attach(&a)?;
        let now = node.endpoint(&ea)?;
        for epoch in [now.epoch + 1, now.epoch.saturating_sub(1), u64::MAX] {
            let query = DeleteQuery { epoch: Some(epoch), ..DeleteQuery::default() };
            let refused = node.ask(async |c| c.delete_endpoint(&now.id.to_string(), &query).await);
            ensure!(refused.is_err(), "epoch {epoch} deleted epoch {}", now.epoch);
        }
        ensure!(node.endpoint(&ea)? == now);
        ping(a.space()?, ea.gateways()?[0])?.must_answer()?;
        let query = DeleteQuery { epoch: Some(now.epoch), ..DeleteQuery::default() };
        node.ask(async |c| c.delete_endpoint(&now.id.to_string(), &query).await)?;
        Ok(())
    })
}

/// Runs the same thing on several threads at once and collects the answers.
fn at_once<T: Send, I: Send>(items: Vec<I>, f: impl Fn(I) -> Result<T> + Sync) -> Result<Vec<T>> {
    let f = &f;
    thread::scope(|scope| {
        let threads: Vec<_> = items.into_iter().map(|item| scope.spawn(move || f(item))).collect();
        let joined = threads.into_iter().map(|t| match t.join() {
            Ok(result) => result,
            Err(_) => bail!("a thread panicked"),
        });
        joined.collect()
    })
}

#[test]
fn deletes_of_one_endpoint_at_once_all_end_well() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let (a, b) = (node.sandbox("a")?, node.sandbox("b")?);
        for _ in 0..5 {
            let ea = node.attach(&a)?;
            let id = node.endpoint(&ea)?.id.to_string();
            let shared = &*node;
            let outcomes: Vec<Option<DeleteResult>> = at_once((0..8).collect(), |_| {
                match shared.ask(async |c| c.delete_endpoint(&id, &DeleteQuery::default()).await) {
                    Ok(done) => Ok(Some(done)),
                    Err(e) => match e.downcast_ref::<wharf_api::client::ClientError>() {
                        Some(e) if e.is_not_found() => Ok(None),
                        _ => Err(e),
                    },
                }
            })?;
            let done: Vec<_> = outcomes.into_iter().flatten().collect();
            ensure!(!done.is_empty() && done.iter().all(|d| d.errors.is_empty()), "{done:?}");
            ensure!(node.left_behind()?.is_empty(), "{:?}", node.left_behind()?);
        }
        let eb = node.attach(&b)?;
        node.detach(&eb)
    })
}

#[test]
fn many_deletes_at_once_share_the_kernels_wait() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let sandboxes: Vec<Sandbox> = (0..24).map(|n| node.sandbox(&format!("c{n}"))).collect::<Result<_>>()?;
        let attached: Vec<Attached> = sandboxes.iter().map(|s| node.attach(s)).collect::<Result<_>>()?;
        let (last, going) = attached.split_last().context("an endpoint")?;
        let shared = &*node;
        at_once(going.iter().collect(), |e: &Attached| shared.detach(e))?;
        let left = node.endpoint_links()?;
        ensure!(left == [node.endpoint(last)?.host_ifname], "left are {left:?}");
        let survivor = sandboxes.last().context("a sandbox")?;
        ping(survivor.space()?, last.gateways()?[1])?.must_answer()?;
        node.detach(last)
    })
}

#[test]
fn a_container_whose_namespace_path_leads_elsewhere_now_is_deleted_without_touching_the_new_one() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let mut old = node.sandbox("pod")?;
        let first = node.attach(&old)?;
        old.vanish()?;
        // The same path, another namespace, with an interface of the same name that is not ours.
        let new = node.sandbox("pod")?;
        wharf_tests::process::ip(new.space()?, "link add eth0 type veth peer name theirs")?;
        node.detach(&first)?;
        let links = new.space()?.links()?;
        ensure!(links.contains(&"eth0".to_owned()), "DEL took another container's interface: {links:?}");
        Ok(())
    })
}

/// The kernel does not answer; the link is out of sight all the same, and so DEL is answered.
#[test]
fn a_del_is_answered_before_the_kernels_answer_and_a_kill_in_between_loses_nothing() -> Result<()> {
    let mut node = Node::without_agent(NodeConfig::default())?;
    let outcome: Result<()> = (|| {
        ensure!(node.start_armed_agent()?, "the agent was killed at a crash point");
        let a = node.sandbox("a")?;
        let ea = node.attach(&a)?;
        let v4 = ea.v4()?;
        crash::hold(node.dirs(), &["datapath/reaper/before-release"])?;
        node.detach(&ea)?;
        ensure!(a.space()?.links()? == ["lo"], "{:?}", a.space()?.links()?);
        let routes = ip(node.space(), &format!("route show {v4}"))?;
        ensure!(routes.is_empty(), "{routes}");
        // The runtime's second DEL.
        node.detach(&ea)?;
        let there = node.endpoints()?;
        ensure!(there.len() == 1 && there[0].state == EndpointState::Disconnecting, "{there:?}");
        ensure!(there[0].status.phase == "await-kernel", "{:?}", there[0].status);
        ensure!(leased(&node)? == ea.both()?, "its addresses are held until the kernel answers: {:?}", leased(&node)?);

        // An ADD of the same attachment and one of another: the other is not held up.
        let b = node.sandbox("b")?;
        let eb = node.attach(&b)?;
        let again = thread::scope(|s| -> Result<Attached> {
            let again = s.spawn(|| node.attach(&a));
            crash::release(node.dirs())?;
            again.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?
        })?;
        node.detach(&again)?;

        crash::hold(node.dirs(), &["datapath/reaper/before-release"])?;
        node.detach(&eb)?;
        node.kill_agent()?;
        crash::release(node.dirs())?;
        node.start_agent()?;
        ensure!(node.endpoints()?.is_empty() && leased(&node)?.is_empty(), "{:?}", node.endpoints()?);
        node.finish()
    })();
    outcome.with_context(|| format!("the agent's log:\n{}", node.log()))
}
