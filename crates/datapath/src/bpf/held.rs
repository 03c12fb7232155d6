//! The shared maps that this process holds open. Pins can change meanwhile, but programs, rows and pins must refer to
//! the same maps: rows are accessed through held descriptors, and programs are loaded only while every pin matches.

use std::{
    fs, io,
    os::{fd::AsFd as _, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
    sync::{MutexGuard, PoisonError},
};

use aya::{
    Ebpf,
    maps::{HashMap, Map, MapData, MapError, MapInfo, ProgramArray},
};
use nix::time::{ClockId, clock_gettime};
use wharf_common::{EndpointConsts, EndpointKey, EndpointRow, FlowKey, FlowRow, map};
use wharf_core::kernel::{KernelError, KernelErrorKind, Result};

use super::{Bpf, maps, pins::SHARED_MAPS};
use crate::error::{fail, wrap};

const OF_ENDPOINT_PROGRAMS: [&str; 9] = [
    map::ENDPOINTS,
    map::CALLS,
    map::NODE_CALLS,
    map::PROFILES,
    map::EVENTS,
    map::FLOW_CACHE,
    map::FLOW_CACHE_ENDS,
    map::POLICY_STATE,
    map::ADDRESS_GENERATIONS,
];

pub(super) struct SharedMap {
    pub(super) name: &'static str,
    id: u32,
    /// Of key and value. A pinned program may have the map's id.
    sizes: (u32, u32),
    max_entries: u32,
    pub(super) map: Map,
}

impl SharedMap {
    pub(super) fn open(name: &'static str, path: &Path) -> Result<Self> {
        let data = maps::open(path, name)?;
        let info = data.info().map_err(|e| wrap("read map", path.display().to_string(), &e))?;
        let sizes = (info.key_size(), info.value_size());
        Ok(Self { name, id: info.id(), sizes, max_entries: info.max_entries(), map: typed(name, data) })
    }

    fn is(&self, info: &MapInfo) -> bool {
        info.id() == self.id && (info.key_size(), info.value_size()) == self.sizes
    }

    fn another(&self, is: u32) -> String {
        format!("expected map id {}, which the programs use, found {is}: the pin was replaced", self.id)
    }
}

/// `CALLS` and `NODE_CALLS` are read as arrays of program ids.
fn typed(name: &str, data: MapData) -> Map {
    match name {
        map::ENDPOINTS | map::SOURCES | map::FLOWS | map::FLOWS_RECENT | map::FRAGMENT_SLOTS | map::POLICY_CELLS => {
            Map::HashMap(data)
        }
        map::CALLS | map::NODE_CALLS => Map::Array(data),
        map::EVENTS => Map::RingBuf(data),
        map::STACK_PATHS | map::FLOWS_NEW | map::FRAGMENTS => Map::LruHashMap(data),
        map::PROFILES | map::STACK_USERS | map::FLOW_USE | map::FLOW_TOTALS | map::PROXY_USE => Map::Array(data),
        map::FLOW_CACHE_ENDS => Map::Array(data),
        map::IPCACHE | map::POLICY_PORTS => Map::LpmTrie(data),
        map::POLICY_SETS | map::POLICY_STATE | map::ADDRESS_GENERATIONS => Map::Array(data),
        map::FLOW_CACHE => Map::PerCpuArray(data),
        _ => Map::Unsupported(data),
    }
}

pub(super) fn data_of(map: &Map) -> Option<&MapData> {
    match map {
        Map::HashMap(data)
        | Map::LruHashMap(data)
        | Map::Array(data)
        | Map::ProgramArray(data)
        | Map::LpmTrie(data)
        | Map::PerCpuArray(data)
        | Map::RingBuf(data)
        | Map::Unsupported(data) => Some(data),
        _ => None,
    }
}

pub(super) const COVERED: &str = "another bpffs is mounted over the one that the agent opened, and nothing is pinned in it: \
                                  unmount it, or restart the agent, which then uses the other one";

/// Inode and time of change of a directory: a pin that is made, removed or replaced changes it (bpffs,
/// kernel/bpf/inode.c). A mount over a single pin does not; the audit finds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp {
    inode: (u64, u64),
    /// Seconds and nanoseconds of the clock of file times.
    changed: (i64, i64),
}

impl Stamp {
    /// `None` if a change at this moment could leave the time as it is.
    fn of(directory: &Path) -> Option<Self> {
        let meta = fs::metadata(directory).ok()?;
        let changed = (meta.ctime(), meta.ctime_nsec());
        let now = clock_gettime(ClockId::CLOCK_REALTIME_COARSE).ok()?;
        ((now.tv_sec(), now.tv_nsec()) > changed).then_some(Self { inode: (meta.dev(), meta.ino()), changed })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Ours,
    /// Another bpffs is mounted over the opened one.
    Covered,
    /// The opened bpffs was unmounted with its pins.
    Replaced,
}

/// See `proc_pid_mountinfo(5)`. Another file system may reuse the number.
fn has_device(mounts: &str, device: u64) -> bool {
    let device = format!("{}:{}", libc::major(device), libc::minor(device));
    let is_bpffs = |line: &str| line.split_once(" - ").is_some_and(|(_, rest)| rest.starts_with("bpf "));
    mounts.lines().any(|line| line.split(' ').nth(2) == Some(device.as_str()) && is_bpffs(line))
}

pub(super) enum BadPin {
    /// Not looked at, for lack of descriptors or memory: a good pin must not be replaced.
    Unread,
    Missing,
    Another(String),
}

impl Bpf {
    pub(super) fn place(&self) -> Result<Place> {
        let device = self.pins.device()?;
        if device == self.device {
            return Ok(Place::Ours);
        }
        // Mount namespaces are per thread. Unreadable mounts count as covered: nothing is written to another agent's
        // bpffs.
        let is_mounted = match fs::read_to_string("/proc/thread-self/mountinfo") {
            Ok(mounts) => has_device(&mounts, self.device),
            Err(error) => {
                tracing::debug!(%error, "read the mounts");
                true
            }
        };
        Ok(if is_mounted { Place::Covered } else { Place::Replaced })
    }

    pub(super) fn is_covered(&self) -> bool {
        matches!(self.place(), Ok(Place::Covered))
    }

    /// Fails when covered: new pins would keep an operator from unmounting the bpffs.
    pub(super) fn check_uncovered(&self) -> Result<()> {
        match self.place()? {
            Place::Ours | Place::Replaced => Ok(()),
            Place::Covered => {
                Err(fail("pin", self.pins.bpffs().display().to_string(), KernelErrorKind::Conflict, COVERED))
            }
        }
    }

    pub(super) fn replaced(&self, name: &str, cause: &str) -> KernelError {
        let cause = format!(
            "{cause}; another bpffs was mounted in the place of the agent's: remove the pin, or restart the agent"
        );
        fail("open map", self.pins.shared(name).display().to_string(), KernelErrorKind::Conflict, cause)
    }

    pub(super) fn look_at_pin(&self, own: &SharedMap) -> Option<BadPin> {
        let path = self.pins.shared(own.name);
        match MapInfo::from_pin(&path).map_err(|e| wrap("open map", path.display().to_string(), &e)) {
            Ok(info) if own.is(&info) => None,
            Ok(info) => Some(BadPin::Another(own.another(info.id()))),
            Err(e) if e.kind == KernelErrorKind::NotFound => Some(BadPin::Missing),
            Err(e) if e.kind == KernelErrorKind::Exhausted => Some(BadPin::Unread),
            Err(e) => Some(BadPin::Another(e.cause)),
        }
    }

    /// Loads an object over the held shared maps and other pins. Fails when a shared map's pin is missing or differs:
    /// aya opens maps by pins, and creates missing ones.
    pub(super) fn load(
        &self,
        object: &[u8],
        consts: Option<&EndpointConsts>,
        of_endpoint: Vec<(&'static str, PathBuf)>,
        failed: impl Fn(&aya::EbpfError) -> KernelError,
    ) -> Result<Ebpf> {
        self.check_shared()?;
        let mut pins = self.shared_pins();
        pins.extend(of_endpoint);
        let ebpf = self.loader.load(object, consts, pins).map_err(|e| failed(&e))?;
        for own in &*self.held() {
            let Some(data) = ebpf.map(own.name).and_then(data_of) else { continue };
            let is = maps::id(data, &self.pins.shared(own.name))?;
            if is != own.id {
                return Err(self.unusable(own, &own.another(is)));
            }
        }
        Ok(ebpf)
    }

    pub(super) fn held(&self) -> MutexGuard<'_, Vec<SharedMap>> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn held_ids(&self) -> Vec<(&'static str, u32)> {
        let by_endpoints = |map: &&SharedMap| OF_ENDPOINT_PROGRAMS.contains(&map.name);
        self.held().iter().filter(by_endpoints).map(|map| (map.name, map.id)).collect()
    }

    pub(super) fn shared_ids(&self) -> Vec<u32> {
        self.held().iter().map(|map| map.id).collect()
    }

    /// `None` after `remove_node`.
    pub(super) fn read_held<T>(&self, name: &str, read: impl FnOnce(&Map) -> Result<T>) -> Result<Option<T>> {
        self.held().iter().find(|map| map.name == name).map(|own| read(&own.map)).transpose()
    }

    /// `None` after `remove_node`.
    pub(super) fn held_max(&self, name: &str) -> Option<u32> {
        self.held().iter().find(|map| map.name == name).map(|own| own.max_entries)
    }

    /// Looks at each pin only after a change of their directory: 24 pins would be 72 system calls of each create.
    pub(super) fn check_shared(&self) -> Result<()> {
        self.check_uncovered()?;
        let good = || self.good_pins.lock().unwrap_or_else(PoisonError::into_inner);
        let stamp = Stamp::of(&self.pins.shared_dir());
        if stamp.is_some() && *good() == stamp {
            return Ok(());
        }
        let mut is_read = true;
        for own in &*self.held() {
            match self.look_at_pin(own) {
                None => {}
                Some(BadPin::Unread) => is_read = false,
                Some(BadPin::Missing) => return Err(self.unusable(own, "the pin is missing")),
                Some(BadPin::Another(cause)) => return Err(self.unusable(own, &cause)),
            }
        }
        *good() = stamp.filter(|_| is_read);
        Ok(())
    }

    fn unusable(&self, own: &SharedMap, cause: &str) -> KernelError {
        let cause = format!("{cause}; `wharf audit --repair` pins the agent's map again");
        fail("open map", self.pins.shared(own.name).display().to_string(), KernelErrorKind::Conflict, cause)
    }

    /// `NotFound` after `remove_node`.
    pub(super) fn held_data(&self, name: &str) -> Result<MapData> {
        let failed = |e: &(dyn std::error::Error + 'static)| wrap("open map", name, e);
        let held = self.held();
        let Some(data) = held.iter().find(|map| map.name == name).and_then(|own| data_of(&own.map)) else {
            let path = self.pins.shared(name).display().to_string();
            return Err(fail("open map", path, KernelErrorKind::NotFound, "the node's maps were removed"));
        };
        let descriptor = data.fd().as_fd().try_clone_to_owned().map_err(|e: io::Error| failed(&e))?;
        MapData::from_fd(descriptor).map_err(|e| failed(&e))
    }

    pub(super) fn open_held<T: TryFrom<Map, Error = MapError>>(&self, name: &'static str) -> Result<T> {
        T::try_from(typed(name, self.held_data(name)?)).map_err(|e| wrap("open map", name, &e))
    }

    pub(super) fn endpoints(&self) -> Result<HashMap<MapData, EndpointKey, EndpointRow>> {
        self.open_held(map::ENDPOINTS)
    }

    pub(super) fn program_slots(&self, name: &'static str) -> Result<ProgramArray<MapData>> {
        ProgramArray::try_from(Map::ProgramArray(self.held_data(name)?)).map_err(|e| wrap("open map", name, &e))
    }

    pub(super) fn flow_rows(&self, name: &'static str) -> Result<HashMap<MapData, FlowKey, FlowRow>> {
        self.open_held(name)
    }

    pub(super) fn shared_pins(&self) -> Vec<(&'static str, PathBuf)> {
        SHARED_MAPS.map(|name| (name, self.pins.shared(name))).to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_is_found_among_the_mounts_by_its_device() {
        let mounts = "22 1 0:21 / /sys rw,nosuid - sysfs sysfs rw\n\
                      31 22 0:27 / /sys/fs/bpf rw - bpf bpf rw,mode=700\n\
                      90 31 0:127 / /sys/fs/bpf rw shared:3 - bpf bpf rw\n";
        for (minor, expected) in [(27, true), (127, true), (2, false), (7, false), (12, false)] {
            assert_eq!(has_device(mounts, libc::makedev(0, minor)), expected, "{minor}");
        }
        assert!(!has_device(mounts, libc::makedev(27, 0)) && !has_device("", 0) && !has_device("1 2\n\n", 0));
    }
}
