//! The node-wide maps and the sink.

use std::path::{Path, PathBuf};

use aya::{
    maps::{MapData, RingBuf},
    programs::SchedClassifier,
};
use wharf_common::map;
use wharf_core::kernel::{KernelErrorKind, Result};

use super::{
    Bpf, loader, maps, objects,
    pins::{self, SHARED_MAPS, SINK, upcoming},
};
use crate::error::{fail, wrap};

impl Bpf {
    /// Makes what is missing of the shared maps and the sink, and compares what is there with what this version expects.
    /// Costs little when all is well.
    pub(crate) fn ensure_shared(&self) -> Result<()> {
        self.ensure_shared_maps()?;
        match SchedClassifier::from_pin(self.pins.shared(SINK)) {
            Ok(_) => Ok(()),
            Err(_) => self.renew_sink(),
        }
    }

    /// The same at start: pins this version's sink in place of an older one.
    pub(super) fn ensure_shared_anew(&self) -> Result<()> {
        self.ensure_shared_maps()?;
        self.renew_sink()
    }

    fn ensure_shared_maps(&self) -> Result<()> {
        self.pins.ensure_directories()?;
        let mut missing = false;
        for name in SHARED_MAPS {
            missing |= !self.check_pinned(&self.pins.shared(name), name)?;
        }
        if missing {
            // Parsing the object makes them; its programs are not loaded, and its other maps go at once.
            let made = self.loader.load(objects::ENDPOINT, None, self.shared_pins());
            made.map_err(|e| wrap("make shared maps", self.pins.shared_dir().display().to_string(), &e))?;
        }
        for name in SHARED_MAPS {
            maps::open(&self.pins.shared(name), name)?;
        }
        Ok(())
    }

    fn shared_pins(&self) -> Vec<(&'static str, PathBuf)> {
        SHARED_MAPS.map(|name| (name, self.pins.shared(name))).to_vec()
    }

    fn renew_sink(&self) -> Result<()> {
        let path = self.pins.shared(SINK);
        let subject = || path.display().to_string();
        // It has no maps; the pins are the same as the maps' so that the loader is kept.
        let pins = self.shared_pins();
        let mut ebpf = self.loader.load(objects::SINK, None, pins).map_err(|e| wrap("load sink", subject(), &e))?;
        let program = loader::classifier(&mut ebpf, SINK)?;
        program.load().map_err(|e| loader::load_error(subject(), &e))?;
        pin_program(program, &path)
    }

    /// False when nothing is pinned there; an error when what is pinned is not what this version expects.
    pub(super) fn check_pinned(&self, path: &Path, name: &str) -> Result<bool> {
        match maps::open(path, name) {
            Ok(_) => Ok(true),
            Err(e) if e.kind == KernelErrorKind::NotFound => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Opens the event ring buffer.
    pub(crate) fn event_ring(&self) -> Result<RingBuf<MapData>> {
        maps::events(&self.pins.shared(map::EVENTS))
    }

    /// Makes sure that no endpoint is left, before what they share is removed.
    pub(crate) fn check_unused(&self) -> Result<()> {
        let mut left = pins::names(&self.pins.endpoints_dir())?;
        left.extend(pins::names(&self.pins.closing_dir())?);
        if left.is_empty() {
            return Ok(());
        }
        let cause = format!("endpoints still have programs: {}; delete them first", left.join(", "));
        Err(fail("remove node", self.pins.root().display().to_string(), KernelErrorKind::Conflict, cause))
    }

    /// Removes the shared pins and the tree, as far as nothing else is in it.
    pub(crate) fn remove_shared(&self) -> Result<()> {
        for name in SHARED_MAPS.into_iter().chain([SINK, pins::LOGS]) {
            pins::unpin(&self.pins.shared(name))?;
        }
        for dir in [self.pins.shared_dir(), self.pins.closing_dir(), self.pins.endpoints_dir()] {
            pins::remove_dir(&dir)?;
        }
        pins::remove_dir(self.pins.root())?;
        // Another version's tree may stand beside it: then the parent stays.
        if let Some(parent) = self.pins.root().parent()
            && pins::names(parent)?.is_empty()
        {
            pins::remove_dir(parent)?;
        }
        Ok(())
    }
}

/// Pins a program under a name that may be taken, in one step: whoever opens the pin sees the old program or the new.
pub(super) fn pin_program(program: &mut SchedClassifier, path: &Path) -> Result<()> {
    let next = pin_upcoming(program, path)?;
    pins::replace(&next, path)
}

/// Pins a program beside its place.
pub(super) fn pin_upcoming(program: &mut SchedClassifier, path: &Path) -> Result<PathBuf> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let next = path.with_file_name(upcoming(&name));
    // Left over by a crash between the two steps.
    pins::unpin(&next)?;
    program.pin(&next).map_err(|e| wrap("pin program", next.display().to_string(), &e))?;
    Ok(next)
}
