//! What the kernel, the bpffs and the store hold that does not match.
//!
//! A comparison of two pictures, nothing more: the one of the kernel ([`KernelDump`]) and the one of the store
//! ([`Snapshot`]). Both are taken while the node lives, so endpoints that are being created or deleted are not judged.
//! What is not provably ours is named and has no repair.

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
    state::Level,
    store::{Intent, Lease, LeaseOwner, OutOfService, Snapshot},
};

mod aside;
mod leaked;
mod missing;

/// A file of the deletion queue, as far as the audit wants to know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueFile {
    /// Its name in the queue's directory.
    pub name: String,
    /// How long ago it was written, milliseconds.
    pub age_ms: u64,
    /// The attachment whose delete it asks for, in words, where it can be read.
    pub owner: Option<String>,
    /// Why it is of no use; none when it can be read.
    pub problem: Option<String>,
}

/// What an audit looks at.
#[derive(Debug, Clone, Copy)]
pub struct AuditView<'a> {
    /// The kernel and the bpffs.
    pub dump: &'a KernelDump,
    /// The store.
    pub snapshot: &'a Snapshot,
    /// Ids whose programs were verified ahead of need: pins without an endpoint.
    pub prepared: &'a BTreeSet<EndpointId>,
    /// Ids that are being created or deleted now: not judged.
    pub in_flight: &'a BTreeSet<EndpointId>,
    /// Every CIDR of every pool; each has an unreachable route.
    pub pool_cidrs: &'a [IpNet],
    /// The node's router addresses.
    pub router: [Option<IpAddr>; 2],
    /// What is amiss with the node's own part, as the kernel layer sees it.
    pub node: &'a [NodeProblem],
    /// Files of the deletion queue.
    pub queue: &'a [QueueFile],
}

/// What mends a finding. Each names its object beyond doubt, so that one that comes late does no harm.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Repair {
    /// Remove a veth pair. Of its epoch only the low 32 bits may be known; the name carries those.
    RemoveLink(LinkRef),
    /// Unpin everything of an id.
    RemovePins(EndpointId),
    /// Remove a row of the endpoint table, if it is still of this epoch.
    RemoveEndpointRow(IpAddr, Epoch),
    /// Empty a slot of the program array.
    RemoveCallSlot(u32),
    /// Give a lease back.
    ReleaseLease(IpAddr),
    /// Remove a route.
    RemoveRoute(RouteRow),
    /// Regenerate the endpoint.
    Regenerate(EndpointId, Level),
    /// Close an intent, after everything of its id and epoch that has no record was removed.
    CloseIntent(EndpointId, Epoch),
    /// Put the node's own part in place.
    EnsureNode,
    /// Work off the deletion queue.
    DrainQueue,
    /// Remove a file of the deletion queue, by name, that is of no use.
    RemoveQueueFile(String),
    /// Forget that an address rests.
    ForgetRest(IpAddr),
    /// Remove what the kernel holds for a record that is out of service, give its addresses back and forget it.
    ReleaseOutOfService(EndpointId),
}

impl Repair {
    /// What it does, in words.
    #[must_use]
    pub const fn in_words(&self) -> &'static str {
        match self {
            Self::RemoveLink(_) => "links removed",
            Self::RemovePins(_) => "program sets without an endpoint unpinned",
            Self::RemoveEndpointRow(..) => "rows of the table of endpoints removed",
            Self::RemoveCallSlot(_) => "slots of the program array emptied",
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

/// Something that does not match.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditFinding {
    /// What.
    pub problem: Problem,
    /// Whom it belongs or belonged to, where that is known.
    pub owner: Option<String>,
    /// What mends it; none where nothing does, or where it is not ours to touch.
    pub repair: Option<Repair>,
}

impl AuditFinding {
    /// A problem of an endpoint, with what regenerates it away.
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

/// Names pinned for each endpoint, whatever the way its programs are attached.
const REQUIRED_PINS: [&str; 5] = ["from_container", "to_container", "deliver", "CONFIG", "METRICS"];
/// Names pinned besides where programs are attached by tcx links: both or, with clsact, neither.
const LINK_PINS: [&str; 2] = ["link_from_container", "link_to_container"];

/// Compares. Empty is healthy. What should not be there comes first and what is missing after it, so that repairs made
/// in this order do not take away again what a rebuild put in place; intents are closed last.
#[must_use]
pub fn audit(view: &AuditView<'_>) -> Vec<AuditFinding> {
    let auditor = Auditor::new(view);
    let mut findings = Vec::new();
    auditor.links(&mut findings);
    auditor.pins(&mut findings);
    auditor.endpoint_rows(&mut findings);
    auditor.call_slots(&mut findings);
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

/// A view, indexed: a node may hold thousands of endpoints.
struct Auditor<'a> {
    view: &'a AuditView<'a>,
    records: BTreeMap<EndpointId, &'a EndpointRecord>,
    /// Records out of service, by id, and their addresses: what there is of them is explained.
    out_of_service: BTreeMap<EndpointId, &'a OutOfService>,
    addresses_out_of_service: BTreeSet<IpAddr>,
    /// Ids under which the table of endpoints has a row that cannot be read.
    unreadable: BTreeSet<EndpointId>,
    record_of_ifindex: BTreeMap<IfIndex, &'a EndpointRecord>,
    record_of_attachment: BTreeMap<(&'a Attachment, Epoch), &'a EndpointRecord>,
    /// Endpoint id that a host side's name carries, by index; only names that parse.
    link_ids: BTreeMap<IfIndex, EndpointId>,
    /// Marks on host sides, by what their names carry; only marks that say what the name says.
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
            call_slots: dump.call_slots.iter().copied().collect(),
            routes: dump.routes.iter().collect(),
            leases: snapshot.leases.iter().map(|l| (l.ip, l)).collect(),
        }
    }

    fn in_flight(&self, id: EndpointId) -> bool {
        self.view.in_flight.contains(&id)
    }

    /// Not to be judged: something works on it, or its record is known to be amiss and is reported itself.
    fn is_unjudged(&self, id: EndpointId) -> bool {
        self.in_flight(id) || self.out_of_service.contains_key(&id) || self.is_unreadable(id)
    }

    /// A row of the table of endpoints that cannot be read explains what there is of its id, unless a record does.
    fn is_unreadable(&self, id: EndpointId) -> bool {
        self.unreadable.contains(&id) && !self.records.contains_key(&id)
    }

    fn judged_records(&self) -> impl Iterator<Item = &'a EndpointRecord> {
        self.records.values().copied().filter(|r| !self.is_unjudged(r.id) && !self.is_going(r))
    }

    /// Its delete has begun and could not finish: what is not there any more is not amiss. The open intent is told.
    fn is_going(&self, record: &EndpointRecord) -> bool {
        let of = |(id, epoch, intent): &(EndpointId, Epoch, Intent)| {
            *id == record.id && *epoch == record.epoch && matches!(intent, Intent::Delete { .. })
        };
        self.view.snapshot.intents.iter().any(of)
    }

    /// Who an object of which no record tells belonged to, as far as an open intent or the mark on a link says. `low` is
    /// what is known of its epoch.
    fn former_owner(&self, id: EndpointId, low: Option<u32>) -> Option<String> {
        let intended = self.view.snapshot.intents.iter().find_map(|(of, epoch, intent)| match intent {
            Intent::Create { attachment, .. } if *of == id && low.is_none_or(|low| low == low_half(*epoch)) => {
                Some(format!("{attachment} (epoch {epoch})"))
            }
            _ => None,
        });
        intended.or_else(|| self.mark(id, low).map(|m| format!("{} (epoch {})", in_words(m), m.epoch)))
    }

    /// The mark on a link of this id; where the epoch is not known, only if there is no other link of the id.
    fn mark(&self, id: EndpointId, low: Option<u32>) -> Option<&Mark> {
        if let Some(low) = low {
            return self.marks.get(&(id, low));
        }
        let mut marks = self.marks.range((id, 0)..=(id, u32::MAX)).map(|(_, mark)| mark);
        marks.next().filter(|_| marks.next().is_none())
    }
}

/// A link's mark, by what its name carries. Anyone with the right to may write an alias: it counts where it says what the
/// name says.
fn marked(link: &LinkRow) -> Option<((EndpointId, u32), Mark)> {
    let (id, low) = parse_host_ifname(&link.name)?;
    let mark = Mark::parse(link.alias.as_deref()?)?;
    (mark.id == id.get() && low_half(Epoch(mark.epoch)) == low).then_some(((id, low), mark))
}

/// Written as an attachment is, as far as the mark holds it.
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

/// A number from a map, which anyone with the right to write maps may have written.
fn endpoint_id(n: u32) -> Option<EndpointId> {
    u16::try_from(n).ok().and_then(|n| EndpointId::try_from(n).ok())
}

/// What a host side's name carries of an epoch.
fn low_half(epoch: Epoch) -> u32 {
    u32::try_from(epoch.0 & 0xffff_ffff).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
