//! No packet passes unpoliced, whatever becomes of the agent and of endpoints meanwhile.

use std::{
    net::{IpAddr, UdpSocket},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use wharf_api::{EndpointPatch, NamespaceLabels, RegenerateLevel};
use wharf_tests::{
    Node, NodeConfig,
    echo::{self, EchoServer},
    process::ip,
    scenario,
    stream::{TcpFlow, UdpStream},
    wait,
    world::{NODE, World},
};

use crate::{
    flood::{Door, Flood, PORT},
    pods::{Ask, Pod, forget, import, network_policy, relabel},
};

/// The front end alone reaches the database.
fn front_end() -> String {
    network_policy(
        "db",
        "{podSelector: {matchLabels: {app: db}}, ingress: [{from: [{podSelector: {matchLabels: {app: web}}}]}]}",
    )
}

/// A database behind its door, the front end in the middle of talks with it, and a flood by somebody else.
struct Scene {
    web: Pod,
    other: Pod,
    db: Pod,
    door: Door,
    flood: Flood,
    streams: [UdpStream; 2],
    talk: TcpFlow,
}

impl Scene {
    fn start(node: &Node) -> Result<Self> {
        let (web, other) = (Pod::container(node, "web", "web")?, Pod::container(node, "other", "other")?);
        let db = Pod::container(node, "db", "db")?;
        import(node, &front_end())?;
        let door = Door::open(db.space()?)?;
        let to = db.end.both()?;
        let flood = Flood::start(other.space()?, &to)?;
        let stream = |address| UdpStream::start(web.space()?, db.space()?, address, 500);
        let streams = [stream(to[0])?, stream(to[1])?];
        let talk = TcpFlow::start(web.space()?, db.space()?, to[1])?;
        flood.await_more(50)?;
        Ok(Self { web, other, db, door, flood, streams, talk })
    }

    /// The flood and the talks go on, and nobody has entered.
    fn holds(&self, when: &str) -> Result<()> {
        self.flood.await_more(100).context("the flood")?;
        self.streams.iter().try_for_each(|stream| stream.await_more(50)).with_context(|| when.to_owned())?;
        self.talk.await_more(10).with_context(|| when.to_owned())?;
        ensure!(self.door.entered() == 0, "{when}: {} entered", self.door.entered());
        Ok(())
    }

    /// Nobody has entered all the time.
    fn end(self, node: &Node) -> Result<()> {
        ensure!(self.door.entered() == 0, "{} entered", self.door.entered());
        self.finish(node)
    }

    fn finish(self, node: &Node) -> Result<()> {
        for stream in self.streams {
            stream.stop()?.must_be_perfect()?;
        }
        self.talk.stop()?.must_be_whole()?;
        let before = self.door.entered();
        // The flood is one that enters where it may.
        forget(node)?;
        wait::until("the flood to enter", || Ok((self.door.entered() > before + 100).then_some(())))?;
        let knocks = self.flood.stop()?;
        println!("{knocks} knocks");
        self.door.close()?;
        [self.web, self.other, self.db].iter().try_for_each(|pod| node.detach(&pod.end))
    }
}

fn regenerate(node: &Node, pod: &Pod, level: RegenerateLevel) -> Result<()> {
    let patch = EndpointPatch { regenerate: Some(level), ..EndpointPatch::default() };
    node.ask(async |client| client.patch_endpoint(&pod.end.id(), &patch).await).map(drop)
}

#[test]
fn nothing_enters_while_the_agent_is_killed_and_restarted() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let s = Scene::start(node)?;
        for round in 1..=5 {
            node.kill_agent()?;
            s.holds(&format!("without an agent, round {round}"))?;
            // Other programs, which replace those of before.
            node.set_flag("--debug-programs", round % 2 == 1);
            node.start_agent()?;
            s.holds(&format!("after start {round}"))?;
            node.await_rebuilt()?;
        }
        s.end(node)
    })
}

#[test]
fn nothing_from_beyond_the_node_enters_while_the_agent_is_killed_and_restarted() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let world = World::join(node)?;
        let s = Scene::start(node)?;
        for (address, router) in s.db.end.both()?.into_iter().zip(NODE) {
            let family = if address.is_ipv4() { "-4" } else { "-6" };
            ip(world.space()?, &format!("{family} route add {address} via {router}"))?;
        }
        let flood = Flood::start(world.space()?, &s.db.end.both()?)?;
        for round in 1..=5 {
            node.kill_agent()?;
            flood.await_more(100)?;
            s.holds(&format!("without an agent, round {round}"))?;
            node.start_agent()?;
            flood.await_more(100)?;
            s.holds(&format!("after start {round}"))?;
        }
        node.await_rebuilt()?;
        let seen = s.flood.knocks();
        // What comes from beyond the node enters where it may, too.
        import(
            node,
            &network_policy(
                "db",
                "{podSelector: {matchLabels: {app: db}}, ingress: [
            {from: [{podSelector: {matchLabels: {app: web}}}, {ipBlock: {cidr: 198.51.100.0/24}}]}]}",
            ),
        )?;
        wait::until("the world to enter", || Ok((s.door.entered() > 100).then_some(())))?;
        println!("{seen} and {} knocks", flood.stop()?);
        import(node, &front_end())?;
        s.finish(node)
    })
}

#[test]
fn nothing_enters_while_endpoints_and_policies_change() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let s = Scene::start(node)?;
        let wider = network_policy(
            "db",
            "{podSelector: {matchLabels: {app: db}}, ingress: [{from: [
            {podSelector: {matchLabels: {app: web}}}, {ipBlock: {cidr: 192.0.2.0/24}}],
              ports: [{protocol: TCP}, {protocol: UDP}]}]}",
        );
        let more: Vec<String> = (0..50)
            .map(|n| {
                network_policy(
                    &format!("more{n}"),
                    &format!(
                        "{{podSelector: {{}}, policyTypes: [Ingress], ingress: [{{from: [
                {{podSelector: {{matchLabels: {{app: nobody{n}}}}}}},
                  {{podSelector: {{matchLabels: {{app: web}}}}}}]}}]}}"
                    ),
                )
            })
            .collect();
        for round in 0..5 {
            for pod in [&s.db, &s.other, &s.web] {
                regenerate(node, pod, RegenerateLevel::Policy)?;
                regenerate(node, pod, RegenerateLevel::Datapath)?;
            }
            s.holds(&format!("regenerated, round {round}"))?;
            for text in [&wider, &front_end(), &more.concat(), &front_end()] {
                import(node, text)?;
            }
            s.holds(&format!("imported, round {round}"))?;
            // Other numbers for the same rules: the namespace's labels, those of the pods.
            let labels = NamespaceLabels { labels: [("round".to_owned(), round.to_string())].into() };
            node.ask(async |client| client.put_namespace("default", &labels).await)?;
            relabel(node, &s.other.end, &[&format!("cni:app=other{round}")])?;
            relabel(node, &s.web.end, &["cni:app=web", &format!("cni:round={round}")])?;
            relabel(node, &s.db.end, &["cni:app=db", &format!("cni:round={round}")])?;
            s.holds(&format!("relabelled, round {round}"))?;
        }
        s.end(node)
    })
}

#[test]
fn nothing_enters_while_the_agent_is_upgraded_and_downgraded() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let s = Scene::start(node)?;
        for next in [true, false] {
            node.stop_agent()?;
            s.holds("without an agent")?;
            node.set_next_version(next);
            node.start_agent()?;
            s.holds(if next { "after the upgrade" } else { "after the downgrade" })?;
            regenerate(node, &s.db, RegenerateLevel::Datapath)?;
            import(node, &front_end())?;
            s.holds("changed")?;
        }
        s.end(node)
    })
}

/// Pools so small that addresses come round.
pub(crate) const POOLS: [&str; 3] = ["--ip-rest-ms=0", "--ipv4-pool=10.88.0.0/28", "--ipv6-pool=fd00:88::/124"];

#[test]
fn an_endpoint_is_policed_from_its_first_packet() -> Result<()> {
    scenario(NodeConfig::default().flags(&POOLS), |node| {
        let (web, other) = (Pod::container(node, "web", "web")?, Pod::container(node, "other", "other")?);
        import(node, &front_end())?;
        // Every address that the database may get.
        let all: Vec<IpAddr> = (4..15_u8)
            .flat_map(|n| [IpAddr::from([10, 88, 0, n]), IpAddr::from([0xfd00, 0x88, 0, 0, 0, 0, 0, n.into()])])
            .filter(|address| !web.end.addresses().contains(address))
            .collect();
        let flood = Flood::start(other.space()?, &all)?;
        for round in 0..8 {
            let sandbox = node.sandbox(&format!("db{round}"))?;
            let door = Door::open(sandbox.space()?)?;
            let db = Pod::of(node, sandbox, "db")?;
            flood.await_more(2 * all.len() as u64)?;
            ensure!(door.entered() == 0, "round {round}: {} entered", door.entered());
            for address in db.end.both()? {
                ensure!(all.contains(&address), "{address} was not flooded");
                ensure!(web.reaches(address, Ask::Tcp(PORT))?, "the front end to {address}");
            }
            wait::until("the front end to enter", || Ok((door.entered() == 2).then_some(())))?;
            if round == 7 {
                forget(node)?;
                wait::until("the flood to enter", || Ok((door.entered() > 2).then_some(())))?;
            }
            node.detach(&db.end)?;
            door.close()?;
        }
        flood.stop()?;
        [web, other].iter().try_for_each(|pod| node.detach(&pod.end))
    })
}

#[test]
fn an_endpoint_sends_nothing_unpoliced_from_its_first_packet() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let web = Pod::container(node, "web", "web")?;
        let mute = network_policy("db", "{podSelector: {matchLabels: {app: db}}, policyTypes: [Egress]}");
        import(node, &mute)?;
        let door = Door::open(web.space()?)?;
        for round in 0..8 {
            let sandbox = node.sandbox(&format!("db{round}"))?;
            // It has no network yet.
            let flood = Flood::start(sandbox.space()?, &web.end.both()?)?;
            flood.await_more(20)?;
            let db = Pod::of(node, sandbox, "db")?;
            flood.await_more(100)?;
            ensure!(door.entered() == 0, "round {round}: {} entered", door.entered());
            if round == 7 {
                forget(node)?;
                wait::until("the flood to enter", || Ok((door.entered() > 2).then_some(())))?;
            }
            node.detach(&db.end)?;
            flood.stop()?;
        }
        door.close()?;
        node.detach(&web.end)
    })
}

#[test]
fn an_address_that_was_anothers_inherits_no_rights() -> Result<()> {
    scenario(NodeConfig::default().flags(&POOLS), |node| {
        import(node, &front_end())?;
        let db = Pod::container(node, "db", "db")?;
        let echo = EchoServer::start(db.space()?)?;
        let mut number = 0;
        for (before, after) in [("web", "other"), ("other", "web")] {
            let mut start = |app| {
                number += 1;
                Pod::container(node, &format!("pod{number}"), app)
            };
            let first = start(before)?;
            let address = IpAddr::from(first.end.v4()?);
            let to = echo.udp_at(db.end.v4()?.into());
            let asks = echo::udp_client(first.space()?, to)?;
            let client = asks.local_addr()?;
            for _ in 0..2 {
                asks.send(b"ahoy")?;
                asks.set_read_timeout(Some(Duration::from_millis(500)))?;
                ensure!(asks.recv(&mut [0; 4]).is_ok() == (before == "web"), "{before}");
            }
            node.detach(&first.end)?;
            let mut others = Vec::new();
            let heir = loop {
                let pod = start(after)?;
                if pod.end.addresses().contains(&address) {
                    break pod;
                }
                others.push(pod);
            };
            // The same flow, by its ports.
            let asks = heir.space()?.run(|| UdpSocket::bind(client))??;
            asks.connect(to)?;
            asks.set_read_timeout(Some(Duration::from_millis(500)))?;
            asks.send(b"ahoy")?;
            ensure!(asks.recv(&mut [0; 4]).is_ok() == (after == "web"), "{after} at the address of {before}");
            for address in db.end.both()? {
                let reached = heir.reaches(address, Ask::Tcp(80))?;
                ensure!(reached == (after == "web"), "{after} at the address of {before}: {reached}");
            }
            others.push(heir);
            others.iter().try_for_each(|pod| node.detach(&pod.end))?;
        }
        node.detach(&db.end)
    })
}
