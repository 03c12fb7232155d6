//! What one packet costs in the endpoint's own programs, by `BPF_PROG_TEST_RUN` on the programs as the agent pinned
//! them.

use std::{fs, net::IpAddr};

use anyhow::{Context, Result, ensure};
use aya::{
    Ebpf, EbpfLoader,
    maps::{Array, Map, MapData, ProgramArray},
    programs::{SchedClassifier, TestRun, TestRunOptions},
};
use nix::time::{ClockId, clock_gettime};
use wharf_api::Endpoint;
use wharf_common::{ABI_VERSION, EndpointConfig, EndpointConsts, map};

use super::findings::{Better, Group, Mark, Part};
use crate::{
    Node, NodeConfig,
    frame::{self, Mac},
    programs::on_interface,
};

/// Verdicts of `linux/pkt_cls.h`.
pub(super) const OK: u32 = 0;
pub(super) const REDIRECT: u32 = 7;
/// Runs of one sample.
pub(super) const REPEAT: u32 = 1_000_000;
/// Hops that a packet can lose: runs of one call when each run takes one.
pub(super) const HOPS: u32 = 250;

/// Of a flow's packets, and of the answers to them.
const PORTS: (u16, u16) = (4000, 4001);
const ANSWER: (u16, u16) = (4001, 4000);

/// Nanoseconds a packet of a kept flow.
///
/// # Errors
/// When a program does not decide as it should, so that something else would be measured.
pub fn measure(agent: &NodeConfig, rounds: usize, quick: bool) -> Result<Part> {
    let mut node = Node::start(agent.clone())?;
    let (left, right) = (node.sandbox("left")?, node.sandbox("right")?);
    let attached = [node.attach(&left)?, node.attach(&right)?];
    let (a, b) = (node.endpoint(&attached[0])?, node.endpoint(&attached[1])?);
    // Where the endpoints' links are: test runs take place on them, so that the programs count as they do for traffic.
    let group = node.space().run(|| on_endpoints(&node, &a, &b, rounds, quick))??;
    let verified = verification(&node, &a, rounds)?;
    attached.iter().try_for_each(|one| node.detach(one))?;
    node.finish()?;
    let marks = [("from_container and deliver", 50.0), ("from_container, to the node", 45.0), ("to_container", 40.0)];
    let marks = marks.map(|(name, limit)| {
        let worst = group.median(&format!("{name}, IPv4"))?.max(group.median(&format!("{name}, IPv6"))?);
        Ok(Mark::judge(&format!("a packet in {name}"), "ns", Better::Lower, worst, limit))
    });
    let mut marks = marks.into_iter().collect::<Result<Vec<_>>>()?;
    marks.push(Mark::judge(VERIFICATION, "ms", Better::Lower, verified.median("all programs")?, 0.5));
    Ok((vec![group, verified], marks))
}

const VERIFICATION: &str = "verification of one endpoint's programs";

/// Processor time of this thread, which the kernel spends on verification and translation.
fn verification(node: &Node, of: &Endpoint, rounds: usize) -> Result<Group> {
    let mut group = Group::new(VERIFICATION, "ms", Better::Lower);
    let (container_mac, host_mac) = macs(of)?;
    let round = || -> Result<f64> {
        let mut loaded = load(node, u32::from(of.id), container_mac, host_mac)?;
        let before = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?;
        for (name, program) in loaded.programs_mut() {
            let program: &mut SchedClassifier = program.try_into()?;
            program.load().with_context(|| format!("verify {name}"))?;
        }
        let after = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?;
        Ok(std::time::Duration::from(after - before).as_secs_f64() * 1e3)
    };
    group.add("all programs", (0..rounds).map(|_| round()).collect::<Result<_>>()?)?;
    Ok(group)
}

/// The endpoint's object with the node's maps.
fn load(node: &Node, endpoint_id: u32, container_mac: Mac, host_mac: Mac) -> Result<Ebpf> {
    let consts = EndpointConsts { abi_version: ABI_VERSION, endpoint_id, container_mac, host_mac, debug: 0 };
    let mut loader = EbpfLoader::new();
    loader.override_global("CONSTS", &consts, true);
    let shared = node.dirs().endpoint_pins().parent().context("no pins")?.join("shared");
    for name in [map::ENDPOINTS, map::CALLS, map::NODE_CALLS, map::PROFILES] {
        loader.map_pin_path(name, shared.join(name));
    }
    loader.load(&object("endpoint.o")?).context("load endpoint.o")
}

fn on_endpoints(node: &Node, a: &Endpoint, b: &Endpoint, rounds: usize, quick: bool) -> Result<Group> {
    let repeat = if quick { REPEAT / 20 } else { REPEAT };
    let calls = if quick { 20 } else { 400 };
    let mut group = Group::new("one packet in the programs", "ns", Better::Lower);
    let packets = Packets::between(a, b)?;
    // Both ends of each flow send once, so that it is kept.
    for v6 in [false, true] {
        for (endpoint, program, packet, verdict) in [
            (a, "from_container", packets.to_node(v6)?, OK),
            (a, "to_container", packets.sent_by_node(v6)?, OK),
            (a, "from_container", packets.to_endpoint(v6)?, REDIRECT),
            (b, "from_container", packets.answer(v6)?, REDIRECT),
        ] {
            run(&pinned(node, endpoint, program)?, &packet, link_of(endpoint)?, 1, verdict)?;
        }
    }
    for (name, endpoint, program, packet, verdict) in [
        ("from_container, to the node, IPv4", a, "from_container", packets.to_node(false)?, OK),
        ("from_container, to the node, IPv6", a, "from_container", packets.to_node(true)?, OK),
        ("deliver, IPv4", b, "deliver", packets.delivered(false)?, REDIRECT),
        ("deliver, IPv6", b, "deliver", packets.delivered(true)?, REDIRECT),
        ("to_container, IPv4", a, "to_container", packets.sent_by_node(false)?, OK),
        ("to_container, IPv6", a, "to_container", packets.sent_by_node(true)?, OK),
    ] {
        let program = pinned(node, endpoint, program)?;
        let link = link_of(endpoint)?;
        let samples = (0..rounds).map(|_| run(&program, &packet, link, repeat, verdict)).collect::<Result<_>>();
        group.add(name, samples.with_context(|| name.to_owned())?)?;
    }
    let mirror = Mirror::of(node, a, b)?;
    let (program, link) = (pinned(node, a, "from_container")?, link_of(a)?);
    for (name, v6) in [("from_container and deliver, IPv4", false), ("from_container and deliver, IPv6", true)] {
        let packet = packets.to_endpoint(v6)?;
        let round = || -> Result<f64> {
            let all = (0..calls).map(|_| run(&program, &packet, link, HOPS, REDIRECT)).collect::<Result<Vec<_>>>()?;
            Ok(super::stats::Summary::of(&all).context("no runs")?.median)
        };
        let samples = (0..rounds).map(|_| round()).collect::<Result<_>>();
        group.add(name, samples.with_context(|| name.to_owned())?)?;
    }
    mirror.remove()?;
    group.note("the kernel's fixed cost of a test run, about 19 ns, is in every number");
    group.note(format!(
        "{repeat} runs a sample on the pinned programs; where a run changes the packet, runs of {HOPS} on a packet that \
         has as many hops to lose"
    ));
    Ok(group)
}

pub(super) fn pinned(node: &Node, endpoint: &Endpoint, name: &str) -> Result<SchedClassifier> {
    let path = node.dirs().endpoint_pins().join(endpoint.id.to_string()).join(name);
    SchedClassifier::from_pin(&path).with_context(|| format!("open {}", path.display()))
}

/// Index of the host side of an endpoint's link, in this thread's namespace.
pub(super) fn link_of(endpoint: &Endpoint) -> Result<u32> {
    let name = endpoint.host_ifname.as_str();
    nix::net::if_::if_nametoindex(name).with_context(|| format!("find {name}"))
}

/// Runs a program on a packet of a link's; nanoseconds a run.
pub(super) fn run(program: &SchedClassifier, packet: &[u8], ifindex: u32, repeat: u32, verdict: u32) -> Result<f64> {
    let context = on_interface(ifindex);
    let options = TestRunOptions { data_in: Some(packet), ctx_in: Some(&context), repeat, ..TestRunOptions::default() };
    let result = program.test_run(options).context("BPF_PROG_TEST_RUN")?;
    ensure!(result.return_value == verdict, "the verdict is {}, not {verdict}", result.return_value);
    Ok(result.duration.as_secs_f64() * 1e9)
}

/// Frames as they look where the programs meet them.
struct Packets {
    a: (Mac, Mac),
    b: (Mac, Mac),
    a_addresses: [IpAddr; 2],
    b_addresses: [IpAddr; 2],
    gateways: [IpAddr; 2],
}

impl Packets {
    fn between(a: &Endpoint, b: &Endpoint) -> Result<Self> {
        let addresses = |e: &Endpoint| -> Result<[IpAddr; 2]> {
            Ok([e.ipv4.context("no IPv4 address")?.into(), e.ipv6.context("no IPv6 address")?.into()])
        };
        Ok(Self {
            a: macs(a)?,
            b: macs(b)?,
            a_addresses: addresses(a)?,
            b_addresses: addresses(b)?,
            gateways: [a.gateway4.context("no gateway")?.into(), a.gateway6.context("no gateway")?.into()],
        })
    }

    /// From A's container to the node.
    fn to_node(&self, v6: bool) -> Result<Vec<u8>> {
        let (container, host) = self.a;
        frame(host, container, pick(self.a_addresses, v6), pick(self.gateways, v6), PORTS)
    }

    /// From A's container to B, with all the hops there can be.
    fn to_endpoint(&self, v6: bool) -> Result<Vec<u8>> {
        let (container, host) = self.a;
        let mut frame = frame(host, container, pick(self.a_addresses, v6), pick(self.b_addresses, v6), PORTS)?;
        // The programs do not look at the IPv4 header's checksum, they only keep it as true as it was.
        *frame.get_mut(if v6 { 21 } else { 22 }).context("a hop count")? = 255;
        Ok(frame)
    }

    /// From A, at B's `deliver`.
    fn delivered(&self, v6: bool) -> Result<Vec<u8>> {
        let (container, host) = self.a;
        frame(host, container, pick(self.a_addresses, v6), pick(self.b_addresses, v6), PORTS)
    }

    /// From B's container, the answer to [`Self::to_endpoint`].
    fn answer(&self, v6: bool) -> Result<Vec<u8>> {
        let (container, host) = self.b;
        frame(host, container, pick(self.b_addresses, v6), pick(self.a_addresses, v6), ANSWER)
    }

    /// From the node, at A's `to_container`: the answer to [`Self::to_node`].
    fn sent_by_node(&self, v6: bool) -> Result<Vec<u8>> {
        let (container, host) = self.a;
        frame(container, host, pick(self.gateways, v6), pick(self.a_addresses, v6), ANSWER)
    }
}

fn pick([v4, v6]: [IpAddr; 2], is_v6: bool) -> IpAddr {
    if is_v6 { v6 } else { v4 }
}

/// UDP with 32 bytes.
fn frame(to: Mac, from: Mac, source: IpAddr, destination: IpAddr, ports: (u16, u16)) -> Result<Vec<u8>> {
    ensure!(source.is_ipv4() == destination.is_ipv4(), "addresses of two families");
    let datagram = frame::udp(source, destination, ports, &[0; 32]);
    let ethertype = if source.is_ipv4() { frame::IPV4 } else { frame::IPV6 };
    Ok(frame::ethernet(to, from, ethertype, &frame::ip(source, destination, 17, &datagram)))
}

pub(super) fn macs(endpoint: &Endpoint) -> Result<(Mac, Mac)> {
    Ok((mac(&endpoint.container_mac)?, mac(&endpoint.host_mac)?))
}

fn mac(text: &str) -> Result<Mac> {
    let octets: Vec<u8> = text
        .split(':')
        .map(|o| u8::from_str_radix(o, 16))
        .collect::<Result<_, _>>()
        .with_context(|| text.to_owned())?;
    octets.try_into().map_err(|_| anyhow::anyhow!("{text} is not a MAC address"))
}

/// A stand-in for B's `deliver`, the same program but for its constants: it gives a packet of A's the Ethernet
/// addresses it came with. So A's `from_container`, run again on the packet that it has just sent, finds it as it was
/// but for the hop that it lost.
pub(super) struct Mirror {
    calls: ProgramArray<MapData>,
    slot: u32,
    own: SchedClassifier,
    _loaded: Ebpf,
}

impl Mirror {
    pub(super) fn of(node: &Node, a: &Endpoint, b: &Endpoint) -> Result<Self> {
        let (container, host) = macs(a)?;
        let pins = node.dirs().endpoint_pins();
        let shared = pins.parent().context("no pins")?.join("shared");
        let mut loaded = load(node, b.id.into(), host, container)?;
        let deliver: &mut SchedClassifier = loaded.program_mut("deliver").context("deliver")?.try_into()?;
        deliver.load().context("verify deliver")?;
        let mirror = deliver.fd().context("deliver's descriptor")?.try_clone().context("copy a descriptor")?;

        let theirs = MapData::from_pin(pins.join(b.id.to_string()).join(map::CONFIG)).context("open CONFIG")?;
        let theirs: Array<MapData, EndpointConfig> = Map::Array(theirs).try_into().context("read CONFIG")?;
        let row = theirs.get(&0, 0).context("read CONFIG")?;
        let mut own: Array<&mut MapData, EndpointConfig> =
            loaded.map_mut(map::CONFIG).context("map CONFIG")?.try_into().context("write CONFIG")?;
        own.set(0, row, 0).context("write CONFIG")?;

        let calls = shared.join(map::CALLS);
        let calls = MapData::from_pin(&calls).with_context(|| format!("open {}", calls.display()))?;
        let mut calls: ProgramArray<MapData> = Map::ProgramArray(calls).try_into().context("open CALLS")?;
        let slot = b.id.into();
        calls.set(slot, &mirror, 0).context("set CALLS")?;
        Ok(Self { calls, slot, own: pinned(node, b, "deliver")?, _loaded: loaded })
    }

    /// Puts B's own program back.
    pub(super) fn remove(mut self) -> Result<()> {
        let own = self.own.fd().context("deliver's descriptor")?;
        self.calls.set(self.slot, own, 0).context("set CALLS")
    }
}

/// An object of the BPF programs, where the build leaves it.
pub(super) fn object(name: &str) -> Result<Vec<u8>> {
    let dir = crate::process::bpf_dir();
    let path = dir.join(name);
    fs::read(&path).with_context(|| format!("read {}; `cargo xtask build` makes it", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mac_address_is_six_octets() {
        assert_eq!(mac("02:00:00:aa:bb:0c").unwrap(), [2, 0, 0, 0xaa, 0xbb, 0x0c]);
        assert!(mac("02:00:00:aa:bb").is_err());
        assert!(mac("02:00:00:aa:bb:zz").is_err());
    }
}
