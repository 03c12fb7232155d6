//! Self-check with test packets. New datapath rules need cases in [`cases`].

mod packet;

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;

use crate::{
    endpoint::EndpointRecord,
    ids::{EndpointId, MacAddr},
    kernel::ConfigSpec,
    nat::Protocol,
};

const TTL: u8 = 64;
/// Peer without a gateway: documentation addresses (RFC 5737, RFC 3849).
const NOBODY4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const NOBODY6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);

/// The tested program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Hook {
    FromContainer,
    /// From the node's stack to the container.
    ToContainer,
}

impl Hook {
    /// Of the program and its pin.
    #[must_use]
    pub const fn program(self) -> &'static str {
        match self {
            Self::FromContainer => "from_container",
            Self::ToContainer => "to_container",
        }
    }
}

/// A program's verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// To or from the node's stack.
    Pass,
    Drop,
    /// Redirect to another interface.
    Redirect,
    /// Not used by this datapath.
    Other(u32),
}

impl Verdict {
    /// From a return value (`TC_ACT_*` in linux/pkt_cls.h).
    #[must_use]
    pub const fn from_action(action: u32) -> Self {
        match action {
            0 => Self::Pass,
            2 => Self::Drop,
            7 => Self::Redirect,
            other => Self::Other(other),
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pass => f.write_str("pass"),
            Self::Drop => f.write_str("drop"),
            Self::Redirect => f.write_str("redirect"),
            Self::Other(action) => write!(f, "action {action}"),
        }
    }
}

/// Subject of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// To the gateway.
    Honest,
    /// With a foreign IP source.
    FalseIp,
    /// From a host in a source prefix.
    Source(IpNet),
    /// From an address next to a source prefix.
    BesideSource(IpNet),
    /// With a foreign Ethernet source.
    FalseMac,
    /// The container resolves its gateway, or a neighbour.
    Neighbour,
    /// A chained endpoint advertises a foreign address.
    FalseNeighbour,
    /// From the node to the container.
    FromNode,
    /// The shared table leads to the container's `deliver`.
    ToItself,
    /// To another local endpoint.
    ToPeer,
    /// A policy decision.
    Policy {
        /// Egress, else ingress.
        egress: bool,
        /// The rules accept the packet.
        accept: bool,
    },
}

impl Kind {
    const fn name(self) -> &'static str {
        match self {
            Self::Honest => "to-gateway",
            Self::FalseIp => "false-source-ip",
            Self::Source(_) => "source",
            Self::BesideSource(_) => "beside-source",
            Self::FalseMac => "false-source-mac",
            Self::Neighbour => "gateway-resolution",
            Self::FalseNeighbour => "false-neighbour",
            Self::FromNode => "from-node",
            Self::ToItself => "to-itself",
            Self::ToPeer => "to-endpoint",
            Self::Policy { egress: true, accept: true } => "egress-allowed",
            Self::Policy { egress: true, accept: false } => "egress-denied",
            Self::Policy { egress: false, accept: true } => "ingress-allowed",
            Self::Policy { egress: false, accept: false } => "ingress-denied",
        }
    }
}

/// IP family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    Ipv4,
    Ipv6,
}

/// A program's report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Report {
    /// Of the program.
    pub endpoint: EndpointId,
    /// As in [`CounterRow`](crate::kernel::CounterRow).
    pub direction: &'static str,
    /// As in [`CounterRow`](crate::kernel::CounterRow).
    pub reason: &'static str,
}

/// Expected bytes of the output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Field {
    /// For display.
    pub name: &'static str,
    /// From the packet's start.
    pub offset: usize,
    /// In packet order.
    pub bytes: Vec<u8>,
}

/// A test packet and the expected result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    /// Subject.
    pub kind: Kind,
    pub family: Family,
    /// Program.
    pub hook: Hook,
    /// From the Ethernet header.
    pub packet: Vec<u8>,
    /// Expected verdict.
    pub verdict: Verdict,
    /// Egress before ingress.
    pub reports: Vec<Report>,
    /// Empty for a drop.
    pub fields: Vec<Field>,
}

/// A case's result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    pub verdict: Verdict,
    /// Output packet.
    pub packet: Vec<u8>,
    /// Egress before ingress.
    pub reports: Vec<Report>,
}

/// A case's result, or why the program did not run.
pub type CaseResult = Result<Outcome, String>;

/// Expected and actual result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Judged {
    /// Case name.
    pub name: String,
    /// Expected result.
    pub expected: String,
    /// Actual result.
    pub got: String,
    /// Both are equal.
    pub same: bool,
}

/// `peer`: another live endpoint of the node.
#[must_use]
pub fn cases(record: &EndpointRecord, config: &ConfigSpec, peer: Option<&EndpointRecord>) -> Vec<Case> {
    let maker = Maker { record };
    let mut cases = Vec::new();
    for own in record.addresses() {
        maker.of_family(own, peer, config, &mut cases);
    }
    if !config.live {
        for case in &mut cases {
            let direction = if case.hook == Hook::FromContainer { EGRESS } else { INGRESS };
            case.verdict = Verdict::Drop;
            case.reports = vec![maker.report(direction, "endpoint-not-ready")];
            case.fields.clear();
        }
    }
    cases
}

/// A packet for a policy decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Probe {
    /// Egress, else ingress.
    pub egress: bool,
    pub peer: IpAddr,
    /// Not SCTP.
    pub protocol: Protocol,
    /// Destination port.
    pub port: u16,
    /// The rules accept the packet.
    pub accept: bool,
}

#[must_use]
pub fn policy_cases(record: &EndpointRecord, config: &ConfigSpec, probes: &[Probe]) -> Vec<Case> {
    let maker = Maker { record };
    let case = |probe: &Probe| {
        let Probe { egress, peer, protocol, port, accept } = *probe;
        let own = record.addresses().find(|own| own.is_ipv4() == peer.is_ipv4()).filter(|_| config.live)?;
        let (hook, macs, from, to, direction) = match egress {
            true => (Hook::FromContainer, maker.outward(), own, peer, EGRESS),
            false => (Hook::ToContainer, (record.host_mac, record.host_mac), peer, own, INGRESS),
        };
        Some(Case {
            kind: Kind::Policy { egress, accept },
            family: if own.is_ipv4() { Family::Ipv4 } else { Family::Ipv6 },
            hook,
            packet: packet::opening(macs, from, to, TTL, protocol, port),
            verdict: if accept { Verdict::Pass } else { Verdict::Drop },
            reports: vec![maker.report(direction, if accept { "forwarded-stack" } else { "policy-denied" })],
            fields: Vec::new(),
        })
    };
    probes.iter().filter_map(case).collect()
}

const INGRESS: &str = "ingress";
const EGRESS: &str = "egress";

struct Maker<'a> {
    record: &'a EndpointRecord,
}

impl Maker<'_> {
    fn report(&self, direction: &'static str, reason: &'static str) -> Report {
        Report { endpoint: self.record.id, direction, reason }
    }

    /// From the container to the host side.
    fn outward(&self) -> (MacAddr, MacAddr) {
        (self.record.host_mac, self.record.container_mac)
    }

    /// From the host side to the container.
    fn inward(record: &EndpointRecord) -> (MacAddr, MacAddr) {
        (record.container_mac, record.host_mac)
    }

    fn of_family(&self, own: IpAddr, peer: Option<&EndpointRecord>, config: &ConfigSpec, cases: &mut Vec<Case>) {
        let record = self.record;
        let (family, gateway, nobody) = match own {
            IpAddr::V4(_) => (Family::Ipv4, record.gateway4.map(IpAddr::V4), IpAddr::V4(NOBODY4)),
            IpAddr::V6(_) => (Family::Ipv6, record.gateway6.map(IpAddr::V6), IpAddr::V6(NOBODY6)),
        };
        let far = gateway.unwrap_or(nobody);
        let case = |kind, hook, packet, verdict, reports, fields| Case {
            kind,
            family,
            hook,
            packet,
            verdict,
            reports,
            fields,
        };
        let out = Hook::FromContainer;

        let honest = packet::udp(self.outward(), own, far, TTL);
        let passed = vec![self.report(EGRESS, "forwarded-stack")];
        let unchanged = fields_of(&honest, family);
        cases.push(case(Kind::Honest, out, honest, Verdict::Pass, passed, unchanged));

        let lie = packet::udp(self.outward(), other_address(own), far, TTL);
        let dropped = vec![self.report(EGRESS, "invalid-source-ip")];
        cases.push(case(Kind::FalseIp, out, lie, Verdict::Drop, dropped, Vec::new()));

        for (prefix, host, beside) in config.sources.samples().filter(|(_, host, _)| host.is_ipv4() == own.is_ipv4()) {
            let forwarded = packet::udp(self.outward(), host, far, TTL);
            let passed = vec![self.report(EGRESS, "forwarded-stack")];
            let unchanged = fields_of(&forwarded, family);
            cases.push(case(Kind::Source(prefix), out, forwarded, Verdict::Pass, passed, unchanged));
            if let Some(beside) = beside.filter(|beside| *beside != own) {
                let lie = packet::udp(self.outward(), beside, far, TTL);
                let dropped = vec![self.report(EGRESS, "invalid-source-ip")];
                cases.push(case(Kind::BesideSource(prefix), out, lie, Verdict::Drop, dropped, Vec::new()));
            }
        }

        let lie = packet::udp((record.host_mac, other_mac(record.container_mac)), own, far, TTL);
        let dropped = vec![self.report(EGRESS, "invalid-source-mac")];
        cases.push(case(Kind::FalseMac, out, lie, Verdict::Drop, dropped, Vec::new()));

        if config.chained {
            for (kind, message, reason) in self.neighbours_of_chained(own, far) {
                let (verdict, fields) = match kind {
                    Kind::FalseNeighbour => (Verdict::Drop, Vec::new()),
                    _ => (Verdict::Pass, whole(&message)),
                };
                cases.push(case(kind, out, message, verdict, vec![self.report(EGRESS, reason)], fields));
            }
        } else if let Some((question, answer)) = self.neighbour(own, gateway) {
            let answered = vec![self.report(EGRESS, "neighbour-answered")];
            cases.push(case(Kind::Neighbour, out, question, Verdict::Redirect, answered, answer));
        }

        let arriving = packet::udp((record.host_mac, record.host_mac), far, own, TTL);
        // They already have the MACs of their link.
        let let_in = if config.chained { arriving.clone() } else { packet::udp(Self::inward(record), far, own, TTL) };
        let passed = vec![self.report(INGRESS, "forwarded-stack")];
        let fields = fields_of(&let_in, family);
        cases.push(case(Kind::FromNode, Hook::ToContainer, arriving, Verdict::Pass, passed, fields));

        let mut to_endpoint = |kind, receiver: &EndpointRecord, address| {
            let sent = packet::udp(self.outward(), own, address, TTL);
            if config.local_by_stack || config.chained || !receiver.link_owner.is_wharf() {
                let passed = vec![self.report(EGRESS, "forwarded-stack")];
                let fields = fields_of(&sent, family);
                cases.push(case(kind, out, sent, Verdict::Pass, passed, fields));
                return;
            }
            let delivered = packet::udp(Self::inward(receiver), own, address, TTL - 1);
            let received = Report { endpoint: receiver.id, direction: INGRESS, reason: "forwarded-local" };
            let reports = vec![self.report(EGRESS, "forwarded-local"), received];
            let fields = fields_of(&delivered, family);
            cases.push(case(kind, out, sent, Verdict::Redirect, reports, fields));
        };
        to_endpoint(Kind::ToItself, record, own);
        if let Some(peer) = peer
            && let Some(address) = peer.addresses().find(|a| a.is_ipv4() == own.is_ipv4())
        {
            to_endpoint(Kind::ToPeer, peer, address);
        }
    }

    /// Own request and foreign advertisement.
    fn neighbours_of_chained(&self, own: IpAddr, far: IpAddr) -> Vec<(Kind, Vec<u8>, &'static str)> {
        let (mac, nobody) = (self.record.container_mac, MacAddr([0; 6]));
        let everyone = (MacAddr([0xff; 6]), mac);
        let (question, lie) = match (own, far) {
            (IpAddr::V4(own), IpAddr::V4(far)) => (
                packet::arp(everyone, 1, (mac, own), (nobody, far)),
                packet::arp(everyone, 2, (mac, far), (nobody, own)),
            ),
            (IpAddr::V6(own), IpAddr::V6(far)) => {
                (packet::solicitation(mac, own, far), packet::advertisement((self.record.host_mac, mac), far, own))
            }
            _ => return Vec::new(),
        };
        let passed = (Kind::Neighbour, question, "forwarded-stack");
        vec![passed, (Kind::FalseNeighbour, lie, "neighbour-spoof")]
    }

    /// Request for the gateway, and reply.
    fn neighbour(&self, own: IpAddr, gateway: Option<IpAddr>) -> Option<(Vec<u8>, Vec<Field>)> {
        let (record, (to, from)) = (self.record, Self::inward(self.record));
        match (own, gateway?) {
            (IpAddr::V4(own), IpAddr::V4(gateway)) => {
                let everyone = (MacAddr([0xff; 6]), record.container_mac);
                let nobody = MacAddr([0; 6]);
                let question = packet::arp(everyone, 1, (record.container_mac, own), (nobody, gateway));
                let answer = packet::arp((to, from), 2, (record.host_mac, gateway), (record.container_mac, own));
                Some((question, fields(&answer, &ARP_FIELDS)))
            }
            (IpAddr::V6(own), IpAddr::V6(gateway)) => {
                let question = packet::solicitation(record.container_mac, own, gateway);
                let answer = packet::advertisement((to, from), gateway, own);
                Some((question, fields(&answer, &ADVERTISEMENT_FIELDS)))
            }
            _ => None,
        }
    }
}

fn whole(packet: &[u8]) -> Vec<Field> {
    vec![Field { name: "packet", offset: 0, bytes: packet.to_vec() }]
}

/// Names and end offsets of consecutive fields.
type Layout = [(&'static str, usize)];

const IPV4_FIELDS: [(&str, usize); 5] = [
    ("Ethernet destination", 6),
    ("Ethernet source", 12),
    ("Ethernet type", 14),
    ("IPv4 header", 34),
    ("UDP header", 42),
];
const IPV6_FIELDS: [(&str, usize); 5] = [
    ("Ethernet destination", 6),
    ("Ethernet source", 12),
    ("Ethernet type", 14),
    ("IPv6 header", 54),
    ("UDP header", 62),
];
const ARP_FIELDS: [(&str, usize); 8] = [
    ("Ethernet destination", 6),
    ("Ethernet source", 12),
    ("Ethernet type", 14),
    ("ARP header", 22),
    ("ARP sender MAC", 28),
    ("ARP sender address", 32),
    ("ARP target MAC", 38),
    ("ARP target address", 42),
];
const ADVERTISEMENT_FIELDS: [(&str, usize); 8] = [
    ("Ethernet destination", 6),
    ("Ethernet source", 12),
    ("Ethernet type", 14),
    ("IPv6 header", 54),
    ("advertisement header", 62),
    ("advertised address", 78),
    ("advertisement option", 80),
    ("advertised MAC", 86),
];

fn fields(packet: &[u8], layout: &Layout) -> Vec<Field> {
    let mut start = 0;
    let mut fields = Vec::with_capacity(layout.len());
    for (name, end) in layout {
        let bytes = packet.get(start..*end).unwrap_or_default().to_vec();
        fields.push(Field { name, offset: start, bytes });
        start = *end;
    }
    fields
}

fn fields_of(packet: &[u8], family: Family) -> Vec<Field> {
    match family {
        Family::Ipv4 => fields(packet, &IPV4_FIELDS),
        Family::Ipv6 => fields(packet, &IPV6_FIELDS),
    }
}

fn other_address(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(a) => IpAddr::V4(Ipv4Addr::from_bits(a.to_bits() ^ 1)),
        IpAddr::V6(a) => IpAddr::V6(Ipv6Addr::from_bits(a.to_bits() ^ 1)),
    }
}

fn other_mac(MacAddr([a, b, c, d, e, f]): MacAddr) -> MacAddr {
    MacAddr([a, b, c, d, e, f ^ 1])
}

impl Case {
    /// Subject and family, or source prefix.
    #[must_use]
    pub fn name(&self) -> String {
        if let Kind::Source(prefix) | Kind::BesideSource(prefix) = self.kind {
            return format!("{}-{prefix}", self.kind.name());
        }
        let family = match self.family {
            Family::Ipv4 => "ipv4",
            Family::Ipv6 => "ipv6",
        };
        format!("{}-{family}", self.kind.name())
    }

    /// Compares a result with the expected one.
    #[must_use]
    pub fn judge(&self, result: &CaseResult) -> Judged {
        let expected = self.told(self.verdict, &self.reports);
        let (got, same) = match result {
            Err(why) => (format!("not run: {why}"), false),
            Ok(outcome) => self.judge_outcome(outcome),
        };
        Judged { name: self.name(), expected, got, same }
    }

    fn judge_outcome(&self, outcome: &Outcome) -> (String, bool) {
        let mut got = self.told(outcome.verdict, &outcome.reports);
        // Accepting rules do not determine the route.
        let passes = matches!(self.kind, Kind::Policy { accept: true, .. });
        let mut same = outcome.verdict == self.verdict && (passes || outcome.reports == self.reports);
        if outcome.verdict == self.verdict
            && let Some(difference) = self.difference(&outcome.packet)
        {
            same = false;
            got.push_str(&difference);
        }
        (got, same)
    }

    /// Each after `; `.
    fn difference(&self, packet: &[u8]) -> Option<String> {
        let last = self.fields.last()?;
        let length = last.offset + last.bytes.len();
        if packet.len() != length {
            return Some(format!("; {} bytes instead of {length}", packet.len()));
        }
        let mut text = String::new();
        for field in &self.fields {
            let is = packet.get(field.offset..field.offset + field.bytes.len()).unwrap_or_default();
            if is != field.bytes {
                text.push_str(&format!("; {} {} instead of {}", field.name, hex(is), hex(&field.bytes)));
            }
        }
        Some(text).filter(|t| !t.is_empty())
    }

    /// As `drop, egress invalid-source-ip`.
    fn told(&self, verdict: Verdict, reports: &[Report]) -> String {
        let mut text = verdict.to_string();
        // The first is the checked endpoint's.
        let own = self.reports.first().map(|r| r.endpoint);
        for report in reports {
            text.push_str(&format!(", {} {}", report.direction, report.reason));
            if Some(report.endpoint) != own {
                text.push_str(&format!(" at endpoint {}", report.endpoint));
            }
        }
        if reports.is_empty() {
            text.push_str(", not reported");
        }
        text
    }
}

fn hex(bytes: &[u8]) -> String {
    let parts: Vec<String> = bytes.iter().map(|b| format!("{b:02x}")).collect();
    parts.join(":")
}

#[cfg(test)]
mod tests;
