//! The chains and their rules.
//!
//! A chain of type nat sees the first packet of each connection; the kernel's connection tracking does the rest.

use std::{collections::BTreeMap, net::Ipv6Addr};

use wharf_common::policy::{MARK_PROXIED_EGRESS, MARK_UNDECIDED};
use wharf_core::nat::Masquerade;
use wharf_names::link::PREFIX as LINK_PREFIX;

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
/// `NF_IP_PRI_NAT_DST` `NF_IP_PRI_FILTER` and `NF_IP_PRI_NAT_SRC` of `linux/netfilter_ipv4.h`, which are IPv6's too.
const DESTINATION: i32 = -100;
pub(super) const FILTER: i32 = 0;
const SOURCE: i32 = 100;
/// `NF_ACCEPT` of `linux/netfilter.h`.
pub(super) const ACCEPT: u32 = 1;

/// Every chain by its name.
pub(super) fn chains(masquerade: Option<&Masquerade>, redirects: bool) -> BTreeMap<String, Chain> {
    let chain = |name: &str, kind: &str, hook, priority, rules| {
        (name.to_owned(), Chain { kind: kind.to_owned(), hook, priority, policy: ACCEPT, rules })
    };
    let mut chains = BTreeMap::from([
        // What comes from elsewhere passes prerouting, what the node itself sends passes output.
        chain("prerouting", "nat", PRE_ROUTING, DESTINATION, published(None)),
        chain("output", "nat", LOCAL_OUT, DESTINATION, published(Some(asked_by_the_node()))),
        chain("postrouting", "nat", POST_ROUTING, SOURCE, leaving(masquerade)),
        chain("untranslated", "filter", POST_ROUTING, SOURCE, masquerade.map_or_else(Vec::new, |_| untranslated())),
    ]);
    if masquerade.is_some_and(|m| m.services) {
        chains.extend([
            chain("undecided", "filter", FORWARD, FILTER, vec![undecided(Expression::leaves_by_none_of(LINK_PREFIX))]),
            chain("undecided-input", "filter", LOCAL_IN, FILTER, vec![undecided([])]),
        ]);
    }
    if redirects {
        chains.extend(super::redirects::chains(masquerade.is_some()));
    }
    chains
}

/// What a container sends to a service that its rules deny goes to other containers alone, whose programs judge it.
fn undecided(elsewhere: impl IntoIterator<Item = Expression>) -> Rule {
    Expression::marked(MARK_UNDECIDED).into_iter().chain(elsewhere).chain([Expression::drop()]).collect()
}

pub(super) fn family(v4: bool) -> u8 {
    if v4 { IPV4 } else { IPV6 }
}

/// Words of an address in registers.
pub(super) const fn words(v4: bool) -> u32 {
    if v4 { 1 } else { 4 }
}

/// A rule for one family.
pub(super) fn rule(v4: bool, rest: impl IntoIterator<Item = Expression>) -> Rule {
    [Expression::family(0), Expression::is(0, &[family(v4)])].into_iter().chain(rest).collect()
}

/// What the node's proxy asks in the node's name, because a container asked an address of the node. A container that has the port would see the
/// node, which its rules always let in, instead of the one that asks. What the proxy sends in a container's name is not meant.
fn asked_by_the_node() -> Rule {
    let from_the_node = Expression::from_the_node().into_iter().chain([Expression::give_back()]);
    Expression::marked(MARK_PROXIED_EGRESS).into_iter().chain(from_the_node).collect()
}

/// Published ports become containers, but for what a rule takes out; those of one address come first.
fn published(except: Option<Rule>) -> Vec<Rule> {
    // The kernel routes no packet from ::1 to another interface. A refused connection lets a client try 127.0.0.1 at
    // once; a translated one would be lost.
    let loopback6 = [
        Expression::address(0, false, Field::Destination),
        Expression::is(0, &Ipv6Addr::LOCALHOST.octets()),
        Expression::give_back(),
    ];
    // One lookup of the route decides for most connections, which go elsewhere.
    let elsewhere = Expression::not_to_the_node().into_iter().chain([Expression::give_back()]).collect();
    let mut rules = vec![elsewhere];
    rules.extend(except);
    rules.push(rule(false, loopback6));
    for v4 in [true, false] {
        let (family, address, names) = (family(v4), words(v4), Names::of(v4));
        let port = |word| [Expression::transport(word), Expression::destination_port(word + 1)];
        // The value of the map replaces the key: the container's address, behind it the port.
        let translate = |map| [Expression::map(0, map, 0), Expression::translate_destination(family, 0, address)];
        let destination = [Expression::address(0, v4, Field::Destination)];
        rules.push(rule(v4, destination.into_iter().chain(port(address)).chain(translate(names.ports_of))));
        rules.push(rule(v4, port(0).into_iter().chain(translate(names.ports))));
    }
    rules
}

/// The rule goes on for what a container sends out of the pools, unless the container keeps its address or sends it to one that
/// does.
pub(super) fn leaves(v4: bool) -> Vec<Expression> {
    let names = Names::of(v4);
    vec![
        Expression::address(0, v4, Field::Source),
        Expression::within(0, names.pools),
        Expression::address(0, v4, Field::Source),
        Expression::outside(0, names.own),
        Expression::address(0, v4, Field::Destination),
        Expression::outside(0, names.excluded),
        Expression::address(0, v4, Field::Destination),
        Expression::outside(0, names.own),
    ]
}

/// What connection tracking takes for no part of any connection passes no chain of type nat and would leave with the container's own
/// address. The other end cannot answer it, and some networks punish it.
fn untranslated() -> Vec<Rule> {
    let invalid = |v4| rule(v4, leaves(v4).into_iter().chain(Expression::invalid()).chain([Expression::drop()]));
    vec![invalid(true), invalid(false)]
}

/// What leaves takes an address that the other end can answer to.
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
        // A container that reaches itself would answer itself directly, past the translation. nf_tables of most kernels
        // cannot compare two addresses, so a set has the pairs. Containers that reach each other keep their source.
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
    // A container cannot answer to the node's loopback.
    let loopback = [Expression::first_byte4(0, Field::Source), Expression::is(0, &[127])];
    rules.push(rule(true, loopback.into_iter().chain(Expression::translated()).chain([Expression::masquerade()])));
    rules
}
