//! `METRICS` in ABI version 1.

use wharf_common::{Counter, DropReason, drop_reason::REASONS};
use wharf_core::kernel::Result;

/// First tally row of each direction. A tally counts another row's test packets.
const FIRST_TALLY: u32 = 24;
const TALLIED: [DropReason; 6] = [
    DropReason::ForwardedLocal,
    DropReason::ForwardedStack,
    DropReason::NeighbourAnswered,
    DropReason::InvalidSourceMac,
    DropReason::InvalidSourceIp,
    DropReason::EndpointNotReady,
];

/// Without test packets. A tallied row's difference goes to the first CPU; tally rows become zero.
pub(super) fn row(index: u32, read: impl Fn(u32) -> Result<Vec<Counter>>) -> Result<Vec<Counter>> {
    let (number, first_of_direction) = (index % REASONS, index - index % REASONS);
    let mut row = read(index)?;
    if number >= FIRST_TALLY {
        row.fill(Counter::default());
    } else if let Some(place) = (0..).zip(TALLIED).find_map(|(place, r)| (r as u32 == number).then_some(place)) {
        let tally = sum(&read(first_of_direction + FIRST_TALLY + place)?);
        let all = sum(&row);
        row.fill(Counter::default());
        if let Some(first) = row.first_mut() {
            first.packets = all.packets.saturating_sub(tally.packets);
            first.bytes = all.bytes.saturating_sub(tally.bytes);
        }
    }
    Ok(row)
}

fn sum(row: &[Counter]) -> Counter {
    row.iter().fold(Counter::default(), |sum, one| Counter {
        packets: sum.packets.wrapping_add(one.packets),
        bytes: sum.bytes.wrapping_add(one.bytes),
    })
}
