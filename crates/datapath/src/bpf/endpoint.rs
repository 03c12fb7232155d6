//! An endpoint's programs, maps and counters.

use std::fs;

use wharf_common::{
    Counter, Direction, DropReason, EndpointConfig, EndpointConsts, abi,
    drop_reason::REASONS,
    map::{self, FLAG_CHAINED, FLAG_LIVE, FLAG_LOCAL_BY_STACK, FLAG_SOURCES, FLAG_TRACE, METRICS_MAX},
};
use wharf_core::{
    ids::EndpointId,
    kernel::{ConfigSpec, CounterRow, KernelErrorKind, ProgramSpec, Programs, Result},
};
use wharf_crash as crash;

use super::{
    Bpf, bandwidth,
    held::data_of,
    loader, maps,
    objects::objects,
    pins::{self, LINKS, LOGS, MAPS, PROGRAMS, upcoming},
    shared::pin_upcoming,
};
use crate::error::{fail, wrap};

const AFTER_PIN: [&str; 3] = [
    "datapath/programs/after-pin-from-container",
    "datapath/programs/after-pin-to-container",
    "datapath/programs/after-pin-deliver",
];
const AFTER_MOVE: [&str; 3] = [
    "datapath/programs/after-move-from-container",
    "datapath/programs/after-move-to-container",
    "datapath/programs/after-move-deliver",
];

fn about(id: EndpointId) -> String {
    format!("endpoint {id}")
}

impl Bpf {
    /// Reuses pinned maps, so counters survive.
    pub(crate) fn ensure_programs(&self, spec: &ProgramSpec) -> Result<Programs> {
        self.check_uncovered()?;
        let dir = self.pins.endpoint_dir(spec.id);
        let fresh = match fs::create_dir(&dir) {
            Ok(()) => true,
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => false,
            Err(e) => return Err(wrap("make pin directory", dir.display().to_string(), &e)),
        };
        crash::point("datapath/programs/after-directory");
        let loaded = self.load_and_pin(spec);
        if loaded.is_err()
            && fresh
            && let Err(error) = self.unpin_all(spec.id)
        {
            tracing::warn!(endpoint = %spec.id, %error, "left-over pins after a failed load");
        }
        loaded
    }

    fn load_and_pin(&self, spec: &ProgramSpec) -> Result<Programs> {
        let mut paths = Vec::with_capacity(1 + MAPS.len());
        let mut pinned = [None; MAPS.len()];
        for (name, id) in MAPS.into_iter().zip(&mut pinned) {
            let path = self.pins.endpoint(spec.id, name);
            *id = self.check_pinned(&path, name)?;
            paths.push((name, path));
        }
        let object = match (spec.debug, objects().endpoint_debug) {
            (false, _) => objects().endpoint,
            (true, Some(object)) => {
                paths.push((LOGS, self.pins.shared(LOGS)));
                object
            }
            (true, None) => {
                let cause =
                    "this build has no programs with log records (endpoint-debug.o); `cargo xtask build` makes them";
                return Err(fail("load programs", about(spec.id), KernelErrorKind::Unsupported, cause));
            }
        };
        let consts = EndpointConsts {
            abi_version: abi::version(),
            endpoint_id: u32::from(spec.id.get()),
            container_mac: spec.container_mac.0,
            host_mac: spec.host_mac.0,
            debug: u32::from(spec.debug),
        };
        if let Some(kept) = self.kept(spec, &consts, pinned)? {
            return Ok(kept);
        }
        let load = |e: &aya::EbpfError| wrap("load programs", about(spec.id), e);
        let mut ebpf = self.load(object, Some(&consts), paths, load)?;
        crash::point("datapath/programs/after-maps");
        let (mut program_ids, mut tags) = ([0; 3], [0; 3]);
        for ((name, id), tag) in PROGRAMS.iter().zip(&mut program_ids).zip(&mut tags) {
            let subject = format!("{name} of endpoint {}", spec.id);
            let program = loader::classifier(&mut ebpf, name)?;
            program.load().map_err(|e| loader::load_error(subject.clone(), &e))?;
            let info = program.info().map_err(|e| wrap("read program", &subject, &e))?;
            (*id, *tag) = (info.id(), info.tag());
        }
        if !spec.debug {
            self.known.learn(tags);
        }
        // The first load learns the tags.
        if let Some(kept) = self.kept(spec, &consts, pinned)? {
            return Ok(kept);
        }
        let mut map_ids = [0; MAPS.len()];
        for (name, id) in MAPS.iter().zip(&mut map_ids) {
            let missing = || fail("load programs", about(spec.id), KernelErrorKind::Other, format!("no map {name}"));
            let data = ebpf.map(name).and_then(data_of).ok_or_else(missing)?;
            *id = maps::id(data, &self.pins.endpoint(spec.id, name))?;
        }
        // All upcoming pins are made before the first move.
        let mut ready = Vec::with_capacity(PROGRAMS.len());
        for (name, point) in PROGRAMS.into_iter().zip(AFTER_PIN) {
            let path = self.pins.endpoint(spec.id, name);
            ready.push((pin_upcoming(loader::classifier(&mut ebpf, name)?, &path)?, path));
            crash::point(point);
        }
        for ((next, path), point) in ready.into_iter().zip(AFTER_MOVE) {
            pins::replace(&next, &path)?;
            crash::point(point);
        }
        Ok(Programs { program_ids, map_ids })
    }

    pub(crate) fn ensure_config(&self, id: EndpointId, spec: &ConfigSpec) -> Result<()> {
        let path = self.pins.endpoint(id, map::CONFIG);
        let flag = |on: bool, flag: u32| if on { flag } else { 0 };
        let config = EndpointConfig {
            epoch: spec.epoch.0,
            ifindex: spec.host_ifindex.0,
            flags: flag(spec.live, FLAG_LIVE)
                | flag(spec.trace, FLAG_TRACE)
                | flag(spec.local_by_stack || spec.chained, FLAG_LOCAL_BY_STACK)
                | flag(spec.chained, FLAG_CHAINED)
                | flag(!spec.sources.is_empty(), FLAG_SOURCES)
                | bandwidth::flags(&spec.bandwidth),
            identity: spec.identity.0,
            ipv4: spec.ipv4.map_or([0; 4], |a| a.octets()),
            gateway4: spec.gateway4.map_or([0; 4], |a| a.octets()),
            _pad: Default::default(),
            ipv6: spec.ipv6.map_or([0; 16], |a| a.octets()),
            gateway6: spec.gateway6.map_or([0; 16], |a| a.octets()),
        };
        // A program that sees the flag must find the limit.
        self.ensure_bandwidth(id, &spec.bandwidth)?;
        let failed = |e: &(dyn std::error::Error + 'static)| wrap("write configuration", about(id), e);
        let mut row = maps::config(&path)?;
        // Until both rows are written, the row of `SOURCES` looks stray.
        let _tables = self.lock_tables();
        let had_sources = row.get().map_err(|e| failed(&e))?.flags & FLAG_SOURCES != 0;
        self.ensure_sources(id, spec)?;
        row.set(config).map_err(|e| failed(&e))?;
        crash::point("datapath/config/after-write");
        if had_sources || !spec.sources.is_empty() {
            self.remove_former_sources(id, spec)?;
        }
        Ok(())
    }

    pub(crate) fn config(&self, id: EndpointId) -> Result<EndpointConfig> {
        let path = self.pins.endpoint(id, map::CONFIG);
        maps::config(&path)?.get().map_err(|e| wrap("read configuration", about(id), &e))
    }

    /// Non-zero, summed over CPUs.
    pub(crate) fn counters(&self, id: EndpointId) -> Result<Vec<CounterRow>> {
        let metrics = maps::metrics(&self.pins.endpoint(id, map::METRICS))?;
        let mut rows = Vec::new();
        for index in 0..METRICS_MAX {
            let values = metrics.get(&index, 0).map_err(|e| wrap("read counters", about(id), &e))?;
            let sum = values.iter().fold(Counter::default(), |sum, one| Counter {
                packets: sum.packets.wrapping_add(one.packets),
                bytes: sum.bytes.wrapping_add(one.bytes),
            });
            if sum != Counter::default() {
                let (direction, reason) = counter_names(index);
                rows.push(CounterRow { direction, reason, packets: sum.packets, bytes: sum.bytes });
            }
        }
        Ok(rows)
    }

    /// Returns the last counters. Missing pins are no error.
    pub(crate) fn remove_programs(&self, id: EndpointId) -> Result<Vec<CounterRow>> {
        let counters = match self.counters(id) {
            Ok(rows) => rows,
            Err(e) if e.kind == KernelErrorKind::NotFound => Vec::new(),
            Err(error) => {
                tracing::warn!(endpoint = %id, %error, "last counters lost");
                Vec::new()
            }
        };
        self.remove_sources_of(id)?;
        self.unpin_all(id)?;
        Ok(counters)
    }

    pub(super) fn unpin_all(&self, id: EndpointId) -> Result<()> {
        if self.is_covered() {
            // The pins may be another agent's.
            return Ok(());
        }
        for name in LINKS {
            pins::unpin(&self.pins.endpoint(id, name))?;
        }
        crash::point("datapath/unpin/after-links");
        for name in PROGRAMS {
            pins::unpin(&self.pins.endpoint(id, name))?;
            pins::unpin(&self.pins.endpoint(id, &upcoming(name)))?;
        }
        crash::point("datapath/unpin/after-programs");
        for name in MAPS {
            pins::unpin(&self.pins.endpoint(id, name))?;
        }
        crash::point("datapath/unpin/after-maps");
        pins::remove_dir(&self.pins.endpoint_dir(id))
    }
}

fn counter_names(index: u32) -> (String, String) {
    let direction = Direction::from_u32(index / REASONS).map_or("unknown", Direction::as_str);
    let number = index % REASONS;
    let reason = DropReason::from_u32(number).map_or_else(|| format!("reason-{number}"), |r| r.as_str().to_owned());
    (direction.to_owned(), reason)
}

#[cfg(test)]
mod tests {
    use wharf_common::drop_reason::metrics_index;

    use super::*;

    #[test]
    fn every_row_of_the_counters_has_the_name_it_was_written_under() {
        for direction in Direction::ALL {
            for reason in DropReason::ALL {
                let names = counter_names(metrics_index(direction, *reason));
                assert_eq!(names, (direction.as_str().to_owned(), reason.as_str().to_owned()));
            }
        }
        assert_eq!(counter_names(REASONS + 31), ("egress".to_owned(), "reason-31".to_owned()));
    }
}
