//! The node-wide maps, the shared programs, and the sink.

use std::{
    path::{Path, PathBuf},
    sync::PoisonError,
};

use aya::{
    Ebpf,
    maps::{Array, Map, MapData, RingBuf},
    programs::{ProgramError, SchedClassifier},
};
use wharf_common::map::{self, NodeCall};
use wharf_core::{
    finding::NodeProblem,
    kernel::{KernelErrorKind, Result},
};
use wharf_crash as crash;

use super::{
    Bpf,
    attach::open_program,
    held::{BadPin, COVERED, Place, SharedMap},
    loader, maps,
    objects::objects,
    pins::{self, PinTree, SHARED_MAPS, SINK, upcoming},
    rows::read_slot,
    translated::Translated,
};
use crate::error::{fail, wrap};

/// Rows mean the same to every ABI version.
const OF_ALL_VERSIONS: [&str; 17] = [
    map::STACK_PATHS,
    map::STACK_USERS,
    map::SOURCES,
    map::FLOWS,
    map::FLOWS_RECENT,
    map::FLOWS_NEW,
    map::FRAGMENT_SLOTS,
    map::FRAGMENTS,
    map::FLOW_USE,
    map::FLOW_TOTALS,
    map::PROXY_USE,
    map::IPCACHE,
    map::POLICY_PORTS,
    map::POLICY_CELLS,
    map::POLICY_SETS,
    map::POLICY_STATE,
    map::ADDRESS_GENERATIONS,
];

impl Bpf {
    /// Creates what is missing, and checks the rest. Removes stray rows of `SOURCES`.
    pub(crate) fn ensure_shared(&self) -> Result<()> {
        self.ensure_shared_maps()?;
        self.remove_stray_sources()?;
        if self.absent_node_program()?.is_some() {
            self.renew_node_programs(self.load_node()?)?;
        }
        match SchedClassifier::from_pin(self.pins.shared(SINK)) {
            Ok(_) => Ok(()),
            Err(_) => self.renew_sink(),
        }
    }

    /// At start: also replaces programs of other builds.
    pub(super) fn ensure_shared_anew(&self) -> Result<()> {
        self.finish_pins()?;
        self.ensure_shared_maps()?;
        // Before any endpoint's object: the loader parses the kernel's BTF again for an object with fewer pinned maps.
        let node = self.load_node()?;
        if self.keep_node_programs()? {
            self.collector.load(node)?;
        } else {
            self.renew_node_programs(node)?;
        }
        self.renew_sink()
    }

    /// Completes an interrupted re-pin: the attached programs use the upcoming map.
    fn finish_pins(&self) -> Result<()> {
        for name in SHARED_MAPS {
            let path = self.pins.shared(name);
            let next = upcoming_path(&path);
            match maps::open(&next, name) {
                Ok(_) => {
                    tracing::info!(pin = %path.display(), "a map that was to be pinned here is moved to its name");
                    pins::replace(&next, &path)?;
                }
                Err(e) if e.kind == KernelErrorKind::NotFound => {}
                Err(e) if e.kind == KernelErrorKind::Exhausted => return Err(e),
                Err(_) => drop(pins::unpin(&next)?),
            }
        }
        Ok(())
    }

    fn ensure_shared_maps(&self) -> Result<()> {
        self.pins.check_bpffs()?;
        self.check_uncovered()?;
        let replaced = self.place()? == Place::Replaced;
        let mut held = self.held();
        let (mut unpinned, mut wanted) = (Vec::new(), Vec::new());
        // All checks precede any creation.
        for name in SHARED_MAPS {
            match held.iter().find(|map| map.name == name) {
                Some(own) => match self.look_at_pin(own) {
                    Some(BadPin::Another(cause)) if replaced => return Err(self.replaced(name, &cause)),
                    Some(bad @ (BadPin::Missing | BadPin::Another(_))) => unpinned.push((own, bad)),
                    None | Some(BadPin::Unread) => {}
                },
                None if self.check_pinned(&self.pins.shared(name), name)?.is_some() => {}
                None => wanted.push(name),
            }
        }
        self.pins.ensure_directories()?;
        // First: only this process keeps a map without a pin. The kernel empties a program array whose last pin and
        // descriptor are gone (`bpf_fd_array_map_clear`), and the attached programs then drop packets.
        let mut failed = None;
        for (own, bad) in unpinned {
            let path = self.pins.shared(own.name);
            if let BadPin::Another(cause) = bad {
                tracing::warn!(pin = %path.display(), "{cause}; the agent's map is pinned in its place");
            }
            // A new map would have no effect on the attached programs.
            if let Err(error) = pin_map(&own.map, &path) {
                failed.get_or_insert(error);
            }
        }
        if let Some(error) = failed {
            return Err(error);
        }
        crash::point("datapath/shared/after-directories");
        let mut missing = false;
        for name in wanted {
            missing |= !self.share_with_other_versions(name)?;
        }
        if missing {
            for object in [objects().endpoint, objects().node] {
                let made = self.loader.load(object, None, self.shared_pins());
                made.map_err(|e| wrap("make shared maps", self.pins.shared_dir().display().to_string(), &e))?;
            }
            crash::point("datapath/shared/after-maps");
        }
        for name in SHARED_MAPS {
            if held.iter().all(|map| map.name != name) {
                held.push(SharedMap::open(name, &self.pins.shared(name))?);
            }
        }
        Ok(())
    }

    fn share_with_other_versions(&self, name: &'static str) -> Result<bool> {
        if !OF_ALL_VERSIONS.contains(&name) {
            return Ok(false);
        }
        for tree in self.pins.others()? {
            if let Ok(data) = maps::open(&tree.shared(name), name) {
                let path = self.pins.shared(name);
                data.pin(&path).map_err(|e| wrap("pin map", path.display().to_string(), &e))?;
                return Ok(true);
            }
        }
        Ok(false)
    }

    pub(crate) fn shared_problems(&self) -> Vec<NodeProblem> {
        let mut wrong = Vec::new();
        if let Err(e) = self.pins.check_bpffs() {
            wrong.push(NodeProblem::Bpffs { path: e.subject, cause: e.cause });
            return wrong;
        }
        let place = self.place().unwrap_or(Place::Ours);
        if place == Place::Covered {
            let path = self.pins.bpffs().display().to_string();
            wrong.push(NodeProblem::Pin { path, cause: COVERED.to_owned(), repairable: false });
            return wrong;
        }
        let held = self.held();
        for name in SHARED_MAPS {
            let path = self.pins.shared(name).display().to_string();
            let bad = match held.iter().find(|map| map.name == name) {
                Some(own) => self.look_at_pin(own),
                None => Some(BadPin::Missing),
            };
            match bad {
                None | Some(BadPin::Unread) => {}
                Some(BadPin::Missing) => wrong.push(NodeProblem::PinMissing { path }),
                Some(BadPin::Another(cause)) if place == Place::Replaced => {
                    let cause = self.replaced(name, &cause).cause;
                    wrong.push(NodeProblem::Pin { path, cause, repairable: false });
                }
                Some(BadPin::Another(_)) if Path::new(&path).is_dir() => {
                    let cause = "a directory is in its place: remove it, and the agent pins its map there".to_owned();
                    wrong.push(NodeProblem::Pin { path, cause, repairable: false });
                }
                Some(BadPin::Another(cause)) => wrong.push(NodeProblem::Pin { path, cause, repairable: true }),
            }
        }
        drop(held);
        wrong.extend(self.stray_source_problems());
        let path = self.pins.shared(map::NODE_CALLS).display().to_string();
        match self.absent_node_program() {
            Ok(None) => {}
            Ok(Some(name)) => wrong.push(NodeProblem::PinMissing { path: format!("{path}, program `{name}` in it") }),
            Err(e) => wrong.push(NodeProblem::Pin { path, cause: e.cause, repairable: false }),
        }
        let sink = self.pins.shared(SINK);
        match SchedClassifier::from_pin(&sink) {
            Ok(_) => {}
            Err(e) => {
                let told = wrap("open program", sink.display().to_string(), &e);
                let (path, cause) = (told.subject, told.cause);
                wrong.push(match told.kind {
                    KernelErrorKind::NotFound => NodeProblem::PinMissing { path },
                    _ => NodeProblem::Pin { path, cause, repairable: true },
                });
            }
        }
        wrong
    }

    /// Packets get the old program or the new one.
    fn renew_node_programs(&self, mut node: Ebpf) -> Result<()> {
        let mut slots = self.program_slots(map::NODE_CALLS)?;
        let mut ids = Vec::new();
        for call in NodeCall::ALL {
            let name = call.program();
            let program = loader::classifier(&mut node, name)?;
            program.load().map_err(|e| loader::load_error(format!("{name} of the node"), &e))?;
            let fd = program.fd().map_err(|e| wrap("read program", name, &e))?;
            ids.push(program.info().map_err(|e| wrap("read program", name, &e))?.id());
            let mut set = |slot: NodeCall| {
                slots.set(slot as u32, fd, 0).map_err(|e| wrap("set slot of the node's program", name, &e))
            };
            if *call == NodeCall::Judge {
                // `established` passes what this version's `judge` would pass: until it follows, `judge` has both
                // slots.
                set(NodeCall::Established)?;
            }
            set(*call)?;
            crash::point("datapath/shared/after-node-program");
        }
        self.record_node_programs(&ids);
        *self.node_ids.lock().unwrap_or_else(PoisonError::into_inner) = ids;
        *self.translated() = Translated::default();
        self.collector.load(node)
    }

    fn load_node(&self) -> Result<Ebpf> {
        let path = self.pins.shared(map::NODE_CALLS).display().to_string();
        self.load(objects().node, None, Vec::new(), |e| wrap("load the node's programs", path.clone(), e))
    }

    /// False if the programs in the slots are not of the recorded load of this object.
    fn keep_node_programs(&self) -> Result<bool> {
        let ids: Option<Vec<_>> = self.node_programs()?.into_iter().map(|(_, id)| id).collect();
        let Some(ids) = ids.filter(|ids| !ids.is_empty() && self.loaded.is(&ids[..], self.shared_ids())) else {
            return Ok(false);
        };
        *self.node_ids.lock().unwrap_or_else(PoisonError::into_inner) = ids;
        Ok(true)
    }

    fn record_node_programs(&self, ids: &[u32]) {
        crash::point("datapath/shared/before-node-record");
        if let Err(e) = self.loaded.record(ids, self.shared_ids()) {
            tracing::warn!("{e}; the next start loads the node's programs again");
        }
    }

    /// Empty after `remove_node`.
    pub(super) fn node_programs(&self) -> Result<Vec<(&'static str, Option<u32>)>> {
        let programs = self.read_held(map::NODE_CALLS, |held| {
            let slots = Array::try_from(held).map_err(|e| wrap("open map", map::NODE_CALLS, &e))?;
            NodeCall::ALL.iter().map(|call| Ok((call.program(), read_slot(&slots, *call as u32)?))).collect()
        })?;
        Ok(programs.unwrap_or_default())
    }

    fn absent_node_program(&self) -> Result<Option<&'static str>> {
        let ours = self.node_ids.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut there = self.node_programs()?.into_iter().zip(ours);
        Ok(there.find(|((_, id), ours)| id.as_ref() != Some(ours)).map(|((name, _), _)| name))
    }

    fn renew_sink(&self) -> Result<()> {
        let path = self.pins.shared(SINK);
        let mut ebpf = self.load_sink()?;
        pin_program(loader::classifier(&mut ebpf, SINK)?, &path)?;
        crash::point("datapath/shared/after-sink");
        Ok(())
    }

    fn load_sink(&self) -> Result<Ebpf> {
        let subject = || self.pins.shared(SINK).display().to_string();
        // The same pin paths avoid a new loader.
        let pins = self.shared_pins();
        let mut ebpf = self.loader.load(objects().sink, None, pins).map_err(|e| wrap("load sink", subject(), &e))?;
        loader::classifier(&mut ebpf, SINK)?.load().map_err(|e| loader::load_error(subject(), &e))?;
        Ok(ebpf)
    }

    /// Loaded if not pinned: a delete must not wait for a missing pin.
    pub(super) fn sink(&self) -> Result<SchedClassifier> {
        let path = self.pins.shared(SINK);
        match open_program(&path) {
            Err(e) if e.kind == KernelErrorKind::NotFound => {
                let failed = |e: &ProgramError| wrap("load sink", path.display().to_string(), e);
                let mut ebpf = self.load_sink()?;
                let info = loader::classifier(&mut ebpf, SINK)?.info().map_err(|e| failed(&e))?;
                SchedClassifier::from_program_info(info, SINK.into()).map_err(|e| failed(&e))
            }
            opened => opened,
        }
    }

    /// An error for another shape.
    pub(super) fn check_pinned(&self, path: &Path, name: &str) -> Result<Option<u32>> {
        match maps::open(path, name) {
            Ok(data) => maps::id(&data, path).map(Some),
            Err(e) if e.kind == KernelErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    pub(crate) fn event_ring(&self) -> Result<RingBuf<MapData>> {
        self.open_held(map::EVENTS)
    }

    pub(crate) fn check_unused(&self) -> Result<()> {
        check_unused(&self.pins)?;
        self.pins.others()?.iter().try_for_each(check_unused)
    }

    /// Foreign entries stay and cause an error.
    pub(crate) fn remove_shared(&self) -> Result<()> {
        self.held().clear();
        self.collector.clear();
        *self.translated() = Translated::default();
        for name in SHARED_MAPS.into_iter().chain([SINK, pins::LOGS]) {
            pins::unpin(&self.pins.shared(name))?;
            pins::unpin(&self.pins.shared(&upcoming(name)))?;
        }
        for dir in [self.pins.shared_dir(), self.pins.closing_dir(), self.pins.endpoints_dir()] {
            pins::remove_dir(&dir)?;
        }
        pins::remove_dir(self.pins.root())?;
        if let Some(parent) = self.pins.root().parent()
            && pins::names(parent)?.is_empty()
        {
            pins::remove_dir(parent)?;
        }
        Ok(())
    }
}

fn check_unused(tree: &PinTree) -> Result<()> {
    let left = tree.in_use()?;
    if left.is_empty() {
        return Ok(());
    }
    let cause = format!("endpoints still have programs: {}; delete them first", left.join(", "));
    Err(fail("remove node", tree.root().display().to_string(), KernelErrorKind::Conflict, cause))
}

pub(super) fn pin_program(program: &mut SchedClassifier, path: &Path) -> Result<()> {
    let next = pin_upcoming(program, path)?;
    crash::point("datapath/shared/before-sink-moves");
    pins::replace(&next, path)
}

fn pin_map(map: &Map, path: &Path) -> Result<()> {
    let next = upcoming_path(path);
    pins::unpin(&next)?;
    map.pin(&next).map_err(|e| wrap("pin map", next.display().to_string(), &e))?;
    crash::point("datapath/shared/before-map-moves");
    // The next start would move a remaining upcoming pin into place.
    pins::replace(&next, path).inspect_err(|_| drop(pins::unpin(&next)))
}

fn upcoming_path(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(upcoming(&name))
}

pub(super) fn pin_upcoming(program: &mut SchedClassifier, path: &Path) -> Result<PathBuf> {
    let next = upcoming_path(path);
    pins::unpin(&next)?;
    program.pin(&next).map_err(|e| wrap("pin program", next.display().to_string(), &e))?;
    Ok(next)
}
