//! Programs and maps.

mod attach;
mod clsact;
mod endpoint;
mod inventory;
mod kept;
mod loader;
mod look;
pub(crate) mod maps;
mod objects;
pub(crate) mod pins;
pub(crate) mod rows;
mod selfcheck;
mod shared;
mod tcx;

use std::{path::Path, sync::Mutex};

use wharf_core::kernel::{AttachMode, Result};

pub(crate) use attach::present;
use kept::Known;
use loader::Loader;
pub(crate) use look::Opened;
use pins::PinTree;
use shared::SharedMap;

/// The BPF side of the kernel.
pub(crate) struct Bpf {
    pins: PinTree,
    loader: Loader,
    mode: AttachMode,
    /// Held while rows of the shared maps are compared and written, so that a late delete cannot take the row that a
    /// create wrote between its look and its act.
    tables: Mutex<()>,
    /// The shared maps that the programs loaded here use, open as long as this process runs.
    shared: Mutex<Vec<SharedMap>>,
    /// By which programs from before a restart are recognised.
    known: Known,
}

impl Bpf {
    /// Opens the pin tree, makes or checks the shared maps, and pins this version's sink.
    pub(crate) fn open(bpffs: &Path, mode: AttachMode) -> Result<Self> {
        let (tables, shared, known) = Default::default();
        let bpf = Self { pins: PinTree::open(bpffs)?, loader: Loader::new(), mode, tables, shared, known };
        bpf.pins.check_versions()?;
        bpf.ensure_shared_anew()?;
        bpf.sweep_closed()?;
        Ok(bpf)
    }
}
