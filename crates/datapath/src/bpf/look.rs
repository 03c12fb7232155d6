//! Observation of programs and maps: most of an idle agent's work.

use std::{
    collections::BTreeSet,
    net::{Ipv4Addr, Ipv6Addr},
};

use aya::{
    maps::{Array, Map, MapData},
    programs::ProgramInfo,
};
use wharf_common::{
    Bucket, Direction,
    map::{self, FLAG_CHAINED, FLAG_LIVE, FLAG_SOURCES, limit_flag},
};
use wharf_core::{
    endpoint::EndpointRecord,
    finding::EndpointProblem,
    ids::{EndpointId, IfIndex},
    kernel::{AttachMode, KernelErrorKind, Result},
};

use super::{
    Bpf,
    attach::HOOKS,
    bandwidth, clsact, maps,
    pins::{MAPS, PROGRAMS},
    rows::expected_row,
    tcx,
};
use crate::{error::wrap, netlink::Connection};

pub(crate) struct Opened {
    /// In the order of [`PROGRAMS`].
    programs: [Option<u32>; PROGRAMS.len()],
    uses: BTreeSet<u32>,
}

impl Opened {
    fn program(&self, name: &str) -> Option<u32> {
        PROGRAMS.iter().zip(self.programs).find_map(|(program, id)| id.filter(|_| *program == name))
    }
}

impl Bpf {
    pub(crate) fn opened(&self, id: EndpointId) -> Result<Opened> {
        let mut opened = Opened { programs: [None; PROGRAMS.len()], uses: BTreeSet::new() };
        for (name, program) in PROGRAMS.iter().zip(&mut opened.programs) {
            let path = self.pins.endpoint(id, name);
            let read = |e: &(dyn std::error::Error + 'static)| wrap("read program", path.display().to_string(), e);
            let info = match ProgramInfo::from_pin(&path).map_err(|e| read(&e)) {
                Ok(info) => info,
                Err(e) if e.kind == KernelErrorKind::NotFound => continue,
                Err(e) => return Err(e),
            };
            *program = Some(info.id());
            opened.uses.extend(info.map_ids().map_err(|e| read(&e))?.into_iter().flatten());
        }
        Ok(opened)
    }

    /// Reports missing programs and unexpected attachments.
    pub(crate) fn observe_hooks(
        &self,
        connection: &mut Connection,
        index: IfIndex,
        record: &EndpointRecord,
        opened: &Opened,
        problems: &mut Vec<EndpointProblem>,
    ) -> Result<()> {
        if self.is_covered() {
            return Ok(());
        }
        let ifname = record.host_ifname.as_str();
        for hook in HOOKS {
            let pin = self.pins.endpoint(record.id, hook.link);
            let filter = clsact::program(connection, index, hook.attach)?;
            let wanted = opened.program(hook.program);
            let program = || hook.program.to_owned();
            let misses = |found: Vec<u32>| {
                let (ifname, mode) = (ifname.to_owned(), self.mode_of(record.link_owner));
                let wanted = wanted.filter(|w| !found.contains(w));
                wanted.map(|expected| EndpointProblem::Program { program: program(), ifname, mode, expected, found })
            };
            match self.mode_of(record.link_owner) {
                AttachMode::Tcx => {
                    let link = tcx::open(&pin)?;
                    let behind = link.map(|l| tcx::program_of(&l, ifname)).transpose()?;
                    problems.extend(misses(tcx::programs(ifname, hook.attach)?));
                    let name = || hook.link.to_owned();
                    match (behind, wanted) {
                        (None, _) => problems.push(EndpointProblem::PinMissing { name: name() }),
                        (Some(found), Some(expected)) if expected != found => {
                            problems.push(EndpointProblem::PinStale { name: name(), expected, found });
                        }
                        (Some(_), _) => {}
                    }
                    let closed = self.pins.closing(&record.host_ifname).join(hook.link);
                    if let Some(sink) = tcx::open_on(&closed, ifname, hook.attach)? {
                        let id = tcx::program_of(&sink, ifname)?;
                        problems.push(EndpointProblem::Sink { program: program(), id });
                    }
                    if let Some(id) = filter {
                        problems.push(EndpointProblem::StrayFilter { program: program(), id });
                    }
                }
                AttachMode::Clsact => {
                    problems.extend(misses(filter.into_iter().collect()));
                    for pin in [pin, self.pins.closing(&record.host_ifname).join(hook.link)] {
                        if tcx::open(&pin)?.is_some() {
                            problems.push(EndpointProblem::StrayLink { path: pin.display().to_string() });
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Reports missing pins, maps that the programs do not use, and rows that differ.
    pub(crate) fn observe_maps(
        &self,
        record: &EndpointRecord,
        opened: &Opened,
        problems: &mut Vec<EndpointProblem>,
    ) -> Result<()> {
        if self.is_covered() {
            return Ok(());
        }
        for name in PROGRAMS.into_iter().filter(|name| opened.program(name).is_none()) {
            problems.push(EndpointProblem::PinMissing { name: name.to_owned() });
        }
        let mut pinned = self.held_ids();
        for name in MAPS {
            let path = self.pins.endpoint(record.id, name);
            let looked = maps::open(&path, name).and_then(|data| {
                pinned.push((name, maps::id(&data, &path)?));
                match name {
                    map::CONFIG => observe_config(data, record, problems),
                    map::BANDWIDTH => observe_bandwidth(data, record, problems),
                    _ => Ok(()),
                }
            });
            match looked {
                Ok(()) => {}
                Err(e) if e.kind == KernelErrorKind::NotFound => {
                    problems.push(EndpointProblem::PinMissing { name: name.to_owned() });
                }
                Err(e) => problems.push(EndpointProblem::MapUnreadable { map: name.to_owned(), cause: e.cause }),
            }
        }
        let all_there = opened.programs.iter().all(Option::is_some);
        for (name, pinned) in pinned.into_iter().filter(|(_, id)| all_there && !opened.uses.contains(id)) {
            let used = opened.uses.iter().copied().collect();
            problems.push(EndpointProblem::MapUnused { map: name.to_owned(), pinned, used });
        }
        for address in record.addresses() {
            let want = expected_row(record, address);
            let found = match self.endpoint_row(address)? {
                Some(is) if is == want => continue,
                Some(is) => Some(format!("expected {want:?}, found {is:?}")),
                None => None,
            };
            problems.push(EndpointProblem::Row { address, found });
        }
        self.observe_sources(record, problems)?;
        let expected = opened.program(PROGRAMS[2]);
        let found = self.call_slot(u32::from(record.id.get()))?;
        if expected != found {
            problems.push(EndpointProblem::CallSlot { expected, found });
        }
        Ok(())
    }
}

fn observe_config(data: MapData, record: &EndpointRecord, problems: &mut Vec<EndpointProblem>) -> Result<()> {
    let read = |e: &(dyn std::error::Error + 'static)| wrap("read configuration", format!("endpoint {}", record.id), e);
    let config = maps::Config::of(data).and_then(|config| config.get()).map_err(|e| read(&e))?;
    let mut field = |field, expected: String, found: String| {
        if expected != found {
            problems.push(EndpointProblem::Config { field, expected, found });
        }
    };
    field("epoch", record.epoch.to_string(), config.epoch.to_string());
    field("ifindex", record.host_ifindex.to_string(), config.ifindex.to_string());
    field("identity", record.identity.to_string(), config.identity.to_string());
    let v4 = |octets: [u8; 4]| Ipv4Addr::from(octets).to_string();
    field("ipv4", v4(record.ipv4.map_or([0; 4], |a| a.octets())), v4(config.ipv4));
    let v6 = |octets: [u8; 16]| Ipv6Addr::from(octets).to_string();
    field("ipv6", v6(record.ipv6.map_or([0; 16], |a| a.octets())), v6(config.ipv6));
    let limited = |flags: u32| {
        let of = |direction: Direction| (flags & limit_flag(direction) != 0).then_some(direction.as_str());
        Direction::ALL.into_iter().filter_map(of).collect::<Vec<_>>().join(",")
    };
    field("limits", limited(bandwidth::flags(&record.bandwidth)), limited(config.flags));
    let chained = config.flags & FLAG_CHAINED != 0;
    field("chained", (!record.link_owner.is_wharf()).to_string(), chained.to_string());
    let has_sources = config.flags & FLAG_SOURCES != 0;
    field("sources", (!record.sources.is_empty()).to_string(), has_sources.to_string());
    field("live", true.to_string(), (config.flags & FLAG_LIVE != 0).to_string());
    Ok(())
}

/// Programs do not read the row of an unlimited direction.
fn observe_bandwidth(data: MapData, record: &EndpointRecord, problems: &mut Vec<EndpointProblem>) -> Result<()> {
    let read = |e: &(dyn std::error::Error + 'static)| wrap("read limits", format!("endpoint {}", record.id), e);
    if record.bandwidth.is_unlimited() {
        return Ok(());
    }
    let rows: Array<_, Bucket> = Array::try_from(Map::Array(data)).map_err(|e| read(&e))?;
    for direction in Direction::ALL {
        let Some(limit) = bandwidth::of(&record.bandwidth, direction) else { continue };
        let bucket = rows.get(&(direction as u32), 0).map_err(|e| read(&e))?;
        if (bucket.rate, bucket.burst_ns) != (limit.rate.get(), limit.burst_ns()) {
            let field = match direction {
                Direction::Ingress => "ingress limit",
                Direction::Egress => "egress limit",
            };
            let found = format!("{} bit/s, full after {} ns", bucket.rate, bucket.burst_ns);
            problems.push(EndpointProblem::Config { field, expected: bandwidth::told(limit), found });
        }
    }
    Ok(())
}
