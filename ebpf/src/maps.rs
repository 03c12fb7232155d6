//! The maps, described in `wharf_common::map`. The loader uses the statics' names.

use aya_ebpf::{
    bindings::{BPF_F_MMAPABLE, BPF_F_NO_PREALLOC},
    btf_maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, ProgramArray, RingBuf},
    macros::btf_map,
};
use wharf_common::{
    Bucket, CachedFlow, CellKey, CellRow, Counter, EndpointConfig, EndpointKey, EndpointProfile, EndpointRow, Event,
    EventBudget, FlowKey, FlowRow, FlowTotals, FlowUse, FragmentKey, FragmentRow, FragmentSlot, PeerRow, PolicyState,
    PortKey, ProxyUse, SetsRow, SourcesRow, StackPathKey, StackPathRow,
    map::{
        ADDRESS_GENERATIONS_MAX, BANDWIDTH_MAX, CALLS_MAX, CONFIG_ROW, ENDPOINTS_MAX, EVENTS_BYTES,
        FLOW_CACHE_ENDS_MAX, FLOW_CACHE_MAX, FLOW_USE_MAX, FLOWS_MAX, FLOWS_NEW_MAX, FLOWS_RECENT_MAX,
        FRAGMENT_SLOTS_MAX, FRAGMENTS_MAX, IPCACHE_MAX, METRICS_MAX, NODE_CALLS_MAX, POLICY_CELLS_MAX,
        POLICY_PORTS_MAX, POLICY_SETS_MAX, PROFILES_MAX, PROXY_USE_MAX, SOURCES_MAX, STACK_PATHS_MAX, STACK_USERS_MAX,
    },
};

#[btf_map]
pub static ENDPOINTS: HashMap<EndpointKey, EndpointRow, { ENDPOINTS_MAX as usize }, { BPF_F_NO_PREALLOC as usize }> =
    HashMap::new();

#[btf_map]
pub static CALLS: ProgramArray<{ CALLS_MAX as usize }> = ProgramArray::new();

#[btf_map]
pub static NODE_CALLS: ProgramArray<{ NODE_CALLS_MAX as usize }> = ProgramArray::new();

#[btf_map]
pub static PROFILES: Array<EndpointProfile, { PROFILES_MAX as usize }> = Array::new();

#[btf_map]
pub static EVENTS: RingBuf<Event, { EVENTS_BYTES as usize }> = RingBuf::new();

#[btf_map]
pub static STACK_PATHS: LruHashMap<StackPathKey, StackPathRow, { STACK_PATHS_MAX as usize }> = LruHashMap::new();

#[btf_map]
pub static STACK_USERS: Array<u64, { STACK_USERS_MAX as usize }> = Array::new();

#[btf_map]
pub static SOURCES: HashMap<u32, SourcesRow, { SOURCES_MAX as usize }, { BPF_F_NO_PREALLOC as usize }> = HashMap::new();

#[btf_map]
pub static FLOWS: HashMap<FlowKey, FlowRow, { FLOWS_MAX as usize }, { BPF_F_NO_PREALLOC as usize }> = HashMap::new();

#[btf_map]
pub static FLOWS_RECENT: HashMap<u32, FlowKey, { FLOWS_RECENT_MAX as usize }, { BPF_F_NO_PREALLOC as usize }> =
    HashMap::new();

#[btf_map]
pub static FLOWS_NEW: LruHashMap<FlowKey, FlowRow, { FLOWS_NEW_MAX as usize }> = LruHashMap::new();

#[btf_map]
pub static FLOW_CACHE: PerCpuArray<CachedFlow, { FLOW_CACHE_MAX as usize }> = PerCpuArray::new();

#[btf_map]
pub static FLOW_CACHE_ENDS: Array<u32, { FLOW_CACHE_ENDS_MAX as usize }> = Array::new();

#[btf_map]
pub static FRAGMENT_SLOTS: HashMap<u32, FragmentSlot, { FRAGMENT_SLOTS_MAX as usize }, { BPF_F_NO_PREALLOC as usize }> =
    HashMap::new();

#[btf_map]
pub static FRAGMENTS: LruHashMap<FragmentKey, FragmentRow, { FRAGMENTS_MAX as usize }> = LruHashMap::new();

#[btf_map]
pub static FLOW_USE: Array<FlowUse, { FLOW_USE_MAX as usize }> = Array::new();

#[btf_map]
pub static FLOW_TOTALS: Array<FlowTotals, 1> = Array::new();

#[btf_map]
pub static PROXY_USE: Array<ProxyUse, { PROXY_USE_MAX as usize }, { BPF_F_MMAPABLE as usize }> = Array::new();

#[btf_map]
pub static IPCACHE: LpmTrie<EndpointKey, PeerRow, { IPCACHE_MAX as usize }> = LpmTrie::new();

#[btf_map]
pub static POLICY_PORTS: LpmTrie<PortKey, u32, { POLICY_PORTS_MAX as usize }> = LpmTrie::new();

#[btf_map]
pub static POLICY_CELLS: HashMap<CellKey, CellRow, { POLICY_CELLS_MAX as usize }, { BPF_F_NO_PREALLOC as usize }> =
    HashMap::new();

#[btf_map]
pub static POLICY_SETS: Array<SetsRow, { POLICY_SETS_MAX as usize }> = Array::new();

#[btf_map]
pub static POLICY_STATE: Array<PolicyState, 1> = Array::new();

#[btf_map]
pub static ADDRESS_GENERATIONS: Array<u32, { ADDRESS_GENERATIONS_MAX as usize }> = Array::new();

#[btf_map]
pub static CONFIG: Array<EndpointConfig, { CONFIG_ROW as usize + 1 }> = Array::new();

#[btf_map]
pub static METRICS: PerCpuArray<Counter, { METRICS_MAX as usize }> = PerCpuArray::new();

#[btf_map]
pub static BANDWIDTH: Array<Bucket, { BANDWIDTH_MAX as usize }> = Array::new();

#[btf_map]
pub static EVENT_BUDGET: Array<EventBudget, 1> = Array::new();
