//! The overlay's filter. Program and map have no pins: after a restart, a new filter with every row replaces the old
//! one, so no frame is judged by an incomplete table.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{MutexGuard, PoisonError},
};

use aya::{
    Ebpf,
    maps::{LpmTrie, MapData, MapError, PerCpuArray},
    programs::{SchedClassifier, TcAttachType},
};
use ipnet::IpNet;
use wharf_common::{
    Counter, Direction, EndpointKey,
    overlay::{FROM_OVERLAY, OVERLAY_DROPS, OVERLAY_NODES, OverlayDrop, OverlayRow},
};
use wharf_core::{
    ids::IfIndex,
    kernel::{CounterRow, KernelErrorKind, OverlaySpec, Result},
};
use wharf_crash as crash;

use super::{
    Bpf,
    clsact::{self, Wanted},
    loader, maps,
    objects::objects,
    policy::{peer_key, peer_of},
};
use crate::{
    OVERLAY_IFNAME,
    error::{fail, wrap},
    netlink::Connection,
};

const OPERATION: &str = "set up overlay";

/// Rows per observation: a system call each.
const WINDOW: usize = 2_048;

type Rows = BTreeMap<IpNet, OverlayRow>;

pub(crate) struct Filter {
    ebpf: Ebpf,
    id: u32,
    nodes: LpmTrie<MapData, EndpointKey, OverlayRow>,
    rows: Rows,
    numbers: Numbers,
    compared: Option<IpNet>,
}

/// A node keeps its number while it is known. No number is reused, because two nodes would share it while rows change.
#[derive(Default)]
struct Numbers {
    by_name: BTreeMap<String, u32>,
    last: u32,
}

impl Numbers {
    fn rows(&mut self, spec: &OverlaySpec) -> Rows {
        let known: BTreeSet<&str> = spec.nodes.iter().map(|node| node.name.as_str()).collect();
        self.by_name.retain(|name, _| known.contains(name.as_str()));
        let mut rows = Rows::new();
        for other in &spec.nodes {
            let last = &mut self.last;
            let node = *self.by_name.entry(other.name.clone()).or_insert_with(|| {
                *last = last.wrapping_add(1);
                *last
            });
            let row = |is_address| OverlayRow { node, vni: spec.vni, is_address };
            rows.extend(other.cidrs.iter().map(|cidr| (cidr.trunc(), row(0))));
            rows.extend(other.addresses.iter().map(|address| (IpNet::from(*address), row(1))));
        }
        rows
    }
}

fn failed(subject: impl Into<String>, error: &(dyn std::error::Error + 'static)) -> wharf_core::kernel::KernelError {
    wrap(OPERATION, subject, error)
}

impl Filter {
    fn program(&self) -> Result<&SchedClassifier> {
        let program = self.ebpf.program(FROM_OVERLAY).and_then(|program| program.try_into().ok());
        program
            .ok_or_else(|| fail(OPERATION, FROM_OVERLAY, KernelErrorKind::NotFound, "the object has no such program"))
    }

    /// Removals first: a full map needs room.
    fn put(&mut self, wanted: &Rows) -> Result<()> {
        let invalid = |net: &IpNet, cause: &str| fail(OPERATION, net.to_string(), KernelErrorKind::Other, cause);
        let gone: Vec<IpNet> = self.rows.keys().filter(|net| !wanted.contains_key(net)).copied().collect();
        for net in gone {
            let key = peer_key(net).map_err(|cause| invalid(&net, cause))?;
            match self.nodes.remove(&key) {
                Ok(()) | Err(MapError::KeyNotFound) => {}
                Err(e) => return Err(failed(net.to_string(), &e)),
            }
            self.rows.remove(&net);
            crash::point("datapath/overlay/after-row");
        }
        for (net, row) in wanted {
            if self.rows.get(net) == Some(row) {
                continue;
            }
            let key = peer_key(*net).map_err(|cause| invalid(net, cause))?;
            self.nodes.insert(&key, row, 0).map_err(|e| failed(net.to_string(), &e))?;
            self.rows.insert(*net, *row);
            crash::point("datapath/overlay/after-row");
        }
        Ok(())
    }

    fn drops(&self) -> Result<Drops> {
        let Some(map) = self.ebpf.map(OVERLAY_DROPS) else { return Ok(Drops::default()) };
        let counts: PerCpuArray<_, Counter> = PerCpuArray::try_from(map).map_err(|e| failed(OVERLAY_DROPS, &e))?;
        let mut drops = Drops::default();
        for (sum, why) in drops.iter_mut().zip(OverlayDrop::ALL) {
            for of_cpu in counts.get(&(why as u32), 0).map_err(|e| failed(OVERLAY_DROPS, &e))?.iter() {
                sum.packets += of_cpu.packets;
                sum.bytes += of_cpu.bytes;
            }
        }
        Ok(drops)
    }

    /// In a map of more than [`WINDOW`] rows, each call compares the next [`WINDOW`] rows, and no unexpected row is
    /// found: a walk over a large trie is slow.
    fn differs(&mut self) -> Result<bool> {
        if self.rows.len() <= WINDOW {
            return self.differs_anywhere();
        }
        let window = window(&self.rows, self.compared);
        self.compared = window.last().map(|(net, _)| *net);
        for (net, row) in window {
            if !self.has(net, row)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Rows do not contain each other, so a look-up of a row's prefix finds that row, or one of another program.
    fn has(&self, net: IpNet, row: OverlayRow) -> Result<bool> {
        let Ok(key) = peer_key(net) else { return Ok(false) };
        match self.nodes.get(&key, 0) {
            Ok(found) => Ok(found == row),
            Err(e) if maps::is_missing(&e) => Ok(false),
            Err(e) => Err(failed(net.to_string(), &e)),
        }
    }

    fn differs_anywhere(&self) -> Result<bool> {
        let mut there = Rows::new();
        for item in self.nodes.iter().take(self.rows.len() + 1) {
            let (key, row) = item.map_err(|e| failed(OVERLAY_NODES, &e))?;
            let Ok(net) = peer_of(&key) else { return Ok(true) };
            there.insert(net, row);
        }
        Ok(there != self.rows)
    }
}

/// Behind `last`, then the first ones.
fn window(rows: &Rows, last: Option<IpNet>) -> Vec<(IpNet, OverlayRow)> {
    let is_compared = |(net, _): &(&IpNet, &OverlayRow)| last.is_some_and(|last| **net <= last);
    let next = rows.iter().skip_while(is_compared).chain(rows);
    next.take(WINDOW.min(rows.len())).map(|(net, row)| (*net, *row)).collect()
}

impl Bpf {
    /// Loads the filter if this process has none, and puts the rows in force. Before [`Bpf::attach_overlay`].
    pub(crate) fn ensure_overlay(&self, spec: &OverlaySpec) -> Result<()> {
        let mut overlay = self.overlay.lock().unwrap_or_else(PoisonError::into_inner);
        let filter = match &mut *overlay {
            Some(filter) => filter,
            None => overlay.insert(self.load_overlay()?),
        };
        let wanted = filter.numbers.rows(spec);
        filter.put(&wanted)
    }

    fn load_overlay(&self) -> Result<Filter> {
        let loaded = self.loader.load(objects().overlay, None, self.shared_pins());
        let mut ebpf = loaded.map_err(|e| failed(FROM_OVERLAY, &e))?;
        let program = loader::classifier(&mut ebpf, FROM_OVERLAY)?;
        program.load().map_err(|e| loader::load_error(FROM_OVERLAY.to_owned(), &e))?;
        let id = program.info().map_err(|e| failed(FROM_OVERLAY, &e))?.id();
        let no_map = || fail(OPERATION, OVERLAY_NODES, KernelErrorKind::NotFound, "the object has no such map");
        let nodes = LpmTrie::try_from(ebpf.take_map(OVERLAY_NODES).ok_or_else(no_map)?);
        let nodes = nodes.map_err(|e| failed(OVERLAY_NODES, &e))?;
        Ok(Filter { ebpf, id, nodes, rows: Rows::new(), numbers: Numbers::default(), compared: None })
    }

    /// Replaces another Wharf filter without a gap.
    pub(crate) fn attach_overlay(&self, connection: &mut Connection, device: IfIndex) -> Result<()> {
        let overlay = self.overlay.lock().unwrap_or_else(PoisonError::into_inner);
        let absent = || fail(OPERATION, FROM_OVERLAY, KernelErrorKind::NotFound, "the filter is not loaded");
        let filter = overlay.as_ref().ok_or_else(absent)?;
        if clsact::program(connection, device, TcAttachType::Ingress)? == Some(filter.id) {
            return Ok(());
        }
        let wanted = Wanted { hook: TcAttachType::Ingress, program: filter.program()?, name: FROM_OVERLAY.to_owned() };
        clsact::ensure(OVERLAY_IFNAME, &[wanted]).map(drop)
    }

    /// The next [`Bpf::ensure_overlay`] replaces a filter with other rows.
    pub(crate) fn overlay_problem(
        &self,
        connection: &mut Connection,
        spec: &OverlaySpec,
        device: IfIndex,
    ) -> Result<Option<&'static str>> {
        let mut overlay = self.overlay.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(filter) = &mut *overlay else { return Ok(Some("its filter is not loaded")) };
        if clsact::program(connection, device, TcAttachType::Ingress)? != Some(filter.id) {
            return Ok(Some("its filter is not attached: frames of any sender may be accepted"));
        }
        if filter.numbers.rows(spec) != filter.rows {
            return Ok(Some("its filter knows other nodes"));
        }
        if filter.differs()? {
            self.retire(overlay.take());
            return Ok(Some("rows of its filter were changed"));
        }
        Ok(None)
    }

    pub(crate) fn overlay_failure(&self) -> Option<String> {
        self.overlay_failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn note_overlay_failure(&self, why: Option<String>) {
        let mut last = self.overlay_failure.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(why) = why.as_ref().filter(|why| last.as_ref() != Some(why)) {
            tracing::warn!("the overlay to other nodes cannot be made: {why}");
        }
        *last = why;
    }

    pub(crate) fn lock_overlay_change(&self) -> MutexGuard<'_, ()> {
        self.overlay_change.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the counters.
    fn retire(&self, filter: Option<Filter>) {
        match filter.as_ref().map(Filter::drops).transpose() {
            Ok(drops) => {
                let mut past = self.overlay_past.lock().unwrap_or_else(PoisonError::into_inner);
                *past = added(&past, drops.unwrap_or_default());
            }
            Err(e) => tracing::warn!("counters of the overlay are lost: {e}"),
        }
    }

    pub(crate) fn forget_overlay(&self) {
        let filter = self.overlay.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.retire(filter);
    }

    /// Nonzero counters since this process began.
    pub(crate) fn overlay_drops(&self) -> Result<Vec<CounterRow>> {
        let overlay = self.overlay.lock().unwrap_or_else(PoisonError::into_inner);
        let now = overlay.as_ref().map(Filter::drops).transpose()?.unwrap_or_default();
        drop(overlay);
        let all = added(&self.overlay_past.lock().unwrap_or_else(PoisonError::into_inner), now);
        let row = |(why, Counter { packets, bytes }): (&OverlayDrop, Counter)| CounterRow {
            direction: Direction::Ingress.as_str().to_owned(),
            reason: why.name().to_owned(),
            packets,
            bytes,
        };
        Ok(OverlayDrop::ALL.iter().zip(all).map(row).filter(|row| row.packets > 0).collect())
    }
}

/// By reason, in the order of [`OverlayDrop::ALL`].
pub(super) type Drops = [Counter; OverlayDrop::ALL.len()];

fn added(past: &Drops, now: Drops) -> Drops {
    let mut all = now;
    for (sum, past) in all.iter_mut().zip(past) {
        sum.packets += past.packets;
        sum.bytes += past.bytes;
    }
    all
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn windows_cover_every_row_in_as_few_calls_as_possible_also_while_rows_change() {
        let net = |n: u32| IpNet::from(std::net::IpAddr::V4(Ipv4Addr::from_bits(0x0a00_0000 + n)));
        let row = |node| OverlayRow { node, vni: 7, is_address: 0 };
        let mut rows: Rows = (0..5_000).map(|n| (net(n), row(n))).collect();
        let (mut seen, mut last) = (BTreeSet::new(), None);
        for _ in 0..3 {
            let window = window(&rows, last);
            assert_eq!(window.len(), WINDOW);
            last = window.last().map(|(net, _)| *net);
            seen.extend(window.into_iter().map(|(net, _)| net));
        }
        assert_eq!(seen.len(), 5_000);
        assert_eq!(last, Some(net(3 * 2_048 - 5_000 - 1)), "the window after the last row begins again");
        rows.remove(&last.expect("a row"));
        assert_eq!(window(&rows, last).first(), Some(&(net(1_144), row(1_144))), "its last row is gone");
        let few: Rows = [(net(1), row(1)), (net(2), row(2))].into();
        assert_eq!(window(&few, Some(net(1))), [(net(2), row(2)), (net(1), row(1))]);
    }
}
