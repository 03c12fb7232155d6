//! The maps, as `wharf_common::map` describes them. The statics' names are the names the loader knows them by.

use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    btf_maps::{Array, HashMap, PerCpuArray, ProgramArray, RingBuf},
    macros::btf_map,
};
use wharf_common::{
    Counter, EndpointConfig, EndpointKey, EndpointRow, Event, EventBudget,
    map::{CALLS_MAX, ENDPOINTS_MAX, EVENTS_BYTES, METRICS_MAX},
};

/// Node-wide: which addresses are local endpoints.
#[btf_map]
pub static ENDPOINTS: HashMap<EndpointKey, EndpointRow, { ENDPOINTS_MAX as usize }, { BPF_F_NO_PREALLOC as usize }> =
    HashMap::new();

/// Node-wide: each endpoint's `deliver`, by endpoint id.
#[btf_map]
pub static CALLS: ProgramArray<{ CALLS_MAX as usize }> = ProgramArray::new();

/// Node-wide: drops and traces for the agent's monitor.
#[btf_map]
pub static EVENTS: RingBuf<Event, { EVENTS_BYTES as usize }> = RingBuf::new();

/// This endpoint's configuration.
#[btf_map]
pub static CONFIG: Array<EndpointConfig, 1> = Array::new();

/// This endpoint's counters.
#[btf_map]
pub static METRICS: PerCpuArray<Counter, { METRICS_MAX as usize }> = PerCpuArray::new();

/// This endpoint's budget of events.
#[btf_map]
pub static EVENT_BUDGET: Array<EventBudget, 1> = Array::new();
