//! What becomes of packets that policy denies: also of those that the endpoint's own program has counted as forwarded
//! before.

use std::net::IpAddr;

use anyhow::{Context, Result, ensure};
use aya::maps::{Array, HashMap, LpmTrie, MapData, lpm_trie::Key};
use wharf_common::{
    CellKey, CellRow,
    Direction::{Egress, Ingress},
    DropReason::{ForwardedLocal, ForwardedStack, PeerPolicyDenied, PolicyDenied},
    EndpointKey, PeerRow, PolicyState, PortKey, SetsRow,
    flow::{ICMP, ICMPV6, UDP},
    map,
    policy::{
        ACCEPT, Choice, DENY, Hit, MARK_BY_SERVICE, MARK_UNDECIDED, NO_RANK, PASS, PEER_SERVICE, POLICY_AUDITS,
        SET_DENIES,
    },
};
use wharf_tests::frame;

use crate::fixture::{A, B, ELSEWHERE4, ELSEWHERE6, Endpoint, FROM_CONTAINER, OK, SHOT, TO_CONTAINER, pair, udp, with};

/// A rule set without rows. No peer's address has a row either, so it denies every packet.
pub(crate) const DENIES: u32 = 1;

/// The rule sets of A and B, and the state of the rules.
pub(crate) fn set(a: &mut Endpoint, sets: [SetsRow; 2], state: PolicyState) -> Result<()> {
    let mut rows: Array<&mut MapData, SetsRow> = a.node.map_mut(map::POLICY_SETS).context("sets")?.try_into()?;
    for (who, row) in [A, B].into_iter().zip(sets) {
        rows.set(who.id, row, 0)?;
    }
    let mut states: Array<&mut MapData, PolicyState> =
        a.node.map_mut(map::POLICY_STATE).context("state")?.try_into()?;
    Ok(states.set(0, state, 0)?)
}

/// The packet is judged by the endpoint's own program, or, of an endpoint that is watched, by the node's.
fn watch(a: &mut Endpoint, is_watched: bool) -> Result<()> {
    if is_watched { a.trace() } else { a.configure(A.config()) }
}

#[test]
fn what_policy_denies_counts_as_denied_alone() -> Result<()> {
    let (mut a, b) = pair()?;
    let (none, sends, gets) =
        (SetsRow::default(), SetsRow { egress: DENIES, ingress: 0 }, SetsRow { egress: 0, ingress: DENIES });
    let from_node = |packet| with(packet, 6, &A.host_mac);
    let mut generation = 0;
    for is_watched in [false, true] {
        watch(&mut a, is_watched)?;
        for (program, packet, sets, direction, forwarded, denied) in [
            (FROM_CONTAINER, udp(A.v4, ELSEWHERE4), [sends, none], Egress, ForwardedStack, PolicyDenied),
            (FROM_CONTAINER, udp(A.v6, ELSEWHERE6), [sends, none], Egress, ForwardedStack, PolicyDenied),
            (FROM_CONTAINER, udp(A.v4, B.v4), [sends, none], Egress, ForwardedLocal, PolicyDenied),
            (FROM_CONTAINER, udp(A.v4, B.v4), [none, gets], Egress, ForwardedLocal, PeerPolicyDenied),
            (FROM_CONTAINER, udp(A.v6, B.v6), [none, gets], Egress, ForwardedLocal, PeerPolicyDenied),
            (TO_CONTAINER, from_node(udp(ELSEWHERE4, A.v4)), [gets, none], Ingress, ForwardedStack, PolicyDenied),
            (TO_CONTAINER, from_node(udp(ELSEWHERE6, A.v6)), [gets, none], Ingress, ForwardedStack, PolicyDenied),
        ] {
            for flags in [0, POLICY_AUDITS] {
                generation += 1;
                set(&mut a, sets, PolicyState { generation, flags })?;
                let (at_a, at_b) = (a.counters()?, b.counters()?);
                let action = a.run(program, &packet)?.action;
                let is_denied = flags == 0;
                ensure!((action == SHOT) == is_denied, "{program}, {sets:?}: {action}");
                let bytes = u64::try_from(packet.len())?;
                let expected = [(direction, if is_denied { denied } else { forwarded }, 1, bytes)];
                let counted = a.counters()?.since(&at_a)?;
                ensure!(counted == expected, "{program}, {sets:?}: counted {counted:?}, not {expected:?}");
                let goes_to_b = !is_denied && forwarded == ForwardedLocal;
                let counted = b.counters()?.since(&at_b)?;
                ensure!(counted.is_empty() != goes_to_b, "{program}, {sets:?}: B counted {counted:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn a_flow_that_policy_let_pass_is_judged_again_after_a_change() -> Result<()> {
    let (mut a, _b) = pair()?;
    let packet = udp(A.v4, ELSEWHERE4);
    let denies = SetsRow { egress: DENIES, ingress: 0 };
    for (sets, generation, action) in [(SetsRow::default(), 1, OK), (denies, 1, OK), (denies, 2, SHOT)] {
        set(&mut a, [sets, SetsRow::default()], PolicyState { generation, flags: 0 })?;
        assert_eq!(a.run(FROM_CONTAINER, &packet)?.action, action, "{sets:?}, generation {generation}");
    }
    Ok(())
}

#[test]
fn only_flows_of_a_changed_address_are_judged_again() -> Result<()> {
    let (mut a, _b) = pair()?;
    let (denies, none) = (SetsRow { egress: DENIES, ingress: 0 }, SetsRow::default());
    let state = PolicyState { generation: 1, flags: 0 };
    for (packet, ends, stranger) in [
        (udp(A.v4, ELSEWHERE4), [IpAddr::from(A.v4), ELSEWHERE4.into()], "192.0.2.99"),
        (udp(A.v6, ELSEWHERE6), [A.v6.into(), ELSEWHERE6.into()], "2001:db8::99"),
        (udp(A.v4, B.v4), [A.v4.into(), B.v4.into()], "10.200.0.99"),
        (udp(A.v6, B.v6), [A.v6.into(), B.v6.into()], "2001:db8::99"),
    ] {
        for end in ends {
            set(&mut a, [none, none], state)?;
            change(&mut a, end)?;
            ensure!(a.run(FROM_CONTAINER, &packet)?.action != SHOT, "no rules");
            set(&mut a, [denies, none], state)?;
            change(&mut a, stranger.parse()?)?;
            ensure!(a.run(FROM_CONTAINER, &packet)?.action != SHOT, "{stranger} is no end of {ends:?}");
            change(&mut a, end)?;
            ensure!(a.run(FROM_CONTAINER, &packet)?.action == SHOT, "{end} of {ends:?} has another class");
        }
    }
    Ok(())
}

/// Lets flows of the address be judged again.
fn change(a: &mut Endpoint, address: IpAddr) -> Result<()> {
    let mut rows: Array<&mut MapData, u32> =
        a.node.map_mut(map::ADDRESS_GENERATIONS).context("generations")?.try_into()?;
    let slot = key_of(address).generation_slot();
    let before = rows.get(&slot, 0)?;
    Ok(rows.set(slot, before + 1, 0)?)
}

/// One cell of the rule set [`DENIES`], about every peer and port.
fn decide(a: &mut Endpoint, set: u32, rule: u32, ruling: u32) -> Result<()> {
    let mut cells: HashMap<&mut MapData, CellKey, CellRow> =
        a.node.map_mut(map::POLICY_CELLS).context("cells")?.try_into()?;
    let row = CellRow { admin: Hit::NONE, rest: Hit { rank: 0, rule, ruling }, packets: 0, bytes: 0 };
    Ok(cells.insert(CellKey { set, class: 0, port: 0 }, row, 0)?)
}

fn key_of(address: IpAddr) -> EndpointKey {
    match address {
        IpAddr::V4(a) => EndpointKey::v4(a.octets()),
        IpAddr::V6(a) => EndpointKey::v6(a.octets()),
    }
}

/// Makes an address known, with this identity.
fn resolve(a: &mut Endpoint, address: IpAddr, identity: u32) -> Result<()> {
    let mut peers: LpmTrie<&mut MapData, EndpointKey, PeerRow> =
        a.node.map_mut(map::IPCACHE).context("peers")?.try_into()?;
    Ok(peers.insert(&Key::new(128, key_of(address)), PeerRow { identity, class: 7 }, 0)?)
}

/// Numbers that look random, and are the same in each run (xorshift, Marsaglia 2003).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// Cells of both classes and ports, each with a rule of either tier or without. No two rules have one rank.
#[test]
fn the_rule_that_decides_judges_and_its_cell_counts() -> Result<()> {
    const PORT: u32 = 3;
    let (mut a, _b) = pair()?;
    resolve(&mut a, ELSEWHERE4.into(), 2)?;
    let mut ports: LpmTrie<&mut MapData, PortKey, u32> =
        a.node.map_mut(map::POLICY_PORTS).context("ports")?.try_into()?;
    let key = PortKey { set: DENIES, protocol: UDP, _pad: 0, port: 53_u16.to_be_bytes() };
    ports.insert(&Key::new(64, key), PORT, 0)?;
    let places = [(7, PORT), (7, 0), (0, PORT), (0, 0)].map(|(class, port)| CellKey { set: DENIES, class, port });
    let (mut numbers, mut passed_on) = (Numbers(0x9e37_79b9_7f4a_7c15), 0);
    for generation in 1..=1000 {
        let mut choice = Choice::NONE;
        let mut cells: HashMap<&mut MapData, CellKey, CellRow> =
            a.node.map_mut(map::POLICY_CELLS).context("cells")?.try_into()?;
        let mut hits = Vec::new();
        for (n, place) in (0_u32..).zip(places) {
            let mut hit = |tier: u32, rulings: u64| -> Result<Hit> {
                let ruling = [ACCEPT, DENY, PASS][usize::try_from(numbers.below(rulings))?];
                let rank = u32::try_from(numbers.below(16))? * 8 + n * 2 + tier;
                Ok(if numbers.below(3) == 0 { Hit::NONE } else { Hit { rank, rule: 100 + rank, ruling } })
            };
            let (admin, rest) = (hit(0, 3)?, hit(1, 2)?);
            cells.insert(place, CellRow { admin, rest, packets: 0, bytes: 0 }, 0)?;
            choice.add(admin, rest);
            hits.push((admin, rest));
        }
        let sets = [SetsRow { egress: DENIES, ingress: 0 }, SetsRow::default()];
        set(&mut a, sets, PolicyState { generation, flags: 0 })?;
        let decides = choice.decides();
        let action = a.run(FROM_CONTAINER, &udp(A.v4, ELSEWHERE4))?.action;
        ensure!((action == SHOT) == (decides.ruling == DENY), "{hits:?}: {action}");
        if decides.rank == NO_RANK {
            continue;
        }
        let cells: HashMap<&mut MapData, CellKey, CellRow> =
            a.node.map_mut(map::POLICY_CELLS).context("cells")?.try_into()?;
        for (place, (admin, rest)) in places.into_iter().zip(&hits) {
            let expected = u64::from(admin.rank == decides.rank || rest.rank == decides.rank);
            let counted = cells.get(&place, 0)?.packets;
            ensure!(counted == expected, "{hits:?}: {counted} packets in {place:?}, of which {expected} by its rules");
        }
        passed_on += u32::from(hits.iter().any(|(admin, _)| admin.ruling == PASS && admin.rank < decides.rank));
    }
    ensure!(passed_on > 50, "an admin rule passed on to the rest {passed_on} times");
    Ok(())
}

/// An ICMP error (destination unreachable) of A to `to`, about a UDP packet from there to A's port.
fn error(from: IpAddr, to: IpAddr, port: u16) -> Vec<u8> {
    let (protocol, kind, ethertype) =
        if from.is_ipv4() { (ICMP, [3, 3], frame::IPV4) } else { (ICMPV6, [1, 4], frame::IPV6) };
    let about = frame::ip(to, from, UDP, &[&[0, 53][..], &port.to_be_bytes(), &[0, 8, 0, 0]].concat());
    let message = [&kind[..], &[0; 6], &about].concat();
    frame::ethernet(A.host_mac, A.mac, ethertype, &frame::ip(from, to, protocol, &message))
}

#[test]
fn an_error_to_a_service_has_the_mark_of_any_packet_there() -> Result<()> {
    const WORLD: u32 = 2;
    let (mut a, _b) = pair()?;
    let both = MARK_UNDECIDED | MARK_BY_SERVICE;
    let with_deny_rule = DENIES | SET_DENIES;
    for (generation, identity, rule, ruling, egress, expected) in [
        (1, PEER_SERVICE | WORLD, 0, DENY, DENIES, MARK_UNDECIDED),
        (2, PEER_SERVICE | WORLD, 9, DENY, DENIES, MARK_UNDECIDED),
        (3, PEER_SERVICE | WORLD, 9, ACCEPT, DENIES, MARK_BY_SERVICE),
        (4, WORLD, 9, ACCEPT, DENIES, 0),
        (5, PEER_SERVICE | WORLD, 0, ACCEPT, DENIES, 0),
        (6, PEER_SERVICE | WORLD, 0, ACCEPT, with_deny_rule, both),
        (7, PEER_SERVICE | WORLD, 9, ACCEPT, with_deny_rule, both),
        (8, PEER_SERVICE | WORLD, 9, DENY, with_deny_rule, MARK_UNDECIDED),
        (9, WORLD, 9, ACCEPT, with_deny_rule, 0),
    ] {
        decide(&mut a, egress, rule, ruling)?;
        let sets = [SetsRow { egress, ingress: 0 }, SetsRow::default()];
        set(&mut a, sets, PolicyState { generation, flags: 0 })?;
        for (from, to) in [(IpAddr::from(A.v4), IpAddr::from(ELSEWHERE4)), (A.v6.into(), ELSEWHERE6.into())] {
            resolve(&mut a, to, identity)?;
            for (what, packet) in [
                ("a packet", udp(from, to)),
                ("an error about its flow", error(from, to, 4_000)),
                ("an error about no flow", error(from, to, 4_001)),
            ] {
                let outcome = a.run_marked(FROM_CONTAINER, &packet, 0, 0)?;
                ensure!(outcome == (OK, expected), "{what} to {to}, rule {rule}, ruling {ruling}: {outcome:?}");
            }
        }
    }
    Ok(())
}

/// A rule that accepts a service's address counts in the place of isolation, for containers that the rules know.
#[test]
fn the_mark_of_a_service_opens_no_way_to_an_address_that_is_not_known() -> Result<()> {
    let (mut a, _b) = pair()?;
    decide(&mut a, DENIES, 0, DENY)?;
    let sets = [SetsRow::default(), SetsRow { egress: DENIES, ingress: 0 }];
    set(&mut a, sets, PolicyState { generation: 1, flags: 0 })?;
    for (from, to) in [(IpAddr::from(B.v4), IpAddr::from(A.v4)), (B.v6.into(), A.v6.into())] {
        let packet = with(udp(from, to), 6, &A.host_mac);
        for (known, mark, expected) in
            [(false, 0, SHOT), (false, MARK_BY_SERVICE, SHOT), (true, 0, SHOT), (true, MARK_BY_SERVICE, OK)]
        {
            if known {
                resolve(&mut a, to, A.identity)?;
            }
            let (action, _) = a.run_marked(TO_CONTAINER, &packet, mark, B.ifindex)?;
            ensure!(action == expected, "to {to}, known: {known}, mark {mark:#x}: {action}");
        }
    }
    Ok(())
}
