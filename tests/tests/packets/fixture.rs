//! Two endpoints of one node, loaded but attached to nothing.

use std::{
    cell::OnceCell,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use anyhow::{Context, Result, ensure};
use aya::{
    Ebpf, EbpfLoader,
    maps::{Array, HashMap, MapData, PerCpuArray, ProgramArray, RingBuf},
    programs::{SchedClassifier, TestRun, TestRunOptions},
};
use nix::{
    net::if_::if_nametoindex,
    sched::{CloneFlags, setns},
};
use wharf_common::{
    ABI_VERSION, Bucket, Counter, Direction, DropReason, EndpointConfig, EndpointConsts, EndpointKey, EndpointRow,
    Event, EventBudget,
    drop_reason::{REASONS, metrics_index},
    map::{self, FLAG_LIVE, FLAG_TRACE, NodeCall},
    test_packet::MARK_OFFSET,
};
use wharf_tests::{
    frame::Mac,
    process::{bpf_dir, ip},
    programs::on_interface,
    scratch,
    space::Space,
};
use zerocopy::FromBytes;

/// Hook verdicts, from `linux/pkt_cls.h`.
pub(crate) const OK: u32 = 0;
pub(crate) const SHOT: u32 = 2;
pub(crate) const REDIRECT: u32 = 7;

/// Hooks.
pub(crate) const FROM_CONTAINER: &str = "from_container";
pub(crate) const TO_CONTAINER: &str = "to_container";
pub(crate) const DELIVER: &str = "deliver";
pub(crate) const PROGRAMS: [&str; 3] = [FROM_CONTAINER, TO_CONTAINER, DELIVER];

/// The gateway that both endpoints see.
pub(crate) const GATEWAY4: Ipv4Addr = Ipv4Addr::new(10, 200, 0, 1);
pub(crate) const GATEWAY6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x77, 0, 0, 0, 0, 0, 1);
/// An address that is nobody's here.
pub(crate) const ELSEWHERE4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 7);
pub(crate) const ELSEWHERE6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 7);

/// Who an endpoint is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Who {
    pub(crate) id: u32,
    pub(crate) epoch: u64,
    pub(crate) identity: u32,
    pub(crate) ifindex: u32,
    pub(crate) mac: Mac,
    pub(crate) host_mac: Mac,
    pub(crate) v4: Ipv4Addr,
    pub(crate) v6: Ipv6Addr,
}

pub(crate) const A: Who = Who {
    id: 1,
    epoch: 101,
    identity: 1001,
    ifindex: 11,
    mac: [0x02, 0xaa, 0, 0, 0, 0x0a],
    host_mac: [0x02, 0xaa, 0, 0, 0, 0x01],
    v4: Ipv4Addr::new(10, 200, 0, 10),
    v6: Ipv6Addr::new(0xfd00, 0x77, 0, 0, 0, 0, 0, 0x10),
};
pub(crate) const B: Who = Who {
    id: 2,
    epoch: 102,
    identity: 1002,
    ifindex: 12,
    mac: [0x02, 0xbb, 0, 0, 0, 0x0b],
    host_mac: [0x02, 0xbb, 0, 0, 0, 0x01],
    v4: Ipv4Addr::new(10, 200, 0, 11),
    v6: Ipv6Addr::new(0xfd00, 0x77, 0, 0, 0, 0, 0, 0x11),
};

impl Who {
    /// The row of `CONFIG` of a live endpoint.
    pub(crate) fn config(&self) -> EndpointConfig {
        EndpointConfig {
            epoch: self.epoch,
            ifindex: self.ifindex,
            flags: FLAG_LIVE,
            identity: self.identity,
            ipv4: self.v4.octets(),
            gateway4: GATEWAY4.octets(),
            _pad: [0; 4],
            ipv6: self.v6.octets(),
            gateway6: GATEWAY6.octets(),
        }
    }
}

/// What a run left behind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) action: u32,
    pub(crate) packet: Vec<u8>,
}

/// Rows of `METRICS`, summed over CPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Counters(Vec<Counter>);

/// One row that changed: direction, reason, packets, bytes.
pub(crate) type Change = (Direction, DropReason, u64, u64);

impl Counters {
    /// Every row that differs from `before`.
    pub(crate) fn since(&self, before: &Self) -> Result<Vec<Change>> {
        let mut changes = Vec::new();
        for (index, (now, then)) in self.0.iter().zip(&before.0).enumerate() {
            if now != then {
                let index = u32::try_from(index)?;
                let direction = Direction::from_u32(index / REASONS).context("a direction")?;
                let reason =
                    DropReason::from_u32(index % REASONS).with_context(|| format!("row {index} has no reason"))?;
                changes.push((direction, reason, now.packets - then.packets, now.bytes - then.bytes));
            }
        }
        Ok(changes)
    }

    /// Packets of one direction that have a verdict.
    pub(crate) fn verdicts(&self, direction: Direction) -> u64 {
        DropReason::ALL
            .iter()
            .filter(|reason| reason.is_verdict())
            .filter_map(|reason| self.0.get(metrics_index(direction, *reason) as usize))
            .map(|row| row.packets)
            .sum()
    }
}

/// One endpoint's programs and maps. The maps that a node shares are this endpoint's own here.
pub(crate) struct Endpoint {
    pub(crate) who: Who,
    ebpf: Ebpf,
    pub(crate) node: Ebpf,
}

/// Where the build leaves the objects.
pub(crate) fn object(name: &str) -> Result<Vec<u8>> {
    let path = bpf_dir().join(name);
    std::fs::read(&path).with_context(|| format!("read {}; `cargo xtask build` makes it", path.display()))
}

/// Maps of the node that endpoint programs use too.
const OF_BOTH_OBJECTS: [&str; 9] = [
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

/// Loads the node's programs over the maps of an object of an endpoint's, and puts them into their slots.
pub(crate) fn load_node(ebpf: &mut Ebpf) -> Result<Ebpf> {
    let pins = scratch::fresh_dir("packets")?.join("bpf");
    scratch::mount_bpffs(&pins)?;
    let mut loader = EbpfLoader::new();
    for name in OF_BOTH_OBJECTS {
        ebpf.map(name).context(name)?.pin(pins.join(name)).with_context(|| format!("pin {name}"))?;
        loader.map_pin_path(name, pins.join(name));
    }
    let mut node = loader.load(&object("node.o")?).context("load node.o")?;
    let slots = ebpf.map_mut(map::NODE_CALLS).context(map::NODE_CALLS)?;
    let mut slots: ProgramArray<&mut MapData> = slots.try_into()?;
    for call in NodeCall::ALL {
        let name = call.program();
        let program: &mut SchedClassifier = node.program_mut(name).context(name)?.try_into()?;
        program.load().with_context(|| format!("verify {name}"))?;
        slots.set(*call as u32, program.fd()?, 0).with_context(|| format!("set the slot of {name}"))?;
    }
    Ok(node)
}

/// Puts an object's `deliver` into its own slot.
pub(crate) fn fill_slot(ebpf: &mut Ebpf, id: u32) -> Result<()> {
    let deliver: &SchedClassifier = ebpf.program(DELIVER).context(DELIVER)?.try_into()?;
    let deliver = deliver.fd()?.try_clone()?;
    let mut slots: ProgramArray<&mut MapData> = ebpf.map_mut(map::CALLS).context(map::CALLS)?.try_into()?;
    slots.set(id, &deliver, 0).context("set CALLS")
}

impl Endpoint {
    /// Loads the shipped object.
    pub(crate) fn load(who: Who) -> Result<Self> {
        Self::load_with(who, |_| {})
    }

    /// Loads the shipped object with other settings of the loader.
    pub(crate) fn load_with(who: Who, settings: impl FnOnce(&mut EbpfLoader<'_>)) -> Result<Self> {
        let consts = EndpointConsts {
            abi_version: ABI_VERSION,
            endpoint_id: who.id,
            container_mac: who.mac,
            host_mac: who.host_mac,
            debug: 0,
        };
        let mut loader = EbpfLoader::new();
        loader.override_global("CONSTS", &consts, true);
        settings(&mut loader);
        let mut ebpf = loader.load(&object("endpoint.o")?).context("load endpoint.o; this test needs root")?;
        for name in PROGRAMS {
            let program: &mut SchedClassifier = ebpf.program_mut(name).context(name)?.try_into()?;
            program.load().with_context(|| format!("verify {name}"))?;
        }
        let node = load_node(&mut ebpf)?;
        let mut endpoint = Self { who, ebpf, node };
        endpoint.configure(who.config())?;
        endpoint.reaches_itself()?;
        Ok(endpoint)
    }

    pub(crate) fn program(&self, name: &str) -> Result<&SchedClassifier> {
        Ok(self.ebpf.program(name).with_context(|| format!("program {name}"))?.try_into()?)
    }

    pub(crate) fn program_mut(&mut self, name: &str) -> Result<&mut SchedClassifier> {
        Ok(self.ebpf.program_mut(name).with_context(|| format!("program {name}"))?.try_into()?)
    }

    fn map_mut(&mut self, name: &str) -> Result<&mut aya::maps::Map> {
        self.ebpf.map_mut(name).with_context(|| format!("map {name}"))
    }

    pub(crate) fn map(&self, name: &str) -> Result<&aya::maps::Map> {
        self.ebpf.map(name).with_context(|| format!("map {name}"))
    }

    pub(crate) fn configure(&mut self, config: EndpointConfig) -> Result<()> {
        let mut rows: Array<&mut MapData, EndpointConfig> = self.map_mut(map::CONFIG)?.try_into()?;
        rows.set(0, config, 0).context("set CONFIG")
    }

    /// Switches `FLAG_*` bits beside `FLAG_LIVE` on.
    pub(crate) fn trace(&mut self) -> Result<()> {
        self.configure(EndpointConfig { flags: FLAG_LIVE | FLAG_TRACE, ..self.who.config() })
    }

    /// Sets the bucket of a direction.
    pub(crate) fn limit(&mut self, direction: Direction, bucket: Bucket) -> Result<()> {
        let mut rows: Array<&mut MapData, Bucket> = self.map_mut(map::BANDWIDTH)?.try_into()?;
        rows.set(direction as u32, bucket, 0).context("set BANDWIDTH")
    }

    /// Makes `other` a local endpoint in this one's eyes, without a program yet.
    pub(crate) fn knows(&mut self, other: &Who) -> Result<()> {
        let row = EndpointRow {
            epoch: other.epoch,
            direct: other.id,
            ifindex: other.ifindex,
            identity: other.identity,
            mac: other.mac,
            endpoint_id: u16::try_from(other.id)?,
            _pad: [0; 4],
        };
        let mut rows: HashMap<&mut MapData, EndpointKey, EndpointRow> = self.map_mut(map::ENDPOINTS)?.try_into()?;
        for key in [EndpointKey::v4(other.v4.octets()), EndpointKey::v6(other.v6.octets())] {
            rows.insert(key, row, 0).context("set ENDPOINTS")?;
        }
        Ok(())
    }

    /// Puts `other`'s `deliver` into its slot.
    pub(crate) fn reaches(&mut self, other: &Self) -> Result<()> {
        let deliver = other.program(DELIVER)?.fd()?.try_clone()?;
        let mut slots: ProgramArray<&mut MapData> = self.map_mut(map::CALLS)?.try_into()?;
        slots.set(other.who.id, &deliver, 0).context("set CALLS")
    }

    /// Puts its own `deliver` into its own slot, as the agent does for every endpoint.
    fn reaches_itself(&mut self) -> Result<()> {
        fill_slot(&mut self.ebpf, self.who.id)
    }

    /// Empties its own slot.
    pub(crate) fn is_unreachable(&mut self) -> Result<()> {
        let id = self.who.id;
        let mut slots: ProgramArray<&mut MapData> = self.map_mut(map::CALLS)?.try_into()?;
        slots.clear_index(&id).context("clear CALLS")
    }

    /// Puts a program of the node's into a slot.
    pub(crate) fn set_node_call(&mut self, call: NodeCall, program: &str) -> Result<()> {
        let program: &SchedClassifier = self.node.program(program).context("a program of the node's")?.try_into()?;
        let program = program.fd()?.try_clone()?;
        let mut slots: ProgramArray<&mut MapData> = self.map_mut(map::NODE_CALLS)?.try_into()?;
        slots.set(call as u32, &program, 0).context("set NODE_CALLS")
    }

    /// Empties a slot of the node's programs.
    pub(crate) fn clear_node_call(&mut self, call: NodeCall) -> Result<()> {
        let mut slots: ProgramArray<&mut MapData> = self.map_mut(map::NODE_CALLS)?.try_into()?;
        slots.clear_index(&(call as u32)).context("clear NODE_CALLS")
    }

    /// The endpoint's budget of events.
    pub(crate) fn budget(&self) -> Result<EventBudget> {
        let rows: Array<&MapData, EventBudget> = self.map(map::EVENT_BUDGET)?.try_into()?;
        rows.get(&0, 0).context("read EVENT_BUDGET")
    }

    pub(crate) fn counters(&self) -> Result<Counters> {
        let rows: PerCpuArray<&MapData, Counter> = self.map(map::METRICS)?.try_into()?;
        (0..map::METRICS_MAX)
            .map(|index| {
                Ok(rows.get(&index, 0)?.iter().fold(Counter::default(), |sum, one| Counter {
                    packets: sum.packets + one.packets,
                    bytes: sum.bytes + one.bytes,
                }))
            })
            .collect::<Result<_>>()
            .map(Counters)
    }

    /// Takes all events off the ring.
    pub(crate) fn events(&mut self) -> Result<Vec<Event>> {
        let mut ring: RingBuf<&mut MapData> = self.map_mut(map::EVENTS)?.try_into()?;
        let mut events = Vec::new();
        while let Some(record) = ring.next() {
            events
                .push(Event::read_from_bytes(&record).map_err(|e| anyhow::anyhow!("a record that is no event: {e}"))?);
        }
        Ok(events)
    }

    /// Runs a program once on a packet.
    pub(crate) fn run(&self, program: &str, packet: &[u8]) -> Result<Outcome> {
        self.run_times(program, packet, 1)
    }

    /// Runs a program on the same packet over and over.
    pub(crate) fn run_times(&self, program: &str, packet: &[u8], times: u32) -> Result<Outcome> {
        on_link(self.program(program)?, packet, times)
            .with_context(|| format!("run {program} on {} bytes", packet.len()))
    }

    /// Runs a program once on a packet with this mark that the interface `came_by` brought to the node; zero for none.
    /// Returns the verdict, and the mark after it.
    pub(crate) fn run_marked(&self, program: &str, packet: &[u8], mark: u32, came_by: u32) -> Result<(u32, u32)> {
        /// Place of `ingress_ifindex` in `struct __sk_buff` (linux/bpf.h).
        const CAME_BY: usize = 36;
        /// More than the kernel writes of it: it refuses less room than that.
        const CONTEXT_ROOM: usize = 1_024;
        let context = with(on_interface(link()?).to_vec(), MARK_OFFSET, &mark.to_ne_bytes());
        let context = with(context, CAME_BY, &came_by.to_ne_bytes());
        let (mut left, mut out) = (vec![0; CONTEXT_ROOM], vec![0; packet.len() + 256]);
        let result = self.program(program)?.test_run(TestRunOptions {
            data_in: Some(packet),
            data_out: Some(&mut out),
            ctx_in: Some(&context),
            ctx_out: Some(&mut left),
            ..TestRunOptions::default()
        })?;
        let mark = left.get(MARK_OFFSET..).and_then(<[u8]>::first_chunk).context("a mark")?;
        Ok((result.return_value, u32::from_ne_bytes(*mark)))
    }
}

/// Runs a program on a packet of a link's, over and over.
pub(crate) fn on_link(program: &SchedClassifier, packet: &[u8], times: u32) -> Result<Outcome> {
    run_with(program, packet, &on_interface(link()?), times)
}

/// Runs a program on a packet with this context, over and over.
pub(crate) fn run_with(program: &SchedClassifier, packet: &[u8], context: &[u8], times: u32) -> Result<Outcome> {
    let mut out = vec![0; packet.len() + 256];
    let result = program.test_run(TestRunOptions {
        data_in: Some(packet),
        data_out: Some(&mut out),
        ctx_in: Some(context),
        repeat: times,
        ..TestRunOptions::default()
    })?;
    out.truncate(usize::try_from(result.data_size_out)?);
    Ok(Outcome { action: result.return_value, packet: out })
}

/// Index of an interface that packets of test runs are on. The first call of a thread makes it, in a network namespace
/// of its own, which the thread then stays in.
pub(crate) fn link() -> Result<u32> {
    thread_local!(static LINK: OnceCell<u32> = const { OnceCell::new() });
    LINK.with(|link| {
        if let Some(ifindex) = link.get() {
            return Ok(*ifindex);
        }
        let space = Space::create()?;
        ip(&space, "link add wh0 type veth peer name eth0")?;
        setns(&space, CloneFlags::CLONE_NEWNET).context("enter the network namespace")?;
        let ifindex = if_nametoindex("wh0").context("find wh0")?;
        Ok(*link.get_or_init(|| ifindex))
    })
}

/// A and B, each local to the other, with programs in all slots.
pub(crate) fn pair() -> Result<(Endpoint, Endpoint)> {
    let (mut a, mut b) = (Endpoint::load(A)?, Endpoint::load(B)?);
    for who in [A, B] {
        a.knows(&who)?;
        b.knows(&who)?;
    }
    a.reaches(&b)?;
    b.reaches(&a)?;
    Ok((a, b))
}

/// A packet, the hook of A that it meets, and what must come of it.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) program: &'static str,
    pub(crate) packet: Vec<u8>,
    pub(crate) action: u32,
    /// All that A counts, one packet of the input's length each.
    pub(crate) at_a: Vec<(Direction, DropReason)>,
    /// All that B counts.
    pub(crate) at_b: Vec<(Direction, DropReason)>,
    /// What leaves; `None`: the packet as it came.
    pub(crate) output: Option<Vec<u8>>,
}

impl Case {
    /// One that A's program drops.
    pub(crate) fn drop(name: &'static str, program: &'static str, packet: Vec<u8>, reason: DropReason) -> Self {
        let direction = if program == FROM_CONTAINER { Direction::Egress } else { Direction::Ingress };
        Self { name, program, packet, action: SHOT, at_a: vec![(direction, reason)], at_b: Vec::new(), output: None }
    }

    /// Runs it.
    pub(crate) fn check(&self, a: &Endpoint, b: &Endpoint) -> Result<()> {
        let (before_a, before_b) = (a.counters()?, b.counters()?);
        let outcome = a.run(self.program, &self.packet).context(self.name)?;
        let bytes = u64::try_from(self.packet.len())?;
        for (endpoint, before, expected) in [(a, before_a, &self.at_a), (b, before_b, &self.at_b)] {
            let mut expected: Vec<Change> = expected.iter().map(|(d, r)| (*d, *r, 1, bytes)).collect();
            expected.sort();
            let seen = endpoint.counters()?.since(&before)?;
            ensure!(seen == expected, "{}: endpoint {} counted {seen:?}, not {expected:?}", self.name, endpoint.who.id);
        }
        ensure!(outcome.action == self.action, "{}: verdict {}, not {}", self.name, outcome.action, self.action);
        let output = self.output.as_ref().unwrap_or(&self.packet);
        ensure!(&outcome.packet == output, "{}: left as\n{:02x?}, not\n{output:02x?}", self.name, outcome.packet);
        Ok(())
    }
}

/// Checks all cases on a fresh pair and reports every one that fails.
pub(crate) fn check_all(cases: impl IntoIterator<Item = Case>) -> Result<()> {
    let (a, b) = pair()?;
    let mut failures = Vec::new();
    let mut checked = 0;
    for case in cases {
        checked += 1;
        if let Err(error) = case.check(&a, &b) {
            failures.push(format!("{error:#}"));
        }
    }
    ensure!(checked > 0, "no cases");
    ensure!(failures.is_empty(), "{} of {checked} cases failed:\n{}", failures.len(), failures.join("\n"));
    Ok(())
}

/// A field of a packet set to other bytes.
pub(crate) fn with(mut packet: Vec<u8>, offset: usize, bytes: &[u8]) -> Vec<u8> {
    let end = offset + bytes.len();
    assert!(end <= packet.len(), "a field at {offset} of a packet of {} bytes", packet.len());
    packet.splice(offset..end, bytes.iter().copied());
    packet
}

/// UDP from one address to another, TTL 64, in a frame from A to its gateway.
pub(crate) fn udp(from: impl Into<IpAddr>, to: impl Into<IpAddr>) -> Vec<u8> {
    use wharf_tests::frame;
    let (from, to) = (from.into(), to.into());
    let datagram = frame::udp(from, to, (4000, 53), b"wharf packet test payload");
    let ethertype = if from.is_ipv4() { frame::IPV4 } else { frame::IPV6 };
    frame::ethernet(A.host_mac, A.mac, ethertype, &frame::ip(from, to, 17, &datagram))
}
