//! Packets whose transport header is behind many extension headers, or not there: what `wharf policy explain` says is
//! what becomes of them.

use std::{net::IpAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use wharf_api::{PolicyExplainQuery, PolicyProtocol, PolicyVerdict};
use wharf_tests::{
    Node, NodeConfig,
    frame::{self, Mac, PacketSocket},
    scenario,
};

use crate::pods::{Pod, document, forget, import, network_policy};

const TCP: u8 = 6;
const ESP: u8 = 50;
/// Destination options of IPv6.
const OPTIONS: u8 = 60;
/// So many headers are looked behind.
const SEARCHED: usize = 6;
/// A packet that is dropped is missing when one that was sent after it is there.
const PATIENCE: Duration = Duration::from_secs(5);

/// A client that makes its packets by hand, and a server that sees what comes.
struct Scene {
    web: Pod,
    db: Pod,
    sends: PacketSocket,
    sees: PacketSocket,
    client: Mac,
    gateway: Mac,
    /// The last packet's port, which none has twice.
    last: u16,
}

impl Scene {
    fn start(node: &Node) -> Result<Self> {
        let (web, db) = (Pod::container(node, "web", "web")?, Pod::container(node, "db", "db")?);
        let (sends, sees) = (PacketSocket::open(web.space()?, "eth0")?, PacketSocket::open(db.space()?, "eth0")?);
        let gateway = frame::mac(&node.endpoint(&web.end)?.host_mac)?;
        Ok(Self { client: sends.mac()?, web, db, sends, sees, gateway, last: 20_000 })
    }

    /// Sends this to the server, behind an IPv6 header; the answer is what the server sees it by.
    fn send(&mut self, next: u8, headers: &[u8], to_port: u16) -> Result<[u8; 4]> {
        self.last += 1;
        let [from, to] = [self.web.end.both()?[1], self.db.end.both()?[1]];
        let (IpAddr::V6(from), IpAddr::V6(to)) = (from, to) else { anyhow::bail!("{from} to {to}") };
        let [a, b] = self.last.to_be_bytes();
        let [c, d] = to_port.to_be_bytes();
        let mark = [a, b, c, d];
        let tcp = [&mark[..], &[0; 8], &[0x50, 2, 0, 9, 0, 0, 0, 0]].concat();
        let packet = frame::ipv6(from, to, next, 64, &[headers, &tcp].concat());
        self.sends.send(&frame::ethernet(self.gateway, self.client, frame::IPV6, &packet))?;
        Ok(mark)
    }

    /// Whether the server gets a packet. Every policy of the test lets port 80 of TCP pass.
    fn passes(&mut self, next: u8, headers: &[u8], to_port: u16) -> Result<bool> {
        let (packet, after) = (self.send(next, headers, to_port)?, self.send(TCP, &[], 80)?);
        let has = |frame: &[u8], mark: [u8; 4]| frame.windows(4).any(|bytes| bytes == mark);
        let first = self.sees.await_frame(PATIENCE, |frame| has(frame, packet) || has(frame, after))?;
        let first = first.context("the packet after it did not come either")?;
        let passes = has(&first, packet);
        if passes {
            self.sees.await_frame(PATIENCE, |frame| has(frame, after))?.context("the packet after it")?;
        }
        Ok(passes)
    }

    fn is_accepted(&self, node: &Node, protocol: PolicyProtocol, port: u16) -> Result<bool> {
        let [from, to] = [self.web.end.both()?[1].to_string(), self.db.end.both()?[1].to_string()];
        let query = PolicyExplainQuery { from, to, protocol: Some(protocol), port: Some(port) };
        Ok(node.ask(async |client| client.explain_policy(&query).await)?.verdict == PolicyVerdict::Accept)
    }
}

/// This many headers before that of TCP: the first kind, and the bytes.
fn options(count: usize) -> (u8, Vec<u8>) {
    let header = |left: usize| [if left == 1 { TCP } else { OPTIONS }, 0, 1, 4, 0, 0, 0, 0];
    (if count == 0 { TCP } else { OPTIONS }, (1..=count).rev().flat_map(header).collect())
}

#[test]
fn a_port_that_is_not_seen_passes_where_no_rule_is_about_ports() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let mut s = Scene::start(node)?;
        let id = node.endpoint(&s.web.end)?.id;
        let cilium = |spec: &str| document("cilium.io/v2", "CiliumNetworkPolicy", "{name: db}", spec);
        let db = "{podSelector: {matchLabels: {app: db}}, ";
        // Whether port 25 passes, a packet that shows no port, and one of a protocol without ports.
        for (text, named, unseen, other) in [
            (network_policy("db", &format!("{db} ingress: [{{}}]}}")), true, true, true),
            (
                cilium(
                    "{endpointSelector: {matchLabels: {app: db}}, ingress: [{fromEntities: [all]}],
                      ingressDeny: [{fromEntities: [all], toPorts: [{ports: [{port: '25', protocol: TCP}]}]}]}",
                ),
                false,
                false,
                true,
            ),
            (
                network_policy("db", &format!("{db} ingress: [{{ports: [{{port: 80}}, {{port: 25}}]}}]}}")),
                true,
                false,
                false,
            ),
        ] {
            forget(node)?;
            import(node, &text)?;
            let before = node.packets(id, "egress", "transport-header-not-found")?;
            for (count, port) in (0..=SEARCHED + 1).flat_map(|count| [(count, 25), (count, 80)]) {
                let (next, headers) = options(count);
                let (passes, shows) = (s.passes(next, &headers, port)?, count <= SEARCHED);
                let expected = if shows { named || port == 80 } else { unseen };
                ensure!(passes == expected, "port {port} behind {count} headers: passes: {passes}\n{text}");
                let protocol = if shows { PolicyProtocol::Tcp } else { PolicyProtocol::Unknown };
                ensure!(s.is_accepted(node, protocol, port)? == passes, "explained, {protocol:?} {port}\n{text}");
            }
            ensure!(s.passes(ESP, &[], 25)? == other, "ESP\n{text}");
            ensure!(s.is_accepted(node, PolicyProtocol::Other, 0)? == other, "ESP explained\n{text}");
            let dropped = node.packets(id, "egress", "transport-header-not-found")? - before;
            ensure!(dropped == if unseen { 0 } else { 2 }, "{dropped} were dropped for their headers\n{text}");
        }
        let Scene { web, db, .. } = s;
        [web, db].iter().try_for_each(|pod| node.detach(&pod.end))
    })
}
