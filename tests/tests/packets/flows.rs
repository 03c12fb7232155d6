//! The flow tables: what the programs make of packets, against a model that knows nothing of its rows; and collection.

use std::{collections::HashMap as Model, net::IpAddr};

use anyhow::{Context, Result, ensure};
use aya::{
    maps::{Array, HashMap, MapData},
    programs::{RawTracePoint, RawTracePointRunOptions, TestRun},
};
use nix::time::{ClockId, clock_gettime};
use wharf_common::{
    Direction::Egress,
    DropReason, EndpointKey, FlowKey, FlowRow, FlowState, FlowTotals, FlowUse, FragmentKey, FragmentRow, FragmentSlot,
    flow::{
        FLOW_BY_HIGH, FLOW_BY_STACK, FLOW_RECENT, FLOW_REPLIED, FRAGMENT_TICKS, ICMP, ICMPV6, SCTP, TCP, TICK_SHIFT,
        UDP,
    },
    map,
};
use wharf_tests::frame;

use crate::{
    fixture::{
        A, B, Case, ELSEWHERE4, ELSEWHERE6, Endpoint, FROM_CONTAINER, OK, REDIRECT, SHOT, TO_CONTAINER, check_all,
        pair, udp, with,
    },
    hostile::Dice,
};

pub(crate) const FIN: u8 = 1;
pub(crate) const SYN: u8 = 2;
pub(crate) const RST: u8 = 4;
pub(crate) const ACK: u8 = 16;

/// A packet between A and somebody else.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sent {
    pub(crate) by_a: bool,
    pub(crate) other: IpAddr,
    pub(crate) protocol: u8,
    /// A's and the other's.
    pub(crate) ports: (u16, u16),
    pub(crate) flags: u8,
}

impl Sent {
    pub(crate) const fn new(other: IpAddr, protocol: u8, ports: (u16, u16)) -> Self {
        Self { by_a: true, other, protocol, ports, flags: ACK }
    }

    pub(crate) const fn with(self, flags: u8) -> Self {
        Self { flags, ..self }
    }

    pub(crate) const fn back(self) -> Self {
        Self { by_a: !self.by_a, ..self }
    }

    fn a(&self) -> IpAddr {
        if self.other.is_ipv4() { A.v4.into() } else { A.v6.into() }
    }

    fn program(&self) -> &'static str {
        if self.by_a { FROM_CONTAINER } else { TO_CONTAINER }
    }

    pub(crate) fn packet(&self) -> Vec<u8> {
        let (from, to, ports) = if self.by_a {
            (self.a(), self.other, self.ports)
        } else {
            (self.other, self.a(), (self.ports.1, self.ports.0))
        };
        let (source, destination) = (ports.0.to_be_bytes(), ports.1.to_be_bytes());
        let message = match self.protocol {
            TCP => [&source[..], &destination, &[0; 8], &[0x50, self.flags, 0, 0, 0, 0, 0, 0]].concat(),
            SCTP => [&source[..], &destination, &[0; 8], &[sctp_chunk(self.flags), 0, 0, 4]].concat(),
            UDP => [&source[..], &destination, &[0, 8, 0, 0]].concat(),
            ICMP => [&[if self.by_a { 8 } else { 0 }, 0, 0, 0][..], &source, &[0, 1]].concat(),
            ICMPV6 => [&[if self.by_a { 128 } else { 129 }, 0, 0, 0][..], &source, &[0, 1]].concat(),
            _ => vec![0; 8],
        };
        let ip = frame::ip(from, to, self.protocol, &message);
        frame::ethernet(A.host_mac, A.mac, if from.is_ipv4() { frame::IPV4 } else { frame::IPV6 }, &ip)
    }

    /// The flow's key: the lower end first, in the order of the addresses' words.
    pub(crate) fn key(&self) -> FlowKey {
        let has_ports = matches!(self.protocol, TCP | UDP | SCTP | ICMP | ICMPV6);
        let port = |port: u16| if has_ports { port.to_be() } else { 0 };
        let end = |address, number| (order(&key_of(address).addr), port(number), key_of(address));
        let mut ends = [end(self.a(), self.ports.0), end(self.other, self.ports.1)];
        ends.sort();
        let [(_, low_port, low), (_, high_port, high)] = ends;
        FlowKey { low, high, low_port, high_port, protocol: self.protocol, ..FlowKey::default() }
    }

    /// True when A is the flow's high end.
    pub(crate) fn a_is_high(&self) -> bool {
        self.key().high == key_of(self.a())
    }
}

fn sctp_chunk(flags: u8) -> u8 {
    match flags {
        SYN => 1,
        RST => 6,
        FIN => 7,
        _ => 0,
    }
}

fn key_of(address: IpAddr) -> EndpointKey {
    match address {
        IpAddr::V4(a) => EndpointKey::v4(a.octets()),
        IpAddr::V6(a) => EndpointKey::v6(a.octets()),
    }
}

/// An address as the programs compare it: two little-endian words.
fn order(octets: &[u8; 16]) -> [u64; 2] {
    let word = |at: usize| octets.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |bytes| u64::from_le_bytes(*bytes));
    [word(0), word(8)]
}

/// By the clock of the programs.
pub(crate) fn now() -> Result<u32> {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC_COARSE)?;
    Ok(u32::try_from(std::time::Duration::from(time).as_nanos() >> TICK_SHIFT)?)
}

pub(crate) type Rows<'a> = HashMap<&'a mut MapData, FlowKey, FlowRow>;

pub(crate) fn table<'a>(a: &'a mut Endpoint, name: &str) -> Result<Rows<'a>> {
    Ok(a.node.map_mut(name).with_context(|| format!("map {name}"))?.try_into()?)
}

/// The flow's row without [`FLOW_RECENT`], and whether the flow is kept.
pub(crate) fn row(a: &mut Endpoint, key: &FlowKey) -> Result<Option<(FlowRow, bool)>> {
    let mut found = Vec::new();
    for name in [map::FLOWS, map::FLOWS_NEW] {
        if let Ok(row) = table(a, name)?.get(key, 0) {
            let kept = name == map::FLOWS && row.flags & FLOW_RECENT == 0;
            found.push((FlowRow { flags: row.flags & !FLOW_RECENT, ..row }, kept));
        }
    }
    ensure!(found.len() < 2, "a flow is in both tables: {found:?}");
    Ok(found.pop())
}

pub(crate) fn totals(a: &Endpoint) -> Result<FlowTotals> {
    let rows: Array<&MapData, FlowTotals> = a.node.map(map::FLOW_TOTALS).context("totals")?.try_into()?;
    Ok(rows.get(&0, 0)?)
}

pub(crate) fn use_of(a: &mut Endpoint) -> Result<Array<&mut MapData, FlowUse>> {
    Ok(a.node.map_mut(map::FLOW_USE).context("use")?.try_into()?)
}

pub(crate) fn send(a: &Endpoint, sent: Sent) -> Result<()> {
    let outcome = a.run(sent.program(), &sent.packet())?;
    ensure!(outcome.action == OK, "{sent:?}: {outcome:?}");
    Ok(())
}

/// Flows of each kind that has ports, and one that has none.
fn kinds() -> Vec<Sent> {
    let mut kinds = Vec::new();
    for other in
        [IpAddr::from(ELSEWHERE4), IpAddr::from(ELSEWHERE6), IpAddr::from([1, 0, 0, 1]), IpAddr::from([250, 9, 0, 1])]
    {
        let icmp = if other.is_ipv4() { ICMP } else { ICMPV6 };
        for protocol in [TCP, UDP, SCTP] {
            kinds.push(Sent::new(other, protocol, (40_000, 443)));
            kinds.push(Sent::new(other, protocol, (443, 40_000)));
        }
        kinds.push(Sent::new(other, icmp, (77, 77)));
        kinds.push(Sent::new(other, 47, (0, 0)));
    }
    kinds
}

#[test]
fn both_directions_of_a_flow_share_one_row() -> Result<()> {
    let (mut a, _b) = pair()?;
    for first in kinds().into_iter().flat_map(|sent| [sent, sent.back()]) {
        // Echo has a direction of its own.
        if matches!(first.protocol, ICMP | ICMPV6) && !first.by_a {
            continue;
        }
        let key = first.key();
        let _ = table(&mut a, map::FLOWS)?.remove(&key);
        let _ = table(&mut a, map::FLOWS_NEW)?.remove(&key);
        let begun_by_high = if first.by_a == first.a_is_high() { FLOW_BY_HIGH } else { 0 };
        let (low_epoch, high_epoch) = if first.a_is_high() { (0, 101) } else { (101, 0) };
        let expected =
            |flags| FlowRow { low_epoch, high_epoch, flags: begun_by_high | flags, owner: 1, ..FlowRow::default() };
        for (sent, flags, kept) in [
            (first, 0, false),
            (first, 0, false),
            (first.back(), FLOW_REPLIED, false),
            (first.back(), FLOW_REPLIED, false),
            (first, FLOW_REPLIED, true),
            (first.back(), FLOW_REPLIED, true),
        ] {
            send(&a, sent)?;
            let (mut row, is_kept) = row(&mut a, &key)?.with_context(|| format!("no row after {sent:?}"))?;
            ensure!(now()?.abs_diff(std::mem::take(&mut row.seen)) <= 1, "when it was seen");
            ensure!((row, is_kept) == (expected(flags), kept), "{sent:?}: {row:?}, kept: {is_kept}");
        }
    }
    Ok(())
}

/// What a flow is, told by somebody who only saw its packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Seen {
    begun_by_a: bool,
    replied: bool,
    closed_by_a: bool,
    closed_by_other: bool,
    reset: bool,
    kept: bool,
}

impl Seen {
    /// None while there is no flow: a reset begins none, and neither does an answer to an opening that nobody saw.
    fn next(before: Option<Self>, sent: Sent) -> Option<Self> {
        let is = |flag: u8| match sent.protocol {
            TCP => sent.flags & flag != 0,
            // One chunk says one thing.
            SCTP => sent.flags == flag,
            _ => false,
        };
        let opens = is(SYN) && !(sent.protocol == TCP && is(ACK | RST));
        let answers = sent.protocol == TCP && is(SYN) && is(ACK);
        let new = Self { begun_by_a: sent.by_a, ..Self::default() };
        let mut seen = match before {
            Some(seen) if !(opens && (seen.reset || seen.closed_by_a || seen.closed_by_other)) => {
                Self { reset: false, ..seen }
            }
            _ if is(RST) || answers => return None,
            _ => new,
        };
        seen.replied |= sent.by_a != seen.begun_by_a;
        if is(RST) {
            seen.reset = true;
        } else if is(FIN) {
            seen.closed_by_a |= sent.by_a;
            seen.closed_by_other |= !sent.by_a;
        }
        // Whoever began it goes on after an answer.
        seen.kept |= seen.replied && sent.by_a == seen.begun_by_a;
        Some(seen)
    }

    fn state(&self) -> FlowState {
        match (self.reset, self.closed_by_a, self.closed_by_other) {
            (true, ..) | (_, true, true) => FlowState::Closed,
            (_, true, _) | (_, _, true) => FlowState::Closing,
            _ if self.replied => FlowState::Established,
            _ => FlowState::New,
        }
    }
}

/// A million packets of a few flows in any order, against the model.
#[test]
fn rows_say_what_a_model_says() -> Result<()> {
    const PACKETS: usize = 1_000_000;
    let (mut a, _b) = pair()?;
    let mut dice = Dice(0x0f10_35ee);
    let mut model: Model<FlowKey, (Sent, Seen)> = Model::new();
    let kinds: Vec<Sent> = kinds().into_iter().filter(|sent| !matches!(sent.protocol, ICMP | ICMPV6)).collect();
    let packets: Vec<(Sent, FlowKey, Vec<u8>)> = kinds
        .iter()
        .flat_map(|kind| [*kind, kind.back()])
        .flat_map(|sent| [ACK, ACK, ACK, SYN, SYN | ACK, FIN | ACK, FIN, RST, RST | ACK].map(|flags| sent.with(flags)))
        .map(|sent| (sent, sent.key(), sent.packet()))
        .collect();
    let mut states = [0_usize; 4];
    for number in 0..PACKETS {
        let (sent, key, packet) = &packets[dice.roll(packets.len())];
        ensure!(a.run(sent.program(), packet)?.action == OK, "{sent:?}");
        let Some(seen) = Seen::next(model.get(key).map(|(_, seen)| *seen), *sent) else {
            ensure!(row(&mut a, key)?.is_none(), "packet {number}, {sent:?}, began a flow");
            continue;
        };
        model.insert(*key, (*sent, seen));
        states[seen.state() as usize] += 1;
        // The rows are read now and then; a wrong one stays wrong long enough to be met.
        if number % 16 == 0 || number + 1 == PACKETS {
            check(&mut a, key, *sent, seen).with_context(|| format!("after packet {number}, {sent:?}"))?;
        }
    }
    ensure!(states.iter().all(|met| *met > PACKETS / 200), "every state was met: {states:?}");
    ensure!(model.len() == kinds.len(), "{} flows", model.len());
    for (key, (sent, seen)) in model {
        check(&mut a, &key, sent, seen)?;
    }
    Ok(())
}

fn check(a: &mut Endpoint, key: &FlowKey, sent: Sent, seen: Seen) -> Result<()> {
    let (row, kept) = row(a, key)?.context("no row")?;
    let begun_by_a = (row.flags & FLOW_BY_HIGH != 0) == sent.a_is_high();
    let is = (begun_by_a, row.flags & FLOW_REPLIED != 0, row.state(), kept);
    let expected = (seen.begun_by_a, seen.replied, seen.state(), seen.kept);
    ensure!(is == expected, "{is:?}, the model says {expected:?}; {row:?}, {seen:?}");
    Ok(())
}

/// Runs one collection.
pub(crate) fn collect(a: &mut Endpoint) -> Result<()> {
    let program: &mut RawTracePoint = a.node.program_mut(map::COLLECT).context("collect")?.try_into()?;
    if program.fd().is_err() {
        program.load()?;
    }
    program.test_run(RawTracePointRunOptions::new())?;
    Ok(())
}

fn put(a: &mut Endpoint, port: u16, protocol: u8, row: FlowRow) -> Result<FlowKey> {
    let key = Sent::new(ELSEWHERE4.into(), protocol, (port, 443)).key();
    table(a, map::FLOWS)?.insert(key, row, 0)?;
    Ok(key)
}

#[test]
fn collection_removes_what_is_over_and_nothing_else() -> Result<()> {
    let (mut a, _b) = pair()?;
    let (now, a_is_high) = (now()?, Sent::new(ELSEWHERE4.into(), TCP, (1, 443)).a_is_high());
    let epochs = |epoch| if a_is_high { (0, epoch) } else { (epoch, 0) };
    let mut expected = Vec::new();
    let mut port = 0;
    let (mut expired, mut orphaned) = (0, 0);
    for protocol in [TCP, UDP, SCTP, ICMP] {
        for flags in [0, FLOW_REPLIED, FLOW_REPLIED | wharf_common::flow::FLOW_FIN, wharf_common::flow::FLOW_RESET] {
            let (low_epoch, high_epoch) = epochs(101);
            let row = FlowRow { low_epoch, high_epoch, flags, owner: 1, ..FlowRow::default() };
            let timeout = row.state().timeout(protocol);
            // Two ticks on either side: the clock goes on.
            for (age, lives) in [(0, true), (timeout.saturating_sub(2), true), (timeout + 2, false)] {
                port += 1;
                let key = put(&mut a, port, protocol, FlowRow { seen: now.wrapping_sub(age), ..row })?;
                expected.push((key, lives));
                expired += u64::from(!lives);
            }
        }
    }
    // The endpoint of that epoch is gone; whether it is, is looked at when the flow has been silent for a moment.
    for (epoch, age, lives) in [(101, 20, true), (100, 20, false), (100, 0, true)] {
        port += 1;
        let (low_epoch, high_epoch) = epochs(epoch);
        let row =
            FlowRow { seen: now - age, low_epoch, high_epoch, flags: FLOW_REPLIED, owner: 1, ..FlowRow::default() };
        expected.push((put(&mut a, port, TCP, row)?, lives));
        orphaned += u64::from(!lives);
    }
    for rounds in 1..=2 {
        collect(&mut a)?;
        for (key, lives) in &expected {
            let found = row(&mut a, key)?;
            ensure!(found.is_some() == *lives, "round {rounds}, {key:?}: {found:?}");
        }
        let rows = u64::try_from(expected.iter().filter(|(_, lives)| *lives).count())?;
        let is = totals(&a)?;
        ensure!((is.rows, is.expired, is.orphaned) == (rows, expired, orphaned), "{is:?}");
        let used = use_of(&mut a)?.get(&1, 0)?;
        ensure!(u64::from(used.rows) == rows, "{used:?}");
    }
    Ok(())
}

#[test]
fn an_endpoint_that_has_its_quota_harms_none_of_its_flows() -> Result<()> {
    let (mut a, _b) = pair()?;
    let first = Sent::new(ELSEWHERE4.into(), UDP, (5_000, 53));
    use_of(&mut a)?.set(1, FlowUse { rows: map::FLOWS_QUOTA, ..FlowUse::default() }, 0)?;
    for sent in [first, first.back(), first, first.back(), first] {
        send(&a, sent)?;
    }
    let (row_of, kept) = row(&mut a, &first.key())?.context("a row")?;
    ensure!(!kept && row_of.state() == FlowState::Established, "{row_of:?}, kept: {kept}");
    ensure!(totals(&a)?.over_quota == 2, "{:?}", totals(&a)?);
    // Room again: the next packet moves it.
    use_of(&mut a)?.set(1, FlowUse { rows: map::FLOWS_QUOTA - 1, ..FlowUse::default() }, 0)?;
    send(&a, first)?;
    ensure!(row(&mut a, &first.key())?.context("a row")?.1, "kept");
    ensure!(use_of(&mut a)?.get(&1, 0)?.rows == map::FLOWS_QUOTA, "counted");

    // So many flows in a tick; the tick after may have begun meanwhile, so the next two are used up as well.
    let second = Sent { ports: (5_001, 53), ..first };
    for tick in now()?..=now()? + 1 {
        let used = FlowUse { tick, begun: map::FLOWS_PER_TICK, ..FlowUse::default() };
        use_of(&mut a)?.set(1, used, 0)?;
        let before = totals(&a)?.untracked;
        send(&a, second)?;
        if totals(&a)?.untracked == before + 1 {
            ensure!(row(&mut a, &second.key())?.is_none(), "no row");
            return Ok(());
        }
        let _ = table(&mut a, map::FLOWS)?.remove(&second.key());
    }
    anyhow::bail!("an endpoint began more flows in a tick than it may")
}

/// A million first packets, each of another flow, from an endpoint and from outside.
#[test]
fn a_flood_evicts_no_established_flow() -> Result<()> {
    const FLOOD: u32 = 1_000_000;
    const KEPT: u16 = 500;
    let (mut a, _b) = pair()?;
    let kept: Vec<Sent> = (1..=KEPT).map(|port| Sent::new(ELSEWHERE4.into(), TCP, (port, 443))).collect();
    for first in &kept {
        for sent in [*first, first.back(), *first] {
            send(&a, sent)?;
        }
    }
    let mut from_a = Sent::new(ELSEWHERE4.into(), TCP, (9, 9)).with(SYN).packet();
    let mut to_a = Sent::new(ELSEWHERE4.into(), TCP, (9, 9)).back().with(SYN).packet();
    for number in 0..FLOOD / 2 {
        // The other end's address and ports; nobody looks at the header's checksum.
        let [_, b, c, d] = number.to_be_bytes();
        for (packet, address, ports, program) in
            [(&mut from_a, 30, 36, FROM_CONTAINER), (&mut to_a, 26, 34, TO_CONTAINER)]
        {
            packet.splice(address..address + 4, [198, b, c, 1]);
            packet.splice(ports..ports + 2, [c, d]);
            ensure!(a.run(program, packet)?.action == OK, "a packet of the flood passes");
        }
    }
    let totals = totals(&a)?;
    ensure!(totals.over_quota == 0 && totals.no_room == 0, "{totals:?}");
    for first in kept {
        let (row, kept) = row(&mut a, &first.key())?.with_context(|| format!("{first:?} is gone"))?;
        ensure!(kept && row.state() == FlowState::Established, "{first:?}: {row:?}");
    }
    let rows = table(&mut a, map::FLOWS)?.keys().count();
    let shares = usize::try_from(2 * map::FLOWS_SHARE)?;
    ensure!(rows <= usize::from(KEPT) + shares, "the flood took more places than its endpoint's shares: {rows}");
    Ok(())
}

#[test]
fn a_row_of_another_epoch_is_not_the_flows() -> Result<()> {
    let (mut a, _b) = pair()?;
    let first = Sent::new(ELSEWHERE4.into(), TCP, (40_000, 443));
    for sent in [first.back(), first, first.back()] {
        send(&a, sent)?;
    }
    ensure!(row(&mut a, &first.key())?.context("a row")?.1, "established, and begun from outside");
    a.configure(wharf_common::EndpointConfig { epoch: 201, ..A.config() })?;
    send(&a, first)?;
    let (row, kept) = row(&mut a, &first.key())?.context("a row")?;
    let by_a = (row.flags & FLOW_BY_HIGH != 0) == first.a_is_high();
    ensure!(by_a && !kept && row.state() == FlowState::New, "{row:?}, kept: {kept}");
    ensure!(row.low_epoch + row.high_epoch == 201, "{row:?}");
    Ok(())
}

/// A fragment of A's UDP datagram: `place` is flags and offset as IPv4 has them.
pub(crate) fn fragment(to: IpAddr, place: u16, identification: u16, payload: &[u8]) -> Vec<u8> {
    match to {
        IpAddr::V4(to) => {
            let mut ip = frame::ip(A.v4.into(), to.into(), UDP, payload);
            ip.splice(4..8, [identification.to_be_bytes(), place.to_be_bytes()].concat());
            ip.splice(10..12, [0, 0]);
            let checksum = wharf_tests::icmp::internet_checksum(&ip[..20]);
            ip.splice(10..12, checksum.to_be_bytes());
            frame::ethernet(A.host_mac, A.mac, frame::IPV4, &ip)
        }
        IpAddr::V6(to) => {
            let bits = (place & 0x1fff) << 3 | place >> 13;
            let header = [&[UDP, 0][..], &bits.to_be_bytes(), &u32::from(identification).to_be_bytes()].concat();
            let ip = frame::ipv6(A.v6, to, 44, 64, &[&header, payload].concat());
            frame::ethernet(A.host_mac, A.mac, frame::IPV6, &ip)
        }
    }
}

#[test]
fn later_fragments_belong_to_the_first() -> Result<()> {
    const MORE: u16 = 0x2000;
    let (mut a, _b) = pair()?;
    let ports = [40_000_u16.to_be_bytes(), 443_u16.to_be_bytes()].concat();
    for (to, local) in
        [(IpAddr::from(ELSEWHERE4), false), (ELSEWHERE6.into(), false), (B.v4.into(), true), (B.v6.into(), true)]
    {
        let first = fragment(to, MORE, 7, &[&ports[..], &[0; 12]].concat());
        let rest = [fragment(to, MORE | 2, 7, &[1; 16]), fragment(to, 4, 7, &[2; 8])];
        let passes = if local { REDIRECT } else { OK };
        for later in &rest {
            ensure!(a.run(FROM_CONTAINER, later)?.action == SHOT, "a later fragment before the first, to {to}");
        }
        for each in [&first].into_iter().chain(&rest) {
            ensure!(a.run(FROM_CONTAINER, each)?.action == passes, "a fragment after the first, to {to}");
        }
        let other = fragment(to, 4, 8, &[2; 8]);
        ensure!(a.run(FROM_CONTAINER, &other)?.action == SHOT, "a fragment of another packet, to {to}");
        let key = Sent { other: to, ..Sent::new(to, UDP, (40_000, 443)) }.key();
        ensure!(row(&mut a, &key)?.is_some(), "the flow has its row, to {to}");
    }
    // Old ones count no more.
    let mut slots: HashMap<&mut MapData, u32, FragmentSlot> =
        a.node.map_mut(map::FRAGMENT_SLOTS).context("slots")?.try_into()?;
    let held: Vec<_> = slots.iter().collect::<Result<_, _>>()?;
    for (place, mut slot) in held.clone() {
        slot.row.seen -= FRAGMENT_TICKS + 3;
        slots.insert(place, slot, 0)?;
    }
    let mut rows: HashMap<&mut MapData, FragmentKey, FragmentRow> =
        a.node.map_mut(map::FRAGMENTS).context("fragments")?.try_into()?;
    let all: Vec<_> = rows.iter().collect::<Result<_, _>>()?;
    ensure!(held.len() + all.len() == 4, "{held:?}, {all:?}");
    for (key, row) in all {
        rows.insert(key, FragmentRow { seen: row.seen - FRAGMENT_TICKS - 3, ..row }, 0)?;
    }
    for to in [IpAddr::from(ELSEWHERE4), ELSEWHERE6.into()] {
        ensure!(a.run(FROM_CONTAINER, &fragment(to, 4, 7, &[2; 8]))?.action == SHOT, "too late, to {to}");
    }
    collect(&mut a)?;
    let slots: HashMap<&MapData, u32, FragmentSlot> = a.node.map(map::FRAGMENT_SLOTS).context("slots")?.try_into()?;
    ensure!(slots.keys().count() == 0, "a collection frees the places");
    Ok(())
}

/// The fragment header's protocol is then the one of those headers, in the later fragments too.
#[test]
fn fragments_with_further_headers_behind_the_fragment_header_are_of_one_flow() -> Result<()> {
    const DESTINATION: u8 = 60;
    let (mut a, _b) = pair()?;
    for (to, passes) in [(ELSEWHERE6, OK), (B.v6, REDIRECT)] {
        let fragment = |bits: u16, payload: &[u8]| {
            let header = [&[DESTINATION, 0][..], &bits.to_be_bytes(), &7_u32.to_be_bytes()].concat();
            let ip = frame::ipv6(A.v6, to, 44, 64, &[&header, payload].concat());
            frame::ethernet(A.host_mac, A.mac, frame::IPV6, &ip)
        };
        let options = [UDP, 0, 1, 4, 0, 0, 0, 0];
        let ports = [40_000_u16.to_be_bytes(), 443_u16.to_be_bytes()].concat();
        let first = fragment(1, &[&options[..], &ports, &[0; 12]].concat());
        let later = fragment(3 << 3, &[1; 16]);
        ensure!(a.run(FROM_CONTAINER, &later)?.action == SHOT, "a later fragment before the first, to {to}");
        for each in [&first, &later] {
            ensure!(a.run(FROM_CONTAINER, each)?.action == passes, "the first and a later fragment, to {to}");
        }
        let key = Sent { other: to.into(), ..Sent::new(to.into(), UDP, (40_000, 443)) }.key();
        ensure!(row(&mut a, &key)?.is_some(), "the flow has its row, to {to}");
        let hidden = Sent { other: to.into(), ..Sent::new(to.into(), DESTINATION, (0, 0)) }.key();
        ensure!(row(&mut a, &hidden)?.is_none(), "a flow of the header's protocol, to {to}");
    }
    Ok(())
}

#[test]
fn a_lone_fragment_is_counted_by_its_reason() -> Result<()> {
    let lone = |to: IpAddr| fragment(to, 185, 9, &[0; 8]);
    check_all([
        Case::drop("IPv4, to another endpoint", FROM_CONTAINER, lone(B.v4.into()), DropReason::LoneFragment),
        Case::drop("IPv6, elsewhere", FROM_CONTAINER, lone(ELSEWHERE6.into()), DropReason::LoneFragment),
    ])
}

#[test]
fn a_flow_and_the_errors_about_it_take_the_rows_way() -> Result<()> {
    let (mut a, b) = pair()?;
    for (from, to) in [(IpAddr::from(A.v4), IpAddr::from(B.v4)), (A.v6.into(), B.v6.into())] {
        let packet = udp(from, to);
        ensure!(a.run(FROM_CONTAINER, &packet)?.action == REDIRECT, "direct at first, to {to}");
        // B sent A what A's message is an error about.
        let message =
            [&[3, 3, 0, 0, 0, 0, 0, 0][..], &frame::ip(to, from, UDP, &[0, 53, 0x0f, 0xa0, 0, 8, 0, 0])].concat();
        let message = if from.is_ipv4() { message } else { with(message, 0, &[1, 4]) };
        let protocol = if from.is_ipv4() { ICMP } else { ICMPV6 };
        let ethertype = if from.is_ipv4() { frame::IPV4 } else { frame::IPV6 };
        let error = frame::ethernet(A.host_mac, A.mac, ethertype, &frame::ip(from, to, protocol, &message));
        ensure!(a.run(FROM_CONTAINER, &error)?.action == REDIRECT, "an error, direct, to {to}");
        let key = Sent::new(to, UDP, (4_000, 53)).key();
        let (row_of, _) = row(&mut a, &key)?.with_context(|| format!("a row to {to}"))?;
        ensure!(row_of.low_epoch != 0 && row_of.high_epoch != 0, "both ends are endpoints: {row_of:?}");
        table(&mut a, map::FLOWS)?.insert(key, FlowRow { flags: row_of.flags | FLOW_BY_STACK, ..row_of }, 0)?;
        let before = (a.counters()?, b.counters()?);
        for packet in [&packet, &error] {
            ensure!(a.run(FROM_CONTAINER, packet)?.action == OK, "through the stack, to {to}");
        }
        let counted = a.counters()?.since(&before.0)?;
        let bytes = u64::try_from(packet.len() + error.len())?;
        ensure!(counted == [(Egress, DropReason::ForwardedStack, 2, bytes)], "{counted:?}");
        ensure!(b.counters()? == before.1, "B saw none of it");
    }
    Ok(())
}
