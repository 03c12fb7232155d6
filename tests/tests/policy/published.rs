//! Addresses that the node translates to a server: the server's rules see who asks, not the node.

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpStream},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use wharf_tests::{
    Node, NodeConfig,
    echo::EchoServer,
    process::{command_in, run},
    scenario, wait,
    world::{NODE, World},
};

use crate::pods::{Ask, DENIED, Pod, forget, import, network_policy};

/// The address of a service in each family: of no network of the node's.
const SERVICE: [&str; 2] = ["198.18.5.80", "2001:db8:5::80"];
const PORT: u16 = 8080;

/// A server whose port the node publishes, and which a service leads to.
fn server(node: &Node) -> Result<(Pod, EchoServer)> {
    let sandbox = node.sandbox("db")?;
    let echo = EchoServer::start(sandbox.space()?)?;
    let [tcp, udp] = [echo.tcp_at([0, 0, 0, 0].into()).port(), echo.udp_at([0, 0, 0, 0].into()).port()];
    let ports = json!([
        {"hostPort": PORT, "containerPort": tcp, "protocol": "tcp"},
        {"hostPort": PORT, "containerPort": udp, "protocol": "udp"},
    ]);
    let labels = json!({"cni": {"labels": [{"key": "app", "value": "db"}]}});
    let conf = node.netconf().with("args", labels).with("runtimeConfig", json!({ "portMappings": ports }));
    let end = node.attach_with(&sandbox, "eth0", &conf)?;
    let [v4, v6] = end.both()?;
    let rules = format!(
        "table ip services {{ chain c {{ type nat hook prerouting priority -100;
           ip daddr {s4} tcp dport {PORT} dnat to {v4}:{tcp}
           ip daddr {s4} udp dport {PORT} dnat to {v4}:{udp}
         }}
         }}
         table ip6 services {{ chain c {{ type nat hook prerouting priority -100;
           ip6 daddr {s6} tcp dport {PORT} dnat to [{v6}]:{tcp}
           ip6 daddr {s6} udp dport {PORT} dnat to [{v6}]:{udp}
         }}
         }}",
        s4 = SERVICE[0],
        s6 = SERVICE[1],
    );
    let mut command = command_in(node.space(), "nft")?;
    command.args(["-f", "-"]);
    run(command, rules.as_bytes(), Duration::from_secs(10))?.ok()?;
    Ok((Pod { sandbox, end }, echo))
}

/// Who asks, and whether they are answered.
fn hold(asks: &[(&Pod, bool)], world: (&World, bool), when: &str) -> Result<()> {
    wait::all(NODE.into_iter().chain(SERVICE), |to| {
        let to: IpAddr = to.parse()?;
        let asks = asks.iter().flat_map(|(pod, passes)| [Ask::Tcp(PORT), Ask::Udp(PORT)].map(|ask| (pod, ask, passes)));
        wait::all(asks, |(pod, ask, passes)| {
            let answered = pod.reaches(to, ask)?;
            ensure!(answered == *passes, "{when}: {} by {to}, {ask:?}: {answered}", pod.sandbox.name());
            Ok(())
        })
    })?;
    // The world has no route to services.
    let asks = NODE.into_iter().flat_map(|to| [Ask::Tcp(PORT), Ask::Udp(PORT)].map(|ask| (to, ask)));
    wait::all(asks, |(to, ask)| {
        let answered = ask.is_answered(world.0.space()?, to.parse()?, DENIED)?;
        ensure!(answered == world.1, "{when}: the world by {to}, {ask:?}: {answered}");
        Ok(())
    })
}

/// Asks the echo and is answered.
pub(crate) fn talk(mut stream: &TcpStream, patience: Duration) -> std::io::Result<()> {
    stream.set_read_timeout(Some(patience))?;
    stream.write_all(b"ahoy")?;
    stream.read_exact(&mut [0; 4])
}

#[test]
fn a_tightened_policy_cuts_translated_connections() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let (web, (db, _echo)) = (Pod::container(node, "web", "web")?, server(node)?);
        let _world = World::join(node)?;
        let to = NODE.into_iter().chain(SERVICE).map(|to| Ok(SocketAddr::new(to.parse()?, PORT)));
        let streams =
            to.map(|to: Result<_>| Ok((to.as_ref().map(ToString::to_string).unwrap_or_default(), web.connect(to?)?)));
        let streams = streams.collect::<Result<Vec<_>>>()?;
        let go_on = || streams.iter().try_for_each(|(to, stream)| talk(stream, wait::PATIENCE).context(to.clone()));
        go_on()?;
        import(node, &network_policy("db", "{podSelector: {matchLabels: {app: db}}}"))?;
        wait::all(&streams, |(to, stream)| {
            ensure!(talk(stream, DENIED).is_err(), "{to} goes on");
            Ok(())
        })?;
        forget(node)?;
        // First what was sent while they were cut.
        for (to, mut stream) in streams.iter().map(|(to, stream)| (to, stream)) {
            stream.set_read_timeout(Some(wait::PATIENCE))?;
            stream.read_exact(&mut [0; 4]).with_context(|| to.clone())?;
        }
        go_on()?;
        [web, db].iter().try_for_each(|pod| node.detach(&pod.end))
    })
}

#[test]
fn a_translated_flow_is_judged_by_who_began_it() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let world = World::join(node)?;
        let (web, other) = (Pod::container(node, "web", "web")?, Pod::container(node, "other", "other")?);
        let (db, _echo) = server(node)?;
        hold(&[(&web, true), (&other, true)], (&world, true), "without a policy")?;
        let policy = |peers: &str| {
            let spec = format!("{{podSelector: {{matchLabels: {{app: db}}}}, ingress: [{{from: [{peers}]}}]}}");
            import(node, &network_policy("db", &spec)).map(drop)
        };
        policy("{podSelector: {matchLabels: {app: web}}}")?;
        hold(&[(&web, true), (&other, false)], (&world, false), "the front end")?;
        policy(
            "{podSelector: {matchLabels: {app: other}}}, {ipBlock: {cidr: 198.51.100.0/24}},
              {ipBlock: {cidr: '2001:db8:7::/64'}}",
        )?;
        hold(&[(&web, false), (&other, true)], (&world, true), "the other one, and the world")?;
        for address in NODE {
            let answered = Ask::Tcp(PORT).is_answered(node.space(), address.parse()?, DENIED);
            ensure!(answered.context("from the node")?, "the node by {address}");
        }
        // A pod cannot block access to itself (Kubernetes, network policies).
        policy("{podSelector: {matchLabels: {app: web}}}")?;
        for address in NODE {
            for ask in [Ask::Tcp(PORT), Ask::Udp(PORT)] {
                ensure!(db.reaches(address.parse()?, ask)?, "the server itself by {address}, {ask:?}");
            }
        }
        // The pair's flows take the stack since one came by a service: what is sent directly is judged as before.
        for address in db.end.both()? {
            ensure!(web.reaches(address, Ask::Tcp(80))? && !other.reaches(address, Ask::Tcp(80))?, "{address}");
        }
        forget(node)?;
        [web, other, db].iter().try_for_each(|pod| node.detach(&pod.end))
    })
}
