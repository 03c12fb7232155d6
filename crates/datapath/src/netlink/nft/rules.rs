//! The chains and their rules. A nat chain sees a connection's first packet.

use std::{collections::BTreeMap, net::Ipv6Addr};

use wharf_common::{
    flow::UDP,
    policy::{MARK_BY_SERVICE, MARK_PROXIED_EGRESS, MARK_TURNED, MARK_UNDECIDED},
};
use wharf_core::nat::Masquerade;
use wharf_names::link::PREFIX as LINK_PREFIX;

use crate::ROUTER_IFNAME;

use super::{
    expr::{Expression, Field, Rule},
    table::{Chain, Names, octets},
    wire::{IPV4, IPV6},
};

/// `enum nf_inet_hooks` of `linux/netfilter.h`.
pub(super) const PRE_ROUTING: u32 = 0;
const LOCAL_IN: u32 = 1;
pub(super) const FORWARD: u32 = 2;
pub(super) const LOCAL_OUT: u32 = 3;
const POST_ROUTING: u32 = 4;
/// `NF_IP_PRI_*` of `linux/netfilter_ipv4.h`; the same for IPv6.
const DESTINATION: i32 = -100;
pub(super) const FILTER: i32 = 0;
const RAW: i32 = -300;
const SOURCE: i32 = 100;
pub(super) const ACCEPT: u32 = 1;

pub(super) fn chains(masquerade: Option<&Masquerade>, redirects: bool) -> BTreeMap<String, Chain> {
    let chain = |name: &str, kind: &str, hook, priority, rules| {
        (name.to_owned(), Chain { kind: kind.to_owned(), hook, priority, policy: ACCEPT, rules })
    };
    let mut chains = BTreeMap::from([
        chain("prerouting", "nat", PRE_ROUTING, DESTINATION, published(None)),
        chain("output", "nat", LOCAL_OUT, DESTINATION, published(Some(asked_by_the_node()))),
        chain("postrouting", "nat", POST_ROUTING, SOURCE, leaving(masquerade)),
        chain("untranslated", "filter", POST_ROUTING, SOURCE, masquerade.map_or_else(Vec::new, |_| untranslated())),
    ]);
    if masquerade.is_some() {
        chains.extend([
            chain("spoofed", "filter", PRE_ROUTING, RAW, vec![of_a_container(true), of_a_container(false)]),
            chain("spoofed-forwarded", "filter", FORWARD, FILTER, vec![of_the_node()]),
        ]);
    }
    if masquerade.is_some_and(|m| m.services) {
        chains.extend([
            chain("undecided", "filter", FORWARD, FILTER, undecided_forwarded()),
            chain("undecided-input", "filter", LOCAL_IN, FILTER, vec![undecided([])]),
            chain("translated", "filter", PRE_ROUTING, RAW, vec![translated()]),
        ]);
    }
    if let Some(overlay) = masquerade.and_then(|m| m.overlay.as_ref()) {
        let both = |rules: fn(bool, u16) -> Vec<Rule>| [rules(true, overlay.port), rules(false, overlay.port)].concat();
        chains.extend([
            chain("overlay", "filter", FORWARD, FILTER, both(in_the_name_of_the_node)),
            chain("overlay-received", "filter", PRE_ROUTING, RAW, both(received)),
            chain("overlay-sent", "filter", LOCAL_OUT, RAW, both(sent)),
        ]);
    }
    if redirects {
        chains.extend(super::redirects::chains(masquerade.is_some()));
    }
    chains
}

/// Drops a packet from outside in the name of a container of the node: policy would judge it as the container's.
fn of_a_container(v4: bool) -> Rule {
    let source = [Expression::address(0, v4, Field::Source), Expression::within(0, Names::of(v4).pools)];
    let outside = Expression::arrives_by_none_of(LINK_PREFIX).into_iter().chain(source);
    rule(v4, outside.chain(Expression::source_is_behind(LINK_PREFIX)).chain([Expression::drop()]))
}

/// Drops a packet from outside in the name of the node, which every policy accepts. For IPv4, the kernel does. Only
/// forwarded packets: several links may have one link-local address.
fn of_the_node() -> Rule {
    let outside = Expression::arrives_by_none_of(LINK_PREFIX).into_iter();
    rule(false, outside.chain(Expression::from_the_node()).chain([Expression::drop()]))
}

/// Drops packets to a service that the rules deny. For other containers, their programs decide.
fn undecided(elsewhere: impl IntoIterator<Item = Expression>) -> Rule {
    let denied = [
        Expression::mark(0),
        Expression::masked(0, MARK_UNDECIDED | MARK_BY_SERVICE, 0),
        Expression::is(0, &MARK_UNDECIDED.to_ne_bytes()),
    ];
    denied.into_iter().chain(elsewhere).chain([Expression::drop()]).collect()
}

/// Also drops accepted packets to a service that go to containers elsewhere with the mark, which a judgement removes.
fn undecided_forwarded() -> Vec<Rule> {
    let dropped = |v4| {
        let to_containers =
            [Expression::address(0, v4, Field::Destination), Expression::within(0, Names::of(v4).excluded)];
        let unjudged = to_containers.into_iter().chain(Expression::marked(MARK_UNDECIDED));
        rule(v4, unjudged.chain(Expression::leaves_by_none_of(LINK_PREFIX)).chain([Expression::drop()]))
    };
    vec![undecided(Expression::leaves_by_none_of(LINK_PREFIX)), dropped(true), dropped(false)]
}

/// Connection tracking saw the packet before its judgement.
fn translated() -> Rule {
    let by_router = Expression::arrives_by(ROUTER_IFNAME).into_iter();
    by_router.chain(Expression::marked(MARK_TURNED)).chain([Expression::untrack()]).collect()
}

fn to_overlay(port: u16) -> [Expression; 4] {
    [
        Expression::transport(0),
        Expression::is(0, &[UDP]),
        Expression::destination_port(0),
        Expression::is(0, &port.to_be_bytes()),
    ]
}

/// Drops datagrams to another node's overlay that would get an address of this node as source. The list of nodes may
/// lack addresses, so datagrams from the pools are dropped to any.
fn in_the_name_of_the_node(v4: bool, port: u16) -> Vec<Rule> {
    let names = Names::of(v4);
    let of_pools = [
        Expression::address(0, v4, Field::Source),
        Expression::within(0, names.pools),
        Expression::address(0, v4, Field::Destination),
        Expression::outside(0, names.excluded),
    ];
    let of_others = [
        Expression::address(0, v4, Field::Destination),
        Expression::within(0, names.nodes),
        Expression::address(0, v4, Field::Source),
        Expression::outside(0, names.nodes),
    ];
    let dropped =
        |from: [Expression; 4]| rule(v4, from.into_iter().chain(to_overlay(port)).chain([Expression::drop()]));
    vec![dropped(of_pools), dropped(of_others)]
}

fn received(v4: bool, port: u16) -> Vec<Rule> {
    untracked(v4, Field::Source, port)
}

fn sent(v4: bool, port: u16) -> Vec<Rule> {
    untracked(v4, Field::Destination, port)
}

fn untracked(v4: bool, node: Field, port: u16) -> Vec<Rule> {
    let other = [Expression::address(0, v4, node), Expression::within(0, Names::of(v4).nodes)];
    vec![rule(v4, other.into_iter().chain(to_overlay(port)).chain([Expression::untrack()]))]
}

pub(super) fn family(v4: bool) -> u8 {
    if v4 { IPV4 } else { IPV6 }
}

pub(super) const fn words(v4: bool) -> u32 {
    if v4 { 1 } else { 4 }
}

pub(super) fn rule(v4: bool, rest: impl IntoIterator<Item = Expression>) -> Rule {
    [Expression::family(0), Expression::is(0, &[family(v4)])].into_iter().chain(rest).collect()
}

/// The proxy's connections in the node's name. Translated, they would reach the published container as the node, which
/// its rules always allow.
fn asked_by_the_node() -> Rule {
    let from_the_node = Expression::from_the_node().into_iter().chain([Expression::give_back()]);
    Expression::marked(MARK_PROXIED_EGRESS).into_iter().chain(from_the_node).collect()
}

/// Mappings with a host IP come first.
fn published(except: Option<Rule>) -> Vec<Rule> {
    // The kernel does not route from ::1 to another interface. Without this rule a client does not try 127.0.0.1.
    let loopback6 = [
        Expression::address(0, false, Field::Destination),
        Expression::is(0, &Ipv6Addr::LOCALHOST.octets()),
        Expression::give_back(),
    ];
    // Fast path for connections that are not for the node.
    let elsewhere = Expression::not_to_the_node().into_iter().chain([Expression::give_back()]).collect();
    let mut rules = vec![elsewhere];
    rules.extend(except);
    rules.push(rule(false, loopback6));
    for v4 in [true, false] {
        let (family, address, names) = (family(v4), words(v4), Names::of(v4));
        let port = |word| [Expression::transport(word), Expression::destination_port(word + 1)];
        let translate = |map| [Expression::map(0, map, 0), Expression::translate_destination(family, 0, address)];
        let destination = [Expression::address(0, v4, Field::Destination)];
        rules.push(rule(v4, destination.into_iter().chain(port(address)).chain(translate(names.ports_of))));
        rules.push(rule(v4, port(0).into_iter().chain(translate(names.ports))));
    }
    rules
}

/// Matches packets from pools to outside, unless source or destination keeps its address. A network behind a container
/// is not outside: that container's rules would accept a packet from the node.
pub(super) fn leaves(v4: bool) -> Vec<Expression> {
    let names = Names::of(v4);
    let mut leaves = vec![
        Expression::address(0, v4, Field::Source),
        Expression::within(0, names.pools),
        Expression::address(0, v4, Field::Source),
        Expression::outside(0, names.own),
        Expression::address(0, v4, Field::Destination),
        Expression::outside(0, names.excluded),
        Expression::address(0, v4, Field::Destination),
        Expression::outside(0, names.own),
    ];
    leaves.extend(Expression::leaves_by_none_of(LINK_PREFIX));
    leaves
}

/// Invalid packets pass no nat chain and would leave with the container's address.
fn untranslated() -> Vec<Rule> {
    let invalid = |v4| rule(v4, leaves(v4).into_iter().chain(Expression::invalid()).chain([Expression::drop()]));
    vec![invalid(true), invalid(false)]
}

fn leaving(masquerade: Option<&Masquerade>) -> Vec<Rule> {
    let mut rules = Vec::new();
    for v4 in [true, false] {
        let names = Names::of(v4);
        let source = Expression::address(0, v4, Field::Source);
        if let Some(masquerade) = masquerade {
            let chosen = if v4 { masquerade.source4.map(Into::into) } else { masquerade.source6.map(Into::into) };
            let mut leaves = leaves(v4);
            match chosen {
                Some(ip) => {
                    leaves.extend([Expression::load(0, &octets(ip)), Expression::translate_source(family(v4), 0)]);
                }
                None => leaves.push(Expression::masquerade()),
            }
            rules.push(rule(v4, leaves));
        }
        // A container that reaches itself would reply directly, past the translation. Most kernels' nf_tables cannot
        // compare two addresses, so a set has the pairs.
        let address = words(v4);
        let hairpin = [
            source,
            Expression::address(address, v4, Field::Destination),
            Expression::transport(2 * address),
            Expression::destination_port(2 * address + 1),
            Expression::within(0, names.hairpin),
        ];
        rules.push(rule(v4, hairpin.into_iter().chain(Expression::translated()).chain([Expression::masquerade()])));
    }
    // A container cannot reply to the node's loopback.
    let loopback = [Expression::first_byte4(0, Field::Source), Expression::is(0, &[127])];
    rules.push(rule(true, loopback.into_iter().chain(Expression::translated()).chain([Expression::masquerade()])));
    rules
}
