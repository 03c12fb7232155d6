//! The fake's verdicts for test packets.

use std::net::IpAddr;

use wharf_common::{
    CellKey, PeerRow,
    policy::{Choice, DENY, IDENTITY_NODE},
};
use wharf_core::{
    ids::EndpointId,
    policy::PortRange,
    selfcheck::{Case, CaseResult, Family, Hook, Kind, Outcome, Report, Verdict},
};

use super::state::{Pinned, State};

fn address(packet: &[u8], offset: usize, family: Family) -> Option<IpAddr> {
    let bytes = packet.get(offset..)?;
    match family {
        Family::Ipv4 => bytes.first_chunk::<4>().map(|a| IpAddr::from(*a)),
        Family::Ipv6 => bytes.first_chunk::<16>().map(|a| IpAddr::from(*a)),
    }
}

fn is_denied(s: &State, id: EndpointId, case: &Case, peer: IpAddr, egress: bool) -> bool {
    let (rows, audits) = (&s.policy.rows, s.policy.mode.audits);
    let set = rows.sets.get(&id).map_or(0, |sets| if egress { sets.egress } else { sets.ingress });
    if set == 0 || audits {
        return false;
    }
    let longest = rows.peers.iter().filter(|(net, _)| net.contains(&peer)).max_by_key(|(net, _)| net.prefix_len());
    let Some((_, PeerRow { identity, class })) = longest else { return true };
    if *identity == IDENTITY_NODE && !egress {
        return false;
    }
    let (protocol, transport) = match case.family {
        Family::Ipv4 => (23, 34),
        Family::Ipv6 => (20, 54),
    };
    let protocol = case.packet.get(protocol).copied().unwrap_or_default();
    let port = case.packet.get(transport + 2..).and_then(|at| at.first_chunk()).map_or(0, |at| u16::from_be_bytes(*at));
    let has = |range: &PortRange| {
        let differs = u32::from(port ^ range.first) >> (16 - u32::from(range.length.min(16)));
        range.set == set && range.protocol == protocol && differs == 0
    };
    let ports = rows.ports.iter().filter(|(range, _)| has(range)).max_by_key(|(range, _)| range.length);
    let port = ports.map_or(0, |(_, class)| *class);
    let mut choice = Choice::NONE;
    for (class, port) in [(*class, port), (*class, 0), (0, port), (0, 0)] {
        if let Some((cell, _)) = rows.cells.get(&CellKey { set, class, port }) {
            choice.add(cell.admin, cell.rest);
        }
    }
    choice.decides().ruling == DENY
}

fn decide(s: &State, id: EndpointId, pinned: &Pinned, case: &Case) -> (Verdict, &'static str) {
    let Some(config) = &pinned.config else { return (Verdict::Drop, "no-config") };
    if !config.live {
        return (Verdict::Drop, "endpoint-not-ready");
    }
    let packet = &case.packet;
    let (own, source_at, destination_at) = match case.family {
        Family::Ipv4 => (config.ipv4.map(IpAddr::V4), 26, 30),
        Family::Ipv6 => (config.ipv6.map(IpAddr::V6), 22, 38),
    };
    let destination = address(packet, destination_at, case.family);
    if let Kind::Policy { egress, .. } = case.kind {
        let peer = address(packet, if egress { destination_at } else { source_at }, case.family);
        let denied = peer.is_none_or(|peer| is_denied(s, id, case, peer, egress));
        return if denied { (Verdict::Drop, "policy-denied") } else { (Verdict::Pass, "forwarded-stack") };
    }
    if case.hook == Hook::ToContainer {
        let is_own = own.is_some() && destination == own || destination.is_some_and(|to| config.sources.contains(to));
        return if is_own { (Verdict::Pass, "forwarded-stack") } else { (Verdict::Drop, "not-endpoint-address") };
    }
    if packet.get(6..12) != Some(&pinned.spec.container_mac.0[..]) {
        return (Verdict::Drop, "invalid-source-mac");
    }
    let asks = matches!(case.kind, Kind::Neighbour | Kind::FalseNeighbour);
    // In ARP, two bytes further than in IP.
    let source_at = if asks && case.family == Family::Ipv4 { source_at + 2 } else { source_at };
    let source = address(packet, source_at, case.family);
    if !asks && source.is_some_and(|from| config.sources.contains(from)) {
        return (Verdict::Pass, "forwarded-stack");
    }
    if own.is_none() || source != own {
        return (Verdict::Drop, if asks { "neighbour-spoof" } else { "invalid-source-ip" });
    }
    if config.chained {
        return (Verdict::Pass, "forwarded-stack");
    }
    if asks {
        return (Verdict::Redirect, "neighbour-answered");
    }
    match destination.and_then(|d| s.rows.get(&d)) {
        None => (Verdict::Pass, "forwarded-stack"),
        Some(row) if row.direct == 0 => (Verdict::Pass, "forwarded-stack"),
        Some(row) if s.calls.keys().any(|id| u32::from(id.get()) == row.endpoint_id) => {
            (Verdict::Redirect, "forwarded-local")
        }
        Some(_) => (Verdict::Drop, "destination-gone"),
    }
}

pub(super) fn verdicts(s: &State, id: EndpointId, cases: &[Case]) -> Option<Vec<CaseResult>> {
    let pinned = s.pins.get(&id)?;
    let outcome = |case: &Case| {
        let (verdict, reason) = decide(s, id, pinned, case);
        if !s.calls.contains_key(&id) {
            return Ok(Outcome { verdict: Verdict::Drop, packet: case.packet.clone(), reports: Vec::new() });
        }
        let same = verdict == case.verdict;
        let direction = if case.hook == Hook::FromContainer { "egress" } else { "ingress" };
        let packet = if same && !case.fields.is_empty() {
            case.fields.iter().flat_map(|f| f.bytes.iter().copied()).collect()
        } else {
            case.packet.clone()
        };
        let reports = if same { case.reports.clone() } else { vec![Report { endpoint: id, direction, reason }] };
        Ok(Outcome { verdict, packet, reports })
    };
    Some(cases.iter().map(outcome).collect())
}
