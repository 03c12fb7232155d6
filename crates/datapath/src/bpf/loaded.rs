//! Record of the last load of the node's programs. An agent with the same object keeps the programs at its start: their
//! verification takes a tenth of a second. Without the record, or with a stale one, it loads them again.

use std::{
    fs,
    hash::{DefaultHasher, Hasher as _},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use wharf_core::kernel::Result;

use super::objects::objects;
use crate::{error::wrap, settings::boot_id};

/// File name prefix in the run directory.
pub const RECORD_STEM: &str = "programs.";

/// Bytes.
const MAX_RECORD: u64 = 64 << 10;

/// The kernel does not reuse an id of a program or map before a boot.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Load {
    boot_id: String,
    object_hash: u64,
    /// In the order of `NodeCall::ALL`.
    programs: Vec<u32>,
    /// Sorted.
    maps: Vec<u32>,
}

pub(super) struct Loaded(PathBuf);

impl Loaded {
    pub(super) fn new(run_dir: &Path) -> Self {
        Self(run_dir.join(format!("{RECORD_STEM}json")))
    }

    /// Whether the last load was of this object, and made these programs for these maps.
    pub(super) fn is(&self, programs: &[u32], maps: Vec<u32>) -> bool {
        let is_record = |meta: &fs::Metadata| meta.is_file() && meta.len() <= MAX_RECORD;
        let text = fs::symlink_metadata(&self.0).ok().filter(is_record).and_then(|_| fs::read(&self.0).ok());
        let recorded = text.and_then(|text| serde_json::from_slice::<Load>(&text).ok());
        recorded.is_some() && recorded == load(programs, maps).ok()
    }

    /// After the slots have the programs: a record of other programs matches no slot.
    pub(super) fn record(&self, programs: &[u32], maps: Vec<u32>) -> Result<()> {
        let failed = |e: &(dyn std::error::Error + 'static)| wrap("record programs", self.0.display().to_string(), e);
        let text = serde_json::to_string(&load(programs, maps)?).map_err(|e| failed(&e))?;
        let next = self.0.with_extension("next");
        fs::write(&next, text).and_then(|()| fs::rename(&next, &self.0)).map_err(|e| failed(&e))
    }
}

fn load(programs: &[u32], mut maps: Vec<u32>) -> Result<Load> {
    let mut hasher = DefaultHasher::new();
    hasher.write(objects().node);
    maps.sort_unstable();
    Ok(Load { boot_id: boot_id()?, object_hash: hasher.finish(), programs: programs.to_vec(), maps })
}
