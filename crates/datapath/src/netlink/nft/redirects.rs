//! Chains that deliver redirected packets to the proxy's sockets.

use wharf_common::{
    flow::{TCP, UDP},
    policy::{MARK_PORT_SHIFT, MARK_PROXIED_EGRESS, MARK_PROXIED_INGRESS, MARK_TO_PROXY, MARK_TURNED},
};

use super::{
    expr::{Expression, Rule, SocketKey},
    rules::{ACCEPT, FILTER, FORWARD, LOCAL_OUT, PRE_ROUTING, leaves, rule, words},
    table::Chain,
};

/// `NF_IP_PRI_RAW` of `linux/netfilter_ipv4.h`: before connection tracking.
const RAW: i32 = -300;
/// After destination translation (-100): the proxy's sockets have the translated addresses. The first needs the mark's
/// port, which the second clears.
const TO_LISTENERS: i32 = -60;
const TRANSLATED: i32 = -50;
const LOOPBACK4: [u8; 4] = [127, 0, 0, 1];
const LOOPBACK6: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
/// The mark bits below the port.
const MARKS: u32 = (1 << MARK_PORT_SHIFT) - 1;

const ZONE: u16 = 0x7768;

pub(super) fn chains(masquerades: bool) -> Vec<(String, Chain)> {
    let chain = |name: &str, hook, priority, rules| {
        let kind = "filter".to_owned();
        (name.to_owned(), Chain { kind, hook, priority, policy: ACCEPT, rules })
    };
    // Packets that no policy routing rule led to the proxy.
    let lost = Expression::marked(MARK_TO_PROXY).into_iter().chain([Expression::drop()]).collect();
    let mut chains = vec![
        chain("redirected-untracked", PRE_ROUTING, RAW, vec![untracked()]),
        chain("redirected", PRE_ROUTING, TO_LISTENERS, redirected()),
        chain("redirected-answers", PRE_ROUTING, TRANSLATED, answers()),
        chain("redirected-lost", FORWARD, FILTER, vec![lost]),
    ];
    if masquerades {
        chains.push(chain("redirected-apart", LOCAL_OUT, RAW, [true, false].map(apart).into()));
    }
    chains
}

/// Gives the proxy's masqueraded connections in a container's name a zone. Otherwise, if a client has the proxy's port,
/// connection tracking translates its packets to the proxy. Replies need no zone.
fn apart(v4: bool) -> Rule {
    let marked = Expression::marked(MARK_PROXIED_EGRESS).into_iter();
    rule(v4, marked.chain(leaves(v4)).chain([Expression::load(0, &ZONE.to_ne_bytes()), Expression::set_zone(0)]))
}

/// Connection tracking would take a redirected connection for another one.
fn untracked() -> Rule {
    let is_turned = Expression::marked(MARK_TO_PROXY).into_iter().chain(Expression::marked(MARK_TURNED));
    is_turned.chain([Expression::untrack()]).collect()
}

fn redirected() -> Vec<Rule> {
    let ends = [(true, TCP), (false, TCP), (true, UDP), (false, UDP)];
    // The proxy has closed its socket: a wildcard socket of the node would get the packet.
    let is_left = Expression::marked(MARK_TO_PROXY).into_iter().chain(Expression::marked(!MARKS));
    let dropped = is_left.chain([Expression::drop()]).collect();
    // A server of the node may have a socket with these addresses: clients must not bypass the proxy.
    let is_others = Expression::marked(MARK_TO_PROXY)
        .into_iter()
        .chain([Expression::transport(0), Expression::is(0, &[TCP])])
        .chain([Expression::socket(0, SocketKey::Transparent), Expression::is(0, &[0]), Expression::drop()]);
    let rules = ends.map(|(v4, protocol)| listens(v4, protocol));
    rules.into_iter().chain([dropped, is_others.collect()]).collect()
}

/// Delivers to the connection's socket, else to the listener at the mark's port; clears the port.
fn listens(v4: bool, protocol: u8) -> Rule {
    let (loopback, port) = if v4 { (LOOPBACK4.to_vec(), 1) } else { (LOOPBACK6.to_vec(), words(false)) };
    let to_listener = Expression::marked(MARK_TO_PROXY)
        .into_iter()
        .chain(Expression::marked(!MARKS))
        .chain([Expression::transport(0), Expression::is(0, &[protocol])])
        .chain([Expression::load(0, &loopback), Expression::mark(port), Expression::shift_right(port, MARK_PORT_SHIFT)])
        .chain([Expression::to_socket(super::rules::family(v4), 0, port)])
        .chain([Expression::mark(0), Expression::masked(0, MARKS, 0), Expression::set_mark(0)]);
    rule(v4, to_listener)
}

/// Marks outside packets for the proxy's connections, which the kernel would forward.
fn answers() -> Vec<Rule> {
    // Fast path for the node's traffic.
    let local = Expression::to_the_node().into_iter().chain([Expression::give_back()]).collect();
    let listens = [Expression::socket(0, SocketKey::Wildcard), Expression::is(0, &[1]), Expression::give_back()];
    // A UDP socket without the proxy's mark receives nothing.
    let only_answers = [Expression::transport(0), Expression::is(0, &[UDP]), Expression::socket(0, SocketKey::Mark)]
        .into_iter()
        .chain([Expression::masked(0, MARK_PROXIED_EGRESS | MARK_PROXIED_INGRESS, 0), Expression::is(0, &[0; 4])])
        .chain([Expression::give_back()])
        .collect();
    let is_proxys = [Expression::socket(0, SocketKey::Transparent), Expression::is(0, &[1])];
    let kept = MARKS & !MARK_TO_PROXY;
    let marks = [Expression::mark(0), Expression::masked(0, kept, MARK_TO_PROXY), Expression::set_mark(0)];
    vec![local, listens.to_vec(), only_answers, is_proxys.into_iter().chain(marks).collect()]
}
