//! The node-wide maps and the sink.

use std::path::Path;

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
    /// Makes the shared maps, or compares those that are there with what this version expects; then pins this
    /// version's sink in place of an older one.
    pub(crate) fn ensure_shared(&self) -> Result<()> {
        let operation = "make shared maps";
        self.pins.ensure_directories()?;
        for name in SHARED_MAPS {
            self.check_pinned(&self.pins.shared(name), name)?;
        }
        // Parsing the object makes those that are missing; its programs are not loaded, and its other maps go at once.
        let paths = SHARED_MAPS.map(|name| (name, self.pins.shared(name))).to_vec();
        let made = self.loader.load(objects::ENDPOINT, None, paths);
        made.map_err(|e| wrap(operation, self.pins.shared_dir().display().to_string(), &e))?;
        for name in SHARED_MAPS {
            maps::open(&self.pins.shared(name), name)?;
        }
        self.ensure_sink()
    }

    fn ensure_sink(&self) -> Result<()> {
        let path = self.pins.shared(SINK);
        let subject = || path.display().to_string();
        let mut ebpf =
            self.loader.load(objects::SINK, None, Vec::new()).map_err(|e| wrap("load sink", subject(), &e))?;
        let program = loader::classifier(&mut ebpf, SINK)?;
        program.load().map_err(|e| loader::load_error(subject(), &e))?;
        pin_program(program, &path)
    }

    /// Nothing, when nothing is pinned there; an error when what is pinned is not what this version expects.
    pub(super) fn check_pinned(&self, path: &Path, name: &str) -> Result<()> {
        match maps::open(path, name) {
            Ok(_) => Ok(()),
            Err(e) if e.kind == KernelErrorKind::NotFound => Ok(()),
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
pub(super) fn pin_upcoming(program: &mut SchedClassifier, path: &Path) -> Result<std::path::PathBuf> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let next = path.with_file_name(upcoming(&name));
    // Left over by a crash between the two steps.
    pins::unpin(&next)?;
    program.pin(&next).map_err(|e| wrap("pin program", next.display().to_string(), &e))?;
    Ok(next)
}
