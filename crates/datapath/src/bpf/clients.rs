//! `PROXY_USE`: limits of the connections that client endpoints have open to the node's proxies. The programs and this
//! process each write one word of a row, so the map is mapped into memory (`BPF_F_MMAPABLE`, Linux 5.5): an update
//! through the kernel would write both.

use std::{
    collections::HashMap,
    ffi::c_void,
    num::NonZeroUsize,
    ptr::NonNull,
    sync::atomic::{AtomicU32, Ordering},
};

use aya::maps::{Array, MapData};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use wharf_common::{
    ProxyUse,
    map::{self, PROXY_USE_MAX},
};
use wharf_core::{flow::ProxyClients, ids::EndpointId, kernel::Result};

use super::{Bpf, flows::now};
use crate::{error::wrap, netlink::sockets};

/// Ticks (about a second each) for which limits hold after a count: longer than the agent's interval of counts, and
/// short, because no place becomes free while no agent counts.
const HOLDS: u32 = 4;

impl Bpf {
    /// Since the map was created; wraps.
    pub(crate) fn opened_to_proxies(&self) -> Result<u32> {
        let uses: Array<_, ProxyUse> = self.open_held(map::PROXY_USE)?;
        Ok(uses.get(&0, 0).map_err(|e| wrap("read map", map::PROXY_USE, &e))?.opened)
    }

    pub(crate) fn limit_proxy_clients(&self, share: u32) -> Result<ProxyClients> {
        let rows = Rows::of(&self.held_data(map::PROXY_USE)?)?;
        // Before the count: connections opened in between count twice until the next count.
        let opened: Vec<u32> = rows.all().map(|row| row.opened.load(Ordering::Acquire)).collect();
        let mut open: HashMap<u32, u32> = HashMap::new();
        for (address, count) in sockets::of_proxies()? {
            if let Some(row) = self.endpoint_row(address)? {
                *open.entry(row.endpoint_id).or_default() += count;
            }
        }
        let (now, mut clients) = (now()?, ProxyClients::default());
        // Without enforcement no connection was refused.
        let until = rows.all().next().map_or(0, |node| node.limit.load(Ordering::Acquire));
        let enforced = until.wrapping_sub(now).cast_signed() >= 0;
        for (id, (row, opened)) in (0_u16..).zip(rows.all().zip(opened)) {
            let Ok(id) = EndpointId::try_from(id) else { continue };
            let open = open.get(&id.get().into()).copied().unwrap_or_default();
            let limit = opened.wrapping_add(share.saturating_sub(open));
            let before = ProxyUse { opened, limit: row.limit.swap(limit, Ordering::AcqRel) };
            clients.open += u64::from(open);
            let is_spent = ProxyUse { opened: row.opened.load(Ordering::Acquire), limit }.is_spent();
            clients.spent.extend((is_spent || enforced && before.is_spent()).then_some(id));
        }
        // Last: limits are enforced when all are in place.
        if let Some(node) = rows.all().next() {
            node.limit.store(now.wrapping_add(HOLDS), Ordering::Release);
        }
        Ok(clients)
    }
}

#[repr(C)]
struct Row {
    opened: AtomicU32,
    limit: AtomicU32,
}

const _: () = assert!(size_of::<Row>() == size_of::<ProxyUse>() && align_of::<Row>() == align_of::<ProxyUse>());

struct Rows(NonNull<c_void>);

const ROWS: usize = PROXY_USE_MAX as usize;
const BYTES: usize = ROWS * size_of::<Row>();

impl Rows {
    fn of(data: &MapData) -> Result<Self> {
        let length = NonZeroUsize::new(BYTES).unwrap_or(NonZeroUsize::MIN);
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping, owned by this value, of the map's checked size.
        let memory = unsafe { mmap(None, length, access, MapFlags::MAP_SHARED, data.fd(), 0) };
        memory.map(Self).map_err(|e| wrap("map memory of map", map::PROXY_USE, &e))
    }

    fn all(&self) -> impl Iterator<Item = &Row> {
        // SAFETY: the mapping has `ROWS` rows, valid for any bits, and lives as long as `self`; all writes are
        // word-sized.
        unsafe { std::slice::from_raw_parts(self.0.cast::<Row>().as_ptr(), ROWS) }.iter()
    }
}

impl Drop for Rows {
    fn drop(&mut self) {
        // SAFETY: the mapping of `of`; no reference outlives `self`.
        let _ = unsafe { munmap(self.0, BYTES) };
    }
}
