//! Packets of established flows: `established` passes what `judge` would pass, and leaves the rest to it.

use anyhow::{Context, Result, bail, ensure};
use aya::maps::{Array, MapData};
use wharf_common::{
    DropReason, FlowRow, PolicyState,
    flow::{FLOW_BY_HIGH, FLOW_BY_STACK, FLOW_RECENT, FLOW_REPLIED, TCP, UDP},
    map::{self, NodeCall},
    policy::{BY_SERVICE, MARK_PROXIED_EGRESS, MARK_PROXIED_INGRESS, UNDECIDED},
};

use crate::{
    fixture::{
        A, B, Change, ELSEWHERE4, ELSEWHERE6, Endpoint, FROM_CONTAINER, Outcome, SHOT, TO_CONTAINER, pair, with,
    },
    flows::{ACK, FIN, RST, SYN, Sent, now, row, table},
};

/// Bytes of the headers: Ethernet, IPv6 and TCP.
const HEADERS: usize = 14 + 40 + 20;
/// Of the rules, in some of the runs.
const GENERATION: u32 = 7;

/// To B, without the node's stack.
fn is_direct(sent: &Sent) -> bool {
    sent.other == B.v4 || sent.other == B.v6
}

/// Flows between A and the node's stack, and to B on the direct way.
fn kinds() -> Vec<Sent> {
    let mut kinds = Vec::new();
    for protocol in [TCP, UDP] {
        for other in [ELSEWHERE4.into(), ELSEWHERE6.into(), B.v4.into(), B.v6.into()] {
            kinds.push(Sent::new(other, protocol, (40_000, 443)));
        }
    }
    let back: Vec<Sent> = kinds.iter().filter(|sent| !is_direct(sent)).map(|sent| sent.back()).collect();
    kinds.into_iter().chain(back).collect()
}

/// As the hook of A gets it.
fn packet(sent: Sent) -> Vec<u8> {
    let packet = sent.packet();
    // The node's stack resolves no neighbours on A's link.
    if sent.by_a { packet } else { with(with(packet, 0, &A.host_mac), 6, &A.host_mac) }
}

fn program(sent: Sent) -> &'static str {
    if sent.by_a { FROM_CONTAINER } else { TO_CONTAINER }
}

/// The row of a flow that A began, kept and answered.
fn established(sent: Sent) -> FlowRow {
    let (a, other) = (A.epoch, if is_direct(&sent) { B.epoch } else { 0 });
    let (low, high) = if sent.a_is_high() { (other, a) } else { (a, other) };
    let epoch = |epoch| u32::try_from(epoch).unwrap_or_default();
    let by_a = if sent.a_is_high() { FLOW_BY_HIGH } else { 0 };
    let owner = u16::try_from(A.id).unwrap_or_default();
    let (low_epoch, high_epoch) = (epoch(low), epoch(high));
    FlowRow { low_epoch, high_epoch, flags: FLOW_REPLIED | by_a, owner, ..FlowRow::default() }
}

fn set_generation(a: &mut Endpoint, generation: u32) -> Result<()> {
    let mut state: Array<&mut MapData, PolicyState> = a.node.map_mut(map::POLICY_STATE).context("state")?.try_into()?;
    state.set(0, PolicyState { generation, flags: 0 }, 0).context("set POLICY_STATE")
}

/// What becomes of a packet: the hook's answer, what A counts, and the flow's row, seen this many ticks ago.
type Seen = (Outcome, Vec<Change>, Option<(FlowRow, bool)>);

/// With this row as the only one, and this program in the slot of `established`. `None` if a tick began meanwhile.
fn seen(a: &mut Endpoint, by: NodeCall, sent: Sent, packet: &[u8], put: FlowRow) -> Result<Option<Seen>> {
    seen_with(a, by, sent, packet, put, 0)
}

/// Of a packet with this mark, without the bytes that leave.
fn seen_with(
    a: &mut Endpoint,
    by: NodeCall,
    sent: Sent,
    packet: &[u8],
    put: FlowRow,
    mark: u32,
) -> Result<Option<Seen>> {
    a.set_node_call(NodeCall::Established, by.program())?;
    for name in [map::FLOWS, map::FLOWS_NEW] {
        let keys: Vec<_> = table(a, name)?.keys().collect::<Result<_, _>>()?;
        keys.iter().try_for_each(|key| table(a, name)?.remove(key).context("remove a row"))?;
    }
    let tick = now()?;
    table(a, map::FLOWS)?.insert(sent.key(), FlowRow { seen: tick.wrapping_sub(put.seen), ..put }, 0)?;
    let before = a.counters()?;
    let outcome = if mark == 0 {
        a.run(program(sent), packet)?
    } else {
        let (action, left) = a.run_marked(program(sent), packet, mark, 0)?;
        Outcome { action, packet: left.to_ne_bytes().to_vec() }
    };
    let changes = a.counters()?.since(&before)?;
    // A dropped packet soon uses the budget of events.
    let changes = changes.into_iter().filter(|(_, reason, ..)| DropReason::is_verdict(*reason)).collect();
    let after = row(a, &sent.key())?.map(|(row, kept)| (FlowRow { seen: tick.wrapping_sub(row.seen), ..row }, kept));
    Ok((now()? == tick).then_some((outcome, changes, after)))
}

/// `put.seen`: ticks ago.
fn compare(a: &mut Endpoint, what: &str, sent: Sent, packet: &[u8], put: FlowRow) -> Result<Seen> {
    for _ in 0..10 {
        let of = [NodeCall::Judge, NodeCall::Established].map(|by| seen(a, by, sent, packet, put));
        let [Some(expected), Some(is)] = [of[0].as_ref(), of[1].as_ref()].map(|of| of.ok().and_then(Option::as_ref))
        else {
            of.into_iter().try_for_each(|of| of.map(drop))?;
            continue;
        };
        ensure!(is == expected, "{sent:?}, {what}, {put:?}: {is:02x?}, by `judge` {expected:02x?}");
        return Ok(is.clone());
    }
    bail!("a tick began in each of ten runs")
}

#[test]
fn with_any_bit_of_the_headers_changed_a_packet_of_an_established_flow_is_treated_as_by_judge() -> Result<()> {
    let (mut a, _b) = pair()?;
    let (mut passed, mut dropped) = (0, 0);
    for sent in kinds() {
        let packet = packet(sent);
        for bit in 0..HEADERS.min(packet.len()) * 8 {
            let mut changed = packet.clone();
            *changed.get_mut(bit / 8).context("a longer packet")? ^= 1 << (bit % 8);
            let (outcome, ..) = compare(&mut a, &format!("bit {bit}"), sent, &changed, established(sent))?;
            *(if outcome.action == SHOT { &mut dropped } else { &mut passed }) += 1;
        }
    }
    ensure!(passed > 1_000 && dropped > 1_000, "{passed} passed, {dropped} dropped");
    Ok(())
}

#[test]
fn any_other_row_and_flag_is_treated_as_by_judge() -> Result<()> {
    let (mut a, _b) = pair()?;
    for generation in [0, GENERATION] {
        set_generation(&mut a, generation)?;
        for sent in kinds() {
            let base = FlowRow { generation, ..established(sent) };
            let mut rows: Vec<FlowRow> =
                (0..u16::BITS).map(|bit| FlowRow { flags: base.flags ^ 1 << bit, ..base }).collect();
            rows.extend([0, 1, 200_000].map(|seen| FlowRow { seen, ..base }));
            rows.extend([0, GENERATION, GENERATION + 1].map(|generation| FlowRow { generation, ..base }));
            rows.extend([5, BY_SERVICE | 5, UNDECIDED].map(|rule| FlowRow { rule, ..base }));
            let behind_the_stack = FlowRow { flags: base.flags | FLOW_BY_STACK, ..base };
            rows.extend([7, 9].map(|epoch| FlowRow { low_epoch: epoch, ..behind_the_stack }));
            rows.extend([7, 9].map(|epoch| FlowRow { high_epoch: epoch, ..behind_the_stack }));
            rows.push(FlowRow { low_epoch: base.low_epoch ^ 1, ..base });
            rows.push(FlowRow { high_epoch: base.high_epoch ^ 1, ..base });
            for row in rows {
                for flags in [ACK, SYN, SYN | ACK, FIN | ACK, RST, RST | ACK, 0] {
                    let sent = sent.with(flags);
                    compare(&mut a, &format!("generation {generation}"), sent, &packet(sent), row)?;
                    if sent.protocol == UDP {
                        break;
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn marks_of_the_proxy_and_noted_paths_are_left_to_judge() -> Result<()> {
    let (mut a, _b) = pair()?;
    for sent in kinds() {
        for mark in [MARK_PROXIED_EGRESS, MARK_PROXIED_INGRESS, MARK_PROXIED_EGRESS | 1 << 20] {
            let of = |a: &mut Endpoint, by| seen_with(a, by, sent, &packet(sent), established(sent), mark);
            let same = (0..10).find_map(|_| {
                let of = [NodeCall::Judge, NodeCall::Established].map(|by| of(&mut a, by));
                match of {
                    [Ok(Some(expected)), Ok(Some(is))] => Some(Ok(is == expected)),
                    [Err(e), _] | [_, Err(e)] => Some(Err(e)),
                    _ => None,
                }
            });
            ensure!(same.context("a tick began in each of ten runs")??, "{sent:?}, mark {mark:x}");
        }
    }
    // A flow of the pair has taken the stack since, so that this one may have to; or before the tick of its row.
    a.clear_node_call(NodeCall::Judge)?;
    for sent in kinds().into_iter().filter(|sent| sent.by_a) {
        for ago in [0, 1, 2, 1_000] {
            let of = |a: &mut Endpoint| {
                let noted = u64::from(now()?.wrapping_sub(ago));
                let mut users: Array<&mut MapData, u64> =
                    a.node.map_mut(map::STACK_USERS).context("users")?.try_into()?;
                users.set(A.id, A.epoch | noted << 32, 0).context("set STACK_USERS")?;
                seen(a, NodeCall::Established, sent, &packet(sent), established(sent))
            };
            let seen = (0..10).find_map(|_| of(&mut a).transpose());
            let (outcome, ..) = seen.context("a tick began in each of ten runs")??;
            ensure!((outcome.action == SHOT) == (is_direct(&sent) && ago < 2), "{ago} ticks, {sent:?}: {outcome:?}");
        }
    }
    Ok(())
}

#[test]
fn an_established_flow_needs_judge_once_a_tick() -> Result<()> {
    let (mut a, _b) = pair()?;
    for sent in kinds() {
        let fresh = established(sent);
        let stale = FlowRow { seen: 1, ..fresh };
        let recent = FlowRow { flags: fresh.flags | FLOW_RECENT, ..fresh };
        for (row, sent, passes) in [
            (fresh, sent, true),
            (stale, sent, false),
            (recent, sent, false),
            (fresh, sent.with(FIN), sent.protocol == UDP),
        ] {
            a.clear_node_call(NodeCall::Judge)?;
            let without =
                (0..10).find_map(|_| seen(&mut a, NodeCall::Established, sent, &packet(sent), row).transpose());
            let (outcome, _, after) = without.context("a tick began in each of ten runs")??;
            a.set_node_call(NodeCall::Judge, NodeCall::Judge.program())?;
            ensure!((outcome.action != SHOT) == passes, "{sent:?}, {row:?}: {outcome:?}");
            ensure!(!passes || after.is_some_and(|(after, _)| after == fresh), "{after:?}");
        }
    }
    Ok(())
}
