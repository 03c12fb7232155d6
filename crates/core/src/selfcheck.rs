//! Every endpoint's own check, without a container in it: which test packets its programs are given, and what desired
//! state says of each.
//!
//! The list of cases is data: a case names the hook, the packet, the verdict, the reports and the bytes that must come
//! of it. Whoever adds a rule to the datapath adds its cases to [`cases`].

mod packet;

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use crate::{
    endpoint::EndpointRecord,
    ids::{EndpointId, MacAddr},
    kernel::ConfigSpec,
    nat::Protocol,
};

/// TTL and hop limit of test packets.
const TTL: u8 = 64;
/// Who speaks to an endpoint that has no gateway (RFC 5737, RFC 3849: nobody has these addresses).
const NOBODY4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const NOBODY6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);

/// The pinned program a packet is given to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Hook {
    /// What the container sends.
    FromContainer,
    /// What the node's stack sends to the container.
    ToContainer,
}

impl Hook {
    /// The program's name, which is its pin's.
    #[must_use]
    pub const fn program(self) -> &'static str {
        match self {
            Self::FromContainer => "from_container",
            Self::ToContainer => "to_container",
        }
    }
}

/// What a program tells its hook to do with a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// On through the node's stack, or out of it.
    Pass,
    /// Drop.
    Drop,
    /// To another interface.
    Redirect,
    /// Another number than this datapath uses.
    Other(u32),
}

impl Verdict {
    /// From what a program returned (`TC_ACT_*` of linux/pkt_cls.h).
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

/// What a case tries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// The container to its gateway.
    Honest,
    /// The container with an IP source that is not its own.
    FalseIp,
    /// The container with an Ethernet source that is not its own.
    FalseMac,
    /// The container asks who its gateway is; a chained endpoint asks for somebody on its link.
    Neighbour,
    /// A chained endpoint answers for an address that is not its own.
    FalseNeighbour,
    /// The node to the container.
    FromNode,
    /// The container to its own address: through the shared table to its own `deliver`.
    ToItself,
    /// The container to another endpoint of this node.
    ToPeer,
    /// What the endpoint's rules of policy say of a packet.
    Policy {
        /// The endpoint sends it.
        egress: bool,
        /// They let it pass.
        accept: bool,
    },
}

impl Kind {
    /// Name without the family.
    const fn name(self) -> &'static str {
        match self {
            Self::Honest => "to-gateway",
            Self::FalseIp => "false-source-ip",
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
    /// IPv4.
    Ipv4,
    /// IPv6.
    Ipv6,
}

/// What a program says it decided about a test packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Report {
    /// Whose program.
    pub endpoint: EndpointId,
    /// As in [`CounterRow`](crate::kernel::CounterRow).
    pub direction: &'static str,
    /// As in [`CounterRow`](crate::kernel::CounterRow).
    pub reason: &'static str,
}

/// Bytes that must stand in the packet as it leaves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Field {
    /// For people.
    pub name: &'static str,
    /// From the packet's start, bytes.
    pub offset: usize,
    /// As in the packet.
    pub bytes: Vec<u8>,
}

/// A packet, the program it is given to, and what must come of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    /// What it tries.
    pub kind: Kind,
    /// In which family.
    pub family: Family,
    /// The program.
    pub hook: Hook,
    /// The packet, from the Ethernet header on.
    pub packet: Vec<u8>,
    /// The verdict, exactly.
    pub verdict: Verdict,
    /// What the programs that see it report, egress before ingress.
    pub reports: Vec<Report>,
    /// The packet as it must leave; none for one that is dropped.
    pub fields: Vec<Field>,
}

/// What came of a case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// The verdict.
    pub verdict: Verdict,
    /// The packet as the program left it.
    pub packet: Vec<u8>,
    /// What the programs reported, egress before ingress.
    pub reports: Vec<Report>,
}

/// A case's outcome, or why its program could not be run. The text is part of the answer: it stands where an outcome
/// would, in `Judged::got`, and both kernels give it in their own words.
pub type CaseResult = Result<Outcome, String>;

/// Both sides of a case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Judged {
    /// Its name.
    pub name: String,
    /// What desired state says.
    pub expected: String,
    /// What the programs did.
    pub got: String,
    /// They are the same.
    pub same: bool,
}

/// The cases of an endpoint. `peer` is another live endpoint of the node, if there is one.
#[must_use]
pub fn cases(record: &EndpointRecord, config: &ConfigSpec, peer: Option<&EndpointRecord>) -> Vec<Case> {
    let maker = Maker { record };
    let mut cases = Vec::new();
    for own in record.addresses() {
        maker.of_family(own, peer, config, &mut cases);
    }
    if !config.live {
        // The gate comes before everything else.
        for case in &mut cases {
            let direction = if case.hook == Hook::FromContainer { EGRESS } else { INGRESS };
            case.verdict = Verdict::Drop;
            case.reports = vec![maker.report(direction, "endpoint-not-ready")];
            case.fields.clear();
        }
    }
    cases
}

/// A packet that the rules of an endpoint decide about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Probe {
    /// The endpoint sends it.
    pub egress: bool,
    /// Its other end.
    pub peer: IpAddr,
    /// Protocol; a test packet has no place for SCTP's.
    pub protocol: Protocol,
    /// Destination port.
    pub port: u16,
    /// The rules let it pass.
    pub accept: bool,
}

/// The cases of an endpoint's rules.
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

    /// From the container to the host side of its link.
    fn outward(&self) -> (MacAddr, MacAddr) {
        (self.record.host_mac, self.record.container_mac)
    }

    /// From the host side of a link to its container.
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
        // What reaches a chained endpoint has the addresses of its link already.
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

    /// What a chained endpoint says to its neighbours: a question in its own name, and an answer in another's; each with what it is counted as.
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

    /// A question for the gateway, and the answer.
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

/// A packet that must leave as it came.
fn whole(packet: &[u8]) -> Vec<Field> {
    vec![Field { name: "packet", offset: 0, bytes: packet.to_vec() }]
}

/// Names and ends of the fields of a packet, one after the other from its start.
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

/// An address that is not this one.
fn other_address(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(a) => IpAddr::V4(Ipv4Addr::from_bits(a.to_bits() ^ 1)),
        IpAddr::V6(a) => IpAddr::V6(Ipv6Addr::from_bits(a.to_bits() ^ 1)),
    }
}

/// A unicast MAC that is not this one.
fn other_mac(MacAddr([a, b, c, d, e, f]): MacAddr) -> MacAddr {
    MacAddr([a, b, c, d, e, f ^ 1])
}

impl Case {
    /// Its name: what it tries, and in which family.
    #[must_use]
    pub fn name(&self) -> String {
        let family = match self.family {
            Family::Ipv4 => "ipv4",
            Family::Ipv6 => "ipv6",
        };
        format!("{}-{family}", self.kind.name())
    }

    /// Compares what came of it with what had to.
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
        // Where a packet would go that policy lets pass is not asked.
        let passes = matches!(self.kind, Kind::Policy { accept: true, .. });
        let mut same = outcome.verdict == self.verdict && (passes || outcome.reports == self.reports);
        // Of a packet that had to go elsewhere the bytes say nothing more.
        if outcome.verdict == self.verdict
            && let Some(difference) = self.difference(&outcome.packet)
        {
            same = false;
            got.push_str(&difference);
        }
        (got, same)
    }

    /// What is wrong with the packet that left, in words that begin with `; `.
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

    /// `drop, egress invalid-source-ip`.
    fn told(&self, verdict: Verdict, reports: &[Report]) -> String {
        let mut text = verdict.to_string();
        // The endpoint that is checked: the first report of each case is its own.
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
