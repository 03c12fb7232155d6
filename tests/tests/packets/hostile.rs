//! Bytes that nobody would send who means well.

use anyhow::{Result, ensure};
use wharf_common::Direction;
use wharf_tests::frame::{self, ARP, BROADCAST, IPV6};

use crate::fixture::{
    A, B, DELIVER, ELSEWHERE4, ELSEWHERE6, Endpoint, FROM_CONTAINER, GATEWAY4, GATEWAY6, OK, Outcome, PROGRAMS,
    REDIRECT, SHOT, TO_CONTAINER, pair, udp, with,
};

/// Packets that pass, one of each kind, for the hook of A that passes them.
fn good(program: &str) -> Vec<Vec<u8>> {
    if program == FROM_CONTAINER {
        let arp = frame::arp(1, (A.mac, A.v4), ([0; 6], GATEWAY4));
        let solicitation = frame::neighbour(135, A.v6, GATEWAY6, GATEWAY6, A.mac);
        vec![
            udp(A.v4, B.v4),
            udp(A.v6, B.v6),
            udp(A.v4, ELSEWHERE4),
            udp(A.v6, ELSEWHERE6),
            frame::ethernet(BROADCAST, A.mac, ARP, &arp),
            frame::ethernet(A.host_mac, A.mac, IPV6, &solicitation),
        ]
    } else {
        vec![udp(B.v4, A.v4), udp(B.v6, A.v6)]
    }
}

fn direction(program: &str) -> Direction {
    if program == FROM_CONTAINER { Direction::Egress } else { Direction::Ingress }
}

/// True for a length at which nothing of the packet is missing to the program: what an answer needs, or the whole.
fn complete(packet: &[u8], length: usize) -> bool {
    let needed = match packet.get(12..14) {
        Some([8, 6]) => 42,
        _ => packet.len(),
    };
    length >= needed
}

#[test]
fn a_packet_cut_anywhere_is_dropped() -> Result<()> {
    let (a, _b) = pair()?;
    for program in PROGRAMS {
        let before = a.counters()?.verdicts(direction(program));
        let mut runs = 0;
        for packet in good(program) {
            ensure!(packet.len() > 40, "a packet to cut");
            // Shorter than an Ethernet header the kernel does not let a test begin.
            for length in 14..packet.len() {
                let Some(outcome) = run(&a, program, &packet[..length])? else { continue };
                runs += 1;
                let expected = if complete(&packet, length) { REDIRECT } else { SHOT };
                ensure!(outcome.action == expected, "{program} at {length} of {} bytes: {outcome:?}", packet.len());
            }
        }
        ensure!(runs > 50, "{program}: only {runs} runs");
        ensure!(a.counters()?.verdicts(direction(program)) - before == runs, "{program}: a verdict for each packet");
    }
    Ok(())
}

#[test]
fn every_length_of_nothing_is_dropped() -> Result<()> {
    let (a, _b) = pair()?;
    for program in PROGRAMS {
        for length in 14..=80 {
            for filling in [0, 0x45, 0x60, 0xff] {
                let mut packet = vec![filling; length];
                // Past the first rule, so that the later ones are asked too.
                packet.splice(6..12, A.mac);
                for ethertype in [0x0800_u16, 0x86dd, 0x0806, 0x8100, 0] {
                    let packet = with(packet.clone(), 12, &ethertype.to_be_bytes());
                    if let Some(outcome) = run(&a, program, &packet)? {
                        ensure!(outcome.action == SHOT, "{program}, {length} bytes of {filling:#x}: {outcome:?}");
                    }
                }
            }
        }
    }
    Ok(())
}

/// Runs the program; `None` where the kernel itself refuses to make such a packet (an IP packet without an IP header).
fn run(a: &Endpoint, program: &str, packet: &[u8]) -> Result<Option<Outcome>> {
    let header = match packet.get(12..14) {
        Some([8, 0]) => 20,
        Some([0x86, 0xdd]) => 40,
        _ => 0,
    };
    match a.run(program, packet) {
        Ok(outcome) => Ok(Some(outcome)),
        Err(_) if packet.len() < 14 + header => Ok(None),
        Err(error) => Err(error),
    }
}

/// A small generator whose sequence is the same everywhere, so that a failure can be run again.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).unwrap_or(0) % sides
    }

    fn byte(&mut self) -> u8 {
        u8::try_from(self.roll(256)).unwrap_or(0)
    }
}

/// What must hold of any packet that a program lets go on.
fn check_passed(program: &str, outcome: &Outcome) -> Result<()> {
    let packet = &outcome.packet;
    let field = |from: usize, bytes: usize| packet.get(from..from + bytes).unwrap_or(&[]);
    let (source, destination) = match field(12, 2) {
        [8, 0] => (field(26, 4).to_vec(), field(30, 4).to_vec()),
        [0x86, 0xdd] => (field(22, 16).to_vec(), field(38, 16).to_vec()),
        [8, 6] => {
            ensure!(program == FROM_CONTAINER && outcome.action == REDIRECT, "ARP only as an answer");
            ensure!(field(0, 6) == A.mac && field(6, 6) == A.host_mac, "to the asker");
            ensure!(field(20, 2) == [0, 2] && field(22, 6) == A.host_mac && field(28, 4) == GATEWAY4.octets());
            return Ok(());
        }
        other => anyhow::bail!("protocol {other:02x?} went on"),
    };
    let is = |address: &[u8], v4: std::net::Ipv4Addr, v6: std::net::Ipv6Addr| {
        address == v4.octets() || address == v6.octets()
    };
    match (program, outcome.action) {
        (FROM_CONTAINER, OK) => {
            ensure!(field(6, 6) == A.mac && field(0, 6) == A.host_mac, "frame's addresses");
            ensure!(is(&source, A.v4, A.v6), "source");
            ensure!(!matches!(destination[..], [224..=239, _, _, _] | [255, 255, 255, 255]), "group");
            ensure!(destination.len() == 4 || destination.first() != Some(&0xff), "group");
            let embedded = destination.len() == 16
                && destination[..10] == [0; 10]
                && matches!(destination[10..12], [0, 0] | [0xff, 0xff]);
            ensure!(!embedded, "an IPv4 address in an IPv6 packet");
        }
        (FROM_CONTAINER, REDIRECT) if field(0, 6) == B.mac => {
            ensure!(field(6, 6) == B.host_mac && is(&source, A.v4, A.v6) && is(&destination, B.v4, B.v6), "to B");
        }
        // To A itself: its own packet, or an advertisement.
        (FROM_CONTAINER, REDIRECT) => {
            ensure!(field(0, 6) == A.mac && field(6, 6) == A.host_mac, "frame's addresses");
            let itself = is(&source, A.v4, A.v6) && is(&destination, A.v4, A.v6);
            ensure!(itself || (source == GATEWAY6.octets() && field(54, 2) == [136, 0]), "source");
        }
        (TO_CONTAINER, OK) | (DELIVER, REDIRECT) => {
            ensure!(field(0, 6) == A.mac && field(6, 6) == A.host_mac && is(&destination, A.v4, A.v6), "to A");
        }
        (_, action) => anyhow::bail!("verdict {action}"),
    }
    Ok(())
}

#[test]
fn whatever_passes_is_true() -> Result<()> {
    let (a, _b) = pair()?;
    let mut dice = Dice(0x5eed_0f0a);
    for program in PROGRAMS {
        let before = a.counters()?.verdicts(direction(program));
        let good = good(program);
        let (mut runs, mut passed) = (0_u64, 0_u64);
        for _ in 0..20_000 {
            let mut packet = good[dice.roll(good.len())].clone();
            for _ in 0..=dice.roll(3) {
                // Mostly in the headers.
                let place = dice.roll(packet.len().min(86));
                packet[place] = dice.byte();
            }
            if dice.roll(8) == 0 {
                packet.truncate(14 + dice.roll(packet.len() - 14));
            }
            let Some(outcome) = run(&a, program, &packet)? else { continue };
            runs += 1;
            if outcome.action != SHOT {
                passed += 1;
                check_passed(program, &outcome)
                    .map_err(|e| e.context(format!("{program} on {packet:02x?} gave {:02x?}", outcome.packet)))?;
            }
        }
        // Neither all nor nothing, or the test would not see anything.
        ensure!(passed > runs / 50 && passed < runs * 49 / 50, "{program}: {passed} of {runs} passed");
        let counted = a.counters()?.verdicts(direction(program)) - before;
        // `deliver` of A's own also counts what A sends to itself.
        ensure!(counted == runs, "{program}: {counted} verdicts for {runs} packets");
    }
    Ok(())
}

#[test]
fn noise_does_not_pass() -> Result<()> {
    let (a, _b) = pair()?;
    let mut dice = Dice(0x0123_4567_89ab_cdef);
    for program in PROGRAMS {
        for _ in 0..20_000 {
            let mut packet: Vec<u8> = (0..14 + dice.roll(200)).map(|_| dice.byte()).collect();
            packet.splice(6..12, A.mac);
            let ethertype = [[8, 0], [0x86, 0xdd], [8, 6]][dice.roll(3)];
            packet.splice(12..14, ethertype);
            if let Some(outcome) = run(&a, program, &packet)? {
                ensure!(outcome.action == SHOT, "{program} passed {packet:02x?}");
            }
        }
    }
    Ok(())
}
