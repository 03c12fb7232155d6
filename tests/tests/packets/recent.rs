//! The share of the tables of flows and fragments that each endpoint has: what floods and collections leave of it.

use std::net::IpAddr;

use anyhow::{Context as _, Result, ensure};
use aya::maps::{HashMap, MapData};
use wharf_common::{
    EndpointKey, FlowKey, FlowRow, FlowState, FlowUse, FragmentKey, FragmentRow,
    flow::{FLOW_BY_HIGH, FLOW_RECENT, FLOW_REPLIED, TCP, UDP},
    map::{self, FLOWS_KEPT_MAX, FLOWS_NEW_MAX, FLOWS_SHARE, FRAGMENTS_MAX},
};

use crate::{
    fixture::{ELSEWHERE4, ELSEWHERE6, Endpoint, FROM_CONTAINER, OK, pair},
    flows::{Sent, collect, fragment, now, row, send, table, totals, use_of},
};

/// A flow between A's port and an address elsewhere.
const fn flow(port: u16) -> Sent {
    Sent::new(IpAddr::V4(ELSEWHERE4), UDP, (port, 53))
}

/// The `number`th flow of other endpoints.
fn of_others(number: u32) -> FlowKey {
    let [_, a, b, c] = number.to_be_bytes();
    let (low, high) = (EndpointKey::v4([10, a, b, c]), EndpointKey::v4([198, 51, 100, 1]));
    FlowKey { low, high, low_port: 1, high_port: 2, protocol: TCP, ..FlowKey::default() }
}

/// True when the flow's row is in the table from which nothing is evicted.
fn is_safe(a: &mut Endpoint, sent: Sent) -> Result<bool> {
    Ok(table(a, map::FLOWS)?.get(&sent.key(), 0).is_ok())
}

#[test]
fn a_flood_of_others_evicts_no_recent_flow_of_an_endpoint() -> Result<()> {
    let (mut a, _b) = pair()?;
    let share = u16::try_from(FLOWS_SHARE)?;
    // Other endpoints have filled the table of kept flows.
    let of_other = FlowRow { seen: now()?, flags: FLOW_REPLIED, owner: 9, ..FlowRow::default() };
    let mut kept = table(&mut a, map::FLOWS)?;
    for number in 0..FLOWS_KEPT_MAX {
        kept.insert(of_others(number), of_other, 0)?;
    }
    collect(&mut a)?;
    // Flows that A began, as many that began outside, and twice as many rows of others as the LRU table has.
    let flows: Vec<Sent> = (1..=share).flat_map(|port| [flow(port), flow(10_000 + port).back()]).collect();
    for sent in &flows {
        send(&a, *sent)?;
    }
    let mut older = table(&mut a, map::FLOWS_NEW)?;
    for number in 0..2 * FLOWS_NEW_MAX {
        older.insert(of_others(number), of_other, 0)?;
    }
    for sent in &flows {
        send(&a, sent.back())?;
        let (row, kept) = row(&mut a, &sent.key())?.with_context(|| format!("{sent:?} is gone"))?;
        ensure!(row.state() == FlowState::Established && !kept, "{sent:?}: {row:?}, kept: {kept}");
        let begun_by_a = (row.flags & FLOW_BY_HIGH != 0) == sent.a_is_high();
        ensure!(begun_by_a == sent.by_a, "{sent:?}: the answer began another flow: {row:?}");
    }
    // There is no room to keep one.
    send(&a, flows[0])?;
    ensure!(totals(&a)?.no_room == 1 && !row(&mut a, &flows[0].key())?.context("a row")?.1, "{:?}", totals(&a)?);
    Ok(())
}

#[test]
fn an_endpoint_displaces_its_own_oldest_flows_alone() -> Result<()> {
    let (mut a, _b) = pair()?;
    let share = u16::try_from(FLOWS_SHARE)?;
    let outside = flow(60_000).back();
    send(&a, outside)?;
    for port in 1..=3 * share {
        send(&a, flow(port))?;
    }
    for port in 1..=3 * share {
        ensure!(is_safe(&mut a, flow(port))? == (port > 2 * share), "flow {port}");
        ensure!(row(&mut a, &flow(port).key())?.is_some(), "flow {port} has no row in the LRU table");
    }
    ensure!(is_safe(&mut a, outside)?, "a flow from outside was displaced by the endpoint's own");
    let recent = |a: &mut Endpoint| anyhow::Ok(use_of(a)?.get(&1, 0)?.recent);
    ensure!(recent(&mut a)? == FLOWS_SHARE + 1, "{}", recent(&mut a)?);

    // A flow that both ends use leaves the share, from either table; the places of the others stay.
    for sent in [flow(1), flow(3 * share)] {
        send(&a, sent.back())?;
        send(&a, sent)?;
        ensure!(row(&mut a, &sent.key())?.context("a row")?.1, "{sent:?} is not kept");
    }
    let used = use_of(&mut a)?.get(&1, 0)?;
    ensure!((used.rows, used.recent) == (2, FLOWS_SHARE), "{used:?}");
    // A collection counts the same, and frees the places of flows that are no longer recent.
    collect(&mut a)?;
    let used = use_of(&mut a)?.get(&1, 0)?;
    ensure!((used.rows, used.recent) == (2, FLOWS_SHARE) && totals(&a)?.rows == 2, "{used:?}, {:?}", totals(&a)?);
    let places: HashMap<&mut MapData, u32, FlowKey> =
        a.node.map_mut(map::FLOWS_RECENT).context("places")?.try_into()?;
    ensure!(places.keys().count() == usize::try_from(FLOWS_SHARE)?, "{} places", places.keys().count());
    Ok(())
}

/// The kernel removes a row by its key, so no other row may take the key in the table that a collection walks.
#[test]
fn a_row_that_a_collection_may_be_removing_has_no_successor_in_its_table() -> Result<()> {
    let (mut a, _b) = pair()?;
    let over = |key: &FlowKey, a: &mut Endpoint| -> Result<()> {
        let row = FlowRow { seen: now()?.wrapping_sub(1_000), flags: FLOW_RECENT, owner: 1, ..FlowRow::default() };
        Ok(table(a, map::FLOWS)?.insert(key, row, 0)?)
    };
    let collecting = |a: &mut Endpoint, counted| -> Result<()> {
        Ok(use_of(a)?.set(0, FlowUse { counted, ..FlowUse::default() }, 0)?)
    };
    let (during, after) = (flow(1), flow(2));
    collecting(&mut a, 1)?;
    over(&during.key(), &mut a)?;
    for sent in [during, during.back(), during] {
        send(&a, sent)?;
        ensure!(!is_safe(&mut a, during)?, "{sent:?}: the collection would remove the row");
        ensure!(row(&mut a, &during.key())?.is_some(), "{sent:?}: no row");
    }
    collecting(&mut a, 0)?;
    send(&a, during)?;
    ensure!(row(&mut a, &during.key())?.context("a row")?.1, "kept after the collection");
    over(&after.key(), &mut a)?;
    send(&a, after)?;
    ensure!(is_safe(&mut a, after)?, "a flow that begins after the collection has a place");
    collect(&mut a)?;
    ensure!(use_of(&mut a)?.get(&0, 0)?.counted == 0, "the collection has ended");
    Ok(())
}

/// Another CPU's packet may have removed the row, so that this one's finds none.
#[test]
fn a_flow_whose_row_a_collection_is_removing_begins_in_the_other_table() -> Result<()> {
    let (mut a, _b) = pair()?;
    let (removed, other) = (flow(1), flow(2));
    let node = FlowUse { counted: 1, recent_counted: removed.key().mark(), ..FlowUse::default() };
    use_of(&mut a)?.set(0, node, 0)?;
    for sent in [removed, other] {
        send(&a, sent)?;
        ensure!(row(&mut a, &sent.key())?.is_some(), "{sent:?}: no row");
    }
    ensure!(!is_safe(&mut a, removed)?, "the collection would remove the row");
    ensure!(is_safe(&mut a, other)?, "other flows have their share also during a collection");
    // A collection removes rows, and leaves no key that is being removed.
    let over = FlowRow { seen: now()?.wrapping_sub(1_000), owner: 1, ..FlowRow::default() };
    table(&mut a, map::FLOWS)?.insert(of_others(1), over, 0)?;
    let before = totals(&a)?.expired;
    collect(&mut a)?;
    let node = use_of(&mut a)?.get(&0, 0)?;
    ensure!((node.counted, node.recent_counted) == (0, 0), "{node:?}");
    ensure!(totals(&a)?.expired == before + 1, "{:?}", totals(&a)?);
    ensure!(table(&mut a, map::FLOWS)?.get(&of_others(1), 0).is_err(), "the row is there");
    ensure!(is_safe(&mut a, other)?, "a flow that goes on was removed");
    send(&a, removed)?;
    ensure!(row(&mut a, &removed.key())?.is_some(), "{removed:?}: the row is gone");
    Ok(())
}

#[test]
fn a_flood_of_fragments_of_others_loses_no_packet_of_an_endpoint() -> Result<()> {
    const MORE: u16 = 0x2000;
    let (mut a, _b) = pair()?;
    let ports = [40_000_u16.to_be_bytes(), 443_u16.to_be_bytes()].concat();
    let run = |a: &Endpoint, to: IpAddr, place: u16, number: u16| -> Result<u32> {
        let payload = if place == MORE { [&ports[..], &[0; 12]].concat() } else { vec![2; 8] };
        Ok(a.run(FROM_CONTAINER, &fragment(to, place, number, &payload))?.action)
    };
    for to in [IpAddr::from(ELSEWHERE4), ELSEWHERE6.into()] {
        ensure!(run(&a, to, MORE, 7)? == OK, "the first fragment, to {to}");
        let mut rows: HashMap<&mut MapData, FragmentKey, FragmentRow> =
            a.node.map_mut(map::FRAGMENTS).context("fragments")?.try_into()?;
        for identification in 0..2 * FRAGMENTS_MAX {
            let key = FragmentKey { identification, endpoint: 9, ..FragmentKey::default() };
            rows.insert(key, FragmentRow { seen: now()?, ..FragmentRow::default() }, 0)?;
        }
        ensure!(run(&a, to, 4, 7)? == OK, "a later fragment after the flood, to {to}");
        // Packets of the endpoint that are under way at once, more than it has places.
        for number in 100..400 {
            ensure!(run(&a, to, MORE, number)? == OK, "the first fragment of packet {number}, to {to}");
        }
        for number in 100..400 {
            ensure!(run(&a, to, 4, number)? == OK, "a later fragment of packet {number}, to {to}");
        }
    }
    Ok(())
}
