//! Reuse of pinned programs that equal a load's result, to save the verifier's time. A program's tag is a hash of the
//! loaded instructions without map descriptors (`bpf_prog_info.tag`); constants and maps are compared separately. The
//! tag depends on the kernel, so the first load learns it. Programs with log records are always reloaded.

use std::{
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
};

use aya::{
    maps::{Array, Map, MapData},
    programs::ProgramInfo,
};
use wharf_common::EndpointConsts;
use wharf_core::kernel::{KernelErrorKind, ProgramSpec, Programs, Result};

use super::{
    Bpf,
    pins::{MAPS, PROGRAMS},
};
use crate::error::wrap;

/// In the order of [`PROGRAMS`].
type Tags = [u64; 3];

#[derive(Default)]
pub(super) struct Known(Mutex<Option<Tags>>);

impl Known {
    pub(super) fn learn(&self, tags: Tags) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(tags);
    }

    fn tags(&self) -> Option<Tags> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Bpf {
    /// `None` when the programs differ or must not be kept, or the tags are unknown. `pinned`: ids of the pinned maps.
    pub(super) fn kept(
        &self,
        spec: &ProgramSpec,
        consts: &EndpointConsts,
        pinned: [Option<u32>; MAPS.len()],
    ) -> Result<Option<Programs>> {
        let ([Some(config), Some(metrics), Some(bandwidth)], Some(tags)) = (pinned, self.known.tags()) else {
            return Ok(None);
        };
        if !spec.keep || spec.debug {
            return Ok(None);
        }
        let mut programs = Programs { program_ids: [0; 3], map_ids: [config, metrics, bandwidth] };
        let mut used = BTreeSet::new();
        for ((name, tag), id) in PROGRAMS.iter().zip(tags).zip(&mut programs.program_ids) {
            let path = self.pins.endpoint(spec.id, name);
            let read = |e: &(dyn std::error::Error + 'static)| wrap("read program", path.display().to_string(), e);
            let info = match ProgramInfo::from_pin(&path).map_err(|e| read(&e)) {
                Ok(info) => info,
                Err(e) if e.kind == KernelErrorKind::NotFound => return Ok(None),
                Err(e) => return Err(e),
            };
            if info.tag() != tag {
                return Ok(None);
            }
            *id = info.id();
            used.extend(info.map_ids().map_err(|e| read(&e))?.into_iter().flatten());
        }
        let right_maps = self.held_ids().iter().map(|(_, id)| id).chain(&programs.map_ids).all(|id| used.remove(id));
        // Of those left, one must be the map of constants.
        if !right_maps || !used.iter().any(|id| has_constants(*id, consts)) {
            return Ok(None);
        }
        Ok(Some(programs))
    }
}

fn has_constants(id: u32, consts: &EndpointConsts) -> bool {
    let Ok(data) = MapData::from_id(id) else { return false };
    let named = data.info().is_ok_and(|info| info.name_as_str().is_some_and(|name| name.ends_with(".rodata")));
    named
        && Array::<_, EndpointConsts>::try_from(Map::Array(data))
            .and_then(|rows| rows.get(&0, 0))
            .is_ok_and(|is| is == *consts)
}
