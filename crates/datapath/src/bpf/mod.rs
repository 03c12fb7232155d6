//! Programs and maps.

mod attach;
mod bandwidth;
mod clients;
pub(crate) mod clsact;
mod endpoint;
mod flows;
mod held;
pub(crate) mod inventory;
mod kept;
pub(crate) mod loaded;
pub(crate) mod loader;
mod look;
pub(crate) mod maps;
pub(crate) mod objects;
mod overlay;
pub(crate) mod pins;
pub(crate) mod policy;
mod proxy;
pub(crate) mod rows;
mod selfcheck;
mod shared;
mod sources;
mod tcx;
mod translated;
mod upgrade;

use std::{
    path::Path,
    sync::{Mutex, atomic::AtomicBool},
};

use wharf_core::kernel::{AttachMode, Result};

pub(crate) use attach::present;
use flows::Collector;
use held::SharedMap;
use kept::Known;
use loaded::Loaded;
use loader::Loader;
pub(crate) use look::Opened;
use pins::PinTree;
use translated::Translated;

pub(crate) struct Bpf {
    pins: PinTree,
    device: u64,
    loader: Loader,
    mode: AttachMode,
    /// Locked while shared rows are compared and written: a late delete must not remove a row of a later create.
    tables: Mutex<()>,
    /// Locked while policy tables change: order matters, and each change increments the generation.
    policy: Mutex<()>,
    shared: Mutex<Vec<SharedMap>>,
    /// The directory of the shared pins when each pin was last found good; locked for a copy.
    good_pins: Mutex<Option<held::Stamp>>,
    /// Shared programs that this process put into slots.
    node_ids: Mutex<Vec<u32>>,
    loaded: Loaded,
    collector: Collector,
    /// This process's filter of the router's link.
    translated: Mutex<Translated>,
    /// Locked, on blocking threads, while filter or rows change.
    overlay: Mutex<Option<overlay::Filter>>,
    /// Counters of replaced filters.
    overlay_past: Mutex<overlay::Drops>,
    overlay_failure: Mutex<Option<String>>,
    /// Locked, on blocking threads, while the overlay's interface, filter and routes change.
    overlay_change: Mutex<()>,
    known: Known,
    beside_others: AtomicBool,
}

impl Bpf {
    pub(crate) fn open(bpffs: &Path, run_dir: &Path, mode: AttachMode, loader: Loader) -> Result<Self> {
        let (tables, policy, shared, good_pins, node_ids, collector, known, beside_others) = Default::default();
        let translated = Mutex::default();
        let (overlay, overlay_past, overlay_failure, overlay_change) = Default::default();
        let pins = PinTree::open(bpffs)?;
        let device = pins.device()?;
        let bpf = Self {
            pins,
            device,
            loader,
            mode,
            tables,
            policy,
            shared,
            good_pins,
            node_ids,
            loaded: Loaded::new(run_dir),
            collector,
            translated,
            overlay,
            overlay_past,
            overlay_failure,
            overlay_change,
            known,
            beside_others,
        };
        bpf.note_others()?;
        bpf.ensure_shared_anew()?;
        bpf.sweep_closed()?;
        Ok(bpf)
    }
}
