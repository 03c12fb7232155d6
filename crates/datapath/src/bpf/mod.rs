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
pub(crate) mod loader;
mod look;
pub(crate) mod maps;
pub(crate) mod objects;
pub(crate) mod pins;
pub(crate) mod policy;
mod proxy;
pub(crate) mod rows;
mod selfcheck;
mod shared;
mod tcx;
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
use loader::Loader;
pub(crate) use look::Opened;
use pins::PinTree;

/// The BPF side of the kernel.
pub(crate) struct Bpf {
    pins: PinTree,
    /// Device number of the bpffs at the open.
    device: u64,
    loader: Loader,
    mode: AttachMode,
    /// Held while rows of the shared maps are compared and written, so that a late delete cannot remove a row that a
    /// create wrote after the delete's check.
    tables: Mutex<()>,
    /// Held while policy's tables are changed: the order of the changes counts, and each change makes the generation grow.
    policy: Mutex<()>,
    /// The shared maps used by the programs that this process loads. They stay open while the process runs.
    shared: Mutex<Vec<SharedMap>>,
    /// Kernel ids of the programs that all endpoints share, as this process put them into their slots. Read and written whole.
    node_ids: Mutex<Vec<u32>>,
    /// Removes the rows of flows that are over.
    collector: Collector,
    /// Program tags, by which programs from before a restart are recognised.
    known: Known,
    /// True when other ABI versions have pins, see `upgrade`.
    beside_others: AtomicBool,
}

impl Bpf {
    /// Opens the pin tree, makes or checks the shared maps, and pins this version's sink.
    pub(crate) fn open(bpffs: &Path, mode: AttachMode, loader: Loader) -> Result<Self> {
        let (tables, policy, shared, node_ids, collector, known, beside_others) = Default::default();
        let pins = PinTree::open(bpffs)?;
        let device = pins.device()?;
        let bpf =
            Self { pins, device, loader, mode, tables, policy, shared, node_ids, collector, known, beside_others };
        bpf.note_others()?;
        bpf.ensure_shared_anew()?;
        bpf.sweep_closed()?;
        Ok(bpf)
    }
}
