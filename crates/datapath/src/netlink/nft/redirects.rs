//! The chains of redirects to the proxy: what the programs marked comes to its socket.

use wharf_common::{
    flow::{TCP, UDP},
    policy::{MARK_PORT_SHIFT, MARK_PROXIED_EGRESS, MARK_PROXIED_INGRESS, MARK_TO_PROXY, MARK_TURNED},
};

use super::{
    expr::{Expression, Rule, SocketKey},
    rules::{ACCEPT, FILTER, FORWARD, LOCAL_OUT, PRE_ROUTING, leaves, rule, words},
    table::Chain,
};

/// `NF_IP_PRI_RAW` and `NF_IP_PRI_MANGLE` of `linux/netfilter_ipv4.h`: before connection tracking, and before destinations are translated.
const RAW: i32 = -300;
const MANGLE: i32 = -150;
/// After destinations are translated (`NF_IP_PRI_NAT_DST` is -100), also those of answers to what was masqueraded.
const TRANSLATED: i32 = -50;
/// The node's loopback addresses, where the proxy listens.
const LOOPBACK4: [u8; 4] = [127, 0, 0, 1];
const LOOPBACK6: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
/// The marks, without a port.
const MARKS: u32 = (1 << MARK_PORT_SHIFT) - 1;

/// The zone of connection tracking in which the proxy's connections with translated sources begin: a number that nobody chooses by chance.
const ZONE: u16 = 0x7768;

/// The chains by their names.
pub(super) fn chains(masquerades: bool) -> Vec<(String, Chain)> {
    let chain = |name: &str, hook, priority, rules| {
        let kind = "filter".to_owned();
        (name.to_owned(), Chain { kind, hook, priority, policy: ACCEPT, rules })
    };
    // Somebody removed the rules that lead it to the proxy.
    let lost = Expression::marked(MARK_TO_PROXY).into_iter().chain([Expression::drop()]).collect();
    let mut chains = vec![
        chain("redirected-untracked", PRE_ROUTING, RAW, vec![untracked()]),
        chain("redirected", PRE_ROUTING, MANGLE, redirected()),
        chain("redirected-answers", PRE_ROUTING, TRANSLATED, answers()),
        chain("redirected-lost", FORWARD, FILTER, vec![lost]),
    ];
    if masquerades {
        chains.push(chain("redirected-apart", LOCAL_OUT, RAW, [true, false].map(apart).into()));
    }
    chains
}

/// What the proxy sends in a container's name, with a source that is to be translated. A client may choose the port that the proxy has; to connection tracking
/// both would be one connection, and what the client sends to the proxy would be translated. So the proxy's begins in a zone of its own; answers to it
/// are to the translated source, which no other connection has, and need none.
fn apart(v4: bool) -> Rule {
    let marked = Expression::marked(MARK_PROXIED_EGRESS).into_iter();
    rule(v4, marked.chain(leaves(v4)).chain([Expression::load(0, &ZONE.to_ne_bytes()), Expression::set_zone(0)]))
}

/// Connection tracking has seen what is turned round. It would take a connection whose destination was translated for another one, and
/// the proxy's answers would not be translated back.
fn untracked() -> Rule {
    let is_turned = Expression::marked(MARK_TO_PROXY).into_iter().chain(Expression::marked(MARK_TURNED));
    is_turned.chain([Expression::untrack()]).collect()
}

fn redirected() -> Vec<Rule> {
    let ends = [(true, TCP), (false, TCP), (true, UDP), (false, UDP)];
    // The proxy closed its socket just now. A socket of the node's at any address would get the packet, whatever its destination is.
    let is_left = Expression::marked(MARK_TO_PROXY).into_iter().chain(Expression::marked(!MARKS));
    let dropped = is_left.chain([Expression::drop()]).collect();
    ends.map(|(v4, protocol)| listens(v4, protocol)).into_iter().chain([dropped]).collect()
}

/// The first packet of a connection, and each of UDP, goes to the socket that listens at the mark's port, and is routed without it.
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

/// What comes from elsewhere and is for a connection of the proxy's: answers to what it sent in the name of a container, and what goes on with a
/// connection that a client elsewhere began. Otherwise the kernel would find the socket all the same, and drop what it then forwards.
fn answers() -> Vec<Rule> {
    // One lookup of the route decides for what is the node's own.
    let local = Expression::to_the_node().into_iter().chain([Expression::give_back()]).collect();
    // A socket that listens at any address is no part of the connection.
    let listens = [Expression::socket(0, SocketKey::Wildcard), Expression::is(0, &[1]), Expression::give_back()];
    // A UDP socket without the proxy's mark only sends answers; it takes nothing.
    let only_answers = [Expression::transport(0), Expression::is(0, &[UDP]), Expression::socket(0, SocketKey::Mark)]
        .into_iter()
        .chain([Expression::masked(0, MARK_PROXIED_EGRESS | MARK_PROXIED_INGRESS, 0), Expression::is(0, &[0; 4])])
        .chain([Expression::give_back()])
        .collect();
    let is_proxys = [Expression::socket(0, SocketKey::Transparent), Expression::is(0, &[1])];
    // What others have in the place of the port would pass for one.
    let kept = MARKS & !MARK_TO_PROXY;
    let marks = [Expression::mark(0), Expression::masked(0, kept, MARK_TO_PROXY), Expression::set_mark(0)];
    vec![local, listens.to_vec(), only_answers, is_proxys.into_iter().chain(marks).collect()]
}
