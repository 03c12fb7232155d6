//! Pinned maps. Every open checks the shape, because the kernel opens a map of any shape, and a read into a smaller
//! value overruns user memory.

use std::{
    fs, io,
    os::fd::{AsFd, AsRawFd},
    path::Path,
};

use aya::maps::{Array, HashMap, Map, MapData, MapError, MapType, PerCpuArray, ProgramArray, lpm_trie::Key};
use wharf_common::{
    Bucket, CachedFlow, CellKey, CellRow, Counter, EndpointConfig, EndpointKey, EndpointProfile, EndpointRow, FlowKey,
    FlowRow, FlowTotals, FlowUse, FragmentKey, FragmentRow, FragmentSlot, PeerRow, PolicyState, PortKey, ProxyUse,
    SetsRow, SourcesRow, StackPathKey, StackPathRow, abi, map,
};
use wharf_core::kernel::{KernelErrorKind, Result};

use crate::error::{fail, wrap};

const BPF_F_NO_PREALLOC: u32 = 1;
const BPF_F_MMAPABLE: u32 = 1 << 10;

struct Shape {
    kind: MapType,
    key: usize,
    value: usize,
    max_entries: u32,
    flags: u32,
}

fn shape(name: &str) -> Option<Shape> {
    let number = size_of::<u32>();
    Some(match name {
        map::ENDPOINTS => Shape {
            kind: MapType::Hash,
            key: size_of::<EndpointKey>(),
            value: size_of::<EndpointRow>(),
            max_entries: map::ENDPOINTS_MAX,
            flags: BPF_F_NO_PREALLOC,
        },
        map::CALLS => {
            Shape { kind: MapType::ProgramArray, key: number, value: number, max_entries: map::CALLS_MAX, flags: 0 }
        }
        map::NODE_CALLS => Shape {
            kind: MapType::ProgramArray,
            key: number,
            value: number,
            max_entries: map::NODE_CALLS_MAX,
            flags: 0,
        },
        map::PROFILES => Shape {
            kind: MapType::Array,
            key: number,
            value: size_of::<EndpointProfile>(),
            max_entries: map::PROFILES_MAX,
            flags: 0,
        },
        map::EVENTS => Shape { kind: MapType::RingBuf, key: 0, value: 0, max_entries: map::EVENTS_BYTES, flags: 0 },
        map::STACK_PATHS => Shape {
            kind: MapType::LruHash,
            key: size_of::<StackPathKey>(),
            value: size_of::<StackPathRow>(),
            max_entries: map::STACK_PATHS_MAX,
            flags: 0,
        },
        map::STACK_USERS => Shape {
            kind: MapType::Array,
            key: number,
            value: size_of::<u64>(),
            max_entries: map::STACK_USERS_MAX,
            flags: 0,
        },
        map::SOURCES => Shape {
            kind: MapType::Hash,
            key: number,
            value: size_of::<SourcesRow>(),
            max_entries: map::SOURCES_MAX,
            flags: BPF_F_NO_PREALLOC,
        },
        map::FLOWS => Shape {
            kind: MapType::Hash,
            key: size_of::<FlowKey>(),
            value: size_of::<FlowRow>(),
            max_entries: map::FLOWS_MAX,
            flags: BPF_F_NO_PREALLOC,
        },
        map::FLOWS_RECENT => Shape {
            kind: MapType::Hash,
            key: number,
            value: size_of::<FlowKey>(),
            max_entries: map::FLOWS_RECENT_MAX,
            flags: BPF_F_NO_PREALLOC,
        },
        map::FLOWS_NEW => Shape {
            kind: MapType::LruHash,
            key: size_of::<FlowKey>(),
            value: size_of::<FlowRow>(),
            max_entries: map::FLOWS_NEW_MAX,
            flags: 0,
        },
        map::FLOW_CACHE => Shape {
            kind: MapType::PerCpuArray,
            key: number,
            value: size_of::<CachedFlow>(),
            max_entries: map::FLOW_CACHE_MAX,
            flags: 0,
        },
        map::FLOW_CACHE_ENDS => {
            Shape { kind: MapType::Array, key: number, value: number, max_entries: map::FLOW_CACHE_ENDS_MAX, flags: 0 }
        }
        map::FRAGMENT_SLOTS => Shape {
            kind: MapType::Hash,
            key: number,
            value: size_of::<FragmentSlot>(),
            max_entries: map::FRAGMENT_SLOTS_MAX,
            flags: BPF_F_NO_PREALLOC,
        },
        map::FRAGMENTS => Shape {
            kind: MapType::LruHash,
            key: size_of::<FragmentKey>(),
            value: size_of::<FragmentRow>(),
            max_entries: map::FRAGMENTS_MAX,
            flags: 0,
        },
        map::FLOW_USE => Shape {
            kind: MapType::Array,
            key: number,
            value: size_of::<FlowUse>(),
            max_entries: map::FLOW_USE_MAX,
            flags: 0,
        },
        map::FLOW_TOTALS => {
            Shape { kind: MapType::Array, key: number, value: size_of::<FlowTotals>(), max_entries: 1, flags: 0 }
        }
        map::PROXY_USE => Shape {
            kind: MapType::Array,
            key: number,
            value: size_of::<ProxyUse>(),
            max_entries: map::PROXY_USE_MAX,
            flags: BPF_F_MMAPABLE,
        },
        map::IPCACHE => Shape {
            kind: MapType::LpmTrie,
            key: size_of::<Key<EndpointKey>>(),
            value: size_of::<PeerRow>(),
            max_entries: map::IPCACHE_MAX,
            flags: BPF_F_NO_PREALLOC,
        },
        map::POLICY_PORTS => Shape {
            kind: MapType::LpmTrie,
            key: size_of::<Key<PortKey>>(),
            value: number,
            max_entries: map::POLICY_PORTS_MAX,
            flags: BPF_F_NO_PREALLOC,
        },
        map::POLICY_CELLS => Shape {
            kind: MapType::Hash,
            key: size_of::<CellKey>(),
            value: size_of::<CellRow>(),
            max_entries: map::POLICY_CELLS_MAX,
            flags: BPF_F_NO_PREALLOC,
        },
        map::POLICY_SETS => Shape {
            kind: MapType::Array,
            key: number,
            value: size_of::<SetsRow>(),
            max_entries: map::POLICY_SETS_MAX,
            flags: 0,
        },
        map::POLICY_STATE => {
            Shape { kind: MapType::Array, key: number, value: size_of::<PolicyState>(), max_entries: 1, flags: 0 }
        }
        map::ADDRESS_GENERATIONS => Shape {
            kind: MapType::Array,
            key: number,
            value: number,
            max_entries: map::ADDRESS_GENERATIONS_MAX,
            flags: 0,
        },
        map::CONFIG => {
            let max_entries = abi::config_row() + 1;
            Shape { kind: MapType::Array, key: number, value: size_of::<EndpointConfig>(), max_entries, flags: 0 }
        }
        map::METRICS => Shape {
            kind: MapType::PerCpuArray,
            key: number,
            value: size_of::<Counter>(),
            max_entries: map::METRICS_MAX,
            flags: 0,
        },
        map::BANDWIDTH => Shape {
            kind: MapType::Array,
            key: number,
            value: size_of::<Bucket>(),
            max_entries: map::BANDWIDTH_MAX,
            flags: 0,
        },
        _ => return None,
    })
}

pub(crate) fn kind_name(kind: MapType) -> &'static str {
    match kind {
        MapType::Hash => "hash",
        MapType::LruHash => "lru_hash",
        MapType::Array => "array",
        MapType::PerCpuArray => "percpu_array",
        MapType::ProgramArray => "prog_array",
        MapType::RingBuf => "ringbuf",
        MapType::LpmTrie => "lpm_trie",
        _ => "other",
    }
}

fn describe(kind: Option<MapType>, key: usize, value: usize, max_entries: u32, flags: u32) -> String {
    let kind = kind.map_or("unknown", kind_name);
    format!("{kind}, key {key} bytes, value {value} bytes, {max_entries} entries, flags {flags:#x}")
}

/// `NotFound` when the map is not pinned, `Conflict` for another version's shape.
pub(crate) fn open(path: &Path, name: &str) -> Result<MapData> {
    let operation = "open map";
    let subject = || path.display().to_string();
    let data = MapData::from_pin(path).map_err(|e| wrap(operation, subject(), &e))?;
    let info = data.info().map_err(|e| wrap(operation, subject(), &e))?;
    let Some(want) = shape(name) else {
        return Err(fail(operation, subject(), KernelErrorKind::NotFound, "there is no map of that name"));
    };
    let kind = info.map_type().ok();
    let (key, value) = (info.key_size() as usize, info.value_size() as usize);
    let same = kind == Some(want.kind)
        && key == want.key
        && value == want.value
        && (info.max_entries() == want.max_entries || name == map::IPCACHE && info.max_entries() == map::IPCACHE_LEAST)
        && info.map_flags() == want.flags;
    if same {
        return Ok(data);
    }
    let cause = format!(
        "the pinned map has another layout than this version's ({}; expected {}); it was left alone: remove it, or run \
         the version that made it",
        describe(kind, key, value, info.max_entries(), info.map_flags()),
        describe(Some(want.kind), want.key, want.value, want.max_entries, want.flags),
    );
    Err(fail(operation, subject(), KernelErrorKind::Conflict, cause))
}

pub(crate) fn id(data: &MapData, path: &Path) -> Result<u32> {
    Ok(data.info().map_err(|e| wrap("read map", path.display().to_string(), &e))?.id())
}

fn typed<T>(path: &Path, map: std::result::Result<T, MapError>) -> Result<T> {
    map.map_err(|e| wrap("open map", path.display().to_string(), &e))
}

pub(crate) fn endpoints(path: &Path) -> Result<HashMap<MapData, EndpointKey, EndpointRow>> {
    typed(path, HashMap::try_from(Map::HashMap(open(path, map::ENDPOINTS)?)))
}

pub(crate) fn calls(path: &Path) -> Result<ProgramArray<MapData>> {
    typed(path, ProgramArray::try_from(Map::ProgramArray(open(path, map::CALLS)?)))
}

pub(crate) fn is_missing(error: &MapError) -> bool {
    match error {
        MapError::KeyNotFound => true,
        MapError::SyscallError(e) => e.io_error.raw_os_error() == Some(libc::ENOENT),
        _ => false,
    }
}

pub(crate) struct Config(Array<MapData, EndpointConfig>);

impl Config {
    pub(crate) fn of(map: MapData) -> std::result::Result<Self, MapError> {
        Array::try_from(Map::Array(map)).map(Self)
    }

    pub(crate) fn get(&self) -> std::result::Result<EndpointConfig, MapError> {
        self.0.get(&abi::config_row(), 0)
    }

    pub(crate) fn set(&mut self, config: EndpointConfig) -> std::result::Result<(), MapError> {
        self.0.set(abi::config_row(), config, 0)
    }
}

pub(crate) fn config(path: &Path) -> Result<Config> {
    typed(path, Config::of(open(path, map::CONFIG)?))
}

pub(crate) fn bandwidth(path: &Path) -> Result<Array<MapData, Bucket>> {
    typed(path, Array::try_from(Map::Array(open(path, map::BANDWIDTH)?)))
}

pub(crate) fn metrics(path: &Path) -> Result<PerCpuArray<MapData, Counter>> {
    typed(path, PerCpuArray::try_from(Map::PerCpuArray(open(path, map::METRICS)?)))
}

/// Bytes, from `fdinfo`.
pub(crate) fn memlock(fd: &impl AsFd) -> Result<u64> {
    let path = format!("/proc/thread-self/fdinfo/{}", fd.as_fd().as_raw_fd());
    let text = fs::read_to_string(&path).map_err(|e: io::Error| wrap("read BPF object's memory", &path, &e))?;
    let value = text.lines().find_map(|l| l.strip_prefix("memlock:")).and_then(|v| v.trim().parse().ok());
    value.ok_or_else(|| fail("read BPF object's memory", path, KernelErrorKind::Other, "no memlock line"))
}
