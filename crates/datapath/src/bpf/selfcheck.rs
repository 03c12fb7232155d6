//! Test packets through an endpoint's pinned programs.
//!
//! `BPF_PROG_TEST_RUN` gives the program a packet in memory, and returns its verdict and the packet as it left it; then
//! the packet is freed (`bpf_prog_test_run_skb`, net/bpf/test_run.c). The verdict is not carried out: a redirect notes the
//! target for a caller that would act on it, and here there is none. So nothing is sent, whatever the program says.
//!
//! What the programs count of test packets stands in `METRICS` beside what they count of real ones. To tell them apart,
//! rows of `METRICS` that no reason uses hold what was added here, and every reader subtracts them: they live as long as
//! the counters, whichever agent reads.

use std::sync::{MutexGuard, PoisonError};

use aya::{
    maps::{MapData, PerCpuArray, PerCpuValues},
    programs::{SchedClassifier, TestRun as _, TestRunOptions},
};
use wharf_common::{
    Counter, Direction, DropReason,
    drop_reason::{REASONS, metrics_index},
    map::{self, METRICS_MAX},
};
use wharf_core::{
    ids::EndpointId,
    kernel::Result,
    selfcheck::{Case, CaseResult, Count, Hook, Outcome, Verdict},
};

use super::{Bpf, endpoint::counter_names, maps};
use crate::error::wrap;

/// Reasons that test packets are counted under, each with a row of its own from [`FIRST_TALLY`] on for what they added.
/// The order is part of the pinned state: add at the end.
const TALLIED: [DropReason; 6] = [
    DropReason::ForwardedLocal,
    DropReason::ForwardedStack,
    DropReason::NeighbourAnswered,
    DropReason::InvalidSourceMac,
    DropReason::InvalidSourceIp,
    DropReason::EndpointNotReady,
];
/// Reasons from here on are not the programs': user space writes their rows.
const FIRST_TALLY: u32 = 24;

/// Room that a program has to make a packet longer, bytes.
const ROOM: usize = 64;
/// Runs of a case at most: before Linux 5.11 a pending signal ends a run, after the program ran, with EINTR.
const RUNS: u64 = 4;

type Metrics = PerCpuArray<MapData, Counter>;

/// Counters by direction and reason, summed over CPUs.
pub(super) struct Rows(Vec<Counter>);

impl Rows {
    /// As they stand in the map.
    fn read(metrics: &Metrics, id: EndpointId) -> Result<Self> {
        (0..METRICS_MAX).map(|index| row(metrics, index, id)).collect::<Result<_>>().map(Self)
    }

    /// Those that count packets of others than the self-check, with their index, zeros left out.
    pub(super) fn of_traffic(&self) -> impl Iterator<Item = (u32, Counter)> + '_ {
        (0..METRICS_MAX).zip(&self.0).filter_map(|(index, counter)| {
            if index % REASONS >= FIRST_TALLY {
                return None;
            }
            let tally = tally_of(index).and_then(|t| self.0.get(t as usize)).copied().unwrap_or_default();
            let left = Counter {
                packets: counter.packets.saturating_sub(tally.packets),
                bytes: counter.bytes.saturating_sub(tally.bytes),
            };
            (left != Counter::default()).then_some((index, left))
        })
    }

    /// Names of the rows with more packets than before.
    fn since(&self, before: &Self) -> Vec<(String, String)> {
        let grown = |(index, (now, then)): (u32, (&Counter, &Counter))| {
            let verdict = DropReason::from_u32(index % REASONS).is_some_and(DropReason::is_verdict);
            (verdict && now.packets > then.packets).then(|| counter_names(index))
        };
        (0..METRICS_MAX).zip(self.0.iter().zip(&before.0)).filter_map(grown).collect()
    }
}

fn row(metrics: &Metrics, index: u32, id: EndpointId) -> Result<Counter> {
    let values = metrics.get(&index, 0).map_err(|e| wrap("read counters", format!("endpoint {id}"), &e))?;
    Ok(values.iter().fold(Counter::default(), |sum, one| Counter {
        packets: sum.packets.wrapping_add(one.packets),
        bytes: sum.bytes.wrapping_add(one.bytes),
    }))
}

/// The row that holds what test packets added to this one.
fn tally_of(index: u32) -> Option<u32> {
    let reason = DropReason::from_u32(index % REASONS)?;
    let place = (0..).zip(TALLIED).find_map(|(place, tallied)| (tallied == reason).then_some(place))?;
    Some(index - index % REASONS + FIRST_TALLY + place)
}

/// The row that a case's counter means.
fn index_of(count: &Count) -> Option<u32> {
    let direction = Direction::ALL.into_iter().find(|d| d.as_str() == count.direction)?;
    let reason = DropReason::ALL.iter().find(|r| r.as_str() == count.reason)?;
    Some(metrics_index(direction, *reason))
}

/// Adds packets to a tally. Only self-checks write these rows, one at a time, so one CPU's place serves for all.
fn add_tally(metrics: &mut Metrics, index: u32, packets: u64, bytes: u64, id: EndpointId) -> Result<()> {
    let failed = |e: &(dyn std::error::Error + 'static)| wrap("note test packets", format!("endpoint {id}"), e);
    let Some(tally) = tally_of(index) else { return Ok(()) };
    let mut values = metrics.get(&tally, 0).map_err(|e| failed(&e))?.to_vec();
    if let Some(first) = values.first_mut() {
        first.packets = first.packets.wrapping_add(packets);
        first.bytes = first.bytes.wrapping_add(bytes);
    }
    let values = PerCpuValues::try_from(values).map_err(|e| failed(&e))?;
    metrics.set(tally, values, 0).map_err(|e| failed(&e))
}

/// A program opened from its pin, or why it cannot be.
type Opened = std::result::Result<SchedClassifier, String>;

/// Runs the program on the packet: the verdict, what it left, and how often it ran.
fn run(program: &SchedClassifier, packet: &[u8]) -> std::result::Result<(Verdict, Vec<u8>, u64), String> {
    let mut runs = 1;
    loop {
        let mut left = vec![0; packet.len() + ROOM];
        let options = TestRunOptions { data_in: Some(packet), data_out: Some(&mut left), ..TestRunOptions::new() };
        match program.test_run(options) {
            Ok(result) => {
                left.truncate(usize::try_from(result.data_size_out).unwrap_or(usize::MAX));
                return Ok((Verdict::from_action(result.return_value), left, runs));
            }
            Err(e) => {
                let interrupted = crate::error::io_cause(&e).is_some_and(|io| io.raw_os_error() == Some(libc::EINTR));
                if !interrupted || runs == RUNS {
                    return Err(wrap("run program", "test packet", &e).cause);
                }
                runs += 1;
            }
        }
    }
}

/// The counters a case watches: the endpoint's own, and those of others that receive from it.
struct Watched<'a> {
    bpf: &'a Bpf,
    id: EndpointId,
    own: Metrics,
    others: Vec<(EndpointId, Option<Metrics>)>,
}

impl Watched<'_> {
    fn metrics(&mut self, of: EndpointId) -> Option<&mut Metrics> {
        if of == self.id {
            return Some(&mut self.own);
        }
        if !self.others.iter().any(|(id, _)| *id == of) {
            // One that is gone counts nothing, which its case then shows.
            let opened = maps::metrics(&self.bpf.pins.endpoint(of, map::METRICS)).ok();
            self.others.push((of, opened));
        }
        self.others.iter_mut().find(|(id, _)| *id == of).and_then(|(_, metrics)| metrics.as_mut())
    }

    /// Packets of each of a case's counters.
    fn read(&mut self, counts: &[Count]) -> Result<Vec<Option<u64>>> {
        counts
            .iter()
            .map(|count| match (index_of(count), self.metrics(count.endpoint)) {
                (Some(index), Some(metrics)) => row(metrics, index, count.endpoint).map(|c| Some(c.packets)),
                _ => Ok(None),
            })
            .collect()
    }

    fn check(&mut self, program: &Opened, case: &Case) -> Result<CaseResult> {
        let program = match program {
            Ok(program) => program,
            Err(why) => return Ok(Err(why.clone())),
        };
        match self.attempt(program, case, false)? {
            // Once more, to say what counts instead: every counter is read for that, which takes longer than all the rest.
            Ok(outcome) if outcome.counted.contains(&false) => self.attempt(program, case, true),
            result => Ok(result),
        }
    }

    /// Runs a case. `search`: where its counters do not count, says which do.
    fn attempt(&mut self, program: &SchedClassifier, case: &Case, search: bool) -> Result<CaseResult> {
        let _counting = self.bpf.counting();
        let all = search.then(|| Rows::read(&self.own, self.id)).transpose()?;
        let before = self.read(&case.counts)?;
        let (verdict, packet, runs) = match run(program, &case.packet) {
            Ok(ran) => ran,
            Err(why) => return Ok(Err(why)),
        };
        let after = self.read(&case.counts)?;
        // At least: what the container sends meanwhile counts too.
        let counted: Vec<bool> =
            before.iter().zip(&after).map(|(then, now)| matches!((then, now), (Some(t), Some(n)) if n > t)).collect();
        let instead = match &all {
            Some(all) if counted.contains(&false) => Rows::read(&self.own, self.id)?.since(all),
            _ => Vec::new(),
        };
        // A case that did not end as it should may have been counted anywhere: it stays in the counters.
        if verdict == case.verdict {
            let bytes = u64::try_from(case.packet.len()).unwrap_or(u64::MAX).saturating_mul(runs);
            for (count, _) in case.counts.iter().zip(&counted).filter(|(_, counted)| **counted) {
                if let (Some(index), Some(metrics)) = (index_of(count), self.metrics(count.endpoint)) {
                    add_tally(metrics, index, runs, bytes, count.endpoint)?;
                }
            }
        }
        Ok(Ok(Outcome { verdict, packet, counted, instead }))
    }
}

impl Bpf {
    /// Held while test packets are counted and noted, and while counters are read: no reader sees the one without the
    /// other, and totals never go back.
    fn counting(&self) -> MutexGuard<'_, ()> {
        // It guards no data of ours: a panic elsewhere leaves nothing half-done here.
        self.counting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An endpoint's counters; test packets are not among them.
    pub(super) fn read_counters(&self, id: EndpointId) -> Result<Rows> {
        let metrics = maps::metrics(&self.pins.endpoint(id, map::METRICS))?;
        let _counting = self.counting();
        Rows::read(&metrics, id)
    }

    /// Gives test packets to an endpoint's pinned programs.
    pub(crate) fn verdicts(&self, id: EndpointId, cases: &[Case]) -> Result<Vec<CaseResult>> {
        let own = maps::metrics(&self.pins.endpoint(id, map::METRICS))?;
        let mut watched = Watched { bpf: self, id, own, others: Vec::new() };
        let open = |hook: Hook| -> Opened {
            let path = self.pins.endpoint(id, hook.program());
            SchedClassifier::from_pin(&path)
                .map_err(|e| wrap("open program", path.display().to_string(), &e).to_string())
        };
        let (from, to) = (open(Hook::FromContainer), open(Hook::ToContainer));
        cases
            .iter()
            .map(|case| {
                let program = match case.hook {
                    Hook::FromContainer => &from,
                    Hook::ToContainer => &to,
                };
                watched.check(program, case)
            })
            .collect()
    }
}

const _: () = {
    let mut at = 0;
    while at < DropReason::ALL.len() {
        assert!((DropReason::ALL[at] as u32) < FIRST_TALLY, "this reason's row holds a tally of the self-check");
        at += 1;
    }
    assert!(FIRST_TALLY as usize + TALLIED.len() <= REASONS as usize);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_counter_has_its_own_tally_or_none() {
        let mut seen = std::collections::BTreeSet::new();
        for direction in Direction::ALL {
            for reason in DropReason::ALL {
                let index = metrics_index(direction, *reason);
                let tally = tally_of(index);
                assert_eq!(tally.is_some(), TALLIED.contains(reason), "{reason:?}");
                if let Some(tally) = tally {
                    assert!(tally < METRICS_MAX && tally % REASONS >= FIRST_TALLY && seen.insert(tally), "{reason:?}");
                    assert_eq!(tally / REASONS, index / REASONS, "of the same direction");
                }
            }
        }
    }

    #[test]
    fn traffic_is_what_is_left_without_test_packets() {
        let mut rows = Rows(vec![Counter::default(); METRICS_MAX as usize]);
        let stack = metrics_index(Direction::Egress, DropReason::ForwardedStack);
        let spoof = metrics_index(Direction::Egress, DropReason::InvalidSourceIp);
        let other = metrics_index(Direction::Egress, DropReason::Malformed);
        for (index, packets, bytes) in [
            (stack, 10, 1000),
            (spoof, 4, 168),
            (other, 1, 60),
            (tally_of(stack).unwrap_or(0), 4, 168),
            (tally_of(spoof).unwrap_or(0), 4, 168),
        ] {
            rows.0[index as usize] = Counter { packets, bytes };
        }
        let left: Vec<_> = rows.of_traffic().collect();
        let counter = |packets, bytes| Counter { packets, bytes };
        assert_eq!(left, [(stack, counter(6, 832)), (other, counter(1, 60))]);
    }
}
