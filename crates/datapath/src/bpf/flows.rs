//! The flow tables: collection, list and removal.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use aya::{
    Ebpf,
    maps::Array,
    programs::{ProgramError, RawTracePoint, RawTracePointRunOptions, TestRun as _},
};
use nix::time::{ClockId, clock_gettime};
use wharf_common::{
    FlowKey, FlowRow, FlowTotals, FlowUse,
    flow::{FLOW_BY_HIGH, FLOW_BY_STACK, FLOW_PREFIX, FLOW_RECENT, FLOW_UPSTREAM, TICK_SHIFT},
    map::{self, FLOWS_KEPT_MAX, FLOWS_MAX, FLOWS_NEW_MAX},
};
use wharf_core::{
    flow::{Flow, FlowEnd, FlowFilter, FlowList, FlowUsage},
    ids::EndpointId,
    kernel::{KernelError, KernelErrorKind, Result},
};

use super::{Bpf, loader, maps, rows::address_of};
use crate::error::{fail, wrap};

/// The node's object, whose programs `collect` and `translated` belong to this process. Locked during a collection,
/// which counts in the tables. aya cannot move a program out of its object.
#[derive(Default)]
pub(super) struct Collector {
    node: Mutex<Option<Ebpf>>,
    /// At the last collection: packets whose flows were not kept, and packets without a row.
    lost: Mutex<(u64, u64)>,
}

impl Collector {
    /// Verifies the program and takes the object.
    pub(super) fn load(&self, mut node: Ebpf) -> Result<()> {
        let failed = |e: &ProgramError| loader::load_error(format!("{} of the node", map::COLLECT), e);
        let program = node.program_mut(map::COLLECT).ok_or_else(absent)?;
        let program: &mut RawTracePoint = program.try_into().map_err(|e| failed(&e))?;
        program.load().map_err(|e| failed(&e))?;
        *self.node() = Some(node);
        Ok(())
    }

    /// Without the object, flows are not collected.
    pub(super) fn clear(&self) {
        *self.node() = None;
    }

    pub(super) fn with_object<T>(&self, job: impl FnOnce(&mut Ebpf) -> Result<T>) -> Result<T> {
        job(self.node().as_mut().ok_or_else(absent)?)
    }

    fn run(&self) -> Result<()> {
        self.with_object(|node| {
            let program = node.program(map::COLLECT).ok_or_else(absent)?;
            let program: &RawTracePoint = program.try_into().map_err(|e: ProgramError| refused(&e))?;
            program.test_run(RawTracePointRunOptions::new()).map(drop).map_err(|e| refused(&e))
        })
    }

    fn node(&self) -> MutexGuard<'_, Option<Ebpf>> {
        self.node.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn absent() -> KernelError {
    fail(COLLECT, map::FLOWS, KernelErrorKind::NotFound, "the node's programs are removed")
}

fn refused(error: &(dyn std::error::Error + 'static)) -> KernelError {
    wrap(COLLECT, map::FLOWS, error)
}

const COLLECT: &str = "collect flows";
/// About the interval of collections.
const RECENT_TICKS: u32 = 10;

impl Bpf {
    pub(crate) fn collect_flows(&self) -> Result<FlowUsage> {
        let began = Instant::now();
        self.collector.run()?;
        let took = began.elapsed();
        let totals = self.flow_totals()?;
        let mut usage = FlowUsage {
            rows: totals.rows,
            limit: u64::from(FLOWS_KEPT_MAX),
            expired: totals.expired,
            orphaned: totals.orphaned,
            over_quota: totals.over_quota,
            no_room: totals.no_room,
            untracked: totals.untracked,
            took,
            busiest: None,
        };
        let lost = (totals.over_quota.wrapping_add(totals.no_room), totals.untracked);
        let before = std::mem::replace(&mut *self.collector.lost.lock().unwrap_or_else(PoisonError::into_inner), lost);
        if usage.is_nearly_full() || lost != before {
            let by_rate = lost.0 == before.0 && !usage.is_nearly_full();
            usage.busiest = self.busiest(by_rate)?;
        }
        Ok(usage)
    }

    /// By kept flows, or by flows begun in the last second.
    fn busiest(&self, by_rate: bool) -> Result<Option<(EndpointId, u64)>> {
        let (uses, now): (Array<_, FlowUse>, u32) = (self.open_held(map::FLOW_USE)?, now()?);
        let mut busiest = None;
        for id in self.pinned_endpoints()? {
            let used = uses.get(&u32::from(id.get()), 0).map_err(|e| wrap("read map", map::FLOW_USE, &e))?;
            let begun = if now.wrapping_sub(used.tick) <= RECENT_TICKS { used.begun } else { 0 };
            busiest = busiest.max(Some((if by_rate { begun } else { used.rows }, id)));
        }
        Ok(busiest.filter(|(flows, _)| *flows > 0).map(|(flows, id)| (id, flows.into())))
    }

    pub(super) fn flow_totals(&self) -> Result<FlowTotals> {
        let totals: Array<_, FlowTotals> = self.open_held(map::FLOW_TOTALS)?;
        totals.get(&0, 0).map_err(|e| wrap("read map", map::FLOW_TOTALS, &e))
    }

    pub(crate) fn flows(&self, filter: &FlowFilter, limit: usize) -> Result<FlowList> {
        let mut list = FlowList::default();
        self.each_flow(filter, |_, _, flow| {
            if list.flows.len() < limit {
                list.flows.push(flow);
            } else {
                list.more += 1;
            }
            Ok(())
        })?;
        Ok(list)
    }

    pub(crate) fn flush_flows(&self, filter: &FlowFilter) -> Result<u64> {
        let mut keys = Vec::new();
        self.each_flow(filter, |table, key, _| {
            keys.push((table, key));
            Ok(())
        })?;
        let (mut removed, mut slots) = (0, BTreeSet::new());
        let done = keys.into_iter().try_for_each(|(table, key)| {
            let mut rows = self.flow_rows(table)?;
            match rows.remove(&key) {
                Ok(()) => {
                    removed += 1;
                    slots.insert(key.low.generation_slot());
                    Ok(())
                }
                // Collected, evicted or moved meanwhile.
                Err(e) if maps::is_missing(&e) => Ok(()),
                Err(e) => Err(wrap("remove flow", table, &e)),
            }
        });
        // The cache knows the flows still; the generation of one end is enough.
        self.increase_generations(slots)?;
        done.map(|()| removed)
    }

    /// Rows that change meanwhile may be omitted or repeated. Omits finished flows and deleted endpoints.
    fn each_flow(
        &self,
        filter: &FlowFilter,
        mut with: impl FnMut(&'static str, FlowKey, Flow) -> Result<()>,
    ) -> Result<()> {
        let now = now()?;
        let epochs: HashMap<_, _> = self.endpoint_rows()?.into_iter().map(|row| (row.address, row.epoch)).collect();
        let routers = self.source_epochs()?;
        // Programs store the low half.
        let is_there = |address, epoch, row: &FlowRow| {
            epoch == 0
                || epochs.get(&address).is_some_and(|is| is.0 & u64::from(u32::MAX) == u64::from(epoch))
                || row.flags & FLOW_PREFIX != 0 && routers.contains(&epoch)
        };
        for (table, max) in [(map::FLOWS, FLOWS_MAX), (map::FLOWS_NEW, FLOWS_NEW_MAX)] {
            let rows = self.flow_rows(table)?;
            // A removed row makes the kernel restart the iteration.
            for read in rows.iter().take(max as usize) {
                let (key, row) = match read {
                    Ok(read) => read,
                    Err(e) if maps::is_missing(&e) => continue,
                    Err(e) => return Err(wrap("read flows", table, &e)),
                };
                let is_kept = table == map::FLOWS && row.flags & FLOW_RECENT == 0;
                let flow = flow_of(&key, &row, now, is_kept);
                let counts = is_there(address_of(&key.low), row.low_epoch, &row)
                    && is_there(address_of(&key.high), row.high_epoch, &row);
                if counts && !row.is_over(key.protocol, now) && filter.matches(&flow) {
                    with(table, key, flow)?;
                }
            }
        }
        Ok(())
    }
}

/// As the programs count them.
pub(super) fn now() -> Result<u32> {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC).map_err(|e| wrap("read clock", "CLOCK_MONOTONIC", &e))?;
    Ok(u32::try_from(Duration::from(time).as_nanos() >> TICK_SHIFT).unwrap_or(u32::MAX))
}

fn ticks(count: u32) -> Duration {
    Duration::from_nanos(u64::from(count) << TICK_SHIFT)
}

fn flow_of(key: &FlowKey, row: &FlowRow, now: u32, kept: bool) -> Flow {
    let end = |address, port| FlowEnd { address: address_of(address), port: u16::from_be(port) };
    let (low, high) = (end(&key.low, key.low_port), end(&key.high, key.high_port));
    let (source, destination) = if row.flags & FLOW_BY_HIGH == 0 { (low, high) } else { (high, low) };
    let idle = row.idle(now);
    Flow {
        source,
        destination,
        protocol: key.protocol,
        state: row.state(),
        by_stack: row.flags & FLOW_BY_STACK != 0,
        by_proxy: row.flags & FLOW_UPSTREAM != 0,
        kept,
        owner: EndpointId::try_from(row.owner).ok(),
        idle: ticks(idle),
        left: ticks(row.state().timeout(key.protocol).saturating_sub(idle)),
    }
}
