//! Packets of established flows: `established` and the flow cache pass what `judge` would pass, and leave the rest to
//! it.

use anyhow::{Context, Result, bail, ensure};
use aya::maps::{Array, MapData, PerCpuArray, PerCpuValues};
use nix::{
    sched::{CpuSet, sched_getcpu, sched_setaffinity},
    unistd::Pid,
};
use wharf_common::{
    CachedFlow, DropReason, EndpointConfig, FlowRow, PolicyState,
    flow::{
        CACHED_INGRESS, CACHED_IPV6, FLOW_BY_HIGH, FLOW_BY_STACK, FLOW_FIN, FLOW_FIN_REPLY, FLOW_RECENT, FLOW_REPLIED,
        FLOW_RESET, TCP, UDP, cache_place,
    },
    map::{self, FLAG_LIMIT_EGRESS, FLAG_LIMIT_INGRESS, FLAG_LIVE, FLAG_LOCAL_BY_STACK, FLAG_TRACE, NodeCall},
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

/// Changes the entries of a flow of A's in the cache, of each processor; returns those before.
fn change_entries(a: &mut Endpoint, sent: Sent, change: impl Fn(&mut CachedFlow)) -> Result<Vec<CachedFlow>> {
    let key = sent.key();
    let kind = u32::from(sent.protocol)
        | if sent.by_a { 0 } else { CACHED_INGRESS }
        | if sent.other.is_ipv6() { CACHED_IPV6 } else { 0 };
    let other = if sent.a_is_high() { key.low } else { key.high };
    let ports = if sent.by_a { sent.ports } else { (sent.ports.1, sent.ports.0) };
    let ports = u32::from(ports.0.to_be()) | u32::from(ports.1.to_be()) << 16;
    let place = cache_place(other.last_word(), ports, kind, u32::try_from(A.epoch)?);
    let mut cache: PerCpuArray<&mut MapData, CachedFlow> =
        a.node.map_mut(map::FLOW_CACHE).context("cache")?.try_into()?;
    let before: Vec<CachedFlow> = cache.get(&place, 0).context("read FLOW_CACHE")?.iter().copied().collect();
    let mut after = before.clone();
    after.iter_mut().for_each(change);
    cache.set(place, PerCpuValues::try_from(after)?, 0).context("set FLOW_CACHE")?;
    Ok(before)
}

fn forget(a: &mut Endpoint, sent: Sent) -> Result<()> {
    change_entries(a, sent, |entry| *entry = CachedFlow::default()).map(drop)
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
    forget(a, sent)?;
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

/// Keeps this thread where it is: each processor has a cache.
fn stay_on_this_processor() -> Result<()> {
    let mut processors = CpuSet::new();
    processors.set(sched_getcpu().context("sched_getcpu")?)?;
    sched_setaffinity(Pid::from_raw(0), &processors).context("sched_setaffinity")
}

/// As [`seen`], with the flow in the cache.
fn seen_by_cache(a: &mut Endpoint, sent: Sent, changed: &[u8], put: FlowRow) -> Result<Option<Seen>> {
    let tick = now()?;
    let Some(_) = seen(a, NodeCall::Established, sent, &packet(sent), put)? else { return Ok(None) };
    let before = a.counters()?;
    let outcome = a.run(program(sent), changed)?;
    let changes = a.counters()?.since(&before)?;
    let changes = changes.into_iter().filter(|(_, reason, ..)| DropReason::is_verdict(*reason)).collect();
    let after = row(a, &sent.key())?.map(|(row, kept)| (FlowRow { seen: tick.wrapping_sub(row.seen), ..row }, kept));
    Ok((now()? == tick).then_some((outcome, changes, after)))
}

#[test]
fn with_any_bit_of_the_headers_changed_the_cache_passes_no_more_than_judge() -> Result<()> {
    stay_on_this_processor()?;
    let (mut a, _b) = pair()?;
    for sent in kinds() {
        let packet = packet(sent);
        for bit in 0..HEADERS.min(packet.len()) * 8 {
            let mut changed = packet.clone();
            *changed.get_mut(bit / 8).context("a longer packet")? ^= 1 << (bit % 8);
            let same = (0..10).find_map(|_| {
                let expected = seen(&mut a, NodeCall::Judge, sent, &changed, established(sent));
                match (expected, seen_by_cache(&mut a, sent, &changed, established(sent))) {
                    (Ok(Some(expected)), Ok(Some(is))) if is == expected => Some(Ok(())),
                    (Ok(Some(expected)), Ok(Some(is))) => {
                        Some(Err(anyhow::anyhow!("{is:02x?}, by `judge` {expected:02x?}")))
                    }
                    (Err(e), _) | (_, Err(e)) => Some(Err(e)),
                    _ => None,
                }
            });
            same.context("a tick began in each of ten runs")?.with_context(|| format!("bit {bit}, {sent:?}"))?;
        }
    }
    Ok(())
}

/// Whether the cache ever passes packet `by` with this mark, after a change. Without `judge`, only a flow with a row or
/// an entry passes.
fn passes_by_cache(
    a: &mut Endpoint,
    sent: Sent,
    by: Sent,
    mark: u32,
    change: impl Fn(&mut Endpoint) -> Result<()>,
) -> Result<bool> {
    // An entry can end in one run.
    for _ in 0..5 {
        forget(a, sent)?;
        table(a, map::FLOWS)?.insert(sent.key(), FlowRow { seen: now()?, ..established(sent) }, 0)?;
        a.run(program(sent), &packet(sent))?;
        table(a, map::FLOWS)?.remove(&sent.key())?;
        change(a)?;
        let (action, _) = a.run_marked(program(by), &packet(by), mark, 0)?;
        a.configure(A.config())?;
        set_generation(a, 0)?;
        if action != SHOT {
            return Ok(true);
        }
    }
    Ok(false)
}

/// A path of A's was recorded in this tick.
fn set_user(a: &mut Endpoint, tick: u32) -> Result<()> {
    let mut users: Array<&mut MapData, u64> = a.node.map_mut(map::STACK_USERS).context("users")?.try_into()?;
    users.set(A.id, A.epoch | u64::from(tick) << 32, 0).context("set STACK_USERS")
}

#[test]
fn the_cache_passes_packets_until_anything_changes() -> Result<()> {
    fn in_entry(sent: Sent, change: impl Fn(&mut CachedFlow)) -> impl Fn(&mut Endpoint) -> Result<()> {
        move |a| change_entries(a, sent, &change).map(drop)
    }
    fn with_config(change: impl Fn(&mut EndpointConfig)) -> impl Fn(&mut Endpoint) -> Result<()> {
        move |a| {
            let mut config = A.config();
            change(&mut config);
            a.configure(config)
        }
    }
    fn increase(address: wharf_common::EndpointKey) -> impl Fn(&mut Endpoint) -> Result<()> {
        move |a| {
            let mut rows: Array<&mut MapData, u32> =
                a.node.map_mut(map::ADDRESS_GENERATIONS).context("generations")?.try_into()?;
            let slot = address.generation_slot();
            let before = rows.get(&slot, 0)?;
            rows.set(slot, before + 1, 0).context("set ADDRESS_GENERATIONS")
        }
    }
    stay_on_this_processor()?;
    fn end_entries(a: &mut Endpoint) -> Result<()> {
        let mut rows: Array<&mut MapData, u32> = a.node.map_mut(map::FLOW_CACHE_ENDS).context("ends")?.try_into()?;
        let before = rows.get(&A.id, 0)?;
        rows.set(A.id, before + 1, 0).context("set FLOW_CACHE_ENDS")
    }
    let (mut a, _b) = pair()?;
    a.clear_node_call(NodeCall::Judge)?;
    for sent in kinds() {
        let key = sent.key();
        let passes = |a: &mut Endpoint, by: Sent, mark: u32, change: &dyn Fn(&mut Endpoint) -> Result<()>| {
            passes_by_cache(a, sent, by, mark, change).with_context(|| format!("{sent:?}"))
        };
        ensure!(passes(&mut a, sent, 0, &|_| Ok(()))?, "{sent:?} is not in the cache");
        ensure!(passes(&mut a, sent, 1 << 20, &|_| Ok(()))?, "{sent:?}, a mark of others");
        for mark in [MARK_PROXIED_EGRESS, MARK_PROXIED_INGRESS] {
            ensure!(!passes(&mut a, sent, mark, &|_| Ok(()))?, "{sent:?}, mark {mark:x}");
        }
        if sent.protocol == TCP {
            for flags in [FIN | ACK, SYN, SYN | ACK, RST] {
                ensure!(!passes(&mut a, sent.with(flags), 0, &|_| Ok(()))?, "{sent:?}, flags {flags:x}");
            }
        }
        type Changed = Box<dyn Fn(&mut Endpoint) -> Result<()>>;
        let changes: [(&str, Changed); 16] = [
            ("rules", Box::new(|a| set_generation(a, GENERATION))),
            ("entries of the endpoint", Box::new(end_entries)),
            ("rows about one end", Box::new(increase(key.low))),
            ("rows about the other end", Box::new(increase(key.high))),
            ("the endpoint", Box::new(with_config(|config| config.epoch += 1))),
            ("the setting for tracing", Box::new(with_config(|config| config.flags = FLAG_LIVE | FLAG_TRACE))),
            ("the endpoint's epoch alone", Box::new(in_entry(sent, |entry| entry.own_epoch ^= 1))),
            ("the version of IP", Box::new(in_entry(sent, |entry| entry.kind ^= CACHED_IPV6))),
            ("half an entry", Box::new(in_entry(sent, |entry| entry.sequence |= 1))),
            ("time", Box::new(in_entry(sent, |entry| entry.window = entry.window.wrapping_sub(1)))),
            ("ports", Box::new(in_entry(sent, |entry| entry.ports ^= 1))),
            ("protocol", Box::new(in_entry(sent, |entry| entry.kind ^= 1))),
            ("direction", Box::new(in_entry(sent, |entry| entry.kind ^= CACHED_INGRESS))),
            ("peer", Box::new(in_entry(sent, |entry| entry.peer.addr[3] ^= 1))),
            ("the low half of the peer", Box::new(in_entry(sent, |entry| entry.peer.addr[9] ^= 1))),
            (
                "the limit of its bandwidth",
                Box::new(with_config(|config| config.flags = FLAG_LIVE | FLAG_LIMIT_EGRESS | FLAG_LIMIT_INGRESS)),
            ),
        ];
        for (what, change) in changes {
            let passed = passes(&mut a, sent, 0, &change)?;
            ensure!(!passed, "{sent:?} passes after a change of {what}");
        }
        let by_stack = with_config(|config| config.flags = FLAG_LIVE | FLAG_LOCAL_BY_STACK);
        let passed = passes(&mut a, sent, 0, &by_stack)?;
        ensure!(passed != sent.by_a, "{sent:?}, local packets by the stack: passes {passed}");
    }
    Ok(())
}

/// Of A and B.
fn ends(a: &mut Endpoint) -> Result<[u32; 2]> {
    let rows: Array<&mut MapData, u32> = a.node.map_mut(map::FLOW_CACHE_ENDS).context("ends")?.try_into()?;
    Ok([rows.get(&A.id, 0)?, rows.get(&B.id, 0)?])
}

#[test]
fn a_reset_and_a_replaced_flow_end_entries_of_both_endpoints() -> Result<()> {
    stay_on_this_processor()?;
    let (mut a, _b) = pair()?;
    for sent in kinds().into_iter().filter(|sent| sent.protocol == TCP) {
        let closed = FlowRow { flags: established(sent).flags | FLOW_FIN | FLOW_FIN_REPLY, ..established(sent) };
        for (what, put, flags) in [("a reset", established(sent), RST), ("a replaced flow", closed, SYN)] {
            forget(&mut a, sent)?;
            table(&mut a, map::FLOWS)?.insert(sent.key(), FlowRow { seen: now()?, ..established(sent) }, 0)?;
            a.run(program(sent), &packet(sent))?;
            table(&mut a, map::FLOWS)?.insert(sent.key(), FlowRow { seen: now()?, ..put }, 0)?;
            let before = ends(&mut a)?;
            a.run(program(sent), &packet(sent.with(flags)))?;
            let after = ends(&mut a)?;
            let expected = [before[0] + 1, before[1] + u32::from(is_direct(&sent))];
            ensure!(after == expected, "{sent:?}, {what}: {before:?}, then {after:?}");
            // The next packet changes the row, although the flow was in the cache.
            a.run(program(sent), &packet(sent))?;
            let (row, _) = row(&mut a, &sent.key())?.context("a row")?;
            ensure!(row.flags & FLOW_RESET == 0, "{sent:?}, {what}: {row:?}");
            ensure!(ends(&mut a)? == after, "{sent:?}, {what}: an end without a reason");
        }
    }
    Ok(())
}

#[test]
fn a_reset_from_the_stack_ends_entries_of_a_direct_flow() -> Result<()> {
    let (mut a, _b) = pair()?;
    for sent in kinds().into_iter().filter(|sent| sent.protocol == TCP && is_direct(sent)) {
        table(&mut a, map::FLOWS)?.insert(sent.key(), FlowRow { seen: now()?, ..established(sent) }, 0)?;
        let before = ends(&mut a)?;
        // With B's address, by a link that is not B's.
        let forged = sent.back().with(RST);
        a.run(program(forged), &packet(forged))?;
        let (row, _) = row(&mut a, &sent.key())?.context("a row")?;
        ensure!(row.flags & FLOW_RESET != 0, "{row:?}");
        ensure!(ends(&mut a)? == before.map(|n| n + 1), "{sent:?}: {before:?}, then {:?}", ends(&mut a)?);
    }
    Ok(())
}

#[test]
fn a_new_path_through_the_stack_ends_entries_of_both_endpoints() -> Result<()> {
    let (mut a, _b) = pair()?;
    for from_b in kinds().into_iter().filter(is_direct).map(|sent| sent.back()) {
        let before = ends(&mut a)?;
        // The second packet finds the path recorded.
        for _ in 0..2 {
            a.run_marked(program(from_b), &packet(from_b), 0, B.ifindex)?;
            ensure!(ends(&mut a)? == before.map(|n| n + 1), "{from_b:?}: {before:?}, then {:?}", ends(&mut a)?);
        }
    }
    Ok(())
}

#[test]
fn what_takes_the_stack_between_endpoints_is_cached_as_such() -> Result<()> {
    stay_on_this_processor()?;
    let (mut a, _b) = pair()?;
    for sent in kinds().into_iter().filter(is_direct) {
        let row = FlowRow { flags: established(sent).flags | FLOW_BY_STACK, ..established(sent) };
        let same = (0..10).find_map(|_| {
            let expected = seen(&mut a, NodeCall::Judge, sent, &packet(sent), row).transpose()?;
            let is = seen_by_cache(&mut a, sent, &packet(sent), row).transpose()?;
            Some(expected.and_then(|expected| Ok((expected, is?))))
        });
        let (expected, is) = same.context("a tick began in each of ten runs")??;
        ensure!(is == expected, "{sent:?}: {is:02x?}, by `judge` {expected:02x?}");
        ensure!(is.1.iter().all(|(_, reason, ..)| *reason == DropReason::ForwardedStack), "{is:?}");
    }
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
                set_user(a, now()?.wrapping_sub(ago))?;
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
