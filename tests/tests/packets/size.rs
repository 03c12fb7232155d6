//! What the programs cost to verify and to hold: numbers that depend on nothing but the object, each with a limit. What
//! they cost in time is the benchmark's to measure.

use std::os::fd::{AsFd, AsRawFd};

use anyhow::{Context, Result, anyhow, bail, ensure};
use aya::{
    EbpfLoader,
    maps::{Array, Map},
    programs::SchedClassifier,
};
use wharf_common::{
    ABI_VERSION, EndpointConfig, EndpointConsts,
    map::{self, NodeCall},
};
use wharf_tests::frame;

use crate::fixture::{
    A, B, DELIVER, ELSEWHERE4, Endpoint, FROM_CONTAINER, OK, PROGRAMS, REDIRECT, SHOT, TO_CONTAINER, fill_slot,
    load_node, object, on_link, udp,
};

/// Instructions that the verifier walks for an endpoint's programs together, about one for a microsecond: most of what
/// a create costs in a burst. What few packets need belongs into the object `node`. Verifiers differ: 1,858 on Linux
/// 6.18 (`deliver` 837, `from_container` 610, `to_container` 411), 2,429 on Linux 6.1. The flow cache has 470 of them,
/// and saves each packet of a busy flow 50 to 75 ns.
const VERIFIED_MAX: u32 = 2_500;
/// The same for one program of the node's, which is verified once at each start, of the million that the kernel allows.
/// The largest, `judge`: 66,000 on Linux 6.18. Linux 6.1 walks more, because its verifier takes every number for one
/// that matters as soon as a program has functions, so that it follows to the end each number that it can tell from
/// others.
const VERIFIED_OF_NODE_MAX: u32 = 200_000;
/// BPF instructions of one program of an endpoint's, its subprograms included.
const INSTRUCTIONS_MAX: u32 = 1_000;
/// The same for one of the node's, which is held once: 6,392 for the largest, 100 of them to end entries of the flow
/// cache.
const INSTRUCTIONS_OF_NODE_MAX: u32 = 6_450;

#[test]
fn programs_stay_small() -> Result<()> {
    let mut ebpf = EbpfLoader::new().load(&object("endpoint.o")?)?;
    let mut node = EbpfLoader::new().load(&object("node.o")?)?;
    let mut of_endpoint = 0;
    let shared = NodeCall::ALL.iter().map(|call| call.program());
    for (name, is_shared) in PROGRAMS.into_iter().map(|name| (name, false)).chain(shared.map(|name| (name, true))) {
        let object = if is_shared { &mut node } else { &mut ebpf };
        let program: &mut SchedClassifier = object.program_mut(name).context(name)?.try_into()?;
        program.load()?;
        let info = program.info()?;
        let verified = info.verified_instruction_count().context("verified_insns")?;
        let instructions = info.size_translated().context("size")? / 8;
        let memory = info.memory_locked()?;
        println!("{name}: {verified} instructions verified, {instructions} held, {memory} bytes");
        ensure!(verified < VERIFIED_OF_NODE_MAX, "{name}: {verified} instructions verified");
        of_endpoint += if is_shared { 0 } else { verified };
        let most = if is_shared { INSTRUCTIONS_OF_NODE_MAX } else { INSTRUCTIONS_MAX };
        ensure!(instructions < most, "{name}: {instructions} instructions");
    }
    ensure!(of_endpoint < VERIFIED_MAX, "{of_endpoint} instructions verified for an endpoint");
    for (name, map) in ebpf.maps() {
        println!("{name}: {} bytes", map_bytes(map)?);
    }
    Ok(())
}

/// Kernel memory of a map, as the kernel itself reckons it.
fn map_bytes(map: &Map) -> Result<u64> {
    let data = match map {
        Map::Array(data)
        | Map::HashMap(data)
        | Map::LpmTrie(data)
        | Map::LruHashMap(data)
        | Map::PerCpuArray(data)
        | Map::ProgramArray(data)
        | Map::RingBuf(data) => data,
        other => bail!("a kind of map that no program needs: {other:?}"),
    };
    let fdinfo = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", data.fd().as_fd().as_raw_fd()))?;
    let bytes = fdinfo.lines().find_map(|line| line.strip_prefix("memlock:")).context("memlock of a map")?;
    Ok(bytes.trim().parse()?)
}

/// What an endpoint costs the kernel beyond what all endpoints share, whatever the number of processors it has.
#[test]
fn an_endpoints_maps_stay_small() -> Result<()> {
    let endpoint = Endpoint::load(A)?;
    let mut bytes = 0;
    for name in [map::CONFIG, map::METRICS, map::BANDWIDTH, map::EVENT_BUDGET] {
        bytes += map_bytes(endpoint.map(name)?)?;
    }
    let processors = u64::try_from(aya::util::nr_cpus().map_err(|(what, error)| anyhow!("{what}: {error}"))?)?;
    let counters = u64::from(map::METRICS_MAX) * 16 * processors;
    // Before Linux 6.4 the kernel tells whole pages for each map.
    let bound = if bytes % 4096 == 0 { 4 * 4096 + counters } else { 4095 + counters };
    ensure!(bytes <= bound, "{bytes} bytes");
    Ok(())
}

/// The object with log records must load as well, and a verdict must be the same in it.
#[test]
fn programs_with_log_records_decide_the_same() -> Result<()> {
    for debug in [0, 1] {
        let consts = EndpointConsts {
            abi_version: ABI_VERSION,
            endpoint_id: A.id,
            container_mac: A.mac,
            host_mac: A.host_mac,
            debug,
        };
        let mut loader = EbpfLoader::new();
        loader.override_global("CONSTS", &consts, true);
        let mut ebpf = loader.load(&object("endpoint-debug.o")?)?;
        let mut rows: Array<_, EndpointConfig> = ebpf.map_mut(map::CONFIG).context("CONFIG")?.try_into()?;
        rows.set(0, A.config(), 0)?;
        let _node = load_node(&mut ebpf)?;
        for name in PROGRAMS {
            let program: &mut SchedClassifier = ebpf.program_mut(name).context(name)?.try_into()?;
            program.load().with_context(|| format!("verify {name} of endpoint-debug.o"))?;
        }
        fill_slot(&mut ebpf, A.id)?;
        for (name, packet, action) in [
            (FROM_CONTAINER, udp(A.v4, ELSEWHERE4), OK),
            (FROM_CONTAINER, udp(B.v4, ELSEWHERE4), SHOT),
            (TO_CONTAINER, udp(B.v6, A.v6), OK),
            (DELIVER, udp(B.v6, A.v6), REDIRECT),
            (DELIVER, udp(A.v6, B.v6), SHOT),
        ] {
            let program: &mut SchedClassifier = ebpf.program_mut(name).context(name)?.try_into()?;
            let is = on_link(program, &packet, 1)?.action;
            ensure!(is == action, "{name} with debug {debug}: {is}");
        }
    }
    Ok(())
}

#[test]
fn the_sink_drops_everything() -> Result<()> {
    let mut ebpf = EbpfLoader::new().load(&object("sink.o")?)?;
    let program: &mut SchedClassifier = ebpf.program_mut("sink").context("sink")?.try_into()?;
    program.load()?;
    for packet in [udp(A.v4, B.v4), udp(A.v6, B.v6), frame::ethernet(A.mac, B.mac, frame::ARP, &[0; 28])] {
        assert_eq!(on_link(program, &packet, 1)?.action, SHOT);
    }
    assert_eq!(ebpf.maps().count(), 0, "a sink holds nothing");
    Ok(())
}
