//! Compares a dump of the kernel and bpffs ([`KernelDump`]) with a snapshot of the store ([`Snapshot`]).
//! An object that is not provably Wharf's gets no repair.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::IpNet;

use wharf_names::mark::Mark;

use crate::{
    endpoint::{EndpointRecord, IpOwner, parse_host_ifname},
    finding::{EndpointProblem, Mender, NodeProblem, Problem},
    ids::{Attachment, EndpointId, Epoch, IfIndex, IfName},
    ipam::describe_owner,
    kernel::{EndpointTableRow, KernelDump, LinkRef, LinkRow, RouteRow},
    nat::NatEntry,
    state::Level,
    store::{Intent, Lease, LeaseOwner, OutOfService, Snapshot},
};

mod aside;
mod leaked;
mod missing;

/// A file of the deletion queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueFile {
    /// Name in the queue directory.
    pub name: String,
    pub age_ms: u64,
    /// None when the file is unreadable.
    pub owner: Option<String>,
    /// Why the file is unusable.
    pub problem: Option<String>,
}

/// Input of an audit.
#[derive(Debug, Clone, Copy)]
pub struct AuditView<'a> {
    /// The kernel and bpffs.
    pub dump: &'a KernelDump,
    /// Ids in the endpoints' program array.
    pub call_slots: &'a [u32],
    /// The store.
    pub snapshot: &'a Snapshot,
    /// Loaded in advance: pins without an endpoint.
    pub prepared: &'a BTreeSet<EndpointId>,
    /// Create or delete in flight; skipped.
    pub in_flight: &'a BTreeSet<EndpointId>,
    /// Each has an unreachable route.
    pub pool_cidrs: &'a [IpNet],
    pub router: [Option<IpAddr>; 2],
    /// As the kernel layer reports them.
    pub node: &'a [NodeProblem],
    /// The deletion queue's files.
    pub queue: &'a [QueueFile],
}

/// A repair; identifies its object unambiguously: late, it does no harm.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Repair {
    /// Remove a link. Its name has only the epoch's low half.
    RemoveLink(LinkRef),
    /// Remove all pins of an id.
    RemovePins(EndpointId),
    /// Remove an endpoint-table row with this epoch.
    RemoveEndpointRow(IpAddr, Epoch),
    /// Clear a program-array slot.
    RemoveCallSlot(u32),
    /// Remove an nftables entry that no endpoint has.
    RemoveNat(NatEntry),
    ReleaseLease(IpAddr),
    RemoveRoute(RouteRow),
    Regenerate(EndpointId, Level),
    /// Close an intent after removal of its orphans; detach its programs from another plugin's link.
    CloseIntent(EndpointId, Epoch, Option<Box<LinkRef>>),
    /// Create the node's missing objects.
    EnsureNode,
    /// Process the deletion queue.
    DrainQueue,
    /// Remove an unusable file of the deletion queue.
    RemoveQueueFile(String),
    /// Remove an address's stored rest.
    ForgetRest(IpAddr),
    /// Remove a record out of service, with objects and leases.
    ReleaseOutOfService(EndpointId),
}

impl Repair {
    /// For counts in a report.
    #[must_use]
    pub const fn in_words(&self) -> &'static str {
        match self {
            Self::RemoveLink(_) => "links removed",
            Self::RemovePins(_) => "program sets without an endpoint unpinned",
            Self::RemoveEndpointRow(..) => "rows of the table of endpoints removed",
            Self::RemoveCallSlot(_) => "slots of the program array emptied",
            Self::RemoveNat(_) => "entries of the table inet wharf without an endpoint taken back",
            Self::ReleaseLease(_) => "leases released",
            Self::RemoveRoute(_) => "routes removed",
            Self::Regenerate(..) => "findings regenerated away",
            Self::CloseIntent(..) => "intents closed",
            Self::EnsureNode => "findings of the node's own part mended",
            Self::DrainQueue => "deletion records worked off",
            Self::RemoveQueueFile(_) => "files of the deletion queue removed",
            Self::ForgetRest(_) => "addresses taken out of quarantine",
            Self::ReleaseOutOfService(_) => "records out of service released",
        }
    }
}

/// A difference, and its repair.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditFinding {
    pub problem: Problem,
    /// Owner or former owner, if known.
    pub owner: Option<String>,
    /// None for a foreign object, or if unknown.
    pub repair: Option<Repair>,
}

impl AuditFinding {
    /// With the regeneration that repairs it.
    #[must_use]
    pub fn of_endpoint(record: &EndpointRecord, problem: EndpointProblem) -> Self {
        let repair = match problem.mender() {
            Mender::Regeneration(level) => Some(Repair::Regenerate(record.id, level)),
            Mender::Container { regenerable: true } => Some(Repair::Regenerate(record.id, Level::Datapath)),
            Mender::Container { regenerable: false }
            | Mender::Repair
            | Mender::Removal
            | Mender::Nobody
            | Mender::Operator => None,
        };
        Self { problem: Problem::Endpoint(record.id, problem), owner: Some(describe_record(record)), repair }
    }
}

/// In every attach mode.
const REQUIRED_PINS: [&str; 6] = ["from_container", "to_container", "deliver", "CONFIG", "METRICS", "BANDWIDTH"];
/// Additional pins with tcx.
const LINK_PINS: [&str; 2] = ["link_from_container", "link_to_container"];

/// Orphans precede missing objects: repairs in this order keep the results of regenerations. Intents come last.
#[must_use]
pub fn audit(view: &AuditView<'_>) -> Vec<AuditFinding> {
    let auditor = Auditor::new(view);
    let mut findings = Vec::new();
    auditor.links(&mut findings);
    auditor.pins(&mut findings);
    auditor.endpoint_rows(&mut findings);
    auditor.call_slots(&mut findings);
    auditor.nat(&mut findings);
    auditor.routes(&mut findings);
    auditor.leases(&mut findings);
    auditor.rests(&mut findings);
    auditor.records_aside(&mut findings);
    auditor.queue_files(&mut findings);
    auditor.node(&mut findings);
    auditor.missing_pool_routes(&mut findings);
    for record in auditor.judged_records() {
        auditor.missing(record, &mut findings);
    }
    auditor.shared_addresses(&mut findings);
    auditor.intents(&mut findings);
    findings
}

/// Indexed: a node may hold thousands of endpoints.
struct Auditor<'a> {
    view: &'a AuditView<'a>,
    records: BTreeMap<EndpointId, &'a EndpointRecord>,
    /// Their kernel objects are no orphans.
    out_of_service: BTreeMap<EndpointId, &'a OutOfService>,
    addresses_out_of_service: BTreeSet<IpAddr>,
    unreadable: BTreeSet<EndpointId>,
    record_of_ifindex: BTreeMap<IfIndex, &'a EndpointRecord>,
    record_of_attachment: BTreeMap<(&'a Attachment, Epoch), &'a EndpointRecord>,
    /// Only from names that parse.
    link_ids: BTreeMap<IfIndex, EndpointId>,
    /// Only marks that agree with the link's name.
    marks: BTreeMap<(EndpointId, u32), Mark>,
    link_names: BTreeSet<&'a str>,
    pins: BTreeMap<EndpointId, &'a [String]>,
    rows: BTreeMap<IpAddr, &'a EndpointTableRow>,
    call_slots: BTreeSet<u32>,
    routes: BTreeSet<&'a RouteRow>,
    leases: BTreeMap<IpAddr, &'a Lease>,
}

impl<'a> Auditor<'a> {
    fn new(view: &'a AuditView<'a>) -> Self {
        let (dump, snapshot) = (view.dump, view.snapshot);
        let link_id = |link: &LinkRow| parse_host_ifname(&link.name).map(|(id, _)| (link.ifindex, id));
        let unreadable = snapshot.unreadable.iter().filter_map(|(key, ..)| EndpointId::try_from(*key).ok());
        let pins = |(directory, names): &'a (String, Vec<String>)| Some((directory.parse().ok()?, names.as_slice()));
        Self {
            view,
            records: snapshot.endpoints.iter().map(|r| (r.id, r)).collect(),
            out_of_service: snapshot.out_of_service.iter().map(|q| (q.id, q)).collect(),
            addresses_out_of_service: snapshot
                .out_of_service
                .iter()
                .flat_map(|q| q.addresses.iter().copied())
                .collect(),
            unreadable: unreadable.collect(),
            record_of_ifindex: snapshot.endpoints.iter().map(|r| (r.host_ifindex, r)).collect(),
            record_of_attachment: snapshot.endpoints.iter().map(|r| ((&r.attachment, r.epoch), r)).collect(),
            link_ids: dump.links.iter().filter_map(link_id).collect(),
            marks: dump.links.iter().filter_map(marked).collect(),
            link_names: dump.links.iter().map(|l| l.name.as_str()).collect(),
            pins: dump.pins.iter().filter_map(pins).collect(),
            rows: dump.endpoint_rows.iter().map(|r| (r.address, r)).collect(),
            call_slots: view.call_slots.iter().copied().collect(),
            routes: dump.routes.iter().collect(),
            leases: snapshot.leases.iter().map(|l| (l.ip, l)).collect(),
        }
    }

    fn in_flight(&self, id: EndpointId) -> bool {
        self.view.in_flight.contains(&id)
    }

    /// An operation is in flight, or another finding reports the record.
    fn is_unjudged(&self, id: EndpointId) -> bool {
        self.in_flight(id) || self.out_of_service.contains_key(&id) || self.is_unreadable(id)
    }

    /// Its objects are no orphans.
    fn is_unreadable(&self, id: EndpointId) -> bool {
        self.unreadable.contains(&id) && !self.records.contains_key(&id)
    }

    fn judged_records(&self) -> impl Iterator<Item = &'a EndpointRecord> {
        self.records.values().copied().filter(|r| !self.is_unjudged(r.id) && !self.is_going(r))
    }

    /// The open intent is reported.
    fn is_going(&self, record: &EndpointRecord) -> bool {
        let of = |(id, epoch, intent): &(EndpointId, Epoch, Intent)| {
            *id == record.id && *epoch == record.epoch && matches!(intent, Intent::Delete { .. })
        };
        self.view.snapshot.intents.iter().any(of)
    }

    /// `low`: low half of the orphan's epoch, if known.
    fn former_owner(&self, id: EndpointId, low: Option<u32>) -> Option<String> {
        let intended = self.view.snapshot.intents.iter().find_map(|(of, epoch, intent)| match intent {
            Intent::Create { attachment, .. } if *of == id && low.is_none_or(|low| low == low_half(*epoch)) => {
                Some(format!("{attachment} (epoch {epoch})"))
            }
            _ => None,
        });
        intended.or_else(|| self.mark(id, low).map(|m| format!("{} (epoch {})", in_words(m), m.epoch)))
    }

    /// Without an epoch: the mark of the id's only link.
    fn mark(&self, id: EndpointId, low: Option<u32>) -> Option<&Mark> {
        if let Some(low) = low {
            return self.marks.get(&(id, low));
        }
        let mut marks = self.marks.range((id, 0)..=(id, u32::MAX)).map(|(_, mark)| mark);
        marks.next().filter(|_| marks.next().is_none())
    }
}

/// Other processes may write aliases: mark and name must agree.
fn marked(link: &LinkRow) -> Option<((EndpointId, u32), Mark)> {
    let (id, low) = parse_host_ifname(&link.name)?;
    let mark = Mark::parse(link.alias.as_deref()?)?;
    (mark.id == id.get() && low_half(Epoch(mark.epoch)) == low).then_some(((id, low), mark))
}

fn in_words(mark: &Mark) -> String {
    match mark.attachment() {
        Some((network, container_id, ifname)) => format!("{network}/{container_id}:{ifname}"),
        None => mark.owner.clone(),
    }
}

fn is_row_of(row: &EndpointTableRow, record: &EndpointRecord) -> bool {
    row.endpoint_id == u32::from(record.id.get())
        && row.epoch == record.epoch
        && record.addresses().any(|a| a == row.address)
}

fn is_lease_of(lease: &Lease, record: &EndpointRecord) -> bool {
    match &lease.owner {
        LeaseOwner::Attachment { attachment, epoch } => {
            *attachment == record.attachment
                && *epoch == record.epoch
                && record.addresses().any(|address| address == lease.ip)
        }
        LeaseOwner::Caller { .. } | LeaseOwner::Node => false,
    }
}

fn describe_record(record: &EndpointRecord) -> String {
    format!("{} (endpoint {}, epoch {})", record.attachment, record.id, record.epoch)
}

/// Other processes may write to maps.
fn endpoint_id(n: u32) -> Option<EndpointId> {
    u16::try_from(n).ok().and_then(|n| EndpointId::try_from(n).ok())
}

/// As in the host side's name.
fn low_half(epoch: Epoch) -> u32 {
    u32::try_from(epoch.0 & 0xffff_ffff).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
