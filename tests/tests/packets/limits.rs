//! Limits of bandwidth: what is charged, and what becomes of what exceeds them.

use anyhow::{Result, ensure};
use wharf_common::{
    Bucket,
    Direction::{self, Egress, Ingress},
    DropReason::{self, *},
    EndpointConfig,
    map::{FLAG_LIMIT_EGRESS, FLAG_LIMIT_INGRESS, FLAG_LIVE},
};
use wharf_tests::frame;

use crate::fixture::{
    A, B, DELIVER, ELSEWHERE4, Endpoint, FROM_CONTAINER, GATEWAY4, GATEWAY6, TO_CONTAINER, pair, udp,
};

/// Direction and reason of the one packet that a run of the program counts.
fn counted(a: &Endpoint, program: &str, packet: &[u8]) -> Result<Vec<(Direction, DropReason)>> {
    let before = a.counters()?;
    a.run(program, packet)?;
    let changes = a.counters()?.since(&before)?;
    let bytes = u64::try_from(packet.len())?;
    ensure!(changes.iter().all(|(_, _, packets, counted)| (*packets, *counted) == (1, bytes)), "{changes:?}");
    Ok(changes.into_iter().map(|(direction, reason, ..)| (direction, reason)).collect())
}

/// A bucket that is full, and is in debt for minutes after one packet.
const FULL: Bucket = Bucket { rate: 8, burst_ns: 1_000_000_000, empty_at_ns: 0 };

#[test]
fn what_is_forwarded_is_charged_and_nothing_else() -> Result<()> {
    let (mut a, _b) = pair()?;
    a.configure(EndpointConfig { flags: FLAG_LIVE | FLAG_LIMIT_EGRESS | FLAG_LIMIT_INGRESS, ..A.config() })?;
    let asked = frame::arp(1, (A.mac, A.v4), ([0; 6], GATEWAY4));
    let asked = frame::ethernet(frame::BROADCAST, A.mac, frame::ARP, &asked);
    for (program, direction, good, false_one, forwarded, refused) in [
        (FROM_CONTAINER, Egress, udp(A.v4, ELSEWHERE4), udp(B.v4, ELSEWHERE4), ForwardedStack, InvalidSourceIp),
        (FROM_CONTAINER, Egress, udp(A.v6, B.v6), udp(B.v6, A.v6), ForwardedLocal, InvalidSourceIp),
        (TO_CONTAINER, Ingress, udp(GATEWAY6, A.v6), udp(GATEWAY6, B.v6), ForwardedStack, NotOurAddress),
        (DELIVER, Ingress, udp(B.v4, A.v4), udp(A.v4, B.v4), ForwardedLocal, NotOurAddress),
    ] {
        a.limit(direction, FULL)?;
        for (packet, reason) in
            [(&false_one, refused), (&good, forwarded), (&good, BandwidthExceeded), (&false_one, refused)]
        {
            let seen = counted(&a, program, packet)?;
            ensure!(seen == [(direction, reason)], "{program}: {seen:?}, not {reason:?}");
        }
        let seen = counted(&a, FROM_CONTAINER, &asked)?;
        ensure!(seen == [(Egress, NeighbourAnswered)], "a neighbour message beyond the limit: {seen:?}");
    }
    Ok(())
}
