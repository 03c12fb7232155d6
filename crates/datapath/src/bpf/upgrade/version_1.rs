//! What the rows of `METRICS` mean in ABI version 1.

use wharf_common::{Counter, DropReason, drop_reason::REASONS};
use wharf_core::kernel::Result;

/// The first row, of each direction, that holds how many test packets another row counted.
const FIRST_TALLY: u32 = 24;
/// The rows that were counted so, in the order of their tallies.
const TALLIED: [DropReason; 6] = [
    DropReason::ForwardedLocal,
    DropReason::ForwardedStack,
    DropReason::NeighbourAnswered,
    DropReason::InvalidSourceMac,
    DropReason::InvalidSourceIp,
    DropReason::EndpointNotReady,
];

/// A row of each CPU without test packets.
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
