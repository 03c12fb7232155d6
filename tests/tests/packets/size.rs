//! What the programs cost: to verify, to run, to hold. Numbers that depend on nothing but the object have a limit here;
//! times are printed (`--no-capture` shows them), as the benchmark is the place to judge them.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use aya::{
    EbpfLoader,
    programs::{SchedClassifier, TestRun, TestRunOptions},
};
use wharf_tests::frame;

use crate::fixture::{
    A, B, ELSEWHERE4, Endpoint, FROM_CONTAINER, GATEWAY4, PROGRAMS, REDIRECT, SHOT, TO_CONTAINER, Who, object, pair,
    udp, with,
};

/// Instructions the verifier walks, at about ten for a microsecond.
const VERIFIED_MAX: u32 = 8_000;
/// BPF instructions of one program, its subprogram included.
const INSTRUCTIONS_MAX: u32 = 1_500;

#[test]
fn programs_stay_small() -> Result<()> {
    let mut ebpf = EbpfLoader::new().load(&object("endpoint.o")?)?;
    for name in PROGRAMS {
        let program: &mut SchedClassifier = ebpf.program_mut(name).context(name)?.try_into()?;
        let mut took = Duration::MAX;
        for _ in 0..10 {
            let start = Instant::now();
            program.load()?;
            took = took.min(start.elapsed());
            program.unload()?;
        }
        program.load()?;
        let info = program.info()?;
        let verified = info.verified_instruction_count().context("verified_insns")?;
        let instructions = info.size_translated().context("size")? / 8;
        let memory = info.memory_locked()?;
        println!("{name}: {took:?} to load, {verified} instructions verified, {instructions} held, {memory} bytes");
        ensure!(verified < VERIFIED_MAX, "{name}: {verified} instructions verified");
        ensure!(instructions < INSTRUCTIONS_MAX, "{name}: {instructions} instructions");
    }
    for (name, map) in ebpf.maps() {
        println!("{name}: {map:?}");
    }
    Ok(())
}

#[test]
fn one_packet_takes_nanoseconds() -> Result<()> {
    let (a, _b) = pair()?;
    let unframed = with(udp(A.v4, ELSEWHERE4), 12, &[0x88, 0xcc]);
    for (name, program, packet) in [
        ("to the stack, v4", FROM_CONTAINER, udp(A.v4, ELSEWHERE4)),
        ("from the stack, v4", TO_CONTAINER, udp(GATEWAY4, A.v4)),
        ("from the stack, v6", TO_CONTAINER, udp(B.v6, A.v6)),
        ("dropped beyond the budget", FROM_CONTAINER, unframed),
    ] {
        let (_, nanoseconds) = a.run_times(program, &packet, 1_000_000)?;
        println!("{name}: {nanoseconds} ns");
    }
    // A packet that is delivered is changed, and the next run finds it so. Between endpoints whose frames look the same
    // from both sides only the hop is lost, of which there are 255.
    let mut a = Endpoint::load(A)?;
    let mirror = Endpoint::load(Who { mac: A.host_mac, host_mac: A.mac, ..B })?;
    a.knows(&B)?;
    a.reaches(&mirror)?;
    for (name, packet, hops) in
        [("to a local endpoint, v4", udp(A.v4, B.v4), 22), ("to a local endpoint, v6", udp(A.v6, B.v6), 21)]
    {
        let packet = with(packet, hops, &[255]);
        let mut runs = Vec::new();
        for _ in 0..1_000 {
            let (outcome, nanoseconds) = a.run_times(FROM_CONTAINER, &packet, 250)?;
            ensure!(outcome.action == REDIRECT, "{name}: {outcome:?}");
            runs.push(nanoseconds);
        }
        runs.sort_unstable();
        println!("{name}: {} ns", runs[runs.len() / 2]);
    }
    Ok(())
}

#[test]
fn the_sink_drops_everything() -> Result<()> {
    let mut ebpf = EbpfLoader::new().load(&object("sink.o")?)?;
    let program: &mut SchedClassifier = ebpf.program_mut("sink").context("sink")?.try_into()?;
    program.load()?;
    for packet in [udp(A.v4, B.v4), udp(A.v6, B.v6), frame::ethernet(A.mac, B.mac, frame::ARP, &[0; 28])] {
        let result = program.test_run(TestRunOptions { data_in: Some(&packet), ..TestRunOptions::default() })?;
        assert_eq!(result.return_value, SHOT);
    }
    assert_eq!(ebpf.maps().count(), 0, "a sink holds nothing");
    Ok(())
}
