//! What becomes of packets that policy denies: also of those that the endpoint's own program has counted as forwarded before.

use anyhow::{Context, Result, ensure};
use aya::maps::{Array, MapData};
use wharf_common::{
    Direction::{Egress, Ingress},
    DropReason::{ForwardedLocal, ForwardedStack, PeerPolicyDenied, PolicyDenied},
    PolicyState, SetsRow, map,
    policy::POLICY_AUDITS,
};

use crate::fixture::{A, B, ELSEWHERE4, ELSEWHERE6, Endpoint, FROM_CONTAINER, OK, SHOT, TO_CONTAINER, pair, udp, with};

/// A rule set without rows. No peer's address has a row either, so it denies every packet.
const DENIES: u32 = 1;

/// The rule sets of A and B, and the state of the rules.
fn set(a: &mut Endpoint, sets: [SetsRow; 2], state: PolicyState) -> Result<()> {
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
