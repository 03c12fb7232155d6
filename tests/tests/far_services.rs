//! Egress rules about services whose backend is a container of another node.

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use wharf_api::{PolicyDeleteQuery, PolicyImport};
use wharf_tests::{
    Node,
    cluster::{Container, FAR, Nodes, THREE, pool},
    echo,
    process::{command_in, ip, run},
    programs,
    space::Space,
    wait,
};

const CIDRS: &str = "--service-cidr=198.18.5.0/24,2001:db8:5::/64";
/// Contain the pools of all nodes.
const EXCLUDED: &str = "--masquerade-exclude=10.0.0.0/8,fd00::/8";
/// Number of the service of a container on the client's node.
const LOCAL: usize = 9;
/// Part of a finding's subject, and what another program does.
type Damage = (&'static str, fn(&Space) -> Result<()>);

const PORT: u16 = 80;
/// Of the routes to services' backends.
const TABLE: u32 = 0x7768_0001;
/// How long an answer that must not come is waited for: TCP repeats its first packet after a second.
const DENIED: Duration = Duration::from_millis(1_300);

fn nft(space: &Space, rules: &str) -> Result<()> {
    let mut command = command_in(space, "nft")?;
    command.args(["-f", "-"]);
    run(command, rules.as_bytes(), wait::PATIENCE)?.ok().map(drop)
}

/// Addresses of the service of node `n`'s container.
fn service(n: usize) -> Result<[IpAddr; 2]> {
    Ok([format!("198.18.5.{n}").parse()?, format!("2001:db8:5::{n}").parse()?])
}

/// In place of kube-proxy.
fn translate(node: &Node, n: usize, server: &Container) -> Result<()> {
    for (service, to) in service(n)?.into_iter().zip(server.end.both()?) {
        let family = if to.is_ipv4() { "ip" } else { "ip6" };
        let (tcp, udp) = (server.echo.tcp_at(to), server.echo.udp_at(to));
        nft(
            node.space(),
            &format!(
                "table {family} services {{ chain c {{ type nat hook prerouting priority -100;
                   {family} daddr {service} tcp dport {PORT} dnat to {tcp}
                   {family} daddr {service} udp dport {PORT} dnat to {udp}
                 }}
                 }}"
            ),
        )?;
    }
    Ok(())
}

fn answers(client: &Container, to: SocketAddr) -> Result<bool> {
    let udp = client.space()?.run(|| -> Result<bool> {
        let socket = UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" })?;
        socket.set_read_timeout(Some(DENIED))?;
        socket.send_to(b"x", to)?;
        Ok(socket.recv(&mut [0; 8]).is_ok())
    })??;
    let tcp = client.space()?.run(|| TcpStream::connect_timeout(&to, DENIED))?.is_ok();
    ensure!(tcp == udp, "{to}: TCP {tcp}, UDP {udp}");
    Ok(tcp)
}

/// Sends a byte and reads the answer.
fn talk(mut stream: &TcpStream) -> Result<()> {
    stream.set_read_timeout(Some(DENIED))?;
    stream.write_all(b"x")?;
    stream.read_exact(&mut [0])?;
    Ok(())
}

/// The client reaches exactly the services of these nodes, also with fragments and segments of the largest size.
fn must_reach(client: &Container, nodes: &[usize], when: &str) -> Result<()> {
    wait::all([1, FAR], |n| {
        wait::all(service(n)?, |address| {
            let to = SocketAddr::new(address, PORT);
            if nodes.contains(&n) {
                echo::tcp(client.space()?, to, 200_000).with_context(|| format!("{when}: {to}"))?;
                echo::udp(client.space()?, to, 100).with_context(|| format!("{when}: {to}"))?;
                echo::udp(client.space()?, to, 4_000).with_context(|| format!("{when}: {to}, fragments"))?;
            } else {
                ensure!(!answers(client, to)?, "{when}: {to} answers");
            }
            Ok(())
        })
    })
}

/// The network of one address.
fn alone(address: IpAddr) -> String {
    format!("{address}/{}", if address.is_ipv4() { 32 } else { 128 })
}

/// The container named `one` sends only to these networks.
fn allow(node: &Node, cidrs: &[String]) -> Result<()> {
    let blocks: Vec<String> = cidrs.iter().map(|cidr| format!("{{cidr: '{cidr}'}}")).collect();
    allow_blocks(node, &blocks)
}

/// The container named `one` sends to all networks but these.
fn allow_all_but(node: &Node, [v4, v6]: [String; 2]) -> Result<()> {
    let block = |all: &str, but: String| format!("{{cidr: '{all}', except: ['{but}']}}");
    allow_blocks(node, &[block("0.0.0.0/0", v4), block("::/0", v6)])
}

fn allow_blocks(node: &Node, blocks: &[String]) -> Result<()> {
    let blocks: Vec<String> = blocks.iter().map(|block| format!("{{ipBlock: {block}}}")).collect();
    let text = format!(
        "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{name: one}}\n\
         spec: {{podSelector: {{matchLabels: {{app: one}}}}, policyTypes: [Egress], egress: [{{to: [{}]}}]}}\n",
        blocks.join(", ")
    );
    import(node, &text)
}

fn import(node: &Node, text: &str) -> Result<()> {
    let import = PolicyImport { file: "test.yaml".to_owned(), text: text.to_owned() };
    node.ask(async |client| client.import_policy(&import).await).map(drop)
}

/// The container named `one` does not send to these networks.
fn deny([v4, v6]: [String; 2]) -> String {
    format!(
        "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {{name: deny}}\n\
         spec: {{endpointSelector: {{matchLabels: {{app: one}}}}, enableDefaultDeny: {{egress: false}}, \
         egressDeny: [{{toCIDR: ['{v4}', '{v6}']}}]}}\n"
    )
}

/// Deletes every policy.
fn forget(node: &Node) -> Result<()> {
    let all = PolicyDeleteQuery { all: Some(true), ..PolicyDeleteQuery::default() };
    node.ask(async |client| client.delete_policy(&all).await).map(drop)
}

fn pools(n: usize) -> [String; 2] {
    [pool(n, false), pool(n, true)]
}

#[test]
fn egress_rules_hold_for_services_with_a_backend_on_another_node() -> Result<()> {
    let mut joined = Nodes::join(THREE, "auto")?;
    joined.nodes[0].set_flag(CIDRS, true);
    joined.nodes[0].set_flag(EXCLUDED, true);
    joined.nodes.iter_mut().try_for_each(Node::start_agent)?;
    let joined = joined.run(|joined| {
        let [a, b, c] = [&joined.nodes[0], &joined.nodes[1], &joined.nodes[FAR]];
        let one = Container::start(a, "one")?;
        let (two, three) = (Container::start(b, "two")?, Container::start(c, "three")?);
        translate(a, 1, &two)?;
        translate(a, FAR, &three)?;
        let zero = Container::start(a, "zero")?;
        translate(a, LOCAL, &zero)?;
        must_reach(&one, &[1, FAR], "without a policy")?;
        allow(a, &pools(0))?;
        must_reach(&one, &[], "the client's own node")?;
        for address in service(LOCAL)? {
            ensure!(answers(&one, SocketAddr::new(address, PORT))?, "a container of the client's node: {address}");
        }
        forget(a)?;
        let streams = service(FAR)?.map(|to| one.space()?.run(|| TcpStream::connect((to, PORT)))?.map_err(Into::into));
        let streams = streams.into_iter().collect::<Result<Vec<TcpStream>>>()?;

        allow(a, &pools(1))?;
        must_reach(&one, &[1], "the network of the near node")?;
        let id = a.endpoint(&one.end)?.id;
        ensure!(a.packets(id, "egress", "policy-denied")? > 0, "the client's counter has the drops");
        for stream in &streams {
            ensure!(talk(stream).is_err(), "a connection to a denied container goes on");
        }
        allow(a, &pools(FAR))?;
        must_reach(&one, &[FAR], "the network of the far node")?;
        allow(a, &service(1)?.map(alone))?;
        must_reach(&one, &[1], "the address of a service")?;
        allow(a, &[pools(1), pools(FAR)].concat())?;
        must_reach(&one, &[1, FAR], "the networks of both nodes")?;

        // Deny rules about the containers, for a client that sends to all addresses.
        forget(a)?;
        import(a, &deny(pools(1)))?;
        must_reach(&one, &[FAR], "a deny rule about the near node")?;
        allow(a, &[service(1)?.map(alone), service(FAR)?.map(alone)].concat())?;
        must_reach(&one, &[FAR], "a deny rule, and the addresses of both services")?;
        // Another program's rule leads the packets past the judgement, and nothing repairs that.
        for family in ["", "-6 "] {
            ip(a.space(), &format!("{family}rule add priority 80 lookup main"))?;
        }
        must_reach(&one, &[], "a deny rule, without the way to its judgement")?;
        for family in ["", "-6 "] {
            ip(a.space(), &format!("{family}rule del priority 80"))?;
        }
        must_reach(&one, &[FAR], "a deny rule, with the way again")?;
        forget(a)?;
        allow_all_but(a, pools(1))?;
        must_reach(&one, &[FAR], "all networks but the near node's")?;
        forget(a)?;
        must_reach(&one, &[1, FAR], "without a policy again")?;
        allow(a, &[pools(1), pools(FAR)].concat())?;

        // Without a part, packets are dropped until the agent repairs it.
        let damage: [Damage; 5] = [
            ("0x77680001", |space| ip(space, "rule del priority 89").map(drop)),
            ("0x77680001", |space| ip(space, "rule del priority 90").map(drop)),
            ("0x77680001", |space| ip(space, "-6 rule del priority 90").map(drop)),
            ("0x77680001", |space| ip(space, &format!("route flush table {TABLE}")).map(drop)),
            ("filter of wharf0", |space| programs::take_off(space, "wharf0", "egress")),
        ];
        for (subject, damage) in damage {
            // Repeated, because the agent may repair it before the audit.
            wait::until(&format!("the audit to name {subject}"), || {
                let _gone_already = damage(a.space());
                Ok(a.audit()?.findings.iter().any(|finding| finding.subject.contains(subject)).then_some(()))
            })?;
            a.wharf(&["audit", "--repair"])?;
            must_reach(&one, &[1, FAR], subject)?;
        }
        a.detach(&one.end)?;
        a.detach(&zero.end)?;
        b.detach(&two.end)?;
        c.detach(&three.end)
    })?;
    joined.end()
}
