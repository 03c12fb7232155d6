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
/// After destination translation (`NF_IP_PRI_NAT_DST` is -100), because the proxy's sockets have the translated
/// addresses, also of masqueraded connections' replies. The second clears the mark's port, which the first needs.
const TO_LISTENERS: i32 = -60;
const TRANSLATED: i32 = -50;
/// Where the proxy listens.
const LOOPBACK4: [u8; 4] = [127, 0, 0, 1];
const LOOPBACK6: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
/// The mark bits below the port.
const MARKS: u32 = (1 << MARK_PORT_SHIFT) - 1;

/// Unlikely to be in use.
const ZONE: u16 = 0x7768;

pub(super) fn chains(masquerades: bool) -> Vec<(String, Chain)> {
    let chain = |name: &str, hook, priority, rules| {
        let kind = "filter".to_owned();
        (name.to_owned(), Chain { kind, hook, priority, policy: ACCEPT, rules })
    };
    // Without the policy routing rules to the proxy.
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

/// Puts the proxy's masqueraded connections in a container's name into a zone. Otherwise, if a client chooses the
/// proxy's port, connection tracking merges both connections and translates the client's packets to the proxy. Replies
/// need no zone: the translated source is unique.
fn apart(v4: bool) -> Rule {
    let marked = Expression::marked(MARK_PROXIED_EGRESS).into_iter();
    rule(v4, marked.chain(leaves(v4)).chain([Expression::load(0, &ZONE.to_ne_bytes()), Expression::set_zone(0)]))
}

/// Connection tracking would take a redirected connection with a translated destination for another one, and not
/// translate the proxy's replies.
fn untracked() -> Rule {
    let is_turned = Expression::marked(MARK_TO_PROXY).into_iter().chain(Expression::marked(MARK_TURNED));
    is_turned.chain([Expression::untrack()]).collect()
}

fn redirected() -> Vec<Rule> {
    let ends = [(true, TCP), (false, TCP), (true, UDP), (false, UDP)];
    // The proxy has closed its socket: a wildcard socket of the node would get the packet.
    let is_left = Expression::marked(MARK_TO_PROXY).into_iter().chain(Expression::marked(!MARKS));
    let dropped = is_left.chain([Expression::drop()]).collect();
    // A server of the node, which the client reaches only through the proxy, has a socket with these addresses.
    let is_others = Expression::marked(MARK_TO_PROXY)
        .into_iter()
        .chain([Expression::transport(0), Expression::is(0, &[TCP])])
        .chain([Expression::socket(0, SocketKey::Transparent), Expression::is(0, &[0]), Expression::drop()]);
    let rules = ends.map(|(v4, protocol)| listens(v4, protocol));
    rules.into_iter().chain([dropped, is_others.collect()]).collect()
}

/// Gives packets with a port in the mark to the listener there, or to the socket of their connection if it exists, and
/// clears the port from the mark.
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

/// Marks outside packets for the proxy's connections: replies to packets in a container's name, and later packets of
/// outside clients. Without the mark, the kernel would forward these packets, and drop them there.
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
    // Foreign bits would be taken for a port.
    let kept = MARKS & !MARK_TO_PROXY;
    let marks = [Expression::mark(0), Expression::masked(0, kept, MARK_TO_PROXY), Expression::set_mark(0)];
    vec![local, listens.to_vec(), only_answers, is_proxys.into_iter().chain(marks).collect()]
}
