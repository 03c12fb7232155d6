//! Source prefixes: what an endpoint with a row of `SOURCES` may send and receive, and its flows at the other end's
//! hook.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::{Context, Result, ensure};
use aya::maps::{Array, HashMap, LpmTrie, MapData, lpm_trie::Key};
use wharf_common::{
    Direction::{Egress, Ingress},
    DropReason::*,
    EndpointConfig, EndpointKey, EndpointProfile, FlowRow, PeerRow, PolicyState, SetsRow, SourcePrefix, SourcesRow,
    flow::{FLOW_BY_STACK, FLOW_PREFIX, FLOW_REPLIED, TCP, UDP},
    map::{self, FLAG_LIVE, FLAG_SOURCES, SOURCES_SHARE},
    policy::IDENTITY_NODE,
    test_packet::TEST_IFINDEX,
};
use wharf_tests::{
    frame::{self, ARP, BROADCAST, IPV6},
    programs::on_interface,
};

use crate::{
    fixture::{
        A, B, Case, ELSEWHERE4, ELSEWHERE6, Endpoint, FROM_CONTAINER, GATEWAY4, GATEWAY6, OK, REDIRECT, SHOT,
        TO_CONTAINER, Who, pair, run_with, udp, with,
    },
    flows::{Sent, collect, now, row, table},
    neighbours::{advertisement, answered, arp_answer, solicitation},
    policy::{DENIES, set},
};

/// A prefix of each family, its first and last address, and the addresses next to it.
const PREFIX4: (IpAddr, u8) = (IpAddr::V4(Ipv4Addr::new(198, 51, 100, 16)), 28);
const INSIDE4: [Ipv4Addr; 2] = [Ipv4Addr::new(198, 51, 100, 16), Ipv4Addr::new(198, 51, 100, 31)];
const BESIDE4: [Ipv4Addr; 2] = [Ipv4Addr::new(198, 51, 100, 15), Ipv4Addr::new(198, 51, 100, 32)];
const PREFIX6: (IpAddr, u8) = (IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 9, 0, 0, 0, 0, 0)), 62);
const INSIDE6: [Ipv6Addr; 2] = [
    Ipv6Addr::new(0x2001, 0xdb8, 9, 0, 0, 0, 0, 0),
    Ipv6Addr::new(0x2001, 0xdb8, 9, 3, 0xffff, 0xffff, 0xffff, 0xffff),
];
const BESIDE6: [Ipv6Addr; 2] = [
    Ipv6Addr::new(0x2001, 0xdb8, 8, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff),
    Ipv6Addr::new(0x2001, 0xdb8, 9, 4, 0, 0, 0, 0),
];
/// Link of another router.
const OTHER_IFINDEX: u32 = 13;

fn inside() -> Vec<IpAddr> {
    INSIDE4.map(IpAddr::from).into_iter().chain(INSIDE6.map(IpAddr::from)).collect()
}

fn beside() -> Vec<IpAddr> {
    BESIDE4.map(IpAddr::from).into_iter().chain(BESIDE6.map(IpAddr::from)).collect()
}

fn key_of(address: IpAddr) -> EndpointKey {
    match address {
        IpAddr::V4(a) => EndpointKey::v4(a.octets()),
        IpAddr::V6(a) => EndpointKey::v6(a.octets()),
    }
}

fn prefix((address, length): (IpAddr, u8)) -> SourcePrefix {
    let length = u32::from(length) + if address.is_ipv4() { 96 } else { 0 };
    let mask = u128::MAX.checked_shl(128 - length).unwrap_or_default();
    SourcePrefix { addr: key_of(address).addr, mask: mask.to_be_bytes() }
}

/// Of an endpoint, in the last slots.
fn sources(who: Who, prefixes: &[(IpAddr, u8)]) -> Result<SourcesRow> {
    let mut row = SourcesRow { epoch: who.epoch, endpoint_id: u16::try_from(who.id)?, ..SourcesRow::default() };
    for (slot, one) in row.prefixes.iter_mut().rev().zip(prefixes) {
        *slot = prefix(*one);
    }
    Ok(row)
}

fn rows(a: &mut Endpoint) -> Result<HashMap<&mut MapData, u32, SourcesRow>> {
    Ok(a.node.map_mut(map::SOURCES).context("sources")?.try_into()?)
}

/// Of A, with the flag.
fn allow(a: &mut Endpoint, row: SourcesRow) -> Result<()> {
    rows(a)?.insert(A.ifindex, row, 0)?;
    a.configure(EndpointConfig { flags: FLAG_LIVE | FLAG_SOURCES, ..A.config() })
}

/// A has a prefix of each family; B has none.
fn router() -> Result<(Endpoint, Endpoint)> {
    let (mut a, b) = pair()?;
    allow(&mut a, sources(A, &[PREFIX4, PREFIX6])?)?;
    Ok((a, b))
}

/// B has a prefix of each family in A's eyes, and so has another endpoint.
fn behind_router() -> Result<(Endpoint, Endpoint)> {
    let (mut a, b) = pair()?;
    let profile = EndpointProfile {
        config: EndpointConfig { flags: FLAG_LIVE | FLAG_SOURCES, ..B.config() },
        container_mac: B.mac,
        host_mac: B.host_mac,
        _pad: [0; 4],
    };
    profiles(&mut a)?.set(B.id, profile, 0)?;
    let other = Who { id: 3, epoch: 103, ..B };
    let both = [(B.ifindex, sources(B, &[PREFIX4, PREFIX6])?), (OTHER_IFINDEX, sources(other, &[PREFIX4, PREFIX6])?)];
    for (ifindex, row) in both {
        rows(&mut a)?.insert(ifindex, row, 0)?;
    }
    Ok((a, b))
}

fn profiles(a: &mut Endpoint) -> Result<Array<&mut MapData, EndpointProfile>> {
    Ok(a.node.map_mut(map::PROFILES).context("profiles")?.try_into()?)
}

/// Any address of the other family's kind that no endpoint has.
fn elsewhere(of: IpAddr) -> IpAddr {
    if of.is_ipv4() { ELSEWHERE4.into() } else { ELSEWHERE6.into() }
}

fn to_b(of: IpAddr) -> IpAddr {
    if of.is_ipv4() { B.v4.into() } else { B.v6.into() }
}

fn to_a(of: IpAddr) -> IpAddr {
    if of.is_ipv4() { A.v4.into() } else { A.v6.into() }
}

fn drop(name: &'static str, packet: Vec<u8>) -> Case {
    Case::drop(name, FROM_CONTAINER, packet, InvalidSourceIp)
}

fn to_stack(name: &'static str, packet: Vec<u8>) -> Case {
    let at_a = vec![(Egress, ForwardedStack)];
    Case { name, program: FROM_CONTAINER, packet, action: OK, at_a, at_b: Vec::new(), output: None }
}

#[test]
fn a_source_in_a_prefix_passes_to_the_stack_and_one_beside_it_does_not() -> Result<()> {
    let (a, b) = router()?;
    for source in inside() {
        to_stack("elsewhere", udp(source, elsewhere(source))).check(&a, &b)?;
        to_stack("to a local endpoint", udp(source, to_b(source))).check(&a, &b)?;
    }
    for source in beside() {
        drop("beside", udp(source, elsewhere(source))).check(&a, &b)?;
        drop("beside, to a local endpoint", udp(source, to_b(source))).check(&a, &b)?;
    }
    Ok(())
}

#[test]
fn every_slot_counts_and_an_unused_one_matches_nothing() -> Result<()> {
    let (mut a, b) = pair()?;
    let hosts = [IpAddr::from(INSIDE4[0]), INSIDE6[0].into()];
    for (slot, host) in (0..SOURCES_SHARE).flat_map(|slot| hosts.map(|host| (slot, host))) {
        let mut row = sources(A, &[])?;
        let whole = (host, if host.is_ipv4() { 32 } else { 128 });
        *row.prefixes.get_mut(slot).context("a slot")? = prefix(whole);
        allow(&mut a, row)?;
        to_stack("the only address", udp(host, elsewhere(host))).check(&a, &b)?;
        let next = if host.is_ipv4() { IpAddr::from(Ipv4Addr::new(198, 51, 100, 17)) } else { INSIDE6[1].into() };
        drop("the next one", udp(next, elsewhere(next))).check(&a, &b)?;
    }
    allow(&mut a, sources(A, &[])?)?;
    for source in inside().into_iter().chain([Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()]) {
        drop("no slot", udp(source, elsewhere(source))).check(&a, &b)?;
    }
    Ok(())
}

#[test]
fn the_row_of_another_endpoint_or_link_allows_nothing() -> Result<()> {
    let (mut a, b) = router()?;
    let right = sources(A, &[PREFIX4, PREFIX6])?;
    for (name, row) in [
        ("another epoch", SourcesRow { epoch: A.epoch + 1, ..right }),
        ("another id", SourcesRow { endpoint_id: 3, ..right }),
    ] {
        rows(&mut a)?.insert(A.ifindex, row, 0)?;
        inside().into_iter().try_for_each(|source| drop(name, udp(source, elsewhere(source))).check(&a, &b))?;
    }
    rows(&mut a)?.insert(A.ifindex, right, 0)?;
    a.configure(A.config())?;
    inside().into_iter().try_for_each(|source| drop("no flag", udp(source, elsewhere(source))).check(&a, &b))?;
    rows(&mut a)?.remove(&A.ifindex)?;
    rows(&mut a)?.insert(OTHER_IFINDEX, right, 0)?;
    a.configure(EndpointConfig { flags: FLAG_LIVE | FLAG_SOURCES, ..A.config() })?;
    inside().into_iter().try_for_each(|source| drop("another link", udp(source, elsewhere(source))).check(&a, &b))
}

#[test]
fn no_prefix_gives_the_address_of_an_endpoint_or_of_the_node() -> Result<()> {
    let (mut a, b) = pair()?;
    let around = [(IpAddr::from([10, 200, 0, 0]), 16), (IpAddr::from([0xfd00_u16, 0x77, 0, 0, 0, 0, 0, 0]), 64)];
    allow(&mut a, sources(A, &[around[0], around[1], PREFIX4, PREFIX6])?)?;
    to_stack("of nobody", udp([10, 200, 7, 7], ELSEWHERE4)).check(&a, &b)?;
    drop("B's v4", udp(B.v4, ELSEWHERE4)).check(&a, &b)?;
    drop("B's v6", udp(B.v6, ELSEWHERE6)).check(&a, &b)?;
    drop("v4, mapped, over v6", udp(INSIDE4[0].to_ipv6_mapped(), ELSEWHERE6)).check(&a, &b)?;
    let mut peers: LpmTrie<&mut MapData, EndpointKey, PeerRow> =
        a.node.map_mut(map::IPCACHE).context("peers")?.try_into()?;
    for source in inside() {
        peers.insert(&Key::new(128, key_of(source)), PeerRow { identity: IDENTITY_NODE, class: 0 }, 0)?;
    }
    inside().into_iter().try_for_each(|source| drop("the node's", udp(source, elsewhere(source))).check(&a, &b))
}

#[test]
fn the_own_address_takes_the_fast_path() -> Result<()> {
    let (mut a, b) = router()?;
    for packet in [udp(A.v4, B.v4), udp(A.v6, B.v6)] {
        ensure!(a.run(FROM_CONTAINER, &packet)?.action == REDIRECT, "directly to B");
    }
    to_stack("v4", udp(A.v4, ELSEWHERE4)).check(&a, &b)?;
    to_stack("v6", udp(A.v6, ELSEWHERE6)).check(&a, &b)?;
    // The slow path writes it.
    ensure!(profiles(&mut a)?.get(&A.id, 0)? == EndpointProfile::default());
    to_stack("in the prefix", udp(INSIDE4[0], ELSEWHERE4)).check(&a, &b)?;
    ensure!(profiles(&mut a)?.get(&A.id, 0)?.config.flags == FLAG_LIVE | FLAG_SOURCES);
    Ok(())
}

#[test]
fn neighbour_messages_may_not_claim_the_prefix() -> Result<()> {
    let (a, b) = router()?;
    let spoof = |name, packet| Case::drop(name, FROM_CONTAINER, packet, NeighbourSpoof).check(&a, &b);
    for (operation, sender, target) in
        [(1, BESIDE4[0], GATEWAY4), (2, INSIDE4[0], GATEWAY4), (1, INSIDE4[0], INSIDE4[0])]
    {
        let claim = frame::arp(operation, (A.mac, sender), ([0; 6], target));
        spoof("ARP", frame::ethernet(BROADCAST, A.mac, ARP, &claim))?;
    }
    for (source, target) in [(BESIDE6[0], GATEWAY6), (INSIDE6[1], INSIDE6[1])] {
        let claim = frame::neighbour(135, source, GATEWAY6, target, A.mac);
        spoof("solicitation", frame::ethernet(A.host_mac, A.mac, IPV6, &claim))?;
    }
    let claim = frame::neighbour(136, INSIDE6[1], GATEWAY6, INSIDE6[1], A.mac);
    spoof("advertisement", frame::ethernet(A.host_mac, A.mac, IPV6, &claim))
}

#[test]
fn an_address_of_the_prefix_may_ask_for_the_gateway() -> Result<()> {
    let (a, b) = router()?;
    let (asker4, asker6) = (INSIDE4[0], INSIDE6[1]);
    let question = frame::ethernet(BROADCAST, A.mac, ARP, &frame::arp(1, (A.mac, asker4), ([0; 6], GATEWAY4)));
    answered("ARP", question, arp_answer(asker4)).check(&a, &b)?;
    let question = solicitation(asker6, GATEWAY6, GATEWAY6, A.mac);
    answered("solicitation", question, advertisement(asker6)).check(&a, &b)
}

#[test]
fn a_destination_in_the_prefix_is_received_and_one_beside_it_is_not() -> Result<()> {
    let (a, b) = router()?;
    let passed = |packet: Vec<u8>| Case {
        name: "in the prefix",
        program: TO_CONTAINER,
        output: Some(with(packet.clone(), 0, &[A.mac, A.host_mac].concat())),
        packet,
        action: OK,
        at_a: vec![(Ingress, ForwardedStack)],
        at_b: Vec::new(),
    };
    for destination in inside() {
        passed(udp(elsewhere(destination), destination)).check(&a, &b)?;
    }
    for destination in beside() {
        let packet = udp(elsewhere(destination), destination);
        Case::drop("beside", TO_CONTAINER, packet, NotOurAddress).check(&a, &b)?;
    }
    Ok(())
}

#[test]
fn a_test_packet_from_the_prefix_passes_and_leaves_no_trace() -> Result<()> {
    let (mut a, b) = router()?;
    let before = (a.counters()?, b.counters()?);
    for source in inside() {
        for to in [elsewhere(source), to_b(source)] {
            let outcome = run_with(a.program(FROM_CONTAINER)?, &udp(source, to), &on_interface(TEST_IFINDEX), 1)?;
            ensure!(outcome.action == OK, "{source} to {to}: {outcome:?}");
        }
    }
    for source in beside() {
        let packet = udp(source, elsewhere(source));
        let outcome = run_with(a.program(FROM_CONTAINER)?, &packet, &on_interface(TEST_IFINDEX), 1)?;
        ensure!(outcome.action == SHOT, "{source}: {outcome:?}");
    }
    ensure!((a.counters()?, b.counters()?) == before);
    for name in [map::FLOWS, map::FLOWS_NEW] {
        ensure!(table(&mut a, name)?.iter().next().is_none(), "{name}");
    }
    Ok(())
}

fn judged(a: &mut Endpoint, b: SetsRow, generation: u32) -> Result<()> {
    set(a, [SetsRow::default(), b], PolicyState { generation, flags: 0 })
}

const SENDS_NOTHING: SetsRow = SetsRow { ingress: 0, egress: DENIES };
const RECEIVES_NOTHING: SetsRow = SetsRow { ingress: DENIES, egress: 0 };

#[test]
fn the_receivers_hook_asks_the_routers_egress_rules() -> Result<()> {
    let (mut a, _b) = behind_router()?;
    judged(&mut a, SENDS_NOTHING, 1)?;
    for source in inside() {
        let packet = udp(source, to_a(source));
        // A row of another router's flow is not B's.
        for (came_by, expected) in [(B.ifindex, SHOT), (OTHER_IFINDEX, OK), (B.ifindex, SHOT), (99, OK)] {
            let (action, _) = a.run_marked(TO_CONTAINER, &packet, 0, came_by)?;
            ensure!(action == expected, "{source} by {came_by}: {action}");
        }
    }
    for source in beside() {
        let (action, _) = a.run_marked(TO_CONTAINER, &udp(source, to_a(source)), 0, B.ifindex)?;
        ensure!(action == OK, "{source}: {action}");
    }
    Ok(())
}

/// A flow between A and an address behind B.
fn flow(behind: IpAddr) -> Sent {
    Sent::new(behind, UDP, (40_000, 53))
}

/// Epochs of A's end and the other.
fn epochs(sent: Sent, row: FlowRow) -> (u32, u32) {
    if sent.a_is_high() { (row.high_epoch, row.low_epoch) } else { (row.low_epoch, row.high_epoch) }
}

fn row_of(a: &mut Endpoint, sent: Sent) -> Result<FlowRow> {
    Ok(row(a, &sent.key())?.with_context(|| format!("no row of {sent:?}"))?.0)
}

fn arrives(a: &Endpoint, sent: Sent, came_by: u32) -> Result<u32> {
    Ok(a.run_marked(TO_CONTAINER, &sent.back().packet(), 0, came_by)?.0)
}

fn leaves(a: &Endpoint, sent: Sent) -> Result<u32> {
    Ok(a.run_marked(FROM_CONTAINER, &sent.packet(), 0, A.ifindex)?.0)
}

#[test]
fn a_flow_of_the_router_ends_at_the_next_packet_after_its_rules_change() -> Result<()> {
    let (mut a, _b) = behind_router()?;
    for (number, behind) in (0..).zip(inside()) {
        let (sent, generation) = (flow(behind), 1 + 4 * number);
        judged(&mut a, SetsRow::default(), generation)?;
        ensure!(arrives(&a, sent, B.ifindex)? == OK && leaves(&a, sent)? == OK, "{behind}");
        let begun = row_of(&mut a, sent)?;
        ensure!(epochs(sent, begun) == (101, 102) && begun.owner == 2, "{begun:?}");
        ensure!(begun.flags & (FLOW_PREFIX | FLOW_BY_STACK) == FLOW_PREFIX | FLOW_BY_STACK, "{begun:?}");
        // The rules change, and A answers; then they change back, and the router goes on.
        judged(&mut a, SENDS_NOTHING, generation + 1)?;
        ensure!(leaves(&a, sent)? == SHOT, "{behind}: an answer");
        ensure!(arrives(&a, sent, B.ifindex)? == SHOT, "{behind}: the router's");
        judged(&mut a, SetsRow::default(), generation + 2)?;
        ensure!(leaves(&a, sent)? == OK, "{behind}: an answer");
        ensure!(row_of(&mut a, sent)?.generation == generation + 2, "both ends' rules were asked");
    }
    Ok(())
}

#[test]
fn a_flow_to_the_router_is_judged_where_both_ends_are_known() -> Result<()> {
    let (mut a, _b) = behind_router()?;
    for (number, behind) in (0..).zip(inside()) {
        let (sent, generation) = (flow(behind), 1 + 4 * number);
        // As the router's hook leaves the row.
        let (low_epoch, high_epoch) = if sent.a_is_high() { (102, 101) } else { (101, 102) };
        let by_high = if sent.a_is_high() { wharf_common::flow::FLOW_BY_HIGH } else { 0 };
        let flags = FLOW_PREFIX | FLOW_BY_STACK | FLOW_REPLIED | by_high;
        let begun = FlowRow { seen: now()?, low_epoch, high_epoch, flags, owner: 1, generation, rule: 0 };
        table(&mut a, map::FLOWS)?.insert(sent.key(), begun, 0)?;
        judged(&mut a, RECEIVES_NOTHING, generation + 1)?;
        ensure!(leaves(&a, sent)? == OK, "{behind}: the router's hook drops it");
        ensure!(row_of(&mut a, sent)?.generation == generation, "only A's rules were asked");
        ensure!(arrives(&a, sent, B.ifindex)? == SHOT, "{behind}: an answer");
        judged(&mut a, SetsRow::default(), generation + 2)?;
        ensure!(arrives(&a, sent, B.ifindex)? == OK, "{behind}: an answer");
        ensure!(row_of(&mut a, sent)?.generation == generation + 2, "both ends' rules were asked");
    }
    Ok(())
}

#[test]
fn no_endpoint_inherits_a_flow_of_a_router() -> Result<()> {
    let (mut a, _b) = behind_router()?;
    for behind in inside() {
        let sent = flow(behind);
        let from_outside = Sent { ports: (40_001, 53), ..sent };
        for (sent, came_by, epoch) in [
            (sent, B.ifindex, 102),
            (sent, OTHER_IFINDEX, 103),
            (sent, B.ifindex, 102),
            (from_outside, B.ifindex, 102),
            (from_outside, 99, 0),
        ] {
            ensure!(arrives(&a, sent, came_by)? == OK, "{behind} by {came_by}");
            let is = row_of(&mut a, sent)?;
            ensure!(epochs(sent, is) == (101, epoch), "{behind} by {came_by}: {is:?}");
        }
        // The router is deleted, and A goes on: a flow of A's own.
        let before = rows(&mut a)?.get(&B.ifindex, 0)?;
        rows(&mut a)?.remove(&B.ifindex)?;
        ensure!(leaves(&a, sent)? == OK, "{behind}");
        let is = row_of(&mut a, sent)?;
        ensure!(epochs(sent, is) == (101, 0) && is.owner == 1 && is.flags & FLOW_PREFIX == 0, "{behind}: {is:?}");
        rows(&mut a)?.insert(B.ifindex, before, 0)?;
    }
    Ok(())
}

#[test]
fn a_collection_leaves_silent_flows_while_their_owner_lives() -> Result<()> {
    let (mut a, _b) = behind_router()?;
    // The row's other end, its owner, and whether the owner lives.
    let cases = [(102, 2, true), (102, 1, true), (103, 2, false), (102, 3, false)];
    let mut expected = Vec::new();
    for (number, (epoch, owner, lives)) in (0_u16..).zip(cases) {
        let sent = Sent::new(INSIDE4[0].into(), TCP, (1_000 + number, 443));
        let of_a = if owner == 1 { 101 } else { 100 };
        let (low_epoch, high_epoch) = if sent.a_is_high() { (epoch, of_a) } else { (of_a, epoch) };
        let flags = FLOW_PREFIX | FLOW_REPLIED;
        let row = FlowRow { seen: now()? - 20, low_epoch, high_epoch, flags, owner, ..FlowRow::default() };
        table(&mut a, map::FLOWS)?.insert(sent.key(), row, 0)?;
        expected.push((sent, lives));
    }
    collect(&mut a)?;
    for (sent, lives) in expected {
        ensure!(row(&mut a, &sent.key())?.is_some() == lives, "{sent:?}");
    }
    rows(&mut a)?.remove(&B.ifindex)?;
    collect(&mut a)?;
    ensure!(row(&mut a, &Sent::new(INSIDE4[0].into(), TCP, (1_000, 443)).key())?.is_none(), "the router is deleted");
    Ok(())
}
