//! The agent's settings of policy: the directory, the mode of enforcement, audit.

use std::{
    fs,
    net::IpAddr,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use wharf_tests::{Node, NodeConfig, process::ip, scenario, scratch, wait};

use crate::pods::{Ask, Pod, document, forget, import, judged, network_policy, patch_config};

/// A pod that a policy selects, and one that none does.
fn pair(node: &Node) -> Result<[Pod; 2]> {
    Ok([Pod::container(node, "web", "web")?, Pod::container(node, "db", "db")?])
}

fn database(rules: &str) -> String {
    network_policy("db", &format!("{{podSelector: {{matchLabels: {{app: db}}}}, ingress: [{rules}]}}"))
}

/// Whether both ports, over both families, are as they should.
fn reached(web: &Pod, db: &Pod, ports: [(u16, bool); 2]) -> Result<()> {
    let ways = db.end.both()?.into_iter().flat_map(|address| ports.map(|(port, passes)| (address, port, passes)));
    wait::all(ways, |(address, port, passes)| {
        let reached = web.reaches(address, Ask::Tcp(port))?;
        ensure!(reached == passes, "{address}, port {port}: {reached}");
        Ok(())
    })
}

fn await_revision(node: &Node, revision: u64) -> Result<()> {
    wait::until_equal("the revision in force", &revision, || {
        Ok(node.ask(async |client| client.policies().await)?.realized)
    })
}

fn problem(node: &Node) -> Result<Option<String>> {
    Ok(node.ask(async |client| client.policies().await)?.problem)
}

/// Writes a file that the agent takes.
fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("write {}", path.display()))
}

#[test]
fn the_agent_follows_the_policy_directory() -> Result<()> {
    let directory = scratch::fresh_dir("policies")?;
    let (file, flag) = (directory.join("db.yaml"), format!("--policy-dir={}", directory.display()));
    scenario(NodeConfig::default().flags(&[&flag]), |node| {
        let [web, db] = pair(node)?;
        reached(&web, &db, [(80, true), (81, true)])?;
        write(&file, &database("{ports: [{port: 80}]}"))?;
        await_revision(node, 1)?;
        reached(&web, &db, [(80, true), (81, false)])?;
        write(&file, &database("{ports: [{port: 81}]}"))?;
        await_revision(node, 2)?;
        reached(&web, &db, [(80, false), (81, true)])?;
        write(&file, &database("{port: 80}"))?;
        wait::until("the refusal", || Ok(problem(node)?.filter(|why| why.contains("db.yaml"))))?;
        reached(&web, &db, [(80, false), (81, true)]).context("what it said before stays in force")?;
        let refused = node.http("DELETE", "/v1/policy?kind=NetworkPolicy&namespace=default&name=db", None)?;
        ensure!(refused.status == 409, "{}", refused.text());
        // What an import says of another name adds up.
        import(
            node,
            &network_policy("more", "{podSelector: {matchLabels: {app: db}}, ingress: [{ports: [{port: 80}]}]}"),
        )?;
        reached(&web, &db, [(80, true), (81, true)])?;
        forget(node)?;
        write(&file, &database(""))?;
        wait::until("the file to be good again", || Ok(problem(node)?.is_none().then_some(())))?;
        reached(&web, &db, [(80, false), (81, false)])?;
        node.kill_agent()?;
        write(&file, &database("{ports: [{port: 80}]}"))?;
        reached(&web, &db, [(80, false), (81, false)]).context("without an agent")?;
        node.start_agent()?;
        reached(&web, &db, [(80, true), (81, false)]).context("a start reads at once")?;
        fs::remove_file(&file).context("remove the file")?;
        wait::until("the policy to go with its file", || {
            let list = node.ask(async |client| client.policies().await)?;
            Ok((list.policies.is_empty() && list.realized == list.revision).then_some(()))
        })?;
        reached(&web, &db, [(80, true), (81, true)])?;
        [web, db].iter().try_for_each(|pod| node.detach(&pod.end))
    })
}

#[test]
fn a_change_of_the_directory_that_cannot_be_kept_is_a_problem() -> Result<()> {
    let directory = scratch::fresh_dir("policies")?;
    let (file, flag) = (directory.join("db.yaml"), format!("--policy-dir={}", directory.display()));
    scenario(NodeConfig::default().flags(&[&flag]), |node| {
        // policy.json.new cannot be made while a directory has its name.
        let block = node.dirs().state.join("policy.json.new");
        fs::create_dir(&block)?;
        write(&file, &database("{ports: [{port: 80}]}"))?;
        wait::until("the problem to be told", || Ok(problem(node)?.filter(|why| why.contains("policy.json"))))?;
        fs::remove_dir(&block)?;
        await_revision(node, 1)?;
        ensure!(problem(node)?.is_none(), "{:?}", problem(node)?);
        Ok(())
    })
}

#[test]
fn a_start_with_a_refused_policy_file_opens_nothing() -> Result<()> {
    let directory = scratch::fresh_dir("policies")?;
    let (file, flag) = (directory.join("db.yaml"), format!("--policy-dir={}", directory.display()));
    scenario(NodeConfig::default().flags(&[&flag]), |node| {
        let [web, db] = pair(node)?;
        let (good, ports) = (database("{ports: [{port: 80}]}"), [(80, true), (81, false)]);
        write(&file, &good)?;
        await_revision(node, 1)?;
        reached(&web, &db, ports)?;
        node.stop_agent()?;
        write(&file, &database("{port: 80}"))?;
        node.start_agent()?;
        reached(&web, &db, ports).context("what the file said before is kept")?;
        ensure!(problem(node)?.is_some_and(|why| why.contains("db.yaml")), "{:?}", problem(node)?);
        node.stop_agent()?;
        let away = directory.with_extension("away");
        fs::rename(&directory, &away)?;
        node.start_agent()?;
        reached(&web, &db, ports).context("without the directory")?;
        ensure!(problem(node)?.is_some_and(|why| why.contains("No such file")), "{:?}", problem(node)?);
        fs::rename(&away, &directory)?;
        node.stop_agent()?;
        fs::remove_file(node.dirs().state.join("policy.json"))?;
        let why = node.start_agent().err().context("the agent started without the policy")?;
        ensure!(format!("{why:#}").contains("db.yaml"), "{why:#}");
        reached(&web, &db, ports).context("after the start that failed")?;
        write(&file, &good)?;
        node.start_agent()?;
        reached(&web, &db, ports).context("with the good file")?;
        [web, db].iter().try_for_each(|pod| node.detach(&pod.end))
    })
}

#[test]
fn enforcement_changes_while_the_agent_runs() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--policy-enforcement=always"]), |node| {
        let [web, db] = pair(node)?;
        let mode = |mode: &str| patch_config(node, &json!({"policy_enforcement": mode}));
        let open = [(80, true), (81, true)];
        let closed = [(80, false), (81, false)];
        reached(&web, &db, closed).context("always, without a policy")?;
        for address in db.end.both()? {
            ensure!(Ask::Tcp(80).is_answered(node.space(), address, wait::PATIENCE)?, "the node's own packets");
        }
        import(node, &database("{ports: [{port: 80}]}"))?;
        reached(&web, &db, closed).context("always: the sender may not")?;
        mode("default")?;
        reached(&web, &db, [(80, true), (81, false)]).context("default")?;
        mode("never")?;
        reached(&web, &db, open).context("never")?;
        import(node, &database(""))?;
        reached(&web, &db, open).context("never, with another policy")?;
        mode("always")?;
        reached(&web, &db, closed).context("always again")?;
        import(
            node,
            &network_policy("web", "{podSelector: {matchLabels: {app: web}}, policyTypes: [Egress], egress: [{}]}"),
        )?;
        import(node, &database("{ports: [{port: 81}]}"))?;
        reached(&web, &db, [(80, false), (81, true)]).context("always, both are selected")?;
        ensure!(!db.reaches(web.end.v4()?.into(), Ask::Tcp(80))?, "always: no policy is about its other direction");
        [web, db].iter().try_for_each(|pod| node.detach(&pod.end))
    })
}

#[test]
fn audit_drops_nothing_and_counts() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--policy-audit=on"]), |node| {
        let [web, db] = pair(node)?;
        import(node, &database("{ports: [{port: 80}]}"))?;
        ensure!(judged(node, &db.end, "deny")? == 0, "before a packet");
        reached(&web, &db, [(80, true), (81, true)])?;
        let (accepted, denied) = (judged(node, &db.end, "accept")?, judged(node, &db.end, "deny")?);
        ensure!(accepted == 2 && denied >= 2, "{accepted} accepted, {denied} would be dropped");
        let id = node.endpoint(&web.end)?.id;
        ensure!(node.packets(id, "egress", "peer-policy-denied")? == 0, "none was dropped");
        node.stop_agent()?;
        node.set_flag("--policy-audit=on", false);
        node.start_agent()?;
        node.await_rebuilt()?;
        reached(&web, &db, [(80, true), (81, false)]).context("without audit")?;
        [web, db].iter().try_for_each(|pod| node.detach(&pod.end))
    })
}

#[test]
fn a_new_address_of_the_node_is_the_nodes_without_delay() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let pod = Pod::container(node, "web", "web")?;
        let add = |address: IpAddr| ip(node.space(), &format!("addr add {address}/32 dev lo")).map(drop);
        let addresses: Vec<IpAddr> = (1..=4).map(|last| IpAddr::from([192, 0, 2, last])).collect();
        // The node refuses at once what reaches it.
        let is_answered = |to| Ask::Tcp(9).is_answered(pod.space()?, to, Duration::from_millis(200));
        ip(node.space(), "link set lo up")?;
        addresses.first().map_or(Ok(()), |first| add(*first))?;
        let denies_host = "{endpointSelector: {}, enableDefaultDeny: {egress: false},
                            egressDeny: [{toEntities: [host]}]}";
        import(
            node,
            &document("cilium.io/v2", "CiliumNetworkPolicy", "{name: no-host, namespace: default}", denies_host),
        )?;
        // No wait: the revision is in force.
        for address in addresses.iter().take(1) {
            ensure!(!is_answered(*address)?, "{address} was there before the first policy");
        }
        // The agent's regular look every 2 s would take at least 4 s.
        let began = Instant::now();
        for address in addresses.iter().skip(1) {
            add(*address)?;
            wait::until(
                &format!("packets to {address} to be dropped"),
                || Ok((!is_answered(*address)?).then_some(())),
            )?;
        }
        let took = began.elapsed();
        ensure!(took < Duration::from_secs(3), "{took:?} for three addresses");
        node.detach(&pod.end)
    })
}
