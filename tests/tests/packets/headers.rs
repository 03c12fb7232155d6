//! What policy makes of packets whose transport header is hard to find, or not there.

use std::net::IpAddr;

use anyhow::{Context, Result, ensure};
use aya::maps::{Array, HashMap, LpmTrie, MapData, lpm_trie::Key};
use wharf_common::{
    CellKey, CellRow,
    Direction::Egress,
    DropReason::{self, ForwardedStack, LoneFragment, PolicyDenied, UnknownTransport},
    EndpointKey, PeerRow, PolicyState, PortKey, SetsRow, map,
    policy::{ACCEPT, DENY, Hit, PORT_PREFIX_BITS, PORT_UNKNOWN},
};
use wharf_tests::frame;

use crate::fixture::{A, ELSEWHERE4, ELSEWHERE6, Endpoint, FROM_CONTAINER};

const TCP: u8 = 6;
const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
const OPTIONS: u8 = 60;
/// Every extension header of IPv6 that tells the header after it (IANA, "IPv6 Extension Header Types"), but for those
/// of experiments.
const EXTENSIONS: [u8; 8] = [0, 43, FRAGMENT, AUTHENTICATION, OPTIONS, 135, 139, 140];
/// So many are looked behind.
const SEARCHED: usize = 6;
/// A port that a rule names, and one that none does.
const NAMED: u16 = 25;
const OTHER: u16 = 80;

/// Rules about what A sends.
#[derive(Debug, Clone, Copy)]
enum Rules {
    /// There is no policy.
    None,
    Accept,
    Deny,
    /// Everything but the port.
    DenyPort,
    /// The port alone.
    AcceptPort,
}

impl Rules {
    /// Puts them in force, as `wharf-policy` compiles them.
    fn enforce(self, a: &mut Endpoint, generation: u32) -> Result<()> {
        const SET: u32 = 1;
        const CLASS: u32 = 1;
        let any = |ruling| vec![(0, 9, ruling)];
        let port = |ruling| vec![(CLASS, 1, ruling), (PORT_UNKNOWN, 1, DENY)];
        let cells = match self {
            Self::None => Vec::new(),
            Self::Accept => any(ACCEPT),
            Self::Deny => any(DENY),
            Self::DenyPort => [any(ACCEPT), port(DENY)].concat(),
            Self::AcceptPort => [any(DENY), port(ACCEPT)].concat(),
        };
        let mut peers: LpmTrie<&mut MapData, EndpointKey, PeerRow> =
            a.node.map_mut(map::IPCACHE).context("peers")?.try_into()?;
        for address in [EndpointKey::v4(ELSEWHERE4.octets()), EndpointKey::v6(ELSEWHERE6.octets())] {
            peers.insert(&Key::new(128, address), PeerRow { identity: 2, class: 7 }, 0)?;
        }
        let mut ports: LpmTrie<&mut MapData, PortKey, u32> =
            a.node.map_mut(map::POLICY_PORTS).context("ports")?.try_into()?;
        let key = PortKey { set: SET, protocol: TCP, _pad: 0, port: NAMED.to_be_bytes() };
        ports.insert(&Key::new(PORT_PREFIX_BITS + 16, key), CLASS, 0)?;
        let mut rows: HashMap<&mut MapData, CellKey, CellRow> =
            a.node.map_mut(map::POLICY_CELLS).context("cells")?.try_into()?;
        for port in [0, CLASS, PORT_UNKNOWN] {
            let key = CellKey { set: SET, class: 0, port };
            let row = cells.iter().find(|(of, ..)| *of == port).map(|(_, rank, ruling)| CellRow {
                admin: Hit::NONE,
                rest: Hit { rank: *rank, rule: 1, ruling: *ruling },
                packets: 0,
                bytes: 0,
            });
            match row {
                Some(row) => rows.insert(key, row, 0)?,
                None => drop(rows.remove(&key)),
            }
        }
        let mut sets: Array<&mut MapData, SetsRow> = a.node.map_mut(map::POLICY_SETS).context("sets")?.try_into()?;
        sets.set(A.id, SetsRow { ingress: 0, egress: SET }, 0)?;
        let generation = if matches!(self, Self::None) { 0 } else { generation };
        let mut state: Array<&mut MapData, PolicyState> =
            a.node.map_mut(map::POLICY_STATE).context("state")?.try_into()?;
        Ok(state.set(0, PolicyState { generation, flags: 0 }, 0)?)
    }

    /// What becomes of a packet to a port of TCP; `None`: of one that does not show its port.
    fn of_port(self, port: Option<u16>) -> DropReason {
        match (self, port) {
            (Self::None | Self::Accept, _) => ForwardedStack,
            (Self::Deny, _) => PolicyDenied,
            (_, None) => UnknownTransport,
            (Self::DenyPort, Some(port)) => {
                if port == NAMED {
                    PolicyDenied
                } else {
                    ForwardedStack
                }
            }
            (Self::AcceptPort, Some(port)) => {
                if port == NAMED {
                    ForwardedStack
                } else {
                    PolicyDenied
                }
            }
        }
    }

    /// What becomes of a packet of a protocol without ports.
    fn portless(self) -> DropReason {
        match self {
            Self::None | Self::Accept | Self::DenyPort => ForwardedStack,
            Self::Deny | Self::AcceptPort => PolicyDenied,
        }
    }
}

const POLICIES: [Rules; 4] = [Rules::Accept, Rules::Deny, Rules::DenyPort, Rules::AcceptPort];

/// What became of a packet that A sent.
fn sent(a: &Endpoint, packet: &[u8]) -> Result<DropReason> {
    let before = a.counters()?;
    a.run(FROM_CONTAINER, packet)?;
    let counted = a.counters()?.since(&before)?;
    // Beyond the budget of events, those that are left out are counted as well.
    let verdicts = counted.iter().filter(|(_, reason, ..)| reason.is_verdict()).collect::<Vec<_>>();
    match verdicts[..] {
        [(Egress, reason, 1, _)] => Ok(*reason),
        _ => anyhow::bail!("counted {counted:?}"),
    }
}

/// An extension header of this kind, before a header of kind `next`.
fn extension(kind: u8, next: u8) -> Vec<u8> {
    match kind {
        // An atomic one (RFC 6946).
        FRAGMENT => vec![next, 0, 0, 0, 0, 0, 0, 9],
        // 16 bytes, of which 4 are the check value.
        AUTHENTICATION => [&[next, 2][..], &[7; 14]].concat(),
        // 16 bytes, filled.
        _ => [&[next, 1, 1, 12][..], &[0; 12]].concat(),
    }
}

/// Headers of these kinds, before what follows of kind `next`: the first kind, and the bytes.
fn chain(kinds: &[u8], next: u8) -> (u8, Vec<u8>) {
    kinds.iter().rev().fold((next, Vec::new()), |(next, rest), kind| (*kind, [extension(*kind, next), rest].concat()))
}

/// The opening of a TCP connection to a port.
fn tcp(port: u16) -> Vec<u8> {
    [&40_000_u16.to_be_bytes()[..], &port.to_be_bytes(), &[0; 8], &[0x50, 2, 0, 9, 0, 0, 0, 0]].concat()
}

/// A's packet to elsewhere.
fn packet(to: IpAddr, next: u8, payload: &[u8]) -> Vec<u8> {
    let from = if to.is_ipv4() { A.v4.into() } else { A.v6.into() };
    let ethertype = if to.is_ipv4() { frame::IPV4 } else { frame::IPV6 };
    frame::ethernet(A.host_mac, A.mac, ethertype, &frame::ip(from, to, next, payload))
}

fn packet6(next: u8, payload: &[u8]) -> Vec<u8> {
    packet(ELSEWHERE6.into(), next, payload)
}

#[test]
fn a_rule_about_ports_sees_through_extension_headers_or_drops() -> Result<()> {
    let mut a = Endpoint::load(A)?;
    for (generation, rules) in (1..).zip(POLICIES) {
        rules.enforce(&mut a, generation)?;
        let all_of_one = EXTENSIONS.into_iter().flat_map(|kind| (0..SEARCHED + 3).map(move |count| vec![kind; count]));
        let of_all = (0..=EXTENSIONS.len()).map(|count| EXTENSIONS[..count].to_vec());
        for kinds in all_of_one.chain(of_all) {
            for port in [NAMED, OTHER] {
                let (next, headers) = chain(&kinds, TCP);
                let told = sent(&a, &packet6(next, &[headers, tcp(port)].concat()))?;
                let expected = rules.of_port((kinds.len() <= SEARCHED).then_some(port));
                ensure!(told == expected, "{rules:?}, port {port} behind {kinds:?}: {told:?}, not {expected:?}");
            }
        }
    }
    Ok(())
}

/// Those of a packet whose transport header is not found, and protocols without ports.
#[test]
fn what_shows_no_port_is_dropped_where_a_port_could_decide_and_other_protocols_are_not() -> Result<()> {
    let mut a = Endpoint::load(A)?;
    let unknown6 = |what, next, payload: &[u8]| (what, packet6(next, payload));
    let (options, headers) = chain(&[OPTIONS; 6], TCP);
    let far = [&[OPTIONS, 120, 1, 255][..], &[0; 964]].concat();
    let unknown = [
        unknown6("a TCP header of two bytes", TCP, &[0, 25]),
        unknown6("no TCP header", TCP, &[]),
        unknown6("no TCP header behind options", options, &headers),
        unknown6("a header longer than the packet", OPTIONS, &[TCP, 200, 1, 4, 0, 0, 0, 0]),
        unknown6("a header of two bytes", OPTIONS, &[TCP, 0]),
        unknown6("AH longer than the packet", AUTHENTICATION, &[TCP, 200, 0, 0, 0, 0, 0, 0]),
        unknown6("headers longer than are searched", OPTIONS, &[&far[..], &far, &far, &tcp(OTHER)].concat()),
        ("IPv4, two bytes of TCP", packet(ELSEWHERE4.into(), TCP, &[0, 25])),
        ("IPv4, seven times AH", packet(ELSEWHERE4.into(), AUTHENTICATION, &chain(&[AUTHENTICATION; 7], TCP).1)),
        ("IPv4, protocol 0", packet(ELSEWHERE4.into(), 0, &tcp(OTHER))),
    ];
    // ESP, GRE, OSPF, none, DCCP, two for experiments, a number without a protocol; of IPv4 also those that are headers
    // of IPv6 alone.
    let other6 = [50, 47, 89, 59, 33, 253, 254, 200].map(|next| (ELSEWHERE6.into(), next));
    let other4 = [50, 47, 89, 59, 43, OPTIONS, 135, 255].map(|next| (ELSEWHERE4.into(), next));
    for (generation, rules) in (1..).zip([Rules::None].into_iter().chain(POLICIES)) {
        rules.enforce(&mut a, generation)?;
        for (what, packet) in &unknown {
            let (told, expected) = (sent(&a, packet)?, rules.of_port(None));
            ensure!(told == expected, "{rules:?}, {what}: {told:?}, not {expected:?}");
        }
        for (to, next) in other6.into_iter().chain(other4) {
            let (told, expected) = (sent(&a, &packet(to, next, &tcp(NAMED)))?, rules.portless());
            ensure!(told == expected, "{rules:?}, protocol {next} to {to}: {told:?}, not {expected:?}");
        }
        for port in [NAMED, OTHER] {
            let behind = [extension(AUTHENTICATION, TCP), tcp(port)].concat();
            let (told, expected) =
                (sent(&a, &packet(ELSEWHERE4.into(), AUTHENTICATION, &behind))?, rules.of_port(Some(port)));
            ensure!(told == expected, "{rules:?}, IPv4, port {port} behind AH: {told:?}, not {expected:?}");
        }
    }
    Ok(())
}

/// A fragment of A's to elsewhere, the fragment header first: `place` is flags and offset of IPv6.
fn fragment(next: u8, place: u16, identification: u32, payload: &[u8]) -> Vec<u8> {
    let header = [&[next, 0][..], &place.to_be_bytes(), &identification.to_be_bytes()].concat();
    packet6(FRAGMENT, &[&header, payload].concat())
}

#[test]
fn fragments_follow_a_first_one_that_shows_no_port() -> Result<()> {
    const MORE: u16 = 1;
    const LATER: u16 = 160 << 3;
    let mut a = Endpoint::load(A)?;
    let (next, headers) = chain(&[OPTIONS; SEARCHED + 1], TCP);
    for (generation, rules) in (1..).zip(POLICIES) {
        rules.enforce(&mut a, generation)?;
        for (packet, what) in [
            (fragment(next, MORE, generation, &[&headers[..], &tcp(NAMED)].concat()), "the first"),
            (fragment(next, LATER, generation, &tcp(OTHER)), "a later one"),
        ] {
            let (told, expected) = (sent(&a, &packet)?, rules.of_port(None));
            ensure!(told == expected, "{rules:?}, {what}: {told:?}, not {expected:?}");
        }
    }
    Ok(())
}

/// The ports are in a later fragment, which no rule sees (RFC 7112).
#[test]
fn a_first_fragment_without_all_headers_is_dropped_and_its_packet_with_it() -> Result<()> {
    const MORE: u16 = 1;
    let mut a = Endpoint::load(A)?;
    let options = extension(OPTIONS, TCP);
    // Its own length leaves these ports out, and so does the receiver.
    let mut padded = fragment(TCP, MORE, 7, &tcp(OTHER));
    padded.splice(18..20, 8_u16.to_be_bytes());
    let mut padded_options = fragment(OPTIONS, MORE, 7, &[&options[..], &tcp(OTHER)].concat());
    padded_options.splice(18..20, 24_u16.to_be_bytes());
    let cases = [
        (fragment(TCP, MORE, 7, &[]), "no transport header"),
        (fragment(OPTIONS, MORE, 7, &options), "no transport header behind options"),
        (fragment(OPTIONS, MORE, 7, &options[..8]), "half of the options"),
        (padded, "a transport header behind the packet"),
        (padded_options, "a transport header behind the packet, behind options"),
    ];
    for (generation, rules) in (1..).zip([Rules::None].into_iter().chain(POLICIES)) {
        rules.enforce(&mut a, generation)?;
        for (packet, what) in &cases {
            let told = sent(&a, packet)?;
            ensure!(told == UnknownTransport, "{rules:?}, {what}: {told:?}");
            let told = sent(&a, &fragment(TCP, 1 << 3, 7, &tcp(OTHER)))?;
            ensure!(told == LoneFragment, "{rules:?}, the rest after {what}: {told:?}");
        }
    }
    Ok(())
}

/// The first one shows TCP behind the header, later ones the header's number alone.
#[test]
fn fragments_of_ipv4_behind_an_authentication_header_are_of_one_packet() -> Result<()> {
    let mut a = Endpoint::load(A)?;
    Rules::AcceptPort.enforce(&mut a, 1)?;
    let fragment = |place: u16, payload: &[u8]| {
        let mut packet = packet(ELSEWHERE4.into(), AUTHENTICATION, payload);
        packet.splice(18..22, [[0, 7], place.to_be_bytes()].concat());
        packet
    };
    let first = fragment(0x2000, &[extension(AUTHENTICATION, TCP), tcp(NAMED)].concat());
    for packet in [first, fragment(5, &[0; 8])] {
        let told = sent(&a, &packet)?;
        ensure!(told == ForwardedStack, "{told:?}");
    }
    let told = sent(&a, &fragment(0x2000, &[extension(AUTHENTICATION, TCP), tcp(OTHER)].concat()))?;
    ensure!(told == PolicyDenied, "{told:?}");
    Ok(())
}
