//! What becomes of flows that are there when policy changes.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::json;
use wharf_api::NamespaceLabels;
use wharf_tests::{Node, NodeConfig, echo, scenario, wait};

use crate::pods::{Ask, DENIED, Pod, forget, import, network_policy, patch_config, relabel};

/// Both ends of a connection of TCP and of a flow of UDP.
struct Flows {
    tcp: [TcpStream; 2],
    udp: [UdpSocket; 2],
}

impl Flows {
    fn begin(client: &Pod, server: &Pod, address: IpAddr) -> Result<Self> {
        let any = SocketAddr::new(address, 0);
        let (listener, receiver) =
            server.space()?.run(|| anyhow::Ok((TcpListener::bind(any)?, UdpSocket::bind(any)?)))??;
        let opened = client.connect(listener.local_addr()?)?;
        let sender = echo::udp_client(client.space()?, receiver.local_addr()?)?;
        receiver.connect(sender.local_addr()?)?;
        let flows = Self { tcp: [opened, listener.accept()?.0], udp: [sender, receiver] };
        flows.tcp.iter().try_for_each(|stream| stream.set_nodelay(true))?;
        flows.go_on().context("to begin with")?;
        Ok(flows)
    }

    /// Each end hears the other, the one that began first.
    fn go_on(&self) -> Result<()> {
        for [from, to] in [[0, 1], [1, 0]] {
            let ([mut speaks, mut hears], word) = ([&self.tcp[from], &self.tcp[to]], b"ahoy");
            hears.set_read_timeout(Some(wait::PATIENCE))?;
            speaks.write_all(word).context("write")?;
            hears.read_exact(&mut [0; 4]).context("TCP")?;
            self.udp[to].set_read_timeout(Some(wait::PATIENCE))?;
            self.udp[from].send(word)?;
            self.udp[to].recv(&mut [0; 4]).context("UDP")?;
        }
        Ok(())
    }

    /// Neither end hears the other. What TCP sent stays to be repeated.
    fn are_cut(&self) -> Result<()> {
        for [from, to] in [[0, 1], [1, 0]] {
            let ([mut speaks, mut hears], word) = ([&self.tcp[from], &self.tcp[to]], b"ahoy");
            speaks.write_all(word).context("write")?;
            self.udp[from].send(word)?;
            hears.set_read_timeout(Some(DENIED))?;
            is_silent(hears.read(&mut [0; 4])).context("TCP")?;
            self.udp[to].set_read_timeout(Some(Duration::from_millis(200)))?;
            is_silent(self.udp[to].recv(&mut [0; 4])).context("UDP")?;
        }
        Ok(())
    }

    /// What TCP sent while it was cut arrives.
    fn catch_up(&self) -> Result<()> {
        for mut hears in self.tcp.iter() {
            hears.set_read_timeout(Some(wait::PATIENCE))?;
            hears.read_exact(&mut [0; 4]).context("what was sent while it was cut")?;
        }
        self.go_on()
    }
}

fn is_silent(read: std::io::Result<usize>) -> Result<()> {
    match read {
        Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(()),
        other => bail!("something arrived: {other:?}"),
    }
}

/// Nobody reaches the database.
fn nobody() -> String {
    network_policy("db", "{podSelector: {matchLabels: {app: db}}}")
}

/// The front end reaches the database.
fn front_end() -> String {
    network_policy(
        "db",
        "{podSelector: {matchLabels: {app: db}}, ingress: [{from: [{podSelector: {matchLabels: {app: web}}}]}]}",
    )
}

/// A front end and a database, with flows over both families.
fn scene(node: &Node) -> Result<(Pod, Pod, Vec<Flows>)> {
    let (web, db) = (Pod::container(node, "web", "web")?, Pod::container(node, "db", "db")?);
    let flows = db.end.both()?.into_iter().map(|address| Flows::begin(&web, &db, address)).collect::<Result<_>>()?;
    Ok((web, db, flows))
}

#[test]
fn a_tightened_policy_cuts_flows_at_once_and_a_loosened_one_lets_them_go_on() -> Result<()> {
    cuts_and_lets_go_on("direct")
}

#[test]
fn a_tightened_policy_cuts_flows_that_take_the_stack() -> Result<()> {
    cuts_and_lets_go_on("stack")
}

fn cuts_and_lets_go_on(delivery: &str) -> Result<()> {
    scenario(NodeConfig::default().flags(&[&format!("--local-delivery={delivery}")]), |node| {
        let (web, db, flows) = scene(node)?;
        // The front end may not send: its own rules.
        let mute = network_policy("web", "{podSelector: {matchLabels: {app: web}}, policyTypes: [Egress]}");
        for (text, looser) in [(nobody(), Some(front_end())), (mute, None)] {
            import(node, &text)?;
            wait::all(&flows, Flows::are_cut)?;
            match looser {
                Some(text) => import(node, &text).map(drop)?,
                None => forget(node)?,
            }
            wait::all(&flows, Flows::catch_up)?;
            import(node, &front_end())?;
            wait::all(&flows, Flows::go_on)?;
        }
        // Rules are about the side that begins: what the front end may get does not matter.
        import(node, &network_policy("web", "{podSelector: {matchLabels: {app: web}}}"))?;
        wait::all(&flows, Flows::go_on).context("answers")?;
        ensure!(!db.reaches(web.end.v4()?.into(), Ask::Tcp(80))?, "the database may not begin");
        [web, db].iter().try_for_each(|pod| node.detach(&pod.end))
    })
}

#[test]
fn flows_go_on_after_a_tightened_policy_where_the_operator_wants_that() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--policy-keep-flows=on"]), |node| {
        let (web, db, flows) = scene(node)?;
        import(node, &nobody())?;
        wait::all(&flows, Flows::go_on)?;
        let ways = db.end.both()?.into_iter().flat_map(|to| [Ask::Tcp(80), Ask::Udp(53)].map(|ask| (to, ask)));
        wait::all(ways, |(to, ask)| {
            ensure!(!web.reaches(to, ask)?, "a new flow to {to}, {ask:?}");
            Ok(())
        })?;
        node.kill_agent()?;
        node.start_agent()?;
        wait::all(&flows, Flows::go_on).context("after a restart")?;
        [web, db].iter().try_for_each(|pod| node.detach(&pod.end))
    })
}

#[test]
fn enforcement_that_begins_cuts_flows() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--policy-enforcement=never"]), |node| {
        let mode = |mode: &str| patch_config(node, &json!({"policy_enforcement": mode}));
        let (web, db, flows) = scene(node)?;
        import(node, &nobody())?;
        wait::all(&flows, Flows::go_on)?;
        mode("default")?;
        wait::all(&flows, Flows::are_cut)?;
        mode("never")?;
        wait::all(&flows, Flows::catch_up)?;
        mode("always")?;
        wait::all(&flows, Flows::are_cut)?;
        [web, db].iter().try_for_each(|pod| node.detach(&pod.end))
    })
}

#[test]
fn the_end_of_an_audit_cuts_flows() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--policy-audit=on"]), |node| {
        import(node, &nobody())?;
        let (web, db, flows) = scene(node)?;
        node.stop_agent()?;
        node.set_flag("--policy-audit=on", false);
        wait::all(&flows, Flows::go_on).context("without an agent")?;
        node.start_agent()?;
        wait::all(&flows, Flows::are_cut)?;
        node.stop_agent()?;
        node.set_flag("--policy-audit=on", true);
        node.start_agent()?;
        wait::all(&flows, Flows::catch_up)?;
        [web, db].iter().try_for_each(|pod| node.detach(&pod.end))
    })
}

#[test]
fn other_labels_of_a_namespace_cut_flows_at_once() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let team = |team: &str| {
            let labels = NamespaceLabels { labels: [("team".to_owned(), team.to_owned())].into() };
            node.ask(async |client| client.put_namespace("default", &labels).await).map(drop)
        };
        team("a")?;
        let (web, db, flows) = scene(node)?;
        let spec = "{podSelector: {matchLabels: {app: db}},
            ingress: [{from: [{namespaceSelector: {matchLabels: {team: a}}}]}]}";
        import(node, &network_policy("db", spec))?;
        wait::all(&flows, Flows::go_on)?;
        team("b")?;
        wait::all(&flows, Flows::are_cut)?;
        team("a")?;
        wait::all(&flows, Flows::catch_up)?;
        [web, db].iter().try_for_each(|pod| node.detach(&pod.end))
    })
}

#[test]
fn other_labels_cut_flows_at_once() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let (web, db, flows) = scene(node)?;
        import(node, &front_end())?;
        wait::all(&flows, Flows::go_on)?;
        relabel(node, &web.end, &["cni:app=other"])?;
        wait::all(&flows, Flows::are_cut)?;
        relabel(node, &web.end, &["cni:app=web"])?;
        wait::all(&flows, Flows::catch_up)?;
        [web, db].iter().try_for_each(|pod| node.detach(&pod.end))
    })
}
